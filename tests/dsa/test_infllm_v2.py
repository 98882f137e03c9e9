# SPDX-License-Identifier: Apache-2.0
"""InfLLM-v2's window means, kept while decoding, are what a rebuild from the keys gives, at every step."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import cutlass_kernels as ck
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.errors import ConfigError

NAN = math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS = ((32, 16, 128, 64), (8, 4, 24, 8), (16, 16, 17, 5))
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def same_bits(a: Tensor, b: Tensor) -> bool:
    ints = torch.int32 if a.element_size() == 4 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def build(sizes: tuple[int, int, int, int] = WINDOWS[0], T: int = 64, **more: object) -> InfLLMv2:
    names = ("window", "stride", "coarse_window", "coarse_stride")
    return InfLLMv2(block_size=T, **dict(zip(names, sizes, strict=True)), **more)  # type: ignore[arg-type]


def cache(method: InfLLMv2, B: int, H: int, N: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k = torch.full((B, H, N, method.block_size, D), NAN, dtype=dtype)
    return k, k.clone()


@EXAMPLES
@given(st.integers(0, 2**20), st.sampled_from(WINDOWS), st.sampled_from((16, 64)), st.sampled_from(DTYPES))
def test_append_equals_rebuild_and_the_means_of_the_keys_at_every_step(
    seed: int, sizes: tuple[int, int, int, int], T: int, dtype: torch.dtype
) -> None:
    """From an empty cache, or on after a prompt whose metadata was rebuilt at any length."""
    roll, method = random.Random(seed), build(sizes, T)
    B, H, N, D = roll.randint(1, 2), roll.randint(1, 3), 320 // T, 16
    keys = torch.randn(B, H, 320, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    k, v = cache(method, B, H, N, D, dtype)
    meta, prompt = method.metadata(k), roll.choice((0, roll.randint(0, 250)))
    if prompt:
        k.flatten(2, 3)[:, :, :prompt] = keys[:, :, :prompt]
        method.rebuild(k, meta, prompt)
    for n in range(prompt + 1, min(320, prompt + 140) + 1):
        method.append(keys[:, :, n - 1], keys[:, :, n - 1], k, v, meta, torch.full((B,), n, dtype=torch.int32))
        again = method.metadata(k)
        method.rebuild(k, again, n)
        assert same_bits(meta["k1"], again["k1"]) and same_bits(meta["k2"], again["k2"])
    for means, size, step in ((meta["k1"], *sizes[:2]), (meta["k2"], *sizes[2:])):
        complete = max(0, (n - size) // step + 1)
        for w in range(complete):
            want = keys[:, :, w * step : w * step + size].double().mean(2)
            tol = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
            torch.testing.assert_close(means[:, :, w].double(), want, atol=tol, rtol=tol)
        assert bool(means[:, :, complete:].isnan().all())


def test_rows_of_different_length_keep_their_own_metadata() -> None:
    method, starts = build(), (0, 31, 96, 127)
    keys = torch.randn(4, 2, 192, 16)
    k, v = cache(method, 4, 2, 3, 16, torch.float32)
    meta = method.metadata(k)
    for b, n in enumerate(starts):
        k[b].flatten(1, 2)[:, :n] = keys[b, :, :n]
        method.rebuild(k[b : b + 1], {key: x[b : b + 1] for key, x in meta.items()}, n)
    for step in range(1, 50):
        now = [n + step for n in starts]
        new = torch.stack([keys[b, :, n - 1] for b, n in enumerate(now)])
        method.append(new, new, k, v, meta, torch.tensor(now, dtype=torch.int32))
    for b, n in enumerate(now):
        one = method.metadata(k[b : b + 1])
        method.rebuild(k[b : b + 1], one, n)
        assert all(same_bits(meta[key][b : b + 1], one[key]) for key in one)


@pytest.mark.parametrize(
    ("tokens", "fine", "coarse"),
    [(31, 0, 0), (32, 1, 0), (47, 1, 0), (48, 2, 0), (127, 6, 0), (128, 7, 1), (191, 10, 1), (192, 11, 2)],
)
def test_windows_are_written_when_they_are_complete(tokens: int, fine: int, coarse: int) -> None:
    method = build()
    k, _ = cache(method, 1, 1, 4, 16, torch.float32)
    k.flatten(2, 3)[:, :, :tokens] = 1.0
    meta = method.metadata(k)
    assert (meta["k1"].shape[2], meta["k2"].shape[2]) == (15, 3)  # what 256 tokens complete
    method.rebuild(k, meta, tokens)
    assert [int(x[0, 0, :, 0].isfinite().sum()) for x in (meta["k1"], meta["k2"])] == [fine, coarse]
    assert bool((meta["k1"][:, :, :fine] == 1).all())


def test_a_cache_too_short_for_a_window_has_none() -> None:
    method = build(T=16)
    k, v = cache(method, 1, 1, 1, 16, torch.float32)
    meta = method.metadata(k)
    assert meta["k1"].shape == (1, 1, 0, 16) and meta["k2"].shape == (1, 1, 0, 16)
    for n in range(1, 17):
        new = torch.ones(1, 1, 16)
        method.append(new, new, k, v, meta, torch.tensor([n], dtype=torch.int32))
    out = torch.full((1, 1, 1), NAN)
    method.score(torch.ones(1, 2, 16), meta, torch.tensor([16], dtype=torch.int32), 0.25, out)
    assert float(out) == -math.inf


@pytest.mark.parametrize("exact", [False, True])
def test_score_uses_the_normaliser_that_is_asked_for(exact: bool) -> None:
    method = build(normaliser="exact" if exact else "coarse")
    k, _ = cache(method, 1, 1, 4, 16, torch.float32)
    keys = torch.randn(1, 1, 200, 16)
    k.flatten(2, 3)[:, :, :200] = keys
    meta = method.metadata(k)
    method.rebuild(k, meta, 200)
    q, out = torch.randn(1, 2, 16), torch.full((1, 1, 4), NAN)
    method.score(q, meta, torch.tensor([200], dtype=torch.int32), 0.25, out)
    k1 = torch.stack([keys[0, 0, w * 16 : w * 16 + 32].mean(0) for w in range(11)])
    k2 = torch.stack([keys[0, 0, w * 64 : w * 64 + 128].mean(0) for w in range(2)])
    norm = (q[0] @ (k1 if exact else k2).T * 0.25).logsumexp(-1, keepdim=True)
    weight = (q[0] @ k1.T * 0.25 - norm).exp().sum(0)
    # the windows that touch blocks of 64: 4 b - 1 ... 4 b + 3
    want = torch.stack([weight[0:4].amax(), weight[3:8].amax(), weight[7:11].amax()])
    torch.testing.assert_close(out[0, 0, :3], want, atol=1e-5, rtol=1e-5)
    assert float(out[0, 0, 3]) == -math.inf  # tokens from 192 on, but no complete window reaches them


def test_the_defaults_are_the_published_settings() -> None:
    method = InfLLMv2()
    method.check()
    assert (method.block_size, method.top_k, method.sink, method.dense_len) == (64, 64, 1, 8192)
    assert method.local == 33  # both ends of the 2048-token window
    assert (method.window, method.stride, method.coarse_window, method.coarse_stride) == WINDOWS[0]
    assert not method.selects(0, 8191) and method.selects(0, 8192)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"normaliser": "softmax"}, "dsa.normaliser = 'softmax', expected coarse or exact"),
        ({"stride": 0}, "dsa.stride = 0, expected at least 1"),
        ({"coarse_window": 0}, "dsa.coarse_window = 0, expected at least 1"),
        ({"window": 40}, "dsa.window = 40 is no multiple of dsa.stride = 16"),
        ({"block_size": 40}, "dsa.block_size = 40 is no multiple of dsa.stride = 16"),
        ({"top_k": 33}, "dsa.top_k = 33 blocks cannot hold dsa.sink = 1 and dsa.local = 33 forced blocks"),
    ],
)
def test_wrong_settings_are_named(changed: dict, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        InfLLMv2(**changed).check()
    assert words in str(error.value)


class Negated(InfLLMv2):
    """Other scores."""

    def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        super().score(q, meta, seq_lens, scale, out)
        out.neg_()


@pytest.mark.parametrize("kind", [InfLLMv2, Negated])
@pytest.mark.parametrize("normaliser", ["coarse", "exact"])
def test_blocks_are_ranked_by_the_scores_of_the_class(kind: type[InfLLMv2], normaliser: str) -> None:
    """A subclass with scores of its own is not passed over."""
    m = kind(top_k=6, sink=1, local=2, normaliser=normaliser)
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 20, 64, 16, generator=gen)
    meta, q = m.metadata(k), torch.randn(2, 4, 16, generator=gen)
    m.rebuild(k, meta, 1200)
    lens = torch.tensor([1200, 700], dtype=torch.int32)
    wanted, scores = torch.empty(2, 2, 20), torch.empty(2, 2, 20)
    m.score(q, meta, lens, 0.25, wanted)
    P = torch.arange(8, dtype=torch.int32).expand(2, 2, 8).contiguous()
    out = ck.Selection.empty(2, 2, 6, "cpu")
    m.rank_blocks(q, meta, lens, 0.25, scores, P, out)
    assert torch.equal(scores, wanted) and bool((scores[:, :, 1:10] < 0).all()) == (kind is Negated)
    chosen = ck.select(wanted, lens, 64, 6, 1, 2, P)
    assert all(torch.equal(a, b) for a, b in zip(out, chosen, strict=True))
