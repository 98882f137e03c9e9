# SPDX-License-Identifier: Apache-2.0
"""Tree: what every kernel that merges parts shares, so that a merge has the same bits in all of them.

Part n belongs to row n % ROWS. The SET neighbouring rows of a set have a running maximum in common, which moves once
every FLIGHT parts of a row; each row weighs and adds its own parts. In the end the rows of a set are added, those 4
apart first, then those 2 apart, then neighbours, and then the sets, in their order. Where a part lies, and which thread
holds a row, changes no bit of the result, nor do empty parts (lse = -inf), whatever their o. Sums of products are
written as fma, and products that are added later as fma with 0: the compiler must not choose which product is rounded.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, range_constexpr

from cutlass_kernels.templates import common


class Tree:
    """See the module. 256 threads make `units` times COLS columns: a warp has one set of each unit."""

    COLS = 16
    LANES = COLS // 4  # threads that read a part's columns, 16 bytes each
    ROWS = 64
    SET = 8
    SETS = ROWS // SET
    FLIGHT = 4
    units = 1  # 1: a thread has one row of a set. 4: every second one, that of its own `row`, and 2, 4 and 6 behind it

    @cute.jit
    def place(self, lane):
        """What a lane has: which 16 bytes, which row of the set, which unit."""
        return lane % self.LANES, lane // self.LANES % (self.SET // self.units), lane // (32 // self.units)

    @cute.jit
    def start(self):
        """No parts yet: maximum (1,), and of each row of the thread the sum (units,) and 4 columns (4, units)."""
        top = cute.make_rmem_tensor((1,), Float32)
        total = cute.make_rmem_tensor((self.units,), Float32)
        acc = cute.make_rmem_tensor((4, self.units), Float32)
        top.fill(-Float32.inf)
        total.fill(0.0)
        acc.fill(0.0)
        return top, total, acc

    @cute.jit
    def take(self, state, weight, x, count: cutlass.Constexpr):
        """Add `count` parts a row, FLIGHT at most: natural lse weight (count, units), columns x (4, count, units)."""
        top, total, acc = state
        highest = top[0]
        for i in range_constexpr(count):
            for j in range_constexpr(self.units):
                highest = cute.arch.fmax(highest, weight[i, j])
        for step in range_constexpr(3 if self.units == 1 else 1):
            highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=self.LANES << step))
        base = highest if highest > -Float32.inf else Float32(0.0)
        keep = cute.arch.exp2((top[0] - base) * common.LOG2E)
        top[0] = highest
        for j in range_constexpr(self.units):
            total[j] = cute.math.fma(total[j], keep, Float32(0.0))
            for e in range_constexpr(4):
                acc[e, j] = acc[e, j] * keep  # the addend of what follows: nothing to fuse it with
            for i in range_constexpr(count):
                w = cute.arch.exp2((weight[i, j] - base) * common.LOG2E)
                total[j] = total[j] + w
                for e in range_constexpr(4):  # an empty part may hold anything, NaN too
                    acc[e, j] = acc[e, j] if w == 0.0 else cute.math.fma(w, x[e, i, j], acc[e, j])

    @cute.jit
    def close(self, state, sO, sML, which, lane):
        """Add the rows of set `which`, into sO (COLS, units, SETS) and sML (2, units, SETS)."""
        top, total, acc = state
        quad, row, unit = self.place(lane)
        if const_expr(self.units == 1):  # each step halves the columns of a thread, as long as it has two
            all_ = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=16)
            all_ = all_ + cute.arch.shuffle_sync_bfly(all_, offset=8)
            a = self.half(acc[0, 0], acc[2, 0], lane, 16)
            b = self.half(acc[1, 0], acc[3, 0], lane, 16)
            value = self.half(a, b, lane, 8)
            value = value + cute.arch.shuffle_sync_bfly(value, offset=4)
            sO[4 * quad + row // 4 * 2 + row // 2 % 2, unit, which] = value  # two threads, the same value
        else:
            all_ = (total[0] + total[2]) + (total[1] + total[3])
            for e in range_constexpr(4):
                acc[e, 0] = (acc[e, 0] + acc[e, 2]) + (acc[e, 1] + acc[e, 3])
            pair = cute.make_rmem_tensor((2,), Float32)
            pair[0] = self.half(acc[0, 0], acc[2, 0], lane, 4)
            pair[1] = self.half(acc[1, 0], acc[3, 0], lane, 4)
            cute.autovec_copy(pair, cute.local_tile(sO[None, unit, which], (2,), (2 * quad + row,)))
        all_ = all_ + cute.arch.shuffle_sync_bfly(all_, offset=4)
        if quad + row == 0:
            sML[0, unit, which] = top[0]
            sML[1, unit, which] = all_

    @cute.jit
    def half(self, low, high, lane, offset: cutlass.Constexpr):
        """The sum of two rows of one of two columns: the row whose bit is set gets the high one."""
        upper = lane // offset % 2 == 1
        mine, other = high if upper else low, low if upper else high
        return mine + cute.arch.shuffle_sync_bfly(other, offset=offset)

    @cute.jit
    def end(self, sO, sML, column, unit):
        """Attention over all parts: the value of a column, and the lse."""
        top = sML[0, unit, 0]
        for i in range_constexpr(1, self.SETS):
            top = cute.arch.fmax(top, sML[0, unit, i])
        base = top if top > -Float32.inf else Float32(0.0)
        value, total = Float32(0.0), Float32(0.0)
        for i in range_constexpr(self.SETS):
            keep = cute.arch.exp2((sML[0, unit, i] - base) * common.LOG2E)
            total = cute.math.fma(keep, sML[1, unit, i], total)
            value = cute.math.fma(keep, sO[column, unit, i], value)
        empty = total == 0.0  # not of NaN: a wrong partial must show, not weigh nothing
        value = Float32(0.0) if empty else value * cute.arch.rcp_approx(total)  # of a sum with a 1 in it
        return value, -Float32.inf if empty else cute.math.fma(cute.math.log2(total), Float32(common.LN2), base)
