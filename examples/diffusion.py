"""Trains a denoising diffusion model on points of a ring, and samples from a moving average of its parameters.

Run it with `python examples/diffusion.py`: two local ranks under zero(3). The noise is predicted, as by Ho et al. 2020;
samples are drawn by the deterministic sampler of Song et al. 2021.
"""

import itertools
import math

import torch
import torch.nn.functional as F

import fsharding as fs

RANKS, STEPS, ROWS, WIDTH, DEPTH, RADIUS = 2, 300, 256, 64, 3, 2.0
FREQUENCIES = 2.0 ** torch.arange(4)


def init(key):
    first, *layers, last = fs.random.split(key, DEPTH + 2)
    return {
        "first": linear(first, 2 + 2 * len(FREQUENCIES), WIDTH),
        "layers": [linear(k, WIDTH, WIDTH) for k in layers],
        "last": linear(last, WIDTH, 2),
    }


def linear(key, fan_in, fan_out):
    return {"w": fs.random.normal(key, (fan_out, fan_in), std=fan_in**-0.5), "b": fs.random.zeros((fan_out,))}


def layer(params, x):
    return x + F.silu(F.linear(x, params["w"], params["b"]))


def denoise(params, x, t):
    """The noise in x at times t in [0, 1]; a pure function of parameters that are cut over ranks, or whole."""
    waves = math.pi * t[:, None] * FREQUENCIES
    first = fs.gather_unit(params["first"])
    x = F.silu(F.linear(torch.cat((x, waves.sin(), waves.cos()), 1), first["w"], first["b"]))
    x = fs.scan_units(layer, params["layers"], x)
    last = fs.gather_unit(params["last"])
    return F.linear(x, last["w"], last["b"])


def noised(x, noise, t):
    """Data at 0 and noise at 1, with squares that add up to 1."""
    angle = 0.5 * math.pi * t[:, None]
    return angle.cos() * x + angle.sin() * noise


def loss_fn(params, batch, key):
    """Each rank draws times and noise of its own for its rows."""
    times, noises = fs.random.split(fs.random.for_rank(key))
    t = fs.random.uniform(times, (len(batch["x"]),)).tensor()
    noise = fs.random.normal(noises, batch["x"].shape).tensor()
    error = denoise(params, noised(batch["x"], noise, t), t) - noise
    return fs.Loss(error.square().sum(), error.numel())


@torch.no_grad()
def sample(params, key, rows, steps=40):
    x, times = fs.random.normal(key, (rows, 2)).tensor(), torch.linspace(1, 0, steps + 1)
    for now, after in itertools.pairwise(times):
        noise = denoise(params, x, now.expand(rows))
        angle = 0.5 * math.pi * now.clamp(max=0.99)
        clean = (x - angle.sin() * noise) / angle.cos()
        x = noised(clean.clamp(-3, 3), noise, after.expand(rows))
    return x


def rows_of(number):
    key = fs.random.fold_in(fs.random.key(1), number)
    angle = fs.random.uniform(key, (ROWS,), high=2 * math.pi).tensor()
    return {"x": RADIUS * torch.stack((angle.cos(), angle.sin()), 1)}


def train():
    """What each rank runs: losses, and how far from the origin samples are."""
    schedule = fs.optim.schedules.warmup_cosine(5e-3, 20, STEPS)
    opt = fs.optim.chain(fs.adamw(schedule), fs.optim.ema(0.98))
    state, step = fs.setup(init, loss_fn, opt, fs.random.key(0), "zero3", donate=True)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, fs.local_batch(rows_of(number), state.layout.mesh))
        losses.append(float(metrics.loss))
        if number % 100 == 99:
            fs.print0(f"step {number + 1}: loss {sum(losses[-100:]) / 100:.4f}", flush=True)
    average = fs.params_from_main(fs.optim.ema_of(state.opt_state), state.params, state.layout)
    return losses, sample(average, fs.random.key(2), 512).norm(dim=1)


if __name__ == "__main__":
    results = fs.run_ranks(train, RANKS)
    losses, distances = results[0]
    assert torch.equal(distances, results[1][1])  # every rank gathers the same weights
    print(f"samples of the average are {distances.mean():.2f} from the origin, give or take {distances.std():.2f}")
    assert abs(distances.mean() - RADIUS) < 0.2 and distances.std() < 0.35
