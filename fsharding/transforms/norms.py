"""Inner products of sharded trees: `vdot`, for trees at rest, inside a loss function, and under torch.func.

Each element of the full leaves counts once, on every mesh and under every strategy, and in every derivative.
"""

from __future__ import annotations

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
        raise TreeError(message("got two trees that do not match.", rows, "Pass two trees with the same keys."))
    known: dict[str, NamedSharding | None] = dict.fromkeys(left)
    if shardings is not None:
        flat = tree.flatten_up_to(tree.flatten(a)[1], shardings, ("a", "shardings"))
        known = dict(zip(left, flat, strict=True))
    _refuse_hidden_owners({path: x for path, x in left.items() if known[path] is None})
    _refuse_stages(left)
    if unlike := [path for path, x in left.items() if x.shape != right[path].shape]:
        rows = [f"{path} is {_unlike(left[path], right[path])}" for path in unlike]
        raise LayoutError(message("needs equal shapes.", rows, "Pass two trees with the same shapes."))
    terms: dict[tuple[str, ...], list[Tensor]] = {}
    mesh: Mesh | None = None
    dtypes = set[torch.dtype]()
    wrong: list[str] = []
    for path, x in left.items():
        (value, sharding, slices), (other, theirs, _) = _opened(x), _opened(right[path])
        dtypes.add(value.dtype)
        owners = known[path]
        owned_alike = owners is None or owners.slice_of_mesh().simplified() == sharding
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
        mend = "Bring both to one sharding with fs.reshard or fs.redistribute."
        raise LayoutError(message("needs equal shardings.", wrong, mend))
    sums = [torch.stack(result).sum() for result in terms.values()]
    sums = [collectives.psum(x, axes, mesh=mesh) if axes else x for axes, x in zip(terms, sums, strict=True)]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    total = torch.stack(sums).sum().to(wide) if sums else torch.zeros(())
    # In `value_and_grad` the loss is a sum over data ranks, and each uses the shared value in its part. `pvary` changes
    # no value; its transpose sums their gradients.
    apart = data_axes(mesh) if mesh is not None and current_context() is not None else ()
    return collectives.pvary(total, apart, mesh=mesh) if apart else total


def _unlike(x: object, y: object) -> str:
    """Describe two leaves, with the property in which they differ."""
    nodes = [to_local(leaf) if isinstance(leaf, DTensor) else leaf for leaf in (x, y)]
    kinds = ["" if isinstance(node, Local) else "a plain " for node in nodes]
    texts = [f"{kind}{typeof(leaf)}" for kind, leaf in zip(kinds, (x, y), strict=True)]
    if texts[0] != texts[1]:
        return " and ".join(texts)
    parts = [
        f"{text} on {node.sharding.mesh}, of which this rank holds {list(node.value.shape)}"
        for text, node in zip(texts, nodes, strict=True)
        if isinstance(node, Local)
    ]
    return " and ".join(parts) if len({*parts}) > 1 else f"{texts[0]} in both"


def norm_in_flight(values: Tree) -> Tensor:
    """Return the norm of a tree, 0-d; its gradient at zero is zero, not NaN."""
    square = vdot(values, values)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _refuse_hidden_owners(leaves: dict[str, object]) -> None:
    """Refuse DTensors on a slice of their mesh: only a layout has the part of the leaf that they are."""
    owned = {path: x for path, x in leaves.items() if isinstance(x, DTensor) and hides_owners(x)}
    hidden = [f"{path} is {typeof(x)} on a slice of its mesh" for path, x in owned.items()]
    if hidden:
        mend = f"Pass their shardings: {public_name()}(..., shardings=layout.main), or layout.params for parameters."
        rule = "cannot tell which ranks own leaves of pipeline stages or Fused dims."
        raise LayoutError(message(rule, hidden, mend))


def counts_here(sharding: NamedSharding) -> bool:
    """Return whether this rank's part counts: of several coordinates that store a full leaf, only the first does."""
    owners = [owned for owned in sharding.assigned if owned.dim is None]
    here = coordinate(sharding.mesh) if owners else {}
    return all(here[o.axis] == next(c for c, held in enumerate(o.ranges) if held) for o in owners)


def _refuse_stages(leaves: dict[str, object]) -> None:
    """Refuse local nodes that pipeline stages have different parts of: a loss function runs on one stage."""
    staged = [f"{path} is {typeof(x)}" for path, x in leaves.items() if isinstance(x, Local) and "pp" in x.slices]
    if staged:
        mend = "Call it outside of the loss function, on DTensors, with shardings=layout.main."
        raise TransformError(message("cannot sum over pipeline stages inside a loss function.", staged, mend))


def _opened(x: object) -> tuple[Tensor, NamedSharding | None, tuple[str, ...]]:
    """Return the local tensor of a leaf, its sharding, and the axes along which ranks hold different slices of it."""
    node = to_local(x) if isinstance(x, DTensor) else x
    if isinstance(node, Local):
        return here(node), node.sharding.slice_of_mesh().simplified(), node.slices
    if not isinstance(node, Tensor):
        mend = "Pass trees of tensors; use None for a leaf to leave out."
        raise TreeError(message(f"got a leaf of type {type(node).__name__}.", mend=mend))
    return node, None, ()
