# SPDX-License-Identifier: Apache-2.0
"""Tile: what every kernel that computes partials shares, so that a block's partial has the same bits in all of them.

4 warps work on a tile of 64 tokens: 4 blocks of 16, 2 of 32, one of 64, or a part of a longer one. Each warp scores 16
tokens; probabilities cross warps through shared memory, as the sum of two half-precision numbers, so that a partial is
as good as float32 arithmetic; then each warp makes a quarter of the columns. The G query heads are the 16 rows of the
MMA. Tiles come by TMA. Sums of products are written as fma: the compiler must not choose which product is rounded.
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
        self.width = head_dim // self.WARPS  # columns of the output that a warp makes
        self.nt = self.width // 8
        self.bytes = 2 * self.rows * head_dim * 2  # of a block's K and V in a tile

    @cute.jit
    def plan(self, k: cute.Tensor, v: cute.Tensor):
        """The MMA, the TMA copies of K and V, and the layout of a tile in shared memory."""
        # x4 ldmatrix wants 16 rows of B: two n-tiles at a time
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), permutation_mnk=(16, 16, 16))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        room = cute.tile_to_shape(atom, (self.rows, self.D, self.per), order=(0, 1, 2))
        one = cute.tile_to_shape(atom, (self.rows, self.D), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_k, gk = cpasync.make_tiled_tma_atom(load, self.tokens_first(k), one, (self.rows, self.D))
        tma_v, gv = cpasync.make_tiled_tma_atom(load, self.tokens_first(v), one, (self.rows, self.D))
        return mma, tma_k, gk, tma_v, gv, room

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
    def fetch(self, source, sK, sV, full, slot, live, tile, lane):
        """A warp starts the copies of a tile. Lane s < per holds slot and live tokens of its block s.

        source: both copies, and the first block of this head in the cache.
        """
        tma_k, k, tma_v, v, start = source
        some = live > tile * self.TILE and lane < self.per
        wanted = cute.arch.popc(cute.arch.vote_ballot_sync(some))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, wanted * self.bytes)
        for s in cutlass.range(self.per, unroll=1):
            from_ = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(slot, s))
            if cute.arch.shuffle_sync(live, s) > tile * self.TILE:  # a whole warp: a TMA copy elects its lane
                for tma, g, x in ((tma_k, k, sK), (tma_v, v, sV)):
                    tiles = cute.local_tile(g[None, None, start + from_], (self.rows, self.D), (None, 0))
                    to, src = cpasync.tma_partition(
                        tma,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(x[None, None, s], 0, 2),
                        cute.group_modes(tiles, 0, 2),
                    )
                    cute.copy(tma, src[None, tile], to, tma_bar_ptr=full)

    @cute.jit
    def load_q(self, q, b, h, lane, mma):
        """The group's queries as A fragments; rows beyond G are zero."""
        r, c = lane // 4, lane % 4
        qf = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((16, self.D)), self.dtype)
        words = cute.make_tensor(cute.recast_tensor(qf, Uint32).iterator, cute.make_layout((2, 2, self.D // 16)))
        words.fill(0)
        pair = cute.make_rmem_tensor((2,), self.dtype)
        for half in range_constexpr(self.halves):
            if r + half * 8 < self.G:
                for i in range_constexpr(self.D // 8):
                    row = q[b, h * self.G + half * 8 + r, None]
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
    def tile(self, sK, sV, sP, sML, lives, tile, qf, scale, state, mma, wid, lane):
        """Partials of a tile's blocks, this warp's columns of them, into `state` (see partial).

        sK, sV: (rows, D, per). lives: live tokens of each block, none where <= 0.
        """
        r, c = lane // 4, lane % 4
        M, L, out = state
        own = lives[0]
        for s in range_constexpr(1, self.per):  # an index that is not constant would put registers into memory
            own = lives[s] if wid // self.share == s else own
        first = tile * self.TILE + wid % self.share * 16
        if own < first + 16:  # 0 * NaN is NaN: rows without a token become zeros
            zero = cute.make_rmem_tensor((8,), self.dtype)
            zero.fill(0.0)
            for i in range_constexpr(self.D // 16):
                if first + lane // 2 >= own:
                    row = sV[wid % self.share * 16 + lane // 2, None, wid // self.share]
                    cute.autovec_copy(zero, cute.local_tile(row, (8,), (2 * i + lane % 2,)))
            cute.arch.fence_proxy("async.shared", space="cta")  # before the copy engine writes here again
        acc, m, total = self.scores(sK, own, first, qf, scale, mma, wid, lane)

        # p = high + low, as A fragments
        p = cute.make_tensor(acc.iterator, cute.make_layout((8,)))
        split = cute.make_rmem_tensor((8, 2), self.dtype)
        rest = cute.make_rmem_tensor((8,), Float32)
        split[None, 0].store(p.load().to(self.dtype))
        rest.store(p.load() - split[None, 0].load().to(Float32))
        split[None, 1].store(rest.load().to(self.dtype))
        words = cute.recast_tensor(split, Uint32)
        for x in range_constexpr(2):
            cute.autovec_copy(words[None, x], sP[None, lane, x, wid])
        if c == 0:
            for half in range_constexpr(self.halves):
                sML[0, r + 8 * half, wid] = m[half]
                sML[1, r + 8 * half, wid] = total[half]
        cute.arch.sync_threads()

        thr = mma.get_slice(lane)
        load = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma)
        factor = cute.make_rmem_tensor((2, self.WARPS), Float32)
        for block in range_constexpr(self.per):
            for half in range_constexpr(self.halves):
                top = -Float32.inf
                for w in range_constexpr(block * self.share, (block + 1) * self.share):
                    top = cute.arch.fmax(top, sML[0, r + 8 * half, w])
                base = top if top > -Float32.inf else Float32(0.0)
                sum_ = Float32(0.0)
                for w in range_constexpr(block * self.share, (block + 1) * self.share):
                    factor[half, w] = cute.arch.exp2(sML[0, r + 8 * half, w] - base)
                    sum_ = cute.math.fma(factor[half, w], sML[1, r + 8 * half, w], sum_)
                M[half, block] = top
                L[half, block] = sum_
        out.fill(0.0)
        tmp = cute.make_rmem_tensor(((2, 2), 1, self.nt), Float32)
        flat = cute.make_tensor(tmp.iterator, cute.make_layout((2, 2, self.nt)))
        pf = cute.make_rmem_tensor(thr.partition_shape_A((16, 16)), self.dtype)
        pw = cute.make_tensor(cute.recast_tensor(pf, Uint32).iterator, cute.make_layout((4,)))
        for w in range_constexpr(self.WARPS):
            block = const_expr(w // self.share)
            rows = sV[None, None, block]
            values = cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0]))
            values = cute.local_tile(values, (self.width, 16), (wid, w % self.share))
            vf = thr.make_fragment_B(thr.partition_B(values))
            cute.copy(load, load.get_slice(lane).partition_S(values), load.get_slice(lane).retile(vf))
            tmp.fill(0.0)
            for x in range_constexpr(1, -1, -1):  # the low parts first
                cute.autovec_copy(sP[None, lane, x, w], pw)
                cute.gemm(mma, tmp, pf[None, None, 0], vf[None, None, 0], tmp)
            for half in range_constexpr(self.halves):
                for j in range_constexpr(self.nt):
                    for e in range_constexpr(2):
                        out[e, half, j, block] = cute.math.fma(
                            factor[half, w], flat[e, half, j], out[e, half, j, block]
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
            inv = Float32(0.0) if empty else 1.0 / total
            for j in range_constexpr(self.nt):
                for e in range_constexpr(2):
                    x[e, half, j] = Float32(0.0) if empty else out[e, half, j, block] * inv
            log[half] = -Float32.inf if empty else (M[half, block] + cute.math.log2(total)) * common.LN2
