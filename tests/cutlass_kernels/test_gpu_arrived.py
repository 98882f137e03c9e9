# SPDX-License-Identifier: Apache-2.0
"""Arrival counters on a Hopper GPU: attend counts, the repairs wait, nothing hangs, and no stream need be joined."""

from dataclasses import replace

import pytest
import torch
from attention_cases import SHAPES, Problem, name, needs_sm90, problem, random_ids, selection

import cutlass_kernels as ck

pytestmark = needs_sm90


def counters(p: Problem) -> torch.Tensor:
    return torch.zeros(*p.k.shape[:2], 2, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_attend_counts_what_arrived_and_changes_no_bit(shape):
    p, (o, lse) = problem(**shape), problem(**shape).attend()
    arrived, N = counters(p), p.ids.shape[2]
    for turn in (1, 2, 3):
        again = ck.attend(p.q, p.k, p.v, p.ids, p.lens, p.scale, p.table, arrived=arrived)
        assert torch.equal(again[0], o) and torch.equal(again[1], lse)
        assert bool((arrived[..., 0] == 4 * N * turn).all()) and not bool(arrived[..., 1].any())


@pytest.mark.parametrize("listed", [0, 20, 600], ids=["nothing", "a few", "more than a CTA holds"])
@pytest.mark.parametrize("width", [0, 30])
def test_repair_takes_arrived_of_any_size(listed, width):
    p = problem(B=2, T=16, N=600, H=2, G=5, lens=(12000, 90))
    A, P = p.ids[:, :, :listed].contiguous(), p.ids[:, :, 5 : 5 + width].contiguous()
    arrived = counters(p)
    o, lse = ck.attend(p.q, p.k, p.v, P, p.lens, p.scale, arrived=arrived)
    s, serial = selection(A, P), p.serial(A)
    out, full = ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, out=p.outputs(), arrived=arrived)
    assert torch.equal(out, serial[0]) and torch.equal(full, serial[1]) and not bool(arrived.any())


@pytest.mark.parametrize("halves", [False, True], ids=["repair", "its halves"])
def test_arrived_that_never_is_whole_gives_nan_and_no_hang(halves):
    p = problem(N=6)
    s, (o, lse), arrived = selection(p.ids, p.ids), p.attend(), counters(p)
    arrived[..., 0] = 4 * 6 - 1
    out, full = p.outputs()
    out.zero_(), full.zero_()
    if halves:
        fresh = ck.attend_missed(p.q, p.k, p.v, s, p.lens, p.scale)
        ck.merge_repaired(s, o, lse, *fresh, (out, full), arrived)
    else:
        ck.repair(p.q, p.k, p.v, s, o, lse, p.lens, p.scale, out=(out, full), arrived=arrived)
    assert bool(out.isnan().all()) and bool(full.isnan().all())


@pytest.mark.parametrize("halves", [False, True], ids=["repair", "its halves"])
@pytest.mark.parametrize("T", [16, 32, 64, 128, 256])
def test_arrived_in_place_of_joins_between_layers_of_a_graph(T, halves):
    """Layers share the partials of P and the counters; each forks behind its own scores."""
    layers, K, most = 3, 16, 40
    p = problem(B=2, H=2, G=8, T=T, N=K, lens=(most * T, most * T))
    arrived, side = counters(p), torch.cuda.Stream()
    q = torch.randn(layers, *p.q.shape, device="cuda").to(p.q.dtype)
    low, high = (torch.randn(layers, 2, 2, most, 128, device="cuda").to(p.q.dtype) for _ in range(2))
    P = torch.full((layers, 2, 2, 24), -1, dtype=torch.int32, device="cuda")
    scores = torch.empty(2, 2, most, device="cuda")
    picked = [ck.Selection.empty(2, 2, K, "cuda") for _ in range(layers)]
    outs = [p.outputs() for _ in range(layers)]
    o, lse = (torch.empty(2, 2, 24, 8, *d, device="cuda") for d in ((128,), ()))
    fresh = tuple(torch.empty(2, 2, K, 8, *d, device="cuda") for d in ((128,), ()))

    def step():
        main = torch.cuda.current_stream()
        for i, s in enumerate(picked):
            ck.quest_scores(q[i], low[i], high[i], p.lens, T, out=scores)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                ck.attend(q[i], p.k, p.v, P[i], p.lens, p.scale, out=(o, lse), arrived=arrived, waits=i == 1)
            ck.select(scores, p.lens, T, K, predicted=P[i], out=s)
            if halves:
                ck.attend_missed(q[i], p.k, p.v, s, p.lens, p.scale, out=fresh)
                ck.merge_repaired(s, o, lse, *fresh, outs[i], arrived)
            else:
                ck.repair(q[i], p.k, p.v, s, o, lse, p.lens, p.scale, out=outs[i], arrived=arrived)
        main.wait_stream(side)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gen = torch.Generator().manual_seed(T)
    p.k.normal_()
    p.v.normal_()
    hits = 0
    for turn in range(50):
        lens = [int(torch.randint(1, most * T + 1, (1,), generator=gen)) if turn else most * T for _ in range(2)]
        p.lens.copy_(torch.tensor(lens))
        q.normal_()
        low.normal_()
        for i in range(layers):
            P[i] = random_ids(2, 2, 24, [-(-n // T) for n in lens], gen)
            outs[i][0].fill_(float("nan"))
        graph.replay()
        assert not bool(arrived.any())
        for i, s in enumerate(picked):
            wanted = replace(p, q=q[i]).serial(s.ids)
            assert torch.equal(outs[i][0], wanted[0]) and torch.equal(outs[i][1], wanted[1])
            hits += int((s.position >= 0).sum())
    assert hits > 1000
