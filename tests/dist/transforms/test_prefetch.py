"""How many units are gathered ahead, and two communicators instead of one: neither moves a bit."""

import dataclasses

import pytest
import torch

import fsharding as fs
from fsharding.mesh.device_mesh import axis_group, communicators_for, reduction_group
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.transforms.gather_context import current_context
from tests.helpers import full, mesh_of, point_to_point, refusal, whole
from tests.training import CONFIG, DP, OUTER, batches, optimizer

MODEL = fs.models.decoder(dataclasses.replace(CONFIG, layers=4))
UNITS = 6
DEPTHS = (0, 1, 2, 3)
SHARED = fs.policies.save_except_gathered


# --------------------------------------------------------------------------------------------------------------- depth
def trained(axes, strategy, depths, policy=SHARED, transport="auto"):
    """By depth: losses and parameters, the most units alive in each call, and how many gathers it has."""
    mesh, opt, found = mesh_of(axes, transport=transport), optimizer("adamw"), {}
    for depth in depths:
        state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
        step = fs.make_train_step(MODEL, opt, microbatches=3, prefetch_depth=depth, policy=policy)
        losses = []
        with point_to_point(), fs.debug.record_collectives() as calls:
            for batch in batches(2, mesh):
                state, metrics = step(state, batch)
                losses.append(metrics.loss)
        counts = {(c.peak_units, len(c.gathers)) for c in calls}
        found[depth] = (torch.stack(losses), whole(state.params)), counts
    return found


@pytest.mark.parametrize(
    "policy", [SHARED, pytest.param(fs.policies.nothing_saveable, marks=full)], ids=lambda p: p.name
)
@pytest.mark.parametrize("transport", ["pairwise", "shared_memory"])
def test_depth_bounds_the_units_alive_and_changes_no_bit(transport, policy):
    for found in run_ranks(trained, 2, DP, fs.zero(3), DEPTHS, policy, transport):
        for depth, (numbers, counts) in found.items():
            assert_bitwise_equal(numbers, found[1][0], f"depth {depth}")
            assert counts == {(depth + 1, 2 * UNITS - 2)}


@full
def test_depth_changes_no_bit_of_other_strategies():
    for strategy, axes, ranks in ((fs.zero(0), DP, 2), (fs.zero(2), DP, 2), (fs.hybrid(opt_state=True), OUTER, 4)):
        for found in run_ranks(trained, ranks, axes, strategy, DEPTHS):
            assert all(peak <= depth + 1 for depth, (_, counts) in found.items() for peak, _ in counts)
            for depth, (numbers, _) in found.items():
                assert_bitwise_equal(numbers, found[1][0], f"{strategy} at depth {depth}")


def started(depth):
    """What was gathered, or was on its way, when each block began, and half-way through its backward."""
    draws = {"w": fs.random.normal(fs.random.key(0), (5, 6, 6)), "head": fs.random.normal(fs.random.key(1), (6, 6))}
    layout = fs.plan_layout(draws, mesh_of(DP), names={"w": ("layers", None, None), "head": (None, None)})
    params = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout).params
    forward, backward = [], {}

    def note(x):
        context, number = current_context(), len(forward)
        forward.append(len(context.counts.gathers))
        x.register_hook(lambda grad: backward.update({number: len(context.counts.gathers)}))
        return x

    def loss_fn(params):
        head = {"w": params["head"]}
        x = fs.scan_units(
            lambda unit, x: note(torch.tanh(x @ unit["w"])) @ unit["w"],
            {"w": params["w"]},
            torch.ones(2, 6),
            next_unit=head,
        )
        head = fs.gather_unit(head)["w"]
        return (note(torch.tanh(x @ head)) @ head).sum()

    fs.value_and_grad(loss_fn, prefetch_depth=depth)(params)
    return forward, [backward[number] for number in reversed(range(6))]


def test_so_many_gathers_are_on_their_way_when_a_unit_computes_in_both_directions():
    for depth in DEPTHS:
        for forward, backward in run_ranks(started, 2, depth):
            assert forward == [min(i + 1 + depth, 6) for i in range(6)]
            # Backward begins with the last one, which is still there.
            assert backward == [6 + min(i + depth, 5) for i in range(6)]


def piped(depth):
    """Loss of a pipeline whose stages are gathered unit by unit, and the most units alive in each call."""
    schedule = fs.pipeline.plan_schedule("1f1b", 2, 2, gather="microbatch", ahead=0)
    layout = fs.plan_layout(
        MODEL, mesh_of({"pp": 2, "dp": 2}), strategy=fs.zero(3), stages=fs.pipeline.stages_of(MODEL, schedule)
    )
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, fs.sgd(0.1), microbatches=2, schedule=schedule, prefetch_depth=depth)
    with fs.debug.record_collectives() as calls:
        _, metrics = step(state, next(iter(batches(1, layout.mesh))))
    return float(metrics.loss), max(c.peak_units for c in calls)


def test_a_pipeline_gathers_as_far_ahead():
    runs = [run_ranks(piped, 4, depth) for depth in (0, 1, 2)]
    assert len({loss for run in runs for loss, _ in run}) == 1
    for depth, run in enumerate(runs):
        assert all(peak <= depth + 1 for _, peak in run)
    assert {peak for _, peak in runs[0]} == {1}


@pytest.mark.parametrize("given", [-1, True, 1.0, {"w": 0}], ids=str)
def test_a_depth_is_a_number_from_0(given):
    shown = "a dict" if isinstance(given, dict) else given
    for name, make in (
        ("fs.value_and_grad", lambda: fs.value_and_grad(lambda params: params, prefetch_depth=given)),
        ("fs.make_train_step", lambda: fs.make_train_step(MODEL, fs.sgd(0.1), prefetch_depth=given)),
    ):
        assert refusal(make) == (
            f"{name} got prefetch_depth={shown}.\nPass the number of units to gather ahead: 1, or 0 for none."
            " The units go to fs.gather_unit(next_unit=)."
        )


def other_depths():
    mesh = mesh_of(DP)
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(MODEL, mesh))
    step = fs.make_train_step(MODEL, fs.sgd(0.1), prefetch_depth=torch.distributed.get_rank())
    return refusal(step, state, next(iter(batches(1, mesh))))


def test_ranks_have_one_depth():
    for text in run_ranks(other_depths, 2):
        assert "prefetch_depth: rank 1 has 1, rank 0 has 0" in text


# ------------------------------------------------------------------------------------------------------- communicators
def apart(axes, strategies):
    """Losses with one communicator and with two, whether reductions have another group, and what the mesh says."""
    found = {}
    for count in (1, 2):
        mesh, losses = fs.make_mesh(device="cpu", communicators=count, **axes), []
        for strategy in strategies:
            layout = fs.plan_layout(MODEL, mesh, strategy=strategy)
            state = fs.init_state(MODEL, fs.adamw(1e-2), fs.random.key(0), layout)
            step = fs.make_train_step(MODEL, fs.adamw(1e-2), microbatches=3)
            for batch in batches(2, mesh):
                state, metrics = step(state, batch)
                losses.append(metrics.loss)
        gathers, reductions = axis_group(mesh, ("dp",)), reduction_group(mesh, ("dp",))
        assert gathers.ranks == reductions.ranks and gathers.terms == reductions.terms
        found[count] = torch.stack(losses), gathers.process_group is not reductions.process_group, repr(mesh)
    return found


def test_reductions_have_a_communicator_of_their_own_where_it_is_asked_for():
    for ranks, axes, strategies in (
        (2, {"dp": 2}, [fs.zero(i) for i in range(4)]),
        (4, {"replica": 2, "dp": 2}, [fs.hybrid(opt_state=True)]),
    ):
        for found in run_ranks(apart, ranks, axes, strategies):
            assert_bitwise_equal(found[2][0], found[1][0])
            assert [found[count][1] for count in (1, 2)] == [False, True]
            assert "reductions by separate communicators" in found[2][2]
            assert "separate" not in found[1][2]


def test_nccl_has_two_and_gloo_one():
    assert [communicators_for(backend) for backend in ("nccl", "gloo", "fake", "")] == [2, 1, 1, 1]


def communicators_of_a_part():
    """On two of three ranks: the others take part in making the groups, when the mesh is made and never again."""
    mesh = fs.make_mesh(device="cpu", dp=2, ranks=(2, 0), communicators=2)
    if not fs.is_member(mesh):
        return None
    groups = axis_group(mesh, ("dp",)).process_group, reduction_group(mesh, ("dp",)).process_group
    return groups[0] is not groups[1], [torch.distributed.get_process_group_ranks(group) for group in groups]


def test_a_mesh_of_some_ranks_has_both_from_the_start():
    assert run_ranks(communicators_of_a_part, 3) == [(True, [[0, 2]] * 2), None, (True, [[0, 2]] * 2)]


@pytest.mark.parametrize("given", [0, 3, True, "two"])
def test_a_number_of_communicators_is_1_or_2(given):
    assert refusal(fs.make_mesh, device="cpu", communicators=given).endswith(
        "Pass 1, 2 for separate all-gathers and reductions, or None for the backend's default."
    )
