# SPDX-License-Identifier: Apache-2.0
"""merge: softmax partials of disjoint parts -> attention over their union; also the second half of both repairs.

A CTA makes `COLS` columns of one query head. Its threads each take every ROWS-th part with a running maximum, then the
threads' states are combined by a fixed tree. A part is found in one of two places: the partials at hand (`o`: the
predicted blocks) where `position` says, or else in `fresh`, at its own index. Where a part lies changes no bit of the
result, nor do empty parts (lse = -inf), whatever their o: a repair runs this very kernel.

Positions are read before the wait for the kernel in front, which makes `fresh`: they may only be passed when that
kernel is attend(mode=MISSED), which starts this one after its own wait. CTAs are small: they are to be on the SMs
before that kernel is done.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.common import fake, syms


class Merge:
    """See the module. Parameters: dtype of the result, head size D, query heads a KV head G."""

    SERVES = {
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "head size": (64, 128),
        "query heads a KV head": tuple(range(1, 17)),
    }
    COLS = 16
    THREADS = 256
    LANES = COLS // 4  # threads that read a part's columns, 16 bytes each
    ROWS = THREADS // LANES
    STEPS = 3  # of shuffles: a warp holds 2 ** STEPS rows
    FLIGHT = 4  # parts of a thread whose loads are in flight together

    def __init__(self, dtype: str, head_dim: int, group: int):
        self.dtype, self.D, self.G = common.DTYPES[dtype], head_dim, group

    def signature(self):
        """Fake arguments, see the templates package."""
        B, Hq, H, P, N, X = syms(6)
        return (
            fake(Float32, (B, H, P, self.G, self.D)),
            fake(Float32, (B, H, P, self.G), 4),
            fake(Float32, (B, H, N, self.G, self.D)),
            fake(Float32, (B, H, N, self.G), 4),
            fake(Int32, (B, H, X), 4),
            Int32(0),
            Int32(0),
            fake(self.dtype, (B, Hq, self.D), 4),
            fake(Float32, (B, Hq), 4),
        )

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        lse: cute.Tensor,
        fresh_o: cute.Tensor,
        fresh_lse: cute.Tensor,
        position: cute.Tensor,
        looked_up: Int32,
        lead: Int32,
        out: cute.Tensor,
        out_lse: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch."""
        self.kernel(o, lse, fresh_o, fresh_lse, position, looked_up, lead, out, out_lse).launch(
            grid=[self.D // self.COLS, out.shape[1], out.shape[0]],
            block=[self.THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=4,  # bounds the registers
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        lse: cute.Tensor,
        fresh_o: cute.Tensor,
        fresh_lse: cute.Tensor,
        position: cute.Tensor,
        looked_up: Int32,
        lead: Int32,
        out: cute.Tensor,
        out_lse: cute.Tensor,
    ):
        """Parts: the first `lead` of o, then those of fresh, replaced by o[position] where looked_up is 1."""
        t, _, _ = cute.arch.thread_idx()
        cx, hq, b = cute.arch.block_idx()
        h, g = hq // self.G, hq % self.G
        lane, row = t % self.LANES, t // self.LANES
        at = cx * self.LANES + lane
        warps = const_expr(self.THREADS // 32)
        smem = SmemAllocator()
        sO = smem.allocate_tensor(Float32, cute.make_layout((4, self.LANES, warps)), 16)
        sML = smem.allocate_tensor(Float32, cute.make_layout((2, warps)), 16)

        parts = lead + fresh_lse.shape[2]
        m, total = -Float32.inf, Float32(0.0)
        acc = cute.make_rmem_tensor((4,), Float32)
        acc.fill(0.0)
        x = cute.make_rmem_tensor((4, self.FLIGHT), Float32)
        weight = cute.make_rmem_tensor((self.FLIGHT,), Float32)
        source = cute.make_rmem_tensor((self.FLIGHT,), Int32)
        n = row
        while n < parts:
            for i in range_constexpr(self.FLIGHT):
                source[i] = Int32(-1)
                weight[i] = -Float32.inf
                for e in range_constexpr(4):
                    x[e, i] = Float32(0.0)
                if looked_up == 1 and n + i * self.ROWS < parts:
                    source[i] = position[b, h, n + i * self.ROWS]
            cute.arch.griddepcontrol_wait()
            for i in range_constexpr(self.FLIGHT):
                j = n + i * self.ROWS
                if j < lead:  # looked up nowhere
                    source[i] = j
                if source[i] >= 0:
                    weight[i] = lse[b, h, source[i], g]
                    cute.autovec_copy(cute.local_tile(o[b, h, source[i], g, None], (4,), (at,)), x[None, i])
                elif j < parts:
                    weight[i] = fresh_lse[b, h, j - lead, g]
                    cute.autovec_copy(cute.local_tile(fresh_o[b, h, j - lead, g, None], (4,), (at,)), x[None, i])
            top = m
            for i in range_constexpr(self.FLIGHT):
                top = cute.arch.fmax(top, weight[i])
            base = top if top > -Float32.inf else Float32(0.0)
            keep = cute.arch.exp2((m - base) * common.LOG2E)
            total = total * keep
            for e in range_constexpr(4):
                acc[e] = acc[e] * keep
            for i in range_constexpr(self.FLIGHT):
                w = cute.arch.exp2((weight[i] - base) * common.LOG2E)
                total = total + w
                for e in range_constexpr(4):  # an empty part may hold anything, NaN too
                    acc[e] = acc[e] if w == 0.0 else acc[e] + w * x[e, i]
            m = top
            n = n + self.FLIGHT * self.ROWS
        cute.arch.griddepcontrol_wait()  # also of threads without a part: what is written next may still be read
        cute.arch.griddepcontrol_launch_dependents()

        top = m  # the threads of a warp that share columns
        for step in range_constexpr(self.STEPS):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=self.LANES << step))
        base = top if top > -Float32.inf else Float32(0.0)
        keep = cute.arch.exp2((m - base) * common.LOG2E)
        total = total * keep
        for e in range_constexpr(4):
            acc[e] = acc[e] * keep
        for step in range_constexpr(self.STEPS):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=self.LANES << step)
            for e in range_constexpr(4):
                acc[e] = acc[e] + cute.arch.shuffle_sync_bfly(acc[e], offset=self.LANES << step)
        if t % 32 < self.LANES:
            cute.autovec_copy(acc, sO[None, lane, t // 32])
        if t % 32 == 0:
            sML[0, t // 32] = top
            sML[1, t // 32] = total
        cute.arch.sync_threads()

        if t < self.COLS:
            top = sML[0, 0]
            for w in range_constexpr(1, warps):
                top = cute.arch.fmax(top, sML[0, w])
            base = top if top > -Float32.inf else Float32(0.0)
            value, total = Float32(0.0), Float32(0.0)
            for w in range_constexpr(warps):
                keep = cute.arch.exp2((sML[0, w] - base) * common.LOG2E)
                total = total + keep * sML[1, w]
                value = value + keep * sO[t % 4, t // 4, w]
            empty = total == 0.0  # not of NaN: a wrong partial must show, not weigh nothing
            value = Float32(0.0) if empty else value / total
            out[b, hq, cx * self.COLS + t] = value.to(self.dtype)
            if t == 0 and cx == 0:
                out_lse[b, hq] = -Float32.inf if empty else base + cute.math.log(total)


def launch(o, lse, fresh, position, lead, out, out_lse, op="merge"):
    """Merge `lead` parts of (o, lse) and all of fresh = (o, lse), replaced by o[position] where position is given.

    With a position, the kernel in front on this stream must be attend(mode=MISSED).
    """
    B, H, P, G, D = o.shape
    asked = {"dtype": out.dtype, "head size": D, "query heads a KV head": G}
    templates.serve(op, o, Merge.SERVES, asked)
    templates.contiguous(op, lse=lse, position=position, out=out, out_lse=out_lse)
    templates.door(op, o=o)
    if out.numel() == 0:
        return
    looked_up = int(position is not None)
    if position is None:  # any int32 tensor: it is not read
        position = lse.view(torch.int32).view(B, H, P * G)
    kernel = compiled(Merge, dtype=templates.name(out.dtype), head_dim=D, group=G)
    kernel(o, lse, *fresh, position, looked_up, lead, out, out_lse)


def merge(o, lse, out, out_lse):
    """The op."""
    launch(o, lse, (o, lse), None, 0, out, out_lse)
