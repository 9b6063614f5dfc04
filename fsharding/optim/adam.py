"""AdamW with torch's fused kernel on local tensors (Kingma & Ba 2015; Loshchilov & Hutter 2019).

In: gradients, moments and main parameters in the same shardings. Out: updates to be added, and new moments.
The kernel rounds its last elements, past a multiple of its vector width, differently: they go through a padded copy.
It takes contiguous leaves of one dtype; others are updated in chunks, through a copy that stays in the cache.
Law: an element's update does not depend on its position in a shard, so all strategies agree bitwise.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding import _compat
from fsharding.comm.redistribute import in_buckets
from fsharding.errors import LayoutError
from fsharding.formats import Blocks
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    add_decay_,
    check_moments,
    check_update,
    clone,
    like,
    local_grads,
    local_leaves,
    new_zeros,
    next_count,
    refuse_other_shards,
    writable_leaves,
)
from fsharding.optim.chunked_update import (
    Chunk,
    change_leaves,
    init_moments,
    leaves_of,
    rebuilt,
    rounds_by_key,
    step_key,
    write_param,
)
from fsharding.optim.coded_moment import carriers, is_coded, moment_leaves
from fsharding.optim.schedules import Schedule, as_schedule, rate_at
from fsharding.optim.updates import change_slices
from fsharding.optim.validation import BELOW_1, FROM_0, check_moment_kind, check_settings
from fsharding.precision import wide
from fsharding.public import public
from fsharding.tree import Tree

__all__ = ["AdamState", "adamw"]

_VECTOR = 64
"""Elements that the kernel takes at once on every processor, or a multiple of that."""

_LARGE = 1 << 12
"""Size of a leaf from which on its whole vectors are updated in place, and only its end is copied."""

_CHUNK = 1 << 16
"""Elements of a strided leaf that are copied at once: few enough for a core's cache."""


_WIDE = {torch.float32, torch.float64}
"""Dtypes that the kernel computes in, so that leaves of one such dtype need no copy."""

_LABELS = ("parameters", "gradients", "mu", "nu")

_Columns: TypeAlias = Sequence[list[Tensor]]
"""Parameters, gradients, first and second moments, leaf by leaf."""


class AdamState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), first and second moments.

    Example:
        >>> state = fs.adamw(1e-3).init({"w": torch.ones(2)})
        >>> int(state.count), state.mu, state.nu
        (0, {'w': tensor([0., 0.])}, {'w': tensor([0., 0.])})
    """

    count: Tensor
    mu: Tree
    nu: Tree


class _Rule(NamedTuple):
    """The numbers of an AdamW that are the same in each update, by the names of its arguments."""

    rate: Schedule
    b1: float
    b2: float
    eps: float

    def settings(self, count: Tensor, *, decay: float, scale: float | Tensor, finite: Tensor | None) -> dict[str, Any]:
        """Those of torch's kernel for one update.

        Args:
            count: of the updates before, where the leaves are.
            decay: of the weights.
            scale: that gradients are multiplied with.
            finite: whether anything is updated at all; None for yes.
        """
        settings: dict[str, Any] = {"lr": rate_at(self.rate, count), "scale": scale, "finite": finite}
        return settings | {"beta1": self.b1, "beta2": self.b2, "eps": self.eps, "weight_decay": decay}


@public("fs.adamw")
def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: torch.dtype | Blocks | None = None,
) -> ContextTransformation:
    """AdamW: `-lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p)`.

    Args:
        learning_rate: a number, or a function of the number of updates so far.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, times the learning rate.
        moments: the dtype in which both are kept; by default that of the layout's `Precision`, or else float32 at
            least. An update is computed in float32 at least, and moments are rounded after it. Or a format of 8 bits,
            such as `fs.formats.MXFP8`: the moments of leaves of two dims and more and of 4096 elements and more are
            `fs.optim.CodedMoment`s. Of the second moment the root is kept, and it is rounded by key.

    Raises:
        ConfigError: numbers below 0, or decays of moments of 1 and more; all of them are listed. Moments in a dtype
            that kernels lack, or in a format that is none for moments.
        TreeError: from the update: no parameters, though they decay; or something else than gradients and this state.

    Example:
        >>> opt = fs.adamw(1e-3, weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
        >>> fs.optim.apply_updates(params, updates)["w"]
        tensor([0.9989, 0.9989])
    """
    above = {"learning_rate": learning_rate, "eps": eps, "weight_decay": weight_decay}
    check_settings((FROM_0, above), (BELOW_1, {"b1": b1, "b2": b2}))
    own = check_moment_kind(moments)
    rule = _Rule(as_schedule(learning_rate), b1, b2, eps)

    @public("fs.adamw(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> AdamState:
        mu = init_moments(params, own, context)
        return AdamState(torch.zeros((), dtype=torch.int64), mu, init_moments(params, own, context, root=True))

    @public("fs.adamw(...).update")
    def update(
        updates: Tree, state: AdamState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, AdamState]:
        check_update(AdamState, updates, state, params, decay=weight_decay)
        if any(map(is_coded, moment_leaves(state.mu))):
            held = carriers(state.mu)
            deltas = [new_zeros(x, torch.float32) for x in local_leaves(held)]
            after = _change_in_chunks(rule, deltas, updates, state, context, decay=0.0)
            if weight_decay:
                add_decay_(deltas, params, held, -rate_at(rule.rate, state.count) * weight_decay)
            return like(held, deltas), after
        grads, mu, nu = _inputs(updates, state, context.donate)
        deltas = [new_zeros(x, wide(x.dtype)) for x in mu]
        _change_whole(rule, deltas, grads, mu, nu, state, decay=0.0)
        if weight_decay:
            add_decay_(deltas, params, state.mu, -rate_at(rule.rate, state.count) * weight_decay)
        return like(state.mu, deltas), _successor(state, mu, nu, None)

    @public("fs.adamw(...).apply")
    def apply(
        updates: Tree,
        state: AdamState,
        params: Tree,
        context: UpdateContext = UpdateContext(),
        *,
        scale: float | Tensor = 1.0,
    ) -> tuple[Tree, AdamState]:
        donate = context.donate
        finite = context.finite
        check_update(AdamState, updates, state, params, decay=weight_decay)
        if any(map(is_coded, moment_leaves(state.mu))) or rounds_by_key(params, context):
            after: list[AdamState] = []

            def change_chunks(slices: list[Tensor]) -> list[Tensor]:
                main = [p if donate else clone(p) for p in slices]
                after.append(_change_in_chunks(rule, main, updates, state, context, decay=weight_decay, scale=scale))
                return main

            held = carriers(state.mu)
            return change_slices(params, held, change_chunks, donate=donate), after[0]
        columns = writable_leaves(params, updates, state.mu, state.nu) if donate else None
        if columns is not None:
            main, grads, mu, nu = columns
            _change_whole(rule, main, grads, mu, nu, state, decay=weight_decay, scale=scale, finite=finite)
            return params, AdamState(next_count(state.count, finite), state.mu, state.nu)
        grads, mu, nu = _inputs(updates, state, donate)
        if not donate and (isinstance(scale, Tensor) or scale != 1.0):
            grads = [clone(g) for g in grads]  # the kernel scales them in place

        def change(slices: list[Tensor]) -> list[Tensor]:
            main = [p if donate else clone(p) for p in slices]
            _change_whole(rule, main, grads, mu, nu, state, decay=weight_decay, scale=scale, finite=finite)
            return main

        changed = change_slices(params, state.mu, change, donate=donate)
        return changed, _successor(state, mu, nu, finite)

    return ContextTransformation(init, update, apply, masks=True)


def _change_whole(
    rule: _Rule,
    values: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    state: AdamState,
    *,
    decay: float,
    scale: float | Tensor = 1.0,
    finite: Tensor | None = None,
) -> None:
    """Changes values and moments in place, all leaves at once where the kernel takes them so."""
    device = values[0].device if values else state.count.device
    count = state.count.to(device, non_blocking=True)
    settings = rule.settings(count, decay=decay, scale=scale, finite=finite)
    _fused((values, grads, mu, nu), state.mu, (count + 1).float(), settings)


def _change_in_chunks(
    rule: _Rule,
    values: list[Tensor],
    updates: Tree,
    state: AdamState,
    context: UpdateContext,
    *,
    decay: float,
    scale: float | Tensor = 1.0,
) -> AdamState:
    """Changes values, and moments of which some are codes, or parameters that are rounded by key."""
    check_moments(mu=state.mu, nu=state.nu)
    held = carriers(state.mu)
    grads = local_grads(updates, held)
    shards = (values, grads, local_leaves(held), local_leaves(carriers(state.nu)))
    refuse_other_shards(held, dict(zip(_LABELS, shards, strict=True)))
    device = values[0].device if values else state.count.device
    count = state.count.to(device, non_blocking=True)
    settings = rule.settings(count, decay=decay, scale=scale, finite=context.finite)
    step = (count + 1).float()
    key = functools.cache(lambda: step_key(context, state.count))
    leaves = leaves_of(state.mu, context.shardings)

    def change(i: int, chunk: Chunk, parts: list[Tensor], trial: bool) -> None:
        value = values[i][chunk.place]
        grad = grads[i][chunk.place]
        dtype = _computed_in((value.dtype, grad.dtype, *(x.dtype for x in parts)))
        wide_parts = [x.to(dtype) for x in parts]
        columns = [x.to(dtype, copy=True).contiguous() for x in (value, grad)] + wide_parts
        _fused_dense([[x] for x in columns], step, settings)
        for x, new in zip(parts, wide_parts, strict=True):
            if x is not new:
                x.copy_(new)
        if not trial:
            write_param(value, columns[0], context, leaves[i], chunk, key)

    mu, nu = change_leaves(
        leaves,
        [moment_leaves(state.mu), moment_leaves(state.nu)],
        change,
        roles=("mu", "nu"),
        key=key,
        donate=context.donate,
        finite=context.finite,
    )
    return AdamState(next_count(state.count, context.finite), rebuilt(state.mu, mu), rebuilt(state.nu, nu))


def _inputs(updates: Tree, state: AdamState, donate: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    check_moments(mu=state.mu, nu=state.nu)
    grads = local_grads(updates, state.mu)
    mu, nu = ([x if donate else clone(x) for x in local_leaves(m)] for m in (state.mu, state.nu))
    return grads, mu, nu


def _successor(state: AdamState, mu: list[Tensor], nu: list[Tensor], finite: Tensor | None) -> AdamState:
    return AdamState(next_count(state.count, finite), like(state.mu, mu), like(state.nu, nu))


@functools.lru_cache(maxsize=256)
def _computed_in(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype of an update of (parameter, gradient, mu, nu): a gradient makes it no wider."""
    return functools.reduce(torch.promote_types, map(wide, (dtypes[0], *dtypes[2:])))


def _fused(columns: _Columns, moments: Tree, count: Tensor, settings: dict[str, Any]) -> None:
    """Runs the kernel: on all leaves at once where it takes them without a copy, else by dtypes and device.

    Args:
        columns: parameters, first and second moments, which it overwrites, and gradients, which it reads.
        moments: the tree of the first moments, for its paths.
        count: of updates, this one included: float32, 0-d.
        settings: of the kernel.
    """
    dtypes = {x.dtype for column in columns for x in column}
    devices = {x.device for x in columns[0]}
    alike = len(dtypes) == len(devices) == 1 and dtypes <= _WIDE
    try:
        if alike and all(all(map(Tensor.is_contiguous, column)) for column in columns):
            _fused_dense(columns, count, settings)
            return
    except LayoutError:
        # Nothing has changed yet; with the names of the leaves it says more.
        refuse_other_shards(moments, dict(zip(_LABELS, columns, strict=True)))
        raise
    refuse_other_shards(moments, dict(zip(_LABELS, columns, strict=True)))
    kinds = [*zip(*([x.dtype for x in column] for column in columns), [x.device for x in columns[0]], strict=True)]
    for kind in dict.fromkeys(kinds):
        *dtypes_of_leaf, device = kind
        step = count.to(device, non_blocking=True)
        dtype = _computed_in(tuple(dtypes_of_leaf))
        leaves = [leaf for leaf, other in zip(zip(*columns, strict=True), kinds, strict=True) if other == kind]
        ready = [{*dtypes_of_leaf} == {dtype} and all(x.is_contiguous() for x in leaf) for leaf in leaves]
        direct = [*itertools.compress(leaves, ready)]
        if direct:
            _fused_dense([*map(list, zip(*direct, strict=True))], step, settings)
        _fused_copies([*itertools.compress(leaves, map(operator.not_, ready))], dtype, step, settings)


def _fused_copies(
    leaves: Sequence[tuple[Tensor, ...]], dtype: torch.dtype, step: Tensor, settings: dict[str, Any]
) -> None:
    """Runs the kernel on copies of strided or narrower leaves, a chunk at a time; results are rounded once.

    So weights never pass through the dtype of the moments, and there are no wide moments of all leaves at once.
    """
    chunks = (chunk for leaf in leaves for chunk in zip(*map(_chunks, leaf), strict=True))
    limit = _CHUNK if step.device.type == "cpu" else _CHUNK << 8
    for batch in in_buckets(chunks, lambda chunk: chunk[0].numel(), limit):
        parts = [*map(list, zip(*batch, strict=True))]
        copies = [[x.to(dtype).contiguous() for x in part] for part in parts]
        _fused_dense(copies, step, settings)
        for k in (0, 2, 3):
            copied = [(x, copy) for x, copy in zip(parts[k], copies[k], strict=True) if x is not copy]
            _compat.foreach_copy_([x for x, _ in copied], [copy for _, copy in copied])


def _chunks(x: Tensor) -> list[Tensor]:
    """A leaf in pieces along its first dims; whole on other devices than the CPU, whose cache the chunks are for."""
    if x.device.type != "cpu" or x.numel() <= _CHUNK:
        return [x]
    rows = _CHUNK * x.shape[0] // x.numel()
    return list(x.split(rows)) if rows else [chunk for row in x.unbind(0) for chunk in _chunks(row)]


def _fused_dense(columns: _Columns, step: Tensor, settings: dict[str, Any]) -> None:
    """Runs the kernel on contiguous leaves: in place on whole vectors, and on all small leaves and ends in one copy."""
    sizes = [x.numel() for x in columns[0]]
    even = [i for i, n in enumerate(sizes) if n and n % _VECTOR == 0]
    small = [i for i, n in enumerate(sizes) if n % _VECTOR and n < _LARGE]
    large = [i for i, n in enumerate(sizes) if n % _VECTOR and n >= _LARGE]
    bodies: list[list[Tensor]] = []
    ends: list[list[Tensor]] = []
    for column in columns:
        flat = [(column[i].view(-1), sizes[i] // _VECTOR * _VECTOR) for i in large]
        bodies.append([column[i] for i in even] + [x[:cut] for x, cut in flat])
        ends.append([column[i] for i in small] + [x[cut:] for x, cut in flat])
    if ends[0]:
        padding = step.new_zeros(-sum(x.numel() for x in ends[0]) % _VECTOR, dtype=ends[0][0].dtype)
        for body, end in zip(bodies, ends, strict=True):
            body.append(_compat.packed([*end, padding]))
    if not bodies[0]:
        return
    _compat.fused_adamw_(bodies[0], bodies[1], bodies[2], bodies[3], [step] * len(bodies[0]), **settings)
    if ends[0]:
        for k in (0, 2, 3):
            _compat.foreach_copy_(ends[k], _compat.unpack(bodies[k][-1], ends[k]))
