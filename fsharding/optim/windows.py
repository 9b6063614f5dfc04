"""Update leaves that are kept in other tiers, in windows that are copied to the device or updated on the host.

While a window is updated, the next is copied in and the previous one out, on two more streams (`?x` waits for `!x`):

    in         copy in   !in
    compute    ?in       update    !updated
    out        ?updated  copy out  !out
    compute    ?out, after the update of the window after the next: only then is the memory free

For an elementwise optimizer a window has some leaves, or some rows of a leaf; otherwise one window has all leaves. All
ranks have the same windows, since an update may communicate. Windows change no bits; if a tier fails, no leaf changes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import ConfigError, listed, message
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import copied, is_away, tier_at_rest
from fsharding.comm.redistribute import in_buckets
from fsharding.comm.tier import DEVICE, compute_device, rows_together, tier_of
from fsharding.comm.transfers import InFlight, Transfer, Transfers
from fsharding.optim.base import UpdateContext, like_leaf
from fsharding.optim.chunked_update import rounds_by_key, rounds_moments
from fsharding.optim.state_copies import Piece
from fsharding.sharding.entries import places, state_leaves, state_structure, with_leaves
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.memory_kinds import Tier
from fsharding.sharding.named_sharding import NamedSharding, like, local_of, sharding_of

__all__ = ["WINDOW_BYTES", "in_windows", "start_in_windows", "through_windows"]

WINDOW_BYTES = 32 << 20
"""Bytes that are copied in for a window; a single row may have more."""

_MOST_WINDOWS = 64
"""A large state gets larger windows, since each one costs the host some milliseconds."""

_Factor: TypeAlias = float | Tensor

_Change: TypeAlias = Callable[[Tree, Tree, Tree, UpdateContext, _Factor], tuple[Tree, Tree]]
"""`change(grads, state, params, context, scale) -> (params, state)`, with None for the leaves of other windows."""


class _Values(NamedTuple):
    """The arguments of an update, as one tree."""

    grads: Tree
    state: Tree
    params: Tree


def through_windows(
    change: _Change, grads: Tree, state: Tree, params: Tree, context: UpdateContext, scale: _Factor, *, by_element: bool
) -> Any:
    """Run an update window by window where it is computed; return (parameters, state), each leaf in its tier."""
    # `change` gets the scalars of the context, and the scale, on the device of the window.
    values = _Values(grads, state, params)
    if context.on_host and not by_element:
        mend = "Leave compute= out to update them on the device, or use an elementwise optimizer such as fs.adamw."
        leaves = listed(sorted(context.on_host))
        text = f"cannot update {leaves} on the host: this optimizer isn't elementwise."
        raise ConfigError(message(text, mend=mend))
    named = tree.named_leaves(values) if context.may_be_away else {}
    away = {path: x for path, x in named.items() if is_away(x)}
    if not away:
        return change(grads, state, params, context, scale)
    owners = _owners(values)
    plan = _planned(values, owners, context) if by_element else None
    if plan is None:
        plan = [_Window(dict.fromkeys(tree.paths(params)), on_host=False)]
    facts = {False: (context, scale)}
    if any(window.on_host for window in plan):
        facts[True] = _on_host(context, scale)
    with _Windows(values, away, owners, context) as windows:
        after = values
        coming = windows.fetch(plan[0])
        for number, window in enumerate(plan):
            present = coming()
            if number + 1 < len(plan):
                coming = windows.fetch(plan[number + 1])
            after = windows.send(window, *change(*present, *facts[window.on_host]))
    return (after.params, after.state) if len(plan) == 1 else windows.result()


def _on_host(context: UpdateContext, scale: _Factor) -> tuple[UpdateContext, _Factor]:
    """Copy the scalars of an update to the host, and wait for them."""
    given = {name: getattr(context, name) for name in ("norm", "finite", "key", "step")}
    there = replace(context, **{name: x.cpu() for name, x in given.items() if x is not None})
    return there, scale.cpu() if isinstance(scale, Tensor) else scale


def start_in_windows(start: Callable[[Tree], Tree], params: Tree, moments: Mapping[str, NamedSharding]) -> Tree:
    """Make the first state of an elementwise optimizer without all of it on the device at once."""
    sizes = {path: local_of(x).nbytes if moments[path].is_away else 0 for path, x in tree.named_leaves(params).items()}
    groups = [*in_buckets(sizes, sizes.__getitem__, WINDOW_BYTES)]
    if len(groups) < 2:
        return start(params)
    # On meta tensors: the structure of the full state, without its memory.
    shape = start(tree.map(lambda x: like_leaf(x, local_of(x).to("meta")), params))
    parts = (tree.map_with_path(lambda path, x, of={*group}: x if path in of else None, params) for group in groups)
    return _merged(shape, map(start, parts))


def in_windows(leaves: Mapping[str, Any]) -> Iterator[list[str]]:
    """Group leaves, in order, by path, so that the device needs to hold copies of one window of them at a time."""
    away = {path: local_of(x).nbytes if is_away(x) else 0 for path, x in leaves.items()}
    return in_buckets(leaves, away.__getitem__, WINDOW_BYTES)


Rows: TypeAlias = tuple[int, int]
"""Start and end in dim 0 of a local tensor."""


class _Window(NamedTuple):
    """Parameters that are updated together, by name, with the rows of each (None for all); and where."""

    rows: Mapping[str, Rows | None]
    on_host: bool


class _Range(NamedTuple):
    """A parameter, or a range of its rows; bytes include its moments and gradient."""

    name: str
    rows: Rows | None
    bytes: int


def _planned(values: _Values, owners: Mapping[str, str], context: UpdateContext) -> list[_Window] | None:
    """Plan the windows; return None if a leaf that is away belongs to no parameter."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in sorted(tree.paths(values.params))}
    for path, x in state_leaves(values).items():
        if path in owners:
            parts[owners[path]][path] = x
        elif any(map(is_away, tree.leaves(x))):
            return None
    ranges = {name: _ranges(name, leaves, context) for name, leaves in parts.items()}
    limit = max(WINDOW_BYTES, sum(x.bytes for of_leaf in ranges.values() for x in of_leaf) // _MOST_WINDOWS)
    windows: list[_Window] = []
    for on_host in (True, False):
        known = (x for name in ranges if (name in context.on_host) == on_host for x in ranges[name])
        for bucket in in_buckets(known, lambda x: x.bytes, limit):
            found: dict[str, list[_Range]] = {}
            for x in bucket:
                found.setdefault(x.name, []).append(x)
            windows.append(_Window({name: _joined(found[name], ranges[name]) for name in found}, on_host))
    return windows


def _joined(some: Sequence[_Range], every: Sequence[_Range]) -> Rows | None:
    """Return the rows of consecutive ranges; None for all ranges of a leaf."""
    first, last = some[0].rows, some[-1].rows
    return None if len(some) == len(every) or first is None or last is None else (first[0], last[1])


def _ranges(name: str, leaves: Mapping[str, Any], context: UpdateContext) -> list[_Range]:
    """Split a parameter into ranges of rows if all its leaves are sharded alike, else return one range."""
    flat = [x for leaf in leaves.values() for x in tree.leaves(leaf)]
    # Bits of stochastic rounding depend on the index in the full leaf, which a range of rows lacks.
    stochastic = rounds_by_key(flat, context) or rounds_moments(
        (x for path, x in leaves.items() if path.startswith(_STATE)), context
    )
    first = flat[0]
    total = sum(math.prod(_most(x)) * x.element_size() for x in flat if is_away(x))
    alike = all(isinstance(x, DTensor) and (x.shape, x.placements) == (first.shape, first.placements) for x in flat)
    if alike and first.ndim and all(isinstance(x, Tensor) for x in leaves.values()) and not stochastic:
        shape, here = _most(first), local_of(first).shape
        step = rows_together(shape)
        # If other dims are sharded unevenly, ranks would disagree on the number of rows in an extent of the file.
        if step < shape[0] and all(n % m == 0 for n, m in zip(first.shape[1:], shape[1:], strict=True)):
            bounds = itertools.pairwise([*range(0, shape[0], step), shape[0]])
            # A rank with fewer rows than others has empty ranges: all ranks need the same windows.
            of_rank = [((min(a, here[0]), min(b, here[0])), b - a) for a, b in bounds]
            return [_Range(name, rows, total * count // shape[0]) for rows, count in of_rank]
    return [_Range(name, None, total)]


def _most(x: DTensor) -> tuple[int, ...]:
    """Return the largest local shape of a leaf over all ranks: the first rank's."""
    return sharding_of(x).first_shape(x.shape)


def _owners(values: _Values) -> dict[str, str]:
    """Map the path of each gradient, moment and parameter to its parameter."""
    result = {joined(field, name): name for field in ("grads", "params") for name in tree.paths(values.params)}
    held = state_leaves(values.state)
    for path, place in places(values.state, values.params).items():
        # A plain tensor, such as a count, is updated with every window.
        if (x := held.get(path)) is not None and (isinstance(x, DTensor) or not isinstance(x, Tensor)):
            result[joined("state", path)] = place.param
    return result


def _merged(like_tree: Tree, parts: Iterable[Tree]) -> Tree:
    """Return one tree of the leaves of all windows."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= state_leaves(part)
    return with_leaves(like_tree, found)


class _Copies:
    """Copies of groups of leaves, to the device or host that updates them and back, one group in at a time."""

    # `_coming` is the group in flight, without `_later`, by name: leaves that their tier has to read first. `leaving`
    # has what was sent, and `most` limits what may stay where it was updated. If the update runs on the host,
    # the host waits for copies from the device.

    def __init__(self, device: torch.device, most: Callable[[InFlight], int], *, on_host: bool) -> None:
        self._on_host = on_host
        self._target = torch.device("cpu") if on_host else device
        self._transfers = Transfers(device)
        self._coming: Transfer | None = None
        self._later: dict[str, Tensor] = {}
        self._most = most
        self.leaving = InFlight(device)

    def fetch(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy a group; `arrive` waits for it, and adds leaves that are read first."""
        self._later = {name: x for name, x in wanted.items() if _tier(x) is not DEVICE}
        for x in self._later.values():
            _tier(x).prefetch(x, self._target)
        return self._copied({name: x for name, x in wanted.items() if name not in self._later})

    def _copied(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moving = {name: x for name, x in values.items() if x.device != self._target}
        if not moving:
            return {**values}
        self._coming = self._transfers.fetch([*moving.values()], self._target)
        return {**values, **dict(zip(moving, self._coming.values, strict=True))}

    def arrive(self, here: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the fetched group; the compute stream or the host waits for it."""
        host = torch.device("cpu")
        here = {**here, **self._copied({name: _tier(x).get(x, host) for name, x in self._later.items()})}
        self._later = {}
        if self._coming is not None:
            self._transfers.wait(self._coming)
            if self._on_host:
                self._transfers.settle(self._coming)
            self._coming = None
        return here

    def send(self, values: Mapping[str, Tensor], tiers: Mapping[str, Tier], homes: Mapping[str, Tensor]) -> Any:
        """Start to copy a group to its tiers, and free groups before it; return where its tensors will be."""
        leaving = self._transfers.send([(x, tiers[name], homes.get(name)) for name, x in values.items()])
        self.leaving.shrink(self._most(self.leaving))
        self.leaving.add(leaving, [*values.values()])
        return dict(zip(values, leaving.values, strict=True))

    def close(self) -> None:
        """Have the host wait for all copies."""
        if self._coming is not None:
            self._transfers.wait(self._coming)
            self._coming = None
        self._later = {}
        self.leaving.settle()


def _tier(x: Tensor) -> Tier:
    """Return the tier that a tensor itself has; host memory counts as DEVICE."""
    return tier_of(x, x.device.type)


class _Windows:
    """Copies of the leaves of one update: a context, at whose end `UpdateContext.copies` may leave some in flight."""

    # `_after` has updated leaves at rest. For leaves that are updated in rows, `_homes` has the memory of the leaf, and
    # `_parts` has the rows in a tier that isn't written in place. `_casts` has casts of parameters on the device.

    def __init__(
        self, values: _Values, away: Mapping[str, DTensor], owners: Mapping[str, str], context: UpdateContext
    ) -> None:
        self._away = away
        self._owners = owners
        self._named = state_leaves(values)
        self._spec = state_structure(values)
        self._of: dict[str | None, list[tuple[int, Any]]] = {}
        for i, (path, x) in enumerate(self._named.items()):
            self._of.setdefault(owners.get(path), []).append((i, x))
        self._tiers = {path: tier_at_rest(x) for path, x in away.items()}
        self._can_fail = any(tier.can_fail for tier in self._tiers.values())
        self._donate, self._around = context.donate, context.copies
        device = compute_device(next(iter(away.values())).device_mesh.device_type)
        self._copies = {on: _Copies(device, self._around.most, on_host=on) for on in (False, True)}
        self._after: dict[str, Any] = {}
        self._homes: dict[str, Tensor] = {}
        self._casts: dict[str, Tensor] = {}
        self._parts: dict[str, list[Any]] = {}

    def __enter__(self) -> _Windows:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._copies[True].close()
        params = [path for path in self._tiers if path.startswith(_PARAMS)]
        if kind is None and all(path in self._casts for path in params):
            casts = {path.removeprefix(_PARAMS): like(self._named[path], x) for path, x in self._casts.items()}
            self._around.leave(self._copies[False].leaving, casts)
        else:
            # The next forward gathers these parameters, and the host may read them without a wait.
            self._copies[False].close()

    def fetch(self, window: _Window) -> Callable[[], _Values]:
        """Start to copy a window to where it is updated; return a function that waits for it."""
        leaves: list[Any] = [None] * len(self._named)
        # Leaves without a parameter, such as counts, are in every window.
        for name, rows in ((None, None), *window.rows.items()):
            for i, x in self._of.get(name, ()):
                leaves[i] = x if rows is None else like(x, local_of(x)[rows[0] : rows[1]])
        values = tree.unflatten(self._spec, leaves)
        named = {path: x for path, x in tree.named_leaves(values).items() if isinstance(x, Tensor)}
        wanted = {
            path: local_of(x)
            for path, x in named.items()
            if (_is_off_host(x) if window.on_host else path in self._tiers)
        }
        pieces: dict[str, Piece] = {path: (path, self._rows(path, window)) for path in wanted}
        self._around.plan({pieces[path]: x.nbytes for path, x in wanted.items() if not path.startswith(_GRADS)})
        early = {path: piece for path, piece in pieces.items() if self._around.has(piece)}
        copies = self._copies[window.on_host]
        coming = copies.fetch({path: x for path, x in wanted.items() if path not in early})
        return functools.partial(self._arrive, values, copies, coming, early)

    def _arrive(
        self, values: _Values, copies: _Copies, coming: dict[str, Tensor], early: Mapping[str, Piece]
    ) -> _Values:
        """Return a copied window; the compute stream or the host waits for it."""
        found = copies.arrive(coming)
        found |= {path: self._around.take(piece) for path, piece in early.items()}
        present = tree.map_with_path(lambda path, x: like_leaf(x, found[path]) if path in found else x, values)
        if self._can_fail and self._donate:
            # Leaves that aren't copied would be overwritten, but a file may still fail: then no leaf may have changed.
            kept = {path: x for path, x in tree.named_leaves(values).items() if path not in found}
            kept = {path: copied(x) for path, x in kept.items() if not path.startswith(_GRADS)}
            present = tree.map_with_path(lambda path, x: kept.get(path, x), present)
        return present

    def send(self, window: _Window, params: Tree, state: Tree) -> _Values:
        """Start to copy a window to its tiers, and free the previous one."""
        values = _Values(None, state, params)
        local = {path: local_of(x) for path, x in tree.named_leaves(values).items() if isinstance(x, Tensor)}
        homes = {path: home for path in local if (home := self._home(path, window)) is not None}
        given = {path: x for path, x in local.items() if path in self._tiers}
        for path, x in given.items():
            self._cast(path, x, self._rows(path, window))
        there = self._copies[window.on_host].send(given, self._tiers, homes)
        there |= {path: DEVICE.put(local[path], home) for path, home in homes.items() if path not in there}
        rest = tree.map_with_path(lambda path, x: like_leaf(x, there[path]) if path in there else x, values)
        for path, x in state_leaves(rest).items():
            if self._rows(path, window) is None:
                self._after[path] = x
            elif path not in self._homes:
                self._parts.setdefault(path, []).append(there[path])
        return rest

    def _cast(self, path: str, x: Tensor, rows: Rows | None) -> None:
        """Cast updated rows of a parameter, if it is needed on the device."""
        dtype = self._around.cast(path.removeprefix(_PARAMS)) if path.startswith(_PARAMS) else None
        if dtype is not None:
            if path not in self._casts:
                self._casts[path] = DEVICE.empty(tuple(local_of(self._named[path]).shape), dtype, x.device)
            self._casts[path][slice(*rows) if rows else ...].copy_(x)

    def _rows(self, path: str, window: _Window) -> Rows | None:
        owner = self._owners.get(path)
        return None if owner is None else window.rows.get(owner)

    def _home(self, path: str, window: _Window) -> Tensor | None:
        """Return memory for a leaf's result: the old leaf if donated, new memory if it is updated in rows, or None."""
        rows = self._rows(path, window)
        tier = self._tiers.get(path, DEVICE)
        reused = self._donate and not self._can_fail
        if rows is None:
            return local_of(self._away[path]) if reused and tier is not DEVICE else None
        if tier.can_fail:
            return None
        if path not in self._homes:
            old = local_of(self._named[path])
            self._homes[path] = old if reused else tier.empty(tuple(old.shape), old.dtype, old.device)
        return self._homes[path][rows[0] : rows[1]]

    def result(self) -> tuple[Tree, Tree]:
        """Return parameters and state after all windows."""
        joined = {path: torch.cat(parts) for path, parts in self._parts.items()}
        in_rows = {path: like(self._named[path], x) for path, x in {**self._homes, **joined}.items()}
        found = {**self._after, **in_rows}
        after = tree.unflatten(self._spec, [found.get(path, x) for path, x in self._named.items()])
        return after.params, after.state


_GRADS, _STATE, _PARAMS = (f"{field}." for field in _Values._fields)


def _is_off_host(x: Tensor) -> bool:
    local = local_of(x)
    return _tier(local) is not DEVICE or not local.is_cpu
