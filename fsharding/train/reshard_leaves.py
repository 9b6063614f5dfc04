"""The leaves that a reshard moves, with source and target shardings, and the functions that rebuild state or tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.calls import public_name
from fsharding.base.errors import LayoutError, message
from fsharding.base.public import refuse
from fsharding.base.tree import Tree
from fsharding.comm import reshard_plan
from fsharding.comm.leaf_memory import placed
from fsharding.comm.leaf_wires import round_leaf
from fsharding.comm.reshard_plan import MovedLeaf
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import gather_numbers
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group, is_member
from fsharding.mesh.failures import naming_lost
from fsharding.optim.stacked import whole_shape
from fsharding.sharding.entries import entry_at, places
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout, type_text
from fsharding.sharding.named_sharding import Local, NamedSharding, hides_owners, home_of, local_of, sharding_of, typeof
from fsharding.train.state import TrainState, rounding_key
from fsharding.train.state_check import check_state

__all__ = [
    "Moving", "Rebuild", "check_same_model", "devices", "of_layouts", "of_state", "of_tree", "origins", "shardings",
]  # fmt: skip

Rebuild = Callable[[Sequence[Tensor]], Any]


@dataclass
class Moving:
    """One leaf to move."""

    path: str
    shape: tuple[int, ...]
    source: NamedSharding
    target: NamedSharding  # for a plain tensor `P()` on all ranks of both meshes
    dtype: torch.dtype  # of the result; a cast is done before anything is sent
    value: Tensor | None = None  # this rank's local tensor; None if only the plan is wanted
    plain: bool = False  # a plain tensor on the CPU, not a DTensor

    @property
    def leaf(self) -> MovedLeaf:
        """Return the leaf without values and devices, for the plan."""
        source, target = (replace(s, mesh=abstract(s.mesh)) for s in (self.source, self.target))
        return MovedLeaf(self.shape, self.dtype.itemsize, source, target)


# ------------------------------------------------------------------------------------------------------------- a state


def check_same_model(a: Layout, b: Layout) -> None:
    """Refuse two layouts that can't hold the same state; list every leaf that differs."""
    if not isinstance(b, Layout):
        mend = "Plan one: fs.plan_layout(model, mesh), or state.layout.with_strategy(fs.zero(1))."
        raise refuse("a state or layout, then a Layout", b, mend)
    ours, theirs = ({leaf.path: leaf for leaf in layout.leaves} for layout in (a, b))
    rows = [f"params.{path}: only in the state" for path in ours if path not in theirs]
    rows += [f"params.{path}: only in the layout" for path in theirs if path not in ours]
    for path, old in ours.items():
        new = theirs.get(path)
        if new is None:
            continue
        was = type_text(old.shape, old.init)
        now = type_text(new.shape, new.init)
        if was != now:
            rows.append(f"params.{path}: {was} in the state, {now} in the layout")
        elif old.trainable != new.trainable:
            rows.append(f"params.{path}: {'trained' if old.trainable else 'frozen'} in the state, not in the layout")
    kinds = sorted({leaf.init for leaf in a.leaves if leaf.init.is_floating_point}, key=str)
    for kind in kinds:
        for what, of in (("main parameters", "main_dtype"), ("moments", "moment_dtype")):
            was, now = (getattr(x.precision, of)(x.precision.main_dtype(kind)) for x in (a, b))
            if was != now:
                rows.append(f"{what} of {kind} leaves: {was} in the state, {now} in the layout")
    if a.precision.moment_format != b.precision.moment_format:
        formats = [x.precision.moment_format or "a dtype" for x in (a, b)]
        rows.append(f"moments: {formats[0]} in the state, {formats[1]} in the layout")
    if rows:
        mend = "Plan the layout with the model, frozen leaves and precision of the state; cast separately."
        if all(row.endswith("in the state, not in the layout") for row in rows):
            mend = "Pass the optimizer, which makes the moments of new leaves: fs.reshard(state, layout, opt=opt)."
        raise LayoutError(message("cannot move a state to the layout of a different one.", rows, mend))


def of_layouts(a: Layout, b: Layout, state: TrainState | None = None) -> list[Moving]:
    """List the moves of parameters and main parameters from `a` to `b`; with values if there is a state."""
    check_same_model(a, b)
    values = {} if state is None else tree.named_leaves({"params": state.params, "main": state.main})
    key = None if state is None else rounding_key(state.key, state.step, b)
    olds = {entry.path: entry for entry in a.entries()}
    leaves = {leaf.path: leaf for leaf in a.leaves}
    moved: list[Moving] = []
    for new in b.entries():
        assert new.of is not None and new.sharding is not None
        leaf = leaves[new.of.path]
        format = b.rounds(new.of)
        kept = olds[leaf.path_in("params")]
        source = olds.get(leaf.path_in("main"), kept)
        # A parameter is made of the old parameter if that has the same values, else of the main copy: it would lose
        # bits on the way through a narrower dtype, or through a different format.
        same = a.rounds(leaf) == format and (format is None or a.precision.keep == b.precision.keep)
        if new.field == "params" and same and kept.dtype == new.dtype:
            source = kept
        assert source.sharding is not None
        x = values.get(source.path)
        if x is not None and new.field == "params" and format is not None and not same:
            # Rounded before it is sent, in the sharding of the main copy.
            x = round_leaf(x, leaf, source.sharding, format, b.precision, key)
        local = None if x is None else local_of(x)
        moved.append(Moving(new.path, new.shape, source.sharding, new.sharding, new.dtype, local))
    return moved


def of_state(state: TrainState, layout: Layout) -> tuple[list[Moving], Rebuild]:
    """List the moves of all leaves of a state, and return the function that builds the new state from local tensors."""
    old = state.layout
    check_state(state)
    moved = of_layouts(old, layout, state)
    rest: dict[str, Any] = {name: getattr(state, name) for name in ("opt_state", "step", "key", "buffers")}
    scaled = layout.precision.loss_scale is not None
    if scaled and state.loss_scale is not None:
        rest["loss_scale"] = state.loss_scale
    paths, spec = tree.paths(rest), tree.flatten(rest)[1]
    moved += _others(rest, state, layout)
    # `rebuild` must refer to no tensor except through `moved`, whose values are dropped if the state is donated.
    device = getattr(layout.mesh, "device_type", "cpu")

    def rebuild(values: Sequence[Tensor]) -> TrainState:
        new = {m.path: _placed(m, x) for m, x in zip(moved, values, strict=True)}
        params, main = (
            tree.unflatten(layout.structure, [new.get(leaf.path_in(field)) for leaf in layout.leaves])
            for field in ("params", "main")
        )
        fields = tree.unflatten(spec, [new[path] for path in paths])
        scale = fields.pop("loss_scale", None) or layout.precision.init_scale()
        fields["buffers"] = tree.map(lambda x: x.to(device), fields["buffers"])
        return TrainState(
            **fields, params=params, main=main if layout.has_main else None, loss_scale=scale if scaled else None,
            layout=layout,
        )  # fmt: skip

    return moved, rebuild


def _others(rest: Tree, state: TrainState, layout: Layout) -> list[Moving]:
    """Move the leaves that aren't parameters: a moment with its parameter, a plain tensor to all ranks."""
    old = state.layout
    here = reshard_plan.everywhere(abstract(old.mesh).members)
    there = reshard_plan.everywhere(sorted({*abstract(old.mesh).members, *abstract(layout.mesh).members}))
    found = places(state.opt_state, state.params)
    moments = {entry.path: (entry, found[path]) for path, entry in old.moments(state.opt_state).items()}
    leaves = {leaf.path: leaf for leaf in layout.leaves}
    moved: list[Moving] = []
    for path, x in tree.named_leaves(rest).items():
        if not isinstance(x, DTensor):
            moved.append(Moving(path, tuple(x.shape), here, there, x.dtype, x, plain=True))
            continue
        shape, source, target = tuple(x.shape), sharding_of(x), NamedSharding(layout.mesh)
        if path in moments:
            entry, place = moments[path]
            new = entry_at(path, place, leaves[place.param], entry.shape, entry.dtype)
            assert new is not None, "the layouts are of one model"
            shape, source, target = entry.shape, entry.sharding, new.sharding
        moved.append(Moving(path, shape, source, target, x.dtype, local_of(x)))
    return moved


def _placed(moving: Moving, local: Tensor) -> Tensor:
    """Make the new leaf of a local tensor, which is empty and of any shape if this rank holds nothing."""
    if moving.plain:
        return local.cpu()
    local = local if local.numel() else local.reshape(moving.target.local_shape(moving.shape))
    return placed(local, moving.target, moving.target.shape_at_rest(moving.shape))


# -------------------------------------------------------------------------------------------------------------- a tree


def of_tree(values: Tree, layout: Any, source: Any = None, *, asks: bool = False) -> tuple[list[Moving], Rebuild]:
    """List the moves of a tree's leaves, and return the function that builds the new tree. Collective if it `asks`."""
    flat, spec = tree.flatten(values)
    targets, shapes = shardings(spec, layout)
    sources, known = origins(values, source, asks=asks)
    moved: dict[int, Moving] = {}  # by number of the leaf
    rows: list[str] = []
    for i, (path, x) in enumerate(zip(tree.paths(values), flat, strict=True)):
        target = targets[i]
        if target is None or not isinstance(x, DTensor | Local):
            continue
        # The global shape, by falling reliability: of the source layout, from the owners, of the target layout, and
        # only then of the DTensor itself, which sees just its slice of the mesh.
        size = known[i]
        if sources[i] is None and hides_owners(x) and (isinstance(x, Local) or (size is None and _is_staged(x))):
            rows.append(f"{path or 'the leaf'} is {typeof(x)} on a slice of its mesh, and its full shape is unknown")
            continue
        here = sources[i] or (x.sharding if isinstance(x, Local) else home_of(x))
        size = shapes[i] if size is None and here.assigned else size
        shape = x.shape if isinstance(x, Local) else whole_shape(x, here) if size is None else size
        local = x.value if isinstance(x, Local) else local_of(x)
        if here.partial or target.partial:
            rows.append(f"{path}: from {here} to {target}: take the sum first")
        elif here.local_shape(shape) != tuple(local.shape) or not _is_at(x, here):
            rows.append(f"{path}: {here} of {list(shape)} doesn't match this rank's shard, {list(local.shape)}")
        else:
            moved[i] = Moving(path, tuple(shape), here, target.simplified(), local.dtype, local)
    if rows:
        mend = f"Pass the current layout of the leaves: {public_name()}(..., source=layout)."
        if all("unreduced" in row for row in rows):
            mend = "Make reduced gradients: fs.value_and_grad(loss_fn, grads=layout.main)."
        raise LayoutError(message("cannot move these leaves.", rows, mend))

    in_flight = [isinstance(x, Local) for x in flat]
    kept = [None if i in moved else x for i, x in enumerate(flat)]

    def rebuild(locals_: Sequence[Tensor]) -> Tree:
        result = list(kept)
        for (i, m), local in zip(moved.items(), locals_, strict=True):
            new = _placed(m, local)
            result[i] = Local(local_of(new), m.target, m.shape) if in_flight[i] else new
        return tree.unflatten(spec, result)

    return [*moved.values()], rebuild


def _is_staged(x: DTensor) -> bool:
    """Return whether some ranks of the mesh own nothing of a leaf; there its first dim has size 0."""
    return any(a.dim is None for a in home_of(x).assigned)


_SCALAR = 1 << 62
"""Sent by the owner of a 0-d leaf, instead of 1 + its first size. A rank without the leaf sends 0."""


def _size_of_staged(x: DTensor) -> tuple[int, ...]:
    """Have the owners of a staged leaf send its global shape. Collective."""
    sharding = home_of(x)
    shape = whole_shape(x, sharding)
    if not is_member(sharding.mesh):
        return shape
    axis = next(a.axis for a in sharding.assigned if a.dim is None)
    group = axis_group(sharding.mesh, (axis,))
    owns = sharding.grid(x.shape) is not None
    own = (1 + shape[0] if shape else _SCALAR) if owns else 0
    if group.process_group is None:
        return shape
    with naming_lost(public_name(), sharding.mesh):
        first = max(gather_numbers(own, group, x.device_mesh.device_type))
    return () if first == _SCALAR else (first - 1, *shape[1:])


def _is_at(x: DTensor | Local, sharding: NamedSharding) -> bool:
    """Return whether a leaf is sharded along the dims of a sharding."""
    if isinstance(x, Local):
        return x.sharding.simplified().spec == sharding.simplified().spec
    return tuple(x.placements) == sharding.placements() if is_member(sharding.mesh) else True


def origins(
    values: Tree, source: Any, *, asks: bool = False
) -> tuple[list[NamedSharding | None], list[tuple[int, ...] | None]]:
    """Return each leaf's sharding and global shape if `source` or the state's layout, or the owner asked, has them."""
    flat, spec = tree.flatten(values)
    if source is not None:
        return shardings(spec, source)
    if not isinstance(values, TrainState):
        staged = (asks and isinstance(x, DTensor) and _is_staged(x) for x in flat)
        return [None] * len(flat), [
            _size_of_staged(x) if asked else None for x, asked in zip(flat, staged, strict=True)
        ]
    moments = values.layout.moments(values.opt_state)
    known = {entry.path: entry for entry in (*values.layout.entries(), *moments.values())}
    found = [known.get(path) for path in tree.paths(values)]
    return [None if x is None else x.sharding for x in found], [None if x is None else x.shape for x in found]


def shardings(spec: Any, layout: Any) -> tuple[list[NamedSharding | None], list[tuple[int, ...] | None]]:
    """Return the shardings of a layout or tree by leaf of a structure, and the global shapes of a layout."""
    count = spec.num_leaves
    if isinstance(layout, NamedSharding):
        return [layout] * count, [None] * count
    if not isinstance(layout, Layout):
        result = tree.flatten_up_to(spec, layout)
        if odd := [x for x in result if x is not None and not isinstance(x, NamedSharding)]:
            mend = "Pass a Layout, a NamedSharding for all leaves, or a tree of them."
            raise refuse("a Layout or shardings", odd[0], mend)
        return result, [None] * count
    by_leaf = tree.unflatten(layout.structure, list(layout.leaves))
    leaves = tree.flatten_up_to(spec, by_leaf)
    if not all(isinstance(leaf, LeafLayout) for leaf in leaves):
        tree.match(by_leaf, tree.unflatten(spec, [0] * count), ("the layout", "the tree"))
    return [leaf.params for leaf in leaves], [leaf.shape for leaf in leaves]


def devices(moved: Sequence[Moving]) -> list[Mesh]:
    """Return the source and target meshes of the leaves."""
    result = dict.fromkeys(s.mesh for m in moved if not m.plain for s in (m.source, m.target))
    if lost := [mesh for mesh in result if isinstance(mesh, AbstractMesh)]:
        text = f"cannot move anything from or to the abstract mesh {lost[0]}."
        raise LayoutError(message(text, mend="Plan the layout on a mesh of fs.make_mesh."))
    return list(result)
