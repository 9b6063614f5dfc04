"""`reshard`, `shard`, `unshard`: convert trees between full tensors and layouts, on any mesh over any of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.calls import public_name
from fsharding.base.errors import LayoutError, message
from fsharding.base.public import public, refuse
from fsharding.base.tree import Tree
from fsharding.comm.leaf_memory import on_device, placed
from fsharding.comm.reshard_plan import BUDGET, Plan, plan_routes
from fsharding.comm.reshard_run import exchange
from fsharding.comm.tier_room import take_room
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import gather_numbers
from fsharding.mesh.device_mesh import Group, Mesh, abstract, axis_group, is_member, own_rank, world_size
from fsharding.mesh.failures import naming_lost
from fsharding.mesh.meeting import meet
from fsharding.optim.base import GradientTransformation
from fsharding.sharding.layout import Layout, check_fit
from fsharding.sharding.named_sharding import LeafType, Local, NamedSharding, home_of, typeof
from fsharding.train import reshard_leaves
from fsharding.train.first_values import Sync, same_values
from fsharding.train.reshard_leaves import Moving
from fsharding.train.state import TrainState, own_part, refrozen, sealed
from fsharding.train.state_check import check_state

__all__ = ["Explanation", "explain_reshard", "reshard", "shard", "unshard"]


@public
def reshard(
    tree_or_state: Tree,
    layout: Any,
    *,
    donate: bool = False,
    source: Any = None,
    budget: int = BUDGET,
    opt: GradientTransformation | None = None,
) -> Any:
    """Move a state or tree to a different layout, bit for bit. Collective over the ranks of both meshes.

    The meshes may differ in axes, sizes, order and ranks. If neither has all ranks that take part, every rank of the
    default process group must call. Ranks outside the new mesh get empty shards. Use `redistribute` to change the
    shardings of a tree on one mesh, and `shard` for full tensors.

    Args:
        tree_or_state: A `TrainState`, or a tree of DTensors and `Local`s; other leaves are kept as they are.
        layout: New layout. For a state, a `Layout` of the same model with any mesh, strategy, stages and compute dtype.
            For a tree, a `Layout` (its `params` apply), a tree of `NamedSharding`s, or one for all leaves; None keeps
            a leaf where it is.
        donate: Whether to free each source tensor as soon as it has been sent. A donated state raises `DonatedError`
            when used again; donated DTensors of a tree are empty. Default: False.
        source: `Layout` or tree of `NamedSharding`s of a tree; only required for `Local` leaves that are staged over
            `pp` or have `Fused` dims.
        budget: Bytes of send and receive buffers per rank, in addition to old and new values.
        opt: Optimizer of a state, required if the layout freezes different leaves: its `init` makes the moments of
            newly trained leaves. Leaves trained in both layouts keep their moments.

    Returns:
        The same state or tree in the new layout.

    Raises:
        LayoutError: The layout is of a different model or main dtype, a leaf is unreduced, has unknown owners or
            doesn't match the state's layout, a mesh is abstract, or ranks pass different arguments. All such leaves
            are listed, and nothing has changed.
        TreeError, DonatedError: The trees don't match, or the state was donated before.
        RankError: A rank exited, or doesn't call `reshard`.

    Example:
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> old, new = (fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy=s) for s in (fs.zero(0), fs.zero(3)))
        >>> state = fs.init_state(lambda key: {"w": fs.random.normal(key, (4,))}, fs.adamw(0.1), fs.random.key(0), old)
        >>> print(fs.reshard(state, new).layout.strategy)
        zero3
    """
    if isinstance(tree_or_state, TrainState):
        if opt is not None and isinstance(layout, Layout):
            check_state(tree_or_state)
            frozen = {leaf.path for leaf in layout.leaves if not leaf.trainable}
            tree_or_state = refrozen(tree_or_state, tree_or_state.layout.with_frozen(frozen), opt)
        moved, rebuild = reshard_leaves.of_state(tree_or_state, layout)
        # With an optimizer `tree_or_state` is a new state by now, and the caller's own keeps its room.
        freed = tree_or_state if donate and opt is None else None
        take_room(layout, [(m.target, m.shape, m.dtype) for m in moved], freed)
    else:
        moved, rebuild = reshard_leaves.of_tree(tree_or_state, layout, source, asks=True)
    result = _run(moved, rebuild, given=tree_or_state if donate else None, budget=budget)
    return sealed(result) if isinstance(result, TrainState) else result


def _run(moved: list[Moving], rebuild: reshard_leaves.Rebuild, *, given: Tree = None, budget: int = BUDGET) -> Any:
    """Move leaves and rebuild the tree; `given` is the state or tree to donate, if any."""
    if not moved:
        return rebuild([])
    meshes = reshard_leaves.devices(moved)
    with naming_lost(public_name(), meshes[0]):
        plan = plan_routes(tuple(m.leaf for m in moved), budget)
        group = _group(meshes, plan.ranks)
        if group is None:
            nothing = (torch.empty(0, dtype=m.dtype) for m in moved)
            return rebuild(
                [m.value if m.plain and m.value is not None else x for m, x in zip(moved, nothing, strict=True)]
            )
        device = torch.device(meshes[0].device_type)  # pyright: ignore[reportAttributeAccessIssue]
        _agree(plan, group, device)
        dtypes = [m.dtype for m in moved]
        sources = [m.value if m.value is None or m.plain else on_device(m.value, device.type) for m in moved]
        if given is not None:
            # From here on only `sources` refers to the tensors, so `exchange` can free each once it has been sent.
            for m in moved:
                m.value = None
            _invalidate(given)
        donate = given is not None
        values = exchange(plan, sources, dtypes, rank=own_rank(), group=group, device=device, donate=donate)
        return rebuild(values)


def _invalidate(tree_or_state: Tree) -> None:
    """Invalidate a donated state or tree."""
    if isinstance(tree_or_state, TrainState):
        tree_or_state.donate()
        return
    for leaf in tree.leaves(tree_or_state):
        if isinstance(leaf, DTensor):
            _compat.drop_local(leaf)


def _group(meshes: Sequence[Mesh], ranks: tuple[int, ...]) -> Group | None:
    """Return the group of a mesh that has all ranks (None outside it), else the default process group."""
    if len(ranks) == 1:
        return Group(ranks, 0, None) if own_rank() in ranks else None
    for mesh in meshes:
        if tuple(sorted(abstract(mesh).members)) == ranks and len(ranks) < world_size():
            if not is_member(mesh):
                return None
            result = axis_group(mesh, abstract(mesh).names)
            return Group(ranks, ranks.index(own_rank()), result.process_group)
    return Group(tuple(range(world_size())), own_rank(), dist.group.WORLD)


def _agree(plan: Plan, group: Group, device: torch.device) -> None:
    """Check that all ranks have the same plan: with different ones they would deadlock or misread bytes."""
    if group.process_group is None:
        return
    if group.size == world_size():
        digests = meet(plan.digest)
    else:
        digests = gather_numbers(plan.digest, group, device.type)
    others = [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != plan.digest]
    if others:
        text = f"got different arguments on different ranks: rank {own_rank()} and ranks {others} differ."
        raise LayoutError(message(text, mend="Give every rank the same tree, layout and budget."))


@public
def shard(values: Tree, layout: Any, *, sync: Sync | None = None) -> Tree:
    """Shard full tensors, equal on every rank, as DTensors. Collective over the ranks of the mesh.

    Each rank keeps its own slices. Ranks compare checksums of all values; nothing else is sent unless `sync` is given.

    Args:
        values: Tree of plain tensors, equal on every rank.
        layout: A `Layout` (its `params` apply), a tree of `NamedSharding`s, or one for all leaves.
        sync: None to refuse values that differ between ranks, or "rank0" to send those of the mesh's first rank to all,
            leaf by leaf; other ranks may pass tensors on the meta device.

    Returns:
        A tree of DTensors in new memory and in the dtypes of the values.

    Raises:
        ArgumentError: `sync` is unknown, or a mesh is given for a layout.
        ConfigError: Ranks have different values. Every rank raises and lists all such leaves.
        LayoutError: Shapes differ from the layout's, or leaves are sharded already; all are listed.
        TreeError: The trees don't match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.arange(4.0)}, layout)
        >>> fs.unshard(params)["w"]
        tensor([0., 1., 2., 3.])
    """
    if isinstance(layout, DeviceMesh | AbstractMesh):
        mend = "Plan a layout on that mesh: layout = fs.plan_layout(tree, mesh)."
        raise refuse("a tree, then a Layout or shardings", layout, mend)
    flat, spec = tree.flatten(values)
    targets, _ = reshard_leaves.shardings(spec, layout)
    named = zip(tree.paths(values), flat, strict=True)
    if rows := [f"{path} is {typeof(x)} already" for path, x in named if isinstance(x, DTensor | Local)]:
        raise LayoutError(message("takes full tensors, and these leaves are sharded.", rows, "Use fs.reshard."))
    if isinstance(layout, Layout):
        check_fit(layout, flat, ((leaf.shape, None) for leaf in layout.leaves))
    for x, s in zip(flat, targets, strict=True):
        if s is not None:
            s.local_shape(tuple(x.shape))  # refuses a spec of more dims before ranks compare anything
    # Partial sums may differ between ranks: they are sharded, but not compared.
    compared: dict[Mesh, dict[str, Any]] = {s.mesh: {} for s in targets if s is not None}
    for path, x, s in zip(tree.paths(values), flat, targets, strict=True):
        if s is not None and not s.partial:
            compared[s.mesh][path] = x
    received = {mesh: same_values(leaves, mesh, sync) for mesh, leaves in compared.items()}
    pairs = zip(flat, targets, strict=True)
    return tree.unflatten(spec, [x if s is None else _shard(received[s.mesh](x), s) for x, s in pairs])


def _shard(x: Tensor, sharding: NamedSharding) -> DTensor:
    """Copy this rank's part of a full tensor."""
    sharding = sharding.simplified()
    return placed(own_part(x, sharding), sharding, sharding.shape_at_rest(tuple(x.shape)))


@public
def unshard(values: Tree, *, source: Any = None) -> Tree:
    """Gather every leaf of a tree into a plain tensor on every rank of its mesh. Collective.

    Unlike `DTensor.full_tensor()` it also gathers leaves that are owned by pipeline stages or fused over `tp`.

    Args:
        values: A DTensor, a tree of them, or a `TrainState`; other leaves are kept as they are. An unsharded state is
            only for reading: no function accepts it.
        source: Layout of `Local` leaves, as in `reshard`.

    Returns:
        The same tree with plain tensors of the global shapes, on the device of the mesh.

    Raises:
        LayoutError: Leaves are unreduced, or don't match `source`; all are listed.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.arange(4.0)}, layout)
        >>> fs.unshard(params["w"])
        tensor([0., 1., 2., 3.])
        >>> fs.unshard(params)
        {'w': tensor([0., 1., 2., 3.])}
    """
    flat, spec = tree.flatten(values)
    if isinstance(values, TrainState):
        check_state(values)
    known, _ = reshard_leaves.origins(values, source)
    targets = [
        NamedSharding(home_of(x).mesh if s is None else s.mesh) if isinstance(x, DTensor) else None
        for x, s in zip(flat, known, strict=True)
    ]
    moved, rebuild = reshard_leaves.of_tree(values, tree.unflatten(spec, targets), source, asks=True)
    replicated = _run(moved, rebuild)
    return tree.map(lambda x: x.to_local() if isinstance(x, DTensor) else x, replicated)


# ---------------------------------------------------------------------------------------------------------- explanation


@dataclass(frozen=True)
class Explanation:
    """The plan of a reshard; prints as a table."""

    paths: tuple[str, ...]  # of the leaves
    types: tuple[LeafType, ...]  # shape and dtype as sent
    plan: Plan
    rank: int  # whose bytes are shown

    @property
    def rows(self) -> list[tuple[str, str, str, str, str, int, int]]:
        """Rows of path, type, from, to, how (such as "all-to-all"), bytes sent by `rank`, bytes sent by all ranks."""
        result: list[tuple[str, str, str, str, str, int, int]] = []
        for i, (path, kind) in enumerate(zip(self.paths, self.types, strict=True)):
            leaf = self.plan.leaves[i]
            sent = self.plan.sent[i]
            here, there = (f"{s} on {abstract(s.mesh)}" for s in (leaf.source, leaf.target))
            result.append((path, str(kind), here, there, self.plan.how(i), sent.get(self.rank, 0), sum(sent.values())))
        return result

    @property
    def sent(self) -> int:
        """Bytes that `rank` sends to others."""
        return sum(row[5] for row in self.rows)

    @property
    def total(self) -> int:
        """Bytes that all ranks send together."""
        return sum(row[6] for row in self.rows)

    def __str__(self) -> str:
        head = ("leaf", "type", "from", "to", "how", f"sent by rank {self.rank}", "sent in all")
        table = [head, *(tuple(f"{x:,}" if isinstance(x, int) else x for x in row) for row in self.rows)]
        total = f"{self.sent:,}", f"{self.total:,}"
        leaves, rounds = len(self.paths), len(self.plan.rounds)
        texts = f"{leaves} {'leaf' if leaves == 1 else 'leaves'}", f"{rounds} {'round' if rounds == 1 else 'rounds'}"
        table.append((texts[0], "", "", "", texts[1], *total))
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [
            "  ".join(x.rjust(w) if i > 4 else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        ]
        return "\n".join(line.rstrip() for line in lines)


@public
def explain_reshard(a: Any, b: Any, *, rank: int | None = None, budget: int = BUDGET) -> Explanation:
    """Show what `reshard` would do to each leaf, and exactly how many bytes it would send. Nothing is sent.

    Args:
        a: A `TrainState`, a tree of DTensors, or a `Layout` for the parameters and main parameters of a state in it.
        b: New layout, as in `reshard`. Both layouts may be on abstract meshes.
        rank: Rank whose bytes are shown. Default: this process.
        budget: Bytes of buffers per rank, as in `reshard`.

    Returns:
        An `Explanation`; print it for a table.

    Raises:
        LayoutError: The leaves can't be moved, as in `reshard`.

    Example:
        >>> params = {"w": fs.random.normal(fs.random.key(0), (8, 4))}
        >>> meshes = [fs.AbstractMesh(("dp",), (size,)) for size in (2, 4)]
        >>> old, new = (fs.plan_layout(params, mesh, strategy=fs.zero(3)) for mesh in meshes)
        >>> print(fs.debug.explain_reshard(old, new))  # on rank 0
        leaf      type           from                to                  how         sent by rank 0  sent in all
        params.w  float32[8, 4]  P('dp') on {dp: 2}  P('dp') on {dp: 4}  all-to-all              32           96
        1 leaf                                                           1 round                 32           96
    """
    if isinstance(a, Layout):
        moved = reshard_leaves.of_layouts(a, b)
    else:
        moved, _ = (reshard_leaves.of_state if isinstance(a, TrainState) else reshard_leaves.of_tree)(a, b)
    plan = plan_routes(tuple(m.leaf for m in moved), budget)
    types = tuple(LeafType(m.shape, m.dtype) for m in moved)
    return Explanation(tuple(m.path for m in moved), types, plan, own_rank() if rank is None else rank)
