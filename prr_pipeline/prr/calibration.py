# SPDX-License-Identifier: Apache-2.0
"""Calibration (PRR, eq 4 and 5): replay the predictor over a prompt's last rows, all candidates and layers at once.

What is replayed is the predictor's own arithmetic and the selection's own order (`reference.learn`, `rank_blocks`). The
full score matrix of a long prompt does not fit; a window of its last rows does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_kernels.reference import learn, num_blocks, rank_blocks
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.prr.budget import width
from prr_pipeline.prr.predictor import LAST_SCORES, EmaPredictor


@dataclass(frozen=True)
class Window:
    """Scores of the last W rows of a prompt in one layer.

    scores: [W, H_kv, N] float32. lengths: [W] int32, tokens in the cache at that row, itself included.
    """

    scores: Tensor
    lengths: Tensor


class Hits(NamedTuple):
    """Shares of A that P held, means over rows that select and KV heads; NaN where nothing could be counted.

    all: of all blocks of A. dynamic: of those not forced. weighted: eq 4, of the scores of the dynamic ones; where they
    all weigh nothing, of their number.
    """

    all: Tensor
    dynamic: Tensor
    weighted: Tensor


def hit_rates(windows: Sequence[Window], thetas: Tensor, method: SparseMethod, widths: Sequence[int]) -> Hits:
    """Replay candidates over the windows of L layers: P from the rows before, against A of each row but the first.

    Args:
        windows: of layers of one prompt, [W, H_kv, N] each.
        thetas: [C, 3] float32, the same for all layers, or [L, C, 3].
        widths: sizes of P in blocks, delta top_k.

    Returns:
        [len(widths), L, C] float32 each.
    """
    scores = torch.stack([w.scores for w in windows], 1)  # [W, L, H, N]
    _, L, H, N = scores.shape
    C = thetas.shape[-2]
    flat = thetas.to(scores.device).expand(L, C, 3).reshape(L * C, 3).contiguous()
    level = scores.new_full((L * C, H, N), float("nan"))
    trend = torch.zeros_like(level)
    rule = (method.block_size, method.sink, method.local)
    sums: list[Hits] = []
    for i, tokens in enumerate(windows[0].lengths.tolist()):
        lens = windows[0].lengths[i : i + 1].expand(L * C).contiguous()
        if i and method.selects(method.dense_layers, tokens):
            rank = rank_blocks(level + flat[:, 2, None, None] * trend, lens, *rule)
            sums.append(_shares(scores[i], rank.view(L, C, H, N), lens[:L], method, widths))
        learn(scores[i, :, None].expand(L, C, H, N).reshape(L * C, H, N), level, trend, flat, lens, method.block_size)
    return Hits(*(torch.stack(x).nanmean(0) for x in zip(*sums, strict=True)))


def _shares(row: Tensor, rank: Tensor, lens: Tensor, method: SparseMethod, widths: Sequence[int]) -> Hits:
    """One row: scores [L, H, N], rank of P [L, C, H, N], lens [L] -> means over KV heads [len(widths), L, C]."""
    N = row.shape[2]
    chosen = rank_blocks(row, lens, method.block_size, method.sink, method.local) < method.top_k
    index = torch.arange(N, device=row.device)
    n = num_blocks(lens, method.block_size)[:, None, None]
    dynamic = chosen & (index >= method.sink) & (index < n - method.local)
    lowest = torch.where(dynamic, row, float("inf")).amin(-1, keepdim=True).clamp(max=0)
    weight = torch.where(dynamic, row - lowest, 0.0)
    weight = torch.where(weight.sum(-1, keepdim=True) > 0, weight, dynamic.float())
    wanted = torch.stack((chosen.float(), dynamic.float(), weight), -1)  # [L, H, N, 3]
    held = torch.stack([((rank < w) | (n[:, None] <= w)).float() for w in widths])  # [widths, L, C, H, N]
    found = torch.einsum("wlchn,lhnk->wlchk", held, wanted) / wanted.sum(2)[:, None]
    return Hits(*found.nanmean(3).unbind(-1))


@dataclass(frozen=True)
class Calibration:
    """theta* of a layer, its hit rate by the objective, and the hit rate of every candidate."""

    theta: tuple[float, float, float]
    hit: float
    grid: list[float]


def calibrate(windows: Sequence[Window], predictor: EmaPredictor, method: SparseMethod) -> list[Calibration]:
    """theta* by layer = argmax of the hit rate at |P| = |A| over the grid (eq 5); ties to the first candidate."""
    thetas = predictor.candidates()
    hits = hit_rates(windows, thetas, method, [method.top_k])
    rates = (hits.weighted if predictor.objective == "weighted" else hits.dynamic)[0]  # [L, C]
    found = []
    for row in rates:
        best = int(row.nan_to_num(nan=-1.0).argmax())
        alpha, beta, gamma = thetas[best].tolist()
        found.append(Calibration((alpha, beta, gamma), float(row[best]), row.tolist()))
    return found


def locality(
    windows: Sequence[Window],
    thetas: Sequence[tuple[float, float, float]],
    method: SparseMethod,
    deltas: Sequence[float],
) -> list[dict[str, float | str]]:
    """Hit rates against delta, means over layers: of theta by layer, of the last scores, and of the last A itself."""
    both = torch.tensor([[theta, LAST_SCORES] for theta in thetas])
    hits = hit_rates(windows, both, method, [width(d, method.top_k) for d in deltas])
    rows: list[dict[str, float | str]] = []
    for delta, every, dynamic in zip(deltas, hits.all.nanmean(1), hits.dynamic.nanmean(1), strict=True):
        for i, name in enumerate(("ema", "last_scores")):
            hit = {"hit_all": float(every[i]), "hit_dynamic": float(dynamic[i])}
            rows.append({"predictor": name, "delta": delta, **hit})
    last = last_overlap(windows, method)
    rows.append({"predictor": "last_a", "delta": 1.0, "hit_all": float(last.all), "hit_dynamic": float(last.dynamic)})
    return rows


def last_overlap(windows: Sequence[Window], method: SparseMethod) -> Hits:
    """Overlap of consecutive A (the paper's table 5), means over layers: what plain reuse finds."""
    rule = (method.block_size, method.sink, method.local)
    scores = torch.stack([w.scores for w in windows], 1)
    sums = []
    before: Tensor | None = None
    for row, length in zip(scores, windows[0].lengths, strict=True):
        lens = length.expand(row.shape[0]).contiguous()
        if before is not None and method.selects(method.dense_layers, int(length)):
            sums.append(_shares(row, before[:, None], lens, method, [method.top_k]))
        before = rank_blocks(row, lens, *rule)
    return Hits(*(torch.stack(x).nanmean() for x in zip(*sums, strict=True)))
