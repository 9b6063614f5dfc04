"""The small decoder that tests of training share, its batches, and runs of it on ranks and on one process."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import NonFiniteError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import bits, mesh_of, whole

CONFIG = fs.models.DecoderConfig(vocab_size=32, dim=32, layers=2, heads=2, kv_heads=1, intermediate_size=48)
MODEL = fs.models.decoder(CONFIG)
ROWS, POSITIONS = 12, 8
DP, OUTER, ALONE = {"dp": -1}, {"replica": 2, "dp": -1}, {"dp": 1}
ZEROS = [fs.zero(level) for level in range(4)]
HYBRIDS = [
    fs.hybrid(params=a, grads=b, opt_state=c) for a, b, c in itertools.product((False, True), repeat=3)
]  # fmt: skip
PLACES = {name: (zero, DP) for name, zero in zip(("zero0", "zero1", "zero2", "zero3"), ZEROS, strict=True)}
PLACES |= {"hsdp": (fs.hybrid(), OUTER), "hfsdp": (fs.hybrid(opt_state=True), OUTER)}


def placed(strategy):
    """The mesh that a strategy is tested on: with a `replica` axis if it speaks of one."""
    return OUTER if strategy in HYBRIDS and strategy != fs.zero(3) else DP


def name_of(value):
    if isinstance(value, dict):
        return "x".join(value)
    if value in PRECISIONS:
        return "bf16" if value == fs.BF16 else "fp32"
    return value.__name__ if callable(value) else str(value)


PRECISIONS = [fs.FP32, fs.BF16]


def batches(steps, mesh, vocab=CONFIG.vocab_size):
    """This rank's part of batches that can be learnt; ranks have different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, vocab, (ROWS, 1), generator=generator)
        for _ in range(POSITIONS):
            tokens = torch.cat((tokens, (5 * tokens[:, -1:] + 3) % vocab), 1)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        yield fs.local_batch({"tokens": tokens[:, :-1], "targets": targets}, mesh)


def refusal_of_step(step, refused, good):
    """The text by which a step refuses (state, batch) as not finite; the state stays, and a good pair trains after it."""
    state, batch = refused
    before = bits(state)
    with pytest.raises(NonFiniteError) as caught:
        step(state, batch)
    assert_bitwise_equal(bits(state), before, "the state before the refused step")
    after, metrics = step(*good)
    assert metrics.loss.isfinite() and int(after.step) == 1
    return str(caught.value)


def optimizer(name, clip=0.5):
    rates = fs.optim.schedules.warmup_cosine(1e-2, 2, 20)
    inner = {
        "adamw": lambda: fs.adamw(rates, weight_decay=0.1),
        "sgd": lambda: fs.sgd(0.2),
        "momentum": lambda: fs.sgd(0.05, momentum=0.9, weight_decay=0.01),
    }[name]()
    return fs.optim.chain(fs.optim.clip_by_global_norm(clip), inner)


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    params: dict[str, torch.Tensor]


def train(
    strategy, axes, *, opt="adamw", microbatches=1, steps=5, precision=fs.FP32, donate=False, clip=0.5,
    policy=fs.policies.save_except_gathered, transport="auto", config=CONFIG,
):  # fmt: skip
    mesh, model = mesh_of(axes, transport=transport), fs.models.decoder(config)
    layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
    optim = optimizer(opt, clip)
    state = fs.init_state(model, optim, fs.random.key(0), layout)
    step = fs.make_train_step(model, optim, microbatches=microbatches, donate=donate, policy=policy)
    run = Run([], [], {})
    for batch in batches(steps, mesh):
        state, metrics = step(state, batch)
        run.losses.append(metrics.loss.item())
        run.norms.append(metrics.grad_norm.item())
    assert int(state.step) == steps
    return run._replace(params=whole(state.main if state.main is not None else state.params))


def on_ranks(ranks, strategy, axes=None, **options):
    """What rank 0 saw; the others must have seen the same bits."""
    axes = placed(strategy) if axes is None else axes
    return _on_ranks(ranks, strategy, tuple(axes.items()), tuple(sorted(options.items())))


@functools.cache
def _on_ranks(ranks, strategy, axes, options):
    runs = run_ranks(train, ranks, strategy, dict(axes), **dict(options))
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    return runs[0]


@functools.cache
def alone(**options):
    """One process, no process group."""
    assert not torch.distributed.is_initialized()
    return train(fs.zero(0), ALONE, **options)
