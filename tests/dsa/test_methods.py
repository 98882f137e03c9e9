# SPDX-License-Identifier: Apache-2.0
"""What all methods share: when a step selects, what is forced, what metadata is, which settings are refused.

The methods are the options in conf/dsa: a new one is tested by its YAML file.
"""

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate

import cutlass_kernels as ck
from cutlass_kernels.reference import rotate
from prr_pipeline import config, overrides
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError

NAMES = overrides.groups()["dsa"]
SMALL = {"top_k": 4, "sink": 1, "local": 2, "dense_layers": 2, "dense_len": 300}


def option(name: str, **changes: object) -> SparseMethod:
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config.config_dir()), version_base="1.3"):
        words = [f"dsa={name}", "tracker=none", *(f"dsa.{k}={v}" for k, v in changes.items())]
        return instantiate(compose("config", words).dsa, _convert_="all")


METHODS = [option(name, **SMALL) for name in NAMES]


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("layer", [0, 1, 2, 9])
def test_a_step_selects_where_no_rule_says_dense_and_the_blocks_exceed_the_budget(
    method: SparseMethod, layer: int
) -> None:
    for tokens in range(1, 500):
        n = sum(1 for start in range(0, tokens, method.block_size))
        assert method.blocks(tokens) == n
        dense = layer < method.dense_layers or tokens < method.dense_len or n <= method.top_k
        assert method.selects(layer, tokens) is not dense


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_forced_counts_the_blocks_that_select_takes_unasked(method: SparseMethod) -> None:
    for n in range(0, 9):
        lens = torch.tensor([n * method.block_size], dtype=torch.int32)
        scores = torch.full((1, 1, 9), -torch.inf)  # nothing is taken for its score
        ids = ck.select(scores, lens, method.block_size, method.top_k, method.sink, method.local).ids
        taken = int((ids >= 0).sum())
        assert taken == (n if n <= method.top_k else method.forced(n))
    assert [method.forced(n) for n in (0, 2, 3, 100)] == [0, 2, 3, 3]


def test_the_matrix_has_the_shipped_methods_and_all_others() -> None:
    assert {"quest", "quest_short", "infllm_v2", "infllm_v2_short"} <= set(NAMES)
    files = {path.stem for path in (config.config_dir() / "dsa").glob("*.yaml")}
    assert set(NAMES) == files


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_the_budget_is_in_tokens(method: SparseMethod) -> None:
    assert method.budget_tokens == 4 * method.block_size


@pytest.mark.parametrize("kind", sorted({type(m) for m in METHODS}, key=lambda k: k.__name__))
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


@pytest.mark.parametrize("name", NAMES)
def test_good_settings_pass(name: str) -> None:
    option(name).check()
    option(name, **SMALL).check()


def test_a_method_that_selects_by_a_rule_of_its_own_is_refused() -> None:
    class Other(Quest):
        def selects(self, layer: int, tokens: int) -> bool:
            return layer % 2 == 0

    with pytest.raises(ConfigError, match="Other has a `selects` of its own"):
        Other().check()


def test_a_method_that_lacks_one_of_its_functions_cannot_be_built() -> None:
    class Half(Quest):
        rebuild = SparseMethod.rebuild
        score = SparseMethod.score

    with pytest.raises(TypeError, match="abstract"):
        Half()


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_metadata_starts_as_poison_of_the_cache_dtype(method: SparseMethod) -> None:
    k = torch.zeros(2, 3, 5, method.block_size, 16, dtype=torch.bfloat16)
    for x in method.metadata(k).values():
        assert x.dtype == torch.bfloat16 and x.shape[:2] == (2, 3) and x.shape[3] == 16
        assert bool(x.isnan().all())


B, H, G, D = 2, 2, 3, 16


def filled(method: SparseMethod, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of so many tokens, NaN behind them, and the lengths."""
    k, v = torch.full((2, B, H, method.blocks(tokens) + 2, method.block_size, D), torch.nan)
    gen = torch.Generator().manual_seed(0)
    for x in (k, v):
        x.flatten(2, 3)[:, :, :tokens] = torch.randn(B, H, tokens, D, generator=gen)
    return k, v, torch.full((B,), tokens, dtype=torch.int32)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_appended_and_rebuilt_metadata_are_the_same_bits(method: SparseMethod) -> None:
    tokens = 3 * method.block_size + 5
    k, v, _ = filled(method, tokens)
    meta, rebuilt = method.metadata(k), method.metadata(k)
    keys, values = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    for i in range(tokens):
        new = [x.flatten(2, 3)[:, :, i].contiguous() for x in (k, v)]
        method.append(*new, keys, values, meta, torch.full((B,), i + 1, dtype=torch.int32))
    method.rebuild(k, rebuilt, tokens)
    assert torch.equal(keys.nan_to_num(7.0), k.nan_to_num(7.0)) and torch.equal(
        values.nan_to_num(7.0), v.nan_to_num(7.0)
    )
    for name, x in rebuilt.items():
        assert torch.equal(x.nan_to_num(7.0), meta[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_scores_are_of_blocks_with_tokens_and_of_nothing_behind_them(method: SparseMethod) -> None:
    tokens = 3 * method.block_size + 5
    k, _, lens = filled(method, tokens)
    meta = method.metadata(k)
    method.rebuild(k, meta, tokens)
    q = torch.randn(B, H * G, D, generator=torch.Generator().manual_seed(1))
    scores, again = (torch.full((B, H, k.shape[2]), torch.nan) for _ in range(2))
    method.score(q, meta, lens, D**-0.5, scores)
    assert not scores.isnan().any(), "unused memory was read, or a block was left out"
    assert (scores[:, :, 4:] == -torch.inf).all() and scores[:, :, :3].isfinite().all()
    method.score(q, meta, lens, D**-0.5, again)
    assert torch.equal(scores, again)


class Plain(Quest):
    """Keeps other extrema than its class, by an append that knows nothing of RoPE."""

    def append(self, k_new, v_new, k, v, meta, seq_lens):  # type: ignore[no-untyped-def, override]
        super().append(-k_new, v_new, k, v, meta, seq_lens)


class PlainInfLLM(InfLLMv2):
    """Keeps other means than its class."""

    def append(self, k_new, v_new, k, v, meta, seq_lens):  # type: ignore[no-untyped-def]
        super().append(-k_new, v_new, k, v, meta, seq_lens)


OWN = [Plain(**SMALL), PlainInfLLM(**SMALL)]


@pytest.mark.parametrize("method", [*METHODS, *OWN], ids=[*NAMES, "own quest", "own infllm"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_on_the_way_into_the_cache_is_rope_before_it(method: SparseMethod, interleaved: bool) -> None:
    """Whether append takes it or not."""
    q, new, turn = torch.randn(1, 4, 16), torch.randn(40, 1, 2, 16), torch.randn(40, 1, 8).repeat(1, 1, 2)
    found = []
    for inside in (True, False):
        k = torch.full((1, 2, -(-40 // method.block_size), method.block_size, 16), float("nan"))
        v, meta, out = k.clone(), method.metadata(k), torch.empty_like(q)
        for n in range(1, 41):
            lens, angles = torch.tensor([n], dtype=torch.int32), (turn[n - 1].cos(), turn[n - 1].sin(), interleaved)
            given = (new[n - 1], new[n - 1], k, v, meta, lens)
            if inside:
                method.append_rotary(*given, ck.Rotary(q, *angles, out))
            else:
                out = rotate(q, *angles)
                method.append(rotate(new[n - 1], *angles), *given[1:])
        found.append((out, k, v, *meta.values()))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
