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
from fsharding.base.public import kind_of, public, refuse
from fsharding.comm.counters import Traffic, count_bytes
from fsharding.comm.stream_log import peak_bytes, recording_streams
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.mesh.device_mesh import abstract, coordinate, make_mesh, set_mesh
from fsharding.mesh.groups import groups_of_another_world
from fsharding.mesh.meeting import kept_as_it_was
from fsharding.optim.base import GradientTransformation
from fsharding.sharding import random
from fsharding.sharding.layout import Layout, on_mesh
from fsharding.train.buffers import Buffers
from fsharding.train.state import TrainState, init_state
from fsharding.train.step import make_train_step

__all__ = ["FakeRank", "expected_memory", "expected_traffic", "fake_step"]

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

    Runs one step on fake tensors, which have shapes and no values, as the rank at `coord` of a mesh of any size. No
    other rank takes part, and nothing is sent. It works with or without a process group, and leaves an existing one as
    it is. No other thread may communicate during the call. A step of a decoder takes 0.2 to 0.4 s of a core per layer,
    whatever its sizes.

    Args:
        model: a `Model` or a loss function, as in `make_train_step`. Collectives in it use the current mesh.
        opt: the optimizer, such as `fs.adamw(1e-3)`.
        layout: of the state, on an abstract mesh or one with devices.
        batch: the batch of this rank, a tree of tensors `[B, ...]`. Only shapes and dtypes count: they may be on the
            meta device.
        coord: coordinate of the rank along each axis; a missing axis is 0. By default this process's coordinate, and
            the first rank of an abstract mesh.
        buffers: first values of `state.buffers`, as in `init_state`.
        **options: as in `make_train_step`.

    Returns:
        Calls and bytes by axes of the mesh. A router's choices depend on values, so tokens that are dispatched to
        experts count as if all ranks of `ep` got equally many: calls over `ep` are exact, bytes are not.

    Raises:
        ArgumentError: an argument of another kind.
        BatchError: the batch has a leaf that isn't a tensor, or no leaf.
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
) -> int:
    """Predict the peak memory of one rank of an accelerator in a train step.

    Runs one step on fake tensors, as `expected_traffic` does, and adds up what is allocated: the state, the batch,
    gathered units, activations, gradients. `Layout.memory` is what is there between steps.

    Args:
        model: a `Model` or a loss function, as in `make_train_step`.
        opt: the optimizer, such as `fs.adamw(1e-3)`.
        layout: of the state, on an abstract mesh or one with devices.
        batch: the batch of this rank, a tree of tensors `[B, ...]`, which may be on the meta device.
        coord: coordinate of the rank along each axis; a missing axis is 0. By default as in `expected_traffic`.
        buffers: first values of `state.buffers`, as in `init_state`.
        **options: as in `make_train_step`.

    Returns:
        Bytes; each tensor counts in multiples of 512, as torch's allocators of accelerators give them. On the mesh of
        an accelerator some KB may be missing, for single numbers by which ranks compare what they do. On an abstract
        mesh the step takes the kernels of a CPU, so this is an estimate: within 15 % for small decoders; activations
        that a policy offloads count there. A strategy with other kinds of memory takes the accelerator that is here.
        Workspaces of kernels and memory that an allocator keeps for later are not counted.

    Raises:
        ArgumentError: an argument of another kind.
        BatchError: the batch has a leaf that isn't a tensor, or no leaf.
        LayoutError: the strategy keeps something elsewhere than on the device, and no accelerator is here.
        MeshError: `coord` is outside the mesh.

    Example:
        >>> loss = lambda params, batch: (batch["x"] @ fs.gather_unit(params)["w"]).square().mean()
        >>> mesh = fs.AbstractMesh(("dp",), (4,))
        >>> layout = fs.plan_layout({"w": fs.random.zeros((256, 64))}, mesh, strategy=fs.zero(3))
        >>> peak = fs.debug.expected_memory(loss, fs.adamw(1e-3), layout, {"x": torch.ones(8, 256)})
        >>> peak > layout.memory(fs.adamw(1e-3)).total
        True
    """
    device = _device_with_memory(layout)
    rank = FakeRank(coord, device)
    # After its first step a state has counts on the device.
    log = fake_step(recording_streams, model, opt, layout, batch, rank=rank, buffers=buffers, steps=2, **options)
    return peak_bytes(log.rows, device)


class FakeRank(NamedTuple):
    """The rank that a step is taken as: by default this process, or the first rank of an abstract mesh."""

    coord: Mapping[str, int] | None = None
    device_type: str | None = None  # None for the mesh's


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
    """Run steps on fake tensors, as one rank of a mesh; the arguments are those of `expected_traffic`."""
    shape = abstract(_checked(layout).mesh)
    shapes = _shapes(batch)
    number = _rank(shape, coordinate(layout.mesh) if rank.coord is None else rank.coord)
    device: Any = rank.device_type or _device_type(layout)
    step = make_train_step(model, opt, **options)
    first = getattr(model, "init_buffers", dict)() if buffers is None else buffers
    with kept_as_it_was(), groups_of_another_world(), _compat.fake_world(number, shape.size), _compat.fake_tensors():
        mesh = _mesh(shape, device)
        state = _state(opt, on_mesh(layout, mesh), first)
        here = tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), shapes)
        with set_mesh(mesh), around(state, here) as seen:
            for _ in range(steps):
                state, _ = step(state, here)
    return seen


def _device_type(layout: Layout) -> str:
    return "cpu" if isinstance(layout.mesh, AbstractMesh) else layout.mesh.device_type


def _device_with_memory(layout: Layout) -> str:
    """Return a type of device whose memory differs from the other kinds that a layout takes."""
    device = _device_type(_checked(layout))
    is_abstract = isinstance(layout.mesh, AbstractMesh)
    away = [str(choice) for choice in layout.strategy.memory if is_abstract or choice.tier.can_fail]
    if away and is_abstract:
        device = accelerator()
    if away and device == "cpu":
        text = "needs an accelerator to tell its memory from memory of the host and of files, and there is none."
        mend = "Call it where one is, with this layout; layout.memory(opt) has the bytes of each kind between steps."
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
        mend = "Give the batch of one rank: {'x': torch.empty(8, 512, device='meta')}."
        raise BatchError(message("takes the batch as a tree of tensors.", odd or ["it has no leaf"], mend))
    return tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), batch)


def _rank(shape: AbstractMesh, coord: Mapping[str, int]) -> int:
    """Return the place of a coordinate on a mesh, row-major."""
    sizes = dict(zip(shape.names, shape.sizes, strict=True))
    odd = [f"{axis}={i!r}, and {axis} has size {sizes.get(axis, 1)}" for axis, i in coord.items()
           if not isinstance(i, int) or not 0 <= i < sizes.get(axis, 1) or axis not in AXES]  # fmt: skip
    if odd:
        mend = "Give indices from 0, each less than the size of its axis."
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
