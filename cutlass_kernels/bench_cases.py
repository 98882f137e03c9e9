# SPDX-License-Identifier: Apache-2.0
"""What the benchmark times: a list of shapes that needs no GPU, and for each op the calls that time it.

A graph is a stack of layers: each call has a K, V and metadata of its own, so many of them that the second level cache
(60 MB on an H200) holds nothing of them when their turn comes again. Queries, ids, scores and partials, which the
kernel in front has just written, share their buffers, as they do in a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels import reference

CACHES = 48  # at most; where more sets are needed, they are other blocks of these
BYTES_PER_US = 4.44e6  # read bandwidth of an H200, measured
COLD = 150e6  # bytes between two uses of a set
KI, DELTA = 1024, 1.5


@dataclass(frozen=True)
class Case:
    """One row: the shape, in tokens where not said otherwise."""

    op: str
    kv_heads: int = 0
    block: int = 0
    context: int = 0
    budget: int = 0
    q_heads: int = 32
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    missed: int = 0  # blocks a KV head that a repair computes
    n: int = 0  # of the weights [n, k] of a linear layer, which has no other shape
    k: int = 0  # of those, or of the rows of a norm

    @property
    def blocks(self) -> int:
        """Blocks of the context."""
        return self.context // self.block

    @property
    def top_k(self) -> int:
        """Selected blocks."""
        return self.budget // self.block

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    def row(self) -> dict:
        """The keys of a published row."""
        row = asdict(self)
        if self.k:
            return {key: row[key] for key in ("op", "n", "k", "batch", "dtype") if row[key]}
        return {key: v for key, v in row.items() if v or key not in ("missed", "n", "k")}

    def floor_bytes(self) -> int:
        """Bytes of K, V, metadata or weights that must come from memory; 0: latency only."""
        if self.k:
            return 2 * self.n * self.k
        token = 2 * self.head_dim * self.kv_heads * self.batch  # bytes of K, or of V
        per_block = 2 * token
        return {
            "serial_attention": self.budget * 2 * token,
            "attend": self.budget * 2 * token,
            "repair": self.missed * self.block * 2 * token,
            "quest_scores": self.blocks * per_block,
            "infllm_scores": (self.context // 16 + self.context // 64) * token,
            "rank_infllm": (self.context // 16 + self.context // 64) * token,
            "layer_serial": self.blocks * per_block + self.budget * 2 * token,
            "layer_prr": self.blocks * per_block + int(self.budget * DELTA) * 2 * token,
        }.get(self.op, 0)


def cases() -> list[Case]:
    """Every row of the published table."""
    long, longest = 128 * KI, 512 * KI
    budgets = (1024, 2048, 4096, 6144, 8192)
    out = [Case("serial_attention", 8, block, long, n) for block in (16, 32, 64, 128, 256) for n in budgets]
    out += [Case("serial_attention", 2, 64, long, n) for n in (1024, 4096, 8192)]
    out += [Case("attend", heads, 64, long, n) for heads in (2, 8) for n in (1024, 4096, 8192)]
    out += [Case("merge", heads, 64, long, 4096) for heads in (2, 8)]
    out += [Case("repair", heads, 64, long, 4096, missed=4) for heads in (2, 8)]
    out += [Case("append", 2, 64, long), Case("append_quest", 2, 64, long), Case("append_infllm", 2, 64, long)]
    out += [Case("quest_scores", 2, 16, longest), Case("quest_scores", 8, 16, long), Case("quest_scores", 2, 16, long)]
    out += [Case("infllm_scores", h, 64, n) for h, n in ((2, longest), (2, long), (4, longest), (8, long))]
    out += [Case("rank_infllm", h, 64, n, 4096) for n in (32 * KI, 64 * KI) for h in (2, 4, 8)]
    out += [Case("select", heads, 16, longest, 4096) for heads in (2, 8)]
    out += [Case("select", heads, 64, longest, 4096) for heads in (2, 8)]
    out += [Case("predict", heads, 16, longest, 4096) for heads in (2, 8)]
    for heads, context in ((2, long), (4, long), (8, long), (2, longest)):
        out += [Case(op, heads, 64, context, 4096) for op in ("layer_serial", "layer_prr")]
    glm4 = ((5120, 4096), (4096, 4096), (27392, 4096), (4096, 13696), (151552, 4096))  # q k v, o, FFN, vocabulary
    out += [Case("linear", n=n, k=k) for n, k in glm4] + [Case("add_rms_norm", k=4096)]
    out += [Case("norm_linear", n=n, k=4096) for n in (5120, 27392)] + [Case("silu_linear", n=4096, k=13696)]
    contexts = (16 * KI, 64 * KI)
    return out + [Case("calibrate", h, block, n, 4096) for block in (16, 64) for n in contexts for h in (2, 4)]


def set_count(case: Case) -> int:
    """Sets of inputs that a case goes through: as many as COLD takes, but for those that read nothing that counts."""
    if not case.floor_bytes():
        return 4
    return max(4, int(-(-COLD // case.floor_bytes())))


class Inputs:
    """Tensors of a case on the GPU. `sets` ways to call it touch different memory."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        self.case = case
        self.dtype = getattr(torch, case.dtype)
        self.lens = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
        self.scale = case.head_dim**-0.5
        self.sets = set_count(case)
        self.q = self.normal(case.q_heads, case.head_dim)
        self.out = torch.empty_like(self.q), self.q.new_empty(self.q.shape[:2], dtype=torch.float32)

    def normal(self, *shape: int) -> Tensor:
        """[batch, *shape] of the case's dtype."""
        return torch.randn(self.case.batch, *shape, device="cuda", dtype=self.dtype)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """K and V, of each set or of CACHES of them."""
        c = self.case
        shape = (c.kv_heads, c.blocks, c.block, c.head_dim)
        return [(self.normal(*shape), self.normal(*shape)) for _ in range(min(self.sets, CACHES))]

    def turn(self, i: int) -> tuple[int, int]:
        """Of call i: the turn through the caches, and the cache."""
        return divmod(i % self.sets, min(self.sets, CACHES))

    def lists(self) -> list[Tensor]:
        """ids() for each turn through the caches."""
        return [self.ids() for _ in range(-(-self.sets // CACHES))]

    def ids(self) -> Tensor:
        """[B, H, top_k] random blocks, ascending."""
        c = self.case
        rows = [torch.randperm(c.blocks, device="cuda")[: c.top_k].sort().values for _ in range(c.batch * c.kv_heads)]
        return torch.stack(rows).view(c.batch, c.kv_heads, c.top_k).int()


Calls = tuple[Callable[[int], object], Callable[[], None]]  # call number i; a comparison with the reference


def close(ours: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Raise if two results differ by more than rounding."""
    if not torch.equal(ours.isinf(), wanted.isinf()):
        raise AssertionError(f"{what}: infinite at other places than the reference")
    a, b = (torch.where(x.isinf(), 0, x).double() for x in (ours, wanted))
    error = float((a - b).norm() / b.norm().clamp(min=1e-30))
    if not error < tolerance:
        raise AssertionError(f"{what}: differs from the reference by {error:.1e}, expected below {tolerance:.0e}")


def same(ours: Tensor, wanted: Tensor, what: str) -> None:
    """Raise unless equal."""
    if not torch.equal(ours, wanted):
        raise AssertionError(f"{what}: {int((ours != wanted).sum())} of {ours.numel()} values differ")


def calls(case: Case) -> Calls:
    """How to call a case."""
    makers = {
        "serial_attention": _attention,
        "attend": _attention,
        "merge": _attention,
        "repair": _repair,
        "append": _append,
        "append_quest": _append,
        "append_infllm": _append,
        "quest_scores": _quest,
        "infllm_scores": _infllm,
        "rank_infllm": _rank,
        "select": _select,
        "predict": _predict,
        "layer_serial": _layer,
        "layer_prr": _layer,
        "linear": _linear,
        "add_rms_norm": _norm,
        "norm_linear": _norm_linear,
        "silu_linear": _silu_linear,
        "calibrate": _calibrate,
    }
    return makers[case.op](case)


def _partials(x: Inputs, n: int) -> tuple[Tensor, Tensor]:
    c = x.case
    o = torch.empty(c.batch, c.kv_heads, n, c.group, c.head_dim, device="cuda")
    return o, o.new_empty(o.shape[:4])


def _attention(case: Case) -> Calls:
    x = Inputs(case)
    caches, lists, parts = x.caches(), x.lists(), _partials(x, case.top_k)

    def attend(i: int) -> object:
        turn, at = x.turn(i)
        return ck.attend(x.q, *caches[at], lists[turn], x.lens, x.scale, out=parts)

    def merge(i: int) -> object:
        return ck.merge(*parts, x.out)

    def check() -> None:
        attend(0)
        wanted = torch.empty_like(parts[0]), torch.empty_like(parts[1])
        k, v = caches[0]
        reference.attend(x.q, k, v, lists[0], x.lens, x.scale, None, *wanted)
        close(parts[0], wanted[0], 1e-5, "attend o")
        close(parts[1], wanted[1], 1e-5, "attend lse")
        merge(0)
        out = tuple(torch.empty_like(p) for p in x.out)
        reference.merge(*wanted, out[0], out[1])
        close(x.out[0], out[0], 5e-3, "merge")

    attend(0)
    both = lambda i: (attend(i), merge(i))
    return {"serial_attention": both, "attend": attend, "merge": merge}[case.op], check


def _predicted(A: Tensor, P: int, missed: int, blocks: int, device: str = "cuda") -> Tensor:
    """P blocks a row: A without `missed` of them, filled up with blocks that A does not hold."""
    rows = []
    for a in A.flatten(0, 1).tolist():
        drop = set(torch.randperm(len(a))[:missed].tolist())
        kept = [x for i, x in enumerate(a) if i not in drop]
        taken = set(a)
        more = [b for b in torch.randperm(blocks).tolist() if b not in taken]
        rows.append(sorted(kept + more[: P - len(kept)]))
    return torch.tensor(rows, dtype=torch.int32, device=device).view(*A.shape[:2], P)


def _against(A: Tensor, P: Tensor) -> ck.Selection:
    position = reference._find(A, P)
    lost = (position < 0) & (A >= 0)
    big = torch.iinfo(torch.int32).max
    missed = torch.where(lost, A, big).sort(dim=2).values
    counts = torch.stack(((A >= 0).sum(2), lost.sum(2)), 2).int()
    return ck.Selection(A, position, torch.where(missed < big, missed, -1).int(), counts)


def _repair(case: Case) -> Calls:
    x = Inputs(case)
    caches, lists = x.caches(), x.lists()
    P = [_predicted(A, int(case.top_k * DELTA), case.missed, case.blocks) for A in lists]
    picked, parts = [_against(*both) for both in zip(lists, P, strict=True)], _partials(x, P[0].shape[2])
    ck.attend(x.q, *caches[0], P[0], x.lens, x.scale, out=parts)

    def call(i: int) -> object:
        turn, at = x.turn(i)
        return ck.repair(x.q, *caches[at], picked[turn], *parts, x.lens, x.scale, out=x.out)

    def check() -> None:
        call(0)
        got = x.out[0].clone(), x.out[1].clone()
        serial = ck.merge(*ck.attend(x.q, *caches[0], lists[0], x.lens, x.scale), x.out)
        same(got[0], serial[0], "repair against serial")
        same(got[1], serial[1], "repair lse against serial")

    return call, check


def _append(case: Case) -> Calls:
    x = Inputs(case)
    k, v = x.caches()[0]
    new = [(x.normal(case.kv_heads, case.head_dim), x.normal(case.kv_heads, case.head_dim)) for _ in range(x.sets)]
    sizes = {
        "append": (),
        "append_quest": (case.blocks,) * 2,
        "append_infllm": (case.context // 16, case.context // 64),
    }
    meta = [x.normal(case.kv_heads, n, case.head_dim) for n in sizes[case.op]]

    q = x.normal(case.q_heads, case.head_dim)
    angles = torch.rand(case.batch, case.head_dim // 2, device="cuda").mul(6).repeat(1, 2)
    rotary = ck.Rotary(q, angles.cos().to(q), angles.sin().to(q), False, torch.empty_like(q))

    def call(i: int) -> None:
        getattr(ck, case.op)(*new[i % x.sets], k, v, *meta, x.lens, rotary=rotary)

    def check() -> None:
        tensors = [*new[0], k, v, *meta]
        wanted, turned = [t.clone() for t in tensors], torch.empty_like(q)
        call(0)
        windows = (32, 16, 128, 64) if case.op == "append_infllm" else ()
        getattr(reference, case.op)(*wanted, x.lens, *windows, None, *rotary[:4], turned)
        for a, b in zip((*tensors, rotary.out), (*wanted, turned), strict=True):
            same(a, b, case.op)

    return call, check


def _quest_metadata(x: Inputs) -> list[tuple[Tensor, Tensor]]:
    c = x.case
    low = [x.normal(c.kv_heads, c.blocks, c.head_dim) - 1 for _ in range(x.sets)]
    return [(a, a + 2) for a in low]


def _quest(case: Case) -> Calls:
    x = Inputs(case)
    meta = _quest_metadata(x)
    scores = torch.empty(case.batch, case.kv_heads, case.blocks, device="cuda")

    def call(i: int) -> object:
        return ck.quest_scores(x.q, *meta[i % x.sets], x.lens, case.block, out=scores)

    def check() -> None:
        call(0)
        wanted = torch.empty_like(scores)
        reference.quest_scores(x.q, *meta[0], x.lens, case.block, False, wanted)
        close(scores, wanted, 1e-5, "quest_scores")

    return call, check


def _means(x: Inputs) -> list[tuple[Tensor, Tensor]]:
    c = x.case
    sizes = (c.context - 32) // 16 + 1, (c.context - 128) // 64 + 1
    windows = lambda n: x.normal(c.kv_heads, n, c.head_dim)
    return [(windows(sizes[0]), windows(sizes[1])) for _ in range(x.sets)]


def _infllm(case: Case) -> Calls:
    x = Inputs(case)
    means = _means(x)
    scores = torch.empty(case.batch, case.kv_heads, case.blocks, device="cuda")

    def call(i: int) -> object:
        return ck.infllm_scores(x.q, *means[i % x.sets], x.lens, x.scale, case.block, out=scores)

    def check() -> None:
        call(0)
        wanted = torch.empty_like(scores)
        reference.infllm_scores(x.q, *means[0], x.lens, x.scale, case.block, 32, 16, 128, 64, False, wanted)
        close(scores, wanted, 1e-4, "infllm_scores")

    return call, check


def _rank(case: Case) -> Calls:
    """By InfLLM-v2's rule: 1 sink and 33 local blocks are forced."""
    x = Inputs(case)
    means, P = _means(x), x.ids()
    scores = torch.empty(case.batch, case.kv_heads, case.blocks, device="cuda")
    picked = ck.Selection.empty(case.batch, case.kv_heads, case.top_k, "cuda")

    def call(i: int) -> object:
        given = (x.q, *means[i % x.sets], x.lens, x.scale, scores, case.top_k, 1, 33, case.block)
        return ck.rank_infllm(*given, predicted=P, out=picked)

    def check() -> None:
        call(0)
        wanted, chosen = torch.empty_like(scores), ck.Selection(*(torch.empty_like(t) for t in picked))
        reference.infllm_scores(x.q, *means[0], x.lens, x.scale, case.block, 32, 16, 128, 64, False, wanted)
        close(scores, wanted, 1e-4, "rank_infllm scores")
        reference.select(scores, x.lens, case.block, 1, 33, P, *chosen)
        for a, b, what in zip(picked, chosen, picked._fields, strict=True):
            same(a, b, f"rank_infllm {what}")

    return call, check


def _score_sets(case: Case, n: int) -> list[Tensor]:
    shape = (case.batch, case.kv_heads, case.blocks)
    return [torch.randn(shape, device="cuda") * 30 + 200 for _ in range(n)]


def _select(case: Case) -> Calls:
    x = Inputs(case)
    scores = _score_sets(case, 4)
    P = [_predicted(ck.select(s, x.lens, case.block, case.top_k).ids, int(case.top_k * DELTA), case.top_k // 20,
                    case.blocks) for s in scores]  # fmt: skip
    picked = ck.Selection.empty(case.batch, case.kv_heads, case.top_k, "cuda")

    def call(i: int) -> object:
        i %= len(scores)
        return ck.select(scores[i], x.lens, case.block, case.top_k, predicted=P[i], out=picked)

    def check() -> None:
        call(0)
        wanted = ck.Selection.empty(case.batch, case.kv_heads, case.top_k, "cuda")
        reference.select(scores[0], x.lens, case.block, 0, 1, P[0], *wanted)
        for a, b, what in zip(picked, wanted, picked._fields, strict=True):
            same(a, b, f"select {what}")

    return call, check


def _predict(case: Case) -> Calls:
    x = Inputs(case)
    scores = _score_sets(case, 4)
    level, trend = torch.randn_like(scores[0]), torch.randn_like(scores[0])
    theta = torch.tensor([[0.3, 0.2, 0.5]], device="cuda").repeat(case.batch, 1)
    shape = (case.batch, case.kv_heads, int(case.top_k * DELTA))
    ids = torch.empty(shape, dtype=torch.int32, device="cuda")

    def call(i: int) -> object:
        return ck.predict(scores[i % 4], level, trend, theta, x.lens, case.block, 1, 1, ids)

    def check() -> None:
        a, b, wanted = level.clone(), trend.clone(), torch.empty_like(ids)
        call(0)
        reference.predict(scores[0], a, b, theta, x.lens, case.block, 1, 1, wanted)
        close(level, a, 1e-6, "predict level")
        close(trend, b, 1e-6, "predict trend")
        same(ids, wanted, "predict ids")

    return call, check


def _layer(case: Case) -> Calls:
    """Score, select, attend, merge: a serial step. With P, whose partials are made beside both: prr."""
    x = Inputs(case)
    caches, meta = x.caches(), _quest_metadata(x)
    scores = torch.empty(case.batch, case.kv_heads, case.blocks, device="cuda")
    picked = ck.Selection.empty(case.batch, case.kv_heads, case.top_k, "cuda")
    budget = int(case.top_k * DELTA)
    parts, fresh = _partials(x, budget), _partials(x, case.top_k)
    P: list[Tensor] = []

    def score(i: int) -> None:
        ck.quest_scores(x.q, *meta[i], x.lens, case.block, scores, early=True)  # as in a decode step

    def serial(i: int) -> object:
        i %= x.sets
        score(i)
        ck.select(scores, x.lens, case.block, case.top_k, out=picked)
        ck.attend_missed(x.q, *caches[i], picked, x.lens, x.scale, out=fresh)  # without P: all of A
        return ck.merge(*fresh, x.out, early=True)  # as in a decode step

    def prr(i: int) -> object:
        i %= x.sets
        score(i)
        ck.select(scores, x.lens, case.block, case.top_k, predicted=P[i], out=picked)
        ck.attend(x.q, *caches[i], P[i], x.lens, x.scale, out=parts, beside=True)
        return ck.repair(x.q, *caches[i], picked, *parts, x.lens, x.scale, out=x.out)

    for i in range(x.sets):  # a hit rate of .95
        serial(i)
        P.append(_predicted(picked.ids, budget, round(0.05 * case.top_k), case.blocks))

    def check() -> None:
        serial(0)
        wanted = x.out[0].clone(), x.out[1].clone()
        prr(0)
        same(x.out[0], wanted[0], "prr against serial")
        same(x.out[1], wanted[1], "prr lse against serial")
        ck.merge(*ck.attend(x.q, *caches[0], picked.ids, x.lens, x.scale), x.out)
        same(x.out[0], wanted[0], "attend and merge against serial")

    return (prr if case.op == "layer_prr" else serial), check


def linear_inputs(case: Case) -> tuple[Tensor, list[Tensor]]:
    """A row x [batch, k], and the weights [n, k] of each set."""
    torch.manual_seed(0)
    draw = lambda rows: torch.randn(rows, case.k, device="cuda", dtype=getattr(torch, case.dtype))
    return draw(case.batch), [draw(case.n) for _ in range(set_count(case))]


def _linear(case: Case) -> Calls:
    x, weights = linear_inputs(case)

    def call(i: int) -> Tensor:
        return ck.linear(x, weights[i % len(weights)])

    def check() -> None:
        close(call(0), x.double() @ weights[0].double().T, 5e-3, "linear")

    return call, check


def norm_inputs(case: Case) -> tuple[list[Tensor], Tensor]:
    """Rows [batch, k], each to be added to the one before it, and a weight [k]."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, case.k, device="cuda", dtype=getattr(torch, case.dtype))
    return [draw(case.batch) for _ in range(set_count(case))], draw()


def _norm(case: Case) -> Calls:
    rows, weight = norm_inputs(case)

    def call(i: int) -> tuple[Tensor, Tensor]:
        return ck.add_rms_norm(rows[i % len(rows)], rows[i % len(rows) - 1], weight, 1e-5)

    def check() -> None:
        ours, wanted = call(0), reference.add_rms_norm(rows[0], rows[-1], weight, 1e-5)
        close(ours[0], wanted[0], 1e-3, "add_rms_norm")
        same(ours[1], wanted[1], "add_rms_norm sum")

    return call, check


def _norm_linear(case: Case) -> Calls:
    (rows, scale), (_, weights) = norm_inputs(case), linear_inputs(case)

    def call(i: int) -> tuple[Tensor, Tensor]:
        at = i % len(rows)
        return ck.add_norm_linear(rows[at], rows[at - 1], scale, 1e-5, weights[at])

    def check() -> None:
        ours, (row, total) = call(0), ck.add_rms_norm(rows[0], rows[-1], scale, 1e-5)
        same(ours[0], ck.linear(row, weights[0]), "add_norm_linear against add_rms_norm and linear")
        same(ours[1], total, "add_norm_linear sum")

    return call, check


def gated_inputs(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Gate and up [batch, 2 k], and the weights [n, k] of each set."""
    (gate, weights), up = linear_inputs(case), torch.randn(case.batch, case.k, device="cuda")
    return torch.cat((gate, up.to(gate)), 1), weights


def _silu_linear(case: Case) -> Calls:
    x, weights = gated_inputs(case)

    def call(i: int) -> Tensor:
        return ck.silu_mul_linear(x, weights[i % len(weights)])

    def check() -> None:
        gate, up = x.chunk(2, 1)
        wanted = (torch.nn.functional.silu(gate) * up).double() @ weights[0].double().T
        close(call(0), wanted, 5e-3, "silu_mul_linear")

    return call, check


def calibrate_inputs(case: Case) -> list[Any]:
    """What replay_hits takes: 64 rows of drifting scores in 40 layers, 80 candidates; Quest's rule, or InfLLM-v2's."""
    torch.manual_seed(0)
    layers, rows = 40, 64
    shape = (layers, case.kv_heads, case.blocks)
    base, drift = (torch.randn(shape, device="cuda") for _ in range(2))
    scores = torch.empty(layers, rows, *shape[1:], device="cuda")
    for w in range(rows):
        drift.mul_(0.95).add_(torch.randn_like(drift), alpha=0.31)
        scores[:, w] = base + drift
    lens = torch.arange(case.context - rows + 1, case.context + 1, dtype=torch.int32, device="cuda")
    blocks = torch.arange(case.blocks, device="cuda")
    scores.masked_fill_((blocks * case.block >= lens[:, None])[:, None], -float("inf"))
    grid = product((0.2, 0.4, 0.6, 0.8), (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 0.25, 0.5, 0.75))
    theta = torch.tensor(list(grid), device="cuda").expand(layers, 80, 3).contiguous()
    widths = torch.full((80,), case.top_k, dtype=torch.int32, device="cuda")
    rule = (1, 33) if case.block == 64 else (0, 1)
    return [scores, lens, theta, widths, case.block, case.top_k, *rule, 0]


def _calibrate(case: Case) -> Calls:
    scores, lens, theta, *rest = calibrate_inputs(case)

    def call(i: int) -> ck.Replayed:
        return ck.replay_hits(scores, lens, theta, *rest)

    def check() -> None:
        found, some = call(0), slice(0, 2)
        wanted = ck.Replayed(*(torch.empty_like(x[some]) for x in found))
        reference.replay_hits(scores[some], lens, theta[some], *rest, **wanted._asdict())
        for name in ("size", "hits"):
            same(getattr(found, name)[some], getattr(wanted, name), f"replay_hits {name}")
        for name in ("total", "weight"):
            close(getattr(found, name)[some], getattr(wanted, name), 1e-5, f"replay_hits {name}")

    return call, check


def peers_of(case: Case) -> Iterator[str]:
    """Names of the peers that can run a case."""
    if case.op == "serial_attention" and case.kv_heads == 8:
        yield "flashinfer"
    if case.op in ("serial_attention", "quest_scores", "select", "predict", "calibrate") or case.k:
        yield "torch"
