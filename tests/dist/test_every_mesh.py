"""Every axis, pair and triple of axes, dense and with experts: losses and gradient norms over ten steps of AdamW."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.models import Experts
from fsharding.ops.unit import early_from
from fsharding.schedule import SCHEDULES
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.dist.test_model_axes import DEEP, alone, train

pytestmark = pytest.mark.timeout(240)

# Biases move by as much as scores differ, so that they change who gets which token at every step.
EXPERTS = Experts(4, 2, 12, shared=1, score="sigmoid", scale=2.5, groups=2, kept_groups=2, z=1e-2, bias_rate=1e-2)
MODELS = {"dense": DEEP, "experts": replace(DEEP, experts=EXPERTS)}

TWO, FOUR, ALONG = {"microbatches": 2}, {"microbatches": 4}, {"sequence": True}
KINDS = ("ring", "gather", "ulysses")
MESHES = {
    "tp2": ({"tp": 2}, {}),
    "tp4": ({"tp": 4}, {}),
    "tp2 along the sequence": ({"tp": 2}, ALONG),
    **{f"cp{n} {kind}": ({"cp": n}, {"attention": kind}) for n in (2, 4) for kind in KINDS},
    "ep2": ({"ep": 2}, {}),
    "ep4": ({"ep": 4}, {}),
    **{f"pp2 {name}": ({"pp": 2}, {"microbatches": 4, "schedule": name}) for name in SCHEDULES},
    **{f"pp4 {name}": ({"pp": 4}, {"microbatches": 8, "schedule": name}) for name in SCHEDULES},
    "dp2 tp2": ({"dp": 2, "tp": 2}, ALONG),
    "dp2 cp2": ({"dp": 2, "cp": 2}, {}),
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "dp2 pp2": ({"dp": 2, "pp": 2}, TWO),
    "tp2 pp2": ({"tp": 2, "pp": 2}, {**TWO, **ALONG, "schedule": "interleaved"}),
    "cp2 pp2": ({"cp": 2, "pp": 2}, {**FOUR, "schedule": "dualpipev"}),
    "tp2 cp2 dp2": ({"tp": 2, "cp": 2, "dp": 2}, ALONG),
    "pp2 dp2 tp2": ({"pp": 2, "dp": 2, "tp": 2}, {**TWO, **ALONG, "schedule": "zbv"}),
    "pp2 ep2 dp2": ({"pp": 2, "ep": 2, "dp": 2}, TWO),
    "pp2 tp2 cp2": ({"pp": 2, "tp": 2, "cp": 2}, TWO),
    "replica2 dp2 tp2": ({"replica": 2, "dp": 2, "tp": 2}, {}),
}

DEFAULT = [("tp2 along the sequence", "experts", 3), ("cp2 ulysses", "experts", 1), ("dp2 pp2", "experts", 3)]
CASES = [(mesh, model, level) for mesh in MESHES for model in MODELS for level in (0, 1, 3)]


def trained(axes, level, config, how):
    with early_from(1):
        return train(tuple(axes.items()), fs.zero(level), config=config, **how)


@pytest.mark.parametrize(
    ("mesh", "model", "level"),
    [pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.full) for case in CASES],
)
def test_losses_and_norms_are_those_of_one_process(mesh, model, level):
    axes, how = MESHES[mesh]
    # As few layers as the schedules with two stages a rank can have.
    config = replace(MODELS[model], layers=2 * axes.get("pp", 1))
    ranks = torch.tensor([*axes.values()]).prod().item()
    runs = run_ranks(trained, ranks, axes, level, config, how, timeout=200)
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    torch.testing.assert_close(runs[0], alone(config), rtol=1e-5, atol=0)
