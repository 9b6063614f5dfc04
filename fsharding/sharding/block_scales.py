"""Where the scales of a leaf's blocks are at rest: beside its codes, as a leaf of their own.

Guarantee: the boxes of the scales tile the grid of blocks, and a rank's boxes cover all blocks that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import tree
from fsharding.base._compat import cache_on_mesh
from fsharding.formats import Blocks
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Runs
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import P

__all__ = ["CODES", "SMALLEST", "BlockScales", "CodedMoment", "has_codes", "is_coded", "plan_scales", "scales_name"]

SMALLEST = 4096  # elements of a leaf from which on its moments are kept as codes

CODES = "codes"  # the last part of the path of codes


class BlockScales(NamedTuple):
    """Scales of a leaf."""

    sharding: NamedSharding  # of them, on the mesh of the leaf
    shape: tuple[int, ...]
    shared: tuple[str, ...]  # axes over which ranks have parts of one block, in the order of `AXES`


def has_codes(shape: Sequence[int]) -> bool:
    """Whether moments of a leaf are kept as codes where there is a format: the others are too small to count."""
    return len(shape) > 1 and math.prod(shape) >= SMALLEST


def scales_name(format: Blocks) -> str:
    """The last part of the path of scales, which says of which blocks they are, such as `scales_1x32`."""
    return f"scales_{format.block_text}"


@dataclass(frozen=True, eq=False)
class CodedMoment:
    """A moment of one leaf in low precision: a node of a state's tree, with two leaves.

    Attributes:
        values: uint8, in the shape and the sharding of the parameter.
        scales: of its blocks: cut as the parameter along dims whose cuts are on borders of blocks, else whole.
        format: of both.
        root: what is kept is the root of the moment.

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
        # The names of both in paths: that of the scales tells their blocks, and checkpoints call values codes.
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
    """Whether something is a moment in low precision."""
    return isinstance(x, CodedMoment)


def plan_scales(sharding: NamedSharding, shape: Sequence[int], format: Blocks) -> BlockScales:
    """Plans where the scales of a leaf of at least two dims are."""
    return _plan(sharding.mesh, sharding, tuple(shape), format)


@cache_on_mesh(1024)
def _plan(mesh: Mesh, sharding: NamedSharding, shape: tuple[int, ...], format: Blocks) -> BlockScales:
    grid = format.grid(shape)
    block = format.sizes(shape)
    last = len(shape) - 2
    spec = [sharding.axes(dim) for dim in range(len(shape))]
    assigned = list(sharding.assigned)
    shared = list[str]()
    for dim, factor in ((last, block[0]), (last + 1, block[1])):
        owners = next((a for a in assigned if a.dim == dim), None)
        held = ((((0, shape[dim]),),) if owners is None else owners.ranges) if factor > 1 else ()
        of_grid = [_of_blocks(runs, factor) for runs in held]
        pieces = tuple(abstract(mesh).axis_size(axis) for axis in spec[dim])
        if all(
            scales is not None and boxes.same_cuts(boxes.length(runs), boxes.length(scales), pieces, factor)
            for runs, scales in zip(held, of_grid, strict=True)
        ):
            if owners is not None and factor > 1:
                ranges = tuple(x for x in of_grid if x is not None)
                assigned[assigned.index(owners)] = replace(owners, ranges=ranges)
            continue
        shared += spec[dim]
        spec[dim] = ()
        if owners is not None:
            shared.append(owners.axis)
            assigned.remove(owners)
    kept = P(*spec)
    owned = tuple(axis for axis in sharding.owned if axis in kept.all_axes)
    of_scales = replace(sharding, spec=kept, assigned=tuple(assigned), owned=owned).simplified()
    return BlockScales(of_scales, grid, tuple(axis for axis in AXES if axis in shared))


def _of_blocks(runs: Runs, factor: int) -> Runs | None:
    """The blocks of index ranges, in their order; None where one of them begins or ends inside a block."""
    # The last one may: it ends with the dim, or else the scales do not tile the grid, and the cuts are not the same.
    if any(start % factor for start, _ in runs) or any(stop % factor for _, stop in runs[:-1]):
        return None
    return tuple((start // factor, -(-stop // factor)) for start, stop in runs)
