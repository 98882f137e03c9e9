# SPDX-License-Identifier: Apache-2.0
"""Stage decode: one prefill a sample, then every mode from a copy of that cache.

serial comes first, since the others are judged against it: same tokens, same bits of every logit.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

from prr_pipeline.artifacts import Records, StageFolder, digest
from prr_pipeline.benchmarks.base import check_answer, check_score
from prr_pipeline.config import BASELINES
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.errors import ArtifactError, PrrError
from prr_pipeline.prr import baselines
from prr_pipeline.prr.engine import Generator, Mode, Prefilled, Theta
from prr_pipeline.prr.sampling import Sampler
from prr_pipeline.prr.stats import LayerStats, StepStats, rates
from prr_pipeline.prr.traffic import step_bytes
from prr_pipeline.stages.job import Job, Prompt
from prr_pipeline.tracking.progress import Progress

log = logging.getLogger(__name__)

_NAMED = 8  # faults that a message names
_FORM = {"id": str, "task": str, "mode": str, "steps": int, "step_records": list, "layer_records": list}  # of a record


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Decode all samples in all modes; samples already there are kept, a partly decoded one is redone.

    Raises:
        PrrError: exact repair was not exact, and no evaluate follows that would say so beside its tables.
    """
    inputs = _fit_budget(job)
    thetas = _thetas(job, inputs)
    folder.start(inputs)
    records = Records(folder / "samples.jsonl", _FORM)
    order = ["serial", *(m for m in job.modes if m != "serial"), *job.baselines]
    done = _resume(records, order)
    prompts = job.prompts()
    left = [p for p in prompts if p.sample.id not in done]
    with Progress("decode", len(prompts) * len(order), done=len(done) * len(order), unit="run") as bar:
        for prompt in left:
            rows = _sample(job, prompt, order, thetas.get(prompt.sample.id, {}), bar)
            records.append(rows)
            for fault in unequal(rows):
                log.error("exact repair is not serial in sample %s", fault)
            for row in rows:
                run.log(_scalars(row), of={key: row[key] for key in ("id", "task", "mode")})
    if "evaluate" not in job.cfg.stages:
        refuse_unequal(records, job.own_method)
    folder.finish(job.device_name(), inputs, [records.path], {"model": job.loaded.description, "modes": job.modes})


def unequal(rows: list[dict[str, Any]]) -> list[str]:
    """Samples and modes of exact repair whose tokens or logits are not those of serial, as `id/mode (what)`."""
    found = []
    for row in rows:
        if row["repair"] == "exact":
            what = [k for k in ("tokens", "logits") if row[f"{k}_equal_serial"] is False]
            found += [f"{row['id']}/{row['mode']} ({' and '.join(what)})"] if what else []
    return found


def refuse_unequal(records: Records, own: str | None) -> None:
    """Exact repair promises the bits of serial; results that break the promise are not finished.

    own: the method's class, if it is a user's.

    Raises:
        PrrError: names samples and modes; the records stay, to be looked at.
    """
    faults = unequal(records.read())
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        blame = "This is a bug of this software, not of the job: please report it, with"
        if own:
            blame = f"Either {own} gives other scores for the same query, or this software has a bug: look at"
        raise PrrError(
            f"exact repair differs from serial in {', '.join(faults[:_NAMED])}{more}. {blame} {records.path} and the "
            "job's config.json. What was written stays, to be looked at; the stage is not done"
        )


def _fit_budget(job: Job) -> dict[str, str]:
    """Give the budget policy the profile, if it needs one; returns what was read."""
    if not job.budget.needs_profile:
        return {}
    source = job.folder("profile")
    manifest = job.require("profile", "decode")
    job.budget.fit(json.loads((source / "profile.json").read_text(encoding="utf-8"))["rows"])
    return {"profile": digest(manifest)}


def _thetas(job: Job, inputs: dict[str, str]) -> dict[str, dict[int, Theta]]:
    """Each sample's theta by layer, from the calibration unless it is fixed or not needed."""
    if not job.calibrated:
        return {}
    source = job.folder("calibrate")
    manifest = job.require("calibrate", "decode")
    inputs["calibrate"] = digest(manifest)
    found = {}
    for row in Records(source / "samples.jsonl").read():
        found[row["id"]] = {
            x["layer"]: (x["theta"]["alpha"], x["theta"]["beta"], x["theta"]["gamma"]) for x in row["layers"]
        }
    return found


def _resume(records: Records, order: list[str]) -> set[str]:
    """Ids of the samples with all their modes; lines of others are dropped."""
    rows = records.read()
    modes: dict[str, list[str]] = {}
    for row in rows:
        modes.setdefault(row["id"], []).append(row["mode"])
    done = {key for key, found in modes.items() if found == order}
    if rows:
        records.rewrite([r for r in rows if r["id"] in done])
        log.info("decode: %d samples are there already, going on after them", len(done))
    return done


@dataclass
class _Trace:
    """What one mode did with one sample."""

    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)  # of every step's logits
    steps: list[StepStats] = field(default_factory=list)
    stop: str = "length"


def _sample(
    job: Job, prompt: Prompt, order: list[str], thetas: dict[int, Theta], bar: Progress
) -> list[dict[str, Any]]:
    """All modes of one sample, serial first."""
    start = job.prefill(prompt)
    if not thetas and job.predictor.theta is not None:
        thetas = dict.fromkeys(start.windows, tuple(job.predictor.theta))  # type: ignore[arg-type]
    missing = [x for x in start.windows if x not in thetas and job.method.selects(x, start.tokens)]
    if missing and job.calibrated:
        raise ArtifactError(
            f"sample {prompt.sample.id}: the calibration has no theta for layers {missing}; "
            f"{job.folder('calibrate').redo}"
        )
    late: Theta = tuple(job.predictor.late_theta)  # type: ignore[assignment]
    every = dict.fromkeys(start.windows, late) | thetas
    rows, serial = [], None
    for name in order:
        mode = Mode.build("serial" if name in BASELINES else name, job.runtime.repair, job.budget)
        if name in BASELINES:
            decoder: Generator = baselines.decoder(name, job.engine, start, mode)  # type: ignore[arg-type]
        else:
            decoder = job.engine.decoder(start, mode, every)
        trace = _decode(job, prompt, decoder, bar)
        serial = trace if name == "serial" else serial
        row = _record(job, prompt, start, mode, trace, None if name in BASELINES else serial)
        if name == "paper_serial":  # it tells nothing of what it selected
            row["dense_steps"] = 0
        rows.append(row | {"mode": name, "late_layers": _late(mode, trace, thetas)})
    return rows


def _late(mode: Mode, trace: "_Trace", thetas: dict[int, Theta]) -> list[int]:
    """Layers whose P came of predictor.late_theta: they select, but did not yet at the prompt's end."""
    if not (mode.calibrated and mode.budget.active):
        return []
    return sorted({x for s in trace.steps for x in s.layers} - thetas.keys())


def _decode(job: Job, prompt: Prompt, decoder: Generator, bar: Progress) -> _Trace:
    sampler = Sampler(job.runtime.temperature, job.runtime.top_p, job.cfg.seed, prompt.sample.id)
    stops = set() if job.benchmark.ignore_eos else set(job.loaded.shape.eos_ids)
    trace = _Trace()
    for token, stats, bits in decoder.generate(sampler, prompt.sample.max_new_tokens, stops):
        trace.tokens.append(token)
        if stats is None or bits is None:
            trace.stop = "eos" if token in stops else "length"
            break
        trace.steps.append(stats)
        trace.digests.append(bits)
        hit = rates(list(stats.layers.values()))["hit_dynamic"]
        bar.update(0, tokens=1, seconds=stats.ms / 1e3, hit_rate=hit)
    bar.update()
    return trace


def _record(
    job: Job, prompt: Prompt, start: Prefilled, mode: Mode, trace: _Trace, serial: _Trace | None
) -> dict[str, Any]:
    """One line of samples.jsonl, with its steps and layers inside."""
    sample = prompt.sample
    raw = job.loaded.tokenizer.decode(trace.tokens, skip_special_tokens=True)
    post = check_answer(job.benchmark, sample, job.benchmark.postprocess(raw))
    every = [x for s in trace.steps for x in s.layers.values()]
    over = rates(every)
    filled = [selecting(s, job.method) for s in trace.steps]
    other = None if mode.name == "serial" else serial
    same_logits = None
    if other and other.steps:
        same_logits = trace.digests == other.digests
    context = start.tokens + 1
    ratio = mode.budget.ratio(context) if mode.budget.active else None
    return {
        "id": sample.id,
        "task": sample.task,
        "mode": mode.name,
        "repair": mode.repair if mode.name in ("reuse", "reuse_repair", "prr") else None,
        "delta": ratio,
        "prompt_tokens": start.tokens,
        "truncated": bool(sample.meta.get("tokens_cut")),
        "tokens_cut": sample.meta.get("tokens_cut", 0),
        "n_generated": len(trace.tokens),
        "stop_reason": trace.stop,
        "tokens": trace.tokens,
        "prediction": raw,
        "prediction_post": post,
        "answers": list(sample.answers),
        "score": check_score(job.benchmark, sample, job.benchmark.score(sample, post)),
        "prefill_ms": start.ms,
        "window_ms": start.window_ms,
        "read_bytes": step_bytes(job.loaded.model, start.cache, mode.name, context),
        "ms_per_token": sum(s.ms for s in trace.steps) / len(trace.steps) if trace.steps else None,
        "steps": len(trace.steps),
        "dense_steps": sum(not layers for layers in filled),
        "short_steps": sum(len(layers) < len(s.layers) for layers, s in zip(filled, trace.steps, strict=True)),
        "sparse_layers": max(map(len, filled), default=0),
        "hit_rate_dynamic": over["hit_dynamic"],
        "hit_rate_all": over["hit_all"],
        "missed_per_step": over["missed"],
        "wasted_per_step": over["wasted"],
        "tokens_equal_serial": trace.tokens == other.tokens if other else None,
        "logits_equal_serial": same_logits,
        "step_records": [{"step": i, **s.record()} for i, s in enumerate(trace.steps)],
        "layer_records": _layers(trace.steps),
    }


def selecting(step: StepStats, method: SparseMethod) -> list[int]:
    """Layers of a step that did select: A is full in all KV heads. Blocks whose score is not finite are not taken."""
    size = min(method.top_k, method.blocks(step.context))
    return [layer for layer, x in step.layers.items() if x.chosen >= x.heads * size]


def _layers(steps: list[StepStats]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[LayerStats]] = {}
    for s in steps:
        for layer, x in s.layers.items():
            by_layer.setdefault(layer, []).append(x)
    return [{"layer": layer, **rates(found)} for layer, found in sorted(by_layer.items())]


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    keys = ("score", "ms_per_token", "hit_rate_dynamic", "hit_rate_all", "missed_per_step", "wasted_per_step")
    return {f"{row['task']}/{row['mode']}/{k}": row[k] for k in keys if row[k] is not None}
