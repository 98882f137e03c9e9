# SPDX-License-Identifier: Apache-2.0
"""replay_hits counts what a loop over predict and select would have hit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cutlass_kernels as ck

BLOCK, K = 4, 6


def window(L: int, W: int, H: int, N: int, last: int, seed: int, kind: str = "plain") -> tuple[Tensor, Tensor]:
    """Slowly changing scores [L, W, H, N], -inf beyond the sequence, which has `last` tokens at the last row."""
    gen = torch.Generator().manual_seed(seed)
    lens = torch.arange(last - W + 1, last + 1, dtype=torch.int32)
    scores = torch.randn(L, W, H, N, generator=gen).cumsum(1) * 0.4 + torch.randn(L, 1, H, N, generator=gen)
    dice = torch.rand(scores.shape, generator=gen)
    if kind == "ties":
        scores.round_()
    elif kind == "negative":
        scores -= 50
    elif kind == "gaps":
        scores[dice < 0.1] = math.nan
        scores[dice > 0.9] = -math.inf
    inside = torch.arange(N) * BLOCK < lens[:, None]
    return scores.masked_fill(~inside[:, None], -math.inf), lens


def weights(row: list[float], blocks: set[int]) -> dict[int, float]:
    """Of eq 4, shifted to be non-negative; 1 each where all weigh nothing."""
    lowest = min([0.0, *(row[b] for b in blocks)])
    found = {b: row[b] - lowest for b in blocks}
    return found if sum(found.values()) else dict.fromkeys(blocks, 1.0)


def check(scores: Tensor, lens: Tensor, theta: Tensor, widths: list[int], *rule: int) -> None:
    """Hold the op against steps of one layer and candidate at a time."""
    L, W, H, N = scores.shape
    sink, local, dense_len = rule
    got = ck.replay_hits(scores, lens, theta, torch.tensor(widths).int(), BLOCK, K, *rule)
    for layer in range(L):
        for c, width in enumerate(widths):
            level = torch.full((1, H, N), math.nan)
            trend, P = torch.zeros_like(level), torch.full((1, H, width), -1, dtype=torch.int32)
            for w, tokens in enumerate(lens.tolist()):
                row, now, n = scores[layer, w : w + 1], lens[w : w + 1], -(-tokens // BLOCK)
                A = ck.select(row, now, BLOCK, K, sink, local).ids
                for h in range(H):
                    at = (layer, c, w, h)
                    if not w or tokens < dense_len or n <= K:
                        assert got.size[layer, w, h] == -1
                        assert got.hits[at] == got.weight[at] == got.total[layer, w, h] == 0
                        continue
                    chosen = {b for b in A[0, h].tolist() if sink <= b < n - local}
                    weight, held = weights(row[0, h].tolist(), chosen), chosen & set(P[0, h].tolist())
                    assert got.size[layer, w, h] == len(chosen) and got.hits[at] == len(held)
                    assert float(got.total[layer, w, h]) == pytest.approx(sum(weight.values()), rel=1e-5)
                    assert float(got.weight[at]) == pytest.approx(sum(weight[b] for b in held), rel=1e-5)
                ck.predict(row, level, trend, theta[layer, c : c + 1], now, BLOCK, sink, local, P)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 2), st.integers(8, 20)),
    short=st.integers(0, 9),
    kind=st.sampled_from(["plain", "ties", "negative", "gaps"]),
    widths=st.lists(st.integers(K, 22), min_size=1, max_size=4),
    rule=st.sampled_from([(0, 1), (1, 2), (0, 5), (3, 3)]),
    dense_len=st.sampled_from([0, 40]),
)
def test_steps_of_predict_and_select_hit_the_same(seed, sizes, short, kind, widths, rule, dense_len) -> None:
    L, W, H, N = sizes
    scores, lens = window(L, W, H, N, N * BLOCK - short, seed, kind)
    gen = torch.Generator().manual_seed(seed)
    theta = torch.randint(1, 5, (L, len(widths), 3), generator=gen) / 4
    check(scores, lens, theta, widths, *rule, dense_len)


def test_blocks_that_all_weigh_nothing_weigh_one_each() -> None:
    scores, lens = window(1, 3, 1, 12, 48, 0)
    scores[scores.isfinite()] = -2.0
    found = ck.replay_hits(scores, lens, torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([K]).int(), BLOCK, K)
    assert found.size[0, 1:].flatten().tolist() == found.total[0, 1:].flatten().tolist() == [K - 1, K - 1]
    assert torch.equal(found.hits, found.weight.int()) and found.hits[0, 0, 1:].flatten().tolist() == [K - 1, K - 1]


def test_infinite_scores_have_no_weight_that_could_be_shared() -> None:
    scores, lens = window(1, 3, 1, 12, 48, 0)
    scores[0, 2, 0, 4] = math.inf
    found = ck.replay_hits(scores, lens, torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([K]).int(), BLOCK, K)
    assert found.total[0].isnan().flatten().tolist() == [False, False, True] and int(found.size[0, 2]) == K - 1


def test_an_empty_window_gives_empty_counts() -> None:
    theta, widths = torch.ones(2, 3, 3), torch.ones(3).int()
    found = ck.replay_hits(torch.empty(2, 0, 1, 8), torch.empty(0).int(), theta, widths, 4, 2)
    assert [tuple(x.shape) for x in found] == [(2, 0, 1), (2, 0, 1), (2, 3, 0, 1), (2, 3, 0, 1)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scores": torch.zeros(2, 3, 8)}, "scores has 3 axes (2, 3, 8), expected [L, W, H, N]"),
        ({"seq_lens": torch.zeros(4).int()}, "seq_lens (4,) has W = 4, scores has W = 3"),
        ({"theta": torch.zeros(2, 5, 2)}, "theta is (2, 5, 2), expected [L, C, 3]"),
        ({"theta": torch.zeros(1, 5, 3)}, "theta (1, 5, 3) has L = 1, scores has L = 2"),
        ({"widths": torch.zeros(4).int()}, "widths (4,) has C = 4, theta has C = 5"),
        ({"widths": torch.zeros(5)}, "widths is float32, expected int32"),
        ({"top_k": 2, "sink": 2}, "2 sink + 1 local blocks are forced, but K is 2"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict, words: str) -> None:
    given_ = {
        "scores": torch.zeros(2, 3, 1, 8),
        "seq_lens": torch.zeros(3).int(),
        "theta": torch.zeros(2, 5, 3),
        "widths": torch.zeros(5).int(),
        "block_size": 4,
        "top_k": 4,
    }
    with pytest.raises(ValueError) as error:
        ck.replay_hits(**(given_ | changed))
    assert str(error.value) == f"replay_hits: {words}"


def test_opcheck() -> None:
    scores, lens = window(2, 3, 1, 10, 40, 0)
    empty = torch.empty(2, 3, 1), torch.empty(2, 4, 3, 1)
    results = (empty[0].int(), empty[0], empty[1].int(), empty[1])
    given_ = (scores, lens, torch.rand(2, 4, 3), torch.full((4,), K).int(), BLOCK, K, 0, 1, 0, *results)
    torch.library.opcheck(ck.OPS["replay_hits"], given_, test_utils=("test_schema", "test_faketensor"))
