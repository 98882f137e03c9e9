# SPDX-License-Identifier: Apache-2.0
"""A prompt's last rows score at once as one by one, but for the page that a row is filling; so does the metadata."""

import pytest
import torch

from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.models.cache import KVCache
from prr_pipeline.prr.window import replay, score_at_once, score_by_appending

ROWS, TOKENS = 21, 203
METHODS = {
    "quest": Quest(block_size=8, top_k=6, dense_layers=1),
    "infllm_v2": InfLLMv2(block_size=16, top_k=8, local=3, window=8, stride=4, coarse_window=32, coarse_stride=16),
}


def filled(method: SparseMethod) -> tuple[KVCache, torch.Tensor]:
    """A prompt in the cache, and the queries of its last rows."""
    gen = torch.Generator().manual_seed(3)
    cache = KVCache(method, 2, 1, 2, 16, TOKENS + 20, torch.bfloat16, "cpu")
    cache.set_length(TOKENS)
    for layer in range(2):
        k, v = (torch.randn(1, 2, TOKENS, 16, generator=gen).bfloat16() for _ in range(2))
        cache.write(layer, k, v)
    return cache, torch.randn(1, 6, ROWS, 16, generator=gen).bfloat16()


@pytest.mark.parametrize("name", METHODS)
def test_all_rows_at_once_score_as_one_by_one(name: str) -> None:
    method = METHODS[name]
    lengths = torch.arange(TOKENS - ROWS + 1, TOKENS + 1, dtype=torch.int32)
    found = []
    for score in (score_by_appending, score_at_once):
        cache, queries = filled(method)
        scores = torch.zeros(ROWS, 1, 2, cache.num_blocks)
        score(cache, 1, queries, lengths, 0.25, scores)
        found.append((cache.layers[1].meta, scores[:, 0]))
    (meta, one_by_one), (meta_at_once, at_once) = found
    for key, x in meta.items():
        assert torch.equal(x.view(torch.int16), meta_at_once[key].view(torch.int16)), key
    filling = torch.arange(at_once.shape[2]) == ((lengths - 1) // method.block_size)[:, None]
    same = (one_by_one == at_once).all(1)  # over heads
    assert same[~filling].all() and at_once[-1].equal(one_by_one[-1])
    assert bool(same.all()) == (name == "infllm_v2")


def test_a_dense_layer_has_no_window_but_its_metadata() -> None:
    cache, queries = filled(METHODS["quest"])
    assert replay(cache, 0, queries, 0.25) is None and replay(cache, 1, queries, 0.25) is not None
    for layer in range(2):
        assert cache.layers[layer].meta["kmin"][:, :, : METHODS["quest"].blocks(TOKENS)].isfinite().all()
