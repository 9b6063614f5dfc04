"""Which mesh axes cut which tensor dims, in pure Python: `P` for one leaf, `AxisRules` for a model's named dims.

Guarantee: no axis stands twice in a spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Never, TypeAlias, cast

from fsharding.base.errors import SpecError, did_you_mean, message, report
from fsharding.base.public import Immutable, public, refuse
from fsharding.mesh.abstract_mesh import AXES, unknown_axis

__all__ = ["DEFAULT_RULES", "AxisRules", "DimName", "Entry", "Fused", "P", "PartitionSpec", "rule_name"]

Entry: TypeAlias = str | tuple[str, ...] | None


def _axes_of(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


_ENTRY = "Give an axis such as 'dp', a tuple of axes, or None."


def _is_entry(entry: object) -> bool:
    if isinstance(entry, list | tuple):
        return all(isinstance(axis, str) for axis in cast("list[object]", entry))
    return entry is None or isinstance(entry, str)


class PartitionSpec(tuple[Entry, ...]):
    """One entry for each tensor dim: None, an axis, or a tuple of axes, major first; missing entries are None.

    Raises:
        SpecError: an axis that does not exist, or one that stands twice, or an entry that is no axis at all.

    Example:
        >>> fs.P("tp", ("dp", "replica"))
        P('tp', ('dp', 'replica'))
    """

    __slots__ = ()

    @public
    def __new__(cls, *entries: Entry) -> PartitionSpec:
        """Makes a spec; `P("dp", None) == P("dp")` and `P(("dp",)) == P("dp")`."""
        if odd := [entry for entry in entries if not _is_entry(entry)]:
            raise SpecError(message(f"got {odd[0]!r} for a dim.", mend=_ENTRY))
        cuts = [_axes_of(entry) for entry in entries]
        flat = [axis for cut in cuts for axis in cut]
        for axis in flat:
            if axis not in AXES:
                raise SpecError(message(unknown_axis(axis)))
        twice = sorted({axis for axis in flat if flat.count(axis) > 1})
        if twice:
            text = ", ".join(repr(entry) for entry in entries)
            raise SpecError(report(f"P({text}) uses {', '.join(twice)} twice.", mend="An axis cuts one dim at most."))
        while cuts and not cuts[-1]:
            cuts.pop()
        return super().__new__(cls, (None if not cut else cut[0] if len(cut) == 1 else cut for cut in cuts))

    def axes(self, dim: int) -> tuple[str, ...]:
        """The axes that cut a dim, major first."""
        return _axes_of(self[dim]) if dim < len(self) else ()

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis that cuts some dim."""
        return tuple(axis for dim in range(len(self)) for axis in self.axes(dim))

    def replace(self, dim: int, axes: Sequence[str]) -> PartitionSpec:
        """The same spec with other axes on one dim."""
        cuts: list[Entry] = [self.axes(d) for d in range(max(len(self), dim + 1))]
        cuts[dim] = tuple(axes)
        return PartitionSpec(*cuts)

    def drop(self, dim: int = 0) -> PartitionSpec:
        """The spec of one index along a dim: that dim's entry is gone."""
        return PartitionSpec(*(entry for d, entry in enumerate(self) if d != dim))

    def __repr__(self) -> str:
        return f"P({', '.join(repr(entry) for entry in self)})"

    def __reduce__(self) -> tuple[type[PartitionSpec], tuple[Entry, ...]]:
        return PartitionSpec, tuple(self)


P = PartitionSpec


@dataclass(frozen=True)
class Fused:
    """The name of a dim that is made of parts, each of which an axis cuts by itself: q, k and v, or gate and up.

    Attributes:
        name: the dim name, for the rules.
        sizes: of the parts, in order.

    Example:
        >>> fs.Fused("heads", (64, 16, 16)).sizes
        (64, 16, 16)
    """

    name: str
    sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Fused({self.name!r}, {self.sizes})"


DimName: TypeAlias = str | Fused | None  # the name of a dim in a model; None for one that no rule cuts


def rule_name(name: DimName) -> str | None:
    """Under which name the rules speak of a dim."""
    return name.name if isinstance(name, Fused) else name


class AxisRules(Immutable, Mapping[str, tuple[str, ...]], instead="rules = rules.replace({name}=...)"):
    """Which axes cut each named dim of a model: `AxisRules(layers="pp", embed=("dp", "ep", "cp"), heads="tp")`.

    A name that should never be cut gets None. Data axes (`dp`, `ep`, `cp`) say where a leaf is cut when the strategy
    cuts it at all; a leaf with no such dim is cut along its first free one. A pure, hashable value.

    Raises:
        SpecError: an axis that does not exist.
        ArgumentError: rules without the names of their dims, such as a dict.

    Example:
        >>> rules = fs.AxisRules(mlp=("tp",), embed=None)
        >>> rules["mlp"]
        ('tp',)
    """

    @public
    def __init__(self, *unnamed: Never, **dims: Entry) -> None:
        """Makes the rules from axis or axes by dim name; `unnamed` is refused."""
        if unnamed:
            mend = 'Write fs.AxisRules(**rules) of a dict, or fs.AxisRules(mlp="tp", embed=None).'
            raise refuse("axes by the names of dims", unnamed[0], mend)
        for name, entry in dims.items():
            if not _is_entry(entry):
                raise SpecError(report(f"fs.AxisRules got {name}={entry!r}.", mend=_ENTRY))
        self._dims = {name: _axes_of(entry) for name, entry in dims.items()}
        for name, axes in self._dims.items():
            for axis in axes:
                if axis not in AXES:
                    raise SpecError(report(f"AxisRules({name}={dims[name]!r}) {unknown_axis(axis)}"))

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._dims[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._dims.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisRules) and self._dims == other._dims

    def __repr__(self) -> str:
        return f"AxisRules({', '.join(f'{name}={axes!r}' for name, axes in self._dims.items())})"

    def replace(self, **dims: Entry) -> AxisRules:
        """The same rules with some names changed or added."""
        return AxisRules(**{**self._dims, **dims})

    def hint(self, name: str) -> str:
        """The edit that mends an unknown dim name."""
        if name in AXES:
            return f"{name!r} is an axis of the mesh. Name the dim, such as 'mlp', with the rule mlp={name!r}."
        return f"Add {name}=None to the AxisRules, or the axes that cut it.{did_you_mean(name, self._dims)}"


DEFAULT_RULES = AxisRules(
    layers="pp", embed=("dp", "ep", "cp"), heads="tp", kv_heads="tp", head_dim=None, mlp="tp", vocab="tp", expert="ep"
)
"""Tensor parallelism and the data axes on different dims of every leaf."""
