"""A checkpoint from before narrow moments were rounded by key, embeddings summed wide, and labels saw one layer.

It was written by commit 9a6eb10 after two steps of the model below, with the labels `leaf.ndim >= 2`, which gave the
norms of the stack to the group that decays. It trains on by the rules of today.
"""

from pathlib import Path

import pytest
import torch

import fsharding as fs
from fsharding import optim
from fsharding.base.errors import CheckpointError
from fsharding.testing import assert_bitwise_equal

SAVED = Path(__file__).with_name("saved_by_9a6eb10")
NAMES = {"embed": (None, None), "blocks": {"w": ("layers", None, None), "norm": ("layers", None)}, "bias": (None,)}
RATE, DECAY, B1, B2 = 0.01, 0.1, 0.9, 0.999
GRADS = {"embed": 300.0, "blocks.w": 0.5, "blocks.norm": 0.5, "bias": 0.5}
"""Of each element; of the embedding, of its first row alone."""


def init(key):
    blocks = {"w": fs.random.zeros((2, 8, 8)), "norm": fs.random.ones((2, 8))}
    return {"embed": fs.random.zeros((3, 8)), "blocks": blocks, "bias": fs.random.ones((8,))}


def loss_fn(params, ids):
    p = fs.gather_unit(params)
    rest = [p["blocks"]["w"], p["blocks"]["norm"], p["bias"]]
    return fs.ops.embedding(ids, p["embed"]).float().sum() + sum(0.5 * x.float().sum() for x in rest), 1.0


def planned(**how):
    precision = fs.Precision(compute=torch.bfloat16, moments=torch.bfloat16, **how)
    mesh = fs.make_mesh(dp=1, device="cpu")
    return fs.plan_layout(init(fs.random.key(0)), mesh, strategy=fs.zero(1), names=NAMES, precision=precision)


def decaying(labels):
    groups = {"decay": fs.adamw(RATE, b2=B2, weight_decay=DECAY), "no_decay": fs.adamw(RATE, b2=B2)}
    return fs.optim.multi_transform(groups, labels)


def saved(path):
    (tensor,) = fs.checkpoint.load_leaves(SAVED, path).values()
    return tensor


@pytest.mark.parametrize("rounding", [None, "nearest"])
def test_it_trains_on_by_the_rules_of_today(rounding):
    opt, layout = decaying(fs.optim.no_decay), planned(rounding=rounding)
    state = fs.checkpoint.load(SAVED, layout, opt=opt)
    groups = state.opt_state.groups
    assert_bitwise_equal(
        groups["no_decay"].nu["blocks"]["norm"].to_local(), saved("opt_state.groups.decay.nu.blocks.norm")
    )
    assert groups["decay"].nu["blocks"]["norm"] is None and int(state.step) == 2
    state, _ = fs.make_train_step(loss_fn, opt)(state, torch.zeros(300, dtype=torch.long))
    for path, g in GRADS.items():
        group = "no_decay" if path in ("bias", "blocks.norm") else "decay"
        was = "decay" if path == "blocks.norm" else group
        p, mu, nu = (
            saved(x).double()
            for x in (f"params.{path}", f"opt_state.groups.{was}.mu.{path}", f"opt_state.groups.{was}.nu.{path}")
        )
        grad = torch.full_like(p, g)
        if path == "embed":
            grad[1:] = 0
        mu, nu = B1 * mu + (1 - B1) * grad, B2 * nu + (1 - B2) * grad.square()
        move = mu / (1 - B1**3) / ((nu / (1 - B2**3)).sqrt() + 1e-8)
        want = p - RATE * move - RATE * (DECAY if group == "decay" else 0.0) * p
        found = fs.tree.at(state.params if state.main is None else state.main, path).to_local()
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)
        for name, exact in (("mu", mu), ("nu", nu)):
            kept = fs.tree.at(state.opt_state.groups[group], f"{name}.{path}").to_local()
            torch.testing.assert_close(kept.double(), exact, rtol=2**-7, atol=0)
            if rounding == "nearest":
                assert_bitwise_equal(kept, exact.float().bfloat16())
            elif path == "blocks.w" and name == "mu":
                assert kept.unique().numel() == 2, "up and down by key"


def test_the_labels_that_it_was_written_with_still_read_it():
    """Without the optimizer it is read as it was written; such a state is of another optimizer than labels make today."""
    layout = planned()
    state = fs.checkpoint.load(SAVED, layout)
    assert state.opt_state.groups["decay"].mu["blocks"]["norm"] is not None
    opt = decaying(lambda path, leaf: "decay" if leaf.ndim >= 2 or path.startswith("blocks") else "no_decay")
    fs.make_train_step(loss_fn, opt)(state, torch.zeros(300, dtype=torch.long))
    with pytest.raises(CheckpointError, match="another optimizer"):
        fs.checkpoint.load(SAVED, layout, opt=fs.adamw(RATE))
    with pytest.raises(fs.errors.TreeError, match="do not match"):
        fs.make_train_step(loss_fn, decaying(optim.no_decay))(state, torch.zeros(300, dtype=torch.long))
