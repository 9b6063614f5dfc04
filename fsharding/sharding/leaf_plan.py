"""Planning: where each leaf of a model lives, from its named dims, the rules, the strategy and the stages.

Guarantee: planning needs no memory and no devices, and the boxes of every sharding tile the leaf.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.base.dtypes import FLOATS
from fsharding.base.errors import LayoutError, SpecError, did_you_mean, listed, message
from fsharding.formats import Blocks
from fsharding.mesh.abstract_mesh import AXES, DATA_AXES
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding import boxes
from fsharding.sharding.assigned import Assigned, Stages, assignment, objection, stage_of
from fsharding.sharding.leaf_names import begins, joined
from fsharding.sharding.memory_kinds import HERE
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, DimName, Fused, P, rule_name
from fsharding.sharding.strategy import Strategy

__all__ = [
    "EXPERT", "LAYERS", "LeafLayout", "NamedLeaf", "check_leaves", "check_stages", "is_stacked", "is_trainable",
    "kind_text", "mean_over", "objections_to_cuts", "plan_leaf", "type_text",
]  # fmt: skip


LAYERS = "layers"  # the dim name of stacked units; data axes never cut it, since a unit is gathered whole

EXPERT = "expert"
"""The dim name of experts; the axes that a rule puts on it own them as `tp` owns heads, even if they are data axes."""


@dataclass(frozen=True)
class LeafLayout:
    """One leaf of a layout."""

    path: str
    shape: tuple[int, ...]
    init: torch.dtype  # the dtype that the model's init gives it
    names: tuple[DimName, ...] | None
    trainable: bool  # whether it has gradients and moments
    params: NamedSharding  # where the parameter is
    # where gradients are accumulated; unreduced over the axes that the strategy does not cut them over
    grads: NamedSharding
    main: NamedSharding  # where the optimizer's main parameter is
    moment_memory: str = HERE  # the kind of memory of its moments
    compute: str = HERE  # the kind of memory in which it is updated

    @property
    def moments(self) -> NamedSharding:
        """Where its moments are: sharded as `main`, in memory of their own."""
        return replace(self.main, memory=self.moment_memory)

    @property
    def reduced(self) -> NamedSharding:
        """Where its reduced gradient goes: sharded as `main`, in the memory of gradients."""
        return replace(self.main, memory=self.grads.memory)

    def path_in(self, field: str) -> str:
        """Its path in a field of a state, such as `params.blocks.wq`."""
        return joined(field, self.path)

    @property
    def home(self) -> NamedSharding:
        """Where the values are from which all others are made: the main parameter, or the frozen one."""
        return self.main if self.trainable else self.params


NamedLeaf: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, tuple[DimName, ...] | None]
"""Path, shape, dtype, dim names."""


def is_stacked(names: Sequence[DimName] | None) -> bool:
    """Whether units of a leaf with such dim names are its rows."""
    return bool(names) and names[0] == LAYERS


def check_leaves(leaves: Sequence[NamedLeaf], mesh: Mesh, rules: AxisRules, frozen: Sequence[str]) -> None:
    """Refuses what cannot be planned, with every offending leaf."""
    wrong = [
        f"{path} is {type_text(shape, dtype)} but has names {names!r}: give {_as_many(names, shape)}, say"
        for path, shape, dtype, names in leaves
        if names is not None and (isinstance(names, str) or len(names) != len(shape))
    ]
    if wrong:
        raise LayoutError(message(f"cannot plan {len(wrong)} leaves.", wrong))
    wrong = [row for leaf in leaves for row in _objections(leaf, mesh, rules)]
    unused = [entry for entry in frozen if not any(begins(leaf[0], entry) for leaf in leaves)]
    wrong += [f"frozen path {entry!r} is no leaf; leaves are {listed(leaf[0] for leaf in leaves)}" for entry in unused]
    if wrong:
        mend = _mended_frozen(frozen, unused, [leaf[0] for leaf in leaves]) if unused else ""
        raise LayoutError(message(f"cannot plan {len(wrong)} leaves.", wrong, mend))
    _check_rules(leaves, mesh, rules)


def _objections(leaf: NamedLeaf, mesh: Mesh, rules: AxisRules) -> Iterator[str]:
    """Why a leaf, which has as many names as dims, cannot be planned; rules that are missing aside."""
    path, shape, dtype, names = leaf
    what = f"{path} is {type_text(shape, dtype)}"
    for dim, (name, size) in enumerate(zip(names or (), shape, strict=False)):
        if isinstance(name, Fused):
            where = f"{what}, dim {dim} ({name!r})"
            if sum(name.sizes) != size:
                yield f"{where}: its parts have {sum(name.sizes)} of {size}"
            # Each part is cut by itself: by one model axis, and none of the data axes, which cut a dim as one.
            axes = [a for a in _present(rules.get(name.name, ()), mesh) if a not in DATA_AXES]
            if len(axes) > 1:
                yield f"{where}: one axis at most can cut it, not {', '.join(axes)}"
            if name.name == EXPERT:
                yield f"{where}: experts are whole, they have no parts"
        elif name is not None and not isinstance(name, str):
            yield f"{what}, dim {dim}: {name!r} is no name"
    if dtype not in FLOATS and (dtype.is_floating_point or dtype.is_complex):
        yield f"{what}: kernels take {', '.join(map(_name, FLOATS))}, or whole numbers"


def _mended_frozen(frozen: Sequence[str], unused: Sequence[str], paths: Sequence[str]) -> str:
    """Advises on paths that no leaf begins with: those that look most like them, where there are such."""
    parts = [path.split(".") for path in paths]
    known = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    meant = {entry: difflib.get_close_matches(entry, known, 1) for entry in unused}
    if all(meant.values()):
        return f"Write frozen={json.dumps([meant[x][0] if x in meant else x for x in frozen])}."
    return "Give dotted paths of leaves, or beginnings of them."


def _as_many(names: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """As many names as a leaf has dims, beginning with those that were given."""
    given = (names,) if isinstance(names, str) else tuple(names)
    return (*given, *(None,) * len(shape))[: len(shape)]


def _check_rules(leaves: Sequence[NamedLeaf], mesh: Mesh, rules: AxisRules) -> None:
    """Refuses dim names without a rule, and axes that would cut two dims of a leaf."""
    missing: list[str] = []
    twice: list[str] = []
    hints: dict[str, str] = {}
    for path, shape, dtype, names in leaves:
        called = [rule_name(name) for name in names or ()]
        for dim, name in enumerate(called):
            if name is not None and name not in rules:
                missing.append(
                    f"{path} is {type_text(shape, dtype)}, dim {dim} ({name!r}, size {shape[dim]}): no rule {name!r}."
                )
                hints.setdefault(name, rules.hint(name))
        spent: dict[str, list[str]] = {}
        by_rule = _by_rule(called, mesh, rules)
        owned = _owned(called, by_rule)
        for dim, name in enumerate(called):
            for axis in by_rule[dim] if name == EXPERT else (a for a in by_rule[dim] if a not in owned):
                spent.setdefault(axis, []).append(f"dim {dim} ({name!r}, size {shape[dim]})")
        twice += [
            f"{path} is {type_text(shape, dtype)}: axis {axis!r} would cut {' and '.join(where)}."
            for axis, where in spent.items()
            if len(where) > 1
        ]
    if missing:
        text = f"has no rule for {len(missing)} dims on mesh {abstract(mesh)}."
        raise SpecError(message(text, missing, "\n".join([*hints.values()][:10])))
    used = {called: None for _, _, _, names in leaves for name in names or () if (called := rule_name(name))}
    idle = [
        f"{name}={rules[name]!r}: no dim has this name.{did_you_mean(name, used)}"
        for name in rules
        if name not in used and name not in DEFAULT_RULES
    ]
    if idle:
        mend = f"Dims are named {listed(map(repr, used), none='nothing')}. Take the rule out, or write a name of these."
        raise SpecError(message("got rules for dims that no leaf has.", idle, mend))
    if twice:
        text = f"cannot spend one axis on two dims of a leaf; {len(twice)} leaves on mesh {abstract(mesh)}."
        mend = "Give one of the dims another name, with a rule of its own."
        raise SpecError(message(text, twice, mend))


def check_stages(leaves: Sequence[NamedLeaf], mesh: Mesh, stages: Stages) -> None:
    """Refuses stages that do not fit the leaves and the mesh; all of them are listed."""
    size = abstract(mesh).axis_size("pp")
    unused = [entry for entry, _ in stages if not any(begins(leaf[0], entry) for leaf in leaves)]
    wrong = [f"stages name {entry!r}, which is no leaf" for entry in unused]
    for path, shape, _, names in leaves if size > 1 else ():
        owners = stage_of(stages, path)
        layers = shape[names.index(LAYERS)] if names and LAYERS in names else None
        if owners is not None and (why := objection(owners, size, layers)):
            wrong.append(f"{path} {why}")
    if wrong:
        mend = "Give each coordinate of pp its layers, each layer once; or the coordinates that have a leaf whole."
        raise LayoutError(message(f"cannot use the stages on mesh {abstract(mesh)}.", wrong, mend))


def type_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A leaf's type for people, such as `float32[8, 512]`."""
    return f"{_name(dtype)}{list(shape)}"


def kind_text(x: Any) -> str:
    """A tensor's type for people, as `type_text`; of anything else the name of its class."""
    return type_text(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_trainable(path: str, dtype: torch.dtype, frozen: Sequence[str]) -> bool:
    """Whether a leaf has gradients: floating point, and under no frozen path."""
    return dtype.is_floating_point and not any(begins(path, entry) for entry in frozen)


def plan_leaf(
    leaf: NamedLeaf,
    trainable: bool,
    mesh: Mesh,
    rules: AxisRules,
    strategy: Strategy,
    stages: Stages,
    blocks: Blocks | None = None,
) -> LeafLayout:
    """Where one leaf lives, of which it is known that it fits: its axes by rule, its owners, its data axes, in turn."""
    path, shape, init, names = leaf
    axes = _axes_of(leaf, mesh, rules)
    spec, assigned = _assign(leaf, axes.model, mesh, stages)
    dim, data = _data_cut(leaf, axes)
    if blocks is not None and dim is not None:
        dims = [dim, *(d for d in _free_dims(leaf, axes) if d != dim)]
        dim = next((d for d in dims if _ends_on_blocks(leaf, d, axes, data, mesh, strategy, blocks)), dim)

    def cut_over(part: str) -> tuple[str, ...]:
        return tuple(a for a in data if dim is not None and strategy.cut(part, a))

    def sharding(kind: str) -> NamedSharding:
        part = _STRATEGY_PART[kind]
        cut = cut_over(part)
        cuts = P(*((*model, *cut) if d == dim else model for d, model in enumerate(spec)))
        summed = [a for a in AXES if a in DATA_AXES and a not in (*cut, *axes.owned)] if kind == "grads" else []
        # What the strategy does not cut is reduced once a step rather than once a microbatch.
        unreduced = tuple(a for a in summed if a == "replica" or not strategy.grads)
        return NamedSharding(mesh, cuts, unreduced, assigned, axes.owned, memory_of(kind)).simplified()

    def memory_of(kind: str) -> str:
        # A number stays: a copy of it would cost more than its memory.
        return strategy.memory_of(kind, path) if shape else HERE

    shardings = {kind: sharding(kind) for kind in _STRATEGY_PART}
    return LeafLayout(
        path, shape, init, names, trainable, **shardings,
        moment_memory=memory_of("moments"), compute=memory_of("compute"),
    )  # fmt: skip


_STRATEGY_PART = {"params": "params", "grads": "grads", "main": "opt_state"}
"""The part of a `Strategy` that says over which data axes each sharding of a `LeafLayout` cuts."""


class _Axes(NamedTuple):
    """The axes of the mesh that the rules give a leaf."""

    model: list[tuple[str, ...]]  # by dim, those that own what they cut: model axes, and all axes of the experts
    data: list[tuple[str, ...]]  # by dim, data axes, over which the strategy decides; `replica` is left out
    owned: tuple[str, ...]  # the data axes among those of the experts, see `_owned`


def _axes_of(leaf: NamedLeaf, mesh: Mesh, rules: AxisRules) -> _Axes:
    _, shape, _, names = leaf
    called = [rule_name(name) for name in names or (None,) * len(shape)]
    by_rule = _by_rule(called, mesh, rules)
    model = [
        axes if name == EXPERT else tuple(a for a in axes if a not in DATA_AXES)
        for name, axes in zip(called, by_rule, strict=True)
    ]
    data = [
        () if name == EXPERT else tuple(a for a in DATA_AXES if a in axes and a != "replica")
        for name, axes in zip(called, by_rule, strict=True)
    ]
    return _Axes(model, data, _owned(called, by_rule))


def _data_cut(leaf: NamedLeaf, axes: _Axes) -> tuple[int | None, tuple[str, ...]]:
    """The dim that data axes may cut, and these in order: where a rule puts them, else the first dim that is free."""
    # If model axes cut all dims, the last one is cut by both; `layers` is never cut. None for a leaf that has no such
    # dim.
    _, shape, _, names = leaf
    dim = next((d for d, of_dim in enumerate(axes.data) if of_dim), None)
    if dim is not None:
        order = axes.data[dim]
    else:
        free = [d for d in range(len(shape)) if not names or names[d] != LAYERS]
        dim = next((d for d in free if not axes.model[d]), free[-1] if free else None)
        order = tuple(a for a in DATA_AXES if a != "replica")
    return dim, tuple(a for a in (*order, "replica") if a not in axes.owned)


def _free_dims(leaf: NamedLeaf, axes: _Axes) -> list[int]:
    """The dims that data axes may cut alone: those that no model axis cuts, never `layers`."""
    _, shape, _, names = leaf
    return [d for d in range(len(shape)) if not (names and names[d] == LAYERS) and not axes.model[d]]


def _ends_on_blocks(
    leaf: NamedLeaf, dim: int, axes: _Axes, data: Sequence[str], mesh: Mesh, strategy: Strategy, blocks: Blocks
) -> bool:
    """Whether the pieces of a leaf, at rest and as main copies, end on borders of blocks if data axes cut a dim."""
    _, shape, _, names = leaf
    place = dim - (len(shape) - 2)
    if place < 0:
        return True
    if names and isinstance(names[dim], Fused):
        return False
    sizes = abstract(mesh)
    block = blocks.sizes(shape)[place]
    cuts = ([*axes.model[dim], *(a for a in data if strategy.cut(part, a))] for part in ("params", "opt_state"))
    return all(boxes.ends_on(shape[dim], [sizes.axis_size(a) for a in cut], block) for cut in cuts)


def objections_to_cuts(leaf: LeafLayout, blocks: Blocks) -> list[str]:
    """Says of each dim of a leaf that axes cut inside of blocks how long it is, and in how many pieces it is cut."""
    result: list[str] = []
    for dim in range(max(0, len(leaf.shape) - 2), len(leaf.shape)):
        size = leaf.shape[dim]
        block = blocks.sizes(leaf.shape)[dim - (len(leaf.shape) - 2)]
        for sharding in (leaf.params, leaf.main):
            pieces = [abstract(sharding.mesh).axis_size(a) for a in sharding.axes(dim)]
            parts = next((a.ranges for a in sharding.assigned if a.dim == dim), ())
            borders = {end for runs in parts for run in runs for end in run}
            if boxes.ends_on(size, pieces, block) and all(end % block == 0 or end == size for end in borders):
                continue
            over = (*sharding.axes(dim), *(a.axis for a in sharding.assigned if a.dim == dim))
            count = math.prod(abstract(sharding.mesh).axis_size(a) for a in over)
            text = f"{leaf.path} is {type_text(leaf.shape, leaf.init)}, dim {dim}: {size} over {', '.join(over)} are"
            result.append(f"{text} {count} pieces of {-(-size // count)}, blocks have {block}")
            break
    return result


def _assign(
    leaf: NamedLeaf, fixed: Sequence[tuple[str, ...]], mesh: Mesh, stages: Stages
) -> tuple[list[tuple[str, ...]], tuple[Assigned, ...]]:
    """Takes out of the axes by dim those that own explicitly: `pp` by stages, the axis of a fused dim by parts."""
    path, _, _, names = leaf
    spec = list(fixed)
    assigned = list[Assigned]()
    size = abstract(mesh).axis_size("pp")
    owners = stage_of(stages, path)
    if size > 1 and owners is not None:
        stack = names.index(LAYERS) if names and LAYERS in names else None
        assigned.append(assignment(owners, size, stack))
        spec = [tuple(axis for axis in axes if axis != "pp") for axes in spec]
    for dim, name in enumerate(names or ()):
        if isinstance(name, Fused) and spec[dim]:
            (axis,) = spec[dim]
            assigned.append(Assigned.parts(axis, dim, name.sizes, abstract(mesh).axis_size(axis)))
            spec[dim] = ()
    return spec, tuple(assigned)


def _by_rule(called: Sequence[str | None], mesh: Mesh, rules: AxisRules) -> list[tuple[str, ...]]:
    """For each dim, those axes of its rule that the mesh has."""
    return [_present(rules.get(name, ()) if name else (), mesh) for name in called]


def _owned(called: Sequence[str | None], by_rule: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The data axes that cut experts: ranks along them have their own, and no other dim is cut over them."""
    cuts = [axes for name, axes in zip(called, by_rule, strict=True) if name == EXPERT]
    return tuple(axis for axes in cuts for axis in axes if axis in DATA_AXES)


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The axes that the mesh has."""
    shape = abstract(mesh)
    return tuple(axis for axis in axes if shape.axis_size(axis) > 1)


def mean_over(sharding: NamedSharding, ndim: int, dim: int) -> NamedSharding:
    """Where a mean over one dim of a leaf is: cut as the leaf along all others, whole along this one."""
    spec = sharding.spec.replace(ndim + dim, ())
    assigned = tuple(a for a in sharding.assigned if a.dim != ndim + dim)
    owned = tuple(axis for axis in sharding.owned if axis in spec.all_axes)
    return replace(sharding, spec=P(*spec), assigned=assigned, owned=owned)
