"""First values that every rank holds in full: compared between the ranks of a mesh, or sent by its first rank."""

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
"""The rank whose values all ranks get: the first of the mesh."""

Received: TypeAlias = Callable[[Any], Any]
"""Maps a leaf to the value that all ranks start from: itself, or the first rank's. Then it is collective."""

_SAME_DRAWS = (
    "Draw from the key alone: fs.random.normal(key, shape) is the same on every rank, whatever the seed of torch; or"
    " give every rank the same key and tensors."
)
_OR_SYNC = ' Or pass sync="rank0", which sends the values of rank 0 to all.'
_SAME_MODULES = "Build the module from one seed or file on every rank: torch.manual_seed(0) before it is made."


def same_values(
    named: Mapping[str, Any],
    mesh: Mesh,
    sync: Sync | None = None,
    facts: Mapping[str, str] | None = None,
    mend: str = _OR_SYNC,
) -> Received:
    """Refuse ranks with different values, keys of lazy leaves, or facts. Collective."""
    if sync not in (None, "rank0"):
        mend = 'Give sync="rank0", which sends the values of the first rank of the mesh to all; None compares them.'
        raise ArgumentError(message(f"got sync={sync!r}.", mend=mend))
    if _is_alone(mesh):
        return _kept
    assert isinstance(mesh, DeviceMesh)
    texts = {path: _described(x, only_type=sync is not None) for path, x in named.items()}
    with naming_lost(public_name(), mesh):
        answers = compare_facts({"sync": repr(sync), **(facts or {}), **texts}, mesh)
    if rows := differences(answers, each=True):
        different = [x for name, x in named.items() if len({own.get(name) for own in answers.values()}) > 1]
        raise ConfigError(message("got different first values on different ranks.", rows, _mend(different, sync, mend)))
    return _kept if sync is None else functools.partial(_received, mesh=mesh)


def same_replicas(leaves: Mapping[str, Tensor], mesh: Mesh, *, asked: bool = True) -> None:
    """Refuse ranks that hold the same shard with different values. Collective."""
    # Checksums are compared in two steps: one number per set of axes, and only if two differ every leaf's text. A rank
    # that has nothing to ask takes part, since it can't know whether others do.
    if _is_alone(mesh) or not any(numbers_of_all(mesh, int(asked)).values()):
        return
    facts: dict[tuple[str, ...], dict[str, str]] = {}
    for path, x in leaves.items():
        axes = _sharded_over(x, mesh)
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
    raise ConfigError(message("got different values of the same leaves on different ranks.", rows, mend))


def _is_alone(mesh: Mesh) -> bool:
    """Return whether there are no values, or no other ranks, to compare."""
    if not isinstance(mesh, DeviceMesh) or not is_member(mesh) or _compat.makes_fakes() or _functorch.in_functorch():
        return True
    return everyone(mesh).process_group is None or is_fake_world()


def _described(x: Any, *, only_type: bool) -> str:
    """Return a text that is equal on ranks with equal values, or with equal types if the values are to be sent."""
    # A lazy tensor follows from its key and distribution, which its repr contains.
    if isinstance(x, LazyTensor):
        return repr(x)
    if only_type or (isinstance(x, Tensor) and (x.is_meta or _compat.is_fake(x))):
        return type_text(tuple(x.shape), x.dtype)
    if isinstance(x, Tensor):
        return f"{type_text(tuple(x.shape), x.dtype)} of checksum {checksum(x):016x}"
    described = getattr(x, "described", None)
    return type(x).__name__ if described is None else described()


def _mend(different: Sequence[Any], sync: Sync | None, more: str) -> str:
    """Return the edit that makes values equal."""
    if sync is not None or not different or any(isinstance(x, LazyTensor) for x in different):
        return _SAME_DRAWS
    return (_SAME_DRAWS if all(isinstance(x, Tensor) for x in different) else _SAME_MODULES) + more


def _kept(x: Any) -> Any:
    return x


@torch.no_grad()
def _received(x: Any, *, mesh: DeviceMesh) -> Any:
    """Return the first rank's value of a leaf on the leaf's device; on the CPU for a meta tensor. Collective."""
    # Lazy tensors follow from their keys, which are equal on all ranks.
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


def _sharded_over(x: Tensor, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which ranks hold different shards of a leaf, or different partial sums."""
    if not isinstance(x, DTensor):
        return ()
    home = home_of(x)
    used = {*home.spec.all_axes, *home.partial, *(a.axis for a in home.assigned)}
    shape = abstract(mesh)
    return tuple(axis for axis in shape.names if axis in used and shape.axis_size(axis) > 1)


def holders(shape: AbstractMesh, apart: Sequence[str]) -> list[list[int]]:
    """Return the sets of ranks with equal coordinates along the axes `apart`."""
    first = [shape.names.index(axis) for axis in apart]
    places = torch.tensor(shape.members).view(shape.sizes).movedim(first, [*range(len(first))])
    return places.reshape(places.shape[: len(first)].numel(), -1).tolist()
