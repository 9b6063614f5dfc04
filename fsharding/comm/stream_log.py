"""Log what each stream of a device would be given, without such a device.

Guarantee: every operation still runs immediately, so recording changes no value.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fsharding.base import _compat, tree
from fsharding.comm.handles import Works
from fsharding.comm.streams import StreamName, Streams, use_streams
from fsharding.sharding.named_sharding import local_of

__all__ = ["COLLECTIVES", "COMPUTE", "Row", "at_peak", "communicates", "messages", "recording_streams"]

COMPUTE = "compute"  # the stream that is current outside of `on`
COLLECTIVES = "'s collectives"  # suffix of the names of streams of collectives


def messages(way: Literal["to", "from"], peer: int) -> str:
    """Return the name of the stream of messages to or from a peer; NCCL has one for each peer and way."""
    return f"messages {way} {peer}"


def communicates(stream: str) -> bool:
    """Return whether the stream of this name communicates."""
    return stream.endswith(COLLECTIVES) or stream.startswith("messages ")


_MESSAGE = re.compile(r"c10d::(send|recv)")
_ROUND = 512  # allocators of accelerators round sizes up to a multiple of this many bytes

# What memory that is taken in a region of `_compat` is for; outside of them, activations.
_CATEGORIES = {"gather": "gathered weights", "scatter": "gradients"} | dict.fromkeys(
    ("norm", "optimizer", "spread"), "update"
)

# Collectives that write only their first argument.
_RESULTS_FIRST = ("_allgather_base", "allgather_into_tensor_coalesced", "alltoall_base", "_reduce_scatter")


class Row(NamedTuple):
    """One entry of the log."""

    stream: str  # name; collectives are on `<stream>'s collectives`, messages on the stream of `messages`
    kind: str  # "run", "take", "free", "record" or "wait"; memory is taken and freed
    text: str  # operator of a run, name of an event, or device type of memory
    reads: tuple[int, ...] = ()  # storage numbers
    writes: tuple[int, ...] = ()  # storage numbers
    event: int = -1  # number of the event of a record or wait
    flops: int = 0  # floating-point operations of a run
    # Bytes that a run reads and writes, that this rank sends or receives in a collective or message, or of a storage.
    nbytes: int = 0
    peer: int = -1  # group rank of the peer of a message
    purpose: tuple[str, str] = ("", "")  # of memory that is taken: its category, and the leaf or unit that it is for

    def __str__(self) -> str:
        """Format the entry as stream, action and memory."""
        sets = "".join(f" {name} {list(x)}" for name, x in (("reads", self.reads), ("writes", self.writes)) if x)
        return f"{self.stream}: {self.kind} {self.text}{sets}"


class RecordingStreams(Streams):
    """`Streams` that log what they are given."""

    several = True

    def __init__(self) -> None:
        """Start with an empty log."""
        self.rows: list[Row] = []
        self._current = [COMPUTE]  # names of the nested `on` blocks
        self._labels: list[str] = []  # text of each event
        # The "take" row of each live storage, by id. An id is reused once its storage is freed, so the callback of the
        # weak reference notes it in `_freed`, and the next entry of the log first writes the "free" rows.
        self._storages: dict[int, tuple[Row, weakref.ref[Any]]] = {}
        self._freed: list[int] = []
        self._count = 0  # storages so far
        self._live = 0  # bytes of live storages on devices other than the CPU
        self._regions: list[tuple[str, str]] = []  # names and units of the nested regions of `_compat`
        self._left = ""  # unit of the region that was left last
        self._unit = ""  # unit that the compute stream waited for last: it computes with that
        # The "done" event of each work, by id. The work is kept alive so that its id isn't reused.
        self._events_of_work: dict[int, tuple[Any, int]] = {}

    # ---------------------------------------------------------------------------------------------------------- Streams
    @contextmanager
    def on(self, name: StreamName) -> Generator[None]:
        self._current.append(name)
        try:
            yield
        finally:
            self._current.pop()

    def record(self, of: str) -> int:
        return self._record(self._current[-1], of)

    def _record(self, stream: str, of: str) -> int:
        self._look_for_freed()
        self._labels.append(f"{of} on {stream}")
        self.rows.append(Row(stream, "record", of, event=len(self._labels) - 1))
        return len(self._labels) - 1

    @contextmanager
    def region(self, name: str, of: str = "") -> Generator[None]:
        """Note what the library does in the block, in place of `_compat.region`."""
        self._regions.append((_CATEGORIES[name], of))
        try:
            yield
        finally:
            _, self._left = self._regions.pop()

    def current(self) -> str:
        return self._current[-1]

    def wait(self, event: Any, on: str | None = None) -> None:
        self._look_for_freed()
        assert isinstance(event, int), "an event of other streams"
        if self._labels[event] == "gathered on gather":
            self._unit = self._left
        self.rows.append(Row(on or self._current[-1], "wait", self._labels[event], event=event))

    def wait_all(self) -> None:
        for stream in (COMPUTE, "gather", "reduce"):
            if stream != self._current[-1]:
                self.wait(self._record(stream, "all"))

    def allocated(self) -> int:
        self._look_for_freed()
        return self._live

    # ------------------------------------------------------------------------------------------------------- operations
    def _look_for_freed(self) -> None:
        for key in self._freed:
            taken, _ = self._storages.pop(key)
            self._append(taken._replace(kind="free"))
        self._freed.clear()

    def _append(self, row: Row) -> None:
        """Log memory that is taken or freed."""
        self.rows.append(row)
        self._live += 0 if row.text == "cpu" else _change(row)

    def _number_of(self, x: Tensor, stream: str, purpose: tuple[str, str] | None = None) -> int:
        key = _compat.storage_id(x)
        if key not in self._storages:
            self._count += 1
            storage = x.untyped_storage()
            if purpose is None:
                purpose = self._regions[-1] if self._regions else ("activations", self._unit)
            size = storage.nbytes()
            taken = Row(stream, "take", x.device.type, writes=(self._count,), nbytes=size, purpose=purpose)
            self._storages[key] = taken, weakref.ref(storage, lambda _: self._freed.append(key))
            self._append(taken)
        return self._storages[key][0].writes[0]

    def hold(self, held: Any) -> None:
        """Log the storages of tensors that exist already."""
        for path, x in tree.named_leaves(held).items():
            if _tensors(x := local_of(x)):
                category, _, leaf = path.partition(".")[2].partition(".")
                self._number_of(x, COMPUTE, (category, leaf))

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Log an operation that has run."""
        self._look_for_freed()
        current, collective = self._current[-1], func.namespace == "c10d"
        stream, peer = current + COLLECTIVES if collective else current, -1
        if collective and (found := _MESSAGE.match(func.name())):
            peer = args[2]
            stream = messages("to" if found[1] == "send" else "from", peer)
        schema, given = func._schema, (*args, *kwargs.values())
        written = {id(x) for a, x in zip(schema.arguments, given, strict=False) if _is_written(a) for x in _tensors(x)}
        first = func.name().split("::")[1].startswith(_RESULTS_FIRST)
        if collective:
            written = {id(x) for x in _tensors(given[:1] if first else given)}
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if (is_view and not written) or func.namespace == "prim":  # operators that fake tensors call
            return
        both = {id(x) for x in _tensors(given)} if collective and not first else set[int]()
        reads = {self._number_of(x, current) for x in _tensors(given) if id(x) not in written or id(x) in both}
        writes = {self._number_of(x, current) for x in _tensors(given) if id(x) in written}
        fresh = {self._number_of(x, current) for x in _tensors(result)} - reads - writes
        if "empty" not in func.name():
            writes |= fresh
        if collective:  # it starts after all work issued so far on the current stream
            self.rows.append(Row(stream, "wait", f"issued on {current}", event=self._record(current, "issued")))
        if reads or writes:
            sets = tuple(sorted(reads)), tuple(sorted(writes))
            cost = _sent(func, given) if collective else _cost(func, args, kwargs, result, given)
            self.rows.append(Row(stream, "run", func.name(), *sets, -1, *cost, peer))
        if collective:
            event = self._record(stream, "done")
            for x in tree.leaves(result):
                if isinstance(x, torch.ScriptObject):
                    work = dist.Work.unbox(x)
                    self._events_of_work[id(work)] = work, event

    def waited_for(self, works: Iterable[Any]) -> None:
        """Log that the current stream waits for collectives."""
        for work in works:
            self.wait(self._events_of_work[id(work)][1])


def _change(row: Row) -> int:
    """Return the bytes that an allocator takes or frees for a row."""
    size = -(-row.nbytes // _ROUND) * _ROUND
    return size if row.kind == "take" else -size


def _cost(func: Any, args: Any, kwargs: Any, result: Any, given: Any) -> tuple[int, int]:
    """Return the floating-point operations, and the bytes read and written."""
    count = flop_registry.get(func.overloadpacket)
    if "empty" in func.name() or "view" in func.name():
        return 0, 0
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
    return flops, sum(x.nbytes for x in {id(x): x for x in (*_tensors(given), *_tensors(result))}.values())


def _sent(func: Any, given: tuple[Any, ...]) -> tuple[int, int]:
    """Return 0 and the bytes that a rank sends, in a ring for all-gathers and reductions."""
    name = func.name().split("::")[1]
    groups = [x for x in given if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
    size = dist.ProcessGroup.unbox(groups[0]).size() if groups else 1
    largest = max((x.nbytes for x in _tensors(given)), default=0)
    if _MESSAGE.match(func.name()):
        return 0, largest
    rounds = 2 if name.startswith("allreduce") else 1
    return 0, rounds * largest * (size - 1) // size


def _tensors(x: Any) -> list[Tensor]:
    return [y for y in tree.leaves([x]) if isinstance(y, Tensor) and y.untyped_storage().nbytes()]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Operations(TorchDispatchMode):
    def __init__(self, streams: RecordingStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._streams.ran(func, args, kwargs or {}, result)
        return result


def at_peak(rows: Iterable[Row], device_type: str) -> dict[tuple[str, str], int]:
    """Return the bytes by purpose when most are allocated, the largest first; sizes are rounded as allocators do."""
    changes = [row for row in rows if row.kind in ("take", "free") and row.text == device_type]
    sizes = [*map(_change, changes)]
    live = [*itertools.accumulate(sizes)]
    result = Counter[tuple[str, str]]()
    for row, size in zip(changes[: live.index(max(live)) + 1] if live else [], sizes, strict=False):
        result[row.purpose] += size
    return {purpose: size for purpose, size in result.most_common() if size}


@contextmanager
def recording_streams(*held: Any) -> Generator[RecordingStreams]:
    """Log what streams are given inside the `with` block; `held` are trees of tensors that exist before."""
    streams, plain = RecordingStreams(), Works.wait
    streams.hold(held)
    del held  # so that this frame keeps no tensor alive, which the log would miss as freed

    def wait(works: Works, timeout: timedelta | None = None) -> None:
        streams.waited_for(works.works)
        plain(works, timeout)

    regions = patch.object(_compat, "region", streams.region)
    with use_streams(streams), patch.object(Works, "wait", wait), regions, _Operations(streams):
        yield streams
