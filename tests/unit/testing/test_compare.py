"""The comparisons of `fsharding.testing`: which values are told apart, and what the message says."""

import math
import struct
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsharding.testing import assert_bitwise_equal, assert_trees_close

Pair = namedtuple("Pair", ["x", "y"])
NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool]


def differs(a, b, check=assert_bitwise_equal, **kwargs):
    with pytest.raises(AssertionError) as caught:
        check(a, b, **kwargs)
    return str(caught.value).split("\n")


@given(st.lists(st.integers(0, 255), min_size=8, max_size=8), st.lists(st.integers(0, 255), min_size=8, max_size=8))
def test_equal_exactly_if_the_bytes_are(a, b):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int16):
        x, y = (torch.tensor(bits, dtype=torch.uint8).view(dtype) for bits in (a, b))
        assert_bitwise_equal(x, x.clone())
        if a == b:
            assert_bitwise_equal(x, y)
        else:
            differs(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_a_tree_equals_its_copy(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    tree = {"a": [tensor, None], "b": Pair(tensor.mT if tensor.ndim == 2 else tensor, 3), "c": math.nan}
    copy = {"a": [tensor.clone(), None], "b": Pair(tree["b"].x.clone(), 3), "c": math.nan}
    assert_bitwise_equal(tree, copy)
    assert_bitwise_equal(tree, copy, "copies")


def test_every_path_that_differs_is_listed():
    a = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "p": Pair(NAN[:1], 1), "only": torch.ones(2), "same": 1.0}
    b = {"w": torch.tensor([[0.0, 1.0], [2.5, 3.5]]), "p": Pair(NAN[1:], 2), "extra": torch.ones(2), "same": 1.0}
    assert differs(a, b, what="the states") == [
        "fs.testing.assert_bitwise_equal found that 5 of 6 leaves of the states differ.",
        "  only is only in the first",
        "  extra is only in the second",
        "  p.x differs in 1 of 1 elements, first at [0]: nan against nan (bits 0x7fc00000 and 0x7fc00001)",
        "  p.y is int 1 against int 2",
        "  w differs in 2 of 4 elements, first at [1, 0]: 2.0 against 2.5 (bits 0x40000000 and 0x40200000)",
    ]


@pytest.mark.parametrize(
    ("a", "b", "row"),
    [
        (
            torch.tensor(0.0),
            torch.tensor(-0.0),
            "differs in 1 of 1 elements, first at []: 0.0 against -0.0 (bits 0x00000000 and 0x80000000)",
        ),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "is float32[2] against float64[2]"),
        (torch.ones(2), torch.ones(2, 1), "is float32[2] against float32[2, 1]"),
        (torch.ones(0), torch.ones(0, 1), "is float32[0] against float32[0, 1]"),
        (torch.ones(()), 1.0, "is float32[] against float 1.0"),
        (1, True, "is int 1 against bool True"),
        ("a", "b", "is str 'a' against str 'b'"),
        (
            0.0,
            -0.0,
            "differs in 1 of 1 elements, first at []: 0.0 against -0.0 (bits 0x0000000000000000 and 0x8000000000000000)",
        ),
        (
            np.array([1, 2], np.uint8),
            np.array([1, 3], np.uint8),
            "differs in 1 of 2 elements, first at [1]: 2 against 3 (bits 0x02 and 0x03)",
        ),
    ],
)
def test_rows(a, b, row):
    head = "fs.testing.assert_bitwise_equal found that 1 of 1 leaves differ."
    assert differs(a, b) == [head, f"  the leaf {row}"]


def test_views_of_conjugates_are_compared_by_value():
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert_bitwise_equal(x.conj(), torch.tensor([1 - 2j, 3 + 4j]))
    assert_bitwise_equal(x.conj().imag, torch.tensor([-2.0, 4.0]))


def test_nan_floats_by_payload():
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    assert_bitwise_equal(math.nan, math.nan)
    assert len(differs(math.nan, other)) == 2


@given(st.floats(-1e30, 1e30), st.floats(0, 1), st.floats(0, 1), st.floats(-2, 2))
def test_close_is_the_textbook_inequality(y, rtol, atol, by):
    x = y + by * (atol + rtol * abs(y))
    if abs(x - y) <= atol + rtol * abs(y):
        assert_trees_close([x], [y], rtol, atol)
    else:
        differs([x], [y], assert_trees_close, rtol=rtol, atol=atol)


def test_close_across_dtypes_and_with_infinities():
    inf = torch.tensor([1.0, torch.inf, -torch.inf])
    assert_trees_close({"a": inf, "n": 3}, {"a": inf.to(torch.float64), "n": 3})
    assert_trees_close(torch.zeros(3, 0), torch.zeros(3, 0))
    assert_trees_close(torch.tensor([1 + 1j]), torch.tensor([1 + 1.000001j]))


def test_rows_of_close():
    a = {"w": torch.tensor([[1.0, 2.0, 3.0]]), "v": torch.tensor([torch.nan, 1.0]), "i": torch.tensor([torch.inf])}
    b = {"w": torch.tensor([[1.0, 2.5, 4.0]]), "v": torch.tensor([torch.nan, 2.0]), "i": torch.tensor([-torch.inf])}
    assert differs(a, b, assert_trees_close, rtol=0.25, atol=0.125, what="gradients") == [
        "fs.testing.assert_trees_close found that 2 of 3 leaves of gradients differ.",
        "  i differs in 1 of 1 elements beyond rtol 0.25, atol 0.125, worst at [0]: inf against -inf, off by inf",
        "  v differs in 2 of 2 elements beyond rtol 0.25, atol 0.125, worst at [0]: nan against nan, off by nan",
    ]
    assert differs(a["w"], b["w"], assert_trees_close, rtol=0.1, atol=0) == [
        "fs.testing.assert_trees_close found that 1 of 1 leaves differ.",
        "  the leaf differs in 2 of 3 elements beyond rtol 0.1, atol 0, worst at [0, 2]: 3.0 against 4.0, off by 1",
    ]
    assert differs(torch.ones(2), torch.ones(3), assert_trees_close)[1] == "  the leaf is float32[2] against float32[3]"
