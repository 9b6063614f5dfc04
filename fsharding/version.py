"""The version of this package.

In: the metadata of the installation. Out: a text. The command line prints it, and checkpoints have it.
Law: no torch is imported here.
"""

from importlib import metadata

__all__ = ["own_version"]


def own_version() -> str:
    """The version that is installed; "unknown" where the package is not, as in a bare copy of its source."""
    try:
        return metadata.version("fsharding")
    except metadata.PackageNotFoundError:
        return "unknown"
