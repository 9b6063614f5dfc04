"""The laws of the design on random meshes of up to 8 ranks with all six axes. Cases are drawn here and sent to ranks that wait."""

import functools
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import abstract, coordinate, data_axes
from fsharding.sharding.boxes import chunk
from fsharding.sharding.named_sharding import local_of, to_local
from fsharding.testing import (
    Home,
    Leaf,
    Pair,
    TrainCase,
    assert_adjoint,
    assert_bitwise_equal,
    device_mesh,
    local_part,
    rank_values,
    run_ranks,
    strategies,
    whole_tensors,
)
from fsharding.train.state import main_of
from tests.helpers import examples, full
from tests.laws import content_is_whole, layout_here, optimizer, parts, some_state


def draws_of(leaves, key):
    """Lazy draws for floats; what has no gradient is whole."""

    def make(path, leaf):
        if not leaf.dtype.is_floating_point:
            return leaf.tensor(1)
        return fs.random.normal(fs.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape, dtype=leaf.dtype)

    return fs.tree.map_with_path(make, leaves)


# ------------------------------------------------------------------------------------------- 1, 8: training and bytes
def train(case):
    """Runs the case; each step's state has the bytes that the layout says, and gradients too."""
    opt, layout = fs.sgd(1 / 16, momentum=0.5), layout_here(case.leaves, case.home)
    here = case.home.layout(case.leaves).memory(opt, coordinate(layout.mesh))
    assert layout.memory(opt) == here
    state = fs.init_state(lambda key: whole_tensors(case.leaves, numbers=True), opt, fs.random.key(0), layout)
    step = fs.make_train_step(case.loss, opt, microbatches=case.microbatches, donate=case.donate)
    _, grads = fs.value_and_grad(case.loss, grads=layout.grads, mean=False)(state.params, case.batch(0, layout.mesh))
    assert fs.state_bytes(grads) == here.grads
    for number in range(case.steps):
        assert fs.state_bytes((state.params, state.main, state.opt_state)) == here.state
        state, metrics = step(state, case.batch(number, layout.mesh))
    specs = fs.tree.leaves(layout.params), fs.tree.leaves(layout.main)
    main = main_of(state)
    assert [str(s) for s in specs[1]] == [str(fs.typeof(x).sharding) for x in fs.tree.leaves(main)]
    want, losses = in_plain_torch(case)
    found = dict(zip(fs.tree.paths(state.params), fs.tree.leaves(state.params), strict=True))
    cut = {path: local_part(want[path], s) for path, s in zip(found, specs[0], strict=True)}
    assert_bitwise_equal(parts(found), cut, "trained parameters")
    assert abs(metrics.loss.item() - losses[-1]) <= 1e-6 * abs(losses[-1]), (metrics.loss, losses)


def in_plain_torch(case):
    """The same run on whole tensors, without this library: parameters by path, and the losses."""
    params = fs.tree.named_leaves(whole_tensors(case.leaves, numbers=True))
    frozen = {path for path, leaf in fs.tree.named_leaves(case.leaves).items() if leaf.frozen}
    trained = [w.requires_grad_() for path, w in params.items() if w.is_floating_point() and path not in frozen]
    momenta, losses = [torch.zeros_like(w) for w in trained], []
    for number in range(case.steps):
        total, weight = case.loss(params, case.batch(number))
        losses.append((total / weight).item())
        grads = torch.autograd.grad(total / weight, trained) if trained else ()
        momenta = [0.5 * m + g for m, g in zip(momenta, grads, strict=True)]
        with torch.no_grad():
            for w, m in zip(trained, momenta, strict=True):
                w -= m / 16
    return {path: w.detach() for path, w in params.items()}, losses


@examples(40, 600)
@given(strategies.train_cases())
def test_any_home_trains_to_the_same_bits_in_the_bytes_that_were_planned(case):
    run_ranks(train, case.ranks, case)


# Leaves that ranks own along a data axis are rare among random ones.
OWNED = {
    "w": Leaf((5, 3, 4), names=("expert", "mlp", "embed")),
    "b": Leaf((3,), names=("expert",)),
    "v": Leaf((6, 2), names=("embed", None)),
    "blocks": {"w": Leaf((2, 3, 7), names=("layers", "expert", "embed"))},
}
OWNERS = [
    Home(AbstractMesh(("ep", "dp"), (2, 2)), fs.zero(1)),
    Home(AbstractMesh(("replica", "ep"), (2, 2)), fs.HFSDP),
    Home(AbstractMesh(("dp", "ep", "tp"), (2, 2, 2)), fs.zero(3)),
    Home(AbstractMesh(("dp", "cp"), (2, 2)), fs.zero(2), fs.DEFAULT_RULES.replace(expert=("cp", "dp"))),
    Home(AbstractMesh(("ep", "cp"), (3, 2)), fs.zero(0)),
]


@pytest.mark.parametrize(
    "home",
    [home if i in (0, 4) else pytest.param(home, marks=full) for i, home in enumerate(OWNERS)],
    ids=lambda home: f"{home.mesh}-{home.strategy}",
)
def test_leaves_that_ranks_own_keep_the_laws_too(home, tmp_path):
    layout = home.layout(OWNED)
    assert [leaf.path for leaf in layout.leaves if leaf.params.owned] == ["b", "blocks.w", "w"]
    case = TrainCase(OWNED, home, rows=8, microbatches=2, steps=2, donate=True)
    run_ranks(train, case.ranks, case)
    run_ranks(init, case.ranks, OWNED, home)
    run_ranks(save, case.ranks, OWNED, home, tmp_path / "a")
    for other in OWNERS:
        if other.mesh.size == case.ranks or other is OWNERS[0]:
            run_ranks(load, other.mesh.size, OWNED, other, tmp_path / "a", False)
    for leaf in (Leaf(leaf.shape, torch.float64, leaf.names) for leaf in fs.tree.leaves(OWNED)):
        run_ranks(unit_is_adjoint, case.ranks, leaf, home)


# ------------------------------------------------------------------------------------------------------------ 2: init
def init(leaves, home):
    """Every rank compares its slices with the whole draw."""
    layout, opt, key = layout_here(leaves, home), optimizer(), fs.random.key(7)
    state = fs.init_state(lambda key: draws_of(leaves, key), opt, key, layout)
    inner = fs.random.split(key)[0]
    whole = [d if isinstance(d, torch.Tensor) else d.tensor() for d in fs.tree.leaves(draws_of(leaves, inner))]
    dtypes = layout.precision
    for x, value, leaf in zip(fs.tree.leaves(state.params), whole, layout.leaves, strict=True):
        want = value.to(dtypes.main_dtype(leaf.init)).to(layout.param_dtype(leaf))
        assert_bitwise_equal(local_of(x), local_part(want, leaf.params), leaf.path)
    if state.main is not None:
        mains = fs.tree.flatten_up_to(layout.structure, state.main, "test")
        for x, value, leaf in zip(mains, whole, layout.leaves, strict=True):
            assert (x is None) == (not leaf.trainable)
            if x is not None:
                assert_bitwise_equal(
                    local_of(x), local_part(value.to(dtypes.main_dtype(leaf.init)), leaf.main), leaf.path
                )
    assert_bitwise_equal(state.key, fs.random.split(key)[1].clone())


@examples(50, 700)
@given(st.data())
def test_init_is_the_same_in_every_layout(data):
    leaves, mesh = data.draw(strategies.trees()), data.draw(strategies.meshes())
    run_ranks(init, mesh.size, leaves, data.draw(strategies.homes(leaves, mesh)))


# ------------------------------------------------------------------------------------------------------- 6: checkpoint
def save(leaves, home, folder):
    fs.checkpoint.save(folder, some_state(leaves, home))


def load(leaves, home, folder, given_opt):
    layout = layout_here(leaves, home)
    content_is_whole(fs.checkpoint.load(folder, layout, opt=optimizer() if given_opt else None), layout)


def nodes_of(tree):
    """Every node of a tree of dicts, lists and pairs."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | Pair) else ()
    return [tree, *(node for child in children for node in nodes_of(child))]


@examples(20, 250)
@given(strategies.reshard_cases(subsets=False), st.booleans())
def test_a_checkpoint_loads_into_any_layout(case, given_opt):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        run_ranks(save, case.source.mesh.size, case.leaves, case.source, path)
        # A manifest names no class of a user: only the optimizer can rebuild moments that have one as a node.
        pairs = any(isinstance(node, Pair) for node in nodes_of(case.leaves))
        run_ranks(load, case.target.mesh.size, case.leaves, case.target, path, given_opt or pairs)


# ------------------------------------------------------------------------------------------------------ 7: adjointness
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
    op = draw(st.sampled_from(["vary", "psum", "gather", "scatter", "all_to_all", "ppermute"]))
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
    if case.op in ("vary", "psum"):
        op, dual = (functools.partial(getattr(ops, name), axis=axes, mesh=mesh) for name in ("vary", "psum"))
        same_in = axes
        if case.op == "psum":
            op, dual, same_in, same_out = dual, op, (), axes
    elif case.op in ("gather", "scatter"):
        size, index = shape[dim], 0
        for axis in axes:
            index = index * case.mesh.axis_size(axis) + coordinate(mesh)[axis]
        op = functools.partial(ops.gather, axis=axes, dim=dim, size=size, mesh=mesh)
        dual = functools.partial(ops.scatter, axis=axes, dim=dim, mesh=mesh)
        if case.op == "gather":
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


@examples(110, 1500)
@given(maps())
def test_every_collective_has_its_transpose(case):
    run_ranks(is_adjoint, case.mesh.size, case)


def unit_is_adjoint(leaf, home):
    """`gather_unit` and `scatter_grads` of one leaf, in float64."""
    layout = layout_here({"a": leaf}, home)
    mesh, sharding = layout.mesh, layout.leaves[0].params
    assert not abstract(mesh).ranks
    same = tuple(axis for axis in data_axes(mesh) if axis not in sharding.spec.all_axes)
    local = rank_values(sharding.local_shape(leaf.shape), mesh, same=same)
    nodes = {"a": to_local(sharding.to_dtensor(local, leaf.shape))}
    dual = functools.partial(fs.scatter_grads, like=nodes)
    assert_adjoint(fs.gather_unit, dual, nodes, mesh=mesh, same_in=same, what="gather_unit and scatter_grads")


@examples(40, 900)
@given(strategies.leaves([torch.float64]), strategies.meshes(), st.data())
def test_gathering_a_unit_has_its_transpose(leaf, mesh, data):
    run_ranks(unit_is_adjoint, mesh.size, leaf, data.draw(strategies.homes({"a": leaf}, mesh, [fs.FP32])))


def test_gathering_a_leaf_of_one_stage_has_its_transpose():
    """Its DTensor is on a slice of the mesh, the groups are those of the whole mesh: all ranks make them."""
    mesh = AbstractMesh(("pp", "ep", "cp"), (2, 2, 2))
    for strategy in (fs.zero(0), fs.zero(3)):
        run_ranks(unit_is_adjoint, 8, Leaf((5, 3), torch.float64), Home(mesh, strategy, stages={"a": 0}))
