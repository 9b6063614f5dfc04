"""Positions of data in a checkpoint: `state_dict` of each data rank as JSON, and back; one if all are the same.

Guarantee: what is read equals what was written, of plain values, tensors and arrays alone; no text runs anything.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch

from fsharding.base.errors import ArgumentError, CheckpointError, message
from fsharding.base.public import kind_of
from fsharding.checkpoint.manifest import Manifest
from fsharding.mesh.device_mesh import abstract, coordinate, data_rank_and_size, is_member
from fsharding.sharding.layout import Layout

__all__ = ["Stateful", "check_stateful", "joined", "own_position", "select"]

_TAG = "$"  # the only key of an object that encodes a value which JSON lacks
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")


class Stateful(Protocol):
    """Data whose position can be saved: torch's protocol of loaders and data sets."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position: plain values, tensors and arrays."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Continue from a position."""
        ...


def check_stateful(data: Any) -> None:
    """Refuse data without a position."""
    if missing := [name for name in ("state_dict", "load_state_dict") if not callable(getattr(data, name, None))]:
        rule = f"takes data with a position, got {kind_of(data)} without {' and '.join(missing)}."
        mend = "Pass fs.data.packed(...) or a torchdata.stateful_dataloader.StatefulDataLoader, or omit data=."
        raise ArgumentError(message(rule, mend=mend))


# -------------------------------------------------------------------------------------------------------------- saving
def own_position(data: Stateful, layout: Layout) -> tuple[int, Any] | None:
    """Return the index of this data rank and its position; None if a different rank of the same index sends it."""
    mesh = layout.mesh
    if not is_member(mesh):
        return None
    coord = coordinate(mesh)
    others = [axis for axis in abstract(mesh).names if axis not in ("replica", "dp", "ep")]
    if any(coord.get(axis, 0) for axis in others):
        return None
    rows: list[str] = []
    written = _written(data.state_dict(), "", rows)
    if rows:
        rule = f"cannot write {len(rows)} values of the position of {kind_of(data)}."
        mend = "Use only numbers, texts, None, lists, tuples, dicts, bytes, tensors and arrays."
        raise CheckpointError(message(rule, rows, mend))
    return data_rank_and_size(mesh)[0], written


def joined(positions: Sequence[tuple[int, Any] | None]) -> dict[str, Any]:
    """Join positions for the manifest: one if it is the same on all data ranks, else one for each."""
    by_index = dict(filter(None, positions))
    every = [by_index[index] for index in sorted(by_index)]
    return {"all": every[0]} if all(position == every[0] for position in every) else {"ranks": every}


def _written(value: Any, path: str, rows: list[str]) -> Any:
    """Convert a value to JSON; add a row for each that can't be converted."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return {_TAG: ["float", value.hex()]}
    if isinstance(value, bytes):
        return {_TAG: ["bytes", base64.b64encode(value).decode()]}
    if isinstance(value, list):
        return [_written(x, f"{path}[{i}]", rows) for i, x in enumerate(cast("list[Any]", value))]
    if isinstance(value, tuple):
        return {_TAG: ["tuple", _written([*cast("tuple[Any, ...]", value)], path, rows)]}
    if isinstance(value, Mapping):
        items = [*cast("Mapping[Any, Any]", value).items()]
        if all(isinstance(key, str) and key != _TAG for key, _ in items):
            return {key: _written(x, f"{path}.{key}".lstrip("."), rows) for key, x in items}
        return {_TAG: ["dict", _written([[key, x] for key, x in items], path, rows)]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dtype != torch.bfloat16:
        return {_TAG: ["tensor", *_array(value.detach().cpu().numpy())]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {_TAG: ["array", *_array(np.asarray(value))]}
    rows.append(f"{path or 'it'} is {kind_of(value)}")
    return None


def _array(value: np.ndarray[Any, Any]) -> list[Any]:
    return [value.dtype.str, [*value.shape], base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]


def _read(value: Any) -> Any:
    """Read a value from JSON."""
    if isinstance(value, list):
        return [_read(x) for x in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    if [*table] != [_TAG]:
        return {key: _read(x) for key, x in table.items()}
    kind, *parts = table[_TAG]
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "bytes":
        return base64.b64decode(parts[0], validate=True)
    if kind == "tuple":
        return tuple(_read(parts[0]))
    if kind == "dict":
        return dict(_read(parts[0]))
    if kind not in ("tensor", "array"):
        raise ValueError(f"{kind!r} isn't a kind of value")
    if not _DTYPE.fullmatch(parts[0]):
        raise ValueError(f"{parts[0]!r} isn't a numeric dtype")
    array = np.frombuffer(base64.b64decode(parts[2], validate=True), np.dtype(parts[0])).reshape(parts[1]).copy()
    return torch.from_numpy(array) if kind == "tensor" else array


# ------------------------------------------------------------------------------------------------------------- loading
def select(where: str, manifest: Manifest, layout: Layout) -> Any:
    """Select this rank's position; None if the mesh doesn't have this rank."""
    if (saved := manifest.data) is None:
        rule = f"finds no position of data in {where}."
        mend = "It was saved without data=: load it without data= too, and set the position of the data yourself."
        raise CheckpointError(message(rule, mend=mend))
    # A position that all data ranks shared belongs to none of them: any number of data ranks can continue from it.
    if not is_member(layout.mesh):
        return None
    index, count = data_rank_and_size(layout.mesh)
    try:
        if "all" in saved:
            return _read(saved["all"])
        if len(saved["ranks"]) == count:
            return _read(saved["ranks"][index])
        before = len(saved["ranks"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        rule = f"cannot read the position of data in {where}: {error}."
        raise CheckpointError(message(rule, mend="Use a different checkpoint, or load without data=.")) from error
    rule = f"got positions of {before} data ranks in {where}, and the mesh has {count}."
    mend = f"Use {before} data ranks (replica, dp and ep). The position of fs.data.packed loads on any mesh."
    raise CheckpointError(message(rule, mend=mend))
