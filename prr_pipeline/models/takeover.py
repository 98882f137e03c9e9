# SPDX-License-Identifier: Apache-2.0
"""What the layers that our ops take over have in common: which are served, and how a module gets another forward."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def served(weight: Tensor) -> bool:
    """Whether the ops have kernels for it: half precision on a GPU."""
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)


def taken_over(modules: Iterable[nn.Module], forward: type[nn.Module]) -> Callable[[], None]:
    """Put a class with a forward before that of each module, which keeps all else.

    Returns:
        a function that undoes it.
    """
    found: list[tuple[nn.Module, Any]] = [(m, type(m)) for m in modules]
    both: Any = _both
    for module, original in found:
        module.__class__ = both(forward, original)

    def undo() -> None:
        for module, original in found:
            module.__class__ = original

    return undo


@cache
def _both(forward: Any, original: Any) -> Any:
    return type(f"Row{original.__name__}", (forward, original), {"__doc__": forward.__doc__})
