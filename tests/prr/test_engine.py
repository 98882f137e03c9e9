# SPDX-License-Identifier: Apache-2.0
"""The promise: with exact repair every mode yields the bits of serial, on every architecture, method and budget."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import cutlass_kernels as ck
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError
from prr_pipeline.models.attention import attached
from prr_pipeline.models.cache import LayerCache
from prr_pipeline.prr.budget import BudgetPolicy, Fixed, Off, Profiled
from prr_pipeline.prr.engine import Decoder, Engine, Mode, Prefilled, Theta
from prr_pipeline.prr.predictor import LAST_SCORES, PredictorState
from prr_pipeline.prr.sampling import Sampler
from prr_pipeline.prr.stats import StepStats, rates

KINDS = ("llama", "glm", "glm4", "qwen3")
QUEST = Quest(block_size=4, top_k=6, sink=1, local=2, dense_layers=1)
INFLLM = InfLLMv2(
    block_size=8, top_k=5, sink=1, local=2, dense_len=0, window=4, stride=2, coarse_window=8, coarse_stride=4
)
METHODS = {"quest": QUEST, "infllm_v2": INFLLM}
LAYERS, VOCAB = 3, 97
THETA = (0.6, 0.3, 0.25)
EXACT = ("reuse", "reuse_repair", "prr")
Logits = list[Tensor]


@cache
def tiny(kind: str, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A random model; its large weights make attention peaked, so that selections change from step to step."""
    config = CONFIG_MAPPING[kind](
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        initializer_range=0.3,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def build(model: Any, method: SparseMethod, chunk: int = 2048, window: int = 12) -> Engine:
    config = model.config
    return Engine(model, method, LAYERS, config.num_key_value_heads, config.head_dim, chunk, window)


def prompt(tokens: int = 70) -> list[int]:
    return torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def prefilled(kind: str, method: SparseMethod, tokens: int = 70, room: int = 32) -> tuple[Engine, Prefilled]:
    engine = build(tiny(kind), method)
    return engine, engine.prefill(prompt(tokens), room)


def decode(decoder: Decoder, steps: int, pick: Callable[[Tensor], int] | None = None) -> tuple[list[int], Logits, list]:
    """Greedy tokens (or picked ones), the logits of every step and what the steps did."""
    tokens, logits, stats = [], [], []
    last = decoder.logits
    for _ in range(steps):
        tokens.append(int(last.argmax()) if pick is None else pick(last))
        last, done = decoder.step(tokens[-1])
        logits.append(last.clone())
        stats.append(done)
    return tokens, logits, stats


def run(engine: Engine, start: Prefilled, mode: Mode, steps: int = 8) -> tuple[list[int], Logits, list[StepStats]]:
    return decode(engine.decoder(start, mode, dict.fromkeys(start.windows, THETA)), steps)


def mode(name: str, budget: BudgetPolicy | None = None, repair: str = "exact") -> Mode:
    return Mode.build(name, repair, budget or Fixed(delta=1.5))


def same_bits(a: Logits, b: Logits) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def layers(stats: list[StepStats]) -> list:
    return [x for s in stats for x in s.layers.values()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_modes_give_the_bits_of_serial_at_every_step(kind: str, method: str) -> None:
    engine, start = prefilled(kind, METHODS[method])
    tokens, logits, stats = run(engine, start, mode("serial"), 6)
    assert all(x.isfinite().all() for x in logits) and all(s.layers for s in stats)
    assert len(set(tokens)) > 2, "a model that repeats itself tests little"
    missed = 0
    for name in EXACT:
        theirs = run(engine, start, mode(name), 6)
        assert theirs[0] == tokens and same_bits(theirs[1], logits)
        missed += sum(x.missed for x in layers(theirs[2]))
    assert missed, "nothing was ever repaired"
    assert not same_bits(run(engine, start, mode("dense"), 6)[1], logits)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 2), (5, 1), (8, 1), (16, 1)], ids=lambda h: f"G{h[0] // h[1]}")
@pytest.mark.parametrize("method", METHODS)
def test_exact_for_all_group_sizes(method: str, heads: tuple[int, int]) -> None:
    engine = build(tiny("llama", *heads), METHODS[method])
    start = engine.prefill(prompt(), 32)
    _, logits, _ = run(engine, start, mode("serial"), 4)
    assert all(same_bits(run(engine, start, mode(name), 4)[1], logits) for name in EXACT)


def test_exact_in_half_precision() -> None:
    engine = build(tiny("llama", dtype=torch.bfloat16), QUEST)
    start = engine.prefill(prompt(), 32)
    _, logits, _ = run(engine, start, mode("serial"))
    assert logits[0].dtype == torch.bfloat16
    assert all(same_bits(run(engine, start, mode(name))[1], logits) for name in EXACT)


@pytest.mark.parametrize("budget", [Fixed(delta=d) for d in (0.0, 1.0, 1.25, 2.0, 8.0)] + [Off()], ids=repr)
@pytest.mark.parametrize("method", METHODS)
def test_exact_for_all_budgets(method: str, budget: BudgetPolicy) -> None:
    engine, start = prefilled("llama", METHODS[method])
    _, logits, _ = run(engine, start, mode("serial"), 5)
    _, theirs, stats = run(engine, start, mode("prr", budget), 5)
    assert same_bits(theirs, logits)
    width = int(budget.ratio(0) * engine.method.top_k)
    for s in stats:
        blocks = engine.method.blocks(s.context)
        assert all(x.predicted == x.heads * min(width, blocks) for x in s.layers.values())
    if not width:
        over = rates(layers(stats))
        assert (over["hit_all"], over["missed"], over["wasted"]) == (None, None, None)


def test_a_larger_budget_never_misses_more() -> None:
    engine, start = prefilled("llama", QUEST)
    missed = [
        sum(x.missed for x in layers(run(engine, start, mode("prr", Fixed(delta=d)))[2])) for d in (1, 1.25, 1.5, 2)
    ]
    assert missed == sorted(missed, reverse=True) and missed[0] > missed[-1]


class AllPredicted(Decoder):
    """Attends A u P in one softmax, in float64: what union repair is held against."""

    def _sparse(self, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        super()._sparse(layer, at, q, scale)  # learns and predicts
        predicted, chosen = self.before[layer], self.last_ids[layer]
        H, G = chosen.shape[1], q.shape[1] // chosen.shape[1]
        out = torch.empty_like(q)
        for h in range(H):
            blocks = sorted({*predicted[0, h].tolist(), *chosen[0, h].tolist()} - {-1})
            rows = [b * self.method.block_size + i for b in blocks for i in range(self.method.block_size)]
            rows = [r for r in rows if r < self.cache.length]
            k, v = (x[0, h].flatten(0, 1)[rows].double() for x in (at.k, at.v))
            heads = slice(h * G, (h + 1) * G)
            out[0, heads] = (torch.softmax(q[0, heads].double() @ k.T * scale, -1) @ v).to(q.dtype)
        return out

    def _attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.before = {x: s.ids.clone() for x, s in self.states.items()}
        return super()._attention(layer, q, k, v, scale)


@pytest.mark.parametrize("name", ["reuse_repair", "prr"])
@pytest.mark.parametrize("method", METHODS)
def test_union_attends_all_that_was_predicted_or_selected(method: str, name: str) -> None:
    engine, start = prefilled("llama", METHODS[method])
    union = mode(name, repair="union")
    tokens, logits, stats = run(engine, start, union)
    oracle = AllPredicted(engine, start, union, dict.fromkeys(start.windows, THETA))
    feed = iter(tokens)
    _, wanted, _ = decode(oracle, len(tokens), lambda _: next(feed))
    for got, want in zip(logits, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert any(x.wasted for x in layers(stats)) and any(x.missed for x in layers(stats))
    assert not same_bits(logits, run(engine, start, mode("serial"))[1]), "wasted blocks were not kept"


class Prophet(Decoder):
    """Predicts A itself, some blocks of it left out."""

    left_out = 0

    def _sparse(self, layer: int, at: LayerCache, q: Tensor, scale: float) -> Tensor:
        m, state = self.method, self.states[layer]
        m.score(q, at.meta, self.cache.seq_lens, scale, self.scores)
        chosen = ck.select(self.scores, self.cache.seq_lens, m.block_size, m.top_k, m.sink, m.local)
        state.ids = chosen.ids[:, :, self.left_out :].contiguous()
        return super()._sparse(layer, at, q, scale)


@pytest.mark.parametrize("method", METHODS)
def test_union_of_a_perfect_prediction_is_serial(method: str) -> None:
    engine, start = prefilled("llama", METHODS[method])
    tokens, logits, _ = run(engine, start, mode("serial"))
    oracle = Prophet(engine, start, mode("reuse_repair", repair="union"), {})
    _, theirs, stats = decode(oracle, len(tokens))
    assert same_bits(theirs, logits)
    assert all((x.missed, x.wasted) == (0, 0) for x in layers(stats))


def test_union_without_waste_is_serial_but_for_rounding() -> None:
    engine, start = prefilled("llama", QUEST)
    tokens, logits, _ = run(engine, start, mode("serial"))
    oracle = Prophet(engine, start, mode("reuse_repair", repair="union"), {})
    oracle.left_out = 2
    feed = iter(tokens)
    _, theirs, stats = decode(oracle, len(tokens), lambda _: next(feed))
    assert all((x.missed, x.wasted) == (2 * x.heads, 0) for x in layers(stats))
    for got, want in zip(theirs, logits, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_mode_is_what_transformers_computes(kind: str, own: str) -> None:
    engine, start = prefilled(kind, INFLLM)
    tokens, logits, stats = run(engine, start, mode("dense"), 8)
    model = engine.model
    model.set_attn_implementation(own)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([prompt() + tokens])).logits[0]
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(torch.cat([start.logits, *logits]), wanted[69:], atol=1e-4, rtol=1e-4)
    assert not any(s.layers for s in stats)


@pytest.mark.parametrize("chunk", [1, 7, 64, 69, 70])
@pytest.mark.parametrize("method", METHODS)
def test_a_prefill_in_chunks_is_the_whole_one(method: str, chunk: int) -> None:
    model = tiny("llama")
    whole = build(model, METHODS[method]).prefill(prompt(), 4)
    parts = build(model, METHODS[method], chunk).prefill(prompt(), 4)
    torch.testing.assert_close(parts.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert parts.cache.length == whole.cache.length == 70
    for a, b in zip(parts.cache.layers, whole.cache.layers, strict=True):
        for x, y in ((a.k, b.k), (a.v, b.v), *((a.meta[m], b.meta[m]) for m in a.meta)):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert parts.windows.keys() == whole.windows.keys()
    for layer, window in whole.windows.items():
        assert torch.equal(parts.windows[layer].lengths, window.lengths)
        torch.testing.assert_close(parts.windows[layer].scores, window.scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 5), (12, 12), (40, 12)])
def test_windows_are_the_last_rows_of_the_prompt(tokens: int, rows: int) -> None:
    _, start = prefilled("llama", QUEST, tokens)
    assert list(start.windows) == [1, 2], "the dense layer has none"
    for window in start.windows.values():
        assert window.lengths.tolist() == list(range(tokens - rows + 1, tokens + 1))
        finite = window.scores.isfinite()
        blocks = torch.arange(window.scores.shape[2]) < ((window.lengths[:, None] + 3) // 4)
        assert torch.equal(finite, blocks[:, None].expand_as(finite))


@dataclass(kw_only=True)
class AlwaysSelects(Quest):
    """Runs the selection also where it takes everything."""

    def selects(self, layer: int, tokens: int) -> bool:
        return layer >= self.dense_layers


@pytest.mark.parametrize("cls", [Quest, AlwaysSelects])
@pytest.mark.parametrize("top_k", [18, 19, 20, 99])
def test_a_budget_that_holds_all_blocks_is_dense_to_the_bit(top_k: int, cls: type[Quest]) -> None:
    """70 + 8 tokens are at most 20 blocks of 4."""
    method = cls(block_size=4, top_k=top_k, sink=1, local=2, dense_layers=1)
    engine, start = prefilled("llama", method)
    _, dense, _ = run(engine, start, mode("dense"))
    fits = sum(method.blocks(70 + i) <= top_k for i in range(1, 9))
    assert fits == {18: 2, 19: 6}.get(top_k, 8)
    for name in ("serial", "prr"):
        _, logits, stats = run(engine, start, mode(name))
        assert same_bits(logits[:fits], dense[:fits])
        assert fits == 8 or not same_bits(logits, dense)
        if cls is Quest:
            assert [bool(s.layers) for s in stats] == [i >= fits for i in range(8)]


@pytest.mark.parametrize(
    ("method", "border"),
    [
        (replace(QUEST, dense_len=76), 76),
        (replace(QUEST, top_k=19), 77),  # 19 blocks of 4 are 76 tokens
        (replace(INFLLM, dense_len=78), 78),
        (replace(INFLLM, top_k=9), 73),
    ],
    ids=["quest-dense_len", "quest-top_k", "infllm-dense_len", "infllm-top_k"],
)
def test_crossing_from_dense_to_sparse_while_decoding(method: SparseMethod, border: int) -> None:
    engine, start = prefilled("llama", method)
    _, logits, stats = run(engine, start, mode("serial"), 10)
    assert [bool(s.layers) for s in stats] == [s.context >= border for s in stats]
    for name in EXACT:
        _, theirs, done = run(engine, start, mode(name), 10)
        assert same_bits(theirs, logits)
        assert [bool(s.layers) for s in done] == [s.context >= border for s in done]
    _, dense, _ = run(engine, start, mode("dense"), 10)
    assert same_bits(dense[: border - 71], logits[: border - 71])


@pytest.mark.parametrize("name", ["dense", "prr"])
@pytest.mark.parametrize("method", METHODS)
def test_metadata_of_decoding_is_that_of_a_rebuild_at_every_step(method: str, name: str) -> None:
    """20 steps see the births of several blocks."""
    engine, start = prefilled("llama", METHODS[method])
    decoder = engine.decoder(start, mode(name), dict.fromkeys(start.windows, THETA))
    for n in range(71, 91):
        decoder.step(n % VOCAB)
        assert decoder.cache.length == n
        fresh = decoder.cache.clone()
        for layer, at in enumerate(fresh.layers):
            for x in at.meta.values():
                x.fill_(float("nan"))
            fresh.rebuild(layer, n)
            for key, x in at.meta.items():
                assert torch.equal(x.view(torch.int32), decoder.cache.layers[layer].meta[key].view(torch.int32))


@pytest.mark.parametrize("method", METHODS)
def test_sampling_draws_the_same_tokens_in_every_exact_mode(method: str) -> None:
    engine, start = prefilled("llama", METHODS[method])

    def draw(name: str, seed: int = 0) -> list[int]:
        decoder = engine.decoder(start, mode(name), dict.fromkeys(start.windows, THETA))
        return decode(decoder, 8, Sampler(1.5, 0.95, seed, "sample-1"))[0]

    serial = draw("serial")
    assert all(draw(name) == serial for name in EXACT)
    assert draw("serial", seed=1) != serial


def test_modes_do_not_see_each_other() -> None:
    """Decoders of one prefill, stepped in turns on different tokens, do what each does alone."""
    engine, start = prefilled("llama", QUEST)
    kept = [x.clone() for a in start.cache.layers for x in (a.k, a.v, *a.meta.values())]
    names = ("serial", "prr", "dense", "reuse")
    alone = {n: [engine.decoder(start, mode(n), dict.fromkeys(start.windows, THETA))] for n in names}
    wanted = {n: [alone[n][0].step((i * 7 + len(n)) % VOCAB)[0] for i in range(8)] for n in names}
    turns = {n: engine.decoder(start, mode(n), dict.fromkeys(start.windows, THETA)) for n in names}
    for i in range(8):
        for n in names:
            assert torch.equal(turns[n].step((i * 7 + len(n)) % VOCAB)[0], wanted[n][i])
    now = [x for a in start.cache.layers for x in (a.k, a.v, *a.meta.values())]
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(kept, now, strict=True))
    assert start.cache.length == 70 and start.cache.seq_lens.tolist() == [70]


def test_a_step_beyond_the_room_is_refused() -> None:
    engine, start = prefilled("llama", QUEST, tokens=70, room=2)  # 72 tokens are 18 whole blocks
    decoder = engine.decoder(start, mode("serial"), {})
    decoder.step(1)
    decoder.step(1)
    with pytest.raises(ValueError) as error:
        decoder.step(1)
    assert str(error.value) == "cache of 72 tokens cannot hold 73"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("method", METHODS)
def test_counts_of_a_step_add_up(method: str, name: str) -> None:
    engine, start = prefilled("llama", METHODS[method])
    _, _, stats = run(engine, start, mode(name))
    m = engine.method
    for i, s in enumerate(stats):
        assert s.context == 71 + i
        assert list(s.layers) == list(range(m.dense_layers, LAYERS))
        for x in s.layers.values():
            assert x.heads == 2 and x.chosen == 2 * m.top_k
            assert x.dynamic == 2 * (m.top_k - m.sink - m.local)
            assert x.predicted == (x.chosen - x.missed) + x.wasted, "|P| = hits + wasted"
            assert 0 <= x.missed_dynamic <= x.missed <= x.chosen and x.wasted >= 0
            assert x.missed_dynamic == x.missed, "forced blocks are always in P"
            assert (x.kept_dynamic is None) == (i == 0)
        row = s.record()
        assert row["ms"] == pytest.approx(
            sum(row[f"{p}_ms"] for p in ("select", "attend", "repair", "predict", "other")), rel=1e-6
        )
        hit, dynamic = row["hit_all"], row["hit_dynamic"]
        assert hit == pytest.approx(1 - row["missed"] / m.top_k) and 0 <= dynamic <= hit <= 1
        assert row["wasted"] == pytest.approx(mode(name).budget.blocks(m.top_k, 0) - m.top_k * hit)


def test_reuse_and_reuse_repair_predict_the_same() -> None:
    """They differ in what a miss costs, not in what is missed."""
    engine, start = prefilled("llama", QUEST)
    runs = [[s.layers for s in run(engine, start, mode(name))[2]] for name in ("reuse", "reuse_repair")]
    assert runs[0] == runs[1]
    last = [s.layers for s in run(engine, start, mode("prr", Fixed(delta=1.0)))[2]]
    assert last != runs[0], "the calibrated forecast is another one"


def test_reuse_uses_all_that_it_attended_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss of one head recomputes A of all heads; without a miss nothing is recomputed."""
    engine, start = prefilled("llama", QUEST)
    looked: list[Tensor] = []
    own = ck.repair

    def repair(q: Tensor, k: Tensor, v: Tensor, chosen: ck.Selection, *rest: Any) -> Any:
        looked.append(chosen.position >= 0)
        return own(q, k, v, chosen, *rest)

    monkeypatch.setattr(ck, "repair", repair)
    missed = [x.missed for x in layers(run(engine, start, mode("reuse"))[2])]
    assert [bool(x.any()) for x in looked] == [not m for m in missed] and any(missed)
    looked.clear()
    decode(Prophet(engine, start, mode("reuse"), {}), 3)
    assert all(bool(x.all()) for x in looked)
    looked.clear()
    missed = [x.missed for x in layers(run(engine, start, mode("reuse_repair"))[2])]
    assert [int((~x).sum()) for x in looked] == missed


@pytest.mark.parametrize(("name", "theta", "width"), [("prr", THETA, 9), ("reuse", LAST_SCORES, 6)])
def test_the_first_prediction_has_learned_from_the_rows_of_the_prompt(name: str, theta: Theta, width: int) -> None:
    engine, start = prefilled("llama", QUEST)
    decoder = engine.decoder(start, mode(name), dict.fromkeys(start.windows, THETA))
    assert decoder.states.keys() == start.windows.keys() == {1, 2}
    for layer, window in start.windows.items():
        state = PredictorState(QUEST, window.scores[:1], theta)
        for scores, length in zip(window.scores, window.lengths, strict=True):
            state.update(scores[None], length[None], width)
        assert torch.equal(decoder.states[layer].ids, state.ids) and state.ids.shape[2] == width


def test_dynamic_hits_of_plain_reuse_are_the_overlap_with_the_last_selection() -> None:
    """Within a block, while no rule moves, P of the last scores is A of the last step."""
    engine, start = prefilled("llama", QUEST, tokens=72)
    _, _, stats = run(engine, start, mode("reuse_repair"), 4)  # tokens 73 ... 76 share a block
    for s in stats[1:]:
        for x in s.layers.values():
            assert x.dynamic - x.missed_dynamic == x.kept_dynamic


@dataclass(kw_only=True)
class Late(BudgetPolicy):
    """No budget up to 74 tokens."""

    name: str = "late"

    def ratio(self, context: int) -> float:
        return 0.0 if context <= 74 else 1.5


def test_a_budget_that_opens_while_decoding_finds_a_calibrated_state() -> None:
    engine, start = prefilled("llama", QUEST)
    prr = mode("prr", Late())
    _, logits, _ = run(engine, start, mode("serial"))
    _, theirs, stats = run(engine, start, prr)
    assert same_bits(theirs, logits)
    assert [bool(s.layers[1].predicted) for s in stats] == [s.context > 74 for s in stats]
    always = run(engine, start, mode("prr"))[2]
    assert [s.layers for s in stats[4:]] == [s.layers for s in always[4:]]


def test_a_profiled_budget_decodes_to_the_same_bits() -> None:
    budget = Profiled(deltas=[1.0, 2.0], degree=1)
    times = {72: (5.0, 9.0), 80: (5.0, 6.0)}
    budget.fit(
        [
            {"context": c, "delta": d, "select_us": 7.0, "attend_us": t}
            for c, pair in times.items()
            for d, t in zip((1.0, 2.0), pair, strict=True)
        ]
    )
    engine, start = prefilled("llama", QUEST)
    _, logits, _ = run(engine, start, mode("serial"), 10)
    _, theirs, stats = run(engine, start, mode("prr", budget), 10)
    assert same_bits(theirs, logits)
    assert [s.layers[1].predicted // 2 for s in stats] == [6] * 7 + [12] * 3


def test_attention_of_the_model_is_put_back_in_every_case() -> None:
    model = tiny("llama")
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]

    def fails(*_: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attached(model, fails):
        model(input_ids=torch.tensor([[1]]), use_cache=False)
    assert model.config._attn_implementation == "sdpa"
    assert not any(hasattr(m, "_prr_attention") for m in modules)


def test_a_layer_with_a_sliding_window_is_refused() -> None:
    config = CONFIG_MAPPING["qwen3"](
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=9,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError) as error, attached(model, lambda *_: torch.empty(0)):
        pass
    assert str(error.value) == "layers [1] use sliding-window attention; only full attention is served"


def test_a_step_has_its_own_number_of_threads() -> None:
    engine = build(tiny("llama", 4, 2), QUEST)
    start = engine.prefill(prompt(), 4)
    engine.step_threads, seen = 2, []
    decoder = engine.decoder(start, mode("serial"), {})
    own, before = decoder._attention, torch.get_num_threads()

    def attention(*args: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return own(*args)

    decoder._attention = attention  # type: ignore[method-assign]
    decoder.step(1)
    assert set(seen) == {2} and torch.get_num_threads() == before
