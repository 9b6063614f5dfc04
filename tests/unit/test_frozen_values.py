"""Values refuse assignment: every public class, every class that public functions return, and every tree node."""

import dataclasses
import inspect
import typing

import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import nn

import fsharding as fs
from fsharding import tree
from fsharding.base.errors import FrozenError
from fsharding.interop.module.functionalize import PureModule
from tests.helpers import refusal
from tests.public import CALLABLES, CLASSES

HANDLES = {
    # They count, read, or own processes.
    "Checkpointer", "PendingSave", "PendingVerdict", "Packed", "Watch", "RankPool", "HostReads", "Traffic", "Counts",
    # Functions, and dicts.
    "TrainStep", "CapturedStep", "ModuleNames", "StepOptions",
}  # fmt: skip


def returned(hint):
    """The classes of the library in a type hint."""
    if inspect.isclass(hint) and hint.__module__.startswith("fsharding."):
        yield hint
    for part in typing.get_args(hint):
        yield from returned(part)


def found():
    """Every class whose instances users hold, by name."""
    classes = (
        CLASSES
        | set(tree._registered)
        | {x for x in torch_pytree.SUPPORTED_NODES if x.__module__.startswith("fsharding.")}
    )
    for _, x in CALLABLES:
        hints = typing.get_type_hints(x)
        for hint in hints.values() if inspect.isclass(x) else [hints.get("return")]:
            classes |= {*returned(hint)}
    some = {x for x in classes if not issubclass(x, BaseException) and not getattr(x, "_is_protocol", False)}
    return sorted(some, key=lambda x: f"{x.__module__}.{x.__qualname__}")


VALUES = [x for x in found() if x.__name__ not in HANDLES]


def test_what_is_no_value_is_listed():
    assert {x.__name__ for x in found()} > HANDLES


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: f"{cls.__module__.removeprefix('fsharding.')}.{cls.__name__}")
def test_values_refuse_assignment(cls):
    if issubclass(cls, tuple):
        value = tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ())))
    else:
        value = int.__new__(cls) if issubclass(cls, int) else object.__new__(cls)
    fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else getattr(cls, "_fields", ())
    for name in {*fields, *typing.get_type_hints(cls), "novel"} - {"_instead"}:
        with pytest.raises(AttributeError):
            setattr(value, name, None)
        with pytest.raises(AttributeError):
            delattr(value, name)


def test_errors_show_how_to_make_another_value():
    state, _ = fs.setup({"w": torch.zeros(4)}, lambda p, x: (p["w"] * x).sum(), fs.sgd(0.1), fs.random.key(0))
    net = fs.functionalize(nn.Sequential(nn.Linear(3, 2)), units=["0"])
    for value, name, mend in (
        (state, "step", "state = state.replace(step=...)"),
        (state, "layout", "state = state.replace(layout=...)"),
        (fs.AxisRules(mlp="tp"), "mlp", "rules = rules.replace(mlp=...)"),
        (net, "names", "net = fs.functionalize(module, ...), with other arguments"),
    ):
        owner = type(value).__name__
        text = refusal(lambda v=value, n=name: setattr(v, n, 5), kind=FrozenError)
        assert text == f"{owner} is immutable: cannot assign {name!r}.\nWrite {mend}."
        text = refusal(lambda v=value, n=name: delattr(v, n), kind=FrozenError)
        assert text == f"{owner} is immutable: cannot delete {name!r}.\nWrite {mend}."
    assert int(state.step) == 0 and isinstance(net, PureModule) and int(state.replace(step=torch.tensor(5)).step) == 5


def test_values_that_refuse_can_be_donated():
    state, _ = fs.setup({"w": torch.zeros(4)}, lambda p, x: (p["w"] * x).sum(), fs.sgd(0.1), fs.random.key(0))
    taken = state.donate()
    assert repr(state) == "TrainState(donated)" and int(taken.step) == 0
    with pytest.raises(FrozenError):
        state.step = torch.tensor(1)
