"""Updates through windows of leaves, on the CPU: the bits of one update of all leaves, whatever the windows."""

from unittest.mock import patch

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.comm import tier
from fsharding.optim import updates, windows
from fsharding.testing import assert_bitwise_equal
from fsharding.train.state import main_of

SHAPES = {"embed": (16, 4), "blocks": {"w": (3, 8, 8), "b": (3, 8)}, "w": (8, 8)}
OPTIMIZERS = {
    "adamw": fs.adamw(1e-2, weight_decay=0.1),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.optim.lion(1e-3)),
    "coded": fs.adamw(1e-2, moments=fs.formats.MXFP8),
    "momentum": fs.sgd(0.1, momentum=0.9),
    "late clip": fs.optim.chain(fs.sgd(0.1, momentum=0.9), fs.optim.clip_by_global_norm(0.1)),
    "muon": fs.optim.muon(1e-2, dtype=torch.float32),
    "averaged": fs.optim.chain(fs.optim.lookahead(fs.adamw(1e-2), every=2), fs.optim.ema(0.9)),
    "groups": fs.optim.multi_transform(
        {"a": fs.adamw(1e-2), "b": fs.sgd(0.1)}, lambda path, x: "a" if path.endswith("w") else "b"
    ),
}


def drawn(shapes, number):
    keys = iter(fs.random.split(fs.random.key(number), 8))
    return fs.tree.map(
        lambda shape: fs.random.normal(next(keys), shape).tensor(), shapes, is_leaf=lambda x: type(x) is tuple
    )


def run(opt, shapes, memory, limit, donate, together=1 << 20):
    """Three updates, and how many of them went through how many windows."""
    mesh, counts = fs.make_mesh(device="cpu"), []
    strategy = fs.zero(3).with_memory(moments=memory)
    layout = fs.plan_layout(drawn(shapes, 0), mesh, strategy=strategy, frozen="embed" if "embed" in shapes else ())
    send = windows._Windows.send

    def counted(*parts):
        counts.append(1)
        return send(*parts)

    small = patch.object(windows, "WINDOW_BYTES", limit), patch.object(tier, "_TOGETHER", together)
    with small[0], small[1], patch.object(windows._Windows, "send", counted):
        state = fs.init_state(lambda key: drawn(shapes, 0), opt, fs.random.key(0), layout)
        trained, opt_state = {leaf.path for leaf in layout.leaves if leaf.trainable}, state.opt_state
        main = fs.tree.map_with_path(lambda path, x: x if path in trained else None, state.params)
        for number in range(3):
            grads = fs.tree.prune(fs.shard(drawn(shapes, 1 + number), layout), main)
            context = fs.optim.UpdateContext(
                donate=donate, norm=fs.global_norm(grads), shardings=layout.main, key=state.key, step=state.step
            )
            main, opt_state = fs.optim.apply_gradients(opt, grads, opt_state, main, context)
    return (main, opt_state), len(counts)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_windows_change_no_bit(name, donate):
    whole, none = run(OPTIMIZERS[name], SHAPES, "device", 1 << 20, donate)
    small, several = run(OPTIMIZERS[name], SHAPES, "disk", 1, donate)
    large, one = run(OPTIMIZERS[name], SHAPES, "disk", 1 << 20, donate)
    rows, many = run(OPTIMIZERS[name], SHAPES, "disk", 1, donate, together=16)
    pairs, fewer = run(OPTIMIZERS[name], SHAPES, "disk", 256, donate, together=16)
    for other in (small, large, rows, pairs):
        assert_bitwise_equal(whole, other)
    by_element = OPTIMIZERS[name].by_element
    assert (none, several, one) == (0, 9 if by_element else 3, 3), "one for each of three leaves, three times"
    # A matrix of blocks, two of their biases, and two rows of the matrix; SGD has no state of the biases.
    assert many == (3 if not by_element else 24 if name == "groups" else 27)
    assert fewer <= many
    assert by_element == (name not in ("late clip", "muon"))


def test_moments_are_told_apart_by_the_tree_that_they_are_in():
    shapes = {"mu": {"w": (4, 4)}, "w": (2, 4)}  # "mu.w" is the path of a parameter, and of a moment of another one
    whole, _ = run(OPTIMIZERS["adamw"], shapes, "device", 1 << 20, donate=False)
    small, count = run(OPTIMIZERS["adamw"], shapes, "disk", 1, donate=False)
    assert_bitwise_equal(whole, small)
    assert count == 6, "two windows, three times"


@pytest.mark.parametrize("memory", [{"moments": "disk"}, {"params": "disk"}, {"main": "disk"}, {"grads": "disk"}])
def test_an_update_that_fails_leaves_the_state_as_it_was(memory):
    """A window fails after others have been updated; leaves that are on the device are donated."""
    params = {name: torch.full((64,), float(i)) for i, name in enumerate("abcd")}
    layout = fs.plan_layout(params, fs.make_mesh(device="cpu"), strategy=fs.zero(3).with_memory(**memory))
    opt, calls = fs.adamw(1e-2), []
    state = fs.init_state(lambda key: params, opt, fs.random.key(0), layout)
    before = fs.unshard(state)
    update = updates._apply

    def fails(*parts):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("no disk")
        return update(*parts)

    grads = fs.shard(fs.tree.map(torch.ones_like, params), layout.reduced)
    context = fs.optim.UpdateContext(donate=True, norm=fs.global_norm(grads))
    with (
        patch.object(windows, "WINDOW_BYTES", 1),
        patch.object(updates, "_apply", fails),
        pytest.raises(OSError, match="no disk"),
    ):
        fs.optim.apply_gradients(opt, grads, state.opt_state, main_of(state), context)
    assert len(calls) == 3
    assert_bitwise_equal(before, fs.unshard(state))


def test_only_updates_of_elements_are_computed_on_the_host():
    params = {"w": torch.ones(8, 8), "v": torch.ones(8, 8)}
    context = fs.optim.UpdateContext(on_host=("w", "v"))
    for opt in (fs.optim.muon(1e-2), fs.optim.adafactor(1e-2), OPTIMIZERS["late clip"]):
        with pytest.raises(ConfigError, match="cannot update v, w on the host: this optimizer isn't elementwise"):
            fs.optim.apply_gradients(opt, params, opt.init(params), params, context)
