"""Layouts: the shardings of params, grads and opt_state that a mesh, rules and a strategy give to a model.

Guarantee: the bytes that `memory()` says are the bytes that a state has.
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
    is_stacked,
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
    """Bytes of one rank.

    Attributes:
        params: parameters.
        main: main parameters kept beside them; 0 when the parameters are their own main copy.
        grads: gradients as they are accumulated.
        opt_state: optimizer moments.
        buffers: tensors that the forward of a functionalized module writes, which every rank has in full.
        away: bytes of all these that are in other tiers, by the name of each, which is an attribute too: `memory.host`.
            A file has twice as much, since a step writes a new state beside the old one.

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
        """Bytes in memory of the device."""
        return self.total - sum(self.away.values())

    @property
    def state(self) -> int:
        """Bytes between steps: all but the gradients."""
        return self.params + self.main + self.opt_state + self.buffers

    @property
    def total(self) -> int:
        """All of it, in all tiers."""
        return self.state + self.grads

    def __str__(self) -> str:
        kinds = {name: value for name, value in self._asdict().items() if name != "away"}
        parts = ", ".join(f"{name} {value:,}" for name, value in {**kinds, **self.away}.items())
        return f"{self.total:,} bytes a rank ({parts})"


@dataclass(frozen=True, repr=False)
class Layout:
    """See the module. Everything about where a state lives; travels with the state.

    Attributes:
        mesh: with devices, or abstract.
        rules: which mesh axes shard a dim, by its name.
        strategy: what is cut over the data axes.
        precision: dtypes of leaves at rest, in compute and on the wire.
        leaves: one `LeafLayout` for each parameter.
        structure: of the parameter tree.
        stages: explicit ownership along `pp`, as `stages.normal` gives it.
        align: data axes cut on the borders of blocks.
        config: what the model was made of, if it says so, such as a `DecoderConfig`. Not compared.
        buffers: bytes of the buffers that the forward of the model writes. Not compared.

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
        """Tree of `NamedSharding`: where the parameters are."""
        return tree.unflatten(self.structure, [leaf.params for leaf in self.leaves])

    @property
    def grads(self) -> Tree:
        """Tree of `NamedSharding`: where gradients are accumulated; None for frozen leaves."""
        return tree.unflatten(self.structure, [leaf.grads if leaf.trainable else None for leaf in self.leaves])

    @property
    def main(self) -> Tree:
        """Tree of `NamedSharding`: where main parameters are; None for frozen leaves.

        Moments and reduced gradients are sharded alike; `reduced` has the latter in their own memory.
        """
        return tree.unflatten(self.structure, [leaf.main if leaf.trainable else None for leaf in self.leaves])

    @property
    def reduced(self) -> Tree:
        """Tree of `NamedSharding`: where reduced gradients go, as `main` but for memory; None for frozen leaves."""
        return tree.unflatten(self.structure, [leaf.reduced if leaf.trainable else None for leaf in self.leaves])

    @property
    def stacked(self) -> dict[str, bool]:
        """Whether the first dim of a leaf counts layers, by path, of the leaves whose dims have names."""
        return {leaf.path: is_stacked(leaf.names) for leaf in self.leaves if leaf.names}

    @property
    def is_away(self) -> bool:
        """Whether the strategy keeps or updates anything elsewhere than on the device."""
        return bool(self.strategy.memory)

    @property
    def updated_on_host(self) -> frozenset[str]:
        """Paths of the leaves whose update is computed on the host."""
        return frozenset(leaf.path for leaf in self.leaves if leaf.trainable and leaf.compute != HERE)

    @property
    def has_main(self) -> bool:
        """Whether main parameters are kept beside the params: because these are narrower in dtype, or cut further."""
        return any(leaf.trainable and self.main_apart(leaf) for leaf in self.leaves)

    def main_apart(self, leaf: LeafLayout) -> bool:
        """Whether the main copy of a leaf cannot be the parameter itself or a slice of it."""
        narrower = self.param_dtype(leaf) != self.precision.main_dtype(leaf.init)
        elsewhere = leaf.params.memory != leaf.main.memory
        return narrower or elsewhere or self.rounds(leaf) is not None or not _covers(leaf.params, leaf.main)

    def param_dtype(self, leaf: LeafLayout) -> torch.dtype:
        """The dtype of a parameter at rest: of the main copy where it is that, else the compute dtype."""
        main = self.precision.main_dtype(leaf.init)
        compute = self.precision.compute_dtype(leaf.init)
        if not leaf.trainable:
            return main
        return main if self._is_main(leaf) else compute

    def _is_main(self, leaf: LeafLayout) -> bool:
        """Whether a parameter at rest is its own main copy, and not what is computed with."""
        return leaf.params == leaf.main and self.strategy.params

    def format_of(self, leaf: LeafLayout) -> Blocks | None:
        """The format of low precision in which the loss function sees a leaf, if it has one."""
        ndim = len(leaf.shape) - is_stacked(leaf.names)
        return self.precision.format_of(leaf.path, ndim) if leaf.trainable else None

    def rounds(self, leaf: LeafLayout) -> Blocks | None:
        """The format that a parameter at rest has been rounded to: one that is not its own main copy."""
        format = self.format_of(leaf)
        return None if format is None or self._is_main(leaf) else format

    @public
    def in_flight(self, precision: Precision) -> Precision:
        """The precision of a call that gathers parameters of this layout: what is rounded already is not once more.

        Main parameters are rounded on their way to the loss function, copies of them at rest have been, and frozen
        leaves never are.

        Raises:
            LayoutError: patterns of the precision that match no leaf.
        """
        if precision != self.precision:
            _check_patterns(precision, self._named)
        if precision.gather is None:
            return precision
        rounded = any(self.rounds(leaf) is not None for leaf in self.leaves)
        if rounded and precision.columnwise:
            rule = f"cannot serve copies of weights, which {self.strategy} keeps: they have one orientation."
            mend = "Use fs.zero(3) or fs.hybrid(), which round main parameters; or leave columnwise out."
            raise ConfigError(report(f"Precision.columnwise {rule}", mend=mend))
        if rounded and not precision.computes_quantized:
            return precision.of_rounded()
        frozen = tuple(leaf.path for leaf in self.leaves if not leaf.trainable)
        return replace(precision, keep=(*precision.keep, *frozen), rounded=rounded) if frozen or rounded else precision

    def entries(self, opt: Any = None) -> tuple[Entry, ...]:
        """List the leaves of a state of this layout with shapes, dtypes and shardings; no memory is taken.

        Args:
            opt: a `GradientTransformation`, whose `init` runs on the meta device; without it, parameters alone.

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
                # Tensors that an `init` makes on a device are the same on every rank.
                result.append(known.get(path, other) if x.is_meta else other)
        return tuple(result)

    def moments(self, opt_state: Tree) -> dict[str, Moment]:
        """Describe the moments of an optimizer state by their path in it.

        Args:
            opt_state: at rest, or on the meta device, where tensors have full shapes. Leaves that belong to no
                parameter, or have another shape than its moment, are left out.
        """
        return moments(self.leaves, self.structure, opt_state)

    @public
    def memory(self, opt: Any = None, coord: dict[str, int] | None = None) -> Memory:
        """Exact bytes of one rank.

        Buffers are counted if the layout was planned for a model that knows them, as `functionalize` returns it. Those
        that only `init_state(buffers=)` is given are not: `fs.debug.state_bytes(state.buffers)` is their size.

        Args:
            opt: a `GradientTransformation`, whose state is counted, with its own dtype of moments if it has one; by
                default the two moments of Adam.
            coord: the rank's coordinate; by default this process's, and the first on an abstract mesh, which has most.
        """
        kept = self.bytes_by_kind(opt, coord)
        parts = {role: counts.total() for role, counts in kept.items()}
        sizes = {tier: sum(counts[tier] for counts in kept.values()) for tier in names_of("tier")}
        away = {tier: size for tier, size in sizes.items() if size and tier != HERE}
        return Memory(**parts, buffers=self.buffers, away=away)

    def bytes_by_kind(
        self, opt: Any = None, coord: dict[str, int] | None = None, *, compute: str | None = None
    ) -> dict[str, Counter[str]]:
        """Bytes of one rank by field of `Memory` and kind of memory.

        Args:
            opt: as in `memory`.
            coord: the same.
            compute: only of leaves that are updated there.
        """
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
                kept["opt_state"][leaf.moment_memory] += 2 * self._moment_bytes(leaf, coord)
        return kept

    def _moment_bytes(self, leaf: LeafLayout, coord: dict[str, int] | None) -> int:
        """Bytes of one rank's part of a moment in the precision of the layout."""
        elements = math.prod(leaf.main.local_shape(leaf.shape, coord))
        format = self.precision.moment_format
        if format is None or not has_codes(leaf.shape):
            return elements * self.precision.moment_dtype(self.precision.main_dtype(leaf.init)).itemsize
        scales = plan_scales(leaf.main, leaf.shape, format)
        return elements + math.prod(scales.sharding.local_shape(scales.shape, coord)) * format.scale_dtype.itemsize

    def meta_main(self) -> Tree:
        """Whole main parameters as plain tensors on the meta device; None for frozen leaves."""
        leaves = [
            torch.empty(leaf.shape, dtype=self.precision.main_dtype(leaf.init), device="meta")
            if leaf.trainable
            else None
            for leaf in self.leaves
        ]
        return tree.unflatten(self.structure, leaves)

    def with_strategy(self, strategy: Strategy | StrategyName) -> Layout:
        """The layout of the same model on the same mesh under another strategy, or one of that name.

        Raises:
            ConfigError: an unknown name.
        """
        return self._replan(strategy=_strategy(strategy))

    @public
    def with_precision(self, precision: Precision) -> Layout:
        """The same layout with other dtypes at rest, and other formats of weights.

        Raises:
            LayoutError: patterns of the precision that match no leaf.
        """
        _check_patterns(precision, self._named)
        return self._replan(precision=precision) if self.align else replace(self, precision=precision)

    @public
    def with_mesh(
        self, mesh: Mesh, stages: Mapping[str, Any] | None = None, *, tp: Literal["shard", "replicate"] = "shard"
    ) -> Layout:
        """The layout of the same model on another mesh.

        Args:
            mesh: with devices, or abstract.
            stages: as in `plan_layout`; by default this layout's.
            tp: as in `plan_layout`.

        Raises:
            ConfigError: the mesh has other axes than this layout's, and its `tp` axis shards no leaf.
        """
        new = self._replan(mesh=mesh, stages=self.stages if stages is None else normal(stages))
        if abstract(mesh) != abstract(self.mesh):
            _check_tp(new, tp)
        return new

    def with_frozen(self, paths: Collection[str]) -> Layout:
        """The same layout with exactly these leaves frozen, and those that have no gradient.

        Args:
            paths: of whole leaves.
        """
        leaves = [replace(x, trainable=x.init.is_floating_point and x.path not in paths) for x in self.leaves]
        return self if tuple(leaves) == self.leaves else replace(self, leaves=tuple(leaves))._replan()

    def _replan(self, **changes: Any) -> Layout:
        return _planned(replace(self, **changes), self._named, [leaf.trainable for leaf in self.leaves])

    @property
    def _named(self) -> list[NamedLeaf]:
        """What the leaves are, without where they live."""
        return [(leaf.path, leaf.shape, leaf.init, leaf.names) for leaf in self.leaves]

    def blocks_of(self, leaf: NamedLeaf) -> Blocks | None:
        """The blocks on whose borders a leaf is cut; None where that does not matter."""
        path, shape, dtype, names = leaf
        wanted = self.align and dtype.is_floating_point
        return self.precision.format_of(path, len(shape) - is_stacked(names)) if wanted else None

    def check_blocks(self) -> None:
        """Refuses cuts that go through blocks, where they must not; all of them are listed.

        Raises:
            LayoutError: there are such cuts.
        """
        if not self.align:
            return
        rows = [
            row
            for leaf in self.leaves
            if (blocks := self.format_of(leaf)) is not None
            for row in objections_to_cuts(leaf, blocks)
        ]
        if rows:
            mend = (
                "Make the sizes multiples of pieces and blocks, keep such leaves in the dtype of compute, as in"
                ' fs.Precision(keep=(..., "wq")), take smaller blocks, or leave align out: then ranks tell each other'
                " the largest numbers of the blocks that they share."
            )
            rule = f"cannot cut {len(rows)} dims on borders of blocks of {self.precision.gather}."
            raise LayoutError(message(rule, rows, mend))

    def __repr__(self) -> str:
        """One line; `print(layout)` has one more for each leaf."""
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
    """Return the same layout on another mesh of the same shape, with devices or without; nothing is planned again."""
    leaves = (
        replace(leaf, **{kind: replace(getattr(leaf, kind), mesh=mesh) for kind in ("params", "grads", "main")})
        for leaf in layout.leaves
    )
    return replace(layout, mesh=mesh, leaves=tuple(leaves))


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
    """Plans where every leaf lives. Pure: allocates nothing, and runs on an `AbstractMesh` of any size.

    Args:
        model: a `Model` (its `init` and `names` are used), or a tree of anything with `shape` and `dtype`.
        mesh: with devices, or abstract.
        rules: which mesh axes shard a dim, by its name.
        strategy: what is cut over the data axes, or the name of a strategy, such as "zero3".
        precision: dtypes of leaves at rest, in compute and on the wire.
        names: tree of tuples of dim names; by default the model's. Leaves without names are cut along their first dim.
            A dim that is made of parts has a `Fused` name, and each part is cut by itself.
        frozen: dotted paths, or beginnings of them, of leaves without gradients and moments, besides the model's own.
        stages: who owns what along `pp`, by path or beginning of one: for a stack the layers of each coordinate, such
            as `{"blocks": [[0, 2], [1, 3]]}`, else the coordinates that have the leaf, such as `{"embed": 0}`. What
            is left out is cut by the rules.
        align: data axes cut on the borders of the blocks of `precision.gather`: where the rules say if that is one,
            else along another dim. Without it a block may be on several ranks, which costs a small collective a unit.
        tp: "shard" refuses a `tp` axis of more than one rank that shards no leaf, and warns if it shards less than half
            of the bytes; "replicate" says that such replicas are meant.

    Raises:
        ArgumentError: an argument of another kind, such as an `nn.Module` or an init function, or two are swapped.
        SpecError: a dim name without a rule, an axis that would cut two dims of a leaf; all such leaves are listed.
        ConfigError: a mesh that cannot shard a `Model` by the rules; a `tp` axis that shards no leaf; another strategy.
        LayoutError: `names` or `stages` do not fit a leaf; a dtype that kernels lack; a path or a pattern that no leaf
            has; paths that collide or are no names, such as `__metadata__`; with `align`, a shard that splits a block.

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
    named = [(p, tuple(x.shape), x.dtype, _tuple(n)) for p, x, n in zip(paths, flat, dims, strict=True)]
    check_leaves(named, mesh, rules, frozen)
    check_choices(strategy.memory, paths)
    if getattr(model, "check", None) is not None:
        model.check(mesh, rules)
    config = getattr(model, "config", None) if hasattr(model, "init") else None
    with _compat.with_values():
        buffers = sum(x.nbytes for x in getattr(model, "init_buffers", dict)().values())
    layout = Layout(mesh, rules, strategy, precision, (), structure, normal(stages or {}), align, config, buffers)
    _check_patterns(precision, named)
    layout = _planned(layout, named, [is_trainable(path, dtype, frozen) for path, _, dtype, _ in named])
    _check_tp(layout, tp)
    return layout


def _planned(layout: Layout, leaves: Sequence[NamedLeaf], trainable: Sequence[bool]) -> Layout:
    """Plan leaves by the mesh, the rules, the strategy and the stages of a layout."""
    check_stages(leaves, layout.mesh, layout.stages)
    where = layout.mesh, layout.rules, layout.strategy, layout.stages
    pairs = zip(leaves, trainable, strict=True)
    planned = tuple(plan_leaf(leaf, has_grad, *where, layout.blocks_of(leaf)) for leaf, has_grad in pairs)
    layout = replace(layout, leaves=planned)
    layout.check_blocks()
    return layout


def _check_tp(layout: Layout, tp: str) -> None:
    """Refuse a `tp` axis that shards no leaf; warn if it shards less than half of the bytes."""
    if tp not in ("shard", "replicate"):
        raise ArgumentError(message(f"got tp={tp!r}.", mend='Give tp="shard", the default, or tp="replicate".'))
    # Only tp: data axes (ep and cp among them) shard tokens, and a step on pp takes nothing but a Model with stages.
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
    rows = [f"{x.path} is {type_text(x.shape, x.init)} {x.names or '(no names)'}" for x in idle]
    dp = abstract(layout.mesh).axis_size("dp")
    mend = (
        f"Use tp=1, and dp={dp * ranks} for these ranks; or name the dims that tp shards: names= for a tree, "
        'names= and roles= of fs.functionalize for a module. If replicas are meant: tp="replicate".'
    )
    if any(sharded):
        rule = f"shards {done:,} of {total:,} bytes over tp={ranks}: its ranks hold and compute the rest alike."
        warnings.warn(message(rule, rows, mend), stacklevel=4)
        return
    rule = f"shards none of {len(rows)} leaves ({total:,} bytes) over tp={ranks}: its ranks would compute the same."
    raise ConfigError(message(rule, rows, mend))


def _check_patterns(precision: Precision, leaves: Sequence[NamedLeaf]) -> None:
    """Refuse patterns of a precision that match no leaf."""
    precision.check_leaves(tuple(PatternLeaf(path, shape, is_stacked(names)) for path, shape, _, names in leaves))


def _check_kinds(model: Any, mesh: Any, rules: Any, precision: Any) -> None:
    """Refuses arguments of another kind than `plan_layout` takes."""
    refuse_module(model)
    if isinstance(model, DeviceMesh | AbstractMesh):
        raise refuse("a model, then a mesh", model, "Swap the two: fs.plan_layout(model, mesh).")
    if callable(model) and not hasattr(model, "names"):
        mend = "Call it, nothing is computed: fs.plan_layout(init(fs.random.key(0)), mesh)."
        raise refuse("a Model, or a tree of leaves", model, mend)
    if not isinstance(mesh, DeviceMesh | AbstractMesh):
        raise refuse("a mesh", mesh, "Make one: mesh = fs.make_mesh(dp=-1).")
    if not isinstance(rules, AxisRules):
        mend = "Give fs.DEFAULT_RULES or fs.AxisRules(...) third, and the strategy fourth or as strategy=."
        raise refuse("axis rules", rules, mend)
    check_precision(precision)


def _refuse_odd_leaves(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse leaves without a shape and a dtype, and paths that are no names."""
    is_leaf = [hasattr(x, "shape") and isinstance(getattr(x, "dtype", None), torch.dtype) for x in leaves]
    if odd := [f"{path} is {kind_of(x)}" for path, x, fits in zip(paths, leaves, is_leaf, strict=True) if not fits]:
        mend = "Give a Model, or the tree that its init returns: tensors, or draws such as fs.random.normal."
        raise LayoutError(message("takes leaves with a shape and a dtype.", odd, mend))
    if odd := objections_to_names(paths):
        raise LayoutError(message(f"cannot name {len(odd)} leaves.", odd, MEND))


def _tuple(names: Any) -> Any:
    """Dim names as a tuple; what is none stays as it is, and is refused with all that do not fit."""
    if isinstance(names, P):
        mend = f'Name the dims, such as ("mlp", None), and say which axes cut them: AxisRules(mlp={names.axes(0)!r}).'
        raise ArgumentError(message(f"takes names of dims, got axes, {names}.", mend=mend))
    if names is not None and not isinstance(names, str | tuple | list):
        raise refuse("names by dim", names, 'Give a tuple for each leaf, such as ("mlp", None).')
    return names if isinstance(names, str) else tuple(names) if names else None


def _names_of(structure: optree.PyTreeSpec, paths: Sequence[str], names: Tree) -> list[Any]:
    """The dim names of each leaf."""
    try:
        return structure.flatten_up_to(names)
    except (ValueError, TypeError) as error:
        given = tree.paths(names, is_leaf=_is_names)
        rows = [f"{path}: only in the model" for path in paths if path not in given]
        rows += [f"{path}: only in names" for path in given if path not in paths]
        mend = "Give names an entry for each leaf of the model, None for one without."
        if not rows:
            rows = [f"names: {path!r} is one key" for path in given]
            mend = "Nest names as the model is: a dict in a dict."
        rule = "got the model and names that do not match."
        raise TreeError(message(rule, rows, mend)) from error


def _is_names(x: Any) -> bool:
    """Whether something stands for one leaf in a tree of names."""
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
        mend = "Plan the layout for what is given, with fs.plan_layout, or give what it was planned for."
        raise LayoutError(message(f"got {len(rows)} leaves that do not fit the layout.", rows, mend))


def _covers(params: NamedSharding, main: NamedSharding) -> bool:
    """Whether the main shard of every rank is inside its shard of the params."""
    return all(main.axes(dim)[: len(params.axes(dim))] == params.axes(dim) for dim in range(len(params.spec)))
