# SPDX-License-Identifier: Apache-2.0
"""silu_mul_linear for a row: linear, whose CTAs make silu(gate) * up themselves while their weights are coming.

Between the two linear layers of an MLP, the product is a launch in which nothing is read but one row, and no weight
behind it is asked for until it has run. Here every CTA makes all of it, which costs less than the first copies of
weights take.

Rounding is that of a model's own layers: silu(gate) to the dtype, and the product to the dtype; both are float32
inside. The sigmoid is that of the fast exponential and reciprocal, whose errors of a few float32 roundings now and then
turn the last bit of silu(gate).
"""

import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute import nvgpu
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common, linear, norm

BATCH = 8  # pieces of gate and of up that a thread has in its registers, at most


class SiluLinear(linear.Linear):
    """y = (silu(gate) * up) W^T + bias. Parameters: as for Linear, whose rows of x are one."""

    USES = (norm.Row,)

    def __init__(self, dtype: str, k: int, split: int, bias: bool):
        super().__init__(dtype, k, 1, split, bias)
        self.row = norm.Row(dtype, k * split, 32 * self.warps)
        self.batch = -(-self.row.turns // -(-self.row.turns // BATCH))  # of few batches, about equal ones

    def signature(self):
        """What __call__ is compiled for."""
        _, *others = super().signature()
        return common.fake(self.dtype, (2, self.row.K)), *others

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, bias, y: cute.Tensor, ctas: Int32, stream: CUstream):
        """Launch: x [2, K split], gate and up; w [N split, K], bias [N] or None, y [1, N]."""
        self.launch(x, w, bias, y, ctas, stream)

    @cute.jit
    def load_x(self, copy, x, early, sx, parts, t):
        """The product into shared memory; all loads of a batch, past the L1 as in Linear, are on their way at once.

        A factor that is read behind a barrier sees to that: the compiler would start on the first pieces before it asks
        for the last ones, which saves registers and costs the way to the L2 again.
        """
        product = cute.make_tensor(sx.iterator, cute.make_layout((self.row.K,)))
        factor = cute.make_tensor(parts.iterator, cute.make_layout((1,)))
        past_l1 = cute.make_copy_atom(
            nvgpu.CopyG2ROp(), self.dtype, num_bits_per_copy=128, load_cache_mode=nvgpu.LoadCacheMode.GLOBAL
        )
        gate, up = (cute.make_rmem_tensor((norm.PIECE, self.batch), self.dtype) for _ in range(2))
        if t == 0:
            factor[0] = Float32(-common.LOG2E)
        for start in range_constexpr(0, self.row.turns, self.batch):
            for i in range_constexpr(start, min(start + self.batch, self.row.turns)):
                cute.copy(past_l1, self.row.piece(x[0, None], t, i), gate[None, i - start])
                cute.copy(past_l1, self.row.piece(x[1, None], t, i), up[None, i - start])
            cute.arch.sync_threads()
            scale = factor[0]
            for i in range_constexpr(start, min(start + self.batch, self.row.turns)):
                if const_expr(self.row.ragged(i)):
                    if t + i * self.row.threads < self.row.pieces:
                        self.multiply(gate[None, i - start], up[None, i - start], scale, self.row.piece(product, t, i))
                else:
                    self.multiply(gate[None, i - start], up[None, i - start], scale, self.row.piece(product, t, i))
        cute.arch.sync_threads()

    @cute.jit
    def multiply(self, gate, up, scale, product):
        """A piece of silu(gate) * up, each rounded to the dtype."""
        words = cute.make_rmem_tensor((norm.PIECE,), self.dtype)
        for e in range_constexpr(norm.PIECE):
            silu = self.silu(gate[e].to(Float32), scale).to(self.dtype)
            words[e] = (silu.to(Float32) * up[e].to(Float32)).to(self.dtype)
        cute.autovec_copy(words, product)

    @cute.jit
    def silu(self, g, scale):
        """Of g: g / (1 + exp(-g)), as g / 4 over a quarter of the sum, whose reciprocal is normal while exp is finite.

        The fast reciprocal makes denormals 0, so where exp(-g) is infinite, and only there. scale: -log2(e).
        """
        quarter = cute.math.exp2(cute.math.fma(g, scale, Float32(-2.0)), fastmath=True)
        return g * Float32(0.25) * cute.arch.rcp_approx(quarter + Float32(0.25))


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can: one row, and what linear serves."""
    k = weight.shape[1]
    return x.numel() == 2 * k and x.is_contiguous() and linear.serves(x.view(2, k)[:1], weight, bias)


def silu_mul_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op silu_mul_linear for CUDA tensors; torch's silu and product, and linear, where there is no kernel."""
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    if not serves(x, weight, bias):
        gate, up = x.reshape(x.shape[:-1].numel(), 2, k).unbind(1)
        return linear.linear(torch.nn.functional.silu(gate) * up, weight, bias).view(shape)
    split, ctas = linear.shares_of(1, n, k, x.device)
    kernel = compiled(SiluLinear, dtype=templates.name(x.dtype), k=k // split, split=split, bias=bias is not None)
    y = x.new_empty(shape)
    kernel(x.view(2, k), weight.view(-1, k // split), bias, y.view(1, n), ctas)
    return y
