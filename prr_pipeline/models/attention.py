# SPDX-License-Identifier: Apache-2.0
"""The hook into transformers: any model whose attention goes through its attention interface runs ours.

The model is called without a cache and with explicit positions; its attention layers then hand us q, k, v of the new
tokens after RoPE, and ours keeps the cache. An unknown implementation name also gets no mask: masking is ours.

What the layers call is one opaque op. It looks its handler up when it runs, so that a model compiled once serves every
handler, and the cache is never an argument that the compiler would copy. Layers that leave RoPE to the attention (see
rope) hand on the angles, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutlass_kernels import reference
from prr_pipeline.errors import ConfigError

# layer, q [B, Hq, T, D], k and v [B, H_kv, T, D], scale -> [B, T, Hq, D]; of one that rotates, behind them Rope | None
Attention = Callable[..., Tensor]

NAME = "prr"
_UNSERVED = ("sliding_window", "softcap", "s_aux")  # what models pass when theirs is not plain softmax attention
_handlers: list[tuple[Attention, bool]] = []  # the last one serves; whether it rotates


class Rope(NamedTuple):
    """The angles of one token, as transformers gives them: cos, sin [B, R] of R / 2 angles twice, of R channels.

    interleaved: channels 2 i and 2 i + 1 are a pair (GLM), else i and i + R / 2 (Llama).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


@torch.library.custom_op("prr_pipeline::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    layer: int,
    scale: float,
) -> Tensor:
    """The op: what it does is the handler's affair; its result shares no memory with q, k, v."""
    if not _handlers:
        raise RuntimeError("attention 'prr' was called outside of prr_pipeline.models.attention.attached")
    handler, rotates = _handlers[-1]
    rope = None if cos is None or sin is None else Rope(cos, sin, interleaved)
    if rotates:
        return handler(layer, q, k, v, scale, rope)
    if rope is not None:
        q, k = (reference.rotate(x[:, :, 0], *rope)[:, :, None] for x in (q, k))
    return handler(layer, q, k, v, scale)


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    layer: int,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None, scale: float | None = None) -> Tensor:
    """Attention of a layer, by the handler that serves. -> [B, T, Hq, D]; scale: the module's own when None.

    rope: of one token, if q and k come before RoPE.
    """
    turn = (None, None, False) if rope is None else rope
    return _attention(q, k, v, *turn, int(module.layer_idx), module.scaling if scale is None else scale)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    used = [key for key in _UNSERVED if options.get(key) is not None]
    if used:
        raise ConfigError(f"the model's attention uses {', '.join(used)}; only full softmax attention is served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module, query, key, value, None, scale), None


@cache
def _register() -> None:
    """Make the name known to transformers, whose import takes seconds."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _forward)


def attention_modules(model: Any) -> list[Any]:
    """The model's attention layers, in order.

    Raises:
        ConfigError: an architecture whose layers are not all full attention over one KV cache.
    """
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    layers = getattr(model.config, "num_hidden_layers", None)
    if sorted(m.layer_idx for m in found) != list(range(layers or 0)):
        raise ConfigError(
            f"model type '{getattr(model.config, 'model_type', '?')}': {len(found)} attention layers found, expected "
            f"{layers}; only models whose every layer is full attention are served"
        )
    sliding = [m.layer_idx for m in found if getattr(m, "sliding_window", None)]
    if sliding:
        raise ConfigError(f"layers {sliding} use sliding-window attention; only full attention is served")
    return found


@contextmanager
def attached(model: Any, attention: Attention, rotates: bool = False) -> Iterator[None]:
    """Within it the model's attention is ours; what was there is put back in every case.

    rotates: it takes the RoPE that layers leave to it as one more argument; others get q and k after RoPE.
    """
    _register()
    attention_modules(model)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    _handlers.append((attention, rotates))
    try:
        yield
    finally:
        _handlers.pop()
        model.config._attn_implementation = before


@torch.no_grad()
def forward(model: nn.Module, ids: Tensor, start: int) -> Tensor:
    """Logits of the last of the new tokens. ids: [B, T], at positions start ... start + T - 1. -> [B, vocab]."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)
    out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return out.logits[:, -1]
