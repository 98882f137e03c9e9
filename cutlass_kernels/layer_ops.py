# SPDX-License-Identifier: Apache-2.0
"""The doors of the ops of a layer around its attention: linear, the norms and the MLP.

They stand among the operations of torch.compile, and return tensors as those do.
"""

import math

import torch
from torch import Tensor

from cutlass_kernels.checks import FLOATS, Dims, check_positive
from cutlass_kernels.ops import OPS


# ---------------------------------------------------------------------------------------------------- linear
@OPS["linear"].register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer of few rows, x W^T + bias summed in float32, at the speed of reading the weights.

    Up to 8 rows of bfloat16 or float16 have a kernel where K is a multiple of 64 and N of 16; torch's own linear serves
    what has none. It loads weights and bias before the launches in front of it have ended, so that none of them may be
    writing those.

    Args:
        x: [M, K].
        weight: [N, K] of x's dtype.
        bias: [N] of x's dtype.

    Returns:
        [M, N] of x's dtype.
    """
    d = Dims("linear")
    d("x", x, "M K", *FLOATS)
    check_positive(d.op, K=x.shape[-1])
    d("weight", weight, "N K", x.dtype)
    d("bias", bias, "N", x.dtype)
    return torch.ops.prr.linear(x, weight, bias)


# ---------------------------------------------------------------------------------------------------- norms
@OPS["rms_norm"].register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@OPS["add_rms_norm"].register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _check_norm(
    d: Dims, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, name: str = "weight"
) -> None:
    if not 0 <= eps < math.inf:
        raise ValueError(f"{d.op}: eps {eps}, expected a finite number of at least 0")
    axes = " ".join((*(f"M{i}" for i in range(x.dim() - 1)), "K"))
    d("x", x, axes, *FLOATS)
    d("residual", residual, axes, x.dtype)
    d(name, weight, "K", x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation of rows (arXiv 1910.07467), rounded as Llama's layers do.

    The mean of squares and x / sqrt(mean + eps) are float32, the latter is rounded to x's dtype and then multiplied by
    the weight. bfloat16 and float16 have a kernel where K is a multiple of 8 and at most 16384; torch's own operations
    serve what has none. It loads the weight before the launches in front of it have ended, so that none of them may be
    writing that.

    Args:
        x: [..., K].
        weight: [K] of x's dtype.
        eps: added to the mean, at least 0.

    Returns:
        [..., K] of x's dtype.
    """
    _check_norm(Dims("rms_norm"), x, weight, eps)
    return torch.ops.prr.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm of a sum, in one launch.

    Args:
        residual: [..., K], added to x; the sum is rounded to x's dtype before anything else.
        (the others): as for rms_norm.

    Returns:
        the norm and the sum, both [..., K] of x's dtype.
    """
    _check_norm(Dims("add_rms_norm"), x, weight, eps, residual)
    return torch.ops.prr.add_rms_norm(x, residual, weight, eps)


@OPS["add_norm_linear"].register_fake
def _(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], weight.shape[0]), torch.empty_like(x)


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A linear layer behind add_rms_norm, in one launch where there is one row.

    A row of bfloat16 or float16 has a kernel where K is a multiple of 64 and at most 8192, and N of 16; add_rms_norm
    and linear serve what has none, with the same bits. All weights are loaded before the launches in front of it have
    ended, so that none of them may be writing those.

    Args:
        x: [..., K].
        residual: [..., K], added to x; as for add_rms_norm.
        norm_weight: [K] of x's dtype.
        eps: added to the mean of squares.
        weight: [N, K] of x's dtype.
        bias: [N] of x's dtype.

    Returns:
        the linear layer of the norm, [..., N], and the sum, [..., K], both of x's dtype.
    """
    d = Dims("add_norm_linear")
    _check_norm(d, x, norm_weight, eps, residual, "norm_weight")
    check_positive(d.op, K=x.shape[-1])
    d("weight", weight, "N K", x.dtype)
    d("bias", bias, "N", x.dtype)
    return torch.ops.prr.add_norm_linear(x, residual, norm_weight, eps, weight, bias)


# ---------------------------------------------------------------------------------------------------- MLP
@OPS["silu_mul_linear"].register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def silu_mul_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The second half of a gated MLP (arXiv 2002.05202): a linear layer of silu(gate) * up, in one launch for one row.

    silu(gate) is float32 inside and rounded to x's dtype, and so is its product with up, as in a model's own layers. A
    row of bfloat16 or float16 has a kernel where K is a multiple of 64 and at most 28672, and N of 16; its fast
    exponential turns the last bit of silu(gate) now and then. torch's own operations and linear serve what has none.
    All weights are loaded before the launches in front of it have ended, so that none of them may be writing those.

    Args:
        x: [..., 2 K], gate and behind it up.
        weight: [N, K] of x's dtype.
        bias: [N] of x's dtype.

    Returns:
        [..., N] of x's dtype.
    """
    d = Dims("silu_mul_linear")
    d("x", x, " ".join((*(f"M{i}" for i in range(x.dim() - 1)), "2K")), *FLOATS)
    d("weight", weight, "N K", x.dtype)
    d("bias", bias, "N", x.dtype)
    if x.shape[-1] != 2 * weight.shape[1]:
        raise ValueError(
            f"silu_mul_linear: x {tuple(x.shape)} ends in {x.shape[-1]}, "
            f"expected gate and up, 2 K of weight {tuple(weight.shape)}: {2 * weight.shape[1]}"
        )
    return torch.ops.prr.silu_mul_linear(x, weight, bias)
