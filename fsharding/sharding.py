"""Where one leaf lives: `NamedSharding` = mesh + `P`, to and from DTensor; `Local` = its local tensor in flight.

In: a mesh, a spec, maybe axes whose sum is still open, maybe an explicit assignment. Out: boxes, placements, DTensors.
At rest a leaf is a DTensor that claims exactly what it has; inside a loss function it is a `Local` node.
Law: `sharding_of(s.to_dtensor(x, shape)) == s`, and the boxes of all ranks tile the leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as torch_pytree

from fsharding import _compat, boxes, tree
from fsharding import mesh as meshes
from fsharding.boxes import Box
from fsharding.errors import SpecError, message
from fsharding.mesh import AbstractMesh, Mesh, abstract, coordinate
from fsharding.spec import P, PartitionSpec

__all__ = ["Assigned", "LeafType", "Local", "NamedSharding", "local_of", "sharding_of", "to_local", "typeof"]


@dataclass(frozen=True)
class Assigned:
    """Explicit ownership along one axis, where ceil-chunks do not say enough.

    Attributes:
        axis: the mesh axis whose coordinates own things.
        dim: the tensor dim whose indices are owned, or None when the leaf is owned whole.
        indices: for each coordinate, the indices that it holds, in the order in which it holds them; with `dim=None`,
            `(0,)` where the leaf is and `()` where it is not.
    """

    axis: str
    dim: int | None
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NamedSharding:
    """A mesh and a `P`: which part of a global tensor each rank holds.

    Attributes:
        mesh: with devices, or abstract.
        spec: axes by dim.
        partial: axes whose ranks hold different terms of a sum that has not been taken.
        assigned: explicit ownership along an axis that the spec does not use.
    """

    mesh: Mesh
    spec: PartitionSpec = P()
    partial: tuple[str, ...] = ()
    assigned: Assigned | None = None

    def __post_init__(self) -> None:
        used = self.spec.all_axes
        both = [axis for axis in self.partial if axis in used]
        if self.assigned and self.assigned.axis in used:
            both.append(self.assigned.axis)
        if both:
            text = f"uses {', '.join(both)} in the spec {self.spec} and again as partial or assigned."
            raise SpecError(message("NamedSharding", text, mend="Give an axis one role."))

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes of size above 1 that cut a dim, major first."""
        shape = abstract(self.mesh)
        return tuple(axis for axis in self.spec.axes(dim) if shape.axis_size(axis) > 1)

    def simplified(self) -> NamedSharding:
        """The same sharding without the axes that have size 1."""
        shape = abstract(self.mesh)
        spec = P(*(self.axes(dim) for dim in range(len(self.spec))))
        return replace(self, spec=spec, partial=tuple(a for a in self.partial if shape.axis_size(a) > 1))

    def drop(self, dim: int = 0) -> NamedSharding:
        """The sharding of one index along a dim, such as one block of a stacked leaf."""
        return replace(self, spec=self.spec.drop(dim), assigned=None)

    def boxes(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> tuple[Box, ...]:
        """The boxes of the global tensor that a rank holds, in the order in which its local tensor has them.

        Args:
            shape: global shape.
            coord: the rank's coordinate by axis; by default this process's.
        """
        where = coordinate(self.mesh) if coord is None else coord
        sizes = abstract(self.mesh)
        cuts: list[tuple[tuple[int, int], ...]] = []
        for dim, size in enumerate(shape):
            pieces = [(sizes.axis_size(axis), where.get(axis, 0)) for axis in self.axes(dim)]
            cuts.append((boxes.nested_chunk(size, pieces),))
        if self.assigned is not None:
            mine = self.assigned.indices[where.get(self.assigned.axis, 0)]
            if self.assigned.dim is None:
                return tuple(product(*cuts)) if mine else ()
            cuts[self.assigned.dim] = boxes.runs(mine)
        return tuple(product(*cuts))

    def box(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> Box:
        """The one box of a sharding without an assignment."""
        assert self.assigned is None
        return self.boxes(shape, coord)[0]

    def local_shape(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> tuple[int, ...]:
        """The shape of a rank's local tensor."""
        held = self.boxes(shape, coord)
        if self.assigned is None:
            return boxes.shape_of(held[0])
        sizes = boxes.shape_of(replace(self, assigned=None).box(shape, coord))
        if not sizes:
            return ()
        dim = self.assigned.dim or 0
        length = sum(box[dim][1] - box[dim][0] for box in held)
        return (*sizes[:dim], length, *sizes[dim + 1 :])

    def device_mesh(self) -> DeviceMesh:
        """The DeviceMesh of this leaf at rest.

        It is the mesh, in another order where the spec cuts minor before major, without the axis of an assignment.

        Raises:
            SpecError: the mesh is abstract.
        """
        if isinstance(self.mesh, AbstractMesh):
            text = f"cannot place a tensor on the abstract mesh {self.mesh}."
            raise SpecError(message("NamedSharding", text, mend="Use fs.make_mesh."))
        return _mesh_at_rest(self.mesh, self.spec, self.assigned.axis if self.assigned else None)

    def placements(self) -> tuple[Placement, ...]:
        """DTensor placements on `device_mesh()`, one for each of its dims."""
        names = _order_at_rest(abstract(self.mesh).names, self.spec, self.assigned.axis if self.assigned else None)
        dims = {axis: dim for dim in range(len(self.spec)) for axis in self.spec.axes(dim)}
        return tuple(
            Shard(dims[name]) if name in dims else Partial("sum") if name in self.partial else Replicate()
            for name in names
        )

    def to_dtensor(self, local: Tensor, shape: Sequence[int]) -> DTensor:
        """Wraps a local tensor as the DTensor that it is; nothing is copied or sent.

        Args:
            local: this rank's part, of `local_shape(shape)`.
            shape: the global shape; along an assigned dim, what this slice of the mesh holds.

        Raises:
            SpecError: the local shape is another.
        """
        want = self.local_shape(shape)
        if tuple(local.shape) != want:
            text = f"{self} of a leaf of shape {tuple(shape)} holds {want} here, got {tuple(local.shape)}."
            raise SpecError(message("NamedSharding.to_dtensor", text))
        size = list(shape)
        if self.assigned is not None and size:
            dim = self.assigned.dim or 0
            where = coordinate(self.mesh).get(self.assigned.axis, 0)
            held = len(self.assigned.indices[where])
            size[dim] = held if self.assigned.dim is not None else size[dim] * held
        return _wrap(local, self.device_mesh(), self.placements(), tuple(size))

    def __str__(self) -> str:
        text = f"{self.spec}"
        if self.partial:
            text += f" unreduced over {', '.join(self.partial)}"
        if self.assigned:
            text += f" assigned over {self.assigned.axis}"
        return text


def _order_at_rest(names: tuple[str, ...], spec: PartitionSpec, assigned: str | None) -> tuple[str, ...]:
    """The mesh dims in an order in which every tuple of the spec reads major first."""
    order = [name for name in names if name != assigned]
    for dim in range(len(spec)):
        cut = [axis for axis in spec.axes(dim) if axis in order]
        places = sorted(order.index(axis) for axis in cut)
        for place, axis in zip(places, cut, strict=True):
            order[place] = axis
    return tuple(order)


@functools.lru_cache(maxsize=1024)
def _mesh_at_rest(mesh: DeviceMesh, spec: PartitionSpec, assigned: str | None) -> DeviceMesh:
    names = abstract(mesh).names
    order = _order_at_rest(names, spec, assigned)
    if order == names:
        return mesh
    if assigned is None:
        return meshes.permuted(mesh, order)
    if not order:
        return _compat.meshless_device_mesh(mesh.device_type, ("dp",), torch.zeros(1, dtype=torch.int64), 0)
    return mesh[order]


def _wrap(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    stride = tuple(strides) if shape else ()
    with torch.no_grad():
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharding_of(x: DTensor) -> NamedSharding:
    """The sharding of a DTensor without explicit assignments.

    Raises:
        SpecError: a placement that no spec expresses.
    """
    return _from_placements(x.device_mesh, tuple(x.placements))


@functools.lru_cache(maxsize=4096)
def _from_placements(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> NamedSharding:
    cuts: dict[int, list[str]] = {}
    partial: list[str] = []
    for name, placement in zip(abstract(mesh).names, placements, strict=True):
        if type(placement) is Shard:
            cuts.setdefault(placement.dim, []).append(name)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.append(name)
        elif not isinstance(placement, Replicate):
            text = f"cannot express the placement {placement} on axis {name}."
            raise SpecError(message("fs.typeof", text, mend="Use Shard(dim), Replicate() or Partial('sum')."))
    spec = P(*(tuple(cuts.get(dim, ())) for dim in range(max(cuts, default=-1) + 1)))
    return NamedSharding(meshes.unpermuted(mesh), spec, tuple(partial))


@dataclass(frozen=True, eq=False)
class Local:
    """A leaf in flight: the local tensor as the one child of a pytree node; sharding and global shape are static data.

    Attributes:
        value: this rank's part, a plain tensor.
        sharding: what part it is.
        shape: the global shape.
    """

    value: Tensor
    sharding: NamedSharding
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Local({typeof(self)})"


def _flatten_local(node: Local) -> tuple[tuple[Tensor], tuple[NamedSharding, tuple[int, ...]], tuple[str]]:
    return (node.value,), (node.sharding, node.shape), ("value",)


def _unflatten_local(aux: tuple[NamedSharding, tuple[int, ...]], children: Sequence[Any]) -> Local:
    return Local(children[0], *aux)


tree.register_node(Local, _flatten_local, _unflatten_local)
torch_pytree.register_pytree_node(
    Local,
    lambda node: ([node.value], (node.sharding, node.shape)),
    lambda children, aux: Local(next(iter(children)), *aux),
)


def to_local(x: DTensor) -> Local:
    """The in-flight form of a DTensor: shares its memory, carries no gradient history."""
    return Local(local_of(x), sharding_of(x), tuple(x.shape))


def local_of(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, without history; another tensor is its own."""
    return _compat.local_tensor(x).detach() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class LeafType:
    """Shape, dtype and sharding of a leaf; prints as `float32[8, 512@dp, 1536]`.

    Attributes:
        shape: global shape.
        dtype: element type.
        sharding: None for a tensor that is on no mesh.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None = None

    def __str__(self) -> str:
        def cut(dim: int) -> str:
            axes = self.sharding.spec.axes(dim) if self.sharding else ()
            return f"@{'*'.join(axes)}" if axes else ""

        dims = ", ".join(f"{size}{cut(dim)}" for dim, size in enumerate(self.shape))
        partial = self.sharding.partial if self.sharding else ()
        tail = f" unreduced over {', '.join(partial)}" if partial else ""
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]{tail}"


def typeof(x: Any) -> LeafType:
    """The type of a leaf: a DTensor at rest, a `Local` in flight, a plain tensor, or anything with shape and dtype."""
    if isinstance(x, DTensor):
        return LeafType(tuple(x.shape), x.dtype, sharding_of(x))
    if isinstance(x, Local):
        return LeafType(x.shape, x.value.dtype, x.sharding)
    return LeafType(tuple(x.shape), x.dtype)
