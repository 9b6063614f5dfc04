"""`evaluate`: the loss of parameters on a batch, forward only, with the bits of a train step's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import ArgumentError, NonFiniteError, ScheduleError, message
from fsharding.base.public import kind_of, public, refuse, refuse_compiled
from fsharding.base.tree import Tree
from fsharding.formats.precision import FP32, Precision
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.ops.capacity import FULL, is_full
from fsharding.pipeline.executor import Messages, pipeline_loss
from fsharding.pipeline.schedule import Schedule
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import to_local
from fsharding.train.loss_function import LossFunction
from fsharding.train.microbatches import split_batch
from fsharding.train.state import TrainState, rounding_key
from fsharding.train.step import TrainStep, check_model, model_loss, planned_schedule, refuse_model
from fsharding.train.step_options import StepSettings
from fsharding.transforms.first_call import refuse_named_scaler
from fsharding.transforms.gather_context import evaluating
from fsharding.transforms.value_and_grad import Loss, global_loss, without_gradients

__all__ = ["Evaluate", "evaluate"]


class Evaluate(Protocol):
    """Type of the function that `evaluate` returns."""

    def __call__(self, params: Tree | TrainState, batch: Tree) -> Any:
        """Return the global `Loss`; with `has_aux`, `(loss, aux of each microbatch)`."""
        ...


@public
def evaluate(
    model: Any,
    *,
    microbatches: int = 1,
    schedule: str | Schedule = "1f1b",
    precision: Precision | None = None,
    has_aux: bool = False,
) -> Evaluate:
    """Make a function that computes the global loss of a batch without gradients.

    Functionalized modules run in eval mode, as after `module.eval()`, and need no `random_key`. A loss function with a
    parameter `key` gets None, so that `fs.random.dropout` does nothing; with `buffers` it gets the state's.

    Args:
        model: A `Model`, or a loss function `(params, batch) -> (sum, count)`.
        microbatches: Number of equal parts of this rank's batch, computed one after the other. Default: 1.
        schedule: Pipeline schedule, as in `StepOptions`; only its forwards run.
        precision: Dtypes of compute and communication. Default: the state's; float32 without a state.
        has_aux: Whether the loss function returns `(loss, aux)`. Default: False.

    Returns:
        A function `(params, batch) -> Loss`, collective over the mesh: sum and count over all data ranks (float32,
        0-d). With `has_aux`, `(Loss, (aux of each microbatch,))`. `params` is a tree of parameters or a `TrainState`.

    Raises:
        ArgumentError: `model` is neither a `Model` nor a function of two arguments, or a state is needed (on a mesh
            with `pp`, or for buffers) and only parameters are given.
        ConfigError: `microbatches` is below 1, `has_aux` is given with a `Model`, or the mesh has an axis that the
            `Model` doesn't use.
        ScheduleError: A loss function is used on a mesh with `pp`.
        BatchError: A leaf of the batch isn't a tensor, or can't be split.
        NonFiniteError: An expert got more tokens than its capacity. On a device the count isn't read: the mean is NaN.
        TransformError: The loss isn't a 0-d floating point tensor, or is scaled by a `GradScaler`.
        RankError: A rank exited.

    Example:
        >>> def loss(params, batch, key=None):  # `key` is random in a train step, None in evaluation
        ...     error = fs.random.dropout(batch["x"], 0.5, key) @ fs.gather_unit(params)["w"] - batch["y"]
        ...     return fs.Loss(error.square().sum(), error.numel())
        >>> init = lambda key: {"w": fs.random.ones((4,))}
        >>> state, step = fs.setup(init, loss, fs.sgd(0.1), fs.random.key(0))
        >>> batch = fs.local_batch({"x": torch.ones(6, 4), "y": torch.zeros(6)}, state.layout.mesh)
        >>> validation = fs.evaluate(loss)(state, batch)
        >>> float(validation.mean), int(validation.count)
        (16.0, 6)
    """
    _check_arguments(model, microbatches, has_aux)
    is_model = hasattr(model, "block")
    loss_fn = LossFunction.of(model_loss(model) if is_model else model, has_aux=has_aux)
    staged = _staged(model, schedule, microbatches) if is_model else None

    @public
    @_compat.never_inlined
    def run(params: Tree | TrainState, batch: Tree) -> Any:
        refuse_compiled("Compile the loss function, fs.evaluate(torch.compile(loss_fn)), or its blocks.")
        if isinstance(batch, TrainState):
            rule = f"takes parameters, then a batch; got {kind_of(params)}, then {kind_of(batch)}."
            raise ArgumentError(message(rule, mend="Swap the two: fs.evaluate(loss_fn)(state, batch)."))
        state = params if isinstance(params, TrainState) else None
        values = params if state is None else state.params
        dtypes = precision or (FP32 if state is None else state.layout.in_flight(state.layout.precision))
        key = None if state is None else rounding_key(state.key, state.step, state.layout)
        parts = split_batch(batch, microbatches)
        mesh = _mesh_of(values)
        if mesh is not None and abstract(mesh).axis_size("pp") > 1:
            _refuse_pipeline(state, is_model)
            assert state is not None and staged is not None
            with evaluating():
                return _refuse_full(staged(state, parts, dtypes, key))
        if is_model and state is not None:
            refuse_model(model, state.layout)
        if loss_fn.takes_buffers and state is None:
            rule = "got parameters alone for a loss function that takes buffers."
            mend = "Pass the state, which has them: fs.evaluate(loss_fn)(state, batch)."
            raise ArgumentError(message(rule, mend=mend))
        fn = loss_fn.bound({} if state is None else loss_fn.buffers(state))
        total, auxes = _sum_of_parts(fn, values, parts, dtypes, key)
        return (total, auxes) if has_aux else total

    return run


def _check_arguments(model: Any, microbatches: Any, has_aux: bool) -> None:
    if isinstance(model, TrainStep):
        mend = "Pass the loss function or Model that the step was made from: fs.evaluate(loss_fn)(state, batch)."
        raise refuse("a Model, or a loss function (params, batch)", model, mend)
    check_model(model, has_aux=has_aux)
    if not hasattr(model, "block"):
        refuse_named_scaler(model)
    StepSettings(microbatches).refuse_wrong()


def _sum_of_parts(
    fn: Callable[[Tree, Tree], Any], params: Tree, parts: list[Tree], precision: Precision, key: Tensor | None
) -> tuple[Loss, tuple[Any, ...]]:
    """Evaluate microbatches one by one; return the sum of their losses, and the aux of each."""
    losses: list[Loss] = []
    auxes: list[Any] = []
    for part in parts:
        with evaluating():
            loss, beside = global_loss(fn, params, (part,), has_aux=True, precision=precision, key=key)
        losses.append(loss)
        auxes.append(tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, beside.aux))
    # Stacked and summed as in a train step, so that the bits are the same.
    counts = [torch.as_tensor(x.count) for x in losses]
    total = Loss(without_gradients(torch.stack([x.sum for x in losses]).sum()), torch.stack(counts).sum())
    return _refuse_full(total), tuple(auxes)


def _refuse_full(loss: Loss) -> Loss:
    """Refuse a loss that lacks tokens of full experts; a count on a device isn't read, and its mean is NaN."""
    count = torch.as_tensor(loss.count)
    if count.is_cpu and not _compat.is_fake(count) and is_full(float(count)):
        mend = "Raise capacity=, or drop the excess tokens: Experts(capacity=..., drop=True)."
        raise NonFiniteError(message(f"has no loss: {FULL}.", mend=mend))
    return loss


def _staged(model: Any, schedule: str | Schedule, microbatches: int) -> Callable[..., Loss]:
    """Return the evaluation of a `Model` on meshes with `pp`."""
    latest: Layout | None = None
    known: Messages = {}  # shapes of activations in the latest layout, learned by the receivers

    def run(state: TrainState, parts: list[Tree], precision: Precision, key: Tensor | None) -> Loss:
        nonlocal latest, known
        layout = state.layout
        if layout is not latest:
            refuse_model(model, layout)
            latest, known = layout, {}
        plan = planned_schedule(schedule, layout, microbatches)
        sums = pipeline_loss(model, plan, layout, state.params, parts, precision=precision, known=known, key=key)
        return Loss(without_gradients(sums[0]), sums[1])

    return run


def _mesh_of(params: Tree) -> Mesh | None:
    return next((to_local(x).sharding.mesh for x in tree.leaves(params) if isinstance(x, DTensor)), None)


def _refuse_pipeline(state: TrainState | None, is_model: bool) -> None:
    """Refuse calls that have no stages to run on a mesh with `pp`."""
    if not is_model:
        mend = "Pass the Model itself: fs.evaluate(model)(state, batch)."
        raise ScheduleError(message("cannot split a loss function into pipeline stages.", mend=mend))
    if state is None:
        mend = "Pass the state, which has the layout: fs.evaluate(model)(state, batch)."
        raise ArgumentError(message("got parameters alone on a mesh with pp.", mend=mend))
