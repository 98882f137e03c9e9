# SPDX-License-Identifier: Apache-2.0
"""Attention over P beside a selection, on a Hopper GPU: the bits of both alone, in whatever order they end."""

from dataclasses import replace

import pytest
import torch
from attention_cases import SHAPES, name, needs_sm90, problem, random_ids, selection
from capture import captured

import cutlass_kernels as ck

pytestmark = needs_sm90


def buffers(p, K):
    """Of the selection and of the partials, with rubbish in them."""
    B, H, G = p.k.shape[0], p.k.shape[1], p.q.shape[1] // p.k.shape[1]
    chosen = ck.Selection(*(torch.full_like(x, -7) for x in ck.Selection.empty(B, H, K, "cuda")))
    o = torch.full((*p.ids.shape, G, p.q.shape[2]), float("nan"), device="cuda")
    return chosen, (o, o[..., 0].clone())


def both(p, scores, lens, sink, local, chosen, partials):
    """The selection, and attention beside it."""
    K = chosen.ids.shape[2]
    ck.select(scores, lens, p.k.shape[3], K, sink, local, p.ids, chosen)
    return chosen, ck.attend(p.q, p.k, p.v, p.ids, p.lens, p.scale, p.table, partials, beside=True)


def check(p, N, K, sink=0, local=1, seed=0):
    """Against select and attend; scores have ties."""
    gen = torch.Generator().manual_seed(seed)
    B, H, T = p.k.shape[0], p.k.shape[1], p.k.shape[3]
    scores = (torch.randn(B, H, N, generator=gen) * 8).round().cuda()
    wanted = ck.select(scores, p.lens, T, K, sink, local, predicted=p.ids)
    o, lse = p.attend()
    chosen, partials = both(p, scores, p.lens, sink, local, *buffers(p, K))
    for got, want in zip(chosen, wanted, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(partials[0], o) and torch.equal(partials[1], lse)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_it_is_the_selection_and_the_attention(shape):
    p = problem(**shape)
    blocks = -(-max(p.lens.tolist()) // p.k.shape[3])
    for K in (1, 6, blocks):
        check(p, blocks + 5, K, seed=K)


@pytest.mark.parametrize("N", [1, 3, 513, 1001, 4097, 9000, 20000])
@pytest.mark.parametrize("T", [16, 64])
def test_rows_of_any_capacity(N, T):
    p = problem(B=2, H=3, G=5, T=T, N=40, lens=(N * T - 3, max(1, N * T // 2)))
    check(p, N, min(N, 64), sink=min(1, N - 1), local=1)


@pytest.mark.parametrize("P", [0, 1, 5, 300])
def test_predictions_of_any_width(P):
    p = problem(B=2, H=2, G=8, T=32, N=P, lens=(9000, 0))
    check(p, 290, 48)


def test_without_a_slot_or_a_block_to_take():
    p = problem(B=2, H=2, G=8, T=32, N=5, lens=(900, 31))
    check(p, 30, 0, local=0)
    check(replace(p, k=p.k[:, :, :0].contiguous(), v=p.v[:, :, :0].contiguous()), 30, 4)


@pytest.mark.parametrize("N", [1000, 60000])
def test_what_stands_behind_it_sees_all_of_it(N):
    """The selection is much slower than the attention here; replayed, so that launches overlap."""
    p = problem(B=64, H=2, G=8, T=16, N=4, lens=(64,))
    lens = torch.full((64,), N * 16, dtype=torch.int32, device="cuda")
    scores, K = torch.empty(64, 2, N, device="cuda"), 300
    chosen, partials = buffers(p, K)
    seen, out = torch.empty_like(chosen.ids), p.outputs()

    def step():
        both(p, scores, lens, 0, 1, chosen, partials)
        ck.merge(*partials, out)  # a launch that overlaps those in front as far as it may
        seen.copy_(chosen.ids)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        scores.normal_()
        seen.zero_()
        graph.replay()
        assert torch.equal(seen, ck.select(scores, lens, 16, K).ids)


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
            both(replace(p, q=q[i], ids=P[i]), scores, p.lens, 0, 1, s, (o, lse))
            if halves:
                ck.attend_missed(q[i], p.k, p.v, s, p.lens, p.scale, out=fresh)
                ck.merge_repaired(s, o, lse, *fresh, outs[i])
            else:
                ck.repair(q[i], p.k, p.v, s, o, lse, p.lens, p.scale, out=outs[i])
            ids[i] = s.ids

    graph, _ = captured(step)
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
