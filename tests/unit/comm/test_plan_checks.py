"""What has to hold of plans of buckets, units and reshards: right ones pass, and ones with an error do not."""

from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.comm.bucket import check_bucket, plan_bucket
from fsharding.comm.leaf_wires import UnitWire
from fsharding.comm.reshard_plan import MovedLeaf, check_routes, plan_routes
from fsharding.comm.wires import Plain
from fsharding.transforms.unit_plan import UnitLeaf, plan_unit

MESH = fs.AbstractMesh(("dp", "tp"), (2, 2))


def test_a_bucket_has_each_element_of_a_leaf_once():
    bucket = plan_bucket((((5, 3), 0), ((2, 4), 1), ((0, 2), 0), ((), 0)), (2, 3))
    check_bucket(bucket)
    first, second, *rest = bucket.slots
    wrong = [replace(second, offset=0), replace(second, start=0), replace(second, axis_sizes=(3,))]
    for slot in wrong:
        with pytest.raises(AssertionError):
            check_bucket(replace(bucket, slots=(first, slot, *rest)))
    for lack in ({"width": bucket.width - 1}, {"size": 1}):
        with pytest.raises(AssertionError):
            check_bucket(replace(bucket, **lack))


def test_a_reshard_fills_each_target_once():
    ends = [fs.NamedSharding(MESH, spec) for spec in (fs.P("dp"), fs.P(None, ("tp", "dp")), fs.P())]
    leaves = tuple(MovedLeaf((5, 6), 4, a, b) for a in ends for b in ends)
    plan = plan_routes(leaves, 64)
    check_routes(plan)
    one, *others = plan.rounds
    twice = (*one, one[0])
    for rounds in (tuple(others), (twice, *others), ((replace(one[0], bytes=4096), *one[1:]), *others)):
        with pytest.raises(AssertionError):
            check_routes(replace(plan, rounds=rounds))


def test_a_unit_has_each_leaf_in_one_bucket():
    cut, dtype = fs.NamedSharding(MESH, fs.P("dp")), torch.float32
    plan = plan_unit(tuple(UnitLeaf(cut, shape, dtype, UnitWire(Plain(dtype)), None) for shape in ((4, 2), (6,))))
    assert plan.outline
    (gather,) = plan.gathers
    for gathers in ((gather, gather), (gather._replace(leaves=(0, 2)),)):
        with pytest.raises(AssertionError):
            _ = replace(plan, gathers=gathers).outline
