"""`from_torch`: an elementwise optimizer of torch as pure functions; each update builds it anew around local shards."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import kind_of, public
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext
from fsharding.optim.coded_moment import refuse_format
from fsharding.optim.validation import FROM_0, check_dtype, check_settings
from fsharding.sharding.named_sharding import local_of

__all__ = ["TorchState", "from_torch"]

_INSTEAD = {
    "Adafactor": "Use fs.optim.adafactor, which sums the statistics of whole matrices over ranks.",
    "Muon": "Use fs.optim.muon, which brings whole matrices together.",
    "SparseAdam": "Use torch.optim.Adam: gradients of sharded parameters are dense.",
    "LBFGS": "Use an optimizer that updates from one gradient, or write the line search around fs.value_and_grad.",
}
_Optimizer: TypeAlias = type[torch.optim.Optimizer]
_Kinds: TypeAlias = tuple[dict[str, torch.dtype], dict[str, Any]]  # of slots and scalars; some have Python's types


class TorchState(NamedTuple):
    """Number of updates (int64, 0-d, on the CPU), and the state of the optimizer.

    Attributes:
        count: of updates; while it is 0 the rest has no meaning yet, and torch makes its own first values.
        slots: by torch's name, trees in shape and sharding of the parameters, such as `exp_avg`.
        scalars: by torch's name, trees of 0-d tensors on the CPU, such as `step`.

    Example:
        >>> state = fs.optim.from_torch(torch.optim.Adam, lr=1e-3).init({"w": torch.ones(2)})
        >>> sorted(state.slots), sorted(state.scalars)
        (['exp_avg', 'exp_avg_sq'], ['step'])
    """

    count: Tensor
    slots: dict[str, Tree]
    scalars: dict[str, Tree]


@public
def from_torch(optimizer: _Optimizer, *, moments: torch.dtype | None = None, **settings: Any) -> ContextTransformation:
    """A transformation from a torch optimizer that treats each element by itself, such as Adam, RMSprop, NAdam, Rprop.

    Groups of parameters with other settings are `fs.optim.multi_transform` over several of these.

    Args:
        optimizer: the class, such as `torch.optim.NAdam`.
        moments: the dtype in which slots are kept, float32 at least, since torch's kernels round to nearest; by default
            the layout's `Precision.moments`, or else torch's.
        **settings: its arguments but for the parameters. `lr` may be a function of the number of updates so far. With
            `fused=True` the last bits may depend on where a leaf is cut.

    Raises:
        TreeError: from the update: no parameters, or something else than gradients and this state.
        ConfigError: no class of optimizers, or one that couples elements, keeps state apart from parameters, wants a
            closure or sparse gradients, or is no pure function; `moments`, or the layout's, that are below float32.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.from_torch(torch.optim.NAdam, lr=0.1)
        >>> params, state = fs.optim.apply_gradients(opt, {"w": torch.ones(2)}, opt.init(params), params)
        >>> bool((params["w"] < 1).all()), sorted(state.slots)
        (True, ['exp_avg', 'exp_avg_sq'])
    """
    _refuse_others(optimizer, settings)
    own = _refuse_narrow(check_dtype("moments", moments))
    if callable(settings.get("lr")):
        check_settings((FROM_0, {"lr": settings["lr"]}))
    kinds_of = functools.cache(functools.partial(_state_kinds, optimizer, _settings_at(settings, 0)))
    names, fused = kinds_of(torch.float32), settings.get("fused")

    def first(params: Tree, context: InitContext) -> TorchState:
        kept = own or _refuse_narrow(refuse_format(context.moments, "torch's optimizer has tensors of its own"))

        def slot(name: str, x: Tensor) -> Tensor:
            dtype = kinds_of(wide(x.dtype))[0][name]
            return base.like_leaf(x, base.new_zeros(local_of(x), kept or dtype if dtype.is_floating_point else dtype))

        def scalar(name: str, x: Tensor) -> Tensor:
            return _number(0, kinds_of(wide(x.dtype))[1][name])

        slots = {name: tree.map(functools.partial(slot, name), params) for name in names[0]}
        scalars = {name: tree.map(functools.partial(scalar, name), params) for name in names[1]}
        return TorchState(torch.zeros((), dtype=torch.int64), slots, scalars)

    def change(updates: Tree, state: TorchState, params: Tree, context: UpdateContext) -> tuple[Tree, TorchState]:
        base.check_update(TorchState, updates, state, base.require_params(params))
        params = tree.prune(params, updates, ("parameters", "gradients"))
        base.refuse_other_shapes(params, updates, ("parameters", "gradients"))
        shardings = base.shardings_of(next(iter(state.slots.values()), params))
        resharded = redistribute(updates, shardings)
        main = [p.to(wide(p.dtype)) for p in base.local_leaves(redistribute(params, shardings))]
        spec = tree.flatten(resharded)[1]
        slots, scalars = (
            {n: tree.flatten_up_to(spec, x, ("gradients", "state")) for n, x in columns.items()}
            for columns in (state.slots, state.scalars)
        )
        shards = [torch.nn.Parameter(base.clone(p)) for p in main]
        for p, g in zip(shards, base.local_leaves(resharded), strict=True):
            p.grad = g.to(p.dtype).contiguous() if context.donate else base.clone(g.to(p.dtype))
        made = cast(Any, optimizer)(shards, **_settings_at(settings, int(state.count)))
        for i, p in enumerate(shards if int(state.count) else ()):
            kinds = kinds_of(p.dtype)
            made.state[p] = {n: _slot(x[i], kinds[0][n], donate=context.donate) for n, x in slots.items()}
            made.state[p] |= {n: _scalar(x[i], kinds[1][n], p if fused else x[i]) for n, x in scalars.items()}
        made.step()

        def after(columns: dict[str, list[Any]], leaf: Callable[[Tensor, Any], Tensor]) -> dict[str, Tree]:
            new = {n: [leaf(old, made.state[p][n]) for old, p in zip(columns[n], shards, strict=True)] for n in columns}
            return {n: tree.unflatten(spec, x) for n, x in new.items()}

        deltas = [p.detach() - old for p, old in zip(shards, main, strict=True)]
        new_slots = after(slots, lambda old, x: base.like_leaf(old, x.detach().to(old.dtype)))
        new_scalars = after(scalars, lambda old, x: _number(x, old.dtype))
        return base.like(resharded, deltas), TorchState(state.count + 1, new_slots, new_scalars)

    return base.transformation(first, change)


def _refuse_narrow(moments: torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of moments, or refuse one below float32."""
    if moments is not None and wide(moments) != moments:
        text = f"cannot keep moments in {moments}: torch's kernels round to nearest, which loses most of their changes."
        mend = "Give it moments=torch.float32 of its own, or use an optimizer such as fs.adamw, which rounds by key."
        raise ConfigError(message(text, mend=mend))
    return moments


def _settings_at(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the settings after some updates, of which `lr` may be a function."""
    rate = settings.get("lr")
    return {**settings, "lr": rate(count)} if callable(rate) else settings


def _slot(x: Tensor, dtype: torch.dtype, *, donate: bool) -> Tensor:
    """Return a slot of this rank as torch's optimizer has it, which overwrites what it gets."""
    local = local_of(x)
    return base.clone(local) if local.dtype == dtype and not donate else local.to(dtype).contiguous()


def _scalar(x: Tensor, kind: Any, beside: Tensor) -> Any:
    """Return a number as torch has it: a copy beside a tensor, since fused kernels want it there, or Python's."""
    return x.to(beside.device, copy=True) if isinstance(kind, torch.dtype) else kind(x.item())


def _number(value: Any, kind: Any) -> Tensor:
    """Return a number as a 0-d tensor on the CPU; Python's own numbers in 64 bits."""
    dtype = kind if isinstance(kind, torch.dtype) else torch.float64 if kind is float else torch.int64
    return torch.tensor(value.item() if isinstance(value, Tensor) else value, dtype=dtype)


def _refuse_others(optimizer: Any, settings: dict[str, Any]) -> None:
    """Refuse anything but a class of optimizers whose step is a pure function of gradients."""
    if not isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        mend = "Pass the class and its settings: fs.optim.from_torch(torch.optim.NAdam, lr=1e-3)."
        raise ConfigError(message(f"needs a class of optimizers; got {kind_of(optimizer)}.", mend=mend))
    why = {
        "differentiable": "updates have no graph: write the rule as a pair (init, update) and differentiate that",
        "capturable": "each update builds the optimizer anew, which no CUDA graph can repeat",
    }
    rows = [f"{name}=True: {text}" for name, text in why.items() if settings.get(name)]
    if rows:
        raise ConfigError(message(f"cannot take settings of {optimizer.__name__}.", rows, "Leave them out."))
    if optimizer is getattr(torch.optim, optimizer.__name__, None) and optimizer.__name__ in _INSTEAD:
        why = {"LBFGS": "needs a closure", "SparseAdam": "needs sparse gradients"}
        raise _refusal(optimizer, why.get(optimizer.__name__, "does not treat each element by itself"))
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise _refusal(optimizer, "needs a closure")


def _state_kinds(optimizer: _Optimizer, settings: dict[str, Any], dtype: torch.dtype) -> _Kinds:
    """Return the kinds of state for a parameter after trial steps; refuse an optimizer that couples elements."""
    whole, state = _try(optimizer, settings, dtype, [(3, 4)])
    pieces, _ = _try(optimizer, settings, dtype, [(1, 4), (2,), (6,)])
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-6):
        raise _refusal(optimizer, "does not treat each element by itself: a parameter in pieces moves elsewhere")
    slots, scalars = kinds = cast(_Kinds, ({}, {}))
    for name, x in state.items():
        if isinstance(x, Tensor) and x.shape == (3, 4):
            slots[name] = x.dtype
        elif isinstance(x, bool | int | float) or (isinstance(x, Tensor) and x.ndim == 0):
            scalars[name] = x.dtype if isinstance(x, Tensor) else type(x)
        elif x is not None:
            raise _refusal(optimizer, f"keeps {name}, which is neither a number nor one for each element")
    return kinds


def _try(
    optimizer: _Optimizer, settings: dict[str, Any], dtype: torch.dtype, shapes: list[tuple[int, ...]]
) -> tuple[Tensor, dict[str, Any]]:
    """Take three steps on 12 elements in parameters of some shapes; return the elements and the state of the first."""
    # Trials are compared with each other only, so a fixed sequence will do.
    values = [torch.linspace(0.3, 2.9 + k, 12).sin().to(dtype) for k in range(4)]
    sizes = [math.prod(shape) for shape in shapes]
    first, *others = ([x.view(s).clone() for x, s in zip(v.split(sizes), shapes, strict=True)] for v in values)
    params = [torch.nn.Parameter(x) for x in first]
    made = optimizer(params, **settings)
    before = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    for grads in others:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        made.step()
    if before != [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]:
        raise _refusal(optimizer, "keeps state in its groups, which is no parameter's")
    return torch.cat([p.detach().reshape(-1) for p in params]), cast(dict[str, Any], made.state[params[0]])


def _refusal(optimizer: _Optimizer, why: str) -> ConfigError:
    mend = "Write it as a pair (init, update) of functions on trees; fs.optim.sum_dims sums over ranks."
    name = optimizer.__name__
    return ConfigError(message(f"cannot take {name}: it {why}.", mend=_INSTEAD.get(name, mend)))
