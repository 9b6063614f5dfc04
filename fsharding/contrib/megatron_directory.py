"""A Megatron checkpoint directory: which tensors are in it, by kind and parameter, and the arguments of its run."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from fsharding.base.errors import CheckpointError, message
from fsharding.base.untrusted import open_plain, read_plain
from fsharding.checkpoint.chunks import Place
from fsharding.checkpoint.directory import StrPath
from fsharding.checkpoint.manifest import METADATA
from fsharding.checkpoint.torch_pickles import Global, Made, Pairs, TorchFile, torch_file
from fsharding.contrib.megatron_names import EMBEDDING
from fsharding.foreign.foreign_weights import Weights, weights_at
from fsharding.sharding.named_sharding import LeafType

__all__ = ["COMMON", "MAIN", "Opened", "iteration_of", "open_directory"]

COMMON = "common.pt"
_COMMON_STATE = "common_state/shard_0_1"  # where Megatron Core 0.19 keeps it
MAIN = "main"
_LATEST = "latest_checkpointed_iteration.txt"
_CORE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_FSDP = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.(exp_avg_sq|exp_avg|step)")
_MODEL = re.compile(r"model\.(?:module\.)*(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*")
_KINDS = {"param": MAIN, "fp32_param": MAIN}


@dataclass
class Opened:
    """A directory: its tensors by kind, then by parameter name without prefixes."""

    weights: Weights  # all tensors
    format: str  # "torch_dist" or "fsdp_dtensor"
    # kinds are "model", "main", "exp_avg", "exp_avg_sq", "step", and "" for everything else
    tensors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    # iteration, arguments and content metadata, as far as the directory has them
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    flat: str = ""  # an optimizer tensor without a parameter's shape; "" without one

    def info(self, kind: str, name: str) -> LeafType | None:
        """Shape and dtype of a tensor."""
        stored = self.tensors.get(kind, {}).get(name)
        return None if stored is None else self.weights.leaves[stored]

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer has a tensor of the parameter."""
        return any(name in there for kind, there in self.tensors.items() if kind not in ("model", ""))

    def seen(self) -> object:
        """What must be the same on all ranks."""
        return sorted(self.weights.leaves.items()), self.facts


def open_directory(path: StrPath) -> Opened:
    """Find out which of the two formats is at a path, and which tensors."""
    folder = _latest(Path(path))
    mend = "Give a directory of torch_dist or fsdp_dtensor, such as iter_0000100."
    others: dict[str, Place] = {}
    weights = weights_at(folder, mend=mend, records=others)
    if weights.format != "dcp":
        raise CheckpointError(message(f"finds no Megatron checkpoint at {folder}.", mend=mend))
    fsdp = any(_MODEL.fullmatch(name) for name in weights.leaves)
    result = Opened(weights, "fsdp_dtensor" if fsdp else "torch_dist")
    rows: list[str] = []
    for stored in weights.leaves:
        kind, name = _kind(stored, fsdp=fsdp)
        there = result.tensors.setdefault(kind, {})
        if name in there and kind:
            rows.append(f"{stored} and {there[name]} are both the {kind} tensor of {name}")
        there[name] = stored
    if EMBEDDING not in result.tensors.get("model", {}):
        rows.append(f"it has no {EMBEDDING}")
    if rows:
        mend = "Give the checkpoint of one GPT model."
        raise CheckpointError(message(f"cannot use {folder} as Megatron's {result.format}.", rows, mend))
    result.flat = _flat(result, [*weights.leaves, *others])
    entries = ("iteration", "args", "content_metadata")
    if os.path.lexists(folder / COMMON):
        result.facts = _facts(folder, (COMMON, 0, None), entries)
    elif (place := others.get(_COMMON_STATE)) is not None:
        result.facts = _facts(folder, place, entries)
    elif (place := others.get("args")) is not None:
        result.facts = {"args": _facts(folder, place, None)}
    return result


def iteration_of(opened: Opened) -> int | None:
    """Return the number of updates, from the directory or its name."""
    if type(said := opened.facts.get("iteration")) is int:
        return said
    for stored in opened.tensors.get("step", {}).values():
        if opened.weights.leaves[stored].shape == ():
            opened.weights.read(stored, (), step := torch.zeros((), dtype=torch.float64))
            return int(step)
    found = re.fullmatch(r"iter_(\d+)", opened.weights.path.name)
    return int(found[1]) if found else None


def _latest(path: Path) -> Path:
    """The directory of the latest iteration, given the directory that has all of them."""
    tracker = path / _LATEST
    if os.path.lexists(path / METADATA) or not os.path.lexists(tracker):
        return path
    try:
        said = bytes(read_plain(tracker, 64)).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(message(f"cannot read {tracker}: {error}.")) from error
    if not (said.isascii() and said.isdigit()):
        raise CheckpointError(message(f"finds no number of an iteration in {tracker}.", [repr(said)]))
    return path / f"iter_{int(said):07d}"


def _kind(stored: str, *, fsdp: bool) -> tuple[str, str]:
    """The kind of a tensor and the name of its parameter."""
    if fsdp:
        if found := _FSDP.fullmatch(stored):
            return found[2], found[1]
        found = _MODEL.fullmatch(stored)
        return ("model", found[1]) if found else ("", stored)
    if found := _CORE.fullmatch(stored):
        return _KINDS.get(found[1], found[1]), found[2]
    beside = re.match(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine", stored)
    return ("", stored) if beside else ("model", stored)


def _flat(opened: Opened, names: list[str]) -> str:
    """Return an optimizer tensor whose shape isn't its parameter's; "" without one."""
    for name in names:
        if _BUCKETS.fullmatch(name):
            return name
    for kind in (MAIN, "exp_avg", "exp_avg_sq"):
        for name, stored in opened.tensors.get(kind, {}).items():
            model = opened.info("model", name)
            own = opened.weights.leaves[stored].shape
            if model is not None and own != model.shape and math.prod(own) == math.prod(model.shape):
                return stored
    return ""


def _facts(folder: Path, place: tuple[str, int, int | None], entries: tuple[str, ...] | None) -> dict[str, Any]:
    """Plain values of a `torch.save` record, which is a file or inside of one; nothing in it is run."""
    name, first, length = place
    try:
        with open_plain(folder / name) as stream:
            return _plain(torch_file(stream, first, length), entries)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(message(f"cannot read {folder / name}: {error}.")) from error


def _plain(file: TorchFile, entries: tuple[str, ...] | None) -> dict[str, Any]:
    """Return plain values of a dict, a list of one, or an `argparse.Namespace`; of anything else, its name."""
    # Any global may be named, because each stays a name: arguments of a run hold enums and functions.
    held = file.held[0] if type(file.held) is list and len(file.held) == 1 else file.held
    pairs = held.state if isinstance(held, Made) else held
    pairs = Pairs() if pairs is None else pairs  # None itself, or a namespace without attributes
    if not isinstance(pairs, Pairs):
        raise ValueError("it holds no dict")
    left = 10_000 + file.size  # lists may share elements: all together are to be about as many as are written

    def grow(value: Any, levels: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("what it holds is too much for its size")
        if type(value) in (bool, int, float, str, type(None)):
            return value
        if levels and isinstance(value, Made) and isinstance(value.state, Pairs):
            return grow(value.state, levels)
        if levels and isinstance(value, Pairs):
            return {key: grow(each, levels - 1) for key, each in value if isinstance(key, str)}
        if levels and isinstance(value, list | tuple):
            grown = [grow(each, levels - 1) for each in cast("list[Any]", value)]
            return tuple(grown) if isinstance(value, tuple) else grown
        kind = value.kind if isinstance(value, Made) else value
        return str(kind) if isinstance(kind, Global | torch.dtype) else type(kind).__name__

    return {key: grow(value, 3) for key, value in pairs if isinstance(key, str) and key in (entries or (key,))}
