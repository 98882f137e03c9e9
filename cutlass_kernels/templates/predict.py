# SPDX-License-Identifier: Apache-2.0
"""Learn from a step's scores and list the blocks predicted for the next step, in one launch."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.topk import RowSelect, blocks_of, shape_of, wide


class Predict(RowSelect):
    """Eq 3 and eq 2 of the paper, then the selection of RowSelect over level + gamma trend.

    Products and sums are rounded one by one, as the reference rounds them: no contraction to fma.
    """

    def signature(self):
        """What __call__ is compiled for."""
        B, H, P = common.syms(3)
        rows = self.row_signature(B, H)
        theta, lens = common.fake(Float32, (B, 3), 4), common.fake(Int32, (B,), 4)
        return rows, rows, rows, theta, lens, Int32(1), Int32(0), Int32(1), common.fake(Int32, (B, H, P), 4)

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        level: cute.Tensor,
        trend: cute.Tensor,
        theta: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        ids: cute.Tensor,
        stream: CUstream,
    ):
        """Launch a cluster a row; the arguments are those of the op."""
        self.kernel(scores, level, trend, theta, seq_lens, block_size, sink, local, ids).launch(
            grid=[self.cluster, scores.shape[1], scores.shape[0]],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        level: cute.Tensor,
        trend: cute.Tensor,
        theta: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        ids: cute.Tensor,
    ):
        """CTA `rank` of the cluster of row (b, h)."""
        t, _, _ = cute.arch.thread_idx()
        rank, h, b = cute.arch.block_idx()
        m = self.memory(SmemAllocator(), False)
        self.setup(m, False)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first = rank * self.chunk + t * self.E
        seen = self.load(scores, b, h, first)
        levels = self.load(level, b, h, first)
        trends = self.load(trend, b, h, first)
        tokens, N = seq_lens[b], scores.shape[2]
        inside = cutlass.min(blocks_of(tokens, block_size), N)
        self.learn(seen, levels, trends, theta[b, 0], theta[b, 1], first, inside)
        self.keep(levels, level, b, h, first, inside)
        self.keep(trends, trend, b, h, first, inside)
        gamma = theta[b, 2]
        for i in range_constexpr(self.E):
            e, j = i % 4, i // 4
            seen[e, j] = add(levels[e, j], mul(gamma, trends[e, j]))
        following = blocks_of(tokens + 1, block_size) if tokens > 0 else Int32(0)
        key = self.keys(seen, first, following, N, ids.shape[2], sink, local)
        self.ready()
        out = SimpleNamespace(ids=ids)
        self.choose(key, cutlass.min(following, N), first, b, h, rank, m, out, False)

    @cute.jit
    def learn(self, scores, levels, trends, alpha, beta, first, inside):
        """Eq 3 in registers. NaN is the level of a block that was never scored."""
        for i in range_constexpr(self.E):
            score, level, trend = scores[i % 4, i // 4], levels[i % 4, i // 4], trends[i % 4, i // 4]
            new_trend = add(mul(beta, add(score, -level)), mul(add(1.0, -beta), trend))
            new_level = add(mul(alpha, score), mul(add(1.0, -alpha), level))
            fresh = level != level
            new_trend = Float32(0.0) if fresh else new_trend
            new_level = score if fresh else new_level
            known = first + i < inside and score > -Float32.inf and score < Float32.inf
            trends[i % 4, i // 4] = new_trend if known else trend
            levels[i % 4, i // 4] = new_level if known else level

    @cute.jit
    def keep(self, values, x, b, h, first, inside):
        """Write a thread's values back to its row."""
        for i in range_constexpr(self.E // 4):
            if const_expr(self.vector):
                if first + 4 * i < inside:
                    cute.autovec_copy(values[None, i], cute.local_tile(x[b, h, None], (4,), (first // 4 + i,)))
            else:
                for e in range_constexpr(4):
                    if first + 4 * i + e < inside:
                        x[b, h, first + 4 * i + e] = values[e, i]


@cute.jit
def mul(a: Float32, b: Float32) -> Float32:
    """Product, rounded."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def add(a: Float32, b: Float32) -> Float32:
    """Sum, rounded."""
    return cute.arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def predict(
    scores: Tensor,
    level: Tensor,
    trend: Tensor,
    theta: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sink: int,
    local: int,
    ids: Tensor,
) -> None:
    """The op predict for CUDA tensors."""
    N = scores.shape[2]
    templates.serve("predict", scores, Predict.SERVES, {"number of blocks": N})
    if scores.shape[0] * scores.shape[1]:
        kernel = compiled(Predict, **shape_of(N), vector=wide(scores, level, trend))
        kernel(scores, level, trend, theta, seq_lens, block_size, sink, local, ids)
