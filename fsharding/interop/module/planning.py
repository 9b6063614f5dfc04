"""The plan of a module as a function: its leaves and units, the roles of its layers, and the tables of its family."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fsharding.base import _compat
from fsharding.base.errors import ConfigError, message, report
from fsharding.base.public import refuse
from fsharding.interop.hf import config_tables
from fsharding.interop.module.hf_tables import Family, family_of
from fsharding.interop.module.initializers import Reset
from fsharding.interop.module.layers import LayerRoles, Roles, check_options, check_roles, layer_roles
from fsharding.interop.module.probe import unfit_roles
from fsharding.interop.module.structure import Anatomy, ModuleLeaf, NameTable, Problems, UnitPatterns, plan_module
from fsharding.mesh.abstract_mesh import DATA_AXES, AbstractMesh
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.leaf_plan import EXPERT, type_text
from fsharding.sharding.partition_spec import AxisRules, rule_name
from fsharding.transforms import policies
from fsharding.transforms.policies import Policy

__all__ = ["ModuleOptions", "ModulePlan", "check_arguments", "places_of", "plan_of"]


class ModuleOptions(NamedTuple):
    """The keyword arguments of `functionalize`."""

    names: NameTable | None = None
    roles: Roles | None = None
    reset: Reset | None = None
    policy: Policy = policies.save_except_gathered
    cast_inputs: bool = True
    buffers: str | Sequence[str] = ()


@dataclass(frozen=True)
class ModulePlan:
    """A module, and everything that is planned before it is copied."""

    module: nn.Module
    anatomy: Anatomy
    roles: LayerRoles
    reset: Reset | None
    family: Family | None  # source of the defaults, if no units were passed
    options: ModuleOptions  # as passed
    written: tuple[str, ...] = ()  # names of the buffers that the forward writes

    @functools.cached_property
    def _tried(self) -> Callable[[Collection[str], int], list[str]]:
        return functools.cache(functools.partial(unfit_roles, self.module, self.roles.roles))

    def check(self, mesh: Mesh, rules: AxisRules, over: Sequence[str] = ()) -> None:
        """Refuse a mesh with axes that the module doesn't support; `over` has axes that the caller handles."""
        shape = abstract(mesh)
        tp = shape.axis_size("tp")
        _check_experts(self.anatomy, shape, rules, getattr(getattr(self.module, "config", None), "model_type", ""))
        hindered = [axis for axis in _WHOLE if axis not in over and shape.axis_size(axis) > 1]
        wrong = [f"{axis}={shape.axis_size(axis)}: {_WHOLE[axis]}" for axis in hindered]
        called_by: dict[str, list[str]] = {}
        for weight in (weight for unit in self.anatomy.units for weight in unit.weights):
            called_by.setdefault(weight.leaf, []).append(weight.name)
        cut_heads = False
        cut_weights = set[str]()
        for leaf in self.anatomy.leaves:
            for dim, name in enumerate(leaf.names):
                called = rule_name(name)
                axes = [a for a in rules.get(called, ()) if shape.axis_size(a) > 1] if called is not None else []
                cuts = [a for a in axes if a not in (*DATA_AXES, "pp") or called == EXPERT]
                if cuts:
                    cut_heads |= called in ("heads", "kv_heads")
                    cut_weights |= {*called_by[leaf.path]} if "tp" in cuts else set()
                    over_axes = f"dim {dim} ({called!r}) over {', '.join(cuts)}"
                    why = self._uncut(leaf, called_by[leaf.path], dim, cuts)
                    kind = type_text(leaf.shape, leaf.dtype)
                    wrong += [f"{leaf.path} is {kind}, {over_axes}: {why}"] if why else []
        heads = {} if self.family is None or not cut_heads else self.family.heads_of(self.module)
        wrong += [f"{name} is {count}: not a multiple of tp={tp}" for name, count in heads.items() if count % tp]
        # Run the forward only if nothing is wrong so far: the rows above give better reasons.
        wrong = wrong or (self._tried(frozenset(cut_weights), tp) if cut_weights else [])
        if wrong:
            raise ConfigError(report(f"fs.plan_layout cannot shard this module on mesh {shape}.", wrong, _MEND))

    def _uncut(self, leaf: ModuleLeaf, sources: Sequence[str], dim: int, axes: Sequence[str]) -> str:
        """Explain why the layers of a leaf can't compute with shards of it along a dim; "" if they can."""
        inner = dim - 1 if leaf.stacked else dim

        def cannot(source: str) -> bool:
            path, _, last = source.rpartition(".")
            role = self.roles.roles.get(path)
            return role is None or _CUT[role].get(last) != inner

        bad = next(filter(cannot, sources), None)
        if bad is None and [*axes] == ["tp"]:  # layers recognize a shard by its size, so one of size 1 looks full
            return "one rank would have all of it" if leaf.shape[dim] == 1 else ""
        source = bad or leaf.sources[0]
        owner = source.rpartition(".")[0]
        if owner in self.roles.refused:
            return f"{owner} is {self.roles.refused[owner]}"
        role = f"role {self.roles.roles[owner]!r}" if owner in self.roles.roles else "no role"
        return f"{source} is of a layer with {role}"


_CUT: dict[str, dict[str, int]] = {
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "inside": {},
    "vocab": {"weight": 0},
    "logits": {"weight": 0, "bias": 0},
}
"""For each role, the dim of each parameter that `tp` may shard."""

_WHOLE = {
    "pp": "a forward has no stages; see fs.model_from_module",
    "cp": "the layers need full sequences; fs.hf.families.Parts(cp=True) may accept shards of them",
}
"""The axes that no layer of torch supports, and an alternative."""

_MEND = (
    "Remove the axis from the mesh, or pass roles=. To compute these layers in full on all ranks, set the rules of the"
    ' dims to None, as in fs.DEFAULT_RULES.replace(mlp=None), with tp="replicate" if no leaf is left for tp.'
)


def plan_of(
    module: nn.Module, units: UnitPatterns | None, options: ModuleOptions, *, carries: bool = True
) -> ModulePlan:
    """Plan a module, by default with its family's tables; refuse written buffers unless the caller `carries` them."""
    names, roles, reset, *_ = options
    patterns = (options.buffers,) if isinstance(options.buffers, str) else tuple(options.buffers)
    problems = Problems()
    written = _plan_buffers(module, patterns, problems, carries=carries)
    check_memory(module, problems)
    check_options(module, problems)
    check_roles(module, roles or {}, problems)
    general = names is None
    family = family_of(module) if units is None else None
    if family is not None:
        problems.refuse()  # before the family's patterns, which the caller didn't write, add problems
        units = family.units
        names = names or family.names
        roles = family.roles if roles is None else roles
        reset = reset or getattr(module, family.reset or "", None)
    assert units is not None
    anatomy = plan_module(module, units, names, problems, general=general, ragged=family is not None)
    return ModulePlan(module, anatomy, layer_roles(module, roles or {}), reset, family, options, written)


def _check_experts(anatomy: Anatomy, shape: AbstractMesh, rules: AxisRules, family: str) -> None:
    """Refuse a mesh whose `ep` would leave all experts of a module on every rank: its own forward takes all of them."""
    # Rules without an axis for experts say that every rank has all of them, so they are accepted.
    axes = [axis for axis in rules.get(EXPERT, ()) if axis == "ep" and shape.axis_size(axis) > 1]
    leaves = [leaf for leaf in anatomy.leaves if _is_expert(leaf.path)] if axes else []
    if not leaves:
        return
    ep, dp = shape.axis_size("ep"), shape.axis_size("dp")
    rows = [f"{leaf.path} is {type_text(leaf.shape, leaf.dtype)}" for leaf in leaves]
    mend = f"Use ep=1, and dp={ep * dp} for these ranks: the module's own forward takes all experts."
    if family in [*config_tables.FAMILIES]:
        mend = f"For experts over ep, read the weights of this {family} into a decoder: model = fs.models.decoder"
        mend += "(fs.hf.config_of(folder)), then fs.hf.load(folder, layout). Or use ep=1."
    rule = f"cannot shard the experts of this module over ep={ep}: every rank would gather all of them."
    raise ConfigError(report(f"fs.plan_layout {rule}", rows, mend))


def _is_expert(path: str) -> bool:
    """Whether a leaf belongs to routed experts; experts that process every token are called `shared_experts`."""
    return any("expert" in part and not part.startswith("shared_") for part in path.split("."))


# ------------------------------------------------------------------------------------------------------------ buffers
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


def _plan_buffers(module: nn.Module, patterns: Sequence[str], problems: Problems, *, carries: bool) -> tuple[str, ...]:
    """Name the buffers that a forward writes: of torch's layers in train mode, and matches of the patterns."""
    _check_hooks(module, problems)
    places = places_of(module)
    rows = [f"{p!r} matches no buffer" for p in patterns if not any(fnmatchcase(name, p) for name in places)]
    written = [
        name
        for name, place in places.items()
        if _is_written(place.owner) or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    names: dict[int, list[str]] = {}
    for name in written:
        names.setdefault(id(getattr(*places[name])), []).append(name)
    rows += [f"{', '.join(same)} are one tensor" for same in names.values() if len(same) > 1]
    mend = f"The buffers are {', '.join(places) or 'none'}; make each a separate tensor."
    problems.add(ConfigError, "cannot find the buffers that a forward writes.", rows, mend)
    if not carries:  # the parts of a `Model` can't return new values
        rows = [f"{name} of {type(places[name].owner).__name__}" for name in written]
        mend = (
            "Use fs.functionalize, which supports them on meshes without pp, put these modules in eval mode, or use"
            " modules without running statistics, such as nn.GroupNorm."
        )
        problems.add(ConfigError, "does not support buffers that the forward writes.", rows, mend)
    return tuple(written)


def _is_written(owner: nn.Module) -> bool:
    """Whether a torch module writes its buffers in forward."""
    tracks = bool(getattr(owner, "track_running_stats", False))
    return owner.training and (tracks or isinstance(owner, _SpectralNorm))


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


# ------------------------------------------------------------------------------------------------ checks of any module
def _is_plain(p: Tensor) -> bool:
    """Whether a tensor overrides no operator, as fake tensors and mere subclasses of Parameter don't."""
    kind: Any = type(p)
    plain: Any = Tensor
    own = kind.__torch_dispatch__ is not plain.__torch_dispatch__ or kind.__torch_function__ not in _PLAIN
    return not own or nn.parameter.is_lazy(p) or _compat.is_fake(p)


_PLAIN: Any = (Tensor.__torch_function__, nn.Parameter.__torch_function__)


def check_memory(module: nn.Module, problems: Problems) -> None:
    """Object to weights that share memory with other tensors: each leaf gets separate memory."""
    own = {id(p): (name, p) for name, p in module.named_parameters()}
    buffers = {id(b): (name, b) for name, b in module.named_buffers()}
    spans: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, x in (buffers | own).values():
        if x.is_meta or _compat.is_fake(x) or not x.numel() or x.layout != torch.strided:
            continue
        start = int(x.storage_offset()) * x.element_size()
        end = start + int(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()
        spans.setdefault(_compat.storage_id(x), []).append((start, end, name, x.requires_grad))
    rows: list[str] = []
    for several in spans.values():
        several.sort()
        for (_, end, first, a), (start, _, second, b) in itertools.pairwise(several):
            rows += [f"{first} and {second} share memory"] if start < end and (a or b) else []
    mend = "Tie the parameter itself, head.weight = embed.weight, instead of its .data; or .clone() each."
    problems.add(ConfigError, "would train weights separately that share memory.", rows, mend)


def check_arguments(module: Any, units: Any) -> None:
    """Refuse what isn't a module, parameters that are tensor subclasses or have no shapes, and units without order."""
    if not isinstance(module, nn.Module):
        mend = "Pass an nn.Module instance, or write the functions of a Model: see fs.models.Model."
        kind = f"class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ConfigError(message(f"needs an nn.Module; got {kind}.", mend=mend))
    given = {name: p for name, p in module.named_parameters() if not _is_plain(p)}
    if given:
        rows = [f"{name} is {type(p).__name__}{'' if p.requires_grad else ', frozen'}" for name, p in given.items()]
        mend = (
            "Make the parameters plain: layer.weight = nn.Parameter(layer.weight.dequantize()), or .full_tensor() for a"
            " DTensor. For low precision pass fs.Precision(compute=...)."
        )
        rule = "needs plain parameters; a tensor subclass would become a dense tensor and lose its operators."
        raise ConfigError(message(rule, rows, mend))
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if nn.parameter.is_lazy(x)]
    if lazy:
        raise ConfigError(message("needs shapes.", lazy, "Call the module once, with inputs of the final shapes."))
    if units is not None and not isinstance(units, str | list | tuple):
        mend = "Pass the paths of modules: units='layers.*', or units=('embed', 'layers.*', ('norm', 'head'))."
        raise refuse("units= as a path, or a list of paths", units, mend)
