"""Names: what our leaves are called in weights that another program wrote, or is to read.

In: a table, or a function, from our paths to foreign names. Out: for each leaf the foreign tensors that make it up.
Our blocks are stacked and theirs are not: `{i}` in a name is the index along dim 0 of our leaf, `{j}` that along dim 1.
Law: the foreign tensors of a leaf tile it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from fsharding.boxes import Box

__all__ = ["Name", "Names", "Part", "Transposed", "naming", "our_box", "parts", "unknown"]

_MARKS = ("{i}", "{j}", "{k}")


class Transposed(NamedTuple):
    """The name of a foreign tensor that is our leaf with its last two dims swapped, such as `nn.Linear.weight`.

    Attributes:
        name: may have `{i}` in it, like any other.
    """

    name: str


Name: TypeAlias = str | Transposed
Names: TypeAlias = Mapping[str, Name] | Callable[[str], Name] | None
"""From our dotted path to the foreign name; a path that a table leaves out, and every path by default, is its own."""


class Part(NamedTuple):
    """One foreign tensor of a leaf.

    Attributes:
        name: what it is called there.
        lead: its indices along the leading dims of our leaf.
        shape: its shape there.
        transposed: whether its last two dims are swapped.
    """

    name: str
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool


def naming(names: Names) -> Callable[[str], Name]:
    """A table of names as a function."""
    if names is None:
        return lambda path: path
    if callable(names):
        return names
    return lambda path: names.get(path, path)


def unknown(names: Names, paths: Collection[str]) -> list[str]:
    """Entries of a table that name no leaf: one row each."""
    table = names if isinstance(names, Mapping) else {}
    return [f"{path} is no leaf of ours; names has it" for path in table if path not in paths]


def parts(name: Name, shape: Sequence[int]) -> Iterator[Part]:
    """The foreign tensors of a leaf.

    Args:
        name: its foreign name.
        shape: of our leaf.

    Raises:
        ValueError: the name has more indices than the leaf has dims, or skips one, or the transposed leaf no two dims.
    """
    transposed = isinstance(name, Transposed)
    pattern = name.name if transposed else name
    depth = sum(mark in pattern for mark in _MARKS)
    if any(mark not in pattern for mark in _MARKS[:depth]) or depth > len(shape):
        raise ValueError(f"{pattern!r}: indices are {', '.join(_MARKS)} in this order, at most one for each dim")
    rest = tuple(shape[depth:])
    if transposed and len(rest) < 2:
        raise ValueError(f"{pattern!r}: nothing to transpose in {list(rest)}")
    there = (*rest[:-2], rest[-1], rest[-2]) if transposed else rest
    for lead in product(*map(range, shape[:depth])):
        text = pattern
        for mark, index in zip(_MARKS, lead, strict=False):
            text = text.replace(mark, str(index))
        yield Part(text, lead, there, transposed)


def our_box(part: Part, box: Box) -> Box:
    """Where a box of a foreign tensor is in our leaf."""
    inner = (*box[:-2], box[-1], box[-2]) if part.transposed else box
    return (*((index, index + 1) for index in part.lead), *inner)
