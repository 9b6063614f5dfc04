"""Actions of a pipeline schedule, and what each needs before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

from fsharding.base.errors import ScheduleError, message
from fsharding.base.public import public

__all__ = [
    "COMPUTES", "KINDS", "MESSAGES", "Action", "Kind", "Owner", "Table", "blocked", "needs", "partner", "peer",
    "send_of",
]  # fmt: skip

Kind: TypeAlias = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "SCATTER"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPUTES: frozenset[Kind] = frozenset({"F", "B", "I", "W"})
MESSAGES: frozenset[Kind] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})

_PATTERN = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d*)")


class Action(NamedTuple):
    """One action of a rank for one of its stages. Prints as `3F0`: stage 3, forward, microbatch 0.

    | kind | action |
    |---|---|
    | F | forward |
    | B | backward, for the inputs and the weights |
    | I | backward for the inputs only |
    | W | backward for the weights only, some time after I |
    | SEND_F, RECV_F | send activations to the next stage, receive them from the previous stage |
    | SEND_B, RECV_B | send gradients to the previous stage, receive them from the next stage |
    | GATHER | all-gather the stage's parameters over the data axes; they stay until the end of its last F, B or I |
    | SCATTER | reduce the stage's gradients over the data axes, to the optimizer's shardings |

    GATHER and SCATTER start collectives; the first F of the stage waits for its parameters, and the end of the step for
    its gradients. With a microbatch, a GATHER serves the next F, B or I of that microbatch: it starts the stage's first
    unit, and the compute prefetches the others. With a microbatch, a SCATTER stands for the reductions to
    `layout.grads` that its B or W has started; they finish before this rank adds other gradients. The last SCATTER of a
    stage also reduces to the optimizer's shardings. W uses tensors that I has saved, and no parameters. I of the first
    stage runs its backward and returns no input gradient.

    Attributes:
        kind: One of `KINDS`.
        stage: Stage that acts. In a message: the sender for a send, the receiver for a receive.
        microbatch: Number of the microbatch; None in a GATHER or SCATTER for all of them.

    Example:
        >>> schedule = fs.pipeline.plan_schedule("gpipe", ranks=2, microbatches=2)
        >>> " ".join(str(action) for action in schedule.table[0][:3])
        '0GATHER 0F0 0SEND_F0'
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    __str__ = __repr__

    @property
    def uses_parameters(self) -> bool:
        """Whether it computes with the parameters of its stage; W uses tensors saved by I instead."""
        return self.kind in ("F", "B", "I")

    @staticmethod
    @public
    def parse(text: str) -> Action:
        """Parse the text of an action: `Action.parse("3SEND_F0")`.

        Args:
            text: Stage, kind and microbatch, as an action prints.

        Returns:
            The action.

        Raises:
            ScheduleError: The text isn't an action.
        """
        result = _PATTERN.fullmatch(text)
        if result is None:
            mend = f"Write stage, kind, microbatch, such as '3F0'; kinds are {', '.join(KINDS)}."
            raise ScheduleError(message(f"cannot read {text!r}.", mend=mend))
        stage, kind, microbatch = result.groups()
        return Action(KINDS[KINDS.index(kind)], int(stage), int(microbatch) if microbatch else None)


Owner: TypeAlias = tuple[int, ...]
"""The rank of each stage."""

Table: TypeAlias = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""

_PARTNERS: dict[Kind, tuple[Kind, int]] = {
    "SEND_F": ("RECV_F", +1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", +1),
}


def partner(action: Action) -> Action:
    """Return the action at the other end of a message: `3RECV_F0` for `2SEND_F0`."""
    kind, step = _PARTNERS[action.kind]
    return Action(kind, action.stage + step, action.microbatch)


def peer(action: Action, owner: Owner) -> int:
    """Return the rank at the other end of a message."""
    return owner[partner(action).stage]


def send_of(action: Action, owner: Owner) -> Action | None:
    """Return the send of a compute action whose result goes to a different rank, else None."""
    kind, stage, microbatch = action
    to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
    if not 0 <= to < len(owner) or owner[to] == owner[stage]:
        return None
    return Action("SEND_F" if kind == "F" else "SEND_B", stage, microbatch)


def needs(action: Action, owner: Owner) -> tuple[tuple[Action, ...], ...]:
    """Return the prerequisites of an action on its rank, each as a tuple of alternatives."""
    # If the neighbor stage is on the same rank, there is no message, and its compute action replaces the receive.
    kind, stage, microbatch = action
    forward = (Action("F", stage, microbatch),)
    match kind:
        case "F" if stage > 0:
            local = owner[stage - 1] == owner[stage]
            return ((Action("F" if local else "RECV_F", stage - local, microbatch),),)
        case "B" | "I" if stage == len(owner) - 1:
            return (forward,)
        case "B" | "I":
            local = owner[stage + 1] == owner[stage]
            return (forward, _backward(stage + 1, microbatch) if local else (Action("RECV_B", stage, microbatch),))
        case "W":
            return ((Action("I", stage, microbatch),),)
        case "SEND_F":
            return (forward,)
        case "SEND_B":
            return (_backward(stage, microbatch),)
        case _:
            return ()


def _backward(stage: int, microbatch: int | None) -> tuple[Action, Action]:
    """Return the alternatives that compute the gradient of a stage's inputs."""
    return Action("B", stage, microbatch), Action("I", stage, microbatch)


def blocked(table: Table, step: Callable[[int, Action], bool]) -> list[tuple[int, Action]]:
    """Run `step(rank, action)` on all rows while it returns True; return the ranks that are left, at which action."""
    at = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            start = at[rank]
            while at[rank] < len(row) and step(rank, row[at[rank]]):
                at[rank] += 1
            moved |= at[rank] > start
    return [(rank, row[at[rank]]) for rank, row in enumerate(table) if at[rank] < len(row)]
