"""Whole stages of a pipeline that travel as codes: the bits of every strategy, and the bytes that are expected."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.comm import redistribute
from fsharding.formats.precision import KEEP, Precision
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.decoders import DecoderCase
from tests.helpers import full

CONFIG = fs.models.DecoderConfig(vocab_size=40, dim=48, layers=6, heads=4, kv_heads=2, intermediate_size=72)
MX = Precision(params=torch.float32, compute=torch.bfloat16, gather=formats.MXFP8)
PRECISIONS = {
    "mx": MX,
    "mx, some layers": replace(MX, keep=(*KEEP, "blocks[1]", "blocks[-1]")),
    "nvfp4 stochastic": replace(MX, gather=formats.NVFP4.with_rounding("stochastic"), keep=(*KEEP, "blocks[2:4]")),
    "tensor": replace(MX, gather=formats.TENSORWISE),
    "computes": Precision(params=torch.float32, compute=formats.MXFP8),
}
CASES = {
    "1f1b": ({"pp": 2, "dp": 2}, {}),
    "interleaved": ({"pp": 2, "dp": 2}, {"schedule": "interleaved"}),
    "microbatch": ({"pp": 2, "dp": 2}, {"gather": "microbatch"}),
    "alone": ({"pp": 2}, {"schedule": "zbv", "config": replace(CONFIG, tied=True)}),
    "zbv": ({"pp": 2, "dp": 2}, {"schedule": "zbv", "config": replace(CONFIG, tied=True)}),
    "tp": ({"pp": 2, "dp": 2, "tp": 2}, {"policy": "dots_saveable"}),
    "experts": ({"pp": 2, "ep": 2}, {"config": replace(CONFIG, experts=fs.models.Experts(4, 4, 24, shared=1))}),
}
DEFAULT = {
    "mx": ["1f1b", "microbatch", "alone"],
    "mx, some layers": ["interleaved"],
    "nvfp4 stochastic": ["1f1b"],
    "computes": ["1f1b"],
}


def by_strategy(case, limit):
    """Losses and norms under zero(1) and zero(3); `train` compares what steps send with `expected_traffic`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribute, "BUCKET_BYTES", limit)
        return [replace(case, strategy=fs.zero(level)).train(foresee=level == 3) for level in (1, 3)]


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (precision, name) if name in DEFAULT.get(precision, ()) else pytest.param(precision, name, marks=full)
        for precision in PRECISIONS
        for name in CASES
    ],
)
def test_stages_as_codes_have_the_bits_of_copies(precision, name):
    axes, more = CASES[name]
    mesh = AbstractMesh(tuple(axes), tuple(axes.values()))
    case = DecoderCase(
        CONFIG, mesh, fs.zero(3), rows=8, length=8, steps=2, microbatches=4, precision=PRECISIONS[precision]
    )
    for limit in (redistribute.BUCKET_BYTES, 20_000):
        for copies, stages in run_ranks(by_strategy, mesh.size, replace(case, **more), limit, timeout=100):
            assert_bitwise_equal(stages, copies, "losses and norms under zero(3) and zero(1)")


def test_a_stage_in_mxfp8_sends_as_many_bytes_as_a_unit():
    wide = replace(CONFIG, dim=64, intermediate_size=128)
    schedule, model = fs.pipeline.plan_schedule("1f1b", 2, 4), fs.models.decoder(wide)
    mesh, stages = AbstractMesh(("pp", "dp"), (2, 2)), fs.pipeline.stages_of(model, schedule)

    def sent(precision):
        layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), precision=precision, stages=stages)
        where = {"pp": 1, "dp": 0}
        tokens = torch.zeros(8, 8, dtype=torch.int64)
        traffic = fs.debug.expected_traffic(
            model,
            fs.adamw(1e-3),
            layout,
            {"tokens": tokens, "targets": tokens},
            coord=where,
            microbatches=4,
            schedule=schedule,
            policy=fs.policies.everything_saveable,
        )
        return traffic.by_axes["dp",].bytes

    blocks = 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)  # of this rank's stage, gathered from one other rank
    assert sent(fs.BF16) - sent(MX) == blocks * (2 - 1.03125) / 2
