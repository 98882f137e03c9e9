# SPDX-License-Identifier: Apache-2.0
"""speculate: the selection of A, and beside it attention over P, in one launch.

The first CTAs are those of select, one a row of scores; the others are those of attend, one a tile of P. The latter do
not wait for the scores in front, but read K and V beside them: whatever they need, the kernel in front has waited for
before it let this one start. (Measured, whole steps of GLM-4, delta 1.5: 4.92 ms for 4.97 with two launches where rows
have 544 blocks; 5.15 for 5.12 and 5.22 for 5.18 where they have 2080 and 2176, of which 128 threads have too many. To
have P in the L2 by then cost .4 %.)

Longer rows, and blocks of more than a tile, are two launches: attention starts with the selection.
"""

from types import SimpleNamespace

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cutlass_kernels.compile import compiled
from cutlass_kernels.templates.attend import AHEAD, Attend, launch, shape_of
from cutlass_kernels.templates.common import CARVEOUT, Overlay, fake, syms
from cutlass_kernels.templates.select import Select, select
from cutlass_kernels.templates.topk import held, wide

MOST = 1024  # blocks of a row that one CTA of 128 threads selects from


class Speculate:
    """See the module. Parameters: those of Attend, for blocks of one tile at most, and of RowSelect."""

    USES = (Attend, Select)

    def __init__(self, dtype: str, head_dim: int, group: int, block: int, paged: bool, per_thread: int, vector: bool):
        self.attend = Attend(dtype, head_dim, group, block, paged)
        self.threads = self.attend.WARPS * 32
        self.select = Select(1, per_thread, vector, self.threads)

    def signature(self):
        """Fake arguments, see the templates package."""
        a, B, H, K, P = self.attend, *syms(4)
        Hq, S, C = syms(3)
        return (
            *self.select.arguments(B, H, K, P),
            fake(a.dtype, (B, Hq, a.D)),
            fake(a.dtype, (B, H, S, a.T, a.D)),
            fake(a.dtype, (B, H, S, a.T, a.D)),
            fake(Int32, (B, H, C), 4) if a.paged else None,
            fake(Float32, (B, H, P, a.G, a.D)),
            fake(Float32, (B, H, P, a.G), 4),
            Float32(1.0),
        )

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        predicted: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        table,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        stream: CUstream,
    ):
        """Launch; the arguments are those of the two ops."""
        a = self.attend
        tma_k, gk, room = a.source(k, a.D, 1)
        tma_v, gv, _ = a.source(v, a.D, 1)
        tiles = cute.ceil_div(predicted.shape[2], a.per)
        x = (q, tma_k, gk, tma_v, gv, table, o, lse, scale, a.plan(), room, k.shape[2], tiles)
        self.kernel(scores, seq_lens, block_size, sink, local, predicted, ids, position, missed, counts, *x).launch(
            grid=[ids.shape[0] * ids.shape[1] * (1 + tiles), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=a.crowd,
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        predicted: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
        q: cute.Tensor,
        tma_k: cute.CopyAtom,
        k: cute.Tensor,
        tma_v: cute.CopyAtom,
        v: cute.Tensor,
        table,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        mma: cute.TiledMma,
        room: cute.ComposedLayout,
        slots: Int32,
        tiles: Int32,
    ):
        """A CTA of the one or of the other."""
        i, _, _ = cute.arch.block_idx()
        rows = ids.shape[0] * ids.shape[1]
        select_memory, attend_memory = self.memory(room)
        chosen = SimpleNamespace(ids=ids, position=position, missed=missed, counts=counts)
        x = SimpleNamespace(
            q=q, ids=predicted, position=predicted, seq_lens=seq_lens, table=table, o=o, lse=lse, slots=slots
        )
        given = (scores, seq_lens, block_size, sink, local, predicted, chosen)
        source = (tma_k, k, tma_v, v)
        if i < rows:
            self.choose(given, i, select_memory)
        else:
            self.ahead(x, source, scale, mma, i - rows, tiles, attend_memory)

    def memory(self, room):
        """The same shared memory for both."""
        sizes = Overlay(), Overlay()
        self.select.memory(sizes[0], True)
        self.attend.memory(sizes[1], room)
        assert all(x.used for x in sizes)  # or the allocator has found another way than through Overlay
        base = SmemAllocator().allocate(max(x.used for x in sizes), 1024)
        return self.select.memory(Overlay(base), True), self.attend.memory(Overlay(base), room)

    @cute.jit
    def choose(self, given, i, m):
        """Row i."""
        H = given[0].shape[1]
        self.select.row(*given, Int32(0), i % H, i // H, m)

    @cute.jit
    def ahead(self, x, source, scale, mma, i, tiles, m):
        """Tile i of all rows'."""
        row, H = i // tiles, x.ids.shape[1]
        self.attend.cta(x, source, Int32(AHEAD), scale, mma, i % tiles, row % H, row // H, m)


def speculate(
    q, k, v, predicted, scores, seq_lens, scale, sink, local, page_table, ids, position, missed, counts, o, lse
):
    """The op."""
    T, N, chosen = k.shape[3], scores.shape[2], (ids, position, missed, counts)
    if T > Attend.TILE or N > MOST or 0 in (predicted.numel(), k.numel(), ids.numel()):
        select(scores, seq_lens, T, sink, local, predicted, *chosen)
        launch(q, k, v, predicted, predicted, seq_lens, page_table, o, lse, AHEAD, scale, "speculate")
        return
    shape = shape_of("speculate", q, k, v, predicted, predicted, seq_lens, page_table, o, lse)
    kernel = compiled(Speculate, **shape, per_thread=held(N, Attend.WARPS * 32), vector=wide(scores))
    kernel(scores, seq_lens, T, sink, local, predicted, *chosen, q, k, v, page_table, o, lse, scale)
