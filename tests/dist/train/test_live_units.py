"""At most two units' parameters are alive in a step; after it no buffer is, and no circle of references."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.testing import run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.helpers import crossed, mesh_of, point_to_point
from tests.training import CONFIG, DP, MODEL, OUTER, UNITS, batches, optimizer


class Watch:
    """Stands in for the pool: fresh storages only, so that what lives is what the library itself holds."""

    def __init__(self):
        self.refs: list[tuple[int, Any]] = []
        self.owners: dict[int, Any] = {}
        self.peak = 0

    def alive(self):
        return {owner for owner, ref in self.refs if not ref.expired()}

    def take(self, pool, size, dtype, device, owner=None):
        result = torch.empty(size, dtype=dtype, device=device)
        if owner is not None:
            # The number stands for the owner, whom the watch must not keep alive.
            number = owner.__dict__.setdefault("watched_as", len(self.owners))
            self.owners[number] = None
            self.refs.append((number, StorageWeakRef(result.untyped_storage())))
            self.peak = max(self.peak, len(self.alive()))
        return result


def storages(strategy, axes, policy, microbatches, patched):
    mesh = mesh_of(axes, transport="pairwise")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    step = fs.make_train_step(MODEL, opt, policy=policy, microbatches=microbatches)
    batch = next(batches(1, mesh))
    step(state, batch)
    watch, plain = Watch(), Pool.take

    def take(pool, size, dtype, device, owner=None):
        if patched:
            return watch.take(pool, size, dtype, device, owner)
        result = plain(pool, size, dtype, device, owner)
        watch.refs.append((0, StorageWeakRef(result.untyped_storage())))
        return result

    gc.collect()
    gc.disable()
    Pool.take = take
    try:
        with point_to_point():
            step(state, batch)
        left = len(watch.alive())
    finally:
        Pool.take = plain
        gc.enable()
    return watch.peak, len(watch.refs), left


@pytest.mark.parametrize(
    "policy",
    crossed(fs.policies.POLICIES.values(), kept=["save_except_gathered", "nothing_saveable"], name=lambda p: p.name),
)
def test_at_most_two_units_are_alive_and_none_after_the_step(policy):
    kept = policy == fs.policies.everything_saveable
    for ranks, axes, strategy in ((2, DP, fs.zero(3)), (4, OUTER, fs.HFSDP)):
        for peak, taken, left in run_ranks(storages, ranks, strategy, axes, policy, 3, True):
            assert taken > 2 * UNITS
            assert left == 0
            assert peak == CONFIG.layers + 1 if kept else peak == 2
        for _, taken, left in run_ranks(storages, ranks, strategy, axes, policy, 3, False):
            assert taken > 2 * UNITS
            assert left == 0, "the pool itself must go with the step"


def garbage(strategy, precision):
    """Tensors of a step that only Python's search for circles finds, and the most units that were alive in it."""
    mesh, opt = mesh_of(DP), optimizer("adamw")
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step, (batch,) = fs.make_train_step(MODEL, opt, microbatches=2), batches(1, mesh)
    with large_from(1):
        state, _ = step(state, batch)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with fs.recording() as seen:
                step(state, batch)
            gc.collect()
            return sum(isinstance(x, torch.Tensor) for x in gc.garbage), max(counts.peak_units for counts in seen)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_step_leaves_nothing_for_the_garbage_collector(level, precision):
    for left, units in run_ranks(garbage, 2, fs.zero(level), precision):
        assert left == 0
        assert units == (2 if level == 3 else 0), "also where ranks share memory"
