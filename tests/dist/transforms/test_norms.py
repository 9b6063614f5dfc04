"""Inner products and norms inside a loss: an L2 penalty trains as in plain torch, under every strategy and mesh."""

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.base.errors import LayoutError, TransformError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_trees_close, run_ranks

WIDTH, ROWS, STEPS, DECAY = 6, 8, 4, 0.05
STRATEGIES = [fs.zero(0), fs.zero(1), fs.zero(2), fs.zero(3), fs.hybrid(), fs.hybrid(opt_state=True)]


def init(key):
    first, second = fs.random.split(key, 2)
    return {
        "first": {"w": fs.random.normal(first, (5, WIDTH)), "b": fs.random.zeros((5,))},
        "last": {"w": fs.random.normal(second, (3, 5)), "scale": fs.random.ones(())},
    }


def forward(weights, x):
    hidden = torch.tanh(F.linear(x, weights["first"]["w"], weights["first"]["b"]))
    return F.linear(hidden, weights["last"]["w"]) * weights["last"]["scale"]


def batches(index=0, count=1):
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)
        yield {"x": x.chunk(count)[index], "y": y.chunk(count)[index]}


def penalties():
    """Penalties of a tree in flight, by name."""
    return {
        "vdot": lambda params: fs.tree.vdot(params, params),
        "norm": lambda params: fs.global_norm(params) ** 2,
        "elementwise": lambda params: fs.tree.vdot(fs.tree.map(lambda x: 2 * x**2 - x, params), fs.tree.map(torch.tanh, params)),
        "a part": lambda params: fs.tree.vdot(params["last"], params["last"]) + fs.global_norm(params["first"]),
    }  # fmt: skip


def plain_penalty(name, leaves):
    squares = [(x**2).sum() for x in leaves]
    if name == "elementwise":
        return sum(((2 * x**2 - x) * x.tanh()).sum() for x in leaves)
    if name == "a part":
        return squares[2] + squares[3] + (squares[0] + squares[1]).sqrt()
    return sum(squares)


def loss_with(name):
    penalty = penalties()[name]

    def loss_fn(params, batch):
        weights = {unit: fs.gather_unit(params[unit]) for unit in params}
        total = (forward(weights, batch["x"]) - batch["y"]).square().sum()
        rows = batch["x"].shape[0]
        return total + rows * DECAY * penalty(params), rows

    return loss_fn


def in_plain_torch(name):
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), init(fs.random.split(fs.random.key(0))[0]))
    leaves, losses = fs.tree.leaves(params), []
    opt = torch.optim.SGD(leaves, lr=0.05)
    for batch in batches():
        loss = (forward(params, batch["x"]) - batch["y"]).square().sum() / ROWS
        loss = loss + DECAY * plain_penalty(name, leaves)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, [x.detach() for x in leaves]


def train(axes, strategies, names, microbatches):
    mesh, results = fs.make_mesh(**axes), {}
    for name in names:
        for strategy in strategies:
            layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=strategy)
            state = fs.init_state(init, fs.sgd(0.05), fs.random.key(0), layout)
            step = fs.make_train_step(loss_with(name), fs.sgd(0.05), microbatches=microbatches)
            losses = []
            for batch in batches(*data_rank_and_size(mesh)):
                state, metrics = step(state, batch)
                losses.append(metrics.loss.item())
            results[name, str(strategy)] = losses, fs.tree.leaves(fs.unshard(state.params))
    return results


@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches"), [(1, {"dp": 1}, 1), (2, {"dp": 2}, 2), (4, {"replica": 2, "dp": 2}, 1)]
)
def test_penalties_train_as_in_plain_torch(ranks, axes, microbatches):
    names = list(penalties())
    want = {name: in_plain_torch(name) for name in names}
    for results in run_ranks(train, ranks, axes, STRATEGIES, names, microbatches):
        for (name, _), (losses, leaves) in results.items():
            assert losses == pytest.approx(want[name][0], rel=1e-5)
            assert_trees_close(leaves, want[name][1], rtol=1e-5, atol=1e-6)
        for name in names:
            first, *others = (results[name, str(strategy)][0] for strategy in STRATEGIES)
            assert all(other == pytest.approx(first, rel=1e-5) for other in others)


FUSED = {"w": (fs.Fused("heads", (6, 3, 3)), None), "o": (None, "heads")}


def fused_products():
    mesh = fs.make_mesh(tp=2, dp=2)
    draws = {"w": fs.random.normal(fs.random.key(1), (12, 4)), "o": fs.random.normal(fs.random.key(2), (4, 6))}
    layout = fs.plan_layout(draws, mesh, names=FUSED)
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)

    def loss_fn(params, batch):
        return fs.tree.vdot(params, params) * 0.5 * batch, batch

    (loss, _), grads = fs.value_and_grad(loss_fn, grads=layout.main)(state.params, 1.0 + mesh.get_local_rank("dp"))
    at_rest = fs.tree.vdot(grads, grads, shardings=layout.main)
    return loss.item(), at_rest.item(), sum(float((draw.tensor() ** 2).sum()) for draw in draws.values())


def test_fused_dims_that_tp_cuts_count_once():
    for loss, square_of_grad, want in run_ranks(fused_products, 4):
        assert loss == pytest.approx(want / 2, rel=1e-6)
        assert square_of_grad == pytest.approx(want, rel=1e-6)


def staged():
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=2, intermediate_size=16)
    )
    stages = fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", 2, 2))
    layout = fs.plan_layout(model, fs.make_mesh(pp=2), stages=stages)
    params = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout).params
    draws = model.init(fs.random.split(fs.random.key(0))[0])
    want = sum(float((draw.tensor() ** 2).sum()) for draw in fs.tree.leaves(draws))
    with pytest.raises(LayoutError) as error:
        fs.tree.vdot(params, params)
    found = fs.tree.vdot(params, params, shardings=layout.params).item()
    norm = fs.global_norm(params, shardings=layout.params).item()
    return str(error.value), found, norm, want


def test_leaves_of_stages_need_their_layout():
    for text, found, norm, want in run_ranks(staged, 2):
        assert text.startswith(
            "fs.tree.vdot cannot tell which ranks own leaves of pipeline stages or Fused dims.\n  blocks."
        )
        assert text.endswith(
            "Pass their shardings: fs.tree.vdot(..., shardings=layout.main), or layout.params for parameters."
        )
        assert found == pytest.approx(want, rel=1e-6) and norm == pytest.approx(want**0.5, rel=1e-6)


def refusals():
    mesh = fs.make_mesh(dp=2)
    params = fs.shard({"w": torch.ones(4, 3), "b": torch.ones(3)}, fs.NamedSharding(mesh, fs.P("dp")))
    whole = fs.shard({"w": torch.ones(4, 3)}, fs.NamedSharding(mesh, fs.P()))
    texts = []
    for use in (
        lambda p: sum((x**2).sum() for x in fs.tree.leaves(p)),
        lambda p: torch.max(p["w"]),
        lambda p: F.linear(torch.ones(2, 3), p["w"]).sum(),
        lambda p: fs.tree.vdot(p["w"] + torch.ones(4, 3), p["w"]),
        lambda p: fs.tree.vdot({"w": p["w"]}, {"b": p["b"]}),
    ):
        with pytest.raises((TransformError, fs.errors.TreeError, AttributeError)) as error:
            fs.value_and_grad(use)(params)
        texts.append(f"{type(error.value).__name__}: {error.value}")
    with pytest.raises(LayoutError) as error:
        fs.tree.vdot({"w": params["w"]}, whole)
    return [*texts, str(error.value)]


def test_a_part_of_a_leaf_is_not_taken_for_the_leaf():
    for texts in run_ranks(refusals, 2):
        gather = 'Gather its unit first, unit = fs.gather_unit(params), and use unit["w"].'
        for text, use in ((texts[1], "is passed to torch.max"), (texts[3], "is an operand of + with a plain tensor")):
            lines = text.split("\n")
            assert lines[:2] == [
                f"NotGatheredError: fs.value_and_grad has a loss function in which a leaf {use} before it is gathered.",
                "  params.w is float32[4@dp, 3], of which this rank holds [2, 3]",
            ]
            assert lines[-1] == gather
        assert texts[0].startswith(
            "NotGatheredError: fs.gather_unit was not called for a leaf that is accessed as .sum."
        )
        assert texts[0].endswith("is fs.tree.vdot(x, x), and their root fs.global_norm(x).")
        assert "float32[4@dp, 3]" in texts[2] and "do not match" in texts[4]
        assert "needs equal shardings.\n  w is float32[4@dp, 3] and float32[4, 3]" in texts[5]
