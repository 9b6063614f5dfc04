"""Map the leaves of a training state to the names in torch's `get_state_dict(model, optimizer)`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding.foreign.name_map import Names, Piece, aliases_of, parts_by_leaf
from fsharding.sharding.leaf_names import begins
from fsharding.sharding.named_sharding import LeafType

__all__ = ["Item", "Settings", "params_in", "plan_fsdp2"]

Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Settings of a torch optimizer: of its only parameter group, or of each, with parameter names under `params`."""

_ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq"}


class Item(NamedTuple):
    """A tensor to write: a part of a leaf, or a constant `value`."""

    path: str
    part: Piece
    dtype: torch.dtype
    value: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.part.shape) * self.dtype.itemsize


class _Slot(NamedTuple):
    """One tensor of a parameter's optimizer state."""

    path: str  # of our leaf
    name: str  # in torch
    count: str  # path of the leaf with the step count


def params_in(leaves: Iterable[str]) -> dict[str, str]:
    """Map the paths of parameters in a layout to those in a state, which has these leaves."""
    return {path.removeprefix("params").removeprefix("."): path for path in leaves if begins(path, "params")}


def plan_fsdp2(
    leaves: Mapping[str, LeafType], names: Names, settings: Settings | None
) -> tuple[list[Item], dict[str, Any], list[str]]:
    """Return the tensors to write, values that aren't tensors, and a row for each leaf that FSDP2 has no place for."""
    params = params_in(leaves)
    rows: list[str] = []
    named = parts_by_leaf(names, {path: leaves[saved].shape for path, saved in params.items()}, rows)
    slots = _slots(leaves, params, rows)
    result: list[Item] = []
    trained: list[str] = []
    for path, part in ((path, part) for path, own in named.items() for part in own):
        leaf = leaves[params[path]]
        every = aliases_of(names, part.name)
        result += [Item(params[path], part._replace(name=f"model.{name}"), leaf.dtype) for name in every]
        state = f"optim.state.{every[0]}"
        own = slots.get(path, [])
        trained += [every[0]] if own else []
        for slot in own:
            scalar = leaves[slot.path].shape == () != leaf.shape
            one = Piece("", (), ()) if scalar else part
            kind = torch.float32 if scalar else leaves[slot.path].dtype
            result.append(Item(slot.path, one._replace(name=f"{state}.{slot.name}"), kind))
        if own and all(slot.name != "step" for slot in own):
            result.append(Item(own[0].count, Piece(f"{state}.step", (), ()), torch.float32))
    return result, _groups(settings, trained, rows), rows


def _slots(leaves: Mapping[str, LeafType], params: Mapping[str, str], rows: list[str]) -> dict[str, list[_Slot]]:
    """Return the optimizer state of each parameter; add a row for each leaf that torch has no name for."""
    result: dict[str, list[_Slot]] = {}
    for path, leaf in leaves.items():
        steps = path.split(".")
        if steps[0] != "opt_state" or (steps[-1] == "count" and leaf.shape == ()):
            continue
        for k in range(2, len(steps) + 1):  # find the longest suffix that is the path of a parameter
            head = steps[:k]
            param = ".".join(steps[k:])
            if param not in params:
                continue
            is_torch = len(head) > 2 and head[-2] in ("slots", "scalars")
            name, count = (head[-1], head[:-2]) if is_torch else (_ADAM.get(head[-1]), head[:-1])
            both = all(".".join(filter(None, (*count, kind, param))) in leaves for kind in _ADAM)
            if name is not None and (is_torch or both) and ".".join([*count, "count"]) in leaves:
                result.setdefault(param, []).append(_Slot(path, name, ".".join([*count, "count"])))
                break
        else:
            rows.append(f"{path} is {leaf}: supported are Adam's moments, and the state of fs.optim.from_torch")
    return result


def _groups(settings: Settings | None, trained: Sequence[str], rows: list[str]) -> dict[str, Any]:
    """Return the values of the parameter groups by name; add a row for each that doesn't fit."""
    if settings is None:
        rows.append("settings= is missing: dcp.load restores the optimizer's groups, such as its learning rate")
        return {}
    groups = [{**settings, "params": trained}] if isinstance(settings, Mapping) else [{**group} for group in settings]
    values: dict[str, Any] = {}
    for number, group in enumerate(groups):
        for name, value in group.items():
            values[f"optim.param_groups.{number}.{name}"] = value
            if not _is_plain(value):
                rows.append(f"settings of group {number}: {name} is {type(value).__name__}, not a plain value")
    listed = Counter(name for group in groups for name in group.get("params", ()))
    rows += [f"settings: {name} is in no group" for name in trained if name not in listed]
    rows += [f"settings: {name} is in a group, but has no moments" for name in sorted(listed.keys() - {*trained})]
    rows += [f"settings: {name} is in {count} groups" for name, count in listed.items() if count > 1]
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
