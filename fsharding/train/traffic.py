"""Traffic of parameters and gradients in a step, by closed formulas: calls and bytes of one rank, by axes of the mesh.

In: a layout, a schedule. Out: what is added to a `Traffic`, without tensors or processes.
k is the number of ranks along the axes, n the elements that a rank has before the call (the largest piece, where they
differ), b the bytes of one on the wire, s those of one of the sum.
    gather (k-1)·n·b      scatter, exchange (k-1)/k·n·b      message n·b
    sum    (k-1)·n·b up to 16384 elements, if n·k is at most 2^20, or on 2 ranks, else (k-1)/k·n·(b+s) in two calls;
           of gradients by the backend itself 2·(k-1)/k·n·b
    maxima 2·(k-1)/k·n·4, of n blocks that several ranks have parts of, or matrices
For leaves with a format n·b are the bytes of codes and scales, as they are laid out for what travels.
Law: see `decoder_traffic`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fsharding.comm.coded_sums import plan_cut_sums, plan_whole_sums
from fsharding.comm.codes import CodePlan, code_bucket, exchanged_maxima, plan_codes
from fsharding.comm.counters import Sent, Traffic
from fsharding.comm.redistribute import in_buckets
from fsharding.comm.reduce import sums_at_once
from fsharding.comm.rounded_moves import Part, batches_of, plan_parts, travels_as_codes
from fsharding.comm.steps import Step, kinds_of, plan_steps, sharding_after
from fsharding.formats.blocks import Blocks
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import abstract, data_axes
from fsharding.models.stacks import stacks_of
from fsharding.optim.clip import carrier_sum, norm_axes
from fsharding.pipeline.schedule import Schedule
from fsharding.pipeline.stages import layers_by_stage, owners
from fsharding.sharding import boxes
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.sharding.stage_owners import begins
from fsharding.transforms.unit_plan import unreduced, whole
from fsharding.transforms.weight_formats import kept_rows

__all__ = ["Backward", "Sender", "Stage", "parameters", "round_at_rest", "sum_over", "update"]


class Stage(NamedTuple):
    """The computation of a rank between two messages.

    Attributes:
        layers: how many of each stack.
        first: it has the embedding.
        last: it has the head.
        walks: how often it goes back in a step: once for each microbatch, or for inputs and again for weights.
        firsts: which layer of each stack its first one is.
        starts: which of the layers that this rank has of each stack that is.
    """

    layers: tuple[int, ...]
    first: bool
    last: bool
    walks: int
    firsts: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Sender:
    """One rank in one step.

    Attributes:
        model: what is trained.
        layout: of the state.
        where: the rank's coordinate.
        microbatches: how many.
        planned: the schedule that a mesh with `pp` has.
        traffic: what was counted so far.
    """

    model: Any
    layout: Layout
    where: dict[str, int]
    microbatches: int
    planned: Schedule | None
    traffic: Traffic

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, where the mesh has `pp`."""
        return self.planned if self.size("pp") > 1 else None

    @property
    def native(self) -> bool:
        """Whether gradients are summed by the backend's own collectives."""
        return self.layout.precision.sums_natively(getattr(self.layout.mesh, "device_type", None))

    @property
    def place(self) -> tuple[tuple[str, int], ...]:
        """The coordinate, as a value that caches take."""
        return tuple(self.where.items())

    @functools.cached_property
    def rounds(self) -> str:
        """When weights in a format are rounded: "in units" or "in stages", "before" or "after" a step; "" for never."""
        if self.layout.precision.gather is None:
            return ""
        if any(self.layout.rounds(leaf) is not None for leaf in self.layout.leaves):
            return "after"
        return "in units" if self.schedule is None else "in stages" if self.once else "before"

    @property
    def once(self) -> bool:
        """Whether parameters are gathered once a step."""
        table = self.schedule.actions_on(self.where["pp"]) if self.schedule else ()
        return any(action.kind == "GATHER" and action.microbatch is None for action in table)

    @property
    def each(self) -> bool:
        """Whether gradients are reduced for each microbatch."""
        table = self.schedule.actions_on(self.where["pp"]) if self.schedule else ()
        return not table or any(action.kind == "SCATTER" and action.microbatch is not None for action in table)

    def size(self, *axes: str) -> int:
        """How many ranks there are along some axes."""
        return math.prod(map(abstract(self.layout.mesh).axis_size, axes))

    @functools.cached_property
    def stacks(self) -> tuple[str, ...]:
        """Where the stacks of blocks are, in order."""
        return tuple(path for path, _ in stacks_of(self.model))

    @functools.cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage, also of other ranks, by stack; without a pipeline, there is one stage."""
        if self.schedule is not None:
            return layers_by_stage(self.model, self.schedule, self.layout)
        firsts = [next(leaf for leaf in self.layout.leaves if begins(leaf.path, path)) for path in self.stacks]
        return (tuple(leaf.shape[0] for leaf in firsts),)

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """The stages of this rank; without a pipeline, one with all layers."""
        if self.schedule is None:
            zeros = (0,) * len(self.stacks)
            return [Stage(self.layers[0], True, True, self.microbatches, zeros, zeros)]
        row = self.schedule.actions_on(self.where["pp"])
        result = list[Stage]()
        starts = (0,) * len(self.stacks)
        for stage in self.schedule.stages_on(self.where["pp"]):
            walks = sum(a.stage == stage and a.kind in ("B", "I") for a in row)
            firsts = tuple(sum(counts[:stage]) for counts in zip(*self.layers, strict=True))
            ends = (stage == 0, stage == self.schedule.stages - 1)
            layers = self.layers[stage]
            result.append(Stage(layers, *ends, walks, firsts, starts))
            starts = tuple(map(sum, zip(starts, layers, strict=True)))
        return result

    def send(self, axes: Iterable[str], sent: Sent, times: int = 1) -> None:
        """Counts what is sent so many times."""
        if sent.calls * times:
            self.traffic.add(tuple(a for a in AXES if a in axes), sent.bytes * times, sent.calls * times)


def native_sum(n: int, k: int, b: int) -> Sent:
    """A sum of n elements of b bytes over k ranks in one all-reduce: each part goes around the ring twice."""
    return Sent(1, 2 * (k - 1) * -(-n // k) * b) if n else Sent(0, 0)


def sum_over(n: int, k: int, b: int, s: int = 4) -> Sent:
    """A sum of n elements over k ranks: b bytes a term, s bytes an element of the sum."""
    if k == 1 or n == 0:
        return Sent(0, 0)
    return Sent(1, (k - 1) * n * b) if sums_at_once(n, k) else Sent(2, (k - 1) * -(-n // k) * (b + s))


# ----------------------------------------------------------------------------------------------------- units and leaves
class _Leaf(NamedTuple):
    """A parameter, or some rows of a stack of them, or one without its first dim."""

    plan: LeafLayout
    rows: int | None = None

    def cut(self, kind: str) -> NamedSharding:
        """How it is cut on the ranks that own it; kind is "params", "grads" or "main"."""
        home: NamedSharding = getattr(self.plan, kind)
        home = home.slice_of_mesh()
        if not begins(self.plan.path, "blocks"):
            return home.simplified()
        spec = home.spec.replace(0, ()) if self.rows is not None else home.spec.drop(0)
        return replace(home, spec=spec).simplified()

    def shape(self, where: dict[str, int]) -> tuple[int, ...]:
        """Its shape on the slice of the mesh that holds it: of a fused dim there is what the rank's `tp` has."""
        stacked = begins(self.plan.path, "blocks")
        sizes = list(self.plan.shape)
        for a in self.plan.params.assigned:
            if a.dim is not None and a.axis != "pp":
                sizes[a.dim] = boxes.length(a.ranges[where[a.axis]])
        return (*(() if self.rows is None else (self.rows,)), *sizes[1:]) if stacked else tuple(sizes)


def _leaves(sender: Sender, *beginnings: str, rows: int | None = None) -> list[_Leaf]:
    return [_Leaf(leaf, rows) for leaf in sender.layout.leaves if any(begins(leaf.path, b) for b in beginnings)]


def _rows(sender: Sender, stage: Stage) -> list[_Leaf]:
    """A stage's rows of the stacks."""
    counts = zip(sender.stacks, stage.layers, strict=True)
    return [leaf for path, count in counts if count for leaf in _leaves(sender, path, rows=count)]


class Backward(NamedTuple):
    """What backward does with the weights of a model.

    Attributes:
        kept: the policy keeps the gathered weights of blocks.
        recomputes: it computes products of forward again.
        by_columns: whether a weight is used for `x @ w.T` alone, by its path, so that `Precision.columnwise` counts.
    """

    kept: bool
    recomputes: bool
    by_columns: Callable[[str], bool]


def parameters(sender: Sender, stage: Stage, backward: Backward, *, tied: Sequence[str] = ()) -> None:
    """Adds the gathers of a stage's units over the data axes, and the reductions of their gradients.

    Args:
        sender: the rank.
        stage: of a `Model` whose embedding is differentiated without its weights.
        backward: what it does with weights.
        tied: paths of leaves that the head has from others.
    """
    m = sender.microbatches
    if sender.once:
        _stage(sender, stage, tied)
    again = 0 if backward.kept else stage.walks
    for unit, count, back, path, start in (
        (_leaves(sender, "embed"), int(stage.first), 0, None, 0),
        *(
            (_leaves(sender, path), count, again, path, start)
            for path, count, start in zip(sender.stacks, stage.layers, stage.firsts, strict=True)
        ),
        (_leaves(sender, "head", *tied), int(stage.last), stage.walks if sender.schedule else 0, None, 0),
    ):
        rows = None if path is None else range(start, start + count)
        for without_format, number in _alike(sender, unit, rows, count):
            if not sender.once:
                _gather(sender, unit, without_format, backward, _Times(number * m, number * back, number * stage.walks))
            _reduce(sender, unit, without_format, number if sender.each else 0)


def _alike(
    sender: Sender, unit: Sequence[_Leaf], rows: Sequence[int] | None, count: int
) -> list[tuple[frozenset[str], int]]:
    """Sorts units of a kind by the leaves in them that have no format although those of other layers have one.

    Args:
        sender: the rank.
        unit: any of them.
        rows: the layers that they are; None where they are none.
        count: how many there are.

    Returns:
        Paths of the leaves, and how many such units there are.
    """
    if rows is None:
        return [(frozenset(), count)]
    precision = sender.layout.precision
    kept = {leaf.plan.path: precision.kept_rows(leaf.plan.path, leaf.plan.shape[0]) for leaf in unit}
    return [*Counter(frozenset(path for path, r in kept.items() if row in r) for row in rows).items()]


def _stage(sender: Sender, stage: Stage, tied: Sequence[str]) -> None:
    """The gather of a whole stage: of codes, where weights have a format."""
    part = _rows(sender, stage)
    precision = sender.layout.precision
    part += _leaves(sender, "embed") * stage.first + _leaves(sender, "head", *tied) * stage.last
    rounded: list[_Rounded] = []
    for leaf in part if sender.rounds == "in stages" else ():
        if (format := sender.layout.format_of(leaf.plan)) is not None:
            starts = zip(sender.stacks, stage.starts, strict=True)
            start = next((start for path, start in starts if begins(leaf.plan.path, path)), None)
            rounded.append(_Rounded(leaf, "params", "", format, start))
    _round(sender, rounded)
    coded = {leaf.leaf.plan.path for leaf in rounded if leaf.travels(sender)}
    moves: list[_Move] = []
    for leaf in part:
        if leaf.plan.path not in coded:
            home = leaf.cut("params")
            dtype = precision.compute_dtype(sender.layout.param_dtype(leaf.plan))
            moves.append(_Move(leaf, home, whole(home), dtype.itemsize))
    _together(sender, moves)


class _Times(NamedTuple):
    """How often units are gathered in forward and again in backward, and how often backward goes through them."""

    forward: int
    again: int
    walks: int


def _gather(
    sender: Sender, unit: Sequence[_Leaf], without_format: frozenset[str], backward: Backward, times: _Times
) -> None:
    """A unit as one bucket for each set of axes, experts apart from what has other data axes, and so are codes.

    Weights that backward may gather in blocks along their other dim are apart, too: it does for products, and gathers
    them again as they were for all other uses.
    """
    precision = sender.layout.precision
    moves = dict[object, list[_Move]]()
    coded: dict[tuple[object, object, bool], list[tuple[_Leaf, NamedSharding]]] = {}
    for leaf in unit:
        home = leaf.cut("params")
        dtype = precision.compute_dtype(sender.layout.param_dtype(leaf.plan))
        steps = plan_steps(home, whole(home))
        columnwise = precision.takes_columns(leaf.plan.path, len(leaf.shape(sender.where)))
        key = kinds_of(steps), home.data_axes, columnwise
        rounded = sender.rounds == "in units" and leaf.plan.path not in without_format
        if rounded and sender.layout.format_of(leaf.plan) is not None:
            coded.setdefault(key, []).append((leaf, home))
        elif steps:
            moves.setdefault(key[:2], []).append(_Move(leaf, home, whole(home), dtype.itemsize))
    for bucket in moves.values():
        _take(sender, bucket, times=times.forward + times.again)
    for (_, _, columnwise), bucket in coded.items():
        by_columns = [columnwise and backward.by_columns(leaf.plan.path) for leaf, _ in bucket]
        as_it_was = backward.recomputes or not all(by_columns)
        _take_codes(sender, bucket, times.forward + (times.again if as_it_was else 0))
        _take_codes(sender, bucket, times.walks if any(by_columns) else 0, across=True)


def _take_codes(
    sender: Sender, bucket: Sequence[tuple[_Leaf, NamedSharding]], times: int, *, across: bool = False
) -> None:
    """A gather of codes and scales, and before it of largest magnitudes; `across`, in blocks along the other dim."""
    plans: list[CodePlan] = []
    for leaf, home in bucket if times else ():
        format = sender.layout.format_of(leaf.plan)
        shape = leaf.shape(sender.where)
        assert format is not None
        format = format.across(shape) if across else format
        plans.append(plan_codes(home.mesh, home, whole(home), shape, format, sender.place))
    if not plans:
        return
    _maxima(sender, plans, times)
    _gather_codes(sender, plans, [plan_steps(home, whole(home)) for _, home in bucket], times)


def _gather_codes(sender: Sender, plans: Sequence[CodePlan], steps: Sequence[tuple[Step, ...]], times: int = 1) -> None:
    """A gather of codes and scales of leaves that travel by the same steps, if by any."""
    if steps[0]:
        axes = steps[0][0].axes
        codes = code_bucket(plans, [taken[0].dim for taken in steps], tuple(map(sender.size, axes))).bucket
        sender.send(axes, Sent(1, (sender.size(*axes) - 1) * codes.width) if codes.width else Sent(0, 0), times)


def _maxima(sender: Sender, plans: Sequence[CodePlan], times: int) -> None:
    """Adds the exchange of largest magnitudes of blocks that several ranks have parts of."""
    for axis, n in exchanged_maxima(plans):
        k = sender.size(axis)
        sender.send((axis,), Sent(1, 2 * (k - 1) * -(-n // k) * 4), times * (n > 0))


def round_at_rest(sender: Sender) -> None:
    """Adds what is exchanged to round the parameters of a pipeline once, before a step.

    Args:
        sender: the rank.
    """
    if sender.rounds != "before":
        return
    own = [leaf for plan in sender.layout.leaves if (leaf := _here(sender, plan)) is not None]
    formats = [(leaf, sender.layout.format_of(leaf.plan)) for leaf in own]
    _round(sender, [_Rounded(leaf, "params", "params", format) for leaf, format in formats if format is not None])


class _Rounded(NamedTuple):
    """A leaf that is rounded at rest, and maybe on its way to a copy.

    Attributes:
        leaf: which one.
        kind: of the sharding that it is in.
        target: of the sharding that it goes to; "" for whole over the data axes.
        format: that it is rounded to.
        start: of a stack that is a stage's, which of this rank's rows the first one is; None for all rows.
    """

    leaf: _Leaf
    kind: str
    target: str
    format: Blocks
    start: int | None = None

    def kept(self, sender: Sender) -> tuple[int, ...] | None:
        """See `Rounding`."""
        kept = kept_rows(self.leaf.plan, getattr(self.leaf.plan, self.kind), sender.layout.precision, sender.where)
        if kept is None or self.start is None or self.leaf.rows is None:
            return kept
        return tuple(row - self.start for row in kept if self.start <= row < self.start + self.leaf.rows)

    def there(self, leaf: _Leaf) -> NamedSharding:
        """Where a leaf goes that is this one, or rows of it."""
        return leaf.cut(self.target) if self.target else whole(leaf.cut(self.kind))

    def travels(self, sender: Sender) -> bool:
        """Whether it travels as codes; else it is rounded where it is."""
        return travels_as_codes(plan_steps(self.leaf.cut(self.kind), self.there(self.leaf)), self.kept(sender))

    def parts(self, sender: Sender) -> Sequence[Part]:
        """See `plan_parts`."""
        home = self.leaf.cut(self.kind)
        there = self.there(self.leaf) if self.travels(sender) else home
        shape = self.leaf.shape(sender.where)
        dtype = sender.layout.precision.compute_dtype(self.leaf.plan.init)
        return plan_parts(home, there, shape, self.format, self.kept(sender) or (), dtype, sender.place)


def _round(sender: Sender, leaves: Sequence[_Rounded]) -> None:
    """Rounds leaves, and gathers the codes of those that travel, and their rows that have no format."""
    pairs = [(leaf, part) for leaf in leaves for part in leaf.parts(sender)]
    _maxima(sender, [part.plan for _, part in pairs if part.plan is not None], 1)
    for batch in batches_of([part for _, part in pairs]):
        bucket = [pairs[i] for i in batch]
        plans = [part.plan for _, part in bucket if part.plan is not None]
        if plans:
            _gather_codes(sender, plans, [part.steps for _, part in bucket])
            continue
        moves: list[_Move] = []
        for leaf, part in bucket:
            assert part.rows is not None, "other leaves have codes"
            rows = _Leaf(leaf.leaf.plan, part.rows[1] - part.rows[0])
            moves.append(_Move(rows, rows.cut(leaf.kind), leaf.there(rows), part.dtype.itemsize))
        _take(sender, moves)


def _reduce(sender: Sender, unit: Sequence[_Leaf], without_format: frozenset[str], count: int) -> None:
    """Gradients of a unit: of each microbatch to where they are held, of all of them to where they belong."""
    precision = sender.layout.precision
    m = sender.microbatches
    apart = dict[object, list[_Move]]()
    first = dict[object, list[_Move]]()
    second = dict[object, list[_Move]]()
    for leaf in unit:
        rest = sender.layout.param_dtype(leaf.plan)
        source = unreduced(leaf.cut("params"))
        held = leaf.cut("grads")
        main = leaf.cut("main")
        held = main if m == 1 and sender.schedule is None else held
        main = held if sender.schedule is not None else main
        kinds = tuple(kinds_of(plan_steps(*pair)) for pair in ((source, held), (held, main)))
        format = precision.reduce_format(leaf.plan.path, len(leaf.shape(sender.where)))
        format = None if leaf.plan.path in without_format else format
        kept = precision.grad_dtype(rest)
        native = sender.native and format is None
        term = precision.reduce_dtype or (kept if native else precision.compute_dtype(rest))
        move = _Move(leaf, source, held, term.itemsize, kept.itemsize, native, format)
        late = _Move(
            leaf, held, main, (precision.reduce_dtype or kept).itemsize, kept.itemsize, native,
            None if kinds[0] else format,
        )  # fmt: skip
        apart.setdefault((kinds[0], format), []).append(move)
        first.setdefault((kinds, format), []).append(move)
        second.setdefault((kinds, format), []).append(late)
    # With the last microbatch, only leaves that go on alike travel together.
    for buckets, times in ((apart, count * (m - 1)), (first, count), (second, count)):
        for bucket in buckets.values():
            _take(sender, bucket, times=times)


# -------------------------------------------------------------------------------------------------------- once a step
def update(sender: Sender) -> None:
    """Adds what a step sends after all microbatches: last reductions of a pipeline, the norm, and new parameters."""
    layout = sender.layout
    precision = sender.layout.precision
    shape = abstract(sender.layout.mesh)

    def size(leaf: _Leaf) -> int:
        return precision.grad_dtype(layout.param_dtype(leaf.plan)).itemsize

    trained = [leaf for leaf in layout.leaves if leaf.trainable]
    own = [leaf for plan in trained if (leaf := _here(sender, plan)) is not None]
    if sender.schedule is not None:
        for part in _by_scatter(sender, own):
            source = [leaf.cut("grads") if sender.each else unreduced(leaf.cut("params")) for leaf in part]
            moves = zip(part, source, map(size, part), strict=True)
            _together(sender, [_Move(leaf, s, leaf.cut("main"), b, b, sender.native) for leaf, s, b in moves])
        for leaf in own:
            whole_at = any(a.axis == "pp" and a.dim is None for a in leaf.plan.main.assigned)
            others = len(owners(leaf.plan.main, sender.size("pp"))) - 1 if whole_at else 0
            n = math.prod(leaf.cut("main").local_shape(leaf.shape(sender.where), sender.where))
            sender.send(("pp",), Sent(1, others * n * size(leaf)), int(others > 0))
    formats = [(leaf, layout.rounds(leaf.plan)) for leaf in own]
    rounded = [_Rounded(leaf, "main", "params", format) for leaf, format in formats if format is not None]
    _round(sender, rounded)
    coded = {leaf.leaf.plan.path for leaf in rounded if leaf.travels(sender)}
    _together(
        sender,
        [
            _Move(leaf, leaf.cut("main"), leaf.cut("params"), layout.param_dtype(leaf.plan).itemsize)
            for leaf in own
            if leaf.plan.path not in coded
        ],
    )
    norms: dict[tuple[str, ...], int] = {}
    for leaf in trained:
        axes = norm_axes(leaf.main, math.prod(leaf.shape))
        norms[axes] = norms.get(axes, 0) + 1
    pipe = () if sender.schedule is None else ("pp",)
    of_loss = (*pipe, *data_axes(shape))
    # Loss and weight; with the last microbatch the stop bit, which goes on with the norm where axes are left.
    sender.send(of_loss, sum_over(2, sender.size(*of_loss), 8, 8), 0 if pipe else sender.microbatches - 1)
    sender.send(of_loss, sum_over(3, sender.size(*of_loss), 8, 8))
    left = [axis for axis in shape.names if axis not in of_loss and shape.axis_size(axis) > 1]
    if (carrier := carrier_sum(norms, left)) is not None:
        norms[carrier] += 1
    elif left:
        sender.send(tuple(left), sum_over(1, sender.size(*left), 8, 8))
    for axes, count in norms.items():
        sender.send(axes, sum_over(count, sender.size(*axes), 8, 8))


def _by_scatter(sender: Sender, own: Sequence[_Leaf]) -> Iterator[list[_Leaf]]:
    """Leaves that the last SCATTER of each stage reduces together: rows of stacks, and its ends if none is later."""
    assert sender.schedule is not None
    row = sender.schedule.actions_on(sender.where["pp"])
    ends = [leaf for leaf in own if not begins(leaf.plan.path, "blocks")]
    trained = {leaf.plan.path for leaf in own}
    last = {a.stage: i for i, a in enumerate(row) if a.kind == "SCATTER"}
    by_stage = dict(zip(sender.schedule.stages_on(sender.where["pp"]), sender.stages, strict=True))
    tied = [path for _, path in sender.model.tied]
    for _, stage in sorted(by_stage.items(), key=lambda item: -last[item[0]]):
        heads = ["head", *tied] if stage.last else []
        beginnings = [*heads, "embed"] if stage.first else heads
        here = [leaf for leaf in ends if any(begins(leaf.plan.path, b) for b in beginnings)]
        ends = [leaf for leaf in ends if leaf not in here]
        yield [leaf for leaf in _rows(sender, stage) if leaf.plan.path in trained] + here


def _here(sender: Sender, plan: LeafLayout) -> _Leaf | None:
    """The rank's part of a leaf over `pp`; None for nothing."""
    if sender.schedule is not None and sender.where["pp"] not in owners(plan.main, sender.size("pp")):
        return None
    stack = next((i for i, path in enumerate(sender.stacks) if begins(plan.path, path)), None)
    rows = None if stack is None else sum(stage.layers[stack] for stage in sender.stages)
    return None if rows == 0 else _Leaf(plan, rows)


# ------------------------------------------------------------------------------------------------------------- buckets
class _Move(NamedTuple):
    """A leaf from one sharding to another.

    Attributes:
        leaf: which one.
        source: where it is.
        target: where it goes.
        first: bytes of an element in the first step.
        later: the same in those after it.
        native: sums are the backend's own.
        format: in which terms of the first step travel.
    """

    leaf: _Leaf
    source: NamedSharding
    target: NamedSharding
    first: int
    later: int = 4
    native: bool = False
    format: Blocks | None = None


def _together(sender: Sender, moves: Iterable[_Move]) -> None:
    """Groups leaves that travel together whatever their unit, in buckets of bounded size."""
    groups: dict[object, list[_Move]] = {}
    for move in moves:
        if steps := plan_steps(move.source, move.target):
            groups.setdefault((kinds_of(steps), move.first), []).append(move)

    def size(move: _Move) -> int:
        larger = move.source if move.source.partial else move.target
        return math.prod(larger.local_shape(move.leaf.shape(sender.where), sender.where)) * move.first

    for members in groups.values():
        for batch in in_buckets(members, size):
            _take(sender, batch)


def _take(sender: Sender, bucket: Sequence[_Move], times: int = 1) -> None:
    """The steps of a bucket, one after the other."""
    now = [move.source for move in bucket]
    steps = [plan_steps(move.source, move.target) for move in bucket]
    for place, (kind, axes) in enumerate(kinds_of(steps[0])):
        k = sender.size(*axes)
        n = 0
        if place == 0 and bucket[0].format is not None:
            _take_terms(sender, bucket, [taken[0] for taken in steps], times)
            now = [sharding_after(move.source, taken[0]) for move, taken in zip(bucket, steps, strict=True)]
            continue
        for i, move in enumerate(bucket):
            left = sharding_after(now[i], steps[i][place])
            local = (left if kind == "gather" else now[i]).local_shape(move.leaf.shape(sender.where), sender.where)
            n += math.prod(local) if kind == "sum" else _piece(sender, steps[i][place], local)
            now[i] = left
        b = bucket[0].later if place else bucket[0].first
        if kind == "sum":
            sender.send(axes, native_sum(n, k, b) if bucket[0].native else sum_over(n, k, b, bucket[0].later), times)
        elif kind != "slice" and n:
            sender.send(axes, Sent(1, (k - 1) * n * b), times)


def _take_terms(sender: Sender, bucket: Sequence[_Move], taken: Sequence[Step], times: int) -> None:
    """A sum of terms that travel as codes: one exchange, and where all get a large sum a gather of its pieces."""
    format = bucket[0].format
    axes = taken[0].axes
    assert format is not None
    k = sender.size(*axes)
    shapes = [m.source.local_shape(m.leaf.shape(sender.where), sender.where) for m in bucket]
    if taken[0].kind == "scatter":
        cuts = tuple((shape, step.dim) for shape, step in zip(shapes, taken, strict=True))
        plan = plan_cut_sums(cuts, tuple(map(sender.size, axes)), format)
    else:
        plan = plan_whole_sums(tuple(shapes), k, format)
    sender.send(axes, Sent(1, (k - 1) * plan.codes.width), times * (plan.codes.width > 0))
    if not plan.scatter and not plan.at_once:
        sender.send(axes, Sent(1, (k - 1) * plan.sums.width * bucket[0].later), times)


def _piece(sender: Sender, taken: Step, local: tuple[int, ...]) -> int:
    """Elements of the largest piece of a leaf that is cut along a dim."""
    first = boxes.nested_chunk(local[taken.dim], [(sender.size(axis), 0) for axis in taken.axes])
    return math.prod(local[: taken.dim]) * first[1] * math.prod(local[taken.dim + 1 :])
