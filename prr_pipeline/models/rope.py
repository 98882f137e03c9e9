# SPDX-License-Identifier: Apache-2.0
"""A decode step's attention layers, one row each: RoPE is left to the attention, which makes it while it appends.

A layer is taken over by what it does, not by its name: called as Llama's, GLM's and Qwen3's are, it must hand on the
queries and keys that RoPE of its own linear layers' rows gives, of one kind of pairs or the other. Longer inputs go
through its own forward, as they always did.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutlass_kernels import reference
from prr_pipeline.errors import ConfigError
from prr_pipeline.models.attention import NAME, Rope, attached, attend, attention_modules
from prr_pipeline.models.linear import RowLinear, is_served, one_row
from prr_pipeline.models.takeover import taken_over

log = logging.getLogger(__name__)

_POSITION = 100_003  # far from 0, where every rotation is none, and beyond where some begin to scale
_CHANNELS = 16  # of which the kernels rotate multiples


class RowAttention(nn.Module):
    """The forward of an attention layer that was taken over; stands before its own class, which keeps all else."""

    interleaved: bool  # pairs of RoPE, see Rope
    config: Any
    q_proj: RowLinear
    o_proj: RowLinear

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, *others: Any, **named: Any) -> Any:
        """[1, 1, hidden] -> the same and None; with a mask or a cache it is a call of its class."""
        others_named = (named.get(key) for key in ("attention_mask", "past_key_values", "cache"))
        asked = any(x is not None for x in (*others, *others_named))
        ours = self.config._attn_implementation == NAME and position_embeddings is not None and not asked
        if not ours or hidden_states.dim() != 3 or not one_row(hidden_states, self.q_proj.weight):
            return super().forward(hidden_states, position_embeddings, *others, **named)
        cos, sin = (x[:, 0] for x in position_embeddings)
        q, k, v = _heads(self, hidden_states)
        out = attend(self, q, k, v, Rope(cos, sin, self.interleaved))
        return self.o_proj(out.reshape(1, 1, -1)), None


def _heads(module: Any, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a row before RoPE, [1, heads, 1, D]."""
    q, k, v = (p(row).view(1, 1, -1, module.head_dim) for p in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@torch.no_grad()
def fast_rope(model: nn.Module) -> Callable[[], None]:
    """Make every attention layer a RowAttention, where fast_linears has taken over its linear layers before.

    Returns:
        a function that undoes it.
    """
    found = []
    layers = _layers(model)
    turn = _angles(model) if layers else None
    if turn is not None:
        watch = _Watch()
        with attached(model, watch):
            kinds = [_pairs(module, turn, watch) for module in layers]
        for module, interleaved in zip(layers, kinds, strict=True):
            if interleaved is not None:
                module.__dict__["interleaved"] = interleaved
                found.append(module)
    log.debug("RoPE is a part of append in %d attention layers", len(found))
    back = taken_over(found, RowAttention)

    def undo() -> None:
        back()
        for module in found:
            module.__dict__.pop("interleaved", None)

    return undo


def _layers(model: nn.Module) -> list[Any]:
    """Attention layers that look like those that are served: their linear layers are."""
    try:
        layers = attention_modules(model)
    except ConfigError:  # which attached() raises when it is asked for
        return []
    return [m for m in layers if not isinstance(m, RowAttention) and _is_plain(m)]


def _is_plain(module: Any) -> bool:
    return all(is_served(getattr(module, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))


def _angles(model: nn.Module) -> tuple[Tensor, Tensor] | None:
    """cos, sin [1, 1, R] of the model at _POSITION; None where they are not such as the kernels take."""
    embedding = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    weight = next(model.parameters())
    try:  # of a copy: some keep the longest position that they saw
        cos, sin = copy.deepcopy(embedding)(
            weight.new_empty(1, 1, 1), torch.full((1, 1), _POSITION, device=weight.device)
        )  # type: ignore[misc]
    except Exception:  # there is none, or it is called in another way
        return None
    fits = all(x.dtype == weight.dtype and x.shape == (1, 1, cos.shape[-1]) for x in (cos, sin))
    twice = fits and cos.shape[-1] % _CHANNELS == 0 and all(torch.equal(*x.chunk(2, -1)) for x in (cos, sin))
    return (cos, sin) if twice else None


class _Watch:
    """A handler of attention that keeps what it was given, and gives what it was told to."""

    answer: Tensor

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.calls.append((q, k, v, scale))
        return self.answer.view(1, 1, q.shape[1], -1).clone()


def _pairs(module: Any, turn: Any, watch: _Watch) -> bool | None:
    """Whether its RoPE is of interleaved pairs, from what it hands on of rows of noise; None: it is none of ours."""
    kinds = {False, True}
    for scale in (1, 16, 256):  # some clamp what is large
        kinds &= _kinds(module, turn, watch, scale)
    return kinds.pop() if len(kinds) == 1 else None


def _kinds(module: Any, turn: Any, watch: _Watch, scale: int) -> set[bool]:
    """Of which pairs RoPE may be that a row of noise of this scale gets, if all else is as it should be."""
    generator = torch.Generator().manual_seed(scale)
    row = torch.randn(1, 1, module.q_proj.in_features, generator=generator).mul(scale).to(module.q_proj.weight)
    watch.answer = torch.randn(1, 1, module.o_proj.in_features, generator=generator).to(row)
    watch.calls.clear()
    position = torch.full((1, 1), _POSITION, device=row.device)
    try:
        result = module(row, position_embeddings=turn, attention_mask=None, position_ids=position)[0]
    except Exception:  # it is called in another way
        return set()
    if len(watch.calls) != 1:
        return set()
    ((q, k, v, softmax_scale),) = watch.calls
    plain = _heads(module, row)
    same = torch.equal(v, plain[2]) and torch.equal(result, module.o_proj(watch.answer))
    if not same or softmax_scale != module.scaling:
        return set()
    return {kind for kind in (False, True) if _turned(q, plain[0], turn, kind) and _turned(k, plain[1], turn, kind)}


def _turned(found: Tensor, plain: Tensor, turn: Any, interleaved: bool) -> bool:
    """Whether RoPE of `plain` is what was found, but for roundings of its two products, channel by channel."""
    cos, sin = (x[:, 0] for x in turn)
    row = plain[:, :, 0]
    if found.shape != plain.shape or found.dtype != plain.dtype:
        return False
    wanted = reference.rotate(row, cos, sin, interleaved).float()
    most = reference.rotate(row.float().abs(), cos.float().abs(), -sin.float().abs(), interleaved).abs()
    other = reference.rotate(row.float().abs(), cos.float().abs(), sin.float().abs(), interleaved).abs()
    near = 2 * torch.finfo(plain.dtype).eps * torch.maximum(most, other)
    return bool(((found[:, :, 0].float() - wanted).abs() <= near).all())
