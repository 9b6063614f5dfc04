"""`NamedSharding`, the mesh and `P` of a leaf, to and from DTensor; `Local`, a leaf's local tensor in a loss function.

Guarantee: `sharding_of(s.to_dtensor(x, shape)) == s`, and the boxes of all ranks tile the leaf.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, overrides
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as torch_pytree

from fsharding.base import _compat, _functorch, tree
from fsharding.base._compat import cache_on_its_mesh, cache_on_mesh
from fsharding.base.errors import NotGatheredError, SpecError, TransformError, message, report
from fsharding.base.public import public, refuse
from fsharding.mesh.abstract_mesh import AXES, DATA_AXES, AbstractMesh, unknown_axis
from fsharding.mesh.device_mesh import Mesh, abstract, coordinate, data_axes, is_member
from fsharding.sharding import boxes, mesh_view
from fsharding.sharding.assigned import Assigned
from fsharding.sharding.boxes import Box, Grid, Runs
from fsharding.sharding.memory_kinds import HERE, tier_named
from fsharding.sharding.partition_spec import P, PartitionSpec

__all__ = [
    "Assigned", "LeafType", "Local", "NamedSharding", "hides_owners", "home_of", "like", "local_of", "of_sums",
    "opened", "sharding_of", "to_local", "typeof",
]  # fmt: skip


@dataclass(frozen=True)
class NamedSharding:
    """A mesh and a partition spec: which shard of a global tensor each rank stores.

    Attributes:
        mesh: Mesh, with devices or abstract.
        spec: Mesh axes that shard each dim, as an `fs.P`; on an assigned dim they shard each coordinate's part.
        partial: Axes over which the values are unreduced: the tensor is the sum over their ranks.
        assigned: Explicit ownership along axes that aren't in `spec`, such as layers of pipeline stages; one per dim.
        owned: Data axes of `spec` over which the leaf isn't all-gathered and its gradient isn't reduced, such as `ep`
            for experts: tokens are dispatched to the owner instead.
        memory: Memory kind of the leaf between steps, as in `Strategy.with_memory`. A DTensor doesn't record it, so
            `sharding_of` returns "device".

    Raises:
        ArgumentError: `mesh` or `spec` of a wrong type, or `partial`, `assigned` or `owned` that isn't a tuple.
        SpecError: An unknown axis, an axis with two roles, or `owned` axes that aren't data axes of the spec.

    Example:
        >>> mesh = fs.AbstractMesh(("dp",), (4,))
        >>> fs.NamedSharding(mesh, fs.P("dp")).local_shape((10, 3))
        (3, 3)
    """

    mesh: Mesh
    spec: PartitionSpec = P()
    partial: tuple[str, ...] = ()
    assigned: tuple[Assigned, ...] = ()
    owned: tuple[str, ...] = ()
    memory: str = HERE

    @public
    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh | AbstractMesh):
            raise refuse("a mesh, then a P", self.mesh, "Make one: mesh = fs.make_mesh(dp=-1).")
        if not isinstance(self.spec, PartitionSpec):
            raise refuse("a mesh, then a P", self.spec, 'Pass axes by dim: fs.P("dp", None).')
        for name, kind in (("partial", str), ("assigned", Assigned), ("owned", str)):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(x, kind) for x in given):
                mend = "Name axes in partial=; fs.plan_layout makes assigned= for stages and fs.Fused dims."
                raise refuse(f"{name}= as a tuple of {kind.__name__}", given, mend)
        used = [*self.spec.all_axes, *self.partial, *(a.axis for a in self.assigned)]
        if unknown := [axis for axis in used if axis not in AXES]:
            raise SpecError(message(unknown_axis(unknown[0])))
        both = sorted({axis for axis in used if used.count(axis) > 1})
        dims = [a.dim for a in self.assigned]
        if both:
            text = f"uses {', '.join(both)} in the spec {self.spec} and again as partial or assigned."
            raise SpecError(message(text, mend="Give an axis one role."))
        if len({*dims}) < len(dims):
            raise SpecError(message(f"got two assignments of one dim: {dims}.", mend="Assign each dim once."))
        # `partial` is a set: sorted, so that equal shardings compare equal whatever the order of the mesh.
        object.__setattr__(self, "partial", tuple(sorted(self.partial, key=AXES.index)))
        if lost := [axis for axis in self.owned if axis not in self.spec.all_axes or axis not in DATA_AXES]:
            text = f"cannot own {', '.join(lost)} with the spec {self.spec}."
            raise SpecError(message(text, mend=f"Own axes of the spec among {', '.join(DATA_AXES)}."))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which the leaf is all-gathered and its gradient reduced, in sharding order."""
        return tuple(axis for axis in data_axes(self.mesh) if axis not in self.owned)

    @property
    def is_away(self) -> bool:
        """Whether the leaf is stored in a memory other than the device's."""
        return self.memory != HERE

    @property
    def on_device(self) -> NamedSharding:
        """This sharding in device memory."""
        return replace(self, memory=HERE)

    @property
    def device_type(self) -> str:
        """Device type of the mesh; "cpu" for an abstract one."""
        return getattr(self.mesh, "device_type", "cpu")

    def axes(self, dim: int) -> tuple[str, ...]:
        """Return the axes of size above 1 that shard a dim, major first."""
        axes = self._axes
        return axes[dim] if dim < len(axes) else ()

    @functools.cached_property
    def _axes(self) -> tuple[tuple[str, ...], ...]:
        """`axes` of each dim, cached because a step reads them many times."""
        shape = abstract(self.mesh)
        return tuple(
            tuple(axis for axis in self.spec.axes(dim) if shape.axis_size(axis) > 1) for dim in range(len(self.spec))
        )

    @cache_on_its_mesh
    def simplified(self) -> NamedSharding:
        """Return this sharding without axes of size 1."""
        shape = abstract(self.mesh)
        spec = P(*(self.axes(dim) for dim in range(len(self.spec))))
        partial, owned = (tuple(a for a in x if shape.axis_size(a) > 1) for x in (self.partial, self.owned))
        return replace(self, spec=spec, partial=partial, owned=owned)

    @cache_on_its_mesh
    def drop(self, dim: int = 0) -> NamedSharding:
        """Return the sharding of one index along a dim, such as one layer of a stacked leaf."""
        left = tuple(
            a if a.dim is None or a.dim < dim else replace(a, dim=a.dim - 1) for a in self.assigned if a.dim != dim
        )
        owned = tuple(axis for axis in self.owned if axis not in self.spec.axes(dim))
        return replace(self, spec=self.spec.drop(dim), assigned=left, owned=owned)

    @cache_on_its_mesh
    def slice_of_mesh(self) -> NamedSharding:
        """Return this sharding without its assignments: that of a leaf's part on its slice of the mesh."""
        return replace(self, assigned=())

    def grid(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> Grid | None:
        """Return the index ranges that a rank stores along each dim; None if it stores nothing of the leaf.

        Args:
            shape: Global shape; a spec or an assignment with more dims raises a `SpecError`.
            coord: Coordinate of the rank by axis; default: this process's, which may be outside of the mesh.
        """
        if len(self.spec) > len(shape) or any((a.dim or 0) >= max(len(shape), 1) for a in self.assigned):
            text = f"fs.NamedSharding {self} has more dims than a leaf of shape {tuple(shape)}."
            raise SpecError(report(text, mend="Pass fs.P at most one entry per dim."))
        if coord is None and not is_member(self.mesh):
            return None
        where = coordinate(self.mesh) if coord is None else coord
        owned = {a.dim: a.ranges[where.get(a.axis, 0)] for a in self.assigned if a.dim is None or shape[a.dim]}
        if owned.get(None) == ():
            return None
        sizes = abstract(self.mesh)
        grid: list[Runs] = []
        for dim, size in enumerate(shape):
            held = owned.get(dim, ((0, size),))
            pieces = [(sizes.axis_size(axis), where.get(axis, 0)) for axis in self.axes(dim)]
            if pieces:
                start, stop = boxes.nested_chunk(boxes.length(held), pieces)
                held = ((start, stop),) if dim not in owned else boxes.cut_runs(held, start, stop)
            grid.append(held)
        return tuple(grid)

    def boxes(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> tuple[Box, ...]:
        """Return the boxes of the global tensor that a rank stores, in the order of its local tensor; see `grid`."""
        grid = self.grid(shape, coord)
        return () if grid is None else tuple(box for box, _ in boxes.grid_boxes(grid))

    def box(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> Box:
        """Return the one box of a rank, for a sharding without assignments; see `grid`."""
        assert not self.assigned
        return self.boxes(shape, coord)[0]

    def local_shape(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's local tensor; a rank that stores nothing has `(0,)` or `(0, ...)`."""
        grid = self.grid(shape, coord)
        if grid is not None:
            return boxes.grid_shape(grid)
        if coord is None and not is_member(self.mesh):
            return (0,)
        # Without the owners of the full leaf, which are other ranks, the remaining dims have sizes on this rank too.
        rest = tuple(a for a in self.assigned if a.dim is not None)
        return (0, *replace(self, assigned=rest).local_shape(shape, coord)[1:])

    def first_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the local shape at coordinate 0, ignoring assignments: the largest, and equal on all ranks."""
        return self.slice_of_mesh().local_shape(shape, {})

    def device_mesh(self) -> DeviceMesh:
        """Return the DeviceMesh of the leaf's DTensor: axes in the order of the spec, assigned ones left out."""
        if isinstance(self.mesh, AbstractMesh):
            text = f"fs.NamedSharding cannot place a tensor on the abstract mesh {self.mesh}."
            raise SpecError(report(text, mend="Use fs.make_mesh."))
        return mesh_view.view(self.mesh, self.spec, self.assigned, self.owned)

    @cache_on_its_mesh
    def placements(self) -> tuple[Placement, ...]:
        """Return the DTensor placements, one per axis of `device_mesh()`."""
        spec = self.spec
        names = mesh_view.order(abstract(self.mesh).names, spec, tuple(a.axis for a in self.assigned))
        dims = {axis: dim for dim in range(len(spec)) for axis in spec.axes(dim)}
        return tuple(
            Shard(dims[name]) if name in dims else Partial("sum") if name in self.partial else Replicate()
            for name in names or ("dp",)
        )

    @public
    def to_dtensor(self, local: Tensor, shape: Sequence[int]) -> DTensor:
        """Wrap this rank's local tensor as a DTensor, without copies or communication.

        Args:
            local: Shard of this rank, of shape `local_shape(shape)`.
            shape: Global shape.

        Returns:
            A DTensor that shares the memory of `local`, without its autograd history. Its global shape is `shape`,
            except along assigned dims, where it is the size on this slice of the mesh.

        Raises:
            ArgumentError: `shape` isn't a sequence of integers.
            SpecError: `local` has a different shape, or the spec has more dims than the leaf.
        """
        numbers = isinstance(shape, list | tuple) and all(hasattr(size, "__index__") for size in shape)
        if not numbers or any(isinstance(size, Tensor) for size in shape):
            raise refuse("a global shape", shape, "Pass integers, such as (4, 2).")
        want = self.local_shape(shape)
        if tuple(local.shape) != want:
            text = f"got a local tensor of shape {tuple(local.shape)}, but {self} of a leaf of shape {tuple(shape)} has"
            raise SpecError(message(f"{text} {want} on this rank.", mend="Pass this rank's shard and the full shape."))
        return self.at_rest(local, self.shape_at_rest(shape))

    def at_rest(self, local: Tensor, size: tuple[int, ...]) -> DTensor:
        """Wrap a local tensor like `to_dtensor`, given the shape of the DTensor itself; see `shape_at_rest`."""
        return _compat.make_dtensor(local.detach(), self.device_mesh(), self.placements(), size)

    def shape_at_rest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the DTensor of a leaf: the global one, or its part on this slice of the mesh."""
        if not self.assigned or not is_member(self.mesh):
            return tuple(shape)
        grid = _assignments_alone(self).grid(shape)
        return (0, *shape[1:]) if grid is None else boxes.grid_shape(grid)

    def __str__(self) -> str:
        text = f"{self.spec}"
        if self.partial:
            text += f" unreduced over {', '.join(self.partial)}"
        if self.assigned:
            text += f" assigned over {', '.join(a.axis for a in self.assigned)}"
        if self.owned:
            text += f" owned over {', '.join(self.owned)}"
        return text if not self.is_away else f"{text} on {tier_named(self.memory).text}"


@cache_on_its_mesh
def _assignments_alone(sharding: NamedSharding) -> NamedSharding:
    return replace(sharding, spec=P(), owned=())


def hides_owners(x: DTensor | Local) -> bool:
    """Return whether a leaf is one slice of a leaf with explicit owners; see `home_of`."""
    return bool(x.slices) if isinstance(x, Local) else mesh_view.base(x.device_mesh).whole is not None


def sharding_of(x: DTensor) -> NamedSharding:
    """Return the sharding of a DTensor on its own mesh, without assignments."""
    return _from_placements(x.device_mesh, tuple(x.placements))


def home_of(x: DTensor) -> NamedSharding:
    """Return the sharding of a DTensor on the full mesh, with its assignments."""
    base = mesh_view.base(x.device_mesh)
    sharding = sharding_of(x)
    return sharding if base.whole is None else replace(sharding, mesh=base.whole, assigned=base.assigned)


@cache_on_mesh()
def _from_placements(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> NamedSharding:
    base = mesh_view.base(mesh)
    cuts: dict[int, list[str]] = {}
    partial: list[str] = []
    for name, placement in zip(base.axes, placements, strict=True):
        if type(placement) is Shard:
            cuts.setdefault(placement.dim, []).append(name)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.append(name)
        elif not isinstance(placement, Replicate):
            # `Partial` of other reductions, and subclasses of `Shard` such as strided ones, have no `P`.
            text = f"fs.typeof cannot express the placement {placement} on axis {name}."
            raise SpecError(report(text, mend="Use Shard(dim), Replicate() or Partial('sum')."))
    spec = P(*(tuple(cuts.get(dim, ())) for dim in range(max(cuts, default=-1) + 1)))
    owned = tuple(axis for axis in base.owned if axis in spec.all_axes)
    return NamedSharding(base.mesh, spec, tuple(partial), owned=owned)


def _refuses(use: str) -> Any:
    """Make a method that raises what to do first."""

    def refuse(self: Local, *_: Any, **__: Any) -> Any:
        raise _not_gathered(self, use)

    return refuse


def _computes(operate: Callable[..., Any], *, swapped: bool = False) -> Any:
    """Make an elementwise operator; `swapped` if the `Local` is the right operand."""

    def compute(node: Local, *other: Any) -> Local:
        return _elementwise(operate, (*other, node) if swapped else (node, *other))

    return compute


def _not_gathered(node: Local, use: str) -> NotGatheredError:
    held = f"{typeof(node)}, of which this rank holds {list(node.value.shape)}"
    mend = 'Gather its unit first, such as head = fs.gather_unit(params["head"]), and use head["weight"].'
    rule = f"fs.gather_unit was not called for a leaf that {use}."
    return NotGatheredError(report(rule, [held], f"{mend}{of_sums(use)}"), node, use)


def of_sums(use: str) -> str:
    """Suggest `vdot` and `global_norm`, which need no gather, if a use looks like a sum or a norm."""
    if not re.search(r"\b(sum|norm|mean|square|dot|vdot|inner)\b", use):
        return ""
    return " The sum of its squares over all ranks is fs.tree.vdot(x, x), and their root fs.global_norm(x)."


@dataclass(frozen=True, eq=False)
class Local:
    """A sharded leaf inside a loss function, before `fs.gather_unit`: this rank's shard, with its sharding and shape.

    Elementwise torch functions accept and return `Local`s of equal sharding. It isn't a tensor otherwise: other uses
    raise `NotGatheredError`. `fs.tree` treats it as a leaf, torch's pytrees as a node whose child is `value`.

    Attributes:
        value: Shard of this rank, a plain tensor.
        sharding: Sharding of the leaf.
        shape: Global shape; along the axes of `slices`, the shape of this rank's slice.
        slices: Axes whose ranks have different slices of the leaf, because its sharding has assignments: layers of
            pipeline stages, or parts of `Fused` dims.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4, 2)}, layout)
        >>> def loss(params):
        ...     assert isinstance(params["w"], fs.Local)
        ...     return fs.gather_unit(params)["w"].sum()
        >>> float(fs.value_and_grad(loss)(params)[0])
        8.0
    """

    value: Tensor
    sharding: NamedSharding
    shape: tuple[int, ...]
    slices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Local({typeof(self)})"

    def __getattr__(self, name: str) -> Any:
        # Python looks up underscored names itself, and fields while an instance is copied or unpickled.
        if name.startswith("_") or name in ("value", "sharding", "shape", "slices"):
            raise AttributeError(name)
        raise _not_gathered(self, f"is accessed as .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply elementwise functions to the shards; refuse others."""
        return _elementwise(func, args, kwargs or {})

    __add__, __radd__ = _computes(operator.add), _computes(operator.add, swapped=True)
    __sub__, __rsub__ = _computes(operator.sub), _computes(operator.sub, swapped=True)
    __mul__, __rmul__ = _computes(operator.mul), _computes(operator.mul, swapped=True)
    __truediv__, __rtruediv__ = _computes(operator.truediv), _computes(operator.truediv, swapped=True)
    __pow__, __neg__ = _computes(operator.pow), _computes(operator.neg)
    # `==` stays: it compares identity, by which nodes are kept in dicts.
    __matmul__ = __rmatmul__ = _refuses("is an operand of @")
    __rpow__ = _refuses("is an operand of **")
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuses("is an operand of // or %")
    __lt__ = __le__ = __gt__ = __ge__ = _refuses("is compared")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuses("is an operand of &, |, ^ or ~")
    __abs__ = __float__ = __int__ = __bool__ = __len__ = _refuses("is used as a number")
    __iter__ = __getitem__ = __setitem__ = _refuses("is indexed")
    __array__ = _refuses("is converted to NumPy")


_OPERATORS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
    operator.neg: "-",
}  # fmt: skip


@_compat.outside_of_graphs
def _elementwise(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Apply an elementwise function to the shards of leaves; the result has their sharding."""
    every = tree.leaves([*args, *kwargs.values()])
    nodes = [x for x in every if isinstance(x, Local)]
    first = nodes[0]
    sign = _OPERATORS.get(func)
    use = f"is an operand of {sign}" if sign else f"is passed to {overrides.resolve_name(func) or func.__name__}"
    # Not for unreduced leaves: f(a) + f(b) isn't f(a + b).
    if not (sign or _compat.is_elementwise(func)) or first.sharding.partial:
        raise _not_gathered(first, use)
    if any(isinstance(x, Tensor) and x.ndim for x in every):
        raise _not_gathered(first, f"{use} with a plain tensor")
    if not all((x.sharding, x.shape, x.slices) == (first.sharding, first.shape, first.slices) for x in nodes):
        rows = [repr(x) if isinstance(x, Local) else str(typeof(x)) for x in every if isinstance(x, Local | Tensor)]
        mend = "Pass leaves of one sharding, numbers and 0-d tensors; or gather them first, with fs.gather_unit."
        text = f"fs.Local cannot compute: a leaf {use} with one that is sharded differently."
        raise TransformError(report(text, rows, mend))
    values = [x.value if isinstance(x, Local) else x for x in args]
    named = {key: x.value if isinstance(x, Local) else x for key, x in kwargs.items()}
    return replace(first, value=func(*values, **named))


_Aux: TypeAlias = tuple[NamedSharding, tuple[int, ...], tuple[str, ...]]


def _unflatten_in_torch(children: Iterable[Any], aux: _Aux) -> Local:
    value = next(iter(children))
    inside = [] if isinstance(value, Tensor) else torch_pytree.tree_leaves(value, is_leaf=lambda x: type(x) is Local)
    if nodes := [x for x in inside if isinstance(x, Local)]:
        rows = [f"{typeof(Local(x.value, *aux))} with respect to {typeof(x)}" for x in nodes]
        rule = "cannot give the Jacobian of nodes with respect to nodes: it knows what one rank holds of them."
        raise TransformError(report(f"torch.func {rule}", rows, "Use fs.jacfwd, or fs.hessian in the place of both."))
    node = Local(value, *aux)
    # jacfwd seeds one tangent per element of `value`, on every rank at once: the wrong columns for a sharded leaf.
    if (node.slices or node.sharding.simplified().spec.all_axes) and _functorch.is_called_by_jacfwd():
        rule = "cannot differentiate with respect to sharded leaves: they would perturb every shard at once."
        rows = [str(typeof(Local(value[0], *aux)))]
        mend = "Use fs.jacfwd and fs.hessian, which differentiate with respect to the full leaves."
        raise TransformError(report(f"torch.func.jacfwd and hessian {rule}", rows, mend))
    return node


# A node in torch's pytrees, so that torch.func transforms reach its tensor; a leaf in ours, so that no function over
# tensors mistakes a shard for the leaf.
torch_pytree.register_pytree_node(
    Local, lambda node: ([node.value], (node.sharding, node.shape, node.slices)), _unflatten_in_torch
)


def to_local(x: DTensor) -> Local:
    """Convert a DTensor to a `Local` that shares its memory, without autograd history."""
    # A DTensor on a slice of its mesh, because of assignments, counts as on the full mesh, whose groups all ranks have.
    sharding, slices = _in_flight(x.device_mesh, tuple(x.placements))
    return Local(local_of(x), sharding, tuple(x.shape), slices)


@cache_on_mesh()
def _in_flight(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[NamedSharding, tuple[str, ...]]:
    """Return a `Local`'s sharding on the full mesh, and the axes of its slices, for placements of a DTensor."""
    base = mesh_view.base(mesh)
    sharding = _from_placements(mesh, placements)
    if base.whole is None:
        return sharding, ()
    here = () if base.axes == ("dp",) and abstract(base.mesh).size == 1 else base.axes
    slices = tuple(axis for axis in abstract(base.whole).names if axis not in here)
    return replace(sharding, mesh=base.whole), slices


def opened(values: tree.Tree) -> tuple[list[Any], Callable[[Sequence[Any]], tree.Tree]]:
    """Flatten a tree to plain tensors, also those in `Local`s, and return them with the function that rebuilds it."""
    leaves, spec = tree.flatten(values)
    # Static fields only: keeping `closed` for backward must not keep tensors alive.
    nodes = [(x.sharding, x.shape, x.slices) if isinstance(x, Local) else None for x in leaves]

    def closed(flat: Sequence[Any]) -> tree.Tree:
        pairs = zip(flat, nodes, strict=True)
        return tree.unflatten(spec, [x if static is None else Local(x, *static) for x, static in pairs])

    return [x.value if isinstance(x, Local) else x for x in leaves], closed


def local_of(x: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, without autograd history; return other tensors as they are."""
    return _compat.local_tensor(x).detach() if isinstance(x, DTensor) else x


def like(x: DTensor, local: Tensor) -> DTensor:
    """Make a DTensor with the shape and sharding of `x` from a new local tensor."""
    local = local.detach()
    if local.dtype == x.dtype:
        return _compat.like_dtensor(x, local)
    return _compat.make_dtensor(local, x.device_mesh, x.placements, tuple(x.shape))


@dataclass(frozen=True)
class LeafType:
    """Shape, dtype and sharding of a leaf; prints as `float32[8, 512@dp, 1536]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: NamedSharding | None = None  # None for a plain tensor

    def __str__(self) -> str:
        def axes_text(dim: int) -> str:
            axes = self.sharding.spec.axes(dim) if self.sharding else ()
            return f"@{'*'.join(axes)}" if axes else ""

        dims = ", ".join(f"{size}{axes_text(dim)}" for dim, size in enumerate(self.shape))
        partial = self.sharding.partial if self.sharding else ()
        tail = f" unreduced over {', '.join(partial)}" if partial else ""
        if self.sharding and self.sharding.owned:
            tail += f" owned over {', '.join(self.sharding.owned)}"
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]{tail}"


@public
def typeof(x: Any) -> LeafType:
    """Return the shape, dtype and sharding of a leaf.

    Args:
        x: A DTensor, a `Local`, a plain tensor, or anything with `shape` and `dtype`.

    Returns:
        A `LeafType`; its `sharding` is None unless `x` is a DTensor or a `Local`.

    Raises:
        ArgumentError: `x` has no shape or dtype.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> text = str(fs.typeof(fs.shard({"w": torch.ones(4, 2)}, layout)["w"]))
        >>> text == ("float32[4@dp, 2]" if layout.mesh.size() > 1 else "float32[4, 2]")
        True
    """
    if isinstance(x, DTensor):
        return LeafType(tuple(x.shape), x.dtype, sharding_of(x))
    if isinstance(x, Local):
        return LeafType(x.shape, x.value.dtype, x.sharding)
    if not isinstance(getattr(x, "dtype", None), torch.dtype) or not hasattr(x, "shape"):
        raise refuse("a leaf", x, "Pass a tensor; for trees, write fs.tree.map(fs.typeof, tree).")
    return LeafType(tuple(x.shape), x.dtype)
