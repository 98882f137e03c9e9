# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other: whole or not at all, and refused when it is damaged, foreign or changed."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from prr_pipeline import artifacts
from prr_pipeline.artifacts import Records, StageFolder, differing, digest, file_digest, write_atomic, write_json
from prr_pipeline.errors import ArtifactError

Compose = Callable[..., DictConfig]

CONFIG = {"seed": 0, "dsa": {"name": "quest", "top_k": 32}, "stages_of": [1, 2]}


def folder(path: Path, config: dict[str, Any] | None = None) -> StageFolder:
    return StageFolder(path / "decode", "decode", config or CONFIG)


def finished(path: Path) -> StageFolder:
    stage = folder(path)
    Records(stage / "samples.jsonl").append([{"id": "a"}])
    write_json(stage / "more.json", [1])
    stage.finish("cpu", {"calibrate": "abc"}, [stage / "samples.jsonl", stage / "more.json"], {"modes": ["serial"]})
    return stage


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(ArtifactError) as error:
        call(*args)
    return str(error.value)


# ---- files


def test_a_write_replaces_the_whole_file_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.txt"
    write_atomic(path, "a long text\n")
    write_atomic(path, "\u00e4\n")
    assert path.read_text(encoding="utf-8") == "\u00e4\n" and os.listdir(path.parent) == ["x.txt"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "x.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(*((os, "fsync", full) if broken == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, value: float) -> None:
    records = Records(tmp_path / "r.jsonl")
    records.append([{"x": 1.0}])
    for write in (records.append, records.rewrite, lambda rows: write_json(tmp_path / "x.json", rows)):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write([{"x": 1.0}, {"x": value}])
    assert records.read() == [{"x": 1.0}] and os.listdir(tmp_path) == ["r.jsonl"]


# ---- records


def test_records_are_read_as_written(tmp_path: Path) -> None:
    records = Records(tmp_path / "new" / "r.jsonl")
    assert records.read() == []
    rows = [{"text": "line\nbreak \u2028 \u00e4"}, {"n": None, "x": [1.5]}]
    records.append(rows[:1])
    records.append([])
    records.append(rows[1:])
    assert records.read() == rows and records.path.read_bytes().count(b"\n") == 2
    records.rewrite(rows[1:])
    assert records.read() == rows[1:]


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
@pytest.mark.parametrize("before", [[], [{"id": 1}], [{"id": 1}, {"id": 2}]])
def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path, cut: int, before: list) -> None:
    """A process killed in the middle of a write, and the run after it."""
    records = Records(tmp_path / "r.jsonl")
    records.append([*before, {"id": 9, "text": "\u00e4\u00e4"}])
    data = records.path.read_bytes()
    records.path.write_bytes(data[:-cut])  # 1: only the end of the line is missing; 2, 8: inside of characters
    assert records.read() == before
    records.append([{"id": 10}])
    assert records.read() == [*before, {"id": 10}]


def test_a_file_of_a_torn_line_alone_is_empty(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl")
    records.path.write_bytes(b'{"id": 1')
    assert records.read() == []
    records.append([{"id": 2}])
    assert records.path.read_bytes() == b'{"id": 2}\n'


@pytest.mark.parametrize("line", [b'{"id": 1', b"\0\0\0", b"\xff\xfe", b'{"id": 1} {"id": 2}'])
def test_a_damaged_line_before_the_last_is_refused(tmp_path: Path, line: bytes) -> None:
    records = Records(tmp_path / "r.jsonl")
    for data in (line + b'\n{"id": 3}\n', line + b"\n"):
        records.path.write_bytes(b'{"id": 0}\n\n' + data)
        text = refused(records.read)
        assert text.startswith(f"{records.path}: line 3 is damaged (")
        assert text.endswith("; delete the line, or redo the stage with force=true")
    records.path.write_bytes(b'{"id": 0}\n\n{"id": 3}\n')
    assert records.read() == [{"id": 0}, {"id": 3}], "the message's advice works, with an empty line left too"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"7", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"a": 1}', "no record with id, steps"),
        (b'{"id": [1], "steps": 2}', "no record with id"),
    ],
)
def test_a_whole_line_that_is_no_record_is_refused_as_a_damaged_one(tmp_path: Path, line: bytes, why: str) -> None:
    records = Records(tmp_path / "r.jsonl", {"id": str, "steps": int})
    records.path.write_bytes(b'{"id": "a", "steps": 1, "more": 0}\n' + line + b"\n")
    assert refused(records.read) == (
        f"{records.path}: line 2 is damaged ({why}); delete the line, or redo the stage with force=true"
    )


# ---- manifests


def test_a_stage_is_done_once_its_manifest_is_there(tmp_path: Path) -> None:
    assert folder(tmp_path).load() is None
    Records(folder(tmp_path) / "samples.jsonl").append([{"id": "a"}])
    assert folder(tmp_path).load() is None
    finished(tmp_path)
    manifest = folder(tmp_path).load()
    assert manifest is not None and manifest == folder(tmp_path).require("evaluate")
    assert manifest["stage"] == "decode" and manifest["device"] == "cpu" and manifest["modes"] == ["serial"]
    assert manifest["config"] == CONFIG and manifest["config_hash"] == digest(CONFIG)
    assert manifest["inputs"] == {"calibrate": "abc"}
    assert manifest["outputs"] == {n: file_digest(tmp_path / "decode" / n) for n in ("samples.jsonl", "more.json")}
    assert {"torch", "python", "prr_pipeline"} <= manifest["versions"].keys()


def test_a_stage_that_another_needs_says_how_to_get_it(tmp_path: Path) -> None:
    assert refused(folder(tmp_path).require, "evaluate") == (
        f"stage evaluate needs the output of decode, and {tmp_path}/decode has none; "
        "run it too: stages=[decode,evaluate]"
    )


def test_another_configuration_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    finished(tmp_path)
    other = folder(tmp_path, {"seed": 1, "dsa": {"name": "quest", "top_k": 64, "sink": 1}, "stages_of": [1, 2]})
    assert refused(other.load) == (
        f"{tmp_path}/decode was made by another configuration; these differ: dsa.sink, dsa.top_k, seed; "
        "redo it with force=true stages=[decode]"
    )


def test_a_changed_or_missing_output_is_refused(tmp_path: Path) -> None:
    stage = finished(tmp_path)
    Records(stage / "samples.jsonl").append([{"id": "b"}])
    advice = "since decode wrote it; redo it with force=true stages=[decode]"
    assert refused(stage.load) == f"{tmp_path}/decode/samples.jsonl changed {advice}"
    (stage / "samples.jsonl").unlink()
    assert refused(stage.load) == f"{tmp_path}/decode/samples.jsonl is missing {advice}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe\x00",
        b'{"config": {}, "outputs": 3, "inputs": {}}',
        b'{"config": {}, "outputs": {}}',
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, data: bytes) -> None:
    stage = finished(tmp_path)
    stage.manifest.write_bytes(data)
    text = refused(stage.load)
    assert text.startswith(f"{stage.manifest} is damaged (")
    assert text.endswith("; redo it with force=true stages=[decode]")


def test_records_of_an_interrupted_stage_go_on_only_from_the_same_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage, records = folder(tmp_path), Records(tmp_path / "decode" / "samples.jsonl")
    for _ in range(2):
        stage.start({"calibrate": "abc", "profile": "p1"})
        records.append([{"id": "a"}])
    assert len(records.read()) == 2 and caplog.text == ""
    stage.start({"calibrate": "abc", "profile": "p2"})
    assert records.read() == []
    assert "decode: the records of an interrupted run were made by other profile; starts over" in caplog.text


def test_what_was_made_by_something_else_is_put_aside_and_what_is_forced_is_deleted(tmp_path: Path) -> None:
    stage = finished(tmp_path)
    stage.clear(keep=True)
    names = {"samples.jsonl", "more.json", "manifest.json"}
    assert stage.load() is None and os.listdir(stage.path) == ["replaced"]
    assert {*os.listdir(stage / "replaced")} == names
    finished(tmp_path).clear()
    assert os.listdir(stage.path) == ["replaced"]
    finished(tmp_path).clear(keep=True)
    assert {*os.listdir(stage / "replaced")} == names


def test_records_without_a_note_of_what_they_are_of_start_over(tmp_path: Path) -> None:
    stage, records = folder(tmp_path), Records(tmp_path / "decode" / "samples.jsonl")
    records.append([{"id": "a"}])
    stage.start({})
    assert records.read() == []


# ---- configurations


def test_the_hash_depends_on_what_changes_results_alone(composed: Compose) -> None:
    base = digest(artifacts.resolved(composed()))
    same = (
        *("stages=[evaluate]", "force=true", "allow_other_source=true", "output=elsewhere", "tracker=wandb"),
        *("dsa.top_k=32", "runtime.modes=[prr,reuse,serial,dense,reuse_repair]"),
        *("runtime.modes=[dense,dense,reuse,reuse_repair,prr,prr]", "runtime.profile_contexts=[]"),
    )
    assert all(digest(artifacts.resolved(composed(word))) == base for word in same)
    other = ("seed=1", "dsa.top_k=33", "runtime.repair=union", "experiment=smollm2_quest", "runtime.modes=[prr]")
    hashes = {digest(artifacts.resolved(composed(word))) for word in other}
    assert len(hashes) == len(other) and base not in hashes
    modes = artifacts.resolved(composed("runtime.modes=[prr,dense,prr]"))["runtime"]["modes"]
    assert modes == ["dense", "serial", "prr"], "what is decoded"
    for key, a, b in (("profile_contexts", "9,7", "7,9,"), ("baselines", "serial_eager,paper_serial", "paper_serial,")):
        equal = (artifacts.resolved(composed(f"runtime.{key}=[{v}]")) for v in (a, b + a))
        assert len({digest(c) for c in equal}) == 1


def test_differing_keys_are_paths() -> None:
    a, b = {"x": {"y": 1, "z": [1]}, "w": 2}, {"x": {"y": 2, "z": [1]}, "v": 3}
    assert differing(a, b) == ["v", "w", "x.y"] and differing(a, a) == []


def test_the_commit_tells_a_changed_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "__file__", str(tmp_path / "prr_pipeline" / "artifacts.py"))
    assert artifacts.commit() is None, "an installed package has none"


def test_one_process_works_in_a_job_folder_at_a_time(tmp_path):
    job = tmp_path / "job"
    busy = pytest.raises(ArtifactError, match="another process is running this very job")
    with artifacts.locked(job), busy, artifacts.locked(job):
        pytest.fail("two hold it")
    with artifacts.locked(job):
        pass  # free again
