"""`gather_unit` and its transpose `scatter_grads`: convert a unit between its sharded and gathered forms.

With `<a, b>` the inner product summed over ranks, `<gather_unit(x), y> == <x, scatter_grads(y, like=x)>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, _functorch, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import LayoutError, SpecError, TransformError, listed, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.bucket import Slot
from fsharding.comm.leaf_memory import here
from fsharding.comm.leaf_wires import LeafIndex, UnitWire
from fsharding.comm.wires import Plain
from fsharding.mesh.call_stacks import site_here
from fsharding.mesh.failures import order_here
from fsharding.ops import collectives
from fsharding.sharding import named_sharding
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.named_sharding import Local, to_local, typeof
from fsharding.transforms import policies
from fsharding.transforms.gather_context import GatherContext, current_context
from fsharding.transforms.policies import Policy, check_policy
from fsharding.transforms.unit_plan import GradTarget, UnitLeaf, plan_unit, unreduced, whole

__all__ = [
    "UnitsAhead", "gather_unit", "local_nodes", "prefetch_unit", "refuse_cut_layers", "rows_of", "scatter_grads",
    "select_unit",
]  # fmt: skip


class UnitsAhead(tuple[Tree, ...]):
    """The units that will be gathered next, in order, as a value of `next_unit=`; the prefetch depth limits them."""

    __slots__ = ()

    @classmethod
    def of(cls, next_unit: Tree) -> UnitsAhead:
        """Convert a value of `next_unit=`: one unit, several, or None."""
        return next_unit if isinstance(next_unit, cls) else cls(() if next_unit is None else (next_unit,))


@public
@_compat.outside_of_graphs
def gather_unit(
    unit: Tree,
    *,
    policy: Policy = policies.save_except_gathered,
    dtype: torch.dtype | None = None,
    next_unit: Tree = None,
) -> Tree:
    """Gather the leaves of a unit over the data axes, with one all-gather per (dtype, axes).

    Args:
        unit: Tree of `Local` nodes or DTensors. Plain tensors are cast to `dtype`, and otherwise unchanged.
        policy: Whether gathered weights stay for backward (`everything_saveable`), or are freed and gathered again.
        dtype: Dtype of floating point leaves. Default: the compute dtype of the running `value_and_grad`, else the
            dtype of each leaf.
        next_unit: Unit that will be gathered next. Its all-gathers start now and overlap with this unit's computation,
            unless `value_and_grad(prefetch_depth=0)`.

    Returns:
        The same tree with plain tensors, full over the data axes. Don't write to them: ranks of one machine may share
        the memory.

    Raises:
        ConfigError: `policy` isn't an `fs.policies.Policy`.
        TransformError: DTensors went through a torch.func transform, a `Local` holds a value that doesn't match its
            sharding, or (when the unit is released) its weights were written in place.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4, 2)}, layout)
        >>> def loss(params, x):
        ...     return (x @ fs.gather_unit(params)["w"]).sum()
        >>> value, grads = fs.value_and_grad(loss)(params, torch.ones(3, 4))
        >>> float(value)
        24.0
    """
    check_policy(policy)
    nodes, spec = local_nodes(unit)
    context = current_context()
    shards = _shards(nodes)
    index = None if context is None else context.indices_of(shards)
    if context is not None and index:
        full = context.gather(shards, index, dtype, policy)
        # After this unit's own collectives, so that the next unit's don't delay them.
        prefetch_unit(next_unit)
    else:
        full = _gather_plain(shards, dtype, context)
    by_value = dict(zip((id(node.value) for node in shards), full, strict=True))
    return tree.unflatten(
        spec, [by_value[id(n.value)] if isinstance(n, Local) else _cast(n, dtype, context) for n in nodes]
    )


def local_nodes(unit: Tree) -> tuple[list[Any], Any]:
    """Return the leaves of a unit, with `Local` nodes instead of DTensors, and its structure."""
    # Under torch.func, a DTensor may be hidden in a wrapper that drops its sharding: refuse it. A vmap over the leading
    # dim of a leaf maps the value of its node only: give the node the shape and sharding without that dim.
    leaves, spec = tree.flatten(unit)
    if not _functorch.in_functorch():
        return [to_local(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec
    lost: list[str] = []
    odd: list[str] = []
    for i, (path, leaf) in enumerate(zip(tree.paths(unit), leaves, strict=True)):
        inside = _functorch.innermost(leaf.value if isinstance(leaf, Local) else leaf)
        if inside is leaf and isinstance(leaf, DTensor):
            leaves[i] = to_local(leaf)
        elif isinstance(inside, DTensor):
            lost.append(f"{path or 'the leaf'} is {typeof(inside)}")
        elif isinstance(leaf, Local):
            leaves[i] = _described(leaf)
            if leaves[i] is None:
                here = list(leaf.sharding.local_shape(leaf.shape))
                odd.append(f"{path or 'the leaf'} is {typeof(leaf)}, {here} here, but holds {list(leaf.value.shape)}")
    if lost:
        mend = "Transform the function of local nodes: fs.shard_map(torch.func.grad(f))(params)."
        raise TransformError(message("got DTensors out of a torch.func transform.", lost, mend))
    if odd:
        mend = 'Map nodes with in_dims=0, over a dim that isn\'t sharded: name it "layers" in plan_layout(names=...).'
        raise TransformError(message("got nodes whose values do not match their shardings.", odd, mend))
    return leaves, spec


def _described(node: Local) -> Local | None:
    """Drop the leading dims that vmaps have removed from a node's value; None if the rest doesn't match."""
    gone = len(node.shape) - node.value.ndim
    sharding = node.sharding
    if gone < 0 or (gone and any(_functorch.batch_dims(node.value))):
        return None
    for _ in range(gone):
        if sharding.axes(0):
            return None
        sharding = sharding.drop(0)
    shape = node.shape[gone:]
    same = sharding.local_shape(shape) == tuple(node.value.shape)
    return Local(node.value, sharding, shape, node.slices) if same else None


def _cast(x: Any, dtype: torch.dtype | None, context: GatherContext | None) -> Any:
    """Cast a floating point tensor to the compute dtype; return everything else unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.to(dtype or (context.compute_dtype(x.dtype) if context else x.dtype))


def _shards(leaves: Iterable[Any]) -> list[Local]:
    """Return the sharded leaves of a unit, each once: a tied leaf is gathered once."""
    return list({id(node.value): node for node in leaves if isinstance(node, Local)}.values())


def prefetch_unit(unit: Tree) -> None:
    """Start to gather the next unit, or several; do nothing at depth 0."""
    context = current_context()
    assert context is not None, "only a context keeps a prefetched unit until its use"
    context.prefetch(_shards(tree.leaves(next_one)) for next_one in UnitsAhead.of(unit))


def _gather_plain(nodes: Sequence[Local], dtype: torch.dtype | None, context: GatherContext | None) -> list[Tensor]:
    """Gather leaves by differentiable collectives: the same map, valid under every transform, without prefetching."""
    values = [_cast(here(node), dtype, context) for node in nodes]
    result: list[Tensor] = list(values)
    if not nodes:
        return result
    _note_plain(nodes)
    plan = plan_unit(
        tuple(
            UnitLeaf(n.sharding, n.shape, v.dtype, UnitWire(Plain(v.dtype)), None)
            for n, v in zip(nodes, values, strict=True)
        )
    )
    # `pvary` changes no value; its transpose is the sum over ranks that the gradient of a replicated leaf needs.
    for i, _ in plan.aliases:
        everywhere = unreduced(nodes[i].sharding).partial
        result[i] = collectives.pvary(values[i], everywhere, mesh=plan.mesh) if everywhere else values[i]
    for g in plan.gathers:
        bucket = g.move.bucket
        widths = [math.prod(slot.piece_shape(0)) for slot in bucket.slots]
        row = torch.cat([_padded(values[i].reshape(-1), width) for i, width in zip(g.leaves, widths, strict=True)])
        others = tuple(axis for axis in unreduced(nodes[g.leaves[0]].sharding).partial if axis not in g.move.axes)
        row = collectives.pvary(row, others, mesh=plan.mesh) if others else row
        rows = collectives.all_gather(row, g.move.axes, dim=0, mesh=plan.mesh).view(bucket.members, bucket.width)
        for i, slot, part in zip(g.leaves, bucket.slots, rows.split(widths, 1), strict=True):
            result[i] = _joined(part, slot)
    return result


def _note_plain(nodes: Sequence[Local]) -> None:
    """Note a gather for the comparison of units between ranks; rows of one stack count as the same unit."""
    order = order_here()
    if order is not None and order.comparison is not None:
        storages = [_compat.storage_id(_functorch.innermost(node.value)) for node in nodes]
        names = [order.names.get(storage, "a leaf") for storage in storages]
        unit = tuple((name, tuple(node.shape)) for name, node in zip(names, nodes, strict=True))
        order.note("gathers", unit, lambda: listed(f"{name}{list(shape)}" for name, shape in unit), site_here())


def _joined(rows: Tensor, slot: Slot) -> Tensor:
    """Return the full leaf in rows of its shards, [members, elements of the longest], by differentiable functions."""
    shapes = [slot.piece_shape(member) for member in range(len(rows))]
    if len({*shapes}) == 1:
        part = rows.reshape(len(rows), slot.sizes[0], shapes[0][slot.dim], slot.sizes[2])
        return part.movedim(0, 1).reshape(slot.shape)
    # Members follow one another along the dim, also if several axes shard it; shorter shards are padded in their rows.
    pieces = [row[: math.prod(shape)].reshape(shape) for row, shape in zip(rows.unbind(0), shapes, strict=True)]
    return torch.cat(pieces, slot.dim)


def _padded(x: Tensor, width: int) -> Tensor:
    # Not torch.cat, which drops empty inputs from the graph: a rank with an empty shard would skip the collectives of
    # backward, and the others would wait for it.
    return x if x.numel() == width else torch.nn.functional.pad(x, (0, width - x.numel()))


@public
@_compat.outside_of_graphs
def select_unit(stack: Tree, index: int) -> Tree:
    """Select one unit of a stack, row `index` of every leaf: `gather_unit(embed, next_unit=select_unit(blocks, 0))`.

    Args:
        stack: Tree of `Local` nodes, DTensors or tensors, every leaf `[layers, ...]`.
        index: Number of the unit.

    Returns:
        The tree of rows `[...]`; views.

    Raises:
        SpecError: A leaf, or its gradient, is sharded over its layers.

    Example:
        >>> fs.select_unit({"w": torch.arange(6).view(3, 2)}, 1)
        {'w': tensor([2, 3])}
    """
    nodes, spec = local_nodes(stack)
    refuse_cut_layers(tree.unflatten(spec, nodes))
    context = current_context()

    def select(leaf: Any) -> Any:
        return rows_of(leaf, [leaf.value[index]], context, first=index)[0] if isinstance(leaf, Local) else leaf[index]

    return tree.unflatten(spec, [select(node) for node in nodes])


def refuse_cut_layers(stack: Tree) -> None:
    """Check that every rank has all units of a stack, and their gradients."""
    rows: list[str] = []
    context = current_context()
    for path, leaf in tree.named_leaves(stack).items():
        sharding = typeof(leaf).sharding
        of_grad = context.grad_sharding(leaf.value) if context is not None and isinstance(leaf, Local) else None
        if sharding is not None and sharding.axes(0):
            rows.append(f"{path} is {typeof(leaf)}")
        elif of_grad is not None and of_grad.axes(0):
            rows.append(f"{path} is {typeof(leaf)}, and its gradient {typeof(replace(leaf, sharding=of_grad))}")
    if rows:
        mend = 'Name dim 0 of stacked leaves "layers" in plan_layout(names=...), and keep pp=1.'
        raise SpecError(message("needs all layers of a stack on every rank.", rows, mend))


def rows_of(node: Local, values: Sequence[Tensor], context: GatherContext | None, *, first: int = 0) -> list[Local]:
    """Return rows of a stacked leaf, starting at row `first`, as nodes that the context finds by their values."""
    index = context.index_of(node.value) if context is not None else None
    if context is not None and index is not None and index.row is None:
        for row, value in enumerate(values, first):
            context.register(value, LeafIndex(index.leaf, row))
    sharding = node.sharding.drop(0)
    shape = node.shape[1:]
    return [Local(value, sharding, shape, node.slices) for value in values]


@public
@_compat.outside_of_graphs
def scatter_grads(grads: Tree, *, like: Tree) -> Tree:
    """Sum full gradients over the data axes and shard them like the leaves of `like`: the transpose of `gather_unit`.

    Args:
        grads: Tree of plain tensors shaped like the gathered leaves of `like`; None for a leaf without a gradient.
        like: The sharded unit: a tree of DTensors or `Local` nodes.

    Returns:
        A tree like `like`, of DTensors where `like` has DTensors. Sums are computed in float32 at least, and returned
        in the dtype of the gradient or float32, whichever is wider.

    Raises:
        TransformError: Called under a torch.func transform.
        LayoutError: Gradients don't have the shapes of the gathered leaves; all of them are listed.
        TreeError: The trees don't match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> mine = torch.arange(4.0) / layout.mesh.size()  # this rank's partial gradient; ranks are summed
        >>> fs.unshard(fs.scatter_grads({"w": mine}, like=params)["w"])
        tensor([0., 1., 2., 3.])
    """
    if _functorch.in_functorch():
        text = "cannot run under a torch.func transform."
        mend = "Call it on the result of the transform. Inside, differentiate through fs.gather_unit."
        raise TransformError(message(text, mend=mend))
    leaves, spec = tree.flatten(like)
    given = tree.flatten_up_to(spec, grads, ("like", "grads"))
    nodes = [to_local(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    result: list[Any] = list(given)
    chosen = [i for i, node in enumerate(nodes) if isinstance(node, Local) and given[i] is not None]
    if odd := [i for i in chosen if not _fits(given[i], nodes[i])]:
        named = tree.paths(like)
        rows = [f"{named[i]} is {typeof(nodes[i])}, gathered {_full(nodes[i])}; got {_kind(given[i])}" for i in odd]
        mend = "Pass gradients with respect to the result of fs.gather_unit(like); None for a leaf without one."
        raise LayoutError(message("got gradients that do not have the shapes of gathered leaves.", rows, mend))
    plans = tuple(
        UnitLeaf(nodes[i].sharding, nodes[i].shape, given[i].dtype, UnitWire(Plain(given[i].dtype)),
                 GradTarget(nodes[i].sharding, wide(given[i].dtype)))
        for i in chosen
    )  # fmt: skip
    for b in plan_unit(plans).reductions if plans else ():
        members = [chosen[i] for i in b.leaves]
        reduction = b.early.open(given[members[0]].device)
        reduction.add(range(len(members)), [given[i] for i in members])
        for i, local in zip(members, reduction.start().wait(), strict=True):
            leaf = leaves[i]
            result[i] = named_sharding.like(leaf, local) if isinstance(leaf, DTensor) else replace(leaf, value=local)
    return tree.unflatten(spec, result)


def _full(node: Local) -> list[int]:
    """Return the local shape of a leaf once it is gathered over its data axes; other axes still shard it."""
    return [*whole(node.sharding).local_shape(node.shape)]


def _fits(x: Any, node: Local) -> bool:
    """Return whether something is a gradient of the gathered leaf: a plain tensor of its shape, on its device."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return False
    return x.device == node.value.device and [*x.shape] == _full(node)


def _kind(x: Any) -> str:
    if isinstance(x, DTensor):
        return f"{typeof(x)} on a mesh"
    return f"{kind_text(x)} on {x.device}" if isinstance(x, Tensor) else kind_text(x)
