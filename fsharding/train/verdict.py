"""The verdict on a step: a code that the device computes, equal on all ranks, its error, and its copy to the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsharding.base import _compat, devices
from fsharding.base.calls import call_as
from fsharding.base.errors import FshardingError, NonFiniteError, report
from fsharding.formats.precision import LossScale
from fsharding.mesh.device_mesh import Mesh, everyone
from fsharding.mesh.failures import unlike_ranks
from fsharding.mesh.unit_order import UnitOrder
from fsharding.ops.capacity import FULL, is_full
from fsharding.optim.clip import LeafSquares
from fsharding.transforms.value_and_grad import is_divisor

__all__ = ["GOOD", "REFUSED", "SKIPPED", "UNLIKE", "PendingVerdict", "Refusal", "verdict_of"]

# Ordered by severity: a step has the largest code that applies.
GOOD = 0
SKIPPED = 1  # an overflow in fp16: the state keeps its values, and the loss scale falls
REFUSED = 2  # loss, gradients or count are unusable: the step raises
UNLIKE = 3  # ranks did different things: the step raises


def verdict_of(
    finite: Tensor, weighted: Tensor, alike: Tensor, scale: Tensor | None, loss_scale: LossScale | None
) -> Tensor:
    """Compute the code of a step (int64, 0-d, on the device of `finite`). The host reads nothing."""
    wrong = (finite & weighted).logical_not()
    unlike = alike.logical_not() * UNLIKE
    if scale is None or loss_scale is None:
        return torch.maximum(wrong * REFUSED, unlike)
    # A smaller scale can't fix a count, so a step without a positive finite one is refused at any scale.
    hopeless = weighted.logical_not() | (scale <= loss_scale.least)
    return torch.maximum(wrong * (hopeless * (REFUSED - SKIPPED) + SKIPPED), unlike)


@dataclass(frozen=True)
class Refusal:
    """The numbers that the error of a refused step shows."""

    # It is kept until the host reads the verdict, so it refers to norms and numbers and never to gradients.

    number: Tensor  # of the step
    loss: Tensor
    norm: Tensor
    count: Tensor
    squares: LeafSquares  # of the gradients
    order: UnitOrder | None  # of the step's units; None if one rank is alone
    mesh: Mesh
    parameters: Sequence[str] = ()  # paths of those that were not finite before the step

    def error(self, code: int) -> FshardingError:
        """Make the error of a refused step, or of ranks that did different things in it."""
        if code == UNLIKE:
            assert self.order is not None
            return call_as("train step", unlike_ranks, self.mesh, everyone(self.mesh).ranks, self.order)
        return NonFiniteError(call_as("train step", self._text))

    def _text(self) -> str:
        """Name the step and the cause: parameters that are not finite, its count, or else every such gradient."""
        if not self.parameters and not bool(is_divisor(self.count)):
            return _refusal_of_count(int(self.number), float(self.count))
        rows = [f"step {int(self.number)}: loss {float(self.loss)}, gradient norm {float(self.norm)}"]
        if self.parameters:
            rows += [f"params.{path}: it is not finite itself" for path in self.parameters]
            mend = "They were so before this step, and no step fixes them: load an earlier checkpoint."
            return report("train step refused: parameters are not finite.", rows, mend)
        rows += [f"params.{path}: its gradient is not finite" for path in self.squares.not_finite()]
        mend = "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
        return report("train step refused: loss or gradients are not finite.", rows, mend)


def _refusal_of_count(number: int, count: float) -> str:
    """Explain a count that is no divisor of a mean."""
    if is_full(count):
        mend = "The state is as before. Raise capacity=, or drop the excess tokens: Experts(capacity=..., drop=True)."
        return report(f"train step refused: {FULL}.", [f"step {number}"], mend)
    row = f"step {number}: the counts of all microbatches and data ranks sum to {count:g}"
    if count == 0:
        rule = "no token of this batch counts, so its loss has no mean."
        mend = "Skip such batches before you call the step."
    else:
        rule = f"the count of this batch is {count:g}."
        mend = "Return (sum, count) with the number of tokens that count."
    return report(f"train step refused: {rule}", [row], f"The state is as before. {mend}")


class PendingVerdict:
    """A verdict that the host has not read."""

    # `process` is the id of the process that made the step: a process forked from it must not report the verdict again.
    # `_code` is host memory, valid once `_event` has completed; `_event` is None if the copy was synchronous.
    # `_pending` keeps each verdict until it has been read, so that the exit hook reads the rest.

    def __init__(self, verdict: Tensor, refusal: Callable[[int], FshardingError]) -> None:
        self._refusal, self.process = refusal, os.getpid()
        on_device = devices.is_here(verdict.device.type)
        host = torch.empty((), dtype=torch.int64, pin_memory=on_device)
        host.copy_(verdict, non_blocking=True)
        self._event: Any = None
        if on_device:
            self._event = torch.Event(verdict.device)
            self._event.record()
        # A NumPy view: reading it runs no tensor operation, which a dispatch mode would see.
        self._code = host.numpy()
        _compat.call_first_at_exit(_last_step_was_refused)
        _pending[id(self)] = self

    def is_ready(self) -> bool:
        """Return whether reading the verdict waits for nothing."""
        return self._event is None or self._event.query()

    def raise_refused(self) -> None:
        """Wait for the verdict, and raise if it refuses the step. A second call does nothing."""
        if _pending.pop(id(self), None) is None:
            return
        if self._event is not None:
            self._event.synchronize()
        if (code := int(self._code)) in (REFUSED, UNLIKE):
            raise self._refusal(code)


_pending: dict[int, PendingVerdict] = {}
"""Unread verdicts: the last call's of each step in use."""


def _last_step_was_refused() -> bool:
    """Read pending verdicts, and print errors that no caller received."""
    refused = False
    for verdict in [*_pending.values()]:
        try:
            if verdict.process == os.getpid():
                verdict.raise_refused()
        except FshardingError as error:
            refused = True
            print(f"{type(error).__module__}.{type(error).__qualname__}: {error}", file=sys.stderr)
    return refused
