"""Hypothesis strategies for meshes, specs, shardings, trees, layouts and test cases, without processes.

Guarantee: everything shrinks to one rank and one replicated leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsharding.base import tree
from fsharding.base.errors import ConfigError, report

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ModuleNotFoundError as error:
    _mend = 'Install it: pip install "fsharding[testing]".'
    raise ConfigError(report("fsharding.testing.strategies needs hypothesis.", mend=_mend)) from error

from fsharding.base.tree import Tree
from fsharding.formats.precision import BF16, FP32, Precision
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.sharding.assigned import Assigned
from fsharding.sharding.layout import LAYERS, Layout
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, DimName, Fused, P, PartitionSpec
from fsharding.sharding.strategy import Strategy, hybrid, zero
from fsharding.testing.cases import Home, Leaf, Pair, ReshardCase, TrainCase

__all__ = [
    "homes", "layouts", "leaves", "meshes", "reshard_cases", "rules", "shapes", "shardings", "specs", "strategies",
    "train_cases", "trees",
]  # fmt: skip

_Draw = Callable[[SearchStrategy[Any]], Any]  # not `st.DrawFn`: `functools.cache` hides what a strategy draws

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 0)
_KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.float64)
_DATA_NAMES = (("embed",), ("expert",), ("embed", "expert"))
_MODEL_NAMES = ("heads", "mlp", "vocab")

# Hypothesis validates each new strategy object, which takes longer than drawing from it, so strategies are cached.
_pick = functools.cache(st.sampled_from)
_shuffled = functools.cache(st.permutations)
_upto = functools.cache(functools.partial(st.integers, 0))
_flag = st.booleans()


@st.composite
def meshes(
    draw: _Draw, max_ranks: int = 8, axes: Sequence[str] = AXES, orders: bool = True, subset_of: int | None = None
) -> AbstractMesh:
    """Generate meshes of up to `max_ranks` ranks; shrinks to one rank."""
    most = max_ranks if subset_of is None else min(max_ranks, subset_of)
    # One draw for each axis, whatever the others are, so that each shrinks by itself.
    order = draw(_shuffled(tuple(axes)))
    chosen = {axis: draw(_upto(len(_AXIS_SIZES) - 1)) for axis in axes}
    left = most
    result: dict[str, int] = {}
    for axis in order:
        size = _AXIS_SIZES[chosen[axis]]
        if 1 < size <= left:
            result[axis], left = size, left // size
    result = result or {"dp" if "dp" in axes else axes[0]: 1}
    names = tuple(result if orders else sorted(result, key=AXES.index))
    mesh = AbstractMesh(names, tuple(result[axis] for axis in names))
    ranks = sorted(draw(_shuffled(tuple(range(subset_of))))[: mesh.size]) if subset_of else []
    return mesh if ranks == [*range(len(ranks))] else AbstractMesh(mesh.names, mesh.sizes, tuple(ranks))


_AXIS_SIZES = (1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)


@st.composite
def specs(draw: _Draw, shape: Sequence[int] | int, mesh: AbstractMesh) -> PartitionSpec:
    """Generate specs in which every axis of a mesh shards at most one dim, in any order; shrinks to `P()`."""
    ndim = shape if isinstance(shape, int) else len(shape)
    by_dim: list[list[str]] = [[] for _ in range(ndim + 1)]  # the first list has the axes that shard no dim
    for axis in draw(_shuffled(mesh.names)):
        by_dim[draw(_upto(ndim))].append(axis)
    return P(*map(tuple, by_dim[1:]))


@st.composite
def shardings(draw: _Draw, shape: Sequence[int], mesh: AbstractMesh, *, assigned: bool = True) -> NamedSharding:
    """Generate shardings of a tensor on a mesh; shrinks to a replicated one."""
    explicit = draw(_flag)
    spec = draw(specs(shape, mesh))
    free = tuple(axis for axis in mesh.names if axis not in spec.all_axes)
    if not (assigned and explicit and free):
        return NamedSharding(mesh, spec)
    axis = draw(_pick(free))
    size = mesh.axis_size(axis)
    dim = draw(_upto(len(shape))) - 1
    if dim < 0:
        return NamedSharding(mesh, spec, (), (Assigned.whole(axis, [draw(_upto(size - 1))], size),))
    owned = _owned(draw, shape[dim], size)
    return NamedSharding(mesh, spec, (), (Assigned.indices(axis, dim, owned),))


def _owned(draw: _Draw, count: int, owners: int) -> list[list[int]]:
    """Assign each index below `count` to one of the owners, in any order."""
    owner = [draw(_upto(owners - 1)) for _ in range(count)]
    order = draw(_shuffled(tuple(range(count))))
    return [[index for index in order if owner[index] == this] for this in range(owners)]


def strategies() -> SearchStrategy[Strategy]:
    """Generate all ZeRO levels, each with any choice of what is also sharded over `replica`; shrinks to zero(0)."""
    levels = st.sampled_from([zero(0), zero(1), zero(2), zero(3)])
    return st.builds(hybrid, levels, params=st.booleans(), grads=st.booleans(), opt_state=st.booleans())


def shapes(max_dims: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Generate shapes of up to `max_dims` dims, with sizes of few divisors, or 0; shrinks to `()`."""
    return st.lists(st.sampled_from(_SIZES), max_size=max_dims).map(tuple)


@st.composite
def leaves(
    draw: _Draw,
    dtypes: Sequence[torch.dtype] = _KINDS,
    max_dims: int = 3,
    *,
    layers: int | None = None,
    fused: bool = True,
) -> Leaf:
    """Generate leaves with or without dim names, all in `rules()`; shrinks to a 0-d leaf of the first dtype."""
    shape = [draw(_pick(_SIZES)) for _ in range(draw(_upto(max_dims)))]
    dtype = draw(_pick(tuple(dtypes)))
    names: list[DimName] = []
    if layers is not None or draw(_flag):
        # At most one name for tp, since an axis shards one dim. Data axes that own experts shard no other dim.
        known = (draw(_pick(_MODEL_NAMES)), *draw(_pick(_DATA_NAMES)), *[None] * max_dims)
        names = [known[place] for place in draw(_shuffled(tuple(range(max_dims + 1))))[: len(shape)]]
    if fused and draw(_flag):
        names = [_in_parts(draw, name, size) for name, size in zip(names, shape, strict=False)]
    if layers is not None:
        shape = [layers, *shape]
        names = [LAYERS, *names]
    return Leaf(tuple(shape), dtype, tuple(names), frozen=draw(_flag) and draw(_flag))


_leaves = functools.cache(leaves)


def _in_parts(draw: _Draw, name: DimName, size: int) -> DimName:
    """Generate the name of a dim of up to three fused parts, which may be empty."""
    if name not in _MODEL_NAMES:
        return name
    first, second = sorted(draw(_upto(size)) for _ in range(2))
    return Fused(str(name), (first, second - first, size - second))


@st.composite
def trees(draw: _Draw, dtypes: Sequence[torch.dtype] = _KINDS, *, fused: bool = True) -> Tree:
    """Generate trees of dicts, lists and NamedTuples, some with a stack `blocks`; shrinks to `{"a": Leaf()}`."""
    plain = _leaves(tuple(dtypes), fused=fused)

    def node(depth: int) -> Tree:
        kind = draw(_pick(("leaf", "list", "dict", "pair"))) if depth else "leaf"
        if kind == "leaf":
            return draw(plain)
        inner = [node(depth - 1) for _ in range(2 if kind == "pair" else draw(_pick((1, 2))))]
        return Pair(*inner) if kind == "pair" else inner if kind == "list" else dict(zip("xy", inner, strict=False))

    result = {"a": node(2)}
    if draw(_flag):
        result["b"] = node(1)
    if draw(_flag):
        stacked = _leaves(tuple(dtypes), 2, layers=draw(_upto(4)) + 1, fused=fused)
        result["blocks"] = {name: draw(stacked) for name in draw(_pick(("w", "wv")))}
    return result


_trees = functools.cache(trees)


@st.composite
def rules(draw: _Draw) -> AxisRules:
    """Generate rules for all names that `leaves` uses; shrinks to the default ones."""
    if not draw(_flag):
        return DEFAULT_RULES
    layers = draw(_pick(("pp", None)))
    # One axis, since a dim of fused parts can't have more.
    wide = "tp" if layers else draw(_pick(("tp", "pp")))
    return DEFAULT_RULES.replace(
        layers=layers,
        embed=tuple(draw(_shuffled(("dp", "ep", "cp")))[: draw(_upto(3))]),
        expert=draw(_pick((("ep",), None, ("cp", "dp")))),
        **{name: wide if draw(_flag) else None for name in _MODEL_NAMES},
    )


_RULES = rules()
_STRATEGIES = strategies()
_meshes = functools.cache(meshes)


@st.composite
def homes(
    draw: _Draw,
    tree: Tree,
    mesh: AbstractMesh | None = None,
    precisions: Sequence[Precision] = (FP32, BF16),
    *,
    stages: bool = True,
) -> Home:
    """Generate homes of a tree: mesh, strategy, rules, precision, stages; shrinks to one rank and zero(0)."""
    return _home(draw, tree, draw(_meshes()) if mesh is None else mesh, tuple(precisions), stages)


def _home(draw: _Draw, tree: Tree, mesh: AbstractMesh, precisions: tuple[Precision, ...], stages: bool = True) -> Home:
    owners = _stages(draw, tree, mesh.axis_size("pp")) if stages else {}
    return Home(mesh, draw(_STRATEGIES), draw(_RULES), draw(_pick(precisions)), owners)


def _stages(draw: _Draw, tree: Tree, size: int) -> dict[str, Any]:
    """Generate stages: subtrees on any stage, and layers of stacks on any stage in any order."""
    result: dict[str, Any] = {}
    for name in tree if size > 1 else ():
        if not draw(_flag):
            continue
        layers = next(iter(tree[name].values())).shape[0] if name == "blocks" else None
        result[name] = draw(_upto(size - 1)) if layers is None else _owned(draw, layers, size)
    return result


@st.composite
def layouts(draw: _Draw, tree: Tree, mesh: AbstractMesh | None = None) -> Layout:
    """Generate layouts of a tree of leaves on an abstract mesh; shrinks to replication on one rank."""
    # On ranks, `layout.with_mesh(device_mesh(layout.mesh))` is the same layout with devices.
    where = draw(_meshes()) if mesh is None else mesh
    return _home(draw, tree, where, (FP32, BF16)).layout(tree)


@st.composite
def reshard_cases(draw: _Draw, max_ranks: int = 8, *, subsets: bool = True, exact: bool = False) -> ReshardCase:
    """Generate a tree and two homes on any two meshes; shrinks to one replicated leaf that stays on one rank."""
    tree = draw(_trees((torch.float32,) if exact else _KINDS, fused=not exact))
    precision = FP32 if exact else draw(_pick((FP32, BF16)))
    world = draw(_upto(max_ranks - 1)) + 1 if subsets else None
    where = [draw(_meshes(max_ranks, subset_of=world)) for _ in range(2)]
    return ReshardCase(tree, *(_home(draw, tree, mesh, (precision,), not exact) for mesh in where))


@st.composite
def train_cases(draw: _Draw, max_ranks: int = 8) -> TrainCase:
    """Generate runs on any mesh that train at least one leaf; shrinks to one step of one leaf on one rank."""
    leaves = draw(_trees((torch.float32, torch.int64), fused=False).filter(_trains))
    return TrainCase(
        leaves,
        _home(draw, leaves, draw(_meshes(max_ranks)), (FP32,), stages=False),
        rows=draw(_pick((1, 2, 4, 8))),
        microbatches=draw(_upto(2)) + 1,
        steps=draw(_upto(2)) + 1,
        donate=draw(_flag),
    )


def _trains(leaves: Tree) -> bool:
    """Return whether a leaf has a gradient, without which a train step raises."""
    return any(leaf.dtype.is_floating_point and not leaf.frozen for leaf in tree.leaves(leaves))
