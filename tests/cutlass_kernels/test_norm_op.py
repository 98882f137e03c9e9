# SPDX-License-Identifier: Apache-2.0
"""The ops rms_norm and add_rms_norm without a GPU: what models compute, their doors, how torch.compile sees them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import cutlass_kernels as ck

HALF = (torch.bfloat16, torch.float16)
EPS = 1e-5


def draw(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@torch.no_grad()
def models(x, weight, eps=EPS):
    layer = LlamaRMSNorm(len(weight), eps).to(weight.dtype)
    layer.weight.copy_(weight)
    return layer(x)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 100), (7,), (2, 3, 5, 8), (0, 16)])
def test_a_model_s_own_layer_gives_the_same_bits(shape, dtype):
    x, residual, w = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1), draw(shape[-1], dtype=dtype, seed=2)
    y = ck.rms_norm(x, w, EPS)
    assert y.dtype == dtype and y.shape == x.shape and torch.equal(y, models(x, w))
    y, total = ck.add_rms_norm(x, residual, w, EPS)
    assert torch.equal(total, x + residual) and torch.equal(y, models(x + residual, w))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([*HALF, torch.float32]), st.integers(0, 99))
def test_any_size(rows, K, dtype, seed):
    x, residual, w = (draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate([(rows, K), (rows, K), (K,)]))
    assert torch.equal(ck.rms_norm(x, w, EPS), models(x, w))
    y, total = ck.add_rms_norm(x, residual, w, EPS)
    assert torch.equal(y, ck.rms_norm(total, w, EPS)) and torch.equal(total, x + residual)
    assert torch.equal(ck.rms_norm(x[:1], w, EPS), ck.rms_norm(x, w, EPS)[:1])


def test_the_sum_is_rounded_before_it_is_normalised():
    """1 + 2^-9 is no bfloat16: a kernel that kept it would differ by a rounding, and the sum it gives would not."""
    x, residual = torch.ones(1, 8).bfloat16(), torch.full((1, 8), 2.0**-9).bfloat16()
    y, total = ck.add_rms_norm(x, residual, torch.ones(8).bfloat16(), 0.0)
    assert bool((total == 1).all()) and bool((y == 1).all())


@pytest.mark.parametrize("dtype", HALF)
def test_large_values_do_not_overflow(dtype):
    x = torch.full((1, 64), 6e4).to(dtype)
    assert bool((ck.rms_norm(x, torch.ones(64, dtype=dtype), EPS) == 1).all())


FITS = {"x": draw(2, 64), "weight": draw(64)}


@pytest.mark.parametrize(
    "more, said",
    [
        ({"weight": draw(32)}, "weight (32,) has K = 32, x has K = 64"),
        ({"weight": draw(1, 64)}, "weight has 2 axes (1, 64), expected [K]"),
        ({"weight": draw(64).half()}, "weight is float16, expected bfloat16"),
        ({"weight": draw(64).to("meta")}, "weight is on meta, x on cpu"),
        ({"x": draw(2, 64).double()}, "x is float64, expected float32 or bfloat16 or float16"),
        ({"x": draw(1)[0]}, "x has 0 axes (), expected [K]"),
        ({"residual": draw(1, 64)}, "residual (1, 64) has M0 = 1, x has M0 = 2"),
        ({"residual": draw(64)}, "residual has 1 axes (64,), expected [M0, K]"),
        ({"residual": draw(2, 64).float()}, "residual is float32, expected bfloat16"),
    ],
)
def test_the_doors(more, said):
    if "residual" not in more:
        with pytest.raises(ValueError) as error:
            ck.rms_norm(**{**FITS, **more}, eps=EPS)
        assert str(error.value) == f"rms_norm: {said}"
    residual = torch.zeros_like(more.get("x", FITS["x"]))
    with pytest.raises(ValueError) as error:
        ck.add_rms_norm(**{**FITS, "residual": residual, **more}, eps=EPS)
    assert str(error.value) == f"add_rms_norm: {said}"


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_an_eps_that_norms_nothing_is_refused(eps):
    with pytest.raises(ValueError, match=f"rms_norm: eps {eps}, expected a finite number of at least 0"):
        ck.rms_norm(FITS["x"], FITS["weight"], eps)


def test_torch_compile_sees_one_op():
    x, residual, w = draw(1, 2, 64), draw(1, 2, 64, seed=1), draw(64, seed=2)

    def layer(x):
        y, total = ck.add_rms_norm(x * 2, residual, w, EPS)
        return ck.rms_norm(y, w, EPS) + total

    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(x), layer(x))
    checks = ("test_schema", "test_faketensor")
    for rows in ((x, residual), (draw(64, 3).T, draw(3, 64)), (draw(5, 128)[:, :64], draw(5, 64))):
        torch.library.opcheck(ck.OPS["rms_norm"], (rows[0], w, EPS), test_utils=checks)
        torch.library.opcheck(ck.OPS["add_rms_norm"], (*rows, w, EPS), test_utils=checks)


@settings(deadline=None)  # the first example imports the template
@given(st.integers(1, 2048))
def test_the_pieces_of_a_row_have_a_thread_each(pieces):
    norm = pytest.importorskip("cutlass_kernels.templates.norm", reason="needs nvidia-cutlass-dsl")
    n = norm.Norm("bfloat16", pieces * norm.PIECE, True)
    assert n.pieces == pieces <= n.turns * n.threads and n.threads <= norm.THREADS and n.threads % 32 == 0
    assert (n.turns - 1) * n.threads < pieces, "no turn is empty"
    assert n.turns * (n.threads - 32) < pieces, "no warp is idle in all of its turns"
    assert n.pieces * norm.PIECE <= norm.LARGEST


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_a_tree_adds_each_value_once(values):
    norm = pytest.importorskip("cutlass_kernels.templates.norm", reason="needs nvidia-cutlass-dsl")
    assert norm.Norm.tree(values) == pytest.approx(sum(values), abs=1e-9)
