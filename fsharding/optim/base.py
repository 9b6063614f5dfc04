"""`GradientTransformation`: `init(params) -> state`, `update(updates, state, params) -> (updates, state)`, both pure.

In: trees of DTensors (or plain tensors); None marks a frozen leaf. Out: trees in the sharding of the optimizer state.
The same pair of functions as in optax (DeepMind 2020), so a pair that a user writes composes with ours.
Law: a transformation computes on local tensors alone, so its result does not depend on where a leaf is cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import _compat, sharding, tree
from fsharding.arguments import check_optimizer
from fsharding.errors import TreeError, listed, message
from fsharding.precision import wide
from fsharding.public import public
from fsharding.redistribute import redistribute
from fsharding.sharding import local_of, sharding_of
from fsharding.tree import Tree

__all__ = [
    "ChainState",
    "EmptyState",
    "GradientTransformation",
    "MaskedState",
    "add_decay_",
    "call",
    "chain",
    "clone",
    "like",
    "like_leaf",
    "local_leaves",
    "grads_where",
    "local_where",
    "masked",
    "multiply",
    "multi_transform",
    "new_zeros",
    "refuse_unlike",
    "run_update",
    "shardings_of",
    "zeros",
]


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params) -> (updates, state)`. It may take two keywords more: `donate=True`
            allows it to overwrite updates and state, and `norm` is the global norm of the gradients where it is known.
        apply: `apply(updates, state, params) -> (params, state)`, with the same keywords: `update` and `apply_updates`
            in fewer passes over memory, for those that can; the results may differ in the last bit. It may take a
            keyword more: `scale`, by which the updates that it is given are still to be multiplied.
        factor: for one that has no state and only multiplies by a number: that number for a global norm.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[Tree, Tree]] | None = None
    factor: Callable[[Tensor], float] | None = None


class EmptyState(NamedTuple):
    """The state of a transformation without any."""


class ChainState(NamedTuple):
    """The states of a chain, in order."""

    states: tuple[Tree, ...]


class MaskedState(NamedTuple):
    """The state of each group, by label."""

    groups: dict[str, Tree]


_MASKED = ("fs.masked", ("parameters", "gradients"))


@functools.lru_cache(maxsize=256)
def _keywords(update: Callable[..., Any]) -> tuple[bool, bool, bool]:
    parameters = inspect.signature(update).parameters.values()
    names = {p.name for p in parameters}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # Who takes anything may well drop what it does not know, which for a scale would be wrong.
    return "donate" in names or anything, "norm" in names or anything, "scale" in names


def run_update(
    transformation: GradientTransformation,
    updates: Tree,
    state: Tree,
    params: Tree,
    *,
    donate: bool = False,
    norm: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tree, Tree]:
    """Calls `update` with the keywords that it takes."""
    return call(transformation.update, updates, state, params, donate=donate, norm=norm, scale=scale)


def call(
    function: Callable[..., tuple[Tree, Tree]],
    updates: Tree,
    *args: Any,
    donate: bool,
    norm: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tree, Tree]:
    """Calls a function of a transformation with those of the keywords that it takes; scales for one that does not."""
    takes_donate, takes_norm, takes_scale = _keywords(function)
    keywords: dict[str, Any] = {}
    if takes_donate:
        keywords["donate"] = donate
    if takes_norm:
        keywords["norm"] = norm
    if takes_scale:
        keywords["scale"] = scale
    elif scale != 1.0:
        updates = multiply(updates, scale, donate=donate)
    return function(updates, *args, **keywords)


def multiply(values: Tree, factor: float, *, donate: bool = False) -> Tree:
    """All leaves times a number, in place if they are donated."""
    local = local_leaves(values)
    if donate:
        _compat.foreach_mul_(local, factor)
        return values
    return like(values, _compat.foreach_mul(local, factor))


@public("fs.chain")
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies transformations one after the other; the first gets the gradients.

    Raises:
        ArgumentError: one of them is no pair of functions.
    """
    for transformation in transformations:
        check_optimizer("fs.chain", transformation)

    def init(params: Tree) -> ChainState:
        return ChainState(tuple(t.init(params) for t in transformations))

    def update(
        updates: Tree, state: ChainState, params: Tree = None, *, donate: bool = False, norm: Tensor | None = None
    ) -> tuple[Tree, ChainState]:
        states: list[Tree] = []
        for t, inner in zip(transformations, state.states, strict=True):
            updates, inner = run_update(t, updates, inner, params, donate=donate, norm=norm)
            states.append(inner)
            norm = None
        return updates, ChainState(tuple(states))

    if not transformations or transformations[-1].apply is None:
        return GradientTransformation(init, update)
    last = transformations[-1].apply

    def apply(
        updates: Tree,
        state: ChainState,
        params: Tree,
        *,
        donate: bool = False,
        norm: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tree, ChainState]:
        states: list[Tree] = []
        for t, inner in zip(transformations[:-1], state.states[:-1], strict=True):
            if t.factor is not None and norm is not None:
                scale *= t.factor(norm)
            else:
                updates, inner = run_update(t, updates, inner, params, donate=donate, norm=norm, scale=scale)
                scale = 1.0
            states.append(inner)
            norm = None
        params, inner = call(last, updates, state.states[-1], params, donate=donate, norm=norm, scale=scale)
        return params, ChainState((*states, inner))

    return GradientTransformation(init, update, apply)


@public("fs.masked")
def masked(
    groups: Mapping[str, GradientTransformation], labels: Tree | Callable[[str, Any], str]
) -> GradientTransformation:
    """Gives every group of leaves a transformation of its own: other rates or optimizers, no weight decay for norms.

    optax calls this `multi_transform`; its own `masked`, one transformation for some leaves and none for the others, is
    the case with a group of `chain()`, which does nothing. For a group, leaves of the others are None.

    Args:
        groups: transformation by label.
        labels: tree of labels like the parameters, or a function of (path, leaf).

    Raises:
        ArgumentError: a group has no pair of functions.
        TreeError: at `init`: a label without a transformation; every such leaf is listed.
    """
    for transformation in groups.values():
        check_optimizer("fs.masked", transformation)

    def split(values: Tree, labelled: Tree) -> dict[str, Tree]:
        return {g: tree.map(lambda x, label: x if label == g else None, values, labelled) for g in groups}  # noqa: B023

    def label(params: Tree) -> Tree:
        return (
            tree.map_with_path(labels, params)
            if callable(labels)
            else tree.prune(labels, params, "fs.masked", ("labels", "parameters"))
        )

    def init(params: Tree) -> MaskedState:
        labelled = label(params)
        rows: list[str] = []
        tree.map_with_path(lambda p, _, g: rows.append(f"{p}: {g!r}") if g not in groups else None, params, labelled)
        if rows:
            known = f"Labels are {listed(map(repr, groups))}."
            raise TreeError(message("fs.masked", "has labels without a transformation.", rows, known))
        parts = split(params, labelled)
        return MaskedState({g: t.init(parts[g]) for g, t in groups.items()})

    def update(
        updates: Tree, state: MaskedState, params: Tree = None, *, donate: bool = False
    ) -> tuple[Tree, MaskedState]:
        params = tree.prune(params, updates, *_MASKED) if params is not None else None
        labelled = label(params if params is not None else updates)
        parts, params_of = split(updates, labelled), split(params, labelled) if params is not None else {}
        done = {g: run_update(t, parts[g], state.groups[g], params_of.get(g), donate=donate) for g, t in groups.items()}
        return merge(updates, labelled, done)

    def merge(values: Tree, labelled: Tree, done: dict[str, tuple[Tree, Tree]]) -> tuple[Tree, MaskedState]:
        by_group = {g: tree.named_leaves(result) for g, (result, _) in done.items()}
        chosen = tree.named_leaves(labelled)
        merged = tree.map_with_path(lambda path, x: by_group[chosen[path]][path] if path in chosen else x, values)
        return merged, MaskedState({g: inner for g, (_, inner) in done.items()})

    if any(t.apply is None for t in groups.values()):
        return GradientTransformation(init, update)

    def apply(
        updates: Tree, state: MaskedState, params: Tree, *, donate: bool = False, scale: float = 1.0
    ) -> tuple[Tree, MaskedState]:
        pruned = tree.prune(params, updates, *_MASKED)
        labelled = label(pruned)
        parts, params_of = split(updates, labelled), split(pruned, labelled)
        done = {
            g: call(t.apply, parts[g], state.groups[g], params_of[g], donate=donate, norm=None, scale=scale)
            for g, t in groups.items()
            if t.apply is not None
        }
        return merge(params, labelled, done)

    return GradientTransformation(init, update, apply)


multi_transform = masked
"""The name that optax has for `masked`."""


def local_leaves(values: Tree) -> list[Tensor]:
    """The local tensors of a tree, in order."""
    return [local_of(x) for x in tree.leaves(values)]


def like(values: Tree, local: Sequence[Tensor]) -> Tree:
    """A tree sharded as `values`, made of other local tensors."""
    leaves, spec = tree.flatten(values)
    return tree.unflatten(spec, [like_leaf(x, new) for x, new in zip(leaves, local, strict=True)])


def in_place(*trees: Tree) -> list[list[Tensor]] | None:
    """The local tensors themselves of trees that a kernel can change as they stand, in order; a glance at each leaf.

    None where it does not see that they have one structure, and leaves of one shape and dtype, cut alike: DTensors with
    specs of their own, say.
    """
    first, spec = tree.flatten(trees[0])
    columns = [first]
    for other in trees[1:]:
        leaves, structure = tree.flatten(other)
        if structure != spec or not _compat.same_kind(first, leaves):
            return None
        columns.append(leaves)
    local = [[_compat.local_tensor(x) if isinstance(x, DTensor) else x for x in column] for column in columns]
    return None if any(x.requires_grad for column in local for x in column) else local


def like_leaf(x: Tensor, local: Tensor) -> Tensor:
    """Another local tensor in the place of a leaf's: a DTensor where the leaf is one."""
    return sharding.like(x, local) if isinstance(x, DTensor) else local


def zeros(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros for every parameter, cut as it is; float32 at least by default."""
    return like(params, [new_zeros(x, dtype or wide(x.dtype)) for x in local_leaves(params)])


def new_zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of the shape of a local tensor, contiguous whatever its strides are: kernels write through flat views."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device)


def clone(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def shardings_of(values: Tree) -> Tree:
    """The sharding of each DTensor; None for plain tensors."""
    return tree.map(lambda x: sharding_of(x) if isinstance(x, DTensor) else None, values)


def grads_where(function: str, grads: Tree, where: Tree) -> list[Tensor]:
    """The local tensors of gradients, cut as the moments are.

    Args:
        function: the public function, for the error.
        grads: tree of gradients.
        where: tree of moments.

    Raises:
        TreeError: the two differ in paths or shapes; all such leaves are listed.
    """
    refuse_unlike(function, grads, where, ("gradients", "moments"))
    return local_leaves(redistribute(grads, shardings_of(where)))


def local_where(function: str, params: Tree, where: Tree) -> list[Tensor]:
    """The local tensors of those parameters that another tree has, cut as they are there.

    Args:
        function: the public function, for the error.
        params: tree of parameters.
        where: tree of moments or updates.

    Raises:
        TreeError: the two differ in paths or shapes; all such leaves are listed.
    """
    labels = ("parameters", "moments")
    pruned = tree.prune(params, where, function, labels)
    refuse_unlike(function, pruned, where, labels)
    return local_leaves(redistribute(pruned, shardings_of(where)))


def refuse_unlike(function: str, first: Tree, second: Tree, labels: tuple[str, str]) -> None:
    """Checks that two trees have the same paths and shapes: kernels would broadcast, or fill a part.

    Args:
        function: the public function, for the error.
        first: tree of tensors.
        second: another one.
        labels: what the two are, for the error.

    Raises:
        TreeError: they differ; all such leaves are listed.
    """
    flat, spec = tree.flatten(first)
    others = tree.flatten_up_to(spec, second, function, labels)
    if all(isinstance(y, Tensor) and x.shape == y.shape for x, y in zip(flat, others, strict=True)):
        return
    rows = [
        f"{path}: {labels[0]} {list(x.shape)}, {labels[1]} {list(getattr(y, 'shape', ()))}"
        for path, x, y in zip(tree.paths(first), flat, others, strict=True)
        if not isinstance(y, Tensor) or x.shape != y.shape
    ]
    text = f"got {labels[0]} and {labels[1]} of different shapes."
    raise TreeError(message(function, text, rows, f"Give {labels[0]} and {labels[1]} of one model."))


def add_decay_(function: str, updates: Sequence[Tensor], params: Tree, where: Tree, factor: float) -> None:
    """Adds a multiple of the parameters to updates, which are the local tensors of another tree."""
    main = [p.to(u.dtype) for p, u in zip(local_where(function, params, where), updates, strict=True)]
    _compat.foreach_add_(updates, _compat.foreach_mul(main, factor))
