"""The plan of a module as a function: its leaves and units, the roles of its layers, and the tables of its family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from fsharding.base.errors import ConfigError, report
from fsharding.interop.hf import config_tables
from fsharding.interop.module.hf_tables import Family, family_of
from fsharding.interop.module.initializers import Reset
from fsharding.interop.module.layers import LayerRoles, Roles, check_options, check_roles, layer_roles
from fsharding.interop.module.probe import unfit_roles
from fsharding.interop.module.problems import Problems, check_memory
from fsharding.interop.module.structure import Anatomy, NameTable, UnitPatterns, plan_module
from fsharding.interop.module.tensor_parallel import check_axes
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.leaf_plan import EXPERT, type_text
from fsharding.sharding.partition_spec import AxisRules

__all__ = ["ModulePlan", "plan_of"]


@dataclass(frozen=True)
class ModulePlan:
    """A module, and all that is planned before it is copied."""

    module: nn.Module
    anatomy: Anatomy
    roles: LayerRoles
    reset: Reset | None
    family: Family | None  # whose tables gave what the caller left out

    @functools.cached_property
    def _tried(self) -> Callable[[Collection[str], int], list[str]]:
        return functools.cache(functools.partial(unfit_roles, self.module, self.roles.roles))

    def check(self, mesh: Mesh, rules: AxisRules, over: Sequence[str] = ()) -> None:
        """Refuse a mesh over which the module cannot be cut; `over` has axes that other code computes over."""
        _check_experts(self.anatomy, mesh, rules, getattr(getattr(self.module, "config", None), "model_type", ""))
        heads = {} if self.family is None else self.family.heads_of(self.module)
        check_axes(self.anatomy, self.roles, mesh, rules, heads, tried=self._tried, over=over)


def plan_of(
    module: nn.Module,
    units: UnitPatterns | None,
    names: NameTable | None,
    roles: Roles | None,
    reset: Reset | None,
    problems: Problems,
) -> ModulePlan:
    """Plan a module, without units by the tables of its family; refuse it with every problem at once."""
    check_memory(module, problems)
    check_options(module, problems)
    check_roles(module, roles or {}, problems)
    general = names is None
    family = family_of(module) if units is None else None
    if family is not None:
        problems.refuse()  # before the family's patterns, which the caller has not written, are looked for
        units = family.units
        names = names or family.names
        roles = family.roles if roles is None else roles
        reset = reset or getattr(module, family.reset or "", None)
    assert units is not None
    anatomy = plan_module(module, units, names, problems, general=general, ragged=family is not None)
    return ModulePlan(module, anatomy, layer_roles(module, roles or {}), reset, family)


def _check_experts(anatomy: Anatomy, mesh: Mesh, rules: AxisRules, family: str) -> None:
    """Refuse a mesh whose `ep` would leave all experts of a module on every rank: its own forward takes all of them."""
    # Rules without an axis for experts say that every rank has all of them, so they are accepted.
    shape = abstract(mesh)
    axes = [axis for axis in rules.get(EXPERT, ()) if axis == "ep" and shape.axis_size(axis) > 1]
    leaves = [leaf for leaf in anatomy.leaves if _is_expert(leaf.path)] if axes else []
    if not leaves:
        return
    ep = shape.axis_size("ep")
    dp = shape.axis_size("dp")
    rows = [f"{leaf.path} is {type_text(leaf.shape, leaf.dtype)}" for leaf in leaves]
    mend = f"Use ep=1, and dp={ep * dp} for these ranks: the module's own forward takes all experts."
    if family in [*config_tables.FAMILIES]:
        mend = (
            f"For experts over ep, read the weights of this {family} into a decoder: "
            "model = fs.models.decoder(fs.hf.config_of(folder)), then fs.hf.load(folder, layout). Or use ep=1."
        )
    rule = f"cannot shard the experts of this module over ep={ep}: every rank would gather all of them."
    raise ConfigError(report(f"fs.plan_layout {rule}", rows, mend))


def _is_expert(path: str) -> bool:
    """Whether a leaf is in routed experts; modules call experts that take every token `shared_experts`."""
    return any("expert" in part and not part.startswith("shared_") for part in path.split("."))
