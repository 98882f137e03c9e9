# SPDX-License-Identifier: Apache-2.0
"""Tensors with NaN in front of them and behind, which shows a read or a write outside of them."""

import torch
from torch import Tensor

EDGE = 1024


class Rooms:
    """Memory of bfloat16 on a GPU, each tensor in a room of its own."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []

    def inside(self, values: Tensor) -> Tensor:
        """A copy in the middle of a new room."""
        n = values.numel()
        room = torch.full((n + 2 * EDGE,), float("nan"), device="cuda", dtype=torch.bfloat16)
        room[EDGE : EDGE + n] = values.flatten()
        self.rooms.append(room)
        return room[EDGE : EDGE + n].view(values.shape)

    def edges_untouched(self) -> bool:
        return all(bool(r[:EDGE].isnan().all()) and bool(r[-EDGE:].isnan().all()) for r in self.rooms)

    def finite(self) -> bool:
        """Whether all tensors are."""
        return all(bool(r[EDGE:-EDGE].isfinite().all()) for r in self.rooms)
