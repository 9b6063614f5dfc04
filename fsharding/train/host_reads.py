"""Count where the host reads a device: each such read waits until the device has computed the value."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostReads", "counting_host_reads", "line_of_caller"]

_TORCH = str(Path(torch.__file__).parent)
_OWN = __file__

_VALUES = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
"""Operations that return a Python number: `float(x)`, `bool(x)`, `x.item()`, and an `if` on a tensor."""

_SHAPES = {"nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"}
"""Operations whose result has a shape that depends on values."""

_METHODS = {"tolist": Tensor.tolist, "cpu": Tensor.cpu}
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
            self._seen.reads.append(f"{name} at {line_of_caller(_OWN)}")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, seen: HostReads) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, method in _METHODS.items():
            if func is method:
                self._seen.reads.append(f"{name} at {line_of_caller(_OWN)}")
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


def line_of_caller(own: str) -> str:
    """Return the innermost line outside of torch and of the file `own`."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in (own, _OWN) and not name.startswith(_TORCH):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
