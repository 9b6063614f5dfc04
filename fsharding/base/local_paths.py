"""Paths and URLs: a path with a scheme, such as `s3://bucket/run`, is refused, since it would name a local directory.

Guarantee: no call of ours reads or writes `./s3:/`.
"""

from __future__ import annotations

import os
import re

from fsharding.base.errors import ConfigError, message

__all__ = ["URL_MEND", "check_local", "is_url"]

# `Path` joins slashes that follow each other, so one is enough. A scheme of one letter would be a drive.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

URL_MEND = (
    "Mount the storage and give the path below its mount point, or copy files between it and a local directory; file://"
    " is left out. A local directory whose name looks like a URL needs its absolute path."
)
"""What to do instead of giving a URL."""


def is_url(path: object) -> bool:
    """Whether a path begins with the scheme of a URL; False for what is no path."""
    return isinstance(path, str | bytes | os.PathLike) and _SCHEME.match(os.fsdecode(path)) is not None


def check_local(*paths: object) -> None:
    """Refuse paths that are URLs; what is no path is left to the caller."""
    for path in paths:
        if is_url(path):
            text = f"takes paths of files and directories; got the URL {os.fsdecode(path)!r}."  # pyright: ignore[reportArgumentType]
            raise ConfigError(message(text, mend=URL_MEND))
