"""Run this rank's row of a schedule: one graph per stage and microbatch, messages between stages."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fsharding.base import tree
from fsharding.base.errors import TransformError, report
from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.counters import note, uncounted
from fsharding.comm.handles import Handle
from fsharding.comm.leaf_memory import device_of
from fsharding.comm.native import Message, as_bytes, receive_object, send_object
from fsharding.comm.step_agreement import StepAgreement
from fsharding.comm.transport import send_recv
from fsharding.formats.precision import Precision, scaled_loss
from fsharding.mesh.backends import has_fake_backend
from fsharding.mesh.device_mesh import axis_group, axis_index, set_mesh
from fsharding.mesh.failures import among, naming_lost
from fsharding.models.stacks import parts, run_parts, units_in_order
from fsharding.ops.capacity import watching_capacity
from fsharding.pipeline.actions import Action
from fsharding.pipeline.lowering import late
from fsharding.pipeline.schedule import Schedule, forward_only
from fsharding.pipeline.stage_state import StageState
from fsharding.pipeline.stages import check_ends
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import local_of
from fsharding.transforms import policies
from fsharding.transforms.gather_unit import prefetch_unit
from fsharding.transforms.policies import Policy
from fsharding.transforms.run_options import GradsTo, RunOptions
from fsharding.transforms.value_and_grad import Tape, global_sums

__all__ = ["Messages", "pipeline_grads", "pipeline_loss"]

_T = TypeVar("_T")

_Shapes: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]

Messages: TypeAlias = dict[tuple[int, _Shapes], tuple[Any, _Shapes]]
"""Tree, shapes and dtypes of the activations that a stage sends, by stage and by the shapes of its microbatch."""


def pipeline_grads(
    model: Any,
    schedule: Schedule,
    layout: Layout,
    params: Tree,
    pieces: Sequence[Tree],
    *,
    precision: Precision,
    policy: Policy = policies.save_except_gathered,
    scale: float | Tensor | None = None,
    known: Messages | None = None,
    agreement: StepAgreement | None = None,
    key: Tensor | None = None,
    prefetch_depth: int = 1,
) -> tuple[Tree, Tensor, Tensor]:
    """Run one step of a schedule. Collective over the full mesh.

    Args:
        model: `Model`, whose blocks are split over the stages.
        schedule: Schedule for the size of `pp`.
        layout: Layout planned with `stages=stages_of(model, schedule)`.
        params: Parameters at rest in this layout.
        pieces: Microbatches of this rank's data position, equal on all ranks along `pp`.
        precision: Dtypes of compute, wire and gradients, and formats, from `Layout.in_flight`.
        policy: What the blocks keep for backward.
        scale: Loss scale for fp16: a number, or a 0-d tensor, which the host doesn't read.
        known: Tree, shapes and dtypes of activations from earlier calls with the same layout, schedule and precision;
            updated in place. A sender describes them once per shape of microbatches.
        agreement: Comparison of ranks, summed along with losses and counts.
        key: Key int64[2] for stochastic rounding.
        prefetch_depth: Number of units of a stage to gather ahead, if they are gathered per microbatch.

    Returns:
        (gradients in `layout.main`, sum of losses times scale, sum of counts). The sums are 0-d float32, equal on all
        ranks.

    Raises:
        LayoutError: The layout's stages aren't the schedule's.
        TransformError: A stage's activations differ from earlier ones for a microbatch of the same shapes.
        RankError: A rank is lost, or doesn't answer within the mesh's timeout.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> schedule = fs.pipeline.plan_schedule("gpipe", ranks=1, microbatches=2)
        >>> mesh = fs.make_mesh(dp=-1, device="cpu")
        >>> layout = fs.plan_layout(model, mesh, stages=fs.pipeline.stages_of(model, schedule))
        >>> params = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout).params
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = fs.local_batch({"tokens": tokens, "targets": tokens}, mesh)
        >>> grads, loss, count = fs.pipeline.pipeline_grads(
        ...     model, schedule, layout, params, [batch, batch], precision=fs.FP32
        ... )
        >>> int(count)
        16
    """
    options = RunOptions(precision, key, scale, prefetch_depth=prefetch_depth)
    known = {} if known is None else known
    return _walked(
        "train step",
        lambda: _Run(model, schedule, layout, params, list(pieces), options, policy, known),
        layout,
        lambda run: (run.stage_state.grads(), *run.sums(agreement)),
    )


def pipeline_loss(
    model: Any,
    schedule: Schedule,
    layout: Layout,
    params: Tree,
    pieces: Sequence[Tree],
    *,
    precision: Precision,
    known: Messages | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run only the forwards of a schedule; return the sums of losses and counts. Collective over the full mesh."""
    # Don't share `known` with a train step, whose activations may differ.
    options = RunOptions(precision, key)
    policy = policies.save_except_gathered
    known = {} if known is None else known
    forward = forward_only(schedule)

    def make() -> _Run:
        return _Run(model, forward, layout, params, list(pieces), options, policy, known, trains=False)

    return _walked("fs.evaluate", make, layout, lambda run: run.sums(None))


def _walked(caller: str, make: Callable[[], _Run], layout: Layout, result: Callable[[_Run], _T]) -> _T:
    """Make a run, run its actions, and return its result; after a failure, release everything."""
    run = None
    try:
        with naming_lost(caller, layout.mesh):
            run = make()
            run.walk()
            return result(run)
    except BaseException:
        if run is not None:
            run.close()
        raise


@dataclass
class _Flight:
    """A microbatch between forward and backward of a stage."""

    # An activation that has been sent is freed. `outputs` and `types` keep its gradient edge (None if it needs no
    # gradient), shape and dtype, which is all that backward needs.

    tape: Tape
    inputs: list[Tensor]
    outputs: Sequence[Any] = ()
    types: _Shapes = ()


@dataclass
class _Run:
    """One step on one rank; see `pipeline_grads`."""

    model: Any
    schedule: Schedule
    layout: Layout
    params: Tree
    pieces: list[Tree]
    options: RunOptions
    policy: Policy
    known: Messages
    trains: bool = True

    def __post_init__(self) -> None:
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.arrived: dict[Action, tuple[Any, list[Tensor], Handle[None]]] = {}
        self.handed: dict[tuple[str, int, int], tuple[Any, list[Tensor]]] = {}
        self.sent: dict[Action, Handle[None]] = {}
        self.begun: dict[tuple[int, int], Tape] = {}
        # Microbatches whose last reductions are in flight while the rank computes, and the number of closed ones.
        # Consecutive ones add to the same gradients, also across stages that share a leaf, so each finishes before the
        # next adds its first gradient.
        self.closing: deque[tuple[Action, Tape]] = deque()
        self.closed = 0
        self.losses: list[tuple[Tensor, Any]] = []
        self.notes: list[Tensor] = []
        mesh = self.layout.mesh
        self.rank, self.group = axis_index("pp", mesh), axis_group(mesh, ("pp",))
        self.others_are_fake = self.group.process_group is not None and has_fake_backend(self.group.process_group)
        actions = self.schedule.actions_on(self.rank)
        self.splits = any(action.kind == "I" for action in actions)
        first = tree.leaves(self.params)[0]
        self.pool, self.device = Pool(), device_of(local_of(first), first.device_mesh.device_type)
        check_ends(self.model, self.schedule, self.layout)
        self.stage_state = StageState(
            self.model, self.schedule, self.layout, self.params, self.options, trains=self.trains
        )
        # Each GATHER of a microbatch serves the next of its computes that uses parameters.
        self.uses = defaultdict[tuple[int, int | None], list[str]](list)
        for action in actions:
            if action.uses_parameters:
                self.uses[action.stage, action.microbatch].append(action.kind)

    # ------------------------------------------------------------------------------------------------------ a stage
    def _tape(self, stage: int, m: int) -> Tape:
        params, shardings, sums = self.stage_state.parts(stage)
        options = replace(self.options, precision=self.stage_state.precision, microbatch=m, defers=self.splits)
        layers = self.stage_state.layers(stage)
        once_for = self.model.embed, stage
        tape = Tape(params, GradsTo(shardings, sums), options, self.pool, layers=layers, once_for=once_for)
        assert tape.adds_in_place, "the sums of a stage are those of all its tapes"
        return tape

    def _forward(self, params: Tree, *x_and_batch: Any) -> Any:
        return run_parts(self.model, params, *x_and_batch, head=_head(params), policy=self.policy)

    # ------------------------------------------------------------------------------------------------------- actions
    def walk(self) -> None:
        """Run this rank's actions, and wait for all sends."""
        for action in self.row():
            self.do(action)
        self._close_first(self.closed + len(self.closing))
        self.settle()
        self.pool.close()

    def row(self) -> tuple[Action, ...]:
        """Return this rank's actions, in order."""
        # For a new shape of microbatches the sender first describes its activations, and that receive blocks the host.
        # Posted early it could deadlock, so `late` moves each receive right before its use. All ranks along `pp` see
        # the same shapes, and decide alike.
        row = self.schedule.table[self.rank]
        seen = {shapes for _, shapes in self.known}
        return row if all(self._looks(m) in seen for m in range(len(self.pieces))) else late(row, self.schedule.owner)

    def _looks(self, m: int) -> _Shapes:
        return _shapes(tree.leaves(self.pieces[m]))

    def do(self, action: Action) -> None:
        """Run one action, or post it."""
        kind, stage, m = action
        match kind:
            case "GATHER":
                self._gather(stage, m)
            case "SCATTER":
                if m is not None:
                    note("start", action)
                self.stage_state.scatter(stage, self._closing_those_before())
            case "F" | "B" | "I" | "W":
                self._compute(action)
                self.stage_state.advance()
            case "SEND_F" | "SEND_B":
                self.settle(wait=False)
                assert m is not None
                spec, leaves = self.handed.pop((kind[-1], stage, m))
                self.sent[action] = self._guard(action, lambda: self._send(action, spec, leaves))
            case _:
                if kind == "RECV_F" and self.others_are_fake:
                    assert m is not None
                    self._foresee(stage - 1, m)
                self.arrived[action] = self._guard(action, lambda: self._receive(action))

    def _compute(self, action: Action) -> None:
        kind, stage, m = action
        assert m is not None
        note("begin", action)
        if kind == "F":
            self._f(stage, m)
        elif kind == "W":
            self._w(stage, m)
        else:
            self._b(stage, m, kind)
        if kind != "W":
            self.stage_state.used(stage)
        note("end", action)

    def _gather(self, stage: int, m: int | None) -> None:
        """Start to gather a stage, or only its first unit, which prefetches the others while it computes."""
        note("start", Action("GATHER", stage, m))
        if m is None:
            self.stage_state.gather(stage)
            return
        use = self.uses[stage, m].pop(0)
        if use == "F":
            self.begun[stage, m] = tape = self._tape(stage, m)
            tape.forward(lambda params: prefetch_unit(self._first(stage, params)))
            return
        flight = self.flights[stage, m]
        if any(y is not None for y in flight.outputs):
            flight.tape.context.prefetch_backward()

    def _first(self, stage: int, params: Tree) -> Tree:
        if stage == 0:
            return params["embed"]
        return next(units_in_order(parts(self.model, params["blocks"])), _head(params))

    def _f(self, stage: int, m: int) -> None:
        last = stage == self.schedule.stages - 1
        spec, leaves = (None, []) if stage == 0 else self._inputs("F", stage, m)
        x_leaves = [x.detach().requires_grad_(self.trains and x.is_floating_point()) for x in leaves]
        tape = self.begun.pop((stage, m), None) or self._tape(stage, m)
        flight = self.flights[stage, m] = _Flight(tape, x_leaves)
        x = None if spec is None else tree.unflatten(spec, x_leaves)
        with watching_capacity() as notes:
            out = tape.forward(self._forward, x, self.pieces[m])
        self.notes += notes
        tape.context.end_forward()
        if last:
            total, count = out if isinstance(out, tuple) else (out, 1.0)
            total = scaled_loss(total, self.options.scale)
            flight.outputs = [total if total.requires_grad else None]
            self.losses.append((total.detach(), count))
        else:
            flat, out_spec = tree.flatten(out)
            floating = [y for y in flat if y.is_floating_point()]
            flight.outputs = [get_gradient_edge(y) if y.requires_grad else None for y in floating]
            flight.types = _shapes(floating)
            self.handed["F", stage, m] = out_spec, [y.detach() for y in flat]
        if not self.trains:
            self.flights.pop((stage, m)).tape.finish()

    def _b(self, stage: int, m: int, kind: str) -> None:
        """Differentiate a microbatch; as I, defer products that give weight gradients to `_w`."""
        flight = self.flights[stage, m]
        if kind == "B":
            self._follow(flight.tape)
        cotangents: list[Tensor] | None = None
        if stage < self.schedule.stages - 1:
            given = self._inputs("B", stage, m)[1]
            cotangents = [g for y, g in zip(flight.outputs, given, strict=True) if y is not None]
        outputs = [y for y in flight.outputs if y is not None]
        wanted = [x for x in flight.inputs if x.requires_grad]
        result: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if outputs:
            result = flight.tape.backward(outputs, cotangents, wanted, defers=kind == "I")
        if wanted:
            zero = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, result, strict=True)]
            self.handed["B", stage, m] = None, zero
        if kind == "B":
            self._end_backward(stage, m)

    def _w(self, stage: int, m: int) -> None:
        """Compute the weight gradients that I has deferred."""
        flight = self.flights[stage, m]
        self._follow(flight.tape)
        if any(y is not None for y in flight.outputs):
            flight.tape.weights()
        self._end_backward(stage, m)

    def _follow(self, tape: Tape) -> None:
        """Make a microbatch wait for the earlier ones before it adds its first gradient."""
        if before := self._closing_those_before():
            tape.context.reducer.follow(before)

    def _closing_those_before(self) -> Callable[[], None] | None:
        """Return a function that finishes the microbatches whose backward has ended by now; None without any."""
        ended = self.closed + len(self.closing)
        return functools.partial(self._close_first, ended) if ended else None

    def _close_first(self, count: int) -> None:
        """Finish the reductions of the first microbatches, in order, unless that has been done."""
        while self.closed < count:
            scatter, tape = self.closing.popleft()
            self.closed += 1  # before `finish`, which itself calls this for the earlier ones
            tape.finish()
            note("wait", scatter)

    def _end_backward(self, stage: int, m: int) -> None:
        """Release a microbatch; its own reductions stay in flight until the next one adds its first gradient."""
        tape = self.flights.pop((stage, m)).tape
        if self.stage_state.each:
            self.closing.append((Action("SCATTER", stage, m), tape))
        else:
            tape.finish()

    def _inputs(self, way: str, stage: int, m: int) -> tuple[Any, list[Tensor]]:
        """Return the neighbor's output for this stage, handed over on this rank or received."""
        neighbor = stage - 1 if way == "F" else stage + 1
        if self.schedule.is_local(min(stage, neighbor)):
            return self.handed.pop((way, neighbor, m))
        action = Action("RECV_F" if way == "F" else "RECV_B", stage, m)
        spec, leaves, pending = self.arrived.pop(action)
        self._guard(action, pending.wait)
        return spec, leaves

    # ------------------------------------------------------------------------------------------------------ messages
    def _tag(self, action: Action, number: int) -> int:
        """Return the tag of a tensor of a message, unique in the step; both ends compute the same."""
        kind, stage, m = action
        assert m is not None
        sender = stage if kind.startswith("SEND") else stage - 1 if kind == "RECV_F" else stage + 1
        messages = 2 * self.schedule.stages * self.schedule.microbatches
        return 1 + number * messages + (sender * self.schedule.microbatches + m) * 2 + kind.endswith("B")

    def _send(self, action: Action, spec: Any, leaves: list[Tensor]) -> Handle[None]:
        peer = self.group.ranks[self.schedule.peer(action)]
        if action.kind == "SEND_F":
            self._tell(action, peer, (spec, _shapes(leaves)))
        messages = [Message(peer, self._tag(action, i), as_bytes(x.contiguous())) for i, x in enumerate(leaves)]
        return send_recv(messages, [], self.group, self.device)

    def _tell(self, action: Action, peer: int, sent: tuple[Any, _Shapes]) -> None:
        """Describe activations to the receiver, once per stage and shape of microbatches."""
        key = action.stage, self._looks(action.microbatch or 0)
        if key not in self.known and not self.others_are_fake:
            send_object(sent, peer, self.group, self.device)
        if self.known.setdefault(key, sent) != sent:
            rule = f"got different activations of stage {action.stage} for two microbatches of the same shapes."
            rows = [f"{text} {list(types)}" for text, (_, types) in (("before:", self.known[key]), ("now:", sent))]
            mend = "Make the tree, shapes and dtypes of activations depend only on the shapes of the batch."
            raise TransformError(report(f"train step {rule}", rows, mend))

    def _receive(self, action: Action) -> tuple[Any, list[Tensor], Handle[None]]:
        assert action.microbatch is not None
        peer = self.group.ranks[self.schedule.peer(action)]
        if action.kind == "RECV_F":
            key = action.stage - 1, self._looks(action.microbatch)
            if key not in self.known:
                self.known[key] = receive_object(peer, self.group, self.device)
            spec, types = self.known[key]
        else:
            flight = self.flights[action.stage, action.microbatch]
            spec = None
            types = flight.types
        leaves = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in types]
        messages = [Message(peer, self._tag(action, i), as_bytes(x)) for i, x in enumerate(leaves)]
        return spec, leaves, send_recv([], messages, self.group, self.device)

    def _foresee(self, stage: int, m: int) -> None:
        """Find what a stage on a fake rank sends, by running all stages up to it on tensors without values."""
        key = stage, self._looks(m)
        if key in self.known:
            return
        with torch.no_grad(), set_mesh(self.layout.mesh), uncounted():
            x: Any = None
            for earlier in range(stage + 1):
                x = self._forward(self.stage_state.stand_ins(earlier, self.device), x, self.pieces[m])
        leaves, spec = tree.flatten(x)
        self.known[key] = spec, _shapes(leaves)

    def _guard(self, action: Action, communicate: Callable[[], _T]) -> _T:
        """Name the peer and the action if the communication fails."""
        with among((self.group.ranks[self.schedule.peer(action)],), str(action)):
            return communicate()

    # -------------------------------------------------------------------------------------------------------- results
    def settle(self, *, wait: bool = True) -> None:
        """Finish the sends that are done; with `wait`, all of them."""
        for action, pending in list(self.sent.items()):
            if wait or pending.is_ready():
                self._guard(action, pending.wait)
                del self.sent[action]

    def close(self) -> None:
        """Release everything after a failure."""
        tapes = [*self.begun.values(), *(f.tape for f in self.flights.values()), *(tape for _, tape in self.closing)]
        for tape in tapes:
            tape.context.close(failed=True)
        self.stage_state.close()
        self.pool.close()

    def sums(self, agreement: StepAgreement | None) -> tuple[Tensor, Tensor]:
        """Return the sums of scaled losses and of counts over all microbatches and ranks."""
        terms = torch.zeros(2, dtype=torch.float64, device=self.device)
        for total, count in self.losses:
            terms += torch.stack((total.double(), torch.as_tensor(count, dtype=torch.float64, device=self.device)))
        sums = global_sums(terms[0], terms[1], self.notes, self.layout.mesh, agreement, ("pp",))
        return sums[0].float(), sums[1].float()


def _head(params: Tree) -> Tree:
    """Return the head of a stage with its tied leaves; None on a stage without a head."""
    return {**params["head"], **params["tied"]} if "head" in params else None


def _shapes(leaves: Sequence[Tensor]) -> _Shapes:
    return tuple((tuple(x.shape), x.dtype) for x in leaves)
