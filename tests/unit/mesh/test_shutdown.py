"""A process does not end while other threads of it are at work, unless they go on for ever."""

import subprocess
import sys
import threading
import time

import pytest
import torch

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


@slow
def test_a_process_waits_for_what_its_threads_do_without_python():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "done\n"


def test_it_waits_for_two_quiet_moments():
    looks = iter([True, False, True, False, False])
    let_others_finish(lambda: next(looks))
    assert list(looks) == []


def test_it_does_not_wait_for_ever():
    began = time.monotonic()
    let_others_finish(lambda: True)
    assert 1.0 <= time.monotonic() - began < 5.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_thread_that_computes_is_seen():
    x, stop = torch.rand(400, 400), threading.Event()

    def compute():
        while not stop.is_set():
            x @ x

    thread = threading.Thread(target=compute)
    thread.start()
    began = time.monotonic()
    let_others_finish()
    stop.set()
    thread.join()
    assert time.monotonic() - began >= 1.0
