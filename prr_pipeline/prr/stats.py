# SPDX-License-Identifier: Apache-2.0
"""What a decode step did: hits, misses and waste of the prediction, by layer, and times of its parts.

Rates are over dynamic blocks (those that no rule forces into A) and, beside them, over all of A. Counts are blocks a
(sequence, KV head).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import num_blocks
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.errors import ConfigError

PARTS = ("select", "attend", "repair", "predict")


@dataclass(frozen=True)
class LayerStats:
    """Sums over KV heads of one layer: sizes of A, of its dynamic part, of what P held and missed of them, of P."""

    heads: int
    chosen: int
    dynamic: int
    missed: int
    missed_dynamic: int
    predicted: int
    kept_dynamic: int | None  # of A's dynamic blocks, in the A before; None at the first step

    @classmethod
    def of(
        cls, chosen: ck.Selection, predicted: Tensor, before: Tensor | None, seq_lens: Tensor, method: SparseMethod
    ) -> "LayerStats":
        """Count; before: the ids of the step before, of the same layer."""
        last = None if before is None else before[None]
        sums = count(
            chosen.ids[None], chosen.missed[None], chosen.counts[None], predicted[None], last, seq_lens, method
        )
        return cls.of_sums(chosen.ids.shape[0] * chosen.ids.shape[1], sums[0].tolist(), before is not None)

    @classmethod
    def of_sums(cls, heads: int, sums: list[int], follows: bool) -> "LayerStats":
        """From a row of `count`; follows: whether there was a step before."""
        a, dyn, lost, lost_dyn, p, kept = sums
        return cls(heads, a, dyn, lost, lost_dyn, p, kept if follows else None)

    @property
    def wasted(self) -> int:
        """Blocks of P that A did not want."""
        return self.predicted - (self.chosen - self.missed)


def refuse_nan(found: Tensor, tokens: int, method: SparseMethod) -> None:
    """A block whose score is NaN is never selected: a method must not give one.

    found: [steps] bool, whether it did. tokens: in the cache at the first of these steps; each adds one.

    Raises:
        ConfigError: names the method and the first of them.
    """
    at = found.tolist()
    if True in at:
        cls, tokens = type(method), tokens + at.index(True)
        raise ConfigError(
            f"dsa={method.name} ({cls.__module__}.{cls.__qualname__}) gave NaN as a block's score at {tokens} tokens"
        )


def count(
    ids: Tensor,
    missed: Tensor,
    counts: Tensor,
    predicted: Tensor,
    before: Tensor | None,
    seq_lens: Tensor,
    method: SparseMethod,
) -> Tensor:
    """The sums of LayerStats for L layers at one step, on the device.

    Args:
        ids, missed, counts: of select, [L, B, H_kv, K | K | 2] int32.
        predicted: P, [L, B, H_kv, P] int32.
        before: ids of the step before, or None.
        seq_lens: [B] int32, tokens.

    Returns:
        [L, 6] int64: chosen, dynamic, missed, missed_dynamic, predicted, kept_dynamic (0 without a step before).
    """
    n = num_blocks(seq_lens, method.block_size)[:, None, None]

    def dynamic(x: Tensor) -> Tensor:
        return (x >= method.sink) & (x < n - method.local)

    free = dynamic(ids)
    kept = torch.zeros_like(free) if before is None else _found(ids, before) & free
    parts = (counts[..., 0], free, counts[..., 1], dynamic(missed) & (missed >= 0), predicted >= 0, kept)
    return torch.stack([x.flatten(1).sum(1) for x in parts], 1)


def _found(ids: Tensor, within: Tensor) -> Tensor:
    return (ids[..., :, None] == within[..., None, :]).any(-1)


@dataclass(frozen=True)
class StepStats:
    """One step: context (tokens, the new one included), time, parts of it, and its selecting layers.

    Steps of a CUDA graph have no parts: stage profile times those.
    """

    context: int
    wall_ms: float
    parts: dict[str, float]
    layers: dict[int, LayerStats]

    @property
    def ms(self) -> float:
        """Wall time without our own book-keeping."""
        return self.wall_ms - self.parts.get("stats", 0.0)

    def record(self) -> dict[str, float | None]:
        """The step's record: times in ms, rates in 0..1, blocks a (sequence, KV head, layer)."""
        row: dict[str, float | None] = {"context": self.context, "ms": self.ms}
        if self.parts:
            parts = {f"{p}_ms": self.parts.get(p, 0.0) for p in PARTS}
            row |= parts | {"other_ms": self.ms - sum(parts.values())}
        return row | rates(list(self.layers.values()))


def rates(layers: list[LayerStats]) -> dict[str, float | None]:
    """Rates and counts over some layers or steps; None where there was nothing to count.

    Where P is empty nothing was predicted: that is no miss, and only the overlap with the A before is counted.
    """
    ran = [x for x in layers if x.predicted]

    def total(name: str) -> int:
        return sum(getattr(x, name) for x in ran)

    def share(part: float, whole: float) -> float | None:
        return part / whole if whole else None

    kept = [x for x in layers if x.kept_dynamic is not None]
    overlap = share(sum(x.kept_dynamic or 0 for x in kept), sum(x.dynamic for x in kept))
    missed, heads = total("missed"), total("heads")
    return {
        "hit_dynamic": share(total("dynamic") - total("missed_dynamic"), total("dynamic")),
        "hit_all": share(total("chosen") - missed, total("chosen")),
        "missed": share(missed, heads),
        "wasted": share(total("wasted"), heads),
        "overlap_last": overlap,
    }
