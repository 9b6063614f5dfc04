"""Activations in memory of the host, on the simulated device: the bits of the CPU, in safe order, in less memory.

Guarantee: where activations wait for backward changes no bit; at most two units have them on the device.
"""

import gc
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsharding as fs
from fsharding.base.errors import ConfigError, LayoutError
from fsharding.comm.tier import tier_of
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, device_mesh
from fsharding.train.in_flight import copies_in_flight
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.on_device import (
    SIM,
    assert_as_on_cpu,
    device_ranks,
    needs_compiler,
    on_device,
    pipelines,
    small_windows,
    train,
)
from tests.states_in_use import used_otherwise

pytestmark = [pytest.mark.timeout(1300), needs_compiler]

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


# --------------------------------------------------------------------------------------------------------------- moments
OPTIMIZERS = {
    "sgd": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.sgd(0.1, momentum=0.9)),
    "adamw": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, eps=1e-3, weight_decay=0.1)),
    "mxfp8": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, moments=fs.formats.MXFP8)),
    "adafactor": lambda: fs.optim.adafactor(1e-3),
    "ema": lambda: fs.optim.chain(fs.adamw(1e-3, eps=1e-3), fs.optim.ema(0.9)),
}
MOMENTS = {
    f"zero{level}-{name}": (replace(BASE, strategy=fs.zero(level)), name) for level in range(4) for name in OPTIMIZERS
}
MOMENTS |= {
    f"{name}-adamw": (replace(case, strategy=fs.zero(3), donate=i % 2 == 0), "adamw")
    for i, (name, case) in enumerate(
        {
            "tp": replace(BASE, mesh=fs.AbstractMesh(("tp",), (2,))),
            "bf16": replace(BASE, precision=fs.BF16),
            "stochastic": replace(BASE, precision=replace(fs.BF16, params=torch.bfloat16, rounding="stochastic")),
            **pipelines(BASE),
        }.items()
    )
}
MOMENTS_KEPT = {"zero0-adamw", "zero2-sgd", "zero3-adamw", "zero3-mxfp8", "zero1-adafactor", "bf16-adamw", "zbv-adamw"}


def updated(case, optimizer, device, folder):
    """A run under delays that is saved and loaded, and resharded to the device and back; its moments are where they belong."""
    with on_device(device, seed=1) as watch, small_windows():
        mesh, opt = device_mesh(case.mesh, device), OPTIMIZERS[optimizer]()
        state, step = case.start(mesh, opt)
        numbers = []
        for number in range(4):
            if number == 2:
                fs.checkpoint.save(folder, state)
                state = fs.checkpoint.load(folder, state.layout, opt=opt if "zero0" in str(folder) else None)
            if number == 3:
                away = state.layout.with_strategy(replace(case.strategy, memory=()))
                state = fs.reshard(fs.reshard(state, away), state.layout)
            batch = {name: x.to(device) for name, x in case.batch(number, mesh).items()}
            with watch.step(number):
                state, metrics = step(state, batch)
            watch.leaves |= copies_in_flight(state) is not None
            moments = [x for x in fs.tree.leaves(state.opt_state) if isinstance(x, DTensor)]
            kept = {"params": fs.tree.leaves(state.params), "main": fs.tree.leaves(state.main), "moments": moments}
            for role, leaves in kept.items():
                kind = case.strategy.memory_of(role, "blocks") if device == SIM else "device"
                found = {tier_of(local_of(x), device).name for x in leaves}
                assert found <= {kind, "device"} and (kind in found or not leaves), (role, kind, found)
                assert all(local_of(x).is_pinned() for x in leaves if tier_of(local_of(x), device).name == "host")
            numbers.append(torch.stack((metrics.loss, metrics.grad_norm)))
        return watch.seen(numbers, state)


@pytest.mark.parametrize("name", [name if name in MOMENTS_KEPT else pytest.param(name, marks=full) for name in MOMENTS])
def test_moments_on_the_host_change_no_bit(pool, name, tmp_path):
    case, optimizer = MOMENTS[name]
    there = replace(case, strategy=case.strategy.with_memory(moments="host"))
    kept = pool.run(updated, case, optimizer, SIM, tmp_path / f"{name}-kept")
    assert_as_on_cpu(kept, pool.run(updated, there, optimizer, SIM, tmp_path / name))


ROLES = ("params", "main", "moments", "grads")
AWAY = {
    f"zero{level}-{kind}": (replace(BASE, strategy=fs.zero(level), microbatches=2), dict.fromkeys(ROLES, kind))
    for level in range(4)
    for kind in ("host", "disk")
}
BF16 = replace(BASE, precision=fs.BF16, strategy=fs.zero(1))
AWAY |= {
    **{f"bf16-{role}": (BF16, {role: "host"}) for role in ROLES},
    "bf16-mixed": (replace(BF16, donate=True), {"params": "host", "main": "disk", "moments": "host", "grads": "disk"}),
    "mxfp8": (replace(BASE, precision=fs.MXFP8, strategy=fs.zero(3)), {"params": "host", "grads": "host"}),
    "mxfp8-copies": (replace(BASE, precision=fs.MXFP8, strategy=fs.zero(1)), {"params": "host", "main": "disk"}),
    "remat": (replace(BASE, policy="nothing_saveable", donate=True), {"params": "host", "moments": "host"}),
    "offload": (replace(BASE, policy="offload", strategy=fs.zero(2)), dict.fromkeys(ROLES, "host")),
    "tp": (replace(BASE, mesh=fs.AbstractMesh(("tp",), (2,))), dict.fromkeys(ROLES, "host")),
    **{name: (replace(case, donate=True), dict.fromkeys(ROLES, "host")) for name, case in pipelines(BASE).items()},
}
AWAY_KEPT = {"zero0-host", "zero1-disk", "zero3-host", "zero3-disk", "bf16-mixed", "mxfp8-copies", "offload", "zbv"}


@pytest.mark.parametrize("name", [name if name in AWAY_KEPT else pytest.param(name, marks=full) for name in AWAY])
def test_roles_elsewhere_change_no_bit(pool, name, tmp_path):
    case, memory = AWAY[name]
    there = replace(case, strategy=case.strategy.with_memory(**memory))
    kept = pool.run(updated, case, "adamw", SIM, tmp_path / f"{name}-kept")
    assert_as_on_cpu(kept, pool.run(updated, there, "adamw", SIM, tmp_path / name), reads=True)


HOST = {"compute": "host"}
BIASED = fs.models.Experts(4, 2, 32, score="sigmoid", bias_rate=1e-2)
UPDATED = {f"zero{level}-adamw": (replace(BASE, strategy=fs.zero(level)), HOST, "adamw") for level in range(4)}
UPDATED |= {
    f"zero3-{name}": (replace(BASE, strategy=fs.zero(3), donate=True), HOST, name) for name in ("sgd", "ema", "mxfp8")
}
UPDATED |= {
    "blocks": (replace(BASE, strategy=fs.zero(3), donate=True), {"compute": {"blocks": "host"}}, "adamw"),
    "disk": (replace(BF16, donate=True), {**HOST, "moments": "disk", "main": "disk"}, "adamw"),
    "all": (BF16, {**HOST, "params": "host", "grads": "host"}, "adamw"),
    "experts": (replace(BASE, config=replace(CONFIG, layers=2, experts=BIASED), strategy=fs.zero(2)), HOST, "adamw"),
    "stochastic": (replace(BASE, precision=replace(fs.BF16, params=torch.bfloat16, rounding="stochastic")), HOST, "adamw"),
    "tp": (replace(BASE, mesh=fs.AbstractMesh(("tp",), (2,)), donate=True), HOST, "mxfp8"),
    **{name: (replace(case, donate=True), HOST, "adamw") for name, case in pipelines(BASE).items()},
}  # fmt: skip
UPDATED_KEPT = {"zero0-adamw", "zero1-adamw", "zero3-mxfp8", "blocks", "disk", "stochastic", "experts", "zbv"}


@pytest.mark.parametrize("name", [name if name in UPDATED_KEPT else pytest.param(name, marks=full) for name in UPDATED])
def test_updates_on_the_host_change_no_bit(pool, name, tmp_path):
    case, memory, optimizer = UPDATED[name]
    kept = pool.run(updated, case, optimizer, SIM, tmp_path / f"{name}-kept")
    case = replace(case, strategy=case.strategy.with_memory(**memory))
    there = pool.run(updated, case, optimizer, SIM, tmp_path / name)
    assert_as_on_cpu(kept, [without_main(*pair) for pair in zip(kept, there, strict=True)], reads=True)


def without_main(kept, seen):
    """What a run did, without main parameters if those of the other run are its parameters."""
    own = {name: x for name, x in seen.state.items() if name in kept.state or not name.startswith("main.")}
    return seen._replace(state=own)


def test_leaves_on_the_host_are_read_by_everything(pool):
    kept = pool.run(used_on_device, {})
    assert_bitwise_equal(pool.run(used_on_device, dict.fromkeys(ROLES, "host")), kept)
    assert_bitwise_equal(pool.run(used_on_device, HOST), kept)


def used_on_device(memory):
    with on_device(SIM):
        return used_otherwise(memory, SIM)


def started(memory):
    """The most that a first state needs on the device, and what it keeps there."""
    with on_device(SIM), small_windows():
        case = replace(BASE, strategy=fs.zero(3).with_memory(moments=memory))
        mesh = device_mesh(case.mesh, SIM)
        gc.collect()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        state, _ = case.start(mesh, OPTIMIZERS["adamw"]())
        held = torch.accelerator.memory_allocated() - before
        parameters = sum(local_of(x).nbytes for x in fs.tree.leaves(state.params))
        return torch.accelerator.max_memory_allocated() - before, held, parameters


def test_a_first_state_is_made_in_windows(pool):
    """Adam's moments are twice as large as the parameters; those of the largest leaf are on the device at a time."""
    (there, _, _), (peak, held, parameters) = pool.run(started, "device")[0], pool.run(started, "host")[0]
    assert there >= 3 * parameters and held < 1.1 * parameters, (there, held, parameters)
    assert peak < 2 * parameters, (peak, parameters)


def refused(folder):
    with on_device(SIM):
        mesh = device_mesh(BASE.mesh, SIM)
        batch = {name: x.to(SIM) for name, x in BASE.batch(0, mesh).items()}
        for memory, donate, said in (
            ({"moments": "host"}, False, r"without donate=True"),
            ({"main": "host"}, True, "main on the host"),
            ({"compute": "host"}, True, "compute on the host"),
            ({"moments": {"blocks": "disk"}}, True, "moments of blocks on disk"),
        ):
            case = replace(BASE, strategy=fs.zero(3).with_memory(**memory), donate=donate)
            state, step = case.start(mesh)
            with pytest.raises(ConfigError, match=said):
                fs.capture(step, state, batch)
        state, step = replace(BASE, strategy=fs.zero(3).with_memory(moments="host")).start(mesh)
        moved = fs.tree.map(lambda x: x.to(SIM) if x.ndim else x, state.opt_state)
        with pytest.raises(LayoutError, match="on the device; the layout has it on the host"):
            step(state.replace(opt_state=moved), batch)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch before 2.13 has no graphs of accelerators")
def test_what_cannot_be_is_refused_by_name(pool, tmp_path):
    pool.run(refused, tmp_path)
