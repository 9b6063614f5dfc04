"""Checkpoints of runs whose weights travel in low precision: they hold main parameters, and every layout trains on from them."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsharding as fs
from fsharding import checkpoint
from fsharding.formats import precision
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.train.state import main_of
from tests.helpers import full, token_batch

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2, heads=2, kv_heads=2, intermediate_size=48)
MODEL, OPT = fs.models.decoder(CONFIG), fs.adamw(1e-2)
PRECISIONS = {
    "FP8": precision.FP8,
    "MXFP8": precision.MXFP8,
    "stochastic": dataclasses.replace(precision.MXFP8, gather=fs.formats.MXFP8.with_rounding("stochastic")),
    "NVFP4": precision.NVFP4,
}


def whole(tree):
    return fs.tree.map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def trained(state, steps):
    """Losses and norms of some steps, and the state after them."""
    step, found = fs.make_train_step(MODEL, OPT), []
    for number in steps:
        state, metrics = step(state, token_batch(number, mesh=state.layout.mesh))
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return found, state


def resumed(how, path):
    """Four steps under zero(1), saved in the middle; the last two again from the checkpoint, elsewhere."""
    mesh = fs.make_mesh(dp=2, device="cpu")
    layouts = {level: fs.plan_layout(MODEL, mesh, strategy=fs.zero(level), precision=how) for level in (0, 1, 3)}
    _, state = trained(fs.init_state(MODEL, OPT, fs.random.key(0), layouts[1]), range(2))
    checkpoint.save(path, state)
    straight, last = trained(state, range(2, 4))
    for level, layout in layouts.items():
        loaded = checkpoint.load(path, layout)
        if level == 1:
            assert_bitwise_equal(whole(loaded.params), whole(state.params), "what is computed with was rounded again")
        again, end = trained(loaded, range(2, 4))
        assert again == straight, level
        assert_bitwise_equal(whole(main_of(end)), whole(main_of(last)))
        assert_bitwise_equal(whole(end.opt_state), whole(last.opt_state))
    # Another mesh: the same main parameters, and the run that a reshard to there goes on with.
    there = fs.plan_layout(MODEL, fs.make_mesh(tp=2, device="cpu"), strategy=fs.zero(2), precision=how)
    loaded, moved = checkpoint.load(path, there), fs.reshard(state, there)
    assert_bitwise_equal(whole(main_of(loaded)), whole(main_of(state)))
    assert_bitwise_equal(whole(loaded.params), whole(moved.params))
    assert trained(loaded, range(2, 4))[0] == trained(moved, range(2, 4))[0]
    # The format is the layout's: read in bfloat16, it is a bfloat16 run, and its layout comes back with the directory.
    plain = checkpoint.load(path, layouts[1].with_precision(fs.BF16))
    assert_bitwise_equal(whole(main_of(plain)), whole(main_of(state)))
    assert checkpoint.layout_of(checkpoint.metadata(path), mesh) == layouts[1]


@pytest.mark.parametrize("name", [x if x == "stochastic" else pytest.param(x, marks=full) for x in PRECISIONS])
def test_a_run_goes_on_bitwise_from_its_checkpoint(name, tmp_path):
    run_ranks(resumed, 2, PRECISIONS[name], tmp_path / "2")
    leaves = fs.foreign.open_weights(tmp_path / "2").leaves
    assert {leaf.dtype for path, leaf in leaves.items() if path.startswith("params")} == {torch.float32}
    assert not any("scale" in path for path in leaves)
