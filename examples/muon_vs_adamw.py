"""Muon against AdamW on a small decoder, on two local ranks under zero(3): the same model, data and learning rates.

Run it with `python examples/muon_vs_adamw.py`, and with `--plot curves.png` for a picture.
Muon has the matrices of the blocks, each rank some whole ones of a stack; AdamW has embedding, head and norms.
"""

import argparse

import torch

import fsharding as fs

RANKS, STEPS, BATCH, LENGTH, RATE = 2, 40, 8, 33, 1e-2
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=48, layers=3, heads=4, kv_heads=2, intermediate_size=96)


def optimizers():
    rates = fs.optim.schedules.warmup_cosine(RATE, 5, STEPS, end=RATE / 10)
    adamw = fs.adamw(rates, weight_decay=0.1)
    # With this ratio an update is as large as one of AdamW, so one learning rate does for both.
    muon = fs.optim.muon(rates, weight_decay=0.1, adjust="match_rms_adamw")
    both = fs.optim.multi_transform({"matrix": muon, "other": adamw}, fs.optim.label_matrices())
    return {"adamw": adamw, "muon": both}


def batch_of(step, mesh):
    """This rank's rows of sequences that count upwards, modulo 64, each by a stride of its own from 1 to 8."""
    first, second = fs.random.split(fs.random.fold_in(fs.random.key(1), step))
    starts = fs.random.uniform(first, (BATCH, 1), high=64).tensor().long()
    strides = fs.random.uniform(second, (BATCH, 1), low=1, high=9).tensor().long()
    rows = (starts + strides * torch.arange(LENGTH)) % 64
    index, count = fs.data_rank_and_size(mesh)
    mine = rows.chunk(count)[index]
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def train(name):
    """What each rank runs: returns losses, bytes of optimizer state of this rank, and where a momentum is."""
    mesh, model, opt = fs.make_mesh(dp=-1), fs.models.decoder(CONFIG), optimizers()[name]
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3))
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step, losses = fs.make_train_step(model, opt, donate=True), []
    for number in range(STEPS):
        state, metrics = step(state, batch_of(number, mesh))
        losses.append(float(metrics.loss))
    named = fs.tree.named_leaves(state.opt_state)
    path = next(path for path in named if path.endswith("mu.blocks.wq"))
    return losses, fs.debug.state_bytes(state.opt_state), f"{path} is {fs.typeof(named[path])}"


def draw(curves, path):
    import matplotlib.pyplot as plot  # lazy: an extra, and slow to load

    figure, axes = plot.subplots(figsize=(6, 4))
    for name, losses in curves.items():
        axes.plot(range(1, STEPS + 1), losses, label=name)
    axes.set(xlabel="step", ylabel="loss", title="Muon and AdamW at one learning rate")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"the curves are in {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", help="where to draw the curves")
    arguments = parser.parse_args()
    curves = {}
    for name in ("adamw", "muon"):
        losses, size, where = fs.run_ranks(train, RANKS, name)[0]
        curves[name] = losses
        shown = " ".join(f"{loss:.3f}" for loss in losses[::10] + losses[-1:])
        print(f"{name:5s}  {size:6d} bytes of optimizer state a rank  losses {shown}\n       {where}")
    ahead = next((i for i, loss in enumerate(curves["muon"], 1) if loss <= curves["adamw"][-1]), None)
    if arguments.plot:
        draw(curves, arguments.plot)
    assert ahead is not None
    print(f"muon is where adamw ends after {ahead} of {STEPS} steps")
