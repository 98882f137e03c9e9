# SPDX-License-Identifier: Apache-2.0
"""Stage evaluate: scores, paired identity against serial, tables and plots, from records alone (no model, no GPU)."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from prr_pipeline.artifacts import Records, StageFolder, digest, write_atomic, write_json
from prr_pipeline.config import BASELINES, MODES, config_dir
from prr_pipeline.errors import ArtifactError, PrrError
from prr_pipeline.models.sizes import parameter_count
from prr_pipeline.stages.decode import refuse_unequal
from prr_pipeline.stages.job import Job
from prr_pipeline.tracking import beside, plots, tables

log = logging.getLogger(__name__)

_ON_CPU = (
    "Times are of a CPU, where selection and speculative attention run one after the other: prr does more work than "
    "serial here, and a speed-up is the machine's load.\n"
)
_RANDOM = "Weights are random: scores, hit rates and overlaps are not those of the model that is named.\n"
_NOT_TRUE_SIZE = "The model does not have its true size: its times are not those of the model that is named.\n"
_UNKNOWN_SIZE = "The model is of unknown size: its times may not be those of the model that is named.\n"


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Write results.json, results.csv, results.md, paper.md and plots; print the table."""
    decode = job.folder("decode")
    manifest = job.require("decode", "evaluate")
    inputs = {"decode": digest(manifest)}
    records = Records(decode / "samples.jsonl")
    samples = records.read()
    _refuse_twice(samples, records.path, decode.redo)
    origin = _origin(manifest)
    rows = [_row(job, origin, group) for group in _groups(samples)]
    results = {"rows": rows, "config_hash": digest(job.config), "device": manifest["device"]}
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", results)
    tables.to_csv(rows, folder / "results.csv")
    write_atomic(folder / "results.md", "\n".join([tables.to_markdown(rows), *_remarks(results)]))
    outputs = [folder / name for name in ("results.json", "results.csv", "results.md")]
    write_atomic(folder / "paper.md", "\n".join([beside.paper_tables(rows), *_remarks(results)]))
    outputs.append(folder / "paper.md")
    images = _plots(job, origin, samples, folder.path / "plots", inputs)
    run.table("results", rows)
    run.summary(
        {f"{r['task']}/{r['mode']}/{k}": r[k] for r in rows for k in ("score", "ms_per_token") if r[k] is not None}
    )
    for image in images:
        run.image(image.stem, image)
    run.artifact("results", "results", outputs)
    _show(results, folder / "results.md")
    _refuse_unmeasured(rows)
    _refuse_short(job, samples)
    _refuse_dense(job, rows)
    refuse_unequal(records, job.own_method)
    folder.finish("none", inputs, [*outputs, *images], {})


def _refuse_twice(samples: list[dict[str, Any]], path: Path, redo: str) -> None:
    """Raise ArtifactError for a sample that is there twice in a mode: it would count twice."""
    counts = Counter((row["id"], row["mode"]) for row in samples)
    twice = [f"{key}/{mode}" for (key, mode), n in counts.items() if n > 1]
    if twice:
        raise ArtifactError(f"{path} has more than one record of {', '.join(twice[:8])}; {redo}")


def _groups(samples: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Records of one (task, mode), tasks in the order of the samples, modes in canonical order."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in samples:
        groups.setdefault((row["task"], row["mode"]), []).append(row)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    return [groups[task, mode] for task in tasks for mode in (*MODES, *BASELINES) if (task, mode) in groups]


def _origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """What made the records: weights, size and device, for every row."""
    model = manifest["model"]
    return {
        "model": model["name"],
        "weights": model["weights"],
        "size": _size(model["name"], model["weights"], model["parameters"]),
        "parameters": model["parameters"],
        "device": manifest["device"],
    }


def _size(name: str, weights: str, parameters: int) -> str:
    """Whether a model is what its name says: true, tiny, other; unknown for random weights of no shipped option."""
    options: list[Any] = [OmegaConf.load(path) for path in sorted((config_dir() / "model").glob("*.yaml"))]
    try:
        true = parameter_count(next(o for o in options if o.get("name") == name)["architecture"])
    except (StopIteration, KeyError, TypeError):  # no such option, or one that does not state all sizes
        return "unknown" if weights == "random" else "true"
    if abs(parameters - true) <= true // 100:  # vocabularies are padded now and then
        return "true"
    return "tiny" if parameters < true / 2 else "other"


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    """Mean of the known values."""
    return tables.mean(r[key] for r in rows)


def _row(job: Job, origin: dict[str, Any], group: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the results: a task in a mode.

    Times, rates and counts are means over the steps of all samples, each step with the same weight.
    """
    first, steps = group[0], _flat(group, "step_records")

    def count(match: Callable[[dict[str, Any]], bool]) -> int:
        return sum(map(match, group))

    return {
        **origin,
        "dsa": job.method.name,
        "benchmark": job.benchmark.name,
        "queries": job.benchmark.queries,
        "task": first["task"],
        "mode": first["mode"],
        "repair": first["repair"],
        "delta": _mean(group, "delta"),
        "n": len(group),
        "score": _mean(group, "score"),
        "ms_per_token": _mean(steps, "ms"),
        "hit_rate_dynamic": _mean(steps, "hit_dynamic"),
        "hit_rate_all": _mean(steps, "hit_all"),
        "overlap_last": _mean(steps, "overlap_last"),
        "missed_per_step": _mean(steps, "missed"),
        "wasted_per_step": _mean(steps, "wasted"),
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


def _plots(
    job: Job, origin: dict[str, Any], samples: list[dict[str, Any]], folder: Path, inputs: dict[str, str]
) -> list[Path]:
    """All plots whose records are there."""
    synthetic = ", synthetic queries" if job.benchmark.queries == "synthetic" else ""
    of = {"model": tables.described(origin), "dsa": job.method.name + synthetic}
    steps = _flat(samples, "step_records")
    written = plots.plot_breakdown(steps, folder, **of) + plots.plot_overlap(steps, folder, **of)
    layers = [{**r, "steps": s["steps"]} for s in samples for r in _flat([s], "layer_records")]
    written += plots.plot_layers(layers, folder, **of)
    for stage in ("calibrate", "profile"):
        source = job.folder(stage)
        manifest = source.load()
        if manifest is None:
            log.info("no plots of %s: the stage has not run", stage)
            continue
        if others := job.refused(source, manifest):
            log.warning("no plots of %s: it was made by other %s", stage, ", ".join(others))
            continue
        inputs[stage] = digest(manifest)
        if stage == "calibrate":
            written += plots.plot_hit_rate(Records(source / "samples.jsonl").read(), folder, **of)
        else:
            profile = json.loads((source / "profile.json").read_text(encoding="utf-8"))
            profile["model"] = tables.described(origin, device=False)  # it names its own
            written += plots.plot_latency(profile, folder) + plots.plot_layer(profile, folder)
    return written


def show(folder: StageFolder) -> None:
    """Print the table of a stage that is done."""
    _show(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder / "results.md")


def _show(results: dict[str, Any], whole: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    width = console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:  # a file or a pipe, for which rich assumes 80
        width = max(width, tables.CONSOLE_WIDTH)
    console.print(tables.console(results["rows"], width, str(whole), _remarks(results)), soft_wrap=True)


def _remarks(results: dict[str, Any]) -> list[str]:
    """What a reader of the numbers must know."""
    rows = results["rows"]
    sizes = {r.get("size", "true") for r in rows}
    known = (
        (_RANDOM, any(r.get("weights") == "random" for r in rows)),
        (_NOT_TRUE_SIZE, sizes & {"tiny", "other"}),
        (_UNKNOWN_SIZE, "unknown" in sizes),
        (_ON_CPU, results.get("device") == "cpu"),
    )
    return [remark for remark, holds in known if holds]


def _refuse_unmeasured(rows: list[dict[str, Any]]) -> None:
    """Without a single decode step there is nothing that a mode could differ in.

    Raises:
        PrrError: the tables are written, the stage is not done.
    """
    if not any(r["steps"] for r in rows):
        raise PrrError(
            "no decode step was measured: every answer ended at its first token, which is the prefill's. Take another "
            "benchmark or model, or benchmark=text benchmark.path=<a text file>, which goes on after the end token"
        )


def _refuse_short(job: Job, samples: list[dict[str, Any]]) -> None:
    """A selection that is not full attended less than its budget: hits and identity of such steps say nothing.

    Raises:
        PrrError: names the method and the rows; the tables are written, the stage is not done.
    """
    found: Counter[str] = Counter()
    for row in samples:
        found[f"{row['task']}/{row['mode']}"] += row.get("short_steps", 0)
    short = [f"{key} ({n} steps)" for key, n in found.items() if n]
    if short:
        cls = type(job.method)
        raise PrrError(
            f"dsa={job.method.name} gave scores that are not finite, so that fewer than dsa.top_k = "
            f"{job.method.top_k} blocks were selected, in {', '.join(short)}. Look at score() of "
            f"{cls.__module__}.{cls.__qualname__} (dsa._target_), and whether the model's own values are finite "
            "(model.dtype)"
        )


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
