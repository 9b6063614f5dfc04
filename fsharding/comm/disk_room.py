"""Room on disk for a state: taken before anything is written, or refused on every rank.

In: a layout and the leaves of a state in it. Out: nothing, or one error.
A step writes a new state beside the old one, so twice the bytes of a state are taken, and of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from fsharding.base import _compat
from fsharding.base.calls import public_name
from fsharding.base.errors import DiskError, message
from fsharding.comm.disk import extent_sizes, reserve
from fsharding.comm.step_agreement import compare_facts, numbers_of_all
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import refuse_differences
from fsharding.mesh.device_mesh import is_member
from fsharding.mesh.failures import is_fake_world, naming_lost
from fsharding.sharding.layout import Layout
from fsharding.sharding.named_sharding import NamedSharding

__all__ = ["Planned", "planned_extents", "take_room"]

Planned: TypeAlias = tuple[NamedSharding, tuple[int, ...], torch.dtype]
"""The sharding of a leaf, its global shape, and its dtype."""


def planned_extents(layout: Layout, leaves: Iterable[Planned]) -> list[int]:
    """Return the bytes of each extent of this rank's file, for a state and its gradients, both twice.

    Args:
        leaves: of the state; others than those on disk do not count.
    """
    on_disk = (planned for planned in leaves if planned[0].memory == "disk")
    sizes = extent_sizes((sharding.local_shape(shape), dtype) for sharding, shape, dtype in on_disk)
    for leaf in layout.leaves:
        if leaf.trainable and leaf.grads.memory == "disk":
            dtype = layout.precision.grad_dtype(layout.precision.main_dtype(leaf.init))
            shape = leaf.reduced.local_shape(leaf.shape)
            # Units are reduced one by one, so that each row of a stack may have extents of its own.
            rows = [(shape[1:], dtype)] * shape[0] if shape else []
            sizes += max(extent_sizes([(shape, dtype)]), extent_sizes(rows), key=sum)
    return 2 * sizes


def take_room(layout: Layout, leaves: Iterable[Planned]) -> None:
    """Agree on the memory of a state, and take room on every rank for what is on disk. Collective.

    Raises:
        ConfigError: on every rank: ranks keep a state in different kinds of memory.
        DiskError: on every rank: one of them has too little room.
    """
    mesh = layout.mesh
    if _compat.makes_fakes() or is_fake_world() or not is_member(mesh) or isinstance(mesh, AbstractMesh):
        return
    with naming_lost(public_name(), mesh):
        facts = {"layout.strategy.memory": ", ".join(map(str, layout.strategy.memory)) or "all on the device"}
        refuse_differences(compare_facts(facts, mesh))
        if any(choice.kind == "disk" for choice in layout.strategy.memory):
            _take_room(layout, planned_extents(layout, leaves))
        else:
            reserve([])


def _take_room(layout: Layout, sizes: Sequence[int]) -> None:
    problem = ""
    try:
        reserve(sizes)
    except DiskError as error:
        problem = str(error)
    without = [str(rank) for rank, lacks in numbers_of_all(layout.mesh, int(bool(problem))).items() if lacks]
    if problem:
        raise DiskError(problem)
    if without:
        rule = f"has too little room on the disk of rank {', '.join(without)}."
        raise DiskError(message(rule, mend="Look at what that rank says."))
