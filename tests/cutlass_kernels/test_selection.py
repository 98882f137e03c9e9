# SPDX-License-Identifier: Apache-2.0
"""select against the selection rule told plainly in Python, and its account of A against P."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import INF, NAN, examples, id_table, rule, same_bits, seeds
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import rank_blocks

TIES = (0.0, -0.0, 1.0, -1.0, 2.0, -3.5)
WILD = (*TIES, INF, -INF, NAN, 3e38, -3e38, 1e-45)
NEGATIVE = (-1.0, -1.5, -2.0, -1e30)
POOLS: dict[str, Callable[[random.Random], float]] = {
    "ties": lambda roll: roll.choice(TIES),
    "wild": lambda roll: roll.choice(WILD),
    "negative": lambda roll: roll.choice(NEGATIVE),
    "equal": lambda roll: -0.5,
    "barred": lambda roll: roll.choice((-INF, NAN)),
    "smooth": lambda roll: roll.gauss(0, 1),
}


def scored(roll: random.Random, lengths: list[int], T: int, H: int, spare: int, pool: str) -> Tensor:
    """Scores of every block; beyond a row's blocks, what must not be looked at."""
    N = max(-(-n // T) for n in lengths) + spare
    scores = torch.full((len(lengths), H, N), NAN)
    for b, n in enumerate(lengths):
        for h in range(H):
            row = [POOLS[pool](roll) for _ in range(-(-n // T))]
            scores[b, h] = torch.tensor(row + [roll.choice((INF, NAN, 9e9)) for _ in range(N - len(row))])
    return scores


def check_against_p(selection: ck.Selection, A: dict, P: dict, width: int) -> None:
    """ids, position, missed and counts, from plain lists."""
    for (b, h), a in A.items():
        missed = [i for i in a if i not in P[b, h]]
        where = [P[b, h].index(i) if i in P[b, h] else -1 for i in a]
        pad = [-1] * (width - len(a))
        assert selection.ids[b, h].tolist() == a + pad
        assert selection.position[b, h].tolist() == where + pad
        assert selection.missed[b, h].tolist() == missed + [-1] * (width - len(missed))
        assert selection.counts[b, h].tolist() == [len(a), len(missed)]


lengths_in_blocks = st.lists(st.integers(0, 12), min_size=1, max_size=3)
forcing = st.tuples(st.integers(0, 3), st.integers(0, 3))


@examples(150)
@given(
    seeds,
    lengths_in_blocks,
    st.sampled_from((-1, 0, 1)),
    st.sampled_from((16, 64)),
    st.sampled_from(sorted(POOLS)),
    forcing,
    st.integers(0, 13),
    st.integers(0, 3),
)
def test_select_follows_the_rule(
    seed: int, blocks: list[int], edge: int, T: int, pool: str, forced: tuple[int, int], K: int, spare: int
) -> None:
    """Forced blocks, ties to the lowest id, never -inf nor NaN, lengths around block edges, P in any relation to A."""
    roll, H = random.Random(seed), 1 + seed % 2
    sink, local = forced
    K = 0 if K == 0 else max(K, sink + local)
    lengths = [max(0, n * T + edge) for n in blocks]
    scores = scored(roll, lengths, T, H, spare, pool)
    A, P = {}, {}
    for b, n in enumerate(lengths):
        total = -(-n // T)
        for h in range(H):
            A[b, h] = rule(scores[b, h].tolist(), total, K, sink, local)
            P[b, h] = sorted(roll.sample(range(total), roll.randint(0, total)))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    predicted = id_table(P, len(lengths), H, 14)
    check_against_p(ck.select(scores, seq_lens, T, K, sink, local, predicted), A, P, K)


@examples(40)
@given(seeds, st.sampled_from(sorted(POOLS)), forcing)
def test_the_rank_of_a_block_says_which_budgets_take_it(seed: int, pool: str, forced: tuple[int, int]) -> None:
    """What calibration counts by: rank < K, for every K that the forced blocks fit in."""
    roll = random.Random(seed)
    n = roll.randint(0, 12)
    scores = scored(roll, [16 * n], 16, 2, 2, pool)
    rank = rank_blocks(scores, torch.tensor([16 * n], dtype=torch.int32), 16, *forced)
    for K in range(sum(forced), n):
        for h in range(2):
            assert (rank[0, h] < K).nonzero()[:, 0].tolist() == rule(scores[0, h].tolist(), n, K, *forced)


@pytest.mark.parametrize("T", [16, 64])
@pytest.mark.parametrize("more", [-5, -1, 0, 1])
@pytest.mark.parametrize("pool", sorted(POOLS))
def test_budgets_around_the_number_of_blocks(T: int, more: int, pool: str) -> None:
    """K in {0, n - 1, n, n + 1} for n = 5 blocks, and 1 without forced blocks."""
    roll, lengths = random.Random(more), [5 * T, 5 * T - 1, 4 * T + 1]
    scores, seq_lens = scored(roll, lengths, T, 2, 1, pool), torch.tensor(lengths, dtype=torch.int32)
    for K, local in ((5 + more, min(1, 5 + more)), (1, 0)):
        ids = ck.select(scores, seq_lens, T, K, local=local).ids
        for b in range(3):
            for h in range(2):
                want = rule(scores[b, h].tolist(), 5, K, 0, local)
                assert ids[b, h].tolist() == want + [-1] * (K - len(want))


@pytest.mark.parametrize(
    ("P", "position", "missed"),
    [
        ([1, 2, 4], [0, 1, 2], []),  # equal
        ([2], [-1, 0, -1], [1, 4]),  # subset
        ([0, 1, 2, 3, 4], [1, 2, 4], []),  # superset
        ([0, 3], [-1, -1, -1], [1, 2, 4]),  # disjoint
        ([], [-1, -1, -1], [1, 2, 4]),  # empty
        ([-1, -1], [-1, -1, -1], [1, 2, 4]),  # nothing but padding
        ([0, 2, 4, -1], [-1, 1, 2], [1]),
        ([1, 1, 2], [0, 2, -1], [4]),  # twice: the first
    ],
)
def test_each_relation_of_a_and_p(P: list[int], position: list[int], missed: list[int]) -> None:
    scores = torch.tensor([[[0.0, 3.0, 2.0, 1.0, -5.0]]])
    predicted = torch.tensor([[P]], dtype=torch.int32).view(1, 1, len(P))
    got = ck.select(scores, torch.tensor([65], dtype=torch.int32), 16, 3, predicted=predicted)
    assert got.ids.tolist() == [[[1, 2, 4]]]
    assert got.position.tolist() == [[position]]
    assert got.missed.tolist() == [[missed + [-1] * (3 - len(missed))]]
    assert got.counts.tolist() == [[[3, len(missed)]]]


def test_a_block_born_at_this_step_is_attended_whatever_its_score() -> None:
    for newest in (NAN, -INF, -1e9, 0.0):
        scores = torch.tensor([[[5.0, 4.0, 3.0, newest, INF]]])
        ids = [ck.select(scores, torch.tensor([n], dtype=torch.int32), 16, 2).ids.tolist() for n in (48, 49)]
        assert ids == [[[[0, 2]]], [[[0, 3]]]]


def test_forced_blocks_do_not_compete_and_may_overlap() -> None:
    scores = torch.tensor([[[-9.0, 1.0, 2.0, 3.0, 4.0, -9.0, -9.0]]])
    lens = torch.tensor([112], dtype=torch.int32)
    assert ck.select(scores, lens, 16, 4, sink=1, local=2).ids.tolist() == [[[0, 4, 5, 6]]]
    assert ck.select(scores, lens, 16, 3, sink=1, local=2).ids.tolist() == [[[0, 5, 6]]]
    few = ck.select(scores, torch.tensor([32], dtype=torch.int32), 16, 5, sink=2, local=3)  # 2 blocks, forced twice
    assert few.ids.tolist() == [[[0, 1, -1, -1, -1]]] and few.counts.tolist() == [[[2, 2]]]


def test_too_few_finite_scores_leave_padding() -> None:
    scores = torch.tensor([[[NAN, 1.0, -INF, -INF, NAN, -INF]]])
    got = ck.select(scores, torch.tensor([96], dtype=torch.int32), 16, 4)
    assert got.ids.tolist() == [[[1, 5, -1, -1]]] and got.counts.tolist() == [[[2, 2]]]


@pytest.mark.parametrize("pool", ["ties", "equal", "wild"])
def test_ties_among_thousands_of_blocks(pool: str) -> None:
    """Sorts may change their method with the length."""
    scores = scored(random.Random(1), [5000 * 16], 16, 1, 0, pool)
    ids = ck.select(scores, torch.tensor([5000 * 16], dtype=torch.int32), 16, 256).ids[0, 0].tolist()
    assert ids == rule(scores[0, 0].tolist(), 5000, 256, 0, 1)


def test_infllm_defaults_leave_30_dynamic_blocks_of_64() -> None:
    scores = torch.arange(200.0).view(1, 1, 200)
    ids = (
        ck.select(scores, torch.tensor([200 * 64 - 3], dtype=torch.int32), 64, 64, sink=1, local=33).ids[0, 0].tolist()
    )
    assert ids == [0, *range(137, 167), *range(167, 200)]


@examples(40)
@given(seeds, st.sampled_from(("ties", "wild")))
def test_buffers_rows_and_capacity_do_not_matter(seed: int, pool: str) -> None:
    """A row alone, in a wider table, with stale buffers, gives what it gives in a batch."""
    roll = random.Random(seed)
    lengths = [roll.randint(0, 200) for _ in range(3)]
    scores, seq_lens = scored(roll, lengths, 16, 2, 0, pool), torch.tensor(lengths, dtype=torch.int32)
    predicted = torch.randint(-1, 12, (3, 2, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    whole = ck.select(scores, seq_lens, 16, 4, 1, 1, predicted)
    stale = ck.Selection(*(torch.randint_like(x, 99) for x in whole))
    assert ck.select(scores, seq_lens, 16, 4, 1, 1, predicted, out=stale) is stale
    wide = torch.cat((scores, torch.full((3, 2, 3), INF)), 2)
    for b in range(3):
        one = ck.select(wide[b : b + 1], seq_lens[b : b + 1], 16, 4, 1, 1, predicted[b : b + 1])
        assert all(same_bits(x[b : b + 1], y) for x, y in zip(whole, one, strict=True))
    assert all(same_bits(x, y) for x, y in zip(whole, stale, strict=True))
