# SPDX-License-Identifier: Apache-2.0
"""InfLLM-v2 (arXiv 2509.24663), training-free: blocks ranked by attention weights over means of key windows.

k1 are means of 32 keys at stride 16, k2 of 128 at stride 64. A block's score is the maximum, over the windows of k1
that touch it, of the weights summed over the query heads of the group, normalised by the LSE over k2 (coarse) or k1
(exact).
"""

from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

import cutlass_kernels as ck
from cutlass_kernels.reference import window_mean
from prr_pipeline.dsa.base import Metadata, SparseMethod, flat_tokens, poison
from prr_pipeline.errors import ConfigError


class _Sizes(TypedDict):
    block_size: int
    window: int
    stride: int
    coarse_window: int
    coarse_stride: int
    exact: bool


@dataclass(kw_only=True)
class InfLLMv2(SparseMethod):
    """InfLLM-v2's defaults: top 64 blocks of 64 tokens with 1 sink and a 2048-token window inside, dense below 8192."""

    name: str = "infllm_v2"
    block_size: int = 64
    top_k: int = 64
    sink: int = 1
    local: int = 33
    dense_len: int = 8192
    window: int = 32  # tokens of a mean in k1
    stride: int = 16
    coarse_window: int = 128  # tokens of a mean in k2
    coarse_stride: int = 64
    normaliser: str = "coarse"  # coarse | exact

    def check(self) -> None:
        """See SparseMethod; windows and blocks must be multiples of the stride."""
        super().check()
        if self.normaliser not in ("coarse", "exact"):
            raise ConfigError(f"dsa.normaliser = '{self.normaliser}', expected coarse or exact")
        for key in ("stride", "window", "coarse_stride", "coarse_window"):
            if getattr(self, key) < 1:
                raise ConfigError(f"dsa.{key} = {getattr(self, key)}, expected at least 1")
        for key in ("block_size", "window"):
            if getattr(self, key) % self.stride:
                raise ConfigError(f"dsa.{key} = {getattr(self, key)} is no multiple of dsa.stride = {self.stride}")

    def _windows(self) -> tuple[tuple[str, int, int], ...]:
        return ("k1", self.window, self.stride), ("k2", self.coarse_window, self.coarse_stride)

    def metadata(self, k: Tensor) -> Metadata:
        """k1, k2: [B, H_kv, windows that the cache can complete, D]."""
        tokens = k.shape[2] * k.shape[3]
        return {key: poison(k, max(0, (tokens - size) // step + 1)) for key, size, step in self._windows()}

    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor) -> None:
        """See SparseMethod."""
        self._append(k_new, v_new, k, v, meta, seq_lens, None)

    def append_rotary(
        self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor, rotary: ck.Rotary
    ) -> None:
        """See SparseMethod; one launch, but for a subclass with an append of its own."""
        if type(self).append is not InfLLMv2.append:
            super().append_rotary(k_new, v_new, k, v, meta, seq_lens, rotary)
            return
        self._append(k_new, v_new, k, v, meta, seq_lens, rotary)

    def _append(
        self,
        k_new: Tensor,
        v_new: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Metadata,
        seq_lens: Tensor,
        rotary: ck.Rotary | None,
    ) -> None:
        windows = self.window, self.stride, self.coarse_window, self.coarse_stride
        ck.append_infllm(k_new, v_new, k, v, meta["k1"], meta["k2"], seq_lens, *windows, rotary=rotary)

    def rebuild(self, k: Tensor, meta: Metadata, tokens: int) -> None:
        """See SparseMethod."""
        keys = flat_tokens(k, tokens)
        for key, size, step in self._windows():
            if tokens >= size:
                means = window_mean(keys.unfold(2, size, step).mT)
                meta[key][:, :, : means.shape[2]] = means.to(k.dtype)

    def score(self, q: Tensor, meta: Metadata, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        """See SparseMethod."""
        ck.infllm_scores(q, meta["k1"], meta["k2"], seq_lens, scale, **self._sizes(), out=out)

    def rank_blocks(
        self,
        q: Tensor,
        meta: Metadata,
        seq_lens: Tensor,
        scale: float,
        scores: Tensor,
        predicted: Tensor | None = None,
        out: ck.Selection | None = None,
    ) -> ck.Selection:
        """See SparseMethod; one launch, but for long rows, and for a subclass with scores of its own."""
        if type(self).score is not InfLLMv2.score:
            return super().rank_blocks(q, meta, seq_lens, scale, scores, predicted, out)
        return ck.rank_infllm(
            q,
            meta["k1"],
            meta["k2"],
            seq_lens,
            scale,
            scores,
            top_k=self.top_k,
            sink=self.sink,
            local=self.local,
            **self._sizes(),
            predicted=predicted,
            out=out,
        )

    def _sizes(self) -> _Sizes:
        """What scores depend on beside tensors and the scale."""
        return {
            "block_size": self.block_size,
            "window": self.window,
            "stride": self.stride,
            "coarse_window": self.coarse_window,
            "coarse_stride": self.coarse_stride,
            "exact": self.normaliser == "exact",
        }
