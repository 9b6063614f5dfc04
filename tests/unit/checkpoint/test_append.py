"""Rows of a log are appended whole or not at all."""

import os
import resource

import pytest

from fsharding.checkpoint.directory import append


def test_what_a_full_disk_took_of_a_row_is_cut_off(tmp_path):
    path, before = tmp_path / "rows", resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("ab", buffering=0) as file:
        append(file.fileno(), b"x" * 60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                append(file.fileno(), b"y" * 60)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_bytes() == b"x" * 60
        append(file.fileno(), b"z")
    assert path.read_bytes() == b"x" * 60 + b"z"
    assert os.listdir(tmp_path) == ["rows"]
