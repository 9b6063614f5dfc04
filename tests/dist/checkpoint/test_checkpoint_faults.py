"""Checkpoints when things end in the middle: ranks that are killed, disks that are full, saves beside the training."""

import errno
import os
import random
import resource
import shutil
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import RankError
from fsharding.checkpoint import background, directory
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.checkpoints_on_ranks import OPERATIONS, answer, numbered, planned, portions, whole
from tests.helpers import full, small_disk


# ------------------------------------------------------------------------------------------------------------- killed
def save_until_killed(path, first, delay, victims):
    """Saves one state after the other over the one before; rank 0 notes which are complete."""
    layout = planned("zero3")
    states = [numbered(first + i, layout) for i in range(4)]
    ck.save(path, states[0])
    dist.barrier()
    if dist.get_rank() in victims:
        threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    for state in states * 1000:
        ck.save(path, state)
        if dist.get_rank() == 0:
            note = path.parent.parent / "complete"
            note.with_suffix(".new").write_text(str(int(state.step)))
            note.with_suffix(".new").rename(note)  # this rank may be killed while it writes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [30, pytest.param(200, marks=full)])
def test_ranks_killed_at_any_moment(tmp_path, count):
    draw, layout, path = random.Random(count), planned("zero3"), tmp_path / "x" / "a"
    for number in range(count):
        victims = ((0,), (1,), (0, 1))[number % 3]
        with pytest.raises(RankError, match="died of SIGKILL"):
            run_ranks(save_until_killed, 2, path, 10 * number, draw.uniform(0.0, 0.15), victims, timeout=60.0)
        found = ck.load(path, layout)
        step = int(found.step)
        assert 10 * number <= step < 10 * number + 4
        assert_bitwise_equal(found, numbered(step, layout))
        newest = ck.latest(path.parent)
        assert newest in (path, path.parent / ".a.replaced")
        assert ck.metadata(newest).step == step
        if (tmp_path / "complete").exists():
            complete = int((tmp_path / "complete").read_text())
            following = 10 * number if complete == 10 * number + 3 else complete + 1
            assert step in (complete, following)
            (tmp_path / "complete").unlink()
    ck.save(path, numbered(7, layout))
    assert os.listdir(path.parent) == ["a"]


# --------------------------------------------------------------------------------------------------------- no more space
def save_to_a_full_disk(path):
    state = numbered(1)
    ck.save(path / "a", state)
    texts = []
    for call in (ck.save, lambda *args: ck.save_async(*args).wait()):
        texts.append(answer(call, path / "a", state.replace(step=torch.tensor(2))))
    return texts, int(ck.load(path / "a", state.layout).step)


def test_a_file_system_that_is_full(tmp_path):
    with small_disk(tmp_path, 112):  # room for one checkpoint and a half
        for texts, step in run_ranks(save_to_a_full_disk, 2, tmp_path):
            for text in texts:
                assert f"OSError: [Errno 28] No space left on device: '{tmp_path}/" in text
            assert step == 1
        assert os.listdir(tmp_path) == ["a"]


def save_async_with_limits(path, rank):
    """A rank whose files may not be larger than 2000 bytes, which only the thread meets."""
    state = numbered(1)
    ck.save(path / "a", state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        pending = ck.save_async(path / "a", state.replace(step=torch.tensor(2)))
        while not pending.done:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    texts = [answer(ck.save, path / "a", state), answer(pending.wait)]
    return texts, int(ck.load(path / "a", state.layout).step)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_the_background_is_told_on_all_ranks(tmp_path, rank):
    for texts, step in run_ranks(save_async_with_limits, 2, tmp_path, rank):
        assert texts[0] == texts[1]
        assert texts[0].startswith(
            f"fs.checkpoint.save_async failed on 1 of 2 ranks.\n  rank {rank}: OSError: [Errno 27]"
        )
        assert step == 1
    assert os.listdir(tmp_path) == ["a"]


# ------------------------------------------------------------------------------------------- each file operation fails
class Faults:
    """Counts the operations on files while it is armed, and lets one of them fail: EIO, or ENOSPC."""

    def __init__(self, patch):
        self.left, self.failed = -1, ""
        for module, names in OPERATIONS.items():
            for name in names:
                patch.setattr(module, name, self.counting(f"{module.__name__}.{name}", getattr(module, name)))

    def counting(self, name, call):
        def counted(*args, **kwargs):
            self.left -= self.left >= 0 and not self.failed
            if self.left == -1 and self.armed and not self.failed:
                self.failed = name
                if name == "os.close":
                    call(*args, **kwargs)
                raise OSError(
                    *((errno.EIO, "Input/output error") if name != "os.write" else (errno.ENOSPC, "No space left"))
                )
            return call(*args, **kwargs)

        return counted

    @contextmanager
    def at(self, number):
        """Inside, operation `number` fails; none for -1."""
        self.left, self.failed, self.armed = number, "", number >= 0
        try:
            yield
        finally:
            self.armed, self.left = False, -1

    armed = False


def large(step):
    """A state of leaves of 4 MiB, which pass through no buffer, and small ones."""
    draws = {"w": fs.random.normal(fs.random.key(step), (1 << 20,)), "b": fs.random.zeros((3,))}
    layout = fs.plan_layout(draws, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    return state.replace(step=torch.tensor(step))


def fail_at_each_operation(path, background, where):
    """Which operations failed, in order; after each, the checkpoint is the old one or the new one, whole."""
    failed, step = [], 1
    save = (lambda *args: ck.save_async(*args).wait()) if background else ck.save
    ck.save(path / "a", (states := [large(0), large(1)])[1])
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        while True:
            new = states[(step + 1) % 2].replace(step=torch.tensor(step + 1))
            with faults.at(len(failed) if dist.get_rank() == where else -1):
                text = answer(save, path / "a", new)
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, faults.failed)
            if not told[where]:
                assert text == "done"
                return failed
            failed.append(told[where])
            found = ck.load(path / "a", new.layout)
            assert int(found.step) in (step, step + 1), (told[where], int(found.step))
            step = int(found.step)
            assert_bitwise_equal(found.params, states[step % 2].params)
            # `shutil.rmtree` closes a directory again whose close has failed.
            words = ("Input/output error", "No space left", *(["Bad file descriptor"] * (told[where] == "os.close")))
            assert text == "done" or any(word in text for word in words), (told[where], text)
            # Only what is cleared up after the new one has taken its place may fail without a word.
            assert text != "done" or step == int(new.step), told[where]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_any_file_operation_may_fail(tmp_path, background, ranks):
    for where in range(ranks):
        failed = run_ranks(fail_at_each_operation, ranks, tmp_path / str(where), background, where, timeout=100.0)
        assert len({tuple(each) for each in failed}) == 1
        assert {"os.open", "os.write", "os.fsync", "os.close"} <= {*failed[0]}
        assert len(failed[0]) > (40 if where == 0 else 5), failed[0]
        ck.save(tmp_path / str(where) / "b", large(0)) if ranks == 1 else None
        assert not [name for name in os.listdir(tmp_path / str(where)) if name.startswith(".")]


def train_with_a_full_disk(path, background):
    """Steps that were taken while every save failed; the limit is that of the process, on every file."""
    losses, texts = [], []
    state, step = (
        large(0),
        fs.make_train_step(lambda p, b: (fs.gather_unit(p)["w"].sum() * b["x"].sum(), 1), fs.sgd(0.1)),
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    keeper = ck.Checkpointer(path, every=1, background=background)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for _ in range(6):
            state, metrics = step(state, {"x": torch.ones(2)})
            losses.append(float(metrics.loss))
            texts.append(answer(keeper.after_step, state))
        texts.append(answer(keeper.close))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    keeper.save(state)
    keeper.close()
    return len(losses), [text for text in texts if text != "done"], int(keeper.load(state.layout).step)


@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_though_no_save_fits(tmp_path, background):
    for steps, texts, step in run_ranks(train_with_a_full_disk, 1, tmp_path, background):
        assert steps == step == 6
        assert len(texts) >= 3
        assert all("OSError: [Errno 27] File too large" in text for text in texts)
    assert os.listdir(tmp_path) == ["6"]


def save_below_a_file(path):
    return answer(ck.save, path / "file" / "a", numbered(1))


def test_a_path_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("mine")
    for text in run_ranks(save_below_a_file, 2, tmp_path):
        assert text.startswith("fs.checkpoint.save failed on 1 of 2 ranks.\n  rank 0: ")
        assert "NotADirectoryError" in text or "FileExistsError" in text
    assert (tmp_path / "file").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------ beside the training
def train_on(state):
    """What a step with donation does to its input, with a collective of its own meanwhile."""
    for x in fs.tree.leaves(state):
        local_of(x).zero_()
    dist.all_reduce(torch.ones(10))
    return state.donate()


def save_beside_training(path):
    layout = planned("zero1_bf16")
    kept = []
    for n in range(4):
        state = numbered(n, layout)
        kept.append(portions(state))
        ck.save_async(path / str(n), state)
        train_on(state)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))
    background.settle()
    return [(kept[n], portions(ck.load(path / str(n), layout))) for n in range(4)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_goes_on_while_it_is_saved(tmp_path, ranks):
    for rank, pairs in enumerate(run_ranks(save_beside_training, ranks, tmp_path)):
        for n, (before, after) in enumerate(pairs):
            for path in (path for path in before if not path.startswith("params")):
                assert torch.equal(before[path][2], after[path][2]), (rank, n, path)


def run_with_checkpointer(path):
    layout = planned("zero2")
    with ck.Checkpointer(path, keep=2, every=3) as checkpointer:
        for n in range(1, 13):
            checkpointer.after_step(numbered(n, layout), extra={"n": n})
        found = checkpointer.load(planned("zero3"))
    return int(found.step), portions(found), portions(numbered(12, planned("zero3")))


def test_checkpointer_on_ranks(tmp_path):
    for step, found, want in run_ranks(run_with_checkpointer, 2, tmp_path / "c"):
        assert step == 12
        assert_bitwise_equal({p: x[2] for p, x in found.items()}, {p: x[2] for p, x in want.items()})
    assert sorted(os.listdir(tmp_path / "c")) == ["12", "9"]


def two_saves(path):
    """Two saves of one target, of which the first meets another one there."""
    state = numbered(1)
    ck.save(path / "a", state)
    jobs = [ck.saving.plan_save(path / "a", state.replace(step=torch.tensor(n))) for n in (2, 3)]
    texts = ["", ""]

    def run(i):
        texts[i] = answer(jobs[i].run)

    with ExitStack() as held:
        if dist.get_rank() == 0:
            held.enter_context(directory.partial_checkpoint(path / "a"))
        dist.barrier()
        run(0)
        dist.barrier()
    dist.barrier()
    run(1)
    return texts, int(ck.load(path / "a", state.layout).step)


def test_a_target_that_another_save_holds(tmp_path):
    for texts, step in run_ranks(two_saves, 2, tmp_path):
        assert "another save is writing it" in texts[0]
        assert texts[1] == "done"
        assert step == 3
    assert os.listdir(tmp_path) == ["a"]


# ------------------------------------------------------------------------------------------------------------ some leaves
def load_some(path):
    result = {}
    for name in ("zero3", "tp", "zero0"):
        layout = planned(name)
        found = ck.load_leaves(path, ["params.table", "opt_state.states.1.groups.decayed.mu", "step"], layout)
        state = ck.load(path, layout)
        assert sorted(found) == [
            "opt_state.states.1.groups.decayed.mu.blocks.w",
            "opt_state.states.1.groups.decayed.mu.odd.1",
            "opt_state.states.1.groups.decayed.mu.table",
            "params.table",
            "step",
        ]
        assert_bitwise_equal(found["params.table"], state.params["table"])
        mu = state.opt_state.states[1].groups["decayed"].mu["table"]
        assert_bitwise_equal(found["opt_state.states.1.groups.decayed.mu.table"], mu)
        whole_leaf = ck.load_leaves(path, "params.table")["params.table"]
        result[name] = whole_leaf
    return result, answer(ck.load_leaves, path, "params.tabel", planned("zero3"))


def save_numbered(path):
    state = numbered(5)
    ck.save(path, state)
    return portions(state)


def test_some_leaves_on_ranks(tmp_path):
    saved = whole(run_ranks(save_numbered, 4, tmp_path / "a"))
    for found, text in run_ranks(load_some, 2, tmp_path / "a"):
        for leaf in found.values():
            assert torch.equal(leaf, saved["params.table"])
        assert "Did you mean 'params.table'?" in text
    others = [name for name in os.listdir(tmp_path / "a") if name.endswith(".distcp")]
    assert len(others) == 4
    # What is not needed is not read, but it has to be there.
    data = Path(tmp_path / "a" / others[0]).read_bytes()
    shutil.rmtree(tmp_path / "a" / others[0], ignore_errors=True)
    (tmp_path / "a" / others[0]).unlink()
    assert f"{others[0]} is missing" in answer(ck.load_leaves, tmp_path / "a", "step")
    (tmp_path / "a" / others[0]).write_bytes(data)
    assert ck.load_leaves(tmp_path / "a", "step")["step"] == 5


def replan(path):
    layout = planned("tp")
    ck.save(path, numbered(2, layout))
    again = ck.layout_of(ck.metadata(path), layout.mesh)
    assert again == layout
    return portions(ck.load(path, again)), portions(numbered(2, layout))


def test_a_layout_from_the_manifest_alone_loads_it(tmp_path):
    for found, want in run_ranks(replan, 4, tmp_path / "a"):
        for path in want:
            assert torch.equal(found[path][2], want[path][2])
