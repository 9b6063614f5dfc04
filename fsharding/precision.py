"""Precision as a value: the dtypes of parameters, compute, wire, gradients and moments, and dynamic loss scaling.

In: a `Precision`. Out: the dtype of each role for a leaf, and the loss scale's next state.
None means the leaf's own dtype. Law: ordered sums over ranks are taken in float32 at least, whatever travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fsharding.errors import ConfigError, message

__all__ = ["DTYPES", "BF16", "FP16", "FP32", "LossScale", "Precision", "ScaleState", "scaled_loss", "wide"]


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of floating point parameters, gradients and moments."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): halve on overflow, double after a row of good steps.

    Attributes:
        initial: the first scale.
        interval: good steps in a row before the scale is doubled.
        least: the scale does not fall below it: a step that is not finite there is refused, as without scaling.

    Raises:
        ConfigError: a number is not above 0, or the first scale is below the least.

    Example:
        >>> scale = fs.LossScale(initial=2.0**12)
        >>> fs.Precision(compute=torch.float16, loss_scale=scale).init_scale().scale
        tensor(4096.)
    """

    initial: float = 2.0**16
    interval: int = 2000
    least: float = 1.0

    def __post_init__(self) -> None:
        if not (self.initial >= self.least > 0 and self.interval > 0):
            mend = "Numbers are above 0, and initial is at least as large as least."
            raise ConfigError(message("LossScale", f"got {self}.", mend=mend))


class ScaleState(NamedTuple):
    """The loss scale (float32, 0-d) and how many good steps there have been since it last changed (int64, 0-d)."""

    scale: Tensor
    good_steps: Tensor


Sums: TypeAlias = Literal["auto", "ordered", "native"]
"""How gradients are summed over ranks; see `Precision`."""


@dataclass(frozen=True)
class Precision:
    """The dtype of each role; None means the dtype of the leaf, and follows from the roles above it.

    Attributes:
        params: main parameters, which the optimizer updates.
        compute: what the loss function sees, and the wire dtype of a gather; by default that of the main parameter.
        reduce: wire dtype of the gradients; by default that in which they come out of backward.
        grads: accumulated gradients; by default that of the main parameter, and float32 at least. Sums over ranks are
            in float32 at least also where a narrower one is asked for here, and are rounded once.
        sums: of gradients over ranks: "ordered", in one tree whatever the backend and the layout, so that all laws
            about bits hold; "native", by the backend's own reduce-scatter and all-reduce, in the dtype of `reduce`, or
            else in that of the sums; "auto" is ordered on the CPU and native elsewhere.
        moments: optimizer moments, where the optimizer has no dtype of its own; by default as for gradients. Updates
            are computed in float32 at least.
        loss_scale: dynamic loss scaling, or None.

    Example:
        >>> precision = fs.Precision(params=torch.bfloat16, moments=torch.bfloat16)
        >>> precision.compute_dtype(torch.bfloat16)
        torch.bfloat16
    """

    params: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    grads: torch.dtype | None = None
    moments: torch.dtype | None = None
    loss_scale: LossScale | None = None
    sums: Sums = "auto"

    def __post_init__(self) -> None:
        if self.sums not in get_args(Sums):
            mend = f"Use one of {', '.join(get_args(Sums))}."
            raise ConfigError(message("Precision", f"got sums={self.sums!r}.", mend=mend))
        roles = {role: getattr(self, role) for role in ("params", "compute", "reduce", "grads", "moments")}
        wrong = [
            f"{role}={dtype}"
            for role, dtype in roles.items()
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES)
        ]
        if wrong:
            mend = f"Use one of {', '.join(map(str, DTYPES))}."
            raise ConfigError(message("Precision", "got dtypes that kernels lack.", wrong, mend))

    def main_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of the main parameter of a leaf."""
        return self.params if self.params and leaf.is_floating_point else leaf

    def compute_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype in which the loss function sees a leaf."""
        return self.compute if self.compute and leaf.is_floating_point else self.main_dtype(leaf)

    def grad_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a leaf are summed and kept."""
        return self.grads or wide(self.main_dtype(leaf))

    def moment_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of the optimizer's moments of a leaf."""
        return self.moments or wide(leaf)

    def sums_natively(self, device_type: str | None) -> bool:
        """Whether the backend sums gradients on a device by its own collectives.

        Args:
            device_type: None where there is no device, which counts as a CPU.
        """
        return self.sums == "native" or (self.sums == "auto" and device_type not in ("cpu", None))

    def init_scale(self) -> ScaleState | None:
        """The first loss scale state, or None without loss scaling."""
        if self.loss_scale is None:
            return None
        return ScaleState(torch.tensor(self.loss_scale.initial), torch.zeros((), dtype=torch.int64))

    def next_scale(self, state: ScaleState, *, finite: bool | Tensor) -> ScaleState:
        """The scale after a step: halved when the step overflowed, doubled after `interval` good ones.

        Args:
            state: before the step.
            finite: whether it did not overflow; a bool of no dims is not read by the host.
        """
        assert self.loss_scale is not None
        was_finite = finite if isinstance(finite, Tensor) else torch.tensor(finite, device=state.scale.device)
        scale, good_steps = (x.to(was_finite.device, non_blocking=True) for x in state)
        good = (good_steps + 1) * was_finite
        doubled = good >= self.loss_scale.interval
        larger = torch.where(doubled, scale * 2.0, scale)
        smaller = (scale * 0.5).clamp(min=self.loss_scale.least)
        return ScaleState(torch.where(was_finite, larger, smaller), good * doubled.logical_not())


def scaled_loss(loss: Tensor, scale: Tensor | float | None) -> Tensor:
    """A loss times its scale, in the dtype of the loss; the product is rounded once.

    Args:
        loss: 0-d.
        scale: float32, 0-d, which is not read by the host; or a number. None leaves the loss as it is.
    """
    if scale is None or not loss.is_floating_point():
        return loss
    return (loss.to(wide(loss.dtype)) * scale).to(loss.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or the leaf's own when that is wider."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


FP32 = Precision()
BF16 = Precision(params=torch.float32, compute=torch.bfloat16)
FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale())
