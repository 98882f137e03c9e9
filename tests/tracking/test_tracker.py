# SPDX-License-Identifier: Apache-2.0
"""Real offline W&B runs: apart, resolved, finished in every case; and failures that stay local."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from prr_pipeline.errors import ConfigError
from prr_pipeline.tracking import tracker as module
from prr_pipeline.tracking.tracker import LocalTracker, NoTracker, WandbTracker

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch, caplog):
    """No W&B variable, key or folder of the user reaches a test."""
    for name in ("API_KEY", "BASE_URL", "MODE", "DIR", "PROJECT", "ENTITY", "IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "home" / name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    caplog.set_level(logging.INFO, logger=module.__name__)
    yield
    assert wandb.run is None


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def content(folder: Path, *texts: bytes) -> bytes:
    """The data of the one run, with all of the texts; W&B writes them a moment after the end."""
    (run,) = runs(folder)
    (file,) = run.glob("*.wandb")
    end = time.monotonic() + 5
    while (absent := [t for t in texts if t not in file.read_bytes()]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not absent
    return file.read_bytes()


@pytest.fixture
def exit_codes(monkeypatch):
    seen = []
    finish = wandb.Run.finish

    def spy(self, exit_code=None, **kwargs):
        seen.append(exit_code)
        return finish(self, exit_code=exit_code, **kwargs)

    monkeypatch.setattr(wandb.Run, "finish", spy)
    return seen


def test_two_runs_of_a_process_are_apart_and_resolved(tmp_path, caplog, capfd, exit_codes):
    tracker = WandbTracker(tags=["t"])
    config = OmegaConf.create({"model": {"name": "tiny"}, "title": "${model.name}-resolved"})
    commands = []
    for stage, value in (("decode", "first-value"), ("evaluate", "second-value")):
        with tracker.run(stage, "group-1", config, tmp_path / stage) as run:
            run.log({"score": 0.5, "none": None}, step=7)
            run.log({"score": 0.6}, step=3)  # steps may go back
            run.summary({"mark": value})
            run.table("rows", [{"a": 1, "b": None}, {"a": 2.5, "c": [1, 2]}])
        commands.append(run.sync_command)
    names = (b"group-1-decode", b"prr_pipeline", b"tiny-resolved", b"first-value")
    first = content(tmp_path / "decode", *names)
    second = content(tmp_path / "evaluate", b"group-1-evaluate", b"second-value")
    assert b"second-value" not in first and b"first-value" not in second
    assert b"${" not in first
    assert commands == [f"wandb sync {runs(tmp_path / s)[0]}" for s in ("decode", "evaluate")]
    lines = [r.getMessage() for r in caplog.records if r.name == module.__name__ and r.levelno >= logging.INFO]
    said = f"W&B runs are kept offline; upload those of this job with: wandb sync {tmp_path}/*/wandb/offline-run-*"
    assert lines == [said], "one line a job"
    words = subprocess.run(["sh", "-c", f"echo {said.split('with: ')[1]}"], capture_output=True, text=True).stdout
    assert words.split() == ["wandb", "sync", *(str(runs(tmp_path / s)[0]) for s in ("decode", "evaluate"))]
    assert exit_codes == [0, 0]
    assert capfd.readouterr() == ("", "")  # W&B itself is silent
    (table,) = runs(tmp_path / "decode")[0].glob("files/media/table/*.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == ["a", "b", "c"]
    assert stored["data"] == [[1, None, None], [2.5, None, "[1, 2]"]]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_exception_finishes_the_run_and_passes(tmp_path, exit_codes, error, caplog):
    with (
        pytest.raises(type(error)) as caught,
        WandbTracker().run("decode", "g", {}, tmp_path),
    ):
        raise error
    assert caught.value is error
    assert exit_codes == [1]
    assert wandb.run is None
    assert "wandb sync" in caplog.text


def test_dir_puts_the_runs_elsewhere_and_quotes_the_command(tmp_path, caplog):
    other = tmp_path / "other place"
    with WandbTracker(dir=str(other)).run("decode", "g", {}, tmp_path / "stage") as run:
        pass
    assert run.sync_command == f"wandb sync '{runs(other)[0]}'"
    assert caplog.messages[-1].endswith(f"with: wandb sync '{other}'/wandb/offline-run-*")
    assert not (tmp_path / "stage").exists()


def test_images_and_artifacts_arrive(tmp_path, caplog):
    from matplotlib.figure import Figure

    picture, folder = tmp_path / "plot.png", tmp_path / "tables"
    Figure(figsize=(1, 1)).savefig(picture)
    folder.mkdir()
    (folder / "rows.csv").write_text("a,b\n")
    with WandbTracker().run("evaluate", "g", {}, tmp_path / "stage") as run:
        run.image("plot", picture)
        run.artifact("glm4 x quest/results", "results", [picture, folder])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert list(runs(tmp_path / "stage")[0].glob("files/media/images/plot_*.png"))
    content(tmp_path / "stage", b"glm4-x-quest-results", b"tables/rows.csv", b"plot.png")


def test_a_call_that_fails_is_warned_of_once_and_kept_locally(tmp_path, caplog):
    with WandbTracker().run("decode", "g", {}, tmp_path) as run:
        for _ in range(2):
            run.log({"bad": object()}, step=1)
            run.image("plot", tmp_path / "absent.png")
        run.log({"good": 1})
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0].startswith("W&B refused a call (log), the job goes on: TypeError: ")
    assert warnings[1].startswith("W&B refused a call (image), the job goes on: FileNotFoundError")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0])["step"] == 1
    content(tmp_path, b"good")


def test_disabled_does_not_import_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with WandbTracker(mode="disabled").run("decode", "g", {}, tmp_path) as run:
        run.log({"a": 1})
    assert run.sync_command is None
    assert list(tmp_path.iterdir()) == []


def test_without_wandb_the_values_go_to_a_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with WandbTracker().run("decode", "g", {}, tmp_path) as run:
        run.log({"a": 1, "b": None}, step=0)
        run.summary({"score": 0.5})
        run.table("t", [{"a": 1}])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "a": 1}, {"summary": {"score": 0.5}}]
    assert "W&B did not start, metrics go to" in caplog.text


def test_no_disk_is_no_reason_to_stop(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with WandbTracker().run("decode", "g", {}, tmp_path / "file" / "stage") as run:
        run.log({"a": 1})
    assert "W&B did not start" in caplog.text
    assert "metrics are lost" in caplog.text


def test_an_unreachable_server_means_offline_once(tmp_path, monkeypatch, caplog):
    modes = []
    init = wandb.init

    def unreachable(**kwargs):
        modes.append(kwargs["mode"])
        if kwargs["mode"] == "online":
            raise wandb.errors.CommError("no route\nlong advice")
        return init(**kwargs)

    monkeypatch.setattr(wandb, "init", unreachable)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    tracker = WandbTracker(mode="online")
    for stage in ("decode", "evaluate"):
        with tracker.run(stage, "g", {}, tmp_path / stage) as run:
            run.log({"a": 1})
        assert run.sync_command == f"wandb sync {runs(tmp_path / stage)[0]}"
    assert modes == ["online", "offline", "offline"]
    assert "W&B could not go online, going offline: CommError: no route" in caplog.text
    assert "long advice" not in caplog.text


def test_online_without_a_key_goes_offline(tmp_path, monkeypatch, caplog):
    tracker = WandbTracker(mode="online")
    tracker.check()
    assert tracker.mode == "offline"
    assert "no W&B key" in caplog.text and "wandb login" in caplog.text

    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    tracker = WandbTracker(mode="online")
    tracker.check()
    assert tracker.mode == "online"

    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # the key is another host's
    tracker.check()
    assert tracker.mode == "offline"


def test_a_line_says_what_it_is_of_and_wandb_is_not_told(tmp_path):
    of = {"id": "a-sample", "layer": 3, "absent": None}
    with LocalTracker().run("decode", "g", {}, tmp_path / "local") as run:
        run.log({"hit": 0.5}, of=of)
        run.log({"hit": 0.6}, step=2, of=of)
    with WandbTracker().run("decode", "g", {}, tmp_path) as run:
        run.log({"hit": 0.5}, of=of)
        run.log({"bad": object()}, of=of)  # W&B refuses it
    assert (tmp_path / "local" / "metrics.jsonl").read_text().splitlines() == [
        '{"id": "a-sample", "layer": 3, "hit": 0.5}',
        '{"step": 2, "id": "a-sample", "layer": 3, "hit": 0.6}',
    ]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"id": "a-sample", "layer": 3, "bad": "<object')
    assert b"a-sample" not in content(tmp_path, b"hit")


def test_a_wrong_mode_names_the_near_one():
    with pytest.raises(ConfigError) as caught:
        WandbTracker(mode="ofline").check()
    assert str(caught.value) == (
        "tracker.mode=ofline is unknown (did you mean offline?); known: offline, online, disabled"
    )


def test_the_other_trackers_share_the_interface(tmp_path):
    for tracker in (NoTracker(), LocalTracker()):
        tracker.check()
        folder = tmp_path / type(tracker).__name__
        with tracker.run("decode", "g", {}, folder) as run:
            run.log({"a": 1}, step=2)
            run.summary({"b": 2})
            run.table("t", [{"a": 1}])
            run.image("i", tmp_path / "i.png")
            run.artifact("x", "results", [tmp_path])
        assert run.sync_command is None
    assert not (tmp_path / "NoTracker").exists()
    assert (tmp_path / "LocalTracker" / "metrics.jsonl").read_text() == ('{"step": 2, "a": 1}\n{"summary": {"b": 2}}\n')


@pytest.mark.parametrize("name, kind", [("wandb", WandbTracker), ("none", NoTracker), ("local", LocalTracker)])
def test_the_options_are_the_classes(name, kind, monkeypatch):
    from hydra.utils import instantiate

    option = OmegaConf.load(Path(__file__).parents[2] / "conf" / "tracker" / f"{name}.yaml")
    assert type(instantiate(option)) is kind
    if kind is WandbTracker:
        assert instantiate(option) == WandbTracker()
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert instantiate(option).mode == "disabled"
