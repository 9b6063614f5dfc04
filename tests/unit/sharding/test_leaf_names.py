"""Names of leaves: what a path may be, and that every path that may be goes out to files and comes back."""

import pytest
import safetensors.torch
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.errors import CheckpointError, LayoutError, TreeError
from fsharding.sharding.leaf_names import objections_to_names
from tests.helpers import refusal, slow

MEND = "Rename keys: the keys of a leaf, joined by dots, are its name in layouts, checkpoints and exported files."


def planned(tree):
    return fs.plan_layout(tree, fs.make_mesh(dp=1))


@pytest.mark.parametrize(
    ("tree", "row"),
    [
        ({"a.b": 2, "a": {"b": 3}}, "'a.b' is the path of 2 leaves"),
        ({1: 2, "1": 3}, "'1' is the path of 2 leaves"),
        ({"a": [1, 2], "a.0": 3}, "'a.0' is the path of 2 leaves"),
        ({"__metadata__": 2}, "'__metadata__' is reserved by the safetensors format"),
        ({"{i}": 2, "w": 1}, "'{i}' contains {i}, which stands for an index in tables of names"),
        ({"a": {"x{j}": 2}}, "'a.x{j}' contains {j}, which stands for an index in tables of names"),
        ({"": 2, "w": 1}, "'' contains an empty key"),
        ({"a": {"": 2}, "w": 1}, "'a.' contains an empty key"),
        ({"a\n": 2}, "'a\\n' contains characters that cannot be written"),
        ({"\ud800": 2}, "'\\ud800' contains characters that cannot be written"),
    ],
)
def test_paths_that_are_no_names_are_refused_when_a_layout_is_planned(tree, row):
    leaves = fs.tree.map(lambda n: torch.ones(n), tree)
    assert (
        refusal(planned, leaves, kind=LayoutError)
        == f"fs.plan_layout cannot use the paths of some leaves as names.\n  {row}\n{MEND}"
    )


def test_trees_without_a_layout_are_refused_as_well(tmp_path):
    torch.save({"a.b": torch.ones(2)}, tmp_path / "model.pt")
    row = "  'a.b' is the path of 2 leaves\n"
    tree = {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}
    assert row in refusal(fs.tree.named_leaves, tree, kind=TreeError)
    assert row in refusal(fs.foreign.load_weights, tmp_path / "model.pt", tree, kind=CheckpointError)
    layout = planned({"w": torch.zeros(2)})
    params = fs.shard({"w": torch.ones(2)}, layout)
    fs.checkpoint.save(tmp_path / "5", fs.state_from_params(params, fs.sgd(0.1), fs.random.key(0), layout))
    names = {"w": "__metadata__"}
    row = "  w: __metadata__ is reserved by the safetensors format\n"
    assert row in refusal(fs.hf.save, tmp_path / "out", params, {}, names=names, kind=CheckpointError)
    assert "__metadata__ is reserved by the safetensors format\n" in refusal(
        fs.foreign.export, tmp_path / "5", tmp_path / "out", "safetensors", names, kind=CheckpointError
    )


KEYS = st.text(st.sampled_from("ab.{}ij_0 é\n\x00\\/"), max_size=4) | st.sampled_from(["__metadata__", "{i}", 0, 1])
TREES = st.recursive(st.just(0), lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3), max_leaves=4)


@slow
@settings(max_examples=max(100, settings.default.max_examples))
@given(tree=TREES.filter(lambda x: isinstance(x, dict)))
def test_a_path_is_refused_or_goes_out_to_files_and_comes_back(tree, tmp_path_factory):
    numbers = iter(range(100))
    leaves = fs.tree.map(lambda _: torch.full((2,), float(next(numbers))), tree)
    paths = fs.tree.paths(leaves)
    assume(not objections_to_names(paths))
    layout = planned(leaves)
    folder = tmp_path_factory.mktemp("names")
    state = fs.state_from_params(fs.shard(leaves, layout), fs.sgd(0.1), fs.random.key(0), layout)
    fs.checkpoint.save(folder / "5", state)
    fs.foreign.export(folder / "5", folder / "out", "safetensors")
    want = dict(zip(fs.tree.paths(leaves), fs.tree.leaves(leaves), strict=True))
    found = safetensors.torch.load_file(folder / "out/model.safetensors")
    assert {*found} == {*want} and all(torch.equal(found[path], want[path]) for path in want)
    read = fs.unshard(fs.foreign.load_weights(folder / "out", layout))
    assert all(torch.equal(a, b) for a, b in zip(fs.tree.leaves(read), fs.tree.leaves(leaves), strict=True))
    loaded = fs.unshard(fs.checkpoint.load(folder / "5", layout).params)
    assert all(torch.equal(a, b) for a, b in zip(fs.tree.leaves(loaded), fs.tree.leaves(leaves), strict=True))
