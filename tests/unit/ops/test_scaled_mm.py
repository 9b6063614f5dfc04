"""Scaled kernels: which there are, what they compute beside dequantized products, and who asks for one that is not."""

import math

import pytest
import torch

import fsharding as fs
from fsharding import formats, ops
from fsharding.base.errors import ConfigError
from fsharding.formats import Blocks, codec
from fsharding.ops import scaled_mm
from fsharding.ops.scaled_mm import ScaledKernel, takes_shapes
from tests.helpers import cpu_multiplies_codes, refusal

ON_CPU = {"TENSORWISE": True, "ROWWISE": False}
"""Formats for which the CPU has a kernel, and whether it also takes transposed weights."""


@cpu_multiplies_codes
def test_which_kernels_there_are():
    for name in ("TENSORWISE", "ROWWISE", "E4M3_1x128", "E4M3_128x128", "MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"):
        format = getattr(formats, name)
        kernel = ops.scaled_kernel(format)
        assert (kernel.exists, kernel.transposes) == (name in ON_CPU, ON_CPU.get(name, False)), name
        assert ops.scaled_kernel(format.with_rounding("stochastic")) is kernel, (
            "codes of a weight are codes, however made"
        )
        if not torch.cuda.is_available():
            assert str(ops.scaled_kernel(format, "cuda")) == f"{format} on cuda: none, this machine has no cuda device"
    odd = Blocks(formats.E4M3, (2, 8))
    assert str(ops.scaled_kernel(odd)) == f"{odd} on cpu: none, torch has no recipe for it"
    row = "float8_e4m3fn[row, float32]"
    assert str(ops.scaled_kernel(formats.TENSORWISE)) == (
        f"float8_e4m3fn[tensor, float32] on cpu: RowWise, with activations in {row}, both ways"
    )


def numbers(x, format):
    """What a tensor is rounded to, in float32."""
    return fs.formats.dequantize(fs.formats.quantize(x, format, dtype=torch.float32))


def product_of_numbers(a, b):
    """The float32 product of [M, K] and [N, K]."""
    return a @ b.t()


@cpu_multiplies_codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_kernel_gives_the_product_of_what_both_codes_stand_for(name, dim, dtype):
    format, transposes = getattr(formats, name), ON_CPU[name]
    weight = torch.randn(96, 160, requires_grad=True)
    x = torch.randn(2, 20, 160 if dim else 96).to(dtype).requires_grad_()
    y = ops.scaled_matmul(x, fs.formats.quantize(weight, format, dtype=dtype, strict=True), dim)
    cotangent = torch.randn_like(y)
    y.backward(cotangent)
    w, flat, grad = numbers(weight.detach(), format), x.detach().flatten(0, -2), cotangent.flatten(0, -2)
    along, across = (w, w.t()) if dim else (w.t(), w)
    kernel_forward, kernel_backward = (True, transposes) if dim else (transposes, transposes)
    want = product_of_numbers(numbers(flat, formats.ROWWISE), along)
    toward = product_of_numbers(numbers(grad, formats.ROWWISE), across)
    bound = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    if kernel_forward:
        torch.testing.assert_close(y.flatten(0, -2), want.to(dtype), **bound)
    else:  # its blocks lie along the other dim
        assert torch.equal(y, ops.scaled_matmul(x, fs.formats.quantize(weight, format, dtype=dtype), dim))
    if kernel_backward:
        torch.testing.assert_close(x.grad.flatten(0, -2), toward.to(dtype), **bound)
    else:
        assert torch.equal(x.grad.flatten(0, -2), grad @ across.t().to(dtype))
    left, right = (grad.t(), flat) if dim else (flat.t(), grad)
    assert torch.equal(weight.grad, (left @ right).float()), "the gradient of the weight is of unrounded activations"


@cpu_multiplies_codes
@pytest.mark.parametrize("curved", [False, True], ids=["constant_gradient", "curved"])
def test_second_derivatives_are_never_silently_zero(curved):
    """Plain torch, on what the codes stand for, has the right value: 2 from the square of x, and that of the product."""
    weight = torch.randn(32, 64)
    codes = fs.formats.quantize(weight, formats.TENSORWISE, strict=True)

    def loss(x, product):
        y = product(x)
        return (y.square() if curved else y).sum() + x.square().sum()

    def first(x):
        return torch.autograd.grad(loss(x, lambda x: ops.scaled_matmul(x, codes, 1)), x, create_graph=True)[0]

    x = torch.randn(8, 64, requires_grad=True)
    for second in (lambda x: torch.autograd.grad(first(x).sum(), x), lambda x: first(x).sum().backward()):
        assert refusal(second, x) == (
            "ops.scaled_matmul multiplies quantized values here, which autograd can differentiate once only.\n"
            "Take second derivatives with torch.func."
        )
    plain = numbers(weight, formats.TENSORWISE)
    inside = torch.func.jvp(torch.func.grad(lambda x: loss(x, lambda x: ops.scaled_matmul(x, codes, 1))), (x,), (x,))
    right = torch.func.jvp(torch.func.grad(lambda x: loss(x, lambda x: x @ plain.t())), (x,), (x,))
    torch.testing.assert_close(inside[1], right[1], rtol=1e-4, atol=1e-4)


@cpu_multiplies_codes
def test_activations_are_rounded_token_by_token():
    x, w = torch.randn(8, 64), fs.formats.quantize(torch.randn(32, 64), formats.TENSORWISE, strict=True)
    others = torch.cat((x[:4], 1000 * torch.randn(4, 64)))
    assert torch.equal(ops.scaled_matmul(x, w, 1)[:4], ops.scaled_matmul(others, w, 1)[:4])


@cpu_multiplies_codes
def test_a_tensor_of_numbers_is_rounded_for_the_kernel():
    w = torch.randn(32, 64)
    once = fs.formats.dequantize(fs.formats.quantize(w, formats.ROWWISE))
    x = torch.randn(4, 64)
    held = fs.formats.Quantized.of_numbers(once, formats.ROWWISE, strict=True)
    want = ops.scaled_matmul(x, fs.formats.quantize(w, formats.ROWWISE, strict=True), 1)
    torch.testing.assert_close(ops.scaled_matmul(x, held, 1), want, rtol=1e-4, atol=1e-4)


def test_a_format_without_a_kernel_is_refused_where_it_is_strict():
    q = fs.formats.quantize(torch.ones(4, 32), formats.MXFP8, dtype=torch.bfloat16, strict=True)
    text = refusal(ops.scaled_matmul, torch.ones(2, 32, dtype=torch.bfloat16), q, 1, kind=ConfigError)
    assert text == (
        "fs.ops.scaled_matmul has no kernel for float8_e4m3fn[1x32, e8m0] on cpu, which strict=True requires.\n"
        "  Quantized(bfloat16[4, 32] as float8_e4m3fn[1x32, e8m0]): torch has no such kernel for the CPU\n"
        "Leave strict out to dequantize instead; `fsharding doctor` lists the formats that have a kernel."
    )


def test_a_strict_precision_is_refused_before_anything_is_gathered():
    layout = fs.plan_layout({"w": torch.zeros(4, 32)}, fs.make_mesh(device="cpu"))
    params = fs.shard({"w": torch.ones(4, 32)}, layout)
    run = fs.value_and_grad(lambda p: 1 / 0, precision=fs.Precision(compute=formats.MXFP8, strict=True))
    assert refusal(run, params, kind=ConfigError) == (
        "fs.value_and_grad has a strict precision without a kernel for it.\n"
        "  float8_e4m3fn[1x32, e8m0] on cpu: none, torch has no such kernel for the CPU\n"
        "Leave strict out to dequantize instead; `fsharding doctor` lists the formats that have a kernel."
    )


@cpu_multiplies_codes
def test_a_wrong_kernel_does_not_count(monkeypatch):
    wrong = ScaledKernel(formats.ROWWISE, formats.ROWWISE, "cpu", "RowWise", False)
    assert scaled_mm._why_not(wrong, torch.bfloat16) == ""
    monkeypatch.setitem(scaled_mm._CALLS, "RowWise", lambda a, b, dtype: torch.zeros(256, 256, dtype=dtype))
    assert scaled_mm._why_not(wrong, torch.bfloat16) == "it is 100.0% away from the dequantized product"

    def fail(*_):
        raise RuntimeError("not on this device\nmore")

    monkeypatch.setitem(scaled_mm._CALLS, "RowWise", fail)
    assert scaled_mm._why_not(wrong, torch.bfloat16) == "not on this device"


def test_sizes_that_kernels_of_a_gpu_take():
    def of(recipe):
        return ScaledKernel(formats.MXFP8, formats.MXFP8, "cuda", recipe, False)

    assert takes_shapes(of("RowWise"), 3, 64, 32) == "" != takes_shapes(of("RowWise"), 3, 60, 32)
    assert takes_shapes(of("BlockWise1x32"), 16, 64, 32) == "" != takes_shapes(of("BlockWise1x32"), 17, 64, 32)
    assert takes_shapes(of("BlockWise128x128"), 16, 256, 64) == "[64, 256] is not in multiples of [128, 128]"


def test_scales_as_blackwell_reads_them():
    scales = torch.arange(130 * 6).remainder(251).to(torch.uint8).view(130, 6)
    flat = scaled_mm.swizzled(scales)
    assert flat.numel() == 2 * 2 * 512
    for row, column in ((0, 0), (1, 0), (31, 3), (32, 0), (127, 3), (5, 4), (129, 5)):
        tile = row // 128 * 2 + column // 4
        at = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert flat[at] == scales[row, column], (row, column)
    assert flat.sum(dtype=torch.int64) == scales.sum(dtype=torch.int64), "the rest is zeros"


# What torch's kernels ask of their arguments, as torch's own checks for CUDA say it, and what they compute.
def unswizzled(flat, rows, blocks):
    tiles = flat.view(-(-rows // 128), -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]


def spread(scales, block, shape):
    """A scale for each element."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def stand_in(a, b, scales, recipes, swizzles, dtype):
    """Multiplies [M, K] and [K, N] as the kernels of a GPU do."""
    sides = []
    for x, of, recipe, other in ((a, scales[0], recipes[0], recipes[1]), (b.t(), scales[1], recipes[1], recipes[0])):
        assert x.is_contiguous() and x.dtype.itemsize == 1
        four = x.dtype == torch.float4_e2m1fn_x2
        shape = (x.shape[0], x.shape[1] * (2 if four else 1))
        (rows, columns), along = shape, math.ceil(shape[1] / 128)
        if recipe == ["BlockWise1x128"]:
            assert swizzles is None and of[0].dtype == torch.float32 and of[0].shape == (rows, along)
            assert of[0].stride() in ((1, rows), (1, 1)[: 2 * (along == 1)])
            factor = spread(of[0], (1, 128), shape)
        elif recipe == ["BlockWise128x128"]:
            assert other == ["BlockWise1x128"] and of[0].dtype == torch.float32
            padded, across = math.ceil(along / 4) * 4, math.ceil(rows / 128)
            assert of[0].shape == (padded, across)
            assert of[0].stride() in ((1, padded), (1, 1)[: 2 * (across == 1)])
            factor = spread(of[0].t()[:, :along], (128, 128), shape)
        else:
            width, kind = (16, torch.float8_e4m3fn) if four else (32, torch.float8_e8m0fnu)
            assert swizzles[0] == "SWIZZLE_32_4_4" and of[0].dtype == kind and of[0].is_contiguous()
            assert recipe == (["BlockWise1x16", "TensorWise"] if four else ["BlockWise1x32"]) == other
            factor = spread(unswizzled(of[0], rows, -(-columns // width)).float(), (1, width), shape)
            if four:
                assert of[1].dtype == torch.float32 and of[1].numel() == 1 and swizzles[1] == "NO_SWIZZLE"
                factor = factor * of[1]
        if four:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            numbers = table[codec.unpack(x.view(torch.uint8), columns).long()]
        else:
            numbers = x.float()
        sides.append(numbers.double() * factor.double())
    return (sides[0] @ sides[1].t()).to(dtype)


@pytest.mark.parametrize("shape", [(128, 256), (48, 640), (272, 64)], ids=str)
@pytest.mark.parametrize("name", ["E4M3_1x128", "E4M3_128x128", "MXFP8", "NVFP4"])
def test_arguments_of_the_kernels_of_a_gpu(monkeypatch, name, shape):
    monkeypatch.setattr(scaled_mm, "_product", stand_in)
    format = getattr(formats, name)
    kernel = scaled_mm._recipe(format, "cuda")
    w, x = torch.randn(shape), torch.randn(64, shape[1])
    got = scaled_mm.multiply_quantized(x, scaled_mm.quantized_matrix(w, format), kernel)
    rounded = fs.formats.dequantize(fs.formats.quantize(x, kernel.activations, dtype=torch.float64))
    want = rounded @ fs.formats.dequantize(fs.formats.quantize(w, format, dtype=torch.float64)).t()
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    if kernel.transposes:
        x = torch.randn(64, shape[0])
        got = scaled_mm.multiply_quantized(x, scaled_mm.quantized_matrix(w, format).t(), kernel)
        rounded = fs.formats.dequantize(fs.formats.quantize(x, kernel.activations, dtype=torch.float64))
        want = rounded @ fs.formats.dequantize(fs.formats.quantize(w, format, dtype=torch.float64))
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(32, 128), (20, 66), (1, 48)], ids=str)
@pytest.mark.parametrize("name", ["ROWWISE", "E4M3_1x128", "MXFP8", "MXFP4", "NVFP4"])
def test_codes_along_columns_are_those_of_the_transposed_matrix(name, shape):
    format, w = getattr(formats, name), torch.randn(shape)
    got = scaled_mm.transposed(fs.formats.quantize(w, format.across(shape)), format)
    want = scaled_mm.quantized_matrix(w.t().contiguous(), format)
    assert got.format == want.format and got.columns == want.columns == shape[0]
    assert torch.equal(got.values, want.values) and torch.equal(got.scales.blocks, want.scales.blocks)
    assert (got.scales.outer is None and want.scales.outer is None) or torch.equal(got.scales.outer, want.scales.outer)


def test_precisions_that_do_not_go_together():
    for given, said in (
        ({"columnwise": ("wq",), "compute": formats.E4M3_128x128}, "such as compute=fs.formats.MXFP8."),
        ({"columnwise": ("wq",), "gather": formats.MXFP8, "compute": torch.bfloat16}, "with compute=torch.bfloat16."),
        ({"columnwise": "wq", "compute": formats.MXFP8}, "patterns for parts of paths, such as columnwise="),
        ({"compute": formats.MXFP8, "gather": formats.NVFP4}, "weights are rounded once"),
        ({"activations": torch.bfloat16}, "got activations=torch.bfloat16 and no format to compute in."),
        ({"strict": True}, "got strict=True and no format to compute in."),
    ):
        assert said in refusal(fs.Precision, **given, kind=ConfigError)
    precision = fs.Precision(compute=formats.MXFP8)
    assert precision.gather == formats.MXFP8 and precision.compute_dtype(torch.float32) == torch.bfloat16
    assert fs.Precision(compute=formats.MXFP8, activations=torch.float32).activation_dtype == torch.float32
