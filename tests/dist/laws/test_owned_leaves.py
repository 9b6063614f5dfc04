"""Law: leaves that ranks own along a data axis, which random trees rarely have, keep all laws."""

import pytest
import torch

import fsharding as fs
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import Home, Leaf, TrainCase, run_ranks
from tests.helpers import full
from tests.laws import init_is_part_of_the_whole, load, save, trains_as_plain_torch, unit_is_adjoint

OWNED = {
    "w": Leaf((5, 3, 4), names=("expert", "mlp", "embed")),
    "b": Leaf((3,), names=("expert",)),
    "v": Leaf((6, 2), names=("embed", None)),
    "blocks": {"w": Leaf((2, 3, 7), names=("layers", "expert", "embed"))},
}
OWNERS = [
    Home(AbstractMesh(("ep", "dp"), (2, 2)), fs.zero(1)),
    Home(AbstractMesh(("replica", "ep"), (2, 2)), fs.hybrid(opt_state=True)),
    Home(AbstractMesh(("dp", "ep", "tp"), (2, 2, 2)), fs.zero(3)),
    Home(AbstractMesh(("dp", "cp"), (2, 2)), fs.zero(2), fs.DEFAULT_RULES.replace(expert=("cp", "dp"))),
    Home(AbstractMesh(("ep", "cp"), (3, 2)), fs.zero(0)),
]


@pytest.mark.parametrize(
    "home",
    [home if i in (0, 4) else pytest.param(home, marks=full) for i, home in enumerate(OWNERS)],
    ids=lambda home: f"{home.mesh}-{home.strategy}",
)
def test_leaves_that_ranks_own_keep_the_laws_too(home, tmp_path):
    layout = home.layout(OWNED)
    assert [leaf.path for leaf in layout.leaves if leaf.params.owned] == ["b", "blocks.w", "w"]
    case = TrainCase(OWNED, home, rows=8, microbatches=2, steps=2, donate=True)
    run_ranks(trains_as_plain_torch, case.ranks, case)
    run_ranks(init_is_part_of_the_whole, case.ranks, OWNED, home)
    run_ranks(save, case.ranks, OWNED, home, tmp_path / "a")
    for other in OWNERS:
        if other.mesh.size == case.ranks or other is OWNERS[0]:
            run_ranks(load, other.mesh.size, OWNED, other, tmp_path / "a", False)
    for leaf in (Leaf(leaf.shape, torch.float64, leaf.names) for leaf in fs.tree.leaves(OWNED)):
        run_ranks(unit_is_adjoint, case.ranks, leaf, home)
