# SPDX-License-Identifier: Apache-2.0
"""append, append_quest, append_infllm: the newest token into the cache, with the method's metadata, in one launch.

A CTA serves one KV head. Quest: the block's extrema are compared with the new key, 16 bytes a thread. InfLLM-v2: two
more CTAs a head compute a window mean each, where this token completes one: threads sum every 8th key by halves in
float32, then the 8 sums are added by halves, which is the order of `reference.window_mean`, so that a mean has the same
bits on every device. The new key comes from k_new, never from the cache that the first CTA is writing.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.common import fake, syms

_SERVES = {"dtype": (torch.bfloat16, torch.float16), "head size": (64, 128)}
_WINDOWS = (8, 16, 32, 64, 128, 256)


class _Cache:
    """Where the newest token of a row goes."""

    @cute.jit
    def slot_of(self, table, b, h, block):
        """Slot of a block: identity, or the page table's."""
        slot = block
        if const_expr(self.paged):
            slot = table[b, h, block]
        return slot

    @cute.jit
    def store(self, k_new, v_new, k, v, table, b, h, position, t):
        """Threads 0 .. D/8 - 1 copy the key, as many behind them the value."""
        lanes = const_expr(self.D // 8)
        word = cute.make_rmem_tensor((8,), self.dtype)
        slot = self.slot_of(table, b, h, position // self.T)
        i = t % lanes
        if t < lanes:
            cute.autovec_copy(cute.local_tile(k_new[b, h, None], (8,), (i,)), word)
            cute.autovec_copy(word, cute.local_tile(k[b, h, slot, position % self.T, None], (8,), (i,)))
        elif t < 2 * lanes:
            cute.autovec_copy(cute.local_tile(v_new[b, h, None], (8,), (i,)), word)
            cute.autovec_copy(word, cute.local_tile(v[b, h, slot, position % self.T, None], (8,), (i,)))


class Append(_Cache):
    """append and, with `quest`, append_quest. Parameters: dtype, head size D, block size T, page table or not."""

    SERVES = _SERVES

    def __init__(self, dtype: str, head_dim: int, block: int, paged: bool, quest: bool):
        self.dtype, self.D, self.T = common.DTYPES[dtype], head_dim, block
        self.paged, self.quest = paged, quest

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
        stream: cuda.CUstream,
    ):
        """Launch."""
        self.kernel(k_new, v_new, k, v, kmin, kmax, seq_lens, table).launch(
            grid=[k.shape[1], k.shape[0], 1],
            block=[64, 1, 1],
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
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        h, b, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        position = seq_lens[b] - 1
        if position >= 0:
            self.store(k_new, v_new, k, v, table, b, h, position, t)
            if const_expr(self.quest):
                lanes = const_expr(self.D // 8)
                block = position // self.T
                i = t - 2 * lanes
                if i >= 0 and i < lanes:
                    self.extremum(k_new, kmin, b, h, block, position, i, True)
                elif i >= lanes and i < 2 * lanes:
                    self.extremum(k_new, kmax, b, h, block, position, i - lanes, False)

    @cute.jit
    def extremum(self, k_new, kept, b, h, block, position, i, least: cutlass.Constexpr):
        """The block's first token starts it anew."""
        new = cute.make_rmem_tensor((8,), self.dtype)
        old = cute.make_rmem_tensor((8,), self.dtype)
        at = cute.local_tile(kept[b, h, block, None], (8,), (i,))
        cute.autovec_copy(cute.local_tile(k_new[b, h, None], (8,), (i,)), new)
        if position % self.T != 0:
            cute.autovec_copy(at, old)
            for x in range_constexpr(8):
                a, c = new[x].to(Float32), old[x].to(Float32)
                kept_one = (c < a) if const_expr(least) else (c > a)
                new[x] = (c if kept_one else a).to(self.dtype)
        cute.autovec_copy(new, at)


class AppendInfLLM(_Cache):
    """append_infllm. Parameters: those of Append, and the two windows with their strides."""

    SERVES = {**_SERVES, "window": _WINDOWS}
    GROUPS = 8

    def __init__(self, dtype: str, head_dim: int, block: int, paged: bool, fine: int, fine_step: int, coarse: int,
                 coarse_step: int):  # fmt: skip
        self.dtype, self.D, self.T, self.paged = common.DTYPES[dtype], head_dim, block, paged
        self.sizes, self.steps = (fine, coarse), (fine_step, coarse_step)
        self.pairs = head_dim // 2  # threads of a group: two channels each

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
        stream: cuda.CUstream,
    ):
        """Launch."""
        self.kernel(k_new, v_new, k, v, k1, k2, seq_lens, table).launch(
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
    ):
        """A CTA, see the module."""
        t, _, _ = cute.arch.thread_idx()
        role, h, b = cute.arch.block_idx()
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((2, self.pairs, self.GROUPS)), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        n = seq_lens[b]
        if role == 0:
            if n > 0:
                self.store(k_new, v_new, k, v, table, b, h, n - 1, t)
        elif role == 1:
            self.mean(k_new, k, k1, table, b, h, n, t, sums, 0)
        else:
            self.mean(k_new, k, k2, table, b, h, n, t, sums, 1)

    @cute.jit
    def mean(self, k_new, k, means, table, b, h, n, t, sums, which: cutlass.Constexpr):
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
                    cute.autovec_copy(cute.local_tile(k_new[b, h, None], (2,), (pair,)), word)
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


def _launch(op, template, params, tensors, seq_lens, page_table):
    """Check, compile and call; tensors: k_new, v_new, k, v and the two of the metadata (or None)."""
    k = tensors[2]
    D, T = k.shape[4], k.shape[3]
    templates.serve(op, k, template.SERVES, {"dtype": k.dtype, "head size": D})
    templates.contiguous(op, seq_lens=seq_lens, page_table=page_table)
    names = ("k_new", "v_new", "k", "v", "kmin or k1", "kmax or k2")
    templates.door(op, **dict(zip(names, tensors, strict=True)))
    if tensors[0].numel():
        dtype, paged = templates.name(k.dtype), page_table is not None
        kernel = compiled(template, dtype=dtype, head_dim=D, block=T, paged=paged, **params)
        kernel(*tensors, seq_lens, page_table)


def append(k_new, v_new, k, v, seq_lens, page_table):
    """The op."""
    _append("append", k_new, v_new, k, v, None, None, seq_lens, page_table)


def append_quest(k_new, v_new, k, v, kmin, kmax, seq_lens, page_table):
    """The op."""
    _append("append_quest", k_new, v_new, k, v, kmin, kmax, seq_lens, page_table)


def _append(op, k_new, v_new, k, v, kmin, kmax, seq_lens, page_table):
    params = {"quest": kmin is not None}
    _launch(op, Append, params, (k_new, v_new, k, v, kmin, kmax), seq_lens, page_table)


def append_infllm(k_new, v_new, k, v, k1, k2, seq_lens, window, stride, coarse_window, coarse_stride, page_table):
    """The op."""
    params = {"fine": window, "fine_step": stride, "coarse": coarse_window, "coarse_step": coarse_stride}
    for size in (window, coarse_window):
        templates.serve("append_infllm", k, AppendInfLLM.SERVES, {"window": size})
    _launch("append_infllm", AppendInfLLM, params, (k_new, v_new, k, v, k1, k2), seq_lens, page_table)
