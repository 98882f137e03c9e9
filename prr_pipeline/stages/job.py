# SPDX-License-Identifier: Apache-2.0
"""What every stage gets: the options as objects, and the model and samples, made at first use."""

import gc
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from prr_pipeline import provenance
from prr_pipeline.artifacts import SOURCE, StageFolder, canonical_modes, digest, file_digest, resolved
from prr_pipeline.benchmarks.base import Benchmark, Sample, check_sample
from prr_pipeline.benchmarks.locality import Locality
from prr_pipeline.config import BASELINES, STAGES, ModelConfig, RuntimeConfig
from prr_pipeline.dsa.base import SparseMethod, probe
from prr_pipeline.errors import ArtifactError, ConfigError, PrrError, one_line
from prr_pipeline.models import files, load, sizes
from prr_pipeline.models.tokenizer import encode_prompt
from prr_pipeline.prr import baselines, synthetic
from prr_pipeline.prr.budget import BudgetPolicy
from prr_pipeline.prr.engine import Engine, Prefilled
from prr_pipeline.prr.graphs import GraphEngine, GraphOptions
from prr_pipeline.prr.predictor import EmaPredictor
from prr_pipeline.tracking.tracker import Tracker

log = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30  # of prefilled prompts, between stages
_READS = {
    "calibrate": ("benchmark", "model", "dsa", "predictor"),
    "profile": ("model", "dsa", "budget"),
    "decode": ("benchmark", "model", "dsa", "predictor", "budget"),
    "evaluate": (),
}

_loaded: dict[tuple[str, str, int], load.LoadedModel] = {}  # one: jobs of a sweep often share it, compiled as it is


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
        self.method: SparseMethod = _made(cfg, "dsa")
        self.benchmark: Benchmark = _made(cfg, "benchmark")
        self.predictor: EmaPredictor = _made(cfg, "predictor")
        self.budget: BudgetPolicy = _made(cfg, "budget")
        self.tracker: Tracker = _made(cfg, "tracker")
        self.root = Path(cfg.output).absolute() / cfg.experiment / digest(self.config)[:12]
        self._prefilled: dict[str, Prefilled] = {}
        self._kept_bytes = 0
        self._motions: dict[int, synthetic.Motion] = {}

    @cached_property
    def device(self) -> str:
        """Where the model runs: cpu or cuda."""
        return load.resolve_device(self.runtime.device)

    @property
    def modes(self) -> list[str]:
        """Modes to decode, in canonical order; serial is always among them."""
        return canonical_modes(self.runtime.modes)

    @property
    def own_method(self) -> str | None:
        """The class of a method that is not of this program."""
        cls = type(self.method)
        own = cls.__module__.split(".")[0] != "prr_pipeline"
        return f"dsa._target_ = {cls.__module__}.{cls.__qualname__}" if own else None

    @property
    def baselines(self) -> list[str]:
        """Baselines to time after the modes, those left out that cannot run here."""
        wanted = [b for b in BASELINES if b in self.runtime.baselines]
        return [b for b in wanted if baselines.missing(b) is None]

    def _check_baselines(self) -> None:
        if self.runtime.baselines and self.runs_model and self.device != "cuda":
            raise ConfigError(
                f"runtime.baselines = {self.runtime.baselines} are timed on a GPU, and the job runs on {self.device}"
            )
        if "paper_serial" in self.runtime.baselines and not isinstance(self.benchmark, Locality):
            raise ConfigError(
                "runtime.baselines: paper_serial attends to whole blocks, also to what is not there yet; it is for "
                "times on synthetic queries (benchmark=locality)"
            )
        for name in self.runtime.baselines:
            if why := baselines.missing(name):
                log.warning("baseline %s is left out: %s", name, why)

    def check(self) -> None:
        """Everything that can be known to fail before any work."""
        sizes.check_positive(self.model_cfg)  # first: others are held against them
        for option in (self.method, self.benchmark, self.predictor, self.budget, self.tracker):
            option.check()
        self._check_selects()
        self._check_contexts()
        stages = list(self.cfg.stages)
        for stage in stages:
            for source in self.needs(stage):
                if source not in stages:
                    self.require(source, stage)
        if self.runs_model:
            load.check(self.model_cfg, self.device)
        self._check_baselines()

    @staticmethod
    def reads_samples(stage: str) -> bool:
        """Whether a stage reads the benchmark's samples."""
        return "benchmark" in _READS[stage]

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
        length = self.benchmark.length or self.model_cfg.max_context
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

    def _check_contexts(self) -> None:
        """A profile of a context that the job cannot have, or at which nothing selects, says nothing."""
        most = self.model_cfg.max_context
        for context in self.runtime.profile_contexts:
            if not 0 < context <= most:
                raise ConfigError(
                    f"runtime.profile_contexts has {context}, expected tokens from 1 to the {most} of model "
                    f"{self.model_cfg.name}"
                )
            if not self.method.selects(self.method.dense_layers, context):
                raise ConfigError(
                    f"runtime.profile_contexts has {context} tokens, but dsa={self.method.name} selects only beyond "
                    f"{max(self.method.budget_tokens, self.method.dense_len)}"
                )

    @cached_property
    def input_files(self) -> dict[str, str]:
        """Digests of the files of samples, weights and own classes, by the key that names them, as they are now.

        Classes of this program are not among them: its source is compared as a whole.

        Weights of the hub are not among them (model.revision pins them), nor random ones (the seed makes them). What is
        not here is left out: evaluate alone needs no weights.
        """
        found = {f"benchmark.{key}": file_digest(path) for key, path in self.benchmark.files().items()}
        options = {"dsa": self.method, "benchmark": self.benchmark, "predictor": self.predictor, "budget": self.budget}
        for group, option in options.items():
            if (own := provenance.digest_class(type(option))) is not None:
                found[f"{group}._target_"] = own
        cfg = self.model_cfg
        if cfg.weights == "local" and cfg.path and Path(cfg.path).expanduser().is_dir():
            paths = [p for p in sorted(Path(cfg.path).expanduser().iterdir()) if p.is_file()]
            found["model.path"] = provenance.digest_weights(paths)
        elif cfg.weights == "gguf":
            try:
                of_package = cfg.path is None
                found["model." + ("package" if of_package else "path")] = provenance.digest_weights(
                    [files.gguf_file(cfg)], times=not of_package
                )
            except PrrError as error:
                log.debug("weights are not compared: %s", error)
        return found

    def folder(self, stage: str) -> StageFolder:
        """Where a stage's output is, and what it is made of."""
        read = {k: v for k, v in self.input_files.items() if k.split(".")[0] in _READS[stage]}
        return StageFolder(
            self.root / stage, stage, self.config, provenance.source(), read, self.cfg.allow_other_source
        )

    def refused(self, folder: StageFolder, manifest: dict[str, Any]) -> list[str]:
        """What a stage's output was made of that is another now, without what `allow_other_source` allows."""
        found = folder.outdated(manifest, self.folder)
        return [k for k in found if not (self.cfg.allow_other_source and k.split(" ")[0] == SOURCE)]

    def require(self, stage: str, by: str) -> dict[str, Any]:
        """The manifest of a stage that another one reads, if it is made of what there is now.

        Raises:
            ArtifactError: it is not there, or made of something else.
        """
        folder = self.folder(stage)
        manifest = folder.require(by)
        others = self.refused(folder, manifest)
        if others:
            wanted = {*self.needs(stage), stage, by}
            redo = f"redo it: stages=[{','.join(s for s in STAGES if s in wanted)}]"
            if all(k.split(" ")[0] == SOURCE for k in others):
                redo += ", or take it as it is: allow_other_source=true"
            raise ArtifactError(
                f"stage {by} needs {folder.path}, which was made by other inputs than there are now; these differ: "
                f"{', '.join(others)}; {redo}"
            )
        return manifest

    @property
    def _model_key(self) -> tuple[str, str, int]:
        return repr(self.model_cfg), self.device, self.cfg.seed

    @cached_property
    def _tokenizer(self) -> Any:
        """The model's tokenizer; that of the model, if there is one already."""
        known = _loaded.get(self._model_key)
        return load.load_tokenizer(self.model_cfg) if known is None else known.tokenizer

    @cached_property
    def loaded(self) -> load.LoadedModel:
        """The model, its tokenizer and shape; the one of the job before in this process, if it is the same.

        What is wrong with the method is said before it is loaded.
        """
        stated = sizes.stated_sizes(self.model_cfg)
        if stated is not None:
            self._probe(*stated)
        key = self._model_key
        if key not in _loaded:
            _loaded.clear()
            gc.collect()  # what a job leaves behind refers to itself
            loaded = load.load(self.model_cfg, self.device, self.cfg.seed, self._tokenizer)
            log.info("loaded: %s", ", ".join(f"{k} {v}" for k, v in loaded.description.items()))
            _loaded[key] = loaded
        shape = _loaded[key].shape
        if stated is None:
            self._probe(shape.q_heads, shape.kv_heads, shape.head_dim)
        return _loaded[key]

    def _probe(self, q_heads: int, kv_heads: int, head_dim: int) -> None:
        dtype = load.resolve_dtype(self.model_cfg.dtype, self.device)
        probe(self.method, q_heads, kv_heads, head_dim, dtype, self.device)

    @cached_property
    def engine(self) -> Engine:
        """The decode engine of this model and method; on a GPU one that replays CUDA graphs."""
        shape = self.loaded.shape
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, self.runtime.prefill_chunk, self.predictor.window)
        if self.device == "cuda":
            how = GraphOptions(self.runtime.burst, self.runtime.compile)
            return GraphEngine(self.loaded.model, self.method, *sizes, how=how)
        return Engine(self.loaded.model, self.method, *sizes, self.runtime.step_threads)

    def prompts(self) -> list[Prompt]:
        """The benchmark's samples for this model's tokenizer, in their order.

        Raises:
            ConfigError: there are none, or one breaks the contract of benchmarks.
        """
        return self._prompts

    @cached_property
    def _prompts(self) -> list[Prompt]:
        chat = self.model_cfg.chat_template and self.benchmark.chat

        def encode(prompt: str, prefix: str) -> list[int]:
            return encode_prompt(self._tokenizer, prompt, prefix, chat)

        found: dict[str, Prompt] = {}
        for sample in self.benchmark.samples(lambda p, a: len(encode(p, a)), self.cfg.seed):
            check_sample(self.benchmark, sample)
            if sample.id in found:
                raise ConfigError(
                    f"benchmark={self.benchmark.name} has two samples of the id {sample.id}; ids are unique"
                )
            found[sample.id] = Prompt(sample, encode(sample.prompt, sample.answer_prefix))
            self._check_length(found[sample.id])
        if not found:
            raise ConfigError(f"benchmark={self.benchmark.name} gave no sample; samples() yields at least one")
        return list(found.values())

    def _check_length(self, prompt: Prompt) -> None:
        sample, most, length = prompt.sample, self.model_cfg.max_context, self.benchmark.length
        tokens = f"sample {sample.id}: {len(prompt.ids)} + {sample.max_new_tokens} tokens of prompt and answer"
        if len(prompt.ids) + sample.max_new_tokens > most:
            raise ConfigError(f"{tokens}, but model {self.model_cfg.name} goes to {most}")
        if length is not None and len(prompt.ids) + sample.max_new_tokens > length:
            raise ConfigError(
                f"{tokens}, but benchmark.length = {length}: samples() of benchmark={self.benchmark.name} must fit "
                "both into it; count_tokens says how long a prompt is"
            )
        if not prompt.ids and not isinstance(self.benchmark, Locality):
            raise ConfigError(f"sample {sample.id}: its prompt has no tokens")

    def prefill(self, prompt: Prompt) -> Prefilled:
        """A sample's prompt, or what stands for one, in the cache, with room for its answer.

        Small ones are kept for the next stage of this process; whoever takes one decodes from a copy.
        """
        key = prompt.sample.id
        if key not in self._prefilled:
            start = self._prefill(prompt)
            if not self.engine.copies or self._kept_bytes + start.nbytes > _KEEP_BYTES:
                return start
            self._kept_bytes += start.nbytes
            self._prefilled[key] = start
        return self._prefilled[key]

    def _prefill(self, prompt: Prompt) -> Prefilled:
        room, b = prompt.sample.max_new_tokens, self.benchmark
        if not isinstance(b, Locality):
            return self.engine.prefill(prompt.ids, room)
        motion = self.motion(b.length)
        return synthetic.prefill(
            self.engine, b.length - room, room, motion, b.block_weight, self.cfg.seed, prompt.sample.id
        )

    def motion(self, context: int) -> synthetic.Motion:
        """Of synthetic queries at that many tokens: the configured one, or what gives the overlap that is asked for."""
        b = self.benchmark
        if not isinstance(b, Locality):
            return synthetic.Motion(Locality.drift, Locality.noise)
        motion = synthetic.Motion(b.drift, b.noise)
        if b.overlap is None:
            return motion
        if context not in self._motions:
            size = (context, b.block_weight, self.cfg.seed)
            self._motions[context] = found = synthetic.motion_for(b.overlap, b.vary, motion, self.engine, *size)
            log.info("drift %.3f and noise %.3f for an overlap of %.2f at %d tokens", *found, b.overlap, context)
        return self._motions[context]

    def close(self) -> None:
        """Give the caches back; the model stays for a next job."""
        self._prefilled.clear()
        engine = self.__dict__.get("engine")
        if isinstance(engine, GraphEngine):
            engine.release()

    def device_name(self) -> str:
        """For manifests."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"


def _made(cfg: DictConfig, group: str) -> Any:
    """A group's option as an object; raises ConfigError for whatever its constructor raises."""
    try:
        return instantiate(cfg[group], _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, PrrError):  # it says so itself
            raise cause from None
        raise ConfigError(
            f"{group}._target_ = {cfg[group]._target_} cannot be made of the values under {group} "
            f"({one_line(cause)}); change them, or the class"
        ) from cause


def _typed(cls: type, node: DictConfig) -> Any:
    values = OmegaConf.to_container(node, resolve=True)
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
