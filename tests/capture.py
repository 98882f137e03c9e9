# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of what tests launch."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of run(), which is run once before, and what it gave, which replays write again."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result
