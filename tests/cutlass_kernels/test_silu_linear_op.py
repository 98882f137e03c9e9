# SPDX-License-Identifier: Apache-2.0
"""The op silu_mul_linear without a GPU: torch's silu and product, our linear, its door, how torch.compile sees it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_kernels as ck

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(rows, K, N, dtype=torch.bfloat16, bias=True, seed=0):
    """x [*rows, 2 K], the weight of the layer, and a bias or None."""
    x, w, b = (draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(((*rows, 2 * K), (N, K), (N,))))
    return x, w, b if bias else None


def apart(x, w, b):
    gate, up = x.split(w.shape[1], -1)
    row = F.silu(gate.contiguous()) * up
    return ck.linear(row.reshape(-1, w.shape[1]), w, b).view(*x.shape[:-1], len(w))


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([(), (1,), (1, 1), (3,), (2, 1, 2)]),
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from(TYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_it_is_an_activation_a_product_and_a_linear_layer(rows, K, N, dtype, bias, seed):
    args = inputs(rows, K, N, dtype, bias, seed)
    y, wanted = ck.silu_mul_linear(*args), apart(*args)
    assert y.shape == (*rows, N) and y.dtype == dtype
    if dtype is torch.float32:  # in which silu's last bit depends on where in a vector it stands
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-4)
    else:
        assert int((y != wanted).sum()) <= y.numel() // 16
        torch.testing.assert_close(y, wanted, rtol=2**-6, atol=2**-6)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(TYPES), st.floats(-200, 200), st.floats(-8, 8))
def test_rounding_is_that_of_silu_and_of_the_product(dtype, gate, up):
    """One weight of 1: the product itself, rounded twice."""
    x = torch.tensor([gate, up]).to(dtype)
    g, u = x.float()
    wanted = ((g / (1 + torch.exp(-g))).to(dtype).float() * u).to(dtype)
    y = ck.silu_mul_linear(x, torch.ones(1, 1, dtype=dtype))
    tiny = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(y[0], wanted, rtol=torch.finfo(dtype).eps * 2, atol=tiny)


def test_no_row_and_rows_that_do_not_lie_in_order():
    assert ck.silu_mul_linear(*inputs((0,), 64, 16)).shape == (0, 16)
    x, *rest = inputs((2, 3), 64, 16)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ck.silu_mul_linear(turned, *rest), ck.silu_mul_linear(x, *rest))


@pytest.mark.parametrize(
    "more, said",
    [
        ({"x": draw(1)[0]}, "x has 0 axes (), expected [2K]"),
        ({"x": draw(1, 128).double()}, "x is float64, expected float32 or bfloat16 or float16"),
        ({"x": draw(1, 64)}, "x (1, 64) ends in 64, expected gate and up, 2 K of weight (16, 64): 128"),
        ({"weight": draw(16, 128)}, "x (1, 128) ends in 128, expected gate and up, 2 K of weight (16, 128): 256"),
        ({"weight": draw(64)}, "weight has 1 axes (64,), expected [N, K]"),
        ({"weight": draw(16, 64).half()}, "weight is float16, expected bfloat16"),
        ({"weight": draw(16, 64).to("meta")}, "weight is on meta, x on cpu"),
        ({"bias": draw(15)}, "bias (15,) has N = 15, weight has N = 16"),
        ({"bias": draw(16).float()}, "bias is float32, expected bfloat16"),
    ],
)
def test_the_door(more, said):
    fits = dict(zip(("x", "weight", "bias"), inputs((1,), 64, 16), strict=True))
    with pytest.raises(ValueError) as error:
        ck.silu_mul_linear(**{**fits, **more})
    assert str(error.value) == f"silu_mul_linear: {said}"


def test_torch_compile_sees_one_op():
    x, *rest = inputs((1, 1), 64, 16)

    def layer(x):
        return ck.silu_mul_linear(x * 2, *rest).sum() + x

    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(x), layer(x))
    for args in (inputs((1, 1), 64, 16), inputs((3,), 64, 16, bias=False), inputs((), 64, 16)):
        torch.library.opcheck(ck.OPS["silu_mul_linear"], args, test_utils=("test_schema", "test_faketensor"))


@settings(deadline=None)  # the first example imports the template
@given(st.integers(1, 448), st.sampled_from([1, 2, 4, 8]))
def test_batches_cover_the_row_and_fit_into_registers(steps, split):
    """Up to the largest row that linear has room for."""
    silu_linear = pytest.importorskip("cutlass_kernels.templates.silu_linear", reason="needs nvidia-cutlass-dsl")
    if steps % split:
        return
    k = 64 * steps
    ours = silu_linear.SiluLinear("bfloat16", k // split, split, False)
    assert ours.row.pieces == k // 8 and ours.row.turns == -(-k // 2048)
    batches = -(-ours.row.turns // ours.batch)
    assert 1 <= ours.batch <= 8 and batches == (1 if k <= 8 * 2048 else 2)
    assert batches * ours.batch - ours.row.turns < batches, "the last batch is about as long as the others"
