"""What several test modules need."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from fsharding.comm import pairwise

TRANSPORTS = ["native", "pairwise", "shared_memory"]


@contextmanager
def point_to_point() -> Generator[None]:
    """Has the pairwise transport send rows of any size by sends and receives.

    A thread of gloo's own, which runs its collectives, may hold their buffers a moment longer than `wait` says; sends
    and receives end in the thread that waits.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "SHORT", -1)
        yield
