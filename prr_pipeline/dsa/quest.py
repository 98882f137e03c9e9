# SPDX-License-Identifier: Apache-2.0
"""Quest (arXiv 2406.10774): blocks ranked by an upper bound of q . k from channel-wise extrema of post-RoPE keys.

Under grouped-query attention the query is the mean over the group and there is one top-K a KV head (PRR, A.1). The
current page is always attended and does not compete; the first two layers are dense.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.dsa.base import Metadata, SparseMethod, poison, positions


@dataclass(kw_only=True)
class Quest(SparseMethod):
    """Quest's defaults: 16-token pages, a budget of 4096 tokens, two dense layers."""

    name: str = "quest"
    block_size: int = 16
    top_k: int = 256
    dense_layers: int = 2

    def metadata(self, k: Tensor) -> Metadata:
        """kmin, kmax: [B, H_kv, N, D]."""
        return {"kmin": poison(k, k.shape[2]), "kmax": poison(k, k.shape[2])}

    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor) -> None:
        """See SparseMethod."""
        ck.append_quest(k_new, v_new, k, v, meta["kmin"], meta["kmax"], seq_lens)

    def append_rotary(
        self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor, rotary: ck.Rotary
    ) -> None:
        """See SparseMethod; one launch, but for a subclass with an append of its own."""
        if type(self).append is not Quest.append:
            super().append_rotary(k_new, v_new, k, v, meta, seq_lens, rotary)
            return
        ck.append_quest(k_new, v_new, k, v, meta["kmin"], meta["kmax"], seq_lens, rotary=rotary)

    def rebuild(self, k: Tensor, meta: Metadata, tokens: int) -> None:
        """See SparseMethod."""
        n = self.blocks(tokens)
        inside = positions(k, tokens)[:n, :, None]
        meta["kmin"][:, :, :n] = torch.where(inside, k[:, :, :n], float("inf")).amin(3)
        meta["kmax"][:, :, :n] = torch.where(inside, k[:, :, :n], float("-inf")).amax(3)

    def score(self, q: Tensor, meta: Metadata, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        """See SparseMethod; scale is unused, since it does not change the ranking."""
        ck.quest_scores(q, meta["kmin"], meta["kmax"], seq_lens, self.block_size, out, early=True)
