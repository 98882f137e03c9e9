# SPDX-License-Identifier: Apache-2.0
"""linear for a few rows: one pass over the weights at read bandwidth, started while the launch before still runs.

The weights are the 16 rows of an MMA and the rows of x its columns. What a thread copies from global memory is its own
fragment, 16 bytes of a weight row at a time, so that a ring of copies needs no barrier: it is filled before this launch
may look at x, and kept full to the end. The warps of a CTA share K, and their sums are added in a fixed order.

So that a short matrix still has work for every SM, each weight row is cut into `split` rows, and x likewise: a cut row
meets all cuts of x in the MMA, and the one that it belongs to counts.
"""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common

ROWS, COLUMNS, STEP = 16, 8, 64  # of the MMA: weight rows, rows of x; and what a warp takes of K at a time
ROOM = 56 << 10  # bytes of x in shared memory
EVICT_FIRST = 0x12F0000000000000  # the policy that createpolicy.fractional.L2::evict_first makes for all accesses


@cute.jit
def copy_once(source, to):
    """Start a copy of 16 bytes to shared memory, past the L1: a cp.async of what no other launch of a step reads.

    In the L2 it is the first to go: weights stay there no longer than they must, and what small kernels read again in
    the next layer stays. (Measured: a decode step of 9B parameters .9 % faster.)
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::cache_hint [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[to.iterator, source.iterator, Int64(EVICT_FIRST)],
    )


class Linear:
    """y = x W^T + bias. Parameters: dtype, K of a cut row, rows of x, cuts of a weight row, bias or not.

    A CTA has an SM to itself, so that the next launch's takes over SM by SM; with two on an SM both streams are slower.
    """

    def __init__(self, dtype: str, k: int, rows: int, split: int, bias: bool, warps: int = 8, stages: int = 10):
        self.dtype, self.K, self.M, self.split, self.bias = common.DTYPES[dtype], k, rows, split, bias
        self.warps, self.stages = warps, stages
        self.columns = rows * split
        self.steps = k // STEP
        self.turns = -(-self.steps // warps)  # steps of a warp in a tile
        self.outputs = ROWS // split  # of a tile, for each row of x

    def signature(self):
        """What __call__ is compiled for."""
        cut, N = common.syms(2)
        return (
            common.fake(self.dtype, (self.columns, self.K)),
            common.fake(self.dtype, (cut, self.K)),
            common.fake(self.dtype, (N,), 2) if self.bias else None,
            common.fake(self.dtype, (self.M, N), 2),
            Int32(1),
        )

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, bias, y: cute.Tensor, ctas: Int32, stream: CUstream):
        """Launch: x [M split, K], w [N split, K], bias [N] or None, y [M, N]."""
        self.launch(x, w, bias, y, ctas, stream)

    @cute.jit
    def launch(self, given, w: cute.Tensor, bias, y: cute.Tensor, ctas: Int32, stream: CUstream):
        """Launch; given: what x is made of, for those that override `early` and `load_x`."""
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (ROWS, COLUMNS, 16)))
        self.kernel(given, w, bias, y, mma).launch(
            grid=[ctas, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(self, given, w: cute.Tensor, bias, y: cute.Tensor, mma: cute.TiledMma):
        """Tiles of 16 weight rows: every grid-th, from the CTA's number on."""
        t, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        every, _, _ = cute.arch.grid_dim()
        wid = cute.arch.make_warp_uniform(t // 32)
        smem = SmemAllocator()
        threads = const_expr(32 * self.warps)
        ring = smem.allocate_tensor(self.dtype, cute.make_layout((8, threads, 4, self.stages)), 16)
        sx = smem.allocate_tensor(self.dtype, cute.make_layout((self.K, self.columns)), 16)
        parts = smem.allocate_tensor(Float32, cute.make_layout((self.columns, ROWS, self.warps, 2)), 16)
        copy = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
        )
        tiles = (cute.size(w, mode=[0]) // ROWS - first + every - 1) // every
        early = self.early(given, t)
        for i in range_constexpr(self.stages - 1):
            self.fetch(w, ring, first, every, tiles, Int32(i), t, wid)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.load_x(copy, given, early, sx, parts, t)

        words = cute.make_rmem_tensor((8, 2, 2), self.dtype)  # of row r and r + 8, of either half of the step
        others = cute.make_rmem_tensor((8, 2), self.dtype)
        a = cute.make_tensor(words.iterator, cute.make_layout(((2, 2, 2), 1, (2, 2)), stride=((1, 8, 2), 0, (4, 16))))
        b = cute.make_tensor(others.iterator, cute.make_layout(((2, 2), 1, (2, 2)), stride=((1, 2), 0, (4, 8))))
        acc = cute.make_rmem_tensor(((2, 2), 1, 1, 2), Float32)  # two, which halves the chain of dependent MMAs
        lane = t % 32
        column = cutlass.min(lane // 4, self.columns - 1)
        for n in cutlass.range(tiles, unroll=1):
            tile = first + n * every
            addend = self.addend(bias, tile, t)
            acc.fill(0.0)
            for j in cutlass.range(self.turns, unroll=1):
                i = n * self.turns + j
                cute.arch.cp_async_wait_group(self.stages - 2)
                self.fetch(w, ring, first, every, tiles, i + (self.stages - 1), t, wid)
                step = j * self.warps + wid
                if step < self.steps:
                    for half in range_constexpr(2):
                        at = step * (STEP // 8) + 4 * half + lane % 4
                        cute.autovec_copy(cute.local_tile(sx[None, column], (8,), (at,)), others[None, half])
                        for row in range_constexpr(2):
                            piece = ring[None, t, 2 * half + row, i % self.stages]
                            cute.autovec_copy(piece, words[None, row, half])
                    for k in range_constexpr(4):
                        out = acc[None, None, None, k % 2]
                        cute.gemm(mma, out, a[None, None, k], b[None, None, k], out)
            self.store(acc, parts, addend, y, n % 2, tile, t, wid)

    @cute.jit
    def addend(self, bias, tile, t):
        """The bias of a thread's output, asked for a tile's time before it is wanted."""
        value = Float32(0.0)
        if const_expr(self.bias):
            at = tile * self.outputs + t % self.outputs
            if t < self.outputs * self.M:
                value = bias[at].to(Float32)
        return value

    @cute.jit
    def fetch(self, w, ring, first, every, tiles, i, t, wid):
        """Start the copies of this warp's i-th step, into the stage that the step before the present one has used."""
        lane = t % 32
        n, step = i // self.turns, i % self.turns * self.warps + wid
        if n < tiles and step < self.steps:
            row = (first + n * every) * ROWS + lane // 4
            for half in range_constexpr(2):
                at = step * (STEP // 8) + 4 * half + lane % 4
                for below in range_constexpr(2):
                    source = cute.local_tile(w[row + 8 * below, None], (8,), (at,))
                    copy_once(source, ring[None, t, 2 * half + below, i % self.stages])
        cute.arch.cp_async_commit_group()

    def early(self, given, t):
        """What a thread may load in front of the wait."""

    @cute.jit
    def load_x(self, copy, x, early, sx, parts, t):
        """All of x into shared memory; past the L1, which may hold what another launch has seen there."""
        pieces = const_expr(self.K // 8)
        for i in cutlass.range(t, pieces * self.columns, 32 * self.warps, unroll=4):
            source = cute.local_tile(x[i // pieces, None], (8,), (i % pieces,))
            cute.copy(copy, source, cute.local_tile(sx[None, i // pieces], (8,), (i % pieces,)))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def store(self, acc, parts, addend, y, buffer, tile, t, wid):
        """Add the warps' sums, and the cuts of a row. Two buffers: one barrier a tile is enough."""
        lane = t % 32
        sums = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, 2)))  # column of a pair, row half, accumulator
        for row in range_constexpr(2):
            for e in range_constexpr(2):
                column = lane % 4 * 2 + e
                if column < self.columns:
                    parts[column, lane // 4 + 8 * row, wid, buffer] = sums[e, row, 0] + sums[e, row, 1]
        cute.arch.sync_threads()
        if t < self.outputs * self.M:
            n, m = t % self.outputs, t // self.outputs
            total = Float32(0.0)
            for q in range_constexpr(self.split):
                for i in range_constexpr(self.warps):
                    total = total + parts[m * self.split + q, n * self.split + q, i, buffer]
            y[m, tile * self.outputs + n] = (total + addend).to(self.dtype)


def split_of(rows: int, n: int, k: int, processors: int) -> int:
    """Cuts of a weight row [n, k]: as few as share the tiles out to the SMs evenly, of those that the MMA can take."""
    best, least = 1, float("inf")
    split = 1
    while split * rows <= COLUMNS and k % (split * STEP) == 0:
        tiles = split * n / ROWS
        waste = -(-tiles // processors) / (tiles / processors)
        if waste < least - 0.05:
            best, least = split, waste
        split *= 2
    return best


def shares_of(rows: int, n: int, k: int, device: torch.device) -> tuple[int, int]:
    """Cuts of a weight row on a device, see split_of, and CTAs: one an SM, as far as there are tiles."""
    processors = templates.processors(device)
    split = split_of(rows, n, k, processors)
    return split, min(processors, n * split // ROWS)


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernel can: few rows of half precision, whole tiles and steps, 16-byte rows, an SM90."""
    n, k = weight.shape
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= COLUMNS
        and x.numel() * x.element_size() <= ROOM
        and n % ROWS == k % STEP == 0
        and 0 < weight.numel() < 2**31
        and all(t is None or t.is_contiguous() for t in (x, weight, bias))
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(x.device) == templates.CAPABILITY
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op linear for CUDA tensors; torch's own where there is no kernel."""
    if not serves(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)
    (rows, k), n = x.shape, weight.shape[0]
    split, ctas = shares_of(rows, n, k, x.device)
    params = {"k": k // split, "rows": rows, "split": split, "bias": bias is not None}
    kernel = compiled(Linear, dtype=templates.name(x.dtype), **params)
    y = x.new_empty(rows, n)
    cut = lambda z: z.view(-1, k // split)
    kernel(cut(x), cut(weight), bias, y, ctas)
    return y
