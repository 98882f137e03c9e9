# SPDX-License-Identifier: Apache-2.0
"""What outputs are made of beside their configuration, as digests: this program's source, and the files it reads."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_MIB = 1 << 20
_PACKAGES = ("prr_pipeline", "cutlass_kernels")  # side by side, in a source tree and in an installed wheel


@cache
def source() -> str:
    """SHA-256 of the names and texts of both packages' .py files, as installed; one value a process."""
    return digest_tree(Path(__file__).resolve().parent.parent, _PACKAGES)


def digest_tree(root: Path, packages: Iterable[str]) -> str:
    """SHA-256 of the names and texts of the .py files of some packages in a folder."""
    found = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            text = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()}:{len(text)}\n".encode())
            found.update(text)
    return found.hexdigest()


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
