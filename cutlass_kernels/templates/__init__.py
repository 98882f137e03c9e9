# SPDX-License-Identifier: Apache-2.0
"""CuTe DSL kernel templates for SM90, one file a kernel. This module is what their host sides share; it is cheap.

A template file defines

- a class: compile-time parameters in `__init__`, `signature()` with the fake arguments that it is compiled for,
  `@cute.jit __call__` that launches, `@cute.kernel kernel`, and `SERVES`, the parameter values that it exists for;
- a function named like each op that it implements, with the op's arguments (those of `reference`): it checks what the
  op's own door cannot know, gets the kernel and calls it.

    class Scale:
        SERVES = {"head size": (64, 128), "dtype": (torch.bfloat16, torch.float16)}

        def __init__(self, dtype: str, head_dim: int): ...
        def signature(self): return common.fake(common.DTYPES[self.dtype], (common.sym(), self.head_dim)), Float32(1)
        @cute.jit
        def __call__(self, x: cute.Tensor, factor: Float32, stream: CUstream): self.kernel(x, factor).launch(...)

    def scale(x, factor):
        templates.serve("scale", x, Scale.SERVES, {"head size": x.shape[-1], "dtype": x.dtype})
        templates.door("scale", x=x)  # or templates.contiguous, where no vectors are read
        if x.numel():
            compiled(Scale, dtype=templates.name(x.dtype), head_dim=x.shape[-1])(x, factor)
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

ARCH = "sm_90a"
CAPABILITY = (9, 0)
os.environ.setdefault("CUTE_DSL_ARCH", ARCH)  # read when cutlass is first imported, which every template does


def name(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def serve(op: str, on: Tensor, served: dict[str, tuple], asked: dict[str, Any]) -> None:
    """Check that a template exists for what is asked, on the device of `on`.

    Raises:
        NotImplementedError: no template for a value (the served ones are named), or a device that is not SM90.
    """
    for what, value in asked.items():
        if value not in served[what]:
            values = ", ".join(name(v) if isinstance(v, torch.dtype) else str(v) for v in served[what])
            value = name(value) if isinstance(value, torch.dtype) else value
            raise NotImplementedError(f"{op}: no CUDA kernel for {what} {value}; served: {values}")
    unfit = _unfit(on.device)
    if unfit:
        raise NotImplementedError(f"{op}: {unfit}")


@cache
def _unfit(device: torch.device) -> str:
    found = torch.cuda.get_device_capability(device)
    if found == CAPABILITY:
        return ""
    model = torch.cuda.get_device_name(device)
    return f"{device} ({model}) has compute capability {found[0]}.{found[1]}; the CUDA kernels are for 9.0 ({ARCH})"


@cache
def processors(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def contiguous(op: str, **tensors: Tensor | None) -> None:
    """Check that tensors are contiguous.

    Raises:
        ValueError: one is not.
    """
    for what, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{op}: {what} has strides {x.stride()} for shape {tuple(x.shape)}, expected contiguous")


def door(op: str, **tensors: Tensor | None) -> None:
    """Check that tensors are contiguous, and that vectors of 16 bytes can be read from their start.

    Raises:
        ValueError: one is not.
    """
    contiguous(op, **tensors)
    for what, x in tensors.items():
        if x is not None and x.data_ptr() % 16:
            raise ValueError(f"{op}: {what} starts at an address that is no multiple of 16 bytes")


def round_up(n: int, least: int = 1) -> int:
    """The next power of two, at least `least`: sizes that parametrise a kernel take few values."""
    return max(least, 1 << max(0, n - 1).bit_length())
