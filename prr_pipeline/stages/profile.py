# SPDX-License-Identifier: Apache-2.0
"""Stage profile: how long selection and speculative attention take by context and delta, and where a step's time goes.

It runs the ops of a decode step on random caches of the model's shape, and the model itself with attention left out.
What it finds holds for this model, method and machine. On a CPU the parts run one after the other; what a GPU does is
measured by prr_pipeline.stages.profile_gpu.
"""

import logging
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import cutlass_kernels as ck
from prr_pipeline.artifacts import StageFolder, write_json
from prr_pipeline.models.attention import attached, attention_modules, forward
from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.budget import DELTAS, Profiled, width
from prr_pipeline.prr.engine import threads
from prr_pipeline.prr.graphs import GraphEngine
from prr_pipeline.prr.predictor import LAST_SCORES, PredictorState
from prr_pipeline.stages import profile_gpu
from prr_pipeline.stages.job import Job
from prr_pipeline.tracking.progress import Progress

log = logging.getLogger(__name__)


def run(job: Job, folder: StageFolder, run: Any) -> None:
    """Measure, fit, and write profile.json."""
    # a model compiled under another number of threads would be compiled again for decode, which is nothing to a GPU
    with threads(job.runtime.step_threads if job.device == "cpu" else None):
        _profile(job, folder, run)


def _profile(job: Job, folder: StageFolder, run: Any) -> None:
    contexts = _contexts(job)
    deltas = sorted({*DELTAS, *getattr(job.budget, "deltas", [])} - {0})
    on_gpu = job.device == "cuda"
    if isinstance(job.engine, GraphEngine):
        job.engine.release()  # its cache may be most of the memory
    rows, breakdown = [], []
    with Progress("profile", len(contexts), unit="context") as bar:
        # before caches come and go: on memory that they have left, it was seen to read an eighth less
        ceiling = {"ceiling_tbs": profile_gpu.ceiling_tbs()} if on_gpu else {}
        linear = profile_gpu.linear_parts(job) if on_gpu else _linear_parts(job)
        whole = on_gpu and profile_gpu.whole_steps(job, contexts)
        for context in contexts:
            found, parts = (
                profile_gpu.measure(job, context, deltas, whole) if on_gpu else _measure(job, context, deltas)
            )
            rows += found
            breakdown.append({**parts, **linear})
            bar.update()
    policy = job.budget if isinstance(job.budget, Profiled) else Profiled()
    policy.fit(rows)
    profile = {
        "model": job.model_cfg.name,
        "dsa": job.method.name,
        "device": job.device_name(),
        "overlap": on_gpu,  # whether the two sides of a step ran at once, and rows say how long that took
        "rows": rows,
        "breakdown": breakdown,
        "regression": policy.regression(),
        "safe_delta": [{"context": c, "delta": policy.ratio(c)} for c in contexts],
        **ceiling,
    }
    write_json(folder / "profile.json", profile)
    for row in rows:
        run.log({"profile/" + k: v for k, v in row.items()})
    folder.finish(job.device_name(), {}, [folder / "profile.json"], {})


def _measure(job: Job, context: int, deltas: list[float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of one context by delta, and its breakdown; us a layer, one part after the other."""
    times = _LayerTimes(job, context)
    select = times.select()
    rows = [
        {"context": context, "delta": d, "select_us": select, "attend_us": times.attend(width(d, job.method.top_k))}
        for d in deltas
    ]
    parts = {"select_us": select, "attend_us": times.attend(job.method.top_k), **times.rest()}
    return rows, {"context": context, **parts}


def _contexts(job: Job) -> list[int]:
    """Those of the config, or of a quarter, half and all of the benchmark's length where the method selects."""
    if job.runtime.profile_contexts:  # checked by the job
        return sorted(set(job.runtime.profile_contexts))
    length = job.benchmark.length or job.model_cfg.max_context
    wanted = {length // 4, length // 2, length}
    if job.device == "cuda":  # cheap there: 4K, 8K, ... up to what the model takes, at most 1M
        wanted |= {1 << n for n in range(12, 21) if 1 << n <= job.model_cfg.max_context}
    return [c for c in sorted(wanted) if job.method.selects(job.method.dense_layers, c)]


def _microseconds(body: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call."""
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        body()
        if i:  # the first one warms up
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


class _LayerTimes:
    """The ops of one layer's decode step on a random cache of one length."""

    def __init__(self, job: Job, context: int):
        engine, self.method = job.engine, job.method
        self.repeats = job.runtime.profile_repeats
        shape = job.loaded.shape
        gen = torch.Generator(engine.device).manual_seed(job.cfg.seed + context)

        def noise(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen, device=engine.device).to(engine.dtype)

        self.cache = KVCache(self.method, 1, 1, shape.kv_heads, shape.head_dim, context, engine.dtype, engine.device)
        self.cache.set_length(context)
        self.cache.write(
            0, noise(1, shape.kv_heads, context, shape.head_dim), noise(1, shape.kv_heads, context, shape.head_dim)
        )
        self.cache.rebuild(0, context)
        self.at, self.lens = self.cache.layers[0], self.cache.seq_lens
        self.q = noise(1, shape.q_heads, shape.head_dim)
        self.scale = shape.head_dim**-0.5
        self.scores = torch.empty(1, shape.kv_heads, self.cache.num_blocks, device=engine.device)

    def _time(self, body: Callable[[], object]) -> float:
        return round(_microseconds(body, self.repeats), 3)

    def _choose(self, predicted: Tensor | None = None) -> ck.Selection:
        return self.method.rank_blocks(self.q, self.at.meta, self.lens, self.scale, self.scores, predicted)

    def select(self) -> float:
        """Scores and top-K."""
        return self._time(self._choose)

    def _ids(self, width: int) -> Tensor:
        self._choose()
        rule = (self.method.block_size, width, self.method.sink, self.method.local)
        return ck.select(self.scores, self.lens, *rule).ids

    def attend(self, width: int) -> float:
        """Partials of that many blocks a KV head."""
        ids = self._ids(width)
        return self._time(lambda: ck.attend(self.q, self.at.k, self.at.v, ids, self.lens, self.scale))

    def rest(self) -> dict[str, float]:
        """Repair of a tenth of A, and a prediction."""
        ids = self._ids(self.method.top_k)
        partials = ck.attend(self.q, self.at.k, self.at.v, ids, self.lens, self.scale)
        chosen = self._choose(ids)
        chosen.position[:, :, ::10] = -1
        state = PredictorState(self.method, self.scores, LAST_SCORES)
        repair = lambda: ck.repair(self.q, self.at.k, self.at.v, chosen, *partials, self.lens, self.scale)
        predict = lambda: state.update(self.scores, self.lens, self.method.top_k)
        return {"repair_us": self._time(repair), "predict_us": self._time(predict)}


def _linear_parts(job: Job) -> dict[str, float]:
    """Time a layer of the attention's projections, and of the rest of the layer (FFN, norms), attention left out."""
    model, engine = job.loaded.model, job.engine
    spent = {"attention": 0.0, "head": 0.0}
    started: dict[str, float] = {}

    def before(part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            started[part] = time.perf_counter()

        return hook

    def after(part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            spent[part] += time.perf_counter() - started[part]

        return hook

    def stub(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return q.transpose(1, 2).clone()

    parts: list[tuple[str, nn.Module]] = [("attention", m) for m in attention_modules(model)]
    head = model.get_output_embeddings()
    parts += [("head", head)] if head is not None else []
    ids = torch.zeros(1, 1, dtype=torch.long, device=engine.device)
    totals, attention = [], []
    with ExitStack() as stack, attached(model, stub):
        for part, module in parts:
            stack.callback(module.register_forward_pre_hook(before(part)).remove)
            stack.callback(module.register_forward_hook(after(part)).remove)
        for i in range(job.runtime.profile_repeats + 1):
            spent.update(attention=0.0, head=0.0)
            total = _once(model, ids)
            if i:  # the first one warms up
                totals.append(total - spent["head"] - spent["attention"])
                attention.append(spent["attention"])
    layers = job.loaded.shape.layers
    return {
        "qkv_us": round(statistics.median(attention) * 1e6 / layers, 3),
        "ffn_us": round(statistics.median(totals) * 1e6 / layers, 3),
    }


def _once(model: nn.Module, ids: Tensor) -> float:
    start = time.perf_counter()
    forward(model, ids, 0)
    return time.perf_counter() - start
