"""`NamedSharding`, `Local` and `typeof` by example; the laws are in tests/property/sharding/test_values.py."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsharding as fs
from fsharding.base.errors import SpecError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding.named_sharding import Assigned, local_of, sharding_of, to_local
from fsharding.sharding.partition_spec import P
from tests import helpers

MESH = AbstractMesh(("dp", "tp"), (4, 2))


refusal = functools.partial(helpers.refusal, kind=SpecError)


def placed(spec, shape, partial=()):
    sharding = fs.NamedSharding(fs.make_mesh(device="cpu"), spec, partial)
    return sharding.to_dtensor(torch.arange(float(torch.Size(shape).numel())).view(shape), shape)


def test_boxes_of_one_rank():
    sharding = fs.NamedSharding(MESH, P(("dp", "tp"), None))
    assert sharding.box((10, 3), {"dp": 1, "tp": 1}) == ((5, 6), (0, 3))
    assert sharding.local_shape((10, 3), {"dp": 3, "tp": 1}) == (0, 3)
    assert sharding.box((10, 3)) == ((0, 2), (0, 3)), "on an abstract mesh, the first rank"
    assert sharding.axes(0) == ("dp", "tp") and sharding.axes(1) == ()
    assert sharding.drop(0) == fs.NamedSharding(MESH, P())


def test_a_leaf_is_gathered_over_the_data_axes_that_it_does_not_own():
    mesh = AbstractMesh(("replica", "dp", "ep", "tp"), (2, 2, 2, 2))
    sharding = fs.NamedSharding(mesh, P(None, "ep", ("tp", "dp")), ("replica",), owned=("ep",))
    assert sharding.data_axes == ("dp", "replica") and fs.NamedSharding(mesh).data_axes == ("dp", "ep", "replica")
    assert str(sharding) == "P(None, 'ep', ('tp', 'dp')) unreduced over replica owned over ep"
    assert sharding.drop(0).owned == ("ep",) and sharding.drop(1) == fs.NamedSharding(
        mesh, P(None, ("tp", "dp")), ("replica",)
    )
    assert fs.NamedSharding(AbstractMesh(("dp",), (2,)), P("ep", "dp"), owned=("ep",)).simplified().owned == ()
    for spec, owned in ((P("tp"), "tp"), (P("dp"), "ep")):
        assert refusal(lambda: fs.NamedSharding(mesh, spec, owned=(owned,))) == (  # noqa: B023
            f"fs.NamedSharding cannot own {owned} with the spec {spec}.\nOwn axes of the spec among dp, ep, cp, replica."
        )


def test_a_dtensor_says_what_it_owns_and_torch_keeps_it():
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "ep"), _init_backend=False, _rank=0)
    for spec, size in ((P("ep", "dp"), (2, 3)), (P(("ep", "dp")), (1, 6)), (P("ep"), (2, 6))):
        sharding = fs.NamedSharding(mesh, spec, owned=("ep",))
        x = sharding.to_dtensor(torch.zeros(size), (4, 6))
        assert sharding_of(x) == sharding and sharding_of(x) != fs.NamedSharding(mesh, spec)
        for other in (x.clone(), x.detach() * 2, x.bfloat16(), to_local(x)):
            assert fs.typeof(other).sharding == sharding
        assert {*x.device_mesh.mesh_dim_names} == {"dp", "ep_owned"}
    assert str(fs.typeof(x)) == "float32[4@ep, 6] owned over ep"


def test_axes_of_size_one_mean_nothing():
    sharding = fs.NamedSharding(MESH, P(("pp", "dp"), "cp"), ("ep",))
    assert sharding.axes(0) == ("dp",) and sharding.axes(1) == ()
    assert sharding.simplified() == fs.NamedSharding(MESH, P("dp"))


def test_a_leaf_can_be_owned_index_by_index():
    stages = Assigned.indices("dp", 0, ((0, 7), (1, 6), (2, 5), (3, 4)))
    sharding = fs.NamedSharding(MESH, P(None, "tp"), assigned=(stages,))
    assert sharding.boxes((8, 4), {"dp": 0, "tp": 1}) == (((0, 1), (2, 4)), ((7, 8), (2, 4)))
    assert sharding.boxes((8, 4), {"dp": 3, "tp": 0}) == (((3, 5), (0, 2)),)
    assert sharding.local_shape((8, 4), {"dp": 0, "tp": 0}) == (2, 2)
    assert sharding.drop(0) == fs.NamedSharding(MESH, P("tp"))


def test_a_leaf_can_be_owned_whole():
    first = fs.NamedSharding(MESH, P("tp"), assigned=(Assigned.whole("dp", (0,), 4),))
    assert first.boxes((4, 3), {"dp": 0, "tp": 1}) == (((2, 4), (0, 3)),)
    assert first.boxes((4, 3), {"dp": 1, "tp": 1}) == ()
    assert first.local_shape((4, 3), {"dp": 0}) == (2, 3) and first.local_shape((4, 3), {"dp": 2}) == (0, 3)
    first = fs.NamedSharding(MESH, assigned=(Assigned.whole("dp", (0,), 4),))
    assert first.boxes((), {"dp": 0}) == ((),) and first.boxes((), {"dp": 1}) == ()
    assert first.local_shape((), {"dp": 0}) == () and first.local_shape((), {"dp": 1}) == (0,)


def test_the_parts_of_a_fused_dim_are_cut_each():
    fused = fs.NamedSharding(MESH, P("dp"), assigned=(Assigned.parts("tp", 1, (4, 2, 2), 2),))
    assert fused.grid((8, 8), {"dp": 1, "tp": 1}) == (((2, 4),), ((2, 4), (5, 6), (7, 8)))
    assert fused.local_shape((8, 8), {"dp": 1, "tp": 1}) == (2, 4)
    assert fused.drop(0) == fs.NamedSharding(MESH, P(), assigned=(Assigned.parts("tp", 0, (4, 2, 2), 2),))


def test_the_spec_cuts_what_a_coordinate_owns():
    both = fs.NamedSharding(MESH, P("tp"), assigned=(Assigned.indices("dp", 0, ((0, 3, 4, 7), (), (), (1, 2, 5, 6))),))
    assert both.boxes((8,), {"dp": 0, "tp": 1}) == (((4, 5),), ((7, 8),))
    assert both.boxes((8,), {"dp": 3, "tp": 0}) == (((1, 3),),) and both.boxes((8,), {"dp": 1}) == ()


def test_an_empty_dim_has_an_empty_box_whoever_owns_it():
    nothing = fs.NamedSharding(MESH, assigned=(Assigned.parts("tp", 1, (0, 0), 2),))
    assert nothing.boxes((3, 0), {"tp": 1}) == (((0, 3), (0, 0)),) and nothing.local_shape((3, 0), {"tp": 0}) == (3, 0)


def test_two_dims_can_be_assigned():
    stages, heads = Assigned.indices("dp", 0, ((0, 2), (1, 3), (), ())), Assigned.parts("tp", 1, (2, 2), 2)
    both = fs.NamedSharding(MESH, assigned=(stages, heads))
    assert both.boxes((4, 4), {"dp": 0, "tp": 1}) == (
        ((0, 1), (1, 2)), ((0, 1), (3, 4)), ((2, 3), (1, 2)), ((2, 3), (3, 4))
    )  # fmt: skip
    with pytest.raises(SpecError, match="two assignments of one dim"):
        fs.NamedSharding(MESH, assigned=(stages, Assigned.parts("tp", 0, (2, 2), 2)))


def test_placements():
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=5)
    assert fs.NamedSharding(mesh, P("tp", "dp")).placements() == (Shard(1), Shard(0))
    assert fs.NamedSharding(mesh, P(None, "dp"), ("tp",)).placements() == (Shard(1), Partial("sum"))
    assert fs.NamedSharding(mesh, P()).placements() == (Replicate(), Replicate())
    assert fs.NamedSharding(mesh, P("dp")).device_mesh() is mesh
    x = fs.NamedSharding(mesh, P("dp", "tp")).to_dtensor(torch.zeros(2, 3), (8, 5 + 1))
    assert isinstance(x, DTensor) and x.shape == (8, 6) and x.stride() == (6, 1)


def test_a_dtensor_shares_the_memory_of_its_local_tensor():
    local = torch.arange(6.0).view(2, 3)
    x = fs.NamedSharding(fs.make_mesh(device="cpu"), P("dp")).to_dtensor(local, (2, 3))
    node = to_local(x)
    assert local_of(x).data_ptr() == node.value.data_ptr() == local.data_ptr()
    assert not node.value.requires_grad and local_of(local) is local
    assert node.shape == (2, 3) and node.sharding == fs.NamedSharding(fs.make_mesh(device="cpu"), P("dp"))


def test_types_print_as_the_errors_show_them():
    sharding = fs.NamedSharding(MESH, P(None, ("dp", "tp")))
    assert str(fs.typeof(fs.Local(torch.zeros(8, 64), sharding, (8, 512)))) == "float32[8, 512@dp*tp]"
    assert repr(fs.Local(torch.zeros(8, 64), sharding, (8, 512))) == "Local(float32[8, 512@dp*tp])"
    unreduced = fs.NamedSharding(MESH, P("tp"), ("dp",))
    assert str(fs.typeof(fs.Local(torch.zeros(2), unreduced, (4,)))) == "float32[4@tp] unreduced over dp"
    assert str(fs.typeof(torch.zeros((), dtype=torch.int64))) == "int64[]"
    assert str(fs.typeof(fs.random.ones((2, 3), dtype=torch.bfloat16))) == "bfloat16[2, 3]"
    assert str(fs.typeof(placed(P("dp"), (2, 3)))) == "float32[2@dp, 3]"


def test_texts_of_shardings():
    assert str(fs.NamedSharding(MESH, P("dp"))) == "P('dp')"
    assert str(fs.NamedSharding(MESH, P(), ("dp", "tp"))) == "P() unreduced over dp, tp"
    assert str(fs.NamedSharding(MESH, P("tp"), assigned=(Assigned.whole("dp", (0,), 4),))) == "P('tp') assigned over dp"


def test_an_axis_has_one_role():
    assert refusal(lambda: fs.NamedSharding(MESH, P("dp"), ("dp",))) == (
        "fs.NamedSharding uses dp in the spec P('dp') and again as partial or assigned.\nGive an axis one role."
    )
    assert refusal(
        lambda: fs.NamedSharding(MESH, P("dp"), assigned=(Assigned.indices("dp", 0, ((0,), (), (), ())),))
    ) == ("fs.NamedSharding uses dp in the spec P('dp') and again as partial or assigned.\nGive an axis one role.")


def test_an_axis_is_known():
    for how in ({"partial": ("dpp",)}, {"assigned": (Assigned.whole("dpp", (0,), 2),)}):
        assert refusal(lambda how=how: fs.NamedSharding(MESH, P("tp"), **how)) == (
            "fs.NamedSharding got an unknown axis 'dpp'. Axes are pp, replica, dp, ep, cp, tp. Did you mean 'dp'?"
        )


def test_a_spec_has_no_more_entries_than_the_leaf_has_dims():
    text = (
        "fs.NamedSharding P('dp', 'tp') has more dims than a leaf of shape (4,).\nPass fs.P at most one entry per dim."
    )
    assert refusal(lambda: fs.NamedSharding(MESH, P("dp", "tp")).local_shape((4,))) == text
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=1)
    here = fs.NamedSharding(mesh, P("dp", "tp"))
    for call in (lambda: here.to_dtensor(torch.zeros(2), (4,)), lambda: fs.shard(torch.zeros(4), here)):
        assert refusal(call) == text
    with pytest.raises(SpecError):
        fs.NamedSharding(MESH, P(), assigned=(Assigned.indices("dp", 1, ((0,), (), (), ())),)).local_shape((4,))
    assert fs.NamedSharding(MESH, P(None, None)).local_shape((4,)) == (4,)


def test_a_local_tensor_of_another_shape_is_refused():
    sharding = fs.NamedSharding(fs.make_mesh(device="cpu"), P("dp"))
    assert refusal(lambda: sharding.to_dtensor(torch.zeros(3), (4,))) == (
        "fs.NamedSharding.to_dtensor got a local tensor of shape (3,), but P('dp') of a leaf of shape (4,) has (4,) on"
        " this rank.\nPass this rank's shard and the full shape."
    )


def test_an_abstract_mesh_holds_nothing():
    assert refusal(lambda: fs.NamedSharding(MESH, P("dp")).device_mesh()) == (
        "fs.NamedSharding cannot place a tensor on the abstract mesh {dp: 4, tp: 2}.\nUse fs.make_mesh."
    )


def test_placements_that_no_spec_expresses():
    mesh = fs.make_mesh(device="cpu")
    x = DTensor.from_local(torch.zeros(2), mesh, [Partial("max")], run_check=False)
    assert refusal(lambda: sharding_of(x)) == (
        "fs.typeof cannot express the placement P(max) on axis dp.\nUse Shard(dim), Replicate() or Partial('sum')."
    )
