"""`--trace STEP`: one step of a run as each rank's chrome trace.

In: a directory, the number of a step and of a rank. Out: `trace/step-S-rank-R.json`, which Perfetto and
chrome://tracing open. Guarantee: the file appears under its name whole, when the step has ended, or never.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, supported_activities

from fsharding.base import devices

__all__ = ["traced", "traces"]


def traces(out: Path) -> Path:
    """The directory of a run's traces."""
    return out / "trace"


@contextmanager
def traced(out: Path, step: int, rank: int) -> Generator[None]:
    """Records the block, and writes its trace when it has ended without an error.

    Args:
        step: number of the step, from 1.
    """
    with profile(activities=[*supported_activities()], record_shapes=True, acc_events=True) as recorded:
        yield
        devices.synchronize()
    folder = traces(out)
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step}-rank-{rank}.json"
    part = folder / f".partial-{path.name}"
    try:
        recorded.export_chrome_trace(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
