"""Train a model whose state doesn't fit: parameters, moments and gradients on disk, then the same run without.

Run it with `python examples/offload.py`; `--layers 64 --dim 1536` has 1.2 GB of Adam moments. The file is in the
directory of temporary files, or in `FSHARDING_DISK`. On GPUs try `--kind host`, which keeps all in pinned memory.
"""

import argparse
import resource
import time

import torch

import fsharding as fs

ROLES = ("params", "moments", "grads")


def model(layers, dim):
    """An init and a loss of residual blocks, each of which is a unit."""

    def init(key):
        keys = fs.random.split(key, layers)
        return [{"w": fs.random.normal(keys[i], (dim, dim), std=dim**-0.5)} for i in range(layers)]

    def loss(params, batch):
        x = fs.scan_units(lambda w, x: x + torch.tanh(x @ w["w"]) / layers, params, batch["x"])
        return (x - batch["y"]).square().mean()

    return init, loss


def train(strategy, args):
    """Losses, seconds of a step, and the most megabytes that this process had, before its state and after."""
    init, loss = model(args.layers, args.dim)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-3))
    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1), strategy=strategy)
    memory = layout.memory(opt)
    print(f"{strategy}: device {memory.device:,}, host {memory.host:,}, disk {memory.disk:,} bytes")
    before = peak_memory()
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    step = fs.make_train_step(loss, opt, donate=True)
    x = torch.randn(args.rows, args.dim, generator=torch.Generator().manual_seed(0)).to(layout.mesh.device_type)
    losses, begun = [], time.perf_counter()
    for number in range(args.steps):
        if number == 1:
            begun = time.perf_counter()
        state, metrics = step(state, {"x": x, "y": x.roll(1, 0)})
        losses.append(float(metrics.loss))
    seconds = (time.perf_counter() - begun) / max(1, args.steps - 1)
    return losses, seconds, (before, peak_memory())


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kind", choices=("host", "disk"), default="disk")
    args = parser.parse_args()
    # The peak of a process only grows, so the run that needs less comes first.
    away, seconds_away, (begun, peak_away) = train(fs.zero(3).with_memory(**dict.fromkeys(ROLES, args.kind)), args)
    here, seconds_here, (_, peak_here) = train(fs.zero(3), args)
    assert away == here, "where a leaf is changes no bit"
    print(f"losses {here[0]:.4f} to {here[-1]:.4f}, equal in every bit")
    print(f"seconds a step: {seconds_away:.2f} on {args.kind}, {seconds_here:.2f} on the device")
    grown = f"{peak_away - begun:.0f} MB on {args.kind}, {peak_here - begun:.0f} MB on the device"
    print(f"memory that this process took for it: {grown}")


if __name__ == "__main__":
    main()
