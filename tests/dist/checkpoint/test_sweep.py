"""Sweeps: processes killed at every moment, and files of several checkpoints mixed: nothing is lost, nothing is silent.

Each test prints what it counted; `pytest -s` shows it. The long versions are marked full.
"""

import fcntl
import io
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError, RankError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.checkpoints_on_ranks import OPERATIONS, numbered, planned
from tests.helpers import full


def killed_in(seconds):
    """This process, after some time, wherever it is then."""
    threading.Thread(target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()


# ------------------------------------------------------------------------------------------ a save that ends in the middle
def saves_until_killed(folder, first, seconds, victims, background, apart):
    """Saves one state after the other; rank 0 notes the last one of which `save` has said that it is in its place."""
    layout, keeper = planned("zero3"), ck.Checkpointer(folder / "ckpt", keep=2, background=background)
    dist.barrier()
    if dist.get_rank() in victims:
        killed_in(seconds)
    for step in range(first, first + 10_000):
        state = numbered(step, layout)
        if apart:
            keeper.save(state)
        elif background:
            ck.save_async(folder / "ckpt" / "a", state)
        else:
            ck.save(folder / "ckpt" / "a", state)
        if dist.get_rank() == 0:
            (folder / "note.new").write_text(str(step - background))  # the one before is settled by this one
            (folder / "note.new").rename(folder / "note")  # this rank may be killed while it writes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, pytest.param(25, marks=full)])
@pytest.mark.parametrize("ranks", [pytest.param(2), pytest.param(4, marks=full)])
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("apart", [False, True], ids=["same_path", "new_steps"])
def test_no_checkpoint_is_lost_when_ranks_are_killed(tmp_path, apart, background, ranks, count):
    draw, layout, first, seen = random.Random(f"{ranks}{background}{apart}"), planned("zero3"), 1, Counter()
    for number in range(count):
        victims = ((0,), (ranks - 1,), tuple(range(ranks)))[number % 3]
        seconds = draw.uniform(0.05, 0.3 * ranks)  # a save of more ranks takes longer
        with pytest.raises(RankError, match="died of SIGKILL"):
            run_ranks(saves_until_killed, ranks, tmp_path, first, seconds, victims, background, apart, timeout=60.0)
        noted = int((tmp_path / "note").read_text()) if (tmp_path / "note").exists() else 0
        newest = ck.latest(tmp_path / "ckpt")
        found = ck.load(newest, layout) if newest is not None else None
        step = 0 if found is None else int(found.step)
        assert step >= noted, f"kill {number}: step {noted} was in its place, and step {step} is the newest"
        if found is not None:
            assert_bitwise_equal(found, numbered(step, layout))
        seen["kills"], seen["newer than noted"] = seen["kills"] + 1, seen["newer than noted"] + (step > noted)
        seen["saves"], first = seen["saves"] + step + 1 - first, step + 1
    print(f"\n{ranks} ranks: {dict(seen)}; 0 lost, 0 silent")
    assert count == 1 or seen["saves"] > 0, "every kill came before the first save was complete"
    ck.save(tmp_path / "ckpt" / ("a" if not apart else str(first)), numbered(first, layout))
    assert not [name for name in os.listdir(tmp_path / "ckpt") if name.startswith(".")]


def at_operation(number, call):
    """In a child, which is killed when it begins an operation on files; whether it came so far."""
    if not (child := os.fork()):
        left = number

        def counting(operation):
            def counted(*args, **kwargs):
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return operation(*args, **kwargs)

            return counted

        for module, names in OPERATIONS.items():
            for name in names:
                setattr(module, name, counting(getattr(module, name)))
        try:
            call()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("apart", [False, True], ids=["same_path", "new_steps"])
def test_a_process_killed_at_each_file_operation(tmp_path, apart):
    layout = planned("zero3")
    states = [numbered(step, layout) for step in (1, 2)]
    kills, kept = 0, Counter()
    while True:
        shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
        ck.save(tmp_path / "ckpt" / ("1" if apart else "a"), states[0])
        if not at_operation(kills, lambda: ck.save(tmp_path / "ckpt" / ("2" if apart else "a"), states[1])):
            break
        kills += 1
        found = ck.load(ck.latest(tmp_path / "ckpt"), layout)
        kept[step := int(found.step)] += 1
        assert_bitwise_equal(found, states[step - 1])
        if apart:
            assert_bitwise_equal(ck.load(tmp_path / "ckpt" / "1", layout), states[0])
        else:
            assert_bitwise_equal(ck.load(tmp_path / "ckpt" / "a", layout), states[step - 1])
    print(f"\n{kills} kills: {kept[1]} times the old one is there, {kept[2]} times the new one; 0 lost, 0 silent")
    assert kills > 40 and kept[1] > 20 and kept[2] >= 1
    assert {os, io, fcntl} == {*OPERATIONS}


# ------------------------------------------------------------------------------------------------------ who was killed
CALLS = {
    "save": lambda path, state: fs.checkpoint.save(path, state),
    "load": lambda path, state: fs.checkpoint.load(path, state.layout),
    "make_mesh": lambda path, state: fs.make_mesh(device="cpu", dp=3),
}


def calls_until_killed(folder, call, victim, seconds):
    """One call again and again, until a rank is killed; the others write what they get."""
    state, path = numbered(1), Path(folder, "ckpt")
    fs.checkpoint.save(path, state)
    dist.barrier()
    if dist.get_rank() == victim:
        killed_in(seconds)
    try:
        for _ in range(10_000):
            CALLS[call](path, state)
    except (RankError, CheckpointError) as error:
        Path(folder, f"told-{dist.get_rank()}").write_text(f"{error}")
        os._exit(1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, pytest.param(12, marks=full)])
@pytest.mark.parametrize("call", CALLS)
def test_survivors_name_the_rank_that_was_killed(tmp_path, call, count):
    draw = random.Random(call)
    for number in range(count):
        victim, folder = (number + 1) % 3, tmp_path / str(number)
        folder.mkdir()
        with patch("fsharding.testing.ranks._GRACE", 30.0), pytest.raises(RankError, match="died of SIGKILL"):
            run_ranks(calls_until_killed, 3, str(folder), call, victim, draw.uniform(0.0, 0.3), timeout=60.0)
        told = {int(path.name[-1]): path.read_text() for path in folder.glob("told-*")}
        assert {*told} == {0, 1, 2} - {victim}, f"kill {number}: all others end with an error of ours"
        for rank, text in told.items():
            assert re.search(rf" lost rank {victim}\b", text.split("\n")[0]), (
                f"kill {number} of rank {victim}, on {rank}: {text}"
            )
    print(f"\n{call}: {count} kills, {2 * count} survivors, all of them name the rank")


# ------------------------------------------------------------------------------------------------------------ mixtures
def save_all(folder, name, first):
    layout = planned("zero3")
    ck.save(folder / name, numbered(first, layout).replace(step=torch.tensor(7)))


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=full)])
def test_mixed_checkpoints_are_never_loaded(tmp_path, count):
    """Files of twins (one step, one shape, other values), of another number of ranks, cut, and under other names."""
    for name, ranks, first in (("a", 2, 1), ("b", 2, 2), ("c", 4, 3)):
        run_ranks(save_all, ranks, tmp_path, name, first)
    sources = {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in tmp_path.iterdir()}
    layout, draw, mixed = planned("zero3"), random.Random(count), tmp_path / "mixed"
    truths = [ck.load(tmp_path / name, layout) for name in "abc"]
    seen = Counter()
    for _ in range(count):
        files = dict(sources[draw.choice("abc")])
        changes = draw.sample(["file", "file", "cut", "twice", "manifest", "gone"], draw.randint(1, 2))
        for change in changes:
            name, other = draw.choice([*files]), sources[draw.choice("abc")]
            if change == "file":
                chosen = draw.choice([*other])
                files[chosen] = other[chosen]
            elif change == "cut":
                files[name] = files[name][: draw.randrange(len(files[name]) + 1)]
            elif change == "twice":
                files[name] = files[draw.choice([*files])]
            elif change == "manifest":
                files["manifest.json"] = other["manifest.json"]
            elif len(files) > 1:
                del files[name]
        shutil.rmtree(mixed, ignore_errors=True)
        mixed.mkdir()
        for name, data in files.items():
            (mixed / name).write_bytes(data)
        try:
            found = ck.load(mixed, layout)
        except CheckpointError:
            seen["refused"] += 1
            continue
        # Loaded only where all that the manifest names is there as it was saved.
        whole = [i for i, name in enumerate("abc") if sources[name].items() <= files.items()]
        assert len(whole) == 1, f"{changes} of {sorted(files)} was loaded"
        assert_bitwise_equal(found, truths[whole[0]])
        seen["whole after all"] += 1
    print(f"\n{count} mixtures: {dict(seen)}; 0 silent")
    assert seen["refused"] > 0.5 * count
