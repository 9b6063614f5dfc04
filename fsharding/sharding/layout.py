"""Layouts: the shardings of params, grads and opt_state that follow from a model, a mesh, rules and a strategy.

Guarantee: `memory()` reports exactly the bytes that a state has.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import _compat, tree
from fsharding.base.errors import ArgumentError, ConfigError, LayoutError, TreeError, message, report
from fsharding.base.public import check_optimizer, kind_of, public, refuse, refuse_module
from fsharding.base.registry import names_of
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.formats.precision import FP32, PatternLeaf, Precision, check_precision
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.assigned import Stages, normal
from fsharding.sharding.block_scales import has_codes, plan_scales
from fsharding.sharding.entries import Entry, Moment, moments
from fsharding.sharding.leaf_names import MEND, joined, objections_to_names
from fsharding.sharding.leaf_plan import (
    LAYERS,
    LeafLayout,
    NamedLeaf,
    check_leaves,
    check_stages,
    is_trainable,
    objections_to_cuts,
    plan_leaf,
    type_text,
)
from fsharding.sharding.memory_kinds import HERE, check_choices
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, Fused, P
from fsharding.sharding.strategy import OPTIM_GRADS_PARAMS, Strategy, strategy_of
from fsharding.sharding.strategy_names import StrategyName

__all__ = ["LAYERS", "Layout", "LeafLayout", "Memory", "check_fit", "on_mesh", "plan_layout"]


class Memory(NamedTuple):
    """Bytes that one rank needs for a state and its gradients.

    Attributes:
        params: Parameters.
        main: Separate main parameters; 0 if the parameters are their own.
        grads: Accumulated gradients.
        opt_state: Optimizer moments.
        buffers: Buffers that the forward of a functionalized module writes; replicated.
        away: Bytes of all these outside of device memory, by memory kind; also attributes, such as `memory.host`. Disk
            files are twice as large, since a step writes the new state before it frees the old one.

    Example:
        >>> mesh = fs.AbstractMesh(("dp",), (4,))
        >>> layout = fs.plan_layout({"w": fs.random.normal(fs.random.key(0), (8, 4))}, mesh, strategy=fs.zero(3))
        >>> layout.memory(fs.adamw(1e-3)).params
        32
    """

    params: int
    main: int
    grads: int
    opt_state: int
    buffers: int = 0
    away: Mapping[str, int] = {}

    def __getattr__(self, name: str) -> int:
        if name not in names_of("tier"):
            raise AttributeError(f"Memory has no attribute {name!r}")
        return self.away.get(name, 0)

    @property
    def device(self) -> int:
        """Bytes in device memory."""
        return self.total - sum(self.away.values())

    @property
    def state(self) -> int:
        """Bytes between steps: all except gradients."""
        return self.params + self.main + self.opt_state + self.buffers

    @property
    def total(self) -> int:
        """Bytes in all memory kinds."""
        return self.state + self.grads

    def __str__(self) -> str:
        kinds = {name: value for name, value in self._asdict().items() if name != "away"}
        parts = ", ".join(f"{name} {value:,}" for name, value in {**kinds, **self.away}.items())
        return f"{self.total:,} bytes a rank ({parts})"


@dataclass(frozen=True, repr=False)
class Layout:
    """The placement of every tensor of a training state: parameters, main parameters, gradients and moments.

    `fs.plan_layout` makes one; a state keeps its own as `state.layout`. Immutable and hashable.

    Attributes:
        mesh: Mesh, with devices or abstract.
        rules: Mesh axes that shard each named dim.
        strategy: What is sharded over the data axes.
        precision: Dtypes and formats of the state, compute and communication.
        leaves: One `LeafLayout` per parameter, in tree order.
        structure: Structure of the parameter tree.
        stages: Explicit ownership along `pp`, by path.
        align: Whether shards over data axes end at block boundaries of `precision.gather`.
        config: Configuration of the model, such as a `DecoderConfig`, or None. Not compared.
        buffers: Bytes of the buffers that the model's forward writes. Not compared.

    Example:
        >>> params = {"w": fs.random.normal(fs.random.key(0), (8, 4))}
        >>> mesh = fs.AbstractMesh(("dp", "tp"), (2, 2))
        >>> layout = fs.plan_layout(params, mesh, strategy=fs.zero(3), names={"w": ("mlp", "embed")})
        >>> layout.params["w"].spec
        P('tp', 'dp')
    """

    mesh: Mesh
    rules: AxisRules
    strategy: Strategy
    precision: Precision
    leaves: tuple[LeafLayout, ...]
    structure: optree.PyTreeSpec
    stages: Stages = ()
    align: bool = False
    config: Any = field(default=None, compare=False)
    buffers: int = field(default=0, compare=False)

    @property
    def params(self) -> Tree:
        """Shardings of the parameters, as a tree."""
        return tree.unflatten(self.structure, [leaf.params for leaf in self.leaves])

    @property
    def grads(self) -> Tree:
        """Shardings of accumulated gradients, as a tree; None for frozen leaves."""
        return tree.unflatten(self.structure, [leaf.grads if leaf.trainable else None for leaf in self.leaves])

    @property
    def main(self) -> Tree:
        """Shardings of main parameters, as a tree; None for frozen leaves. Moments have the same shards."""
        return tree.unflatten(self.structure, [leaf.main if leaf.trainable else None for leaf in self.leaves])

    @property
    def reduced(self) -> Tree:
        """Shardings of reduced gradients, as a tree: those of `main`, in the memory of gradients."""
        return tree.unflatten(self.structure, [leaf.reduced if leaf.trainable else None for leaf in self.leaves])

    @property
    def stacked(self) -> dict[str, bool]:
        """Whether dim 0 of a leaf counts layers, by path, for leaves with named dims."""
        return {leaf.path: leaf.is_stacked for leaf in self.leaves if leaf.names}

    @property
    def updated_on_host(self) -> frozenset[str]:
        """Paths of the leaves that are updated on the host."""
        return frozenset(leaf.path for leaf in self.leaves if leaf.trainable and leaf.compute != HERE)

    @property
    def has_main(self) -> bool:
        """Whether a state has separate main parameters, because params are of lower precision or sharded less."""
        return any(leaf.trainable and self.main_apart(leaf) for leaf in self.leaves)

    def main_apart(self, leaf: LeafLayout) -> bool:
        """Return whether a leaf's main parameter cannot be the parameter itself or a slice of it."""
        narrower = self.param_dtype(leaf) != self.precision.main_dtype(leaf.init)
        elsewhere = leaf.params.memory != leaf.main.memory
        return narrower or elsewhere or self.rounds(leaf) is not None or not _covers(leaf.params, leaf.main)

    def param_dtype(self, leaf: LeafLayout) -> torch.dtype:
        """Return the dtype of a parameter in a state: main if it is its own main copy, else the compute dtype."""
        if not leaf.trainable or self._is_main(leaf):
            return self.precision.main_dtype(leaf.init)
        return self.precision.compute_dtype(leaf.init)

    def _is_main(self, leaf: LeafLayout) -> bool:
        """Return whether a parameter is its own main copy; compute then casts it when it is gathered."""
        return leaf.params == leaf.main and self.strategy.params

    def format_of(self, leaf: LeafLayout) -> Blocks | None:
        """Return the low-precision format in which the loss function sees a leaf, or None."""
        return self.precision.format_of(leaf.path, len(leaf.shape) - leaf.is_stacked) if leaf.trainable else None

    def rounds(self, leaf: LeafLayout) -> Blocks | None:
        """Return the format to which a state's copy of a leaf is rounded; None for a main parameter."""
        format = self.format_of(leaf)
        return None if format is None or self._is_main(leaf) else format

    @public
    def in_flight(self, precision: Precision) -> Precision:
        """Return the precision of a call that gathers parameters of this layout, so that nothing is rounded twice."""
        # Main parameters are rounded when they are gathered, separate copies in the state, frozen leaves never.
        if precision != self.precision:
            _check_patterns(precision, self.leaves)
        if precision.gather is None:
            return precision
        rounded = any(self.rounds(leaf) is not None for leaf in self.leaves)
        if rounded and precision.columnwise:
            rule = f"cannot use the copies of weights that {self.strategy} keeps: they are rounded in one orientation."
            mend = "Use fs.zero(3) or fs.hybrid(), which round main parameters; or leave columnwise out."
            raise ConfigError(report(f"Precision.columnwise {rule}", mend=mend))
        if rounded and not precision.computes_quantized:
            return precision.of_rounded()
        frozen = tuple(leaf.path for leaf in self.leaves if not leaf.trainable)
        return replace(precision, keep=(*precision.keep, *frozen), rounded=rounded) if frozen or rounded else precision

    def entries(self, opt: Any = None) -> tuple[Entry, ...]:
        """List the leaves of a state with shapes, dtypes and shardings, without allocating memory.

        Args:
            opt: Optimizer, a `GradientTransformation`, whose `init` runs on the meta device; default: list parameters
                only.

        Returns:
            One `Entry` per leaf: `params.*`, `main.*` if the state has them, `opt_state.*`.

        Example:
            >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3))
            >>> [(entry.path, entry.shape, str(entry.sharding)) for entry in layout.entries(fs.sgd(0.1, momentum=0.9))]
            [('params.w', (4,), "P('dp')"), ('opt_state.count', (), 'None'), ('opt_state.mu.w', (4,), "P('dp')")]
        """
        result: list[Entry] = []
        for leaf in self.leaves:
            dtype = self.param_dtype(leaf)
            result.append(Entry(leaf.path_in("params"), leaf.shape, dtype, leaf.params, leaf))
            if leaf.trainable and self.has_main:
                dtype = self.precision.main_dtype(leaf.init)
                result.append(Entry(leaf.path_in("main"), leaf.shape, dtype, leaf.main, leaf))
        if opt is None:
            return tuple(result)
        check_optimizer(opt)
        kept = self.precision.moments
        state = opt.start(self.meta_main(), moments=kept, shardings=self.main, stacked=self.stacked)
        known = self.moments(state)
        for path, x in tree.named_leaves(state).items():
            if isinstance(x, Tensor):
                other = Entry(joined("opt_state", path), tuple(x.shape), x.dtype, None, None)
                # A tensor that `init` creates on a real device, such as a count, is replicated.
                result.append(known.get(path, other) if x.is_meta else other)
        return tuple(result)

    def moments(self, opt_state: Tree) -> dict[str, Moment]:
        """Return the moments in a state of DTensors or full meta tensors by path, without leaves such as counts."""
        return moments(self.leaves, self.structure, opt_state)

    @public
    def memory(self, opt: Any = None, coord: dict[str, int] | None = None) -> Memory:
        """Compute the exact bytes of one rank, except for buffers that only `init_state(buffers=)` is given.

        Args:
            opt: Optimizer whose state is counted; default: the two moments of Adam.
            coord: Coordinate of the rank by axis; default: this process's. On an abstract mesh that is coordinate 0,
                whose shards are the largest.

        Returns:
            A `Memory`, in bytes.
        """
        kept = self.bytes_by_kind(opt, coord)
        parts = {role: counts.total() for role, counts in kept.items()}
        sizes = {tier: sum(counts[tier] for counts in kept.values()) for tier in names_of("tier")}
        away = {tier: size for tier, size in sizes.items() if size and tier != HERE}
        return Memory(**parts, buffers=self.buffers, away=away)

    def bytes_by_kind(
        self, opt: Any = None, coord: dict[str, int] | None = None, *, compute: str | None = None
    ) -> dict[str, Counter[str]]:
        """Count bytes by field of `Memory` and memory kind; `compute` selects the leaves that are updated there."""
        kept: dict[str, Counter[str]] = {name: Counter() for name in ("params", "grads", "main", "opt_state")}
        for entry in self.entries(opt):
            if compute is None or (entry.of is not None and entry.of.compute == compute):
                kept[entry.field][HERE if entry.sharding is None else entry.sharding.memory] += entry.local_bytes(coord)
        for leaf in self.leaves:
            if not leaf.trainable or compute not in (None, leaf.compute):
                continue
            dtype = self.precision.grad_dtype(self.precision.main_dtype(leaf.init))
            kept["grads"][leaf.grads.memory] += math.prod(leaf.grads.local_shape(leaf.shape, coord)) * dtype.itemsize
            if opt is None:
                kept["opt_state"][leaf.moments.memory] += 2 * self._moment_bytes(leaf, coord)
        return kept

    def _moment_bytes(self, leaf: LeafLayout, coord: dict[str, int] | None) -> int:
        """Count the bytes of one rank's shard of a moment in the precision of the layout."""
        elements = math.prod(leaf.main.local_shape(leaf.shape, coord))
        format = self.precision.moment_format
        if format is None or not has_codes(leaf.shape):
            return elements * self.precision.moment_dtype(self.precision.main_dtype(leaf.init)).itemsize
        scales = plan_scales(leaf.main, leaf.shape, format)
        return elements + math.prod(scales.sharding.local_shape(scales.shape, coord)) * format.scale_dtype.itemsize

    def meta_main(self) -> Tree:
        """Make unsharded main parameters on the meta device; None for frozen leaves."""
        kinds = [(x.shape, self.precision.main_dtype(x.init)) if x.trainable else None for x in self.leaves]
        leaves = [None if kind is None else torch.empty(kind[0], dtype=kind[1], device="meta") for kind in kinds]
        return tree.unflatten(self.structure, leaves)

    def with_strategy(self, strategy: Strategy | StrategyName) -> Layout:
        """Plan the same model on the same mesh under a different strategy, or one of that name, such as "zero3"."""
        return self._replan(strategy=_strategy(strategy))

    @public
    def with_precision(self, precision: Precision) -> Layout:
        """Return this layout with a different precision; shardings change only under `align`."""
        _check_patterns(precision, self.leaves)
        return self._replan(precision=precision) if self.align else replace(self, precision=precision)

    @public
    def with_mesh(
        self, mesh: Mesh, stages: Mapping[str, Any] | None = None, *, tp: Literal["shard", "replicate"] = "shard"
    ) -> Layout:
        """Plan the same model on a different mesh.

        Args:
            mesh: New mesh, with devices or abstract.
            stages: Ownership along `pp`, as in `plan_layout`; default: this layout's.
            tp: Whether a `tp` axis may be idle, as in `plan_layout`.
        """
        new = self._replan(mesh=mesh, stages=self.stages if stages is None else normal(stages))
        if abstract(mesh) != abstract(self.mesh):
            _check_tp(new, tp)
        return new

    def with_frozen(self, paths: Collection[str]) -> Layout:
        """Return this layout with exactly the leaves at `paths` frozen, and those that aren't floating point."""
        leaves = [replace(x, trainable=x.init.is_floating_point and x.path not in paths) for x in self.leaves]
        return self if tuple(leaves) == self.leaves else replace(self, leaves=tuple(leaves))._replan()

    def _replan(self, **changes: Any) -> Layout:
        return _planned(replace(self, **changes), self.leaves)

    def blocks_of(self, leaf: NamedLeaf) -> Blocks | None:
        """Return the format whose blocks the shards of a leaf must not split, or None."""
        wanted = self.align and leaf.init.is_floating_point
        return self.precision.format_of(leaf.path, len(leaf.shape) - leaf.is_stacked) if wanted else None

    def check_blocks(self) -> None:
        """Under `align`, raise a `LayoutError` that lists the dims whose shards split a block."""
        if not self.align:
            return
        formats = ((leaf, self.format_of(leaf)) for leaf in self.leaves)
        rows = [row for leaf, blocks in formats if blocks is not None for row in objections_to_cuts(leaf, blocks)]
        if rows:
            mend = (
                "Make the sizes multiples of shards and blocks, keep such leaves in the dtype of compute, as in"
                ' fs.Precision(keep=(..., "wq")), use smaller blocks, or leave align out: ranks that share a block then'
                " all-reduce its largest magnitude."
            )
            rule = f"cannot shard these dims at block boundaries of {self.precision.gather}."
            raise LayoutError(message(rule, rows, mend))

    def __repr__(self) -> str:
        """Return one line; `print(layout)` adds one per leaf."""
        return f"Layout({len(self.leaves)} leaves, {self.strategy}, mesh {abstract(self.mesh)})"

    def __str__(self) -> str:
        head = f"Layout of {len(self.leaves)} leaves on mesh {abstract(self.mesh)}, strategy {self.strategy}"
        if self.precision.sums_natively(getattr(self.mesh, "device_type", None)):
            head += ", native sums"
        rows = [
            f"  {leaf.path}: {type_text(leaf.shape, self.param_dtype(leaf))} params {leaf.params}"
            + (f", grads {leaf.grads}, opt_state {leaf.main}" if leaf.trainable else ", frozen")
            for leaf in self.leaves
        ]
        return "\n".join([head, *rows])


def on_mesh(layout: Layout, mesh: Mesh) -> Layout:
    """Return a layout on a mesh of the same shape, with or without devices, without planning it again."""
    kinds = ("params", "grads", "main")
    moved = (replace(x, **{kind: replace(getattr(x, kind), mesh=mesh) for kind in kinds}) for x in layout.leaves)
    return replace(layout, mesh=mesh, leaves=tuple(moved))


@public
def plan_layout(
    model: Any,
    mesh: Mesh,
    rules: AxisRules = DEFAULT_RULES,
    strategy: Strategy | StrategyName = OPTIM_GRADS_PARAMS,
    *,
    precision: Precision = FP32,
    names: Tree = None,
    frozen: str | Sequence[str] = (),
    stages: Mapping[str, Any] | None = None,
    align: bool = False,
    tp: Literal["shard", "replicate"] = "shard",
) -> Layout:
    """Plan the shardings of a model's state. Allocates nothing and runs on an `AbstractMesh` of any size.

    Args:
        model: Model, whose `init` and `names` are used, or a tree of anything with `shape` and `dtype`.
        mesh: Mesh, with devices or abstract.
        rules: Mesh axes that shard each named dim.
        strategy: What is sharded over the data axes: a strategy, or a name such as "zero3".
        precision: Dtypes and formats of the state, compute and communication.
        names: Tree of tuples of dim names; default: the model's. Leaves without names are sharded along dim 0. A
            `Fused` name shards each part of the dim separately.
        frozen: Leaves to freeze, as dotted paths or path prefixes, in addition to those that the model freezes.
        stages: Ownership along `pp` by path or path prefix: the layers of each coordinate for a stack, as in
            `{"blocks": [[0, 2], [1, 3]]}`, or the coordinates that own the leaf, as in `{"embed": 0}`. Other leaves
            follow the rules.
        align: Whether shards over data axes must end at block boundaries of `precision.gather`, even
            along a dim that the rules don't name. Otherwise ranks that share a block run a small collective per unit.
        tp: "shard" refuses a `tp` axis that shards no leaf, and warns if it shards less than half of the bytes;
            "replicate" allows both.

    Returns:
        A `Layout`.

    Raises:
        ArgumentError: An argument of a wrong type, such as an `nn.Module` or an init function; swapped arguments.
        SpecError: A dim name without a rule, or an axis that would shard two dims of a leaf; all are listed.
        ConfigError: A mesh that the model cannot be sharded on; a `tp` axis that shards no leaf; an unknown strategy.
        LayoutError: `names` or `stages` that don't fit a leaf; an unsupported dtype; a path or pattern that matches no
            leaf; duplicate or invalid paths, such as `__metadata__`; with `align`, a shard that splits a block.
        TreeError: `names` with a different structure than the model.

    Example:
        >>> params = {"w": fs.random.normal(fs.random.key(0), (8, 4))}
        >>> mesh = fs.AbstractMesh(("dp", "tp"), (2, 2))
        >>> layout = fs.plan_layout(params, mesh, strategy=fs.zero(3), names={"w": ("mlp", "embed")})
        >>> layout.params["w"].spec
        P('tp', 'dp')
    """
    _check_kinds(model, mesh, rules, precision)
    strategy = _strategy(strategy)
    if hasattr(model, "init") and hasattr(model, "names"):
        with _compat.with_values():
            shapes = model.init(torch.zeros(2, dtype=torch.int64))
        names = model.names if names is None else names
    else:
        shapes = model
    frozen = (*((frozen,) if isinstance(frozen, str) else frozen), *getattr(model, "frozen", ()))
    flat, structure = tree.flatten(shapes)
    paths = tree.paths(shapes)
    _refuse_odd_leaves(paths, flat)
    dims = [None] * len(flat) if names is None else _names_of(structure, paths, names)
    named = [
        NamedLeaf(path, tuple(x.shape), x.dtype, _tuple(of_dims), is_trainable(path, x.dtype, frozen))
        for path, x, of_dims in zip(paths, flat, dims, strict=True)
    ]
    check_leaves(named, mesh, rules, frozen)
    check_choices(strategy.memory, paths)
    if getattr(model, "check", None) is not None:
        model.check(mesh, rules)
    config = getattr(model, "config", None) if hasattr(model, "init") else None
    with _compat.with_values():
        buffers = sum(x.nbytes for x in getattr(model, "init_buffers", dict)().values())
    layout = Layout(mesh, rules, strategy, precision, (), structure, normal(stages or {}), align, config, buffers)
    _check_patterns(precision, named)
    layout = _planned(layout, named)
    _check_tp(layout, tp)
    return layout


def _planned(layout: Layout, leaves: Sequence[NamedLeaf]) -> Layout:
    """Return a layout with leaves planned from its mesh, rules, strategy and stages."""
    check_stages(leaves, layout.mesh, layout.stages)
    where = layout.mesh, layout.rules, layout.strategy, layout.stages
    planned = tuple(plan_leaf(leaf, *where, layout.blocks_of(leaf)) for leaf in leaves)
    layout = replace(layout, leaves=planned)
    layout.check_blocks()
    return layout


def _check_tp(layout: Layout, tp: str) -> None:
    """Refuse a `tp` axis that shards no leaf; warn if it shards less than half of the bytes."""
    if tp not in ("shard", "replicate"):
        raise ArgumentError(message(f"got tp={tp!r}.", mend='Pass tp="shard", the default, or tp="replicate".'))
    # Other axes are never idle: data axes shard tokens, and a step on pp requires a model with stages.
    ranks = abstract(layout.mesh).axis_size("tp")
    if ranks == 1 or tp == "replicate" or not layout.leaves:
        return
    sizes = [math.prod(leaf.shape) * leaf.init.itemsize for leaf in layout.leaves]
    sharded = ["tp" in (*x.params.spec.all_axes, *(part.axis for part in x.params.assigned)) for x in layout.leaves]
    total = sum(sizes)
    done = sum(size for size, is_sharded in zip(sizes, sharded, strict=True) if is_sharded)
    if any(sharded) and 2 * done >= total:
        return
    idle = [x for x, is_sharded in zip(layout.leaves, sharded, strict=True) if not is_sharded]
    idle.sort(key=lambda x: -math.prod(x.shape) * x.init.itemsize)
    rows = [f"{x} {x.names or '(no names)'}" for x in idle]
    dp = abstract(layout.mesh).axis_size("dp")
    mend = (
        f"Use tp=1, and dp={dp * ranks} for these ranks; or name the dims that tp shards: names= for a tree, "
        'names= and roles= of fs.functionalize for a module. If replicas are meant: tp="replicate".'
    )
    if any(sharded):
        rule = f"shards {done:,} of {total:,} bytes over tp={ranks}: its ranks store and compute the rest redundantly."
        warnings.warn(message(rule, rows, mend), stacklevel=4)
        return
    rule = f"shards no leaf ({total:,} bytes in all) over tp={ranks}: its ranks would compute the same."
    raise ConfigError(message(rule, rows, mend))


def _check_patterns(precision: Precision, leaves: Sequence[NamedLeaf]) -> None:
    """Refuse patterns of a precision that match no leaf."""
    precision.check_leaves(tuple(PatternLeaf(leaf.path, leaf.shape, leaf.is_stacked) for leaf in leaves))


def _check_kinds(model: Any, mesh: Any, rules: Any, precision: Any) -> None:
    """Refuse arguments of wrong types, with the fix for common mistakes."""
    refuse_module(model)
    if isinstance(model, DeviceMesh | AbstractMesh):
        raise refuse("a model, then a mesh", model, "Swap the two: fs.plan_layout(model, mesh).")
    if callable(model) and not hasattr(model, "names"):
        mend = "Call it, which computes nothing: fs.plan_layout(init(fs.random.key(0)), mesh)."
        raise refuse("a Model, or a tree of leaves", model, mend)
    if not isinstance(mesh, DeviceMesh | AbstractMesh):
        raise refuse("a mesh", mesh, "Make one: mesh = fs.make_mesh(dp=-1).")
    if not isinstance(rules, AxisRules):
        mend = "Pass fs.DEFAULT_RULES or fs.AxisRules(...) third, and the strategy fourth or as strategy=."
        raise refuse("axis rules", rules, mend)
    check_precision(precision)


def _refuse_odd_leaves(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse leaves without a shape and a dtype, and paths that cannot be names."""
    is_leaf = [hasattr(x, "shape") and isinstance(getattr(x, "dtype", None), torch.dtype) for x in leaves]
    if odd := [f"{path} is {kind_of(x)}" for path, x, fits in zip(paths, leaves, is_leaf, strict=True) if not fits]:
        mend = "Pass a Model, or the tree that its init returns: tensors, or lazy tensors such as fs.random.normal's."
        raise LayoutError(message("takes leaves with a shape and a dtype.", odd, mend))
    if odd := objections_to_names(paths):
        raise LayoutError(message("cannot use the paths of some leaves as names.", odd, MEND))


def _tuple(names: Any) -> Any:
    """Convert dim names to a tuple; a string is kept, and refused later together with other misfits."""
    if isinstance(names, P):
        mend = f'Name the dims, such as ("mlp", None), and map names to axes: AxisRules(mlp={names.axes(0)!r}).'
        raise ArgumentError(message(f"takes names of dims, got axes, {names}.", mend=mend))
    if names is not None and not isinstance(names, str | tuple | list):
        raise refuse("names by dim", names, 'Pass a tuple for each leaf, such as ("mlp", None).')
    return names if isinstance(names, str) else tuple(names) if names else None


def _names_of(structure: optree.PyTreeSpec, paths: Sequence[str], names: Tree) -> list[Any]:
    """Return the dim names of each leaf."""
    try:
        return structure.flatten_up_to(names)
    except (ValueError, TypeError) as error:
        given = tree.paths(names, is_leaf=_is_names)
        rows = [f"{path}: only in the model" for path in paths if path not in given]
        rows += [f"{path}: only in names" for path in given if path not in paths]
        mend = "Give names an entry for each leaf of the model, None for a leaf without names."
        if not rows:
            rows = [f"names: {path!r} is one key" for path in given]
            mend = "Nest names like the model: a dict in a dict."
        rule = "got names that do not match the model."
        raise TreeError(message(rule, rows, mend)) from error


def _is_names(x: Any) -> bool:
    """Return whether a node of a tree of names is the entry of one leaf."""
    return x is None or (isinstance(x, tuple | list) and all(n is None or isinstance(n, str | Fused) for n in x))


def _strategy(strategy: Strategy | StrategyName) -> Strategy:
    return strategy if isinstance(strategy, Strategy) else strategy_of(strategy)


def check_fit(
    layout: Layout, values: Sequence[Any], wanted: Iterable[tuple[tuple[int, ...], torch.dtype | None]]
) -> None:
    """Raise if values do not match a layout: they would be truncated, or leave uninitialized memory."""
    rows: list[str] = []
    for leaf, x, (shape, dtype) in zip(layout.leaves, values, wanted, strict=True):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            rows.append(f"{leaf.path}: {type(x).__name__} given, {type_text(shape, dtype or leaf.init)} in the layout")
        elif tuple(x.shape) != shape or x.dtype != (dtype or x.dtype):
            given = type_text(tuple(x.shape), x.dtype)
            want = type_text(shape, dtype or x.dtype)
            rows.append(f"{leaf.path}: {given} given, {want} in the layout")
    if rows:
        mend = "Plan the layout for these values, with fs.plan_layout, or pass the ones it was planned for."
        raise LayoutError(message("got leaves that do not fit the layout.", rows, mend))


def _covers(params: NamedSharding, main: NamedSharding) -> bool:
    """Return whether every rank's shard of main is inside of its shard of params."""
    return all(main.axes(dim)[: len(params.axes(dim))] == params.axes(dim) for dim in range(len(params.spec)))
