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
from fsharding.errors import TreeError, message
from fsharding.precision import wide
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
    "local_where",
    "masked",
    "multi_transform",
    "new_zeros",
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
            in fewer passes over memory, for those that can; the results may differ in the last bit.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[Tree, Tree]] | None = None


class EmptyState(NamedTuple):
    """The state of a transformation without any."""


class ChainState(NamedTuple):
    """The states of a chain, in order."""

    states: tuple[Tree, ...]


class MaskedState(NamedTuple):
    """The state of each group, by label."""

    groups: dict[str, Tree]


@functools.lru_cache(maxsize=256)
def _keywords(update: Callable[..., Any]) -> tuple[bool, bool]:
    parameters = inspect.signature(update).parameters.values()
    names = {p.name for p in parameters}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return "donate" in names or anything, "norm" in names or anything


def run_update(
    transformation: GradientTransformation,
    updates: Tree,
    state: Tree,
    params: Tree,
    *,
    donate: bool = False,
    norm: Tensor | None = None,
) -> tuple[Tree, Tree]:
    """Calls `update` with the keywords that it takes."""
    return call(transformation.update, updates, state, params, donate=donate, norm=norm)


def call(function: Callable[..., Any], *args: Any, donate: bool, norm: Tensor | None) -> Any:
    """Calls a function of a transformation with those of the two keywords that it takes."""
    takes_donate, takes_norm = _keywords(function)
    keywords: dict[str, Any] = {}
    if takes_donate:
        keywords["donate"] = donate
    if takes_norm:
        keywords["norm"] = norm
    return function(*args, **keywords)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies transformations one after the other; the first gets the gradients."""

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
    before, last = chain(*transformations[:-1]), transformations[-1].apply

    def apply(
        updates: Tree, state: ChainState, params: Tree, *, donate: bool = False, norm: Tensor | None = None
    ) -> tuple[Tree, ChainState]:
        first = ChainState(state.states[:-1])
        updates, first = run_update(before, updates, first, params, donate=donate, norm=norm)
        norm = norm if len(transformations) == 1 else None
        params, inner = call(last, updates, state.states[-1], params, donate=donate, norm=norm)
        return params, ChainState((*first.states, inner))

    return GradientTransformation(init, update, apply)


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
        TreeError: at `init`: a label without a transformation; every such leaf is listed.
    """

    def split(values: Tree, labelled: Tree) -> dict[str, Tree]:
        return {g: tree.map(lambda x, label: x if label == g else None, values, labelled) for g in groups}  # noqa: B023

    def label(params: Tree) -> Tree:
        return tree.map_with_path(labels, params) if callable(labels) else tree.prune(labels, params)

    def init(params: Tree) -> MaskedState:
        labelled = label(params)
        rows: list[str] = []
        tree.map_with_path(lambda p, _, g: rows.append(f"{p}: {g!r}") if g not in groups else None, params, labelled)
        if rows:
            known = f"Labels are {', '.join(map(repr, groups))}."
            raise TreeError(message("fs.masked", "has labels without a transformation.", rows, known))
        parts = split(params, labelled)
        return MaskedState({g: t.init(parts[g]) for g, t in groups.items()})

    def update(
        updates: Tree, state: MaskedState, params: Tree = None, *, donate: bool = False
    ) -> tuple[Tree, MaskedState]:
        params = tree.prune(params, updates) if params is not None else None
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

    def apply(updates: Tree, state: MaskedState, params: Tree, *, donate: bool = False) -> tuple[Tree, MaskedState]:
        labelled = label(tree.prune(params, updates))
        parts, params_of = split(updates, labelled), split(tree.prune(params, updates), labelled)
        done = {
            g: call(t.apply, parts[g], state.groups[g], params_of[g], donate=donate, norm=None)
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


def local_where(values: Tree, where: Tree) -> list[Tensor]:
    """The local tensors of the leaves that another tree has, cut as they are there."""
    return local_leaves(redistribute(tree.prune(values, where), shardings_of(where)))


def add_decay_(updates: Sequence[Tensor], params: Tree, where: Tree, factor: float) -> None:
    """Adds a multiple of the parameters to updates, which are the local tensors of another tree."""
    main = [p.to(u.dtype) for p, u in zip(local_where(params, where), updates, strict=True)]
    _compat.foreach_add_(updates, _compat.foreach_mul(main, factor))
