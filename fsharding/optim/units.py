"""Which dims of a leaf are stacked units, which leaves are matrices, and sums over dims that ranks share.

In: paths and leaves; local tensors of leaves that are cut in any way. Out: numbers of dims, labels, whole sums.
A stack is one leaf for many equal units, so what an optimizer says of a matrix it says of each row of a stack.
Law: a sum does not depend on the layout beyond the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.at_rest import base
from fsharding.axes import AXES
from fsharding.errors import LayoutError, message
from fsharding.mesh import Mesh, abstract, axis_group
from fsharding.ops.rows import start_sum
from fsharding.sharding import NamedSharding, is_assigned, to_local
from fsharding.stages import begins

__all__ = ["label_matrices", "refuse_hidden", "stacked_dims", "sum_dims"]

STACKS = ("blocks",)
"""Where a `Model` has its stacks."""


def stacked_dims(path: str, stacks: Sequence[str]) -> int:
    """How many first dims of a leaf count units: 1 under the path of a stack, else 0."""
    return int(any(begins(path, entry) for entry in stacks))


def label_matrices(stacks: Sequence[str] = STACKS) -> Callable[[str, Any], str]:
    """Labels for `masked`: "matrix" for the matrices of stacked units, "other" for embedding, head, norms and biases.

    Args:
        stacks: dotted paths, or beginnings of them, of leaves whose first dim counts units; those of a `Model` are
            under `blocks`.
    """

    def label(path: str, leaf: Any) -> str:
        return "matrix" if stacked_dims(path, stacks) and leaf.ndim >= 3 else "other"

    return label


def refuse_hidden(function: str, named: dict[str, Any], known: Sequence[str] = ()) -> None:
    """Refuses leaves with explicit assignments along axes that their DTensor does not tell; all of them are listed.

    Args:
        function: the public function.
        named: leaves by path.
        known: axes along which an assignment does not matter.

    Raises:
        LayoutError: there are such leaves.
    """
    rows: list[str] = []
    for path, x in named.items():
        if isinstance(x, DTensor) and is_assigned(x):
            found = base(x.device_mesh)
            assert found.whole is not None
            hidden = [a for a in abstract(found.whole).names if a not in (*abstract(found.mesh).names, *known)]
            rows += [f"{path} is assigned over {', '.join(hidden)}"] if hidden else []
    if rows:
        mend = (
            "Cut these leaves by rules instead of Fused names or stages, or give them another optimizer with fs.masked."
        )
        raise LayoutError(message(function, "cannot tell who owns leaves with assignments.", rows, mend))


def sum_dims(terms: Iterable[Tensor], leaves: Sequence[Tensor], dims: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Sums over dims of whole leaves, from what each rank has. Collective over the axes that cut these dims.

    Args:
        terms: this rank's part of what is summed; made one by one, if a generator makes them.
        leaves: a leaf for each that is cut as the term is: a DTensor, or a plain tensor that is whole.
        dims: which; they stay, with size 1.

    Returns:
        float64, on every rank that holds the same range of the other dims.
    """
    sums = [x.sum(d, keepdim=True, dtype=torch.float64) if d else x.double() for x, d in zip(terms, dims, strict=True)]
    groups: dict[tuple[Mesh, tuple[str, ...]], list[int]] = {}
    for i, (leaf, over) in enumerate(zip(leaves, dims, strict=True)):
        if isinstance(leaf, DTensor):
            # On the whole mesh, not its slice: all ranks know its groups.
            sharding: NamedSharding = to_local(leaf).sharding
            cut = {axis for dim in over for axis in sharding.axes(dim)}
            if cut:
                groups.setdefault((sharding.mesh, tuple(a for a in AXES if a in cut)), []).append(i)
    pending = [
        (
            members,
            start_sum(torch.cat([sums[i].reshape(-1) for i in members]), axis_group(mesh, axes), torch.float64),
        )
        for (mesh, axes), members in groups.items()
    ]
    for members, total in pending:
        parts = total.wait().split([sums[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            sums[i] = part.view(sums[i].shape)
    return sums
