# SPDX-License-Identifier: Apache-2.0
"""Synthetic keys, values and moving queries: decode steps whose selections have a set locality, without a prompt.

What attention gets is random; all that is done with it is real. A key is sqrt(w) m + sqrt(1 - w) e, where all keys of a
block share m, so that blocks differ by more than the noise of their keys. The query of a head is
sqrt(1 - noise^2) z + noise e about an AR(1) process, z' = sqrt(1 - drift^2) z + drift e, each e new. By drift, scores
wander off and the last ones predict the next best; by noise, they fluctuate about a mean that an average over steps
finds. All components are standard normal. Everything follows from the seed and the sample: every mode gets the same.
"""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prr_pipeline.errors import ConfigError
from prr_pipeline.models.attention import attention_modules
from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.calibration import Window, last_overlap
from prr_pipeline.prr.engine import Engine, Feed, Prefilled

_ROWS, _HALVINGS = 12, 8  # of motion_for
_NEAR = 0.02  # what an overlap may be short of the wanted one


class Motion(NamedTuple):
    """How queries change from step to step.

    drift: of their mean, 0 (it stays) to 1 (each is new). noise: about the mean, 0 (none) to 1 (nothing else).
    Consecutive queries correlate by (1 - noise^2) sqrt(1 - drift^2).
    """

    drift: float
    noise: float


def prefill(
    engine: Engine, length: int, room: int, motion: Motion, block_weight: float, seed: int, key: str
) -> Prefilled:
    """A filled cache, scores of its last rows, and what attention gets in the decode steps; the model does not run.

    Args:
        engine: gives the method, and the model's shape, dtype and device.
        length: tokens in the cache.
        room: decode steps at most.
        motion: of the queries.
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
        q = head_queries(gen, heads[0], rows + room, engine.head_dim, motion).to(k.dtype)
        cache.write(layer, k[:, :, :length], v[:, :, :length])
        for steps, x, first in ((feed_q, q, rows), (feed_k, k, length), (feed_v, v, length)):
            steps[layer] = x[:, :, first : first + room].permute(2, 0, 1, 3)
        start = engine.now()
        windows |= engine.replay(cache, {layer: q[:, :, :rows]}, module.scaling)
        window_ms += (engine.now() - start) * 1e3
    feed = Feed(feed_q, feed_k, feed_v, length)
    return Prefilled(cache, like.new_zeros(1, config.vocab_size), windows, None, window_ms, feed)


def motion_for(
    overlap: float, vary: str, motion: Motion, engine: Engine, context: int, block_weight: float, seed: int
) -> Motion:
    """The motion at which so much of A's dynamic blocks was in the A before, by bisection on one layer's real scores.

    What it is good for is a context, a method and a shape; the overlap of a run is measured in the run.

    Args:
        overlap: wanted share, 0 to 1.
        vary: which of the two is found, "drift" or "noise".
        motion: gives the other one.
        engine: gives the method, and the model's shape, dtype and device.
        context: tokens in the cache.
        block_weight, seed: as of prefill.

    Raises:
        ConfigError: the other one alone leaves less.
    """
    config: Any = engine.model.config
    method, dim, device = engine.method, engine.head_dim, engine.device
    cache = KVCache(method, 1, 1, engine.kv_heads, dim, context, engine.dtype, device)
    cache.set_length(context)
    gen = torch.Generator(device).manual_seed(seed)
    k = block_keys(gen, cache.layers[0].k, block_weight)[:, :, :context]
    cache.write(0, k, torch.zeros_like(k))
    cache.rebuild(0, context)
    lens = torch.full((_ROWS,), context, dtype=torch.int32, device=device)
    drawn = gen.get_state()  # queries go on from here: with the keys' random numbers they would look for these blocks

    def measured(value: float) -> float:
        gen.set_state(drawn)
        tried = motion._replace(**{vary: value})
        q = head_queries(gen, config.num_attention_heads, _ROWS, dim, tried).to(engine.dtype)
        return float(last_overlap([scored(cache, 0, q, lens, dim**-0.5)], method).dynamic)

    if (most := measured(0.0)) < overlap - _NEAR:
        other = "noise" if vary == "drift" else "drift"
        raise ConfigError(
            f"benchmark.overlap = {overlap} is out of reach at {context} tokens: with benchmark.{other} = "
            f"{getattr(motion, other)} it is {most:.3f} even at {vary} 0. Lower benchmark.{other}"
        )
    low, high = 0.0, 1.0  # the more of it, the less overlap
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if measured(middle) > overlap else (low, middle)
    return motion._replace(**{vary: (low + high) / 2})


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


def head_queries(gen: torch.Generator, heads: int, rows: int, dim: int, motion: Motion) -> Tensor:
    """Queries of each head from a stationary start, [1, Hq, rows, D] float32."""
    drift, noise = motion
    q = torch.randn(1, heads, rows, dim, generator=gen, device=gen.device)
    keep = (1 - drift**2) ** 0.5
    for t in range(1, rows):
        q[:, :, t] = keep * q[:, :, t - 1] + drift * q[:, :, t]
    if noise:  # without it nothing more is drawn
        q = (1 - noise**2) ** 0.5 * q + noise * torch.randn(q.shape, generator=gen, device=gen.device)
    return q
