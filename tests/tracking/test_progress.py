# SPDX-License-Identifier: Apache-2.0
"""The bar and its plain-line form show the same figures, and can be switched off."""

import io
import logging
import re

import pytest

from prr_pipeline.tracking import progress as module
from prr_pipeline.tracking.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch, caplog):
    """A clock that only the test moves."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_plain_lines_come_now_and_then_with_the_time_left(clock, caplog):
    stream = io.StringIO()
    with Progress("decode qasper", 10, done=2, stream=stream) as progress:
        clock[0] = 10.0
        progress.update(tokens=100, seconds=4.0, hit_rate=0.9)  # too soon for a line
        clock[0] = 40.0
        progress.update(tokens=300, seconds=4.0, hit_rate=1.0)
        progress.update(0, tokens=100, seconds=2.0)  # serial: no hit rate
        clock[0] = 100.0
        progress.update(6)
    assert messages(caplog) == [
        "decode qasper: 4/10 samples, 50.0 tokens/s, hit 97.5 %, 2:00 left",
        "decode qasper: 10/10 samples, 50.0 tokens/s, hit 97.5 %, 1:40 in all",
    ]
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_time_left_is_that_of_the_units_left(clock, caplog, stream):
    with Progress("decode", 20, unit="run", stream=stream) as progress:
        clock[0] = 30.0
        progress.update(6, tokens=768, seconds=24.0)
        progress.update(0)  # a bar is drawn anew at once
        seen = stream.getvalue() + "".join(messages(caplog))
        progress.update(14)
    assert "6/20" in seen and "32.0 tokens/s, 1:10 left" in seen
    assert seen.count("left") == 1 or stream.isatty(), "tqdm's own estimate is not there"
    assert re.search(r"\d\d<|\?it/s|run/s", seen) is None


def test_without_tokens_there_is_no_rate(clock, caplog):
    with Progress("calibrate", 3, unit="prompt", stream=io.StringIO()) as progress:
        clock[0] = 3700.0
        progress.update(0)
    assert messages(caplog) == [
        "calibrate: 0/3 prompts",
        "calibrate: 0/3 prompts, 1:01:40 in all",
    ]


def test_a_terminal_gets_a_bar_and_log_lines_stay_whole(caplog):
    stream = Terminal()
    with Progress("decode", 4, done=1, stream=stream) as progress:
        progress.update(tokens=50, seconds=0.5, hit_rate=0.98)
        progress.update(2)
    text = stream.getvalue()
    assert re.search(r"decode: +25%.*1/4", text)
    assert re.search(r"decode: 100%.*4/4.*100\.0 tokens/s, hit 98\.0 %", text)
    assert messages(caplog) == []


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
@pytest.mark.parametrize("off", ["variable", "argument"])
def test_it_can_be_silent(monkeypatch, caplog, stream, off):
    if off == "variable":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    with Progress("decode", 2, show=off == "variable", stream=stream) as progress:
        progress.update(2, tokens=10, seconds=1.0)
    assert stream.getvalue() == "" and messages(caplog) == []


def test_an_exception_passes_and_leaves_the_last_line(caplog):
    with (
        pytest.raises(KeyboardInterrupt),
        Progress("decode", 2, stream=io.StringIO()) as progress,
    ):
        progress.update()
        raise KeyboardInterrupt
    assert messages(caplog) == ["decode: 1/2 samples, 0:00 in all"]
