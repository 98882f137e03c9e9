# SPDX-License-Identifier: Apache-2.0
"""Jobs on a tiny random model, and what they left."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from prr_pipeline import pipeline
from prr_pipeline.artifacts import Records
from prr_pipeline.errors import PrrError
from prr_pipeline.stages.job import Job

Compose = Callable[..., DictConfig]

TINY = (
    "debug=tiny",
    "benchmark.tasks=[vt]",
    "benchmark.length=1280",
    "benchmark.num_samples=1",
    "model.architecture.num_hidden_layers=2",
    "runtime.profile_repeats=1",
)
TIMES = ("ms", "_ms", "ms_per_token")


class Runner:
    """Runs jobs into one folder."""

    def __init__(self, composed: Compose, output: Path):
        self.composed, self.output = composed, output

    def cfg(self, *words: str) -> DictConfig:
        return self.composed(f"output={self.output}", *words)

    def __call__(self, *words: str) -> Path:
        """Run a job; returns its folder."""
        cfg = self.cfg(*words)
        pipeline.run(cfg)
        return Job(cfg).root

    def root(self, *words: str) -> Path:
        return Job(self.cfg(*words)).root

    def refused(self, *words: str, kind: type[PrrError] = PrrError) -> str:
        with pytest.raises(kind) as error:
            self(*words)
        return str(error.value)


def short_text(folder: Path) -> tuple[str, ...]:
    """Words of a job of little work: windows of a text, four decode steps a sample and mode, nothing drawn."""
    file = folder / "book.txt"
    file.write_text(" ".join(f"w{i}" for i in range(1500)))
    return (
        "debug=tiny",
        "benchmark=text",
        f"benchmark.path={file}",
        "benchmark.length=420",
        "benchmark.num_samples=4",
        "benchmark.max_new_tokens=5",
        "model.architecture.num_hidden_layers=2",
        "runtime.modes=[prr]",
        "stages=[calibrate,decode]",
    )


def without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: without_times(v) for k, v in data.items() if not k.endswith(TIMES)}
    return [without_times(x) for x in data] if isinstance(data, list) else data


def results(root: Path) -> list[dict[str, Any]]:
    return json.loads((root / "evaluate" / "results.json").read_text())["rows"]


def samples(root: Path, stage: str = "decode") -> list[dict[str, Any]]:
    return Records(root / stage / "samples.jsonl").read()


def manifest(root: Path, stage: str) -> dict[str, Any]:
    return json.loads((root / stage / "manifest.json").read_text())


def status(root: Path) -> dict[str, Any]:
    return json.loads((root / "status.json").read_text())
