"""Law: a state has the bytes that its layout says."""

import pytest

import fsharding as fs
from fsharding.testing import run_ranks
from tests.helpers import crossed, mesh_of
from tests.toys import TOYS, toy_batches, toy_draws
from tests.training import DP, HYBRIDS, MODEL, OUTER, PRECISIONS, ZEROS, batches, name_of


def measured(name, strategies, axes, precision, opt):
    return [measure(name, strategy, mesh_of(axes), precision, opt) for strategy in strategies]


def measure(name, strategy, mesh, precision, opt):
    """Bytes that the layout foretells, and those that are there before and after a step."""
    optim = {"adamw": lambda: fs.adamw(0.1), "sgd": lambda: fs.sgd(0.1), "momentum": lambda: fs.sgd(0.1, momentum=0.9)}[
        opt
    ]()
    if name == "decoder":
        model, loss, batch = MODEL, fs.model_loss(MODEL), next(batches(1, mesh))
        layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
        state = fs.init_state(model, optim, fs.random.key(0), layout)
    else:
        toy = TOYS[name]
        loss, batch = toy.loss, next(toy_batches(toy, mesh, 1))
        draws = toy_draws(toy)
        layout = fs.plan_layout(draws, mesh, strategy=strategy, precision=precision, names=toy.names, frozen=toy.frozen)
        state = fs.init_state(lambda key: draws, optim, fs.random.key(0), layout)
    _, grads = fs.value_and_grad(loss, grads=layout.grads, precision=precision, mean=False)(state.params, batch)
    first = (state.params, state.main, grads, state.opt_state, state.buffers)
    after, _ = fs.make_train_step(loss, optim)(state, batch)
    stepped = (after.params, after.main, grads, after.opt_state, after.buffers)
    planned = layout.memory(optim)
    assert planned.host == 0 and planned.device == planned.total
    return tuple(planned)[:5], *(tuple(fs.debug.state_bytes(part) for part in parts) for parts in (first, stepped))


SIZED = ["decoder", "16-17-8", "smaller than the ranks", "scalars", "frozen leaf", "dtypes"]


@pytest.mark.parametrize(
    ("name", "precision"),
    crossed(SIZED, PRECISIONS, kept=["smaller than the ranks-bf16", "frozen leaf-bf16", "dtypes-fp32"], name=name_of),
)
def test_bytes_are_those_that_the_layout_says(name, precision):
    strategies = [*ZEROS, fs.hybrid(opt_state=True), fs.hybrid(params=True), fs.hybrid(fs.zero(1), grads=True)]
    strategies += HYBRIDS if name == "decoder" else []
    for opt in ("adamw", "sgd", "momentum") if name == "decoder" and precision == fs.FP32 else ("adamw",):
        for results in run_ranks(measured, 4, name, strategies, OUTER, precision, opt):
            for strategy, (said, first, stepped) in zip(strategies, results, strict=True):
                assert said == first == stepped, (strategy, opt)


TABLE = {
    ("bf16", 0): lambda d: 18, ("bf16", 1): lambda d: 6 + 12 // d, ("bf16", 2): lambda d: 2 + 16 // d, ("bf16", 3): lambda d: 16 // d,
    ("fp32", 0): lambda d: 16, ("fp32", 1): lambda d: 8 + 8 // d, ("fp32", 2): lambda d: 4 + 12 // d, ("fp32", 3): lambda d: 16 // d,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_a_parameter_are_those_of_the_table(ranks):
    count = sum(draw.tensor().numel() for draw in fs.tree.leaves(MODEL.init(fs.random.key(0))))
    for (name, level), bytes_a_parameter in TABLE.items():
        precision = fs.BF16 if name == "bf16" else fs.FP32
        for [(said, first, _)] in run_ranks(measured, ranks, "decoder", [fs.zero(level)], DP, precision, "adamw"):
            counter = 8  # Adam's count of updates, an int64
            assert sum(first) == sum(said) == count * bytes_a_parameter(ranks) + counter
