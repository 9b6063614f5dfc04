"""Memory of a step on the simulated device: the peak is what `expected_memory` says before anything is allocated.

Guarantee: a plan of memory has every tensor of the step, whatever the strategy, schedule, policy and format. It lacks at
most a few single numbers, by which ranks compare what they do: fake ranks have nobody to compare with.
"""

import gc
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.mesh.device_mesh import coordinate
from fsharding.testing import device_mesh
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.on_device import SIM, device_ranks, needs_compiler, on_device, pipelines

pytestmark = [pytest.mark.timeout(500), needs_compiler]

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
NUMBERS = 16 * 512
"""Bytes of the numbers that a plan may lack; an activation of one layer has more, and so has every matrix."""
KEPT = {"zero1-bf16", "zero3-offload", "zero3-moments", "zbv"}


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def peaks(case):
    """The peaks that are expected, with this mesh and without devices, and those of some steps."""
    with on_device(SIM):
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
        if not name.startswith(("zero3-offload", "zero3-moments")):  # A CPU leaves them where they are.
            assert abs(without_devices - expected) <= 0.15 * expected, (
                "the kernels of a CPU, which differ here and there"
            )
        assert found[0] <= found[1]
