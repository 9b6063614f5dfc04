"""A decoder with experts on meshes against one process: losses and gradient norms over ten steps of AdamW."""

import functools
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.models import Experts
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import full, mesh_of
from tests.models import alone, batches, close, on_ranks

# Biases go up and down by as much as scores differ, so that they change who gets which token at every step.
BIASED = Experts(4, 2, 12, shared=1, score="sigmoid", scale=2.5, groups=2, kept_groups=2, z=1e-2, bias_rate=1e-2)
CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=2, heads=4, kv_heads=2, experts=BIASED)
BALANCED = replace(CONFIG, experts=Experts(4, 2, 12, balance=5e-2, z=1e-2))
AGAIN = {"policy": fs.policies.nothing_saveable}

# Their losses without a balance loss are in test_every_mesh.py.
PLAIN = [({"ep": 2}, fs.zero(3), {}), ({"ep": 4}, fs.zero(1), {}), ({"dp": 2, "ep": 2}, fs.zero(1), {})]
CASES = [
    ({"ep": 2}, fs.zero(0), {"microbatches": 2}),
    ({"ep": 4}, fs.zero(3), AGAIN),
    ({"dp": 2, "ep": 2}, fs.zero(3), {"microbatches": 2}),
    ({"ep": 2, "tp": 2}, fs.zero(0), {}),
    ({"ep": 2, "tp": 2}, fs.zero(3), {"sequence": True, "microbatches": 2}),
    ({"tp": 2}, fs.zero(3), {"rules": fs.DEFAULT_RULES.replace(mlp=None)}),
    ({"cp": 2, "ep": 2}, fs.zero(3), {}),
    ({"replica": 2, "ep": 2}, fs.zero(3), {}),
    ({"ep": 2}, fs.zero(3), {"rules": fs.DEFAULT_RULES.replace(expert=None)}),
    ({"pp": 2, "ep": 2}, fs.zero(3), {"microbatches": 2, "gather": "microbatch"}),
    ({"pp": 2, "ep": 2}, fs.zero(0), {"microbatches": 2, **AGAIN}),
    ({"pp": 2, "ep": 2, "dp": 2}, fs.zero(1), {"microbatches": 2, "gather": "microbatch"}),
    ({"ep": 2, "dp": 2, "tp": 2}, fs.zero(3), {"sequence": True}),
]


@full
@pytest.mark.parametrize(("axes", "strategy", "how"), CASES)
def test_losses_are_those_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, config=CONFIG, **how), CONFIG)


@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        PLAIN[0],
        *(pytest.param(*c, marks=full) for c in PLAIN[1:]),
        *(pytest.param(*c, marks=full) for c in CASES if "microbatches" not in c[2]),
    ],
)
def test_balance_is_that_of_all_ranks(axes, strategy, how):
    close(on_ranks(axes, strategy, config=BALANCED, **how), BALANCED)


def test_every_stage_adds_its_own_losses():
    """Microbatches are the same ones as on one process, so shares of the experts are."""
    how, deep = {"microbatches": 2}, replace(BALANCED, layers=4)
    close(on_ranks({"pp": 2}, fs.zero(0), config=deep, schedule="interleaved_zero_bubble", **how), deep, **how)


def crowded(model, loads):
    """Biases that send tokens to some experts only."""

    def init(key):
        draws = model.init(key)
        blocks = draws["blocks"]
        bias = torch.tensor(loads, dtype=torch.float32).expand(CONFIG.layers, -1).clone()
        return {**draws, "blocks": {**blocks, "experts": {**blocks["experts"], "bias": bias}}}

    return model._replace(init=init)


@pytest.mark.parametrize("loads", [(9, 0, 0, 0), pytest.param((0, 0, 5, 9), marks=full)], ids=str)
def test_all_tokens_to_one_expert_and_none_to_others(loads):
    one = Experts(4, 1, 12, score="sigmoid", normalize=False, z=1e-2, bias_rate=0.0)
    config, changed = replace(CONFIG, experts=one), functools.partial(crowded, loads=loads)
    found = on_ranks({"ep": 2}, fs.zero(3), config=config, changed=changed)
    torch.testing.assert_close(found, alone(config, changed=changed), rtol=1e-5, atol=0)


def biases(axes, strategies, steps=3):
    """After some steps, put together by torch."""
    mesh, model, found = mesh_of(axes), fs.models.decoder(CONFIG), []
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, weight_decay=0.1))
    for strategy in strategies:
        layout = fs.plan_layout(model, mesh, strategy=strategy)
        state, step = fs.init_state(model, opt, fs.random.key(0), layout), fs.make_train_step(model, opt)
        for _, batch in zip(range(steps), batches(mesh, CONFIG.vocab_size), strict=False):
            state, _ = step(state, batch)
        found.append(state.params["blocks"]["experts"]["bias"].full_tensor())
    return found


def test_biases_move_alike_on_every_mesh():
    (want,) = biases({"dp": 1}, [fs.zero(0)])
    assert want.any()
    for found in run_ranks(biases, 4, {"dp": 2, "ep": 2}, [fs.zero(1), fs.zero(3)]):
        assert_bitwise_equal(found, [want, want])
