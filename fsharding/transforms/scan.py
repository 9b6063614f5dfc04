"""`scan` over leading dims, and `scan_units` over the units of a model: prefetch the next unit, compute, release.

At most prefetch depth + 1 units are alive at once, in forward and backward, under every policy that frees them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import ArgumentError, TreeError, message
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
        fn: Body of the loop, called once per slice of `xs`.
        carry: Initial carry, any tree; the body returns one of the same structure.
        xs: Tree of tensors `[length, ...]`, or None.
        length: Number of iterations; required if `xs` has no leaf.

    Returns:
        The last carry, and the tree of `y`s stacked along a new first dim.

    Raises:
        TreeError: Leaves have different lengths, or neither `xs` nor `length` is given.
        ArgumentError: The body doesn't return a pair.

    Example:
        >>> total, squares = fs.scan(lambda carry, x: (carry + x, x * x), torch.tensor(0), torch.arange(4))
        >>> total, squares
        (tensor(6), tensor([0, 1, 4, 9]))
    """
    check_function("a function (carry, x)", fn, 2)
    ys: list[Tree] = []
    for x in _rows(xs, length):
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
    """Run a block over FSDP units, `carry = block(params, carry)`: gather each unit, use it and release it.

    While a unit computes, the next N are gathered, in forward and in backward; N is `value_and_grad(prefetch_depth=N)`.

    Args:
        block: `block(params, carry)`, or `block(params, carry, x)` with `xs`; params are full plain tensors.
        units: A stack (every leaf `[layers, ...]`), or a list or tuple of units, which may differ.
        carry: Initial carry, any tree; the block returns one of the same structure.
        xs: Per-layer inputs such as keys, leaves `[layers, ...]`.
        has_aux: Whether the block returns `(carry, aux)`; auxes are returned stacked.
        policy: What is kept for backward.
        next_unit: Unit that is gathered after the last one, such as the head.

    Returns:
        The last carry, or `(carry, auxes)` with `has_aux`.

    Raises:
        TreeError: Leaves have different lengths.
        SpecError: A stacked leaf, or its gradient, is sharded over its layers.
        ConfigError: `policy` isn't an `fs.policies.Policy`.
        ArgumentError: Units and carry are swapped, or the block doesn't return a pair with `has_aux`.

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
        mend = "Swap the two: fs.scan_units(block, params, x), where block(params, x) returns x."
        raise ArgumentError(message("takes a block, units, then a carry; got the units as the carry.", mend=mend))
    rows = list(units) if isinstance(units, list | tuple) else _unstacked(units)
    inputs = [(x,) for x in _rows(xs, len(rows))] if xs is not None else [()] * len(rows)
    step = _step(block, policy)
    auxes: list[Tree] = []
    depth = prefetch_depth()
    order = [*rows, *UnitsAhead.of(next_unit)]
    for i, unit in enumerate(rows):
        out = step(unit, UnitsAhead(order[i + 1 : i + 1 + depth]), carry, *inputs[i])
        carry, aux = _pair("with has_aux, block", out) if has_aux else (out, None)
        auxes.append(aux)
    return (carry, _stack(auxes)) if has_aux else carry


def _has_nodes(values: Tree) -> bool:
    return any(isinstance(x, Local) for x in tree.leaves(values))


def _step(block: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Make a function of a sharded unit, the units after it, and the block's other arguments."""
    if not _functorch.in_functorch() or policy.activations == "all":
        # The gather is outside of the remat: the context gathers again for backward by itself, ahead of the use.
        body = remat(block, policy=policy)
        return lambda unit, following, *args: body(gather_unit(unit, policy=policy, next_unit=following), *args)
    # Under torch.func there is no context, and autograd would keep what is gathered outside of the remat. Inside it,
    # backward gathers again.
    gathering = functools.wraps(block, updated=())(lambda unit, *args: block(gather_unit(unit, policy=policy), *args))
    again = remat(gathering, policy=policy)

    def run(unit: Tree, following: UnitsAhead, *args: Any) -> Any:
        nodes, spec = local_nodes(unit)
        return again(tree.unflatten(spec, nodes), *args)

    return run


@public
@_compat.outside_of_graphs
def stack_units(units: Sequence[Tree]) -> Tree:
    """Stack equal units: leaves `[...]` become `[layers, ...]`. Not for lazy tensors: create those with that dim.

    Args:
        units: Trees of tensors, equal in structure, shapes and dtypes.

    Returns:
        The tree of stacked leaves.

    Raises:
        TreeError: The units differ in structure, shape or dtype; every such leaf is listed.

    Example:
        >>> fs.stack_units([{"b": torch.zeros(2)}, {"b": torch.ones(2)}])
        {'b': tensor([[0., 0.],
                [1., 1.]])}
    """
    if not units:
        raise TreeError(message("got no units.", mend="Pass a list of at least one."))
    first = tree.named_leaves(units[0])
    rows: list[str] = []
    for i, unit in enumerate(units[1:], 1):
        tree.match(units[0], unit, ("unit 0", f"unit {i}"))
        for path, leaf in tree.named_leaves(unit).items():
            if (leaf.shape, leaf.dtype) != (first[path].shape, first[path].dtype):
                a, b = ((tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in (first[path], leaf))
                rows.append(f"{path}: {a[1]}{list(a[0])} in unit 0, {b[1]}{list(b[0])} in unit {i}")
    if rows:
        mend = "Pass units that differ to fs.scan_units as a list."
        raise TreeError(message("needs units with equal shapes and dtypes.", rows, mend))
    return _stack(units)


@public
@_compat.outside_of_graphs
def unstack_units(stack: Tree) -> list[Tree]:
    """Split a stack into its units, in order; leaves are views.

    Args:
        stack: Tree of tensors or nodes, every leaf `[layers, ...]`.

    Returns:
        A list of trees with leaves `[...]`.

    Raises:
        TreeError: The leaves have different first dims.
        SpecError: A leaf, or its gradient, is sharded over its layers.

    Example:
        >>> fs.unstack_units({"b": torch.tensor([[0, 0], [1, 1]])})
        [{'b': tensor([0, 0])}, {'b': tensor([1, 1])}]
    """
    return _unstacked(stack)


def _unstacked(stack: Tree) -> list[Tree]:
    nodes, spec = local_nodes(stack)
    values: list[Tensor] = [node.value if isinstance(node, Local) else node for node in nodes]
    lengths = {path: x.shape[0] if x.ndim else None for path, x in zip(tree.paths(stack), values, strict=True)}
    if len(set(lengths.values())) > 1 or None in lengths.values():
        rows = [f"{path}: {'0-d' if n is None else n}" for path, n in lengths.items()]
        mend = (
            "Pass units that differ as a list, and keep shared leaves out of the stack. A single unit needs no scan:"
            " x = block(fs.gather_unit(unit), x)."
        )
        raise TreeError(message("needs leaves [layers, ...] of one length.", rows, mend))
    refuse_cut_layers(tree.unflatten(spec, nodes))
    context = current_context()
    rows = [x.unbind(0) for x in values]
    columns = [rows_of(x, r, context) if isinstance(x, Local) else r for x, r in zip(nodes, rows, strict=True)]
    return [tree.unflatten(spec, row) for row in zip(*columns, strict=True)]


def _pair(what: str, out: Any) -> tuple[Any, Any]:
    """Return the carry and the second result of a body; refuse anything but a pair."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        returned = f"{type(out).__name__} of {len(out)}" if isinstance(out, tuple | list) else kind_of(out)
        text = f"needs a pair from its body: {what} returned {returned}."
        raise ArgumentError(message(text, mend="Return (carry, y); y may be None."))
    return out[0], out[1]


def _rows(xs: Tree, length: int | None) -> Iterator[Tree]:
    leaves, spec = tree.flatten(xs)
    scalars = [f"{path}: 0-d" for path, x in zip(tree.paths(xs), leaves, strict=True) if x.ndim == 0]
    if scalars:
        raise TreeError(message("needs xs with a first dim.", scalars, "Close over values that all layers share."))
    lengths = {path: int(x.shape[0]) for path, x in zip(tree.paths(xs), leaves, strict=True)}
    if length is None and not lengths:
        raise TreeError(message("got neither xs nor length.", mend="Pass length= to scan without xs."))
    count = length if length is not None else next(iter(lengths.values()))
    if wrong := [f"{path}: {n}" for path, n in lengths.items() if n != count]:
        mend = "Pass leaves [length, ...], one row for each iteration or layer."
        raise TreeError(message(f"needs leaves of length {count}.", wrong, mend))
    return (tree.unflatten(spec, [leaf[i] for leaf in leaves]) for i in range(count))


def _stack(ys: Sequence[Tree]) -> Tree:
    return tree.map(lambda *leaves: torch.stack(cast(Any, leaves)), *ys) if ys else None
