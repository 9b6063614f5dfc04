"""Which mesh axes shard which dims: `P` for one leaf, `AxisRules` for the named dims of a model.

Guarantee: a spec contains no axis twice.
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


_ENTRY = "Pass an axis such as 'dp', a tuple of axes, or None."


def _is_entry(entry: object) -> bool:
    if isinstance(entry, list | tuple):
        return all(isinstance(axis, str) for axis in cast("list[object]", entry))
    return entry is None or isinstance(entry, str)


class PartitionSpec(tuple[Entry, ...]):
    """The mesh axes that shard each dim of a tensor. `fs.P` is short for it.

    `("dp",)` equals `"dp"`, as in JAX. Unlike there, trailing None entries are dropped.

    Args:
        *entries: For each dim None, an axis, or a tuple of axes, major first; missing ones are None.

    Raises:
        SpecError: An entry that isn't an axis of `fs.make_mesh`, or an axis that occurs twice.

    Example:
        >>> fs.P("tp", ("dp", "replica"))
        P('tp', ('dp', 'replica'))
    """

    __slots__ = ()

    @public
    def __new__(cls, *entries: Entry) -> PartitionSpec:
        """Make a spec; `P("dp", None) == P("dp")` and `P(("dp",)) == P("dp")`."""
        if odd := [entry for entry in entries if not _is_entry(entry)]:
            raise SpecError(message(f"got {odd[0]!r} for a dim.", mend=_ENTRY))
        by_dim = [_axes_of(entry) for entry in entries]
        flat = [axis for axes in by_dim for axis in axes]
        for axis in flat:
            if axis not in AXES:
                raise SpecError(message(unknown_axis(axis)))
        twice = sorted({axis for axis in flat if flat.count(axis) > 1})
        if twice:
            text = ", ".join(repr(entry) for entry in entries)
            raise SpecError(report(f"P({text}) uses {', '.join(twice)} twice.", mend="An axis shards at most one dim."))
        while by_dim and not by_dim[-1]:
            by_dim.pop()
        return super().__new__(cls, (None if not axes else axes[0] if len(axes) == 1 else axes for axes in by_dim))

    def axes(self, dim: int) -> tuple[str, ...]:
        """Return the axes that shard a dim, major first."""
        return _axes_of(self[dim]) if dim < len(self) else ()

    @property
    def all_axes(self) -> tuple[str, ...]:
        """All axes of the spec, dim by dim."""
        return tuple(axis for dim in range(len(self)) for axis in self.axes(dim))

    def replace(self, dim: int, axes: Sequence[str]) -> PartitionSpec:
        """Return this spec with different axes on one dim."""
        entries: list[Entry] = [self.axes(d) for d in range(max(len(self), dim + 1))]
        entries[dim] = tuple(axes)
        return PartitionSpec(*entries)

    def drop(self, dim: int = 0) -> PartitionSpec:
        """Return this spec without the entry of a dim, for one index along it."""
        return PartitionSpec(*(entry for d, entry in enumerate(self) if d != dim))

    def __repr__(self) -> str:
        return f"P({', '.join(repr(entry) for entry in self)})"

    def __reduce__(self) -> tuple[type[PartitionSpec], tuple[Entry, ...]]:
        return PartitionSpec, tuple(self)


P = PartitionSpec


@dataclass(frozen=True)
class Fused:
    """The name of a dim that concatenates parts, each of which is sharded separately: q, k and v, or gate and up.

    Attributes:
        name: Dim name, looked up in the rules.
        sizes: Sizes of the parts, in order.

    Example:
        >>> fs.Fused("heads", (64, 16, 16)).sizes
        (64, 16, 16)
    """

    name: str
    sizes: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Fused({self.name!r}, {self.sizes})"


DimName: TypeAlias = str | Fused | None  # the name of a dim in a model; None for one that no rule shards


def rule_name(name: DimName) -> str | None:
    """Return the name under which rules list a dim."""
    return name.name if isinstance(name, Fused) else name


class AxisRules(Immutable, Mapping[str, tuple[str, ...]], instead="rules = rules.replace({name}=...)"):
    """The mesh axes that shard each named dim, such as `AxisRules(embed=("dp", "ep", "cp"), heads="tp")`.

    The strategy decides whether a leaf is sharded over data axes (`dp`, `ep`, `cp`), the rules along which dim: a leaf
    without such a dim is sharded along its first dim that no other axis shards. Hashable and immutable.

    Args:
        **dims: By dim name an axis, a tuple of axes, or None for a dim that is never sharded.

    Raises:
        SpecError: An unknown axis.
        ArgumentError: Positional arguments, such as a dict.

    Example:
        >>> rules = fs.AxisRules(mlp=("tp",), embed=None)
        >>> rules["mlp"]
        ('tp',)
    """

    @public
    def __init__(self, *unnamed: Never, **dims: Entry) -> None:
        """Make rules from keywords; positional arguments raise an error."""
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
        """Return these rules with some names changed or added."""
        return AxisRules(**{**self._dims, **dims})

    def hint(self, name: str) -> str:
        """Return the edit that fixes an unknown dim name."""
        if name in AXES:
            return f"{name!r} is an axis of the mesh. Name the dim, such as 'mlp', with the rule mlp={name!r}."
        return f"Add {name}=None to the AxisRules, or the axes that shard it.{did_you_mean(name, self._dims)}"


DEFAULT_RULES = AxisRules(
    layers="pp", embed=("dp", "ep", "cp"), heads="tp", kv_heads="tp", head_dim=None, mlp="tp", vocab="tp", expert="ep"
)
"""Default rules: tensor parallelism and data axes shard different dims of each leaf."""
