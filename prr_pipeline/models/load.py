# SPDX-License-Identifier: Apache-2.0
"""One way in for every model: hub, local folder, GGUF file, or random weights at true size.

`check` says in under a second, without building anything and without the network, whether `load`
has what it needs. Both speak to the user: what was looked for, where, and what gets further.
"""

import copy
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf

from prr_pipeline.config import WEIGHTS, ModelConfig, near
from prr_pipeline.errors import ConfigError, MissingInput
from prr_pipeline.models.tokenizer import BYTE_VOCAB, byte_tokenizer, restore_split

log = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_TIMEOUT = 5.0  # seconds that the hub has to answer before it counts as out of reach
_TINY = "debug=tiny (a tiny random model of the same architecture on the CPU)"
_MIB = 1 << 20
_Parts = tuple[Any, Any, dict[str, Any]]  # model, tokenizer, where they come from


@dataclass(frozen=True)
class ModelShape:
    """What kernels and caches must know of a model; counts, and tokens for max_context."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    vocab: int
    eos_ids: tuple[int, ...]


@dataclass
class LoadedModel:
    """A model in eval mode without gradients, its tokenizer and shape, and its manifest entry."""

    model: Any
    tokenizer: Any
    shape: ModelShape
    description: dict[str, Any]


def resolve_device(name: str) -> str:
    """Returns "cpu" or "cuda" for auto | cpu | cuda; auto takes a GPU where torch sees one.

    Raises:
        ConfigError: any other name.
    """
    if name not in DEVICES:
        raise ConfigError(f"runtime.device={name} is unknown.{near(name, DEVICES)}")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Returns the dtype of weights and activations; auto is float32 on a CPU, else bfloat16.

    Raises:
        ConfigError: a name that is neither auto nor one of DTYPES.
    """
    if name == "auto":
        return torch.float32 if _on_cpu(device) else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"model.dtype={name} is unknown.{near(name, ('auto', *DTYPES))}")
    return DTYPES[name]


def check(cfg: ModelConfig, device: str) -> None:
    """Checks that load() has what it needs; no model is built, no network is touched.

    Hub weights that are not in the cache pass unless Hugging Face is set offline: load() gets them.

    Args:
        cfg: the model.
        device: as resolve_device() returns it.

    Raises:
        ConfigError: a value that is unknown, or a key that the kind of weights needs.
        MissingInput: a device, file, package or memory that is not there.
    """
    if cfg.weights not in WEIGHTS:
        raise ConfigError(f"model.weights={cfg.weights} is unknown.{near(cfg.weights, WEIGHTS)}")
    dtype = resolve_dtype(cfg.dtype, device)
    if not _on_cpu(device) and not torch.cuda.is_available():
        raise MissingInput(
            "runtime.device=cuda, but torch sees no CUDA device. "
            f"Override {_TINY}, or runtime.device=cpu."
        )
    if cfg.weights == "gguf":
        gguf_file(cfg)
    elif cfg.weights == "local":
        _local_folder(cfg)
    else:
        if cfg.weights == "random":
            _check_architecture(cfg)
        if _on_cpu(device):  # a GPU that is too small says so by itself
            _check_memory(cfg, dtype)
        if cfg.weights == "hub":
            _check_hub(cfg)


def load(cfg: ModelConfig, device: str, seed: int) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        cfg: the model.
        device: as resolve_device() returns it.
        seed: of random weights; the others do not depend on it.

    Returns:
        The model on the device, in eval mode, without gradients, with attention "sdpa".

    Raises:
        ConfigError: as check(), or an architecture that transformers refuses.
        MissingInput: as check(), or files that are incomplete, foreign, or not to be had.
    """
    check(cfg, device)
    dtype = resolve_dtype(cfg.dtype, device)
    log.info("loading %s (%s weights, %s) on %s", cfg.name, cfg.weights, dtype, device)
    if cfg.weights == "random":
        model, tokenizer, origin = _random(cfg, device, dtype, seed)
    elif cfg.weights == "gguf":
        model, tokenizer, origin = _from_gguf(cfg, device, dtype)
    else:
        model, tokenizer, origin = _from_folder(cfg, device, dtype)
    model.eval().requires_grad_(False)
    tokenizer.clean_up_tokenization_spaces = False  # it would edit text on decoding
    description = {
        "name": cfg.name,
        "weights": cfg.weights,
        **origin,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": _short(dtype),
    }
    return LoadedModel(model, tokenizer, _shape(model, tokenizer, cfg.max_context), description)


def architecture(cfg: ModelConfig) -> dict[str, Any]:
    """Returns cfg.architecture as plain containers, whatever composed it."""
    found: Any = cfg.architecture
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, resolve=True)
    return copy.deepcopy(found)


def parameter_count(arch: Mapping[str, Any]) -> int:
    """Counts the parameters of a dense decoder from its architecture, without building it.

    Serves grouped-query attention with a gated feed-forward network (llama, glm, glm4, qwen3).
    """
    hidden, head_dim = arch["hidden_size"], arch["head_dim"]
    q_width = arch["num_attention_heads"] * head_dim
    kv_width = arch["num_key_value_heads"] * head_dim
    attention = 2 * hidden * (q_width + kv_width)
    if arch.get("attention_bias"):
        attention += q_width + 2 * kv_width
    norms = {"glm4": 4 * hidden, "qwen3": 2 * hidden + 2 * head_dim}
    norm = norms.get(arch["model_type"], 2 * hidden)
    layer = attention + 3 * hidden * arch["intermediate_size"] + norm
    tables = 1 if arch["tie_word_embeddings"] else 2
    return arch["num_hidden_layers"] * layer + hidden + tables * arch["vocab_size"] * hidden


def gguf_file(cfg: ModelConfig) -> Path:
    """Finds the GGUF file that cfg names by path, or by the installed package that carries it.

    The package is located, never imported: importing it may need packages that only it uses.

    Raises:
        ConfigError: neither path nor package, or a package with several files.
        MissingInput: no such file or package, or no package that reads GGUF.
    """
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise MissingInput(f"model.weights=gguf needs {needed}. Run: pip install {needed}")
    if cfg.path is not None:
        file = Path(cfg.path).expanduser()
        if not file.is_file():
            raise MissingInput(f"model.path={cfg.path}: no such file (looked in {file.resolve()})")
        return file
    if cfg.package is None:
        raise ConfigError(
            "model.weights=gguf needs model.path=FILE.gguf, or model.package=PACKAGE that has one"
        )
    spec = importlib.util.find_spec(cfg.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        found = f"there is no .gguf file in {folders[0]}" if folders else "it is not installed"
        raise MissingInput(
            f"model {cfg.name}: its weights come with the Python package {cfg.package}, and "
            f"{found}. Run: pip install {cfg.package.replace('_', '-')}"
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"model.package={cfg.package} has {names}: name one by model.path=FILE")
    return files[0]


def _on_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_architecture(cfg: ModelConfig) -> None:
    arch = architecture(cfg)
    if "model_type" not in arch:
        raise ConfigError(
            f"model.weights=random needs model.architecture with a model_type, and {cfg.name} has "
            "none. The options in conf/model show what to state."
        )
    if arch.get("vocab_size", BYTE_VOCAB) < BYTE_VOCAB:
        raise ConfigError(
            f"model.architecture.vocab_size={arch['vocab_size']} is too small: "
            f"the byte tokenizer of random weights has {BYTE_VOCAB} tokens."
        )


def _check_memory(cfg: ModelConfig, dtype: torch.dtype) -> None:
    """Refuses a CPU job whose weights alone exceed the free memory."""
    try:
        parameters = parameter_count(architecture(cfg))
    except (KeyError, TypeError):  # not all sizes are stated, or not as numbers: load says more
        return
    needed, free = parameters * dtype.itemsize, _free_bytes()
    if needed > free:
        raise MissingInput(
            f"model {cfg.name} has {parameters / 1e9:.2f} billion parameters: {needed / 1e9:.1f} "
            f"GB in {_short(dtype)}, and this machine has {free / 1e9:.1f} GB of memory free. "
            f"Override {_TINY}, or run on a GPU with runtime.device=cuda."
        )


def _free_bytes() -> int:
    """Returns Linux's estimate of what a process can still have; elsewhere all physical memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _local_folder(cfg: ModelConfig) -> Path:
    if cfg.path is None:
        raise ConfigError("model.weights=local needs model.path=FOLDER in the Hugging Face format")
    folder = Path(cfg.path).expanduser()
    if not folder.is_dir():
        raise MissingInput(f"model.path={cfg.path}: no such folder (looked in {folder.resolve()})")
    if lacking := _lacking(folder):
        raise MissingInput(f"model.path={cfg.path}: it lacks {', '.join(lacking)}")
    return folder


def _lacking(folder: Path) -> list[str]:
    """Names the files that a folder in the Hugging Face format lacks, weights' shards included."""
    index = folder / "model.safetensors.index.json"
    weights = {"model.safetensors"}
    if index.is_file():
        weights = set(json.loads(index.read_text())["weight_map"].values())
    return [name for name in ("config.json", *sorted(weights)) if not (folder / name).is_file()]


def _check_hub(cfg: ModelConfig) -> None:
    from huggingface_hub import constants

    if cfg.hub_id is None:
        raise ConfigError("model.weights=hub needs model.hub_id=OWNER/NAME")
    if constants.HF_HUB_OFFLINE and _cached(cfg) is None:
        raise MissingInput(_no_weights(cfg, "Hugging Face is offline (HF_HUB_OFFLINE=1)"))


def _cached(cfg: ModelConfig) -> Path | None:
    """Finds the complete snapshot of cfg's repository in the local cache; no network."""
    try:
        folder = _snapshot(cfg, local_files_only=True)
    except FileNotFoundError:
        return None
    return None if _lacking(folder) else folder


def _snapshot(cfg: ModelConfig, **options: Any) -> Path:
    from huggingface_hub import constants, snapshot_download

    options |= {"revision": cfg.revision, "cache_dir": constants.HF_HUB_CACHE}
    return Path(snapshot_download(str(cfg.hub_id), **options))


def _hub_folder(cfg: ModelConfig) -> Path:
    """Returns the snapshot of cfg's repository, downloading with progress what the cache lacks."""
    cached = _cached(cfg)
    if cached is not None:
        return cached
    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    if cfg.trust_remote_code:
        kinds.append("*.py")
    log.info("downloading %s", cfg.hub_id)
    try:  # folders inside a repository hold other formats of the same weights
        folder = _snapshot(
            cfg, allow_patterns=kinds, ignore_patterns=["*/*"], etag_timeout=HUB_TIMEOUT
        )
    except Exception as error:  # those of the hub's HTTP client, of its files and ours: no one base
        why = f"the hub does not give it ({type(error).__name__}: {_line(error)})"
        raise MissingInput(_no_weights(cfg, why)) from error
    if lacking := _lacking(folder):  # broken off, or in other formats only
        raise MissingInput(_no_weights(cfg, f"the hub did not give {', '.join(lacking)}"))
    return folder


def _no_weights(cfg: ModelConfig, why: str) -> str:
    from huggingface_hub import constants

    revision = f" --revision {cfg.revision}" if cfg.revision else ""
    return (
        f"model {cfg.name}: {cfg.hub_id} is not (completely) in the cache "
        f"{constants.HF_HUB_CACHE}, and {why}.\n"
        f"Get it by: hf download {cfg.hub_id}{revision}\n"
        "Or override model.weights=local model.path=FOLDER, or model.weights=random "
        f"benchmark=locality (true size, no files), or {_TINY}."
    )


def _from_folder(cfg: ModelConfig, device: str, dtype: torch.dtype) -> _Parts:
    """Loads a folder in the Hugging Face format, straight onto the device."""
    hub = cfg.weights == "hub"
    folder = _hub_folder(cfg) if hub else _local_folder(cfg)
    options = {"trust_remote_code": cfg.trust_remote_code, "local_files_only": True}
    placement = {} if _on_cpu(device) else {"device_map": {"": device}}
    model, tokenizer = _pretrained(folder, options, {"dtype": dtype, **placement})
    if hub:  # a snapshot's folder is named by its commit
        return model, tokenizer, {"source": cfg.hub_id, "revision": folder.name}
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return model, tokenizer, {"source": str(folder), "revision": _fingerprint(files)}


def _from_gguf(cfg: ModelConfig, device: str, dtype: torch.dtype) -> _Parts:
    """Loads a GGUF file, every block unpacked to the dtype."""
    import transformers

    file = gguf_file(cfg)
    options = {"gguf_file": file.name, "local_files_only": True}
    # Newer versions can keep blocks packed and run them by kernels of their own; they are told not
    # to, older ones never do.
    packing = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": packing(dequantize=True)} if packing else {}
    with _gguf_read_once() as reader:
        model, tokenizer = _pretrained(file.parent, options, {"dtype": dtype, **unpack})
        split = reader(str(file)).fields.get("tokenizer.ggml.pre")
    if split is not None:
        restore_split(tokenizer, split.contents())
    source = f"{cfg.package}/{file.name}" if cfg.path is None else str(file)
    return model.to(device), tokenizer, {"source": source, "revision": _fingerprint([file])}


def _pretrained(folder: Path, options: dict[str, Any], of_model: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    of_model = {"attn_implementation": "sdpa", "output_loading_info": True, **of_model}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            model, report = auto.from_pretrained(folder, **options, **of_model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        version = transformers.__version__
        raise MissingInput(
            f"{folder}: transformers {version} cannot load it: {_line(error)}"
        ) from error
    # transformers gives such weights random values and only warns.
    absent = [*report["missing_keys"], *report["mismatched_keys"]]
    if absent:
        raise MissingInput(
            f"{folder}: {len(absent)} weights of {type(model).__name__} are missing or of another "
            f"shape, {absent[0]} among them: the files are incomplete or another model's."
        )
    return model, tokenizer


def _random(cfg: ModelConfig, device: str, dtype: torch.dtype, seed: int) -> _Parts:
    """Builds the architecture on the device, with weights as its own initialisation draws them."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    gpus = [] if _on_cpu(device) else [torch.device(device)]
    try:
        config = _random_config(cfg, tokenizer)
        with _quiet(), torch.random.fork_rng(devices=gpus), torch.device(device):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"model.architecture of {cfg.name}: {error}") from error
    return model, tokenizer, {"source": "random", "revision": f"seed {seed}"}


def _random_config(cfg: ModelConfig, tokenizer: Any) -> Any:
    """Builds the transformers config of cfg.architecture; unknown keys are refused."""
    from transformers import CONFIG_MAPPING

    arch = architecture(cfg)
    kind = arch.pop("model_type")
    if kind not in CONFIG_MAPPING:
        close = get_close_matches(kind, list(CONFIG_MAPPING), n=5) or ["llama"]
        raise ConfigError(f"model.architecture.model_type={kind} is unknown.{near(kind, close)}")
    known = sorted(vars(CONFIG_MAPPING[kind]()))
    if unknown := sorted(set(arch) - set(known)):
        hint = near(unknown[0], known)
        raise ConfigError(
            f"model.architecture.{unknown[0]}: model type {kind} has no such key.{hint}"
        )
    # The true model's special tokens mean nothing to the byte tokenizer.
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return CONFIG_MAPPING[kind](**{**arch, **ends, "pad_token_id": None})


def _shape(model: Any, tokenizer: Any, max_context: int) -> ModelShape:
    config = model.config
    q_heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        q_heads=q_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or q_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // q_heads,
        max_context=max_context,
        vocab=config.vocab_size,
        eos_ids=_eos_ids(model, tokenizer),
    )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Takes the ids that end an answer from the first place that states any, and adds none."""
    for holder in (model.generation_config, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return tuple(dict.fromkeys([ids] if isinstance(ids, int) else ids))
    return ()


def _fingerprint(files: list[Path]) -> str:
    """Hashes the names, sizes, and first and last MiB of files: enough to tell weights apart."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_MIB))
            stream.seek(max(0, size - _MIB))
            digest.update(stream.read(_MIB))
    return f"sha256 of names, sizes, first and last MiB: {digest.hexdigest()[:16]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' bars and advice off the screen; puts its settings back."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def _gguf_read_once() -> Iterator[Any]:
    """Makes transformers parse a GGUF file once where it would three times, and without its bar.

    Parsing 49152 tokens and as many merges takes seconds in Python, and so does the table of tensor
    names, which is rebuilt for every module: 5 s in all instead of 24 s. Yields the reader.
    """
    import gguf
    import numpy as np
    from tqdm.auto import tqdm

    path = "transformers.modeling_gguf_pytorch_utils"  # not in every version
    user = importlib.import_module(path) if importlib.util.find_spec(path) else ModuleType(path)

    def set_data(reader: Any, file: Any) -> None:
        reader.plain = file.view(np.ndarray)

    # A million slices of a memmap are slow, those of a plain view of it are not.
    data = property(lambda reader: reader.plain, set_data)
    reader = functools.cache(type("PlainReader", (gguf.GGUFReader,), {"data": data}))
    names = functools.cache(gguf.get_tensor_name_map)
    with (
        _replaced(gguf, GGUFReader=reader, get_tensor_name_map=names),
        _replaced(user, tqdm=functools.partial(tqdm, disable=True)),
    ):
        yield reader


@contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    old = {name: getattr(module, name) for name in values if hasattr(module, name)}
    vars(module).update({name: values[name] for name in old})
    try:
        yield
    finally:
        vars(module).update(old)
