"""The version of this package, without importing torch."""

import functools
from importlib import metadata

__all__ = ["own_version"]


@functools.cache
def own_version() -> str:
    """Return the installed version; "unknown" for a source tree that isn't installed."""
    # Cached: `metadata` itself would remember an empty result of a directory that was unreadable for a moment.
    try:
        return metadata.version("fsharding")
    except metadata.PackageNotFoundError:
        return "unknown"
