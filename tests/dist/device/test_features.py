"""Every feature of a train step in every place, on the simulated device: the bits of the CPU, in safe order, without reads.

Guarantee: values depend neither on the device nor on when its streams run.
"""

from dataclasses import replace

import pytest

from tests.features import FEATURES, PLACES, train
from tests.helpers import full
from tests.on_device import SIM, assert_as_on_cpu, device_ranks, needs_compiler, on_device

pytestmark = [pytest.mark.timeout(1300), needs_compiler]

CASES = [(place, feature) for place in PLACES for feature in FEATURES]
ROUTED = {"moe.py", "router.py", "grouped_matmul.py"}
"""Files that read how many tokens go to which expert, as long as none has a capacity."""


@pytest.fixture(scope="module")
def pool():
    with device_ranks(2) as ranks:
        yield ranks


def run(place, feature, folder, device):
    what = FEATURES[feature]
    case = replace(PLACES[place], **dict(what.how))
    case = replace(case, precision=replace(case.precision, sums="ordered"))
    with on_device(device, seed=1) as watch:
        rows, state = train(case, what, folder, device, watch.step)
        return watch.seen([rows], state)


def kept(number):
    """One in three of the cells: each row and each column of the table has some of them."""
    return (number // len(FEATURES) + number % len(FEATURES)) % 3 == 0


@pytest.mark.parametrize(
    ("place", "feature"),
    [pytest.param(*case, id="-".join(case), marks=[] if kept(i) else full) for i, case in enumerate(CASES)],
)
def test_a_feature_on_the_device(pool, place, feature, tmp_path):
    here = pool.run(run, place, feature, str(tmp_path / "here"), "cpu")
    there = pool.run(run, place, feature, str(tmp_path / "there"), SIM)
    assert_as_on_cpu(here, there, reads=place == "ep")
    assert {line.partition(":")[0] for run in there for line in run.reads} <= ROUTED
