"""A cast to 8 bits rounds the gradient that goes through it; one that is differentiated is refused by name."""

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import TransformError
from tests.helpers import refusal

HEAD = "fs.value_and_grad differentiates casts to {}, which round the gradient without a scale: 700 becomes 448, and"
MEND = (
    "Write w = fs.formats.quantize(w, fs.formats.TENSORWISE), then fs.formats.dequantize(w) or fs.ops.scaled_matmul(x, w, 1), whose gradient"
    " is not rounded; or cast w.detach(), which has no gradient."
)


@pytest.fixture(name="params", scope="module")
def a_state():
    values = {"w": torch.ones(4, 2), "blocks": {"w": torch.ones(3, 4, 4)}}
    names = {"w": None, "blocks": {"w": ("layers", None, None)}}
    return fs.shard(values, fs.plan_layout(values, fs.make_mesh(device="cpu"), names=names))


def of_weight(params, cast):
    w = fs.gather_unit({"w": params["w"]})["w"]
    return 700 * (torch.ones(3, 4) @ cast(w)).sum()


def through(dtype):
    return lambda w: w.to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_of_a_weight(params, dtype):
    name = str(dtype).removeprefix("torch.")
    want = f"{HEAD.format(name)} 1e-4 becomes 0.\n  params.w [4, 2] is cast to {name}\n{MEND}"
    for _ in range(2):
        assert refusal(fs.value_and_grad(of_weight), params, through(dtype), kind=TransformError) == want


@pytest.mark.parametrize("policy", [fs.policies.save_except_gathered, fs.policies.nothing_saveable])
def test_of_what_is_made_of_weights_of_blocks(params, policy):
    def block(unit, x):
        return x @ (unit["w"] / 3).type(torch.float8_e5m2).to(x.dtype)

    def loss(params):
        return fs.scan_units(block, params["blocks"], torch.ones(2, 4), policy=policy).sum()

    rows = [f"  params.blocks.w[{i}] [4, 4] is cast to float8_e5m2" for i in (2, 1, 0)]
    text = refusal(fs.value_and_grad(loss), params, kind=TransformError)
    assert text.splitlines()[1:] == [*rows, MEND]


def test_of_activations(params):
    def loss(params):
        w = fs.gather_unit({"w": params["w"]})["w"]
        return ((torch.ones(3, 4) @ w).to(torch.float8_e4m3fn).float() @ torch.ones(2, 5)).sum()

    rows = refusal(fs.value_and_grad(loss), params, kind=TransformError).splitlines()[1:]
    assert rows == ["  a tensor [3, 2] is cast to float8_e4m3fn", MEND]


def test_what_is_not_differentiated_and_what_has_a_scale_pass(params):
    def detached(w):
        return w + w.detach().to(torch.float8_e4m3fn).float()

    def held(w):
        return fs.formats.dequantize(fs.formats.quantize(w, formats.TENSORWISE))

    for cast in (detached, held):
        _, grads = fs.value_and_grad(of_weight)(params, cast)
        assert grads["w"].full_tensor().eq(2100).all()
    value, _ = fs.value_and_grad(
        lambda p: of_weight(p, lambda w: w) * 0 + through(torch.float8_e4m3fn)(torch.ones(()))
    )(params)
    assert float(value) == 1


def test_a_function_is_looked_at_once(params, monkeypatch):
    calls = []
    monkeypatch.setattr("fsharding.transforms.first_call._casts", lambda roots: calls.append(len(roots)) or [])

    def loss(params):
        return of_weight(params, lambda w: w)

    for _ in range(3):
        fs.value_and_grad(loss)(params)
    assert calls == [1]
