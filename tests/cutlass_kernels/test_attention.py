# SPDX-License-Identifier: Apache-2.0
"""attend: right against a float64 oracle, and a partial's bits depend on nothing but its block and query."""

import math
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    BLOCKS,
    GROUPS,
    INF,
    NAN,
    Problem,
    alone,
    attention,
    close,
    examples,
    expect,
    id_table,
    make,
    moved,
    problems,
    same_bits,
    seeds,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cutlass_kernels as ck
from cutlass_kernels import reference

PADDING = (-1, -7, 10**6, 2**31 - 1, -(2**31))  # and every id at or beyond a row's blocks


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def listed(p: Problem, seed: int, width: int) -> Tensor:
    """Ids in any order, other for every row and head, with padding and ids out of range among them."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.empty(p.B, p.H, width, dtype=torch.int32)
    for b, h in p.pairs():
        pool = torch.tensor([*range(p.blocks(b)), *PADDING, p.blocks(b), p.blocks(b) + 1])
        order = torch.randperm(len(pool), generator=gen)
        ids[b, h] = pool[order][torch.arange(width) % len(pool)]
    return ids


def all_blocks(p: Problem) -> Tensor:
    """Every block of every row, -1 padded to the longest."""
    most = max(p.blocks(b) for b in range(p.B))
    return id_table({(b, h): list(range(p.blocks(b))) for b, h in p.pairs()}, p.B, p.H, most)


def merged(o: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    B, H, _, G, D = o.shape
    return ck.merge(o, lse, (torch.full((B, H * G, D), NAN, dtype=dtype), torch.full((B, H * G), NAN)))


def attended(p: Problem, ids: Tensor) -> tuple[Tensor, Tensor]:
    """merge(attend(ids)) in float32."""
    return merged(*ck.attend(*p.args(), ids, *p.tail()))


def check_partials(p: Problem, ids: Tensor) -> None:
    o, lse = ck.attend(*p.args(), ids, *p.tail())
    for b, h in p.pairs():
        for i, block in enumerate(ids[b, h].tolist()):
            if 0 <= block < p.blocks(b):
                want_o, want_lse = attention(p, b, h, [block])
                close(o[b, h, i], want_o)
                close(lse[b, h, i], want_lse)
            else:
                assert same_bits(o[b, h, i], torch.zeros(p.G, p.q.shape[2]))
                assert same_bits(lse[b, h, i], torch.full((p.G,), -INF))


# ---------------------------------------------------------------------------------------------------- attend
@examples(60)
@given(problems(), seeds, st.integers(0, 9))
def test_a_partial_is_softmax_over_its_block_and_padding_is_the_empty_set(p: Problem, seed: int, width: int) -> None:
    check_partials(p, listed(p, seed, width))


@pytest.mark.parametrize("G", GROUPS)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", BLOCKS)
def test_every_group_head_and_block_size(G: int, D: int, T: int) -> None:
    p = make(G * D + T, [T - 1, T + 1, 0, 1, T], T, H=1, G=G, D=D, dtype=torch.bfloat16)
    check_partials(p, torch.tensor([[[1, 0]]], dtype=torch.int32).repeat(5, 1, 1))


@examples(60)
@given(problems(), seeds, st.integers(1, 9), st.booleans())
def test_the_bits_of_a_partial_depend_on_its_block_and_query_alone(
    p: Problem, seed: int, width: int, paged: bool
) -> None:
    """Not on its place among the ids, their number, batch, other rows and heads, page table, capacity or poison."""
    ids = listed(p, seed, width)
    o, lse = ck.attend(*p.args(), ids, *p.tail())
    shuffled = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    other = moved(p, paged, seed + 1, spare=3, poison=INF)
    again = ck.attend(*other.args(), ids[:, :, shuffled], *other.tail())
    assert same_bits(again[0], o[:, :, shuffled])
    assert same_bits(again[1], lse[:, :, shuffled])

    b, h = p.pairs()[seed % (p.B * p.H)]
    i, g = seed % width, seed % p.G
    if 0 <= ids[b, h, i] < p.blocks(b):
        for at, heads in ((alone(p, b, h), slice(None)), (alone(p, b, h, g), slice(g, g + 1))):
            one = ck.attend(*at.args(), ids[b : b + 1, h : h + 1, i : i + 1], *at.tail())
            assert same_bits(one[0][0, 0, 0], o[b, h, i, heads])
            assert same_bits(one[1][0, 0, 0], lse[b, h, i, heads])


@examples(40)
@given(problems(), seeds, st.integers(1, 9), st.integers(0, 2000))
def test_neither_the_chunks_of_work_nor_the_strides_of_the_cache_change_a_bit(
    p: Problem, seed: int, width: int, chunk: int
) -> None:
    ids = listed(p, seed, width)
    o, lse = ck.attend(*p.args(), ids, *p.tail())
    with patch.object(reference, "_CHUNK", chunk):
        again = ck.attend(*p.args(), ids, *p.tail())
    assert same_bits(again[0], o) and same_bits(again[1], lse)
    q, k, v = (torch.stack((x, torch.full_like(x, NAN)), -1)[..., 0] for x in p.args())
    again = ck.attend(q, k.transpose(1, 3).contiguous().transpose(1, 3), v, ids, *p.tail())
    assert same_bits(again[0], o) and same_bits(again[1], lse)


def test_the_number_of_threads_changes_no_bit(threads: Callable[[int], None]) -> None:
    p = make(3, [64 * 17 + 5, 64 * 9], 64, H=2, G=8, D=64)
    ids = all_blocks(p)
    runs = []
    for n in (1, 2):
        threads(n)
        assert torch.get_num_threads() == n
        o, lse = ck.attend(*p.args(), ids, *p.tail())
        runs.append((o, lse, *merged(o, lse)))
    assert o.numel() > 2**15  # enough for torch to split the work
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("f", [torch.exp, torch.log])
def test_exp_and_log_do_not_depend_on_the_position_in_a_tensor(f: Callable, threads: Callable[[int], None]) -> None:
    """What reference.py builds on, of contiguous tensors; here, where it runs."""
    gen = torch.Generator().manual_seed(0)
    x = torch.rand(2**16 + 37, generator=gen) * (110 if f is torch.log else -110)
    x[::97], x[1::97] = (-INF if f is torch.exp else 0.0), 0.0
    whole = f(x)
    threads(2)
    assert same_bits(f(x), whole)
    threads(1)
    assert same_bits(f(x), whole)
    for size in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100):
        for start in range(0, 80, 1 + size // 3):
            assert same_bits(f(x[start : start + size]), whole[start : start + size])
            assert same_bits(f(x[start : start + size].clone()), whole[start : start + size])
    assert same_bits(f(x[:4096].view(16, 16, 16)).flatten(), whole[:4096])


@examples(10)
@given(problems(), seeds)
def test_running_again_gives_the_same_bits(p: Problem, seed: int) -> None:
    ids = listed(p, seed, 5)
    for a, b in zip(attended(p, ids), attended(p, ids), strict=True):
        assert same_bits(a, b)


@examples(20)
@given(problems(), st.booleans(), st.sampled_from(["q", "k", "v"]))
def test_a_nan_that_is_read_shows_in_the_output(p: Problem, paged: bool, where: str) -> None:
    """A wrong read of a poisoned place must not end as a block that silently weighs nothing."""
    rows = {"q": [p.q[b : b + 1] for b in range(p.B)], "k": p.keys, "v": p.values}[where]
    for x in rows:
        x[:, -1:] = NAN
    bad = moved(p, paged, seed=1)
    out, _ = attended(bad, all_blocks(bad))
    for b, h in p.pairs():
        hit = h == p.H - 1 if where == "q" else True
        if p.blocks(b) and hit:
            assert out[b, (h + 1) * p.G - 1].isnan().any()


def test_ids_without_a_slot_are_padding() -> None:
    """A page table shorter than the row, -1 in it, and slots beyond the cache: nothing is read, nothing is invented."""
    p = make(5, [64, 40], 16, H=1, G=2)
    assert p.page_table is not None
    short = p.page_table[:, :, :2].contiguous()
    ids = torch.arange(4, dtype=torch.int32).repeat(2, 1, 1)
    o, lse = ck.attend(*p.args(), ids, p.seq_lens, p.scale, short)
    full_o, full_lse = ck.attend(*p.args(), ids, *p.tail())
    assert same_bits(o[:, :, :2], full_o[:, :, :2]) and same_bits(lse[:, :, :2], full_lse[:, :, :2])
    assert bool((lse[:, :, 2:] == -INF).all()) and bool((o[:, :, 2:] == 0).all())
    for slot in (-1, p.k.shape[2]):
        holes = p.page_table.clone()
        holes[:, :, 1] = slot
        o, lse = ck.attend(*p.args(), ids, p.seq_lens, p.scale, holes)
        assert bool((lse[:, :, 1] == -INF).all()) and bool((o[:, :, 1] == 0).all())
        assert same_bits(lse[:, :, 2:], full_lse[:, :, 2:])


@pytest.mark.parametrize(
    "ids", [torch.empty(2, 1, 0, dtype=torch.int32), torch.zeros(2, 1, 3, dtype=torch.int32)[..., 3:]]
)
def test_no_ids_are_the_empty_set(ids: Tensor) -> None:
    """A fresh empty tensor and a slice of no length, alike."""
    p = make(1, [40, 0], 16, H=1, G=3)
    o, lse = ck.attend(*p.args(), ids, *p.tail())
    assert o.shape == (2, 1, 0, 3, 16) and lse.shape == (2, 1, 0, 3)
    out, out_lse = merged(o, lse)
    assert same_bits(out, torch.zeros(2, 3, 16)) and same_bits(out_lse, torch.full((2, 3), -INF))


# ---------------------------------------------------------------------------------------------------- attend, merged
@examples(60)
@given(problems(), seeds)
def test_merged_partials_are_attention_over_the_blocks_in_any_order(p: Problem, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    sets = {(b, h): torch.randperm(p.blocks(b), generator=gen)[: 1 + seed % 4].tolist() for b, h in p.pairs()}
    ids = id_table(sets, p.B, p.H, 6)
    out, lse = attended(p, ids)
    want, want_lse = expect(p, sets)
    close(out, want)
    close(lse, want_lse)
    mixed = ids[:, :, torch.randperm(6, generator=gen)]
    close(attended(p, mixed)[0], out)


@examples(40)
@given(problems())
def test_all_blocks_are_dense_attention(p: Problem) -> None:
    out, _ = attended(p, all_blocks(p))
    for b in range(p.B):
        if p.blocks(b):
            dense = scaled_dot_product_attention(
                p.q[b : b + 1, :, None].double(), p.keys[b][None].double(), p.values[b][None].double(), enable_gqa=True
            )
            close(out[b], dense[0, :, 0])


@pytest.mark.parametrize("T", [32, 64, 128])
@pytest.mark.parametrize("part", [{0, 2, 5, 7}, {0}, {0, 1, 2, 3, 4, 5, 6}, {2, 3}])
def test_two_parts_of_eight_blocks_are_the_whole(T: int, part: set[int]) -> None:
    p = make(T, [8 * T, 8 * T - 3], T, H=4, G=1, D=64)
    whole = attended(p, all_blocks(p))
    states = []
    for blocks in (sorted(part), sorted(set(range(8)) - part)):
        states.append(attended(p, torch.tensor(blocks, dtype=torch.int32).repeat(2, 4, 1)))
    o = torch.stack([o.view(2, 4, 1, 64) for o, _ in states], 2)
    lse = torch.stack([lse.view(2, 4, 1) for _, lse in states], 2)
    for got, want in zip(merged(o, lse), whole, strict=True):
        close(got, want)
    for got, want in zip(merged(o.flip(2), lse.flip(2)), whole, strict=True):
        close(got, want)


def test_more_than_256_blocks() -> None:
    p = make(2, [16 * 300 - 9], 16, H=1, G=2)
    out, lse = attended(p, all_blocks(p))
    want, want_lse = expect(p, {(0, 0): list(range(300))})
    close(out, want)
    close(lse, want_lse)


@examples(40)
@given(problems(gain=100.0))
def test_extreme_logits_neither_overflow_nor_give_nan(p: Problem) -> None:
    ids = all_blocks(p)
    check_finite = attended(p, ids)
    want, want_lse = expect(p, {(b, h): list(range(p.blocks(b))) for b, h in p.pairs()})
    assert not check_finite[0].isnan().any()
    close(check_finite[1], want_lse)  # relative: lse is in the hundreds
    close(check_finite[0], want, tol=2e-3)  # logits of 500 carry errors of 1e-4


@pytest.mark.parametrize("dominant", [0, 1, 2])
def test_one_block_that_dominates_by_more_than_float32_can_tell(dominant: int) -> None:
    p = make(9, [48], 16, H=1, G=2, paged=False)
    p.k[0, 0, dominant, 3] = p.keys[0][0, dominant * 16 + 3] = p.q[0].sum(0) * 100
    ids = all_blocks(p)
    _, lse = ck.attend(*p.args(), ids, *p.tail())
    others = [i for i in range(3) if i != dominant]
    assert float((lse[0, 0, dominant] - lse[0, 0, others].amax(0)).min()) > 104  # exp is 0 below
    out, out_lse = attended(p, ids)
    want, want_lse = expect(p, {(0, 0): [0, 1, 2]})
    close(out, want, tol=1e-4)
    close(out_lse, want_lse)


def test_the_lse_is_a_natural_logarithm() -> None:
    """Four equal logits of 2: log(4) + 2, not its base-2 sibling."""
    q, k = torch.full((1, 1, 16), 2.0), torch.full((1, 1, 1, 16, 16), 1.0)
    ids, lens = torch.zeros(1, 1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    _, lse = ck.attend(q, k, k, ids, lens, 1 / 16)
    assert float(lse) == pytest.approx(2 + math.log(4), abs=1e-6)


# ------------------------------------------------------------------------------------------- empty, and out of bounds
@pytest.mark.parametrize(("B", "N"), [(0, 3), (2, 0), (0, 0)])
def test_no_rows_and_no_blocks_are_no_work(B: int, N: int) -> None:
    q, k = torch.zeros(B, 4, 8), torch.zeros(B, 2, 3, 16, 8)
    lens, ids = torch.zeros(B, dtype=torch.int32), torch.zeros(B, 2, N, dtype=torch.int32)
    o, lse = ck.attend(q, k, k, ids, lens, 1.0)
    assert o.shape == (B, 2, N, 2, 8) and lse.shape == (B, 2, N, 2)
    out, total = ck.merge(o, lse, (torch.full_like(q, NAN), torch.full((B, 4), NAN)))
    assert bool((out == 0).all()) and bool((total == -INF).all())
    chosen = ck.Selection(ids, torch.full_like(ids, -1), ids, torch.zeros(B, 2, 2, dtype=torch.int32))
    for result in (
        ck.repair(q, k, k, chosen, o, lse, lens, 1.0),
        ck.repair_union(q, k, k, chosen, out, total, lens, 1.0),
    ):
        assert result[0].shape == (B, 4, 8) and bool((result[0] == 0).all())


@pytest.fixture
def debugging() -> Iterator[None]:
    ck.debug(True)
    yield
    ck.debug(False)


def cache(B: int = 2, S: int = 3, T: int = 4) -> tuple[Tensor, Tensor]:
    return torch.zeros(B, 2, S, T, 8), torch.zeros(B, 2, 8)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def test_debug_mode_names_a_token_beyond_the_cache(debugging: None) -> None:
    k, new = cache()
    lens = torch.tensor([12, 13], dtype=torch.int32)
    tail = "block 3 of row 1, head 0 has no slot: k has 3 slots"
    assert refused(lambda: ck.append(new, new, k, k.clone(), lens)) == f"append: {tail}"
    meta = torch.zeros(2, 2, 4, 8)
    assert refused(lambda: ck.append_quest(new, new, k, k.clone(), meta, meta.clone(), lens)) == f"append_quest: {tail}"
    ck.append(new, new, k, k.clone(), torch.tensor([12, 0], dtype=torch.int32))


def test_debug_mode_names_metadata_that_is_too_small(debugging: None) -> None:
    k, new = cache()
    lens, small = torch.tensor([12, 9], dtype=torch.int32), torch.zeros(2, 2, 2, 8)
    assert refused(lambda: ck.append_quest(new, new, k, k.clone(), small, small.clone(), lens)) == (
        "append_quest: block 2 of row 0, head 0 has no slot: kmin has 2 slots"
    )
    large = torch.zeros(2, 2, 9, 8)
    windows = {"window": 4, "stride": 2, "coarse_window": 8, "coarse_stride": 4}
    for k1, k2, words in (
        (large[:, :, :4], large, "block 4 of row 0, head 0 has no slot: k1 has 4 slots"),
        (large, large[:, :, :1], "block 1 of row 0, head 0 has no slot: k2 has 1 slots"),
    ):
        call = lambda k1=k1, k2=k2: ck.append_infllm(new, new, k, k.clone(), k1, k2, lens, **windows)
        assert refused(call) == f"append_infllm: {words}"
    ck.append_infllm(new, new, k, k.clone(), large[:, :, :5].clone(), large[:, :, :2].clone(), lens, **windows)


@pytest.mark.parametrize("slot", [-1, 3, 2**31 - 1])
def test_debug_mode_names_a_page_table_entry_that_is_no_slot(debugging: None, slot: int) -> None:
    k, new = cache()
    q, lens = torch.zeros(2, 4, 8), torch.tensor([8, 3], dtype=torch.int32)
    table = torch.tensor([0, 1]).int().expand(2, 2, 2).clone()
    table[0, 1, 1] = slot
    words = f"block 1 of row 0, head 1 has no slot ({slot} by the page table): k has 3 slots, the page table 2 entries"
    assert refused(lambda: ck.append(new, new, k, k.clone(), lens, table)) == f"append: {words}"
    ids = torch.tensor([[[0, 1]] * 2, [[0, -1]] * 2], dtype=torch.int32)
    assert refused(lambda: ck.attend(q, k, k, ids, lens, 1.0, table)) == f"attend: {words}"
    assert refused(lambda: ck.append(new, new, k, k.clone(), lens, table[:, :, :1])) == (
        "append: block 1 of row 0, head 0 has no slot: k has 3 slots, the page table 1 entries"
    )
    unused = torch.where(torch.arange(2) == 1, slot, table)  # of a block that nobody lists
    ck.attend(q, k, k, torch.where(ids == 1, -1, ids), lens, 1.0, unused.int())
