"""Law: a step gathers, reduces and holds what strategy and policy say: at most two units at once, none afterwards."""

import gc
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.testing import run_ranks
from fsharding.transforms.gather_context import current_context
from fsharding.transforms.unit_plan import large_from
from tests.helpers import crossed, mesh_of, point_to_point, until
from tests.training import CONFIG, DP, MODEL, OUTER, batches, name_of, optimizer


def peaks(strategy, axes, policy, microbatches, frozen=()):
    mesh = mesh_of(axes, transport="pairwise")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy, frozen=frozen))
    step = fs.make_train_step(MODEL, opt, policy=policy, microbatches=microbatches)
    with point_to_point(), fs.debug.record_collectives() as seen:
        for batch in batches(2, mesh):
            state, _ = step(state, batch)
    return [(counts.peak_units, len(counts.gathers), len(counts.reductions)) for counts in seen]


UNITS = CONFIG.layers + 2


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_counts_and_peaks_of_a_call(policy):
    for ranks, axes in ((2, DP), (4, OUTER)):
        for rows in run_ranks(peaks, ranks, fs.zero(3), axes, policy, 3):
            assert len(rows) == 2 * 3
            for peak, gathers, reductions in rows:
                # The head is still there when backward begins, and the backward of an embedding needs no weight.
                kept = policy == fs.policies.everything_saveable
                assert gathers == (UNITS if kept else 2 * UNITS - 2)
                assert reductions == UNITS
                assert peak == CONFIG.layers + 1 if kept else peak == 2


@pytest.mark.parametrize(
    ("frozen", "gathers", "reductions"),
    [
        (("blocks",), 2 * UNITS - 2, 2),  # gradients of activations still need the weights
        (("head",), 2 * UNITS - 2, UNITS - 1),
        (("embed", "blocks"), UNITS, 1),  # nothing below the head is asked for
    ],
    ids=name_of,
)
@pytest.mark.parametrize("policy", [p for p in fs.policies.POLICIES.values() if not p.gathered], ids=lambda p: p.name)
def test_frozen_units_are_let_go_too(policy, frozen, gathers, reductions):
    for rows in run_ranks(peaks, 2, fs.zero(3), DP, policy, 1, frozen):
        assert rows == [(2, gathers, reductions)] * 2


DEPTH = 5


def started_gathers(policy):
    """What was gathered, or was on its way, when each block began, and half-way through its backward."""
    draws = {name: fs.random.normal(fs.random.key(i), (DEPTH, 6, 6)) for i, name in enumerate(("a", "b"))}
    layout = fs.plan_layout(
        {"blocks": draws}, mesh_of(DP), names={"blocks": dict.fromkeys(draws, ("layers", None, None))}
    )
    state = fs.init_state(lambda key: {"blocks": draws}, fs.sgd(0.1), fs.random.key(0), layout)
    forward: list[list[str]] = []
    backward: dict[int, list[str]] = {}

    def block(unit, x):
        context, number = current_context(), len(forward)
        assert context is not None
        forward.append([*context.counts.gathers])
        y = torch.tanh(x @ unit["a"])
        y.register_hook(lambda grad: backward.update({number: [*context.counts.gathers]}))
        return x + y @ unit["b"]

    def loss_fn(params):
        return fs.scan_units(block, params["blocks"], torch.ones(2, 6), policy=policy).sum()

    fs.value_and_grad(loss_fn)(state.params)
    return forward, backward


def test_the_next_gather_is_on_its_way_before_a_unit_computes_in_both_directions():
    names = [f"blocks[{i}]" for i in range(DEPTH)]
    for forward, backward in run_ranks(started_gathers, 2, fs.policies.save_except_gathered):
        assert forward == [names[: i + 2] for i in range(DEPTH)]
        # The last one is still there; while one computes, the one before it comes.
        assert backward == {i: names + names[max(i - 1, 0) : DEPTH - 1][::-1] for i in range(DEPTH)}


@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(1)], ids=name_of)
def test_levels_without_cut_parameters_gather_nothing_and_reduce_once_a_step(strategy):
    for rows in run_ranks(peaks, 2, strategy, DP, fs.policies.save_except_gathered, 3):
        assert [row[1] for row in rows] == [0] * 6
        assert [row[2] for row in rows] == [0, 0, UNITS] * 2


def test_zero2_gathers_nothing_and_reduces_every_microbatch():
    for rows in run_ranks(peaks, 2, fs.zero(2), DP, fs.policies.save_except_gathered, 3):
        assert [(row[1], row[2]) for row in rows] == [(0, UNITS)] * 6


class Watch:
    """Stands in for the pool: fresh storages only, so that what lives is what the library itself holds."""

    def __init__(self):
        self.refs: list[tuple[Any, Any]] = []
        self.peak = 0

    def alive(self):
        return {owner for owner, ref in self.refs if not ref.expired()}

    def held(self):
        return sum(not ref.expired() for _, ref in self.refs)

    def take(self, pool, size, dtype, device, owner=None):
        result = torch.empty(size, dtype=dtype, device=device)
        if owner is not None:
            self.refs.append((owner, StorageWeakRef(result.untyped_storage())))
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
        # A thread of gloo's may hold a buffer of a small collective for a moment after the call that waited for it.
        until(lambda: not watch.held(), seconds=10)
        left = watch.held()
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
    for ranks, axes, strategy in ((2, DP, fs.zero(3)), (4, OUTER, fs.hybrid(opt_state=True))):
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
    with large_from(1), point_to_point():
        state, _ = step(state, batch)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with fs.debug.record_collectives() as seen:
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


def communicated(strategy, axes, policy):
    mesh = mesh_of(axes, transport="native")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    step = fs.make_train_step(MODEL, opt, policy=policy)
    counts = []
    for batch in batches(3, mesh):
        mode = CommDebugMode()
        with mode, fs.debug.record_collectives() as seen:
            state, _ = step(state, batch)
        found = {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()}
        counts.append((len(seen[0].gathers), len(seen[0].reductions), found))
    return counts


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_torch_counts_the_same_collectives(policy):
    for counts in run_ranks(communicated, 2, fs.zero(3), DP, policy):
        for number, (gathers, reductions, found) in enumerate(counts):
            kept = policy == fs.policies.everything_saveable
            assert (gathers, reductions) == (UNITS if kept else 2 * UNITS - 2, UNITS)
            # Two all-gathers more than the counts say: the terms of (loss, weight), and those of the squared norm,
            # which every rank adds up itself. The first step also compares the setup, whether leaves were replaced, what the
            # loss depends on, and hashes before each gather and reduction, after forward and at the end. Reductions are
            # all-to-alls, summed where they arrive; nothing else is sent.
            more = 2 + (gathers + reductions + 5 if number == 0 else 0)
            assert sum(n for op, n in found.items() if "gather" in op) == gathers + more
            assert sum(n for op, n in found.items() if "all_to_all" in op or "alltoall" in op) == reductions
            assert sum(found.values()) == gathers + more + reductions
