"""Moments in low precision: the dtypes and formats that may keep them, trees that hold them, and their chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, TreeError, message
from fsharding.base.public import kind_of
from fsharding.base.tree import Tree
from fsharding.formats import Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.optim.chunks import Chunk, ChunkedLeaf, like_leaf, new_zeros, overwrite
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.optim.validation import check_dtype
from fsharding.sharding import boxes
from fsharding.sharding.block_scales import CodedMoment, has_codes, is_coded, plan_scales
from fsharding.sharding.entries import state_leaves, state_structure
from fsharding.sharding.named_sharding import NamedSharding, local_of

__all__ = [
    "CodedChunks", "CodedMoment", "MomentType", "carrier_of", "carriers", "check_moment_type", "check_moments",
    "coded_zeros", "is_coded", "leaf_of", "leaves_of", "moment_leaves", "parts_of", "refuse_format",
]  # fmt: skip

MomentType: TypeAlias = torch.dtype | Blocks | None
"""Storage of moments: a dtype, or an 8-bit format; None takes the layout's precision."""


def moment_leaves(moments: Tree) -> list[Any]:
    """Return the moments of a tree, in order: tensors, and moments in low precision."""
    return tree.leaves(moments, is_leaf=is_coded)


def carriers(moments: Tree) -> Tree:
    """Return a tree of tensors in the shapes and shardings of moments: the values of those in low precision."""
    return tree.map(lambda m: m.values if is_coded(m) else m, moments, is_leaf=is_coded)


def parts_of(moments: Tree) -> list[Any]:
    """Return this rank's shard of each moment of a tree: local tensors, and moments in low precision."""
    return [m if is_coded(m) else local_of(m) for m in moment_leaves(moments)]


def carrier_of(part: Any) -> Tensor:
    """Return the local tensor that has the shape of this rank's shard of a moment."""
    return local_of(part.values) if is_coded(part) else part


def check_moments(**moments: Tree) -> None:
    """Refuse moments that are missing or aren't floating point tensors; kernels can't compute with them."""
    (first, values_of_first), *others = moments.items()
    paths, spec = state_leaves(values_of_first), state_structure(values_of_first)
    flat = [(first, [*paths.values()])]
    flat += [(name, tree.flatten_up_to(spec, values, (first, name))) for name, values in others]
    rows = [
        f"{name}.{path}: {kind_of(x)}"
        for name, column in flat
        for path, x in zip(paths, column, strict=True)
        if not (is_coded(x) or (isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta))
    ]
    if rows:
        mend = "Pass the state that opt.init(params), or the last update, returned."
        raise TreeError(message("got moments that aren't floating point tensors.", rows, mend))


def check_moment_type(moments: MomentType) -> MomentType:
    """Return the type of moments, or refuse a dtype without kernels, or a format that can't hold moments."""
    if not isinstance(moments, Blocks):
        return check_dtype("moments", moments)
    if not moments.for_moments:
        mend = "Use an 8-bit format without a scale for full matrices, such as fs.formats.MXFP8."
        raise ConfigError(message(f"cannot keep moments as {moments}.", mend=mend))
    return moments


def refuse_format(moments: MomentType, why: str) -> torch.dtype | None:
    """Return the dtype of moments, or refuse a format for an optimizer that can't use one."""
    if isinstance(moments, Blocks):
        mend = "Pass moments=torch.float32 to it, or a dtype as the moments of the layout's precision."
        raise ConfigError(message(f"cannot keep moments as {moments}: {why}.", mend=mend))
    return moments


def leaves_of(moments: Tree, shardings: Tree = None) -> list[ChunkedLeaf]:
    """Return where this rank's shards of the leaves of a tree are; assignments need `shardings`."""
    held = carriers(moments)
    known = assigned_shardings(held, shardings)
    rows = zip(tree.paths(held), tree.leaves(held), moment_leaves(moments), known, strict=True)
    return [
        leaf_of(path, whole_shape(x, sharding), sharding, m.format if is_coded(m) else None)
        for path, x, m, sharding in rows
    ]


def leaf_of(
    path: str, shape: tuple[int, ...], sharding: NamedSharding | None, format: Blocks | None = None
) -> ChunkedLeaf:
    """Return where this rank's shard of a leaf is; shape and sharding are of the full leaf."""
    grid = boxes.grid_of(shape) if sharding is None else sharding.grid(shape)
    if format is None or sharding is None:
        block = None if format is None else format.sizes(shape)
        return ChunkedLeaf(path, shape, block, grid, None if format is None else boxes.grid_of(format.grid(shape)))
    scales = plan_scales(sharding, shape, format)
    of_scales = scales.sharding.grid(scales.shape)
    return ChunkedLeaf(path, shape, format.sizes(shape), grid, of_scales, scales.shared, sharding.mesh)


def coded_zeros(
    x: Tensor, shape: tuple[int, ...], sharding: NamedSharding | None, format: Blocks, *, root: bool
) -> CodedMoment | Tensor:
    """Return a moment of zeros for a leaf of a full shape: in a format, or a tensor if the leaf is small."""
    local = local_of(x)
    if not has_codes(shape):
        return like_leaf(x, new_zeros(local, wide(x.dtype)))
    one = 0 if format.scale == "e8m0" else 1.0  # the scale of a block of zeros
    plan = None if sharding is None else plan_scales(sharding, shape, format)
    here = format.grid(shape) if plan is None else plan.sharding.local_shape(plan.shape)
    scales = torch.full(here, one, dtype=format.scale_dtype, device=local.device)
    scales = scales if plan is None else plan.sharding.to_dtensor(scales, plan.shape)
    return CodedMoment(like_leaf(x, new_zeros(local, torch.uint8)), scales, format, root)


class CodedChunks:
    """This rank's shard of a moment in low precision, which is overwritten chunk by chunk."""

    # If ranks share blocks, `largest` has the magnitude of every block of the new values: `note` collects it, an
    # exchange makes it equal on all ranks, and `write_scales` stores the scales at the end. Else chunks write theirs.

    def __init__(self, moment: CodedMoment, leaf: ChunkedLeaf, *, stochastic: bool) -> None:
        assert leaf.block is not None
        self.leaf = leaf
        self._block = leaf.block
        self._root = moment.root  # a root needs half of the range of a second moment
        self._values = local_of(moment.values)
        self._scales = local_of(moment.scales)
        # Roots are rounded stochastically, whatever `stochastic` is.
        self._format = moment.format.with_rounding("stochastic") if stochastic or moment.root else moment.format
        self.largest = torch.zeros(
            self._scales.shape if leaf.shared else 0, dtype=torch.float32, device=self._scales.device
        )

    def widened(self, chunk: Chunk) -> Tensor:
        """Decode a chunk to float32, in new memory."""
        scales = Scales(self._scales[chunk.of_scales])
        x = codec.decode(chunk.of(self._values), scales, self._format, block=self._block, start=chunk.start)
        return x.square_() if self._root else x

    def note(self, chunk: Chunk, x: Tensor) -> None:
        """Raise `largest` to the magnitudes of a new chunk."""
        here = self.largest[chunk.of_scales]
        here.copy_(torch.maximum(here, codec.amaxes(x.sqrt() if self._root else x, self._block, chunk.start)))

    def write(self, chunk: Chunk, x: Tensor, role: str, key: Callable[[], Tensor], finite: Tensor | None) -> None:
        """Write a new chunk, and its scales unless ranks share blocks; keep the old ones if `finite` is false."""
        noise = self.leaf.noise(key(), role, chunk.box, x.device) if self._format.stochastic else None
        x = x.sqrt() if self._root else x
        shared = bool(self.leaf.shared)
        scales = self._scales_of(self.largest[chunk.of_scales] if shared else codec.amaxes(x, self._block, chunk.start))
        values = codec.encode(x, scales, self._format, block=self._block, start=chunk.start, noise=noise)
        if self._root:
            # An update divides by the root, so a root above zero must not become zero.
            values = torch.where((values == 0) & (x > 0), 1, values)
        overwrite(chunk.of(self._values), values, finite)
        if not shared:
            overwrite(self._scales[chunk.of_scales], scales.blocks, finite)

    def write_scales(self, finite: Tensor | None) -> None:
        """Write the scales of all blocks, from `largest`; keep the old ones if `finite` is false."""
        overwrite(self._scales, self._scales_of(self.largest).blocks, finite)

    def _scales_of(self, amax: Tensor) -> Scales:
        """Return scales with which no value of a block exceeds the largest number of the format."""
        # The usual powers of two let values exceed it by up to 1/8; they would be clipped, and never grow again.
        element = self._format.element
        room = 2.0 ** (element.exponent + 1) / element.largest if self._format.scale == "e8m0" else 1.0
        return codec.scales_of(amax * room, self._format)
