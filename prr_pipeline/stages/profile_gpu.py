# SPDX-License-Identifier: Apache-2.0
"""What stage profile measures on a GPU: parts of a step in CUDA graphs, alone and side by side, and what they read.

Caches are synthetic; all that is timed does its real work on them. Beside every time stands what it reads a second, so
that the capacity left idle shows (the paper's figure 4).
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prr_pipeline.benchmarks.locality import Locality
from prr_pipeline.models.attention import attached, attention_modules
from prr_pipeline.prr import synthetic
from prr_pipeline.prr.budget import BudgetPolicy, Fixed, Off, width
from prr_pipeline.prr.engine import Mode
from prr_pipeline.prr.graphs import GraphEngine, step_function
from prr_pipeline.prr.sampling import Sampler
from prr_pipeline.prr.timing import PhaseTimes, graph_us, read_bandwidth
from prr_pipeline.prr.traffic import weight_bytes
from prr_pipeline.stages.job import Job

log = logging.getLogger(__name__)

_ROOM = 1.25  # metadata, what decode steps are fed, and what a cache has beyond its tokens, over keys and values

Row = dict[str, Any]


def whole_steps(job: Job, contexts: list[int]) -> bool:
    """Whether there is room for a whole cache of every context, which timing of steps needs."""
    shape, engine = job.loaded.shape, job.engine
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by torch, for what comes
    most = max(contexts)
    fits = most * token * _ROOM < free + kept
    if not fits:
        log.info("profile: no room for %d tokens in all layers: attention phases are timed, whole steps are not", most)
    return fits


def measure(job: Job, context: int, deltas: list[float], whole: bool) -> tuple[list[Row], Row]:
    """Rows of one context by delta, and its breakdown; us a layer (*_step_us: a step), TB/s.

    whole: time whole steps too. A row: select_us (scores and top-K) and attend_us (P), alone; repair_us; serial_us and
    prr_us, the whole attention phase without and with speculation; halves: whether the repair is two launches, because
    whole steps (without them: attention phases) took less; chosen and missed (blocks a KV head); serial_step_us and
    prr_step_us, whole steps. In the breakdown, predict_us is prediction alone, and predict_step_us what a step takes
    less without it: what of it is on the critical path, in all layers. score_us is the method's scores by themselves,
    which a selection that makes them itself (see SparseMethod.rank_blocks) does not launch.
    """
    times = _times(job, context)
    serial = times.serial()
    kept = {k: serial[k] for k in ("select_us", "serial_us")}
    found = [
        {"context": context, "delta": delta, **kept, **way}
        for delta in deltas
        for way in times.speculative(width(delta, job.method.top_k), job.runtime.repair)
    ]
    predict = times.predict(width(deltas[-1], job.method.top_k))
    read = times.bytes_read()
    del times  # its caches: the steps have theirs
    of_steps = {"predict_step_us": _steps(job, context, found)} if whole else {}
    rows = _faster(found)
    parts = {
        "select_us": serial["select_us"],
        "attend_us": serial["attend_all_us"],
        "repair_us": rows[-1]["repair_us"],
        "predict_us": predict,
        "score_us": serial["score_us"],
        "dense_us": serial["dense_us"],
        **of_steps,
    }
    for part in ("score", "attend", "dense"):
        parts[f"{part}_tbs"] = _tbs(read[part], parts[f"{part}_us"])
    return rows, {"context": context, **parts}


def _faster(rows: list[Row]) -> list[Row]:
    """Of each delta, the row of the way to repair that a step, or else an attention phase, took less with."""
    deltas = dict.fromkeys(row["delta"] for row in rows)
    took = lambda row: row.get("prr_step_us", row["prr_us"])
    return [min((row for row in rows if row["delta"] == delta), key=took) for delta in deltas]


@dataclass(kw_only=True)
class _Repairing(Fixed):
    """A delta, and whether its repair is two launches."""

    two: bool = False

    def halves(self, context: int, delta: float) -> bool:
        """As given."""
        return self.two


def _steps(job: Job, context: int, rows: list[Row]) -> float:
    """Add to each row the us of whole decode steps at the context: serial_step_us, and prr_step_us of its delta.

    Returns:
        how much less a step of the first row's width takes if nothing is predicted anew, both of them recomputing all
        of A for a single miss: a P that is never predicted anew misses more.
    """
    engine = job.engine
    assert isinstance(engine, GraphEngine)
    m, room = job.method, min(engine.how.burst + 1, max(2, context // 2))
    length = context - room if m.selects(m.dense_layers, context - room + 1) else context
    start = synthetic.prefill(engine, length, room, *_synthetic(job, context), job.cfg.seed, "profile")
    thetas = dict.fromkeys(range(engine.layers), _theta(job))

    def us(name: str, budget: BudgetPolicy, **changed: Any) -> float:
        mode, times = replace(Mode.build(name, job.runtime.repair, budget), **changed), []
        for _ in range(2):  # what else the machine does only adds
            steps = engine.decoder(start, mode, thetas).generate(Sampler(0, 1, 0, "profile"), room, set())
            times.append(statistics.fmean(s.stats.ms for s in steps if s.stats) * 1e3)
        return round(min(times), 3)

    serial = us("serial", Off())
    budgets = [_Repairing(name="profile", delta=r["delta"], two=r["halves"]) for r in rows]
    for row, budget in zip(rows, budgets, strict=True):
        row |= {"serial_step_us": serial, "prr_step_us": us("prr", budget)}
    alike = {"repair": "exact", "all_or_nothing": True}
    learning, not_learning = (us("prr", budgets[0], learns=learns, **alike) for learns in (True, False))
    engine.release()  # a next context's parts need its room
    return round(learning - not_learning, 3)


def _synthetic(job: Job, context: int) -> tuple[synthetic.Motion, float]:
    """Motion of the queries and block weight of the keys."""
    return job.motion(context), getattr(job.benchmark, "block_weight", Locality.block_weight)


def _theta(job: Job) -> tuple[float, float, float]:
    """The predictor's, if it is fixed; else the middle of the paper's grid, on which little depends."""
    alpha, beta, gamma = job.predictor.theta or job.predictor.late_theta
    return alpha, beta, gamma


def _times(job: Job, context: int) -> PhaseTimes:
    shape = job.loaded.shape
    return PhaseTimes(
        job.method,
        shape.layers,
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        context,
        job.engine.dtype,
        *_synthetic(job, context),
        _theta(job),
        job.cfg.seed,
    )


def linear_parts(job: Job) -> dict[str, float]:
    """Us a layer of the attention's projections and of the rest of the model (FFN, norms), attention left out; TB/s."""
    model, layers = job.loaded.model, job.loaded.shape.layers
    engine = job.engine
    assert isinstance(engine, GraphEngine)
    step = step_function(model, engine.how)
    # two tensors: a step compiled for one that is both would be compiled again for decode
    ids, positions = (torch.zeros(1, 1, dtype=torch.int64, device="cuda") for _ in range(2))

    def nothing(layer: int, q: Tensor, *_: Any) -> Tensor:
        return q.transpose(1, 2).clone()

    log.info("profile: compiling the model and building its CUDA graph")
    with torch.no_grad(), attached(model, nothing, rotates=True):
        total = graph_us(lambda: step(ids, positions))
    own = [p for m in attention_modules(model) for p in m.modules() if isinstance(p, nn.Linear)]
    head = model.get_output_embeddings()
    projections = graph_us(_each(own)) / layers
    rest = (total - (graph_us(_each([head])) if head is not None else 0.0)) / layers - projections
    return {
        "qkv_us": round(projections, 3),
        "ffn_us": round(rest, 3),
        "model_us": round(total, 3),
        "linear_tbs": _tbs(weight_bytes(model), total),
    }


def _each(modules: list[Any]) -> Callable[[], None]:
    """Run each on a token of its own width."""
    inputs = {m.in_features: torch.zeros(1, 1, m.in_features, dtype=m.weight.dtype, device="cuda") for m in modules}

    def body() -> None:
        with torch.no_grad():
            for m in modules:
                m(inputs[m.in_features])

    return body


def _tbs(size: float, us: float) -> float:
    return round(size / us * 1e-6, 3)


def ceiling_tbs() -> float:
    """What a plain reduction reads."""
    return round(read_bandwidth() * 1e-12, 3)
