"""The options of a train step: each has its text once, in `StepOptions`, and its default in `StepSettings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, cast, get_type_hints

from fsharding.base.errors import ConfigError, message
from fsharding.pipeline.schedule import Schedule
from fsharding.transforms import policies
from fsharding.transforms.gather_context import check_depth
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["Check", "StepOptions", "StepSettings", "takes_step_options"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

Check: TypeAlias = Literal["sync", "async"]
"""When the host looks whether a step counts: in the step, or in the next one."""


class StepOptions(TypedDict, total=False):
    """The options of a train step: keywords of `setup` and `make_train_step`, each with a default.

    Attributes:
        microbatches: equal pieces along dim 0 of this rank's batch, whose gradients are accumulated; at least 1, the
            default.
        schedule: of a `Model` on a mesh with `pp`: a `Schedule`, or the name of one, "1f1b" by default, which is
            planned for the size of `pp` and `microbatches`, dualpipev with pairs where it has `ep`. Meshes without `pp`
            ignore it.
        donate: the step may overwrite the state that it is given, which raises `DonatedError` afterwards; by default it
            may not.
        policy: what the blocks of a `Model` keep for backward, by default `fs.policies.save_except_gathered`.
        has_aux: the loss function returns `((sum, count), aux)`, or `((sum, count), buffers, aux)`; aux, any tree,
            is returned in the metrics. False by default.
        check: when a step that is not finite raises. "sync": the step reads one number from the device before it
            updates, and raises; the default on the CPU. "async": the step reads nothing and masks its update; the error
            comes from the next call, from `metrics.loss`, or at the end of the program, whose status is then 1; the
            default on other devices. Losses and states are the same bit for bit.
        prefetch_depth: how many units are gathered ahead of the one that computes, in forward and backward; 1 by
            default. Under policies that free gathered weights at most `prefetch_depth + 1` are alive. With 0 each unit
            is gathered when it is needed. Losses are the same bit for bit.

    Example:
        >>> options: fs.StepOptions = {"microbatches": 2, "donate": True}
        >>> def loss_fn(params, batch):
        ...     error = batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]
        ...     return error.square().sum(), error.numel()
        >>> fs.make_train_step(loss_fn, fs.adamw(1e-2), **options)
        TrainStep(loss_fn, microbatches=2, donate=True)
    """

    microbatches: int
    schedule: str | Schedule
    donate: bool
    policy: Policy
    has_aux: bool
    check: Check | None
    prefetch_depth: int


@dataclass(frozen=True)
class StepSettings:
    """The options of a step as one value, complete; see `StepOptions`."""

    microbatches: int = 1
    schedule: str | Schedule = "1f1b"
    donate: bool = False
    policy: Policy = policies.save_except_gathered
    has_aux: bool = False
    check: Check | None = None
    prefetch_depth: int = 1

    def refuse_wrong(self) -> None:
        """Refuse values that no layout and no batch can make right."""
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ConfigError(message(f"got microbatches={self.microbatches!r}.", mend="Give a number from 1."))
        check_policy(self.policy)
        if self.check not in (None, "sync", "async"):
            mend = 'Give "sync" to raise in the step, "async" to raise in the next call, or None for the default.'
            raise ConfigError(message(f"got check={self.check!r}.", mend=mend))
        check_depth(self.prefetch_depth)


def takes_step_options(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Show each of the `**options: Unpack[StepOptions]` of a function in its signature, with type and default."""
    signature = inspect.signature(fn)
    hints = get_type_hints(StepOptions)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name]
        )
        for option in fields(StepSettings)
    ]
    marked = cast("Any", fn)
    marked.__signature__ = signature.replace(parameters=[*own, *options])
    # An unforeseen failure is explained by these: see `public`.
    marked.__annotations__ = {**fn.__annotations__, **hints}
    return fn
