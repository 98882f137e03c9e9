# SPDX-License-Identifier: Apache-2.0
"""Attention over P that does not wait, on a Hopper GPU: beside the selection, and changing no bit."""

from dataclasses import replace

import pytest
import torch
from attention_cases import SHAPES, name, needs_sm90, problem, random_ids, selection

import cutlass_kernels as ck

pytestmark = needs_sm90


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_attention_that_does_not_wait_has_the_same_bits(shape):
    p = problem(**shape)
    wanted = p.attend()
    room = tuple(torch.full_like(x, float("nan")) for x in wanted)
    got = ck.attend(p.q, p.k, p.v, p.ids, p.lens, p.scale, p.table, out=room, waits=False)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_what_stands_behind_it_sees_what_stands_in_front():
    """It ends after the selection in front of it, which is much slower here; replayed, so that launches overlap."""
    p = problem(B=1, H=2, G=8, T=64, N=4, lens=(256,))
    scores, lens = torch.empty(64, 2, 60000, device="cuda"), torch.full((64,), 60000, dtype=torch.int32, device="cuda")
    s, seen = ck.Selection.empty(64, 2, 300, "cuda"), torch.empty(64, 2, 300, dtype=torch.int32, device="cuda")
    room, out = p.attend(), p.outputs()

    def step():
        ck.select(scores, lens, 1, 300, out=s)
        ck.attend(p.q, p.k, p.v, p.ids, p.lens, p.scale, p.table, out=room, waits=False)
        ck.merge(*room, out)  # a launch that overlaps those in front as far as it may
        seen.copy_(s.ids)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        scores.normal_()
        seen.zero_()
        graph.replay()
        assert torch.equal(seen, ck.select(scores, lens, 1, 300).ids)


@pytest.mark.parametrize("halves", [False, True], ids=["repair", "its halves"])
@pytest.mark.parametrize("T", [16, 32, 64, 128, 256])
def test_layers_of_a_graph_that_share_their_buffers(T, halves):
    """Partials, scores and lists are the same memory in all layers; everything changes between replays."""
    layers, K, most = 3, 16, 40
    p = problem(B=2, H=2, G=8, T=T, N=K, lens=(most * T, most * T))
    q = torch.randn(layers, *p.q.shape, device="cuda").to(p.q.dtype)
    low, high = (torch.randn(layers, 2, 2, most, 128, device="cuda").to(p.q.dtype) for _ in range(2))
    new = torch.randn(2, 2, 128, device="cuda").to(p.q.dtype)
    P = torch.full((layers, 2, 2, 24), -1, dtype=torch.int32, device="cuda")
    scores, s = torch.empty(2, 2, most, device="cuda"), ck.Selection.empty(2, 2, K, "cuda")
    ids = torch.empty(layers, 2, 2, K, dtype=torch.int32, device="cuda")
    outs = [p.outputs() for _ in range(layers)]
    o, lse = (torch.empty(2, 2, 24, 8, *d, device="cuda") for d in ((128,), ()))
    fresh = tuple(torch.empty(2, 2, K, 8, *d, device="cuda") for d in ((128,), ()))

    def step():
        for i in range(layers):
            ck.append(new, new, p.k, p.v, p.lens)  # the keys that attention reads are written right in front
            ck.quest_scores(q[i], low[i], high[i], p.lens, T, out=scores)
            ck.select(scores, p.lens, T, K, predicted=P[i], out=s)
            ck.attend(q[i], p.k, p.v, P[i], p.lens, p.scale, out=(o, lse), waits=False)
            if halves:
                ck.attend_missed(q[i], p.k, p.v, s, p.lens, p.scale, out=fresh)
                ck.merge_repaired(s, o, lse, *fresh, outs[i])
            else:
                ck.repair(q[i], p.k, p.v, s, o, lse, p.lens, p.scale, out=outs[i])
            ids[i] = s.ids

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gen = torch.Generator().manual_seed(T)
    hits = 0
    for turn in range(50):
        lens = [int(torch.randint(1, most * T + 1, (1,), generator=gen)) if turn else most * T for _ in range(2)]
        p.lens.copy_(torch.tensor(lens))
        for x in (p.k, p.v, q, low, high, new):
            x.normal_()
        for i in range(layers):
            P[i] = random_ids(2, 2, 24, [-(-n // T) for n in lens], gen)
            outs[i][0].fill_(float("nan"))
        graph.replay()
        for i in range(layers):
            wanted = replace(p, q=q[i]).serial(ids[i])
            assert torch.equal(outs[i][0], wanted[0]) and torch.equal(outs[i][1], wanted[1])
            hits += int((selection(ids[i], P[i]).position >= 0).sum())
    assert hits > 1000
