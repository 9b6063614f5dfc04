"""Rounds of a benchmark: contenders run in turn in the same processes and are compared by their medians.

Everyone runs once before anyone runs again, and after each other one equally often: what a step leaves behind, such as
cold caches, slows the next one.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import platform
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsharding.base import devices
from fsharding.contrib.shared_memory import segments
from fsharding.mesh.device_mesh import make_mesh, own_rank

__all__ = [
    "WIDTH",
    "Steps",
    "agree",
    "allocated",
    "cell",
    "counted_rounds",
    "give_back",
    "in_turn",
    "machine",
    "own_mesh",
    "print_rows",
    "ratio",
    "say",
    "shared_folder",
    "take_turns",
]

WIDTH = 80
"""Columns of a terminal that tables and lines of progress fit into."""

_BORDER = 3
"""Columns that a table has beside the text of each of its own."""


class Steps(NamedTuple):
    """The counted steps of one contender."""

    times: list[float]  # milliseconds, on the slowest rank
    losses: list[float]  # means over ranks; those of the warm-up first

    @property
    def median(self) -> float:
        """Return the median in milliseconds."""
        return statistics.median(self.times)

    @property
    def iqr(self) -> float:
        """Return the milliseconds between the quartiles; 0 for a single step."""
        if len(self.times) < 2:
            return 0.0
        quarters = statistics.quantiles(self.times, n=4)
        return quarters[2] - quarters[0]


@contextmanager
def own_mesh(**axes: int) -> Generator[DeviceMesh]:
    """Make a mesh of all ranks, and end its process group afterwards."""
    mesh = make_mesh(timeout=timedelta(minutes=5), **axes)  # pyright: ignore[reportArgumentType]
    try:
        yield mesh
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def shared_folder(parent: Path | None) -> Generator[Path]:
    """Make a temporary folder that all ranks use, and remove it afterwards. Collective."""
    made = [tempfile.mkdtemp(prefix="fsharding-bench-", dir=parent)] if own_rank() == 0 else [""]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    try:
        yield Path(made[0])
    finally:
        _meet()
        shutil.rmtree(made[0], ignore_errors=True)


def take_turns(contenders: Mapping[str, Callable[[], Tensor]], rounds: int, *, warm_up: int = 2) -> dict[str, Steps]:
    """Run one step of each contender in turn; each returns its loss, 0-d, of this rank or of all. Collective."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[Tensor]] = {name: [] for name in contenders}
    for number in counted_rounds(rounds, warm_up, ", ".join(contenders)):
        for name in in_turn([*contenders], number):
            _meet()
            began = time.perf_counter()
            losses[name].append(contenders[name]().detach())
            _finish(losses[name][-1])
            if number >= warm_up:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: Steps(_slowest(times[name]), _mean(losses[name])) for name in contenders}


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: a row of a balanced Latin square (Williams 1949)."""
    # In len(names) rounds, or twice as many if that is odd, each comes directly after each other one equally often.
    n = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(n)]
    order = [names[(place + number) % n] for place in zigzag]
    return order[::-1] if n % 2 and number % 2 else order


def counted_rounds(rounds: int, warm_up: int, title: str) -> Generator[int]:
    """Yield the numbers of all rounds; rank 0 shows the progress on standard error, as a bar or a few lines."""
    total = warm_up + rounds
    if own_rank():
        yield from range(total)
        return
    console = Console(stderr=True)
    line = (lambda _: None) if console.is_terminal else say
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{title}: warming up", total=total)
        line(f"{title}: {warm_up} round{'s' * (warm_up > 1)} to warm up, then {rounds}")
        for number in range(total):
            began = time.perf_counter()
            yield number
            seconds = time.perf_counter() - began
            done = number + 1 - warm_up
            bar.update(task, advance=1, description=title if done >= 0 else f"{title}: warming up")
            if done == 0:
                line(f"{title}: about {max(1.0, seconds * rounds):,.0f} s")
            elif done > 0 and done < rounds and done * 5 // rounds > (done - 1) * 5 // rounds:
                line(f"{title}: round {done} of {rounds}")


def say(text: str) -> None:
    """Print a line on standard error, on rank 0; a long one is wrapped."""
    if own_rank() == 0:
        print(textwrap.fill(text, WIDTH, subsequent_indent="  "), file=sys.stderr, flush=True)


def agree(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Assert that all have the losses of the first one, step by step, within a relative tolerance."""
    first, expected = next(iter(losses.items()))
    for name, result in losses.items():
        for step, (a, b) in enumerate(zip(expected, result, strict=False)):
            assert abs(a - b) <= tolerance * abs(a), f"step {step}: {name} has a loss of {b}, {first} of {a}"


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _finish(loss: Tensor) -> None:
    if not loss.is_cpu:
        devices.synchronize()


def _slowest(times: Sequence[float]) -> list[float]:
    result = torch.tensor(times, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.tolist()


def _mean(losses: Sequence[Tensor]) -> list[float]:
    result = torch.stack(list(losses)).double().cpu()
    if dist.is_initialized():
        dist.all_reduce(result)
        result /= dist.get_world_size()
    return result.tolist()


def give_back() -> None:
    """Return freed memory to the system if the C library can, so that each contender pays for its own pages."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def machine() -> dict[str, Any]:
    """Return the facts that the figures of a run depend on."""
    return {
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": devices.name_of(devices.accelerator()),
        "threads": torch.get_num_threads(),
    }


def print_rows(title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any], *, as_json: bool) -> None:
    """Print, on rank 0, one JSON object of the machine and all rows, or tables that fit `WIDTH`."""
    if own_rank():
        return
    if as_json:
        print(json.dumps({"machine": machine(), "rows": list(rows)}), flush=True)
        return
    shown = {name: [show(row) for row in rows] for name, show in columns.items()}
    widths = {name: max(map(len, (name, *cells))) for name, cells in shown.items()}
    for i, names in enumerate(_fitting(widths)):
        table = Table(title=title if i == 0 else None)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in zip(*(shown[name] for name in names), strict=True):
            table.add_row(*cells)
        Console(width=max(WIDTH, _width(widths, names))).print(table)


def cell(name: str, digits: int, scale: float = 1) -> Callable[[dict[str, Any]], str]:
    """Format a number of a row, divided by a scale such as 2**20 for MiB; "-" if it is None."""
    return lambda row: f"{row[name] / scale:.{digits}f}" if row[name] is not None else "-"


def ratio(rows: Sequence[Mapping[str, Any]], name: str, peer: str) -> Callable[[dict[str, Any]], str]:
    """Format a number of a row over the number of a peer; "-" if the peer does not take part."""
    of_peer = next((row[name] for row in rows if row["contender"] == peer), None)
    return lambda row: f"{row[name] / of_peer:.2f}" if of_peer else "-"


def _fitting(widths: Mapping[str, int]) -> list[list[str]]:
    """Return the columns of each table; each repeats the first column."""
    first, *rest = widths
    tables = [[first]]
    for name in rest:
        if _width(widths, (*tables[-1], name)) > WIDTH and len(tables[-1]) > 1:
            tables.append([first])
        tables[-1].append(name)
    return tables


def _width(widths: Mapping[str, int], names: Iterable[str]) -> int:
    """Return the width of a table of these columns, with its borders."""
    return sum(widths[name] + _BORDER for name in names) + 1


@contextmanager
def _taken_blocks() -> Generator[list[tuple[int, int]]]:
    """Record (ns since the epoch, bytes in use here or by readers) whenever a block of shared memory comes into use."""
    # Blocks freed meanwhile show at the next record.
    log = list[tuple[int, int]]()

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = call(*args)
            log.append((time.time_ns(), sum(block.used for block in segments.blocks() if block.in_use())))
            return result

        return run

    with patch.multiple(segments, take=noting(segments.take), use=noting(segments.use)):
        yield log


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Run a function; return the bytes that it left allocated, and the most bytes at once."""
    if devices.device_count():
        devices.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        devices.synchronize()
        return torch.accelerator.memory_allocated() - before, torch.accelerator.max_memory_allocated() - before
    # On the CPU the profiler reports allocations. Shared memory, which no allocator sees, counts for the peak alone.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        _taken_blocks() as taken,
        torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile,
    ):
        run()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    heard = [(int(e.start_ns()), int(e.nbytes())) for e in events]
    rows = [(at, now - before) for (_, before), (at, now) in itertools.pairwise([(0, 0), *taken])]
    sizes = [size for _, size in sorted(heard + rows, key=lambda x: x[0])]
    return sum(size for _, size in heard), max(itertools.accumulate(sizes, initial=0))
