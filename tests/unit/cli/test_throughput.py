"""Model FLOPs by the published formula, and peaks of those devices alone that are known."""

import math

import pytest
import torch

from fsharding.apps.cli.metrics import Meter, flops_per_token, peak_flops, peak_memory
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.models.presets import recipe
from fsharding.sharding.layout import plan_layout


def flops(preset, seq):
    chosen = recipe(preset)
    return flops_per_token(chosen.config, plan_layout(chosen.model(), AbstractMesh(("dp",), (1,))).leaves, seq)


def test_the_formula_of_a_dense_decoder():
    # 4 layers of width 128: queries and outputs 128 x 128, keys and values 64 x 128, three of 384 x 128; the head.
    weights = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128) + 256 * 128
    assert flops("tiny", 512) == 6 * weights + 12 * 4 * 4 * 32 * 512


def test_experts_that_a_token_does_not_see_cost_nothing():
    experts = recipe("tiny-moe").config.experts
    attention, shared = 2 * 128 * 128 + 2 * 64 * 128, 3 * 192 * 128
    layer = attention + shared + 8 * 128 + experts.active * 3 * 192 * 128
    assert flops("tiny-moe", 0) == pytest.approx(6 * (4 * layer + 256 * 128))


def test_queries_and_values_of_unlike_sizes():
    # 3 and 1 layers of 4 heads, whose queries have 32 and whose values have 24.
    assert flops("tiny_deepseek_v3", 100) - flops("tiny_deepseek_v3", 0) == 6 * 4 * 4 * (32 + 24) * 100


def test_a_published_model_is_near_six_times_its_parameters():
    assert flops("llama3_8b", 0) == pytest.approx(6 * (8.03e9 - 128_256 * 4096), rel=1e-3)


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("a device of next year", torch.bfloat16, None),
    ],
)
def test_peaks_of_known_devices(device, dtype, tflops):
    assert peak_flops(device, dtype) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_utilization_is_that_of_all_ranks_and_absent_without_a_peak():
    meter = Meter(flops=1e9, ranks=4, device_type="cpu", peak=1e12)
    rates = meter.rates(tokens=1000, seconds=0.5)
    assert rates["tokens_per_s_rank"] == 500
    assert math.isclose(rates["mfu"], 1e9 * 2000 / 4e12)
    assert "mfu" not in Meter(1e9, 4, "cpu", None).rates(1000, 0.5)


def test_resident_memory_is_in_bytes():
    assert 50e6 < peak_memory("cpu") < 1e12
