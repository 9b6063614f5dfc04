"""Saves beside the training: what they leave alone, where their failures show up, and who may write when."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError, ConfigError, DonatedError
from fsharding.checkpoint import background, directory, saving
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal
from tests.checkpoints import at_step, planned, refusal, state_of
from tests.helpers import full, slow


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    background.settle()


@pytest.fixture
def gate(monkeypatch):
    """Holds every save back, once it has begun to write, until the gate is opened."""
    opened, begun = threading.Event(), threading.Event()
    write = saving.commit

    def waiting(target, text, files):
        begun.set()
        assert opened.wait(20)
        write(target, text, files)

    monkeypatch.setattr(saving, "commit", waiting)
    opened.begun = begun
    yield opened
    opened.set()
    background.settle()


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


# ----------------------------------------------------------------------------------------------------------- save_async
def test_the_state_may_change_while_it_is_written(tmp_path, gate):
    state, truth = state_of(planned()), state_of(planned())
    pending = ck.save_async(tmp_path / "a", state, extra=[1])
    for x in fs.tree.leaves(state):
        local_of(x).zero_()
    state.donate()
    assert not pending.done
    assert ck.latest(tmp_path) is None
    gate.set()
    pending.wait()
    assert pending.done
    assert ck.metadata(tmp_path / "a").extra == [1]
    assert_bitwise_equal(ck.load(tmp_path / "a", planned()), truth)


def test_files_are_those_of_a_plain_save(tmp_path):
    ck.save(tmp_path / "a", state_of(planned()))
    ck.save_async(tmp_path / "b", state_of(planned())).wait()
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("call", [ck.save, ck.save_async])
def test_a_second_save_waits_for_the_first(tmp_path, gate, call):
    ck.save_async(tmp_path / "a", at_step(1))
    assert gate.begun.wait(20)
    threading.Timer(0.2, gate.set).start()
    call(tmp_path / "a", at_step(2))
    background.settle()
    assert ck.load(tmp_path / "a", planned()).step == 2


@pytest.mark.parametrize("call", [ck.save, ck.save_async])
def test_a_failure_is_raised_by_the_next_save(tmp_path, monkeypatch, call):
    ck.save(tmp_path / "a", at_step(1))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        pending = ck.save_async(tmp_path / "a", at_step(2))
        while not pending.done:
            time.sleep(0.01)
    text = f"fs.checkpoint.save_async failed.\n  OSError: [Errno 28] No space left on device: '{tmp_path / 'a'}'"
    assert refusal(call, tmp_path / "b", at_step(3)) == text
    assert sorted(os.listdir(tmp_path)) == ["a"]
    assert ck.load(tmp_path / "a", planned()).step == 1
    call(tmp_path / "b", at_step(3))


def test_a_failure_that_was_told_is_not_told_again(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", no_space)
    pending = ck.save_async(tmp_path / "a", at_step(2))
    for _ in range(2):
        assert "No space left" in refusal(pending.wait)
    monkeypatch.undo()
    ck.save(tmp_path / "a", at_step(3))


def test_a_process_that_was_started_during_a_save_keeps_no_lock(tmp_path, monkeypatch):
    lock, started = directory.lock_alone, []

    def locked(fd):
        done = lock(fd)
        started.append(subprocess.Popen(["sleep", "60"], pass_fds=(fd,)))
        return done

    monkeypatch.setattr(directory, "lock_alone", locked)
    with ExitStack() as stack:
        stack.callback(lambda: [child.kill() or child.wait() for child in started])
        ck.save(tmp_path / "a", at_step(1))
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", no_space)
            assert "No space left" in refusal(ck.save, tmp_path / "a", at_step(2))
        ck.save(tmp_path / "a", at_step(3))
        assert len(started) == 5, "locks of what is written, and of what is replaced"
        assert ck.load(tmp_path / "a", planned()).step == 3


def test_what_can_be_known_is_raised_at_once(tmp_path):
    state = state_of(planned())
    assert "cannot save 1 leaves" in refusal(ck.save_async, tmp_path / "a", state.replace(opt_state={"x": 1}))
    state.donate()
    with pytest.raises(DonatedError):
        ck.save_async(tmp_path / "a", state)


PROGRAM = """
    import os, sys
    from pathlib import Path
    from fsharding import checkpoint as ck
    from tests.checkpoints import at_step
    if __name__ == "__main__":
        sys.stdout.write("not flushed")
        if "fail" in sys.argv:
            def fail(*args): raise OSError(28, "No space left on device")
            os.fsync = fail
        pending = ck.save_async(sys.argv[1], at_step(5))
        if "wait" in sys.argv:
            pending.wait()
        if "raise" in sys.argv:
            raise KeyError("mine")
"""


def run_program(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    call = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "a"), *args]
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=100)


@full
def test_the_end_of_the_process_waits(tmp_path):
    done = run_program(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "not flushed", "")
    assert ck.load(tmp_path / "a", planned()).step == 5


@full
def test_a_failure_at_the_end_of_the_process_is_its_exit_status(tmp_path):
    done = run_program(tmp_path, "fail")
    assert (done.returncode, done.stdout) == (1, "not flushed")
    full_disk = f"OSError: [Errno 28] No space left on device: '{tmp_path / 'a'}'"
    assert done.stderr == f"CheckpointError: fs.checkpoint.save_async failed.\n  {full_disk}\n"
    assert os.listdir(tmp_path) == ["program.py"]
    done = run_program(tmp_path, "fail", "raise")
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "No space left on device" in done.stderr


# ----------------------------------------------------------------------------------------------------------- two writers
def test_two_threads_that_write_one_target(tmp_path, gate):
    ck.save_async(tmp_path / "a", at_step(1))
    assert gate.begun.wait(20)
    text = refusal(ck.saving.plan_save(tmp_path / "a", at_step(2)).run)
    assert text == (
        f"fsharding cannot write {tmp_path / 'a'}: another save is writing it.\nWait for it, or pass a different path."
    )
    assert os.path.isdir(tmp_path / ".a.partial")
    gate.set()
    background.settle()
    assert ck.load(tmp_path / "a", planned()).step == 1
    assert os.listdir(tmp_path) == ["a"]


WRITER = """
    import sys, time
    from fsharding import checkpoint as ck
    from fsharding.base.errors import CheckpointError
    from tests.checkpoints import at_step
    if __name__ == "__main__":
        first, count = int(sys.argv[2]), 0
        state = at_step(first)
        print("ready", flush=True)
        sys.stdin.readline()
        texts = set()
        tries = 0
        while tries < 40 or not count:  # on a loaded machine the other may be at it in each of 40
            tries += 1
            try:
                ck.save(sys.argv[1], state)
                count += 1
            except CheckpointError as error:
                texts.add(str(error).splitlines()[0])
        print(count, *texts, sep="\\n")
"""


@slow
def test_two_processes_that_write_one_target(tmp_path):
    (tmp_path / "writer.py").write_text(textwrap.dedent(WRITER))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    target = tmp_path / "x" / "a"
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "writer.py"), str(target), str(step)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for step in (1, 2)
    ]  # fmt: skip
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in started]
    for output in outputs:
        assert int(output[0]) > 0
        assert set(output[1:]) <= {f"fs.checkpoint.save cannot write {target}: another save is writing it."}
    assert os.listdir(target.parent) == ["a"]
    assert int(ck.load(target, planned()).step) in (1, 2)


def test_a_directory_that_goes_while_it_is_looked_at(tmp_path, monkeypatch):
    """Another save has it when this one would make it, and is done with it right after that."""
    real, times = os.mkdir, []

    def mkdir(path, *args, **kwargs):
        if str(path).endswith(".a.partial") and not times:
            times.append(path)
            raise FileExistsError(path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    ck.save(tmp_path / "a", at_step(4))
    assert times and os.listdir(tmp_path) == ["a"]


def test_a_lock_ends_with_its_holder(tmp_path):
    def hold() -> tuple[ExitStack, Path]:
        held = ExitStack()
        return held, held.enter_context(directory.partial_checkpoint(tmp_path / "a"))

    held, path = hold()
    (path / "__0_0.distcp").write_text("x")
    with pytest.raises(CheckpointError, match="another save is writing it"):
        hold()
    held.close()
    ck.save(tmp_path / "a", at_step(3))
    held, path = hold()
    os.rename(path, tmp_path / "elsewhere")
    another, path = hold()
    stop = KeyboardInterrupt()
    assert not held.__exit__(KeyboardInterrupt, stop, None)
    assert path.is_dir()
    assert not another.__exit__(KeyboardInterrupt, stop, None)
    assert sorted(os.listdir(tmp_path)) == ["a", "elsewhere"]


# ---------------------------------------------------------------------------------------------------------- Checkpointer
def steps_in(path: Path) -> list[str]:
    return sorted(os.listdir(path), key=lambda name: (len(name), name))


@pytest.mark.parametrize("background", [True, False])
def test_checkpointer_keeps_the_newest(tmp_path, background):
    with ck.Checkpointer(tmp_path / "c", keep=2, every=2, background=background) as checkpointer:
        assert checkpointer.latest() is None
        assert "finds no complete checkpoint in" in refusal(checkpointer.load, planned())
        assert [checkpointer.after_step(at_step(n), {"n": n}) for n in range(1, 9)] == [False, True] * 4
        checkpointer.wait()
        assert steps_in(tmp_path / "c") == ["6", "8"]
        assert checkpointer.load(planned()).step == 8
        assert ck.metadata(checkpointer.latest()).extra == {"n": 8}
        checkpointer.save(at_step(3))
    assert steps_in(tmp_path / "c") == ["3", "8"]


def test_checkpointer_keeps_all(tmp_path):
    with ck.Checkpointer(tmp_path, keep=None) as checkpointer:
        for n in range(4):
            checkpointer.after_step(at_step(n))
    assert steps_in(tmp_path) == ["0", "1", "2", "3"]


def test_checkpointer_removes_nothing_but_its_own(tmp_path):
    for name in ("best", "1", "2", "notes"):
        ck.save(tmp_path / name, at_step(1 if name != "2" else 2))
    (tmp_path / "notes" / ".metadata").unlink()
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "mine").write_text("x")
    (tmp_path / "-1").write_text("x")
    (tmp_path / ".1.retired").mkdir()
    with ck.Checkpointer(tmp_path, keep=1, background=False) as checkpointer:
        checkpointer.save(at_step(9))
    assert sorted(os.listdir(tmp_path)) == ["-1", "0", "9", "best", "notes"]


def test_old_ones_stay_until_the_new_one_is_complete(tmp_path, monkeypatch):
    checkpointer = ck.Checkpointer(tmp_path, keep=1, background=False)
    checkpointer.save(at_step(1))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        assert "No space left" in refusal(checkpointer.save, at_step(2))
    assert steps_in(tmp_path) == ["1"]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        checkpointer.save(at_step(3))
    assert steps_in(tmp_path) == ["3", ".1.retired"]
    assert checkpointer.latest() == tmp_path / "3"
    checkpointer.save(at_step(4))
    assert steps_in(tmp_path) == ["4"]


def test_checkpointer_does_not_hide_what_was_raised_inside(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", no_space)

    def train():
        with ck.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(at_step(1))
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        train()
    assert "No space left" in caught.value.__notes__[0]
    with pytest.raises(CheckpointError, match="No space left"), ck.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(at_step(1))


@pytest.mark.parametrize("numbers", [{"keep": 0}, {"every": 0}, {"keep": -1, "every": -1}])
def test_checkpointer_numbers(tmp_path, numbers):
    text = refusal(ck.Checkpointer, tmp_path, kind=ConfigError, **numbers)
    rows = "".join(f"  {name}={value}\n" for name, value in numbers.items())
    assert text == (
        f"fs.checkpoint.Checkpointer cannot keep fewer than one.\n{rows}"
        "Pass numbers of at least 1; keep=None keeps all."
    )


def test_a_save_clears_up_before_the_next_begins(tmp_path, monkeypatch):
    """Its directory is in its place, its lock too: what it set aside is its own until it is done."""
    ck.save(tmp_path / "a", at_step(1))
    lock, locks = directory.lock_alone, []
    monkeypatch.setattr(directory, "lock_alone", lambda fd: locks.append(fd) or lock(fd))
    with directory.partial_checkpoint(tmp_path / "a") as path:
        os.rename(tmp_path / "a", tmp_path / "b")
        os.rename(path, tmp_path / "a")
        with pytest.raises(CheckpointError, match="another save is writing it"):
            ck.save(tmp_path / "a", at_step(2))
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
        held = os.dup(locks[0])  # as a process has it that was forked meanwhile
    ck.save(tmp_path / "a", at_step(2))
    os.close(held)
    assert ck.load(tmp_path / "a", planned()).step == 2


def test_a_file_system_that_knows_no_locks(tmp_path, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory.fcntl, "flock", flock)
    ck.save(tmp_path / "a", at_step(1))
    ck.save(tmp_path / "a", at_step(2))
    assert ck.load(tmp_path / "a", planned()).step == 2
