"""The train step, unchanged, without devices: FakeTensorMode, and a fake process group in which one rank is there.

Guarantee: a fake rank of "cpu" sends what that rank of gloo sends, and one of an accelerator what it sends with
`sums="native"`.
"""

import math
import pickle
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsharding as fs
from fsharding import ops
from fsharding.comm.counters import count_bytes
from fsharding.formats.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import HostReads, counting_host_reads, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests import sim_device
from tests.helpers import full
from tests.models import EXPERTS, MESHES, MODELS
from tests.training import optimizer

pytestmark = pytest.mark.timeout(1300)

FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**8))
STRATEGIES = {
    **{f"zero{level}": fs.zero(level) for level in range(4)},
    "hsdp": fs.hybrid(),
    "hfsdp": fs.hybrid(opt_state=True),
}
EVERY_EXPERT = replace(MODELS["dense"], experts=replace(EXPERTS, active=EXPERTS.count))
"""With as many tokens for each expert, whatever the values: so it is where there are none."""

CONFIGS = {**MODELS, "every expert": EVERY_EXPERT}


@dataclass(frozen=True)
class Case:
    """A run of some steps; `how` are options of the step and of the model, `large` whether all leaves are large ones."""

    axes: dict[str, int]
    strategy: str
    precision: Precision = fs.FP32
    model: str = "dense"
    how: dict[str, Any] = field(default_factory=dict[str, Any])
    donate: bool = False
    large: bool = False
    steps: int = 1

    @property
    def ranks(self):
        return math.prod(self.axes.values())

    def natively(self):
        """As an accelerator sums gradients."""
        return replace(self, precision=replace(self.precision, sums="native"))


class Seen(NamedTuple):
    """Of each step calls and bytes by axes, and gathers and reductions of each tape; of leaves of the state shapes and
    dtypes, and whether they are fake, and on which device; reads of the host from the second step on."""

    sent: list[dict[tuple[str, ...], tuple[int, int | None]]]
    calls: list[list[tuple[list[str], list[str]]]]
    leaves: list[tuple[tuple[int, ...], torch.dtype]]
    types: set[tuple[bool, str]]
    reads: list[str]


def trained(case, device):
    mesh = fs.make_mesh(device=device, transport="native", **case.axes)
    how = dict(case.how)
    microbatches, schedule = how.pop("microbatches", 1), how.pop("schedule", "1f1b")
    pp = case.axes.get("pp", 1)
    config = replace(CONFIGS[case.model], layers=2 * pp)
    model, stages, planned = fs.models.decoder(config, **how), None, None
    if pp > 1:
        planned = fs.pipeline.plan_schedule(schedule, pp, microbatches)
        stages = fs.pipeline.stages_of(model, planned)
    layout = fs.plan_layout(
        model, mesh, strategy=STRATEGIES[case.strategy], precision=case.precision, stages=stages
    )  # fmt: skip
    opt, seen = optimizer("adamw"), Seen([], [], [], set(), [])
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, microbatches=microbatches, schedule=planned or "1f1b", donate=case.donate)
    tokens = torch.zeros(8, 8, dtype=torch.int64, device=device)
    # Which bytes go where routers say is not known without values.
    open_ = [("ep",)] if case.model == "experts" else []

    def known(traffic):
        return {axes: (s.calls, None if axes in open_ else s.bytes) for axes, s in traffic.by_axes.items()}

    with large_from(1) if case.large else nullcontext():
        for number in range(case.steps):
            # The first step compares keys of ranks, which are the host's.
            host = counting_host_reads() if number else nullcontext(HostReads())
            with count_bytes() as traffic, fs.debug.record_collectives() as calls, host as read:
                state, _ = step(state, ops.cut_sequence({"tokens": tokens, "targets": tokens}, mesh=mesh))
            seen.sent.append(known(traffic))
            seen.reads.extend(read.reads)
            seen.calls.append([(counts.gathers, counts.reductions) for counts in calls])
    leaves = [local_of(x) for x in fs.tree.leaves((state.params, state.main, state.opt_state)) if x is not None]
    seen.leaves.extend((tuple(x.shape), x.dtype) for x in leaves)
    seen.types.update((isinstance(x, FakeTensor), x.device.type) for x in leaves)
    return seen


# ----------------------------------------------------------------------------------------------------------- fake ranks
def main():
    """Runs each (case, device, rank) of the standard input in a process group of its own, and writes what it saw."""
    sim_device.start()
    seen = []
    for case, device, rank in pickle.load(sys.stdin.buffer):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.ranks)
        with FakeTensorMode():
            seen.append(trained(case, device))
        dist.destroy_process_group()
    sys.stdout.buffer.write(pickle.dumps(seen))


def on_fake_ranks(runs, timeout=300):
    sim_device.build()
    command = [sys.executable, "-W", "error", "-c", f"from {__name__} import main; main()"]
    ended = subprocess.run(command, input=pickle.dumps(runs), capture_output=True, timeout=timeout)
    assert ended.returncode == 0, ended.stderr.decode()
    result = pickle.loads(ended.stdout)
    for (case, device, rank), seen in zip(runs, result, strict=True):
        assert seen.types == {(True, device)}
        assert not seen.reads, "a step on an accelerator reads nothing, and one without values cannot"
        assert all(sent == seen.sent[0] for sent in seen.sent), (case, device, rank)
    return result


def on_real_ranks(cases):
    return [trained(case, "cpu") for case in cases]


def check(cases, ranks, timeout=300):
    """Compares fake ranks of both devices with the same ranks of gloo, which sum as that device does."""
    runs = [(case, device, rank) for case in cases for device in ("cpu", sim_device.NAME) for rank in ranks(case.ranks)]
    fakes = on_fake_ranks(runs, timeout)
    alike = [case if device == "cpu" else case.natively() for case, device, _ in runs]
    for size in sorted({case.ranks for case in cases}):
        here = [i for i, case in enumerate(alike) if case.ranks == size]
        asked = [i for i in here if runs[i][2] == ranks(size)[0]]
        real = run_ranks(on_real_ranks, size, [alike[i] for i in asked], timeout=timeout)
        for i in here:
            case, device, rank = runs[i]
            wanted = real[rank][[alike[j] for j in asked].index(alike[i])]
            assert wanted.types == {(False, "cpu")}
            assert fakes[i][:3] == wanted[:3], (case, device, rank)


def last(size):
    return (size - 1,)


def ends(size):
    return (0, size - 1)


def of_mesh(name, strategy, **options):
    axes, how = MESHES[name]
    return Case(axes, strategy, how=how, **options)


SOME = [
    Case({"dp": 2}, "zero0", donate=True),
    Case({"dp": 2}, "zero3", FP16, donate=True, steps=2),
    Case({"tp": 2}, "zero2", fs.BF16),
    *(Case({"dp": 2}, level, fs.MXFP8, donate=True) for level in ("zero0", "zero1", "zero3")),
    Case({"ep": 2}, "zero3", model="every expert", large=True),
    of_mesh("pp2 zbv", "zero1", steps=2),
    of_mesh("tp2 pp2", "zero3", model="experts"),
]
MORE = [
    Case({"dp": 2}, name, precision, donate=True, steps=2)
    for name in STRATEGIES
    for precision in (fs.FP32, fs.BF16, FP16)
]
MORE += [Case({axis: 2}, name, fs.BF16) for axis in ("tp", "cp", "ep", "replica") for name in STRATEGIES]
MORE += [Case(axes, "zero3", model="every expert") for axes in ({"ep": 4}, {"dp": 2, "ep": 2}, {"tp": 2, "ep": 2})]


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [pytest.param(SOME, last, id="some"), pytest.param(MORE, ends, id="more", marks=[full, pytest.mark.timeout(3600)])],
)
def test_a_fake_rank_sends_what_a_real_one_sends_and_has_the_same_state(cases, ranks):
    check(cases, ranks, timeout=1800)


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MESHES)
def test_every_strategy_on_every_mesh_sends_what_real_ranks_send(name):
    levels = [level for level in STRATEGIES if "replica" in MESHES[name][0] or level.startswith("zero")]
    cases = [of_mesh(name, level, large=True) for level in levels]
    cases += [of_mesh(name, level, model="experts", large=True) for level in ("zero1", "zero3")]
    check(cases, ends if "pp" in MESHES[name][0] else last, timeout=1800)


# ------------------------------------------------------------------------------------------------------------ many ranks
ALL = {"replica": 2, "dp": 4, "ep": 2, "cp": 2, "tp": 2}
MESHES_OF_64 = {
    "dp": {"dp": 64},
    "replica": {"replica": 4, "dp": 16},
    "tp": {"tp": 2, "dp": 32},
    "ep": {"ep": 4, "dp": 16},
    "cp": {"cp": 2, "dp": 32},
    "all": ALL,
}
THOUSANDS = Case(
    {"pp": 4, "replica": 8, "dp": 32, "ep": 2, "cp": 2, "tp": 4}, "hfsdp", fs.BF16, "experts", {"microbatches": 4}
)
FEW = [
    (Case(MESHES_OF_64["replica"], "hsdp", FP16, donate=True), "cpu", 37),
    (Case(ALL, "zero3", FP16, donate=True), sim_device.NAME, 37),
    (THOUSANDS, sim_device.NAME, 16_383),
]
MANY = [
    (Case(axes, name, FP16, donate=True), device, 37)
    for name in STRATEGIES
    for axes in MESHES_OF_64.values()
    for device in ("cpu", sim_device.NAME)
]
MANY += [
    (case, device, rank)
    for case in (
        THOUSANDS,
        Case({"replica": 16, "dp": 1024}, "hsdp", fs.BF16, donate=True),
        Case({"dp": 16_384}, "zero1"),
    )
    for device in ("cpu", sim_device.NAME)
    for rank in (0, 1, 9_999, 16_383)
]


@pytest.mark.parametrize(
    "runs", [FEW, pytest.param(MANY, marks=[full, pytest.mark.timeout(3600)])], ids=["few", "many"]
)
def test_any_rank_of_many_sends_something_and_reads_nothing(runs):
    for seen in on_fake_ranks(runs, timeout=1800):
        assert any(seen.sent)
