"""Torch's own layers: which roles over `tp` each can have, and which of their options a pure function cannot have.

Guarantee: an option of a constructor is honored, or refused by name; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from fsharding.base.errors import ConfigError
from fsharding.interop.module.problems import Problems
from fsharding.interop.module.structure import shadowed

__all__ = ["REPLACED", "LayerRoles", "Role", "Roles", "check_options", "check_roles", "layer_roles"]

Role: TypeAlias = Literal["column", "row", "inside", "vocab", "logits"]
Roles: TypeAlias = Mapping[str, Role]
"""Roles by pattern of a module's path; `*` stands for anything, and the first pattern that fits counts."""

REPLACED: dict[str, type[nn.Module]] = {
    "column": nn.Linear, "row": nn.Linear, "logits": nn.Linear, "vocab": nn.Embedding,
}  # fmt: skip
"""The layers whose forward a role replaces; `inside` keeps the forward of any module."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NEVER_CALLED = "NonDynamicallyQuantizableLinear"
"""The output projection of `nn.MultiheadAttention`, which reads its weight and never calls it."""


@dataclass(frozen=True)
class LayerRoles:
    """The roles of the layers of a module."""

    roles: Mapping[str, Role]  # by path, of layers that can have theirs
    refused: Mapping[str, str]  # by path, why a layer cannot have the role of its pattern

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
        return f"{name}, role {role!r} would give each rank running statistics of its own" if counts else None
    if not isinstance(layer, kind):
        return f"{name}, role {role!r} needs {kind.__name__}"
    if name == _NEVER_CALLED:
        return f"{name}, whose weight is read and which is never called: role {role!r} replaces its forward"
    if type(layer).forward is not kind.forward or type(layer).__call__ is not nn.Module.__call__:
        return f"{name}, a {kind.__name__} with a forward of its own, which role {role!r} would replace"
    if "forward" in vars(layer):
        return f"{name} with a forward assigned to it, which role {role!r} would replace"
    if any(getattr(layer, hooks) for hooks in _HOOKS):
        return f"{name} with hooks, which would get the shards that role {role!r} computes"
    return None


def check_roles(module: nn.Module, roles: Roles, problems: Problems) -> None:
    """Object to roles: unknown ones, patterns that fit no layer, and layers that cannot have theirs."""
    known = get_args(Role)
    wrong = [f"{pattern!r} has role {role!r}: there is none" for pattern, role in roles.items() if role not in known]
    found = layer_roles(module, {pattern: role for pattern, role in roles.items() if role in known})
    wrong += [f"{path or 'the module'} is {reason}" for path, reason in found.refused.items()]
    paths = dict(module.named_modules())
    idle = [pattern for pattern in roles if not any(fnmatchcase(path, pattern) for path in paths)]
    wrong += [f"{pattern!r} fits no module" for pattern in idle]
    wrong += shadowed(roles, [*paths])
    mend = f"Give plain nn.Linear and nn.Embedding one of the roles {', '.join(map(repr, known))}, and others none."
    problems.add(ConfigError, "cannot compute some layers over tp.", wrong, mend)


_TABLE_OPTIONS = {
    "max_norm": "its forward writes to its weight",
    "scale_grad_by_freq": "its gradient depends on row counts of the full batch, of which a rank has a part",
    "sparse": "its gradient is sparse, and gradients of leaves are dense",
}
"""Options of `nn.Embedding` and `nn.EmbeddingBag` that are refused, and why."""


def check_options(module: nn.Module, problems: Problems) -> None:
    """Object to options of torch's layers that a pure function of the parameters cannot have."""
    rows: list[str] = []
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            where = f"{path or 'the module'} is {type(layer).__name__}"
            for name, why in _TABLE_OPTIONS.items():
                value: Any = getattr(layer, name)
                # A max_norm of 0 is one, too.
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
