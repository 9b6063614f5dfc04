"""A moment of an optimizer in low precision, as the state holds it between updates: codes, and scales of their blocks.

In: two tensors, or DTensors at rest, and their format. Out: a node of a tree, whose leaves reshards and checkpoints
take as they take any other: the path of the codes ends with `codes`, that of the scales with `scales_1x32`, say, which
tells where they are. See `fsharding.sharding.block_scales`.
Guarantee: a state that is moved or read again has the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import ConfigError, message
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.optim.validation import check_dtype
from fsharding.sharding.block_scales import CODES, scales_name

__all__ = ["CodedMoment", "MomentType", "carriers", "check_moment_type", "is_coded", "moment_leaves", "refuse_format"]

MomentType: TypeAlias = torch.dtype | Blocks | None
"""In what moments are kept: a dtype, or a format of 8 bits; None is for the layout's precision to say."""


@dataclass(frozen=True, eq=False)
class CodedMoment:
    """A moment of one leaf in low precision: a node of a state's tree, with two leaves.

    Attributes:
        codes: uint8, in the shape and the sharding of the parameter.
        scales: of its blocks: cut as the parameter along dims whose cuts are on borders of blocks, else whole.
        format: of both.
        root: what is kept is the root of the moment.

    Example:
        >>> opt = fs.adamw(1e-3, moments=fs.formats.MXFP8)
        >>> nu = opt.init({"w": torch.zeros(64, 64)}).nu["w"]
        >>> nu.codes.dtype, nu.scales.shape, nu.root
        (torch.uint8, torch.Size([64, 2]), True)
    """

    codes: Tensor
    scales: Tensor
    format: Blocks
    root: bool = False

    def __getattr__(self, name: str) -> Any:
        # The path of the scales says of which blocks they are.
        if not name.startswith("_") and name == scales_name(self.format):
            return self.scales
        raise AttributeError(name)


tree.register_node(
    CodedMoment,
    lambda m: ((m.codes, m.scales), (m.format, m.root), (CODES, scales_name(m.format))),
    lambda static, children: CodedMoment(*children, *static),
    fields=True,
)


def is_coded(x: Any) -> bool:
    """Whether something is a moment in low precision."""
    return isinstance(x, CodedMoment)


def moment_leaves(moments: Tree) -> list[Any]:
    """The moments of a tree, in order: tensors, and moments in low precision."""
    return tree.leaves(moments, is_leaf=is_coded)


def carriers(moments: Tree) -> Tree:
    """A tree of tensors in the shapes and shardings of moments: in the place of one in low precision its codes."""
    return tree.map(lambda m: m.codes if is_coded(m) else m, moments, is_leaf=is_coded)


def check_moment_type(moments: MomentType) -> MomentType:
    """Refuses what moments cannot be kept in.

    Args:
        moments: a dtype or a format; None is for the layout to say.

    Returns:
        The same.

    Raises:
        ConfigError: a dtype that kernels lack, or a format of other than 8 bits or with a scale of whole matrices.
    """
    if not isinstance(moments, Blocks):
        return check_dtype("moments", moments)
    if not moments.for_moments:
        mend = "Use one of 8 bits without a scale of whole matrices, such as fs.formats.MXFP8."
        raise ConfigError(message(f"cannot keep moments as {moments}.", mend=mend))
    return moments


def refuse_format(moments: MomentType, why: str) -> torch.dtype | None:
    """Refuses a format of moments for an optimizer that keeps none in one.

    Returns:
        The dtype of moments.

    Raises:
        ConfigError: a format.
    """
    if isinstance(moments, Blocks):
        mend = "Give it moments=torch.float32 of its own, or the layout a precision with a dtype of moments."
        raise ConfigError(message(f"cannot keep moments as {moments}: {why}.", mend=mend))
    return moments
