# SPDX-License-Identifier: Apache-2.0
"""Folders that cannot be written to and disks that are full end with what to do, not with a stack."""

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from processes import book, command, start

from prr_pipeline import config, pipeline
from prr_pipeline.artifacts import disk_error
from prr_pipeline.errors import ArtifactError, ConfigError
from prr_pipeline.stages import profile
from prr_pipeline.stages.job import Job

Compose = Callable[..., DictConfig]


def refused(folder: object) -> str:
    with pytest.raises(ConfigError) as error:
        config.check_output(str(folder))
    return str(error.value)


def test_an_output_without_a_name_writes_nowhere(tmp_path: Path, composed: Compose) -> None:
    for word in ("output=", "output=''", "output=' '"):
        code, said = command(tmp_path, word)
        assert (code, said) == (2, "prr_pipeline: output is empty, expected a folder such as output=runs\n")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="output is empty"):
        config.validate(composed("output=''"))


@pytest.mark.parametrize("name", ["file", "file/deeper", "file/deeper/still"])
def test_a_file_where_the_output_should_be_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    code, said = command(tmp_path, f"output={name}")
    assert (code, said) == (
        2,
        f"prr_pipeline: output = {name}: the folder {tmp_path}/{name} cannot be made (a file is there or on the way to "
        "it); take another: output=FOLDER\n",
    )


def test_a_file_where_the_logs_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    assert refused(tmp_path) == (
        f"output = {tmp_path}: {tmp_path}/logs is a file, and logs go into a folder of that name; move it away"
    )


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.check_output(str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert refused(tmp_path).endswith("cannot be written to; change its permissions, or take another: output=FOLDER")

    def barred(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", barred)
    assert "cannot be made (Permission denied); take another: output=FOLDER" in refused(tmp_path)


def test_a_disk_without_space_for_hydra_s_own_files_is_refused_before_hydra_begins(tmp_path: Path) -> None:
    """They are written by Hydra, which answers with stacks. Files that may not grow stand for a disk that is full."""
    config.check_output(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        said = refused(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == (
        f"output = {tmp_path}: File too large in {tmp_path}: not even a job's log can be written; free some space, or "
        "take another: output=FOLDER"
    )
    assert os.listdir(tmp_path) == []


def test_a_file_where_the_job_s_folder_should_be_is_named(tmp_path: Path, composed: Compose) -> None:
    (tmp_path / "default").write_text("")
    with pytest.raises(ArtifactError) as error:
        pipeline.run(composed(f"output={tmp_path}", "debug=tiny"))
    assert str(error.value).startswith(f"{tmp_path}/default")
    assert str(error.value).endswith(
        "a file is where a folder should be, or the reverse: move it away, or take another folder: output=FOLDER"
    )


@pytest.mark.parametrize(
    ("number", "todo"),
    [
        (errno.ENOSPC, "free some space. What is done is kept, the next run resumes, or take another folder: output="),
        (errno.EDQUOT, "free some space. What is done is kept"),
        (errno.EROFS, "change its permissions, or take another folder: output=FOLDER"),
        (errno.EACCES, "change its permissions, or take another folder: output=FOLDER"),
    ],
)
def test_a_disk_that_fails_in_the_middle_of_a_stage_says_what_to_do(
    tmp_path: Path, composed: Compose, monkeypatch: pytest.MonkeyPatch, number: int, todo: str
) -> None:
    cfg = composed(f"output={tmp_path}", "debug=tiny", "stages=[profile]")
    root = Job(cfg).root

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number), str(root / "profile" / "x"))

    monkeypatch.setattr(profile, "_profile", full)
    with pytest.raises(ArtifactError) as error:
        pipeline.run(cfg)
    assert str(error.value).startswith(f"{root}/profile/x: {os.strerror(number)}; {todo}")
    assert json.loads((root / "status.json").read_text())["state"] == "failed"


def test_other_errors_of_the_system_keep_their_stack(tmp_path: Path) -> None:
    assert disk_error(ConnectionResetError(errno.ECONNRESET, "x"), tmp_path) is None
    elsewhere = disk_error(PermissionError(errno.EACCES, "Permission denied", "/data/book.txt"), tmp_path / "a" / "b")
    assert str(elsewhere) == "/data/book.txt: Permission denied; change its permissions"


def test_sigterm_ends_as_ctrl_c_does(tmp_path: Path) -> None:
    process = start(tmp_path, *book(tmp_path, 16), "stages=[calibrate,decode]", "tracker=none")
    while process.poll() is None and not list(tmp_path.glob("runs/*/*/decode/samples.jsonl")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in said
    assert said.splitlines()[-1] == (
        "prr_pipeline: interrupted. What is done is kept: the next run (without force) resumes"
    )
    (path,) = tmp_path.glob("runs/*/*/status.json")
    status = json.loads(path.read_text())
    assert (status["stage"], status["state"], status["error"]) == ("decode", "failed", "Terminated: SIGTERM")
