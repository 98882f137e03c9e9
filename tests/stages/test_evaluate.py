# SPDX-License-Identifier: Apache-2.0
"""What a row of the results says of its origin, how it averages, and when there is nothing to show."""

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, Runner, results
from omegaconf import OmegaConf

from prr_pipeline.config import config_dir
from prr_pipeline.errors import PrrError
from prr_pipeline.models import load
from prr_pipeline.stages import evaluate
from prr_pipeline.tracking import plots, profile_plots, tables

OPTIONS = [OmegaConf.load(path) for path in sorted((config_dir() / "model").glob("*.yaml"))]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
@pytest.mark.parametrize("weights", ["hub", "local", "gguf", "random"])
def test_a_model_has_its_true_size_or_not(option: Any, weights: str) -> None:
    true = load.parameter_count(option.architecture)
    assert evaluate._size(option.name, weights, true) == "true"
    assert evaluate._size(option.name, weights, true + true // 200) == "true", "a padded vocabulary"
    assert evaluate._size(option.name, weights, 214080) == "tiny"
    layers = option.architecture.num_hidden_layers
    assert evaluate._size(option.name, weights, true - 2 * true // layers) == "other"


def test_of_a_model_of_the_user_s_own_the_size_is_known_by_its_weights_only() -> None:
    assert evaluate._size("mine", "hub", 214080) == evaluate._size("mine", "local", 214080) == "true"
    assert evaluate._size("mine", "random", 214080) == "unknown"


@pytest.mark.parametrize(
    ("size", "heading", "remark"),
    [
        ("unknown", "of unknown size", "The model is of unknown size"),
        ("other", "of another size", "does not have its true size"),
        ("true", "m (random", None),
    ],
)
def test_heading_and_remark_say_the_same_of_a_size(size: str, heading: str, remark: str | None) -> None:
    row = {
        "model": "m",
        "weights": "random",
        "size": size,
        "dsa": "quest",
        "benchmark": "b",
        "task": "t",
        "mode": "serial",
    }
    said = [r for r in evaluate._remarks({"rows": [row], "device": "gpu"}) if "size" in r]
    assert heading in tables.pair_label(row) and len(said) == (remark is not None)
    assert all(remark in r for r in said)


def test_an_option_that_does_not_state_its_sizes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    for name, text in (("bare", ""), ("part", "architecture: {hidden_size: 8}\n"), ("null", "architecture: null\n")):
        (tmp_path / "model" / f"{name}.yaml").write_text(f"name: '{name}'\n{text}")
    (tmp_path / "model" / "nameless.yaml").write_text("defaults: [bare]\n")
    monkeypatch.setattr(evaluate, "config_dir", lambda: tmp_path)
    assert {evaluate._size(name, "hub", 10) for name in ("bare", "part", "null", "other")} == {"true"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subtitles of the figures, as they are drawn."""
    seen: list[str] = []
    figure = plots.new_figure

    def spy(title: str, subtitle: str, **sizes: int) -> Any:
        seen.append(subtitle)
        return figure(title, subtitle, **sizes)

    monkeypatch.setattr(plots, "new_figure", spy)
    monkeypatch.setattr(profile_plots, "new_figure", spy)
    return seen


def test_a_tiny_random_model_is_called_so_wherever_numbers_are(
    run: Runner, drawn: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = run("+experiment=glm4_quest", *TINY, "runtime.modes=[reuse_repair,prr]")
    for r in results(root):
        assert (r["model"], r["weights"], r["size"], r["device"]) == ("glm4", "random", "tiny", "cpu")
        assert 0 < r["parameters"] < 1_000_000
    who, folder = "glm4 (tiny, random weights, cpu) x quest", root / "evaluate"
    header, first, *_ = (folder / "results.csv").read_text().splitlines()
    assert header.startswith("model,weights,size,parameters,device,") and first.startswith("glm4,random,tiny,")
    shown = capsys.readouterr().out
    remarks = ("Weights are random", "does not have its true size", "Times are of a CPU")
    for text in ((folder / "results.md").read_text(), (folder / "paper.md").read_text(), shown):
        assert who in text and [r for r in remarks if r not in " ".join(text.split())] == []
    paper = (folder / "paper.md").read_text()
    assert [n for n in ("1.50 /", "1.41 /", "98.05", "0.672") if n in paper] == [], (
        "the paper's numbers of glm4 x quest"
    )
    assert f"Whole table and legend: {folder / 'results.md'}" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80 and "Not shown in 80 columns" in shown
    assert len(drawn) == 6
    assert [s for s in drawn if who not in s and "glm4 (tiny, random weights) x quest, cpu" not in s] == []


def test_an_answer_without_steps_is_an_error(run: Runner, monkeypatch: pytest.MonkeyPatch, no_plots: None) -> None:
    monkeypatch.setattr(load, "_eos_ids", lambda *_: tuple(range(512)))  # every token ends the answer
    words = (*TINY, "budget=off", "runtime.modes=[prr]", "stages=[decode,evaluate]")
    said = run.refused(*words, kind=PrrError)
    assert said.startswith("no decode step was measured: every answer ended at its first token")
    root = run.root(*words)
    assert (root / "evaluate" / "results.md").exists() and not (root / "evaluate" / "manifest.json").exists()


def test_each_step_weighs_the_same_in_the_table_and_in_the_plot(run: Runner, no_plots: None) -> None:
    root = run(*TINY, "benchmark.num_samples=2", "runtime.modes=[prr]", "stages=[calibrate,decode,evaluate]")
    lines = [json.loads(line) for line in (root / "decode" / "samples.jsonl").read_text().splitlines()]
    cut = [r | {"step_records": r["step_records"][: 3 if r["id"].endswith("0") else None]} for r in lines]
    row = evaluate._row(_Job(), {"model": "m"}, [r for r in cut if r["mode"] == "prr"])
    steps = evaluate._flat([r for r in cut if r["mode"] == "prr"], "step_records")
    (axes,) = plots.overlap_figure(steps, "m", "d").axes
    written = [text.get_text() for text in axes.texts]
    shown = [f"mean of all steps {100 * row[key]:.1f} %" for key in ("hit_rate_dynamic", "overlap_last")]
    assert written == shown
    plain = [s["hit_dynamic"] for s in steps]
    assert row["hit_rate_dynamic"] == pytest.approx(sum(plain) / len(plain))
    assert row["ms_per_token"] == pytest.approx(sum(s["ms"] for s in steps) / len(steps))


class _Job:
    """What a row takes of a job."""

    class method:
        name, budget_tokens = "quest", 128

    class benchmark:
        name, queries = "ruler", "model"

    class cfg:
        seed = 0


def test_the_console_is_as_wide_as_the_terminal_says_and_whole_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"model": "m", "dsa": "quest", "benchmark": "b", "task": "t", "mode": "serial", "steps": 3}]
    for columns, whole in ((None, True), ("60", False), ("120", True)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        evaluate._show({"rows": rows, "device": "cpu"}, tmp_path / "results.md")
        shown = capsys.readouterr().out
        assert ("dense/all" in shown.splitlines()[0]) == whole and ("Not shown" in shown) != whole
