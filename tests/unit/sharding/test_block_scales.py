"""Where scales of blocks are: laws over shapes, cuts and owners."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import formats
from fsharding.optim.chunks import ChunkedLeaf
from fsharding.sharding import boxes
from fsharding.sharding.block_scales import has_codes, plan_scales
from fsharding.sharding.named_sharding import Assigned, NamedSharding
from fsharding.sharding.partition_spec import P
from tests.helpers import examples

MESH = fs.AbstractMesh(("pp", "dp", "tp"), (2, 3, 2))
COORDS = [dict(zip(MESH.names, c, strict=True)) for c in itertools.product(*map(range, MESH.sizes))]
FORMATS = [formats.MXFP8, formats.ROWWISE, formats.TENSORWISE, formats.Blocks(formats.E4M3, (4, 8))]


@st.composite
def leaves(draw):
    """A leaf of a stack, cut and owned in some way."""
    parts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 40)), sum(parts))
    axes = draw(st.permutations(["dp", "tp", None, None]))
    spec, assigned = list(axes[:3]), []
    if draw(st.booleans()):
        layers = [*range(shape[0])]
        cut = draw(st.integers(0, len(layers)))
        assigned.append(Assigned.indices("pp", 0, (layers[:cut], layers[cut:])))
    if "tp" not in spec and draw(st.booleans()):
        assigned.append(Assigned.parts("tp", 2, parts, 2))
    return NamedSharding(MESH, P(*spec), (), tuple(assigned)), shape


@given(leaves(), st.sampled_from(FORMATS), st.integers(1, 300))
@examples(40, 1000)
def test_scales_tile_the_blocks_and_cover_what_a_rank_has(leaf, format, limit):
    sharding, shape = leaf
    scales = plan_scales(sharding, shape, format)
    assert scales.shape == format.grid(shape)
    whole = [box for coord in COORDS for box in scales.sharding.boxes(scales.shape, coord)]
    assert boxes.is_tiling({box for box in whole if boxes.volume(box)}, scales.shape)
    block = format.sizes(shape)
    for coord in COORDS:
        grid, held = sharding.grid(shape, coord), scales.sharding.grid(scales.shape, coord)
        part = ChunkedLeaf("w", shape, block, grid, held, scales.shared, MESH)
        chunks = [*part.chunks(limit)]
        assert sum(boxes.volume(chunk.box) for chunk in chunks) == boxes.volume(
            boxes.full(sharding.local_shape(shape, coord))
        )
        indices = [[i for run in runs for i in range(*run)] for runs in held]
        for chunk in chunks:
            touched = [range(a // f, -(-b // f)) for (a, b), f in zip(chunk.box, (1, *block), strict=True)]
            seen = [i[place] for i, place in zip(indices, chunk.of_scales, strict=True)]
            assert seen == [*map(list, touched)], "the scales of a chunk are those of its blocks"
            assert boxes.volume(chunk.box) <= max(limit, block[0] * block[1])


def test_small_leaves_have_no_codes():
    assert has_codes((64, 64)) and not has_codes((63, 64)) and not has_codes((5000,))
