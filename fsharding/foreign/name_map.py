"""Map our leaves to names in another program's weights. The foreign tensors of a leaf tile it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.checkpoint.manifest import dtype_name
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.leaf_names import MARKS

__all__ = [
    "SAME_BUFFERS", "ModuleNames", "Name", "Names", "Part", "Rows", "Transposed", "aliases_of", "constants_of",
    "naming", "other_constants", "our_box", "parts", "parts_by_leaf", "written_constants",
]  # fmt: skip


class Transposed(NamedTuple):
    """The name of a foreign tensor whose last two dims are swapped relative to our leaf, such as `nn.Linear.weight`.

    Attributes:
        name: Name in the files, which may contain `{i}`.

    Example:
        >>> import tempfile
        >>> linear = torch.nn.Linear(2, 3, bias=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(linear.state_dict(), f"{folder}/linear.pt")
        ...     names = {"w": fs.foreign.Transposed("weight")}
        ...     loaded = fs.foreign.load_weights(f"{folder}/linear.pt", {"w": torch.zeros(2, 3)}, names)
        >>> torch.equal(loaded["w"], linear.weight.T)
        True
    """

    name: str


class Rows(NamedTuple):
    """The name of a stack whose layers aren't numbered from 0 in the files, such as routed layers after dense ones.

    Attributes:
        name: Name in the files, with `{i}`.
        keys: Values of `{i}` for the rows of our leaf, in order, such as `(3, 4, 5)`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"layers.3.w": torch.zeros(2), "layers.4.w": torch.ones(2)}, f"{folder}/model.pt")
        ...     names = {"routed.w": fs.foreign.Rows("layers.{i}.w", (3, 4))}
        ...     params = fs.foreign.load_weights(f"{folder}/model.pt", {"routed": {"w": torch.zeros(2, 2)}}, names)
        >>> params["routed"]["w"]
        tensor([[0., 0.],
                [1., 1.]])
    """

    name: str | Transposed
    keys: tuple[int | str, ...]


Name: TypeAlias = str | Transposed | Rows
Names: TypeAlias = Mapping[str, Name] | Callable[[str], Name] | None
"""The foreign name of each dotted path of ours; a path that isn't in the table is its own name."""


class ModuleNames(dict[str, Any]):
    """Names of a module's leaves in its state dict, and its buffers, which aren't leaves."""

    def __init__(
        self,
        names: Mapping[str, Any],
        constants: Mapping[str, Tensor],
        aliases: Mapping[str, tuple[str, ...]],
        written: Mapping[str, str],
    ) -> None:
        """Make the table: constants by name, all names of a parameter by its first, written buffers by name."""
        super().__init__(names)
        self.constants: Mapping[str, Tensor] = constants
        self.aliases: Mapping[str, tuple[str, ...]] = aliases
        self.written: Mapping[str, str] = written


def constants_of(names: object) -> Mapping[str, Tensor]:
    """Return the tensors of a module's state dict that aren't leaves."""
    return names.constants if isinstance(names, ModuleNames) else {}


def written_constants(names: object, buffers: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the constants to write, from a state's buffers if the forward writes them, and a row per missing one."""
    written = names.written if isinstance(names, ModuleNames) else {}
    result = {name: buffers.get(written.get(name, ""), ours) for name, ours in constants_of(names).items()}
    rows = [f"{name} is written by the forward, and not given" for name, own in written.items() if own not in buffers]
    return result, rows


def aliases_of(names: object, name: str) -> tuple[str, ...]:
    """Return all names of a parameter in its module; optimizers use the first."""
    return names.aliases.get(name, (name,)) if isinstance(names, ModuleNames) else (name,)


def other_constants(names: object, weights: Any) -> list[str]:
    """Return a row for each constant of a module that the files have with a different value."""
    rows: list[str] = []
    for name, ours in constants_of(names).items():
        there = weights.leaves.get(name)
        if there is None:
            continue
        wanted = f"{dtype_name(ours.dtype)}{list(ours.shape)}"
        result = ours.new_empty(there.shape, device="cpu")
        if there.shape == ours.shape:
            weights.read(name, boxes.full(there.shape), result)
            if torch.equal(result.nan_to_num(), ours.cpu().nan_to_num()):
                continue
        rows.append(f"{name} is {there}, but a buffer of the module, {wanted}, with different values")
    return rows


SAME_BUFFERS = "load the buffers into the module before fs.functionalize, with its load_state_dict"


class Part(NamedTuple):
    """One foreign tensor of a leaf."""

    name: str  # what it is called there
    lead: tuple[int, ...]  # its indices along the leading dims of our leaf
    shape: tuple[int, ...]
    transposed: bool  # whether its last two dims are swapped


def naming(names: Names) -> Callable[[str], Name]:
    """Convert names to a function."""
    if names is None:
        return lambda path: path
    if callable(names):
        return names
    return lambda path: names.get(path, path)


def parts_by_leaf(names: Names, shapes: Mapping[str, Sequence[int]], rows: list[str]) -> dict[str, list[Part]]:
    """Return the foreign tensors of each leaf; add a row for each entry of a table without a leaf, and each misfit."""
    table = names if isinstance(names, Mapping) else {}
    rows += [f"{path} is in names, but matches no leaf of ours" for path in table if path not in shapes]
    named = naming(names)
    result: dict[str, list[Part]] = {}
    for path, shape in shapes.items():
        try:
            result[path] = list(parts(named(path), shape))
        except ValueError as error:
            rows.append(f"{path}: {error}")
    return result


def parts(name: Name, shape: Sequence[int]) -> Iterator[Part]:
    """Yield the foreign tensors of a leaf."""
    keys: tuple[int | str, ...] | None = None
    if isinstance(name, Rows):
        name, keys = name
    transposed = isinstance(name, Transposed)
    pattern = name.name if transposed else name
    depth = sum(mark in pattern for mark in MARKS)
    if any(mark not in pattern for mark in MARKS[:depth]) or depth > len(shape):
        raise ValueError(f"{pattern!r}: use {', '.join(MARKS)} in this order, at most one per dim")
    if keys is not None and (depth == 0 or len(keys) != shape[0]):
        held = f"{shape[0]} rows" if depth else "no {i}"
        raise ValueError(f"{pattern!r}: {len(keys)} keys for rows, and {held}")
    rest = tuple(shape[depth:])
    if transposed and len(rest) < 2:
        raise ValueError(f"{pattern!r}: nothing to transpose in {list(rest)}")
    there = (*rest[:-2], rest[-1], rest[-2]) if transposed else rest
    for lead in product(*map(range, shape[:depth])):
        text = pattern
        marks = lead if keys is None else (keys[lead[0]], *lead[1:])
        for mark, index in zip(MARKS, marks, strict=False):
            text = text.replace(mark, str(index))
        yield Part(text, lead, there, transposed)


def our_box(part: Part, box: Box) -> Box:
    """Return the box of our leaf that corresponds to a box of a foreign tensor."""
    inner = (*box[:-2], box[-1], box[-2]) if part.transposed else box
    return (*((index, index + 1) for index in part.lead), *inner)
