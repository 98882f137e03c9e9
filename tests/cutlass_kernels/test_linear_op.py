# SPDX-License-Identifier: Apache-2.0
"""The op linear without a GPU: its door, its reference, how torch.compile sees it, and how its kernel cuts a matrix."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_kernels as ck
from cutlass_kernels import reference


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)])
@pytest.mark.parametrize("M, N, K", [(1, 48, 640), (3, 7, 13), (0, 4, 8), (2, 5, 1)])
def test_it_is_the_sum_rounded_once(M, N, K, dtype, rounding):
    x, w, b = draw(M, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    for bias in (None, b):
        y = ck.linear(x, w, bias)
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        assert y.dtype == dtype and y.shape == (M, N)
        terms = F.linear(x.double().abs(), w.double().abs(), b.double().abs())
        assert bool(((y.double() - exact).abs() <= rounding * exact.abs() + 2**-20 * terms).all())


def test_a_row_has_the_same_bits_beside_others_and_in_pieces(monkeypatch):
    x, w = draw(4, 96), draw(40, 96, seed=1)
    y = ck.linear(x, w)
    assert all(torch.equal(ck.linear(x[i : i + 1], w)[0], y[i]) for i in range(4))
    monkeypatch.setattr(reference, "_CHUNK", 4 * 96 * 3)
    assert torch.equal(ck.linear(x, w), y)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"x": draw(64)}, "linear: x has 1 axes (64,), expected [M, K]"),
        ({"weight": draw(16, 32)}, "linear: weight (16, 32) has K = 32, x has K = 64"),
        ({"x": draw(1, 0), "weight": draw(16, 0)}, "linear: K 0, expected at least 1"),
        ({"bias": draw(15)}, "linear: bias (15,) has N = 15, weight has N = 16"),
        ({"weight": draw(16, 64).half()}, "linear: weight is float16, expected bfloat16"),
        ({"bias": draw(16).float()}, "linear: bias is float32, expected bfloat16"),
        ({"x": draw(1, 64).double()}, "linear: x is float64, expected float32 or bfloat16 or float16"),
    ],
)
def test_the_door(more, said):
    with pytest.raises(ValueError) as error:
        ck.linear(**{"x": draw(1, 64), "weight": draw(16, 64), **more})
    assert str(error.value) == said


def test_torch_compile_sees_one_op():
    x, w, b = draw(1, 64), draw(16, 64, seed=1), draw(16, seed=2)
    traced = torch.compile(lambda x: ck.linear(x * 2, w, b) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(x), ck.linear(x * 2, w, b) + 1)
    torch.library.opcheck(ck.OPS["linear"], (x, w, b), test_utils=("test_schema", "test_faketensor"))


@settings(deadline=None)  # the first example imports the template
@given(st.integers(1, 8), st.integers(1, 400), st.integers(1, 400), st.sampled_from([78, 114, 132]))
def test_cuts_are_whole_steps_and_find_work_for_every_processor(rows, tiles, steps, processors):
    linear = pytest.importorskip("cutlass_kernels.templates.linear", reason="needs nvidia-cutlass-dsl")
    split = linear.split_of(rows, tiles * linear.ROWS, steps * linear.STEP, processors)
    assert steps % split == 0 and rows * split <= linear.COLUMNS
    possible = [s for s in (1, 2, 4, 8) if rows * s <= linear.COLUMNS and steps % s == 0]
    waste = {s: -(-tiles * s // processors) / (tiles * s / processors) for s in possible}
    assert waste[split] <= min(waste.values()) + 0.1
    assert all(waste[s] > waste[split] for s in possible if s < split)


@pytest.mark.parametrize("n, k, split", [(512, 4096, 4), (4096, 4096, 1), (5120, 4096, 2), (27392, 4096, 1)])
def test_cuts_of_the_layers_of_a_9b_model(n, k, split):
    """5120: three tiles on some SMs and two on others would be a quarter of idle time."""
    linear = pytest.importorskip("cutlass_kernels.templates.linear", reason="needs nvidia-cutlass-dsl")
    assert linear.split_of(1, n, k, 132) == split
