"""A process does not end while other threads of it are at work, unless they go on for ever."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fsharding.mesh import shutdown
from fsharding.mesh.shutdown import let_others_finish
from tests.helpers import slow

ENDS = """
import atexit, threading
import torch
import fsharding as fs
from fsharding.mesh.shutdown import rest_at_exit

atexit.register(lambda: print("alive" if thread.is_alive() else "done", flush=True))
rest_at_exit()
rest_at_exit()
x = torch.rand(600, 600)
thread = threading.Thread(target=lambda: [x @ x for _ in range(6)], daemon=True)
thread.start()
"""


@pytest.fixture
def waits(monkeypatch):
    """The waits of `let_others_finish`, whose clock counts nothing else."""
    found: list[float] = []

    def sleep(seconds):
        found.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(shutdown, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(found)))
    return found


@slow
def test_a_process_waits_for_what_its_threads_do_without_python():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout == "done\n"


def test_it_waits_for_two_quiet_moments():
    looks = iter([True, False, True, False, False])
    let_others_finish(lambda: next(looks))
    assert list(looks) == []


def test_it_does_not_wait_for_ever(waits):
    let_others_finish(lambda: True)
    assert sum(waits) == pytest.approx(1.0, abs=0.1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_thread_that_computes_is_seen(waits):
    x, stop = torch.rand(400, 400), threading.Event()

    def compute():
        while not stop.is_set():
            x @ x

    thread = threading.Thread(target=compute)
    thread.start()
    let_others_finish()
    stop.set()
    thread.join()
    assert sum(waits) == pytest.approx(1.0, abs=0.1)
