# SPDX-License-Identifier: Apache-2.0
"""Template + parameters -> compiled kernel, without a tensor or a GPU at hand, remembered on disk.

A template is a class (see `templates`): its `__init__` takes compile-time parameters only, its `signature()` returns
the arguments that `__call__` is compiled for (fake tensors and scalars, the stream left out). `compiled(Template,
**params)` returns a function of the same arguments, with torch tensors in place of the fake ones, which runs on torch's
current stream.

The object file of a kernel is kept under PRR_KERNEL_CACHE (default: $XDG_CACHE_HOME/prr_pipeline/kernels, then
~/.cache/...; the empty string keeps nothing), named by the SHA-256 of all that it depends on: the sources, the
parameters, and the versions of Python, CuTe DSL and TVM-FFI. Processes take a file lock per kernel, entries appear
atomically, and one whose contents do not match their recorded digest is set aside as *.bad and built again.
"""

import fcntl
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cutlass_kernels.templates import ARCH

log = logging.getLogger(__name__)

_SYMBOL = "kernel"
_VERSIONED = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_memo: dict[tuple, Callable[..., None]] = {}
_guard = threading.Lock()


def compiled(template: type, **params: Any) -> Callable[..., None]:
    """The kernel of `template(**params)`: from this process, else from disk, else compiled (0.2 to 2 s) and kept.

    Args:
        template: a template class; it may share code with its base classes, templates/common.py, and the classes that
            its attribute USES names, no other file.
        params: compile-time parameters: bool, int, float, str or None.
    """
    key = (template, *sorted(params.items()))
    kernel = _memo.get(key)
    if kernel is None:
        with _guard:
            kernel = _memo.get(key)
            if kernel is None:
                kernel = _memo[key] = _load_or_build(template, params)
    return kernel


def forget() -> None:
    """Drop the kernels of this process; the disk keeps its own."""
    _memo.clear()


def cache_dir() -> Path | None:
    """Folder of the object files; None when PRR_KERNEL_CACHE is the empty string."""
    chosen = os.environ.get("PRR_KERNEL_CACHE")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prr_pipeline" / "kernels"


def build(template: type, **params: Any) -> Any:
    """Compile for sm_90a, neither reading nor writing a cache. Needs no GPU."""
    import cutlass.cute as cute

    op = template(**params)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(op, *op.signature(), stream, options=f"--enable-tvm-ffi --gpu-arch {ARCH}")


def digest(template: type, params: dict[str, Any]) -> str:
    """SHA-256 of everything that a compiled kernel depends on."""
    h = hashlib.sha256()
    facts = [ARCH, template.__qualname__, json.dumps(params, sort_keys=True), platform.python_version(), *_versions()]
    for fact in facts:
        h.update(fact.encode() + b"\0")
    for path in _sources(template):
        h.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return h.hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in _VERSIONED)


def _sources(template: type) -> list[Path]:
    """This file, the template's own, those of its bases and of what it USES, common.py and templates/__init__.py."""
    here = Path(__file__)
    folder = here.parent / "templates"
    used = [template, *getattr(template, "USES", ())]
    own = {Path(inspect.getfile(c)) for each in used for c in each.__mro__ if c is not object}
    return sorted(own | {here, folder / "common.py", folder / "__init__.py"})


def _load_or_build(template: type, params: dict[str, Any]) -> Callable[..., None]:
    folder = cache_dir()
    if folder is None:
        return build(template, **params)
    path = folder / f"{template.__name__}-{digest(template, params)[:40]}.o"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            return _load(path) or _build_and_keep(template, params, path)
    except OSError as error:
        log.warning("kernel cache %s is not usable (%s): compiling without it", folder, error)
        return build(template, **params)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel releases the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> Callable[..., None] | None:
    """The kept kernel; None when there is none, or when it was damaged and is now set aside."""
    record = path.with_suffix(".json")
    if not (path.exists() and record.exists()):
        return None
    try:
        expected = json.loads(record.read_text())["sha256"]
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:  # a damaged object would crash the loader, so it is never given one
            raise ValueError(f"its contents have SHA-256 {found[:12]}..., recorded was {expected[:12]}...")
        import cutlass.cute as cute

        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_SYMBOL]
    except Exception as error:  # whatever is wrong with an entry, a fresh build replaces it
        log.warning("kernel cache: %s is damaged (%s): set aside as .bad and compiled again", path.name, error)
        os.replace(path, path.with_suffix(".o.bad"))
        record.unlink(missing_ok=True)
        return None


def _build_and_keep(template: type, params: dict[str, Any], path: Path) -> Callable[..., None]:
    kernel = build(template, **params)
    new = path.with_suffix(f".{os.getpid()}.o")  # the exporter looks at the suffix
    try:
        kernel.export_to_c(str(new), _SYMBOL)
        facts = {"template": template.__qualname__, "params": params, "arch": ARCH, "versions": _versions()}
        facts["sha256"] = hashlib.sha256(new.read_bytes()).hexdigest()
        record = path.with_suffix(f".{os.getpid()}.json")
        record.write_text(json.dumps(facts) + "\n")
        os.replace(new, path)
        os.replace(record, path.with_suffix(".json"))
    except OSError as error:
        log.warning("kernel cache: %s was not kept (%s)", path.name, error)
        new.unlink(missing_ok=True)
    return kernel
