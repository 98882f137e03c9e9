# SPDX-License-Identifier: Apache-2.0
"""MLPs of one row run two launches, others and other kinds do not; norms still find the layers behind them."""

from collections import Counter

import pytest
import torch
from capture import captured
from small_models import LAYERS, SIZES, Quantised
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from prr_pipeline.models import mlp, takeover
from prr_pipeline.models.linear import RowLinear, fast_linears
from prr_pipeline.models.mlp import RowMLP, fast_mlps
from prr_pipeline.models.norm import adds_fused, fast_norms, fuse_adds, fuse_linears

KINDS = ("llama", "qwen3", "glm", "glm4")
TOKEN = torch.tensor([[7]]), torch.tensor([[3]])
LINEAR, WHOLE = torch.ops.prr.linear.default, torch.ops.prr.add_norm_linear.default
GATED, SILU = torch.ops.prr.silu_mul_linear.default, torch.ops.aten.silu.default


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(takeover, "served", lambda weight: weight.dtype == torch.bfloat16)


@pytest.fixture
def rows(monkeypatch):
    """Shapes of gate and up that the op was called with."""
    seen, op = [], mlp.ck.silu_mul_linear
    monkeypatch.setattr(mlp.ck, "silu_mul_linear", lambda x, *rest: seen.append(tuple(x.shape)) or op(x, *rest))
    return seen


def model(kind, dtype=torch.bfloat16, **other):
    torch.manual_seed(0)
    m = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **other))
    for p in m.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return m.to(dtype).eval()


def mlps(m):
    return [layer.mlp for layer in m.model.layers]


def step(model):
    return lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=1).logits[:, -1]


# ------------------------------------------------------------------------------------------------ fast_mlps
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_runs_the_op_and_more_do_not(anywhere, rows, kind):
    m = model(kind)
    fast_linears(m)
    kinds, named = [type(x) for x in mlps(m)], {name: p for name, p in m.named_parameters()}
    one, two = torch.randn(1, 1, 32).bfloat16(), torch.randn(1, 2, 32).bfloat16()
    before = step(m)(*TOKEN), [(x(one), x(two)) for x in mlps(m)]
    undo = fast_mlps(m)
    assert all(isinstance(x, RowMLP) and isinstance(x, kind) for x, kind in zip(mlps(m), kinds, strict=True))
    assert all(p is named[name] for name, p in m.named_parameters()) and not rows
    assert all(torch.equal(x(two), wanted[1]) for x, wanted in zip(mlps(m), before[1], strict=True)) and not rows
    assert all(torch.equal(x(one), wanted[0]) for x, wanted in zip(mlps(m), before[1], strict=True))
    assert torch.equal(step(m)(*TOKEN), before[0]) and rows == [(1, 1, 96)] * 2 * LAYERS
    assert all(x(row).shape == row.shape for x in mlps(m) for row in (one[0, 0], one[0], one[None]))
    undo()
    assert [type(x) for x in mlps(m)] == kinds
    assert torch.equal(step(m)(*TOKEN), before[0]) and len(rows) == 5 * LAYERS


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_added(anywhere, rows, bias):
    m = model("llama", mlp_bias=bias)
    fast_linears(m)
    before = step(m)(*TOKEN)
    fast_mlps(m)
    assert (mlps(m)[0].down_proj.bias is not None) == bias
    assert torch.equal(step(m)(*TOKEN), before) and len(rows) == LAYERS


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_without_its_layers_it_computes_as_its_own_class(anywhere, rows, kind):
    m = model(kind)
    before = step(m)(*TOKEN)
    undo = fast_linears(m)
    fast_mlps(m)
    undo()
    torch.testing.assert_close(step(m)(*TOKEN), before, rtol=0.05, atol=0.05)
    assert all(isinstance(x, RowMLP) for x in mlps(m)) and len(rows) == (LAYERS if kind.startswith("glm") else 0)


class Scaled(LlamaMLP):
    """Makes something else of its layers."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class Swapped(LlamaMLP):
    """The activation of the other half."""

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Routed(LlamaMLP):
    """Takes more than a row."""

    def forward(self, x, weight):
        return super().forward(x) * weight


class Clamped(LlamaMLP):
    """As its class, but for what is large."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))


class Unpacking(LlamaMLP):
    """Takes rows of other axes."""

    def forward(self, x):
        rows, hidden = x.shape
        return super().forward(x)


class Named(LlamaMLP):
    """Takes more than a row, if given."""

    def forward(self, hidden_states, factor=1.0):
        return factor * super().forward(hidden_states)


class Louder(LlamaMLP):
    """A forward of its own for what the op does not serve."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.shape[-2] == 1 else 2 * y


def alone(kind=LlamaMLP, **other):
    torch.manual_seed(0)
    return kind(AutoConfig.for_model("llama", **SIZES, **other)).bfloat16()


@torch.no_grad()
def test_what_is_given_beside_a_row_reaches_the_module_s_own_class(anywhere, rows):
    m, x = alone(Named), torch.randn(1, 1, 32).bfloat16()
    fast_linears(m)
    wanted = m(x)
    fast_mlps(m)
    assert isinstance(m, RowMLP) and torch.equal(m(x), wanted) and len(rows) == 1
    assert torch.equal(m(x, 2.0), 2 * wanted) and torch.equal(m(x, factor=2.0), 2 * wanted) and len(rows) == 1


@torch.no_grad()
def test_what_computes_otherwise_is_left_alone(anywhere):
    hooked, quantised, shared = alone(), alone(), alone()
    hooked.down_proj.register_forward_hook(lambda *_: None)
    quantised.down_proj = Quantised(48, 32, bias=False).bfloat16()
    shared.up_proj.weight = shared.gate_proj.weight  # so that gate and up are no joint
    single = alone().float()
    kinds = Scaled, Swapped, Routed, Clamped, Unpacking
    others = [*map(alone, kinds), hooked, quantised, shared, single, nn.Linear(32, 32)]
    gelu = [alone(hidden_act=name) for name in ("gelu", "gelu_pytorch_tanh", "relu")]
    m = nn.ModuleList([*others, *gelu])
    fast_linears(m)
    before = [type(x) for x in m]
    fast_mlps(m)
    assert [type(x) for x in m] == before


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_another_activation_is_left_alone(anywhere, kind):
    m = model(kind, hidden_act="gelu")
    fast_linears(m)
    fast_mlps(m)
    assert not any(isinstance(x, RowMLP) for x in m.modules())


@torch.no_grad()
def test_long_inputs_go_through_the_forward_of_the_module_s_own_class(anywhere):
    m, long = nn.ModuleList([alone(Louder)]), torch.randn(1, 5, 32).bfloat16()
    fast_linears(m)
    before = m[0](long)
    fast_mlps(m)
    assert isinstance(m[0], RowMLP) and torch.equal(m[0](long), before)


@torch.no_grad()
def test_layers_first_a_cpu_keeps_its_own_and_twice_is_once(monkeypatch):
    m = nn.ModuleList([alone()])
    monkeypatch.setattr(takeover, "served", lambda weight: True)
    fast_mlps(m)
    assert type(m[0]) is LlamaMLP, "its layers are no RowLinear"
    monkeypatch.setattr(takeover, "served", lambda weight: True)
    fast_linears(m)
    monkeypatch.undo()
    fast_mlps(m)
    assert type(m[0]) is LlamaMLP and type(m[0].down_proj) is RowLinear
    monkeypatch.setattr(takeover, "served", lambda weight: True)
    undo = fast_mlps(m)
    again = fast_mlps(m)
    again()
    assert isinstance(m[0], RowMLP)  # it undoes what it did, no more
    undo()
    assert type(m[0]) is LlamaMLP


def test_the_probe_leaves_the_random_numbers_alone(anywhere):
    m = nn.ModuleList([alone()])
    fast_linears(m)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fast_mlps(m)
    assert isinstance(m[0], RowMLP) and torch.equal(torch.rand(3), wanted)
    assert m[0].gate_proj.joint.source is None and not m[0].gate_proj.joint.parts


# ------------------------------------------------------------------------------------------------ the graph
def counted(graph):
    return Counter(n.target for n in graph.nodes if n.op == "call_function")


def compiled(f, seen):
    """f as a compiler would run it, node by node, after the passes of a decode step; seen: its nodes then."""

    def compiler(module, _):
        fuse_adds(module.graph)
        fuse_linears(module.graph)
        module.graph.lint()
        seen.append(counted(module.graph))
        module.recompile()
        return module.forward

    return torch.compile(f, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=compiler))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_has_two_launches_a_norm_and_an_mlp(anywhere, kind):
    """silu_mul_linear behind add_norm_linear, which all norms with a sum are in, and nothing between the two."""
    m = model(kind)
    fast_linears(m)
    fast_norms(m)
    before = step(m)(*TOKEN)
    seen = []
    assert torch.equal(compiled(step(m), seen)(*TOKEN), before)
    fast_mlps(m)
    torch._dynamo.reset()
    assert torch.equal(step(m)(*TOKEN), before)
    assert torch.equal(compiled(step(m), seen)(*TOKEN), before)
    old, new = seen
    assert old[WHOLE] == new[WHOLE] == 2 * LAYERS and old[LINEAR] - new[LINEAR] == LAYERS
    assert (old[SILU], old[GATED], new[SILU], new[GATED]) == (LAYERS, 0, 0, LAYERS)


class Block(nn.Module):
    """A layer without attention, as models add up their residuals."""

    def __init__(self, kind):
        super().__init__()
        sizes = SIZES | {"hidden_size": 4096, "intermediate_size": 13696}
        config = AutoConfig.for_model(kind, **sizes)
        layer = AutoModelForCausalLM.from_config(config.__class__(**sizes | {"num_hidden_layers": 1})).model.layers[0]
        self.norm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "glm4"])
def test_on_a_gpu_a_graph_of_the_compiled_step_sees_what_it_has_just_written(kind):
    """Launches overlap, all of them: a value read too early would be that of the replay before."""
    torch.manual_seed(0)
    m = nn.Sequential(*(Block(kind) for _ in range(3))).bfloat16().cuda()
    for take in (fast_linears, fast_norms, fast_mlps):
        take(m)
    assert sum(isinstance(x, RowMLP) for x in m.modules()) == 3
    options = {"triton.enable_pdl": True, "post_grad_custom_pre_pass": adds_fused()}
    traced = torch.compile(m, fullgraph=True, dynamic=False, options=options)
    x = torch.randn(1, 1, 4096, device="cuda").bfloat16()
    graph, y = captured(lambda: traced(x))
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, m(x), atol=0.1, rtol=0.1)
        assert torch.equal(y, traced(x))
