"""Meshes of two axes and formats on the simulated device: the bits of the CPU, in safe order, under delays."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from tests.decoders import DecoderCase
from tests.helpers import full
from tests.models import PAIRS, case_of
from tests.on_device import SIM, assert_as_on_cpu, device_ranks, needs_compiler, train

pytestmark = [pytest.mark.timeout(1300), needs_compiler]


@pytest.fixture(scope="module")
def pool():
    with device_ranks(4) as ranks:
        yield ranks


def trained(case, device):
    return train(case, device, opt=fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.sgd(0.1, momentum=0.9)))[0]


def check(pool, case):
    here, there = (pool.run(trained, case, device) for device in ("cpu", SIM))
    assert_as_on_cpu(here, there, reads=case.config.experts is not None)


KEPT = [("pp", "dp"), ("pp", "tp"), ("dp", "cp"), ("dp", "ep"), ("cp", "tp"), ("ep", "tp"), ("replica", "dp")]


@pytest.mark.parametrize(
    "axes", [axes if {*axes} in map(set, KEPT) else pytest.param(axes, marks=full) for axes in PAIRS], ids="-".join
)
def test_every_pair_of_axes(pool, axes):
    strategy = fs.hybrid(opt_state=True) if "replica" in axes else fs.zero(3)
    check(pool, replace(case_of(axes), strategy=strategy, steps=2, precision=fs.Precision(sums="ordered")))


FORMATS = {"fp8": fs.FP8, "fp8-blocks": fs.FP8_BLOCK, "mxfp8": fs.MXFP8, "nvfp4": fs.NVFP4}
STOCHASTIC = replace(fs.BF16, params=torch.bfloat16, rounding="stochastic")


@pytest.mark.parametrize(
    "name", ["fp8", "mxfp8", "stochastic", *(pytest.param(name, marks=full) for name in ("fp8-blocks", "nvfp4"))]
)
def test_formats_and_keyed_rounding(pool, name):
    config = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, intermediate_size=128)
    precision = replace(FORMATS.get(name, STOCHASTIC), sums="ordered")
    mesh = fs.AbstractMesh(("dp",), (4,))
    check(pool, DecoderCase(config, mesh, fs.zero(3), rows=8, length=8, steps=2, microbatches=2, precision=precision))
