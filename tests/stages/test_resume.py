# SPDX-License-Identifier: Apache-2.0
"""Interrupted, redone and refused jobs: nothing is lost, nothing stale is used, nothing that cannot work begins."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, Compose, Runner, manifest, results, samples, status, without_times

from prr_pipeline.artifacts import Records
from prr_pipeline.errors import ArtifactError, ConfigError
from prr_pipeline.stages import calibrate, decode, profile
from prr_pipeline.stages.job import Job

Words = tuple[str, ...]


def interrupt(monkeypatch: pytest.MonkeyPatch, module: Any, after: int, error: BaseException) -> list[str]:
    """Let a stage's samples raise once `after` of them are done; returns the ids that were begun, as they come."""
    begun: list[str] = []
    own = module._sample

    def sample(job: Job, prompt: Any, *rest: Any) -> Any:
        if len(begun) == after:
            raise error
        begun.append(prompt.sample.id)
        return own(job, prompt, *rest)

    monkeypatch.setattr(module, "_sample", sample)
    return begun


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("x"), OSError(28, "No space left")], ids=repr)
def test_an_interrupted_decode_goes_on_where_it_was(
    run: Runner,
    short: Words,
    composed: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    whole = Runner(composed, tmp_path / "whole")(*short)
    raised = ArtifactError if isinstance(error, OSError) else type(error)
    with monkeypatch.context() as broken, pytest.raises(raised):
        interrupt(broken, decode, 2, error)
        run(*short)
    root = run.root(*short)
    assert len(samples(root)) == 4 and not (root / "decode" / "manifest.json").exists()
    assert (status(root)["stage"], status(root)["state"]) == ("decode", "failed")
    assert type(error).__name__ in status(root)["error"]
    assert status(root)["traceback"].startswith("Traceback (most recent call last):")
    path = root / "decode" / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "torn')
    begun = interrupt(monkeypatch, decode, 99, error)
    run(*short)
    assert begun == ["text-420-0002", "text-420-0003"], "finished samples were done again"
    assert without_times(samples(root)) == without_times(samples(whole))
    assert status(root)["state"] == "done" and "error" not in status(root)


def test_a_sample_that_lacks_a_mode_is_done_again(run: Runner, short: Words) -> None:
    root = run(*short)
    whole = samples(root)
    Records(root / "decode" / "samples.jsonl").rewrite(whole[:3] + whole[4:])
    (root / "decode" / "manifest.json").unlink()
    run(*short)
    found = samples(root)
    assert [r["id"][-1] + r["mode"] for r in found] == [f"{i}{m}" for i in (0, 2, 3, 1) for m in ("serial", "prr")]
    by_id = [sorted(rows, key=lambda r: r["id"]) for rows in (without_times(found), without_times(whole))]
    assert by_id[0] == by_id[1]


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]", "7"])
@pytest.mark.parametrize("stage", ["calibrate", "decode"])
def test_a_line_that_is_no_record_is_named_where_a_stage_goes_on(
    run: Runner, short: Words, stage: str, line: str
) -> None:
    words = (*short, "benchmark.num_samples=1")
    path = run(*words) / stage / "samples.jsonl"
    path.write_text(line + "\n" + path.read_text())
    (path.parent / "manifest.json").unlink()
    assert run.refused(*words, kind=ArtifactError).startswith(f"{path}: line 1 is damaged (no ")


def test_an_interrupted_calibration_goes_on_where_it_was(
    run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*short, "stages=[calibrate]")
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt(broken, calibrate, 3, KeyboardInterrupt())
        run(*words)
    path = run.root(*words) / "calibrate" / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "vt')
    begun = interrupt(monkeypatch, calibrate, 99, KeyboardInterrupt())
    run(*words)
    assert begun == ["text-420-0003"] and len(Records(path).read()) == 4


def test_force_redoes_and_when_interrupted_resumes_without_it(
    run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch, no_plots: None
) -> None:
    words = (*short, "stages=[calibrate,decode,evaluate]")
    root = run(*words)
    before = without_times(results(root))
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        begun = interrupt(broken, decode, 1, KeyboardInterrupt())
        run(*words, "force=true")
    assert begun == ["text-420-0000"] and len(samples(root)) == 2
    assert not (root / "evaluate" / "manifest.json").exists(), "it was made from what is gone"
    run(*words)
    assert without_times(results(root)) == before


def test_force_redoes_the_stages_that_are_asked_for(run: Runner, short: Words, no_plots: None) -> None:
    words = (*short, "benchmark.num_samples=1", "stages=[calibrate,decode,evaluate]")
    root = run(*words)
    times = {s: (root / s / "manifest.json").stat().st_mtime_ns for s in ("calibrate", "decode", "evaluate")}
    run(*words, "stages=[evaluate]", "force=true")
    changed = {s for s, t in times.items() if (root / s / "manifest.json").stat().st_mtime_ns != t}
    assert changed == {"evaluate"}


def remade(root: Path, stage: str) -> None:
    """Let a stage's output count as another one."""
    path = root / stage / "manifest.json"
    path.write_text(json.dumps(manifest(root, stage) | {"device": "another"}))


def test_outputs_made_from_other_outputs_are_done_again_out_loud(
    run: Runner, short: Words, no_plots: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = (*short, "benchmark.num_samples=2", "stages=[calibrate,decode,evaluate]")
    root = run(*words)
    remade(root, "calibrate")
    assert run.refused(*words, "stages=[evaluate]", kind=ArtifactError) == (
        f"stage evaluate needs {root}/decode, which was made by other inputs than there are now; these differ: "
        "calibrate; redo it: stages=[calibrate,decode,evaluate]"
    )
    begun = interrupt(monkeypatch, decode, 99, KeyboardInterrupt())
    run(*words)
    assert begun == ["text-420-0000", "text-420-0001"]
    assert "decode: what is there was made by other calibrate; done again" in caplog.text
    assert "evaluate: what is there was made by other decode; done again" in caplog.text
    remade(root, "calibrate")
    (root / "decode" / "manifest.json").unlink()  # as if decode had been interrupted before
    (root / "calibrate" / "manifest.json").write_text(json.dumps(manifest(root, "calibrate") | {"device": "third"}))
    run(*words)
    assert (
        len(begun) == 4 and "the records of an interrupted run were made by other calibrate; starts over" in caplog.text
    )


def test_evaluate_follows_a_decode_that_was_done_again(
    run: Runner, short: Words, no_plots: None, caplog: pytest.LogCaptureFixture
) -> None:
    words = (*short, "benchmark.num_samples=1")
    root = run(*words, "stages=[calibrate,decode,evaluate]")
    before = manifest(root, "evaluate")
    run(*words, "stages=[decode]", "force=true")
    run(*words, "stages=[evaluate]")
    assert "evaluate: what is there was made by other decode; done again" in caplog.text
    assert manifest(root, "evaluate")["inputs"] != before["inputs"]


def test_a_stage_whose_input_is_missing_is_refused_before_any_work(run: Runner, no_model: None) -> None:
    def needed(by: str, source: str, *words: str) -> None:
        root = run.root(*TINY, *words)
        assert run.refused(*TINY, *words, kind=ArtifactError) == (
            f"stage {by} needs the output of {source}, and {root}/{source} has none; run it too: stages=[{source},{by}]"
        )

    needed("evaluate", "decode", "stages=[evaluate]")
    needed("evaluate", "decode", "stages=[profile,evaluate]")
    needed("decode", "calibrate", "stages=[profile,decode]")
    needed("decode", "profile", "stages=[decode]", "budget=profiled", "predictor=last_scores")
    needed("decode", "profile", "stages=[calibrate,decode,evaluate]", "budget=profiled")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("dsa.top_k=80",),
            "context below budget: everything would be dense. benchmark.length = 1280 tokens, but dsa=quest selects "
            "only beyond 1280 (top_k 80 blocks of 16, dense_len 0). Raise benchmark.length or lower dsa.top_k",
        ),
        (("dsa.dense_len=2000", "runtime.modes=[dense]"), "context below budget: everything would be dense."),
        (
            ("dsa.dense_layers=2",),
            "dsa.dense_layers = 2, and model smollm2 has 2 layers: everything would be dense. Lower dsa.dense_layers",
        ),
        (("benchmark.length=5000",), "benchmark.length = 5000 tokens, but model smollm2 goes to 4096"),
        (("dsa.top_k=2",), "dsa.top_k = 2 blocks cannot hold dsa.sink = 1 and dsa.local = 2 forced blocks"),
        (("budget.delta=0.5",), "budget.delta = 0.5, expected 0 (no speculation) or a value in 1 ... 8"),
        (("predictor.window=1",), "predictor.window = 1 rows, expected at least 2 (one to predict from)"),
        (("runtime.device=gpu",), "runtime.device=gpu is unknown. Did you mean cpu? There are: auto, cpu, cuda."),
    ],
)
def test_jobs_that_cannot_work_are_refused_before_any_work(
    run: Runner, no_model: None, words: tuple[str, ...], expected: str
) -> None:
    assert run.refused(*TINY, *words, kind=ConfigError).startswith(expected)


def test_a_sparse_mode_that_never_selected_fails_with_its_tables_written(
    run: Runner, monkeypatch: pytest.MonkeyPatch, no_plots: None
) -> None:
    monkeypatch.setattr(Job, "_check_selects", lambda _: None)
    words = (*TINY, "runtime.modes=[prr]", "dsa.dense_len=3000", "stages=[calibrate,decode,evaluate]")
    text = run.refused(*words)
    assert text == (
        "context below budget: everything was dense in vt/serial, vt/prr. dsa=quest attends 128 tokens and selects "
        "from 3000 on; lower dsa.top_k or dsa.dense_len, or take longer samples"
    )
    root = run.root(*words)
    assert all(r["dense_steps"] == r["steps"] for r in results(root))
    assert not (root / "evaluate" / "manifest.json").exists() and status(root)["state"] == "failed"


def test_ranks_of_a_launcher_are_refused(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run.refused(*TINY, kind=ConfigError) == (
        "WORLD_SIZE = 2: a job runs in one process. Start it without torchrun; "
        "a sweep (-m) spreads jobs over machines with hydra/launcher=slurm"
    )


@pytest.mark.parametrize("ranks", ["abc", "", "-1", "1.0"])
def test_a_number_of_ranks_that_is_none_is_refused(run: Runner, monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert run.refused(*TINY, kind=ConfigError) == (
        f"WORLD_SIZE = '{ranks}' in the environment, expected 1 or none: unset WORLD_SIZE"
    )


def test_a_running_stage_says_so(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    words = (*TINY, "stages=[profile]")
    monkeypatch.setattr(profile, "_linear_parts", lambda job: seen.append(status(job.root)) or {})
    root = run(*words)
    assert [(s["stage"], s["state"]) for s in seen] == [("profile", "running")] and status(root)["state"] == "done"


def test_the_model_is_loaded_once_and_said_once(run: Runner, short: Words, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(*short, "benchmark.num_samples=1")
    assert sum(r.getMessage().startswith("loading ") for r in caplog.records) == 1
