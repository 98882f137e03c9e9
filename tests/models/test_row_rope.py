# SPDX-License-Identifier: Apache-2.0
"""Attention layers of one row leave RoPE to the attention, others and other kinds do not; the same q and k arrive."""

import pytest
import torch
from small_models import LAYERS, SIZES
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from cutlass_kernels.reference import rotate
from prr_pipeline.models import takeover
from prr_pipeline.models.attention import attached, forward
from prr_pipeline.models.linear import fast_linears
from prr_pipeline.models.rope import RowAttention, fast_rope

INTERLEAVED = {"llama": False, "qwen3": False, "qwen2": False, "glm": True, "glm4": True}
WIDE = SIZES | {"head_dim": 32}
ONE, TWO = torch.tensor([[7]]), torch.tensor([[7, 8]])


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(takeover, "served", lambda weight: weight.dtype == torch.bfloat16)


def model(kind, **other):
    torch.manual_seed(0)
    m = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **WIDE | other))
    for p in m.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return m.to(torch.bfloat16).eval()


def layers(m):
    return [layer.self_attn for layer in m.model.layers]


class Seen:
    """A handler: what it was given, and queries plus the keys and values of their heads."""

    def __init__(self):
        self.calls = []

    def __call__(self, layer, q, k, v, scale, *rope):
        self.calls.append((layer, q, k, v, scale, *rope))
        if rope and rope[0] is not None:
            q, k = (rotate(x[:, :, 0], *rope[0])[:, :, None] for x in (q, k))
        return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2)


def step(m, ids=ONE, rotates=False, at=300):
    seen = Seen()
    with attached(m, seen, rotates):
        return forward(m, ids, at), seen.calls


@torch.no_grad()
@pytest.mark.parametrize("kind", INTERLEAVED)
def test_one_row_leaves_rope_to_the_attention_and_more_do_not(kind):
    m = model(kind)
    fast_linears(m)
    kinds, before, two = [type(x) for x in layers(m)], step(m), step(m, TWO)
    undo = fast_rope(m)
    assert all(isinstance(x, RowAttention) and isinstance(x, kind) for x, kind in zip(layers(m), kinds, strict=True))
    for rotates in (False, True):
        logits, calls = step(m, rotates=rotates)
        torch.testing.assert_close(logits, before[0], rtol=0.05, atol=0.1)
        for found, wanted in zip(calls, before[1], strict=True):
            assert (found[0], found[4]) == (wanted[0], wanted[4]) and (len(found) == 6) is rotates
            q, k = found[1:3] if not rotates else (rotate(x[:, :, 0], *found[5])[:, :, None] for x in found[1:3])
            torch.testing.assert_close(q, wanted[1], rtol=0.05, atol=0.1)
            torch.testing.assert_close(k, wanted[2], rtol=0.05, atol=0.1)
    first, wanted = step(m, rotates=True)[1][0], before[1][0]
    assert torch.equal(first[3], wanted[3]) and first[5].interleaved is INTERLEAVED[kind]
    assert not torch.allclose(first[1], wanted[1], rtol=0.05, atol=0.1), "they are those before RoPE"
    logits, calls = step(m, TWO, rotates=True)
    assert torch.equal(logits, two[0]) and all(call[5] is None for call in calls)
    undo()
    assert [type(x) for x in layers(m)] == kinds and not any("interleaved" in vars(x) for x in layers(m))
    assert torch.equal(step(m)[0], before[0])


@torch.no_grad()
def test_its_own_attention_and_a_mask_are_its_own_business():
    m = model("llama")
    fast_linears(m)
    position = torch.tensor([[5]])
    before = m(input_ids=ONE, position_ids=position).logits
    fast_rope(m)
    assert torch.equal(m(input_ids=ONE, position_ids=position).logits, before)
    layer, row = layers(m)[0], torch.randn(1, 1, 32).bfloat16()
    turn = m.model.rotary_emb(row, position)
    seen = Seen()
    with attached(m, seen, rotates=True):
        layer(row, position_embeddings=turn, attention_mask=torch.zeros(1, 1, 1, 1))
        layer(row, position_embeddings=turn, attention_mask=None)
        layer(row, turn, None)
    assert [call[5] is None for call in seen.calls] == [True, False, False]


@torch.no_grad()
def test_twice_is_once():
    m = model("llama")
    fast_linears(m)
    undo, again = fast_rope(m), fast_rope(m)
    kinds = [type(x) for x in layers(m)]
    again()
    assert [type(x) for x in layers(m)] == kinds and all("interleaved" in vars(x) for x in layers(m))
    undo()
    assert not any(isinstance(x, RowAttention) for x in layers(m))


class Scaled(modeling_llama.LlamaAttention):
    """Asks for another softmax than its attribute says."""

    def forward(self, *args, **named):
        self.scaling, kept = self.scaling * 2, self.scaling
        try:
            return super().forward(*args, **named)
        finally:
            self.scaling = kept


class Backwards(modeling_llama.LlamaAttention):
    """Turns the other way."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **named):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, -sin), attention_mask, **named)


class Doubled(modeling_llama.LlamaAttention):
    """Makes something else of what attention gives."""

    def forward(self, *args, **named):
        out, weights = super().forward(*args, **named)
        return out * 2, weights


class Clamped(modeling_llama.LlamaAttention):
    """Clamps what is large."""

    def forward(self, *args, **named):
        kept = self.q_proj.forward
        self.q_proj.forward = lambda x: kept(x).clamp(-100, 100)
        try:
            return super().forward(*args, **named)
        finally:
            del self.q_proj.forward


class Valued(modeling_llama.LlamaAttention):
    """Attends to other values than its layer gives."""

    def forward(self, *args, **named):
        kept = self.v_proj.forward
        self.v_proj.forward = lambda x: kept(x) * 2
        try:
            return super().forward(*args, **named)
        finally:
            del self.v_proj.forward


class Needy(modeling_llama.LlamaAttention):
    """Is called in another way."""

    def forward(self, hidden_states, position_embeddings, attention_mask, bias, **named):
        return super().forward(hidden_states, position_embeddings, attention_mask, **named)


@torch.no_grad()
@pytest.mark.parametrize("outlier", [None, 600])
@pytest.mark.parametrize("other", [Scaled, Backwards, Doubled, Clamped, Valued, Needy])
def test_layers_that_do_something_else_are_left_alone(other, outlier):
    """Also where a large channel, of the slowest angle, would hide it from a look at the largest difference."""
    m = model("llama", attention_bias=outlier is not None, rope_parameters={"rope_type": "default", "rope_theta": 1e8})
    for projection in (layers(m)[0].q_proj, layers(m)[0].k_proj) if outlier else ():
        projection.bias[15] = outlier
    fast_linears(m)
    layers(m)[0].__class__ = other
    fast_rope(m)
    assert [isinstance(x, RowAttention) for x in layers(m)] == [False] + [True] * (LAYERS - 1)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["glm", "llama"])
@pytest.mark.parametrize("channel", [1, 17, 31])
def test_a_large_channel_hides_no_pairs(kind, channel):
    m = model(kind, attention_bias=True)
    for layer in layers(m):
        layer.q_proj.bias[channel] = layer.k_proj.bias[channel] = 1000.0
    fast_linears(m)
    fast_rope(m)
    assert [x.interleaved for x in layers(m)] == [INTERLEAVED[kind]] * LAYERS


@torch.no_grad()
@pytest.mark.parametrize("angles", ["float", "others", "single"])
def test_angles_that_are_not_as_the_kernels_take_them(angles, monkeypatch):
    m = model("llama")
    fast_linears(m)
    own = type(m.model.rotary_emb).forward
    change = {
        "float": lambda x: x.float(),
        "others": lambda x: x[..., :16].repeat_interleave(2, -1),
        "single": lambda x: x[..., :16],
    }[angles]
    if angles == "single":  # of 16 channels, whose second half are other angles
        assert not torch.equal(*change(own(m.model.rotary_emb, torch.ones(1, 1, 1), ONE)[0]).chunk(2, -1))
    forward = lambda self, *given: tuple(change(x) for x in own(self, *given))
    monkeypatch.setattr(type(m.model.rotary_emb), "forward", forward)
    fast_rope(m)
    assert not any(isinstance(x, RowAttention) for x in layers(m))


@torch.no_grad()
def test_the_angles_of_a_model_are_what_they_were():
    """Some keep the longest position that they saw, and turn by other angles then."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    m = model("llama", rope_parameters=dynamic, max_position_embeddings=64)
    fast_linears(m)
    before = {name: x.clone() for name, x in m.named_buffers()}, m.model.rotary_emb.max_seq_len_cached
    fast_rope(m)
    assert all(torch.equal(x, before[0][name]) for name, x in m.named_buffers())
    assert m.model.rotary_emb.max_seq_len_cached == before[1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("llama", {"head_dim": 8}),  # of a number of channels that no kernel rotates
        ("mistral", {"sliding_window": 8}),  # refused where it is attached
        ("olmo2", {}),  # its norms are of all heads
    ],
)
def test_models_that_are_not_served_are_left_alone(kind, other):
    m = model(kind, **other)
    fast_linears(m)
    fast_rope(m)
    assert not any(isinstance(x, RowAttention) for x in layers(m))


@torch.no_grad()
def test_without_its_linear_layers_it_is_left_alone():
    m = model("llama")
    fast_rope(m)
    assert not any(isinstance(x, RowAttention) for x in layers(m))


@torch.no_grad()
@pytest.mark.parametrize("kind", INTERLEAVED)
def test_a_compiled_step_hands_on_the_rows_of_its_linear_layers(kind):
    """No operation of RoPE is left in its graph but those that make the angles; the same logits."""
    m = model(kind)
    fast_linears(m)
    fast_rope(m)
    graphs = []

    def look(graph, _):
        graphs.append(graph)
        return graph.forward

    one = lambda ids, at: m(input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=1).logits[:, -1]
    compiled = torch.compile(one, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=look))
    seen = Seen()
    with attached(m, seen, rotates=True):
        wanted = one(ONE, torch.tensor([[300]]))
        torch.testing.assert_close(compiled(ONE, torch.tensor([[300]])), wanted, rtol=0.05, atol=0.1)
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(torch.ops.prr_pipeline.attention.default) == LAYERS
    aten = torch.ops.aten
    assert targets.count(aten.cos.default) == targets.count(aten.sin.default) == 1
    assert aten.neg.default not in targets and aten.stack.default not in targets
