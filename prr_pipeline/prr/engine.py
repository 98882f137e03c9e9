# SPDX-License-Identifier: Apache-2.0
"""Prefill and the decode step, in its modes: one prompt, one token at a time.

All modes run the same ops in the same order, so that they differ only in what they are meant to: which blocks were
attended ahead of the selection (P), and what is done about the rest. With exact repair every sparse mode yields the
bits of `serial`. The two sides of a step run one after the other here: times of parts are real on a CPU, overlap is
not there. On a GPU, prr_pipeline.prr.graphs runs the steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.models.attention import attached, forward
from prr_pipeline.models.cache import KVCache, LayerCache
from prr_pipeline.prr.budget import BudgetPolicy, Fixed, Off
from prr_pipeline.prr.calibration import Window
from prr_pipeline.prr.phase import all_or_nothing
from prr_pipeline.prr.predictor import LAST_SCORES, PredictorState
from prr_pipeline.prr.sampling import Sampler
from prr_pipeline.prr.stats import LayerStats, StepStats, refuse_nan
from prr_pipeline.prr.window import replay

Theta = tuple[float, float, float]


@dataclass(frozen=True)
class Mode:
    """What a mode does with a step.

    name: dense | serial | reuse | reuse_repair | prr.
    repair: exact | union.
    budget: width of P by context; `off` is serial.
    all_or_nothing: any miss recomputes all of A (S1).
    calibrated: theta from calibration; else P is what the last scores say.
    learns: P follows the scores; else it stays what the prompt's last scores made it, for one width of P only.
    repairing: the policy that knows how a repair is faster, so that modes of one delta repair alike; None: the budget.
    """

    name: str
    repair: str
    budget: BudgetPolicy
    all_or_nothing: bool = False
    calibrated: bool = False
    learns: bool = True
    repairing: BudgetPolicy | None = None

    @classmethod
    def build(cls, name: str, repair: str, budget: BudgetPolicy) -> "Mode":
        """The five modes of the paper's comparison (its S1, S2, S3 are reuse, reuse_repair, prr)."""
        same = Fixed(name="fixed", delta=1.0)
        modes = {
            "dense": cls("dense", "exact", Off()),
            "serial": cls("serial", "exact", Off()),
            "reuse": cls("reuse", "exact", same, all_or_nothing=True),
            "reuse_repair": cls("reuse_repair", repair, same, repairing=budget),
            "prr": cls("prr", repair, budget, calibrated=True),
        }
        return modes[name]


class Feed(NamedTuple):
    """What attention gets in decode steps in place of the model's own q, k, v.

    q: [layers, T, 1, Hq, D], k, v: [layers, T, 1, H_kv, D] of the model's dtype. first: position of the first of T.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first: int

    def at(self, layer: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one step: q [1, Hq, D], k and v [1, H_kv, D]."""
        i = position - self.first
        return self.q[layer, i], self.k[layer, i], self.v[layer, i]


@dataclass
class Prefilled:
    """A prompt in the cache, before the first decode step.

    cache: every prompt token is in it. logits: [1, vocab] after the last one. windows: scores of the last
    prompt rows by layer (layers that never select have none). ms: wall time of the prefill, the windows not counted;
    None where the model read nothing. feed: of synthetic runs, see prr_pipeline.prr.synthetic. tokens: of the prompt;
    the cache holds more while a decoder works in it.
    """

    cache: KVCache
    logits: Tensor
    windows: dict[int, Window]
    ms: float | None
    window_ms: float
    feed: Feed | None = None
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.cache.length

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        fed = sum(x.nbytes for x in self.feed[:3]) if self.feed else 0
        return self.cache.nbytes + sum(w.scores.nbytes for w in self.windows.values()) + fed


class Step(NamedTuple):
    """A generated token, and what feeding it did: None for the last one, whose logits are nobody's.

    digest: of the logits that feeding it gave; equal ones mean equal bits (see `digest`).
    """

    token: int
    stats: StepStats | None
    digest: int | None


class Generator(Protocol):
    """What decodes one sequence in one mode."""

    def generate(self, sampler: Sampler, limit: int, stops: set[int]) -> Iterator[Step]:
        """At most `limit` tokens, ended by one of `stops`, which is the last one then."""


def digest(logits: Tensor) -> Tensor:
    """64 bits that differ, but for a chance of about 2^-60, where the logits do. [1, vocab] -> [1] int64."""
    bits = logits.view({2: torch.int16, 4: torch.int32}[logits.element_size()])
    mixed = bits * _weights(bits.shape[1], logits.device)
    mixed ^= mixed >> 29  # or two sign bits could cancel: their differences are a few high bits each
    return mixed.sum(1)  # wraps around; the order does not matter


@cache
def _weights(n: int, device: torch.device) -> Tensor:
    gen = torch.Generator().manual_seed(n)
    return (torch.randint(-(2**62), 2**62, (n,), generator=gen) * 2 + 1).to(device)


class Engine:
    """Runs one model under one sparse method.

    Args:
        model: a transformers causal language model in eval mode.
        method: the sparse attention method.
        kv_heads, head_dim, layers: the model's shape.
        prefill_chunk: prompt tokens a forward pass.
        window: prompt rows that are scored for calibration.
        step_threads: CPU threads of a decode step; None leaves torch's.
    """

    copies = True  # a decoder works in a copy of the prompt's cache, which can be kept

    def __init__(
        self,
        model: nn.Module,
        method: SparseMethod,
        layers: int,
        kv_heads: int,
        head_dim: int,
        prefill_chunk: int = 2048,
        window: int = 64,
        step_threads: int | None = None,
    ):
        self.model, self.method = model, method
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.prefill_chunk, self.window, self.step_threads = prefill_chunk, window, step_threads
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.q_heads: int = model.config.num_attention_heads  # type: ignore[union-attr, assignment]

    def cache(self, tokens: int) -> KVCache:
        """An empty cache for one sequence of that many tokens."""
        shape = (self.layers, 1, self.kv_heads, self.head_dim)
        return KVCache(self.method, *shape, tokens, self.dtype, self.device)

    def prefill(self, prompt: list[int], room: int) -> Prefilled:
        """Dense prefill in chunks, and the scores of the last rows.

        Args:
            prompt: token ids, at least one.
            room: tokens that will be generated after it.
        """
        cache = self.cache(len(prompt) + room)
        handler = _Prefill(cache, self.window)
        ids = torch.tensor([prompt], device=self.device)
        start = self.now()
        with attached(self.model, handler):
            for at in range(0, len(prompt), self.prefill_chunk):
                chunk = ids[:, at : at + self.prefill_chunk]
                cache.set_length(at + chunk.shape[1])
                logits = forward(self.model, chunk, at)
        done = self.now()
        windows = self.replay(cache, handler.queries, handler.scale)
        return Prefilled(cache, logits, windows, (done - start) * 1e3, (self.now() - done) * 1e3)

    def now(self) -> float:
        """Seconds, all that was asked of the device being done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def replay(self, cache: KVCache, queries: dict[int, Tensor], scale: float) -> dict[int, Window]:
        """Windows of all layers that may select; see prr.window. queries: by layer, [B, Hq, W, D]."""
        with threads(self.step_threads):
            windows = {layer: replay(cache, layer, q, scale) for layer, q in queries.items()}
        return {layer: window for layer, window in windows.items() if window is not None}

    def decoder(self, start: Prefilled, mode: Mode, thetas: dict[int, Theta]) -> Generator:
        """A decoder of its own copy of the cache.

        Args:
            thetas: by layer, for modes that are calibrated.
        """
        return Decoder(self, start, mode, thetas)


class _Prefill:
    """Dense causal attention over the cache; keeps the last queries of each layer."""

    def __init__(self, cache: KVCache, window: int):
        self.cache, self.window = cache, window
        self.queries: dict[int, Tensor] = {}
        self.scale = 1.0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.write(layer, k, v)
        kept = torch.cat((self.queries[layer], q), 2) if layer in self.queries else q
        self.queries[layer] = kept[:, :, -self.window :].clone()
        self.scale = scale
        return causal_attention(q, keys, values, scale).transpose(1, 2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense attention of the last rows of a sequence. q: [B, Hq, T, D], k, v: [B, H_kv, L, D] -> [B, Hq, T, D]."""
    T, L = q.shape[2], k.shape[2]
    mask: Tensor | None = None
    if T != L and q.is_cuda:
        mask = causal_lower_right(T, L)  # not a tensor of T x L there: flash attention knows it
    elif T != L:
        mask = torch.ones(T, L, dtype=torch.bool, device=q.device).tril(L - T)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many CPU threads within; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Clock:
    """Wall time of the parts of a step, in ms."""

    ms: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the time within to a part."""
        start = time.perf_counter()
        yield
        self.ms[part] = self.ms.get(part, 0.0) + (time.perf_counter() - start) * 1e3


class Decoder:
    """Decodes one sequence in one mode; see Engine.decoder."""

    def __init__(self, engine: Engine, start: Prefilled, mode: Mode, thetas: dict[int, Theta]):
        self.engine, self.mode, self.method = engine, mode, engine.method
        self.cache = start.cache.clone()
        self.logits, self.feed = start.logits, start.feed
        self.clock = Clock()
        self.layer_stats: dict[int, LayerStats] = {}
        self.states: dict[int, PredictorState] = {}
        self.last_ids: dict[int, Tensor] = {}
        cache = self.cache
        shape = (1, engine.kv_heads, cache.num_blocks)
        self.scores = torch.empty(shape, dtype=torch.float32, device=engine.device)
        self.all_blocks = torch.arange(cache.num_blocks, dtype=torch.int32, device=engine.device).expand(shape)
        self.first = cache.length + 1  # tokens at the first step
        width = self._width(self.first)
        with threads(engine.step_threads):
            for layer, window in start.windows.items():
                theta = thetas[layer] if mode.calibrated and mode.budget.active else LAST_SCORES
                self.states[layer] = self._warm(window, theta, width)

    def _width(self, context: int) -> int:
        return self.mode.budget.blocks(self.method.top_k, context)

    def _warm(self, window: Window, theta: Theta, width: int) -> PredictorState:
        """The state after the prompt's last rows; only the last one needs its P."""
        state = PredictorState(self.method, window.scores[:1], theta)
        rows = window.lengths.shape[0]
        for i in range(rows - 1 if theta == LAST_SCORES else 0, rows):
            state.update(window.scores[i : i + 1], window.lengths[i : i + 1], width if i == rows - 1 else 0)
        return state

    def generate(self, sampler: Sampler, limit: int, stops: set[int]) -> Iterator[Step]:
        """See Generator."""
        logits = self.logits
        for i in range(limit):
            token = sampler(logits)
            if token in stops or i == limit - 1:
                yield Step(token, None, None)
                return
            logits, stats = self.step(token)
            yield Step(token, stats, int(digest(logits)))

    def step(self, token: int) -> tuple[Tensor, StepStats]:
        """Feed one token; logits [1, vocab] of the next, and what the step did."""
        cache, engine = self.cache, self.engine
        context = cache.length + 1
        self.clock, self.layer_stats = Clock(), {}
        ids = torch.tensor([[token]], device=engine.device)
        start = time.perf_counter()
        with threads(engine.step_threads), attached(engine.model, self._attention):
            cache.set_length(context)
            self.logits = forward(engine.model, ids, context - 1)
        ms = (time.perf_counter() - start) * 1e3
        return self.logits, StepStats(context, ms, dict(self.clock.ms), dict(self.layer_stats))

    def _attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self.feed is None:
            q, k, v = (x[:, :, 0].contiguous() for x in (q, k, v))
        else:
            q, k, v = self.feed.at(layer, self.cache.length - 1)
        with self.clock("append"):
            at = self.cache.append(layer, k, v)
        selects = self.mode.name != "dense" and self.method.selects(layer, self.cache.length)
        out = self._sparse(layer, at, q, scale) if selects else self._dense(at, q, scale)
        return out[:, None]

    def _dense(self, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        """The op over all blocks: bit for bit what a selection of all of them gives."""
        ids = self.all_blocks[:, :, : self.method.blocks(self.cache.length)].contiguous()
        with self.clock("attend"):
            partials = ck.attend(q, at.k, at.v, ids, self.cache.seq_lens, scale)
        return self._merge(q, *partials)

    def _merge(self, q: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        with self.clock("repair"):
            return ck.merge(o, lse, (torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)))[0]

    def _sparse(self, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        lens, method, state = self.cache.seq_lens, self.method, self.states[layer]
        learns = self.mode.budget.active and self.mode.learns
        if learns and layer not in self.last_ids and self.cache.length > self.first:  # steps were dense before: no news
            state.update(torch.full_like(self.scores, float("nan")), lens - 1, self._width(self.cache.length))
        predicted = state.ids
        speculates = predicted.shape[2] > 0
        if speculates:  # what runs beside the selection on a GPU
            with self.clock("attend"):
                partials = ck.attend(q, at.k, at.v, predicted, lens, scale)
        with self.clock("select"):
            chosen = method.rank_blocks(q, at.meta, lens, scale, self.scores, predicted)
        if not speculates:
            with self.clock("attend"):
                partials = ck.attend(q, at.k, at.v, chosen.ids, lens, scale)
            out = self._merge(q, *partials)
        elif self.mode.repair == "union":
            running = (q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32))
            with self.clock("attend"):
                ck.merge(*partials, running)
            with self.clock("repair"):
                out, _ = ck.repair_union(q, at.k, at.v, chosen, *running, lens, scale)
        else:
            with self.clock("repair"):
                kept = all_or_nothing(chosen) if self.mode.all_or_nothing else chosen
                out, _ = ck.repair(q, at.k, at.v, kept, *partials, lens, scale)
        with self.clock("stats"):
            refuse_nan(self.scores.isnan().any()[None], self.cache.length, method)
            self.layer_stats[layer] = LayerStats.of(chosen, predicted, self.last_ids.get(layer), lens, method)
            self.last_ids[layer] = chosen.ids
        with self.clock("predict"):
            if learns:
                state.update(self.scores, lens, self._width(self.cache.length + 1))
        return out
