"""Terms that travel as codes: whatever the shapes, cuts and formats, sums are those of terms that were rounded whole."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fsharding import formats
from fsharding.comm import coded_sums
from fsharding.comm.coded_sums import quantized_terms
from fsharding.comm.handles import Handle
from fsharding.comm.native import RowSum
from fsharding.comm.reduce import sum_rows
from fsharding.formats import E2M1, E4M3, E5M2, Blocks, codec
from fsharding.mesh.device_mesh import Group
from tests.helpers import examples

FORMATS = [
    formats.TENSORWISE, formats.ROWWISE, formats.MXFP8, formats.NVFP4, formats.MXFP4, Blocks(E4M3, (3, 5)),
    Blocks(E5M2, (2, 4), "e8m0"), Blocks(E2M1, (4, 6), "float32"), Blocks(E2M1, (1, 3), "e4m3"),
]  # fmt: skip


class Table:
    """Rows between members that are threads of this process, each of which makes the same calls."""

    def __init__(self, members, stacked):
        self.barrier, self.posted, self.stacked = threading.Barrier(members, timeout=20), {}, stacked


class Seat:
    """A member's transport; a handle that is waited for has the rows of all."""

    def __init__(self, table, group):
        self.table, self.group, self.calls = table, group, 0

    def gather_rows(self, width, dtype, memory=None):
        return Posted(self, torch.empty(width, dtype=dtype), None)

    def all_to_all(self, width, dtype, memory=None):
        return Posted(self, torch.empty(self.group.size, width, dtype=dtype), self.group.index)


class Posted:
    def __init__(self, seat, own, row):
        self.seat, self.own, self.row, self.number = seat, own, row, seat.calls
        seat.calls += 1

    def start(self):
        self.seat.table.posted[self.number, self.seat.group.index] = self.own
        return Handle(self, lambda rows: rows)

    def is_ready(self):
        return True

    def wait(self, timeout=None):
        table, size = self.seat.table, self.seat.group.size
        table.barrier.wait()
        rows = [table.posted[self.number, m] for m in range(size)]
        rows = rows if self.row is None else [x[self.row] for x in rows]
        return torch.stack(rows) if table.stacked else rows

    def release(self, timeout=None):
        pass


def summed(plan, terms, order, *, stacked, into):
    """What each member gets of the terms of all: by member, then by leaf."""
    members = len(terms)
    table = Table(members, stacked)

    def run(member):
        seat = Seat(table, Group(tuple(range(members)), member, None, order))
        reduction = RowSum(plan, seat, torch.float32)
        reduction.add([*range(len(terms[member]))][::-1], terms[member][::-1])
        places = None
        if into:
            piece = member if plan.scatter else 0
            shapes = [s.piece_shape(piece) if plan.scatter else s.shape for s in plan.bucket.slots]
            places = [torch.full(shape, torch.nan) for shape in shapes]
        return reduction.start(lambda: places).wait()

    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(run, range(members)))


def rounded(x, format):
    """What the codes of a whole term stand for."""
    block = format.sizes(tuple(x.shape))
    amax = codec.amaxes(x, block)
    outer = None
    if format.has_outer:
        flat = amax.flatten(-2)
        outer = flat.amax(-1) if flat.shape[-1] else flat.new_zeros(x.shape[:-2])
    scales = codec.scales_of(amax, format, outer)
    return codec.decode(codec.encode(x, scales, format), scales, format)


@st.composite
def sums(draw):
    """Some leaves, how members cut them, and which term of which leaf there is."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=2).filter(lambda x: math.prod(x) <= 8))
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 3), max_size=1)) + draw(
            st.lists(st.integers(0, 20), min_size=2, max_size=2)
        )
        leaves.append((tuple(shape), draw(st.integers(0, len(shape) - 1))))
    return tuple(leaves), tuple(sizes), draw(st.sampled_from(FORMATS)), draw(st.randoms(use_true_random=False))


def drawn_terms(leaves, members, random):
    noise = torch.Generator().manual_seed(random.randrange(1 << 30))
    return [
        [
            None if random.random() < 0.1 else (torch.randn(shape, generator=noise) * 10.0 ** random.randrange(-6, 6)).to(
                torch.bfloat16 if random.random() < 0.5 else torch.float32)
            for shape, _ in leaves
        ]
        for _ in range(members)
    ]  # fmt: skip


@examples(60, 240)
@given(sums(), st.booleans(), st.sampled_from([coded_sums._BLOCK, 1]))
def test_a_sum_is_that_of_terms_that_were_rounded_whole(case, scatter, wide_at_a_time):
    leaves, sizes, format, random = case
    members = math.prod(sizes)
    terms = drawn_terms(leaves, members, random)
    order = range(members) if random.random() < 0.5 else tuple(random.sample(range(members), members))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded_sums, "_BLOCK", wide_at_a_time)
        # With few elements all members add all terms; else each adds a piece, and gets the others.
        patch.setattr(coded_sums, "sums_at_once", lambda n, members: random.random() < 0.5)
        plan = quantized_terms.__wrapped__(leaves, sizes, format, scatter=scatter)
        found = summed(plan, terms, order, stacked=random.random() < 0.5, into=random.random() < 0.5)
    for i, (shape, dim) in enumerate(leaves):
        zeros = torch.zeros(shape)
        rows = [zeros if x[i] is None else rounded(x[i], format) for x in terms]
        want = sum_rows([x.reshape(-1) for x in rows], order, torch.float32).view(shape)
        for member, got in enumerate(found):
            piece = want
            if scatter:
                start, stop = plan.bucket.slots[i].piece(member)
                piece = want.narrow(dim, start, stop - start)
            assert torch.equal(got[i].contiguous().view(torch.int32), piece.contiguous().view(torch.int32)), (
                shape,
                dim,
                format,
            )


@given(st.integers(0, 1 << 30), st.sampled_from([(formats.MXFP8, 8), (Blocks(E4M3, (1, 32)), 28)]))
def test_an_error_is_a_share_of_the_largest_magnitude(seed, case):
    format, share = case
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=noise) * 2.0 ** torch.randint(-60, 60, (64, 1), generator=noise)
    error = (rounded(x, format) - x).abs().amax(1)
    assert (error <= x.abs().amax(1) / share * (1 + 1e-6)).all()


@given(sums())
@example(((((7, 40), 1),), (3,), formats.MXFP8, None))
def test_no_cut_goes_through_a_block_whose_scale_is_sent(case):
    leaves, sizes, format, _ = case
    plan = quantized_terms(leaves, sizes, format, scatter=True)
    for (shape, dim), term, slot in zip(leaves, plan.terms, plan.bucket.slots, strict=True):
        for place in (0, 1):
            size, inner = shape[len(shape) - 2 + place], term.sent[place]
            inside = term.block[place] % inner == 0 or term.block[place] >= size
            assert inner >= 1 and inside, "the scale of a smaller block is that of one block"
            if dim == len(shape) - 2 + place:
                cuts = {slot.piece(m)[0] for m in range(math.prod(sizes))} - {size}
                assert all(cut % inner == 0 for cut in cuts)
            else:
                assert inner == term.block[place]


def test_pieces_of_whole_blocks_have_no_more_scales_than_blocks():
    shape = (128, 96)
    for dim in (0, 1):
        for format in (formats.MXFP8, formats.MXFP4, formats.ROWWISE):
            if format is formats.ROWWISE and dim == 1:
                continue
            for members in (2, 4) if dim == 0 else (3,):
                plan = quantized_terms(((shape, dim),), (members,), format, scatter=True)
                assert plan.sent.width * members == format.bytes(shape)
    assert quantized_terms(((shape, 1),), (2,), formats.MXFP8, scatter=True).terms[0].sent == (1, 16)
    assert quantized_terms(((shape, 0),), (2,), formats.TENSORWISE, scatter=True).terms[0].sent == (64, 96)
    # Two codes share a byte where pieces are even.
    assert quantized_terms((((4, 12), 1),), (2,), formats.MXFP4, scatter=True).terms[0].packed
    assert not quantized_terms((((4, 6), 1),), (2,), formats.MXFP4, scatter=True).terms[0].packed
