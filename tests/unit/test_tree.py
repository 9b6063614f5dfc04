"""Trees: paths, maps, and the text for trees that do not match."""

import functools
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import tree
from fsharding.base.calls import call_as
from fsharding.base.errors import TreeError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import assert_bitwise_equal
from tests import helpers


class Pair(NamedTuple):
    first: Any
    second: Any


KEYS = st.text("abc_", min_size=1, max_size=3)
TREES = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
def test_every_leaf_has_one_path_and_is_found_there(values):
    flat, spec = tree.flatten(values)
    paths = tree.paths(values)
    assert tree.unflatten(spec, flat) == values
    assert len(set(paths)) == len(paths) == len(flat) == len(tree.leaves(values))
    assert list(tree.named_leaves(values).items()) == list(zip(paths, flat, strict=True))
    for path, leaf in zip(paths, flat, strict=True):
        assert tree.at(values, path) == leaf


@given(TREES)
def test_map_visits_the_leaves_in_order(values):
    seen = []
    doubled = tree.map(lambda x: seen.append(x) or 2 * x, values)
    assert seen == tree.leaves(values)
    assert tree.map(lambda x, y: y - x, values, doubled) == values
    assert tree.leaves(tree.map_with_path(lambda path, x: path, values)) == list(tree.paths(values))
    assert tree.map_with_path(lambda path, x, y: (path, y - x), values, doubled) == tree.map_with_path(
        lambda path, x: (path, x), values
    )


def test_paths_are_keys_fields_and_positions():
    values = {"blocks": [Pair(1, {"w": 2}), (3,)], "a": None, "b": {}}
    assert tree.paths(values) == ("blocks.0.first", "blocks.0.second.w", "blocks.1.0")
    assert tree.paths(5) == ("",)
    assert tree.at(values, "") is values
    assert tree.at(values, "blocks.0") == Pair(1, {"w": 2})


def test_what_stands_at_a_path_may_be_false():
    values = Pair(torch.tensor(0), Pair(torch.arange(3), {}))
    assert tree.at(values, "first") is values.first
    assert tree.at(values, "second.first") is values.second.first
    assert tree.at(values, "second.second") == {}
    numbered = {0: torch.zeros(2), 1: {2: torch.ones(1)}}
    for path, leaf in tree.named_leaves(numbered).items():
        assert tree.at(numbered, path) is leaf


def test_every_path_of_a_state_is_found():
    draws = {"w": fs.random.ones((2, 3)), "layers": [{"b": fs.random.zeros((2,))}]}
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(0.1))
    layout = fs.plan_layout(draws, fs.make_mesh(device="cpu"), precision=fs.FP16)
    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)
    named = tree.named_leaves(state)
    assert "params.layers.0.b" in named and "opt_state.states.1.mu.w" in named and "loss_scale.scale" in named
    assert {path: tree.at(state, path) is leaf for path, leaf in named.items()} == dict.fromkeys(named, True)


def test_a_state_is_a_tree_whose_layout_is_static():
    draws = {"w": fs.random.ones((2, 3))}
    layout = fs.plan_layout(draws, fs.make_mesh(device="cpu"))
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    copy = tree.map(lambda x: x.clone(), state)
    assert isinstance(copy, fs.TrainState) and copy.layout == layout
    assert_bitwise_equal(copy.replace(layout=0), state.replace(layout=0))


def test_a_local_leaf_is_a_leaf_here_and_a_node_of_torch():
    sharding = fs.NamedSharding(AbstractMesh(("dp",), (2,)), fs.P("dp"))
    node = fs.Local(torch.zeros(2, 3), sharding, (4, 3), ("tp",))
    assert tree.leaves({"w": node}) == [node] and tree.paths({"w": node}) == ("w",)
    leaves, spec = torch_pytree.tree_flatten({"w": node})
    assert len(leaves) == 1 and leaves[0] is node.value
    again = torch_pytree.tree_unflatten([torch.ones(2, 3)], spec)["w"]
    assert (again.sharding, again.shape, again.slices) == (sharding, (4, 3), ("tp",)) and again.value.sum() == 6


refusal = functools.partial(helpers.refusal, kind=TreeError)


def test_trees_that_do_not_match_are_both_named():
    assert refusal(lambda: tree.map(max, {"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"d": 2}, "e": 3})) == (
        "fsharding got two trees that do not match.\n"
        "  b.c: only in the first tree\n"
        "  b.d: only in the second tree\n"
        "  e: only in the second tree\n"
        "Give both trees the same keys."
    )
    assert refusal(lambda: tree.map_with_path(max, [1, 2], [1])) == (
        "fsharding got two trees that do not match.\n  1: only in the first tree\nGive both trees the same keys."
    )
    assert refusal(lambda: tree.map(max, {"a": [1, 2]}, {"a": (1, 2)})) == (
        "fsharding got two trees that do not match.\n"
        "  the first tree: PyTreeSpec({'a': [*, *]})\n"
        "  the second tree: PyTreeSpec({'a': (*, *)})\n"
        "Give both trees the same keys."
    )
    assert refusal(lambda: call_as("fs.f", tree.match, {"a": 1}, {"b": 1})) == (
        "fs.f got two trees that do not match.\n"
        "  a: only in the first tree\n"
        "  b: only in the second tree\n"
        "Give both trees the same keys."
    )
    assert refusal(lambda: call_as("fs.f", tree.prune, {"a": 1}, {"b": 1}, ("params", "grads"))) == (
        "fs.f got params and grads that do not match.\n"
        "  a: only in params\n"
        "  b: only in grads\n"
        "Give both the same keys."
    )


def test_a_path_that_is_not_there():
    for path in ("a.c", "a.b.0", "z", "a.0"):
        assert refusal(lambda path=path: tree.at({"a": {"b": 1}}, path)) == (
            f"fs.tree.at finds no {path!r}.\nThe paths are a.b."
        )
    assert refusal(lambda: tree.at({}, "a")) == "fs.tree.at finds no 'a'.\nThe paths are none."


def test_trees_that_match():
    tree.match({"a": 1, "b": [2]}, {"b": [5], "a": 4})
    assert tree.flatten_up_to(tree.flatten({"a": 1})[1], {"a": {"more": 2}}) == [{"more": 2}]
    assert optree.tree_structure(None, namespace=tree.NAMESPACE).num_leaves == 0


@given(
    st.recursive(
        st.integers(),
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(["a", "a.b", "b.c", "0", "-1", "x y", ""]), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
        ),
        max_leaves=8,
    )
)
def test_at_finds_every_path(values):
    paths = fs.tree.paths(values)
    for path, leaf in zip(paths, fs.tree.leaves(values), strict=True):
        if paths.count(path) == 1 and path:
            assert fs.tree.at(values, path) == leaf
