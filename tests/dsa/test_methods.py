# SPDX-License-Identifier: Apache-2.0
"""What all methods share: when a step selects, what is forced, and which settings are refused."""

import pytest
import torch

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError

METHODS = [
    Quest(block_size=16, top_k=4, sink=1, local=2, dense_layers=2),
    InfLLMv2(block_size=64, top_k=4, sink=1, local=2, dense_len=300),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("layer", [0, 1, 2, 9])
def test_a_step_selects_where_no_rule_says_dense_and_the_blocks_exceed_the_budget(
    method: SparseMethod, layer: int
) -> None:
    for tokens in range(1, 500):
        n = sum(1 for start in range(0, tokens, method.block_size))
        assert method.blocks(tokens) == n
        dense = layer < method.dense_layers or tokens < method.dense_len or n <= method.top_k
        assert method.selects(layer, tokens) is not dense


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_forced_counts_the_blocks_that_select_takes_unasked(method: SparseMethod) -> None:
    for n in range(0, 9):
        lens = torch.tensor([n * method.block_size], dtype=torch.int32)
        scores = torch.full((1, 1, 9), -torch.inf)  # nothing is taken for its score
        ids = ck.select(scores, lens, method.block_size, method.top_k, method.sink, method.local).ids
        taken = int((ids >= 0).sum())
        assert taken == (n if n <= method.top_k else method.forced(n))
    assert [method.forced(n) for n in (0, 2, 3, 100)] == [0, 2, 3, 3]


def test_the_budget_is_in_tokens() -> None:
    assert [m.budget_tokens for m in METHODS] == [64, 256]


@pytest.mark.parametrize("kind", [Quest, InfLLMv2])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_size": 0}, "dsa.block_size = 0, expected at least 1"),
        ({"top_k": 0}, "dsa.top_k = 0, expected at least 1"),
        ({"sink": -1}, "dsa.sink = -1, expected at least 0"),
        ({"local": 0}, "dsa.local = 0, expected at least 1"),
        ({"dense_layers": -2}, "dsa.dense_layers = -2, expected at least 0"),
        ({"dense_len": -1}, "dsa.dense_len = -1, expected at least 0"),
        (
            {"top_k": 4, "sink": 3, "local": 2},
            "dsa.top_k = 4 blocks cannot hold dsa.sink = 3 and dsa.local = 2 forced blocks; raise top_k or lower",
        ),
    ],
)
def test_wrong_settings_are_named(kind: type[SparseMethod], changed: dict, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**changed).check()
    assert words in str(error.value)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_good_settings_pass(method: SparseMethod) -> None:
    method.check()


def test_a_method_that_lacks_one_of_its_functions_cannot_be_built() -> None:
    class Half(Quest):
        rebuild = SparseMethod.rebuild
        score = SparseMethod.score

    with pytest.raises(TypeError, match="abstract"):
        Half()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_metadata_starts_as_poison_of_the_cache_dtype(method: SparseMethod) -> None:
    k = torch.zeros(2, 3, 5, method.block_size, 16, dtype=torch.bfloat16)
    for x in method.metadata(k).values():
        assert x.dtype == torch.bfloat16 and x.shape[:2] == (2, 3) and x.shape[3] == 16
        assert bool(x.isnan().all())
