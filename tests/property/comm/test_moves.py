"""The algebra of moves on ranks: whatever the route, the wire and the transport, a leaf is what plain torch computes."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.comm.codes import Quantizing
from fsharding.comm.handles import Memory
from fsharding.comm.move import plan_move
from fsharding.comm.wires import Plain
from fsharding.formats import codec
from fsharding.mesh.device_mesh import coordinate
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.transforms.unit_plan import whole
from tests.helpers import TRANSPORTS, slow

CPU = torch.device("cpu")
AXES = ("dp", "cp")
OPEN = "unreduced"
SHAPES = [(5, 3), (1, 4), (3, 0)]
"""Uneven, smaller than an axis, and empty."""


def shardings(mesh, places):
    """All shardings of a matrix whose axes are each in one of some places."""
    for dp, cp in itertools.product(places, repeat=2):
        left = tuple(axis for axis, place in zip(AXES, (dp, cp), strict=True) if place == OPEN)
        cuts = [tuple(axis for axis, place in zip(AXES, (dp, cp), strict=True) if place == dim) for dim in (0, 1)]
        yield fs.NamedSharding(mesh, fs.P(*cuts), partial=left)


def cut(x, sharding):
    return x[tuple(slice(start, stop) for start, stop in sharding.box(x.shape))].contiguous()


def numbers(shape, seed, dtype=torch.float32):
    """Whole numbers, of which no sum is rounded."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def term(shape, sharding, seed, where):
    """The full term of the rank of a coordinate: one that all ranks share along axes that are not unreduced."""
    mine = sum((1 + where[axis]) * 3**i for i, axis in enumerate(AXES) if axis in sharding.partial)
    return numbers(shape, 100 * seed + mine)


def summed(shape, source, target, seed):
    """What plain torch makes of all terms along the axes that are closed, of which this rank has its part."""
    here = coordinate(source.mesh)
    closed = [axis for axis in source.partial if axis not in target.partial]
    others = [{**here, **dict(zip(closed, at, strict=True))} for at in itertools.product((0, 1), repeat=len(closed))]
    return cut(sum(term(shape, source, seed, where) for where in others), target)


def every_route(transport):
    """Each pair of shardings directly, and by way of each third one."""
    mesh = fs.make_mesh(dp=2, cp=2, transport=transport)
    wire, checked = Plain(torch.float32), 0

    def moved(source, target, leaves):
        return plan_move([source] * len(SHAPES), [target] * len(SHAPES), SHAPES, wire, wire.dtype).run(leaves)

    for a, b in itertools.product(shardings(mesh, (None, 0, 1, OPEN)), repeat=2):
        if not {*b.partial} <= {*a.partial}:
            continue
        given = [cut(term(shape, a, i, coordinate(mesh)), a) for i, shape in enumerate(SHAPES)]
        middle = moved(a, b, [x.clone() for x in given])
        assert_bitwise_equal(middle, [summed(shape, a, b, i) for i, shape in enumerate(SHAPES)], f"{a} -> {b}")
        for c in shardings(mesh, (None, 0, 1)):
            found = moved(b, c, [x.clone() for x in middle])
            want = [summed(shape, a, c, i) for i, shape in enumerate(SHAPES)]
            assert_bitwise_equal(found, want, f"{a} -> {b} -> {c}")
            checked += 1
    return checked


@pytest.mark.parametrize("transport", [*(pytest.param(name, marks=slow) for name in TRANSPORTS[:2]), TRANSPORTS[2]])
def test_two_moves_are_one(transport):
    # Nine shardings are reduced, six have one open axis, one has two.
    pairs = 9 * 9 + 6 * (9 + 3) + 16
    assert run_ranks(every_route, 4, transport, timeout=100) == [9 * pairs] * 4


def one_by_one(transport):
    """Sums whose terms are added one by one, in another order, into given memory, or all at once."""
    mesh = fs.make_mesh(dp=2, cp=2, transport=transport)
    generator = torch.Generator().manual_seed(sum(coordinate(mesh).values()) + 7)
    wires = [Plain(torch.float32), Plain(torch.bfloat16), Quantizing(torch.float32, formats.MXFP8)]
    source = fs.NamedSharding(mesh, fs.P(), partial=AXES)
    for target, wire, large in itertools.product(shardings(mesh, (None, 0, 1, OPEN)), wires, (False, True)):
        leaves = [torch.randn(shape, generator=generator) for shape in SHAPES]
        move = replace(plan_move([source] * 3, [target] * 3, SHAPES, wire, torch.float32), large=large)
        results = []
        for order in ([[0, 1, 2]], [[2], [0], [1]]):
            filling = move.open(CPU)
            for some in order:
                filling.add(some, [leaves[i] for i in some])
            results.append(filling.start().wait())
        filling = move.open(CPU)
        filling.add([0, 1, 2], leaves)
        into = [torch.full_like(x, torch.nan) for x in results[0]]
        found = filling.start(functools.partial(list, into)).wait()
        assert_bitwise_equal(results[1], results[0], f"{target} by {wire}")
        assert_bitwise_equal(found, results[0], f"{target} by {wire}, into memory")


@pytest.mark.parametrize("transport", [*(pytest.param(name, marks=slow) for name in TRANSPORTS[:2]), TRANSPORTS[2]])
def test_a_sum_one_by_one_is_the_sum_at_once(transport):
    run_ranks(one_by_one, 4, transport, timeout=100)


FORMATS = {
    "tensor": formats.TENSORWISE, "rows": formats.ROWWISE, "mx": formats.MXFP8, "nvfp4": formats.NVFP4,
    "mx across": formats.MXFP8.across((32, 32)),
}  # fmt: skip


def decoded(leaf):
    return leaf if isinstance(leaf, torch.Tensor) else fs.formats.dequantize(leaf)


def every_wire(transport):
    """Leaves that are gathered by each wire, to memory of a pool, of the caller, or of their own."""
    mesh = fs.make_mesh(dp=2, cp=2, transport=transport)
    shapes = [(33, 20), (3, 64)]
    full = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    formatted = {name: Quantizing(torch.bfloat16, f, s) for (name, f), s in itertools.product(FORMATS.items(), (0, 1))}
    plain = {str(dtype): Plain(dtype) for dtype in (torch.float32, torch.bfloat16)}
    one_dim = [s for s in shardings(mesh, (None, 0, 1)) if sum(bool(s.axes(dim)) for dim in (0, 1)) < 2]
    for (name, wire), source in itertools.product({**plain, **formatted}.items(), one_dim):
        move = plan_move([source] * 2, [whole(source)] * 2, shapes, wire, wire.dtype)
        shards = [cut(x, source) for x in full]
        format = getattr(wire, "format", None)
        want = [x.to(wire.dtype) if format is None else codec.decode(*codec.coded(x, format), format, wire.dtype)
                for x in full]  # fmt: skip
        results = [move.start(shards, Memory(CPU)).wait()]
        for leaf in results[0].leaves:
            parts = fs.tree.leaves(leaf)
            storages = {x.untyped_storage().data_ptr() for x in results[0].buffers}
            assert {x.untyped_storage().data_ptr() for x in parts if x.numel()} <= storages, "of known buffers"
        if not getattr(wire, "stays", False):
            into = [torch.full(shape, torch.nan, dtype=wire.dtype) for shape in shapes]
            results.append(move.start(shards, None, into).wait())
            assert all(x is home for x, home in zip(results[-1].leaves, into, strict=True)), name
            if move.axes:
                results.append(move.start(shards).wait())
        for found in results:
            assert_bitwise_equal([decoded(x) for x in found.leaves], want, f"{source} by {name}")


@pytest.mark.parametrize("transport", [*(pytest.param(name, marks=slow) for name in TRANSPORTS[:2]), TRANSPORTS[2]])
def test_what_is_encoded_gathered_and_decoded_is_the_full_leaf_rounded(transport):
    run_ranks(every_wire, 4, transport, timeout=100)
