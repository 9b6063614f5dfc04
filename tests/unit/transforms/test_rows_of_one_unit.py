"""Rows of a stack beside the full stack, or twice, in one unit; and units in a dtype of their own: gradients of plain torch."""

import pytest
import torch

import fsharding as fs
from fsharding.sharding.named_sharding import local_of
from fsharding.transforms.gather_unit import select_unit
from fsharding.transforms.unit_plan import large_from

ROWS, SIZE = 3, 32
USES = {
    "a row, then all": lambda p: {"a": select_unit(p, 0)["w"], "z": p["w"]},
    "all, then a row": lambda p: {"a": p["w"], "z": select_unit(p, 0)["w"]},
    "a row twice": lambda p: {"a": select_unit(p, 1)["w"], "z": select_unit(p, 1)["w"]},
    "everything": lambda p: {
        "a": select_unit(p, 2)["w"], "b": select_unit(p, 2)["w"], "c": p["w"], "d": select_unit(p, 0)["w"]
    },
}  # fmt: skip
PLAIN = {
    "a row, then all": lambda w: (w[0], w),
    "all, then a row": lambda w: (w, w[0]),
    "a row twice": lambda w: (w[1], w[1]),
    "everything": lambda w: (w[2], w[2], w, w[0]),
}


def total(parts):
    return sum((i + 2) * (x * x).sum() for i, x in enumerate(parts))


@pytest.mark.parametrize("grads", ["device", "host"])
@pytest.mark.parametrize("large", [1, 1 << 20])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_torch(use, large, grads):
    w = torch.linspace(-1, 1, ROWS * SIZE).view(ROWS, SIZE)
    expected = w.clone().requires_grad_()
    total(PLAIN[use](expected)).backward()
    strategy = fs.zero(3).with_memory(grads=grads)
    layout = fs.plan_layout(
        {"w": w}, fs.make_mesh(dp=1, device="cpu"), strategy=strategy, names={"w": ("layers", None)}
    )
    params = fs.shard({"w": w}, layout)
    with large_from(large):
        _, found = fs.value_and_grad(lambda p: total(fs.gather_unit(USES[use](p)).values()))(params)
    torch.testing.assert_close(local_of(found["w"]).cpu(), expected.grad, rtol=0, atol=1e-5)


def test_a_unit_that_was_prefetched_is_gathered_in_the_dtype_that_is_asked_for():
    w = {name: torch.linspace(0, 1, SIZE) for name in "ab"}
    layout = fs.plan_layout(w, fs.make_mesh(dp=1, device="cpu"), strategy=fs.zero(3))
    seen = []

    def loss(p):
        first = fs.gather_unit({"a": p["a"]}, dtype=torch.float64, next_unit={"b": p["b"]})["a"]
        second = fs.gather_unit({"b": p["b"]}, dtype=torch.float64)["b"]
        seen.extend([first.dtype, second.dtype])
        return (first * second).sum()

    fs.value_and_grad(loss)(fs.shard(w, layout))
    assert seen == [torch.float64] * 2
