"""The train step as a pure function `(state, batch) -> (state, metrics)`, built from the public pieces.

In: a `TrainState` and this rank's part of the batch. Out: the next state, in the same layout, and metrics.
Microbatches are summed, then divided once by the weight of the whole batch. A step that is not finite is refused on
all ranks, the state as before; under fp16 it is skipped and the scale halved. Law: the layout never changes a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsharding import _compat, policies, tree
from fsharding.agreement import compare, digest, facts_of, refuse_differences
from fsharding.autodiff import value_and_grad
from fsharding.axes import AXES
from fsharding.errors import BatchError, ConfigError, NonFiniteError, ScheduleError, message
from fsharding.layout import Layout, check_fit
from fsharding.lost import naming_lost
from fsharding.mesh import abstract, axis_group, everyone
from fsharding.ops.pool import Pool
from fsharding.ops.rows import start_sum
from fsharding.optim.apply import apply_gradients, apply_updates
from fsharding.optim.balance import against_load, set_loads_apart
from fsharding.optim.base import GradientTransformation, run_update
from fsharding.optim.clip import global_norm
from fsharding.pipeline import Messages, pipeline_grads
from fsharding.planning import kind_text
from fsharding.policies import Policy, check_policy
from fsharding.precision import Precision
from fsharding.schedule import Schedule, plan_schedule
from fsharding.sharding import local_of
from fsharding.stacks import first_unit, scan_stacks
from fsharding.state import TrainState, main_of, spread_main
from fsharding.transforms import gather_unit
from fsharding.tree import Tree

__all__ = ["Metrics", "make_train_step", "model_loss"]


class Metrics(NamedTuple):
    """What a step reports; the same on every rank.

    Attributes:
        loss: global mean over all tokens of the batch (float32, 0-d).
        grad_norm: global norm of the mean gradient, before clipping (float32, 0-d).
        weight: number of tokens (float32, 0-d).
        skipped: whether the step was skipped because of an fp16 overflow.
    """

    loss: Tensor
    grad_norm: Tensor
    weight: Tensor
    skipped: bool


def model_loss(
    model: Any, *, policy: Policy = policies.save_except_gathered
) -> Callable[[Tree, Tree], tuple[Any, Any]]:
    """The loss function of a `Model`: embed, scan over blocks, head, each unit gathered while the one before computes.

    Args:
        model: a `Model`.
        policy: what the blocks keep for backward.

    Returns:
        `loss_fn(params, batch) -> (sum, weight)`.
    """

    def loss_fn(params: Tree, batch: Tree) -> tuple[Any, Any]:
        head = {**params["head"], **{name: tree.at(params, path) for name, path in model.tied}}
        blocks = params["blocks"]
        x = model.embed(gather_unit(params["embed"], then=first_unit(model, blocks, head)), batch)
        x = scan_stacks(model, blocks, x, policy=policy, then=head)
        return model.head(gather_unit(head), x, batch)

    return loss_fn


def make_train_step(
    model: Any,
    opt: GradientTransformation,
    *,
    microbatches: int = 1,
    schedule: str | Schedule = "1f1b",
    precision: Precision | None = None,
    donate: bool = False,
    policy: Policy = policies.save_except_gathered,
) -> Callable[[TrainState, Tree], tuple[TrainState, Metrics]]:
    """Makes the step of a run.

    Args:
        model: a `Model`, or a loss function `(params, batch) -> (sum, weight)`.
        opt: the optimizer.
        microbatches: equal pieces along dim 0 of this rank's batch, whose gradients are accumulated; at least 1.
        schedule: of a `Model` on a mesh with `pp`: a `Schedule`, or the name of one, which is planned for the size of
            `pp` and `microbatches`. Meshes without `pp` do not look at it.
        precision: dtypes of compute and wire; by default the layout's.
        donate: the step may overwrite the state that it is given, which raises `DonatedError` afterwards.
        policy: what the blocks of a `Model` keep for backward.

    Returns:
        `step(state, batch) -> (state, metrics)`; batch is this rank's part, a tree of tensors `[B, ...]`.

    Raises:
        ConfigError: a number of microbatches below 1, or a policy that is none.
        ScheduleError: from the step: the schedule cannot have so many ranks or microbatches.
        LayoutError: from the step: the layout has other stages than the schedule; see `stages_of`.
        RankError: from the step: a rank is gone, or does not answer within the mesh's timeout; all others name it.
        ConfigError: from the step: the precision scales losses and the state has no scale, or the reverse; or a `Model`
            on a mesh with an axis that it does not compute over; or, at its first call and the first one in another
            layout, ranks whose layouts, models, optimizers or arguments of this function differ.
        TreeError: from the step, at such a call: a state of another optimizer, or of a model with other parameters.
        BatchError: from the step: dim 0 of a leaf is not a multiple of `microbatches`. At such a call all ranks raise
            if one does; at later ones a rank alone, which the others wait for until the timeout of the mesh.
        NonFiniteError: from the step, on every rank: loss or gradients are NaN or infinite, without loss scaling or at
            the least scale.
    """
    _check_arguments(microbatches, policy)
    is_model = hasattr(model, "block")
    loss_fn, rates = (model_loss(model, policy=policy), dict(model.balanced)) if is_model else (model, {})
    settings = _settings(model, opt, microbatches, schedule if is_model else "", precision, policy)
    seen: list[_Seen] = []

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        with naming_lost("train step", state.layout.mesh):
            return run(state, batch)

    def run(state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        layout = state.layout
        known = next((before for before in seen if layout is before.layout or layout == before.layout), None)
        if known is None:
            _agree(layout, settings, batch, microbatches)
            if is_model:
                _refuse_model(model, layout)
            _refuse_other_state(opt, state)
            seen.append(known := _Seen(layout, Messages(), Pool()))
        _let_go(seen, known)
        how = precision or layout.precision
        if (how.loss_scale is None) != (state.loss_scale is None):
            raise ConfigError(message("train step", *_scale_mismatch(state)))
        pieces = _split(batch, microbatches)
        scale = float(state.loss_scale.scale) if state.loss_scale is not None else 1.0
        if is_model and abstract(layout.mesh).axis_size("pp") > 1:
            planned = _schedule(schedule, layout, microbatches)
            given, told = (model, planned, layout, state.params, pieces), known.messages
            grads, total, weight = pipeline_grads(*given, precision=how, policy=policy, scale=scale, known=told)
        else:
            grads, total, weight = _accumulate(loss_fn, state.params, pieces, layout, how, scale, known.memory)
        grads, loads = set_loads_apart(grads, rates)
        with _compat.region("norm"):
            mean = float(1.0 / (weight.double() * scale))
            norm = (global_norm(grads, shardings=layout.main).double() * mean).float()
        loss = (total.double() / (weight.double() * scale)).float()
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
        metrics = Metrics(loss, norm, weight, skipped=not finite)
        if not finite and (how.loss_scale is None or scale <= how.loss_scale.least):
            raise NonFiniteError(_refusal(state, grads, loss, norm))
        if donate:
            state = state.donate()
        if not finite:
            assert state.loss_scale is not None
            kept = state if donate else tree.map(torch.clone, state)
            return kept.replace(loss_scale=how.next_scale(state.loss_scale, finite=False)), metrics
        steer = functools.partial(against_load, loads=loads, rates=rates) if rates else None
        return _update(state, grads, mean, norm, opt, how, steer, donate=donate), metrics

    return step


class _Seen(NamedTuple):
    """A layout that a step has met: what its messages look like, and the memory of its gradients."""

    layout: Layout
    messages: Messages
    memory: Pool


def _let_go(seen: Sequence[_Seen], known: _Seen) -> None:
    """Memory of gradients is kept for one layout only."""
    for other in seen:
        if other is not known:
            other.memory.close()


def _settings(
    model: Any,
    opt: GradientTransformation,
    microbatches: int,
    schedule: str | Schedule,
    precision: Precision | None,
    policy: Policy,
) -> dict[str, str]:
    """What the ranks of a step must have in common, beside its layout."""
    # A loss function may close over what is a rank's own.
    told = facts_of("model", model) if hasattr(model, "block") else {"loss": getattr(model, "__qualname__", "")}
    planned = schedule if isinstance(schedule, str) else f"{schedule!r} {digest(repr(schedule.table)):016x}"
    facts = {"microbatches": str(microbatches), "schedule": planned, "policy": policy.name, "precision": str(precision)}
    return {**facts, **told, **facts_of("optimizer", opt.update)}


def _check_arguments(microbatches: Any, policy: Any) -> None:
    """Refuses arguments that no layout and no batch can make right."""
    if not isinstance(microbatches, int) or microbatches < 1:
        text = f"got microbatches={microbatches!r}."
        raise ConfigError(message("fs.make_train_step", text, mend="Give a number from 1."))
    check_policy("fs.make_train_step", policy)


def _agree(layout: Layout, settings: dict[str, str], batch: Tree, microbatches: int) -> None:
    """Refuses ranks whose steps differ, or one of which cannot cut its batch.

    A layout is told by what it was planned from, since all else follows.
    """
    leaves = {
        f"params.{leaf.path}": f"{leaf.init} {leaf.shape} {leaf.names}" + ("" if leaf.trainable else " frozen")
        for leaf in layout.leaves
    }
    planned = {"strategy": str(layout.strategy), "rules": str(layout.rules), "stages": str(layout.stages)}
    facts = {"mesh": repr(abstract(layout.mesh)), **planned, **facts_of("layout.precision", layout.precision)}
    if abstract(layout.mesh).axis_size("pp") == 1:
        settings = {name: text for name, text in settings.items() if name != "schedule"}
    ranks, device = everyone(layout.mesh), getattr(layout.mesh, "device_type", "cpu")
    facts |= {**settings, **leaves, "batch": "\n".join(_uneven(batch, microbatches))}
    told = compare(facts, ranks=ranks.ranks, group=ranks.process_group, device=device)
    uneven = {rank: mine.pop("batch") for rank, mine in told.items()}
    refuse_differences("train step", told)
    if any(uneven.values()):
        rows = [f"rank {rank}: {row}" for rank, text in uneven.items() for row in filter(None, text.split("\n"))]
        text = f"cannot cut the batches of all ranks into {microbatches} microbatches."
        raise BatchError(message("train step", text, rows, _EVEN))


def _scale_mismatch(state: TrainState) -> tuple[str, list[str], str]:
    has = "has no" if state.loss_scale is None else "has a"
    text = f"got a state that {has} loss scale, and a precision that wants otherwise."
    return text, [], "Give plan_layout the same precision=, so that the state is made for it."


def _refusal(state: TrainState, grads: Tree, loss: Tensor, norm: Tensor) -> str:
    """Names the step, and every leaf whose gradient is not finite on some rank."""
    named = tree.named_leaves(grads)
    flags = torch.stack([torch.isfinite(local_of(x)).all().logical_not() for x in named.values()]).double()
    axes = tuple(axis for axis in AXES if abstract(state.layout.mesh).axis_size(axis) > 1)
    found = start_sum(flags, axis_group(state.layout.mesh, axes), torch.float64).wait()
    rows = [f"step {int(state.step)}: loss {float(loss)}, gradient norm {float(norm)}"]
    rows += [
        f"params.{path}: its gradient is not finite" for path, bad in zip(named, found.tolist(), strict=True) if bad
    ]
    mend = "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    return message("train step", "refused: loss or gradients are not finite.", rows, mend)


def _refuse_other_state(opt: GradientTransformation, state: TrainState) -> None:
    """Refuses a state that another optimizer made."""
    try:
        made = opt.init(state.layout.meta_main())
    except (NotImplementedError, RuntimeError):
        return  # It asks for values, which are not here; whether the state fits will show.
    spec, other = tree.flatten(made)[1], tree.flatten(state.opt_state)[1]
    if spec != other:
        tree.flatten_up_to(spec, state.opt_state, "train step", ("its optimizer", "state.opt_state"))


def _refuse_model(model: Any, layout: Layout) -> None:
    """Refuses a model with other parameters than those of the layout, or on axes that it does not compute over."""
    draws = tree.flatten_up_to(
        layout.structure, model.init(torch.zeros(2, dtype=torch.int64)), "train step", ("the state", "its model")
    )
    check_fit("train step", layout, draws, ((leaf.shape, leaf.init) for leaf in layout.leaves))
    shape = abstract(layout.mesh)
    others = [axis for axis in ("cp", "tp") if axis not in model.axes]
    used = [f"{axis}={shape.axis_size(axis)}" for axis in others if shape.axis_size(axis) > 1]
    if used:
        known = ", ".join(("pp", "replica", "dp", "ep", *model.axes))
        mend = f"Use {known}, or pass a loss function that computes on the other axes itself."
        raise ConfigError(
            message("train step", f"cannot cut the compute of a Model over {', '.join(used)}.", mend=mend)
        )


def _schedule(schedule: str | Schedule, layout: Layout, microbatches: int) -> Schedule:
    """The schedule of a step on a mesh with `pp`."""
    ranks = abstract(layout.mesh).axis_size("pp")
    planned = plan_schedule(schedule, ranks, microbatches) if isinstance(schedule, str) else schedule
    if (planned.ranks, planned.microbatches) != (ranks, microbatches):
        text = f"got {planned!r} for pp={ranks} and microbatches={microbatches}."
        raise ScheduleError(message("train step", text, mend="Plan it with fs.plan_schedule for these numbers."))
    return planned


_EVEN = "Choose microbatches that divide dim 0 of every leaf, or another global batch."


def _uneven(batch: Tree, microbatches: int) -> list[str]:
    """The leaves of a batch that cannot be cut, in words."""
    return [
        f"{path} is {kind_text(x)}"
        for path, x in tree.named_leaves(batch).items()
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[0] % microbatches
    ]


def _split(batch: Tree, microbatches: int) -> list[Tree]:
    if wrong := _uneven(batch, microbatches):
        text = f"cannot cut this rank's batch into {microbatches} microbatches."
        raise BatchError(message("train step", text, wrong, _EVEN))
    if microbatches == 1:
        return [batch]
    return [tree.map(lambda x: x.chunk(microbatches)[i], batch) for i in range(microbatches)]  # noqa: B023


def _accumulate(
    loss_fn: Callable[..., Any],
    params: Tree,
    pieces: list[Tree],
    layout: Layout,
    how: Precision,
    scale: float,
    memory: Pool,
) -> tuple[Tree, Tensor, Tensor]:
    """Sums of gradients (in `layout.main`), losses times scale, and weights, over microbatches and data ranks."""

    def scaled(values: Tree, piece: Tree) -> tuple[Any, Any]:
        result = loss_fn(values, piece)
        total, weight = result if isinstance(result, tuple) else (result, 1.0)
        return total * scale if scale != 1.0 else total, weight

    held: Tree = None
    totals: list[Tensor] = []
    weights: list[Tensor] = []
    for i, piece in enumerate(pieces):
        target = layout.main if i + 1 == len(pieces) else layout.grads
        run = value_and_grad(scaled, grads=target, precision=how, mean=False, memory=memory)
        (total, weight), held = run(params, piece, accumulate=held, donate=True)
        totals.append(total)
        weights.append(weight)
    return held, torch.stack(totals).sum(), torch.stack(weights).sum()


def _update(
    state: TrainState,
    grads: Tree,
    mean: float,
    norm: Tensor,
    opt: GradientTransformation,
    how: Precision,
    steer: Callable[[Tree], Tree] | None,
    *,
    donate: bool,
) -> TrainState:
    layout = state.layout
    with _compat.region("optimizer"):
        main, opt_state = _move(state, grads, mean, norm, opt, steer, donate=donate)
    scale = how.next_scale(state.loss_scale, finite=True) if state.loss_scale is not None else None
    with _compat.region("spread"):
        params = spread_main(main, state.params, layout, donate=donate)
    return state.replace(
        step=state.step + 1,
        params=params,
        main=main if state.main is not None else None,
        opt_state=opt_state,
        loss_scale=scale,
    )


def _move(
    state: TrainState,
    grads: Tree,
    mean: float,
    norm: Tensor,
    opt: GradientTransformation,
    steer: Callable[[Tree], Tree] | None,
    *,
    donate: bool,
) -> tuple[Tree, Tree]:
    """The main parameters and the optimizer state after an update; gradients times `mean` are their means."""
    main = main_of(state)
    known: Any = {"donate": donate, "norm": norm, "scale": mean, "shardings": state.layout.main}
    if steer is None:
        return apply_gradients(opt, grads, state.opt_state, main, **known)
    updates, opt_state = run_update(opt, grads, state.opt_state, main, **known)
    return apply_updates(main, steer(updates), donate=donate), opt_state
