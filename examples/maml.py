"""Model-agnostic meta-learning (Finn et al. 2017) of sine waves, with parameters cut over two local ranks.

Run it with `python examples/maml.py`. The inner step is torch.func.grad of the whole weights, for many tasks at once by
vmap; the outer one is torch.func.grad through the gather, so its gradient comes back cut as the parameters are.
"""

import math

import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, vmap

import fsharding as fs

RANKS, WIDTH, TASKS, SHOTS, STEPS, INNER_RATE = 2, 32, 16, 10, 80, 0.05


def init(key):
    first, hidden, last = fs.random.split(key, 3)
    return {
        "first": {"w": fs.random.normal(first, (WIDTH, 1)), "b": fs.random.zeros((WIDTH,))},
        "hidden": {
            "w": fs.random.normal(hidden, (WIDTH, WIDTH), std=WIDTH**-0.5),
            "b": fs.random.zeros((WIDTH,)),
        },
        "last": {"w": fs.random.normal(last, (1, WIDTH), std=WIDTH**-0.5)},
    }


NAMES = {
    "first": {"w": ("mlp", None), "b": ("mlp",)},
    "hidden": {"w": ("mlp", None), "b": ("mlp",)},
    "last": {"w": (None, "mlp")},
}
RULES = fs.AxisRules(mlp=("dp",))


def task_loss(whole, x, y):
    """The mean squared error of one task."""
    hidden = torch.tanh(F.linear(x, whole["first"]["w"], whole["first"]["b"]))
    hidden = torch.tanh(F.linear(hidden, whole["hidden"]["w"], whole["hidden"]["b"]))
    return F.mse_loss(F.linear(hidden, whole["last"]["w"]), y)


def adapted(whole, x, y):
    """The weights after one step on a task."""
    return fs.tree.map(lambda w, g: w - INNER_RATE * g, whole, grad(task_loss)(whole, x, y))


def after_one_step(whole, task):
    (x, y), (query_x, query_y) = task
    return task_loss(adapted(whole, x, y), query_x, query_y)


def meta_loss(params, tasks):
    """The mean over all ranks' tasks of the loss after one step on each."""
    losses = vmap(after_one_step, in_dims=(None, 0))(fs.gather_unit(params), tasks)
    return fs.ops.psum(losses.sum(), "dp") / TASKS


def tasks_of(step, index, count):
    """This rank's part of TASKS sine waves: points to learn from, and other points of the same waves."""
    keys = fs.random.split(fs.random.fold_in(fs.random.key(1), step), 3)
    height = fs.random.uniform(keys[0], (TASKS, 1, 1), low=0.5, high=2.0).tensor()
    phase = fs.random.uniform(keys[1], (TASKS, 1, 1), high=math.pi).tensor()
    x = fs.random.uniform(keys[2], (TASKS, 2 * SHOTS, 1), low=-3, high=3).tensor()
    mine = [part.chunk(count)[index] for part in (x, height * torch.sin(x + phase))]
    first, second = zip(*(part.split(SHOTS, 1) for part in mine), strict=True)
    return first, second


def train(strategy):
    """What each rank runs: meta-losses, and what one step does for waves that were never seen."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, strategy, names=NAMES)
    opt = fs.adamw(5e-3)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    params, opt_state = state.params, state.opt_state
    meta_grad = fs.shard_map(grad_and_value(meta_loss))
    losses = []
    for step in range(STEPS):
        grads, loss = meta_grad(params, tasks_of(step, *fs.data_rank_and_size(mesh)))
        updates, opt_state = opt.update(grads, opt_state, params)
        params = fs.optim.apply_updates(params, updates)
        losses.append(float(loss))
    whole, unseen = fs.gather_unit(params), tasks_of(STEPS, 0, 1)
    before = vmap(task_loss, in_dims=(None, 0, 0))(whole, *unseen[1]).mean()
    after = vmap(after_one_step, in_dims=(None, 0))(whole, unseen).mean()
    return losses, float(before), float(after), str(fs.typeof(grads["hidden"]["w"]))


if __name__ == "__main__":
    results = {}
    for level in (0, 3):
        losses, before, after, kind = fs.run_ranks(train, RANKS, fs.zero(level))[0]
        print(f"zero({level}): meta-gradients are {kind}, meta-loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"  waves never seen: loss {before:.4f}, after one step {after:.4f}")
        results[level] = losses
        assert losses[-1] < 0.7 * losses[0]
        assert after < 0.7 * before
    torch.testing.assert_close(torch.tensor(results[0][:20]), torch.tensor(results[3][:20]), rtol=1e-4, atol=0)
    print("both strategies learn to learn alike")
