"""First values that every rank holds in full: equal on all ranks of a mesh, or those of its first rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, _functorch
from fsharding.base.calls import public_name
from fsharding.base.errors import ArgumentError, ConfigError, message
from fsharding.comm.step_agreement import compare_facts, numbers_of_all
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.consistency import checksum, differences, digest
from fsharding.mesh.device_mesh import Mesh, abstract, everyone, is_member
from fsharding.mesh.failures import among, is_fake_world, naming_lost
from fsharding.sharding.leaf_plan import type_text
from fsharding.sharding.named_sharding import home_of, local_of, typeof
from fsharding.sharding.random import LazyTensor
from fsharding.train.buffers import sync_buffers

__all__ = ["Sync", "holders", "same_replicas", "same_values"]

Sync: TypeAlias = Literal["rank0"]
"""Whose values every rank gets where ranks may have different ones: those of the first rank of the mesh."""

_SAME_DRAWS = (
    "Draw from the key alone: fs.random.normal(key, shape) is the same on every rank, whatever torch.manual_seed says"
    " there; or give every rank the same key and tensors."
)
_OR_SYNC = ' Or pass sync="rank0", which sends the values of rank 0 to all.'
_SAME_MODULES = "Build the module from one seed or file on every rank: torch.manual_seed(0) before it is made."


def same_values(
    named: Mapping[str, Any],
    mesh: Mesh,
    sync: Sync | None = None,
    facts: Mapping[str, str] | None = None,
    mend: str = _OR_SYNC,
) -> Callable[[Any], Any]:
    """Refuse ranks with different values, keys of lazy leaves, or facts. Collective."""
    if sync not in (None, "rank0"):
        known = 'Give sync="rank0", which sends the values of the first rank of the mesh to all; None compares them.'
        raise ArgumentError(message(f"got sync={sync!r}.", mend=known))
    if _is_alone(mesh):
        return _kept
    assert isinstance(mesh, DeviceMesh)
    told = {path: _told(x, held=sync is not None) for path, x in named.items()}
    with naming_lost(public_name(), mesh):
        answers = compare_facts({"sync": repr(sync), **(facts or {}), **told}, mesh)
    if rows := differences(answers, each=True):
        different = [x for name, x in named.items() if len({own.get(name) for own in answers.values()}) > 1]
        raise ConfigError(message("got other first values on different ranks.", rows, _mend(different, sync, mend)))
    return _kept if sync is None else functools.partial(_received, mesh=mesh)


def same_replicas(leaves: Mapping[str, Tensor], mesh: Mesh, *, asked: bool = True) -> None:
    """Refuse ranks that hold the same part of a leaf with different values. Collective."""
    if _is_alone(mesh) or not any(numbers_of_all(mesh, int(asked)).values()):
        return
    facts: dict[tuple[str, ...], dict[str, str]] = {}
    for path, x in leaves.items():
        axes = _cut_over(x, mesh)
        if math.prod(map(abstract(mesh).axis_size, axes)) < abstract(mesh).size:
            facts.setdefault(axes, {})[path] = f"{typeof(x)} of checksum {checksum(local_of(x)):016x}"
    classes = {axes: holders(abstract(mesh), axes) for axes in sorted(facts)}
    with naming_lost(public_name(), mesh):
        numbers = {axes: numbers_of_all(mesh, digest(facts[axes])) for axes in classes}
        if not any(len({numbers[axes][rank] for rank in same}) > 1 for axes in classes for same in classes[axes]):
            return
        ranks = everyone(mesh)
        answers: list[Any] = [None] * ranks.size
        with among(ranks.ranks):
            dist.all_gather_object(answers, facts, group=ranks.process_group)
    of_rank = dict(zip(ranks.ranks, answers, strict=True))
    rows = [
        row
        for axes in classes
        for same in classes[axes]
        for row in differences({rank: of_rank[rank][axes] for rank in same}, each=True)
    ]
    mend = 'Make leaves of full tensors: fs.shard compares them, and sends those of rank 0 with sync="rank0".'
    raise ConfigError(message("got other values of the same leaves on different ranks.", rows, mend))


def _is_alone(mesh: Mesh) -> bool:
    """Whether there are no values, or no other ranks, to compare."""
    if not isinstance(mesh, DeviceMesh) or not is_member(mesh) or _compat.makes_fakes() or _functorch.in_functorch():
        return True
    return everyone(mesh).process_group is None or is_fake_world()


def _told(x: Any, *, held: bool) -> str:
    """Return a text that ranks with the same value share; only the type of a value that is held, if so asked."""
    # A lazy draw is described by its key and distribution.
    if isinstance(x, LazyTensor):
        return repr(x)
    if held or (isinstance(x, Tensor) and (x.is_meta or _compat.is_fake(x))):
        return type_text(tuple(x.shape), x.dtype)
    if isinstance(x, Tensor):
        return f"{type_text(tuple(x.shape), x.dtype)} of checksum {checksum(x):016x}"
    described = getattr(x, "described", None)
    return type(x).__name__ if described is None else described()


def _mend(different: Sequence[Any], sync: Sync | None, more: str) -> str:
    """Return the edit that makes values the same."""
    if sync is not None or not different or any(isinstance(x, LazyTensor) for x in different):
        return _SAME_DRAWS
    return (_SAME_DRAWS if all(isinstance(x, Tensor) for x in different) else _SAME_MODULES) + more


def _kept(x: Any) -> Any:
    return x


@torch.no_grad()
def _received(x: Any, *, mesh: DeviceMesh) -> Any:
    """Return the first rank's value of a leaf on the CPU, or where the leaf is. Collective."""
    # Lazy draws follow from their keys, which are the same on all ranks.
    if isinstance(x, LazyTensor):
        return x
    home = x.device if isinstance(x, Tensor) and not x.is_meta else torch.device("cpu")
    if everyone(mesh).index == 0:
        full = x[tuple(slice(0, size) for size in x.shape)].detach().contiguous()
    else:
        full = torch.empty(tuple(x.shape), dtype=x.dtype)
    if not full.numel():
        return full.to(home)
    return sync_buffers({"": full.to(mesh.device_type)}, mesh)[""].to(home)


def _cut_over(x: Tensor, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks hold different parts of a leaf, or terms of it."""
    if not isinstance(x, DTensor):
        return ()
    home = home_of(x)
    used = {*home.spec.all_axes, *home.partial, *(a.axis for a in home.assigned)}
    shape = abstract(mesh)
    return tuple(axis for axis in shape.names if axis in used and shape.axis_size(axis) > 1)


def holders(shape: AbstractMesh, apart: Sequence[str]) -> list[list[int]]:
    """Return the sets of ranks that have the same coordinates along the axes `apart`."""
    first = [shape.names.index(axis) for axis in apart]
    places = torch.tensor(shape.members).view(shape.sizes).movedim(first, [*range(len(first))])
    return places.reshape(places.shape[: len(first)].numel(), -1).tolist()
