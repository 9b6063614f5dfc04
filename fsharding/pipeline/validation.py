"""Check a table of actions, and list all its faults as sentences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from fsharding.pipeline.actions import COMPUTES, KINDS, MESSAGES, Action, Owner, Table, blocked, needs, partner, peer

__all__ = ["compute_faults", "faults"]


def faults(owner: Owner, microbatches: int, table: Table) -> list[str]:
    """Return the faults of a table, as sentences."""
    rows = list(_strangers(owner, microbatches, table))
    if rows:
        return rows  # the other checks look up neighbors by index
    rows += _incomplete(owner, microbatches, table)
    rows += _unsent(owner, microbatches, table)
    rows += _disordered(owner, table)
    rows += _mixed(table)
    for rank, row in enumerate(table):
        for stage in (stage for stage, at in enumerate(owner) if at == rank):
            own = [action for action in row if action.stage == stage]
            rows += [f"rank {rank}: {text}" for text in (*_ungathered(stage, own), *_unscattered(stage, own))]
    # Order between ranks only makes sense if every rank is complete by itself.
    return rows or _crossed(owner, table) or _endless(owner, table)


def compute_faults(owner: Owner, microbatches: int, computes: Table) -> list[str]:
    """Return the faults of a table without messages, except those of its order."""
    rows = [
        f"rank {rank}: {action} isn't an F, B, I or W"
        for rank, row in enumerate(computes)
        for action in row
        if action.kind not in COMPUTES
    ]
    rows = rows or list(_strangers(owner, microbatches, computes))
    return rows or list(_incomplete(owner, microbatches, computes))


def _strangers(owner: Owner, microbatches: int, table: Table) -> Iterator[str]:
    """Find unknown stages, microbatches and kinds, and actions on the wrong rank."""
    for stage, rank in enumerate(owner):
        if not 0 <= rank < len(table):
            yield f"stage {stage} isn't on any of the {len(table)} ranks"
    if len({*owner}) < len(table):
        yield f"ranks {sorted({*range(len(table))} - {*owner})} have no stage"
    for rank, row in enumerate(table):
        for action in row:
            kind, stage, microbatch = action
            if kind not in KINDS:
                yield f"rank {rank}: {action} has an unknown kind"
            elif not 0 <= stage < len(owner):
                yield f"rank {rank}: {action}, but stages are 0 to {len(owner) - 1}"
            elif owner[stage] != rank:
                yield f"rank {rank}: {action}, but stage {stage} is on rank {owner[stage]}"
            elif microbatch is None and kind not in ("GATHER", "SCATTER"):
                yield f"rank {rank}: {action} has no microbatch"
            elif microbatch is not None and not 0 <= microbatch < microbatches:
                yield f"rank {rank}: {action}, but microbatches are 0 to {microbatches - 1}"
            elif kind in MESSAGES and not 0 <= partner(action).stage < len(owner):
                yield f"rank {rank}: {action} has no stage at its other end"


def _incomplete(owner: Owner, microbatches: int, table: Table) -> Iterator[str]:
    """Find computes that are missing, and actions that appear twice."""
    for rank, row in enumerate(table):
        for action, count in Counter(row).items():
            allowed = 3 if action.kind == "GATHER" and action.microbatch is not None else 1
            if count > allowed:
                yield f"rank {rank}: {action} appears {count} times"
    there = {action for row in table for action in row}
    for stage, rank in enumerate(owner):
        for m in range(microbatches):
            if Action("F", stage, m) not in there:
                yield f"rank {rank}: {stage}F{m} is missing"
            halves = [Action(kind, stage, m) for kind in ("I", "W") if Action(kind, stage, m) in there]
            if Action("B", stage, m) not in there:
                if not halves:
                    yield f"rank {rank}: {stage}B{m} is missing, or {stage}I{m} and {stage}W{m}"
                elif len(halves) == 1:
                    other = Action("W" if halves[0].kind == "I" else "I", stage, m)
                    yield f"rank {rank}: {halves[0]} has no {other}"
            elif halves:
                yield f"rank {rank}: {' and '.join(map(str, halves))} would repeat {stage}B{m}"


def _unsent(owner: Owner, microbatches: int, table: Table) -> Iterator[str]:
    """Find messages that are missing, and messages within a rank."""
    for rank, row in enumerate(table):
        there = {action for action in row if action.kind in MESSAGES}
        for action in sorted(there):
            if peer(action, owner) == rank:
                yield f"rank {rank}: {action} is not needed, both stages are on this rank"
        for stage in (stage for stage, at in enumerate(owner) if at == rank):
            for action in (Action(kind, stage, m) for m in range(microbatches) for kind in sorted(MESSAGES)):
                other = partner(action).stage
                if 0 <= other < len(owner) and owner[other] != rank and action not in there:
                    yield f"rank {rank}: {action} is missing"


def _disordered(owner: Owner, table: Table) -> Iterator[str]:
    """Find actions that come before one that they need."""
    for rank, row in enumerate(table):
        place = {action: i for i, action in reversed(list(enumerate(row)))}
        for i, action in enumerate(row):
            for choices in needs(action, owner):
                result = [choice for choice in choices if choice in place]
                if result and min(place[choice] for choice in result) > i:
                    yield f"rank {rank}: {action} comes before {result[0]}, which it needs"


def _ungathered(stage: int, own: list[Action]) -> Iterator[str]:
    """Find uses of a stage's parameters before they are gathered, and gathers that are not used."""
    gathered = False
    waiting = dict[int | None, int]()
    used = False
    apart = list[Action]()
    for action in own:
        kind, _, m = action
        if kind == "GATHER":
            if m is None:
                yield from (f"{action} is too late: {before} comes before it" for before in apart)
                gathered = True
            elif gathered or waiting.get(m):
                yield f"{action} is not needed: the parameters of stage {stage} are gathered already"
            else:
                waiting[m], apart = 1, apart or [action]
        elif action.uses_parameters:
            used = True
            if not gathered and not waiting.get(m):
                yield f"{action} has no {stage}GATHER or {stage}GATHER{m} before it"
            waiting[m] = 0
    unused = [f"{stage}GATHER{m}" for m, left in waiting.items() if left and not gathered]
    if gathered and not used:
        unused.append(f"{stage}GATHER")
    yield from (f"{name} is not used" for name in unused)


def _mixed(table: Table) -> Iterator[str]:
    """Find ranks that gather or scatter once per step for some stages, and per microbatch for others."""
    for rank, row in enumerate(table):
        for kind in ("GATHER", "SCATTER"):
            once = {a.stage for a in row if a.kind == kind and a.microbatch is None}
            each = {a.stage for a in row if a.kind == kind and a.microbatch is not None} - once
            if once and each:
                text = f"stages {sorted(once)} {kind} once per step, stages {sorted(each)} per microbatch"
                yield f"rank {rank}: {text}; all stages of a rank must do the same"


def _unscattered(stage: int, own: list[Action]) -> Iterator[str]:
    """Find gradients that are not reduced, are reduced twice, or come too late."""
    last = {action.microbatch: i for i, action in enumerate(own) if action.kind in ("B", "W")}
    place = {action.microbatch: i for i, action in enumerate(own) if action.kind == "SCATTER"}
    if None in place:
        yield from (f"{stage}SCATTER{m} is not needed: {stage}SCATTER does the same" for m in place if m is not None)
        late = [own[i] for i in last.values() if i > place[None]]
        yield from (f"{stage}SCATTER comes before {action}" for action in late)
    elif not place:
        yield f"{stage}SCATTER is missing"
    else:
        for m, i in last.items():
            if m not in place:
                yield f"{stage}SCATTER{m} is missing"
            elif place[m] < i:
                yield f"{stage}SCATTER{m} comes before {own[i]}"


def _crossed(owner: Owner, table: Table) -> list[str]:
    """Find channels whose receives are not in the order of the sends; one row each."""
    sends = defaultdict[tuple[int, int], list[Action]](list)
    receives = defaultdict[tuple[int, int], list[Action]](list)
    for rank, row in enumerate(table):
        for action in row:
            if action.kind.startswith("SEND"):
                sends[rank, peer(action, owner)].append(action)
            elif action.kind.startswith("RECV"):
                receives[peer(action, owner), rank].append(action)
    rows: list[str] = []
    for (source, target), sent in sends.items():
        pairs = zip(sent, receives[source, target], strict=True)
        first = next(((s, r) for s, r in pairs if partner(s) != r), None)
        if first is not None:
            rows.append(f"rank {source} sends {first[0]}, but rank {target} receives {first[1]}")
    return rows


def _endless(owner: Owner, table: Table) -> list[str]:
    """Find ranks that would wait forever; one row each."""
    # The messages of a pair of ranks run in order, each when both ranks have posted it: no backend may need more.
    posted = [defaultdict[int, list[Action]](list) for _ in table]  # by rank, then by the rank at the other end
    done: dict[tuple[int, int], int] = defaultdict(int)  # number of finished messages of each pair
    over: set[Action] = set()

    def settle(rank: int, other: int) -> None:
        mine = posted[rank][other]
        theirs = posted[other][rank]
        pair = (min(rank, other), max(rank, other))
        while (n := done[pair]) < min(len(mine), len(theirs)) and partner(mine[n]) == theirs[n]:
            over.update((mine[n], theirs[n]))
            done[pair] += 1

    def step(rank: int, action: Action) -> bool:
        if action.kind in MESSAGES:
            other = peer(action, owner)
            posted[rank][other].append(action)
            settle(rank, other)
        return all(any(c in over or c.kind not in MESSAGES for c in choices) for choices in needs(action, owner))

    rows = [f"rank {rank} waits forever at {action}" for rank, action in blocked(table, step)]
    for rank, others in enumerate(posted):
        for other, mine in others.items():
            n = done[min(rank, other), max(rank, other)]
            theirs = posted[other][rank]
            if rank < other and n < min(len(mine), len(theirs)):
                rows.append(f"ranks {rank} and {other} are at {mine[n]} and {theirs[n]}, which don't match")
    return rows
