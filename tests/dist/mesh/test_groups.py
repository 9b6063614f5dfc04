"""Process groups of meshes on real ranks: used again, closed when no rank has them, and a run that swaps all the time."""

import gc
import os
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base import _compat
from fsharding.mesh import device_mesh
from fsharding.testing import run_ranks
from tests.helpers import full, token_batch

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=20)
)
OPT = fs.adamw(1e-2)
SHAPES = (
    {"dp": 4},
    {"replica": 2, "dp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "ep": 2},
    {"dp": 2, "ranks": (1, 3)},
)


def new_mesh(seconds=20, **axes):
    return fs.make_mesh(device="cpu", timeout=timedelta(seconds=seconds), **axes)


def threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def swap(swaps, again):
    """Losses of a run that swaps its mesh, whose meshes are made again and again or once; what it holds, before and after."""
    kept = [] if again else [new_mesh(**axes) for axes in SHAPES]
    step, losses, used = fs.make_train_step(MODEL, OPT), [], []
    state = fs.init_state(MODEL, OPT, fs.random.key(0), fs.plan_layout(MODEL, new_mesh(**SHAPES[0])))
    for number in range(1, swaps + 1):
        mesh = new_mesh(**SHAPES[number % len(SHAPES)]) if again else kept[number % len(SHAPES)]
        state = fs.reshard(state, state.layout.with_mesh(mesh))
        warms_up = number <= len(SHAPES)
        if fs.is_member(mesh) and (warms_up or number % 7 == 0):
            state, metrics = step(state, token_batch(number, mesh=mesh))
            losses.append((number, metrics.loss.item()))
        if number == len(SHAPES):
            used.append(threads_and_descriptors())
    return losses, [*used, threads_and_descriptors()]


@pytest.mark.parametrize("swaps", [60, pytest.param(2000, marks=[full, pytest.mark.timeout(900)])])
def test_a_run_that_swaps_its_mesh_opens_no_more_and_more(swaps):
    want = [losses for losses, _ in run_ranks(swap, 4, swaps, False, timeout=800)]
    for rank, (losses, ((threads, descriptors), (threads_after, descriptors_after))) in enumerate(
        run_ranks(swap, 4, swaps, True, timeout=800)
    ):
        assert losses == want[rank]
        assert threads_after <= threads + 10 and descriptors_after <= descriptors + 20


def use_again():
    mesh = new_mesh(dp=2, tp=2)
    groups, several = mesh.get_all_groups(), device_mesh.axis_group(mesh, ("dp", "tp")).process_group
    gone = weakref.ref(mesh)
    view = fs.NamedSharding(mesh, fs.P(("tp", "dp"))).to_dtensor(torch.zeros(2), (8,)).device_mesh
    assert view is not mesh and [view.get_group(i) for i in (0, 1)] == groups[::-1]
    del mesh, view
    gc.collect()
    assert gone() is None
    again, turned = new_mesh(dp=2, tp=2), new_mesh(dp=2, ep=2, order=("pp", "replica", "ep", "dp", "cp", "tp"))
    assert all(a is b for a, b in zip(again.get_all_groups(), groups, strict=True))
    assert all(a is b for a, b in zip(turned.get_all_groups(), groups, strict=True))
    assert device_mesh.axis_group(turned, ("ep", "dp")).process_group is several
    # Messages of gloo go by the timeout with which their group was made, so another one has groups of its own.
    late = new_mesh(17, dp=2, tp=2)
    assert not any(a is b for a, b in zip(late.get_all_groups(), groups, strict=True))
    for mesh, seconds in ((again, 20), (late, 17)):
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            group = device_mesh.axis_group(mesh, axes).process_group
            assert _compat.group_timeout(group) == timedelta(seconds=seconds)
            found = torch.ones(1)
            dist.all_reduce(found, group=group)
            assert found.item() == 2 ** len(axes)
    return [dist.get_process_group_ranks(group) for group in groups]


def test_a_later_mesh_has_the_groups_of_an_earlier_one():
    assert run_ranks(use_again, 4) == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def two_timeouts_over_all():
    """Two meshes of all ranks along one axis: neither takes the other's timeout."""
    found = []
    for mesh in [new_mesh(seconds, dp=2) for seconds in (20, 19, 20)]:
        group = device_mesh.axis_group(mesh, ("dp",)).process_group
        assert device_mesh.everyone(mesh).process_group is group
        found.append(_compat.group_timeout(group).seconds)
    return found


def test_meshes_of_all_ranks_keep_their_timeouts():
    assert run_ranks(two_timeouts_over_all, 2) == [[20, 19, 20]] * 2


def make_others(count=10):
    for _ in range(count):
        new_mesh(dp=4)


def collect_on_some():
    rank, seconds = dist.get_rank(), 18
    new_mesh(dp=4)
    before = threads_and_descriptors()
    mesh = new_mesh(seconds, dp=2, tp=2)
    x = fs.NamedSharding(mesh, fs.P("dp", "tp")).to_dtensor(torch.full((1, 1), float(rank)), (2, 2))
    names = [group.group_name for group in mesh.get_all_groups()]
    during = threads_and_descriptors()
    if rank != 2:
        del mesh, x
    make_others()
    again = new_mesh(seconds, dp=2, tp=2)
    # The groups of rank 2 are kept, on the other rank of each as well; the two of which it is none are closed.
    kept = [group.group_name == name for group, name in zip(again.get_all_groups(), names, strict=True)]
    assert kept == [rank in (0, 2), rank in (2, 3)]
    sharding = fs.NamedSharding(again, fs.P("dp", "tp"))
    whole = fs.unshard(sharding.to_dtensor(torch.full((1, 1), float(rank)), (2, 2)))
    assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    if rank == 2:
        assert x.to_local().item() == 2.0
        del mesh, x
    names, held = [group.group_name for group in again.get_all_groups()], again.get_group("tp")
    del again, sharding
    make_others()
    # So they do for one that is held without its mesh.
    found = torch.ones(1)
    dist.all_reduce(found, group=held)
    assert found.item() == 2 and held.group_name == names[1]
    del held
    make_others()
    after = threads_and_descriptors()
    last = new_mesh(seconds, dp=2, tp=2)
    assert not {group.group_name for group in last.get_all_groups()} & {*names}
    for group in last.get_all_groups():
        dist.all_reduce(found, group=group)
    assert found.item() == 8
    return before, during, after


def test_groups_are_closed_when_no_rank_has_them():
    for before, during, after in run_ranks(collect_on_some, 4):
        # Two: timers of ranks that meet end a moment later.
        assert during[0] >= before[0] + 4 and after[0] <= before[0] + 2 and after[1] <= before[1] + 4
