"""A train step does no work for each member of its groups: the operations and lines of one rank of 8 and one of 1,024."""

import collections
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from bench.options import RanksConfig
from bench.ranks import measure_ranks
from fsharding.comm.bucket import plan_bucket
from fsharding.comm.native import Native
from fsharding.comm.reduce import sums_at_once
from fsharding.comm.transport import start_sum
from fsharding.mesh import unit_order
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import axis_group
from tests.helpers import fake_groups_write, fake_ranks, slow

OURS = str(Path(fs.__file__).parent)
LEVELS = 7
"""Levels that the tree of a sum over 1,024 ranks has more than that over 8; so many has one over 512 more than over 4."""


class Operations(TorchDispatchMode):
    """How often each operation of torch was called while it is on."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def lines_of(run):
    """How many lines of the library a call executes, but for the function that adds a level of a tree in each turn."""
    count = 0

    def each_line(frame, event, arg):
        nonlocal count
        count += event == "line"
        return each_line

    def each_call(frame, event, arg):
        known = frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name != "_last_two"
        return each_line if known else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def loss_fn(params, batch):
    def block(unit, x):
        return torch.tanh(x + (x @ unit["w"]) @ unit["b"].view(32, 1024))

    x = fs.scan_units(block, params["blocks"], batch)
    return (x @ fs.gather_unit(params["head"])["w"]).square().sum(), x.shape[0]


def init(key):
    """Leaves of which a rank of 1,024 has 64 elements: what is shorter is packed by AdamW."""
    up, down = fs.random.split(key, 2)
    blocks = {"w": fs.random.normal(up, (2, 1024, 32)), "b": fs.random.full((2, 32 * 1024), 0.1)}
    return {"blocks": blocks, "head": {"w": fs.random.normal(down, (1024, 64))}}


NAMES = {"blocks": {"w": ("layers", None, None), "b": ("layers", None)}, "head": {"w": (None, None)}}


def step_of(strategy, axes):
    """Operations and lines of a step, when all has been planned: two microbatches, clipping, AdamW."""
    unit_order._code.cache_clear()  # of notes about the key and the number of a step, which both meshes have
    with fake_ranks(1, **axes) as mesh:
        layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=strategy, names=NAMES)
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.adamw(1e-3))
        step = fs.make_train_step(loss_fn, opt, microbatches=2, donate=True)
        state = fs.init_state(init, opt, fs.random.key(0), layout)

        def run():
            nonlocal state
            state, _ = step(state, torch.ones(4, 1024))

        run()
        run()
        with Operations() as operations:
            run()
        return operations.count, lines_of(run)


CASES = {f"zero{level}": (fs.zero(level), 1) for level in range(4)}
CASES |= {"hsdp": (fs.hybrid(fs.zero(3)), 2), "hfsdp": (fs.hybrid(fs.zero(3), opt_state=True), 2)}


@slow
@fake_groups_write
@pytest.mark.parametrize(("strategy", "replicas"), CASES.values(), ids=CASES)
def test_a_step_of_many_ranks_does_as_much_as_one_of_few(strategy, replicas, monkeypatch):
    # Few ranks have pieces long enough to be gathered to where they are whole, without rows.
    monkeypatch.setattr(Native, "worth", 1 << 40)
    few, many = (
        step_of(strategy, {**({"replica": replicas} if replicas > 1 else {}), "dp": ranks // replicas})
        for ranks in (8, 1024)
    )
    more = {name: many[0][name] - few[0][name] for name in many[0] | few[0] if many[0][name] != few[0][name]}
    additions = more.pop("aten.add_.Tensor")
    assert additions > 0 and additions % LEVELS == 0
    assert more == {"aten.slice.Tensor": 2 * additions}, "of the two halves that an addition takes"
    assert many[1] == few[1]


def test_a_plan_of_many_ranks_has_as_many_parts_as_one_of_few():
    leaves = (((4096, 64), 0), ((4096,), 0), ((64, 4096), 1))
    few, many = (plan_bucket(leaves, (ranks,)) for ranks in (8, 1 << 20))
    assert [len(slot.grids) for slot in few.slots] == [len(slot.grids) for slot in many.slots] == [1, 1, 1]
    assert many.slots[0].piece(4095) == (4095, 4096)
    assert many.slots[0].piece(4096) == (4096, 4096)


def test_a_sum_over_many_ranks_is_not_that_of_all_terms_on_each():
    assert sums_at_once(16_384, 64) and not sums_at_once(16_384, 65)
    assert sums_at_once(3, 16_384), "loss, weight and stop bit"
    with fake_ranks(1, dp=1024) as mesh, fs.debug.count_bytes() as traffic:
        total = start_sum(torch.ones(8000), axis_group(mesh, ("dp",)), torch.float32).wait()
    assert total.shape == (8000,)
    assert (traffic.calls, traffic.bytes) == (2, 2 * 1023 * 8 * 4)


def test_groups_of_many_ranks_are_in_the_order_of_their_axes():
    with fake_ranks(5, replica=4, dp=8, cp=2) as mesh:
        shape, here = AbstractMesh(("replica", "dp", "cp"), (4, 8, 2)), {"replica": 0, "dp": 2, "cp": 1}
        for axes in (("dp",), ("dp", "replica"), ("cp", "dp"), ("replica", "dp", "cp")):
            group = axis_group(mesh, axes)
            coords = [c for c in shape.coordinates() if all(c[a] == here[a] for a in c if a not in axes)]
            coords.sort(key=lambda c, axes=axes: [c[a] for a in axes])
            assert group.ranks == tuple(shape.rank_at(c) for c in coords)
            assert group.ranks[group.index] == 5
            by_name = sorted(range(group.size), key=lambda i, coords=coords: [*coords[i].values()])
            assert [*group.terms] == by_name
            assert [sorted(group.ranks)[i] for i in group.order] == [*group.ranks]
            assert [group.order[i] for i in group.by_rank] == [*range(group.size)]


def test_bench_ranks_measures_every_contender():
    config = RanksConfig(blocks=1, dim=64, seq_len=8, rounds=1)
    rows = measure_ranks(config, 64)
    ours = ["fsharding-zero3", "fsharding-zero1", "fsharding-zero3-native", "fsharding-zero1-native"]
    assert [row["contender"] for row in rows] == ["fsdp2", *ours]
    assert all(row["ranks"] == 64 and row["median_ms"] > 0 and row["first_ms"] > 0 for row in rows)
    assert all(row["plan_ms"] is None or row["plan_ms"] > 0 for row in rows)
