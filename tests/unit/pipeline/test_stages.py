"""Who has what in a pipeline, from schedules and layouts alone, and what is refused."""

import pytest

import fsharding as fs
from fsharding.base.errors import LayoutError, ScheduleError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.pipeline.stages import check_ends, layers_by_stage, owners

CONFIG = fs.models.DecoderConfig(layers=6)
MODEL = fs.models.decoder(CONFIG)
MESH = AbstractMesh(("pp",), (2,))


def planned(stages, model=MODEL):
    return fs.plan_layout(model, MESH, strategy=fs.zero(0), stages=stages)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("counts", [None, "uneven"])
def test_a_layout_tells_the_layers_of_each_stage(name, counts):
    schedule = fs.pipeline.plan_schedule(name, 2, 4)
    counts = counts and [4, 2] if schedule.stages == 2 else counts and [2, 1, 1, 2]
    layout = planned(fs.pipeline.stages_of(MODEL, schedule, counts=counts))
    found = tuple(n for (n,) in layers_by_stage(MODEL, schedule, layout))
    rank = [sum(n for s, n in enumerate(found) if schedule.owner[s] == r) for r in range(2)]
    wanted = fs.pipeline.layers_of(schedule, 6, counts=counts)
    assert sum(found) == 6 and rank == [
        sum(len(layers) for s, layers in enumerate(wanted) if schedule.owner[s] == r) for r in range(2)
    ]
    if name != "zbv":  # where two stages that follow each other are on one rank, any cut between them is the same
        assert found == tuple(map(len, wanted))
    check_ends(MODEL, schedule, layout)


UNLIKE = fs.models.decoder(
    fs.models.DecoderConfig(
        layers=5, stacks=(fs.models.Stack("wide", 2, intermediate_size=64), fs.models.Stack("after", 3))
    )
)


@pytest.mark.parametrize(
    ("name", "counts", "wide", "after", "by_stage"),
    [
        ("1f1b", None, [[0, 1], []], [[0], [1, 2]], ((2, 1), (0, 2))),
        ("1f1b", [1, 4], [[0], [1]], [[], [0, 1, 2]], ((1, 0), (1, 3))),
        ("zbv", None, [[0], [1]], [[2], [0, 1]], ((1, 0), (1, 1), (0, 1), (0, 1))),
    ],
)
def test_stages_cut_across_stacks(name, counts, wide, after, by_stage):
    schedule = fs.pipeline.plan_schedule(name, 2, 4)
    stages = fs.pipeline.stages_of(UNLIKE, schedule, counts=counts)
    assert (stages["blocks.wide"], stages["blocks.after"]) == (wide, after)
    found = layers_by_stage(UNLIKE, schedule, planned(stages, UNLIKE))
    assert [sum(n) for n in zip(*found, strict=True)] == [2, 3]
    if name != "zbv":
        assert found == by_stage
    with pytest.raises(LayoutError, match=r"blocks\.after are on "):
        layers_by_stage(UNLIKE, schedule, planned({**stages, "blocks.after": [[0], [2, 1]]}, UNLIKE))


def test_embedding_and_head_are_on_their_stages_only():
    layout = planned(fs.pipeline.stages_of(MODEL, fs.pipeline.plan_schedule("1f1b", 2, 4)))
    by_path = {leaf.path: owners(leaf.main, 2) for leaf in layout.leaves}
    assert by_path["embed.table"] == [0] and by_path["head.unembed"] == [1] and by_path["blocks.wq"] == [0, 1]
    bytes_here = [layout.memory(coord={"pp": rank}).params for rank in range(2)]
    assert bytes_here[1] - bytes_here[0] == CONFIG.dim * 4, "the head's norm"
    assert sum(bytes_here) == fs.plan_layout(MODEL, AbstractMesh(("dp",), (1,))).memory().params, (
        "nothing is there twice"
    )


def test_a_tied_table_is_on_both_ends():
    tied = fs.models.decoder(fs.models.DecoderConfig(layers=6, tied=True))
    assert fs.pipeline.stages_of(tied, fs.pipeline.plan_schedule("1f1b", 2, 4))["embed.table"] == [0, 1]
    assert fs.pipeline.stages_of(tied, fs.pipeline.plan_schedule("zbv", 2, 4))["embed.table"] == [0]


def test_other_stages_are_refused_by_name():
    schedule = fs.pipeline.plan_schedule("1f1b", 2, 4)
    stages = fs.pipeline.stages_of(MODEL, schedule)
    with pytest.raises(LayoutError) as refusal:
        layers_by_stage(MODEL, schedule, planned({**stages, "blocks": [[3, 4, 5], [0, 1, 2]]}))
    assert str(refusal.value) == (
        "train step needs a layout with the stages of Schedule(1f1b: 2 ranks, 2 stages, 4 microbatches, 36 actions).\n"
        "  blocks are on ((3, 4, 5), (0, 1, 2)); stages of the schedule are on (0, 1)\n"
        "Plan the layout with stages=fs.pipeline.stages_of(model, schedule)."
    )
    with pytest.raises(LayoutError, match=r"head\.unembed is not on pp=1"):
        check_ends(MODEL, schedule, planned({**stages, "head": 0}))
    with pytest.raises(LayoutError, match="blocks are on no stages"):
        layers_by_stage(MODEL, schedule, planned(None))
    with pytest.raises(ScheduleError, match="cannot put 6 layers on the 8 stages"):
        fs.pipeline.stages_of(MODEL, fs.pipeline.plan_schedule("1f1b", 8, 8))
