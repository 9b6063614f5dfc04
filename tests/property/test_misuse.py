"""Public calls with an argument swapped, dropped, replaced or retyped, or a leaf of one: a right result, or our error.

Two ranks, of which a crash or a hang is a failing example. A call that goes through gives the same under zero(0) and
zero(3); one that does not raises a `FshardingError`, or Python's own error for arguments that a function does not have.
"""

from __future__ import annotations

import math
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

import fsharding as fs
from fsharding.base.errors import FshardingError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import run_ranks
from tests.modules import Module

ROWS, WIDTH = 8, 6


# ------------------------------------------------------------------------------------------------ what the calls are made of
def init(key):
    first, last = fs.random.split(key, 2)
    return {
        "body": {"w": fs.random.normal(first, (4, 7, WIDTH)), "b": fs.random.zeros((4, 7))},
        "head": {"w": fs.random.normal(last, (3, 7)), "scale": fs.random.ones(())},
    }


NAMES = {"body": {"w": ("layers", "mlp", "embed"), "b": ("layers", "mlp")}, "head": {"w": (None, "mlp"), "scale": ()}}


def block(unit, x):
    return x + torch.tanh(F.linear(x, unit["w"], unit["b"])) @ unit["w"]


def loss_fn(params, batch):
    x = fs.scan_units(block, params["body"], batch["x"])
    head = fs.gather_unit(params["head"])
    out = F.linear(F.pad(x, (0, 1)), head["w"]) * head["scale"]
    return (out - batch["y"]).square().sum(), len(out)


def world(strategy, folder):
    """All that a call may need, by name."""
    mesh, key, opt = (
        fs.make_mesh(dp=2, timeout=timedelta(seconds=20)),
        fs.random.key(0),
        fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, weight_decay=0.1)),
    )
    layout = fs.plan_layout(init(key), mesh, strategy=strategy, names=NAMES)
    state = fs.init_state(init, opt, key, layout)
    generator = torch.Generator().manual_seed(0)
    index, count = data_rank_and_size(mesh)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)
    batch = {"x": x.chunk(count)[index], "y": y.chunk(count)[index]}
    module = Module()
    return {
        "mesh": mesh, "key": key, "opt": opt, "layout": layout, "state": state, "batch": batch, "loss_fn": loss_fn,
        "init": init, "names": NAMES, "rules": fs.DEFAULT_RULES, "strategy": strategy, "params": state.params,
        "opt_state": state.opt_state, "grads": fs.tree.map(lambda x: x * 0.5, state.params), "path": folder,
        "main": layout.main, "whole": fs.tree.map(lambda draw: draw.tensor(), init(key)), "step": fs.make_train_step(loss_fn, opt),
        "unit": state.params["head"], "module": module, "sgd": torch.optim.SGD(module.parameters(), 0.1),
        "spec": fs.P("dp"), "sharding": fs.NamedSharding(mesh, fs.P("dp")), "policy": fs.policies.nothing_saveable,
        "precision": fs.BF16, "x": torch.arange(12.0).view(4, 3), "leaf": state.params["head"]["w"],
        "block": block, "draws": init(key),
    }  # fmt: skip


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "0": lambda: 0, "-1": lambda: -1, "3": lambda: 3, "nan": lambda: math.nan,
    "2.5": lambda: 2.5, "''": lambda: "", "'dp'": lambda: "dp", "'zero3'": lambda: "zero3", "[]": list, "{}": dict, "()": tuple,
    "object": object, "a lambda": lambda: lambda *args: None, "a class": lambda: nn.Linear, "a list of None": lambda: [None],
    "numpy": lambda: np.ones((2, 3)), "ints": lambda: torch.arange(4), "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "a 0-d tensor": lambda: torch.tensor(1.0), "a dtype": lambda: torch.float32, "a generator": lambda: torch.Generator(),
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A public call: its arguments by name, from the world or made of it, how it is called with them, and on what."""

    args: tuple[str, ...]
    run: Callable[..., Any]
    on: tuple[str, ...] = ()


def stepped(model, opt, microbatches, policy, state, batch):
    return fs.make_train_step(model, opt, microbatches=microbatches, policy=policy)(state, batch)


def saved(path, state):
    fs.checkpoint.save(Path(path) / "s" if isinstance(path, str) and path else path, state)
    return None


CALLS: dict[str, Call] = {
    "plan_layout": Call(("draws", "mesh", "rules", "strategy"), fs.plan_layout),
    "plan_layout of names": Call(("draws", "mesh", "names", "precision"), lambda d, m, n, p: fs.plan_layout(d, m, names=n, precision=p)),
    "init_state": Call(("init", "opt", "key", "layout"), fs.init_state),
    "state_from_params": Call(("params", "opt", "key", "layout"), fs.state_from_params),
    "step": Call(("state", "batch"), lambda *a: fs.make_train_step(loss_fn, fs.adamw(1e-2))(*a)),
    "make_train_step": Call(("loss_fn", "opt", "one", "policy", "state", "batch"), stepped),
    "value_and_grad": Call(("params", "batch"), lambda *a: fs.value_and_grad(loss_fn)(*a)),
    "value_and_grad of grads": Call(("loss_fn", "main", "params", "batch"), lambda f, g, p, b: fs.value_and_grad(f, grads=g)(p, b)),
    "update": Call(("opt", "grads", "opt_state", "params"), lambda o, *a: o.update(*a)),
    "apply_updates": Call(("params", "grads"), fs.optim.apply_updates),
    "reshard": Call(("state", "layout"), fs.reshard),
    "reshard of a tree": Call(("params", "sharding"), fs.reshard),
    "explain_reshard": Call(("params", "layout"), lambda *a: str(fs.debug.explain_reshard(*a)) and None),
    "unshard": Call(("params",), fs.unshard),
    "shard": Call(("whole", "layout"), fs.shard),
    "global_norm": Call(("grads",), fs.global_norm),
    "vdot": Call(("grads", "params"), fs.tree.vdot),
    "redistribute": Call(("params", "main"), fs.redistribute),
    "params_from_main": Call(("params", "params", "layout"), fs.params_from_main),
    "main_params": Call(("params", "layout"), fs.main_params),
    "gather_unit": Call(("unit", "policy"), lambda u, p: fs.gather_unit(u, policy=p)),
    "scatter_grads": Call(("whole", "params"), lambda g, like: fs.scatter_grads(g, like=like)),
    "scan_units": Call(("block", "stack", "carry"), lambda b, s, c: fs.shard_map(lambda s: fs.scan_units(b, s, c))(s)),
    "typeof": Call(("leaf",), lambda x: str(fs.typeof(x)) and None),
    "NamedSharding": Call(("mesh", "spec"), lambda *a: str(fs.NamedSharding(*a)) and None),
    "to_dtensor": Call(("x", "shape"), lambda s, x, shape: s.to_dtensor(x, shape), ("sharding",)),
    "adamw": Call(("rate", "rate", "rate"), lambda a, b, c: fs.adamw(a, b1=b, weight_decay=c) and None),
    "chain": Call(("opt", "opt"), lambda *a: fs.optim.chain(*a).init({"w": torch.ones(3)}) and None),
    "clip": Call(("rate",), lambda r: fs.optim.clip_by_global_norm(r) and None),
    "fold_in": Call(("key", "one"), fs.random.fold_in),
    "split": Call(("key", "one"), fs.random.split),
    "normal": Call(("key", "shape"), lambda *a: fs.random.normal(*a).tensor()),
    "bernoulli": Call(("key", "shape", "rate"), fs.random.bernoulli),
    "tree.map": Call(("identity", "whole", "whole"), lambda f, *a: fs.tree.map(lambda x, y: f(x), *a)),
    "tree.at": Call(("whole", "dotted"), fs.tree.at),
    "save": Call(("path", "state"), saved),
    "psum": Call(("x", "axis", "mesh"), lambda x, a, m: fs.ops.psum(x, a, mesh=m)),
    "ops.all_gather": Call(("x", "axis", "mesh", "one"), lambda x, a, m, d: fs.ops.all_gather(x, a, dim=d, mesh=m)),
    "all_to_all": Call(("x", "axis", "mesh"), lambda x, a, m: fs.ops.all_to_all(x, a, split_dim=0, concat_dim=1, mesh=m)),
    "remat": Call(("identity", "x"), lambda f, x: fs.remat(f)(x)),
    "scan": Call(("body", "x", "x"), fs.scan),
    "stack_units": Call(("units",), fs.stack_units),
    "with_strategy": Call(("strategy",), lambda a, s: str(a.with_strategy(s)) and None, ("layout",)),
    "memory": Call(("opt",), lambda a, o: list(a.memory(o)), ("layout",)),
    "state_bytes": Call(("state",), lambda s: str(fs.debug.state_bytes(s)) and None),
    "shard_map": Call(("identity", "params"), lambda f, p: fs.shard_map(f)(p)),
    "hessian": Call(("square", "unit"), lambda f, p: fs.shard_map(fs.hessian(f))(p)),
    "parse_strategy": Call(("word",), lambda w: str(fs.Strategy.parse(w)) and None),
    "Precision": Call(("dtype", "dtype"), lambda a, b: str(fs.Precision(params=a, compute=b)) and None),
    "P": Call(("axis", "axis"), lambda a, b: str(fs.P(a, b)) and None),
    "set_mesh": Call(("mesh", "x"), lambda m, x: with_mesh(m, x)),
    "lion": Call(("params", "grads"), lambda p, g: fs.optim.lion(1e-2).update(g, fs.optim.lion(1e-2).init(p), p)[0]),
    "muon": Call(("params", "grads"), lambda p, g: fs.optim.muon(1e-2).update(g, fs.optim.muon(1e-2).init(p), p)[0]),
    "adafactor": Call(("params", "grads"), lambda p, g: fs.optim.adafactor(1e-2).update(g, fs.optim.adafactor(1e-2).init(p), p)[0]),
}  # fmt: skip


def with_mesh(mesh, x):
    with fs.set_mesh(mesh):
        return fs.ops.psum(x, "dp")


EXTRA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "one": lambda w: 1, "stack": lambda w: w["params"]["body"], "carry": lambda w: w["batch"]["x"], "shape": lambda w: (4, 3),
    "rate": lambda w: 0.5, "identity": lambda w: identity, "dotted": lambda w: "head.w", "axis": lambda w: "dp",
    "body": lambda w: body, "units": lambda w: [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "word": lambda w: "zero2",
    "dtype": lambda w: torch.bfloat16, "square": lambda w: square,
}  # fmt: skip


def identity(x):
    return x


def square(unit):
    return fs.tree.vdot(unit, unit)


def body(carry, x):
    return carry + x, x


# ------------------------------------------------------------------------------------------------------------- the mistakes
LEAVES: dict[str, Callable[[Any], Any]] = {
    "None": lambda x: None,
    "whole": lambda x: x.full_tensor() if isinstance(x, DTensor) else torch.zeros(3),
    "its part": lambda x: x.to_local() if isinstance(x, DTensor) else x,
    "float64": lambda x: x.to(torch.float64) if isinstance(x, torch.Tensor) else x,
    "int64": lambda x: x.to(torch.int64) if isinstance(x, torch.Tensor) else x,
    "transposed": lambda x: x.T if isinstance(x, torch.Tensor) and x.ndim == 2 else x,
    "longer": lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.ndim else torch.ones(9),
    "numpy": lambda x: np.ones((2, 2)),
    "a number": lambda x: 1.5,
    "a string": lambda x: "w",
    "empty": lambda x: torch.empty(0),
    "a tree": lambda x: {"deeper": x},
    "on meta": lambda x: x.to("meta") if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) else torch.ones(3, device="meta"),
    "cut elsewhere": lambda x: fs.reshard(x, fs.NamedSharding(fs.typeof(x).sharding.mesh, fs.P(None, "dp"))) if isinstance(x, DTensor) and x.ndim > 1 else x,
    "needs grad": lambda x: x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
}  # fmt: skip


@dataclass(frozen=True)
class Misuse:
    """One call, and what is wrong with it."""

    call: str
    kind: str
    which: int = 0
    other: str = ""

    def arguments(self, given: list[Any], here: dict[str, Any]) -> list[Any]:
        """The arguments with the mistake in them."""
        args, i = list(given), self.which % len(given)
        if self.kind == "drop":
            del args[i]
        elif self.kind == "one more":
            args.append(here[self.other])
        elif self.kind == "swap":
            j = (i + 1) % len(args)
            args[i], args[j] = args[j], args[i]
        elif self.kind == "odd":
            args[i] = ODD[self.other]()
        elif self.kind == "replace":
            args[i] = here[self.other]
        elif self.kind == "leaf":
            number, name = self.other.split(" ", 1)
            args[i] = _changed(args[i], int(number), LEAVES[name])
        return args


def _changed(values, number, change):
    if not isinstance(values, dict | tuple | list | fs.TrainState | DTensor):
        return values
    flat, spec = fs.tree.flatten(values)
    if not flat:
        return values
    flat[number % len(flat)] = change(flat[number % len(flat)])
    return fs.tree.unflatten(spec, flat)


WORLD = ("mesh", "key", "opt", "layout", "state", "batch", "loss_fn", "init", "names", "rules", "params", "opt_state", "grads", "whole",
         "step", "module", "sgd", "spec", "sharding", "policy", "precision", "x", "leaf", "draws", "main")  # fmt: skip


@st.composite
def misuses(draw):
    call = draw(st.sampled_from(sorted(CALLS)))
    kind = draw(st.sampled_from(["odd", "replace", "leaf", "leaf", "swap", "drop", "one more"]))
    which = draw(st.integers(0, len(CALLS[call].args) - 1))
    other = ""
    if kind == "odd":
        other = draw(st.sampled_from(sorted(ODD)))
    elif kind in ("replace", "one more"):
        other = draw(st.sampled_from(WORLD))
    elif kind == "leaf":
        other = f"{draw(st.integers(0, 7))} {draw(st.sampled_from(sorted(LEAVES)))}"
    return Misuse(call, kind, which, other)


# ------------------------------------------------------------------------------------------------------------- the outcomes
def outcome(misuse: Misuse, here: dict[str, Any]) -> tuple[str, Any]:
    """("value", leaves) or ("refused", text) or ("raised", traceback)."""
    here = {**here, **{name: make(here) for name, make in EXTRA.items()}}
    call = CALLS[misuse.call]
    try:
        args = misuse.arguments([here[name] for name in call.args], here)
    except Exception:
        return "refused", "cannot be made"
    try:
        return "value", _plain(call.run(*(here[name] for name in call.on), *args))
    except FshardingError as error:
        text = str(error)
        return "refused", text if len(text) < 20_000 else f"raised a text of {len(text)} characters"
    except Exception as error:
        if _is_users_own(error):
            return "refused", str(error)
        return "raised", "".join(traceback.format_exception(error))


def _is_users_own(error: BaseException) -> bool:
    """Whether Python says that a function does not have such arguments, or the user's own code raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if "/torch/" not in f.filename and "/optree/" not in f.filename), None)
    name = str(error).partition("(")[0]
    asked = isinstance(error, TypeError) and "positional argument" in str(error) and ("<" in name or name in globals())
    # An object that has no such method says so, as every object of Python does.
    asked = asked or (isinstance(error, AttributeError) and last is not None and last.name == "__getattr__")
    return asked or (last is not None and last.filename == __file__)


def _plain(value: Any) -> list[Any]:
    """What a call gave, whole, so that it can be compared over strategies."""
    if isinstance(value, fs.Layout):  # whose shardings are what a strategy changes
        return [f"{leaf.path} {leaf.shape} {leaf.init}" for leaf in value.leaves]
    found: list[Any] = []
    for x in fs.tree.leaves(value):
        if isinstance(x, DTensor):
            x = _whole(x)
        elif isinstance(x, fs.Local):
            x = str(fs.typeof(x).shape)
        found.append(
            x.detach().to(torch.float64, copy=True)
            if isinstance(x, torch.Tensor) and x.device.type == "cpu"
            else str(type(x))
        )
    return found


def _whole(x: DTensor) -> Any:
    return x.full_tensor()


def attempt(misuse: Misuse, folder: str) -> dict[str, tuple[str, Any]]:
    """What each strategy makes of a mistake, on this rank."""
    found = {}
    for level in (0, 3):
        dist.barrier()
        found[f"zero({level})"] = outcome(misuse, world(fs.zero(level), f"{folder}/{level}"))
    return found


def alike(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x == y if isinstance(x, str) or isinstance(y, str) else x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


@settings(max_examples=settings().max_examples * 4)
@given(misuse=misuses())
@example(misuse=Misuse("to_dtensor", "odd", 1, "'dp'"))  # a string is no sequence of ints
@example(misuse=Misuse("to_dtensor", "odd", 1, "a list of None"))
@example(misuse=Misuse("to_dtensor", "leaf", 1, "0 longer"))  # a size is a tensor
@example(misuse=Misuse("psum", "odd", 2, "''"))  # Mesh is a union
def test_misuse_is_refused_or_right(misuse):
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(attempt, 2, misuse, folder, timeout=60.0)
    for rank, found in enumerate(ranks):
        for strategy, (kind, value) in found.items():
            assert kind != "raised", f"{misuse} under {strategy} on rank {rank}:\n{value}"
    (kind, whole), (other, cut) = ranks[0].values()
    note(str(ranks[0]))
    # A rank's part in the place of a leaf is another plain tensor under each strategy.
    if kind == other == "value" and not misuse.other.endswith("its part"):
        assert alike(whole, cut), f"{misuse} gives other values under zero(3):\n{whole}\n{cut}"
    assert [x[0] for x in ranks[0].values()] == [x[0] for x in ranks[1].values()]
