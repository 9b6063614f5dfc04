"""Tensors that are held as codes and scales: gradients of every kind are those of plain tensors, and misuse is named."""

import pytest
import torch
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import formats, ops
from fsharding.base.errors import ArgumentError, ConfigError, NotDequantizedError
from fsharding.formats import codec
from tests.helpers import refusal

FORMATS = {
    "tensor": formats.TENSORWISE, "row": formats.ROWWISE, "squares": formats.E4M3_128x128, "mx": formats.MXFP8,
    "mxfp4": formats.MXFP4, "nvfp4": formats.NVFP4, "stochastic": formats.MXFP8.with_rounding("stochastic"),
}  # fmt: skip
SHAPES = [(5, 70), (2, 3, 37), (37,), (2, 0, 5)]


@pytest.fixture(params=FORMATS, name="held")
def a_function_that_holds(request):
    """A tensor to its numbers in a format."""
    format = FORMATS[request.param]
    key = torch.tensor([1, 2]) if format.stochastic else None
    return lambda x: fs.formats.dequantize(fs.formats.quantize(x, format, key=key))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_are_those_of_the_codec_and_gradients_pass_unrounded(held, shape):
    x, cotangent = torch.randn(shape), torch.full(shape, 700.0)
    cotangent.view(-1)[::2] = 1e-4
    y = held(x)
    assert y.shape == x.shape and (not x.numel() or not torch.equal(y, x))
    assert torch.equal(torch.func.grad(lambda x: (held(x) * cotangent).sum())(x), cotangent)
    value, tangent = torch.func.jvp(held, (x,), (cotangent,))
    assert torch.equal(value, y) and torch.equal(tangent, cotangent)
    leaf = x.clone().requires_grad_()
    held(leaf).backward(cotangent)
    assert torch.equal(leaf.grad, cotangent)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_vmap_rounds_each_example_by_itself(held, shape):
    xs, cotangent = torch.randn(3, *shape), torch.randn(shape)
    each = torch.stack([held(x) for x in xs])
    assert torch.equal(torch.func.vmap(held)(xs), each)
    assert torch.equal(torch.func.vmap(held, in_dims=1)(xs.movedim(0, 1)), each)
    grads = torch.func.vmap(torch.func.grad(lambda x: (held(x) * cotangent).sum()))(xs)
    assert torch.equal(grads, cotangent.expand_as(xs))


def test_jacobians_and_hessians(held):
    x = torch.randn(2, 6)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(jacobian(held)(x).reshape(12, 12), torch.eye(12))
    hessian = torch.func.hessian(lambda x: held(x).square().sum())(x)
    assert torch.equal(hessian.reshape(12, 12), 2 * torch.eye(12))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_numbers_in_every_derivative(dim, dtype):
    w, x = torch.randn(24, 24), torch.randn(4, 24).to(dtype)

    def quantized(w, x):
        return ops.scaled_matmul(x, fs.formats.quantize(w, formats.MXFP8, dtype=dtype), dim).float()

    def plain(v, x):
        return ops.scaled_matmul(x, v.to(dtype), dim).float()

    numbers = fs.formats.dequantize(fs.formats.quantize(w, formats.MXFP8))
    assert torch.equal(quantized(w, x), plain(numbers, x))
    ct, tangents = torch.randn(4, 24), (torch.randn(24, 24), torch.randn(4, 24).to(dtype))
    for got, want in zip(torch.func.vjp(quantized, w, x)[1](ct), torch.func.vjp(plain, numbers, x)[1](ct), strict=True):
        assert torch.equal(got, want)
    for got, want in zip(
        torch.func.jvp(quantized, (w, x), tangents), torch.func.jvp(plain, (numbers, x), tangents), strict=True
    ):
        assert torch.equal(got, want)
    batched = torch.func.vmap(quantized, in_dims=(None, 0))(w, x.expand(2, 4, 24))
    torch.testing.assert_close(batched[1], plain(numbers, x), rtol=2e-2, atol=1e-1)


def test_keys_may_differ_within_a_vmap():
    x, keys, format = torch.randn(4, 40), torch.tensor([[1, 2], [3, 4]]), FORMATS["stochastic"]
    out = torch.func.vmap(lambda k: fs.formats.dequantize(fs.formats.quantize(x, format, key=k)))(keys)
    assert torch.equal(out[1], fs.formats.dequantize(fs.formats.quantize(x, format, key=keys[1])))
    assert not torch.equal(out[0], out[1])


def test_it_is_a_node_of_both_kinds_of_trees():
    q = fs.formats.quantize(torch.randn(3, 40), formats.NVFP4, dtype=torch.bfloat16)
    assert fs.tree.paths({"w": q}) == ("w.values", "w.scales", "w.outer")
    for back in (
        fs.tree.map(torch.clone, {"w": q})["w"],
        torch_pytree.tree_map(torch.clone, {"w": q})["w"],
    ):
        assert torch.equal(fs.formats.dequantize(back), fs.formats.dequantize(q)) and (back.dtype, back.shape) == (
            q.dtype,
            q.shape,
        )
    stacked = torch.func.vmap(lambda x: fs.formats.quantize(x, formats.NVFP4))(torch.randn(2, 3, 40))
    assert stacked.shape == (2, 3, 40) and fs.formats.dequantize(stacked).shape == (2, 3, 40)
    leaf = torch.randn(3, 40, requires_grad=True)
    carrier = fs.formats.quantize(leaf, formats.MXFP8).carrier
    assert carrier is not None and carrier.untyped_storage().nbytes() == 4, "gradients need no memory"
    assert fs.formats.quantize(leaf.detach(), formats.MXFP8).carrier is None


def test_codes_and_scales_take_the_bytes_that_the_format_says():
    for name, format in FORMATS.items():
        key = torch.tensor([0, 0]) if format.stochastic else None
        assert fs.formats.quantize(torch.randn(64, 96), format, key=key).nbytes == format.bytes((64, 96)), name


def test_numbers_that_are_rounded_already_are_handed_on():
    x = torch.randn(4, 32, requires_grad=True)
    q = fs.formats.Quantized.of_numbers(x, formats.MXFP8)
    assert fs.formats.dequantize(q) is x and (q.shape, q.dtype, q.nbytes) == (x.shape, x.dtype, x.nbytes)
    assert fs.formats.dequantize(x) is x


def test_what_is_not_finite_shows():
    x = torch.randn(2, 64)
    x[1, 40] = torch.inf
    got = fs.formats.dequantize(fs.formats.quantize(x, formats.MXFP8))
    assert got[1, 32:].isnan().all() and got[0].isfinite().all() and got[1, :32].isfinite().all()


# ------------------------------------------------------------------------------------------------------------- refusals
MEND = "Write fs.formats.dequantize(w) for its values, or fs.ops.scaled_matmul(x, w, 1) for x @ w.T, and 0 for x @ w."


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda x, q: x @ q, "is an operand of @"), (lambda x, q: q @ x, "is an operand of @"),
        (lambda x, q: x * q, "is an operand of * or /"), (lambda x, q: q + 1, "is an operand of + or -"),
        (lambda x, q: torch.stack([q, q]), "is passed to torch.stack"),
        (lambda x, q: torch.nn.functional.linear(x, q), "is passed to torch.nn.functional.linear"),
        (lambda x, q: q.T, "is accessed as .T"), (lambda x, q: q.to(torch.float32), "is accessed as .to"),
        (lambda x, q: q[0], "is indexed"), (lambda x, q: q < 1, "is compared"),
    ],
)  # fmt: skip
def test_another_function_of_torch_is_refused_with_the_line_to_write(use, said):
    q = fs.formats.quantize(torch.ones(4, 4), formats.MXFP8)
    text = refusal(use, torch.ones(4, 4), q, kind=NotDequantizedError)
    row = "  Quantized(float32[4, 4] as float8_e4m3fn[1x32, e8m0])"
    assert text == f"fs.formats.dequantize was not called for a tensor that {said}.\n{row}\n{MEND}"
    assert not hasattr(q, "grad_fn") and not hasattr(q, "_private")


def test_a_function_of_trees_that_changes_codes_is_refused():
    q = fs.formats.quantize(torch.ones(4, 4), formats.MXFP8)
    assert refusal(fs.tree.map, torch.Tensor.float, {"w": q}, kind=ArgumentError) == (
        "fs.formats.Quantized cannot have values in torch.float32: a tree function has changed them.\n"
        "Dequantize first, fs.formats.dequantize(w), and quantize the result."
    )


def test_bad_arguments():
    stochastic = FORMATS["stochastic"]
    cases = [
        ((torch.ones(2), "mxfp8"), {}, ArgumentError, "takes a format, got str."),
        ((torch.ones(()), formats.MXFP8), {}, ArgumentError, "of at least one dim, got Tensor float32[]."),
        ((torch.ones(2, dtype=torch.int64), formats.MXFP8), {}, ArgumentError, "got Tensor int64[2]."),
        (([1.0], formats.MXFP8), {}, ArgumentError, "got list."),
        (
            (torch.ones(2), stochastic),
            {},
            ConfigError,
            "needs a key to round to float8_e4m3fn[1x32, e8m0, stochastic].",
        ),
        ((torch.ones(2), formats.MXFP8), {"key": torch.tensor([0, 1])}, ConfigError, "without a key, but got one."),
    ]
    for args, more, kind, said in cases:
        text = refusal(fs.formats.quantize, *args, **more, kind=kind)
        assert text.startswith("fs.formats.quantize ") and said in text, text
    assert refusal(fs.formats.dequantize, "w", kind=ArgumentError) == (
        "fs.formats.dequantize takes a Quantized, got str.\nPass the result of fs.formats.quantize, or a tensor."
    )


def test_codes_are_those_of_the_codec():
    x = torch.randn(6, 70)
    q = fs.formats.quantize(x, formats.MXFP8)
    scales = codec.scales_of(codec.amaxes(x, (1, 32)), formats.MXFP8)
    assert torch.equal(q.values, codec.encode(x, scales, formats.MXFP8)) and torch.equal(q.scales, scales.blocks)
