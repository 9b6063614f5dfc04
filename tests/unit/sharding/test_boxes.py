"""Index boxes by example; their laws are in tests/property/sharding/test_values.py."""

import random

import pytest

from fsharding.sharding import boxes
from tests.helpers import counted_calls


@pytest.mark.parametrize(
    ("size", "pieces", "found"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_ceil_chunks(size, pieces, found):
    assert [boxes.chunk(size, pieces, i) for i in range(pieces)] == found


def test_nested_cuts_cut_what_is_left():
    assert boxes.nested_chunk(10, []) == (0, 10)
    # 10 in 4: 3, 3, 3, 1; the last of them in 2: 1 and nothing.
    assert boxes.nested_chunk(10, [(4, 1), (2, 0)]) == (3, 5)
    assert boxes.nested_chunk(10, [(4, 3), (2, 0)]) == (9, 10)
    assert boxes.nested_chunk(10, [(4, 3), (2, 1)]) == (10, 10)


def test_boxes_and_their_sizes():
    box = ((1, 3), (0, 4))
    assert boxes.full((3, 4)) == ((0, 3), (0, 4)) and boxes.full(()) == ()
    assert boxes.shape_of(box) == (2, 4) and boxes.volume(box) == 8 and boxes.volume(()) == 1
    assert boxes.relative(((2, 3), (1, 2)), box) == (slice(1, 2), slice(1, 2))


def test_intersections():
    assert boxes.intersect(((0, 3), (2, 5)), ((1, 9), (0, 3))) == ((1, 3), (2, 3))
    assert boxes.intersect(((0, 3),), ((3, 5),)) is None
    assert boxes.intersect((), ()) == ()
    with pytest.raises(ValueError, match="argument"):
        boxes.intersect(((0, 1),), ())


def test_runs():
    assert boxes.runs((0, 1, 4)) == ((0, 2), (4, 5))
    assert boxes.runs((3, 2, 1)) == ((3, 4), (2, 3), (1, 2))
    assert boxes.runs(()) == ()


def test_tilings():
    left, right = ((0, 2), (0, 3)), ((2, 4), (0, 3))
    assert boxes.is_tiling([left, right], (4, 3))
    assert boxes.is_tiling([right, left, ((4, 4), (0, 3))], (4, 3)), "empty boxes do not count"
    assert not boxes.is_tiling([left], (4, 3))
    assert not boxes.is_tiling([left, left], (4, 3)), "the right volume, but not everything once"
    assert not boxes.is_tiling([left, ((3, 5), (0, 3))], (4, 3)), "one lies partly outside"
    assert boxes.is_tiling([()], ()) and not boxes.is_tiling([], ()) and boxes.is_tiling([], (0, 3))


def test_boxes_that_share_an_element_are_found_however_they_were_cut():
    draw = random.Random(0)

    def cut(box, depth):
        """Boxes that tile one, by cuts through all of it."""
        sizes = boxes.shape_of(box)
        if depth == 0 or max(sizes) < 2:
            return [box]
        dim = draw.choice([d for d, size in enumerate(sizes) if size > 1])
        at = draw.randrange(box[dim][0] + 1, box[dim][1])
        halves = [(*box[:dim], side, *box[dim + 1 :]) for side in ((box[dim][0], at), (at, box[dim][1]))]
        return [part for half in halves for part in cut(half, depth - 1)]

    for _ in range(50):
        parts = cut(((0, 8), (0, 5), (0, 3)), 5)
        draw.shuffle(parts)
        assert boxes.is_tiling(parts, (8, 5, 3))
        grown = draw.randrange(len(parts))
        (start, stop), *rest = parts[grown]
        parts[grown] = ((start - 1 if start else start, stop if start else stop + 1), *rest)
        assert not boxes.is_tiling(parts, (8, 5, 3))
    pinwheel = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    assert boxes.is_tiling(pinwheel, (3, 3))
    assert not boxes.is_tiling([*pinwheel, ((1, 2), (1, 2))], (3, 3))
    assert not boxes.is_tiling([*pinwheel[:4], pinwheel[0]], (3, 3)), "one twice, one not at all"
    assert not boxes.is_tiling([(), ()], ())


def test_many_boxes_are_not_compared_with_each_other():
    rows = [((i, i + 1), (j, j + 1)) for i in range(100) for j in range(100)]
    with counted_calls() as calls:
        assert boxes.is_tiling(rows, (100, 100)) and not boxes.is_tiling([*rows[1:], ((50, 51), (50, 51))], (100, 100))
        assert not boxes.is_tiling([((0, 2), (0, 2))] * 5_000, (2, 10_000))
    assert calls.count < 2_000_000, "the number of boxes is 10,000, of pairs 50 million"


def test_crafted_boxes_of_many_dims_end_the_check():
    halves = [((0, 1),) * 64, ((1, 2),) * 64]
    assert not boxes.is_tiling(halves, (2,) * 64)
