# SPDX-License-Identifier: Apache-2.0
"""What stages hand to each other: a folder a stage, records as JSON lines, and a manifest written last.

A manifest names the stage's configuration by hash, its inputs (outputs of other stages, files, this program's source)
and outputs by SHA-256, versions, device and commit. A stage is done if and only if its manifest is there and matches,
and current if its inputs are what they were. Everything is written atomically (a rename) but for JSON lines, where a
line counts once its end is there.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import DictConfig, OmegaConf

from prr_pipeline import __version__
from prr_pipeline.config import BASELINES, MODES
from prr_pipeline.errors import ArtifactError, PrrError

log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_STARTED = "started.json"
_PACKAGES = ("torch", "transformers", "hydra-core", "lightning", "wandb", "nvidia-cutlass-dsl", "numpy")
_NOT_RESULTS = ("stages", "force", "allow_other_source", "output", "tracker")  # they change where and how, not what
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BARRED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSHAPEN = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
SOURCE = "source"  # what the program's own source is called among the inputs that differ


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The job's configuration as plain data, without the keys that cannot change a result.

    Lists that are sets are in canonical form, so that their order and repetitions make no other job.
    """
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    found = {str(k): v for k, v in plain.items() if k not in _NOT_RESULTS}
    runtime = dict(found["runtime"])
    runtime["modes"] = canonical_modes(runtime["modes"])
    runtime["baselines"] = [b for b in BASELINES if b in runtime["baselines"]]
    runtime["profile_contexts"] = sorted(set(runtime["profile_contexts"]))
    return found | {"runtime": runtime}


def canonical_modes(modes: Iterable[str]) -> list[str]:
    """The modes that are decoded, each once and in canonical order; serial is always among them."""
    wanted = {"serial", *modes}
    return [m for m in MODES if m in wanted]


def disk_error(error: OSError, root: Path) -> PrrError | None:
    """What to tell the user of a failed write or read under a job's folder; None for errors that are of another kind.

    Args:
        error: as the system raised it.
        root: the job's folder, named where the error has no path.
    """
    where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else root
    if error.errno in _FULL:
        todo = "free some space. What is done is kept, the next run resumes"
    elif error.errno in _BARRED:
        todo = "change its permissions"
    elif error.errno in _MISSHAPEN:
        todo = "a file is where a folder should be, or the reverse: move it away"
    else:
        return None
    if where == root or root.parent in where.parents:
        todo += ", or take another folder: output=FOLDER"
    return ArtifactError(f"{where}: {error.strerror}; {todo}")


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
    """A file of JSON lines, appended and flushed one by one.

    Args:
        path: of the file.
        form: keys that a record has at least, each with the type of its values.
    """

    def __init__(self, path: Path, form: Mapping[str, type] | None = None):
        self.path, self.form = path, form or {}

    def read(self) -> list[dict[str, Any]]:
        """All whole records; a last line without its end (a killed process, a full disk) is torn, and none.

        Raises:
            ArtifactError: a line that has its end is damaged, or no record.
        """
        if not self.path.exists():
            return []
        rows = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
            if not line:
                continue
            try:
                row = json.loads(line)
                why = self._foreign(row)
            except json.JSONDecodeError as error:
                why = error.msg
            if why:
                raise ArtifactError(
                    f"{self.path}: line {number} is damaged ({why}); delete the line, or redo the stage with force=true"
                )
            rows.append(row)
        return rows

    def _foreign(self, row: Any) -> str | None:
        """Why a value is no record of this file."""
        if not isinstance(row, dict):
            return "no JSON object"
        wrong = [key for key, kind in self.form.items() if not isinstance(row.get(key), kind)]
        return f"no record with {', '.join(wrong)}" if wrong else None

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


def redo(*stages: str) -> str:
    """What to do about faulty outputs of stages, for messages."""
    return f"redo it with force=true stages=[{','.join(stages)}]"


class StageFolder:
    """One stage's output: <output>/<experiment>/<config hash>/<stage>.

    Args:
        path, stage, config: of the output.
        source: digest of this program's source; empty where outputs are only looked at.
        files: digest of each input file that the stage reads, by the key that names it.
        any_source: outputs and records of another source are taken as they are.
    """

    def __init__(
        self,
        path: Path,
        stage: str,
        config: dict[str, Any],
        source: str = "",
        files: dict[str, str] | None = None,
        any_source: bool = False,
    ):
        self.path, self.stage = path, stage
        self.config = config
        self.source, self.files, self.any_source = source, files or {}, any_source

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def manifest(self) -> Path:
        """Where the manifest is or will be."""
        return self.path / _MANIFEST

    @property
    def redo(self) -> str:
        """What to do about a faulty output."""
        return redo(self.stage)

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
            manifest["inputs"], manifest["files"] = dict(manifest["inputs"]), dict(manifest.get("files", {}))
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

    def differing(self, made: dict[str, Any]) -> list[str]:
        """What a manifest's or a note's output was made of that is another now: `source`, and keys of input files.

        Files that are not here now are not compared, nor is source where none is given.
        """
        source = [SOURCE] if self.source and made.get("source") != self.source else []
        files = made.get("files", {})
        return source + [k for k, now in self.files.items() if files.get(k) != now]

    def outdated(self, manifest: dict[str, Any], folder: Callable[[str], "StageFolder"]) -> list[str]:
        """What an output was made of that is another now: as `differing`, and stages and what theirs is of.

        A stage whose output is gone is not compared: the records that were made of it stand.

        Args:
            manifest: of the output.
            folder: gives the folder of a stage by name.

        Raises:
            ArtifactError: the output of such a stage is damaged.
        """
        found = self.differing(manifest)
        for stage, expected in manifest["inputs"].items():
            above = folder(stage)
            now = above.load()
            if now is None:
                continue
            if digest(now) != expected:
                found.append(stage)
            found += [f"{key} of {stage}" for key in above.outdated(now, folder) if key not in found]
        return found

    def start(self, inputs: dict[str, str]) -> None:
        """Note what the stage's records are made of, before the first of them.

        Records that an interrupted run left are kept if they are made of the same; else they are put aside, out loud.

        Args:
            inputs: digest of each stage's manifest that was read.

        Raises:
            ArtifactError: the note of the interrupted run is damaged.
        """
        found = self._note()
        if found is None:  # records without a note are of nobody knows what
            others = [SOURCE] if any(self.path.glob("*.jsonl")) else []
        else:
            others = self.differing(found) + differing(found["inputs"], inputs)
        if found and others == [SOURCE] and self.any_source:
            log.warning("%s: goes on after records made by other source (allow_other_source)", self.stage)
            sources = found["source"].split("+")
            self.source = "+".join([*sources, *({self.source} - {*sources})])  # from now on it is of more than one
        elif others:
            made = ", ".join(others)
            log.warning("%s: the records of an interrupted run were made by other %s; starts over", self.stage, made)
            self.clear(keep=True)
        write_json(self.path / _STARTED, {"source": self.source, "files": self.files, "inputs": inputs})

    def _note(self) -> dict[str, Any] | None:
        path = self.path / _STARTED
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {"source": str(found["source"]), "files": dict(found["files"]), "inputs": dict(found["inputs"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); {self.redo}") from None

    def clear(self, keep: bool = False) -> None:
        """Forget what is there: the manifest first, so that a killed process leaves no false one.

        Args:
            keep: put it into the folder `replaced` inside, over what was put there before; else it is deleted.
        """
        aside = self.path / "replaced"
        for path in (self.manifest, *sorted(self.path.glob("*.json*"))):
            if path.exists() and keep:
                aside.mkdir(exist_ok=True)
                path.replace(aside / path.name)
            path.unlink(missing_ok=True)

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
                "source": self.source,
                "files": self.files,
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
