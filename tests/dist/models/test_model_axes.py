"""Whole models on meshes with model axes against one process: losses and gradient norms over ten steps of AdamW.

All meshes of the axes, each with every way to cut its state, are in test_every_mesh.py.
"""

import functools
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import fsharding as fs
from fsharding import ops
from fsharding.errors import ConfigError
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import data_position
from fsharding.testing import assert_bitwise_equal, run_ranks

CONFIG = fs.models.DecoderConfig(vocab=50, dim=32, layers=2, heads=8, kv_heads=2, hidden=36)
ROWS, POSITIONS, STEPS = 8, 8, 10
# With the usual 1e-8 a gradient of almost nothing moves its weight as much as any, so that even one process gives other
# norms from the third digit on when it cuts its batch in two: rounding alone.
RATE, EPS = 3e-3, 1e-3


def some(cases, *kept):
    """All cases, of which those at some places run by default."""
    return [c if i in kept else pytest.param(*c, marks=pytest.mark.full) for i, c in enumerate(cases)]


@functools.cache
def mesh_of(axes, order):
    return fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), order=order, **dict(axes))


def batches(mesh, vocab, packed=False):
    index, count = data_position(mesh)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(vocab, (ROWS, POSITIONS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        whole = {"tokens": tokens[:, :-1], "targets": targets}
        if packed:
            whole["documents"] = (torch.rand(targets.shape, generator=generator) < 0.3).cumsum(1)
        yield ops.cut_sequence({name: x.chunk(count)[index] for name, x in whole.items()}, mesh=mesh)


def train(
    axes, strategy, *, order=AXES, rules=fs.DEFAULT_RULES, config=CONFIG, microbatches=1,
    schedule="1f1b", gather="step", policy=fs.policies.save_except_gathered, changed=None, packed=False, **model_options,
):  # fmt: skip
    """Losses and gradient norms of ten steps."""
    mesh, model = mesh_of(axes, order), fs.models.decoder(config, **model_options)
    model = model if changed is None else changed(model)
    stages, ranks = None, dict(axes).get("pp", 1)
    if ranks > 1:
        schedule = fs.pipeline.plan_schedule(schedule, ranks, microbatches, gather=gather)
        stages = fs.pipeline.stages_of(model, schedule)
    layout = fs.plan_layout(model, mesh, rules, strategy, stages=stages)
    opt = fs.optim.chain(
        fs.optim.clip_by_global_norm(0.5),
        fs.adamw(fs.optim.schedules.warmup_cosine(RATE, 2, 20), eps=EPS, weight_decay=0.1),
    )
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step, found = fs.make_train_step(model, opt, microbatches=microbatches, schedule=schedule, policy=policy), []
    for batch in batches(mesh, config.vocab, packed):
        state, metrics = step(state, batch)
        found.append((metrics.loss, metrics.grad_norm))
    return torch.tensor(found)


def on_ranks(axes, strategy, **how):
    """What rank 0 saw; the others must have seen the same bits."""
    ranks = functools.reduce(lambda n, size: n * size, axes.values(), 1)
    runs = run_ranks(train, ranks, tuple(axes.items()), strategy, **how)
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    return runs[0]


@functools.cache
def alone(config=CONFIG, **how):
    return train((("dp", 1),), fs.zero(0), config=config, **how)


def close(found, config=CONFIG, **how):
    torch.testing.assert_close(found, alone(config, **how), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------------------------ tp
TP = [
    ({"tp": 2}, fs.zero(3), {"sequence": True}),
    ({"tp": 4}, fs.zero(1), {"sequence": True}),
    ({"dp": 2, "tp": 2}, fs.zero(3), {"microbatches": 2}),
]


CP = [
    ({"cp": 2}, fs.zero(3), {"attention": "ring"}),
    ({"cp": 4}, fs.zero(2), {"attention": "ulysses"}),
    ({"dp": 2, "cp": 2}, fs.zero(1), {"microbatches": 2}),
    ({"cp": 2, "tp": 2}, fs.zero(3), {"sequence": True}),
]


@pytest.mark.parametrize(("axes", "strategy", "how"), some(TP, 0))
def test_tensor_parallel_losses_are_those_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, **how))


@pytest.mark.parametrize(("axes", "strategy", "how"), some(CP, 0, 1, 2))
def test_context_parallel_losses_are_those_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, **how))


DEEP = fs.models.DecoderConfig(vocab=50, dim=16, layers=8, heads=4, kv_heads=2, hidden=20)


PP = [
    ({"pp": 2}, fs.zero(0), {"schedule": "dualpipev"}),
    ({"pp": 2, "dp": 2}, fs.zero(3), {"gather": "microbatch", "schedule": "zbv"}),
    ({"pp": 2, "dp": 2}, fs.zero(1), {"gather": "microbatch"}),
]


@pytest.mark.parametrize(("axes", "strategy", "how"), some(PP, 0))
def test_pipelines_with_other_axes_have_the_losses_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, config=DEEP, microbatches=4, **how), DEEP)


def test_pipelines_of_tied_embeddings():
    tied = replace(DEEP, tied=True)
    for name in ("1f1b", "zbv"):
        close(on_ranks({"pp": 2}, fs.zero(0), config=tied, schedule=name, microbatches=4), tied)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_what_is_computed_again_is_on_the_same_mesh(axes):
    how = {"policy": fs.policies.nothing_saveable, "microbatches": 2, "gather": "microbatch"}
    close(on_ranks(axes, fs.zero(3), **how))


@pytest.mark.full
def test_two_runs_agree_bitwise():
    first, second = (on_ranks({"dp": 2, "tp": 2}, fs.zero(3), sequence=True) for _ in range(2))
    assert_bitwise_equal(first, second)


@pytest.mark.parametrize(
    "order",
    [
        ("tp", "cp", "ep", "dp", "pp", "replica"),
        pytest.param(("tp", "pp", "dp", "ep", "cp", "replica"), marks=pytest.mark.full),
    ],
)
def test_the_order_of_ranks_changes_no_loss(order):
    close(on_ranks({"dp": 2, "tp": 2}, fs.zero(3), order=order))


@pytest.mark.parametrize(
    "whole",
    [
        ("heads", "kv_heads"),
        pytest.param(("mlp",), marks=pytest.mark.full),
        pytest.param(("vocab",), marks=pytest.mark.full),
        ("kv_heads",),
    ],
)
def test_rules_that_leave_a_dim_whole_change_no_loss(whole):
    close(on_ranks({"tp": 2}, fs.zero(3), rules=fs.DEFAULT_RULES.replace(**dict.fromkeys(whole))))


def test_heads_of_every_kind_and_tied_embeddings():
    """More ranks than key heads, as many, fewer; 2 key heads over 4 ranks are each on two."""
    for kv_heads in (1, 8):
        config = fs.models.DecoderConfig(vocab=50, dim=32, layers=1, heads=8, kv_heads=kv_heads, hidden=36, tied=True)
        close(on_ranks({"tp": 4}, fs.zero(3), config=config), config)


def refused(axes, config, **how):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    with pytest.raises(ConfigError) as refusal:
        fs.plan_layout(fs.models.decoder(config, **how), mesh, how.pop("rules", fs.DEFAULT_RULES))
    return str(refusal.value)


def test_what_tp_cannot_cut_is_refused():
    config = fs.models.DecoderConfig(heads=6, kv_heads=2, dim=48, hidden=1)
    assert refused({"tp": 4}, config) == (
        "models.decoder cannot be cut over the mesh {tp: 4}.\n"
        "  6 heads: no multiple of 4\n"
        "  mlp of size 1: less than 2\n"
        "Choose another mesh, another model or kind of attention, or rules that leave these dims whole."
    )
    assert "2 heads a rank: neither whole groups of 3, which share a key head, nor a part of one" in refused(
        {"tp": 3}, config
    )
