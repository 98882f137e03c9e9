# SPDX-License-Identifier: Apache-2.0
"""Registers the SM90 templates as the CUDA implementation of the ops; importing this costs nothing and needs no GPU.

An op's template file, and with it CuTe DSL, is imported at the op's first call with CUDA tensors.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from cutlass_kernels.ops import OPS

# op -> the file under templates/ that has a function of the op's name
ROUTES = {
    "append": "append",
    "append_quest": "append",
    "append_infllm": "append",
    "quest_scores": "quest_scores",
    "infllm_scores": "infllm_scores",
    "select": "select",
    "rank_infllm": "rank_infllm",
    "predict": "predict",
    "replay_hits": "replay_hits",
    "attend": "attend",
    "merge": "merge",
    "attend_missed": "repair",
    "merge_repaired": "repair",
    "repair": "repair",
    "repair_union": "repair",
    "linear": "linear",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "add_norm_linear": "norm_linear",
    "silu_mul_linear": "silu_linear",
}


def _implementation(op: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        if not found:
            found.append(_load(op))
        with torch.cuda.device(args[0].device):
            return found[0](*args)

    return run


def _load(op: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f"cutlass_kernels.templates.{ROUTES[op]}")
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("cutlass", "tvm_ffi", "cuda"):
            raise
        raise ImportError(
            f"{op}: CUDA tensors need CuTe DSL, and {error.name} cannot be imported: "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<5' apache-tvm-ffi"
        ) from error
    return getattr(module, op)


def register() -> None:
    """Make the templates serve CUDA tensors."""
    for op in OPS:
        OPS[op].register_kernel("cuda")(_implementation(op))


register()
