# SPDX-License-Identifier: Apache-2.0
"""silu_mul_linear on a Hopper GPU: its product against torch's, and of its sums what linear's own test asks."""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import needs_sm90
from capture import captured
from rooms import Rooms

import cutlass_kernels as ck

pytestmark = needs_sm90
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = (576, 1152, 1536, 2304, 4096, 13696, 14336, 25600)


def draw(*shape, dtype=BF16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=gen, device="cuda").to(dtype)
    torch.cuda.synchronize()  # a weight is not to be written while the launch that reads it comes up
    return x


def inputs(K, N, rows=(1,), bias=False, dtype=BF16):
    x, w, b = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate(((*rows, 2 * K), (N, K), (N,))))
    return x, w, b if bias else None


def product(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def apart(x, w, b):
    row = product(x).reshape(x.shape[:-1].numel(), w.shape[1])
    return ck.linear(row, w, b).view(*x.shape[:-1], len(w))


def rounding(dtype):
    return 2**-8 if dtype == BF16 else 2**-11


def check(given):
    """Within roundings of the layer in float64, and what float32 sums lose of the terms; then the same bits again.

    One rounding is the output's own. Two of each term, as errors that add up at random, are far more than comes of the
    few whose silu(gate) has another last bit.
    """
    x, w, b = given
    y = ck.silu_mul_linear(*given)
    assert y.shape == (*x.shape[:-1], len(w))
    row, matrix, least = product(x).double().flatten(), w.double().T, rounding(x.dtype)
    exact = row @ matrix + (0 if b is None else b.double())
    turned = (row**2 @ matrix**2).sqrt()
    error = (y.double().flatten() - exact).abs()
    assert bool((error <= least * (exact.abs() + 2 * turned) + 2**-20 * (row.abs() @ matrix.abs())).all())
    assert float(error.norm() / exact.norm()) < least
    for _ in range(3):
        assert torch.equal(ck.silu_mul_linear(*given), y)


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("N", [16, 576, 4096])
def test_every_size(N, K):
    check(inputs(K, N))
    check(inputs(K, N, rows=(1, 1), bias=True))


@pytest.mark.parametrize("K", [64, 256, 2048, 2112, 7936, 16384, 16448, 28672])
def test_float16_and_sizes_at_the_edges_of_turns_and_batches(K):
    check(inputs(K, 528, bias=True, dtype=FP16))
    check(inputs(K, 16, rows=(), dtype=FP16))


def alone(x):
    """The product itself, by a layer that gives back what it takes."""
    K = x.numel() // 2
    identity = torch.eye(K, device="cuda", dtype=x.dtype)
    torch.cuda.synchronize()
    return ck.silu_mul_linear(x, identity)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 60.0])
def test_the_product_is_torchs_but_for_a_last_bit_now_and_then(dtype, scale):
    x = draw(2 * 8192, dtype=torch.float32, seed=3)
    x[:8192] *= scale
    x = x.to(dtype)
    found, wanted = alone(x), product(x)
    assert int((found != wanted).sum()) <= 8192 // 128
    denormal = 2**-24  # of float16, the least
    torch.testing.assert_close(found, wanted, rtol=5 * rounding(dtype), atol=2 * denormal)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gates_of_every_size(dtype):
    """All finite numbers of the type, in rows of 8192; up is 1, so that this is silu."""
    bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    gates = bits.view(dtype)
    gates = torch.where(gates.isfinite(), gates, 0)
    for gate in gates.split(8192):
        found, wanted = alone(torch.cat((gate, torch.ones_like(gate)))), F.silu(gate)
        other = (found != wanted) & (wanted.abs() >= torch.finfo(dtype).smallest_normal)
        assert bool(found.isfinite().all()) and int(other.sum()) <= 8192 // 64
        torch.testing.assert_close(found, wanted, rtol=5 * rounding(dtype), atol=torch.finfo(dtype).smallest_normal)
        assert bool((found[gate < -90] == 0).all())


@pytest.mark.parametrize("at", [0, 1000, 4095, 4096, 8191])
def test_nan_of_either_half_is_in_every_output(at):
    x, w, _ = inputs(4096, 64)
    x[0, at] = float("nan")
    torch.cuda.synchronize()
    assert bool(ck.silu_mul_linear(x, w).isnan().all())


def test_the_kernel_is_there_for_one_row_only_and_torch_and_linear_for_the_rest(monkeypatch):
    from cutlass_kernels.templates import silu_linear

    asked, kernel = [], silu_linear.compiled
    monkeypatch.setattr(silu_linear, "compiled", lambda *a, **how: asked.append(how) or kernel(*a, **how))
    check(inputs(4096, 512))
    assert len(asked) == 4 and {x["k"] * x["split"] for x in asked} == {4096}
    asked.clear()
    others = [inputs(4096, 512, rows=(3,)), inputs(28736, 512), inputs(4096, 510), inputs(1000, 64, bias=True)]
    others += [inputs(100, 64), inputs(4096, 512, dtype=torch.float32), inputs(4096, 512, rows=(0,))]
    x, *rest = inputs(512, 64, bias=True)
    room = draw(1, 1032)
    others += [(room[:, 1:1025], *rest)]
    for given in others:
        assert torch.equal(ck.silu_mul_linear(*given), apart(*given))
    assert not asked


@pytest.mark.parametrize("K, N", [(576, 576), (1536, 576), (13696, 4096), (25600, 16)])
def test_nothing_outside_of_the_tensors_is_read_or_written(K, N, monkeypatch):
    rooms = Rooms()
    given = inputs(K, N, bias=True)
    within = tuple(rooms.inside(x) for x in given)
    empty = lambda like, *shape: rooms.inside(torch.zeros(*shape, device=like.device, dtype=like.dtype))
    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    torch.cuda.synchronize()
    found = ck.silu_mul_linear(*within)
    monkeypatch.undo()
    assert len(rooms.rooms) == 4, "the output is in a room of its own"
    assert torch.equal(found, ck.silu_mul_linear(*given))
    assert rooms.edges_untouched() and rooms.finite()


@pytest.mark.parametrize("K, wide", [(4096, 13696), (576, 1536), (5120, 25600)])
def test_a_chain_in_a_graph_is_the_eager_one(K, wide):
    """Each launch starts before the one in front of it has ended, and must still see all of what that one wrote."""
    x = draw(1, K)
    ups = [draw(2 * wide, K, seed=10 + i) * K**-0.5 for i in range(3)]
    downs = [draw(K, wide, seed=20 + i) * wide**-0.5 for i in range(3)]
    torch.cuda.synchronize()

    def chain():
        y = x
        for up, down in zip(ups, downs, strict=True):
            y = ck.silu_mul_linear(ck.linear(y, up), down)
        return ck.linear(y, ups[0])

    graph, written = captured(chain)
    for seed in range(30):
        x.copy_(draw(1, K, seed=seed))
        graph.replay()
        got = written.clone()
        torch.cuda.synchronize()
        assert torch.equal(got, chain()) and bool(got.isfinite().all()) and bool(got.any())
