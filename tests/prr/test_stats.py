# SPDX-License-Identifier: Apache-2.0
"""Counts of hits, misses and waste against Python's sets, and their rates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_kernels as ck
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError
from prr_pipeline.prr.stats import LayerStats, StepStats, rates, refuse_nan

QUEST = Quest(block_size=4, top_k=6)


def stats(**counts: int | None) -> LayerStats:
    base = {"heads": 2, "chosen": 10, "dynamic": 6, "missed": 2, "missed_dynamic": 2, "predicted": 12}
    return LayerStats(**{**base, "kept_dynamic": 3, **counts})


def padded(rows: list[set[int]], width: int) -> torch.Tensor:
    return torch.tensor([[sorted(r) + [-1] * (width - len(r)) for r in rows]], dtype=torch.int32)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    tokens=st.integers(1, 60),
    sink=st.integers(0, 2),
    local=st.integers(1, 3),
    first=st.booleans(),
)
def test_counts_are_those_of_sets(data: st.DataObject, tokens: int, sink: int, local: int, first: bool) -> None:
    method = Quest(block_size=4, top_k=6, sink=sink, local=local, dense_layers=0)
    n, heads = method.blocks(tokens), 2
    scores = torch.randn(1, heads, 16, generator=torch.Generator().manual_seed(tokens))
    some = st.sets(st.integers(0, n - 1), max_size=9)
    P, before = ([data.draw(some) for _ in range(heads)] for _ in range(2))
    lens = torch.tensor([tokens], dtype=torch.int32)
    chosen = ck.select(scores, lens, 4, 6, sink, local, predicted=padded(P, 9))
    got = LayerStats.of(chosen, padded(P, 9), None if first else padded(before, 9), lens, method)

    A = [set(row) - {-1} for row in chosen.ids[0].tolist()]
    free = [{b for b in a if sink <= b < n - local} for a in A]
    assert got == LayerStats(
        heads=heads,
        chosen=sum(map(len, A)),
        dynamic=sum(map(len, free)),
        missed=sum(len(a - p) for a, p in zip(A, P, strict=True)),
        missed_dynamic=sum(len(f - p) for f, p in zip(free, P, strict=True)),
        predicted=sum(map(len, P)),
        kept_dynamic=None if first else sum(len(f & b) for f, b in zip(free, before, strict=True)),
    )
    assert got.wasted == sum(len(p - a) for a, p in zip(A, P, strict=True))


def test_rates_are_over_all_that_was_counted() -> None:
    a, b = stats(), stats(chosen=20, dynamic=10, missed=8, missed_dynamic=4, predicted=15, kept_dynamic=5)
    found = rates([a, b])
    assert found["hit_all"] == pytest.approx(20 / 30) and found["hit_dynamic"] == pytest.approx(10 / 16)
    assert found["missed"] == 10 / 4 and found["wasted"] == ((12 - 8) + (15 - 12)) / 4
    assert found["overlap_last"] == 8 / 16


def test_where_nothing_was_predicted_nothing_was_missed() -> None:
    """A step of serial, or one without a budget, counts for the overlap alone."""
    idle = stats(predicted=0, missed=10, missed_dynamic=6)
    nothing = {"hit_dynamic": None, "hit_all": None, "missed": None, "wasted": None}
    assert rates([idle]) == {**nothing, "overlap_last": 0.5}
    assert rates([idle, stats()]) == rates([stats()])
    assert rates([]) == {**nothing, "overlap_last": None}


def test_the_first_step_has_no_overlap() -> None:
    assert rates([stats(kept_dynamic=None)])["overlap_last"] is None
    assert rates([stats(kept_dynamic=None), stats()])["overlap_last"] == 0.5
    assert rates([stats(kept_dynamic=0)])["overlap_last"] == 0.0


def test_without_dynamic_blocks_there_is_no_dynamic_rate() -> None:
    found = rates([stats(dynamic=0, missed_dynamic=0, kept_dynamic=0)])
    assert found["hit_dynamic"] is None and found["overlap_last"] is None and found["hit_all"] == 0.8


def test_a_step_leaves_its_own_book_keeping_out_of_its_time() -> None:
    parts = {"append": 1.0, "attend": 2.0, "select": 3.0, "stats": 4.0, "predict": 0.5}
    step = StepStats(context=100, wall_ms=20.0, parts=parts, layers={1: stats()})
    row = step.record()
    assert step.ms == row["ms"] == 16.0
    assert (row["select_ms"], row["attend_ms"], row["repair_ms"], row["predict_ms"]) == (3.0, 2.0, 0.0, 0.5)
    assert row["other_ms"] == 16.0 - 5.5, "append belongs to the rest of the step"
    assert row["context"] == 100 and row["hit_all"] == 0.8


def test_nan_is_refused_at_the_first_step_that_has_it() -> None:
    refuse_nan(torch.tensor([False, False]), 20, QUEST)
    with pytest.raises(
        ConfigError, match=r"dsa=quest \(prr_pipeline.dsa.quest.Quest\) gave NaN as a block's score at 21"
    ):
        refuse_nan(torch.tensor([False, True, True]), 20, QUEST)
