"""An ensemble of MLPs as one model: members are a dim of every leaf, computed by vmap, cut over two local ranks.

Run it with `python examples/ensemble.py`. The dim of members is called "layers", which nothing cuts; what the rules cut
is the width of each member. The train step is that of any model. Where members disagree there were no data.
"""

import torch
import torch.nn.functional as F
from torch.func import vmap

import fsharding as fs

RANKS, MEMBERS, WIDTH, DEPTH, POINTS, STEPS = 2, 8, 32, 2, 64, 100


def init(key):
    first, hidden, last, shift = fs.random.split(key, 4)
    return {
        "first": {
            "w": fs.random.normal(first, (MEMBERS, WIDTH, 1), std=2.0),
            "b": fs.random.normal(shift, (MEMBERS, WIDTH)),
        },
        "hidden": {
            "w": fs.random.normal(hidden, (DEPTH, MEMBERS, WIDTH, WIDTH), std=1.5 * WIDTH**-0.5),
            "b": fs.random.zeros((DEPTH, MEMBERS, WIDTH)),
        },
        "last": {"w": fs.random.normal(last, (MEMBERS, 1, WIDTH), std=WIDTH**-0.5)},
    }


NAMES = {
    "first": {"w": ("layers", "mlp", None), "b": ("layers", "mlp")},
    "hidden": {"w": ("layers", "layers", "mlp", None), "b": ("layers", "layers", "mlp")},
    "last": {"w": ("layers", None, "mlp")},
}
RULES = fs.AxisRules(layers=None, mlp=("dp",))


def dense(weights, x):
    """A layer of one member."""
    return torch.tanh(F.linear(x, weights["w"], weights["b"]))


def predictions(params, x):
    """What every member says: [members, points]. Units are gathered for all members at once, then used by vmap."""
    y = vmap(dense, in_dims=(0, None))(fs.gather_unit(params["first"]), x)
    y = fs.scan_units(vmap(dense), params["hidden"], y)
    return vmap(F.linear)(y, fs.gather_unit(params["last"])["w"])[..., 0]


def loss_fn(params, batch):
    """The sum of the errors of all members on this rank's points, and how many there are."""
    error = predictions(params, batch["x"]) - batch["y"]
    return error.square().sum(), error.numel()


def train(strategy):
    """What each rank runs: losses, how far members disagree with and without data, and how a leaf lives."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, strategy, names=NAMES)
    opt = fs.adamw(5e-3)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    step = fs.make_train_step(loss_fn, opt, donate=True)
    index, count = fs.data_rank_and_size(mesh)
    x = fs.random.uniform(fs.random.key(1), (POINTS, 1), low=-2, high=2).tensor().chunk(count)[index]
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, {"x": x, "y": (3 * x[:, 0]).sin()})
        losses.append(float(metrics.loss))
    grid = torch.cat((torch.linspace(-2, 2, 50), torch.linspace(4, 8, 50)))[:, None]
    spread = fs.shard_map(predictions)(state.params, grid).std(0)
    leaf = state.params["hidden"]["w"]
    return losses, float(spread[:50].mean()), float(spread[50:].mean()), f"{fs.typeof(leaf)}"


if __name__ == "__main__":
    results = {}
    for level in (0, 3):
        losses, inside, outside, kind = fs.run_ranks(train, RANKS, fs.zero(level))[0]
        print(f"zero({level}): {MEMBERS} members, hidden weights are {kind}, loss {losses[0]:.4f} -> {losses[-1]:.5f}")
        print(f"  disagreement: {inside:.4f} where there are data, {outside:.4f} where there are none")
        assert outside > 3 * inside
        results[level] = losses
    assert results[0] == results[3]
    print("the losses are equal in every bit")
