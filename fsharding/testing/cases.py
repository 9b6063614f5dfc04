"""Test cases as data, which pickle and print as the call that makes them: trees, layouts, reshards, training runs.

Guarantee: full tensors depend only on the case and a seed, so every rank can check its shards without communication.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import tree
from fsharding.base.tree import Tree
from fsharding.formats.precision import FP32, Precision
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.mesh.device_mesh import Mesh, abstract, coordinate, data_axes, data_rank_and_size, make_mesh
from fsharding.ops.collectives import all_gather, psum, pvary
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.named_sharding import Local, NamedSharding
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, DimName
from fsharding.sharding.strategy import NO_SHARD, Strategy
from fsharding.transforms.gather_unit import gather_unit

__all__ = ["Home", "Leaf", "Pair", "ReshardCase", "TrainCase", "device_mesh", "local_part", "whole_tensors"]

_ONE = AbstractMesh(("dp",), (1,))
_TIMEOUT = timedelta(seconds=20)


class _Short:
    """A dataclass that prints as the call that makes it, without fields that have their defaults."""

    def __repr__(self) -> str:
        default = type(self)()
        shown = cast("Any", self).__dataclass_fields__
        given = [f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) != getattr(default, name)]
        return f"{type(self).__name__}({', '.join(given)})"


class Pair(NamedTuple):
    """A NamedTuple node of generated trees.

    Example:
        >>> from fsharding.testing import Leaf, Pair
        >>> fs.tree.paths({"a": Pair(Leaf((2,)), [Leaf()])})
        ('a.left', 'a.right.0')
    """

    left: Any
    right: Any


@dataclass(frozen=True, repr=False)
class Leaf(_Short):
    """A parameter as data.

    Attributes:
        shape: Global shape.
        dtype: Element type.
        names: Dim names, as in `plan_layout`; empty for none.
        frozen: Whether the leaf has no gradient and no moments.

    Example:
        >>> from fsharding.testing import Leaf
        >>> leaf = Leaf((2, 3), torch.bfloat16, names=("embed", "mlp"))
        >>> leaf.numbers(seed=1).shape, torch.equal(leaf.numbers(seed=1), leaf.numbers(seed=1))
        (torch.Size([2, 3]), True)
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    names: tuple[DimName, ...] = ()
    frozen: bool = False

    def tensor(self, seed: int = 0) -> Tensor:
        """Return a full tensor of random bits: floats may be huge, tiny, infinite or NaN; half of bools are true."""
        generator = torch.Generator().manual_seed(seed)
        count = math.prod(self.shape) * self.dtype.itemsize
        if self.dtype == torch.bool:
            return torch.randint(2, self.shape, generator=generator).bool()
        return torch.randint(256, (count,), generator=generator).to(torch.uint8).view(self.dtype).view(self.shape)

    def numbers(self, seed: int = 0) -> Tensor:
        """Return a full tensor of integers from -4 to 4, whose sums and products are exact in any order."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-4, 5, self.shape, generator=generator).to(self.dtype)


def whole_tensors(leaves: Tree, seed: int = 0, *, numbers: bool = False) -> Tree:
    """Make the full tensors of a tree of `Leaf`s, equal on every rank.

    Args:
        leaves: Tree of `Leaf`.
        seed: Seed; values also depend on the path of a leaf.
        numbers: Whether values are integers from -4 to 4 instead of random bits.

    Returns:
        A tree of plain tensors.

    Example:
        >>> from fsharding.testing import Leaf, whole_tensors
        >>> leaves = {"w": Leaf((2, 2)), "n": Leaf((), torch.int64)}
        >>> whole, same = (whole_tensors(leaves, seed=1, numbers=True) for _ in range(2))
        >>> whole["w"].shape, whole["n"].dtype, torch.equal(whole["w"], same["w"])
        (torch.Size([2, 2]), torch.int64, True)
    """

    def make(path: str, leaf: Leaf) -> Tensor:
        own = zlib.crc32(f"{path} {seed}".encode())
        return leaf.numbers(own) if numbers else leaf.tensor(own)

    return tree.map_with_path(make, leaves)


def local_part(whole: Tensor, sharding: NamedSharding, coord: dict[str, int] | None = None) -> Tensor:
    """Slice a rank's shard out of a full tensor, without communication: the reference for a reshard.

    Args:
        whole: Full tensor.
        sharding: Sharding of the leaf.
        coord: Coordinate of the rank, by axis; by default this rank's.

    Returns:
        A contiguous copy of the shard; empty if the rank holds none.

    Example:
        >>> from fsharding.testing import local_part
        >>> sharding = fs.NamedSharding(fs.AbstractMesh(("dp",), (2,)), fs.P("dp"))
        >>> local_part(torch.arange(5), sharding, {"dp": 1})
        tensor([3, 4])
    """
    grid = sharding.grid(whole.shape, coord)
    if grid is None:
        return whole.new_empty(sharding.local_shape(whole.shape, coord))
    for dim, runs in enumerate(grid):
        whole = torch.cat([whole.narrow(dim, 0, 0), *(whole.narrow(dim, a, b - a) for a, b in runs)], dim)
    return whole.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def device_mesh(mesh: AbstractMesh, device: str = "cpu") -> DeviceMesh:
    """Make the device mesh of an abstract mesh. Collective; later calls return the same mesh.

    Args:
        mesh: Axes and ranks of the mesh.
        device: Device type, as in `fs.make_mesh`.

    Returns:
        A `DeviceMesh`, whose collectives time out after 20 s.

    Example:
        >>> from fsharding.testing import Home, Leaf, device_mesh
        >>> home = Home(fs.AbstractMesh(("dp",), (1,)), fs.zero(3))
        >>> layout = home.layout({"w": Leaf((4,))}, device_mesh(home.mesh))
        >>> fs.shard({"w": torch.ones(4)}, layout)["w"].to_local()  # on rank 0, the only one of this mesh
        tensor([1., 1., 1., 1.])
    """
    order = (*mesh.names, *(axis for axis in AXES if axis not in mesh.names))
    sizes: dict[str, Any] = dict(zip(mesh.names, mesh.sizes, strict=True))
    return make_mesh(device=device, order=order, timeout=_TIMEOUT, ranks=mesh.members, **sizes)


@dataclass(frozen=True, repr=False)
class Home(_Short):
    """The arguments of `plan_layout` without the tree.

    Attributes:
        mesh: Abstract mesh; `device_mesh` makes it real.
        strategy: Sharding strategy over the data axes.
        rules: Mesh axes of each dim name.
        precision: Dtypes of parameters and state.
        stages: Explicit pipeline stages by path, as in `plan_layout`.

    Example:
        >>> from fsharding.testing import Home, Leaf
        >>> home = Home(fs.AbstractMesh(("dp",), (2,)), fs.zero(3))
        >>> print(home.layout({"w": Leaf((4, 3))}).params["w"])
        P('dp')
    """

    mesh: AbstractMesh = _ONE
    strategy: Strategy = NO_SHARD
    rules: AxisRules = DEFAULT_RULES
    precision: Precision = FP32
    stages: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def layout(self, leaves: Tree, mesh: Mesh | None = None) -> Layout:
        """Plan the layout of a tree of `Leaf`s, on the abstract mesh or, on ranks, on `device_mesh(self.mesh)`."""
        named = tree.named_leaves(leaves)
        return plan_layout(
            leaves,
            mesh or self.mesh,
            self.rules,
            self.strategy,
            precision=self.precision,
            names=tree.map(lambda leaf: leaf.names, leaves),
            frozen=[path for path, leaf in named.items() if leaf.frozen],
            stages=self.stages,
            tp="replicate",  # homes are generated, and some shard nothing over tp
        )


@dataclass(frozen=True, repr=False)
class ReshardCase(_Short):
    """A reshard of a tree between two homes.

    Attributes:
        leaves: Tree of `Leaf`.
        source: Home before the reshard.
        target: Home after it.

    Example:
        >>> from fsharding.testing import Home, Leaf, ReshardCase
        >>> case = ReshardCase({"w": Leaf((4,))}, Home(fs.AbstractMesh(("dp",), (2,))), Home())
        >>> case.ranks
        2
        >>> case.target.layout(case.leaves).params["w"].local_shape((4,))
        (4,)
    """

    leaves: Tree = field(default_factory=lambda: {"a": Leaf()})
    source: Home = Home()
    target: Home = Home()

    @property
    def ranks(self) -> int:
        """Number of ranks that the case needs."""
        return max(max(h.mesh.ranks, default=h.mesh.size - 1) for h in (self.source, self.target)) + 1


@dataclass(frozen=True, repr=False)
class TrainCase(_Short):
    """A training run that is exact in float32, so that its bits don't depend on the order of sums.

    The loss is the mean over rows x of `sum((w - x)**2) / 2` over all elements w of trained leaves; its gradient is w
    minus the mean of x. Parameters and data are small integers, and `rows` must be a power of two.

    Attributes:
        leaves: Tree of `Leaf`.
        home: Home of the state.
        rows: Rows of the global batch.
        microbatches: Microbatches per step.
        steps: Number of steps.
        donate: Whether a step may overwrite its state.

    Example:
        >>> from fsharding.testing import Leaf, TrainCase, whole_tensors
        >>> case = TrainCase({"w": Leaf((3,))}, rows=4)
        >>> total, count = case.loss(whole_tensors(case.leaves, numbers=True), case.batch(0))
        >>> case.ranks, float(count)
        (1, 4.0)
    """

    leaves: Tree = field(default_factory=lambda: {"a": Leaf()})
    home: Home = Home()
    rows: int = 1
    microbatches: int = 1
    steps: int = 1
    donate: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks that the case needs."""
        return self.home.mesh.size

    def batch(self, step: int, mesh: Mesh | None = None) -> dict[str, Tensor]:
        """Return this rank's rows of a step, `{"x": float32[R], "weight": float32[R]}`; padding has weight 0.

        Without `mesh`, one rank has all rows.
        """
        index, count = (0, 1) if mesh is None else data_rank_and_size(mesh, cp=True)
        own = Leaf((self.rows,)).numbers(1000 + step)[index::count]
        each = -(-self.rows // (count * self.microbatches)) * self.microbatches
        rows = {"x": own, "weight": torch.ones(len(own))}
        return {name: torch.nn.functional.pad(x, (0, each - len(own))) for name, x in rows.items()}

    def loss(self, params: Tree, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute (sum of losses, count of rows) of this rank, for sharded parameters or full plain tensors."""
        x = batch["x"]
        weight = batch["weight"]
        total = torch.zeros(())
        nodes = tree.leaves(params)
        rows: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {(): (x, weight)}
        for node, w in zip(nodes, tree.leaves(gather_unit(params)), strict=True):
            if not w.dtype.is_floating_point:
                continue
            w, share, owned = _once(node, w) if isinstance(node, Local) else (w, 1.0, ())
            if owned not in rows:
                # Ranks that own a shard of the leaf gather all rows, as experts receive tokens.
                x_all, weight_all = (all_gather(t, owned, dim=0, mesh=node.sharding.mesh) for t in (x, weight))
                rows[owned] = x_all, weight_all
            x_here, weight_here = rows[owned]
            off = w.reshape(1, -1) - x_here.to(w.dtype).view(-1, 1)
            total = total + share * (off.square().sum(1).float() * weight_here).sum() / 2
        mesh = next((node.sharding.mesh for node in nodes if isinstance(node, Local)), None)
        return total if mesh is None else psum(total, _model_axes(mesh), mesh=mesh), weight.sum()


def _model_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks have the same rows."""
    return tuple(axis for axis in abstract(mesh).names if axis not in data_axes(mesh))


def _once(node: Local, w: Tensor) -> tuple[Tensor, float, tuple[str, ...]]:
    """Return (w, share, owning axes): of ranks with the same shard and rows, only the first has share 1, others 0."""
    # `pvary` sums its gradient over these ranks, so all of them get the gradient of the first.
    mesh = node.sharding.mesh
    copies = tuple(axis for axis in _model_axes(mesh) if axis not in node.sharding.spec.all_axes)
    first = not any(coordinate(mesh)[axis] for axis in copies)
    return pvary(w, copies, mesh=mesh) if copies else w, float(first), node.sharding.owned
