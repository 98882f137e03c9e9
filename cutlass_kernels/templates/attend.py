# SPDX-License-Identifier: Apache-2.0
"""attend: one softmax partial (o, lse) a listed block.

A CTA of 4 warps makes one tile of 64 tokens (see tile.py) and is gone: so many of them share an SM that the loads of
some run under the arithmetic of others, without a ring. The tiles of a block of 128 or 256 are a cluster: each sends
its unnormalised partial around, a slice of the columns to each (stores that count on the receiver's mbarrier), and
each folds the tiles of its slice, in their order.

The bits of a partial depend on q, the block and the scale only.

In mode AHEAD it runs beside the kernel in front of it on its stream: all of that one has started by then, and has
waited for whatever is read here before it let this one start.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates.common import CARVEOUT, fake, syms
from cutlass_kernels.templates.tile import Tile

AHEAD = -1  # as ALL, but the wait for the kernel in front comes last
ALL = 0  # every listed block
FRESH = 1  # the same, for a merge right behind: padding gets lse = -inf without an o
MISSED = 2  # as FRESH, but blocks whose position is not negative are left alone


class Attend(Tile):
    """See the module. Parameters: those of Tile."""

    def __init__(self, dtype: str, head_dim: int, group: int, block: int, paged: bool):
        super().__init__(dtype, head_dim, group, block, paged)
        self.folders = self.WARPS // self.tiles  # warps of a CTA that fold, each the columns of one warp
        self.crowd = 5 if self.per * self.halves <= 4 else 4  # CTAs on an SM: bounds a thread's registers
        self.words = self.halves * self.nt // 2 + 1  # of 16 bytes that a thread sends

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
        tma_k, gk, room = self.source(k, self.D, 1)
        tma_v, gv, _ = self.source(v, self.D, 1)
        mma = self.plan()
        tiles = cute.ceil_div(ids.shape[2], self.per) * self.tiles
        self.kernel(
            q, tma_k, gk, tma_v, gv, ids, position, seq_lens, table, o, lse, mode, scale, mma, room, k.shape[2]
        ).launch(
            grid=[tiles, ids.shape[1], ids.shape[0]],
            block=[self.WARPS * 32, 1, 1],
            cluster=[self.tiles, 1, 1] if self.tiles > 1 else None,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.crowd,
            preferred_smem_carveout=CARVEOUT,
        )

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
        room: cute.ComposedLayout,
        slots: Int32,
    ):
        """A CTA, see the module."""
        cx, h, b = cute.arch.block_idx()
        x = SimpleNamespace(q=q, ids=ids, position=position, seq_lens=seq_lens, table=table, o=o, lse=lse, slots=slots)
        source = (tma_k, k, tma_v, v)
        self.cta(x, source, mode, scale, mma, cx, h, b, self.memory(SmemAllocator(), room))

    def memory(self, smem, room):
        """Shared memory from an allocator: two tiles laid out as `room`, and what warps and CTAs tell each other."""
        m = SimpleNamespace()
        m.k = smem.allocate_tensor(self.dtype, room.outer, 1024, swizzle=room.inner)
        m.v = smem.allocate_tensor(self.dtype, room.outer, 1024, swizzle=room.inner)
        m.p = smem.allocate_tensor(Uint32, cute.make_layout((4, 32, 2, self.WARPS)), 16)
        m.ml = smem.allocate_tensor(Float32, cute.make_layout((2, 16, self.WARPS)), 16)
        m.full = smem.allocate_tensor(Int64, cute.make_layout((2,)), 8)  # the tile; what the others of the cluster send
        if self.tiles > 1:
            inbox = cute.make_layout((4, self.words, 32, self.folders, self.tiles))
            m.inbox = smem.allocate_tensor(Float32, inbox, 16)
        return m

    @cute.jit
    def cta(self, x, source, mode, scale, mma, cx, h, b, m):
        """All that CTA cx of the row (b, h) does."""
        t, _, _ = cute.arch.thread_idx()
        wid = cute.arch.make_warp_uniform(t // 32)
        lane = t % 32
        tma_k, k, tma_v, v = source
        q, ids, o, lse = x.q, x.ids, x.o, x.lse
        sK, sV, full = m.k[None, None, None, 0], m.v[None, None, None, 0], m.full.iterator
        if t == 0:
            cute.nvgpu.cpasync.prefetch_descriptor(tma_k)
            cute.nvgpu.cpasync.prefetch_descriptor(tma_v)
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init(full + 1, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.tiles > 1):
            cute.arch.cluster_arrive_relaxed()  # the wait stands before the first store into another CTA

        if mode != AHEAD:
            cute.arch.griddepcontrol_wait()
        # early: what is behind this gets room only when the last CTA has, and then its start costs nothing
        cute.arch.griddepcontrol_launch_dependents()
        first, tile = cx // self.tiles * self.per, cx % self.tiles
        slot, alive = self.peek(ids, x.position, x.table, x.slots, x.seq_lens[b], mode, b, h, first + lane % self.per)
        if wid == 0:
            start = (b * ids.shape[1] + h) * x.slots
            self.fetch((*source, start), sK, sV, full, slot, alive, tile, 0, lane)
        qf = self.load_q(q, b, h * self.G, self.G, lane, mma)
        live = cute.make_rmem_tensor((self.per,), Int32)
        work = Boolean(False)
        for s in range_constexpr(self.per):
            live[s] = cute.arch.shuffle_sync(alive, s)
            work = work | (live[s] > 0)
        state = self.partial()
        self.clear(state)
        cute.arch.mbarrier_wait(full, 0)
        if work:  # the same for all threads
            self.tile(sK, sV, m.p, m.ml, live, tile, qf, scale, state, mma, wid, lane)
        if const_expr(self.tiles > 1):
            self.exchange(state, m.inbox, full + 1, work, tile, wid, lane, t)
        part = tile * self.folders + wid  # whose columns this warp has now
        if wid < self.folders:
            log = cute.make_rmem_tensor((2,), Float32)
            columns = cute.make_rmem_tensor((2, 2, self.nt), Float32)
            for s in range_constexpr(self.per):
                if live[s] > 0 or (live[s] == 0 and mode <= ALL):
                    self.normalise(state, s, log, columns)
                    self.write(o, lse, b, h, first + s, log, columns, part, lane)
                if live[s] == 0 and mode > ALL and lane < self.G and part == 0:
                    lse[b, h, first + s, lane] = -Float32.inf
        cute.arch.griddepcontrol_wait()  # last, where not first: what is behind this relies on all that is in front

    @cute.jit
    def peek(self, ids, position, table, slots, length, mode, b, h, n):
        """Slot and live tokens of the n-th listed block; 0 tokens: padding, -1: beyond the list, or nothing to do."""
        slot, live = Int32(0), Int32(-1)
        if n < ids.shape[2]:
            blk = ids[b, h, n]
            known = Int32(-1)
            if mode == MISSED:
                known = position[b, h, n]
            slot, live = self.locate(blk, table, slots, length, b, h)
            live = Int32(-1) if blk >= 0 and known >= 0 else live
        return slot, live

    @cute.jit
    def exchange(self, state, inbox, full, work, tile, wid, lane, t):
        """Send this tile's state around the cluster; the folding warps get a block's, of their columns."""
        M, L, out = state
        four = cute.make_rmem_tensor((4,), Float32)
        if t == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 16 * self.words * 32 * self.WARPS)
        cute.arch.cluster_wait()
        if work:  # the same for the whole cluster
            for i in range_constexpr(self.words):
                self.word(state, four, i, False)
                bits = cute.recast_tensor(four, Int32)
                to = inbox[None, i, lane, wid % self.folders, tile].iterator
                value = (bits[0], bits[1], bits[2], bits[3])
                cute.arch.store_async_dsmem(to, value, full, wid // self.folders)
            if wid < self.folders:
                cute.arch.mbarrier_wait(full, 0)
                one = self.partial()
                self.clear(state)
                for source in range_constexpr(self.tiles):
                    for i in range_constexpr(self.words):
                        cute.autovec_copy(inbox[None, i, lane, wid, source], four)
                        self.word(one, four, i, True)
                    self.fold(state, one[0][None, 0], one[1][None, 0], one[2][None, None, None, 0])

    @cute.jit
    def word(self, state, four, i: cutlass.Constexpr, back: cutlass.Constexpr):
        """The i-th 16 bytes of a state: two pairs of columns, or maxima and sums."""
        M, L, out = state
        for e in range_constexpr(4):
            half, j = i % self.halves, i // self.halves * 2 + e // 2
            if const_expr(i < self.words - 1):
                if const_expr(back):
                    out[e % 2, half, j, 0] = four[e]
                else:
                    four[e] = out[e % 2, half, j, 0]
            elif const_expr(e // 2 < self.halves):
                at = (M, L)[e % 2]
                if const_expr(back):
                    at[e // 2, 0] = four[e]
                else:
                    four[e] = at[e // 2, 0]

    @cute.jit
    def write(self, o, lse, b, h, n, log, x, part, lane):
        """Store the columns of warp `part` of block n of the list."""
        r, c = lane // 4, lane % 4
        for half in range_constexpr(self.halves):
            g = r + 8 * half
            if g < self.G:
                for j in range_constexpr(self.nt):
                    to = cute.local_tile(o[b, h, n, g, None], (2,), (part * (self.width // 2) + 4 * j + c,))
                    cute.autovec_copy(x[None, half, j], to)
                if c == 0 and part == 0:
                    lse[b, h, n, g] = log[half]


def shape_of(op, q, k, v, ids, position, seq_lens, page_table, o, lse, served=Attend.SERVES):
    """Parameters of a Tile for tensors that its kernels can read."""
    H, T, D = k.shape[1], *k.shape[3:]
    G = q.shape[1] // H
    asked = {"dtype": q.dtype, "head size": D, "block size": T, "query heads a KV head": G}
    templates.serve(op, q, served, asked)
    templates.contiguous(op, ids=ids, position=position, seq_lens=seq_lens, page_table=page_table, lse=lse)
    templates.door(op, q=q, k=k, v=v, o=o)
    paged = page_table is not None
    return {"dtype": templates.name(q.dtype), "head_dim": D, "group": G, "block": T, "paged": paged}


def launch(q, k, v, ids, position, seq_lens, page_table, o, lse, mode, scale, op="attend"):
    """Partials of `ids` into o and lse; `position` is read in mode MISSED only."""
    shape = shape_of(op, q, k, v, ids, position, seq_lens, page_table, o, lse)
    if ids.numel() == 0 or k.numel() == 0:
        o.zero_()  # a cache without slots: all ids are padding
        lse.fill_(float("-inf"))
        return
    kernel = compiled(Attend, **shape)
    kernel(q, k, v, ids, position, seq_lens, page_table, o, lse, mode, scale)


def attend(q, k, v, ids, seq_lens, scale, page_table, o, lse, beside=False):
    """The op."""
    launch(q, k, v, ids, ids, seq_lens, page_table, o, lse, AHEAD if beside else ALL, scale)
