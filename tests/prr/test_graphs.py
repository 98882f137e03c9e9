# SPDX-License-Identifier: Apache-2.0
"""Steps in bursts on a shared cache do what the plain decoder does: tokens, bits of the logits, counts of hits.

On a CPU they run eagerly. On a GPU (marker gpu) they are captured, compiled, and run beside each other, and are held
against each other: every exact mode yields the bits of serial.
"""

import hashlib
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from test_engine import KINDS, LAYERS, METHODS, QUEST, THETA, build, prompt, tiny
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import cutlass_kernels as ck
from cutlass_kernels.reference import rotate
from prr_pipeline.dsa.base import SparseMethod
from prr_pipeline.dsa.infllm_v2 import InfLLMv2
from prr_pipeline.dsa.quest import Quest
from prr_pipeline.errors import ConfigError
from prr_pipeline.models.attention import Rope, attention_modules
from prr_pipeline.models.rope import RowAttention
from prr_pipeline.prr import synthetic
from prr_pipeline.prr.budget import BudgetPolicy, Fixed, Off
from prr_pipeline.prr.engine import Mode, Step, digest
from prr_pipeline.prr.graphs import GraphEngine, GraphOptions, step_function
from prr_pipeline.prr.phase import AttentionPhase, Plan
from prr_pipeline.prr.sampling import Sampler

MODES = ("serial", "dense", "reuse", "reuse_repair", "prr")
EXACT = ("reuse", "reuse_repair", "prr")
EAGER = GraphOptions(burst=5, compiled=False, captured=False)
THETAS = dict.fromkeys(range(LAYERS), THETA)
ROOM = 24


def engine(model: Any, method: SparseMethod, how: GraphOptions = EAGER, chunk: int = 2048) -> GraphEngine:
    config = model.config
    shape = (LAYERS, config.num_key_value_heads, config.head_dim)
    return GraphEngine(model, method, *shape, prefill_chunk=chunk, window=12, how=how)


def mode(name: str, repair: str = "exact", budget: BudgetPolicy | None = None) -> Mode:
    return Mode.build(name, repair, budget or Fixed(delta=1.5))


def run(
    graphs: GraphEngine,
    name: str,
    tokens: int = 70,
    temperature: float = 0.0,
    stops: frozenset[int] = frozenset(),
    **of_mode: Any,
) -> list[Step]:
    start = graphs.prefill(prompt(tokens), ROOM)
    decoder = graphs.decoder(start, mode(name, **of_mode), THETAS)
    return list(decoder.generate(Sampler(temperature, 0.9, 0, "x"), ROOM, set(stops)))


def told(steps: list[Step]) -> list[tuple[Any, ...]]:
    """Everything but times."""
    return [(s.token, s.digest, s.stats and (s.stats.context, s.stats.layers)) for s in steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_bursts_do_what_single_steps_do(kind: str, name: str, temperature: float) -> None:
    plain, graphs = build(tiny(kind), METHODS[name]), engine(tiny(kind), METHODS[name])
    for one in MODES:
        start = plain.prefill(prompt(70), ROOM)
        sampler = Sampler(temperature, 0.9, 0, "x")
        wanted = list(plain.decoder(start, mode(one), THETAS).generate(sampler, ROOM, set()))
        assert told(run(graphs, one, temperature=temperature)) == told(wanted), one


@pytest.mark.parametrize("repair", ["exact", "union"])
def test_budgets_that_change_within_a_burst(repair: str) -> None:
    """The width of P follows the context, to nothing and back; the plain decoder does the same."""

    class Stairs(Fixed):
        def ratio(self, context: int) -> float:
            return (1.5, 0.0, 1.0, 2.0)[context // 3 % 4]

    budget = Stairs(name="stairs")
    plain, graphs = build(tiny("llama"), QUEST), engine(tiny("llama"), QUEST)
    start = plain.prefill(prompt(70), ROOM)
    of_mode = mode("prr", repair, budget)
    wanted = list(plain.decoder(start, of_mode, THETAS).generate(Sampler(0, 1, 0, "x"), ROOM, set()))
    assert told(run(graphs, "prr", repair=repair, budget=budget)) == told(wanted)
    assert {s.stats.layers[1].predicted for s in wanted if s.stats} == {0, 2 * 6, 2 * 9, 2 * 12}


@pytest.mark.parametrize("name", ["serial", "prr"])
def test_nan_in_the_scores_of_any_step_of_a_burst_is_refused(name: str) -> None:
    class Once(Quest):
        def score(self, q: Tensor, meta: Any, seq_lens: Tensor, scale: float, out: Tensor) -> None:
            super().score(q, meta, seq_lens, scale, out)
            out[:, :, 3] = torch.where(seq_lens == 73, float("nan"), out[:, :, 3])

    method = Once(**vars(QUEST))
    with pytest.raises(ConfigError, match="gave NaN as a block's score at 73 tokens"):
        run(engine(tiny("llama"), method), name)


class Repairing(Fixed):
    """A budget whose repairs are one launch, or two."""

    two = False

    def halves(self, context: int, delta: float) -> bool:
        return self.two


def repairing(two: bool) -> Repairing:
    budget = Repairing(name="repairing")
    budget.two = two
    return budget


@pytest.mark.parametrize("two", [False, True])
def test_repair_in_halves_changes_no_bit(two: bool) -> None:
    graphs, budget = engine(tiny("llama"), QUEST), repairing(two)
    start = graphs.prefill(prompt(70), ROOM)
    for name in ("prr", "reuse_repair"):
        plans = graphs.decoder(start, mode(name, budget=budget), THETAS)._plans(ROOM)
        assert {p.halves for p in plans} == {two}, "modes that are compared repair alike"
    for name, repair in (("reuse", "exact"), ("prr", "union"), ("reuse_repair", "union")):
        plans = graphs.decoder(start, mode(name, repair, budget), THETAS)._plans(ROOM)
        assert {p.halves for p in plans} == {None}, "there is nothing to choose: these are one graph"
    assert told(run(graphs, "prr", budget=budget)) == told(run(graphs, "prr"))


@pytest.mark.parametrize("repair", ["exact", "union"])
def test_the_scores_stand_right_in_front_of_attention_over_p(repair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the op in front; that one must have waited for the keys and P, and write none of them."""
    calls: list[str] = []

    def spied(op: str) -> None:
        inner = getattr(ck, op)

        def call(*args: Any, **named: Any) -> Any:
            calls.append(op)
            assert op != "attend" or bool(named.get("beside")) is (calls[-2:-1] == ["select"]), "beside the selection"
            return inner(*args, **named)

        monkeypatch.setattr(ck, op, call)

    for op in ck.OPS:
        spied(op)
    graphs = engine(tiny("llama"), QUEST)
    start = graphs.prefill(prompt(70), ROOM)
    decoder = graphs.decoder(start, mode("prr", repair), THETAS)
    calls.clear()
    list(decoder.generate(Sampler(0, 1, 0, "x"), 2, set()))
    tail = ["repair"] if repair == "exact" else ["merge", "repair_union"]
    layer = ["append_quest", "quest_scores", "select", "attend"]
    last_two = [*layer, *tail, *layer, "predict", *tail]  # the first of three layers is dense; P is that of all layers
    assert calls[-len(last_two) :] == last_two


@pytest.mark.parametrize("name", METHODS)
def test_partials_are_allocated_before_the_ranking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over P writes beside it: it must not get memory that its launches still read."""
    graphs, seen = engine(tiny("llama"), METHODS[name]), []
    inner = AttentionPhase.rank

    def rank(phase: AttentionPhase, *args: Any) -> ck.Selection:
        seen.append({key[0] for key in phase._partials})
        return inner(phase, *args)

    monkeypatch.setattr(AttentionPhase, "rank", rank)
    decoder = graphs.decoder(graphs.prefill(prompt(70), ROOM), mode("prr"), THETAS)
    list(decoder.generate(Sampler(0, 1, 0, "x"), 2, set()))
    assert seen and all("ahead" in allocated for allocated in seen)


@pytest.mark.parametrize("name", METHODS)
def test_a_mode_that_does_not_learn_keeps_its_p(name: str) -> None:
    plain, graphs = build(tiny("llama"), METHODS[name]), engine(tiny("llama"), METHODS[name])
    frozen, found = replace(mode("prr"), learns=False), []
    for one in (plain, graphs):
        decoder = one.decoder(one.prefill(prompt(70), ROOM), frozen, THETAS)
        found.append(list(decoder.generate(Sampler(0, 1, 0, "x"), ROOM, set())))
    assert told(found[0]) == told(found[1])
    learnt, wanted = run(graphs, "prr"), run(graphs, "serial")
    assert [s.digest for s in found[1]] == [s.digest for s in wanted]
    lost = [sum(x.missed for s in steps if s.stats for x in s.stats.layers.values()) for steps in (found[1], learnt)]
    assert lost[0] > lost[1], "an old P misses more"


@pytest.mark.parametrize("repair", ["exact", "union"])
@pytest.mark.parametrize("delta", [0.0, 1.5])
def test_the_first_selection_on_the_way_is_that_of_the_plain_decoder(repair: str, delta: float) -> None:
    """Its P is of its own width and has its own forced blocks."""
    plain, graphs = build(tiny("llama"), QUEST), engine(tiny("llama"), QUEST)
    how = mode("prr", repair, Fixed(delta=delta))
    start = plain.prefill(prompt(14), ROOM)
    wanted = list(plain.decoder(start, how, THETAS).generate(Sampler(0, 1, 0, "x"), ROOM, set()))
    assert told(run(graphs, "prr", tokens=14, repair=repair, budget=Fixed(delta=delta))) == told(wanted)


def test_steps_that_begin_to_select_on_the_way() -> None:
    """Dense until the prompt and its answer have more blocks than top_k."""
    graphs = engine(tiny("llama"), QUEST)
    wanted, got = (told(run(graphs, name, tokens=14)) for name in ("serial", "prr"))
    assert [w[:2] for w in wanted] == [g[:2] for g in got]
    selects = [bool(s.stats.layers) for s in run(graphs, "prr", tokens=14) if s.stats]
    assert not selects[0] and selects[-1] and selects == sorted(selects)


def test_a_stop_ends_it_within_a_burst() -> None:
    graphs = engine(tiny("llama"), QUEST)
    whole = [s.token for s in run(graphs, "prr", temperature=1.3)]
    stop = whole[7]
    cut = run(graphs, "prr", temperature=1.3, stops=frozenset({stop}))
    assert [s.token for s in cut] == whole[: whole.index(stop) + 1]
    assert cut[-1].stats is None and all(s.stats for s in cut[:-1])


@pytest.mark.parametrize("limit", [1, 2, 6, 7])
def test_limits_around_a_burst(limit: int) -> None:
    graphs = engine(tiny("llama"), QUEST)
    start = graphs.prefill(prompt(70), ROOM)
    steps = list(graphs.decoder(start, mode("prr"), THETAS).generate(Sampler(0, 1, 0, "x"), limit, set()))
    assert len(steps) == limit and [s.stats is None for s in steps] == [False] * (limit - 1) + [True]


def test_modes_share_one_cache_and_leave_no_trace_in_it() -> None:
    graphs = engine(tiny("llama"), QUEST)
    start = graphs.prefill(prompt(70), ROOM)
    first = told(list(graphs.decoder(start, mode("serial"), {}).generate(Sampler(0, 1, 0, "x"), ROOM, set())))
    for name in MODES:
        decoder = graphs.decoder(start, mode(name), THETAS)
        list(decoder.generate(Sampler(1.3, 1, 1, name), ROOM, set()))
    again = told(list(graphs.decoder(start, mode("serial"), {}).generate(Sampler(0, 1, 0, "x"), ROOM, set())))
    assert again == first


def test_the_next_prompt_takes_the_cache_over() -> None:
    graphs = engine(tiny("llama"), QUEST)
    start = graphs.prefill(prompt(70), ROOM)
    other = graphs.prefill(prompt(40), ROOM)
    assert other.cache is start.cache
    graphs.release()
    assert graphs.prefill(prompt(70), ROOM).cache is not start.cache
    with pytest.raises(RuntimeError, match="no longer in the cache"):
        graphs.decoder(start, mode("serial"), {})


def test_synthetic_steps_are_those_of_the_plain_decoder() -> None:
    model = tiny("llama")
    found = []
    for one in (build(model, QUEST), engine(model, QUEST)):
        start = synthetic.prefill(one, 100, ROOM, synthetic.Motion(0.3, 0.2), 0.5, 0, "s-0")
        decoder = one.decoder(start, mode("prr"), THETAS)
        found.append(told(list(decoder.generate(Sampler(0, 1, 0, "x"), ROOM, set()))))
    assert found[0] == found[1]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of half precision are taken over on a CPU, too, where their ops run the reference."""
    monkeypatch.setattr("prr_pipeline.models.takeover.served", lambda weight: weight.dtype == torch.bfloat16)


def rotating(kind: str, method: SparseMethod, taken: bool = True) -> GraphEngine:
    """An engine of a model of its own, whose RoPE is a part of append, or not."""
    with pytest.MonkeyPatch.context() as patch:
        if not taken:
            patch.setattr("prr_pipeline.prr.graphs.fast_rope", lambda model: None)
        graphs = engine(tiny.__wrapped__(kind, dtype=torch.bfloat16), method)  # not the one that others see
    assert all(isinstance(m, RowAttention) is taken for m in attention_modules(graphs.model))
    return graphs


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", METHODS)
def test_rope_as_a_part_of_append(halves: None, kind: str, name: str) -> None:
    """All modes still yield the bits of serial; keys and logits are those of RoPE in the model, but for roundings."""
    graphs = rotating(kind, METHODS[name])
    runs = {one: run(graphs, one) for one in ("serial", *EXACT)}
    assert len({tuple((s.token, s.digest) for s in steps) for steps in runs.values()}) == 1
    found = []
    for one in (graphs, rotating(kind, METHODS[name], taken=False)):
        start = one.prefill(prompt(70), ROOM)
        runner = one.decoder(start, mode("serial"), {}).runner  # type: ignore[attr-defined]
        logits: list[Tensor] = []
        step = runner.model
        runner.model = lambda *given, step=step, logits=logits: logits.append(step(*given)) or logits[-1]
        list(one.decoder(start, mode("serial"), {}).generate(Sampler(0, 1, 0, "x"), 2, set()))
        found.append((*logits, *(at.k.flatten(2, 3)[:, :, 70] for at in start.cache.layers)))
    assert len(found[0]) == 1 + LAYERS
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).abs().max()) < 0.05 * float(theirs.abs().max())


def test_synthetic_keys_are_not_rotated(halves: None) -> None:
    found = []
    for graphs in (rotating("llama", QUEST), rotating("llama", QUEST, taken=False)):
        start = synthetic.prefill(graphs, 100, ROOM, synthetic.Motion(0.3, 0.2), 0.5, 0, "s-0")
        decoder = graphs.decoder(start, mode("prr"), THETAS)
        found.append(told(list(decoder.generate(Sampler(0, 1, 0, "x"), ROOM, set()))))
    assert found[0] == found[1]


class Reversed(InfLLMv2):
    """Ranks by scores of its own, in which the least are the highest."""

    def rank_blocks(self, q, meta, seq_lens, scale, scores, predicted=None, out=None):  # type: ignore[no-untyped-def]
        self.score(q, meta, seq_lens, scale, scores)
        scores.neg_()[scores.isposinf()] = -torch.inf
        rule = self.block_size, self.top_k, self.sink, self.local
        return ck.select(scores, seq_lens, *rule, predicted, out)


def test_all_decoders_rank_by_the_methods_own_ranking() -> None:
    plain = METHODS["infllm_v2"]
    method = Reversed(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    found = []
    for one in (build(tiny("llama"), method), engine(tiny("llama"), method), engine(tiny("llama"), plain)):
        start = one.prefill(prompt(70), ROOM)
        found.append(told(list(one.decoder(start, mode("prr"), THETAS).generate(Sampler(0, 1, 0, "x"), ROOM, set()))))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("plan", [Plan(False), Plan(True), Plan(True, 9)])
@pytest.mark.parametrize("name", METHODS)
def test_a_phase_with_rope_is_the_phase_behind_rope(name: str, plan: Plan) -> None:
    graphs = engine(tiny("llama"), METHODS[name])
    angles = torch.randn(1, 8).repeat(1, 2)
    rope, new = Rope(angles.cos(), angles.sin(), False), torch.randn(2, 1, 2, 16)
    q, found = torch.randn(1, 4, 16), []
    for inside in (True, False):
        start = graphs.prefill(prompt(70), ROOM)
        phase = AttentionPhase(start.cache, 4)
        phase.ahead(9)[:] = torch.arange(9, dtype=torch.int32)
        start.cache.set_length(71)
        given = (q, new[0]) if inside else (rotate(q, *rope), rotate(new[0], *rope))
        out = [phase.run(plan, layer, *given, new[1], 0.25, rope if inside else None) for layer in range(LAYERS)]
        found.append([*out, *(x.clone() for at in start.cache.layers for x in (at.k, at.v, *at.meta.values()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("blocks", [8, 513, 520, 1024])
def test_dense_attention_in_two_levels_is_attention_over_all_tokens(blocks: int) -> None:
    method = Quest(block_size=4, top_k=6)
    graphs = engine(tiny("llama"), method)
    cache = super(GraphEngine, graphs).cache(blocks * 4)
    cache.set_length(blocks * 4 - 5)
    gen = torch.Generator().manual_seed(0)
    shape = (1, 2, cache.length, 16)
    k, v = (torch.randn(shape, generator=gen) for _ in range(2))
    cache.write(0, k, v)
    q = torch.randn(1, 4, 16, generator=gen)
    out = AttentionPhase(cache, 4).dense(cache.layers[0], q, 0.25)
    wanted = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, wanted[:, :, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_shows_every_bit(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 300).to(dtype)
    assert digest(logits).shape == (1,)
    words = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    seen = {int(digest(logits))}
    for i in (0, 1, 150, 299):
        for bit in (0, 3, 9, 14):
            other = logits.clone()
            other.view(words)[0, i] ^= 1 << bit
            seen.add(int(digest(other)))
    assert len(seen) == 17
    swapped = logits[:, torch.arange(299, -1, -1)].contiguous()
    assert int(digest(swapped)) not in seen


@pytest.mark.parametrize(("vocabulary", "pair"), [(128256, [47194, 94150]), (151552, [33460, 86108])])
def test_signs_do_not_cancel_in_a_digest(vocabulary: int, pair: list[int]) -> None:
    """Pairs of weights whose sum ends with 33 zeros: a sum of products alone does not see both signs turn."""
    logits = torch.randn(1, vocabulary)
    other = logits.clone()
    other[0, pair] *= -1
    assert digest(logits) != digest(other)


# ---------------------------------------------------------------------------------------------------- on a GPU
GPU_METHODS = {
    "quest": Quest(block_size=16, top_k=8, sink=1, local=2, dense_layers=1),
    "infllm_v2": InfLLMv2(block_size=64, top_k=6, sink=1, local=1, dense_len=0),
}
SOAK = 20_000  # tokens


def on_gpu(kind: str, heads: int = 8, kv_heads: int = 2, head_dim: int = 64) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[kind](
        hidden_size=heads * head_dim,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=997,
        max_position_embeddings=32768,
        initializer_range=0.1,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GPU_METHODS)
def test_captured_modes_yield_the_bits_of_serial(kind: str, name: str) -> None:
    how = GraphOptions(burst=8, compiled=kind == "llama", captured=True)
    graphs = engine(on_gpu(kind), GPU_METHODS[name], how, chunk=512)
    missed = chosen = 0
    for tokens in (1500, 777):
        wanted = run(graphs, "serial", tokens=tokens)
        for one in EXACT:
            got = run(graphs, one, tokens=tokens)
            assert [(s.token, s.digest) for s in got] == [(s.token, s.digest) for s in wanted], one
            layers = [x for s in got if s.stats for x in s.stats.layers.values()]
            missed, chosen = missed + sum(x.missed for x in layers), chosen + sum(x.chosen for x in layers)
    assert 0 < missed < chosen, "there was something to repair, and something to reuse"


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_METHODS)
def test_captured_repairs_of_both_kinds_yield_the_bits_of_serial(name: str) -> None:
    graphs = engine(on_gpu("llama"), GPU_METHODS[name], GraphOptions(8, compiled=False))
    wanted = [(s.token, s.digest) for s in run(graphs, "serial", tokens=1500)]
    for two in (False, True):
        got = run(graphs, "prr", tokens=1500, budget=repairing(two))
        assert [(s.token, s.digest) for s in got] == wanted, two


@pytest.mark.gpu
@pytest.mark.parametrize("repair", ["exact", "union"])
@pytest.mark.parametrize("name", GPU_METHODS)
def test_captured_steps_are_the_eager_ones(name: str, repair: str) -> None:
    model = on_gpu("llama")
    eager, captured = (
        engine(model, GPU_METHODS[name], GraphOptions(8, compiled=False, captured=x)) for x in (False, True)
    )
    for one in MODES:
        for temperature in (0.0, 1.3):
            a, b = (run(x, one, tokens=700, temperature=temperature, repair=repair) for x in (eager, captured))
            assert told(a) == told(b), (one, temperature)


@pytest.mark.gpu
def test_prefill_in_chunks_is_prefill_at_once() -> None:
    """Rounded otherwise, so that logits are close, not equal; a wrong mask gives others altogether."""
    whole, parts = (engine(on_gpu("llama"), GPU_METHODS["quest"], chunk=c) for c in (2048, 256))
    a, b = (x.prefill(prompt(1500), ROOM).logits.float() for x in (whole, parts))
    assert torch.corrcoef(torch.cat((a, b)))[0, 1] > 0.99


@pytest.mark.gpu
def test_a_budget_of_nothing_is_serial_on_a_gpu_too() -> None:
    graphs = engine(on_gpu("llama"), GPU_METHODS["quest"], GraphOptions(8, compiled=False))
    wanted = run(graphs, "serial", tokens=700)
    assert told(run(graphs, "prr", tokens=700, budget=Off())) == told(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_the_compiler_wait_before_they_write(kind: str) -> None:
    """They start while others run: one that stored first could overwrite what those still read."""
    graphs = engine(on_gpu(kind), GPU_METHODS["quest"], GraphOptions(8))
    with inductor_config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run, graphs, "serial", tokens=300)
    kernels = [k for code in codes for k in re.findall(r"async_compile\.triton\('\w+', \'\'\'(.*?)\'\'\'", code, re.S)]
    starting = [k for k in kernels if re.search(r"launch_pdl\W+True", k)]
    assert starting
    for kernel in starting:
        for branch in re.split(r"\n    (?:el)?if pid", kernel):  # of kernels that are several
            before, *stores = branch.split("tl.store(")
            assert not stores or "gdc_wait" in before, kernel


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_METHODS)
def test_a_soak_keeps_serial_bits_memory_and_metadata(name: str) -> None:
    """20,000 tokens in one process: every step's logits are serial's, nothing grows, metadata is that of a rebuild."""
    graphs = engine(on_gpu("llama"), GPU_METHODS[name], GraphOptions(100, compiled=False))
    start = graphs.prefill(prompt(600), SOAK)
    found, held = [], []
    for one in ("serial", "prr"):
        trace = hashlib.sha256()
        decoder = graphs.decoder(start, mode(one), THETAS)
        for i, step in enumerate(decoder.generate(Sampler(1, 1, 0, "x"), SOAK, set())):
            trace.update(f"{step.token} {step.digest}".encode())
            if i % 1000 == 500:
                held.append(torch.cuda.memory_allocated())
        found.append((i, trace.hexdigest()))
        assert max(held) - min(held[1:]) < 1 << 22, "bytes allocated in between"
        held.clear()
    assert found[0] == found[1] and found[0][0] == SOAK - 1
    cache = start.cache
    for layer, at in enumerate(cache.layers):
        kept = {key: x.clone() for key, x in at.meta.items()}
        for x in at.meta.values():
            x.fill_(float("nan"))
        cache.rebuild(layer, cache.length)
        for key, x in at.meta.items():
            assert (~x.isnan()).any(), "there was something to compare"
            assert torch.equal(x[~x.isnan()], kept[key][~x.isnan()]), (layer, key)


def test_linear_layers_norms_mlps_and_rope_are_taken_over_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    for name in ("fast_linears", "fast_norms", "fast_mlps", "fast_rope"):
        monkeypatch.setattr(f"prr_pipeline.prr.graphs.{name}", taken.append)
    model = tiny("llama")
    engine(model, QUEST, replace(EAGER, linears=False))
    assert not taken
    engine(model, QUEST)
    assert taken == [model] * 4


def test_a_compiled_step_has_its_sums_put_into_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda step, **how: asked.update(how["options"]) or step)
    step_function(tiny("llama"), replace(EAGER, compiled=True))
    passes: list[Any] = []
    for name in ("fuse_adds", "fuse_linears"):
        monkeypatch.setattr(f"prr_pipeline.models.norm.{name}", lambda graph, name=name: passes.append((name, graph)))
    asked["post_grad_custom_pre_pass"]("a graph")
    assert passes == [("fuse_adds", "a graph"), ("fuse_linears", "a graph")]


def test_a_plan_of_no_budget_is_the_plan_of_serial() -> None:
    graphs = engine(tiny("llama"), replace(QUEST))
    start = graphs.prefill(prompt(70), ROOM)
    serial, idle = (graphs.decoder(start, mode(x, budget=Off()), {})._plans(ROOM) for x in ("serial", "prr"))
    assert serial == idle
