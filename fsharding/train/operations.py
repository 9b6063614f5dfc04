"""Trace the operations of a call: which kernels it launches, on which shapes and numbers, from which lines."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsharding.base import tree
from fsharding.base.errors import TransformError, message
from fsharding.comm.host_memory import is_kept
from fsharding.sharding.leaf_plan import kind_text
from fsharding.train.host_reads import HostReads, counting_host_reads, line_of_caller

__all__ = ["Operation", "Operations", "check_operations", "tracing"]


class Operation(NamedTuple):
    """One operation."""

    text: str  # name, and arguments: dtypes and shapes of tensors, values of everything else
    line: str  # innermost line outside of torch

    def __str__(self) -> str:
        return f"{self.text} at {self.line}"


@dataclass
class Operations:
    """The operations of a call."""

    rows: list[Operation] = field(default_factory=list[Operation])  # in order
    reads: HostReads = field(default_factory=HostReads)
    # operations that copy a CPU tensor to a device, or make a tensor from numbers: a graph would freeze the values
    from_host: list[Operation] = field(default_factory=list[Operation])


class _Trace(TorchDispatchMode):
    def __init__(self, seen: Operations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = (*args, *(kwargs or {}).values())
        row = Operation(f"{func}({', '.join(map(_text, taken))})", line_of_caller(__file__))
        name = func.overloadpacket.__name__
        # Views and allocations launch no kernel, and may differ between equal calls: a pool makes a new buffer while
        # gloo's thread still has the last reference to an old one.
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self._seen.rows.append(row)
        devices = {x.device.type for x in tree.leaves([taken, result]) if isinstance(x, Tensor)}
        of_host = any(isinstance(x, Tensor) and x.is_cpu and not is_kept(x) for x in tree.leaves(taken))
        # `lift_fresh` makes a tensor from Python numbers, on the host whatever device it is meant for.
        if name == "lift_fresh" or (of_host and len(devices) > 1):
            self._seen.from_host.append(row)
        return result


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{kind_text(x)} on {x.device.type}"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_text, x))}]"
    plain = x is None or isinstance(x, bool | int | float | str | torch.dtype | torch.device | torch.layout)
    return str(x) if plain else type(x).__name__


@contextmanager
def tracing() -> Generator[Operations]:
    """Collect the operations of this thread until the block ends, including a backward that runs inside of it."""
    seen = Operations()
    with _Trace(seen), counting_host_reads() as seen.reads:
        yield seen


_MEND = (
    "Compute with tensors of the device: torch.where instead of an if, torch.full for a number, and a number that"
    " changes as a tensor of the batch. Drop with fs.random.dropout: a module with random_key= is seeded by the host."
)


def check_operations(run: Callable[[], object]) -> Operations:
    """Run a call twice, and raise if no graph can replace it."""
    traces: list[Operations] = []
    for _ in range(2):
        with tracing() as seen:
            run()
        traces.append(seen)
        if rows := list(dict.fromkeys(seen.reads.reads)):
            raise TransformError(message("cannot capture a step in which the host reads the device.", rows, _MEND))
        if rows := list(dict.fromkeys(map(str, seen.from_host))):
            rule = "cannot capture a step that copies host tensors: a graph would keep their present values."
            raise TransformError(message(rule, rows, _MEND))
    if rows := _differences(*traces):
        rule = "cannot capture a step whose operations differ from call to call."
        raise TransformError(message(rule, rows, _MEND))
    return traces[1]


def _differences(one: Operations, other: Operations) -> list[str]:
    """Describe the first operation that differs between two calls."""
    for i, (a, b) in enumerate(zip(one.rows, other.rows, strict=False)):
        if a.text != b.text:
            return [f"operation {i} of a call: {a}", f"operation {i} of the next: {b}"]
    if len(one.rows) != len(other.rows):
        return [f"a call has {len(one.rows)} operations, the next {len(other.rows)}"]
    return []
