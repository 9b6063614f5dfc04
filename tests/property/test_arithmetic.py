"""The arithmetic under every move of bytes, on thousands of random cases: tilings, covers, chunk lists, torch's DCP planner in memory."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh

import fsharding as fs
from fsharding import boxes
from fsharding.checkpoint import dcp
from fsharding.checkpoint.leaves import staged
from fsharding.mesh import AbstractMesh
from fsharding.testing import Leaf, assert_bitwise_equal, local_part
from fsharding.testing import strategies as draws

FULL = settings.default.max_examples >= 500


def examples(few, many):
    """How many examples a law gets in `make test` and in `make test-full`."""
    return settings(max_examples=many if FULL else few)


@st.composite
def placed(draw, most=8):
    """A shape and a sharding of it."""
    shape, mesh = draw(draws.shapes()), draw(draws.meshes(most))
    return shape, draw(draws.shardings(shape, mesh))


@st.composite
def moves(draw):
    """A shape and two shardings of it, on two meshes that may have other axes and other numbers of ranks."""
    shape, source = draw(placed())
    return shape, source, draw(draws.shardings(shape, draw(draws.meshes())))


def holders(shape, sharding):
    """The boxes of each different part, with the first coordinate that holds it."""
    found: dict[Any, dict[str, int]] = {}
    for coord in sharding.mesh.coordinates():
        found.setdefault(sharding.boxes(shape, coord), coord)
    return found


# ------------------------------------------------------------------------------------------------------------- meshes
@examples(250, 6000)
@given(draws.meshes(24, subset_of=64))
def test_coordinates_and_ranks_are_inverse(mesh):
    ranks = mesh.ranks or tuple(range(mesh.size))
    assert [mesh.rank_at(coord) for coord in mesh.coordinates()] == list(ranks)
    assert [mesh.coordinate(i) for i in range(mesh.size)] == list(mesh.coordinates())
    assert math.prod(mesh.axis_size(axis) for axis in fs.mesh.AXES) == mesh.size


# ------------------------------------------------------------------------------------------------------------ tilings
@examples(500, 12000)
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


@examples(250, 6000)
@given(placed(24), st.data())
def test_renaming_the_order_of_a_mesh_moves_no_box(case, data):
    shape, sharding = case
    names = data.draw(st.permutations(sharding.mesh.names))
    other = AbstractMesh(tuple(names), tuple(sharding.mesh.axis_size(name) for name in names))
    for coord in sharding.mesh.coordinates():
        assert replace(sharding, mesh=other).boxes(shape, coord) == sharding.boxes(shape, coord)


# ------------------------------------------------------------------------------------------------------------- covers
@examples(500, 12000)
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
        yield staged(tuple(whole.shape), on_rank(sharding, position), local_part(whole, sharding, coord))


@examples(250, 7000)
@given(moves())
def test_chunk_lists_read_every_element_once(case):
    shape, source, target = case
    whole = torch.arange(math.prod(shape)).view(shape)
    kept = {offset: box for held in shards(whole, source) for offset, (box, _) in held.kept().items()}
    chunks = [dcp._chunk(box) for box in kept.values()]
    assert boxes.is_tiling(kept.values(), shape)
    saved: Any = type("Saved", (), {"chunks": chunks})()
    for held in shards(whole, target):
        wanted = [dcp._chunk(box) for box, _ in held.kept().values()]
        items = create_read_items_for_chunk_list("a", saved, wanted)
        assert sum(math.prod(item.lengths) for item in items) == held.local.numel()
        assert all(tuple(item.storage_index.offset) in kept for item in items)


@examples(250, 7000)
@given(moves(), st.sampled_from([torch.float32, torch.bool, torch.int64]))
def test_a_save_and_a_load_in_memory(case, dtype):
    shape, source, target = case
    whole = Leaf(shape, dtype).tensor()
    planners = [dcp._SavePlanner({"a": held}) for held in shards(whole, source)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner({}, is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    stored = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in plan.items:
            assert item.type == WriteItemType.SHARD and tuple(item.index.offset) not in stored
            stored[tuple(item.index.offset)] = planner.lookup_object(item.index)
    for held, coord in zip(shards(torch.zeros_like(whole), target), target.mesh.coordinates(), strict=True):
        loader = dcp._LoadPlanner({"a": held})
        loader.set_up_planner({"a": held.local}, metadata, is_coordinator=True)
        for item in loader.create_local_plan().items:
            chunk, into = stored[tuple(item.storage_index.offset)], loader.lookup_tensor(item.dest_index)
            for dim, length in enumerate(item.lengths):
                chunk = chunk.narrow(dim, item.storage_offsets[dim], length)
                into = into.narrow(dim, item.dest_offsets[dim], length)
            into.copy_(chunk)
        assert_bitwise_equal(held.local, local_part(whole, target, coord))
