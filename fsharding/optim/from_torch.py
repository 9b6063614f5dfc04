"""`from_torch`: a pure pair of functions made of any elementwise optimizer of torch, or of one's own in its form.

In: the class and its settings. Out: a transformation whose state has a tree for each tensor that the optimizer keeps
for a parameter, sharded as the parameters, and 0-d tensors for its numbers.
Each update builds the optimizer anew around this rank's shards. Trial steps tell which optimizers couple elements;
those are refused.
It computes with parameters in float32 at least, and its update is rounded where all updates are, in `add_updates`.
Guarantee: float32 parameters equal those that the torch optimizer gives, and inputs are unchanged unless donated.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.calls import named
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.comm.redistribute import redistribute
from fsharding.optim.base import (
    ContextTransformation,
    InitContext,
    UpdateContext,
    check_update,
    clone,
    like,
    like_leaf,
    local_leaves,
    new_zeros,
    refuse_other_shapes,
    require_params,
    shardings_of,
)
from fsharding.optim.coded_moment import refuse_format
from fsharding.optim.schedules import as_schedule
from fsharding.optim.validation import FROM_0, check_dtype, check_settings
from fsharding.sharding.named_sharding import local_of

__all__ = ["TorchState", "from_torch"]

_NAME = "fs.optim.from_torch"
_INSTEAD = {
    "Adafactor": "Use fs.optim.adafactor, which sums the statistics of whole matrices over ranks.",
    "Muon": "Use fs.optim.muon, which brings whole matrices together.",
    "SparseAdam": "Use torch.optim.Adam: gradients of sharded parameters are dense.",
    "LBFGS": "Use an optimizer that updates from one gradient, or write the line search around fs.value_and_grad.",
}


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


class _StateKinds(NamedTuple):
    """The state that an optimizer keeps for a parameter: dtypes by name; Python's own types for plain numbers."""

    slots: dict[str, torch.dtype]
    scalars: dict[str, Any]


@named(_NAME)
def from_torch(
    optimizer: type[torch.optim.Optimizer], *, moments: torch.dtype | None = None, **settings: Any
) -> ContextTransformation:
    """A transformation from a torch optimizer that treats each element by itself, such as Adam, RMSprop, NAdam, Rprop.

    Groups of parameters with other settings are `fs.optim.multi_transform` over several of these.

    Args:
        optimizer: the class, such as `torch.optim.NAdam`.
        moments: the dtype in which the state that has the shape of parameters is kept between updates, float32 at
            least: torch's kernels write it themselves, rounded to nearest, and a narrower one would lose most changes.
            By default it is that of the layout's `Precision`, or else what torch takes, which is the parameter's dtype,
            float32 at least. An update computes in what torch takes.
        **settings: its arguments but for the parameters. `lr` may be a function of the number of updates so far. With
            `fused=True` the last bits may depend on where a leaf is cut.

    Raises:
        TreeError: from the update: no parameters, or something else than gradients and this state.
        ConfigError: it is no class of optimizers, couples elements of a parameter, keeps state apart from parameters,
            wants a closure or sparse gradients, or has settings that make no pure function; the text says what to use.
            Or `moments`, or from `init` those of the layout, are below float32, or kernels lack their dtype.

    Example:
        >>> params, opt = {"w": torch.ones(2)}, fs.optim.from_torch(torch.optim.NAdam, lr=0.1)
        >>> params, state = fs.optim.apply_gradients(opt, {"w": torch.ones(2)}, opt.init(params), params)
        >>> bool((params["w"] < 1).all()), sorted(state.slots)
        (True, ['exp_avg', 'exp_avg_sq'])
    """
    _refuse_others(optimizer, settings)
    own = _refuse_narrow(check_dtype("moments", moments))
    check_settings((FROM_0, {name: x for name, x in settings.items() if name == "lr" and callable(x)}))
    rate = as_schedule(settings["lr"]) if callable(settings.get("lr")) else None
    if rate is not None:
        settings = {**settings, "lr": rate(0)}
    _refuse(optimizer, settings)
    make: Any = optimizer
    kinds_of = functools.cache(functools.partial(_state_kinds, optimizer, settings))
    on_device = bool(settings.get("fused"))

    @public("fs.optim.from_torch(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> TorchState:
        kept = own or _refuse_narrow(refuse_format(context.moments, "torch's optimizer has tensors of its own"))
        kinds = {x.dtype: kinds_of(wide(x.dtype)) for x in tree.leaves(params)}
        names = [list(dict.fromkeys(name for k in kinds.values() for name in k[part])) for part in (0, 1)]

        def slot(name: str) -> Tree:
            return tree.map(lambda x: _zeros(x, stored(kinds[x.dtype].slots[name])), params)

        def stored(dtype: torch.dtype) -> torch.dtype:
            return kept or dtype if dtype.is_floating_point else dtype

        def scalar(name: str) -> Tree:
            return tree.map(lambda x: _number(0, kinds[x.dtype].scalars[name]), params)

        slots, scalars = ({n: make(n) for n in part} for part, make in zip(names, (slot, scalar), strict=True))
        return TorchState(torch.zeros((), dtype=torch.int64), slots, scalars)

    @public("fs.optim.from_torch(...).update")
    def update(
        updates: Tree, state: TorchState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, TorchState]:
        check_update(TorchState, updates, state, require_params(params))
        params = tree.prune(params, updates, ("parameters", "gradients"))
        refuse_other_shapes(params, updates, ("parameters", "gradients"))
        shardings = shardings_of(next(iter(state.slots.values()), params))
        resharded = redistribute(updates, shardings)
        main = local_leaves(redistribute(params, shardings))
        grads = local_leaves(resharded)
        spec = tree.flatten(resharded)[1]
        slots = {n: tree.flatten_up_to(spec, t, ("gradients", "state")) for n, t in state.slots.items()}
        scalars = {n: tree.flatten_up_to(spec, t, ("gradients", "state")) for n, t in state.scalars.items()}
        main = [p.to(wide(p.dtype)) for p in main]
        params_of_torch = [torch.nn.Parameter(clone(p)) for p in main]
        for p, g in zip(params_of_torch, grads, strict=True):
            p.grad = g.to(p.dtype).contiguous() if context.donate else clone(g.to(p.dtype))
        current = settings if rate is None else {**settings, "lr": rate(int(state.count))}
        made = make(params_of_torch, **current)
        if int(state.count):
            for i, p in enumerate(params_of_torch):
                kinds = kinds_of(p.dtype)
                device = p.device if on_device else None
                entries: dict[str, Any] = {
                    n: _torch_slot(local_of(x[i]), kinds.slots[n], context.donate) for n, x in slots.items()
                }
                entries |= {n: _torch_scalar(x[i], kinds.scalars[n], device) for n, x in scalars.items()}
                made.state[p] = entries
        made.step()
        deltas = [p.detach() - old for p, old in zip(params_of_torch, main, strict=True)]
        after = [cast(dict[str, Any], made.state[p]) for p in params_of_torch]
        new_slots = {
            n: tree.unflatten(
                spec, [like_leaf(old, s[n].detach().to(old.dtype)) for old, s in zip(x, after, strict=True)]
            )
            for n, x in slots.items()
        }
        new_scalars = {
            n: tree.unflatten(spec, [_number(s[n], old.dtype) for old, s in zip(x, after, strict=True)])
            for n, x in scalars.items()
        }
        return like(resharded, deltas), TorchState(state.count + 1, new_slots, new_scalars)

    return ContextTransformation(init, update)


def _refuse_narrow(moments: torch.dtype | None) -> torch.dtype | None:
    """Refuse moments below float32, and return others."""
    if moments is not None and wide(moments) != moments:
        text = f"cannot keep moments in {moments}: torch's kernels round to nearest, which loses most of their changes."
        mend = "Give it moments=torch.float32 of its own, or use an optimizer such as fs.adamw, which rounds by key."
        raise ConfigError(message(text, mend=mend))
    return moments


def _torch_slot(x: Tensor, dtype: torch.dtype, donate: bool) -> Tensor:
    """A slot in the dtype that torch takes, which it may overwrite."""
    if x.dtype != dtype:
        return x.to(dtype).contiguous()
    return x.contiguous() if donate else clone(x)


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    return like_leaf(x, new_zeros(local_of(x), dtype))


def _number(value: Any, kind: Any) -> Tensor:
    """A number as a 0-d tensor on the CPU; Python's own numbers in 64 bits."""
    dtype = kind if isinstance(kind, torch.dtype) else torch.float64 if kind is float else torch.int64
    return torch.tensor(value.item() if isinstance(value, Tensor) else value, dtype=dtype)


def _torch_scalar(x: Tensor, kind: Any, device: torch.device | None) -> Any:
    """A number in the optimizer's own type; its fused kernels want it on the device of the parameter."""
    return x.to(device, copy=True) if isinstance(kind, torch.dtype) else kind(x.item())


# ------------------------------------------------------------------------------------------------------- its state

_ROWS = 3
_COLUMNS = 4
_TRIES = 3


def _state_kinds(optimizer: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype) -> _StateKinds:
    """The state that an optimizer keeps for a parameter after a trial step."""
    _, states, _ = _try(optimizer, settings, [_ROWS * _COLUMNS], dtype, 1)
    slots: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for name, x in states[0].items():
        if isinstance(x, Tensor) and x.shape == (_ROWS * _COLUMNS,):
            slots[name] = x.dtype
        elif isinstance(x, Tensor | bool | int | float) and (not isinstance(x, Tensor) or x.ndim == 0):
            scalars[name] = x.dtype if isinstance(x, Tensor) else type(x)
        elif x is not None:
            raise ConfigError(_refusal(optimizer, f"keeps {name}, which is neither a number nor one for each element"))
    return _StateKinds(slots, scalars)


def _try(
    optimizer: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    shapes: list[Any],
    dtype: torch.dtype,
    steps: int,
) -> tuple[Tensor, list[dict[str, Any]], bool]:
    """Steps on the same elements, in parameters of some shapes.

    Returns:
        (the elements afterwards, flat; the state of each parameter; whether the settings of all groups are unchanged).
    """
    sizes = [torch.Size((s,) if isinstance(s, int) else s) for s in shapes]
    # Trials are compared with each other only, so a fixed sequence will do.
    values = [torch.linspace(0.3, 2.9 + k, sum(s.numel() for s in sizes)).sin().to(dtype) for k in range(steps + 1)]
    pieces = [
        [x.view(s).clone() for x, s in zip(v.split([s.numel() for s in sizes]), sizes, strict=True)] for v in values
    ]
    params = [torch.nn.Parameter(x) for x in pieces[0]]
    made = optimizer(params, **settings)
    before = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    for grads in pieces[1:]:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        made.step()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    states = [cast(dict[str, Any], made.state[p]) for p in params]
    return torch.cat([p.detach().reshape(-1) for p in params]), states, groups == before


def _refuse_others(optimizer: Any, settings: dict[str, Any]) -> None:
    """Refuses anything but a class of optimizers, and settings for graphs, of autograd or of a device."""
    if not isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        kind = f"class {optimizer.__name__}" if isinstance(optimizer, type) else repr(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            kind = f"an instance of {type(optimizer).__name__}"
        mend = "Pass the class and its settings: fs.optim.from_torch(torch.optim.NAdam, lr=1e-3)."
        raise ConfigError(message(f"needs a class of optimizers; got {kind}.", mend=mend))
    why = {
        "differentiable": "updates have no graph: write the rule as a pair (init, update) and differentiate that",
        "capturable": "each update builds the optimizer anew, which no CUDA graph can repeat",
    }
    rows = [f"{name}=True: {text}" for name, text in why.items() if settings.get(name)]
    if rows:
        raise ConfigError(message(f"cannot take settings of {optimizer.__name__}.", rows, "Leave them out."))


def _refuse(optimizer: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    """Refuses an optimizer that is no pure function of one element's gradient, parameter and state."""
    if optimizer.__name__ in _INSTEAD and optimizer is getattr(torch.optim, optimizer.__name__):
        why = {"LBFGS": "needs a closure", "SparseAdam": "needs sparse gradients"}
        raise ConfigError(_refusal(optimizer, why.get(optimizer.__name__, "does not treat each element by itself")))
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(_refusal(optimizer, "needs a closure"))
    count = _ROWS * _COLUMNS
    whole, _, same = _try(optimizer, settings, [(_ROWS, _COLUMNS)], torch.float32, _TRIES)
    pieces, _, _ = _try(optimizer, settings, [(1, _COLUMNS), 2, count - _COLUMNS - 2], torch.float32, _TRIES)
    if not same:
        raise ConfigError(_refusal(optimizer, "keeps state in its groups, which is no parameter's"))
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            _refusal(optimizer, "does not treat each element by itself: a parameter in pieces moves elsewhere")
        )
    _state_kinds(optimizer, settings, torch.float32)


def _refusal(optimizer: type[torch.optim.Optimizer], why: str) -> str:
    mend = "Write it as a pair (init, update) of functions on trees; fs.optim.sum_dims sums over ranks."
    name = optimizer.__name__
    return message(f"cannot take {name}: it {why}.", mend=_INSTEAD.get(name, mend))
