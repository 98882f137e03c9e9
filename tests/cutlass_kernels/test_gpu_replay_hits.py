# SPDX-License-Identifier: Apache-2.0
"""Calibration on a Hopper GPU: candidates against the reference, and scores of many queries of one sequence."""

import pytest
import torch

from cutlass_kernels import infllm_scores, quest_scores, reference, replay_hits
from cutlass_kernels.templates import replay_hits as template

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (SM90)")]

DEV = "cuda"
NAN, INF = float("nan"), float("inf")
KINDS = ("random", "ties", "equal", "zeros", "negative", "steep", "tiny", "huge", "gaps", "few", "infinite")


def window(kind, L, W, H, N, block, tokens, seed=0):
    """Slowly changing scores [L, W, H, N], -inf beyond the sequence, which has `tokens` at the last row."""
    gen = torch.Generator(DEV).manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=gen, device=DEV)
    scores = draw(L, W, H, N).cumsum(1) * 0.3 + draw(L, 1, H, N)
    dice = torch.rand(scores.shape, generator=gen, device=DEV)
    if kind == "ties":
        scores.round_()
    elif kind in ("equal", "zeros"):
        scores.fill_(1.5 if kind == "equal" else 0.0)
    elif kind == "negative":
        scores.sub_(100)
    elif kind == "steep":
        scores.mul_(8).exp_()
    elif kind in ("tiny", "huge"):
        scores.mul_(1e-38 if kind == "tiny" else 3e37)
    elif kind in ("gaps", "few"):
        share = 0.1 if kind == "gaps" else 0.49
        scores.masked_fill_(dice < share, -INF).masked_fill_(dice > 1 - share, NAN)
    elif kind == "infinite":
        scores.masked_fill_(dice < 0.02, INF)
    lens = torch.arange(tokens - W + 1, tokens + 1, dtype=torch.int32, device=DEV)
    inside = torch.arange(N, device=DEV) * block < lens[:, None]
    return scores.masked_fill_(~inside[:, None], -INF), lens


def check(scores, lens, theta, widths, *rule):
    got = replay_hits(scores, lens, theta, widths, *rule)
    want = [torch.empty_like(x, device="cpu") for x in got]
    dense_len = rule[4:] or (0,)
    args = [x.cpu() for x in (scores, lens, theta, widths)]
    reference.replay_hits(*args, *rule[:4], *dense_len, *want)
    size, total, hits, weight = (x.cpu() for x in got)
    assert torch.equal(size, want[0])
    assert torch.equal(hits, want[2])
    torch.testing.assert_close(total, want[1], rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(weight, want[3], rtol=1e-4, atol=0, equal_nan=True)
    return want


def candidates(L, C, width, seed=0):
    """Runs of one alpha and beta that are no multiple of a CTA's candidates, and some wider P."""
    gen = torch.Generator().manual_seed(seed)
    pairs = torch.randint(1, 6, (L, C, 2), generator=gen).repeat_interleave(3, 1)[:, :C] / 5
    theta = torch.cat((pairs, torch.randint(0, 5, (L, C, 1), generator=gen) / 4), 2)
    widths = width + torch.randint(0, 3, (C,), generator=gen) * (width // 2)
    return theta.to(DEV), widths.int().to(DEV)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_hits_of_any_scores(kind):
    N, block, K = 300, 16, 24
    scores, lens = window(kind, 2, 7, 2, N, block, (N - 2) * block + 3)
    check(scores, lens, *candidates(2, 10, K), block, K, 1, 3)


@pytest.mark.parametrize("N", (40, 255, 256, 700, 1024, 1030, 2500, 4096, 6000, template.CAPACITY))
def test_replay_hits_of_any_number_of_blocks(N):
    block, K = 16, 32
    scores, lens = window("random", 1, 5, 2, N, block, N * block)
    hits = check(scores, lens, *candidates(1, 6, K), block, K, 0, 1)[2]
    assert hits.max() > K // 2


def test_replay_hits_where_many_blocks_are_forced():
    scores, lens = window("steep", 2, 9, 4, 256, 64, 256 * 64 - 30)
    check(scores, lens, *candidates(2, 8, 64), 64, 64, 1, 33)


def test_rows_that_do_not_select_do_not_count():
    block, K = 4, 12
    for tokens, dense_len in ((52, 0), (80, 76), (80, 1000), (30, 0)):
        scores, lens = window("random", 1, 8, 1, 20, block, tokens)
        size = check(scores, lens, *candidates(1, 5, K), block, K, 1, 2, dense_len)[0]
        assert size[0, 0].item() == -1


def test_a_p_of_all_blocks_hits_all():
    scores, lens = window("random", 1, 4, 1, 50, 4, 200)
    theta, _ = candidates(1, 2, 8)
    got = replay_hits(scores, lens, theta, torch.tensor([50, 60], dtype=torch.int32, device=DEV), 4, 8)
    assert torch.equal(got.hits[:, 0, 1:], got.size[:, 1:]) and torch.equal(got.weight[:, 0, 1:], got.total[:, 1:])


def test_more_blocks_than_registers_hold_are_the_reference_s():
    N = template.CAPACITY + 1
    scores, lens = window("random", 2, 3, 1, N, 4, N * 4)
    check(scores, lens, *candidates(2, 2, 8), 4, 8, 0, 1)


@pytest.mark.parametrize("op", ("quest", "infllm"))
def test_queries_of_one_sequence_score_as_if_each_had_its_own(op):
    rows, H, G, D, N, block = 9, 2, 16, 128, 150, 64
    lens = torch.arange(N * block - rows + 1, N * block + 1, dtype=torch.int32, device=DEV)
    draw = lambda *shape: torch.randn(shape, device=DEV).bfloat16()
    q = draw(rows, H * G, D)
    if op == "quest":
        low = draw(1, H, N, D)
        meta, score = (low, low + 1), lambda *m: quest_scores(q, *m, lens, block)
    else:
        meta = draw(1, H, (N * block - 32) // 16 + 1, D), draw(1, H, (N * block - 128) // 64 + 1, D)
        score = lambda *m: infllm_scores(q, *m, lens, D**-0.5, block, num_blocks=N)
    assert torch.equal(score(*meta), score(*(m.expand(rows, -1, -1, -1).contiguous() for m in meta)))
