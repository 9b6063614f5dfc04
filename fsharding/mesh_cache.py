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

__all__ = ["cache_on_its_mesh", "cache_on_mesh", "kept_by"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NAME = "_fsharding_kept"
"""The attribute of a mesh; read by this name where every call would pay for a look."""


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


def cache_on_mesh(maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """As `functools.lru_cache`, of a function whose first argument is a mesh: each `DeviceMesh` has a cache.

    No other argument has another `DeviceMesh`, or that would live as long. All are given by position.

    Args:
        maxsize: of each cache; those of abstract meshes share one.
    """

    def decorate(fn: _Function) -> _Function:
        without = functools.lru_cache(maxsize)(fn)

        @functools.wraps(fn)
        def run(mesh: Any, *args: Any) -> Any:
            try:
                cached = mesh._fsharding_kept[fn]
            except (AttributeError, KeyError):
                if not isinstance(mesh, DeviceMesh):
                    return without(mesh, *args)
                cached = kept_by(mesh)[fn] = functools.lru_cache(maxsize)(functools.partial(fn, mesh))
            return cached(*args)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def cache_on_its_mesh(maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """As `cache_on_mesh`, of a function whose first argument has a `mesh`.

    Args:
        maxsize: of each cache.
    """

    def decorate(fn: _Function) -> _Function:
        without = functools.lru_cache(maxsize)(fn)

        @functools.wraps(fn)
        def run(value: Any, *args: Any) -> Any:
            try:
                cached = value.mesh._fsharding_kept[fn]
            except (AttributeError, KeyError):
                if not isinstance(value.mesh, DeviceMesh):
                    return without(value, *args)
                cached = kept_by(value.mesh)[fn] = functools.lru_cache(maxsize)(fn)
            return cached(value, *args)

        return run  # pyright: ignore[reportReturnType]

    return decorate
