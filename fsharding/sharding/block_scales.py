"""Shardings of block scales, which a state stores as a separate leaf next to the quantized values.

Guarantee: the boxes of the scales tile the grid of blocks, and a rank's boxes cover all blocks that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import tree
from fsharding.base._compat import cache_on_its_mesh
from fsharding.formats import Blocks
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import abstract
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Runs
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = [
    "CODES", "SMALLEST", "BlockScales", "CodedMoment", "blocks_by_owner", "has_codes", "is_coded", "plan_scales",
    "scales_name",
]  # fmt: skip

SMALLEST = 4096  # the fewest elements of a leaf whose moments are quantized

CODES = "codes"  # the last part of the path of quantized values in checkpoints


class BlockScales(NamedTuple):
    """Placement of a leaf's scales."""

    sharding: NamedSharding  # on the mesh of the leaf
    shape: tuple[int, ...]
    shared: tuple[str, ...]  # axes whose ranks share blocks, in the order of `AXES`


def has_codes(shape: Sequence[int]) -> bool:
    """Return whether moments of a leaf are quantized if there is a format; smaller ones would save little."""
    return len(shape) > 1 and math.prod(shape) >= SMALLEST


def scales_name(format: Blocks) -> str:
    """Return the last part of the path of scales, which contains their block, such as `scales_1x32`."""
    return f"scales_{format.block_text}"


@dataclass(frozen=True, eq=False)
class CodedMoment:
    """A low-precision moment of one leaf: a node with two leaves in the tree of an optimizer state.

    Attributes:
        values: Quantized values, uint8, in the shape and sharding of the parameter.
        scales: Scales of the blocks: sharded like the parameter along dims whose shards end at block boundaries,
            otherwise unsharded.
        format: Format of values and scales.
        root: Whether the square root of the moment is stored.

    Example:
        >>> opt = fs.adamw(1e-3, moments=fs.formats.MXFP8)
        >>> nu = opt.init({"w": torch.zeros(64, 64)}).nu["w"]
        >>> nu.values.dtype, nu.scales.shape, nu.root
        (torch.uint8, torch.Size([64, 2]), True)
    """

    values: Tensor
    scales: Tensor
    format: Blocks
    root: bool = False

    def __getattr__(self, name: str) -> Any:
        # By their names in paths and checkpoints.
        if not name.startswith("_") and name in (paths := {CODES: "values", scales_name(self.format): "scales"}):
            return getattr(self, paths[name])
        raise AttributeError(name)


tree.register_node(
    CodedMoment,
    lambda m: ((m.values, m.scales), (m.format, m.root), (CODES, scales_name(m.format))),
    lambda static, children: CodedMoment(*children, *static),
    fields=True,
)


def is_coded(x: Any) -> bool:
    """Return whether a node of a state is a low-precision moment."""
    return isinstance(x, CodedMoment)


@cache_on_its_mesh
def plan_scales(sharding: NamedSharding, shape: tuple[int, ...], format: Blocks) -> BlockScales:
    """Plan the scales of a leaf of at least two dims."""
    grid = format.grid(shape)
    block = format.sizes(shape)
    last = len(shape) - 2
    spec = [sharding.axes(dim) for dim in range(len(shape))]
    assigned = list(sharding.assigned)
    shared = list[str]()
    for dim, factor in ((last, block[0]), (last + 1, block[1])):
        owners = next((a for a in assigned if a.dim == dim), None)
        ranges = blocks_by_owner(sharding, dim, shape[dim], factor)
        if ranges is None:
            shared += [*spec[dim], *(() if owners is None else (owners.axis,))]
            spec[dim] = ()
            assigned = [a for a in assigned if a is not owners]
        elif owners is not None:
            assigned[assigned.index(owners)] = replace(owners, ranges=ranges)
    kept = P(*spec)
    owned = tuple(axis for axis in sharding.owned if axis in kept.all_axes)
    of_scales = replace(sharding, spec=kept, assigned=tuple(assigned), owned=owned).simplified()
    return BlockScales(of_scales, grid, tuple(axis for axis in AXES if axis in shared))


def blocks_by_owner(sharding: NamedSharding, dim: int, size: int, block: int) -> tuple[Runs, ...] | None:
    """Return the blocks of each owner of a dim, or of the full dim; None if a shard begins or ends inside of one."""
    held = next((a.ranges for a in sharding.assigned if a.dim == dim), (((0, size),),))
    pieces = [abstract(sharding.mesh).axis_size(axis) for axis in sharding.axes(dim)]
    result = tuple(x for x in (_of_blocks(runs, block) for runs in held) if x is not None)
    ends_on_blocks = len(result) == len(held) and all(boxes.ends_on(boxes.length(x), pieces, block) for x in held)
    return result if ends_on_blocks else None


def _of_blocks(runs: Runs, block: int) -> Runs | None:
    """Return the blocks of index ranges; None if a range begins or ends inside of a block."""
    # The last range may end inside: either at the end of the dim, or a range of a different owner begins inside.
    if any(start % block for start, _ in runs) or any(stop % block for _, stop in runs[:-1]):
        return None
    return tuple((start // block, -(-stop // block)) for start, stop in runs)
