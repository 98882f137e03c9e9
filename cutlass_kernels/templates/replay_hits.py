# SPDX-License-Identifier: Apache-2.0
"""Calibration: candidates of the predictor replayed over a window of scores, level and trend in registers throughout.

A first launch finds A of every row. In the second a CTA takes one KV head of one layer and a few candidates: those of
one alpha and beta share level and trend, and differ in what they predict from them.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import reference, templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.predict import Predict, add, mul
from cutlass_kernels.templates.topk import blocks_of

GROUP = 4  # candidates of a CTA
MOST = 32  # blocks of a thread: bits of a mask
WARPS = (1, 2, 3, 4, 6, 8, 12, 16)
CAPACITY = WARPS[-1] * 32 * MOST
CLEVER = 16  # guesses of a threshold before bisection takes over
LOWEST, CUT, STEP, FLAT = range(4)  # what the first launch notes of a row


class ReplayHits:
    """Thread t of warp w owns the blocks 32 (w per_lane + i) + t % 32.

    P is what lies above a threshold, and that is found by counting: the threshold of the row before is nearly right,
    and the false position between two counts soon is; bisection of the bits ends what does not. Blocks tied at the
    rank go by their ids, which are bisected, too.
    """

    SERVES = {"number of blocks": range(CAPACITY + 1)}
    USES = (Predict,)

    def __init__(self, warps: int, per_lane: int):
        self.S, self.E = warps, per_lane

    def signature(self):
        """What __call__ is compiled for."""
        L, W, H, N, C = common.syms(5)
        f32 = lambda *shape: common.fake(Float32, shape, 4)
        i32 = lambda *shape: common.fake(Int32, shape, 4)
        inputs = f32(L, W, H, N), i32(W), f32(L, C, 3), i32(C)
        work = i32(L, W, H, 32 * self.S), i32(L, W, H, self.S), f32(L, W, H, 4)
        results = i32(L, W, H), f32(L, W, H), i32(L, C, W, H), f32(L, C, W, H)
        return *inputs, *(Int32(1),) * 5, *work, *results

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        theta: cute.Tensor,
        widths: cute.Tensor,
        block_size: Int32,
        top_k: Int32,
        sink: Int32,
        local: Int32,
        dense_len: Int32,
        marks: cute.Tensor,
        whole: cute.Tensor,
        notes: cute.Tensor,
        size: cute.Tensor,
        total: cute.Tensor,
        hits: cute.Tensor,
        weight: cute.Tensor,
        stream: CUstream,
    ):
        """The arguments are those of the op, but for what goes between the launches.

        marks: [L, W, H, threads], bits of A. whole: [L, W, H, warps], bits of a warp's rows of 32 blocks that have
        finite scores only. notes: [L, W, H, 4].
        """
        L, W, H, _ = scores.shape
        rule = (block_size, top_k, sink, local, dense_len)
        self.rows(scores, seq_lens, *rule, marks, whole, notes, size, total).launch(
            grid=[W, H, L], block=[32 * self.S, 1, 1], stream=stream
        )
        groups = (theta.shape[1] + (GROUP - 1)) // GROUP
        work = (marks, whole, notes, size, total, hits, weight)
        self.kernel(scores, seq_lens, theta, widths, block_size, sink, local, *work).launch(
            grid=[groups, H, L],
            block=[32 * self.S, 1, 1],
            stream=stream,
            min_blocks_per_mp=max(1, 2048 // (40 + 4 * self.E) // self.S),  # bounds the registers
            preferred_smem_carveout=20,
        )

    @cute.kernel
    def rows(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        top_k: Int32,
        sink: Int32,
        local: Int32,
        dense_len: Int32,
        marks: cute.Tensor,
        whole: cute.Tensor,
        notes: cute.Tensor,
        size: cute.Tensor,
        total: cute.Tensor,
    ):
        """A of a row: its dynamic blocks as bits, how many they are, and how their scores weigh."""
        w, h, l = cute.arch.block_idx()
        m = self.setup()
        tokens = seq_lens[w]
        n = blocks_of(tokens, block_size)
        held = Int32(-1)
        row = self.load(scores, l, w, h, n, m)
        whole[l, w, h, m.warp] = self.finite_rows(row)
        if w > 0 and tokens >= dense_len and n > top_k:
            value = cute.make_rmem_tensor((self.E,), Float32)
            value.store(row.load())
            self.open(value, sink, n - local, m)
            guess, step = self.spread(value, m)
            cut, last, step = self.search(value, top_k - sink - local, guess, step, m)
            mask, _ = self.above(value, row, cut, last, m)
            held = self.count(cute.arch.popc(Int32(mask)), m)
            lowest = Float32(0.0)
            for i in range_constexpr(self.E):
                lowest = cute.arch.fmin(lowest, row[i] if (mask & Uint32(1 << i)) != 0 else Float32(0.0))
            lowest = self.over(lowest, cute.arch.fmin, m)
            self.weigh(row, mask, lowest)
            _, sum_ = self.above(value, row, cut, last, m)
            sum_ = self.over(sum_, lambda x, y: x + y, m)
            marks[l, w, h, m.t] = Int32(mask)
            if m.t == 0:
                flat = sum_ == 0.0
                notes[l, w, h, LOWEST] = lowest
                notes[l, w, h, CUT] = cut
                notes[l, w, h, STEP] = step
                notes[l, w, h, FLAT] = Float32(1.0) if flat else Float32(0.0)
                sum_ = Float32(held) if flat else sum_
                total[l, w, h] = sum_ if sum_ < Float32.inf else Float32(float("nan"))
        if m.t == 0:
            size[l, w, h] = held

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        theta: cute.Tensor,
        widths: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        marks: cute.Tensor,
        whole: cute.Tensor,
        notes: cute.Tensor,
        size: cute.Tensor,
        total: cute.Tensor,
        hits: cute.Tensor,
        weight: cute.Tensor,
    ):
        """A few candidates: one replay for each run of them that has one alpha and beta."""
        group, h, l = cute.arch.block_idx()
        m = self.setup()
        first = group * GROUP
        among = cutlass.min(theta.shape[1] - first, GROUP)
        mine = first + cutlass.min(m.lane, among - 1)  # a lane keeps what is of this candidate
        alpha, beta = theta[l, mine, 0], theta[l, mine, 1]
        m.gamma, m.width, m.first = theta[l, mine, 2], widths[mine], first
        at = (scores, seq_lens, block_size, sink, local, marks, whole, notes, size, total, hits, weight, h, l, m)
        begin = Int32(0)
        while begin < among:
            a, b = cute.arch.shuffle_sync(alpha, begin), cute.arch.shuffle_sync(beta, begin)
            same = cute.arch.vote_ballot_sync(m.lane < begin or (alpha == a and beta == b and m.lane < among))
            end = cutlass.max(cute.arch.popc((~same & (same + 1)) - 1), begin + 1)  # a NaN is not the same
            self.replay(a, b, begin, end, *at)
            begin = end

    @cute.jit
    def replay(
        self, alpha, beta, begin, end, scores, seq_lens, block_size, sink, local,
        marks, whole, notes, size, total, hits, weight, h, l, m,
    ):  # fmt: skip
        """Candidates begin ... end of the group over all rows."""
        level = cute.make_rmem_tensor((self.E,), Float32)
        trend = cute.make_rmem_tensor((self.E,), Float32)
        level.fill(float("nan"))
        trend.fill(0.0)
        guess, step, seen = Float32(float("nan")), Float32(0.0), Uint32(0)
        for w in range(scores.shape[1]):
            n = blocks_of(seq_lens[w], block_size)
            wanted = size[l, w, h]
            if wanted >= 0:
                if guess != guess:  # the first row that selects: A's own threshold
                    guess, step = notes[l, w, h, CUT], notes[l, w, h, STEP]
                weights = self.load(scores, l, w, h, n, m)
                mask = Uint32(marks[l, w, h, m.t])
                self.weigh(weights, mask, notes[l, w, h, LOWEST])
                everything, flat = total[l, w, h], notes[l, w, h, FLAT] > 0.0
                for c in range(begin, end):
                    gamma, width = cute.arch.shuffle_sync(m.gamma, c), cute.arch.shuffle_sync(m.width, c)
                    found, sum_ = wanted, everything
                    if width < n:
                        value = self.forecast(level, trend, gamma, sink, n - local, m)
                        cut, rate = cute.arch.shuffle_sync(guess, c), cute.arch.shuffle_sync(step, c)
                        cut, last, rate = self.search(value, cutlass.max(width - sink - local, 0), cut, rate, m)
                        guess, step = (cut, rate) if m.lane == c else (guess, step)
                        held, sum_ = self.above(value, weights, cut, last, m)
                        found = self.count(cute.arch.popc(Int32(held & mask)), m)
                        sum_ = self.over(sum_, lambda x, y: x + y, m)
                        sum_ = Float32(found) if flat else sum_
                    if m.t == 0:
                        hits[l, m.first + c, w, h] = found
                        weight[l, m.first + c, w, h] = sum_
            row = self.load(scores, l, w, h, n, m)
            finite = Uint32(whole[l, w, h, m.warp])
            self.learn(row, level, trend, alpha, beta, seen & finite)
            seen = seen | finite

    # ------------------------------------------------------------------------------------------------ rows
    @cute.jit
    def setup(self):
        """What all parts need to know of the thread; shared memory of sums over warps."""
        m = SimpleNamespace()
        m.t, _, _ = cute.arch.thread_idx()
        m.lane, m.warp = m.t % 32, cute.arch.make_warp_uniform(m.t // 32)
        m.base = m.warp * (32 * self.E) + m.lane
        if const_expr(self.S > 1):
            smem = SmemAllocator()
            m.counts = smem.allocate_tensor(Int32, cute.make_layout((32, 2)), 16)
            m.sums = smem.allocate_tensor(Float32, cute.make_layout((32, 2)), 16)
            m.turn = cute.make_rmem_tensor((1,), Int32)
            m.turn[0] = Int32(0)
        return m

    @cute.jit
    def load(self, scores, l, w, h, n, m):
        """A thread's scores of a row; NaN beyond the sequence."""
        row = cute.make_rmem_tensor((self.E,), Float32)
        row.fill(float("nan"))
        inside = cutlass.min(n, scores.shape[3]) - m.base
        mine = cute.make_tensor(scores[l, w, h, None].iterator + m.base, cute.make_layout((self.E,), stride=(32,)))
        for i in range_constexpr(self.E):
            if 32 * i < inside:
                row[i] = mine[i]
        return row

    @cute.jit
    def finite_rows(self, row):
        """Bit i: the i-th blocks of all threads of the warp have finite scores."""
        bits = Uint32(0)
        for i in range_constexpr(self.E):
            all_ = cute.arch.vote_all_sync(row[i] > -Float32.inf and row[i] < Float32.inf)
            bits = bits | (Uint32(1 << i) if all_ else Uint32(0))
        return Int32(bits)

    @cute.jit
    def open(self, value, start, stop, m):
        """Blocks start ... stop compete; the others become NaN, which is above nothing."""
        for g in range_constexpr(self.E // 4):
            at = m.base - m.lane + 128 * g
            if at < start or at + 128 > stop:
                for i in range_constexpr(4 * g, 4 * g + 4):
                    competes = m.base + 32 * i >= start and m.base + 32 * i < stop
                    value[i] = value[i] if competes else Float32(float("nan"))

    @cute.jit
    def forecast(self, level, trend, gamma, start, stop, m):
        """Eq 2, for what competes."""
        value = cute.make_rmem_tensor((self.E,), Float32)
        for i in range_constexpr(self.E):
            value[i] = add(level[i], mul(gamma, trend[i]))
        self.open(value, start, stop, m)
        return value

    @cute.jit
    def learn(self, row, level, trend, alpha, beta, plain):
        """Eq 3, rounded as the reference rounds it. plain: bits of what has a level and a finite score."""
        for g in range_constexpr(self.E // 4):
            bits = Uint32(15 << 4 * g)
            if (plain & bits) == bits:
                for i in range_constexpr(4 * g, 4 * g + 4):
                    trend[i], level[i] = moved(row[i], level[i], trend[i], alpha, beta)
            else:
                for i in range_constexpr(4 * g, 4 * g + 4):
                    new_trend, new_level = moved(row[i], level[i], trend[i], alpha, beta)
                    fresh = level[i] != level[i]
                    new_trend = Float32(0.0) if fresh else new_trend
                    new_level = row[i] if fresh else new_level
                    known = row[i] > -Float32.inf and row[i] < Float32.inf
                    trend[i] = new_trend if known else trend[i]
                    level[i] = new_level if known else level[i]

    @cute.jit
    def weigh(self, row, mask, lowest):
        """Scores to weights of eq 4, in place: 0 for blocks that are not in the mask."""
        for i in range_constexpr(self.E):
            row[i] = add(row[i], -lowest) if (mask & Uint32(1 << i)) != 0 else Float32(0.0)

    # ------------------------------------------------------------------------------------------------ search
    @cute.jit
    def search(self, value, want, guess, step, m):
        """(cut, last, step): the `want` highest are those above the cut, and those at it with an id below `last`.

        All of them where there are fewer. step: how far the cut moves with a block more or less.
        """
        low, high, cut, jump, k = -Float32.inf, Float32.inf, guess, step, Int32(0)
        more, less, last, looking = Int32(-1), Int32(0), Int32(0), Boolean(True)  # blocks above low, above high
        while looking:
            c = self.count_above(value, cut, m)
            bounded = low > -Float32.inf and high < Float32.inf
            if c > want:
                low, more = cut, c
            elif c < want:
                high, less = cut, c
            looking = c != want and high > -Float32.inf
            if looking:
                next_ = cut + Float32(c - want) * jump
                jump = jump * 2.0
                if low > -Float32.inf and high < Float32.inf:
                    slope = (high - low) * cute.arch.rcp_approx(Float32(more - less))
                    next_ = low + slope * Float32(more - want)
                    step = step if bounded else slope
                if k >= CLEVER or not (next_ > low and next_ < high):
                    next_ = middle(low, high)
                if more < 0 and k >= 4:
                    next_ = -Float32.inf  # are there that many?
                if more >= 0 and next_ == low:  # all between low and high are equal
                    last, looking = self.first_ties(value, high, want - less, m), Boolean(False)
                    next_ = high
                cut, k = next_, k + 1
        return cut, last, step

    @cute.jit
    def first_ties(self, value, cut, want, m):
        """The least id below which `want` blocks are at the cut."""
        low, high = Int32(0), Int32(32 * self.E * self.S)
        while high - low > 0:
            at = (low + high) // 2
            mask = self.tied(value, cut, at, m)
            if self.count(cute.arch.popc(Int32(mask)), m) < want:
                low = at + 1
            else:
                high = at
        return low

    @cute.jit
    def spread(self, value, m):
        """A guess at a threshold, and at the step: mean of what is finite, and mean distance from it."""
        n, sum_ = Int32(0), Float32(0.0)
        for i in range_constexpr(self.E):
            finite = value[i] > -Float32.inf and value[i] < Float32.inf
            n = n + (Int32(1) if finite else Int32(0))
            sum_ = sum_ + (value[i] if finite else Float32(0.0))
        each = cute.arch.rcp_approx(Float32(self.count(n, m)))
        mean = self.over(sum_, lambda x, y: x + y, m) * each
        away = Float32(0.0)
        for i in range_constexpr(self.E):
            finite = value[i] > -Float32.inf and value[i] < Float32.inf
            away = away + (cute.arch.fmax(value[i] - mean, mean - value[i]) if finite else Float32(0.0))
        mean = mean if mean == mean else Float32(0.0)
        return mean, self.over(away, lambda x, y: x + y, m) * each * each * 2.0

    @cute.jit
    def above(self, value, weights, cut, last, m):
        """Bits of the blocks that `search` found, and the sum of their weights."""
        bits = cute.make_rmem_tensor((2,), Float32)  # floats: their adder is the faster one
        bits.fill(0.0)
        sums = cute.make_rmem_tensor((2,), Float32)
        sums.fill(0.0)
        for i in range_constexpr(self.E):
            bits[i // 16] = plus(bits[i // 16], float(1 << i % 16), value[i], cut)
            sums[i % 2] = plus(sums[i % 2], weights[i], value[i], cut)
        mask = Uint32(bits[0]) | Uint32(bits[1]) << 16
        if last > 0:
            mask = mask | self.tied(value, cut, last, m)
            sums.fill(0.0)
            for i in range_constexpr(self.E):
                sums[i % 2] = sums[i % 2] + (weights[i] if (mask & Uint32(1 << i)) != 0 else Float32(0.0))
        return mask, sums[0] + sums[1]

    @cute.jit
    def tied(self, value, cut, last, m):
        """Bits of the blocks at the cut with an id below `last`."""
        mask = Uint32(0)
        for i in range_constexpr(self.E):
            tied = value[i] == cut and m.base + 32 * i < last
            mask = mask | (Uint32(1 << i) if tied else Uint32(0))
        return mask

    # ------------------------------------------------------------------------------------------------ sums
    @cute.jit
    def count_above(self, value, cut, m):
        """Blocks above the cut, of all threads."""
        n = cute.make_rmem_tensor((4,), Float32)
        n.fill(0.0)
        for i in range_constexpr(self.E):
            n[i % 4] = plus(n[i % 4], 1.0, value[i], cut)
        return self.count(Int32((n[0] + n[1]) + (n[2] + n[3])), m)

    @cute.jit
    def count(self, x, m):
        """Sum over the threads."""
        x = cute.arch.warp_redux_sync(x, kind="add")
        if const_expr(self.S > 1):
            x = cute.arch.warp_redux_sync(self.across(x, m.counts, m), kind="add")
        return x

    @cute.jit
    def over(self, x, op, m):
        """A reduction over the threads, in a fixed order; op(x, 0) = x."""
        x = cute.arch.warp_reduction(x, op)
        if const_expr(self.S > 1):
            x = cute.arch.warp_reduction(self.across(x, m.sums, m), op)
        return x

    @cute.jit
    def across(self, x, room, m):
        """What each warp has: lane i gets it of warp i, 0 where there is none. Rooms alternate: one barrier will do."""
        turn = m.turn[0]
        m.turn[0] = 1 - turn
        if m.lane == 0:
            room[m.warp, turn] = x
        cute.arch.sync_threads()
        return room[m.lane, turn] if m.lane < self.S else room.element_type(0)


@cute.jit
def plus(sum_: Float32, x: Float32, value: Float32, cut: Float32) -> Float32:
    """sum_ + x where value > cut: a predicated addition."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.gt.f32 p, {$r2}, {$r3}; mov.f32 {$w0}, {$r0}; @p add.rn.f32 {$w0}, {$w0}, {$r1}; }",
        write_only_types=[Float32],
        read_only_args=[sum_, x, value, cut],
    )


@cute.jit
def moved(score, level, trend, alpha, beta):
    """Trend and level after a score."""
    new_trend = add(mul(beta, add(score, -level)), mul(add(1.0, -beta), trend))
    return new_trend, add(mul(alpha, score), mul(add(1.0, -alpha), level))


@cute.jit
def ordered(bits: Int32) -> Int32:
    """Bits of a float32 as integers that are ordered as the numbers are; its own inverse."""
    return bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))


@cute.jit
def middle(low: Float32, high: Float32) -> Float32:
    """As many numbers below as above; `low` where none is between."""
    a, b = ordered(low.bitcast(Int32)), ordered(high.bitcast(Int32))
    return ordered((a >> 1) + (b >> 1) + (a & b & 1)).bitcast(Float32)


def shape_of(capacity: int) -> dict[str, int]:
    """Warps of a row, and blocks a thread."""
    warps = next(s for s in WARPS if capacity <= 32 * MOST * s)
    return {"warps": warps, "per_lane": max(1, -(-capacity // (256 * warps))) * 8}


def replay_hits(
    scores: Tensor,
    seq_lens: Tensor,
    theta: Tensor,
    widths: Tensor,
    block_size: int,
    top_k: int,
    sink: int,
    local: int,
    dense_len: int,
    size: Tensor,
    total: Tensor,
    hits: Tensor,
    weight: Tensor,
) -> None:
    """The op replay_hits for CUDA tensors; more blocks than registers hold are the reference's."""
    L, W, H, N = scores.shape
    rule = (block_size, top_k, sink, local, dense_len)
    if N > CAPACITY:
        for i in range(L):  # one by one: it needs memory
            one = (x[i : i + 1] for x in (size, total, hits, weight))
            reference.replay_hits(scores[i : i + 1], seq_lens, theta[i : i + 1], widths, *rule, *one)
        return
    templates.serve("replay_hits", scores, ReplayHits.SERVES, {"number of blocks": N})
    templates.contiguous("replay_hits", scores=scores, theta=theta)
    for x in (total, hits, weight):
        x.zero_()
    if scores.numel() and theta.numel():
        shape = shape_of(N)
        marks = torch.empty(L, W, H, 32 * shape["warps"], dtype=torch.int32, device=scores.device)
        work = (marks, marks.new_empty(L, W, H, shape["warps"]), scores.new_empty(L, W, H, 4))
        compiled(ReplayHits, **shape)(scores, seq_lens, theta, widths, *rule, *work, size, total, hits, weight)
