"""Predict the traffic and the memory of a train step without devices, other ranks, or memory for tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat, tree
from fsharding.base.devices import accelerator
from fsharding.base.errors import BatchError, LayoutError, MeshError, message
from fsharding.base.public import Immutable, kind_of, public, refuse
from fsharding.comm.counters import Traffic, count_bytes
from fsharding.comm.stream_log import at_peak, recording_streams
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.mesh.device_mesh import abstract, coordinate, make_mesh, set_mesh
from fsharding.mesh.groups import groups_of_another_world
from fsharding.mesh.meeting import kept_as_it_was
from fsharding.optim.base import GradientTransformation
from fsharding.sharding import random
from fsharding.sharding.layout import Layout, on_mesh
from fsharding.train.buffers import Buffers
from fsharding.train.state import TrainState, init_state
from fsharding.train.step import device_of, make_train_step

__all__ = ["ExpectedMemory", "FakeRank", "expected_memory", "expected_traffic", "fake_step"]

T = TypeVar("T")


@public
def expected_traffic(
    model: Any,
    opt: GradientTransformation,
    layout: Layout,
    batch: Any,
    *,
    coord: Mapping[str, int] | None = None,
    buffers: Buffers | None = None,
    **options: Any,
) -> Traffic:
    """Predict the calls and bytes that one rank sends in a train step.

    Runs one step on fake tensors (shapes without values) as the rank at `coord` of a mesh of any size. Nothing is sent,
    and no process group is needed; an existing one is kept. No other thread may communicate during the call. A decoder
    takes 0.2 to 0.4 s of a core per layer, whatever its sizes.

    Args:
        model: A `Model` or a loss function, as in `make_train_step`. Collectives in it use the current mesh.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        layout: Layout of the state, on an abstract mesh or one with devices.
        batch: Batch of this rank, a tree of tensors `[B, ...]`, which may be on the meta device.
        coord: Coordinate of the rank along each axis; a missing axis is 0. Default: this process's coordinate, or the
            first rank of an abstract mesh.
        buffers: First values of `state.buffers`, as in `init_state`.
        **options: Settings of the step, as in `make_train_step`.

    Returns:
        Calls and bytes by axes of the mesh. They are exact, except bytes over `ep`: the choices of a router depend on
        values, so all ranks of `ep` count as if they got equally many tokens.

    Raises:
        ArgumentError: An argument has a wrong type.
        BatchError: The batch has no leaf, or one that isn't a tensor.
        MeshError: `coord` is outside the mesh.

    Example:
        >>> loss = lambda params, batch: (batch["x"] @ fs.gather_unit(params)["w"]).square().mean()
        >>> mesh = fs.AbstractMesh(("dp",), (2,))
        >>> layout = fs.plan_layout({"w": fs.random.zeros((8, 4))}, mesh, strategy=fs.zero(3))
        >>> traffic = fs.debug.expected_traffic(loss, fs.adamw(1e-3), layout, {"x": torch.ones(3, 8)})
        >>> traffic.by_axes[("dp",)].calls  # gather, reduce-scatter, and the sums of losses and norms
        4
    """
    rank = FakeRank(coord)
    return fake_step(lambda *_: count_bytes(), model, opt, layout, batch, rank=rank, buffers=buffers, **options)


class ExpectedMemory(Immutable, int, instead="fs.debug.expected_memory(...), with other arguments"):
    """Peak bytes, with the bytes by purpose as `at_peak`; see `expected_memory`."""

    at_peak: dict[tuple[str, str], int]

    def __new__(cls, at_peak: dict[tuple[str, str], int]) -> ExpectedMemory:
        """Add up the bytes of all purposes."""
        result = super().__new__(cls, sum(at_peak.values()))
        vars(result)["at_peak"] = at_peak
        return result

    def __getnewargs__(self) -> tuple[dict[tuple[str, str], int]]:
        return (self.at_peak,)


@public
def expected_memory(
    model: Any,
    opt: GradientTransformation,
    layout: Layout,
    batch: Any,
    *,
    coord: Mapping[str, int] | None = None,
    buffers: Buffers | None = None,
    **options: Any,
) -> ExpectedMemory:
    """Predict the peak memory of one rank of an accelerator in a train step.

    Runs two steps on fake tensors, as `expected_traffic` does, and adds up all allocations: state, batch, gathered
    units, activations and gradients. Workspaces of kernels and unused memory of the allocator aren't counted.
    `Layout.memory` has the memory between steps.

    Args:
        model: A `Model` or a loss function, as in `make_train_step`.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        layout: Layout of the state, on an abstract mesh or one with devices.
        batch: Batch of this rank, a tree of tensors `[B, ...]`, which may be on the meta device.
        coord: Coordinate of the rank along each axis, as in `expected_traffic`.
        buffers: First values of `state.buffers`, as in `init_state`.
        **options: Settings of the step, as in `make_train_step`.

    Returns:
        Peak bytes, with each tensor rounded up to 512 as by torch's allocators. On the mesh of an accelerator exact
        but for some KB of numbers that ranks compare. On an abstract mesh an estimate with the kernels of a CPU, within
        15 % for small decoders; offloaded activations count as if they stayed. If the strategy keeps anything off the
        device, the accelerator of this machine is used.
        Its `at_peak` has the bytes by category and name, the largest first: "params", "opt_state", "batch" by leaf,
        "gathered weights", "gradients" that are sent or reduced, "activations" with other gradients by unit, and
        "update", which includes the next state without `donate=True`.

    Raises:
        ArgumentError: An argument has a wrong type.
        BatchError: The batch has no leaf, or one that isn't a tensor.
        LayoutError: The strategy keeps something off the device, and this machine has no accelerator.
        MeshError: `coord` is outside the mesh.

    Example:
        >>> loss = lambda params, batch: (batch["x"] @ fs.gather_unit(params)["w"]).square().mean()
        >>> mesh = fs.AbstractMesh(("dp",), (4,))
        >>> layout = fs.plan_layout({"w": fs.random.zeros((256, 64))}, mesh, strategy=fs.zero(3))
        >>> peak = fs.debug.expected_memory(loss, fs.adamw(1e-3), layout, {"x": torch.ones(8, 256)}, donate=True)
        >>> peak > layout.memory(fs.adamw(1e-3)).total
        True
        >>> peak.at_peak["params", "w"]  # float32[64, 64], this rank's part
        16384
    """
    device = _device_with_memory(layout)
    rank = FakeRank(coord, device)
    # Two steps: the first one moves the state's counts to the device.
    log = fake_step(recording_streams, model, opt, layout, batch, rank=rank, buffers=buffers, steps=2, **options)
    return ExpectedMemory(at_peak(log.rows, device))


class FakeRank(NamedTuple):
    """The rank to simulate. Default: this process, or the first rank of an abstract mesh."""

    coord: Mapping[str, int] | None = None
    device_type: str | None = None  # default: the mesh's


def fake_step(
    around: Callable[..., AbstractContextManager[T]],
    model: Any,
    opt: GradientTransformation,
    layout: Layout,
    batch: Any,
    *,
    rank: FakeRank,
    buffers: Buffers | None = None,
    steps: int = 1,
    **options: Any,
) -> T:
    """Run steps on fake tensors as one rank of a mesh, inside of `around(state, batch)`; see `expected_traffic`."""
    shape = abstract(_checked(layout).mesh)
    shapes = _shapes(batch)
    number = _rank(shape, coordinate(layout.mesh) if rank.coord is None else rank.coord)
    device: Any = rank.device_type or device_of(layout)
    step = make_train_step(model, opt, **options)
    first = getattr(model, "init_buffers", dict)() if buffers is None else buffers
    with kept_as_it_was(), groups_of_another_world(), _compat.fake_world(number, shape.size), _compat.fake_tensors():
        mesh = _mesh(shape, device)
        state = _state(opt, on_mesh(layout, mesh), first)
        here = tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), shapes)
        with set_mesh(mesh), around(state, {"batch": here}) as seen:
            for _ in range(steps):
                state, _ = step(state, here)
    return seen


def _device_with_memory(layout: Layout) -> str:
    """Return a device type whose memory can be told from all other memory that a layout uses."""
    device = device_of(_checked(layout))
    is_abstract = isinstance(layout.mesh, AbstractMesh)
    away = [str(choice) for choice in layout.strategy.memory if is_abstract or choice.tier.can_fail]
    if away and is_abstract:
        device = accelerator()
    if away and device == "cpu":
        text = "needs an accelerator, to count its memory apart from host memory and files, and found none."
        mend = "Call it on a machine with one, or read layout.memory(opt): the bytes of each kind between steps."
        raise LayoutError(message(text, away, mend))
    return device


def _checked(layout: Layout) -> Layout:
    if not isinstance(layout, Layout):
        raise refuse("a layout", layout, "Make one with fs.plan_layout.")
    return layout


def _shapes(batch: Any) -> Any:
    """Return the batch on the meta device."""
    named = tree.named_leaves(batch)
    odd = [f"batch.{path} is {kind_of(x)}" for path, x in named.items() if not isinstance(x, Tensor)]
    if odd or not named:
        mend = "Pass the batch of one rank: {'x': torch.empty(8, 512, device='meta')}."
        raise BatchError(message("takes the batch as a tree of tensors.", odd or ["it has no leaf"], mend))
    return tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), batch)


def _rank(shape: AbstractMesh, coord: Mapping[str, int]) -> int:
    """Return the row-major index of a coordinate on a mesh."""
    sizes = dict(zip(shape.names, shape.sizes, strict=True))
    odd = [f"{axis}={i!r}, and {axis} has size {sizes.get(axis, 1)}" for axis, i in coord.items()
           if not isinstance(i, int) or not 0 <= i < sizes.get(axis, 1) or axis not in AXES]  # fmt: skip
    if odd:
        mend = "Pass indices from 0, each less than the size of its axis."
        raise MeshError(message(f"got a coord outside of the mesh {shape}.", odd, mend))
    return replace(shape, ranks=()).rank_at(dict(coord))


def _mesh(shape: AbstractMesh, device: Any) -> DeviceMesh:
    """Make the mesh of all fake ranks."""
    order = (*shape.names, *(axis for axis in AXES if axis not in shape.names))
    sizes = cast("dict[str, Any]", dict(zip(shape.names, shape.sizes, strict=True)))
    mesh = make_mesh(device=device, order=order, transport="native", **sizes)
    _compat.keep_unequal(mesh)
    return mesh


def _state(opt: GradientTransformation, layout: Layout, buffers: Buffers) -> TrainState:
    """Make a first state of fake tensors."""

    def init(_: Tensor) -> Any:
        return tree.unflatten(layout.structure, [random.zeros(x.shape, dtype=x.init) for x in layout.leaves])

    with _compat.with_values():
        key = random.key(0)
    return init_state(init, opt, key, layout, buffers=buffers)
