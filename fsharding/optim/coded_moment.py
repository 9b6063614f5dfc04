"""The dtype or format in which an optimizer keeps its moments: checks, and trees with moments in low precision."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import ConfigError, TreeError, message
from fsharding.base.public import kind_of
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.optim.validation import check_dtype
from fsharding.sharding.block_scales import CodedMoment, is_coded
from fsharding.sharding.entries import state_leaves, state_structure
from fsharding.sharding.named_sharding import local_of

__all__ = [
    "CodedMoment", "MomentType", "carrier_of", "carriers", "check_moment_type", "check_moments", "is_coded",
    "moment_leaves", "parts_of", "refuse_format",
]  # fmt: skip

MomentType: TypeAlias = torch.dtype | Blocks | None
"""In what moments are kept: a dtype, or a format of 8 bits; None is for the layout's precision to say."""


def moment_leaves(moments: Tree) -> list[Any]:
    """The moments of a tree, in order: tensors, and moments in low precision."""
    return tree.leaves(moments, is_leaf=is_coded)


def carriers(moments: Tree) -> Tree:
    """A tree of tensors in the shapes and shardings of moments: in the place of one in low precision its codes."""
    return tree.map(lambda m: m.values if is_coded(m) else m, moments, is_leaf=is_coded)


def parts_of(moments: Tree) -> list[Any]:
    """What a rank has of each moment of a tree: local tensors, and moments in low precision."""
    return [m if is_coded(m) else local_of(m) for m in moment_leaves(moments)]


def carrier_of(part: Any) -> Tensor:
    """The local tensor in whose shape a rank has a moment."""
    return local_of(part.values) if is_coded(part) else part


def check_moments(**moments: Tree) -> None:
    """Refuse moments that are missing or are not floating point tensors; kernels cannot compute with them."""
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
        text = "got moments that are no floating point tensors."
        mend = "The state is what opt.init(params), or the last update, returned."
        raise TreeError(message(text, rows, mend))


def check_moment_type(moments: MomentType) -> MomentType:
    """Return the type of moments, or refuse a dtype without kernels and a format that cannot hold moments."""
    if not isinstance(moments, Blocks):
        return check_dtype("moments", moments)
    if not moments.for_moments:
        mend = "Use one of 8 bits without a scale of whole matrices, such as fs.formats.MXFP8."
        raise ConfigError(message(f"cannot keep moments as {moments}.", mend=mend))
    return moments


def refuse_format(moments: MomentType, why: str) -> torch.dtype | None:
    """Return the dtype of moments, or refuse a format for an optimizer that keeps none in one."""
    if isinstance(moments, Blocks):
        mend = "Give it moments=torch.float32 of its own, or the layout a precision with a dtype of moments."
        raise ConfigError(message(f"cannot keep moments as {moments}: {why}.", mend=mend))
    return moments
