# SPDX-License-Identifier: Apache-2.0
"""The top-K of a row of values by a cluster of CTAs: what select and predict share."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from torch import Tensor

from cutlass_kernels.templates import common

BINS = 2048  # of a histogram: 64 sums of 32
CAPACITY = 65536
DEAD = 0xFFFFFFFF  # the key of what is never taken: no block, NaN, -inf
ABSENT = 0x7FFFFFFF
COUNTS, CUT = 6, 7  # mbarriers after the two of each pass
FEW = 8  # keys that are ranked one by one


class RowSelect:
    """One row of values per cluster of CTAs, kept in registers: `chunk` blocks a CTA, threads * per_thread at most.

    A value becomes a 32-bit key, smaller is better. At most three radix passes of 11 bits each (the last two share one)
    find the key of rank K; the first that decides ends the search. A histogram has 2048 bins: the CTAs exchange 64 sums
    of 32 bins, then the 32 bins of the sum in which the rank falls. They push these into each other's shared memory
    (st.async, counted by an mbarrier each), so that no barrier of the cluster is waited for but one at the start, which
    hides behind the loads.

    All of this is bound by instructions, most of which a warp executes whatever its blocks: a CTA that has a row for
    itself has 8 warps, not 16. It also knows the least and the largest score at once, and lets the first digit span
    just these: a search ends there as a rule, or with FEW blocks that share the digit.

    A thread owns `per_thread` consecutive blocks, so that prefix sums of what the threads take are places in an
    ascending list. Ties at the rank go to the first of them, by the same prefix sums.
    """

    SERVES = {"number of blocks": range(CAPACITY + 1)}

    def __init__(self, cluster: int, per_thread: int, vector: bool, threads: int = 512, owners: int | None = None):
        self.cluster, self.E, self.vector, self.threads = cluster, per_thread, vector, threads
        self.warps = threads // 32
        self.owners = threads if owners is None else owners  # threads that own blocks; the keys of the others are DEAD
        self.chunk = self.owners * per_thread

    def row_signature(self, B, H):
        """A [B, H_kv, N] float32 argument; whole vectors a row when self.vector."""
        return common.fake(Float32, (B, H, common.sym(4 if self.vector else 1)), 16 if self.vector else 4)

    def memory(self, smem, compare):
        """Shared memory from an allocator."""
        m = SimpleNamespace()
        bins = smem.allocate_tensor(Int32, cute.make_layout((3 * BINS + 4,)), 16)  # the last four: nowhere
        m.bins = cute.make_tensor(bins.iterator, cute.make_layout((4, 512, 3)))
        m.sums = smem.allocate_tensor(Int32, cute.make_layout((4, 16, 3)), 16)
        m.found = smem.allocate_tensor(Int32, cute.make_layout((4, 4)), 16)  # bin, count before, count; cut
        m.warp = smem.allocate_tensor(Int32, cute.make_layout((2, self.warps)), 16)
        if compare:
            m.place = smem.allocate_tensor(Int32, cute.make_layout((4, self.chunk // 4)), 16)
        C = self.cluster
        if C == 1:
            m.range = smem.allocate_tensor(Uint32, cute.make_layout((self.warps, 2)), 16)
            m.few = smem.allocate_tensor(Uint32, cute.make_layout((FEW,)), 16)
        else:
            m.all_sums = smem.allocate_tensor(Int32, cute.make_layout((4, 16, C, 3)), 16)
            m.all_bins = smem.allocate_tensor(Int32, cute.make_layout((4, 8, C, 3)), 16)
            m.all_counts = smem.allocate_tensor(Int32, cute.make_layout((4, C)), 16)
            m.bars = smem.allocate_tensor(Int64, cute.make_layout((8,)), 8)
        return m

    def bytes(self, compare):
        """What memory() takes."""
        C, numbers = self.cluster, 3 * BINS + 4 + 3 * 64 + 16 + 2 * self.warps + (self.chunk if compare else 0)
        return 4 * (numbers + (2 * self.warps + FEW if C == 1 else 3 * (64 + 32) * C + 4 * C + 16))

    @cute.jit
    def setup(self, m, compare):
        """Clear the shared memory; announce the mbarriers of a cluster."""
        t, _, _ = cute.arch.thread_idx()
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        flat = cute.make_tensor(m.bins.iterator, cute.make_layout((4, 3 * 512)))
        for i in range_constexpr(3 * BINS // 4 // self.threads):
            cute.autovec_copy(zero, flat[None, t + i * self.threads])
        found = m.found
        if t < 4:
            cute.autovec_copy(zero, found[None, t])
        if const_expr(compare):
            absent = cute.make_rmem_tensor((4,), Int32)
            absent.fill(ABSENT)
            for i in range_constexpr(-(-self.chunk // (4 * self.threads))):
                if t + i * self.threads < self.chunk // 4:
                    cute.autovec_copy(absent, m.place[None, t + i * self.threads])
        if const_expr(self.cluster == 1):
            few = m.few
            if t < FEW:
                few[t] = Uint32(DEAD)
        else:
            C = self.cluster
            bar = m.bars.iterator
            if t == 0:
                for i in range_constexpr(8):
                    cute.arch.mbarrier_init(bar + i, 1)
                cute.arch.mbarrier_init_fence()
                for i in range_constexpr(8):
                    size = const_expr(4 if i == CUT else 16 * C if i == COUNTS else (256, 128)[i % 2] * C)
                    cute.arch.mbarrier_arrive_and_expect_tx(bar + i, size)
            cute.arch.cluster_arrive_relaxed()  # the fence above is what others rely on

    @cute.jit
    def push(self, source, target, bar, rank):
        """Four integers into the shared memory of CTA `rank`, counted by its mbarrier."""
        four = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(source, four)
        cute.arch.store_async_dsmem(target.iterator, (four[0], four[1], four[2], four[3]), bar, rank)

    @cute.jit
    def ready(self):
        """Every CTA of the row has announced its mbarriers, and this one has cleared its memory."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        cute.arch.sync_threads()

    # ------------------------------------------------------------------------------------------------ row and keys
    @cute.jit
    def load(self, x, b, h, first):
        """This thread's values of a row; 0 beyond its end."""
        out = cute.make_rmem_tensor((4, self.E // 4), Float32)
        out.fill(0.0)
        for i in range_constexpr(self.E // 4):
            if const_expr(self.vector):
                if first + 4 * i < x.shape[2]:
                    cute.autovec_copy(cute.local_tile(x[b, h, None], (4,), (first // 4 + i,)), out[None, i])
            else:
                for e in range_constexpr(4):
                    if first + 4 * i + e < x.shape[2]:
                        out[e, i] = x[b, h, first + 4 * i + e]
        return out

    @cute.jit
    def keys(self, values, first, n, capacity, top_k, sink, local):
        """Smaller is better: 0 for forced blocks, all of them when n <= K; DEAD for what is never taken."""
        out = cute.make_rmem_tensor((self.E,), Uint32)
        inside = cutlass.min(n, capacity)
        for i in range_constexpr(self.E):
            at = first + i
            f = values[i % 4, i // 4] + 0.0  # -0 becomes +0
            bits = f.bitcast(Uint32)
            key = bits if f < 0.0 else ~bits & Uint32(0x7FFFFFFF)
            key = key if f > -Float32.inf else Uint32(DEAD)
            forced = n <= top_k or at < sink or at >= n - local
            key = Uint32(0) if forced else key
            out[i] = key if at < inside else Uint32(DEAD)
        return out

    # ------------------------------------------------------------------------------------------------ search
    @cute.jit
    def search(self, key, rest, m, rank):
        """(want, mask, rest): key & mask < want is taken, and the first `rest` of those equal to it."""
        t, _, _ = cute.arch.thread_idx()
        wid = cute.arch.make_warp_uniform(t // 32)
        want, mask, shift, p, undecided = Uint32(0), Uint32(0), Int32(21), Int32(0), Boolean(True)
        if const_expr(self.cluster == 1):
            shift = self.narrow(key, m, t)
        while undecided:
            self.count(key, want, mask, shift, m, p)
            cute.arch.sync_threads()
            self.sum_bins(m, p, t)
            cute.arch.sync_threads()
            if wid == 0:
                self.locate(rest, m, p, t, rank)
            cute.arch.sync_threads()
            digit = Uint32(2047) << Uint32(shift)
            want = (want & ~digit) | (Uint32(m.found[0, p]) << Uint32(shift))
            mask = mask | digit
            rest = rest - m.found[1, p]
            undecided = m.found[2, p] != rest and shift > 0
            if const_expr(self.cluster == 1):  # noqa: SIM102
                if undecided and m.found[2, p] <= FEW:
                    want, rest = self.rank_few(key, want, mask, rest, m, t)
                    mask, undecided = Uint32(0xFFFFFFFF), Boolean(False)
            shift = cutlass.max(shift - 11, 0)
            p = p + 1
        return want, mask, rest

    @cute.jit
    def narrow(self, key, m, t):
        """Make the least key of a score 1; the shift that brings the first digit to the top of the largest.

        Forced keys (0) are the largest number when 1 is subtracted, DEAD is 0 when 1 is added: neither counts.
        """
        low, high, range_ = key[0] - 1, key[0] + 1, m.range
        for i in range_constexpr(1, self.E):
            low = cutlass.min(low, key[i] - 1)
            high = cutlass.max(high, key[i] + 1)
        low = cute.arch.warp_redux_sync(low, kind="umin")
        high = cute.arch.warp_redux_sync(high, kind="umax")
        if t % 32 == 0:
            range_[t // 32, 0] = low
            range_[t // 32, 1] = high
        cute.arch.sync_threads()
        low = cute.arch.warp_redux_sync(range_[t % self.warps, 0], kind="umin")
        high = cute.arch.warp_redux_sync(range_[t % self.warps, 1], kind="umax") - 1
        for i in range_constexpr(self.E):
            key[i] = key[i] - low if key[i] - 1 < Uint32(DEAD - 1) else key[i]
        shift = 21 - Int32(cute.arch.clz(high - low if high > low else Uint32(1)))
        return shift if shift > 0 else Int32(0)

    @cute.jit
    def rank_few(self, key, want, mask, rest, m, t):
        """Of at most FEW blocks that agree with `want` in `mask`: the key of rank `rest`, and its rank among equals."""
        few, found = m.few, m.found.iterator + 15
        for i in range_constexpr(self.E):
            if ((key[i] ^ want) & mask) == 0:
                few[cute.arch.atomic_add(found, Int32(1))] = key[i]
        cute.arch.sync_threads()
        mine, less, equal = few[t % FEW], Int32(0), Int32(0)
        four = cute.make_rmem_tensor((4,), Uint32)
        for i in range_constexpr(FEW // 4):
            cute.autovec_copy(cute.local_tile(few, (4,), (i,)), four)
            for e in range_constexpr(4):
                less = less + (Int32(1) if four[e] < mine else Int32(0))
                equal = equal + (Int32(1) if four[e] == mine else Int32(0))
        here = less < rest and rest <= less + equal
        key_here = cute.arch.warp_redux_sync(mine if here else Uint32(0), kind="umax")
        less = cute.arch.warp_redux_sync(less if here else Int32(0), kind="max")
        return key_here, rest - less

    @cute.jit
    def count(self, key, want, mask, shift, m, p):
        """The histogram of a digit of the keys that agree with `want` in `mask`."""
        t, _, _ = cute.arch.thread_idx()
        bins = m.bins.iterator + 2048 * p
        mine = Uint32(0)
        for i in range_constexpr(self.E):
            mine = mine | (Uint32(1 << i) if ((key[i] ^ want) & mask) == 0 else Uint32(0))
        if const_expr(self.owners < self.threads):
            mine = mine if t < self.owners else Uint32(0)
        if mine != 0:
            for i in range_constexpr(self.E):  # a key that does not agree counts where nobody looks, without a branch
                digit = Int32((key[i] >> Uint32(shift)) & Uint32(2047))
                nowhere = 2048 * (3 - p)
                cute.arch.atomic_add(bins + (digit if (mine & Uint32(1 << i)) != 0 else nowhere), Int32(1))

    @cute.jit
    def sum_bins(self, m, p, t):
        """Sums of 32 bins: a thread has four, eight threads share a sum."""
        four = cute.make_rmem_tensor((4,), Int32)
        sums = m.sums
        for i in range_constexpr(BINS // 4 // self.threads):
            quad = t + i * self.threads
            cute.autovec_copy(m.bins[None, quad, p], four)
            total = cute.arch.warp_reduction_sum(four[0] + four[1] + four[2] + four[3], threads_in_group=8)
            if t % 8 == 0:
                sums[quad // 8 % 4, quad // 32, p] = total

    @cute.jit
    def locate(self, rest, m, p, lane, rank):
        """One warp: the bin at which the running count over the cluster reaches `rest`, into m.found."""
        C = self.cluster
        if const_expr(C > 1):
            for i in range_constexpr(max(C // 2, 1)):
                piece, to = lane % 16, lane // 16 + 2 * i
                self.push(m.sums[None, piece, p], m.all_sums[None, piece, rank, p], m.bars.iterator + 2 * p, to)
            cute.arch.mbarrier_wait(m.bars.iterator + 2 * p, 0)
        two = self.over_cluster(m.all_sums if const_expr(C > 1) else m.sums, 2, 32, lane, p)
        before = scan(two[0] + two[1], lane) - two[0] - two[1]
        second = before + two[0] < rest
        here = before < rest and before + two[0] + two[1] >= rest
        start = before + two[0] if second else before
        group = 2 * lane + (Int32(1) if second else Int32(0))
        group = cute.arch.warp_redux_sync(group if here else Int32(0), kind="add")
        base = cute.arch.warp_redux_sync(start if here else Int32(0), kind="add")
        if const_expr(C > 1):
            for i in range_constexpr(-(-C // 4)):
                piece, to = lane % 8, lane // 8 + 4 * i
                bar = m.bars.iterator + (2 * p + 1)
                source, target = m.bins[None, 8 * group + piece, p], m.all_bins[None, piece, rank, p]
                if to < C:
                    self.push(source, target, bar, to)
            cute.arch.mbarrier_wait(m.bars.iterator + (2 * p + 1), 0)
            one = self.over_cluster(m.all_bins, 1, 32, lane, p)[0]
        else:
            one = cute.make_tensor(m.bins.iterator, cute.make_layout((2048, 3)))[32 * group + lane, p]
        upto = base + scan(one, lane)
        found = m.found
        if upto - one < rest and upto >= rest:
            found[0, p] = 32 * group + lane
            found[1, p] = upto - one
            found[2, p] = one

    @cute.jit
    def over_cluster(self, x, width, pieces, lane, p):
        """`width` integers at place `lane`, summed over the CTAs."""
        all_ = cute.make_tensor(x.iterator, cute.make_layout((width, pieces, self.cluster, 3)))
        total = cute.make_rmem_tensor((width,), Int32)
        total.fill(0)
        part = cute.make_rmem_tensor((width,), Int32)
        for c in range_constexpr(self.cluster):
            cute.autovec_copy(all_[None, lane, c, p], part)
            total.store(total.load() + part.load())
        return total

    # ------------------------------------------------------------------------------------------------ places
    @cute.jit
    def early(self, predicted, b, h):
        """The first two ids of P that this thread notes, so that their loads are under way before ready()."""
        t, _, _ = cute.arch.thread_idx()
        ids = cute.make_rmem_tensor((2,), Int32)
        ids.fill(-1)
        for i in range_constexpr(2):
            if t + i * self.threads < predicted.shape[2]:
                ids[i] = predicted[b, h, t + i * self.threads]
        return ids

    @cute.jit
    def note(self, ids, predicted, b, h, rank, m):
        """For each block of this CTA, where in P it is, into m.place."""
        t, _, _ = cute.arch.thread_idx()
        place = m.place.iterator
        for i in range_constexpr(2):
            at = ids[i] - rank * self.chunk
            if at >= 0 and at < self.chunk:
                cute.arch.atomic_min(place + at, t + i * self.threads)
        j = t + 2 * self.threads
        while j < predicted.shape[2]:
            at = predicted[b, h, j] - rank * self.chunk
            if at >= 0 and at < self.chunk:
                cute.arch.atomic_min(place + at, j)
            j = j + self.threads

    @cute.jit
    def taken(self, key, want, mask, m, compare):
        """Bit masks over a thread's blocks: taken for certain, tied at the rank, not in P."""
        t, _, _ = cute.arch.thread_idx()
        sure, tie, lost = Uint32(0), Uint32(0), Uint32(0)
        for i in range_constexpr(self.E):
            bit = Uint32(1 << i) if key[i] != Uint32(DEAD) else Uint32(0)
            sure = sure | (bit if (key[i] & mask) < want else Uint32(0))
            tie = tie | (bit if (key[i] & mask) == want else Uint32(0))
        if const_expr(compare):
            place = m.place
            if (sure | tie) != 0:
                four = cute.make_rmem_tensor((4,), Int32)
                for i in range_constexpr(self.E // 4):
                    cute.autovec_copy(place[None, t * (self.E // 4) + i], four)
                    for e in range_constexpr(4):
                        lost = lost | (Uint32(1 << (4 * i + e)) if four[e] == ABSENT else Uint32(0))
        return sure, tie, lost

    @cute.jit
    def prefix_sums(self, sure, tie, lost, m, rank, compare):
        """Counts of (sure, tied, sure and lost, tied and lost) before this thread in the row, and in the row."""
        t, _, _ = cute.arch.thread_idx()
        lane, wid = t % 32, cute.arch.make_warp_uniform(t // 32)
        # two counts an integer: a CTA owns fewer than 65536 blocks
        a = cute.arch.popc(Int32(sure)) | (cute.arch.popc(Int32(tie)) << 16)
        c, upto_a, upto_c = Int32(0), scan(a, lane), Int32(0)
        if const_expr(compare):
            c = cute.arch.popc(Int32(sure & lost)) | (cute.arch.popc(Int32(tie & lost)) << 16)
            upto_c = scan(c, lane)
        warps = m.warp
        if lane == 31:
            warps[0, wid] = upto_a
            warps[1, wid] = upto_c
        cute.arch.sync_threads()
        before = cute.make_rmem_tensor((4,), Int32)
        total = cute.make_rmem_tensor((4,), Int32)
        four = cute.make_rmem_tensor((4,), Int32)
        one_a, one_c, c_own = Int32(0), Int32(0), c
        if lane < self.warps:
            one_a = warps[0, lane]
            one_c = warps[1, lane]
        all_a = cute.arch.warp_redux_sync(one_a, kind="add")
        a = upto_a - a + cute.arch.warp_redux_sync(one_a if lane < wid else Int32(0), kind="add")
        all_c, c = Int32(0), Int32(0)
        if const_expr(compare):
            all_c = cute.arch.warp_redux_sync(one_c, kind="add")
            c = upto_c - c_own + cute.arch.warp_redux_sync(one_c if lane < wid else Int32(0), kind="add")
        unpack(a, c, before)
        unpack(all_a, all_c, total)
        if const_expr(self.cluster > 1):
            target, bar = m.all_counts[None, rank], m.bars.iterator + COUNTS
            if t < self.cluster:
                self.push(total, target, bar, t)
            cute.arch.mbarrier_wait(m.bars.iterator + COUNTS, 0)
            total.fill(0)
            for c_ in range_constexpr(self.cluster):
                cute.autovec_copy(m.all_counts[None, c_], four)
                for x in range_constexpr(4):
                    before[x] = before[x] + (four[x] if c_ < rank else Int32(0))
                    total[x] = total[x] + four[x]
        return before, total

    @cute.jit
    def lost_ties(self, tie, lost, before, total, rest, m):
        """How many of the first `rest` ties are not in P. The thread that owns the cut tells the row."""
        result, found = total[3], m.found
        bar = m.bars.iterator + CUT if const_expr(self.cluster > 1) else None
        if total[1] > rest:
            if before[1] <= rest and before[1] + cute.arch.popc(Int32(tie)) > rest:
                left, kept, count = tie, rest - before[1], before[3]
                while kept > 0:
                    bit = left & (Uint32(0) - left)
                    count = count + (Int32(1) if (lost & bit) != 0 else Int32(0))
                    left, kept = left ^ bit, kept - 1
                if const_expr(self.cluster > 1):
                    for to in range_constexpr(self.cluster):
                        cute.arch.store_async_dsmem(found.iterator + 12, count, bar, Int32(to))
                else:
                    found[0, 3] = count
            if const_expr(self.cluster > 1):
                cute.arch.mbarrier_wait(bar, 0)
            else:
                cute.arch.sync_threads()
            result = found[0, 3]
        return result

    @cute.jit
    def emit(self, first, rank, masks, before, total, rest, cut, m, b, h, out, compare):
        """Write the lists: ids, and with `compare` position, missed and counts; -1 behind them."""
        t, _, _ = cute.arch.thread_idx()
        sure, tie, lost = masks
        n_sure, n_tie, n_lost, n_lost_tie = before[0], before[1], before[2], before[3]
        place = None
        if const_expr(compare):
            place = cute.make_tensor(m.place.iterator, cute.make_layout((self.chunk,)))
        left = sure | tie
        while left != 0:
            bit = left & (Uint32(0) - left)
            i = cute.arch.popc(Int32(bit - 1))
            tied, absent = (tie & bit) != 0, (lost & bit) != 0
            if not tied or n_tie < rest:
                at = n_sure + cutlass.min(n_tie, rest)
                out.ids[b, h, at] = first + i
                if const_expr(compare):
                    out.position[b, h, at] = Int32(-1) if absent else place[t * self.E + i]
                    if absent:
                        out.missed[b, h, n_lost + cutlass.min(n_lost_tie, cut)] = first + i
            n_tie = n_tie + (Int32(1) if tied else Int32(0))
            n_sure = n_sure + (Int32(0) if tied else Int32(1))
            n_lost_tie = n_lost_tie + (Int32(1) if tied and absent else Int32(0))
            n_lost = n_lost + (Int32(1) if not tied and absent else Int32(0))
            left = left ^ bit
        size = total[0] + cutlass.min(total[1], rest)
        j = size + rank * self.threads + t
        while j < out.ids.shape[2]:
            out.ids[b, h, j] = Int32(-1)
            if const_expr(compare):
                out.position[b, h, j] = Int32(-1)
            j = j + self.threads * self.cluster
        if const_expr(compare):
            misses = total[2] + cut
            j = misses + rank * self.threads + t
            while j < out.ids.shape[2]:
                out.missed[b, h, j] = Int32(-1)
                j = j + self.threads * self.cluster
            if rank == 0 and t == 0:
                out.counts[b, h, 0] = size
                out.counts[b, h, 1] = misses

    @cute.jit
    def choose(self, key, inside, first, b, h, rank, m, out, compare):
        """From keys to lists: the whole of it, once setup() and ready() are behind."""
        want, mask, rest = self.search(key, cutlass.min(out.ids.shape[2], inside), m, rank)
        masks = self.taken(key, want, mask, m, compare)
        before, total = self.prefix_sums(*masks, m, rank, compare)
        cut = Int32(0)
        if const_expr(compare):
            cut = self.lost_ties(masks[1], masks[2], before, total, rest, m)
        self.emit(first, rank, masks, before, total, rest, cut, m, b, h, out, compare)


@cute.jit
def scan(x: Int32, lane: Int32) -> Int32:
    """Inclusive prefix sum over a warp."""
    for s in range_constexpr(5):
        up = cute.arch.shuffle_sync_up(x, offset=1 << s)
        x = x + (up if lane >= (1 << s) else Int32(0))
    return x


@cute.jit
def unpack(a: Int32, c: Int32, out: cute.Tensor):
    """Two pairs of 16-bit counts as four integers."""
    out[0], out[1] = a & 0xFFFF, (a >> 16) & 0xFFFF
    out[2], out[3] = c & 0xFFFF, (c >> 16) & 0xFFFF


@cute.jit
def blocks_of(tokens: Int32, block_size: Int32) -> Int32:
    """Blocks that hold tokens, the partly filled last one included."""
    return (tokens + (block_size - 1)) // block_size


def held(capacity: int, threads: int) -> int:
    """The fewest blocks a thread that hold a row: fours, since they are read as vectors."""
    return max(4, -(-capacity // (4 * threads)) * 4)


def shape_of(capacity: int) -> dict[str, int]:
    """Cluster, blocks a thread and threads that were fastest for rows of this capacity."""
    if capacity <= 4096:
        return {"cluster": 1, "per_thread": held(capacity, 256), "threads": 256}
    for most, cluster, per_thread in ((8192, 4, 4), (16384, 4, 8), (32768, 8, 8)):
        if capacity <= most:
            return {"cluster": cluster, "per_thread": per_thread, "threads": 512}
    return {"cluster": 8, "per_thread": 16, "threads": 512}


def wide(*rows: Tensor) -> bool:
    """Rows that can be read 16 bytes at a time."""
    return all(x.shape[-1] > 0 and x.shape[-1] % 4 == 0 and x.data_ptr() % 16 == 0 for x in rows)
