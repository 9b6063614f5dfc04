"""States by example: what does not fit a layout is refused before anything is made of it."""

import copy
import functools
import pickle

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ArgumentError, LayoutError, TreeError
from fsharding.testing import assert_bitwise_equal
from tests import helpers

OPT, KEY = fs.adamw(1e-2), fs.random.key(0)


refusal = functools.partial(helpers.refusal, kind=LayoutError)


def planned(**shapes):
    mesh = fs.make_mesh(device="cpu", dp=1)
    return fs.plan_layout({name: fs.random.zeros(shape) for name, shape in shapes.items()}, mesh)


def drawn(dtype=torch.float32, **shapes):
    return lambda key: {name: fs.random.normal(key, shape, dtype=dtype) for name, shape in shapes.items()}


MEND = "Plan the layout for these values, with fs.plan_layout, or pass the ones it was planned for."


def test_a_model_of_another_size_is_refused():
    layout = planned(a=(3, 4), b=(2,), c=(5,))
    assert refusal(lambda: fs.init_state(drawn(a=(3, 2), b=(2,), c=(7,)), OPT, KEY, layout)) == (
        "fs.init_state got leaves that do not fit the layout.\n"
        "  a: float32[3, 2] given, float32[3, 4] in the layout\n"
        "  c: float32[7] given, float32[5] in the layout\n" + MEND
    )
    text = refusal(lambda: fs.init_state(drawn(torch.float64, a=(3, 4), b=(2,), c=(5,)), OPT, KEY, layout))
    assert text.count("\n  ") == 3 and "  b: float64[2] given, float32[2] in the layout\n" in text
    tensors = {"a": torch.zeros(3, 4), "b": 1.0, "c": torch.zeros(5)}
    assert "  b: float given, float32[2] in the layout\n" in refusal(
        lambda: fs.init_state(lambda key: tensors, OPT, KEY, layout)
    )
    text = refusal(lambda: fs.init_state(drawn(a=(3, 4), d=(1,)), OPT, KEY, layout), kind=TreeError)
    assert text.startswith("fs.init_state got the layout and the model that do not match.\n  b: only in the layout\n")


def test_parameters_of_another_size_are_refused():
    layout = planned(a=(3, 4), b=(2,))
    small = {"a": torch.zeros(3, 2), "b": torch.zeros(2)}
    assert refusal(lambda: fs.shard(small, layout)) == (
        "fs.shard got leaves that do not fit the layout.\n"
        "  a: float32[3, 2] given, float32[3, 4] in the layout\n" + MEND
    )
    other = fs.shard(small, planned(a=(3, 2), b=(2,)))
    assert "  a: float32[3, 2] given, float32[3, 4] in the layout\n" in refusal(
        lambda: fs.state_from_params(other, OPT, KEY, layout)
    )
    halves = fs.shard({"a": torch.zeros(3, 4).bfloat16(), "b": torch.zeros(2)}, layout)
    assert "  a: bfloat16[3, 4] given, float32[3, 4] in the layout\n" in refusal(
        lambda: fs.state_from_params(halves, OPT, KEY, layout)
    )


def squares(params, batch):
    return fs.gather_unit(params)["w"].sub(batch).square().sum()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_and_pickles_step_as_the_state_they_are_made_from(make, precision, donate):
    """Torch counts the changes of a copy from zero, while a donated state's have been changed by every step."""
    state, step = fs.setup({"w": torch.zeros(4)}, squares, OPT, KEY, fs.zero(1), precision=precision, donate=donate)
    for _ in range(2):
        state, _ = step(state, torch.ones(1, 4))
    copied, expected = make(state), step(copy.deepcopy(state), torch.ones(1, 4))[0]
    assert_bitwise_equal(copied, state)
    after, _ = step(copied, torch.ones(1, 4))
    assert_bitwise_equal(after, expected)
    with torch.no_grad():
        after.params["w"].zero_()
    with pytest.raises(ArgumentError, match=r"changed in place"):
        step(after, torch.ones(1, 4))
