# SPDX-License-Identifier: Apache-2.0
"""A method that breaks its contract is named before any work; the shipped ones pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prr_pipeline.dsa.base import SparseMethod, probe
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError

Body = Callable[[Tensor, Tensor], None]


@dataclass(kw_only=True)
class Own(Quest):
    """Quest, with its scores spoilt afterwards."""

    name: str = "own"
    top_k: int = 8
    sink: int = 1
    body: Any = None
    first: bool = True

    def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        if self.first:
            super().score(q, meta, seq_lens, scale, out)
        self.body(q, out)


def refused(method: SparseMethod) -> str:
    with pytest.raises(ConfigError) as error:
        probe(method, 4, 2, 16, torch.float32, "cpu")
    return str(error.value)


class Counter:
    """Adds another number at each call."""

    n = 0

    def __call__(self, q: Tensor, out: Tensor) -> None:
        self.n += 1
        out.add_(self.n)


@pytest.mark.parametrize(
    ("body", "first", "expected"),
    [
        (lambda q, out: None, False, "score() left 514 of 514 scores in out unwritten; out [B, H_kv, N] gets the sco"),
        (lambda q, out: out[:, :1].fill_(0.0), False, "score() left 257 of 514 scores in out unwritten"),
        (lambda q, out: out[:, :, 1:].fill_(0.0), False, "score() left 2 of 514 scores in out unwritten"),
        (lambda q, out: out.fill_(float("nan")), True, "score() gave NaN for 514 of 514 blocks with tokens"),
        (lambda q, out: out[:, 1, 7].fill_(float("nan")), True, "score() gave NaN for 1 of 514 blocks"),
        (
            lambda q, out: out.fill_(-torch.inf),
            True,
            "score() gave scores that are not finite for 510 of 510 blocks th",
        ),
        (lambda q, out: out[0, 0, 3].fill_(torch.inf), True, "score() gave scores that are not finite for 1 of 510 bl"),
        (Counter(), True, "score() gave other scores for the same query and keys; modes could not be compared"),
        (lambda q, out: q.mul_(2), True, "score() changed q, which attention reads after it"),
    ],
)
def test_scores_that_break_the_contract_are_named(body: Body, first: bool, expected: str) -> None:
    text = refused(Own(body=body, first=first))
    head = "dsa._target_ = test_probe.Own (dsa=own): "
    assert text.startswith(head) and text.removeprefix(head).startswith(expected)


def test_forced_blocks_may_have_no_score() -> None:
    def forced(q: Tensor, out: Tensor) -> None:
        out[:, :, :1] = out[:, :, -2:] = -torch.inf  # sink; the block being written and an empty one

    probe(Own(body=forced), 4, 2, 16, torch.float32, "cpu")


@dataclass(kw_only=True)
class Lost(Quest):
    """It appends nothing."""

    def append(self, *args: Any) -> None:
        pass


@dataclass(kw_only=True)
class Bare(Quest):
    """Its metadata has no names."""

    def metadata(self, k: Tensor) -> Any:
        return [k]


def test_appending_and_metadata_are_held_against_the_contract_too() -> None:
    assert refused(Lost()) == "dsa._target_ = test_probe.Lost (dsa=quest): append() did not write the new token into k"
    assert refused(Bare()).endswith("metadata() gave list, expected tensors by name")


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Quest, InfLLMv2]),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 12),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_shipped_methods_pass_in_all_their_settings(
    kind: type[SparseMethod], block: int, top_k: int, data: Any, dtype: torch.dtype
) -> None:
    local = data.draw(st.integers(1, top_k))
    sink = data.draw(st.integers(0, top_k - local))
    probe(kind(block_size=block, top_k=top_k, sink=sink, local=local, dense_len=0), 4, 2, 16, dtype, "cpu")  # type: ignore[call-arg]


class Ranked(InfLLMv2):
    """A ranking of its own."""

    how = "other"

    def rank_blocks(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, scores: Tensor, *rest: Any) -> Any:
        P, out = rest
        if self.how == "copies":
            return super().rank_blocks(q, meta, seq_lens, scale, scores, P)
        if self.how == "unwritten":
            return super().rank_blocks(q, meta, seq_lens, scale, torch.empty_like(scores), P, out)
        chosen = super().rank_blocks(q, meta, seq_lens, scale, scores, P if self.how == "right" else None, out)
        if self.how == "other":
            scores.neg_()
        return chosen


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("copies", "rank_blocks() did not give back the buffers of out"),
        ("unwritten", "rank_blocks() gave an A, or a comparison with P, that is not that of the scores which it wrote"),
        ("other", "rank_blocks() gave an A, or a comparison with P, that is not that of the scores which it wrote"),
        ("nothing", "rank_blocks() gave an A, or a comparison with P, that is not that of the scores which it wrote"),
        ("right", None),
    ],
)
def test_a_ranking_of_a_methods_own_is_held_against_its_scores(how: str, expected: str | None) -> None:
    method = Ranked(top_k=48)
    method.how = how
    if expected is None:
        probe(method, 4, 2, 16, torch.float32, "cpu")
    else:
        assert expected in refused(method) and "Ranked (dsa=infllm_v2): " in refused(method)


class Turned(Quest):
    """An append with RoPE of its own."""

    what = ""

    def append_rotary(self, k_new: Tensor, v_new: Tensor, *cache: Any) -> None:
        *rest, rotary = cache
        super().append_rotary(k_new if self.what != "key" else -k_new, v_new, *rest, rotary)
        if self.what == "queries":
            rotary.out.copy_(rotary.q)
        if self.what == "metadata":
            rest[2]["kmin"].nan_to_num_(1.0)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("queries", "append_rotary() left other queries in rotary.out than RoPE of q"),
        ("key", "append_rotary() left another key, value or metadata than append behind RoPE"),
        ("metadata", "append_rotary() left another key, value or metadata than append behind RoPE"),
        ("", None),
    ],
)
def test_an_append_with_rope_is_held_against_append_behind_rope(what: str, expected: str | None) -> None:
    method = Turned(top_k=8)
    method.what = what
    if expected is None:
        probe(method, 4, 2, 16, torch.float32, "cpu")
    else:
        assert expected in refused(method)


class Flat(Quest):
    """Its metadata has axes of its own."""

    def metadata(self, k: Tensor) -> Any:
        return {name: x.flatten(0, 2) for name, x in super().metadata(k).items()}

    def append(self, k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, meta: Any, seq_lens: Tensor) -> None:
        super().append(k_new, v_new, k, v, self.folded(meta, k.shape[1]), seq_lens)

    def rebuild(self, k: Tensor, meta: Any, tokens: int) -> None:
        super().rebuild(k, self.folded(meta, k.shape[1]), tokens)

    def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
        super().score(q, self.folded(meta, out.shape[1]), seq_lens, scale, out)

    def folded(self, meta: Any, heads: int) -> Any:
        return {name: x.view(1, heads, -1, x.shape[1]) for name, x in meta.items()}


def test_metadata_may_have_any_shape() -> None:
    probe(Flat(top_k=8), 4, 2, 16, torch.float32, "cpu")
