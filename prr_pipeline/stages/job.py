# SPDX-License-Identifier: Apache-2.0
"""What every stage gets: the options as objects, and the model and samples, made at first use."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from prr_pipeline.artifacts import StageFolder, digest, resolved
from prr_pipeline.benchmarks.base import Benchmark, Sample
from prr_pipeline.benchmarks.locality import Locality
from prr_pipeline.config import MODES, ModelConfig, RuntimeConfig
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.errors import ConfigError
from prr_pipeline.models import load
from prr_pipeline.models.tokenizer import encode_prompt
from prr_pipeline.prr import synthetic
from prr_pipeline.prr.budget import BudgetPolicy
from prr_pipeline.prr.engine import Engine, Prefilled
from prr_pipeline.prr.predictor import EmaPredictor

log = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30  # of prefilled prompts, between stages


@dataclass(frozen=True)
class Prompt:
    """A sample in the model's tokens."""

    sample: Sample
    ids: list[int]


class Job:
    """A validated job.

    Args:
        cfg: the composed configuration; `check` raises ConfigError or MissingInput for what cannot run.
    """

    def __init__(self, cfg: DictConfig):
        self.cfg = cfg
        self.config = resolved(cfg)
        self.model_cfg: ModelConfig = _typed(ModelConfig, cfg.model)
        self.runtime: RuntimeConfig = _typed(RuntimeConfig, cfg.runtime)
        self.method: SparseMethod = instantiate(cfg.dsa, _convert_="all")
        self.benchmark: Benchmark = instantiate(cfg.benchmark, _convert_="all")
        self.predictor: EmaPredictor = instantiate(cfg.predictor, _convert_="all")
        self.budget: BudgetPolicy = instantiate(cfg.budget, _convert_="all")
        self.tracker: Any = instantiate(cfg.tracker, _convert_="all")
        self.root = Path(cfg.output).absolute() / cfg.experiment / digest(self.config)[:12]
        self._prefilled: dict[str, Prefilled] = {}
        self._kept_bytes = 0

    @cached_property
    def device(self) -> str:
        """Where the model runs: cpu or cuda."""
        return load.resolve_device(self.runtime.device)

    @property
    def modes(self) -> list[str]:
        """Modes to decode, in canonical order; serial is always among them."""
        return [m for m in MODES if m in self.runtime.modes or m == "serial"]

    def check(self) -> None:
        """Everything that can be known to fail before any work."""
        for option in (self.method, self.benchmark, self.predictor, self.budget, self.tracker):
            option.check()
        self._check_selects()
        stages = list(self.cfg.stages)
        for stage in stages:
            for source in self.needs(stage):
                if source not in stages:
                    self.folder(source).require(stage)
        if self.runs_model:
            load.check(self.model_cfg, self.device)

    @property
    def runs_model(self) -> bool:
        """Whether any of the stages does; evaluate alone needs no model and no GPU."""
        return set(self.cfg.stages) != {"evaluate"}

    @property
    def calibrated(self) -> bool:
        """Whether decode takes theta from stage calibrate."""
        return self.predictor.theta is None and "prr" in self.modes and self.budget.active

    def needs(self, stage: str) -> list[str]:
        """Stages whose output a stage cannot do without."""
        of_decode = {"calibrate": self.calibrated, "profile": self.budget.needs_profile}
        return {"decode": [s for s, needed in of_decode.items() if needed], "evaluate": ["decode"]}.get(stage, [])

    def _check_selects(self) -> None:
        """A job that never selects, by its layers or by its contexts, would compare dense with dense."""
        layers = self.model_cfg.architecture.get("num_hidden_layers")
        if layers is not None and self.method.dense_layers >= layers:
            raise ConfigError(
                f"dsa.dense_layers = {self.method.dense_layers}, and model {self.model_cfg.name} has {layers} layers: "
                "everything would be dense. Lower dsa.dense_layers"
            )
        length = getattr(self.benchmark, "length", None)
        if length is None:
            return
        if length > self.model_cfg.max_context:
            raise ConfigError(
                f"benchmark.length = {length} tokens, but model {self.model_cfg.name} goes to "
                f"{self.model_cfg.max_context}"
            )
        if not self.method.selects(self.method.dense_layers, length):
            need = max(self.method.budget_tokens, self.method.dense_len)
            raise ConfigError(
                f"context below budget: everything would be dense. benchmark.length = {length} tokens, but "
                f"dsa={self.method.name} selects only beyond {need} (top_k {self.method.top_k} blocks of "
                f"{self.method.block_size}, dense_len {self.method.dense_len}). Raise benchmark.length or lower "
                "dsa.top_k"
            )

    def folder(self, stage: str) -> StageFolder:
        """Where a stage's output is."""
        return StageFolder(self.root / stage, stage, self.config)

    @cached_property
    def loaded(self) -> load.LoadedModel:
        """The model, its tokenizer and shape."""
        loaded = load.load(self.model_cfg, self.device, self.cfg.seed)
        d = loaded.description
        log.info("loaded: %s", ", ".join(f"{k} {v}" for k, v in d.items()))
        return loaded

    @cached_property
    def engine(self) -> Engine:
        """The decode engine of this model and method."""
        shape = self.loaded.shape
        return Engine(
            self.loaded.model,
            self.method,
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            self.runtime.prefill_chunk,
            self.predictor.window,
            self.runtime.step_threads,
        )

    def prompts(self) -> Iterator[Prompt]:
        """The benchmark's samples for this model's tokenizer, in their order."""
        tokenizer, chat = self.loaded.tokenizer, self.model_cfg.chat_template and self.benchmark.chat

        def encode(prompt: str, prefix: str) -> list[int]:
            return encode_prompt(tokenizer, prompt, prefix, chat)

        for sample in self.benchmark.samples(lambda p, a: len(encode(p, a)), self.cfg.seed):
            ids = encode(sample.prompt, sample.answer_prefix)
            if len(ids) + sample.max_new_tokens > self.model_cfg.max_context:
                raise ConfigError(
                    f"sample {sample.id}: {len(ids)} + {sample.max_new_tokens} tokens, but model {self.model_cfg.name} "
                    f"goes to {self.model_cfg.max_context}"
                )
            yield Prompt(sample, ids)

    def prefill(self, prompt: Prompt) -> Prefilled:
        """A sample's prompt, or what stands for one, in the cache, with room for its answer.

        Small ones are kept for the next stage of this process; whoever takes one decodes from a copy.
        """
        key = prompt.sample.id
        if key not in self._prefilled:
            start = self._prefill(prompt)
            if self._kept_bytes + start.nbytes > _KEEP_BYTES:
                return start
            self._kept_bytes += start.nbytes
            self._prefilled[key] = start
        return self._prefilled[key]

    def _prefill(self, prompt: Prompt) -> Prefilled:
        room, b = prompt.sample.max_new_tokens, self.benchmark
        if not isinstance(b, Locality):
            return self.engine.prefill(prompt.ids, room)
        return synthetic.prefill(
            self.engine, b.length - room, room, b.drift, b.block_weight, self.cfg.seed, prompt.sample.id
        )

    def device_name(self) -> str:
        """For manifests."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"


def _typed(cls: type, node: DictConfig) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), node))
