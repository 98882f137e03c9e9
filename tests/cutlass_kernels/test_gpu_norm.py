# SPDX-License-Identifier: Apache-2.0
"""rms_norm and add_rms_norm on a Hopper GPU: a rounding from the reference, and rarely; the sum to the bit."""

import pytest
import torch
from attention_cases import needs_sm90
from capture import captured
from rooms import Rooms

import cutlass_kernels as ck
from cutlass_kernels import reference

pytestmark = needs_sm90
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = (64, 896, 4096, 5120, 8192, 12288)
EPS = 1e-5


def draw(*shape, dtype=BF16, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=gen, device="cuda").to(dtype)
    torch.cuda.synchronize()  # a weight is not to be written while the launch that reads it comes up
    return x


def ulps(a, b):
    """Roundings between two tensors of half precision, whose bits are counted up from zero."""
    line = lambda x: torch.where(x.view(torch.int16) < 0, -(x.view(torch.int16).int() & 0x7FFF), x.view(torch.int16))
    return int((line(a).int() - line(b).int()).abs().max())


def check(x, residual, w):
    """Both ops against the reference, then the same bits again, and those of the row alone.

    Another order of the sum moves a normalised value by one rounding, here and there; times a weight that may be two.
    """
    y, total = ck.add_rms_norm(x, residual, w, EPS)
    wanted, added = reference.add_rms_norm(x, residual, w, EPS)
    assert torch.equal(total, added) and torch.equal(total, x + residual)
    assert ulps(y, wanted) <= 2 and int((y != wanted).sum()) <= max(2, y.numel() // 256)
    assert torch.equal(ck.rms_norm(total, w, EPS), y), "the sum has one order"
    for _ in range(3):
        again = ck.add_rms_norm(x, residual, w, EPS)
        assert torch.equal(again[0], y) and torch.equal(again[1], total)
    assert torch.equal(ck.rms_norm(total[-1:], w, EPS), y[-1:])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("K", SIZES)
def test_every_size(K, rows, dtype):
    check(draw(rows, K, dtype=dtype), draw(rows, K, dtype=dtype, seed=1), draw(K, dtype=dtype, seed=2))


@pytest.mark.parametrize("K", [8, 248, 264, 576, 8200, 16376, 16384])
def test_sizes_at_the_edges_of_warps_and_turns(K):
    check(draw(2, K), draw(2, K, seed=1), draw(K, seed=2))


def test_other_shapes_and_extreme_values():
    x, w = draw(1, 2, 3, 4096), draw(4096, seed=1)
    y = ck.rms_norm(x, w, EPS)
    assert y.shape == x.shape and ulps(y, reference.rms_norm(x, w, EPS)) <= 2
    for value in (0.0, 1e-20, 1e4, float("nan"), float("inf")):
        one = torch.full((1, 4096), value, device="cuda", dtype=BF16)
        got, wanted = ck.rms_norm(one, w, EPS), reference.rms_norm(one, w, EPS)
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=0.0, equal_nan=True)
    assert ck.rms_norm(x[:0], w, EPS).shape == (0, 2, 3, 4096)


def test_what_has_no_kernel_is_torchs():
    for K in (4, 100, 16392):
        x, residual, w = draw(2, K), draw(2, K, seed=1), draw(K, seed=2)
        assert torch.equal(ck.rms_norm(x, w, EPS), reference.rms_norm(x, w, EPS))
        pairs = zip(ck.add_rms_norm(x, residual, w, EPS), reference.add_rms_norm(x, residual, w, EPS), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    room, w = draw(2, 1032), draw(512, seed=1)
    for x in (room[:, 1:513], room[:, ::2][:, :512], room[:1, 1:513], room[:, :512].float()):
        assert torch.equal(ck.rms_norm(x, w.to(x.dtype), EPS), reference.rms_norm(x, w.to(x.dtype), EPS))


@pytest.mark.parametrize("K", [576, 4096, 12288])
def test_nothing_outside_of_the_tensors_is_read_or_written(K):
    rooms = Rooms()
    x, residual, w = (rooms.inside(draw(*s, seed=i)) for i, s in enumerate([(2, K), (2, K), (K,)]))
    check(x, residual, w)
    assert rooms.edges_untouched()
    assert bool(ck.rms_norm(x, w, EPS).isfinite().all())


def test_a_chain_in_a_graph_is_the_eager_one():
    """Each launch starts before the one in front of it has ended, and must still see all of what that one wrote."""
    K, x = 4096, draw(1, 4096)
    ups, downs = ([draw(*s, seed=10 * i + j) * 0.02 for i in range(3)] for j, s in enumerate([(5120, K), (K, 5120)]))
    w = draw(K, seed=99)

    def chain():
        y, total = ck.rms_norm(x, w, EPS), x
        for up, down in zip(ups, downs, strict=True):
            y, total = ck.add_rms_norm(ck.linear(ck.linear(y, up), down), total, w, EPS)
        return y, total

    graph, written = captured(chain)
    for seed in range(20):
        x.copy_(draw(1, K, seed=seed))
        graph.replay()
        got = [y.clone() for y in written]
        torch.cuda.synchronize()
        eager = chain()
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(got, eager, strict=True))
