"""`chain`: transformations in sequence; `multi_transform`: a different transformation for each group of leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import TreeError, listed, message
from fsharding.base.public import check_optimizer, public
from fsharding.base.tree import Tree
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, GradientTransformation, InitContext, UpdateContext
from fsharding.optim.stacked import of_one_layer

__all__ = ["ChainState", "MultiTransformState", "chain", "multi_transform"]

_LABELS = ("parameters", "gradients")


class ChainState(NamedTuple):
    """The states of a chain, in order.

    Example:
        >>> opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.sgd(0.1, momentum=0.9))
        >>> clip_state, sgd_state = opt.init({"w": torch.ones(2)}).states
        >>> sgd_state.trace
        {'w': tensor([0., 0.])}
    """

    states: tuple[Tree, ...]


class MultiTransformState(NamedTuple):
    """The state of each group, by label.

    Example:
        >>> opt = fs.optim.multi_transform({"fast": fs.sgd(0.1), "slow": fs.sgd(0.01)}, {"w": "fast", "b": "slow"})
        >>> sorted(opt.init({"w": torch.ones(2), "b": torch.ones(1)}).groups)
        ['fast', 'slow']
    """

    groups: dict[str, Tree]


@public
def chain(*transformations: GradientTransformation) -> ContextTransformation:
    """Apply transformations in sequence, as `optax.chain`: the first gets the gradients, the next its updates.

    Args:
        *transformations: Transformations; without any, updates are returned unchanged.

    Returns:
        A `ContextTransformation`; its state is a `ChainState`.

    Raises:
        ArgumentError: An argument isn't a transformation.
        TreeError: From the update: the state belongs to a different chain.

    Example:
        >>> opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.sgd(1.0))
        >>> params = {"w": torch.zeros(2)}
        >>> updates, _ = opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init(params), params)
        >>> updates["w"]
        tensor([-0.6000, -0.8000])
    """
    for t in transformations:
        check_optimizer(t)
    members = tuple(t.with_context() for t in transformations)
    applies = bool(members) and members[-1].apply is not None

    def first(params: Tree, context: InitContext) -> ChainState:
        return ChainState(tuple(t.init(params, context) for t in members))

    def change(
        updates: Tree, state: ChainState, params: Tree, context: UpdateContext, scale: float | Tensor | None = None
    ) -> tuple[Tree, ChainState]:
        base.check_state(ChainState, updates, state)
        if len(state.states) != len(members):
            text = f"got a state of {len(state.states)} transformations, but has {len(members)}."
            raise TreeError(message(text, mend="Pass the state that this chain's init or update returned."))
        states: list[Tree] = []
        # Only the last member masks. The others may not overwrite state that `where_finite` may have to restore.
        donate = context.donate and context.finite is None
        before_last = members if scale is None else members[:-1]
        for t, inner in zip(before_last, state.states, strict=False):
            if scale is not None and t.factor is not None and context.norm is not None:
                # The last member multiplies anyway, in the same pass. In float64, as a Python float would be.
                scale = t.factor(context.norm).double() * scale
            else:
                updates = base.multiply(updates, 1.0 if scale is None else scale, donate=context.donate)
                updates, new = t.update(updates, inner, params, replace(context, donate=donate))
                inner = base.where_finite(context.finite, new, inner)
                scale = None if scale is None else 1.0
            states.append(inner)
            context = replace(context, norm=None)
        if scale is None:
            return updates, ChainState(tuple(states))
        assert members[-1].apply is not None
        params, inner = members[-1].apply(updates, state.states[-1], params, context, scale=scale)
        return params, ChainState((*states, inner))

    # Only the first member gets the norm; for later ones it has changed.
    by_element = all(t.by_element and not (t.needs_norm and i) for i, t in enumerate(members))
    needs_norm = any(t.needs_norm for t in members)
    facts = {"masks": applies and members[-1].masks, "by_element": by_element, "needs_norm": needs_norm}
    return base.transformation(first, change, applies=applies, **facts)


@public
def multi_transform(
    groups: Mapping[str, GradientTransformation], labels: Tree | Callable[[str, Any], str]
) -> ContextTransformation:
    """Apply a different transformation to each group of leaves, as `optax.multi_transform`.

    A member sees None for the leaves of other groups. For `optax.masked`, give the other leaves `chain()`, the
    identity.

    Args:
        groups: Transformations by label.
        labels: Tree of labels like the parameters, or a function `(path, leaf) -> label`, such as `fs.optim.no_decay`;
            if a leaf stacks layers, the function gets the leaf of one layer, without values.

    Returns:
        A `ContextTransformation`; its state is a `MultiTransformState`.

    Raises:
        ArgumentError: A group isn't a transformation.
        TreeError: Labels have no transformation, or groups no leaf; all are listed. Or a state has different groups.

    Example:
        >>> groups = {"train": fs.sgd(0.1), "none": fs.optim.chain()}
        >>> opt = fs.optim.multi_transform(groups, lambda path, x: "none" if path == "b" else "train")
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> opt.update(params, opt.init(params), params)[0]
        {'w': tensor([-0.1000]), 'b': tensor([1.])}
    """
    for t in groups.values():
        check_optimizer(t)
    members = {label: t.with_context() for label, t in groups.items()}

    def first(params: Tree, context: InitContext) -> MultiTransformState:
        labeled = _labeled(labels, params, context, groups)
        labeled.check(params)
        params_of = labeled.split(params)
        shardings, whole = (labeled.split(_pruned(x, params)) for x in (context.shardings, context.whole))
        contexts = {g: replace(context, shardings=shardings[g], whole=whole[g]) for g in members}
        return MultiTransformState({g: t.init(params_of[g], contexts[g]) for g, t in members.items()})

    def change(
        updates: Tree, state: MultiTransformState, params: Tree, context: UpdateContext, scale: Any = None
    ) -> tuple[Tree, MultiTransformState]:
        base.check_state(MultiTransformState, updates, state)
        if state.groups.keys() != groups.keys():
            text = f"got a state of the groups {', '.join(state.groups)}, but has {', '.join(groups)}."
            raise TreeError(message(text, mend="Pass the state that this optimizer's init or update returned."))
        pruned = _pruned(params, updates)
        labeled = _labeled(labels, updates if pruned is None else pruned, context, groups)
        updates_of, params_of = labeled.split(updates), labeled.split(pruned)
        shardings = labeled.split(_pruned(context.shardings, updates))
        results: dict[str, tuple[Tree, Tree]] = {}
        for g, t in members.items():
            # The norm in the context covers all groups, so a member gets none.
            of_group = updates_of[g], state.groups[g], params_of[g], replace(context, norm=None, shardings=shardings[g])
            if scale is None or t.apply is None:
                results[g] = t.update(*of_group)
            else:
                results[g] = t.apply(*of_group, scale=scale)
        return labeled.merge(updates if scale is None else params, results)

    # A member needs the norm of its own group, which no context has.
    by_element = all(t.by_element and not t.needs_norm for t in members.values())
    applies, masks = all(t.apply is not None for t in members.values()), all(t.masks for t in members.values())
    return base.transformation(first, change, applies=applies, masks=applies and masks, by_element=by_element)


class _Labeled(NamedTuple):
    """The group of each leaf: splits trees by group, and merges the results of the groups."""

    labels: Tree
    groups: Collection[str]

    def split(self, values: Tree) -> dict[str, Tree]:
        """Return a tree for each group, with None for other leaves; None for each group without a tree."""
        if values is None:
            return dict.fromkeys(self.groups)
        return {g: tree.map(lambda x, label: x if label == g else None, values, self.labels) for g in self.groups}  # noqa: B023

    def merge(self, values: Tree, results: dict[str, tuple[Tree, Tree]]) -> tuple[Tree, MultiTransformState]:
        """Merge the results of all groups, and their states; unlabeled leaves are taken from `values`."""
        by_group = {g: tree.named_leaves(result) for g, (result, _) in results.items()}
        label_of = tree.named_leaves(self.labels)
        merged = tree.map_with_path(lambda path, x: by_group[label_of[path]][path] if path in label_of else x, values)
        return merged, MultiTransformState({g: inner for g, (_, inner) in results.items()})

    def check(self, params: Tree) -> None:
        """Refuse labels without a group, and groups without a leaf."""
        rows: list[str] = []
        groups = self.groups
        tree.map_with_path(lambda p, _, g: rows.append(f"{p}: {g!r}") if g not in groups else None, params, self.labels)
        if rows:
            known = f"Use one of the groups as a label: {listed(map(repr, groups))}."
            raise TreeError(message("has labels without a transformation.", rows, known))
        # Frozen leaves have no label here, but may be the ones that a group is for.
        if any(x is None for x in tree.leaves(params, is_leaf=lambda x: x is None)):
            return
        used = set(tree.leaves(self.labels))
        if used and (idle := [repr(group) for group in groups if group not in used]):
            given = listed(f"{path}: {label!r}" for path, label in tree.named_leaves(self.labels).items())
            mend = f"Leaves have {given}. Remove the group, or fix the labels."
            raise TreeError(message("has groups without a leaf.", idle, mend))


def _labeled(labels: Any, params: Tree, context: InitContext | UpdateContext, groups: Collection[str]) -> _Labeled:
    """Find the group of each parameter."""
    if callable(labels):
        named = tree.map_with_path(lambda path, x: labels(path, of_one_layer(path, x, context.stacked)), params)
        return _Labeled(named, groups)
    return _Labeled(tree.prune(labels, params, ("labels", "parameters")), groups)


def _pruned(values: Tree, updates: Tree) -> Tree:
    """Return the parameters or shardings of leaves that have updates; None for None."""
    return tree.prune(values, updates, _LABELS) if values is not None else None
