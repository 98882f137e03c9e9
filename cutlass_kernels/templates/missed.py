# SPDX-License-Identifier: Apache-2.0
"""Missed: partials of the missed blocks of A in the columns of one CTA, left in its shared memory.

A warp makes a tile alone, so that nothing in it waits for another: its 16 tokens at a time depend on nothing but the
maximum of their block. Warp w takes every slots-th tile of missed blocks, from the w-th on, and loads the next one when
it has read this one. The arithmetic is Tile's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from cutlass_kernels.templates.tile import Tile


class Missed(Tile):
    """See the module. Parameters: those of Tile (blocks of 64 tokens at most); heads, cols, capacity, slots.

    m, in shared memory: K, V: `slots` tiles; full: an mbarrier each; missed: index in A, slot, live tokens of a block;
    o, lse: the parts of A.
    """

    def __init__(
        self, dtype: str, head_dim: int, group: int, block: int, paged: bool,
        heads: int, cols: int, capacity: int, slots: int,
    ):  # fmt: skip
        super().__init__(dtype, head_dim, group, block, paged)
        self.heads, self.cols, self.capacity, self.slots = heads, cols, capacity, slots
        self.quads = cols // 4  # 16 bytes of a head's columns
        self.halves, self.nt = 1, cols // 8  # of the rows of the MMA; a warp makes all columns

    @cute.jit
    def search(self, ids, position, table, slots, length, b, h, m, wid, lane):
        """A warp looks for the missed blocks that hold tokens, notes those of its own tiles, and returns how many."""
        steps = const_expr(self.capacity // 32)
        blk = cute.make_rmem_tensor((steps,), Int32)
        known = cute.make_rmem_tensor((steps,), Int32)
        live = cute.make_rmem_tensor((steps,), Int32)
        slot = cute.make_rmem_tensor((steps,), Int32)
        last = ids.shape[2] - 1
        for i in range_constexpr(steps):
            n = cutlass.min(i * 32 + lane, last)
            blk[i], known[i] = ids[b, h, n], position[b, h, n]
        for i in range_constexpr(steps):
            wanted = known[i] < 0 and i * 32 + lane <= last
            slot[i], live[i] = self.locate(blk[i] if wanted else Int32(-1), table, slots, length, b, h)
        count, missed = Int32(0), m.missed
        for i in range_constexpr(steps):
            votes = cute.arch.vote_ballot_sync(live[i] > 0)
            at = count + cute.arch.popc(votes & ((Int32(1) << lane) - 1))
            if live[i] > 0 and at // self.per % self.slots == wid:
                missed[0, at], missed[1, at], missed[2, at] = i * 32 + lane, slot[i], live[i]
            count = count + cute.arch.popc(votes)
        if lane < 4 and (count + lane) // self.per % self.slots == wid:  # the rest of a tile
            missed[2, count + lane] = Int32(0)
        cute.arch.sync_warp()
        return count

    @cute.jit
    def ask(self, source, m, n, count, slot, part, lane):
        """A warp starts the copies of the n-th tile of `count` missed blocks, if there are so many."""
        if n * self.per < count:
            at = n * self.per + lane % self.per
            sK, sV = m.K[None, None, None, slot], m.V[None, None, None, slot]
            self.fetch(source, sK, sV, m.full + slot, m.missed[1, at], m.missed[2, at], 0, part, lane)

    @cute.jit
    def make(self, m, n, slot, qf, scale, mma, lane):
        """A warp makes the parts of the n-th tile."""
        sK, sV = m.K[None, None, None, slot], m.V[None, None, None, slot]
        live = cute.make_rmem_tensor((self.per,), Int32)
        whole = n >= 0
        for s in range_constexpr(self.per):
            live[s] = m.missed[2, n * self.per + s]
            whole = whole and (live[s] >= self.rows or live[s] == 0)  # what has no tokens is thrown away
        if not whole:
            for w in range_constexpr(self.WARPS):
                s, first = w // self.share, w % self.share * 16
                self.blank(
                    cute.local_tile(sV[None, None, s], (16, self.cols), (w % self.share, 0)), live[s] - first, lane
                )
        words = cute.make_rmem_tensor((4, 2, self.WARPS), Uint32)
        ml = cute.make_rmem_tensor((2, self.share, self.per), Float32)
        for w in range_constexpr(self.WARPS):  # which warp of attend makes these 16 tokens
            s, at = w // self.share, w % self.share
            acc, top, total = self.scores(sK, live[s], at * 16, qf, scale, mma, w, lane)
            ml[0, at, s], ml[1, at, s] = top[0], total[0]
            split = self.split(acc)
            for x in range_constexpr(2):
                for i in range_constexpr(4):
                    words[i, x, w] = split[i, x]
        state = (
            cute.make_rmem_tensor((2, 1), Float32),
            cute.make_rmem_tensor((2, 1), Float32),
            cute.make_rmem_tensor((2, 2, self.nt, 1), Float32),
        )
        factor = cute.make_rmem_tensor((self.share,), Float32)
        for s in range_constexpr(self.per):
            M, L, out = state
            M[0, 0], L[0, 0] = self.weights(ml[None, None, s], factor)
            out.fill(0.0)
            for at in range_constexpr(self.share):
                p = words[None, None, s * self.share + at]
                x = self.weigh(p, sV[None, None, s], self.cols, 0, at, mma, lane)
                for j in range_constexpr(self.nt):
                    for e in range_constexpr(2):
                        out[e, 0, j, 0] = cute.math.fma(factor[at], x[e, 0, j], out[e, 0, j, 0])
            self.keep(m, state, m.missed[0, n * self.per + s], live[s], lane)

    @cute.jit
    def keep(self, m, state, n, live, lane):
        """Normalise a block, and put it where the merge looks for part n."""
        r, c = lane // 4, lane % 4
        log = cute.make_rmem_tensor((2,), Float32)
        x = cute.make_rmem_tensor((2, 2, self.nt), Float32)
        self.normalise(state, 0, log, x)
        weight = m.lse
        if live > 0 and r < self.heads:
            for j in range_constexpr(self.nt):
                quad = r * self.quads + 2 * j + c // 2
                to = m.o[None, quad % 4, n, quad // 4]
                cute.autovec_copy(x[None, 0, j], cute.local_tile(to, (2,), (c % 2,)))
            if c == 0:
                weight[n, r] = log[0]
