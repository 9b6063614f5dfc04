"""Law: leaves that are frozen or trained in mid-run leave the values and moments of all others as they are, bit for bit."""

from datetime import timedelta

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import LayoutError
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import run_ranks
from tests.helpers import refusal

VALUES = {"body": {"w": torch.arange(12.0).view(3, 4) / 12}, "head": torch.linspace(-1, 1, 6)}


def loss_fn(params, batch):
    w = fs.gather_unit(params)
    return (batch["x"] * (w["body"]["w"].square().sum() + w["head"].square().sum())).sum().float(), len(batch["x"])


def frozen_and_back(folder, axes, strategy, precision):
    """Train, freeze the head, train, unfreeze it, train: by reshard and by a checkpoint alike."""
    mesh, opt = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes), fs.adamw(0.1)
    full, part = (
        fs.plan_layout(VALUES, mesh, strategy=strategy, precision=precision, frozen=f) for f in ((), ["head"])
    )
    step = fs.make_train_step(loss_fn, opt)
    batch = fs.local_batch({"x": torch.ones(2)}, mesh)
    state = step(fs.init_state(lambda key: VALUES, opt, fs.random.key(0), full), batch)[0]
    for number, layout in enumerate((part, full)):
        assert "opt=opt" in refusal(fs.reshard, state, layout, kind=LayoutError)
        fs.checkpoint.save(f"{folder}/{number}", state)
        loaded = fs.checkpoint.load(f"{folder}/{number}", layout, opt=opt)
        after = fs.reshard(state, layout, opt=opt)
        old, new, read = (fs.tree.named_leaves(fs.tree.map(local_of, x)) for x in (state, after, loaded))
        assert new.keys() == read.keys() and all(torch.equal(new[path], read[path]) for path in new)
        others = [path for path in old if not path.endswith("head")]
        assert len(others) >= 6 and all(torch.equal(old[path], new[path]) for path in others)
        head = fs.unshard(state.main if state.main is not None else state.params)["head"]
        head = fs.unshard(state.params)["head"] if head is None else head
        now = fs.unshard(after.main if after.main is not None else after.params)["head"]
        assert torch.equal(head, fs.unshard(after.params)["head"] if now is None else now)
        moments = [new[path] for path in new if path.startswith("opt_state") and path.endswith("head")]
        assert len(moments) == (0 if layout is part else 2) and not any(x.any() for x in moments)
        state = step(after, batch)[0]
    return int(state.step)


CASES = {
    "one rank": ({"dp": -1}, "zero1", fs.FP32),
    "zero1": ({"dp": 2}, "zero1", fs.FP32),
    "zero3": ({"dp": 2}, "zero3", fs.BF16),
    "zero0": ({"dp": 2}, "zero0", fs.BF16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_other_leaves_keep_values_and_moments(case, tmp_path):
    results = (
        [frozen_and_back(tmp_path, *case)] if case[0]["dp"] < 0 else run_ranks(frozen_and_back, 2, tmp_path, *case)
    )
    assert set(results) == {3}
