"""Meshes with devices: torch `DeviceMesh`es over the six axes, their process groups, and the current mesh."""

from __future__ import annotations

import functools
import logging
import math
import os
import weakref
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any, Literal, Never, TypeAlias, TypedDict, Unpack, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, devices
from fsharding.base._compat import cache_on_mesh, kept_by
from fsharding.base.errors import ConfigError, MeshError, RankError, message
from fsharding.base.public import check_timeout, public, refuse
from fsharding.base.registry import names_of
from fsharding.mesh.abstract_mesh import AXES, DATA_AXES, AbstractMesh, make_shape, unknown_axis
from fsharding.mesh.backends import backend_of, has_fake_backend
from fsharding.mesh.consistency import compare, refuse_differences
from fsharding.mesh.failures import naming_lost, own_rank, world_size
from fsharding.mesh.groups import Group, close_unused, find_group, group_among, meet_first
from fsharding.mesh.meeting import meet, set_meeting
from fsharding.mesh.rendezvous import FRESH_STORE, meet_all, shares_launchers_store
from fsharding.mesh.shutdown import rest_at_exit

__all__ = [
    "AxisSizes", "Group", "Mesh", "abstract", "axis_group", "axis_index", "axis_size", "coordinate", "current_mesh",
    "data_axes", "data_rank_and_size", "everyone", "index_of", "is_rank0", "is_member", "mesh_here", "print0",
    "of_same_groups", "own_rank", "make_mesh", "reduction_group", "set_mesh", "world_size",
]  # fmt: skip

Mesh: TypeAlias = DeviceMesh | AbstractMesh

_log = logging.getLogger("fsharding")

TransportName: TypeAlias = Literal["auto", "native", "pairwise", "shared_memory"]
"""The built-in transports; more can be registered."""


class AxisSizes(TypedDict, total=False):
    """The axis sizes of `make_mesh`, for type checkers."""

    pp: int
    replica: int
    dp: int
    ep: int
    cp: int
    tp: int


def abstract(mesh: Mesh) -> AbstractMesh:
    """Return the shape of a mesh as an `AbstractMesh`."""
    return mesh if isinstance(mesh, AbstractMesh) else _abstract(mesh)


@cache_on_mesh()
def _abstract(mesh: DeviceMesh) -> AbstractMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(message("needs a mesh with named axes.", mend=f"Name its dims with {', '.join(AXES)}."))
    for name in names:
        if name not in AXES:
            raise MeshError(message(unknown_axis(name)))
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    standard = ranks == tuple(range(len(ranks)))
    return AbstractMesh(tuple(names), tuple(mesh.mesh.shape), () if standard else ranks)


@public
def make_mesh(
    *unnamed: Never,
    order: Sequence[str] = AXES,
    device: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    ranks: Sequence[int] | None = None,
    transport: TransportName = "auto",
    communicators: Literal[1, 2] | None = None,
    **axes: Unpack[AxisSizes],
) -> DeviceMesh:
    """Make a torch `DeviceMesh`. Axes that aren't named have size 1; size -1 gets the remaining ranks. Collective.

    If a launcher has set `RANK` and `WORLD_SIZE`, this starts the default process group, unless it exists. A single
    process without a launcher gets a mesh of one rank and no process group.

    Args:
        *unnamed: Not allowed: sizes are passed by axis name.
        order: All six axes, major first: ranks along the last one are neighbors.
        device: Device type, such as "cpu" or "cuda". Default: the machine's accelerator, or "cpu". If a process sees
            several devices, it uses the one with the index `LOCAL_RANK` or `SLURM_LOCALID`.
        timeout: Timeout of the mesh's collectives; if ranks pass different ones, the longest.
        ranks: Global ranks of the mesh, row-major. Default: all. Every rank makes the mesh, also one outside of it,
            which stores nothing on it and uses it only in `reshard`.
        transport: Communication backend, which never affects values: "native" (the collectives of NCCL or gloo),
            "pairwise" (sends and receives of gloo), "shared_memory" (gloo on one machine) or a registered one. "auto"
            selects the fastest that all ranks of a group support; `FSHARDING_SHARED_MEMORY=0` excludes shared memory.
        communicators: Process groups per set of ranks: with 2 (the default on accelerators; 1 for gloo), all-gathers
            don't wait for gradient reductions.
        **axes: Sizes of `pp`, `replica`, `dp`, `ep`, `cp` and `tp`.

    Returns:
        The mesh, with all axes of more than one rank, or `dp` alone.

    Raises:
        MeshError: An axis is unknown, a rank doesn't exist or is repeated, sizes don't match the world size, or the
            machine has no such device.
        ArgumentError: A size isn't named, or `device`, `transport`, `communicators` or `timeout` is invalid.
        ConfigError: Ranks make different meshes; the error lists them.
        RankError: A rank doesn't call it before the timeout, or has exited; the error shows where each rank is.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")  # under torchrun: fs.make_mesh(dp=-1, tp=2)
        >>> mesh.mesh_dim_names
        ('dp',)
    """
    _check_arguments(unnamed, transport, communicators, timeout)
    device = _device_type(device)
    index = None if device == "cpu" else _own_index(device, int(os.environ.get("WORLD_SIZE", "1")))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    members = list(range(world)) if ranks is None else list(ranks)
    if sorted({*members} & {*range(world)}) != sorted(members):
        mend = f"Pass ranks between 0 and {world - 1}, each at most once."
        raise MeshError(message(f"got ranks={tuple(members)}, but the world size is {world}.", mend=mend))
    shape = make_shape(cast("dict[str, int]", axes), world=len(members), order=order)
    if index is not None:
        torch.accelerator.set_device_index(index)
    if not dist.is_initialized():
        if "RANK" not in os.environ and world > 1:
            mend = "Start the program with torchrun, or unset WORLD_SIZE for one process."
            raise ConfigError(message(f"finds WORLD_SIZE={world}, but RANK is not set.", mend=mend))
        if "RANK" not in os.environ:
            grid = torch.zeros(shape.sizes, dtype=torch.int64)
            return _compat.meshless_device_mesh(device, shape.names, grid, 0)
        _start(device, timeout)
    rest_at_exit()
    _compat.enclose_full_tensor(_full_tensor_of)
    set_meeting(timeout)
    with naming_lost("fs.make_mesh", range(world)):
        # Groups are cached by timeout: with different timeouts, ranks would find, or make, different groups.
        timeout = timedelta(microseconds=max(meet(timeout // timedelta(microseconds=1))))
        facts = {"mesh": f"{shape} of {device}" + ("" if ranks is None else f" on ranks {tuple(members)}")}
        facts |= {"transport": transport, "communicators": str(communicators)}
        count = communicators or communicators_for(backend_of(_world(), device))
        with _compat.with_values():
            mesh = _made(device, torch.tensor(members).reshape(shape.sizes), shape, facts, timeout, count)
        kept_by(mesh)["transport"] = transport
    # A weak reference, because the mesh keeps the function alive.
    _compat.describe_mesh(mesh, functools.partial(_transports_of, weakref.ref(mesh)))
    set_meeting(timeout, mesh)
    return mesh


@contextmanager
def _full_tensor_of(x: DTensor) -> Generator[None]:
    """Make `DTensor.full_tensor` raise a `RankError` if it fails on a mesh of `make_mesh`, or on a part of one."""
    mesh = x.device_mesh
    if _made_with(mesh, "timeout", None) is None:
        yield
        return
    with naming_lost("DTensor.full_tensor", mesh):
        for dim, placement in enumerate(x.placements):
            if not placement.is_replicate() and mesh.size(dim) > 1:
                meet_first(mesh.get_group(dim), mesh.device_type)
        yield


def communicators_for(backend: str) -> int:
    """Return the default number of communicators of a set of ranks."""
    # An NCCL communicator runs its collectives one after the other, on whatever streams they are launched. gloo runs
    # several at once, so a second group would only add connections.
    return 1 if backend in ("gloo", "fake", "") else 2


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return world


def _check_arguments(unnamed: Sequence[Any], transport: Any, communicators: Any, timeout: Any) -> None:
    if unnamed:
        size = next((x for x in unnamed if isinstance(x, int)), -1)
        mend = f"Name the axis: fs.make_mesh(dp={size}). Axes are {', '.join(AXES)}."
        raise refuse("sizes by axis", unnamed[0], mend)
    transports = "auto", "native", *names_of("transport")
    if transport not in transports:
        mend = f"Pass one of {', '.join(sorted(transports))}."
        raise refuse("transport= by name", transport, mend)
    if communicators not in (None, 1, 2) or isinstance(communicators, bool):
        mend = "Pass 1, 2 for separate all-gathers and reductions, or None for the backend's default."
        raise refuse("communicators= as 1 or 2", communicators, mend)
    check_timeout(timeout)


def _device_type(device: Any) -> str:
    """Return the device type of a mesh, by default the machine's accelerator."""
    if device is None:
        return devices.accelerator()
    try:
        known = isinstance(device, str) and torch.device(device).type == device
    except RuntimeError:
        known = False
    if not known or device == "meta":
        here = devices.accelerator()
        mend = 'Pass "cpu".' if here == "cpu" else f'Pass "{here}", the accelerator of this machine, or "cpu".'
        raise refuse('device= as a device type of torch, such as "cpu" or "cuda"', device, mend)
    return device


def _own_index(device: str, ranks: int) -> int:
    """Return the index of this process's accelerator among those that it sees."""
    # Slurm and Kubernetes may show each process a single device, whose index is 0 whatever its local rank; torchrun
    # shows all devices to every process. Without a local rank, the program's current device stays.
    if not devices.is_here(device):
        here = devices.accelerator()
        rule = f'finds no accelerator for device="{device}"; this machine has {"none" if here == "cpu" else here}.'
        mend = 'Use the CPU, fs.make_mesh(device="cpu"), or check the driver and CUDA_VISIBLE_DEVICES.'
        if dist.group.WORLD is not None and has_fake_backend(dist.group.WORLD):
            mend += ' On the CPU, Precision(sums="native") sends what an accelerator would send.'
        raise MeshError(message(rule, mend=mend))
    if missing := devices.missing_parts(device, ranks):
        rule = f'cannot use device="{device}", which lacks what a mesh needs.'
        raise MeshError(message(rule, missing, 'Register what is missing, or make the mesh with device="cpu".'))
    visible = devices.device_count()
    name = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ), None)
    if visible == 1:
        return 0
    if name is None:
        return torch.accelerator.current_device_index()
    if int(os.environ[name]) >= visible:
        rule = f"finds {visible} devices, but {name}={os.environ[name]}."
        mend = f"Start {visible} processes on this machine, or make one device visible to each process."
        raise MeshError(message(rule, mend=mend))
    return int(os.environ[name])


def _start(device: str, timeout: timedelta) -> None:
    """Start the default process group from a launcher's environment."""
    # gloo sends tensors of the host, such as digests and flags, also in a mesh of accelerators: they don't wait for
    # kernels.
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{devices.backend_for(device)}"
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if (
        shares_launchers_store()
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and os.environ["RANK"] == "0"
    ):
        rule = "uses the store of torchrun for ranks of several machines, so torchrun cannot restart them."
        _log.warning(message(rule, mend=f"For --max-restarts, start torchrun with {FRESH_STORE}=1 on every machine."))
    try:
        dist.init_process_group(backend, timeout=timeout, **meet_all(timeout))
    except dist.DistError as error:
        rule = f"on rank {os.environ['RANK']} has not met all of {os.environ.get('WORLD_SIZE')} ranks."
        mend = "Call it on every rank, and look at the logs of the others."
        raise RankError(message(rule, [str(error).strip().partition("\n")[0]], mend)) from error


def _made(
    device: str, grid: torch.Tensor, shape: AbstractMesh, facts: dict[str, str], timeout: timedelta, communicators: int
) -> DeviceMesh:
    """Make the mesh and its process groups; raise if ranks make different meshes."""
    uses = ("", _REDUCTIONS)[:communicators]
    world = dist.get_world_size()
    if world > 1:
        refuse_differences(compare(facts, Group(tuple(range(world)), own_rank(), _world()), device, ask=meet))
    # All ranks take part in making a group, so groups over several axes are made now if later not all ranks would ask
    # for them: ranks outside of the mesh may never use it, and pipeline stages gather over different axes.
    several = shape.names if grid.numel() < world else data_axes(shape) if shape.axis_size("pp") > 1 else ()
    early = [frozenset(axes) for count in range(2, len(several) + 1) for axes in combinations(several, count)]
    large = [axis for axis in several if shape.axis_size(axis) > 1 and communicators > 1]
    apart = [frozenset(axes) for count in range(1, len(large) + 1) for axes in combinations(large, count)]
    placed = AbstractMesh(shape.names, shape.sizes, tuple(grid.flatten().tolist()))
    by_axis = [_families(placed, {axis}) for axis in shape.names]
    wanted = [
        family
        for families in (*by_axis, *(_families(placed, axes) for axes in (*early, *apart)))
        for family in families
    ]
    close_unused(wanted, timeout, uses)
    groups = [group for families in by_axis if (group := group_among(families, timeout)) is not None]
    if groups:
        mesh = _compat.device_mesh_of(groups, device, shape.names, grid)
    else:
        mesh = _compat.meshless_device_mesh(device, shape.names, grid, own_rank())
    kept_by(mesh).update(timeout=timeout, communicators=communicators)
    for axes in early:
        _process_group(mesh, axes, "")
    for axes in apart:
        _process_group(mesh, axes, _REDUCTIONS)
    return mesh


_REDUCTIONS = "reductions"  # the use of a second communicator


def _made_with(mesh: Mesh, name: str, default: Any) -> Any:
    """Return an option of the `make_mesh` call behind a mesh, a slice or a view; else the default."""
    if not isinstance(mesh, DeviceMesh):
        return default
    full = kept_by(mesh).get("full")
    return kept_by(mesh).get(name, default) if full is None else _made_with(full, name, default)


def _timeout(mesh: DeviceMesh) -> timedelta:
    return _made_with(mesh, "timeout", timedelta(minutes=10))


def _transports_of(reference: weakref.ref[DeviceMesh]) -> str:
    """Describe the transport of each axis, for `print(mesh)`."""
    mesh = reference()
    assert mesh is not None
    if not is_member(mesh):
        return "without this rank"
    rows: list[str] = []
    for axis, size in zip(abstract(mesh).names, abstract(mesh).sizes, strict=True):
        if size > 1:
            choice = axis_group(mesh, (axis,)).transports.get(mesh.device_type)
            rows.append(f"{axis} by {choice or f'{_transport(mesh)}, chosen at the first collective'}")
    apart = ["reductions by separate communicators"] if rows and _made_with(mesh, "communicators", 1) > 1 else []
    return "; ".join(rows + apart) or "one rank"


def _transport(mesh: Mesh) -> str:
    return _made_with(mesh, "transport", "auto")


def of_same_groups(part: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Have a slice or view of a mesh use the process groups of the full mesh, which all ranks make."""
    kept_by(part)["full"] = mesh
    return part


@public
def is_member(mesh: Mesh) -> bool:
    """Return whether this process is one of the mesh's ranks.

    Args:
        mesh: A mesh from `make_mesh`; an `AbstractMesh` has every rank.

    Returns:
        True if it is.

    Example:
        >>> fs.is_member(fs.make_mesh(dp=-1, device="cpu"))
        True
    """
    return isinstance(mesh, AbstractMesh) or mesh.get_coordinate() is not None


@public
def is_rank0() -> bool:
    """Return whether this process is global rank 0.

    Returns:
        True on rank 0. Before a process group exists, the launcher's `RANK` decides.

    Example:
        >>> fs.is_rank0()  # on rank 0
        True
    """
    return own_rank() == 0 if dist.is_initialized() else int(os.environ.get("RANK", "0")) == 0


@public
def print0(*values: Any, **options: Any) -> None:
    """Print on rank 0 only.

    Args:
        *values: Values to print. Every rank computes them, so `fs.print0(fs.unshard(x))` is safe.
        **options: Options of `print`.

    Example:
        >>> fs.print0("loss", 0.5, sep="=")  # on rank 0
        loss=0.5
    """
    if is_rank0():
        print(*values, **options)


def coordinate(mesh: Mesh) -> dict[str, int]:
    """Return this process's coordinate along each axis; zeros on an `AbstractMesh`."""
    shape = abstract(mesh)
    coord = [0] * len(shape.names) if isinstance(mesh, AbstractMesh) else mesh.get_coordinate()
    if coord is None:
        mend = "Call it only if fs.is_member(mesh)."
        raise MeshError(message(f"is called on a rank outside of the mesh {shape}.", mend=mend))
    return dict(zip(shape.names, coord, strict=True))


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks see different tokens, in the order in which they shard a dim."""
    shape = abstract(mesh)
    return tuple(axis for axis in DATA_AXES if shape.axis_size(axis) > 1)


@public
def data_rank_and_size(mesh: Mesh, *, cp: bool = False) -> tuple[int, int]:
    """Return which part of the global batch this process reads, over the axes replica, dp and ep.

    Args:
        mesh: A mesh from `make_mesh`.
        cp: Whether to include `cp`, whose ranks read parts of the same rows.

    Returns:
        The index of this process's part, in rank order, and the number of parts.

    Raises:
        MeshError: This rank isn't in the mesh.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> index, count = fs.data_rank_and_size(mesh)
        >>> rows = torch.arange(8).chunk(count)[index]  # on one rank all 8, on two ranks 4 each
        >>> fs.ops.psum(rows.sum(), "dp", mesh=mesh)
        tensor(28)
    """
    shape = abstract(mesh)
    coord = coordinate(mesh)
    index = 0
    count = 1
    for axis in ("replica", "dp", "ep", *(("cp",) if cp else ())):
        size = shape.axis_size(axis)
        index = index * size + coord.get(axis, 0)
        count = count * size
    return index, count


@functools.lru_cache(maxsize=64)
def index_of(places: tuple[int, ...] | range, device: torch.device) -> torch.Tensor:
    """Return a permutation as an index of rows on a device."""
    return torch.tensor(places, device=device)


@cache_on_mesh(256)
def axis_group(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    """Return this process's group along some axes, in the order of `axes`, major first."""
    # It may make a process group, so all ranks call it for the same axes in the same order.
    shape = abstract(mesh)
    own = shape.rank_at(coordinate(mesh))
    axes = tuple(axis for axis in axes if shape.axis_size(axis) > 1)
    ranks = next(tuple(row) for row in _rows_along(axes, shape) if own in row)
    if len(ranks) == 1:
        return Group(ranks, 0, None)
    if isinstance(mesh, AbstractMesh):
        text = f"cannot run a collective over {', '.join(axes)} on the abstract mesh {shape}."
        raise MeshError(message(text, mend="Use a mesh from fs.make_mesh."))
    named = tuple(axis for axis in AXES if axis in axes)
    terms: tuple[int, ...] | range = range(len(ranks))
    if named != axes:
        members = {rank: member for member, rank in enumerate(ranks)}
        terms = next(tuple(members[rank] for rank in row) for row in _rows_along(named, shape) if own in row)
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _process_group(mesh, frozenset(axes), "")
    return Group(ranks, ranks.index(own), group, terms, named, _transport(mesh))


@cache_on_mesh(256)
def reduction_group(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    """Return `axis_group` with the communicator for gradient reductions, if the mesh has two."""
    group = axis_group(mesh, axes)
    if group.process_group is None or _made_with(mesh, "communicators", 1) == 1:
        return group
    assert isinstance(mesh, DeviceMesh)
    return replace(group, process_group=_process_group(mesh, frozenset(group.axes), _REDUCTIONS))


def _rows_along(axes: Sequence[str], shape: AbstractMesh) -> list[list[int]]:
    """Return the sets of ranks whose coordinates differ only along the axes, each in their order, major first."""
    others = [name for name in shape.names if name not in axes]
    grid = np.array(shape.members).reshape(shape.sizes)
    grid = grid.transpose([shape.names.index(name) for name in (*others, *axes)])
    return grid.reshape(-1, math.prod(grid.shape[len(others) :])).tolist()


def everyone(mesh: Mesh) -> Group:
    """Return the group of all ranks of a mesh: the default group if it has all processes."""
    shape = abstract(mesh)
    if not isinstance(mesh, DeviceMesh) or shape.size < world_size() or not dist.is_initialized():
        return axis_group(mesh, shape.names)
    ranks = tuple(range(shape.size))
    group = find_group(ranks, _timeout(mesh)) or dist.group.WORLD
    members = range(shape.size)
    return Group(ranks, own_rank(), group if shape.size > 1 else None, members, transport=_transport(mesh))


@cache_on_mesh(256)
def _process_group(mesh: DeviceMesh, axes: frozenset[str], use: str) -> dist.ProcessGroup | None:
    """Return this rank's process group over some axes; None outside of the mesh. Collective over all ranks."""
    full = kept_by(mesh).get("full")
    if full is not None:
        return _process_group(full, axes, use)
    return group_among(_families(abstract(mesh), axes), _timeout(mesh), use)


def _families(shape: AbstractMesh, axes: Collection[str]) -> list[list[int]]:
    """Return `_rows_along` some axes, in the order of the mesh."""
    return _rows_along([name for name in shape.names if name in axes], shape)


_current: ContextVar[Mesh | None] = ContextVar("fsharding_mesh", default=None)


@_compat.outside_of_graphs
def axis_index(axis: str, mesh: Mesh | None = None) -> int:
    """Return this process's coordinate along an axis, by default of the mesh of `set_mesh`; 0 without a mesh."""
    here = mesh if mesh is not None else _current.get()
    return 0 if here is None else coordinate(here).get(axis, 0)


class _Setting:
    """Set a mesh on construction; leaving the `with` block restores the previous one."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._before = mesh, _current.get()
        _current.set(mesh)

    def __enter__(self) -> None:
        _current.set(self._mesh)

    def __exit__(self, *_: object) -> None:
        _current.set(self._before)


@public
def set_mesh(mesh: Mesh) -> AbstractContextManager[None]:
    """Set the mesh of `fs.ops` collectives in this thread, like `jax.set_mesh`.

    A plain call sets it until the next one; in a `with` statement, it is set inside the block only. `fs.shard_map` and
    `fs.value_and_grad` set the mesh of their arguments themselves.

    Args:
        mesh: A mesh from `make_mesh`, or an `AbstractMesh` to plan with.

    Returns:
        A context manager that restores the previous mesh.

    Raises:
        ArgumentError: The argument isn't a mesh.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> with fs.set_mesh(mesh):
        ...     int(fs.ops.psum(torch.tensor(1), "dp")) == mesh.size()
        True
    """
    if not isinstance(mesh, DeviceMesh | AbstractMesh):
        raise refuse("a mesh", mesh, "Pass one, such as fs.make_mesh(dp=-1).")
    return _Setting(mesh)


@_compat.outside_of_graphs
def mesh_here() -> Mesh | None:
    """Return the mesh of the innermost `set_mesh`, or None."""
    return _current.get()


@_compat.outside_of_graphs
def current_mesh() -> Mesh:
    """Return the mesh of the innermost `set_mesh`, or raise."""
    mesh = _current.get()
    if mesh is None:
        raise MeshError(message("was called without a mesh.", mend="Pass mesh=, or call it inside fs.set_mesh(mesh)."))
    return mesh


@_compat.outside_of_graphs
def axis_size(axis: str, mesh: Mesh | None = None) -> int:
    """Return the size of an axis, by default of the mesh of `set_mesh`; 1 without the axis or without a mesh."""
    if axis not in AXES:
        raise MeshError(message(unknown_axis(axis)))
    mesh = mesh if mesh is not None else _current.get()
    return 1 if mesh is None else abstract(mesh).axis_size(axis)
