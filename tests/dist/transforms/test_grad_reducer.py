"""Large gradients are taken as soon as they are complete, and what has come is not waited for later.

That what is trained does not depend on it is a law of tests/property/laws/test_training_cases.py, which draws the size.
"""

import weakref

import pytest
import torch

import fsharding as fs
from bench.rounds import allocated
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.transforms.grad_reducer import GradReducer
from fsharding.transforms.run_options import GradsTo, RunOptions
from fsharding.transforms.unit_plan import large_from
from fsharding.transforms.value_and_grad import Tape

WIDTH, LAYERS = 16, 4


def loss(params, x):
    def block(p, x):
        for w in p.values():
            x = torch.tanh(x @ w) + x @ p["0"] * 0.1  # the first one is used in every layer
        return x

    return fs.scan_units(block, params["blocks"], x).square().sum()


def gradients(level, size, cut):
    """Gradients, and what happened in which order: with each one that is taken, how many of those before it still live."""
    mesh, alive, events = fs.make_mesh(dp=2), [], []
    home = fs.NamedSharding(mesh, fs.P(None, "dp") if level == 3 else fs.P())
    noise = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, WIDTH, WIDTH, generator=noise) / WIDTH for _ in range(LAYERS)]
    rank = mesh.get_local_rank("dp")
    mine = [x.chunk(2, 1)[rank].contiguous() if level == 3 else x for x in leaves]
    params = {"blocks": {str(i): home.to_dtensor(x, (2, WIDTH, WIDTH)) for i, x in enumerate(mine)}}
    real_take, real_reduce = GradReducer.take, GradReducer.reduce

    def take(self, unit, large, grad):
        alive.append(weakref.ref(grad))
        events.append((large.leaf, sum(x() is not None for x in alive)))
        real_take(self, unit, large, grad)

    def reduce(self, unit, grads):
        events.append("reduce")
        real_reduce(self, unit, grads)

    with pytest.MonkeyPatch.context() as patch, large_from(size):
        patch.setattr(GradReducer, "take", take)
        patch.setattr(GradReducer, "reduce", reduce)
        target = fs.NamedSharding(mesh, fs.P(None, "dp") if cut else fs.P())
        where = fs.tree.map(lambda x: target, params)
        _, found = fs.value_and_grad(loss, grads=where)(params, torch.ones(1, WIDTH) * (1 + rank))
    return [x.full_tensor() for x in fs.tree.leaves(found)], events


@pytest.mark.parametrize(("level", "cut"), [(0, False), (1, True), (3, True)], ids=str)
def test_large_gradients_go_one_by_one(level, cut):
    early, late = (run_ranks(gradients, 2, level, size, cut) for size in (1, 1 << 30))
    for (found, events), (want, none) in zip(early, late, strict=True):
        assert_bitwise_equal(found, want)
        assert none == ["reduce", "reduce"]
        # Of both units: the last layer's first, one alive at a time, and that of the first when all have used it.
        assert events == [*((leaf, 1) for leaf in (3, 2, 1, 0)), "reduce"] * 2


WIDE, NARROW, TOKENS = 160, 96, 40


def products(params, x):
    """Weights met from both sides, by one product, by two, and by one and what is no product; and a table."""

    def block(p, x):
        x = x + fs.ops.embedding(IDS, p["table"])
        x = torch.tanh(fs.ops.scaled_matmul(x, p["up"], 1))
        x = torch.tanh(fs.ops.scaled_matmul(x, p["down"], 0)) * p["scale"]
        x = fs.ops.scaled_matmul(fs.ops.scaled_matmul(x, p["twice"], 1), p["twice"], 0)
        return fs.ops.scaled_matmul(x, p["mixed"], 1) + p["mixed"].sum(0) * p["mixed"].square().mean()

    return fs.scan_units(block, params["blocks"], x, policy=POLICIES[params["policy"]]).square().mean()


IDS = torch.randint(0, WIDE, (TOKENS,), generator=torch.Generator().manual_seed(2)) // 8
POLICIES = {"kept": fs.policies.everything_saveable, "again": fs.policies.nothing_saveable}
SHAPES = {
    "up": (WIDE, NARROW), "down": (WIDE, NARROW), "twice": (NARROW, NARROW), "mixed": (NARROW,) * 2,
    "table": (WIDE, NARROW),
}  # fmt: skip


def gradients_of_products(level, dtype, policy, size, transport="auto"):
    """Gradients, and the leaves with terms that were written where they go, in order."""
    mesh, written = fs.make_mesh(dp=2, transport=transport), []
    noise = torch.Generator().manual_seed(0)
    draws = {name: torch.randn(2, *shape, generator=noise) / 10 for name, shape in SHAPES.items()}
    draws["scale"] = torch.ones(2, NARROW)
    names = {name: ("layers", *("embed", None)[: x.ndim - 1]) for name, x in draws.items()}
    how = fs.Precision(compute=dtype)
    layout = fs.plan_layout({"blocks": draws}, mesh, strategy=fs.zero(level), names={"blocks": names}, precision=how)
    params = fs.shard({"blocks": draws}, layout)
    names_of = sorted(draws)
    x = torch.randn(2, TOKENS, NARROW, generator=noise.manual_seed(1 + mesh.get_local_rank("dp"))).to(dtype)
    real = GradReducer.write

    def write(self, unit, large, dtype, kernel):
        written.append(real(self, unit, large, dtype, kernel) and names_of[large.leaf])
        return written[-1]

    def loss(params, x):
        return products({**params, "policy": policy}, x)

    with pytest.MonkeyPatch.context() as patch, large_from(size):
        patch.setattr(GradReducer, "write", write)
        _, found = fs.value_and_grad(loss, grads=layout.main, precision=how)(params, x)
    return [x.full_tensor() for x in fs.tree.leaves(found)], written


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_gradients_are_written_where_they_travel_from(level, dtype, policy):
    given = (level, dtype, policy)
    early, late = (run_ranks(gradients_of_products, 2, *given, size) for size in (1, 1 << 30))
    sent = run_ranks(gradients_of_products, 2, *given, 1, "pairwise")
    table = ["table"] if dtype == torch.float32 else []
    for (found, written), *others in zip(early, late, sent, strict=True):
        assert written == ["mixed", "twice", "twice", "down", "up", *table] * 2
        for want, none in others:
            assert_bitwise_equal(found, want)
            assert none == []


def gradients_in_halves(size, transport, sums, defers):
    """Gradients of a backward whose products of weights come first or last."""
    mesh, noise = fs.make_mesh(dp=2, transport=transport), torch.Generator().manual_seed(0)
    draws = {name: torch.randn(2, *shape, generator=noise) / 10 for name, shape in SHAPES.items()}
    draws["scale"] = torch.ones(2, NARROW)
    names = {name: ("layers", *("embed", None)[: x.ndim - 1]) for name, x in draws.items()}
    how = fs.Precision(sums=sums)
    layout = fs.plan_layout({"blocks": draws}, mesh, names={"blocks": names}, precision=how)
    x = torch.randn(2, TOKENS, NARROW, generator=noise.manual_seed(1 + mesh.get_local_rank("dp")))
    with large_from(size):
        tape = Tape(fs.shard({"blocks": draws}, layout), GradsTo(layout.main), RunOptions(how, defers=defers))
        loss = tape.forward(lambda params, x: products({**params, "policy": "kept"}, x), x)
        tape.context.end_forward()
        tape.backward([loss], defers=defers)
        if defers:
            tape.weights()
        return [x.full_tensor() for x in fs.tree.leaves(tape.as_tree(tape.finish()))]


@pytest.mark.parametrize(
    ("transport", "sums"), [("shared_memory", "ordered"), ("pairwise", "ordered"), ("pairwise", "native")]
)
def test_terms_that_are_left_for_later_count(transport, sums):
    """Of a leaf that is used by a product and otherwise a part of the gradient is there before the rest."""
    want = run_ranks(gradients_in_halves, 2, 1 << 30, transport, sums, False)
    assert_bitwise_equal(run_ranks(gradients_in_halves, 2, 1, transport, sums, True), want)


DEEP, SIDE, MATRICES = 16, 192, 4


def test_memory_of_a_stack_grows_with_its_rows():
    """Activations and gradients are as large as each other, and the ones go when the others come."""
    noise = torch.Generator().manual_seed(0)
    params = {str(i): torch.randn(DEEP, SIDE, SIDE, generator=noise) / SIDE for i in range(MATRICES)}
    x = torch.randn(SIDE, SIDE, generator=noise)

    def block(p, x):
        for w in p.values():
            x = torch.tanh(x @ w)
        return x

    def loss(params, x):
        return fs.scan_units(block, params, x).square().sum()

    sharded = fs.shard(params, fs.plan_layout(params, fs.make_mesh(dp=-1)))
    run = fs.value_and_grad(loss)
    _, grads = run(sharded, x)
    want = torch.func.grad(loss)(params, x)
    assert_bitwise_equal([x.full_tensor() for x in fs.tree.leaves(grads)], fs.tree.leaves(want))
    del grads
    _, peak = allocated(lambda: run(sharded, x))
    both = MATRICES * DEEP * SIDE * SIDE * 4
    assert peak < 1.4 * both


IDS_OF_ROWS = torch.tensor([1, 2, 2, 5])
INNER = [(of, create_graph) for of in ("x", "up", "table") for create_graph in (True, False)]


def penalized(weights, of, create_graph):
    """A loss that holds a gradient of its own: of an activation, or of a gathered weight."""
    x = fs.ops.embedding(IDS_OF_ROWS, weights["table"]) * 1
    total = torch.tanh(fs.ops.scaled_matmul(x, weights["up"], 1)).square().sum()
    inner = {**weights, "x": x}[of]
    (slope,) = torch.autograd.grad(total, inner, create_graph=create_graph, retain_graph=True)
    return total + slope.square().sum()


def gradients_of_penalties():
    """For each inner gradient: loss and gradients of gathered weights, and those of plain torch."""
    mesh = fs.make_mesh(dp=2)
    whole = {name: torch.linspace(-0.5, 0.7 + i, 64).view(8, 8) for i, name in enumerate(("table", "up"))}
    params = fs.shard(whole, fs.plan_layout(whole, mesh))
    results = []
    for of, create_graph in INNER:
        with large_from(1):
            value, grads = fs.value_and_grad(lambda p, *args: penalized(fs.gather_unit(p), *args))(
                params, of, create_graph
            )
        plain = {name: x.clone().requires_grad_() for name, x in whole.items()}
        with fs.set_mesh(mesh):
            want = penalized(plain, of, create_graph)
        theirs = torch.autograd.grad(want, [*plain.values()])
        results.append(((value, *(x.full_tensor() for x in grads.values())), (want.detach(), *theirs)))
    return results


def test_a_gradient_inside_a_loss_is_torchs():
    for results in run_ranks(gradients_of_penalties, 2):
        for case, (found, want) in zip(INNER, results, strict=True):
            assert_trees_close(found, want, rtol=1e-5, atol=1e-6, what=str(case))
