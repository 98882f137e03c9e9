# SPDX-License-Identifier: Apache-2.0
"""The command line: compose a job with Hydra, validate it, run it."""

import logging
import os
import signal
import sys
from typing import NoReturn, TextIO

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from prr_pipeline import config, overrides
from prr_pipeline.errors import PrrError

log = logging.getLogger(__name__)

# CPU threads that wait must sleep: spinning, they hold the core that the thread they wait for needs (on two cores with
# one other busy process, prefill took twice and calibration eight times as long). Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

config.register()


class _Failures:
    """Jobs of a sweep that failed in this process, a line each, and whether all of them by a user's mistake."""

    def __init__(self) -> None:
        self.pid, self.mistakes = os.getpid(), True
        self.lines: list[str] = []

    def add(self, error: Exception) -> None:
        """Note the failure of the job at hand; raises it where a launcher runs jobs in processes of their own."""
        number = HydraConfig.get().job.num
        if os.getpid() != self.pid:
            raise CompactHydraException(f"job {number} failed: {error}") from None
        told = str(error) if isinstance(error, PrrError) else f"{type(error).__name__}: {error}"
        self.lines.append(f"job {number} failed: {(told.strip() or '-').splitlines()[0]}")
        self.mistakes = self.mistakes and isinstance(error, PrrError)


_failed = _Failures()


@hydra.main(version_base="1.3", config_path=str(config.config_dir()), config_name="config")
def job(cfg: DictConfig) -> None:
    """Run one job; a user's mistake ends with its message and exit code 2, in a sweep once all jobs were run."""
    swept = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        config.validate(cfg)
        from prr_pipeline import pipeline  # heavy: only a job that runs pays for torch

        pipeline.run(cfg)
    except PrrError as error:
        log.error("%s", error)
        if not swept:
            sys.exit(2)
        _failed.add(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not swept:
            raise
        log.exception("failed")  # each in its job's own log
        _failed.add(error)


class Unread(KeyboardInterrupt):
    """Nobody reads what is written: a pipe's reader is gone; a job ends as it does by Ctrl-C."""


def _unlogged(handler: logging.StreamHandler[TextIO], record: logging.LogRecord) -> None:
    """Called for a handler whose write failed."""
    if isinstance(sys.exc_info()[1], BrokenPipeError):
        raise Unread from None
    logging.Handler.handleError(handler, record)


def _end_unread() -> NoReturn:
    """End without a word: there is nobody to say it to, nor may the interpreter try."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    sys.exit(128 + signal.SIGPIPE)


class Terminated(KeyboardInterrupt):
    """SIGTERM: what a scheduler sends before it kills; a job ends as it does by Ctrl-C."""


def _terminate(*_: object) -> NoReturn:
    raise Terminated("SIGTERM")


def main() -> None:
    """Entry point of `python -m prr_pipeline` and of the console script."""
    signal.signal(signal.SIGTERM, _terminate)
    logging.StreamHandler.handleError = _unlogged  # type: ignore[method-assign, assignment]
    try:
        sys.argv[1:] = overrides.prepare(sys.argv[1:])
        composed = overrides.check(sys.argv[1:])
        if composed is not None:  # before Hydra makes its folder of logs in there
            config.check_output(composed.output)
        else:  # Hydra prints, and would report a reader who left as an error of its own
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    except PrrError as error:
        print(f"prr_pipeline: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        job()
        sys.stdout.flush()
    except (Unread, BrokenPipeError):
        _end_unread()
    except KeyboardInterrupt as error:
        print("prr_pipeline: interrupted. What is done is kept: the next run (without force) resumes", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT))
    if _failed.lines:
        print("\n".join(f"prr_pipeline: {line}" for line in _failed.lines), file=sys.stderr)
        sys.exit(2 if _failed.mistakes else 1)


if __name__ == "__main__":
    main()
