# SPDX-License-Identifier: Apache-2.0
"""A decode step's linear layers, one row each, through the op `linear`; longer inputs go where they always went."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import cutlass_kernels as ck


class RowLinear(nn.Linear):
    """nn.Linear with another forward; an instance becomes one by its class, so that weights and hooks stay in place."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if input.numel() != self.in_features:
            return super().forward(input)
        row = ck.linear(input.reshape(1, -1), self.weight, self.bias)
        return row.view(*input.shape[:-1], self.out_features)


def fast_linears(model: nn.Module) -> Callable[[], None]:
    """Make every plain nn.Linear of half precision on a GPU a RowLinear.

    Returns:
        a function that undoes it.
    """
    found = [m for m in model.modules() if type(m) is nn.Linear and _served(m.weight)]
    for module in found:
        module.__class__ = RowLinear

    def undo() -> None:
        for module in found:
            module.__class__ = nn.Linear

    return undo


def _served(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
