# SPDX-License-Identifier: Apache-2.0
"""Stage evaluate: scores, paired identity against serial, tables and plots, from records alone (no model, no GPU)."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prr_pipeline.artifacts import Records, StageFolder, digest, write_atomic, write_json
from prr_pipeline.config import MODES
from prr_pipeline.errors import PrrError
from prr_pipeline.stages.job import Job
from prr_pipeline.tracking import plots, tables

log = logging.getLogger(__name__)

_ON_CPU = (
    "Times are of a CPU, where selection and speculative attention run one after the other: prr cannot be faster than "
    "serial here.\n"
)


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Write results.json, results.csv, results.md, paper.md and plots; print the table."""
    decode = job.folder("decode")
    manifest = decode.require("evaluate")
    inputs = {"decode": digest(manifest)}
    samples = Records(decode / "samples.jsonl").read()
    rows = [_row(job, group) for group in _groups(samples)]
    results = {"rows": rows, "config_hash": digest(job.config), "device": manifest["device"]}
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", results)
    tables.to_csv(rows, folder / "results.csv")
    write_atomic(folder / "results.md", "\n".join([tables.to_markdown(rows), *_remarks(results)]))
    outputs = [folder / name for name in ("results.json", "results.csv", "results.md")]
    if paper := tables.paper_tables(rows):
        write_atomic(folder / "paper.md", paper)
        outputs.append(folder / "paper.md")
    images = _plots(job, samples, folder.path / "plots", inputs)
    run.table("results", rows)
    run.summary(
        {f"{r['task']}/{r['mode']}/{k}": r[k] for r in rows for k in ("score", "ms_per_token") if r[k] is not None}
    )
    for image in images:
        run.image(image.stem, image)
    run.artifact("results", "results", outputs)
    _show(results)
    _refuse_dense(job, rows)
    folder.finish("none", inputs, [*outputs, *images], {})


def _groups(samples: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Records of one (task, mode), tasks in the order of the samples, modes in canonical order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in samples:
        groups.setdefault((row["task"], row["mode"]), []).append(row)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    return [groups[task, mode] for task in tasks for mode in MODES if (task, mode) in groups]


def _mean(rows: list[dict[str, Any]], key: str, weight: str | None = None) -> float | None:
    """Mean of the known values, weighted by another column if one is named."""
    known = [(r[key], r[weight] if weight else 1) for r in rows if r[key] is not None]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else None


def _row(job: Job, group: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the results: a task in a mode."""
    first = group[0]

    def count(match: Callable[[dict[str, Any]], bool]) -> int:
        return sum(map(match, group))

    return {
        "model": job.model_cfg.name,
        "dsa": job.method.name,
        "benchmark": job.benchmark.name,
        "queries": job.benchmark.queries,
        "task": first["task"],
        "mode": first["mode"],
        "repair": first["repair"],
        "delta": _mean(group, "delta"),
        "n": len(group),
        "score": _mean(group, "score"),
        "ms_per_token": _mean(group, "ms_per_token", "steps"),
        "hit_rate_dynamic": _mean(group, "hit_rate_dynamic", "steps"),
        "hit_rate_all": _mean(group, "hit_rate_all", "steps"),
        "overlap_last": _mean(_flat(group, "step_records"), "overlap_last"),
        "missed_per_step": _mean(group, "missed_per_step", "steps"),
        "wasted_per_step": _mean(group, "wasted_per_step", "steps"),
        "tokens_equal_serial": _mean(group, "tokens_equal_serial"),
        "logits_equal_serial": _mean(group, "logits_equal_serial"),
        "dense_steps": sum(r["dense_steps"] for r in group),
        "steps": sum(r["steps"] for r in group),
        "truncated": count(lambda r: r["truncated"]),
        "nulls": count(lambda r: not r["prediction_post"]),
        "budget_tokens": job.method.budget_tokens,
        "seed": job.cfg.seed,
    }


def _flat(samples: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The records inside samples, each with what it belongs to."""
    return [{"id": s["id"], "task": s["task"], "mode": s["mode"], **r} for s in samples for r in s[key]]


def _plots(job: Job, samples: list[dict[str, Any]], folder: Path, inputs: dict[str, str]) -> list[Path]:
    """All plots whose records are there."""
    synthetic = ", synthetic queries" if job.benchmark.queries == "synthetic" else ""
    of = {"model": job.model_cfg.name, "dsa": job.method.name + synthetic}
    steps = _flat(samples, "step_records")
    written = plots.plot_breakdown(steps, folder, **of) + plots.plot_overlap(steps, folder, **of)
    written += plots.plot_layers(_flat(samples, "layer_records"), folder, **of)
    for stage in ("calibrate", "profile"):
        source = job.folder(stage)
        manifest = source.load()
        if manifest is None:
            log.info("no plots of %s: the stage has not run", stage)
            continue
        inputs[stage] = digest(manifest)
        if stage == "calibrate":
            written += plots.plot_hit_rate(Records(source / "samples.jsonl").read(), folder, **of)
        else:
            written += plots.plot_latency(json.loads((source / "profile.json").read_text(encoding="utf-8")), folder)
    return written


def show(folder: StageFolder) -> None:
    """Print the table of a stage that is done."""
    _show(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def _show(results: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    if console.width < tables.CONSOLE_WIDTH and not console.is_terminal:
        console = Console(width=tables.CONSOLE_WIDTH)
    console.print(tables.console(results["rows"]))
    for remark in _remarks(results):
        console.print(remark, style="dim", end="")


def _remarks(results: dict[str, Any]) -> list[str]:
    """What a reader of the times must know."""
    return [_ON_CPU] if results.get("device") == "cpu" else []


def _refuse_dense(job: Job, rows: list[dict[str, Any]]) -> None:
    """A sparse mode that never selected compared dense with dense: its row means nothing.

    Raises:
        PrrError: names the rows; the tables are written, the stage is not done.
    """
    idle = [f"{r['task']}/{r['mode']}" for r in rows if tables.never_selected(r)]
    if idle:
        raise PrrError(
            f"context below budget: everything was dense in {', '.join(idle)}. dsa={job.method.name} attends "
            f"{job.method.budget_tokens} tokens and selects from {job.method.dense_len} on; lower dsa.top_k or "
            "dsa.dense_len, or take longer samples"
        )
