# SPDX-License-Identifier: Apache-2.0
"""Norms of one row run the op, others and other kinds do not; sums are put into them, and they into linear layers."""

from collections import Counter

import pytest
import torch
from capture import captured
from small_models import LAYERS, SIZES
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from prr_pipeline.models import norm, takeover
from prr_pipeline.models.linear import fast_linears
from prr_pipeline.models.norm import RowNorm, adds_fused, fast_norms, fuse_adds, fuse_linears

ALONE, ADDED = torch.ops.prr.rms_norm.default, torch.ops.prr.add_rms_norm.default
LINEAR, WHOLE = torch.ops.prr.linear.default, torch.ops.prr.add_norm_linear.default


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(takeover, "served", lambda weight: weight.dtype == torch.bfloat16)


@pytest.fixture
def rows(monkeypatch):
    """Inputs that the op was called with."""
    seen, op = [], norm.ck.rms_norm
    monkeypatch.setattr(norm.ck, "rms_norm", lambda x, *rest: seen.append(x) or op(x, *rest))
    return seen


def noisy(module):
    """bfloat16, and no weight of a norm all ones, which would hide a wrong use of it."""
    torch.manual_seed(0)
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return module.bfloat16().eval()


def model(kind):
    torch.manual_seed(0)
    return noisy(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)))


def step(model):
    return lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=1).logits[:, -1]


TOKEN = torch.tensor([[7]]), torch.tensor([[3]])


# ------------------------------------------------------------------------------------------------ fast_norms
@torch.no_grad()
def test_one_row_runs_the_op_and_more_do_not(anywhere, rows):
    m = noisy(nn.Sequential(LlamaRMSNorm(64, 1e-5), Qwen3RMSNorm(64, 1e-6)))
    one, two = torch.randn(1, 1, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    before, weights = (m(one), m(two)), [x.weight for x in m]
    m[0].register_forward_hook(lambda module, args, y: hooked.append(module))
    hooked: list[nn.Module] = []
    undo = fast_norms(m)
    assert all(isinstance(x, RowNorm) for x in m)
    assert isinstance(m[0], LlamaRMSNorm) and isinstance(m[1], Qwen3RMSNorm), "each keeps its own forward"
    assert torch.equal(m(two), before[1]) and not rows
    assert torch.equal(m(one), before[0]) and [x.shape for x in rows] == [(1, 1, 64)] * 2
    assert hooked == [m[0]] * 2 and all(x.weight is w for x, w in zip(m, weights, strict=True))
    undo()
    assert [type(x) for x in m] == [LlamaRMSNorm, Qwen3RMSNorm]
    assert torch.equal(m(one), before[0]) and len(rows) == 2


def test_what_the_op_does_not_take_goes_through_the_module_s_own_forward(anywhere, rows):
    """Other dtypes, other shapes, and rows that want a gradient; and the input may be given by its name."""
    m = noisy(nn.ModuleList([LlamaRMSNorm(64)]))
    row = torch.randn(1, 1, 64).bfloat16()
    others = [row.float(), row.half(), row.view(64, 1), row.clone().requires_grad_()]
    before = [m[0](x).detach() for x in others]
    fast_norms(m)
    for x, wanted in zip(others, before, strict=True):
        assert torch.equal(m[0](x).detach(), wanted) and not rows
    m[0](others[-1]).sum().backward()
    assert others[-1].grad is not None
    with torch.no_grad():
        assert torch.equal(m[0](hidden_states=row), before[-1]) == torch.equal(row, others[-1].detach()) and rows


def test_a_norm_is_asked_with_weights_of_noise_and_keeps_its_own(anywhere):
    """All ones, as weights come, would hide that it multiplies before it rounds."""
    m = nn.ModuleList([RoundedOnceRMSNorm(64), LlamaRMSNorm(64), Refusing(64)]).bfloat16()
    weights = [x.weight for x in m]
    fast_norms(m)
    assert [isinstance(x, RowNorm) for x in m] == [False, True, False]
    assert all(x.weight is w for x, w in zip(m, weights, strict=True))


class Refusing(LlamaRMSNorm):
    """Raises."""

    def forward(self, hidden_states):
        raise ValueError("not a row")


Refusing.__name__ = "RefusingRMSNorm"


class Louder(LlamaRMSNorm):
    """A forward of its own for what the op does not serve."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.shape[-2] == 1 else 2 * y


Louder.__name__ = "LouderRMSNorm"


@torch.no_grad()
def test_long_inputs_go_through_the_forward_of_the_module_s_own_class(anywhere):
    m = noisy(nn.ModuleList([LlamaRMSNorm(64), Louder(64)]))
    long = torch.randn(1, 5, 64).bfloat16()
    before = [x(long) for x in m]
    fast_norms(m)
    assert all(isinstance(x, RowNorm) and torch.equal(x(long), y) for x, y in zip(m, before, strict=True))


class GatedRMSNorm(LlamaRMSNorm):
    """Takes more than a row."""

    def forward(self, x, gate):
        return super().forward(x) * gate


class RoundedOnceRMSNorm(LlamaRMSNorm):
    """Times the weight in float32, as torch's own does."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x.float(), (64,), self.weight.float(), self.variance_epsilon).to(x.dtype)


def test_what_rounds_otherwise_is_left_alone(anywhere):
    gemma = GemmaRMSNorm(64)
    others = [RoundedOnceRMSNorm(64), GatedRMSNorm(64), nn.RMSNorm(64, 1e-6), nn.LayerNorm(64), nn.Linear(64, 64)]
    m = noisy(nn.ModuleList([gemma, *others]))
    m.append(LlamaRMSNorm(64))  # float32
    before = [type(x) for x in m]
    fast_norms(m)
    assert [type(x) for x in m] == before
    nn.init.zeros_(gemma.weight)  # as it comes: the op would make nothing of it
    fast_norms(m)
    assert type(gemma) is GemmaRMSNorm


def test_a_cpu_keeps_its_own_and_twice_is_once(monkeypatch):
    m = noisy(nn.Sequential(LlamaRMSNorm(64)))
    fast_norms(m)
    assert type(m[0]) is LlamaRMSNorm
    monkeypatch.setattr(takeover, "served", lambda weight: True)
    undo = fast_norms(m)
    again = fast_norms(m)
    again()
    assert isinstance(m[0], RowNorm)  # it undoes what it did, no more
    undo()
    assert type(m[0]) is LlamaRMSNorm


def test_the_probe_leaves_the_random_numbers_alone(anywhere):
    m = noisy(nn.Sequential(LlamaRMSNorm(64)))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    fast_norms(m)
    assert isinstance(m[0], RowNorm) and torch.equal(torch.rand(3), wanted)


# ------------------------------------------------------------------------------------------------ fuse_adds
def counted(graph):
    return Counter(n.target for n in graph.nodes if n.op == "call_function")


def compiled(f, seen, *passes):
    """f as a compiler would run it, node by node, after passes over its graph; seen: the nodes before and after."""

    def compiler(module, _):
        before = counted(module.graph)
        for one in passes:
            one(module.graph)
        module.graph.lint()
        seen.append((before, counted(module.graph)))
        module.recompile()
        return module.forward

    return torch.compile(f, fullgraph=True, dynamic=False, backend=aot_autograd(fw_compiler=compiler))


@torch.no_grad()
@pytest.mark.parametrize("kind, alone", [("llama", 1), ("qwen3", 1), ("glm4", 1 + 2 * LAYERS)])
def test_the_sums_of_a_model_are_put_into_its_norms(anywhere, kind, alone):
    """All but the first: two a layer. glm4 has two more norms a layer, of what a block has made, without a sum."""
    m = model(kind)
    before = step(m)(*TOKEN)
    fast_norms(m)
    assert torch.equal(step(m)(*TOKEN), before)
    seen = []
    assert torch.equal(compiled(step(m), seen, fuse_adds)(*TOKEN), before)
    [(old, new)] = seen
    assert new[ALONE] == alone and new[ADDED] == old[ALONE] - alone == 2 * LAYERS
    assert old - new == {ALONE: 2 * LAYERS, torch.ops.aten.add.Tensor: 2 * LAYERS}
    assert sum((new - old).values()) == 3 * LAYERS * 2 and (new - old)[ADDED] == 2 * LAYERS, "and their two parts each"


W = torch.rand(16, generator=torch.Generator().manual_seed(0)).bfloat16()


def draw(seed, *shape):
    return torch.randn(*(shape or (1, 16)), generator=torch.Generator().manual_seed(seed)).bfloat16()


def rms(x):
    return torch.ops.prr.rms_norm(x, W, 1e-5)


LEFT = {
    "no sum": lambda a, b: rms(a * b),
    "a number": lambda a, b: rms(a + 1) + b,
    "a factor": lambda a, b: rms(torch.add(a, b, alpha=2)),
    "a broadcast": lambda a, b: rms(a + b[:, :1]),
    "another dtype": lambda a, b: rms((a.float() + b.float()).bfloat16()),
    "used before": lambda a, b: (s := a + b, rms(s * rms(2 * s)) + rms(s))[1],
}
FUSED = {
    "once": lambda a, b: rms(a + b),
    "used after": lambda a, b: (s := a + b, rms(s) + s.exp())[1],
    "a sum of itself": lambda a, b: rms(a + a) * b,
    "one behind another": lambda a, b: (s := a + b, t := s + rms(s), rms(t) + t)[2],
    "two norms": lambda a, b: (s := a + b, rms(s) - rms(2 * s) * rms(s))[1],
}


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_are_left_alone(name):
    seen = []
    assert torch.equal(compiled(LEFT[name], seen, fuse_adds)(draw(0), draw(1)), LEFT[name](draw(0), draw(1)))
    [(old, new)] = seen
    assert ALONE in old and new == old


@pytest.mark.parametrize("name", FUSED)
def test_sums_are_fused(name):
    seen = []
    assert torch.equal(compiled(FUSED[name], seen, fuse_adds)(draw(0), draw(1)), FUSED[name](draw(0), draw(1)))
    [(old, new)] = seen
    assert new[ADDED] == old[ALONE] - new[ALONE] == (2 if name == "one behind another" else 1)


def test_a_second_pass_finds_nothing():
    seen = []
    compiled(FUSED["one behind another"], seen, fuse_adds)(draw(0), draw(1))
    compiled(FUSED["one behind another"], seen, fuse_adds, fuse_adds)(draw(0), draw(1))
    assert seen[0] == seen[1]


# ------------------------------------------------------------------------------------------------ fuse_linears
@torch.no_grad()
@pytest.mark.parametrize("kind, alone", [("llama", 1), ("qwen3", 1), ("glm", 1), ("glm4", 1 + 2 * LAYERS)])
def test_a_model_s_linear_layers_take_over_the_norms_in_front_of_them(anywhere, kind, alone):
    """All that have a sum: behind attention, between layers, and in front of the vocabulary."""
    m = model(kind)
    fast_linears(m)
    fast_norms(m)
    before, seen = step(m)(*TOKEN), []
    assert torch.equal(compiled(step(m), seen, fuse_adds, fuse_linears)(*TOKEN), before)
    [(old, new)] = seen
    assert new[WHOLE] == 2 * LAYERS and new[ADDED] == 0 and new[ALONE] == alone
    assert new[LINEAR] == old[LINEAR] - 2 * LAYERS == 2 * LAYERS + 1


M = draw(2, 48, 16)
BIAS = draw(3, 48)


def lin(x, bias=None):
    return torch.ops.prr.linear(x, M[:, : x.shape[-1]].contiguous() if x.shape[-1] < 16 else M, bias)


def plus(a, b):
    return torch.ops.prr.add_rms_norm(a, b, W, 1e-5)


WHOLES = {
    "as it is": lambda a, b: lin(plus(a, b)[0]),
    "with a bias": lambda a, b: lin(plus(a, b)[0], BIAS),
    "the sum, too": lambda a, b: (x := plus(a, b), lin(x[0]).sum() + x[1] * x[1].exp())[1],
    "another shape": lambda a, b: lin(plus(a.view(1, 1, 16), b.view(1, 1, 16))[0].view(1, -1)).view(1, 1, 48),
    "a slice": lambda a, b: lin(plus(a.view(1, 1, 16), b.view(1, 1, 16))[0][:, -1:].reshape(1, 16)),
    "its only entry": lambda a, b: lin(plus(a.view(1, 1, 16), b.view(1, 1, 16))[0][0]),
    "rows": lambda a, b: lin(plus(torch.cat((a, b)), torch.cat((b, b)))[0]),
    "one behind another": lambda a, b: (x := lin(plus(a, b)[0])[:, :16] * 2, lin(plus(x, a)[0]))[1],
}
APART = {
    "read by another": lambda a, b: (y := plus(a, b)[0], lin(y).sum() + y)[1],
    "two layers": lambda a, b: (y := plus(a, b)[0], lin(y) - lin(2 * y))[1],
    "given away": lambda a, b: (y := plus(a, b)[0], (lin(y), y))[1][0] * y[:, :1],
    "changed": lambda a, b: lin(plus(a, b)[0] * 2),
    "some of it": lambda a, b: lin(plus(torch.cat((a, b)), torch.cat((b, b)))[0][1:]),
    "other rows": lambda a, b: lin(plus(a, b)[0].view(2, 8)),
    "turned": lambda a, b: lin(plus(torch.cat((a, b)), torch.cat((b, b)))[0].view(2, 4, 4).mT.reshape(2, 16)),
    "the sum alone": lambda a, b: lin(plus(a, b)[1]),
    "weights that come later": lambda a, b: (x := plus(a, b), torch.ops.prr.linear(x[0], x[1].mT * M[:1], None))[1],
}


@pytest.mark.parametrize("name", WHOLES)
def test_a_norm_and_the_layer_behind_it_become_one(name):
    seen, f = [], WHOLES[name]
    assert torch.equal(compiled(f, seen, fuse_linears)(draw(0), draw(1)), f(draw(0), draw(1)))
    [(old, new)] = seen
    assert new[WHOLE] == old[ADDED] == old[LINEAR] and new[ADDED] == new[LINEAR] == 0


@pytest.mark.parametrize("name", APART)
def test_other_norms_are_left_alone(name):
    seen, f = [], APART[name]
    assert torch.equal(compiled(f, seen, fuse_linears)(draw(0), draw(1)), f(draw(0), draw(1)))
    [(old, new)] = seen
    assert new == old and old[ADDED] == 1 and old[LINEAR] >= 1


def test_a_second_pass_over_the_layers_finds_nothing():
    seen = []
    for passes in ((fuse_linears,), (fuse_linears, fuse_linears)):
        compiled(WHOLES["one behind another"], seen, *passes)(draw(0), draw(1))
    assert seen[0] == seen[1]


def test_a_new_node_knows_its_outputs():
    """Shapes, dtypes and strides, which the compiler would otherwise find out at the first replay."""
    seen = []
    spy = lambda graph: seen.extend(n for n in graph.nodes if n.target is WHOLE)
    compiled(WHOLES["another shape"], [], fuse_linears, spy)(draw(0), draw(1))
    [node] = seen
    assert [(x.shape, x.dtype) for x in node.meta["val"]] == [((1, 1, 48), W.dtype), ((1, 1, 16), W.dtype)]
    values, named = node.meta["eager_input_vals"]
    assert len(values) == len(node.args) == 6 and not named and values[3] == 1e-5


# ------------------------------------------------------------------------------------------------ both
@torch.no_grad()
def test_inductor_runs_the_pass():
    """As the decode step is compiled; a cache of graphs knows it by the file's contents, not by the object."""
    passed, seen = adds_fused(), []
    assert adds_fused().uuid() == passed.uuid() and isinstance(passed.uuid(), bytes)

    def spy(graph: fx.Graph):
        passed(graph)
        seen.append(counted(graph))

    f = lambda a, b: (y := FUSED["one behind another"](a, b), WHOLES["a slice"](y, b))[1]
    for one in (spy, passed):  # spy has no name to cache by
        options = {"post_grad_custom_pre_pass": one}
        y = torch.compile(f, fullgraph=True, dynamic=False, options=options)(draw(0), draw(1))
        torch.testing.assert_close(y, f(draw(0), draw(1)), rtol=2**-6, atol=2**-6)
    assert [(x[ADDED], x[WHOLE]) for x in seen] == [(2, 1)] and ALONE not in seen[0]


class Block(nn.Module):
    """A layer without attention, as models add up their residuals."""

    def __init__(self, K):
        super().__init__()
        self.norm, self.up, self.down = LlamaRMSNorm(K, 1e-5), nn.Linear(K, 2 * K), nn.Linear(2 * K, K, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_a_graph_of_the_compiled_step_sees_what_it_has_just_written():
    """Launches overlap, all of them: a value read too early would be that of the replay before."""
    torch.manual_seed(0)
    m = noisy(nn.Sequential(*(Block(4096) for _ in range(4)), LlamaRMSNorm(4096, 1e-5)).cuda())
    undo = [fast_linears(m), fast_norms(m)]
    assert sum(isinstance(x, RowNorm) for x in m.modules()) == 5
    options = {"triton.enable_pdl": True, "post_grad_custom_pre_pass": adds_fused()}
    traced = torch.compile(m, fullgraph=True, dynamic=False, options=options)
    x = torch.randn(1, 1, 4096, device="cuda").bfloat16()
    graph, y = captured(lambda: traced(x))
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, m(x), atol=0.1, rtol=0.1)
        assert torch.equal(y, traced(x))
    for one in undo:
        one()
    torch.testing.assert_close(y, m(x), atol=0.1, rtol=0.1)


@torch.no_grad()
def test_a_graph_of_symbolic_sizes_keeps_its_linear_layers(anywhere):
    m = noisy(nn.Linear(16, 16))

    def f(a, b):
        y, total = torch.ops.prr.add_rms_norm(a, b, W, 1e-5)
        return torch.ops.prr.linear(y, m.weight, m.bias), total

    found = []

    def compiler(module, _):
        fuse_linears(module.graph)
        found.append(counted(module.graph))
        module.recompile()
        return module.forward

    traced = torch.compile(f, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=compiler))
    a, b = draw(0, 3, 16), draw(1, 3, 16)
    assert all(torch.equal(x, y) for x, y in zip(traced(a, b), f(a, b), strict=True))
    assert found[0][LINEAR] == 1 and found[0][WHOLE] == 0
