# SPDX-License-Identifier: Apache-2.0
"""Speed without weights or text: caches of random keys, and queries whose motion sets how far selections change.

Nothing is asked, read or scored. What a sparse method does with these keys and queries is its own work at its true
size; how much of A stays from step to step is measured in every run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from prr_pipeline.benchmarks.base import Benchmark, CountTokens, Sample
from prr_pipeline.errors import ConfigError

COMPONENTS = ("drift", "noise")  # of the motion of queries


@dataclass(kw_only=True)
class Locality(Benchmark):
    """Decode steps on synthetic keys, values and queries.

    Attributes:
        length: tokens of the cache, the generated ones included.
        num_samples: caches.
        max_new_tokens: tokens to generate; the first costs no step, so at least 2.
        drift: change of a query's mean from step to step, 0 (none) to 1 (all new): z' = sqrt(1 - drift^2) z + drift e.
        noise: weight of what is new in a query each step, 0 (none) to 1 (all): q = sqrt(1 - noise^2) z + noise e.
        overlap: share of A's dynamic blocks that shall be in the A before, 0 to 1; the drift or the noise that gives it
            is then found by measurement.
        vary: which of the two, "drift" or "noise"; its own value is not used then, the other one's is.
        block_weight: share of a key's variance that all keys of a block have in common, 0 to 1.
    """

    chat: ClassVar[bool] = False
    ignore_eos: ClassVar[bool] = True
    queries: ClassVar[str] = "synthetic"

    name: str = "locality"
    length: int = 2048
    num_samples: int = 1
    max_new_tokens: int = 33
    drift: float = 0.33
    noise: float = 0.0
    overlap: float | None = None
    vary: str = "drift"
    block_weight: float = 0.5

    def check(self) -> None:
        """Validate the fields; see Benchmark.check."""
        self._at_least("max_new_tokens", 2)
        self._at_least("length", self.max_new_tokens + 1)
        self._at_least("num_samples", 1)
        for key in (*COMPONENTS, "block_weight"):
            if not 0 <= getattr(self, key) <= 1:
                raise ConfigError(f"benchmark={self.name}: {key} must be from 0 to 1, got {getattr(self, key)!r}")
        if self.overlap is not None and not 0 < self.overlap < 1:
            raise ConfigError(f"benchmark={self.name}: overlap must be between 0 and 1, got {self.overlap!r}")
        if self.vary not in COMPONENTS:
            raise ConfigError(f"benchmark={self.name}: vary must be {' or '.join(COMPONENTS)}, got {self.vary!r}")

    def samples(self, count_tokens: CountTokens, seed: int) -> Iterator[Sample]:
        """Yield samples without text; see Benchmark.samples."""
        for index in range(self.num_samples):
            yield Sample(
                id=f"locality-{self.length}-{index:04d}",
                task="locality",
                prompt="",
                answer_prefix="",
                answers=(),
                max_new_tokens=self.max_new_tokens,
            )

    def score(self, sample: Sample, prediction: str) -> None:
        """Score nothing."""
        return None
