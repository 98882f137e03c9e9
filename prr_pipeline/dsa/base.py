# SPDX-License-Identifier: Apache-2.0
"""What a sparse attention method is: metadata of the cache, scores of the blocks, and a selection rule.

To add a method, subclass SparseMethod in one file (three functions: metadata, append, score; and rebuild, from which
tests check append) and name the class by `_target_` in conf/dsa/<name>.yaml. Everything else (selection, prediction,
repair, the cache) works on scores and block ids alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from prr_pipeline.errors import ConfigError

Metadata = dict[str, Tensor]


@dataclass(kw_only=True)
class SparseMethod(ABC):
    """The selection rule and its metadata.

    top_k blocks are attended, `sink` first and `local` last ones (the current one among them) always. The first
    dense_layers layers, and contexts shorter than dense_len tokens, are dense by the method's own rule.
    """

    name: str
    block_size: int  # tokens
    top_k: int  # blocks, forced ones included
    sink: int = 0  # blocks
    local: int = 1  # blocks
    dense_layers: int = 0
    dense_len: int = 0  # tokens

    def check(self) -> None:
        """Raise ConfigError for values that no step could run with."""
        for key, low in (
            ("block_size", 1),
            ("top_k", 1),
            ("sink", 0),
            ("local", 1),
            ("dense_layers", 0),
            ("dense_len", 0),
        ):
            if getattr(self, key) < low:
                raise ConfigError(f"dsa.{key} = {getattr(self, key)}, expected at least {low}")
        if self.sink + self.local > self.top_k:
            raise ConfigError(
                f"dsa.top_k = {self.top_k} blocks cannot hold dsa.sink = {self.sink} and dsa.local = {self.local} "
                "forced blocks; raise top_k or lower the others"
            )

    @property
    def budget_tokens(self) -> int:
        """Tokens attended a step and KV head."""
        return self.top_k * self.block_size

    def blocks(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_size)

    def selects(self, layer: int, tokens: int) -> bool:
        """Whether a decode step at this length selects in this layer (else it is dense)."""
        return layer >= self.dense_layers and tokens >= self.dense_len and self.blocks(tokens) > self.top_k

    def forced(self, blocks: int) -> int:
        """Forced blocks among that many."""
        return min(blocks, self.sink + self.local)

    @abstractmethod
    def metadata(self, k: Tensor) -> Metadata:
        """Empty metadata for a cache k [B, H_kv, N, block, D], poisoned with NaN."""

    @abstractmethod
    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Metadata, seq_lens: Tensor) -> None:
        """Write the newest token [B, H_kv, D] (position seq_lens - 1) and update the metadata, in place."""

    @abstractmethod
    def rebuild(self, k: Tensor, meta: Metadata, tokens: int) -> None:
        """Write the metadata of the first `tokens` tokens of every row from the keys alone, bit for bit as append."""

    @abstractmethod
    def score(self, q: Tensor, meta: Metadata, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        """Scores of all blocks into out [B, H_kv, N] float32; -inf for blocks without tokens.

        Args:
            q: [B, Hq, D].
            meta: of B sequences, or of one that all queries ask.
        """


def poison(k: Tensor, rows: int) -> Tensor:
    """[B, H_kv, rows, D] of k's dtype, full of NaN."""
    return k.new_full((*k.shape[:2], rows, k.shape[4]), float("nan"))


def flat_tokens(k: Tensor, tokens: int) -> Tensor:
    """[B, H_kv, N, block, D] -> the first tokens as [B, H_kv, tokens, D], a view."""
    return k.flatten(2, 3)[:, :, :tokens]


def positions(k: Tensor, tokens: int) -> Tensor:
    """[N, block] bool: the place holds one of the first tokens."""
    N, block = k.shape[2:4]
    return (torch.arange(N * block, device=k.device) < tokens).view(N, block)
