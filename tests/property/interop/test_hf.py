"""Leaves that are stacked, turned and made of parts, against the tensors of the other side put together by hand; codes in
boxes against those of the whole."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsharding import formats
from fsharding.foreign.coded_weights import SCALES, decoded
from fsharding.formats import codec
from fsharding.interop import hf
from fsharding.interop.hf.coding import Coding
from fsharding.interop.hf.naming import pieces_of, renumbered, untiled
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import LeafType


@st.composite
def leaves(draw):
    """A stack of leaves with parts along one of their dims, as it is, or with its last two dims swapped there.

    Its rows are numbered from 0 there, or have keys.
    """
    stack = draw(st.lists(st.integers(1, 2), max_size=2))
    rest = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(rest) - 1))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    rest[dim] = sum(sizes)
    turned = len(rest) > 1 and draw(st.booleans())
    keys = (
        draw(st.none() | st.permutations([0, 3, 7, "x"]).map(lambda keys: tuple(keys[: stack[0]]))) if stack else None
    )
    return stack, rest, dim, sizes, turned, keys


def there(x, pieces):
    """The tensors of the other side, each filled piece by piece from a leaf."""
    found = {}
    for piece in pieces:
        out = found.setdefault(piece.name, torch.full(piece.shape, -1.0))
        mine = x[tuple(slice(a, b) for a, b in piece.box)][(0,) * piece.lead]
        out[tuple(slice(a, b) for a, b in piece.there(piece.box))] = mine.mT if piece.transposed else mine
    return found


@given(leaves())
def test_parts_are_joined_here_and_cut_there_and_the_other_way(case):
    stack, rest, dim, sizes, turned, keys = case
    marks, make = ".".join(("{i}", "{j}")[: len(stack)]), hf.Transposed if turned else str
    shape, at = (*stack, *rest), len(stack) + dim
    x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    named = (lambda name: name) if keys is None else (lambda name: renumbered(name, keys))
    joined = named(hf.Joined(tuple(make(f"{marks}.{part}") for part in range(len(sizes)))))
    pieces = list(pieces_of(joined, shape, (at, sizes)))
    assert boxes.is_tiling([piece.box for piece in pieces], shape)
    names = {piece.name: [piece] for piece in pieces}
    assert len(names) == len(pieces) and not untiled(names)
    apart = there(x, pieces)
    fused = {}
    for number, part in enumerate(x.split(sizes, at)):
        section = named(hf.Section(make(f"{marks}.all"), number, sizes, at - len(shape)))
        for piece in pieces_of(section, part.shape):
            fused.setdefault(piece.name, []).append(piece)
            fused[f"{piece.name} filled"] = fused.get(f"{piece.name} filled", 0) + there(part, [piece])[piece.name] + 1
    for lead in torch.cartesian_prod(*map(torch.arange, stack)).reshape(-1, len(stack)).tolist() if stack else [[]]:
        mark, whole = ".".join(map(str, lead if keys is None else [keys[lead[0]], *lead[1:]])), x[tuple(lead)]
        for number, part in enumerate(whole.split(sizes, dim)):
            assert torch.equal(apart[f"{mark}.{number}"], part.mT if turned else part)
        assert not untiled({"": fused[f"{mark}.all"]})
        assert torch.equal(fused[f"{mark}.all filled"] - 1, whole.mT if turned else whole)


@st.composite
def cuts(draw):
    """A shape, a block, and boxes that tile the shape: a grid of cuts anywhere."""
    shape = (*draw(st.lists(st.integers(1, 2), max_size=1)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    block = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    runs = []
    for size in shape:
        ends = sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=2))})
        runs.append(tuple(itertools.pairwise(ends)))
    return shape, block, [box for box, _ in boxes.grid_boxes(tuple(runs))]


@given(cuts(), st.integers(0, 2**31))
def test_codes_of_boxes_are_those_of_the_whole_and_read_in_boxes_are_its_numbers(case, seed):
    shape, block, tiles = case
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-9, 9, shape, generator=generator)
    x = x * (torch.rand(shape, generator=generator) < 0.7)
    format = formats.Blocks(formats.E4M3, block)
    scales = codec.scales_of(codec.amaxes(x, block), format)
    whole = codec.encode(x, scales, format)
    coding = Coding(format)
    coding.add("w", shape)
    parts = [("w", box, x[tuple(slice(a, b) for a, b in box)]) for box in tiles]
    coding.measure(parts)
    coding.exchange(torch.device("cpu"))
    assert torch.equal(coding.scales("w"), scales.blocks) and not coding.not_finite()
    files = {"w": torch.empty(shape, dtype=torch.float8_e4m3fn), f"w{SCALES}": coding.scales("w")}
    for name, box, values in parts:
        files["w"][tuple(slice(a, b) for a, b in box)] = coding.codes(name, box, values)
    assert torch.equal(files["w"].view(torch.uint8), whole)

    def read(name, box, out):
        out.copy_(files[name][tuple(slice(a, b) for a, b in box)])

    leaves = {name: LeafType(tuple(x.shape), x.dtype) for name, x in files.items()}
    found, numbers = decoded(leaves, read, format)
    assert found == {"w": LeafType(shape, torch.float32)}
    wanted = codec.decode(whole, scales, format)
    for box in tiles:
        numbers("w", box, out := torch.empty(boxes.shape_of(box)))
        assert torch.equal(out, wanted[tuple(slice(a, b) for a, b in box)])
    # Rounding what has been rounded moves nothing, also not the scales.
    again = Coding(format)
    again.add("w", shape)
    again.measure([("w", boxes.full(shape), wanted)])
    assert torch.equal(again.scales("w"), scales.blocks)
    assert torch.equal(again.codes("w", boxes.full(shape), wanted).view(torch.uint8), whole)
