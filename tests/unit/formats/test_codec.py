"""Codes and scales beside a reference in float64 that knows formats as tables of numbers."""

import bisect
import itertools
import math

import numpy
import pytest
import torch

from fsharding import formats
from fsharding.base.errors import ConfigError
from fsharding.formats import Blocks, codec
from fsharding.formats.codec import Scales
from fsharding.formats.elements import ELEMENTS
from fsharding.formats.philox import philox, uniform_at
from tests.helpers import full

NAMED = {name: getattr(formats, name) for name in formats.__all__ if isinstance(getattr(formats, name), Blocks)}


def numbers_of(dtype):
    """All numbers from 0 that a code stands for, as exact Python numbers, by the definition of the type."""
    element = ELEMENTS[dtype]
    mantissa, least, exponent = element.mantissa, element.least, element.exponent
    found = {0.0}
    for e in range(least, exponent + 1):
        for m in range(1 << mantissa):
            found.add(math.ldexp(1 + m / (1 << mantissa), e))
    found |= {math.ldexp(m, least - mantissa) for m in range(1 << mantissa)}
    return sorted(x for x in found if x <= element.largest)


def nearest(x, numbers):
    """The nearest number to a float64, ties to the one with an even code; larger ones become the largest."""
    size = min(abs(x), numbers[-1])
    at = bisect.bisect_left(numbers, size)
    if numbers[at] != size and at:
        below, above = size - numbers[at - 1], numbers[at] - size
        at -= below < above or (below == above and (at - 1) % 2 == 0)
    return math.copysign(numbers[at], x)


def float32(x):
    return float(numpy.float32(x))


def reference_scale(block, format, outer):
    """The factor of one block, from Python numbers."""
    amax = max(map(abs, block))
    element = format.element
    if format.scale == "e8m0":
        exponent = math.frexp(amax)[1] - 1 if amax >= 2.0**-126 else -127
        return math.ldexp(1.0, min(max(exponent - element.exponent, -127), 127))
    if format.scale == "float32":
        return max(float32(amax / element.largest), 2.0**-126) if amax else 1.0
    inner = float32(float32(amax / element.largest) / outer)
    table = numbers_of(torch.float8_e4m3fn)
    return float32(nearest(min(max(inner, 2.0**-9), 448.0), table) * outer)


def reference(rows, format):
    """The dequantized numbers of a matrix with blocks of one row."""
    numbers = numbers_of(format.dtype)
    columns = format.sizes((len(rows), len(rows[0])))[1]
    amax = max(abs(x) for row in rows for x in row)
    outer = max(float32(amax / (448.0 * format.element.largest)), 2.0**-126) if amax else 1.0
    result = []
    for row in rows:
        out = []
        for at in range(0, len(row), columns):
            block = row[at : at + columns]
            scale = reference_scale(block, format, outer)
            out += [float32(nearest(float32(x / scale), numbers) * scale) for x in block]
        result.append(out)
    return result


def drawn(count, columns, seed):
    """Blocks of many sizes: normal numbers, subnormal ones, zeros, ties, and such as pass the largest number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, (count, 1), generator=generator).float())
    x[::7] = torch.randint(-12, 13, (len(x[::7]), columns), generator=generator).float() / 4
    x[1::11] *= 2.0**-120
    x[2::13, ::3] = 0.0
    x[3::17] = 0.0
    x[4::19, 0] = 3.0e38
    return x


def coded(x, format, noise=None):
    amax = codec.amaxes(x, format.sizes(tuple(x.shape)))
    scales = codec.scales_of(amax, format, x.abs().amax((-2, -1)) if format.has_outer else None)
    return codec.encode(x, scales, format, noise=noise), scales


ONE_ROW = {"mxfp8": formats.MXFP8, "e5m2": formats.MXFP8_E5M2, "mxfp4": formats.MXFP4, "nvfp4": formats.NVFP4}
ONE_ROW |= {"1x128": formats.E4M3_1x128, "row": formats.ROWWISE}


@pytest.mark.parametrize("blocks", [200, pytest.param(10_000, marks=full)])
@pytest.mark.parametrize("format", ONE_ROW.values(), ids=ONE_ROW)
def test_dequantized_numbers_are_those_of_the_definition(format, blocks):
    width = format.block[1] if isinstance(format.block, tuple) else 16
    x = drawn(blocks, width, seed=blocks)
    if format.has_outer:
        x = x.clamp(-1e30, 1e30)
    codes, scales = coded(x, format)
    got = codec.decode(codes, scales, format)
    wanted = torch.tensor(reference(x.double().tolist(), format), dtype=torch.float64).float()
    assert torch.equal(got, wanted)
    assert codes.dtype == torch.uint8 and scales.blocks.shape == format.grid(tuple(x.shape))


@pytest.mark.parametrize("format", NAMED.values(), ids=NAMED)
def test_every_code_is_its_own_number(format):
    numbers = torch.tensor(numbers_of(format.dtype))
    numbers = torch.cat([numbers, -numbers])
    assert torch.equal(format.element.round(numbers), numbers)
    assert torch.equal(format.element.round(numbers, torch.full_like(numbers, 0.5)), numbers)


@pytest.mark.parametrize("format", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_nan(format, bad):
    x = torch.ones(3, 40)
    x[1, 7] = bad
    codes, scales = coded(x, format)
    got = codec.decode(codes, scales, format)
    rows, columns = format.sizes((3, 40))
    block = got[1 // rows * rows : (1 // rows + 1) * rows, 7 // columns * columns : (7 // columns + 1) * columns]
    assert block.isnan().all()
    if not format.has_outer:
        assert got.isnan().sum() == block.numel()


@pytest.mark.parametrize("format", NAMED.values(), ids=NAMED)
def test_a_piece_has_the_codes_of_the_whole(format):
    x = drawn(150, 200, seed=1).clamp(-1e30, 1e30).view(2, 75, 200)
    block = format.sizes(tuple(x.shape))
    codes, scales = coded(x, format)
    for rows, columns in (((0, 75), (0, 200)), ((13, 60), (31, 190)), ((64, 65), (0, 1)), ((5, 5), (0, 200))):
        part = x[:, rows[0] : rows[1], columns[0] : columns[1]]
        places = [slice(a // b, -(-z // b)) for (a, z), b in zip((rows, columns), block, strict=True)]
        here = Scales(scales.blocks[:, places[0], places[1]], scales.outer)
        start = (rows[0], columns[0])
        got = codec.encode(part, here, format, block=block, start=start)
        assert torch.equal(got, codes[:, rows[0] : rows[1], columns[0] : columns[1]])


def test_codes_of_four_bits_are_packed_in_pairs():
    codes = torch.randint(16, (5, 7), dtype=torch.uint8)
    packed = codec.pack(codes)
    assert packed.shape == (5, 4)
    assert torch.equal(codec.unpack(packed, 7), codes)


def test_numbers_in_zero_to_one_are_those_of_philox():
    """The known answers of Random123 (Salmon et al. 2011)."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]  # fmt: skip
    for counter, key, wanted in known:
        assert tuple(int(x) for x in philox([torch.tensor(x) for x in counter], key)) == wanted


def test_noise_of_a_part_is_that_of_the_whole():
    key, shape = torch.tensor([3, 4]), (5, 6, 13)
    whole = uniform_at(key, 7, shape, [((0, n),) for n in shape], torch.device("cpu"))
    ranges = [((1, 3),), ((0, 2), (4, 6)), ((3, 5), (6, 13))]
    part = uniform_at(key, 7, shape, ranges, torch.device("cpu"))
    index = [[i for a, b in runs for i in range(a, b)] for runs in ranges]
    assert torch.equal(part, whole[index[0]][:, index[1]][:, :, index[2]])
    assert whole.min() >= 0 and whole.max() < 1
    assert not torch.equal(whole, uniform_at(key, 8, shape, [((0, n),) for n in shape], torch.device("cpu")))


def test_stochastic_rounding_has_an_exact_mean():
    x, format = torch.full((1, 1 << 16), 1.03), formats.MXFP8.with_rounding("stochastic")
    noise = uniform_at(torch.tensor([0, 1]), 0, tuple(x.shape), [((0, 1),), ((0, 1 << 16),)], x.device)
    codes, scales = coded(x, format, noise)
    got = codec.decode(codes, scales, format)
    assert {*got.unique().tolist()} == {1.0, 1.125}
    assert abs(float(got.mean()) - 1.03) < 1e-3


def test_blocks_that_cannot_be_are_refused():
    with pytest.raises(ConfigError) as error:
        Blocks(torch.float16, (0, 3), "float16", "up")
    assert str(error.value) == (
        "fs.formats.Blocks got invalid arguments.\n"
        f"  dtype=torch.float16: use one of {', '.join(map(str, ELEMENTS))}\n"
        "  scale='float16': use one of float32, e8m0, e4m3\n"
        "  rounding='up': use one of nearest, stochastic\n"
        '  block=(0, 3): use rows and columns from 1, such as (1, 32), or "row" or "tensor"\n'
        "Write fs.formats.MXFP8 for a common format."
    )


@pytest.mark.parametrize("format", NAMED.values(), ids=NAMED)
def test_bytes_are_those_of_codes_and_scales(format):
    for shape in ((), (7,), (4, 33), (2, 130, 257))[1:]:
        x = torch.ones(shape)
        if x.ndim == 1 and format.has_outer:
            continue
        codes, scales = coded(x, format)
        packed = codec.pack(codes) if format.element.bits == 4 else codes
        held = [packed, *(s for s in scales if s is not None)]
        assert sum(s.nbytes for s in held) == format.bytes(shape)


def test_power_of_two_scales_change_nothing_twice():
    for format, seed in itertools.product((formats.MXFP8, formats.MXFP8_E5M2, formats.MXFP4), range(3)):
        x = drawn(300, 64, seed).clamp(-1e30, 1e30)
        codes, scales = coded(x, format)
        again, same = coded(codec.decode(codes, scales, format), format)
        assert torch.equal(again, codes) and torch.equal(same.blocks, scales.blocks)


def test_elements_that_cannot_be_registered():
    for dtype in (torch.float8_e4m3fn, torch.int16):
        with pytest.raises(ConfigError, match="byte"):
            formats.register_element(dtype, ELEMENTS[torch.float8_e4m3fn])
