"""The drawn cases are plain data: they fit what they are drawn for, pickle, print as code, and shrink to nearly nothing."""

import math
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import fsharding as fs
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.sharding import boxes
from fsharding.testing import (
    Home,
    Leaf,
    Pair,
    ReshardCase,
    TrainCase,
    local_part,
    strategies,
    whole_tensors,
)
from tests.decoders import DecoderCase, decoder_cases
from tests.helpers import full, slow

ONE = AbstractMesh(("dp",), (1,))
HOME = Home(ONE, fs.zero(0))


def least(strategy, condition=lambda value: True, examples=60):
    return find(strategy, condition, settings=settings(max_examples=examples, database=None))


@slow
def test_everything_shrinks_to_one_rank_and_a_replicated_leaf():
    assert least(strategies.meshes()) == ONE
    assert least(strategies.meshes(subset_of=3)).size == 1
    assert least(strategies.specs((3, 4), AbstractMesh(("tp", "dp"), (2, 2)))) == fs.P()
    assert least(strategies.shardings((3,), AbstractMesh(("tp",), (2,)))).spec == fs.P()
    assert least(strategies.strategies()) == fs.zero(0)
    assert least(strategies.shapes()) == ()
    assert least(strategies.leaves()) == Leaf()
    assert least(strategies.rules()) == fs.DEFAULT_RULES
    assert least(strategies.trees()) == {"a": Leaf()}
    assert least(strategies.homes({"a": Leaf()})) == HOME


@full
def test_cases_shrink_to_one_rank_and_a_replicated_leaf():
    assert least(strategies.layouts({"a": Leaf()})) == HOME.layout({"a": Leaf()})
    assert least(strategies.reshard_cases()) == ReshardCase({"a": Leaf()}, HOME, HOME)
    assert least(strategies.train_cases()) == TrainCase({"a": Leaf()}, HOME)
    smallest = fs.models.DecoderConfig(vocab_size=2, dim=4, layers=1, heads=1, kv_heads=1, intermediate_size=2)
    assert least(decoder_cases()) == DecoderCase(smallest, ONE, steps=3)


@full
def test_a_condition_keeps_only_what_it_needs():
    case = least(strategies.reshard_cases(), lambda case: case.target.mesh.size > 1)
    assert case == ReshardCase({"a": Leaf()}, HOME, Home(case.target.mesh)) and case.target.mesh.sizes == (2,)


@given(st.integers(1, 12), st.lists(st.sampled_from(AXES), min_size=1, unique=True), st.booleans(), st.data())
def test_meshes_keep_their_limits(most, axes, orders, data):
    mesh = data.draw(strategies.meshes(most, axes, orders))
    assert mesh.size <= most and not mesh.ranks and set(mesh.names) <= {*axes} and len({*mesh.names}) == len(mesh.names)
    if not orders:
        assert list(mesh.names) == sorted(mesh.names, key=AXES.index)
    some = data.draw(strategies.meshes(most, subset_of=5))
    assert some.size <= min(most, 5) and len(some.members) == some.size
    assert list(some.ranks) == sorted({*some.ranks}) and all(rank < 5 for rank in some.ranks)


@pytest.mark.parametrize("axis", ["pp", *(pytest.param(a, marks=full) for a in AXES if a != "pp")])
def test_every_axis_comes_and_three_at_once(axis):
    assert least(strategies.meshes(), lambda mesh: mesh.axis_size(axis) > 1).names == (axis,)
    assert least(strategies.meshes(), lambda mesh: len(mesh.names) == 3 and axis in mesh.names, 300).sizes == (2, 2, 2)


@given(strategies.reshard_cases())
def test_reshard_cases_are_data(case):
    assert pickle.loads(pickle.dumps(case)) == case
    names = {"Leaf": Leaf, "Home": Home, "Pair": Pair, "ReshardCase": ReshardCase, "torch": torch, **vars(fs)}
    assert eval(repr(case), names) == case
    assert case.ranks <= 8
    for home in (case.source, case.target):
        assert {*home.mesh.members} <= {*range(case.ranks)}
        layout = home.layout(case.leaves)
        assert [leaf.path for leaf in layout.leaves] == list(fs.tree.paths(case.leaves))
        assert layout == pickle.loads(pickle.dumps(layout))


@given(strategies.train_cases())
def test_train_cases_are_data(case):
    assert pickle.loads(pickle.dumps(case)) == case
    assert case.ranks == case.home.mesh.size
    batch = case.batch(0)
    assert len(batch["x"]) % case.microbatches == 0 and batch["weight"].sum() == case.rows
    params = whole_tensors(case.leaves, numbers=True)
    loss, weight = case.loss(params, batch)
    off = [w.double() - x for w in fs.tree.leaves(params) if w.is_floating_point() for x in batch["x"][: case.rows]]
    assert weight == case.rows and loss.item() == sum((t.square().sum().item() for t in off), 0.0) / 2


@given(strategies.leaves(), st.integers(0, 99))
def test_whole_tensors_depend_on_path_and_seed(leaf, seed):
    first, second = (whole_tensors({"a": leaf, "b": leaf}, s) for s in (seed, seed))
    fs.testing.assert_bitwise_equal(first, second)
    assert first["a"].shape == leaf.shape and first["a"].dtype == leaf.dtype
    if first["a"].nbytes > 8 and leaf.dtype != torch.bool:
        with pytest.raises(AssertionError):
            fs.testing.assert_bitwise_equal(first["a"], first["b"])
    numbers = leaf.numbers(seed)
    assert numbers.dtype == leaf.dtype and (leaf.dtype == torch.bool or bool((numbers.abs() <= 4).all()))


@given(strategies.shapes(), strategies.meshes(), st.data())
def test_local_parts_make_the_whole(shape, mesh, data):
    sharding = data.draw(strategies.shardings(shape, mesh))
    whole = Leaf(shape, torch.int64).tensor()
    found = torch.zeros_like(whole)
    for coord in mesh.coordinates():
        part = local_part(whole, sharding, coord)
        assert part.shape == sharding.local_shape(shape, coord)
        assert sum(math.prod(boxes.shape_of(box)) for box in sharding.boxes(shape, coord)) == part.numel()
        if (grid := sharding.grid(shape, coord)) is not None:
            places = [torch.cat([torch.arange(0), *(torch.arange(*run) for run in runs)]) for runs in grid]
            found[torch.meshgrid(*places, indexing="ij") if places else ()] = part
    fs.testing.assert_bitwise_equal(found, whole)


@full
def test_without_hypothesis_the_error_names_the_extra():
    code = "import sys; sys.modules['hypothesis'] = None\nimport fsharding.testing\nimport fsharding.testing.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    want = 'ConfigError: fsharding.testing.strategies needs hypothesis.\nInstall it: pip install "fsharding[testing]".'
    assert want in done.stderr


@slow
def test_importing_the_package_does_not_import_hypothesis():
    code = "import sys, fsharding, fsharding.testing\nassert 'hypothesis' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
