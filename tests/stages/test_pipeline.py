# SPDX-License-Identifier: Apache-2.0
"""A job end to end on a tiny random model: what its stages leave, and its variants."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, Compose, Runner, manifest, results, samples, status, without_times

from prr_pipeline import pipeline
from prr_pipeline.config import MODES
from prr_pipeline.stages import profile
from prr_pipeline.stages.job import Job

KEYS = (
    *(
        "model",
        "weights",
        "size",
        "parameters",
        "device",
        "dsa",
        "benchmark",
        "queries",
        "task",
        "mode",
        "repair",
        "delta",
        "n",
        "score",
        "ms_per_token",
    ),
    *("hit_rate_dynamic", "hit_rate_all", "overlap_last", "missed_per_step", "wasted_per_step", "tokens_equal_serial"),
    *("logits_equal_serial", "dense_steps", "steps", "truncated", "nulls", "budget_tokens", "seed"),
)
JOBS = {
    "quest": ("dsa=quest_short", "benchmark.tasks=[vt,fwe]"),
    "infllm_v2": ("dsa=infllm_v2_short", "benchmark.tasks=[vt]"),
}


@pytest.fixture(scope="module", params=JOBS)
def finished(request: pytest.FixtureRequest, composed: Compose, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole job in all modes, by method: words, runner, folder."""
    words = (*TINY, *JOBS[request.param])
    runner = Runner(composed, tmp_path_factory.mktemp(request.param))
    return words, runner, runner(*words)


def tasks(root: Path) -> list[str]:
    return manifest(root, "decode")["config"]["benchmark"]["tasks"]


# ---- a whole job


def test_results_have_a_row_for_each_task_and_mode_in_order(finished: Any) -> None:
    _, _, root = finished
    rows = results(root)
    assert [(r["task"], r["mode"]) for r in rows] == [(t, m) for t in tasks(root) for m in MODES]
    for r in rows:
        assert set(KEYS) <= set(r)
        assert (r["model"], r["benchmark"], r["n"], r["seed"], r["truncated"]) == ("smollm2", "ruler", 1, 0, 0)
        assert r["repair"] == ("exact" if r["mode"] in ("reuse", "reuse_repair", "prr") else None)
        assert r["delta"] == {"reuse": 1.0, "reuse_repair": 1.0, "prr": 1.5}.get(r["mode"])
        assert 0 <= r["score"] <= 1 and r["ms_per_token"] > 0


def test_exact_modes_are_serial_to_the_bit_and_did_select(finished: Any) -> None:
    _, _, root = finished
    for r in results(root):
        assert 0 < r["steps"] <= 49
        if r["mode"] in ("reuse", "reuse_repair", "prr"):
            assert r["tokens_equal_serial"] == r["logits_equal_serial"] == 1.0
            assert 0 < r["hit_rate_dynamic"] <= r["hit_rate_all"] <= 1
            assert r["wasted_per_step"] > 0
        else:
            unknown = ("hit_rate_dynamic", "hit_rate_all", "missed_per_step", "wasted_per_step")
            assert all(r[k] is None for k in unknown)
        assert r["dense_steps"] == (r["steps"] if r["mode"] == "dense" else 0)
    assert any(r["missed_per_step"] for r in results(root)), "nothing was ever repaired"


def test_every_mode_of_a_sample_is_recorded_serial_first(finished: Any) -> None:
    _, _, root = finished
    rows = samples(root)
    order = ("serial", "dense", "reuse", "reuse_repair", "prr")
    assert [(r["id"], r["mode"]) for r in rows] == [(f"{t}-1280-0000", m) for t in tasks(root) for m in order]
    for r in rows:
        steps = r["step_records"]
        assert len(steps) == r["steps"] == r["n_generated"] - 1 == len(r["tokens"]) - 1
        assert [s["context"] for s in steps] == list(range(r["prompt_tokens"] + 1, r["prompt_tokens"] + 1 + len(steps)))
        assert r["stop_reason"] in ("length", "eos") and r["prefill_ms"] > 0
        selects = [] if r["mode"] == "dense" else [1]
        assert [x["layer"] for x in r["layer_records"]] == selects and r["sparse_layers"] == len(selects)
        assert r["ms_per_token"] == pytest.approx(sum(s["ms"] for s in steps) / len(steps))


def test_tables_and_plots_are_left_beside_the_results(finished: Any) -> None:
    _, _, root = finished
    folder = root / "evaluate"
    assert {p.name for p in (folder / "plots").iterdir()} == {
        *("breakdown.png", "overlap.png", "hit_rate.png", "layers.png", "latency.png", "layer.png")
    }
    assert len((folder / "results.csv").read_text().splitlines()) == 1 + 5 * len(tasks(root))
    text = (folder / "results.md").read_text()
    assert text.endswith(
        "\nTimes are of a CPU, where selection and speculative attention run one after the other: "
        "prr does more work than serial here, and a speed-up is the machine's load.\n"
    )
    assert text.count("one after the other") == 1 and "FAULT" not in text
    assert "## Beside the paper" in (folder / "paper.md").read_text()


def test_manifests_name_what_was_read_and_written(finished: Any) -> None:
    _, _, root = finished
    assert manifest(root, "decode")["inputs"].keys() == {"calibrate"}, "a fixed budget reads no profile"
    assert manifest(root, "evaluate")["inputs"].keys() == {"decode", "calibrate", "profile"}
    assert manifest(root, "decode")["model"]["weights"] == "random"
    assert manifest(root, "evaluate")["outputs"].keys() >= {"results.json", "results.csv", "plots/overlap.png"}
    assert json.loads((root / "config.json").read_text()) == manifest(root, "decode")["config"]
    assert (status(root)["stage"], status(root)["state"]) == ("evaluate", "done")


def test_calibration_leaves_theta_grid_and_locality(finished: Any) -> None:
    _, _, root = finished
    for r in samples(root, "calibrate"):
        assert r["window"] == 16 and [x["layer"] for x in r["layers"]] == [1]
        (layer,) = r["layers"]
        assert len(layer["grid"]) == 80 and layer["hit"] == max(layer["grid"])
        assert layer["theta"].keys() == {"alpha", "beta", "gamma"}
        assert len(r["locality"]) == 9 and r["window_ms"] > 0 and r["calibrate_ms"] > 0


def test_a_profile_leaves_latencies_by_context_and_delta(finished: Any) -> None:
    _, _, root = finished
    found = json.loads((root / "profile" / "profile.json").read_text())
    contexts = [b["context"] for b in found["breakdown"]]
    assert contexts == sorted(contexts) and contexts[-1] == 1280
    assert [(r["context"], r["delta"]) for r in found["rows"]] == [
        (c, d) for c in contexts for d in (1.0, 1.25, 1.5, 2.0)
    ]
    assert all(r["select_us"] > 0 and r["attend_us"] > 0 for r in found["rows"])
    assert [s["context"] for s in found["safe_delta"]] == contexts and found["overlap"] is False


def test_what_is_done_is_skipped_out_loud(
    finished: Any, no_model: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    words, runner, root = finished
    files = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.parent != root}
    with caplog.at_level(logging.INFO):
        runner(*words)
    said = [r.getMessage() for r in caplog.records]
    for stage in ("calibrate", "profile", "decode", "evaluate"):
        assert f"{stage}: done already, skipped ({root / stage}; force=true redoes it)" in said
    assert {p: p.stat().st_mtime_ns for p in files} == files
    shown = capsys.readouterr().out
    assert "prr exact x1.5" in shown and "prr does more work than serial here" in " ".join(shown.split())


def test_evaluate_alone_needs_no_model(finished: Any, no_model: None) -> None:
    words, runner, root = finished
    before = results(root)
    shutil.rmtree(root / "evaluate")
    runner(*words, "stages=[evaluate]")
    assert results(root) == before and (root / "evaluate" / "manifest.json").exists()


def test_evaluate_needs_no_gpu_though_the_job_ran_on_one(finished: Any, no_model: None, tmp_path: Path) -> None:
    words, runner, root = finished
    elsewhere = Runner(runner.composed, tmp_path)
    job = Job(elsewhere.cfg(*words, "runtime.device=cuda"))
    shutil.copytree(root / "decode", job.root / "decode")
    made = manifest(root, "decode") | {"config": job.config, "device": "NVIDIA H200"}
    (job.root / "decode" / "manifest.json").write_text(json.dumps(made))
    elsewhere(*words, "runtime.device=cuda", "stages=[evaluate]")
    assert {r["device"] for r in results(job.root)} == {"NVIDIA H200"}
    wanted = [r | {"device": "NVIDIA H200"} for r in results(root)]
    assert without_times(results(job.root)) == without_times(wanted)
    assert "Times are of a CPU" not in (job.root / "evaluate" / "results.md").read_text()


def test_one_seed_gives_one_result(finished: Any, tmp_path: Path, no_plots: None) -> None:
    words, runner, root = finished
    again = Runner(runner.composed, tmp_path)(*words, "stages=[calibrate,decode,evaluate]")
    assert without_times(results(again)) == without_times(results(root))
    assert without_times(samples(again)) == without_times(samples(root))
    assert without_times(samples(again, "calibrate")) == without_times(samples(root, "calibrate"))


# ---- variants of a job


def test_another_seed_gives_another_random_model_and_another_folder(run: Runner, short: Any) -> None:
    roots = [run(*short, "benchmark.num_samples=1", f"seed={s}") for s in (0, 1)]
    assert roots[0] != roots[1] and samples(roots[0])[0]["tokens"] != samples(roots[1])[0]["tokens"]


def test_sampling_depends_on_the_seed_and_not_on_the_mode(run: Runner) -> None:
    root = run(*TINY, "runtime.temperature=1.0", "runtime.modes=[reuse,prr]", "stages=[calibrate,decode]")
    tokens = [r["tokens"] for r in samples(root)]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(tokens[0])) > 5


def test_union_repair_is_recorded_as_such(run: Runner, no_plots: None) -> None:
    root = run(*TINY, "runtime.repair=union", "stages=[calibrate,decode,evaluate]")
    rows = {r["mode"]: r for r in results(root)}
    assert [rows[m]["repair"] for m in MODES] == [None, None, "exact", "union", "union"]
    assert rows["reuse"]["logits_equal_serial"] == 1.0 and rows["prr"]["logits_equal_serial"] < 1


@pytest.mark.parametrize("word", ["budget=off", "budget.delta=0", "predictor=last_scores"])
def test_what_needs_no_calibration_runs_without_it(run: Runner, word: str, no_plots: None) -> None:
    root = run(*TINY, word, "runtime.modes=[prr]", "stages=[decode,evaluate]")
    serial, prr = results(root)
    assert prr["logits_equal_serial"] == 1.0
    if word != "predictor=last_scores":
        assert (prr["delta"], prr["hit_rate_all"], prr["missed_per_step"]) == (None, None, None)
    assert serial["mode"] == "serial", "it is always among the modes"


@pytest.mark.parametrize(("attend_us", "delta"), [(0.0, 2.0), (1e9, 0.0)])
def test_a_profiled_budget_is_what_the_profile_says(
    run: Runner, monkeypatch: pytest.MonkeyPatch, attend_us: float, delta: float, no_plots: None
) -> None:
    monkeypatch.setattr(profile._LayerTimes, "attend", lambda *_: attend_us)
    monkeypatch.setattr(profile._LayerTimes, "select", lambda *_: 100.0)  # a regression through noise may dip below 0
    root = run(*TINY, "budget=profiled", "runtime.modes=[prr]")
    prr = results(root)[1]
    assert (prr["delta"], prr["logits_equal_serial"]) == (delta, 1.0)
    assert (prr["hit_rate_all"] is None) == (delta == 0), "what was not predicted was not missed"
    assert manifest(root, "decode")["inputs"].keys() == {"calibrate", "profile"}


def test_local_lines_say_of_which_sample_and_mode_they_are(run: Runner, short: Any) -> None:
    cfg = run.cfg(*short, "benchmark.num_samples=2", "stages=[calibrate,decode]")
    cfg.tracker = {"_target_": "prr_pipeline.tracking.tracker.LocalTracker"}
    pipeline.run(cfg)
    root, ids = Job(cfg).root, ["text-420-0000", "text-420-0001"]
    calibrate, decode = (
        [json.loads(line) for line in (root / stage / "metrics.jsonl").read_text().splitlines()]
        for stage in ("calibrate", "decode")
    )
    assert [line["id"] for line in calibrate] == [ids[0]] * 9 + [ids[1]] * 9
    assert [(x["id"], x["task"], x["mode"]) for x in decode] == [(i, "text", m) for i in ids for m in ("serial", "prr")]
    assert all(f"text/{line['mode']}/ms_per_token" in line for line in decode)


def test_text_decodes_by_default_and_is_not_scored(run: Runner, tmp_path: Path, no_plots: None) -> None:
    file = tmp_path / "book.txt"
    file.write_text(" ".join(f"word{i}" for i in range(900)))
    words = ("debug=tiny", "benchmark=text", f"benchmark.path={file}", "benchmark.length=700", "runtime.modes=[prr]")
    rows = results(run(*words, "benchmark.num_samples=1"))
    assert [(r["steps"], r["score"], r["ms_per_token"] > 0) for r in rows] == [(63, None, True)] * 2
    assert rows[1]["tokens_equal_serial"] == rows[1]["logits_equal_serial"] == 1.0
