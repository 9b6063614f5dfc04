"""The table of a state: which leaf of an optimizer state belongs to which parameter, by structure and shape."""

import json
from typing import Any, NamedTuple

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.checkpoint.serialized_layout import describe, outline_of
from fsharding.optim.adam import AdamState
from fsharding.sharding.entries import Moment, Place, outline, places, places_in

FULL = {"w": (6, 4), "blocks": {"w": (3, 6, 4), "b": (3, 6)}, "mu": {"w": (2, 2)}}
MODEL = fs.tree.map(torch.zeros, FULL, is_leaf=lambda x: isinstance(x, tuple))
LAYOUT = fs.plan_layout(MODEL, fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3), frozen=["blocks.b"])
TRAINED = fs.tree.map_with_path(lambda path, x: None if path == "blocks.b" else x.to("meta"), MODEL)
NAMES = ("blocks.w", "mu.w", "w")


class Own(NamedTuple):
    """The state of an optimizer of a user: names of its fields are names of parameters."""

    w: Any
    mu: Any


def described(plain, state, params):
    """The places in a state of which a manifest has the description, and the paths."""
    known = [f"opt_state.{path}" for path in fs.tree.paths(state)]
    found = places_in(outline_of(plain, "opt_state", known), outline(params))
    return {path.removeprefix("opt_state."): place for path, place in found}


@pytest.mark.parametrize(
    ("state", "roots"),
    [
        (TRAINED, [""]),
        (AdamState(torch.zeros(()), TRAINED, TRAINED), ["mu", "nu"]),
        (Own(torch.zeros(6, 4), TRAINED), ["mu"]),
        ((fs.optim.EmptyState(), {"w": TRAINED, "mu": {"w": TRAINED}}), ["1.w", "1.mu.w"]),
        ({"moments": [TRAINED, {"w": TRAINED["w"], "blocks": None, "mu": None}]}, ["moments.0", "moments.1"]),
        (fs.random.key(0), []),
        ({"w": torch.zeros(6, 4), "step": torch.zeros(())}, []),
    ],
)
def test_trees_with_the_structure_of_the_parameters_are_moments(state, roots):
    known = {root: {f"{root}.{name}".strip("."): name for name in NAMES} for root in roots}
    wanted = {path: name for paths in known.values() for path, name in paths.items()}
    held = {path for path in wanted if path in fs.tree.named_leaves(state)}
    found = places(state, TRAINED)
    assert {path: place.param for path, place in found.items()} == {path: wanted[path] for path in held}
    assert described(json.loads(json.dumps(describe(state))), state, TRAINED) == found


def test_a_description_without_structure_goes_by_its_paths():
    fs.tree.register_node(
        _Node, lambda node: ((node.w, node.mu), None, ("w", "mu")), lambda _, x: _Node(*x), fields=True
    )
    state = {"state": _Node(torch.zeros(6, 4), torch.zeros(2, 2))}
    assert describe(state)["dict"]["state"].keys() == {"other"}
    found = described(describe(state), state, {"w": 0, "mu": 1})
    assert found == {"state.w": Place("w"), "state.mu": Place("mu")}


class _Node:
    def __init__(self, w, mu):
        self.w, self.mu = w, mu


def test_entries_are_the_leaves_of_a_state():
    table = {entry.path: entry for entry in LAYOUT.entries(fs.adamw(1e-3))}
    assert [*table] == [
        *(f"params.{leaf.path}" for leaf in LAYOUT.leaves), "opt_state.count",
        *(f"opt_state.{field}.{name}" for field in ("mu", "nu") for name in NAMES),
    ]  # fmt: skip
    kinds = {path: (entry.field, isinstance(entry, Moment)) for path, entry in table.items()}
    assert {*kinds.values()} == {("params", False), ("opt_state", False), ("opt_state", True)}
    assert [path for path, kind in kinds.items() if kind == ("opt_state", False)] == ["opt_state.count"]
    assert table["opt_state.count"].of is None
    moment = table["opt_state.mu.mu.w"]
    assert (moment.shape, moment.of.path) == ((2, 2), "mu.w")
    assert moment.sharding == moment.of.moments
    assert sum(entry.local_bytes() for entry in table.values()) == LAYOUT.memory(fs.adamw(1e-3)).state


def test_a_leaf_of_another_shape_is_no_moment():
    state = {**TRAINED, "w": torch.empty(5, 4, device="meta")}
    assert [*LAYOUT.moments(state)] == ["blocks.w", "mu.w"]


def test_a_mean_has_the_shape_and_sharding_of_the_mean():
    table = {entry.path: entry for entry in LAYOUT.entries(fs.optim.adafactor())}
    row, col = table["opt_state.row.blocks.w"], table["opt_state.col.w"]
    assert (row.of.path, row.shape, row.sharding.spec) == ("blocks.w", (3, 6, 1), row.of.main.spec)
    assert (col.shape, col.sharding.spec.all_axes) == ((1, 4), ()), "dp cuts the dim of the mean, which is gone"


def test_moments_in_low_precision_have_codes_and_scales():
    names = {"wq": ("embed", "heads"), "codes": ("embed", "heads")}
    model = {name: torch.empty(64, 96, device="meta") for name in names}
    layout = fs.plan_layout(model, fs.AbstractMesh(("dp", "tp"), (2, 3)), strategy=fs.zero(3), names=names)
    table = {entry.path: entry for entry in layout.entries(fs.adamw(1e-3, moments=formats.MXFP8))}
    codes, scales = (table[f"opt_state.mu.wq.{part}"] for part in ("codes", "scales_1x32"))
    assert (codes.of.path, codes.shape, codes.sharding) == ("wq", (64, 96), codes.of.moments)
    assert (scales.of.path, scales.shape, str(scales.sharding)) == ("wq", (64, 3), "P('dp', 'tp')")
    assert table["opt_state.mu.codes.codes"].of.path == "codes"
    wide = fs.adamw(1e-3, moments=formats.Blocks(formats.E4M3, (1, 64)))
    (through,) = (entry for entry in layout.entries(wide) if entry.path == "opt_state.mu.wq.scales_1x64")
    assert str(through.sharding) == "P('dp')", "a cut goes through a block"
