"""Law: every linear map has the transpose that it says: `<op x, y> == <x, dual(op) y>`, summed over ranks."""

import functools
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.boxes import chunk
from fsharding.testing import Home, Leaf, assert_adjoint, device_mesh, rank_values, run_ranks, strategies
from tests.helpers import examples
from tests.laws import unit_is_adjoint


@dataclass(frozen=True)
class Map:
    """A collective: which, along which axes of which mesh, on what shape."""

    mesh: AbstractMesh
    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dims: tuple[int, int] = (0, 0)
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def members(self):
        return torch.Size(self.mesh.axis_size(axis) for axis in self.axes).numel()


@st.composite
def maps(draw):
    mesh = draw(strategies.meshes())
    op = draw(st.sampled_from(["pvary", "psum", "all_gather", "reduce_scatter", "all_to_all", "ppermute"]))
    many = 1 if op == "ppermute" else len(mesh.names)
    axes = tuple(draw(st.lists(st.sampled_from(mesh.names), min_size=1, max_size=many, unique=True)))
    shape = [*draw(strategies.shapes(2)), draw(st.sampled_from([1, 2, 3, 5, 8, 0]))]
    dims = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
    case = Map(mesh, op, axes, tuple(shape), dims)
    if op == "all_to_all":
        for dim in dims:
            shape[dim] = case.members * draw(st.integers(1, 2))
        return Map(mesh, op, axes, tuple(shape), dims)
    sources, targets = (draw(st.permutations(range(case.members))) for _ in range(2))
    count = draw(st.integers(0, case.members))
    return Map(mesh, op, axes, tuple(shape), dims, tuple(zip(sources[:count], targets[:count], strict=True)))


def is_adjoint(case):
    mesh, axes, dim = device_mesh(case.mesh), case.axes, case.dims[0]
    shape, same_in, same_out = list(case.shape), (), ()
    if case.op in ("pvary", "psum"):
        op, dual = (functools.partial(getattr(ops, name), axis=axes, mesh=mesh) for name in ("pvary", "psum"))
        same_in = axes
        if case.op == "psum":
            op, dual, same_in, same_out = dual, op, (), axes
    elif case.op in ("all_gather", "reduce_scatter"):
        size, index = shape[dim], 0
        for axis in axes:
            index = index * case.mesh.axis_size(axis) + coordinate(mesh)[axis]
        op = functools.partial(ops.all_gather, axis=axes, dim=dim, size=size, mesh=mesh)
        dual = functools.partial(ops.reduce_scatter, axis=axes, dim=dim, mesh=mesh)
        if case.op == "all_gather":
            start, stop = chunk(size, case.members, index)
            shape[dim] = stop - start
        else:
            op, dual = dual, op
    elif case.op == "all_to_all":
        split, concat = case.dims
        op = functools.partial(ops.all_to_all, axis=axes, split_dim=split, concat_dim=concat, mesh=mesh)
        dual = functools.partial(ops.all_to_all, axis=axes, split_dim=concat, concat_dim=split, mesh=mesh)
    else:
        back = [(b, a) for a, b in case.pairs]
        op = functools.partial(ops.ppermute, axis=axes[0], pairs=case.pairs, mesh=mesh)
        dual = functools.partial(ops.ppermute, axis=axes[0], pairs=back, mesh=mesh)
    x = rank_values(shape, mesh, same=same_in, seed=1)
    assert_adjoint(op, dual, x, mesh=mesh, same_in=same_in, same_out=same_out, what=case.op)


@examples(110, 440)
@given(maps())
def test_every_collective_has_its_transpose(case):
    run_ranks(is_adjoint, case.mesh.size, case)


@examples(40, 160)
@given(strategies.leaves([torch.float64]), strategies.meshes(), st.data())
def test_gathering_a_unit_has_its_transpose(leaf, mesh, data):
    run_ranks(unit_is_adjoint, mesh.size, leaf, data.draw(strategies.homes({"a": leaf}, mesh, [fs.FP32])))


def test_gathering_a_leaf_of_one_stage_has_its_transpose():
    """Its DTensor is on a slice of the mesh, the groups are those of the whole mesh: all ranks make them."""
    mesh = AbstractMesh(("pp", "ep", "cp"), (2, 2, 2))
    for strategy in (fs.zero(0), fs.zero(3)):
        run_ranks(unit_is_adjoint, 8, Leaf((5, 3), torch.float64), Home(mesh, strategy, stages={"a": 0}))
