# SPDX-License-Identifier: Apache-2.0
"""rank_infllm on a Hopper GPU: its scores against the reference, its selection against select of the scores it wrote.

What is not written is NaN: windows that are not complete, what stands around the windows, and all outputs.
"""

import itertools

import pytest
import torch
from attention_cases import needs_sm90
from capture import captured
from rooms import Rooms

import cutlass_kernels as ck
from cutlass_kernels import reference

pytestmark = needs_sm90

NAN, INF = float("nan"), float("inf")
DEFAULT = (64, 32, 16, 128, 64)  # block, window, stride, coarse window and stride


def lens(*tokens):
    return torch.tensor(tokens, dtype=torch.int32, device="cuda")


def counted(tokens, capacity, window, stride):
    """Windows of a capacity, and how many of them are complete in each row."""
    full = lambda n: max(0, (n - window) // stride + 1)
    return full(capacity), [full(n) for n in tokens]


def fill(means, counts):
    """Random windows, NaN where they are not complete."""
    for b, n in enumerate(counts):
        means[b, :, :n] = torch.randn_like(means[b, :, :n], dtype=torch.float32).to(means.dtype)
        means[b, :, n:] = NAN
    return means


def problem(tokens, capacity, H=2, G=16, D=128, sizes=DEFAULT, dtype=torch.bfloat16, seed=0):
    """Queries, k1, k2 and lengths."""
    torch.manual_seed(seed)
    made = []
    for window, stride in (sizes[1:3], sizes[3:5]):
        W, counts = counted(tokens, capacity, window, stride)
        made.append(fill(torch.empty(len(tokens), H, W, D, device="cuda", dtype=dtype), counts))
    q = torch.randn(len(tokens), H * G, D, device="cuda").to(dtype)
    return q, *made, lens(*tokens)


def outputs(B, H, N, K):
    chosen = ck.Selection.empty(B, H, K, "cuda")
    return torch.full((B, H, N), NAN, device="cuda"), ck.Selection(*(torch.full_like(x, -77) for x in chosen))


def some_p(B, H, N, P):
    """Distinct blocks in any order, holes between them."""
    ids = torch.stack([torch.randperm(N + 5, device="cuda")[:P] for _ in range(B * H)]).view(B, H, -1).int()
    return torch.where(ids < N, ids, -1)


def check_scores(scores, asked, exact, sizes):
    q, k1, k2, seq = (x.cpu() for x in asked)
    want = torch.empty(scores.shape)
    reference.infllm_scores(q, k1, k2, seq, q.shape[2] ** -0.5, *sizes, exact, want)
    want = want.cuda()
    assert not scores.isnan().any()
    assert torch.equal(torch.isinf(scores), torch.isinf(want))
    finite = torch.isfinite(want)
    torch.testing.assert_close(scores[finite], want[finite], rtol=1e-4, atol=1e-30)


def check(asked, N, K=24, sink=0, local=1, exact=False, sizes=DEFAULT, P=None, again=True):
    """One call, held against the reference and against select; the same bits when it is called again."""
    q, k1, _, seq = asked
    B, H = q.shape[0], k1.shape[1]
    scores, out = outputs(B, H, N, K)
    rule = (K, sink, local, *sizes, exact, P)
    ck.rank_infllm(*asked, q.shape[2] ** -0.5, scores, *rule, out)
    check_scores(scores, asked, exact, sizes)
    wanted = outputs(B, H, N, K)[1]
    ck.select(scores, seq, sizes[0], K, sink, local, P, wanted)
    for name, got, want in zip(out._fields, out, wanted, strict=True):
        assert torch.equal(got, want), f"{name} differs in {int((got != want).sum())} places"
    if again:
        more = outputs(B, H, N, K)
        ck.rank_infllm(*asked, q.shape[2] ** -0.5, more[0], *rule, more[1])
        assert torch.equal(scores, more[0]) and all(torch.equal(a, b) for a, b in zip(out, more[1], strict=True))
    return scores, out


@pytest.mark.parametrize("exact", (False, True), ids=("coarse", "exact"))
def test_ragged_rows(exact):
    """0, 1 and a few tokens, less than a window or a coarse one, edges of blocks, the capacity."""
    capacity = 4096
    for tokens in ((0, 1, 31), (32, 33, 127), (128, 129, 191), (64, 65, 4033), (capacity, capacity - 1, 700)):
        check(problem(tokens, capacity), capacity // 64, exact=exact, P=some_p(3, 2, 64, 30))


@pytest.mark.parametrize(("G", "D"), tuple(itertools.product((1, 4, 7, 8, 9, 16), (64, 128))))
def test_groups_and_heads(G, D):
    dtype = (torch.bfloat16, torch.float16)[(G + D // 64) % 2]
    for exact in (False, True):
        check(problem((2100, 700), 2304, G=G, D=D, dtype=dtype), 36, exact=exact, P=some_p(2, 2, 36, 12))


@pytest.mark.parametrize(
    ("tokens", "H", "G", "D"),
    (
        ((32 * 1024 - 7,), 2, 16, 128),
        ((72 * 1024 - 9,), 2, 16, 128),  # as many as fit
        ((74 * 1024 - 9,), 2, 16, 128),  # more
        ((64 * 1024 - 5,), 4, 8, 128),
        ((64 * 1024 - 5,), 8, 4, 128),
        ((128 * 1024, 3), 2, 4, 64),
        ((32 * 1024, 20000, 0, 128), 4, 4, 128),  # a CTA on almost every SM
        ((300 * 1024,), 2, 16, 128),  # does not fit
        ((4096,) * 9, 4, 4, 64),  # neither do so many rows
    ),
)
def test_long_rows(tokens, H, G, D):
    capacity = -(-max(tokens) // 2048) * 2048
    asked, N = problem(tokens, capacity, H, G, D), capacity // 64
    for exact in (False, True):
        check(asked, N, K=64, sink=1, local=33, exact=exact, P=some_p(len(tokens), H, N, 96))


@pytest.mark.parametrize("per_block", (1, 2, 4, 8))
@pytest.mark.parametrize("reach", (0, 1, 3))
def test_windows_of_other_sizes(per_block, reach):
    sizes, N = (16 * per_block, 16 * (reach + 1), 16, 96, 48), (5, 61, 200)[(per_block + reach) % 3]
    for tokens in ((N * sizes[0] - 3, N * sizes[0] // 2 + 5), (sizes[0], 3 * sizes[0] + 1)):
        asked = problem(tokens, N * sizes[0], G=4, D=64, sizes=sizes, dtype=torch.float16)
        for exact in (False, True):
            check(asked, N, K=4, exact=exact, sizes=sizes, P=some_p(2, 2, N, 3))


@pytest.mark.parametrize("rule", ((0, 0), (1, 0), (0, 2), (1, 33), (32, 32)))
def test_forced_blocks_and_budgets_around_the_number_of_blocks(rule):
    for blocks in (3, 34, 63, 64, 65, 150):
        asked = problem((blocks * 64, blocks * 64 - 60), 150 * 64)
        for K in {max(1, sum(rule)), 64, blocks - 1, blocks, blocks + 1, 200}:
            if sum(rule) <= K:
                check(asked, 150, K, *rule, P=some_p(2, 2, blocks, 40), again=False)


def test_without_a_block_to_take_or_a_prediction():
    asked = problem((5000, 70), 8192)
    for P in (None, some_p(2, 2, 128, 0), some_p(2, 2, 128, 1), some_p(2, 2, 128, 133)):
        for K, local in ((0, 0), (1, 1), (64, 1)):
            check(asked, 128, K, 0, local, P=P)


def test_ties_go_to_the_lowest_id():
    """All windows are the same; then pairs of blocks are, and the cut falls into a pair."""
    q, k1, k2, seq = problem((30000, 9000), 32768)
    ones = [x.clone() for x in (k1, k2)]
    for x in ones:
        x[~x.isnan()] = 0.5
    for K in (7, 64, 65):
        check((q, *ones, seq), 512, K, 1, 2, P=some_p(2, 2, 512, 90))
    pairs = k1[:, :, ::8].repeat_interleave(8, 2)[:, :, : k1.shape[2]].contiguous()
    pairs[k1.isnan()] = NAN
    for K in (8, 9, 64, 65):
        check((q, pairs, k2, seq), 512, K, 1, 2, P=some_p(2, 2, 512, 90))


@pytest.mark.parametrize("N", (33, 61, 62, 63, 64))
def test_scores_of_any_capacity(N):
    """More blocks than windows reach; rows of scores that are no vectors."""
    check(problem((33 * 64 - 5, 100), 33 * 64), N, K=8, P=some_p(2, 2, N, 9))


def test_windows_beyond_the_blocks_count_for_the_normaliser():
    check(problem((4096, 4000), 4096), 32, K=8, exact=True)


def test_a_cache_without_a_coarse_window_or_any():
    for capacity in (100, 64, 20):
        check(problem((capacity, capacity - 19), capacity), 2, K=1)


def test_queries_of_one_sequence():
    q, k1, k2, _ = problem((4000,) * 3, 4096)
    seq, N, K = lens(4000, 2000, 100), 64, 9
    found = []
    for windows in ((k1[:1], k2[:1]), (k1[:1].expand_as(k1).contiguous(), k2[:1].expand_as(k2).contiguous())):
        scores, out = outputs(3, 2, N, K)
        ck.rank_infllm(q, *windows, seq, 0.09, scores, K, out=out)
        found.append((scores, *out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_row_s_bits_depend_on_no_other_row():
    """Nor on windows that are not complete yet."""
    q, k1, k2, seq = problem((9000, 9000), 16384)
    first = check((q, k1, k2, seq), 256)[0][0].clone()
    for n in (0, 40, 5000, 16384):
        seq[1] = n
        scores, out = outputs(2, 2, 256, 24)
        ck.rank_infllm(q, k1.nan_to_num(3.0), k2.nan_to_num(-3.0), seq, 128**-0.5, scores, 24, out=out)
        assert torch.equal(scores[0], first)


def test_nothing_around_the_windows_is_read():
    for tokens, capacity in (((8190, 5000), 8192), ((73728,), 73728)):
        rooms = Rooms()
        *given, seq = problem(tokens, capacity)
        check((*(rooms.inside(x) for x in given), seq), capacity // 64, P=some_p(len(tokens), 2, capacity // 64, 50))
        assert rooms.edges_untouched()


@pytest.mark.parametrize("capacity", (32768, 73728, 131072))
def test_replayed_with_other_lengths_windows_and_predictions(capacity):
    """Behind an append, in front of attention over P and a repair, layer upon layer: launches overlap."""
    layers, B, H, G, N, K, wide = 3, 1, 2, 16, capacity // 64, 64, 96
    made = [problem((0,) * B, capacity, H, G, seed=i) for i in range(layers)]
    seq, tokens = lens(*(1,) * B), lens(*(1,) * B)
    new = torch.randn(B, H, 128, device="cuda").bfloat16()
    k, v = (torch.randn(B, H, N, 64, 128, device="cuda").bfloat16() for _ in range(2))
    P = torch.full((layers, B, H, wide), -1, dtype=torch.int32, device="cuda")
    found = [outputs(B, H, N, K) for _ in range(layers)]
    o = torch.empty(B, H, wide, G, 128, device="cuda")
    lse = torch.empty(B, H, wide, G, device="cuda")
    outs = [(torch.empty_like(made[0][0]), torch.empty(B, H * G, device="cuda")) for _ in range(layers)]

    def step():
        seq.copy_(tokens)
        for i, (q, k1, k2, _) in enumerate(made):
            scores, chosen = found[i]
            ck.append_infllm(new, new, k, v, k1, k2, seq)
            ck.rank_infllm(q, k1, k2, seq, 0.09, scores, K, 1, 33, predicted=P[i], out=chosen)
            ck.attend(q, k, v, P[i], seq, 0.09, out=(o, lse), beside=True)
            ck.repair(q, k, v, chosen, o, lse, seq, 0.09, out=outs[i])

    graph, _ = captured(step)
    gen = torch.Generator().manual_seed(capacity)
    edges = [0, 1, 32, 64, 128, 129, 8192, capacity]
    for n in (*edges, *torch.randint(1, capacity + 1, (12,), generator=gen).tolist()):
        tokens.fill_(n)
        for i, (q, k1, k2, _) in enumerate(made):
            q.normal_()
            for x, (window, stride) in ((k1, (32, 16)), (k2, (128, 64))):
                fill(x, counted((n - 1,) * B, capacity, window, stride)[1])  # the token completes the others
            P[i] = some_p(B, H, max(1, -(-n // 64)), wide)[..., :wide] if n > 64 * wide else -1
            for x in (found[i][0], outs[i][0]):
                x.fill_(NAN)
            for x in found[i][1]:
                x.fill_(-77)
        graph.replay()
        for i, (q, k1, k2, _) in enumerate(made):
            scores, chosen = found[i]
            again = outputs(B, H, N, K)
            ck.rank_infllm(q, k1, k2, seq, 0.09, again[0], K, 1, 33, predicted=P[i], out=again[1])
            torch.cuda.synchronize()
            assert torch.equal(scores, again[0]) and all(map(torch.equal, chosen, again[1]))
            wanted = ck.select(scores, seq, 64, K, 1, 33, predicted=P[i])
            assert all(map(torch.equal, chosen, wanted))
            serial = ck.merge(*ck.attend(q, k, v, chosen.ids, seq, 0.09), tuple(map(torch.empty_like, outs[i])))
            assert torch.equal(outs[i][0], serial[0]) and torch.equal(outs[i][1], serial[1])
        if capacity == 32768:
            q, k1, k2, _ = made[0]
            want = torch.empty_like(found[0][0])
            reference.infllm_scores(q, k1, k2, seq, 0.09, *DEFAULT, False, want)
            assert torch.equal(torch.isinf(found[0][0]), torch.isinf(want))
            torch.testing.assert_close(found[0][0], want, rtol=1e-4, atol=1e-30)
