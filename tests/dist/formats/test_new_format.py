"""A format that the library lacks, written as a user would: 8-bit integers with a float32 scale for 64 of a row."""

from dataclasses import dataclass, replace

import pytest
import torch

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.decoders import DecoderCase


@dataclass(frozen=True)
class Int8:
    """Whole numbers from -127 to 127."""

    bits: int = 8
    largest: float = 127.0
    exponent: int = 6

    def round(self, x, noise=None):
        size = x.abs()
        whole = size.round() if noise is None else size.floor() + (noise < size.frac())
        return torch.copysign(whole.clamp(max=self.largest), x)

    def encode(self, x, noise=None):
        return self.round(x, noise).nan_to_num(0.0).to(torch.int8).view(torch.uint8)

    def decode(self, codes):
        return codes.view(torch.int8).to(torch.float32)


fs.formats.register_element(torch.int8, Int8())
INT8 = fs.formats.Blocks(torch.int8, (1, 64))
SENT = fs.Precision(params=torch.float32, compute=torch.bfloat16, gather=INT8.with_rounding("stochastic"), reduce=INT8)
CONFIG = fs.models.DecoderConfig(vocab_size=34, dim=64, layers=3, heads=2, kv_heads=2, intermediate_size=96)


def losses(mesh, precision):
    """Losses and norms of each level, on one rank of a mesh."""
    case = DecoderCase(CONFIG, mesh, rows=6, length=8, steps=3, precision=precision)
    return [replace(case, strategy=fs.zero(level)).train() for level in range(4)]


def test_numbers_are_off_by_half_a_step_at_most():
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    step = x.view(6, 2, 64).abs().amax(-1, keepdim=True) / 127
    error = fs.formats.dequantize(fs.formats.quantize(x, INT8)) - x
    assert (error.view(6, 2, 64).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("precision", [SENT, replace(fs.BF16, moments=INT8)], ids=["sent", "moments"])
def test_every_level_has_the_same_bits_and_stays_near_bfloat16(axes, precision):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    for level in (found := run_ranks(losses, mesh.size, mesh, precision)[0]):
        assert_bitwise_equal(level, found[0])
    plain = run_ranks(losses, mesh.size, mesh, fs.BF16)[0]
    torch.testing.assert_close(found[0], plain[0], rtol=0.02, atol=0.0)
    assert not torch.equal(found[0], plain[0]), "it is used"
