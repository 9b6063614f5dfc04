"""The version of this package.

Guarantee: no torch is imported here.
"""

import functools
from importlib import metadata

__all__ = ["own_version"]


@functools.cache
def own_version() -> str:
    """The version that is installed; "unknown" where the package is not, as in a bare copy of its source."""
    # It is looked up once: metadata remembers an empty list for a folder that could not be read at the moment.
    try:
        return metadata.version("fsharding")
    except metadata.PackageNotFoundError:
        return "unknown"
