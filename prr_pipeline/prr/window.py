# SPDX-License-Identifier: Apache-2.0
"""Scores of a prompt's last rows, and the metadata that decode goes on with."""

import torch
from torch import Tensor

from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.calibration import Window


def replay(cache: KVCache, layer: int, queries: Tensor, scale: float) -> Window | None:
    """Score the last W rows of a prompt in one layer; None if the layer is dense. Leaves the metadata of the prompt.

    Args:
        cache: every prompt token is in it.
        queries: [B, Hq, W, D] of those rows.
    """
    at = cache.layers[layer]
    (B, H), rows = at.k.shape[:2], queries.shape[2]
    lengths = torch.arange(cache.length - rows + 1, cache.length + 1, dtype=torch.int32, device=at.k.device)
    scores = torch.empty(rows, B, H, cache.num_blocks, dtype=torch.float32, device=at.k.device)
    score = score_at_once if at.k.is_cuda and B == 1 else score_by_appending
    score(cache, layer, queries, lengths, scale, scores)
    return Window(scores[:, 0], lengths) if layer >= cache.method.dense_layers else None


def score_by_appending(
    cache: KVCache, layer: int, queries: Tensor, lengths: Tensor, scale: float, scores: Tensor
) -> None:
    """Append the rows again, one by one as decode will, and score each into scores [W, B, H_kv, N]."""
    method, at = cache.method, cache.layers[layer]
    first = cache.length - len(lengths)
    cache.rebuild(layer, first)
    keys, values = (x.flatten(2, 3)[:, :, first : cache.length].clone() for x in (at.k, at.v))
    for i in range(len(lengths)):
        lens = lengths[i].expand(at.k.shape[0]).contiguous()
        method.append(keys[:, :, i].contiguous(), values[:, :, i].contiguous(), at.k, at.v, at.meta, lens)
        if layer >= method.dense_layers:
            method.score(queries[:, :, i].contiguous(), at.meta, lens, scale, scores[i])


def score_at_once(cache: KVCache, layer: int, queries: Tensor, lengths: Tensor, scale: float, scores: Tensor) -> None:
    """Score all rows of one sequence from the metadata of the whole prompt: a launch, where appending takes two a row.

    It differs, not in InfLLM-v2, but for the page of Quest's that a row is filling: its extrema know the tokens that
    came later. That page is the row's current one, which is attended whatever its score.
    """
    method, at = cache.method, cache.layers[layer]
    cache.rebuild(layer, cache.length)
    if layer >= method.dense_layers:
        method.score(queries[0].transpose(0, 1).contiguous(), at.meta, lengths, scale, scores[:, 0])
