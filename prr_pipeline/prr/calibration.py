# SPDX-License-Identifier: Apache-2.0
"""Calibration (PRR, eq 4 and 5): replay the predictor over the last rows of a prompt, for all candidates at once.

A candidate is a row of the batch of the op that decodes with it, so the grid is one pass and what is measured is what will
run. The full score matrix of a long prompt does not fit; a window of its last rows does.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.prr.predictor import LAST_SCORES, EmaPredictor


class Hits(NamedTuple):
    """Shares of A that P held, means over rows and KV heads; [C] float32 each, NaN where nothing could be counted.

    all: of all blocks of A. dynamic: of those not forced. weighted: eq 4, of the scores of the dynamic ones.
    """

    all: Tensor
    dynamic: Tensor
    weighted: Tensor


@dataclass(frozen=True)
class Window:
    """Scores of the last rows of a prompt in one layer.

    scores: [W, H_kv, N] float32. lengths: [W] int32, tokens in the cache at that row, itself included.
    """

    scores: Tensor
    lengths: Tensor


def hit_rates(window: Window, thetas: Tensor, method: SparseMethod, width: int) -> Hits:
    """Replay C candidates over a window: P from rows before, A of each row.

    Args:
        window: of one layer.
        thetas: [C, 3] float32.
        method: its selection rule makes A; P follows the same rule.
        width: |P| in blocks, delta top_k.
    """
    C = thetas.shape[0]
    _, H, N = window.scores.shape
    level = window.scores.new_full((C, H, N), float("nan"))
    trend = torch.zeros_like(level)
    predicted = torch.full((C, H, width), -1, dtype=torch.int32, device=level.device)
    thetas = thetas.to(level.device)
    sums: list[Hits] = []
    for row, length in zip(window.scores, window.lengths, strict=True):
        if sums or bool((predicted >= 0).any()):
            sums.append(_row_hits(row, length, predicted, method))
        lens = length.expand(C).contiguous()
        scores = row.expand(C, H, N).contiguous()
        ck.predict(scores, level, trend, thetas, lens, method.block_size, method.sink, method.local, predicted)
    if not sums:
        return Hits(*(level.new_full((C,), float("nan")) for _ in range(3)))
    return Hits(*(torch.stack(x).flatten(0, 0).nanmean(0) for x in zip(*sums, strict=True)))


def _row_hits(row: Tensor, length: Tensor, predicted: Tensor, method: SparseMethod) -> Hits:
    """Hits of one row, [C] each: mean over KV heads."""
    C, H, _ = predicted.shape
    N = row.shape[1]
    ids = ck.select(row[None], length[None], method.block_size, method.top_k, method.sink, method.local).ids
    chosen = _members(ids, N)  # [1, H, N]
    held = _members(predicted, N) & chosen  # [C, H, N]
    n = (length + method.block_size - 1) // method.block_size
    index = torch.arange(N, device=row.device)
    dynamic = chosen & (index >= method.sink) & (index < n - method.local)
    lowest = torch.where(dynamic, row, float("inf")).amin(-1, keepdim=True).clamp(max=0)
    weight = torch.where(dynamic, row - lowest, 0.0)

    def share(part: Tensor, whole: Tensor) -> Tensor:
        return (part.sum(-1) / whole.sum(-1)).nanmean(1).expand(C)

    return Hits(
        share(held.float(), chosen.float()),
        share((held & dynamic).float(), dynamic.float()),
        share(torch.where(held, weight, 0.0), weight),
    )


def _members(ids: Tensor, N: int) -> Tensor:
    """[.., K] ids -> [.., N] bool."""
    at = torch.where(ids >= 0, ids, N).long()
    return torch.zeros(*ids.shape[:-1], N + 1, dtype=torch.bool, device=ids.device).scatter_(-1, at, True)[..., :N]


@dataclass(frozen=True)
class Calibration:
    """theta* of a layer, its hit rate by the objective, and the hit rate of every candidate."""

    theta: tuple[float, float, float]
    hit: float
    grid: list[float]


def calibrate(window: Window, predictor: EmaPredictor, method: SparseMethod) -> Calibration:
    """theta* = argmax of the hit rate at |P| = |A| over the grid (eq 5); ties to the first candidate."""
    thetas = predictor.candidates()
    hits = hit_rates(window, thetas, method, method.top_k)
    rates = hits.weighted if predictor.objective == "weighted" else hits.dynamic
    best = int(rates.nan_to_num(nan=-1.0).argmax())
    alpha, beta, gamma = thetas[best].tolist()
    return Calibration((alpha, beta, gamma), float(rates[best]), rates.tolist())


def locality(
    window: Window, theta: tuple[float, float, float], method: SparseMethod, deltas: list[float]
) -> list[dict[str, float | str]]:
    """Hit rates against delta: of theta, of the last scores, and of the last A itself (delta 1, nothing updated)."""
    rows: list[dict[str, float | str]] = []
    both = torch.tensor([theta, LAST_SCORES])
    for delta in deltas:
        hits = hit_rates(window, both, method, int(delta * method.top_k))
        for i, name in enumerate(("ema", "last_scores")):
            rows.append(
                {
                    "predictor": name,
                    "delta": delta,
                    "hit_all": float(hits.all[i]),
                    "hit_dynamic": float(hits.dynamic[i]),
                }
            )
    last = last_overlap(window, method)
    rows.append({"predictor": "last_a", "delta": 1.0, "hit_all": float(last.all), "hit_dynamic": float(last.dynamic)})
    return rows


def last_overlap(window: Window, method: SparseMethod) -> Hits:
    """Overlap of consecutive A (the paper's table 5), scalars: what plain reuse finds."""
    sums = []
    before: Tensor | None = None
    for row, length in zip(window.scores, window.lengths, strict=True):
        if before is not None:
            sums.append(_row_hits(row, length, before, method))
        rule = (method.block_size, method.top_k, method.sink, method.local)
        before = ck.select(row[None], length[None], *rule).ids
    return Hits(*(torch.stack(x).nanmean() for x in zip(*sums, strict=True)))
