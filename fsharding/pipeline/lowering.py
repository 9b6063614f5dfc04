"""Lower compute actions to a table with messages, gathers and scatters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from fsharding.pipeline.actions import MESSAGES, Action, Owner, Table, partner, peer, uses_parameters
from fsharding.pipeline.simulation import Durations, Timeline, simulate

__all__ = ["Frequency", "late", "lower"]

Frequency: TypeAlias = Literal["step", "microbatch"]
"""Once a step, or once for each microbatch."""


class _Message(NamedTuple):
    """A send with what orders it: when it is ready if each F, I and W takes 1, then its sender, so no two are equal."""

    ready: float
    sender: int
    send: Action


class _Entry(NamedTuple):
    """Something to put before the compute action at `slot`; there, by `order` of its kind and then by time."""

    slot: int
    order: int
    ready: float
    sender: int
    action: Action


def lower(owner: Owner, computes: Table, *, gather: Frequency, scatter: Frequency, ahead: int) -> Table:
    """Return the full table of complete computes whose order has an end."""
    timeline = simulate(owner, computes, Durations())
    entries = _messages(owner, timeline, computes, ahead)
    rows: list[tuple[Action, ...]] = []
    for rank, row in enumerate(computes):
        extra = sorted(entries[rank] + _gathers(row, gather, ahead) + _scatters(row, scatter))
        merged: list[Action] = []
        at = 0
        for slot in range(len(row) + 1):
            while at < len(extra) and extra[at].slot == slot:
                merged.append(extra[at].action)
                at += 1
            merged += row[slot : slot + 1]
        rows.append(tuple(merged))
    return tuple(rows)


def late(row: Sequence[Action], owner: Owner) -> tuple[Action, ...]:
    """Move the receives of a row as late as possible: before their use, or a later message of the same ranks."""
    placed: list[Action] = []
    held: list[Action] = []
    for action in row:
        if action.kind in ("RECV_F", "RECV_B"):
            held.append(action)
            continue
        due = _due(action, held, owner)
        placed += due
        held = [a for a in held if a not in due]
        placed.append(action)
    return (*placed, *held)


def _due(action: Action, held: Sequence[Action], owner: Owner) -> list[Action]:
    """Return the receives before an action: for a send all between its ranks, else what it uses and those before."""
    if action.kind in MESSAGES:
        return [a for a in held if peer(a, owner) == peer(action, owner)]
    way = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(action.kind)
    used = next((i for i, a in enumerate(held) if a == (way, action.stage, action.microbatch)), None)
    if used is None:
        return []
    return [a for a in held[: used + 1] if peer(a, owner) == peer(held[used], owner)]


def _messages(owner: Owner, timeline: Timeline, computes: Table, ahead: int) -> list[list[_Entry]]:
    """Return the sends and receives of each rank."""
    # The messages of two ranks are put in the order in which they are ready. On a rank a send has its place; a receive
    # goes before the compute that uses it, and before every later message between the two. That never puts it before an
    # earlier send of this rank: a message that was ready earlier was sent before the compute that uses this receive.
    place = [{action: i for i, action in enumerate(row)} for row in computes]
    pairs: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank, row in enumerate(timeline.spans):
        for span in row:
            send = _send(span.action, owner)
            if send is not None:
                other = owner[partner(send).stage]
                pairs[min(rank, other), max(rank, other)].append(_Message(span.end, rank, send))
    entries: list[list[_Entry]] = [[] for _ in computes]
    for pair, messages in pairs.items():
        messages.sort()
        for rank in pair:
            slots = _slots(rank, messages, place[rank], ahead)
            entries[rank] += [
                _Entry(slot, 0, m.ready, m.sender, m.send if m.sender == rank else partner(m.send))
                for slot, m in zip(slots, messages, strict=True)
            ]
    return entries


def _send(action: Action, owner: Owner) -> Action | None:
    """Return the message that a compute action has to send, if its result goes to another rank."""
    kind, stage, microbatch = action
    to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
    if not 0 <= to < len(owner) or owner[to] == owner[stage]:
        return None
    return Action("SEND_F" if kind == "F" else "SEND_B", stage, microbatch)


def _slots(rank: int, messages: list[_Message], place: dict[Action, int], ahead: int) -> list[int]:
    """Return before which compute action one side of two ranks has each of its messages."""
    slots: list[int] = []
    latest = 1 + max(place.values(), default=-1)
    for _, sender, send in reversed(messages):
        if sender == rank:
            latest = _of(place, send, "F" if send.kind == "SEND_F" else "B") + 1
        else:
            received = partner(send)
            latest = min(latest, _of(place, received, "F" if received.kind == "RECV_F" else "B"))
        slots.append(latest)
    slots.reverse()
    for i, (_, sender, _) in enumerate(messages):
        if sender != rank:
            slots[i] = max(slots[i - 1] if i else 0, slots[i] - ahead)
    return slots


def _of(place: dict[Action, int], message: Action, kind: Literal["F", "B"]) -> int:
    """Return where the compute action is that makes or uses a message; a backward is a B or an I."""
    _, stage, microbatch = message
    result = place.get(Action(kind, stage, microbatch))
    return place[Action("I", stage, microbatch)] if result is None else result


def _gathers(row: tuple[Action, ...], frequency: Frequency, ahead: int) -> list[_Entry]:
    """Return the gathers of a rank: before the first use of each stage, or before each."""
    result: list[_Entry] = []
    used: dict[Action, int] = {}  # by gather, the first slot after what it was last for
    for i, action in enumerate(row):
        gather = Action("GATHER", action.stage, action.microbatch if frequency == "microbatch" else None)
        if uses_parameters(action) and (frequency == "microbatch" or gather not in used):
            result.append(_Entry(max(used.get(gather, 0), i - ahead), 2, float(i), 0, gather))
            used[gather] = i + 1
    return result


def _scatters(row: tuple[Action, ...], frequency: Frequency) -> list[_Entry]:
    """Return the scatters of a rank: after the last gradient of each stage, or after each."""
    result: dict[Action, _Entry] = {}
    for i, action in enumerate(row):
        if action.kind in ("B", "W"):
            scatter = Action("SCATTER", action.stage, action.microbatch if frequency == "microbatch" else None)
            result[scatter] = _Entry(i + 1, 1, float(i), 0, scatter)
    return list(result.values())
