"""Every place where a state can be, and every feature of a train step: a table, and the run of one of its cells.

In: a case of a place, a feature, a device. Out: losses and norms, and the values of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import fsharding as fs
from fsharding.models import Experts
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, device_mesh
from tests.decoders import DecoderCase
from tests.helpers import bits, whole

CONFIG = fs.models.DecoderConfig(vocab_size=20, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=24)
BASE = DecoderCase(CONFIG, rows=8, length=8, steps=3)
ROUTED = replace(CONFIG, experts=Experts(2, 1, 12, z=1e-2))


def placed(strategy, **axes):
    config = ROUTED if "ep" in axes else CONFIG
    pieces = 2 if "pp" in axes else 1
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    return replace(BASE, config=config, mesh=mesh, strategy=strategy, microbatches=pieces, sequence="tp" in axes)


PLACES = {
    "zero0": placed(fs.zero(0), dp=2),
    "zero1": placed(fs.zero(1), dp=2),
    "zero2": placed(fs.zero(2), dp=2),
    "zero3": placed(fs.zero(3), dp=2),
    "hsdp": placed(fs.hybrid(), replica=2),
    "hfsdp": placed(fs.hybrid(opt_state=True), replica=2),
    "tp": placed(fs.zero(3), tp=2),
    "cp": placed(fs.zero(3), cp=2),
    "ep": placed(fs.zero(3), ep=2),
    "pp": placed(fs.zero(3), pp=2),
}


@dataclass(frozen=True)
class Feature:
    """A change of a run: fields of its case, its optimizer, frozen leaves, and what happens after half of its steps."""

    how: tuple[tuple[str, Any], ...] = ()
    opt: str = "adamw"
    frozen: tuple[str, ...] = ()
    half: str = ""
    tolerance: float = 1e-5


OPTIMIZERS = {
    "adamw": lambda: fs.adamw(3e-3, eps=1e-3, weight_decay=0.1),
    "lion": lambda: fs.optim.lion(1e-4),
    "muon": lambda: fs.optim.multi_transform(
        {"matrix": fs.optim.muon(1e-3, dtype=torch.float32), "other": fs.adamw(3e-3, eps=1e-3)},
        fs.optim.label_matrices(),
    ),
    "adafactor": lambda: fs.optim.adafactor(1e-3),
}
FEATURES = {
    "microbatches": Feature((("microbatches", 2),)),
    "bfloat16": Feature((("precision", fs.BF16),), tolerance=2e-2),
    "float16_loss_scale": Feature(
        (("precision", fs.Precision(compute=torch.float16, loss_scale=fs.formats.LossScale(initial=2.0**8))),),
        tolerance=1e-2,
    ),
    "remat": Feature((("policy", "nothing_saveable"),)),
    "dots_saveable": Feature((("policy", "dots_saveable"),)),
    "offload": Feature((("policy", "offload"),)),
    "donation": Feature((("donate", True),)),
    "frozen_leaves": Feature(frozen=("embed", "blocks.wq")),
    "checkpoint": Feature(half="checkpoint"),
    "reshard": Feature(half="reshard"),
    "export": Feature(half="export"),
    **{name: Feature(opt=name, tolerance=1e-4) for name in OPTIMIZERS if name != "adamw"},
}


def layout_of(case, feature, mesh):
    schedule = case.planned()
    stages = None if schedule is None else fs.pipeline.stages_of(case.model, schedule)
    return fs.plan_layout(
        case.model, mesh, strategy=case.strategy, precision=case.precision, frozen=feature.frozen, stages=stages
    )


def halfway(kind, state, opt, folder):
    """The state after what happens in the middle of a run: it is the same state."""
    layout = state.layout
    if kind == "checkpoint":
        fs.checkpoint.save(folder, state)
        return fs.checkpoint.load(folder, layout, opt=opt)
    if kind == "reshard":
        away = layout.with_strategy(fs.zero(0 if layout.strategy != fs.zero(0) else 3))
        return fs.reshard(fs.reshard(state, away), layout)
    if kind == "export":
        fs.checkpoint.save(folder, state)
    return state


def check_export(case, folder):
    """What one process exports of a checkpoint of ranks is what it loads of it."""
    exported = fs.foreign.export(folder, folder.with_suffix(".pt"), "torch")
    layout = fs.plan_layout(case.model, device_mesh(BASE.mesh), strategy=fs.zero(0))
    params = whole(fs.checkpoint.load(folder, layout).params)
    assert_bitwise_equal(torch.load(exported.path, weights_only=True), params)


def trained(state):
    """The leaves that the optimizer updates, and frozen ones."""
    main = {} if state.main is None else fs.tree.named_leaves(state.main)
    return fs.tree.named_leaves(state.params) | main


def train(case, feature, folder, device="cpu", around: Callable[[int], AbstractContextManager[Any]] | None = None):
    """Losses and norms of each step on this rank, and the state; frozen leaves stay, and all others change.

    Args:
        around: makes the context in which a step runs, from its number.
    """
    mesh = device_mesh(case.mesh, device)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), OPTIMIZERS[feature.opt]())
    state = fs.init_state(case.model, opt, fs.random.key(0), layout_of(case, feature, mesh))
    first = bits(trained(state))
    policy = fs.policies.POLICIES[case.policy]
    step = fs.make_train_step(
        case.model, opt, microbatches=case.microbatches, policy=policy, donate=case.donate,
        schedule=case.planned() or case.schedule,
    )  # fmt: skip
    rows = []
    for number in range(case.steps):
        if number == case.steps // 2:
            state = halfway(feature.half, state, opt, folder)
        batch = {name: x.to(device) for name, x in case.batch(number, mesh).items()}
        with around(number) if around else nullcontext():
            state, metrics = step(state, batch)
        rows.append(torch.stack((metrics.loss, metrics.grad_norm)))
    for path, last in trained(state).items():
        frozen = any(path == name or path.startswith(f"{name}.") for name in feature.frozen)
        same = torch.equal(first[path].cpu(), local_of(last).cpu())
        assert same == frozen or not first[path].numel(), f"{path} has changed: {not same}"
    return torch.stack(rows).cpu(), state
