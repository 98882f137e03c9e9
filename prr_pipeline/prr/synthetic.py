# SPDX-License-Identifier: Apache-2.0
"""Synthetic keys, values and drifting queries: decode steps whose selections have a set locality, without a prompt.

What attention gets is random; all that is done with it is real. A key is sqrt(w) m + sqrt(1 - w) e, where all keys of a
block share m, so that blocks differ by more than the noise of their keys. The queries of each head are an AR(1)
process, q' = sqrt(1 - drift^2) q + drift e, so that scores of consecutive steps correlate and A changes little by
little. All components are standard normal. Everything follows from the seed and the sample: every mode gets the same.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.models.attention import attention_modules
from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.calibration import Window, last_overlap
from prr_pipeline.prr.engine import Engine, Feed, Prefilled

_ROWS, _HALVINGS = 12, 8  # of drift_for


def prefill(
    engine: Engine, length: int, room: int, drift: float, block_weight: float, seed: int, key: str
) -> Prefilled:
    """A filled cache, scores of its last rows, and what attention gets in the decode steps; the model does not run.

    Args:
        engine: gives the method, and the model's shape, dtype and device.
        length: tokens in the cache.
        room: decode steps at most.
        drift: of the queries, 0 (they stay) to 1 (each is new).
        block_weight: w, the share of a key's variance that its block has in common, 0 to 1.
        seed, key: of the random numbers; the key is the sample's id.

    Returns:
        logits are zeros: nothing was read, so all first tokens are as likely.
    """
    config: Any = engine.model.config
    cache = engine.cache(length + room)
    cache.set_length(length)
    rows = min(engine.window, length)
    like = cache.layers[0].k
    blocks = engine.method.blocks(length + room)  # the cache may have more
    heads = (config.num_attention_heads, engine.kv_heads, engine.kv_heads)
    feed_q, feed_k, feed_v = (like.new_empty(engine.layers, room, 1, n, engine.head_dim) for n in heads)
    windows: dict[int, Window] = {}
    window_ms = 0.0
    for layer, module in enumerate(attention_modules(engine.model)):
        gen = torch.Generator(engine.device).manual_seed(zlib.crc32(f"{seed} {key} {layer}".encode()))
        k = block_keys(gen, like[:, :, :blocks], block_weight)
        v = torch.randn(k.shape, generator=gen, dtype=k.dtype, device=k.device)
        q = drifting(gen, heads[0], rows + room, engine.head_dim, drift).to(k.dtype)
        cache.write(layer, k[:, :, :length], v[:, :, :length])
        for steps, x, first in ((feed_q, q, rows), (feed_k, k, length), (feed_v, v, length)):
            steps[layer] = x[:, :, first : first + room].permute(2, 0, 1, 3)
        start = engine.now()
        windows |= engine.replay(cache, {layer: q[:, :, :rows]}, module.scaling)
        window_ms += (engine.now() - start) * 1e3
    feed = Feed(feed_q, feed_k, feed_v, length)
    return Prefilled(cache, like.new_zeros(1, config.vocab_size), windows, None, window_ms, feed)


def drift_for(
    overlap: float,
    method: SparseMethod,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    block_weight: float,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> float:
    """The drift at which so much of A's dynamic blocks was in the A before, by bisection on one layer's real scores.

    What it is good for is a context, a method and a shape; the overlap of a run is measured in the run.
    """
    cache = KVCache(method, 1, 1, kv_heads, head_dim, context, dtype, device)
    cache.set_length(context)
    gen = torch.Generator(device).manual_seed(seed)
    k = block_keys(gen, cache.layers[0].k, block_weight)[:, :, :context]
    cache.write(0, k, torch.zeros_like(k))
    cache.rebuild(0, context)
    lens = torch.full((_ROWS,), context, dtype=torch.int32, device=device)

    def measured(drift: float) -> float:
        same = torch.Generator(device).manual_seed(seed)
        q = drifting(same, q_heads, _ROWS, head_dim, drift).to(dtype)
        return float(last_overlap([scored(cache, 0, q, lens, head_dim**-0.5)], method).dynamic)

    low, high = 0.0, 1.0  # the more drift, the less overlap
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if measured(middle) > overlap else (low, middle)
    return (low + high) / 2


def scored(cache: KVCache, layer: int, q: Tensor, lens: Tensor, scale: float) -> Window:
    """Scores of W queries of one sequence. q: [1, Hq, W, D], lens: [W] int32."""
    at = cache.layers[layer]
    scores = torch.empty(len(lens), *at.k.shape[1:3], dtype=torch.float32, device=q.device)
    cache.method.score(q[0].transpose(0, 1).contiguous(), at.meta, lens, scale, scores)
    return Window(scores, lens)


def block_keys(gen: torch.Generator, like: Tensor, weight: float) -> Tensor:
    """Keys for all places of a cache [1, H_kv, N, block, D]: [1, H_kv, N * block, D]."""

    def noise(tokens: int) -> Tensor:
        size = (*like.shape[:3], tokens, like.shape[4])
        return torch.randn(size, generator=gen, dtype=like.dtype, device=like.device)

    return (weight**0.5 * noise(1) + (1 - weight) ** 0.5 * noise(like.shape[3])).flatten(2, 3)


def drifting(gen: torch.Generator, heads: int, rows: int, dim: int, drift: float) -> Tensor:
    """The process of each head from a stationary start, [1, Hq, rows, D] float32."""
    q = torch.randn(1, heads, rows, dim, generator=gen, device=gen.device)
    keep = (1 - drift**2) ** 0.5
    for t in range(1, rows):
        q[:, :, t] = keep * q[:, :, t - 1] + drift * q[:, :, t]
    return q
