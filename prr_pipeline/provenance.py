# SPDX-License-Identifier: Apache-2.0
"""What outputs are made of beside their configuration, as digests: source, and the files that the program reads."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_MIB = 1 << 20
_PACKAGES = ("prr_pipeline", "cutlass_kernels")  # side by side, in a source tree and in an installed wheel


@cache
def source() -> str:
    """SHA-256 of the names and texts of both packages' .py files, as installed; one value a process."""
    return digest_tree(Path(__file__).resolve().parent.parent, _PACKAGES)


def digest_tree(root: Path, packages: Iterable[str]) -> str:
    """SHA-256 of the names and texts of the .py files of some packages in a folder; of a file if one is named."""
    found = hashlib.sha256()
    for package in packages:
        for path in _sources(root / package):
            text = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()}:{len(text)}\n".encode())
            found.update(text)
    return found.hexdigest()


def digest_class(cls: type) -> str | None:
    """SHA-256 of the source of a class and its bases, as far as it lies outside both packages; None if nothing does.

    Source is a module's file, or all .py files of its outermost package; and of what they import from beside them.
    Installed packages count for their own classes only: what those are built on has versions.
    """
    installed = _installed()
    left = [x for kind in cls.__mro__ for x in _files_of(kind.__module__.split(".")[0])]
    own = set(_files_of(cls.__module__.split(".")[0]))
    left = [x for x in left if x in own or x.parent not in installed]
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            if path.parent not in installed:
                left += [x for name in _imported(path) for x in _beside(path.parent, name)]
    if not seen:
        return None
    found = hashlib.sha256()
    for path in sorted(seen, key=lambda x: (x.name, x)):
        found.update(digest_tree(path.parent, [path.name]).encode())
    return found.hexdigest()


def _installed() -> set[Path]:
    """Folders of the standard library and of installed packages."""
    return {Path(x).resolve() for x in sysconfig.get_paths().values()}


def _files_of(name: str) -> list[Path]:
    """Where an imported outermost module is: its file, or the folders of a package. None of our own."""
    module = sys.modules.get(name)
    if name in _PACKAGES or module is None:
        return []
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
    return [Path(x).resolve() for x in places if x]


def _beside(folder: Path, name: str) -> list[Path]:
    """What an import of that name takes from a folder, if anything."""
    return [x for x in (folder / name, folder / f"{name}.py") if x.exists()][:1] if name not in _PACKAGES else []


def _imported(path: Path) -> Iterator[str]:
    """Outermost names that a file, or the files of a package, import."""
    for file in _sources(path):
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # a file of a package that nobody imports
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


def _sources(path: Path) -> list[Path]:
    """A .py file, or those under a folder, in an order of their own."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def digest_weights(files: Iterable[Path], times: bool = True) -> str:
    """SHA-256 of the names, sizes, times of change, and first and last MiB of files.

    Weights are many GB, and a job must start at once: what is between the first and last MiB is not read. Whoever
    writes there changes the time of the file, too.

    Args:
        files: in an order of their own.
        times: without them for files of an installed package: each installation gives them new ones, and a package's
            version comes as a whole.
    """
    found = hashlib.sha256()
    for path in files:
        stat = path.stat()
        found.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns if times else ''}\n".encode())
        with path.open("rb") as f:
            found.update(f.read(_MIB))
            f.seek(max(0, stat.st_size - _MIB))
            found.update(f.read(_MIB))
    return found.hexdigest()
