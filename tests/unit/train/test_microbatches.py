"""Batches of every container: their rows, and what is said of leaves and objects that are no batch."""

import dataclasses
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fsharding as fs
from fsharding.base.errors import ArgumentError, BatchError, DtypeError, TreeError

MESH = fs.make_mesh(device="cpu")
LAYOUT = fs.plan_layout({"w": torch.zeros(4, 3)}, MESH)
OPT = fs.adamw(1e-2)
X, Y = torch.arange(24.0).view(6, 4) / 24, torch.tensor([0, 1, 2, 0, 1, 2])


class Encoding(UserDict):
    """As transformers' BatchEncoding: a mapping that is no dict, made of one."""


class Output(dict):
    """A dict of a class of its own."""


@dataclasses.dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor | None = None
    total: float = dataclasses.field(init=False, default=0.0)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def entry(batch, name):
    return batch[name] if isinstance(batch, dict | UserDict) else getattr(batch, name)


def loss_fn(params, batch):
    logits = entry(batch, "x") @ fs.gather_unit(params)["w"]
    return functional.cross_entropy(logits, entry(batch, "y"), reduction="sum"), len(entry(batch, "y"))


def new_state():
    return fs.state_from_params(fs.shard({"w": torch.ones(4, 3)}, LAYOUT), OPT, fs.random.key(0), LAYOUT)


def with_leaf(name, leaf):
    return {"x": X, "y": Y} | {name: leaf}


CONTAINERS = [{"x": X, "y": Y}, Encoding(x=X, y=Y), Output(x=X, y=Y), Rows(X, Y), Pair(X, Y)]


@pytest.mark.parametrize("batch", CONTAINERS, ids=lambda x: type(x).__name__)
def test_every_container_gives_rows_of_its_own_class_and_the_loss_of_a_dict(batch):
    local = fs.local_batch(batch, MESH)
    assert type(local) is type(batch)
    assert torch.equal(entry(local, "x"), X) and torch.equal(entry(local, "y"), Y)
    step = fs.make_train_step(loss_fn, OPT, microbatches=3)
    # Equal logits: ln 3 for each token.
    assert float(step(new_state(), local)[1].loss) == pytest.approx(1.0986123, abs=1e-6)
    assert float(fs.evaluate(loss_fn, microbatches=2)(new_state(), batch).mean) == pytest.approx(1.0986123, abs=1e-6)


def test_containers_inside_of_containers_have_paths():
    batch = {"text": Encoding(x=X, y=Y), "more": Rows(X[:5], Y)}
    with pytest.raises(BatchError, match=r"more\.x is float32\[5, 4\]"):
        fs.make_train_step(loss_fn, OPT, microbatches=3)(new_state(), batch)


@pytest.mark.parametrize(
    ("batch", "row"),
    [
        (with_leaf("x", X.double()), "batch.x is float64[6, 4]: write .float()"),
        (with_leaf("y", Y.int()), "batch.y is int32[6]: write .long()"),
        (with_leaf("x", (X * 10).to(torch.uint8)), "batch.x is uint8[6, 4]: write .long()"),
        (with_leaf("x", X.to("meta")), "batch.x is float32[6, 4] on meta: it has no values"),
    ],
)
def test_a_dtype_or_device_that_does_not_fit_is_named(batch, row):
    with pytest.raises(DtypeError) as caught:
        fs.value_and_grad(loss_fn)(new_state().params, batch)
    assert row in str(caught.value) and isinstance(caught.value, RuntimeError)


def test_dtypes_that_fit_are_not_blamed():
    def fails(params, batch):
        return (batch["x"] @ fs.gather_unit(params)["w"].double()).sum()

    with pytest.raises(RuntimeError) as caught:
        fs.value_and_grad(fails)(new_state().params, with_leaf("x", X))
    assert not isinstance(caught.value, DtypeError)


CALLS = {
    "step": lambda batch: fs.make_train_step(loss_fn, OPT)(new_state(), batch),
    "evaluate": lambda batch: fs.evaluate(loss_fn)(new_state(), batch),
    "local_batch": lambda batch: fs.local_batch(batch, MESH),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_leaves_without_values_are_refused(call):
    with pytest.raises(BatchError, match=r"x is float32\[6, 4\] on the meta device, without values"):
        call(with_leaf("x", X.to("meta")))


LOADERS = {
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y)),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "generator": lambda: (batch for batch in [with_leaf("x", X)]),
    "list_iterator": lambda: iter([with_leaf("x", X)]),
}
BY_HAND = {"value_and_grad": lambda batch: fs.value_and_grad(loss_fn)(new_state().params, batch)}


@pytest.mark.parametrize("call", (CALLS | BY_HAND).values(), ids=CALLS | BY_HAND)
@pytest.mark.parametrize("kind", LOADERS)
def test_what_yields_batches_is_told_to_be_looped_over(kind, call):
    with pytest.raises(BatchError, match="for batch in loader: state, metrics = step") as caught:
        call(LOADERS[kind]())
    assert kind in str(caught.value)


# ------------------------------------------------------------------------------------------------- arguments that are swapped
def test_swapped_and_other_arguments_say_what_to_type():
    state, batch = new_state(), with_leaf("x", X)
    step = fs.make_train_step(loss_fn, OPT)
    with pytest.raises(ArgumentError, match=r"Swap the two: fs\.evaluate\(loss_fn\)\(state, batch\)"):
        fs.evaluate(loss_fn)(batch, state)
    with pytest.raises(ArgumentError, match=r"fs\.evaluate\(loss_fn\)\(state, batch\)"):
        fs.evaluate(step)
    with pytest.raises(ArgumentError, match=r"layout = fs\.plan_layout\(tree, mesh\)"):
        fs.shard({"w": torch.ones(4, 3)}, MESH)
    for grads in (None, {"w": None}):
        with pytest.raises(TreeError, match="got no gradients: each of them is None"):
            OPT.update(grads, state.opt_state, state.params)
        with pytest.raises(TreeError, match=r"fs\.update got no gradients"):
            fs.update(state, grads, OPT)
    with pytest.raises(TreeError, match=r"x = block\(fs\.gather_unit\(unit\), x\)"):
        fs.scan_units(lambda unit, x: x @ unit["w"] + unit["b"], {"w": torch.ones(4, 4), "b": torch.ones(3)}, X)


def test_requires_grad_is_a_matter_of_the_layout():
    def gathered(params, batch):
        return (batch["x"] @ fs.gather_unit(params)["w"].requires_grad_(False)).sum()

    def at_rest(params, batch):
        params["w"].requires_grad_(False)
        return loss_fn(params, batch)

    for fn in (gathered, at_rest):
        with pytest.raises(Exception, match=r"frozen=\[\"head\"\]"):
            fs.value_and_grad(fn)(new_state().params, with_leaf("x", X))


def test_a_function_of_a_module_takes_parameters_first():
    net = fs.functionalize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), units="*")
    for first in (X, {"x": X}, (X, Y)):
        with pytest.raises(ArgumentError, match=r"net\(params, x\)"):
            net(first)
