"""Law: training on ranks has the losses of one process, on every mesh and under every strategy.

The reference is the same library without a process group, and for some cases plain torch with its own optimizers.
"""

import pytest
import torch
from hypothesis import given

import fsharding as fs
from fsharding.testing import assert_trees_close, run_ranks, strategies
from tests.helpers import crossed, examples, full, mesh_of
from tests.laws import trains_as_plain_torch
from tests.training import ALONE, CONFIG, DP, MODEL, OUTER, PLACES, ZEROS, Run, alone, batches, name_of, on_ranks


def as_one_process(ranks, strategy, axes, **how):
    reference = alone(**how)
    assert reference.losses[-1] < reference.losses[0]
    for count in ranks:
        run = on_ranks(count, strategy, axes, **how)
        assert_trees_close(run.losses, reference.losses, rtol=1.3e-6, atol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "opt"),
    crossed(ZEROS, (1, 3), ("sgd", "adamw"), kept=["zero0-3-adamw", "zero3-3-adamw", "zero3-1-sgd"], name=name_of),
)
def test_losses_are_those_of_one_process(strategy, microbatches, opt):
    as_one_process((2, 4), strategy, DP, opt=opt, microbatches=microbatches)


@pytest.mark.parametrize(
    ("strategy", "ranks", "microbatches", "opt"),
    crossed(
        (fs.hybrid(), fs.hybrid(opt_state=True)), (2, 4), (1, 3), ("sgd", "adamw"),
        kept=["hfsdp-4-3-adamw", "hfsdp-2-3-adamw"], name=name_of,
    ),
)  # fmt: skip
def test_losses_of_hybrids_are_those_of_one_process(strategy, ranks, microbatches, opt):
    as_one_process((ranks,), strategy, OUTER, opt=opt, microbatches=microbatches)


@pytest.mark.parametrize(("strategy", "axes"), crossed(PLACES, kept=["zero3"]))
def test_twenty_steps_are_those_of_one_process(strategy, axes):
    reference, run = alone(steps=20), on_ranks(4, strategy, axes, steps=20)
    assert_trees_close(run.losses, reference.losses, rtol=1e-5)
    assert reference.losses[-1] < 0.5 * reference.losses[0]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_do_not_change_the_mean_over_unequal_weights(microbatches):
    one = alone()
    many = on_ranks(1, fs.zero(3), microbatches=microbatches)
    assert_trees_close(many, one, rtol=1e-5, atol=1e-5)


def plain_torch(opt, steps):
    """The same model and batches with torch.autograd and torch.optim alone."""
    draws = MODEL.init(fs.random.split(fs.random.key(0))[0])
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), draws)
    leaves = fs.tree.leaves(params)
    if opt == "adamw":
        adam = torch.optim.AdamW(leaves, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        torchs, rates = adam, fs.optim.schedules.warmup_cosine(1e-2, 2, 20)
    else:
        torchs, rates = (
            torch.optim.SGD(leaves, lr=1.0, momentum=0.9, weight_decay=0.01),
            fs.optim.schedules.constant(0.05),
        )
    run = Run([], [], {})
    for count, batch in enumerate(batches(steps, mesh_of(ALONE))):
        x = MODEL.embed(params["embed"], batch)
        for layer in range(CONFIG.layers):
            x = MODEL.block({name: leaf[layer] for name, leaf in params["blocks"].items()}, x)
        total, tokens = MODEL.head(params["head"], x, batch)
        loss = total / tokens
        torchs.zero_grad()
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(torch.nn.utils.clip_grad_norm_(leaves, 0.5).item())
        for group in torchs.param_groups:
            group["lr"] = rates(count)
        torchs.step()
    return run._replace(params={path: x.detach() for path, x in fs.tree.named_leaves(params).items()})


@pytest.mark.parametrize("opt", ["adamw", pytest.param("momentum", marks=full)])
def test_plain_torch_agrees(opt):
    reference = plain_torch(opt, 6)
    assert max(reference.norms) > 0.5, "the clip must clip"
    for strategy in (fs.zero(1), fs.zero(3), fs.hybrid(opt_state=True)):
        run = on_ranks(4, strategy, opt=opt, steps=6, microbatches=3)
        assert_trees_close(run.losses, reference.losses, rtol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5)
        assert_trees_close(run.params, reference.params, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- random layouts
@examples(40, 160)
@given(strategies.train_cases())
def test_any_home_trains_to_the_same_bits_in_the_bytes_that_were_planned(case):
    run_ranks(trains_as_plain_torch, case.ranks, case)
