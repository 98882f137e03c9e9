# SPDX-License-Identifier: Apache-2.0
"""The paper's tables 1, 2/8, 4/7 and 5 with our numbers beside its numbers, where they are of the same kind."""

from collections.abc import Iterable, Mapping, Sequence

from prr_pipeline.tracking import paper
from prr_pipeline.tracking.cells import fixed, grid, mean, percent
from prr_pipeline.tracking.tables import (
    SPECULATIVE,
    Row,
    mode_label,
    never_selected,
    pair_label,
    synthetic,
    task_key,
    with_speedup,
)

_PAPER_NOTE = (
    f"The paper is {paper.SOURCE}: two H100 (tensor parallel 2), half precision, batch 1. Its"
    " serial baseline runs FlashInfer's BlockSparseAttention; whether its overlaps count forced"
    " blocks is not said. Ours is this run against its own serial: the mean over the tasks of a"
    " benchmark and over the benchmarks, without tasks in which nothing was selected. -: not in the"
    " paper, or not run. A model that is not at its true size has no number of the paper beside its"
    " own, and overlaps of random weights or synthetic queries have none either. Table 5: ours is the hit"
    " rate of reuse_repair (else of reuse), whose P is what the last scores select for the next step: but for"
    " a sample's first step and those that begin a block, the A before."
)


def paper_tables(*jobs: Iterable[Row]) -> str:
    """Return the paper's tables 1, 2/8, 4/7 and 5 as Markdown, our numbers beside its numbers.

    Every model x method of the results has a line, a variant of prr (repair, delta) each; the
    paper's side is "-" where it has no such pair. A speed-up is over the serial of the same job.
    """
    timed = [row for rows in jobs for row in with_speedup(rows)]
    selected = [row for row in timed if row["mode"] in SPECULATIVE and not never_selected(row)]
    pairs: dict[str, list[Row]] = {}
    for row in selected:
        budget = fixed(row.get("budget_tokens"), 0)
        pairs.setdefault(f"{pair_label(row)}, token budget {budget}", []).append(row)
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
        parts += [f"### {title}", grid(columns, body)]
    return "\n\n".join(parts) + "\n"


def _paper_lines(pair: str, own: Sequence[Row], shown: Sequence[str]) -> Iterable[tuple[tuple[str, ...], ...]]:
    """Yield, for each variant of prr, its line of each of the four tables."""
    key = (paper.paper_name(own[0]["model"]) or "", paper.paper_name(own[0]["dsa"]) or "")
    if own[0].get("size") != "true":
        key = ("", "")
    own_overlap = own[0].get("weights") != "random" and not all(map(synthetic, own))
    overlap_key = key if own_overlap else ("", "")
    speed = dict(zip((*paper.BENCHMARKS, "average"), paper.SPEEDUP.get(key, ()), strict=False))
    stages = paper.ABLATION.get(key, (None, None, None))
    modes = {mode: [row for row in own if row["mode"] == mode] for mode in SPECULATIVE}
    last_a = modes["reuse_repair"] or modes["reuse"]  # both speculate on the last A
    last = [fixed(paper.OVERLAP_LAST.get(overlap_key), 3)]
    last += [fixed(value, 3) for value in _overlaps(last_a)]
    for label, prr in _variants(modes["prr"]):
        by = _by_benchmark(prr, "speedup")
        ours = [_average(_by_benchmark(modes[mode], "speedup")) for mode in SPECULATIVE[:2]]
        ours.append(_average(by))
        tasks = [_beside(speed.get(name), by.get(name)) for name in shown]
        ratios = [_beside(*values) for values in zip(stages, ours, strict=True)]
        predicted = [fixed(paper.OVERLAP_PREDICTED.get(overlap_key), 2)]
        predicted += [percent(value, 2) for value in _overlaps(prr)]
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
        swept = len({task_key(row) for row in same}) < len(same)
        for row in same:
            variants.setdefault(mode_label(row) if swept else f"prr {repair or ''}", []).append(row)
    named = [(label.removeprefix("prr").strip() or "-", own) for label, own in variants.items()]
    return named or [("not run", [])]


def _benchmark(row: Row) -> str:
    if synthetic(row):
        return f"{row['benchmark']} (synthetic queries)"
    return paper.paper_name(row["benchmark"]) or row["benchmark"]


def _by_benchmark(rows: Sequence[Row], column: str) -> dict[str, float]:
    """Return the mean of a column over the tasks of each benchmark."""
    means = {}
    for name in dict.fromkeys(map(_benchmark, rows)):
        over = mean(row.get(column) for row in rows if _benchmark(row) == name)
        if over is not None:
            means[name] = over
    return means


def _averaged(names: Iterable[str]) -> list[str]:
    """Return the benchmarks that an average is over: the paper's, else whatever there is."""
    listed = list(names)
    return [name for name in listed if name in paper.BENCHMARKS] or listed


def _average(by_benchmark: Mapping[str, float]) -> float | None:
    return mean(by_benchmark[name] for name in _averaged(by_benchmark))


def _overlaps(rows: Sequence[Row]) -> list[float | None]:
    columns = ("hit_rate_dynamic", "hit_rate_all")
    return [_average(_by_benchmark(rows, column)) for column in columns]


def _over(rows: Sequence[Row]) -> str:
    return ", ".join(_averaged(dict.fromkeys(map(_benchmark, rows)))) or "-"


def _beside(theirs: float | None, ours: float | None) -> str:
    return "-" if theirs is ours is None else f"{fixed(theirs, 2)} / {fixed(ours, 2)}"
