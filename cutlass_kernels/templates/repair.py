# SPDX-License-Identifier: Apache-2.0
"""repair in one launch; its two halves, each a launch; and repair_union: attend over the missed blocks, then merge.

`Repair` repeats work to save hand-overs. A CTA makes the result of a few query heads in a slice of the columns, from
the missed keys to the last division: every CTA of a KV head scores the same missed blocks, a warp a tile of them, and
loads its columns of V only. Partials that exist come by cp.async while the keys are on their way; those of the missed
blocks join them in shared memory. Nothing crosses CTAs. Longer blocks are worth their hand-overs: see attend.

What makes `exact` exact: partials have the arithmetic of Tile, the merge that of Tree, and so have attend and merge.

With few parts a CTA leaves room for others on its SM: it is to be there before the kernel in front is done. (One launch
in a cluster whose CTAs take whole SMs was built and measured: it starts late, and lost 2 us.)
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import attend, merge
from cutlass_kernels.templates.common import CARVEOUT, fake, syms
from cutlass_kernels.templates.missed import Missed
from cutlass_kernels.templates.tree import Tree


class Repair(Missed, Tree):
    """See the module. Parameters: those of Tile, `capacity`: parts of A, at most.

    In the end the CTA merges: a unit is COLS columns of one head.
    """

    SERVES = Missed.SERVES | {"block size": (16, 32, 64)}
    HEADS = 4  # query heads of a CTA, at most
    CREW = 8  # warps of a CTA, and tiles in flight, if there is room
    ROOM = 226 * 1024  # bytes of shared memory for all but mbarriers
    SHARED = 176 * 1024  # the same, with room for others on the SM: held to, if that leaves 4 tiles in flight
    CAPACITIES = (64, 128, 256, 512)
    units = 4

    def __init__(self, dtype: str, head_dim: int, group: int, block: int, paged: bool, capacity: int):
        heads = min(self.HEADS, templates.round_up(group))
        cols = self.COLS * self.units // heads
        parts = (capacity * (self.COLS + 1) + self.COLS + self.SETS * (self.COLS + 2)) * self.units * 4
        rest, tile = parts + (capacity + 4) * 16, self.TILE * (head_dim + cols) * 2
        slots = min(self.CREW, max(4, (self.SHARED - rest) // tile), (self.ROOM - rest) // tile)
        super().__init__(dtype, head_dim, group, block, paged, heads, cols, capacity, slots)
        self.slices = head_dim // cols
        self.at_once = self.CREW * 32 // (heads * self.quads)  # parts that the CTA copies at a time

    def signature(self):
        """Fake arguments, see the templates package."""
        B, Hq, H, S, K, P, C = syms(7)
        D, G, T = self.D, self.G, self.T
        return (
            fake(self.dtype, (B, Hq, D)),
            fake(self.dtype, (B, H, S, T, D)),
            fake(self.dtype, (B, H, S, T, D)),
            fake(Int32, (B, H, K), 4),
            fake(Int32, (B, H, K), 4),
            fake(Float32, (B, H, P, G, D)),
            fake(Float32, (B, H, P, G), 4),
            fake(Int32, (B,), 4),
            Float32(1.0),
            fake(Int32, (B, H, C), 4) if self.paged else None,
            fake(self.dtype, (B, Hq, D), 4),
            fake(Float32, (B, Hq), 4),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        seq_lens: cute.Tensor,
        scale: Float32,
        table,
        out: cute.Tensor,
        out_lse: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch."""
        tma_k, gk, room_k = self.source(k, self.D, self.slots)
        tma_v, gv, room_v = self.source(v, self.cols, self.slots)
        tensors = q, tma_k, gk, tma_v, gv, ids, position, o, lse, seq_lens, scale, table, out, out_lse
        self.kernel(*tensors, self.plan(), room_k, room_v, k.shape[2]).launch(
            grid=[-(-self.G // self.heads) * self.slices, ids.shape[1], ids.shape[0]],
            block=[self.CREW * 32, 1, 1],
            stream=stream,
            use_pdl=True,
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
        o: cute.Tensor,
        lse: cute.Tensor,
        seq_lens: cute.Tensor,
        scale: Float32,
        table,
        out: cute.Tensor,
        out_lse: cute.Tensor,
        mma: cute.TiledMma,
        room_k: cute.ComposedLayout,
        room_v: cute.ComposedLayout,
        slots: Int32,
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        cx, h, b = cute.arch.block_idx()
        wid = cute.arch.make_warp_uniform(t // 32)
        lane = t % 32
        part = cx % self.slices
        first = cx // self.slices * self.heads  # of the heads of this CTA, in the KV head's group
        m = self.memory(room_k, room_v)
        if t == 0:
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)
            for i in range_constexpr(self.slots):
                cute.arch.mbarrier_init(m.full + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        known = self.positions(position, b, h, t)
        source = (tma_k, k, tma_v, v, (b * ids.shape[1] + h) * slots)
        # every warp looks for itself: none waits for another
        count = self.search(ids, position, table, slots, seq_lens[b], b, h, m, wid, lane)
        count = count if wid < self.slots else Int32(0)
        self.ask(source, m, wid, count, wid, part, lane)
        self.vacate(known, ids.shape[2], first, m, t)
        self.copy(known, ids.shape[2], o[b, h, None, None, None], lse[b, h, None, None], first, part, m, t)
        qf = self.load_q(q, b, h * self.G + first, cutlass.min(self.heads, self.G - first), lane, mma)
        cute.arch.sync_threads()
        n, turn = wid, Int32(0)
        while n * self.per < count:
            cute.arch.mbarrier_wait(m.full + wid, turn % 2)
            self.make(m, n, wid, qf, scale, mma, lane)
            cute.arch.sync_warp()  # all of it is read
            n, turn = n + self.slots, turn + 1
            self.ask(source, m, n, count, wid, part, lane)
            cute.arch.sync_warp()  # one lane of it started them
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

        self.merge(m, wid, lane)
        cute.arch.sync_threads()
        slices = const_expr(self.cols // self.COLS)  # units of a head
        unit = t // self.COLS
        g = first + unit // slices
        if unit < self.units and g < self.G:
            value, log = self.end(m.sums, m.weights, t % self.COLS, unit)
            at = part * self.cols + unit % slices * self.COLS + t % self.COLS
            out[b, h * self.G + g, at] = value.to(self.dtype)
            if at == 0:
                out_lse[b, h * self.G + g] = log

    @cute.jit
    def memory(self, room_k, room_v):
        """Shared memory."""
        smem, m = SmemAllocator(), SimpleNamespace()
        m.K = smem.allocate_tensor(self.dtype, room_k.outer, 1024, swizzle=room_k.inner)
        m.V = smem.allocate_tensor(self.dtype, room_v.outer, 1024, swizzle=room_v.inner)
        # the parts of A, by unit, a few bytes between units: no two of them in the same bank
        room = cute.make_layout(
            (4, self.LANES, self.capacity, self.units), stride=(1, 4, self.COLS, (self.capacity + 1) * self.COLS)
        )
        m.o = smem.allocate_tensor(Float32, room, 16)
        m.lse = smem.allocate_tensor(Float32, cute.make_layout((self.capacity, self.heads), stride=(self.heads, 1)), 16)
        m.sums = smem.allocate_tensor(Float32, cute.make_layout((self.COLS, self.units, self.SETS)), 16)
        m.weights = smem.allocate_tensor(Float32, cute.make_layout((2, self.units, self.SETS)), 16)
        m.missed = smem.allocate_tensor(Int32, cute.make_layout((4, self.capacity + 4)), 16)  # index, slot, live
        m.full = smem.allocate_array(Int64, self.slots)
        return m

    @cute.jit
    def positions(self, position, b, h, t):
        """Where P has the parts that this thread copies; anything beyond the list."""
        known = cute.make_rmem_tensor((self.capacity // self.at_once,), Int32)
        for i in range_constexpr(self.capacity // self.at_once):
            n = cutlass.min(i * self.at_once + t // (self.heads * self.quads), position.shape[2] - 1)
            known[i] = position[b, h, n]  # neither a branch nor a use: nothing waits before copy does
        return known

    @cute.jit
    def vacate(self, known, parts, first, m, t):
        """Parts that P does not have are empty until they are made."""
        r, weight = t % (self.heads * self.quads) // self.quads, m.lse
        for i in range_constexpr(self.capacity // self.at_once):
            n = i * self.at_once + t // (self.heads * self.quads)
            if t % self.quads == 0 and not self.held(known[i], n, parts, first + r):
                weight[n, r] = -Float32.inf

    @cute.jit
    def held(self, known, n, parts, g):
        """Whether P has part n of query head g of the group."""
        return known >= 0 and n < parts and g < self.G

    @cute.jit
    def copy(self, known, parts, o, lse, first, part, m, t):
        """Start the copies of the partials that P has."""
        wide = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
        )
        word = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        piece = t % (self.heads * self.quads)
        r, quad = piece // self.quads, piece % self.quads
        for i in range_constexpr(self.capacity // self.at_once):
            n = i * self.at_once + t // (self.heads * self.quads)
            if self.held(known[i], n, parts, first + r):
                row = o[known[i], first + r, None]
                to = m.o[None, quad % self.LANES, n, piece // self.LANES]
                cute.copy(wide, cute.local_tile(row, (4,), (part * self.quads + quad,)), to)
                if quad == 0:
                    log = cute.local_tile(lse[known[i], None], (1,), (first + r,))
                    cute.copy(word, log, cute.local_tile(m.lse[None, r], (1,), (n,)))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def merge(self, m, which, lane):
        """A warp takes its set of each unit, and closes it."""
        quad, row, unit = self.place(lane)
        r = unit // (self.cols // self.COLS)
        state, every = self.start(), const_expr(self.capacity // self.ROWS)  # parts of a row
        count = const_expr(min(every, self.FLIGHT))
        x = cute.make_rmem_tensor((4, count, self.units), Float32)
        weight = cute.make_rmem_tensor((count, self.units), Float32)
        for step in range_constexpr(every // count):
            for i in range_constexpr(count):
                for j in range_constexpr(self.units):
                    n = (step * count + i) * self.ROWS + which * self.SET + 2 * j + row
                    weight[i, j] = m.lse[n, r]
                    cute.autovec_copy(m.o[None, quad, n, unit], x[None, i, j])
            self.take(state, weight, x, count)
        self.close(state, m.sums, m.weights, which, lane)


def _fresh(q, ids):
    """Room for the partials of `ids`: attend writes what the merge will read of it."""
    G, D = q.shape[1] // ids.shape[1], q.shape[2]
    n = ids.numel() * G
    room = q.new_empty(n * (D + 1), dtype=torch.float32)
    return room[: n * D].view(*ids.shape, G, D), room[n * D :].view(*ids.shape, G)


def attend_missed(q, k, v, ids, position, seq_lens, scale, page_table, o, lse):
    """The op."""
    attend.launch(q, k, v, ids, position, seq_lens, page_table, o, lse, attend.MISSED, scale, "attend_missed")


def merge_repaired(position, o, lse, fresh_o, fresh_lse, out, out_lse, early=False):
    """The op."""
    position = position if position.numel() else None
    merge.launch(o, lse, (fresh_o, fresh_lse), position, 0, out, out_lse, early, "merge_repaired")


def repair(q, k, v, ids, position, o, lse, seq_lens, scale, page_table, out, out_lse):
    """The op: exact. Bit for bit merge(attend(ids)). What a CTA cannot hold is repaired by the two halves."""
    B, H, S, T, D = k.shape
    G, parts = q.shape[1] // H, ids.shape[2]
    if k.numel() == 0:  # a cache without slots: all ids are padding
        ids = position = ids[:, :, :0]
    if ids.numel() == 0:
        nothing = o.new_empty(B, H, 0, G, D), lse.new_empty(B, H, 0, G)
        merge_repaired(ids, o, lse, *nothing, out, out_lse, True)
        return
    if parts > max(Repair.CAPACITIES) or T > Repair.TILE or out.dtype != q.dtype:
        fresh = _fresh(q, ids)
        attend_missed(q, k, v, ids, position, seq_lens, scale, page_table, *fresh)
        merge_repaired(position, o, lse, *fresh, out, out_lse, True)
        return
    shape = attend.shape_of("repair", q, k, v, ids, position, seq_lens, page_table, o, lse, Repair.SERVES)
    templates.contiguous("repair", out=out, out_lse=out_lse)
    kernel = compiled(Repair, **shape, capacity=templates.round_up(parts, Repair.CAPACITIES[0]))
    kernel(q, k, v, ids, position, o, lse, seq_lens, scale, page_table, out, out_lse)


def repair_union(q, k, v, missed, o, lse, seq_lens, scale, page_table, out, out_lse):
    """The op: the paper's. The running state of P is one more part, the first."""
    B, H, _ = missed.shape
    fresh = _fresh(q, missed)
    attend.launch(q, k, v, missed, missed, seq_lens, page_table, *fresh, attend.FRESH, scale, "repair_union")
    state = o.view(B, H, 1, -1, q.shape[2]), lse.view(B, H, 1, -1)
    merge.launch(*state, fresh, None, 1, out, out_lse, True, "repair_union")
