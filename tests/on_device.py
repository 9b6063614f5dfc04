"""Runs on the simulated device beside the same runs on the CPU: losses and states, what was in wrong order, what was read.

In: functions that run on ranks, a device. Out: plain values that pickle. Both sides have the kernels that the device has.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsharding as fs
from fsharding.base import _compat
from fsharding.comm import tier
from fsharding.comm.leaf_memory import in_memory
from fsharding.comm.stream_log import Row
from fsharding.optim import windows
from fsharding.pipeline.schedule import SCHEDULES
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import RankPool, device_mesh
from fsharding.train.in_flight import copies_in_flight
from tests import sim_device
from tests.decoders import DecoderCase
from tests.helpers import bits
from tests.stream_order import unjoined, violations

SIM = sim_device.NAME

needs_compiler = pytest.mark.skipif(bool(sim_device.missing()), reason=sim_device.missing() or "there is a compiler")
"""Marks a test of the device."""


class Seen(NamedTuple):
    """What a run on a device did.

    Attributes:
        numbers: losses and the like, on the CPU.
        state: all values of the state, on the CPU.
        wrong: what the streams might do too early; empty on a CPU.
        reads: lines of the library at which the host read the device.
    """

    numbers: list[Tensor]
    state: dict[str, Tensor]
    wrong: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


def same(one: Seen, other: Seen) -> bool:
    """Whether two runs have the same bits."""
    pairs = [*zip(one.numbers, other.numbers, strict=True)]
    pairs += [(x, other.state[name]) for name, x in one.state.items()]
    return one.state.keys() == other.state.keys() and all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


class Watch:
    """Logs of the steps of a run; `step` is the context of one, or of several.

    Attributes:
        leaves: Whether a step leaves copies in flight, which the host waits for.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.logs: list[sim_device.Log] = []
        self.leaves = False

    @contextmanager
    def step(self, number: int = 1) -> Generator[None]:
        """Log a step on the device; the first of a run, with number 0, moves what the host has counted there."""
        if self.device != SIM or number == 0:
            yield
            return
        with sim_device.log() as log:
            yield
        self.logs.append(log)

    def seen(self, numbers: list[Tensor], state: Any) -> Seen:
        """Gather what there is to compare."""
        rows = [log.rows for log in self.logs]
        late = {"out"} if self.leaves else set()
        wrong = [text for log in rows for text in (*violations(log), *({*unjoined(log)} - late))]
        wrong += [str(row) for log in rows for row in log if row.text == "record_stream"]
        reads = {read.line for log in self.logs for read in log.reads}
        values = {name: in_memory(local_of(x)).cpu() for name, x in fs.tree.named_leaves(bits(state)).items()}
        return Seen([x.cpu() for x in numbers], values, tuple(wrong), tuple(sorted(reads)))


@contextmanager
def on_device(device: str, seed: int | None = None, microseconds: int = 200) -> Generator[Watch]:
    """Run on ranks with the kernels that the device has, on one thread; delays of streams follow from the seed."""
    torch.set_num_threads(1)
    sim_device.join()
    late = nullcontext() if device != SIM or seed is None else sim_device.delays(microseconds, seed)
    plain = patch.object(_compat, "block_kernel", lambda device_type: "plain")
    with plain, sdpa_kernel(SDPBackend.MATH), late:
        yield Watch(device)


@contextmanager
def small_windows() -> Generator[None]:
    """Windows of an update of some leaves of a small model, or of some of their rows."""
    with patch.object(windows, "WINDOW_BYTES", 1 << 12), patch.object(tier, "_TOGETHER", 1 << 7):
        yield


@contextmanager
def device_ranks(count: int) -> Generator[RankPool]:
    """Ranks of their own: the device stays the accelerator of a process until it ends."""
    sim_device.build()
    with RankPool(count) as pool:
        yield pool


def pipelines(base: DecoderCase) -> dict[str, DecoderCase]:
    """A case for each schedule, on two stages."""
    return {
        name: replace(
            base, config=replace(base.config, layers=4), mesh=fs.AbstractMesh(("pp",), (2,)), strategy=fs.zero(3),
            schedule=name, microbatches=4, gather="microbatch" if name == "interleaved" else "step",
        )
        for name in SCHEDULES
    }  # fmt: skip


def train(
    case: DecoderCase,
    device: str,
    seed: int | None = 1,
    *,
    captured: bool = False,
    together: bool = False,
    opt: Any = None,
    **options: Any,
) -> tuple[Seen, list[list[Row]]]:
    """Train on ranks: loss, norm, weight and whether it was skipped of each step, and the logs.

    Args:
        seed: of delays; None for none.
        captured: whether steps are replays of a graph.
        together: whether the steps after the first are in one log, since copies of one run during the next.
        opt: by default that of the case.
        options: as `DecoderCase.start` takes them.
    """
    with on_device(device, seed) as watch:
        mesh = device_mesh(case.mesh, device)
        state, step = case.start(mesh, opt, **options)
        batches = [{name: x.to(device) for name, x in case.batch(i, mesh).items()} for i in range(case.steps)]
        if captured:
            step = fs.capture(step, state, batches[0])
        numbers = list[Tensor]()
        with ExitStack() as log:
            for number, batch in enumerate(batches):
                if together and number == 1:
                    log.enter_context(watch.step())
                with nullcontext() if together else watch.step(number):
                    state, metrics = step(state, batch)
                skipped = torch.as_tensor(metrics.skipped, device=device)
                numbers.append(torch.stack((metrics.loss, metrics.grad_norm, metrics.count, skipped.float())))
            if (copies := copies_in_flight(state)) is not None:
                copies.shrink()
        return watch.seen(numbers, state), [log.rows for log in watch.logs]


def assert_as_on_cpu(here: list[Seen], there: list[Seen], *, reads: bool = False) -> None:
    """Check runs of all ranks: the same bits, in safe order, and the host read nothing.

    Args:
        reads: whether the host may read the device.
    """
    for want, found in zip(here, there, strict=True):
        assert same(want, found)
        assert found.wrong == ()
        assert reads or found.reads == ()
