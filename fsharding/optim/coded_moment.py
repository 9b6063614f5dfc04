"""The dtype or format in which an optimizer keeps its moments: checks, and trees with moments in low precision."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fsharding.base import tree
from fsharding.base.errors import ConfigError, message
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.optim.validation import check_dtype
from fsharding.sharding.block_scales import CodedMoment, is_coded

__all__ = ["CodedMoment", "MomentType", "carriers", "check_moment_type", "is_coded", "moment_leaves", "refuse_format"]

MomentType: TypeAlias = torch.dtype | Blocks | None
"""In what moments are kept: a dtype, or a format of 8 bits; None is for the layout's precision to say."""


def moment_leaves(moments: Tree) -> list[Any]:
    """The moments of a tree, in order: tensors, and moments in low precision."""
    return tree.leaves(moments, is_leaf=is_coded)


def carriers(moments: Tree) -> Tree:
    """A tree of tensors in the shapes and shardings of moments: in the place of one in low precision its codes."""
    return tree.map(lambda m: m.codes if is_coded(m) else m, moments, is_leaf=is_coded)


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
