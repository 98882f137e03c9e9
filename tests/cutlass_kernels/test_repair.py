# SPDX-License-Identifier: Apache-2.0
"""repair gives merge(attend(A)) bit for bit whatever P was; repair_union is attention over A u P."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    INF,
    NAN,
    Problem,
    close,
    examples,
    expect,
    id_lists,
    id_table,
    make,
    problems,
    same_bits,
    seeds,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cutlass_kernels as ck

RELATIONS = ("equal", "one_missed", "subset", "superset", "mixed", "disjoint", "empty", "all", "duplicates")
Sets = dict[tuple[int, int], list[int]]


def predicted(p: Problem, A: Sets, relation: str, seed: int) -> Sets:
    """P of each row and head in that relation to A (or as near as its blocks allow), ascending."""
    rng = random.Random(seed)
    P = {}
    for at, a in A.items():
        rest = [i for i in range(p.blocks(at[0])) if i not in a]
        some, more = rng.sample(a, len(a) // 2), rng.sample(rest, (len(rest) + 1) // 2)
        P[at] = sorted(
            {
                "equal": a,
                "one_missed": rng.sample(a, max(0, len(a) - 1)),
                "subset": some,
                "superset": a + more,
                "mixed": some + more,
                "disjoint": rest,
                "empty": [],
                "all": a + rest,
                "duplicates": some + some + more,
            }[relation]
        )
    return P


def choose(p: Problem, seed: int, K: int) -> tuple[Tensor, Sets]:
    """Random scores, and the A that select finds in them."""
    scores = torch.randn(p.B, p.H, p.capacity, generator=torch.Generator().manual_seed(seed))
    return scores, id_lists(ck.select(scores, p.seq_lens, p.T, K, local=min(1, K)).ids)


def given_p(p: Problem, P: Sets, width: int) -> Tensor:
    return id_table(P, p.B, p.H, max(map(len, P.values())) + width)


def serial(p: Problem, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.full_like(p.q, NAN, dtype=dtype), torch.full(p.q.shape[:2], NAN)
    return ck.merge(*ck.attend(*p.args(), ids, *p.tail()), out)


def poison_wasted(p: Problem, A: Sets, P: Sets) -> None:
    """Blocks of P \\ A get keys and values that are huge but finite."""
    huge = 3e4 if p.k.dtype == torch.float16 else 1e15
    for (b, h), ids in P.items():
        for i in set(ids) - set(A[b, h]):
            slot = i if p.page_table is None else int(p.page_table[b, h, i])
            p.k[b, h, slot], p.v[b, h, slot] = huge, -huge


@pytest.mark.parametrize("relation", RELATIONS)
@examples(25)
@given(problems(), seeds, st.integers(0, 5), st.integers(0, 2), st.booleans())
def test_repair_is_serial_bit_for_bit(relation: str, p: Problem, seed: int, K: int, pad: int, junk: bool) -> None:
    scores, A = choose(p, seed, K)
    P = predicted(p, A, relation, seed)
    ids = given_p(p, P, pad)
    selection = ck.select(scores, p.seq_lens, p.T, K, local=min(1, K), predicted=ids)
    want = serial(p, selection.ids, p.q.dtype)
    close(serial(p, selection.ids, torch.float32)[0], expect(p, A)[0])

    poison_wasted(p, A, P)
    o, lse = ck.attend(*p.args(), ids, *p.tail())
    if junk:  # what a wasted block holds is never looked at
        used = torch.zeros_like(ids, dtype=torch.bool)
        for b, h in p.pairs():
            used[b, h, [i for i in selection.position[b, h].tolist() if i >= 0]] = True
        o[~used], lse[~used] = NAN, NAN
    out = ck.repair(*p.args(), selection, o, lse, *p.tail())
    assert out[0].dtype == p.q.dtype
    assert same_bits(out[0], want[0]) and same_bits(out[1], want[1])

    fresh = torch.full((*selection.ids.shape, p.G, p.q.shape[2]), NAN), torch.full((*selection.ids.shape, p.G), NAN)
    ck.attend_missed(*p.args(), selection, *p.tail(), out=fresh)
    hit = selection.position >= 0
    assert bool(fresh[0][hit].isnan().all()) and bool((fresh[1][selection.ids < 0] == -INF).all())
    halves = ck.merge_repaired(selection, o, lse, *fresh, tuple(torch.full_like(x, NAN) for x in out))
    assert same_bits(halves[0], want[0]) and same_bits(halves[1], want[1])


@pytest.mark.parametrize("relation", RELATIONS[:-1])
@examples(20)
@given(problems(), seeds, st.integers(0, 5), st.integers(0, 2))
def test_union_is_attention_over_both_sets(relation: str, p: Problem, seed: int, K: int, pad: int) -> None:
    scores, A = choose(p, seed, K)
    P = predicted(p, A, relation, seed)
    ids = given_p(p, P, pad)
    selection = ck.select(scores, p.seq_lens, p.T, K, local=min(1, K), predicted=ids)
    o, lse = serial(p, ids, torch.float32)  # the running state of P
    buffers = torch.full_like(o, NAN), torch.full_like(lse, NAN)
    out, out_lse = ck.repair_union(*p.args(), selection, o, lse, *p.tail(), out=buffers)
    want, want_lse = expect(p, {at: A[at] + P[at] for at in A})
    close(out, want, tol=5e-5)
    close(out_lse, want_lse)
    assert ck.repair_union(*p.args(), selection, o, lse, *p.tail())[0].dtype == p.q.dtype


@examples(40)
@given(problems(), seeds, st.integers(0, 4), st.sampled_from(("empty", "mixed", "all")))
def test_a_budget_of_all_blocks_is_dense_bit_for_bit(p: Problem, seed: int, more: int, relation: str) -> None:
    K = max(p.blocks(b) for b in range(p.B)) + more
    scores, A = choose(p, seed, K)
    assert {(b, h): list(range(p.blocks(b))) for b, h in p.pairs()} == A
    ids = given_p(p, predicted(p, A, relation, seed), 0)
    selection = ck.select(scores, p.seq_lens, p.T, K, local=min(1, K), predicted=ids)
    out, lse = ck.repair(*p.args(), selection, *ck.attend(*p.args(), ids, *p.tail()), *p.tail())
    for b in range(p.B):
        n = p.blocks(b)
        dense = serial(p, torch.arange(n, dtype=torch.int32).repeat(p.B, p.H, 1), p.q.dtype)  # n ids, no padding
        assert same_bits(out[b], dense[0][b]) and same_bits(lse[b], dense[1][b])
        if n:
            full = scaled_dot_product_attention(
                p.q[b : b + 1, :, None].double(), p.keys[b][None].double(), p.values[b][None].double(), enable_gqa=True
            )
            close(out[b], full[0, :, 0], tol={2: 1e-2, 4: 2e-5}[out.element_size()])


@examples(25)
@given(problems(), seeds, st.integers(1, 5), st.sampled_from(("equal", "mixed", "subset", "all")))
def test_repair_looks_the_partials_up_and_never_computes_them_again(
    p: Problem, seed: int, K: int, relation: str
) -> None:
    """Partials that no attend would give come out as they went in, merged with those of the missed blocks."""
    scores, A = choose(p, seed, K)
    P = given_p(p, predicted(p, A, relation, seed), 1)
    selection = ck.select(scores, p.seq_lens, p.T, K, local=min(1, K), predicted=P)
    gen = torch.Generator().manual_seed(seed)
    o, lse = (torch.randn(x.shape, generator=gen) for x in ck.attend(*p.args(), P, *p.tail()))
    out = ck.repair(*p.args(), selection, o, lse, *p.tail())
    want_o, want_lse = ck.attend(*p.args(), selection.ids, *p.tail())
    for b, h in p.pairs():
        for i, at in enumerate(selection.position[b, h].tolist()):
            if at >= 0:
                want_o[b, h, i], want_lse[b, h, i] = o[b, h, at], lse[b, h, at]
    want = ck.merge(want_o, want_lse, tuple(torch.full_like(x, NAN) for x in out))
    assert same_bits(out[0], want[0]) and same_bits(out[1], want[1])


@pytest.mark.parametrize("fresh", [True, False])
def test_no_blocks_at_all(fresh: bool) -> None:
    """K = 0 and an empty P: a fresh empty tensor and a slice of no length, alike."""
    p = make(3, [40, 0, 16], 16, H=2, G=3)
    ids = torch.empty(3, 2, 0, dtype=torch.int32) if fresh else torch.zeros(3, 2, 2, dtype=torch.int32)[..., 2:]
    selection = ck.select(torch.randn(3, 2, 4), p.seq_lens, 16, 0, predicted=ids)
    assert selection.ids.shape == (3, 2, 0)
    out, lse = ck.repair(*p.args(), selection, *ck.attend(*p.args(), ids, *p.tail()), *p.tail())
    assert same_bits(out, torch.zeros_like(p.q)) and same_bits(lse, torch.full((3, 6), -INF))
    out, lse = ck.repair_union(*p.args(), selection, *serial(p, ids, torch.float32), *p.tail())
    assert same_bits(out, torch.zeros_like(p.q)) and same_bits(lse, torch.full((3, 6), -INF))


@pytest.mark.parametrize("union", [False, True])
def test_one_dominant_block_only_in_the_missed_or_only_in_the_predicted(union: bool) -> None:
    p = make(9, [64], 16, H=1, G=2, paged=False)
    p.k[0, 0, 1, 3] = p.keys[0][0, 19] = p.q[0].sum(0) * 100
    A = {(0, 0): [1, 3]}
    for P in ([0, 3], [1, 3], [0, 1], [0, 2]):
        ids = torch.tensor([[P]], dtype=torch.int32)
        scores = torch.tensor([[[0.0, 5.0, 1.0, 2.0, NAN]]])
        selection = ck.select(scores, p.seq_lens, 16, 2, predicted=ids)
        assert selection.ids.tolist() == [[[1, 3]]]
        if union:
            state = serial(p, ids, torch.float32)
            out, lse = ck.repair_union(*p.args(), selection, *state, *p.tail())
            want, want_lse = expect(p, {(0, 0): A[0, 0] + P})
        else:
            out, lse = ck.repair(*p.args(), selection, *ck.attend(*p.args(), ids, *p.tail()), *p.tail())
            want, want_lse = expect(p, A)
        close(out, want, tol=1e-4)
        close(lse, want_lse)


def test_the_number_of_threads_changes_no_bit_of_a_repair() -> None:
    p = make(3, [64 * 13 + 5, 64 * 9], 64, H=2, G=8, D=64)
    scores, A = choose(p, 1, 8)
    ids = given_p(p, predicted(p, A, "mixed", 1), 1)
    selection = ck.select(scores, p.seq_lens, p.T, 8, predicted=ids)
    before, runs = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            o, lse = ck.attend(*p.args(), ids, *p.tail())
            runs.append((*ck.repair(*p.args(), selection, o, lse, *p.tail()), *serial(p, selection.ids, p.q.dtype)))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert same_bits(runs[0][0], runs[0][2])
