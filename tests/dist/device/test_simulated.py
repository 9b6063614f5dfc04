"""Training on a simulated asynchronous device: the bits of the CPU, whatever the delays, and no host reads.

Each rank is a process with a device of its own, whose streams are threads that run late; see `tests/sim_device`.
Guarantee: nothing depends on when a stream runs; a step reads nothing; a wait that is missing is seen.
"""

import contextlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsharding as fs
from fsharding.comm.streams import DeviceStreams
from fsharding.testing import RankPool
from tests import sim_device
from tests.helpers import full

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(sim_device.missing()), reason=sim_device.missing() or "there is a compiler"),
]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=3)
ORDERED = fs.Precision(sums="ordered")
BF16 = replace(fs.BF16, sums="ordered")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"{n} ranks")
def pool(request):
    """Ranks of their own: the device stays the accelerator of a process until it ends."""
    sim_device.build()
    with RankPool(request.param) as ranks:
        yield ranks


def trained(device, strategy, precision=ORDERED, opt="sgd", steps=3, seed=None, delay=200, **how):
    """Losses, and all parameters, after some steps on a device; delays of streams follow from the seed."""
    torch.set_num_threads(1)  # as kernels of the device have
    sim_device.join()
    opt = {"sgd": fs.sgd(0.1, momentum=0.9), "adamw": fs.adamw(1e-2)}[opt]
    model, mesh = fs.models.decoder(CONFIG), fs.make_mesh(device=device, dp=-1)
    layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, check="async" if device == sim_device.NAME else None, **how)
    rows = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    batch = fs.local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh)
    batch = {name: x.to(device) for name, x in batch.items()}
    losses = []
    late = contextlib.nullcontext() if seed is None else sim_device.delays(delay, seed)
    with late, sdpa_kernel(SDPBackend.MATH):  # other kernels of attention are the CPU's alone
        for _ in range(steps):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        return [float(loss) for loss in losses], [x.to_local().cpu() for x in fs.tree.leaves(state.params)]


def same(one, other):
    return one[0] == other[0] and all(torch.equal(x, y) for x, y in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_device_has_the_bits_of_the_cpu(pool, strategy):
    for how in ({}, {"microbatches": 2, "donate": True}):
        there = pool.run(trained, "cpu", strategy, **how)
        here = pool.run(trained, sim_device.NAME, strategy, seed=1, **how)
        assert all(map(same, there, here))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=full)], ids=["few", "many"])
def test_delays_change_no_bit(pool, strategy, seeds):
    how = {"precision": BF16, "opt": "adamw", "donate": True, "prefetch_depth": 2}
    still = pool.run(trained, sim_device.NAME, strategy, **how)
    for seed in seeds:
        assert all(map(same, still, pool.run(trained, sim_device.NAME, strategy, seed=seed, **how)))


def read(strategy, precision):
    """The host reads of the second step, each with the line that made it."""
    sim_device.join()
    model, mesh, opt = fs.models.decoder(CONFIG), fs.make_mesh(device=sim_device.NAME, dp=-1), fs.adamw(1e-2)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt)
    state = fs.init_state(
        model, opt, fs.random.key(0), fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
    )
    step = fs.make_train_step(model, opt, donate=True, microbatches=2)
    tokens = torch.zeros(4, 32, dtype=torch.int64, device=sim_device.NAME)
    batch = {"tokens": tokens, "targets": tokens}
    state, _ = step(state, batch)
    with sim_device.host_reads() as seen:
        state, _ = step(state, batch)
    return [f"{read.operator} at {read.stack[-1]}" for read in seen]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_reads_nothing(pool, strategy):
    for precision in (ORDERED, fs.BF16, fs.Precision(params=torch.float32, compute=torch.float16)):
        assert pool.run(read, strategy, precision) == [[]] * pool.size


def without(kind, strategy, seed):
    """A run in which no stream waits for events of a kind: its losses and parameters, or its error; and all kinds."""
    sim_device.join()
    kinds, record, wait = {}, DeviceStreams.record, DeviceStreams.wait

    def noted(self, of):
        event = record(self, of)
        kinds[event] = of
        return event

    def unless(self, event):
        if kinds.get(event) != kind:
            wait(self, event)

    try:
        with patch.multiple(DeviceStreams, record=noted, wait=unless):
            result = trained(sim_device.NAME, strategy, seed=seed, steps=2, microbatches=2)
    except (RuntimeError, fs.errors.FshardingError) as error:
        result = str(error)
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize()
    return result, sorted({*kinds.values()})


@pytest.mark.parametrize("kind", ["begun", "gathered", "free", "filled"])
def test_waits_that_are_missing_are_seen(kind):
    """All waits of a kind are left out: numbers change, or a task comes too late for its memory and says so."""
    sim_device.build()
    with RankPool(2) as pool:
        [(right, kinds), (other, _)] = pool.run(without, None, "zero3", 1)
        assert kind in kinds
        for seed in range(1, 9):
            found = [result for result, _ in pool.run(without, kind, "zero3", seed)]
            if not all(isinstance(x, tuple) and same(x, y) for x, y in zip(found, (right, other), strict=True)):
                return
    raise AssertionError(f"no run without the waits for {kind!r} differs")
