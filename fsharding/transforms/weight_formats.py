"""Weights and gradients in low precision: which leaves of a tree have a format, how they are rounded, by which key.

In: a `Precision`, paths of leaves, a key. Out: for a leaf in flight, and for terms of its gradient, format and noise;
for a state, parameters at rest that have been rounded to what the loss function would see of their main copies.
Law: a weight is rounded once, from its main copy, to the same bits under every strategy and on every mesh.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding import random, tree
from fsharding.comm import codes
from fsharding.comm.codes import CodePlan
from fsharding.errors import ConfigError, message
from fsharding.formats.blocks import Blocks
from fsharding.formats.philox import uniform_at
from fsharding.mesh.device_mesh import Mesh, data_position
from fsharding.precision import Precision
from fsharding.sharding.boxes import Runs
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout, is_stacked
from fsharding.sharding.named_sharding import Local, NamedSharding, like, local_of, to_local
from fsharding.transforms.unit_plan import LeafIndex, whole
from fsharding.tree import Tree

__all__ = ["AtRest", "WeightFormats", "key_of_terms", "plan_weight", "round_copies", "round_leaves", "round_params"]

_T = TypeVar("_T")
_GIVE_A_KEY = "Give a key, int64[2], that is another one in each step: fs.value_and_grad(..., key=fs.random.key(0))."


@dataclass(frozen=True)
class WeightFormats:
    """The formats of the leaves of a parameter tree.

    Attributes:
        precision: with `gather`, or a format in `reduce`.
        paths: of the leaves.
        stacks: for each leaf how many layers it has, where units are rows of it: in the whole model.
        firsts: for each leaf, which of these layers its first row is.
        key: for keyed rounding, int64[2]; None without one.
        term_key: the same for terms of gradients: another one on each data rank, and for each microbatch.
    """

    precision: Precision
    paths: Sequence[str]
    stacks: Sequence[int]
    firsts: Sequence[int]
    key: Tensor | None
    term_key: Tensor | None

    def of(self, index: LeafIndex, ndim: int) -> Blocks | None:
        """The format of a leaf of a unit, which has so many dims there."""
        format = self.precision.format_of(self.paths[index.leaf], ndim)
        return None if format is None or self._keeps(index) else format

    def of_term(self, index: LeafIndex, ndim: int) -> Blocks | None:
        """The format of terms of the gradient of a leaf of a unit, which has so many dims there."""
        format = self.precision.reduce_format(self.paths[index.leaf], ndim)
        return None if format is None or self._keeps(index) else format

    def _keeps(self, index: LeafIndex) -> bool:
        if index.row is None:
            return False
        kept = self.precision.kept_rows(self.paths[index.leaf], self.stacks[index.leaf])
        return self.firsts[index.leaf] + index.row in kept

    def noise(self, index: LeafIndex, sharding: NamedSharding, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The numbers in [0, 1) by which the shard of a leaf of a unit is rounded."""
        return self._noise(self.key, index, sharding, shape, device)

    def term_noise(
        self, index: LeafIndex, sharding: NamedSharding, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """The numbers in [0, 1) by which a term of the gradient of a leaf of a unit is rounded.

        Raises:
            ConfigError: there is no key.
        """
        if self.term_key is None:
            rule = f"rounds terms of the gradient of {self.paths[index.leaf]} by key, and has none."
            raise ConfigError(message("fs.value_and_grad", rule, mend=_GIVE_A_KEY))
        return self._noise(self.term_key, index, whole(sharding), shape, device)

    def _noise(
        self,
        key: Tensor | None,
        index: LeafIndex,
        sharding: NamedSharding,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> Tensor:
        path, ranges = self.paths[index.leaf], list(sharding.grid(shape) or ())
        if index.row is None:
            return _noise(key, path, shape, ranges, device)
        row = self.firsts[index.leaf] + index.row
        stack = (self.stacks[index.leaf], *shape)
        return _noise(key, path, stack, [((row, row + 1),), *ranges], device)[0]


def key_of_terms(key: Tensor | None, mesh: Mesh | None, microbatch: int) -> Tensor | None:
    """The key by which terms of gradients are rounded: the same on ranks that have the same term.

    Args:
        key: of the step.
        mesh: of the parameters.
        microbatch: its number.
    """
    if key is None or mesh is None:
        return key
    for number in (data_position(mesh, cp=True)[0], microbatch):
        key = random.fold_in_count(key, torch.full((), number, dtype=torch.int64, device=key.device))
    return key


def _noise(
    key: Tensor | None, path: str, shape: tuple[int, ...], ranges: Sequence[Runs], device: torch.device
) -> Tensor:
    """The numbers of some ranges of a leaf, whose place among the layers of its stack counts.

    Raises:
        ConfigError: there is no key.
    """
    if key is None:
        raise ConfigError(message("fs.gather_unit", f"rounds {path} by key, and has none.", mend=_GIVE_A_KEY))
    return uniform_at(key, zlib.crc32(path.encode()), shape, ranges, device)


def plan_weight(sharding: NamedSharding, shape: tuple[int, ...], format: Blocks) -> CodePlan:
    """How a leaf with a sharding is rounded; one that has explicit owners, as the slice of the mesh that has it."""
    return codes.plan_codes(sharding.mesh, sharding, whole(sharding), tuple(shape), format)


class AtRest(NamedTuple):
    """A main parameter at rest, and how it is to be rounded.

    Attributes:
        x: the leaf.
        leaf: its layout.
        home: where it is, which says what layers of a stack the rank has.
        format: that it is rounded to.
    """

    x: DTensor
    leaf: LeafLayout
    home: NamedSharding
    format: Blocks


def round_copies(leaves: Sequence[DTensor | None], layout: Layout, key: Tensor | None) -> list[DTensor | None]:
    """Main parameters, each rounded as its copy at rest is, where there is one that has a format.

    Args:
        leaves: main parameters as the layout has them, None for frozen ones.
        layout: of both.
        key: for keyed rounding.

    Returns:
        DTensors where the main parameters are, rounded ones in the dtype of compute; others as they were. Collective
        where a block is on several ranks.
    """
    if layout.precision.gather is None:
        return list(leaves)
    given = [
        None if x is None or (format := layout.rounds(leaf)) is None else AtRest(x, leaf, leaf.main, format)
        for x, leaf in zip(leaves, layout.leaves, strict=True)
    ]
    return _round_given(leaves, given, layout.precision, key)


def round_params(params: Tree, layout: Layout, precision: Precision, key: Tensor | None) -> Tree:
    """Parameters at rest that are main parameters, rounded to what a loss function sees; others as they are.

    Args:
        params: of a state in the layout.
        layout: of the state.
        precision: of the call, as `Layout.in_flight` gives it.
        key: for keyed rounding.
    """
    if precision.gather is None or precision.rounded:
        return params
    leaves: list[DTensor] = tree.leaves(params)
    given = [
        None if (format := layout.format_of(leaf)) is None else AtRest(x, leaf, leaf.params, format)
        for x, leaf in zip(leaves, layout.leaves, strict=True)
    ]
    return tree.unflatten(layout.structure, _round_given(leaves, given, precision, key))


def _round_given(
    leaves: Sequence[_T], given: Sequence[AtRest | None], precision: Precision, key: Tensor | None
) -> list[_T | DTensor]:
    """Leaves, those that have an `AtRest` rounded."""
    rounded = iter(round_leaves([at for at in given if at is not None], precision, key))
    return [x if at is None else next(rounded) for x, at in zip(leaves, given, strict=True)]


def round_leaves(given: Sequence[AtRest], precision: Precision, key: Tensor | None) -> list[DTensor]:
    """Main parameters at rest as a loss function sees them, in the dtype of compute; cut as they were.

    Args:
        given: those of one layout. Ranks that share blocks of some of them exchange the magnitudes of all at once.
        precision: which layers of a stack have no format.
        key: for keyed rounding.
    """
    present = [at.home.grid(at.leaf.shape) is not None for at in given]
    held = [*itertools.compress(given, present)]
    nodes, locals_ = [to_local(at.x) for at in held], [local_of(at.x) for at in held]
    plans = [plan_weight(node.sharding, node.shape, at.format) for node, at in zip(nodes, held, strict=True)]
    dtypes = [precision.compute_dtype(at.leaf.init) for at in given]
    rounded: list[Tensor] = []
    if held:
        of_held = [*itertools.compress(dtypes, present)]
        noise = functools.partial(_noise_at_rest, held, nodes, key)
        rounded = codes.rounded_shards(plans, locals_, nodes[0].sharding.mesh, of_held, noise)
        for at, local, out in zip(held, locals_, rounded, strict=True):
            _keep_rows(at, local, out, precision)
    results = iter(rounded)
    return [
        like(at.x, next(results) if there else local_of(at.x).to(dtype))
        for at, there, dtype in zip(given, present, dtypes, strict=True)
    ]


def _noise_at_rest(held: Sequence[AtRest], nodes: Sequence[Local], key: Tensor | None, number: int) -> Tensor:
    """The numbers by which a main parameter at rest is rounded: those of its place in the whole leaf."""
    leaf, node = held[number].leaf, nodes[number]
    ranges, shape = list(node.sharding.grid(node.shape) or ()), tuple(node.shape)
    if is_stacked(leaf.names):
        ranges[0], shape = _layers(held[number]), (leaf.shape[0], *shape[1:])
    return _noise(key, leaf.path, shape, ranges, node.value.device)


def _keep_rows(at: AtRest, local: Tensor, out: Tensor, precision: Precision) -> None:
    """Writes the layers of a stack that have no format as they were."""
    kept = precision.kept_rows(at.leaf.path, at.leaf.shape[0]) if is_stacked(at.leaf.names) else ()
    here = [row for start, stop in _layers(at) for row in range(start, stop)] if kept else []
    for place in (place for place, row in enumerate(here) if row in kept):
        out[place] = local[place].to(out.dtype)


def _layers(at: AtRest) -> Runs:
    """The layers of a stack that the rank has."""
    grid = at.home.grid(at.leaf.shape)
    assert grid is not None
    return grid[0]
