# SPDX-License-Identifier: Apache-2.0
"""Serial decoding as others run it, timed beside ours: eager steps, and the paper's own baseline (its section 5).

The paper's: scores, torch's top-K, and FlashInfer's BlockSparseAttention planned a layer a step, as its users call it.
It takes our scores and our cache, which is in its favour. Its outputs are not ours to vouch for: FlashInfer attends to
whole blocks, also to what the last one does not hold yet.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prr_pipeline.models.cache import LayerCache
from prr_pipeline.prr.engine import Mode, Prefilled
from prr_pipeline.prr.graphs import GraphDecoder, GraphEngine, GraphRunner, step_function
from prr_pipeline.prr.phase import AttentionPhase, Plan

_WORKSPACE = 128 << 20  # bytes that FlashInfer asks for


def missing(name: str) -> str | None:
    """Why a baseline cannot run here, or None."""
    if name == "paper_serial" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'prr_pipeline[peers]')"
    return None


def decoder(name: str, engine: GraphEngine, start: Prefilled, serial: Mode) -> GraphDecoder:
    """A decoder of eager steps of mode serial: serial_eager is ours, paper_serial the paper's attention phase."""
    how = replace(engine.how, burst=1, compiled=False, captured=False)
    phase = AttentionPhase(start.cache, engine.q_heads)
    if name == "paper_serial":
        _zero_tail(start)
        phase = PaperPhase(start.cache, engine.q_heads)
    return GraphDecoder(GraphRunner(engine, phase, step_function(engine.model, how), how), start, serial, {})


def _zero_tail(start: Prefilled) -> None:
    """FlashInfer reads blocks whole, and unused places hold NaN."""
    cache, block = start.cache, start.tokens // start.cache.method.block_size
    for at in cache.layers:
        for x in (at.k, at.v):
            tokens = x[:, :, block:].flatten(2, 3)
            tokens[:, :, start.tokens % x.shape[3] :] = 0


class PaperPhase(AttentionPhase):
    """The attention phase by FlashInfer and torch; one step a burst, since it asks the host."""

    logs = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        from flashinfer.sparse import BlockSparseAttentionWrapper

        room = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self.device)
        self.wrapper = BlockSparseAttentionWrapper(room)
        at = self.cache.layers[0]
        q = at.k.new_zeros(1, self.group * at.k.shape[1], at.k.shape[4])
        first = torch.arange(min(self.method.top_k, at.k.shape[2]), dtype=torch.int32, device=self.device)
        self.attend(at, q, first.repeat(at.k.shape[1], 1), 1.0)  # FlashInfer compiles at its first call: not in a step

    def select(self, layer: int) -> Tensor:
        """A by torch: forced blocks first, the rest by top-K, [H_kv, K] int32 ascending."""
        m, scores = self.method, self.scores[layer][0]
        n = m.blocks(self.cache.length + 1)
        forced = scores[:, :n].clone()
        forced[:, : m.sink] = float("inf")
        forced[:, n - m.local :] = float("inf")
        return forced.topk(m.top_k).indices.sort().values.int()

    def sparse(self, plan: Plan, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """Score, select, plan, run; see AttentionPhase."""
        self.method.score(q, at.meta, self.cache.seq_lens, scale, self.scores[layer])
        return self.attend(at, q, self.select(layer), scale)

    def attend(self, at: LayerCache, q: Tensor, ids: Tensor, scale: float) -> Tensor:
        """Attention over blocks ids [H_kv, K], planned anew. A KV head is a row of FlashInfer's matrix."""
        _, H, N, T, D = at.k.shape
        ids = ids + torch.arange(H, dtype=torch.int32, device=self.device)[:, None] * N
        indptr = torch.arange(H + 1, dtype=torch.int32, device=self.device) * ids.shape[1]
        shape = (H, H * N * T, 1, T, self.group, 1, D)
        kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": q.dtype}
        self.wrapper.plan(indptr, ids.flatten(), *shape, sm_scale=scale, **kinds)
        k, v = (x.view(H * N * T, 1, D) for x in (at.k, at.v))
        return self.wrapper.run(q.view(H, self.group, D), k, v).view_as(q)
