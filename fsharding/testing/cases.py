"""Examples as data, which pickle, and print as the call that makes them: trees, homes on meshes, reshards, runs.

Guarantee: whole tensors depend on the case and a seed alone, so every rank can check what it holds by itself.
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
    """Prints as the call that makes it, without what is as by default."""

    def __repr__(self) -> str:
        default = type(self)()
        shown = cast("Any", self).__dataclass_fields__
        given = [f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) != getattr(default, name)]
        return f"{type(self).__name__}({', '.join(given)})"


class Pair(NamedTuple):
    """The NamedTuple that drawn trees have as a node.

    Example:
        >>> from fsharding.testing import Leaf, Pair
        >>> fs.tree.paths({"a": Pair(Leaf((2,)), [Leaf()])})
        ('a.left', 'a.right.0')
    """

    left: Any
    right: Any


@dataclass(frozen=True, repr=False)
class Leaf(_Short):
    """A tensor as data.

    Attributes:
        shape: global shape.
        dtype: element type.
        names: dim names, as `plan_layout` takes them; empty for none.
        frozen: whether it has no gradients and moments.

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
        """The whole tensor: random bits, so floats are huge, tiny, infinite, NaN; half of the bools are true."""
        generator = torch.Generator().manual_seed(seed)
        count = math.prod(self.shape) * self.dtype.itemsize
        if self.dtype == torch.bool:
            return torch.randint(2, self.shape, generator=generator).bool()
        return torch.randint(256, (count,), generator=generator).to(torch.uint8).view(self.dtype).view(self.shape)

    def numbers(self, seed: int = 0) -> Tensor:
        """The whole tensor with whole numbers from -4 to 4: their sums and products are exact in every order."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-4, 5, self.shape, generator=generator).to(self.dtype)


def whole_tensors(leaves: Tree, seed: int = 0, *, numbers: bool = False) -> Tree:
    """The whole tensors of a tree of `Leaf`s: the same on every rank, other values for every path.

    Args:
        leaves: a tree of `Leaf`, as strategies draw it.
        seed: other values for another seed.
        numbers: small whole numbers instead of random bits.

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
    """A rank's part of a whole tensor, cut out of it without communication: the oracle of a reshard.

    Args:
        whole: the whole tensor.
        sharding: the sharding of the leaf on its mesh.
        coord: the rank's coordinate by axis; by default this process's.

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
    """The mesh with devices of an abstract one, on the ranks that it names. Collective; made once for each mesh.

    Args:
        mesh: names and sizes of its axes.
        device: type of device, as in `fs.make_mesh`.

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
    """All that a layout is planned from, but for the tree.

    Attributes:
        mesh: without devices; `device_mesh` makes the real one.
        strategy: what is cut over the data axes.
        rules: axes by dim name.
        precision: dtypes at rest.
        stages: explicit owners along `pp`, by path, as `plan_layout` takes them.

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
        """The layout of a tree of `Leaf`s.

        Args:
            leaves: a tree of `Leaf`, as strategies draw it.
            mesh: by default the abstract one; on a rank, `device_mesh(home.mesh)`.
        """
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
            tp="replicate",  # homes are drawn, and some shard nothing over tp
        )


@dataclass(frozen=True, repr=False)
class ReshardCase(_Short):
    """A tree and two homes: what a reshard gets.

    Attributes:
        leaves: tree of `Leaf`s.
        source: where it is.
        target: where it should go.

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
        """How many ranks it takes to run it."""
        return max(max(h.mesh.ranks, default=h.mesh.size - 1) for h in (self.source, self.target)) + 1


@dataclass(frozen=True, repr=False)
class TrainCase(_Short):
    """A run on any mesh with all six axes, exact in float32: the same bits, whatever is summed first.

    The loss is the mean over rows of `sum((w - x)**2) / 2` over all elements w of all trained leaves, so its gradient
    is `w` less the mean of x. Parameters and data are small whole numbers, and `rows` is a power of two.

    Attributes:
        leaves: tree of `Leaf`s.
        home: where it is trained.
        rows: rows of the global batch.
        microbatches: pieces of each rank's part.
        steps: how many.
        donate: whether a step may overwrite its state.

    Example:
        >>> from fsharding.testing import Leaf, TrainCase, whole_tensors
        >>> case = TrainCase({"w": Leaf((3,))}, rows=4)
        >>> total, weight = case.loss(whole_tensors(case.leaves, numbers=True), case.batch(0))
        >>> case.ranks, float(weight)
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
        """How many ranks it takes to run it."""
        return self.home.mesh.size

    def batch(self, step: int, mesh: Mesh | None = None) -> dict[str, Tensor]:
        """The rows of this rank at a step, padded with rows of weight 0 so that all ranks have as many.

        Args:
            step: its number.
            mesh: by default one rank, which has all rows.

        Returns:
            `{"x": float32[R], "weight": float32[R]}`.
        """
        index, count = (0, 1) if mesh is None else data_rank_and_size(mesh, cp=True)
        own = Leaf((self.rows,)).numbers(1000 + step)[index::count]
        each = -(-self.rows // (count * self.microbatches)) * self.microbatches
        rows = {"x": own, "weight": torch.ones(len(own))}
        return {name: torch.nn.functional.pad(x, (0, each - len(own))) for name, x in rows.items()}

    def loss(self, params: Tree, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss function, for params at rest or whole plain tensors: sum over this rank's rows, and their weight."""
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
                # All rows come to those who own a part of the leaf, as tokens come to experts.
                x_all, weight_all = (all_gather(t, owned, dim=0, mesh=node.sharding.mesh) for t in (x, weight))
                rows[owned] = x_all, weight_all
            x_here, weight_here = rows[owned]
            off = w.reshape(1, -1) - x_here.to(w.dtype).view(-1, 1)
            total = total + share * (off.square().sum(1).float() * weight_here).sum() / 2
        model_axes = _model_axes(nodes)
        return psum(total, model_axes[1], mesh=model_axes[0]) if model_axes else total, weight.sum()


def _model_axes(nodes: list[Any]) -> tuple[Mesh, tuple[str, ...]] | None:
    """The mesh, and its axes along which ranks see the same rows."""
    meshes = [node.sharding.mesh for node in nodes if isinstance(node, Local)]
    if not meshes:
        return None
    return meshes[0], tuple(axis for axis in abstract(meshes[0]).names if axis not in data_axes(meshes[0]))


def _once(node: Local, w: Tensor) -> tuple[Tensor, float, tuple[str, ...]]:
    """Of ranks that hold the same part and see the same rows only the first counts; all of them get its gradient."""
    result = _model_axes([node])
    assert result is not None
    mesh, axes = result
    copies = tuple(axis for axis in axes if axis not in node.sharding.spec.all_axes)
    first = not any(coordinate(mesh)[axis] for axis in copies)
    return pvary(w, copies, mesh=mesh) if copies else w, float(first), node.sharding.owned
