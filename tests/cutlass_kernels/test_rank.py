# SPDX-License-Identifier: Apache-2.0
"""rank_infllm: the scores of infllm_scores, and select of them, whatever stands in its buffers."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GROUPS, NAN, examples, rule, same_bits, seeds
from test_scores import DEFAULT, EDGES, batch, lens, means
from torch import Tensor

import cutlass_kernels as ck

SIZES = ((64, DEFAULT), (16, DEFAULT), (128, DEFAULT), (16, (16, 16, 64, 16)), (32, (24, 8, 48, 24)))


def stale(x: Tensor) -> Tensor:
    return torch.full_like(x, NAN if x.is_floating_point() else -7)


@examples(60)
@given(seeds, st.sampled_from(GROUPS), st.sampled_from(SIZES), st.booleans(), st.integers(0, 9), st.booleans())
def test_it_is_the_scores_and_the_selection(
    seed: int, G: int, sizes: tuple, exact: bool, K: int, predicts: bool
) -> None:
    roll, H, (T, w) = random.Random(seed), 2, sizes
    lengths = [roll.choice((roll.randint(0, 400), roll.choice(EDGES))) for _ in range(3)]
    q, keys = batch(seed, lengths, H, G, 16, torch.float32)
    k1, k2 = means(keys, w[0], w[1], roll.randint(0, 2)), means(keys, w[2], w[3], roll.randint(0, 2))
    N = max(-(-n // T) for n in lengths) + roll.randint(1, 3)
    sink, local = (roll.randint(0, K // 2), roll.randint(0, K - K // 2)) if K else (0, 0)
    P = None
    if predicts:
        P = torch.stack([torch.randperm(N)[: N // 2 + 1] for _ in range(3 * H)]).view(3, H, -1).int()
    asked = (q, k1, k2, lens(lengths), 0.25)
    wanted = ck.infllm_scores(*asked, T, *w, exact, num_blocks=N)
    A = ck.select(wanted, lens(lengths), T, K, sink, local, P)
    scores, out = stale(wanted), ck.Selection(*map(stale, A))
    got = ck.rank_infllm(*asked, scores, K, sink, local, T, *w, exact, P, out)
    assert got is out and same_bits(scores, wanted)
    assert all(torch.equal(a, b) for a, b in zip(out, A, strict=True))
    for b, n in enumerate(lengths):
        for h in range(H):
            ids = rule(scores[b, h].tolist(), -(-n // T), K, sink, local)
            assert out.ids[b, h].tolist() == ids + [-1] * (K - len(ids))


@pytest.mark.parametrize("queries", [1, 3])
def test_queries_of_one_sequence(queries: int) -> None:
    q, keys = batch(3, [300] * queries, 2, 4, 16, torch.float32)
    k1, k2 = means(keys, 32, 16, 1)[:1], means(keys, 128, 64, 1)[:1]
    shared, own = (torch.empty(queries, 2, 5) for _ in range(2))
    of = lens([300, 200, 31][:queries])
    A = ck.rank_infllm(q, k1, k2, of, 0.25, shared, 3)
    B = ck.rank_infllm(q, *(x.expand(queries, -1, -1, -1).contiguous() for x in (k1, k2)), of, 0.25, own, 3)
    assert same_bits(shared, own) and all(torch.equal(a, b) for a, b in zip(A, B, strict=True))
