"""Caches on meshes: one for each mesh, gone with it, and not in copies of it."""

import copy
import gc
import io
import pickle
import weakref

import torch
from torch.distributed.device_mesh import DeviceMesh

import fsharding as fs
from fsharding import tree
from fsharding.base._compat import cache_on_mesh, kept_by
from fsharding.mesh import device_mesh
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding import mesh_view
from tests.helpers import slow

CALLS = []


@cache_on_mesh(2)
def pair(mesh, number):
    CALLS.append(number)
    return mesh, number


def four(rank=0):
    grid = torch.arange(4).view(2, 2)
    return DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=rank)


def test_each_mesh_has_results_of_its_own():
    CALLS.clear()
    one, other = four(), four()
    assert one == other and pair(one, 1)[0] is one and pair(other, 1)[0] is other
    assert pair(one, 1) is pair(one, 1) and CALLS == [1, 1]
    for number in (2, 3, 1):
        pair(one, number)
    assert CALLS == [1, 1, 2, 3, 1]
    abstract = AbstractMesh(("dp",), (2,))
    assert pair(abstract, 7) is pair(AbstractMesh(("dp",), (2,)), 7) and CALLS[-2:] == [1, 7]


@slow
def test_a_mesh_is_collected_with_what_was_planned_on_it():
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=20)
    )
    layout = fs.plan_layout(model, fs.make_mesh(dp=1, device="cpu"))
    step = fs.make_train_step(model, fs.adamw(1e-2))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    state, _ = step(fs.init_state(model, fs.adamw(1e-2), fs.random.key(0), layout), batch)
    assert len(tree.paths(state)) == len(tree.leaves(state))
    other = layout.with_mesh(fs.make_mesh(dp=1, device="cpu"))
    gone = weakref.ref(layout.mesh)
    state = fs.reshard(state, other)
    del layout
    # The step keeps the layout of its last state only.
    state, _ = step(state, batch)
    gc.collect()
    assert gone() is None and state.layout is other


def test_a_copy_of_a_mesh_has_no_results():
    mesh = four()
    view = fs.NamedSharding(mesh, fs.P(("tp", "dp"))).device_mesh()
    assert mesh_view.base(view).mesh is mesh and device_mesh.coordinate(mesh) == {"dp": 0, "tp": 0} and kept_by(mesh)
    for same in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert same == mesh and not kept_by(same) and device_mesh.abstract(same) == device_mesh.abstract(mesh)


def test_a_tensor_on_disk_needs_nothing_of_ours():
    mesh = fs.make_mesh(dp=1, device="cpu")
    x = fs.shard(torch.arange(3.0), fs.NamedSharding(mesh, fs.P("dp")))
    assert kept_by(x.device_mesh)
    file = io.BytesIO()
    torch.save(x, file)
    assert b"fsharding.base._compat" not in file.getvalue()
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again.to_local().tolist() == [0.0, 1.0, 2.0] and not kept_by(again.device_mesh)
