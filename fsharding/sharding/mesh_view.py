"""The `DeviceMesh` of a leaf's DTensor: a view of its mesh that encodes what DTensor placements cannot express.

Guarantee: `base(view(...))` is the mesh, and torch operations on a DTensor keep its view.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding.base import _compat
from fsharding.base._compat import cache_on_mesh, kept_by
from fsharding.base.errors import LayoutError, report
from fsharding.mesh.device_mesh import abstract, is_member, of_same_groups, own_rank
from fsharding.sharding.assigned import Assigned
from fsharding.sharding.partition_spec import PartitionSpec

__all__ = ["Base", "base", "order", "slice_of", "view"]

_OWNED = "_owned"  # suffix of the names of owned axes in a view


class Base(NamedTuple):
    """The mesh that a view was made from."""

    mesh: DeviceMesh  # the mesh, or its slice without assigned axes
    axes: tuple[str, ...]  # its axes, in the order of the view
    owned: tuple[str, ...] = ()  # the axes that the leaf owns
    whole: DeviceMesh | None = None  # the mesh that `mesh` is a slice of, if it is one
    assigned: tuple[Assigned, ...] = ()  # the leaf's assignments, along the axes that the slice lacks


def order(names: tuple[str, ...], spec: PartitionSpec, assigned: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes without assigned ones, ordered major first within each dim, as DTensor requires."""
    result = [name for name in names if name not in assigned]
    for dim in range(len(spec)):
        axes = [axis for axis in spec.axes(dim) if axis in result]
        places = sorted(result.index(axis) for axis in axes)
        for place, axis in zip(places, axes, strict=True):
            result[place] = axis
    return tuple(result)


@cache_on_mesh()
def view(mesh: DeviceMesh, spec: PartitionSpec, assigned: tuple[Assigned, ...], owned: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of a leaf's DTensor: the mesh itself if it needs no view."""
    names = abstract(mesh).names
    axes = order(names, spec, tuple(a.axis for a in assigned))
    return mesh if axes == names and not owned else _view(mesh, axes, assigned, owned)


@cache_on_mesh()
def _view(
    mesh: DeviceMesh, axes: tuple[str, ...], assigned: tuple[Assigned, ...], owned: tuple[str, ...]
) -> DeviceMesh:
    names = abstract(mesh).names
    kept = tuple(name for name in names if name in axes)
    part = mesh if kept == names else slice_of(mesh, kept)
    result = part if not axes or (axes == kept and not owned) else _renamed(part, axes, owned)
    if assigned:
        # A copy per assignment: leaves on one slice may have different owners.
        result = of_same_groups(_compat.copy_of_mesh(result), result)
        _compat.refuse_full_tensor(result, _refuse_full_tensor)
    # Stored on this object, not by value: a user's mesh may be equal to the view.
    whole = None if part is mesh else mesh
    kept_by(result)[Base] = Base(part, axes or ("dp",), owned, whole, assigned)
    return result


def _refuse_full_tensor(x: DTensor) -> NoReturn:
    """Raise: the DTensor is on this rank's slice of the mesh, so torch would return one slice of the leaf."""
    assigned = base(x.device_mesh).assigned
    row = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} is one part of a leaf with explicit owners over "
    row += ", ".join(a.axis for a in assigned)
    mend = "Use fs.unshard(leaf), which gathers all parts, also of a tree of leaves; x.to_local() is this rank's part."
    raise LayoutError(report("DTensor.full_tensor would return one rank's part of a leaf.", [row], mend))


@cache_on_mesh()
def slice_of(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the slice of a mesh that contains this rank; without axes, a mesh of this rank only."""
    rank = own_rank()
    if not names:
        return _compat.meshless_device_mesh(mesh.device_type, ("dp",), torch.tensor([rank]), rank)
    if is_member(mesh):
        return of_same_groups(mesh[names], mesh)
    grid = mesh.mesh[tuple(slice(None) if name in names else 0 for name in abstract(mesh).names)]
    return _compat.meshless_device_mesh(mesh.device_type, names, grid, rank)


def _renamed(mesh: DeviceMesh, axes: tuple[str, ...], owned: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of the same ranks and groups, with reordered dims and owned axes renamed."""
    now = abstract(mesh).names
    grid = mesh.mesh.permute([now.index(axis) for axis in axes]).contiguous()
    names = tuple(axis + _OWNED if axis in owned else axis for axis in axes)
    if not dist.is_initialized() or not is_member(mesh):
        return _compat.meshless_device_mesh(mesh.device_type, names, grid, own_rank())
    groups = [mesh.get_group(axis) for axis in axes]
    return of_same_groups(_compat.device_mesh_of(groups, mesh.device_type, names, grid), mesh)


def base(mesh: DeviceMesh) -> Base:
    """Return the mesh that a view was made from; a mesh that isn't a view is its own base."""
    known = kept_by(mesh).get(Base)
    return Base(mesh, abstract(mesh).names) if known is None else known
