# SPDX-License-Identifier: Apache-2.0
"""A decode step's MLPs, one row each: gate and up in one launch, the rest of it through the op silu_mul_linear.

An MLP is taken over by what it does, not by its name: its layers are called as Llama's or as GLM's are, and its own
forward must give what the two launches compute. Longer inputs go through that forward, as they always did.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cutlass_kernels as ck
from prr_pipeline.models.linear import RowLinear, is_served, one_row
from prr_pipeline.models.takeover import taken_over

PAIR, JOINT = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")


class RowMLP(nn.Module):
    """The forward of an MLP that was taken over; stands before its own class, which keeps all else."""

    down_proj: RowLinear

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        """[..., hidden] -> [..., hidden]; with anything else it is a call of its class."""
        first: Any = getattr(self, "gate_up_proj", None) or self.gate_proj
        alone = not (others or named)
        both = _gate_and_up(self, x) if alone and one_row(x, first.weight) else None
        if both is None:
            return super().forward(x, *others, **named)
        return ck.silu_mul_linear(both, self.down_proj.weight, self.down_proj.bias)


def _gate_and_up(module: Any, x: Tensor) -> Tensor | None:
    """Of one row, [..., 2 K]; None where no launch computes both."""
    if hasattr(module, "gate_up_proj"):
        return module.gate_up_proj(x)
    joint = getattr(module.gate_proj, "joint", None)
    return None if joint is None else joint.whole(x).view(*x.shape[:-1], sum(joint.sizes))


def fast_mlps(model: nn.Module) -> Callable[[], None]:
    """Make every MLP gated by SiLU a RowMLP, where fast_linears has taken over its layers before.

    Returns:
        a function that undoes it.
    """
    return taken_over([m for m in model.modules() if _is_mlp(m) and _computes_alike(m)], RowMLP)


def _is_mlp(module: Any) -> bool:
    """Whether it looks like one that is served: its layers, an activation, and gate and up in one launch."""
    names = JOINT if hasattr(module, "gate_up_proj") else PAIR
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if isinstance(module, RowMLP) or _activation(module) is None or not all(_is_plain(x) for x in layers):
        return False
    *first, down = layers
    if len(first) == 2 and (first[0].joint is None or first[0].joint is not first[1].joint):
        return False
    return {len(first) * x.out_features for x in first} == {2 * down.in_features}


def _is_plain(layer: Any) -> bool:
    """Whether it is a RowLinear that is served, and no hook of it is lost where it is not called itself."""
    return is_served(layer) and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _activation(module: Any) -> Any:
    found = [getattr(module, name, None) for name in ("act_fn", "activation_fn")]
    return next((f for f in found if callable(f)), None)


@torch.no_grad()
def _computes_alike(module: Any) -> bool:
    """Whether its activation is SiLU, and a row of noise, small or large, gets the bits of down(silu(gate) * up)."""
    first, down = getattr(module, "gate_up_proj", None) or module.gate_proj, module.down_proj
    noise = torch.randn(1, 1, first.in_features, generator=torch.Generator().manual_seed(0))
    for scale in (1, 16):  # some clamp what is large
        row = (noise * scale).to(first.weight)
        both: Any = _gate_and_up(module, row)
        gate, up = both.chunk(2, -1)
        silu = nn.functional.silu(gate)
        try:
            found, active = module.forward(row), _activation(module)(gate)
        except Exception:  # it takes more than a row
            return False
        wanted = down(silu * up)
        if not all(isinstance(x, Tensor) and torch.equal(x, y) for x, y in ((active, silu), (found, wanted))):
            return False
    return True
