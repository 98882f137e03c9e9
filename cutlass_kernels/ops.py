# SPDX-License-Identifier: Apache-2.0
"""The ops as torch custom ops (namespace `prr`), and the doors of those of the attention: what they take and refuse.

Each op of the attention writes into buffers that the caller owns and returns nothing: a decode loop allocates once, a
CUDA graph replays onto the same addresses, and an op that runs beside others touches no temporary. `torch.compile` sees
opaque, mutating ops. Those of the rest of a layer have their doors in layer_ops. Any device without kernels of its own
runs `reference`. Shapes, devices and dtypes are checked at the doors (see checks) and nowhere else.

Shapes: B sequences, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, T tokens a block, S slots, N blocks of
capacity, K, P listed blocks. Integers are int32, scores and partials float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cutlass_kernels import reference
from cutlass_kernels.checks import (
    FLOATS,
    Dims,
    check_apart,
    check_ids,
    check_newest,
    check_positive,
    check_rule,
    check_slots,
    windows,
)

# Every reference function is the body that a device without kernels of its own runs.
OPS = {
    name: torch.library.custom_op(f"prr::{name}", getattr(reference, name), mutates_args=mutated)
    for name, mutated in {
        "append": ("k", "v", "q_out"),
        "append_quest": ("k", "v", "kmin", "kmax", "q_out"),
        "append_infllm": ("k", "v", "k1", "k2", "q_out"),
        "quest_scores": ("scores",),
        "infllm_scores": ("scores",),
        "select": ("ids", "position", "missed", "counts"),
        "rank_infllm": ("scores", "ids", "position", "missed", "counts"),
        "predict": ("level", "trend", "ids"),
        "replay_hits": ("size", "total", "hits", "weight"),
        "attend": ("o", "lse"),
        "merge": ("out", "out_lse"),
        "attend_missed": ("o", "lse"),
        "merge_repaired": ("out", "out_lse"),
        "repair": ("out", "out_lse"),
        "repair_union": ("out", "out_lse"),
        "linear": (),
        "rms_norm": (),
        "add_rms_norm": (),
        "add_norm_linear": (),
        "silu_mul_linear": (),
    }.items()
}


# ---------------------------------------------------------------------------------------------------- cache
class Rotary(NamedTuple):
    """RoPE (arXiv 2104.09864) as a part of append, which then takes keys and queries as the linear layer made them.

    q: [B, Hq, D] of the cache's dtype. out: the same shape, gets q rotated; not of q's memory.
    cos, sin: [B, R] of the same dtype, of R / 2 angles twice; the first R channels are rotated, the others kept.
    interleaved: channels 2 i and 2 i + 1 are a pair, as in GLM; else i and i + R / 2, as in Llama.
    """

    q: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool
    out: Tensor


_NO_ROTARY = (None, None, None, False, None)


def _check_append(
    d: Dims,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    page_table: Tensor | None,
    rotary: Rotary | None,
) -> None:
    d("k", k, "B H S T D", *FLOATS)
    d("v", v, "B H S T D", k.dtype)
    d("k_new", k_new, "B H D", k.dtype)
    d("v_new", v_new, "B H D", k.dtype)
    d("seq_lens", seq_lens, "B", torch.int32)
    d("page_table", page_table, "B H C", torch.int32)
    check_newest(d.op, "k", k, seq_lens, 1, max(1, k.shape[3]), page_table)
    if rotary is not None:
        d("q", rotary.q, "B Hq D", k.dtype)
        d("out", rotary.out, "B Hq D", k.dtype)
        d("cos", rotary.cos, "B R", k.dtype)
        d("sin", rotary.sin, "B R", k.dtype)
        d.groups()
        R, D = rotary.cos.shape[1], k.shape[4]
        if R % 2 or not 0 < R <= D:
            raise ValueError(f"{d.op}: cos and sin are of {R} channels, expected an even number up to D = {D}")
        check_apart(d.op, q=rotary.q, out=rotary.out)


def append(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    page_table: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Write the newest token of each sequence into the cache.

    Args:
        k_new, v_new: [B, H_kv, D], the token at position seq_lens - 1, keys after RoPE.
        k, v: [B, H_kv, S, T, D], written in place.
        seq_lens: [B] int32, tokens in the cache, the new one included; a row of 0 is left alone.
        page_table: [B, H_kv, N] int32, block -> slot; identity when None.
        rotary: makes RoPE of the new keys, and of the queries, a part of this.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree; with `debug`, a token beyond the cache or whose page
            table entry is no slot. Without it such a token is the caller's fault, and what happens is not defined.
    """
    _check_append(Dims("append"), k_new, v_new, k, v, seq_lens, page_table, rotary)
    torch.ops.prr.append(k_new, v_new, k, v, seq_lens, page_table, *(rotary or _NO_ROTARY))


def append_quest(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    seq_lens: Tensor,
    page_table: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Append, and update the extrema of the token's block (Quest, arXiv 2406.10774, section 3.3).

    Args:
        kmin, kmax: [B, H_kv, N, D] of k's dtype, channel-wise extrema of the keys of block n, written in place.
        (the others): as for append.
    """
    d = Dims("append_quest")
    _check_append(d, k_new, v_new, k, v, seq_lens, page_table, rotary)
    d("kmin", kmin, "B H N D", k.dtype)
    d("kmax", kmax, "B H N D", k.dtype)
    check_newest(d.op, "kmin", kmin, seq_lens, 1, max(1, k.shape[3]))
    torch.ops.prr.append_quest(k_new, v_new, k, v, kmin, kmax, seq_lens, page_table, *(rotary or _NO_ROTARY))


def append_infllm(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    window: int = 32,
    stride: int = 16,
    coarse_window: int = 128,
    coarse_stride: int = 64,
    page_table: Tensor | None = None,
    rotary: Rotary | None = None,
) -> None:
    """Append, and write the means of the windows that this token completes (InfLLM-v2, arXiv 2509.24663).

    Args:
        k1: [B, H_kv, W1, D] of k's dtype, mean of keys w * stride ... + window, written in place.
        k2: [B, H_kv, W2, D], the same with coarse_window and coarse_stride.
        (the others): as for append.
    """
    d = Dims("append_infllm")
    _check_append(d, k_new, v_new, k, v, seq_lens, page_table, rotary)
    d("k1", k1, "B H W1 D", k.dtype)
    d("k2", k2, "B H W2 D", k.dtype)
    check_positive("append_infllm", **windows(window, stride, coarse_window, coarse_stride))
    check_newest(d.op, "k1", k1, seq_lens, window, stride)
    check_newest(d.op, "k2", k2, seq_lens, coarse_window, coarse_stride)
    sizes = window, stride, coarse_window, coarse_stride
    torch.ops.prr.append_infllm(k_new, v_new, k, v, k1, k2, seq_lens, *sizes, page_table, *(rotary or _NO_ROTARY))


# ---------------------------------------------------------------------------------------------------- scores
def _sequences(*metadata: Tensor) -> str:
    """The first axis of metadata: of the one sequence that all queries ask, or of each query's own."""
    return "1" if all(x.shape[:1] == (1,) for x in metadata) else "B"


def quest_scores(
    q: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    seq_lens: Tensor,
    block_size: int,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Quest's block scores under GQA (PRR A.1): sum_d max(qm_d kmin_d, qm_d kmax_d), qm the mean query of the group.

    Unscaled; may be negative; bounds qm . k from above for every key of the block. Blocks without tokens score -inf.

    Args:
        q: [B, Hq, D], after RoPE.
        kmin, kmax: [B, H_kv, N, D] of q's dtype, or [1, ...]: B queries of one sequence.
        seq_lens: [B] int32, tokens.
        block_size: tokens a block.
        out: [B, H_kv, N] float32, allocated when None.
        early: on a GPU, load the lengths and the extrema of all blocks but the newest before the op in front on the
            stream has ended. It must not write them, as append_quest does not, and must itself have waited for what
            does, as every op here has.
    """
    out = q.new_empty((q.shape[0], *kmin.shape[1:3]), dtype=torch.float32) if out is None else out
    d = Dims("quest_scores")
    of = _sequences(kmin, kmax)
    d("kmin", kmin, f"{of} H N D", *FLOATS)
    d("kmax", kmax, f"{of} H N D", kmin.dtype)
    d("q", q, "B Hq D", kmin.dtype)
    d("seq_lens", seq_lens, "B", torch.int32)
    d("out", out, "B H N", torch.float32)
    d.groups()
    check_positive("quest_scores", block_size=block_size)
    torch.ops.prr.quest_scores(q, kmin, kmax, seq_lens, block_size, early, out)
    return out


def _check_infllm(
    d: Dims, q: Tensor, k1: Tensor, k2: Tensor, seq_lens: Tensor, scores: Tensor, name: str, block_size: int,
    window: int, stride: int, coarse_window: int, coarse_stride: int,
) -> None:  # fmt: skip
    of = _sequences(k1, k2)
    d("k1", k1, f"{of} H W1 D", *FLOATS)
    d("k2", k2, f"{of} H W2 D", k1.dtype)
    d("q", q, "B Hq D", k1.dtype)
    d("seq_lens", seq_lens, "B", torch.int32)
    d(name, scores, "B H N", torch.float32)
    d.groups()
    check_positive(d.op, block_size=block_size, **windows(window, stride, coarse_window, coarse_stride))
    if block_size % stride or window % stride:
        raise ValueError(f"{d.op}: block {block_size} and window {window}, expected multiples of stride {stride}")


def infllm_scores(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int = 64,
    window: int = 32,
    stride: int = 16,
    coarse_window: int = 128,
    coarse_stride: int = 64,
    exact: bool = False,
    out: Tensor | None = None,
    num_blocks: int | None = None,
) -> Tensor:
    """InfLLM-v2's block scores: max over windows touching a block of sum over the group of exp(q . k1 - LSE).

    The normaliser LSE is over k2 (coarse, the method's default; exact while no coarse window is complete) or over k1
    (exact). A block that no complete window touches, and one without tokens, scores -inf.

    Args:
        q: [B, Hq, D], after RoPE.
        k1, k2: [B, H_kv, W1 | W2, D] of q's dtype, see append_infllm, or [1, ...]: B queries of one sequence.
        scale: of the logits, 1 / sqrt(D) as a rule.
        block_size: tokens; a multiple of stride, as window is.
        out: [B, H_kv, N] float32; allocated with num_blocks blocks when None.

    Raises:
        ValueError: sizes that do not agree, block_size or window no multiple of stride.
    """
    if out is None:
        if num_blocks is None:
            raise ValueError("infllm_scores: pass out or num_blocks")
        out = q.new_empty((q.shape[0], k1.shape[1], num_blocks), dtype=torch.float32)
    sizes = window, stride, coarse_window, coarse_stride
    _check_infllm(Dims("infllm_scores"), q, k1, k2, seq_lens, out, "out", block_size, *sizes)
    torch.ops.prr.infllm_scores(q, k1, k2, seq_lens, scale, block_size, *sizes, exact, out)
    return out


# ---------------------------------------------------------------------------------------------------- selection
class Selection(NamedTuple):
    """A, and A against P. All int32.

    ids: [B, H_kv, K], ascending, -1 padded.
    position: [B, H_kv, K], where in P the block of the same place in ids is; -1: not there, or padding.
    missed: [B, H_kv, K], the blocks of A that P lacks, ascending, -1 padded.
    counts: [B, H_kv, 2], |A| and how many of them P lacks.
    """

    ids: Tensor
    position: Tensor
    missed: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, B: int, H: int, K: int, device: torch.device | str) -> "Selection":
        """Buffers of that size, filled with padding."""
        a, b, c = (torch.full((B, H, K), -1, dtype=torch.int32, device=device) for _ in range(3))
        return cls(a, b, c, torch.zeros(B, H, 2, dtype=torch.int32, device=device))


def _check_select(d: Dims, scores: Tensor, seq_lens: Tensor, predicted: Tensor, out: Selection, top_k: int) -> None:
    d("scores", scores, "B H N", torch.float32)
    d("seq_lens", seq_lens, "B", torch.int32)
    d("predicted", predicted, "B H P", torch.int32)
    d("out.ids", out.ids, f"B H {top_k}", torch.int32)
    d("out.position", out.position, f"B H {top_k}", torch.int32)
    d("out.missed", out.missed, f"B H {top_k}", torch.int32)
    d("out.counts", out.counts, "B H 2", torch.int32)
    check_apart(d.op, predicted=predicted, **{f"out.{name}": x for name, x in out._asdict().items()})


def _or_nothing(predicted: Tensor | None, scores: Tensor) -> Tensor:
    """P, or the empty set for rows of scores."""
    if predicted is not None:
        return predicted
    return torch.empty(*scores.shape[:2], 0, dtype=torch.int32, device=scores.device)


def select(
    scores: Tensor,
    seq_lens: Tensor,
    block_size: int,
    top_k: int,
    sink: int = 0,
    local: int = 1,
    predicted: Tensor | None = None,
    out: Selection | None = None,
) -> Selection:
    """The top-K blocks of each (sequence, KV head), and which of them P holds.

    The first `sink` and the last `local` blocks (the current one among them) are forced; the rest go to the highest
    scores, ties to the lowest id; -inf and NaN are never taken. A row with at most K blocks takes all of them.

    Args:
        scores: [B, H_kv, N] float32.
        seq_lens: [B] int32, tokens.
        top_k: K, forced blocks included.
        predicted: P, [B, H_kv, P] int32, -1 padded, without duplicates; None: the empty set.
        out: buffers to write, allocated when None; P is none of them.

    Raises:
        ValueError: sizes that do not agree; sink + local > K > 0; P or buffers that share memory.
    """
    check_rule("select", top_k, sink, local, block_size)
    B, H, _ = scores.shape if scores.dim() == 3 else (0, 0, 0)
    predicted = _or_nothing(predicted, scores)
    out = Selection.empty(B, H, top_k, scores.device) if out is None else out
    _check_select(Dims("select"), scores, seq_lens, predicted, out, top_k)
    torch.ops.prr.select(scores, seq_lens, block_size, sink, local, predicted, *out)
    return out


def rank_infllm(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    scale: float,
    scores: Tensor,
    top_k: int,
    sink: int = 0,
    local: int = 1,
    block_size: int = 64,
    window: int = 32,
    stride: int = 16,
    coarse_window: int = 128,
    coarse_stride: int = 64,
    exact: bool = False,
    predicted: Tensor | None = None,
    out: Selection | None = None,
) -> Selection:
    """infllm_scores, and select of these scores. On a GPU one launch, where a row's windows fit into its CTAs.

    They fit up to 72K tokens at D = 128 and InfLLM-v2's sizes, 144K at D = 64, in as many rows as the device has room
    for at once; beyond, it is the launches of both. The selection is that of the scores written, which may differ in
    the last bits from those of infllm_scores.

    Args:
        q, k1, k2, seq_lens, scale, block_size, window, ..., exact: as for infllm_scores.
        scores: [B, H_kv, N] float32, written.
        top_k, sink, local, predicted: as for select.
        out: buffers to write, allocated when None.

    Raises:
        ValueError: sizes that do not agree, block_size or window no multiple of stride; sink + local > K > 0; P or
            buffers that share memory.
    """
    d, sizes = Dims("rank_infllm"), (window, stride, coarse_window, coarse_stride)
    _check_infllm(d, q, k1, k2, seq_lens, scores, "scores", block_size, *sizes)
    check_rule(d.op, top_k, sink, local, block_size)
    predicted = _or_nothing(predicted, scores)
    B, H, _ = scores.shape
    out = Selection.empty(B, H, top_k, scores.device) if out is None else out
    _check_select(d, scores, seq_lens, predicted, out, top_k)
    torch.ops.prr.rank_infllm(
        q, k1, k2, seq_lens, scale, block_size, *sizes, exact, sink, local, predicted, scores, *out
    )
    return out


def predict(
    scores: Tensor,
    level: Tensor,
    trend: Tensor,
    theta: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sink: int,
    local: int,
    out: Tensor,
) -> Tensor:
    """Learn from this step's scores (eq 3) and predict the blocks of the next (eq 2).

    trend <- beta (IS - level) + (1 - beta) trend; level <- alpha IS + (1 - alpha) level; P = top(level + gamma trend)
    by the rule of select, for a sequence one token longer. A block never scored has level NaN; its first score sets
    level = IS, trend = 0. Scores that are not finite change nothing.

    Args:
        scores: [B, H_kv, N] float32.
        level, trend: [B, H_kv, N] float32, updated in place.
        theta: [B, 3] float32: alpha, beta, gamma.
        seq_lens: [B] int32, tokens now.
        out: P, [B, H_kv, P] int32, written: ascending, -1 padded; its width is the budget delta K.
    """
    d = Dims("predict")
    d("scores", scores, "B H N", torch.float32)
    d("level", level, "B H N", torch.float32)
    d("trend", trend, "B H N", torch.float32)
    d("theta", theta, "B 3", torch.float32)
    d("seq_lens", seq_lens, "B", torch.int32)
    d("out", out, "B H P", torch.int32)
    check_rule("predict", out.shape[2], sink, local, block_size)
    torch.ops.prr.predict(scores, level, trend, theta, seq_lens, block_size, sink, local, out)
    return out


class Replayed(NamedTuple):
    """What A holds of dynamic blocks (neither sink nor local), and what each candidate's P held of those.

    size: [L, W, H_kv] int32, blocks of A; -1 in rows that do not count. total: [L, W, H_kv] float32, their weight by
    eq 4: scores, shifted to be non-negative where some are not; the number of blocks where all weigh nothing; NaN where
    scores are infinite. hits: [L, C, W, H_kv] int32, of size. weight: [L, C, W, H_kv] float32, of total. All of these
    are 0 in rows that do not count, but size.
    """

    size: Tensor
    total: Tensor
    hits: Tensor
    weight: Tensor


def replay_hits(
    scores: Tensor,
    seq_lens: Tensor,
    theta: Tensor,
    widths: Tensor,
    block_size: int,
    top_k: int,
    sink: int = 0,
    local: int = 1,
    dense_len: int = 0,
) -> Replayed:
    """Replay candidates of the predictor over a window of W rows: P from the rows before, against A of each row.

    predict and select, step by step, for L layers at once. Rows count but the first, those of fewer than dense_len
    tokens, and those of at most K blocks; all are learned from. Fastest where candidates of one alpha and beta follow
    each other.

    Args:
        scores: [L, W, H_kv, N] float32.
        seq_lens: [W] int32, tokens at each row, the same in all layers.
        theta: [L, C, 3] float32: alpha, beta, gamma.
        widths: [C] int32, blocks of P, forced ones included.
        (the others): as for select.
    """
    check_rule("replay_hits", top_k, sink, local, block_size)
    d = Dims("replay_hits")
    d("scores", scores, "L W H N", torch.float32)
    d("seq_lens", seq_lens, "W", torch.int32)
    d("theta", theta, "L C 3", torch.float32)
    d("widths", widths, "C", torch.int32)
    L, W, H, _ = scores.shape
    total, weight = scores.new_empty(L, W, H), scores.new_empty(L, widths.shape[0], W, H)
    size, hits = (torch.empty_like(x, dtype=torch.int32) for x in (total, weight))
    out = Replayed(size, total, hits, weight)
    torch.ops.prr.replay_hits(scores, seq_lens, theta, widths, block_size, top_k, sink, local, dense_len, *out)
    return out


# ---------------------------------------------------------------------------------------------------- attention
def _check_kv(d: Dims, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, page_table: Tensor | None) -> int:
    d("k", k, "B H S T D", *FLOATS)
    d("v", v, "B H S T D", k.dtype)
    d("q", q, "B Hq D", k.dtype)
    d("seq_lens", seq_lens, "B", torch.int32)
    d("page_table", page_table, "B H C", torch.int32)
    return d.groups()


def _listed(d: Dims, ids: Tensor, k: Tensor, seq_lens: Tensor, page_table: Tensor | None) -> None:
    """With debug: listed blocks are blocks of their rows, and have slots."""
    check_ids(d.op, ids, seq_lens, k.shape[3])
    check_slots(d.op, "k", k, ids, page_table)


def _partials(
    d: Dims, q: Tensor, ids: Tensor, axes: str, G: int, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Buffers (o, lse) for the partials of listed blocks, checked, or allocated when None; axes: of lse."""
    if out is None:
        o = q.new_empty((*ids.shape, G, q.shape[2]), dtype=torch.float32)
        out = o, q.new_empty((*ids.shape, G), dtype=torch.float32)
    d("out[0]", out[0], f"{axes} D", torch.float32)
    d("out[1]", out[1], axes, torch.float32)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    beside: bool = False,
) -> tuple[Tensor, Tensor]:
    """One softmax partial a listed block, the same bits whatever else is listed.

    Args:
        q: [B, Hq, D]. k, v: [B, H_kv, S, T, D]; tokens at and beyond seq_lens are never read.
        ids: [B, H_kv, N] int32; -1, and ids out of range, are padding.
        scale: of the logits.
        page_table: [B, H_kv, C] int32, block -> slot; identity when None.
        out: buffers (o, lse), allocated when None.
        beside: on a GPU, run beside the op in front on the stream: what the paper overlaps (PRR, section 4), attention
            over P and the selection of A. That op must be select, predict, a score or rank_infllm; it must write
            nothing that is read here, nor read or write `out`, which was allocated before it was called (else it may
            be memory that it still reads). What ops further in front wrote is there, since those wait before they let
            the next one start.

    Returns:
        o: [B, H_kv, N, G, D] float32, normalised; 0 for padding.
        lse: [B, H_kv, N, G] float32, natural log; -inf for padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree; `beside` without `out`.
    """
    d = Dims("attend")
    if beside and out is None:
        raise ValueError("attend: beside another op it needs out, allocated before that one was called")
    G = _check_kv(d, q, k, v, seq_lens, page_table)
    d("ids", ids, "B H N", torch.int32)
    _listed(d, ids, k, seq_lens, page_table)
    out = _partials(d, q, ids, f"B H N {G}", G, out)
    torch.ops.prr.attend(q, k, v, ids, seq_lens, scale, page_table, *out, beside)
    return out


def _outputs(d: Dims, q: Tensor, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    if out is None:
        out = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    d("out[0]", out[0], "B Hq D", *FLOATS)
    d("out[1]", out[1], "B Hq", torch.float32)
    return out


def _check_merged(d: Dims, o: Tensor, out: tuple[Tensor, Tensor]) -> None:
    """What partials o [B, H_kv, N, G, D] are merged into."""
    d("out[0]", out[0], f"B {o.shape[1] * o.shape[3]} D", *FLOATS)
    d("out[1]", out[1], f"B {o.shape[1] * o.shape[3]}", torch.float32)


def merge(o: Tensor, lse: Tensor, out: tuple[Tensor, Tensor], early: bool = False) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint parts, from their partials (online softmax).

    Args:
        o, lse: [B, H_kv, N, G, D] and [B, H_kv, N, G] float32. Parts with lse = -inf weigh nothing, whatever their o.
        out: ([B, Hq, D] of any float dtype, [B, Hq] float32), written; o = 0, lse = -inf where every part is empty.
        early: on a GPU, let the launch behind this one start before the partials are read. Worth it where that one has
            bytes of its own to fetch first, as a linear layer has; it must not write partials, as attend does.
    """
    d = Dims("merge")
    d("o", o, "B H N G D", torch.float32)
    d("lse", lse, "B H N G", torch.float32)
    _check_merged(d, o, out)
    torch.ops.prr.merge(o, lse, *out, early)
    return out


def attend_missed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The first half of repair: partials of the blocks of A that P lacks.

    Args:
        selection: what select returned for P.
        out: buffers (o, lse), allocated when None.
        (the others): as for attend.

    Returns:
        o: [B, H_kv, K, G, D] float32, lse: [B, H_kv, K, G] float32, by place in A. Padding has lse = -inf; its o, and
        both where P holds the block, are left as they are.
    """
    d = Dims("attend_missed")
    G = _check_kv(d, q, k, v, seq_lens, page_table)
    d("selection.ids", selection.ids, "B H K", torch.int32)
    d("selection.position", selection.position, "B H K", torch.int32)
    _listed(d, selection.ids, k, seq_lens, page_table)
    out = _partials(d, q, selection.ids, f"B H K {G}", G, out)
    torch.ops.prr.attend_missed(q, k, v, selection.ids, selection.position, seq_lens, scale, page_table, *out)
    return out


def merge_repaired(
    selection: Selection,
    o: Tensor,
    lse: Tensor,
    fresh_o: Tensor,
    fresh_lse: Tensor,
    out: tuple[Tensor, Tensor],
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """The second half of repair: merge over A.

    On a GPU it starts while attend_missed runs, which must be the op before it on its stream.

    Args:
        o, lse: attend's partials of P; wasted blocks are not read.
        fresh_o, fresh_lse: what attend_missed gave for the same selection.
        out: ([B, Hq, D] of any float dtype, [B, Hq] float32), written.
        early: as for merge.
    """
    d = Dims("merge_repaired")
    d("o", o, "B H P G D", torch.float32)
    d("lse", lse, "B H P G", torch.float32)
    d("selection.position", selection.position, "B H K", torch.int32)
    d("fresh_o", fresh_o, "B H K G D", torch.float32)
    d("fresh_lse", fresh_lse, "B H K G", torch.float32)
    _check_merged(d, o, out)
    torch.ops.prr.merge_repaired(selection.position, o, lse, fresh_o, fresh_lse, *out, early)
    return out


def repair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    o: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact repair: attention over A, bit for bit merge(attend(A)), whatever P was. attend_missed, then merge_repaired.

    On a GPU the launch behind it may start before the partials are read, see merge's `early`.

    Args:
        selection: what select returned for P.
        o, lse: attend's partials of P, [B, H_kv, P, G, D] and [B, H_kv, P, G] float32; wasted blocks are not read.
        (the others): as for attend.

    Returns:
        ([B, Hq, D] of q's dtype, [B, Hq] float32).

    Raises:
        ValueError: shapes, dtypes or devices that do not agree.
    """
    d = Dims("repair")
    G = _check_kv(d, q, k, v, seq_lens, page_table)
    d("selection.ids", selection.ids, "B H K", torch.int32)
    d("selection.position", selection.position, "B H K", torch.int32)
    d("o", o, f"B H P {G} D", torch.float32)
    d("lse", lse, f"B H P {G}", torch.float32)
    _listed(d, selection.ids, k, seq_lens, page_table)
    out = _outputs(d, q, out)
    torch.ops.prr.repair(q, k, v, selection.ids, selection.position, o, lse, seq_lens, scale, page_table, *out)
    return out


def repair_union(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    o: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The paper's repair (eq 6-8): attention over A u P, wasted blocks kept.

    Args:
        selection: what select returned for P; its missed blocks are computed here.
        o, lse: running state of P: [B, Hq, D] and [B, Hq] float32 (merge over attend's partials of P).
        (the others): as for attend.

    Returns:
        ([B, Hq, D] of q's dtype, [B, Hq] float32).
    """
    d = Dims("repair_union")
    _check_kv(d, q, k, v, seq_lens, page_table)
    d("selection.missed", selection.missed, "B H K", torch.int32)
    d("o", o, "B Hq D", torch.float32)
    d("lse", lse, "B Hq", torch.float32)
    _listed(d, selection.missed, k, seq_lens, page_table)
    out = _outputs(d, q, out)
    torch.ops.prr.repair_union(q, k, v, selection.missed, o, lse, seq_lens, scale, page_table, *out)
    return out
