"""Memory of a step on the simulated device: the peak is what `expected_memory` says before anything is allocated.

Guarantee: a plan of memory has every tensor of the step, whatever the strategy, schedule, policy and format. It lacks at
most a few single numbers, by which ranks compare what they do: fake ranks have nobody to compare with. zero(3) has no
higher peak than FSDP2 on the same model.
"""

import gc
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

import fsharding as fs
from bench.peers import PEERS, Task
from bench.step import OURS, _ours
from fsharding.mesh.device_mesh import coordinate
from fsharding.optim import windows
from fsharding.testing import device_mesh
from fsharding.transforms.unit_plan import large_from
from tests import sim_device
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.on_device import SIM, device_ranks, needs_compiler, on_device, pipelines, small_windows

pytestmark = [pytest.mark.timeout(1300), needs_compiler]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=3)
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=8, steps=2)
CASES = {
    f"zero{level}-{name}": replace(BASE, strategy=fs.zero(level), precision=precision, donate=name == "bf16")
    for level in range(4)
    for name, precision in (("fp32", fs.FP32), ("bf16", fs.BF16), ("mxfp8", fs.MXFP8))
}
CASES |= {
    f"zero3-{policy}": replace(BASE, strategy=fs.zero(3), policy=policy, microbatches=2)
    for policy in ("nothing_saveable", "dots_saveable", "everything_saveable", "offload", "offload_inputs")
}
CASES |= {
    "tp": replace(BASE, mesh=fs.AbstractMesh(("tp",), (2,))),
    "cp": replace(BASE, mesh=fs.AbstractMesh(("cp",), (2,))),
}
CASES |= pipelines(BASE)
CASES["zero3-moments"] = replace(BASE, strategy=fs.zero(3).with_memory(moments="host"), donate=True)
HOST = dict.fromkeys(("params", "main", "moments", "grads"), "host")
CASES |= {
    f"zero{level}-host": replace(BASE, strategy=fs.zero(level).with_memory(**HOST), microbatches=2, donate=level == 3)
    for level in (1, 3)
}
CASES["zero3-compute-host"] = replace(BASE, strategy=fs.zero(3).with_memory(compute="host"), donate=True)
NUMBERS = 16 * 512
"""Bytes of the numbers that a plan may lack; an activation of one layer has more, and so has every matrix."""
KEPT = {"zero1-bf16", "zero3-offload", "zero3-moments", "zero3-compute-host", "zero3-host", "zbv"}


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def peaks(case):
    """The peaks that are expected, with this mesh and without devices, and those of some steps."""
    with on_device(SIM), small_windows():
        mesh = device_mesh(case.mesh, SIM)
        batch = {name: x.to(SIM) for name, x in case.batch(0, mesh).items()}
        here = coordinate(mesh)
        expected = [
            fs.debug.expected_memory(case.model, case.optimizer, layout, batch, coord=here, **case.options)
            for layout in (case.layout(mesh), case.layout())
        ]
        torch.accelerator.synchronize()
        gc.collect()
        before = torch.accelerator.memory_allocated() - sum(-(-x.nbytes // 512) * 512 for x in batch.values())
        state, step = case.start(mesh)
        found = []
        for _ in range(case.steps):
            torch.accelerator.reset_peak_memory_stats()
            state, metrics = step(state, batch)
            del metrics
            found.append(torch.accelerator.max_memory_allocated() - before)
        return expected, found


@pytest.mark.parametrize("name", [name if name in KEPT else pytest.param(name, marks=full) for name in CASES])
def test_the_peak_of_a_step_is_the_plan(pool, name):
    for (expected, without_devices), found in pool.run(peaks, CASES[name]):
        assert all(0 <= peak - expected <= NUMBERS for peak in found[1:]), (expected, found)
        if not name.endswith(("offload", "offload_inputs")):  # A CPU leaves them where they are.
            assert abs(without_devices - expected) <= 0.15 * expected, (
                "the kernels of a CPU, which differ here and there"
            )
        assert found[0] <= found[1]


# -------------------------------------------------------------------------------------------------------- beside FSDP2
SHAPES = {
    "layers": (fs.models.DecoderConfig(vocab_size=256, dim=64, layers=12), 4, 32),
    "units": (fs.models.DecoderConfig(vocab_size=256, dim=192, layers=3), 4, 32),
    "logits": (fs.models.DecoderConfig(vocab_size=4096, dim=64, layers=4), 4, 32),
    "activations": (fs.models.DecoderConfig(vocab_size=256, dim=64, layers=6), 8, 128),
}
"""Decoders by what most of their peak is: sizes, sequences of a rank, and their length."""


def peaks_beside(shape, dtype):
    """The peaks of third steps of zero(3) and of FSDP2; leaves of small models count as large, as in large models."""
    sizes, rows, length = SHAPES[shape]
    found = []
    with on_device(SIM), large_from(64):
        tokens = torch.arange(rows * length).view(rows, length).remainder(sizes.vocab_size).to(SIM)
        batch = {"tokens": tokens, "targets": tokens}
        task = Task(fs.models.decoder(sizes), fs.make_mesh(device=SIM, dp=-1), batch, dtype)
        assert task.weights  # drawn before anything is counted
        for build in (partial(_ours, OURS["fsharding-zero3"]), PEERS["fsdp2"]):
            torch.accelerator.synchronize()
            gc.collect()
            before = torch.accelerator.memory_allocated()
            run = build(task)
            for _ in range(3):
                torch.accelerator.reset_peak_memory_stats()
                assert float(run()) > 0
            found.append(torch.accelerator.max_memory_allocated() - before)
            del run
    return found


def shapes(first):
    """All shapes and dtypes; a make test has the first."""
    cases = [(shape, dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)]
    return [case if case in first else pytest.param(*case, marks=full) for case in cases]


@pytest.mark.parametrize(("shape", "dtype"), shapes([("units", torch.bfloat16), ("logits", torch.float32)]))
def test_zero3_needs_no_more_memory_than_fsdp2(pool, shape, dtype):
    assert all(ours <= theirs for ours, theirs in pool.run(peaks_beside, shape, dtype))


@full
@pytest.mark.parametrize("ranks", [4, 8])
def test_nor_on_more_ranks(ranks):
    with device_ranks(ranks) as pool:
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                assert all(ours <= theirs for ours, theirs in pool.run(peaks_beside, shape, dtype)), (shape, dtype)


# --------------------------------------------------------------------------------------------------- more than fits
LAYERS, DIM = 48, 64


def init(key):
    keys = fs.random.split(key, LAYERS)
    return [{"w": fs.random.normal(keys[i], (DIM, DIM), std=DIM**-0.5)} for i in range(LAYERS)]


def loss(params, x):
    x = fs.scan_units(lambda w, x: x + torch.tanh(x @ w["w"]) / LAYERS, params, x, policy=fs.policies.nothing_saveable)
    return x.square().mean()


def trained(kind, limit):
    """Losses on a device of so many bytes, and the bytes of the state."""
    with on_device(SIM), patch.object(windows, "WINDOW_BYTES", 1 << 12):
        strategy = fs.zero(3).with_memory(**dict.fromkeys(HOST, kind))
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-3))
        layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1, device=SIM), strategy=strategy)
        torch.accelerator.synchronize()
        gc.collect()
        with sim_device.memory_limit(torch.accelerator.memory_allocated() + limit):
            state = fs.init_state(init, opt, fs.random.key(0), layout)
            step = fs.make_train_step(loss, opt, donate=True, check="sync")
            losses = []
            for number in range(3):
                x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(number)).to(SIM)
                state, metrics = step(state, x)
                losses.append(float(metrics.loss))
        return losses, layout.memory(opt).state


@pytest.mark.parametrize("kind", ["host", pytest.param("disk", marks=full)])
def test_a_state_of_four_times_the_device_trains(pool, kind):
    whole = pool.run(trained, "device", 1 << 30)
    assert pool.run(trained, kind, whole[0][1] // 4) == whole
