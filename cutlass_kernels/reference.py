# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch: the oracle that kernels are held against, and what a CPU runs.

Exactness is a property of how these are written. Every floating-point reduction is a fixed tree of elementwise
operations (`_tree_last`, `_tree_rows`, `_tree_parts`), never a library sum or product, whose order depends on sizes
around it. So the partial of a block depends on nothing but that block, q and the scale, whatever else is in the launch,
and a merge depends on nothing but the partials of A in ascending order. exp and log are taken of contiguous tensors
only (a test checks that their value does not depend on the position; exp2's does, on some CPUs). The norms alone have
torch's mean: they are to have the bits of the layers that models come with.
"""

import torch
from torch import Tensor

INF = float("inf")
_CHUNK = 1 << 21  # elements of one elementwise product of attend: bounds memory, changes no value


def num_blocks(seq_lens: Tensor, block_size: int) -> Tensor:
    """Blocks that hold tokens, the partly filled last one included. [B] int32 -> [B] int32."""
    return (seq_lens + (block_size - 1)) // block_size


def _tree_last(x: Tensor) -> Tensor:
    """Sum over the last axis by halves: the same order for every row, whatever the shape of the rest."""
    n = x.shape[-1]
    while n > 1:
        half = n // 2
        y = x[..., :half] + x[..., half : 2 * half]
        if n % 2:
            y = torch.cat((y, x[..., 2 * half : n]), -1)
        x, n = y, half + n % 2
    return x[..., 0]


def _tree_rows(x: Tensor) -> Tensor:
    """Sum over the last axis but one, by halves."""
    n = x.shape[-2]
    while n > 1:
        half = n // 2
        y = x[..., :half, :] + x[..., half : 2 * half, :]
        if n % 2:
            y = torch.cat((y, x[..., 2 * half : n, :]), -2)
        x, n = y, half + n % 2
    return x[..., 0, :]


def _tree_parts(x: Tensor) -> Tensor:
    """Sum over axis 2 by neighbours: trailing zeros (padding of any length) do not change a bit of the result."""
    if x.shape[2] == 0:
        return x.new_zeros(x.shape[:2] + x.shape[3:])
    while x.shape[2] > 1:
        if x.shape[2] % 2:
            x = torch.cat((x, torch.zeros_like(x[:, :, :1])), 2)
        x = x[:, :, 0::2] + x[:, :, 1::2]
    return x[:, :, 0]


# ---------------------------------------------------------------------------------------------------- cache
def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE (arXiv 2104.09864) of the first R channels, in float32. x: [B, H, D]; cos, sin: [B, R], angles twice."""
    half = cos.shape[1] // 2
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    c, s = (y[:, None, :half].float() for y in (cos, sin))
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = a * c - b * s, b * c + a * s
    both = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((both.to(x.dtype), rest), -1)


def rotated(
    k_new: Tensor, q: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool, q_out: Tensor | None
) -> Tensor:
    """The new keys as they are kept; where RoPE is left to append, it is done here, to the queries, too."""
    if q is None or cos is None or sin is None or q_out is None:
        return k_new
    q_out.copy_(rotate(q, cos, sin, interleaved))
    return rotate(k_new, cos, sin, interleaved)


def append(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    page_table: Tensor | None,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_out: Tensor | None,
) -> None:
    """Write the newest token (position seq_lens - 1) into its block; a row of length 0 is left alone."""
    _write(rotated(k_new, q, cos, sin, interleaved, q_out), v_new, k, v, seq_lens, page_table)


def _write(k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, page_table: Tensor | None) -> None:
    rows = (seq_lens > 0).nonzero()[:, 0]
    position = seq_lens[rows].long() - 1
    at, offset = position // k.shape[3], position % k.shape[3]
    heads = torch.arange(k.shape[1], device=k.device)
    slot = at[:, None] if page_table is None else page_table[rows[:, None], heads, at[:, None]].long()
    where = (rows[:, None], heads, slot, offset[:, None])
    k[where] = k_new[rows]
    v[where] = v_new[rows]


def append_quest(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    kmin: Tensor,
    kmax: Tensor,
    seq_lens: Tensor,
    page_table: Tensor | None,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_out: Tensor | None,
) -> None:
    """append, and the channel-wise extrema of the block; its first token starts them anew."""
    k_new = rotated(k_new, q, cos, sin, interleaved, q_out)
    _write(k_new, v_new, k, v, seq_lens, page_table)
    rows = (seq_lens > 0).nonzero()[:, 0]
    position = seq_lens[rows].long() - 1
    at, first = position // k.shape[3], (position % k.shape[3] == 0)[:, None, None]
    new = k_new[rows]
    kmin[rows, :, at] = torch.where(first, new, torch.minimum(kmin[rows, :, at], new))
    kmax[rows, :, at] = torch.where(first, new, torch.maximum(kmax[rows, :, at], new))


def append_infllm(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    window: int,
    stride: int,
    coarse_window: int,
    coarse_stride: int,
    page_table: Tensor | None,
    q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_out: Tensor | None,
) -> None:
    """append, and the mean of each window of keys that this token completes."""
    _write(rotated(k_new, q, cos, sin, interleaved, q_out), v_new, k, v, seq_lens, page_table)
    for b, n in enumerate(seq_lens.tolist()):
        for means, size, step in ((k1, window, stride), (k2, coarse_window, coarse_stride)):
            if n >= size and (n - size) % step == 0:
                keys = _tokens(k, b, n - size, n, page_table)
                means[b, :, (n - size) // step] = window_mean(keys).to(means.dtype)


def _tokens(k: Tensor, b: int, start: int, stop: int, page_table: Tensor | None) -> Tensor:
    """Keys of positions start..stop of row b, [H_kv, stop - start, D]."""
    block = k.shape[3]
    pos = torch.arange(start, stop, device=k.device)
    at = (pos // block).expand(k.shape[1], -1)
    slot = at if page_table is None else page_table[b].long().gather(1, at)
    return k[b].gather(1, slot[..., None, None].expand(-1, -1, block, k.shape[4]))[
        :, torch.arange(len(pos), device=k.device), pos % block
    ]


def window_mean(keys: Tensor) -> Tensor:
    """Mean over the last axis but one in float32, in a fixed order: [..., T, D] -> [..., D]."""
    return _tree_rows(keys.float()) / keys.shape[-2]


# ---------------------------------------------------------------------------------------------------- scores
def quest_scores(
    q: Tensor, kmin: Tensor, kmax: Tensor, seq_lens: Tensor, block_size: int, early: bool, scores: Tensor
) -> None:
    """Upper bound of mean(q of the group) . k over the keys of a block."""
    B = q.shape[0]
    _, H, N, D = kmin.shape
    mean = _tree_rows(q.float().view(B, H, q.shape[1] // H, D)) / (q.shape[1] // H)
    inside = _inside(seq_lens, block_size, N)
    low = torch.where(inside[:, None, :, None], kmin, 0).float()
    high = torch.where(inside[:, None, :, None], kmax, 0).float()
    bound = torch.maximum(mean[:, :, None] * low, mean[:, :, None] * high)
    scores.copy_(torch.where(inside[:, None], _tree_last(bound), -INF))


def infllm_scores(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    window: int,
    stride: int,
    coarse_window: int,
    coarse_stride: int,
    exact: bool,
    scores: Tensor,
) -> None:
    """Group sum of exp(q . k1 - normaliser), then the maximum over the windows that touch a block."""
    if not scores.numel():
        return
    logits = _window_logits(q, k1, seq_lens, scale, window, stride)  # [B, H, G, W1]
    norm = _log_sum_exp(logits)
    if not exact:
        coarse = _log_sum_exp(_window_logits(q, k2, seq_lens, scale, coarse_window, coarse_stride))
        norm = torch.where(coarse > -INF, coarse, norm)  # no complete coarse window yet: exact
    norm = torch.where(norm > -INF, norm, 0.0)
    weight = torch.exp((logits - norm[..., None]).contiguous())
    inside = _complete(seq_lens, window, stride, k1.shape[2])
    weight = torch.where(inside[:, None], _tree_rows(weight), -INF)  # [B, H, W1]

    per_block, reach = block_size // stride, window // stride - 1
    N = scores.shape[2]
    need = (N - 1) * per_block + per_block + reach
    right = max(0, need - reach - weight.shape[2])
    padded = torch.nn.functional.pad(weight, (reach, right), value=-INF)
    touching = padded.unfold(2, per_block + reach, per_block)[:, :, :N]
    valid = _inside(seq_lens, block_size, N)
    scores.copy_(torch.where(valid[:, None], touching.amax(-1), -INF))


def _inside(seq_lens: Tensor, block_size: int, N: int) -> Tensor:
    """[B, N] bool: block n of row b holds a token."""
    return torch.arange(N, device=seq_lens.device) < num_blocks(seq_lens, block_size)[:, None]


def _complete(seq_lens: Tensor, size: int, step: int, W: int) -> Tensor:
    """[B, W] bool: window w of row b is complete."""
    return torch.arange(W, device=seq_lens.device) * step + size <= seq_lens[:, None]


def _window_logits(q: Tensor, means: Tensor, seq_lens: Tensor, scale: float, size: int, step: int) -> Tensor:
    """Scaled q . mean, -inf where the window is not complete: [B, H_kv, G, W] float32."""
    B = q.shape[0]
    _, H, W, D = means.shape
    live = _complete(seq_lens, size, step, W)[:, None, :, None]
    keys = torch.where(live, means, 0).float()
    dots = _tree_last(q.float().view(B, H, q.shape[1] // H, 1, D) * keys[:, :, None]) * scale
    return torch.where(live[:, :, None, :, 0], dots, -INF)


def _log_sum_exp(x: Tensor) -> Tensor:
    """Over the last axis; -inf of an empty or all -inf row."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], -INF)
    top = x.amax(-1)
    base = torch.where(top > -INF, top, 0.0)
    return base + torch.log(_tree_last(torch.exp((x - base[..., None]).contiguous())))


# ---------------------------------------------------------------------------------------------------- selection
def rank_blocks(values: Tensor, seq_lens: Tensor, block_size: int, sink: int, local: int) -> Tensor:
    """The order of selection, of A and of P alike: forced blocks, then the highest values, ties to the lowest id.

    Returns [B, H_kv, N] int64: a set of K blocks is those of rank < K. -inf, NaN and blocks without tokens, unless
    forced, rank N: they are never taken.
    """
    B, H, N = values.shape
    index = torch.arange(N, device=values.device)
    n = num_blocks(seq_lens, block_size)[:, None]
    forced = (index < n) & ((index < sink) | (index >= n - local))  # [B, N]
    open_ = torch.where(((index < n) & ~forced)[:, None] & (values == values), values, -INF)
    order = open_.sort(dim=2, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(2, order, (index + forced.sum(1)[:, None])[:, None].expand(B, H, N))
    rank = torch.where(open_ > -INF, rank, N)
    return torch.where(forced[:, None], (forced.cumsum(1) - 1)[:, None], rank)


def top_blocks(values: Tensor, seq_lens: Tensor, block_size: int, sink: int, local: int, ids: Tensor) -> None:
    """The first K of rank_blocks, ascending; a row of at most K blocks takes them all, whatever their values."""
    N, K = values.shape[2], ids.shape[2]
    inside = _inside(seq_lens, block_size, N)[:, None]
    few = num_blocks(seq_lens, block_size)[:, None, None] <= K
    taken = torch.where(few, inside, rank_blocks(values, seq_lens, block_size, sink, local) < K)
    index = torch.arange(N, device=values.device)
    ascending = torch.where(taken, index, N).sort(dim=2).values[:, :, :K]
    ids.fill_(-1)
    ids[:, :, : ascending.shape[2]] = torch.where(ascending < N, ascending, -1)


def select(
    scores: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sink: int,
    local: int,
    predicted: Tensor,
    ids: Tensor,
    position: Tensor,
    missed: Tensor,
    counts: Tensor,
) -> None:
    """A = top_blocks(scores), and A against P: where the partial of each block of A is, and what is missing."""
    top_blocks(scores, seq_lens, block_size, sink, local, ids)
    position.copy_(_find(ids, predicted))
    lost = (position < 0) & (ids >= 0)
    K = ids.shape[2]
    big = torch.iinfo(torch.int32).max
    ascending = torch.where(lost, ids, big).sort(dim=2).values
    missed.copy_(torch.where(ascending < big, ascending, -1))
    counts[..., 0] = (ids >= 0).sum(2) if K else 0
    counts[..., 1] = lost.sum(2) if K else 0


def rank_infllm(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    seq_lens: Tensor,
    scale: float,
    block_size: int,
    window: int,
    stride: int,
    coarse_window: int,
    coarse_stride: int,
    exact: bool,
    sink: int,
    local: int,
    predicted: Tensor,
    scores: Tensor,
    ids: Tensor,
    position: Tensor,
    missed: Tensor,
    counts: Tensor,
) -> None:
    """infllm_scores, then select."""
    sizes = window, stride, coarse_window, coarse_stride
    infllm_scores(q, k1, k2, seq_lens, scale, block_size, *sizes, exact, scores)
    select(scores, seq_lens, block_size, sink, local, predicted, ids, position, missed, counts)


def _find(ids: Tensor, within: Tensor) -> Tensor:
    """Index of each id among `within` (the first, if twice), -1 if absent or padding."""
    if within.shape[2] == 0 or ids.shape[2] == 0:
        return torch.full_like(ids, -1)
    same = (ids[..., :, None] == within[..., None, :]) & (ids >= 0)[..., None]
    return torch.where(same.any(-1), same.int().argmax(-1), -1).to(ids.dtype)


def predict(
    scores: Tensor,
    level: Tensor,
    trend: Tensor,
    theta: Tensor,
    seq_lens: Tensor,
    block_size: int,
    sink: int,
    local: int,
    ids: Tensor,
) -> None:
    """Eq 3, then eq 2: update level and trend with the scores just seen, and rank the blocks of the next step."""
    learn(scores, level, trend, theta, seq_lens, block_size)
    following = torch.where(seq_lens > 0, seq_lens + 1, 0)
    top_blocks(level + theta[:, 2, None, None] * trend, following, block_size, sink, local, ids)


def learn(scores: Tensor, level: Tensor, trend: Tensor, theta: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Eq 3 in place; a block's first finite score sets level = IS, trend = 0; others than finite ones are skipped."""
    alpha, beta = theta[:, 0, None, None], theta[:, 1, None, None]
    fresh = level != level  # NaN: never scored
    seen = torch.isfinite(scores) & _inside(seq_lens, block_size, scores.shape[2])[:, None]
    new_trend = torch.where(fresh, 0.0, beta * (scores - level) + (1 - beta) * trend)
    new_level = torch.where(fresh, scores, alpha * scores + (1 - alpha) * level)
    trend.copy_(torch.where(seen, new_trend, trend))
    level.copy_(torch.where(seen, new_level, level))


def replay_hits(
    scores: Tensor,
    seq_lens: Tensor,
    theta: Tensor,
    widths: Tensor,
    block_size: int,
    top_k: int,
    sink: int,
    local: int,
    dense_len: int,
    size: Tensor,
    total: Tensor,
    hits: Tensor,
    weight: Tensor,
) -> None:
    """Row by row, all layers and candidates at once: P from the rows before against A, then learn."""
    L, W, H, N = scores.shape
    C = widths.shape[0]
    flat = theta.reshape(L * C, 3)
    level = scores.new_full((L * C, H, N), float("nan"))
    trend = torch.zeros_like(level)
    results = (size, total, hits, weight)
    for x, nothing in zip(results, (-1, 0, 0, 0), strict=True):
        x.fill_(nothing)
    rule = (block_size, sink, local)
    for w, tokens in enumerate(seq_lens.tolist()):
        row, lens = scores[:, w], seq_lens[w : w + 1].expand(L * C)
        n = -(-tokens // block_size)
        if w and tokens >= dense_len and n > top_k:
            rank = rank_blocks(level + flat[:, 2, None, None] * trend, lens, *rule).view(L, C, H, N)
            held = (rank < widths[:, None, None]) | (n <= widths[:, None, None])
            chosen = rank_blocks(row, lens[:L], *rule) < top_k
            for x, counted in zip(results, _shared(row, chosen, held, sink, n - local), strict=True):
                x.select(-2, w).copy_(counted)
        learn(row[:, None].expand(L, C, H, N).reshape(L * C, H, N), level, trend, flat, lens, block_size)


def _shared(row: Tensor, chosen: Tensor, held: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
    """Number and weight (eq 4) of A's blocks start ... stop, then of those held.

    Scores are shifted to be none below 0; where all weigh nothing, each block weighs 1. row, chosen: [L, H, N], held:
    [L, C, H, N].
    """
    index = torch.arange(row.shape[2], device=row.device)
    dynamic = chosen & (index >= start) & (index < stop)
    both = held & dynamic[:, None]
    lowest = torch.where(dynamic, row, INF).amin(-1, keepdim=True).clamp(max=0)
    value = torch.where(dynamic, row - lowest, 0.0)
    value = torch.where(_tree_last(value)[..., None] > 0, value, dynamic.float())
    total = _tree_last(value)
    total = torch.where(total < INF, total, float("nan"))
    weight = _tree_last(torch.where(both, value[:, None], 0.0))
    return dynamic.sum(-1), total, both.sum(-1), weight


# ---------------------------------------------------------------------------------------------------- attention
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None,
    o: Tensor,
    lse: Tensor,
    beside: bool = False,
) -> None:
    """One softmax partial a block; `beside` is of the launch."""
    B, H, S, T, D = k.shape
    G, N = q.shape[1] // H, ids.shape[2]
    if not S:  # a cache without slots: all ids are padding
        o.zero_()
        lse.fill_(-INF)
        return
    live, slot = _locate(ids, seq_lens, page_table, T, S)
    rows = q.float().view(B, H, 1, G, D, 1)
    batch = torch.arange(B, device=k.device)[:, None, None]
    head = torch.arange(H, device=k.device)[:, None]
    step = max(1, _CHUNK // max(1, B * H * G * T * D))
    for start in range(0, N, step):
        part = slice(start, min(start + step, N))
        at = (batch, head, slot[:, :, part])
        token = torch.arange(T, device=k.device) < live[:, :, part, None]
        dead = ~token[..., None]
        keys = k[at].masked_fill_(dead, 0).float().mT.contiguous()
        values = v[at].masked_fill_(dead, 0).float()
        s = _tree_rows(rows * keys[:, :, :, None]) * scale  # [B, H, n, G, T]
        s.masked_fill_(dead[:, :, :, None, :, 0], -INF)
        top = s.amax(-1)
        base = torch.where(top > -INF, top, 0.0)
        p = torch.exp((s - base[..., None]).contiguous())
        total = _tree_last(p)
        weighted = _tree_rows(p[..., None] * values[:, :, :, None])
        some = total != 0  # true of NaN: a wrong read must show, not weigh nothing
        o[:, :, part] = torch.where(some[..., None], weighted / total[..., None], 0.0)
        lse[:, :, part] = torch.where(some, base + torch.log(total), -INF)


def _locate(ids: Tensor, seq_lens: Tensor, page_table: Tensor | None, T: int, S: int) -> tuple[Tensor, Tensor]:
    """Tokens alive in each listed block (0 for padding and ids out of range), and its slot."""
    n = num_blocks(seq_lens, T)[:, None, None]
    valid = (ids >= 0) & (ids < n)
    block = torch.where(valid, ids, 0).long()
    if page_table is None:
        slot = block
    elif page_table.shape[2] == 0:
        slot = torch.full_like(block, -1)
    else:
        last = page_table.shape[2] - 1
        slot = torch.where(block > last, -1, page_table.long().gather(2, block.clamp(max=last)))
    valid = valid & (slot >= 0) & (slot < S)
    live = torch.where(valid, (seq_lens[:, None, None] - block * T).clamp(max=T), 0)
    return live, torch.where(valid, slot, 0)


def merge(o: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor, early: bool = False) -> None:
    """Online softmax over partials, in the order of the axis."""
    B, H, N, G, D = o.shape
    top = lse.amax(2) if N else lse.new_full((B, H, G), -INF)
    base = torch.where(top > -INF, top, 0.0)
    w = torch.exp((lse - base[:, :, None]).contiguous())
    total = _tree_parts(w)
    weighted = _tree_parts(torch.where(w[..., None] == 0, 0.0, w[..., None] * o)) + 0.0  # padding makes 0 of -0
    some = total != 0
    out.copy_(torch.where(some[..., None], weighted / total[..., None], 0.0).view(B, H * G, D))
    out_lse.copy_(torch.where(some, base + torch.log(total), -INF).view(B, H * G))


def attend_missed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    position: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Partials of the blocks of A without a position, in their places."""
    lost = torch.where(position >= 0, -1, ids)
    columns = (lost >= 0).any(1).any(0).nonzero()[:, 0]
    lost = lost[:, :, columns]
    part_o, part_lse = o.new_empty(*lost.shape, *o.shape[3:]), lse.new_empty(*lost.shape, lse.shape[3])
    attend(q, k, v, lost, seq_lens, scale, page_table, part_o, part_lse)
    fill = (lost >= 0)[..., None]
    o[:, :, columns] = torch.where(fill[..., None], part_o, o[:, :, columns])
    lse[:, :, columns] = torch.where(fill, part_lse, lse[:, :, columns])
    lse.masked_fill_((ids < 0)[..., None], -INF)


def merge_repaired(
    position: Tensor,
    o: Tensor,
    lse: Tensor,
    fresh_o: Tensor,
    fresh_lse: Tensor,
    out: Tensor,
    out_lse: Tensor,
    early: bool = False,
) -> None:
    """Merge over A: looked up where there is a position, else fresh."""
    if o.shape[2]:
        known, at = (position >= 0)[..., None], position.clamp(min=0).long()[..., None]
        looked = o.gather(2, at[..., None].expand(-1, -1, -1, *o.shape[3:]))
        fresh_o = torch.where(known[..., None], looked, fresh_o)
        fresh_lse = torch.where(known, lse.gather(2, at.expand(-1, -1, -1, o.shape[3])), fresh_lse)
    merge(fresh_o, fresh_lse, out, out_lse)


def repair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    position: Tensor,
    o: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None,
    out: Tensor,
    out_lse: Tensor,
) -> None:
    """Its two halves: bit for bit merge(attend(A))."""
    fresh = o.new_empty(*ids.shape, *o.shape[3:]), lse.new_empty(*ids.shape, lse.shape[3])
    position = torch.where(ids >= 0, position, -1)
    attend_missed(q, k, v, ids, position, seq_lens, scale, page_table, *fresh)
    merge_repaired(position, o, lse, *fresh, out, out_lse)


def repair_union(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    missed: Tensor,
    o: Tensor,
    lse: Tensor,
    seq_lens: Tensor,
    scale: float,
    page_table: Tensor | None,
    out: Tensor,
    out_lse: Tensor,
) -> None:
    """Eq 6-8: fold the missed blocks into the running state of P; the output is attention over A u P."""
    B, H, M = missed.shape
    G, D = q.shape[1] // H, q.shape[2]
    parts_o = torch.empty(B, H, M + 1, G, D, dtype=torch.float32, device=q.device)
    parts_lse = torch.empty(B, H, M + 1, G, dtype=torch.float32, device=q.device)
    parts_o[:, :, 0] = o.view(B, H, G, D)
    parts_lse[:, :, 0] = lse.view(B, H, G)
    attend(q, k, v, missed, seq_lens, scale, page_table, parts_o[:, :, 1:], parts_lse[:, :, 1:])
    merge(parts_o, parts_lse, out, out_lse)


# ---------------------------------------------------------------------------------------------------- linear
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, x W^T + bias, summed in float32."""
    rows = weight.split(max(1, _CHUNK // max(1, x.numel())))
    y = torch.cat([_tree_last(x.float()[:, None] * w.float()) for w in rows], 1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- norms
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The row over its rms in float32, rounded, then times the weight; torch's own mean, as it stands in models."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A linear layer of the norm of x + residual, and that sum."""
    y, total = add_rms_norm(x, residual, norm_weight, eps)
    rows = x.shape[:-1]
    return linear(y.reshape(rows.numel(), y.shape[-1]), weight, bias).view(*rows, weight.shape[0]), total


# ---------------------------------------------------------------------------------------------------- MLP
def silu_mul_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of silu(gate) * up, torch's own, which rounds twice."""
    gate, up = x.reshape(x.shape[:-1].numel(), 2, weight.shape[1]).unbind(1)
    y = linear(torch.nn.functional.silu(gate) * up, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])
