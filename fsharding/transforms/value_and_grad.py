"""`value_and_grad`: differentiate a loss over sharded parameters by `torch.autograd.grad`.

Callers pass and receive DTensors; the loss function sees `Local` nodes. Inputs are never changed, and the mean is over
the global count for every mesh, strategy and number of microbatches.
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
from fsharding.formats.precision import FP32, Precision, check_precision, scaled_loss
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
    "GradFn", "Loss", "LossAndGrads", "Tape", "global_loss", "global_sums", "is_divisor", "loss_and_grads",
    "refuse_backward", "results_text", "value_and_grad", "without_gradients",
]  # fmt: skip


class GradFn(Protocol):
    """Type of the function that `value_and_grad` returns."""

    def __call__(self, params: Tree, *args: Any, accumulate: Tree = None, donate: bool = False) -> tuple[Any, Tree]:
        """Return the loss and the gradients, added to `accumulate` if given, in its memory if donated."""
        ...


class Loss(NamedTuple):
    """Sum of losses and number of summands: a loss function's result for the tokens of its rank.

    A plain tuple `(sum, count)` means the same. Sums add up over ranks, microbatches and batches; means don't.

    Attributes:
        sum: Sum of the losses, 0-d floating point.
        count: Number of summands (rows, tokens): a number, or a 0-d tensor.

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
        """The sum divided by the count, on the sum's device.

        Raises:
            NonFiniteError: The count isn't positive and finite. A count on an accelerator isn't read; the mean is NaN
                then.
        """
        count = self.count
        if not isinstance(count, Tensor) or (
            count.is_cpu and not _functorch.in_functorch() and not _compat.is_fake(count)
        ):
            count = float(count)
            if not 0 < count < float("inf"):
                what = "no token counts" if count == 0 else FULL if is_full(count) else f"its count is {count:g}"
                mend = "Return the number of summed tokens as count, and add up batches before you take their mean."
                raise NonFiniteError(report(f"fs.Loss has no mean: {what}.", mend=mend))
            return without_gradients(self.sum / self.count)
        return without_gradients(self.sum / _divisor(count))


class LossAndGrads(NamedTuple):
    """Results of one forward and backward."""

    loss: Tensor  # sum of losses over all data ranks, float64, 0-d
    count: Tensor  # number of summands, float64, 0-d
    counted: bool  # the loss function returned a count
    aux: Any  # this rank's aux
    grads: Tree  # gradients of the sum, in the requested shardings

    def averaged(self) -> LossAndGrads:
        """Divide the loss and the gradients by the count."""
        divisor = _divisor(self.count)
        return self._replace(loss=self.loss / divisor, grads=scaled(self.grads, 1.0 / divisor))


class _Loss(NamedTuple):
    """A loss function's result, taken apart."""

    total: Tensor
    count: Tensor  # float64, 0-d; 1 without one
    counted: bool  # the loss function returned a count
    aux: Any


class _CallAgreement(StepAgreement):
    """Comparison of the units of one call between data ranks, read if that doesn't wait for a device."""

    __slots__ = ()

    def summed(self, count: Tensor, axes: Sequence[str]) -> None:
        super().summed(count, axes)
        self.refuse_unlike()


def _agreement_of_call(mesh: Mesh | None) -> StepAgreement | None:
    """Make the comparison of units between data ranks for a call outside of a train step; None without data axes."""
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
    """Make a function that returns a loss and its gradients with respect to the first argument.

    `fn(params, *args)` returns a 0-d tensor, or `(sum, count)`: the sum of this rank's losses (of rows, tokens) and
    their number. The global mean is differentiated, `psum(sum) / psum(count)` over all data axes; a bare tensor is the
    mean of its rank, with count 1. The first call of `fn` warns of common mistakes, such as two draws with one key.

    Args:
        fn: Loss function. It receives the parameters as `Local` nodes; open them with `gather_unit` or `scan_units`.
        has_aux: Whether `fn` returns `(loss, aux)`; aux is returned unchanged.
        grads: Tree of `NamedSharding` for the gradients; None freezes a leaf. Default: the parameters' shardings. Axes
            marked unreduced stay unreduced.
        precision: Dtypes of compute, wire and gradients, and formats of weights. If parameters are stored
            rounded already, pass `layout.in_flight(precision)`, which doesn't round them twice.
        mean: Whether to divide loss and gradients by the global count; otherwise they are sums.
        key: Key int64[2] for stochastic rounding: a new one each step, equal on all ranks.
        prefetch_depth: Number of units to gather ahead of the one that computes, in forward and backward. At most
            `prefetch_depth + 1` are alive, unless the policy keeps gathered weights. Results don't depend on it.

    Returns:
        A function `(params, *args, accumulate=None, donate=False) -> ((loss, count), grads)`, or `-> (loss, grads)` if
        `fn` returns a bare tensor; with `has_aux` the first item is `(first, aux)`. Loss and count are 0-d float32,
        equal on all data ranks. Means and their gradients are NaN unless the counts sum to a positive number.
        Gradients are added to `accumulate`, the sums of earlier calls, in place with `donate=True`; pass `mean=False`
        with it, as a mean divides the total by this call's count only.

    Raises:
        ArgumentError: `fn` isn't a function of at least one argument, or the arguments of a call are wrong or swapped.
        ConfigError: `prefetch_depth` isn't an integer >= 0, or the device lacks a kernel that `precision` requires.
        TransformError: The loss isn't a 0-d floating point tensor, `fn` writes gathered weights in place or casts
            differentiated tensors to 8 bits, or `grads` has a sharding for a plain tensor.
        NotGatheredError: `fn` uses a leaf before it is gathered.
        LayoutError: A pattern of `precision` matches no leaf.
        MissingKeyError: `fn` reads an entry that none of its arguments has.
        BatchError: `fn` fails, and the batch has entries that aren't tensors.
        ShapeError: Shapes in `fn` don't match.
        RankError: A rank is lost, or doesn't answer within the mesh's timeout.
        TreeError: `grads` or `accumulate` doesn't match the parameters.

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
    if isinstance(grads, Layout | bool | str):
        mend = "Pass grads=layout.main, the optimizer's shardings, or grads=layout.grads."
        raise refuse("grads= as a tree of NamedSharding", grads, mend)

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


def loss_and_grads(
    fn: Callable[..., Any],
    params: Tree,
    args: Sequence[Any],
    to: GradsTo,
    options: RunOptions,
    *,
    has_aux: bool,
    # Makes the comparison of ranks whose bits are summed along with loss and count.
    agreement: Callable[[Mesh | None], StepAgreement | None] = _agreement_of_call,
    first: FirstCall | None = None,
) -> LossAndGrads:
    """Run a loss function forward and backward; `first` checks the loss in between."""
    tape = Tape(params, to, options)
    try:
        with naming_lost(options.caller, tape.mesh):
            with torch.enable_grad(), watching_capacity() as notes:
                loss = _take_apart(tape.forward(fn, *args), has_aux, options.scale)
            if (order := order_here()) is not None:
                order.end("forward")
            if first is not None:
                first.look(loss.total, tape.context, [*tape.inputs.values()])
            if loss.total.requires_grad and tape.trains:
                tape.backward([loss.total])
            totals = global_sums(loss.total, loss.count, notes, tape.mesh, agreement(tape.mesh))
            local = tape.finish()
    except BaseException:
        tape.context.close(failed=True)
        raise
    return LossAndGrads(totals[0], totals[1], loss.counted, loss.aux, tape.as_tree(local))


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
    # Without targets nothing requires a gradient, so autograd saves nothing.
    frozen = GradsTo(tree.map(lambda _: None, params))
    options = RunOptions(precision, key, caller="fs.evaluate")
    sums = loss_and_grads(fn, params, args, frozen, options, has_aux=has_aux)
    return Loss(sums.loss.float(), sums.count.float()), sums.aux


class Tape:
    """One forward and its backward over sharded parameters: one for each call, or each stage and microbatch."""

    # All lists and dicts are by number of the leaf. `_local[i]` is the leaf that the loss function sees: a `Local`, or
    # a detached plain tensor. `inputs` has the local tensors that aren't frozen. A gradient takes one of two ways: of a
    # leaf gathered in a unit it goes to the context's reducer, of one used otherwise (by `fs.tree.vdot`, or gathered
    # under a transform) autograd returns it, and it is in `_direct`. `finish` adds the two.

    def __init__(
        self,
        params: Tree,
        to: GradsTo,
        options: RunOptions,
        pool: Pool | None = None,  # buffers that several tapes share
        *,
        # For a path whose leaf is some rows of a stack: the first layer, and the number of layers of the full stack.
        layers: Callable[[str], tuple[int, int] | None] = lambda _: None,
        # A function and a part of it, checked for casts to 8 bits in its first backward; default: the loss function.
        once_for: tuple[Callable[..., Any], Hashable] | None = None,
    ) -> None:
        _refuse_transforms(params)
        precision = options.precision
        self._once_for = once_for
        given, self._spec = tree.flatten(params)
        self._shardings = self._like_leaves("grads", to.shardings, _as_parameter)
        self._accumulated = self._like_leaves("accumulate", to.accumulate, None)
        triples = zip(given, self._shardings, self._accumulated, strict=True)
        self._targets = [_target(leaf, sharding, x, precision) for leaf, sharding, x in triples]
        self.trains = any(target is not None for target in self._targets)
        # All gradients end in the memory of `accumulate`.
        self.adds_in_place = all(target is None or target.accumulated == target.sharding for target in self._targets)
        pairs = zip(given, self._targets, strict=True)
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
        # None if no parameter is a DTensor.
        self.mesh = next((leaf.node.sharding.mesh for leaf in leaves.values()), None)
        refuse_missing_kernel(precision, next((x.node.sharding.device_type for x in leaves.values()), "cpu"))
        rows = [x.shape[0] if isinstance(x, Local) and x.shape else 0 for x in self._local]
        in_tree = (TreeLeaf(path, *(layers(path) or (0, n))) for path, n in zip(paths, rows, strict=True))
        wires = wires_of(precision, in_tree, options.key, self.mesh, options.microbatch)
        self.context = GatherContext(leaves, options, wires, pool, to.pool)

    def _like_leaves(self, name: str, given: Tree, default: Any) -> list[Any]:
        """Return the entries of a tree like the parameters, by number of the leaf; without a tree the default."""
        if given is None:
            return [default] * self._spec.num_leaves
        return tree.flatten_up_to(self._spec, given, ("params", name))

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call `fn(params, *args)` with the parameters as `Local` nodes."""
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
        # With `defers`, products that give weight gradients only, and all reductions, are left to `weights`.
        whose, part = self._once_for or (self._fn, None)
        refuse_bare_casts(outputs, whose, part)
        # Autograd runs only nodes that lead to a wanted input. The anchor is an input of every unit's node.
        wanted = [*inputs, self.context.anchor, *self.inputs.values()]
        later = self.context.deferring() if defers else nullcontext()
        # `_on` for recomputed forwards, whose collectives need the mesh. One thread, so that units are left, and their
        # reductions started, in the same order on all ranks.
        with later, _on(self.mesh), torch.autograd.set_multithreading_enabled(False):
            result = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        self._direct = dict(zip(self.inputs, result[len(inputs) + 1 :], strict=True))
        return result[: len(inputs)]

    def weights(self) -> None:
        """Compute the weight gradients that `backward` deferred, and start their reductions."""
        with _on(self.mesh):
            self.context.run_deferred()

    def finish(self) -> list[Tensor | None]:
        """Wait for all reductions, close the context, and return the local gradient of each leaf."""
        for i, grad in self._direct.items():
            if grad is not None and isinstance(self._local[i], Local):
                self.context.reducer.add_reduced(i, grad)
        reduced = self.context.finish()
        return [
            reduced.get(i)
            if isinstance(x, Local)
            else _plain_grad(self._direct.get(i), x, self._targets[i], self._accumulated[i])
            for i, x in enumerate(self._local)
        ]

    def as_tree(self, grads: Sequence[Tensor | None]) -> Tree:
        """Return local gradients as a tree of DTensors in the requested shardings."""
        return tree.unflatten(
            self._spec,
            [
                _as_dtensor(grad, target, x, sharding) if grad is not None and isinstance(x, Local) else grad
                for grad, target, x, sharding in zip(grads, self._targets, self._local, self._shardings, strict=True)
            ],
        )


def _refuse_transforms(params: Tree) -> None:
    if _functorch.in_functorch():
        mend = "Use torch.func.grad_and_value on a function of local nodes, inside fs.shard_map."
        raise TransformError(message("cannot run under a torch.func transform.", mend=mend))
    leaves = tree.named_leaves(params)
    if nodes := [f"{path} is {typeof(x)}" for path, x in leaves.items() if isinstance(x, Local)]:
        mend = "Call it outside of fs.shard_map; inside, use torch.func.grad_and_value."
        raise TransformError(message("needs parameters at rest (DTensors), got local nodes.", nodes, mend))


_as_parameter: Any = object()  # instead of a sharding: the gradient is sharded like its parameter
_ON_NO_MESH: Any = None  # the sharding of a plain tensor


def _target(leaf: Any, sharding: Any, accumulated: Any, precision: Precision) -> GradTarget | None:
    """Return the target of a leaf's gradient; None if the leaf is frozen or can't be differentiated."""
    if sharding is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return None
    if not isinstance(leaf, DTensor):
        if isinstance(sharding, NamedSharding):
            rule = f"got a plain tensor {typeof(leaf)}, but grads= has a sharding for it, {sharding}."
            mend = "Shard full parameters first: fs.shard(params, layout)."
            raise TransformError(message(rule, mend=mend))
        return GradTarget(_ON_NO_MESH, leaf.dtype)
    if sharding is not _as_parameter and not isinstance(sharding, NamedSharding):
        mend = "Pass a tree of shardings, such as grads=layout.main; None freezes a leaf."
        raise refuse("grads= as shardings", sharding, mend)
    if sharding is _as_parameter and hides_owners(leaf):
        text = f"cannot infer the sharding of the gradient of a leaf with an explicit assignment, {typeof(leaf)}."
        raise TransformError(message(text, mend="Pass the shardings of gradients: grads=layout.main."))
    wanted = sharding_of(leaf) if sharding is _as_parameter else sharding
    before = to_local(accumulated).sharding if isinstance(accumulated, DTensor) else None
    before = None if before is None else replace(before, memory=wanted.memory)
    dtype = precision.grad_dtype(leaf.dtype)
    native = precision.sums_natively(leaf.device_mesh.device_type)
    # On the slice of the mesh that owns a leaf, its gradient is reduced and sharded like any other.
    there = wanted.slice_of_mesh().simplified()
    return GradTarget(there, dtype, precision.reduce_dtype, accumulated=before, native=native, assigned=wanted.assigned)


def _as_dtensor(grad: Tensor, target: GradTarget | None, x: Local, sharding: Any) -> DTensor:
    assert target is not None
    if isinstance(sharding, NamedSharding) and sharding.assigned:
        return sharding.simplified().at_rest(grad, x.shape)
    return target.sharding.to_dtensor(grad, x.shape)


def _local(leaf: Any, differentiated: bool) -> Any:
    """Return a leaf for the loss function: a fresh tensor, so that autograd never touches the state's."""
    if isinstance(leaf, DTensor):
        node = to_local(leaf)
        return replace(node, value=node.value.requires_grad_(differentiated))
    if isinstance(leaf, Tensor):
        return leaf.detach().requires_grad_(differentiated)
    return leaf


def _on(mesh: Mesh | None) -> Any:
    return set_mesh(mesh) if mesh is not None else torch.enable_grad()


def _take_apart(result: Any, has_aux: bool, scale: float | Tensor | None) -> _Loss:
    if has_aux and (not is_pair(result) or isinstance(result, Loss)):
        mend = "Return (loss, aux), or leave has_aux out."
        raise TransformError(message(f"needs (loss, aux); got {results_text(result)}.", mend=mend))
    loss, aux = result if has_aux else (result, None)
    total, given = loss if is_pair(loss) else (loss, None)
    count = 1 if given is None else given
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and not count.ndim)
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point() or not is_number:
        rule = f"needs a loss that is a 0-d floating point tensor, or (sum, count); got {results_text(loss)}."
        raise TransformError(message(rule, mend=_mend(total)))
    if isinstance(count, Tensor):
        count = count.to(total.device, torch.float64).detach()
    else:
        count = torch.full((), count, dtype=torch.float64, device=total.device)
    return _Loss(scaled_loss(total, scale), count, given is not None, aux)


def _mend(total: Any) -> str:
    """Return advice on what to return instead of something that isn't a loss."""
    if isinstance(total, Local):
        return "Compute the loss from gathered leaves, fs.gather_unit(unit), or from full trees, fs.tree.vdot(x, x)."
    if isinstance(getattr(total, "loss", None), Tensor):
        return "Return its .loss: the mean alone, or (sum, number of tokens)."
    return "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True."


def results_text(x: Any) -> str:
    """Describe what a loss function returned, for an error."""
    if isinstance(x, tuple):
        return f"({', '.join(map(results_text, cast(tuple[Any, ...], x)))})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def global_sums(
    total: Tensor,
    count: Tensor,  # float64, 0-d
    notes: Sequence[Tensor],  # of `watching_capacity`
    mesh: Mesh | None,
    agreement: StepAgreement | None,
    more_axes: Sequence[str] = (),
) -> Tensor:
    """Return (sum, count) over data and more axes, float64[2]; with an agreement, its summed bits are third."""
    also = () if agreement is None else (agreement.as_term(total.device),)
    terms = torch.stack((total.detach().double(), refused_if_full(count, notes), *also))
    if mesh is None:
        return terms
    axes = tuple(sorted((*data_axes(mesh), *more_axes), key=AXES.index))
    totals = start_sum(terms, axis_group(mesh, axes), torch.float64).wait()
    if agreement is not None:
        agreement.summed(totals[2], axes)
    return totals


def _plain_grad(grad: Tensor | None, leaf: Any, target: GradTarget | None, accumulated: Any) -> Tensor | None:
    if target is None:
        return None
    if accumulated is not None:
        return accumulated if grad is None else accumulated.add_(grad)
    # The gradient of a sum has strides of 0: all its elements share one address, and in-place adds would be wrong.
    return torch.zeros_like(leaf) if grad is None else grad.contiguous()


def is_divisor(count: Tensor) -> Tensor:
    """Return whether a count can divide a mean: positive and finite (bool, 0-d)."""
    return torch.isfinite(count) & (count > 0)


def _divisor(count: Tensor) -> Tensor:
    """Return the count, or NaN for an invalid one: dividing by inf would give a finite mean, 0."""
    return torch.where(is_divisor(count), count, torch.nan)


def _no_backward(text: str, mend: str, *_: Any, **__: Any) -> None:
    raise TransformError(report(text, mend=mend))


_OF_A_LOSS = functools.partial(
    _no_backward,
    "fs.Loss has no gradients: .backward() finds no graph.",
    "Compute both in one call: (loss, n), grads = fs.value_and_grad(loss_fn)(state.params, batch); or train with"
    " state, metrics = fs.make_train_step(loss_fn, opt)(state, batch).",
)
_OF_A_CALL = functools.partial(
    _no_backward,
    "fs.value_and_grad returns a loss and its gradients at once: .backward() on that loss has nothing left to do.",
    "Use them: (loss, n), grads = fs.value_and_grad(loss_fn)(params, batch), then opt.update(grads, opt_state,"
    " params). A train step has applied them already; continue with the state that it returned.",
)


def without_gradients(loss: Tensor) -> Tensor:
    """Return the loss; if it has no graph, its `.backward()` raises an error that explains how to get gradients."""
    return loss if loss.requires_grad or _functorch.in_functorch() else _compat.refuse_backward(loss, _OF_A_LOSS)


def refuse_backward(loss: Tensor) -> Tensor:
    """Return the loss; its `.backward()` raises an error that explains where the gradients are."""
    return _compat.refuse_backward(loss, _OF_A_CALL)
