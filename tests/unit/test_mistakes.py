"""What people who come from torch or JAX get wrong at first: each is told the line to type, on one process."""

import functools
import math
import re
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.base.errors import (
    ArgumentError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    DonatedError,
    DtypeError,
    FshardingError,
    LayoutError,
    MeshError,
    MissingKeyError,
    MissingNameError,
    NotGatheredError,
    RandomKeyError,
    ShapeError,
    SpecError,
    TransformError,
    TreeError,
)
from fsharding.models import model
from fsharding.train import state as train_state
from tests.golden import check, texts
from tests.modules import Module

CONFIG = fs.models.DecoderConfig(vocab_size=8, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=8)


def init(key):
    first, last = fs.random.split(key)
    return {
        "body": {"w": fs.random.normal(first, (8, 4)), "b": fs.random.zeros((8,))},
        "head": {"weight": fs.random.normal(last, (3, 8))},
    }


def loss_fn(params, batch):
    body, head = fs.gather_unit(params["body"]), fs.gather_unit(params["head"])
    x = F.linear(torch.tanh(F.linear(batch["x"], body["w"], body["b"])), head["weight"])
    return (x - batch["y"]).square().sum(), len(x)


def decaying():
    return fs.adamw(1e-3, weight_decay=0.1)


@pytest.fixture(scope="module")
def at():
    """All that a call may need, once."""
    mesh, key, opt = fs.make_mesh(dp=1), fs.random.key(0), fs.adamw(1e-3)
    layout = fs.plan_layout(init(key), mesh)
    x = torch.arange(24.0).view(6, 4) / 24
    state, batch = fs.init_state(init, opt, key, layout), {"x": x, "y": x[:, :3]}
    value, grads = fs.value_and_grad(loss_fn)(state.params, batch)
    return SimpleNamespace(
        value=value,
        grads=grads,
        mesh=mesh,
        key=key,
        opt=opt,
        layout=layout,
        tree=init(key),
        state=state,
        batch=batch,
        step=fs.make_train_step(loss_fn, opt),
        module=Module(),
        sgd=torch.optim.SGD(Module().parameters(), 0.1),
        names={"body": {"w": ("mlp", None), "b": ("mlp",)}, "head": {"weight": (None, "mlp")}},
    )


def in_loss(fn):
    """A loss function that does something to its parameters, called by `value_and_grad`."""
    return lambda at: fs.value_and_grad(fn)(at.state.params, at.batch)


# ------------------------------------------------------------------------------------------- leaves before their gather
UNGATHERED = {
    "is passed to torch.nn.functional.linear": lambda p, b: F.linear(b["x"], p["body"]["w"]),
    "is passed to torch.stack": lambda p, b: torch.stack([p["body"]["w"]]),
    "is converted to NumPy": lambda p, b: np.asarray(p["body"]["w"]),
    "is an operand of @": lambda p, b: b["x"] @ p["body"]["w"],
    "is an operand of + with a plain tensor": lambda p, b: p["body"]["w"] + torch.ones(8, 4),
    "is an operand of * with a plain tensor": lambda p, b: torch.ones(8, 4) * p["body"]["w"],
    "is an operand of **": lambda p, b: 2 ** p["body"]["w"],
    "is an operand of // or %": lambda p, b: p["body"]["w"] % 2,
    "is compared": lambda p, b: p["body"]["w"] > 0,
    "is used as a number": lambda p, b: float(p["body"]["w"]),
    "is accessed as .T": lambda p, b: p["body"]["w"].T,
    "is passed to torch.maximum with a plain tensor": lambda p, b: torch.maximum(p["body"]["w"], torch.ones(8, 4)),
    "is accessed as .full_tensor": lambda p, b: p["body"]["w"].full_tensor(),
    "is accessed as .numpy": lambda p, b: p["body"]["w"].numpy(),
}


@pytest.mark.parametrize("use", UNGATHERED)
def test_a_leaf_that_is_used_before_it_is_gathered(at, use):
    with pytest.raises(NotGatheredError) as caught:
        in_loss(UNGATHERED[use])(at)
    lines = str(caught.value).split("\n")
    assert lines[0] == f"fs.value_and_grad has a loss function in which a leaf {use} before it is gathered."
    assert lines[1] == "  params.body.w is float32[8, 4], of which this rank holds [8, 4]"
    assert lines[2].startswith("  test_mistakes.py:")
    assert lines[3] == 'Gather its unit first, unit = fs.gather_unit(params["body"]), and use unit["w"].'
    assert len(lines) == 4


def test_more_that_is_said_of_some_uses(at):
    def mend(fn):
        with pytest.raises(NotGatheredError) as caught:
            in_loss(fn)(at)
        return str(caught.value).split("\n")[-1]

    first = 'Gather its unit first, unit = fs.gather_unit(params["body"]), and use unit["w"].'
    sums = " The sum of its squares over all ranks is fs.tree.vdot(x, x), and their root fs.global_norm(x)."
    assert mend(lambda p, b: p["body"]["w"].sum()) == mend(lambda p, b: torch.sum(p["body"]["w"])) == first + sums
    assert mend(lambda p, b: p["body"]["w"].to_local()) == f"{first} This rank's shard is .value."
    for fn in (lambda p, b: p["body"]["w"][0], lambda p, b: list(p["body"]["w"])):
        assert mend(fn) == (
            f'{first} For a block of a stack, write fs.gather_unit(fs.select_unit(params["body"], i)), or use'
            " fs.scan_units."
        )
    assert mend(lambda p, b: fs.unstack_units(p["body"])[0]["b"].T) == (
        'Let fs.scan_units(block, params["blocks"], x) gather each block, or call fs.gather_unit on it first.'
    )


def test_a_tree_that_is_one_leaf(at):
    w = at.state.params["body"]["w"]
    with pytest.raises(NotGatheredError, match=r"(?s)params is float32\[8, 4\].*w = fs\.gather_unit\(params\)\.$"):
        fs.value_and_grad(lambda p: p.T)(w)


def test_outside_of_value_and_grad_the_type_is_said(at):
    with pytest.raises(NotGatheredError) as caught:
        fs.shard_map(lambda p: p["head"]["weight"] @ 2)(at.state.params)
    assert str(caught.value) == (
        "fs.gather_unit was not called for a leaf that is an operand of @.\n"
        "  float32[3, 8], of which this rank holds [3, 8]\n"
        'Gather its unit first, such as head = fs.gather_unit(params["head"]), and use head["weight"].'
    )


def test_a_node_is_still_a_node(at):
    seen = []
    fs.shard_map(lambda p: seen.append(p["head"]["weight"]))(at.state.params)
    node = seen[0]
    assert not hasattr(node, "dtype") and getattr(node, "ndim", 7) == 7
    assert node == node and node != 0 and node in [node] and {node: 1}[node] == 1
    assert repr(node) == "Local(float32[3, 8])"


# ------------------------------------------------------------------------------------------------------- one error each
def write_in_place(params, batch):
    head = fs.gather_unit(params["head"])
    head["weight"].mul_(2)
    return head["weight"].sum()


def write_without_grad(params, batch):
    head = fs.gather_unit(params["head"])
    with torch.no_grad():
        head["weight"].mul_(1)
    return loss_fn(params, batch)


def appending(x, kept):
    kept.append(x.sum())
    return x.square().sum()


class Warmup:
    """A schedule that is made with its length."""

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, count):
        return 0.1 * min(1.0, (count + 1) / self.steps)


SCALER = torch.amp.GradScaler("cpu")


def scaled_by_torch(params, batch):
    total, count = loss_fn(params, batch)
    return SCALER.scale(total), count


NOWHERE = Path(__file__).with_name("nowhere")

# what it is: (kind of error, what to type, the call); tests/errors.golden has the whole text
MISTAKES = {
    "make_mesh(data=2)": (
        MeshError,
        "fs.make_mesh got an unknown axis 'data'.",
        lambda at: fs.make_mesh(data=2),
    ),
    "make_mesh(dp=3)": (
        MeshError,
        "Use dp=-1 for the remaining ranks.",
        lambda at: fs.make_mesh(dp=3),
    ),
    "make_mesh(2)": (
        ArgumentError,
        "Name the axis: fs.make_mesh(dp=2).",
        lambda at: fs.make_mesh(2),
    ),
    "make_mesh as init_device_mesh": (
        ArgumentError,
        "Name the axis: fs.make_mesh(dp=-1).",
        lambda at: fs.make_mesh("cpu", (2,)),
    ),
    "make_mesh(dp='2')": (
        MeshError,
        "A size is an integer, such as dp=2.",
        lambda at: fs.make_mesh(dp="2"),
    ),
    "make_mesh(device='gpu')": (
        ArgumentError,
        'Pass "cpu".',
        lambda at: fs.make_mesh(dp=1, device="gpu"),
    ),
    "make_mesh(timeout=5)": (
        ArgumentError,
        "Write timeout=datetime.timedelta(seconds=5).",
        lambda at: fs.make_mesh(dp=1, timeout=5),
    ),
    "P of no axis": (
        SpecError,
        "fs.P got an unknown axis 'data'.",
        lambda at: fs.P("data"),
    ),
    "a dim without a rule": (
        SpecError,
        "Add hidden=None to the AxisRules, or the axes that shard it.",
        lambda at: fs.plan_layout({"w": torch.zeros(8, 4)}, at.mesh, names={"w": (None, "hidden")}),
    ),
    "names lack a leaf": (
        TreeError,
        "Give names an entry for each leaf of the model, None for a leaf without names.",
        lambda at: fs.plan_layout(at.tree, at.mesh, names={**at.names, "body": {"w": ("mlp", None)}}),
    ),
    "names have one more": (
        TreeError,
        "Give names an entry for each leaf of the model, None for a leaf without names.",
        lambda at: fs.plan_layout(at.tree, at.mesh, names={**at.names, "tail": ("mlp",)}),
    ),
    "names by dotted path": (
        TreeError,
        "Nest names like the model: a dict in a dict.",
        lambda at: fs.plan_layout(
            at.tree, at.mesh, names={"body.b": ("mlp",), "body.w": ("mlp", None), "head.weight": (None, "mlp")}
        ),
    ),
    "names of wrong length": (
        LayoutError,
        "  body.w is float32[8, 4] but has names ('mlp',): write ('mlp', None), for example",
        lambda at: fs.plan_layout(at.tree, at.mesh, names={**at.names, "body": {"w": ("mlp",), "b": None}}),
    ),
    "names that are text": (
        LayoutError,
        "  body.b is float32[8] but has names 'mlp': write ('mlp',), for example",
        lambda at: fs.plan_layout(at.tree, at.mesh, names={**at.names, "body": {"w": None, "b": "mlp"}}),
    ),
    "backward on the loss": (
        TransformError,
        "then opt.update(grads, opt_state, params).",
        lambda at: fs.value_and_grad(loss_fn)(at.state.params, at.batch)[0][0].backward(),
    ),
    "backward on a metric": (
        TransformError,
        "then opt.update(grads, opt_state, params).",
        lambda at: at.step(at.state, at.batch)[1].loss.backward(retain_graph=True),
    ),
    "torch.optim in a step": (
        ArgumentError,
        "Use fs.sgd(0.1): its state is part of the TrainState.",
        lambda at: fs.make_train_step(loss_fn, at.sgd),
    ),
    "torch.optim in init_state": (
        ArgumentError,
        "Use fs.sgd(0.1): its state is part of the TrainState.",
        lambda at: fs.init_state(init, at.sgd, at.key, at.layout),
    ),
    "a class of torch.optim": (
        ArgumentError,
        "fs.optim.from_torch(torch.optim.RMSprop)",
        lambda at: fs.make_train_step(loss_fn, torch.optim.RMSprop),
    ),
    "an optimizer that is not called": (
        ArgumentError,
        "Call it: fs.adamw(...).",
        lambda at: fs.make_train_step(loss_fn, fs.adamw),
    ),
    "a number as optimizer": (
        ArgumentError,
        "Pass an optimizer such as fs.adamw(1e-3) or fs.optim.chain(...).",
        lambda at: fs.state_from_params(at.state.params, 1e-3, at.key, at.layout),
    ),
    "in place on gathered weights": (
        TransformError,
        "Don't modify gathered weights: write w = w * 2 instead of w.mul_(2), and w = w + x instead of w += x.",
        in_loss(write_in_place),
    ),
    "in place on gathered weights, without grad": (
        TransformError,
        "Don't modify gathered weights: other ranks read the same memory, and backward gathers them again.",
        lambda at: fs.value_and_grad(write_without_grad)(
            fs.init_state(init, at.opt, at.key, at.layout).params, at.batch
        ),
    ),
    "shapes in the model": (
        ShapeError,
        "Match the shapes of the batch to the weights, or the weights to the batch.",
        lambda at: at.step(at.state, {**at.batch, "x": torch.zeros(6, 5)}),
    ),
    "a scan over one unit": (
        ShapeError,
        "fs.gather_unit(unit)",
        in_loss(lambda p, b: fs.scan_units(lambda unit, x: x @ unit["weight"], p["head"], b["x"]).sum()),
    ),
    "ids that aren't integers": (
        DtypeError,
        "Pass ids as int64, such as batch.long().",
        in_loss(lambda p, b: F.embedding(b["x"], fs.gather_unit(p["head"])["weight"]).sum()),
    ),
    "an id that is the size of a table": (
        DataError,
        "Ids of V rows are 0 to V - 1",
        lambda at: fs.value_and_grad(
            lambda p, b: F.embedding(b["ids"], fs.gather_unit(p["head"])["weight"]).sum()
        )(at.state.params, {"ids": torch.tensor([0, 3])}),
    ),
    "units and carry in the order of lax.scan": (
        ArgumentError,
        "fs.scan_units(block, params, x)",
        in_loss(lambda p, b: fs.scan_units(lambda x, unit: (x, None), b["x"], p["body"])[0].sum()),
    ),
    "axes of an AbstractMesh as keywords": (
        MeshError,
        "Write fs.AbstractMesh(('dp', 'tp'), (4, 2)).",
        lambda at: fs.AbstractMesh(dp=4, tp=2),
    ),
    "a backend of a mesh": (MeshError, "Pass device=", lambda at: fs.make_mesh(dp=-1, backend="gloo")),
    "vdot of a sharded tree and a plain one": (
        LayoutError,
        "Bring both to one sharding",
        lambda at: fs.tree.vdot(at.state.params["head"], {"weight": torch.ones(3, 8)}),
    ),
    "fs.Parts": (MissingNameError, "Write fs.hf.families.Parts(embed, block, head).", lambda at: fs.Parts),
    "microbatches that do not divide": (
        BatchError,
        "Choose a number of microbatches that divides dim 0 of every leaf, or a different global batch.",
        lambda at: fs.make_train_step(loss_fn, at.opt, microbatches=4)(at.state, at.batch),
    ),
    "arrays of NumPy": (
        BatchError,
        "fs.tree.map(torch.as_tensor, batch)",
        lambda at: at.step(at.state, fs.tree.map(lambda x: x.numpy(), at.batch)),
    ),
    "lists of numbers": (
        BatchError,
        "fs.tree.map(torch.as_tensor, batch)",
        lambda at: at.step(at.state, {"x": [0.5] * 100}),
    ),
    "arrays of NumPy in value_and_grad": (
        BatchError,
        "fs.tree.map(torch.as_tensor, batch)",
        lambda at: fs.value_and_grad(loss_fn)(at.state.params, fs.tree.map(lambda x: x.numpy(), at.batch)),
    ),
    "no batch": (
        BatchError,
        "Pass a batch with the structure that the loss function reads, such as a dict of tensors.",
        lambda at: at.step(at.state, None),
    ),
    "a batch that is a tuple": (
        BatchError,
        "Pass a batch with the structure that the loss function reads, such as a dict of tensors.",
        lambda at: at.step(at.state, (at.batch["x"], at.batch["y"])),
    ),
    "a key that the batch lacks": (
        MissingKeyError,
        "Add 'y' to the batch or the parameters, or use one of these keys.",
        lambda at: at.step(at.state, {"x": at.batch["x"]}),
    ),
    "a unit that the parameters lack": (
        MissingKeyError,
        "Add 'heads' to the batch or the parameters, or use one of these keys.",
        in_loss(lambda p, b: fs.gather_unit(p["heads"])),
    ),
    "(loss, logits)": (
        TransformError,
        "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True.",
        in_loss(lambda p, b: (torch.zeros(()), torch.zeros(2))),
    ),
    "a leaf": (
        TransformError,
        "Compute the loss from gathered leaves, fs.gather_unit(unit), or from full trees, fs.tree.vdot(x, x).",
        in_loss(lambda p, b: p["body"]["b"] * 2),
    ),
    "a vector": (TransformError, "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True.", in_loss(lambda p, b: torch.zeros(2))),
    "nothing": (TransformError, "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True.", in_loss(lambda p, b: None)),
    "a number": (TransformError, "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True.", in_loss(lambda p, b: loss_fn(p, b)[0].item())),
    "an output of transformers": (
        TransformError,
        "Return its .loss: the mean alone, or (sum, number of tokens).",
        in_loss(lambda p, b: SimpleNamespace(loss=torch.zeros(()))),
    ),
    "state for params": (
        ArgumentError,
        "Pass the parameters only: (state.params, batch).",
        lambda at: fs.value_and_grad(loss_fn)(at.state, at.batch),
    ),
    "params for state": (
        ArgumentError,
        "Make one with fs.init_state, or from parameters: fs.state_from_params(params, opt, key, layout).",
        lambda at: at.step(at.state.params, at.batch),
    ),
    "batch and state": (
        ArgumentError,
        "Swap the two: step(state, batch).",
        lambda at: at.step(at.batch, at.state),
    ),
    "what a step returned, for a state": (
        ArgumentError,
        "A step returns two things: state, metrics = step(state, batch).",
        lambda at: at.step(at.step(at.state, at.batch), at.batch),
    ),
    "batch and params": (
        ArgumentError,
        "Pass the parameters first: (params, batch).",
        lambda at: fs.value_and_grad(loss_fn)(at.batch, at.state.params),
    ),
    "no batch at all": (
        ArgumentError,
        "Pass the loss function's other arguments after params, such as (params, batch).",
        lambda at: fs.value_and_grad(loss_fn)(at.state.params),
    ),
    "model and optimizer": (
        ArgumentError,
        "Swap the two.",
        lambda at: fs.make_train_step(at.opt, loss_fn),
    ),
    "model and optimizer in init_state": (
        ArgumentError,
        "Swap the two.",
        lambda at: fs.init_state(at.opt, init, at.key, at.layout),
    ),
    "key and layout": (
        ArgumentError,
        "Swap the two: (..., key, layout).",
        lambda at: fs.init_state(init, at.opt, at.layout, at.key),
    ),
    "a mesh for a layout": (
        ArgumentError,
        "Plan one: layout = fs.plan_layout(model, mesh).",
        lambda at: fs.init_state(init, at.opt, at.key, at.mesh),
    ),
    "a seed for a key": (
        RandomKeyError,
        "Make keys with random.key, random.split or random.fold_in.",
        lambda at: fs.init_state(init, at.opt, 0, at.layout),
    ),
    "a loss function for init": (
        ArgumentError,
        "Pass a Model, or a function of a key.",
        lambda at: fs.init_state(loss_fn, at.opt, at.key, at.layout),
    ),
    "a tree for init": (
        ArgumentError,
        "Start from existing parameters with fs.state_from_params(params, opt, key, layout).",
        lambda at: fs.init_state(at.tree, at.opt, at.key, at.layout),
    ),
    "a module to plan_layout": (
        ArgumentError,
        "Convert it first, net = fs.functionalize(module), and pass net instead.",
        lambda at: fs.plan_layout(at.module, at.mesh),
    ),
    "a module to init_state": (
        ArgumentError,
        "Convert it first, net = fs.functionalize(module), and pass net instead.",
        lambda at: fs.init_state(at.module, at.opt, at.key, at.layout),
    ),
    "a module to make_train_step": (
        ArgumentError,
        "Convert it first, net = fs.functionalize(module), and pass net instead.",
        lambda at: fs.make_train_step(at.module, at.opt),
    ),
    "a module to value_and_grad": (
        ArgumentError,
        "Convert it first, net = fs.functionalize(module), and pass net instead.",
        lambda at: fs.value_and_grad(at.module),
    ),
    "a class of modules": (
        ArgumentError,
        "Convert it first, net = fs.functionalize(module), and pass net instead.",
        lambda at: fs.plan_layout(Module, at.mesh),
    ),
    "an init function to plan_layout": (
        ArgumentError,
        "Call it, which computes nothing: fs.plan_layout(init(fs.random.key(0)), mesh).",
        lambda at: fs.plan_layout(init, at.mesh),
    ),
    "an init function to make_train_step": (
        ArgumentError,
        "Pass a Model, or a loss function (params, batch).",
        lambda at: fs.make_train_step(init, at.opt),
    ),
    "a loss for its function": (
        ArgumentError,
        "Pass a loss function (params, *args).",
        lambda at: fs.value_and_grad(torch.zeros(())),
    ),
    "numbers as leaves": (
        LayoutError,
        "Pass a Model, or the tree that its init returns: tensors, or lazy tensors such as fs.random.normal's.",
        lambda at: fs.plan_layout({"a": 3, "b": "text"}, at.mesh),
    ),
    "model and mesh": (
        ArgumentError,
        "Swap the two: fs.plan_layout(model, mesh).",
        lambda at: fs.plan_layout(at.mesh, at.tree),
    ),
    "text for a mesh": (
        ArgumentError,
        "Make one: mesh = fs.make_mesh(dp=-1).",
        lambda at: fs.plan_layout(at.tree, "cpu"),
    ),
    "a strategy for rules": (
        ArgumentError,
        "Pass fs.DEFAULT_RULES or fs.AxisRules(...) third, and the strategy fourth or as strategy=.",
        lambda at: fs.plan_layout(at.tree, at.mesh, fs.zero(3)),
    ),
    "text for a precision": (
        ArgumentError,
        "Give fs.FP32, fs.BF16, fs.FP16 or fs.Precision(...).",
        lambda at: fs.plan_layout(at.tree, at.mesh, precision="bf16"),
    ),
    "strategy='fsdp'": (
        ConfigError,
        "Here that is 'zero3'.",
        lambda at: fs.plan_layout(at.tree, at.mesh, strategy="fsdp"),
    ),
    "strategy='SHARD_GRAD_OP'": (
        ConfigError,
        "Here that is 'zero2'.",
        lambda at: fs.plan_layout(at.tree, at.mesh, strategy="SHARD_GRAD_OP"),
    ),
    "strategy='ZeRO-1'": (
        ConfigError,
        "Here that is 'zero1'.",
        lambda at: fs.plan_layout(at.tree, at.mesh, strategy="ZeRO-1"),
    ),
    "strategy=2": (
        ConfigError,
        "Pass a name or a value, such as fs.zero(2).",
        lambda at: fs.plan_layout(at.tree, at.mesh, strategy=2),
    ),
    "zero(4)": (
        ConfigError,
        "Levels are 0 (nothing is sharded), 1 (optimizer state), 2 (gradients too) and 3 (parameters too).",
        lambda at: fs.zero(4),
    ),
    "DTensors of the state in a loss": (
        TransformError,
        "Use the loss function's first argument, through fs.gather_unit, instead of state.params.",
        lambda at: in_loss(lambda p, b: b["x"] @ at.state.params["body"]["w"].T)(at),
    ),
    "nodes in a module": (
        TransformError,
        'Gather their unit first, such as unit = fs.gather_unit(params["head"]), and use its leaves.',
        lambda at: in_loss(
            lambda p, b: torch.func.functional_call(at.module, {"linear.weight": p["body"]["w"]}, b["x"])
        )(at),
    ),
    "load(None)": (
        ArgumentError,
        "Pass the directory first: fs.checkpoint.load(path, layout).",
        lambda at: fs.checkpoint.load(None, at.layout),
    ),
    "load into a state": (
        ArgumentError,
        "Plan one: layout = fs.plan_layout(model, mesh).",
        lambda at: fs.checkpoint.load("ckpt", at.state),
    ),
    "save to a URL": (
        ConfigError,
        "Mount the storage and pass the path below its mount point",
        lambda at: fs.checkpoint.save("s3://bucket/run/1", at.state),
    ),
    "save with the state first": (
        ArgumentError,
        "Pass the directory first: fs.checkpoint.save(path, state).",
        lambda at: fs.checkpoint.save(at.state, "ckpt"),
    ),
    "save params": (
        ArgumentError,
        "Pass the full state: fs.checkpoint.save(path, state).",
        lambda at: fs.checkpoint.save("ckpt", at.state.params),
    ),
    "hf.load with the layout first": (
        ArgumentError,
        "Pass the directory first: fs.hf.load(path, layout).",
        lambda at: fs.hf.load(at.layout, "llama"),
    ),
    "hf.load of a state": (
        ArgumentError,
        "Plan one: layout = fs.plan_layout(model, mesh).",
        lambda at: fs.hf.load("llama", at.state),
    ),
    "hf.save with the state first": (
        ArgumentError,
        "Pass the directory first: fs.hf.save(path, state, config).",
        lambda at: fs.hf.save(at.state, "llama", CONFIG),
    ),
    "megatron.load with the layout first": (
        ArgumentError,
        "Pass the directory first: fs.megatron.load(path, layout, config).",
        lambda at: fs.megatron.load(at.layout, "iter_0000100", CONFIG),
    ),
    "megatron.load_state with the optimizer first": (
        ArgumentError,
        "Pass the directory first: fs.megatron.load_state(path, opt, key, layout, config).",
        lambda at: fs.megatron.load_state(at.opt, "iter_0000100", at.key, at.layout, CONFIG),
    ),
    "megatron.save of parameters": (
        ArgumentError,
        "Pass the full state: fs.megatron.save(path, state, config).",
        lambda at: fs.megatron.save("iter_0000100", at.state.params, CONFIG),
    ),
    "a directory that Megatron has not written": (
        CheckpointError,
        "Give a directory of torch_dist or fsdp_dtensor, such as iter_0000100.",
        lambda at: fs.megatron.load("/nowhere", at.layout, CONFIG),
    ),
    "metrics['loss']": (
        ArgumentError,
        "Write metrics.loss.",
        lambda at: at.step(at.state, at.batch)[1]["loss"],
    ),
    "metrics['lr']": (
        ArgumentError,
        "Its names are loss, grad_norm, count, skipped, aux.",
        lambda at: at.step(at.state, at.batch)[1]["lr"],
    ),
    "a policy that is text": (
        ConfigError,
        None,
        lambda at: fs.make_train_step(loss_fn, at.opt, policy="everything"),
    ),
    "axes for names": (
        ArgumentError,
        'Name the dims, such as ("mlp", None), and map names to axes: AxisRules(mlp=(\'tp\',)).',
        lambda at: fs.plan_layout(at.tree, at.mesh, names={**at.names, "body": {"w": fs.P("tp"), "b": None}}),
    ),
    "the name of an axis for that of a dim": (
        SpecError,
        "Name the dim, such as 'mlp', with the rule mlp='tp'.",
        lambda at: fs.plan_layout({"w": torch.zeros(8, 4)}, at.mesh, names={"w": ("tp", None)}),
    ),
    "a dict of rules": (
        ArgumentError,
        'Write fs.AxisRules(**rules) of a dict, or fs.AxisRules(mlp="tp", embed=None).',
        lambda at: fs.AxisRules({"mlp": "tp"}),
    ),
    "rules of an axis that is none": (
        SpecError,
        "AxisRules(mlp='data') got an unknown axis 'data'.",
        lambda at: fs.AxisRules(mlp="data"),
    ),
    "a frozen path that no leaf has": (
        LayoutError,
        'Write frozen=["body"].',
        lambda at: fs.plan_layout(at.tree, at.mesh, frozen="bodyy"),
    ),
    "strategy=fs.zero": (
        ConfigError,
        "Call it: fs.zero(3).",
        lambda at: fs.plan_layout(at.tree, at.mesh, strategy=fs.zero),
    ),
    "a generator for a key": (
        RandomKeyError,
        None,
        lambda at: fs.init_state(init, at.opt, torch.Generator(), at.layout),
    ),
    "a shape for a key": (
        RandomKeyError,
        "Make keys with random.key, random.split or random.fold_in.",
        lambda at: fs.random.normal((3,), at.key),
    ),
    "a draw that is scaled": (
        ArgumentError,
        "Pass scale and offset to the function that draws, such as fs.random.normal(key, shape, std=0.02, mean=1.0).",
        lambda at: 0.02 * fs.random.normal(at.key, (3,)),
    ),
    "a draw that goes into torch": (
        ArgumentError,
        "fs.init_state(init, opt, key, layout)",
        lambda at: F.linear(torch.ones(2, 4), at.tree["body"]["w"]),
    ),
    "a draw that is asked for .sum": (
        MissingNameError,
        "fs.init_state(init, opt, key, layout)",
        lambda at: at.tree["body"]["w"].sum(),
    ),
    "update without parameters": (
        TreeError,
        "Call opt.update(gradients, state, params).",
        lambda at: decaying().update(at.grads, at.state.opt_state),
    ),
    "update of state, gradients, parameters": (
        TreeError,
        "Call opt.update(gradients, state, params), in this order.",
        lambda at: at.opt.update(at.state.opt_state, at.grads, at.state.params),
    ),
    "update of gradients, parameters, state": (
        TreeError,
        "Pass the state that opt.init(params), or the last update, returned.",
        lambda at: at.opt.update(at.grads, at.state.params, at.state.opt_state),
    ),
    "update of a loss and a weight": (
        TreeError,
        "The loss comes first: value, grads = fs.value_and_grad(loss_fn)(params, batch).",
        lambda at: at.opt.update(at.value, at.state.opt_state, at.state.params),
    ),
    "update of a whole state": (
        ArgumentError,
        "Pass the parameters alone: state.params.",
        lambda at: at.opt.update(at.state, at.state.opt_state, at.state.params),
    ),
    "init of a whole state": (
        ArgumentError,
        "Pass the parameters alone: state.params.",
        lambda at: at.opt.init(at.state),
    ),
    "updates and state for updates": (
        ArgumentError,
        "opt.update returns two things: updates, opt_state = opt.update(gradients, opt_state, params).",
        lambda at: fs.optim.apply_updates(
            at.state.params, at.opt.update(at.grads, at.state.opt_state, at.state.params)
        ),
    ),
    "updates of a whole state": (
        ArgumentError,
        "Pass the parameters alone: state.params.",
        lambda at: fs.optim.apply_updates(at.state, at.grads),
    ),
    "parameters to an optimizer": (
        ArgumentError,
        "Write fs.adamw(1e-3): opt.init(params), or fs.init_state, makes the state for parameters.",
        lambda at: fs.adamw(fs.tree.leaves(at.state.params), lr=1e-3),
    ),
    "parameters and a rate to an optimizer": (
        ArgumentError,
        "Write fs.adamw(1e-3): opt.init(params), or fs.init_state, makes the state for parameters.",
        lambda at: fs.adamw(at.state.params, 1e-3),
    ),
    "parameters alone to an optimizer": (
        ArgumentError,
        "Write fs.adamw(1e-3): opt.init(params), or fs.init_state, makes the state for parameters.",
        lambda at: fs.adamw(at.state.params),
    ),
    "lr=": (
        ArgumentError,
        "Call it as fs.adamw(learning_rate).",
        lambda at: fs.adamw(lr=1e-3),
    ),
    "betas=": (
        ArgumentError,
        "Call it as fs.adamw(learning_rate).",
        lambda at: fs.adamw(1e-3, betas=(0.9, 0.95)),
    ),
    "gradient_accumulation_steps=": (
        ArgumentError,
        "Call it as fs.make_train_step(model, opt).",
        lambda at: fs.make_train_step(loss_fn, at.opt, gradient_accumulation_steps=4),
    ),
    "argnums=": (
        ArgumentError,
        "Call it as fs.value_and_grad(fn).",
        lambda at: fs.value_and_grad(loss_fn, argnums=0),
    ),
    "a layout for the shardings of gradients": (
        ArgumentError,
        "Pass grads=layout.main, the optimizer's shardings, or grads=layout.grads.",
        lambda at: fs.value_and_grad(loss_fn, grads=at.layout),
    ),
    "text for a precision of a gradient": (
        ArgumentError,
        "Give fs.FP32, fs.BF16, fs.FP16 or fs.Precision(...).",
        lambda at: fs.value_and_grad(loss_fn, precision="bf16"),
    ),
    "text for a precision of a step": (
        ArgumentError,
        "Give fs.FP32, fs.BF16, fs.FP16 or fs.Precision(...).",
        lambda at: fs.make_train_step(loss_fn, at.opt, precision="bf16"),
    ),
    "a step without a batch": (
        ArgumentError,
        "Call it as step(state, batch).",
        lambda at: at.step(at.state),
    ),
    "a step of params, opt_state, batch": (
        ArgumentError,
        "Call it as step(state, batch).",
        lambda at: at.step(at.state.params, at.state.opt_state, at.batch),
    ),
    "an evaluation in one call": (
        ArgumentError,
        "It returns a function that takes the rest: fs.evaluate(model)(params, batch).",
        lambda at: fs.evaluate(loss_fn, at.state, at.batch),
    ),
    "a value and gradients in one call": (
        ArgumentError,
        "It returns a function that takes the rest: fs.value_and_grad(fn)(params, *args).",
        lambda at: fs.value_and_grad(loss_fn, at.state.params, at.batch),
    ),
    "a plain tensor in a state": (
        LayoutError,
        "fs.shard(params, state.layout)",
        lambda at: at.step(
            at.state.replace(params={**at.state.params, "head": {"weight": torch.ones(3, 8)}}), at.batch
        ),
    ),
    "state['params']": (
        ArgumentError,
        "Write state.params.",
        lambda at: at.state["params"],
    ),
    "a state that is unpacked": (
        ArgumentError,
        "Its fields are step, params, main, opt_state, loss_scale, key, layout, buffers.",
        lambda at: (lambda params, opt_state: None)(*at.state),
    ),
    "load without a layout": (
        ArgumentError,
        "Call it as fs.checkpoint.load(path, layout).",
        lambda at: fs.checkpoint.load("ckpt"),
    ),
    "load of a directory that is not there": (
        CheckpointError,
        "fs.checkpoint.latest(directory) finds the newest complete checkpoint of a directory.",
        lambda at: fs.checkpoint.load(NOWHERE, at.layout),
    ),
    "torch.func.grad of parameters at rest": (
        TransformError,
        "Transform the function of local nodes: fs.shard_map(torch.func.grad(f))(params).",
        lambda at: torch.func.grad(lambda p: loss_fn(p, at.batch)[0])(at.state.params),
    ),
    "torch.func.grad in a loss": (
        TransformError,
        "fs.shard_map(torch.func.grad(f))",
        in_loss(lambda p, b: torch.func.grad(lambda u: u["w"].square().sum())(fs.gather_unit(p["body"]))["w"].sum()),
    ),
    "a block that appends to a list": (
        TransformError,
        "Return the value instead: return x, aux, or a new list, [*kept, aux];",
        in_loss(lambda p, b: fs.remat(appending)(b["x"], [b["y"]]) + fs.gather_unit(p["body"])["w"].sum()),
    ),
    "a policy of operators": (
        ConfigError,
        "Pass activations='dots' to keep the results of matrix products;",
        lambda at: fs.policies.Policy("mine", False, ["aten.mm.default"]),
    ),
    "a policy on disk": (
        ConfigError,
        "memory='disk' isn't one of 'device', 'host'",
        lambda at: fs.policies.Policy("mine", "yes", "all", "disk"),
    ),
    "GradScaler in a loss": (
        TransformError,
        "precision=fs.FP16 scales it, unscales gradients and skips steps.",
        lambda at: fs.make_train_step(scaled_by_torch, at.opt)(at.state, at.batch),
    ),
    "GradScaler in an evaluation": (
        TransformError,
        "precision=fs.FP16 scales it, unscales gradients and skips steps.",
        lambda at: fs.evaluate(scaled_by_torch),
    ),
    "a policy of text for gathered": (
        ConfigError,
        "Pass one of these values.",
        lambda at: fs.policies.Policy("mine", "yes", "all"),
    ),
    "fs.optim(1e-3)": (
        ArgumentError,
        "Write fs.adamw(1e-3).",
        lambda at: fs.optim(1e-3),
    ),
    "fs.random(0)": (
        ArgumentError,
        "Make a key: fs.random.key(0).",
        lambda at: fs.random(0),
    ),
    "fs.optim.schedules(0.1)": (
        ArgumentError,
        "Call what is in it: fs.optim.schedules.as_schedule, fs.optim.schedules.constant,",
        lambda at: fs.optim.schedules(0.1),
    ),
    "fs.data(path)": (
        ArgumentError,
        "Call what is in it: fs.data.open_data.",
        lambda at: fs.data("tokens"),
    ),
    "a block in the order of lax.scan": (
        ArgumentError,
        "fs.scan_units calls block(params, carry), parameters first;",
        in_loss(lambda p, b: fs.scan_units(lambda x, p: x @ p["w"].T, [p["body"]], b["x"]).sum()),
    ),
    "a block that returns what lax.scan takes": (
        ArgumentError,
        "Return the carry, or (carry, aux) with has_aux=True.",
        in_loss(lambda p, b: fs.scan_units(lambda p, x: (x @ p["w"].T, None), [p["body"], p["body"]], b["x"]).sum()),
    ),
    "a draw beside a tensor": (
        ArgumentError,
        "draw.tensor() for one LazyTensor.",
        in_loss(lambda p, b: (fs.gather_unit(p["body"])["w"] * fs.random.normal(fs.random.key(0), (8, 4))).sum()),
    ),
    "vdot of trees with other shapes": (
        LayoutError,
        "Pass two trees with the same shapes.",
        lambda at: fs.tree.vdot({"a": torch.ones(3)}, {"a": torch.ones(4)}),
    ),
    "a constant schedule that is not made yet": (
        ConfigError,
        "learning_rate: constant, which makes a schedule: constant(...)",
        lambda at: fs.adamw(fs.optim.schedules.constant),
    ),
    "a schedule that is a class": (
        ConfigError,
        "learning_rate: the class Warmup, not an instance: Warmup(...)",
        lambda at: fs.sgd(Warmup),
    ),
    "a schedule that is not made yet": (
        ConfigError,
        "Make the schedule first, such as fs.optim.schedules.warmup_cosine(3e-4, 9, 99), and pass that.",
        lambda at: fs.adamw(fs.optim.schedules.warmup_cosine),
    ),
    "a schedule of torch.optim": (
        ConfigError,
        "learning_rate: a LambdaLR, which sets the rate of a torch.optim optimizer",
        lambda at: fs.adamw(torch.optim.lr_scheduler.LambdaLR(at.sgd, lambda step: 1.0)),
    ),
    "a class as lr of torch's optimizer": (
        ConfigError,
        "lr: the class Warmup, not an instance: Warmup(...)",
        lambda at: fs.optim.from_torch(torch.optim.SGD, lr=Warmup),
    ),
    "backward on an evaluation": (
        TransformError,
        "(loss, n), grads = fs.value_and_grad(loss_fn)(state.params, batch)",
        lambda at: fs.evaluate(loss_fn)(at.state, at.batch).mean.backward(),
    ),
    "backward on the sum of an evaluation": (
        TransformError,
        "(loss, n), grads = fs.value_and_grad(loss_fn)(state.params, batch)",
        lambda at: fs.evaluate(loss_fn)(at.state, at.batch).sum.backward(),
    ),
    "a strategy for a layout": (
        ArgumentError,
        "Plan one: fs.plan_layout(model, mesh), or state.layout.with_strategy(fs.zero(1)).",
        lambda at: fs.reshard(at.state, fs.zero(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_what_to_type(at, mistake):
    kind, fix, call = MISTAKES[mistake]
    with pytest.raises(FshardingError) as caught:
        call(at)
    assert type(caught.value) is kind
    if fix is not None:
        assert fix in str(caught.value)
        check(mistake, caught.value)


def test_every_golden_text_is_of_a_mistake():
    assert {*texts()} == {name for name, (_, fix, _) in MISTAKES.items() if fix is not None}


# owner, name: the sentence that says what to type
NAMES_ELSEWHERE = {
    ("fs", "grad"): "Call fs.value_and_grad(loss_fn)(params, batch), which returns (value, grads).",
    ("fs", "jit"): "Nothing has to be traced: call the function. torch.compile(block) compiles a block.",
    ("fs", "fully_shard"): (
        "Plan it: layout = fs.plan_layout(model, mesh, strategy=fs.zero(3)), then fs.init_state(model, opt, key, layout)."
    ),
    ("fs", "DDP"): (
        "Plan it: layout = fs.plan_layout(model, mesh, strategy=fs.zero(0)), then fs.init_state(model, opt, key, layout)."
    ),
    ("fs", "init_device_mesh"): "Call fs.make_mesh(dp=-1).",
    ("fs", "PRNGKey"): "Make a key: fs.random.key(0).",
    ("fs", "psum"): "Inside a loss function call fs.ops.psum(x, axis), by the name of an axis.",
    ("fs", "zero3"): "Write fs.zero(3).",
    ("fs", "make_msh"): "Did you mean 'make_mesh'?",
    ("fs.optim", "AdamW"): "Write fs.adamw(1e-3).",
    ("fs.optim", "adam"): "Write fs.adamw(1e-3).",
    ("fs.optim", "clip"): "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt).",
    ("fs.optim", "clip_grad_norm_"): "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt).",
    ("fs.optim", "muno"): "Did you mean 'muon'?",
    ("fs", "ema"): "Write fs.optim.ema.",
    ("fs", "chain"): "Write fs.optim.chain.",
    ("fs", "warmup_cosine"): "Write fs.optim.schedules.warmup_cosine.",
    ("fs", "dropout"): "Write fs.random.dropout.",
    ("TrainState", "parameters"): ("They are a tree, state.params; fs.tree.leaves(state.params) lists its leaves."),
    ("TrainState", "state_dict"): "Save the state as it is: fs.checkpoint.save(path, state).",
    ("TrainState", "grads"): "Compute them: value, grads = fs.value_and_grad(loss_fn)(state.params, batch).",
    ("TrainState", "mesh"): "Write state.layout.mesh.",
    ("Metrics", "los"): "Did you mean 'loss'?",
    ("Metrics", "accuracy"): "Its names are loss, grad_norm, count, skipped, aux.",
    ("Model", "parameters"): "Use state.params, where state = fs.init_state(model, opt, fs.random.key(0), layout).",
    ("Model", "eval"): "Pass what differs between training and evaluation, such as a key for dropout, in the batch.",
}


@pytest.mark.parametrize(("owner", "name"), NAMES_ELSEWHERE)
def test_names_of_other_libraries(at, owner, name):
    config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
    owners = {
        "fs": lambda: fs,
        "fs.optim": lambda: fs.optim,
        "TrainState": lambda: at.state,
        "Metrics": lambda: at.step(at.state, at.batch)[1],
        "Model": lambda: fs.models.decoder(config),
    }
    one = owners[owner]()
    with pytest.raises(MissingNameError) as caught:
        getattr(one, name)
    assert str(caught.value) == f"{owner} has no {name!r}.\n{NAMES_ELSEWHERE[owner, name]}"
    assert not hasattr(one, name) and getattr(one, name, 7) == 7


@pytest.mark.parametrize("name", ["__wrapped__", "_private"])
def test_private_names_are_refused_in_pythons_words(at, name):
    for one in (fs, fs.optim, at.state):
        with pytest.raises(AttributeError) as caught:
            getattr(one, name)
        assert type(caught.value) is AttributeError


def test_what_the_names_of_other_libraries_point_to_is_there():
    sentences = [*NAMES_ELSEWHERE.values()]
    for table in (fs._ELSEWHERE, fs.optim._ELSEWHERE, train_state._ELSEWHERE, model._ELSEWHERE):
        sentences += table.values()
    paths = {path for text in sentences for path in re.findall(r"\bfs((?:\.[A-Za-z_]\w*)+)", text)}
    assert len(paths) > 15
    for path in sorted(paths):
        functools.reduce(getattr, path.strip(".").split("."), fs)


def test_errors_that_replace_others_are_of_their_family(at):
    with pytest.raises(KeyError):
        at.step(at.state, {"x": at.batch["x"]})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        at.step(at.state, {**at.batch, "x": torch.zeros(6, 5)})
    with pytest.raises(AttributeError):
        in_loss(lambda p, b: p["head"]["weight"].mean())(at)


def test_errors_of_a_loss_functions_own_stay_what_they_are(at):
    def looks_up(p, b):
        return {"x": 1}["weight"]  # a name that the parameters have, so this is about another dict

    for fn, kind in (
        (looks_up, KeyError),
        (lambda p, b: 1 / 0, ZeroDivisionError),
        (lambda p, b: p.body, AttributeError),
    ):
        with pytest.raises(kind) as caught:
            in_loss(fn)(at)
        assert not isinstance(caught.value, FshardingError)


# -------------------------------------------------------------------------------------------------- changes behind backs
def test_parameters_that_were_changed_in_place(at):
    text = (
        "train step got parameters that were changed in place since the state was made.\n"
        "  params.head.weight is float32[3, 8]\n"
        "Make new ones on every rank, state = state.replace(params=fs.tree.map(f, state.params))."
    )
    for change in (lambda w: w.mul_(2), lambda w: w.to_local().mul_(2)):
        for donate in (False, True):
            step = fs.make_train_step(loss_fn, at.opt, donate=donate)
            state, _ = step(fs.init_state(init, at.opt, at.key, at.layout), at.batch)
            with torch.no_grad():
                change(state.params["head"]["weight"])
            with pytest.raises(ArgumentError) as caught:
                step(state, at.batch)
            assert str(caught.value) == text
    state = fs.init_state(init, at.opt, at.key, at.layout)
    with torch.no_grad():
        state.params["head"]["weight"].zero_()
    with pytest.raises(ArgumentError, match=r"params\.head\.weight"):
        at.step(state, at.batch)


def test_parameters_in_place_where_main_ones_are_kept_apart(at):
    layout = at.layout.with_precision(fs.BF16).with_strategy("zero1")
    state = fs.init_state(init, at.opt, at.key, layout)
    with torch.no_grad():
        state.params["head"]["weight"].zero_()
    with pytest.raises(
        ArgumentError, match=r"main = fs\.tree\.map\(f, state\.main\), and params=fs\.params_from_main\(main"
    ):
        at.step(state, at.batch)


def test_parameters_that_are_made_anew_are_taken(at):
    for donate in (False, True):
        step = fs.make_train_step(loss_fn, at.opt, donate=donate)
        state = fs.init_state(init, at.opt, at.key, at.layout)
        for _ in range(3):
            state = state.replace(params=fs.tree.map(lambda p: p * 0.5, state.params))
            state, _ = step(state, at.batch)
    params = state.params
    copy = fs.tree.map(torch.clone, state)
    step(state, at.batch)
    with torch.no_grad():
        params["head"]["weight"].mul_(2)
    step(copy, at.batch)


def test_donated_states(at):
    state = fs.init_state(init, at.opt, at.key, at.layout)
    fs.make_train_step(loss_fn, at.opt, donate=True)(state, at.batch)
    with pytest.raises(DonatedError, match="Use the state that the step returned, or make the step with donate=False"):
        at.step(state, at.batch)


# --------------------------------------------------------------------------------------------- (mean, n) for (sum, n)
def scaled(reduce):
    def fn(params, batch):
        head = fs.gather_unit(params["head"])
        return reduce(batch["y"] @ head["weight"], batch)

    return fn


MEANS = {
    "mean": lambda x, b: (x.mean(), 6),
    "mean over a dim": lambda x, b: (x.flatten().mean(0), torch.tensor(6)),
    "cross entropy": lambda x, b: (F.cross_entropy(x, torch.zeros(6, dtype=torch.int64)), 6.0),
    "mse": lambda x, b: (F.mse_loss(x, torch.zeros_like(x)).double(), 6),
}
SUMS = {
    "sum": lambda x, b: (x.sum(), 6),
    "mean alone": lambda x, b: x.mean(),
    "mean of one": lambda x, b: (x.mean(), 1),
    "mean times n": lambda x, b: (x.mean() * 6, 6),
    "sum of means": lambda x, b: (x.mean(1).sum(), 6),
    "cross entropy": lambda x, b: (F.cross_entropy(x, torch.zeros(6, dtype=torch.int64), reduction="sum"), 6),
    "one that is 0": lambda x, b: (torch.zeros(()), 6),
}


@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_with_a_weight_is_warned_of(at, mean):
    with pytest.warns(UserWarning, match=r"got \(mean, 6\), but takes \(sum, count\)(?s:.*)reduction=\"sum\""):
        fs.value_and_grad(scaled(MEANS[mean]))(at.state.params, at.batch)


@pytest.mark.parametrize("total", SUMS)
def test_other_losses_are_not_warned_of(at, total):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.value_and_grad(scaled(SUMS[total]))(at.state.params, at.batch)


# ------------------------------------------------------------------------------------------------------------ the rest
def test_metrics_are_still_a_tuple(at):
    _, metrics = at.step(at.state, at.batch)
    loss, norm, weight, skipped, aux = metrics
    assert metrics[0] is loss and metrics[-1] is aux and metrics[1:4] == (norm, weight, skipped)
    assert fs.tree.paths(metrics) == ("loss", "grad_norm", "count", "skipped")


def test_a_timeout_that_is_one(at):
    assert fs.make_mesh(dp=1, device="cpu", timeout=timedelta(seconds=5)).size() == 1
    assert math.isfinite(float(at.step(at.state, at.batch)[1].loss))


OPTIMIZERS = {
    "fs.adamw": (lambda: fs.adamw(1e-2), "mu"),
    "fs.sgd": (lambda: fs.sgd(1e-2, momentum=0.9), "trace"),
    "fs.optim.lion": (lambda: fs.optim.lion(1e-2), "mu"),
    "fs.optim.muon": (lambda: fs.optim.muon(1e-2), "mu"),
    "fs.optim.ema": (lambda: fs.optim.ema(0.9), "average"),
    "fs.optim.lookahead": (lambda: fs.optim.lookahead(fs.sgd(1e-2), every=1), "slow"),
}


@pytest.mark.parametrize(
    "odd", [1.5, "w", np.ones((3, 4)), torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, device="meta")]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_that_no_kernel_takes(name, odd):
    make, field = OPTIMIZERS[name]
    params, opt = {"w": torch.ones(3, 4)}, make()
    state = opt.init(params)
    with pytest.raises(TreeError, match=rf"{name}[\s\S]*{field}.w: [\s\S]*opt.init\(params\)"):
        opt.update({"w": torch.ones(3, 4)}, state._replace(**{field: {"w": odd}}), params)


def test_a_second_moment_that_is_not_there():
    params, opt = {"w": torch.ones(3, 4), "b": torch.ones(3)}, fs.adamw(1e-2)
    state = opt.init(params)
    with pytest.raises(TreeError, match="nu"):
        opt.update(params, state._replace(nu={"w": state.nu["w"], "b": None}), params)


def test_bodies_that_return_no_pair():
    with pytest.raises(ArgumentError, match=r"fs.scan .*fn returned None"):
        fs.scan(lambda carry, x: None, torch.ones(2), torch.ones(3, 2))
    with pytest.raises(ArgumentError, match=r"fs.scan_units .*block returned a tensor"):
        fs.scan_units(lambda unit, x: x, [{"w": torch.ones(2)}], torch.ones(2), has_aux=True)


def test_main_parameters_beside_parameters_that_are_gone(at):
    spread = fs.params_from_main(at.state.params, {**at.state.params, "head": {"weight": None}}, at.layout)
    assert torch.equal(spread["head"]["weight"].to_local(), at.state.params["head"]["weight"].to_local())
