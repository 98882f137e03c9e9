# SPDX-License-Identifier: Apache-2.0
"""What the benchmark is held against, called as its users call it, in the same process and over inputs as cold.

flashinfer: BlockSparseAttentionWrapper over one query and blocks of C tokens; `run()` alone in a CUDA graph, and
`plan()` + `run()`, which is what a selection that changes every step costs. torch: the same function in tensor ops.
"""

import statistics
import time
from collections.abc import Callable

import torch

import cutlass_kernels as ck
from cutlass_kernels import reference
from cutlass_kernels.bench_cases import (
    DELTA,
    Case,
    Inputs,
    _quest_metadata,
    _score_sets,
    calibrate_inputs,
    gated_inputs,
    linear_inputs,
    norm_inputs,
)

Timer = Callable[[Callable[[int], object], int], float]  # (call, number of sets) -> us


def flashinfer(case: Case, timer: Timer) -> dict[str, float]:
    """Rows' keys flashinfer_us and flashinfer_plan_us.

    Raises:
        ImportError: not installed.
    """
    from flashinfer.sparse import BlockSparseAttentionWrapper

    x = Inputs(case)
    shape = (case.context, case.kv_heads, case.head_dim)
    caches = [(x.normal(*shape)[0], x.normal(*shape)[0]) for _ in range(3)]
    n = case.top_k
    start = torch.tensor([0, n], dtype=torch.int32, device="cuda")
    heads = (case.q_heads, case.kv_heads, case.head_dim)
    types = {"q_data_type": x.dtype, "kv_data_type": x.dtype, "o_data_type": x.dtype}
    wrappers = []
    for _ in range(8):
        wrapper = BlockSparseAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
        ids = torch.randperm(case.blocks, device="cuda")[:n].sort().values.int()
        plan = lambda w=wrapper, j=ids: w.plan(start, j, 1, case.context, 1, case.block, *heads, **types)
        plan()
        wrappers.append((wrapper, plan))
    run = lambda i: wrappers[i % 8][0].run(x.q, *caches[i % 3])
    us = timer(run, 24)
    planned = []
    for i in range(24):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrappers[i % 8][1]()
        run(i)
        torch.cuda.synchronize()
        planned.append((time.perf_counter() - begin) * 1e6)
    return {"flashinfer_us": us, "flashinfer_plan_us": statistics.median(planned)}


def _replay(case: Case) -> float:
    """Microseconds of the reference on the GPU, its second run; no graph, since it asks the device for lengths."""
    args = calibrate_inputs(case)
    out = ck.replay_hits(*args)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        reference.replay_hits(*args, **out._asdict())
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return times[-1]


def plain_torch(case: Case, timer: Timer) -> dict[str, float]:
    """Row's key torch_us: gather and scaled_dot_product_attention, torch.topk, or elementwise ops, in a CUDA graph."""
    if case.op == "linear":
        row, weights = linear_inputs(case)
        return {"torch_us": timer(lambda i: torch.nn.functional.linear(row, weights[i % len(weights)]), len(weights))}
    if case.op in ("add_rms_norm", "norm_linear"):
        rows, scale = norm_inputs(case)
        add = lambda i: rows[i % len(rows)] + rows[i % len(rows) - 1]
        norm = lambda i: torch.nn.functional.rms_norm(add(i), scale.shape, scale, 1e-5)
        if case.op == "add_rms_norm":
            return {"torch_us": timer(norm, len(rows))}
        weights = linear_inputs(case)[1]
        return {"torch_us": timer(lambda i: torch.nn.functional.linear(norm(i), weights[i % len(rows)]), len(rows))}
    if case.op == "silu_linear":
        both, weights = gated_inputs(case)
        gate, up = both.chunk(2, 1)
        product = lambda: torch.nn.functional.silu(gate) * up
        return {
            "torch_us": timer(lambda i: torch.nn.functional.linear(product(), weights[i % len(weights)]), len(weights))
        }
    if case.op == "calibrate":
        return {"torch_us": _replay(case)}
    x = Inputs(case)
    if case.op == "serial_attention":
        caches, lists = x.caches(), [ids[0].long() for ids in x.lists()]
        heads = torch.arange(case.kv_heads, device="cuda")[:, None]
        q = x.q.view(1, case.kv_heads, case.group, case.head_dim)

        def call(i: int) -> object:
            turn, at = x.turn(i)
            keys, values = (c[0][heads, lists[turn]].flatten(1, 2)[None] for c in caches[at])
            return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

        return {"torch_us": timer(call, x.sets)}
    if case.op == "quest_scores":
        meta = _quest_metadata(x)

        def score(i: int) -> object:
            mean = x.q.view(1, case.kv_heads, case.group, -1).mean(2, keepdim=True)
            low, high = meta[i % x.sets]
            return torch.maximum(mean * low, mean * high).sum(-1)

        return {"torch_us": timer(score, x.sets)}
    scores = _score_sets(case, 4)
    width = case.top_k if case.op == "select" else int(case.top_k * DELTA)
    if case.op == "select":
        return {"torch_us": timer(lambda i: torch.topk(scores[i % 4], width), 4)}
    level, trend = torch.randn_like(scores[0]), torch.randn_like(scores[0])

    def predict(i: int) -> object:
        trend.lerp_(scores[i % 4] - level, 0.2)
        level.lerp_(scores[i % 4], 0.3)
        return torch.topk(level + 0.5 * trend, width)

    return {"torch_us": timer(predict, 4)}


PEERS = {"flashinfer": flashinfer, "torch": plain_torch}
