"""Hashes of rows: equal for equal leaves, and another one for whatever differs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsharding.train.row_hashes import hash_of_all, hash_rows

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float64]


def hashed(batch):
    result = hash_of_all(hash_rows(batch))
    assert result is not None
    return int(result)


@given(
    dtype=st.sampled_from(DTYPES), size=st.sampled_from([2, 5, 1 << 16, (1 << 16) + 1, (1 << 17) + 3]), data=st.data()
)
def test_one_element_or_two_that_change_places_change_the_hash(dtype, size, data):
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    i, j = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    assert hashed({"x": x}) == hashed({"x": x.clone()})
    other = x.clone()
    other[i] = 1 - x[i].to(torch.int64)
    assert hashed({"x": other}) != hashed({"x": x})
    swapped = x.clone()
    swapped[i], swapped[j] = x[j].clone(), x[i].clone()
    assert (hashed({"x": swapped}) == hashed({"x": x})) == torch.equal(swapped, x)


def test_names_shapes_and_dtypes_count():
    x = torch.zeros(4, 6, dtype=torch.int32)
    same = [
        {"x": x},
        {"y": x},
        {"x": x + 1},
        {"x": (x + 1).view(6, 4)},
        {"x": (x + 1).to(torch.int16)},
        {"x": x, "y": x + 1},
    ]
    assert len({hashed(batch) for batch in same[2:]}) == len(same) - 2
    assert hash_of_all(hash_rows({})) is None and hash_rows({"name": "a", "x": x}).keys() == {"x"}


@pytest.mark.parametrize(
    "x", [torch.tensor(3), torch.zeros(0, 3), torch.arange(12).view(3, 4).t()], ids=["0-d", "empty", "transposed"]
)
def test_any_layout(x):
    assert hashed({"x": x}) == hashed({"x": x.contiguous().clone()})
