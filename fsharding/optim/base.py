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

from fsharding import _compat, tree
from fsharding.arguments import check_optimizer, kind_of
from fsharding.comm.redistribute import redistribute
from fsharding.errors import LayoutError, TreeError, listed, message
from fsharding.precision import wide
from fsharding.public import public
from fsharding.sharding import named_sharding as sharding
from fsharding.sharding.named_sharding import local_of, sharding_of
from fsharding.tree import Tree

__all__ = [
    "ChainState",
    "EmptyState",
    "GradientTransformation",
    "MaskedState",
    "add_decay_",
    "call",
    "chain",
    "check_moments",
    "check_state",
    "check_update",
    "clone",
    "like",
    "like_leaf",
    "local_leaves",
    "grads_where",
    "local_where",
    "masked",
    "multiply",
    "multi_transform",
    "narrow",
    "new_zeros",
    "refuse_other_parts",
    "refuse_unlike",
    "required",
    "run_update",
    "shardings_of",
    "widen",
    "zeros",
]


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    Attributes:
        init: `init(params) -> state`. It may take two keywords more: `moments`, the dtype in which the `Precision` of a
            layout wants what is kept of each element; and `shardings`, where the parameters are, such as `layout.main`,
            which says of leaves with explicit assignments what their DTensors cannot.
        update: `update(updates, state, params) -> (updates, state)`. It may take three keywords more: `donate=True`
            allows it to overwrite updates and state, `norm` is the global norm of the gradients where it is known, and
            `shardings` is as above.
        apply: `apply(updates, state, params) -> (params, state)`, with the same keywords: `update` and `apply_updates`
            in fewer passes over memory, for those that can; the results may differ in the last bit. It may take a
            keyword more: `scale`, by which the updates that it is given are still to be multiplied.
        factor: for one that has no state and only multiplies by a number: that number for a global norm.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[Tree, Tree]] | None = None
    factor: Callable[[Tensor], float] | None = None

    def start(self, params: Tree, moments: torch.dtype | None = None, shardings: Tree = None) -> Tree:
        """The first state: `init`, with those of the keywords that there are and that it takes.

        Args:
            params: main parameters; None for frozen leaves.
            moments: such as `layout.precision.moments`.
            shardings: such as `layout.main`.
        """
        known = {"moments": moments, "shardings": shardings}
        takes = _taken(self.init)
        return self.init(params, **{k: x for k, x in known.items() if x is not None and (k in takes or "**" in takes)})


class EmptyState(NamedTuple):
    """The state of a transformation without any."""


class ChainState(NamedTuple):
    """The states of a chain, in order."""

    states: tuple[Tree, ...]


class MaskedState(NamedTuple):
    """The state of each group, by label."""

    groups: dict[str, Tree]


_MASKED = ("fs.masked", ("parameters", "gradients"))


@functools.lru_cache(maxsize=512)
def _taken(function: Callable[..., Any]) -> frozenset[str]:
    """The names of what a function takes, and "**" if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


def run_update(
    transformation: GradientTransformation,
    updates: Tree,
    state: Tree,
    params: Tree,
    *,
    donate: bool = False,
    norm: Tensor | None = None,
    scale: float = 1.0,
    shardings: Tree = None,
) -> tuple[Tree, Tree]:
    """Calls `update` with the keywords that it takes."""
    known: Any = {"donate": donate, "norm": norm, "scale": scale, "shardings": shardings}
    return call(transformation.update, updates, state, params, **known)


def call(
    function: Callable[..., tuple[Tree, Tree]],
    updates: Tree,
    *args: Any,
    donate: bool,
    norm: Tensor | None,
    scale: float = 1.0,
    shardings: Tree = None,
) -> tuple[Tree, Tree]:
    """Calls a function of a transformation with those of the keywords that it takes; scales for one that does not."""
    takes = _taken(function)
    known = {"donate": donate, "norm": norm} | ({} if shardings is None else {"shardings": shardings})
    keywords = {name: x for name, x in known.items() if name in takes or "**" in takes}
    # A function that takes any keyword may well drop those that it does not know, which for a scale would be wrong.
    if "scale" in takes:
        keywords["scale"] = scale
    elif scale != 1.0:
        updates = multiply(updates, scale, donate=donate)
    return function(updates, *args, **keywords)


def multiply(values: Tree, factor: float, *, donate: bool = False) -> Tree:
    """All leaves times a number, in float32 at least: a mean of float16 sums may be too small for a float16.

    Args:
        values: tree of gradients.
        factor: the number.
        donate: those that are wide already are changed in place.
    """
    held = local_leaves(values)
    local = [x if x.dtype in _WIDE else x.to(wide(x.dtype)) for x in held]
    if donate:
        _compat.foreach_mul_(local, factor)
        return values if all(x is y for x, y in zip(held, local, strict=True)) else like(values, local)
    return like(values, _compat.foreach_mul(local, factor))


_WIDE = {torch.float32, torch.float64}


@public("fs.chain")
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Applies transformations one after the other; the first gets the gradients.

    Raises:
        ArgumentError: something that is no transformation.
        TreeError: from the update: a state of another chain.
    """
    for t in transformations:
        check_optimizer("fs.chain", t)

    @public("fs.chain(...).init")
    def init(params: Tree, *, moments: torch.dtype | None = None, shardings: Tree = None) -> ChainState:
        return ChainState(tuple(t.start(params, moments, shardings) for t in transformations))

    def states_of(updates: Tree, state: Any) -> tuple[Tree, ...]:
        check_state("fs.chain", ChainState, updates, state)
        if len(state.states) != len(transformations):
            text = f"got a state of {len(state.states)} transformations, and has {len(transformations)}."
            raise TreeError(message("fs.chain", text, mend="Give the state that this chain's init or update made."))
        return state.states

    @public("fs.chain(...).update")
    def update(
        updates: Tree,
        state: ChainState,
        params: Tree = None,
        *,
        donate: bool = False,
        norm: Tensor | None = None,
        shardings: Tree = None,
    ) -> tuple[Tree, ChainState]:
        states: list[Tree] = []
        for t, inner in zip(transformations, states_of(updates, state), strict=True):
            updates, inner = run_update(t, updates, inner, params, donate=donate, norm=norm, shardings=shardings)
            states.append(inner)
            norm = None
        return updates, ChainState(tuple(states))

    if not transformations or transformations[-1].apply is None:
        return GradientTransformation(init, update)
    last = transformations[-1].apply

    @public("fs.chain(...).apply")
    def apply(
        updates: Tree,
        state: ChainState,
        params: Tree,
        *,
        donate: bool = False,
        norm: Tensor | None = None,
        scale: float = 1.0,
        shardings: Tree = None,
    ) -> tuple[Tree, ChainState]:
        states: list[Tree] = []
        inners = states_of(updates, state)
        for t, inner in zip(transformations[:-1], inners[:-1], strict=True):
            if t.factor is not None and norm is not None:
                scale *= t.factor(norm)
            else:
                known: Any = {"donate": donate, "norm": norm, "scale": scale, "shardings": shardings}
                updates, inner = run_update(t, updates, inner, params, **known)
                scale = 1.0
            states.append(inner)
            norm = None
        known = {"donate": donate, "norm": norm, "scale": scale, "shardings": shardings}
        params, inner = call(last, updates, inners[-1], params, **known)
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
        ArgumentError: something that is no transformation.
        TreeError: at `init`: a label without a transformation; every such leaf is listed. From the update: a state of
            other groups.
    """
    for t in groups.values():
        check_optimizer("fs.masked", t)

    def split(values: Tree, labelled: Tree) -> dict[str, Tree]:
        return {g: tree.map(lambda x, label: x if label == g else None, values, labelled) for g in groups}  # noqa: B023

    def label(params: Tree) -> Tree:
        return (
            tree.map_with_path(labels, params)
            if callable(labels)
            else tree.prune(labels, params, "fs.masked", ("labels", "parameters"))
        )

    def parts_of(values: Tree, like: Tree, labelled: Tree) -> dict[str, Tree]:
        """The part of each group of what some trees may be, parameters or shardings; nothing where there are none."""
        return split(tree.prune(values, like, *_MASKED), labelled) if values is not None else {}

    @public("fs.masked(...).init")
    def init(params: Tree, *, moments: torch.dtype | None = None, shardings: Tree = None) -> MaskedState:
        labelled = label(params)
        rows: list[str] = []
        tree.map_with_path(lambda p, _, g: rows.append(f"{p}: {g!r}") if g not in groups else None, params, labelled)
        if rows:
            known = f"Labels are {listed(map(repr, groups))}."
            raise TreeError(message("fs.masked", "has labels without a transformation.", rows, known))
        parts, where = split(params, labelled), parts_of(shardings, params, labelled)
        return MaskedState({g: t.start(parts[g], moments, where.get(g)) for g, t in groups.items()})

    def states_of(updates: Tree, state: Any) -> dict[str, Tree]:
        check_state("fs.masked", MaskedState, updates, state)
        if state.groups.keys() != groups.keys():
            text = f"got a state of the groups {', '.join(state.groups)}, and has {', '.join(groups)}."
            raise TreeError(message("fs.masked", text, mend="Give the state that its own init or update made."))
        return state.groups

    @public("fs.masked(...).update")
    def update(
        updates: Tree, state: MaskedState, params: Tree = None, *, donate: bool = False, shardings: Tree = None
    ) -> tuple[Tree, MaskedState]:
        states = states_of(updates, state)
        params = tree.prune(params, updates, *_MASKED) if params is not None else None
        labelled = label(params if params is not None else updates)
        parts, params_of = split(updates, labelled), split(params, labelled) if params is not None else {}
        where = parts_of(shardings, updates, labelled)
        done = {
            g: run_update(t, parts[g], states[g], params_of.get(g), donate=donate, shardings=where.get(g))
            for g, t in groups.items()
        }
        return merge(updates, labelled, done)

    def merge(values: Tree, labelled: Tree, done: dict[str, tuple[Tree, Tree]]) -> tuple[Tree, MaskedState]:
        by_group = {g: tree.named_leaves(result) for g, (result, _) in done.items()}
        chosen = tree.named_leaves(labelled)
        merged = tree.map_with_path(lambda path, x: by_group[chosen[path]][path] if path in chosen else x, values)
        return merged, MaskedState({g: inner for g, (_, inner) in done.items()})

    if any(t.apply is None for t in groups.values()):
        return GradientTransformation(init, update)

    @public("fs.masked(...).apply")
    def apply(
        updates: Tree,
        state: MaskedState,
        params: Tree,
        *,
        donate: bool = False,
        scale: float = 1.0,
        shardings: Tree = None,
    ) -> tuple[Tree, MaskedState]:
        states = states_of(updates, state)
        pruned = tree.prune(params, updates, *_MASKED)
        labelled = label(pruned)
        parts, params_of = split(updates, labelled), split(pruned, labelled)
        where: dict[str, Tree] = parts_of(shardings, updates, labelled)
        done = {
            g: call(
                t.apply,
                parts[g],
                states[g],
                params_of[g],
                donate=donate,
                norm=None,
                scale=scale,
                shardings=where.get(g),
            )
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


def widen(kept: Tree, *, donate: bool) -> list[Tensor]:
    """The local tensors of moments to compute with, in float32 at least; they may be overwritten.

    Args:
        kept: tree of moments.
        donate: those that are wide already may be overwritten themselves.
    """
    held = [(m, wide(m.dtype)) for m in local_leaves(kept)]
    return [m.to(dtype) if m.dtype != dtype else m if donate else clone(m) for m, dtype in held]


def narrow(kept: Tree, new: Sequence[Tensor], *, donate: bool) -> Tree:
    """New moments in the dtype and place of the old ones.

    Args:
        kept: tree of moments as they were.
        new: local tensors, such as `widen` gave.
        donate: the old ones may be overwritten.
    """
    pairs = zip(local_leaves(kept), new, strict=True)
    return like(kept, [x if x.dtype == m.dtype else m.copy_(x) if donate else x.to(m.dtype) for m, x in pairs])


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


_ORDER = "Call opt.update(gradients, state, params), in this order."


def required(params: Tree, function: str, why: str = "to update them") -> Tree:
    """The parameters.

    Args:
        params: what was given for them.
        function: the public function, for the error.
        why: they are needed.

    Raises:
        TreeError: there are none.
    """
    if params is None:
        mend = "Call update(updates, state, params)."
        raise TreeError(message(function, f"needs the parameters {why}.", mend=mend))
    return params


def check_state(function: str, kind: type, updates: Tree, state: Any) -> None:
    """Refuses a state that is none of this optimizer, such as one that changed places with the gradients.

    Args:
        function: the public function, for the error.
        kind: of its states.
        updates: what stands where gradients belong.
        state: what stands where the state belongs.

    Raises:
        TreeError: it is of another kind.
    """
    if not isinstance(state, kind):
        swapped = f", and {kind.__name__} in the place of gradients" if isinstance(updates, kind) else ""
        text = f"got {type(state).__name__} in the place of its state, {kind.__name__}{swapped}."
        mend = _ORDER if swapped else f"The state is what opt.init(params), or the last update, returned. {_ORDER}"
        raise TreeError(message(function, text, mend=mend))
    if "count" not in getattr(state, "_fields", ()):
        return
    count = state.count
    if not isinstance(count, Tensor) or count.ndim or count.is_meta:
        text = f"got a state whose count is {kind_of(count)}, not a 0-d tensor."
        raise TreeError(
            message(function, text, mend="The state is what opt.init(params), or the last update, returned.")
        )


def check_moments(function: str, **moments: Tree) -> None:
    """Refuses moments that no kernel can compute with: other things than floating point tensors, or not all there.

    Args:
        function: the public function, for the error.
        **moments: trees of one structure, by the names that the state has for them.

    Raises:
        TreeError: as said; all such leaves are listed.
    """
    (first, kept), *others = moments.items()
    named = tree.named_leaves(kept)
    rows = [f"{first}.{path}: {kind_of(x)}" for path, x in named.items() if not _is_moment(x)]
    for name, values in others:
        flat = tree.flatten_up_to(tree.flatten(kept)[1], values, function, (first, name))
        rows += [f"{name}.{path}: {kind_of(x)}" for path, x in zip(named, flat, strict=True) if not _is_moment(x)]
    if rows:
        text = "got moments that are no floating point tensors."
        mend = "The state is what opt.init(params), or the last update, returned."
        raise TreeError(message(function, text, rows, mend))


def _is_moment(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta


def check_update(function: str, kind: type, updates: Tree, state: Any, params: Tree, *, decay: float = 0.0) -> None:
    """Refuses arguments of an update that are in each other's place, and decay without anything to decay.

    Args:
        function: the public function, for the error.
        kind: of its states.
        updates: the gradients.
        state: the state.
        params: the parameters, or None.
        decay: how fast they decay by themselves.

    Raises:
        TreeError: as said.
    """
    check_state(function, kind, updates, state)
    there = params if params is not None else state[1]
    if isinstance(updates, tuple | Tensor) and there is not None and type(updates) is not type(there):
        # As fs.value_and_grad returns beside gradients, or with them.
        what = f"a tuple of {len(updates)}" if isinstance(updates, tuple) else f"a tensor {list(updates.shape)}"
        text = f"got {what} in the place of gradients, and {type(there).__name__} for the rest."
        mend = f"Values come first: value, grads = fs.value_and_grad(loss_fn)(params, batch). {_ORDER}"
        raise TreeError(message(function, text, mend=mend))
    if decay:
        required(params, function, f"for weight_decay={decay}")


def refuse_other_parts(function: str, where: Tree, columns: Mapping[str, Sequence[Tensor]]) -> None:
    """Refuses local tensors that are not the same part of their leaves: kernels would read or write past an end.

    Args:
        function: the public function, for the error.
        where: tree of moments, for its paths.
        columns: local tensors of all leaves, by what they are.

    Raises:
        LayoutError: they differ in shape; all such leaves are listed.
    """
    shapes = [[x.shape for x in column] for column in columns.values()]
    if all(other == shapes[0] for other in shapes[1:]):
        return
    rows = [
        f"{path}: {', '.join(f'{name} {list(shape)}' for name, shape in zip(columns, leaf, strict=True))}"
        for path, *leaf in zip(tree.paths(where), *shapes, strict=True)
        if len({*leaf}) > 1
    ]
    mend = "Bring all of them to layout.main with fs.shard or fs.reshard; a DTensor has to hold what it says."
    raise LayoutError(message(function, "got different parts of the same leaves on this rank.", rows, mend))


def refuse_unlike(function: str, first: Tree, second: Tree, labels: tuple[str, str]) -> None:
    """Checks that two trees have the same paths and shapes: kernels would broadcast, or fill a part.

    A plain tensor does not go with a DTensor, even where the rank has all of that: elsewhere it is whole beside a part.

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
    if all(map(_alike, flat, others)):
        return
    rows = [
        f"{path}: {labels[0]} {_shape(x, y)}, {labels[1]} {_shape(y, x)}"
        for path, x, y in zip(tree.paths(first), flat, others, strict=True)
        if not _alike(x, y)
    ]
    text = f"got {labels[0]} and {labels[1]} of different shapes."
    raise TreeError(message(function, text, rows, f"Give {labels[0]} and {labels[1]} of one model."))


def _alike(x: Tensor, y: Any) -> bool:
    return isinstance(y, Tensor) and x.shape == y.shape and isinstance(x, DTensor) == isinstance(y, DTensor)


def _shape(x: Any, other: Any) -> str:
    shape = f"{list(getattr(x, 'shape', ()))}"
    if not isinstance(other, Tensor) or isinstance(x, DTensor) == isinstance(other, DTensor):
        return shape
    return f"{shape} on a mesh" if isinstance(x, DTensor) else f"{shape} in a plain tensor"


def add_decay_(function: str, updates: Sequence[Tensor], params: Tree, where: Tree, factor: float) -> None:
    """Adds a multiple of the parameters to updates, which are the local tensors of another tree."""
    main = [p.to(u.dtype) for p, u in zip(local_where(function, params, where), updates, strict=True)]
    _compat.foreach_add_(updates, _compat.foreach_mul(main, factor))
