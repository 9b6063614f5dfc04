"""Scaled kernels of a GPU: each that it has comes to what its codes stand for, and trains as dequantized products do.

Without a GPU every test here is skipped, and says so; tests/unit/ops/test_scaled_mm.py has the kernels of the CPU.
"""

import pytest
import torch

import fsharding as fs
from fsharding import formats, ops
from fsharding.formats.precision import Precision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")

DEVICE = "cuda"
NAMES = ("TENSORWISE", "ROWWISE", "E4M3_1x128", "E4M3_128x128", "MXFP8", "NVFP4")
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=256, layers=2, heads=4, kv_heads=4, intermediate_size=512)


def kernel_of(name):
    kernel = ops.scaled_kernel(getattr(formats, name), DEVICE)
    if not kernel.exists:
        pytest.skip(str(kernel))
    return kernel


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_that_of_what_both_codes_stand_for(name):
    kernel = kernel_of(name)
    weight = torch.randn(256, 512, device=DEVICE, requires_grad=True)
    x = torch.randn(2, 64, 512, device=DEVICE).bfloat16().requires_grad_()
    y = ops.scaled_matmul(x, fs.formats.quantize(weight, kernel.format, dtype=torch.bfloat16, strict=True), 1)
    y.backward(torch.ones_like(y))

    def numbers(t, format):
        return fs.formats.dequantize(fs.formats.quantize(t.detach(), format, dtype=torch.float64))

    want = numbers(x.flatten(0, -2), kernel.activations) @ numbers(weight, kernel.format).t()
    away = (y.flatten(0, -2).double() - want).norm() / want.norm()
    assert away < 2**-7
    assert torch.equal(weight.grad, (torch.ones_like(y).flatten(0, -2).t() @ x.detach().flatten(0, -2)).float())


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_near_those_of_dequantized_products(name):
    kernel, found = kernel_of(name), []
    model, mesh, opt = fs.models.decoder(CONFIG), fs.make_mesh(dp=1, device=DEVICE), fs.adamw(1e-3)
    tokens = torch.randint(64, (4, 65), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    columns = ("wq", "wk", "wv", "gate", "up") if kernel.format.one_way else ()
    for precision in (
        Precision(params=torch.float32, compute=torch.bfloat16, gather=kernel.format),
        Precision(params=torch.float32, compute=kernel.format),
        Precision(params=torch.float32, compute=kernel.format, columnwise=columns),
    ):
        layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), precision=precision)
        state, step = fs.init_state(model, opt, fs.random.key(0), layout), fs.make_train_step(model, opt)
        for _ in range(10):
            state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    assert found[1] == pytest.approx(found[0], rel=2e-2) and found[2] == pytest.approx(found[0], rel=2e-2)
