# SPDX-License-Identifier: Apache-2.0
"""The block predictor: an exponential moving average of level and trend of each block's score (PRR, eq 2 and 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.errors import ConfigError

LAST_SCORES = (1.0, 1.0, 0.0)  # theta that predicts the last scores: what S1 and S2 of the paper reuse
OBJECTIVES = ("weighted", "overlap")


@dataclass(kw_only=True)
class EmaPredictor:
    """theta = (alpha, beta, gamma), fixed or found a prompt and layer by calibration over a grid (eq 5).

    late_theta: of layers that begin to select only while decoding, so that no prompt row could calibrate them; the
    middle of the paper's grid. Records name the layers that used it. A fixed theta holds for them, too.
    window: rows at the end of the prompt that calibration looks at and that warm the state up.
    objective: `weighted` is eq 4 (share of A's scores that P holds; rows with negative scores are shifted to be
    non-negative, since Quest's are signed), `overlap` the share of A's blocks. Both over dynamic blocks.
    """

    name: str = "ema"
    theta: list[float] | None = None
    alphas: list[float] = field(default_factory=lambda: [0.2, 0.4, 0.6, 0.8])
    betas: list[float] = field(default_factory=lambda: [0.1, 0.2, 0.3, 0.4, 0.5])
    gammas: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75])
    late_theta: list[float] = field(default_factory=lambda: [0.4, 0.3, 0.25])
    window: int = 64
    objective: str = "weighted"

    def check(self) -> None:
        """Raise ConfigError for values outside the ranges of eq 2 and 3."""
        fixed = {"theta": self.theta, "late_theta": self.late_theta}
        for key, theta in fixed.items():
            if theta is not None and len(theta) != 3:
                raise ConfigError(f"predictor.{key} has {len(theta)} values, expected alpha, beta, gamma")
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"predictor.objective = '{self.objective}', expected one of {', '.join(OBJECTIVES)}")
        if self.window < 2:
            raise ConfigError(f"predictor.window = {self.window} rows, expected at least 2 (one to predict from)")
        grids = {"alphas": self.alphas, "betas": self.betas, "gammas": self.gammas}
        if self.theta is not None:
            grids = _by_index("theta", self.theta)
        for triple in (grids, _by_index("late_theta", self.late_theta)):
            for (key, values), zero in zip(triple.items(), (False, False, True), strict=True):
                if not values or not all(0 < x <= 1 or (zero and x == 0) for x in values):
                    bounds = "[0, 1]" if zero else "(0, 1]"
                    raise ConfigError(f"predictor.{key} = {values}, expected values in {bounds}")

    def candidates(self) -> Tensor:
        """The grid, [C, 3] float32; the fixed theta alone if there is one."""
        rows = [tuple(self.theta)] if self.theta else list(product(self.alphas, self.betas, self.gammas))
        return torch.tensor(rows, dtype=torch.float32)


def _by_index(key: str, theta: list[float]) -> dict[str, list[float]]:
    return {f"{key}[{i}]": [x] for i, x in enumerate(theta)}


def learn_and_predict(
    method: SparseMethod, scores: Tensor, level: Tensor, trend: Tensor, theta: Tensor, seq_lens: Tensor, ids: Tensor
) -> None:
    """The op predict by the method's rule; a P without blocks, ids [B, H_kv, 0], has no forced ones either."""
    sink, local = (method.sink, method.local) if ids.shape[2] else (0, 0)
    ck.predict(scores, level, trend, theta, seq_lens, method.block_size, sink, local, ids)


class PredictorState:
    """Level and trend of every block of one layer, and the prediction for the next step.

    Args:
        method: gives the selection rule.
        like: scores [B, H_kv, N] float32 of the layer: their shape and device.
        theta: (alpha, beta, gamma).
    """

    def __init__(self, method: SparseMethod, like: Tensor, theta: Sequence[float]):
        self.method = method
        self.level = torch.full_like(like, float("nan"))
        self.trend = torch.zeros_like(like)
        self.theta = torch.tensor([list(theta)] * like.shape[0], dtype=torch.float32, device=like.device)
        self.ids = self._buffer(0)

    def _buffer(self, width: int) -> Tensor:
        return torch.full((*self.level.shape[:2], width), -1, dtype=torch.int32, device=self.level.device)

    def update(self, scores: Tensor, seq_lens: Tensor, width: int) -> None:
        """Learn from the scores of this step; `ids` becomes P of the next, [B, H_kv, width] int32."""
        if self.ids.shape[2] != width:
            self.ids = self._buffer(width)
        learn_and_predict(self.method, scores, self.level, self.trend, self.theta, seq_lens, self.ids)
