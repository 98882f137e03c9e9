# SPDX-License-Identifier: Apache-2.0
"""Block scores of Quest and InfLLM-v2 against loops over single keys and windows."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import DTYPES, GROUPS, INF, NAN, close, examples, same_bits, seeds
from torch import Tensor

import cutlass_kernels as ck

EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def batch(seed: int, lengths: list[int], H: int, G: int, D: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Queries [B, H * G, D] and the keys of each row [H, tokens, D]."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), H * G, D, generator=gen).to(dtype)
    return q, [torch.randn(H, n, D, generator=gen).to(dtype) for n in lengths]


def lens(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


# ---------------------------------------------------------------------------------------------------- Quest
def extrema(keys: list[Tensor], T: int, N: int) -> tuple[Tensor, Tensor]:
    """Channel-wise extrema of each block, NaN elsewhere."""
    H, _, D = keys[0].shape
    kmin, kmax = (torch.full((len(keys), H, N, D), NAN, dtype=keys[0].dtype) for _ in range(2))
    for b, x in enumerate(keys):
        for i, block in enumerate(x.split(T, dim=1) if x.shape[1] else ()):
            kmin[b, :, i], kmax[b, :, i] = block.min(1).values, block.max(1).values
    return kmin, kmax


def check_quest(q: Tensor, keys: list[Tensor], T: int, N: int) -> Tensor:
    lengths = [x.shape[1] for x in keys]
    kmin, kmax = extrema(keys, T, N)
    scores = ck.quest_scores(q, kmin, kmax, lens(lengths), T)
    H = kmin.shape[1]
    mean = q.double().unflatten(1, (H, -1)).mean(2)
    for b, x in enumerate(keys):
        for h in range(H):
            blocks = x[h].double().split(T) if lengths[b] else ()
            # Quest's evaluation form: the maximum of key * sign(q) a channel, against |q|
            want = [((block * mean[b, h].sign()).amax(0) * mean[b, h].abs()).sum() for block in blocks]
            close(scores[b, h, : len(blocks)], torch.tensor(want, dtype=torch.float64))
            assert bool((scores[b, h, len(blocks) :] == -INF).all())
            for i, block in enumerate(blocks):
                dots = block @ mean[b, h]
                assert float(scores[b, h, i]) >= float(dots.max()) - 1e-5 * float(1 + dots.abs().max())
    return scores


@pytest.mark.parametrize("G", GROUPS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", [16, 32, 64])
def test_quest_bounds_every_key_and_equals_its_evaluation_form(G: int, D: int, T: int) -> None:
    for first in range(0, len(EDGES), 9):
        lengths = list(EDGES[first : first + 9])
        q, keys = batch(G * D, lengths, 2, G, D, DTYPES[first % 3])
        check_quest(q, keys, T, 257 // T + 2)


@examples(30)
@given(seeds, st.sampled_from(GROUPS), st.sampled_from(DTYPES))
def test_quest_of_any_lengths(seed: int, G: int, dtype: torch.dtype) -> None:
    roll = random.Random(seed)
    T = roll.choice((16, 32, 64, 128, 256))
    lengths = [roll.randint(0, 4 * T + 1) for _ in range(3)]
    q, keys = batch(seed, lengths, 2, G, 16, dtype)
    check_quest(q, keys, T, 5 + roll.randint(0, 2))


def test_quest_scores_are_unscaled_and_may_all_be_negative() -> None:
    q, keys = torch.ones(1, 2, 16), [-1 - torch.rand(1, 40, 16)]
    scores = check_quest(q, keys, 16, 3)
    assert bool((scores < -16).all())


def test_quest_of_a_row_depends_on_neither_batch_nor_capacity() -> None:
    q, keys = batch(4, [100, 37, 64], 2, 3, 64, torch.bfloat16)
    kmin, kmax = extrema(keys, 16, 9)
    whole = ck.quest_scores(q, kmin, kmax, lens([100, 37, 64]), 16)
    for b, n in enumerate((100, 37, 64)):
        one = ck.quest_scores(q[b : b + 1], *(x[b : b + 1, :, :7] for x in (kmin, kmax)), lens([n]), 16)
        assert same_bits(one[0], whole[b, :, :7])


def test_quest_writes_into_the_buffer_it_is_given() -> None:
    q, keys = batch(4, [37], 1, 2, 16, torch.float32)
    out = torch.full((1, 1, 4), NAN)
    assert ck.quest_scores(q, *extrema(keys, 16, 4), lens([37]), 16, out=out) is out
    assert bool(out[0, 0, :3].isfinite().all()) and float(out[0, 0, 3]) == -INF


# ---------------------------------------------------------------------------------------------------- InfLLM-v2
def means(keys: list[Tensor], size: int, step: int, spare: int) -> Tensor:
    """Mean of each complete window, NaN in the places of the others."""
    H, _, D = keys[0].shape
    count = [max(0, (x.shape[1] - size) // step + 1) for x in keys]
    out = torch.full((len(keys), H, max(count) + spare, D), NAN, dtype=keys[0].dtype)
    for b, x in enumerate(keys):
        for w in range(count[b]):
            out[b, :, w] = x[:, w * step : w * step + size].double().mean(1).to(x.dtype)
    return out


def infllm_oracle(
    q: Tensor, k1: Tensor, k2: Tensor, n: int, scale: float, T: int, w: tuple[int, int, int, int], exact: bool
) -> list[float]:
    """Scores of the blocks of one row and KV head, q [G, D], by loops over blocks, windows and heads in float64."""
    window, stride, coarse_window, coarse_stride = w
    fine = [j for j in range(len(k1)) if j * stride + window <= n]
    coarse = [j for j in range(len(k2)) if j * coarse_stride + coarse_window <= n]

    def lse(means: Tensor, windows: list[int], head: Tensor) -> float:
        return float(torch.stack([head.double() @ means[j].double() * scale for j in windows]).logsumexp(0))

    weight = dict.fromkeys(fine, 0.0)
    for head in q:
        norm = lse(k2, coarse, head) if coarse and not exact else lse(k1, fine, head) if fine else 0.0
        for j in fine:
            weight[j] += math.exp(float(head.double() @ k1[j].double()) * scale - norm)
    scores = []
    for block in range(-(-n // T)):
        touching = [j for j in fine if j * stride < (block + 1) * T and j * stride + window > block * T]
        scores.append(max((weight[j] for j in touching), default=-INF))
    return scores


def check_infllm(
    seed: int, lengths: list[int], G: int, D: int, T: int, w: tuple[int, int, int, int], exact: bool, dtype: torch.dtype
) -> Tensor:
    roll, H = random.Random(seed), 2
    q, keys = batch(seed, lengths, H, G, D, dtype)
    k1, k2 = means(keys, w[0], w[1], roll.randint(0, 2)), means(keys, w[2], w[3], roll.randint(0, 2))
    N = max(-(-n // T) for n in lengths) + roll.randint(0 if max(lengths) else 1, 2)
    scores = ck.infllm_scores(q, k1, k2, lens(lengths), D**-0.5, T, *w, exact, num_blocks=N)
    for b, n in enumerate(lengths):
        for h in range(H):
            want = infllm_oracle(q[b, h * G : (h + 1) * G], k1[b, h], k2[b, h], n, D**-0.5, T, w, exact)
            close(scores[b, h, : len(want)], torch.tensor(want, dtype=torch.float64))
            assert bool((scores[b, h, len(want) :] == -INF).all())
    return scores


DEFAULT = (32, 16, 128, 64)


@pytest.mark.parametrize("G", GROUPS)
@pytest.mark.parametrize("exact", [False, True])
def test_infllm_at_every_edge(G: int, exact: bool) -> None:
    for first in range(0, len(EDGES), 9):
        check_infllm(G, list(EDGES[first : first + 9]), G, 16, 64, DEFAULT, exact, torch.float32)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infllm_at_true_head_sizes(D: int, dtype: torch.dtype) -> None:
    check_infllm(D, [257, 130, 31], 4, D, 64, DEFAULT, False, dtype)


@examples(40)
@given(
    seeds,
    st.sampled_from(GROUPS),
    st.sampled_from(((16, DEFAULT), (32, DEFAULT), (128, DEFAULT), (16, (16, 16, 64, 16)), (32, (24, 8, 48, 24)))),
    st.booleans(),
)
def test_infllm_of_any_lengths_and_windows(seed: int, G: int, sizes: tuple, exact: bool) -> None:
    roll = random.Random(seed)
    lengths = [roll.choice((roll.randint(0, 300), roll.choice(EDGES))) for _ in range(2)]
    check_infllm(seed, lengths, G, 16, *sizes, exact, torch.float32)


def test_blocks_that_no_complete_window_touches_score_minus_infinity() -> None:
    """At 64 + 16 tokens the second block is touched by windows from 48; at 64 + 15 only by what is incomplete."""
    scores = check_infllm(1, [79, 80, 31], 2, 16, 64, DEFAULT, False, torch.float32)
    assert (scores[:, 0, :2] > -INF).tolist() == [[True, False], [True, True], [False, False]]


def test_the_exact_normaliser_makes_the_weights_of_a_head_sum_to_one() -> None:
    """With windows and blocks of one size and stride, a score is the softmax weight of its window."""
    q, keys = batch(3, [160], 1, 1, 16, torch.float32)
    k1 = means(keys, 16, 16, 0)
    args = (lens([160]), 0.25, 16, 16, 16, 32, 32)
    scores = ck.infllm_scores(q, k1, means(keys, 32, 32, 0), *args, exact=True, num_blocks=10)
    assert float(scores.sum()) == pytest.approx(1, abs=1e-6)


def test_without_a_complete_coarse_window_the_normaliser_is_exact() -> None:
    q, keys = batch(3, [127], 1, 4, 16, torch.float32)
    k1, args = means(keys, 32, 16, 0), (lens([127]), 0.25)
    empty = torch.empty(1, 1, 0, 16)
    scores = [ck.infllm_scores(q, k1, empty, *args, exact=exact, num_blocks=2) for exact in (False, True)]
    assert same_bits(*scores) and bool(scores[0].isfinite().all())


def test_infllm_of_a_row_depends_on_neither_batch_nor_capacity() -> None:
    lengths = [300, 150]
    q, keys = batch(8, lengths, 2, 5, 64, torch.bfloat16)
    k1, k2 = means(keys, 32, 16, 3), means(keys, 128, 64, 2)
    whole = ck.infllm_scores(q, k1, k2, lens(lengths), 0.125, num_blocks=9)
    row = [x[1:] for x in (q, k1[:, :, :9], k2[:, :, :2])]
    one = ck.infllm_scores(*row, lens([150]), 0.125, out=torch.full((1, 2, 3), NAN))
    close(one[0], whole[1, :, :3], tol=1e-6)
