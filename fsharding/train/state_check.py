"""Check that a state matches its layout, leaf by leaf; every step, save and reshard begins with it."""

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

__all__ = ["StateCheck", "check_leaves", "check_main", "check_numbers", "check_state"]


class StateCheck:
    """Checks the states of one layout, again and again."""

    # `layout`: the same. `_seen` has, for each field, the structure of the last state that was right, and a glance at
    # each of its leaves; so a field that looks the same is right as well, whatever its values.

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._seen: dict[str, tuple[Any, list[Any]]] = {}

    def __call__(self, state: Any) -> None:
        """Compares a state with its layout. Each rank looks at its own leaves; nothing is sent."""
        rows = _numbers(state)
        mends = [_NUMBERS] if rows else []
        for field, (find, mend) in _FIELDS.items():
            values = getattr(state, field)
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
            text = f"got a state of which {len(rows)} leaves are not what its layout says."
            raise LayoutError(message(text, rows, "\n".join(mends)))


_NUMBERS = "Keep step as a 0-d int64, and key as fs.random.key makes it, on the CPU."


def check_state(state: Any) -> None:
    """Compares a state with its layout, once."""
    StateCheck(state.layout)(state)


def check_leaves(params: Tree, layout: Layout) -> None:
    """Compare a tree of parameters with a layout."""
    _refuse(_parameters(params, layout), "params")


def check_numbers(state: Any) -> None:
    """Refuses a state whose step or key cannot be read."""
    if rows := _numbers(state):
        raise LayoutError(message("got a state without a step number or a key.", rows, _NUMBERS))


def check_main(main: Tree, params: Tree, layout: Layout) -> None:
    """Compares main parameters, and the frozen parameters beside them, with a layout."""
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
        text = f"got {len(rows)} leaves that are not what the layout says."
        mend = f"Bring them there: fs.shard(..., layout.{kind}) for whole tensors, fs.reshard for DTensors."
        raise LayoutError(message(text, rows, mend))


def _numbers(state: Any) -> list[str]:
    """Refuses values that are no step number, or no key."""
    rows: list[str] = []
    for name, shape in (("step", ()), ("key", (2,))):
        x = getattr(state, name)
        # A step that is counted on a device, so that no host waits for it, stays there.
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
    frozen = "the layout has it frozen, without a main copy"
    return rows + [f"{path} is {_kind(x)}; {frozen}" for path, x in found.items() if x is not None]


def _main(values: Tree, layout: Layout) -> list[str]:
    if layout.has_main == (values is not None):
        return [] if values is None else _parameters(values, layout, "main")
    return ["main is None, but the layout keeps main parameters apart" if values is None else "main is not kept apart"]


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
    """Return one row if a leaf is something else than what is wanted of it."""
    wanted = LeafType(shape, dtype, sharding)
    if not isinstance(x, DTensor):
        return [f"{path} is {_kind(x)}; the layout says {wanted}"]
    at_rest = sharding.shape_at_rest(shape), sharding.placements(), sharding.device_mesh()
    if (tuple(x.shape), tuple(x.placements), x.device_mesh) != at_rest or x.dtype != dtype:
        return [f"{path} is {typeof(x)}; the layout says {wanted}" + _also(x, sharding)]
    here = sharding.local_shape(shape)
    local = _compat.local_tensor(x)
    if tuple(local.shape) != here or local.dtype != dtype:
        return [f"{path} is {wanted}, which is {list(here)} here, but holds {local.dtype} {list(local.shape)}"]
    tier = tier_of(local, sharding.device_type)
    if tier is not home_of(sharding) and not local.is_meta:
        return [f"{path} is {wanted} on {tier.text}; the layout keeps it on {tier_named(sharding.memory).text}"]
    return []


def _also(x: DTensor, sharding: NamedSharding) -> str:
    """Text for the facts that a type does not tell: the mesh, and who owns a leaf."""
    assigned = f" {sharding}" if sharding.assigned else ""
    return f"{assigned}, on {sharding.mesh}" if x.device_mesh != sharding.device_mesh() else assigned


def _kind(x: Any) -> str:
    if isinstance(x, Local):
        return f"{typeof(x)} in flight"
    return f"a plain tensor {typeof(x)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


_FIELDS = {
    "params": (
        _parameters,
        "Bring them there: state.replace(params=fs.shard(params, state.layout)) for whole tensors, fs.reshard for"
        " DTensors.",
    ),
    "main": (
        _main,
        "Bring main parameters there: fs.shard(main, state.layout.main) for whole ones, fs.reshard for DTensors.",
    ),
    "opt_state": (
        _moments,
        "Bring moments there: fs.shard(moments, state.layout.main) for whole ones, fs.reshard for DTensors.",
    ),
    "buffers": (
        _buffers,
        "Keep buffers as a flat dict of plain tensors on the device of the mesh, the same on every rank.",
    ),
}
"""What finds wrong leaves of each field of a state, and how to mend them."""
