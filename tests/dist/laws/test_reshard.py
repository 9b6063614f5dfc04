"""Law: a reshard only moves values: it composes, there and back is the identity, and it commutes with a step."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.testing import TrainCase, assert_bitwise_equal, local_part, run_ranks, strategies, whole_tensors
from tests.helpers import examples
from tests.laws import content_is_whole, layout_here, parts, some_state


# ------------------------------------------------------------------------------------------- 4: composition, identity
def leaves_move(case, between):
    """Leaves of any dtype and bits, by shardings alone."""
    wholes = whole_tensors(case.leaves)
    # Layouts, not trees of shardings: where a leaf has explicit owners only they know its global shape.
    a, b, c = (layout_here(case.leaves, home) for home in (case.source, case.target, between))
    x = fs.tree.map(lambda whole, s: s.to_dtensor(local_part(whole, s), whole.shape), wholes, a.params)
    there = fs.reshard(x, b, source=a)
    assert_bitwise_equal(parts(there), fs.tree.map(local_part, wholes, b.params), "there")
    assert_bitwise_equal(parts(fs.reshard(there, a, source=b)), parts(x), "and back")
    assert_bitwise_equal(parts(fs.reshard(fs.reshard(x, c, source=a), b, source=c)), parts(there), "on a detour")
    assert_bitwise_equal(parts(x), fs.tree.map(local_part, wholes, a.params), "what went in")
    assert_bitwise_equal(parts(fs.reshard(x, b, source=a, donate=True)), parts(there), "donated")


@examples(40, 160)
@given(strategies.reshard_cases(), st.data())
def test_resharding_leaves_composes_and_comes_back(case, data):
    mesh = data.draw(strategies.meshes(case.ranks, subset_of=case.ranks))
    run_ranks(leaves_move, case.ranks, case, data.draw(strategies.homes(case.leaves, mesh, [case.source.precision])))


def state_moves(case):
    """A whole state: parameters or main copies, moments, step, key; and the bytes that the plan says (law 8)."""
    source, target = (layout_here(case.leaves, home) for home in (case.source, case.target))
    state = some_state(case.leaves, case.source)
    with fs.debug.count_bytes() as traffic:
        there = fs.reshard(state, target)
    assert traffic.bytes == fs.debug.explain_reshard(state, target).sent
    content_is_whole(there, target)
    content_is_whole(fs.reshard(there, source), source)


@examples(40, 120)
@given(strategies.reshard_cases())
def test_a_state_goes_there_and_back(case):
    run_ranks(state_moves, case.ranks, case)


# ------------------------------------------------------------------------------------------------ 5: steps and reshards
@st.composite
def pairs(draw):
    """A run that can be trained exactly, and another home for it on as many ranks."""
    case = draw(strategies.train_cases())
    mesh = draw(strategies.meshes())
    if mesh.size != case.ranks:
        names = draw(st.permutations(AXES))[: len(case.home.mesh.names)]
        mesh = AbstractMesh(tuple(names), case.home.mesh.sizes)
    return case, draw(strategies.homes(case.leaves, mesh, [fs.FP32], stages=False))


def steps_commute(case: TrainCase, other):
    """Steps at home and then a move, against a move and then steps, and against moving at every step."""
    opt, elsewhere = fs.sgd(1 / 16, momentum=0.5), replace(case, home=other)
    here, there = (layout_here(case.leaves, home) for home in (case.home, other))
    first = fs.init_state(lambda key: whole_tensors(case.leaves, numbers=True), opt, fs.random.key(0), here)
    step = fs.make_train_step(case.loss, opt, microbatches=case.microbatches)
    stay, go, swap = first, fs.reshard(first, there), first
    for number in range(case.steps):
        stay, _ = step(stay, case.batch(number, here.mesh))
        go, _ = step(go, elsewhere.batch(number, there.mesh))
        swap, _ = step(swap, case.batch(number, swap.layout.mesh))
        swap = fs.reshard(swap, there if swap.layout == here else here)
    want = [stay.params, stay.main, stay.opt_state]
    for name, state in (("move first", go), ("swap", swap)):
        back = fs.reshard(state, here)
        assert_bitwise_equal(parts([back.params, back.main, back.opt_state]), parts(want), name)
        assert int(back.step) == case.steps


@examples(20, 60)
@given(pairs())
def test_a_step_and_a_reshard_commute(pair):
    run_ranks(steps_commute, pair[0].ranks, *pair)
