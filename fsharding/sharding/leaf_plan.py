"""Plan the shardings of each leaf: rules -> model axes, stages and parts -> owners, strategy -> data axes.

Guarantee: planning needs no memory and no devices, and the boxes of every sharding tile the leaf.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.base.dtypes import FLOATS
from fsharding.base.errors import LayoutError, SpecError, did_you_mean, listed, message
from fsharding.formats import Blocks
from fsharding.mesh.abstract_mesh import AXES, DATA_AXES
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.assigned import Assigned, Stages, assignment, objection, stage_of
from fsharding.sharding.block_scales import blocks_by_owner
from fsharding.sharding.leaf_names import begins, joined
from fsharding.sharding.memory_kinds import HERE
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, DimName, Fused, P, rule_name
from fsharding.sharding.strategy import Strategy

__all__ = [
    "EXPERT", "LAYERS", "LeafLayout", "NamedLeaf", "check_leaves", "check_stages", "is_trainable",
    "kind_text", "mean_over", "objections_to_cuts", "plan_leaf", "type_text",
]  # fmt: skip


LAYERS = "layers"  # the dim name of stacked units; data axes never shard it, since a unit is gathered at once

# The dim name of experts. The axes of its rule own the experts, as `tp` owns heads, even if they are data axes.
EXPERT = "expert"


@dataclass(frozen=True)
class NamedLeaf:
    """A leaf of a model, from which its layout is planned."""

    path: str
    shape: tuple[int, ...]  # global
    init: torch.dtype  # the dtype in the model's init
    names: tuple[DimName, ...] | None
    trainable: bool  # whether it has gradients and moments

    @property
    def is_stacked(self) -> bool:
        """Whether dim 0 counts layers."""
        return self.layers == 0

    @property
    def layers(self) -> int | None:
        """The dim that counts layers."""
        return self.names.index(LAYERS) if self.names and LAYERS in self.names else None

    @property
    def rules(self) -> list[str | None]:
        """The rule of each dim."""
        return [rule_name(name) for name in self.names or (None,) * len(self.shape)]

    def __str__(self) -> str:
        return f"{self.path} is {type_text(self.shape, self.init)}"


@dataclass(frozen=True)
class LeafLayout(NamedLeaf):
    """One leaf of a layout."""

    params: NamedSharding
    grads: NamedSharding  # of accumulated gradients; unreduced over data axes that the strategy doesn't shard them over
    main: NamedSharding  # of the main parameter
    moment_memory: str = HERE  # the memory kind of moments
    compute: str = HERE  # the memory kind in which the leaf is updated

    @functools.cached_property
    def moments(self) -> NamedSharding:
        """Sharding of moments: that of `main`, in their own memory."""
        return replace(self.main, memory=self.moment_memory)

    @property
    def reduced(self) -> NamedSharding:
        """Sharding of the reduced gradient: that of `main`, in the memory of gradients."""
        return replace(self.main, memory=self.grads.memory)

    def path_in(self, field: str) -> str:
        """Return the path in a field of a state, such as `params.blocks.wq`."""
        return joined(field, self.path)

    @property
    def home(self) -> NamedSharding:
        """Sharding of the authoritative copy: the main parameter, or a frozen parameter itself."""
        return self.main if self.trainable else self.params


def check_leaves(leaves: Sequence[NamedLeaf], mesh: Mesh, rules: AxisRules, frozen: Sequence[str]) -> None:
    """Raise an error that lists every leaf that cannot be planned."""
    wrong = [
        f"{leaf} but has names {leaf.names!r}: write {_as_many(leaf.names, leaf.shape)}, for example"
        for leaf in leaves
        if leaf.names is not None and (isinstance(leaf.names, str) or len(leaf.names) != len(leaf.shape))
    ]
    if wrong:
        raise LayoutError(message("got leaves whose dims and names differ in number.", wrong))
    wrong = [row for leaf in leaves for row in _objections(leaf, mesh, rules)]
    unused = [entry for entry in frozen if not any(begins(leaf.path, entry) for leaf in leaves)]
    known = listed(leaf.path for leaf in leaves) if unused else ""
    wrong += [f"frozen path {entry!r} matches no leaf; leaves are {known}" for entry in unused]
    if wrong:
        mend = _mended_frozen(frozen, unused, [leaf.path for leaf in leaves]) if unused else ""
        raise LayoutError(message("cannot plan these leaves.", wrong, mend))
    _check_rules(leaves, mesh, rules)


def _objections(leaf: NamedLeaf, mesh: Mesh, rules: AxisRules) -> Iterator[str]:
    """Yield why a leaf with one name per dim cannot be planned; `_check_rules` finds missing rules."""
    for dim, (name, size) in enumerate(zip(leaf.names or (), leaf.shape, strict=False)):
        if isinstance(name, Fused):
            where = f"{leaf}, dim {dim} ({name!r})"
            if sum(name.sizes) != size:
                yield f"{where}: its parts have {sum(name.sizes)} of {size}"
            # One model axis shards each part separately; data axes shard the dim as one.
            axes = [a for a in _present(rules.get(name.name, ()), mesh) if a not in DATA_AXES]
            if len(axes) > 1:
                yield f"{where}: at most one model axis can shard it, not {', '.join(axes)}"
            if name.name == EXPERT:
                yield f"{where}: the dim of experts cannot be fused"
        elif name is not None and not isinstance(name, str):
            yield f"{leaf}, dim {dim}: {name!r} isn't a dim name"
    if leaf.init not in FLOATS and (leaf.init.is_floating_point or leaf.init.is_complex):
        yield f"{leaf}: leaves can be {', '.join(map(_name, FLOATS))}, or integers"


def _mended_frozen(frozen: Sequence[str], unused: Sequence[str], paths: Sequence[str]) -> str:
    """Return the fix for frozen paths that match no leaf, with the closest paths if there are any."""
    parts = [path.split(".") for path in paths]
    known = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    meant = {entry: difflib.get_close_matches(entry, known, 1) for entry in unused}
    if all(meant.values()):
        return f"Write frozen={json.dumps([meant[x][0] if x in meant else x for x in frozen])}."
    return "Pass dotted paths of leaves, or prefixes of them."


def _as_many(names: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Pad or truncate names to the number of dims."""
    given = (names,) if isinstance(names, str) else tuple(names)
    return (*given, *(None,) * len(shape))[: len(shape)]


def _check_rules(leaves: Sequence[NamedLeaf], mesh: Mesh, rules: AxisRules) -> None:
    """Refuse dim names without a rule, rules without a dim, and axes that would shard two dims of a leaf."""
    missing: list[str] = []
    twice: list[str] = []
    hints: dict[str, str] = {}
    for leaf in leaves:
        spent: dict[str, list[str]] = {}
        axes = _axes_of(leaf, mesh, rules)
        for dim, (name, size) in enumerate(zip(leaf.rules, leaf.shape, strict=True)):
            what = f"dim {dim} ({name!r}, size {size})"
            if name is not None and name not in rules:
                missing.append(f"{leaf}, {what}: no rule {name!r}.")
                hints.setdefault(name, rules.hint(name))
            for axis in axes.named[dim]:
                if name == EXPERT or axis not in axes.owned:
                    spent.setdefault(axis, []).append(what)
        double = {axis: dims for axis, dims in spent.items() if len(dims) > 1}
        twice += [f"{leaf}: axis {axis!r} would shard {' and '.join(dims)}." for axis, dims in double.items()]
    if missing:
        text = f"got dims without a rule, on mesh {abstract(mesh)}."
        raise SpecError(message(text, missing, "\n".join([*hints.values()][:10])))
    used = {name: None for leaf in leaves for name in leaf.rules if name}
    idle = [
        f"{name}={rules[name]!r}: no dim has this name.{did_you_mean(name, used)}"
        for name in rules
        if name not in used and name not in DEFAULT_RULES
    ]
    if idle:
        mend = f"Dims are named {listed(map(repr, used), none='nothing')}. Remove the rule, or use one of these names."
        raise SpecError(message("got rules for dims that no leaf has.", idle, mend))
    if twice:
        text = f"cannot shard two dims of a leaf over one axis, on mesh {abstract(mesh)}."
        mend = "Give one of the dims a different name, with a separate rule."
        raise SpecError(message(text, twice, mend))


def check_stages(leaves: Sequence[NamedLeaf], mesh: Mesh, stages: Stages) -> None:
    """Raise an error that lists the stages that do not fit the leaves and the mesh."""
    size = abstract(mesh).axis_size("pp")
    unused = [entry for entry, _ in stages if not any(begins(leaf.path, entry) for leaf in leaves)]
    wrong = [f"stages name {entry!r}, which matches no leaf" for entry in unused]
    for leaf in leaves if size > 1 else ():
        owners = stage_of(stages, leaf.path)
        layers = None if leaf.layers is None else leaf.shape[leaf.layers]
        if owners is not None and (why := objection(owners, size, layers)):
            wrong.append(f"{leaf.path} {why}")
    if wrong:
        mend = "Pass the layers of each coordinate of pp, each layer once; or the coordinates that own the full leaf."
        raise LayoutError(message(f"cannot use the stages on mesh {abstract(mesh)}.", wrong, mend))


def type_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Format a leaf's type, such as `float32[8, 512]`."""
    return f"{_name(dtype)}{list(shape)}"


def kind_text(x: Any) -> str:
    """Format a tensor's type, or the class name of anything else."""
    return type_text(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_trainable(path: str, dtype: torch.dtype, frozen: Sequence[str]) -> bool:
    """Return whether a leaf has gradients: floating point, and under no frozen path."""
    return dtype.is_floating_point and not any(begins(path, entry) for entry in frozen)


def plan_leaf(
    leaf: NamedLeaf, mesh: Mesh, rules: AxisRules, strategy: Strategy, stages: Stages, blocks: Blocks | None = None
) -> LeafLayout:
    """Plan one leaf, which `check_leaves` has accepted."""
    axes = _axes_of(leaf, mesh, rules)
    spec, assigned = _assign(leaf, axes.model, mesh, stages)
    dims, data = _data_dims(leaf, axes)

    def sharding(kind: str, dim: int | None) -> NamedSharding:
        part = _STRATEGY_PART[kind]
        over = tuple(a for a in data if dim is not None and strategy.cut(part, a))
        by_dim = P(*((*model, *over) if d == dim else model for d, model in enumerate(spec)))
        summed = [a for a in AXES if a in DATA_AXES and a not in (*over, *axes.owned)] if kind == "grads" else []
        # Axes that the strategy doesn't shard gradients over are reduced once per step, not per microbatch.
        unreduced = tuple(a for a in summed if a == "replica" or not strategy.grads)
        return NamedSharding(mesh, by_dim, unreduced, assigned, axes.owned, memory_of(kind)).simplified()

    def memory_of(kind: str) -> str:
        # 0-d leaves stay on the device: copying one costs more than its memory is worth.
        return strategy.memory_of(kind, leaf.path) if leaf.shape else HERE

    def ends_on_blocks(dim: int) -> bool:
        place = dim - (len(leaf.shape) - 2)
        if blocks is None or place < 0:
            return True
        if leaf.names and isinstance(leaf.names[dim], Fused):
            return False
        block = blocks.sizes(leaf.shape)[place]
        shards = (sharding(kind, dim) for kind in ("params", "main"))
        return all(blocks_by_owner(x, dim, leaf.shape[dim], block) is not None for x in shards)

    # Without a dim whose shards end on blocks the first one stays, and `Layout.check_blocks` reports it.
    dim = next(filter(ends_on_blocks, dims), dims[0] if dims else None)
    shardings = {kind: sharding(kind, dim) for kind in _STRATEGY_PART}
    return LeafLayout(
        leaf.path, leaf.shape, leaf.init, leaf.names, leaf.trainable, **shardings,
        moment_memory=memory_of("moments"), compute=memory_of("compute"),
    )  # fmt: skip


# The field of `Strategy` that decides the data axes of each sharding of a `LeafLayout`.
_STRATEGY_PART = {"params": "params", "grads": "grads", "main": "opt_state"}


class _Axes(NamedTuple):
    """The axes of the mesh that the rules name for a leaf."""

    named: list[tuple[str, ...]]  # by dim, all axes of its rule
    model: list[tuple[str, ...]]  # by dim, axes that own their shards: model axes, and all axes of the expert dim
    data: list[tuple[str, ...]]  # by dim, data axes without `replica`; the strategy decides whether they shard
    owned: tuple[str, ...]  # the data axes of the expert dim


def _axes_of(leaf: NamedLeaf, mesh: Mesh, rules: AxisRules) -> _Axes:
    named = [_present(rules.get(name, ()) if name else (), mesh) for name in leaf.rules]
    model = [tuple(a for a in axes if a not in DATA_AXES) for axes in named]
    data = [tuple(a for a in DATA_AXES if a in axes and a != "replica") for axes in named]
    owned = list[str]()
    for dim, (name, axes) in enumerate(zip(leaf.rules, named, strict=True)):
        if name == EXPERT:
            model[dim], data[dim] = axes, ()
            owned += [a for a in axes if a in DATA_AXES]
    return _Axes(named, model, data, tuple(owned))


def _data_dims(leaf: NamedLeaf, axes: _Axes) -> tuple[list[int], tuple[str, ...]]:
    """Return the dims that data axes may shard, the preferred one first, and those axes in order."""
    # The dim of a rule, then dims without model axes. If model axes shard all dims, data axes shard the last one
    # further. `layers` is never sharded.
    unstacked = [d for d in range(len(leaf.shape)) if not leaf.names or leaf.names[d] != LAYERS]
    free = [d for d in unstacked if not axes.model[d]]
    ruled = next((d for d, of_dim in enumerate(axes.data) if of_dim), None)
    order = tuple(a for a in DATA_AXES if a != "replica") if ruled is None else axes.data[ruled]
    dims = free or unstacked[-1:] if ruled is None else [ruled, *(d for d in free if d != ruled)]
    return dims, tuple(a for a in (*order, "replica") if a not in axes.owned)


def objections_to_cuts(leaf: LeafLayout, blocks: Blocks) -> list[str]:
    """Return a row for each dim of a leaf whose shards split blocks."""
    result: list[str] = []
    for dim in range(max(0, len(leaf.shape) - 2), len(leaf.shape)):
        size = leaf.shape[dim]
        block = blocks.sizes(leaf.shape)[dim - (len(leaf.shape) - 2)]
        for sharding in (leaf.params, leaf.main):
            if blocks_by_owner(sharding, dim, size, block) is not None:
                continue
            over = (*sharding.axes(dim), *(a.axis for a in sharding.assigned if a.dim == dim))
            count = math.prod(abstract(sharding.mesh).axis_size(a) for a in over)
            text = f"{leaf}, dim {dim}: {size} over {', '.join(over)} gives {count} shards of {-(-size // count)}"
            result.append(f"{text}, blocks have {block}")
            break
    return result


def _assign(
    leaf: NamedLeaf, fixed: Sequence[tuple[str, ...]], mesh: Mesh, stages: Stages
) -> tuple[list[tuple[str, ...]], tuple[Assigned, ...]]:
    """Turn the axes of explicit owners, `pp` of stages and those of fused dims, from spec entries into assignments."""
    spec = list(fixed)
    assigned = list[Assigned]()
    size = abstract(mesh).axis_size("pp")
    owners = stage_of(stages, leaf.path)
    if size > 1 and owners is not None:
        assigned.append(assignment(owners, size, leaf.layers))
        spec = [tuple(axis for axis in axes if axis != "pp") for axes in spec]
    for dim, name in enumerate(leaf.names or ()):
        if isinstance(name, Fused) and spec[dim]:
            (axis,) = spec[dim]
            assigned.append(Assigned.parts(axis, dim, name.sizes, abstract(mesh).axis_size(axis)))
            spec[dim] = ()
    return spec, tuple(assigned)


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that are larger than 1 on the mesh."""
    shape = abstract(mesh)
    return tuple(axis for axis in axes if shape.axis_size(axis) > 1)


def mean_over(sharding: NamedSharding, ndim: int, dim: int) -> NamedSharding:
    """Return the sharding of a mean over one dim of a leaf: that of the leaf, but unsharded along the dim."""
    spec = sharding.spec.replace(ndim + dim, ())
    assigned = tuple(a for a in sharding.assigned if a.dim != ndim + dim)
    owned = tuple(axis for axis in sharding.owned if axis in spec.all_axes)
    return replace(sharding, spec=P(*spec), assigned=assigned, owned=owned)
