"""`value_and_grad`: gradients of a loss over sharded parameters, by `torch.autograd.grad`.

Callers pass and receive DTensors; the loss function sees `Local` nodes. Guarantees: inputs are never changed; the
mean is over the total count, for every mesh, strategy and number of microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import NonFiniteError, TransformError, message, report
from fsharding.base.public import check_function, public, refuse, refuse_compiled
from fsharding.base.shared import unmarked
from fsharding.base.tree import Tree
from fsharding.comm.buffer_pool import Pool
from fsharding.comm.leaf_memory import copied, scaled
from fsharding.comm.leaf_wires import TreeLeaf, check_patterns, wires_of
from fsharding.comm.step_agreement import StepAgreement
from fsharding.comm.transport import start_sum
from fsharding.comm.wires import Plain
from fsharding.formats.precision import FP32, Precision, check_precision
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import Mesh, axis_group, data_axes, set_mesh
from fsharding.mesh.failures import naming_lost, order_here
from fsharding.ops.capacity import FULL, is_full, refused_if_full, watching_capacity
from fsharding.ops.scaled_mm import refuse_missing_kernel
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import Local, NamedSharding, hides_owners, sharding_of, to_local, typeof
from fsharding.transforms.first_call import FirstCall, first_call, is_pair, refuse_bare_casts
from fsharding.transforms.gather_context import GatherContext, check_depth
from fsharding.transforms.grad_reducer import TapeLeaf
from fsharding.transforms.loss_checks import explained
from fsharding.transforms.run_options import GradsTo, RunOptions
from fsharding.transforms.unit_plan import GradTarget

__all__ = [
    "GradFn", "Loss", "LossAndGrads", "Tape", "agreement_of_call", "global_loss", "is_divisor",
    "loss_and_grads", "refuse_backward", "results_text", "value_and_grad", "without_gradients",
]  # fmt: skip


class GradFn(Protocol):
    """What `value_and_grad` returns."""

    def __call__(self, params: Tree, *args: Any, accumulate: Tree = None, donate: bool = False) -> tuple[Any, Tree]:
        """Loss and gradients; `accumulate` holds summed gradients to add to, in their own memory if donated."""
        ...


class Loss(NamedTuple):
    """A sum of losses and the number of terms in it: what a loss function returns for the tokens of its rank.

    A plain tuple `(sum, count)` means the same. Sums can be added, over ranks, microbatches and batches; means cannot.

    Attributes:
        sum: of the losses, 0-d floating point.
        count: how many there are: a number, or a 0-d tensor.

    Example:
        >>> error = torch.tensor([1.0, 2.0, 3.0]).square()
        >>> loss = fs.Loss(error.sum(), error.numel())
        >>> float(loss.sum), loss.count, round(float(loss.mean), 4)
        (14.0, 3, 4.6667)
    """

    sum: Tensor
    count: Tensor | float

    @property
    def mean(self) -> Tensor:
        """The sum over the count, on the device of the sum.

        Raises:
            NonFiniteError: the count isn't positive and finite. A count on a device is not read, and gives a NaN mean
                instead.
        """
        count = self.count
        if not isinstance(count, Tensor) or (
            count.is_cpu and not _functorch.in_functorch() and not _compat.is_fake(count)
        ):
            count = float(count)
            if not 0 < count < float("inf"):
                what = "no token counts" if count == 0 else FULL if is_full(count) else f"its count is {count:g}"
                mend = "Count the tokens that the sum is over, and add up batches before you ask for their mean."
                raise NonFiniteError(report(f"fs.Loss has no mean: {what}.", mend=mend))
            return without_gradients(self.sum / self.count)
        return without_gradients(self.sum / _divisor(count))


class LossAndGrads(NamedTuple):
    """Results of one forward and backward."""

    loss: Tensor  # the sum of losses over all data ranks, float64, 0-d
    count: Tensor  # of terms in it, float64, 0-d
    counted: bool  # whether the loss function gave a count
    aux: Any  # what else it returned
    grads: Tree  # of the sum, in the shardings that were asked for

    def averaged(self) -> LossAndGrads:
        """Divide the loss and the gradients by the count."""
        divisor = _divisor(self.count)
        return self._replace(loss=self.loss / divisor, grads=scaled(self.grads, 1.0 / divisor))


class _Loss(NamedTuple):
    """A loss function's result, taken apart."""

    total: Tensor
    weight: Tensor | None
    aux: Any


class _CallAgreement(StepAgreement):
    """The agreement of data ranks on the units of one call, which is read where that does not wait for a device."""

    __slots__ = ()

    def summed(self, count: Tensor, axes: Sequence[str]) -> None:
        super().summed(count, axes)
        self.refuse_unlike()


def agreement_of_call(mesh: Mesh | None) -> StepAgreement | None:
    """Has the data ranks of a call that is in no train step compare the order of its units."""
    return None if mesh is None or not data_axes(mesh) else _CallAgreement(mesh, axes=data_axes(mesh))


@public
@_compat.outside_of_graphs
def value_and_grad(
    fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    grads: Tree = None,
    precision: Precision = FP32,
    mean: bool = True,
    key: Tensor | None = None,
    prefetch_depth: int = 1,
) -> GradFn:
    """Makes a function that returns a loss and its gradient with respect to the first argument.

    `fn(params, *args)` returns a 0-d tensor, or `(sum, count)`: the sum of this rank's terms (rows, tokens), and their
    number. `value_and_grad` differentiates the global mean, `psum(sum) / psum(count)` over all data axes; a bare
    tensor counts as the mean of its rank, with count 1. The first call of `fn` warns of a loss that depends on no
    parameter, whose gradients are all 0; of a mean returned with a count above 1, which is divided twice; of random
    numbers from a global generator; and of two draws with one key.

    Args:
        fn: the loss function; it gets the parameters as `Local` nodes, to be opened by `gather_unit` or `scan_units`.
        has_aux: `fn` returns `(loss, aux)`; aux is returned unchanged.
        grads: tree of `NamedSharding` for the gradients; None at a leaf freezes it. By default gradients are sharded as
            the parameters. Axes that are partial in it are left unreduced.
        precision: dtypes of compute, wire and gradients, and formats of weights. For rounded copies of main parameters
            pass `layout.in_flight(precision)`, so that they are not rounded twice.
        mean: divide by the global count; otherwise loss and gradients are sums.
        key: int64[2], for stochastic rounding: a new one in each step, the same on all ranks.
        prefetch_depth: how many units are gathered ahead of the one that computes, in forward and backward. Under
            policies that free gathered weights at most `prefetch_depth + 1` are alive. Results don't depend on it.

    Returns:
        A function `(params, *args, accumulate=None, donate=False) -> ((loss, count), grads)`; `(loss, grads)` when
        `fn` returns a bare tensor; with `has_aux` the first item is `(that, aux)`. Loss and count are 0-d float32, the
        same on all data ranks. A mean loss and its gradients are NaN if the counts do not sum to a positive number.
        `accumulate` has gradient sums of earlier calls, to which the new ones are added, with `donate=True` in place;
        use it with `mean=False`, since a mean divides the total by this call's count.

    Raises:
        ArgumentError: `fn` isn't a function of at least one argument; or the returned function's are wrong or swapped.
        ConfigError: `prefetch_depth` isn't an integer from 0; or `precision` is strict, and the device has no kernel.
        TransformError: the loss is not a 0-d floating point tensor; `fn` writes gathered weights in place, or casts
            what is differentiated to 8 bits; or a plain tensor has a sharding in `grads`.
        NotGatheredError: a leaf was used before it was gathered.
        LayoutError: `precision` has patterns that match no leaf.
        MissingKeyError: `fn` asks for an entry that none of its arguments has.
        BatchError: `fn` failed, and something in the batch isn't a tensor.
        ShapeError: shapes in `fn` don't match.
        RankError: another rank is lost, or does not answer within the mesh's timeout.
        TreeError: `grads` or `accumulate` does not match the parameters.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4, 2)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4, 2)}, layout)
        >>> loss = lambda params, x: (x @ fs.gather_unit(params)["w"]).sum()
        >>> value, grads = fs.value_and_grad(loss)(params, torch.ones(3, 4))
        >>> float(value), fs.unshard(grads["w"])[0].tolist()
        (24.0, [3.0, 3.0])
    """
    check_function("a loss function (params, *args)", fn, 1)
    check_precision(precision)
    check_depth(prefetch_depth)
    _refuse_no_shardings(grads)

    @public
    @_compat.never_inlined
    def run(params: Tree, *args: Any, accumulate: Tree = None, donate: bool = False) -> tuple[Any, Tree]:
        refuse_compiled("Compile the loss function, fs.value_and_grad(torch.compile(loss_fn)), or its blocks.")
        check_patterns(precision, params)
        accumulate = accumulate if donate else tree.map(copied, accumulate)
        first = first_call(fn)
        watched = fn if first is None else first.watched(fn, has_aux=has_aux)
        options = RunOptions(precision, key, prefetch_depth=prefetch_depth)
        args = tuple(map(unmarked, args))
        sums = loss_and_grads(watched, params, args, GradsTo(grads, accumulate), options, has_aux=has_aux, first=first)
        sums = sums.averaged() if mean else sums
        value = refuse_backward(sums.loss.float())
        result = (value, sums.count.float()) if sums.counted else value
        return ((result, sums.aux) if has_aux else result), sums.grads

    return run


def _refuse_no_shardings(grads: Any) -> None:
    if isinstance(grads, Layout | bool | str):
        mend = "Give layout.main, where the optimizer wants gradients, or layout.grads."
        raise refuse("grads= as a tree of NamedSharding", grads, mend)


def loss_and_grads(
    fn: Callable[..., Any],
    params: Tree,
    args: Sequence[Any],
    to: GradsTo,
    options: RunOptions,
    *,
    has_aux: bool,
    # Returns what goes with the sum of loss and weight of a call on a mesh.
    agreement: Callable[[Mesh | None], StepAgreement | None] = agreement_of_call,
    first: FirstCall | None = None,
) -> LossAndGrads:
    """Run a loss function forward and backward; `first` is shown the loss in between."""
    tape = Tape(params, to, options)
    try:
        with naming_lost(options.caller, tape.mesh):
            with watching_capacity() as notes:
                loss = _take_apart(tape.forward(fn, *args), has_aux)
            if (order := order_here()) is not None:
                order.end("forward")
            if first is not None:
                first.look(loss.total, tape.context, [*tape.inputs.values()])
            if loss.total.requires_grad and tape.trains:
                tape.backward([loss.total])
            totals = _global_sums(loss, notes, tape.mesh, agreement(tape.mesh))
            local = tape.finish()
    except BaseException:
        tape.context.close(failed=True)
        raise
    return LossAndGrads(totals[0], totals[1], loss.weight is not None, loss.aux, tape.as_tree(local))


def global_loss(
    fn: Callable[..., Any],
    params: Tree,
    args: Sequence[Any],
    *,
    has_aux: bool,
    precision: Precision,
    key: Tensor | None = None,
) -> tuple[Loss, Any]:
    """Compute the loss alone: each unit is gathered, used and released, and nothing is kept for backward."""
    # Returns the sum and count over all data ranks, float32 and 0-d, and the aux of this rank. A bare tensor counts as
    # the mean of its rank, with count 1.
    spec = tree.flatten(params)[1]
    frozen = GradsTo(tree.unflatten(spec, [None] * spec.num_leaves))
    options = RunOptions(precision, key, caller="fs.evaluate")
    sums = loss_and_grads(fn, params, args, frozen, options, has_aux=has_aux)
    return Loss(sums.loss.float(), sums.count.float()), sums.aux


class Tape:
    """One forward and its backward over sharded parameters, and where their gradients go."""

    # `value_and_grad` has one for each call, a pipeline one for each stage and microbatch.

    # All lists and dicts are by number of the leaf. `_local[i]` is the leaf as the loss function sees it: a `Local`, or
    # for a plain tensor one that autograd tracks. `inputs` has the local tensors of those that are not frozen, and
    # `_direct` the gradients that autograd returned for leaves that were not gathered as part of a unit; gradients of
    # units are in the context's reducer.

    def __init__(
        self,
        params: Tree,
        to: GradsTo,
        options: RunOptions,
        pool: Pool | None = None,  # of buffers, where several tapes share one
        *,
        # Of leaves that are some rows of a stack, by path: the first layer, and how many the stack has in all.
        layers: Callable[[str], tuple[int, int] | None] = lambda _: None,
        # A function and a part of it, whose graph is looked at for casts to 8 bits the first time that it is
        # differentiated; by default the one that `forward` is given.
        once_for: tuple[Callable[..., Any], Hashable] | None = None,
    ) -> None:
        _refuse_transforms(params)
        precision = options.precision
        self._once_for = once_for
        self._leaves, self._spec = tree.flatten(params)
        self._shardings = self._like_leaves("grads", to.shardings, _as_parameter)
        self._accumulated = self._like_leaves("accumulate", to.accumulate, None)
        triples = zip(self._leaves, self._shardings, self._accumulated, strict=True)
        self._targets = [_target(leaf, sharding, x, precision) for leaf, sharding, x in triples]
        self.trains = any(target is not None for target in self._targets)
        # Whether all gradients end in what was given as `accumulate`.
        self.adds_in_place = all(target is None or target.accumulated == target.sharding for target in self._targets)
        pairs = zip(self._leaves, self._targets, strict=True)
        self._local = [_local(leaf, target is not None) for leaf, target in pairs]
        values = ((i, x.value if isinstance(x, Local) else x) for i, x in enumerate(self._local))
        self.inputs = {i: x for i, x in values if isinstance(x, Tensor) and x.requires_grad}
        self._direct: dict[int, Tensor | None] = {}
        paths = tree.paths(params)
        leaves = {
            i: TapeLeaf(
                paths[i], x, self._targets[i], _compat.local_tensor(sums) if isinstance(sums, DTensor) else None
            )
            for i, (x, sums) in enumerate(zip(self._local, self._accumulated, strict=True))
            if isinstance(x, Local)
        }
        # Of the parameters; None when none of them is a DTensor.
        self.mesh = next((leaf.node.sharding.mesh for leaf in leaves.values()), None)
        refuse_missing_kernel(precision, next((x.node.sharding.device_type for x in leaves.values()), "cpu"))
        rows = [x.shape[0] if isinstance(x, Local) and x.shape else 0 for x in self._local]
        in_tree = (TreeLeaf(path, *(layers(path) or (0, n))) for path, n in zip(paths, rows, strict=True))
        wires = wires_of(precision, in_tree, options.key, self.mesh, options.microbatch)
        self.context = GatherContext(leaves, options, wires, pool, to.pool)  # that gathers and reduces

    def _like_leaves(self, name: str, given: Tree, default: Any) -> list[Any]:
        """The entries of a tree like the parameters, by number of the leaf; the default if there is no tree."""
        if given is None:
            return [default] * len(self._leaves)
        return tree.flatten_up_to(self._spec, given, ("params", name))

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(params, *args)` with the parameters as `Local` nodes."""
        params = tree.unflatten(self._spec, self._local)
        self._fn = fn
        try:
            with torch.enable_grad(), _on(self.mesh), self.context.active():
                return fn(params, *args)
        except Exception as error:
            known = explained(error, fn, params, args, self.context)
            if known is None:
                raise
            raise known from error

    def backward(
        self,
        outputs: Sequence[Tensor] | Sequence[GradientEdge],
        cotangents: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
        *,
        defers: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Differentiate `outputs`, or their places in the graph; return the gradients of `inputs`."""
        # `defers` leaves to `weights` the products that give gradients of weights alone, and all reductions. Gradients
        # of units go to the context's reducer, those of leaves that were used otherwise come from autograd.
        whose, part = self._once_for or (self._fn, None)
        refuse_bare_casts(outputs, whose, part)
        wanted = [*inputs, self.context.anchor, *self.inputs.values()]
        later = self.context.deferring() if defers else nullcontext()
        # A recomputed forward asks for the mesh, too.
        with later, _on(self.mesh), torch.autograd.set_multithreading_enabled(False):
            result = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        self._direct = dict(zip(self.inputs, result[len(inputs) + 1 :], strict=True))
        return result[: len(inputs)]

    def weights(self) -> None:
        """Computes the gradients of weights that `backward` has left, and starts their reductions."""
        with _on(self.mesh):
            self.context.run_deferred()

    def finish(self) -> list[Tensor | None]:
        """Waits for the reductions under way, and closes: the local gradient of each leaf."""
        for i, grad in self._direct.items():
            if grad is not None and isinstance(self._local[i], Local):
                self.context.reducer.add_reduced(i, grad)
        reduced = self.context.finish()
        return [
            reduced.get(i)
            if isinstance(self._local[i], Local)
            else _plain_grad(self._direct.get(i), x, self._targets[i], self._accumulated[i])
            for i, x in enumerate(self._leaves)
        ]

    def as_tree(self, grads: Sequence[Tensor | None]) -> Tree:
        """Local gradients as the tree of DTensors in the shardings that were asked for."""
        return tree.unflatten(
            self._spec,
            [
                _as_dtensor(grad, target, x, sharding) if grad is not None and isinstance(x, Local) else grad
                for grad, target, x, sharding in zip(grads, self._targets, self._local, self._shardings, strict=True)
            ],
        )


def _refuse_transforms(params: Tree) -> None:
    if _functorch.in_functorch():
        mend = "Use torch.func.grad_and_value of a function of local nodes, inside fs.shard_map."
        raise TransformError(message("cannot run under a torch.func transform.", mend=mend))
    leaves = tree.named_leaves(params)
    if nodes := [f"{path} is {typeof(x)}" for path, x in leaves.items() if isinstance(x, Local)]:
        mend = "Call it outside of fs.shard_map, or use torch.func.grad_and_value inside."
        raise TransformError(message("needs parameters at rest.", nodes, mend))


_as_parameter: Any = object()
"""In place of a sharding: a gradient is sharded as its parameter."""

_ON_NO_MESH: Any = None
"""In place of the sharding of a plain tensor."""


def _target(leaf: Any, sharding: Any, accumulated: Any, precision: Precision) -> GradTarget | None:
    """The target of a leaf's gradient; None for frozen leaves and for those that cannot be differentiated."""
    if sharding is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    if not isinstance(leaf, DTensor):
        if isinstance(sharding, NamedSharding):
            rule = f"got a plain tensor {typeof(leaf)} where grads= has a sharding, {sharding}."
            mend = "Put whole parameters into their layout first: fs.shard(params, layout)."
            raise TransformError(message(rule, mend=mend))
        return GradTarget(_ON_NO_MESH, leaf.dtype)
    if sharding is not _as_parameter and not isinstance(sharding, NamedSharding):
        mend = "Give a tree of shardings, such as grads=layout.main; None freezes a leaf."
        raise refuse("grads= as shardings", sharding, mend)
    if sharding is _as_parameter and hides_owners(leaf):
        text = f"cannot tell who owns a leaf with an explicit assignment, {typeof(leaf)}."
        raise TransformError(message(text, mend="Say where gradients go: grads=layout.main."))
    wanted = sharding_of(leaf) if sharding is _as_parameter else sharding
    before = to_local(accumulated).sharding if isinstance(accumulated, DTensor) else None
    before = None if before is None else replace(before, memory=wanted.memory)
    # On the slices of the mesh that own a leaf, it is cut as any other.
    dtype = precision.grad_dtype(leaf.dtype)
    wire = None if precision.reduce_dtype is None else Plain(precision.reduce_dtype)
    native = precision.sums_natively(leaf.device_mesh.device_type)
    there = wanted.slice_of_mesh().simplified()
    return GradTarget(there, dtype, wire, accumulated=before, native=native, assigned=wanted.assigned)


def _as_dtensor(grad: Tensor, target: GradTarget | None, x: Local, sharding: Any) -> DTensor:
    assert target is not None
    if isinstance(sharding, NamedSharding) and sharding.assigned:
        return sharding.simplified().at_rest(grad, x.shape)
    return target.sharding.to_dtensor(grad, x.shape)


def _local(leaf: Any, differentiated: bool) -> Any:
    """A leaf as the loss function sees it: fresh tensors, so that autograd never touches the state's own."""
    if isinstance(leaf, DTensor):
        node = to_local(leaf)
        return replace(node, value=node.value.requires_grad_(differentiated))
    if isinstance(leaf, Tensor):
        return leaf.detach().requires_grad_(differentiated)
    return leaf


def _on(mesh: Mesh | None) -> Any:
    return set_mesh(mesh) if mesh is not None else torch.enable_grad()


def _take_apart(result: Any, has_aux: bool) -> _Loss:
    if has_aux and (not is_pair(result) or isinstance(result, Loss)):
        mend = "Return (loss, aux), or leave has_aux out."
        raise TransformError(message(f"needs (loss, aux); got {results_text(result)}.", mend=mend))
    loss, aux = result if has_aux else (result, None)
    total, weight = loss if is_pair(loss) else (loss, None)
    is_number = weight is None or isinstance(weight, int | float) or (isinstance(weight, Tensor) and not weight.ndim)
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point() or not is_number:
        rule = f"needs a loss that is a 0-d floating point tensor, or (sum, count); got {results_text(loss)}."
        raise TransformError(message(rule, mend=_mend(total)))
    if weight is not None:
        if isinstance(weight, Tensor):
            weight = weight.to(total.device, torch.float64).detach()
        else:
            weight = torch.full((), weight, dtype=torch.float64, device=total.device)
    return _Loss(total, weight, aux)


def _mend(total: Any) -> str:
    """Advises on what to return in the place of something that is no loss."""
    if isinstance(total, Local):
        return "Compute it of gathered leaves, with fs.gather_unit, or of whole trees, with fs.tree.vdot."
    if isinstance(getattr(total, "loss", None), Tensor):
        return "Return its .loss, with the number of tokens that it is the sum of."
    return "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True."


def results_text(x: Any) -> str:
    """Describe what a loss function returned, for an error."""
    if isinstance(x, tuple):
        return f"({', '.join(map(results_text, cast(tuple[Any, ...], x)))})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _global_sums(loss: _Loss, notes: Sequence[Tensor], mesh: Mesh | None, agreement: StepAgreement | None) -> Tensor:
    """(sum, count) over all data ranks: float64[2], or one more that is of the agreement."""
    device = loss.total.device
    weight = torch.ones((), dtype=torch.float64, device=device) if loss.weight is None else loss.weight
    also = () if agreement is None else (agreement.as_term(device),)
    terms = torch.stack((loss.total.detach().double(), refused_if_full(weight, notes), *also))
    if mesh is None:
        return terms
    axes = tuple(sorted(data_axes(mesh), key=AXES.index))
    totals = start_sum(terms, axis_group(mesh, axes), torch.float64).wait()
    if agreement is not None:
        agreement.summed(totals[2], axes)
    return totals


def _plain_grad(grad: Tensor | None, leaf: Any, target: GradTarget | None, accumulated: Any) -> Tensor | None:
    if target is None:
        return None
    if accumulated is not None:
        return accumulated if grad is None else accumulated.add_(grad)
    # The gradient of a sum is one element with strides of 0, which nothing could be added to.
    return torch.zeros_like(leaf) if grad is None else grad.contiguous()


def is_divisor(weight: Tensor) -> Tensor:
    """Whether a sum of weights can divide a mean: above 0 and finite (bool, 0-d)."""
    return torch.isfinite(weight) & (weight > 0)


def _divisor(weight: Tensor) -> Tensor:
    """Return the count, or NaN for an invalid one: dividing by inf would give a finite mean, 0."""
    return torch.where(is_divisor(weight), weight, torch.nan)


def _no_backward(text: str, mend: str, *_: Any, **__: Any) -> None:
    raise TransformError(report(text, mend=mend))


_OF_A_LOSS = functools.partial(
    _no_backward,
    "fs.Loss has no gradients: .backward() finds no graph of it.",
    "Take both in one call: (loss, n), grads = fs.value_and_grad(loss_fn)(state.params, batch); or train with"
    " state, metrics = fs.make_train_step(loss_fn, opt)(state, batch).",
)
_OF_A_CALL = functools.partial(
    _no_backward,
    "fs.value_and_grad gives a loss and its gradients at once: .backward() on that loss has nothing left to do.",
    "Use them: (loss, n), grads = fs.value_and_grad(loss_fn)(params, batch), then opt.update(grads, opt_state,"
    " params). A train step has applied them; go on with the state that it returned.",
)


def without_gradients(loss: Tensor) -> Tensor:
    """Return a loss, whose `.backward()` says where gradients come from if it has no graph."""
    return loss if loss.requires_grad or _functorch.in_functorch() else _compat.refuse_backward(loss, _OF_A_LOSS)


def refuse_backward(loss: Tensor) -> Tensor:
    """Return the loss such that its `.backward()` raises an error that explains where the gradients are."""
    return _compat.refuse_backward(loss, _OF_A_CALL)
