# SPDX-License-Identifier: Apache-2.0
"""The top-K blocks of a row of scores in one launch, with forced blocks, and compared with the predicted ones."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.memory import SmemAllocator
from torch import Tensor

from cutlass_kernels import templates
from cutlass_kernels.compile import compiled
from cutlass_kernels.templates import common
from cutlass_kernels.templates.topk import RowSelect, blocks_of, shape_of, wide


class Select(RowSelect):
    """A = the forced and the highest of a row of scores, and A against P: place in P, missed blocks, counts."""

    def signature(self):
        """What __call__ is compiled for."""
        B, H, K, P = common.syms(4)
        lists = common.fake(Int32, (B, H, K), 4)
        return (
            self.row_signature(B, H),
            common.fake(Int32, (B,), 4),
            Int32(1),
            Int32(0),
            Int32(1),
            common.fake(Int32, (B, H, P), 4),
            lists,
            lists,
            lists,
            common.fake(Int32, (B, H, 2), 4),
        )

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        predicted: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
        stream: CUstream,
    ):
        """Launch a cluster a row; the arguments are those of the op."""
        self.kernel(scores, seq_lens, block_size, sink, local, predicted, ids, position, missed, counts).launch(
            grid=[self.cluster, scores.shape[1], scores.shape[0]],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=common.CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        seq_lens: cute.Tensor,
        block_size: Int32,
        sink: Int32,
        local: Int32,
        predicted: cute.Tensor,
        ids: cute.Tensor,
        position: cute.Tensor,
        missed: cute.Tensor,
        counts: cute.Tensor,
    ):
        """CTA `rank` of the cluster of row (b, h)."""
        t, _, _ = cute.arch.thread_idx()
        rank, h, b = cute.arch.block_idx()
        out = SimpleNamespace(ids=ids, position=position, missed=missed, counts=counts)
        m = self.memory(SmemAllocator(), True)
        self.setup(m, True)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        first = rank * self.chunk + t * self.E
        values = self.load(scores, b, h, first)
        early = self.early(predicted, b, h)
        n = blocks_of(seq_lens[b], block_size)
        self.ready()
        self.note(early, predicted, b, h, rank, m)
        key = self.keys(values, first, n, scores.shape[2], ids.shape[2], sink, local)
        self.choose(key, cutlass.min(n, scores.shape[2]), first, b, h, rank, m, out, True)


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
    """The op select for CUDA tensors."""
    N = scores.shape[2]
    templates.serve("select", scores, Select.SERVES, {"number of blocks": N})
    if counts.numel():
        kernel = compiled(Select, **shape_of(N), vector=wide(scores))
        kernel(scores, seq_lens, block_size, sink, local, predicted, ids, position, missed, counts)
