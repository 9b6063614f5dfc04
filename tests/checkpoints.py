"""What tests of checkpoints in one process share: a small state, its layout, its directory's files, files of other programs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import NamedTuple

import torch

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError
from fsharding.checkpoint import manifest as manifests
from fsharding.sharding.named_sharding import local_of
from tests import helpers

FORMATS = ["torch", "safetensors", "dcp"]

refusal = functools.partial(helpers.refusal, kind=CheckpointError)


# ----------------------------------------------------------------------------------------------------------- a small state
def draws(key):
    keys = fs.random.split(key, 4)
    return {
        "table": fs.random.normal(keys[0], (7, 3)),
        "blocks": {"w": fs.random.normal(keys[1], (2, 5, 3)), "scale": fs.random.full((), 0.5)},
        "pair": [fs.random.normal(keys[2], (4,)), fs.random.normal(keys[3], (1, 2))],
        "counts": fs.random.full((3,), 7, dtype=torch.int64),
    }


def small_draws(key):
    """Two leaves, for tests that read many damaged copies."""
    keys = fs.random.split(key, 2)
    return {"table": fs.random.normal(keys[0], (7, 3)), "blocks": {"w": fs.random.normal(keys[1], (2, 5, 3))}}


def optimizer():
    return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, weight_decay=0.1))


def planned(strategy=fs.zero(3), precision=fs.FP32, model=draws, **options):
    """The layout of a model on one process."""
    mesh = fs.make_mesh(device="cpu")
    return fs.plan_layout(model(fs.random.key(0)), mesh, strategy=strategy, precision=precision, **options)


def state_of(layout, opt=None, model=draws):
    """A state at step 12, whose moments are no zeros."""
    state = fs.init_state(model, opt or optimizer(), fs.random.key(3), layout)
    for x in map(local_of, fs.tree.leaves(state.opt_state)):
        x += torch.arange(1, x.numel() + 1).reshape(x.shape).to(x.dtype)
    return state.replace(step=torch.tensor(12))


def at_step(n):
    return state_of(planned()).replace(step=torch.tensor(n))


class Wrapped(NamedTuple):
    inner: object
    mean: torch.Tensor


# ------------------------------------------------------------------------------------------------- files of its directory
def described(file: Path) -> ck.SavedFile:
    """What a manifest should say of a file."""
    data, step = file.read_bytes(), manifests.BLOCK
    blocks = [data[i : i + step] for i in range(0, len(data), step)]
    return ck.SavedFile(len(data), tuple(hashlib.sha256(block).hexdigest() for block in blocks))


def reseal(folder: Path, **changes) -> None:
    """Gives a checkpoint another manifest, which says that all is well.

    It has no `chunks` by default, as the manifests of older checkpoints, so that `.metadata` is what a load reads.
    """
    manifest = dataclasses.replace(ck.metadata(folder), **{"chunks": None, **changes})
    files = {name: described(folder / name) for name in manifest.files}
    (folder / "manifest.json").write_text(manifests.text_of(dataclasses.replace(manifest, files=files)))


def read_metadata(folder: Path):
    return pickle.loads((folder / ".metadata").read_bytes())


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


# ------------------------------------------------------------------------------------------------ files of other programs
def weight_draws(key):
    """What files of weights are written from: no leaf has a path that a state adds."""
    keys = fs.random.split(key, 4)
    return {
        "table": fs.random.normal(keys[0], (7, 3)),
        "blocks": {"w": fs.random.normal(keys[1], (2, 5, 3)), "b": fs.random.normal(keys[2], (2, 3))},
        "scale": fs.random.full((), 0.5),
        "counts": fs.random.full((3,), 7, dtype=torch.int64),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*raw)
