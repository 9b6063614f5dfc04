"""A small MLP with a hand-written loss, trained on two local ranks, once with nothing cut and once with everything cut.

Run it with `python examples/mlp.py`. The two lines of losses are equal in every bit.
"""

import torch
import torch.nn.functional as F

import fsharding as fs

RANKS, STEPS, BATCH, WIDTH, DEPTH = 2, 60, 256, 33, 3  # 33 rows do not divide by 2 ranks, and need not


def init(key):
    """Lazy draws: shapes are known now, and each rank computes only the slices that it will hold."""
    first, hidden, last = fs.random.split(key, 3)
    return {
        "first": {"w": fs.random.normal(first, (WIDTH, 2)), "b": fs.random.zeros((WIDTH,))},
        "hidden": {
            "w": fs.random.normal(hidden, (DEPTH, WIDTH, WIDTH), std=WIDTH**-0.5),
            "b": fs.random.zeros((DEPTH, WIDTH)),
        },
        "last": {"w": fs.random.normal(last, (1, WIDTH), std=WIDTH**-0.5), "b": fs.random.zeros((1,))},
    }


NAMES = {  # dim names; "layers" says that the hidden leaves are stacks, which are gathered one row at a time
    "first": {"w": ("mlp", None), "b": ("mlp",)},
    "hidden": {"w": ("layers", "mlp", None), "b": ("layers", "mlp")},
    "last": {"w": (None, None), "b": (None,)},
}
RULES = fs.AxisRules(layers=None, mlp=("dp",))


def layer(params, x):
    return torch.tanh(F.linear(x, params["w"], params["b"]))


def loss_fn(params, batch):
    """The sum of this rank's squared errors, and how many there are."""
    x = layer(fs.gather_unit(params["first"]), batch["x"])
    x = fs.scan_units(layer, params["hidden"], x)
    last = fs.gather_unit(params["last"])
    error = F.linear(x, last["w"], last["b"])[:, 0] - batch["y"]
    return error.square().sum(), error.numel()


def train(strategy):
    """What each rank runs: returns the losses and the bytes of state on this rank."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, strategy, names=NAMES)
    opt = fs.adamw(3e-3)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    step = fs.make_train_step(loss_fn, opt, donate=True)

    index, count = fs.data_rank_and_size(mesh)
    losses = []
    for number in range(STEPS):
        points = fs.random.uniform(fs.random.fold_in(fs.random.key(1), number), (BATCH, 2), low=-3, high=3).tensor()
        x = points.chunk(count)[index]
        state, metrics = step(state, {"x": x, "y": x[:, 0].sin() * x[:, 1].cos()})
        losses.append(float(metrics.loss))
    return losses, fs.debug.state_bytes(state)


if __name__ == "__main__":
    results = {}
    for name, strategy in {"zero0": fs.zero(0), "zero3": fs.zero(3)}.items():
        losses, size = fs.run_ranks(train, RANKS, strategy)[0]
        results[name] = losses
        shown = " ".join(f"{loss:.6f}" for loss in losses[::12] + losses[-1:])
        print(f"{name}: {size:6d} bytes of state a rank, losses {shown}")
    assert results["zero3"][-1] < results["zero3"][0]
    assert results["zero0"] == results["zero3"]
    print("the losses are equal in every bit")
