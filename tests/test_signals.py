# SPDX-License-Identifier: Apache-2.0
"""Killed or stopped by a key, a job loses nothing but the sample it was at."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from processes import book, start

from prr_pipeline import pipeline


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: without_times(v) for k, v in data.items() if not k.endswith(("ms", "ms_per_token"))}
    return [without_times(x) for x in data] if isinstance(data, list) else data


def test_a_killed_decode_resumes_and_ends_as_an_unbroken_one(
    tmp_path: Path, composed: Callable[..., DictConfig], caplog: pytest.LogCaptureFixture
) -> None:
    words = (*book(tmp_path, 12), "tracker=none", "stages=[calibrate,decode]", "benchmark.max_new_tokens=12")
    process = start(tmp_path, *words, f"output={tmp_path}/broken")
    found: list[Path] = []
    while process.poll() is None and not found:
        found = [p for p in (tmp_path / "broken").glob("*/*/decode/samples.jsonl") if p.stat().st_size]
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert found, "it ended before it could be killed"
    path = found[0]
    kept = path.read_text().split("\n")[:-1]
    assert 0 < len(kept) < 24 and not (path.parent / "manifest.json").exists()
    assert json.loads((path.parents[1] / "status.json").read_text())["state"] == "running"

    with caplog.at_level(logging.INFO):
        pipeline.run(composed(*words, f"output={tmp_path}/broken"))
    assert f"decode: {len(kept) // 2} samples are there already, going on after them" in caplog.text
    assert path.read_text().splitlines()[: len(kept) // 2 * 2] == kept[: len(kept) // 2 * 2], "done again"
    pipeline.run(composed(*words, f"output={tmp_path}/whole"))
    whole = tmp_path / "whole" / path.relative_to(tmp_path / "broken")
    assert without_times(lines(path)) == without_times(lines(whole)) and len(lines(path)) == 24
    calibrations = [without_times(lines(p.parents[1] / "calibrate" / "samples.jsonl")) for p in (path, whole)]
    assert calibrations[0] == calibrations[1]


def test_ctrl_c_ends_with_one_line_that_says_what_is_next(tmp_path: Path) -> None:
    # with W&B, offline; answers so long that the decode does not end before the signal comes, on a busy machine either
    words = (*book(tmp_path, 16), "stages=[calibrate,decode]", "benchmark.max_new_tokens=60")
    process = start(tmp_path, *words)
    while process.poll() is None and not list(tmp_path.glob("runs/*/*/decode/samples.jsonl")):
        time.sleep(0.01)
    assert process.poll() is None, "it ended before it could be interrupted"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to W&B's processes, too
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == (
        "prr_pipeline: interrupted. What is done is kept: the next run (without force) resumes"
    )
    assert "wandb sync " in said, "the run was finished"
    (status,) = tmp_path.glob("runs/*/*/status.json")
    found = json.loads(status.read_text())
    assert (found["stage"], found["state"]) == ("decode", "failed") and found["error"].startswith("KeyboardInterrupt")
