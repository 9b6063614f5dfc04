"""Reject URLs such as `s3://bucket/run` instead of paths: they would name local directories such as `./s3:/`."""

from __future__ import annotations

import os
import re
from typing import TypeGuard

from fsharding.base.errors import ConfigError, message

__all__ = ["URL_MEND", "check_local", "is_url"]

# One slash suffices, because `Path` merges slashes. One letter would be a drive.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

URL_MEND = (
    "Mount the storage and pass the path below its mount point, or copy files to and from a local directory. Omit"
    " file://, and pass the absolute path of a local directory whose name looks like a URL."
)


def is_url(path: object) -> TypeGuard[str | bytes | os.PathLike[str]]:
    """Return whether a path begins with the scheme of a URL; False for other objects."""
    return isinstance(path, str | bytes | os.PathLike) and _SCHEME.match(os.fsdecode(path)) is not None


def check_local(path: object) -> None:
    """Raise for a path that is a URL; other objects are left to the caller."""
    if is_url(path):
        text = f"takes paths of files and directories; got the URL {os.fsdecode(path)!r}."
        raise ConfigError(message(text, mend=URL_MEND))
