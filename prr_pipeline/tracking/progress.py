# SPDX-License-Identifier: Apache-2.0
"""Progress of a stage: a bar with tokens/s and hit rate on a terminal, else plain log lines."""

import logging
import os
import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TextIO

log = logging.getLogger(__name__)

EVERY_S = 30.0  # between two log lines


class Progress:
    """Counts finished units (samples) and what is known of their tokens; a context manager.

    On a terminal it is a bar, beside which log lines stay whole. Without one it logs a line at most
    every 30 seconds, and one when it ends. With TQDM_DISABLE=1 it is silent.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "sample",
        show: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        """Prepare; nothing is shown before the context is entered.

        Args:
            label: what runs, such as `decode qasper`.
            total: units in all.
            done: units that an earlier run finished; they do not count for the time left.
            unit: the name of one unit.
            show: False on every process but the first.
            stream: where the bar goes; None: the standard error.
        """
        self._label, self._total, self._unit = label, total, unit
        self._done = self._resumed = done
        self._stream = stream or sys.stderr
        self._show = show and os.environ.get("TQDM_DISABLE", "").lower() in ("", "0", "false")
        self._tokens, self._seconds = 0, 0.0
        self._hits, self._hit_tokens = 0.0, 0
        self._bar: Any = None
        self._exit = ExitStack()

    def __enter__(self) -> "Progress":
        """Start the clock and show the bar, if there is a terminal."""
        self._started = self._logged = time.monotonic()
        if self._show and self._stream.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._bar = self._exit.enter_context(
                tqdm(
                    total=self._total,
                    desc=self._label,
                    unit=self._unit,
                    initial=self._done,
                    file=self._stream,
                    dynamic_ncols=True,
                    bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",  # the time left is ours
                )
            )
            self._exit.enter_context(logging_redirect_tqdm())
        return self

    def update(
        self,
        units: int = 1,
        *,
        tokens: int = 0,
        seconds: float = 0.0,
        hit_rate: float | None = None,
    ) -> None:
        """Count units, and the tokens that were decoded for them.

        Args:
            units: finished units; 0 reports tokens within a unit.
            tokens: decoded tokens.
            seconds: the time that those took.
            hit_rate: their hit rate, 0 to 1; None where nothing was predicted.
        """
        self._done += units
        self._tokens += tokens
        self._seconds += seconds
        if hit_rate is not None:
            self._hits += hit_rate * tokens
            self._hit_tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join([*self._figures(), *self._left()]), refresh=not units)
            self._bar.update(units)
        elif self._show and self._done < self._total and time.monotonic() - self._logged >= EVERY_S:
            self._log(self._left())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the bar, or log the last line."""
        self._exit.close()
        if self._show and self._bar is None:
            self._log([f"{_clock(time.monotonic() - self._started)} in all"])

    def _figures(self) -> list[str]:
        figures = []
        if self._seconds > 0:
            figures.append(f"{self._tokens / self._seconds:.1f} tokens/s")
        if self._hit_tokens:
            figures.append(f"hit {100 * self._hits / self._hit_tokens:.1f} %")
        return figures

    def _log(self, end: list[str]) -> None:
        self._logged = time.monotonic()
        count = f"{self._done}/{self._total} {self._unit}s"
        log.info("%s: %s", self._label, ", ".join([count, *self._figures(), *end]))

    def _left(self) -> list[str]:
        """The time that the units left take at the pace of this run, once there is one."""
        finished = self._done - self._resumed
        if not finished or self._done >= self._total:
            return []
        return [f"{_clock((time.monotonic() - self._started) / finished * (self._total - self._done))} left"]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
