"""Kinds of blocks, stacks and packed rows on meshes against one process: losses and norms over ten steps of AdamW."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding import ops
from fsharding.models import MLA, DecoderConfig, Stack
from fsharding.testing import run_ranks
from tests.helpers import full
from tests.models import close, on_ranks

LATENT = MLA(
    4, q_rank=12, kv_rank=8, plain_dim=6, rotary_dim=4, value_dim=5, rope_scaling=ops.YarnScaling(length=8, fast=2.0)
)
BASE = DecoderConfig(vocab_size=50, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=20)
BIASED = replace(BASE, heads=8, bias=True, head_size=6, rope_scaling=ops.LlamaScaling(length=4), qk_norm=True)
NARROW = replace(BASE, attention=LATENT)
UNLIKE = replace(
    BASE, layers=8, stacks=(Stack("first", 3, LATENT), Stack("second", 1), Stack("third", 4, intermediate_size=12))
)  # fmt: skip
SHORT = replace(
    UNLIKE, layers=4, stacks=(Stack("first", 1, LATENT), Stack("second", 2), Stack("third", 1, intermediate_size=12))
)
FUSED = replace(BASE, fused=True, bias=True, intermediate_size=21)
PACKED = {"packed": True}

CASES = [
    (BIASED, {"tp": 2}, fs.zero(3), {"sequence": True}),
    (BIASED, {"tp": 4}, fs.zero(0), {}),
    (BIASED, {"cp": 2}, fs.zero(3), PACKED),
    (NARROW, {"tp": 2}, fs.zero(3), {"sequence": True}),
    (NARROW, {"tp": 4}, fs.zero(1), {}),
    (NARROW, {"tp": 2}, fs.zero(3), {"rules": fs.DEFAULT_RULES.replace(heads=None, kv_heads=None)}),
    *((NARROW, {"cp": 2}, fs.zero(3), {"attention": kind, **PACKED}) for kind in ("ring", "gather", "ulysses")),
    (NARROW, {"cp": 4}, fs.zero(0), {}),
    (NARROW, {"dp": 2, "tp": 2}, fs.zero(3), {"microbatches": 2, "sequence": True}),
    (NARROW, {"cp": 2, "tp": 2}, fs.zero(3), {"sequence": True, **PACKED}),
    (UNLIKE, {"dp": 2}, fs.zero(3), {"policy": fs.policies.nothing_saveable}),
    (UNLIKE, {"pp": 2}, fs.zero(0), {"microbatches": 4}),
    (SHORT, {"pp": 2}, fs.zero(3), {"microbatches": 2, "schedule": "zbv", **PACKED}),
    (UNLIKE, {"pp": 2}, fs.zero(3), {"microbatches": 4, "schedule": "zbv", **PACKED}),
    (UNLIKE, {"pp": 4}, fs.zero(0), {"microbatches": 4}),
    (UNLIKE, {"pp": 4}, fs.zero(0), {"microbatches": 4, "schedule": "interleaved", **PACKED}),
    (UNLIKE, {"pp": 2, "dp": 2}, fs.zero(3), {"microbatches": 2, "gather": "microbatch"}),
    (UNLIKE, {"pp": 2, "dp": 2}, fs.zero(1), {"microbatches": 2, **PACKED}),
    (UNLIKE, {"pp": 2, "tp": 2}, fs.zero(3), {"microbatches": 2, "sequence": True, **PACKED}),
    (UNLIKE, {"pp": 2, "cp": 2}, fs.zero(3), {"microbatches": 2, **PACKED}),
    (FUSED, {"tp": 2}, fs.zero(3), {"sequence": True}),
    (FUSED, {"dp": 2, "tp": 2}, fs.zero(1), {}),
    (FUSED, {"tp": 2}, fs.zero(0), {"rules": fs.DEFAULT_RULES.replace(heads=None)}),
]


@pytest.mark.parametrize(
    ("config", "axes", "strategy", "how"),
    [pytest.param(*case, marks=[] if i in (0, 14, 22) else full) for i, case in enumerate(CASES)],
)
def test_losses_are_those_of_one_process(config, axes, strategy, how):
    packed = {"packed": True} if "packed" in how else {}
    close(on_ranks(axes, strategy, config=config, **how), config, **packed)


TWINS = {name: recipe.config for name, recipe in fs.models.presets.RECIPES.items() if name.startswith("tiny_")}
MESHES = [
    ({"tp": 2}, {"sequence": True}),
    ({"pp": 2}, {"microbatches": 2}),
    ({"cp": 2}, {}),
    ({"dp": 2}, {"microbatches": 2}),
    ({"pp": 2, "ep": 2}, {"microbatches": 2, "schedule": "zbv"}),
    ({"ep": 2, "tp": 2}, {}),
]


@pytest.mark.parametrize(
    ("name", "axes", "how"),
    [
        pytest.param(name, *case, marks=[] if (name, i) == ("tiny_deepseek_v3", 1) else full)
        for name in TWINS
        for i, case in enumerate(MESHES)
    ],
)
def test_twins_of_published_models_have_the_losses_of_one_process(name, axes, how):
    config = TWINS[name]
    # Shares of the experts, which a balance loss weighs, are those of one microbatch: several ranks have other ones.
    pieces = {"microbatches": how["microbatches"]} if "microbatches" in how else {}
    if config.experts is not None and pieces and {"dp", "ep"} & {*axes}:
        config = replace(config, experts=replace(config.experts, balance=0.0))
    close(on_ranks(axes, fs.zero(3), config=config, **how), config, **pieces)


def positions(documents):
    mesh = fs.make_mesh(device="cpu", cp=torch.distributed.get_world_size())
    return ops.document_positions(ops.cut_sequence(documents, mesh=mesh), mesh=mesh), ops.cut_sequence(
        ops.document_positions(documents, mesh=fs.AbstractMesh(("dp",), (1,))), mesh=mesh
    )


def test_positions_of_documents_on_several_ranks():
    documents = (torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) < 0.3).cumsum(1)
    for mine, cut in run_ranks(positions, 2, documents):
        assert torch.equal(mine, cut)
