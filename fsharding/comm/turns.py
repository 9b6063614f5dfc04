"""Two calls that alternate on one rank: while one waits for a collective, the other one computes.

The first runs in the calling thread, the second in its own thread, and exactly one of them runs at any time, until it
has started a collective and would wait (`wait_in_turn`), or ends. Guarantee: switching depends on what the two
functions call, never on time. So ranks that run the same two functions start the same collectives in the same order,
and each function computes the same bits as alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import TypeVar

import torch

from fsharding.base import _compat, devices
from fsharding.comm.events import note
from fsharding.comm.handles import Handle
from fsharding.mesh.device_mesh import Group
from fsharding.mesh.failures import entered_as

__all__ = ["Partner", "wait_in_turn"]

_T = TypeVar("_T")

_END_S = 1.0
"""How long to wait, after a failure, for the other call to notice that it is to stop."""


class _Stopped(BaseException):
    """Ends a call whose other one has failed. Nothing but `Partner` catches it."""


class _Turns:
    """The turns of two calls, numbered 0 and 1. It is 0's turn first.

    `_mine[i]` is released whenever it becomes the turn of i; `_over[i]` is set when i has ended.
    """

    def __init__(self) -> None:
        self._mine = threading.Semaphore(0), threading.Semaphore(0)
        self._over = [False, False]
        self.failed = False

    def wait(self, side: int) -> None:
        """Waits for the first turn of a side."""
        self._mine[side].acquire()
        self._check()

    def pass_on(self, side: int) -> None:
        """Gives the turn to the other side, if it has not ended, and waits until it comes back."""
        self._check()
        if not self._over[1 - side]:
            self._mine[1 - side].release()
            self._mine[side].acquire()
            self._check()

    def end(self, side: int, *, failed: bool = False) -> None:
        """Notes that a side has ended; from here on it is the turn of the other one."""
        self._over[side], self.failed = True, self.failed or failed
        self._mine[1 - side].release()

    def _check(self) -> None:
        if self.failed:
            raise _Stopped


_side: ContextVar[tuple[_Turns, int] | None] = ContextVar("fsharding_turn", default=None)


def wait_in_turn(handle: Handle[_T], group: Group, name: str) -> _T:
    """Waits for a collective that all members start alike; the other call of a `Partner` goes on meanwhile."""
    if group.size == 1:
        return handle.wait()
    name = f"{name} over {', '.join(group.axes)}"
    note("start", name)
    side = _side.get()
    if side is not None:
        turns, number = side
        turns.pass_on(number)
    result = handle.wait()
    note("wait", name)
    return result


class Partner:
    """A thread that runs the second of two calls, as often as it is asked, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def can_run(self) -> bool:
        """Whether a call in another thread computes what it would compute here."""
        # Modes of torch, autocast and the capture of a CUDA graph belong to a thread.
        return not _compat.thread_has_modes() and not devices.is_capturing(self._device)

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Run two calls by turns, in sequence if this thread has modes; if one fails, the other stops."""
        if not self.can_run():
            first()
            second()
            return
        turns = _Turns()
        ended = threading.Event()
        errors = list[BaseException]()
        caller = threading.get_ident()
        grad = torch.is_grad_enabled()
        context = copy_context()
        stream = devices.current_stream(self._device)

        def beside() -> None:
            try:
                turns.wait(1)
                with entered_as(caller), torch.set_grad_enabled(grad), devices.on_stream(stream):
                    _side.set((turns, 1))
                    second()
            except _Stopped:
                turns.end(1, failed=True)
            except BaseException as error:
                errors.append(error)
                turns.end(1, failed=True)
            else:
                turns.end(1)
            finally:
                ended.set()

        self._submit(lambda: context.run(beside))
        token = _side.set((turns, 0))
        try:
            first()
            turns.end(0)
            ended.wait()
        except _Stopped:
            ended.wait()
        except BaseException:
            turns.end(0, failed=True)
            ended.wait(_END_S)
            raise
        finally:
            _side.reset(token)
        if errors:
            raise errors[0]

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="fsharding-partner", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def close(self) -> None:
        """Ends the thread, if there is one."""
        if self._thread is not None:
            self._jobs.put(None)
            with suppress(RuntimeError):
                self._thread.join(_END_S)
            self._thread = None
