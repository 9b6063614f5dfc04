"""Precision: the dtype of each role, and the next loss scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.errors import ConfigError
from fsharding.precision import LossScale, Precision, ScaleState, wide

F16, BF16, F32, F64, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64


@pytest.mark.parametrize(
    ("precision", "leaf", "main", "compute", "grad", "moment"),
    [
        (fs.FP32, F32, F32, F32, F32, F32),
        (fs.FP32, BF16, BF16, BF16, F32, F32),
        (fs.FP32, F64, F64, F64, F64, F64),
        (fs.BF16, F32, F32, BF16, F32, F32),
        (fs.BF16, BF16, F32, BF16, F32, F32),
        (fs.FP16, F32, F32, F16, F32, F32),
        (Precision(grads=BF16, moments=BF16), F32, F32, F32, BF16, BF16),
        (Precision(params=BF16), F32, BF16, BF16, F32, F32),
        (Precision(params=F64, compute=F32), F32, F64, F32, F64, F32),
    ],
)
def test_dtypes_by_role(precision, leaf, main, compute, grad, moment):
    assert precision.main_dtype(leaf) == main
    assert precision.compute_dtype(leaf) == compute
    assert precision.grad_dtype(leaf) == grad
    assert precision.moment_dtype(leaf) == moment


def test_whole_numbers_stay_what_they_are():
    for precision in (fs.FP32, fs.BF16, fs.FP16):
        assert precision.main_dtype(I64) == precision.compute_dtype(I64) == I64
    assert [wide(x) for x in (F16, BF16, F32, F64, I64)] == [F32, F32, F32, F64, I64]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 5))
def test_the_scale_halves_on_overflow_and_doubles_after_a_row_of_good_steps(finite, interval):
    precision = Precision(loss_scale=LossScale(2.0**10, interval, least=2.0**3))
    state, exponent, row = precision.init_scale(), 10, 0
    assert state is not None and state.scale.dtype == F32 and state.good_steps.dtype == I64
    for good in finite:
        before = ScaleState(*(x.clone() for x in state))
        after = precision.next_scale(state, finite=good)
        assert state == before, "the state that went in is as it was"
        row = row + 1 if good else 0
        exponent = max(exponent + (-1 if not good else 1 if row == interval else 0), 3)
        row = 0 if row == interval else row
        assert (float(after.scale), int(after.good_steps)) == (2.0**exponent, row)
        state = after


def test_scales():
    assert fs.FP32.init_scale() is None and fs.BF16.init_scale() is None
    scale = fs.FP16.init_scale()
    assert scale is not None and float(scale.scale) == 2.0**16
    assert fs.FP16.loss_scale == LossScale(interval=2000)


@pytest.mark.parametrize("wrong", [{"initial": 0.5}, {"interval": 0}, {"initial": 0.0, "least": 0.0}])
def test_scales_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="Numbers are above 0"):
        LossScale(**wrong)


def test_dtypes_that_kernels_lack():
    with pytest.raises(ConfigError) as caught:
        Precision(compute=torch.float8_e4m3fn, grads=torch.int8)
    assert str(caught.value) == (
        "Precision got dtypes that kernels lack.\n"
        "  compute=torch.float8_e4m3fn\n"
        "  grads=torch.int8\n"
        "Use one of torch.float16, torch.bfloat16, torch.float32, torch.float64; compute, gather and reduce take an"
        " fs.Blocks, such as fs.formats.MXFP8: 8 bits without scales lose small numbers. Moments take one of 8 bits"
        " without a scale of whole matrices."
    )


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("blocks.wq", True),
        ("blocks.gate", True),
        ("blocks.experts.router", False),
        ("embed", False),
        ("model.layers.mlp.gate_proj.weight", True),
        ("model.layers.mlp.gate.weight", False),  # a router
        ("model.layers.mlp.shared_expert_gate.weight", False),
        ("model.layers.input_layernorm.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_leaves_that_have_no_format_by_default(path, taken):
    assert (fs.MXFP8.format_of(path, 2) is not None) == taken
    assert fs.MXFP8.format_of(path, 1) is None
