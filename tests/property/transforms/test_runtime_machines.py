"""The queue of reductions and the saved tensors of a call, whatever happens in which order, beside a model in plain Python."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.handles import Handle, nowhere
from fsharding.comm.leaf_wires import LeafIndex
from fsharding.sharding.named_sharding import Local
from fsharding.transforms.grad_reducer import GradReducer, TapeLeaf
from fsharding.transforms.saved_tensors import SavedTensors
from fsharding.transforms.unit_plan import GradTarget, LargeLeaf, ReduceBucket
from tests.helpers import examples

CPU = torch.device("cpu")
SHAPE = ROWS, WIDTH = 3, 4
BUCKETS = ((0, 1), (2,), (3,))  # the leaves of a unit that are reduced together
SLOTS = {leaf: LargeLeaf(leaf, bucket, slot) for bucket, many in enumerate(BUCKETS) for slot, leaf in enumerate(many)}
NUMBERS = st.integers(-9, 9).map(float)  # sums of them are exact, in every order


class Sent:
    """A collective that is done when the machine says so. Until then only a reducer that may wait asks for its result."""

    def __init__(self, machine):
        self.machine, self.done = machine, False

    def is_ready(self):
        return self.done

    def wait(self, timeout=None):
        assert self.done or self.machine.may_wait, "a collective under way is waited for while backward computes"
        self.done = True

    def release(self, timeout=None):
        pass


class Bucket:
    """The terms of a bucket: one rank's sum of them is the terms themselves."""

    sends, memory = True, None

    def __init__(self, machine, count, shape, order):
        self.machine, self.shape, self.order, self.filled = machine, shape, order, set()
        self.terms = [torch.zeros(shape) for _ in range(count)]

    def slot(self, slot, dtype):
        return self.terms[slot] if dtype == torch.float32 else None

    def add(self, slots, terms):
        for slot, term in zip(slots, terms, strict=True):
            if term is not None:
                self.terms[slot].copy_(self.terms[slot] + term if slot in self.filled else term)
        self.filled.update(slots)

    def start(self, places=nowhere):
        sent = Sent(self.machine)
        self.machine.under_way.append(sent)
        number = len(self.order.started)
        self.order.started.append(number)

        def sums(_):
            self.order.finished.append(number)
            into = places()
            for to, term in zip(into or (), self.terms, strict=False):
                to.copy_(term)
            return self.terms if into is None else [*into]

        return Handle(sent, sums)


class Move:
    """One of the two moves of a bucket; an empty one starts nothing, and gives the terms as they are."""

    def __init__(self, machine, count, shape, order, *, is_empty=False):
        self.args, self.is_empty = (machine, count, shape, order), is_empty

    def open(self, device, memory, noise):
        return Bucket(*self.args)


class Use(NamedTuple):
    """A unit that forward used: its plan and its leaves."""

    plan: SimpleNamespace
    index: tuple[LeafIndex, ...]
    number: int
    name: str = "unit"

    def __hash__(self):
        return self.number


class Reductions(RuleBasedStateMachine):
    """Each term counts once, what was accumulated too, and buckets add their sums in the order of their start."""

    @initialize(
        accumulated=st.tuples(*[st.sampled_from(("elsewhere", "in place", "nothing"))] * len(BUCKETS)),
        parts=st.sampled_from(("rows", "both", "whole")),
        follows=st.booleans(),
    )
    def begin(self, accumulated, parts, follows):
        mesh = fs.make_mesh(device="cpu")
        home, other = fs.NamedSharding(mesh, fs.P()), fs.NamedSharding(mesh, fs.P(None, "dp"))
        self.accumulated = [accumulated[large.bucket] for large in SLOTS.values()]
        before = [{"nothing": None, "in place": home, "elsewhere": other}[place] for place in self.accumulated]
        first = [torch.full(SHAPE, 100.0 * (leaf + 1)) for leaf in SLOTS]
        self.given = [x.clone() if place else None for x, place in zip(first, before, strict=True)]
        self.want = [x if place else torch.zeros(SHAPE) for x, place in zip(first, before, strict=True)]
        self.parts = parts
        node = Local(torch.zeros(SHAPE), home, SHAPE)
        targets = [GradTarget(home, torch.float32, accumulated=place) for place in before]
        leaves = {leaf: TapeLeaf(f"w{leaf}", node, targets[leaf], self.given[leaf]) for leaf in SLOTS}
        self.reducer = GradReducer(leaves, Pool().memory(CPU))
        self.with_late = {leaves for leaves, place in zip(BUCKETS, accumulated, strict=True) if place == "elsewhere"}
        self.under_way, self.units, self.uses, self.may_wait = [], [], 0, False
        self.early, self.late = (SimpleNamespace(started=[], finished=[]) for _ in range(2))
        self.before_all = []
        if follows:
            self.reducer.follow(lambda: self.before_all.append(len(self.early.finished)))
        self.follows = follows

    @rule(row=st.integers(0, ROWS - 2), whole=st.booleans())
    def use(self, row, whole):
        """A unit: all leaves, or one row of each, but for the last one. A leaf may be in several units."""
        row = None if self.parts == "whole" or (self.parts == "both" and whole) else row
        shape = SHAPE if row is None else SHAPE[1:]
        moves = [
            ReduceBucket(
                leaves,
                Move(self, len(leaves), shape, self.early),
                Move(self, len(leaves), shape, self.late, is_empty=leaves not in self.with_late),
            )
            for leaves in BUCKETS
        ]
        index = tuple(LeafIndex(leaf, row) for leaf in SLOTS)
        self.uses += 1
        self.units.append((Use(SimpleNamespace(reductions=moves), index, self.uses), row))

    def _count(self, leaf, row, number):
        part = self.want[leaf] if row is None else self.want[leaf][row]
        part += number

    @precondition(lambda self: self.units)
    @rule(terms=st.lists(st.tuples(st.sampled_from(sorted(SLOTS)), NUMBERS, st.booleans()), min_size=1, max_size=6))
    def take(self, terms):
        """Large gradients are there, and kernels write terms of them."""
        unit, row = self.units[-1]
        for leaf, number, writes in terms:
            if writes:
                assert self.reducer.write(unit, SLOTS[leaf], torch.float32, lambda slot, x=number: slot.fill_(x))
                assert not self.reducer.write(unit, SLOTS[leaf], torch.float64, None)
            else:
                self.reducer.take(unit, SLOTS[leaf], torch.full(SHAPE[row is not None :], number))
            self._count(leaf, row, number)

    @precondition(lambda self: self.units)
    @rule(numbers=st.lists(st.none() | NUMBERS, min_size=len(SLOTS), max_size=len(SLOTS)))
    def reduce(self, numbers):
        """Backward leaves the unit, with the rest of its gradients."""
        unit, row = self.units.pop()
        grads = [None if n is None else torch.full(SHAPE[row is not None :], n) for n in numbers]
        self.may_wait = True
        self.reducer.reduce(unit, grads)
        self.may_wait = False
        for leaf, number in enumerate(numbers):
            self._count(leaf, row, number or 0.0)

    @rule(ends=st.lists(st.booleans(), min_size=1, max_size=4))
    def arrive(self, ends):
        """Some of the collectives under way end, in any order, and backward looks what has come."""
        waiting = [sent for sent in self.under_way if not sent.done]
        for sent, ended in zip(waiting, ends, strict=False):
            sent.done = ended
        self.reducer.settle(wait=False)

    @invariant()
    def in_order(self):
        for order in (self.early, self.late):
            assert order.finished == order.started[: len(order.finished)]

    def teardown(self):
        while self.units:
            self.reduce([None] * len(SLOTS))
        self.may_wait = True
        found = self.reducer.finish()
        assert self.early.finished == self.early.started and self.late.finished == self.late.started
        assert self.before_all == [0] * self.follows
        for leaf in SLOTS:
            assert torch.equal(found[leaf], self.want[leaf])
            assert (found[leaf] is self.given[leaf]) == (self.accumulated[leaf] == "in place")
        self.reducer.close()


class Unit:
    """A unit of two buffers, one of them of bytes, whose numbers follow from its own."""

    def __init__(self, pool, number, kept):
        self.pool, self.number, self.kept = pool, number, kept
        self.buffers, self.viewed = {}, set()

    def note_view(self, bucket):
        self.viewed.add(bucket)

    def gather(self):
        numbers = torch.arange(8.0) + 100 * self.number
        for bucket, dtype in enumerate((torch.float32, torch.uint8)):
            flat = self.pool.take(8 * (4 // dtype.itemsize), dtype, CPU, owner=self)
            flat.view(torch.float32).copy_(numbers)
            self.buffers[bucket] = [flat]


def decode(part):
    return (part * 2 + 1).contiguous()


class Saved(RuleBasedStateMachine):
    """What is unpacked has the values that were saved, and no buffer of a unit that is not kept lives because of it."""

    def __init__(self):
        super().__init__()
        self.pool, self.units, self.saved = Pool(), [], []
        self.tensors = SavedTensors(self._bring, None)

    def _bring(self, unit):
        if not unit.buffers:
            unit.gather()
            self.tensors.watch(unit)

    @rule(kept=st.booleans())
    def enter(self, kept):
        self.tensors.forget_freed()
        self.tensors.enter(offloads=False)
        self.units.append(Unit(self.pool, len(self.units), kept))
        self._bring(self.units[-1])

    def _view(self, data):
        """A view of a buffer of a unit that is alive, in one of several shapes."""
        unit = data.draw(st.sampled_from([unit for unit in self.units if unit.buffers]))
        bucket, start = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 4))
        x = unit.buffers[bucket][0].view(torch.float32)[start : start + 4]
        shape = data.draw(st.integers(0, 3))  # not the view itself, which Hypothesis would keep alive
        return (x, x.view(2, 2).t(), x[::2], x[:0])[shape], unit

    @precondition(lambda self: any(unit.buffers for unit in self.units))
    @rule(data=st.data())
    def save_view(self, data):
        x, unit = self._view(data)
        packed = self.tensors.pack(x)
        assert isinstance(packed, torch.Tensor) == unit.kept
        self.saved.append((packed, x.clone()))

    @precondition(lambda self: any(unit.buffers for unit in self.units))
    @rule(data=st.data())
    def save_decoded(self, data):
        part, _ = self._view(data)
        x = decode(part)
        self.tensors.note_values(x, decode, [part])
        packed = self.tensors.pack(x[1:])
        assert not isinstance(packed, torch.Tensor)
        self.saved.append((packed, x[1:].clone()))

    @rule(number=NUMBERS)
    def save_other(self, number):
        x = torch.full((3,), number)
        assert self.tensors.pack(x) is x
        self.saved.append((x, x.clone()))

    @rule(data=st.data())
    def release(self, data):
        if self.units:
            data.draw(st.sampled_from(self.units)).buffers = {}

    @rule(data=st.data())
    def unpack(self, data):
        if self.saved:
            packed, want = data.draw(st.sampled_from(self.saved))
            found = self.tensors.unpack(packed)
            assert torch.equal(found, want)

    @invariant()
    def nothing_else_is_alive(self):
        kept = {id(unit) for unit in self.units if unit.kept}
        assert {*self.pool.alive()} - kept == {id(unit) for unit in self.units if unit.buffers} - kept

    def teardown(self):
        for packed, want in self.saved:
            assert torch.equal(self.tensors.unpack(packed), want)
        self.tensors.close()


TestReductions, TestSaved = Reductions.TestCase, Saved.TestCase
TestReductions.settings = TestSaved.settings = examples(100, 1000)
