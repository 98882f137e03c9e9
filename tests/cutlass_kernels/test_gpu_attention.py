# SPDX-License-Identifier: Apache-2.0
"""attend, merge and the repairs on a Hopper GPU: against float64, and bit for bit against each other."""

import pytest
import torch
from attention_cases import (
    INF,
    SHAPES,
    Problem,
    check_lse,
    distance,
    exact,
    merged,
    name,
    needs_sm90,
    problem,
    random_ids,
    selection,
)

import cutlass_kernels as ck

pytestmark = needs_sm90

FEW = [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[4], SHAPES[5], SHAPES[6]]


# ------------------------------------------------------------------------------------------------ attend
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_partials_are_as_good_as_float32(shape):
    p = problem(**shape)
    o, lse = p.attend()
    wanted, wanted_lse = exact(p)
    assert distance(o, wanted) < 1e-5
    check_lse(lse, wanted_lse)
    padding = p.ids < 0
    assert bool((o[padding] == 0).all()) and bool((lse[padding] == -INF).all())


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_a_block_has_the_same_bits_wherever_it_stands(shape):
    p = problem(**shape)
    o, lse = p.attend()
    back = p.attend(p.ids.flip(2).contiguous())
    assert torch.equal(back[0].flip(2), o) and torch.equal(back[1].flip(2), lse)
    for n in (0, p.ids.shape[2] // 2):  # alone in a launch
        one = p.attend(p.ids[:, :, n : n + 1].contiguous())
        assert torch.equal(one[0][:, :, 0], o[:, :, n]) and torch.equal(one[1][:, :, 0], lse[:, :, n])
    many = p.attend(p.ids.repeat(1, 1, 9))
    assert torch.equal(many[0], o.repeat(1, 1, 9, 1, 1)) and torch.equal(many[1], lse.repeat(1, 1, 9, 1))


@pytest.mark.parametrize("T", [16, 64, 128])
def test_a_page_table_changes_no_bit(T):
    p = problem(T=T, N=12, B=2, lens=(1500, 40), paged=True)
    at = p.table.clamp(min=0).long()[..., None, None].expand(-1, -1, -1, T, p.k.shape[4])
    plain = Problem(p.q, p.k.gather(2, at), p.v.gather(2, at), p.ids, p.lens, p.scale)
    for a, b in zip(p.attend(), plain.attend(), strict=True):
        assert torch.equal(a, b)


def test_ids_out_of_range_are_padding():
    p = problem(T=64, N=8, lens=(300,), paged=True)  # 5 blocks
    wild = torch.tensor([[[0, 5, 2**31 - 1, -(2**31), -2, 4, 1 << 20, 3]] * 2], dtype=torch.int32, device="cuda")
    p.table[0, 0, 3] = 10**6  # a slot beyond the cache
    o, lse = p.attend(wild)
    dead = torch.tensor([False, True, True, True, True, False, True, False], device="cuda")
    assert bool((lse[:, :, dead] == -INF).all()) and bool((o[:, :, dead] == 0).all())
    assert bool((lse[0, 0, 7] == -INF).all()) and bool((lse[0, 1, 7] > -INF).all())


def test_offsets_pass_two_to_the_31_elements():
    T, D, S = 64, 128, (1 << 31) // (64 * 128) // 2 + 1000  # two heads: the second starts beyond 2^30, ends beyond 2^31
    k = torch.empty(1, 2, S, T, D, dtype=torch.bfloat16, device="cuda")
    v = torch.empty_like(k)
    assert k.numel() > 1 << 31
    ids = torch.tensor([[[0, S - 1000, S - 1], [1, S // 2, S - 1]]], dtype=torch.int32, device="cuda")
    small = problem(H=2, N=3, lens=(64 * 3,), T=T, D=D, full=True)
    for h in range(2):
        for n in range(3):
            k[0, h, int(ids[0, h, n])] = small.k[0, h, n]
            v[0, h, int(ids[0, h, n])] = small.v[0, h, n]
    lens = torch.tensor([S * T], dtype=torch.int32, device="cuda")
    big = Problem(small.q, k, v, ids, lens, small.scale)
    for a, b in zip(big.attend(), small.attend(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", FEW, ids=name)
def test_all_blocks_in_any_order_are_dense_attention(shape):
    p = problem(**shape)
    blocks = -(-int(p.lens.max()) // p.k.shape[3])
    B, H = p.k.shape[:2]
    every = torch.arange(blocks, dtype=torch.int32, device="cuda").expand(B, H, -1).contiguous()
    out, lse = p.serial(every)
    wanted, wanted_lse = merged(*exact(p, every))
    assert distance(out, wanted) < (4e-3 if p.q.dtype == torch.bfloat16 else 5e-4)
    check_lse(lse, wanted_lse)
    shuffled = every[:, :, torch.randperm(blocks, device="cuda")].contiguous()
    assert distance(p.serial(shuffled)[0], wanted) < (4e-3 if p.q.dtype == torch.bfloat16 else 5e-4)


@pytest.mark.parametrize("T", [16, 64, 256])
def test_huge_logits(T):
    p = problem(T=T, N=6, lens=(1900,), spread=100.0, full=True)
    o, lse = p.attend()
    wanted, wanted_lse = exact(p)
    assert float(wanted_lse.abs().max()) > 200
    assert distance(o, wanted) < 2e-3  # of a logit of 500, float32 keeps 3e-5
    check_lse(lse, wanted_lse)
    out, full = p.serial()
    assert distance(out, merged(wanted, wanted_lse)[0]) < 5e-3
    check_lse(full, merged(wanted, wanted_lse)[1])


def test_a_dominant_block_overflows_nothing():
    p = problem(T=32, N=8, lens=(500,), full=True)
    p.k[:, :, 3] = p.q[0, 0] * 20  # this block's lse is far above every other's
    out, lse = p.serial()
    wanted, wanted_lse = merged(*exact(p))
    assert distance(out, wanted) < 4e-3
    check_lse(lse, wanted_lse)


def test_ragged_rows_and_empty_ones():
    p = problem(B=5, T=64, N=7, lens=(0, 1, 64, 65, 700), paged=True)
    o, lse = p.attend()
    wanted, wanted_lse = exact(p)
    assert distance(o, wanted) < 1e-5
    check_lse(lse, wanted_lse)
    out, full = p.serial()
    assert bool((out[0] == 0).all()) and bool((full[0] == -INF).all())
    assert not bool(out.isnan().any()) and bool((full[1:] > -INF).all())


def test_runs_give_the_same_bits():
    p = problem(B=2, H=8, T=16, N=200, lens=(9000, 500))
    first = (*p.attend(), *p.serial())
    for _ in range(5):
        for a, b in zip(first, (*p.attend(), *p.serial()), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("T", [16, 64, 128])
def test_a_nan_that_is_read_shows(T, which):
    p = problem(T=T, N=6, lens=(1500,), full=True)
    block = int(p.ids[0, 1, 2])
    getattr(p, which)[0, 1, block, 3] = float("nan")
    o, lse = p.attend()
    bad = torch.zeros(2, 6, dtype=torch.bool, device="cuda")
    bad[1, 2] = True
    assert torch.equal(o[0].isnan().any(-1).all(-1), bad) and bool(o[0, 1, 2].isnan().all())
    assert bool(lse[0, 1, 2].isnan().all()) == (which == "k") and not bool(lse[0, 0].isnan().any())
    out, full = p.serial()
    assert bool(out[0, -4:].isnan().all()) and not bool(out[0, :4].isnan().any())


# ------------------------------------------------------------------------------------------------ merge
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [1, 2, 5, 33, 257, 1100])
def test_merge_against_float64(N, dtype):
    gen = torch.Generator(device="cuda").manual_seed(N)
    B, H, G, D = 2, 3, 5, 128
    o = torch.randn(B, H, N, G, D, device="cuda", generator=gen)
    lse = torch.randn(B, H, N, G, device="cuda", generator=gen) * 20
    empty = torch.rand(B, H, N, G, device="cuda", generator=gen) < 0.3
    empty[1, 2] = True  # nothing at all
    lse[empty], o[empty] = -INF, float("nan")
    out = torch.full((B, H * G, D), float("nan"), device="cuda", dtype=dtype), torch.empty(B, H * G, device="cuda")
    ck.merge(o, lse, out)
    wanted, full = merged(torch.where(empty[..., None], 0.0, o), lse)
    assert distance(out[0], wanted) < {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    check_lse(out[1], full)
    assert bool((out[0][1, -G:] == 0).all()) and bool((out[1][1, -G:] == -INF).all())
    early = ck.merge(o, lse, (torch.full_like(out[0], float("nan")), torch.empty_like(out[1])), early=True)
    assert torch.equal(early[0], out[0]) and torch.equal(early[1], out[1])


def test_empty_parts_change_no_bit():
    p = problem(N=20, lens=(4000,), full=True)
    out, lse = p.serial()
    padded = torch.cat((p.ids, torch.full_like(p.ids, -1).repeat(1, 1, 20)), 2)
    for a, b in zip((out, lse), p.serial(padded), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ exact repair
def predicted(p: Problem, relation: str) -> torch.Tensor:
    """P in a relation to A = p.ids, in an order of its own."""
    A, gen = p.ids.cpu(), torch.Generator().manual_seed(5)
    B, H, K = A.shape
    if relation == "empty":
        P = A[:, :, :0]
    elif relation == "padding":
        P = torch.full_like(A, -1)
    elif relation == "equal":
        P = A[:, :, torch.randperm(K, generator=gen)]
    elif relation == "one missed":
        P = torch.where(torch.arange(K) == 1, -1, A)
    else:
        T = p.k.shape[3]
        P = torch.full((B, H, K + K // 2 + 1), -1, dtype=torch.int32)
        for b in range(B):
            for h in range(H):
                a = [x for x in A[b, h].tolist() if x >= 0]
                others = [x for x in range(-(-int(p.lens[b]) // T)) if x not in a]
                keep = {"superset": len(a), "disjoint": 0, "random": len(a) // 2}[relation]
                mixed = [a[i] for i in torch.randperm(len(a), generator=gen)[:keep]] + others[: P.shape[2] - keep]
                P[b, h, : len(mixed)] = torch.tensor(mixed, dtype=torch.int32)[
                    torch.randperm(len(mixed), generator=gen)
                ]
    return P.contiguous().cuda()


RELATIONS = ["empty", "padding", "equal", "one missed", "superset", "disjoint", "random"]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("shape", FEW, ids=name)
def test_repair_is_serial_bit_for_bit(shape, relation):
    p = problem(**shape)
    P = predicted(p, relation)
    o, lse = p.attend(P)
    s = selection(p.ids, P)
    wasted = torch.ones(P.shape, dtype=torch.bool, device="cuda")
    at = s.position.clamp(min=0).long()
    if P.shape[2]:  # what A does not hold must not be read: poison it
        wasted.scatter_(2, at, False)
        wasted |= P < 0
        o[wasted], lse[wasted] = float("nan"), float("nan")
    out, full = ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, p.table, out=p.outputs())
    serial = p.serial()
    assert torch.equal(out, serial[0]) and torch.equal(full, serial[1])
    fresh = tuple(torch.full((*p.ids.shape, *x.shape[3:]), float("nan"), device="cuda") for x in (o, lse))
    ck.attend_missed(p.q, p.k, p.v, s, p.lens, p.scale, p.table, fresh)
    out, full = ck.merge_repaired(s, o, lse, *fresh, p.outputs())
    assert torch.equal(out, serial[0]) and torch.equal(full, serial[1])


REPAIRS = [
    dict(H=2, G=16, T=64, N=64, lens=(9000,)),
    dict(H=4, G=4, T=64, N=64, B=3, lens=(7000, 3000, 40), paged=True),
    dict(H=2, G=5, T=64, N=130, lens=(9001,), dtype=torch.float16),
    dict(H=2, G=8, T=64, N=20, D=64, lens=(3000, 0), B=2),
    dict(H=2, G=16, T=16, N=512, lens=(9001,)),
    dict(H=3, G=1, T=16, N=512, B=2, lens=(9001, 33), paged=True),
    dict(H=2, G=2, T=32, N=100, lens=(5000,), dtype=torch.float16),
    dict(H=2, G=16, T=128, N=40, B=3, lens=(6500, 100, 5), paged=True),
    dict(H=2, G=4, T=256, N=20, lens=(6700, 300), B=2),
    dict(H=1, G=3, T=256, N=7, D=64, lens=(2000,), dtype=torch.float16, paged=True),
]


def missing(p: Problem, n: int, seed: int = 3) -> torch.Tensor:
    """P without n blocks of each row of A = p.ids, the last one among them where n > 1, and with wasted ones."""
    A, gen = p.ids.cpu(), torch.Generator().manual_seed(seed)
    B, H, K = A.shape
    P = torch.full((B, H, K + K // 2), -1, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            a = A[b, h][A[b, h] >= 0]
            drop = torch.randperm(len(a), generator=gen)
            if n > 1:
                drop = torch.cat((drop[drop == len(a) - 1], drop[drop < len(a) - 1]))
            drop = drop[:n]
            keep = torch.ones(len(a), dtype=torch.bool)
            keep[drop] = False
            others = sorted(set(range(-(-int(p.lens[b]) // p.k.shape[3]))) - set(a.tolist()))
            mixed = torch.cat((a[keep], torch.tensor(others[: P.shape[2] - len(a)], dtype=torch.int32)))
            P[b, h, torch.randperm(P.shape[2], generator=gen)[: len(mixed)]] = mixed
    return P.cuda()


@pytest.mark.parametrize("misses", [0, 1, 4, 5, 13, 1000])
@pytest.mark.parametrize("shape", REPAIRS, ids=name)
def test_repair_of_any_number_of_misses(shape, misses):
    p = problem(**shape)
    P = missing(p, misses)
    o, lse = p.attend(P)
    s = selection(p.ids, P)
    wasted = (P[:, :, :, None] != p.ids[:, :, None]).all(3) | (P < 0)  # what A does not hold must not be read
    o[wasted], lse[wasted] = float("nan"), float("nan")
    serial = p.serial()
    for _ in range(3):
        out, full = ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, p.table, out=p.outputs())
        assert torch.equal(out, serial[0]) and torch.equal(full, serial[1])


def test_repair_of_ids_out_of_range():
    p = problem(T=64, N=8, lens=(300,), paged=True)  # 5 blocks
    wild = torch.tensor([[[0, 5, 2**31 - 1, -(2**31), -2, 4, 1 << 20, 3]] * 2], dtype=torch.int32, device="cuda")
    p.table[0, 0, 3] = 10**6  # a slot beyond the cache
    p = p.with_ids(wild)
    P = torch.tensor([[[4, 2]] * 2], dtype=torch.int32, device="cuda")
    s = ck.Selection(wild, torch.where(wild == 4, 0, -1).int(), wild, wild[..., :2].contiguous())
    out, full = ck.repair(p.q, p.k, p.v, s, *p.attend(P), p.lens, p.scale, p.table, out=p.outputs())
    serial = p.serial()
    assert torch.equal(out, serial[0]) and torch.equal(full, serial[1])


def test_repair_of_more_parts_than_a_cta_holds():
    p = problem(T=16, N=600, H=2, G=4, lens=(12000,))
    P = missing(p, 40)
    out, full = ck.repair(p.q, p.k, p.v, selection(p.ids, P), *p.attend(P), p.lens, p.scale, out=p.outputs())
    serial = p.serial()
    assert torch.equal(out, serial[0]) and torch.equal(full, serial[1])


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_that_a_repair_reads_shows(which):
    p = problem(T=64, N=6, lens=(1500,), full=True)
    P = missing(p, 3)
    s, (o, lse) = selection(p.ids, P), p.attend(P)
    lost = int((s.position[0, 1] < 0).nonzero()[0])
    getattr(p, which)[0, 1, int(p.ids[0, 1, lost]), 3] = float("nan")
    out, full = ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, out=p.outputs())
    assert bool(out[0, -4:].isnan().all()) and not bool(out[0, :4].isnan().any())
    assert bool(full[0, -4:].isnan().all()) == (which == "k") and not bool(full[0, :4].isnan().any())


def test_repair_of_nothing():
    p = problem(B=2, N=5, lens=(300, 0))
    nothing = p.ids[:, :, :0].contiguous()
    for A in (nothing, torch.full_like(p.ids, -1)):
        o, lse = p.attend()
        out, full = ck.repair(p.q, p.k, p.v, selection(A, p.ids), o, lse, p.lens, p.scale, out=p.outputs())
        assert bool((out == 0).all()) and bool((full == -INF).all())


@pytest.mark.parametrize("T", [16, 64, 128])
@pytest.mark.parametrize("late", [False, True], ids=["join before repair", "join before its second half"])
def test_repair_under_graph_replay_with_changed_contents_and_a_second_stream(late, T):
    p = problem(B=2, H=2, G=16, T=T, N=24, lens=(4000, 1000))
    P = predicted(p, "random")
    o, lse = p.attend(P)
    s = ck.Selection(*(x.clone() for x in selection(p.ids, P)))
    out, side = p.outputs(), torch.cuda.Stream()
    fresh = p.attend()

    def step():
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            ck.attend(p.q, p.k, p.v, P, p.lens, p.scale, out=(o, lse))
        if late:
            ck.attend_missed(p.q, p.k, p.v, s, p.lens, p.scale, out=fresh)
        main.wait_stream(side)
        if late:
            ck.merge_repaired(s, o, lse, *fresh, out)
        else:
            ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, out=out)

    step()
    p.serial()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gen = torch.Generator().manual_seed(11)
    for turn in range(8):  # also shorter and longer sequences than at capture
        lens = [4000 - 500 * turn if turn % 2 else 3999, 64 * turn + 1]
        p.lens.copy_(torch.tensor(lens))
        p.k.normal_()
        p.v.normal_()
        p.q.normal_()
        blocks = [-(-n // T) for n in lens]
        A = random_ids(2, 2, p.ids.shape[2], blocks, gen).cuda()
        P.copy_(random_ids(2, 2, P.shape[2], blocks, gen).cuda())
        for to, x in zip(s, selection(A, P), strict=True):
            to.copy_(x)
        out[0].fill_(float("nan"))
        graph.replay()
        wanted = p.serial(A)
        assert torch.equal(out[0], wanted[0]) and torch.equal(out[1], wanted[1])


# ------------------------------------------------------------------------------------------------ union repair
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("shape", FEW, ids=name)
def test_union_repair_is_attention_over_both(shape, relation):
    p = problem(**shape)
    P = predicted(p, relation)
    s = selection(p.ids, P)
    state = ck.merge(*p.attend(P), p.outputs(torch.float32))
    out, full = ck.repair_union(p.q, p.k, p.v, s, *state, p.lens, p.scale, p.table, out=p.outputs())
    wanted, wanted_full = merged(*exact(p, torch.cat((P, s.missed), 2)))
    assert distance(out, wanted) < (4e-3 if p.q.dtype == torch.bfloat16 else 5e-4)
    check_lse(full, wanted_full)


# ------------------------------------------------------------------------------------------------ doors
def test_empty_launches():
    p = problem(N=4)
    none = p.ids[:, :, :0].contiguous()
    o, lse = p.attend(none)
    assert o.shape[2] == 0
    out, full = ck.merge(o, lse, p.outputs())
    assert bool((out == 0).all()) and bool((full == -INF).all())
    q, k = p.q[:0], p.k[:0]
    o, lse = ck.attend(q, k, p.v[:0], p.ids[:0], p.lens[:0], 1.0)
    out, full = ck.merge(o, lse, (torch.empty_like(q), q.new_empty(0, q.shape[1], dtype=torch.float32)))
    assert out.shape[0] == 0 and o.shape[0] == 0


def attend_of(D=128, T=64, G=4, dtype=torch.bfloat16):
    k = torch.zeros(1, 2, 4, T, D, dtype=dtype, device="cuda")
    q = torch.zeros(1, 2 * G, D, dtype=dtype, device="cuda")
    ids = torch.zeros(1, 2, 3, dtype=torch.int32, device="cuda")
    return ck.attend(q, k, k, ids, torch.tensor([9], dtype=torch.int32, device="cuda"), 1.0)


@pytest.mark.parametrize(
    "asked, said",
    [
        (dict(D=96), "attend: no CUDA kernel for head size 96; served: 64, 128"),
        (dict(T=48), "attend: no CUDA kernel for block size 48; served: 16, 32, 64, 128, 256"),
        (dict(G=17), "attend: no CUDA kernel for query heads a KV head 17; served: 1, 2, 3"),
        (dict(dtype=torch.float32), "attend: no CUDA kernel for dtype float32; served: bfloat16, float16"),
    ],
    ids=str,
)
def test_what_no_template_serves_is_said_in_a_line(asked, said):
    with pytest.raises(NotImplementedError) as error:
        attend_of(**asked)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_layout_is_checked():
    p = problem(N=4)
    with pytest.raises(ValueError, match=r"attend: k has strides .* expected contiguous"):
        ck.attend(p.q, p.k.transpose(3, 4).contiguous().transpose(3, 4), p.v, p.ids, p.lens, 1.0)
    shifted = torch.zeros(p.q.numel() + 1, dtype=p.q.dtype, device="cuda")[1:].view(p.q.shape)
    with pytest.raises(ValueError, match="attend: q starts at an address that is no multiple of 16 bytes"):
        ck.attend(shifted, p.k, p.v, p.ids, p.lens, 1.0)
    with pytest.raises(ValueError, match="ids is on cpu, k on cuda"):
        ck.attend(p.q, p.k, p.v, p.ids.cpu(), p.lens, 1.0)


def test_debug_mode_names_the_bad_id():
    p = problem(N=4, lens=(300,))
    p.ids[0, 1, 0] = 77
    ck.debug(True)
    try:
        with pytest.raises(ValueError, match=r"id 77 at \[0, 1, 0\] is out of range, row 0 has 5 blocks"):
            p.attend()
    finally:
        ck.debug(False)
