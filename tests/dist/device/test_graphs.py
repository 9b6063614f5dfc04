"""Steps that the simulated device records and replays as a graph: the bits of the steps themselves, in safe order."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import RankError
from fsharding.testing import device_mesh
from tests.decoders import DecoderCase
from tests.helpers import full, refusal
from tests.on_device import SIM, assert_as_on_cpu, device_ranks, needs_compiler, on_device, pipelines, train

pytestmark = [
    pytest.mark.timeout(1300),
    needs_compiler,
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 has no graphs of accelerators"),
]

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2)
FP16 = fs.Precision(params=torch.float32, compute=torch.float16, loss_scale=fs.formats.LossScale(2.0**17, interval=2))
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=8, steps=3)
CASES = {
    f"{strategy}-{name}": replace(
        BASE, strategy=strategy, precision=precision, donate=bool(i & 1), microbatches=1 + i % 2
    )
    for i, strategy in enumerate(map(fs.zero, range(4)))
    for name, precision in (("fp32", fs.FP32), ("bf16", fs.BF16), ("fp16", FP16))
}
# Formats take many operations.
CASES |= {
    f"{name}-mxfp8": replace(case, config=replace(CONFIG, layers=1), steps=2, precision=fs.MXFP8)
    for name, case in ((f"zero{level}", CASES[f"zero{level}-bf16"]) for level in range(4))
}
# Two of four experts a token: with twice an equal share none has too many.
EXPERTS = fs.models.Experts(4, 2, 24, z=1e-2, bias_rate=1e-2, capacity=2.0)
CASES |= {
    "ep": replace(
        BASE, config=replace(CONFIG, experts=EXPERTS), mesh=fs.AbstractMesh(("ep",), (2,)), strategy=fs.zero(3)
    ),
    "offload": replace(BASE, strategy=fs.zero(3), policy="offload"),
    "moments": replace(BASE, strategy=fs.zero(3).with_memory(moments="host"), donate=True),
    "stochastic": replace(
        BASE, precision=replace(fs.BF16, params=torch.bfloat16, rounding="stochastic"), strategy=fs.zero(2)
    ),
}
CASES |= pipelines(replace(BASE, strategy=fs.zero(3)))
KEPT = {"ep", "offload", "moments", "stochastic", "zbv", "zero1-bf16", "zero3-fp16", "zero3-mxfp8"}


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def trained(case, seed, *, captured):
    return train(case, SIM, seed, captured=captured)[0]


@pytest.mark.parametrize("name", [name if name in KEPT else pytest.param(name, marks=full) for name in CASES])
def test_a_replay_has_the_bits_of_the_step(pool, name):
    """The step runs without delays, its replays with some."""
    steps = pool.run(trained, CASES[name], None, captured=False)
    assert_as_on_cpu(steps, pool.run(trained, CASES[name], 1, captured=True))
    assert all(run.reads == () for run in steps)


def dropped(params, batch, key):
    """A loss whose mask follows from the key of the step and the rank."""
    x = fs.random.dropout(batch["x"], 0.5, fs.random.for_rank(key))
    return (x @ fs.gather_unit(params)["w"]).square().mean()


def with_key(captures):
    with on_device(SIM, 1) as watch:
        mesh, opt = device_mesh(BASE.mesh, SIM), fs.adamw(1e-2)
        params = {"w": torch.linspace(-1, 1, 32).view(8, 4)}
        layout = fs.plan_layout(params, mesh, strategy=fs.zero(3))
        state = fs.init_state(lambda key: params, opt, fs.random.key(0), layout)
        step, batch = fs.make_train_step(dropped, opt), {"x": torch.ones(4, 8, device=SIM)}
        if captures:
            step = fs.capture(step, state, batch)
        losses = []
        for number in range(4):
            with watch.step(number):
                state, metrics = step(state, batch)
            losses.append(metrics.loss.cpu())
        return watch.seen(losses, state)


def test_a_step_with_a_key_is_captured(pool):
    steps, replays = pool.run(with_key, False), pool.run(with_key, True)
    assert_as_on_cpu(steps, replays)
    for run in steps:
        assert run.reads == () and len({float(loss) for loss in run.numbers}) == 4, "each step has a mask of its own"


def other_step():
    """What a step says if the device of one tp rank has counted other updates."""
    with on_device(SIM, None):
        mesh, opt = device_mesh(fs.AbstractMesh(("tp",), (2,)), SIM), fs.sgd(0.1)
        state, step = fs.setup({"w": torch.ones(8, 4)}, dropped, opt, fs.random.key(0), mesh=mesh, tp="replicate")
        batch = {"x": torch.ones(4, 8, device=SIM)}
        state, _ = step(state, batch)
        assert state.step.device.type == SIM
        state, metrics = step(state.replace(step=state.step + torch.distributed.get_rank()), batch)
        torch.accelerator.synchronize()  # a loss that is asked for earlier does not wait for the verdict
        return refusal(lambda: metrics.loss, kind=RankError)


def test_a_step_that_a_device_counts_is_compared_over_tp(pool):
    for text in pool.run(other_step):
        assert text.split("\n") == [
            "train step gets states of different steps on ranks 0 (tp=0), 1 (tp=1).",
            "  state.step: rank 1 (tp=1) has 2",
            "  state.step: rank 0 (tp=0) has 1",
            "Use the same state.key and state.step on every rank: a step derives its keys from both.",
        ]
