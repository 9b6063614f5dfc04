"""What is used of private torch API between ranks is there and does what it should."""

import gc
import importlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsharding.base import _compat
from fsharding.mesh import backends, failures
from fsharding.mesh.consistency import gather_numbers
from fsharding.mesh.device_mesh import Group
from fsharding.testing import assert_bitwise_equal, run_ranks


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    gathered, several = torch.zeros(2 * size), [torch.zeros(2 * size), torch.zeros(size)]
    _compat.all_gather_single(gathered, torch.full((2,), float(rank)), group=group)
    _compat.all_gather_several(several, [torch.full((n,), float(rank)) for n in (2, 1)], group=group).wait()
    piece = torch.zeros(2)
    _compat.reduce_scatter_single(piece, torch.arange(2.0 * size) + rank, group=group)
    assert torch.equal(several[0], gathered) and several[1].tolist() == [*range(size)]
    group.set_timeout(timedelta(seconds=17))
    timeout = dist.distributed_c10d._get_default_timeout("gloo")
    own = group._get_backend(torch.device("cpu")).options._timeout
    assert _compat.group_timeout(group) == own
    group.set_timeout(timedelta(seconds=20))
    return gathered, piece, own, timeout


@pytest.mark.parametrize("ranks", [2])
def test_collectives_of_one_tensor_and_the_timeout_of_a_group(ranks):
    for rank, (gathered, piece, own, default) in enumerate(run_ranks(collectives, ranks)):
        assert_bitwise_equal(gathered, torch.tensor([0.0, 0.0, 1.0, 1.0]))
        assert_bitwise_equal(piece, torch.arange(4.0).chunk(2)[rank] * 2 + 1)
        assert own == timedelta(seconds=17) != default


def several_backends():
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    group = dist.new_group(backend="cpu:gloo,cuda:fake", timeout=timedelta(seconds=15))
    assert isinstance(group, dist.ProcessGroup)
    names = [backends.backend_of(group, device) for device in ("cpu", "cuda", "xpu")]
    world = dist.group.WORLD
    assert world is not None and not backends.has_fake_backend(world) and backends.has_fake_backend(group)
    return (
        names,
        _compat.group_timeout(group),
        gather_numbers(dist.get_rank() + 1, Group((0, 1), dist.get_rank(), group), "cuda"),
    )


def test_a_group_may_have_a_backend_for_each_device():
    """Numbers of the host go by the host, also where tensors live on another device."""
    for found in run_ranks(several_backends, 2):
        assert found == (["gloo", "fake", ""], timedelta(seconds=15), [1, 2])


def stores():
    store = backends.default_store()
    assert store is not None
    own = f"a{dist.get_rank()}"
    store.set(own, "here")
    dist.barrier()
    found = (
        [store.check([name]) for name in ("a0", "a1", "b")],
        bytes(store.get("a0")),
        backends.is_served_by_rank(store),
    )
    dist.barrier()
    store.delete_key(own)
    try:
        dist.recv(torch.zeros(1), src=1 - dist.get_rank(), group=dist.new_group(timeout=timedelta(seconds=0.1)))
    except RuntimeError as error:
        return *found, failures.is_network_error(error), store.check([own])
    raise AssertionError("nobody has sent anything")


def test_the_store_of_all_ranks_and_errors_of_its_groups():
    assert run_ranks(stores, 2) == [([True, True, False], b"here", False, True, False)] * 2
    served = dist.PrefixStore("a", dist.TCPStore("127.0.0.1", 0, 1, True))
    assert backends.is_served_by_rank(served) and not backends.is_served_by_rank(dist.HashStore())
    assert failures.is_network_error(dist.DistNetworkError()) and not failures.is_network_error(RuntimeError("shape"))


def holders():
    """Who holds a group, and what goes when it is closed."""
    rank, threads = dist.get_rank(), len(os.listdir("/proc/self/task"))
    assert (_compat.new_group((1,), timedelta(seconds=20)) is None) == (rank == 0)
    kept = [_compat.new_group((0, 1), timedelta(seconds=19))]
    idle = _compat.holders_of(kept[0])
    gc.collect()
    assert _compat.holders_of(kept[0]) == idle and _compat.group_timeout(kept[0]) == timedelta(seconds=19)
    mesh = _compat.device_mesh_of(kept, "cpu", ("dp",), torch.arange(2))
    assert mesh.get_group("dp") is kept[0] and mesh.get_coordinate() == (rank,) and mesh.mesh_dim_names == ("dp",)
    with_mesh = _compat.holders_of(kept[0])
    del mesh
    gc.collect()
    name, found = kept[0].group_name, torch.ones(1)
    dist.all_reduce(found, group=kept[0], async_op=True).wait()
    assert found.item() == 2 and with_mesh > idle and _compat.holders_of(kept[0]) == idle
    during = len(os.listdir("/proc/self/task"))
    dist.barrier()
    _compat.close_group(kept.pop())
    with pytest.raises(RuntimeError):
        dist.distributed_c10d._resolve_process_group(name)
    return threads < during and len(os.listdir("/proc/self/task")) < during


def test_holders_of_a_group_are_counted_and_a_closed_one_is_gone():
    assert run_ranks(holders, 2) == [True, True]
