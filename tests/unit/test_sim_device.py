"""The directory of the simulated device is built once, and after a build that was killed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.sim_device import ROOT, build_once

# A build that is in the middle of its work until it is killed; a lock of torch's own is beside it.
HANGS = """
import pathlib, signal, sys
from tests.sim_device import build_once

def build(folder):
    (folder / "lock").touch()
    (folder / "library").write_text("ha")
    print("begun", flush=True)
    signal.pause()

build_once(pathlib.Path(sys.argv[1]), build)
"""


def test_a_build_that_was_killed_is_done_again_and_once(tmp_path: Path):
    folder, builds = tmp_path / "builds" / "one", list[Path]()

    def build(own: Path) -> None:
        builds.append(own)
        (own / "library").write_text("whole")

    with (
        subprocess.Popen([sys.executable, "-c", HANGS, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed,
        ThreadPoolExecutor(3) as pool,
    ):
        assert killed.stdout is not None and killed.stdout.readline() == "begun\n"
        waiting = [pool.submit(build_once, folder, build) for _ in range(3)]
        assert not builds
        killed.kill()
        for one in waiting:
            one.result(timeout=60)
    assert len(builds) == 1
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("library", "whole")]
