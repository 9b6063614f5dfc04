"""A training script: data, schedule, clipping, evaluation, a log, and checkpoints that it resumes from.

Run it with `torchrun --nproc-per-node 2 examples/whole_script/train.py runs/own 1000`.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import fsharding as fs

OUT, STEPS, ROWS, LENGTH, WIDTH, DEPTH = Path(sys.argv[1]), int(sys.argv[2]), 16, 32, 64, 4


def init(key):
    embed, up, down, head = fs.random.split(key, 4)
    return {
        "embed": fs.random.normal(embed, (256, WIDTH), std=0.5),
        "blocks": [
            {
                "up": fs.random.normal(k, (4 * WIDTH, WIDTH), std=0.1),
                "down": fs.random.normal(n, (WIDTH, 4 * WIDTH), std=0.05),
            }
            for k, n in zip(fs.random.split(up, DEPTH), fs.random.split(down, DEPTH), strict=True)
        ],
        "head": fs.random.normal(head, (256, WIDTH), std=0.1),
    }


def block(params, x):
    mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
    return x + F.linear(F.gelu(F.linear(mean, params["up"])), params["down"])


def loss_fn(params, batch):
    x = F.embedding(batch["tokens"], fs.gather_unit(params["embed"]))
    x = fs.scan_units(block, params["blocks"], x)
    losses = fs.ops.cross_entropy(F.linear(x, fs.gather_unit(params["head"])), batch["targets"])
    return fs.Loss(losses.sum(), losses.numel())


schedule = fs.optim.schedules.warmup_cosine(3e-3, 5, STEPS)
opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(schedule, weight_decay=0.1))
state, step = fs.setup(init, loss_fn, opt, fs.random.key(0), "zero3")
data, new = (fs.data.open_data("default", batch_size=ROWS, seq_len=LENGTH, seed=seed) for seed in (0, 1))
with fs.checkpoint.Checkpointer(OUT / "ckpt", every=10) as saver:
    if saver.latest():
        state = saver.load(state.layout, opt=opt)
    while state.step < STEPS:
        state, metrics = step(state, fs.local_batch(data.batch(int(state.step)), state.layout.mesh))
        saver.after_step(state)
        row = {"step": int(state.step), "loss": float(metrics.loss), "norm": float(metrics.grad_norm)}
        if row["step"] % 10 == 0:
            row["val"] = float(fs.evaluate(loss_fn)(state, fs.local_batch(new.batch(0), state.layout.mesh)).mean)
        if fs.is_rank0():
            with open(OUT / "log.jsonl", "a") as file:
                print(json.dumps(row), file=file)
