"""`setup`: make a first state and a train step from a model, a loss function and an optimizer, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from fsharding.base import _compat
from fsharding.base.errors import ArgumentError, message
from fsharding.base.public import check_function, public, refuse_module
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
from fsharding.train.step import TrainStep, new_step
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
    """Make the first state of a run and its train step: `plan_layout`, `init_state` and `make_train_step` in one call.

    Collective over the ranks of the mesh. Parameters keep their dtypes unless `precision` is given.

    Args:
        init_or_model: Function `key -> tree` of `LazyTensor`s or tensors, a `Model`, the result of `functionalize`, or
            a tree of tensors to start from, the same on every rank.
        loss_fn: Function `(params, batch) -> (sum, count)`; None for the loss of a `Model`.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        key: Random key, int64[2], the same on every rank.
        strategy: Sharding strategy over the data axes, or its name. Default: "zero3", fully sharded.
        mesh: Device mesh. Default: all ranks, along `dp`.
        rules: Map from dim names to mesh axes, see `AxisRules`.
        names: Tree of dim names, one tuple per leaf; a `Model` has its own.
        precision: Dtypes of storage, compute and communication. Default: each leaf's dtype.
        frozen: Leaves to freeze, as dotted paths or path prefixes.
        stages: Owner of each leaf along `pp`, as in `plan_layout`. Default: for a `Model`, the stages of `schedule`.
        buffers: First values of `state.buffers`, as in `init_state`.
        tp: "shard", or "replicate" to allow a `tp` axis that shards no leaf, as in `plan_layout`.
        sync: None to require equal values on all ranks, or "rank0" to send those of rank 0, as in `init_state`.
        **options: Settings of the step, see `StepOptions`.

    Returns:
        A pair `(state, step)`; call `state, metrics = step(state, batch)`. `state.layout` has the mesh and shardings.

    Raises:
        ArgumentError: An argument has a wrong type, two arguments are swapped, or `loss_fn` is missing.
        FshardingError: Any error of `plan_layout`, `init_state` or `make_train_step`.

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
    is_model = hasattr(init_or_model, "block")
    if loss_fn is None and not is_model:
        mend = "Give a function (params, batch) -> (sum, count)."
        raise ArgumentError(message("needs a loss function: only a Model has its own.", mend=mend))
    # The step first: it checks loss function, optimizer and options before a mesh is made or anything is allocated.
    step = new_step(init_or_model if loss_fn is None else loss_fn, opt, None, settings)
    mesh = make_mesh(dp=-1) if mesh is None else mesh
    model, shapes = _model(init_or_model)
    if is_model and stages is None and (ranks := abstract(mesh).axis_size("pp")) > 1:
        given = settings.schedule
        schedule = plan_schedule(given, ranks, settings.microbatches) if isinstance(given, str) else given
        stages = stages_of(init_or_model, schedule)
    layout = plan_layout(
        shapes, mesh, rules, strategy, precision=precision, names=names, frozen=frozen, stages=stages, tp=tp
    )
    return init_state(model, opt, key, layout, buffers=buffers, sync=sync), step


def _model(given: Any) -> tuple[Any, Any]:
    """Return the model for `init_state`, and the model or tree of shapes for `plan_layout`."""
    if hasattr(given, "init") and hasattr(given, "names"):
        return given, given
    if callable(given):
        check_function("a Model, or a function of a key", given, 1, exactly=True)
        with _compat.with_values():
            return given, given(torch.zeros(2, dtype=torch.int64))
    return (lambda _: given), given
