"""Buffers that the forward of a module writes, and batch statistics over all data ranks.

Guarantee: `nn.SyncBatchNorm` over any number of data ranks is the batch norm of their joint batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fsharding import ops
from fsharding.base.errors import ConfigError
from fsharding.interop.module.structure import Problems
from fsharding.interop.module.tensor_parallel import Bare
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.device_mesh import axis_size
from fsharding.sharding.leaf_names import joined

__all__ = ["Place", "check_buffers", "places_of", "refuse_written", "synchronize", "written_buffers"]


class Place(NamedTuple):
    """Where a buffer is: a submodule, and its name there."""

    owner: nn.Module
    key: str


def places_of(module: nn.Module) -> dict[str, Place]:
    """Find the places of all buffers by name; a submodule with several paths counts under the first."""
    return {
        joined(path, key): Place(owner, key)
        for path, owner in module.named_modules()
        for key, _ in owner.named_buffers(recurse=False, remove_duplicate=False)
    }


def written_buffers(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Name the buffers that a forward writes: torch's norms in train mode, and matches of the patterns."""
    return tuple(
        name
        for name, place in places_of(module).items()
        if _is_written(place.owner) or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _is_written(owner: nn.Module) -> bool:
    """Whether a torch module writes its buffers in forward."""
    tracks = bool(getattr(owner, "track_running_stats", False))
    return owner.training and (tracks or isinstance(owner, _SpectralNorm))


def check_buffers(module: nn.Module, patterns: Sequence[str], problems: Problems) -> None:
    """Object to hooks that assign weights, to patterns that match no buffer, and to shared written buffers."""
    _check_hooks(module, problems)
    places = places_of(module)
    rows = [f"{p!r} matches no buffer" for p in patterns if not any(fnmatchcase(name, p) for name in places)]
    names: dict[int, list[str]] = {}
    for name in written_buffers(module, patterns):
        names.setdefault(id(getattr(*places[name])), []).append(name)
    rows += [f"{', '.join(same)} are one tensor" for same in names.values() if len(same) > 1]
    mend = f"The buffers are {', '.join(places) or 'none'}; make each a separate tensor."
    problems.add(ConfigError, "cannot find the buffers that a forward writes.", rows, mend)


_PRUNED = "make it permanent with torch.nn.utils.prune.remove, or multiply by the mask in a parametrization"
_HOOKS: dict[type, tuple[str, str]] = {
    SpectralNorm: ("spectral_norm", "use torch.nn.utils.parametrizations.spectral_norm"),
    WeightNorm: ("weight_norm", "use torch.nn.utils.parametrizations.weight_norm"),
    BasePruningMethod: ("prune", _PRUNED),
}
"""Hooks of `torch.nn.utils` that assign a weight before each forward: their modules, and the replacements."""


def _check_hooks(module: nn.Module, problems: Problems) -> None:
    """Object to hooks that assign a weight to a layer, whose forward wouldn't use the gathered parameters."""
    found = [
        (joined(path, getattr(hook, "name", "") or getattr(hook, "_tensor_name", "")), entry)
        for path, layer in module.named_modules()
        for hook in layer._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        for kind, entry in _HOOKS.items()
        if isinstance(hook, kind)
    ]
    rows = [f"{name} is assigned by torch.nn.utils.{utility}: {instead}" for name, (utility, instead) in found]
    mend = "Change the layers before the call; torch.nn.utils.parametrize computes weights from parameters in any"
    problems.add(ConfigError, "cannot run hooks that assign weights.", rows, f"{mend} forward.")


def refuse_written(module: nn.Module, problems: Problems) -> None:
    """Object to buffers that the forward writes: the parts of a `Model` can't return new values."""
    rows = [f"{name} of {type(places_of(module)[name].owner).__name__}" for name in written_buffers(module, ())]
    mend = (
        "Use fs.functionalize, which supports them on meshes without pp, put these modules in eval mode, or use modules"
        " without running statistics, such as nn.GroupNorm."
    )
    problems.add(ConfigError, "does not support buffers that the forward writes.", rows, mend)


# -------------------------------------------------------------------------------------------------------- SyncBatchNorm
def synchronize(module: nn.Module) -> None:
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
