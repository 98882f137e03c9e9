# SPDX-License-Identifier: Apache-2.0
"""The KV cache keeps what it is given, poisons the rest, copies without sharing, and knows its capacity."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.models.cache import KVCache

METHODS = [Quest(block_size=16, top_k=2), InfLLMv2(block_size=64, top_k=3, local=2, dense_len=0)]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
LAYERS, BATCH, HEADS, DIM, CAPACITY = 2, 2, 3, 16, 250


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def new_cache(method: SparseMethod, capacity: int = CAPACITY) -> KVCache:
    return KVCache(method, LAYERS, BATCH, HEADS, DIM, capacity, torch.float32, "cpu")


def tokens(n: int = 256, seed: int = 0) -> Tensor:
    """[layer, k or v, B, H_kv, n, D]."""
    return torch.randn(LAYERS, 2, BATCH, HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))


def write(cache: KVCache, x: Tensor, start: int, stop: int) -> None:
    cache.set_length(stop)
    for layer in range(LAYERS):
        cache.write(layer, *x[layer, :, :, :, start:stop])


def append(cache: KVCache, x: Tensor, n: int) -> None:
    """Append token n - 1 to every layer."""
    cache.set_length(n)
    for layer in range(LAYERS):
        cache.append(layer, *x[layer, :, :, :, n - 1])


def state(cache: KVCache) -> list[Tensor]:
    return [x for a in cache.layers for x in (a.k, a.v, *(a.meta[key] for key in sorted(a.meta)))]


def holds(cache: KVCache, x: Tensor, n: int) -> None:
    """The first n tokens of x, and NaN behind them."""
    for layer, at in enumerate(cache.layers):
        for store, want in zip((at.k, at.v), x[layer], strict=True):
            assert same_bits(store.flatten(2, 3)[:, :, :n], want[:, :, :n])
            assert bool(store.flatten(2, 3)[:, :, n:].isnan().all())


@each_method
def test_a_new_cache_is_poison_of_whole_blocks(method: SparseMethod) -> None:
    cache = new_cache(method)
    assert cache.capacity == cache.num_blocks * method.block_size == 256
    assert cache.length == 0 and cache.seq_lens.tolist() == [0, 0] and cache.seq_lens.dtype == torch.int32
    assert all(bool(x.isnan().all()) for x in state(cache))
    assert cache.nbytes == sum(x.numel() * 4 for x in state(cache))


@each_method
@pytest.mark.parametrize("cuts", [(130,), (1, 15, 16, 17, 130), (64, 128, 130)])
def test_chunks_of_any_size_write_the_same_tokens(method: SparseMethod, cuts: tuple[int, ...]) -> None:
    cache, x = new_cache(method), tokens()
    for start, stop in zip((0, *cuts), cuts, strict=False):
        write(cache, x, start, stop)
    holds(cache, x, 130)
    assert all(bool(m.isnan().all()) for a in cache.layers for m in a.meta.values())  # a prompt leaves it to rebuild


def test_write_returns_views_of_all_tokens_so_far() -> None:
    cache, x = new_cache(METHODS[0]), tokens()
    write(cache, x, 0, 20)
    cache.set_length(37)
    k, v = cache.write(1, *x[1, :, :, :, 20:37])
    assert same_bits(k, x[1, 0, :, :, :37]) and same_bits(v, x[1, 1, :, :, :37])
    assert k.data_ptr() == cache.layers[1].k.data_ptr() and v.data_ptr() == cache.layers[1].v.data_ptr()


@each_method
@pytest.mark.parametrize("prompt", [0, 1, 63, 64, 65])
def test_appending_ends_where_writing_everything_would(method: SparseMethod, prompt: int) -> None:
    cache, whole, x = new_cache(method), new_cache(method), tokens()
    if prompt:
        write(cache, x, 0, prompt)
        for layer in range(LAYERS):
            cache.rebuild(layer, prompt)
    for n in range(prompt + 1, prompt + 71):
        append(cache, x, n)
        assert cache.length == n and cache.seq_lens.tolist() == [n, n]
    holds(cache, x, n)
    write(whole, x, 0, n)
    for layer in range(LAYERS):
        whole.rebuild(layer, n)
    assert all(same_bits(a, b) for a, b in zip(state(cache), state(whole), strict=True))


@each_method
def test_append_touches_its_layer_alone(method: SparseMethod) -> None:
    cache, x = new_cache(method), tokens()
    cache.set_length(1)
    at = cache.append(1, *x[1, :, :, :, 0])
    assert at is cache.layers[1] and bool(at.k[:, :, 0, 0].isfinite().all())
    assert all(bool(a.isnan().all()) for a in (cache.layers[0].k, cache.layers[0].v, *cache.layers[0].meta.values()))


@each_method
def test_a_clone_equals_the_original_and_shares_nothing(method: SparseMethod) -> None:
    cache, x, y = new_cache(method), tokens(), tokens(seed=1)
    for n in range(1, 41):
        append(cache, x, n)
    before = [t.clone() for t in state(cache)]
    copy = cache.clone()
    assert all(same_bits(a, b) for a, b in zip(state(copy), before, strict=True))
    theirs = {t.data_ptr() for t in (*state(cache), cache.seq_lens)}
    assert not theirs & {t.data_ptr() for t in (*state(copy), copy.seq_lens)}
    for n in range(41, 75):
        append(copy, y, n)
    assert cache.length == 40 and cache.seq_lens.tolist() == [40, 40]
    assert all(same_bits(a, b) for a, b in zip(state(cache), before, strict=True))
    append(cache, x, 41)
    assert copy.length == 74 and same_bits(copy.layers[0].k.flatten(2, 3)[:, :, 40], y[0, 0, :, :, 40])


@each_method
def test_going_back_and_on_with_other_tokens_leaves_nothing_stale(method: SparseMethod) -> None:
    """After a rollback and a rebuild, what is scored and attended is that of the new tokens."""
    cache, fresh, x, y = new_cache(method), new_cache(method), tokens(), tokens(seed=1)
    for n in range(1, 201):
        append(cache, x, n)
    y[..., :70, :] = x[..., :70, :]
    for layer in range(LAYERS):
        cache.rebuild(layer, 70)
    for n in range(1, 151):
        append(fresh, y, n)
        if n > 70:
            append(cache, y, n)
    q, runs = torch.randn(BATCH, 2 * HEADS, DIM), []
    for c in (cache, fresh):
        scores = torch.full((BATCH, HEADS, c.num_blocks), math.nan)
        method.score(q, c.layers[0].meta, c.seq_lens, 0.25, scores)
        ids = torch.arange(c.num_blocks, dtype=torch.int32).repeat(BATCH, HEADS, 1)
        runs.append((scores, *ck.attend(q, c.layers[0].k, c.layers[0].v, ids, c.seq_lens, 0.25)))
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))


@each_method
@pytest.mark.parametrize("n", [1, 17, 64, 100, 129])
def test_no_poison_reaches_the_output_of_a_step(method: SparseMethod, n: int) -> None:
    cache, x = new_cache(method), tokens()
    write(cache, x, 0, n)
    at = cache.layers[0]
    cache.rebuild(0, n)
    q = torch.randn(BATCH, 2 * HEADS, DIM)
    scores = torch.full((BATCH, HEADS, cache.num_blocks), math.nan)
    method.score(q, at.meta, cache.seq_lens, 0.25, scores)
    assert not scores.isnan().any()
    A = ck.select(scores, cache.seq_lens, method.block_size, cache.num_blocks, method.sink, method.local)
    out, _ = ck.repair(
        q, at.k, at.v, A, torch.empty(BATCH, HEADS, 0, 2, DIM), torch.empty(BATCH, HEADS, 0, 2), cache.seq_lens, 0.25
    )
    k, v = x[0, :, :, :, :n]
    torch.testing.assert_close(
        out,
        scaled_dot_product_attention(q[:, :, None], k, v, scale=0.25, enable_gqa=True)[:, :, 0],
        atol=1e-5,
        rtol=1e-5,
    )


@each_method
def test_capacity_is_kept(method: SparseMethod) -> None:
    cache = new_cache(method)
    cache.set_length(256)
    for wrong in (257, -1, 10**9):
        with pytest.raises(ValueError) as error:
            cache.set_length(wrong)
        assert str(error.value) == f"cache of 256 tokens cannot hold {wrong}"
    assert cache.length == 256 and cache.seq_lens.tolist() == [256, 256]


@pytest.mark.parametrize(("length", "chunk"), [(0, 1), (3, 5)])
def test_a_chunk_longer_than_the_declared_length_is_refused(length: int, chunk: int) -> None:
    cache, x = new_cache(METHODS[0]), tokens()
    cache.set_length(length)
    with pytest.raises(ValueError) as error:
        cache.write(0, *x[0, :, :, :, :chunk])
    assert str(error.value) == f"a chunk of {chunk} tokens ends at length {length}: set_length comes first"
    assert bool(cache.layers[0].k.isnan().all())
