# SPDX-License-Identifier: Apache-2.0
"""The KV cache in blocks, with a sparse method's metadata: appending and partial last blocks are its business alone.

Prefill writes whole chunks and leaves the metadata to `rebuild`; decode appends a token a layer. `length` is the host's
copy of seq_lens, so that a decode loop never asks the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cutlass_kernels import Rotary
from prr_pipeline.dsa.base import Metadata, SparseMethod, flat_tokens


@dataclass
class LayerCache:
    """One layer: k, v [B, H_kv, N, block, D] and the method's metadata."""

    k: Tensor
    v: Tensor
    meta: Metadata


class KVCache:
    """Keys and values of B sequences of one length, for all layers.

    Args:
        method: gives the block size and the metadata.
        layers, batch, kv_heads, head_dim: of the model.
        capacity: tokens a sequence may reach.
        dtype, device: of keys and values. Unused places hold NaN, so that a wrong read shows.
    """

    def __init__(
        self,
        method: SparseMethod,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: str | torch.device,
    ):
        self.method = method
        self.num_blocks = method.blocks(capacity)
        self.capacity = self.num_blocks * method.block_size
        self.length = 0
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        shape = (batch, kv_heads, self.num_blocks, method.block_size, head_dim)
        self.layers: list[LayerCache] = []
        for _ in range(layers):
            k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
            self.layers.append(LayerCache(k, v, method.metadata(k)))

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and metadata."""
        return sum(x.nbytes for a in self.layers for x in (a.k, a.v, *a.meta.values()))

    @property
    def token_bytes(self) -> int:
        """Memory of a token's key and value in one layer, of one sequence."""
        k = self.layers[0].k
        return 2 * k.shape[1] * k.shape[4] * k.element_size()

    def set_length(self, tokens: int) -> None:
        """Declare how many tokens are valid; the step's new one is counted before any layer appends it."""
        if not 0 <= tokens <= self.capacity:
            raise ValueError(f"cache of {self.capacity} tokens cannot hold {tokens}")
        self.length = tokens
        self.seq_lens.fill_(tokens)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a prompt chunk [B, H_kv, T, D], whose last token is at length - 1; no metadata.

        Returns:
            Keys and values of all tokens so far, [B, H_kv, length, D], views.
        """
        start = self.length - k.shape[2]
        if start < 0:
            raise ValueError(f"a chunk of {k.shape[2]} tokens ends at length {self.length}: set_length comes first")
        both = []
        for store, new in ((self.layers[layer].k, k), (self.layers[layer].v, v)):
            tokens = flat_tokens(store, self.length)
            tokens[:, :, start:] = new
            both.append(tokens)
        return both[0], both[1]

    def append(self, layer: int, k_new: Tensor, v_new: Tensor, rotary: Rotary | None = None) -> LayerCache:
        """Append the step's token [B, H_kv, D] and its metadata; with `rotary`, RoPE of key and queries comes first."""
        at = self.layers[layer]
        given = (k_new, v_new, at.k, at.v, at.meta, self.seq_lens)
        if rotary is None:
            self.method.append(*given)
        else:
            self.method.append_rotary(*given, rotary)
        return at

    def rebuild(self, layer: int, tokens: int) -> None:
        """Metadata of the first tokens, from the keys alone."""
        at = self.layers[layer]
        self.method.rebuild(at.k, at.meta, tokens)

    def rewind(self, tokens: int) -> None:
        """Forget all tokens after the first `tokens`: the metadata is rebuilt, keys and values beyond are not read."""
        self.set_length(tokens)
        for layer in range(len(self.layers)):
            self.rebuild(layer, tokens)

    def clone(self) -> "KVCache":
        """A copy that shares nothing: every mode decodes from one of these."""
        other = object.__new__(KVCache)
        other.__dict__.update(self.__dict__)
        other.seq_lens = self.seq_lens.clone()
        other.layers = [
            LayerCache(a.k.clone(), a.v.clone(), {key: x.clone() for key, x in a.meta.items()}) for a in self.layers
        ]
        return other
