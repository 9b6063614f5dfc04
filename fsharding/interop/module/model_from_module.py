"""`model_from_module`: convert a module to a `Model` of embed, blocks and head, which pipelines need as stages.

Guarantee: losses and gradients match the module on one process, on every mesh with `pp`, `tp` and data axes, and with
`cp` if the parts accept shards of sequences.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsharding import ops
from fsharding.base import _compat, tree
from fsharding.base.errors import ConfigError, TransformError, message, report
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.interop.hf.comparison import config_of_module
from fsharding.interop.module.hf_tables import Parts, family_of
from fsharding.interop.module.initializers import LazyLeaf, Reset
from fsharding.interop.module.layers import Bare, Roles
from fsharding.interop.module.mutation_guard import unlike_blocks
from fsharding.interop.module.planning import ModuleOptions, ModulePlan, check_arguments, plan_of
from fsharding.interop.module.runtime import Engine, computing
from fsharding.interop.module.structure import Anatomy, ModuleUnit, NameTable, UnitPatterns, nested
from fsharding.mesh.device_mesh import Mesh, axis_size
from fsharding.models.model import Model
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.partition_spec import AxisRules

__all__ = ["model_from_module"]


class _Run(NamedTuple):
    """Consecutive blocks with the same parameters: a stack of the model."""

    name: str  # of the stack, if the model has several
    members: tuple[str, ...]  # paths of the blocks; the first one runs for all
    paths: dict[str, str]  # of the first block's weights below a row of the stack, by name in the module
    rows: dict[str, tuple[str, slice]]  # for each leaf of the anatomy its path in the stack, and the rows of it


@dataclass(frozen=True)
class _Plan:
    """The weights of a module by part: for each name in the module, the path of its leaf."""

    anatomy: Anatomy
    embed: dict[str, str]
    runs: tuple[_Run, ...]
    head: dict[str, str]
    tied: dict[str, str]  # weights of the head that are leaves of the embedding

    def spread(self, values: Mapping[str, Any], rows_of: Callable[[Any, slice], Any]) -> Tree:
        """Build a tree of `embed`, `blocks` and `head` from a value per leaf of the anatomy."""
        ends = {"embed": self.embed, "head": self.head}
        result = {name: nested({path: values[path] for path in end.values()}) for name, end in ends.items()}
        rows = {run.name: {b: rows_of(values[path], r) for path, (b, r) in run.rows.items()} for run in self.runs}
        stacks = {name: nested(leaves) for name, leaves in rows.items()}
        return result | {"blocks": stacks if len(stacks) > 1 else next(iter(stacks.values()))}


@public
def model_from_module(
    module: nn.Module,
    units: UnitPatterns | None = None,
    parts: Parts | None = None,
    *,
    names: NameTable | None = None,
    roles: Roles | None = None,
    reset: Reset | None = None,
) -> Model:
    """Convert an `nn.Module` to a `Model` of embed, blocks and head, as pipelines need it; the module isn't changed.

    Args:
        module: Module with real or meta tensors, in eval mode or without dropout: the parts can't use random numbers.
        units: Units as in `functionalize`, with one stack and no parameters outside of units. Units before the stack
            are `embed`, units after it `head`. Default: the family's. If a family has dense and routed layers, each run
            of equal layers becomes a stack, such as `blocks.from_0` and `blocks.from_3`.
        parts: Functions `embed(module, batch) -> x`, `block(module, layer, x) -> x` and
            `head(module, x, batch) -> (sum of losses, token count)`. Each receives the module with the weights of its
            part only. The first block of a stack runs for all, with their weights, so blocks may differ only in weights
            and in their index, such as `layer_idx`. Default: the family's, for batches of `tokens` and `targets`.
        names: Dim names of leaves, as in `functionalize`.
        roles: Roles of layers over `tp`, as in `functionalize`.
        reset: Initializer of meta parameters, as in `functionalize`.

    Returns:
        A `Model` for `plan_layout`, `init_state`, `model_loss` and pipelines.

    Raises:
        ConfigError: units that aren't embed, one stack and head; parameters outside of units, frozen, or shared except
            between embed and head; a config that the family's parts don't support; blocks that differ in buffers,
            numbers, flags or functions; or buffers that the forward writes. All are listed.
        TransformError: when a part runs, if it uses random numbers or changes tensors of the module.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = torch.nn.Embedding(16, 8)
        ...         self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        ...         self.head = torch.nn.Linear(8, 16)
        >>> def head(net, x, batch):
        ...     logits, targets = net.head(x).flatten(0, 1), batch["targets"].flatten()
        ...     return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel()
        >>> parts = fs.hf.families.Parts(
        ...     embed=lambda net, batch: net.embed(batch["tokens"]),
        ...     block=lambda net, layer, x: x + torch.tanh(layer(x)),
        ...     head=head,
        ... )
        >>> model = fs.model_from_module(Net(), ("embed", "layers.*", "head"), parts)
        >>> sorted(model.init(fs.random.key(0)))
        ['blocks', 'embed', 'head']
    """
    check_arguments(module, units)
    family = family_of(module) if units is None else None
    if family is not None and parts is None and (rows := family.objections(module)):
        mend = "Pass custom parts=, or use fs.functionalize(module), which runs the module's own forward."
        raise ConfigError(message("has no parts for this config.", rows, mend))
    parts = parts or (family.parts if family is not None else None)
    if (units is None and family is None) or parts is None:
        mend = "Pass units=('embed', 'layers.*', 'head') and parts=fs.hf.families.Parts(embed, block, head)."
        raise ConfigError(message(f"has no default units and parts for {type(module).__name__}.", mend=mend))
    return _model(plan_of(module, units, ModuleOptions(names, roles, reset), carries=False), parts)


def _model(planned: ModulePlan, parts: Parts) -> Model:
    """Build a model whose parts run one copy of the module, with the weights of one part at a time."""
    plan = _plan(planned.module, planned.anatomy)
    engine = Engine(planned, idle=[member for run in plan.runs for member in run.members[1:]])
    layers = [{path: engine.module.get_submodule(path) for path in run.members} for run in plan.runs]
    if rows := [row for blocks in layers for row in unlike_blocks(blocks)]:
        mend = "Make the differences inputs of the blocks, or use fs.functionalize(module), which runs each block."
        raise ConfigError(message("runs the first block with the weights of all, so blocks must agree.", rows, mend))

    def init(key: Tensor) -> Tree:
        return plan.spread(engine.first_values(key), LazyLeaf.rows)

    def block(run: _Run) -> Callable[..., Any]:
        layer = engine.module.get_submodule(run.members[0])
        return _part(engine, functools.partial(parts.block, engine.module, layer), run.paths)

    over = ("pp", "cp") if parts.cp else ("pp",)

    # Ranks compare the values in a model's closures, so use the plan and not a config, which has the path of a save.
    def check(mesh: Mesh, rules: AxisRules) -> None:
        engine.original.check()
        planned.check(mesh, rules, over)

    blocks = {run.name: block(run) for run in plan.runs}
    return Model(
        init=init,
        embed=_part(engine, functools.partial(parts.embed, engine.module), plan.embed),
        block=blocks if len(blocks) > 1 else next(iter(blocks.values())),
        head=_part(engine, functools.partial(parts.head, engine.module), plan.head, plan.tied),
        names=plan.spread({leaf.path: leaf.names for leaf in plan.anatomy.leaves}, lambda names, _: names),
        tied=tuple((name, f"embed.{path}") for name, path in plan.tied.items()),
        axes=("cp", "tp") if parts.cp else ("tp",),
        check=check,
        config=config_of_module(planned.module),
        constants=engine.constants,
    )


class _Attending(TorchFunctionMode):
    """Replaces torch's attention by attention over the full sequence, which is sharded over `cp`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = _over_cp if func is F.scaled_dot_product_attention else func
        return attend(*args, **(kwargs or {}))


def _over_cp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` over `cp`, with the same arguments."""
    rows = [f"attn_mask is {kind_text(attn_mask)}"] if attn_mask is not None else []
    rows += [f"dropout_p is {dropout_p}"] if dropout_p else []
    if rows:
        mend = "Pass is_causal=True instead, or call ops.attention in the parts, which has masks for documents."
        rule = "fs.model_from_module computes attention over cp without masks and dropout."
        raise TransformError(report(rule, rows, mend))
    return ops.attention(query, key, value, causal=is_causal, scale=scale)


def _part(
    engine: Engine, fn: Callable[..., Any], paths: Mapping[str, str], tied: Collection[str] = ()
) -> Callable[..., Any]:
    """Make a part a function of its parameters; tied ones are in them by name."""
    bare = Bare(engine.module, fn)

    @_compat.outside_of_graphs
    def run(params: Tree, *args: Any) -> Any:
        weights = {f"inner.{name}": tree.at(params, path) for name, path in paths.items()}
        weights |= {f"inner.{name}": params[name] for name in tied}
        attending = _Attending() if axis_size("cp") > 1 else nullcontext()
        with engine.guard(weights.values(), keyed=False), computing(None), attending:
            return torch.func.functional_call(bare, weights, args, tie_weights=False)

    return run


def _plan(module: nn.Module, anatomy: Anatomy) -> _Plan:
    """Sort the units of a module into parts, or refuse them."""
    root, *units = anatomy.units
    stacks = list(dict.fromkeys(unit.stack for unit in units if unit.stack is not None))
    blocks = [i for i, unit in enumerate(units) if unit.stack is not None]
    wrong = [f"{weight.name} is in no unit" for weight in root.weights]
    if len(stacks) != 1:
        wrong.append(f"there are {len(stacks)} stacks: {', '.join(map(repr, stacks)) or 'no pattern has a star'}")
    first = min(blocks, default=0)
    last = max(blocks, default=-1)
    wrong += [f"{', '.join(u.members)} is between the blocks" for u in units[first:last] if u.stack is None]
    ends = units[:first], units[last + 1 :]
    sides = zip(("before", "after"), ends, strict=True)
    wrong += [f"there is no unit {side} the blocks" for side, end in sides if blocks and not end]
    wrong += [f"{x.path} is frozen" for x in anatomy.leaves if x.dtype.is_floating_point and not x.trainable]
    of_blocks = (weight for unit in units if unit.stack is not None for weight in unit.weights)
    wrong += [f"{w.name} of a block is tied to {w.leaf}" for w in of_blocks if w.row is None]
    known_as: dict[int, list[str]] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        known_as.setdefault(id(child), []).append(path)
    blocks_named = (known_as[id(module.get_submodule(m))] for u in units if u.stack is not None for m in u.members)
    wrong += [f"{paths[0]} is {', '.join(paths[1:])} as well: one block" for paths in blocks_named if len(paths) > 1]
    if wrong:
        mend = "Pass units=(before, 'layers.*', after) with all parameters; freeze leaves with plan_layout(frozen=...)."
        raise ConfigError(message("needs units for an embedding, one stack of blocks, and a head.", wrong, mend))
    # A leaf of both ends is stored in the embedding; the head receives it as a tied leaf.
    embed, head = ({w.name: w.leaf for unit in end for w in unit.weights} for end in ends)
    tied = {name: path for name, path in head.items() if path in embed.values()}
    own = {name: path for name, path in head.items() if name not in tied}
    return _Plan(anatomy, embed, _runs(units[first : last + 1], stacks[0] or ""), own, tied)


def _runs(blocks: Sequence[ModuleUnit], stack: str) -> tuple[_Run, ...]:
    """Split the blocks of a stack into runs of consecutive blocks with the same parameters."""

    def kind(numbered: tuple[int, ModuleUnit]) -> list[str]:
        return [weight.leaf for weight in numbered[1].weights]

    runs: list[_Run] = []
    for _, group in itertools.groupby(enumerate(blocks), key=kind):
        numbers, units = zip(*group, strict=True)
        below = {w.leaf: w.leaf.removeprefix(f"{stack}.") for w in units[0].weights}
        paths = {w.name: below[w.leaf] for w in units[0].weights}
        starts = {w.leaf: w.row for w in units[0].weights if w.row is not None}
        rows = {path: (below[path], slice(row, row + len(units))) for path, row in starts.items()}
        members = tuple(member for unit in units for member in unit.members)
        runs.append(_Run(f"from_{numbers[0]}", members, paths, rows))
    return tuple(runs)
