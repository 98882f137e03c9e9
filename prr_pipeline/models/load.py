# SPDX-License-Identifier: Apache-2.0
"""One way in for every model: hub, local folder, GGUF file, or random weights at true size.

`check` says in seconds at most, without building a model and without the network, whether `load` has what it needs
(of an architecture for random weights transformers says it, whose import takes two). Both speak to the user: what was
looked for, where, and what gets further.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from prr_pipeline.config import WEIGHTS, ModelConfig, near
from prr_pipeline.errors import ConfigError, MissingInput, first_line
from prr_pipeline.models.files import TINY, check_hub, fingerprint, gguf_file, hub_folder, local_folder
from prr_pipeline.models.loading import gguf_read_once, quiet
from prr_pipeline.models.sizes import architecture, check_architecture, parameter_count
from prr_pipeline.models.tokenizer import BOS_ID, EOS_ID, byte_tokenizer, restore_split

log = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Parts = tuple[Any, dict[str, Any]]  # model, where it comes from


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
            f"runtime.device=cuda, but torch sees no CUDA device. Override {TINY}, or runtime.device=cpu."
        )
    if cfg.weights == "gguf":
        gguf_file(cfg)
    elif cfg.weights == "local":
        local_folder(cfg)
    else:
        if cfg.weights == "random":
            check_architecture(cfg)
            _random_config(cfg)
        if _on_cpu(device):  # a GPU that is too small says so by itself
            _check_memory(cfg, dtype)
        if cfg.weights == "hub":
            check_hub(cfg)


def load_tokenizer(cfg: ModelConfig) -> Any:
    """Loads a model's tokenizer alone: seconds before load() would, prompts can be made and found too long.

    Raises:
        MissingInput: files that are incomplete, foreign, or not to be had.
    """
    if cfg.weights == "random":
        tokenizer: Any = byte_tokenizer()
    elif cfg.weights == "gguf":
        file = gguf_file(cfg)
        with gguf_read_once() as reader:
            tokenizer = _tokenizer(file.parent, {"gguf_file": file.name, "local_files_only": True})
            split = reader(str(file)).fields.get("tokenizer.ggml.pre")
        if split is not None:
            restore_split(tokenizer, split.contents())
    else:
        tokenizer = _tokenizer(_folder(cfg), _folder_options(cfg))
    tokenizer.clean_up_tokenization_spaces = False  # it would edit text on decoding
    return tokenizer


def load(cfg: ModelConfig, device: str, seed: int, tokenizer: Any = None) -> LoadedModel:
    """Loads a model and its tokenizer.

    Args:
        cfg: the model.
        device: as resolve_device() returns it.
        seed: of random weights; the others do not depend on it.
        tokenizer: of load_tokenizer(), if that was called already.

    Returns:
        The model on the device, in eval mode, without gradients, with attention "sdpa".

    Raises:
        ConfigError: as check(), or an architecture that transformers refuses.
        MissingInput: as check(), or files that are incomplete, foreign, or not to be had.
    """
    check(cfg, device)
    dtype = resolve_dtype(cfg.dtype, device)
    log.info("loading %s (%s weights, %s) on %s", cfg.name, cfg.weights, dtype, device)
    tokenizer = load_tokenizer(cfg) if tokenizer is None else tokenizer
    if cfg.weights == "random":
        model, origin = _random(cfg, device, dtype, seed)
    elif cfg.weights == "gguf":
        model, origin = _from_gguf(cfg, device, dtype)
    else:
        model, origin = _from_folder(cfg, device, dtype)
    model.eval().requires_grad_(False)
    description = {
        "name": cfg.name,
        "weights": cfg.weights,
        **origin,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": _short(dtype),
    }
    return LoadedModel(model, tokenizer, _shape(model, tokenizer, cfg.max_context), description)


def _on_cpu(device: str) -> bool:
    return torch.device(device).type == "cpu"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
            f"Override {TINY}, or run on a GPU with runtime.device=cuda."
        )


def _free_bytes() -> int:
    """Returns Linux's estimate of what a process can still have; elsewhere all physical memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _folder(cfg: ModelConfig) -> Path:
    return hub_folder(cfg) if cfg.weights == "hub" else local_folder(cfg)


def _folder_options(cfg: ModelConfig) -> dict[str, Any]:
    return {"trust_remote_code": cfg.trust_remote_code, "local_files_only": True}


def _from_folder(cfg: ModelConfig, device: str, dtype: torch.dtype) -> _Parts:
    """Loads a folder in the Hugging Face format, straight onto the device."""
    folder = _folder(cfg)
    placement = {} if _on_cpu(device) else {"device_map": {"": device}}
    model = _pretrained(folder, {**_folder_options(cfg), "dtype": dtype, **placement})
    if cfg.weights == "hub":  # a snapshot's folder is named by its commit
        return model, {"source": cfg.hub_id, "revision": folder.name}
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return model, {"source": str(folder), "revision": fingerprint(files)}


def _from_gguf(cfg: ModelConfig, device: str, dtype: torch.dtype) -> _Parts:
    """Loads a GGUF file, every block unpacked to the dtype."""
    import transformers

    file = gguf_file(cfg)
    # Newer versions can keep blocks packed and run them by kernels of their own; they are told not
    # to, older ones never do.
    packing = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": packing(dequantize=True)} if packing else {}
    options = {"gguf_file": file.name, "local_files_only": True, "dtype": dtype, **unpack}
    with gguf_read_once():
        model = _pretrained(file.parent, options)
    source = f"{cfg.package}/{file.name}" if cfg.path is None else str(file)
    return model.to(device), {"source": source, "revision": fingerprint([file])}


@contextmanager
def _theirs(folder: Path) -> Iterator[None]:
    """Says what transformers cannot load in one message."""
    import transformers

    try:
        with quiet():
            yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        version = transformers.__version__
        raise MissingInput(f"{folder}: transformers {version} cannot load it: {first_line(error)}") from error


def _tokenizer(folder: Path, options: dict[str, Any]) -> Any:
    import transformers

    with _theirs(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, **options)


def _pretrained(folder: Path, options: dict[str, Any]) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    with _theirs(folder):
        model, report = auto.from_pretrained(folder, attn_implementation="sdpa", output_loading_info=True, **options)
    # transformers gives such weights random values and only warns.
    absent = [*report["missing_keys"], *report["mismatched_keys"]]
    if absent:
        raise MissingInput(
            f"{folder}: {len(absent)} weights of {type(model).__name__} are missing or of another "
            f"shape, {absent[0]} among them: the files are incomplete or another model's."
        )
    return model


def _random(cfg: ModelConfig, device: str, dtype: torch.dtype, seed: int) -> _Parts:
    """Builds the architecture on the device, with weights as its own initialisation draws them."""
    from transformers import AutoModelForCausalLM

    gpus = [] if _on_cpu(device) else [torch.device(device)]
    config = _random_config(cfg)
    with _of_architecture(cfg), quiet(), torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model, {"source": "random", "revision": f"seed {seed}"}


@contextmanager
def _of_architecture(cfg: ModelConfig) -> Iterator[None]:
    """Says what transformers refuses of an architecture in one message."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (StrictDataclassError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"model.architecture of {cfg.name}: {' '.join(str(error).split())}") from error


def _random_config(cfg: ModelConfig) -> Any:
    """Builds the transformers config of cfg.architecture; an unknown model type, unknown keys are refused."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    arch = architecture(cfg)
    kind = str(arch.pop("model_type"))
    if kind not in CAUSAL:
        close = get_close_matches(kind, list(CAUSAL), n=5) or ["llama"]
        raise ConfigError(
            f"model.architecture.model_type={kind} is unknown among the causal language models of transformers."
            f"{near(kind, close)}"
        )
    known = sorted(vars(CONFIG_MAPPING[kind]()))
    if unknown := sorted(set(arch) - set(known)):
        hint = near(unknown[0], known)
        raise ConfigError(f"model.architecture.{unknown[0]}: model type {kind} has no such key.{hint}")
    # The true model's special tokens mean nothing to the byte tokenizer.
    ends = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    with _of_architecture(cfg):
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
