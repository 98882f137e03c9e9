# SPDX-License-Identifier: Apache-2.0
"""The typed schema of a job, and the checks that run before any work.

Groups whose options differ in kind (dsa, benchmark, predictor, budget, tracker) name a class by `_target_`: its keyword
arguments are the option's schema, so the YAML file is the registration and a new option needs no line here. The others
(model, runtime) are the dataclasses below, known to Hydra through its ConfigStore.
"""

import importlib
import math
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from prr_pipeline.errors import ConfigError, one_line

MODES = ("dense", "serial", "reuse", "reuse_repair", "prr")
STAGES = ("calibrate", "profile", "decode", "evaluate")
BASELINES = ("serial_eager", "paper_serial")
REPAIRS = ("exact", "union")
WEIGHTS = ("hub", "local", "gguf", "random")
_AT_START = 64 << 10  # bytes that Hydra's own files and the log take in `output` before a job begins: 16 to 24 K
MOST_THREADS = 1024  # torch asks the system for all of them, and dies where it does not get them
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


@dataclass
class ModelConfig:
    """A language model: where its weights come from, and its shape when they are random.

    weights: `hub` (hub_id), `local` (path: a folder in the Hugging Face format), `gguf` (path: a .gguf file, or
    package: an installed Python package that carries one), `random` (architecture at its true size, no files, no
    network).
    architecture holds the keyword arguments of the transformers config, model_type among them.
    """

    name: str = MISSING
    weights: str = "hub"
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None
    package: str | None = None
    dtype: str = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    chat_template: bool = True
    trust_remote_code: bool = False
    max_context: int = MISSING  # tokens that the model's positions allow
    architecture: dict[str, Any] = field(default_factory=dict)


@dataclass
class RuntimeConfig:
    """How a job runs: device, modes, decoding.

    modes lists what decode compares; `serial` is always among them, since the others are judged against it.
    """

    device: str = "auto"  # auto | cpu | cuda
    modes: list[str] = field(default_factory=lambda: list(MODES))
    baselines: list[str] = field(default_factory=list)  # on a GPU: serial as others run it, for times alone
    repair: str = "exact"
    prefill_chunk: int = 2048  # prompt tokens a prefill step
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    threads: int | None = None  # CPU threads; null: torch's default
    # of a decode step: its ops are small, and a busy core makes all wait; null: as threads
    step_threads: int | None = 1
    burst: int = 32  # on a GPU: steps between host syncs, at most
    compile: bool = True  # on a GPU: the model through torch.compile
    debug_checks: bool = False  # out-of-range block ids raise (costs host syncs)
    # tokens; empty: a quarter, half and all of benchmark.length
    profile_contexts: list[int] = field(default_factory=list)
    profile_repeats: int = 10


@dataclass
class JobConfig:
    """A job: a name for its outputs, the stages to run, and one option a group."""

    experiment: str = "default"
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    seed: int = 0
    force: bool = False  # redo stages that are done
    # outputs made by other source of this program than the installed one count as done
    allow_other_source: bool = False
    output: str = "runs"  # a folder; outputs go to <output>/<experiment>/<config hash>/<stage>
    model: ModelConfig = field(default_factory=ModelConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    dsa: Any = MISSING
    benchmark: Any = MISSING
    predictor: Any = MISSING
    budget: Any = MISSING
    tracker: Any = MISSING


BASES = {  # by name: importing them takes seconds
    "dsa": "SparseMethod",
    "benchmark": "Benchmark",
    "predictor": "EmaPredictor",
    "budget": "BudgetPolicy",
    "tracker": "Tracker",
}
TARGET_GROUPS = (*BASES,)


def register() -> None:
    """Make the dataclasses known to Hydra, as base_job, base_model and base_runtime."""
    store = ConfigStore.instance()
    store.store(name="base_job", node=JobConfig)
    store.store(name="base_model", node=ModelConfig)  # in no group: --help lists what is in one as an option
    store.store(name="base_runtime", node=RuntimeConfig)


def config_dir() -> Path:
    """The folder of the option files: inside an installed package, else beside it in a source tree."""
    here = Path(__file__).resolve().parent
    return here / "conf" if (here / "conf").is_dir() else here.parent / "conf"


def near(value: object, known: list[str] | tuple[str, ...]) -> str:
    """What to write after a wrong name: near names if there are, and all of them."""
    word = str(value)
    close = get_close_matches(word, known, n=3) or [k for k in known if word and k.startswith(word)][:3]
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{hint} There are: {', '.join(known)}."


def told(key: str, error: OmegaConfBaseException) -> str:
    """What is wrong with a key's value, in one line."""
    return f"{key}: {str(error).splitlines()[0]}"


def no_list(key: str, value: object, error: OmegaConfBaseException) -> str | None:
    """What to write for a single value where a list belongs; None for errors of another kind."""
    if "is not a ListConfig" not in str(error):
        return None
    given = str(value).strip()
    return (
        f"{key} = {given} is a single value, expected a list: {key}=[{given}]" if given else f"{key} is empty: no list"
    )


def check_target(group: str, node: DictConfig) -> None:
    """Hold an option against the keyword arguments of its class: names and types.

    Raises:
        ConfigError: no or a wrong _target_, an unknown key, a value of the wrong type.
    """
    target = node.get("_target_")
    if not target:
        raise ConfigError(f"{group}: the option has no _target_; it must name a class of prr_pipeline")
    try:
        cls: Any = located(str(target))
    except Exception as error:
        raise ConfigError(
            f"{group}._target_ = {target} cannot be imported ({one_line(error)}); install its package, or put its "
            "folder on PYTHONPATH"
        ) from None
    if not isinstance(cls, type):
        raise ConfigError(f"{group}._target_ = {target} is no class; an option's class gives its schema")
    if not is_dataclass(cls):
        raise ConfigError(f"{group}._target_ = {target} is no dataclass; an option's class gives its schema")
    base = BASES[group]
    if base not in (c.__name__ for c in cls.__mro__):
        raise ConfigError(f"{group}._target_ = {target} is no {base}: an option of {group} is a subclass of it")
    if undefined := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{group}._target_ = {target} does not define {', '.join(undefined)}; see {base}")
    check_schema(group, cls, node)


def located(target: str) -> object:
    """What a dotted name of a module and something in it stands for; whatever an import raises is raised."""
    module, _, name = target.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module or "." not in module:
            raise
        found = located(module)  # a class inside a class
    return getattr(found, name)


def check_schema(group: str, cls: type, node: DictConfig) -> None:
    """Hold the values of a group against a dataclass: names and types, and numbers that are finite.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, nan or inf.
    """
    schema = OmegaConf.structured(cls)
    values: Any = OmegaConf.to_container(node, resolve=True)
    values.pop("_target_", None)
    try:
        typed = OmegaConf.to_container(OmegaConf.merge(schema, values), resolve=True)
    except ConfigKeyError as error:
        key = str(error.full_key or error.key).split(".")[0]
        raise ConfigError(f"{group}.{key} is unknown.{near(key, [str(k) for k in schema])}") from None
    except OmegaConfBaseException as error:
        at = f"{group}.{error.full_key}"
        value = OmegaConf.select(node, str(error.full_key))
        raise ConfigError(no_list(at, value, error) or told(at, error)) from None
    for key, value in _leaves(typed, group):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} = {value}, expected a finite number")


def _leaves(node: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Values of nested containers, each with its path."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{at}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{at}[{i}]")
    else:
        yield at, node


def check_output(folder: str) -> None:
    """Make the folder of all outputs, or say why it cannot be.

    Raises:
        ConfigError: no name, a file in the way, no right to write, no space.
    """
    if not folder.strip():
        raise ConfigError("output is empty, expected a folder such as output=runs")
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        barred = isinstance(error, NotADirectoryError | FileExistsError)
        why = "a file is there or on the way to it" if barred else error.strerror
        raise ConfigError(
            f"output = {folder}: the folder {path} cannot be made ({why}); take another: output=FOLDER"
        ) from None
    logs = path / "logs"
    if logs.exists() and not logs.is_dir():
        raise ConfigError(f"output = {folder}: {logs} is a file, and logs go into a folder of that name; move it away")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output = {folder}: the folder {path} cannot be written to; change its permissions, or take another: "
            "output=FOLDER"
        )
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_AT_START))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"output = {folder}: {error.strerror} in {path}: not even a job's log can be written; free some space, or "
            "take another: output=FOLDER"
        ) from None


def check_names(key: str, values: list[str], known: tuple[str, ...]) -> None:
    """Raise ConfigError for a value that is not among the known names, or for none at all."""
    if not values:
        raise ConfigError(f"{key} is empty, expected some of {', '.join(known)}")
    for value in values:
        if value not in known:
            raise ConfigError(f"{key}: unknown '{value}'.{near(value, known)}")


def check_whole(cfg: DictConfig) -> None:
    """Raise ConfigError for a key that a job does not have, one without a value, or one that refers to nothing."""
    keys = [f.name for f in fields(JobConfig)]
    for key in map(str, cfg):
        if key not in keys:
            raise ConfigError(f"{key} is unknown.{near(key, keys)}")
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(told(str(error.full_key), error)) from None
    if missing:
        raise ConfigError(f"{', '.join(missing)}: no value; each group needs an option, and each key of it a value")


def validate(cfg: DictConfig) -> None:
    """Check names, types and ranges of the whole job, for all stages; imports the options' classes, does no work."""
    check_whole(cfg)
    if not cfg.output.strip():
        raise ConfigError("output is empty, expected a folder such as output=runs")
    check_schema("model", ModelConfig, cfg.model)
    check_schema("runtime", RuntimeConfig, cfg.runtime)
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed = {cfg.seed}, expected a value in 0 ... {2**32 - 1}")
    check_names("stages", list(cfg.stages), STAGES)
    check_names("runtime.modes", list(cfg.runtime.modes), MODES)
    if cfg.runtime.baselines:
        check_names("runtime.baselines", list(cfg.runtime.baselines), BASELINES)
    check_names("runtime.repair", [cfg.runtime.repair], REPAIRS)
    check_names("model.weights", [cfg.model.weights], WEIGHTS)
    if cfg.model.hub_id is not None and not _HUB_ID.fullmatch(cfg.model.hub_id):
        raise ConfigError(f"model.hub_id = '{cfg.model.hub_id}', expected OWNER/NAME as on the Hugging Face hub")
    if cfg.model.max_context < 1:
        raise ConfigError(f"model.max_context = {cfg.model.max_context} tokens, expected at least 1")
    for key, low in (("prefill_chunk", 1), ("burst", 1), ("profile_repeats", 1), ("temperature", 0.0)):
        if cfg.runtime[key] < low:
            raise ConfigError(f"runtime.{key} = {cfg.runtime[key]}, expected at least {low}")
    if not 0 < cfg.runtime.top_p <= 1:
        raise ConfigError(f"runtime.top_p = {cfg.runtime.top_p}, expected a value in (0, 1]")
    for key in ("threads", "step_threads"):
        if cfg.runtime[key] is not None and not 1 <= cfg.runtime[key] <= MOST_THREADS:
            raise ConfigError(
                f"runtime.{key} = {cfg.runtime[key]}, expected 1 to {MOST_THREADS}, or null for torch's default"
            )
    for group in TARGET_GROUPS:
        check_target(group, cfg[group])
    for group in TARGET_GROUPS:
        for key, value in _leaves(OmegaConf.to_container(cfg[group], resolve=True), group):
            if isinstance(value, float) and not math.isfinite(value):  # a number would have been refused: meant as text
                raise ConfigError(f"{key} = {value}, expected text; put it in quotes")
