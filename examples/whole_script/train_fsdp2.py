"""The script beside this one, with FSDP2 and plain torch. It verifies no checksums, and saves in the foreground."""

import json
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OUT, STEPS, ROWS, LENGTH, WIDTH, DEPTH = Path(sys.argv[1]), int(sys.argv[2]), 16, 32, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)
        nn.init.normal_(self.down.weight, std=0.05)

    def forward(self, x):
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(F.gelu(self.up(mean)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens:
    def __init__(self, seed):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.stream = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        self.seed = seed

    def batch(self, step, rank, count):
        """The rows of this rank, from the number of the step alone, so that a resumed run sees what it would have."""
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(0, len(self.stream) - LENGTH, ROWS)[rank * ROWS // count : (rank + 1) * ROWS // count]
        rows = torch.from_numpy(np.stack([self.stream[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def rate(step):
    if step < 5:
        return (step + 1) / 5
    return 0.5 * (1 + math.cos(math.pi * (step - 5) / max(STEPS - 5, 1)))


def loss_of(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def mean(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def save(step, model, opt, scheduler):
    model_state, opt_state = get_state_dict(model, opt)
    state = {"model": model_state, "opt": opt_state, "scheduler": scheduler.state_dict(), "step": step}
    partial = OUT / "ckpt" / f"{step}.partial"
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(OUT / "ckpt" / str(step))
        for old in complete()[:-3]:
            shutil.rmtree(old)
    dist.barrier()


def complete():
    return sorted((path for path in (OUT / "ckpt").glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def load(model, opt, scheduler):
    if not complete():
        return 0
    model_state, opt_state = get_state_dict(model, opt)
    state = {"model": model_state, "opt": opt_state, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=complete()[-1])
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (count,))
torch.manual_seed(0)
model = Net()
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
matrices = [p for p in model.parameters() if p.ndim > 1]
opt = torch.optim.AdamW(matrices, 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(opt, rate)
data, new = Tokens(0), Tokens(1)
(OUT / "ckpt").mkdir(parents=True, exist_ok=True)
for step in range(load(model, opt, scheduler), STEPS):
    model.train()
    loss = loss_of(model, data.batch(step, rank, count))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    opt.step()
    scheduler.step()
    opt.zero_grad()
    row = {"step": step + 1, "loss": mean(loss), "norm": norm.item()}
    if (step + 1) % 10 == 0:
        save(step + 1, model, opt, scheduler)
        model.eval()
        with torch.no_grad():
            row["val"] = mean(loss_of(model, new.batch(0, rank, count)))
    if rank == 0:
        with open(OUT / "log.jsonl", "a") as file:
            print(json.dumps(row), file=file)
dist.destroy_process_group()
