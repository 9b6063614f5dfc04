"""The train step, unchanged, without devices: FakeTensorMode, and a fake process group in which one rank is there."""

import ast
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fsharding as fs
from fsharding.comm.counters import counting_bytes
from fsharding.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import run_ranks
from tests.helpers import full
from tests.training import MODEL, optimizer

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**8))
STRATEGIES = {**{f"zero{level}": fs.zero(level) for level in range(4)}, "hsdp": fs.HSDP, "hfsdp": fs.HFSDP}


def trained(axes, strategy, precision, donate, steps=1):
    """What steps sent: for each, calls and bytes by axes; and what a leaf of the state looks like here."""
    mesh = fs.make_mesh(device="cpu", transport="native", **axes)
    layout = fs.plan_layout(MODEL, mesh, strategy=STRATEGIES[strategy], precision=precision)
    opt, seen = optimizer("adamw"), []
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, opt, check="next", donate=donate)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    for _ in range(steps):
        with counting_bytes() as traffic:
            state, _ = step(state, {"tokens": tokens, "targets": tokens})
        seen.append(sorted((axes, sent.calls, sent.bytes) for axes, sent in traffic.by_axes.items()))
    leaves = [local_of(x) for x in fs.tree.leaves((state.params, state.main, state.opt_state)) if x is not None]
    return seen, [(tuple(x.shape), str(x.dtype)) for x in leaves], {isinstance(x, FakeTensor) for x in leaves}


def fake_rank(ranks, rank, cases):
    """Runs cases as one of so many ranks, in a process of its own, and prints what it saw."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    for case in cases:
        with FakeTensorMode():
            print("seen", trained(*case))


def on_fake_ranks(ranks, rank, cases):
    call = f"fake_rank({ranks}, {rank}, {cases!r})"
    program = f"from fsharding import *\nimport torch\nfrom tests.dist.train.test_fake_ranks import *\n{call}"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    lines = [line.removeprefix("seen ") for line in ended.stdout.splitlines() if line.startswith("seen ")]
    assert len(lines) == len(cases)
    return [ast.literal_eval(line) for line in lines]


def real_ranks(cases):
    return [trained(*case) for case in cases]


CASES = [({"dp": 2}, "zero0", fs.FP32, True), ({"dp": 2}, "zero3", FP16, True, 2), ({"tp": 2}, "zero2", fs.BF16, False)]
CASES += [({"dp": 2}, level, fs.MXFP8, True) for level in ("zero0", "zero3")]
MORE = [({"dp": 2}, name, precision, True, 2) for name in STRATEGIES for precision in (fs.FP32, fs.BF16, FP16)]
MORE += [({axis: 2}, name, fs.BF16, False) for axis in ("tp", "cp", "ep", "replica") for name in STRATEGIES]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=full)], ids=["some", "more"])
def test_a_fake_rank_sends_what_a_real_one_sends_and_has_the_same_state(cases):
    real = run_ranks(real_ranks, 2, cases)
    for rank in (0, 1) if cases is MORE else (1,):
        for case, fake, wanted in zip(cases, on_fake_ranks(2, rank, cases), real[rank], strict=True):
            assert wanted[2] == {False} and fake[2] == {True}
            assert fake[:2] == wanted[:2], case


MESHES = {"dp": {"dp": 64}, "replica": {"replica": 4, "dp": 16}, "tp": {"tp": 2, "dp": 32}, "ep": {"ep": 4, "dp": 16}}
MESHES |= {"cp": {"cp": 2, "dp": 32}, "all": {"replica": 2, "dp": 4, "ep": 2, "cp": 2, "tp": 2}}


EVERY = [(axes, name, FP16, True) for name in STRATEGIES for axes in MESHES.values()]
SOME = [(MESHES["replica"], "hsdp", FP16, True), (MESHES["all"], "zero3", FP16, True)]


@pytest.mark.parametrize("cases", [SOME, pytest.param(EVERY, marks=full)], ids=["some", "every"])
def test_every_strategy_runs_on_meshes_of_64(cases):
    for case, (seen, _, fake) in zip(cases, on_fake_ranks(64, 37, cases), strict=True):
        assert fake == {True} and seen[-1], case


@full
def test_a_rank_of_16384():
    cases = [({"replica": 16, "dp": 1024}, "hsdp", fs.BF16, True)]
    ((seen, _, fake),) = on_fake_ranks(16384, 9999, cases)
    assert fake == {True} and seen[-1]
