# SPDX-License-Identifier: Apache-2.0
"""How long the parts of the attention phase take on a GPU: each in a CUDA graph over several layers, nothing in cache.

A part is timed as it runs in a step, once a layer, each layer with keys and values of its own. Between replays other
memory is read until the L2 holds nothing else, as weights leave it in a step, so that every read comes from memory. A
time is the median of replays over the number of layers.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.graph import replay_us
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.phase import AttentionPhase, Partials, Plan
from prr_pipeline.prr.synthetic import Motion, block_keys, head_queries, scored

_SIZE = 1 << 29  # bytes of keys and values of all layers that are timed, about
_LEAST = 8  # layers, so that starting a graph is a small part of its time
_OTHER = 1 << 26  # numbers of other memory: four times what the largest L2 holds
_REPLAYS = 21


def graph_us(body: Callable[[], object], replays: int = _REPLAYS) -> float:
    """Median microseconds of a replay of what body launches, with nothing of it in the L2."""
    other = torch.zeros(_OTHER, dtype=torch.float32, device="cuda")
    return replay_us(body, replays, other.sum)  # read, not written: what was written has to leave the L2 later


class PhaseTimes:
    """Times of one context.

    Args:
        method: the sparse method.
        layers, q_heads, kv_heads, head_dim: of the model; some layers are timed, fewer of a long context.
        context: tokens in the cache.
        motion, block_weight: of the synthetic queries and keys, see prr_pipeline.prr.synthetic.
        theta: of the predictor that has seen the last `rows` steps.
    """

    def __init__(
        self,
        method: SparseMethod,
        layers: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        dtype: torch.dtype,
        motion: Motion,
        block_weight: float,
        theta: tuple[float, float, float],
        seed: int,
        rows: int = 16,
    ):
        device = torch.device("cuda")
        a_layer = 2 * kv_heads * head_dim * context * dtype.itemsize
        count = min(layers - method.dense_layers, max(_LEAST, -(-_SIZE // a_layer)))
        self.skip = method.dense_layers
        self.cache = KVCache(method, count + self.skip, 1, kv_heads, head_dim, context, dtype, device)
        self.layers = range(self.skip, self.skip + count)
        self.phase = AttentionPhase(self.cache, q_heads)
        self.scale = head_dim**-0.5
        self.cache.set_length(context)
        gen = torch.Generator(device).manual_seed(seed)
        lens = torch.full((rows,), context, dtype=torch.int32, device=device)
        windows, queries = {}, []
        for layer in self.layers:
            at = self.cache.layers[layer]
            k = block_keys(gen, at.k, block_weight)[:, :, :context]
            self.cache.write(layer, k, torch.randn(k.shape, generator=gen, dtype=dtype, device=device))
            self.cache.rebuild(layer, context)
            q = head_queries(gen, q_heads, rows + 1, head_dim, motion).to(dtype)
            windows[layer] = scored(self.cache, layer, q[:, :, :rows], lens, self.scale)
            queries.append(q[:, :, rows].contiguous())
        self.windows, self.theta, self.queries = windows, theta, dict(zip(self.layers, queries, strict=True))

    def plan(self, width: int, repair: str = "exact") -> Plan:
        """A step's plan, with P of that width as it was predicted at the last row."""
        self.phase.warm(self.windows, dict.fromkeys(self.layers, self.theta), width)
        return Plan(True, width, repair)

    def _time(self, body: Callable[[int, Tensor], object]) -> float:
        def every() -> None:
            for layer in self.layers:
                body(layer, self.queries[layer])

        return round(graph_us(every) / len(self.layers), 3)

    def serial(self) -> dict[str, float]:
        """Of a step without speculation: scores, selection with them, attention over A alone, all in order; dense."""
        phase, cache = self.phase, self.cache

        def score(layer: int, q: Tensor) -> object:
            return phase.score(layer, cache.layers[layer], q, self.scale)

        def rank(layer: int, q: Tensor) -> ck.Selection:
            return phase.rank(layer, cache.layers[layer], q, self.scale)

        def attend(layer: int, q: Tensor) -> object:
            return phase.attend_chosen(cache.layers[layer], q, phase.selection(layer), self.scale)

        return {
            "score_us": self._time(score),
            "select_us": self._time(rank),
            "attend_all_us": self._time(attend),
            "serial_us": self._time(
                lambda layer, q: phase.attend_chosen(cache.layers[layer], q, rank(layer, q), self.scale)
            ),
            "dense_us": self._time(lambda layer, q: phase.dense(cache.layers[layer], q, self.scale)),
        }

    def speculative(self, width: int, repair: str = "exact") -> list[dict[str, float]]:
        """Of a step that speculates: attention over P and the repair alone, all side by side; blocks missed a KV head.

        One for each way to repair; halves: whether that is two launches.
        """
        phase, cache = self.phase, self.cache
        plan = self.plan(width, repair)

        def ahead(layer: int, q: Tensor) -> Partials:
            return phase.attend_ahead(plan, layer, cache.layers[layer], q, self.scale)

        ways = (False, True) if repair == "exact" else (False,)
        together = [self._together(replace(plan, halves=halves)) for halves in ways]
        ready = {layer: ahead(layer, q) for layer, q in self.queries.items()}  # one buffer: its values do not matter
        attend = self._time(ahead)

        def mend(halves: bool) -> float:
            chosen = replace(plan, halves=halves)
            return self._time(
                lambda layer, q: phase.mend(
                    chosen, cache.layers[layer], q, phase.selection(layer), ready[layer], self.scale
                )
            )

        counts = phase.counts[self.skip :].float().mean((0, 1, 2)).tolist()
        shared = {"attend_us": attend, "chosen": counts[0], "missed": counts[1]}
        return [
            {**shared, "repair_us": mend(halves), "prr_us": us, "halves": halves}
            for halves, us in zip(ways, together, strict=True)
        ]

    def _together(self, plan: Plan) -> float:
        at = self.cache.layers
        return self._time(lambda layer, q: self.phase.speculative(plan, layer, at[layer], q, self.scale))

    def bytes_read(self) -> dict[str, int]:
        """What a layer's scores, attention over A, and attention over all tokens must read at least."""
        at, m = self.cache.layers[self.layers[0]], self.phase.method
        token, tokens = self.cache.token_bytes, self.cache.length
        return {
            "score": sum(x.nbytes for x in at.meta.values()),
            "attend": min(tokens, m.budget_tokens) * token,
            "dense": tokens * token,
        }

    def predict(self, width: int) -> float:
        """Of learning and predicting in all layers, a layer's share; it changes what was learned."""
        plan = self.plan(width)
        return round(graph_us(lambda: self.phase.update_all(plan.width)) / len(self.layers), 3)


def read_bandwidth(size: int = 1 << 32) -> float:
    """Bytes a second that a plain reduction reads: the ceiling of everything above."""
    x = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    return size / (graph_us(x.sum, 11) * 1e-6)
