"""Activations in memory of the host, on the simulated device: the bits of the CPU, in safe order, in less memory.

Guarantee: where activations wait for backward changes no bit; at most two units have them on the device.
"""

import gc
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.testing import device_mesh
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.on_device import SIM, assert_as_on_cpu, device_ranks, needs_compiler, on_device, pipelines, train

pytestmark = [pytest.mark.timeout(500), needs_compiler]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=4)
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=16, steps=2)
CASES = {
    f"zero{level}-{policy}": replace(BASE, strategy=fs.zero(level), policy=policy, microbatches=1 + level % 2)
    for level in range(4)
    for policy in ("offload", "offload_inputs")
}
CASES |= {
    f"{axis}-offload": replace(BASE, mesh=fs.AbstractMesh((axis,), (2,)), policy="offload") for axis in ("tp", "cp")
}
CASES["bf16-offload"] = replace(BASE, precision=fs.BF16, strategy=fs.zero(3), policy="offload", donate=True)
CASES["mxfp8-offload"] = replace(BASE, precision=fs.MXFP8, strategy=fs.zero(3), policy="offload", steps=1)
CASES |= {f"{name}-offload": replace(case, policy="offload") for name, case in pipelines(BASE).items()}
KEPT = {"zero0-offload", "zero3-offload", "zero3-offload_inputs", "bf16-offload", "1f1b-offload", "zbv-offload"}


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def trained(case, device):
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.sgd(0.1, momentum=0.9))
    return train(case, device, opt=opt)[0]


@pytest.mark.parametrize("name", [name if name in KEPT else pytest.param(name, marks=full) for name in CASES])
def test_activations_on_the_host_change_no_bit(pool, name):
    """The CPU has them where they are; the device copies them, under delays."""
    case = CASES[name]
    here = pool.run(trained, replace(case, policy="save_except_gathered"), "cpu")
    assert_as_on_cpu(here, pool.run(trained, case, SIM))


def peak(layers, policy):
    """The most that a step needs beside what is there before it."""
    with on_device(SIM):
        case = replace(BASE, config=replace(CONFIG, layers=layers), length=128, strategy=fs.zero(3), policy=policy)
        mesh = device_mesh(case.mesh, SIM)
        batch = {name: x.to(SIM) for name, x in case.batch(0, mesh).items()}
        state, step = case.start(mesh)
        torch.accelerator.synchronize()
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        step(state, batch)
        return torch.accelerator.max_memory_allocated() - before


def grown(policy):
    """Bytes that a layer more needs, beside its part of the state that the step returns."""
    return peak(8, policy) - peak(4, policy)


def test_activations_of_two_units_are_on_the_device(pool):
    kept, gone, remat = (
        pool.run(grown, policy)[0] for policy in ("save_except_gathered", "offload", "nothing_saveable")
    )
    inputs = pool.run(grown, "offload_inputs")[0]
    assert gone < 0.2 * kept and inputs < remat < 0.5 * kept, (kept, gone, remat, inputs)
