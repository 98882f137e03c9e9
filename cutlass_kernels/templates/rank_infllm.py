# SPDX-License-Identifier: Apache-2.0
"""InfLLM-v2's block scores and the selection of A from them in one launch, a cluster of CTAs a row.

What two ops and three launches do (infllm_scores, select) is bound by its chain: a launch, a normaliser that all wait
for, scores through global memory, another launch. Here a CTA asks for its share of the windows at once, before it knows
how many are complete: it is cut from the capacity. Only the parts of the normaliser, and the counts of the selection,
cross CTAs, from shared memory to shared memory.

Rows whose shares do not fit (beyond 72K tokens at D = 128 with the published sizes), and more rows than the device has
room for at once, are left to the two ops. Measured, whole steps of GLM-4 (4 KV heads), serial / delta 1.5: 4.90 / 4.74
ms for 4.91 / 4.86 at 32K tokens; in clusters of 16, which hold 128K, 5.08 / 5.02 for 5.04 / 4.97: their shared memory
keeps attention over P off half of the SMs.
"""

from functools import cache
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.infllm_scores import InfllmScores, combine, complete, infllm_scores, over_warps
from cutlass_kernels.templates.select import Select, select
from cutlass_kernels.templates.topk import RowSelect, blocks_of, held, wide

HEADS = 16  # rows of the MMA; those beyond the group are empty
TILE = 8  # windows, its columns
CLUSTER, THREADS = 8, 256
SHARED = 227 * 1024  # bytes that a CTA can have
REACHED = 32  # windows that touch a block, at most: a thread has those of four blocks in registers


class RankInfllm(RowSelect):
    """score[b, h, n] as InfllmScores has it, A = the highest of a row, and A against P.

    Logits are mma with the query heads as rows and the windows as columns: the heads stay in registers as A fragments,
    windows come by ldmatrix. A thread's logits, of two heads, wait in registers for the normaliser. The sum over the
    group is one over lanes.

    A CTA owns `chunk` blocks, and has the windows that start in them and the `reach` ones in front. Of the coarse
    windows it has as many as another. Windows that are not complete may be anything: their logits are never looked at.

    Parameters: see RowSelect; owners: threads that own blocks; coarse: windows of k2 a CTA.
    """

    USES = (InfllmScores, Select)

    def __init__(
        self,
        dtype: str,
        head_dim: int,
        group: int,
        per_block: int,
        reach: int,
        cluster: int,
        per_thread: int,
        owners: int,
        coarse: int,
        vector: bool,
        threads: int = THREADS,
    ):
        super().__init__(cluster, per_thread, vector, threads, owners)
        self.dtype, self.D, self.G = common.DTYPES[dtype], head_dim, group
        self.per_block, self.reach = per_block, reach  # windows that start in a block; earlier ones that reach into it
        self.fine, self.coarse = self.chunk * per_block + reach, coarse  # windows of a CTA
        self.halves = 1 if group <= 8 else 2  # rows of a thread: head r, and r + 8

    def signature(self):
        """What __call__ is compiled for."""
        B, M, Hq, Hkv, W1, W2, K, P = common.syms(8)
        lists = common.fake(Int32, (B, Hkv, K), 4)
        return (
            common.fake(self.dtype, (B, Hq, self.D)),
            common.fake(self.dtype, (M, Hkv, W1, self.D)),
            common.fake(self.dtype, (M, Hkv, W2, self.D)),
            common.fake(Int32, (B,), 4),
            common.fake(Int32, (B, Hkv, P), 4),
            self.row_signature(B, Hkv),
            lists,
            lists,
            lists,
            common.fake(Int32, (B, Hkv, 2), 4),
            Float32(1.0),
            *(Int32(1) for _ in range(8)),
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        predicted: cute.Tensor,
        scores: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
        scale: Float32,
        block_size: Int32,
        window: Int32,
        stride: Int32,
        coarse_window: Int32,
        coarse_stride: Int32,
        exact: Int32,
        sink: Int32,
        local: Int32,
        stream: CUstream,
    ):
        """Launch a cluster a row; exact: 0 or 1; the others as for the op."""
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (HEADS, TILE, 16)))
        sizes = (window, stride, coarse_window, coarse_stride, exact)
        lists = (ids, position, missed, counts)
        base2 = scale * common.LOG2E
        self.kernel(q, k1, k2, seq_lens, predicted, scores, *lists, base2, block_size, *sizes, sink, local, mma).launch(
            grid=[self.cluster, k1.shape[1], q.shape[0]],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        predicted: cute.Tensor,
        scores: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
        base2: Float32,
        block_size: Int32,
        window: Int32,
        stride: Int32,
        coarse_window: Int32,
        coarse_stride: Int32,
        exact: Int32,
        sink: Int32,
        local: Int32,
        mma: cute.TiledMma,
    ):
        """CTA `rank` of the cluster of row (b, h)."""
        t, _, _ = cute.arch.thread_idx()
        rank, h, b = cute.arch.block_idx()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        m = self.memory(SmemAllocator(), True)
        if t == 0:  # setup() makes it known
            cute.arch.mbarrier_init(m.arrived.iterator, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(m.arrived.iterator, 8 * HEADS * self.cluster)
        self.setup(m, True)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first = rank * (self.chunk * self.per_block) - self.reach  # of the fine windows; the first may not exist
        self.ask(q, k1, k2, b, h, rank, first, m)
        tokens = seq_lens[b]
        early = self.early(predicted, b, h)
        count = complete(tokens, window, stride, k1.shape[2])
        coarse = complete(tokens, coarse_window, coarse_stride, k2.shape[2])
        by_fine = exact != 0 or coarse == 0
        self.ready()
        self.note(early, predicted, b, h, rank, m)

        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        heads = self.load_heads(m.q, lane)
        if not by_fine:
            self.part_by_coarse(coarse, mma, heads, base2, rank, m)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        x, at = self.logits(m.k1, self.fine, mma, heads, lane, wid)
        if by_fine:
            self.part(x, at, Int32(self.reach), count - first, self.fine, base2, rank, m)
        lse = self.normaliser(m, lane)
        self.weigh(x, at, -first, count - first, lse, base2, m.weights, lane)
        cute.arch.sync_threads()

        first = rank * self.chunk + t * self.E
        values = self.highest(m.weights, t)
        self.store(values, scores, b, h, first, t)
        n, end = blocks_of(tokens, block_size), cutlass.min(scores.shape[2], (rank + 1) * self.chunk)
        key = self.keys(values, first, n, end, ids.shape[2], sink, local)
        out = SimpleNamespace(ids=ids, position=position, missed=missed, counts=counts)
        self.choose(key, cutlass.min(n, scores.shape[2]), first, b, h, rank, m, out, True)

    # ------------------------------------------------------------------------------------------------ shared memory
    def memory(self, smem, compare):
        """Shared memory from an allocator."""
        m = super().memory(smem, compare)
        m.q = self.room(smem, HEADS)
        m.k1 = self.room(smem, self.fine)
        m.k2 = self.room(smem, self.coarse) if self.coarse else None
        m.weights = smem.allocate_tensor(Float32, cute.make_layout((tiles_of(self.fine) * TILE,)), 16)
        m.own = smem.allocate_tensor(Float32, cute.make_layout((HEADS, 2, self.warps), stride=(2, 1, 2 * HEADS)), 16)
        m.parts = smem.allocate_tensor(Float32, cute.make_layout((2, HEADS, self.cluster)), 16)
        m.arrived = smem.allocate_tensor(Int64, cute.make_layout((1,)), 8)
        return m

    def room(self, smem, rows):
        """Whole tiles of rows: (8, place of 16 bytes, 128 bytes, row).

        Piece p of 128 bytes is at place p ^ row % 8: what ldmatrix reads at once, a piece of 8 rows, is in all banks.
        """
        shape = (8, 8, self.D // 64, tiles_of(rows) * TILE)
        return smem.allocate_tensor(self.dtype, cute.make_layout(shape), 128)

    @cute.jit
    def ask(self, q, k1, k2, b, h, rank, first, m):
        """Start the copies of all that is read: queries and coarse windows, then fine ones, as a group each."""
        t, _, _ = cute.arch.thread_idx()
        of = cutlass.min(b, k1.shape[0] - 1)  # one sequence's, or one each
        self.fetch(q[b, None, None], h * self.G, self.G, q.shape[1], m.q)
        self.clear(m.q, t)
        if const_expr(self.coarse > 0):
            self.fetch(k2[of, h, None, None], rank * self.coarse, self.coarse, k2.shape[2], m.k2)
        cute.arch.cp_async_commit_group()
        self.fetch(k1[of, h, None, None], first, self.fine, k1.shape[2], m.k1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, x, first, rows: cutlass.Constexpr, capacity, room):
        """Start the copies of rows [first, first + rows) of x, those that exist, to the rows of a room."""
        t, _, _ = cute.arch.thread_idx()
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
        )
        pieces = const_expr(self.D // 8)
        step = const_expr(self.threads // pieces)  # rows at a time, a multiple of 8
        piece, row = t % pieces, t // pieces
        end = Uint32(cutlass.min(capacity, first + rows))
        source = cute.local_tile(x[first + row, None], (8,), (piece,)).iterator
        to = room[None, piece % 8 ^ row % 8, piece // 8, row].iterator
        for i in range_constexpr(-(-rows // step)):
            if Uint32(first + row + i * step) < end:  # which one below 0 is not
                further = const_expr(i * step * self.D)
                eight = cute.make_layout((8,))
                cute.copy(atom, cute.make_tensor(source + further, eight), cute.make_tensor(to + further, eight))

    @cute.jit
    def clear(self, room, t):
        """Zero the rows of heads beyond the group."""
        pieces = const_expr(self.D // 8)
        zero = cute.make_rmem_tensor((8,), self.dtype)
        zero.fill(0)
        for i in range_constexpr(-(-HEADS * pieces // self.threads)):
            at = t + i * self.threads
            if at >= self.G * pieces and at < HEADS * pieces:
                cute.autovec_copy(zero, room[None, at % 8, at % pieces // 8, at // pieces])

    # ------------------------------------------------------------------------------------------------ logits
    @cute.jit
    def load_heads(self, room, lane):
        """The group's queries as A fragments."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        fragment = cute.make_rmem_tensor(cute.make_layout((8, self.D // 16)), self.dtype)
        for k in range_constexpr(self.D // 16):
            piece = 2 * k % 8 + lane // 16
            cute.copy(atom, room[None, piece ^ lane % 8, k // 4, lane % 16], fragment[None, k])
        shape = ((2, 2, 2), 1, self.D // 16)
        return cute.make_tensor(fragment.iterator, cute.make_layout(shape, stride=((1, 2, 4), 0, 8)))

    @cute.jit
    def logits(self, room, rows: cutlass.Constexpr, mma, heads, lane, wid):
        """Unscaled logits of this warp's tiles, and the first of their windows.

        (2, 2, tiles): column of a pair, row half, tile; heads row, row + 8, windows 2 quad, 2 quad + 1. Tiles of the
        last warps are those of others too, rather than none.
        """
        tiles = const_expr(share_of(rows, self.warps))
        first = cutlass.min(wid * tiles, tiles_of(rows) - tiles) * TILE
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        acc = cute.make_rmem_tensor(((2, 2), 1, 1, tiles), Float32)
        acc.fill(0.0)
        for k in range_constexpr(self.D // 32):
            piece = 4 * k % 8 + lane // 8
            for j in range_constexpr(tiles):
                fragment = cute.make_rmem_tensor((8,), self.dtype)
                cute.copy(atom, room[None, piece ^ lane % 8, k // 2, first + j * TILE + lane % 8], fragment)
                keys = cute.make_tensor(fragment.iterator, cute.make_layout(((2, 2), 1, 2), stride=((1, 2), 0, 4)))
                out = acc[None, None, None, j]
                for e in range_constexpr(2):
                    cute.gemm(mma, out, heads[None, None, 2 * k + e], keys[None, None, e], out)
        return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, tiles))), first

    # ------------------------------------------------------------------------------------------------ normaliser
    @cute.jit
    def part_by_coarse(self, count, mma, heads, base2, rank, m):
        """The part of this CTA's coarse windows."""
        t, _, _ = cute.arch.thread_idx()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        if const_expr(self.coarse > 0):
            x, at = self.logits(m.k2, self.coarse, mma, heads, lane, wid)
            self.part(x, at, Int32(0), count - rank * self.coarse, self.coarse, base2, rank, m)

    @cute.jit
    def part(self, x, at, low, high, rows: cutlass.Constexpr, base2, rank, m):
        """(maximum, sum) of each head over this CTA's windows low ... high - 1 of `rows`, to all CTAs of the row."""
        t, _, _ = cute.arch.thread_idx()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        tiles = const_expr(share_of(rows, self.warps))
        low = cutlass.max(low, wid * (tiles * TILE)) - at - lane % 4 * 2  # not what another warp has counted
        high = cutlass.min(high, rows) - at - lane % 4 * 2
        own = m.own
        value = cute.make_rmem_tensor((2, tiles), Float32)
        for half in range_constexpr(self.halves):
            top, total = -Float32.inf, Float32(0.0)
            for j in range_constexpr(tiles):
                for e in range_constexpr(2):
                    inside = TILE * j + e >= low and TILE * j + e < high
                    value[e, j] = x[e, half, j] * base2 if inside else -Float32.inf
                    top = cute.arch.fmax(top, value[e, j])
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            base = top if top > -Float32.inf else Float32(0.0)
            for j in range_constexpr(tiles):
                for e in range_constexpr(2):
                    total = total + cute.arch.exp2(value[e, j] - base)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=4)
            if lane % 4 == 0:
                own[lane // 4 + 8 * half, 0, wid] = top
                own[lane // 4 + 8 * half, 1, wid] = total
        cute.arch.sync_threads()
        head, to = t % HEADS, t // HEADS
        if to < self.cluster:
            top, total = over_warps(own, head, self.warps)
            pair = (top.bitcast(Int32), total.bitcast(Int32))
            cute.arch.store_async_dsmem(m.parts[None, head, rank].iterator, pair, m.arrived.iterator, to)

    @cute.jit
    def normaliser(self, m, lane):
        """LSE of this thread's heads, base 2; +inf beyond the group, so that those heads weigh 0."""
        cute.arch.mbarrier_wait(m.arrived.iterator, 0)
        head, each = lane % HEADS, const_expr(self.cluster // 2)
        parts = cute.make_rmem_tensor((2, each), Float32)
        top, total = -Float32.inf, Float32(0.0)
        for i in range_constexpr(each):
            cute.autovec_copy(m.parts[None, head, lane // HEADS * each + i], parts[None, i])
            top = cute.arch.fmax(top, parts[0, i])
        base = top if top > -Float32.inf else Float32(0.0)
        for i in range_constexpr(each):
            total = total + parts[1, i] * cute.arch.exp2(parts[0, i] - base)
        other = cute.arch.shuffle_sync_bfly(top, offset=HEADS)
        added = cute.arch.shuffle_sync_bfly(total, offset=HEADS)
        top, total = combine(top, total, other, added)
        value = top + cute.math.log2(total) if total > 0.0 else Float32(0.0)
        value = value if head < self.G else Float32.inf
        lse = cute.make_rmem_tensor((2,), Float32)
        for half in range_constexpr(2):
            lse[half] = cute.arch.shuffle_sync(value, lane // 4 + 8 * half)
        return lse

    # ------------------------------------------------------------------------------------------------ scores
    @cute.jit
    def weigh(self, x, at, low, high, lse, base2, weights, lane):
        """Group sums of this warp's windows; -inf of those that are not low ... high - 1."""
        tiles = const_expr(cute.size(x, mode=[2]))
        value = cute.make_rmem_tensor((2, tiles), Float32)
        for j in range_constexpr(tiles):
            for e in range_constexpr(2):
                value[e, j] = cute.arch.exp2(x[e, 0, j] * base2 - lse[0])
                if const_expr(self.halves == 2):
                    value[e, j] = value[e, j] + cute.arch.exp2(x[e, 1, j] * base2 - lse[1])
        for i in range_constexpr(len(runs(tiles))):
            start, n = const_expr(runs(tiles)[i])
            run = cute.make_tensor(value.iterator + 2 * start, cute.make_layout((2 * n,)))
            weight, place = self.over_rows(run, n, lane)
            w = at + TILE * (start + place // 2) + lane % 4 * 2 + place % 2
            if lane // 4 % (4 // n) == 0:
                weights[w] = weight if w >= low and w < high else -Float32.inf

    @cute.jit
    def over_rows(self, run, n: cutlass.Constexpr, lane):
        """One of 2 n values, summed over the lanes of its column, and which one.

        While a lane has two values or more, it gives half of them away: the sums are spread over the lanes. The order
        of a sum is the same for all.
        """
        for step in range_constexpr(3):
            offset, left = const_expr(16 >> step), const_expr((2 * n) >> step)
            if const_expr(left > 1):
                upper = (lane & offset) != 0
                for i in range_constexpr(left // 2):
                    given = run[i] if upper else run[i + left // 2]
                    kept = run[i + left // 2] if upper else run[i]
                    run[i] = kept + cute.arch.shuffle_sync_bfly(given, offset=offset)
            else:
                run[0] = run[0] + cute.arch.shuffle_sync_bfly(run[0], offset=offset)
        return run[0], lane // (16 // n)

    @cute.jit
    def highest(self, weights, t):
        """The scores of this thread's blocks: of four, from the windows that touch one of them."""
        out = cute.make_rmem_tensor((4, self.E // 4), Float32)
        out.fill(-Float32.inf)
        span = const_expr(4 * self.per_block)
        touching = cute.make_rmem_tensor((span + self.reach,), Float32)
        body = cute.make_tensor(touching.iterator, cute.make_layout((span,)))
        if t < self.owners:
            for i in range_constexpr(self.E // 4):
                start = t * (self.E // 4) + i
                cute.autovec_copy(cute.local_tile(weights, (span,), (start,)), body)
                for w in range_constexpr(self.reach):
                    touching[span + w] = weights[start * span + span + w]
                for e in range_constexpr(4):
                    best = -Float32.inf
                    for w in range_constexpr(self.per_block + self.reach):
                        best = cute.arch.fmax(best, touching[e * self.per_block + w])
                    out[e, i] = best
        return out

    @cute.jit
    def store(self, values, scores, b, h, first, t):
        """This thread's scores, for what learns from them."""
        if t < self.owners:
            for i in range_constexpr(self.E // 4):
                if const_expr(self.vector):
                    if first + 4 * i < scores.shape[2]:
                        to = cute.local_tile(scores[b, h, None], (4,), (first // 4 + i,))
                        cute.autovec_copy(values[None, i], to)
                else:
                    for e in range_constexpr(4):
                        if first + 4 * i + e < scores.shape[2]:
                            scores[b, h, first + 4 * i + e] = values[e, i]


def tiles_of(rows: int) -> int:
    """Tiles that hold so many windows."""
    return -(-rows // TILE)


def share_of(rows: int, warps: int) -> int:
    """Tiles of a warp."""
    return -(-tiles_of(rows) // warps)


def runs(tiles: int) -> list[tuple[int, int]]:
    """(first, number) of tiles whose sums are made together: fours, then two, then one."""
    out, start = [], 0
    for n in (4, 2, 1):
        while tiles - start >= n:
            out.append((start, n))
            start += n
    return out


def bytes_of(kernel: RankInfllm) -> int:
    """Shared memory of a CTA, at least; alignment is worth less than 512 bytes."""
    C, warps = kernel.cluster, kernel.warps
    rows = sum(tiles_of(n) * TILE for n in (HEADS, kernel.fine, kernel.coarse))
    own = rows * kernel.D * 2 + 4 * tiles_of(kernel.fine) * TILE + 8 * HEADS * (warps + C) + 8
    return own + kernel.bytes(True) + 512


@cache
def shape_of(
    N: int, W1: int, W2: int, head_dim: int, group: int, per_block: int, reach: int, rows: int, processors: int
) -> dict[str, int] | None:
    """Cluster, owners, blocks a thread and coarse windows a CTA; None where the two ops are to do it."""
    if per_block + reach > REACHED or not 0 < W1 <= N * per_block:
        return None
    per_thread = held(-(-N // CLUSTER), THREADS)
    owners, coarse = -(-N // (CLUSTER * per_thread)), -(-W2 // CLUSTER)
    shape = {"cluster": CLUSTER, "per_thread": per_thread, "owners": owners, "coarse": coarse}
    kernel = RankInfllm("bfloat16", head_dim, group, per_block, reach, **shape, vector=False)
    return shape if rows * CLUSTER <= processors and bytes_of(kernel) <= SHARED else None


def rank_infllm(
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
    sink: int,
    local: int,
    predicted: Tensor,
    scores: Tensor,
    ids: Tensor,
    position: Tensor,
    missed: Tensor,
    counts: Tensor,
) -> None:
    """The op rank_infllm for CUDA tensors."""
    B, (_, H, W1, D), W2, N = q.shape[0], k1.shape, k2.shape[2], scores.shape[2]
    group, per_block, reach = q.shape[1] // H, block_size // stride, window // stride - 1
    asked = {"head size": D, "group size": group, "dtype": q.dtype}
    templates.serve("rank_infllm", q, InfllmScores.SERVES, asked)
    templates.serve("rank_infllm", q, Select.SERVES, {"number of blocks": N})
    templates.door("rank_infllm", q=q, k1=k1, k2=k2)
    lists, sizes = (ids, position, missed, counts), (window, stride, coarse_window, coarse_stride)
    shape = shape_of(N, W1, W2, D, group, per_block, reach, B * H, templates.processors(q.device))
    if shape is None or not counts.numel():
        infllm_scores(q, k1, k2, seq_lens, scale, block_size, *sizes, exact, scores)
        select(scores, seq_lens, block_size, sink, local, predicted, *lists)
        return
    params = {"dtype": templates.name(q.dtype), "head_dim": D, "group": group, "per_block": per_block, "reach": reach}
    kernel = compiled(RankInfllm, **params, **shape, vector=wide(scores))
    rule = (scale, block_size, *sizes, int(exact), sink, local)
    kernel(q, k1, k2, seq_lens, predicted, scores, *lists, *rule)
