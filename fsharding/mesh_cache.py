"""Caches that live as long as a mesh: results of functions of a `DeviceMesh`, kept in the mesh itself.

In: a function of a mesh, or of values on one. Out: the same function, which computes once for each mesh.
A cache keyed by meshes would keep them alive, also one with weak keys, as most results hold the mesh that they are of.
Law: a mesh that nobody uses is collected with its results, and no mesh is given those of another one that is equal.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["cache_on_mesh", "kept_by"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = "_fsharding_kept"


class _Kept(dict[Hashable, Any]):
    """What a mesh keeps. A copy of the mesh, such as one in a file, begins without any."""

    def __reduce__(self) -> Any:
        return OrderedDict, ()


def kept_by(mesh: DeviceMesh) -> dict[Hashable, Any]:
    """What a mesh keeps, by whatever name; values may hold the mesh."""
    kept = vars(mesh).get(_NAME)
    if type(kept) is not _Kept:
        kept = vars(mesh)[_NAME] = _Kept()
    return kept


def cache_on_mesh(mesh_of: Callable[..., Any], maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """As `functools.lru_cache`, with a cache for each `DeviceMesh`, and one for all else.

    Args:
        mesh_of: the mesh of the function's arguments, which are given by position. No argument has another one, or it
            would live as long.
        maxsize: of each cache.
    """

    def decorate(fn: _Function) -> _Function:
        without = functools.lru_cache(maxsize)(fn)

        @functools.wraps(fn)
        def run(*args: Any) -> Any:
            mesh = mesh_of(*args)
            if not isinstance(mesh, DeviceMesh):
                return without(*args)
            kept = kept_by(mesh)
            cached = kept.get(fn)
            if cached is None:
                cached = kept[fn] = functools.lru_cache(maxsize)(fn)
            return cached(*args)

        return run  # pyright: ignore[reportReturnType]

    return decorate
