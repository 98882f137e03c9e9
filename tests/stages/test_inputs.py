# SPDX-License-Identifier: Apache-2.0
"""Outputs count for what they were made of: code, text and weights that changed since are never mixed in silently."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, Runner, manifest, samples
from test_resume import interrupt

from prr_pipeline import provenance
from prr_pipeline.artifacts import file_digest
from prr_pipeline.errors import ArtifactError, ConfigError
from prr_pipeline.stages import calibrate, decode
from prr_pipeline.stages.job import Job

Words = tuple[str, ...]
ALL = "stages=[calibrate,decode,evaluate]"


def another_source(monkeypatch: pytest.MonkeyPatch, name: str = "another") -> None:
    monkeypatch.setattr(provenance, "source", lambda: name)


def another_text(words: Words) -> Path:
    (path,) = (Path(w.split("=", 1)[1]) for w in words if w.startswith("benchmark.path="))
    path.write_text(path.read_text().replace("w1", "v1"))
    return path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_manifests_name_source_and_files(run: Runner, short: Words, no_plots: None) -> None:
    root = run(*short, "benchmark.num_samples=1", "stages=[calibrate,profile,decode,evaluate]")
    text = {"benchmark.path": file_digest(root.parents[1] / "book.txt")}
    for stage, files in (("calibrate", text), ("profile", {}), ("decode", text), ("evaluate", {})):
        found = manifest(root, stage)
        assert (found["source"], found["files"]) == (provenance.source(), files)


def test_another_text_redoes_what_was_made_of_it_out_loud(
    run: Runner, short: Words, no_plots: None, caplog: pytest.LogCaptureFixture
) -> None:
    words = (*short, "benchmark.num_samples=1", ALL)
    root = run(*words)
    before = [samples(root, s)[0] for s in ("calibrate", "decode")]
    another_text(words)
    assert run.refused(*words, "stages=[evaluate]", kind=ArtifactError) == (
        f"stage evaluate needs {root}/decode, which was made by other inputs than there are now; these differ: "
        "benchmark.path; redo it: stages=[calibrate,decode,evaluate]"
    )
    text = run.refused(*words, "stages=[decode]", kind=ArtifactError)
    assert text.endswith("these differ: benchmark.path; redo it: stages=[calibrate,decode]")
    run(*words)
    assert said(caplog) == [
        "calibrate: what is there was made by other benchmark.path; done again",
        "decode: what is there was made by other benchmark.path, calibrate; done again",
        "evaluate: what is there was made by other decode; done again",
    ]
    after = [samples(root, s)[0] for s in ("calibrate", "decode")]
    assert before[0]["layers"] != after[0]["layers"] and before[1]["tokens"] != after[1]["tokens"]
    caplog.clear()
    run(*words)
    assert said(caplog) == []


def test_another_source_is_redone_where_asked_for_and_refused_where_only_read(
    run: Runner,
    short: Words,
    no_plots: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = (*short, "benchmark.num_samples=1", ALL)
    root = run(*words)
    another_source(monkeypatch)
    text = run.refused(*words, "stages=[decode]", kind=ArtifactError)
    assert text == (
        f"stage decode needs {root}/calibrate, which was made by other inputs than there are now; these differ: "
        "source; redo it: stages=[calibrate,decode], or take it as it is: allow_other_source=true"
    )
    made = manifest(root, "decode")
    run(*words, "allow_other_source=true")
    assert manifest(root, "decode") == made and Job(run.cfg(*words, "allow_other_source=true")).root == root
    assert said(caplog)[0] == "calibrate: made by other source, taken as it is (allow_other_source)"
    run(*words, "stages=[decode]", "force=true", "allow_other_source=true")
    text = run.refused(*words, "stages=[evaluate]", kind=ArtifactError)
    assert "these differ: source of calibrate; redo it: stages=[calibrate,decode,evaluate], or" in text
    caplog.clear()
    run(*words)
    assert said(caplog)[0] == "calibrate: what is there was made by other source; done again"
    assert {manifest(root, s)["source"] for s in ("calibrate", "decode", "evaluate")} == {"another"}


def test_plots_leave_out_a_profile_that_other_code_made(
    run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = (*short, "benchmark.num_samples=1")
    run(*words, "stages=[profile]")
    another_source(monkeypatch)
    root = run(*words, ALL)
    assert "no plots of profile: it was made by other source" in said(caplog)
    assert manifest(root, "evaluate")["inputs"].keys() == {"decode", "calibrate"}
    assert not (root / "evaluate" / "plots" / "latency.png").exists()


@pytest.mark.parametrize("changed", ["source", "benchmark.path"])
@pytest.mark.parametrize("module", [calibrate, decode])
def test_samples_of_an_interrupted_run_by_something_else_are_done_again(
    run: Runner,
    short: Words,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    changed: str,
) -> None:
    stage = module.__name__.rsplit(".", 1)[1]
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt(broken, module, 2, KeyboardInterrupt())
        run(*short)
    another_source(monkeypatch) if changed == "source" else another_text(short)
    begun = interrupt(monkeypatch, module, 99, KeyboardInterrupt())
    root = run(*short)
    assert len(begun) == 4 and len({r["id"] for r in samples(root, stage)}) == 4
    (line,) = [x for x in said(caplog) if x.startswith(f"{stage}: the records")]
    assert line.startswith(f"{stage}: the records of an interrupted run were made by other {changed}")
    assert line.endswith("; starts over")


def test_samples_of_two_sources_are_allowed_on_request_and_recorded_as_such(
    run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    another_source(monkeypatch, "first")
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt(broken, decode, 2, KeyboardInterrupt())
        run(*short)
    another_source(monkeypatch, "second")
    with monkeypatch.context() as spied:
        begun = interrupt(spied, decode, 99, KeyboardInterrupt())
        root = run(*short, "allow_other_source=true")
    assert len(begun) == 2 and manifest(root, "decode")["source"] == "first+second"
    assert "decode: goes on after records made by other source (allow_other_source)" in said(caplog)
    run(*short)
    assert manifest(root, "decode")["source"] == "second", "a mixture is of no one source"


def test_a_damaged_note_is_said_clearly(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt(broken, decode, 2, KeyboardInterrupt())
        run(*short)
    note = run.root(*short) / "decode" / "started.json"
    for data in ("", "{", "[]", "{}", '{"source": 1, "files": 2, "inputs": {}}'):
        note.write_text(data)
        text = run.refused(*short, kind=ArtifactError)
        assert text.startswith(f"{note} is damaged (") and text.endswith("; redo it with force=true stages=[decode]")
    run(*short, "stages=[decode]", "force=true")


# ---- digests


def test_weights_are_told_apart_by_name_size_time_and_both_ends(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    words = ("model.weights=local", f"model.path={folder}")
    seen = []
    for name, data in (
        ("a.bin", b"x" * 10),
        ("b.bin", b"x" * 10),
        ("b.bin", b"y" + b"x" * (3 << 20)),
        ("b.bin", b"y" + b"x" * (3 << 20) + b"z"),
    ):
        (folder / name).write_bytes(data)
        seen.append(Job(run.cfg(*words)).input_files["model.path"])
    (folder / "b.bin").touch()
    seen.append(Job(run.cfg(*words)).input_files["model.path"])
    assert len(set(seen)) == 5
    assert seen[-1] == Job(run.cfg(*words)).input_files["model.path"]


def test_a_gguf_file_is_an_input_by_the_key_that_names_it(run: Runner, tmp_path: Path) -> None:
    file = tmp_path / "w.gguf"
    file.write_bytes(b"1")
    first = Job(run.cfg("model.weights=gguf", f"model.path={file}")).input_files
    file.write_bytes(b"2")
    assert first.keys() == {"model.path"} and first != Job(run.cfg(f"model.path={file}")).input_files
    gone = Job(run.cfg("model.weights=gguf", "model.path=/nowhere.gguf"))
    assert gone.input_files == {}, "evaluate needs no weights"


def test_a_benchmark_names_the_files_that_it_reads(run: Runner, tmp_path: Path) -> None:
    for name in ("prose.txt", "constants.py"):
        (tmp_path / name).write_text("A b. C d.")
    words = ("benchmark.tasks=[niah_single_2]", f"benchmark.haystack={tmp_path}/prose.txt")
    job = Job(run.cfg("model.weights=random", *words, f"benchmark.templates={tmp_path}/constants.py"))
    assert job.input_files.keys() == {"benchmark.haystack", "benchmark.templates"}


def test_the_source_digest_is_of_names_and_texts(tmp_path: Path) -> None:
    package = tmp_path / "p" / "sub"
    package.mkdir(parents=True)
    seen = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("c.txt", "2")):
        (package / name).write_text(text)
        seen.append(provenance.digest_tree(tmp_path, ["p"]))
    assert len(set(seen[:3])) == 3 and seen[3] == seen[2]
    assert len(provenance.source()) == 64


def test_ids_that_come_twice_are_refused(run: Runner, short: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    from prr_pipeline.benchmarks.text import Text

    own = Text.samples
    monkeypatch.setattr(Text, "samples", lambda *a: [*own(*a), *own(*a)])
    text = run.refused(*short, "benchmark.num_samples=1", kind=ConfigError)
    assert text == "benchmark=text has two samples of the id text-420-0000; ids are unique"


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ("0", "runtime.profile_contexts has 0, expected tokens from 1 to the 4096 of model smollm2"),
        ("1000,-5", "runtime.profile_contexts has -5, expected tokens"),
        ("5000", "runtime.profile_contexts has 5000, expected tokens from 1 to the 4096 of model smollm2"),
        ("1000,100", "runtime.profile_contexts has 100 tokens, but dsa=quest selects only beyond 128"),
    ],
)
def test_contexts_that_no_job_has_are_refused(run: Runner, no_model: None, contexts: str, expected: str) -> None:
    text = run.refused(*TINY, f"runtime.profile_contexts=[{contexts}]", kind=ConfigError)
    assert text.startswith(expected)


# ---- classes of a user's own


OWN = """
from dataclasses import dataclass
from {base_module} import {base}
{more}

@dataclass(kw_only=True)
class Own({base}):
    name: str = "own"
"""
NAMES = {"dsa": ("prr_pipeline.dsa.quest", "Quest"), "benchmark": ("prr_pipeline.benchmarks.text", "Text")}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """A function that writes a module with a class Own into a folder on the path, and forgets the one before."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)

    def write(module: str, base: tuple[str, str] = NAMES["dsa"], more: str = "") -> Path:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in {p.stem for p in folder.iterdir()}:
                del sys.modules[name]
        path = folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(OWN.format(base_module=base[0], base=base[1], more=more))
        importlib.invalidate_caches()
        return path

    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {p.stem for p in folder.iterdir()}:
            del sys.modules[name]


def target(group: str, module: str) -> str:
    return f"{group}._target_={module}.Own"


@pytest.mark.parametrize("group", ["dsa", "benchmark"])
def test_another_text_of_an_own_class_redoes_what_was_made_by_it(
    run: Runner,
    short: Words,
    own: Callable[..., Path],
    no_plots: None,
    caplog: pytest.LogCaptureFixture,
    group: str,
) -> None:
    path = own("mine_changes", NAMES[group])
    words = (*short, "benchmark.num_samples=1", target(group, "mine_changes"), ALL)
    root = run(*words)
    assert f"{group}._target_" in manifest(root, "decode")["files"]
    path.write_text(path.read_text() + "\n# another text\n")
    text = run.refused(*words, "stages=[evaluate]", kind=ArtifactError)
    assert f"these differ: {group}._target_; redo it: stages=[" in text
    caplog.clear()
    run(*words)
    assert said(caplog)[0] == f"calibrate: what is there was made by other {group}._target_; done again"
    assert said(caplog)[1].startswith(f"decode: what is there was made by other {group}._target_")
    caplog.clear()
    run(*words)
    assert said(caplog) == []


def test_an_own_method_belongs_to_profile_and_a_benchmark_does_not(
    run: Runner, short: Words, own: Callable[..., Path]
) -> None:
    own("mine_both")
    own("mine_text", NAMES["benchmark"])
    job = Job(run.cfg(*short, target("dsa", "mine_both"), target("benchmark", "mine_text")))
    assert {"dsa._target_", "benchmark._target_", "benchmark.path"} == job.input_files.keys()
    assert job.folder("profile").files.keys() == {"dsa._target_"}
    assert job.folder("evaluate").files == {}


def test_a_class_is_its_module_what_that_imports_from_beside_it_and_its_bases(own: Callable[..., Path]) -> None:
    def now(module: str) -> str:
        found = provenance.digest_class(importlib.import_module(module).Own)
        assert found is not None
        return found

    base = own("mine_base")
    helper = own("mine_helper", more="import json, torch, mine_deep")
    deep = own("mine_deep")
    bystander = own("mine_bystander")
    own("mine_top", ("mine_base", "Own as Base"), "import mine_helper, json")
    text = (base.parent / "mine_top.py").read_text().replace("class Own(Own as Base)", "class Own(Base)")
    (base.parent / "mine_top.py").write_text(text)
    seen = [now("mine_top")]
    for path in (base, helper, deep, base.parent / "mine_top.py"):
        path.write_text(path.read_text() + "#\n")
        seen.append(now("mine_top"))
    assert len(set(seen)) == 5
    bystander.write_text("1")
    assert now("mine_top") == seen[-1]


def test_a_class_in_a_package_is_all_of_the_package(own: Callable[..., Path]) -> None:
    path = own("minepack.sparse")
    (path.parent / "__init__.py").write_text("")
    cls = importlib.import_module("minepack.sparse").Own
    first = provenance.digest_class(cls)
    (path.parent / "other.py").write_text("x = 1\n")
    assert first is not None and provenance.digest_class(cls) != first


def test_classes_of_this_program_have_no_digest_of_their_own() -> None:
    from prr_pipeline.dsa.quest import Quest

    assert provenance.digest_class(Quest) is None
