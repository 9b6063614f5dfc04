"""The arithmetic under every move of bytes, on thousands of random cases: tilings, covers, chunk lists, torch's DCP planner in memory."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh

from fsharding.checkpoint.state_leaves import StateLeaf, shares
from fsharding.comm import reshard_plan
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.sharding import boxes
from fsharding.testing import Leaf, assert_bitwise_equal, local_part, strategies
from tests.helpers import examples


@st.composite
def placed(draw, most=8):
    """A shape and a sharding of it."""
    shape, mesh = draw(strategies.shapes()), draw(strategies.meshes(most))
    return shape, draw(strategies.shardings(shape, mesh))


@st.composite
def moves(draw):
    """A shape and two shardings of it, on two meshes that may have other axes and other numbers of ranks."""
    shape, source = draw(placed())
    return shape, source, draw(strategies.shardings(shape, draw(strategies.meshes())))


def holders(shape, sharding):
    """The boxes of each different part, with the first coordinate that holds it."""
    found: dict[Any, dict[str, int]] = {}
    for coord in sharding.mesh.coordinates():
        found.setdefault(sharding.boxes(shape, coord), coord)
    return found


# ------------------------------------------------------------------------------------------------------------- meshes
@examples(250, 1000)
@given(strategies.meshes(24, subset_of=64))
def test_coordinates_and_ranks_are_inverse(mesh):
    ranks = mesh.ranks or tuple(range(mesh.size))
    assert [mesh.rank_at(coord) for coord in mesh.coordinates()] == list(ranks)
    assert [mesh.coordinate(i) for i in range(mesh.size)] == list(mesh.coordinates())
    assert math.prod(mesh.axis_size(axis) for axis in AXES) == mesh.size


# ------------------------------------------------------------------------------------------------------------ tilings
@examples(450, 2000)
@given(placed(24))
def test_the_parts_of_a_sharding_tile_the_leaf_and_copies_count(case):
    shape, sharding = case
    held = holders(shape, sharding)
    assert boxes.is_tiling([box for part in held for box in part], shape)
    cut = math.prod(
        sharding.mesh.axis_size(axis) for axis in {*sharding.spec.all_axes, *(a.axis for a in sharding.assigned)}
    )
    every = [sharding.local_shape(shape, coord) for coord in sharding.mesh.coordinates()]
    assert sum(map(math.prod, every)) == math.prod(shape) * (sharding.mesh.size // cut)


@examples(250, 1000)
@given(placed(24), st.data())
def test_renaming_the_order_of_a_mesh_moves_no_box(case, data):
    shape, sharding = case
    names = data.draw(st.permutations(sharding.mesh.names))
    other = AbstractMesh(tuple(names), tuple(sharding.mesh.axis_size(name) for name in names))
    for coord in sharding.mesh.coordinates():
        assert replace(sharding, mesh=other).boxes(shape, coord) == sharding.boxes(shape, coord)


# ------------------------------------------------------------------------------------------------------------- covers
@examples(450, 2000)
@given(moves())
def test_what_the_source_holds_covers_each_target_box_once(case):
    shape, source, target = case
    held = [box for part in holders(shape, source) for box in part]
    for part in holders(shape, target):
        for box in part:
            pieces = [piece for other in held if (piece := boxes.intersect(box, other)) is not None]
            assert sum(map(boxes.volume, pieces)) == boxes.volume(box)
            assert all(boxes.intersect(a, b) is None for a, b in itertools.combinations(pieces, 2))


# ------------------------------------------------------------------------------------------------------ torch's planner
def on_rank(sharding, position):
    """The sharding as the rank at a position of its mesh sees it, without a process group."""
    mesh = sharding.mesh
    grid = torch.arange(mesh.size).view(mesh.sizes)
    here = DeviceMesh("cpu", grid, mesh_dim_names=mesh.names, _init_backend=False, _rank=position)
    return replace(sharding, mesh=here)


def shards(whole, sharding):
    """What each rank would hand to a checkpoint."""
    for position, coord in enumerate(sharding.mesh.coordinates()):
        yield StateLeaf(tuple(whole.shape), on_rank(sharding, position), local_part(whole, sharding, coord))


def chunk(box):
    """A box in torch's words."""
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(boxes.shape_of(box)))


def written(whole, source):
    """What each rank writes of a leaf: each box once, by a rank that holds it."""
    stored: dict[Any, Any] = {}
    held = list(shards(whole, source))
    writers = shares({"a": held[0]}, source.mesh.members)["a"]
    for rank, mine in zip(source.mesh.members, held, strict=True):
        for box, part in mine.kept().items():
            if writers[box] == rank:
                assert box not in stored
                stored[box] = part
    return stored


@examples(350, 1500)
@given(moves(), st.sampled_from([torch.float32, torch.bool, torch.int64]))
def test_a_save_and_a_load_by_torchs_planner(case, dtype):
    shape, source, target = case
    whole = Leaf(shape, dtype).tensor()
    stored = written(whole, source)
    assert boxes.is_tiling(stored, shape)
    saved = TensorStorageMetadata(TensorProperties(dtype), whole.shape, [chunk(box) for box in stored])
    corner = {tuple(start for start, _ in box): part for box, part in stored.items()}
    for held, coord in zip(shards(torch.zeros_like(whole), target), target.mesh.coordinates(), strict=True):
        kept = {tuple(start for start, _ in box): part for box, part in held.kept().items()}
        items = create_read_items_for_chunk_list("a", saved, [chunk(box) for box in held.kept()])
        assert sum(math.prod(item.lengths) for item in items) == held.local.numel()
        for item in items:
            from_, into = corner[tuple(item.storage_index.offset)], kept[tuple(item.dest_index.offset)]
            for dim, length in enumerate(item.lengths):
                from_ = from_.narrow(dim, item.storage_offsets[dim], length)
                into = into.narrow(dim, item.dest_offsets[dim], length)
            into.copy_(from_)
        assert_bitwise_equal(held.local, local_part(whole, target, coord))


# ------------------------------------------------------------------------------------------------------- routes
@examples(350, 1500)
@given(moves(), st.sampled_from([16, 64, 1 << 20]))
def test_a_plan_of_routes_fills_every_target_once(case, budget):
    """Runs a plan in one process: what a rank keeps, and all pieces, into counters of how often an element is written."""
    shape, source, target = case
    whole = torch.arange(math.prod(shape)).view(shape)
    leaf = reshard_plan.MovedLeaf(shape, 8, source, target)
    plan = reshard_plan.plan_routes((leaf,), budget)
    before, after = reshard_plan.grids(source, shape), reshard_plan.grids(target, shape)
    have = {rank: pick(whole, grid) for rank, grid in before.items()}
    got = {rank: torch.full(boxes.grid_shape(grid), -1) for rank, grid in after.items()}
    for rank in before.keys() & after.keys():
        shared = boxes.overlap(before[rank], after[rank])
        for a, b, _ in boxes.overlap_slices(shared) if shared is not None else ():
            got[rank][b] = have[rank][a]
    limit = max(budget // 4, 1)
    for pieces in plan.rounds:
        for way in ("source", "target"):
            for rank in {getattr(p, way) for p in pieces}:
                mine = [p.bytes for p in pieces if getattr(p, way) == rank]
                assert sum(mine) <= limit or len(mine) == 1
        for p in pieces:
            assert p.source != p.target and p.bytes == 8 * boxes.overlap_volume(p.overlap)
            for a, b, _ in boxes.overlap_slices(p.overlap):
                assert (got[p.target][b] == -1).all()
                got[p.target][b] = have[p.source][a]
    for rank, grid in after.items():
        assert torch.equal(got[rank], pick(whole, grid))
    new = sum(got[rank].numel() - shared_volume(before.get(rank), grid) for rank, grid in after.items())
    assert sum(plan.sent[0].values()) == 8 * new


def pick(whole, grid):
    """The local tensor of a grid."""
    out = torch.empty(boxes.grid_shape(grid), dtype=whole.dtype)
    for box, place in boxes.grid_boxes(grid):
        out[place] = whole[boxes.relative(box, boxes.full(tuple(whole.shape)))]
    return out


def shared_volume(a, b):
    """How many elements two grids share."""
    shared = None if a is None else boxes.overlap(a, b)
    return 0 if shared is None else boxes.overlap_volume(shared)
