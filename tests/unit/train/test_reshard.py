"""What a reshard would do, in words and numbers, on abstract meshes; no process group."""

import pytest

import fsharding as fs
from fsharding.base.errors import LayoutError
from fsharding.comm import reshard_plan
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.sharding import boxes
from tests.helpers import counted_calls

FOUR = AbstractMesh(("dp",), (4,))


def draws():
    return {"table": fs.random.zeros((8, 6)), "w": fs.random.zeros((2, 4, 8)), "c": fs.random.zeros(())}


NAMES = {"table": ("vocab", "embed"), "w": ("layers", "embed", "heads"), "c": ()}


def planned(mesh, strategy, **options):
    return fs.plan_layout(draws(), mesh, strategy=strategy, names=NAMES, **options)


def test_the_table_of_a_reshard():
    a, b = planned(FOUR, fs.zero(3)), planned(AbstractMesh(("tp", "dp"), (2, 2)), fs.zero(0))
    assert str(fs.debug.explain_reshard(a, b, rank=1)) == (
        "leaf          type              from                      to                                     how         sent by rank 1  sent in all\n"
        "params.c      float32[]         P() on {dp: 4}            P() on {tp: 2, dp: 2}                  nothing                  0            0\n"
        "params.table  float32[8, 6]     P(None, 'dp') on {dp: 4}  P('tp') on {tp: 2, dp: 2}              all-to-all              96          288\n"
        "params.w      float32[2, 4, 8]  P(None, 'dp') on {dp: 4}  P(None, None, 'tp') on {tp: 2, dp: 2}  all-to-all              96          384\n"
        "3 leaves                                                                                         1 round                192          672"
    )


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [(0, 0, "nothing"), (0, 3, "nothing"), (3, 0, "gather"), (3, 3, "nothing"), (1, 3, "slice")],
)
def test_in_a_word(source, target, how):
    explained = fs.debug.explain_reshard(planned(FOUR, fs.zero(source)), planned(FOUR, fs.zero(target)))
    found = {row[0]: row[4] for row in explained.rows}["params.w"]
    assert found == ("slice" if (source, target) == (0, 3) else how)


def test_main_copies_are_moved_where_they_are_kept():
    a = planned(FOUR, fs.zero(3), precision=fs.BF16)
    b = a.with_strategy(fs.zero(1))
    rows = {row[0]: row[4:] for row in fs.debug.explain_reshard(a, b).rows}
    assert set(rows) == {"params.table", "params.w", "params.c", "main.table", "main.w", "main.c"}
    assert rows["main.w"] == ("nothing", 0, 0) and rows["params.w"] == ("gather", 3 * 32, 4 * 3 * 32)


def test_a_plan_of_thousands_of_ranks():
    mesh = AbstractMesh(("dp", "tp"), (256, 8))
    a = fs.NamedSharding(mesh, fs.P("dp", "tp"))
    b = fs.NamedSharding(AbstractMesh(("dp", "tp"), (512, 4)), fs.P("dp", "tp"))
    with counted_calls() as calls:
        plan = reshard_plan.plan_routes((reshard_plan.MovedLeaf((1 << 13, 1 << 13), 4, a, b),))
    assert sum(plan.sent[0].values()) <= 4 << 26 and calls.count < 4_000_000


def test_rounds_have_elements_of_one_size():
    mesh = AbstractMesh(("dp",), (2,))
    cut, whole = fs.NamedSharding(mesh, fs.P("dp")), fs.NamedSharding(mesh)
    plan = reshard_plan.plan_routes(tuple(reshard_plan.MovedLeaf((6,), size, cut, whole) for size in (1, 8, 2, 8)))
    assert [{plan.leaves[p.leaf].itemsize for p in pieces} for pieces in plan.rounds] == [{8}, {2}, {1}]


def test_two_layouts_of_two_models():
    other = fs.plan_layout({"table": fs.random.zeros((8, 7)), "w": fs.random.zeros((2, 4, 8))}, FOUR, frozen="w")
    with pytest.raises(LayoutError) as caught:
        fs.debug.explain_reshard(planned(FOUR, fs.zero(3)), other)
    assert str(caught.value) == (
        "fs.debug.explain_reshard cannot move a state to the layout of a different one.\n"
        "  params.c: only in the state\n"
        "  params.table: float32[8, 6] in the state, float32[8, 7] in the layout\n"
        "  params.w: trained in the state, not in the layout\n"
        "Plan the layout with the model, frozen leaves and precision of the state; cast separately."
    )


def test_splitting_an_overlap_keeps_every_element_once():
    shared = boxes.overlap((((0, 3), (5, 9)), ((0, 4),)), (((1, 8),), ((2, 4),)))
    assert shared == (((1, 0, 2), (3, 4, 3)), ((2, 0, 2),))
    for most in (1, 2, 3, 5, 100):
        parts = boxes.split_overlap(shared, most)
        assert all(boxes.overlap_volume(part) <= most for part in parts)
        assert sum(map(boxes.overlap_volume, parts)) == boxes.overlap_volume(shared) == 10
    assert [boxes.overlap_volume(part) for part in boxes.split_outer(shared, 1)] == [2] * 5
    assert boxes.outer_dims(shared, (7, 4)) == 1 and boxes.outer_dims(shared, (7, 2)) == 0
