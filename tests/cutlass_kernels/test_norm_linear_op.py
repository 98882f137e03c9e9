# SPDX-License-Identifier: Apache-2.0
"""The op add_norm_linear without a GPU: the two ops that it is made of, its door, how torch.compile sees it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_kernels as ck

TYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-5


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(rows, K, N, dtype=torch.bfloat16, bias=True, seed=0):
    """x and residual [*rows, K], the weights of the norm and of the layer, and a bias or None."""
    shapes = ((*rows, K), (*rows, K), (K,), (N, K), (N,))
    x, residual, scale, w, b = (draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes))
    return x, residual, scale, EPS, w, b if bias else None


def apart(x, residual, scale, eps, w, b):
    y, total = ck.add_rms_norm(x, residual, scale, eps)
    return ck.linear(y.reshape(-1, len(scale)), w, b).view(*x.shape[:-1], len(w)), total


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([(), (1,), (1, 1), (3,), (2, 1, 2)]),
    st.integers(1, 200),
    st.integers(1, 60),
    st.sampled_from(TYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_it_is_a_norm_and_a_linear_layer(rows, K, N, dtype, bias, seed):
    args = inputs(rows, K, N, dtype, bias, seed)
    y, total = ck.add_norm_linear(*args)
    assert y.shape == (*rows, N) and total.shape == (*rows, K) and y.dtype == total.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip((y, total), apart(*args), strict=True))
    assert torch.equal(total, args[0] + args[1])


def test_no_row_and_rows_that_do_not_lie_in_order():
    y, total = ck.add_norm_linear(*inputs((0,), 64, 16))
    assert y.shape == (0, 16) and total.shape == (0, 64)
    x, residual, *rest = inputs((2, 3), 64, 16)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ck.add_norm_linear(turned, residual, *rest)[0], ck.add_norm_linear(x, residual, *rest)[0])


@pytest.mark.parametrize(
    "more, said",
    [
        ({"x": draw(1)[0]}, "x has 0 axes (), expected [K]"),
        ({"x": draw(1, 64).double()}, "x is float64, expected float32 or bfloat16 or float16"),
        ({"residual": draw(2, 64)}, "residual (2, 64) has M0 = 2, x has M0 = 1"),
        ({"residual": draw(64)}, "residual has 1 axes (64,), expected [M0, K]"),
        ({"norm_weight": draw(32)}, "norm_weight (32,) has K = 32, x has K = 64"),
        ({"norm_weight": draw(64).half()}, "norm_weight is float16, expected bfloat16"),
        ({"eps": -1.0}, "eps -1.0, expected a finite number of at least 0"),
        ({"weight": draw(16, 32)}, "weight (16, 32) has K = 32, x has K = 64"),
        ({"weight": draw(16, 64).half()}, "weight is float16, expected bfloat16"),
        ({"weight": draw(16, 64).to("meta")}, "weight is on meta, x on cpu"),
        ({"bias": draw(15)}, "bias (15,) has N = 15, weight has N = 16"),
        ({"bias": draw(16).float()}, "bias is float32, expected bfloat16"),
    ],
)
def test_the_door(more, said):
    names = ("x", "residual", "norm_weight", "eps", "weight", "bias")
    fits = dict(zip(names, inputs((1,), 64, 16), strict=True))
    with pytest.raises(ValueError) as error:
        ck.add_norm_linear(**{**fits, **more})
    assert str(error.value) == f"add_norm_linear: {said}"


def test_torch_compile_sees_one_op():
    x, *rest = inputs((1, 1), 64, 16)

    def layer(x):
        y, total = ck.add_norm_linear(x * 2, *rest)
        return y.sum() + total

    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(x), layer(x))
    for args in (inputs((1, 1), 64, 16), inputs((3,), 64, 16, bias=False), inputs((), 64, 16)):
        torch.library.opcheck(ck.OPS["add_norm_linear"], args, test_utils=("test_schema", "test_faketensor"))


@settings(deadline=None)  # the first example imports the template
@given(st.integers(1, 128), st.sampled_from([1, 2, 4, 8]))
def test_its_sums_of_squares_are_those_of_the_norm_alone(steps, split):
    """Of each 32 pieces in a row, whichever thread has them: the norms have the same bits."""
    norm_linear = pytest.importorskip("cutlass_kernels.templates.norm_linear", reason="needs nvidia-cutlass-dsl")
    if steps % split:
        return
    norm, k = norm_linear.norm, 64 * steps
    assert k <= norm_linear.LARGEST == 8192
    ours, alone = norm_linear.NormLinear("bfloat16", k // split, split, False).row, norm.Norm("bfloat16", k, True)
    assert ours.threads == 256 and ours.joint == alone.joint == alone.turns == 1
    assert alone.sums == alone.warps == -(-alone.pieces // 32) <= ours.sums
    assert (ours.turns - 1) * 256 < ours.pieces == alone.pieces <= ours.turns * 256
    places = {t + i * 256: t // 32 + i * ours.warps for t in range(256) for i in range(ours.turns)}
    assert all(places[piece] == piece // 32 for piece in range(ours.pieces))
