"""Differentially private SGD (Abadi et al. 2016): per-sample gradients by vmap(grad), clipped, summed, with noise.

Run it with `python examples/dp_sgd.py`. Parameters are cut over two local ranks. Each rank gathers them once a step,
takes the gradient of each of its own samples, clips each to one norm, and scatters the sum: whole gradients of samples
never travel. The noise is a lazy draw, of which each rank computes what it holds, so zero(0) and zero(3) add the same.
"""

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fsharding as fs

RANKS, SAMPLES, BATCH, WIDTH, STEPS = 2, 512, 128, 16, 100
RATE, CLIP, NOISE = 2.0, 1.0, 0.5


def init(key):
    first, last = fs.random.split(key, 2)
    return {
        "first": {"w": fs.random.normal(first, (WIDTH, 2)), "b": fs.random.zeros((WIDTH,))},
        "last": {"w": fs.random.normal(last, (2, WIDTH), std=WIDTH**-0.5), "b": fs.random.zeros((2,))},
    }


NAMES = {"first": {"w": ("mlp", None), "b": ("mlp",)}, "last": {"w": (None, "mlp"), "b": (None,)}}
RULES = fs.AxisRules(mlp=("dp",))


def sample_loss(whole, x, y):
    """Of one sample, of whole weights."""
    hidden = torch.tanh(F.linear(x, whole["first"]["w"], whole["first"]["b"]))
    return F.cross_entropy(F.linear(hidden, whole["last"]["w"], whole["last"]["b"]), y)


def clipped_sum(whole, x, y):
    """The sum of this rank's clipped per-sample gradients, and the norms that they had."""
    each = vmap(grad(sample_loss), in_dims=(None, 0, 0))(whole, x, y)
    squares = [g.flatten(1).square().sum(1) for g in fs.tree.leaves(each)]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (CLIP / norms).clamp(max=1.0)
    return fs.tree.map(lambda g: torch.einsum("b,b...->...", factors, g), each), norms


def noise_like(layout, key):
    """Normal noise in the shardings of the parameters; each rank draws its own slices of one global draw."""
    keys = fs.random.split(key, len(layout.leaves)).unbind(0)
    draws = [fs.random.normal(k, leaf.shape, std=NOISE * CLIP) for k, leaf in zip(keys, layout.leaves, strict=True)]
    parts = [
        leaf.params.to_dtensor(draw.slice(leaf.params.box(leaf.shape)), leaf.shape)
        for draw, leaf in zip(draws, layout.leaves, strict=True)
    ]
    return fs.tree.unflatten(layout.structure, parts)


def points(key):
    x = fs.random.normal(key, (SAMPLES, 2)).tensor()
    return x, (x[:, 0] * x[:, 1] > 0).long()


def train(strategy):
    """What each rank runs: returns the accuracy, the norms of the last step, and the bytes of parameters here."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, strategy, names=NAMES)
    params = fs.init_state(init, fs.sgd(RATE), fs.random.key(0), layout).params
    index, count = fs.data_rank_and_size(mesh)
    x, y = points(fs.random.key(1))
    norms = torch.zeros(0)
    for step in range(STEPS):
        at = torch.arange(step * BATCH, (step + 1) * BATCH).remainder(SAMPLES).chunk(count)[index]
        total, norms = clipped_sum(fs.gather_unit(params), x[at], y[at])
        grads = fs.scatter_grads(total, like=params)
        noise = noise_like(layout, fs.random.fold_in(fs.random.key(2), step))
        updates = fs.tree.map(lambda g, z: (g + z) * (-RATE / BATCH), grads, noise)
        params = fs.optim.apply_updates(params, updates)
    whole = fs.gather_unit(params)
    hidden = torch.tanh(F.linear(x, whole["first"]["w"], whole["first"]["b"]))
    found = F.linear(hidden, whole["last"]["w"], whole["last"]["b"]).argmax(1)
    return float((found == y).float().mean()), norms, fs.debug.state_bytes(params)


def check_norms():
    """vmap(grad) of a sample against the gradient of that sample alone."""
    whole = fs.tree.map(lambda d: d.tensor(), init(fs.random.key(0)))
    x, y = points(fs.random.key(1))
    _, norms = clipped_sum(whole, x[:4], y[:4])
    alone = [fs.global_norm(grad(sample_loss)(whole, x[i], y[i])) for i in range(4)]
    torch.testing.assert_close(norms, torch.stack(alone))


if __name__ == "__main__":
    check_norms()
    results = {}
    for level in (0, 3):
        ranks = fs.run_ranks(train, RANKS, fs.zero(level))
        accuracy, _, size = ranks[0]
        norms = torch.cat([norms for _, norms, _ in ranks])
        print(f"zero({level}): accuracy {accuracy:.3f}, {size} bytes of parameters a rank")
        print(f"  norms of {len(norms)} samples: median {norms.median():.4f}, {int((norms > CLIP).sum())} clipped")
        results[level] = accuracy, norms
    assert results[0][0] > 0.8
    torch.testing.assert_close(results[0], results[3], rtol=1e-3, atol=1e-4)
    print("both strategies clip the same samples and add the same noise")
