# SPDX-License-Identifier: Apache-2.0
"""Results as tables: CSV for programs, Markdown and a console table for people.

A row is one (model, method, benchmark, task, mode) of `results.json`; scores, rates and shares are
fractions in it and percentages in the tables. What is unknown is "-" (an empty field in the CSV).
"""

import csv
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prr_pipeline.config import MODES
from prr_pipeline.tracking.cells import absent, both, fixed, grid, mean, number, percent

if TYPE_CHECKING:
    from rich.text import Text

Row = Mapping[str, Any]

COLUMNS = (
    *("model", "weights", "size", "parameters", "device"),
    *("dsa", "benchmark", "queries", "task", "mode", "repair", "delta", "n", "score"),
    *("ms_per_token", "speedup", "hit_rate_dynamic", "hit_rate_all", "overlap_last", "missed_per_step"),
    *("wasted_per_step", "tokens_equal_serial", "logits_equal_serial", "dense_steps", "steps"),
    *("truncated", "nulls", "budget_tokens", "seed"),
)
TASK = (
    *("model", "weights", "size", "parameters", "device"),
    *("dsa", "benchmark", "queries", "task", "budget_tokens", "seed"),
)
SIZES = {"tiny": "tiny", "other": "of another size", "unknown": "of unknown size"}  # but for the true one
CONSOLE_WIDTH = 114  # columns that the whole console table needs
SPECULATIVE = ("reuse", "reuse_repair", "prr")

LEGEND = (
    "dense: all blocks. serial: select blocks A, then attend them. reuse: attend the last A while"
    " selecting; any miss redoes A. reuse_repair: only misses are computed. prr: the same from a"
    " forecast P{width}.",
    "hit: share of A that was predicted, of dynamic (not forced) blocks/of all. missed: blocks of A"
    " to repair. wasted: blocks of P outside A. Both a step, layer and KV head.",
    "= serial: samples with the same tokens/with bit-equal logits. dense/all steps: steps in which"
    " no layer selected, of all steps. -: does not apply or was not measured.",
    "Means are over all decode steps of all samples, each step with the same weight, where the value is known;"
    " score and = serial are over samples.",
)
_WIDTH = " (x{0:g}: P may hold {0:g} times the blocks of A)"
_SHORT = {  # by the column that it is about
    "mode": "dense: all blocks. serial: select, then attend. reuse, reuse_repair: attend the last A while selecting."
    " prr: attend a forecast.",
    "hit % dyn/all": "hit: share of A that was predicted, of dynamic/of all blocks.",
    "= serial % tok/logit": "= serial: samples with the same tokens/logits.",
}


def with_speedup(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Add `speedup` (ms per token of serial over the row's own), None where either is unknown or both did the same.

    The serial row is that of the same task, model, weights, device, token budget and seed; the mean of
    several, if a sweep measured it more than once.
    """
    listed = [dict(row) for row in rows]
    for group in _groups(listed):
        serial = mean(row.get("ms_per_token") for row in group if row["mode"] == "serial")
        for row in group:
            own = number(row.get("ms_per_token"))
            row["speedup"] = serial / own if serial and own and not _unbudgeted(row) else None
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
            writer.writerow(["" if absent(row.get(key)) else row[key] for key in columns])
    os.replace(partial, path)


def to_markdown(rows: Iterable[Row]) -> str:
    """Return a section a task with a table of its modes and footnotes, and a legend at the end."""
    parts = []
    heading = ""
    groups = _groups(with_speedup(rows))
    for group in groups:
        if (pair := pair_label(group[0])) != heading:
            heading = pair
            parts.append(f"## {pair}")
        notes = _Notes()
        parts += [f"### {notes.mark(_title(group[0]), _task_notes(group))}", _setting(group[0])]
        body = [[notes.mark(mode_label(row), _mode_notes(row)), *_cells(row)] for row in group]
        parts += [grid(["mode", *map(" ".join, _HEADS)], body), *notes.lines()]
    legend = _legend(row for group in groups for row in group)
    return "\n\n".join([*parts, "---", *legend] if parts else ["No results."]) + "\n"


def _legend(rows: Iterable[Row]) -> list[str]:
    """Return LEGEND, its example of a width of P the first that was run, if any."""
    widths = (number(row.get("delta")) for row in rows if row["mode"] == "prr")
    width = next(filter(None, widths), None)
    return [text.format(width=_WIDTH.format(width) if width else "") for text in LEGEND]


def joint(jobs: Mapping[str, Iterable[Row]]) -> str:
    """Return one table over several jobs, by task, mode and job; a speed-up is over the serial of the same job.

    Args:
        jobs: rows of `results.json`, by a short name of the job.
    """
    named = [(name, row) for name, rows in jobs.items() for row in with_speedup(rows)]
    order = list(dict.fromkeys(_title(row) for _, row in named))
    named.sort(key=lambda one: (order.index(_title(one[1])), _order(one[1])[0]))  # jobs stay in their order
    notes = _Notes()
    body = [[_title(r), notes.mark(mode_label(r), _mode_notes(r)), name, *_cells(r)] for name, r in named]
    return "\n\n".join([grid(["task", "mode", "job", *map(" ".join, _HEADS)], body), *notes.lines()]) + "\n"


def console(
    rows: Iterable[Row], width: int = CONSOLE_WIDTH, whole: str = "results.md", remarks: Iterable[str] = ()
) -> "Text":
    """Return the Markdown's content as text of at most that many columns; print it with soft_wrap=True.

    Where the columns of the table do not fit, some are dropped, those that say least first; the text then names them.

    Args:
        rows: of `results.json`.
        width: of the terminal.
        whole: where the whole table is, for the last line; the only one that is never wrapped.
        remarks: paragraphs for the end.
    """
    notes = _Notes()
    lines: list[tuple[str | list[str], str]] = []  # a heading or cells; style
    heading = ""
    groups = _groups(with_speedup(rows))
    for group in groups:
        if (pair := pair_label(group[0])) != heading:
            heading = pair
            lines.append((pair, "bold cyan"))
        lines.append((notes.mark(_title(group[0]), _task_notes(group)), "bold"))
        lines.append((_setting(group[0]), "dim"))
        for row in group:
            cells = ["  " + notes.mark(mode_label(row), _mode_notes(row)), *_cells(row)]
            lines.append((cells, "green" if row["mode"] == "prr" else ""))
        lines.append(("", ""))
    heads = [["", *(head[i] for head in _HEADS)] for i in (0, 1)]
    on_cpu = all(row.get("device") == "cpu" for group in groups for row in group)
    order = ("speed-up over serial",) * on_cpu + _DROPPED_FIRST  # a CPU does not overlap: it says least there
    widths, dropped = _fitted([*heads, *(line for line, _ in lines if isinstance(line, list))], width, order)
    return _text(heads, lines, widths, _after(notes, dropped, width, whole, remarks) if heading else [], width)


_DROPPED_FIRST = (
    "dense/all steps",
    "wasted blocks",
    "missed blocks",
    "hit % dyn/all",
    "score %",
    "= serial % tok/logit",  # what the project promises
)


def _fitted(table: Sequence[Sequence[str]], width: int, order: Iterable[str]) -> tuple[dict[int, int], list[str]]:
    """Return the width of each column that is kept, by its index, and the names of those that are not."""
    names = ["mode", *map(" ".join, _HEADS)]
    widths = {i: max(len(row[i]) for row in table) for i in range(len(names))}
    dropped: list[str] = []
    for name in order:
        if sum(widths.values()) + len(widths) - 1 <= width:
            break
        del widths[names.index(name)]
        dropped.append(name)
    return widths, dropped


def _after(
    notes: "_Notes", dropped: Sequence[str], width: int, whole: str, remarks: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the lines under the table, with their styles."""
    after = [(line, "bold red" if _FAULT in line else "") for line in notes.lines()]
    short = " ".join(text for column, text in _SHORT.items() if column not in dropped)
    after += [(text, "dim") for text in (short, *remarks)]
    if dropped:
        after.append((f"Not shown in {width} columns: {', '.join(dropped)}.", "bold"))
    return [*after, (f"Whole table and legend: {whole}", "dim")]


def _text(
    heads: Sequence[Sequence[str]],
    lines: Sequence[tuple[str | list[str], str]],
    widths: Mapping[int, int],
    after: Sequence[tuple[str, str]],
    width: int,
) -> "Text":
    from rich.text import Text

    def cut(cells: Sequence[str]) -> str:
        return " ".join(cells[i].ljust(w) if i == 0 else cells[i].rjust(w) for i, w in widths.items()).rstrip()

    text = Text()
    for head in heads:
        text.append(cut(head) + "\n")
    text.append("-" * (sum(widths.values()) + len(widths) - 1) + "\n", style="dim")
    for line, style in lines:
        text.append((_wrapped(line, width) if isinstance(line, str) else cut(line)) + "\n", style=style)
    for line, style in after[:-1]:
        text.append(_wrapped(line, min(width, CONSOLE_WIDTH)) + "\n", style=style)
    text.append(after[-1][0] if after else "No results.", style="dim")
    return text


def _wrapped(line: str, width: int) -> str:
    return textwrap.fill(" ".join(line.split()), width, break_long_words=False, break_on_hyphens=False)


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
        percent(row.get("score")),
        fixed(row.get("ms_per_token"), 2),
        fixed(row.get("speedup"), 2),
        both(percent(row.get("hit_rate_dynamic")), percent(row.get("hit_rate_all"))),
        fixed(row.get("missed_per_step"), 2),
        fixed(row.get("wasted_per_step"), 2),
        both(*map(percent, same)) if row["mode"] != "serial" else "-",
        both(fixed(row.get("dense_steps"), 0), fixed(row.get("steps"), 0)),
    ]


def mode_label(row: Row) -> str:
    """Return the mode with what tells its variants apart, such as `prr exact x1.25`."""
    delta = number(row.get("delta")) if row["mode"] == "prr" else None
    parts = [row["mode"], row.get("repair"), None if delta is None else f"x{delta:g}"]
    return " ".join(part for part in parts if part)


def described(row: Row, *, device: bool = True) -> str:
    """Return the model with what its numbers depend on: `glm4 (tiny, random weights, cpu)`."""
    weights = f"{row['weights']} weights" if row.get("weights") else ""
    facts = [SIZES.get(row.get("size") or "", ""), weights, (row.get("device") or "") if device else ""]
    known = ", ".join(filter(None, facts))
    return f"{row['model']} ({known})" if known else row["model"]


def pair_label(row: Row) -> str:
    """Return model and method, as headings name them."""
    return f"{described(row)} x {row['dsa']}"


def _title(row: Row) -> str:
    """Return benchmark/task, or one name where both are the same."""
    names = dict.fromkeys((row["benchmark"], row["task"]))
    return "/".join(names)


def _setting(row: Row) -> str:
    parts = (("n", "n"), ("budget_tokens", "token budget"), ("seed", "seed"))
    return ", ".join(f"{name} {fixed(row.get(key), 0)}" for key, name in parts)


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
    if synthetic(group[0]):
        kept = percent(mean(row.get("overlap_last") for row in group))
        yield f"synthetic queries over random keys: {kept} % of the dynamic blocks of A were in the A before."
    if truncated := max(number(row.get("truncated")) or 0 for row in group):
        yield f"{truncated:.0f} of {fixed(group[0].get('n'), 0)} prompts were cut to fit."
    if all(number(row.get("steps")) == 0 for row in group):
        yield "no decode step was measured: every answer ended at its first token."
    elif all(row["speedup"] is None for row in group):
        yield "no time of serial, so no speed-up."


def _mode_notes(row: Row) -> Iterable[str]:
    if never_selected(row):
        yield "dense: context below budget, nothing was selected: no test of the method."
    elif row["mode"] != "dense" and number(row.get("dense_steps")):
        yield "partly dense: in some steps the context was below budget."
    if nulls := number(row.get("nulls")):
        yield f"{nulls:.0f} of {fixed(row.get('n'), 0)} predictions were empty."
    if row["mode"] not in SPECULATIVE:
        return
    if _unbudgeted(row):
        yield "budget 0: nothing was predicted, so every step ran as serial."
    if row.get("repair") == "union":
        yield "union repair: blocks of P outside A count too, so the output may leave serial's."
    elif any(
        (share := number(row.get(name))) is not None and share < 1
        for name in ("tokens_equal_serial", "logits_equal_serial")
    ):
        yield f"{_FAULT}: exact repair promises the output of serial, and this is another."


# ---- groups, and what rows are ----


def task_key(row: Row) -> tuple[Any, ...]:
    """Return what rows that may be compared have in common."""
    return tuple(row.get(name) for name in TASK)


def _groups(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows a task, in order of appearance, each task's modes in canonical order."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(task_key(row), []).append(row)
    return [sorted(group, key=_order) for group in groups.values()]


def _order(row: Row) -> tuple[int, str, float]:
    mode = MODES.index(row["mode"]) if row["mode"] in MODES else len(MODES)
    return mode, row.get("repair") or "", number(row.get("delta")) or 0.0


def synthetic(row: Row) -> bool:
    """Whether the queries of the decode steps were drawn, not the model's own."""
    return row.get("queries") == "synthetic"


def _unbudgeted(row: Row) -> bool:
    """Whether prr had no budget (budget=off, or delta is 0) and so predicted nothing."""
    unpredicted = bool(number(row.get("steps"))) and number(row.get("hit_rate_all")) is None
    return row["mode"] == "prr" and not number(row.get("delta")) and unpredicted


def never_selected(row: Row) -> bool:
    """Whether a sparse mode ran, and was dense in every step."""
    dense, steps = number(row.get("dense_steps")), number(row.get("steps"))
    return row["mode"] != "dense" and bool(steps) and dense is not None and dense >= (steps or 0)
