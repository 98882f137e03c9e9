# SPDX-License-Identifier: Apache-2.0
"""merge: softmax partials of disjoint parts -> attention over their union; also the second half of both repairs.

A CTA makes 16 columns of one query head; the arithmetic is in tree.py. A part is found in one of two places: the
partials at hand (`o`: the predicted blocks) where `position` says, or else in `fresh`, at its own index.

Positions are read before the wait for the kernel in front, which makes `fresh`: they may only be passed when that
kernel is attend(mode=MISSED), which starts this one when they are there. CTAs are small: they are to be on the SMs
before that kernel is done.

`early` lets the next launch start as soon as this one may read. Measured: before a linear layer, which fetches its
weights meanwhile, it saves .7 us a layer of a step; before an attend, which can only wait, it costs up to 1.6.
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
from cutlass_kernels.templates.tree import Tree


class Merge(Tree):
    """See the module. Parameters: dtype of the result, head size D, query heads a KV head G, early."""

    SERVES = {
        "dtype": (torch.bfloat16, torch.float16, torch.float32),
        "head size": (64, 128),
        "query heads a KV head": tuple(range(1, 17)),
    }
    THREADS = 256

    def __init__(self, dtype: str, head_dim: int, group: int, early: bool = False):
        self.dtype, self.D, self.G, self.early = common.DTYPES[dtype], head_dim, group, early

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
            preferred_smem_carveout=common.CARVEOUT,
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
        at = cx * self.LANES + t % self.LANES
        smem = SmemAllocator()
        sO = smem.allocate_tensor(Float32, cute.make_layout((self.COLS, 1, self.SETS)), 16)
        sML = smem.allocate_tensor(Float32, cute.make_layout((2, 1, self.SETS)), 16)

        parts = lead + fresh_lse.shape[2]
        state = self.start()
        x = cute.make_rmem_tensor((4, self.FLIGHT, 1), Float32)
        weight = cute.make_rmem_tensor((self.FLIGHT, 1), Float32)
        source = cute.make_rmem_tensor((self.FLIGHT,), Int32)
        first = Int32(0)
        while first < parts:  # the same for all threads
            n = first + t // self.LANES
            weight.fill(-Float32.inf)
            x.fill(0.0)
            for i in range_constexpr(self.FLIGHT):
                j = n + i * self.ROWS
                source[i] = j if j < lead else Int32(-1)  # looked up nowhere
                if looked_up == 1 and j < parts:
                    source[i] = position[b, h, j]
            cute.arch.griddepcontrol_wait()
            if const_expr(self.early):
                cute.arch.griddepcontrol_launch_dependents()
            for i in range_constexpr(self.FLIGHT):
                j = n + i * self.ROWS
                if source[i] >= 0:
                    self.load(o, lse, b, h, source[i], g, at, weight[None, 0], x[None, None, 0], i)
                elif j < parts:
                    self.load(fresh_o, fresh_lse, b, h, j - lead, g, at, weight[None, 0], x[None, None, 0], i)
            self.take(state, weight, x, self.FLIGHT)
            first = first + self.FLIGHT * self.ROWS
        cute.arch.griddepcontrol_wait()  # also of threads without a part: what is written next may still be read
        cute.arch.griddepcontrol_launch_dependents()

        self.close(state, sO, sML, t // 32, t % 32)
        cute.arch.sync_threads()
        if t < self.COLS:
            value, log = self.end(sO, sML, t, 0)
            out[b, hq, cx * self.COLS + t] = value.to(self.dtype)
            if t == 0 and cx == 0:
                out_lse[b, hq] = log

    @cute.jit
    def load(self, o, lse, b, h, n, g, at, weight, x, i):
        """Part n, as the i-th of this thread."""
        weight[i] = lse[b, h, n, g]
        cute.autovec_copy(cute.local_tile(o[b, h, n, g, None], (4,), (at,)), x[None, i])


def launch(o, lse, fresh, position, lead, out, out_lse, early, op="merge"):
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
    kernel = compiled(Merge, dtype=templates.name(out.dtype), head_dim=D, group=G, early=early)
    kernel(o, lse, *fresh, position, looked_up, lead, out, out_lse)


def merge(o, lse, out, out_lse, early=False):
    """The op."""
    launch(o, lse, (o, lse), None, 0, out, out_lse, early)
