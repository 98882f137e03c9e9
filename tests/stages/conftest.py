# SPDX-License-Identifier: Apache-2.0
"""Jobs into a folder of their own, and parts of them that a test does without."""

from pathlib import Path

import pytest
from jobs import Compose, Runner, short_text

from prr_pipeline.models import load


@pytest.fixture
def run(composed: Compose, tmp_path: Path) -> Runner:
    return Runner(composed, tmp_path)


@pytest.fixture
def short(tmp_path: Path) -> tuple[str, ...]:
    """Words of a job of little work."""
    return short_text(tmp_path)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails."""
    monkeypatch.setattr(load, "load", lambda *_: pytest.fail("a model was loaded"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a short job's time."""
    monkeypatch.setattr("prr_pipeline.stages.evaluate._plots", lambda *_: [])
