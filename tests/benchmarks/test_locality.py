# SPDX-License-Identifier: Apache-2.0
"""Samples without text, and what is refused."""

from typing import Any

import pytest

from prr_pipeline.benchmarks.base import Benchmark
from prr_pipeline.benchmarks.locality import Locality
from prr_pipeline.errors import ConfigError


def no_tokenizer(prompt: str, prefix: str) -> int:
    raise AssertionError("there is no text to count tokens of")


def test_samples_have_ids_and_no_text() -> None:
    locality = Locality(length=640, num_samples=3, max_new_tokens=9)
    locality.check()
    made = list(locality.samples(no_tokenizer, seed=0))
    assert [s.id for s in made] == [f"locality-640-{i:04d}" for i in range(3)]
    assert {(s.task, s.prompt, s.answer_prefix, s.answers, s.max_new_tokens) for s in made} == {
        ("locality", "", "", (), 9)
    }
    assert made == list(locality.samples(no_tokenizer, seed=1)), "ids must not change"
    assert locality.score(made[0], "anything") is None


def test_it_is_marked_as_synthetic() -> None:
    assert (Benchmark.queries, Locality.queries) == ("model", "synthetic")
    assert not Locality.chat and Locality.ignore_eos


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"drift": -0.1}, "benchmark=locality: drift must be from 0 to 1, got -0.1"),
        ({"drift": float("nan")}, "drift must be from 0 to 1, got nan"),
        ({"noise": 1.01}, "benchmark=locality: noise must be from 0 to 1, got 1.01"),
        ({"noise": float("nan")}, "noise must be from 0 to 1, got nan"),
        ({"overlap": 1.0}, "benchmark=locality: overlap must be between 0 and 1, got 1.0"),
        ({"vary": "speed"}, "benchmark=locality: vary must be drift or noise, got 'speed'"),
        ({"block_weight": 1.5}, "block_weight must be from 0 to 1, got 1.5"),
        ({"max_new_tokens": 1}, "max_new_tokens must be a whole number >= 2, got 1"),
        ({"length": 33}, "length must be a whole number >= 34, got 33"),
        ({"num_samples": 0}, "num_samples must be a whole number >= 1, got 0"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Locality(**wrong).check()
    assert words in str(error.value)


@pytest.mark.parametrize("edge", [0, 0.0, 1, 1.0])
def test_the_edges_are_allowed(edge: float) -> None:
    Locality(drift=edge, noise=edge, block_weight=edge).check()
