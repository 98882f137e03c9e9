# SPDX-License-Identifier: Apache-2.0
"""The decode step on a GPU: the compiled model and the attention phase in one CUDA graph a plan, replayed in bursts.

A burst is some steps in a row without a host sync: tokens are drawn inside the graph and fed to the next step, and what
a step did is written to a log on the device that the host reads after the burst. Modes decode from one cache, which is
rewound between them. Off a GPU, or with capture off, the same steps run eagerly.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cutlass_kernels.graph import recorded
from prr_pipeline.models.attention import Rope, attached
from prr_pipeline.models.cache import KVCache
from prr_pipeline.models.linear import fast_linears
from prr_pipeline.models.mlp import fast_mlps
from prr_pipeline.models.norm import adds_fused, fast_norms
from prr_pipeline.models.rope import fast_rope
from prr_pipeline.prr.engine import Engine, Feed, Generator, Mode, Prefilled, Step, Theta, digest
from prr_pipeline.prr.phase import AttentionPhase, Plan, forked, join
from prr_pipeline.prr.sampling import Sampler, draw
from prr_pipeline.prr.stats import LayerStats, StepStats, count, refuse_nan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphOptions:
    """How steps are run.

    burst: steps between host syncs, at most. compiled: the model through torch.compile. captured: steps as CUDA graphs.
    linears: the model's linear layers, norms, MLPs and RoPE through our ops where they see one token; the model keeps
        them.
    """

    burst: int = 32
    compiled: bool = True
    captured: bool = True
    linears: bool = True


class _Log:
    """What the steps of a burst did; slot i of every tensor is its i-th step."""

    def __init__(self, phase: AttentionPhase, burst: int):
        def like(x: Tensor) -> Tensor:
            return torch.empty(burst, *x.shape, dtype=x.dtype, device=x.device)

        def words() -> Tensor:
            return torch.zeros(burst, dtype=torch.int64, device=phase.device)

        self.tokens, self.digests = words(), words()
        self.nan = torch.zeros(burst, dtype=torch.bool, device=phase.device)  # whether a score was
        self.ids, self.missed, self.counts = like(phase.ids), like(phase.missed), like(phase.counts)
        self.slot = torch.zeros(1, dtype=torch.int64, device=phase.device)


class GraphRunner:
    """Everything that lives as long as a cache: buffers, graphs, the log.

    Args:
        engine: model and method.
        phase: of the cache that all decoders will share.
        model: maps (ids [1, 1], positions [1, 1]) to logits [1, vocab], with our attention inside.
    """

    def __init__(
        self, engine: Engine, phase: AttentionPhase, model: Callable[[Tensor, Tensor], Tensor], how: GraphOptions
    ):
        self.engine, self.phase, self.cache, self.model, self.how = engine, phase, phase.cache, model, how
        device = engine.device
        self.log = _Log(self.phase, how.burst)
        self.token, self.position = (torch.zeros(1, 1, dtype=torch.int64, device=device) for _ in range(2))
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # steps since the prompt
        self.uniforms = torch.zeros(1, dtype=torch.float64, device=device)
        self.feed: Feed | None = None
        self.fed: list[Tensor] = []
        self.plan = Plan(sparse=False)
        self.temperature, self.top_p = 0.0, 1.0
        self._still_rope: Rope | None = None
        self._ahead_log: dict[int, Tensor] = {}
        self._graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    # ------------------------------------------------------------------------------------------ one step
    def step(self) -> None:
        """One step of the plan, on whatever is in the buffers; nothing is asked of the device."""
        phase, plan, book = self.phase, self.plan, self.log
        self.cache.seq_lens.add_(1)
        if plan.sparse:
            with forked(phase.learn):  # which writes the next P there, after this
                self.ahead_log(plan.width).index_copy_(0, book.slot, phase.ahead(plan.width)[None])
        if self.feed is not None:
            self.fed = [x.index_select(1, self.count)[:, 0] for x in self.feed[:3]]
        logits = self.model(self.token, self.position)
        with forked(phase.learn):  # beside the draw
            self._note(plan, logits)
        u = None if self.temperature == 0 else self.uniforms.index_select(0, self.count)
        self.token.copy_(draw(logits, u, self.temperature, self.top_p)[:, None])
        book.tokens.index_copy_(0, book.slot, self.token[0])
        join(phase.learn)
        for x in (self.position, self.count, book.slot):
            x.add_(1)

    def _note(self, plan: Plan, logits: Tensor) -> None:
        """Into the log: what the step did, but for its token."""
        book, phase = self.log, self.phase
        book.digests.index_copy_(0, book.slot, digest(logits))
        if plan.sparse and phase.logs:
            for kept, now in ((book.ids, phase.ids), (book.missed, phase.missed), (book.counts, phase.counts)):
                kept.index_copy_(0, book.slot, now[None])

    def ahead_log(self, width: int) -> Tensor:
        """Where a burst's P are kept."""
        if width not in self._ahead_log:
            ahead = self.phase.ahead(width)
            self._ahead_log[width] = ahead.new_empty(self.how.burst, *ahead.shape)
        return self._ahead_log[width]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, rope: Rope | None) -> Tensor:
        """The handler of the model's attention layers."""
        if self.feed is None:
            q, k, v = (x[:, :, 0].contiguous() for x in (q, k, v))
        else:
            q, k, v = (x[layer] for x in self.fed)
            rope = self._still(rope)
        out = self.phase.run(self.plan, layer, q, k, v, scale, rope)[:, None]
        if self.plan.sparse and self.phase.logs and layer == self.engine.layers - 1:
            with forked(self.phase.learn):  # beside what is left of the model
                self.log.nan.index_copy_(0, self.log.slot, self.phase.scores.isnan().any()[None])
        return out

    def _still(self, rope: Rope | None) -> Rope | None:
        """A rotation by nothing, of as much work: synthetic queries and keys are what they are behind RoPE."""
        if rope is None:
            return None
        if self._still_rope is None:
            self._still_rope = Rope(torch.ones_like(rope.cos), torch.zeros_like(rope.sin), rope.interleaved)
        return self._still_rope

    # ------------------------------------------------------------------------------------------ bursts
    def prepare(self, start: Prefilled, sampler: Sampler, limit: int, plans: list[Plan]) -> None:
        """Buffers and the graphs of all plans, before a first burst; the cache must be rewound after it."""
        join(self.phase.learn)  # an interrupted step may have left work there
        self.temperature, self.top_p = sampler.temperature, sampler.top_p
        self._take_feed(start.feed)
        if self.uniforms.numel() < limit:
            self.uniforms = torch.zeros(limit, dtype=torch.float64, device=self.engine.device)
            self._graphs.clear()
        for self.plan in dict.fromkeys(plans):
            self.ahead_log(self.plan.width)
            if self.how.captured and self._key() not in self._graphs:
                self._capture(start.tokens)
        self.plan = plans[0] if plans else self.plan

    def turn(self, plan: Plan, layers: list[int]) -> None:
        """Go on by another plan; its P has another width. layers: those that learn."""
        if plan.learns and plan.width != self.plan.width:
            self.phase.repredict(layers, plan.width)
        self.plan = plan

    def _take_feed(self, feed: Feed | None) -> None:
        """Synthetic steps read their q, k, v where the graphs expect them."""
        if feed is None or self.feed is None or feed.q.shape != self.feed.q.shape:
            if feed is not self.feed:
                self._graphs.clear()
            self.feed = feed
        elif feed is not self.feed:
            for kept, new in zip(self.feed[:3], feed[:3], strict=True):
                kept.copy_(new)

    def _key(self) -> tuple[object, ...]:
        return self.plan, self.temperature, self.top_p

    def _capture(self, length: int) -> None:
        """Run a step once (compilation, loading of kernels), then record one. Leaves the cache to be rewound.

        A first replay is slower than those behind it, so that it is done here: all modes shall begin alike.
        """
        begin = time.perf_counter()
        log.info("decode: building the CUDA graph of %s", self.plan)
        self.place(length)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = self._graphs[self._key()] = recorded(lambda: self._eager(1), self._pool)
        self.place(length)
        graph.replay()
        log.info("decode: graph ready after %.1f s", time.perf_counter() - begin)

    def place(self, length: int) -> None:
        """Point the next step at a position, the first of them after a prompt."""
        self.cache.set_length(length)
        self.position.fill_(length)
        self.count.zero_()
        self.log.slot.zero_()

    def burst(self, steps: int) -> tuple[float, list[int], list[int]]:
        """Run steps of the plan.

        Returns:
            ms of a step (the burst's mean), tokens drawn, digests of the logits.
        """
        self.log.slot.zero_()
        ms = self._timed(self._replay if self.how.captured else self._eager, steps)
        self.cache.length += steps
        both = torch.stack((self.log.tokens[:steps], self.log.digests[:steps])).tolist()
        return ms / steps, both[0], both[1]

    def _replay(self, steps: int) -> None:
        graph = self._graphs[self._key()]
        for _ in range(steps):
            graph.replay()

    def _eager(self, steps: int) -> None:
        with torch.no_grad(), attached(self.engine.model, self.attention, rotates=True):
            for _ in range(steps):
                self.step()

    def _timed(self, body: Callable[[int], None], steps: int) -> float:
        """Milliseconds: of the device on a GPU, of the wall elsewhere."""
        if self.engine.device.type != "cuda":
            begin = time.perf_counter()
            body(steps)
            return (time.perf_counter() - begin) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body(steps)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def layers(self, steps: int, context: int, before: Tensor | None) -> list[dict[int, LayerStats]]:
        """What the layers of each of a burst's steps did; context: tokens at the first of them."""
        if not (self.plan.sparse and self.phase.logs):
            return [{} for _ in range(steps)]
        book, ahead = self.log, self.ahead_log(self.plan.width)
        refuse_nan(book.nan[:steps], context, self.phase.method)
        lens = torch.arange(context, context + steps, dtype=torch.int32, device=self.engine.device)
        sums = []
        for i in range(steps):
            what = (book.ids[i], book.missed[i], book.counts[i], ahead[i], book.ids[i - 1] if i else before)
            sums.append(count(*what, lens[i : i + 1], self.phase.method))
        heads = book.ids.shape[2] * book.ids.shape[3]
        skip = self.phase.method.dense_layers
        rows = torch.stack(sums).tolist()
        return [
            {
                layer: LayerStats.of_sums(heads, row, bool(i) or before is not None)
                for layer, row in enumerate(step)
                if layer >= skip
            }
            for i, step in enumerate(rows)
        ]


class GraphDecoder:
    """Decodes one sequence in one mode; the cache is rewound to the end of the prompt first.

    Args:
        runner: of the prompt's cache.
        start: the prompt. mode, thetas: as for Engine.decoder.
    """

    def __init__(self, runner: GraphRunner, start: Prefilled, mode: Mode, thetas: dict[int, Theta]):
        self.runner, self.start, self.mode = runner, start, mode
        self.method = runner.phase.method
        self.thetas = thetas if mode.calibrated and mode.budget.active else {}

    def _plans(self, limit: int) -> list[Plan]:
        """What each step does, given the tokens in the cache at it, its own included."""
        contexts = range(self.start.tokens + 1, self.start.tokens + limit)
        m, mode = self.method, self.mode
        selects = [mode.name != "dense" and m.selects(m.dense_layers, c) for c in contexts]
        widths = [mode.budget.blocks(m.top_k, c) if s else 0 for s, c in zip(selects, contexts, strict=True)]
        learns = mode.learns and any(widths)
        serial = Plan(True, learns=learns)
        return [
            (Plan(True, w, mode.repair, mode.all_or_nothing, learns, self._halves(c)) if w else serial)
            if s
            else Plan(False)
            for s, w, c in zip(selects, widths, contexts, strict=True)
        ]

    def _halves(self, context: int) -> bool | None:
        """How the policy repairs, where there is a choice: equal plans are one graph."""
        mode = self.mode
        choice = mode.repair == "exact" and not mode.all_or_nothing
        return (mode.repairing or mode.budget).halves(context, mode.budget.ratio(context)) if choice else None

    def generate(self, sampler: Sampler, limit: int, stops: set[int]) -> Iterator[Step]:
        """Tokens and what their steps did; see Decoder.generate."""
        runner, start = self.runner, self.start
        plans = self._plans(limit)
        runner.prepare(start, sampler, limit, plans)
        runner.cache.rewind(start.tokens)
        runner.phase.warm(start.windows, self.thetas, plans[0].width if plans else 0)
        u = None if sampler.greedy else sampler.uniforms(limit).to(runner.engine.device)
        token = draw(start.logits, None if u is None else u[:1], sampler.temperature, sampler.top_p)
        if u is not None:
            runner.uniforms[: limit - 1] = u[1:]
        runner.place(start.tokens)
        runner.token.copy_(token[:, None])
        yield from self._steps(int(token), plans, stops)

    def _steps(self, token: int, plans: list[Plan], stops: set[int]) -> Iterator[Step]:
        runner, done = self.runner, 0
        before: Tensor | None = None
        while token not in stops and done < len(plans):
            runner.turn(plans[done], list(self.start.windows))
            steps = self._alike(plans[done : done + runner.how.burst])
            context = self.start.tokens + done + 1
            ms, tokens, digests = runner.burst(steps)
            layers = runner.layers(steps, context, before)
            before = runner.log.ids[steps - 1].clone() if runner.plan.sparse else None
            for i in range(steps):
                yield Step(token, StepStats(context + i, ms, {}, layers[i]), digests[i])
                token = tokens[i]
                if token in stops:
                    break
            done += steps
        yield Step(token, None, None)

    @staticmethod
    def _alike(plans: list[Plan]) -> int:
        """How many of the first plans are the same."""
        return next((i for i, p in enumerate(plans) if p != plans[0]), len(plans))


class GraphEngine(Engine):
    """An engine whose decoders replay graphs on one shared cache, which the next prompt takes over."""

    copies = False

    def __init__(self, *args: Any, how: GraphOptions, **options: Any):
        super().__init__(*args, **options)
        self.how = how
        if how.linears:
            fast_linears(self.model)
            fast_norms(self.model)
            fast_mlps(self.model)
            fast_rope(self.model)
        self._arena: KVCache | None = None
        self._runner: GraphRunner | None = None

    def cache(self, tokens: int) -> KVCache:
        """The shared cache, emptied; a new one where it is too small or four times too large."""
        if self._arena is None or not tokens <= self._arena.capacity <= 4 * _roomy(tokens):
            self.release()
            self._arena = super().cache(_roomy(tokens))
        self._arena.set_length(0)
        return self._arena

    def release(self) -> None:
        """Give the cache and what was built on it back to the device."""
        self._arena = self._runner = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def decoder(self, start: Prefilled, mode: Mode, thetas: dict[int, Theta]) -> Generator:
        """A decoder that works in the shared cache; one at a time."""
        if start.cache is not self._arena:
            raise RuntimeError("the prompt is no longer in the cache: another one was prefilled after it")
        if self._runner is None or self._runner.cache is not start.cache:
            phase = AttentionPhase(start.cache, self.q_heads)
            self._runner = GraphRunner(self, phase, step_function(self.model, self.how), self.how)
        return GraphDecoder(self._runner, start, mode, thetas)


def _roomy(tokens: int) -> int:
    """A size that similar prompts share: at most an eighth more, from 2048 tokens on."""
    step = max(2048, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def step_function(model: nn.Module, how: GraphOptions) -> Callable[[Tensor, Tensor], Tensor]:
    """Token ids [1, 1], positions [1, 1] -> logits [1, vocab]; compiled once a model, whatever its attention does."""
    kept = f"_prr_step_{how.compiled}"
    if not hasattr(model, kept):

        def one(ids: Tensor, positions: Tensor) -> Tensor:
            out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
            return out.logits[:, -1]

        if how.compiled:  # its kernels, like ours, come up while the one in front of them ends
            options = {"triton.enable_pdl": True, "combo_kernels": True, "post_grad_custom_pre_pass": adds_fused()}
            step = torch.compile(one, fullgraph=True, dynamic=False, options=options)
        setattr(model, kept, step if how.compiled else one)
    return getattr(model, kept)
