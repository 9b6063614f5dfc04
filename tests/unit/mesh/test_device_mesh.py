"""Meshes: sizes, coordinates, groups, and the texts for what cannot be one."""

import contextvars
import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import fsharding as fs
from fsharding.base.calls import call_as
from fsharding.base.errors import ArgumentError, ConfigError, MeshError
from fsharding.mesh import device_mesh, rendezvous
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh, make_shape
from tests import helpers

KNOWN = "Axes are pp, replica, dp, ep, cp, tp."


@given(st.lists(st.integers(1, 4), min_size=6, max_size=6), st.permutations(AXES))
def test_sizes_are_kept_in_the_order_that_was_asked(sizes, order):
    axes = dict(zip(AXES, sizes, strict=True))
    world = torch.tensor(sizes).prod().item()
    mesh = make_shape(axes, world=world, order=order)
    assert mesh.size == world and list(mesh.names) == [a for a in order if a in mesh.names]
    assert all(mesh.axis_size(axis) == size for axis, size in axes.items())
    assert mesh.names == tuple(a for a in order if axes[a] > 1) or mesh == AbstractMesh(("dp",), (1,))
    free = {**axes, "cp": -1}
    assert make_shape(free, world=world, order=order) == mesh
    for position, coord in enumerate(mesh.coordinates()):
        assert mesh.coordinate(position) == coord
        assert mesh.rank_at(coord) == position


def test_ranks_of_an_abstract_mesh_may_be_in_any_order():
    mesh = AbstractMesh(("dp", "tp"), (2, 2), (3, 1, 2, 0))
    assert [mesh.rank_at(coord) for coord in mesh.coordinates()] == [3, 1, 2, 0]
    assert mesh.rank_at({"dp": 1}) == 2
    assert str(mesh) == "{dp: 2, tp: 2}"
    assert mesh.axis_size("pp") == 1


def test_one_process_without_a_launcher_has_a_mesh_without_a_group():
    mesh = fs.make_mesh(device="cpu", dp=-1, tp=1)
    assert isinstance(mesh, DeviceMesh) and not torch.distributed.is_initialized()
    assert device_mesh.abstract(mesh) == AbstractMesh(("dp",), (1,))
    assert device_mesh.coordinate(mesh) == {"dp": 0}
    assert device_mesh.data_axes(mesh) == ()
    assert device_mesh.data_rank_and_size(mesh) == (0, 1)
    group = device_mesh.axis_group(mesh, ("dp", "cp"))
    assert (group.ranks, group.index, group.process_group, group.order) == ((0,), 0, None, (0,))


def test_an_axis_that_is_nowhere_has_size_one():
    mesh = AbstractMesh(("dp", "ep"), (2, 4))
    assert (
        device_mesh.axis_size("ep") == 1
        and device_mesh.axis_size("ep", mesh) == 4
        and device_mesh.axis_size("tp", mesh) == 1
    )
    with fs.set_mesh(mesh):
        assert device_mesh.axis_size("ep") == 4


def test_data_axes_and_positions():
    mesh = AbstractMesh(("pp", "replica", "dp", "ep", "cp", "tp"), (2, 2, 3, 2, 2, 2))
    assert device_mesh.data_axes(mesh) == ("dp", "ep", "cp", "replica")
    assert device_mesh.data_rank_and_size(mesh) == (0, 12)
    assert device_mesh.coordinate(mesh) == dict.fromkeys(AXES, 0)


def test_the_mesh_in_use_is_that_of_the_innermost_block():
    outer, inner = AbstractMesh(("dp",), (2,)), AbstractMesh(("tp",), (2,))
    with fs.set_mesh(outer):
        with fs.set_mesh(inner):
            assert device_mesh.current_mesh() is inner
        assert device_mesh.current_mesh() is outer
    with pytest.raises(MeshError), fs.set_mesh(outer):
        raise MeshError("out")
    assert refusal(lambda: call_as("fs.ops.psum", device_mesh.current_mesh)) == (
        "fs.ops.psum was called without a mesh.\nPass mesh=, or call it inside fs.set_mesh(mesh)."
    )


def test_a_mesh_is_set_by_the_call_alone():
    first, second = AbstractMesh(("dp",), (2,)), AbstractMesh(("tp",), (2,))

    def program():
        fs.set_mesh(first)
        seen = [device_mesh.mesh_here()]
        block = fs.set_mesh(second)
        seen.append(device_mesh.mesh_here())
        for _ in range(2):  # A context manager may be entered again.
            with block:
                seen.append(device_mesh.mesh_here())
            seen.append(device_mesh.mesh_here())
        return seen

    assert contextvars.copy_context().run(program) == [first, second, second, first, second, first]
    assert device_mesh.mesh_here() is None


@pytest.mark.parametrize("given", ["nonsense", None, {"dp": 2}])
def test_what_is_no_mesh_is_not_set(given):
    text = helpers.refusal(lambda: fs.set_mesh(given), kind=ArgumentError)
    assert text.startswith("fs.set_mesh takes a mesh, got ") and text.endswith("Pass one, such as fs.make_mesh(dp=-1).")
    assert device_mesh.mesh_here() is None


refusal = functools.partial(helpers.refusal, kind=MeshError)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 3, "tp": 2}, "fs.make_mesh got dp=3, tp=2 (size 6), but the world size is 8.\nUse dp=-1 for the remaining ranks."),
        ({"pp": 3, "tp": 2}, "fs.make_mesh got pp=3, tp=2 (size 6), but the world size is 8.\nStart 6 ranks, or choose sizes whose product divides 8."),
        ({"dp": -1, "tp": 3}, "fs.make_mesh got dp=-1, tp=3 (size 3), but the world size is 8.\nStart 3 ranks, or choose sizes whose product divides 8."),
        ({"dp": -1, "tp": -1}, "fs.make_mesh got dp=-1 and tp=-1.\nA size is at least 1; one axis may be -1."),
        ({"dp": 0, "tp": -3}, "fs.make_mesh got dp=0, tp=-3.\nA size is at least 1; one axis may be -1."),
        ({"dpp": 2}, f"fs.make_mesh got an unknown axis 'dpp'. {KNOWN} Did you mean 'dp'?"),
        ({"model": 2}, f"fs.make_mesh got an unknown axis 'model'. {KNOWN}"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_mesh(axes, text):
    assert refusal(lambda: call_as("fs.make_mesh", make_shape, axes, world=8)) == text


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ((("dpp", "tp"), (2, 0)), [f"'dpp' isn't an axis: they are {', '.join(AXES)}", "tp=0: at least 1"]),
        ((("dp", "tp", "dp"), (2, -1)), ["'dp' is repeated", "tp=-1: at least 1", "3 axes, but 2 sizes"]),
        ((("dp",), (2,), (0, 1, 2)), ["2 positions, but 3 ranks: (0, 1, 2)"]),
        ((("dp",), (2,), (1, 1)), ["2 positions, but 1 ranks: (1, 1)"]),
    ],
)
def test_an_abstract_mesh_is_one(mesh, rows):
    assert refusal(lambda: AbstractMesh(*mesh)).splitlines() == [
        "fs.AbstractMesh got invalid axes.",
        *(f"  {row}" for row in rows),
        'Write fs.AbstractMesh(("dp", "tp"), (4, 2)): each axis once, each size at least 1.',
    ]


def test_the_order_names_all_six_axes():
    assert refusal(lambda: call_as("fs.make_mesh", make_shape, {"dp": 8}, world=8, order=("dp", "tp"))) == (
        "fs.make_mesh needs an order of all six axes, got ('dp', 'tp').\nUse ('pp', 'replica', 'dp', 'ep', 'cp', 'tp')."
    )


def test_a_device_mesh_needs_our_names():
    plain = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    text = refusal(lambda: device_mesh.abstract(plain))
    assert text.endswith("needs a mesh with named axes.\nName its dims with pp, replica, dp, ep, cp, tp.")
    other = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("fsdp",), _init_backend=False, _rank=0)
    assert refusal(lambda: device_mesh.abstract(other)).endswith(
        f"got an unknown axis 'fsdp'. {KNOWN} Did you mean 'dp'?"
    )


def test_an_abstract_mesh_sends_nothing():
    mesh = AbstractMesh(("dp", "tp"), (4, 2))
    text = refusal(lambda: device_mesh.axis_group(mesh, ("dp", "tp")))
    assert (
        text
        == "fsharding cannot run a collective over dp, tp on the abstract mesh {dp: 4, tp: 2}.\nUse a mesh from fs.make_mesh."
    )
    assert device_mesh.axis_group(mesh, ("cp",)).size == 1


def test_the_environment_says_where_ranks_meet_and_the_user_where_they_listen(monkeypatch):
    for name in ("FSHARDING_INIT_METHOD", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous.init_arguments() == {}
    monkeypatch.setenv("FSHARDING_INIT_METHOD", "file:///tmp/meet")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rendezvous.init_arguments() == {"init_method": "file:///tmp/meet"}
    monkeypatch.delenv("FSHARDING_INIT_METHOD")
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    assert rendezvous.init_arguments() == {}, "with a store of each start's own"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert refusal(lambda: call_as("fs.make_mesh", rendezvous.init_arguments), kind=ConfigError) == (
        "fs.make_mesh cannot restart the ranks of 2 machines in the store of torchrun.\n"
        "  It has the addresses of dead ranks, and new ranks would wait for those.\n"
        "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine."
    )
    here = rendezvous.loopback()
    assert rendezvous.local_variables()["NCCL_SOCKET_IFNAME"] == here
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert rendezvous.local_variables() == {"TORCH_GLOO_LAZY_INIT": "1", "NCCL_SOCKET_IFNAME": here}
