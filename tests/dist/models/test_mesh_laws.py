"""Whole decoders on random meshes of all axes: losses and gradient norms are those of one process, and come back bit by bit."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.decoders import DecoderCase, decoder_cases
from tests.helpers import FULL, crossed, examples, full

# Tens of runs on several ranks each: about a minute on two cores, in full half an hour or more; longer beside other load.
pytestmark = pytest.mark.timeout(7200 if FULL else 900)

RANKS, STEPS = 8, 2


def train(case, elements):
    with large_from(elements):
        return case.train(foresee=FULL)


def trained(case, elements=1 << 16):
    """What rank 0 saw; the others must have seen the same bits. Gradients of so many elements go one by one."""
    runs = run_ranks(train, case.ranks, case, elements)
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    return runs[0]


def close(case, elements=1 << 16):
    torch.testing.assert_close(trained(case, elements), trained(case.alone()), rtol=1e-5, atol=0)


@examples(60, 150)
@given(decoder_cases(RANKS, STEPS), st.sampled_from([1, 100, 1 << 16]))
def test_any_mesh_has_the_losses_of_one_process(case, elements):
    close(case, elements)


@examples(8, 24)
@given(decoder_cases(RANKS, STEPS))
def test_two_runs_are_bitwise_the_same(case):
    assert_bitwise_equal(trained(case), trained(case))


CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=4, heads=4, kv_heads=2, intermediate_size=20)
MEGATRON = [("tp", "cp", "ep", "dp", "pp"), ("tp", "pp", "dp")]


def ordered(order, **axes):
    """A mesh whose ranks lie in some order of its axes, the rest as by default."""
    order = (*order, *(axis for axis in AXES if axis not in order))
    names = tuple(axis for axis in order if axis in axes)
    return AbstractMesh(names, tuple(axes[name] for name in names))


CASE = DecoderCase(
    CONFIG, AbstractMesh(("dp",), (1,)), fs.zero(3), rows=8, length=8, steps=3, microbatches=2, sequence=True
)


@pytest.mark.parametrize(
    ("axes", "order"),
    crossed(
        [{"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}],
        {"-".join(order): (order,) for order in MEGATRON},
        kept=["{'pp': 2, 'tp': 2}-tp-cp-ep-dp-pp"],
    ),
)
def test_the_rank_orders_of_megatron(order, axes):
    close(replace(CASE, mesh=ordered(order, **axes)))


def test_sums_over_axes_in_any_order_of_the_mesh():
    """Stages add their sums in place wherever two data axes are open, whichever is the outer one."""
    mesh = ordered(("dp", "replica", "pp"), dp=2, replica=2, pp=2)
    close(replace(CASE, mesh=mesh, strategy=fs.zero(0), sequence=False))


def test_products_that_are_kept_are_walked_once():
    """torch's selective checkpoint has one backward, schedules with I and W have two."""
    close(replace(CASE, mesh=ordered((), pp=2), schedule="zbv", microbatches=4, policy="dots_saveable"))


def test_parameters_that_cannot_take_what_comes_travel_with_those_that_can():
    """Of two leaves cut over `replica` one is contiguous: the other gets memory of its own, and both one gather."""
    small = fs.models.DecoderConfig(vocab_size=2, dim=2, layers=1, heads=1, kv_heads=1, intermediate_size=2)
    strategy = replace(fs.zero(1), replica_params=True)
    mesh = ordered((), replica=2, dp=2)
    trained(DecoderCase(small, mesh, strategy, rows=4, length=1, steps=2, donate=True))


@pytest.mark.parametrize("name", ["interleaved_zero_bubble", pytest.param("interleaved", marks=full)])
def test_the_first_step_of_a_pipeline_with_receives_ahead(name):
    """What a stage gets is described the first time, by who waits for what this rank does after it posts the receive."""
    config = replace(CONFIG, layers=6)
    trained(replace(CASE, config=config, mesh=ordered((), pp=3), schedule=name, microbatches=1, sequence=False))


@full
@pytest.mark.parametrize("axes", [("pp", "dp", "tp"), ("pp", "cp", "tp"), ("replica", "dp", "tp")], ids="-".join)
def test_every_rank_order(axes):
    for order in permutations(axes):
        close(replace(CASE, mesh=ordered(order, **dict.fromkeys(axes, 2))))


# -------------------------------------------------------------------------------------------------------- bytes by axes
LARGE = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=4, heads=8, kv_heads=4, intermediate_size=160)
ROUTED = fs.models.DecoderConfig(
    vocab_size=50, dim=32, layers=4, heads=2, kv_heads=1, experts=fs.models.Experts(4, 2, 8, balance=0.01)
)
UNLIKE = replace(
    LARGE,
    stacks=(fs.models.Stack("first", 1), fs.models.Stack("second", 3, experts=fs.models.Experts(4, 4, 8, shared=1))),
)
FUSED = replace(LARGE, fused=True, bias=True)
SENT = [
    ({"tp": 2}, {"strategy": fs.zero(0)}),
    pytest.param({"dp": 2, "tp": 2}, {"config": FUSED, "strategy": fs.zero(1), "microbatches": 2}, marks=full),
    pytest.param(
        {"replica": 2, "tp": 2}, {"config": replace(FUSED, vocab_size=8192), "strategy": fs.zero(0)}, marks=full
    ),
    ({"dp": 2, "tp": 2}, {"sequence": True, "microbatches": 2, "precision": fs.BF16}),
    ({"cp": 2, "tp": 2}, {"attention": "ulysses", "strategy": fs.zero(1)}),
    pytest.param(
        {"dp": 2, "pp": 2},
        {"schedule": "zbv", "microbatches": 4, "gather": "microbatch", "precision": fs.BF16},
        marks=full,
    ),
    pytest.param({"replica": 2, "dp": 2}, {"strategy": fs.hybrid(opt_state=True), "microbatches": 2}, marks=full),
    pytest.param(
        {"replica": 2, "dp": 2}, {"config": replace(LARGE, vocab_size=8192), "strategy": fs.hybrid()}, marks=full
    ),
    pytest.param({"cp": 2}, {"attention": "ring", "policy": "nothing_saveable"}, marks=full),
    pytest.param({"cp": 4}, {"attention": "gather", "strategy": fs.zero(0)}, marks=full),
    pytest.param(
        {"pp": 2, "tp": 2},
        {"schedule": "interleaved_zero_bubble", "microbatches": 4, "policy": "dots_saveable"},
        marks=full,
    ),
    pytest.param({"ep": 2, "cp": 2}, {"config": ROUTED, "attention": "gather", "policy": "dots_saveable"}, marks=full),
    pytest.param({"pp": 2, "dp": 2, "tp": 2}, {"config": FUSED, "microbatches": 4, "gather": "microbatch"}, marks=full),
    pytest.param(
        {"dp": 2, "tp": 3}, {"config": replace(FUSED, heads=6, kv_heads=3, dim=60), "microbatches": 2}, marks=full
    ),
    pytest.param({"pp": 2, "ep": 2}, {"config": UNLIKE, "microbatches": 2, "gather": "microbatch"}, marks=full),
    pytest.param({"ep": 2, "tp": 2}, {"config": UNLIKE, "sequence": True, "precision": fs.BF16}, marks=full),
    pytest.param(
        {"pp": 2, "dp": 2, "tp": 2},
        {"schedule": "dualpipev", "microbatches": 5, "rows": 20, "sequence": True},
        marks=full,
    ),
]


@pytest.mark.parametrize(("axes", "how"), SENT)
def test_a_step_sends_what_is_expected(axes, how):
    """Sums that are large enough to be taken in two calls, and other dtypes; `case.train` compares at every step."""
    case = DecoderCase(LARGE, ordered((), **axes), fs.zero(3), rows=16, length=64, steps=1)
    trained(replace(case, **how))
