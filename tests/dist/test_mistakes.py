"""Mistakes that show on several ranks only: every rank is told, before anything has changed."""

import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.base.errors import FshardingError
from fsharding.testing import run_ranks
from tests.helpers import words_of_torch


def init(key):
    first, last = fs.random.split(key)
    return {"body": {"w": fs.random.normal(first, (8, 4))}, "head": {"w": fs.random.normal(last, (2, 8))}}


def hidden(params, batch):
    return torch.tanh(F.linear(batch["x"], fs.gather_unit(params["body"])["w"]))


def loss_fn(params, batch):
    x = F.linear(hidden(params, batch), fs.gather_unit(params["head"])["w"])
    return x.square().sum(), len(x)


def not_gathered(params, batch):
    return F.linear(hidden(params, batch), params["head"]["w"]).sum()


def own_part(params, batch):
    return params["head"]["w"].to_local().sum()


def in_place(params, batch):
    head = fs.gather_unit(params["head"])
    head["w"] += 1
    return head["w"].sum()


def without_grad(params, batch):
    head = fs.gather_unit(params["head"])
    with torch.no_grad():
        head["w"].mul_(2)
    return F.linear(hidden(params, batch), head["w"]).sum(), 1


def refusal_lines(call):
    """The text of an error of ours, without the lines of files."""
    try:
        call()
    except FshardingError as error:
        return [type(error).__name__, *(line for line in str(error).split("\n") if ".py:" not in line)]
    return []


def refusals(level):
    """What each mistake is told on this rank, and whether the parameters are as they were."""
    mesh, opt = fs.make_mesh(dp=2), fs.sgd(0.1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=fs.zero(level))
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    before = fs.tree.map(torch.clone, state.params)
    step, batch = fs.make_train_step(loss_fn, opt), {"x": torch.ones(4, 4)}

    def in_loss(fn):
        return lambda: fs.value_and_grad(fn)(state.params, batch)

    calls = {
        "not gathered": in_loss(not_gathered),
        "own part": in_loss(own_part),
        "in place": in_loss(in_place),
        "shape": lambda: step(state, {"x": torch.ones(4, 5)}),
        "array": lambda: step(state, {"x": torch.ones(4, 4).numpy()}),
    }
    told = {name: refusal_lines(call) for name, call in calls.items()}
    pairs = zip(fs.tree.leaves(state.params), fs.tree.leaves(before), strict=True)
    same = all(torch.equal(x.to_local(), y.to_local()) for x, y in pairs)
    told["without grad"] = refusal_lines(in_loss(without_grad))
    fresh, _ = step(fs.init_state(init, opt, fs.random.key(0), layout), batch)
    with torch.no_grad():
        fs.tree.map(lambda p: p.mul_(0.5), fresh.params["head"])
    told["at rest"] = refusal_lines(lambda: step(fresh, batch))
    return told, same


HOLDS = {0: "float32[2, 8], of which this rank holds [2, 8]", 3: "float32[2@dp, 8], of which this rank holds [1, 8]"}
TYPE = {0: "float32[2, 8]", 3: "float32[2@dp, 8]"}
GATHER = 'Gather its unit first, unit = fs.gather_unit(params["head"]), and use unit["w"].'
ARRAY = "Make them tensors: fs.tree.map(torch.as_tensor, batch); for lists of numbers, one torch.tensor each."
WRITTEN = "Don't modify gathered weights: other ranks read the same memory, and backward gathers them again."


def test_mistakes_on_two_ranks():
    for level in (0, 3):
        ranks = run_ranks(refusals, 2, level)
        assert ranks[0] == ranks[1], "all ranks are told the same"
        told, same = ranks[0]
        assert same
        assert told["not gathered"] == [
            "NotGatheredError",
            "fs.value_and_grad has a loss function in which a leaf is passed to torch.nn.functional.linear before it is"
            " gathered.",
            f"  params.head.w is {HOLDS[level]}",
            GATHER,
        ]
        assert told["own part"][2:] == [
            f"  params.head.w is {HOLDS[level]}",
            f"{GATHER} This rank's shard is .value.",
        ]
        assert told["in place"] == [
            "TransformError",
            "fs.value_and_grad has a loss function that writes gathered weights in place.",
            "Don't modify gathered weights: write w = w * 2 instead of w.mul_(2), and w = w + x instead of w += x.",
        ]
        assert told["without grad"][1] == "fs.gather_unit returned weights of head that were then written in place."
        assert told["without grad"][2].startswith(WRITTEN)
        assert told["shape"][:3] == [
            "ShapeError",
            f"train step has a loss function that failed: {words_of_torch(F.linear, (4, 5), (8, 4))}",
            "  batch.x is float32[4, 5]",
        ]
        assert told["array"] == [
            "BatchError",
            "train step takes this rank's batch as trees of tensors.",
            "  x is ndarray, which isn't a tensor",
            ARRAY,
        ]
        assert told["at rest"] == [
            "ArgumentError",
            "train step got parameters that were changed in place since the state was made.",
            f"  params.head.w is {TYPE[level]}",
            "Make new ones on every rank, state = state.replace(params=fs.tree.map(f, state.params)).",
        ]


def unlike(kind):
    """A step whose first batch is wrong on rank 1 alone."""
    mesh, opt = fs.make_mesh(dp=2), fs.sgd(0.1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    x = torch.ones(4, 4)
    mine = x.numpy() if mesh.get_rank() == 1 and kind == "array" else x
    return refusal_lines(lambda: fs.make_train_step(loss_fn, opt)(state, {"x": mine}))


def test_one_rank_alone_has_an_array():
    for told in run_ranks(unlike, 2, "array"):
        assert told == [
            "BatchError",
            "train step takes the batches of all ranks as trees of tensors.",
            "  rank 1: x is ndarray, which isn't a tensor",
            ARRAY,
        ]
