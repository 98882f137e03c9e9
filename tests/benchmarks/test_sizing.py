# SPDX-License-Identifier: Apache-2.0
"""The search for the largest size: exact on straight lines, safe and bounded on anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prr_pipeline.benchmarks.sizing import MAX_COUNTS, DoesNotFit, largest_fit


class Counter:
    """Counts how often a cost is asked for."""

    def __init__(self, cost):
        self.cost, self.calls = cost, 0

    def __call__(self, units):
        self.calls += 1
        return self.cost(units)


@given(
    st.integers(1, 80), st.integers(0, 500), st.integers(1, 30), st.integers(0, 200_000),
    st.integers(0, 100_000),
)  # fmt: skip
def test_a_straight_line_is_solved_exactly(slope, offset, low, room, more):
    high = low + more
    count = Counter(lambda units: offset + slope * units)
    if offset + slope * low > room:
        with pytest.raises(DoesNotFit) as error:
            largest_fit(count, room, low, high)
        assert error.value.tokens == offset + slope * low
        return
    fit = largest_fit(count, room, low, high)
    assert fit.units == min(high, (room - offset) // slope)
    assert fit.tokens == offset + slope * fit.units
    assert count.calls <= 6


@given(st.data())
def test_what_is_found_fits_whatever_the_cost(data):
    costs = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=80))
    room = data.draw(st.integers(0, 100))
    count = Counter(lambda units: costs[units - 1])
    try:
        fit = largest_fit(count, room, 1, len(costs))
    except DoesNotFit:
        assert costs[0] > room
    else:
        assert costs[fit.units - 1] == fit.tokens <= room
    assert count.calls <= MAX_COUNTS


@given(st.lists(st.integers(0, 60), min_size=400, max_size=400), st.integers(0, 9_000))
def test_uneven_units_are_filled_up_well(steps, room):
    total = [sum(steps[:units]) for units in range(len(steps) + 1)]
    fit = largest_fit(total.__getitem__, room, 0, len(steps))
    best = max(units for units, tokens in enumerate(total) if tokens <= room)
    assert total[best] - fit.tokens <= 60


def test_units_that_cost_nothing_do_not_go_on_for_ever():
    count = Counter(lambda units: 5)
    assert largest_fit(count, 10, 1, 1000).units > 900
    assert count.calls <= MAX_COUNTS


@pytest.mark.parametrize("room", [90, 700, 2_000, 30_000, 131_072, 1_000_000])
def test_a_numbered_list_is_solved_exactly(room):
    """Its units get dearer with the digits of their number."""
    count = Counter(lambda units: 50 + sum(3 * max(0, units - 10**d) for d in range(7)))
    fit = largest_fit(count, room, 1, 1 << 24)
    assert fit.tokens <= room < count.cost(fit.units + 1)
    assert count.calls <= MAX_COUNTS
