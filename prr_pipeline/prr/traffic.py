# SPDX-License-Identifier: Apache-2.0
"""What a decode step must read from memory: the floor under its time, whatever runs it."""

import torch
from torch import nn

from prr_pipeline.models.cache import KVCache


def weight_bytes(model: nn.Module) -> int:
    """Of all linear layers, each read once a step; of the embeddings a step reads one row."""
    return sum(p.nbytes for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False))


def step_bytes(model: nn.Module, cache: KVCache, mode: str, context: int) -> int:
    """Of a step with so many tokens: weights, and in each layer all keys and values or the metadata and A.

    mode: dense, or any other one (speculation reads more than it must).
    """
    method, at = cache.method, cache.layers[0]
    token = cache.token_bytes
    like = torch.empty(*at.k.shape[:2], method.blocks(context), *at.k.shape[3:], dtype=at.k.dtype, device="meta")
    metadata = sum(x.nbytes for x in method.metadata(like).values())
    total = weight_bytes(model)
    for layer in range(len(cache.layers)):
        if mode != "dense" and method.selects(layer, context):
            total += metadata + method.budget_tokens * token
        else:
            total += context * token
    return total
