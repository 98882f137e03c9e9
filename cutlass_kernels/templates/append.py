# SPDX-License-Identifier: Apache-2.0
"""append, append_quest, append_infllm: the newest token into the cache, with the method's metadata, in one launch.

Where RoPE is left to it, whoever reads the new key rotates the piece that it reads; other threads rotate the queries of
the KV head's group. Products of two halves are exact in float32 (bfloat16's, if above 2^-126), so that the sum of two
has the bits of `reference.rotate`, whether it is an fma or not.

A CTA serves one KV head. Quest: the block's extrema are compared with the new key, 16 bytes a thread. InfLLM-v2: two
more CTAs a head compute a window mean each, where this token completes one: threads sum every 8th key by halves in
float32, then the 8 sums are added by halves, which is the order of `reference.window_mean`, so that a mean has the same
bits on every device. The new key comes from k_new, never from the cache that the first CTA is writing.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.common import fake, sym, syms

_SERVES = {
    "dtype": (torch.bfloat16, torch.float16),
    "head size": (64, 128),
    "query heads a KV head": tuple(range(1, 17)),  # where they are rotated, too
    "rotated channels": tuple(range(16, 129, 16)),
}
_WINDOWS = (8, 16, 32, 64, 128, 256)


class _Cache:
    """The newest token of a row: what it is, and where it goes.

    Parameters: dtype, head size D, block size T, page table or not; RoPE ("", "half" or "interleaved") of the first
    `rotated` channels, and `group` query heads a KV head.
    """

    def __init__(self, dtype: str, head_dim: int, block: int, paged: bool, rope: str, rotated: int, group: int):
        self.dtype, self.D, self.T, self.paged = common.DTYPES[dtype], head_dim, block, paged
        self.rope, self.R, self.G = rope, rotated, group
        self.lanes = head_dim // 8  # threads of a row: 16 bytes each

    def rotary(self, B):
        """Fake q, cos, sin and rotated q."""
        if not self.rope:
            return None, None, None, None
        q, angles = fake(self.dtype, (B, sym(), self.D)), fake(self.dtype, (B, self.R))
        return q, angles, angles, q

    @cute.jit
    def channels(self, x, turn, b, h, i, word, width: cutlass.Constexpr):
        """The i-th `width` channels of row (b, h) of x, after RoPE."""
        cute.autovec_copy(cute.local_tile(x[b, h, None], (width,), (i,)), word)
        if const_expr(self.rope != ""):
            pieces = const_expr(self.R // width)
            if i < pieces:
                if const_expr(self.rope == "half"):
                    self.turn_halves(x, turn, b, h, i, word, width, pieces // 2)
                else:
                    self.turn_neighbours(turn, b, i, word, width)

    @cute.jit
    def turn_halves(self, x, turn, b, h, i, word, width: cutlass.Constexpr, half: cutlass.Constexpr):
        """Channels c and c + R / 2 are a pair; half: pieces in R / 2."""
        other, cos, sin = (cute.make_rmem_tensor((width,), self.dtype) for _ in range(3))
        low = i < half
        cute.autovec_copy(cute.local_tile(x[b, h, None], (width,), (i + half if low else i - half,)), other)
        cute.autovec_copy(cute.local_tile(turn.cos[b, None], (width,), (i % half,)), cos)
        cute.autovec_copy(cute.local_tile(turn.sin[b, None], (width,), (i % half,)), sin)
        for e in range_constexpr(width):
            s = sin[e].to(Float32)
            s = -s if low else s
            word[e] = (word[e].to(Float32) * cos[e].to(Float32) + other[e].to(Float32) * s).to(self.dtype)

    @cute.jit
    def turn_neighbours(self, turn, b, i, word, width: cutlass.Constexpr):
        """Channels 2 c and 2 c + 1 are a pair."""
        pairs = const_expr(width // 2)
        cos, sin = (cute.make_rmem_tensor((pairs,), self.dtype) for _ in range(2))
        cute.autovec_copy(cute.local_tile(turn.cos[b, None], (pairs,), (i,)), cos)
        cute.autovec_copy(cute.local_tile(turn.sin[b, None], (pairs,), (i,)), sin)
        for e in range_constexpr(pairs):
            x, y, c, s = (z.to(Float32) for z in (word[2 * e], word[2 * e + 1], cos[e], sin[e]))
            word[2 * e] = (x * c - y * s).to(self.dtype)
            word[2 * e + 1] = (y * c + x * s).to(self.dtype)

    @cute.jit
    def queries(self, turn, b, h, t):
        """Threads 0 ... G D / 8 - 1 rotate the queries of a KV head."""
        if const_expr(self.rope != ""):
            head = h * self.G + t // self.lanes
            if t >= 0 and t < self.G * self.lanes:
                word = cute.make_rmem_tensor((8,), self.dtype)
                self.channels(turn.q, turn, b, head, t % self.lanes, word, 8)
                cute.autovec_copy(word, cute.local_tile(turn.out[b, head, None], (8,), (t % self.lanes,)))

    @cute.jit
    def slot_of(self, table, b, h, block):
        """Slot of a block: identity, or the page table's."""
        slot = block
        if const_expr(self.paged):
            slot = table[b, h, block]
        return slot

    @cute.jit
    def store(self, k_new, v_new, turn, k, v, table, b, h, position, t):
        """Threads 0 .. D/8 - 1 write the key, as many behind them the value."""
        lanes = const_expr(self.lanes)
        word = cute.make_rmem_tensor((8,), self.dtype)
        slot = self.slot_of(table, b, h, position // self.T)
        i = t % lanes
        if t < lanes:
            self.channels(k_new, turn, b, h, i, word, 8)
            cute.autovec_copy(word, cute.local_tile(k[b, h, slot, position % self.T, None], (8,), (i,)))
        elif t < 2 * lanes:
            cute.autovec_copy(cute.local_tile(v_new[b, h, None], (8,), (i,)), word)
            cute.autovec_copy(word, cute.local_tile(v[b, h, slot, position % self.T, None], (8,), (i,)))


class Append(_Cache):
    """append and, with `quest`, append_quest."""

    SERVES = _SERVES

    def __init__(self, quest: bool, **cache):
        super().__init__(**cache)
        self.quest = quest
        self.roles = 4 if quest else 2  # key, value, least, greatest: as many rows of threads

    def signature(self):
        """Fake arguments, see the templates package."""
        B, H, S, N, C = syms(5)
        D = self.D
        token, cache, meta = (B, H, D), (B, H, S, self.T, D), (B, H, N, D)
        return (
            fake(self.dtype, token),
            fake(self.dtype, token),
            fake(self.dtype, cache),
            fake(self.dtype, cache),
            fake(self.dtype, meta) if self.quest else None,
            fake(self.dtype, meta) if self.quest else None,
            fake(Int32, (B,), 4),
            fake(Int32, (B, H, C), 4) if self.paged else None,
            *self.rotary(B),
        )

    @cute.jit
    def __call__(
        self,
        k_new: cute.Tensor,
        v_new: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        kmin,
        kmax,
        seq_lens: cute.Tensor,
        table,
        q,
        cos,
        sin,
        q_out,
        stream: cuda.CUstream,
    ):
        """Launch."""
        self.kernel(k_new, v_new, k, v, kmin, kmax, seq_lens, table, q, cos, sin, q_out).launch(
            grid=[k.shape[1], k.shape[0], 1],
            block=[(self.roles + (self.G if self.rope else 0)) * self.lanes, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        k_new: cute.Tensor,
        v_new: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        kmin,
        kmax,
        seq_lens: cute.Tensor,
        table,
        q,
        cos,
        sin,
        q_out,
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        h, b, _ = cute.arch.block_idx()
        turn = SimpleNamespace(q=q, cos=cos, sin=sin, out=q_out)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        position = seq_lens[b] - 1
        self.queries(turn, b, h, t - self.roles * self.lanes)
        if position >= 0:
            self.store(k_new, v_new, turn, k, v, table, b, h, position, t)
            if const_expr(self.quest):
                lanes = const_expr(self.lanes)
                block = position // self.T
                i = t - 2 * lanes
                if i >= 0 and i < lanes:
                    self.extremum(k_new, turn, kmin, b, h, block, position, i, True)
                elif i >= lanes and i < 2 * lanes:
                    self.extremum(k_new, turn, kmax, b, h, block, position, i - lanes, False)

    @cute.jit
    def extremum(self, k_new, turn, kept, b, h, block, position, i, least: cutlass.Constexpr):
        """The block's first token starts it anew."""
        new = cute.make_rmem_tensor((8,), self.dtype)
        old = cute.make_rmem_tensor((8,), self.dtype)
        at = cute.local_tile(kept[b, h, block, None], (8,), (i,))
        self.channels(k_new, turn, b, h, i, new, 8)
        if position % self.T != 0:
            cute.autovec_copy(at, old)
            for x in range_constexpr(8):
                a, c = new[x].to(Float32), old[x].to(Float32)
                kept_one = (c < a) if const_expr(least) else (c > a)
                new[x] = (c if kept_one else a).to(self.dtype)
        cute.autovec_copy(new, at)


class AppendInfLLM(_Cache):
    """append_infllm. Parameters: those of the cache, and the two windows with their strides."""

    SERVES = {**_SERVES, "window": _WINDOWS}
    GROUPS = 8

    def __init__(self, fine: int, fine_step: int, coarse: int, coarse_step: int, **cache):
        super().__init__(**cache)
        self.sizes, self.steps = (fine, coarse), (fine_step, coarse_step)
        self.pairs = self.D // 2  # threads of a group: two channels each

    def signature(self):
        """Fake arguments, see the templates package."""
        B, H, S, W1, W2, C = syms(6)
        D = self.D
        token, cache = (B, H, D), (B, H, S, self.T, D)
        return (
            fake(self.dtype, token),
            fake(self.dtype, token),
            fake(self.dtype, cache),
            fake(self.dtype, cache),
            fake(self.dtype, (B, H, W1, D)),
            fake(self.dtype, (B, H, W2, D)),
            fake(Int32, (B,), 4),
            fake(Int32, (B, H, C), 4) if self.paged else None,
            *self.rotary(B),
        )

    @cute.jit
    def __call__(
        self,
        k_new: cute.Tensor,
        v_new: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        table,
        q,
        cos,
        sin,
        q_out,
        stream: cuda.CUstream,
    ):
        """Launch."""
        self.kernel(k_new, v_new, k, v, k1, k2, seq_lens, table, q, cos, sin, q_out).launch(
            grid=[3, k.shape[1], k.shape[0]],
            block=[self.GROUPS * self.pairs, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        k_new: cute.Tensor,
        v_new: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        k1: cute.Tensor,
        k2: cute.Tensor,
        seq_lens: cute.Tensor,
        table,
        q,
        cos,
        sin,
        q_out,
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        role, h, b = cute.arch.block_idx()
        turn = SimpleNamespace(q=q, cos=cos, sin=sin, out=q_out)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((2, self.pairs, self.GROUPS)), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        n = seq_lens[b]
        if role == 0:
            self.queries(turn, b, h, t - 2 * self.lanes)
            if n > 0:
                self.store(k_new, v_new, turn, k, v, table, b, h, n - 1, t)
        elif role == 1:
            self.mean(k_new, turn, k, k1, table, b, h, n, t, sums, 0)
        else:
            self.mean(k_new, turn, k, k2, table, b, h, n, t, sums, 1)

    @cute.jit
    def mean(self, k_new, turn, k, means, table, b, h, n, t, sums, which: cutlass.Constexpr):
        """Mean of the last `size` keys into window w, if the newest token completes one."""
        size, step = const_expr(self.sizes[which]), const_expr(self.steps[which])
        if n >= size and (n - size) % step == 0:
            pair, group = t % self.pairs, t // self.pairs
            rows = const_expr(size // self.GROUPS)
            x = cute.make_rmem_tensor((2, rows), Float32)
            word = cute.make_rmem_tensor((2,), self.dtype)
            for j in range_constexpr(rows):
                at = n - size + group + j * self.GROUPS
                if at == n - 1:
                    self.channels(k_new, turn, b, h, pair, word, 2)
                else:
                    slot = self.slot_of(table, b, h, at // self.T)
                    cute.autovec_copy(cute.local_tile(k[b, h, slot, at % self.T, None], (2,), (pair,)), word)
                for e in range_constexpr(2):
                    x[e, j] = word[e].to(Float32)
            left = rows
            while const_expr(left > 1):
                left //= 2
                for j in range_constexpr(left):
                    for e in range_constexpr(2):
                        x[e, j] = x[e, j] + x[e, j + left]
            cute.autovec_copy(x[None, 0], sums[None, pair, group])
            cute.arch.sync_threads()
            if group == 0:
                left = self.GROUPS
                y = cute.make_rmem_tensor((2, self.GROUPS), Float32)
                cute.autovec_copy(sums[None, pair, None], y)
                while const_expr(left > 1):
                    left //= 2
                    for j in range_constexpr(left):
                        for e in range_constexpr(2):
                            y[e, j] = y[e, j] + y[e, j + left]
                for e in range_constexpr(2):
                    word[e] = (y[e, 0] / size).to(self.dtype)
                cute.autovec_copy(word, cute.local_tile(means[b, h, (n - size) // step, None], (2,), (pair,)))


def _launch(op, template, params, tensors, seq_lens, page_table, rotary):
    """Check, compile and call; tensors: k_new, v_new, k, v and the two of the metadata (or None).

    rotary: q, cos, sin, interleaved and the rotated q, see the ops.
    """
    k = tensors[2]
    D, T = k.shape[4], k.shape[3]
    q, cos, sin, interleaved, q_out = rotary
    asked = {"dtype": k.dtype, "head size": D}
    if q is not None:
        params = {**params, "rope": "interleaved" if interleaved else "half", "rotated": cos.shape[1]}
        params["group"] = asked["query heads a KV head"] = q.shape[1] // k.shape[1]
        asked["rotated channels"] = cos.shape[1]
    else:
        params = {**params, "rope": "", "rotated": 0, "group": 0}
    templates.serve(op, k, template.SERVES, asked)
    templates.contiguous(op, seq_lens=seq_lens, page_table=page_table)
    names = ("k_new", "v_new", "k", "v", "kmin or k1", "kmax or k2")
    templates.door(op, **dict(zip(names, tensors, strict=True)), q=q, cos=cos, sin=sin, q_out=q_out)
    if tensors[0].numel():
        dtype, paged = templates.name(k.dtype), page_table is not None
        kernel = compiled(template, dtype=dtype, head_dim=D, block=T, paged=paged, **params)
        kernel(*tensors, seq_lens, page_table, q, cos, sin, q_out)


def append(k_new, v_new, k, v, seq_lens, page_table, q, cos, sin, interleaved, q_out):
    """The op."""
    tensors, rotary = (k_new, v_new, k, v, None, None), (q, cos, sin, interleaved, q_out)
    _launch("append", Append, {"quest": False}, tensors, seq_lens, page_table, rotary)


def append_quest(k_new, v_new, k, v, kmin, kmax, seq_lens, page_table, q, cos, sin, interleaved, q_out):
    """The op."""
    tensors, rotary = (k_new, v_new, k, v, kmin, kmax), (q, cos, sin, interleaved, q_out)
    _launch("append_quest", Append, {"quest": True}, tensors, seq_lens, page_table, rotary)


def append_infllm(
    k_new,
    v_new,
    k,
    v,
    k1,
    k2,
    seq_lens,
    window,
    stride,
    coarse_window,
    coarse_stride,
    page_table,
    q,
    cos,
    sin,
    interleaved,
    q_out,
):
    """The op."""
    params = {"fine": window, "fine_step": stride, "coarse": coarse_window, "coarse_step": coarse_stride}
    for size in (window, coarse_window):
        templates.serve("append_infllm", k, AppendInfLLM.SERVES, {"window": size})
    tensors, rotary = (k_new, v_new, k, v, k1, k2), (q, cos, sin, interleaved, q_out)
    _launch("append_infllm", AppendInfLLM, params, tensors, seq_lens, page_table, rotary)
