"""`setup`: from a model, a loss function and an optimizer to a first state and a train step, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import ArgumentError, message
from fsharding.base.public import check_function, check_optimizer, is_optimizer, public, refuse, refuse_module
from fsharding.base.tree import Tree
from fsharding.formats.precision import FP32, Precision
from fsharding.mesh.device_mesh import Mesh, abstract, make_mesh
from fsharding.optim.base import GradientTransformation
from fsharding.pipeline.schedule import plan_schedule
from fsharding.pipeline.stages import stages_of
from fsharding.sharding.layout import plan_layout
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules
from fsharding.sharding.strategy import Strategy
from fsharding.sharding.strategy_names import StrategyName
from fsharding.train.buffers import Buffers
from fsharding.train.first_values import Sync
from fsharding.train.state import TrainState, init_state
from fsharding.train.step import TrainStep, make_train_step
from fsharding.train.step_options import StepOptions, StepSettings, takes_step_options

__all__ = ["setup"]


@public
@takes_step_options
def setup(
    init_or_model: Any,
    loss_fn: Callable[..., Any] | None,
    opt: GradientTransformation,
    key: Tensor,
    strategy: Strategy | StrategyName = "zero3",
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = DEFAULT_RULES,
    names: Tree = None,
    precision: Precision = FP32,
    frozen: str | Sequence[str] = (),
    stages: Mapping[str, Any] | None = None,
    buffers: Buffers | None = None,
    tp: Literal["shard", "replicate"] = "shard",
    sync: Sync | None = None,
    **options: Unpack[StepOptions],
) -> tuple[TrainState, TrainStep]:
    """Makes the first state of a run and its train step.

    Args:
        init_or_model: a function `key -> tree` of draws or tensors; a `Model`, or what `functionalize` returns; or a
            tree of tensors to start from, the same on every rank.
        loss_fn: `(params, batch) -> (sum, count)`; None for the loss of a `Model`.
        opt: the optimizer, such as `fs.adamw(1e-3)`.
        key: random key, the same on every rank.
        strategy: what is cut over the data axes, or its name.
        mesh: by default all ranks there are, along `dp`.
        rules: as in `plan_layout`, and so are the next ones.
        names: dim names of each leaf; a `Model` has its own.
        precision: dtypes at rest, of compute and on the wire.
        frozen: dotted paths, or beginnings of them, of leaves that are not trained.
        stages: who owns what along `pp`; by default, for a `Model`, as the schedule says.
        buffers: as in `init_state`.
        tp: as in `plan_layout`.
        sync: as in `init_state`: "rank0" starts all ranks from the values that rank 0 holds.
        **options: how the step computes: see `StepOptions`.

    Returns:
        (state, step): `state, metrics = step(state, batch)`; mesh and shardings are `state.layout`.

    Raises:
        ArgumentError: an argument of another kind, or two are swapped; no loss function for what is no `Model`.
        ConfigError: as from `plan_layout`, `init_state` and `make_train_step`, and so are all other errors.

    Example:
        >>> init = lambda key: {"w": fs.random.normal(key, (4, 1))}
        >>> def loss_fn(params, batch):
        ...     error = batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]
        ...     return error.square().sum(), error.numel()
        >>> state, step = fs.setup(init, loss_fn, fs.adamw(1e-2), fs.random.key(0))
        >>> batch = fs.local_batch({"x": torch.ones(6, 4), "y": torch.zeros(6, 1)}, state.layout.mesh)
        >>> state, metrics = step(state, batch)
        >>> int(state.step), str(state.layout.strategy), int(metrics.count)
        (1, 'zero3', 6)
    """
    settings = StepSettings(**options)
    refuse_module(init_or_model)
    check_optimizer(opt)
    if is_optimizer(loss_fn) and not hasattr(loss_fn, "block"):
        raise refuse("a loss function, then an optimizer", loss_fn, "Swap the two.")
    is_model = hasattr(init_or_model, "block")
    if loss_fn is None and not is_model:
        mend = "Give a function (params, batch) -> (sum, count)."
        raise ArgumentError(message("needs a loss function for what is no Model.", mend=mend))
    if loss_fn is not None:
        check_function("a loss function (params, batch)", loss_fn, 2)
    mesh = make_mesh(dp=-1) if mesh is None else mesh
    model, shapes = _model(init_or_model)
    if is_model and stages is None and (ranks := abstract(mesh).axis_size("pp")) > 1:
        given = settings.schedule
        schedule = plan_schedule(given, ranks, settings.microbatches) if isinstance(given, str) else given
        stages = stages_of(init_or_model, schedule)
    layout = plan_layout(
        shapes, mesh, rules, strategy, precision=precision, names=names, frozen=frozen, stages=stages, tp=tp
    )
    step = make_train_step(init_or_model if loss_fn is None else loss_fn, opt, **options)
    return init_state(model, opt, key, layout, buffers=buffers, sync=sync), step


def _model(given: Any) -> tuple[Any, Any]:
    """What `init_state` takes, and what `plan_layout` takes."""
    if hasattr(given, "init") and hasattr(given, "names"):
        return given, given
    if callable(given):
        check_function("a Model, or a function of a key", given, 1, exactly=True)
        with _compat.with_values():
            return given, given(torch.zeros(2, dtype=torch.int64))
    return (lambda _: given), given
