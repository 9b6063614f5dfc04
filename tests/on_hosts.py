"""Programs that torchrun starts on two hosts for tests/dist/test_hosts.py: `python -m tests.on_hosts PROGRAM FOLDER`.

Each rank writes its answer into the folder, which both hosts see. `on_ranks` is the same work on one host.
"""

import json
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.comm.transport import choice_for
from fsharding.mesh.device_mesh import axis_group, own_rank
from tests.helpers import mesh_of, token_batch, until
from tests.training import train

CONFIG = fs.models.DecoderConfig(vocab_size=32, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)
MODEL, OPT = fs.models.decoder(CONFIG), fs.adamw(1e-2)
LAWS = {
    "zero3": (fs.zero(3), {"dp": 4}),
    "zero1": (fs.zero(1), {"dp": 4}),
    "hsdp": (fs.hybrid(), {"replica": 2, "dp": 2}),
    "tp": (fs.zero(3), {"dp": 2, "tp": 2}),
}
"""Strategies and meshes of four ranks: the two ranks of a host are neighbors on the last axis."""
STEPS, LOST_AT = 6, 3


def trained():
    """Losses, norms and whole parameters of each law."""
    return {name: train(strategy, axes, steps=3, config=CONFIG) for name, (strategy, axes) in LAWS.items()}


def made(timeout=20):
    """A layout over all ranks, and the step that trains it."""
    mesh = fs.make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=timeout))
    return fs.plan_layout(MODEL, mesh, strategy=fs.zero(3)), fs.make_train_step(MODEL, OPT)


def continued(state, layout, step, until, save=None):
    """The losses of the steps from here to another one, each by its number."""
    losses = {}
    while int(state.step) < until:
        number = int(state.step)
        state, metrics = step(state, token_batch(number, vocab=32, rows=4, mesh=layout.mesh))
        losses[number] = metrics.loss.item()
        if save is not None:
            fs.checkpoint.save(save / f"step-{number + 1}", state)
    return losses, state


def reference():
    """A run of `STEPS` that nothing disturbs."""
    layout, step = made()
    return continued(fs.init_state(MODEL, OPT, fs.random.key(0), layout), layout, step, STEPS)[0]


def goes_on(folder):
    """The losses after `LOST_AT` from a checkpoint that another set of hosts has written."""
    layout, step = made()
    return continued(fs.checkpoint.load(folder / "shared", layout, opt=OPT), layout, step, STEPS)[0]


def refused(call, *args, **kwargs):
    """The error that a call ends with."""
    try:
        call(*args, **kwargs)
    except fs.errors.FshardingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def laws(folder):
    """Training, transports and checkpoints."""
    answer = {"trained": trained(), "host": os.uname().nodename}
    meshes = {name: mesh_of(axes) for name, (_, axes) in LAWS.items()}
    answer["meshes"] = {name: str(mesh) for name, mesh in meshes.items()}
    cpu = torch.device("cpu")
    answer["choices"] = {
        (name, axis): str(choice_for(axis_group(meshes[name], (axis,)), cpu))
        for name, (_, axes) in LAWS.items()
        for axis in axes
    }
    layout, step = made()
    losses, state = continued(fs.init_state(MODEL, OPT, fs.random.key(0), layout), layout, step, LOST_AT)
    fs.checkpoint.save(folder / "shared", state)
    answer["saved"] = losses
    answer["loaded"] = continued(fs.checkpoint.load(folder / "shared", layout, opt=OPT), layout, step, STEPS)[0]
    # Each host has a /tmp of its own.
    own = Path("/tmp/run")
    own.mkdir(exist_ok=True)
    answer["separate"] = refused(fs.checkpoint.save, own / "step-3", state)
    dist.barrier()  # rank 0 takes back what it has made
    answer["left"] = sorted(path.name for path in own.iterdir())
    dist.barrier()
    if own_rank() == 0:
        shutil.copytree(folder / "shared", own / "copy")
    dist.barrier()
    answer["one_has_it"] = refused(fs.checkpoint.load, own / "copy", layout, opt=OPT)
    if own_rank() == 2:
        shutil.copytree(folder / "shared", own / "copy")
    dist.barrier()
    answer["copies"] = continued(fs.checkpoint.load(own / "copy", layout, opt=OPT), layout, step, STEPS)[0]
    torch.save(answer, folder / f"{own_rank()}.pt")


def lost(folder):
    """Trains with a checkpoint after each step; at one step the second host stops, the first time."""
    layout, step = made(timeout=float(os.environ.get("TIMEOUT_S", "20")))
    shared = folder / "checkpoints"
    newest = fs.checkpoint.latest(shared)
    state = fs.checkpoint.load(newest, layout, opt=OPT) if newest else fs.init_state(
        MODEL, OPT, fs.random.key(0), layout
    )  # fmt: skip
    try:
        if not newest:
            losses, state = continued(state, layout, step, LOST_AT, save=shared)
            (folder / f"first-{own_rank()}.json").write_text(json.dumps(losses))
            if own_rank() >= 2:
                stop(folder)
        losses, _ = continued(state, layout, step, STEPS)
        (folder / f"second-{own_rank()}.json").write_text(json.dumps(losses))
    except fs.errors.RankError as error:
        text = {"ranks": error.ranks, "text": str(error)}
        written = folder / f"error-{own_rank()}.new"
        written.write_text(json.dumps(text))
        written.rename(written.with_suffix(".json"))
        # torchrun ends the other ranks of a host as soon as one has failed, while they may still look for the cause.
        until(lambda: all((folder / f"error-{rank}.json").exists() for rank in (0, 1)), 30)
        raise


def stop(folder):
    """Says that this rank is there, and what happens to it: it is killed, or stands still until its host is."""
    (folder / f"stopped-{own_rank()}").touch()
    if os.environ["STOPS"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    {"laws": laws, "lost": lost}[sys.argv[1]](Path(sys.argv[2]))
