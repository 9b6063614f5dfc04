"""Every axis alone and with every other, dense and with experts: losses and gradient norms are those of one process.

Ways to cut the state share what is slow: the mesh with its groups, and one run on one process for all meshes.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, assert_trees_close, device_mesh, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.helpers import FULL, full
from tests.models import FIVE, FOURS, MESHES, MODELS, PAIRS, RUNS, TRIPLES, alone, case_of, train

pytestmark = pytest.mark.timeout(240)

DEFAULT = [("tp2 along the sequence", "experts", 3), ("cp2 ulysses", "experts", 1), ("dp2 pp2", "experts", 3)]
CASES = [(mesh, model, level) for mesh in MESHES for model in MODELS for level in (0, 1, 3)]


def trained(axes, level, config, how):
    with large_from(1):
        return train(axes, fs.zero(level), config=config, **how)


@pytest.mark.parametrize(
    ("mesh", "model", "level"),
    [pytest.param(*case, marks=[] if case in DEFAULT else full) for case in CASES],
)
def test_losses_and_norms_are_those_of_one_process(mesh, model, level):
    axes, how = MESHES[mesh]
    # As few layers as the schedules with two stages a rank can have.
    config = replace(MODELS[model], layers=2 * axes.get("pp", 1))
    ranks = torch.tensor([*axes.values()]).prod().item()
    runs = run_ranks(trained, ranks, axes, level, config, how, timeout=200)
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    torch.testing.assert_close(runs[0], alone(config), rtol=1e-5, atol=0)


# -------------------------------------------------------------------------------------------------------- axes together
# Every two of what cuts a model or its tokens (pp, cp, ep, tp) are together in one of them, and dp is beside each.
DEFAULT_TRIPLES = [("pp", "dp", "tp"), ("pp", "cp", "ep"), ("pp", "cp", "tp"), ("dp", "cp", "ep"), ("cp", "ep", "tp")]


def train_all(cases):
    with large_from(1):
        return [case.train(foresee=FULL or case.strategy == fs.zero(3)) for case in cases]


@functools.cache
def one_process(case):
    return case.train()


def check_together(axes, strategies):
    """Every strategy on one mesh, one after the other; `train` compares the bytes of some with their prediction."""
    cases = [replace(case_of(axes), strategy=strategy) for strategy in strategies]
    runs = run_ranks(train_all, cases[0].ranks, cases, timeout=600)
    for other in runs[1:]:
        assert_bitwise_equal(other, runs[0], "the ranks' results")
    want = one_process(RUNS["experts" if cases[0].config.experts else "dense"].alone())
    for case, found in zip(cases, runs[0], strict=True):
        assert_trees_close(found, want, rtol=1e-5, what=f"losses and norms under {case.strategy}")
        if cases[0].microbatches == 1 and "replica" not in axes:
            assert_bitwise_equal(found, runs[0][0], f"{case.strategy} and {cases[0].strategy}")


def strategies_on(axes):
    return [*map(fs.zero, range(4)), *([fs.hybrid(), fs.hybrid(opt_state=True)] if "replica" in axes else [])]


@pytest.mark.parametrize("axes", PAIRS, ids="-".join)
def test_every_pair_of_axes_has_the_losses_of_one_process(axes):
    """4 ranks, every strategy."""
    check_together(axes, strategies_on(axes))


@pytest.mark.parametrize(
    "axes", [axes if axes in DEFAULT_TRIPLES else pytest.param(axes, marks=full) for axes in TRIPLES],
    ids="-".join,
)  # fmt: skip
def test_triples_of_axes_have_the_losses_of_one_process(axes):
    """8 ranks, every strategy."""
    check_together(axes, strategies_on(axes))


@full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("axes", FOURS, ids="-".join)
def test_four_axes_have_the_losses_of_one_process(axes):
    """16 ranks. Five axes of two take 32: of each four that 16 can have there is one mesh, so each axis is left out once."""
    check_together(axes, [fs.zero(0), fs.zero(3)])


@full
@pytest.mark.timeout(1200)
def test_five_axes_have_the_losses_of_one_process():
    """32 ranks, the fewest that all five axes can share."""
    check_together(FIVE, [fs.zero(3)])


# --------------------------------------------------------------------------------- one run on meshes of all axes in turn
OPT = fs.optim.chain(
    fs.optim.clip_by_global_norm(0.5),
    fs.adamw(fs.optim.schedules.warmup_cosine(3e-3, 2, 10), eps=1e-3, weight_decay=0.1),
)


def travel(cases):
    """Losses and norms of a run that takes each step on the next mesh, under the next strategy."""
    found, state = [], None
    for number, case in enumerate(cases):
        layout = case.layout(device_mesh(case.mesh))
        state = (
            fs.reshard(state, layout) if state is not None else fs.init_state(case.model, OPT, fs.random.key(0), layout)
        )
        step = fs.make_train_step(case.model, OPT, microbatches=case.microbatches, schedule=case.planned() or "1f1b")
        state, metrics = step(state, case.batch(number, layout.mesh))
        found.append(torch.stack((metrics.loss, metrics.grad_norm)))
    return torch.stack(found)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "meshes",
    [
        [("pp", "dp"), ("cp", "ep"), ("replica", "tp"), ("pp", "tp"), ("dp", "cp")],
        DEFAULT_TRIPLES,
        pytest.param(FOURS, marks=full),
    ],
    ids=["4 ranks", "8 ranks", "16 ranks"],
)
def test_a_run_that_goes_through_meshes_of_all_axes_has_the_losses_of_one_process(meshes):
    """All five axes in one run also where a mesh has room for four of them: a reshard between any two steps."""
    levels = itertools.cycle([3, 0, 2, 1])
    cases = [replace(case_of(axes, "experts"), strategy=fs.zero(next(levels))) for axes in meshes]
    runs = run_ranks(travel, cases[0].ranks, cases, timeout=600)
    for other in runs[1:]:
        assert_bitwise_equal(other, runs[0], "the ranks' results")
    assert_trees_close(runs[0], travel([RUNS["experts"].alone()] * len(cases)), rtol=1e-5, what="losses and norms")
