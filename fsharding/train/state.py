"""The state of a run: parameters, optimizer state, random key, and the layout that places them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import (
    ArgumentError,
    ConfigError,
    DonatedError,
    LayoutError,
    SpecError,
    TreeError,
    message,
    report,
)
from fsharding.base.public import (
    Immutable,
    check_function,
    check_optimizer,
    is_optimizer,
    kind_of,
    missing_name,
    public,
    refuse,
)
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.leaf_memory import copied, placed, placed_as
from fsharding.comm.leaf_wires import wires_of_copies
from fsharding.comm.redistribute import redistribute, send
from fsharding.comm.tier_room import Planned, take_room
from fsharding.formats.precision import Precision, ScaleState
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import abstract
from fsharding.optim.base import GradientTransformation
from fsharding.optim.windows import start_in_windows
from fsharding.sharding import boxes, random
from fsharding.sharding.boxes import Box
from fsharding.sharding.entries import places, state_leaves, with_leaves
from fsharding.sharding.layout import Layout, check_fit
from fsharding.sharding.named_sharding import NamedSharding, local_of, typeof
from fsharding.sharding.random import LazyTensor
from fsharding.train.buffers import Buffers
from fsharding.train.first_values import Received, Sync, same_replicas, same_values
from fsharding.train.in_flight import arrived, carry, lock, unread
from fsharding.train.state_check import check_leaves, check_main

__all__ = [
    "TrainState", "constants_of", "donated_if_written", "init_params", "init_state", "main_of", "main_params",
    "own_part", "params_from_main", "refuse_changed", "refuse_unlike_replicas", "rounding_key", "sealed", "spread",
    "state_bytes", "state_from_params",
]  # fmt: skip


@dataclass(init=False, repr=False)
class TrainState(Immutable, instead="state = state.replace({name}=...)"):
    """Everything a run carries from step to step: a pytree with the layout as static data.

    Attributes can't be assigned (`FrozenError`); `replace` makes a state with different values.

    Attributes:
        step: Number of updates so far (int64, 0-d, on the CPU).
        params: Tree of DTensors in `layout.params`.
        main: Main parameters in `layout.main`, or None if `params` contain them.
        opt_state: State of the optimizer.
        loss_scale: Dynamic loss scale, or None.
        key: Random key (int64[2], on the CPU), constant during a run; each step folds its number in.
        layout: Placement of all leaves.
        buffers: Tensors that the forward writes, such as running statistics: plain tensors by name, equal on every
            rank, on the device of the mesh. {} for a model without any.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": fs.random.normal(key, (4,))}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> int(state.step), sorted(state.params)
        (0, ['w'])
    """

    step: Tensor
    params: Tree
    main: Tree
    opt_state: Tree
    loss_scale: ScaleState | None
    key: Tensor
    layout: Layout
    buffers: Buffers = field(default_factory=dict)

    @public
    def __init__(
        self,
        step: Tensor,
        params: Tree,
        main: Tree,
        opt_state: Tree,
        loss_scale: ScaleState | None,
        key: Tensor,
        layout: Layout,
        buffers: Buffers | None = None,
    ) -> None:
        values = (step, params, main, opt_state, loss_scale, key, layout, {} if buffers is None else buffers)
        vars(self).update(zip(_FIELDS, values, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the seal out: copied and unpickled tensors count their changes from zero."""
        arrived(self)
        return {name: x for name, x in vars(self).items() if name != _SEAL}

    def __getattr__(self, name: str) -> Any:
        if name in ("main", "opt_state") and arrived(self):
            return vars(self)[name]
        if name in _FIELDS:
            text = f"TrainState got a state that was donated: its {name} is gone."
            mend = "Use the state that the step returned, or make the step with donate=False."
            raise DonatedError(report(text, mend=mend))
        raise missing_name("TrainState", name, (*_FIELDS, "replace", "donate"), _ELSEWHERE)

    def __getitem__(self, name: Any) -> Any:
        mend = f"Write state.{name}." if name in _FIELDS else f"Its fields are {', '.join(_FIELDS)}."
        raise ArgumentError(report(f"TrainState is neither a dict nor a tuple, got [{name!r}].", mend=mend))

    def __repr__(self) -> str:
        """Show step, layout and bytes of this rank, without values of leaves."""
        if "layout" not in vars(self):
            return "TrainState(donated)"
        layout = self.layout
        parts = {"params": self.params, "main": self.main, "opt_state": self.opt_state}
        parts |= {"buffers": self.buffers or None}
        parameters = sum(math.prod(leaf.shape) for leaf in layout.leaves)
        sizes = [f"{name} {state_bytes(part):,}" for name, part in parts.items() if part is not None]
        rows = [
            f"step {_shown(self.step)}, {parameters:,} parameters in {len(layout.leaves)} leaves",
            f"{layout.strategy} on mesh {abstract(layout.mesh)}",
            f"bytes of this rank: {', '.join(sizes)}",
        ]
        rows += [f"loss scale {_shown(self.loss_scale.scale)}"] if self.loss_scale is not None else []
        return "\n  ".join(["TrainState", *rows])

    @public
    def replace(self, **changes: Any) -> TrainState:
        """Return a state with some fields changed.

        Args:
            **changes: New values by name of the field.

        Returns:
            A new state; all other fields are shared with this one.

        Raises:
            LayoutError: `params` is given without `main`, but main parameters are separate: the next step would
                overwrite the new parameters from `main`.
        """
        if "params" in changes and not {"main", "layout"} & {*changes} and self.main is not None:
            mend = "Give both, main=fs.shard(full, state.layout.main); or make a new state, with fs.state_from_params."
            raise LayoutError(message("got params without main.", mend=mend))
        result = TrainState(**{**{name: unread(self, name) for name in _FIELDS}, **changes})
        carry(self, result)
        return result

    def donate(self) -> TrainState:
        """Move all fields to a new state and return it; this one raises `DonatedError` from now on."""
        taken = self.replace()
        with lock:
            vars(self).clear()
        return taken


_LEAVES = "They are a tree, state.params; fs.tree.leaves(state.params) lists its leaves."
_ELSEWHERE = {
    "parameters": _LEAVES,
    "named_parameters": "They are a tree, state.params; fs.tree.named_leaves(state.params) has them by path.",
    "state_dict": "Save the state as it is: fs.checkpoint.save(path, state).",
    "load_state_dict": "Load a new one: state = fs.checkpoint.load(path, layout).",
    "grads": "Compute them: value, grads = fs.value_and_grad(loss_fn)(state.params, batch).",
    "grad": "Compute them: value, grads = fs.value_and_grad(loss_fn)(state.params, batch).",
    "apply_gradients": "Call fs.optim.apply_gradients(opt, grads, state.opt_state, state.params).",
    "optimizer": "Its state is state.opt_state; the optimizer itself is a pair of functions, such as fs.adamw(1e-3).",
    "tx": "Its state is state.opt_state; the optimizer itself is a pair of functions, such as fs.adamw(1e-3).",
    "mesh": "Write state.layout.mesh.",
    "strategy": "Write state.layout.strategy.",
    "to": "Make one elsewhere: fs.reshard(state, layout).",
    "cuda": 'Its layout sets the device: fs.plan_layout(model, fs.make_mesh(device="cuda")).',
}
"""Hints for attributes of other libraries' states."""

_FIELDS = tuple(f.name for f in fields(TrainState))
STATE_FIELDS = tuple(name for name in _FIELDS if name != "layout")
"""The fields that have leaves, in the order of a state's leaves."""

tree.register_node(
    TrainState,
    lambda s: ([getattr(s, name) for name in STATE_FIELDS], s.layout, STATE_FIELDS),
    lambda layout, children: TrainState(**dict(zip(STATE_FIELDS, children, strict=True)), layout=layout),
    fields=True,
)


def _shown(x: Any) -> str:
    """Format a 0-d tensor as a number, and anything else by its type: `repr` must not fail on a malformed state."""
    is_number = isinstance(x, Tensor) and x.numel() == 1 and not (x.is_meta or _compat.is_fake(x))
    return f"{x.item():,}" if is_number else type(x).__name__


class _Seal(NamedTuple):
    """Version counters of the parameters when a state was made; they reveal later in-place changes."""

    params: Tree  # compared by identity: a state made by `replace(params=...)` has no seal
    leaves: list[Any]
    versions: list[Any]


_SEAL = "_seal"


def sealed(state: TrainState) -> TrainState:
    """Record the parameters' version counters on a state, and return it."""
    if not torch.is_inference_mode_enabled():  # tensors have no version counters there
        leaves = tree.leaves(state.params)
        vars(state)[_SEAL] = _Seal(state.params, leaves, _compat.versions_of(leaves))
    return state


def refuse_changed(state: TrainState) -> None:
    """Refuse parameters that were changed in place since the state was made."""
    seal: _Seal | None = vars(state).get(_SEAL)
    if seal is None or seal.params is not state.params:
        return
    now = _compat.versions_of(seal.leaves)
    if now == seal.versions:
        return
    named = zip(tree.paths(seal.params), seal.leaves, strict=True)
    rows = [
        f"params.{path} is {typeof(x)}"
        for (path, x), before, after in zip(named, seal.versions, now, strict=True)
        if before != after
    ]
    mend = "Make new ones on every rank, state = state.replace(params=fs.tree.map(f, state.params))"
    if state.main is not None:
        mend += "; main parameters are separate here, so change those: main = fs.tree.map(f, state.main),"
        mend += " and params=fs.params_from_main(main, state.params, state.layout)"
    rule = "got parameters that were changed in place since the state was made."
    raise ArgumentError(message(rule, rows, f"{mend}."))


def refuse_unlike_replicas(state: TrainState) -> None:
    """Compare replicated values of a state that some rank made by `replace`. Collective."""
    seal: _Seal | None = vars(state).get(_SEAL)
    named = tree.named_leaves(state).items()
    held = {path: x for path, x in named if isinstance(x, DTensor) or path.startswith("buffers.")}
    same_replicas(held, state.layout.mesh, asked=seal is None or seal.params is not state.params)


@contextmanager
def donated_if_written(state: TrainState) -> Generator[None]:
    """Donate a state if the block raises after it has written to it: a half-updated state must not be used."""
    counts = not torch.is_inference_mode_enabled()  # tensors have no version counters there
    fields = [unread(state, name) for name in STATE_FIELDS]
    leaves = [local_of(x) for x in tree.leaves(fields) if isinstance(x, Tensor)] if counts else []
    before = [_compat.version_of(x) for x in leaves]
    try:
        yield
    except BaseException:
        if not counts or [_compat.version_of(x) for x in leaves] != before:
            state.donate()
        raise


def _check_start(opt: Any, key: Any, layout: Any) -> None:
    """Refuse arguments of wrong types, and a key and a layout that are swapped."""
    check_optimizer(opt)
    if not isinstance(layout, Layout):
        swapped = isinstance(key, Layout)
        mend = "Swap the two: (..., key, layout)." if swapped else "Plan one: layout = fs.plan_layout(model, mesh)."
        raise refuse("a key, then a Layout", layout, mend)
    if isinstance(layout.mesh, AbstractMesh):
        rule = f"cannot place a tensor on the abstract mesh {layout.mesh}."
        mend = "Use fs.make_mesh: layout = layout.with_mesh(fs.make_mesh(dp=-1))."
        raise SpecError(message(rule, mend=mend))


def init_params(draws: Tree, layout: Layout, kind: str = "params", received: Received | None = None) -> Tree:
    """Evaluate this rank's slices of lazy tensors."""

    def place(draw: Any, leaf: Any) -> DTensor | None:
        sharding: NamedSharding = getattr(leaf, kind)
        if kind == "main" and not leaf.trainable:
            return None
        dtype = layout.param_dtype(leaf) if kind == "params" else layout.precision.main_dtype(leaf.init)
        at_rest = sharding.shape_at_rest(leaf.shape)
        if _compat.makes_fakes():
            device = sharding.device_mesh().device_type
            return placed(torch.empty(sharding.local_shape(leaf.shape), dtype=dtype, device=device), sharding, at_rest)
        local = own_part(draw if received is None else received(draw), sharding)
        # Through the main dtype, so that parameters start as the rounded main parameters in every layout.
        return placed(local.to(layout.precision.main_dtype(leaf.init)).to(dtype), sharding, at_rest)

    leaves = tree.flatten_up_to(layout.structure, draws, ("the layout", "the model"))
    check_fit(layout, leaves, ((leaf.shape, leaf.init) for leaf in layout.leaves))
    return tree.unflatten(layout.structure, [place(d, leaf) for d, leaf in zip(leaves, layout.leaves, strict=True)])


def own_part(full: Any, sharding: NamedSharding) -> Tensor:
    """Copy this rank's part of a full tensor, or evaluate it if the tensor is lazy."""

    def part(box: Box) -> Tensor:
        if isinstance(full, LazyTensor):
            return full.slice(box)
        # A copy even of the full tensor: a state shares no memory with what it was made of.
        return full[tuple(slice(a, b) for a, b in box)].clone(memory_format=torch.contiguous_format)

    grid = sharding.grid(full.shape)
    parts = [] if grid is None else [*boxes.grid_boxes(grid)]
    if len(parts) == 1:
        return part(parts[0][0])
    local = torch.empty(sharding.local_shape(full.shape), dtype=full.dtype)
    for box, place in parts:
        local[place] = part(box)
    return local


@public
def init_state(
    model: Any,
    opt: GradientTransformation,
    key: Tensor,
    layout: Layout,
    *,
    buffers: Buffers | None = None,
    sync: Sync | None = None,
) -> TrainState:
    """Make the first state of a run. Collective over the ranks of the layout's mesh.

    Each rank evaluates only its own slices of random leaves; values are bitwise identical in every layout. Full tensors
    are never sent unless `sync` is given.

    Args:
        model: A `Model`, or a function `key -> tree of LazyTensors or tensors`.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        key: Random key, int64[2], from which init and all steps derive theirs. Equal on every rank.
        layout: Placement of all leaves. Moments get the dtype `layout.precision.moments` unless `opt` sets one.
        buffers: First values of `state.buffers` by name, equal on every rank. Default: those of a functionalized
            module.
        sync: None to compare the values that ranks hold, such as weights of a module, and refuse different ones.
            "rank0" to send the values, buffers and constants of the mesh's first rank to all; other ranks may then
            have the module on the meta device.

    Returns:
        The state before the first step.

    Raises:
        ArgumentError: An argument has a wrong type, such as an `nn.Module`, two are swapped, or `sync` is unknown.
        LayoutError: The layout was planned for different shapes or dtypes; all such leaves are listed.
        TreeError: The layout was planned for a different tree.
        ConfigError: Ranks have different keys, values or buffers, or one random leaf is used twice. Every rank raises
            and lists all such leaves.
        DiskError: A rank's disk lacks room for what the strategy keeps there. Every rank raises.

    Example:
        >>> init = lambda key: {"w": fs.random.normal(key, (4, 8))}
        >>> layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> state = fs.init_state(init, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> fs.unshard(state.params["w"]).shape
        torch.Size([4, 8])
    """
    if is_optimizer(model) and not is_optimizer(opt):
        raise refuse("a model, then an optimizer", model, "Swap the two.")
    make = getattr(model, "init", model)
    if issubclass(type(make), dict | list | tuple):
        mend = "Start from existing parameters with fs.state_from_params(params, opt, key, layout)."
        raise refuse("a Model, or a function of a key", make, mend)
    check_function("a Model, or a function of a key", make, 1, exactly=True)
    _check_start(opt, key, layout)
    with _compat.with_values():
        init_key, run_key = random.split(key).unbind(0)
        draws = make(init_key)
        _refuse_shared_draws(draws)
        first = _first_buffers(getattr(model, "init_buffers", dict)() if buffers is None else buffers)
        named = {f"params.{path}" if path else "params": x for path, x in tree.named_leaves(draws).items()}
        constants = constants_of(model)
        named |= {f"buffers.{name}": x for name, x in {**constants, **first}.items()}
        received = same_values(named, layout.mesh, sync, {"key": str(run_key.tolist())})
        first = {name: received(x) for name, x in first.items()}
        _put(constants, received)
        run_key = run_key.clone()
    # After the last error that only some ranks could raise, and before the first tensor of the state is made.
    take_room(layout, _planned(layout, opt))
    params = init_params(draws, layout, received=received)
    main = init_params(draws, layout, "main", received) if layout.has_main else None
    # Quantized parameters are made of their main copies, as after an update.
    if main is not None and any(layout.rounds(leaf) is not None for leaf in layout.leaves):
        params = spread(main, params, layout, donate=True, key=rounding_key(run_key, _no_updates(), layout))
    return _first_state(params, main, opt, run_key, layout, first)


def _no_updates() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _first_state(
    params: Tree, main: Tree, opt: GradientTransformation, key: Tensor, layout: Layout, buffers: Buffers
) -> TrainState:
    """Make the state before the first step; `main` is None if the parameters contain it."""
    opt_state = _first_moments(opt, main if main is not None else _slices(params, layout), layout)
    scale = layout.precision.init_scale()
    return sealed(TrainState(_no_updates(), params, main, opt_state, scale, key, layout, _owned(buffers, layout)))


def _planned(layout: Layout, opt: GradientTransformation) -> Iterator[Planned]:
    """Yield the leaves of a state; lazily, since only a tier that can run out of room plans the optimizer's."""
    yield from (entry.planned for entry in layout.entries(opt) if entry.planned is not None)


def _first_buffers(buffers: Any) -> Buffers:
    """Refuse buffers that aren't plain tensors by name."""
    if not isinstance(buffers, Mapping):
        raise refuse("buffers= as tensors by name", buffers, "Give a dict: {'mean': torch.zeros(4)}.")
    odd = [
        f"{name!r} is {kind_of(x)}"
        for name, x in buffers.items()
        if not isinstance(name, str) or not isinstance(x, Tensor) or isinstance(x, DTensor)
    ]
    if odd:
        mend = "Give a flat dict of plain tensors, the same on every rank: {'mean': torch.zeros(4)}."
        raise ArgumentError(message("takes buffers as plain tensors by name.", odd, mend))
    return buffers


def _owned(buffers: Buffers, layout: Layout) -> Buffers:
    """Copy buffers to the device of the mesh: a state never shares memory with a module."""
    assert isinstance(layout.mesh, DeviceMesh)
    device = layout.mesh.device_type
    if _compat.makes_fakes():
        return {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in buffers.items()}
    return {name: x.detach().to(device, copy=True) for name, x in buffers.items()}


def _first_moments(opt: GradientTransformation, trained: Tree, layout: Layout) -> Tree:
    """Make the first optimizer state in a layout."""
    kept = layout.precision.moments
    full = layout.meta_main()

    def start(params: Tree) -> Tree:
        state = opt.start(params, moments=kept, shardings=layout.main, whole=full, stacked=layout.stacked)
        known = layout.moments(state)

        def place(path: str, x: Any) -> Any:
            entry = known.get(path) if isinstance(x, DTensor) else None
            if entry is None or local_of(x).is_meta:
                return x
            return placed_as(x, entry.sharding)

        return tree.map_with_path(place, state)

    if not opt.with_context().by_element:
        return start(trained)
    return start_in_windows(start, trained, {leaf.path: leaf.moments for leaf in layout.leaves})


def _refuse_shared_draws(draws: Tree) -> None:
    """Refuse one random tensor at two leaves: they would start equal and be trained separately."""
    paths: dict[int, list[str]] = {}
    for path, x in tree.named_leaves(draws).items():
        if isinstance(x, LazyTensor) and x.kind != "full":
            paths.setdefault(id(x), []).append(f"params.{path}")
    if rows := [f"{', '.join(same)} are one LazyTensor" for same in paths.values() if len(same) > 1]:
        mend = "Use one key per leaf: first, second = fs.random.split(key). For equal values, call twice with one key."
        raise ConfigError(message("got one LazyTensor at several leaves.", rows, mend))


@torch.no_grad()
def _put(constants: Mapping[str, Tensor], received: Received) -> None:
    """Write received constants to the model's own tensors."""
    for x in constants.values():
        if (value := received(x)) is not x:
            x.copy_(value)


def constants_of(model: Any) -> Mapping[str, Tensor]:
    """Return the tensors that a model computes with besides its parameters."""
    constants = getattr(model, "constants", None)
    return {} if constants is None else constants()


@public
def state_from_params(
    params: Tree, opt: GradientTransformation, key: Tensor, layout: Layout, *, buffers: Buffers | None = None
) -> TrainState:
    """Make the first state of a run from existing parameters, such as those of `fs.foreign.load_weights`. Collective.

    Args:
        params: Tree of DTensors, owned by the state afterwards: main parameters, in `layout.main` and the main dtype
            (float32 by default); frozen leaves in `layout.params`.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        key: Random key, int64[2]; the steps use the same keys as after `init_state` with it.
        layout: Placement of all leaves, from `plan_layout`.
        buffers: First values of `state.buffers`, equal on every rank, such as `net.init_buffers()`. Default: none.

    Returns:
        The state before the first step.

    Raises:
        ArgumentError: An argument has a wrong type, or key and layout are swapped.
        ConfigError: Ranks have different keys or buffers, or different values of one shard. Every rank raises.
        LayoutError: Parameters have different shapes, dtypes or shardings; all are listed.
        TreeError: The layout was planned for a different tree.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> state = fs.state_from_params(params, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> int(state.step)
        0
    """
    _check_start(opt, key, layout)
    given = tree.flatten_up_to(layout.structure, params, ("the layout", "params"))
    wanted = ((leaf.home.shape_at_rest(leaf.shape), layout.precision.main_dtype(leaf.init)) for leaf in layout.leaves)
    check_fit(layout, given, wanted)
    trained = [x if leaf.trainable else None for x, leaf in zip(given, layout.leaves, strict=True)]
    main = tree.unflatten(layout.structure, trained)
    check_main(main, params, layout)
    run_key = random.split(key)[1].clone()
    first = _first_buffers({} if buffers is None else buffers)
    named = {f"buffers.{name}": x for name, x in first.items()}
    same_values(named, layout.mesh, facts={"key": str(run_key.tolist())}, mend="")
    same_replicas({f"params.{path}": x for path, x in tree.named_leaves(params).items()}, layout.mesh)
    take_room(layout, _planned(layout, opt))
    computed = spread(main, params, layout, key=rounding_key(run_key, _no_updates(), layout))
    return _first_state(computed, main if layout.has_main else None, opt, run_key, layout, first)


def refrozen(state: TrainState, layout: Layout, opt: GradientTransformation) -> TrainState:
    """Freeze or unfreeze leaves as in a layout; leaves trained in both keep values and moments."""
    old = state.layout
    mains = tree.flatten_up_to(old.structure, main_of(state))
    both = [*zip(old.leaves, layout.leaves, tree.leaves(state.params), mains, strict=True)]
    values = tree.unflatten(old.structure, [p if main is None else main for *_, p, main in both])
    targets = tree.unflatten(old.structure, [new.main if new.trainable else new.params for _, new, *_ in both])
    fresh = state_from_params(tree.map(copied, redistribute(values, targets)), opt, state.key, layout)
    before = state_leaves(state.opt_state)
    kept = {leaf.path for leaf in layout.leaves if leaf.trainable}
    gone = before.keys() - state_leaves(fresh.opt_state).keys()
    owners = places(state.opt_state, state.params)
    if rows := [f"opt_state.{path}" for path in gone if path not in owners or owners[path].param in kept]:
        mend = "Pass the optimizer that the state was made with: opt=..."
        raise TreeError(message("got a state of a different optimizer.", rows, mend))

    def same(new: Tree, of_old: Tree) -> Tree:
        """Return the old leaf where it is trained, or frozen, in both layouts; else the new one."""
        news, olds = (tree.flatten_up_to(old.structure, x) for x in (new, of_old))
        pairs = zip(both, news, olds, strict=True)
        return tree.unflatten(old.structure, [y if a.trainable == b.trainable else x for (a, b, *_), x, y in pairs])

    main = fresh.main
    if main is not None and state.main is not None:
        main = same(main, state.main)
    params = same(fresh.params, state.params)
    opt_state = with_leaves(fresh.opt_state, before)
    return sealed(state.replace(params=params, main=main, opt_state=opt_state, layout=layout))


@public
def main_params(params: Tree, layout: Layout) -> Tree:
    """Slice parameters into main parameters: views in `layout.main`. Nothing is sent.

    Args:
        params: Parameters in `layout.params`.
        layout: Their layout.

    Returns:
        The tree of DTensors in `layout.main`; None for frozen leaves.

    Raises:
        LayoutError: Parameters don't match the layout; all are listed.
        TreeError: The layout was planned for a different tree.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(1))
        >>> fs.main_params(fs.shard({"w": torch.ones(4)}, layout), layout)["w"].dtype
        torch.float32
    """
    check_leaves(params, layout)
    return _slices(params, layout)


def _slices(params: Tree, layout: Layout) -> Tree:
    return redistribute(tree.prune(params, layout.main, ("params", "the layout")), layout.main)


def main_of(state: TrainState) -> Tree:
    """Return the main parameters of a state, separate or not; None for frozen leaves."""
    main = unread(state, "main")
    return main if main is not None else _slices(state.params, state.layout)


@public
def params_from_main(
    main: Tree, params: Tree, layout: Layout, *, donate: bool = False, key: Tensor | None = None
) -> Tree:
    """Derive parameters from updated main parameters: cast, and all-gather if they are less sharded. Collective.

    Weights are quantized before they are sent if the layout's precision has a weight format.

    Args:
        main: Main parameters in `layout.main`; None for frozen leaves.
        params: Current parameters in `layout.params`; frozen leaves are returned as they are.
        layout: Layout of both trees.
        donate: Whether the memory of `params` may be overwritten. Default: False.
        key: Random key, int64[2], for a format with stochastic rounding.

    Returns:
        The new parameters in `layout.params`.

    Raises:
        ConfigError: Rounding is stochastic, and no key is given.
        LayoutError: Leaves don't match the layout; all are listed.
        TreeError: The layout was planned for a different tree.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(1))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> main = fs.tree.map(lambda x: x - 1, fs.main_params(params, layout))
        >>> fs.unshard(fs.params_from_main(main, params, layout)["w"])
        tensor([0., 0., 0., 0.])
    """
    check_main(main, params, layout)
    return spread(main, params, layout, donate=donate, key=key)


def rounding_key(key: Tensor, step: Tensor, layout: Layout, precision: Precision | None = None) -> Tensor | None:
    """Return the key of stochastic rounding after `step` updates; None if nothing rounds so. The host reads nothing."""
    stochastic = layout.precision.stochastic_weights or (precision or layout.precision).stochastic_terms
    return random.fold_in_count(key, step) if stochastic else None


def spread(main: Tree, params: Tree, layout: Layout, *, donate: bool = False, key: Tensor | None = None) -> Tree:
    """Do `params_from_main` on leaves that were checked already."""
    targets = [leaf.params if leaf.trainable else None for leaf in layout.leaves]
    dtypes = [layout.param_dtype(leaf) if leaf.trainable else None for leaf in layout.leaves]
    flat = tree.flatten_up_to(layout.structure, main, ("the layout", "main"))
    before = tree.flatten_up_to(layout.structure, params, ("the layout", "params"))
    merged = [p if m is None else m for p, m in zip(before, flat, strict=True)]
    values, where, kinds = (tree.unflatten(layout.structure, x) for x in (merged, targets, dtypes))
    into = params if donate else None
    wires = wires_of_copies(flat, layout, key)
    return send(values, where, BucketQueue(0), dtypes=kinds, into=into, wires=wires).wait()


@public
def state_bytes(state: Tree) -> int:
    """Count the bytes of all local tensors of a tree.

    Args:
        state: A `TrainState`, or any tree with DTensors or plain tensors; other leaves count 0.

    Returns:
        Bytes on this rank.

    Example:
        >>> fs.debug.state_bytes({"w": torch.zeros(8), "step": 3})
        32
    """
    return sum(local_of(x).nbytes for x in tree.leaves(state) if isinstance(x, Tensor))
