# SPDX-License-Identifier: Apache-2.0
"""attend: one softmax partial (o, lse) a listed block, by a ring of TMA copies and warp-level MMA.

A CTA of 4 warps stays on one KV head and takes every gridDim.x-th chunk of 64 tokens: 4 blocks of 16, 2 of 32, one of
64, or a quarter of a block of 256. The ids of its chunks are read at once, one a lane; then one thread keeps the next
chunks in flight (the copy engine needs no registers and no addresses of the others) while 4 warps work on one: each
scores 16 tokens, probabilities cross warps through shared memory, and each makes its columns of the output. The G query
heads are the 16 rows of the MMA. Probabilities are multiplied as the sum of two half-precision numbers, so that a
partial is as good as float32 arithmetic.

The bits of a partial depend on q, the block and the scale only: this one kernel computes every partial, the predicted,
the serial and the missed ones (`mode`), and no result depends on the chunk, the CTA or the place in the ring.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.common import fake, syms

ALL = 0  # every listed block
FRESH = 1  # the same, for a merge right behind: padding gets lse = -inf without an o, and the merge may start early
MISSED = 2  # as FRESH, but blocks whose position is not negative are left alone
_CTAS = 2 * 132  # two on each SM of an H200; a smaller part only sees longer lists


class Attend:
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
        self.per = max(1, self.TILE // block)  # blocks a chunk
        self.tiles = max(1, block // self.TILE)  # chunks a block
        self.share = min(self.WARPS, block // 16)  # warps that share a block
        self.width = head_dim // self.share  # columns of the output that a warp makes
        self.nt = self.width // 8
        self.window = 32 // self.per  # chunks whose ids the lanes of a warp hold
        self.stages = 3 if head_dim == 128 else 4
        self.rows = min(block, self.TILE)  # tokens that one copy brings
        self.bytes = 2 * self.rows * head_dim * 2  # of a K and a V copy

    def signature(self):
        """Fake arguments, see the templates package."""
        B, Hq, H, S, N, C = syms(6)
        D, G, T = self.D, self.G, self.T
        return (
            fake(self.dtype, (B, Hq, D)),
            fake(self.dtype, (B, H, S, T, D)),
            fake(self.dtype, (B, H, S, T, D)),
            fake(Int32, (B, H, N), 4),
            fake(Int32, (B, H, N), 4),
            fake(Int32, (B,), 4),
            fake(Int32, (B, H, C), 4) if self.paged else None,
            fake(Float32, (B, H, N, G, D)),
            fake(Float32, (B, H, N, G), 4),
            Int32(0),
            Float32(1.0),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        seq_lens: cute.Tensor,
        table,
        o: cute.Tensor,
        lse: cute.Tensor,
        mode: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch."""
        # x4 ldmatrix wants 16 rows of B: two n-tiles at a time
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), permutation_mnk=(16, 16, 16))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        ring = cute.tile_to_shape(atom, (self.rows, self.D, self.per * self.stages), order=(0, 1, 2))
        one = cute.tile_to_shape(atom, (self.rows, self.D), order=(0, 1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_k, gk = cpasync.make_tiled_tma_atom(load, self.tokens_first(k), one, (self.rows, self.D))
        tma_v, gv = cpasync.make_tiled_tma_atom(load, self.tokens_first(v), one, (self.rows, self.D))
        chunks = cute.ceil_div(ids.shape[2], self.per)
        heads = ids.shape[0] * ids.shape[1]
        ctas = cutlass.min(chunks, cutlass.max(_CTAS // heads, 1))
        self.kernel(q, tma_k, gk, tma_v, gv, ids, position, seq_lens, table, o, lse, mode, scale, mma, ring).launch(
            grid=[ctas, ids.shape[1], ids.shape[0]], block=[self.WARPS * 32, 1, 1], stream=stream, use_pdl=True
        )

    @cute.jit
    def tokens_first(self, x: cute.Tensor):
        """[B, H, S, T, D] seen as (T, D, S, H, B)."""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 4, 2, 1, 0]))

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        tma_k: cute.CopyAtom,
        k: cute.Tensor,
        tma_v: cute.CopyAtom,
        v: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        seq_lens: cute.Tensor,
        table,
        o: cute.Tensor,
        lse: cute.Tensor,
        mode: Int32,
        scale: Float32,
        mma: cute.TiledMma,
        ring: cute.ComposedLayout,
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        cx, h, b = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        wid = cute.arch.make_warp_uniform(t // 32)
        lane = t % 32
        smem = SmemAllocator()
        sK = smem.allocate_tensor(self.dtype, ring.outer, 1024, swizzle=ring.inner)
        sV = smem.allocate_tensor(self.dtype, ring.outer, 1024, swizzle=ring.inner)
        sP = smem.allocate_tensor(Uint32, cute.make_layout((4, 32, 2, self.WARPS)), 16)
        sML = smem.allocate_tensor(Float32, cute.make_layout((2, 16, self.WARPS)), 16)
        sLive = smem.allocate_tensor(Int32, cute.make_layout((self.per, self.stages)), 16)
        full = smem.allocate_array(Int64, self.stages)
        if t == 0:
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
            for i in range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        cute.arch.griddepcontrol_wait()
        if mode != ALL:  # the merge behind this reads what is older than this kernel while it runs
            cute.arch.griddepcontrol_launch_dependents()
        length = seq_lens[b]
        steps = (cute.ceil_div(ids.shape[2], self.per) - cx + ctas - 1) // ctas * self.tiles  # of this CTA, at least 1

        held = cute.make_rmem_tensor((2,), Int32)
        source = (tma_k, k[None, None, None, h, b], tma_v, v[None, None, None, h, b])
        if wid == 0:
            self.peek(held, ids, position, table, k, length, mode, b, h, cx, ctas, lane)
            for i in cutlass.range(cutlass.min(steps, self.stages - 1), unroll=1):
                self.fetch(source, sK, sV, sLive, full, held, i, i, lane)
        qf = self.load_q(q, b, h, lane, mma)

        M = cute.make_rmem_tensor((2,), Float32)
        L = cute.make_rmem_tensor((2,), Float32)
        out = cute.make_rmem_tensor((2, 2, self.nt), Float32)
        step = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        while step < steps:
            cute.arch.sync_threads()  # everyone is done with the stage that is filled next
            ahead = step + self.stages - 1
            if wid == 0 and ahead < steps:
                if ahead % (self.window * self.tiles) == 0:  # the ids of the next window
                    first = cx + (ahead // self.tiles) * ctas
                    self.peek(held, ids, position, table, k, length, mode, b, h, first, ctas, lane)
                into = stage - 1 if stage > 0 else Int32(self.stages - 1)
                self.fetch(source, sK, sV, sLive, full, held, ahead, into, lane)
            if step == steps - 1:
                cute.arch.griddepcontrol_launch_dependents()
            tile = step % self.tiles
            work = Boolean(False)
            for s in range_constexpr(self.per):
                work = work | (sLive[s, stage] >= 0)
            cute.arch.mbarrier_wait(full + stage, phase)
            if work:  # the same for all threads
                live = sLive[wid // self.share, stage]
                at = stage * self.per + wid // self.share
                self.tile(
                    sK[None, None, at], sV[None, None, at], sP, sML, tile, live, qf, scale, M, L, out, mma, wid, lane
                )
                n = (cx + (step // self.tiles) * ctas) * self.per + wid // self.share
                last = tile == self.tiles - 1
                if last and (live > 0 or (live == 0 and mode == ALL)):
                    self.write(o, lse, b, h, n, M, L, out, wid, lane)
                if last and live == 0 and mode != ALL and lane < self.G and wid % self.share == 0:
                    lse[b, h, n, lane] = -Float32.inf
            step = step + 1
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def peek(self, held, ids, position, table, k, length, mode, b, h, first, ctas, lane):
        """Slot and live tokens of each lane's listed block: `window` chunks from chunk `first` on, `per` blocks each.

        0 live tokens: padding, or an id out of range. -1: nothing to do here.
        """
        n = (first + (lane // self.per) * ctas) * self.per + lane % self.per
        held[0] = Int32(0)
        held[1] = Int32(-1)
        if n < ids.shape[2]:
            blk = ids[b, h, n]
            known = Int32(-1)
            if mode == MISSED:
                known = position[b, h, n]
            valid = blk >= 0 and blk < (length + self.T - 1) // self.T
            slot = blk if valid else Int32(0)
            if const_expr(self.paged):
                valid = valid and slot < table.shape[2]
                at = Int32(-1)
                if valid:
                    at = table[b, h, slot]
                slot = at
            valid = valid and slot >= 0 and slot < k.shape[2]
            live = cutlass.min(length - blk * self.T, self.T)
            live = live if valid else Int32(0)
            held[0] = slot if valid else Int32(0)
            held[1] = Int32(-1) if blk >= 0 and known >= 0 else live

    @cute.jit
    def fetch(self, source, sK, sV, sLive, full, held, step, stage, lane):
        """Warp 0 starts the copies of a chunk into a stage: whole blocks, or 64 tokens of one."""
        tma_k, k, tma_v, v = source
        at = (step // self.tiles) % self.window * self.per
        tile = step % self.tiles
        mine = cute.arch.shuffle_sync(held[1], at + lane % self.per)
        slot = cute.arch.shuffle_sync(held[0], at + lane % self.per)
        some = mine > tile * self.TILE
        wanted = cute.arch.popc(cute.arch.vote_ballot_sync(some and lane < self.per))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, wanted * self.bytes)
        for s in cutlass.range(self.per, unroll=1):
            from_ = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(slot, s))
            live = cute.arch.shuffle_sync(mine, s)
            if live > tile * self.TILE:  # the whole warp comes here: a TMA copy elects its lane
                for tma, g, x in ((tma_k, k, sK), (tma_v, v, sV)):
                    tiles = cute.local_tile(g[None, None, from_], (self.rows, self.D), (None, 0))
                    to, src = cpasync.tma_partition(
                        tma,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(x[None, None, stage * self.per + s], 0, 2),
                        cute.group_modes(tiles, 0, 2),
                    )
                    cute.copy(tma, src[None, tile], to, tma_bar_ptr=full + stage)
        if lane < self.per:
            sLive[lane, stage] = mine

    @cute.jit
    def load_q(self, q, b, h, lane, mma):
        """The group's queries as A fragments; rows beyond G are zero."""
        r, c = lane // 4, lane % 4
        qf = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((16, self.D)), self.dtype)
        words = cute.make_tensor(cute.recast_tensor(qf, Uint32).iterator, cute.make_layout((2, 2, self.D // 16)))
        words.fill(0)
        pair = cute.make_rmem_tensor((2,), self.dtype)
        for half in range_constexpr(2):
            if const_expr(half * 8 < self.G):  # noqa: SIM102
                if r + half * 8 < self.G:
                    for i in range_constexpr(self.D // 8):
                        row = q[b, h * self.G + half * 8 + r, None]
                        cute.autovec_copy(cute.local_tile(row, (2,), (i * 4 + c,)), pair)
                        words[half, i % 2, i // 2] = cute.recast_tensor(pair, Uint32)[0]
        return qf

    @cute.jit
    def tile(self, sK, sV, sP, sML, tile, live, qf, scale, M, L, out, mma, wid, lane):
        """Fold one stage into the running state of this warp's rows r, r + 8 and columns: M (log2), L, out."""
        r, c = lane // 4, lane % 4
        part = wid % self.share
        thr = mma.get_slice(lane)
        load_k = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype), mma)
        load_v = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), self.dtype), mma)

        if live < (tile + 1) * self.rows:  # 0 * NaN is NaN: rows without a token become zeros
            zero = cute.make_rmem_tensor((8,), self.dtype)
            zero.fill(0.0)
            for i in range_constexpr(self.D // 16):
                row = part * 16 + lane // 2
                if tile * self.rows + row >= live:
                    cute.autovec_copy(zero, cute.local_tile(sV[row, None], (8,), (2 * i + lane % 2,)))
            cute.arch.fence_proxy("async.shared", space="cta")  # before the copy engine writes here again

        # scores of 16 tokens; two accumulators halve the chain of dependent MMAs
        keys = cute.local_tile(sK, (16, self.D), (part, 0))
        kf = thr.make_fragment_B(thr.partition_B(keys))
        cute.copy(load_k, load_k.get_slice(lane).partition_S(keys), load_k.get_slice(lane).retile(kf))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((16, 16)), Float32)
        odd = cute.make_rmem_tensor(thr.partition_shape_C((16, 16)), Float32)
        acc.fill(0.0)
        odd.fill(0.0)
        for i in range_constexpr(self.D // 32):
            cute.gemm(mma, acc, qf[None, None, 2 * i], kf[None, None, 2 * i], acc)
            cute.gemm(mma, odd, qf[None, None, 2 * i + 1], kf[None, None, 2 * i + 1], odd)
        acc.store(acc.load() + odd.load())

        s = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, 2)))  # column of a pair, row half, n-tile
        m = cute.make_rmem_tensor((2,), Float32)
        total = cute.make_rmem_tensor((2,), Float32)
        for half in range_constexpr(2):
            top = -Float32.inf
            for i in range_constexpr(2):
                for e in range_constexpr(2):
                    token = tile * self.TILE + part * 16 + 8 * i + 2 * c + e
                    x = s[e, half, i] * (scale * common.LOG2E)
                    s[e, half, i] = x if token < live else -Float32.inf
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

        # p = high + low, as A fragments
        p = cute.make_tensor(acc.iterator, cute.make_layout((8,)))
        split = cute.make_rmem_tensor((8, 2), self.dtype)
        rest = cute.make_rmem_tensor((8,), Float32)
        split[None, 0].store(p.load().to(self.dtype))
        rest.store(p.load() - split[None, 0].load().to(Float32))
        split[None, 1].store(rest.load().to(self.dtype))

        factor = cute.make_rmem_tensor((2, self.share), Float32)
        if const_expr(self.share > 1):
            words = cute.recast_tensor(split, Uint32)
            for x in range_constexpr(2):
                cute.autovec_copy(words[None, x], sP[None, lane, x, wid])
            if c == 0:
                for half in range_constexpr(2):
                    sML[0, r + 8 * half, wid] = m[half]
                    sML[1, r + 8 * half, wid] = total[half]
            cute.arch.sync_threads()
        elif live < self.rows:
            cute.arch.sync_warp()
        values = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0]))
        values = cute.local_tile(values, (self.width, self.rows), (part, 0))
        vf = thr.make_fragment_B(thr.partition_B(values))
        cute.copy(load_v, load_v.get_slice(lane).partition_S(values), load_v.get_slice(lane).retile(vf))

        first = wid - part
        for half in range_constexpr(2):
            top = m[half]
            if const_expr(self.share > 1):
                top = sML[0, r + 8 * half, first]
                for w in range_constexpr(1, self.share):
                    top = cute.arch.fmax(top, sML[0, r + 8 * half, first + w])
            keep = Float32(0.0)
            if const_expr(self.tiles > 1):
                before = M[half] if tile > 0 else -Float32.inf
                top = cute.arch.fmax(top, before)
                keep = cute.arch.exp2(before - top) if top > -Float32.inf else Float32(0.0)
                for j in range_constexpr(self.nt):
                    for e in range_constexpr(2):
                        out[e, half, j] = out[e, half, j] * keep if tile > 0 else Float32(0.0)
            base = top if top > -Float32.inf else Float32(0.0)
            sum_ = Float32(0.0)
            if const_expr(self.tiles > 1):
                sum_ = L[half] * keep if tile > 0 else Float32(0.0)
            for w in range_constexpr(self.share):
                if const_expr(self.share > 1):
                    factor[half, w] = cute.arch.exp2(sML[0, r + 8 * half, first + w] - base)
                    sum_ = sum_ + factor[half, w] * sML[1, r + 8 * half, first + w]
                else:
                    factor[half, w] = Float32(1.0)
                    sum_ = total[half]
            M[half] = top
            L[half] = sum_
        if const_expr(self.tiles == 1):
            out.fill(0.0)

        tmp = cute.make_rmem_tensor(((2, 2), 1, self.nt), Float32)
        flat = cute.make_tensor(tmp.iterator, cute.make_layout((2, 2, self.nt)))
        pf = cute.make_rmem_tensor(thr.partition_shape_A((16, 16)), self.dtype)
        pw = cute.make_tensor(cute.recast_tensor(pf, Uint32).iterator, cute.make_layout((4,)))
        own = cute.recast_tensor(split, Uint32)
        for w in range_constexpr(self.share):
            tmp.fill(0.0)
            for x in range_constexpr(1, -1, -1):  # the low parts first
                if const_expr(self.share > 1):
                    cute.autovec_copy(sP[None, lane, x, first + w], pw)
                else:
                    for i in range_constexpr(4):
                        pw[i] = own[i, x]
                cute.gemm(mma, tmp, pf[None, None, 0], vf[None, None, w], tmp)
            for j in range_constexpr(self.nt):
                for half in range_constexpr(2):
                    for e in range_constexpr(2):
                        out[e, half, j] = out[e, half, j] + factor[half, w] * flat[e, half, j]

    @cute.jit
    def write(self, o, lse, b, h, n, M, L, out, wid, lane):
        """Normalise and store this warp's columns of block n of the list."""
        r, c = lane // 4, lane % 4
        part = wid % self.share
        pair = cute.make_rmem_tensor((2,), Float32)
        for half in range_constexpr(2):
            if const_expr(half * 8 < self.G):
                g = r + 8 * half
                if g < self.G:
                    empty = L[half] == 0.0  # not of NaN: a wrong read must show, not weigh nothing
                    inv = Float32(0.0) if empty else 1.0 / L[half]
                    for j in range_constexpr(self.nt):
                        for e in range_constexpr(2):
                            pair[e] = Float32(0.0) if empty else out[e, half, j] * inv
                        to = cute.local_tile(o[b, h, n, g, None], (2,), (part * (self.width // 2) + 4 * j + c,))
                        cute.autovec_copy(pair, to)
                    if c == 0 and part == 0:
                        full = M[half] * common.LN2 + cute.math.log(L[half])
                        lse[b, h, n, g] = -Float32.inf if empty else full


def launch(q, k, v, ids, position, seq_lens, page_table, o, lse, mode, scale, op="attend"):
    """Partials of `ids` into o and lse; `position` is read in mode MISSED only."""
    B, H, S, T, D = k.shape
    G = q.shape[1] // H
    asked = {"dtype": q.dtype, "head size": D, "block size": T, "query heads a KV head": G}
    templates.serve(op, q, Attend.SERVES, asked)
    templates.contiguous(op, ids=ids, position=position, seq_lens=seq_lens, page_table=page_table, lse=lse)
    templates.door(op, q=q, k=k, v=v, o=o)
    if ids.numel() == 0:
        return
    if k.numel() == 0:  # a cache without slots: all ids are padding
        o.zero_()
        lse.fill_(float("-inf"))
        return
    paged = page_table is not None
    kernel = compiled(Attend, dtype=templates.name(q.dtype), head_dim=D, group=G, block=T, paged=paged)
    kernel(q, k, v, ids, position, seq_lens, page_table, o, lse, mode, scale)


def attend(q, k, v, ids, seq_lens, scale, page_table, o, lse):
    """The op."""
    launch(q, k, v, ids, ids, seq_lens, page_table, o, lse, ALL, scale)
