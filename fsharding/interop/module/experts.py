"""Expert parallelism for modules: the module's own forward computes with all experts, so `ep` cannot shard them.

Guarantee: a mesh with `ep` never gathers all experts of a module without an error.
"""

from __future__ import annotations

from fsharding.base.errors import ConfigError, report
from fsharding.interop.hf.config_tables import FAMILIES
from fsharding.interop.module.structure import Anatomy
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding.leaf_plan import EXPERT, type_text
from fsharding.sharding.partition_spec import AxisRules

__all__ = ["check_experts"]


def check_experts(anatomy: Anatomy, mesh: Mesh, rules: AxisRules, family: str | None) -> None:
    """Refuse a mesh whose `ep` would leave all experts of a module on every rank."""
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
    if family in [*FAMILIES]:
        mend = (
            f"For experts over ep, read the weights of this {family} into a decoder: "
            "model = fs.models.decoder(fs.hf.config_of(folder)), then fs.hf.load(folder, layout). Or use ep=1."
        )
    rule = f"cannot shard the experts of this module over ep={ep}: every rank would gather all of them."
    raise ConfigError(report(f"fs.plan_layout {rule}", rows, mend))


def _is_expert(path: str) -> bool:
    """Whether a leaf is in routed experts; modules call experts that take every token `shared_experts`."""
    return any("expert" in part and not part.startswith("shared_") for part in path.split("."))
