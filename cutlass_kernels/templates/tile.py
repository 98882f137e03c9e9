# SPDX-License-Identifier: Apache-2.0
"""Tile: what every kernel that computes partials shares, so that a block's partial has the same bits in all of them.

4 warps work on a tile of 64 tokens: 4 blocks of 16, 2 of 32, one of 64, or a part of a longer one. Each warp scores 16
tokens; probabilities are the sum of two half-precision numbers, so that a partial is as good as float32 arithmetic; p v
is a sum of 16 tokens at a time, and such sums are weighed and added in the order of the tokens. Which warp makes a
column, and which row of the MMA is whose query, changes no bit. Tiles come by TMA. Sums of products are written as fma:
the compiler must not choose which product is rounded.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from cutlass_kernels.templates import common


class Tile:
    """See the module. Parameters: dtype, head size D, query heads a KV head G, block size T, page table or not."""

    SERVES = {
        "dtype": (torch.bfloat16, torch.float16),
        "head size": (64, 128),
        "block size": (16, 32, 64, 128, 256),
        "query heads a KV head": tuple(range(1, 17)),
    }
    TILE = 64
    WARPS = 4

    def __init__(self, dtype: str, head_dim: int, group: int, block: int, paged: bool):
        self.dtype, self.D, self.G, self.T, self.paged = common.DTYPES[dtype], head_dim, group, block, paged
        self.per = max(1, self.TILE // block)  # blocks a tile
        self.tiles = max(1, block // self.TILE)  # tiles a block
        self.rows = min(block, self.TILE)  # tokens of a block in a tile
        self.share = self.rows // 16  # warps that score a block
        self.halves = 1 if group <= 8 else 2  # of the 16 MMA rows, those that hold a query
        self.cols = head_dim  # columns of V that a CTA loads
        self.width = head_dim // self.WARPS  # columns of the output that a warp makes
        self.nt = self.width // 8

    @cute.jit
    def plan(self):
        """The MMA. x4 ldmatrix wants 16 rows of B: two n-tiles at a time."""
        return cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), permutation_mnk=(16, 16, 16))

    @cute.jit
    def source(self, x: cute.Tensor, cols: cutlass.Constexpr, stages: cutlass.Constexpr):
        """The TMA copy of `cols` columns of K or V, and the layout of the tiles in shared memory."""
        kind = warpgroup.SmemLayoutAtomKind
        atom = {16: kind.K_SW32, 32: kind.K_SW64}.get(cols, kind.K_SW128)
        atom = warpgroup.make_smem_layout_atom(atom, self.dtype)
        room = cute.tile_to_shape(atom, (self.rows, cols, self.per, stages), order=(0, 1, 2, 3))
        one = cute.tile_to_shape(atom, (self.rows, cols), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma, g = cpasync.make_tiled_tma_atom(load, self.tokens_first(x), one, (self.rows, cols))
        return tma, g, room

    @cute.jit
    def tokens_first(self, x: cute.Tensor):
        """[B, H, S, T, D] seen as (T, (64, D / 64), B H S): so all columns of a tile are one box, not one every 64."""
        T, D = self.T, self.D
        blocks = x.shape[0] * x.shape[1] * x.shape[2]
        return cute.make_tensor(x.iterator, cute.make_layout((T, (64, D // 64), blocks), stride=(D, (1, 64), T * D)))

    @cute.jit
    def locate(self, blk, table, slots, length, b, h):
        """Slot and live tokens of a block; (0, 0) for padding and what is out of range."""
        valid = blk >= 0 and blk < (length + self.T - 1) // self.T
        slot = blk if valid else Int32(0)
        if const_expr(self.paged):
            valid = valid and slot < table.shape[2]
            at = Int32(-1)
            if valid:
                at = table[b, h, slot]
            slot = at
        valid = valid and slot >= 0 and slot < slots
        live = cutlass.min(length - blk * self.T, self.T)
        return slot if valid else Int32(0), live if valid else Int32(0)

    @cute.jit
    def fetch(self, source, sK, sV, full, slot, live, tile, part, lane):
        """A warp starts the copies of a tile. Lane s < per holds slot and live tokens of its block s.

        source: both copies, and the first block of this head in the cache. part: which `cols` columns of V.
        """
        tma_k, k, tma_v, v, start = source
        some = live > tile * self.TILE and lane < self.per
        wanted = cute.arch.popc(cute.arch.vote_ballot_sync(some))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, wanted * (2 * self.rows * (self.D + self.cols)))
        for s in cutlass.range(self.per, unroll=1):
            from_ = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(slot, s))
            if cute.arch.shuffle_sync(live, s) > tile * self.TILE:  # a whole warp: a TMA copy elects its lane
                for tma, g, x, cols, at in ((tma_k, k, sK, self.D, 0), (tma_v, v, sV, self.cols, part)):
                    tiles = cute.local_tile(g[None, None, start + from_], (self.rows, cols), (None, at))
                    to, src = cpasync.tma_partition(
                        tma,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(x[None, None, s], 0, 2),
                        cute.group_modes(tiles, 0, 2),
                    )
                    cute.copy(tma, src[None, tile], to, tma_bar_ptr=full)

    @cute.jit
    def load_q(self, q, b, head, count, lane, mma):
        """The queries of `count` heads, from `head` on, as A fragments; rows without a query are zero."""
        r, c = lane // 4, lane % 4
        qf = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((16, self.D)), self.dtype)
        words = cute.make_tensor(cute.recast_tensor(qf, Uint32).iterator, cute.make_layout((2, 2, self.D // 16)))
        words.fill(0)
        pair = cute.make_rmem_tensor((2,), self.dtype)
        for half in range_constexpr(self.halves):
            if r + half * 8 < count:
                for i in range_constexpr(self.D // 8):
                    row = q[b, head + half * 8 + r, None]
                    cute.autovec_copy(cute.local_tile(row, (2,), (i * 4 + c,)), pair)
                    words[half, i % 2, i // 2] = cute.recast_tensor(pair, Uint32)[0]
        return qf

    @cute.jit
    def partial(self):
        """Registers of unnormalised partials: maximum (log2) and sum of rows r, r + 8, and their output columns."""
        M = cute.make_rmem_tensor((2, self.per), Float32)
        L = cute.make_rmem_tensor((2, self.per), Float32)
        return M, L, cute.make_rmem_tensor((2, 2, self.nt, self.per), Float32)

    @cute.jit
    def clear(self, state):
        """A state of no tokens."""
        M, L, out = state
        M.fill(-Float32.inf)
        L.fill(0.0)
        out.fill(0.0)

    @cute.jit
    def scores(self, sK, live, first, qf, scale, mma, wid, lane):
        """Unnormalised probabilities of this warp's 16 tokens, from token `first` of their block on; maximum, sum."""
        c = lane % 4
        thr = mma.get_slice(lane)
        load = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma)
        keys = cute.local_tile(sK[None, None, wid // self.share], (16, self.D), (wid % self.share, 0))
        kf = thr.make_fragment_B(thr.partition_B(keys))
        cute.copy(load, load.get_slice(lane).partition_S(keys), load.get_slice(lane).retile(kf))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((16, 16)), Float32)
        odd = cute.make_rmem_tensor(thr.partition_shape_C((16, 16)), Float32)
        acc.fill(0.0)
        odd.fill(0.0)
        for i in range_constexpr(self.D // 32):  # two accumulators halve the chain of dependent MMAs
            cute.gemm(mma, acc, qf[None, None, 2 * i], kf[None, None, 2 * i], acc)
            cute.gemm(mma, odd, qf[None, None, 2 * i + 1], kf[None, None, 2 * i + 1], odd)
        acc.store(acc.load() + odd.load())

        s = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, 2)))  # column of a pair, row half, n-tile
        m = cute.make_rmem_tensor((2,), Float32)
        total = cute.make_rmem_tensor((2,), Float32)
        for half in range_constexpr(self.halves):
            top = -Float32.inf
            for i in range_constexpr(2):
                for e in range_constexpr(2):
                    x = s[e, half, i] * (scale * common.LOG2E)
                    s[e, half, i] = x if first + 8 * i + 2 * c + e < live else -Float32.inf
                    top = cute.arch.fmax(top, s[e, half, i])
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            base = top if top > -Float32.inf else Float32(0.0)
            add = Float32(0.0)
            for i in range_constexpr(2):
                for e in range_constexpr(2):
                    s[e, half, i] = cute.arch.exp2(s[e, half, i] - base)
                    add = add + s[e, half, i]
            m[half] = top
            total[half] = cute.arch.warp_reduction_sum(add, threads_in_group=4)
        return acc, m, total

    @cute.jit
    def blank(self, rows, live, lane):
        """A warp's 16 rows of V, of which the first `live` hold tokens: 0 * NaN is NaN, so the others become zeros."""
        if live < 16:
            zero = cute.make_rmem_tensor((8,), self.dtype)
            zero.fill(0.0)
            for i in range_constexpr(self.cols // 16):
                if lane // 2 >= live:
                    cute.autovec_copy(zero, cute.local_tile(rows[lane // 2, None], (8,), (2 * i + lane % 2,)))
            cute.arch.fence_proxy("async.shared", space="cta")  # before the copy engine writes here again
            cute.arch.sync_warp()

    @cute.jit
    def split(self, acc):
        """Probabilities = high + low, as A fragments: (4, 2) words, the high ones first."""
        p = cute.make_tensor(acc.iterator, cute.make_layout((8,)))
        split = cute.make_rmem_tensor((8, 2), self.dtype)
        rest = cute.make_rmem_tensor((8,), Float32)
        split[None, 0].store(p.load().to(self.dtype))
        rest.store(p.load() - split[None, 0].load().to(Float32))
        split[None, 1].store(rest.load().to(self.dtype))
        return cute.recast_tensor(split, Uint32)

    @cute.jit
    def weights(self, ml, factor):
        """Maximum and sum of a block, whose warps have theirs in ml (2, share); their weights into factor (share,)."""
        top = -Float32.inf
        for w in range_constexpr(self.share):
            top = cute.arch.fmax(top, ml[0, w])
        base = top if top > -Float32.inf else Float32(0.0)
        total = Float32(0.0)
        for w in range_constexpr(self.share):
            factor[w] = cute.arch.exp2(ml[0, w] - base)
            total = cute.math.fma(factor[w], ml[1, w], total)
        return top, total

    @cute.jit
    def weigh(self, p, rows, columns: cutlass.Constexpr, part, at, mma, lane):
        """The part-th `columns` columns of p v, for the at-th 16 rows of V: (2, 2, columns / 8). p: see split."""
        thr = mma.get_slice(lane)
        load = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma)
        values = cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0]))
        values = cute.local_tile(values, (columns, 16), (part, at))
        vf = thr.make_fragment_B(thr.partition_B(values))
        cute.copy(load, load.get_slice(lane).partition_S(values), load.get_slice(lane).retile(vf))
        acc = cute.make_rmem_tensor(((2, 2), 1, columns // 8), Float32)
        pf = cute.make_rmem_tensor(thr.partition_shape_A((16, 16)), self.dtype)
        words = cute.make_tensor(cute.recast_tensor(pf, Uint32).iterator, cute.make_layout((4,)))
        acc.fill(0.0)
        for x in range_constexpr(1, -1, -1):  # the low parts first
            cute.autovec_copy(p[None, x], words)
            cute.gemm(mma, acc, pf[None, None, 0], vf[None, None, 0], acc)
        return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // 8)))

    @cute.jit
    def tile(self, sK, sV, sP, sML, lives, tile, qf, scale, state, mma, wid, lane):
        """Partials of a tile's blocks, this warp's columns of them, into `state` (see partial).

        Each warp scores 16 tokens, and then makes a quarter of the columns: p crosses warps through shared memory.
        sK, sV: (rows, D, per). lives: live tokens of each block, none where <= 0.
        """
        r, c = lane // 4, lane % 4
        M, L, out = state
        own = lives[0]
        for s in range_constexpr(1, self.per):  # an index that is not constant would put registers into memory
            own = lives[s] if wid // self.share == s else own
        first = tile * self.TILE + wid % self.share * 16
        rows = cute.local_tile(sV[None, None, wid // self.share], (16, self.D), (wid % self.share, 0))
        self.blank(rows, own - first, lane)
        acc, m, total = self.scores(sK, own, first, qf, scale, mma, wid, lane)
        words = self.split(acc)
        for x in range_constexpr(2):
            cute.autovec_copy(words[None, x], sP[None, lane, x, wid])
        if c == 0:
            for half in range_constexpr(self.halves):
                sML[0, r + 8 * half, wid] = m[half]
                sML[1, r + 8 * half, wid] = total[half]
        cute.arch.sync_threads()

        factor = cute.make_rmem_tensor((self.share, 2, self.per), Float32)
        for block in range_constexpr(self.per):
            for half in range_constexpr(self.halves):
                ml = cute.local_tile(sML[None, r + 8 * half, None], (2, self.share), (0, block))
                M[half, block], L[half, block] = self.weights(ml, factor[None, half, block])
        out.fill(0.0)
        for w in range_constexpr(self.WARPS):
            block = const_expr(w // self.share)
            p = sP[None, lane, None, w]
            x = self.weigh(p, sV[None, None, block], self.width, wid, w % self.share, mma, lane)
            for half in range_constexpr(self.halves):
                for j in range_constexpr(self.nt):
                    for e in range_constexpr(2):
                        out[e, half, j, block] = cute.math.fma(
                            factor[w % self.share, half, block], x[e, half, j], out[e, half, j, block]
                        )

    @cute.jit
    def fold(self, into, m, total, x):
        """Add the next tile of a block, of which there is one (per = 1), to the tiles before: all unnormalised."""
        M, L, out = into
        for half in range_constexpr(self.halves):
            top = cute.arch.fmax(M[half, 0], m[half])
            base = top if top > -Float32.inf else Float32(0.0)
            keep = cute.arch.exp2(M[half, 0] - base)
            factor = cute.arch.exp2(m[half] - base)
            L[half, 0] = cute.math.fma(factor, total[half], L[half, 0] * keep)
            for j in range_constexpr(self.nt):
                for e in range_constexpr(2):
                    out[e, half, j, 0] = cute.math.fma(factor, x[e, half, j], out[e, half, j, 0] * keep)
            M[half, 0] = top

    @cute.jit
    def normalise(self, state, block, log, x):
        """A partial as attend gives it: lse into log (2,), o of this warp's columns into x (2, 2, nt)."""
        M, L, out = state
        for half in range_constexpr(self.halves):
            total = L[half, block]
            empty = total == 0.0  # not of NaN: a wrong read must show, not weigh nothing
            inv = Float32(0.0) if empty else cute.arch.rcp_approx(total)  # of a sum with a 1 in it
            for j in range_constexpr(self.nt):
                for e in range_constexpr(2):
                    x[e, half, j] = Float32(0.0) if empty else out[e, half, j, block] * inv
            log[half] = -Float32.inf if empty else (M[half, block] + cute.math.log2(total)) * common.LN2
