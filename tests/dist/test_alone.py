"""A collective that not all ranks call: every rank that waits is told which ranks are where."""

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import ops
from fsharding.errors import RankError
from fsharding.testing import RankPool

CONFIG = fs.models.DecoderConfig(vocab=50, dim=32, layers=2, heads=4, kv_heads=2, hidden=36)
SECONDS = 2


class Run:
    """A run, and what its ranks may call."""

    def __init__(self, folder, **axes):
        self.folder, self.axes = Path(folder), axes
        self.model, self.opt = fs.models.decoder(CONFIG), fs.adamw(1e-3)
        self.mesh = self.make_mesh()
        self.layout = fs.plan_layout(self.model, self.mesh, strategy=fs.zero(3))
        self.state = fs.init_state(self.model, self.opt, fs.random.key(0), self.layout)
        self.one_step = fs.make_train_step(self.model, self.opt)
        tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(0))
        self.batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        self.loss = fs.model_loss(self.model)

    def make_mesh(self):
        return fs.make_mesh(device="cpu", timeout=timedelta(seconds=SECONDS), **self.axes)

    def step(self):
        self.state, _ = self.one_step(self.state, self.batch)

    def save(self):
        fs.checkpoint.save(self.folder / "ckpt", self.state)

    def save_async(self):
        fs.checkpoint.save_async(self.folder / "ckpt", self.state)

    def checkpointer(self):
        fs.checkpoint.Checkpointer(self.folder / "many").after_step(self.state)

    def load(self):
        fs.checkpoint.load(self.folder / "ckpt", self.layout, opt=self.opt)

    def load_weights(self):
        fs.checkpoint.load_weights(self.folder / "ckpt", self.layout)

    def hf_save(self):
        fs.hf.save(self.folder / "hf", self.state, CONFIG)

    def hf_load(self):
        fs.hf.load(self.folder / "hf", self.layout)

    def unshard(self):
        fs.unshard(self.state.params)

    def reshard(self):
        fs.reshard(self.state, self.layout.with_strategy(fs.zero(0)))

    def value_and_grad(self):
        fs.value_and_grad(self.loss)(self.state.params, self.batch)

    def forward(self):
        with torch.no_grad(), fs.set_mesh(self.mesh):
            self.loss(self.state.params, self.batch)

    def gather_unit(self):
        fs.gather_unit(self.state.params["head"])

    def scatter_grads(self):
        head = self.state.params["head"]
        fs.scatter_grads(fs.tree.map(lambda x: torch.zeros(x.shape), head), like=head)

    def global_norm(self):
        fs.global_norm(self.state.params)

    def global_dot(self):
        fs.shard_map(lambda p: fs.global_dot(p, p))(self.state.params)

    def redistribute(self):
        fs.redistribute(self.state.params, self.layout.with_strategy(fs.zero(0)).params)

    def psum(self):
        ops.psum(torch.ones(3), "dp", mesh=self.mesh)

    def backward_of_psum(self):
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(ops.vary(x, "dp", mesh=self.mesh).sum(), x)

    def full_tensor(self):
        next(iter(fs.tree.leaves(self.state.params["blocks"]))).full_tensor()

    def nothing(self):
        while not (self.folder / "told").exists():
            time.sleep(0.02)


def calls(folder, axes, begin, each):
    """Every rank makes its own call; what came of it, and after how many seconds."""
    run = Run(folder, **axes)
    for name in begin:
        getattr(run, name)()
    dist.barrier()
    start = time.monotonic()
    try:
        getattr(run, each[dist.get_rank()])()
    except RankError as error:
        return error.ranks, str(error), time.monotonic() - start
    finally:
        Path(folder, "told").touch()
    return (), "", time.monotonic() - start


def told(folder, *each, begin=(), **axes):
    """What each rank got: the ranks of its error, and its text with every place in this file as HERE."""
    with RankPool(len(each)) as pool:  # no group can be used after a failure
        found = pool.run(calls, str(folder), axes or {"dp": len(each)}, begin, each)
    assert all(seconds < SECONDS + 7 for _, _, seconds in found), found
    return [(ranks, re.sub(r"tests/dist/test_alone\.py:\d+", "HERE", text)) for ranks, text, _ in found]


NAMES = {
    "save": "fs.checkpoint.save",
    "save_async": "fs.checkpoint.save_async",
    "checkpointer": "fs.checkpoint.Checkpointer.save",
    "load": "fs.checkpoint.load",
    "load_weights": "fs.checkpoint.load_weights",
    "hf_save": "fs.hf.save",
    "hf_load": "fs.hf.load",
    "unshard": "fs.unshard",
    "reshard": "fs.reshard",
    "value_and_grad": "fs.value_and_grad",
    "forward": "fs.gather_unit",
    "gather_unit": "fs.gather_unit",
    "scatter_grads": "fs.scatter_grads",
    "global_norm": "fs.global_norm",
    "global_dot": "fs.global_dot",
    "redistribute": "fs.redistribute",
    "psum": "ops.psum",
    "make_mesh": "fs.make_mesh",
    "step": "train step",
}


@pytest.mark.parametrize("call", NAMES)
def test_a_call_of_one_rank_alone(tmp_path, call):
    (ranks, text), other = told(tmp_path, call, "nothing")
    assert other == ((), "")
    name = NAMES[call]
    numbered = f"{name} 0" if call == "step" else name
    assert (ranks, text) == ((1,), (
        f"{name} is called on rank 0 (dp=0) alone.\n"
        f"  rank 0 (dp=0): {numbered} at HERE\n"
        "  rank 1 (dp=1): in no collective, at HERE\n"
        f"Every rank has to call {name}: move it out of the `if rank == 0:`."
    ))  # fmt: skip
