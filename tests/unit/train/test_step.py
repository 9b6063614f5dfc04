"""A step on one process: blocks that torch compiles, losses that are scaled, memory that stays as it was."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

import fsharding as fs
from bench.rounds import allocated
from fsharding.base.errors import DonatedError, NonFiniteError
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import full, slow, token_batch

SIZES = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, intermediate_size=128)
MODEL = fs.models.decoder(SIZES)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def start(precision=fs.FP32, model=MODEL):
    layout = fs.plan_layout(model, fs.make_mesh(dp=1, device="cpu"), strategy=fs.zero(3), precision=precision)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, weight_decay=0.1))
    return fs.init_state(model, opt, fs.random.key(0), layout), fs.make_train_step(model, opt, donate=True)


def losses(state, step, steps=4):
    found = []
    for _ in range(steps):
        state, metrics = step(state, token_batch(0, positions=32))
        found.append(metrics.loss)
    return torch.stack(found), state


@slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=full)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_compiled_blocks_have_the_losses_of_eager_ones(dtype, backend):
    """`aot_eager` traces forward and backward as inductor does, but writes no code; where a trace breaks, eager goes on."""
    how = fs.Precision(compute=dtype)
    eager, _ = losses(*start(how))
    torch.compiler.reset()
    counters.clear()
    found, _ = losses(*start(how, MODEL._replace(block=torch.compile(MODEL.block, backend=backend))))
    assert_trees_close(found, eager, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], what="losses")
    assert counters["stats"]["unique_graphs"] > 0
    assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] > 0


def test_float16_trains_with_scaled_losses():
    """Times the first scale gradients overflow: such a step halves the scale and changes no parameter."""
    state, step = start(fs.FP16)
    seen = []
    for _ in range(6):
        before = int(state.step), float(state.loss_scale.scale)
        state, metrics = step(state, token_batch(0, positions=32))
        taken = int(state.step) - before[0]
        assert float(state.loss_scale.scale) == before[1] / (1 if taken else 2)
        seen.append((taken, metrics.loss.item()))
    assert {taken for taken, _ in seen} == {0, 1}
    for (taken, loss), (_, after) in itertools.pairwise(seen):
        assert after < loss if taken else after == loss


def test_a_step_leaves_nothing_behind():
    state, step = start()
    _, state = losses(state, step)
    held = [state]
    kept, peak = allocated(lambda: held.append(losses(held.pop(), step, steps=2)[1]))
    assert kept < 1 << 16
    assert 0 < peak < 64 << 20


def stepping(opt, **how):
    """A state of one leaf, with momentum, and a step that donates it."""
    weights = {"w": torch.ones(4)}
    layout = fs.plan_layout(weights, fs.make_mesh(device="cpu"))
    state = fs.init_state(lambda key: weights, opt, fs.random.key(0), layout)
    return state, fs.make_train_step(lambda p, x: (fs.gather_unit(p)["w"] * x).sum(), opt, donate=True, **how)


def raising(count):
    if count == 1:
        raise RuntimeError("no rate")
    return 0.5


@pytest.mark.parametrize("check", ["sync", "async"])
@pytest.mark.parametrize(
    "make", [lambda rate: fs.sgd(rate, momentum=0.5), fs.adamw, fs.optim.lion], ids=["sgd", "adamw", "lion"]
)
def test_a_schedule_that_raises_leaves_a_donated_state_as_it_was(make, check):
    state, step = stepping(make(raising), check=check)
    state, _ = step(state, torch.ones(4))
    before = fs.tree.map(torch.clone, state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no rate"):
            step(state, torch.ones(4))
    assert_bitwise_equal(state, before)


def test_a_state_that_a_failed_optimizer_has_written_is_donated():
    state, step = stepping(fs.optim.chain(fs.sgd(0.1, momentum=0.5), fs.sgd(raising)))
    state, _ = step(state, torch.ones(4))
    with pytest.raises(RuntimeError, match="no rate"):
        step(state, torch.ones(4))
    with pytest.raises(DonatedError):
        step(state, torch.ones(4))


def test_parameters_that_are_not_finite_are_named_alone():
    """Of twelve leaves whose gradients are not finite, since one weight is not."""
    weights = {f"w{i:02}": torch.ones(2) for i in range(12)}
    layout = fs.plan_layout(weights, fs.make_mesh(device="cpu"))
    weights["w07"][1] = torch.nan
    opt = fs.sgd(0.1)
    state = fs.init_state(lambda key: weights, opt, fs.random.key(0), layout)
    step = fs.make_train_step(lambda p, x: torch.stack(fs.tree.leaves(fs.gather_unit(p))).prod() * x.sum(), opt)
    with pytest.raises(NonFiniteError) as caught:
        step(state, torch.ones(1))
    assert str(caught.value) == (
        "train step refused: parameters are not finite.\n"
        "  step 0: loss nan, gradient norm nan\n"
        "  params.w07: it is not finite itself\n"
        "They were so before this step, and no step fixes them: load an earlier checkpoint."
    )
