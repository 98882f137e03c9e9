# SPDX-License-Identifier: Apache-2.0
"""One thread a test process, and jobs composed as the command line composes them."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too

from collections.abc import Callable, Iterator

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from prr_pipeline import config, overrides

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def composed() -> Callable[..., DictConfig]:
    """A function that makes a job of the words of a command line; it tracks nothing unless told to."""
    config.register()

    def job(*words: str) -> DictConfig:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config.config_dir()), version_base="1.3"):
            return compose("config", overrides.prepare(["tracker=none", *words]))

    return job


@pytest.fixture(autouse=True)
def no_model_of_another_test() -> Iterator[None]:
    """Jobs of one process share a model; tests do not, since some of them change theirs."""
    yield
    if "prr_pipeline.stages.job" in sys.modules:
        sys.modules["prr_pipeline.stages.job"]._loaded.clear()
