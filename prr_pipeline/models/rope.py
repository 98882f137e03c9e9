# SPDX-License-Identifier: Apache-2.0
"""A decode step's attention layers, one row each: RoPE is left to the attention, which makes it while it appends.

A layer is taken over by what it does, not by its name: called as Llama's, GLM's and Qwen3's are, it must hand on the
queries and keys that RoPE of its own linear layers' rows gives, of one kind of pairs or the other. Longer inputs go
through its own forward, as they always did.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutlass_kernels import reference
from prr_pipeline.errors import ConfigError
from prr_pipeline.models import takeover
from prr_pipeline.models.attention import NAME, Rope, attached, attend, attention_modules
from prr_pipeline.models.linear import RowLinear, one_row
from prr_pipeline.models.takeover import taken_over

_POSITION = 1234  # far from 0, where every rotation is none
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
    embedding = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    for module in _layers(model) if embedding is not None else ():
        interleaved = _pairs(model, module, embedding)
        if interleaved is not None:
            module.__dict__["interleaved"] = interleaved
            found.append(module)
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
    projections = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return all(type(p) is RowLinear and takeover.served(p.weight) for p in projections)


def _pairs(model: nn.Module, module: Any, embedding: Any) -> bool | None:
    """Whether its RoPE is of interleaved pairs, from what it hands on of a row of noise; None: it is none of ours."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 1, module.q_proj.in_features, generator=generator).to(module.q_proj.weight)
    answer = torch.randn(1, 1, module.o_proj.in_features, generator=generator).to(row)
    seen: list[tuple[Any, ...]] = []

    def watch(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        seen.append((q, k, v, scale))
        return answer.view(1, 1, q.shape[1], -1).clone()

    try:
        turn = embedding(row, torch.tensor([[_POSITION]], device=row.device))
        with attached(model, watch):
            result = module(row, position_embeddings=turn, attention_mask=None)[0]
        plain = _heads(module, row)
        ((q, k, v, scale),) = seen
        if not (torch.equal(v, plain[2]) and torch.equal(result, module.o_proj(answer)) and scale == module.scaling):
            return None
        return next((kind for kind in (False, True) if _turned((q, k), plain, turn, kind)), None)
    except Exception:  # it is called in another way
        return None


def _turned(found: tuple[Tensor, Tensor], plain: tuple[Tensor, ...], turn: Any, interleaved: bool) -> bool:
    """Whether RoPE of `plain` is what was found, but for roundings between its operations."""
    cos, sin = (x[:, 0] for x in turn)
    twice = all(torch.equal(*x.chunk(2, 1)) and x.dtype == plain[0].dtype for x in (cos, sin))
    if cos.shape[1] % _CHANNELS or not twice:
        return False
    wanted = [reference.rotate(x[:, :, 0], cos, sin, interleaved)[:, :, None] for x in plain[:2]]
    near = 2 * torch.finfo(cos.dtype).eps
    return all(torch.allclose(a, b, near, near * float(b.abs().max())) for a, b in zip(found, wanted, strict=True))
