"""The train step, a pure function `(state, batch) -> (state, metrics)`: gradients, a check, and an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor

from fsharding.base import _compat, tree
from fsharding.base.errors import (
    ArgumentError,
    ConfigError,
    ScheduleError,
    message,
    report,
)
from fsharding.base.public import (
    Immutable,
    check_function,
    check_optimizer,
    is_optimizer,
    missing_name,
    public,
    refuse,
    refuse_compiled,
)
from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.leaf_memory import copied, on_device
from fsharding.comm.step_agreement import SAME_ROWS, StepAgreement
from fsharding.comm.transport import start_sum
from fsharding.formats.precision import Precision, check_precision
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.consistency import digest, facts_of
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group, data_axes, everyone
from fsharding.mesh.failures import naming_lost
from fsharding.mesh.unit_order import COUNTED, SAME_KEYS, SAME_RATES
from fsharding.models.stacks import run_parts
from fsharding.ops.capacity import counting_drops
from fsharding.optim.base import GradientTransformation, UpdateContext, where_finite
from fsharding.optim.clip import square_sums
from fsharding.optim.router_bias import against_load, split_loads
from fsharding.optim.schedules import noting_rates
from fsharding.optim.state_copies import AT_ONCE, UpdateCopies, copies_of
from fsharding.pipeline.executor import Messages, pipeline_grads
from fsharding.pipeline.schedule import Schedule, plan_schedule
from fsharding.sharding.entries import state_structure
from fsharding.sharding.layout import Layout, check_fit, on_mesh
from fsharding.sharding.named_sharding import local_of
from fsharding.sharding.random import fold_in
from fsharding.train.buffers import sync_buffers
from fsharding.train.first_step import FirstStep, agree_on_setup, words_of_rows
from fsharding.train.in_flight import copies_in_flight, unread
from fsharding.train.loss_function import LossFunction
from fsharding.train.microbatches import split_batch
from fsharding.train.row_hashes import hash_of_all, hash_rows
from fsharding.train.state import Buffers, TrainState, refuse_changed, rounding_key, sealed
from fsharding.train.state_check import StateCheck, check_numbers
from fsharding.train.step_options import StepOptions, StepSettings, takes_step_options
from fsharding.train.update import update_facts, updated
from fsharding.train.verdict import GOOD, REFUSED, SKIPPED, UNLIKE, PendingVerdict, Refusal, verdict_of
from fsharding.transforms import policies
from fsharding.transforms.first_call import FirstCall
from fsharding.transforms.policies import Policy
from fsharding.transforms.run_options import GradsTo, RunOptions
from fsharding.transforms.value_and_grad import is_divisor, loss_and_grads, refuse_backward

__all__ = [
    "Metrics", "StepPlan", "TrainStep", "Verdict", "check_model", "device_of", "make_train_step",
    "model_loss", "new_step", "planned_schedule", "refuse_model",
]  # fmt: skip


class _Metrics(NamedTuple):
    loss: Tensor
    grad_norm: Tensor
    count: Tensor
    skipped: bool | Tensor
    aux: tuple[Any, ...] = ()


class Metrics(Immutable, _Metrics, instead="metrics._replace({name}=...)"):
    """Metrics of a train step, equal on every rank except `aux`.

    Attributes:
        loss: Global mean over all tokens of the batch (float32, 0-d).
        grad_norm: Global norm of the mean gradient, before clipping (float32, 0-d).
        count: Number of tokens in the batch (float32, 0-d).
        skipped: Whether an fp16 overflow skipped the update: a bool, or with `check="async"` a bool tensor (0-d), for
            which `if metrics.skipped` waits.
        aux: This rank's aux of each microbatch, in order and detached; () without `has_aux`.
        dropped: Number of expert choices dropped in all layers, microbatches and data ranks (float32, 0-d); None for
            a model whose experts drop none. Not an item of the tuple.

    Example:
        >>> loss = lambda params, x: (x @ fs.gather_unit(params)["w"]).square().mean()
        >>> state, step = fs.setup({"w": torch.ones(4)}, loss, fs.sgd(0.1), fs.random.key(0), check="sync")
        >>> state, metrics = step(state, torch.ones(3, 4))
        >>> metrics.skipped, float(metrics.loss)
        (False, 16.0)
    """

    # Reading `loss` never waits: as long as the device has not computed the verdict, it is an ordinary tensor.

    dropped: Tensor | None = None
    verdict: PendingVerdict | None = None  # None if the host has read it

    @property
    def loss(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Global mean over all tokens of the batch; raises if the step was refused."""
        if self.verdict is not None and self.verdict.is_ready():
            self.verdict.raise_refused()
        return tuple.__getitem__(self, 0)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            rule = f"Metrics is a tuple with names, got [{index!r}]."
            mend = f"Write metrics.{index}." if index in self._fields else f"Its names are {', '.join(self._fields)}."
            raise ArgumentError(report(rule, mend=mend))
        return tuple.__getitem__(self, index)

    def __getattr__(self, name: str) -> Any:
        raise missing_name("Metrics", name, self._fields, {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the numbers only, not the pending verdict."""
        return Metrics, tuple(self), {"dropped": self.dropped}


@public
def model_loss(
    model: Any, *, policy: Policy = policies.save_except_gathered
) -> Callable[[Tree, Tree], tuple[Any, Any]]:
    """Make the loss function of a `Model`: embed, scan over blocks, head; units are gathered `prefetch_depth` ahead.

    Args:
        model: A `Model`, such as `fs.models.decoder(config)`.
        policy: Activations that the blocks save for backward. Default: all but gathered weights.

    Returns:
        A function `loss_fn(params, batch) -> (sum, count)`.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> layout = fs.plan_layout(model, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = fs.local_batch({"tokens": tokens, "targets": tokens}, layout.mesh)
        >>> (loss, count), grads = fs.value_and_grad(fs.model_loss(model))(state.params, batch)
        >>> int(count)
        8
    """

    def loss_fn(params: Tree, batch: Tree) -> tuple[Any, Any]:
        head = {**params["head"], **{name: tree.at(params, path) for name, path in model.tied}}
        return run_parts(model, params, None, batch, head=head, policy=policy)

    return loss_fn


@public
@takes_step_options
def make_train_step(
    model: Any, opt: GradientTransformation, *, precision: Precision | None = None, **options: Unpack[StepOptions]
) -> TrainStep:
    """Make the train step of a run: gradients and their norm, a check that they are finite, the update.

    A loss function with a parameter `key` gets a random key, int64[2], equal on every rank: `state.key` with the
    numbers of step and microbatch folded in; `fs.random.for_rank(key)` differs by rank.
    One with a parameter `buffers` gets `state.buffers` and returns `((sum, count), buffers)`. Buffers pass from one
    microbatch to the next; the new state gets those of the mesh's first rank, as in torch's DDP (`fs.sync_buffers`).

    Args:
        model: A `Model`, or a loss function `(params, batch) -> (sum, count)`.
        opt: Optimizer, such as `fs.adamw(1e-3)`.
        precision: Dtypes of compute and communication. Default: the layout's.
        **options: Settings of the step, see `StepOptions`.

    Returns:
        A function `step(state, batch) -> (state, metrics)`, collective over the mesh. `batch` is this rank's part, a
        tree of tensors `[B, ...]`.

    Raises:
        ArgumentError: `model` is neither a `Model` nor a function of two arguments, `opt` isn't a pair of functions,
            or the two are swapped.
        ConfigError: An option is invalid, `has_aux` is given with a `Model`, or `policy` with a loss function.

    The step raises:
        ArgumentError: `state` or `batch` has a wrong type, or parameters were changed in place.
        ScheduleError: The schedule doesn't support this number of ranks or microbatches.
        LayoutError: The layout has different stages than the schedule (see `stages_of`), or a leaf of the state
            doesn't match the layout.
        ConfigError: Only one of precision and state has a loss scale, the mesh has an axis that the `Model` doesn't
            use, or, at the first call in a layout, ranks have different layouts, models, optimizers or options.
        TreeError: The state has a different optimizer or model.
        BatchError: A leaf isn't a tensor, or its dim 0 isn't a multiple of `microbatches`. At the first call in a
            layout every rank raises; later only this rank does, and the others wait until the mesh's timeout.
        NonFiniteError: Loss or gradients are NaN or infinite on some rank, without loss scaling or at the smallest
            scale, or the sum of all counts isn't positive and finite. Every rank raises; see `check`.
        RankError: A rank exited or didn't answer within the mesh's timeout.

    Example:
        >>> init = lambda key: {"w": fs.random.normal(key, (4, 2))}
        >>> loss = lambda params, batch: (batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]).square().mean()
        >>> layout, opt = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1, device="cpu")), fs.adamw(1e-2)
        >>> state = fs.init_state(init, opt, fs.random.key(0), layout)
        >>> step = fs.make_train_step(loss, opt, check="async")
        >>> state, metrics = step(state, {"x": torch.ones(3, 4), "y": torch.zeros(3, 2)})
        >>> int(state.step), bool(metrics.loss > 0)
        (1, True)
    """
    return new_step(model, opt, precision, StepSettings(**options))


def new_step(model: Any, opt: Any, precision: Precision | None, settings: StepSettings) -> TrainStep:
    """Check the arguments of the public call, and make the step."""
    if is_optimizer(model) and not hasattr(model, "block") and not is_optimizer(opt):
        raise refuse("a model, then an optimizer", model, "Swap the two.")
    check_model(model, has_aux=settings.has_aux)
    check_optimizer(opt)
    settings.refuse_wrong(of_model=hasattr(model, "block"))
    if precision is not None:
        check_precision(precision)
    return TrainStep(model, opt, precision, settings)


@dataclass
class StepPlan:
    """A step's decisions for one layout, and its caches between calls in that layout."""

    # `layout` has no devices: ranks agree on it once, however often its mesh is made and collected. Only the plan of
    # the latest call refers to a mesh (`check`, `facts`) and keeps gradient buffers; a new layout releases the others.

    layout: Layout  # on an abstract mesh
    precision: Precision  # dtypes of compute and communication
    schedule: Schedule | None  # of the pipeline; None if the step scans over the blocks
    check_now: bool  # whether the host reads the verdict in the step
    copies: UpdateCopies  # of leaves in other memory
    messages: Messages = field(default_factory=Messages)  # shapes of pipeline activations, learned in the first step
    buffers: Pool = field(default_factory=Pool)  # memory of unsharded gradients, which a CPU keeps for the next step
    first: FirstCall | None = None  # checks of the first step; None afterwards
    rates: Sequence[float] = ()  # learning rates of the last update on this mesh
    check: StateCheck | None = None  # None after a call in a different layout
    facts: UpdateContext | None = None  # the layout's part of every update; None together with `check`

    def release(self) -> None:
        """Free the gradient buffers and the memory of copies, and drop references to the mesh."""
        self.buffers.close()
        self.copies.release()
        self.check = self.facts = None


_COMPILE = (
    "Compile the blocks, fs.make_train_step(model._replace(block=torch.compile(model.block)), opt), or a loss function,"
    " fs.make_train_step(torch.compile(loss_fn), opt)."
)


class Sums(NamedTuple):
    """Sums over all microbatches and data ranks."""

    grads: Tree  # in `layout.reduced`, multiplied by the loss scale
    loss: Tensor  # multiplied by the loss scale (float32, 0-d)
    count: Tensor  # number of tokens (float32, 0-d)
    aux: tuple[Any, ...] = ()  # this rank's, one per microbatch
    buffers: Buffers = MappingProxyType({})  # after the last microbatch, equal on every rank


class Verdict(NamedTuple):
    """Results of the first half of a step, all on the device."""

    sums: Sums
    grads: Tree  # `sums.grads` without expert loads
    loads: dict[str, Tensor]  # expert loads by the path of the bias in whose gradient they were sent
    to_mean: Tensor  # factor from sums to means (float64, 0-d)
    norm: Tensor  # of the mean gradient (float32, 0-d)
    loss: Tensor  # mean over the batch (float32, 0-d)
    finite: Tensor  # whether loss and norm are finite, the count is positive, and ranks did the same (bool, 0-d)
    code: Tensor  # see `train.verdict` (int64, 0-d)
    refusal: Refusal  # makes the error for the code
    dropped: Tensor | None  # expert choices dropped (float32, 0-d); None for a model whose experts drop none


class TrainStep:
    """A train step: `step(state, batch) -> (state, metrics)`, made by `make_train_step`."""

    # Keeps no tensor of a state, only a plan for each layout it was called with: a run may change its layout.
    # `_unchecked` is the verdict on the last call with `check="async"` until the next call has read it.

    def __init__(
        self, model: Any, opt: GradientTransformation, precision: Precision | None, settings: StepSettings
    ) -> None:
        self._model, self._opt = model, opt.with_context()
        self._precision = precision
        self._settings = settings
        self._unchecked: PendingVerdict | None = None
        self._is_model = hasattr(model, "block")
        loss_fn = model_loss(model, policy=settings.policy) if self._is_model else model
        self._loss_fn = LossFunction.of(loss_fn, has_aux=settings.has_aux)
        self._bias_rates: dict[str, float] = dict(model.balanced) if self._is_model else {}
        self._drops: bool = self._is_model and model.drops
        self._facts = _facts(model, opt, precision, settings)
        self._plans: list[StepPlan] = []

    @property
    def donates(self) -> bool:
        """Whether a step may overwrite its state."""
        return self._settings.donate

    def __repr__(self) -> str:
        """Show the model's name and the main settings."""
        name = "Model" if self._is_model else getattr(self._model, "__qualname__", type(self._model).__name__)
        return f"TrainStep({name}, microbatches={self._settings.microbatches}, donate={self._settings.donate})"

    @public
    @_compat.never_inlined
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """Run one step on a state and this rank's part of a batch; see `make_train_step`."""
        refuse_compiled(_COMPILE)
        if not isinstance(state, TrainState):
            raise _other_state(state, batch)
        if self._unchecked is not None:
            # Raise before sending: ranks that raised at `metrics.loss` send nothing more.
            unchecked = self._unchecked
            self._unchecked = None
            unchecked.raise_refused()
            del unchecked  # it holds tensors of the last step
        with naming_lost("train step", state.layout.mesh, step=state.step):
            refuse_changed(state)
            return self._run(state, batch)

    def _run(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        plan = self.plan_of(state, batch)
        held = {"state": unread(state, "opt_state"), "params": unread(state, "main")}
        with plan.copies.running(held, copies_in_flight(state)):
            return self._once(plan, state, batch)

    def _once(self, plan: StepPlan, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        agreement = self.agreement(plan, state, batch)
        first = None if plan.first is None else FirstStep(agreement, state.layout.mesh, batch)
        verdict = self.judge(plan, state, batch, agreement)
        if first is not None:
            first.refuse_ignored_axes(verdict.loss, verdict.norm)
            plan.first = None
        # None if the host doesn't read the verdict. A step on fake tensors has no verdict and is taken as good.
        result = None if not plan.check_now else GOOD if _compat.is_fake(verdict.code) else int(verdict.code)
        agreement.settle(verdict.loss.device)
        if result in (REFUSED, UNLIKE):
            # Every rank gets here, so a collective may look for parameters that were not finite before the step.
            bad = _bad_parameters(state) if result == REFUSED else []
            raise replace(verdict.refusal, parameters=bad).error(result)
        skipped = verdict.finite.logical_not() if result is None else result == SKIPPED
        metrics = Metrics(verdict.loss, verdict.norm, verdict.sums.count, skipped, verdict.sums.aux)
        vars(metrics)["dropped"] = verdict.dropped
        if result is None and not _compat.is_fake(verdict.code):
            vars(metrics)["verdict"] = self._unchecked = PendingVerdict(verdict.code, verdict.refusal.error)
        if result == SKIPPED:
            return self._skipped(plan, state), metrics
        counts = verdict.finite if result is None else None
        return sealed(self.update(plan, state, verdict, counts, plan.copies)), metrics

    def agreement(self, plan: StepPlan, state: TrainState, batch: Tree, bit: Tensor | None = None) -> StepAgreement:
        """Collect what ranks must have in common: the stop bit, unit order, key, last rates, rows along `SAME_ROWS`."""
        mesh = state.layout.mesh
        key, number = state.key, state.step
        shared = any(abstract(mesh).axis_size(axis) > 1 for axis in SAME_ROWS)
        # A step on a device is never read by the host: it is hashed there with the rows. Likewise in a captured step,
        # where a value that the host has read would be frozen into the graph.
        counted = {} if number.is_cpu and bit is None else {COUNTED: number}
        hashes = hash_rows(batch) | hash_rows(counted) if shared and not _compat.makes_fakes() else {}
        result = StepAgreement(mesh, bit, rows=hash_of_all(hashes))
        if result.order is not None:
            result.order.restart()
            result.order.facts = words_of_rows(batch, hashes)
            if counted and shared:
                result.order.facts |= {COUNTED: lambda: str(int(number))}
            if not (_compat.is_fake(key) or _compat.makes_fakes()):
                # Key and step number together determine the loss function's key.
                step = 0 if counted else int(number.numpy())
                unit = key.numpy().tobytes(), step
                result.order.note(SAME_KEYS, unit, lambda: f"{key.tolist()} of step {step}", None)
            if rates := tuple(plan.rates):
                result.order.note(SAME_RATES, rates, lambda: f"rates {', '.join(map(str, rates))}", None)
        return result

    def judge(self, plan: StepPlan, state: TrainState, batch: Tree, agreement: StepAgreement) -> Verdict:
        """Run the first half of a step: gradients, loss, norm, and the verdict on them. The host reads nothing."""
        layout = state.layout
        scale = _loss_scale(state, plan.precision)
        with counting_drops() as drops:
            sums = self._loss_and_grads(plan, state, split_batch(batch, self._settings.microbatches), scale, agreement)
        dropped = _dropped(drops, layout.mesh, sums.loss.device) if self._drops else None
        grads, loads = split_loads(sums.grads, self._bias_rates)
        # In float64, like a Python float: a float32 factor would round twice.
        count = sums.count.double() if scale is None else sums.count.double() * scale.double()
        with _compat.region("norm"):
            to_mean = 1.0 / count
            squares = square_sums(agreement, grads, layout.main)
            norm = (squares.norm().double() * to_mean).float()
        loss = refuse_backward((sums.loss.double() / count).float())
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        weighted = is_divisor(sums.count)
        alike = agreement.alike(loss.device)
        code = verdict_of(finite, weighted, alike, scale, plan.precision.loss_scale)
        counts = finite & weighted & alike
        refusal = Refusal(state.step, loss, norm, sums.count, squares, agreement.order, layout.mesh)
        return Verdict(sums, grads, loads, to_mean, norm, loss, counts, code, refusal, dropped)

    def update(
        self,
        plan: StepPlan,
        state: TrainState,
        verdict: Verdict,
        counts: Tensor | None,
        copies: UpdateCopies = AT_ONCE,
    ) -> TrainState:
        """Run the second half of a step: return the next state. The host reads nothing."""
        assert plan.facts is not None
        facts = replace(plan.facts, donate=self.donates, norm=verdict.norm, finite=counts, copies=copies)
        opt = against_load(self._opt, verdict.loads, self._bias_rates) if self._bias_rates else self._opt
        with noting_rates() as plan.rates:
            after = updated(state, verdict.grads, opt, facts, verdict.to_mean)
        changes: dict[str, Any] = {}
        if after.loss_scale is not None:
            scale = plan.precision.next_scale(after.loss_scale, finite=True if counts is None else counts)
            # A step refused at the smallest scale must not change the count of good steps either.
            kept = None if counts is None else verdict.code < REFUSED
            changes["loss_scale"] = where_finite(kept, scale, after.loss_scale)
        if new := {**verdict.sums.buffers}:
            old = {name: x for name, x in after.buffers.items() if name in new}
            changes["buffers"] = {**after.buffers, **where_finite(counts, new, old)}
        return after.replace(**changes) if changes else after

    def prepare(self, layout: Layout) -> StepPlan:
        """Plan how the step computes in a new layout, on which all ranks have agreed, or refuse the layout."""
        # Allocates nothing: gradient buffers are made by the first step.
        schedule = None
        if self._is_model:
            refuse_model(self._model, layout)
            if abstract(layout.mesh).axis_size("pp") > 1:
                schedule = planned_schedule(self._settings.schedule, layout, self._settings.microbatches)
        check = self._settings.check or ("sync" if device_of(layout) == "cpu" else "async")
        precision = self._precision or layout.precision
        precision.check_state(layout.precision)
        if schedule is not None:
            precision.check_stages()
        # A pipeline has no place between units at which all activations of a step begin to be freed.
        copies = copies_of(layout) if schedule is None else AT_ONCE
        without_devices = on_mesh(layout, abstract(layout.mesh))
        return StepPlan(without_devices, layout.in_flight(precision), schedule, check == "sync", copies)

    def plan_of(self, state: TrainState, batch: Tree) -> StepPlan:
        """Check the state, and return the plan for its layout. Collective at the first call in a layout."""
        # Three cases, cheapest first: the very layout object of the last call; an equal layout on a new mesh, whose
        # plan is kept; a new layout, on which ranks agree before anything else is sent.
        layout = state.layout
        plan = next((p for p in self._plans if p.check is not None and p.check.layout is layout), None)
        if plan is None:
            without_devices = on_mesh(layout, abstract(layout.mesh))
            plan = next((p for p in self._plans if p.layout == without_devices), None)
            if plan is None:
                check_numbers(state)
                agree_on_setup(state, self._facts, batch, self._settings.microbatches)
                plan = self.prepare(layout)
                plan.first = FirstCall(layout.mesh)
                _refuse_other_state(self._opt, state)
                self._plans.append(plan)
            plan.check, plan.facts = StateCheck(layout), update_facts(layout)
            plan.rates = ()  # the ranks of a new mesh have had no update together
        assert plan.check is not None
        plan.check(state)
        for other in self._plans:
            if other is not plan:
                other.release()
        return plan

    def _loss_and_grads(
        self,
        plan: StepPlan,
        state: TrainState,
        microbatches: list[Tree],
        loss_scale: Tensor | None,
        agreement: StepAgreement,
    ) -> Sums:
        """Add up losses and gradients of all microbatches, through the pipeline or one after the other."""
        layout, depth = state.layout, self._settings.prefetch_depth
        rounding = rounding_key(state.key, state.step, layout, plan.precision)
        if plan.schedule is not None:
            sums = pipeline_grads(
                self._model, plan.schedule, layout, state.params, microbatches, precision=plan.precision,
                policy=self._settings.policy, scale=loss_scale, known=plan.messages, agreement=agreement, key=rounding,
                prefetch_depth=depth,
            )  # fmt: skip
            return Sums(*sums)
        loss_fn = self._loss_fn
        key = loss_fn.key(state)
        buffers = loss_fn.buffers(state)
        grads: Tree = None
        losses: list[Tensor] = []
        counts: list[Tensor] = []
        auxes: list[Any] = []
        for i, microbatch in enumerate(microbatches):
            # All but the last leave their sum in `layout.grads`; the last one reduces it for the optimizer.
            last = i + 1 == len(microbatches)
            fn = loss_fn.bound(buffers, fold_in(key, i) if key is not None else None)
            sums = loss_and_grads(
                fn if plan.first is None else plan.first.watched(fn, has_aux=True),
                state.params,
                (microbatch,),
                GradsTo(layout.reduced if last else layout.grads, grads, plan.buffers),
                RunOptions(
                    plan.precision, rounding, loss_scale, i, depth, between=plan.copies.of_microbatch(last=last)
                ),
                has_aux=True,
                agreement=lambda _: agreement if last else None,  # noqa: B023
                first=plan.first,
            )
            grads = sums.grads
            buffers = sums.aux.buffers
            if loss_fn.has_aux:
                auxes.append(tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, sums.aux.aux))
            losses.append(sums.loss.float())
            counts.append(sums.count.float())
        buffers = sync_buffers(buffers, layout.mesh)
        return Sums(grads, torch.stack(losses).sum(), torch.stack(counts).sum(), tuple(auxes), buffers)

    def _skipped(self, plan: StepPlan, state: TrainState) -> TrainState:
        """Return the state after a skipped step: unchanged except for a smaller loss scale."""
        assert state.loss_scale is not None
        smaller = plan.precision.next_scale(state.loss_scale, finite=False)
        unchanged = state.donate() if self.donates else tree.map(copied, state)
        return unchanged.replace(loss_scale=smaller)


def device_of(layout: Layout) -> str:
    """Return the device type of a layout's mesh; "cpu" for an abstract one."""
    return getattr(layout.mesh, "device_type", "cpu")


def _facts(
    model: Any, opt: GradientTransformation, precision: Precision | None, settings: StepSettings
) -> dict[str, str]:
    """Describe the settings of a step on which all ranks must agree, except its layout."""
    # A loss function may close over values that differ between ranks, so only its name is compared.
    of_loss = facts_of("model", model) if hasattr(model, "block") else {"loss": getattr(model, "__qualname__", "")}
    # The model's functions close over all they compute with. Its config may also contain file names of one rank.
    of_loss = {name: text for name, text in of_loss.items() if not name.startswith("model.config")}
    schedule = settings.schedule if hasattr(model, "block") else ""
    planned = schedule if isinstance(schedule, str) else f"{schedule!r} {digest(repr(schedule.table)):016x}"
    facts = {name: str(getattr(settings, name)) for name in ("microbatches", "check", "prefetch_depth")}
    facts |= {"schedule": planned, "policy": settings.policy.name, "precision": str(precision)}
    return {**facts, **of_loss, **facts_of("optimizer", opt.update)}


def check_model(model: Any, *, has_aux: bool) -> None:
    """Refuse a value that is neither a `Model` nor a loss function, and `has_aux` with a `Model`."""
    if not hasattr(model, "block"):
        check_function("a Model, or a loss function (params, batch)", model, 2)
    elif has_aux:
        mend = "Give a loss function that calls the model's parts: fs.model_loss(model) returns (sum, count)."
        raise ConfigError(message("got has_aux with a Model, which returns no aux.", mend=mend))


def _other_state(state: Any, batch: Any) -> ArgumentError:
    """Explain which mistake put something else where the state belongs."""
    if isinstance(batch, TrainState):
        mend = "Swap the two: step(state, batch)."
    elif isinstance(state, tuple) and any(isinstance(x, TrainState) for x in cast("tuple[Any, ...]", state)):
        mend = "A step returns two things: state, metrics = step(state, batch)."
    else:
        mend = "Make one with fs.init_state, or from parameters: fs.state_from_params(params, opt, key, layout)."
    return refuse("a TrainState", state, mend)


def _loss_scale(state: TrainState, precision: Precision) -> Tensor | None:
    """Return the loss scale (float32, 0-d) on the device of the parameters; None without loss scaling."""
    if (precision.loss_scale is None) != (state.loss_scale is None):
        has, wants = ("without", "with") if state.loss_scale is None else ("with", "without")
        text = f"got a state {has} a loss scale, and a precision {wants} one."
        mend = "Pass the same precision= to fs.plan_layout, so that the state is made for it."
        raise ConfigError(message(text, mend=mend))
    if state.loss_scale is None:
        return None
    return state.loss_scale.scale.to(device_of(state.layout), non_blocking=True)


def _dropped(drops: Sequence[Tensor], mesh: Mesh, device: torch.device) -> Tensor:
    """Sum the numbers of dropped choices over stages and data ranks (float32, 0-d). Collective."""
    own = torch.stack([torch.zeros((), dtype=torch.float64, device=device), *drops]).sum()
    axes = tuple(axis for axis in AXES if axis == "pp" or axis in data_axes(mesh))
    return start_sum(own.reshape(1), axis_group(mesh, axes), torch.float64).wait()[0].float()


def _bad_parameters(state: TrainState) -> list[str]:
    """Return the paths of parameters that are not finite on some rank. Collective."""
    named = tree.named_leaves(state.params)
    here = (on_device(local_of(x), x.device_mesh.device_type) for x in named.values())
    bad = [torch.isfinite(x).all().logical_not() for x in here]
    counts = start_sum(torch.stack(bad).float(), everyone(state.layout.mesh), torch.float32).wait()
    return [path for path, count in zip(named, counts.tolist(), strict=True) if count]


def _refuse_other_state(opt: GradientTransformation, state: TrainState) -> None:
    """Refuse a state that was made with a different optimizer."""
    try:
        layout = state.layout
        moments, stacked = layout.precision.moments, layout.stacked
        expected = opt.start(layout.meta_main(), moments=moments, shardings=layout.main, stacked=stacked)
    except (NotImplementedError, RuntimeError):
        return  # An init that reads values fails on meta tensors. Then the update itself refuses a wrong state.
    # Only structures are compared: an update accepts moments in any format, such as those of a loaded state.
    spec, other = map(state_structure, (expected, state.opt_state))
    if spec != other:
        tree.flatten_up_to(spec, state.opt_state, ("its optimizer", "state.opt_state"))


def refuse_model(model: Any, layout: Layout) -> None:
    """Refuse a model with different parameters than the layout, or on axes that it doesn't compute over."""
    with _compat.with_values():
        draws = model.init(torch.zeros(2, dtype=torch.int64))
    draws = tree.flatten_up_to(layout.structure, draws, ("the state", "its model"))
    check_fit(layout, draws, ((leaf.shape, leaf.init) for leaf in layout.leaves))
    shape = abstract(layout.mesh)
    others = [axis for axis in ("cp", "tp") if axis not in model.axes]
    used = [f"{axis}={shape.axis_size(axis)}" for axis in others if shape.axis_size(axis) > 1]
    if used:
        known = ", ".join(("pp", "replica", "dp", "ep", *model.axes))
        mend = f"Use {known}, or pass a loss function that computes on the other axes itself."
        raise ConfigError(message(f"cannot split the compute of this Model over {', '.join(used)}.", mend=mend))


def planned_schedule(schedule: str | Schedule, layout: Layout, microbatches: int) -> Schedule:
    """Return the schedule of a step on a mesh with `pp`."""
    ranks = abstract(layout.mesh).axis_size("pp")
    planned = plan_schedule(schedule, ranks, microbatches) if isinstance(schedule, str) else schedule
    if (planned.ranks, planned.microbatches) != (ranks, microbatches):
        text = f"got {planned!r} for pp={ranks} and microbatches={microbatches}."
        raise ScheduleError(message(text, mend="Plan it with fs.pipeline.plan_schedule for these numbers."))
    return planned
