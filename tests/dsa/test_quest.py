# SPDX-License-Identifier: Apache-2.0
"""Quest's metadata, kept while decoding, is what a rebuild from the keys gives, at every step."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from prr_pipeline.dsa.quest import Quest

NAN = math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def same_bits(a: Tensor, b: Tensor) -> bool:
    ints = torch.int32 if a.element_size() == 4 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def empty(method: Quest, B: int, H: int, N: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k = torch.full((B, H, N, method.block_size, D), NAN, dtype=dtype)
    return k, k.clone()


@EXAMPLES
@given(st.integers(0, 2**20), st.sampled_from((16, 32, 64)), st.sampled_from(DTYPES))
def test_append_equals_rebuild_and_the_extrema_of_the_keys_at_every_step(seed: int, T: int, dtype: torch.dtype) -> None:
    """From an empty cache, or on after a prompt whose metadata was rebuilt at any length."""
    roll, method = random.Random(seed), Quest(block_size=T)
    B, H, N, D = roll.randint(1, 2), roll.randint(1, 3), 4, 16
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(B, H, N * T, D, generator=gen).to(dtype)
    k, v = empty(method, B, H, N, D, dtype)
    meta, prompt = method.metadata(k), roll.choice((0, roll.randint(0, 2 * T + 1)))
    if prompt:
        k.flatten(2, 3)[:, :, :prompt] = keys[:, :, :prompt]
        method.rebuild(k, meta, prompt)
    for n in range(prompt + 1, min(N * T, prompt + 2 * T + 2) + 1):
        lens = torch.full((B,), n, dtype=torch.int32)
        method.append(keys[:, :, n - 1], keys[:, :, n - 1], k, v, meta, lens)
        again = method.metadata(k)
        method.rebuild(k, again, n)
        assert same_bits(meta["kmin"], again["kmin"]) and same_bits(meta["kmax"], again["kmax"])
    for i in range(N):
        block = keys[:, :, i * T : min(n, (i + 1) * T)]
        low, high = meta["kmin"][:, :, i], meta["kmax"][:, :, i]
        if block.shape[2]:
            assert torch.equal(low, block.min(2).values) and torch.equal(high, block.max(2).values)
        else:
            assert bool(low.isnan().all()) and bool(high.isnan().all())
    assert same_bits(k.flatten(2, 3)[:, :, :n], keys[:, :, :n])


def test_rows_of_different_length_keep_their_own_metadata() -> None:
    method, starts = Quest(), (0, 15, 16, 30)
    keys = torch.randn(4, 2, 64, 16)
    k, v = empty(method, 4, 2, 4, 16, torch.float32)
    meta = method.metadata(k)
    for b, n in enumerate(starts):
        k[b].flatten(1, 2)[:, :n] = keys[b, :, :n]
        if n:
            row = {key: x[b : b + 1] for key, x in meta.items()}
            method.rebuild(k[b : b + 1], row, n)
    for step in range(1, 20):
        now = [n + step for n in starts]
        new = torch.stack([keys[b, :, n - 1] for b, n in enumerate(now)])
        method.append(new, new, k, v, meta, torch.tensor(now, dtype=torch.int32))
    for b, n in enumerate(now):
        one = method.metadata(k[b : b + 1])
        method.rebuild(k[b : b + 1], one, n)
        assert all(same_bits(meta[key][b : b + 1], one[key]) for key in one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zeros_and_equal_keys(dtype: torch.dtype) -> None:
    method = Quest()
    k, v = empty(method, 1, 1, 2, 16, dtype)
    meta = method.metadata(k)
    for n in range(1, 33):
        new = torch.full((1, 1, 16), (0.0, -0.0, 1.0, -0.0, 0.0)[n % 5]).to(dtype)
        method.append(new, new, k, v, meta, torch.tensor([n], dtype=torch.int32))
        again = method.metadata(k)
        method.rebuild(k, again, n)
        at = slice(0, method.blocks(n))
        assert all(torch.equal(meta[key][:, :, at], again[key][:, :, at]) for key in meta)


def test_score_ranks_by_the_mean_query_of_the_group() -> None:
    method = Quest()
    k, _ = empty(method, 1, 2, 4, 16, torch.float32)
    keys = torch.randn(1, 2, 40, 16)
    k.flatten(2, 3)[:, :, :40] = keys
    meta = method.metadata(k)
    method.rebuild(k, meta, 40)
    q, out = torch.randn(1, 6, 16), torch.full((1, 2, 4), NAN)
    method.score(q, meta, torch.tensor([40], dtype=torch.int32), 0.25, out)
    mean = q.view(1, 2, 3, 16).mean(2)
    for h in range(2):
        for i, block in enumerate(keys[0, h].split(16)):
            want = torch.maximum(mean[0, h] * block.amin(0), mean[0, h] * block.amax(0)).sum()
            torch.testing.assert_close(out[0, h, i], want, atol=1e-5, rtol=1e-5)
    assert bool((out[:, :, 3] == -math.inf).all())


def test_the_defaults_are_the_published_settings() -> None:
    method = Quest()
    method.check()
    assert (method.block_size, method.budget_tokens, method.dense_layers) == (16, 4096, 2)
    assert (method.sink, method.local) == (0, 1)  # the current page is always attended
    assert not method.selects(1, 100_000) and method.selects(2, 100_000)
    assert not method.selects(2, 4096) and method.selects(2, 4097)
