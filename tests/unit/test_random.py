"""Random numbers: known vectors of Threefry, moments of the draws, refused keys. Guarantees: tests/property/sharding/test_values.py."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fsharding as fs
from fsharding import random
from fsharding.base import _compat
from fsharding.base.errors import LayoutError, RandomKeyError
from fsharding.testing import assert_bitwise_equal
from tests import helpers


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("key", "count", "out"),
    # Of the reference implementation, threefry2x32 with 20 rounds (Random123, kat_vectors).
    [
        ("00000000 00000000", "00000000 00000000", "6b200159 99ba4efe"),
        ("ffffffff ffffffff", "ffffffff ffffffff", "1cb996fc bb002be7"),
        ("13198a2e 03707344", "243f6a88 85a308d3", "c4923a9c 483df7a0"),
    ],
)
def test_threefry_gives_the_known_vectors(key, count, out):
    found = torch.stack(random._rounds(torch.tensor(words(key)), torch.tensor(words(count)).unbind(-1)), -1)
    assert found.tolist() == words(out)
    assert list(random._rounds(tuple(words(key)), tuple(words(count)))) == words(out)


@pytest.mark.parametrize("data", [0, 1, 2**32 - 1, 2**32 + 5, 2**63 - 1])
def test_keys_in_a_transform_are_those_outside(data):
    """The host reads a key where it can; a transform sees tensors."""
    keys = random.split(random.key(7), 3)
    inside = torch.func.vmap(lambda key: random.fold_in(key, data))(keys)
    assert_bitwise_equal(inside, torch.stack([random.fold_in(key, data) for key in keys]))


def test_keys_hold_the_seed():
    assert random.key(0).tolist() == [0, 0]
    assert random.key((5 << 32) + 7).tolist() == [5, 7]
    assert random.key(2**64 - 1).tolist() == [2**32 - 1, 2**32 - 1]
    assert random.split(random.key(0), 3).shape == (3, 2)
    assert random.split(random.key(0))[0].tolist() == words("6b200159 99ba4efe")


def test_one_key_gives_one_array():
    key = random.key(3)
    assert_bitwise_equal(random.normal(key, (4, 5)).tensor(), random.normal(key, (4, 5)).tensor())
    assert not torch.equal(random.normal(key, (4, 5)).tensor(), random.normal(random.key(4), (4, 5)).tensor())
    assert not torch.equal(random.normal(key, (4, 5)).tensor(), random.uniform(key, (4, 5)).tensor())
    assert hash(random.normal(key, (4, 5))) == hash(random.normal(key, (4, 5)))


def test_moments_and_ranges():
    x = random.normal(random.key(0), (300, 1001), std=2.0, mean=5.0).tensor()
    assert abs(x.mean() - 5) < 0.02 and abs(x.std() - 2) < 0.02
    u = random.uniform(random.key(0), (300, 1001), low=-2.0, high=6.0).tensor()
    assert u.min() >= -2 and u.max() < 6 and abs(u.mean() - 2) < 0.03
    mask = random.bernoulli(random.key(0), (300, 1001), 0.25).tensor()
    assert mask.dtype == torch.bool and abs(mask.float().mean() - 0.25) < 0.01
    # Blocks of one array have streams of their own.
    halves = random.normal(random.key(0), (2, random.BLOCK)).tensor()
    assert abs(torch.corrcoef(halves)[0, 1]) < 0.01


def test_constants():
    assert_bitwise_equal(random.zeros((2,)).tensor(), torch.zeros(2))
    assert_bitwise_equal(random.ones((2,), dtype=torch.float64).tensor(), torch.ones(2, dtype=torch.float64))
    assert_bitwise_equal(random.full((2, 2), 0.5).slice(((0, 1), (1, 2))), torch.full((1, 1), 0.5))
    assert random.full((3, 0), 1.0).tensor().shape == (3, 0)


refusal = functools.partial(helpers.refusal, kind=RandomKeyError)


MEND = "Make keys with random.key, random.split or random.fold_in."


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: random.split(torch.zeros(3, dtype=torch.int64)),
            "fs.random.split needs a key int64[2], got int64[3].",
        ),
        (lambda: random.fold_in(torch.zeros(2), 1), "fs.random.fold_in needs a key int64[2], got float32[2]."),
        (
            lambda: random.normal(random.split(random.key(0)), (2,)),
            "fs.random.normal needs a key int64[2], got int64[2, 2].",
        ),
        (lambda: random.uniform(torch.zeros(()), (2,)), "fs.random.uniform needs a key int64[2], got float32[]."),
        (
            lambda: random.bernoulli(torch.zeros(1), (2,), 0.5),
            "fs.random.bernoulli needs a key int64[2], got float32[1].",
        ),
    ],
)
def test_keys_of_the_wrong_kind(call, text):
    assert refusal(call) == f"{text}\n{MEND}"


def test_a_seed_is_no_key():
    assert refusal(lambda: fs.random.normal(7, (2,))) == f"fs.random.normal needs a key int64[2], got int 7.\n{MEND}"


SEEDS = [-1, 2**64, -(2**64), 1.0, True, np.True_, np.int64(-1), np.float32(3), "7", None, torch.tensor(True)]


@pytest.mark.parametrize("seed", SEEDS, ids=repr)
def test_seeds_out_of_range_would_share_a_key(seed):
    text = refusal(lambda: random.key(seed))
    assert text == f"fs.random.key got seed={seed!r}.\nPass an integer from 0 to 2**64 - 1."


@pytest.mark.parametrize("data", [-1, 2**63, 2**64, 1.0, True, torch.tensor(-1), torch.tensor(False)], ids=repr)
def test_numbers_out_of_range_would_share_a_key(data):
    text = refusal(lambda: random.fold_in(random.key(0), data))
    assert text == f"fs.random.fold_in got data={data!r}.\nPass an integer from 0 to 2**63 - 1."


@pytest.mark.parametrize("n", [-1, 2**32, 1.5, True], ids=repr)
def test_numbers_of_keys_out_of_range(n):
    text = refusal(lambda: random.split(random.key(0), n))
    assert text == f"fs.random.split got n={n!r}.\nPass an integer from 0 to 2**32 - 1."


def test_a_number_of_a_transform_is_an_integer():
    """Its value is not read, its dtype is."""
    for data, kind in ((torch.zeros(3), "float32[]"), (torch.zeros(3, 2, dtype=torch.int64), "int64[2]")):
        text = refusal(lambda x=data: torch.func.vmap(lambda i: random.fold_in(random.key(0), i))(x))
        assert text == f"fs.random.fold_in got data={kind}.\nPass an integer from 0 to 2**63 - 1."


def test_integers_of_numpy_and_torch_are_numbers():
    key = random.key(7)
    for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, torch.tensor):
        assert_bitwise_equal(random.key(kind(7)), key)
        assert_bitwise_equal(random.fold_in(key, kind(7)), random.fold_in(key, 7))
    many = torch.func.vmap(lambda i: random.fold_in(key, i))(torch.arange(4))
    assert_bitwise_equal(many, torch.stack([random.fold_in(key, i) for i in range(4)]))


def test_keys_of_distinct_numbers_are_distinct():
    """At both ends of the range and around each word; `split` gives others."""
    numbers = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 2, 2**63 - 1]
    key = random.key(3)
    keys = [random.fold_in(key, n) for n in numbers] + [*random.split(key, 64)]
    assert len({tuple(k.tolist()) for k in keys}) == len(keys)
    seeds = [*numbers, 2**63, 2**64 - 1]
    assert len({tuple(random.key(n).tolist()) for n in seeds}) == len(seeds)


def test_a_box_is_inside_the_array():
    draw = fs.random.normal(fs.random.key(0), (3, 4))
    assert draw.slice(((1, 3), (4, 4))).shape == (2, 0)
    for box in (((0, 3), (0, 5)), ((0, 3),), ((2, 1), (0, 4)), ((-1, 3), (0, 4))):
        with pytest.raises(LayoutError) as caught:
            draw.slice(box)
        assert str(caught.value) == (
            f"fs.random.LazyTensor.slice cannot draw {list(box)} of an array of shape [3, 4].\n"
            "Pass a range inside of the array for each dim."
        )


@pytest.mark.parametrize(
    "shape", [(3,), (), (0, 4), (17, 1), (700, 1100), (3, random.BLOCK + 5), (2, 3, random.BLOCK // 2 + 1)], ids=str
)
def test_uniform_draws_of_a_device_have_the_bits_of_the_host(shape):
    """A key that the host does not read: here two words in tensors, as a step gives them whose count is on a device."""
    key = random.fold_in(random.key(7), 3)
    draws = random.uniform(key, shape, low=-1.0, high=2.0), random.bernoulli(key, shape, 0.7)
    for draw in (*draws, random.uniform(key, shape, dtype=torch.bfloat16)):
        on_device = replace(draw, words=tuple(key.unbind(-1)))
        assert_bitwise_equal(on_device.tensor(), draw.tensor())
        box = tuple((size // 3, size) for size in shape)
        assert_bitwise_equal(on_device.slice(box), draw.slice(box))


@pytest.mark.parametrize("number", [0, 5, (1 << 40) + 5])
def test_a_key_of_a_count_on_a_device_is_that_of_the_number(number):
    key = random.key(11)
    assert_bitwise_equal(random.fold_in_count(key, torch.tensor(number)), random.fold_in(key, number))
    assert_bitwise_equal(random.fold_in(key, torch.tensor(number)), random.fold_in(key, number))


def test_keys_and_draws_of_fake_tensors_have_shapes():
    with FakeTensorMode():
        key = random.fold_in_count(random.key(3), torch.zeros((), dtype=torch.int64))
        assert _compat.is_fake(key) and random.split(random.fold_in(key, 2), 3).shape == (3, 2)
        for draw in (random.normal(key, (4, 2)), random.bernoulli(key, (4, 2), 0.5)):
            assert draw.tensor().shape == (4, 2) and draw.slice(((1, 3), (0, 2))).dtype == draw.dtype
        assert random.dropout(torch.ones(4), 0.5, key).shape == (4,)
