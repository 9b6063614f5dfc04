"""Inner products of sharded trees: `vdot`, for trees at rest, inside a loss function, and under torch.func.

Guarantee: each element of the full leaves counts once, on every mesh and under every strategy, and in every derivative.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import LayoutError, TransformError, TreeError, message
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import here
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, coordinate, data_axes
from fsharding.ops import collectives
from fsharding.sharding.named_sharding import Local, NamedSharding, hides_owners, to_local, typeof
from fsharding.transforms.gather_context import current_context

__all__ = ["counts_here", "norm_in_flight", "vdot"]


@tree.define_vdot
@_compat.outside_of_graphs
def vdot(a: Tree, b: Tree, *, shardings: Tree = None) -> Tensor:
    """Return the inner product of two trees, summed over ranks; the implementation of `fs.tree.vdot`."""
    return call_as("fs.tree.vdot", _vdot, a, b, shardings)


def _vdot(a: Tree, b: Tree, shardings: Tree) -> Tensor:
    left = tree.named_leaves(a)
    right = tree.named_leaves(b)
    if left.keys() != right.keys():
        rows = [f"{path}: only in one tree" for path in sorted(left.keys() ^ right.keys())]
        raise TreeError(message("got two trees that do not match.", rows, "Give both the same keys."))
    known: dict[str, NamedSharding | None] = dict.fromkeys(left)
    if shardings is not None:
        flat = tree.flatten_up_to(tree.flatten(a)[1], shardings, ("a", "shardings"))
        known = dict(zip(left, flat, strict=True))
    _refuse_hidden_owners({path: x for path, x in left.items() if known[path] is None})
    _refuse_stages(left)
    if unlike := [path for path, x in left.items() if x.shape != right[path].shape]:
        rows = [f"{path} is {_unlike(left[path], right[path])}" for path in unlike]
        raise LayoutError(message("needs equal shapes.", rows, "Give both the same shapes."))
    terms: dict[tuple[str, ...], list[Tensor]] = {}
    mesh: Mesh | None = None
    dtypes = set[torch.dtype]()
    wrong: list[str] = []
    for path, x in left.items():
        (value, sharding, slices), (other, theirs, _) = _opened(x), _opened(right[path])
        dtypes.add(value.dtype)
        owners = known[path]
        owned_alike = owners is None or replace(owners, assigned=()).simplified() == sharding
        if sharding != theirs or value.shape != other.shape or (sharding and sharding.partial) or not owned_alike:
            why = ", unreduced" * (sharding is not None and sharding.partial != ())
            why += "" if owned_alike else f", where shardings= has {owners}"
            wrong.append(f"{path} is {_unlike(x, right[path])}{why}")
            continue
        product = (value.double() * other.double()).sum()
        if owners is not None:
            slices = tuple(owned.axis for owned in owners.assigned)
            product = product if counts_here(owners) else torch.zeros_like(product)
        cut = () if sharding is None else (*sharding.spec.all_axes, *slices)
        mesh = mesh if sharding is None else sharding.mesh
        terms.setdefault(tuple(axis for axis in AXES if axis in cut), []).append(product)
    if wrong:
        mend = "Bring both to one sharding, as fs.reshard or fs.redistribute does."
        raise LayoutError(message("needs equal shardings.", wrong, mend))
    sums = [torch.stack(result).sum() for result in terms.values()]
    sums = [collectives.psum(x, axes, mesh=mesh) if axes else x for axes, x in zip(terms, sums, strict=True)]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    total = torch.stack(sums).sum().to(wide) if sums else torch.zeros(())
    # A rank's loss is its own term of a sum over the data axes: from here on, each rank uses the shared value its way.
    apart = data_axes(mesh) if mesh is not None and current_context() is not None else ()
    return collectives.pvary(total, apart, mesh=mesh) if apart else total


def _unlike(x: object, y: object) -> str:
    """Two leaves in words, with what they differ in."""
    nodes = [to_local(leaf) if isinstance(leaf, DTensor) else leaf for leaf in (x, y)]
    kinds = ["" if isinstance(node, Local) else "a plain " for node in nodes]
    whole = [f"{kind}{typeof(leaf)}" for kind, leaf in zip(kinds, (x, y), strict=True)]
    if whole[0] != whole[1]:
        return " and ".join(whole)
    parts = [
        f"{text} on {node.sharding.mesh}, of which this rank holds {list(node.value.shape)}"
        for text, node in zip(whole, nodes, strict=True)
        if isinstance(node, Local)
    ]
    return " and ".join(parts) if len({*parts}) > 1 else f"{whole[0]} in both"


def norm_in_flight(values: Tree) -> Tensor:
    """The root of the inner product of a tree with itself, 0-d; the gradient of the norm of zeros is zero."""
    square = vdot(values, values)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _refuse_hidden_owners(leaves: dict[str, object]) -> None:
    """Refuse DTensors on a slice of their mesh: which part of a leaf that is, only a layout knows."""
    owned = {path: x for path, x in leaves.items() if isinstance(x, DTensor) and hides_owners(x)}
    hidden = [f"{path} is {typeof(x)} on a slice of its mesh" for path, x in owned.items()]
    if hidden:
        mend = f"Say where they are: {public_name()}(..., shardings=layout.main), or layout.params for parameters."
        rule = "cannot tell who owns leaves of pipeline stages or Fused dims."
        raise LayoutError(message(rule, hidden, mend))


def counts_here(sharding: NamedSharding) -> bool:
    """Whether this rank's part counts: if several coordinates store a full leaf, only the first one's does."""
    owners = [owned for owned in sharding.assigned if owned.dim is None]
    here = coordinate(sharding.mesh) if owners else {}
    return all(here[o.axis] == next(c for c, held in enumerate(o.ranges) if held) for o in owners)


def _refuse_stages(leaves: dict[str, object]) -> None:
    """Refuses leaves in flight of which each pipeline stage has its own part: a loss function sees one stage."""
    staged = [f"{path} is {typeof(x)}" for path, x in leaves.items() if isinstance(x, Local) and "pp" in x.slices]
    if staged:
        mend = "Take the product of trees at rest, with shardings=layout.main."
        raise TransformError(message("cannot sum over pipeline stages in flight.", staged, mend))


def _opened(x: object) -> tuple[Tensor, NamedSharding | None, tuple[str, ...]]:
    """The local tensor of a leaf, its sharding, and the axes along which ranks hold other slices of it."""
    node = to_local(x) if isinstance(x, DTensor) else x
    if isinstance(node, Local):
        return here(node), replace(node.sharding, assigned=()).simplified(), node.slices
    if not isinstance(node, Tensor):
        mend = "Give trees of tensors; None stands for a leaf that is left out."
        raise TreeError(message(f"got a leaf of type {type(node).__name__}.", mend=mend))
    return node, None, ()
