"""The structure of an nn.Module: leaves, with the parameters of equal blocks stacked, and units of modules.

Guarantee: every name of every parameter is in one unit, and a tied parameter is one leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from fsharding.base.errors import ConfigError, FshardingError, LayoutError, TreeError, listed, message
from fsharding.base.tree import Tree
from fsharding.foreign.name_map import Rows
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.leaf_plan import LAYERS, kind_text, type_text
from fsharding.sharding.partition_spec import DimName

__all__ = [
    "FUNCTION", "Anatomy", "ModuleLeaf", "ModuleUnit", "NameTable", "Problems", "UnitPatterns", "Weight", "nested",
    "plan_module", "shadowed",
]  # fmt: skip

FUNCTION = "fs.functionalize"


class Problems:
    """Collects the problems of a module, so that one error lists them all."""

    def __init__(self) -> None:
        self.errors: list[FshardingError] = []

    def add(self, kind: type[FshardingError], rule: str, rows: Sequence[str], mend: str) -> None:
        """Add an error for some rows, if there are any."""
        self.errors += [kind(message(rule, rows, mend))] if rows else []

    def refuse(self) -> None:
        """Raise the problems, if there are any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError("\n".join(map(str, self.errors)))


UnitPatterns: TypeAlias = str | Sequence[str | tuple[str, ...]]
"""Paths of modules; `*` matches one part of a path, and the modules of a tuple are gathered together."""

NameTable: TypeAlias = Mapping[str, tuple[DimName, ...] | None]
"""Dim names by pattern of a leaf's path; `*` matches anything, and the first matching pattern counts."""


@dataclass(frozen=True)
class Weight:
    """One name of a parameter in a unit, and the place of its value."""

    name: str  # in the module, such as `layers.3.attn.weight`
    leaf: str  # path of the leaf
    row: int | None  # of a stacked leaf, else None


@dataclass(frozen=True)
class ModuleUnit:
    """Modules that are gathered together, when the first of them is called."""

    members: tuple[str, ...]  # their paths; empty for the root, which has the parameters of no other unit
    weights: tuple[Weight, ...]
    stack: str | None  # path of the stack that the only member is a block of, else None


@dataclass(frozen=True)
class ModuleLeaf:
    """One leaf of the tree of parameters."""

    path: str
    shape: tuple[int, ...]  # the first dim of a stacked leaf counts the blocks
    dtype: torch.dtype
    sources: tuple[str, ...]  # names of its parameters: one for each row of a stack, else one
    stacked: bool
    trainable: bool  # whether the parameter requires gradients
    names: tuple[DimName, ...]

    def pattern(self) -> str | Rows:
        """Build the name of its parameters, with `{i}` for the row; `Rows` if rows aren't numbered 0, 1, 2."""
        if not self.stacked:
            return self.sources[0]
        split = [source.split(".") for source in self.sources]
        first = split[0]
        start = _shared(split)
        end = _shared([parts[::-1] for parts in split])
        if len(split) == 1:  # the row key is the part of the name that the leaf's path lacks
            lacks = (k for k in range(len(first)) if ".".join([*first[:k], *first[k + 1 :]]) == self.path)
            start = next(lacks, 0)
            end = len(first) - start - 1
        name = ".".join([*first[:start], "{i}", *first[len(first) - end :]])
        keys = [".".join(parts[start : len(parts) - end]) for parts in split]
        if keys == [str(row) for row in range(len(keys))]:
            return name
        return Rows(name, tuple(int(key) if key.isdecimal() and str(int(key)) == key else key for key in keys))


def _shared(names: Sequence[Sequence[str]]) -> int:
    """Count the leading parts that some names share."""
    alike = [len({*parts}) == 1 for parts in zip(*names, strict=False)]
    return alike.index(False) if False in alike else len(alike)


@dataclass(frozen=True)
class Anatomy:
    """Leaves and units of a module."""

    leaves: tuple[ModuleLeaf, ...]  # of the tree of parameters
    units: tuple[ModuleUnit, ...]  # the root first, the others in the order of their definition

    def __str__(self) -> str:
        units = [unit for unit in self.units if unit.weights]
        rows = [f"  {', '.join(unit.members) or 'root'}: {len(unit.weights)} weights" for unit in units]
        rows += [f"  {leaf.path}: {type_text(leaf.shape, leaf.dtype)} {leaf.names}" for leaf in self.leaves]
        return "\n".join([f"{len(units)} units, {len(self.leaves)} leaves", *rows])


def nested(values: Mapping[str, Any]) -> Tree:
    """Build a tree of dicts from values at dotted paths."""
    above = {path[:i] for path in values for i, letter in enumerate(path) if letter == "."}
    if clashes := [f"{path}: it has leaves below it" for path in values if path in above]:
        raise ConfigError(message("got two leaves at one path.", clashes, _RENAME))
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *way, last = path.split(".")
        node = tree
        for part in way:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


_RENAME = "Rename the module next to the blocks, or pass each block as a separate unit, without a star."


def plan_module(
    module: nn.Module,
    units: UnitPatterns,
    names: NameTable | None,
    problems: Problems,
    *,
    general: bool,
    ragged: bool,
) -> Anatomy:
    """Plan the leaves and the units of a module, or refuse it with all of its problems."""
    modules = dict(module.named_modules())
    before = len(problems.errors)
    patterns = _find_units(modules, [units] if isinstance(units, str) else list(units), problems)
    result = [ModuleUnit((), (), None), *patterns]
    is_sure = len(problems.errors) == before
    # Keep every name of a parameter: a tied parameter is used by several units and must become one leaf.
    uses = _uses(modules, result)
    homes: dict[int, list[tuple[int, str]]] = {}  # of each parameter, by identity: numbers of units, and names there
    for number, named in enumerate(uses):
        for name, parameter in named.items():
            homes.setdefault(id(parameter), []).append((number, name))
    # Parameters that only one block uses are stacked, by their first name; others are tied.
    alone = (every[0] for every in homes.values() if len({number for number, _ in every}) == 1)
    stacked = {name for number, name in alone if result[number].stack is not None}
    _check_blocks(result, uses, stacked, problems, ragged=ragged)
    # The first unit that uses a parameter places it; a tied one gets the path of its first name outside of a stack.
    sources: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {}
    places: dict[int, tuple[str, int | None]] = {}
    for unit, named in zip(result, uses, strict=True):
        for name, parameter in named.items():
            if id(parameter) in places:
                continue
            if name in stacked:
                path = joined(unit.stack, name[len(unit.members[0]) + 1 :])
            else:
                path = next((n for i, n in homes[id(parameter)] if result[i].stack is None), name)
            rows = sources.setdefault((path, name in stacked), [])
            places[id(parameter)] = path, len(rows) if name in stacked else None
            rows.append((name, parameter))
    twice = [f"{path}: {rows[0][0]}" for (path, s), rows in sources.items() if (path, not s) in sources]
    problems.add(ConfigError, "got two leaves at one path.", twice, _RENAME)
    leaves = tuple(_leaf(path, rows, stacked, names or {}) for (path, stacked), rows in sources.items())
    planned = [
        replace(unit, weights=tuple(Weight(name, *places[id(parameter)]) for name, parameter in named.items()))
        for unit, named in zip(result, uses, strict=True)
    ]
    # If a pattern matched no unit, leaves outside of units may get other paths: check only the leaves of units.
    of_units = {weight.leaf for unit in planned[1:] for weight in unit.weights}
    known = [leaf for leaf in leaves if is_sure or leaf.path in of_units]
    _check_names(known, names, None if general or not is_sure else leaves, problems)
    problems.refuse()
    return Anatomy(leaves, tuple(planned))


def _find_units(
    modules: Mapping[str, nn.Module], patterns: Sequence[str | tuple[str, ...]], problems: Problems
) -> list[ModuleUnit]:
    """Find the units of the patterns, in the module's order; a module belongs to the first pattern that matches."""
    odd = [repr(p) for p in patterns if not all(isinstance(x, str) for x in (p if isinstance(p, tuple) else (p,)))]
    problems.add(ConfigError, "needs patterns that are paths, or tuples of them.", odd, _STAR)
    patterns = [pattern for pattern in patterns if repr(pattern) not in odd]
    result: list[ModuleUnit] = []
    wrong: list[str] = []
    taken: set[str] = set()
    for pattern in patterns:
        together = (pattern,) if isinstance(pattern, str) else pattern
        fits = [name for one in together for name in modules if _fits(name, one) and name not in taken]
        good = [name for name in fits if _why_not(modules[name]) is None]
        taken |= {*good}
        missing = [one for one in together if not any(_fits(name, one) for name in good)]
        reasons = [f"{name} {_why_not(modules[name])}" for name in fits if name not in good and name in together]
        wrong += reasons or [f"{one!r} matches no module" for one in missing]
        if isinstance(pattern, str) and "*" in pattern:
            stack = ".".join(part for part in pattern.split(".") if part != "*")
            result += [ModuleUnit((name,), (), stack) for name in good]
        else:
            result.append(ModuleUnit(tuple(good), (), None))
    if wrong:
        children = [f"  {name} is {_kind(m)}" for name, m in modules.items() if name and name.count(".") < 2]
        problems.add(ConfigError, "finds no units for a pattern.", [*wrong, "modules are", *children], _STAR)
    members = [name for unit in result for name in unit.members]
    inside = [f"{b} is inside {a}" for a in members for b in members if b.startswith(f"{a}.")]
    problems.add(ConfigError, "got units inside units.", inside, "Keep the outer or the inner ones.")
    if inside:  # further problems would only follow from modules that are in two units
        problems.refuse()
    order = {name: i for i, name in enumerate(modules)}
    return sorted((unit for unit in result if unit.members), key=lambda unit: order[unit.members[0]])


_STAR = "Pass the path of the blocks' list and a star, such as units='layers.*'."


def _fits(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern, part by part."""
    parts = name.split(".")
    wanted = pattern.split(".")
    return name != "" and len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def _why_not(module: nn.Module) -> str | None:
    """Why a module cannot be a unit."""
    if type(module).forward is nn.Module.forward:
        return f"is a {type(module).__name__}, which is never called itself"
    return None if any(True for _ in module.parameters()) else "has no parameters"


def _kind(module: nn.Module) -> str:
    inside = list(module.children()) if type(module).forward is nn.Module.forward else []
    kinds = sorted({type(child).__name__ for child in inside})
    return type(module).__name__ + (f" of {len(inside)} {', '.join(kinds)}" if inside else "")


def _uses(modules: Mapping[str, nn.Module], groups: Sequence[ModuleUnit]) -> list[dict[str, nn.Parameter]]:
    """Collect the parameters of each unit by name, under every name that they have."""

    def named(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
        own = (child.named_parameters(path, recurse=False, remove_duplicate=False) for path, child in parts)
        return dict(chain.from_iterable(own))

    # The first group is the root, with the parameters of no other unit.
    inside = [[part for m in unit.members for part in modules[m].named_modules(prefix=m)] for unit in groups[1:]]
    taken = {id(child) for parts in inside for _, child in parts}
    left = ((path, child) for path, child in modules.items() if id(child) not in taken)
    return [named(left), *map(named, inside)]


def _check_blocks(
    units: Sequence[ModuleUnit],
    uses: Sequence[Mapping[str, nn.Parameter]],
    stacked: Collection[str],
    problems: Problems,
    *,
    ragged: bool,
) -> None:
    """Object to blocks of one stack that cannot be its rows."""
    firsts: dict[str, dict[str, tuple[str, str]]] = {}
    wrong: list[str] = []
    for unit, named in zip(units, uses, strict=True):
        if unit.stack is None:
            continue
        (member,) = unit.members
        kinds = {name[len(member) + 1 :]: _type(p, name in stacked) for name, p in named.items()}
        # In a ragged stack, whose blocks may lack parameters, the first block with a parameter sets its shape.
        wanted = firsts.setdefault(unit.stack, {})
        if not wanted or ragged:
            wanted |= {name: (member, kind) for name, kind in kinds.items() if name not in wanted}
        template = next((where for where, _ in wanted.values()), member)
        for name in sorted({*kinds, *wanted} if not ragged else kinds):
            where, a = wanted.get(name, (template, "not there"))
            b = kinds.get(name, "not there")
            wrong += [f"{name}: {a} in {where}, {b} in {member}"] if a != b else []
    mend = "Put patterns for the blocks that differ first: units=('layers.0', 'layers.*')."
    problems.add(TreeError, "can stack only blocks with equal parameters.", wrong, mend)


def _type(parameter: nn.Parameter, stacked: bool) -> str:
    frozen = "" if parameter.requires_grad or not parameter.is_floating_point() else ", frozen"
    return kind_text(parameter) + frozen + ("" if stacked else ", tied")


def _leaf(path: str, rows: Sequence[tuple[str, nn.Parameter]], stacked: bool, table: NameTable) -> ModuleLeaf:
    """Make a leaf, with the dim names of a table."""
    first = rows[0][1]
    shape = (len(rows), *first.shape) if stacked else tuple(first.shape)
    given = next((names for pattern, names in table.items() if fnmatchcase(path, pattern)), None)
    inner = (None,) * first.ndim if given is None else given
    names = (LAYERS, *inner) if stacked else tuple(inner)
    sources = tuple(name for name, _ in rows)
    return ModuleLeaf(path, shape, first.dtype, sources, stacked, first.requires_grad, names)


def _check_names(
    leaves: Sequence[ModuleLeaf], table: NameTable | None, every: Sequence[ModuleLeaf] | None, problems: Problems
) -> None:
    """Object to leaves without an entry in the table; and, given every leaf, to entries that match none."""
    if table is None:
        return
    missed = [leaf for leaf in leaves if not any(fnmatchcase(leaf.path, pattern) for pattern in table)]
    rows = [f"{leaf.path} is {type_text(leaf.shape, leaf.dtype)}" for leaf in missed]
    mend = "Add a pattern for each, such as '*.weight': (None, 'embed'); None leaves all dims without names."
    text = f"finds leaves without names; the table has {listed(map(repr, table), none='nothing')}."
    problems.add(LayoutError, text, rows, mend)
    if every is None:
        return
    idle = [repr(pattern) for pattern in table if not any(fnmatchcase(leaf.path, pattern) for leaf in every)]
    rows = [*idle, "leaves are", *(f"  {leaf.path}" for leaf in every)] if idle else []
    mend = "Remove them, or correct them; print(net) shows the leaves and their names."
    problems.add(LayoutError, "got names that match no leaf.", rows, mend)
    hidden = [*shadowed(table, [leaf.path for leaf in every])]
    mend = "Put narrow patterns first: the first pattern that matches a leaf counts."
    problems.add(LayoutError, "got names that earlier patterns hide.", hidden, mend)


def shadowed(patterns: Iterable[str], paths: Sequence[str]) -> Iterator[str]:
    """Yield patterns that earlier patterns hide on every path, one row each; a final "*" may match nothing."""
    earlier: list[str] = []
    for pattern in patterns:
        fits = [path for path in paths if fnmatchcase(path, pattern)]
        hides = [next((p for p in earlier if fnmatchcase(path, p)), None) for path in fits]
        if fits and None not in hides and pattern != "*":
            yield f"{pattern!r} is after {hides[0]!r}, which matches {fits[0]}"
        earlier.append(pattern)
