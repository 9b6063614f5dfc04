"""The bits of `fs.preemption` in the sums of a train step.

In: whether this rank wants to stop. Out: `preemption.agree` with the number of ranks that do, once a step.
Law: each rank's bit is looked at once a step, so that ranks that stepped together agree on the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsharding._compat import cache_on_mesh
from fsharding.comm.transport import start_sum
from fsharding.mesh import preemption
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group

__all__ = ["StopBit"]


class StopBit:
    """The bits of all ranks on their way through the sums of one step.

    A sum that takes `as_term` along calls `summed`. The bit is read before the first sum and never again: ranks that
    summed together would else differ in a later sum over other axes.

    Args:
        mesh: of the step.
        bit: whether this rank wants to stop, float64, 0-d; by default that of now.

    Attributes:
        axes: of the mesh, those over which the bit has not been summed.
    """

    __slots__ = ("_count", "_mesh", "axes")

    def __init__(self, mesh: Mesh, bit: Tensor | None = None) -> None:
        self._mesh, self.axes = mesh, _large(mesh)
        self._count = bit

    def as_term(self, device: torch.device) -> Tensor:
        """How many ranks want to stop, as far as it is known here: float64, 0-d."""
        if self._count is None:
            self._count = torch.full((), float(preemption.pending()), dtype=torch.float64, device=device)
        return self._count

    def summed(self, count: Tensor, axes: Sequence[str]) -> None:
        """Takes the sum of `as_term` over some axes."""
        self._count, self.axes = count, tuple(axis for axis in self.axes if axis not in axes)

    def settle(self, device: torch.device) -> None:
        """Ends the step."""
        preemption.agree(self.total(device))

    def total(self, device: torch.device) -> Tensor:
        """How many ranks want to stop.

        Axes over which the step has taken no sum, as with a loss function of one's own and no leaf cut over `tp`, get
        one of their own.
        """
        count = self.as_term(device)
        if self.axes:
            count = start_sum(count.reshape(1), axis_group(self._mesh, self.axes), torch.float64).wait()[0]
        return count


@cache_on_mesh(256)
def _large(mesh: Mesh) -> tuple[str, ...]:
    shape = abstract(mesh)
    return tuple(axis for axis in AXES if shape.axis_size(axis) > 1)
