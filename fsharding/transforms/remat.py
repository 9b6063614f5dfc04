"""Rematerialization: `remat` keeps a function's inputs for backward and recomputes the rest.

Guarantee: remat changes no derivative of any order, also with respect to values that the function closes over.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsharding.base import _compat, _functorch
from fsharding.base.public import check_function, public
from fsharding.mesh.device_mesh import Mesh, mesh_here, set_mesh
from fsharding.sharding.named_sharding import opened
from fsharding.transforms import policies
from fsharding.transforms.argument_writes import call_unwritten
from fsharding.transforms.gather_context import without_context
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["remat"]

_DOTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
)


_BESIDE_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)
"""Products are saved beside the saved-tensor hooks around them, as in every torch; newer ones ask for a decision."""


def _keep_dots(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DOTS else CheckpointPolicy.PREFER_RECOMPUTE


@public
@_compat.outside_of_graphs
def remat(fn: Callable[..., Any], *, policy: Policy = policies.nothing_saveable) -> Callable[..., Any]:
    """Makes a function that keeps less for backward and computes it again there.

    Under autograd this is torch's own non-reentrant checkpoint; under torch.func, which refuses saved-tensor hooks, a
    Function that saves the inputs and differentiates again in backward, to any order.

    Args:
        fn: a pure function of trees of tensors. It may close over tensors: under torch.func the first call then runs
            an extra time, to find them. One that is used only in a user's `autograd.Function` can't be found: pass it
            as an argument.
        policy: `nothing_saveable` or `dots_saveable` (under torch.func, which saves inputs only); with other policies
            `remat` does nothing. Under `dots_saveable` torch raises if the result of a matrix product is changed in
            place, which `x @ w` does internally for a 1-d `x`.

    Raises:
        ConfigError: `policy` isn't an `fs.policies.Policy`.
        TransformError: from the function: `fn` writes into its arguments, such as a list or a tensor, or, under
            torch.func, into what it closes over; all are listed.

    Example:
        >>> def block(x):
        ...     return torch.tanh(x) * 2
        >>> x = torch.ones(2, requires_grad=True)
        >>> fs.remat(block)(x).sum().backward()  # tanh is computed again
        >>> x.grad
        tensor([0.8399, 0.8399])
    """
    check_function("a function of trees", fn, 0)
    check_policy(policy)
    if policy.activations == "all":
        return fn
    captured: list[weakref.ref[Tensor]] = []

    @_compat.outside_of_graphs
    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        leaves, closed = opened(args)
        functional = _functorch.in_functorch()

        def flat(*values: Any) -> Any:
            return call_unwritten(fn, closed(values), closure=functional)

        if _functorch.linearizing():  # Its graph keeps what it needs.
            return fn(*args)
        if functional:
            return _functional(flat, leaves, captured)
        if policy.activations == "dots":
            context = functools.partial(create_selective_checkpoint_contexts, _keep_dots)
            return checkpoint(flat, *leaves, use_reentrant=False, context_fn=context, **_BESIDE_HOOKS)
        return checkpoint(flat, *leaves, use_reentrant=False)

    return run


# --------------------------------------------------------------------------------------------------- under torch.func
def _functional(fn: Callable[..., Any], leaves: list[Any], captured: list[weakref.ref[Tensor]]) -> Any:
    """`fn(*leaves)`; notes in `captured` what it closes over, and gives it that as arguments."""
    captured[:] = [ref for ref in captured if ref() is not None]
    while True:
        lifted = [x for ref in captured if (x := ref()) is not None]
        flat = _Flat(fn, leaves, lifted, mesh_here())
        try:
            out = _again(flat, [*(leaves[i] for i in flat.places), *lifted])
        except RuntimeError:
            # Outside of its vmap torch refuses a tensor of it.
            if not flat.captured:
                raise
        else:
            if not flat.captured:
                return flat.result(out)
        captured.extend(weakref.ref(x) for x in flat.captured.values())


class _Call(Protocol):
    """A function of tensors that returns a tuple of tensors, and is run again whenever a derivative needs it."""

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Runs it."""
        ...


class _Flat:
    """A function of leaves as one of the tensors among them, and of what else it uses: `lifted`."""

    def __init__(
        self, fn: Callable[..., Any], leaves: Sequence[Any], lifted: Sequence[Tensor], mesh: Mesh | None
    ) -> None:
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.captured: dict[int, Tensor] = {}
        self._fn = fn
        self._lifted = lifted
        self._mesh = mesh
        self._others = [None if isinstance(x, Tensor) else x for x in leaves]
        self._looking = True
        self._closed: Callable[[Sequence[Any]], Any] = tuple
        self._out: list[Any] = []

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Runs the function where its collectives find their mesh, and no context."""
        filled = list(self._others)
        count = len(self.places)
        for i, value in zip(self.places, values[:count], strict=True):
            filled[i] = value
        given = {id(x): value for x, value in zip(self._lifted, values[count:], strict=True)}
        with ExitStack() as stack:
            stack.enter_context(without_context())
            if self._mesh is not None:
                stack.enter_context(set_mesh(self._mesh))
            if given or self._looking:
                stack.enter_context(_Lifting(given, self.captured if self._looking else None))
            out = self._fn(*filled)
        flat, self._closed = opened(out)
        self._out = [None if isinstance(x, Tensor) else x for x in flat]
        self._looking = False
        return tuple(x for x in flat if isinstance(x, Tensor))

    def result(self, values: Sequence[Tensor]) -> Any:
        """The tree that the function returned, with other tensors in it."""
        rest = iter(values)
        return self._closed([next(rest) if x is None else x for x in self._out])


class _Lifting(TorchFunctionMode):
    """Puts values in the place of tensors that a function closes over, and notes those for which there is none."""

    def __init__(self, given: dict[int, Tensor], recomputed: dict[int, Tensor] | None) -> None:
        super().__init__()
        self._given = given
        self._found = recomputed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._look, args), **{name: self._look(x) for name, x in (kwargs or {}).items()})

    def _look(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            known = self._given.get(id(x))
            if known is not None:
                return known
            if self._found is not None and _functorch.is_foreign(x):
                self._found[id(x)] = x
        elif type(x) is list or type(x) is tuple:
            items = cast("list[Any] | tuple[Any, ...]", x)
            return type(items)(map(self._look, items))
        return x


def _again(call: _Call, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # A view, where a function of torch sees it: some remat around this one may have closed over the tensor.
    return cast("tuple[Tensor, ...]", _functorch.apply(_Again, call, *values))


class _Again(Function):
    """Saves inputs only. Each derivative is another function of them that is run in the same way."""

    @staticmethod
    def forward(call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        # torch wants no input among the outputs.
        given = {id(x) for x in inputs}
        return tuple(x.view_as(x) if id(x) in given else x for x in call(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.floats = tuple(x.is_floating_point() for x in output)
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        chosen = tuple(i for i, x in enumerate(inputs) if x.is_floating_point() and ctx.needs_input_grad[1 + i])
        used = tuple(i for i, g in enumerate(grads) if g is not None and ctx.floats[i])
        given = cast("list[Tensor]", [grads[i] for i in used])
        pull = _pull(ctx.call, len(inputs), chosen, used)
        if not used:
            return (None,) * (1 + len(inputs))
        result = dict(zip(chosen, _again(pull, _functorch.without_own_graph([*inputs, *given])), strict=True))
        return None, *(result.get(i) for i in range(len(inputs)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = ctx.saved_tensors
        chosen = tuple(i for i, t in enumerate(tangents[1:]) if t is not None and inputs[i].is_floating_point())
        given = [tangents[1 + i] for i in chosen]
        results = tuple(i for i, is_float in enumerate(ctx.floats) if is_float)
        result = dict(
            zip(results, _again(_push(ctx.call, len(inputs), chosen, results), [*inputs, *given]), strict=True)
        )
        return tuple(result.get(i) for i in range(len(ctx.floats)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *inputs: Tensor) -> Any:
        out = _again(torch.vmap(call, in_dims[1:], randomness=info.randomness), inputs)
        return out, (0,) * len(out)


def _of_chosen(call: _Call, inputs: Sequence[Tensor], chosen: Sequence[int], results: Sequence[int]) -> _Call:
    """Some of the results as a function of some of the inputs; the others are constants."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        filled = list(inputs)
        for i, value in zip(chosen, values, strict=True):
            filled[i] = value
        out = call(*filled)
        return tuple(out[i] for i in results)

    return run


def _pull(call: _Call, count: int, chosen: tuple[int, ...], results: tuple[int, ...]) -> _Call:
    """From inputs and gradients of some results to gradients of the chosen inputs."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        inputs = values[:count]
        back = torch.func.vjp(_of_chosen(call, inputs, chosen, results), *(inputs[i] for i in chosen))[1]
        # Gradients of gradients only where this is differentiated: by reverse mode, or by forward mode, which some
        # formulas of torch know in their differentiable form alone.
        keep = torch.is_grad_enabled() or _functorch.in_jvp()
        return back(values[count:], retain_graph=keep, create_graph=keep)

    return run


def _push(call: _Call, count: int, chosen: tuple[int, ...], results: tuple[int, ...]) -> _Call:
    """From inputs and tangents of the chosen ones to tangents of some results."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        inputs = values[:count]
        return torch.func.jvp(
            _of_chosen(call, inputs, chosen, results), tuple(inputs[i] for i in chosen), values[count:]
        )[1]

    return run
