"""Rounds of a benchmark: contenders take turns in the same processes, and are compared by their medians.

In: named functions that do one step each. Out: the time of each step, the slowest rank's, and what each step returned.
Guarantee: everyone runs once before anyone runs again, so that a noisy machine hits all alike; and after each other one
equally often, since what a step leaves behind, such as cold caches, is paid for by the next.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from fsharding.base import devices
from fsharding.contrib.shared_memory import segments
from fsharding.mesh.device_mesh import own_rank

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
    "print_rows",
    "say",
    "take_turns",
]

WIDTH = 80
"""Columns of a terminal that tables and lines of progress fit into."""

_BORDER = 3
"""Columns that a table has beside the text of each of its own."""


class Steps(NamedTuple):
    """The counted steps of one contender.

    Attributes:
        times: milliseconds of each, on the slowest rank.
        losses: the losses of each contender, after those of its warm-up.
    """

    times: list[float]
    losses: list[float]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.times)

    @property
    def iqr(self) -> float:
        """Milliseconds between the quartiles; 0 for a single step."""
        if len(self.times) < 2:
            return 0.0
        quarters = statistics.quantiles(self.times, n=4)
        return quarters[2] - quarters[0]


def take_turns(contenders: Mapping[str, Callable[[], Tensor]], rounds: int, *, warm_up: int = 2) -> dict[str, Steps]:
    """Runs one step of each contender in turn. Collective.

    Args:
        contenders: each does one step and returns its loss, this rank's or everyone's (0-d).
        warm_up: steps of each before them.

    Returns:
        Times and losses, the losses as means over all ranks.
    """
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
    """The order of a round: a row of a balanced Latin square (Williams 1949).

    In as many rounds as there are names, or twice as many if their number is odd, everyone comes directly after each
    other one equally often, and is first equally often.
    """
    n = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(n)]
    order = [names[(place + number) % n] for place in zigzag]
    return order[::-1] if n % 2 and number % 2 else order


def counted_rounds(rounds: int, warm_up: int, title: str) -> Generator[int]:
    """The numbers of all rounds, from 0; between them rank 0 says on standard error how many there are still to come.

    On a terminal that is a bar; elsewhere lines: one before the warm-up, one after it with the seconds that the rounds
    will take if each takes as long as the last of the warm-up, and then one for each fifth of the rounds.

    Args:
        warm_up: rounds before them, at least 1.
    """
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
    """Asserts that everyone has the losses of the first one, step by step, as far as each of them goes.

    Args:
        tolerance: by how much two may differ, as a share of the first one's.
    """
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
    """The facts that the figures of a run depend on."""
    return {
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": devices.name_of(devices.accelerator()),
        "threads": torch.get_num_threads(),
    }


def print_rows(title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any], *, as_json: bool) -> None:
    """Print one JSON object of the machine and all rows, or tables of some of what is in them.

    Columns that do not fit into `WIDTH` are in further tables, which repeat the first column.

    Args:
        columns: by name, what a row has there.
    """
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
    """The cell of a number of a row, divided by a scale; "-" where a row has none.

    Args:
        name: of the number in a row.
        scale: such as 2**20 for bytes in MiB.
    """
    return lambda row: f"{row[name] / scale:.{digits}f}" if row[name] is not None else "-"


def _fitting(widths: Mapping[str, int]) -> list[list[str]]:
    """The columns of each table."""
    first, *rest = widths
    tables = [[first]]
    for name in rest:
        if _width(widths, (*tables[-1], name)) > WIDTH and len(tables[-1]) > 1:
            tables.append([first])
        tables[-1].append(name)
    return tables


def _width(widths: Mapping[str, int], names: Iterable[str]) -> int:
    """The width of a table of these columns, with its borders."""
    return sum(widths[name] + _BORDER for name in names) + 1


def allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Runs a function, and says what it allocated: bytes that are still there at its end, and most bytes at once.

    On an accelerator these are the allocator's own counts. On the CPU they are what the profiler heard of the
    allocator, and the peak includes shared memory in use, which no allocator sees.
    """
    if devices.device_count():
        devices.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        devices.synchronize()
        return torch.accelerator.memory_allocated() - before, torch.accelerator.max_memory_allocated() - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        segments.watched() as taken,
        torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile,
    ):
        run()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    heard = [(int(e.start_ns()), int(e.nbytes())) for e in events]
    rows = [(at, now - before) for (_, before), (at, now) in itertools.pairwise([(0, 0), *taken])]
    sizes = [size for _, size in sorted(heard + rows, key=lambda x: x[0])]
    return sum(size for _, size in heard), max(itertools.accumulate(sizes, initial=0))
