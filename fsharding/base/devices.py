"""Accelerators, whatever their kind: streams, events, synchronization, memory, and the backend of their collectives.

Guarantee: no name of a kind of device decides anything; what a device lacks is found by asking for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "accelerator", "backend_for", "device_count", "is_capturing", "is_here", "missing_parts",
    "name_of", "new_event", "new_graph", "new_stream", "on_stream", "peak_memory", "recording", "records_graphs",
    "set_device", "synchronize",
]  # fmt: skip


def accelerator() -> str:
    """Return the type of the accelerator that is here, such as "cuda"; "cpu" without one."""
    return (
        current.type
        if torch.accelerator.is_available() and (current := torch.accelerator.current_accelerator())
        else "cpu"
    )


def is_here(device_type: str) -> bool:
    """Whether tensors on a type of device have streams and events here: it is the accelerator of this machine."""
    return device_type not in ("cpu", "meta") and accelerator() == device_type


def missing_parts(device_type: str, ranks: int) -> list[str]:
    """Name what an accelerator lacks that a mesh needs: streams, events, and on several ranks a collective backend."""
    wanted = {
        "streams": lambda: torch.accelerator.current_stream(device_type),
        "events": lambda: new_event(device_type),
    }
    found: list[str] = []
    for name, ask in wanted.items():
        try:
            ask()
        except (RuntimeError, ValueError) as error:
            found.append(f"{name}: {str(error).partition(chr(10))[0]}")
    if ranks > 1 and not backend_for(device_type):
        found.append("a collective backend: none is registered, see torch.distributed.Backend.register_backend")
    return found


def backend_for(device_type: str) -> str:
    """Return the name of the collective backend of a type of device, such as "nccl"; "" if none is registered."""
    return dist.Backend.default_device_backend_map.get(device_type, "")


def device_count() -> int:
    """Return how many accelerators this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def set_device(index: int) -> None:
    """Make an accelerator the current one of this process."""
    torch.accelerator.set_device_index(index)


def name_of(device_type: str) -> str:
    """Return the name of the model of a device, such as "NVIDIA H100"; its type if it has none."""
    return str(getattr(torch.get_device_module(device_type), "get_device_name", lambda: device_type)())


def synchronize() -> None:
    """Wait for everything that this process has given its accelerator, if it has used one."""
    here = accelerator()
    if here != "cpu" and getattr(torch.get_device_module(here), "is_initialized", lambda: True)():
        torch.accelerator.synchronize()


def peak_memory(device_type: str) -> int | None:
    """Return the largest number of bytes of tensors on the accelerator so far; None for a CPU."""
    return torch.accelerator.max_memory_allocated() if is_here(device_type) else None


# -------------------------------------------------------------------------------------------------------------- streams
def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream, of higher priority than the default one where the device has priorities."""
    return torch.Stream(device, priority=-1)


def new_event(device: torch.device | str) -> torch.Event:
    """Return an event of a device."""
    return torch.Event(device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that this thread computes on; None where the device has none."""
    return torch.accelerator.current_stream(device) if is_here(device.type) else None


@contextmanager
def on_stream(stream: torch.Stream) -> Generator[None]:
    """Have this thread compute on a stream, and on its device; blocks may be nested, also of one stream."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def records_graphs(device_type: str) -> bool:
    """Whether torch can record what a type of device is given as a graph, and run it again."""
    return is_here(device_type) and _graph_type(device_type) is not None


def new_graph(device: torch.device) -> Any:
    """Return an empty graph of a device that `records_graphs`."""
    made = _graph_type(device.type)
    assert made is not None
    return made()


@functools.cache
def _graph_type(device_type: str) -> Callable[[], Any] | None:
    """What makes a graph: torch's class for CUDA, or its class for any accelerator; None if that has no graphs."""
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
    """Have a graph record what a stream, and those that wait for it, are given; nothing is carried out."""
    if isinstance(graph, getattr(torch.accelerator, "Graph", ())):
        with on_stream(stream), graph:
            yield
        return
    # NCCL's watchdog asks for events in a thread of its own, which a capture would otherwise forbid.
    module = torch.get_device_module(stream.device)
    with module.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether this thread is capturing a graph of the device."""
    if not is_here(device.type):
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()
