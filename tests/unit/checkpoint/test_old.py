"""A checkpoint that commit 9bfb5d7 wrote on two ranks, before modules moved to rooms, loads and trains on as it did there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fsharding as fs
from fsharding.checkpoint.serialized_layout import rebuild

SAVED = Path(__file__).with_name("saved_by_9bfb5d7")
LOSSES = [1.355285406112671, 2.414419174194336, 1.9546337127685547, 6.333460807800293]
"""Of its four steps there; the checkpoint is of the second."""


def init(key):
    first, last = fs.random.split(key, 2)
    return {"hidden": fs.random.normal(first, (5, 3)), "out": fs.random.normal(last, (2, 5))}


def loss_fn(params, batch):
    hidden, out = fs.gather_unit(params["hidden"]), fs.gather_unit(params["out"])
    y = torch.tanh(batch["x"] @ hidden.T) @ out.T
    return (y - batch["y"]).square().sum(), y.numel()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in LOSSES:
        yield {"x": torch.randn(4, 3, generator=generator), "y": torch.randn(4, 2, generator=generator)}


def test_it_is_whole():
    found = fs.checkpoint.inspect(SAVED)
    assert not found.damaged and found.manifest.step == 2
    assert found.manifest.extra == {"losses": LOSSES[:2]}


def test_it_trains_on_as_where_it_was_saved():
    layout = fs.plan_layout(init(fs.random.key(3)), fs.make_mesh(dp=1), strategy=fs.zero(1))
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2))
    state = fs.checkpoint.load(SAVED, layout)
    step = fs.make_train_step(loss_fn, opt)
    losses = []
    for batch in [*batches()][2:]:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses == pytest.approx(LOSSES[2:], rel=1e-6)


def test_a_state_of_groups_has_another_name_since():
    saved = {"namedtuple": "MaskedState", "fields": {"groups": {"dict": {"a": "leaf", "b": None}}}}
    assert rebuild(saved, lambda path: path) == fs.optim.MultiTransformState({"a": "opt_state.groups.a", "b": None})


def test_stochastic_rounding_was_called_keyed(tmp_path):
    format, mesh = fs.formats.MXFP8.with_rounding("stochastic"), fs.make_mesh(dp=1)
    precision = fs.Precision(params=torch.bfloat16, gather=format, rounding="stochastic")
    state = fs.init_state(
        init, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(init(fs.random.key(0)), mesh, precision=precision)
    )
    fs.checkpoint.save(tmp_path / "new", state)
    manifest = fs.checkpoint.metadata(tmp_path / "new")
    old = json.loads(json.dumps(manifest.layout).replace('"stochastic"', '"keyed"'))
    assert old != manifest.layout
    assert fs.checkpoint.layout_of(replace(manifest, layout=old), mesh).precision == precision
