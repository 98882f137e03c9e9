# SPDX-License-Identifier: Apache-2.0
"""The command line: compose a job with Hydra, validate it, run it."""

import logging
import os
import signal
import sys
from typing import NoReturn

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


@hydra.main(version_base="1.3", config_path=str(config.config_dir()), config_name="config")
def job(cfg: DictConfig) -> None:
    """Run one job; a user's mistake ends with its message and exit code 2, in a sweep as that job's failure."""
    swept = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        config.validate(cfg)
        from prr_pipeline import pipeline  # heavy: only a job that runs pays for torch

        pipeline.run(cfg)
    except PrrError as error:
        log.error("%s", error)
        if swept:  # Hydra goes on with the others, and at the end shows the first failure without its stack
            raise CompactHydraException(f"job {HydraConfig.get().job.num} failed: {error}") from None
        sys.exit(2)
    except Exception:
        if swept:  # Hydra shows one stack, that of the first failure; here is each in its job's own log
            log.exception("failed")
        raise


class Terminated(KeyboardInterrupt):
    """SIGTERM: what a scheduler sends before it kills; a job ends as it does by Ctrl-C."""


def _terminate(*_: object) -> NoReturn:
    raise Terminated("SIGTERM")


def main() -> None:
    """Entry point of `python -m prr_pipeline` and of the console script."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.argv[1:] = overrides.prepare(sys.argv[1:])
        composed = overrides.check(sys.argv[1:])
        if composed is not None:  # before Hydra makes its folder of logs in there
            config.check_output(composed.output)
    except PrrError as error:
        print(f"prr_pipeline: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        job()
    except KeyboardInterrupt as error:
        print("prr_pipeline: interrupted. What is done is kept: the next run (without force) resumes", file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT))


if __name__ == "__main__":
    main()
