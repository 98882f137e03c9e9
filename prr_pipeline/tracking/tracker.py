# SPDX-License-Identifier: Apache-2.0
"""Experiment tracking that may fail without consequences: a W&B run a stage, local lines, nothing.

A tracker opens a run for a stage; the stage talks to the handle it gets. Whatever W&B does (not
installed, no disk, service down), the job goes on: the values that W&B did not take are appended
to `metrics.jsonl` in the stage's folder.
"""

import difflib
import json
import logging
import netrc
import os
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from prr_pipeline.errors import ConfigError, one_line

log = logging.getLogger(__name__)

WANDB_MODES = ("offline", "online", "disabled")
INIT_TIMEOUT_S = 30  # an unreachable server costs this once a job, then it is offline
FINISH_TIMEOUT_S = 300  # a server that dies later cannot hold the job for longer; the data stay on disk


class Run(Protocol):
    """The handle of one stage's run; no method raises for a fault of the tracking service.

    sync_command: the shell command that uploads the run, or None where nothing is left to upload.
    """

    sync_command: str | None

    def log(self, values: Mapping[str, Any], step: int | None = None, of: Mapping[str, Any] | None = None) -> None:
        """Record values (None ones are dropped) at a step; steps may come in any order.

        of: what the values are of, such as the id of a sample; W&B, which would draw these as curves, is not given it.
        """

    def summary(self, values: Mapping[str, Any]) -> None:
        """Record the final values of the run."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record a table; its columns are the keys of the rows, in order of appearance."""

    def image(self, name: str, path: Path) -> None:
        """Record an image file."""

    def artifact(self, name: str, type: str, paths: Iterable[Path]) -> None:
        """Record files and folders under one name; characters that W&B refuses become dashes."""


class NullRun:
    """A run that records nothing."""

    sync_command: str | None = None

    def log(self, values: Mapping[str, Any], step: int | None = None, of: Mapping[str, Any] | None = None) -> None:
        """Drop the values."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Drop the values."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Drop the table."""

    def image(self, name: str, path: Path) -> None:
        """Drop the image."""

    def artifact(self, name: str, type: str, paths: Iterable[Path]) -> None:
        """Drop the files."""

    def finish(self, exit_code: int) -> None:
        """End the run."""


class LocalRun(NullRun):
    """A run that appends values to `metrics.jsonl`; tables and plots are local files already."""

    def __init__(self, folder: Path) -> None:
        """Write into the folder, which is made at the first value."""
        self.path = folder / "metrics.jsonl"

    def log(self, values: Mapping[str, Any], step: int | None = None, of: Mapping[str, Any] | None = None) -> None:
        """Append one line: the step, if any, what the values are of, and the values."""
        self._append(({} if step is None else {"step": step}) | _present(of or {}) | _present(values))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Append one line: {"summary": values}."""
        self._append({"summary": _present(values)})

    def _append(self, record: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=str) + "\n")
        except OSError as error:
            log.warning("metrics are lost: %s could not be written (%s)", self.path, error)


class WandbRun:
    """A W&B run; a call that W&B refuses is warned of once a kind and kept in the local file."""

    def __init__(self, wandb: ModuleType, run: Any, local: LocalRun) -> None:
        """Wrap a started run."""
        self._wandb, self._run, self._local = wandb, run, local
        self._warned: set[str] = set()
        self._command = f"wandb sync {shlex.quote(str(Path(run.dir).parent))}"
        self.sync_command = self._command if run.offline else None
        # Steps are an ordinary value with an axis: W&B drops values whose built-in step goes back.
        self._try("define_metric", lambda: run.define_metric("*", step_metric="step"))

    def log(self, values: Mapping[str, Any], step: int | None = None, of: Mapping[str, Any] | None = None) -> None:
        """See Run."""
        record = ({} if step is None else {"step": step}) | _present(values)
        if not self._try("log", lambda: self._run.log(record)):
            self._local.log(values, step, of)

    def summary(self, values: Mapping[str, Any]) -> None:
        """See Run."""
        if not self._try("summary", lambda: self._run.summary.update(_present(values))):
            self._local.summary(values)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """See Run; cells that are lists or dicts are stored as JSON."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[_cell(row.get(column)) for column in columns] for row in rows]
        if data:
            table = self._wandb.Table
            self._try(
                "table",
                lambda: self._run.log({name: table(columns, data, allow_mixed_types=True)}),
            )

    def image(self, name: str, path: Path) -> None:
        """See Run."""
        self._try("image", lambda: self._run.log({name: self._wandb.Image(str(path))}))

    def artifact(self, name: str, type: str, paths: Iterable[Path]) -> None:
        """See Run."""

        def send() -> None:
            artifact = self._wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type)
            for path in map(Path, paths):
                if path.is_dir():
                    artifact.add_dir(str(path), name=path.name)
                else:
                    artifact.add_file(str(path))
            self._run.log_artifact(artifact)

        self._try("artifact", send)

    def finish(self, exit_code: int) -> None:
        """End the run, and say how to upload it where it was to be online and W&B failed to."""
        if not self._try("finish", lambda: self._run.finish(exit_code=exit_code)) and not self.sync_command:
            self.sync_command = self._command
            log.warning("W&B run kept on disk; upload it with: %s", self.sync_command)

    def _try(self, kind: str, call: Callable[[], Any]) -> bool:
        """Call W&B; a failure is a warning, the first time of its kind."""
        try:
            call()
        except Exception as error:
            if kind not in self._warned:
                self._warned.add(kind)
                log.warning("W&B refused a call (%s), the job goes on: %s", kind, one_line(error))
            return False
        return True


@dataclass(kw_only=True)
class Tracker(ABC):
    """Opens a run for each stage of a job."""

    def check(self) -> None:  # noqa: B027 (a tracker without values has nothing to check)
        """Raise ConfigError for values that cannot be, before any work."""

    @abstractmethod
    def run(self, stage: str, group: str, config: Mapping[str, Any], folder: Path) -> AbstractContextManager[Run]:
        """The run of a stage as a context, which ends it in every case.

        Args:
            stage: the job type, such as `decode`.
            group: what the runs of an experiment have in common.
            config: the job's configuration; an OmegaConf node is resolved.
            folder: the stage's output folder.
        """


@dataclass(kw_only=True)
class NoTracker(Tracker):
    """Tracks nothing."""

    @contextmanager
    def run(self, stage: str, group: str, config: Mapping[str, Any], folder: Path) -> Iterator[Run]:
        """Yield a handle that drops all it is given."""
        yield NullRun()


@dataclass(kw_only=True)
class LocalTracker(Tracker):
    """Appends every logged value to `metrics.jsonl` in the stage's folder; no service at all."""

    @contextmanager
    def run(self, stage: str, group: str, config: Mapping[str, Any], folder: Path) -> Iterator[Run]:
        """Yield a handle that writes into the folder."""
        yield LocalRun(Path(folder))


@dataclass(kw_only=True)
class WandbTracker(Tracker):
    """Weights & Biases: one run a stage, grouped by experiment.

    mode: `offline` (run folders on disk, for `wandb sync`), `online` (without a key, or without a
    server that answers, the job says so and goes offline), `disabled` (W&B is not even imported).
    dir: the folder under which W&B makes `wandb/<run>`; None: the folder of the stage.
    """

    project: str = "prr_pipeline"
    entity: str | None = None
    mode: str = "offline"
    tags: list[str] = field(default_factory=list)
    dir: str | None = None

    def __post_init__(self) -> None:
        self._told = False  # one line a job, not a stage: see _tell

    def check(self) -> None:
        """Settle the mode before any work; online without a key becomes offline.

        Raises:
            ConfigError: the mode is unknown.
        """
        if self.mode not in WANDB_MODES:
            near = difflib.get_close_matches(str(self.mode), WANDB_MODES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"tracker.mode={self.mode} is unknown{hint}; known: {', '.join(WANDB_MODES)}")
        if self.mode == "online" and not has_key():
            log.warning(
                "tracker.mode=online, but there is no W&B key (WANDB_API_KEY, or a netrc entry for"
                " %s): going offline. `wandb login` sets a key.",
                _host(),
            )
            self.mode = "offline"

    @contextmanager
    def run(self, stage: str, group: str, config: Mapping[str, Any], folder: Path) -> Iterator[Run]:
        """Open the run of a stage; it is finished in every case, with exit code 1 on any exception."""
        self.check()
        if self.mode == "disabled":
            yield NullRun()
            return
        handle = self._start(stage, group, config, Path(folder))
        try:
            yield handle
        except BaseException:
            self._finish(handle, Path(folder), 1)
            raise
        self._finish(handle, Path(folder), 0)

    def _finish(self, handle: WandbRun | LocalRun, folder: Path, exit_code: int) -> None:
        """End a run; how to upload the offline ones is said after the first, for all stages of the job."""
        offline = handle.sync_command
        handle.finish(exit_code)
        if offline:
            log.debug("W&B run kept offline; upload it with: %s", offline)
            where = shlex.quote(str(Path(self.dir).resolve() if self.dir else folder.resolve().parent))
            self._tell(
                "W&B runs are kept offline; upload those of this job with: wandb sync %s",
                f"{where}{'' if self.dir else '/*'}/wandb/offline-run-*",
            )

    def _tell(self, message: str, value: object) -> None:
        """Log once a job, then at debug level."""
        log.log(logging.DEBUG if self._told else logging.INFO, message, value)
        self._told = True

    def _start(self, stage: str, group: str, config: Mapping[str, Any], folder: Path) -> WandbRun | LocalRun:
        """Start a run in the wanted mode, else offline, else a local one."""
        local = LocalRun(folder)
        while True:
            try:
                return self._init(stage, group, config, folder, local)
            except Exception as error:
                if self.mode == "offline":
                    log.warning("W&B did not start, metrics go to %s: %s", local.path, one_line(error))
                    return local
                log.warning("W&B could not go online, going offline: %s", one_line(error))
                self.mode = "offline"  # for the later stages too: they would wait for the same failure

    def _init(self, stage: str, group: str, config: Mapping[str, Any], folder: Path, local: LocalRun) -> WandbRun:
        import wandb  # here: a second of import time, and it may be missing

        root = Path(self.dir or folder).resolve()
        root.mkdir(parents=True, exist_ok=True)  # else W&B would write to the system's temporary folder
        wandb.setup(settings=wandb.Settings(silent=True))
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=cast(Any, self.mode),
            dir=root,
            group=group,
            job_type=stage,
            name=f"{group}-{stage}",
            tags=list(self.tags),
            config=_plain(config),
            reinit="finish_previous",  # the default hands a second job the first one's run
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
        if not run.offline:
            self._tell("W&B runs are online; the first of this job: %s", run.url)
        return WandbRun(wandb, run, local)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if not OmegaConf.is_config(config):
        return dict(config)
    resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return resolved


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, default=str)


def _host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc


def has_key() -> bool:
    """Whether W&B would find credentials for its server, looked up where W&B looks."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file).authenticators(_host()):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
