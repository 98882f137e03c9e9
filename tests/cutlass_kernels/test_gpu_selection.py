# SPDX-License-Identifier: Apache-2.0
"""Scores, selection and prediction on a Hopper GPU, held against the reference."""

import itertools

import pytest
import torch

from cutlass_kernels import Selection, append_quest, infllm_scores, ops, predict, quest_scores, reference, select

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]

DEV = "cuda"
NAN, INF = float("nan"), float("inf")
BLOCK = 16
KINDS = ("random", "ties", "pairs", "equal", "zeros", "inf", "nan", "narrow", "negative", "few")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def lens(*tokens):
    return torch.tensor(tokens, dtype=torch.int32, device=DEV)


def oracle(op, *args):
    """The reference on CPU copies; returns the tensors after it."""
    copies = [x.cpu().clone() if isinstance(x, torch.Tensor) else x for x in args]
    getattr(reference, op)(*copies)
    return copies


def capture(run):
    """A CUDA graph of run()."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


# ---------------------------------------------------------------------------------------------------- quest_scores
def quest_problem(B, H, G, D, N, block, dtype, tokens):
    q = torch.randn(B, H * G, D, device=DEV).to(dtype)
    k = torch.randn(B, H, N, 4, D, device=DEV).to(dtype)
    kmin, kmax = k.amin(3), k.amax(3)
    seq = lens(*tokens)
    for b, n in enumerate(reference.num_blocks(seq, block).tolist()):
        kmin[b, :, n:] = NAN
        kmax[b, :, n:] = NAN
    return q, kmin, kmax, seq


def check_quest(got, q, kmin, kmax, seq, block):
    want = oracle("quest_scores", q, kmin, kmax, seq, block, False, torch.empty_like(got))[-1]
    assert torch.equal(torch.isinf(got).cpu(), torch.isinf(want))
    size = q.float().abs().mean() * q.shape[2]  # of the sums that are rounded
    finite = torch.isfinite(want)
    assert (got.cpu() - want)[finite].abs().max() <= 2e-6 * size if finite.any() else True
    assert not got.isnan().any()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("G", "D"), itertools.product((1, 3, 4, 5, 7, 8, 16), (64, 128)))
def test_quest_scores(G, D, dtype):
    B, H, N, block = 3, 2, 301, 16
    q, kmin, kmax, seq = quest_problem(B, H, G, D, N, block, dtype, (N * block - 3, 1000, 0))
    got = torch.full((B, H, N), NAN, device=DEV)
    quest_scores(q, kmin, kmax, seq, block, out=got)
    check_quest(got, q, kmin, kmax, seq, block)


@pytest.mark.parametrize("N", (1, 7, 128, 129, 2048, 8191))
def test_quest_scores_of_any_number_of_blocks(N):
    q, kmin, kmax, seq = quest_problem(2, 8, 4, 128, N, 64, torch.bfloat16, (N * 64, max(1, N * 32)))
    got = quest_scores(q, kmin, kmax, seq, 64)
    check_quest(got, q, kmin, kmax, seq, 64)
    for _ in range(3):
        assert torch.equal(got, quest_scores(q, kmin, kmax, seq, 64))


def test_quest_scores_replayed_longer():
    q, kmin, kmax, seq = quest_problem(2, 2, 16, 128, 700, 16, torch.bfloat16, (700 * 16, 700 * 16))
    seq.copy_(lens(40, 0))
    out = torch.empty(2, 2, 700, device=DEV)
    graph = capture(lambda: quest_scores(q, kmin, kmax, seq, 16, out=out))
    for tokens in ((40, 0), (9000, 17), (0, 700 * 16), (700 * 16, 5000)):
        seq.copy_(lens(*tokens))
        q.copy_(torch.randn_like(q))
        out.fill_(NAN)
        graph.replay()
        check_quest(out, q, kmin, kmax, seq, 16)


@pytest.mark.parametrize("T", (16, 64))
def test_quest_scores_behind_an_append_that_they_do_not_wait_for(T):
    """Layers that share q and lengths; the newest block is written right in front, in the first tile or a later one."""
    N, layers = 300, 3
    k, v = (torch.zeros(2, 2, N, T, 128, device=DEV).bfloat16() for _ in range(2))
    meta = torch.randn(2, layers, 2, 2, N, 128, device=DEV).bfloat16()
    new, qs = (torch.randn(layers, 2, h, 128, device=DEV).bfloat16() for h in (2, 8))
    q, seq, tokens = torch.empty_like(qs[0]), lens(1, 1), lens(N * T, 1)
    out = torch.empty(layers, 2, 2, N, device=DEV)

    def step():
        for i in range(layers):
            seq.copy_(tokens)
            q.copy_(qs[i])
            append_quest(new[i], new[i], k, v, *meta[:, i], seq)
            quest_scores(q, *meta[:, i], seq, T, out[i], early=True)

    graph = capture(step)
    edges = [(0, 1), (1, T), (T, T + 1), (2 * T, 2 * T + 1)]
    some = [torch.randint(0 if turn % 2 else N * T - 40, N * T + 1, (2,)) for turn in range(40)]
    for pair in [*map(torch.tensor, edges), *some]:
        tokens.copy_(pair)
        for x in (meta, new, qs):
            x.normal_()
        out.fill_(NAN)
        graph.replay()
        for i in range(layers):
            assert torch.equal(out[i], quest_scores(qs[i], *meta[:, i], seq, T))


# ---------------------------------------------------------------------------------------------------- infllm_scores
def infllm_problem(B, H, G, D, tokens, capacity, dtype, gain=1.0):
    q = (torch.randn(B, H * G, D, device=DEV) * gain).to(dtype)
    W1, W2 = capacity // 16, capacity // 64
    k1 = torch.randn(B, H, W1, D, device=DEV).to(dtype)
    k2 = torch.randn(B, H, W2, D, device=DEV).to(dtype)
    for b, n in enumerate(tokens):
        k1[b, :, max(0, (n - 32) // 16 + 1) :] = NAN
        k2[b, :, max(0, (n - 128) // 64 + 1) :] = NAN
    return q, k1, k2, lens(*tokens)


def check_infllm(got, want):
    want = want.to(got.device)
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    finite = torch.isfinite(want)
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("G", "D"), itertools.product((1, 3, 4, 5, 7, 8, 16), (64, 128)))
def test_infllm_scores(G, D, dtype):
    tokens = (2100, 700, 0, 129)
    q, k1, k2, seq = infllm_problem(4, 2, G, D, tokens, 2304, dtype)
    for exact in (False, True):
        args = (q, k1, k2, seq, D**-0.5, 64, 32, 16, 128, 64, exact)
        got = torch.full((4, 2, 36), NAN, device=DEV)
        infllm_scores(*args, out=got)
        check_infllm(got, oracle("infllm_scores", *args, torch.empty_like(got))[-1])
        assert torch.equal(got, infllm_scores(*args, out=torch.empty_like(got)))


@pytest.mark.parametrize("tokens", (1, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129, 143, 144, 160, 191, 192, 193))
def test_infllm_scores_of_short_rows(tokens):
    q, k1, k2, seq = infllm_problem(1, 2, 16, 128, (tokens,), 256, torch.bfloat16)
    for block, exact in itertools.product((16, 32, 64, 128, 256), (False, True)):
        args = (q, k1, k2, seq, 0.09, block, 32, 16, 128, 64, exact)
        got = torch.full((1, 2, 256 // block), NAN, device=DEV)
        infllm_scores(*args, out=got)
        check_infllm(got, oracle("infllm_scores", *args, torch.empty_like(got))[-1])


@pytest.mark.parametrize(("block", "window", "stride"), ((64, 32, 32), (64, 64, 16), (48, 48, 16), (256, 32, 16)))
def test_infllm_scores_of_other_windows(block, window, stride):
    tokens = (4000, 3111)
    q = torch.randn(2, 8, 64, device=DEV).half()
    k1 = torch.randn(2, 2, (4096 - window) // stride + 1, 64, device=DEV).half()
    k2 = torch.randn(2, 2, 62, 64, device=DEV).half()
    args = (q, k1, k2, lens(*tokens), 0.125, block, window, stride, 128, 64, False)
    got = torch.full((2, 2, -(-4096 // block)), NAN, device=DEV)
    infllm_scores(*args, out=got)
    check_infllm(got, oracle("infllm_scores", *args, torch.empty_like(got))[-1])


def test_infllm_scores_of_large_logits():
    q, k1, k2, seq = infllm_problem(1, 2, 16, 128, (3000,), 3072, torch.bfloat16, gain=6.0)
    args = (q, k1, k2, seq, 0.09, 64, 32, 16, 128, 64, True)
    got = infllm_scores(*args, num_blocks=48)
    want = oracle("infllm_scores", *args, torch.empty_like(got))[-1].to(DEV)
    assert torch.equal(torch.isinf(got), torch.isinf(want))
    finite = torch.isfinite(want)
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-3, atol=1e-30)


def test_infllm_scores_of_a_long_row():
    q, k1, k2, seq = infllm_problem(1, 2, 16, 128, (131072 - 5,), 131072, torch.bfloat16)
    for exact in (False, True):
        args = (q, k1, k2, seq, 0.09, 64, 32, 16, 128, 64, exact)
        got = infllm_scores(*args, num_blocks=2048)
        want = torch.empty_like(got)
        reference.infllm_scores(*args, want)
        check_infllm(got, want)


@pytest.mark.parametrize(("G", "D"), ((16, 128), (4, 64)))
def test_infllm_scores_of_more_rows_than_the_device_holds_tiles_of(G, D):
    """A CTA makes several tiles of its row; some rows end in its first tile, in a later one, or before all."""
    tokens = (32768, 32001, 20000, 8100, 4033, 300, 64, 0)
    q, k1, k2, seq = infllm_problem(8, 16, G, D, tokens, 32768, torch.bfloat16)
    for exact in (False, True):
        args = (q, k1, k2, seq, D**-0.5, 64, 32, 16, 128, 64, exact)
        got = torch.full((8, 16, 512), NAN, device=DEV)
        infllm_scores(*args, out=got)
        want = torch.empty_like(got)
        reference.infllm_scores(*args, want)
        check_infllm(got, want)


def test_infllm_scores_without_a_window():
    """A cache too short for one: nothing is read."""
    q, k1, k2, seq = infllm_problem(1, 2, 4, 64, (30,), 0, torch.bfloat16)
    got = infllm_scores(q, k1, k2, seq, 0.125, 64, 32, 16, 128, 64, out=torch.full((1, 2, 1), NAN, device=DEV))
    assert bool((got == -torch.inf).all())


def test_infllm_scores_replayed_longer():
    q, k1, k2, seq = infllm_problem(2, 2, 4, 128, (8192, 8192), 8192, torch.bfloat16)
    k1.nan_to_num_(0.5)
    k2.nan_to_num_(0.5)
    out = torch.empty(2, 2, 128, device=DEV)
    seq.copy_(lens(40, 0))
    call = (q, k1, k2, seq, 0.09, 64, 32, 16, 128, 64, False)
    graph = capture(lambda: infllm_scores(*call, out=out))
    for tokens in ((40, 0), (100, 8192), (8192, 130), (5000, 31)):
        seq.copy_(lens(*tokens))
        k1.copy_(torch.randn_like(k1))
        out.fill_(NAN)
        graph.replay()
        check_infllm(out, oracle("infllm_scores", *call, out)[-1])


# ---------------------------------------------------------------------------------------------------- select
def rows(kind, B, H, N):
    s = torch.randn(B, H, N, device=DEV)
    draw = torch.rand(B, H, N, device=DEV)
    if kind == "ties":
        s = (s * 4).round()
    elif kind == "pairs":  # neighbours share a score, as blocks that share a window do
        s = s.repeat_interleave(2, 2)[..., :N].contiguous()
    elif kind == "equal":
        s.fill_(3.25)
    elif kind == "zeros":
        s = torch.where(draw < 0.5, 0.0, -0.0)
    elif kind == "inf":
        s = torch.where(draw < 0.2, INF, torch.where(draw > 0.7, -INF, s))
    elif kind == "nan":
        s = torch.where(draw < 0.3, NAN, s)
    elif kind == "narrow":
        s = 1000.0 + s * 1e-3
    elif kind == "negative":
        s = -s.abs() - 5.0
    elif kind == "few":
        s = torch.where(draw < 0.02, s, -INF)
    return s


def beyond_is_nan(scores, seq):
    for b, n in enumerate(reference.num_blocks(seq, BLOCK).tolist()):
        scores[b, :, n:] = NAN
    return scores


def poisoned(B, H, K):
    """Buffers whose every element select must write."""
    return Selection(*(torch.full_like(x, -77) for x in Selection.empty(B, H, K, DEV)))


def check_select(scores, seq, K, sink=0, local=1, predicted=None):
    B, H, _ = scores.shape
    out = poisoned(B, H, K)
    select(scores, seq, BLOCK, K, sink, local, predicted, out)
    P = torch.empty(B, H, 0, dtype=torch.int32) if predicted is None else predicted
    want = oracle("select", scores, seq, BLOCK, sink, local, P, *out)[-4:]
    for name, got, expected in zip(Selection._fields, out, want, strict=True):
        assert torch.equal(got.cpu(), expected), f"{name} differs in {(got.cpu() != expected).sum()} places"
    return out


def ragged(N):
    return lens(N * BLOCK, max(1, N * BLOCK - 37), 0, max(1, N * BLOCK // 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("N", (1, 7, 60, 2048, 4000, 8191, 12000, 32768, 65536))
def test_select(N, kind):
    seq = ragged(N)
    scores = beyond_is_nan(rows(kind, 4, 2, N), seq)
    predicted = torch.randint(0, N, (4, 2, 1), device=DEV, dtype=torch.int32)
    for K in (1, 64, 256):
        check_select(scores, seq, K, predicted=predicted)


@pytest.mark.parametrize("N", (7, 513, 2048, 9000, 32768))
def test_select_of_every_size_of_k(N):
    seq = lens(N * BLOCK, N * BLOCK - 5)
    scores = rows("pairs", 2, 2, N)
    for K in {0, 1, 2, 3, 64, 257, 512, N - 1, N, N + 1}:
        check_select(scores, seq, K)


@pytest.mark.parametrize("rule", ((0, 0), (1, 0), (0, 2), (1, 33), (5, 27), (32, 32)))
def test_select_forces_blocks(rule):
    for N in (30, 64, 65, 66, 1000, 20000):
        scores = rows("random", 4, 2, N)
        scores[..., : N // 2] = -INF
        scores[..., -3:] = NAN
        for K in (max(1, sum(rule)), 64, 100):
            if sum(rule) <= K:
                check_select(scores, ragged(N), K, *rule)


def test_select_when_the_cut_falls_into_ties():
    for N, K in ((2048, 64), (8192, 64), (32768, 256), (65536, 512)):
        for kind in ("equal", "ties", "zeros", "pairs"):
            seq = ragged(N)
            scores = beyond_is_nan(rows(kind, 4, 2, N), seq)
            predicted = torch.stack([torch.randperm(N, device=DEV)[:300] for _ in range(8)]).view(4, 2, 300).int()
            check_select(scores, seq, K, 1, 2, predicted)


@pytest.mark.parametrize("relation", ("equal", "subset", "superset", "disjoint", "empty", "padding", "shuffled"))
@pytest.mark.parametrize(("N", "K"), ((200, 64), (2048, 64), (8192, 256), (32768, 256), (32768, 512)))
def test_select_against_p(N, K, relation):
    seq = lens(N * BLOCK, N * BLOCK * 2 // 3, 0, 5 * BLOCK)
    scores = rows("random", 4, 2, N)
    A = check_select(scores, seq, K, 1, 2).ids
    width = {"superset": 2 * K + 700, "disjoint": K // 2}.get(relation, K)
    P = torch.full((4, 2, width), -1, dtype=torch.int32, device=DEV)
    for b, h in itertools.product(range(4), range(2)):
        ids = A[b, h][A[b, h] >= 0]
        others = torch.ones(N, dtype=torch.bool, device=DEV)
        others[ids.long()] = False
        others = others.nonzero()[:, 0].int()
        pick = {
            "equal": ids,
            "subset": ids[::3],
            "superset": torch.cat((ids, others[:700])).sort().values,
            "disjoint": others[: K // 2],
            "empty": ids[:0],
            "padding": ids[1::2],
            "shuffled": ids[torch.randperm(len(ids), device=DEV)],
        }[relation]
        if relation == "padding":  # holes between the ids
            P[b, h, 1 : 2 * len(pick) : 2] = pick
        else:
            P[b, h, : len(pick)] = pick
    out = check_select(scores, seq, K, 1, 2, P)
    if relation in ("equal", "superset", "shuffled"):
        assert (out.counts[..., 1] == 0).all()
    if relation in ("disjoint", "empty"):
        assert torch.equal(out.missed, out.ids)


def test_select_replayed_longer_with_other_scores():
    N, K = 9000, 256
    seq, scores = lens(40, 0), rows("random", 2, 2, N)
    P = torch.full((2, 2, 300), -1, dtype=torch.int32, device=DEV)
    out = poisoned(2, 2, K)
    graph = capture(lambda: select(scores, seq, BLOCK, K, 1, 4, P, out))
    for tokens in ((40, 0), (N * BLOCK, 77), (1, N * BLOCK - 9), (3000, 5000)):
        seq.copy_(lens(*tokens))
        scores.copy_(rows("pairs", 2, 2, N))
        P.copy_(torch.randint(-1, N, P.shape, device=DEV).sort(2).values)
        keep = P.clone()
        keep[..., 1:][keep[..., 1:] == keep[..., :-1]] = -1
        P.copy_(keep)
        for x in out:
            x.fill_(-77)
        graph.replay()
        want = oracle("select", scores, seq, BLOCK, 1, 4, P, *out)[-4:]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(out, want, strict=True))


def test_select_gives_the_same_bits_again():
    scores = rows("pairs", 4, 8, 32768)
    P = torch.arange(0, 32768, 64, dtype=torch.int32, device=DEV).expand(4, 8, -1).contiguous()
    first = select(scores, ragged(32768), BLOCK, 256, 1, 4, P)
    for _ in range(20):
        again = select(scores, ragged(32768), BLOCK, 256, 1, 4, P)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_select_of_rows_that_are_not_aligned():
    for N in (8191, 32766):
        scores = torch.randn(2 * 2 * N + 1, device=DEV)[1:].view(2, 2, N)
        check_select(scores, lens(N * BLOCK, N * BLOCK - 100), 64)


def test_select_says_how_many_blocks_it_serves():
    with pytest.raises(NotImplementedError, match="number of blocks 65537"):
        select(torch.randn(1, 1, 65537, device=DEV), lens(10), BLOCK, 4)


# ---------------------------------------------------------------------------------------------------- predict
def state(B, H, N):
    return torch.full((B, H, N), NAN, device=DEV), torch.full((B, H, N), 11.0, device=DEV)


@pytest.mark.parametrize("N", (1, 60, 2048, 8191, 32768))
def test_predict_over_many_steps(N):
    B, H, P, sink, local = 3, 2, 96, 1, 2
    level, trend = state(B, H, N)
    theta = torch.tensor([[0.2, 0.5, 0.75], [0.8, 0.1, 0.0], [0.5, 0.3, 1.0]], device=DEV)
    cpu = level.cpu(), trend.cpu()
    seq = lens(max(1, N * BLOCK - 150), max(1, N * BLOCK // 2), 0)
    for step in range(24):
        scores = rows(KINDS[step % len(KINDS)], B, H, N)
        out = torch.full((B, H, P), -77, dtype=torch.int32, device=DEV)
        predict(scores, level, trend, theta, seq, BLOCK, sink, local, out)
        reference.predict(
            scores.cpu(), *cpu, theta.cpu(), seq.cpu(), BLOCK, sink, local, torch.empty(B, H, P, dtype=torch.int32)
        )
        for got, want in zip((level, trend), cpu, strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=0, equal_nan=True)
        following = torch.where(seq > 0, seq + 1, 0).cpu()
        want = torch.empty(B, H, P, dtype=torch.int32)
        value = level.cpu() + theta[:, 2, None, None].cpu() * trend.cpu()
        reference.top_blocks(value, following, BLOCK, sink, local, want)
        assert torch.equal(out.cpu(), want)
        seq.add_((seq > 0).int() * 5)
        seq.clamp_(max=N * BLOCK)


def test_predict_with_alpha_1_and_gamma_0_is_the_last_scores():
    N, K = 5000, 128
    level, trend = state(2, 2, N)
    theta = torch.tensor([[1.0, 0.3, 0.0]], device=DEV).expand(2, 3).contiguous()
    seq = lens(N * BLOCK - 1, 30003)  # the next token opens no block
    P = torch.empty(2, 2, K, dtype=torch.int32, device=DEV)
    for _ in range(5):
        scores = beyond_is_nan(rows("random", 2, 2, N), seq)
        predict(scores, level, trend, theta, seq, BLOCK, 1, 2, P)
        assert torch.equal(level[0], scores[0])
        assert torch.equal(P, select(scores, seq, BLOCK, K, 1, 2).ids)


def test_predict_scores_that_are_not_finite_change_nothing():
    level, trend = torch.randn(1, 2, 300, device=DEV), torch.randn(1, 2, 300, device=DEV)
    before = level.clone(), trend.clone()
    scores = torch.tensor([NAN, INF, -INF], device=DEV).repeat(200).view(1, 2, 300)
    theta = torch.tensor([[0.5, 0.5, 0.5]], device=DEV)
    out = torch.empty(1, 2, 10, dtype=torch.int32, device=DEV)
    predict(scores, level, trend, theta, lens(300 * BLOCK), BLOCK, 1, 1, out)
    assert torch.equal(level, before[0])
    assert torch.equal(trend, before[1])


def test_predict_replayed_as_the_row_grows():
    N, P = 3000, 96
    level, trend = state(2, 2, N)
    theta = torch.tensor([[0.4, 0.3, 0.5], [0.2, 0.5, 0.25]], device=DEV)
    seq, scores = lens(17, 0), torch.zeros(2, 2, N, device=DEV)
    out = torch.full((2, 2, P), -77, dtype=torch.int32, device=DEV)
    graph = capture(lambda: predict(scores, level, trend, theta, seq, BLOCK, 1, 2, out))
    level.fill_(NAN)
    cpu = level.cpu(), trend.cpu()
    for step in range(8):
        seq.copy_(lens(16 + step, 600 * 16 * step))
        scores.copy_(beyond_is_nan(rows("random", 2, 2, N), seq))
        out.fill_(-77)
        graph.replay()
        want = torch.empty(2, 2, P, dtype=torch.int32)
        reference.predict(scores.cpu(), *cpu, theta.cpu(), seq.cpu(), BLOCK, 1, 2, want)
        assert torch.equal(out.cpu(), want)
        torch.testing.assert_close(level.cpu(), cpu[0], rtol=1e-6, atol=0, equal_nan=True)


def test_ops_are_checked_by_opcheck():
    scores, seq = rows("random", 2, 2, 100), ragged(100)[:2].contiguous()
    P = torch.empty(2, 2, 0, dtype=torch.int32, device=DEV)
    out = Selection.empty(2, 2, 8, DEV)
    torch.library.opcheck(ops.OPS["select"], (scores, seq, BLOCK, 1, 1, P, *out), test_utils="test_schema")
