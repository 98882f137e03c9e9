# SPDX-License-Identifier: Apache-2.0
"""add_norm_linear for a row: linear, whose CTAs make the sum and its norm themselves while their weights are coming.

Between two linear layers, add_rms_norm is a launch in which nothing is read but two rows. Here every CTA reads those,
all in one round, so that the weights behind the norm are asked for while the layer in front of it still runs.

The arithmetic is that of both kernels, sum for sum: the bits are those of add_rms_norm and linear.
"""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common, linear, norm

LARGEST = norm.THREADS * norm.PIECE  # K: beyond, the order of the norm's sums depends on the threads


class NormLinear(linear.Linear):
    """y = norm(x + residual) W^T + bias, and x + residual. Parameters: as for Linear, whose rows of x are one."""

    USES = (norm.Row,)

    def __init__(self, dtype: str, k: int, split: int, bias: bool):
        super().__init__(dtype, k, 1, split, bias)
        self.row = norm.Row(dtype, k * split, 32 * self.warps)

    def signature(self):
        """What __call__ is compiled for."""
        _, w, bias, y, ctas = super().signature()
        x, residual, weight, total = (common.fake(self.dtype, (self.row.K,)) for _ in range(4))
        return x, residual, weight, Float32(1), w, bias, y, total, ctas

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: cute.Tensor,
        weight: cute.Tensor,
        eps: Float32,
        w: cute.Tensor,
        bias,
        y: cute.Tensor,
        total: cute.Tensor,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch: x, residual, weight, total [K split], w [N split, K], bias [N] or None, y [1, N]."""
        self.launch((x, residual, weight, eps, total), w, bias, y, ctas, stream)

    @cute.jit
    def early(self, given, t):
        """The norm's weight."""
        return self.row.constant(given[2], t)

    @cute.jit
    def load_x(self, copy, given, weight, sx, parts, t):
        """The norm of the sum into shared memory, and, from one CTA, the sum into global memory."""
        x, residual, _, eps, total = given
        words = self.row.load(x, residual, t)
        if cute.arch.block_idx()[0] == 0:
            self.row.store(words, total, t)
        sums = cute.make_tensor(parts.iterator, cute.make_layout((self.row.sums,)))
        self.row.normalise(words, weight, eps, sums, t)
        self.row.store(words, cute.make_tensor(sx.iterator, cute.make_layout((self.row.K,))), t)
        cute.arch.sync_threads()


def serves(x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can: one row that is not too long, and what linear serves."""
    k = x.shape[-1]
    return (
        x.numel() == k <= LARGEST
        and norm.serves(x, residual, norm_weight)
        and linear.serves(x.view(1, k), weight, bias)
    )


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The op add_norm_linear for CUDA tensors; add_rms_norm and linear where there is no kernel."""
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    if not serves(x, residual, norm_weight, weight, bias):
        row, total = norm.add_rms_norm(x, residual, norm_weight, eps)
        return linear.linear(row.reshape(x.shape[:-1].numel(), k), weight, bias).view(shape), total
    split, ctas = linear.shares_of(1, n, k, x.device)
    kernel = compiled(NormLinear, dtype=templates.name(x.dtype), k=k // split, split=split, bias=bias is not None)
    y, total = x.new_empty(shape), x.new_empty(x.shape)
    cut = weight.view(-1, k // split)
    kernel(x.view(k), residual.view(k), norm_weight, eps, cut, bias, y.view(1, n), total.view(k), ctas)
    return y, total
