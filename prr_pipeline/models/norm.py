# SPDX-License-Identifier: Apache-2.0
"""A decode step's RMSNorms, one row each, through the ops rms_norm and add_rms_norm; longer inputs go where they went.

A norm is taken over by what it does, not by its name: its own forward must give what the op's reference gives. The sum
that a norm reads is made beside it, not in the layer that adds, and what reads a norm is another module's, so they
become one where a compiler has them before it: fuse_adds and fuse_linears work on its graph.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import cutlass_kernels as ck
from cutlass_kernels import reference
from prr_pipeline.models import takeover
from prr_pipeline.models.linear import one_row
from prr_pipeline.models.takeover import taken_over

aten = torch.ops.aten
# Of as many elements as their input has, they leave those in their order.
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int}


class RowNorm(nn.Module):
    """The forward of a norm that was taken over; stands before the norm's own class, which keeps all else."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., K] -> [..., K]."""
        if not one_row(hidden_states, self.weight):
            return super().forward(hidden_states)
        return ck.rms_norm(hidden_states, self.weight, _epsilon(self))


def fast_norms(model: nn.Module) -> Callable[[], None]:
    """Make every RMSNorm of half precision on a GPU, rounded as Llama's, a RowNorm.

    Returns:
        a function that undoes it.
    """
    return taken_over([m for m in model.modules() if _is_norm(m) and _rounds_alike(m)], RowNorm)


def _epsilon(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)


def _is_norm(module: nn.Module) -> bool:
    """Whether it looks like one that is served: the class's name, a weight of one axis, an epsilon."""
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and not isinstance(module, RowNorm)
    if not named or not isinstance(weight, Tensor) or not isinstance(_epsilon(module), float):
        return False
    return weight.dim() == 1 and takeover.served(weight)


@torch.no_grad()
def _rounds_alike(module: nn.Module) -> bool:
    """Whether a row of noise gets the reference's bits, but for a rounding here and there: a sum may have any order."""
    weight: Any = module.weight
    row = torch.randn(1, 1, weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight)
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight) + 0.5
    try:
        module.weight = nn.Parameter(noise, requires_grad=False)  # ones would hide a use of it that is another
        found = module.forward(row)
    except Exception:  # it takes more than a row
        return False
    finally:
        module.weight = weight
    wanted = reference.rms_norm(row, noise, _epsilon(module))
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    near = torch.isclose(found, wanted, rtol=2 * torch.finfo(weight.dtype).eps, atol=0.0)
    return bool(near.all()) and int((found != wanted).sum()) <= weight.numel() // 64


def fuse_adds(graph: fx.Graph) -> None:
    """Make rms_norm(a + b) one add_rms_norm, which gives the sum to its other users, too.

    It stands where the norm stood: a sum that is used before its norm is left alone, as is one that broadcasts or
    converts.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for norm in graph.find_nodes(op="call_function", target=torch.ops.prr.rms_norm.default):
        total, *rest = norm.args
        if not _is_sum(total) or any(place.get(user, -1) < place[norm] for user in total.users):
            continue
        args = (*total.args, *rest)
        with graph.inserting_before(norm):
            both = graph.call_function(torch.ops.prr.add_rms_norm.default, args)
            parts = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        _describe(both)
        for old, new in zip((norm, total), parts, strict=True):
            new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            graph.erase_node(old)


def _value(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, fx.Node) else x


@torch.no_grad()
def _describe(node: fx.Node) -> None:
    """What the compiler must know of a new node: its outputs, and the strides of its inputs, to which it must keep."""
    values = tuple(_value(x) for x in node.args)
    node.meta["val"] = node.target(*values)  # type: ignore[operator]
    node.meta["eager_input_vals"] = values, {}


def _is_sum(node: Any) -> bool:
    """Whether it is a + b of tensors of one shape and dtype."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    kinds = [(x.meta["val"].shape, x.meta["val"].dtype) for x in node.args if isinstance(x, fx.Node)]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def fuse_linears(graph: fx.Graph) -> None:
    """Make a linear of what add_rms_norm gives one add_norm_linear, where nothing else reads the normalised row.

    It stands where the norm stood: a layer whose weights are made behind that is left alone.
    """
    for linear in graph.find_nodes(op="call_function", target=torch.ops.prr.linear.default):
        row, *weights = linear.args
        norm = _norm_of(row)
        shape = list(linear.meta["val"].shape)
        if norm is None or any(norm < x for x in weights if isinstance(x, fx.Node)):
            continue
        if not all(isinstance(n, int) for n in shape):  # symbolic
            continue
        with graph.inserting_before(norm):
            both = graph.call_function(torch.ops.prr.add_norm_linear.default, (*norm.args, *weights))
            y, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
            flat = graph.call_function(aten.reshape.default, (y, shape))
        _describe(both)
        y.meta["val"], total.meta["val"] = both.meta["val"]
        flat.meta["val"] = linear.meta["val"]
        linear.replace_all_uses_with(flat)
        while linear is not norm:  # and what led to it
            old, linear = linear, linear.args[0]
            graph.erase_node(old)
        for old in list(norm.users):
            old.replace_all_uses_with(total)
            graph.erase_node(old)
        graph.erase_node(norm)


def _norm_of(row: Any) -> Any:
    """The add_rms_norm whose normalised row this is, in whatever shape, where nothing else reads it; else None."""
    size = row.meta["val"].shape[-1]
    while row.target in VIEWS and len(row.users) == 1 and _value(row).numel() == _value(row.args[0]).numel():
        row = row.args[0]
    if row.target is not operator.getitem or row.args[1] != 0 or len(row.users) != 1:
        return None
    norm = row.args[0]
    alone = norm.target is torch.ops.prr.add_rms_norm.default and [x.args[1] for x in norm.users].count(0) == 1
    return norm if alone and _value(row).shape[-1] == size else None


def adds_fused() -> Any:
    """Both as a pass of torch's compiler, whose cache of compiled graphs knows it by this file's contents."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class FuseAdds(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            fuse_adds(graph)
            fuse_linears(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return FuseAdds()
