# SPDX-License-Identifier: Apache-2.0
"""Jobs on synthetic queries: all stages run without text or prefill, and whatever they leave says so."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import Compose, Runner, results, samples, without_times

from prr_pipeline.errors import ConfigError
from prr_pipeline.prr.engine import Engine
from prr_pipeline.tracking import plots

WORDS = (
    "debug=tiny",
    "benchmark=locality",
    "benchmark.length=700",
    "benchmark.max_new_tokens=7",
    "model.architecture.num_hidden_layers=2",
    "runtime.profile_repeats=1",
)
EXACT = ("reuse", "reuse_repair", "prr")


@pytest.fixture
def no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "prefill", lambda *_: pytest.fail("the model read a prompt"))


@pytest.fixture
def subtitles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plots say they are of; nothing is drawn."""
    said: list[str] = []
    for name in ("plot_breakdown", "plot_overlap", "plot_layers", "plot_hit_rate"):
        monkeypatch.setattr(plots, name, lambda records, folder, model, dsa: said.append(f"{model} x {dsa}") or [])
    monkeypatch.setattr(plots, "plot_latency", lambda *_: [])
    return said


@pytest.mark.parametrize("experiment", ["glm4_quest", "qwen3_14b_infllm"])
def test_any_experiment_runs_without_text_and_says_that_queries_were_synthetic(
    run: Runner, experiment: str, no_prefill: None, subtitles: list[str]
) -> None:
    root = run(f"+experiment={experiment}", *WORDS)
    model, dsa = ("glm4", "quest") if "quest" in experiment else ("qwen3_14b", "infllm_v2")
    rows = {r["mode"]: r for r in results(root)}
    for r in rows.values():
        assert (r["model"], r["dsa"], r["benchmark"], r["queries"]) == (model, dsa, "locality", "synthetic")
        assert (r["n"], r["score"], r["steps"], r["truncated"]) == (2, None, 12, 0)
        assert r["dense_steps"] == (12 if r["mode"] == "dense" else 0)
    assert all(rows[m]["tokens_equal_serial"] == rows[m]["logits_equal_serial"] == 1.0 for m in EXACT)
    measured = rows["serial"]["overlap_last"]
    assert 0.3 < measured < 1 and rows["dense"]["overlap_last"] is None
    assert all(rows[m]["overlap_last"] == measured for m in EXACT)
    text = (root / "evaluate" / "results.md").read_text()
    assert f"[a] synthetic queries over random keys: {100 * measured:.1f} % of the dynamic blocks of A" in text
    assert "locality (synthetic queries)" in (root / "evaluate" / "paper.md").read_text()
    assert subtitles == [f"{model} (tiny, random weights, cpu) x {dsa}, synthetic queries"] * 4
    for r in samples(root):
        assert (r["prompt_tokens"], r["n_generated"], r["prefill_ms"], r["stop_reason"]) == (693, 7, None, "length")
    assert all(r["prompt_tokens"] == 693 and r["window"] == 16 for r in samples(root, "calibrate"))


def test_a_model_s_own_queries_are_called_so(run: Runner, short: Any, no_plots: None) -> None:
    root = run(*short, "benchmark.num_samples=1", "stages=[calibrate,decode,evaluate]")
    assert {r["queries"] for r in results(root)} == {"model"}
    assert "synthetic" not in (root / "evaluate" / "results.md").read_text()


def test_stages_of_different_processes_see_the_same(run: Runner, composed: Compose, tmp_path: Path) -> None:
    """What calibrate filled and what decode fills later, in another order, are one."""
    words = (*WORDS, "runtime.modes=[prr]")
    whole = run(*words, "stages=[calibrate,decode]")
    parts = Runner(composed, tmp_path / "parts")
    for stage in ("calibrate", "decode"):
        root = parts(*words, f"stages=[{stage}]")
    assert without_times(samples(root, "calibrate")) == without_times(samples(whole, "calibrate"))
    assert without_times(samples(root)) == without_times(samples(whole))
    found = samples(root)
    assert found[0]["id"] != found[2]["id"] and found[0]["tokens"] != found[2]["tokens"], "samples differ"


@pytest.mark.parametrize(("vary", "other", "still"), [("noise", "drift", "0.050"), ("drift", "noise", "0.000")])
def test_the_speed_experiment_finds_a_motion_of_its_overlap_and_says_which(
    run: Runner, vary: str, other: str, still: str, no_plots: None, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("+experiment=speed", *WORDS, "dsa=quest", "dsa.top_k=16", "budget=fixed", "runtime.modes=[prr]")
    with caplog.at_level(logging.INFO):
        root = run(*words, f"benchmark.vary={vary}", "stages=[decode,evaluate]")
    said = [m for m in (r.getMessage() for r in caplog.records) if "overlap of" in m]
    assert len(said) == 1, "it is found once a context"
    told = re.fullmatch(r"drift (0\.\d{3}) and noise (0\.\d{3}) for an overlap of 0.67 at 700 tokens", said[0])
    assert told is not None
    found = dict(zip(("drift", "noise"), told.groups(), strict=True))
    assert found[other] == still and float(found[vary]) > 0.05
    assert results(root)[0]["overlap_last"] == pytest.approx(0.67, abs=0.1)


def test_an_overlap_that_the_other_one_prevents_ends_a_job(run: Runner) -> None:
    words = ("+experiment=speed", *WORDS, "dsa=quest", "stages=[decode]", "budget=fixed", "benchmark.drift=0.9")
    said = run.refused(*words, kind=ConfigError)
    assert said.startswith("benchmark.overlap = 0.67 is out of reach at 700 tokens: with benchmark.drift = 0.9 it ")
    assert said.endswith(" even at noise 0. Lower benchmark.drift")
