"""What tests of checkpoints on ranks share: one tree in ten layouts, states whose bits say where they belong, and errors."""

from __future__ import annotations

import fcntl
import io
import os
import zlib

import torch
from torch.distributed.tensor import DTensor

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding import random
from fsharding.base.errors import CheckpointError
from fsharding.formats.precision import ScaleState
from fsharding.mesh import device_mesh
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import local_of, sharding_of
from fsharding.testing import assert_bitwise_equal
from fsharding.train.state import main_of, params_from_main

LAYOUTS = {
    "zero0": ({"dp": -1}, fs.zero(0), fs.FP32),
    "zero1_bf16": ({"dp": -1}, fs.zero(1), fs.BF16),
    "zero2": ({"dp": -1}, fs.zero(2), fs.FP32),
    "zero3": ({"dp": -1}, fs.zero(3), fs.FP32),
    "zero3_bf16": ({"dp": -1}, fs.zero(3), fs.BF16),
    "tp": ({"tp": 2, "dp": -1}, fs.zero(3), fs.FP32),
    "pp_fp16": ({"pp": 2, "dp": -1}, fs.zero(2), fs.FP16),
    "hsdp": ({"replica": 2, "dp": -1}, fs.hybrid(), fs.FP32),
    "hfsdp_bf16": ({"replica": 2, "dp": -1}, fs.hybrid(opt_state=True), fs.BF16),
    "all_cut": ({"replica": 2, "dp": -1}, fs.hybrid(params=True, grads=True, opt_state=True), fs.FP32),
}
NAMES = {
    "table": ("vocab", "embed"),
    "blocks": {"w": ("layers", "heads", "embed"), "scale": ("layers",)},
    "odd": [("mlp",), (None, None)],
    "scalar": (),
    "counts": (None,),
    "frozen": ("embed",),
}
# The functions on files that a save calls, by module: each may fail.
OPERATIONS = {
    os: ("open", "write", "fsync", "close", "stat", "listdir", "scandir", "mkdir", "rename", "unlink", "rmdir"),
    io: ("open",),
    fcntl: ("flock",),
}


def draws(key):
    """Dims that no number of ranks divides, some smaller than it; a scalar, a whole-number buffer, a frozen leaf."""
    return {
        "table": random.zeros((7, 13)),
        "blocks": {"w": random.zeros((3, 5, 6)), "scale": random.zeros((3,))},
        "odd": [random.zeros((9,)), random.zeros((1, 2))],
        "scalar": random.zeros(()),
        "counts": random.zeros((3,), dtype=torch.int64),
        "frozen": random.zeros((5,)),
    }


def label(path, leaf):
    return "plain" if leaf.ndim < 2 else "decayed"


def optimizer():
    groups = {"plain": fs.sgd(0.1, momentum=0.9), "decayed": fs.adamw(1e-2, weight_decay=0.1)}
    return fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.optim.multi_transform(groups, label))


def planned(name, mesh=None):
    axes, strategy, precision = LAYOUTS[name]
    mesh = mesh or fs.make_mesh(**axes, device="cpu")
    return fs.plan_layout(draws(None), mesh, strategy=strategy, precision=precision, names=NAMES, frozen=("frozen",))


def filled(tree):
    """Every leaf gets values that depend on its path and on where in the whole leaf they stand, and on nothing else."""
    for path, x in fs.tree.named_leaves(tree).items():
        local = local_of(x)
        box = sharding_of(x).box(x.shape) if isinstance(x, DTensor) else boxes.full(x.shape)
        draw = random.normal(random.key(zlib.crc32(path.encode())), tuple(x.shape), std=100.0)
        local.copy_(draw.slice(box))
    return tree


def some_state(layout):
    state = fs.init_state(draws, optimizer(), fs.random.key(0), layout)
    main = main_of(state)
    filled({"main": main})
    filled({"fixed": [state.params["counts"], state.params["frozen"]]})
    filled({"opt_state": state.opt_state})
    scale = ScaleState(torch.tensor(256.0), torch.tensor(31)) if state.loss_scale is not None else None
    params = params_from_main(main, state.params, layout)
    changes = {"step": torch.tensor(41), "key": torch.tensor([5, 6]), "loss_scale": scale}
    return state.replace(params=params, main=state.main, **changes)


def numbered(n, layout=None):
    """A state whose every leaf depends on `n`."""
    state = some_state(layout or planned("zero3"))
    for x in fs.tree.leaves([state.params, state.main, state.opt_state]):
        local_of(x).add_(n)
    return state.replace(step=torch.tensor(n), key=torch.tensor([n, n]))


def portions(state):
    """What this rank holds, by path: global shape, box, and the values."""
    main = main_of(state)
    tree = {"main": main, "params": state.params, "opt_state": state.opt_state, "step": state.step, "key": state.key}
    result = {}
    for path, x in fs.tree.named_leaves(tree).items():
        whole = not isinstance(x, DTensor)
        box = boxes.full(x.shape) if whole else sharding_of(x).box(x.shape)
        result[path] = (tuple(x.shape), box, local_of(x).clone())
    return result


def whole(ranks):
    """Puts the portions of all ranks together; copies have to be equal and nothing may be missing."""
    result = {}
    for path in ranks[0]:
        shape, _, local = ranks[0][path]
        filling, seen = torch.zeros(shape, dtype=local.dtype), torch.zeros(shape, dtype=torch.bool)
        for portion in ranks:
            _, box, part = portion[path]
            at = tuple(slice(*ends) for ends in box)
            both = seen[at]
            assert torch.equal(filling[at][both], part[both]), path
            filling[at], seen[at] = part, True
        assert seen.all(), path
        result[path] = filling
    return result


def answer(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "done"


def save_some(name, path, replace=None):
    state = some_state(planned(name))
    ck.save(path, state.replace(**(replace or {})), extra={"layout": name})
    return portions(state)


def load_into(names, path, given):
    result = {}
    for name in names:
        state = ck.load(path, planned(name), opt=optimizer() if given else None)
        result[name] = portions(state), None if state.loss_scale is None else [x.item() for x in state.loss_scale]
    return result


def compare(saved, loaded, name, ranks, source):
    """Asserts that main parameters and moments have the same bits, and params these bits in the dtype of the layout."""
    layout = planned(name, device_mesh.make_shape(LAYOUTS[name][0], world=ranks))
    want = dict(saved)
    for leaf in layout.leaves:
        if leaf.trainable:
            want[f"params.{leaf.path}"] = saved[f"main.{leaf.path}"].to(layout.param_dtype(leaf))
    assert_bitwise_equal(loaded, want, f"{source} to {name} on {ranks} ranks")
