# SPDX-License-Identifier: Apache-2.0
"""Golden tables of hand-made rows: what a reader sees, and no unknown value that reads as one."""

import csv
import io
import math
import re

import pytest
from rich.console import Console

from prr_pipeline.tracking import paper
from prr_pipeline.tracking.beside import paper_tables
from prr_pipeline.tracking.tables import (
    COLUMNS,
    CONSOLE_WIDTH,
    console,
    described,
    joint,
    to_csv,
    to_markdown,
    with_speedup,
)

GLM4 = "glm4_9b_1m (hub weights, NVIDIA H200)"


def row(mode, ms, **changes):
    known = {
        "model": "glm4_9b_1m",
        "weights": "hub",
        "size": "true",
        "parameters": 9_484_000_000,
        "device": "NVIDIA H200",
        "dsa": "quest",
        "benchmark": "longbench",
        "queries": "model",
        "task": "qasper",
        "mode": mode,
        "repair": None,
        "delta": None,
        "n": 8,
        "score": 0.412,
        "ms_per_token": ms,
        "hit_rate_dynamic": None,
        "hit_rate_all": None,
        "overlap_last": None,
        "missed_per_step": None,
        "wasted_per_step": None,
        "tokens_equal_serial": None,
        "logits_equal_serial": None,
        "dense_steps": 0,
        "steps": 640,
        "truncated": 0,
        "nulls": 0,
        "budget_tokens": 4096,
        "seed": 0,
    }
    assert set(changes) <= set(known)
    return known | changes


EXACT = {"repair": "exact", "tokens_equal_serial": 1.0, "logits_equal_serial": 1.0}
REUSED = {"hit_rate_dynamic": 0.672, "hit_rate_all": 0.81, "missed_per_step": 21.0}
FORECAST = {"delta": 1.25, "hit_rate_dynamic": 0.98, "hit_rate_all": 0.99, "missed_per_step": 1.5}


def task_rows(**changes):
    """The five modes of a task, out of order."""
    return [
        row("prr", 8.0, **(EXACT | FORECAST | {"wasted_per_step": 17.25} | changes)),
        row("serial", 12.0, **changes),
        row("reuse", 12.5, **(EXACT | REUSED | changes)),
        row("reuse_repair", 10.0, **(EXACT | REUSED | changes)),
        row("dense", 20.0, tokens_equal_serial=0.75, dense_steps=640, **changes),
    ]


def rendered(rows, width=CONSOLE_WIDTH):
    out = io.StringIO()
    Console(file=out, width=width).print(console(rows, width), soft_wrap=True)
    return out.getvalue()


def test_markdown_is_as_expected():
    expected = """\
## glm4_9b_1m (hub weights, NVIDIA H200) x quest

### longbench/qasper [a]

n 8, token budget 4096, seed 0

| mode | score % | ms per token | speed-up over serial | hit % dyn/all | missed blocks \
| wasted blocks | = serial % tok/logit | dense/all steps |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| dense | 41.2 | 20.00 | 0.60 | - | - | - | 75.0/- | 640/640 |
| serial | 41.2 | 12.00 | 1.00 | - | - | - | - | 0/640 |
| reuse exact | 41.2 | 12.50 | 0.96 | 67.2/81.0 | 21.00 | - | 100.0/100.0 | 0/640 |
| reuse_repair exact | 41.2 | 10.00 | 1.20 | 67.2/81.0 | 21.00 | - | 100.0/100.0 | 0/640 |
| prr exact x1.25 | 41.2 | 8.00 | 1.50 | 98.0/99.0 | 1.50 | 17.25 | 100.0/100.0 | 0/640 |

[a] 2 of 8 prompts were cut to fit.

---

dense: all blocks."""
    assert to_markdown(task_rows(truncated=2)).startswith(expected)


def test_console_says_the_same_within_its_width():
    rows = task_rows() + task_rows(benchmark="infinitebench", task="longbook_choice_eng")
    rows += task_rows(model="smollm2", benchmark="locality", task="locality")
    text = rendered(rows)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= CONSOLE_WIDTH
    assert "\u2026" not in text  # nothing was cut
    cells = [" ".join(line.split()) for line in lines]
    prr = "prr exact x1.25 41.2 8.00 1.50 98.0/99.0 1.50 17.25 100.0/100.0 0/640"
    assert cells.count(prr) == 3
    for heading in (f"{GLM4} x quest", "infinitebench/longbook_choice_eng", "locality"):
        assert heading in lines
    assert lines.count(f"{GLM4} x quest") == 1
    assert "hit: share of A that was predicted" in text and lines[-1] == "Whole table and legend: results.md"
    assert "Not shown" not in text


DROPPED = {
    60: "dense/all steps, wasted blocks, missed blocks, hit % dyn/all",
    80: "dense/all steps, wasted blocks",
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_console_drops_whole_columns_and_says_which(width):
    rows = task_rows(truncated=2) + task_rows(model="smollm2", benchmark="infinitebench", task="longbook_choice_eng")
    text = console(rows, width, "runs/a/long/path/that/is/not/wrapped/evaluate/results.md", ["A remark " * 9]).plain
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines[:-1])
    assert lines[-1].endswith(" runs/a/long/path/that/is/not/wrapped/evaluate/results.md")
    cells = {60: "41.2 8.00 1.50 100.0/100.0", 80: "41.2 8.00 1.50 98.0/99.0 1.50 100.0/100.0"}
    whole = "41.2 8.00 1.50 98.0/99.0 1.50 17.25 100.0/100.0 0/640"
    assert f"prr exact x1.25 {cells.get(width, whole)}" in [" ".join(line.split()) for line in lines]
    said = [] if width not in DROPPED else [f"Not shown in {width} columns: {DROPPED[width]}."]
    assert [s for s in said if s not in " ".join(text.split())] == [] and ("Not shown" in text) == bool(said)
    assert len({line.index("token") for line in lines if "token over" in line}) == 1, "heads and cells are aligned"


@pytest.mark.parametrize("width", [24, 40, 60, 80, CONSOLE_WIDTH])
def test_the_legend_speaks_of_the_columns_that_are_there_and_the_promise_is_the_last_to_go(width):
    rows = task_rows(device="cpu")
    text = " ".join(console(rows, width).plain.split("---")[-1].split())
    heads = console(rows, width).plain.split("---")[0]
    for head, said in (("hit %", "hit: share of A"), ("= serial %", "= serial: samples")):
        assert (head in heads) == (said in text), head
    assert ("speed-up" in heads) == (width == CONSOLE_WIDTH), "of a CPU, where nothing overlaps"
    assert ("= serial %" in heads) == (width >= 40)
    if width < CONSOLE_WIDTH:
        assert f"Not shown in {width} columns: speed-up over serial" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, GLM4),
        ({"weights": "random", "device": "cpu"}, "glm4_9b_1m (random weights, cpu)"),
        ({"weights": "random", "size": "tiny", "device": "cpu"}, "glm4_9b_1m (tiny, random weights, cpu)"),
        ({"weights": "local", "size": "other"}, "glm4_9b_1m (of another size, local weights, NVIDIA H200)"),
        ({"weights": None, "size": None, "device": None}, "glm4_9b_1m"),
    ],
)
def test_headings_say_what_the_numbers_are_of(changes, text):
    rows = task_rows(**changes)
    assert described(rows[0]) == text
    assert f"## {text} x quest\n" in to_markdown(rows)
    assert f"\n{text} x quest\n" in console(rows).plain
    assert f"| {text} x quest, token budget 4096 |" in paper_tables(rows)


def test_rows_of_other_weights_sizes_or_devices_are_never_compared():
    for changes in ({"weights": "random"}, {"size": "tiny"}, {"parameters": 1}, {"device": "cpu"}):
        (prr,) = (r for r in with_speedup([row("serial", 10.0), row("prr", 5.0, **changes)]) if r["mode"] == "prr")
        assert prr["speedup"] is None


def test_unknown_values_are_dashes_and_never_nan(tmp_path):
    rows = [row("serial", None), row("prr", math.nan, score=None, hit_rate_all=0.5, delta=math.inf)]
    markdown = to_markdown(rows)
    assert "| prr | - | - | - | -/50.0 | - | - | - | 0/640 |" in markdown
    assert "### longbench/qasper [a]" in markdown
    assert "[a] no time of serial, so no speed-up." in markdown
    to_csv(rows, tmp_path / "rows.csv")
    everything = markdown + rendered(rows) + paper_tables(rows) + (tmp_path / "rows.csv").read_text()
    assert "nan" not in everything.lower() and "None" not in everything


def test_footnotes_name_the_special_cases():
    rows = [
        row("serial", 10.0, dense_steps=640, steps=640),
        row("reuse", 10.0, dense_steps=10, nulls=3, **EXACT),
        row("reuse_repair", 10.0, **(EXACT | {"logits_equal_serial": 0.99})),
        row("prr", 10.0, delta=0.0, repair="union", tokens_equal_serial=0.5),
    ]
    text = to_markdown(rows)
    notes = {
        "serial [a]": ("[a] dense: context below budget, nothing was selected: no test of the method."),
        "reuse exact [b,c]": "[b] partly dense: in some steps the context was below budget.",
        "| reuse exact": "[c] 3 of 8 predictions were empty.",
        "reuse_repair exact [d]": ("[d] FAULT: exact repair promises the output of serial, and this is another."),
        "prr union x0 [e,f]": ("[e] budget 0: nothing was predicted, so every step ran as serial."),
        "| prr": ("[f] union repair: blocks of P outside A count too, so the output may leave serial's."),
    }
    for label, note in notes.items():
        assert label in text
        assert note in text
        assert note in rendered(rows)


def test_a_task_without_steps_says_so():
    none = [row(mode, None, steps=0, **(EXACT if mode == "prr" else {})) for mode in ("serial", "prr")]
    text = to_markdown([*none, row("serial", 1.0, task="other")])
    assert "[a] no decode step was measured: every answer ended at its first token." in text
    assert "longbench/qasper [a]" in text and "longbench/other\n" in text and "budget 0" not in text


def test_synthetic_queries_are_said_and_never_mixed_with_the_model_s_own():
    drawn = task_rows(queries="synthetic", overlap_last=0.671)
    rows = [*task_rows(), *drawn]
    note = "[a] synthetic queries over random keys: 67.1 % of the dynamic blocks of A were in the A before."
    for text in (to_markdown(rows), " ".join(rendered(rows).split())):
        assert note in text and text.count("longbench/qasper [a]") == 1 and text.count("longbench/qasper") == 2
    assert "synthetic" not in to_markdown(task_rows(overlap_last=0.671))
    who = f"{GLM4} x quest, token budget 4096"
    assert line(paper_tables(drawn), "Table 5", who).endswith("| longbench (synthetic queries) |")
    assert line(paper_tables(rows), "Table 5", who).endswith("| LongBench |"), "ours is over real queries only"


def test_speedup_needs_the_same_task_budget_and_seed():
    rows = [
        row("serial", 10.0),
        row("serial", 14.0),
        row("serial", 30.0, seed=1),
        row("serial", 40.0, budget_tokens=1024),
        row("prr", 6.0, **FORECAST),
        row("prr", 6.0, seed=1, **FORECAST),
        row("prr", 6.0, task="other", **FORECAST),
    ]
    speedups = [r["speedup"] for r in with_speedup(rows) if r["mode"] == "prr"]
    assert speedups == [2.0, 5.0, None]
    assert "speedup" not in rows[0]


def test_csv_has_every_column_and_the_speedup(tmp_path):
    path = tmp_path / "results.csv"
    to_csv([r | {"gpu": "x"} for r in task_rows()], path)
    assert [p.name for p in tmp_path.iterdir()] == ["results.csv"]
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [*COLUMNS, "gpu"]
    assert len(read) == 5
    prr = next(r for r in read if r["mode"] == "prr")
    assert float(prr["speedup"]) == 1.5 and float(prr["delta"]) == 1.25
    assert prr["hit_rate_dynamic"] == "0.98"
    serial = next(r for r in read if r["mode"] == "serial")
    assert serial["hit_rate_dynamic"] == "" and serial["repair"] == ""


def line(text, section, start):
    body = text.split(f"### {section}")[1].split("###")[0]
    return next(each for each in body.splitlines() if each.startswith(f"| {start}"))


def test_paper_tables_set_ours_beside_its_numbers():
    rows = task_rows() + task_rows(task="hotpotqa", ms_per_token=None)
    rows += [
        row("serial", 9.0, benchmark="ruler", task="vt"),
        row("prr", 7.5, benchmark="ruler", task="vt", **(EXACT | FORECAST | {"delta": 1.5})),
        row("serial", 9.0, benchmark="locality", task="locality"),
        row("prr", 1.0, benchmark="locality", task="locality", repair="exact", delta=1.5),
        row("serial", 9.0, benchmark="math500", task="math500", dense_steps=640),
        row("prr", 9.0, benchmark="math500", task="math500", repair="exact", dense_steps=640),
    ]
    text = paper_tables(rows)
    who = f"{GLM4} x quest, token budget 4096"
    # the average is over the paper's benchmarks that selected: (1.5 + 1.2) / 2
    assert line(text, "Table 1", who) == (
        f"| {who} | exact | 1.50 / 1.50 | 1.40 / - | 1.45 / 1.20 | 1.30 / - | 1.42 / - | - / 9.00 | 1.42 / 1.35 |"
    )
    assert line(text, "Tables 2 and 8", who) == (
        f"| {who} | exact | 1.00 / 0.96 | 1.20 / 1.20 | 1.41 / 1.35 | LongBench, RULER |"
    )
    assert line(text, "Tables 4 and 7", who) == (f"| {who} | exact | 98.05 | 98.00 | 99.00 | LongBench, RULER |")
    assert line(text, "Table 5", who) == f"| {who} | 0.672 | 0.672 | 0.810 | LongBench |"


PAPER_CELLS = {
    "Table 1": "1.42 / ",
    "Tables 2 and 8": "1.41 / ",
    "Tables 4 and 7": "| 98.05 |",
    "Table 5": " 4096 | 0.672 |",
}


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, {"Table 1", "Tables 2 and 8", "Tables 4 and 7", "Table 5"}),
        ({"device": "cpu"}, {"Table 1", "Tables 2 and 8", "Tables 4 and 7", "Table 5"}),
        ({"weights": "random"}, {"Table 1", "Tables 2 and 8"}),
        ({"queries": "synthetic"}, {"Table 1", "Tables 2 and 8"}),
        ({"weights": "random", "size": "tiny"}, set()),
        ({"weights": "random", "size": "unknown"}, set()),
        ({"weights": "local", "size": "other"}, set()),
    ],
)
def test_the_paper_s_numbers_stand_beside_those_of_their_kind_only(changes, beside):
    text = paper_tables(task_rows(**changes))
    assert {t for t, cell in PAPER_CELLS.items() if cell in line(text, t, "glm4_9b_1m (")} == beside
    assert "no number of the paper beside" in text


@pytest.mark.parametrize("delta", [None, 0.0])
def test_prr_without_a_budget_says_so(delta):
    rows = [row("serial", 10.0), row("prr", 8.5, **(EXACT | {"delta": delta}))]
    assert [r["speedup"] for r in with_speedup(rows)] == [1.0, None], "it did what serial did: 1.18 would be noise"
    assert "| 8.50 | - |" in to_markdown(rows) and "1.18" not in rendered(rows) + paper_tables(rows)
    assert "[a] budget 0: nothing was predicted, so every step ran as serial." in to_markdown(rows)
    assert "budget 0" not in to_markdown([row("serial", 10.0), row("reuse", 10.0, **EXACT)])
    assert "budget 0" not in to_markdown(task_rows())


def test_a_sweep_of_deltas_has_a_line_each_and_other_models_have_no_paper():
    rows = task_rows(model="smollm2_135m")
    rows.append(row("prr", 6.0, model="smollm2_135m", repair="exact", delta=2.0))
    text = paper_tables(rows)
    who = "smollm2_135m (hub weights, NVIDIA H200) x quest, token budget 4096"
    for delta, speedup in (("1.25", "1.50"), ("2", "2.00")):
        assert line(text, "Table 1", f"{who} | exact x{delta}") == (
            f"| {who} | exact x{delta} | - / {speedup} | - | - | - | - | - / {speedup} |"
        )
    assert text.split("### Table 5")[1].count(who) == 1


def test_the_legend_s_example_is_a_width_that_was_run():
    assert "forecast P (x1.5: P may hold 1.5 times the blocks of A)." in to_markdown(task_rows(delta=1.5))
    text = to_markdown([row("serial", 10.0), row("prr", 10.0, **EXACT)])
    assert "forecast P." in text and "(x" not in text and "{" not in text


def test_a_name_cannot_break_a_table():
    rows = task_rows(task="a|b", model="m|n")
    table = joint({"job|1": rows})
    body = [line for line in table.splitlines() if "a\\|b" in line]
    assert len(body) == 5 and all("job\\|1" in line for line in body)
    tables_of_both = [line for text in (table, paper_tables(rows)) for line in text.splitlines() if line[:1] == "|"]
    cells = {len(re.split(r"(?<!\\)\|", line)) for line in tables_of_both if line.startswith("| longbench")}
    assert cells == {len(table.splitlines()[0].split("|"))}
    assert "| m\\|n (hub weights, NVIDIA H200) x quest" in paper_tables(rows)


def test_table_5_says_whose_overlap_ours_is():
    assert "Table 5: ours is the hit rate of reuse_repair" in " ".join(paper_tables(task_rows()).split())


@pytest.mark.parametrize("make", [to_markdown, paper_tables, rendered])
def test_no_rows_say_so(make):
    assert "No results" in make([])


def test_paper_numbers_agree_with_its_averages():
    pairs = {(model, method) for model in paper.MODELS for method in paper.METHODS}
    for table in (paper.SPEEDUP, paper.ABLATION, paper.OVERLAP_PREDICTED, paper.OVERLAP_LAST):
        assert set(table) == pairs
    for key, (*each, average) in paper.SPEEDUP.items():
        assert sum(each) / len(each) == pytest.approx(average, abs=0.013), key
        assert paper.ABLATION[key][2] == pytest.approx(average, abs=0.011), key
    assert paper.SPEEDUP["GLM-4", "InfLLM-v2"][3] == 1.62
    assert paper.SPEEDUP["Qwen3-32B", "Quest"][1] == 1.34
    assert paper.ABLATION["DeepSeek-R1", "InfLLM-v2"] == (1.01, 1.22, 1.44)
    assert paper.OVERLAP_PREDICTED["Qwen3-14B", "InfLLM-v2"] == 98.57
    assert paper.OVERLAP_LAST["DeepSeek-R1", "Quest"] == 0.636


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("glm4", "GLM-4"),
        ("glm-4-9b-chat-1m", "GLM-4"),
        ("GLM-Z1-9B-0414", "GLM-Z1"),
        ("glm_z1_32b", None),
        ("glm4_5", None),
        ("llama3_8b_1m", "Llama3"),
        ("llama3.1-8b", None),
        ("deepseek_r1_8b", "DeepSeek-R1"),
        ("qwen3_14b", "Qwen3-14B"),
        ("qwen3_32b", "Qwen3-32B"),
        ("qwen3_0_6b", None),
        ("smollm2_135m", None),
        ("infllm_v2", "InfLLM-v2"),
        ("longbench", "LongBench"),
        ("longbench_v2", None),
        ("aime2024", "AIME"),
        ("aime2025", None),
        ("math500", "MATH500"),
    ],
)
def test_names_of_the_paper(ours, theirs):
    assert paper.paper_name(ours) == theirs
