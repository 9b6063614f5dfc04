"""Steps that the simulated device records and replays as a graph: the bits of the steps themselves, in safe order."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.testing import device_mesh
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.on_device import SIM, device_ranks, needs_compiler, on_device, same

pytestmark = [
    pytest.mark.timeout(500),
    needs_compiler,
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 has no graphs of accelerators"),
]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=3)
FP16 = fs.Precision(params=torch.float32, compute=torch.float16, loss_scale=fs.formats.LossScale(2.0**17, interval=2))
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=8, steps=4)
CASES = {
    f"{strategy}-{name}": replace(
        BASE, strategy=strategy, precision=precision, donate=bool(i & 1), microbatches=1 + i % 2
    )
    for i, strategy in enumerate(map(fs.zero, range(4)))
    for name, precision in (("fp32", fs.FP32), ("bf16", fs.BF16), ("fp16", FP16), ("mxfp8", fs.MXFP8))
}
# Two of four experts a token: with twice an equal share none has too many.
EXPERTS = fs.models.Experts(4, 2, 24, z=1e-2, bias_rate=1e-2, capacity=2.0)
CASES |= {
    "ep": replace(
        BASE, config=replace(CONFIG, experts=EXPERTS), mesh=fs.AbstractMesh(("ep",), (2,)), strategy=fs.zero(3)
    ),
    "keyed": replace(BASE, precision=replace(fs.BF16, params=torch.bfloat16, rounding="keyed"), strategy=fs.zero(2)),
}
KEPT = {"ep", "keyed", "zero0-fp32", "zero1-bf16", "zero2-fp16", "zero3-mxfp8", "zero3-fp16"}


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def trained(case, captures, seed):
    """Numbers of each step, which the host reads before the next."""
    with on_device(SIM, seed) as watch:
        mesh = device_mesh(case.mesh, SIM)
        state, step = case.start(mesh)
        batches = [{name: x.to(SIM) for name, x in case.batch(i, mesh).items()} for i in range(case.steps)]
        if captures:
            step = fs.capture(step, state, batches[0])
        numbers = []
        for number, batch in enumerate(batches):
            with watch.step(number):
                state, metrics = step(state, batch)
            numbers.append(
                torch.stack((metrics.loss, metrics.grad_norm, metrics.weight, metrics.skipped.float())).cpu()
            )
        return watch.seen(numbers, state)


@pytest.mark.parametrize("name", [name if name in KEPT else pytest.param(name, marks=full) for name in CASES])
def test_a_replay_has_the_bits_of_the_step(pool, name):
    for seed in (None, 1):
        for want, found in zip(
            pool.run(trained, CASES[name], False, seed), pool.run(trained, CASES[name], True, seed), strict=True
        ):
            assert same(want, found)
            assert found.wrong == () and found.reads == ()
