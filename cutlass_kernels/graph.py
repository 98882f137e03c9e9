# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: recording one, and how long its replays take."""

import statistics
from collections.abc import Callable
from typing import Any

import torch


def recorded(body: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The CUDA graph of what body launches; it is run once before (compilation, loading of kernels)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    left: list[BaseException] = []

    def recording() -> None:
        try:
            body()
        except BaseException as error:
            left.append(error)
            raise

    try:
        with torch.cuda.graph(graph, pool=pool):
            recording()
    except BaseException as error:  # Ctrl-C in a capture makes its end fail, too, which would pass for a fault
        left.append(error)
    if left:
        raise left[0]
    return graph


def replay_us(body: Callable[[], object], replays: int, between: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of a replay of what body launches; `between` runs in front of each of them, untimed."""
    graph = recorded(body)
    graph.replay()  # the first one is slower: it brings the graph to the device
    times = []
    for _ in range(replays):
        between()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)
