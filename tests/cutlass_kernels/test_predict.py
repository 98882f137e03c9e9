# SPDX-License-Identifier: Apache-2.0
"""predict against a loop over single blocks: eq 3 then eq 2, and P by the selection rule one token later."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import INF, NAN, close, examples, id_lists, rule, same_bits, seeds
from torch import Tensor

import cutlass_kernels as ck

T = 16
THETA = (0.4, 0.3, 0.5)


class Predictor:
    """The op with its state."""

    def __init__(
        self, B: int, H: int, N: int, theta: tuple[float, ...] = THETA, width: int = 3, sink: int = 0, local: int = 1
    ):
        self.level, self.trend = torch.full((B, H, N), NAN), torch.zeros(B, H, N)
        self.theta = torch.tensor([theta] * B)
        self.ids = torch.full((B, H, width), 77, dtype=torch.int32)
        self.sink, self.local = sink, local

    def __call__(self, scores: Tensor, lengths: list[int]) -> dict[tuple[int, int], list[int]]:
        state = (self.level, self.trend, self.theta)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        out = ck.predict(scores, *state, seq_lens, T, self.sink, self.local, self.ids)
        assert out is self.ids
        return id_lists(out)

    def prediction(self) -> Tensor:
        return self.level + self.theta[:, 2, None, None] * self.trend


def scalar_step(level: float, trend: float, score: float, theta: tuple[float, ...]) -> tuple[float, float]:
    """Eq 3 for one block."""
    if not math.isfinite(score):
        return level, trend
    if math.isnan(level):
        return score, 0.0
    alpha, beta, _ = theta
    return alpha * score + (1 - alpha) * level, beta * (score - level) + (1 - beta) * trend


thetas = st.tuples(*(st.sampled_from(x) for x in ((0.2, 0.6, 1.0), (0.1, 0.5, 1.0), (0.0, 0.25, 1.0))))


@examples(60)
@given(seeds, thetas, st.integers(0, 9), st.integers(0, 2), st.integers(0, 2))
def test_state_and_prediction_follow_a_scalar_loop(
    seed: int, theta: tuple[float, ...], width: int, sink: int, local: int
) -> None:
    """Ragged rows that grow, blocks that are born, scores that are not finite, other values for every block."""
    roll = random.Random(seed)
    width = 0 if width == 0 else max(width, sink + local)
    B, H, N = 2, 2, 8
    lengths = [roll.randint(1, 90), roll.choice((0, 15, 16, 17, 31, 32, 33))]
    p = Predictor(B, H, N, theta, width, sink, local)
    want = {(b, h, i): (NAN, 0.0) for b in range(B) for h in range(H) for i in range(N)}
    for _ in range(6):
        values = [roll.choice((roll.gauss(0, 3), roll.gauss(0, 3), -INF, INF, NAN)) for _ in range(B * H * N)]
        scores = torch.tensor(values).view(B, H, N)
        P = p(scores, lengths)
        for (b, h, i), (level, trend) in want.items():
            inside = i < -(-lengths[b] // T)
            want[b, h, i] = scalar_step(level, trend, float(scores[b, h, i]), theta) if inside else (level, trend)
            torch.testing.assert_close(float(p.level[b, h, i]), want[b, h, i][0], atol=2e-5, rtol=2e-5, equal_nan=True)
            torch.testing.assert_close(float(p.trend[b, h, i]), want[b, h, i][1], atol=2e-5, rtol=2e-5)
        ahead = p.prediction()
        for (b, h), ids in P.items():
            n = -(-(lengths[b] + 1) // T) if lengths[b] else 0
            assert ids == rule(ahead[b, h].tolist(), n, width, sink, local)
            assert p.ids[b, h].tolist() == ids + [-1] * (width - len(ids))
        lengths = [n + 1 if n else 0 for n in lengths]


@pytest.mark.parametrize("theta", [(0.2, 0.1, 0.75), THETA, (1.0, 1.0, 1.0)])
def test_a_constant_is_predicted_at_once_and_stays(theta: tuple[float, ...]) -> None:
    scores, p = torch.tensor([[[3.0, -2.0, 5.0, 0.0]]]), Predictor(1, 1, 4, theta)
    for _ in range(20):
        p(scores, [64])
        close(p.prediction(), scores, tol=1e-6)
        close(p.trend, torch.zeros(1, 1, 4), tol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 0.6])
@pytest.mark.parametrize("slope", [0.5, -2.0])
def test_a_ramp_is_extrapolated_by_gamma_one(alpha: float, slope: float) -> None:
    """In the limit level lags the next score by slope / alpha, which is what trend becomes."""
    p = Predictor(1, 1, 1, (alpha, 0.5, 1.0))
    for t in range(80):
        p(torch.full((1, 1, 1), slope * t), [16])
    assert float(p.trend) == pytest.approx(slope / alpha, rel=1e-4)
    assert float(p.prediction()) == pytest.approx(slope * 80, rel=1e-4)


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_a_step_is_forgotten_geometrically(alpha: float) -> None:
    p = Predictor(1, 1, 1, (alpha, 0.3, 0.0))
    p(torch.full((1, 1, 1), 10.0), [16])
    for t in range(1, 12):
        p(torch.zeros(1, 1, 1), [16])
        assert float(p.level) == pytest.approx(10 * (1 - alpha) ** t, rel=1e-5)


def test_trend_uses_the_level_before_this_score() -> None:
    p = Predictor(1, 1, 1, (0.5, 0.25, 1.0))
    p(torch.full((1, 1, 1), 8.0), [16])
    p(torch.full((1, 1, 1), 16.0), [16])
    assert (float(p.level), float(p.trend), float(p.prediction())) == (12.0, 2.0, 14.0)


def test_a_new_block_starts_at_its_first_score_with_no_trend() -> None:
    p = Predictor(1, 1, 3)
    p(torch.tensor([[[1.0, 2.0, 9.0]]]), [32])  # the third block holds no token yet
    assert p.level[0, 0].tolist()[:2] == [1.0, 2.0] and p.level[0, 0, 2].isnan()
    p(torch.tensor([[[1.0, 2.0, -4.0]]]), [33])
    assert float(p.level[0, 0, 2]) == -4.0 and float(p.trend[0, 0, 2]) == 0.0


def test_the_forced_blocks_are_those_of_the_next_length() -> None:
    """At 32 tokens the next one opens block 2: it is in P before it has a score."""
    scores = torch.tensor([[[1.0, 5.0, NAN, NAN, NAN]]])
    assert Predictor(1, 1, 5, width=2)(scores, [31]) == {(0, 0): [0, 1]}
    assert Predictor(1, 1, 5, width=2)(scores, [32]) == {(0, 0): [1, 2]}
    assert Predictor(1, 1, 5, width=1)(scores, [32]) == {(0, 0): [2]}
    many = torch.tensor([[[0.0, 9.0, 8.0, 7.0, NAN]]])
    assert Predictor(1, 1, 5, width=4, sink=1, local=2)(many, [64]) == {(0, 0): [0, 1, 3, 4]}


@examples(40)
@given(seeds, st.integers(1, 6), st.booleans())
def test_alpha_one_gamma_zero_predicts_the_last_scores(seed: int, width: int, negative: bool) -> None:
    """What reusing the last scores predicts, for all-negative rows as for others."""
    gen = torch.Generator().manual_seed(seed)
    p = Predictor(1, 2, 7, (1.0, 1.0, 0.0), width)
    for n in (95, 96, 97, 98):
        scores = torch.randn(1, 2, 7, generator=gen)
        scores = -scores.abs() - 1 if negative else scores
        P = p(scores, [n])
        total = -(-n // T)
        assert torch.equal(p.level[:, :, :total], scores[:, :, :total])
        seen = scores.masked_fill(torch.arange(7) >= total, NAN)
        assert {(0, h): rule(seen[0, h].tolist(), -(-(n + 1) // T), width, 0, 1) for h in range(2)} == P


def test_all_negative_rows_rank_like_any_other() -> None:
    scores = torch.tensor([[[-50.0, -10.0, -30.0, -20.0, -40.0]]])
    p = Predictor(1, 1, 5, width=3)
    for _ in range(3):
        assert p(scores, [79]) == {(0, 0): [1, 3, 4]}


def test_ties_go_to_the_lowest_id() -> None:
    assert Predictor(1, 1, 6, width=3)(torch.full((1, 1, 6), -0.5), [90]) == {(0, 0): [0, 1, 5]}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_scores_that_are_not_finite_change_nothing(bad: float) -> None:
    p = Predictor(1, 1, 4)
    p(torch.tensor([[[1.0, 2.0, 3.0, NAN]]]), [64])
    p(torch.tensor([[[1.5, 1.0, 7.0, bad]]]), [64])
    level, trend = p.level.clone(), p.trend.clone()
    p(torch.full((1, 1, 4), bad), [64])
    assert same_bits(p.level, level) and same_bits(p.trend, trend)
    p(torch.tensor([[[bad, 4.0, bad, 1.0]]]), [64])
    assert same_bits(p.level[:, :, 0::2], level[:, :, 0::2]) and same_bits(p.trend[:, :, 0::2], trend[:, :, 0::2])
    assert float(p.level[0, 0, 1]) != float(level[0, 0, 1]) and float(p.level[0, 0, 3]) == 1.0


def test_an_empty_row_predicts_nothing_and_learns_nothing() -> None:
    p = Predictor(2, 1, 3)
    assert p(torch.ones(2, 1, 3), [0, 40]) == {(0, 0): [], (1, 0): [0, 1, 2]}
    assert p.level[0].isnan().all()


def test_every_row_has_its_own_theta() -> None:
    p = Predictor(2, 1, 1)
    p.theta = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.5, 1.0]])
    p(torch.zeros(2, 1, 1), [16, 16])
    p(torch.full((2, 1, 1), 4.0), [16, 16])
    assert p.level.flatten().tolist() == [4.0, 2.0] and p.prediction().flatten().tolist() == [4.0, 4.0]
