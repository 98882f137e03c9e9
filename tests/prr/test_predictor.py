# SPDX-License-Identifier: Apache-2.0
"""The predictor's arithmetic is equations 2 and 3, its grid the paper's, and its values are checked."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cutlass_kernels as ck
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError
from prr_pipeline.prr.predictor import LAST_SCORES, EmaPredictor, PredictorState

METHOD = Quest(block_size=4, top_k=3, sink=1, local=1, dense_layers=0)


def by_hand(history: list[float], theta: tuple[float, float, float]) -> float:
    """Level and trend of one block, in Python's floats."""
    alpha, beta, gamma = theta
    level, trend = history[0], 0.0
    for score in history[1:]:
        level, trend = (
            alpha * score + (1 - alpha) * level,
            beta * (score - level) + (1 - beta) * trend,
        )
    return level + gamma * trend


@given(
    history=st.lists(st.floats(-100, 100), min_size=1, max_size=12),
    theta=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1)),
)
@settings(deadline=None)
def test_level_and_trend_are_equations_2_and_3(history: list[float], theta: tuple[float, float, float]) -> None:
    state = PredictorState(METHOD, torch.empty(1, 1, 8), theta)
    for score in history:
        state.update(torch.full((1, 1, 8), score), torch.tensor([32], dtype=torch.int32), 3)
    forecast = state.level + theta[2] * state.trend
    assert forecast[0, 0].tolist() == pytest.approx([by_hand(history, theta)] * 8, rel=1e-4, abs=1e-3)


def test_a_new_block_begins_with_its_first_score_and_no_trend() -> None:
    state = PredictorState(METHOD, torch.empty(1, 1, 4), (0.5, 0.5, 1.0))
    lens = torch.tensor([8], dtype=torch.int32)
    state.update(torch.tensor([[[1.0, 2.0, 9.0, 9.0]]]), lens, 2)
    assert state.level[0, 0, :2].tolist() == [1.0, 2.0]
    assert state.level[0, 0, 2:].isnan().all() and not state.trend.any(), "blocks without tokens learn nothing"
    state.update(torch.tensor([[[3.0, 2.0, 7.0, 9.0]]]), lens + 1, 2)
    assert state.level[0, 0, :3].tolist() == [2.0, 2.0, 7.0]
    assert state.trend[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_the_theta_of_last_scores_predicts_what_the_last_scores_select(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    state = PredictorState(METHOD, torch.empty(1, 2, 9), LAST_SCORES)
    for tokens in range(28, 34):
        scores, lens = torch.randn(1, 2, 9, generator=gen), torch.tensor([tokens], dtype=torch.int32)
        state.update(scores, lens, METHOD.top_k)
        assert torch.equal(state.ids, ck.select(scores, lens + 1, 4, 3, 1, 1).ids)


def test_a_prediction_is_wide_as_the_budget_and_holds_the_forced_blocks() -> None:
    state = PredictorState(METHOD, torch.empty(1, 2, 9), (0.4, 0.3, 0.5))
    scores = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
    for width in (0, 3, 5, 9, 0, 4):
        state.update(scores, torch.tensor([32], dtype=torch.int32), width)  # 8 blocks, the ninth born next
        assert state.ids.shape == (1, 2, width)
        for row in state.ids[0].tolist() if width else ():
            assert row == sorted(row) and {0, 8} <= set(row), "sink and the block of the next token"
            assert len(set(row)) == width


def test_nothing_known_predicts_the_forced_blocks_alone() -> None:
    state = PredictorState(METHOD, torch.empty(1, 1, 9), LAST_SCORES)
    state.update(torch.full((1, 1, 9), math.nan), torch.tensor([30], dtype=torch.int32), 4)
    assert state.ids.tolist() == [[[0, 7, -1, -1]]]


def test_the_grid_is_the_papers() -> None:
    grid = EmaPredictor().candidates()
    wanted = list(product((0.2, 0.4, 0.6, 0.8), (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 0.25, 0.5, 0.75)))
    assert grid.shape == (80, 3) and grid.dtype == torch.float32
    assert torch.equal(grid, torch.tensor(wanted))
    assert torch.equal(EmaPredictor(theta=[0.5, 1.0, 0.0]).candidates(), torch.tensor([[0.5, 1.0, 0.0]]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"theta": [1.0, 1.0]}, "predictor.theta has 2 values, expected alpha, beta, gamma"),
        ({"theta": []}, "predictor.theta has 0 values, expected alpha, beta, gamma"),
        ({"theta": [0.0, 1.0, 0.0]}, "predictor.theta[0] = [0.0], expected values in (0, 1]"),
        ({"theta": [1.0, 1.5, 0.0]}, "predictor.theta[1] = [1.5], expected values in (0, 1]"),
        ({"theta": [1.0, 1.0, -0.1]}, "predictor.theta[2] = [-0.1], expected values in [0, 1]"),
        ({"late_theta": [1.0]}, "predictor.late_theta has 1 values, expected alpha, beta, gamma"),
        ({"late_theta": [0.0, 1.0, 0.0]}, "predictor.late_theta[0] = [0.0], expected values in (0, 1]"),
        ({"late_theta": [1.0, 1.0, 1.5]}, "predictor.late_theta[2] = [1.5], expected values in [0, 1]"),
        ({"alphas": [0.5, 1.1]}, "predictor.alphas = [0.5, 1.1], expected values in (0, 1]"),
        ({"betas": [0.0]}, "predictor.betas = [0.0], expected values in (0, 1]"),
        ({"gammas": []}, "predictor.gammas = [], expected values in [0, 1]"),
        ({"gammas": [float("nan")]}, "predictor.gammas = [nan], expected values in [0, 1]"),
        ({"objective": "best"}, "predictor.objective = 'best', expected one of weighted, overlap"),
        ({"window": 1}, "predictor.window = 1 rows, expected at least 2 (one to predict from)"),
    ],
)
def test_values_out_of_range_are_refused(options: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        EmaPredictor(**options).check()
    assert str(error.value) == expected


@pytest.mark.parametrize("options", [{}, {"theta": [1.0, 1.0, 0.0]}, {"theta": [0.1, 0.1, 1.0]}, {"gammas": [0.0]}])
def test_values_at_the_borders_pass(options: dict) -> None:
    EmaPredictor(**options).check()
