"""Sharpness-aware minimization (Foret et al. 2021) on two local ranks: two gradients a step, the second one uphill.

Run it with `python examples/sam.py`. The step is written out by hand; it trains on cut parameters under any strategy.
"""

import torch
import torch.nn.functional as F

import fsharding as fs

RANKS, STEPS, ROWS, WIDTH, CLASSES, RHO = 2, 100, 32, 64, 8, 0.2


def init(key):
    first, last = fs.random.split(key)
    return {
        "first": {"w": fs.random.normal(first, (WIDTH, 16), std=0.3), "b": fs.random.zeros((WIDTH,))},
        "last": {"w": fs.random.normal(last, (CLASSES, WIDTH), std=0.1), "b": fs.random.zeros((CLASSES,))},
    }


def logits_of(params, x, key=None):
    first = fs.gather_unit(params["first"])
    x = fs.random.dropout(F.relu(F.linear(x, first["w"], first["b"])), 0.1, key)
    last = fs.gather_unit(params["last"])
    return F.linear(x, last["w"], last["b"])


def loss_fn(params, batch, key=None):
    logits = logits_of(params, batch["x"], key)
    return fs.Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits))


def errors_of(params, batch):
    return fs.Loss((logits_of(params, batch["x"]).argmax(1) != batch["y"]).float().sum(), len(batch["y"]))


def rows_of(number, rows=ROWS):
    """Points around one center for each class; a part of the labels is wrong in training."""
    labels, noises, flips = fs.random.split(fs.random.fold_in(fs.random.key(1), number), 3)
    y = fs.random.uniform(labels, (rows,), high=CLASSES).tensor().long()
    x = fs.random.normal(fs.random.key(7), (CLASSES, 16)).tensor()[y] + fs.random.normal(noises, (rows, 16)).tensor()
    wrong = fs.random.bernoulli(flips, (rows,), 0.2 if rows == ROWS else 0.0).tensor()
    return {"x": x, "y": torch.where(wrong, (y + 1) % CLASSES, y)}


def train(strategy, rho):
    """What each rank runs: the errors on new rows, and losses there of the parameters and of ones a step uphill."""
    opt = fs.adamw(1e-2)
    state, _ = fs.setup(init, loss_fn, opt, fs.random.key(0), strategy)
    mesh, main = state.layout.mesh, state.layout.main

    def uphill(params, batch, key):
        """The parameters in whose neighborhood the loss is highest, to first order."""
        _, grads = fs.value_and_grad(loss_fn)(params, batch, key)  # cut as the parameters
        scale = rho / fs.global_norm(grads)
        return fs.tree.map(lambda p, g: p + scale * g, params, grads)

    for number in range(STEPS):
        batch = fs.local_batch(rows_of(number % 8), mesh)  # few rows, seen often
        key = fs.random.for_rank(fs.random.fold_in(state.key, number), mesh)
        params = uphill(state.params, batch, key) if rho else state.params
        _, grads = fs.value_and_grad(loss_fn, grads=main)(params, batch, key)
        state = fs.update(state, grads, opt)

    new = fs.local_batch(rows_of(1000, 2048), mesh)
    evaluate = fs.evaluate(loss_fn)
    rho = rho or RHO
    losses = evaluate(state, new).mean, evaluate(uphill(state.params, new, None), new).mean
    return float(fs.evaluate(errors_of)(state, new).mean), *map(float, losses)


if __name__ == "__main__":
    results = {}
    for strategy in ("zero0", "zero3"):
        for name, rho in (("adamw", 0.0), ("with SAM", RHO)):
            errors, loss, above = results[strategy, name] = fs.run_ranks(train, RANKS, strategy, rho)[0]
            print(f"{strategy} {name:>8}: errors {errors:.3f}  loss {loss:.4f}, uphill {above:.4f}")
    for name in ("adamw", "with SAM"):
        assert results["zero0", name] == results["zero3", name]
    plain, sam = results["zero3", "adamw"], results["zero3", "with SAM"]
    assert sam[1] < plain[1] and sam[2] - sam[1] < plain[2] - plain[1]
    print("flatter and better with SAM, and equal in every bit under both strategies")
