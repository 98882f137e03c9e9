# SPDX-License-Identifier: Apache-2.0
"""merge: the weighted mean of disjoint parts, commutative, associative, with the empty set as its neutral element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GROUPS, INF, NAN, close, examples, same_bits, seeds
from torch import Tensor

import cutlass_kernels as ck


def merged(o: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    B, H, _, G, D = o.shape
    return ck.merge(o, lse, (torch.full((B, H * G, D), NAN, dtype=dtype), torch.full((B, H * G), NAN)))


def parts(seed: int, B: int, H: int, N: int, G: int, D: int, empty: float, spread: float) -> tuple[Tensor, Tensor]:
    """Random partials; a share of them empty, with o = NaN."""
    gen = torch.Generator().manual_seed(seed)
    o, lse = torch.randn(B, H, N, G, D, generator=gen), torch.randn(B, H, N, G, generator=gen) * spread
    gone = torch.rand(B, H, N, G, generator=gen) < empty
    return o.masked_fill(gone[..., None], NAN), lse.masked_fill(gone, -INF)


def merge_oracle(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    top = lse.double().logsumexp(2)
    w = (lse.double() - top.masked_fill(top == -INF, 0)[:, :, None]).exp()
    out = (w[..., None] * o.double().masked_fill(lse[..., None] == -INF, 0)).sum(2)
    return out.flatten(1, 2), top.flatten(1, 2)


sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.integers(0, 9), st.sampled_from(GROUPS), st.sampled_from((16, 64))
)
shares = st.sampled_from((0.0, 0.3, 0.8, 1.0))
spreads = st.sampled_from((1.0, 30.0, 300.0))


@examples(60)
@given(seeds, sizes, shares, spreads)
def test_merge_is_the_weighted_mean_and_ignores_empty_parts(
    seed: int, size: tuple, empty: float, spread: float
) -> None:
    o, lse = parts(seed, *size, empty, spread)
    out, out_lse = merged(o, lse)
    want, want_lse = merge_oracle(o, lse)
    close(out, want, tol=5e-5)
    close(out_lse, want_lse)
    nothing = want_lse == -INF
    assert same_bits(out[nothing], torch.zeros_like(out[nothing]))


@examples(60)
@given(seeds, sizes, shares, spreads, st.integers(0, 9), st.integers(0, 9))
def test_merge_is_commutative_and_associative(
    seed: int, size: tuple, empty: float, spread: float, i: int, j: int
) -> None:
    o, lse = parts(seed, *size, empty, spread)
    B, H, N, G, D = o.shape
    whole = merged(o, lse)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    mixed = merged(o[:, :, order], lse[:, :, order])
    lo, hi = sorted((min(i, N), min(j, N)))
    pieces = [merged(o[:, :, s], lse[:, :, s]) for s in (slice(lo), slice(lo, hi), slice(hi, None))]
    nested = merged(
        torch.stack([x.view(B, H, G, D) for x, _ in pieces], 2), torch.stack([x.view(B, H, G) for _, x in pieces], 2)
    )
    for other in (mixed, nested):
        close(other[0], whole[0], tol=5e-5)
        close(other[1], whole[1])


@examples(40)
@given(seeds, sizes, shares, spreads, st.integers(1, 20), st.sampled_from((NAN, 1e30, -0.0)))
def test_trailing_padding_changes_no_bit(
    seed: int, size: tuple, empty: float, spread: float, more: int, junk: float
) -> None:
    o, lse = parts(seed, *size, empty, spread)
    o[..., 0] = -0.0  # a sum of zeros keeps its sign too
    B, H, N, G, D = o.shape
    padded = merged(
        torch.cat((o, torch.full((B, H, more, G, D), junk)), 2), torch.cat((lse, torch.full((B, H, more, G), -INF)), 2)
    )
    for a, b in zip(padded, merged(o, lse), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("N", [17, 63, 64, 65, 200, 256])
def test_trailing_padding_of_a_true_budget_changes_no_bit(N: int) -> None:
    o, lse = parts(N, 1, 1, N, 5, 64, 0.0, 3.0)
    for more in (1, 8, 56, 300):
        padded = merged(
            torch.cat((o, torch.full((1, 1, more, 5, 64), NAN)), 2),
            torch.cat((lse, torch.full((1, 1, more, 5), -INF)), 2),
        )
        assert all(same_bits(a, b) for a, b in zip(padded, merged(o, lse), strict=True))


@pytest.mark.parametrize("before", [True, False])
def test_the_empty_set_is_neutral(before: bool) -> None:
    o, lse = parts(4, 2, 2, 1, 5, 64, 0.0, 10.0)
    both = [o, torch.zeros_like(o)], [lse, torch.full_like(lse, -INF)]
    o2, lse2 = (torch.cat(x[:: -1 if before else 1], 2) for x in both)
    out, out_lse = merged(o2, lse2)
    assert same_bits(out, o.view(2, 10, 64)) and same_bits(out_lse, lse.view(2, 10))


@pytest.mark.parametrize("N", [0, 1, 2, 5])
def test_only_empty_parts_give_the_empty_set_never_nan(N: int) -> None:
    out, lse = merged(torch.full((1, 2, N, 3, 16), NAN), torch.full((1, 2, N, 3), -INF))
    assert same_bits(out, torch.zeros(1, 6, 16)) and same_bits(lse, torch.full((1, 6), -INF))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_output_is_the_float32_one_rounded_once(dtype: torch.dtype) -> None:
    o, lse = parts(7, 2, 2, 6, 4, 64, 0.2, 3.0)
    out, out_lse = merged(o, lse, dtype)
    want, want_lse = merged(o, lse)
    assert same_bits(out, want.to(dtype)) and same_bits(out_lse, want_lse)
