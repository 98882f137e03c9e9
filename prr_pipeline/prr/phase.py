# SPDX-License-Identifier: Apache-2.0
r"""The attention phase of a decode step on a device: one call a layer.

    append (with RoPE, where the model leaves it to that)
    rank: scores, and A of the highest
    beside it, partials = attend(P), unless the step is serial
    repair: merge(A: partials of A n P, and of A \ P computed now)
    behind the last layer's selection, P of the next step in all layers, on a stream that the end of the step joins

All but the prediction is one stream. Attention over P on a stream of its own would cost a join, a microsecond even if
nothing is left to wait for; and a kernel that polls for another stream instead is not safe: a GPU that several
processes share lets it run out its time slice, and starts nothing else meanwhile.

Nothing is allocated that another stream touches, and nothing asks the device: the phase can be captured into a CUDA
graph and replayed with other contents. On a CPU the same calls run one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.models.attention import Rope
from prr_pipeline.models.cache import KVCache, LayerCache
from prr_pipeline.prr.calibration import Window
from prr_pipeline.prr.predictor import LAST_SCORES, learn_and_predict

Stream = torch.cuda.Stream | None  # None on a CPU
Partials = tuple[Tensor, Tensor]

_ONE_LAUNCH = 128  # blocks of A up to which the repair in one launch is the faster one; more of them miss more
_WIDE = 256  # tokens of a block where all tokens are attended
_GROUP = 64  # parts of a first merge, at most


@dataclass(frozen=True)
class Plan:
    """What a step does; equal plans are one graph.

    sparse: the step selects, in all layers but the method's dense ones. width: blocks of P; 0 is serial.
    repair: exact | union. all_or_nothing: any miss recomputes all of A. learns: P of the next step is predicted.
    halves: the exact repair is two launches, not one; None: as the phase has it.
    """

    sparse: bool
    width: int = 0
    repair: str = "exact"
    all_or_nothing: bool = False
    learns: bool = False
    halves: bool | None = None


@contextmanager
def forked(side: Stream) -> Iterator[None]:
    """Run the calls within on another stream, after what the current one holds so far."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        yield


def join(side: Stream) -> None:
    """Let the current stream wait for another one."""
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)


class AttentionPhase:
    """Buffers for one cache.

    Args:
        cache: of all layers.
        q_heads: of the model.

    Attributes:
        halves: whether repairs are two launches, in plans that do not say.
    """

    logs = True  # ids, missed and counts hold what every step selected

    def __init__(self, cache: KVCache, q_heads: int):
        k = cache.layers[0].k
        self.cache, self.method, self.device = cache, cache.method, k.device
        self.group = q_heads // k.shape[1]
        B, H, N = k.shape[:3]
        L, K = len(cache.layers), self.method.top_k

        def ints(*shape: int) -> Tensor:
            return torch.full((L, B, H, *shape), -1, dtype=torch.int32, device=self.device)

        self.scores, self.level, self.trend = (
            torch.zeros(L, B, H, N, dtype=torch.float32, device=self.device) for _ in range(3)
        )
        self.theta = torch.zeros(L, B, 3, dtype=torch.float32, device=self.device)
        self.lens = torch.zeros(max(0, L - self.method.dense_layers), B, dtype=torch.int32, device=self.device)
        self.ids, self.position, self.missed, self.counts = ints(K), ints(K), ints(K), ints(2)
        self.predicted: dict[int, Tensor] = {}
        self._ints = ints
        self._partials: dict[tuple[object, ...], Partials] = {}
        self.queries = k.new_empty(B, q_heads, k.shape[4])  # after RoPE, where append makes it: of one layer at a time
        self.halves = K > _ONE_LAUNCH
        self.dense = _Dense(cache, self.group, self._buffers)
        self.learn: Stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def selection(self, layer: int) -> ck.Selection:
        """The buffers of A of a layer."""
        return ck.Selection(self.ids[layer], self.position[layer], self.missed[layer], self.counts[layer])

    def ahead(self, width: int) -> Tensor:
        """P of that width, [L, B, H_kv, width] int32: the buffer that steps of a plan read and write."""
        if width not in self.predicted:
            self.predicted[width] = self._ints(width)
        return self.predicted[width]

    def _buffers(self, name: str, *shape: int) -> Partials:
        """Partials [*shape, D] and [*shape] float32, the same ones for the same name and shape."""
        key = (name, *shape)
        if key not in self._partials:
            D = self.cache.layers[0].k.shape[4]
            o = torch.empty(*shape, D, dtype=torch.float32, device=self.device)
            self._partials[key] = o, torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._partials[key]

    # ------------------------------------------------------------------------------------------ predictor
    def warm(self, windows: dict[int, Window], thetas: dict[int, tuple[float, float, float]], width: int) -> None:
        """The state after a prompt's last rows; only the last row needs its P.

        thetas: by layer; a layer without one predicts its last scores.
        """
        self.level.fill_(float("nan"))
        self.trend.zero_()
        for layer, window in windows.items():
            theta = thetas.get(layer, LAST_SCORES)
            self.theta[layer] = torch.tensor(theta, device=self.device)
            rows = window.lengths.shape[0]
            for i in range(rows - 1 if theta == LAST_SCORES else 0, rows):
                lens = window.lengths[i : i + 1]
                self.update(layer, window.scores[i : i + 1], lens, width if i == rows - 1 else 0)

    def update(self, layer: int, scores: Tensor, seq_lens: Tensor, width: int) -> None:
        """Learn from scores [B, H_kv, N]; write P of the next step."""
        level, trend, theta = self.level[layer], self.trend[layer], self.theta[layer]
        learn_and_predict(self.method, scores, level, trend, theta, seq_lens, self.ahead(width)[layer])

    def update_all(self, width: int) -> None:
        """Learn from the step's scores in all layers that select; write P of the next step."""
        skip = self.method.dense_layers
        self.lens.copy_(self.cache.seq_lens)  # of every layer
        rows = self.scores, self.level, self.trend, self.theta, self.ahead(width)
        scores, level, trend, theta, ids = (x[skip:].flatten(0, 1) for x in rows)
        learn_and_predict(self.method, scores, level, trend, theta, self.lens.view(-1), ids)

    def repredict(self, layers: list[int], width: int) -> None:
        """P of another width from what was learned: scores that are not finite change nothing."""
        nothing = torch.full_like(self.scores[0], float("nan"))
        for layer in layers:
            self.update(layer, nothing, self.cache.seq_lens, width)

    # ------------------------------------------------------------------------------------------ one layer
    def run(
        self, plan: Plan, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, rope: Rope | None = None
    ) -> Tensor:
        """Append the step's token and attend. q: [B, Hq, D], k, v: [B, H_kv, D] -> [B, Hq, D], allocated.

        rope: if q and k come before RoPE.
        """
        rotary = None
        if rope is not None:
            rotary = ck.Rotary(q, rope.cos, rope.sin, rope.interleaved, self.queries)
            q = self.queries
        at = self.cache.append(layer, k, v, rotary)
        if not plan.sparse or layer < self.method.dense_layers:
            return self.dense(at, q, scale)
        return self.sparse(plan, layer, at, q, scale)

    def sparse(self, plan: Plan, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """Select, learn and attend, after the step's token was appended. q: [B, Hq, D] -> [B, Hq, D], allocated."""
        if plan.width:
            return self.speculative(plan, layer, at, q, scale)
        chosen = self.rank(layer, at, q, scale)
        self.predict(plan, layer)
        return self.attend_chosen(at, q, chosen, scale)

    def speculative(self, plan: Plan, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """Attention over P beside the top-K, and repair."""
        ids = self.ahead(plan.width)[layer]
        room = self._ahead(ids)  # before the ranking: it must not be memory that its launches still read
        chosen = self.rank(layer, at, q, scale, ids)
        partials = ck.attend(q, at.k, at.v, ids, self.cache.seq_lens, scale, out=room, beside=True)
        self.predict(plan, layer)
        return self.mend(plan, at, q, chosen, self._ready(plan, partials, q), scale)

    def predict(self, plan: Plan, layer: int) -> None:
        """Behind the last layer's selection, if the plan learns: P of the next step for all layers, in one launch.

        A launch a layer, beside repairs and linear layers, was measured to lengthen a step by .6 to 2.3 us a layer.
        This one runs beside the output layer.
        """
        if plan.learns and layer == len(self.cache.layers) - 1:
            with forked(self.learn):
                self.update_all(plan.width)

    def score(self, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """The scores of a layer's blocks, [B, H_kv, N]."""
        self.method.score(q, at.meta, self.cache.seq_lens, scale, self.scores[layer])
        return self.scores[layer]

    def rank(
        self, layer: int, at: LayerCache, q: Tensor, scale: float, predicted: Tensor | None = None
    ) -> ck.Selection:
        """Score and select: A of a layer, against P or nothing."""
        scores, lens, out = self.scores[layer], self.cache.seq_lens, self.selection(layer)
        return self.method.rank_blocks(q, at.meta, lens, scale, scores, predicted, out)

    def attend_ahead(self, plan: Plan, layer: int, at: LayerCache, q: Tensor, scale: float) -> Partials:
        """Partials of P, beside nothing; of a union, their merge."""
        ids = self.ahead(plan.width)[layer]
        partials = ck.attend(q, at.k, at.v, ids, self.cache.seq_lens, scale, out=self._ahead(ids))
        return self._ready(plan, partials, q)

    def _ahead(self, ids: Tensor) -> Partials:
        return self._buffers("ahead", *ids.shape, self.group)

    def _ready(self, plan: Plan, partials: Partials, q: Tensor) -> Partials:
        """What a repair reads of P."""
        return partials if plan.repair == "exact" else ck.merge(*partials, self._buffers("running", *q.shape[:2]))

    def attend_chosen(self, at: LayerCache, q: Tensor, chosen: ck.Selection, scale: float) -> Tensor:
        """Attention over A, selected against an empty P: all of it was missed."""
        return ck.merge(*self._attend_missed(at, q, chosen, scale), _fresh(q), early=True)[0]

    def mend(
        self, plan: Plan, at: LayerCache, q: Tensor, chosen: ck.Selection, ready: Partials, scale: float
    ) -> Tensor:
        """Attention over A (exact) or A u P (union) from what was computed ahead."""
        lens = self.cache.seq_lens
        if plan.repair == "union":
            return ck.repair_union(q, at.k, at.v, chosen, *ready, lens, scale)[0]
        halves = self.halves if plan.halves is None else plan.halves
        if not (plan.all_or_nothing or halves):
            return ck.repair(q, at.k, at.v, chosen, *ready, lens, scale, out=_fresh(q))[0]
        kept = all_or_nothing(chosen) if plan.all_or_nothing else chosen
        missed = self._attend_missed(at, q, kept, scale)
        return ck.merge_repaired(kept, *ready, *missed, _fresh(q), early=True)[0]

    def _attend_missed(self, at: LayerCache, q: Tensor, chosen: ck.Selection, scale: float) -> Partials:
        room = self._buffers("missed", *chosen.ids.shape, self.group)
        return ck.attend_missed(q, at.k, at.v, chosen, self.cache.seq_lens, scale, out=room)


def all_or_nothing(chosen: ck.Selection) -> ck.Selection:
    """S1 of the paper: a sequence with any miss uses none of its partials."""
    missed = chosen.counts[..., 1].amax(1)[:, None, None] > 0
    return chosen._replace(position=torch.where(missed, -1, chosen.position))


def _fresh(q: Tensor) -> Partials:
    """An output that the compiler may reuse for its own ends after it was read."""
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


class _Dense:
    """Attention over all tokens. Many blocks are taken wide and merged in two levels, few as a selection of all."""

    def __init__(self, cache: KVCache, group: int, buffers: Callable[..., Partials]):
        B, H, N, T, _ = cache.layers[0].k.shape
        self.cache, self.group, self.buffers, self.wide = cache, group, buffers, 1
        if N > 512:  # what one merge takes
            while T * self.wide < _WIDE and N % (2 * self.wide) == 0:
                self.wide *= 2
        parts = N // self.wide
        self.first = 1
        while self.wide > 1 and self.first < _GROUP and parts % (2 * self.first) == 0:
            self.first *= 2
        device = cache.layers[0].k.device
        self.ids = torch.arange(parts, dtype=torch.int32, device=device).expand(B, H, parts).contiguous()

    def __call__(self, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """q: [B, Hq, D] -> [B, Hq, D], allocated."""
        (B, H, parts), G = self.ids.shape, self.group
        o, lse = self.buffers("dense", B, H, parts, G)
        k, v = (x.view(B, H, parts, -1, x.shape[4]) for x in (at.k, at.v))
        ck.attend(q, k, v, self.ids, self.cache.seq_lens, scale, out=(o, lse))
        if self.first > 1:
            n = parts // self.first
            half = self.buffers("dense halfway", B, H * n * G)
            ck.merge(o.view(B, H * n, self.first, G, -1), lse.view(B, H * n, self.first, G), half)
            o, lse = (x.view(B, H, n, G, *x.shape[2:]) for x in half)
        return ck.merge(o, lse, _fresh(q), early=True)[0]
