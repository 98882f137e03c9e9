# SPDX-License-Identifier: Apache-2.0
"""Stage decode: one prefill a sample, then every mode from a copy of that cache.

serial comes first, since the others are judged against it: same tokens, same bits of every logit.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prr_pipeline.artifacts import Records, StageFolder, digest
from prr_pipeline.errors import ArtifactError
from prr_pipeline.prr.engine import Engine, Mode, Prefilled, Theta
from prr_pipeline.prr.sampling import Sampler
from prr_pipeline.prr.stats import LayerStats, StepStats, rates
from prr_pipeline.stages.job import Job, Prompt
from prr_pipeline.tracking.progress import Progress

log = logging.getLogger(__name__)


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Decode all samples in all modes; samples already there are kept, a partly decoded one is redone."""
    inputs = _fit_budget(job)
    thetas = _thetas(job, inputs)
    folder.start(inputs)
    records = Records(folder / "samples.jsonl")
    order = ["serial", *(m for m in job.modes if m != "serial")]
    done = _resume(records, order)
    prompts = list(job.prompts())
    left = [p for p in prompts if p.sample.id not in done]
    with Progress("decode", len(prompts) * len(order), done=len(done) * len(order), unit="run") as bar:
        for prompt in left:
            rows = _sample(job, prompt, order, thetas.get(prompt.sample.id, {}), bar)
            records.append(rows)
            for row in rows:
                run.log(_scalars(row))
    folder.finish(job.device_name(), inputs, [records.path], {"model": job.loaded.description, "modes": job.modes})


def _fit_budget(job: Job) -> dict[str, str]:
    """Give the budget policy the profile, if it needs one; returns what was read."""
    if not job.budget.needs_profile:
        return {}
    source = job.folder("profile")
    manifest = source.require("decode")
    job.budget.fit(json.loads((source / "profile.json").read_text(encoding="utf-8"))["rows"])
    return {"profile": digest(manifest)}


def _thetas(job: Job, inputs: dict[str, str]) -> dict[str, dict[int, Theta]]:
    """Each sample's theta by layer, from the calibration unless it is fixed or not needed."""
    if not job.calibrated:
        return {}
    source = job.folder("calibrate")
    manifest = source.require("decode")
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
    logits: list[Tensor] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    equal_logits: bool = True
    stop: str = "length"


def _sample(
    job: Job, prompt: Prompt, order: list[str], thetas: dict[int, Theta], bar: Progress
) -> list[dict[str, Any]]:
    """All modes of one sample, serial first."""
    start = job.prefill(prompt)
    if not thetas and job.predictor.theta is not None:
        thetas = dict.fromkeys(start.windows, tuple(job.predictor.theta))  # type: ignore[arg-type]
    missing = [x for x in start.windows if x not in thetas and job.method.selects(x, start.cache.length)]
    if missing and job.calibrated:
        raise ArtifactError(
            f"sample {prompt.sample.id}: the calibration has no theta for layers {missing}; "
            f"{job.folder('calibrate').redo}"
        )
    late = dict.fromkeys(start.windows, _LATE) | thetas
    rows, serial = [], None
    for name in order:
        mode = Mode.build(name, job.runtime.repair, job.budget)
        trace = _decode(job, prompt, start, mode, late, serial, bar)
        serial = trace if name == "serial" else serial
        rows.append(_record(job, prompt, start, mode, trace, serial))
    return rows


_LATE: Theta = (0.4, 0.3, 0.25)  # layers that begin to select only while decoding: the middle of the paper's grid


def _decode(
    job: Job,
    prompt: Prompt,
    start: Prefilled,
    mode: Mode,
    thetas: dict[int, Theta],
    serial: _Trace | None,
    bar: Progress,
) -> _Trace:
    engine: Engine = job.engine
    decoder = engine.decoder(start, mode, thetas)
    sampler = Sampler(job.runtime.temperature, job.runtime.top_p, job.cfg.seed, prompt.sample.id)
    stops = set() if job.benchmark.ignore_eos else set(job.loaded.shape.eos_ids)
    trace, logits = _Trace(), start.logits
    limit = prompt.sample.max_new_tokens
    for i in range(limit):
        trace.tokens.append(sampler(logits))
        if trace.tokens[-1] in stops:
            trace.stop = "eos"
            break
        if i == limit - 1:
            break  # the last token's own logits are nobody's
        logits, stats = decoder.step(trace.tokens[-1])
        trace.steps.append(stats)
        if mode.name == "serial":
            trace.logits.append(logits)
        elif serial is not None:
            at = len(trace.steps) - 1
            trace.equal_logits &= at < len(serial.logits) and torch.equal(logits, serial.logits[at])
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
    post = job.benchmark.postprocess(raw)
    every = [x for s in trace.steps for x in s.layers.values()]
    over = rates(every)
    other = None if mode.name == "serial" else serial
    same_logits = None
    if other and other.steps:
        same_logits = trace.equal_logits and len(trace.steps) == len(other.steps)
    context = start.cache.length + 1
    ratio = mode.budget.ratio(context) if mode.budget.active else None
    return {
        "id": sample.id,
        "task": sample.task,
        "mode": mode.name,
        "repair": mode.repair if mode.name in ("reuse", "reuse_repair", "prr") else None,
        "delta": ratio,
        "prompt_tokens": start.cache.length,
        "truncated": bool(sample.meta.get("tokens_cut")),
        "tokens_cut": sample.meta.get("tokens_cut", 0),
        "n_generated": len(trace.tokens),
        "stop_reason": trace.stop,
        "tokens": trace.tokens,
        "prediction": raw,
        "prediction_post": post,
        "answers": list(sample.answers),
        "score": job.benchmark.score(sample, post),
        "prefill_ms": start.ms,
        "window_ms": start.window_ms,
        "ms_per_token": sum(s.ms for s in trace.steps) / len(trace.steps) if trace.steps else None,
        "steps": len(trace.steps),
        "dense_steps": sum(not s.layers for s in trace.steps),
        "sparse_layers": max((len(s.layers) for s in trace.steps), default=0),
        "hit_rate_dynamic": over["hit_dynamic"],
        "hit_rate_all": over["hit_all"],
        "missed_per_step": over["missed"],
        "wasted_per_step": over["wasted"],
        "tokens_equal_serial": trace.tokens == other.tokens if other else None,
        "logits_equal_serial": same_logits,
        "step_records": [{"step": i, **s.record()} for i, s in enumerate(trace.steps)],
        "layer_records": _layers(trace.steps),
    }


def _layers(steps: list[StepStats]) -> list[dict[str, Any]]:
    by_layer: dict[int, list[LayerStats]] = {}
    for s in steps:
        for layer, x in s.layers.items():
            by_layer.setdefault(layer, []).append(x)
    return [{"layer": layer, **rates(found)} for layer, found in sorted(by_layer.items())]


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    keys = ("score", "ms_per_token", "hit_rate_dynamic", "hit_rate_all", "missed_per_step", "wasted_per_step")
    return {f"{row['task']}/{row['mode']}/{k}": row[k] for k in keys if row[k] is not None}
