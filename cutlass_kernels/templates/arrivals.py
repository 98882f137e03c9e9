# SPDX-License-Identifier: Apache-2.0
"""Arrivals: how a kernel on another stream learns that the partials of P are there, without a join in front of it.

Two counters a KV head, both zero when not in use. attend adds UNITS for each listed block to the first, a CTA at a
time, behind what the CTA wrote. A CTA that reads polls until the count is whole, and adds one to the second; the last
one of the KV head zeroes both. A poll is bounded: where the count never comes, the CTA writes NaN and does not hang.
"""

import cutlass.cute as cute
from cutlass import Int32


class Arrivals:
    """See the module. at: the two counters of a KV head. All of these are for one thread of a CTA."""

    UNITS = 4  # a block's count: the CTAs of its cluster, 4 at most, add it in equal shares
    POLLS = 1 << 21  # a second or two

    @cute.jit
    def report(self, at, units):
        """Behind a barrier of the CTA: what its threads wrote is there."""
        cute.arch.red(at.iterator, units, op="add", dtype=Int32, sem="release", scope="gpu")

    @cute.jit
    def look(self, at, wanted):
        """1: all of it is there, and the CTA may read it behind a barrier; else 0."""
        got = cute.arch.load(at.iterator, Int32, sem="acquire", scope="gpu")
        return Int32(1) if got == wanted else Int32(0)

    @cute.jit
    def poll(self, at, wanted):
        """look, until it is 1 or the bound is reached."""
        there, polls = self.look(at, wanted), Int32(0)
        while there == 0 and polls < self.POLLS:
            cute.arch.inline_ptx("nanosleep.u32 20;")
            there = self.look(at, wanted)
            polls = polls + 1
        return there

    @cute.jit
    def sign(self, at):
        """Say that this CTA needs the count no more; how many did so before. The branch on the count orders the two."""
        return Int32(cute.arch.atomic_add(at.iterator + 1, Int32(1), sem="relaxed", scope="gpu"))

    @cute.jit
    def leave(self, at, before, readers):
        """Zero the counters, if this CTA was the last of `readers` to sign. before: -1 in threads that did not."""
        if before == readers - 1:
            at[0] = Int32(0)
            at[1] = Int32(0)


def given(arrived):
    """The op's argument, in which no elements stand for None."""
    return arrived if arrived.numel() else None
