# SPDX-License-Identifier: Apache-2.0
"""Budget policies: the table of the profile, its regression off the grid, 0 where nothing fits, and errors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prr_pipeline.errors import ConfigError
from prr_pipeline.prr.budget import BudgetPolicy, Fixed, Off, Profiled, width

DELTAS = [1.0, 1.25, 1.5, 2.0]


def rows(select: dict[int, float], attend: dict[tuple[int, float], float]) -> list[dict[str, Any]]:
    return [{"context": c, "delta": d, "select_us": select[c], "attend_us": us} for (c, d), us in attend.items()]


def profile(select: dict[int, float], us_a_delta: float) -> list[dict[str, Any]]:
    """Attention takes us_a_delta * delta at every context."""
    return rows(select, {(c, d): us_a_delta * d for c in select for d in DELTAS})


def fitted(profiled: list[dict[str, Any]], **options: Any) -> Profiled:
    policy = Profiled(**options)
    policy.check()
    policy.fit(profiled)
    return policy


@pytest.mark.parametrize(
    ("delta", "top_k", "blocks"),
    [(1.0, 32, 32), (1.25, 10, 12), (1.5, 7, 10), (1.1, 10, 11), (1.4, 45, 63), (1.15, 100, 115), (2.0, 3, 6)],
)
def test_the_width_is_the_floor_of_the_decimal(delta: float, top_k: int, blocks: int) -> None:
    assert width(delta, top_k) == blocks == Fixed(delta=delta).blocks(top_k, 4096)


def test_the_width_is_exact_for_all_hundredths() -> None:
    for hundredths in range(100, 301):
        assert all(width(hundredths / 100, k) == hundredths * k // 100 for k in range(1, 300))


@pytest.mark.parametrize("policy", [Off(), Fixed(delta=0)], ids=repr)
def test_no_budget_is_no_width_anywhere(policy: BudgetPolicy) -> None:
    policy.check()
    assert not policy.active and not policy.needs_profile
    assert [policy.blocks(64, c) for c in (1, 4096, 10**6)] == [0, 0, 0]


def test_policies_that_may_speculate_say_so() -> None:
    assert Fixed().active and Fixed().ratio(7) == 1.5 and not Fixed().needs_profile
    assert Profiled().active and Profiled().needs_profile


def test_the_table_holds_the_largest_delta_that_is_hidden() -> None:
    policy = fitted(profile({1024: 9.9, 2048: 12.5, 4096: 19.9, 8192: 20.0, 16384: 99.0}, 10.0))
    assert [policy.ratio(c) for c in (1024, 2048, 4096, 8192, 16384)] == [0.0, 1.25, 1.5, 2.0, 2.0]
    assert [policy.blocks(10, c) for c in (1024, 2048, 4096, 8192)] == [0, 12, 15, 20]


def test_where_no_delta_is_safe_there_is_no_speculation() -> None:
    policy = fitted(profile({1024: 2.0, 4096: 2.0}, 10.0))
    assert [policy.ratio(c) for c in (1, 1024, 2000, 4096, 10**6)] == [0.0] * 5
    assert policy.blocks(64, 1024) == 0 and policy.active, "a longer context may have one"


def test_how_a_repair_is_faster_is_known_from_the_nearest_context() -> None:
    """delta 1.5 at 1024 tokens and 1 at 4096; between them the nearest context's rows, if they have that delta."""
    times = [
        {"context": c, "delta": d, "serial_us": 10.0, "prr_us": us, "halves": c > 1024}
        for c, fast in ((1024, 1.5), (4096, 1.0))
        for d, us in ((1.0, 9.0), (1.5, 9.0 if fast == 1.5 else 11.0))
    ]
    policy = Profiled(name="profiled", deltas=[1.0, 1.5])
    policy.fit(times)
    assert policy.ratio(1024) == 1.5 and policy.halves(1024, 1.5) is False
    assert policy.ratio(4096) == 1.0 and policy.halves(4000, 1.0) is True
    assert Fixed(name="fixed").halves(1024, 1.5) is None and Profiled(name="new").halves(1024, 1.5) is None
    policy.fit([{k: v for k, v in row.items() if k != "halves"} for row in times])
    assert policy.halves(1024, 1.5) is None


def test_whole_steps_decide_where_they_were_timed() -> None:
    """The phase alone says 2; beside other layers' work all but delta 1 lengthen the step, by more than noise."""
    times = [
        {"context": 1024, "delta": d, "serial_us": 10.0, "prr_us": 9.0, "serial_step_us": 5000.0, "prr_step_us": us}
        for d, us in ((1.0, 4950.0), (1.25, 4959.0), (1.5, 4980.0), (2.0, 5001.0))
    ]
    assert fitted(times).ratio(1024) == 1.25
    assert fitted([{**r, "serial_step_us": 4949.0} for r in times]).ratio(1024) == 0.0
    phases = [{k: v for k, v in r.items() if "step" not in k} for r in times]
    assert fitted(phases).ratio(1024) == 2.0 and set(fitted(phases).regression()) == {"serial_us", "prr_us"}
    assert set(fitted(times).regression()) == {"serial_step_us", "prr_step_us"}


def test_slack_is_a_share_of_the_selection() -> None:
    times = profile({1024: 10.0}, 10.0)
    assert fitted(times).ratio(1024) == 1.0
    assert fitted(times, slack=0.25).ratio(1024) == 1.25
    assert fitted(times, slack=0.5).ratio(1024) == 1.5


def test_a_larger_delta_may_fit_where_a_smaller_one_was_measured_slower() -> None:
    times = rows({1024: 10.0}, {(1024, 1.0): 11.0, (1024, 1.25): 9.0, (1024, 1.5): 12.0, (1024, 2.0): 13.0})
    assert fitted(times).ratio(1024) == 1.25


def test_off_the_grid_the_regression_decides() -> None:
    """Selection is 5 + c / 1024 us, attention 10 delta: a delta fits from 1024 (10 delta - 5) tokens on."""
    select = {c * 1024: 5.0 + c for c in (4, 8, 16, 32)}
    for degree in (1, 2):
        policy = fitted(profile(select, 10.0), degree=degree)
        for delta, larger in zip([0.0, *DELTAS], [*DELTAS, None], strict=True):
            if larger is not None:
                edge = int(1024 * (10 * larger - 5))
                assert policy.ratio(edge - 9) == delta and policy.ratio(edge + 9) == larger
        assert policy.ratio(10**6) == 2.0


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_beyond_the_profile_its_nearest_context_decides(degree: int) -> None:
    """Selection grows ever slower: a parabola through it turns down soon after the last context, and so would delta."""
    select = {c * 1024: us for c, us in ((8, 10.5), (16, 17.0), (32, 21.0), (64, 20.5))}
    policy = fitted(profile(select, 10.0), degree=degree)
    for context in (1, 1024, 8 * 1024 - 1, 8 * 1024):
        assert policy.ratio(context) == 1.0
    for context in (64 * 1024, 64 * 1024 + 1, 128 * 1024, 10**7):
        assert policy.ratio(context) == 2.0


def test_on_the_grid_the_table_decides_though_the_regression_says_otherwise() -> None:
    select = {1024: 10.0, 2048: 25.0, 3072: 10.0, 4096: 10.0}  # an outlier that a line does not follow
    policy = fitted(profile(select, 10.0), degree=1)
    assert policy.ratio(2048) == policy.ratio(2100) == 2.0 and policy.ratio(2200) == 1.25
    assert policy.ratio(4096) == 1.0


@given(
    base=st.floats(0.1, 50), slope=st.floats(0, 5), cost=st.floats(0.5, 50), contexts=st.lists(st.integers(1, 70000))
)
def test_a_longer_selection_never_lowers_the_budget(base: float, slope: float, cost: float, contexts: list) -> None:
    policy = fitted(profile({c * 1024: base + slope * c for c in (1, 4, 16, 64)}, cost), degree=1)
    grid = (1024, 4096, 16384, 65536)
    far = [c for c in contexts if 1024 < c < 65536 and all(abs(c - g) > 0.05 * g for g in grid)]
    off_grid = [policy.ratio(c) for c in sorted(far)]
    assert off_grid == sorted(off_grid)
    assert set(off_grid) <= {0.0, *DELTAS}


def test_one_context_is_a_constant() -> None:
    policy = fitted(profile({2048: 16.0}, 10.0))
    assert [policy.ratio(c) for c in (1, 2048, 10**6)] == [1.5] * 3


def test_the_regression_is_reported_highest_power_first() -> None:
    policy = fitted(profile({1024: 6.0, 2048: 7.0, 3072: 8.0}, 10.0), degree=1)
    found = policy.regression()
    assert found["select_us"] == pytest.approx([1.0, 5.0])
    assert list(found["attend_us"]) == ["1.0", "1.25", "1.5", "2.0"]
    assert found["attend_us"]["1.5"] == pytest.approx([0.0, 15.0], abs=1e-9)
    assert Profiled().regression() == {"select_us": [], "attend_us": {}}


def test_where_both_sides_were_timed_together_the_step_decides() -> None:
    """Not the attention alone: the largest delta that takes no longer than serial and than the best."""
    select = {1024: 10.0, 2048: 10.0, 4096: 10.0}
    together = {
        1024: (20.0, (15.0, 15.1, 15.2, 17.0)),
        2048: (20.0, (20.5, 21.0, 22.0, 23.0)),
        4096: (20.0, (19.9, 19.9, 20.05, 20.05)),
    }
    times = [r | {"serial_us": together[r["context"]][0]} for r in profile(select, 1.0)]
    times = [r | {"prr_us": together[r["context"]][1][DELTAS.index(r["delta"])]} for r in times]
    policy = fitted(times)
    assert [policy.ratio(c) for c in select] == [1.25, 0.0, 1.25]
    assert set(policy.regression()) == {"serial_us", "prr_us"}


def test_rows_of_other_deltas_are_ignored() -> None:
    times = profile({1024: 99.0}, 10.0)
    assert fitted(times, deltas=[1.25]).ratio(1024) == 1.25
    assert fitted(times, deltas=[0.0, 1.0]).ratio(1024) == 1.0


def message(call: Any, *args: Any) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    return str(error.value)


def test_a_profile_without_the_candidates_is_refused() -> None:
    text = message(Profiled(deltas=[1.0, 3.0]).fit, profile({1024: 9.0, 2048: 9.0}, 1.0))
    assert text == "the profile has no rows for delta [3.0]; run stage profile with force=true"
    assert "no rows for delta [1.5]" in message(Profiled(deltas=[1.5]).fit, [])
    half = [r for r in profile({1024: 9.0, 2048: 9.0}, 1.0) if (r["context"], r["delta"]) != (2048, 2.0)]
    assert "no rows for delta [2.0]" in message(Profiled().fit, half)


def test_a_budget_without_its_profile_is_refused() -> None:
    assert message(Profiled().ratio, 4096) == "budget=profiled has no profile; run stage profile before decode"


@pytest.mark.parametrize("value", [0.5, -1.0, 0.999, 8.1, float("nan"), float("inf")])
def test_a_delta_out_of_range_is_refused(value: float) -> None:
    expected = f"= {value}, expected 0 (no speculation) or a value in 1 ... 8: P must be able to hold A"
    assert message(Fixed(delta=value).check) == f"budget.delta {expected}"
    assert message(Profiled(deltas=[1.0, value]).check) == f"budget.deltas {expected}"


def test_other_values_out_of_range_are_refused() -> None:
    assert message(Profiled(deltas=[]).check) == "budget.deltas is empty, expected at least one candidate such as 1.5"
    assert "budget.degree = -1 and budget.slack = 0.0, expected none below 0 and finite" in message(
        Profiled(degree=-1).check
    )
    assert "budget.slack = -0.1, expected none below 0" in message(Profiled(slack=-0.1).check)
    for value in (float("nan"), float("inf")):
        assert f"budget.slack = {value}, expected" in message(Profiled(slack=value).check)
