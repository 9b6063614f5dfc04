"""Rematerialization: `remat` keeps a function's inputs for backward and recomputes the rest.

It changes no derivative of any order, also with respect to values that the function closes over.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsharding.base import _compat, _functorch, tree
from fsharding.base.calls import public_name
from fsharding.base.errors import TransformError, report
from fsharding.base.public import check_function, kind_of, public
from fsharding.mesh.device_mesh import Mesh, mesh_here, set_mesh
from fsharding.sharding.named_sharding import Local, opened
from fsharding.transforms import policies
from fsharding.transforms.gather_context import without_context
from fsharding.transforms.loss_checks import content_of, names_of
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["remat"]

_DOTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    )
)  # fmt: skip

_BESIDE_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)
"""Saved products bypass the saved-tensor hooks around them, the only behavior of older torch; newer ones have it as an
option."""

_MOST = 10_000  # objects inspected per call: an argument may lead to a data set
_NOT_WALKED = (type, Mesh, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _keep_dots(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _DOTS else CheckpointPolicy.PREFER_RECOMPUTE


@public
@_compat.outside_of_graphs
def remat(fn: Callable[..., Any], *, policy: Policy = policies.nothing_saveable) -> Callable[..., Any]:
    """Make a function that keeps less for backward and recomputes the rest there.

    Under autograd this is torch's non-reentrant checkpoint. Under torch.func, which refuses saved-tensor hooks, it is a
    Function that saves the inputs and can be differentiated to any order.

    Args:
        fn: Pure function of trees of tensors. It may close over tensors: under torch.func the first call runs twice
            then, to find them. Pass a tensor that only a custom `autograd.Function` uses as an argument.
        policy: `nothing_saveable`, or `dots_saveable` (under torch.func like `nothing_saveable`); with a policy that
            keeps all activations `remat` returns `fn`. Under `dots_saveable` torch raises if the result of a matrix
            product is changed in place, which `x @ w` does internally for a 1-d `x`.

    Returns:
        A function of the same positional arguments, with the same results and derivatives.

    Raises:
        ConfigError: `policy` isn't an `fs.policies.Policy`.
        TransformError: When called: `fn` writes into its arguments, such as a list or a tensor, or (under torch.func)
            into values that it closes over; all are listed.

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
            return _call_unwritten(fn, closed(values), closure=functional)

        if _functorch.linearizing():  # Its graph keeps what it needs.
            return fn(*args)
        if functional:
            return _functional(flat, leaves, captured)
        if policy.activations == "dots":
            context = functools.partial(create_selective_checkpoint_contexts, _keep_dots)
            return checkpoint(flat, *leaves, use_reentrant=False, context_fn=context, **_BESIDE_HOOKS)
        return checkpoint(flat, *leaves, use_reentrant=False)

    return run


# ------------------------------------------------------------------------------------------- writes into arguments
def _call_unwritten(fn: Callable[..., Any], args: tuple[Any, ...], *, closure: bool = False) -> Any:
    """Call `fn(*args)`; refuse writes into `args` and, with `closure`, of tensors into containers it closes over."""
    watched = [(name, x, True) for name, x in zip(names_of(fn, len(args)), args, strict=True)]
    cells = getattr(fn, "__closure__", None) or ()
    if closure and cells:
        held = zip(fn.__code__.co_freevars, map(content_of, cells), strict=True)
        watched += [(name, x, False) for name, x in held if isinstance(x, list | dict | set | deque)]
    before = _held(watched)
    out = fn(*args)
    after = _held(watched)
    rows = [f"{_shown(path)} is new: {kind_of(now)}" for path, (now, _) in after.items() if path not in before]
    for path, (was, version) in before.items():
        if path not in after:
            rows.append(f"{_shown(path)} is gone: {kind_of(was)}")
        elif (now := after[path][0]) is not was:
            rows.append(f"{_shown(path)} was replaced: {kind_of(was)} before, {kind_of(now)} after")
        elif after[path][1] != version:
            rows.append(f"{_shown(path)} was changed in place: {kind_of(was)}")
    if rows:
        name = getattr(fn, "__name__", type(fn).__name__)
        caller = "fs.scan_units" if public_name() == "fs.scan_units" else "fs.remat"
        rule = f"{caller} recomputes {name} in backward, so what {name} writes into its arguments would be lost."
        mend = (
            "Return the value instead: return x, aux, or a new list, [*kept, aux]; fs.scan_units(..., has_aux=True)"
            " stacks the aux of all blocks. Write x = x * 2 instead of x.mul_(2). Under"
            " policy=fs.policies.save_except_gathered nothing is recomputed, and a block may write. Call Hugging Face"
            " models with use_cache=False: they write keys and values into a cache."
        )
        raise TransformError(report(rule, rows, mend))
    return out


def _shown(path: str) -> str:
    """Remove the ids of items of sets from a path."""
    return re.sub(r"\{[0-9a-f]+\}", "{...}", path)


def _held(watched: Iterable[tuple[str, Any, bool]]) -> dict[str, tuple[Any, int]]:
    """Return the content of named values by path: tensors anywhere, with their versions; other entries if marked."""
    found: dict[str, tuple[Any, int]] = {}
    seen = set[int]()
    todo = deque(watched)
    for _ in range(_MOST):
        if not todo:
            break
        path, x, is_entry = todo.popleft()
        if isinstance(x, Local):
            x = x.value
        if isinstance(x, Tensor):
            found[path] = x, 0 if x.is_inference() else _compat.version_of(x)
            continue
        children = None if id(x) in seen else _children(x)
        seen.add(id(x))
        if children is None:
            if is_entry:
                found[path] = x, 0
            continue
        todo.extend((path + step, child, is_entry and not step.startswith(".")) for step, child in children)
    return found


def _children(x: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the items or attributes of a value; None if it has none."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", value) for key, value in islice(cast("dict[Any, Any]", x).items(), _MOST)]
    if isinstance(x, list | tuple | deque):
        return [(f"[{i}]", item) for i, item in enumerate(islice(cast("Iterable[Any]", x), _MOST))]
    if isinstance(x, set | frozenset):
        # By id: a set has no order.
        return [(f"{{{id(item):x}}}", item) for item in islice(cast("Iterable[Any]", x), _MOST)]
    if isinstance(x, _NOT_WALKED):
        return None
    if type(x).__module__.startswith("fsharding."):
        # Only its tensors: a quantized weight also has the context of its gathers, which other threads change.
        return [(f".{name}", child) for name, child in (tree.children(x) or {}).items()] or None
    own = {name for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())} | {*getattr(x, "__dict__", ())}
    return [(f".{name}", getattr(x, name)) for name in sorted(own) if hasattr(x, name)] or None


# --------------------------------------------------------------------------------------------------- under torch.func
def _functional(fn: Callable[..., Any], leaves: list[Any], captured: list[weakref.ref[Tensor]]) -> Any:
    """Call `fn(*leaves)` with the tensors that it closes over as arguments; collect these in `captured`."""
    # A tensor closed over is invisible to `_Again`, whose backward would give it no gradient. So the first run looks
    # for such tensors, and the function runs again with them lifted to inputs, until it uses no others.
    captured[:] = [ref for ref in captured if ref() is not None]
    while True:
        lifted = [x for ref in captured if (x := ref()) is not None]
        flat = _Flat(fn, leaves, lifted, mesh_here())
        try:
            out = _again(flat, [*(leaves[i] for i in flat.places), *lifted])
        except RuntimeError:
            # torch refuses a tensor of a vmap outside of it, which a captured one may be; lifted, it is mapped.
            if not flat.captured:
                raise
        else:
            if not flat.captured:
                return flat.result(out)
        captured.extend(weakref.ref(x) for x in flat.captured.values())


_Call: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""A function of tensors to a tuple of tensors, run again whenever a derivative needs it."""


class _Flat:
    """A function of leaves as a function of the tensors among them and of `lifted`, the tensors it closes over."""

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
        """Run the function, with its mesh and without a context: backward may run it after the context has closed."""
        filled = list(self._others)
        count = len(self.places)
        for i, value in zip(self.places, values[:count], strict=True):
            filled[i] = value
        given = {id(x): value for x, value in zip(self._lifted, values[count:], strict=True)}
        on_mesh = nullcontext() if self._mesh is None else set_mesh(self._mesh)
        lifting = _Lifting(given, self.captured if self._looking else None) if given or self._looking else nullcontext()
        with without_context(), on_mesh, lifting:
            out = self._fn(*filled)
        flat, self._closed = opened(out)
        self._out = [None if isinstance(x, Tensor) else x for x in flat]
        self._looking = False
        return tuple(x for x in flat if isinstance(x, Tensor))

    def result(self, values: Sequence[Tensor]) -> Any:
        """Return the tree that the function returned, with these tensors in it."""
        rest = iter(values)
        return self._closed([next(rest) if x is None else x for x in self._out])


class _Lifting(TorchFunctionMode):
    """Replace tensors that a function closes over by given values, and collect those without one."""

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
    # `_functorch.apply` passes views, by a torch function: an enclosing remat may have to lift the tensor.
    return cast("tuple[Tensor, ...]", _functorch.apply(_Again, call, *values))


class _Again(Function):
    """Save inputs only. Each derivative is a function of them that itself runs by `_Again`, to any order."""

    @staticmethod
    def forward(call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        # A Function must not return an input as it is.
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
        if not used:
            return (None,) * (1 + len(inputs))
        pull = _derivative(ctx.call, len(inputs), chosen, used, forward=False)
        result = dict(zip(chosen, _again(pull, _functorch.without_own_graph([*inputs, *given])), strict=True))
        return None, *(result.get(i) for i in range(len(inputs)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = ctx.saved_tensors
        chosen = tuple(i for i, t in enumerate(tangents[1:]) if t is not None and inputs[i].is_floating_point())
        given = [tangents[1 + i] for i in chosen]
        results = tuple(i for i, is_float in enumerate(ctx.floats) if is_float)
        push = _derivative(ctx.call, len(inputs), chosen, results, forward=True)
        result = dict(zip(results, _again(push, [*inputs, *given]), strict=True))
        return tuple(result.get(i) for i in range(len(ctx.floats)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *inputs: Tensor) -> Any:
        out = _again(torch.vmap(call, in_dims[1:], randomness=info.randomness), inputs)
        return out, (0,) * len(out)


def _derivative(call: _Call, count: int, chosen: tuple[int, ...], results: tuple[int, ...], *, forward: bool) -> _Call:
    """Make a function of inputs, and tangents of the chosen ones or gradients of some results, to the other."""

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        inputs = values[:count]

        def part(*given: Tensor) -> tuple[Tensor, ...]:
            filled = list(inputs)  # inputs that aren't chosen are constants
            for i, value in zip(chosen, given, strict=True):
                filled[i] = value
            out = call(*filled)
            return tuple(out[i] for i in results)

        at = tuple(inputs[i] for i in chosen)
        if forward:
            return torch.func.jvp(part, at, values[count:])[1]
        back = torch.func.vjp(part, *at)[1]
        # Keep a graph only if this is differentiated: by reverse mode, or by forward mode, because some torch formulas
        # have a forward derivative only in their differentiable form.
        keep = torch.is_grad_enabled() or _functorch.in_jvp()
        return back(values[count:], retain_graph=keep, create_graph=keep)

    return run
