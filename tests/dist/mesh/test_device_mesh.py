"""Meshes on real ranks: groups in the order of their axes, and sizes that do not fit the ranks there are."""

from datetime import timedelta

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import MeshError
from fsharding.mesh import device_mesh
from fsharding.mesh.abstract_mesh import AXES
from fsharding.testing import run_ranks


def groups(order):
    mesh = fs.make_mesh(replica=2, dp=2, order=order, device="cpu", timeout=timedelta(seconds=20))
    found = {}
    for axes in (("replica",), ("dp",), ("replica", "dp"), ("dp", "replica")):
        group = device_mesh.axis_group(mesh, axes)
        assert group.ranks[group.index] == torch.distributed.get_rank()
        found[axes] = group.ranks, group.terms
    return device_mesh.coordinate(mesh), device_mesh.data_rank_and_size(mesh), found


@pytest.mark.parametrize("order", [AXES, ("dp", "replica", "pp", "ep", "cp", "tp")])
def test_groups_stand_in_the_order_of_their_axes(order):
    results = run_ranks(groups, 4, order)
    rank_of = {(coord["replica"], coord["dp"]): rank for rank, (coord, _, _) in enumerate(results)}
    assert sorted(index for _, (index, count), _ in results) == list(range(4))
    for coord, (index, count), found in results:
        assert (index, count) == (2 * coord["replica"] + coord["dp"], 4)
        assert found[("replica",)][0] == tuple(rank_of[(r, coord["dp"])] for r in (0, 1))
        assert found[("dp",)][0] == tuple(rank_of[(coord["replica"], d)] for d in (0, 1))
        assert found[("replica", "dp")][0] == tuple(rank_of[(r, d)] for r in (0, 1) for d in (0, 1))
        assert found[("dp", "replica")][0] == tuple(rank_of[(r, d)] for d in (0, 1) for r in (0, 1))
        # Sums are taken in one order of coordinates, however the members are listed.
        in_turn = [[ranks[i] for i in terms] for ranks, terms in (found[("replica", "dp")], found[("dp", "replica")])]
        assert in_turn[0] == in_turn[1] == [rank_of[(r, d)] for r in (0, 1) for d in (0, 1)]


def wrong_size():
    with pytest.raises(MeshError) as caught:
        fs.make_mesh(dp=3, device="cpu")
    return str(caught.value)


def test_a_product_that_is_not_the_world():
    for text in run_ranks(wrong_size, 2):
        assert text == "fs.make_mesh got dp=3 (size 3), but the world size is 2.\nUse dp=-1 for the remaining ranks."
