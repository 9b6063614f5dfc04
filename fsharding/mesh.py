"""Meshes: the six axes `pp replica dp ep cp tp`, with devices (`DeviceMesh`) or without (`AbstractMesh`).

In: a size for each axis, -1 for the one that takes what is left. Out: a torch `DeviceMesh`, or a pure value like it.
An axis of size 1 is not in the mesh; everything treats an absent axis as one of size 1.
Law: the ranks of `axis_group(mesh, axes)` stand in the order of `axes`, major first, on every rank.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, product
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsharding import _compat
from fsharding.errors import ConfigError, MeshError, message

__all__ = [
    "AXES",
    "DATA_AXES",
    "AbstractMesh",
    "Group",
    "Mesh",
    "abstract",
    "axis_group",
    "axis_size",
    "coordinate",
    "current_mesh",
    "data_axes",
    "data_position",
    "is_member",
    "own_rank",
    "make_mesh",
    "make_shape",
    "parse_axes",
    "set_mesh",
    "unknown_axis",
    "world_size",
]

AXES = ("pp", "replica", "dp", "ep", "cp", "tp")
"""Every axis, in the default rank order, major first."""

DATA_AXES = ("dp", "ep", "cp", "replica")
"""The axes along which ranks see different tokens, in the order in which they cut a dim: `replica` is the minor one,
so that a shard over `(dp, replica)` is a piece of the shard over `dp`."""


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh without devices: what planning needs, for any number of ranks, in no memory.

    Attributes:
        names: axes, major first.
        sizes: their sizes.
        ranks: the global rank at each position, row-major; empty means 0, 1, 2, ...
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    @property
    def members(self) -> Sequence[int]:
        """The global rank at each position, row-major."""
        return self.ranks or range(self.size)

    def axis_size(self, axis: str) -> int:
        """The size of an axis; 1 for an axis that the mesh does not have."""
        return self.sizes[self.names.index(axis)] if axis in self.names else 1

    def coordinate(self, position: int) -> dict[str, int]:
        """The coordinate along each axis of the rank at a row-major position."""
        result: dict[str, int] = {}
        for name, size in reversed(tuple(zip(self.names, self.sizes, strict=True))):
            position, result[name] = divmod(position, size)
        return result

    def rank_at(self, coord: dict[str, int]) -> int:
        """The global rank at a coordinate; axes left out count as 0."""
        position = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            position = position * size + coord.get(name, 0)
        return self.members[position]

    def coordinates(self) -> Iterator[dict[str, int]]:
        """The coordinates of all ranks, row-major."""
        for values in product(*(range(size) for size in self.sizes)):
            yield dict(zip(self.names, values, strict=True))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in zip(self.names, self.sizes, strict=True)) + "}"


Mesh: TypeAlias = DeviceMesh | AbstractMesh


@functools.lru_cache(maxsize=256)
def abstract(mesh: Mesh) -> AbstractMesh:
    """The shape of a mesh as a pure value; an `AbstractMesh` is its own.

    Raises:
        MeshError: a `DeviceMesh` without axis names, or with a name that is none of the six.
    """
    if isinstance(mesh, AbstractMesh):
        return mesh
    names = mesh.mesh_dim_names
    if names is None:
        text = message("fs.abstract", "needs a mesh with named axes.", mend=f"Name its dims with {', '.join(AXES)}.")
        raise MeshError(text)
    for name in names:
        if name not in AXES:
            raise MeshError(message("fs.abstract", unknown_axis(name)))
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    standard = ranks == tuple(range(len(ranks)))
    return AbstractMesh(tuple(names), tuple(mesh.mesh.shape), () if standard else ranks)


def unknown_axis(name: str) -> str:
    """Words the complaint about an axis that does not exist."""
    close = sorted(difflib.get_close_matches(name, AXES, 3), key=lambda axis: not name.startswith(axis[:1]))
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"knows no axis {name!r}. Axes are {', '.join(AXES)}.{hint}"


def parse_axes(text: str, function: str) -> dict[str, int]:
    """Sizes by axis from what a user writes: `replica=2,dp=-1`.

    Args:
        text: axes separated by commas.
        function: whose name the error carries.

    Raises:
        ConfigError: something that is no axis with its size, or one axis twice.
    """
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().removeprefix("-").isdecimal() or name.strip() in axes:
            mend = "Write axes as --mesh replica=2,dp=2, each once."
            raise ConfigError(message(function, f"cannot read {part!r} in --mesh {text}.", mend=mend))
        axes[name.strip()] = int(size)
    return axes


def make_shape(
    axes: dict[str, int], *, world: int, order: Sequence[str] = AXES, function: str = "fs.make_mesh"
) -> AbstractMesh:
    """Checks axis sizes against a number of ranks and fills in the -1.

    Args:
        axes: size by axis; one of them may be -1 and takes what is left.
        world: number of ranks.
        order: all six axes, major first: which ranks are neighbours.
        function: whose name the error carries.

    Returns:
        The mesh; axes of size 1 are left out, but `dp` stays when nothing else is there.

    Raises:
        MeshError: unknown axis, size below 1, two -1, or a product that differs from `world`.
    """
    for name in [*axes, *order]:
        if name not in AXES:
            raise MeshError(message(function, unknown_axis(name)))
    if sorted(order) != sorted(AXES):
        raise MeshError(message(function, f"needs an order of all six axes, got {order!r}.", mend=f"Use {AXES!r}."))
    sizes = {axis: axes.get(axis, 1) for axis in order}
    asked = ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    wrong = [f"{axis}={size}" for axis, size in sizes.items() if size < 1 and size != -1]
    free = [axis for axis, size in sizes.items() if size == -1]
    if wrong or len(free) > 1:
        what = ", ".join(wrong) or " and ".join(f"{axis}=-1" for axis in free)
        raise MeshError(message(function, f"got {what}.", mend="A size is at least 1; one axis may be -1."))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and world % fixed == 0:
        sizes[free[0]] = world // fixed
    if math.prod(sizes.values()) != world:
        mend = "Use dp=-1 to let dp take what is left." if not free and world % (fixed // sizes["dp"]) == 0 else ""
        mend = mend or f"Start {fixed} ranks, or choose sizes whose product divides {world}."
        raise MeshError(message(function, f"got {asked}: {fixed} ranks, but there are {world}.", mend=mend))
    kept = [axis for axis in order if sizes[axis] > 1] or ["dp"]
    return AbstractMesh(tuple(kept), tuple(sizes[axis] for axis in kept))


def make_mesh(
    *,
    order: Sequence[str] = AXES,
    device: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    ranks: Sequence[int] | None = None,
    **axes: int,
) -> DeviceMesh:
    """Makes a torch `DeviceMesh`; axes that are not named have size 1, `dp=-1` takes what is left. Collective.

    Starts the default process group if a launcher's environment (`RANK`, `WORLD_SIZE`) is there and none runs yet.
    On one process without a launcher the mesh has one rank and no process group at all.

    Args:
        order: all six axes, major first: which ranks are neighbours.
        device: "cpu" or "cuda"; by default "cuda" if there is one.
        timeout: how long a collective of any group of this mesh waits for its peers.
        ranks: the ranks of the mesh, row-major; by default all of them. Every rank makes the mesh, also those that
            are not in it: they hold nothing of what lives on it, and meet it in `reshard` only.
        **axes: sizes of `pp`, `replica`, `dp`, `ep`, `cp`, `tp`.

    Raises:
        MeshError: unknown axis, a rank that does not exist or stands twice, or the product of the sizes differs from
            the number of ranks.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    members = list(range(world)) if ranks is None else list(ranks)
    if sorted({*members} & {*range(world)}) != sorted(members):
        text = f"got ranks={tuple(members)}, but the ranks are 0 to {world - 1}, each at most once."
        raise MeshError(message("fs.make_mesh", text))
    shape = make_shape(axes, world=len(members), order=order)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            grid = torch.zeros(shape.sizes, dtype=torch.int64)
            return _compat.meshless_device_mesh(device, shape.names, grid, 0)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    mesh = DeviceMesh(device, torch.tensor(members).reshape(shape.sizes), mesh_dim_names=shape.names)
    for group in mesh.get_all_groups() if is_member(mesh) else ():
        _compat.set_group_timeout(group, timeout)
    _timeouts[mesh] = timeout
    if len(members) < world:
        # The ranks outside have to take part in making groups, and they are here now and perhaps never again.
        for count in range(2, len(shape.names) + 1):
            for several in combinations(shape.names, count):
                _process_group(mesh, frozenset(several))
    return mesh


_timeouts: dict[DeviceMesh, timedelta] = {}


def own_rank() -> int:
    """The global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_member(mesh: Mesh) -> bool:
    """Whether this process is one of the mesh's ranks."""
    return isinstance(mesh, AbstractMesh) or mesh.get_coordinate() is not None


def coordinate(mesh: Mesh) -> dict[str, int]:
    """This process's coordinate along each axis; all zeros on an `AbstractMesh`.

    Raises:
        MeshError: this process is not one of the mesh's ranks.
    """
    shape = abstract(mesh)
    coord = [0] * len(shape.names) if isinstance(mesh, AbstractMesh) else mesh.get_coordinate()
    if coord is None:
        mend = "Guard what only its ranks do with fs.is_member(mesh)."
        raise MeshError(message("fs.coordinate", f"is called on a rank that is not in the mesh {shape}.", mend=mend))
    return dict(zip(shape.names, coord, strict=True))


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh along which ranks see different tokens, in cutting order."""
    shape = abstract(mesh)
    return tuple(axis for axis in DATA_AXES if shape.axis_size(axis) > 1)


def data_position(mesh: Mesh) -> tuple[int, int]:
    """Which part of the global batch this process reads: (index, count) over replica, dp and ep, in rank order."""
    shape, coord, index, count = abstract(mesh), coordinate(mesh), 0, 1
    for axis in ("replica", "dp", "ep"):
        size = shape.axis_size(axis)
        index, count = index * size + coord.get(axis, 0), count * size
    return index, count


@dataclass(frozen=True)
class Group:
    """The ranks that share everything but their coordinates along some axes.

    Attributes:
        ranks: global ranks in the order of the axes, major first.
        index: this process's place among them.
        process_group: None when the group has one rank.
        terms: the members in the order in which sums are taken: by coordinate, with the axes as in `AXES`. A sum over
            `(dp, replica)` and one over `dp` and then `replica` then add the same terms in the same pairs.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None
    terms: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The rank inside `process_group` of each member."""
        in_group = {rank: i for i, rank in enumerate(sorted(self.ranks))}
        return tuple(in_group[rank] for rank in self.ranks)


@functools.lru_cache(maxsize=256)
def axis_group(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    """This process's group along some axes. Every rank has to ask for the same axes in the same order of calls.

    Raises:
        MeshError: the mesh has no devices and the group more than one rank.
    """
    shape, mine = abstract(mesh), coordinate(mesh)
    axes = tuple(axis for axis in axes if shape.axis_size(axis) > 1)
    steps = [dict(zip(axes, c, strict=True)) for c in product(*(range(shape.axis_size(a)) for a in axes))]
    ranks = tuple(shape.rank_at({**mine, **step}) for step in steps)
    index = steps.index({axis: mine[axis] for axis in axes})
    if len(ranks) == 1:
        return Group(ranks, 0, None)
    if isinstance(mesh, AbstractMesh):
        text = f"cannot run a collective over {', '.join(axes)} on the abstract mesh {shape}."
        raise MeshError(message("fs.axis_group", text, mend="Use fs.make_mesh."))
    terms = tuple(sorted(range(len(ranks)), key=lambda i: [steps[i].get(axis, 0) for axis in AXES]))
    group = mesh.get_group(axes[0]) if len(axes) == 1 else _process_group(mesh, frozenset(axes))
    return Group(ranks, index, group, terms)


@functools.lru_cache(maxsize=256)
def _process_group(mesh: DeviceMesh, axes: frozenset[str]) -> dist.ProcessGroup | None:
    """The process group of this rank over several axes; None on a rank outside the mesh. All ranks make all of them."""
    families: dict[tuple[int, ...], list[int]] = {}
    shape = abstract(mesh)
    for coord in shape.coordinates():
        families.setdefault(tuple(c for n, c in coord.items() if n not in axes), []).append(shape.rank_at(coord))
    timeout = _timeouts.get(mesh, timedelta(minutes=10))
    group, _ = dist.new_subgroups_by_enumeration([sorted(family) for family in families.values()], timeout=timeout)
    return cast("dist.ProcessGroup | None", group)


_current: ContextVar[Mesh | None] = ContextVar("fsharding_mesh", default=None)


@contextmanager
def set_mesh(mesh: Mesh) -> Generator[None]:
    """Makes a mesh the one that `fs.ops` collectives use inside the `with` block."""
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


def axis_size(axis: str, mesh: Mesh | None = None) -> int:
    """The size of an axis of a mesh, by default that of `set_mesh`; 1 where the mesh lacks it, or there is no mesh."""
    mesh = _current.get() if mesh is None else mesh
    return 1 if mesh is None else abstract(mesh).axis_size(axis)


def current_mesh(function: str) -> Mesh:
    """The mesh of the innermost `set_mesh`.

    Raises:
        MeshError: there is none.
    """
    mesh = _current.get()
    if mesh is None:
        text = message(function, "was called without a mesh.", mend="Pass mesh=, or call it inside fs.set_mesh(mesh).")
        raise MeshError(text)
    return mesh
