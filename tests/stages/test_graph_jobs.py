# SPDX-License-Identifier: Apache-2.0
"""A job on the engine of a GPU leaves what it leaves on a CPU; its steps run eagerly here."""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import TINY, Runner, results, samples, without_times

from prr_pipeline.prr.graphs import GraphEngine, GraphOptions, GraphRunner
from prr_pipeline.prr.phase import AttentionPhase, Plan
from prr_pipeline.stages import profile, profile_gpu
from prr_pipeline.stages.job import Job

HOW = GraphOptions(burst=5, compiled=False, captured=False, linears=False)
WORDS = (*TINY, "benchmark.num_samples=2", "stages=[calibrate,decode,evaluate]")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphEngine]:
    """Jobs take the engine of a GPU; the list has the engines that they made."""
    made = []

    def engine(job: Job) -> GraphEngine:
        shape = job.loaded.shape
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, job.runtime.prefill_chunk, job.predictor.window)
        made.append(GraphEngine(job.loaded.model, job.method, *sizes, how=HOW))
        return made[-1]

    found = cached_property(engine)
    found.__set_name__(Job, "engine")
    monkeypatch.setattr(Job, "engine", found)
    monkeypatch.setattr(Job, "_check_baselines", lambda _: None)
    return made


def told(root: Path) -> list[dict]:
    """Samples without what only one of the engines can say."""
    rows = without_times(samples(root))
    parts = ("select_ms", "attend_ms", "repair_ms", "predict_ms", "other_ms")
    for row in rows:
        row["step_records"] = [{k: v for k, v in s.items() if k not in parts} for s in row["step_records"]]
    return rows


@pytest.mark.parametrize("method", ["quest", "infllm_v2"])
def test_both_engines_leave_the_same(
    run: Runner, graphs: list[GraphEngine], no_plots: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    root = run(*WORDS, f"dsa={method}")
    on_graphs, rows = told(root), without_times(results(root))
    assert len(graphs) == 1 and graphs[0]._arena is None, "the cache was given back"
    monkeypatch.undo()
    monkeypatch.setattr("prr_pipeline.stages.evaluate._plots", lambda *_: [])
    other = run(*WORDS, f"dsa={method}", "force=true")
    assert other == root and told(other) == on_graphs and without_times(results(other)) == rows


def test_plots_are_drawn_without_the_parts_of_a_step(run: Runner, graphs: list[GraphEngine]) -> None:
    root = run(*WORDS)
    drawn = {p.name for p in (root / "evaluate" / "plots").glob("*.png")}
    assert {"overlap.png", "breakdown.png"} <= drawn


def test_a_baseline_is_timed_after_the_modes(run: Runner, graphs: list[GraphEngine], no_plots: None) -> None:
    words = ("debug=tiny", "benchmark=locality", "benchmark.length=900", "benchmark.max_new_tokens=6")
    root = run(*words, "runtime.baselines=[serial_eager]", "stages=[calibrate,decode,evaluate]")
    found = {row["mode"]: row for row in results(root)}
    assert list(found) == ["dense", "serial", "reuse", "reuse_repair", "prr", "serial_eager"]
    eager = found["serial_eager"]
    assert eager["ms_per_token"] > 0 and eager["repair"] is None and eager["tokens_equal_serial"] is None
    assert eager["dense_steps"] == 0


def test_a_profile_repairs_as_whole_steps_are_faster_and_without_them_as_the_phase_is() -> None:
    rows = [
        {"delta": delta, "halves": halves, "prr_us": phase, "prr_step_us": step}
        for delta, halves, phase, step in ((1.0, False, 9.0, 90.0), (1.0, True, 8.0, 91.0), (2.0, False, 9.0, 80.0))
    ]
    assert [row["halves"] for row in profile_gpu._faster(rows)] == [False, False]
    for row in rows:
        del row["prr_step_us"]
    assert [row["halves"] for row in profile_gpu._faster(rows)] == [True, False]


@pytest.mark.parametrize("repair", ["exact", "union"])
def test_a_profile_times_whole_steps_of_each_delta(
    run: Runner, graphs: list[GraphEngine], monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    """As on a GPU; each delta with the repair that is its faster one, and the cache is as it was for the next."""
    seen: list[tuple[Any, ...]] = []
    speculative = AttentionPhase.speculative

    def spied(phase: AttentionPhase, plan: Plan, *args: Any) -> Any:
        seen.append((plan.width, plan.halves, plan.learns, plan.all_or_nothing, plan.repair))
        return speculative(phase, plan, *args)

    monkeypatch.setattr(AttentionPhase, "speculative", spied)
    job = Job(run.cfg(*WORDS, f"runtime.repair={repair}"))
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(GraphRunner, "_timed", lambda runner, body, steps: body(steps) or next(times) * float(steps))
    top_k, ways = job.method.top_k, [(1.0, False), (2.0, True)]
    rows: list[dict[str, Any]] = [{"delta": d, "halves": halves} for d, halves in ways]
    learning = profile_gpu._steps(job, 1000, rows)
    wanted = [(int(d * top_k), halves if repair == "exact" else None, True, False, repair) for d, halves in ways]
    alike = [(int(ways[0][0] * top_k), None, learns, True, "exact") for learns in (True, False)]
    assert list(dict.fromkeys(seen)) == [*wanted, *alike]
    us = [row[key] for row in rows for key in ("serial_step_us", "prr_step_us")]
    assert us[0] == us[2] > us[1] > us[3] > learning > 0, "each burst was told to be faster than the one before"
    assert graphs[0]._arena is None, "its room is the next context's"
    seen.clear()
    job.method.dense_len = 1000  # the first length at which it selects is the last of the profile's steps
    profile_gpu._steps(job, 1000, rows)
    assert seen and job.method.selects(job.method.dense_layers, 1000) and not job.method.selects(1, 999)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", 1), ("cuda", 2)])
def test_a_gpu_is_profiled_under_the_threads_that_decode_will_have(device, wanted, monkeypatch) -> None:
    """Another number of them, and a compiled model is compiled again."""
    seen = []
    monkeypatch.setattr(profile, "_profile", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        profile.run(SimpleNamespace(device=device, runtime=SimpleNamespace(step_threads=1)), None, None)
        assert seen == [wanted] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
