# SPDX-License-Identifier: Apache-2.0
"""Arrows only point down: what a package may import, read from its source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A module belongs to the first prefix that it starts with.
MAY_IMPORT = {
    "cutlass_kernels": {"cutlass_kernels"},
    "prr_pipeline.errors": set(),
    "prr_pipeline.config": {"prr_pipeline.errors"},
    "prr_pipeline.overrides": {"prr_pipeline.config", "prr_pipeline.errors"},
    "prr_pipeline.artifacts": {"prr_pipeline.errors", "prr_pipeline.config", "prr_pipeline.__version__"},
    "prr_pipeline.dsa": {"cutlass_kernels", "prr_pipeline.errors", "prr_pipeline.dsa"},
    "prr_pipeline.models": {
        "cutlass_kernels",
        "prr_pipeline.errors",
        "prr_pipeline.config",
        "prr_pipeline.models",
        "prr_pipeline.dsa.base",
    },
    "prr_pipeline.benchmarks": {"prr_pipeline.errors", "prr_pipeline.config", "prr_pipeline.benchmarks"},
    "prr_pipeline.tracking": {
        "cutlass_kernels",
        "prr_pipeline.errors",
        "prr_pipeline.config",
        "prr_pipeline.artifacts",
        "prr_pipeline.tracking",
    },
    "prr_pipeline.prr": {
        "cutlass_kernels",
        "prr_pipeline.errors",
        "prr_pipeline.dsa",
        "prr_pipeline.models",
        "prr_pipeline.prr",
    },
}
OURS = ("cutlass_kernels", "prr_pipeline")
LIGHTNING_AT = {"prr_pipeline/pipeline.py"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            whole = node.module in OURS  # `from prr_pipeline import x` imports x
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if whole else [node.module]


def sources():
    return sorted(p for top in OURS for p in (ROOT / top).rglob("*.py"))


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sources(), ids=module)
def test_arrows_point_down(path):
    name = module(path)
    layer = next((prefix for prefix in MAY_IMPORT if name == prefix or name.startswith(prefix + ".")), None)
    if layer is None:
        return  # stages, pipeline and the entry stand on top
    for found in imports(path):
        if found.split(".")[0] in OURS:
            allowed = MAY_IMPORT[layer]
            assert any(found == a or found.startswith(a + ".") for a in allowed), f"{name} imports {found}"


@pytest.mark.parametrize("path", sources(), ids=module)
def test_heavy_edges_stay_at_the_edge(path):
    found = {name.split(".")[0] for name in imports(path)}
    if path.relative_to(ROOT).as_posix() not in LIGHTNING_AT:
        assert "lightning" not in found
    if "cutlass_kernels" in path.parts:
        assert not found & {"hydra", "omegaconf", "transformers", "wandb"}
    else:
        assert not found & {"cutlass", "tvm_ffi"}
