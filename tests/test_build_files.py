# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml, constraints.txt and the Makefile: nothing installed in vain, and nothing passes by doing nothing."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"hydra-core": "hydra", "nvidia-cutlass-dsl": "cutlass"}  # where they differ from the package's name
# No module of ours imports these; the libraries that we call do, for what we ask of them.
CALLED_FOR_US = {
    "accelerate": "device_map of from_pretrained",
    "safetensors": "from_pretrained of local and hub weights",
    "apache-tvm-ffi": "--enable-tvm-ffi of cute.compile",
}


def name(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


def imported() -> set[str]:
    found = set()
    for package in ("prr_pipeline", "cutlass_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found |= {n.split(".")[0] for n in names}
    return found


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {name(line) for line in lines if line and not line.startswith("#")}


def test_every_dependency_is_used() -> None:
    used = imported()
    packages = [name(r) for r in PROJECT["dependencies"]]
    unused = [p for p in packages if MODULES.get(p, p) not in used and p not in CALLED_FOR_US]
    assert unused == []
    assert set(CALLED_FOR_US) <= set(packages) and not {MODULES.get(p, p) for p in CALLED_FOR_US} & used


def test_what_is_installed_is_pinned_and_no_more() -> None:
    wanted = {name(r) for r in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])}
    assert wanted - pins() == set()
    assert pins() & {"datasets", "math-verify", "latex2sympy2-extended", "pandas", "pyarrow", "multiprocess"} == set()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_gpu_tests_without_a_gpu_are_a_failure(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    command = ["make", "test-gpu", f"BIN={tools}", f"READY={ready}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "-m pytest" not in done.stdout
    wanted = "make test-gpu needs a Hopper GPU (compute capability 9.0), torch "
    assert wanted in done.stderr and "sees none; make test runs what needs no GPU" in done.stderr
