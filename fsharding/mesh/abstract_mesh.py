"""The six mesh axes `pp replica dp ep cp tp`, and meshes as pure values without devices."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from fsharding.base.errors import ConfigError, MeshError, message, report

__all__ = ["AXES", "DATA_AXES", "AbstractMesh", "make_shape", "parse_axes", "unknown_axis"]

AXES = ("pp", "replica", "dp", "ep", "cp", "tp")  # every axis, in the default rank order, major first

# The axes along which ranks see different tokens, in the order in which they shard a dim. `replica` is the minor one:
# a shard over `(dp, replica)` is a part of the shard over `dp`.
DATA_AXES = ("dp", "ep", "cp", "replica")


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh without devices, to plan for any number of ranks.

    Attributes:
        names: Axes, major first.
        sizes: Size of each axis.
        ranks: Global rank at each position, row-major; empty means 0, 1, 2, ...

    Raises:
        MeshError: An axis is unknown or repeated, a size is below 1, or the numbers of axes, sizes and ranks differ.

    Example:
        >>> mesh = fs.AbstractMesh(("dp", "tp"), (2, 4))
        >>> mesh.size, mesh.axis_size("tp")
        (8, 4)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    def __new__(cls, *args: Any, **given: Any) -> AbstractMesh:
        """Raise if called like `make_mesh`."""
        # Copying and unpickling call it without arguments.
        odd = [f"{name}={size!r}" for name, size in given.items() if name not in {x.name for x in fields(cls)}]
        if odd or len(args) + len(given) == 1:
            axes = {name: size for name, size in given.items() if name in AXES} or {"dp": 8}
            text = ", ".join(odd) or ", ".join(map(repr, (*args, *given.values())))
            mend = f"Write fs.AbstractMesh({tuple(axes)!r}, {tuple(axes.values())!r})."
            raise MeshError(report(f"fs.AbstractMesh takes axis names, then sizes, got {text}.", mend=mend))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if wrong := _faults(self.names, self.sizes, self.ranks):
            mend = 'Write fs.AbstractMesh(("dp", "tp"), (4, 2)): each axis once, each size at least 1.'
            raise MeshError(report("fs.AbstractMesh got invalid axes.", wrong, mend))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def members(self) -> Sequence[int]:
        """Global rank at each position, row-major."""
        return self.ranks or range(self.size)

    def axis_size(self, axis: str) -> int:
        """Return the size of an axis; 1 for an axis that the mesh doesn't have."""
        return self.sizes[self.names.index(axis)] if axis in self.names else 1

    def coordinate(self, position: int) -> dict[str, int]:
        """Return the coordinate along each axis at a row-major position."""
        result: dict[str, int] = {}
        for name, size in reversed(tuple(zip(self.names, self.sizes, strict=True))):
            position, result[name] = divmod(position, size)
        return result

    def rank_at(self, coord: dict[str, int]) -> int:
        """Return the global rank at a coordinate; omitted axes count as 0."""
        position = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            position = position * size + coord.get(name, 0)
        return self.members[position]

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yield the coordinates of all ranks, row-major."""
        for values in product(*(range(size) for size in self.sizes)):
            yield dict(zip(self.names, values, strict=True))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in zip(self.names, self.sizes, strict=True)) + "}"


def _faults(names: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...]) -> list[str]:
    """Describe what is wrong with the axes, sizes and ranks of a mesh."""
    wrong = [f"{name!r} isn't an axis: they are {', '.join(AXES)}" for name in names if name not in AXES]
    wrong += [f"{name!r} is repeated" for name in dict.fromkeys(names) if names.count(name) > 1]
    wrong += [f"{name}={size}: at least 1" for name, size in zip(names, sizes, strict=False) if size < 1]
    if len(names) != len(sizes):
        wrong.append(f"{len(names)} axes, but {len(sizes)} sizes")
    if ranks and not wrong and (len(ranks) != math.prod(sizes) or len({*ranks}) != len(ranks)):
        wrong.append(f"{math.prod(sizes)} positions, but {len({*ranks})} ranks: {ranks}")
    return wrong


_DEVICE = 'Pass device=, such as fs.make_mesh(dp=-1, device="cpu").'
_SIZES = "Pass a size for each axis: fs.make_mesh(dp=2, tp=4)."
_OPTIONS = {
    "backend": 'Pass device=: fs.make_mesh(dp=-1, device="cpu") uses gloo, and "cuda" NCCL.',
    **dict.fromkeys(("device_type", "devices"), _DEVICE),
    **dict.fromkeys(("mesh_shape", "mesh_dim_names", "axis_names"), _SIZES),
}
"""What to pass to `make_mesh` instead of the options that torch and JAX have."""


def unknown_axis(name: str) -> str:
    """Word the error about an unknown axis."""
    if name in _OPTIONS:
        return f"takes no {name}=. {_OPTIONS[name]}"
    close = sorted(difflib.get_close_matches(name, AXES, 3), key=lambda axis: not name.startswith(axis[:1]))
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"got an unknown axis {name!r}. Axes are {', '.join(AXES)}.{hint}"


def parse_axes(text: str) -> dict[str, int]:
    """Parse axis sizes such as `replica=2,dp=-1`."""
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().removeprefix("-").isdecimal() or name.strip() in axes:
            mend = "Write axes as --mesh replica=2,dp=2, each once."
            raise ConfigError(message(f"cannot read {part!r} in --mesh {text}.", mend=mend))
        axes[name.strip()] = int(size)
    return axes


def make_shape(axes: dict[str, int], *, world: int, order: Sequence[str] = AXES) -> AbstractMesh:
    """Check axis sizes against the number of ranks, and compute the size of the axis that is -1."""
    for name in [*axes, *order]:
        if name not in AXES:
            raise MeshError(message(unknown_axis(name)))
    if sorted(order) != sorted(AXES):
        raise MeshError(message(f"needs an order of all six axes, got {order!r}.", mend=f"Use {AXES!r}."))
    if odd := [f"{axis}={size!r}" for axis, size in axes.items() if type(size) is not int]:
        raise MeshError(message(f"got {', '.join(odd)}.", mend="A size is an integer, such as dp=2."))
    sizes = {axis: axes.get(axis, 1) for axis in order}
    asked = ", ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
    wrong = [f"{axis}={size}" for axis, size in sizes.items() if size < 1 and size != -1]
    free = [axis for axis, size in sizes.items() if size == -1]
    if wrong or len(free) > 1:
        what = ", ".join(wrong) or " and ".join(f"{axis}=-1" for axis in free)
        raise MeshError(message(f"got {what}.", mend="A size is at least 1; one axis may be -1."))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and world % fixed == 0:
        sizes[free[0]] = world // fixed
    if math.prod(sizes.values()) != world:
        mend = "Use dp=-1 for the remaining ranks." if not free and world % (fixed // sizes["dp"]) == 0 else ""
        mend = mend or f"Start {fixed} ranks, or choose sizes whose product divides {world}."
        raise MeshError(message(f"got {asked} (size {fixed}), but the world size is {world}.", mend=mend))
    kept = [axis for axis in order if sizes[axis] > 1] or ["dp"]
    return AbstractMesh(tuple(kept), tuple(sizes[axis] for axis in kept))
