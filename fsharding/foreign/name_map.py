"""Map our leaves to names in another program's weights. The foreign tensors of a leaf tile it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsharding.checkpoint.manifest import dtype_name
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.leaf_names import MARKS

__all__ = [
    "SAME_BUFFERS", "ModuleNames", "Name", "Names", "Piece", "Rows", "Transposed", "aliases_of", "constants_of",
    "in_tensors", "misfits", "other_constants", "parts", "parts_by_leaf", "read_leaf", "written_constants",
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


def other_constants(names: object, weights: Any) -> Iterator[str]:
    """Yield a row for each constant of a module that the files have with a different value."""
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
        yield f"{name} is {there}, but a buffer of the module, {wanted}, with different values"


SAME_BUFFERS = "load the buffers into the module before fs.functionalize, with its load_state_dict"


class Piece(NamedTuple):
    """A box of our leaf that is in one foreign tensor; by default in all of it, without a leading dim."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the tensor in full
    box: Box  # in our leaf
    dim: int = 0  # of our leaf, along which the tensor has a different offset
    shift: int = 0  # what is added to an index of ours along `dim`
    lead: int = 0  # number of leading dims of our leaf that the tensor lacks
    transposed: bool = False  # whether the tensor's last two dims are swapped

    def there(self, box: Box) -> Box:
        """Convert a box of our leaf inside this piece to a box of the tensor."""
        moved = [(a + self.shift, b + self.shift) if d == self.dim else (a, b) for d, (a, b) in enumerate(box)]
        return _turned(tuple(moved[self.lead :]), self.transposed)

    def ours(self, box: Box) -> Box:
        """Convert a box of the tensor to a box of our leaf, for a piece without a shift."""
        return (*self.box[: self.lead], *_turned(box, self.transposed))


def _turned(box: Box, transposed: bool) -> Box:
    return (*box[:-2], box[-1], box[-2]) if transposed else box


def in_tensors(box: Box, x: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Box, Tensor]]:
    """Yield the part of each tensor in a box of our leaf: its name, the box there, and a view of the values."""
    for piece in pieces:
        shared = boxes.intersect(box, piece.box)
        if shared is not None:
            view = x[boxes.relative(shared, box)][(0,) * piece.lead]
            yield piece.name, piece.there(shared), view.mT if piece.transposed else view


def parts_by_leaf(names: Names, shapes: Mapping[str, Sequence[int]], rows: list[str]) -> dict[str, list[Piece]]:
    """Return the foreign tensors of each leaf; add a row for each entry of a table without a leaf, and each misfit."""
    table = names if isinstance(names, Mapping) else {}
    rows += [f"{path} is in names, but matches no leaf of ours" for path in table if path not in shapes]
    result: dict[str, list[Piece]] = {}
    for path, shape in shapes.items():
        try:
            result[path] = list(parts(names(path) if callable(names) else table.get(path, path), shape))
        except ValueError as error:
            rows.append(f"{path}: {error}")
    return result


def parts(name: Name, shape: Sequence[int]) -> Iterator[Piece]:
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
    inner = boxes.full(rest)
    for lead in product(*map(range, shape[:depth])):
        text = pattern
        marks = lead if keys is None else (keys[lead[0]], *lead[1:])
        for mark, index in zip(MARKS, marks, strict=False):
            text = text.replace(mark, str(index))
        box = (*((index, index + 1) for index in lead), *inner)
        yield Piece(text, there, box, lead=depth, transposed=transposed)


def misfits(
    weights: Any,
    named: Mapping[str, Sequence[Piece]],
    names: object,
    wants: Mapping[str, Any],
    objection: Callable[[Piece, Any, Any], str | None],
    extra: Collection[str] | None,
) -> Iterator[str]:
    """Compare tensors with the leaves they are for, one row each; others must be in `extra`, if it isn't None."""
    for path, piece in ((path, piece) for path, own in named.items() for piece in own):
        unread = weights.unread.get(piece.name)
        if why := f"is not read: {unread}" if unread else objection(piece, wants[path], weights.leaves.get(piece.name)):
            yield f"{path}: {piece.name} {why}"
    if extra is not None:
        known = {*extra, *constants_of(names), *(piece.name for own in named.values() for piece in own)}
        every = {**weights.leaves, **weights.unread}
        yield from (f"{name} is extra: {x}" for name, x in every.items() if name not in known)


def read_leaf(weights: Any, pieces: Sequence[Piece], leaf: Any) -> Any:
    """Read this rank's boxes of a `StateLeaf` into its memory, and return the leaf at rest."""
    for box, x in leaf.kept().items():
        for name, there, out in in_tensors(box, x, pieces):
            weights.read(name, there, out)
    return leaf.at_rest()
