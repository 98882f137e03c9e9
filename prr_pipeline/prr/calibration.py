# SPDX-License-Identifier: Apache-2.0
"""Calibration (PRR, eq 4 and 5): replay the predictor over a prompt's last rows, all candidates and layers at once.

What is replayed is the predictor's own arithmetic and the selection's own order (the op replay_hits). The full score
matrix of a long prompt does not fit; a window of its last rows does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import num_blocks, rank_blocks
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
        [len(widths), L, C] float32 each, on the CPU.
    """
    lengths = windows[0].lengths
    blocks = method.blocks(int(lengths.max()))  # a cache has room for more
    scores = torch.stack([w.scores[:, :, :blocks] for w in windows])
    L, C, n = len(windows), thetas.shape[-2], len(widths)
    theta = thetas.to(scores.device).expand(L, C, 3).repeat_interleave(n, 1)
    each = torch.tensor(list(widths) * C, dtype=torch.int32, device=scores.device)
    rule = (method.block_size, method.top_k, method.sink, method.local, method.dense_len)
    found = ck.replay_hits(scores, lengths, theta, each, *rule)
    size = found.size.double().masked_fill(found.size < 0, float("nan"))[:, None]
    forced = method.sink + method.local
    kept = each.clamp(max=forced)[:, None, None]
    shares = (
        (found.hits + kept) / (size + forced),
        found.hits / size,
        found.weight / torch.where(size > 0, found.total[:, None], float("nan")),
    )
    return Hits(*(x.nanmean(3).nanmean(2).float().cpu().view(L, C, n).permute(2, 0, 1) for x in shares))


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
    for row, known in zip(rates.tolist(), rates.nan_to_num(nan=-1.0).tolist(), strict=True):
        best = known.index(max(known))
        alpha, beta, gamma = thetas[best].tolist()
        found.append(Calibration((alpha, beta, gamma), row[best], row))
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
    """Overlap of consecutive A (the paper's table 5), means over layers: what plain reuse finds. Not weighted."""
    lengths = windows[0].lengths
    selecting = [i for i, n in enumerate(lengths.tolist()) if i and method.selects(method.dense_layers, n)]
    index = torch.arange(windows[0].scores.shape[2], device=lengths.device)
    n = num_blocks(lengths, method.block_size)[selecting, None, None]
    dynamic = (index >= method.sink) & (index < n - method.local)
    shares = []
    for w in windows:
        chosen = rank_blocks(w.scores, lengths, method.block_size, method.sink, method.local) < method.top_k
        now, before = chosen[selecting], chosen[[i - 1 for i in selecting]]
        both = [(x & before).sum(-1) / x.sum(-1) for x in (now, now & dynamic)]  # [rows, H]
        shares.append(torch.stack(both).nanmean(2))
    every, dynamic_ = torch.stack(shares).nanmean((0, 2))
    return Hits(every, dynamic_, torch.full_like(every, float("nan")))
