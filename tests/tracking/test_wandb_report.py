# SPDX-License-Identifier: Apache-2.0
"""A report is built offline from a finished job's files; only saving it needs W&B."""

import builtins
import json
import shutil
import sys

import pytest
from finished import finished, seal

from prr_pipeline.errors import MissingInput
from prr_pipeline.tracking import report


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "smollm2_quest" / "0123456789ab"
    config = {"experiment": "smollm2_quest", "seed": 7, "runtime": {"repair": "exact"}, "budget": {"name": "fixed"}}
    of = {"model": "m", "dsa": "quest", "benchmark": "ruler"}
    rows = [of | {"task": t, "mode": m} for t in ("niah", "vt") for m in ("serial", "prr")]
    return finished(folder, config, {"evaluate/results.json": {"rows": rows}, "evaluate/results.md": "| the table |"})


def test_a_section_shows_the_table_and_the_runs_of_the_job(job):
    built = report.build([report.load_job(job)], "p", "e", "t")
    *text, grid = built.blocks
    assert "| the table |" in [getattr(b, "text", None) for b in text]
    assert "Metric('Group') == 'smollm2_quest-0123456789ab'" in grid.runsets[0].filters
    bars = [p for p in grid.panels if type(p).__name__ == "BarPlot"]
    assert [p.title for p in bars] == ["niah: score", "niah: ms_per_token", "vt: score", "vt: ms_per_token"]
    assert [m.name for m in bars[2].metrics] == ["vt/serial/score", "vt/prr/score"]


def test_dry_run_lists_headings_and_what_is_under_them(job, capsys):
    table = "| mode | score % |\n| --- | ---: |"
    (job / "evaluate/results.md").write_text(f"## m x quest\n\n### ruler/vt [a]\n\n{table}\n\n[a] a note\n")
    (job / "evaluate/paper.md").write_text("no heading")
    seal(job)
    assert report.main([str(job), "--dry-run", "--title", "Mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "report: Mine",
        "  table of contents",
        "",
        "# smollm2_quest-0123456789ab",
        "  seed 7, repair exact, budget fixed",
        "  ## m x quest",
        "  ### ruler/vt [a]",
        "  table: mode | score %",
        "  text",
        *(f"  bar chart: {task}: {metric}" for task in ("niah", "vt") for metric in ("score", "ms_per_token")),
        "  plots that there are of: breakdown, overlap, hit_rate, layers, latency, layer",
    ]


def test_a_table_over_jobs_names_what_differs_and_keeps_each_job_s_own_serial(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)  # it needs none
    for number, (delta, serial) in enumerate(((1.0, 10.0), (2.0, 30.0))):
        folder = tmp_path / "sweep" / f"hash{number}"
        config = {"experiment": "sweep", "seed": 7, "budget": {"name": "fixed", "delta": delta}}
        of = {"model": "m", "weights": "hub", "dsa": "quest", "benchmark": "ruler", "budget_tokens": 64, "seed": 7}
        rows = [
            of | {"task": task, "mode": mode, "delta": delta, "ms_per_token": ms, "steps": 9, "hit_rate_all": 0.5}
            for task in ("niah", "vt")
            for mode, ms in (("serial", serial), ("prr", 5.0))
        ]
        finished(folder, config, {"evaluate/results.json": {"rows": rows}})
    assert report.main([*map(str, sorted((tmp_path / "sweep").iterdir())), "--table"]) == 0
    first, second, _, head, _, *body = capsys.readouterr().out.splitlines()
    assert first == "- job 1: sweep-hash0: m (hub weights) x quest, budget.delta=1.0"
    assert second == "- job 2: sweep-hash1: m (hub weights) x quest, budget.delta=2.0"
    assert head.startswith("| task | mode | job | score % | ms per token | speed-up over serial |")
    cells = [[c.strip() for c in line.split("|")[1:7]] for line in body if line]
    assert cells[:4] == [
        ["ruler/niah", "serial", "1", "-", "10.00", "1.00"],
        ["ruler/niah", "serial", "2", "-", "30.00", "1.00"],
        ["ruler/niah", "prr x1", "1", "-", "5.00", "2.00"],
        ["ruler/niah", "prr x2", "2", "-", "5.00", "6.00"],
    ]
    assert len(cells) == 8


def listed(tmp_path, capsys, *jobs):
    """The list of jobs that --table prints: what it says of each behind its pair, which is `model x method` alone."""
    for number, config in enumerate(jobs):
        names = {group: config.get(group, {}).get("name", group[0]) for group in ("model", "dsa", "benchmark")}
        rows = [names | {"task": "vt", "mode": mode} for mode in ("serial", "prr")]
        finished(tmp_path / "s" / f"h{number}", {"experiment": "s"} | config, {"evaluate/results.json": {"rows": rows}})
    assert report.main([*map(str, sorted((tmp_path / "s").iterdir())), "--table"]) == 0
    said = [line.split(": ", 2) for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert [first for first, *_ in said] == [f"- job {n}" for n in range(1, len(jobs) + 1)]
    return [f"{group[2:]}: {what}" for _, group, what in said]


def test_jobs_of_a_sweep_are_ordered_by_pair_and_by_numbers_as_such(tmp_path, capsys):
    jobs = [{"dsa": {"name": "quest"}, "budget": {"delta": delta}} for delta in (10.0, 2, None, 1.5)]
    jobs.append({"dsa": {"name": "infllm_v2"}, "budget": {"delta": 9.0}})
    assert listed(tmp_path, capsys, *jobs) == [
        "h4: m x infllm_v2, budget.delta=9.0",
        "h2: m x quest",
        "h3: m x quest, budget.delta=1.5",
        "h1: m x quest, budget.delta=2",
        "h0: m x quest, budget.delta=10.0",
    ]


def test_what_an_option_s_name_says_is_not_said_key_by_key(tmp_path, capsys):
    ruler = {"_target_": "b.Ruler", "name": "ruler", "tasks": ["vt"], "haystack": None}
    locality = {"_target_": "b.Locality", "name": "locality", "drift": 0.33}
    quest, infllm = ({"_target_": f"d.{n}", "name": n, "top_k": k} for n, k in (("quest", 9), ("infllm_v2", 8)))
    fixed = {"_target_": "b.Fixed", "name": "fixed", "delta": 1.5}
    off = {"_target_": "b.Off", "name": "off"}
    jobs = [
        {"benchmark": ruler | {"length": 2048}, "dsa": quest, "budget": off},
        {"benchmark": ruler | {"length": 2048}, "dsa": quest, "budget": fixed, "runtime": {"repair": "union"}},
        {"benchmark": ruler | {"length": 2048}, "dsa": quest, "budget": fixed | {"delta": 2.0}},
        {"benchmark": locality | {"length": 4096}, "dsa": infllm, "budget": fixed},
    ]
    assert listed(tmp_path, capsys, *jobs) == [
        "h3: m x infllm_v2, budget=fixed, benchmark.length=4096, budget.delta=1.5",
        "h1: m x quest, budget=fixed, benchmark.length=2048, budget.delta=1.5, runtime.repair=union",
        "h2: m x quest, budget=fixed, benchmark.length=2048, budget.delta=2.0",
        "h0: m x quest, budget=off, benchmark.length=2048",
    ]


def test_another_class_under_the_same_name_is_said(tmp_path, capsys):
    jobs = [{"dsa": {"_target_": f"{m}.Quest", "name": "quest"}, "seed": 0} for m in ("theirs", "mine")]
    assert listed(tmp_path, capsys, *jobs) == [
        "h1: m x quest, dsa._target_=mine.Quest",
        "h0: m x quest, dsa._target_=theirs.Quest",
    ]


def test_the_paper_s_tables_over_jobs_have_a_line_a_pair_and_a_column_a_context(tmp_path, capsys):
    of = {"weights": "random", "size": "true", "device": "gpu", "benchmark": "locality", "task": "locality"}
    of |= {"queries": "synthetic", "budget_tokens": 64, "seed": 7, "steps": 9, "delta": 1.5}
    jobs = [("glm4", "quest", 32768, 3.0), ("glm4", "quest", 65536, 5.0), ("glm4", "infllm_v2", 65536, 4.0)]
    jobs.append(("glm4", "infllm_v2", 65536, 6.0))  # the same again on a slower machine: each over its own serial
    for number, (model, dsa, length, serial) in enumerate(jobs):
        folder = tmp_path / f"hash{number}"
        own = of | {"model": model, "dsa": dsa}
        rows = [own | {"mode": m, "ms_per_token": ms} for m, ms in (("serial", serial), ("prr", 2.0))]
        config = {"experiment": "speed", "benchmark": {"length": length}}
        finished(folder, config, {"evaluate/results.json": {"rows": rows}})
    assert report.main([*map(str, sorted(tmp_path.iterdir())), "--paper"]) == 0
    first = capsys.readouterr().out.split("###")[1].splitlines()
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in first if line.startswith("|")]
    at = [i for i, c in enumerate(cells[0]) if c.startswith("locality")]
    assert [cells[0][i] for i in at] == [f"locality at {n} (synthetic queries)" for n in (32768, 65536)]
    assert [[row[0].split(",")[0][:4], row[0].count("quest"), *(row[i] for i in at)] for row in cells[2:]] == [
        ["glm4", 1, "- / 1.50", "- / 2.50"],
        ["glm4", 0, "-", "- / 2.50"],
    ]


@pytest.mark.parametrize("gone", ["config.json", "evaluate/manifest.json", "evaluate/results.json"])
def test_an_unfinished_job_is_named(job, gone, capsys):
    (job / gone).unlink()
    assert report.main([str(job)]) == 2
    assert f"no {gone}" in capsys.readouterr().err


def changed(path, text):
    path.write_text(path.read_text() + text)


def remade(job, stage):
    """Let a stage's output count as another one."""
    path = job / stage / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))


def hollow(manifest):
    """Let it say that nothing was made of nothing."""
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"inputs": {}, "outputs": {}}))


def resealed(job, name, text):
    """A file that its manifest knows, and that is still no file of results."""
    (job / name).write_text(text)
    seal(job)


ROWS = "evaluate/results.json is damaged (no rows with benchmark, dsa, mode, model, task); "
EVALUATE = "redo it with force=true stages=[evaluate]"
STALE = "evaluate was made of other outputs than there are now; these differ: "
DAMAGE = {
    "results": (
        lambda job: changed(job / "evaluate/results.json", " "),
        f"results.json changed since evaluate wrote it; {EVALUATE}",
    ),
    "table": (lambda job: (job / "evaluate/results.md").unlink(), "results.md is missing since evaluate wrote it; "),
    "records": (
        lambda job: changed(job / "decode/samples.jsonl", "{}\n"),
        "samples.jsonl changed since decode wrote it; redo it with force=true stages=[decode]",
    ),
    "decode": (lambda job: remade(job, "decode"), f"{STALE}decode; redo it: stages=[decode,evaluate]"),
    "calibrate": (
        lambda job: remade(job, "calibrate"),
        f"{STALE}calibrate; redo it: stages=[decode,evaluate]",
    ),
    "gone": (
        lambda job: shutil.rmtree(job / "decode"),
        "decode has none; run it too: stages=[decode,evaluate]",
    ),
    "manifest": (lambda job: (job / "evaluate/manifest.json").write_text("{}"), "manifest.json is damaged ('config')"),
    "no JSON": (lambda job: (job / "config.json").write_text("{"), "config.json is damaged (Expecting property name"),
    "no UTF-8": (lambda job: (job / "config.json").write_bytes(b"\xff"), "config.json is damaged ('utf-8' codec"),
    "no object": (lambda job: (job / "config.json").write_text("[1]"), "config.json is damaged (no experiment in it)"),
    "no pairs": (lambda job: (job / "config.json").write_text('[["experiment", 1]]'), "(no experiment in it); "),
    "hollow": (lambda job: hollow(job / "evaluate/manifest.json"), "is damaged (results.json or decode is not in it)"),
    "no keys": (lambda job: (job / "config.json").write_text("{}"), "config.json is damaged (no experiment in it); "),
    "no rows": (lambda job: resealed(job, "evaluate/results.json", '{"rows": []}'), ROWS + EVALUATE),
    "bare rows": (lambda job: resealed(job, "evaluate/results.json", '{"rows": [{"task": "vt"}]}'), ROWS + EVALUATE),
    "a list": (lambda job: resealed(job, "evaluate/results.json", "[]"), "results.json is damaged (no rows in it); "),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_job_that_is_stale_or_damaged_is_not_finished(job, what, capsys):
    """It is named with what to do, alone and among others."""
    other = job.parent / "ba9876543210"
    shutil.copytree(job, other)
    finished(other, json.loads((other / "config.json").read_text()), {"calibrate/samples.jsonl": []})
    assert report.main([str(other), "--table"]) == 0
    break_it, said = DAMAGE[what]
    capsys.readouterr()
    break_it(other)
    assert report.main([str(other), "--table"]) == 2
    alone = capsys.readouterr().err
    assert alone.startswith(f"report: {other}: ") and said in alone and alone.count("\n") == 1
    assert report.main([str(other), str(job), "--table"]) == 0
    assert capsys.readouterr().err == alone.replace("report: ", "report: left out: ", 1)


def test_the_stages_before_decode_may_be_gone(job):
    """As for the program itself: the records that were made of them stand."""
    finished(job, json.loads((job / "config.json").read_text()), {"calibrate/samples.jsonl": []})
    shutil.rmtree(job / "calibrate")
    assert report.main([str(job), "--table"]) == 0


@pytest.mark.parametrize("how", ["--table", "--dry-run"])
def test_unfinished_jobs_of_a_sweep_are_left_out_by_name(job, how, capsys):
    assert report.main([str(job), how]) == 0
    alone = capsys.readouterr().out
    other = job.parent / "ba9876543210"
    (other / "decode").mkdir(parents=True)
    (other / "config.json").write_text("{}")
    assert report.main([str(other), str(job), how]) == 0
    out, err = capsys.readouterr()
    assert out == alone and out
    assert err.startswith(f"report: left out: {other}: no evaluate/manifest.json") and err.count("\n") == 1


def test_the_missing_extra_is_named(job, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("wandb_workspaces"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingInput, match="pip install wandb-workspaces"):
        report.build([report.load_job(job)], "p", "e", "t")


@pytest.fixture
def no_login(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_without_a_login_one_line_says_what_gets_further(job, no_login, capsys):
    assert report.main([str(job)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("report: no W&B login") and said.err.count("\n") == 1
    assert all(word in said.err for word in ("`wandb login`", "--table", "--dry-run"))
    assert report.main([str(job), "--dry-run"]) == 0


def test_what_w_b_refuses_is_one_line_too(job, no_login, monkeypatch, capsys):
    def refuses(_):
        raise RuntimeError("no such entity\nand more")

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("wandb_workspaces.reports.v2.Report.save", refuses)
    assert report.main([str(job)]) == 2
    said = capsys.readouterr().err
    assert "W&B did not take the report (RuntimeError: no such entity): " in said and said.count("\n") == 1
