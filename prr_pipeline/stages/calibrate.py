# SPDX-License-Identifier: Apache-2.0
"""Stage calibrate: theta* of every prompt and layer, the grid's hit rates, and hit rates against delta."""

import logging
import time
from typing import Any

from prr_pipeline.artifacts import Records, StageFolder
from prr_pipeline.prr.budget import DELTAS
from prr_pipeline.prr.calibration import Calibration, Window, calibrate, locality
from prr_pipeline.stages.job import Job, Prompt
from prr_pipeline.tracking.progress import Progress

log = logging.getLogger(__name__)

_FORM = {"id": str, "layers": list, "locality": list}  # of a record


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Prefill each prompt and calibrate on its last rows; samples already there are kept."""
    folder.start({})
    records = Records(folder / "samples.jsonl", _FORM)
    done = {r["id"]: r for r in records.read()}
    if done:
        log.info("calibrate: %d samples are there already, going on after them", len(done))
    prompts = job.prompts()
    left = [p for p in prompts if p.sample.id not in done]
    with Progress("calibrate", len(prompts), done=len(prompts) - len(left)) as bar:
        for prompt in left:
            start = time.perf_counter()
            row = _sample(job, prompt)
            records.append([row])
            done[row["id"]] = row
            hit = _mean([x["hit"] for x in row["layers"]])
            bar.update(tokens=row["prompt_tokens"], seconds=time.perf_counter() - start, hit_rate=hit)
    for row in done.values():
        of = {"id": row["id"], "task": row["task"]}
        for point in row["locality"]:
            run.log({f"hit/{point['predictor']}/delta_{point['delta']}": point["hit_dynamic"]}, of=of)
    folder.finish(job.device_name(), {}, [records.path], {"objective": job.predictor.objective})


def _sample(job: Job, prompt: Prompt) -> dict[str, Any]:
    start = job.prefill(prompt)
    length = start.tokens
    selecting = {x: w for x, w in start.windows.items() if job.method.selects(x, length)}
    windows = list(selecting.values())
    begin = job.engine.now()
    found = calibrate(windows, job.predictor, job.method) if windows else []
    calibrate_ms = (job.engine.now() - begin) * 1e3
    points = locality(windows, [c.theta for c in found], job.method, DELTAS) if windows else []
    return {
        "id": prompt.sample.id,
        "task": prompt.sample.task,
        "prompt_tokens": length,
        "window": _rows(start.windows),
        "window_ms": start.window_ms,
        "calibrate_ms": calibrate_ms,
        "layers": [_layer(x, c) for x, c in zip(selecting, found, strict=True)],
        "locality": [{k: v if isinstance(v, str) else _number(v) for k, v in p.items()} for p in points],
    }


def _rows(windows: dict[int, Window]) -> int:
    return max((w.lengths.shape[0] for w in windows.values()), default=0)


def _layer(layer: int, found: Calibration) -> dict[str, Any]:
    theta = dict(zip(("alpha", "beta", "gamma"), (round(x, 6) for x in found.theta), strict=True))
    return {"layer": layer, "theta": theta, "hit": _number(found.hit), "grid": [_number(x) for x in found.grid]}


def _number(x: float) -> float | None:
    return round(x, 6) if x == x else None


def _mean(values: list[float | None]) -> float | None:
    real = [v for v in values if v is not None and v == v]
    return round(sum(real) / len(real), 6) if real else None
