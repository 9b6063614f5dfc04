"""Positions of data in checkpoints: what comes back is what went in, and it is data alone."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import tree
from fsharding.base.errors import ArgumentError, CheckpointError
from fsharding.checkpoint import positions
from tests.helpers import refusal, slow

ARRAYS = st.lists(st.integers(-9, 9), max_size=5).flatmap(
    lambda xs: st.sampled_from(["int64", "float32", "uint8", "bool"]).map(lambda dtype: np.array(xs).astype(dtype))
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text() | st.binary() | ARRAYS
KEYS = st.text(max_size=3) | st.integers() | st.just("$")
VALUES = st.recursive(
    PLAIN | ARRAYS.map(torch.from_numpy),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, np.ndarray | torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return type(b) is dict and [*a] == [*b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


class Counter:
    """Data whose position is any value."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.fixture(scope="module")
def state():
    layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(device="cpu"))
    return fs.state_from_params(fs.shard({"w": torch.ones(4)}, layout), fs.sgd(0.1), fs.random.key(0), layout)


@slow
@given(VALUES)
def test_a_position_comes_back_as_it_was(state, value):
    written = positions.joined([positions.own_position(Counter(value), state.layout), None])
    manifest = fs.checkpoint.Manifest(0, {}, {}, None, {}, None, "", "", data=json.loads(json.dumps(written)))
    assert same(positions.select("DIR", manifest, state.layout), {"at": value})


def test_a_run_goes_on_with_its_data(state, tmp_path):
    options = {"batch_size": 2, "seq_len": 3, "eos": 0}
    documents = [[i, i + 1] for i in range(1, 40)]
    data = fs.data.packed(documents, **options)
    opt = fs.sgd(0.1)
    step = fs.make_train_step(lambda params, batch: (fs.gather_unit(params)["w"] * batch["tokens"].sum()).sum(), opt)
    seen = []
    with fs.checkpoint.Checkpointer(tmp_path, every=2, data=data) as saver:
        for batch in data:
            state, _ = step(state, batch)
            saver.after_step(state)
            seen.append(batch["tokens"])
            if state.step == 7:
                break
    again = fs.data.packed(documents, **options)
    saver = fs.checkpoint.Checkpointer(tmp_path, data=again)
    assert int(saver.load(state.layout, opt=opt).step) == 6
    assert torch.equal(next(again)["tokens"], seen[6])
    assert fs.checkpoint.metadata(tmp_path / "6").data["all"]["step"] == 6
    # Without data= the position stays where it is.
    fs.checkpoint.load(tmp_path / "6", state.layout)
    assert again.state_dict()["step"] == 7


def test_the_position_of_a_save_in_the_background_is_that_of_its_call(state, tmp_path):
    data = Counter([1])
    pending = fs.checkpoint.save_async(tmp_path / "0", state, data=data)
    data.at.append(2)
    pending.wait()
    fs.checkpoint.load(tmp_path / "0", state.layout, data=data)
    assert data.at == [1]


def test_a_loader_of_torch(state, tmp_path):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def made():
        generator = torch.Generator().manual_seed(3)
        return loaders.StatefulDataLoader(range(20), batch_size=2, shuffle=True, generator=generator)

    loader = made()
    rows = iter(loader)
    for _ in range(3):
        next(rows)
    fs.checkpoint.save(tmp_path / "3", state, data=loader)
    again = made()
    fs.checkpoint.load(tmp_path / "3", state.layout, data=again)
    assert [x.tolist() for x in again] == [x.tolist() for x in rows]


def test_refusals(state, tmp_path):
    fs.checkpoint.save(tmp_path / "0", state)
    assert not hasattr(json.loads((tmp_path / "0/manifest.json").read_text()), "data")
    load, layout = fs.checkpoint.load, state.layout
    assert refusal(load, tmp_path / "0", layout, data=Counter()) == (
        f"fs.checkpoint.load finds no position of data in {tmp_path / '0'}.\n"
        "It was saved without data=: load it without data= too, and set the position of the data yourself."
    )
    assert refusal(fs.checkpoint.Checkpointer, tmp_path, data=[1], kind=ArgumentError) == (
        "fs.checkpoint.Checkpointer takes data with a position, got a list without state_dict and load_state_dict.\n"
        "Pass fs.data.packed(...) or a torchdata.stateful_dataloader.StatefulDataLoader, or omit data=."
    )
    assert refusal(fs.checkpoint.save, tmp_path / "1", state, data=Counter({"a": [object()]})).startswith(
        "fs.checkpoint.save cannot write 1 values of the position of a Counter.\n  at.a[0] is an object\n"
    )
    big = Counter("x" * (17 << 20))
    assert "cannot write the position of `data`: it has 17,8" in refusal(
        fs.checkpoint.save, tmp_path / "1", state, data=big
    )
    assert not (tmp_path / "1").exists()

    class Other(Counter):
        def load_state_dict(self, state):
            raise ValueError("not mine")

    fs.checkpoint.save(tmp_path / "1", state, data=Counter())
    assert "ValueError: not mine" in refusal(load, tmp_path / "1", layout, data=Other())


@pytest.mark.parametrize(
    "saved",
    [
        {}, {"ranks": 3}, {"all": {"$": 3}}, {"all": {"$": ["pickle", ""]}}, {"all": {"$": ["tensor", "|O", [1], "AAAAAAAAAAA="]}},
        {"all": {"$": ["tensor", "<f4", [10**9], "AAAA"]}}, {"all": {"$": ["float", 3]}}, {"all": {"$": ["dict", [[[], 1]]]}},
        {"all": {"$": ["bytes", "?"]}}, {"all": {"$": []}},
    ],
    ids=repr,
)  # fmt: skip
def test_damaged_positions_are_refused(state, saved):
    manifest = fs.checkpoint.Manifest(0, {}, {}, None, {}, None, "", "", data=saved)
    text = refusal(positions.select, "DIR", manifest, state.layout, kind=CheckpointError)
    assert text.startswith("fsharding cannot read the position of data in DIR: ")


def test_a_position_is_no_leaf_of_the_state(state, tmp_path):
    fs.checkpoint.save(tmp_path / "0", state, data=Counter(5))
    plain = fs.checkpoint.metadata(tmp_path / "0")
    assert not any("data" in path for path in plain.tree) and len(plain.tree) == len(tree.leaves(state))
    there = tmp_path / "there"
    fs.checkpoint.reshard_checkpoint(tmp_path / "0", there, {"dp": 2}, fs.zero(3))
    assert fs.checkpoint.metadata(there).data == {"all": {"at": 5}}
