# SPDX-License-Identifier: Apache-2.0
"""The largest text that fits a number of tokens, found with few tokenizations.

A prompt grows by units (a noise line, a word, a needle) that cost about the same. So the cost of a
unit is measured on a small text, the size is extrapolated, and corrected by the secant method
inside a bracket of counted sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass

MAX_COUNTS = 12
_PROBE = 16  # units of the first look at the cost of a unit


@dataclass(frozen=True)
class Fit:
    """A size and what it costs: units, tokens."""

    units: int
    tokens: int


class DoesNotFit(Exception):
    """Even the smallest text is too long; tokens says how long it is."""

    def __init__(self, tokens: int) -> None:
        """Keep the number of tokens of the smallest text."""
        super().__init__(f"the smallest text has {tokens} tokens")
        self.tokens = tokens


def largest_fit(count: Callable[[int], int], room: int, low: int, high: int) -> Fit:
    """Find the largest number of units in low..high with count(units) <= room.

    Exact for a count that grows with the units, as long as MAX_COUNTS calls are enough (a cost per
    unit that hardly varies takes 4 to 7). In any case the result was counted and fits: a count that
    is not monotone or very uneven can only make it smaller than it could be. Never more than
    MAX_COUNTS calls.

    Args:
        count: tokens of the text with so many units.
        room: tokens that there are.
        low: the smallest allowed number of units.
        high: the largest one.

    Raises:
        DoesNotFit: count(low) > room.
    """
    last = fits = Fit(low, count(low))
    if fits.tokens > room:
        raise DoesNotFit(fits.tokens)
    over = Fit(high + 1, room + 1)  # not counted: out of bounds is as bad as too long
    guess = low + _PROBE
    for _ in range(MAX_COUNTS - 1):
        if over.units - fits.units <= 1:
            break
        guess = min(max(guess, fits.units + 1), over.units - 1)
        before, last = last, Fit(guess, count(guess))
        if last.tokens <= room:
            fits = last
        else:
            over = last
        crossing = _line(before, last, room)
        halfway = (fits.units + over.units) // 2
        guess = min(2 * last.units, halfway) if crossing is None else crossing
    return fits


def _line(before: Fit, last: Fit, room: int) -> int | None:
    """Where the line through the two sizes counted last reaches the room; None if it never does.

    These two, rather than the two ends of the bracket: a bad first guess leaves an end far away,
    and a cost that curves (numbers get longer) would then be approached slowly.
    """
    units, tokens = last.units - before.units, last.tokens - before.tokens
    if units * tokens <= 0:
        return None
    return last.units + (room - last.tokens) * units // tokens
