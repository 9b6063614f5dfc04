"""The options of a train step: documented once, in `StepOptions`, with defaults in `StepSettings`."""

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
"""When the host reads the verdict on a step: in the same call, or in the next one."""


class StepOptions(TypedDict, total=False):
    """Options of a train step: keywords of `setup` and `make_train_step`, each with a default.

    Attributes:
        microbatches: Number of equal parts of this rank's batch along dim 0; their gradients are accumulated. At
            least 1. Default: 1.
        schedule: Pipeline schedule of a `Model`: a `Schedule`, or a name that is planned for the size of `pp` and
            `microbatches`. Default: "1f1b". Ignored on a mesh without `pp`.
        donate: Whether the step may overwrite its state, which then raises `DonatedError`. Default: False.
        policy: What blocks of a `Model` save; a loss function gives it to `fs.scan_units`. Default: all but weights.
        has_aux: Whether the loss function returns aux last: `((sum, count), aux)` or `((sum, count), buffers, aux)`.
            Aux is any tree and is returned in the metrics. Default: False.
        check: When a loss or gradient that isn't finite raises. "sync": in the step, which reads one number
            from the device before it updates; the default on the CPU. "async": in the next call, in `metrics.loss` or
            at exit, with status 1; the step reads nothing and masks its update. The default on other devices. Both
            give bitwise identical losses and states.
        prefetch_depth: Number of units to gather ahead of the one that computes, in forward and backward; it changes
            no bit. Policies that free gathered weights keep at most `prefetch_depth + 1` units. Default: 1.

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
    """The complete options of a step, with defaults; see `StepOptions`."""

    microbatches: int = 1
    schedule: str | Schedule = "1f1b"
    donate: bool = False
    policy: Policy = policies.save_except_gathered
    has_aux: bool = False
    check: Check | None = None
    prefetch_depth: int = 1

    def refuse_wrong(self, *, of_model: bool = True) -> None:
        """Refuse values that are wrong for every layout and batch."""
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ConfigError(message(f"got microbatches={self.microbatches!r}.", mend="Give a number from 1."))
        check_policy(self.policy)
        if self.policy is not policies.save_except_gathered and not of_model:
            mend = "Pass it to fs.scan_units, fs.gather_unit or fs.functionalize, where the loss gathers its units."
            rule = f"got policy={self.policy.name!r} for a loss function, which has no blocks of its own."
            raise ConfigError(message(rule, mend=mend))
        if self.check not in (None, "sync", "async"):
            mend = 'Give "sync" to raise in the step, "async" to raise in the next call, or None for the default.'
            raise ConfigError(message(f"got check={self.check!r}.", mend=mend))
        check_depth(self.prefetch_depth)


def takes_step_options(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Show every option of `**options: Unpack[StepOptions]` in a function's signature, with type and default."""
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
    # `public` explains a TypeError by these annotations.
    marked.__annotations__ = {**fn.__annotations__, **hints}
    return fn
