"""Lower compute actions to a table with messages, all-gathers and reductions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from fsharding.pipeline.actions import MESSAGES, Action, Owner, Table, needs, partner, peer, send_of
from fsharding.pipeline.simulation import Durations, Timeline, simulate

__all__ = ["Frequency", "late", "lower"]

Frequency: TypeAlias = Literal["step", "microbatch"]
"""Once a step, or once per microbatch."""


class _Entry(NamedTuple):
    """An action with its sort key: the number of the compute action that it precedes or is, its kind, its time."""

    slot: int
    order: int  # 0 message, 1 SCATTER, 2 GATHER, 3 compute
    ready: float  # of a message: when it is ready if each F, I and W takes 1
    sender: int
    action: Action


def lower(owner: Owner, computes: Table, *, gather: Frequency, scatter: Frequency, ahead: int) -> Table:
    """Insert messages, gathers and scatters into complete computes whose order has an end."""
    timeline = simulate(owner, computes, Durations())
    messages = _messages(owner, timeline, computes, ahead)
    rows: list[tuple[Action, ...]] = []
    for rank, row in enumerate(computes):
        own = [_Entry(slot, 3, 0.0, 0, action) for slot, action in enumerate(row)]
        entries = sorted(own + messages[rank] + _gathers(row, gather, ahead) + _scatters(row, scatter))
        rows.append(tuple(entry.action for entry in entries))
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
    """Return the receives due before an action: all of a send's rank pair, or the one it uses and those before it."""
    if action.kind in MESSAGES:
        return [a for a in held if peer(a, owner) == peer(action, owner)]
    needed = {choice for choices in needs(action, owner) for choice in choices}
    used = next((i for i, a in enumerate(held) if a in needed), None)
    if used is None:
        return []
    return [a for a in held[: used + 1] if peer(a, owner) == peer(held[used], owner)]


def _messages(owner: Owner, timeline: Timeline, computes: Table, ahead: int) -> list[list[_Entry]]:
    """Return the sends and receives of each rank."""
    # Both ranks of a pair have their messages in one order, by the time they are ready, or they could deadlock. A send
    # follows its compute. A receive goes before the compute that uses it, and before every later message of the pair.
    # That never moves it before an earlier send of this rank: a message that is ready earlier is sent before the
    # compute that uses this receive.
    place = [{action: i for i, action in enumerate(row)} for row in computes]
    pairs: dict[tuple[int, int], list[_Entry]] = defaultdict(list)  # sends, each with slot 0 until `_slots` has all
    for rank, row in enumerate(timeline.spans):
        for span in row:
            send = send_of(span.action, owner)
            if send is not None:
                other = owner[partner(send).stage]
                pairs[min(rank, other), max(rank, other)].append(_Entry(0, 0, span.end, rank, send))
    entries: list[list[_Entry]] = [[] for _ in computes]
    for pair, messages in pairs.items():
        messages.sort()
        for rank in pair:
            slots = _slots(rank, messages, place[rank], ahead)
            for slot, sent in zip(slots, messages, strict=True):
                own = sent.action if sent.sender == rank else partner(sent.action)
                entries[rank].append(sent._replace(slot=slot, action=own))
    return entries


def _slots(rank: int, messages: list[_Entry], place: dict[Action, int], ahead: int) -> list[int]:
    """Return for each send of a pair the compute action of this rank before which the message goes."""
    slots: list[int] = []
    latest = 1 + max(place.values(), default=-1)
    # Backwards, so that `latest` is the slot of the next message, which no earlier one may pass.
    for message in reversed(messages):
        send = message.action
        if message.sender == rank:
            latest = _of(place, send, "F" if send.kind == "SEND_F" else "B") + 1
        else:
            received = partner(send)
            latest = min(latest, _of(place, received, "F" if received.kind == "RECV_F" else "B"))
        slots.append(latest)
    slots.reverse()
    # Receives are posted `ahead` computes early, but not before the previous message of the pair.
    for i, message in enumerate(messages):
        if message.sender != rank:
            slots[i] = max(slots[i - 1] if i else 0, slots[i] - ahead)
    return slots


def _of(place: dict[Action, int], message: Action, kind: Literal["F", "B"]) -> int:
    """Return the position of the compute action that makes or uses a message; a backward is a B or an I."""
    _, stage, microbatch = message
    result = place.get(Action(kind, stage, microbatch))
    return place[Action("I", stage, microbatch)] if result is None else result


def _gathers(row: tuple[Action, ...], frequency: Frequency, ahead: int) -> list[_Entry]:
    """Return the gathers of a rank: before the first use of each stage, or before each."""
    result: list[_Entry] = []
    used: dict[Action, int] = {}  # by gather, the first slot after what it was last for
    for i, action in enumerate(row):
        gather = Action("GATHER", action.stage, action.microbatch if frequency == "microbatch" else None)
        if action.uses_parameters and (frequency == "microbatch" or gather not in used):
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
