"""Accelerators of any type: streams, events, graphs, memory, and collective backends.

Features are found by trying them, never by the name of a device type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "accelerator", "backend_for", "device_count", "is_capturing", "is_here", "missing_parts", "name_of", "new_graph",
    "on_stream", "recording", "records_graphs", "synchronize",
]  # fmt: skip


def accelerator() -> str:
    """Return the type of this machine's accelerator, such as "cuda"; "cpu" without one."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if current is None else current.type


def is_here(device_type: str) -> bool:
    """Return whether a device type is this machine's accelerator, so its tensors have streams and events."""
    return device_type not in ("cpu", "meta") and accelerator() == device_type


def missing_parts(device_type: str, ranks: int) -> list[str]:
    """List what an accelerator lacks for a mesh: streams, events, or with several ranks a collective backend."""
    found: list[str] = []
    for name, make in (("streams", torch.accelerator.current_stream), ("events", torch.Event)):
        try:
            make(device_type)
        except (RuntimeError, ValueError) as error:
            found.append(f"{name}: {str(error).partition(chr(10))[0]}")
    if ranks > 1 and not backend_for(device_type):
        found.append("a collective backend: none is registered, see torch.distributed.Backend.register_backend")
    return found


def backend_for(device_type: str) -> str:
    """Return the collective backend of a device type, such as "nccl"; "" if none is registered."""
    return dist.Backend.default_device_backend_map.get(device_type, "")


def device_count() -> int:
    """Return the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def name_of(device_type: str) -> str:
    """Return the model name of a device, such as "NVIDIA H100"; its type if it has none."""
    return str(getattr(torch.get_device_module(device_type), "get_device_name", lambda: device_type)())


def synchronize() -> None:
    """Wait for all work of this process on its accelerator, if it has used one."""
    here = accelerator()
    if here != "cpu" and getattr(torch.get_device_module(here), "is_initialized", lambda: True)():
        torch.accelerator.synchronize()


# -------------------------------------------------------------------------------------------------------------- streams
@contextmanager
def on_stream(stream: torch.Stream) -> Generator[None]:
    """Make a stream and its device current in this block; blocks may be nested."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def records_graphs(device_type: str) -> bool:
    """Return whether torch can capture the work on a device type as a graph, and replay it."""
    return is_here(device_type) and _graph_type(device_type) is not None


def new_graph(device: torch.device) -> Any:
    """Return an empty graph of a device that `records_graphs`."""
    made = _graph_type(device.type)
    assert made is not None
    return made()


@functools.cache
def _graph_type(device_type: str) -> Callable[[], Any] | None:
    """Return the constructor of graphs: torch's class for CUDA, else its generic one; None if that isn't supported."""
    of_cuda = getattr(torch.get_device_module(device_type), "CUDAGraph", None)
    general = getattr(torch.accelerator, "Graph", None)
    if of_cuda is not None or general is None:
        return of_cuda
    try:
        general()
    except RuntimeError:
        return None
    return functools.partial(general, capture_error_mode="thread_local")


@contextmanager
def recording(graph: Any, stream: torch.Stream) -> Generator[None]:
    """Capture the work on a stream, and on streams that wait for it, in a graph without running it."""
    if isinstance(graph, getattr(torch.accelerator, "Graph", ())):
        with on_stream(stream), graph:
            yield
        return
    # NCCL's watchdog thread queries events, which other capture modes forbid.
    module = torch.get_device_module(stream.device)
    with module.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread is capturing a graph on the device."""
    if not is_here(device.type):
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()
