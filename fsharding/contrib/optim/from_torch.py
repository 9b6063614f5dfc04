"""`from_torch`: an elementwise torch optimizer as pure functions; each update builds a new one around local shards."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import kind_of, public
from fsharding.base.tree import Tree
from fsharding.optim import base
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext
from fsharding.optim.coded_moment import refuse_format
from fsharding.optim.validation import FROM_0, check_dtype, check_settings
from fsharding.sharding.named_sharding import local_of

__all__ = ["TorchState", "from_torch"]

_INSTEAD = {
    "Adafactor": "Use fs.optim.adafactor, which sums the statistics of full matrices over ranks.",
    "Muon": "Use fs.optim.muon, which gathers full matrices.",
    "SparseAdam": "Use torch.optim.Adam: gradients of sharded parameters are dense.",
    "LBFGS": "Use an optimizer that updates from one gradient, or write the line search around fs.value_and_grad.",
}
_NUMBERS = {bool: torch.int64, int: torch.int64, float: torch.float64}  # how the state keeps Python's own numbers
_Optimizer: TypeAlias = type[torch.optim.Optimizer]
_Kinds: TypeAlias = tuple[dict[str, torch.dtype], dict[str, Any]]  # of slots and scalars; some have Python's types


class TorchState(NamedTuple):
    """State of `from_torch`: the state of the torch optimizer, as trees.

    Attributes:
        count: Number of updates (int64, 0-d, on the CPU). While it is 0, torch makes its first values itself.
        slots: Trees with the shapes and shardings of the parameters by torch's name, such as `exp_avg`.
        scalars: Trees of 0-d tensors on the CPU by torch's name, such as `step`.

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
    """Convert an elementwise torch optimizer, such as RMSprop, NAdam or Rprop, to a pair of pure functions.

    For groups of parameters with different settings use `fs.optim.multi_transform` over several of these.

    Args:
        optimizer: Class of the optimizer, such as `torch.optim.NAdam`.
        moments: Dtype of the slots, at least float32, since torch's kernels round to nearest. Default: the layout's
            `Precision.moments`, else torch's.
        **settings: Arguments of the class except the parameters. `lr` may be a schedule `count -> rate`. With
            `fused=True` the last bits may depend on the sharding of a leaf.

    Returns:
        A `ContextTransformation` whose state is a `TorchState`.

    Raises:
        TreeError: The update gets no parameters, or arguments that aren't gradients and this state.
        ConfigError: `optimizer` isn't a class of optimizers, couples elements, keeps state outside of parameters, needs
            a closure or sparse gradients, or isn't a pure function; or `moments` is narrower than float32.

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
    kinds_of(torch.float32)  # refuse an optimizer that couples elements

    def first(params: Tree, context: InitContext) -> TorchState:
        kept = own or _refuse_narrow(refuse_format(context.moments, "torch's optimizer has tensors of its own"))

        def zeros(name: str, x: Tensor) -> Tensor:
            slots, scalars = kinds_of(wide(x.dtype))
            if name in scalars:
                return torch.zeros((), dtype=_NUMBERS.get(scalars[name], scalars[name]))
            dtype = slots[name]
            return base.like_leaf(x, base.new_zeros(local_of(x), kept or dtype if dtype.is_floating_point else dtype))

        trees = [{n: tree.map(functools.partial(zeros, n), params) for n in names} for names in kinds_of(torch.float32)]
        return TorchState(torch.zeros((), dtype=torch.int64), *trees)

    def change(updates: Tree, state: TorchState, params: Tree, context: UpdateContext) -> tuple[Tree, TorchState]:
        base.check_update(TorchState, updates, state, base.require_params(params))
        home = next(iter(state.slots.values()), tree.prune(params, updates, ("parameters", "gradients")))
        grads = base.local_grads(updates, home, "moments" if state.slots else "parameters")
        main = [p.to(wide(p.dtype)) for p in base.local_params(params, home)]
        spec = tree.flatten(home)[1]
        columns = state.slots | state.scalars
        held = {n: tree.flatten_up_to(spec, x, ("gradients", "state")) for n, x in columns.items()}
        # Torch's optimizer writes to parameters, gradients and state in place: it gets copies unless they are donated.
        shards = [torch.nn.Parameter(base.clone(p)) for p in main]
        for p, g in zip(shards, grads, strict=True):
            p.grad = g.to(p.dtype).contiguous() if context.donate else base.clone(g.to(p.dtype))
        made = cast(Any, optimizer)(shards, **_settings_at(settings, int(state.count)))
        for i, p in enumerate(shards if int(state.count) else ()):
            for kinds in kinds_of(p.dtype):
                at = p if settings.get("fused") else None  # fused kernels read numbers on the device
                made.state[p] |= {n: _given(held[n][i], kinds[n], at, donate=context.donate) for n in kinds}
        made.step()
        deltas = [p.detach() - old for p, old in zip(shards, main, strict=True)]
        new = {n: [_kept(old, made.state[p][n]) for old, p in zip(x, shards, strict=True)] for n, x in held.items()}
        trees = ({n: tree.unflatten(spec, new[n]) for n in part} for part in (state.slots, state.scalars))
        return base.like(home, deltas), TorchState(state.count + 1, *trees)

    return base.transformation(first, change)


def _refuse_narrow(moments: torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of moments, or refuse one below float32."""
    if moments is not None and wide(moments) != moments:
        text = f"cannot keep moments in {moments}: torch's kernels round to nearest, which loses most of their changes."
        mend = "Give it moments=torch.float32 of its own, or use an optimizer such as fs.adamw, which rounds by key."
        raise ConfigError(message(text, mend=mend))
    return moments


def _settings_at(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the settings after `count` updates: `lr` may be a function of it."""
    rate = settings.get("lr")
    return {**settings, "lr": rate(count)} if callable(rate) else settings


def _given(x: Tensor, kind: Any, at: Tensor | None, *, donate: bool) -> Any:
    """Return a leaf of the state for torch's optimizer, which writes to it in place; on the device of `at` if given."""
    if not isinstance(kind, torch.dtype):
        return kind(x.item())
    local = local_of(x)
    there = local.to((local if at is None else at).device, kind).contiguous()
    return base.clone(there) if there is local and not donate else there


def _kept(old: Tensor, new: Any) -> Tensor:
    """Return a part of the state of torch's optimizer as a leaf like the old one."""
    local = local_of(old)
    return base.like_leaf(old, torch.as_tensor(new, dtype=local.dtype, device=local.device).detach())


def _refuse_others(optimizer: Any, settings: dict[str, Any]) -> None:
    """Refuse anything but a class of optimizers whose step is a pure function of gradients."""
    if not isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        mend = "Pass the class and its settings: fs.optim.from_torch(torch.optim.NAdam, lr=1e-3)."
        raise ConfigError(message(f"needs a class of optimizers; got {kind_of(optimizer)}.", mend=mend))
    why = {
        "differentiable": "updates have no graph: write the rule as a pair (init, update) and differentiate that",
        "capturable": "each update builds a new optimizer, which no CUDA graph can repeat",
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
    # The same 12 elements, as three parameters and as one: an elementwise optimizer moves them equally. Trials are only
    # compared with each other, so fixed numbers are enough.
    values = [torch.linspace(0.3, 2.9 + k, 12).sin().to(dtype) for k in range(4)]
    moved: list[Tensor] = []
    state: dict[str, Any] = {}
    for shapes in ([(1, 4), (2,), (6,)], [(3, 4)]):
        sizes = [math.prod(shape) for shape in shapes]
        first, *others = ([x.view(s).clone() for x, s in zip(v.split(sizes), shapes, strict=True)] for v in values)
        params = [torch.nn.Parameter(x) for x in first]
        made = optimizer(params, **settings)
        before = made.state_dict()["param_groups"]
        for grads in others:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            made.step()
        if before != made.state_dict()["param_groups"]:
            raise _refusal(optimizer, "keeps state in its groups, which is no parameter's")
        moved.append(torch.cat([p.detach().reshape(-1) for p in params]))
        state = made.state[params[0]]
    if not torch.allclose(moved[0], moved[1], rtol=1e-5, atol=1e-6):
        raise _refusal(optimizer, "does not treat each element by itself: a parameter in parts moves elsewhere")
    slots, scalars = kinds = cast(_Kinds, ({}, {}))
    for name, x in state.items():
        if isinstance(x, Tensor) and x.shape == (3, 4):
            slots[name] = x.dtype
        elif isinstance(x, bool | int | float) or (isinstance(x, Tensor) and x.ndim == 0):
            scalars[name] = x.dtype if isinstance(x, Tensor) else type(x)
        elif x is not None:
            raise _refusal(optimizer, f"keeps {name}, which is neither a number nor one for each element")
    return kinds


def _refusal(optimizer: _Optimizer, why: str) -> ConfigError:
    mend = "Write it as a pair (init, update) of functions on trees; fs.optim.sum_dims sums over ranks."
    name = optimizer.__name__
    return ConfigError(message(f"cannot take {name}: it {why}.", mend=_INSTEAD.get(name, mend)))
