"""Hypothesis strategies for meshes, specs, shardings, trees, layouts and whole cases: data, made without any process.

In: limits. Out: strategies whose examples are pure values, to be sent to ranks with `run_ranks` or `RankPool`.
Needs hypothesis, which is in the `test` extra; nothing else of the package does.
Law: everything shrinks to one rank and one replicated leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsharding.errors import ConfigError, message

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ModuleNotFoundError as error:
    _mend = 'Install the extra that has it: pip install "fsharding[test]".'
    raise ConfigError(message("fsharding.testing.strategies", "needs hypothesis.", mend=_mend)) from error

from fsharding.layout import LAYERS, Layout
from fsharding.mesh import AXES, AbstractMesh
from fsharding.precision import BF16, FP32, Precision
from fsharding.sharding import NamedSharding
from fsharding.spec import DEFAULT_RULES, AxisRules, P, PartitionSpec
from fsharding.strategy import Strategy, hybrid, zero
from fsharding.testing.cases import Home, Leaf, Pair, ReshardCase, TrainCase
from fsharding.tree import Tree

__all__ = [
    "homes",
    "layouts",
    "leaves",
    "meshes",
    "reshard_cases",
    "rules",
    "shapes",
    "shardings",
    "specs",
    "strategies",
    "train_cases",
    "trees",
]

Draw = Callable[[SearchStrategy[Any]], Any]

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 0)
_KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.float64)
_DATA_NAMES = ("embed", "expert")
_MODEL_NAMES = ("heads", "mlp", "vocab")


@st.composite
def meshes(
    draw: Draw, max_ranks: int = 8, axes: Sequence[str] = AXES, orders: bool = True, subset_of: int | None = None
) -> AbstractMesh:
    """Meshes of up to `max_ranks` ranks; shrinks to one rank.

    Args:
        draw: given by Hypothesis.
        max_ranks: most ranks of a mesh.
        axes: which axes it may have.
        orders: whether the axes may stand in any order, and not just in that of `AXES`.
        subset_of: a number of ranks of which the mesh has some, in any case the lowest of `range`; by default it has
            all of its own.
    """
    most = max_ranks if subset_of is None else min(max_ranks, subset_of)
    sizes = draw(st.sampled_from([s for s in _factorizations(most) if len(s) <= len(axes)]))
    names = draw(st.permutations(axes))[: len(sizes)] if sizes else ["dp" if "dp" in axes else axes[0]]
    if not orders:
        names.sort(key=AXES.index)
    mesh = AbstractMesh(tuple(names), sizes or (1,))
    if subset_of is None or mesh.size == subset_of:
        return mesh
    ranks = draw(st.lists(st.sampled_from(range(subset_of)), min_size=mesh.size, max_size=mesh.size, unique=True))
    first = set(ranks) == set(range(mesh.size))
    return mesh if first else AbstractMesh(mesh.names, mesh.sizes, tuple(sorted(ranks)))


def _factorizations(most: int) -> list[tuple[int, ...]]:
    """Every way to write a number up to `most` as an ordered product of sizes above 1, fewest ranks first."""
    found: list[tuple[int, ...]] = [()]
    for sizes in found:
        found += [(*sizes, n) for n in range(2, most // math.prod(sizes) + 1)]
    return sorted(found, key=lambda sizes: (math.prod(sizes), len(sizes), sizes))


@st.composite
def specs(draw: Draw, shape: Sequence[int] | int, mesh: AbstractMesh) -> PartitionSpec:
    """Specs in which every axis of a mesh cuts one dim or none, in any order; shrinks to `P()`.

    Args:
        draw: given by Hypothesis.
        shape: of the tensor, or how many dims it has; any size may be cut by any axes.
        mesh: whose axes are used.
    """
    ndim = shape if isinstance(shape, int) else len(shape)
    cuts: list[list[str]] = [[] for _ in range(ndim + 1)]
    for axis in draw(st.permutations(mesh.names)):
        cuts[draw(st.integers(0, ndim))].append(axis)
    return P(*(tuple(cut) for cut in cuts[1:]))


def shardings(shape: Sequence[int], mesh: AbstractMesh) -> SearchStrategy[NamedSharding]:
    """Shardings of a tensor on a mesh; shrinks to a replicated one.

    Args:
        shape: of the tensor.
        mesh: where it lives.
    """
    return specs(shape, mesh).map(lambda spec: NamedSharding(mesh, spec))


def strategies() -> SearchStrategy[Strategy]:
    """All levels, each with every choice of what is cut over `replica` as well; shrinks to zero(0)."""
    levels = st.sampled_from([zero(level) for level in range(4)])
    return st.builds(hybrid, levels, params=st.booleans(), grads=st.booleans(), opt_state=st.booleans())


def shapes(max_dims: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of up to `max_dims` dims, whose sizes divide by little, or are 0; shrinks to `()`."""
    return st.lists(st.sampled_from(_SIZES), max_size=max_dims).map(tuple)


@st.composite
def leaves(
    draw: Draw, dtypes: Sequence[torch.dtype] = _KINDS, max_dims: int = 3, layers: int | None = None
) -> Leaf:
    """Leaves with or without dim names, which fit the rules of `rules()`; shrinks to a 0-d leaf of the first dtype.

    Args:
        draw: given by Hypothesis.
        dtypes: element types; whole numbers and bools are leaves without gradients.
        max_dims: most dims.
        layers: size of a first dim that is named "layers"; None for a leaf that is no stack.
    """
    shape = draw(shapes(max_dims))
    named = layers is not None or draw(st.booleans())
    # One name for the data axes and one for tp: an axis cuts one dim of a leaf.
    free = [draw(st.sampled_from(_MODEL_NAMES)), draw(st.sampled_from(_DATA_NAMES))]
    places = draw(st.permutations(range(-1, max_dims)))[: len(shape)] if named else []
    names = [free[place] if 0 <= place < 2 else None for place in places]
    dtype = draw(st.sampled_from(list(dtypes)))
    if layers is not None:
        shape, names = (layers, *shape), [LAYERS, *names]
    return Leaf(shape, dtype, tuple(names), frozen=draw(st.booleans()) and draw(st.booleans()))


@st.composite
def trees(draw: Draw, dtypes: Sequence[torch.dtype] = _KINDS, *, max_leaves: int = 4) -> Tree:
    """Dicts of leaves, lists, dicts and NamedTuples, some with a subtree `blocks` of stacked leaves.

    Shrinks to `{"a": Leaf()}`.

    Args:
        draw: given by Hypothesis.
        dtypes: element types.
        max_leaves: about how many leaves there are beside the blocks.
    """

    def nodes(inner: SearchStrategy[Tree]) -> SearchStrategy[Tree]:
        lists = st.lists(inner, min_size=1, max_size=2)
        dicts = st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=2)
        return lists | dicts | st.builds(Pair, inner, inner)

    inner = st.recursive(leaves(dtypes), nodes, max_leaves=max_leaves)
    result = {"a": draw(inner)}
    if draw(st.booleans()):
        result["b"] = draw(inner)
    if draw(st.booleans()):
        layers = draw(st.integers(1, 5))
        result["blocks"] = {name: draw(leaves(dtypes, 2, layers)) for name in "wv"[: draw(st.integers(1, 2))]}
    return result


@st.composite
def rules(draw: Draw) -> AxisRules:
    """Rules for every name of the drawn leaves; shrinks to the default ones."""
    if not draw(st.booleans()):
        return DEFAULT_RULES
    data = ("dp", "ep", "cp")
    changed: dict[str, Any] = {
        "layers": draw(st.sampled_from(["pp", None])),
        "embed": tuple(draw(st.permutations(data))[: draw(st.integers(0, 3))]),
        "expert": draw(st.sampled_from([("ep",), None, ("cp", "dp")])),
    }
    model_axes = ("tp",) if changed["layers"] else ("pp", "tp")
    wide = draw(st.permutations(model_axes))
    for name in _MODEL_NAMES:
        changed[name] = tuple(wide) if draw(st.booleans()) else None
    return DEFAULT_RULES.replace(**changed)


@st.composite
def homes(
    draw: Draw, tree: Tree, mesh: AbstractMesh | None = None, precisions: Sequence[Precision] = (FP32, BF16)
) -> Home:
    """Homes of a tree: mesh, strategy, rules, precision, stages; shrinks to one rank and zero(0).

    Args:
        draw: given by Hypothesis.
        tree: of `Leaf`s.
        mesh: by default any of up to 8 ranks.
        precisions: which to choose from.
    """
    where = draw(meshes()) if mesh is None else mesh
    return Home(where, draw(strategies()), draw(rules()), draw(st.sampled_from(list(precisions))))


@st.composite
def layouts(draw: Draw, tree: Tree, mesh: AbstractMesh | None = None) -> Layout:
    """Layouts of a tree of leaves on an abstract mesh; shrinks to nothing cut on one rank.

    On a rank, `layout.with_mesh(device_mesh(layout.mesh))` is the same with devices.

    Args:
        draw: given by Hypothesis.
        tree: of `Leaf`s.
        mesh: by default any of up to 8 ranks.
    """
    return draw(homes(tree, mesh)).layout(tree)


@st.composite
def reshard_cases(draw: Draw, max_ranks: int = 8, *, subsets: bool = True, exact: bool = False) -> ReshardCase:
    """A tree and two homes on any two meshes; shrinks to one replicated leaf that stays on one rank.

    Args:
        draw: given by Hypothesis.
        max_ranks: most ranks.
        subsets: whether the meshes may have some of the ranks only, each others.
        exact: float32 alone, so that training is exact too.
    """
    tree = draw(trees([torch.float32] if exact else _KINDS))
    precisions = [FP32] if exact else [draw(st.sampled_from([FP32, BF16]))]
    world = draw(st.integers(1, max_ranks)) if subsets else None
    where = [draw(meshes(max_ranks, subset_of=world)) for _ in range(2)]
    return ReshardCase(tree, *(draw(homes(tree, mesh, precisions)) for mesh in where))


@st.composite
def train_cases(draw: Draw, max_ranks: int = 8) -> TrainCase:
    """Runs on any mesh; shrinks to one step of one leaf on one rank.

    Args:
        draw: given by Hypothesis.
        max_ranks: most ranks.
    """
    tree = draw(trees([torch.float32, torch.int64]))
    return TrainCase(
        tree,
        draw(homes(tree, draw(meshes(max_ranks)), [FP32])),
        rows=draw(st.sampled_from([1, 2, 4, 8])),
        microbatches=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 3)),
        donate=draw(st.booleans()),
    )
