"""`evaluate`: the loss of parameters on a batch, forward only; a train step on them has the same loss."""

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
    """The type of the function that `evaluate` returns."""

    def __call__(self, params: Tree | TrainState, batch: Tree) -> Any:
        """The global `Loss`; with `has_aux`, `(loss, aux of each microbatch)`."""
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
    """Makes a function that computes a loss without gradients.

    Args:
        model: a loss function `(params, batch) -> (sum, count)`, or a `Model`. Functionalized modules run in eval mode
            inside, as after `module.eval()`, and need no `random_key`. A loss function with a parameter `key` gets
            None, so that `fs.random.dropout` changes nothing; one with a parameter `buffers` gets those of the state.
        microbatches: equal pieces of this rank's batch, computed one after the other.
        schedule: as in `make_train_step`; only its forwards run.
        precision: dtypes of compute and wire; by default the state's, float32 for parameters alone.
        has_aux: the loss function returns `(loss, aux)`.

    Returns:
        A function `(params, batch) -> Loss`, with the sum of the losses of all data ranks and their count, float32 and
        0-d; with `has_aux` `(Loss, (aux of each microbatch,))`. It takes parameters, or a whole `TrainState`.

    Raises:
        ArgumentError: no `Model` and no function of two arguments; or parameters without their state on a mesh with
            `pp`, or for a loss function that takes buffers.
        ConfigError: fewer than 1 microbatch; `has_aux` with a `Model`; a `Model` on an axis that it does not use.
        ScheduleError: a loss function that is no `Model` on a mesh with `pp`.
        BatchError: a leaf of the batch isn't a tensor, or cannot be split into microbatches.
        NonFiniteError: an expert got more tokens than its capacity has room for. A count on a device is not read: then
            the mean is NaN.
        TransformError: the loss function calls `scale` of a `GradScaler`, or the loss is not 0-d floating point.
        RankError: another rank is gone.

    Example:
        >>> def loss(params, batch, key=None):
        ...     x = fs.random.dropout(batch["x"], 0.5, key)  # a train step draws a key, evaluation does not
        ...     error = x @ fs.gather_unit(params)["w"] - batch["y"]
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
        pieces = split_batch(batch, microbatches)
        mesh = _mesh_of(values)
        if mesh is not None and abstract(mesh).axis_size("pp") > 1:
            _refuse_pipeline(state, is_model)
            assert state is not None and staged is not None
            with evaluating():
                return _refuse_full(staged(state, pieces, dtypes, key))
        if is_model and state is not None:
            refuse_model(model, state.layout)
        if loss_fn.takes_buffers and state is None:
            rule = "got parameters alone for a loss function that takes buffers."
            mend = "Give the whole state, which has them: fs.evaluate(loss_fn)(state, batch)."
            raise ArgumentError(message(rule, mend=mend))
        fn = loss_fn.bound({} if state is None else loss_fn.buffers(state))
        total, auxes = _sum_of_pieces(fn, values, pieces, dtypes, key)
        return (total, auxes) if has_aux else total

    return run


def _check_arguments(model: Any, microbatches: Any, has_aux: bool) -> None:
    if isinstance(model, TrainStep):
        mend = "Give the loss function or the Model that the step was made from: fs.evaluate(loss_fn)(state, batch)."
        raise refuse("a Model, or a loss function (params, batch)", model, mend)
    check_model(model, has_aux=has_aux)
    if not hasattr(model, "block"):
        refuse_named_scaler(model)
    StepSettings(microbatches).refuse_wrong()


def _sum_of_pieces(
    fn: Callable[[Tree, Tree], Any], params: Tree, pieces: list[Tree], precision: Precision, key: Tensor | None
) -> tuple[Loss, tuple[Any, ...]]:
    """Evaluate microbatches one by one; return the sum of their losses, and the aux of each."""
    losses: list[Loss] = []
    auxes: list[Any] = []
    for piece in pieces:
        with evaluating():
            loss, beside = global_loss(fn, params, (piece,), has_aux=True, precision=precision, key=key)
        losses.append(loss)
        auxes.append(tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, beside.aux))
    counts = [torch.as_tensor(x.count) for x in losses]
    total = Loss(without_gradients(torch.stack([x.sum for x in losses]).sum()), torch.stack(counts).sum())
    return _refuse_full(total), tuple(auxes)


def _refuse_full(loss: Loss) -> Loss:
    """Refuses a loss without all tokens; a count on a device is not read, and its mean is NaN."""
    count = torch.as_tensor(loss.count)
    if count.is_cpu and not _compat.is_fake(count) and is_full(float(count)):
        mend = "Raise capacity=, or drop what has no room: Experts(capacity=..., drop=True)."
        raise NonFiniteError(message(f"has no loss: {FULL}.", mend=mend))
    return loss


def _staged(model: Any, schedule: str | Schedule, microbatches: int) -> Callable[..., Loss]:
    """Return the evaluation of a `Model` on meshes with `pp`."""
    latest: Layout | None = None
    known: Messages = {}  # what receivers have learned of activations in the latest layout

    def run(state: TrainState, pieces: list[Tree], precision: Precision, key: Tensor | None) -> Loss:
        nonlocal latest, known
        layout = state.layout
        if layout is not latest:
            refuse_model(model, layout)
            latest, known = layout, {}
        plan = planned_schedule(schedule, layout, microbatches)
        sums = pipeline_loss(model, plan, layout, state.params, pieces, precision=precision, known=known, key=key)
        return Loss(without_gradients(sums[0]), sums[1])

    return run


def _mesh_of(params: Tree) -> Mesh | None:
    return next((to_local(x).sharding.mesh for x in tree.leaves(params) if isinstance(x, DTensor)), None)


def _refuse_pipeline(state: TrainState | None, is_model: bool) -> None:
    """Refuses calls that have no stages to run on a mesh with `pp`."""
    if not is_model:
        mend = "Give fs.evaluate the Model; its stages are one loss function for each rank."
        raise ScheduleError(message("cannot cut a loss function into the stages of a pipeline.", mend=mend))
    if state is None:
        mend = "Give the whole state, which has the layout: fs.evaluate(model)(state, batch)."
        raise ArgumentError(message("got parameters alone on a mesh with pp.", mend=mend))
