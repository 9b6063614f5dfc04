"""Extents of a file never overlap, whatever is freed and joined, and room that was counted suffices."""

from hypothesis import given
from hypothesis import strategies as st

from fsharding.comm.disk import _ALIGN, _Space
from tests.helpers import examples

SIZES = st.integers(1, 9).map(lambda pages: pages * _ALIGN)
LIMIT = 64 * _ALIGN


@given(data=st.data())
@examples(100, 2000)
def test_extents_do_not_overlap_and_counted_room_suffices(data):
    space, held = _Space(), {}
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(("take", "take", "free", "join", "count")))
        if action == "take":
            size = data.draw(SIZES)
            offset = space.take(size, LIMIT)
            assert all(offset + size <= a or a + n <= offset for a, n in held.items())
            assert offset + size <= space.end
            held[offset] = size
        elif action == "free" and held:
            offset = data.draw(st.sampled_from(sorted(held)))
            space.free(offset, held.pop(offset))
        elif action == "join":
            space.join()
            assert space.end == max((a + n for a, n in held.items()), default=0)
        else:
            space.join()
            sizes = data.draw(st.lists(SIZES, min_size=1, max_size=20))
            end = space.end + max(0, sum(sizes) - space.room(max(sizes)))
            for size in sizes:
                held[space.take(size, end)] = size
            assert space.end <= end
