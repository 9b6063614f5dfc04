"""Layouts: the shardings of params, grads and opt_state that a mesh, rules and a strategy give to a model.

In: shapes with named dims. Out: a hashable, printable value, planned without memory or devices, and its exact bytes.
Data axes go where a rule puts them, else on the first free dim of a leaf (never on `layers`), minor to any other axis.
Law: the bytes that `memory()` says are the bytes that a state has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import torch

from fsharding import tree
from fsharding.errors import LayoutError, SpecError, message
from fsharding.mesh import AXES, DATA_AXES, Mesh, abstract, coordinate
from fsharding.precision import DTYPES, FP32, Precision
from fsharding.sharding import NamedSharding
from fsharding.spec import DEFAULT_RULES, AxisRules, P
from fsharding.strategy import OPTIM_GRADS_PARAMS, Strategy
from fsharding.tree import Tree

__all__ = ["LAYERS", "Layout", "LeafLayout", "Memory", "plan_layout"]

LAYERS = "layers"
"""The dim name of stacked units; data axes never cut it, since a unit is gathered whole."""


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        params: parameters.
        main: main parameters kept beside them; 0 when the parameters are their own main copy.
        grads: gradients as they are accumulated.
        opt_state: optimizer moments.
    """

    params: int
    main: int
    grads: int
    opt_state: int

    @property
    def state(self) -> int:
        """What is there between steps: all but the gradients."""
        return self.params + self.main + self.opt_state

    @property
    def total(self) -> int:
        """All four."""
        return self.state + self.grads

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:,}" for name, value in self._asdict().items())
        return f"{self.total:,} bytes a rank ({parts})"


@dataclass(frozen=True)
class LeafLayout:
    """One leaf of a layout.

    Attributes:
        path: its dotted path.
        shape: global shape.
        init: the dtype that the model's init gives it.
        names: dim names, or None.
        trainable: whether it has gradients and moments.
        params: where the parameter is.
        grads: where gradients are accumulated; unreduced over the axes that the strategy does not cut them over.
        main: where the optimizer's main parameter and moments are, and reduced gradients go.
    """

    path: str
    shape: tuple[int, ...]
    init: torch.dtype
    names: tuple[str | None, ...] | None
    trainable: bool
    params: NamedSharding
    grads: NamedSharding
    main: NamedSharding


@dataclass(frozen=True)
class Layout:
    """See the module. Everything about where a state lives; travels with the state.

    Attributes:
        mesh: with devices, or abstract.
        rules: axes by dim name.
        strategy: what is cut over the data axes.
        precision: dtypes at rest.
        leaves: one `LeafLayout` for each parameter.
        structure: of the parameter tree.
    """

    mesh: Mesh
    rules: AxisRules
    strategy: Strategy
    precision: Precision
    leaves: tuple[LeafLayout, ...]
    structure: optree.PyTreeSpec

    @property
    def params(self) -> Tree:
        """Tree of `NamedSharding`: where the parameters are."""
        return tree.unflatten(self.structure, [leaf.params for leaf in self.leaves])

    @property
    def grads(self) -> Tree:
        """Tree of `NamedSharding`: where gradients are accumulated; None for frozen leaves."""
        return tree.unflatten(self.structure, [leaf.grads if leaf.trainable else None for leaf in self.leaves])

    @property
    def main(self) -> Tree:
        """Tree of `NamedSharding`: where main parameters, moments and reduced gradients are; None for frozen leaves."""
        return tree.unflatten(self.structure, [leaf.main if leaf.trainable else None for leaf in self.leaves])

    @property
    def has_main(self) -> bool:
        """Whether main parameters are kept beside the params: because these are narrower in dtype, or cut further."""
        return any(leaf.trainable and self.main_apart(leaf) for leaf in self.leaves)

    def main_apart(self, leaf: LeafLayout) -> bool:
        """Whether the main copy of a leaf cannot be the parameter itself or a slice of it."""
        narrower = self.param_dtype(leaf) != self.precision.main_dtype(leaf.init)
        return narrower or not _covers(leaf.params, leaf.main)

    def param_dtype(self, leaf: LeafLayout) -> torch.dtype:
        """The dtype of a parameter at rest: of the main copy where it is that, else the compute dtype."""
        main, compute = self.precision.main_dtype(leaf.init), self.precision.compute_dtype(leaf.init)
        if not leaf.trainable:
            return main
        return main if leaf.params == leaf.main and self.strategy.params else compute

    def memory(self, opt: Any = None, coord: dict[str, int] | None = None) -> Memory:
        """Exact bytes of one rank.

        Args:
            opt: a `GradientTransformation`, whose state is counted; by default the two moments of Adam.
            coord: the rank's coordinate; by default this process's, and the first on an abstract mesh, which has most.
        """
        where = coordinate(self.mesh) if coord is None else coord
        trained = [leaf for leaf in self.leaves if leaf.trainable]

        def size(sharding: NamedSharding, leaf: LeafLayout, dtype: torch.dtype) -> int:
            return math.prod(sharding.local_shape(leaf.shape, where)) * dtype.itemsize

        params = sum(size(leaf.params, leaf, self.param_dtype(leaf)) for leaf in self.leaves)
        how = self.precision
        grads = sum(size(leaf.grads, leaf, how.grad_dtype(how.main_dtype(leaf.init))) for leaf in trained)
        main = sum(size(leaf.main, leaf, how.main_dtype(leaf.init)) for leaf in trained)
        if opt is None:
            moments = sum(2 * size(leaf.main, leaf, how.moment_dtype(how.main_dtype(leaf.init))) for leaf in trained)
        else:
            moments = sum(x.nbytes for x in tree.leaves(opt.init(self._meta_main(where))))
        return Memory(params, main if self.has_main else 0, grads, moments)

    def _meta_main(self, where: dict[str, int]) -> Tree:
        """Main parameters of one rank on the meta device."""
        leaves = [
            torch.empty(
                leaf.main.local_shape(leaf.shape, where), dtype=self.precision.main_dtype(leaf.init), device="meta"
            )
            if leaf.trainable
            else None
            for leaf in self.leaves
        ]
        return tree.unflatten(self.structure, leaves)

    def with_strategy(self, strategy: Strategy) -> Layout:
        """The layout of the same model on the same mesh under another strategy."""
        return self._replan(mesh=self.mesh, strategy=strategy, precision=self.precision)

    def with_precision(self, precision: Precision) -> Layout:
        """The same layout with other dtypes at rest."""
        return self._replan(mesh=self.mesh, strategy=self.strategy, precision=precision)

    def with_mesh(self, mesh: Mesh) -> Layout:
        """The layout of the same model on another mesh."""
        return self._replan(mesh=mesh, strategy=self.strategy, precision=self.precision)

    def _replan(self, *, mesh: Mesh, strategy: Strategy, precision: Precision) -> Layout:
        leaves = tuple(
            _plan_leaf(leaf.path, leaf.shape, leaf.init, leaf.names, leaf.trainable, mesh, self.rules, strategy)
            for leaf in self.leaves
        )
        return replace(self, mesh=mesh, strategy=strategy, precision=precision, leaves=leaves)

    def __str__(self) -> str:
        head = f"Layout of {len(self.leaves)} leaves on mesh {abstract(self.mesh)}, strategy {self.strategy}"
        rows = [
            f"  {leaf.path}: {_type(leaf.shape, self.param_dtype(leaf))} params {leaf.params}"
            + (f", grads {leaf.grads}, opt_state {leaf.main}" if leaf.trainable else ", frozen")
            for leaf in self.leaves
        ]
        return "\n".join([head, *rows])


def plan_layout(
    model: Any,
    mesh: Mesh,
    rules: AxisRules = DEFAULT_RULES,
    strategy: Strategy = OPTIM_GRADS_PARAMS,
    *,
    precision: Precision = FP32,
    names: Tree = None,
    frozen: str | Sequence[str] = (),
) -> Layout:
    """Plans where every leaf lives. Pure: allocates nothing, and runs on an `AbstractMesh` of any size.

    Args:
        model: a `Model` (its `init` and `names` are used), or a tree of anything with `shape` and `dtype`.
        mesh: with devices, or abstract.
        rules: axes by dim name.
        strategy: what is cut over the data axes.
        precision: dtypes at rest.
        names: tree of tuples of dim names; by default the model's. Leaves without names are cut along their first dim.
        frozen: dotted paths, or beginnings of them, of leaves without gradients and moments.

    Raises:
        SpecError: a dim name without a rule, an axis that would cut two dims of a leaf; all such leaves are listed.
        LayoutError: `names` does not fit a shape, a dtype that kernels lack, or a frozen path that no leaf has.
    """
    if hasattr(model, "init") and hasattr(model, "names"):
        shapes = model.init(torch.zeros(2, dtype=torch.int64))
        names = model.names if names is None else names
    else:
        shapes = model
    frozen = (frozen,) if isinstance(frozen, str) else frozen
    flat, structure = tree.flatten(shapes)
    paths = tree.paths(shapes)
    dims = [None] * len(flat) if names is None else tree.flatten_up_to(structure, names, "fs.plan_layout")
    named = [(p, tuple(x.shape), x.dtype, tuple(n) if n else None) for p, x, n in zip(paths, flat, dims, strict=True)]
    _check(named, mesh, rules, frozen)
    leaves = tuple(
        _plan_leaf(path, shape, dtype, dim_names, _trainable(path, dtype, frozen), mesh, rules, strategy)
        for path, shape, dtype, dim_names in named
    )
    return Layout(mesh, rules, strategy, precision, leaves, structure)


_Named = tuple[str, tuple[int, ...], torch.dtype, tuple[str | None, ...] | None]


def _check(leaves: Sequence[_Named], mesh: Mesh, rules: AxisRules, frozen: Sequence[str]) -> None:
    """Refuses what cannot be planned, with every offending leaf."""
    wrong = [
        f"{path} is {_type(shape, dtype)} but has names {names}"
        for path, shape, dtype, names in leaves
        if names is not None and len(names) != len(shape)
    ]
    wrong += [
        f"{path} is {_type(shape, dtype)}: kernels take {', '.join(map(_name, DTYPES))}, or whole numbers"
        for path, shape, dtype, _ in leaves
        if dtype not in DTYPES and (dtype.is_floating_point or dtype.is_complex)
    ]
    unused = [entry for entry in frozen if not any(_begins(leaf[0], entry) for leaf in leaves)]
    wrong += [
        f"frozen path {entry!r} is no leaf; leaves are {', '.join(leaf[0] for leaf in leaves)}" for entry in unused
    ]
    if wrong:
        raise LayoutError(message("fs.plan_layout", f"cannot plan {len(wrong)} leaves.", wrong))
    missing: list[str] = []
    twice: list[str] = []
    hints: dict[str, str] = {}
    for path, shape, dtype, names in leaves:
        for dim, name in enumerate(names or ()):
            if name is not None and name not in rules:
                missing.append(
                    f"{path} is {_type(shape, dtype)}, dim {dim} ({name!r}, size {shape[dim]}): no rule {name!r}."
                )
                hints.setdefault(name, rules.hint(name))
        spent: dict[str, list[str]] = {}
        for dim, name in enumerate(names or ()):
            for axis in _present(rules.get(name, ()) if name else (), mesh):
                spent.setdefault(axis, []).append(f"dim {dim} ({name!r}, size {shape[dim]})")
        twice += [
            f"{path} is {_type(shape, dtype)}: axis {axis!r} would cut {' and '.join(where)}."
            for axis, where in spent.items()
            if len(where) > 1
        ]
    if missing:
        text = f"has no rule for {len(missing)} dims on mesh {abstract(mesh)}."
        raise SpecError(message("fs.plan_layout", text, missing, "\n".join(hints.values())))
    if twice:
        text = f"cannot spend one axis on two dims of a leaf; {len(twice)} leaves on mesh {abstract(mesh)}."
        mend = "Give one of the dims another name, with a rule of its own."
        raise SpecError(message("fs.plan_layout", text, twice, mend))


def _type(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{_name(dtype)}{list(shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _begins(path: str, entry: str) -> bool:
    return path == entry or path.startswith(entry + ".")


def _trainable(path: str, dtype: torch.dtype, frozen: Sequence[str]) -> bool:
    return dtype.is_floating_point and not any(_begins(path, entry) for entry in frozen)


def _plan_leaf(
    path: str,
    shape: tuple[int, ...],
    init: torch.dtype,
    names: tuple[str | None, ...] | None,
    trainable: bool,
    mesh: Mesh,
    rules: AxisRules,
    strategy: Strategy,
) -> LeafLayout:
    by_rule = [_present(rules.get(name, ()) if name else (), mesh) for name in names or (None,) * len(shape)]
    fixed = [tuple(a for a in axes if a not in DATA_AXES) for axes in by_rule]
    data = [tuple(a for a in DATA_AXES if a in axes and a != "replica") for axes in by_rule]
    dim = next((d for d, axes in enumerate(data) if axes), None)
    if dim is None:
        stacked = names is not None and LAYERS in names
        free = [d for d in range(len(shape)) if not (stacked and names is not None and names[d] == LAYERS)]
        dim = next((d for d in free if not fixed[d]), free[-1] if free else None)
        taken = tuple(a for a in DATA_AXES if a != "replica")
    else:
        taken = data[dim]

    def sharding(kind: str, *, unreduced: bool = False) -> NamedSharding:
        cut = tuple(a for a in (*taken, "replica") if dim is not None and strategy.cut(kind, a))
        spec = P(*((*axes, *cut) if d == dim else axes for d, axes in enumerate(fixed)))
        left = (
            tuple(a for a in AXES if a in DATA_AXES and a not in cut and _leaves_open(a, strategy)) if unreduced else ()
        )
        return NamedSharding(mesh, spec, left).simplified()

    main = sharding("opt_state")
    params = sharding("params") if trainable else replace(sharding("params"))
    return LeafLayout(path, shape, init, names, trainable, params, sharding("grads", unreduced=True), main)


def _present(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The axes that the mesh has."""
    shape = abstract(mesh)
    return tuple(axis for axis in axes if shape.axis_size(axis) > 1)


def _leaves_open(axis: str, strategy: Strategy) -> bool:
    """Whether accumulated gradients stay unreduced over an axis: reduced once a step rather than once a microbatch."""
    return axis == "replica" or not strategy.grads


def _covers(params: NamedSharding, main: NamedSharding) -> bool:
    """Whether the main shard of every rank is inside its shard of the params."""
    return all(main.axes(dim)[: len(params.axes(dim))] == params.axes(dim) for dim in range(len(params.spec)))
