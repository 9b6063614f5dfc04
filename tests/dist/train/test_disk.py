"""Leaves on disk: no room, a file that fails, flipped bits, killed processes: nothing is lost, everything is named."""

import errno
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import ConfigError, DiskError, LayoutError, RankError
from fsharding.comm.leaf_memory import in_memory
from fsharding.comm.tier_room import leaves_in
from fsharding.contrib import disk
from fsharding.optim import windows
from fsharding.sharding.memory_kinds import ROLES
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, device_mesh, ranks, run_ranks
from tests.decoders import DecoderCase
from tests.helpers import full, small_disk, until

ROOT = Path(__file__).parents[3]
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=32, layers=2)
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (1,)), rows=4, length=8, steps=4, donate=True)
ALL = fs.zero(3).with_memory(**dict.fromkeys(ROLES, "disk"))
SOME = fs.zero(3).with_memory(moments="disk")


def on_mesh(layout, opt):
    """The leaves of a state that are on a mesh: sharding, shape, dtype."""
    return [entry.planned for entry in layout.entries(opt) if entry.planned is not None]


@contextmanager
def file_in(folder):
    """A file of its own in a directory."""
    disk._file.cache_clear()
    with patch.dict(os.environ, {"FSHARDING_DISK": str(folder)}), patch.object(windows, "WINDOW_BYTES", 1 << 12):
        yield
    disk._file.cache_clear()


def started(strategy, mesh=BASE.mesh):
    case = replace(BASE, strategy=strategy, mesh=mesh)
    return case, *case.start(device_mesh(mesh))


def train(case, state, step, steps):
    mesh = state.layout.mesh
    for _ in range(steps):
        state, _ = step(state, case.batch(int(state.step), mesh))
    return state


def planned(case, layout):
    return sum(disk.planned_extents(*leaves_in("disk", layout, on_mesh(layout, case.optimizer))))


# -------------------------------------------------------------------------------------------------------- plan and room
@pytest.mark.parametrize(
    "strategy", [ALL, SOME, fs.zero(3).with_memory(main="disk", grads={"blocks": "disk"})], ids=str
)
def test_the_file_is_as_large_as_planned(tmp_path, strategy):
    with file_in(tmp_path):
        case, state, step = started(strategy)
        whole = planned(case, state.layout)
        assert disk._file().size == whole
        assert 2 * state.layout.memory(case.optimizer).disk <= whole
        state = train(case, state, step, 4)
        assert disk._file().size == whole and not list(tmp_path.iterdir()), "it has no name"
        del state
        gc.collect()
        assert disk._file().size == 0, "the room of a state comes back with its last leaf"


def test_room_for_gradients_alone_stays(tmp_path):
    """They are freed at the end of each step, and the next one needs their room."""
    with file_in(tmp_path):
        case, state, step = started(fs.zero(3).with_memory(grads="disk"))
        whole = planned(case, state.layout)
        for _ in range(2):
            state = train(case, state, step, 1)
            gc.collect()
            assert disk._file().size == whole > 0


def test_a_donated_state_needs_the_larger_of_two_rooms(tmp_path):
    """What a state leaves behind is used by the next one, whose extents have other sizes."""
    places = [SOME, fs.zero(3).with_memory(main="disk", grads="disk"), ALL, SOME, ALL, SOME]
    with file_in(tmp_path), patch.object(disk, "_PIECE", 1 << 14):
        case, state, step = started(ALL)
        kept = fs.unshard(state.params)
        largest = disk._file().size
        for strategy in places:
            layout = replace(BASE, strategy=strategy).layout(state.layout.mesh)
            state = fs.reshard(state, layout, donate=True)
            assert disk._file().size == planned(case, layout) <= largest
        assert_bitwise_equal(fs.unshard(state.params), kept)
        state = train(case, fs.reshard(state, replace(BASE, strategy=SOME).layout(state.layout.mesh)), step, 2)
        assert disk._file().size <= largest
        state = fs.reshard(state, replace(BASE, strategy=fs.zero(3)).layout(state.layout.mesh), donate=True)
        train(case, state, step, 1)
        assert disk._file().size == 0


def test_too_little_room_is_refused_before_the_first_step(tmp_path):
    text = r"bytes more in .*: No space left on device"
    with small_disk(tmp_path, 64), file_in(tmp_path), pytest.raises(DiskError, match=text):
        started(ALL)


def without_room(folder):
    with file_in(folder / str(dist.get_rank())):
        if dist.get_rank() == 1:
            (folder / "1").mkdir()
        with small_disk(folder / "1", 64) if dist.get_rank() == 1 else patch.dict({}):
            text = "No space left on device" if dist.get_rank() == 1 else "too little room on the disk of rank 1"
            with pytest.raises(DiskError, match=text):
                started(ALL, fs.AbstractMesh(("dp",), (2,)))


def test_too_little_room_of_one_rank_is_refused_on_all(tmp_path):
    run_ranks(without_room, 2, tmp_path)


def with_other_memory(folder, others):
    """Rank 1 has another strategy in each call that makes a state; both ranks are told so before they take room."""
    mesh = fs.AbstractMesh(("dp",), (2,))
    with file_in(folder / str(dist.get_rank())):
        case, state, _ = started(fs.zero(3), mesh)
        ck.save(folder / "ckpt", state)
        layout = replace(BASE, strategy=others[dist.get_rank()], mesh=mesh).layout(state.layout.mesh)
        params = fs.redistribute(state.params, state.layout.main)
        calls = {
            "fs.init_state": lambda: fs.init_state(case.model, case.optimizer, fs.random.key(0), layout),
            "fs.state_from_params": lambda: fs.state_from_params(params, case.optimizer, fs.random.key(0), layout),
            "fs.reshard": lambda: fs.reshard(state, layout),
            "fs.checkpoint.load": lambda: ck.load(folder / "ckpt", layout),
        }
        for name, call in calls.items():
            with pytest.raises((ConfigError, LayoutError)) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(name) and "layout.strategy.memory" in text, text
            assert "rank 0 has" in text and "rank 1 has" in text, text


@pytest.mark.parametrize(
    "others",
    [(fs.zero(3), SOME), (SOME, fs.zero(3).with_memory(grads="disk"))],
    ids=["device and disk", "unlike disks"],
)
def test_ranks_with_other_memory_are_refused(tmp_path, others):
    run_ranks(with_other_memory, 2, tmp_path, others)


def killed_while_it_takes_room(folder, late):
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    cmdline = Path(f"/proc/{pids[1]}/cmdline")  # empty once the process has ended

    def taken(*_, **options):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if late:
            until(lambda: not cmdline.exists() or not cmdline.read_bytes())

    with file_in(folder / str(dist.get_rank())), patch.object(disk._File, "reserve", taken):
        with pytest.raises(RankError) as caught:
            started(SOME, TWO)
        (folder / "said").write_text(str(caught.value))


@pytest.mark.parametrize("late", [False, True], ids=["it is waited for", "it is gone before"])
def test_a_rank_that_is_killed_while_it_takes_room_is_named(tmp_path, late):
    with patch.object(ranks, "_GRACE", 40.0), pytest.raises(RankError, match="died of SIGKILL"):
        run_ranks(killed_while_it_takes_room, 2, tmp_path, late)
    assert (tmp_path / "said").read_text().startswith("fs.init_state lost rank 1 (dp=1).")


def test_a_full_disk_stops_no_step(tmp_path):
    """All room is taken before the first step."""
    with file_in(tmp_path / "elsewhere"):
        kept = train(*started(ALL), 3)
    with small_disk(tmp_path, 4096), file_in(tmp_path):
        case, state, step = started(ALL)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(bytes(4 << 20))
        assert_bitwise_equal(fs.unshard(train(case, state, step, 3).params), fs.unshard(kept.params))
        del state


@full
@pytest.mark.timeout(600)
def test_1200_mb_of_moments_train_in_300_mb(tmp_path):
    """2.4 GB of state and gradients, in a process of its own, since its peak only grows."""
    how = ["--layers", "64", "--dim", "1536", "--steps", "2"]
    script = [sys.executable, str(ROOT / "examples" / "offload.py"), *how]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    grown = int(re.search(r"took for it: (\d+) MB on disk", printed)[1])
    print(printed)
    assert "equal in every bit" in printed and grown < 300


# ------------------------------------------------------------------------------------------------------------ failures
def failing(name, number):
    """An operation on the file that fails once, when it has been called so often."""
    real, calls = getattr(os, name), Counter()
    lock = threading.Lock()

    def fails(*args):
        with lock:
            calls[name] += 1
            if calls[name] == number:
                raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    return patch.object(disk.os, name, fails)


def result_of(step, state, batch):
    try:
        return step(state, batch)[0], ""
    except DiskError as error:
        return None, str(error)


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
@pytest.mark.parametrize("strategy", [ALL, SOME, fs.zero(1).with_memory(main="disk", moments="host")], ids=str)
def test_a_step_in_which_the_disk_fails_leaves_the_state_as_it_was(tmp_path, strategy, name):
    """Every read and every write of a step fails in turn."""
    with file_in(tmp_path):
        case, state, step = started(strategy)
        state = train(case, state, step, 1)
        batch = case.batch(1, state.layout.mesh)
        before, number = fs.unshard(state), 0
        while True:
            number += 1
            with failing(name, number):
                after, error = result_of(step, state, batch)
            if after is not None:
                break
            assert f"the file of {tmp_path} at " in error and "Input/output error" in error
            assert_bitwise_equal(fs.unshard(state), before)
        assert number > 4 and int(after.step) == 2
        whole = train(*started(strategy), 2)
        assert_bitwise_equal(fs.unshard(after), fs.unshard(whole))


def test_a_flipped_bit_is_named(tmp_path):
    with file_in(tmp_path):
        case, state, step = started(SOME)
        ck.save(tmp_path / "saved", state)
        place = next(x for x in map(local_of, fs.tree.leaves(state.opt_state)) if isinstance(x, disk.OnDisk))
        extent = place.spans[0].extent
        byte = os.pread(disk._file()._fd, 1, extent.offset)
        os.pwrite(disk._file()._fd, bytes([byte[0] ^ 16]), extent.offset)
        with pytest.raises(DiskError, match=rf"other bytes than it wrote in the file of .* from {extent.offset:,} to"):
            train(case, state, step, 1)
        again = ck.load(tmp_path / "saved", state.layout)
        assert int(train(case, again, step, 1).step) == 1


def test_a_tensor_on_disk_is_read_only(tmp_path):
    with file_in(tmp_path):
        x = torch.arange(12.0).view(3, 4)
        there = disk.store(x)
        writes = (lambda: there.add_(1), lambda: torch._foreach_mul_([there], 2), lambda: torch.add(x, 1, out=there))
        for write in writes:
            with pytest.raises(DiskError, match="cannot write a tensor on disk in place"):
                write()
        for same, want in (
            (there[1], x[1]),
            (there[1:], x[1:]),
            (there + 1, x + 1),
            (there.view(12)[5], x.view(12)[5]),
        ):
            assert torch.equal(in_memory(same), want)
        assert all(torch.equal(a, b) for a, b in zip(there.unbind(0), x.unbind(0), strict=True))
        assert isinstance(there[1:].view(-1), disk.OnDisk) and not isinstance(there.T, disk.OnDisk)
        assert torch.equal(torch.stack([*there.unbind(0)]), x) and repr(there) == "OnDisk(float32[3, 4])"


# ---------------------------------------------------------------------------------------------------------- killed ranks
TWO = fs.AbstractMesh(("dp",), (2,))


def until_killed(folder, seconds):
    """Train on from the newest checkpoint, and save; a rank is killed at some moment of a step or a save."""
    with file_in(folder / "disk"):
        case, state, step = started(ALL, TWO)
        keeper = ck.Checkpointer(folder / "ckpt", keep=2)
        state = state if keeper.latest() is None else keeper.load(state.layout)
        dist.barrier()
        if dist.get_rank() == 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            state = train(case, state, step, 1)
            if int(state.step) % 3 == 0:
                keeper.save(state)


def same_as_uninterrupted(folder):
    """The newest checkpoint has the state of a run on the device that nothing has stopped."""
    case, state, step = started(fs.zero(3), TWO)
    found = ck.load(ck.latest(folder / "ckpt"), state.layout)
    assert_bitwise_equal(train(case, state, step, int(found.step)).params, found.params)
    return int(found.step)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=full)])
def test_nothing_is_lost_when_ranks_are_killed(tmp_path, count):
    draw = random.Random(count)
    for _ in range(count):
        with pytest.raises(RankError, match="died of SIGKILL"):
            run_ranks(until_killed, 2, tmp_path, draw.uniform(0.05, 0.8), timeout=60.0)
        assert not [*(tmp_path / "disk").iterdir()], "a file without a name goes with its process"
    steps = run_ranks(same_as_uninterrupted, 2, tmp_path)[0] if ck.latest(tmp_path / "ckpt") else 0
    print(f"{count} kills, {steps} steps, nothing lost")
    assert count == 2 or steps > count


# --------------------------------------------------------------------------------------------------------- checkpoints
def saved_each_way(folder):
    """States on disk that are saved at once and in the background, and a run that goes on meanwhile."""
    with file_in(folder / "disk"):
        case, state, step = started(ALL, TWO)
        state = train(case, state, step, 1)
        before = fs.unshard(state)
        ck.save(folder / "now", state)
        pending = ck.save_async(folder / "later", state)
        train(case, state, step, 2)
        pending.wait()
        return [before, *(fs.unshard(ck.load(folder / name, state_layout(TWO))) for name in ("now", "later"))]


def state_layout(mesh):
    return replace(BASE, strategy=ALL, mesh=mesh).layout(device_mesh(mesh))


def test_checkpoints_of_leaves_on_disk(tmp_path):
    for before, *found in run_ranks(saved_each_way, 2, tmp_path):
        for state in found:
            assert_bitwise_equal(state.params, before.params)
            assert_bitwise_equal(state.opt_state, before.opt_state)


# ------------------------------------------------------------------------------------------------------------ torch.func
def small(key):
    first, second = fs.random.split(key, 2)
    return {"a": fs.random.normal(first, (8, 4)), "b": fs.random.normal(second, (4,))}


def loss(params, x):
    w = fs.gather_unit(params)
    return ((x @ w["a"]) * w["b"]).tanh().sum()


TRANSFORMS = {
    "grad": torch.func.grad(loss),
    "jvp": lambda params, x: torch.func.jvp(lambda p: loss(p, x), (params,), (params,))[1],
    "vmap": lambda params, x: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x[:, None]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_read_leaves_on_disk(tmp_path, name):
    found = []
    with file_in(tmp_path):
        for strategy in (fs.zero(3), fs.zero(3).with_memory(params="disk")):
            layout = fs.plan_layout(small(fs.random.key(0)), fs.make_mesh(device="cpu"), strategy=strategy)
            state = fs.init_state(small, fs.sgd(0.1), fs.random.key(0), layout)
            result = fs.shard_map(TRANSFORMS[name])(state.params, torch.ones(3, 8))
            found.append([in_memory(local_of(x)) for x in fs.tree.leaves(result)])
    assert_bitwise_equal(*found)
