"""Saves to slow file systems: no timeout of a mesh ends them, they say where they wait, and a rank that is gone ends them."""

import logging
import os
import signal
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import ArgumentError, CheckpointError, RankError
from fsharding.checkpoint import background
from fsharding.interop import hf
from fsharding.testing import assert_bitwise_equal, ranks, run_ranks
from fsharding.train.state import main_of
from tests.helpers import refusal, token_batch, until

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=24)
OPT = fs.adamw(1e-2)


@contextmanager
def slow_disk(rank, work):
    """The first fsync on one rank does something else as well."""
    real, seen = os.fsync, []

    def fsync(fd):
        if not seen:
            seen.append(fd)
            work()
        real(fd)

    with patch.object(os, "fsync", fsync if dist.get_rank() == rank else real):
        yield


def state_with_timeout(seconds):
    """A state on a mesh with a short timeout, which is also the one of the default group, as in a run of its own."""
    mesh = fs.make_mesh(dp=-1, device="cpu", timeout=timedelta(seconds=seconds))
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    layout = fs.plan_layout(fs.models.decoder(CONFIG), mesh, strategy=fs.zero(3))
    return layout, fs.init_state(fs.models.decoder(CONFIG), OPT, fs.random.key(0), layout)


def checkpointer(path, state, *, background, **options):
    with ck.Checkpointer(path.parent, background=background, **options) as keeper:
        keeper.save(state, number=int(path.name))


SAVES = {
    "save": ck.save,
    "save_async": lambda path, state, **options: ck.save_async(path, state, **options).wait(),
    "checkpointer": lambda path, state, **options: checkpointer(path, state, background=False, **options),
    "checkpointer beside": lambda path, state, **options: checkpointer(path, state, background=True, **options),
    "hf.save": lambda path, state, **options: hf.save(path, state, CONFIG, **options),
    "megatron.save": lambda path, state, **options: fs.megatron.save(path, state, CONFIG, **options),
}


def save_slowly(path, how, rank):
    layout, state = state_with_timeout(3)
    with slow_disk(rank, lambda: time.sleep(5)):
        SAVES[how](path, state)
    # The run continues: the next step meets on the mesh whose timeout has long passed.
    step = fs.make_train_step(fs.models.decoder(CONFIG), OPT)
    batch = token_batch(0, mesh=layout.mesh)
    if "." in how:
        if how == "hf.save":
            assert_bitwise_equal(hf.load(path, layout), main_of(state))
        step(state, batch)
        return
    loaded = ck.load(path, layout, opt=OPT)
    assert_bitwise_equal(loaded, state)
    assert float(step(loaded, batch)[1].loss) == float(step(state, batch)[1].loss)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", SAVES)
def test_a_sync_that_takes_longer_than_the_timeout_of_the_mesh_is_waited_for(tmp_path, how, rank):
    run_ranks(save_slowly, 2, tmp_path / "7", how, rank)


# --------------------------------------------------------------------------------------------------------- lost ranks
def lose(path, how, why, timeout, rank):
    """A save in which a rank dies, or hangs until the other one has written what it gets."""
    _, state = state_with_timeout(60)
    SAVES[how](path / "7", state)  # connections are made

    def leave():
        if why == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        until((path / "said").exists)
        os._exit(1)

    with slow_disk(rank, leave):
        try:
            SAVES[how](path / "8", state, timeout=timedelta(seconds=timeout))
        except (RankError, CheckpointError) as error:
            Path(path, "said").write_text(f"{type(error).__name__}\n{error}")
            os._exit(1)


@pytest.mark.parametrize("why", ["dies", "hangs"])
@pytest.mark.parametrize("how", ["save", "checkpointer beside", "hf.save"])
def test_a_save_whose_rank_is_lost_ends(tmp_path, how, why):
    with patch.object(ranks, "_GRACE", 20.0), pytest.raises(RankError):
        run_ranks(lose, 2, tmp_path, how, why, 2 if why == "hangs" else 1800, 1)
    kind, text = (tmp_path / "said").read_text().split("\n", 1)
    assert kind == ("CheckpointError" if how == "checkpointer beside" else "RankError")
    assert "lost rank 1" in text
    if why == "hangs":
        name = (
            "fs.checkpoint.Checkpointer"
            if how == "checkpointer beside"
            else f"fs.{how}".replace("fs.save", "fs.checkpoint.save")
        )
        assert f"If it is only slow, pass {name} a longer timeout=." in text, text
    assert not [path for path in tmp_path.iterdir() if path.name == "8"]


# ------------------------------------------------------------------------------------------------------- what is said
def report(path, how):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("fsharding").addHandler(handler)
    _, state = state_with_timeout(20)
    try:
        with patch.object(background, "_SLOW_S", 0.3), slow_disk(1, lambda: time.sleep(1)):
            SAVES[how](path, state)
    finally:
        logging.getLogger("fsharding").removeHandler(handler)
    return said


@pytest.mark.parametrize("how", ["save", "checkpointer beside", "hf.save", "megatron.save"])
def test_a_rank_that_writes_for_long_says_where(tmp_path, how):
    name = {"checkpointer beside": "fs.checkpoint.Checkpointer.save", "save": "fs.checkpoint.save"}.get(
        how, f"fs.{how}"
    )
    assert run_ranks(report, 2, tmp_path / "7", how) == [
        [],
        [
            (
                "WARNING",
                f"{name} has been writing to {tmp_path / '7'} for 0.3 s on rank 1: its file system is slow.\n"
                "Other ranks wait for it up to timeout=.",
            )
        ],
    ]


@pytest.mark.parametrize("how", SAVES)
def test_timeouts_that_are_none_are_refused(tmp_path, how):
    layout = fs.plan_layout(fs.models.decoder(CONFIG), fs.make_mesh(device="cpu"))
    state = fs.init_state(fs.models.decoder(CONFIG), OPT, fs.random.key(0), layout)
    text = refusal(SAVES[how], tmp_path / "7", state, timeout=30, kind=ArgumentError)
    assert text.endswith(" takes timeout= as a timedelta, got 30.\nWrite timeout=datetime.timedelta(seconds=30).")
    assert not os.listdir(tmp_path)
