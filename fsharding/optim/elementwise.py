"""Optimizers that compute each element by itself: a rule of a few lines, and the driver of all such rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, LayoutError, message
from fsharding.base.public import check_function, public
from fsharding.base.tree import Tree
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    add_decay_,
    check_update,
    clone,
    like,
    like_leaf,
    local_grads,
    local_params,
    new_zeros,
    next_count,
    refuse_other_shards,
    transformation,
    writable_leaves,
)
from fsharding.optim.chunked_update import (
    ROLES,
    Batch,
    Part,
    change_chunks,
    init_moments,
    leaves_of,
    local_leaf,
    round_moment,
    rounds_by_key,
    rounds_moments,
    step_key,
    write_param,
)
from fsharding.optim.coded_moment import MomentType, carrier_of, carriers, check_moment_type, check_moments, parts_of
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.updates import change_slices
from fsharding.optim.validation import FROM_0, check_settings
from fsharding.sharding.named_sharding import local_of

__all__ = [
    "ElementwiseState", "Kernel", "Rule", "State", "Step", "driven", "elementwise", "owned", "run_rule",
    "step_at",
]  # fmt: skip

Rule: TypeAlias = Callable[..., list[Tensor]]
"""`rule(grads, *moments, count) -> directions`; see `elementwise`."""

Kernel: TypeAlias = Callable[..., list[Tensor]]
"""`kernel(values, grads, *moments, step) -> values`, on lists of tensors of one dtype for each leaf, float32 at least.

The moments are overwritten. The values are too, if there are any: parameters, or zeros for an update alone; a kernel
without returns updates. Gradients may be overwritten only where `step.scale` is not 1.
"""

_WIDE = {torch.float32, torch.float64}


class Step(NamedTuple):
    """The numbers of one update."""

    count: Tensor  # of updates before this one: int64, 0-d
    number: Tensor  # of this update: float32, 0-d, on the device of the leaves
    rate: float | Tensor
    decay: float = 0.0  # of the values that the kernel changes
    scale: float | Tensor = 1.0  # of the gradients
    finite: Tensor | None = None  # bool, 0-d: nothing is updated if it is false


class ElementwiseState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the moments by name.

    Example:
        >>> opt = fs.optim.elementwise(lambda grads, mu, count: grads, 0.1)
        >>> opt.init({"w": torch.ones(2)}).moments
        {'mu': {'w': tensor([0., 0.])}}
    """

    count: Tensor
    moments: dict[str, Tree]


class State(NamedTuple):
    """The state of an optimizer: a NamedTuple with a field for each moment, or `ElementwiseState`."""

    kind: type
    names: Sequence[str]
    roots: Sequence[str] = ()  # moments that are never negative; a format of 8 bits keeps their root

    def make(self, count: Tensor, moments: Sequence[Tree]) -> Any:
        """Make a state of its moments."""
        named = dict(zip(self.names, moments, strict=True))
        return ElementwiseState(count, named) if self.kind is ElementwiseState else self.kind(count, **named)

    def first(self, params: Tree, kept: MomentType, context: InitContext) -> Any:
        """Make the state before all updates."""
        trees = [init_moments(params, kept, context, root=name in self.roots) for name in self.names]
        return self.make(torch.zeros((), dtype=torch.int64), trees)

    def moments(self, state: Any) -> list[Tree]:
        """Return the moments of a state, in the order of their names."""
        held = state.moments if self.kind is ElementwiseState else state._asdict()
        return [held[name] for name in self.names]


@public
def elementwise(
    rule: Rule,
    learning_rate: float | Schedule,
    names: Sequence[str] = ("mu",),
    *,
    roots: Sequence[str] = (),
    weight_decay: float = 0.0,
    moments: MomentType = None,
) -> ContextTransformation:
    """Makes an optimizer of a rule that computes each element by itself: update `-lr * (direction + weight_decay * p)`.

    Args:
        rule: `rule(grads, *moments, count) -> directions`: gradients and moments are lists of tensors, of one dtype
            for each leaf, float32 at least; the moments are overwritten with their new values. `count` is int64, 0-d:
            the number of updates before this one. A list may have the tensors of all leaves, or a chunk of one leaf,
            and with moments of 8 bits a chunk may be computed twice: the rule has no other state.
        learning_rate: a number, or a function of the number of updates so far.
        names: of the moments, at most four; each begins as zeros.
        roots: moments that are never negative, of which a format of 8 bits keeps the root.
        weight_decay: decoupled decay, times the learning rate.
        moments: the dtype, or the format of 8 bits, in which moments are kept, as in `fs.adamw`.

    Raises:
        ConfigError: numbers below 0; moments in a dtype that kernels lack; a name twice, or too many.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> def signs(grads, mu, count):  # signSGD with momentum (Bernstein et al., 2018)
        ...     for g, m in zip(grads, mu):
        ...         m.lerp_(g, 0.1)
        ...     return [m.sign() for m in mu]
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.elementwise(signs, 0.1)
        >>> updates, state = opt.update({"w": torch.tensor([3.0, -0.5])}, opt.init(params), params)
        >>> updates
        {'w': tensor([-0.1000,  0.1000])}
    """
    check_function("a rule (grads, *moments, count)", rule, len(names) + 2)
    check_settings((FROM_0, {"learning_rate": learning_rate, "weight_decay": weight_decay}))
    named = tuple(names)
    if len({*named}) != len(named) or len(named) > len(ROLES):
        mend = f"Give each moment a name of its own, and at most {len(ROLES)}."
        raise ConfigError(message(f"got names={named!r}.", mend=mend))
    state = State(ElementwiseState, named, roots)
    return driven(rule, learning_rate, state, weight_decay=weight_decay, moments=moments)


def driven(
    rule: Rule | Kernel,
    learning_rate: float | Schedule,
    state_of: State,
    *,
    weight_decay: float = 0.0,
    l2: float = 0.0,
    moments: MomentType = None,
    in_place: bool = False,
) -> ContextTransformation:
    """Make an optimizer from a rule, as `elementwise` does, or from a kernel that changes parameters in place."""
    kept = check_moment_type(moments)
    rate = as_schedule(learning_rate)
    kernel = rule if in_place else _directed(rule)

    def first(params: Tree, context: InitContext) -> Any:
        return state_of.first(params, kept, context)

    def change(
        updates: Tree, state: Any, params: Tree, context: UpdateContext, scale: float | Tensor | None = None
    ) -> tuple[Tree, Any]:
        check_update(state_of.kind, updates, state, params, decay=weight_decay or l2)
        before = state_of.moments(state)
        count = next_count(state.count, context.finite)
        settings = {} if scale is None else {"decay": weight_decay, "scale": scale, "finite": context.finite}
        columns = writable_leaves(params, updates, *before) if context.donate and scale is not None else None
        if columns is not None:
            values, grads, *parts = columns
            step = step_at(rate, state.count, grads, **settings)
            run_rule(kernel, step, values, grads, parts, updates, context)
            return params, state_of.make(count, before)
        home = _home(dict(zip(state_of.names, before, strict=True)), updates, params)
        grads = local_grads(updates, home, "moments" if before else "parameters")
        if l2:
            main = [p.to(g.dtype) for p, g in zip(local_params(params, home), grads, strict=True)]
            grads = _compat.foreach_add(grads, _compat.foreach_mul(main, l2))
        # A schedule that raises does so here, before anything is written.
        step = step_at(rate, state.count, grads, **settings)
        after = [owned(moment, donate=context.donate) for moment in before]
        parts = [*map(parts_of, after)]

        def ruled(values: list[Tensor] | None) -> list[Tensor]:
            return run_rule(kernel, step, values, grads, parts, (after or [home])[0], context)

        if scale is None:
            result = ruled(_zeros_of(parts[0]) if in_place else None)
            if weight_decay:
                add_decay_(result, params, home, -step.rate * weight_decay)
            return like(home, result), state_of.make(count, after)
        on_slices = ruled if context.donate else lambda slices: ruled([*map(clone, slices)])
        return change_slices(params, home, on_slices, donate=context.donate), state_of.make(count, after)

    return transformation(first, change, applies=in_place, masks=in_place, by_element=True)


def _home(before: dict[str, Tree], updates: Tree, params: Tree) -> Tree:
    """Return a tree in the shapes and shardings in which an update is computed: of moments if there are any."""
    if before:
        check_moments(**before)
        return carriers(next(iter(before.values())))
    return updates if params is None else tree.prune(params, updates, ("parameters", "gradients"))


def _directed(rule: Rule) -> Kernel:
    """The kernel of a rule that returns directions."""

    def kernel(_: None, grads: list[Tensor], *rest: Any) -> list[Tensor]:
        *moments, step = rest
        return _compat.foreach_mul(rule(grads, *moments, step.count), -step.rate)

    return kernel


def step_at(rate: Schedule, count: Tensor, grads: list[Tensor], **settings: Any) -> Step:
    """The numbers of the update after `count` others."""
    device = grads[0].device if grads else count.device
    return Step(count, (count.to(device, non_blocking=True) + 1).float(), rate_at(rate, count), **settings)


def owned(moments: Tree, *, donate: bool) -> Tree:
    """Moments that may be overwritten: copies, unless they are donated."""
    return moments if donate else tree.map(lambda x: like_leaf(x, clone(local_of(x))), moments)


# ----------------------------------------------------------------------------------------------------- a rule on leaves
def run_rule(
    kernel: Kernel,
    step: Step,
    values: list[Tensor] | None,
    grads: list[Tensor],
    moments: Sequence[list[Any]],
    home: Tree,
    context: UpdateContext,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Run a kernel on this rank's shards of all leaves, in place. Collective if ranks share a block of a moment."""
    # Leaves that the kernel takes as they are go through it at once. Strided or narrower ones go through copies of
    # chunks and are rounded once, so there are no wide moments of all leaves at once.
    kept = moments if values is None else [values, *moments]
    copied = not context.donate and (isinstance(step.scale, Tensor) or step.scale != 1.0)  # A kernel scales in place.
    try:
        if _alike([grads, *kept]):
            return kernel(values, [*map(clone, grads)] if copied else grads, *moments, step)
    except LayoutError:
        # Nothing has changed yet; with the names of the leaves it says more.
        _refuse_other_shards(values, grads, moments, home)
        raise
    _refuse_other_shards(values, grads, moments, home)
    kinds = [(_computed_in(tuple(map(_stored_in, x))) or g.dtype, g.device) for g, *x in zip(grads, *kept, strict=True)]
    ready = [
        all(isinstance(x, Tensor) and x.dtype == kind[0] and x.is_contiguous() for x in leaf)
        for kind, leaf in zip(kinds, zip(grads, *kept, strict=True), strict=True)
    ]
    result = dict(enumerate(values or ()))
    for kind in dict.fromkeys(kinds):
        direct = [i for i, other in enumerate(kinds) if ready[i] and other == kind]
        if direct:
            given = [clone(grads[i]) if copied else grads[i] for i in direct]
            parts = [[column[i] for i in direct] for column in moments]
            new = kernel(values and [values[i] for i in direct], given, *parts, step)
            result |= dict(zip(direct, new, strict=True))
    rest = [i for i, is_ready in enumerate(ready) if not is_ready]
    if rest:
        kept_moments = [column[i] for i in rest for column in moments]
        placed = not _all_tensors(kept_moments) or rounds_moments(kept_moments, context)
        placed = placed or (values is not None and rounds_by_key(values, context))
        leaves = leaves_of(home, context.shardings) if placed else [local_leaf(g.shape) for g in grads]
        if values is None:
            # Moments of 8 bits are computed in float32 even if their gradient is wider; the update is as wide as it.
            wider = [kinds[i][0] if _all_tensors(m[i] for m in moments) else wide(g.dtype) for i, g in enumerate(grads)]
            result |= {i: new_zeros(grads[i], dtype or wider[i]) for i in rest}
        parts = [Part(leaves[i], result[i], grads[i], [m[i] for m in moments], kinds[i]) for i in rest]
        _run_on_chunks(kernel, step, parts, context, in_place=values is not None, copied=copied)
    return [result[i] for i in range(len(grads))]


def _run_on_chunks(
    kernel: Kernel,
    step: Step,
    of_leaves: Sequence[Part],
    context: UpdateContext,
    *,
    in_place: bool,
    copied: bool,
) -> None:
    """Run a kernel on copies of chunks, and round what it computes: values in place, or updates into zeros."""
    key = functools.cache(lambda: step_key(context, step.count))

    def change(batch: Batch, parts: list[list[Tensor]], trial: bool) -> None:
        dtype = of_leaves[batch[0][0]].kind[0]
        old = [chunk.of(of_leaves[i].result) for i, chunk in batch]
        values = [x.to(dtype, copy=trial).contiguous() for x in old] if in_place else None
        given = [chunk.of(of_leaves[i].grad).to(dtype, copy=trial or copied).contiguous() for i, chunk in batch]
        wider = [[x.to(dtype).contiguous() for x in column] for column in parts]
        new = kernel(values, given, *wider, step)
        for role, column, computed in zip(ROLES, parts, wider, strict=False):
            changed = [
                (x, y if trial else round_moment(y, x.dtype, context, of_leaves[i].leaf, role, chunk, key))
                for (i, chunk), x, y in zip(batch, column, computed, strict=True)
                if x is not y
            ]
            _compat.foreach_copy_([x for x, _ in changed], [y for _, y in changed])
        if trial:
            return
        for (i, chunk), x, y in zip(batch, old, new, strict=True):
            if not in_place:
                x.copy_(y)
            elif x is not y:
                write_param(x, y, context, of_leaves[i].leaf, chunk, key)

    change_chunks(of_leaves, change, key=key, stochastic=context.rounding != "nearest", finite=step.finite)


def _alike(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether a kernel takes all tensors as they are, in one call."""
    dtypes = {getattr(x, "dtype", None) for column in columns for x in column}
    if len(dtypes) != 1 or not dtypes <= _WIDE or len({x.device for x in columns[0]}) != 1:
        return False
    return all(all(map(Tensor.is_contiguous, column)) for column in columns)


def _all_tensors(moments: Iterable[Any]) -> bool:
    """Whether no moment has to be decoded, which is done in chunks and to float32."""
    return all(isinstance(x, Tensor) for x in moments)


def _stored_in(x: Any) -> torch.dtype:
    return x.dtype if isinstance(x, Tensor) else torch.float32


@functools.lru_cache(maxsize=256)
def _computed_in(dtypes: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """The dtype in which parameters and moments of some dtypes are changed; a gradient makes it no wider."""
    return functools.reduce(torch.promote_types, map(wide, dtypes)) if dtypes else None


def _refuse_other_shards(
    values: list[Tensor] | None, grads: list[Tensor], moments: Sequence[list[Any]], home: Tree
) -> None:
    named: dict[str, Sequence[Tensor]] = {} if values is None else {"parameters": values}
    named["gradients"] = grads
    for role, column in zip(ROLES, moments, strict=False):
        named[role] = [*map(carrier_of, column)]
    refuse_other_shards(carriers(home), named)


def _zeros_of(moments: list[Any]) -> list[Tensor]:
    """Zeros in the shapes of moments, in the dtypes in which these are computed: float32 beside any of 8 bits."""
    plain = _all_tensors(moments)
    return [new_zeros(carrier_of(x), wide(x.dtype) if plain else torch.float32) for x in moments]
