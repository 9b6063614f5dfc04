"""Check that a state matches its layout, leaf by leaf. Every step, save and reshard begins with this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import LayoutError, message
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import home_of
from fsharding.comm.tier import tier_of
from fsharding.sharding.layout import Layout
from fsharding.sharding.memory_kinds import tier_named
from fsharding.sharding.named_sharding import LeafType, Local, NamedSharding, sharding_of, typeof
from fsharding.train.in_flight import unread

__all__ = ["StateCheck", "check_leaves", "check_main", "check_numbers", "check_state"]


class StateCheck:
    """Checks many states of one layout."""

    # `_seen` has the structure of each field in the last correct state, and a glance at each of its leaves: spec, local
    # shape and dtype. A field that looks the same is correct too, so most steps compare nothing else.

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._seen: dict[str, tuple[Any, list[Any]]] = {}

    def __call__(self, state: Any) -> None:
        """Compare a state with its layout. Each rank looks at its own shards; nothing is sent."""
        rows = _numbers(state)
        mends = [_NUMBERS] if rows else []
        for field, (find, mend) in _FIELDS.items():
            values = unread(state, field)
            leaves, structure = tree.flatten(values)
            glances = [_compat.glance(x) for x in leaves]
            known = self._seen.get(field)
            if known is not None and known[0] == structure and _compat.same_glances(glances, known[1]):
                continue
            result = find(values, self.layout)
            if not result:
                self._seen[field] = structure, glances
            rows += result
            mends += [mend] if result else []
        if rows:
            raise LayoutError(message("got a state that doesn't match its layout.", rows, "\n".join(mends)))


_NUMBERS = "Keep step as a 0-d int64, and key as fs.random.key makes it, on the CPU."


def check_state(state: Any) -> None:
    """Compare one state with its layout."""
    StateCheck(state.layout)(state)


def check_leaves(params: Tree, layout: Layout) -> None:
    """Compare a tree of parameters with a layout."""
    _refuse(_parameters(params, layout), "params")


def check_numbers(state: Any) -> None:
    """Refuse a state whose step or key can't be read."""
    if rows := _numbers(state):
        raise LayoutError(message("got a state without a step number or a key.", rows, _NUMBERS))


def check_main(main: Tree, params: Tree, layout: Layout) -> None:
    """Compare main parameters and frozen parameters with a layout."""
    mains = tree.flatten_up_to(layout.structure, main, ("the layout", "main"))
    others = tree.flatten_up_to(layout.structure, params, ("the layout", "params"))
    rows: list[str] = []
    for leaf, x, other in zip(layout.leaves, mains, others, strict=True):
        if leaf.trainable and x is not None:
            rows += _objection(leaf.path, x, leaf.shape, layout.precision.main_dtype(leaf.init), leaf.main)
        else:
            x = other if x is None else x
            rows += _objection(leaf.path, x, leaf.shape, layout.param_dtype(leaf), leaf.params)
    _refuse(rows, "main")


def _refuse(rows: Sequence[str], kind: str) -> None:
    if rows:
        mend = f"Bring them there: fs.shard(..., layout.{kind}) for full tensors, fs.reshard for DTensors."
        raise LayoutError(message("got leaves that don't match the layout.", rows, mend))


def _numbers(state: Any) -> list[str]:
    """Describe a step that isn't a step number, and a key that isn't a key."""
    rows: list[str] = []
    for name, shape in (("step", ()), ("key", (2,))):
        x = getattr(state, name)
        # `step` may be counted on a device, so that no host waits for it; the key is always read by the host.
        wrong_device = isinstance(x, Tensor) and x.device.type != "cpu" and (name == "key" or x.is_meta)
        if not isinstance(x, Tensor) or (tuple(x.shape), x.dtype) != (shape, torch.int64) or wrong_device:
            rows.append(f"{name} is {_kind(x)}" + (f" on {x.device}" if isinstance(x, Tensor) else ""))
    return rows


def _parameters(values: Tree, layout: Layout, field: str = "params") -> list[str]:
    """Compare parameters, or main parameters, with the entries of a layout."""
    leaves = tree.flatten_up_to(layout.structure, values, ("the layout", f"state.{field}"))
    found = {leaf.path_in(field): x for leaf, x in zip(layout.leaves, leaves, strict=True)}
    rows: list[str] = []
    for entry in layout.entries():
        if entry.path in found and entry.sharding is not None:
            rows += _objection(entry.path, found.pop(entry.path), entry.shape, entry.dtype, entry.sharding)
    frozen = "the layout freezes this leaf, so it has no main copy"
    return rows + [f"{path} is {_kind(x)}; {frozen}" for path, x in found.items() if x is not None]


def _main(values: Tree, layout: Layout) -> list[str]:
    if layout.has_main == (values is not None):
        return [] if values is None else _parameters(values, layout, "main")
    if values is None:
        return ["main is None; the layout has separate main parameters"]
    return ["main isn't None; the layout has no separate main parameters"]


def _moments(values: Tree, layout: Layout) -> list[str]:
    known = layout.moments(values)
    rows: list[str] = []
    for path, x in tree.named_leaves(values).items():
        if (entry := known.get(path)) is not None:
            rows += _objection(entry.path, x, entry.shape, entry.dtype, entry.sharding)
        elif isinstance(x, DTensor):
            rows += _objection(f"opt_state.{path}", x, tuple(x.shape), x.dtype, sharding_of(x))
    return rows


def _buffers(values: Any, layout: Layout) -> list[str]:
    if not isinstance(values, Mapping):
        return [f"buffers is {_kind(values)}"]
    device = getattr(layout.mesh, "device_type", "cpu")
    named = cast("Mapping[Any, Any]", values).items()
    odd = [
        (name, x)
        for name, x in named
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.device.type not in (device, "meta")
    ]
    return [f"buffers.{name} is {_kind(x)}" + (f" on {x.device}" if isinstance(x, Tensor) else "") for name, x in odd]


def _objection(path: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, sharding: NamedSharding) -> Sequence[str]:
    """Describe how a leaf differs from its entry in the layout; [] if it doesn't."""
    wanted = LeafType(shape, dtype, sharding)
    if not isinstance(x, DTensor):
        return [f"{path} is {_kind(x)}; the layout has {wanted}"]
    at_rest = sharding.shape_at_rest(shape), sharding.placements(), sharding.device_mesh()
    if (tuple(x.shape), tuple(x.placements), x.device_mesh) != at_rest or x.dtype != dtype:
        return [f"{path} is {typeof(x)}; the layout has {wanted}" + _also(x, sharding)]
    # A DTensor can be built around a local tensor that contradicts it, so that one is looked at as well.
    here = sharding.local_shape(shape)
    local = _compat.local_tensor(x)
    if tuple(local.shape) != here or local.dtype != dtype:
        return [f"{path} is {wanted}, whose shard here is {list(here)}, but holds {local.dtype} {list(local.shape)}"]
    tier = tier_of(local, sharding.device_type)
    if tier is not home_of(sharding) and not local.is_meta:
        return [f"{path} is {wanted} on {tier.text}; the layout has it on {tier_named(sharding.memory).text}"]
    return []


def _also(x: DTensor, sharding: NamedSharding) -> str:
    """Describe what a type doesn't show: assignments, and the mesh if it differs."""
    assigned = f" {sharding}" if sharding.assigned else ""
    return f"{assigned}, on {sharding.mesh}" if x.device_mesh != sharding.device_mesh() else assigned


def _kind(x: Any) -> str:
    if isinstance(x, Local):
        return f"{typeof(x)} in flight"
    return f"a plain tensor {typeof(x)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


_FIELDS = {
    "params": (
        _parameters,
        "Bring them there: state.replace(params=fs.shard(params, state.layout)) for full tensors, fs.reshard for"
        " DTensors.",
    ),
    "main": (
        _main,
        "Bring main parameters there: fs.shard(main, state.layout.main) for full ones, fs.reshard for DTensors.",
    ),
    "opt_state": (
        _moments,
        "Bring moments there: fs.shard(moments, state.layout.main) for full ones, fs.reshard for DTensors.",
    ),
    "buffers": (
        _buffers,
        "Keep buffers as a flat dict of plain tensors on the device of the mesh, the same on every rank.",
    ),
}
"""By field of a state: the function that describes its wrong leaves, and the fix."""
