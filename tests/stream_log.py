"""Queues of a device that is not there: what each of them was given, as a log, and whether its order is safe on any device.

In: a call inside `recording_streams`, on tensors of the CPU. Out: rows, in the order in which the host issued them. Each
operation of torch's dispatcher is one, with the memory that it reads and writes; collectives are on queues of their own,
as those of NCCL are; events are recorded and waited for; memory is taken and let go.
`violations` replays the rows with a vector clock for each queue. Memory that was let go belongs to the queue on which it
was taken, and may be what that queue takes next, as torch's allocator for CUDA has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from fsharding.comm.handles import Works
from fsharding.comm.streams import use_streams

COMPUTE = "compute"
_RESULTS_FIRST = ("_allgather_base", "allgather_into_tensor_coalesced", "alltoall_base", "_reduce_scatter")
"""Collectives that write their first argument alone."""


class Row(NamedTuple):
    """What a queue was given: kind is run, take, free, record or wait.

    `reads` and `writes` are numbers of storages, `event` is that of a record or a wait.
    """

    stream: str
    kind: str
    text: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    event: int = -1

    def __str__(self):
        sets = "".join(f" {name} {list(x)}" for name, x in (("reads", self.reads), ("writes", self.writes)) if x)
        return f"{self.stream}: {self.kind} {self.text}{sets}"


class RecordingStreams:
    """`Streams` that write down what they are given; everything is done at once all the same."""

    several = True

    def __init__(self):
        self.rows: list[Row] = []
        self._current = [COMPUTE]
        self._labels: list[str] = []
        self._storages: dict[int, tuple[int, Any, str]] = {}
        self._count = 0
        self._events_of_work: dict[int, tuple[Any, int]] = {}

    # ---------------------------------------------------------------------------------------------------------- Streams
    @contextmanager
    def on(self, name):
        self._current.append(name)
        try:
            yield
        finally:
            self._current.pop()

    def record(self, of):
        return self._record(self._current[-1], of)

    def _record(self, stream, of):
        self._look_for_freed()
        self._labels.append(f"{of} on {stream}")
        self.rows.append(Row(stream, "record", of, event=len(self._labels) - 1))
        return len(self._labels) - 1

    def wait(self, event):
        self._look_for_freed()
        assert isinstance(event, int), "an event of somebody else"
        self.rows.append(Row(self._current[-1], "wait", self._labels[event], event=event))

    def wait_all(self):
        for stream in (COMPUTE, "gather", "reduce"):
            if stream != self._current[-1]:
                self.wait(self._record(stream, "all"))

    # ------------------------------------------------------------------------------------------------------- operations
    def _look_for_freed(self):
        for key, (number, reference, stream) in list(self._storages.items()):
            if reference.expired():
                self.rows.append(Row(stream, "free", f"storage {number}", writes=(number,)))
                del self._storages[key]

    def number_of(self, x, stream):
        key = x.untyped_storage()._cdata
        if key not in self._storages:
            self._count += 1
            self._storages[key] = self._count, StorageWeakRef(x.untyped_storage()), stream
            self.rows.append(Row(stream, "take", f"storage {self._count}", writes=(self._count,)))
        return self._storages[key][0]

    def ran(self, func, args, kwargs, result):
        """Notes an operation that is done."""
        self._look_for_freed()
        current, collective = self._current[-1], func.namespace == "c10d"
        stream = f"{current}'s collectives" if collective else current
        schema, given = func._schema, (*args, *kwargs.values())
        written = {id(x) for a, x in zip(schema.arguments, given, strict=False) if _is_written(a) for x in tensors(x)}
        if collective:
            outs = 1 if func.name().split("::")[1].startswith(_RESULTS_FIRST) else 9
            written = {id(x) for x in tensors(given[:outs])}
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view and not written:
            return
        both = {id(x) for x in tensors(given)} if collective and outs == 9 else set()
        reads = {self.number_of(x, current) for x in tensors(given) if id(x) not in written or id(x) in both}
        writes = {self.number_of(x, current) for x in tensors(given) if id(x) in written}
        fresh = {self.number_of(x, current) for x in tensors(result)} - reads - writes
        if "empty" not in func.name():
            writes |= fresh
        if collective:  # begins when its queue has come to here
            self.rows.append(Row(stream, "wait", f"issued on {current}", event=self._record(current, "issued")))
        if reads or writes:
            self.rows.append(Row(stream, "run", func.name(), tuple(sorted(reads)), tuple(sorted(writes))))
        if collective:
            event = self._record(stream, "done")
            for x in fs.tree.leaves(result):
                if isinstance(x, torch.ScriptObject):
                    work = dist.Work.unbox(x)
                    self._events_of_work[id(work)] = work, event

    def waited_for(self, works):
        for work in works:
            self.wait(self._events_of_work[id(work)][1])


def tensors(x):
    return [y for y in fs.tree.leaves([x]) if isinstance(y, Tensor) and y.untyped_storage().nbytes()]


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


class _Operations(TorchDispatchMode):
    def __init__(self, streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._streams.ran(func, args, kwargs or {}, result)
        return result


@contextmanager
def recording_streams() -> Generator[RecordingStreams]:
    """Writes down what queues are given until the `with` block ends."""
    streams, plain = RecordingStreams(), Works.wait

    def wait(works, timeout=None):
        streams.waited_for(works.works)
        plain(works, timeout)

    with use_streams(streams), patch.object(Works, "wait", wait), _Operations(streams):
        yield streams


# ------------------------------------------------------------------------------------------------------------ the order
Clock = dict[str, int]


class _Memory:
    """What was done to a storage: by queue, the latest read and write; and what is due of those that had its memory."""

    def __init__(self, stream, due):
        self.stream, self.due = stream, due
        self.reads: Clock = {}
        self.writes: Clock = {}


def _join(a: Clock, b: Clock) -> None:
    for stream, tick in b.items():
        a[stream] = max(a.get(stream, 0), tick)


def _missing(before: Clock, now: Clock) -> list[str]:
    """The queues whose operation is not known to be done."""
    return [stream for stream, tick in before.items() if now.get(stream, 0) < tick]


def _advance(row: Row, clocks: dict[str, Clock], events: dict[int, Clock]) -> Clock:
    """The clock of a row's queue, after what the row is of."""
    now = clocks.setdefault(row.stream, {})
    if row.kind == "record":
        events[row.event] = dict(now)
    elif row.kind == "wait":
        _join(now, events[row.event])
    elif row.kind == "run":
        now[row.stream] = now.get(row.stream, 0) + 1
    return now


def violations(rows: Iterable[Row]) -> list[str]:
    """Operations that a device may do too early, in words: reads before writes, and writes before reads."""
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    memory: dict[int, _Memory] = defaultdict(lambda: _Memory("", {}))
    free: dict[str, Clock] = {}
    found: list[str] = []
    for row in rows:
        now = _advance(row, clocks, events)
        if row.kind == "take":
            memory[row.writes[0]] = _Memory(row.stream, dict(free.get(row.stream, {})))
        elif row.kind == "free":
            gone = memory.pop(row.writes[0])
            for done in (gone.reads, gone.writes, gone.due):
                _join(free.setdefault(gone.stream, {}), done)
        elif row.kind == "run":
            for number in row.reads:
                late = _missing(memory[number].writes, now) + _missing(memory[number].due, now)
                found += [f"{row}: storage {number} may not have been written by {stream}" for stream in late]
                _join(memory[number].reads, {row.stream: now[row.stream]})
            for number in row.writes:
                used = memory[number]
                late = [s for done in (used.reads, used.writes, used.due) for s in _missing(done, now)]
                found += [f"{row}: storage {number} is still used by {stream}" for stream in late]
                _join(used.writes, {row.stream: now[row.stream]})
    return found


def unjoined(rows: Iterable[Row]) -> list[str]:
    """The queues that still have something to do when the one that computes has done all that it was given."""
    clocks: dict[str, Clock] = {}
    events: dict[int, Clock] = {}
    for row in rows:
        _advance(row, clocks, events)
    done = clocks[COMPUTE]
    return [stream for stream, now in clocks.items() if _missing({stream: now.get(stream, 0)}, done)]


def without(rows: Iterable[Row], *waits: tuple[str, str]) -> list[Row]:
    """The same rows without some waits: which queue, and for which events."""
    return [row for row in rows if row.kind != "wait" or (row.stream, row.text) not in waits]


def waits_of(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Which queue waits for which events of others."""
    return {(row.stream, row.text) for row in rows if row.kind == "wait" and not row.text.endswith(f" on {row.stream}")}
