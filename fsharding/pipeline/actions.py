"""Actions: the vocabulary of a pipeline schedule, and what each action needs before it."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias, get_args

from fsharding.base.errors import ScheduleError, message
from fsharding.base.public import public

__all__ = [
    "COMPUTES",
    "KINDS",
    "MESSAGES",
    "Action",
    "Kind",
    "Owner",
    "Table",
    "needs",
    "partner",
    "peer",
    "uses_parameters",
]

Kind: TypeAlias = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "SCATTER"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COMPUTES: frozenset[Kind] = frozenset({"F", "B", "I", "W"})
MESSAGES: frozenset[Kind] = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B"})

_PATTERN = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d*)")


class Action(NamedTuple):
    """One thing that a rank does for one of its stages. Prints as `3F0`: stage 3, forward, microbatch 0.

    | kind | what |
    |---|---|
    | F | forward |
    | B | backward, for the inputs and the weights |
    | I | backward for the inputs only |
    | W | backward for the weights only, some time after I |
    | SEND_F, RECV_F | activations to the next stage, from the stage before |
    | SEND_B, RECV_B | gradients to the stage before, from the next stage |
    | GATHER | get the stage's parameters over the data axes and keep them to the end of its last F, B or I |
    | SCATTER | reduce the stage's gradients over the data axes, to where the optimizer wants them |

    GATHER and SCATTER start collectives. The first F of the stage waits for its parameters; the end of the step for its
    gradients. With a microbatch, a GATHER is for the next F, B or I of that microbatch: it starts the stage's first
    unit, and the compute prefetches the others. With a microbatch, a SCATTER stands for the reductions to
    `layout.grads` that its B or W has started; they finish before this rank reduces anything else. The last SCATTER of
    a stage also reduces to the optimizer's shardings. W uses tensors that I has saved, and no parameters. I of the
    first stage runs its backward and returns no input gradient.

    Attributes:
        kind: one of `KINDS`.
        stage: the stage that acts, in a message as well: the sender's own in a send, the receiver's own in a receive.
        microbatch: None in a GATHER or SCATTER that stands for all of them.

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

    @staticmethod
    @public
    def parse(text: str) -> Action:
        """The action that prints so: `Action.parse("3SEND_F0")`.

        Raises:
            ScheduleError: no action prints so.
        """
        result = _PATTERN.fullmatch(text)
        if result is None:
            mend = f"Write stage, kind, microbatch, such as '3F0'; kinds are {', '.join(KINDS)}."
            raise ScheduleError(message(f"cannot read {text!r}.", mend=mend))
        stage, kind, microbatch = result.groups()
        return Action(KINDS[KINDS.index(kind)], int(stage), int(microbatch) if microbatch else None)


def uses_parameters(action: Action) -> bool:
    """Return whether an action computes with the parameters of its stage; W has what it needs from I."""
    return action.kind in ("F", "B", "I")


Owner: TypeAlias = tuple[int, ...]
"""The rank of each stage."""

Table: TypeAlias = tuple[tuple[Action, ...], ...]
"""For each rank its actions, in order."""

_PARTNERS: dict[Kind, tuple[Kind, int]] = {
    "SEND_F": ("RECV_F", +1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", +1),
}


def partner(action: Action) -> Action:
    """Return the other end of a message: `3RECV_F0` for `2SEND_F0`."""
    kind, step = _PARTNERS[action.kind]
    return Action(kind, action.stage + step, action.microbatch)


def peer(action: Action, owner: Owner) -> int:
    """Return the rank at the other end of a message."""
    return owner[partner(action).stage]


def needs(action: Action, owner: Owner) -> tuple[tuple[Action, ...], ...]:
    """Return tuples of alternatives, one of each of which the same rank must have before an action."""
    # A neighbor on the same rank hands over without messages, so its compute action stands for the receive.
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
    """Return the actions that give the gradient of a stage's inputs."""
    return Action("B", stage, microbatch), Action("I", stage, microbatch)
