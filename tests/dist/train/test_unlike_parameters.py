"""Parameters of all kinds train as in plain torch, under every strategy."""

import functools
from typing import NamedTuple

import pytest
import torch

import fsharding as fs
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import crossed, full, mesh_of, whole
from tests.toys import TOYS, toy_batches, toy_draws
from tests.training import ALONE, CONFIG, DP, OUTER, PLACES, ZEROS, alone, on_ranks


def train_toy(name, strategies, axes, microbatches, steps=2):
    toy, mesh = TOYS[name], mesh_of(axes)
    results = {}
    for strategy in strategies:
        draws = toy_draws(toy)
        layout = fs.plan_layout(draws, mesh, strategy=strategy, names=toy.names, frozen=toy.frozen)
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(0.03, weight_decay=0.1))
        state = fs.init_state(lambda key, draws=draws: draws, opt, fs.random.key(0), layout)
        step = fs.make_train_step(toy.loss, opt, microbatches=microbatches, donate=True)
        assert layout.memory(opt).state == fs.debug.state_bytes((state.params, state.main, state.opt_state))
        losses = []
        for batch in toy_batches(toy, mesh, steps):
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
        results[str(strategy)] = losses, whole(state.params)
    return results


def toy_in_plain_torch(name, steps=2):
    toy = TOYS[name]
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), toy_draws(toy))
    named = fs.tree.named_leaves(params)
    trained = [x for path, x in named.items() if not any(f"{path}.".startswith(f"{entry}.") for entry in toy.frozen)]
    opt = torch.optim.AdamW(trained, lr=0.03, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in toy_batches(toy, mesh_of(ALONE), steps):
        total, weight = toy.loss(params, batch)
        opt.zero_grad()
        (total / weight).backward()
        for x in trained:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        losses.append((total / weight).item())
    return losses, {path: x.detach() for path, x in named.items()}


@functools.cache
def toys_on_ranks(name, ranks, outer, microbatches):
    # Over microbatches zero0 goes the way of zero1, and zero3 that of zero2.
    inner = ZEROS if microbatches == 1 else ZEROS[1:3]
    strategies, axes = ([fs.hybrid(), fs.hybrid(opt_state=True)], OUTER) if outer else (inner, DP)
    results = run_ranks(train_toy, ranks, name, strategies, axes, microbatches)
    for other in results[1:]:
        assert_bitwise_equal(other, results[0], "the ranks' results")
    return results[0]


@pytest.mark.parametrize(
    ("name", "microbatches"),
    crossed(
        TOYS.keys(), (1, 3),
        kept=[
            "16-15-8-3", "7-15-3-3", "scalars-3", "tied, last in its units-3", "frozen stack-3", "unused-3", "dtypes-3",
        ],
    ),
)  # fmt: skip
def test_unlike_parameters_train_as_in_plain_torch(name, microbatches):
    rtol = TOYS[name].rtol
    losses, params = toy_in_plain_torch(name)
    for ranks, outer in ((2, False), (4, False), (4, True))[microbatches > 1 :]:
        for strategy, (found, final) in toys_on_ranks(name, ranks, outer, microbatches).items():
            what = f"{strategy} on {ranks} ranks"
            assert_trees_close(found, losses, rtol=rtol, atol=1e-6, what=f"losses of {what}")
            assert_trees_close(final, params, rtol=rtol, atol=max(rtol, 1e-3), what=f"parameters of {what}")


@pytest.mark.parametrize(
    "name",
    crossed(
        TOYS.keys(),
        kept=["7-15-3", "nothing in it", "one unit three times", "all but one frozen", "dead branch"],
    ),
)
def test_unlike_parameters_agree_bitwise_among_strategies(name):
    results = toys_on_ranks(name, 4, False, 1) | toys_on_ranks(name, 4, True, 1)
    for strategy, result in results.items():
        assert_bitwise_equal(result, results["zero3"], f"{strategy} and zero3")


def scalars_in_bf16(strategy, axes):
    toy, mesh = TOYS["scalars"], mesh_of(axes)
    opt = fs.adamw(0.03)
    layout = fs.plan_layout(toy_draws(toy), mesh, strategy=strategy, precision=fs.BF16)
    state = fs.init_state(lambda key: toy_draws(toy), opt, fs.random.key(0), layout)
    step = fs.make_train_step(toy.loss, opt)
    seen = []
    dtypes = set()

    def loss_fn(params, batch):
        dtypes.update(str(x.dtype) for x in fs.tree.leaves(fs.gather_unit(params)))
        return fs.gather_unit(params)["v"].sum(), 1.0

    fs.value_and_grad(loss_fn, precision=fs.BF16)(state.params, None)
    for batch in toy_batches(toy, mesh, 4):
        state, metrics = step(state, batch)
        seen.append(metrics.loss.item())
    return seen, dtypes


def test_scalars_are_seen_in_the_compute_dtype_by_every_strategy():
    for results in zip(*(run_ranks(scalars_in_bf16, 2, strategy, DP) for strategy in ZEROS), strict=True):
        for losses, dtypes in results:
            assert dtypes == {"torch.bfloat16"}
            assert losses == results[0][0]


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=full)])
def test_tied_embeddings_train_as_one_process(microbatches):
    config = fs.models.DecoderConfig(**{**vars(CONFIG), "tied": True})
    reference = alone(config=config, microbatches=microbatches)
    runs = [on_ranks(4, *place, config=config, microbatches=microbatches) for place in PLACES.values()]
    for run in runs:
        assert_trees_close(run.losses, reference.losses, rtol=1.3e-6, atol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5)
        if microbatches == 1:
            assert_bitwise_equal(run, runs[3])


def scan_a_cut_stack(strategy, axes):
    draws = {"w": fs.random.normal(fs.random.key(0), (4, 6, 6))}
    layout = fs.plan_layout(draws, mesh_of(axes), strategy=strategy)
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    x = torch.linspace(-1, 1, 12).view(2, 6)

    def loss_fn(params):
        return fs.scan_units(lambda unit, x: torch.tanh(x @ unit["w"]), params, x).sum()

    def right():
        result = x
        for w in draws["w"].tensor():
            result = torch.tanh(result @ w)
        return result.sum()

    try:
        loss, _ = fs.value_and_grad(loss_fn, grads=layout.grads)(state.params)
    except fs.errors.SpecError as error:
        return str(error).splitlines()[0]
    return bool(torch.isclose(loss, right()))


@pytest.mark.parametrize("level", range(4))
def test_a_stack_whose_layers_are_cut_is_refused_or_right(level):
    # Planned without names, dim 0 of the stack is cut over dp, and a rank holds some of the layers only: under zero(1)
    # of main parameters alone, under zero(2) of gradients, under zero(3) of all.
    refused = "fs.scan_units needs all layers of a stack on every rank."
    found = run_ranks(scan_a_cut_stack, 2, fs.zero(level), DP)
    assert found == [refused if level >= 2 else True] * 2
    found = run_ranks(step_over_a_cut_stack, 2, fs.zero(level), DP)
    assert found == [refused if level else True] * 2


def step_over_a_cut_stack(strategy, axes):
    draws, opt = {"w": fs.random.normal(fs.random.key(0), (4, 6, 6))}, fs.sgd(0.1)
    layout = fs.plan_layout(draws, mesh_of(axes), strategy=strategy)
    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)

    def loss_fn(params, batch):
        return fs.scan_units(lambda unit, x: torch.tanh(x @ unit["w"]), params, batch).sum()

    try:
        fs.make_train_step(loss_fn, opt)(state, torch.ones(2, 6))
    except fs.errors.SpecError as error:
        return str(error).splitlines()[0]
    return True


class Strided(NamedTuple):
    """Weights as a checkpoint of `x @ w` would have them: transposed in memory."""

    @staticmethod
    def params(key):
        w = fs.random.normal(key, (7, 5)).tensor()
        return {"w": w.t(), "v": fs.random.normal(fs.random.fold_in(key, 1), (4, 6, 5)).tensor().permute(2, 1, 0)}

    @staticmethod
    def loss(params, batch):
        unit = fs.gather_unit(params)
        return (torch.einsum("bi,io->bo", batch, unit["w"]).square().sum() + unit["v"].sin().sum() * batch.sum()), 1.0


def train_strided(strategy, axes, opt):
    mesh = mesh_of(axes)
    optim = fs.adamw(0.1) if opt == "adamw" else fs.sgd(0.01, momentum=0.9)
    layout = fs.plan_layout(Strided.params(fs.random.key(0)), mesh, strategy=strategy)
    state = fs.init_state(Strided.params, optim, fs.random.key(0), layout)
    index, count = data_rank_and_size(mesh)
    x = torch.linspace(-1, 2, 40).view(8, 5)
    for _ in range(3):
        state, _ = fs.make_train_step(Strided.loss, optim)(state, x.chunk(count)[index])
    return whole(state.params)


@pytest.mark.parametrize("opt", ["adamw", "momentum"])
def test_strides_of_the_initial_values_do_not_matter(opt):
    params = Strided.params(fs.random.split(fs.random.key(0))[0])
    params = {name: x.clone().requires_grad_() for name, x in params.items()}
    if opt == "adamw":
        torchs = torch.optim.AdamW(params.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    else:
        torchs = torch.optim.SGD(params.values(), lr=0.01, momentum=0.9)
    for _ in range(3):
        torchs.zero_grad()
        loss, _ = Strided.loss(params, torch.linspace(-1, 2, 40).view(8, 5))
        (loss / 2).backward()
        torchs.step()
    for strategy in ZEROS:
        found = run_ranks(train_strided, 2, strategy, DP, opt)[0]
        assert_trees_close(found, {n: x.detach() for n, x in params.items()}, rtol=1e-4, atol=1e-4, what=str(strategy))
