"""Torch's layers on a mesh: the roles that each can have over `tp`, and the forwards that replace theirs.

Guarantee: outputs and gradients match one rank, `nn.SyncBatchNorm` over data ranks is the batch norm of their joint
batch, and an option of a constructor is honored, or refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fsharding import ops
from fsharding.base.errors import ConfigError
from fsharding.interop.module.initializers import seeded
from fsharding.interop.module.structure import Problems, shadowed
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.device_mesh import axis_index, axis_size
from fsharding.ops.embedding import look_up
from fsharding.sharding import boxes

__all__ = [
    "REPLACED", "Bare", "Entrances", "LayerRoles", "Role", "Roles", "check_options", "check_roles", "install",
    "layer_roles",
]  # fmt: skip

Role: TypeAlias = Literal["column", "row", "inside", "vocab", "logits"]
Roles: TypeAlias = Mapping[str, Role]
"""Roles by pattern of a module's path; `*` matches anything, and the first matching pattern counts."""

REPLACED: dict[str, type[nn.Module]] = {
    "column": nn.Linear, "row": nn.Linear, "logits": nn.Linear, "vocab": nn.Embedding,
}  # fmt: skip
"""The layers whose forward a role replaces; `inside` keeps the forward of any module."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NEVER_CALLED = "NonDynamicallyQuantizableLinear"
"""The output projection of `nn.MultiheadAttention`, whose weight is read and whose forward is never called."""


@dataclass(frozen=True)
class LayerRoles:
    """The roles of the layers of a module."""

    roles: Mapping[str, Role]  # by path, of layers that can have theirs
    refused: Mapping[str, str]  # the reason, by path, of layers that can't

    def __str__(self) -> str:
        return ", ".join(f"{path}: {role}" for path, role in self.roles.items()) or "none"


def layer_roles(module: nn.Module, roles: Roles) -> LayerRoles:
    """Find the role of each layer; a layer that cannot have it computes as written, with full weights."""
    result: dict[str, Role] = {}
    refused: dict[str, str] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        fits: list[Role] = [role for pattern, role in roles.items() if fnmatchcase(path, pattern)]
        if not fits:
            continue
        if (reason := _objection(layer, fits[0])) is not None:
            refused[path] = reason
        else:
            result[path] = fits[0]
    return LayerRoles(result, refused)


def _objection(layer: nn.Module, role: str) -> str | None:
    """Why a layer cannot have a role."""
    kind = REPLACED.get(role)
    name = type(layer).__name__
    if kind is None:
        counts = any(m.training and getattr(m, "track_running_stats", False) for m in layer.modules())
        return f"{name}, role {role!r} would give each rank different running statistics" if counts else None
    if not isinstance(layer, kind):
        return f"{name}, role {role!r} needs {kind.__name__}"
    if name == _NEVER_CALLED:
        return f"{name}, whose weight is read and which is never called: role {role!r} replaces its forward"
    if type(layer).forward is not kind.forward or type(layer).__call__ is not nn.Module.__call__:
        return f"{name}, a {kind.__name__} with a custom forward, which role {role!r} would replace"
    if "forward" in vars(layer):
        return f"{name} with a forward assigned to it, which role {role!r} would replace"
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        return f"{name} with hooks, which would get the shards that role {role!r} computes"
    return None


def check_roles(module: nn.Module, roles: Roles, problems: Problems) -> None:
    """Object to roles: unknown ones, patterns that fit no layer, and layers that cannot have theirs."""
    known = get_args(Role)
    wrong = [f"{pattern!r} has the unknown role {role!r}" for pattern, role in roles.items() if role not in known]
    found = layer_roles(module, {pattern: role for pattern, role in roles.items() if role in known})
    wrong += [f"{path or 'the module'} is {reason}" for path, reason in found.refused.items()]
    paths = dict(module.named_modules())
    idle = [pattern for pattern in roles if not any(fnmatchcase(path, pattern) for path in paths)]
    wrong += [f"{pattern!r} matches no module" for pattern in idle]
    wrong += shadowed(roles, [*paths])
    mend = f"Give only plain nn.Linear and nn.Embedding layers a role, one of {', '.join(map(repr, known))}."
    problems.add(ConfigError, "cannot compute some layers over tp.", wrong, mend)


_TABLE_OPTIONS = {
    "max_norm": "its forward writes to its weight",
    "scale_grad_by_freq": "its gradient depends on row counts of the full batch, which is sharded",
    "sparse": "its gradient is sparse, and gradients of leaves are dense",
}
"""Options of `nn.Embedding` and `nn.EmbeddingBag` that are refused, with the reasons."""


def check_options(module: nn.Module, problems: Problems) -> None:
    """Object to options of torch's layers that a pure function of the parameters cannot have."""
    rows: list[str] = []
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            where = f"{path or 'the module'} is {type(layer).__name__}"
            for name, why in _TABLE_OPTIONS.items():
                value: Any = getattr(layer, name)
                # Compare with None and False: a max_norm of 0 is an option too.
                rows += [f"{where}, {name}={value!r}: {why}"] if value is not None and value is not False else []
    mend = "Make the layer without the option. Instead of max_norm=, normalize the rows that the forward looks up."
    problems.add(ConfigError, "cannot honor options of some layers.", rows, mend)
    # PEFT's wrapper of single parameters registers a parametrization of another module in each forward.
    wrapped = [
        f"{path} is PEFT's {type(layer).__name__} of {getattr(layer, 'parameter_name', 'a parameter')}"
        for path, layer in module.named_modules()
        if type(layer).__name__ == "ParamWrapper" and type(layer).__module__.startswith("peft.")
    ]
    adapt = "Adapt layers instead: target_modules=[...] without target_parameters."
    problems.add(ConfigError, "cannot run adapters that replace parameters in the forward.", wrapped, adapt)


# ------------------------------------------------------------------------------------------------------- their forwards
@dataclass
class _Unit:
    """The part of a forward that is running: a unit, or the code outside of units."""

    seed: int | None = None  # of random operations; None if there must be none
    device: torch.device | str = "cpu"  # with a generator that the part may use
    # inputs of regions by the parent of the columns, before and after `copy_to_tp`
    known: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    inside: list[nn.Module] = field(default_factory=list)  # parents of columns whose rows have not run yet
    region: ExitStack = field(default_factory=ExitStack)  # restores the generators after the region
    regions: int = 0  # number of regions so far


class Entrances:
    """Tracks the regions between columns and rows, in which `tp` ranks hold different activations."""

    # The columns of one parent share one all-reduce in backward. Inside a region each rank uses a different seed. After
    # it the generators are restored: shards of different sizes have used different amounts of random numbers.

    def __init__(self) -> None:
        self._unit = _Unit()

    @contextmanager
    def drawing(self, seed: int | None, device: torch.device | str) -> Generator[None]:
        """Run a unit in this block, with its own seed."""
        around = self._unit
        self._unit = _Unit(seed, device)
        try:
            # A forward that raises, or has a column without a row, leaves a region open: close it first.
            with seeded(seed, device), self._unit.region:
                yield
        finally:
            self._unit = around

    def begin(self, parent: nn.Module) -> None:
        """Begin a region at a column, or continue it."""
        unit = self._unit
        if unit.seed is not None and not unit.inside:
            number = unit.regions * axis_size("tp") + axis_index("tp") + 1
            unit.region.enter_context(seeded((unit.seed + number * _ODD) % 2**64, unit.device))
            unit.regions += 1
        unit.inside += [parent] if parent not in unit.inside else []

    def end(self, parent: nn.Module) -> None:
        """End the region of a row's parent; if that has begun none, end all."""
        unit = self._unit
        # Regions of two parents may overlap, such as parallel attention and MLP: restore the generators after both.
        unit.inside = [p for p in unit.inside if p != parent] if parent in unit.inside else []
        if not unit.inside:
            unit.region.close()

    def enter(self, parent: nn.Module, x: Tensor) -> Tensor:
        """Apply `ops.copy_to_tp`, once for each x of a parent."""
        known = self._unit.known.get(parent)
        if known is None or known[0] is not x:
            known = self._unit.known[parent] = x, ops.copy_to_tp(x)
        return known[1]

    def clear(self) -> None:
        """Free all activations."""
        self._unit.known.clear()


_ODD = 0xD1342543DE82EF95
"""Distance of the seeds of regions: a multiplier of a 64-bit LCG (Steele and Vigna 2022, arXiv:2001.05304)."""


def install(module: nn.Module, roles: Mapping[str, Role]) -> Entrances:
    """Replace the forwards of the layers that have a role, by path, of embeddings, and of norms with statistics."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            kind = type(layer)
            # A base class, because a custom forward of the layer may call nn.Embedding's.
            bases = (_Embedding,) if kind is nn.Embedding else (kind, _Embedding)
            layer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    entrances = Entrances()
    for path, layer in list(module.named_modules()):
        role = roles.get(path)
        if role is None:
            continue
        parent = module.get_submodule(path.rpartition(".")[0])
        whole = layer.forward
        if isinstance(layer, nn.Linear) and role in ("column", "row", "logits"):
            compute = {"column": _column, "row": _row, "logits": _logits}[role]
            vars(layer)["forward"] = functools.partial(compute, layer, whole, parent, entrances)
        elif isinstance(layer, nn.Embedding) and role == "vocab":
            vars(layer)["forward"] = functools.partial(_vocab, layer, whole)
        else:
            siblings = [child for child in parent.children() if isinstance(child, nn.Linear)]
            vars(layer)["forward"] = functools.partial(_inside, whole, Bare(layer, whole), siblings)
    _synchronize(module)  # last: it wraps the forwards set above
    return entrances


class _Embedding(nn.Embedding):
    """An embedding with a gradient that is summed in at least float32."""

    def forward(self, input: Tensor) -> Tensor:
        return look_up(input, self.weight, self.padding_idx)


_Forward: TypeAlias = Callable[..., Any]


def _column(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.out_features:
        return whole(x)
    entrances.begin(parent)
    return F.linear(entrances.enter(parent, x), layer.weight, layer.bias)


def _row(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[1] == layer.in_features:
        return whole(x)
    bias = cast("Tensor | None", layer.bias)
    y = ops.reduce_from_tp(F.linear(x, layer.weight))
    entrances.end(parent)
    return y if bias is None else y + bias


def _logits(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.out_features:
        return whole(x)
    own = F.linear(entrances.enter(parent, x), layer.weight, layer.bias)
    start, stop = boxes.chunk(layer.out_features, axis_size("tp"), axis_index("tp"))
    # A sum instead of an all-gather: its transpose is the identity, as the next operations are equal on all ranks.
    return ops.reduce_from_tp(F.pad(own, (start, layer.out_features - stop)))


def _vocab(layer: nn.Embedding, whole: _Forward, tokens: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.num_embeddings:
        return whole(tokens)
    result = ops.embedding(tokens, layer.weight, vocab=layer.num_embeddings)
    if layer.padding_idx is None:
        return result
    return torch.where((tokens == layer.padding_idx).unsqueeze(-1), result.detach(), result)


def _inside(whole: _Forward, bare: Bare, siblings: Sequence[nn.Linear], /, *args: Any, **kwargs: Any) -> Any:
    if all(s.weight.shape == (s.out_features, s.in_features) for s in siblings):
        return whole(*args, **kwargs)
    varied = {f"inner.{name}": ops.pvary(p, "tp") for name, p in bare.inner.named_parameters()}
    return torch.func.functional_call(bare, varied, args, kwargs, tie_weights=False)


class Bare(nn.Module):
    """A module with a given function as its forward, and the module with the parameters as `inner`."""

    def __init__(self, inner: nn.Module, forward: _Forward) -> None:
        super().__init__()
        self.inner = inner
        self._call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the given function."""
        return self._call(*args, **kwargs)


# ----------------------------------------------------------------------------------------------- their batch statistics
def _synchronize(module: nn.Module) -> None:
    """Replace the forwards of norms with running statistics, and of `nn.SyncBatchNorm` for any device and mesh."""
    for layer in module.modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            vars(layer)["forward"] = functools.partial(_mixed, layer, layer.forward, Bare(layer, layer.forward))
        if isinstance(layer, nn.SyncBatchNorm):  # in eval mode it calls the forward above
            vars(layer)["forward"] = functools.partial(_synchronized, layer, layer.forward)


def _mixed(layer: Any, whole: Callable[[Tensor], Tensor], bare: nn.Module, x: Tensor) -> Tensor:
    """Forward of a norm with float32 statistics and weights that a precision may have cast."""
    # Torch's kernels accept inputs of a lower dtype, but weights and statistics must have the same dtype.
    weights: dict[str, Tensor] = dict(layer.named_parameters())
    dtype = layer.running_mean.dtype
    if all(w.dtype == dtype for w in weights.values()):
        return whole(x)
    wide = {f"inner.{name}": w.to(dtype) for name, w in weights.items()}
    return torch.func.functional_call(bare, wide, (x,), tie_weights=False)


def _synchronized(layer: Any, whole: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Forward of a batch norm with statistics over all data ranks."""
    if not layer.training:
        return whole(x)
    layer._check_input_dim(x)
    dims = [0, *range(2, x.ndim)]
    shape = (1, -1, *(1,) * (x.ndim - 2))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    # Two passes: the variance as a difference of sums is inaccurate for values far from 0.
    count = _sum_over_data(torch.full((), x.numel() // x.shape[1], dtype=torch.float64, device=x.device))
    count = count.to(wide.dtype)
    mean = _sum_over_data(wide.sum(dims)) / count
    centered = wide - mean.view(shape)
    variance = _sum_over_data(centered.square().sum(dims)) / count
    y = centered * (variance + layer.eps).rsqrt().view(shape)
    y = y if layer.weight is None else y * layer.weight.view(shape)
    y = y if layer.bias is None else y + layer.bias.view(shape)
    if layer.track_running_stats:
        _track(layer, mean.detach(), variance.detach() * (count / (count - 1)))
    return y.to(x.dtype)


@torch.no_grad()
def _track(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics toward the mean and the unbiased variance of a batch."""
    layer.num_batches_tracked.add_(1)
    part = 1 / layer.num_batches_tracked if layer.momentum is None else layer.momentum
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.mul_(1 - part).add_(new.to(running.dtype) * part)


def _sum_over_data(x: Tensor) -> Tensor:
    """Sum over data ranks; backward sums the gradients too, since each rank uses the result differently."""
    axes = [axis for axis in DATA_AXES if axis_size(axis) > 1]
    return ops.pvary(ops.psum(x, axes), axes) if axes else x
