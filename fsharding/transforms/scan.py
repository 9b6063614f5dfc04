"""`scan` over leading dims, and `scan_units` over the units of a model: prefetch the next unit, compute, release.

As in `lax.scan`, the carry is any pytree, with per-layer inputs `xs` and per-layer outputs `ys`. Guarantee: at most
prefetch depth + 1 units are alive at once, in forward and backward, under every policy that frees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import ArgumentError, TreeError, message, report
from fsharding.base.public import check_function, kind_of, public
from fsharding.base.tree import Tree
from fsharding.sharding.named_sharding import Local
from fsharding.transforms import policies
from fsharding.transforms.gather_context import current_context, prefetch_depth
from fsharding.transforms.gather_unit import UnitsAhead, gather_unit, local_nodes, refuse_cut_layers, rows_of
from fsharding.transforms.policies import Policy, check_policy
from fsharding.transforms.remat import remat

__all__ = ["scan", "scan_units", "stack_units", "unstack_units"]


@public
@_compat.outside_of_graphs
def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]], carry: Tree, xs: Tree, *, length: int | None = None
) -> tuple[Tree, Tree]:
    """Run `carry, y = fn(carry, x)` along the first dim of every leaf of `xs`: `lax.scan` as a Python loop.

    Args:
        fn: the body of the loop, called once per slice of `xs`.
        carry: any tree; the body returns one of the same structure.
        xs: tree of tensors `[length, ...]`, or None.
        length: needed when `xs` has no leaf.

    Returns:
        The last carry, and the stacked `y`s.

    Raises:
        TreeError: leaves of different lengths, or no length at all.
        ArgumentError: the body does not return a pair.

    Example:
        >>> total, squares = fs.scan(lambda carry, x: (carry + x, x * x), torch.tensor(0), torch.arange(4))
        >>> total, squares
        (tensor(6), tensor([0, 1, 4, 9]))
    """
    check_function("a function (carry, x)", fn, 2)
    rows = _rows(xs, length)
    ys: list[Tree] = []
    for x in rows:
        carry, y = _pair("fn", fn(carry, x))
        ys.append(y)
    return carry, _stack(ys)


@public
@_compat.outside_of_graphs
def scan_units(
    block: Callable[..., Any],
    units: Tree,
    carry: Tree,
    *,
    xs: Tree = None,
    has_aux: bool = False,
    policy: Policy = policies.save_except_gathered,
    next_unit: Tree = None,
) -> Any:
    """Run a block over FSDP units: `carry = block(params, carry)`. Each unit is gathered, used and released.

    While a unit computes, the next is gathered, in forward and in backward; the next N with
    `value_and_grad(prefetch_depth=N)`.

    Args:
        block: `block(params, carry)`, or `block(params, carry, x)` when there are `xs`; params are full plain tensors.
        units: a stack (every leaf `[layers, ...]`), or a list or tuple of units that may differ.
        carry: any tree; the body returns one of the same structure.
        xs: per-layer inputs, leaves `[layers, ...]`, such as keys.
        has_aux: the block returns `(carry, aux)`; auxes are returned stacked.
        policy: what is kept for backward.
        next_unit: the unit that is gathered after the last one, such as the head.

    Returns:
        The last carry, or `(carry, auxes)` with `has_aux`.

    Raises:
        TreeError: leaves of different lengths.
        ConfigError: `policy` isn't an `fs.policies.Policy`.
        ArgumentError: with `has_aux`, the block does not return a pair.

    Example:
        >>> stack = {"w": torch.eye(4).repeat(3, 1, 1)}
        >>> layout = fs.plan_layout(stack, fs.make_mesh(dp=-1, device="cpu"), names={"w": ("layers", None, None)})
        >>> def loss(params, x):
        ...     return fs.scan_units(lambda p, x: x @ p["w"], params, x).sum()
        >>> float(fs.value_and_grad(loss)(fs.shard(stack, layout), torch.ones(2, 4))[0])
        8.0
    """
    check_function("a function (params, carry)", block, 2)
    check_policy(policy)
    if not _has_nodes(units) and _has_nodes(carry):
        mend = "Swap the two: fs.scan_units(block, params, x), with a block (params, x) that returns x."
        raise ArgumentError(message("takes a block, units, then a carry; got the units as the carry.", mend=mend))
    rows = list(units) if isinstance(units, list | tuple) else _unstacked(units)
    inputs = [(x,) for x in _rows(xs, len(rows))] if xs is not None else [()] * len(rows)
    step = _step(block, policy)
    auxes: list[Tree] = []
    depth = prefetch_depth()
    order = UnitsAhead([*rows, *UnitsAhead.of(next_unit)])
    for i, unit in enumerate(rows):
        following = UnitsAhead(order[i + 1 : i + 1 + depth])
        out = step(unit, following, carry, *inputs[i])
        carry, aux = _pair("with has_aux, block", out) if has_aux else (out, None)
        auxes.append(aux)
    return (carry, _stack(auxes)) if has_aux else carry


def _has_nodes(values: Tree) -> bool:
    return any(isinstance(x, Local) for x in tree.leaves(values))


def _step(block: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A block of a sharded unit, of the unit after it, and of what the block takes."""
    if not _functorch.in_functorch() or policy.activations == "all":
        body = remat(block, policy=policy)
        return lambda unit, following, *args: body(gather_unit(unit, policy=policy, next_unit=following), *args)
    # Without a context, autograd keeps what is gathered outside of the remat; inside, backward gathers it again.
    gathering = functools.wraps(block, updated=())(lambda unit, *args: block(gather_unit(unit, policy=policy), *args))
    again = remat(gathering, policy=policy)
    return lambda unit, following, *args: again(_as_local(unit), *args)


def _as_local(unit: Tree) -> Tree:
    nodes, spec = local_nodes(unit)
    return tree.unflatten(spec, nodes)


@public
@_compat.outside_of_graphs
def stack_units(units: Sequence[Tree]) -> Tree:
    """Stack equal units: leaves `[...]` become `[layers, ...]`. Create lazy tensors with that dim instead.

    Raises:
        TreeError: the units differ in structure, shape or dtype; every leaf that does is listed.

    Example:
        >>> fs.stack_units([{"b": torch.zeros(2)}, {"b": torch.ones(2)}])
        {'b': tensor([[0., 0.],
                [1., 1.]])}
    """
    if not units:
        raise TreeError(message("got no units.", mend="Stack at least one."))
    first = tree.named_leaves(units[0])
    rows: list[str] = []
    for i, unit in enumerate(units[1:], 1):
        tree.match(units[0], unit, ("unit 0", f"unit {i}"))
        for path, leaf in tree.named_leaves(unit).items():
            if (leaf.shape, leaf.dtype) != (first[path].shape, first[path].dtype):
                a, b = ((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in (first[path], leaf))
                rows.append(f"{path}: {a[1]}{list(a[0])} in unit 0, {b[1]}{list(b[0])} in unit {i}")
    if rows:
        mend = "Pass unlike units to scan_units as a list."
        raise TreeError(message("needs units that are alike.", rows, mend))
    return tree.map(lambda *leaves: torch.stack(leaves), *units)


@public
@_compat.outside_of_graphs
def unstack_units(stack: Tree) -> list[Tree]:
    """The units of a stack, in order; leaves are views.

    Raises:
        TreeError: the leaves have different first dims.
        SpecError: the layers are cut over an axis, so that no rank has all units.

    Example:
        >>> fs.unstack_units({"b": torch.tensor([[0, 0], [1, 1]])})
        [{'b': tensor([0, 0])}, {'b': tensor([1, 1])}]
    """
    return _unstacked(stack)


def _unstacked(stack: Tree) -> list[Tree]:
    nodes, spec = local_nodes(stack)
    lengths = {path: _length(node) for path, node in zip(tree.paths(stack), nodes, strict=True)}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        rows = [f"{path}: {'0-d' if n is None else n}" for path, n in lengths.items()]
        mend = (
            "Pass unlike units as a list, and shared leaves apart from the stack. One unit alone needs no scan:"
            " x = block(fs.gather_unit(unit), x)."
        )
        raise TreeError(report("fs.scan_units needs leaves [layers, ...] of one length.", rows, mend))
    refuse_cut_layers(tree.unflatten(spec, nodes))
    context = current_context()
    columns: list[Sequence[Any]] = []
    for node in nodes:
        if isinstance(node, Local):
            columns.append(rows_of(node, node.value.unbind(0), context))
        else:
            columns.append(node.unbind(0))
    return [tree.unflatten(spec, row) for row in zip(*columns, strict=True)]


def _pair(what: str, out: Any) -> tuple[Any, Any]:
    """The carry and the rest that a body returned."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        returned = f"{type(out).__name__} of {len(out)}" if isinstance(out, tuple | list) else kind_of(out)
        text = f"needs a pair from its body: {what} returned {returned}."
        raise ArgumentError(message(text, mend="Return (carry, y); y may be None."))
    return out[0], out[1]


def _length(node: Any) -> int | None:
    value: Tensor = node.value if isinstance(node, Local) else node
    return value.shape[0] if value.ndim else None


def _rows(xs: Tree, length: int | None) -> Iterator[Tree]:
    leaves, spec = tree.flatten(xs)
    scalars = [f"{path}: 0-d" for path, x in zip(tree.paths(xs), leaves, strict=True) if x.ndim == 0]
    if scalars:
        raise TreeError(message("needs xs with a first dim.", scalars, "Close over what all layers share."))
    lengths = {path: int(x.shape[0]) for path, x in zip(tree.paths(xs), leaves, strict=True)}
    if length is None and not lengths:
        raise TreeError(message("got neither xs nor length.", mend="Pass length= to scan without xs."))
    count = length if length is not None else next(iter(lengths.values()))
    wrong = [f"{path}: {n}" for path, n in lengths.items() if n != count]
    if wrong:
        raise TreeError(message(f"needs leaves of length {count}.", wrong))
    return (tree.unflatten(spec, [leaf[i] for leaf in leaves]) for i in range(count))


def _stack(ys: list[Tree]) -> Tree:
    return tree.map(lambda *leaves: torch.stack(cast(Any, leaves)), *ys) if ys else None
