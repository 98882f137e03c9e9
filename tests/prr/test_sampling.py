# SPDX-License-Identifier: Apache-2.0
"""Sampling: greedy, nucleus and its edges, and a stream that depends on seed and sample alone."""

import math
from collections import Counter

import pytest
import torch

from prr_pipeline.prr.sampling import Sampler

LOGITS = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]]))


def draws(logits: torch.Tensor, n: int = 400, temperature: float = 1.0, top_p: float = 1.0) -> Counter[int]:
    sampler = Sampler(temperature, top_p, 0, "sample")
    return Counter(sampler(logits) for _ in range(n))


def test_greedy_takes_the_highest_and_of_equals_the_first() -> None:
    sampler = Sampler(0.0, 0.1, 0, "x")
    assert sampler(LOGITS) == 1
    assert sampler(torch.tensor([[1.0, 3.0, 3.0, 2.0]])) == 1
    assert sampler(torch.zeros(1, 50_000)) == 0
    assert sampler(torch.tensor([[-math.inf, -5.0, -math.inf]])) == 1


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (0.01, {1}),
        (0.49, {1}),
        (0.51, {1, 2}),
        (0.74, {1, 2}),
        (0.76, {0, 1, 2}),
        (0.87, {0, 1, 2}),  # 0 before 3, its equal
        (0.88, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, nucleus: set[int]) -> None:
    assert set(draws(torch.log(torch.tensor([[0.125, 0.5, 0.25, 0.125]])), top_p=top_p)) == nucleus


def test_inside_the_nucleus_probabilities_keep_their_proportions() -> None:
    found = draws(LOGITS, n=6000, top_p=0.75)
    assert set(found) == {1, 2}
    assert found[1] / 6000 == pytest.approx(2 / 3, abs=0.02)


def test_at_top_p_1_the_last_of_many_is_still_drawn() -> None:
    logits = torch.full((1, 20_000), math.log(1 / 20_000))
    assert max(draws(logits, n=300)) > 19_800


def test_temperature_flattens_and_sharpens() -> None:
    hot, cold = (draws(LOGITS, n=2000, temperature=t) for t in (10.0, 0.2))
    assert hot[0] / 2000 == pytest.approx(0.23, abs=0.04)
    assert cold[1] / 2000 == pytest.approx(0.5**5 / (0.1**5 + 0.5**5 + 0.25**5 + 0.15**5), abs=0.02)


def test_half_precision_logits_are_taken() -> None:
    assert set(draws(LOGITS.bfloat16(), top_p=0.3)) == {1}


def stream(seed: int, key: str, n: int = 30) -> list[int]:
    sampler = Sampler(1.0, 1.0, seed, key)
    return [sampler(torch.zeros(1, 1000)) for _ in range(n)]


def test_a_stream_is_fixed_by_seed_and_sample() -> None:
    assert stream(0, "vt-0001") == stream(0, "vt-0001")
    seen = {tuple(stream(seed, key)) for seed in (0, 1, 2, 2**32 - 1) for key in ("vt-0001", "vt-0002", "")}
    assert len(seen) == 12, "every seed and every sample has a stream of its own"


def test_the_stream_is_not_the_process_wide_one() -> None:
    torch.manual_seed(5)
    first = stream(0, "a")
    state = torch.get_rng_state()
    torch.manual_seed(6)
    assert stream(0, "a") == first
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "drawing left the global generator alone"
