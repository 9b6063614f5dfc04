"""Reserve memory for a state in the tiers of its layout before anything is written, or raise on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.calls import public_name
from fsharding.base.tree import Tree
from fsharding.comm.step_agreement import compare_facts, numbers_of_all
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import refuse_differences
from fsharding.mesh.device_mesh import is_member
from fsharding.mesh.failures import is_fake_world, naming_lost
from fsharding.sharding.layout import Layout
from fsharding.sharding.memory_kinds import LocalLeaf, tier_named
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["Planned", "leaves_in", "take_room"]

# The sharding of a leaf, its global shape, and its dtype.
Planned: TypeAlias = tuple[NamedSharding, tuple[int, ...], torch.dtype]


def leaves_in(tier: str, layout: Layout, leaves: Iterable[Planned]) -> tuple[list[LocalLeaf], list[LocalLeaf]]:
    """Return the local shapes and dtypes that this rank keeps in a tier: of a state's leaves, and of its gradients."""
    state = [(sharding.local_shape(shape), dtype) for sharding, shape, dtype in leaves if sharding.memory == tier]
    precision = layout.precision
    grads = [
        (leaf.reduced.local_shape(leaf.shape), precision.grad_dtype(precision.main_dtype(leaf.init)))
        for leaf in layout.leaves
        if leaf.trainable and leaf.grads.memory == tier
    ]
    return state, grads


def take_room(layout: Layout, leaves: Iterable[Planned], donated: Tree = None) -> None:
    """Check that ranks agree on the tiers of a state, and reserve memory in each. Collective."""
    mesh = layout.mesh
    if _compat.makes_fakes() or is_fake_world() or not is_member(mesh) or isinstance(mesh, AbstractMesh):
        return

    # Every tier calls it exactly once, whether it lacks room or not: it is collective.
    def lacking(lacks: bool) -> list[int]:
        return [rank for rank, number in numbers_of_all(mesh, int(lacks)).items() if number]

    with naming_lost(public_name(), mesh):
        facts = {"layout.strategy.memory": ", ".join(map(str, layout.strategy.memory)) or "all on the device"}
        refuse_differences(compare_facts(facts, mesh))
        tiers = sorted({choice.kind for choice in layout.strategy.memory})
        known = [*leaves] if tiers else []  # iterating runs the optimizer's init
        freed = [_compat.local_tensor(x) for x in tree.leaves(donated) if isinstance(x, DTensor)]
        for tier in tiers:
            tier_named(tier).reserve(*leaves_in(tier, layout, known), freed, lacking)
