"""Short notes between processes of one machine: a pipe from each to each, which wakes a reader soonest.

Guarantee: a note is received under the number with which it was sent, in any order of reads.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from struct import Struct

__all__ = ["MemberError", "Pipes"]

_GONE = "Process {} is gone, or does not let this one send to it: {}."


class MemberError(RuntimeError):
    """A member of a group has exited, or doesn't answer."""

    # `member`: its place in the group.

    def __init__(self, text: str, member: int = -1) -> None:
        super().__init__(text)
        self.member = member


class Pipes:
    """The pipes between this process and some others."""

    # Each member creates the pipes that the others write to, and opens theirs once it has their numbers.

    def __init__(self, size: int, index: int, length: int) -> None:
        self._note = Struct(f"<{1 + length}q")
        self._members = [member for member in range(size) if member != index]
        made = {member: os.pipe() for member in self._members}
        self.write_ends = tuple(made[member][1] if member in made else -1 for member in range(size))
        """Return, for each member, the file descriptor that it opens to write to this process."""
        self._read = {member: ends[0] for member, ends in made.items()}
        self._write: dict[int, int] = {}
        self._pids: tuple[int, ...] = ()
        self._sent: Counter[int] = Counter()
        self._taken: Counter[tuple[int, int]] = Counter()
        self._received: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._open = {*self._read.values(), *(ends[1] for ends in made.values())}
        weakref.finalize(self, _close, self._open)

    def connect(self, pids: Sequence[int], write_ends: Sequence[int]) -> None:
        """Open the pipes of the others; call `close_write_ends` after all members have."""
        self._pids = tuple(pids)
        for member in self._members:
            try:
                self._write[member] = os.open(f"/proc/{pids[member]}/fd/{write_ends[member]}", os.O_WRONLY)
            except OSError as e:
                raise RuntimeError(_GONE.format(pids[member], e)) from e
            self._open.add(self._write[member])

    def close_write_ends(self) -> None:
        """Close this process's write ends, so that a pipe closes with its last writer."""
        own = {end for end in self.write_ends if end >= 0}
        _close(own)
        self._open -= own

    def send(self, channel: int, note: Sequence[int]) -> int:
        """Send a note to all others; return its number on the channel."""
        data = self._note.pack(channel, *note)
        for member, end in self._write.items():
            try:
                os.write(end, data)
            except OSError as e:
                raise MemberError(_GONE.format(self._pids[member], e), member) from e
        self._sent[channel] += 1
        return self._sent[channel] - 1

    def receive(self, channel: int, number: int, timeout: timedelta) -> dict[int, tuple[int, ...]]:
        """Receive the note with a number from each other member; each can be received once."""
        until = time.monotonic() + timeout.total_seconds()
        for member in self._members:
            while (channel, member, number) not in self._received:
                if not self._take(member, max(until - time.monotonic(), 0)):
                    text = f"Timed out waiting for a note of process {self._pids[member]} (member {member})."
                    raise MemberError(text, member)
        return {member: self._received.pop((channel, member, number)) for member in self._members}

    def is_ready(self, channel: int, number: int) -> bool:
        """Return whether `receive` would return at once."""
        for member in self._members:
            while (channel, member, number) not in self._received:
                if not self._take(member, 0.0):
                    return False
        return True

    def _take(self, member: int, seconds: float) -> bool:
        """Read a member's notes, at least one; return False if none arrives in time."""
        poll = select.poll()
        poll.register(self._read[member], select.POLLIN)
        if not poll.poll(seconds * 1000):
            return False
        # The write of a note is atomic: the pipe has complete notes, or nothing and no writer.
        data = os.read(self._read[member], 64 * self._note.size)
        if not data:
            raise MemberError(f"Process {self._pids[member]} (member {member} of the group) is gone.", member)
        for channel, *note in self._note.iter_unpack(data):
            self._received[channel, member, self._taken[channel, member]] = tuple(note)
            self._taken[channel, member] += 1
        return True


def _close(ends: set[int]) -> None:
    for end in ends:
        os.close(end)
