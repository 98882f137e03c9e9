# SPDX-License-Identifier: Apache-2.0
"""Quest's block scores: one pass over the extrema of the blocks that hold tokens, at read bandwidth."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute import nvgpu
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common


class QuestScores:
    """score[b, h, n] = sum_d max(m_d kmin_d, m_d kmax_d), m the mean query of the group.

    D / 8 lanes read a block's extrema with 16-byte loads, and a thread has `rows` blocks in flight. What a product
    takes, minimum or maximum, is decided by the sign of m alone, so that 16-bit pairs are picked before they are
    widened, and half of them never are.

    The extrema of the newest block, and perhaps the lengths, are written by launches before this one, so that nothing
    is loaded before they end. Asking the L2 for the tile until then made it slower, as did a ring of bulk copies. Where
    the launch in front is known to write the newest block alone (`early`), all others are loaded before it ends, and
    nothing of that one, whose old bytes the L1 could keep. (Measured: .5 us a layer of GLM-4 at 128K tokens.)
    """

    SERVES = {
        "head size": (64, 128),
        "group size": tuple(range(1, 17)),
        "dtype": (torch.bfloat16, torch.float16),
    }

    def __init__(self, dtype: str, head_dim: int, group: int, early: bool, rows: int = 4, warps: int = 8):
        self.dtype, self.D, self.G, self.early = common.DTYPES[dtype], head_dim, group, early
        self.rows, self.warps = rows, warps
        self.lanes = head_dim // 8
        self.step = warps * 32 // self.lanes  # blocks that the threads of a CTA read at once
        self.tile = self.step * rows
        self.shift = self.dtype is BFloat16  # bf16 widens by a shift

    def signature(self):
        """What __call__ is compiled for."""
        B, M, H, Hkv, N = common.syms(5)
        blocks = common.fake(self.dtype, (M, Hkv, N, self.D))
        return (
            common.fake(self.dtype, (B, H, self.D)),
            blocks,
            blocks,
            common.fake(Int32, (B,), 4),
            Int32(1),
            common.fake(Float32, (B, Hkv, N), 4),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kmin: cute.Tensor,
        kmax: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        scores: cute.Tensor,
        stream: CUstream,
    ):
        """Launch: q [B, Hq, D], kmin, kmax [B | 1, H_kv, N, D], seq_lens [B], scores [B, H_kv, N] float32."""
        self.kernel(q, kmin, kmax, seq_lens, block_size, scores).launch(
            grid=[cute.ceil_div(kmin.shape[2], self.tile), kmin.shape[1], q.shape[0]],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        kmin: cute.Tensor,
        kmax: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        scores: cute.Tensor,
    ):
        """One tile of blocks of a row."""
        t, _, _ = cute.arch.thread_idx()
        tile, h, b = cute.arch.block_idx()
        N, start = kmin.shape[2], tile * self.tile
        lane, row = t % self.lanes, start + t // self.lanes
        smem = SmemAllocator()
        heads = smem.allocate_tensor(self.dtype, cute.make_layout((self.D, self.G)), 16)
        means = smem.allocate_tensor(Float32, cute.make_layout((self.D,)), 16)
        if const_expr(not self.early):
            self.wait()
        n = cutlass.min((seq_lens[b] + block_size - 1) // block_size, N)
        if start < n:
            of = cutlass.min(b, kmin.shape[0] - 1)  # one sequence's, or one each
            low = cute.make_rmem_tensor((8, self.rows), self.dtype)
            high = cute.make_rmem_tensor((8, self.rows), self.dtype)
            last = cutlass.max(n - 1 - int(self.early), 0)
            for i in range_constexpr(self.rows):
                at = cutlass.min(row + i * self.step, last)
                cute.autovec_copy(cute.local_tile(kmin[of, h, at, None], (8,), (lane,)), low[None, i])
                cute.autovec_copy(cute.local_tile(kmax[of, h, at, None], (8,), (lane,)), high[None, i])
            if const_expr(self.early):
                self.wait()
                for i in range_constexpr(self.rows):
                    if row + i * self.step == n - 1:
                        self.newest(kmin[of, h, n - 1, None], lane, low[None, i])
                        self.newest(kmax[of, h, n - 1, None], lane, high[None, i])
            mean = self.mean_query(q, heads, means, b, h, lane)  # its barriers keep the loads above in front
            self.score(mean, self.signs(mean), low, high, scores, b, h, row, lane, n)
        else:
            if const_expr(self.early):
                self.wait()
            for i in range_constexpr(self.rows):
                if lane == 0 and row + i * self.step < N:
                    scores[b, h, row + i * self.step] = -Float32.inf

    @cute.jit
    def wait(self):
        """For the launch in front; what is behind may start."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def newest(self, block, lane, to):
        """This lane's piece, past the L1: of a cache of one block it was loaded before, and may have been old."""
        load = cute.make_copy_atom(
            nvgpu.CopyG2ROp(), self.dtype, num_bits_per_copy=128, load_cache_mode=nvgpu.LoadCacheMode.GLOBAL
        )
        cute.copy(load, cute.local_tile(block, (8,), (lane,)), to)

    @cute.jit
    def signs(self, mean):
        """Masks over pairs of 16-bit numbers, set where the mean query is negative."""
        negative = cute.make_rmem_tensor((4,), Uint32)
        for j in range_constexpr(4):
            negative[j] = (Uint32(0xFFFF) if mean[2 * j] < 0.0 else Uint32(0)) | (
                Uint32(0xFFFF0000) if mean[2 * j + 1] < 0.0 else Uint32(0)
            )
        return negative

    @cute.jit
    def score(self, mean, negative, low, high, scores, b, h, row, lane, n):
        """From extrema in registers to scores of blocks row, row + step, ...; those from n on hold no tokens."""
        low32, high32 = cute.recast_tensor(low, Uint32), cute.recast_tensor(high, Uint32)
        picked = cute.make_rmem_tensor((4,), Uint32)
        sums = cute.make_rmem_tensor((self.rows,), Float32)
        for i in range_constexpr(self.rows):
            for j in range_constexpr(4):
                picked[j] = (low32[j, i] & negative[j]) | (high32[j, i] & ~negative[j])
            wide = self.widen(picked)
            total = Float32(0.0)
            for j in range_constexpr(8):
                total = total + mean[j] * wide[j]
            sums[i] = total
        mine = self.fold(sums, lane)
        share = const_expr(self.lanes // self.rows)  # lanes that end up with the same block
        at = row + lane // share * self.step
        if lane % share == 0 and at < scores.shape[2]:
            scores[b, h, at] = mine if at < n else -Float32.inf

    @cute.jit
    def fold(self, sums, lane):
        """Sum each of `rows` values over the lanes; lane i gets the one of row i * rows // lanes.

        A shuffle halves the values that a lane holds as long as it has more than one, so that 8 rows over 16 lanes take
        8 shuffles, not 32.
        """
        count, offset = self.rows, self.lanes // 2
        while const_expr(offset > 0):
            if const_expr(count > 1):
                count //= 2
                upper = (lane & offset) != 0
                for i in range_constexpr(count):
                    keep = sums[i + count] if upper else sums[i]
                    send = sums[i] if upper else sums[i + count]
                    sums[i] = keep + cute.arch.shuffle_sync_bfly(send, offset=offset)
            else:
                sums[0] = sums[0] + cute.arch.shuffle_sync_bfly(sums[0], offset=offset)
            offset //= 2
        return sums[0]

    @cute.jit
    def mean_query(self, q, heads, means, b, h, lane):
        """This lane's 8 dimensions of the mean over the group, float32."""
        t, _, _ = cute.arch.thread_idx()
        piece = cute.make_rmem_tensor((8,), self.dtype)
        for i in range_constexpr(-(-self.G // self.step)):
            g = t // self.lanes + i * self.step
            if g < self.G:
                cute.autovec_copy(cute.local_tile(q[b, h * self.G + g, None], (8,), (lane,)), piece)
                cute.autovec_copy(piece, cute.local_tile(heads[None, g], (8,), (lane,)))
        cute.arch.sync_threads()
        if t < self.D:
            total = Float32(0.0)
            for g in range_constexpr(self.G):
                total = total + heads[t, g].to(Float32)
            means[t] = total * (1.0 / self.G)
        cute.arch.sync_threads()
        mean = cute.make_rmem_tensor((8,), Float32)
        cute.autovec_copy(cute.local_tile(means, (8,), (lane,)), mean)
        return mean

    @cute.jit
    def widen(self, pairs):
        """Four 32-bit registers of two 16-bit numbers each, as eight float32."""
        wide = cute.make_rmem_tensor((8,), Float32)
        if const_expr(self.shift):
            for j in range_constexpr(4):
                wide[2 * j] = (pairs[j] << 16).bitcast(Float32)
                wide[2 * j + 1] = (pairs[j] & Uint32(0xFFFF0000)).bitcast(Float32)
        else:
            wide.store(cute.recast_tensor(pairs, self.dtype).load().to(Float32))
        return wide


def quest_scores(
    q: Tensor, kmin: Tensor, kmax: Tensor, seq_lens: Tensor, block_size: int, early: bool, scores: Tensor
) -> None:
    """The op quest_scores for CUDA tensors."""
    group, head_dim = q.shape[1] // kmin.shape[1], q.shape[2]
    asked = {"head size": head_dim, "group size": group, "dtype": q.dtype}
    templates.serve("quest_scores", q, QuestScores.SERVES, asked)
    templates.door("quest_scores", q=q, kmin=kmin, kmax=kmax)
    if scores.numel():
        kernel = compiled(QuestScores, dtype=templates.name(q.dtype), head_dim=head_dim, group=group, early=early)
        kernel(q, kmin, kmax, seq_lens, block_size, scores)
