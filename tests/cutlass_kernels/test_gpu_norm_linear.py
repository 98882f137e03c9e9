# SPDX-License-Identifier: Apache-2.0
"""add_norm_linear on a Hopper GPU: the bits of add_rms_norm and linear, and what linear's own test asks of its sums."""

import pytest
import torch
from attention_cases import needs_sm90
from capture import captured
from rooms import Rooms

import cutlass_kernels as ck
from cutlass_kernels import reference

pytestmark = needs_sm90
BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
SIZES = (576, 896, 2048, 4096, 5120, 8192)


def draw(*shape, dtype=BF16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=gen, device="cuda").to(dtype)
    torch.cuda.synchronize()  # a weight is not to be written while the launch that reads it comes up
    return x


def inputs(K, N, rows=(1,), bias=False, dtype=BF16):
    shapes = ((*rows, K), (*rows, K), (K,), (N, K), (N,))
    x, residual, scale, w, b = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    return x, residual, scale, EPS, w, b if bias else None


def apart(x, residual, scale, eps, w, b):
    y, total = ck.add_rms_norm(x, residual, scale, eps)
    return ck.linear(y.view(-1, len(scale)), w, b).view(*x.shape[:-1], len(w)), total


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def check(given):
    """Bit for bit the two ops; within a rounding, and what float32 sums lose of the terms, of the layer in float64."""
    x, residual, scale, eps, w, b = given
    y, total = ck.add_norm_linear(*given)
    row, added = ck.add_rms_norm(x, residual, scale, eps)
    assert torch.equal(total, added) and torch.equal(total, x + residual)
    assert same((y, total), apart(*given))
    matrix, offset = w.double().T, (0 if b is None else b.double())
    exact, terms = row.double() @ matrix + offset, row.double().abs() @ matrix.abs()
    rounding = 2**-8 if x.dtype == BF16 else 2**-11
    assert bool(((y.double() - exact).abs() <= rounding * exact.abs() + 2**-20 * terms).all())
    wanted = reference.rms_norm(total, scale, eps).double() @ matrix + offset
    assert float((y.double() - wanted).norm() / wanted.norm()) < rounding  # the reference's norm is of another order
    for _ in range(3):
        assert same(ck.add_norm_linear(*given), (y, total))


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("N", [16, 48, 960, 5120, 27392])
def test_every_size(N, K):
    check(inputs(K, N))
    check(inputs(K, N, rows=(1, 1), bias=True))


@pytest.mark.parametrize("K", [64, 256, 2112, 3136, 7936])
def test_float16_and_sizes_at_the_edges_of_warps_and_turns(K):
    check(inputs(K, 528, bias=True, dtype=FP16))
    check(inputs(K, 16, rows=(), dtype=FP16))


def test_the_kernel_is_there_for_one_row_only_and_the_two_ops_for_the_rest(monkeypatch):
    from cutlass_kernels.templates import norm_linear

    asked, kernel = [], norm_linear.compiled
    monkeypatch.setattr(norm_linear, "compiled", lambda *a, **how: asked.append(how) or kernel(*a, **how))
    assert same(ck.add_norm_linear(*inputs(4096, 512)), apart(*inputs(4096, 512))) and len(asked) == 1
    others = [inputs(4096, 512, rows=(3,)), inputs(13696, 512), inputs(4096, 510), inputs(1000, 64, bias=True)]
    others += [inputs(100, 64), inputs(4096, 512, dtype=torch.float32), inputs(4096, 512, rows=(0,))]
    x, residual, *rest = inputs(512, 64, bias=True)
    room = draw(1, 520)
    others += [(room[:, 1:513], residual, *rest), (x, room[:, 1:513], *rest)]
    for given in others:
        assert same(ck.add_norm_linear(*given), apart(*given))
    assert len(asked) == 1


@pytest.mark.parametrize("K, N", [(576, 960), (4096, 512), (5120, 5120), (8192, 16)])
def test_nothing_outside_of_the_tensors_is_read_or_written(K, N, monkeypatch):
    rooms = Rooms()
    x, residual, scale, eps, w, b = inputs(K, N, bias=True)
    given = (*map(rooms.inside, (x, residual, scale)), eps, *map(rooms.inside, (w, b)))
    empty = lambda like, *shape: rooms.inside(torch.zeros(*shape, device=like.device, dtype=like.dtype))
    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    torch.cuda.synchronize()
    found = ck.add_norm_linear(*given)
    monkeypatch.undo()
    assert len(rooms.rooms) == 7, "both outputs are in rooms of their own"
    assert same(found, ck.add_norm_linear(x, residual, scale, eps, w, b))
    assert rooms.edges_untouched() and rooms.finite()


@pytest.mark.parametrize("K, wide", [(4096, 13696), (576, 1536)])
def test_a_chain_in_a_graph_is_the_eager_one(K, wide):
    """Each launch starts before the one in front of it has ended, and must still see all of what that one wrote."""
    x, scale = draw(1, K), [draw(K, seed=90 + i) for i in range(3)]
    ups = [draw(wide, K, seed=10 + i) * 0.02 for i in range(3)]
    downs = [draw(K, wide, seed=20 + i) * 0.02 for i in range(3)]
    torch.cuda.synchronize()

    def chain(fused=True):
        y, total = ck.linear(ck.linear(x, ups[2]), downs[2]), x
        for up, down, w in zip(ups, downs, scale, strict=True):
            both = ck.add_norm_linear if fused else apart
            wide_row, total = both(y, total, w, EPS, up, None)
            y = ck.linear(wide_row, down)
        return y, total

    graph, written = captured(chain)
    for seed in range(50):
        x.copy_(draw(1, K, seed=seed))
        graph.replay()
        got = [y.clone() for y in written]
        torch.cuda.synchronize()
        assert same(got, chain()) and same(got, chain(fused=False))
        assert all(bool(y.isfinite().all()) for y in got)
