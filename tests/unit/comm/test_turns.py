"""Two calls by turns: the order of what they do, their failures, and where they run one after the other."""

import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsharding.comm.events import following
from fsharding.comm.turns import Partner, wait_in_turn
from fsharding.mesh.device_mesh import Group

PAIR, ALONE = Group((0, 1), 0, None, axes=("ep",)), Group((0,), 0, None)


class Ready:
    """The handle of something that is there."""

    def wait(self, timeout=None, *, into=None):
        return 7


def calls(log, waits=(2, 2), seconds=(0.0, 0.0), fails=(), group=PAIR):
    """Two calls that wait so often for a collective, and note each piece of work between."""

    def call(side):
        for i in range(waits[side] + 1):
            time.sleep(seconds[side])
            log.append(f"{'ab'[side]}{i}")
            if (side, i) in fails:
                raise ValueError(f"call {side}")
            if i < waits[side]:
                assert wait_in_turn(Ready(), group, "psum") == 7

    return lambda: call(0), lambda: call(1)


@pytest.fixture
def partner():
    partner = Partner(torch.device("cpu"))
    yield partner
    partner.close()
    assert not any(thread.name == "fsharding-partner" for thread in threading.enumerate())


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01)])
def test_one_computes_while_the_other_waits_whatever_takes_longer(partner, seconds):
    log = []
    for _ in range(2):
        partner.run(*calls(log, seconds=seconds))
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"] * 2


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [((0, 2), "a0 b0 b1 b2"), ((2, 0), "a0 b0 a1 a2"), ((1, 3), "a0 b0 a1 b1 b2 b3"), ((3, 1), "a0 b0 a1 b1 a2 a3")],
)
def test_what_is_left_of_one_runs_by_itself(partner, waits, wanted):
    log = []
    partner.run(*calls(log, waits))
    assert log == wanted.split()


def test_events_show_what_runs_beside_a_collective(partner):
    with following() as events:
        partner.run(*calls([], (1, 1)))
    assert [*map(str, events)] == ["start psum over ep", "start psum over ep", "wait psum over ep", "wait psum over ep"]


def test_a_group_of_one_has_nothing_to_wait_for(partner):
    log = []
    partner.run(*calls(log, group=ALONE))
    assert log == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_outside_of_a_pair_a_wait_is_a_wait():
    assert wait_in_turn(Ready(), PAIR, "psum") == 7


@pytest.mark.parametrize(
    ("fails", "wanted"),
    [
        ([(0, 0)], "a0"),
        ([(0, 1)], "a0 b0 a1"),
        ([(0, 2)], "a0 b0 a1 b1 a2"),
        ([(1, 0)], "a0 b0"),
        ([(1, 2)], "a0 b0 a1 b1 a2 b2"),
    ],
)
def test_where_one_fails_the_other_is_stopped(partner, fails, wanted):
    log = []
    with pytest.raises(ValueError, match=f"^call {fails[0][0]}$"):
        partner.run(*calls(log, fails=fails))
    assert log == wanted.split()
    log.clear()
    partner.run(*calls(log, (1, 1)))
    assert log == ["a0", "b0", "a1", "b1"], "and another pair runs as before"


class Mode(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode])
def test_modes_belong_to_a_thread_so_calls_run_one_after_the_other(partner, mode):
    log = []
    with mode():
        assert not partner.can_run()
        partner.run(*calls(log))
    assert log == ["a0", "a1", "a2", "b0", "b1", "b2"] and partner.can_run()


def test_the_other_thread_computes_as_this_one(partner):
    seen = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            partner.run(lambda: None, lambda: seen.append(torch.is_grad_enabled()))
    assert seen == [True, False]
