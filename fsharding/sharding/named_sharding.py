"""Where one leaf lives: `NamedSharding` = mesh + `P`, to and from DTensor; `Local` = its local tensor in flight.

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
    """A mesh and a `P`: which part of a global tensor each rank holds.

    Attributes:
        mesh: with devices, or abstract.
        spec: axes by dim. On a dim that is assigned, they cut what a coordinate owns.
        partial: axes whose ranks hold different terms of a sum that has not been taken, kept in the order of `AXES`.
        assigned: explicit ownership along axes that the spec does not use, one dim each.
        owned: data axes of the spec along which ranks compute with their own part, such as `ep` for experts. The leaf
            is not gathered over them, and its gradient is not summed over them: tokens come to the owner.
        memory: the tier of a leaf at rest, as in `Strategy.with_memory`. `sharding_of` does not know it.

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
            raise refuse("a mesh, then a P", self.spec, 'Give axes by dim: fs.P("dp", None).')
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
            raise SpecError(message(f"got two assignments of one dim: {dims}.", mend="Give one."))
        # They are a set: shardings that mean the same are equal, whatever the order of the mesh.
        object.__setattr__(self, "partial", tuple(sorted(self.partial, key=AXES.index)))
        if lost := [axis for axis in self.owned if axis not in self.spec.all_axes or axis not in DATA_AXES]:
            text = f"cannot own {', '.join(lost)} with the spec {self.spec}."
            raise SpecError(message(text, mend=f"Own axes of the spec among {', '.join(DATA_AXES)}."))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which the leaf is gathered and its gradient summed, in cutting order."""
        return tuple(axis for axis in data_axes(self.mesh) if axis not in self.owned)

    @property
    def is_away(self) -> bool:
        """Whether leaves are kept elsewhere than on the device of the mesh; on a CPU also its own memory."""
        return self.memory != HERE

    @property
    def on_device(self) -> NamedSharding:
        """The same sharding in memory of the device."""
        return replace(self, memory=HERE)

    @property
    def device_type(self) -> str:
        """The type of the devices of the mesh; "cpu" without devices."""
        return getattr(self.mesh, "device_type", "cpu")

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes of size above 1 that cut a dim, major first."""
        axes = self._axes
        return axes[dim] if dim < len(axes) else ()

    @functools.cached_property
    def _axes(self) -> tuple[tuple[str, ...], ...]:
        """`axes` of each dim of the spec: every step asks for them many times."""
        shape = abstract(self.mesh)
        return tuple(
            tuple(axis for axis in self.spec.axes(dim) if shape.axis_size(axis) > 1) for dim in range(len(self.spec))
        )

    @cache_on_its_mesh()
    def simplified(self) -> NamedSharding:
        """The same sharding without the axes that have size 1."""
        shape = abstract(self.mesh)
        spec = P(*(self.axes(dim) for dim in range(len(self.spec))))
        partial, owned = (tuple(a for a in x if shape.axis_size(a) > 1) for x in (self.partial, self.owned))
        return replace(self, spec=spec, partial=partial, owned=owned)

    def drop(self, dim: int = 0) -> NamedSharding:
        """The sharding of one index along a dim, such as one block of a stacked leaf."""
        return _dropped(self, dim)

    def slice_of_mesh(self) -> NamedSharding:
        """Without its assignments: how a leaf is cut on the slice of the mesh that holds it."""
        return _on_slice(self) if self.assigned else self

    def grid(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> Grid | None:
        """The index ranges that a rank holds along each dim; None if it holds nothing of the leaf at all.

        Args:
            shape: global shape.
            coord: the rank's coordinate by axis; by default this process's, which may be outside the mesh.

        Raises:
            SpecError: the spec, or an assignment, is of more dims than the leaf has.
        """
        if len(self.spec) > len(shape) or any((a.dim or 0) >= max(len(shape), 1) for a in self.assigned):
            text = f"fs.NamedSharding {self} is of more dims than a leaf of shape {tuple(shape)} has."
            raise SpecError(report(text, mend="Give P one entry a dim at most."))
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
        """The boxes of the global tensor that a rank holds, in the order in which its local tensor has them.

        Args:
            shape: global shape.
            coord: the rank's coordinate by axis; by default this process's.
        """
        grid = self.grid(shape, coord)
        return () if grid is None else tuple(box for box, _ in boxes.grid_boxes(grid))

    def box(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> Box:
        """The one box of a sharding without an assignment."""
        assert not self.assigned
        return self.boxes(shape, coord)[0]

    def local_shape(self, shape: Sequence[int], coord: dict[str, int] | None = None) -> tuple[int, ...]:
        """The shape of a rank's local tensor: on a rank that holds nothing, `(0,)` or `(0, ...)`."""
        grid = self.grid(shape, coord)
        if grid is not None:
            return boxes.grid_shape(grid)
        if coord is None and not is_member(self.mesh):
            return (0,)
        rest = tuple(a for a in self.assigned if a.dim is not None)
        return (0, *replace(self, assigned=rest).local_shape(shape, coord)[1:])

    def first_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The local shape at coordinate 0 of every axis, assignments aside: equal on all ranks, and the largest."""
        return (replace(self, assigned=()) if self.assigned else self).local_shape(shape, {})

    def device_mesh(self) -> DeviceMesh:
        """The DeviceMesh of this leaf at rest.

        It is a view of the mesh: in another order where the spec cuts minor before major, without the axis of an
        assignment, and with owned axes under another name.

        Raises:
            SpecError: the mesh is abstract.
        """
        if isinstance(self.mesh, AbstractMesh):
            text = f"fs.NamedSharding cannot place a tensor on the abstract mesh {self.mesh}."
            raise SpecError(report(text, mend="Use fs.make_mesh."))
        return mesh_view.view(self.mesh, self.spec, self.assigned, self.owned)

    @cache_on_its_mesh()
    def placements(self) -> tuple[Placement, ...]:
        """DTensor placements on `device_mesh()`, one for each of its dims."""
        spec = self.spec
        names = mesh_view.order(abstract(self.mesh).names, spec, tuple(a.axis for a in self.assigned))
        dims = {axis: dim for dim in range(len(spec)) for axis in spec.axes(dim)}
        return tuple(
            Shard(dims[name]) if name in dims else Partial("sum") if name in self.partial else Replicate()
            for name in names or ("dp",)
        )

    @public
    def to_dtensor(self, local: Tensor, shape: Sequence[int]) -> DTensor:
        """Wraps a local tensor as the DTensor that it is; nothing is copied or sent.

        Args:
            local: this rank's part, of `local_shape(shape)`.
            shape: the global shape; along an assigned dim, what this slice of the mesh holds.

        Raises:
            ArgumentError: `shape` isn't a sequence of whole numbers.
            SpecError: the local shape is another, or the spec is of more dims than the leaf has.
        """
        numbers = isinstance(shape, list | tuple) and all(hasattr(size, "__index__") for size in shape)
        if not numbers or any(isinstance(size, Tensor) for size in shape):
            raise refuse("a global shape", shape, "Give whole numbers, such as (4, 2).")
        want = self.local_shape(shape)
        if tuple(local.shape) != want:
            text = f"{self} of a leaf of shape {tuple(shape)} holds {want} here, got {tuple(local.shape)}."
            raise SpecError(message(text))
        return self.at_rest(local, self.shape_at_rest(shape))

    def at_rest(self, local: Tensor, size: tuple[int, ...]) -> DTensor:
        """As `to_dtensor`, from the shape that the DTensor itself has; see `shape_at_rest`."""
        return _compat.make_dtensor(local.detach(), self.device_mesh(), self.placements(), size)

    def shape_at_rest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape of the DTensor at rest: along assigned dims, what this slice of the mesh holds."""
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


@cache_on_its_mesh()
def _dropped(sharding: NamedSharding, dim: int) -> NamedSharding:
    left = tuple(
        a if a.dim is None or a.dim < dim else replace(a, dim=a.dim - 1) for a in sharding.assigned if a.dim != dim
    )
    owned = tuple(axis for axis in sharding.owned if axis not in sharding.spec.axes(dim))
    return replace(sharding, spec=sharding.spec.drop(dim), assigned=left, owned=owned)


@cache_on_its_mesh()
def _on_slice(sharding: NamedSharding) -> NamedSharding:
    return replace(sharding, assigned=())


@cache_on_its_mesh()
def _assignments_alone(sharding: NamedSharding) -> NamedSharding:
    return replace(sharding, spec=P(), owned=())


def hides_owners(x: DTensor | Local) -> bool:
    """Whether a leaf is a slice of one whose owners are explicit; see `home_of`."""
    return bool(x.slices) if isinstance(x, Local) else mesh_view.base(x.device_mesh).whole is not None


def sharding_of(x: DTensor) -> NamedSharding:
    """The sharding of a DTensor without explicit assignments."""
    return _from_placements(x.device_mesh, tuple(x.placements))


def home_of(x: DTensor) -> NamedSharding:
    """The sharding of a DTensor on its whole mesh, with its explicit owners."""
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
            text = f"fs.typeof cannot express the placement {placement} on axis {name}."
            raise SpecError(report(text, mend="Use Shard(dim), Replicate() or Partial('sum')."))
    spec = P(*(tuple(cuts.get(dim, ())) for dim in range(max(cuts, default=-1) + 1)))
    owned = tuple(axis for axis in base.owned if axis in spec.all_axes)
    return NamedSharding(base.mesh, spec, tuple(partial), owned=owned)


def _refuses(use: str) -> Any:
    """A method of a node that says what to do first."""

    def refuse(self: Local, *_: Any, **__: Any) -> Any:
        raise _not_gathered(self, use)

    return refuse


def _computes(operate: Callable[..., Any], *, swapped: bool = False) -> Any:
    """An operator of a node that computes element by element; `swapped` where the node is the right operand."""

    def compute(node: Local, *other: Any) -> Local:
        return _elementwise(operate, (*other, node) if swapped else (node, *other))

    return compute


def _not_gathered(node: Local, use: str) -> NotGatheredError:
    held = f"{typeof(node)}, of which this rank holds {list(node.value.shape)}"
    mend = 'Gather its unit first, such as head = fs.gather_unit(params["head"]), and use head["weight"].'
    rule = f"fs.gather_unit was not called for a leaf that {use}."
    return NotGatheredError(report(rule, [held], f"{mend}{of_sums(use)}"), node, use)


def of_sums(use: str) -> str:
    """A sentence about what can be had of a leaf without gathering it, where its use looks like it."""
    if not re.search(r"\b(sum|norm|mean|square|dot|vdot|inner)\b", use):
        return ""
    return " The sum of its squares over all ranks is fs.tree.vdot(x, x), and their root fs.global_norm(x)."


@dataclass(frozen=True, eq=False)
class Local:
    """A leaf in flight: this rank's tensor, with sharding and global shape as static data.

    A leaf of `fs.tree`, and a node with one child of torch's own trees, which torch.func transforms take apart.
    Functions of torch that work element by element take nodes that are cut alike, and give such a node.

    It isn't a tensor: using it as one raises an error that names `gather_unit`.

    Attributes:
        value: this rank's part, a plain tensor.
        sharding: what part it is.
        shape: the global shape; along the axes of `slices`, the shape of this rank's slice.
        slices: axes along which ranks have other slices of the leaf, since its sharding at rest has an assignment: the
            layers of a pipeline stage, or a share of each part of a `Fused` dim.

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
        # Python itself asks for names that begin so, and for fields of a node that is not there yet.
        if name.startswith("_") or name in ("value", "sharding", "shape", "slices"):
            raise AttributeError(name)
        raise _not_gathered(self, f"is asked for .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch that works element by element gives another node; no other function takes a node."""
        return _elementwise(func, args, kwargs or {})

    __add__, __radd__ = _computes(operator.add), _computes(operator.add, swapped=True)
    __sub__, __rsub__ = _computes(operator.sub), _computes(operator.sub, swapped=True)
    __mul__, __rmul__ = _computes(operator.mul), _computes(operator.mul, swapped=True)
    __truediv__, __rtruediv__ = _computes(operator.truediv), _computes(operator.truediv, swapped=True)
    __pow__, __neg__ = _computes(operator.pow), _computes(operator.neg)
    # Not `==`: nodes are compared, and kept in dicts, by identity.
    __matmul__ = __rmatmul__ = _refuses("is an operand of @")
    __rpow__ = _refuses("is an operand of **")
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuses("is an operand of // or %")
    __lt__ = __le__ = __gt__ = __ge__ = _refuses("is compared")
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuses("is an operand of &, |, ^ or ~")
    __abs__ = __float__ = __int__ = __bool__ = __len__ = _refuses("is taken for a number")
    __iter__ = __getitem__ = __setitem__ = _refuses("is indexed")
    __array__ = _refuses("goes into NumPy")


_OPERATORS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.pow: "**",
    operator.neg: "-",
}


@_compat.outside_of_graphs
def _elementwise(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """A function of nodes, where a rank's part of the result depends on its parts alone: what is cut stays cut."""
    every = tree.leaves([*args, *kwargs.values()])
    nodes = [x for x in every if isinstance(x, Local)]
    first = nodes[0]
    sign = _OPERATORS.get(func)
    use = f"is an operand of {sign}" if sign else f"goes into {overrides.resolve_name(func) or func.__name__}"
    if not (sign or _compat.is_elementwise(func)) or first.sharding.partial:
        raise _not_gathered(first, use)
    if any(isinstance(x, Tensor) and x.ndim for x in every):
        raise _not_gathered(first, f"{use} beside a tensor")
    if not all((x.sharding, x.shape, x.slices) == (first.sharding, first.shape, first.slices) for x in nodes):
        rows = [repr(x) if isinstance(x, Local) else str(typeof(x)) for x in every if isinstance(x, Local | Tensor)]
        mend = "Give leaves in one sharding, numbers and 0-d tensors; or gather them first, with fs.gather_unit."
        text = f"fs.Local cannot compute with a leaf that {use} with one that is cut otherwise."
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
    if (node.slices or node.sharding.simplified().spec.all_axes) and _functorch.is_called_by_jacfwd():
        rule = (
            "cannot differentiate with respect to sharded leaves: they would change an element of every shard at once."
        )
        mend = "Use fs.jacfwd and fs.hessian, which know the full leaves."
        raise TransformError(
            report(f"torch.func.jacfwd and hessian {rule}", [str(typeof(Local(value[0], *aux)))], mend)
        )
    return node


# A node of torch's trees, so that torch.func transforms reach its tensor; a leaf of our own: no function that takes
# tensors may take a rank's part for the leaf.
torch_pytree.register_pytree_node(
    Local, lambda node: ([node.value], (node.sharding, node.shape, node.slices)), _unflatten_in_torch
)


def to_local(x: DTensor) -> Local:
    """The in-flight form of a DTensor: shares its memory, carries no gradient history."""
    # One that is on a slice of a mesh, for its assignment, counts as one on the whole mesh: all ranks know its groups.
    sharding, slices = _in_flight(x.device_mesh, tuple(x.placements))
    return Local(local_of(x), sharding, tuple(x.shape), slices)


@cache_on_mesh()
def _in_flight(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[NamedSharding, tuple[str, ...]]:
    """The sharding of a `Local`, on the whole mesh, and the axes of its slices, for a DTensor so placed."""
    base = mesh_view.base(mesh)
    sharding = _from_placements(mesh, placements)
    if base.whole is None:
        return sharding, ()
    here = () if base.axes == ("dp",) and abstract(base.mesh).size == 1 else base.axes
    slices = tuple(axis for axis in abstract(base.whole).names if axis not in here)
    return replace(sharding, mesh=base.whole), slices


def opened(values: tree.Tree) -> tuple[list[Any], Callable[[Sequence[Any]], tree.Tree]]:
    """The leaves of a tree with the tensors of `Local` nodes in their place, and what makes such a tree of others."""
    leaves, spec = tree.flatten(values)
    # Not the nodes themselves: keeping `closed` for backward must not keep tensors alive.
    nodes = [(x.sharding, x.shape, x.slices) if isinstance(x, Local) else None for x in leaves]

    def closed(flat: Sequence[Any]) -> tree.Tree:
        pairs = zip(flat, nodes, strict=True)
        return tree.unflatten(spec, [x if static is None else Local(x, *static) for x, static in pairs])

    return [x.value if isinstance(x, Local) else x for x in leaves], closed


def local_of(x: Tensor) -> Tensor:
    """The local tensor of a DTensor, without history; another tensor is its own."""
    return _compat.local_tensor(x).detach() if isinstance(x, DTensor) else x


def like(x: DTensor, local: Tensor) -> DTensor:
    """Another local tensor in the place of a DTensor's: same shape, same sharding."""
    local = local.detach()
    if local.dtype == x.dtype:
        return _compat.like_dtensor(x, local)
    return _compat.make_dtensor(local, x.device_mesh, x.placements, tuple(x.shape))


@dataclass(frozen=True)
class LeafType:
    """Shape, dtype and sharding of a leaf; prints as `float32[8, 512@dp, 1536]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # element type
    sharding: NamedSharding | None = None  # None for a tensor that is on no mesh

    def __str__(self) -> str:
        def cut(dim: int) -> str:
            axes = self.sharding.spec.axes(dim) if self.sharding else ()
            return f"@{'*'.join(axes)}" if axes else ""

        dims = ", ".join(f"{size}{cut(dim)}" for dim, size in enumerate(self.shape))
        partial = self.sharding.partial if self.sharding else ()
        tail = f" unreduced over {', '.join(partial)}" if partial else ""
        if self.sharding and self.sharding.owned:
            tail += f" owned over {', '.join(self.sharding.owned)}"
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]{tail}"


@public
def typeof(x: Any) -> LeafType:
    """The type of a leaf: a DTensor at rest, a `Local` in flight, a plain tensor, or anything with shape and dtype.

    Raises:
        ArgumentError: something without shape or dtype.

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
        raise refuse("a leaf", x, "Give a tensor; fs.tree.map(fs.typeof, tree) is for trees.")
    return LeafType(tuple(x.shape), x.dtype)
