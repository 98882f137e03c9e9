# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of a job in order: skips what is done, resumes what was interrupted, records what happened."""

import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig

import cutlass_kernels as ck
from prr_pipeline.artifacts import StageFolder, disk_error, locked, write_json
from prr_pipeline.config import STAGES, validate
from prr_pipeline.errors import ConfigError
from prr_pipeline.stages import calibrate, decode, evaluate, profile
from prr_pipeline.stages.job import Job

log = logging.getLogger(__name__)

_RUN: dict[str, Callable[[Job, StageFolder, Any], None]] = {
    "calibrate": calibrate.run,
    "profile": profile.run,
    "decode": decode.run,
    "evaluate": evaluate.run,
}


def run(cfg: DictConfig) -> None:
    """Validate the whole job, then run its stages.

    Raises:
        PrrError: what the user can act on; status.json in the job's folder says at which stage.
    """
    validate(cfg)
    _refuse_ranks()
    job = Job(cfg)
    try:
        job.check()
        _set_up(job)
        _make_samples(job)
        with locked(job.root):
            _stages(job)
    except OSError as error:
        told = disk_error(error, job.root)
        if told is None:
            raise
        raise told from error
    finally:
        job.close()


def _set_up(job: Job) -> None:
    """Threads, device and seed of this process; samples may draw from the seed."""
    from lightning.fabric import Fabric  # takes seconds: after all that can fail at once

    if job.runtime.threads is not None:
        torch.set_num_threads(job.runtime.threads)
    ck.debug(job.runtime.debug_checks)
    fabric = Fabric(accelerator=job.device if job.runs_model else "cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(job.cfg.seed, verbose=False)


def _make_samples(job: Job) -> None:
    """Make the samples, if a stage will read them: wrong ones end a job before it has a folder or a tracked run.

    Raises:
        ConfigError, MissingInput: see Job.prompts.
    """
    reading = [s for s in job.cfg.stages if job.reads_samples(s)]
    if any(job.cfg.force or not _is_done(job, s) for s in reading):
        job.prompts()


def _is_done(job: Job, stage: str) -> bool:
    """Whether a stage will be skipped; looks only."""
    folder = job.folder(stage)
    manifest = folder.load()
    return manifest is not None and not job.refused(folder, manifest)


def _stages(job: Job) -> None:
    cfg = job.cfg
    log.info(
        "job %s: %s x %s x %s, %s", cfg.experiment, job.model_cfg.name, job.method.name, job.benchmark.name, job.root
    )
    write_json(job.root / "config.json", job.config)
    stages = [s for s in STAGES if s in cfg.stages]
    if cfg.force:  # all at once: interrupted, the job then resumes without force, from new outputs alone
        for stage in stages:
            job.folder(stage).clear()
    for stage in stages:
        _status(job, stage, "running", None)
        try:
            _stage(job, stage)
        except BaseException as error:
            _status(job, stage, "failed", error)
            raise
    _status(job, stages[-1], "done", None)
    log.info("outputs: %s", job.root)


def _refuse_ranks() -> None:
    """One job is one process; ranks that a launcher announces would each run all of it."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if not ranks.strip().isdecimal():
        raise ConfigError(f"WORLD_SIZE = '{ranks}' in the environment, expected 1 or none: unset WORLD_SIZE")
    if int(ranks) > 1:
        raise ConfigError(
            f"WORLD_SIZE = {ranks}: a job runs in one process. Start it without torchrun; "
            "a sweep (-m) spreads jobs over machines with hydra/launcher=slurm"
        )


def _stage(job: Job, stage: str) -> None:
    folder = job.folder(stage)
    if _is_current(job, folder):
        log.info("%s: done already, skipped (%s; force=true redoes it)", stage, folder.path)
        if stage == "evaluate":
            evaluate.show(folder)
        return
    start = time.monotonic()
    log.info("%s: starts", stage)
    folder.path.mkdir(parents=True, exist_ok=True)
    group = f"{job.cfg.experiment}-{job.root.name}"
    with job.tracker.run(stage, group, job.config, folder.path) as tracked:
        _RUN[stage](job, folder, tracked)
    log.info("%s: done in %.1f s", stage, time.monotonic() - start)


def _is_current(job: Job, folder: StageFolder) -> bool:
    """Whether a stage is done, and made of what there is now; one that is made of something else is put aside."""
    manifest = folder.load()
    if manifest is None:
        return False
    others = job.refused(folder, manifest)
    if others:
        log.warning("%s: what is there was made by other %s; done again", folder.stage, ", ".join(others))
        folder.clear(keep=True)
    elif made := folder.outdated(manifest, job.folder):
        log.warning("%s: made by other %s, taken as it is (allow_other_source)", folder.stage, ", ".join(made))
    return not others


def _status(job: Job, stage: str, state: str, error: BaseException | None) -> None:
    """status.json: the stage reached, its state and, if it failed, why (with the traceback)."""
    status: dict[str, Any] = {"stage": stage, "state": state, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if error is not None:
        status["error"] = f"{type(error).__name__}: {error}"
        status["traceback"] = "".join(traceback.format_exception(error))
    try:
        write_json(job.root / "status.json", status)
    except OSError as full:
        log.warning("status.json could not be written: %s (%s)", full, json.dumps(status.get("error")))
