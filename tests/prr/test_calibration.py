# SPDX-License-Identifier: Apache-2.0
"""The grid tells what decoding with a candidate would have hit: held against a plain loop over the ops of a step."""

import math
from collections.abc import Sequence
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.prr.calibration import Window, calibrate, hit_rates, last_overlap, locality
from prr_pipeline.prr.predictor import LAST_SCORES, EmaPredictor

METHOD = Quest(block_size=4, top_k=5, sink=1, local=2, dense_layers=0)


def window(rows: int = 9, heads: int = 2, tokens: int = 50, seed: int = 0, room: int = 2, scale: float = 1.0) -> Window:
    """Scores as a prefill leaves them: slowly changing, -inf beyond the sequence, the last row at `tokens`."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.arange(tokens - rows + 1, tokens + 1, dtype=torch.int32)
    blocks = -(-tokens // 4) + room
    walk = torch.randn(rows, heads, blocks, generator=gen).cumsum(0) * 0.4
    scores = (walk + torch.randn(heads, blocks, generator=gen)) * scale
    inside = torch.arange(blocks) < ((lengths + 3) // 4)[:, None]
    return Window(scores.masked_fill(~inside[:, None], -math.inf), lengths)


def mean(values: Sequence[float]) -> float:
    known = [v for v in values if v == v]
    return fmean(known) if known else math.nan


def sets(ids: Tensor) -> list[set[int]]:
    """The blocks of each head."""
    return [set(row.tolist()) - {-1} for row in ids[0]]


def by_steps(w: Window, theta: Sequence[float], m: SparseMethod, width: int) -> tuple[float, float, float]:
    """Decode the rows: P from the ops, A from the ops, hits from sets. -> all, dynamic, weighted."""
    level = torch.full_like(w.scores[:1], math.nan)
    trend = torch.zeros_like(level)
    predicted = torch.full((1, level.shape[1], width), -1, dtype=torch.int32)
    found: list[tuple[float, float, float]] = []
    for i, tokens in enumerate(w.lengths.tolist()):
        lens, row = w.lengths[i : i + 1].contiguous(), w.scores[i : i + 1].contiguous()
        n = m.blocks(tokens)
        if i and n > m.top_k:
            chosen = ck.select(row, lens, m.block_size, m.top_k, m.sink, m.local).ids
            pairs = zip(sets(chosen), sets(predicted), row[0].tolist(), strict=True)
            found.append(tuple(mean(x) for x in zip(*(shares(*p, m, n) for p in pairs), strict=True)))
        ck.predict(row, level, trend, torch.tensor([theta]), lens, m.block_size, m.sink, m.local, predicted)
    return tuple(mean(x) for x in zip(*found, strict=True))


def shares(chosen: set[int], held: set[int], row: list[float], m: SparseMethod, n: int) -> tuple[float, float, float]:
    dynamic = {b for b in chosen if m.sink <= b < n - m.local}
    lowest = min([0.0, *(row[b] for b in dynamic)])
    weight = {b: row[b] - lowest for b in dynamic}
    if not sum(weight.values()):
        weight = dict.fromkeys(dynamic, 1.0)
    over = sum(weight.values())
    return (
        len(chosen & held) / len(chosen),
        len(dynamic & held) / len(dynamic) if dynamic else math.nan,
        sum(weight[b] for b in dynamic & held) / over if over else math.nan,
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(2, 8),
    tokens=st.integers(25, 60),
    widths=st.lists(st.integers(5, 16), min_size=1, max_size=3),
    thetas=st.lists(
        st.tuples(
            st.sampled_from([0.2, 0.6, 1.0]), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.25, 1.0])
        ),
        min_size=1,
        max_size=3,
    ),
    rule=st.sampled_from([(0, 1), (1, 2), (0, 5), (2, 3), (3, 1)]),
    spoiled=st.sampled_from(["nothing", "ties", "some -inf and NaN", "all negative"]),
)
def test_hit_rates_are_those_of_decoding_step_by_step(seed, rows, tokens, widths, thetas, rule, spoiled) -> None:
    m = Quest(block_size=4, top_k=5, sink=rule[0], local=rule[1], dense_layers=0)
    layers = [window(rows, 2, tokens, seed + i) for i in range(2)]
    for w in layers:
        if spoiled == "ties":
            w.scores.round_()
        if spoiled == "all negative":
            w.scores.sub_(100)
        if spoiled == "some -inf and NaN":
            dice = torch.rand(w.scores.shape, generator=torch.Generator().manual_seed(seed))
            w.scores[dice < 0.1] = -math.inf
            w.scores[dice > 0.9] = math.nan
    hits = hit_rates(layers, torch.tensor(thetas), m, widths)
    for i, width in enumerate(widths):
        for layer, w in enumerate(layers):
            for j, theta in enumerate(thetas):
                wanted = by_steps(w, theta, m, width)
                got = [float(x[i, layer, j]) for x in hits]
                assert got == pytest.approx(wanted, abs=1e-5, nan_ok=True)


def test_layers_may_have_candidates_of_their_own() -> None:
    layers = [window(seed=1), window(seed=2)]
    thetas = torch.tensor([[[0.2, 0.5, 0.75]], [[1.0, 1.0, 0.0]]])
    both = hit_rates(layers, thetas, METHOD, [5])
    for layer, w in enumerate(layers):
        alone = hit_rates([w], thetas[layer], METHOD, [5])
        assert [float(x[0, layer, 0]) for x in both] == pytest.approx([float(x[0, 0, 0]) for x in alone])


def hand_made(rows: list[list[float]], top_k: int) -> tuple[Window, Quest]:
    """One head, blocks of one token, the last block forced and not scored; all rows of one length."""
    n = len(rows[0])
    scores = torch.tensor(rows)[:, None]
    return Window(scores, torch.full((len(rows),), n, dtype=torch.int32)), Quest(
        block_size=1, top_k=top_k, sink=0, local=1, dense_layers=0
    )


def test_equation_4_weighs_a_miss_by_its_score() -> None:
    """A = {0, 2} of scores 6 and 2, and the forced block; P from the row before = {0, 1}."""
    w, m = hand_made([[6.0, 3.0, 1.0, 0.0], [6.0, 1.0, 2.0, 9.0]], 3)
    hits = hit_rates([w], torch.tensor([LAST_SCORES]), m, [3])
    assert float(hits.weighted) == pytest.approx(6 / 8)  # the forced block's 9 does not count
    assert float(hits.dynamic) == pytest.approx(1 / 2) and float(hits.all) == pytest.approx(2 / 3)


def test_negative_scores_are_shifted_by_the_lowest_of_the_selection() -> None:
    """A = {0, 1, 3} of -1, -3, -5: weights 4, 2, 0; P holds 0 and 2."""
    w, m = hand_made([[5.0, -9.0, 4.0, 3.0, 0.0], [-1.0, -3.0, -8.0, -5.0, 0.0]], 4)
    hits = hit_rates([w], torch.tensor([LAST_SCORES]), m, [3])
    assert float(hits.weighted) == pytest.approx(4 / 6) and float(hits.dynamic) == pytest.approx(1 / 3)


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_scores_that_never_change_are_hit_always(value: float) -> None:
    w = window()
    w.scores[w.scores.isfinite()] = value
    for objective in ("weighted", "overlap"):
        (found,) = calibrate([w], EmaPredictor(objective=objective), METHOD)
        assert found.hit == 1.0 and found.grid == [1.0] * 80
        assert found.theta == pytest.approx((0.2, 0.1, 0.0)), "a tie goes to the first candidate"


def test_the_best_of_the_grid_is_taken() -> None:
    layers = [window(rows=24, seed=s) for s in range(3)]
    for objective in ("weighted", "overlap"):
        predictor = EmaPredictor(objective=objective)
        hits = hit_rates(layers, predictor.candidates(), METHOD, [5])
        rates = (hits.weighted if objective == "weighted" else hits.dynamic)[0]
        for found, row in zip(calibrate(layers, predictor, METHOD), rates.tolist(), strict=True):
            best = row.index(max(row))
            assert found.grid == row and found.hit == row[best]
            assert found.theta == tuple(predictor.candidates()[best].tolist())
            assert len(set(row)) > 5, "all candidates are alike: the test shows nothing"


def test_the_objectives_differ() -> None:
    layers = [window(rows=24, seed=s) for s in range(8)]
    found = [calibrate(layers, EmaPredictor(objective=o), METHOD) for o in ("weighted", "overlap")]
    assert [x.grid for x in found[0]] != [x.grid for x in found[1]]


def test_a_trend_is_found_where_there_is_one() -> None:
    """Blocks rise one after the other, each at a steady pace: only gamma > 0 sees the next one come."""
    n, rows = 12, 20
    peak = torch.arange(rows)[:, None] * 0.5 - torch.arange(n) * 1.0
    scores = (-(peak - 2).abs())[:, None].contiguous()
    m = Quest(block_size=1, top_k=3, sink=0, local=1, dense_layers=0)
    w = Window(scores, torch.full((rows,), n, dtype=torch.int32))
    (found,) = calibrate([w], EmaPredictor(objective="overlap"), m)
    assert found.theta[2] > 0 and found.hit > max(found.grid[0::4])


def test_a_fixed_theta_is_the_only_candidate() -> None:
    (found,) = calibrate([window()], EmaPredictor(theta=[0.5, 0.25, 1.0]), METHOD)
    assert found.theta == (0.5, 0.25, 1.0) and found.grid == [found.hit]


def test_nothing_to_count_is_not_a_number_and_takes_the_first_candidate() -> None:
    forced = Quest(block_size=4, top_k=5, sink=2, local=3, dense_layers=0)
    (found,) = calibrate([window()], EmaPredictor(), forced)
    assert math.isnan(found.hit) and found.theta == pytest.approx((0.2, 0.1, 0.0))


def test_locality_lists_each_predictor_by_delta() -> None:
    layers, deltas = [window(seed=s, rows=12) for s in range(3)], (1.0, 1.2, 2.0)
    thetas = [(0.4, 0.3, 0.25), (0.6, 0.1, 0.0), (0.2, 0.5, 0.75)]
    rows = locality(layers, thetas, METHOD, deltas)
    names = [(r["predictor"], r["delta"]) for r in rows]
    assert names == [(p, d) for d in deltas for p in ("ema", "last_scores")] + [("last_a", 1.0)]
    for r in rows[:-1]:
        used = thetas if r["predictor"] == "ema" else [LAST_SCORES] * 3
        width = {1.0: 5, 1.2: 6, 2.0: 10}[r["delta"]]
        wanted = [by_steps(w, t, METHOD, width) for w, t in zip(layers, used, strict=True)]
        assert r["hit_all"] == pytest.approx(fmean(x[0] for x in wanted), abs=1e-5)
        assert r["hit_dynamic"] == pytest.approx(fmean(x[1] for x in wanted), abs=1e-5)
    for p in ("ema", "last_scores"):
        hits = [r["hit_all"] for r in rows if r["predictor"] == p]
        assert hits == sorted(hits), "a larger P cannot hit less"


def test_the_overlap_with_the_last_selection_is_that_of_the_sets() -> None:
    w = window(rows=10, tokens=53)
    every, dynamic = [], []
    before: list[set[int]] = []
    for i, tokens in enumerate(w.lengths.tolist()):
        m, n = METHOD, METHOD.blocks(tokens)
        chosen = ck.select(w.scores[i : i + 1].contiguous(), w.lengths[i : i + 1], 4, m.top_k, m.sink, m.local).ids
        now = sets(chosen)
        if before:
            pairs = [shares(a, b, [0.0] * 99, m, n) for a, b in zip(now, before, strict=True)]
            every.append(fmean(p[0] for p in pairs))
            dynamic.append(fmean(p[1] for p in pairs))
        before = now
    found = last_overlap([w], METHOD)
    assert float(found.all) == pytest.approx(fmean(every), abs=1e-6)
    assert float(found.dynamic) == pytest.approx(fmean(dynamic), abs=1e-6)
    assert float(last_overlap([w, w], METHOD).all) == pytest.approx(float(found.all))


def test_rows_that_would_be_dense_do_not_count() -> None:
    """The first rows of a window hold no more blocks than K: decoding them selects nothing."""
    m = Quest(block_size=4, top_k=5, sink=1, local=2, dense_layers=0, dense_len=0)
    w = window(rows=8, tokens=24)  # rows of 17 ... 24 tokens: up to 20 are five blocks
    hits = hit_rates([w], torch.tensor([LAST_SCORES]), m, [5])
    assert float(hits.all) == pytest.approx(by_steps(w, LAST_SCORES, m, 5)[0], abs=1e-6)
    assert float(hits.all) < 1
    later = Quest(block_size=4, top_k=5, sink=1, local=2, dense_layers=0, dense_len=24)
    last = float(hit_rates([w], torch.tensor([LAST_SCORES]), later, [5]).all)
    assert last != float(hits.all), "only the last row selects"
