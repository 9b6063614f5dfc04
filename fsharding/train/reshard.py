"""`reshard`: the same values in another layout, on any other mesh over the same ranks or some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from fsharding.comm.leaf_memory import fill, on_device, to_memory
from fsharding.comm.reshard_plan import BUDGET, Plan, plan_routes
from fsharding.comm.reshard_run import exchange
from fsharding.comm.tier_room import take_room
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import gather_numbers
from fsharding.mesh.device_mesh import Group, Mesh, abstract, axis_group, is_member, own_rank, world_size
from fsharding.mesh.failures import naming_lost
from fsharding.mesh.meeting import meet
from fsharding.optim.base import GradientTransformation
from fsharding.sharding import boxes
from fsharding.sharding.layout import Layout, check_fit
from fsharding.sharding.named_sharding import LeafType, Local, NamedSharding, home_of, typeof
from fsharding.train import reshard_leaves
from fsharding.train.first_values import Sync, same_values
from fsharding.train.reshard_leaves import Moving
from fsharding.train.state import TrainState, refrozen, sealed
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
    """Moves values to another layout. Collective over the ranks of both meshes.

    The meshes may differ in axes, sizes, order and ranks. If no one mesh has all ranks that take part, every rank of
    the default process group has to call. A rank holds nothing of what is on a mesh without it; plain tensors of a
    state, such as step and key, come to all ranks of both meshes.

    Args:
        tree_or_state: a `TrainState`, or a tree of DTensors and `Local`s; other leaves stay as they are.
        layout: for a state a `Layout` of the same model, whatever its mesh, strategy, stages and compute dtype. For a
            tree a `Layout`, which stands for its `params`, or a tree of `NamedSharding`s, or one for all leaves; None
            leaves a leaf alone.
        donate: free each source tensor after its last piece was sent. A donated state raises `DonatedError` when it is
            used again, donated DTensors of a tree are empty.
        source: the `Layout`, or tree of `NamedSharding`s, in which a tree is. Leaves at rest know it themselves; only
            `Local` leaves of pipeline stages, and of `Fused` dims, need it. A state carries its layout.
        budget: bytes a rank for buffers. Besides the old and the new values no more memory is needed.
        opt: of a state, where the layout has other leaves frozen: the optimizer, whose `init` makes the moments of
            leaves that are trained from here on. Leaves that are trained in both keep their moments.

    Returns:
        The same state or tree in the new layout, in new memory unless donated.

    Raises:
        LayoutError: another model, another main dtype, an unreduced leaf, one with unknown owners, leaves that
            are not what the state's layout says, an abstract mesh, or ranks that ask for different things; all such
            leaves are listed, and nothing has changed.
        TreeError: the trees do not match.
        DonatedError: the state was donated before.
        RankError: a rank is gone, or does not call it.

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
        # With an optimizer it is another state, and the caller's stays.
        freed = tree_or_state if donate and opt is None else None
        take_room(layout, [(m.target, m.shape, m.dtype) for m in moved], freed)
    else:
        sizes = _sizes(tree_or_state) if source is None else None
        moved, rebuild = reshard_leaves.of_tree(tree_or_state, layout, source, sizes=sizes)
    result = _run(moved, rebuild, given=tree_or_state if donate else None, budget=budget)
    return sealed(result) if isinstance(result, TrainState) else result


def _run(moved: list[Moving], rebuild: reshard_leaves.Rebuild, *, given: Tree = None, budget: int = BUDGET) -> Any:
    """Moves leaves, whose values are taken away from `given`, if that is donated, and puts the tree together again."""
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
            # From here on `sources` alone keeps a tensor, and `exchange` drops each after its last piece was sent.
            for m in moved:
                m.value = None
            _give_up(given)
        donate = given is not None
        values = exchange(plan, sources, dtypes, rank=own_rank(), group=group, device=device, donate=donate)
        return rebuild([x.cpu() if m.plain else to_memory(x, m.target) for m, x in zip(moved, values, strict=True)])


def _give_up(tree_or_state: Tree) -> None:
    """Invalidate the donated state or tree."""
    if isinstance(tree_or_state, TrainState):
        tree_or_state.donate()
        return
    for leaf in tree.leaves(tree_or_state):
        if isinstance(leaf, DTensor):
            _compat.drop_local(leaf)


def _group(meshes: Sequence[Mesh], ranks: tuple[int, ...]) -> Group | None:
    """The group of the mesh that has all ranks, None outside it; else the group of all ranks there are."""
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
    """Check that all ranks have the same plan; with different ones they would deadlock or misread bytes."""
    if group.process_group is None:
        return
    if group.size == world_size():
        digests = meet(plan.digest)
    else:
        digests = gather_numbers(plan.digest, group.size, group.process_group, device.type)
    others = [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != plan.digest]
    if others:
        text = f"is asked for different things on different ranks: rank {own_rank()} and ranks {others} differ."
        raise LayoutError(message(text, mend="Give every rank the same tree, layout and budget."))


@public
def shard(values: Tree, layout: Any, *, sync: Sync | None = None) -> Tree:
    """Shard full tensors, the same on every rank, as DTensors. Collective over the ranks of the mesh.

    Ranks compare a hash of all values, and send none of them unless `sync` is given.

    Args:
        values: a tree of plain tensors, the same on every rank.
        layout: a `Layout`, for its params, or a tree of `NamedSharding`s, or one for all leaves.
        sync: None refuses values that differ between ranks. "rank0" sends the values of the first rank of the mesh to
            all, leaf by leaf; other ranks need only the shapes and dtypes, such as tensors on the meta device.

    Returns:
        DTensors in new memory, in the dtype of the values.

    Raises:
        ArgumentError: another `sync`.
        ConfigError: on every rank: ranks have different values; all such leaves are listed.
        LayoutError: shapes that differ from the layout's, or leaves that are sharded already; all of them are listed.
        TreeError: the trees do not match.

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
    cut = [x is not None and isinstance(x, DTensor | Local) for x in flat]
    if any(cut):
        named = zip(tree.paths(values), flat, cut, strict=True)
        rows = [f"{path} is {typeof(x)} already" for path, x, is_cut in named if is_cut]
        raise LayoutError(message("cuts whole tensors.", rows, "Move these with fs.reshard."))
    if isinstance(layout, Layout):
        check_fit(layout, flat, ((leaf.shape, None) for leaf in layout.leaves))
    for x, s in zip(flat, targets, strict=True):
        if s is not None:
            s.local_shape(tuple(x.shape))  # refuses a spec of more dims before ranks compare anything
    whole = _agreed(dict(zip(tree.paths(values), zip(flat, targets, strict=True), strict=True)), sync)
    return tree.unflatten(
        spec, [x if s is None else _cut(whole[s.mesh](x), s.simplified()) for x, s in zip(flat, targets, strict=True)]
    )


def _agreed(named: dict[str, tuple[Any, NamedSharding | None]], sync: Sync | None) -> dict[Mesh, Callable[[Any], Any]]:
    """By mesh, what `same_values` returns for the tensors that go there. Terms of a sum may differ between ranks."""
    meshes = dict.fromkeys(s.mesh for _, s in named.values() if s is not None)
    compared = [(path, x, s.mesh) for path, (x, s) in named.items() if s is not None and not s.partial]
    return {mesh: same_values({path: x for path, x, where in compared if where == mesh}, mesh, sync) for mesh in meshes}


def _cut(x: Tensor, sharding: NamedSharding) -> DTensor:
    shape = tuple(x.shape)
    local = fill(sharding, sharding.local_shape(shape), x.dtype)
    grid = sharding.grid(shape)
    for box, place in () if grid is None else boxes.grid_boxes(grid):
        local[place] = x[boxes.relative(box, boxes.full(shape))]
    return sharding.to_dtensor(to_memory(local, sharding), shape)


@public
def unshard(values: Tree, *, source: Any = None) -> Tree:
    """Gather a leaf, or every leaf of a tree, into a plain tensor on every rank of its mesh. Collective.

    Use it instead of `DTensor.full_tensor()`, which cannot gather leaves that are owned by pipeline stages or fused
    over `tp`, and refuses them.

    Args:
        values: a DTensor, a tree of them, or a `TrainState`; other leaves stay as they are. An unsharded state is for
            reading: no function accepts it as a state in its layout.
        source: as in `reshard`; leaves at rest do not need it.

    Returns:
        The same tree with plain tensors of the global shapes.

    Raises:
        LayoutError: leaves that are unreduced, or are not in `source`; all of them are listed.

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
    sizes = None if source is not None or isinstance(values, TrainState) else _sizes(values)
    targets = tree.unflatten(spec, targets)
    moved, rebuild = reshard_leaves.of_tree(values, targets, source, sizes=sizes)
    whole = _run(moved, rebuild)
    return tree.map(lambda x: x.to_local() if isinstance(x, DTensor) else x, whole)


def _sizes(values: Tree) -> list[tuple[int, ...] | None] | None:
    """The global shapes of leaves that some stages lack; None if there is no such leaf. Collective."""
    staged = [x for x in tree.leaves(values) if isinstance(x, DTensor) and reshard_leaves.is_staged(x)]
    if not staged:
        return None
    with naming_lost(public_name(), home_of(staged[0]).mesh):
        return reshard_leaves.sizes_of_staged(values)


# ------------------------------------------------------------------------------------------------------------- in words


@dataclass(frozen=True)
class Explanation:
    """The plan of a reshard; prints as a table."""

    paths: tuple[str, ...]  # of the leaves
    types: tuple[LeafType, ...]  # shape and dtype of each on the wire
    plan: Plan  # what moves
    rank: int  # whose bytes are "sent here"

    @property
    def rows(self) -> list[tuple[str, str, str, str, str, int, int]]:
        """By leaf: path, type, from, to, how ("nothing", "slice", "gather", "all-to-all"), bytes sent here, in all."""
        result: list[tuple[str, str, str, str, str, int, int]] = []
        for i, (path, kind) in enumerate(zip(self.paths, self.types, strict=True)):
            leaf = self.plan.leaves[i]
            sent = self.plan.sent[i]
            here, there = (f"{s} on {abstract(s.mesh)}" for s in (leaf.source, leaf.target))
            result.append((path, str(kind), here, there, self.plan.how(i), sent.get(self.rank, 0), sum(sent.values())))
        return result

    @property
    def sent(self) -> int:
        """Bytes that this rank sends to others."""
        return sum(row[5] for row in self.rows)

    @property
    def total(self) -> int:
        """Bytes that all ranks send."""
        return sum(row[6] for row in self.rows)

    def __str__(self) -> str:
        head = ("leaf", "type", "from", "to", "how", f"sent by rank {self.rank}", "sent in all")
        table = [head, *(tuple(f"{x:,}" if isinstance(x, int) else x for x in row) for row in self.rows)]
        total = f"{self.sent:,}", f"{self.total:,}"
        table.append((f"{len(self.paths)} leaves", "", "", "", f"{len(self.plan.rounds)} rounds", *total))
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = [
            "  ".join(x.rjust(w) if i > 4 else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
            for row in table
        ]
        return "\n".join(line.rstrip() for line in lines)


@public
def explain_reshard(a: Any, b: Any, *, rank: int | None = None, budget: int = BUDGET) -> Explanation:
    """Show what `reshard` would do, leaf by leaf, and exactly how many bytes it would send.

    Args:
        a: a `TrainState`; a `Layout`, for the parameters and main copies of a state in it; or a tree of DTensors.
        b: where it would go, as in `reshard`. Layouts may be on abstract meshes: nothing is moved or communicated.
        rank: whose bytes to show; by default this process's.
        budget: as in `reshard`.

    Raises:
        LayoutError: as `reshard`.

    Example:
        >>> params = {"w": fs.random.normal(fs.random.key(0), (8, 4))}
        >>> meshes = [fs.AbstractMesh(("dp",), (size,)) for size in (2, 4)]
        >>> old, new = (fs.plan_layout(params, mesh, strategy=fs.zero(3)) for mesh in meshes)
        >>> print(fs.debug.explain_reshard(old, new))  # on rank 0
        leaf      type           from                to                  how         sent by rank 0  sent in all
        params.w  float32[8, 4]  P('dp') on {dp: 2}  P('dp') on {dp: 4}  all-to-all              32           96
        1 leaves                                                         1 rounds                32           96
    """
    moved = _moved(a, b)
    plan = plan_routes(tuple(m.leaf for m in moved), budget)
    types = tuple(LeafType(m.shape, m.dtype) for m in moved)
    return Explanation(tuple(m.path for m in moved), types, plan, own_rank() if rank is None else rank)


def _moved(a: Any, b: Any) -> list[Moving]:
    if isinstance(a, TrainState):
        return reshard_leaves.of_state(a, b)[0]
    if isinstance(a, Layout):
        return reshard_leaves.of_layouts(a, b)
    return reshard_leaves.of_tree(a, b)[0]
