# SPDX-License-Identifier: Apache-2.0
"""Results as tables: CSV for programs, Markdown and a console table for people, and the paper's.

A row is one (model, method, benchmark, task, mode) of `results.json`; scores, rates and shares are
fractions in it and percentages in the tables. What is unknown is "-" (an empty field in the CSV).
"""

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prr_pipeline.config import MODES
from prr_pipeline.tracking import paper

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]

COLUMNS = (
    *("model", "dsa", "benchmark", "queries", "task", "mode", "repair", "delta", "n", "score"),
    *("ms_per_token", "speedup", "hit_rate_dynamic", "hit_rate_all", "overlap_last", "missed_per_step"),
    *("wasted_per_step", "tokens_equal_serial", "logits_equal_serial", "dense_steps", "steps"),
    *("truncated", "nulls", "budget_tokens", "seed"),
)
TASK = ("model", "dsa", "benchmark", "queries", "task", "budget_tokens", "seed")
CONSOLE_WIDTH = 114  # columns that the console table needs with the longest task names
SPECULATIVE = ("reuse", "reuse_repair", "prr")

LEGEND = (
    "dense: all blocks. serial: select blocks A, then attend them. reuse: attend the last A while"
    " selecting; any miss redoes A. reuse_repair: only misses are computed. prr: the same from a"
    " forecast P (x1.25: P may hold 1.25 times the blocks of A).",
    "hit: share of A that was predicted, of dynamic (not forced) blocks/of all. missed: blocks of A"
    " to repair. wasted: blocks of P outside A. Both a step, layer and KV head.",
    "= serial: samples with the same tokens/with bit-equal logits. dense/all steps: steps in which"
    " no layer selected, of all steps. -: does not apply or was not measured.",
)


def with_speedup(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Add `speedup` (ms per token of serial over the row's own), None where either is unknown.

    The serial row is that of the same task, token budget and seed; the mean of several, if a sweep
    measured it more than once.
    """
    listed = [dict(row) for row in rows]
    for group in _groups(listed):
        serial = _mean(row.get("ms_per_token") for row in group if row["mode"] == "serial")
        for row in group:
            own = _number(row.get("ms_per_token"))
            row["speedup"] = serial / own if serial and own else None
    return listed


def to_csv(rows: Iterable[Row], path: Path) -> None:
    """Write the rows with their speed-up; unknown values are empty fields."""
    listed = with_speedup(rows)
    extra = dict.fromkeys(key for row in listed for key in row if key not in COLUMNS)
    columns = [*COLUMNS, *extra]
    partial = path.with_name(path.name + ".part")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in listed:
            writer.writerow(["" if _absent(row.get(key)) else row[key] for key in columns])
    os.replace(partial, path)


def to_markdown(rows: Iterable[Row]) -> str:
    """Return a section a task with a table of its modes and footnotes, and a legend at the end."""
    parts = []
    heading = ""
    for group in _groups(with_speedup(rows)):
        if (pair := _pair(group[0])) != heading:
            heading = pair
            parts.append(f"## {pair}")
        notes = _Notes()
        parts += [f"### {notes.mark(_title(group[0]), _task_notes(group))}", _setting(group[0])]
        body = [[notes.mark(_mode(row), _mode_notes(row)), *_cells(row)] for row in group]
        parts += [_grid(["mode", *map(" ".join, _HEADS)], body), *notes.lines()]
    return "\n\n".join([*parts, "---", *LEGEND] if parts else ["No results."]) + "\n"


def console(rows: Iterable[Row]) -> "Table":
    """Return the Markdown's content as one rich table.

    Cells are cut on a narrower console than CONSOLE_WIDTH; give one of that width where the output
    is not a terminal (rich takes 80 columns there).
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    notes = _Notes()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("", no_wrap=True)
    for head in _HEADS:
        table.add_column("\n".join(head), justify="right", no_wrap=True)
    heading = ""
    for group in _groups(with_speedup(rows)):
        if (pair := _pair(group[0])) != heading:
            heading = pair
            table.add_row(Text(pair, style="bold cyan"))
        table.add_row(Text(notes.mark(_title(group[0]), _task_notes(group)), style="bold"))
        table.add_row(Text(_setting(group[0]), style="dim"))
        for row in group:
            cells = ["  " + notes.mark(_mode(row), _mode_notes(row)), *_cells(row)]
            style = "green" if row["mode"] == "prr" else ""
            table.add_row(*(Text(cell, style=style) for cell in cells))
        table.add_section()
    caption = Text("\n", style="not italic")
    for line in notes.lines():
        caption.append(line + "\n", style="bold red" if _FAULT in line else "")
    caption.append("\n".join(LEGEND if heading else ["No results."]), style="dim")
    table.caption = caption
    return table


# ---- one row ----

_FAULT = "FAULT"
_HEADS = (
    ("score", "%"),
    ("ms per", "token"),
    ("speed-up", "over serial"),
    ("hit %", "dyn/all"),
    ("missed", "blocks"),
    ("wasted", "blocks"),
    ("= serial %", "tok/logit"),
    ("dense/all", "steps"),
)


def _cells(row: Row) -> list[str]:
    """Return the cells of _HEADS."""
    same = (row.get("tokens_equal_serial"), row.get("logits_equal_serial"))
    return [
        _percent(row.get("score")),
        _fixed(row.get("ms_per_token"), 2),
        _fixed(row.get("speedup"), 2),
        _both(_percent(row.get("hit_rate_dynamic")), _percent(row.get("hit_rate_all"))),
        _fixed(row.get("missed_per_step"), 2),
        _fixed(row.get("wasted_per_step"), 2),
        _both(*map(_percent, same)) if row["mode"] != "serial" else "-",
        _both(_fixed(row.get("dense_steps"), 0), _fixed(row.get("steps"), 0)),
    ]


def _mode(row: Row) -> str:
    """Return the mode with what tells its variants apart, such as `prr exact x1.25`."""
    delta = _number(row.get("delta")) if row["mode"] == "prr" else None
    parts = [row["mode"], row.get("repair"), None if delta is None else f"x{delta:g}"]
    return " ".join(part for part in parts if part)


def _pair(row: Row) -> str:
    return f"{row['model']} x {row['dsa']}"


def _title(row: Row) -> str:
    """Return benchmark/task, or one name where both are the same."""
    names = dict.fromkeys((row["benchmark"], row["task"]))
    return "/".join(names)


def _setting(row: Row) -> str:
    parts = (("n", "n"), ("budget_tokens", "token budget"), ("seed", "seed"))
    return ", ".join(f"{name} {_fixed(row.get(key), 0)}" for key, name in parts)


class _Notes:
    """Footnotes: the same note has one letter, wherever it applies."""

    def __init__(self) -> None:
        self._letters: dict[str, str] = {}

    def mark(self, label: str, notes: Iterable[str]) -> str:
        """Append to a label the letters of its notes."""
        letters = sorted(self._letters.setdefault(note, self._next()) for note in notes)
        return f"{label} [{','.join(letters)}]" if letters else label

    def lines(self) -> list[str]:
        return [f"[{letter}] {note}" for note, letter in self._letters.items()]

    def _next(self) -> str:
        high, low = divmod(len(self._letters), 26)
        return (chr(ord("a") + high - 1) if high else "") + chr(ord("a") + low)


def _task_notes(group: Sequence[Row]) -> Iterable[str]:
    if _synthetic(group[0]):
        kept = _percent(_mean(row.get("overlap_last") for row in group))
        yield f"synthetic queries over random keys: {kept} % of the dynamic blocks of A were in the A before."
    if truncated := max(_number(row.get("truncated")) or 0 for row in group):
        yield f"{truncated:.0f} of {_fixed(group[0].get('n'), 0)} prompts were cut to fit."
    if all(row["speedup"] is None for row in group):
        yield "no time of serial, so no speed-up."


def _mode_notes(row: Row) -> Iterable[str]:
    if never_selected(row):
        yield "dense: context below budget, nothing was selected: no test of the method."
    elif row["mode"] != "dense" and _number(row.get("dense_steps")):
        yield "partly dense: in some steps the context was below budget."
    if nulls := _number(row.get("nulls")):
        yield f"{nulls:.0f} of {_fixed(row.get('n'), 0)} predictions were empty."
    if row["mode"] not in SPECULATIVE:
        return
    if _number(row.get("delta")) == 0:
        yield "budget 0: speculation does not pay here, so every step ran as serial."
    if row.get("repair") == "union":
        yield "union repair: blocks of P outside A count too, so the output may leave serial's."
    elif any(
        (share := _number(row.get(name))) is not None and share < 1
        for name in ("tokens_equal_serial", "logits_equal_serial")
    ):
        yield f"{_FAULT}: exact repair promises the output of serial, and this is another."


# ---- the paper's tables ----

_PAPER_NOTE = (
    f"The paper is {paper.SOURCE}: two H100 (tensor parallel 2), half precision, batch 1. Its"
    " serial baseline runs FlashInfer's BlockSparseAttention; whether its overlaps count forced"
    " blocks is not said. Ours is this run against its own serial: the mean over the tasks of a"
    " benchmark and over the benchmarks, without tasks in which nothing was selected. -: not in the"
    " paper, or not run."
)


def paper_tables(rows: Iterable[Row]) -> str:
    """Return the paper's tables 1, 2/8, 4/7 and 5 as Markdown, our numbers beside its numbers.

    Every model x method of the results has a line, a variant of prr (repair, delta) each; the
    paper's side is "-" where it has no such pair.
    """
    timed = with_speedup(rows)
    selected = [row for row in timed if row["mode"] in SPECULATIVE and not never_selected(row)]
    pairs: dict[str, list[Row]] = {}
    for row in selected:
        budget = _fixed(row.get("budget_tokens"), 0)
        pairs.setdefault(f"{_pair(row)}, token budget {budget}", []).append(row)
    if not pairs:
        return "No results to set beside the paper's.\n"
    named = dict.fromkeys(_benchmark(row) for row in selected)
    shown = [*paper.BENCHMARKS, *(name for name in named if name not in paper.BENCHMARKS)]
    lines = [line for pair, own in pairs.items() for line in _paper_lines(pair, own, shown)]
    who, overlap = ["model x method", "prr"], ["paper", "ours, dynamic", "ours, all", "ours over"]
    sections = {
        "Table 1: speed-up of PRR over serial DSA (paper / ours)": [*who, *shown, "average"],
        "Tables 2 and 8: speed-up of the stages over serial DSA (paper / ours)": [
            *(*who, "S1 reuse", "S2 reuse_repair", "S3 prr", "ours over")
        ],
        "Tables 4 and 7: overlap of P with A, %": [*who, *overlap],
        "Table 5: overlap of A with the A before, a fraction": [who[0], *overlap],
    }
    parts = ["## Beside the paper", _PAPER_NOTE]
    for index, (title, columns) in enumerate(sections.items()):
        body = list(dict.fromkeys(line[index] for line in lines))  # table 5 knows no variants
        parts += [f"### {title}", _grid(columns, body)]
    return "\n\n".join(parts) + "\n"


def _paper_lines(pair: str, own: Sequence[Row], shown: Sequence[str]) -> Iterable[tuple[tuple[str, ...], ...]]:
    """Yield, for each variant of prr, its line of each of the four tables."""
    key = (paper.paper_name(own[0]["model"]) or "", paper.paper_name(own[0]["dsa"]) or "")
    speed = dict(zip((*paper.BENCHMARKS, "average"), paper.SPEEDUP.get(key, ()), strict=False))
    stages = paper.ABLATION.get(key, (None, None, None))
    modes = {mode: [row for row in own if row["mode"] == mode] for mode in SPECULATIVE}
    last_a = modes["reuse_repair"] or modes["reuse"]  # both speculate on the last A
    last = [_fixed(paper.OVERLAP_LAST.get(key), 3)]
    last += [_fixed(value, 3) for value in _overlaps(last_a)]
    for label, prr in _variants(modes["prr"]):
        by = _by_benchmark(prr, "speedup")
        ours = [_average(_by_benchmark(modes[mode], "speedup")) for mode in SPECULATIVE[:2]]
        ours.append(_average(by))
        tasks = [_beside(speed.get(name), by.get(name)) for name in shown]
        ratios = [_beside(*values) for values in zip(stages, ours, strict=True)]
        predicted = [_fixed(paper.OVERLAP_PREDICTED.get(key), 2)]
        predicted += [_percent(value, 2) for value in _overlaps(prr)]
        yield (
            (pair, label, *tasks, _beside(speed.get("average"), ours[2])),
            (pair, label, *ratios, _over(own)),
            (pair, label, *predicted, _over(prr)),
            (pair, *last, _over(last_a)),
        )


def _variants(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Split the rows of prr by repair, and by delta where a task was run with several of them.

    A budget that follows the context has another delta a task, and is still one variant.
    """
    variants: dict[str, list[Row]] = {}
    for repair in dict.fromkeys(row.get("repair") for row in rows):
        same = [row for row in rows if row.get("repair") == repair]
        swept = len({_key(row) for row in same}) < len(same)
        for row in same:
            variants.setdefault(_mode(row) if swept else f"prr {repair or ''}", []).append(row)
    named = [(label.removeprefix("prr").strip() or "-", own) for label, own in variants.items()]
    return named or [("not run", [])]


def _benchmark(row: Row) -> str:
    if _synthetic(row):
        return f"{row['benchmark']} (synthetic queries)"
    return paper.paper_name(row["benchmark"]) or row["benchmark"]


def _by_benchmark(rows: Sequence[Row], column: str) -> dict[str, float]:
    """Return the mean of a column over the tasks of each benchmark."""
    means = {}
    for name in dict.fromkeys(map(_benchmark, rows)):
        mean = _mean(row.get(column) for row in rows if _benchmark(row) == name)
        if mean is not None:
            means[name] = mean
    return means


def _averaged(names: Iterable[str]) -> list[str]:
    """Return the benchmarks that an average is over: the paper's, else whatever there is."""
    listed = list(names)
    return [name for name in listed if name in paper.BENCHMARKS] or listed


def _average(by_benchmark: Mapping[str, float]) -> float | None:
    return _mean(by_benchmark[name] for name in _averaged(by_benchmark))


def _overlaps(rows: Sequence[Row]) -> list[float | None]:
    columns = ("hit_rate_dynamic", "hit_rate_all")
    return [_average(_by_benchmark(rows, column)) for column in columns]


def _over(rows: Sequence[Row]) -> str:
    return ", ".join(_averaged(dict.fromkeys(map(_benchmark, rows)))) or "-"


# ---- values, groups and grids ----


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in TASK)


def _groups(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows a task, in order of appearance, each task's modes in canonical order."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [sorted(group, key=_order) for group in groups.values()]


def _order(row: Row) -> tuple[int, str, float]:
    mode = MODES.index(row["mode"]) if row["mode"] in MODES else len(MODES)
    return mode, row.get("repair") or "", _number(row.get("delta")) or 0.0


def _synthetic(row: Row) -> bool:
    return row.get("queries") == "synthetic"


def never_selected(row: Row) -> bool:
    """Whether a sparse mode ran, and was dense in every step."""
    dense, steps = _number(row.get("dense_steps")), _number(row.get("steps"))
    return row["mode"] != "dense" and bool(steps) and dense is not None and dense >= (steps or 0)


def _number(value: Any) -> float | None:
    """Return a finite number as such; None for what is absent, NaN or infinite."""
    return None if _absent(value) else float(value)


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _mean(values: Iterable[Any]) -> float | None:
    known = [number for value in values if (number := _number(value)) is not None]
    return sum(known) / len(known) if known else None


def _fixed(value: Any, digits: int) -> str:
    number = _number(value)
    return "-" if number is None else f"{number:.{digits}f}"


def _percent(value: Any, digits: int = 1) -> str:
    number = _number(value)
    return _fixed(None if number is None else 100 * number, digits)


def _both(first: str, second: str) -> str:
    """Join two cells that share a column; "-" if neither is known."""
    return "-" if first == second == "-" else f"{first}/{second}"


def _beside(theirs: float | None, ours: float | None) -> str:
    return "-" if theirs is ours is None else f"{_fixed(theirs, 2)} / {_fixed(ours, 2)}"


def _grid(columns: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: names to the left, numbers to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
