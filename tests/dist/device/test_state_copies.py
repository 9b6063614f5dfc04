"""Moments on the host, copied in during backward and out during the next step, on the simulated device with delays.

Guarantee: a state is a value at any time. However it is read, saved, compared or used again while its copies are in
flight, and whatever fails meanwhile, it has the bits of a state that was waited for, and no step needs more memory.
"""

import copy
import functools
import gc
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from bench.copies import times_of
from fsharding.base.errors import NonFiniteError
from fsharding.optim import state_copies, windows
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import device_mesh
from fsharding.train import step as train_step
from fsharding.train.in_flight import copies_in_flight
from fsharding.train.timeline import Rates
from tests.decoders import DecoderCase
from tests.helpers import bits
from tests.on_device import SIM, device_ranks, needs_compiler, on_device, small_windows

pytestmark = [pytest.mark.timeout(1300), needs_compiler]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=4)
BASE = DecoderCase(
    CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=32, strategy=fs.zero(3).with_memory(moments="host"), steps=4
)


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def numbers_of(state):
    return {name: local_of(x).cpu().clone() for name, x in fs.tree.named_leaves(bits(state)).items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def waiting():
    """Steps whose host waits for all copies."""
    return patch.object(train_step, "copies_of", lambda layout: state_copies.AT_ONCE)


def begun(case, loss=None, check=None):
    """A mesh, batches, a state and a step after two steps, whose copies are in flight."""
    mesh = device_mesh(case.mesh, SIM)
    batches = [{name: x.to(SIM) for name, x in case.batch(i, mesh).items()} for i in range(case.steps)]
    state, step = case.start(mesh, fs.adamw(3e-3, eps=1e-3))
    if loss is not None:
        step = fs.make_train_step(
            loss(fs.model_loss(case.model)), fs.adamw(3e-3, eps=1e-3), donate=case.donate, check=check
        )
    for batch in batches[:2]:
        state, _ = step(state, batch)
    return batches, state, step


MAIN = replace(BASE, strategy=fs.zero(3).with_memory(main="host", moments="host"), precision=fs.BF16, donate=True)


def read_in_each_way(case):
    """The ways to read a state with late copies that give other values than a state that was waited for."""
    with on_device(SIM), small_windows(), waiting():
        _, state, _ = begun(case)
        assert copies_in_flight(state) is None
        right = numbers_of(state)
    ways = {
        "fields": lambda state: state,
        "replace": lambda state: state.replace(loss_scale=None),
        "donate": lambda state: state.donate(),
        "copy": copy.copy,
        "map": lambda state: fs.tree.map(lambda x: x, state),
        "reshard": lambda state: fs.reshard(fs.reshard(state, away(state)), state.layout),
    }
    found = []
    for name, way in ways.items():
        with on_device(SIM, seed=3, microseconds=2000), small_windows():
            _, state, _ = begun(case)
            assert copies_in_flight(state) is not None, name
            if not equal(numbers_of(way(state)), right):
                found.append(name)
    return found


def away(state):
    return state.layout.with_strategy(replace(state.layout.strategy, memory=()))


@pytest.mark.parametrize("case", [BASE, replace(BASE, donate=True), MAIN], ids=["kept", "donated", "main"])
def test_a_state_whose_copies_are_late_is_read_whole(pool, case):
    assert pool.run(read_in_each_way, case) == [[], []]


def repeated():
    """Whether a step from a state gives its bits again after a step from a later state."""
    with on_device(SIM, seed=5, microseconds=2000), small_windows():
        batches, state, step = begun(BASE)
        first, _ = step(state, batches[2])
        later, _ = step(first, batches[3])
        again, _ = step(state, batches[2])
        return equal(numbers_of(first), numbers_of(again)) and not equal(numbers_of(first), numbers_of(later))


def test_steps_are_repeated_from_any_state(pool):
    assert pool.run(repeated) == [True, True]


class Stopped(Exception):
    pass


def failing(kind, on_rank):
    """A loss that fails at its third call: in forward, in backward, or by a NaN, which the host reads at once or later."""

    def loss(inner):
        calls = []

        def fails(params, batch):
            total, count = inner(params, batch)
            calls.append(None)
            if len(calls) != 3 or not on_rank:
                return total, count
            if kind == "forward":
                raise Stopped
            if kind == "backward":
                total.register_hook(stop)
            return (total * float("nan") if kind.endswith("nan") else total), count

        return fails

    return loss


def stop(grad):
    raise Stopped


def loss_of_step(step, state, batch):
    """The loss once the device has computed it, which raises if the step was refused."""
    _, metrics = step(state, batch)
    torch.accelerator.synchronize()
    return float(metrics.loss)


def after_a_failure(kind, everywhere):
    """Bits after a step that failed while copies were in flight, and was then run again, beside a run without it."""
    with on_device(SIM, seed=7), small_windows(), waiting():
        batches, state, step = begun(BASE, lambda inner: inner)
        before = numbers_of(state)
        right, _ = step(state, batches[2])
        right = numbers_of(right)
    with on_device(SIM, seed=7, microseconds=1000), small_windows():
        on_rank = everywhere or torch.distributed.get_rank() == 1
        batches, state, step = begun(BASE, failing(kind, on_rank), "sync" if kind == "read nan" else None)
        with pytest.raises((Stopped, NonFiniteError)):
            loss_of_step(step, state, batches[2])
        kept = equal(numbers_of(state), before)
        step = fs.make_train_step(fs.model_loss(BASE.model), fs.adamw(3e-3, eps=1e-3))
        after, _ = step(state, batches[2])
        return kept and equal(numbers_of(after), right)


@pytest.mark.parametrize(
    ("kind", "everywhere"), [("forward", True), ("backward", True), ("nan", True), ("nan", False), ("read nan", False)]
)
def test_a_step_that_fails_leaves_a_whole_state(pool, kind, everywhere):
    """`Stopped` stands for Ctrl-C; a NaN may be on one rank alone."""
    assert pool.run(after_a_failure, kind, everywhere) == [True, True]


def peaks(at_once):
    """The peak of a third step, and what is allocated once its copies are done."""
    with on_device(SIM), small_windows():
        torch.accelerator.synchronize()
        gc.collect()
        before = torch.accelerator.memory_allocated()
        with waiting() if at_once else nullcontext():
            batches, state, step = begun(replace(BASE, donate=True))
            torch.accelerator.reset_peak_memory_stats()
            state, _ = step(state, batches[2])
        peak = torch.accelerator.max_memory_allocated() - before
        assert state.opt_state is not None
        del step
        gc.collect()
        return peak, torch.accelerator.memory_allocated() - before


def test_copies_in_flight_need_no_more_memory(pool):
    """At most a window more; and none once the host has read the state."""
    for (peak, held), (of_waiting, held_then) in zip(pool.run(peaks, False), pool.run(peaks, True), strict=True):
        assert peak <= of_waiting + 4 * (1 << 12), (peak, of_waiting)
        assert abs(held - held_then) <= 1 << 12, (held, held_then)


def seconds():
    """The seconds of a step at given rates: without host memory, with moments there, and with a host that waits; on one rank alone."""
    rates = Rates(flops=5e11, memory=1e10, link=1e9, latency=1e-6, host=3e7)
    model = fs.models.decoder(CONFIG)
    tokens = torch.empty(8, 256, dtype=torch.int64, device="meta")
    times = functools.partial(times_of, model, rates=rates, ranks=2, tokens=tokens)
    if torch.distributed.get_rank():
        return None
    with on_device(SIM), patch.object(windows, "WINDOW_BYTES", 1 << 15):
        nothing, moments = times({}), times({"moments": "host"})
        with waiting():
            return nothing.step, moments.step, times({"moments": "host"}).step


def test_copies_are_hidden(pool):
    nothing, moments, at_once = pool.run(seconds, timeout=600)[0]
    assert moments <= 1.02 * nothing and at_once >= 1.1 * nothing, (nothing, moments, at_once)


class OnHost(TorchDispatchMode):
    """Operators that compute on the host alone, with more elements than numbers that ranks compare."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        taken, made = ([x for x in fs.tree.leaves(xs) if isinstance(x, torch.Tensor)] for xs in ([*args], [result]))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        computes = "empty" not in func.name() and not is_view
        if computes and all(x.is_cpu for x in (*taken, *made)) and any(x.numel() > 200 for x in made):
            self.names.add(func.name())
        return result


def computed_on_host(level, memory):
    strategy = fs.zero(level).with_memory(**dict.fromkeys(memory, "host"))
    case = replace(BASE, strategy=strategy, precision=fs.BF16, donate=True, microbatches=2)
    with on_device(SIM), small_windows():
        batches, state, step = begun(case)
        with OnHost() as seen:
            step(state, batches[2])
        return seen.names


@pytest.mark.parametrize("memory", [("main", "moments"), ("params", "main", "moments", "grads")])
@pytest.mark.parametrize("level", [1, 3])
def test_the_host_computes_nothing(pool, level, memory):
    """It took half a second to cast 956 M main parameters, for which the device waited."""
    assert pool.run(computed_on_host, level, memory) == [set(), set()]
