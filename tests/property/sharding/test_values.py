"""Laws of the values that everything is planned from: boxes, shardings, buckets, routes, draws, layouts. No process group."""

import contextlib
import itertools
import math
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import fsharding as fs
from fsharding import random
from fsharding.comm import bucket
from fsharding.comm.reduce import sum_rows
from fsharding.comm.steps import steps_of
from fsharding.mesh.abstract_mesh import AXES, DATA_AXES, AbstractMesh
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import Assigned, sharding_of
from fsharding.sharding.partition_spec import P
from fsharding.testing import assert_bitwise_equal
from fsharding.transforms.unit_plan import unreduced
from tests.helpers import Largest, counted_calls

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
STRATEGIES = st.builds(fs.hybrid, st.sampled_from([fs.zero(i) for i in range(4)]), params=st.booleans(), grads=st.booleans(), opt_state=st.booleans())  # fmt: skip


@st.composite
def meshes(draw, axes=AXES, most=24):
    """A few axes in any rank order, up to `most` ranks."""
    names, sizes = [], []
    for name in draw(st.permutations(axes)):
        size = draw(st.integers(1, 4))
        if size > 1 and math.prod(sizes) * size <= most:
            names.append(name)
            sizes.append(size)
    return AbstractMesh(tuple(names), tuple(sizes)) if names else AbstractMesh(("dp",), (1,))


@st.composite
def specs(draw, mesh, ndim):
    """Every axis cuts one dim or none, in any order."""
    cuts: list[list[str]] = [[] for _ in range(ndim + 1)]
    for axis in draw(st.permutations(mesh.names)):
        cuts[draw(st.integers(0, ndim))].append(axis)
    return P(*(tuple(cut) for cut in cuts[:ndim]))


@st.composite
def placed(draw):
    mesh, shape = draw(meshes()), draw(SHAPES)
    return mesh, shape, draw(specs(mesh, len(shape)))


def different(mesh, axes):
    """One coordinate for each combination along some axes."""
    sizes = [range(mesh.axis_size(axis)) for axis in axes]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*sizes)]


# ------------------------------------------------------------------------------------------------------------- boxes
@given(st.integers(0, 100), st.lists(st.integers(1, 5), max_size=4))
def test_nested_chunks_tile_and_agree_with_one_cut_about_the_longest(size, pieces):
    found = [
        boxes.nested_chunk(size, list(zip(pieces, index, strict=True)))
        for index in itertools.product(*(range(n) for n in pieces))
    ]
    assert boxes.is_tiling([((start, stop),) for start, stop in found], (size,))
    assert found == sorted(found)
    longest = max(stop - start for start, stop in found)
    assert longest == found[0][1] - found[0][0] == -(-size // math.prod(pieces))


@given(st.integers(0, 60), st.integers(1, 9))
def test_chunks_are_those_of_torch(size, pieces):
    lengths = [len(part) for part in torch.arange(size).chunk(pieces)] if size else []
    mine = [stop - start for start, stop in (boxes.chunk(size, pieces, i) for i in range(pieces))]
    assert mine == [*lengths, *[0] * (pieces - len(lengths))][:pieces] if size else mine == [0] * pieces


@given(placed())
def test_the_boxes_of_all_ranks_tile_the_leaf(case):
    mesh, shape, spec = case
    sharding = fs.NamedSharding(mesh, spec)
    used = tuple(axis for axis in mesh.names if axis in spec.all_axes)
    found = [sharding.box(shape, coord) for coord in different(mesh, used)]
    assert boxes.is_tiling(found, shape)
    for coord in mesh.coordinates():
        mine = sharding.box(shape, coord)
        assert mine == sharding.box(shape, {axis: coord[axis] for axis in used})
        assert sharding.local_shape(shape, coord) == boxes.shape_of(mine)
    assert sharding.simplified().box(shape, {}) == sharding.box(shape, {})


@given(placed(), st.data())
def test_a_finer_cut_stays_inside_the_coarser_one(case, data):
    mesh, shape, spec = case
    free = [axis for axis in mesh.names if axis not in spec.all_axes]
    if not free or not shape:
        return
    axis, dim = data.draw(st.sampled_from(free)), data.draw(st.integers(0, len(shape) - 1))
    finer = spec.replace(dim, (*spec.axes(dim), axis))
    for coord in mesh.coordinates():
        outer, inner = (fs.NamedSharding(mesh, s).box(shape, coord) for s in (spec, finer))
        assert not boxes.volume(inner) or boxes.intersect(outer, inner) == inner


@st.composite
def assigned(draw):
    """A leaf whose indices along one dim, or which as a whole, belong to explicit coordinates of an axis."""
    mesh = draw(meshes())
    axis = draw(st.sampled_from(mesh.names))
    others = AbstractMesh(
        tuple(a for a in mesh.names if a != axis), tuple(mesh.axis_size(a) for a in mesh.names if a != axis)
    )
    shape = draw(SHAPES)
    spec = draw(specs(others, len(shape)))
    owners = range(mesh.axis_size(axis))
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        of = [draw(st.sampled_from(owners)) for _ in range(shape[dim])]
        order = draw(st.permutations(range(shape[dim])))
        indices = tuple(tuple(i for i in order if of[i] == owner) for owner in owners)
        return mesh, shape, spec, Assigned.indices(axis, dim, indices)
    holder = draw(st.sampled_from(owners))
    return mesh, shape, spec, Assigned.whole(axis, (holder,), len(owners))


@given(assigned())
def test_explicit_assignments_tile_the_leaf(case):
    mesh, shape, spec, assignment = case
    sharding = fs.NamedSharding(mesh, spec, assigned=(assignment,))
    used = tuple(axis for axis in mesh.names if axis in spec.all_axes or axis == assignment.axis)
    held = {tuple(coord.items()): sharding.boxes(shape, coord) for coord in different(mesh, used)}
    assert boxes.is_tiling([box for found in held.values() for box in found], shape)
    for coord, found in held.items():
        local = sharding.local_shape(shape, dict(coord))
        assert math.prod(local) == sum(boxes.volume(box) for box in found)
        if assignment.dim is not None:
            order = [i for box in found for i in range(*box[assignment.dim])] if math.prod(shape) else []
            owned = [i for run in assignment.ranges[dict(coord)[assignment.axis]] for i in range(*run)]
            assert not order or order == owned[(first := owned.index(order[0])) : first + len(order)]


@given(st.lists(st.integers(0, 12), max_size=12))
def test_runs_join_neighbors_and_keep_the_order(indices):
    found = boxes.runs(indices)
    assert [i for start, stop in found for i in range(start, stop)] == indices
    assert all(a[1] != b[0] for a, b in itertools.pairwise(found))


@given(SHAPES, st.data())
def test_boxes_cut_tensors_where_they_say(shape, data):
    def box_of(limits):
        cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in limits]
        return tuple((a, b) for a, b in cuts)

    a, b = box_of(shape), box_of(shape)
    both = boxes.intersect(a, b)
    inside = torch.zeros(shape, dtype=torch.int64)
    inside[boxes.relative(a, boxes.full(shape))] += 1
    inside[boxes.relative(b, boxes.full(shape))] += 1
    assert int((inside == 2).sum()) == (0 if both is None else boxes.volume(both))
    if both is not None:
        part = torch.arange(math.prod(shape)).view(shape)
        through = part[boxes.relative(a, boxes.full(shape))][boxes.relative(both, a)]
        assert torch.equal(through, part[boxes.relative(both, boxes.full(shape))])


@given(SHAPES, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_what_is_no_tiling_is_told(shape, cuts):
    box = tuple((min(a, b, n), min(max(a, b), n)) for (a, b), n in zip(cuts, shape, strict=False))
    if len(box) < len(shape) or not boxes.volume(box):
        return
    whole = boxes.full(shape)
    assert boxes.is_tiling([box], shape) == (box == whole)
    assert not boxes.is_tiling([whole, box], shape)


# --------------------------------------------------------------------------------------------------------- shardings
def mesh_at(mesh, rank, names=None):
    """A DeviceMesh of a rank without a process group, with its dims in another order if asked."""
    grid = torch.arange(mesh.size).view(mesh.sizes)
    names = names or mesh.names
    grid = grid.permute([mesh.names.index(name) for name in names]).contiguous()
    return DeviceMesh("cpu", grid, mesh_dim_names=names, _init_backend=False, _rank=rank)


@given(placed())
def test_a_sharding_survives_being_a_dtensor(case):
    mesh, shape, spec = case
    sharding = fs.NamedSharding(mesh_at(mesh, 0), spec)
    x = sharding.to_dtensor(torch.zeros(sharding.local_shape(shape)), shape)
    assert tuple(x.shape) == shape
    assert sharding_of(x) == sharding
    assert fs.typeof(x) == fs.typeof(fs.Local(x.to_local(), sharding, shape))


@given(placed())
def test_boxes_are_those_of_torch(case):
    mesh, shape, spec = case
    names = fs.NamedSharding(mesh_at(mesh, 0), spec).device_mesh().mesh_dim_names
    assert sorted(names) == sorted(mesh.names)
    placements = fs.NamedSharding(mesh_at(mesh, 0), spec).placements()
    assert all(isinstance(p, Shard | Replicate) for p in placements)
    for position, coord in enumerate(mesh.coordinates()):
        local, offset = compute_local_shape_and_global_offset(shape, mesh_at(mesh, position, names), placements)
        box = fs.NamedSharding(mesh, spec).box(shape, coord)
        assert tuple(local) == boxes.shape_of(box)
        if boxes.volume(box):
            assert tuple(offset) == tuple(start for start, _ in box)


# ----------------------------------------------------------------------------------------------------------- buckets
@st.composite
def bucketed(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    leaves = []
    for shape in draw(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)):
        leaves.append((shape, draw(st.integers(0, len(shape) - 1))))
    return tuple(leaves), sizes


def numbered(leaves, dtype=torch.float32):
    """Whole leaves with a number of their own in each element."""
    count, result = 1, []
    for shape, _ in leaves:
        n = math.prod(shape)
        result.append(torch.arange(count, count + n).view(shape).to(dtype))
        count += n
    return result


@given(bucketed(), st.sampled_from([torch.float32, torch.float64, torch.int32]), st.booleans())
def test_copying_into_a_bucket_and_out_is_the_identity(case, dtype, strided):
    leaves, sizes = case
    plan = bucket.plan_bucket(leaves, sizes)
    whole = numbered(leaves, dtype)
    given_leaves = [x.mT.contiguous().mT if strided and x.ndim > 1 else x for x in whole]
    rows = torch.full((plan.members, plan.width), -1, dtype=dtype)
    bucket.copy_in(given_leaves, rows, plan.slots)
    out = bucket.fill(rows, bucket.whole_views(torch.full((plan.size,), -2, dtype=dtype), plan), plan)
    assert_bitwise_equal(out, whole)
    coords = itertools.product(*(range(n) for n in sizes))
    for member, coord in enumerate(coords):
        cut = list(zip(sizes, coord, strict=True))
        for piece, x, (shape, dim) in zip(bucket.piece_views(rows[member], plan, member), whole, leaves, strict=True):
            start, stop = boxes.nested_chunk(shape[dim], cut)
            assert_bitwise_equal(piece.contiguous(), x.narrow(dim, start, stop - start).contiguous())


@given(bucketed(), st.booleans(), st.data())
def test_pieces_that_are_there_are_not_copied(case, one_buffer, data):
    leaves, sizes = case
    plan = bucket.plan_bucket(leaves, sizes)
    there, whole = data.draw(st.integers(0, plan.members - 1)), numbered(leaves)
    rows = torch.empty(plan.members, plan.width)
    bucket.copy_in(whole, rows, plan.slots)
    rows[there] = torch.nan
    out = [torch.full_like(x, -1) for x in whole]
    for piece, x in zip(*(bucket.pieces_of(leaf, plan, there) for leaf in (out, whole)), strict=True):
        piece.copy_(x)
    filled = bucket.fill(rows if one_buffer else list(rows), out, plan, there=there)
    assert all(map(operator.is_, filled, out))
    assert_bitwise_equal(out, whole)


@st.composite
def cut_among_many(draw):
    """One leaf, the dim that is cut, and the sizes of the axes: of up to some hundred members, often unevenly."""
    shape = [draw(st.sampled_from([1, 3, 64])), draw(st.integers(0, 130)), draw(st.sampled_from([1, 2, 6]))]
    sizes = draw(st.one_of(st.tuples(st.integers(1, 150)), st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    return tuple(shape), draw(st.integers(0, 2)), tuple(sizes)


def member_by_member(whole, rows, plan, sizes, *, put_together):
    """A bucket as its definition has it: the piece of each member, in its row from where its leaf begins."""
    for member, coord in enumerate(itertools.product(*(range(n) for n in sizes))):
        for leaf, slot in zip(whole, plan.slots, strict=True):
            start, stop = boxes.nested_chunk(slot.shape[slot.dim], list(zip(sizes, coord, strict=True)))
            piece = leaf.narrow(slot.dim, start, stop - start)
            place = rows[member, slot.offset : slot.offset + piece.numel()].view(piece.shape)
            (piece if put_together else place).copy_(place if put_together else piece)


@given(cut_among_many(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.booleans(), st.data())
def test_buckets_of_many_members_are_those_of_their_definition(case, dtype, strided, data):
    shape, dim, sizes = case
    plan = bucket.plan_bucket(((shape, dim), ((7, 2), 0), (shape, 2 - dim)), sizes)
    assert all(len(slot.grids) <= 2 ** len(sizes) for slot in plan.slots)
    whole = numbered([(slot.shape, slot.dim) for slot in plan.slots], dtype)
    expected, rows = (torch.full((plan.members, plan.width), -1, dtype=dtype) for _ in range(2))
    member_by_member(whole, expected, plan, sizes, put_together=False)
    bucket.copy_in([x.mT.contiguous().mT if strided else x for x in whole], rows, plan.slots)
    assert_bitwise_equal(rows, expected)
    there = data.draw(st.one_of(st.none(), st.integers(0, plan.members - 1)))
    out, reference = ([torch.full_like(x, -2) for x in whole] for _ in range(2))
    bucket.fill(rows, out, plan, there=there)
    kept = [piece.clone() for piece in bucket.pieces_of(reference, plan, there)] if there is not None else []
    member_by_member(reference, rows, plan, sizes, put_together=True)
    for piece, x in zip(bucket.pieces_of(reference, plan, there) if kept else [], kept, strict=True):
        piece.copy_(x)
    assert_bitwise_equal(out, reference)


@given(bucketed())
def test_padding_is_less_than_one_row_a_leaf_a_rank(case):
    leaves, sizes = case
    plan = bucket.plan_bucket(leaves, sizes)
    most = sum(plan.members * math.prod(shape) // max(shape[dim], 1) for shape, dim in leaves)
    assert plan.members * plan.width <= sum(math.prod(shape) for shape, _ in leaves) + most
    assert plan.members == math.prod(sizes)
    slots = sorted((slot.start, slot.start + math.prod(slot.shape)) for slot in plan.slots)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(slots)) and slots[-1][1] <= plan.size


@given(bucketed(), st.data())
def test_a_leaf_without_a_gradient_counts_as_zeros(case, data):
    leaves, sizes = case
    plan = bucket.plan_bucket(leaves, sizes)
    whole = numbered(leaves)
    kept = [x if data.draw(st.booleans()) else None for x in whole]
    rows = torch.full((plan.members, plan.width), torch.nan)
    bucket.copy_in(kept, rows, plan.slots)
    out = bucket.fill(rows, bucket.whole_views(torch.empty(plan.size), plan), plan)
    assert_bitwise_equal(out, [torch.zeros_like(x) if k is None else x for x, k in zip(whole, kept, strict=True)])


# ------------------------------------------------------------------------------------------------------------ routes
def run_steps(steps, locals_, mesh):
    """Every rank takes the steps, with sums and copies done by hand."""
    coords = list(mesh.coordinates())
    for step in steps:
        groups: dict = {}
        for position, coord in enumerate(coords):
            key = tuple((name, c) for name, c in coord.items() if name not in step.axes)
            groups.setdefault(key, []).append((tuple(coord[axis] for axis in step.axes), position))
        after = list(locals_)
        for members in groups.values():
            members.sort()
            for place, (index, position) in enumerate(members):
                mine = [locals_[p] for _, p in members]
                cut = list(zip((mesh.axis_size(axis) for axis in step.axes), index, strict=True))
                assert members[place][1] == position
                x = sum(mine) if step.kind in ("sum", "scatter") else mine[place]
                if step.kind == "gather":
                    x = torch.cat(mine, step.dim)
                elif step.kind != "sum":
                    start, stop = boxes.nested_chunk(x.shape[step.dim], cut)
                    x = x.narrow(step.dim, start, stop - start)
                after[position] = x
        locals_ = after
    return locals_


def check_route(mesh, shape, source, target):
    """Terms that differ on every rank end as the cut of their sum over the axes that were closed."""
    steps = steps_of(source, target, shape).steps
    coords = list(mesh.coordinates())
    generator = torch.Generator().manual_seed(0)
    terms = {}

    def whole_of(coord):
        key = tuple(coord[axis] for axis in source.partial)
        if key not in terms:
            terms[key] = torch.randint(-50, 50, shape, generator=generator)
        return terms[key]

    def cut(x, sharding, coord):
        return x[tuple(slice(a, b) for a, b in sharding.box(shape, coord))]

    start = [cut(whole_of(coord), source, coord) for coord in coords]
    closed = [axis for axis in source.partial if axis not in target.partial]
    for found, coord in zip(run_steps(steps, start, mesh), coords, strict=True):
        total = sum(whole_of({**coord, **where}) for where in different(mesh, closed))
        assert_bitwise_equal(
            found.contiguous(), cut(total, target, coord).contiguous(), f"{source} -> {target}: {steps}"
        )
    leaf = steps_of(source, target, shape)
    assert leaf.steps == steps and leaf.received == target.local_shape(shape)
    for _ in steps:
        leaf = leaf.rest
    assert leaf.local == leaf.received and not leaf.steps, "the planned steps end in the target"


@given(st.data(), meshes(DATA_AXES), st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple))
def test_routes_end_in_the_target(data, mesh, shape):
    first, second = (data.draw(specs(mesh, len(shape))) for _ in range(2))
    open_axes = tuple(a for a in mesh.names if a not in first.all_axes and data.draw(st.booleans()))
    left = tuple(a for a in open_axes if a not in second.all_axes and data.draw(st.booleans()))
    check_route(mesh, shape, fs.NamedSharding(mesh, first, open_axes), fs.NamedSharding(mesh, second, left))


@given(meshes(), STRATEGIES, st.lists(st.integers(0, 6), max_size=2).map(tuple))
def test_routes_of_gradients_under_every_strategy(mesh, strategy, shape):
    layout = fs.plan_layout({"w": random.zeros(shape)}, mesh, strategy=strategy, tp="replicate")
    leaf = layout.leaves[0]
    raw = unreduced(leaf.params)
    check_route(mesh, shape, raw, leaf.grads)
    check_route(mesh, shape, leaf.grads, leaf.main)
    check_route(mesh, shape, raw, leaf.main)
    check_route(mesh, shape, leaf.main, leaf.params)
    check_route(mesh, shape, leaf.params, leaf.main)


# -------------------------------------------------------------------------------------------------------------- sums
def tree_sum(terms, dtype):
    """The balanced tree in words: the first half is the largest power of two that leaves something."""
    if len(terms) == 1:
        return terms[0].to(dtype)
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return tree_sum(terms[:half], dtype) + tree_sum(terms[half:], dtype)


@given(
    st.one_of(st.integers(1, 9), st.integers(10, 70)),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_rows_are_summed_in_a_balanced_tree(members, width, dtype, into, shuffled, donate, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(members, width, generator=generator) * 10 ** torch.randn(members, 1, generator=generator)).to(
        dtype
    )
    order = tuple(torch.randperm(members, generator=generator).tolist()) if shuffled else range(members)
    before, out = rows.clone(), torch.empty(width) if into else None
    apart = sum_rows(list(rows), order, torch.float32)
    total = sum_rows(rows, order, torch.float32, out=out, donate=donate)
    assert_bitwise_equal(total, tree_sum([before[i] for i in order], torch.float32))
    assert_bitwise_equal(apart, total, "of rows that lie apart")
    if not donate:
        assert_bitwise_equal(rows, before, "the rows that went in")
    assert out is None or total.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_are_summed_a_part_at_a_time(dtype):
    rows = torch.randn(5, 300_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Largest() as largest:
        total = sum_rows(rows, range(5), torch.float32)
    assert largest.elements < rows.numel()
    assert_bitwise_equal(total, tree_sum([*rows], torch.float32))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_a_sum_over_two_axes_is_the_sum_of_sums(major, minor, seed):
    rows = torch.randn(major * minor, 3, generator=torch.Generator().manual_seed(seed))
    once = sum_rows(rows, range(major * minor), torch.float32)
    inner = torch.stack([sum_rows(part, range(minor), torch.float32) for part in rows.view(major, minor, 3)])
    assert_bitwise_equal(sum_rows(inner, range(major), torch.float32), once)


# ------------------------------------------------------------------------------------------------------------- draws
@contextlib.contextmanager
def blocks_of(size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "BLOCK", size)
        yield


@given(
    st.integers(0, 2**64 - 1), SHAPES, DTYPES, st.sampled_from(["normal", "uniform", "full"]),
    st.sampled_from([1, 2, 7, 16, 64, random.BLOCK]), st.data(),
)  # fmt: skip
def test_a_slice_of_a_draw_is_the_slice_of_the_whole(seed, shape, dtype, kind, block, data):
    key = random.key(seed)
    draw = {
        "normal": lambda: random.normal(key, shape, std=0.5, mean=2.0, dtype=dtype),
        "uniform": lambda: random.uniform(key, shape, low=-1.0, high=3.0, dtype=dtype),
        "full": lambda: random.full(shape, 0.3, dtype=dtype),
    }[kind]()
    with blocks_of(block):
        whole = draw.tensor()
        assert tuple(whole.shape) == shape and whole.dtype == dtype
        cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        box = tuple((a, b) for a, b in cuts)
        assert_bitwise_equal(draw.slice(box), whole[boxes.relative(box, boxes.full(shape))].contiguous())
        assert_bitwise_equal(draw.tensor(), whole, "the same draw again")


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 64))
def test_no_two_blocks_of_a_draw_are_alike(rows, columns, block):
    with blocks_of(block):
        values = random.normal(random.key(1), (rows, columns)).tensor()
        assert len(values.unique()) == values.numel()
        assert [index for index, _ in random._blocks((rows, columns))] == list(
            range(len(list(random._blocks((rows, columns)))))
        )
        assert boxes.is_tiling([box for _, box in random._blocks((rows, columns))], (rows, columns))


@given(st.integers(0, 2**64 - 1), st.integers(1, 50), st.lists(st.integers(0, 2**63 - 1), max_size=20, unique=True))
def test_derived_keys_are_all_different(seed, count, numbers):
    key = random.key(seed)
    found = [*random.split(key, count), *(random.fold_in(key, n) for n in numbers), key]
    grandchildren = [child for parent in random.split(key, 3) for child in random.split(parent, 3)]
    words = {tuple(k.tolist()) for k in [*found, *grandchildren]}
    assert len(words) == len(found) + len(grandchildren)
    assert all(0 <= word < 2**32 for pair in words for word in pair)
    assert_bitwise_equal(random.split(key, count), random.split(key, count + 5)[:count])


# ------------------------------------------------------------------------------------------------------------ layouts
HUGE = fs.models.DecoderConfig(
    vocab_size=128_256, dim=16384, layers=126, heads=128, kv_heads=8, intermediate_size=53248
)


@pytest.mark.parametrize("strategy", [fs.zero(1), fs.zero(3), fs.hybrid(opt_state=True)], ids=str)
def test_planning_a_huge_model_is_no_work_of_each_rank_and_allocates_nothing(strategy):
    mesh = AbstractMesh(("replica", "dp", "cp", "tp"), (4, 512, 2, 8))
    with Largest() as largest, counted_calls() as calls:
        layout = fs.plan_layout(fs.models.decoder(HUGE), mesh, strategy=strategy, precision=fs.BF16)
        memory = layout.memory(coord=mesh.coordinate(32767))
        text = str(layout)
    assert calls.count < 60_000, "the mesh has 32,768 ranks"
    assert largest.elements <= 32, "16 keys of two words are all that may be made"
    assert text.count("\n") == len(layout.leaves) and memory.total > 0
    assert hash(layout) == hash(fs.plan_layout(fs.models.decoder(HUGE), mesh, strategy=strategy, precision=fs.BF16))


@given(meshes(most=16), STRATEGIES, st.lists(SHAPES, min_size=1, max_size=3), st.sampled_from([fs.FP32, fs.BF16]))
def test_all_ranks_together_hold_a_cut_leaf_once(mesh, strategy, shapes, precision):
    leaves = [random.zeros(shape) for shape in shapes]
    layout = fs.plan_layout(leaves, mesh, strategy=strategy, precision=precision, tp="replicate")
    count = dict.fromkeys(("params", "grads", "main"), 0)
    for coord in mesh.coordinates():
        for leaf in layout.leaves:
            for kind in count:
                count[kind] += math.prod(getattr(leaf, kind).local_shape(leaf.shape, coord))
    for kind in count:
        want = 0
        for leaf in layout.leaves:
            cut = math.prod(mesh.axis_size(a) for a in getattr(leaf, kind).spec.all_axes)
            want += math.prod(leaf.shape) * mesh.size // cut
        assert count[kind] == want
    first = layout.memory(coord={})
    assert all(layout.memory(coord=coord).total <= first.total for coord in mesh.coordinates()), (
        "the first rank has most"
    )


@given(meshes(most=16), STRATEGIES, STRATEGIES, st.lists(SHAPES, min_size=1, max_size=3))
def test_a_layout_is_a_value(mesh, one, other, shapes):
    values = [random.zeros(shape) for shape in shapes]
    layout = fs.plan_layout(values, mesh, strategy=one, tp="replicate")
    assert layout.with_strategy(other).with_strategy(one) == layout
    assert layout.with_strategy(other) == fs.plan_layout(values, mesh, strategy=other, tp="replicate")
    assert hash(layout.with_strategy(one)) == hash(layout)
    for leaf in layout.leaves:
        for kind in ("params", "grads", "main"):
            assert len(getattr(leaf, kind).spec) <= len(leaf.shape)
        assert not leaf.params.partial and not leaf.main.partial
