"""Watch the operations of calls: which kernels run on what, from which lines, and where the host reads a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsharding.base import tree
from fsharding.base.errors import TransformError, message
from fsharding.comm.host_memory import is_kept
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["HostReads", "Operation", "check_operations", "counting_host_reads"]

_TORCH = str(Path(torch.__file__).parent)

_VALUES = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
"""Operations that return a Python number: `float(x)`, `bool(x)`, `x.item()`, and an `if` on a tensor."""

_SHAPES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations whose result has a shape that depends on values."""

_METHODS = {Tensor.tolist: "tolist", Tensor.cpu: "cpu"}
"""Methods that read a device; on a CPU they call no operation that a dispatch mode would see."""


@dataclass
class HostReads:
    """Reads of a device by the host, in order.

    Attributes:
        reads: Operation and line of each read, such as `_local_scalar_dense at train.py:12`.

    Example:
        >>> with fs.testing.counting_host_reads() as seen:
        ...     bool(torch.ones(()) > 0)
        True
        >>> seen.count, seen.reads[0].partition(" at ")[0]
        (1, '_local_scalar_dense')
    """

    reads: list[str] = field(default_factory=list[str])

    @property
    def count(self) -> int:
        """Number of reads."""
        return len(self.reads)


@contextmanager
def counting_host_reads() -> Generator[HostReads]:
    """Count this thread's reads of a device until the `with` block ends.

    Reads are Python numbers made from tensors, operations whose shapes depend on values, `tolist`, `cpu`, and copies to
    the CPU that wait. `numpy` and a copy to pinned memory with `non_blocking=True` aren't reads. Reads inside of
    torch's kernels and in backward's own threads aren't seen.

    Returns:
        A context manager that yields a `HostReads`, which grows until the block ends.

    Example:
        >>> loss = torch.tensor([1.0, 2.0]).sum()
        >>> with fs.testing.counting_host_reads() as seen:
        ...     half = loss * 0.5  # stays on the device
        >>> seen.reads
        []
    """
    seen = HostReads()
    with _Methods(seen), _Operations(seen):
        yield seen


class _Operations(TorchDispatchMode):
    def __init__(self, seen: HostReads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _VALUES or name in _SHAPES or _by_mask(name, args) or _waiting_copy(name, args, kwargs):
            self._seen.reads.append(f"{name} at {_line_of_caller()}")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, seen: HostReads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := _METHODS.get(func)) is not None:
            self._seen.reads.append(f"{name} at {_line_of_caller()}")
        return func(*args, **(kwargs or {}))


def _by_mask(name: str, args: Any) -> bool:
    """Return whether an operation indexes by a mask: it has to count the selected elements."""
    masks = (torch.bool, torch.uint8)
    return name in ("index", "index_put", "index_put_") and any(x is not None and x.dtype in masks for x in args[1])


def _waiting_copy(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operation copies from a device to the CPU and makes the host wait."""
    if name == "_to_copy":
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        return to_host and args[0].device.type not in ("cpu", "meta") and not kwargs.get("non_blocking")
    if name == "copy_":
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return waits and args[0].device.type == "cpu" and args[1].device.type not in ("cpu", "meta")
    return False


def _line_of_caller() -> str:
    """Return the innermost line outside of torch and of this file."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not name.startswith(_TORCH):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


# ---------------------------------------------------------------------------------------------- what a graph can replay
class Operation(NamedTuple):
    """One operation."""

    text: str  # name, and arguments: dtypes and shapes of tensors, values of everything else
    line: str  # innermost line outside of torch

    def __str__(self) -> str:
        return f"{self.text} at {self.line}"


class _Trace(TorchDispatchMode):
    """Collects the operations of this thread, including a backward that runs inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Operation] = []  # in order
        # Operations that copy a CPU tensor to a device, or make a tensor from numbers: a graph would freeze the values.
        self.from_host: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = (*args, *(kwargs or {}).values())
        row = Operation(f"{func}({', '.join(map(_text, taken))})", _line_of_caller())
        name = func.overloadpacket.__name__
        # Views and allocations launch no kernel, and may differ between equal calls: a pool makes a new buffer while
        # gloo's thread still has the last reference to an old one.
        if not func.is_view and not name.startswith(("empty", "new_empty")):
            self.rows.append(row)
        devices = {x.device.type for x in tree.leaves([taken, result]) if isinstance(x, Tensor)}
        of_host = any(isinstance(x, Tensor) and x.is_cpu and not is_kept(x) for x in tree.leaves(taken))
        # `lift_fresh` makes a tensor from Python numbers, on the host whatever device it is meant for.
        if name == "lift_fresh" or (of_host and len(devices) > 1):
            self.from_host.append(row)
        return result


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{kind_text(x)} on {x.device.type}"
    if isinstance(x, list | tuple):
        return f"[{', '.join(map(_text, x))}]"
    plain = x is None or isinstance(x, bool | int | float | str | torch.dtype | torch.device | torch.layout)
    return str(x) if plain else type(x).__name__


_MEND = (
    "Compute with tensors of the device: torch.where instead of an if, torch.full for a number, and a number that"
    " changes as a tensor of the batch. Drop with fs.random.dropout: a module with random_key= is seeded by the host."
)


def check_operations(run: Callable[[], object]) -> list[Operation]:
    """Run a call twice, and raise if no graph can replace it; return its operations."""
    traces: list[list[Operation]] = []
    for _ in range(2):
        with _Trace() as seen, counting_host_reads() as host:
            run()
        traces.append(seen.rows)
        if rows := list(dict.fromkeys(host.reads)):
            raise TransformError(message("cannot capture a step in which the host reads the device.", rows, _MEND))
        if rows := list(dict.fromkeys(map(str, seen.from_host))):
            rule = "cannot capture a step that copies host tensors: a graph would keep their present values."
            raise TransformError(message(rule, rows, _MEND))
    if rows := _differences(*traces):
        rule = "cannot capture a step whose operations differ from call to call."
        raise TransformError(message(rule, rows, _MEND))
    return traces[1]


def _differences(one: list[Operation], other: list[Operation]) -> list[str]:
    """Describe the first operation that differs between two calls."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.text != b.text:
            return [f"operation {i} of a call: {a}", f"operation {i} of the next: {b}"]
    if len(one) != len(other):
        return [f"a call has {len(one)} operations, the next {len(other)}"]
    return []
