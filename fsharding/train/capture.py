"""`capture`: a train step recorded as one device graph. State and batch are in the graph's static memory.

    capture    copy the state; step once on the copy, so that counts move to the device and ranks have agreed
               step once more, which fills the pool of buffers
               trace two steps: the same operations, no host reads      (else refused, with the line)
               warm up on a side stream; record: judge, update, copy the new state over the old one
    call       raise if the previous step was refused; copy state and batch to static memory, unless they are there
               set the bit of fs.preemption; replay; return the state, and metrics in new memory

Guarantee: a captured step returns the states and metrics of the step itself, bit for bit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, devices, tree
from fsharding.base.errors import ArgumentError, BatchError, ConfigError, LayoutError, message
from fsharding.base.public import kind_of, public, refuse
from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.host_memory import keep_in_place
from fsharding.comm.leaf_memory import copied, settle_copies
from fsharding.mesh import preemption
from fsharding.mesh.device_mesh import abstract
from fsharding.mesh.failures import naming_lost
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.memory_kinds import HERE
from fsharding.sharding.named_sharding import local_of
from fsharding.train.operations import check_operations
from fsharding.train.state import STATE_FIELDS, TrainState, refuse_changed, sealed
from fsharding.train.step import Metrics, StepPlan, TrainStep
from fsharding.train.verdict import PendingVerdict, Refusal
from fsharding.transforms.value_and_grad import refuse_backward

__all__ = ["CapturedStep", "DeviceGraph", "StepGraph", "capture", "captured", "refuse_host_work"]

T = TypeVar("T")

_NAME = "fs.capture"
_WARM_UPS = 2
"""Steps before the recorded one, in which kernels are chosen, workspaces made and communicators started."""


class StepGraph(Protocol):
    """Operations that are recorded once and replayed on the same tensors."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function under the conditions of recording."""
        ...

    def record(self, run: Callable[[], T]) -> T:
        """Record the operations of a function; an implementation may also run them."""
        ...

    def replay(self) -> None:
        """Run the recorded operations, ordered with other work of the caller on the device."""
        ...


class DeviceGraph:
    """A `StepGraph` of an accelerator that records graphs, as CUDA does."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.get_device_module(device).Stream(device)
        self._graph = devices.new_graph(device)

    def warm_up(self, run: Callable[[], T]) -> T:
        """See `StepGraph`: on the recording stream."""
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        with devices.on_stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def record(self, run: Callable[[], T]) -> T:
        """See `StepGraph`: nothing runs."""
        with devices.recording(self._graph, self._stream):
            return run()

    def replay(self) -> None:
        """See `StepGraph`: on the current stream."""
        self._graph.replay()


class _Recorded(NamedTuple):
    """Results of a recorded step, in the graph's memory."""

    numbers: Tensor  # loss, norm, count, 1 if the step is skipped, and drops of experts, if any (float32)
    code: Tensor  # verdict (int64, 0-d)
    stops: Tensor  # number of ranks that want to stop (float64, 0-d)
    refusal: Refusal  # makes the error for a verdict
    aux: tuple[Any, ...]


class CapturedStep:
    """A captured step: `captured(state, batch) -> (state, metrics)`, made by `capture`."""

    # The returned state is the graph's static memory: the next call takes it as its argument, donates it and overwrites
    # it. A different state in this layout is copied to that memory and donated as well. Loss, norm, count and
    # `skipped` of the metrics are copies; aux is in the graph's memory, too.
    # The graph reads `_state`, `_batch` and `_stop` (this rank's bit of `fs.preemption`), and writes `_state`.
    # `_unchecked` is the verdict on the last call until the next one has read it. `_last` is the state that the last
    # call returned: the next one donates it, whichever state it gets.

    def __init__(self, plan: StepPlan, state: TrainState, batch: Tree, stop: Tensor) -> None:
        self._plan = plan
        self._state = state
        self._batch = batch
        self._stop = stop
        self._graph: StepGraph | None = None
        self._recorded: _Recorded | None = None
        self._unchecked: PendingVerdict | None = None
        self._last: weakref.ref[TrainState] | None = None

    def __repr__(self) -> str:
        """Show strategy and mesh."""
        layout = self._state.layout
        return f"CapturedStep({layout.strategy} on mesh {abstract(layout.mesh)})"

    def record(self, step: TrainStep, graph: StepGraph) -> None:
        """Record a step on the static memory. Collective."""
        run = functools.partial(_run, step, self._plan, self._state, self._batch, self._stop)
        for _ in range(_WARM_UPS):
            graph.warm_up(run)
        self._graph, self._recorded = graph, graph.record(run)

    @public
    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """Run one step, on a state in the captured layout and a batch of the captured kind. Collective."""
        assert self._graph is not None and self._recorded is not None and self._plan.check is not None
        if not isinstance(state, TrainState):
            raise refuse("a TrainState", state, "Call it as the step itself: state, metrics = step(state, batch).")
        if self._unchecked is not None:
            unchecked = self._unchecked
            self._unchecked = None
            unchecked.raise_refused()
        with naming_lost("captured step", state.layout.mesh):
            refuse_changed(state)
            if state.layout is not self._state.layout and state.layout != self._state.layout:
                mend = "Capture it again with this state: fs.capture(step, state, batch)."
                raise LayoutError(message("got a state in a different layout.", mend=mend))
            self._plan.check(state)
            self._take(state, batch)
            self._graph.replay()
            settle_copies(self._state.opt_state)
        last = None if self._last is None else self._last()
        if last is not None and last is not state and "params" in vars(last):
            last.donate()
        return self._result(state.donate().key)

    def _take(self, state: TrainState, batch: Tree) -> None:
        """Copy a state and a batch to the static memory, except for leaves that are there already."""
        own, spec = tree.flatten(self._batch)
        given = tree.flatten_up_to(spec, batch, ("the batch of fs.capture", "batch"))
        rows = [
            f"{path} is {_kind(x)}; {_kind(y)} was captured"
            for path, x, y in zip(tree.paths(self._batch), given, own, strict=True)
            if _kind(x) != _kind(y)
        ]
        if rows:
            mend = "Pass batches of the same shapes and dtypes, padded if they are shorter, or capture the step again."
            raise BatchError(message("got a batch that differs from the captured one.", rows, mend))
        # The key is a constant of the graph: the host reads it when steps are recorded.
        if state.key.tolist() != self._state.key.tolist():
            mend = "Capture it again with this state: fs.capture(step, state, batch)."
            raise ArgumentError(message("got a state with a different key: the graph has its own.", mend=mend))
        _copy_state(self._state, state)
        _copy(own, given)
        self._stop.fill_(float(preemption.pending()))

    def _result(self, key: Tensor) -> tuple[TrainState, Metrics]:
        """Return the state and the metrics of a replay."""
        assert self._recorded is not None
        numbers, code, stops, refusal, aux = self._recorded
        preemption.agree(stops)
        loss, norm, count, skipped, *dropped = numbers.clone().unbind()
        metrics = Metrics(refuse_backward(loss), norm, count, skipped=skipped.bool(), aux=aux)
        vars(metrics)["dropped"] = dropped[0] if dropped else None
        if not _compat.is_fake(code):
            vars(metrics)["verdict"] = self._unchecked = PendingVerdict(code, refusal.error)
        after = sealed(self._state.replace(key=key))
        self._last = weakref.ref(after)
        return after, metrics


def _kind(x: Any) -> str:
    return kind_text(x) if isinstance(x, Tensor) else kind_of(x)


def _run(step: TrainStep, plan: StepPlan, static: TrainState, batch: Tree, bit: Tensor) -> _Recorded:
    """Run a step on static memory, and copy the new state over the old one."""
    agreement = step.agreement(plan, static, batch, bit)
    verdict = step.judge(plan, static, batch, agreement)
    stops = agreement.stops(verdict.loss.device)
    parts = (verdict.loss, verdict.norm, verdict.sums.count, verdict.finite.logical_not(), verdict.dropped)
    numbers = torch.stack([x.float() for x in parts if x is not None])
    # The update may donate what it gets: `replace` keeps `static` itself, whose memory the graph writes.
    _copy_state(static, step.update(plan, static.replace(), verdict, verdict.finite))
    return _Recorded(numbers, verdict.code, stops, verdict.refusal, verdict.sums.aux)


def _copy_state(static: TrainState, state: TrainState) -> None:
    """Copy all leaves of a state except its key."""
    own, spec = tree.flatten(_fields(static))
    given = tree.flatten_up_to(spec, _fields(state), ("the captured state", "state"))
    pairs = [(a, b) for a, b in zip(own, given, strict=True) if isinstance(a, Tensor)]
    _copy([local_of(a) for a, _ in pairs], [local_of(b) for _, b in pairs])


def _fields(state: TrainState) -> dict[str, Any]:
    """Return the fields that a step reads on the device: all but the key, which is constant and read by the host."""
    return {name: getattr(state, name) for name in STATE_FIELDS if name != "key"}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors without waiting, except for those that are the target itself."""
    with torch.no_grad():
        for to, x in zip(targets, sources, strict=True):
            if to.device != x.device or not _compat.is_same_view(to, x):
                to.copy_(x, non_blocking=True)


# ------------------------------------------------------------------------------------------------------------- capture
@public
def capture(step: TrainStep, state: TrainState, batch: Tree) -> CapturedStep:
    """Capture a train step as one device graph (a CUDA graph), which the host launches with one call. Collective.

    A captured step doesn't wait for Python, however short its kernels are. Losses and states are bitwise identical to
    the step's. Any strategy, precision and number of microbatches can be captured. Every call must run the same
    operations, and the host must not read the device: `if x.item()`, shapes that depend on values, and normal draws
    from `key` (made on the host) are refused with the line. Other Python code in the loss function runs only once.

    Args:
        step: A step of `make_train_step` with `check="async"`, the default on CUDA.
        state: State for this step; it isn't changed. The graph keeps a copy, so memory holds both until the first call.
        batch: This rank's part of a batch; later batches must have the same shapes and dtypes.

    Returns:
        A function `captured(state, batch) -> (state, metrics)` that donates its state, even if the step doesn't. The
        returned state is in the graph's memory and is overwritten by the next call: copy, save or print it before.
        Metrics are in new memory, except aux.

    Raises:
        ArgumentError: `step` isn't from `make_train_step`, or `state` isn't a `TrainState`.
        ConfigError: The device records no graphs (a CPU), the step has `check="sync"`, or the layout keeps more than
            moments on the host, or keeps them there without `donate=True`.
        TransformError: The host reads the device, host tensors are copied to it, or two calls run different operations.
        RankError: A rank exited.

    The captured step raises:
        ArgumentError, LayoutError: The state has a different key, or a different layout.
        BatchError: The batch has different shapes or dtypes.
        FshardingError: Any error of the step itself with `check="async"`.

    Example:
        >>> def loss(params, batch):
        ...     return (batch["x"] @ fs.gather_unit(params)["w"] - batch["y"]).square().mean()
        >>> state, step = fs.setup({"w": torch.zeros(4, 1)}, loss, fs.sgd(0.1), fs.random.key(0), check="async")
        >>> batch = {"x": torch.ones(3, 4), "y": torch.zeros(3, 1)}
        >>> if state.layout.mesh.device_type == "cuda":
        ...     step = fs.capture(step, state, batch)
        >>> state, metrics = step(state, batch)
        >>> int(state.step)
        1
    """
    _check(step, state)
    device = next((local_of(x).device for x in tree.leaves(state.params)), torch.device("cpu"))
    if not devices.records_graphs(device.type):
        rule = f"needs a device that records graphs, such as CUDA; this state is on {device.type}."
        mend = (
            "Call the step itself here. fs.testing.assert_capturable(step, state, batch) checks on any device whether"
            " it could be captured."
        )
        raise ConfigError(message(rule, mend=mend))
    return captured(step, state, batch, DeviceGraph(device))


def captured(step: TrainStep, state: TrainState, batch: Tree, graph: StepGraph) -> CapturedStep:
    """Capture a step in a given graph; see `capture`."""
    result = _prepared(step, state, batch)
    result.record(step, graph)
    return result


def refuse_host_work(step: TrainStep, state: TrainState, batch: Tree) -> None:
    """Refuse a step that can't be captured, on any device. Collective."""
    _check(step, state)
    _prepared(step, state, batch)


def _prepared(step: TrainStep, state: TrainState, batch: Tree) -> CapturedStep:
    """Make the static memory, and try the step on it."""
    with naming_lost(_NAME, state.layout.mesh):
        plan = step.plan_of(state, batch)
        if plan.check_now:
            mend = 'Make it with fs.make_train_step(..., check="async"), which reads nothing.'
            raise ConfigError(message('cannot capture a step with check="sync".', mend=mend))
        # This call moves counts of the host, such as `state.step`, to the device.
        static, metrics = step(state.replace(**tree.map(copied, _fields(state))), batch)
        for x in tree.leaves(static.opt_state):
            keep_in_place(_compat.local_tensor(x) if isinstance(x, DTensor) else x)
        if metrics.verdict is not None:
            metrics.verdict.raise_refused()
        plan = replace(plan, buffers=Pool())
        own = tree.map(torch.clone, batch)
        bit = torch.zeros((), dtype=torch.float64, device=metrics.loss.device)
        run = functools.partial(_run, step, plan, static, own, bit)
        run()  # the first call makes the buffers of the pool; all later ones reuse them
        check_operations(run)
    return CapturedStep(plan, static, own, bit)


def _check(step: Any, state: Any) -> None:
    if not isinstance(step, TrainStep):
        mend = "Pass the step itself, with a state and a batch: fs.capture(step, state, batch)."
        raise refuse("a step of fs.make_train_step", step, mend)
    if not isinstance(state, TrainState):
        raise refuse("a TrainState", state, "Pass a state and a batch: fs.capture(step, state, batch).")
    away = [choice for choice in state.layout.strategy.memory if choice.kind != HERE]
    if rows := [str(choice) for choice in away if choice.role != "moments" or choice.tier.can_fail]:
        mend = "Keep everything but moments on the device, or call the step itself."
        raise ConfigError(message("cannot capture a step in which the host waits for copies.", rows, mend))
    if away and not step.donates:
        mend = "Make it with fs.make_train_step(..., donate=True): a graph copies to the memory that it copies from."
        raise ConfigError(message("cannot capture a step with moments on the host without donate=True.", mend=mend))
