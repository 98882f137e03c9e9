# SPDX-License-Identifier: Apache-2.0
"""A decode step's linear layers, one row each, through the op `linear`; longer inputs go where they always went.

Layers that read the same row (q, k and v; gate and up) are one launch: their weights lie behind one another in memory,
the first to be called computes all of them, the others take their part.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

import cutlass_kernels as ck
from prr_pipeline.models import takeover

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # called in this order, with one input


def one_row(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one row that our ops take with that weight [.., K]: K long, of its dtype, and without a gradient."""
    graded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.dim() > 0 and x.numel() == x.shape[-1] == weight.shape[-1] and x.dtype == weight.dtype and not graded


class RowLinear(nn.Linear):
    """nn.Linear with another forward; an instance becomes one by its class, so that weights and hooks stay in place."""

    joint: ClassVar["Joint | None"] = None  # of an instance: what it is computed with
    place: ClassVar[int] = 0  # in the joint

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if not one_row(input, self.weight):
            return super().forward(input)
        row = self.joint.part(self.place, input) if self.joint is not None else None
        if row is None:
            row = ck.linear(input.reshape(1, -1), self.weight, self.bias)
        return row.view(*input.shape[:-1], self.out_features)


def is_served(layer: object) -> bool:
    """Whether it is a RowLinear whose weights the ops serve."""
    return type(layer) is RowLinear and takeover.served(layer.weight)


class Joint:
    """Linear layers of the same input, computed at once; afterwards the weight of each is a view of its rows here."""

    def __init__(self, layers: list[nn.Linear]):
        self.sizes = [m.out_features for m in layers]
        self.weight = torch.cat([m.weight.detach() for m in layers])
        biases = [m.bias.detach() for m in layers if m.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.source: Tensor | None = None  # the input that parts are of
        self.parts: tuple[Tensor, ...] = ()
        for name, joint in (("weight", self.weight), ("bias", self.bias)):
            if joint is not None:
                for m, rows in zip(layers, joint.split(self.sizes), strict=True):
                    setattr(m, name, nn.Parameter(rows, requires_grad=False))

    def whole(self, input: Tensor) -> Tensor:
        """The outputs [1, sum of N] of all layers, one behind another."""
        return ck.linear(input.reshape(1, -1), self.weight, self.bias)

    def part(self, place: int, input: Tensor) -> Tensor | None:
        """The output [1, N] of the layer at that place; None where the layers before it had another input.

        The same tensor is the same input: a model that writes to it between two of the layers is not served.
        """
        if place == 0:
            self.parts = self.whole(input).split(self.sizes, 1)
            self.source = input
        elif input is not self.source:
            return None
        part = self.parts[place]
        if place == len(self.sizes) - 1:
            self.source, self.parts = None, ()
        return part


def fast_linears(model: nn.Module) -> Callable[[], None]:
    """Make every plain nn.Linear of half precision on a GPU a RowLinear.

    Returns:
        a function that undoes it; weights stay where they are then.
    """
    found = [m for m in model.modules() if type(m) is nn.Linear and takeover.served(m.weight)]
    for module in found:
        module.__class__ = RowLinear
    for layers in _together(model, found):
        joint = Joint(layers)
        for place, module in enumerate(layers):
            module.__dict__.update(joint=joint, place=place)

    def undo() -> None:
        for module in found:
            module.__class__ = nn.Linear
            for key in ("joint", "place"):
                module.__dict__.pop(key, None)

    return undo


def _together(model: nn.Module, found: list[nn.Linear]) -> Iterator[list[nn.Linear]]:
    """Those of the found layers that are one launch: of one shape of input, with weights that no other module uses."""
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    own = {id(m): m for m in found if users[id(m.weight)] == 1}
    for parent in model.modules():
        for names in TOGETHER:
            named = (id(getattr(parent, name, None)) for name in names)
            layers = [own[key] for key in named if key in own]
            kinds = {(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in layers}
            if len(layers) == len(names) and len(kinds) == 1:
                yield layers
