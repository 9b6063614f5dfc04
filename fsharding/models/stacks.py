"""The stacks of a model: one at `blocks`, or several of different blocks at `blocks.NAME`, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsharding.base import _compat, tree
from fsharding.base.tree import Tree
from fsharding.transforms import policies
from fsharding.transforms.gather_context import prefetch_depth
from fsharding.transforms.gather_unit import UnitsAhead, gather_unit, select_unit
from fsharding.transforms.policies import Policy
from fsharding.transforms.scan import scan_units

__all__ = ["map_stacks", "parts", "run_parts", "scan_stacks", "stacks_of", "units_in_order"]


def stacks_of(model: Any) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Return the path and block function of each stack of a model, in order."""
    if callable(model.block):
        return (("blocks", model.block),)
    return tuple((f"blocks.{name}", block) for name, block in model.block.items())


def parts(model: Any, blocks: Tree) -> list[Tree]:
    """Return the parameters of each stack of a model, in order."""
    return [blocks] if callable(model.block) else [blocks[name] for name in model.block]


def map_stacks(model: Any, fn: Callable[[int, Tree], Tree], blocks: Tree) -> Tree:
    """Replace each stack in `blocks` by `fn(number of the stack, stack)`."""
    if callable(model.block):
        return fn(0, blocks)
    return {name: fn(i, blocks[name]) for i, name in enumerate(model.block)}


@_compat.outside_of_graphs
def _first(stacks: Sequence[Tree], after: Tree) -> UnitsAhead:
    """Return the units to gather ahead: the first of these stacks, then those in `after`."""
    return UnitsAhead(itertools.islice(itertools.chain(units_in_order(stacks), UnitsAhead.of(after)), prefetch_depth()))


# A pipeline stage may have no rows of a stack, so the unit gathered next can be in any later stack.
def units_in_order(stacks: Sequence[Tree]) -> Iterator[Tree]:
    """Select the units of stacks one by one."""
    return (select_unit(stack, i) for stack in stacks for i in range(tree.leaves(stack)[0].shape[0]))


def run_parts(model: Any, params: Tree, x: Any, batch: Tree, *, head: Tree, policy: Policy) -> Any:
    """Run the parts of a model whose parameters are given: embed, blocks and head, which has the tied leaves too."""
    blocks = params["blocks"]
    if "embed" in params:
        x = model.embed(gather_unit(params["embed"], next_unit=_first(parts(model, blocks), head)), batch)
    x = scan_stacks(model, blocks, x, policy=policy, next_unit=head)
    return x if head is None else model.head(gather_unit(head), x, batch)


def scan_stacks(
    model: Any,
    blocks: Tree,
    carry: Tree,
    *,
    policy: Policy = policies.save_except_gathered,
    next_unit: Tree = None,
) -> Tree:
    """Run the blocks of a model: `scan_units` over one stack after another.

    Args:
        model: A `Model`.
        blocks: Its parameters under `blocks`. A stack may be empty, as on a pipeline stage without its layers.
        carry: Input of the first block.
        policy: Rematerialization policy: which values are saved for backward.
        next_unit: Unit to prefetch during the last block, such as the head.

    Returns:
        The output of the last block.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> layout = fs.plan_layout(model, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout).params
        >>> def loss(params, batch):
        ...     x = model.embed(fs.gather_unit(params["embed"]), batch)
        ...     x = fs.models.scan_stacks(model, params["blocks"], x, next_unit=params["head"])
        ...     return model.head(fs.gather_unit(params["head"]), x, batch)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = fs.local_batch({"tokens": tokens, "targets": tokens}, layout.mesh)
        >>> (value, count), grads = fs.value_and_grad(loss)(params, batch)
        >>> int(count)
        8
    """
    stacks = parts(model, blocks)
    for i, (_, block) in enumerate(stacks_of(model)):
        carry = scan_units(block, stacks[i], carry, policy=policy, next_unit=_first(stacks[i + 1 :], next_unit))
    return carry
