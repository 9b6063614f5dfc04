"""Extents of a file, and buffers of a pool: whatever is taken and freed in which order, none overlaps one in use."""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fsharding.comm.buffer_pool import Pool
from fsharding.contrib.disk import _ALIGN, _Space
from tests.helpers import examples

PAGES = st.integers(1, 9).map(lambda pages: pages * _ALIGN)
LIMIT = 64 * _ALIGN


class Extents(RuleBasedStateMachine):
    """Extents never overlap, and room that was counted suffices."""

    def __init__(self):
        super().__init__()
        self.space, self.held = _Space(), {}

    def _take(self, size, limit):
        offset = self.space.take(size, limit)
        assert all(offset + size <= a or a + n <= offset for a, n in self.held.items())
        self.held[offset] = size

    @rule(size=PAGES)
    def take(self, size):
        self._take(size, LIMIT)

    @rule(data=st.data())
    def free(self, data):
        if self.held:
            offset = data.draw(st.sampled_from(sorted(self.held)))
            self.space.free(offset, self.held.pop(offset))

    @rule()
    def free_all(self):
        while self.held:
            self.space.free(*self.held.popitem())
        assert self.space.end == 0

    @rule()
    def join(self):
        self.space.join()
        assert self.space.end == max((a + n for a, n in self.held.items()), default=0)

    @rule(sizes=st.lists(PAGES, min_size=1, max_size=20))
    def counted_room_suffices(self, sizes):
        self.space.join()
        end = self.space.end + max(0, sum(sizes) - self.space.room(max(sizes)))
        for size in sizes:
            self._take(size, end)
        assert self.space.end <= end

    @invariant()
    def all_are_before_the_end(self):
        assert self.space.used == sum(self.held.values())
        assert all(a + n <= self.space.end for a, n in self.held.items())


class Buffers(RuleBasedStateMachine):
    """A buffer is not given again while any view of it lives, and its bytes are counted for its owner until then."""

    def __init__(self):
        super().__init__()
        self.pool, self.views, self.number = Pool(), {}, 0
        self.owners = [object(), object()]

    @rule(size=st.integers(1, 64), owner=st.sampled_from((None, 0, 1)))
    def take(self, size, owner):
        x = self.pool.take(size, torch.float32, torch.device("cpu"), None if owner is None else self.owners[owner])
        self.number += 1
        assert x.shape == (size,)
        # A view alone keeps the buffer.
        self.views[self.number] = x.fill_(self.number)[size // 2 :], owner

    @rule(data=st.data())
    def free(self, data):
        if self.views:
            del self.views[data.draw(st.sampled_from(sorted(self.views)))]

    @rule()
    def close(self):
        self.pool.close()
        self.views = {number: (x, None) for number, (x, _) in self.views.items()}

    @invariant()
    def views_keep_their_values(self):
        assert all(bool((x == number).all()) for number, (x, _) in self.views.items())

    @invariant()
    def bytes_are_those_of_owners(self):
        owned = {id(self.owners[owner]) for _, owner in self.views.values() if owner is not None}
        alive = self.pool.alive()
        assert {*alive} == owned
        assert all(n >= 4 for n in alive.values())


TestExtents, TestBuffers = Extents.TestCase, Buffers.TestCase
TestExtents.settings = TestBuffers.settings = examples(50, 1000)
