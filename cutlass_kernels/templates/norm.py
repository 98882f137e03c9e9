# SPDX-License-Identifier: Apache-2.0
"""rms_norm and add_rms_norm: a CTA a row, whose time is that of one round of loads, one sum and one round of stores.

Such a launch moves a few kilobytes, so all there is to win is latency. The weight is loaded before this launch may look
at x, and the launch behind it, which has weights of its own to fetch, is let go as soon as this one may begin.

Rounding is that of a model's own layers: the sum to the dtype, x times 1 / rms to the dtype, times the weight to the
dtype; everything in between is float32. The sum of squares has one order, so that a row always has the same bits.
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, const_expr, range_constexpr
from cutlass.cute import nvgpu
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import reference, templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common

PIECE = 8  # elements of 16 bytes
THREADS = 1024  # of a CTA, at most
LARGEST = 2 * THREADS * PIECE  # K: two pieces a thread; more would not leave 1024 threads their registers


class Row:
    """A row in the registers of a CTA. Parameters: dtype, K, threads; thread t has its pieces t, t + threads, ...

    Up to 1024 pieces have one sum of squares whatever the threads: that of each 32 neighbours, and of those in order.
    """

    def __init__(self, dtype: str, k: int, threads: int):
        self.dtype, self.K, self.threads = common.DTYPES[dtype], k, threads
        self.pieces = k // PIECE
        self.turns = -(-self.pieces // threads)  # pieces of a thread
        self.joint = -(-self.pieces // THREADS)  # of those, what it adds up by itself
        self.warps = threads // 32
        self.sums = self.warps * self.turns // self.joint  # of warps; the last ones may be of nothing

    @cute.jit
    def constant(self, w, t):
        """The thread's pieces of a row that no launch writes."""
        words = cute.make_rmem_tensor((PIECE, self.turns), self.dtype)
        for i in range_constexpr(self.turns):
            cute.autovec_copy(self.piece(w, t, i), words[None, i])
        return words

    @cute.jit
    def load(self, x, residual, t):
        """The thread's pieces of x, or of x + residual."""
        mine, other = (cute.make_rmem_tensor((PIECE, self.turns), self.dtype) for _ in range(2))
        past_l1 = cute.make_copy_atom(  # which may hold what another launch has seen there
            nvgpu.CopyG2ROp(), self.dtype, num_bits_per_copy=128, load_cache_mode=nvgpu.LoadCacheMode.GLOBAL
        )
        for i in range_constexpr(self.turns):
            cute.copy(past_l1, self.piece(x, t, i), mine[None, i])
            if const_expr(residual is not None):
                cute.copy(past_l1, self.piece(residual, t, i), other[None, i])
        if const_expr(residual is not None):
            for i in range_constexpr(self.turns):
                for e in range_constexpr(PIECE):
                    mine[e, i] = (mine[e, i].to(Float32) + other[e, i].to(Float32)).to(self.dtype)
        return mine

    @cute.jit
    def normalise(self, words, weight, eps, parts, t):
        """Make words / rms * weight of words; parts: `sums` floats of shared memory."""
        mean = cute.math.fma(self.squares(words, parts, t), Float32(1 / self.K), eps)
        scale = cute.math.rsqrt(mean, fastmath=True)
        for i in range_constexpr(self.turns):
            for e in range_constexpr(PIECE):
                normed = (words[e, i].to(Float32) * scale).to(self.dtype)
                words[e, i] = (normed.to(Float32) * weight[e, i].to(Float32)).to(self.dtype)

    @cute.jit
    def piece(self, x, t, i: cutlass.Constexpr):
        """The thread's i-th piece of a row; the last of the row where it has none, which then counts nowhere."""
        at = t + i * self.threads
        if const_expr(self.ragged(i)):
            at = cutlass.min(at, self.pieces - 1)
        return cute.local_tile(x, (PIECE,), (at,))

    def ragged(self, i):
        """Whether some thread has no i-th piece."""
        return (i + 1) * self.threads > self.pieces

    @cute.jit
    def store(self, words, x, t):
        """Write the thread's pieces of a row."""
        for i in range_constexpr(self.turns):
            if const_expr(self.ragged(i)):
                if t + i * self.threads < self.pieces:
                    cute.autovec_copy(words[None, i], self.piece(x, t, i))
            else:
                cute.autovec_copy(words[None, i], self.piece(x, t, i))

    @cute.jit
    def squares(self, words, parts, t):
        """The sum of squares of the row, for every thread: of a thread, of a warp, of the warps in their order."""
        squares = []
        for i in range_constexpr(self.turns):
            v = [words[e, i].to(Float32) for e in range(PIECE)]
            square = self.tree([cute.math.fma(a, a, b * b) for a, b in zip(v[::2], v[1::2], strict=True)])
            if const_expr(self.ragged(i)):
                square = square if t + i * self.threads < self.pieces else Float32(0.0)
            squares.append(square)
        mine = [self.tree(squares[i : i + self.joint]) for i in range(0, self.turns, self.joint)]
        for step in range_constexpr(5):
            mine = [one + cute.arch.shuffle_sync_bfly(one, offset=16 >> step) for one in mine]
        if const_expr(self.sums > 1):
            if t % 32 == 0:
                for i in range_constexpr(len(mine)):
                    parts[t // 32 + i * self.warps] = mine[i]
            cute.arch.sync_threads()
            sums = cute.make_rmem_tensor((self.sums,), Float32)
            cute.autovec_copy(parts, sums)
            mine = [sums[i] for i in range(-(-self.pieces // (32 * self.joint)))]
        return self.tree(mine)

    @staticmethod
    def tree(values):
        """Their sum by neighbours, which is a short chain of additions."""
        while len(values) > 1:
            odd = values[len(values) - len(values) % 2 :]
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + odd
        return values[0]


class Norm(Row):
    """y = x / rms(x) * weight, of x or of x + residual. Parameters: dtype, K, whether a residual is added."""

    def __init__(self, dtype: str, k: int, adds: bool):
        pieces = k // PIECE
        turns = -(-pieces // THREADS)
        super().__init__(dtype, k, 32 * -(-pieces // (32 * turns)))
        self.adds = adds

    def signature(self):
        """What __call__ is compiled for."""
        R = common.sym()
        rows = [common.fake(self.dtype, (R, self.K)) for _ in range(4)]
        if not self.adds:
            rows[1] = rows[3] = None
        return rows[0], rows[1], common.fake(self.dtype, (self.K,)), Float32(1), rows[2], rows[3]

    @cute.jit
    def __call__(self, x: cute.Tensor, residual, w: cute.Tensor, eps: Float32, y: cute.Tensor, total, stream: CUstream):
        """Launch: x, y [R, K], residual and total [R, K] or None, w [K]."""
        self.kernel(x, residual, w, eps, y, total).launch(
            grid=[y.shape[0], 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, residual, w: cute.Tensor, eps: Float32, y: cute.Tensor, total):
        """A row."""
        t, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        parts = SmemAllocator().allocate_tensor(Float32, cute.make_layout((self.sums,)), 16)
        weight = self.constant(w, t)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = self.load(x[row, None], residual[row, None] if const_expr(self.adds) else None, t)
        if const_expr(self.adds):
            self.store(words, total[row, None], t)
        self.normalise(words, weight, eps, parts, t)
        self.store(words, y[row, None], t)


def serves(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernel can: half precision, rows of 16-byte pieces and not too many of them, an SM90."""
    k = x.shape[-1]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < k <= LARGEST
        and k % PIECE == 0
        and 0 < x.numel() < 2**31
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, *others))
        and torch.cuda.get_device_capability(x.device) == templates.CAPABILITY
    )


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    k = x.shape[-1]
    kernel = compiled(Norm, dtype=templates.name(x.dtype), k=k, adds=residual is not None)
    y = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    rows = [None if z is None else z.view(-1, k) for z in (x, residual, y, total)]
    kernel(rows[0], rows[1], weight, eps, rows[2], rows[3])
    return y, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op rms_norm for CUDA tensors; torch's own operations where there is no kernel."""
    return _launch(x, None, weight, eps)[0] if serves(x, weight) else reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op add_rms_norm for CUDA tensors; torch's own operations where there is no kernel."""
    if not serves(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    y, total = _launch(x, residual, weight, eps)
    return y, total
