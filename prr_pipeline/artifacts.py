# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other: a folder a stage, records as JSON lines, and a manifest written last.

A manifest names the stage's configuration by hash, its inputs and outputs by SHA-256, versions, device and commit. A
stage is done if and only if its manifest is there and matches. Everything is written atomically (a rename) but for JSON
lines, where a line counts once its end is there.
"""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import DictConfig, OmegaConf

from prr_pipeline import __version__
from prr_pipeline.errors import ArtifactError

_MANIFEST = "manifest.json"
_STARTED = "started.json"
_PACKAGES = ("torch", "transformers", "hydra-core", "lightning", "wandb", "nvidia-cutlass-dsl", "numpy")
_NOT_RESULTS = ("stages", "force", "output", "tracker")  # keys that change where and how, not what


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The job's configuration as plain data, without the keys that cannot change a result."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(k): v for k, v in plain.items() if k not in _NOT_RESULTS}


def digest(data: Any) -> str:
    """SHA-256 of plain data, in hexadecimal."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically; NaN is refused, since JSON has none."""
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works in a job's folder; the system drops the lock of a process that dies.

    Raises:
        ArtifactError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtifactError(
                f"{folder}: another process is running this very job; wait for it, or take another folder: output=..."
            ) from None
        yield


class Records:
    """A file of JSON lines, appended and flushed one by one."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All whole records; a last line without its end (a killed process, a full disk) is torn, and none.

        Raises:
            ArtifactError: a line that has its end is damaged.
        """
        if not self.path.exists():
            return []
        rows = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
            if not line:
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ArtifactError(
                    f"{self.path}: line {number} is damaged ({error.msg}); delete the line, or redo the stage with "
                    "force=true"
                ) from None
        return rows

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows in one write, flushed to disk, in the place of a torn last line if there is one."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as f:
            _drop_torn(f)
            f.write(text.encode())
            f.flush()
            os.fsync(f.fileno())

    def rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace the file atomically."""
        write_atomic(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def _drop_torn(f: BinaryIO) -> None:
    """Cut a file after its last line end."""
    if f.seek(0, os.SEEK_END):
        f.seek(-1, os.SEEK_END)
        if f.read(1) != b"\n":
            f.seek(0)
            f.truncate(f.read().rfind(b"\n") + 1)


class StageFolder:
    """One stage's output: <output>/<experiment>/<config hash>/<stage>."""

    def __init__(self, path: Path, stage: str, config: dict[str, Any]):
        self.path, self.stage = path, stage
        self.config = config

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def manifest(self) -> Path:
        """Where the manifest is or will be."""
        return self.path / _MANIFEST

    @property
    def redo(self) -> str:
        """What to do about a faulty output, for messages."""
        return f"redo it with force=true stages=[{self.stage}]"

    def load(self) -> dict[str, Any] | None:
        """The manifest, or None if the stage is not done.

        Raises:
            ArtifactError: it is damaged, of another configuration (names the keys that differ), or its files changed.
        """
        if not self.manifest.exists():
            return None
        try:
            manifest = json.loads(self.manifest.read_text(encoding="utf-8"))
            found, outputs = manifest["config"], dict(manifest["outputs"])
            manifest["inputs"] = dict(manifest["inputs"])
        except (ValueError, KeyError, TypeError) as error:  # not UTF-8, no JSON, or JSON of something else
            raise ArtifactError(f"{self.manifest} is damaged ({error}); {self.redo}") from None
        if digest(found) != digest(self.config):
            keys = ", ".join(differing(found, self.config))
            raise ArtifactError(f"{self.path} was made by another configuration; these differ: {keys}; {self.redo}")
        for name, expected in outputs.items():
            path = self.path / name
            if not path.exists() or file_digest(path) != expected:
                state = "changed" if path.exists() else "is missing"
                raise ArtifactError(f"{path} {state} since {self.stage} wrote it; {self.redo}")
        return manifest

    def require(self, by: str) -> dict[str, Any]:
        """The manifest of a stage that another one reads.

        Raises:
            ArtifactError: the stage is not done.
        """
        manifest = self.load()
        if manifest is None:
            raise ArtifactError(
                f"stage {by} needs the output of {self.stage}, and {self.path} has none; "
                f"run it too: stages=[{self.stage},{by}]"
            )
        return manifest

    def start(self, inputs: dict[str, str]) -> None:
        """Note what the stage's records are made from, before the first of them.

        Args:
            inputs: digest of each stage's manifest that was read.

        Raises:
            ArtifactError: an interrupted run left records made from other inputs.
        """
        note = self.path / _STARTED
        if note.exists():
            found = json.loads(note.read_text(encoding="utf-8"))
            if found != inputs:
                others = ", ".join(differing(found, inputs))
                raise ArtifactError(f"{self.path} has records made from another output of {others}; {self.redo}")
        write_json(note, inputs)

    def finish(self, device: str, inputs: dict[str, str], outputs: list[Path], extra: dict[str, Any]) -> None:
        """Write the manifest: from here on the stage is done.

        Args:
            inputs: digest of each stage's manifest that was read.
            outputs: the files that other stages may read.
            extra: facts of the run that belong beside its results.
        """
        write_json(
            self.manifest,
            {
                "stage": self.stage,
                "config_hash": digest(self.config),
                "config": self.config,
                "inputs": inputs,
                "outputs": {p.relative_to(self.path).as_posix(): file_digest(p) for p in outputs},
                "device": device,
                "versions": versions(),
                "commit": commit(),
                **extra,
            },
        )


def differing(a: Any, b: Any, at: str = "") -> list[str]:
    """Paths of the keys whose values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b}, key=str)
        return [p for k in keys for p in differing(a.get(k), b.get(k), f"{at}.{k}" if at else str(k))]
    return [] if a == b else [at]


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of what results depend on."""
    found = {"prr_pipeline": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The git commit of the source tree, with '+' if it has changes; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip()

    try:
        return (git("rev-parse", "HEAD") or "none") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.TimeoutExpired):
        return None
