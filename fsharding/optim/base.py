"""Gradient transformations as in optax, the contexts that the library passes to them, and helpers on local tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import LayoutError, TreeError, message
from fsharding.base.public import kind_of, public, refuse_state
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import sharding_here
from fsharding.comm.redistribute import redistribute
from fsharding.formats.blocks import Rounding
from fsharding.optim.chunks import like_leaf, new_zeros
from fsharding.optim.coded_moment import MomentType
from fsharding.optim.state_copies import AT_ONCE, UpdateCopies
from fsharding.sharding.entries import places, state_leaves, with_leaves
from fsharding.sharding.named_sharding import local_of

__all__ = [
    "ContextTransformation", "EmptyState", "GradientTransformation", "InitContext", "UpdateContext", "add_decay_",
    "check_state", "check_update", "clone", "like", "like_leaf", "local_grads", "local_leaves",
    "local_params", "multiply", "new_zeros", "next_count", "refuse_no_gradients", "refuse_other_shapes",
    "refuse_other_shards", "require_params", "shardings_of", "transformation", "where_finite", "writable_leaves",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class InitContext:
    """Facts about a layout that an `init` may use.

    Attributes:
        moments: Dtype or format of moments in the layout's `Precision`; None leaves it to the optimizer.
        shardings: Shardings of the parameters, such as `layout.main`: DTensors lack explicit assignments.
        whole: Meta tensors of the full parameters, such as `layout.meta_main()`; None if each DTensor has its shape.
        stacked: Whether the first dim of a leaf counts layers, by path, as `layout.stacked`; by default under `blocks`.

    Example:
        >>> context = fs.optim.InitContext(moments=torch.bfloat16)
        >>> fs.adamw(1e-3).init({"w": torch.ones(2)}, context).mu["w"].dtype
        torch.bfloat16
    """

    moments: MomentType = None
    shardings: Tree = None
    whole: Tree = None
    stacked: Mapping[str, bool] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateContext:
    """Facts about one step that an `update` may use.

    Attributes:
        donate: Whether updates and state may be overwritten.
        norm: Global norm of the incoming updates, if known.
        shardings: Shardings of updates and parameters, as in `InitContext`.
        finite: Whether the step counts, a 0-d bool that the host does not read. If it is false, an `apply` that `masks`
            keeps parameters and state; for others, `apply_gradients` restores the old values. None: it counts.
        key: Key of the run for stochastic rounding, int64[2], such as `state.key`; None is a key of zeros.
        step: Number of updates of the run so far, 0-d; None uses the optimizer's count.
        rounding: "nearest" or "stochastic" (up or down at random, exact in the mean). By default moments narrower than
            float32 are rounded stochastically, and bfloat16 parameters to nearest.
        on_host: Paths of parameters whose update is computed on the host, such as `layout.updated_on_host`.
        may_be_away: Whether leaves may be kept in other memory than the device's; False saves a check per leaf.
        stacked: As in `InitContext`, and the same value.
        copies: Which copies of leaves in other memory begin before the update, or end after it; by default none.

    Example:
        >>> grads, opt = {"w": torch.full((4,), 2.0)}, fs.optim.clip_by_global_norm(1.0)
        >>> context = fs.optim.UpdateContext(norm=fs.global_norm(grads))
        >>> opt.update(grads, opt.init(grads), None, context)[0]
        {'w': tensor([0.5000, 0.5000, 0.5000, 0.5000])}
    """

    donate: bool = False
    norm: Tensor | None = None
    shardings: Tree = None
    finite: Tensor | None = None
    key: Tensor | None = None
    step: Tensor | None = None
    rounding: Rounding | None = None
    on_host: Collection[str] = ()
    may_be_away: bool = True
    stacked: Mapping[str, bool] | None = None
    copies: UpdateCopies = AT_ONCE


@dataclass(frozen=True)
class GradientTransformation:
    """A pair of pure functions, as in optax: the type for custom transformations.

    Attributes:
        init: `init(params) -> state`.
        update: `update(updates, state, params) -> (updates, state)`.

    Example:
        >>> def init(params):
        ...     return None
        >>> def update(updates, state, params=None):
        ...     return fs.tree.map(lambda g: -0.1 * g, updates), state
        >>> opt = fs.optim.GradientTransformation(init, update)
        >>> updates, _ = opt.update({"w": torch.ones(2)}, opt.init({"w": torch.zeros(2)}))
        >>> updates["w"]
        tensor([-0.1000, -0.1000])
    """

    init: Callable[[Tree], Any]
    update: Callable[[Any, Any, Any], tuple[Tree, Any]]

    def with_context(self) -> ContextTransformation:
        """Return the same transformation with contexts, which a plain pair ignores."""

        def init(params: Tree, context: InitContext = InitContext()) -> Any:
            return self.init(params)

        def update(
            updates: Tree, state: Any, params: Tree = None, context: UpdateContext = UpdateContext()
        ) -> tuple[Tree, Any]:
            return self.update(updates, state, params)

        return ContextTransformation(init, update)

    def start(
        self,
        params: Tree,
        *,
        moments: MomentType = None,
        shardings: Tree = None,
        whole: Tree = None,
        stacked: Mapping[str, bool] | None = None,
    ) -> Tree:
        """Make the first state for a layout.

        Args:
            params: Main parameters; None for frozen leaves.
            moments: Dtype or format of moments, such as `layout.precision.moments`.
            shardings: Shardings of the parameters, such as `layout.main`.
            whole: Full shapes, such as `layout.meta_main()`.
            stacked: Stacked leaves by path, such as `layout.stacked`.

        Returns:
            The state.
        """
        context = InitContext(moments=moments, shardings=shardings, whole=whole, stacked=stacked)
        return self.with_context().init(params, context)


class _Init(Protocol):
    def __call__(self, params: Tree, context: InitContext = ..., /) -> Any: ...


class _Update(Protocol):
    def __call__(
        self, updates: Tree, state: Any, params: Tree = ..., context: UpdateContext = ..., /
    ) -> tuple[Tree, Any]: ...


class _Apply(Protocol):
    def __call__(
        self, updates: Tree, state: Any, params: Tree, context: UpdateContext = ..., /, *, scale: float | Tensor = ...
    ) -> tuple[Tree, Any]: ...


@dataclass(frozen=True)
class ContextTransformation(GradientTransformation):
    """A transformation whose functions also take a context, last and optional: the type of this library's optimizers.

    Attributes:
        init: `init(params, context=InitContext()) -> state`.
        update: `update(updates, state, params=None, context=UpdateContext()) -> (updates, state)`.
        apply: `apply(updates, state, params, context=UpdateContext(), *, scale=1.0) -> (params, state)`, or None: both
            in fewer passes over memory; the last bit may differ. `scale` multiplies updates, also in `context.norm`.
        factor: For a stateless transformation that multiplies by a number: that number for a global norm, 0-d.
        masks: Whether `apply` honors `context.finite`.
        by_element: Whether each element is updated by itself, given the global norm if needed.
        needs_norm: Whether it uses the global norm.

    Example:
        >>> def init(params, context=fs.optim.InitContext()):
        ...     return fs.optim.EmptyState()
        >>> def update(updates, state, params=None, context=fs.optim.UpdateContext()):
        ...     norm = fs.global_norm(updates) if context.norm is None else context.norm
        ...     return fs.tree.map(lambda g: g / norm, updates), state
        >>> opt = fs.optim.ContextTransformation(init, update)
        >>> opt.update({"w": torch.full((4,), 2.0)}, fs.optim.EmptyState())[0]
        {'w': tensor([0.5000, 0.5000, 0.5000, 0.5000])}
    """

    init: _Init
    update: _Update
    apply: _Apply | None = None
    factor: Callable[[Tensor], Tensor] | None = None
    masks: bool = False
    by_element: bool = False
    needs_norm: bool = False

    def __post_init__(self) -> None:
        """Make leaves whose gradient is None keep their parameter and moments."""
        object.__setattr__(self, "update", _holding(self.update))
        if self.apply is not None:
            object.__setattr__(self, "apply", _holding(self.apply, fills=True))

    def with_context(self) -> ContextTransformation:
        """Return the transformation itself."""
        return self


def _holding(change: Callable[..., tuple[Tree, Any]], *, fills: bool = False) -> Any:
    """Hide leaves without a gradient from an update or an `apply`; with `fills`, its result has them nevertheless."""

    @functools.wraps(change)
    def run(updates: Tree, state: Any, params: Tree = None, *rest: Any, **options: Any) -> tuple[Tree, Any]:
        changed, after = _held_apart(lambda u, s, p: change(u, s, p, *rest, **options), updates, state, params)
        if fills and len(tree.leaves(changed)) < len(tree.leaves(params)):
            new = tree.named_leaves(changed)
            changed = tree.map_with_path(lambda path, x: new.get(path, x), params)
        return changed, after

    return run


def _held_apart(
    change: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]], grads: Tree, state: Tree, params: Tree
) -> tuple[Tree, Tree]:
    """Run `change(grads, state, params)`, which returns a tree like `params` or `grads` and a state."""
    given, wanted = tree.leaves(grads), tree.leaves(params)
    if not given or len(given) >= len(wanted):
        return change(grads, state, params)
    held = {*tree.paths(params)} - {*tree.paths(grads)}
    found = places(state, params)
    kept = {path: x for path, x in state_leaves(state).items() if path in found and found[path].param in held}
    if not kept:
        return change(grads, state, params)
    pruned = with_leaves(state, dict.fromkeys(kept))
    changed, after = change(grads, pruned, tree.map_with_path(lambda path, x: None if path in held else x, params))
    return changed, with_leaves(state, state_leaves(after) | kept)


def transformation(
    first: Callable[[Tree, InitContext], Any],
    change: Callable[..., tuple[Tree, Any]],
    *,
    applies: bool = False,
    **facts: Any,
) -> ContextTransformation:
    """Make a transformation of `first(params, context)` and `change(updates, state, params, context[, scale])`."""
    # Without a scale `change` returns updates; with one, which `apply` passes, parameters.
    # Errors begin with the name of the public call that made the transformation, such as fs.adamw.

    @public
    def init(params: Tree, context: InitContext = InitContext()) -> Any:
        return first(params, context)

    @public
    def update(
        updates: Tree, state: Any, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, Any]:
        # If the step does not count, the caller restores the old values.
        return change(updates, state, params, context if context.finite is None else replace(context, finite=None))

    @public
    def apply(
        updates: Tree,
        state: Any,
        params: Tree,
        context: UpdateContext = UpdateContext(),
        *,
        scale: float | Tensor = 1.0,
    ) -> tuple[Tree, Any]:
        return change(updates, state, params, context, scale)

    return ContextTransformation(init, update, apply if applies else None, **facts)


class EmptyState(NamedTuple):
    """The state of a stateless transformation.

    Example:
        >>> fs.optim.clip_by_global_norm(1.0).init({"w": torch.ones(2)})
        EmptyState()
    """


def multiply(values: Tree, factor: float | Tensor, *, donate: bool = False) -> Tree:
    """Multiply all leaves by a number, in float32 at least: a mean of float16 sums may underflow float16."""
    if not isinstance(factor, Tensor) and factor == 1.0:
        return values
    given = local_leaves(values)
    local = [x if x.dtype in WIDE else x.to(wide(x.dtype)) for x in given]
    if donate:
        _compat.foreach_mul_(local, factor)
        return values if all(x is y for x, y in zip(given, local, strict=True)) else like(values, local)
    return like(values, _compat.foreach_mul(local, factor))


def next_count(count: Tensor, finite: Tensor | None) -> Tensor:
    """Return a count after an update: unchanged if `finite` is false, and on the device of `finite`."""
    return count + 1 if finite is None else count.to(finite.device, non_blocking=True) + finite


def where_finite(finite: Tensor | None, new: Tree, old: Tree) -> Tree:
    """Return the new values of a tree, or the old ones if a step did not count; the host does not read which."""
    if finite is None:
        return new

    def choose(x: Any, before: Any) -> Any:
        if x is before or not isinstance(x, Tensor):
            return x
        local = local_of(x)
        local_before = local_of(before)
        # A count of the host moves to the device, without a wait. State in host memory does wait for `finite`.
        device = finite.device if local.ndim == 0 else local.device
        local, local_before = (y.to(device, non_blocking=y.device.type == "cpu") for y in (local, local_before))
        return like_leaf(x, torch.where(finite.to(device), local, local_before))

    return tree.map(choose, new, old)


def local_leaves(values: Tree) -> list[Tensor]:
    """Return the local tensors of a tree, in order.

    Args:
        values: Tree of DTensors and plain tensors.

    Returns:
        A list of plain tensors that share memory with the leaves.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> (w,) = fs.optim.local_leaves(fs.shard({"w": torch.ones(2)}, layout))
        >>> type(w).__name__, w.numel() * layout.mesh.size()
        ('Tensor', 2)
    """
    return [local_of(x) for x in tree.leaves(values)]


def like(values: Tree, local: Sequence[Tensor]) -> Tree:
    """Make a tree sharded as `values` from other local tensors: the inverse of `local_leaves`.

    Args:
        values: Tree of DTensors and plain tensors.
        local: One local tensor for each leaf, in order, of any dtype.

    Returns:
        A tree of DTensors where `values` has them, which share memory with `local`.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(2)}, layout)
        >>> doubled = fs.optim.like(params, [2 * x for x in fs.optim.local_leaves(params)])
        >>> fs.unshard(doubled["w"])
        tensor([2., 2.])
    """
    leaves, spec = tree.flatten(values)
    return tree.unflatten(spec, [like_leaf(x, new) for x, new in zip(leaves, local, strict=True)])


WIDE = {torch.float32, torch.float64}  # dtypes that kernels take as they are
_NEEDS_GRAD = operator.attrgetter("requires_grad")


def writable_leaves(*trees: Tree) -> list[list[Tensor]] | None:
    """Return the local tensors of trees for one kernel; None unless structures and kinds are plainly equal."""
    first, spec = tree.flatten(trees[0])
    columns = [first]
    for other in trees[1:]:
        leaves, structure = tree.flatten(other)
        if structure != spec or not _compat.same_kind(first, leaves):
            return None
        columns.append(leaves)
    local = [[_compat.local_tensor(x) if isinstance(x, DTensor) else x for x in column] for column in columns]
    return None if any(any(map(_NEEDS_GRAD, column)) for column in local) else local


def clone(x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def shardings_of(values: Tree) -> Tree:
    """Return the sharding of each DTensor, in host memory if the leaf is there; None for plain tensors."""
    return tree.map(lambda x: sharding_here(x) if isinstance(x, DTensor) else None, values)


def local_grads(grads: Tree, moments: Tree, label: str = "moments") -> list[Tensor]:
    """Return local tensors of gradients in the shardings of the moments; refuse different paths or shapes."""
    refuse_no_gradients(grads, moments)
    refuse_other_shapes(grads, moments, ("gradients", label))
    return local_leaves(redistribute(grads, shardings_of(moments)))


def local_params(params: Tree, moments: Tree) -> list[Tensor]:
    """Return local tensors of the parameters that have moments, in the shardings of the moments."""
    labels = ("parameters", "moments")
    pruned = tree.prune(params, moments, labels)
    refuse_other_shapes(pruned, moments, labels)
    return local_leaves(redistribute(pruned, shardings_of(moments)))


_ORDER = "Call opt.update(gradients, state, params), in this order."
_STATE = "Pass the state that opt.init(params), or the last update, returned."


def require_params(params: Tree, why: str = "to update them") -> Tree:
    """Return the parameters, or refuse an update without them."""
    if params is None:
        mend = "Call opt.update(gradients, state, params)."
        raise TreeError(message(f"needs the parameters {why}.", mend=mend))
    return params


def check_state(kind: type, updates: Tree, state: Any) -> None:
    """Refuse a different optimizer's state, or gradients or a full `TrainState` instead of the state."""
    refuse_state(updates)
    if not isinstance(state, kind):
        swapped = f", and {kind.__name__} instead of gradients" if isinstance(updates, kind) else ""
        text = f"got {type(state).__name__} instead of its state, {kind.__name__}{swapped}."
        mend = _ORDER if swapped else f"{_STATE} {_ORDER}"
        raise TreeError(message(text, mend=mend))
    if "count" not in getattr(state, "_fields", ()):
        return
    count = state.count
    if not isinstance(count, Tensor) or count.ndim or count.is_meta:
        text = f"got a state whose count is {kind_of(count)}, not a 0-d tensor."
        raise TreeError(message(text, mend=_STATE))


def check_update(kind: type, updates: Tree, state: Any, params: Tree, *, decay: float = 0.0) -> None:
    """Refuse swapped arguments, a loss instead of gradients, and weight decay without parameters."""
    check_state(kind, updates, state)
    other = params if params is not None else state[1]
    if isinstance(updates, tuple | Tensor) and other is not None and type(updates) is not type(other):
        # fs.value_and_grad returns a loss, or (loss, count), and then the gradients.
        given = f"a tuple of {len(updates)}" if isinstance(updates, tuple) else f"a tensor {list(updates.shape)}"
        text = f"got {given} instead of gradients, and {type(other).__name__} for the rest."
        mend = f"The loss comes first: value, grads = fs.value_and_grad(loss_fn)(params, batch). {_ORDER}"
        raise TreeError(message(text, mend=mend))
    if decay:
        require_params(params, f"for weight_decay={decay}")


def refuse_other_shards(moments: Tree, columns: Mapping[str, Sequence[Tensor]]) -> None:
    """Refuse local tensors that aren't the same shard of a leaf: kernels would read or write past an end."""
    shapes = [[x.shape for x in column] for column in columns.values()]
    if all(other == shapes[0] for other in shapes[1:]):
        return
    rows = [
        f"{path}: {', '.join(f'{name} {list(shape)}' for name, shape in zip(columns, leaf, strict=True))}"
        for path, *leaf in zip(tree.paths(moments), *shapes, strict=True)
        if len({*leaf}) > 1
    ]
    mend = "Bring all of them to layout.main with fs.shard or fs.reshard; check DTensors that you made yourself."
    raise LayoutError(message("got different shards of the same leaves on this rank.", rows, mend))


def refuse_other_shapes(first: Tree, second: Tree, labels: tuple[str, str]) -> None:
    """Refuse trees of different paths or shapes: kernels would broadcast, or write part of a tensor."""
    # A plain tensor never matches a DTensor, even if this rank has all of it: on other ranks a full tensor would meet
    # a shard.
    flat, spec = tree.flatten(first)
    others = tree.flatten_up_to(spec, second, labels)
    if all(map(_alike, flat, others)):
        return
    rows = [
        f"{path}: {labels[0]} {_shape(x, y)}, {labels[1]} {_shape(y, x)}"
        for path, x, y in zip(tree.paths(first), flat, others, strict=True)
        if not _alike(x, y)
    ]
    text = f"got {labels[0]} and {labels[1]} of different shapes."
    raise TreeError(message(text, rows, f"Pass {labels[0]} and {labels[1]} of one model."))


def refuse_no_gradients(grads: Tree, like: Tree) -> None:
    """Refuse gradients that are all None, as `.grad` of a tensor is without a `.backward()`."""
    if not tree.leaves(grads) and tree.leaves(like):
        mend = "Pass grads of value, grads = fs.value_and_grad(loss_fn)(params, batch); a parameter's .grad is None."
        raise TreeError(message("got no gradients: each of them is None.", mend=mend))


def _alike(x: Tensor, y: Any) -> bool:
    return isinstance(y, Tensor) and x.shape == y.shape and isinstance(x, DTensor) == isinstance(y, DTensor)


def _shape(x: Any, other: Any) -> str:
    shape = f"{list(getattr(x, 'shape', ()))}"
    if not isinstance(other, Tensor) or isinstance(x, DTensor) == isinstance(other, DTensor):
        return shape
    return f"{shape} on a mesh" if isinstance(x, DTensor) else f"{shape} in a plain tensor"


def add_decay_(updates: Sequence[Tensor], params: Tree, moments: Tree, factor: float | Tensor) -> None:
    """Add a multiple of the parameters to updates, local tensors in the shardings of the moments."""
    main = [p.to(u.dtype) for p, u in zip(local_params(params, moments), updates, strict=True)]
    _compat.foreach_add_(updates, _compat.foreach_mul(main, factor))
