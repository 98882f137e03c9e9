# SPDX-License-Identifier: Apache-2.0
"""InfLLM-v2's block scores in two launches: the normaliser in parts, then group sums and the maximum a block."""

import math

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common

NORM_WARPS, SCORE_WARPS = 4, 8
TILES = 2  # 16-window tiles that a warp has in flight
NORM_TILE, SCORE_TILE = NORM_WARPS * TILES * 16, SCORE_WARPS * TILES * 16
RESIDENT = 2  # CTAs of `score` on an SM
HEADS = 16  # columns of a part; heads beyond the group are empty


class InfllmScores:
    """score[b, h, n] = max over windows w touching block n of sum_g exp(scale q_g . k1_w - LSE_g).

    Logits are mma with the windows as rows and the query heads as columns: keys go from global memory straight into
    A fragments, 16 bytes at a time, with the contraction index permuted alike in A and B. The sum over the group then
    is one over columns, and the LSE one over rows. Exponentials are of base 2.

    All loads of a tile are in flight before its first product, and those of the next tile before this one's
    exponentials. `score` has as many CTAs as the device holds at once: each reads the queries and the parts once.

    `norm` leaves (maximum, sum) of each head over its share of the windows of k2, or of k1 when the exact normaliser is
    asked for or no coarse window is complete. `score` combines the parts. It may load keys before `norm` has ended,
    because `norm` lets it start only after all launches before `norm` have.
    """

    SERVES = {
        "head size": (64, 128),
        "group size": tuple(range(1, 17)),
        "dtype": (torch.bfloat16, torch.float16),
    }

    def __init__(self, dtype: str, head_dim: int, group: int, per_block: int, reach: int):
        self.dtype, self.D, self.G = common.DTYPES[dtype], head_dim, group
        self.per_block, self.reach = per_block, reach  # windows that start in a block; earlier ones that reach into it
        self.blocks = (SCORE_TILE - reach) // per_block  # blocks a CTA
        self.nt = 1 if group <= 8 else 2  # column tiles of 8 heads

    def signature(self):
        """What __call__ is compiled for."""
        B, M, H, Hkv, W1, W2, N, parts = common.syms(8)
        return (
            common.fake(self.dtype, (B, H, self.D)),
            common.fake(self.dtype, (M, Hkv, W1, self.D)),
            common.fake(self.dtype, (M, Hkv, W2, self.D)),
            common.fake(Int32, (B,), 4),
            common.fake(Float32, (B, Hkv, parts, 2, HEADS)),
            common.fake(Float32, (B, Hkv, N), 4),
            Float32(1.0),
            Int32(1),
            Int32(1),
            Int32(1),
            Int32(1),
            Int32(1),
            Int32(1),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        parts: cute.Tensor,
        scores: cute.Tensor,
        scale: Float32,
        window: Int32,
        stride: Int32,
        coarse_window: Int32,
        coarse_stride: Int32,
        exact: Int32,
        across: Int32,
        stream: CUstream,
    ):
        """Launch both. parts: [B, H_kv, parts, 2, 16] float32, scratch; exact: 0 or 1; the others as for the op."""
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)))
        heads, batch = k1.shape[1], q.shape[0]
        base2 = scale * common.LOG2E
        self.norm(q, k1, k2, seq_lens, parts, base2, window, stride, coarse_window, coarse_stride, exact, mma).launch(
            grid=[parts.shape[2], heads, batch],
            block=[NORM_WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )
        self.score(q, k1, seq_lens, parts, scores, base2, window, stride, mma).launch(
            grid=[cutlass.min(cute.ceil_div(scores.shape[2], self.blocks), across), heads, batch],
            block=[SCORE_WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=common.CARVEOUT,
        )

    # ------------------------------------------------------------------------------------------------ logits
    def heads_room(self):
        """Shared memory for the group's queries: (D, 8 nt), rows of a quarter warp in banks of their own."""
        room = cute.make_layout((self.D, 8 * self.nt), stride=(1, self.D + 32))
        return SmemAllocator().allocate_tensor(self.dtype, room, 16)

    @cute.jit
    def stage_heads(self, q, b, h, heads, t, threads: cutlass.Constexpr):
        """The group's queries into shared memory, zero beyond it.

        The barrier that this wants is why the loads of keys in front of it are all in flight: no product can pass it.
        """
        pieces = const_expr(self.D // 8)
        piece = cute.make_rmem_tensor((8,), self.dtype)
        for i in range_constexpr(-(-8 * self.nt * pieces // threads)):
            at = t + i * threads
            g = at // pieces
            piece.fill(0)
            if g < self.G:
                cute.autovec_copy(cute.local_tile(q[b, h * self.G + g, None], (8,), (at % pieces,)), piece)
            if g < 8 * self.nt:
                cute.autovec_copy(piece, cute.local_tile(heads[None, g], (8,), (at % pieces,)))

    @cute.jit
    def load_heads(self, heads, lane):
        """The group's queries as B fragments."""
        row, quad = lane // 4, lane % 4
        shape = ((2, 2), self.nt, self.D // 16)
        fragment = cute.make_rmem_tensor(cute.make_layout(shape, stride=((1, 2), self.D // 4, 4)), self.dtype)
        pieces = cute.make_tensor(fragment.iterator, cute.make_layout((8, self.D // 32, self.nt)))
        for i in range_constexpr(self.nt):
            for j in range_constexpr(self.D // 32):
                cute.autovec_copy(cute.local_tile(heads[None, 8 * i + row], (8,), (j * 4 + quad,)), pieces[None, j, i])
        return fragment

    @cute.jit
    def key_fragments(self):
        """Registers for TILES tiles of 16 windows: the A operand, and the same as pieces of 16 bytes."""
        quarter = self.D // 4  # a thread's share of one row
        shape = ((2, 2, 2), 1, self.D // 16, TILES)
        stride = ((1, quarter, 2), 0, 4, 2 * quarter)
        fragment = cute.make_rmem_tensor(cute.make_layout((8, self.D // 32, 2, TILES)), self.dtype)
        return cute.make_tensor(fragment.iterator, cute.make_layout(shape, stride=stride)), fragment

    @cute.jit
    def load_keys(self, means, b, h, first, count, lane, pieces):
        """Windows first ... of this warp; an index outside of 0 ... count - 1 reads the nearest one inside."""
        row, quad = lane // 4, lane % 4
        of = cutlass.min(b, means.shape[0] - 1)  # one sequence's, or one each
        for i in range_constexpr(TILES):
            for half in range_constexpr(2):
                at = cutlass.max(cutlass.min(first + 16 * i + 8 * half + row, count - 1), 0)
                for j in range_constexpr(self.D // 32):
                    source = cute.local_tile(means[of, h, at, None], (8,), (j * 4 + quad,))
                    cute.autovec_copy(source, pieces[None, j, half, i])

    @cute.jit
    def logits(self, mma, keys, heads, acc):
        """Into acc: columns of a pair, row half, column tile, tile; windows row, row + 8, heads 2 quad, 2 quad + 1."""
        acc.fill(0.0)
        for i in range_constexpr(TILES):
            for k in range_constexpr(self.D // 16):
                out = acc[None, None, None, i]
                cute.gemm(mma, out, keys[None, None, k, i], heads[None, None, k], out)

    # ------------------------------------------------------------------------------------------------ normaliser
    @cute.kernel
    def norm(
        self,
        q: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        parts: cute.Tensor,
        base2: Float32,
        window: Int32,
        stride: Int32,
        coarse_window: Int32,
        coarse_stride: Int32,
        exact: Int32,
        mma: cute.TiledMma,
    ):
        """One part of the normaliser of a row."""
        t, _, _ = cute.arch.thread_idx()
        part, h, b = cute.arch.block_idx()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # not before the wait: `score` relies on it
        tokens = seq_lens[b]
        fine = complete(tokens, window, stride, k1.shape[2])
        coarse = complete(tokens, coarse_window, coarse_stride, k2.shape[2])
        top = cute.make_rmem_tensor((2, self.nt), Float32)
        total = cute.make_rmem_tensor((2, self.nt), Float32)
        top.fill(-Float32.inf)
        total.fill(0.0)
        heads = self.heads_room()
        if exact != 0 or coarse == 0:
            self.accumulate(q, heads, k1, fine, b, h, part, parts.shape[2], base2, mma, lane, wid, top, total)
        else:
            self.accumulate(q, heads, k2, coarse, b, h, part, parts.shape[2], base2, mma, lane, wid, top, total)
        self.leave(parts, b, h, part, t, lane, wid, top, total)

    @cute.jit
    def accumulate(self, q, heads, means, count, b, h, part, step, base2, mma, lane, wid, top, total):
        """Running maximum and sum of a thread's heads over every step-th tile of windows."""
        tile = part
        keys, pieces = self.key_fragments()
        acc = cute.make_rmem_tensor(((2, 2), 1, self.nt, TILES), Float32)
        x = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.nt, TILES)))
        if tile * NORM_TILE < count:
            self.load_keys(means, b, h, (tile * NORM_WARPS + wid) * (16 * TILES), count, lane, pieces)
            self.stage_heads(q, b, h, heads, wid * 32 + lane, NORM_WARPS * 32)
            cute.arch.sync_threads()
        while tile * NORM_TILE < count:
            first = (tile * NORM_WARPS + wid) * (16 * TILES)
            self.logits(mma, keys, self.load_heads(heads, lane), acc)
            tile = tile + step
            if tile * NORM_TILE < count:
                self.load_keys(means, b, h, (tile * NORM_WARPS + wid) * (16 * TILES), count, lane, pieces)
            for j in range_constexpr(self.nt):
                for e in range_constexpr(2):
                    highest = top[e, j]
                    for i in range_constexpr(TILES):
                        for half in range_constexpr(2):
                            inside = first + 16 * i + 8 * half + lane // 4 < count
                            x[e, half, j, i] = x[e, half, j, i] * base2 if inside else -Float32.inf
                            highest = cute.arch.fmax(highest, x[e, half, j, i])
                    base = highest if highest > -Float32.inf else Float32(0.0)
                    running = total[e, j] * cute.arch.exp2(top[e, j] - base)
                    for i in range_constexpr(TILES):
                        for half in range_constexpr(2):
                            running = running + cute.arch.exp2(x[e, half, j, i] - base)
                    top[e, j] = highest
                    total[e, j] = running

    @cute.jit
    def leave(self, parts, b, h, part, t, lane, wid, top, total):
        """Combine over the rows of the warps, and write the CTA's part."""
        smem = SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout((HEADS, 2, NORM_WARPS)), 16)
        for j in range_constexpr(self.nt):
            for e in range_constexpr(2):
                highest, running = top[e, j], total[e, j]
                for offset in (4, 8, 16):
                    other = cute.arch.shuffle_sync_bfly(highest, offset=offset)
                    added = cute.arch.shuffle_sync_bfly(running, offset=offset)
                    highest, running = combine(highest, running, other, added)
                if lane < 4:
                    shared[8 * j + 2 * lane + e, 0, wid] = highest
                    shared[8 * j + 2 * lane + e, 1, wid] = running
        cute.arch.sync_threads()
        if t < 8 * self.nt:
            highest, running = over_warps(shared, t, NORM_WARPS)
            parts[b, h, part, 0, t] = highest
            parts[b, h, part, 1, t] = running

    # ------------------------------------------------------------------------------------------------ scores
    @cute.kernel
    def score(
        self,
        q: cute.Tensor,
        k1: cute.Tensor,
        seq_lens: cute.Tensor,
        parts: cute.Tensor,
        scores: cute.Tensor,
        base2: Float32,
        window: Int32,
        stride: Int32,
        mma: cute.TiledMma,
    ):
        """The scores of every step-th tile of blocks of a row; the keys of the next tile are always on their way."""
        t, _, _ = cute.arch.thread_idx()
        tile, h, b = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        count = complete(seq_lens[b], window, stride, k1.shape[2])
        smem = SmemAllocator()
        weights = smem.allocate_tensor(Float32, cute.make_layout((SCORE_TILE, 2)), 16)
        shared = smem.allocate_tensor(Float32, cute.make_layout((HEADS, 2, SCORE_WARPS)), 16)
        lse = smem.allocate_tensor(Float32, cute.make_layout((HEADS,)), 16)
        heads = self.heads_room()
        keys, pieces = self.key_fragments()
        self.load_tile(k1, b, h, tile, count, lane, wid, pieces)
        self.stage_heads(q, b, h, heads, t, SCORE_WARPS * 32)
        cute.arch.sync_threads()
        acc = cute.make_rmem_tensor(((2, 2), 1, self.nt, TILES), Float32)
        self.logits(mma, keys, self.load_heads(heads, lane), acc)
        self.load_tile(k1, b, h, tile + step, count, lane, wid, pieces)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.normaliser(parts, b, h, t, lane, wid, shared, lse)
        turn = Int32(0)
        while tile * self.blocks < scores.shape[2]:
            self.write(scores, weights, lse, acc, base2, b, h, tile, turn, count, t, lane, wid)
            tile, turn = tile + step, 1 - turn
            if tile * self.blocks < scores.shape[2]:
                self.logits(mma, keys, self.load_heads(heads, lane), acc)
                self.load_tile(k1, b, h, tile + step, count, lane, wid, pieces)

    @cute.jit
    def load_tile(self, k1, b, h, tile, count, lane, wid, pieces):
        """Keys of this warp's share of a tile of blocks, if any of its windows is complete."""
        start = tile * self.blocks * self.per_block - self.reach  # of the tile's windows; the first may not exist
        if start < count:
            self.load_keys(k1, b, h, start + wid * (16 * TILES), count, lane, pieces)

    @cute.jit
    def write(self, scores, weights, lse, acc, base2, b, h, tile, turn, count, t, lane, wid):
        """Group sums of a tile's windows, and the maximum a block. Two buffers: one barrier a tile is enough."""
        x = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.nt, TILES)))
        first = tile * self.blocks * self.per_block - self.reach + wid * (16 * TILES)
        for i in range_constexpr(TILES):
            for half in range_constexpr(2):
                weight = Float32(0.0)
                for j in range_constexpr(self.nt):
                    for e in range_constexpr(2):
                        head = 8 * j + 2 * (lane % 4) + e
                        weight = weight + cute.arch.exp2(x[e, half, j, i] * base2 - lse[head])
                weight = cute.arch.warp_reduction_sum(weight, threads_in_group=4)
                at = 16 * i + 8 * half + lane // 4
                inside = first + at >= 0 and first + at < count
                if lane % 4 == 0:
                    weights[wid * (16 * TILES) + at, turn] = weight if inside else -Float32.inf
        cute.arch.sync_threads()
        block = tile * self.blocks + t
        if t < self.blocks and block < scores.shape[2]:
            best = -Float32.inf
            for i in range_constexpr(self.per_block + self.reach):
                best = cute.arch.fmax(best, weights[t * self.per_block + i, turn])
            scores[b, h, block] = best

    @cute.jit
    def normaliser(self, parts, b, h, t, lane, wid, shared, lse):
        """LSE of each head from the parts, base 2, into `lse`; +inf beyond the group, so that those heads weigh 0."""
        head = t % HEADS
        highest, running = -Float32.inf, Float32(0.0)
        part, step = t // HEADS, const_expr(SCORE_WARPS * 32 // HEADS)
        tops = cute.make_rmem_tensor((4,), Float32)
        sums = cute.make_rmem_tensor((4,), Float32)
        while part < parts.shape[2]:
            for i in range_constexpr(4):  # four loads in flight
                at = cutlass.min(part + i * step, parts.shape[2] - 1)
                tops[i] = parts[b, h, at, 0, head]
                sums[i] = parts[b, h, at, 1, head]
            before = highest
            for i in range_constexpr(4):
                known = part + i * step < parts.shape[2] and head < 8 * self.nt
                tops[i] = tops[i] if known else -Float32.inf
                sums[i] = sums[i] if known else Float32(0.0)
                highest = cute.arch.fmax(highest, tops[i])
            base = highest if highest > -Float32.inf else Float32(0.0)
            running = running * cute.arch.exp2(before - base)
            for i in range_constexpr(4):
                running = running + sums[i] * cute.arch.exp2(tops[i] - base)
            part = part + 4 * step
        other = cute.arch.shuffle_sync_bfly(highest, offset=16)
        added = cute.arch.shuffle_sync_bfly(running, offset=16)
        highest, running = combine(highest, running, other, added)
        if lane < HEADS:
            shared[head, 0, wid] = highest
            shared[head, 1, wid] = running
        cute.arch.sync_threads()
        if t < HEADS:
            highest, running = over_warps(shared, t, SCORE_WARPS)
            value = highest + cute.math.log2(running) if running > 0.0 else Float32(0.0)
            lse[t] = value if t < self.G else Float32.inf
        cute.arch.sync_threads()


@cute.jit
def complete(tokens: Int32, size: Int32, step: Int32, capacity: Int32) -> Int32:
    """Windows of `size` tokens every `step` that are complete, at most the capacity."""
    full = (tokens - size) // step + 1 if tokens >= size else Int32(0)
    return cutlass.min(full, capacity)


@cute.jit
def combine(top: Float32, total: Float32, other_top: Float32, other_total: Float32):
    """Two (maximum, sum of 2^(x - maximum)) as one; an empty part is (-inf, 0)."""
    highest = cute.arch.fmax(top, other_top)
    base = highest if highest > -Float32.inf else Float32(0.0)
    return highest, total * cute.arch.exp2(top - base) + other_total * cute.arch.exp2(other_top - base)


@cute.jit
def over_warps(shared: cute.Tensor, head: Int32, warps: int):
    """combine() over the last axis of [head, 2, warps]."""
    highest, total = -Float32.inf, Float32(0.0)
    for w in range_constexpr(warps):
        highest = cute.arch.fmax(highest, shared[head, 0, w])
    base = highest if highest > -Float32.inf else Float32(0.0)
    for w in range_constexpr(warps):
        total = total + shared[head, 1, w] * cute.arch.exp2(shared[head, 0, w] - base)
    return highest, total


def infllm_scores(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    window: int,
    stride: int,
    coarse_window: int,
    coarse_stride: int,
    exact: bool,
    scores: Tensor,
) -> None:
    """The op infllm_scores for CUDA tensors."""
    B = q.shape[0]
    _, H, W1, D = k1.shape
    group, per_block, reach = q.shape[1] // H, block_size // stride, window // stride - 1
    asked = {"head size": D, "group size": group, "dtype": q.dtype}
    templates.serve("infllm_scores", q, InfllmScores.SERVES, asked)
    templates.door("infllm_scores", q=q, k1=k1, k2=k2)
    if per_block + reach > SCORE_TILE:
        raise NotImplementedError(
            f"infllm_scores: no CUDA kernel for {per_block + reach} windows a block, at most {SCORE_TILE}"
        )
    if not W1:  # nothing to read, and every block's maximum is one of nothing
        scores.fill_(-math.inf)
    elif scores.numel():
        wanted = max(1, -(-(W1 if exact else k2.shape[2]) // NORM_TILE))
        parts = q.new_empty(B, H, min(wanted, 128), 2, HEADS, dtype=torch.float32)
        params = {"dtype": templates.name(q.dtype), "head_dim": D, "group": group}
        kernel = compiled(InfllmScores, **params, per_block=per_block, reach=reach)
        across = max(1, RESIDENT * templates.processors(q.device) // (B * H))  # what is on the device at once
        sizes = window, stride, coarse_window, coarse_stride, int(exact), across
        kernel(q, k1, k2, seq_lens, parts, scores, scale, *sizes)
