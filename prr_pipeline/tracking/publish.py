# SPDX-License-Identifier: Apache-2.0
"""Finished jobs on a GPU -> one published file: ms a token by mode, its floor, and what speculation hid.

    python -m prr_pipeline.tracking.publish runs/speed/* --out runs/published/h200/decode.json

Each row is a task in a mode, from the job's own records. floor_ms is what a step must read (weights, metadata, A) over
the read bandwidth of the GPU: the highest that a profile of these jobs measured, since memory that is not the best
placed was seen to give an eighth less. hidden is what prr saves over serial, both in CUDA graphs, over what
speculation could hide at best: in every layer that selects, the shorter of selection (scores and top-K) and attention
over P. Run it on the machine of the jobs: the file names its GPU and driver. With --keep, jobs that are in the file and
not published anew (a job is its configuration's hash) stay in it with the commit that they are of, and get their floor
at the new bandwidth. Later, anywhere, the file becomes a table:

    python -m prr_pipeline.tracking.publish --out runs/published/h200/decode.json --document README.md
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prr_pipeline.artifacts import redo
from prr_pipeline.errors import MissingInput, PrrError
from prr_pipeline.tracking.cells import grid
from prr_pipeline.tracking.report import load_finished, stage_folder

Row = dict[str, Any]
_KEYS = ("model", "weights", "device", "dsa", "benchmark", "queries", "task", "mode", "repair", "delta", "n", "score")
_NAMED = {"job", "mode", "dsa"}  # what a row of a file of this program has at least
_MEANS = (
    "hit_rate_dynamic",
    "overlap_last",
    "missed_per_step",
    "wasted_per_step",
    "tokens_equal_serial",
    "logits_equal_serial",
)


def measured(jobs: Sequence[Row]) -> Row:
    """Of jobs, see report.load_job: ceiling_tbs, the highest read bandwidth that a profile measured; published rows."""
    profiles = [_profile(job) for job in jobs]
    ceiling = max((p["ceiling_tbs"] for p in profiles if p.get("ceiling_tbs")), default=None)
    rows = [row for job, profile in zip(jobs, profiles, strict=True) for row in _rows_of(job, profile, ceiling)]
    return {"ceiling_tbs": ceiling, "rows": rows}


def _rows_of(job: Row, profile: Row, ceiling: float | None) -> list[Row]:
    """Rows of a job; raises MissingInput where its records lack what is published, as those of another version may."""
    try:
        return _rows(job, profile, ceiling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        raise MissingInput(
            f"{job['folder']}: its records lack what is published ({type(error).__name__}: {error}); "
            + redo("calibrate", "profile", "decode", "evaluate")
        ) from error


def _profile(job: Row) -> Row:
    """The profile of a job, if it has one.

    Raises:
        ArtifactError: it is damaged.
    """
    stage = stage_folder(job["folder"], "profile", job["config"])
    return json.loads((stage / "profile.json").read_text(encoding="utf-8")) if stage.load() else {}


def _rows(job: Row, profile: Row, ceiling: float | None) -> list[Row]:
    lines = (job["folder"] / "decode" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    found = [{"job": job["folder"].name} | _row(row, job["config"], samples, profile, ceiling) for row in job["rows"]]
    serial = {row["task"]: row for row in found if row["mode"] == "serial"}
    for row in found:
        row["hidden"] = _hidden(row, serial[row["task"]])
    return found


def _row(row: Row, config: Row, samples: list[Row], profile: Row, ceiling: float | None) -> Row:
    own = [s for s in samples if (s["task"], s["mode"]) == (row["task"], row["mode"])]
    context = round(sum(s["prompt_tokens"] for s in own) / len(own))
    read = sum(s["read_bytes"] for s in own) / len(own)
    asked = config["benchmark"].get("length") or context
    return {
        **{key: row.get(key) for key in _KEYS},
        "context": asked,
        "budget_tokens": row["budget_tokens"],
        "ms_per_token": _rounded(row["ms_per_token"]),
        "read_bytes": round(read),
        "floor_ms": _floor(read, ceiling),
        **_parts(profile, asked, row["delta"]),
        "sparse_layers": max(s["sparse_layers"] for s in own),
        **{key: _rounded(row.get(key)) for key in _MEANS},
        "budget_policy": config["budget"]["name"],
    }


def _floor(read: float | None, ceiling: float | None) -> float | None:
    return _rounded(read / ceiling * 1e-9) if read and ceiling else None


def _parts(profile: Row, context: int, delta: float | None) -> Row:
    """Us of a layer's parts at the nearest profiled context; of attention over P where there is a P, else over A.

    None where no delta is the row's: a mean over samples of several, say.
    """
    unknown = dict.fromkeys(("select_us", "attend_us", "repair_us"))
    if not profile:
        return unknown
    nearest = min((r["context"] for r in profile["rows"]), key=lambda c: abs(c - context))
    at = {r["delta"]: r for r in profile["rows"] if r["context"] == nearest}
    if delta:
        return {key: at.get(delta, {}).get(key) for key in unknown}
    parts = next(p for p in profile["breakdown"] if p["context"] == nearest)
    return {"select_us": parts["select_us"], "attend_us": parts["attend_us"], "repair_us": None}


def _hidden(row: Row, serial: Row) -> float | None:
    if row["mode"] != "prr" or not row["delta"] or row["select_us"] is None or not serial["ms_per_token"]:
        return None
    most = row["sparse_layers"] * min(row["select_us"], row["attend_us"]) * 1e-3
    return _rounded((serial["ms_per_token"] - row["ms_per_token"]) / most) if most else None


def joined(head: Row, before: Row) -> Row:
    """A file with the jobs of one before it that it has no new rows of; those say the commit that they are of.

    Raises:
        ValueError: the two are of different GPUs.
    """
    if head["gpu"] != before["gpu"]:
        raise ValueError(f"--keep: what is there was measured on {before['gpu']}, this on {head['gpu']}")
    new = {row["job"] for row in head["rows"]}
    kept = [
        {"commit": before["commit"], **row, "floor_ms": _floor(row.get("read_bytes"), head["ceiling_tbs"])}
        for row in before["rows"]
        if row["job"] not in new
    ]
    return {**head, "rows": head["rows"] + kept}


MARKERS = ("<!-- decode: generated by prr_pipeline.tracking.publish -->", "<!-- /decode -->")
_COLUMNS = ("paper_serial", "serial_eager", "dense", "serial", "reuse", "reuse_repair", "prr")


def table(data: Row) -> str:
    """Markdown: ms a token by mode, a line a (model, method, context)."""
    from cutlass_kernels import report

    head = ["model x method", "context", "A", *_COLUMNS, "floor", "delta", "hit %", "hidden"]
    at = f", floor at {data['ceiling_tbs']} TB/s" if data.get("ceiling_tbs") else ""
    older = report.others(data, lambda r: f"{r['model']} x {r['dsa']} at {report.count(r['context'])}")
    lines = [f"{report.origin(data)}: ms a token{at}{older}", ""]
    body = []
    jobs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for r in data["rows"]:
        what = f"{r['model']} ({r['weights']} weights) x {r['dsa']}"
        jobs.setdefault((what, r["task"], r["context"], r["budget_tokens"], r["job"]), {})[r["mode"]] = r
    for (what, task, context, budget, _), modes in sorted(jobs.items(), key=lambda job: job[0]):
        prr = modes.get("prr", {})
        name = what if task == "locality" else f"{what}, {task}"
        cells = [name, report.count(context), report.count(budget)]
        cells += [_cell(modes.get(mode, {}).get("ms_per_token")) for mode in (*_COLUMNS,)]
        cells += [_cell(modes.get("serial", prr).get("floor_ms")), _cell(prr.get("delta"))]
        hit = prr.get("hit_rate_dynamic")
        cells += [_cell(None if hit is None else 100 * hit, 1), _cell(prr.get("hidden"))]
        body.append(cells)
    return "\n".join([*lines, grid(head, body)])


def _cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _head(commit: str | None, name: str) -> Row:
    """The file without its rows.

    Raises:
        MissingInput: no GPU to name.
    """
    from cutlass_kernels import bench

    try:
        return bench.envelope([], commit, name, "prr_pipeline.tracking.publish")
    except RuntimeError as error:
        hint = "run it on the machine of the jobs (--document alone, without jobs, needs no GPU)"
        raise MissingInput(f"{error}: {hint}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 and a message, naming the file at fault, where a job cannot be published."""
    from cutlass_kernels import bench, report

    parser = argparse.ArgumentParser(prog="python -m prr_pipeline.tracking.publish", description=__doc__.split("\n")[0])
    parser.add_argument("jobs", nargs="*", type=Path, help="folders runs/<experiment>/<hash>; none: the file as it is")
    parser.add_argument("--out", required=True, type=Path, help="the file to write")
    parser.add_argument("--keep", action="store_true", help="leave the jobs of --out that are not published in it")
    parser.add_argument("--commit", help="recorded in the file (default: what git says)")
    parser.add_argument("--document", type=Path, help="a Markdown file with the marker lines of this table")
    args = parser.parse_args(argv)
    if not args.jobs and (args.keep or not args.document):
        parser.error("nothing to do: give jobs to write --out from, or a --document to show it in")
    try:
        if args.jobs:
            head = _head(args.commit, args.out.stem)  # first: without a GPU nothing else is worth doing
            before = report.published(args.out, _NAMED) if args.keep else None
            head |= measured(load_finished(args.jobs, "publish"))
            head = joined(head, before) if before else head
            bench.write(args.out, head)
            print(f"{len(head['rows'])} rows in {args.out}")
        if args.document:
            report.show(args.out, _NAMED, args.document, table, MARKERS)
    except (PrrError, OSError, ValueError) as error:
        print(f"publish: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
