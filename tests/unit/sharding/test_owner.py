"""Which leaf of a layout a leaf of a state belongs to, by its path and shape."""

import pytest
import torch

import fsharding as fs
from fsharding.sharding.leaf_plan import owner_of

WHOLE = {"w": (6, 4), "blocks": {"w": (3, 6, 4), "b": (3, 6)}, "params": {"w": (2, 2)}}
MODEL = fs.tree.map(torch.zeros, WHOLE, is_leaf=lambda x: isinstance(x, tuple))
LAYOUT = fs.plan_layout(MODEL, fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3), frozen=["blocks.b"])


@pytest.mark.parametrize(
    ("path", "shape", "owner"),
    [
        ("params.w", (6, 4), "w"),
        ("main.w", (6, 4), "w"),
        ("params.params.w", (2, 2), "params.w"),
        ("opt_state.mu.blocks.w", (3, 6, 4), "blocks.w"),
        ("opt_state.mu.w", (6, 4), "w"),
        ("opt_state.mu.params.w", (2, 2), "params.w"),
        ("opt_state.params.w", (6, 4), "w"),
        ("opt_state.states.1.nu.blocks.b", (3, 6), "blocks.b"),
        ("opt_state.mu.w", (5, 4), None),
        ("opt_state.count", (), None),
        ("params.v", (6, 4), None),
    ],
)
def test_the_longest_path_of_its_shape_owns_a_leaf(path, shape, owner):
    found = owner_of(path, shape, LAYOUT.leaves)
    assert (found.path if found else None) == owner


def test_a_mean_has_the_shape_and_sharding_of_the_mean():
    found = owner_of("opt_state.row.blocks.w", (3, 6, 1), LAYOUT.leaves)
    assert found is not None
    (leaf,) = (leaf for leaf in LAYOUT.leaves if leaf.path == "blocks.w")
    assert (found.path, found.shape, found.main.spec) == ("blocks.w", (3, 6, 1), leaf.main.spec)
    col = owner_of("opt_state.col.w", (1, 4), LAYOUT.leaves)
    assert col is not None
    assert (col.shape, col.main.spec.all_axes) == ((1, 4), ()), "dp cuts the dim of the mean, which is gone"
