"""Whole models on meshes with model axes against one process: losses and gradient norms over ten steps of AdamW.

All meshes of the axes, each with every way to cut its state, are in test_every_mesh.py.
"""

from dataclasses import replace

import pytest

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.testing import assert_bitwise_equal
from tests.helpers import full
from tests.models import DEEP, close, on_ranks


@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        ({"tp": 2}, fs.zero(3), {"sequence": True}),
        pytest.param({"tp": 4}, fs.zero(1), {"sequence": True}, marks=full),
        pytest.param({"dp": 2, "tp": 2}, fs.zero(3), {"microbatches": 2}, marks=full),
    ],
)
def test_tensor_parallel_losses_are_those_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, **how))


@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        ({"cp": 2}, fs.zero(3), {"attention": "ring"}),
        ({"cp": 4}, fs.zero(2), {"attention": "ulysses"}),
        pytest.param({"dp": 2, "cp": 2}, fs.zero(1), {"microbatches": 2}, marks=full),
        pytest.param({"cp": 2, "tp": 2}, fs.zero(3), {"sequence": True}, marks=full),
    ],
)
def test_context_parallel_losses_are_those_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, **how))


@pytest.mark.parametrize(
    ("axes", "strategy", "how"),
    [
        ({"pp": 2}, fs.zero(0), {"schedule": "dualpipev"}),
        pytest.param({"pp": 2, "dp": 2}, fs.zero(3), {"gather": "microbatch", "schedule": "zbv"}, marks=full),
        pytest.param({"pp": 2, "dp": 2}, fs.zero(1), {"gather": "microbatch"}, marks=full),
    ],
)
def test_pipelines_with_other_axes_have_the_losses_of_one_process(axes, strategy, how):
    close(on_ranks(axes, strategy, config=DEEP, microbatches=4, **how), DEEP)


@full
def test_pipelines_of_tied_embeddings():
    tied = replace(DEEP, tied=True)
    for name in ("1f1b", "zbv"):
        close(on_ranks({"pp": 2}, fs.zero(0), config=tied, schedule=name, microbatches=4), tied)


@pytest.mark.parametrize("axes", [pytest.param({"dp": 2, "tp": 2}, marks=full), {"pp": 2, "cp": 2}], ids=str)
def test_what_is_computed_again_is_on_the_same_mesh(axes):
    how = {"policy": fs.policies.nothing_saveable, "microbatches": 2, "gather": "microbatch"}
    close(on_ranks(axes, fs.zero(3), **how))


@full
def test_two_runs_agree_bitwise():
    first, second = (on_ranks({"dp": 2, "tp": 2}, fs.zero(3), sequence=True) for _ in range(2))
    assert_bitwise_equal(first, second)


@pytest.mark.parametrize(
    "order",
    [
        ("tp", "cp", "ep", "dp", "pp", "replica"),
        pytest.param(("tp", "pp", "dp", "ep", "cp", "replica"), marks=full),
    ],
)
def test_the_order_of_ranks_changes_no_loss(order):
    close(on_ranks({"dp": 2, "tp": 2}, fs.zero(3), order=order))


@pytest.mark.parametrize(
    "whole",
    [
        ("heads", "kv_heads"),
        pytest.param(("mlp",), marks=full),
        pytest.param(("vocab",), marks=full),
        ("kv_heads",),
    ],
)
def test_rules_that_leave_a_dim_whole_change_no_loss(whole):
    close(on_ranks({"tp": 2}, fs.zero(3), rules=fs.DEFAULT_RULES.replace(**dict.fromkeys(whole))))


def test_heads_of_every_kind_and_tied_embeddings():
    """More ranks than key heads, as many, fewer; 2 key heads over 4 ranks are each on two."""
    for kv_heads in (1, 8):
        config = fs.models.DecoderConfig(
            vocab_size=50, dim=32, layers=1, heads=8, kv_heads=kv_heads, intermediate_size=36, tied=True
        )
        close(on_ranks({"tp": 4}, fs.zero(3), config=config), config)


def refused(axes, config, **how):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    with pytest.raises(ConfigError) as refusal:
        fs.plan_layout(fs.models.decoder(config, **how), mesh, how.pop("rules", fs.DEFAULT_RULES))
    return str(refusal.value)


def test_what_tp_cannot_cut_is_refused():
    config = fs.models.DecoderConfig(heads=6, kv_heads=2, dim=48, intermediate_size=1)
    assert refused({"tp": 4}, config) == (
        "fs.models.decoder does not fit the mesh {tp: 4}.\n"
        "  6 heads: not a multiple of tp=4\n"
        "  mlp of size 1: less than 2\n"
        "Use a different mesh, model or kind of attention, or rules that replicate these dims."
    )
    assert "2 heads per rank: neither a multiple nor a divisor of 3, the heads per kv head" in refused(
        {"tp": 3}, config
    )
