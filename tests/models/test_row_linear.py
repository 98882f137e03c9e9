# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one row run the op, others do not, and all of it can be undone."""

import pytest
import torch
import torch.nn.functional as F
from capture import captured
from small_models import Quantised
from torch import nn

from prr_pipeline.models import linear, takeover
from prr_pipeline.models.linear import RowLinear, fast_linears


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(takeover, "served", lambda weight: weight.dtype == torch.bfloat16)


@pytest.fixture
def rows(monkeypatch):
    """Inputs that the op was called with."""
    seen, op = [], linear.ck.linear
    monkeypatch.setattr(linear.ck, "linear", lambda x, *rest: seen.append(x) or op(x, *rest))
    return seen


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 32, bias=False)).bfloat16()


@torch.no_grad()
def test_one_row_runs_the_op_and_more_do_not(anywhere, rows):
    m = model()
    one, two = torch.randn(1, 1, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    before = m(one), m(two)
    undo = fast_linears(m)
    assert [type(x) for x in m] == [RowLinear, nn.SiLU, RowLinear]
    assert torch.equal(m(two), before[1]) and not rows
    y = m(one)
    assert y.shape == (1, 1, 32) and [x.shape for x in rows] == [(1, 64), (1, 48)]
    torch.testing.assert_close(y, before[0], atol=2e-2, rtol=2e-2)
    undo()
    assert type(m[0]) is nn.Linear and torch.equal(m(one), before[0]) and len(rows) == 2


@torch.no_grad()
def test_torch_compile_traces_it_whole(anywhere):
    m = model()
    fast_linears(m)
    one = torch.randn(1, 1, 64).bfloat16()
    traced = torch.compile(m, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(traced(one), m(one))


def test_only_plain_layers_of_half_precision_are_taken(anywhere):
    m = nn.ModuleList([Quantised(8, 8).bfloat16(), nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()])
    undo = fast_linears(m)
    again = fast_linears(m)
    assert [type(x) for x in m] == [Quantised, nn.Linear, RowLinear]
    again()
    assert type(m[2]) is RowLinear  # it undoes what it did, no more
    undo()
    assert type(m[2]) is nn.Linear


def test_a_cpu_keeps_its_own():
    m = model()
    fast_linears(m)
    assert [type(x) for x in m] == [nn.Linear, nn.SiLU, nn.Linear]
    assert torch.equal(
        m[0](torch.ones(1, 64).bfloat16()), F.linear(torch.ones(1, 64).bfloat16(), m[0].weight, m[0].bias)
    )


class Heads(nn.Module):
    """Layers of one input, as models have them; `other` gives v an input of its own."""

    def __init__(self, bias: bool = True, other: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.other = other
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias=bias) for n in (48, 16, 32))
        self.gate_proj, self.up_proj = (nn.Linear(96, 32, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(2 * x if self.other else x)
        y = torch.cat((q, k, v), -1)
        return torch.nn.functional.silu(self.gate_proj(y)) * self.up_proj(y)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_row_are_one_launch(anywhere, rows, bias):
    m, one, two = Heads(bias).bfloat16(), torch.randn(1, 1, 64).bfloat16(), torch.randn(1, 2, 64).bfloat16()
    named = {name: p.clone() for name, p in m.named_parameters()}
    before = m(one), m(two)
    undo = fast_linears(m)
    assert torch.equal(m(two), before[1]) and not rows
    for _ in range(2):
        torch.testing.assert_close(m(one), before[0], atol=2e-2, rtol=2e-2)
    assert [x.shape for x in rows] == [(1, 64), (1, 96)] * 2
    assert m.q_proj.weight.untyped_storage().data_ptr() == m.v_proj.weight.untyped_storage().data_ptr()
    assert m.q_proj.joint.source is None and not m.q_proj.joint.parts
    assert {name: torch.equal(p, named[name]) for name, p in m.named_parameters()} == dict.fromkeys(named, True)
    undo()
    assert torch.equal(m(one), before[0]) and len(rows) == 4


@torch.no_grad()
def test_a_layer_with_an_input_of_its_own_computes_itself(anywhere, rows):
    m, one = Heads(other=True).bfloat16(), torch.randn(1, 1, 64).bfloat16()
    before = m(one)
    fast_linears(m)
    torch.testing.assert_close(m(one), before, atol=2e-2, rtol=2e-2)
    assert [x.shape for x in rows] == [(1, 64), (1, 64), (1, 96)]


@torch.no_grad()
def test_a_weight_that_two_layers_share_stays_shared(anywhere, rows):
    m = Heads().bfloat16()
    m.q_proj = nn.Linear(64, 16).bfloat16()
    m.q_proj.weight, m.gate_proj = m.k_proj.weight, nn.Linear(64, 32).bfloat16()
    fast_linears(m)
    assert m.q_proj.weight is m.k_proj.weight and m.q_proj.joint is None and m.gate_proj.joint is None


@torch.no_grad()
def test_torch_compile_traces_one_launch(anywhere):
    m, one = Heads().bfloat16(), torch.randn(1, 1, 64).bfloat16()
    fast_linears(m)
    seen = []

    def backend(graph, _):
        seen.extend(n for n in graph.graph.nodes if "linear" in str(n.target))
        return graph.forward

    traced = torch.compile(m, fullgraph=True, dynamic=False, backend=backend)
    assert torch.equal(traced(one), m(one)) and len(seen) == 2
    assert m.q_proj.joint.source is None


@pytest.mark.gpu
@torch.no_grad()
def test_kernels_of_the_compiler_and_ours_wait_for_each_other():
    """Launches overlap, all of them: a value read too early would be that of the replay before."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4096, 512), nn.SiLU(), nn.Linear(512, 4096), nn.RMSNorm(4096)).cuda().bfloat16()
    x = torch.randn(1, 1, 4096, device="cuda").bfloat16()
    deep = nn.Sequential(m, m, m)
    fast_linears(m)
    traced = torch.compile(deep, fullgraph=True, dynamic=False, options={"triton.enable_pdl": True})
    graph, y = captured(lambda: traced(x))
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, deep(x), atol=0.1, rtol=0.1)
        assert torch.equal(y, traced(x))
