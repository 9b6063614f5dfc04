"""Precision: the dtype of each role, and the next loss scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError
from fsharding.formats.precision import LossScale, Precision, ScaleState

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
    with pytest.raises(ConfigError, match="Pass values above 0"):
        LossScale(**wrong)


def test_each_role_says_what_it_takes():
    with pytest.raises(ConfigError) as caught:
        Precision(compute=torch.float8_e4m3fn, grads=fs.formats.MXFP8, gather=torch.bfloat16, moments=fs.formats.MXFP4)
    assert str(caught.value) == (
        "fs.Precision got dtypes or formats that its roles do not accept.\n"
        "  compute=torch.float8_e4m3fn, which takes a dtype or a format\n"
        "  grads=float8_e4m3fn[1x32, e8m0], which takes a dtype: sums are not quantized\n"
        "  moments=float4_e2m1fn_x2[1x32, e8m0], which takes a dtype, or an 8-bit format without a scale per matrix\n"
        "  gather=torch.bfloat16, which takes a format: weights without one are sent in the dtype of compute\n"
        "Dtypes are torch.float16, torch.bfloat16, torch.float32, torch.float64. A format is an fs.formats.Blocks, such as"
        " fs.formats.MXFP8: 8 bits without scales lose small numbers."
    )


def test_it_prints_as_it_is_written():
    assert repr(Precision()) == "Precision()"
    assert repr(fs.BF16) == "Precision(params=torch.float32, compute=torch.bfloat16)"
    assert eval(repr(fs.NVFP4), {"Precision": Precision, "Blocks": fs.formats.Blocks, "torch": torch}) == fs.NVFP4


def test_weights_travel_in_the_dtype_of_compute_whether_that_is_said_or_not():
    assert Precision(compute=torch.bfloat16, gather=torch.bfloat16) == Precision(compute=torch.bfloat16)


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
