"""When a rank of a step dies, hangs or raises, all others end with an error that names it."""

import gc
import os
import signal
import socket
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base.errors import CheckpointError, RankError
from fsharding.checkpoint import loading, saving
from fsharding.mesh import device_mesh as mesh_module
from fsharding.mesh import lost_ranks
from fsharding.pipeline import executor
from fsharding.testing import ranks, run_ranks
from fsharding.train import reshard as reshard_module
from fsharding.train import step as step_module
from tests.helpers import full, until

PLACES = {
    "do": (executor._Run, "do"),
    "beside": (executor._Run, "_b"),
    "sums": (executor._Run, "sums"),
    "norm": (step_module, "square_sums"),
}
CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=32, layers=4, heads=4, kv_heads=2, intermediate_size=36)


def step_of(schedule, timeout, **axes):
    model = fs.models.decoder(CONFIG)
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=timeout), **axes)
    stages = fs.pipeline.stages_of(model, schedule) if schedule else None
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), stages=stages)
    opt = fs.adamw(1e-3)
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, microbatches=4, schedule=schedule or "1f1b")
    tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(0))
    return step, state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def leave(how, told=None):
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        until(told)
        os._exit(1)
    raise ValueError("no home\nfor it")


def one_leaves(folder, how, where, rank, timeout, schedule, axes):
    """A step, then one in which a rank leaves; the others write what they get, and end as a program would."""
    step, state, batch = step_of(schedule, timeout, **axes)
    state, _ = step(state, batch)
    place, name = PLACES[where]
    method, seen = getattr(place, name), 0

    def all_told():
        return len(os.listdir(folder)) == dist.get_world_size() - 1

    def leaving(*args, **kwargs):
        nonlocal seen
        seen += 1
        return leave(how, all_told) if where != "do" or seen == 3 else method(*args, **kwargs)

    with patch.object(place, name, leaving if dist.get_rank() == rank else method):
        try:
            step(state, batch)
        except RankError as error:
            if isinstance(error.__cause__, RuntimeError):
                Path(folder, str(dist.get_rank())).write_text(f"{error.ranks}\n{error}")
            os._exit(1)


def told(folder, how, where, rank, *, timeout=20, schedule="1f1b", **axes):
    """What each of the other ranks got."""
    size = torch.tensor([*axes.values()]).prod().item()
    schedule = fs.pipeline.plan_schedule(schedule, axes["pp"], 4) if "pp" in axes else None
    with patch.object(ranks, "_GRACE", 20.0), pytest.raises(RankError) as failure:
        run_ranks(one_leaves, size, str(folder), how, where, rank, timeout, schedule, axes)
    texts = {int(path.name): path.read_text() for path in folder.iterdir()}
    assert {*texts} == {*range(size)} - {rank}, f"all others end with a RankError: {failure.value}"
    return texts


def test_a_stage_that_dies_is_named_by_those_who_do_not_talk_with_it(tmp_path):
    texts = told(tmp_path, "dies", "do", 3, pp=4)
    for rank, text in texts.items():
        numbers, head, row, noticed, mend = text.split("\n")
        assert (numbers, head, row) == (
            "(3,)", "train step lost rank 3 (pp=3).", "  rank 3 (pp=3) is gone, or does not answer"
        )  # fmt: skip
        assert noticed.startswith(f"  rank {rank} (pp={rank}) noticed it in {rank}")
        assert mend == "Check the logs of rank 3, then restart all ranks."


def test_peers_on_other_axes_name_it_too(tmp_path):
    texts = told(tmp_path, "dies", "do", 3, pp=2, tp=2)
    assert {text.split("\n")[1] for text in texts.values()} == {"train step lost rank 3 (pp=1, tp=1)."}


def test_death_in_the_final_sums(tmp_path):
    texts = told(tmp_path, "dies", "sums", 1, pp=2)
    assert "lost rank 1 (pp=1).\n  rank 1 (pp=1) is gone, or does not answer\n  rank 0 (pp=0) noticed it: " in texts[0]


def test_a_rank_that_raises_by_itself_is_named_with_its_error(tmp_path):
    texts = told(tmp_path, "raises", "sums", 1, timeout=2, pp=2)
    assert "\n  rank 1 (pp=1) raised ValueError: no home\n" in texts[0]


@full
@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}, {"pp": 3}])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_whoever_is_gone_is_named(tmp_path, how, axes):
    texts = told(tmp_path, how, "do" if "pp" in axes else "norm", 2, timeout=3, **axes)
    assert {text.split("\n")[0] for text in texts.values()} == {"(2,)"}, "\n".join(texts.values())


RARE = {
    "save": ("fs.checkpoint.save", (saving.Job, "_write")),
    "save_async": ("fs.checkpoint.save_async", (saving.Job, "_write")),
    "load": ("fs.checkpoint.load", (loading, "_fetch")),
    "make_mesh": ("fs.make_mesh", (mesh_module, "agree")),
    "reshard": ("fs.reshard", (reshard_module, "exchange")),
    "agreement": ("train step", (step_module, "agree_on_setup")),
    "end of a Checkpointer": ("fs.checkpoint.save_async", (saving.Job, "_write")),
}
BACKGROUND = ("save_async", "end of a Checkpointer")
DEFAULT = ("save", "save_async", "load", "agreement")


def dies_in(folder, call):
    """Rank 1 dies in the middle of a call that all ranks make; rank 0 writes what it gets."""
    step, state, batch = step_of(None, 20, dp=2)
    target = Path(folder, "ckpt")
    fs.checkpoint.save(target, state)
    place, name = RARE[call][1]
    method = getattr(place, name)
    with patch.object(place, name, lambda *_, **__: leave("dies") if dist.get_rank() == 1 else method(*_, **__)):
        try:
            if call == "save":
                fs.checkpoint.save(target, state)
            elif call == "save_async":
                fs.checkpoint.save_async(target, state).wait()
            elif call == "load":
                fs.checkpoint.load(target, state.layout)
            elif call == "agreement":
                step(state, batch)
            elif call == "end of a Checkpointer":
                with fs.checkpoint.Checkpointer(folder) as keeper:
                    keeper.save(state)
            elif call == "make_mesh":
                fs.make_mesh(device="cpu", dp=2)
            else:
                fs.reshard(state, state.layout.with_strategy(fs.zero(0)))
        except (RankError, CheckpointError) as error:
            left = sorted(path.name for path in Path(folder).iterdir())
            Path(folder, "told").write_text(f"{type(error).__name__} {left}\n{error}")
            os._exit(1)


@pytest.mark.parametrize("call", [call if call in DEFAULT else pytest.param(call, marks=full) for call in RARE])
def test_a_rank_that_dies_in_a_rare_call_is_named(tmp_path, call):
    with patch.object(ranks, "_GRACE", 20.0), pytest.raises(RankError):
        run_ranks(dies_in, 2, str(tmp_path), call)
    kind, head, row, noticed, mend = (tmp_path / "told").read_text().split("\n")
    assert kind == f"{'CheckpointError' if call in BACKGROUND else 'RankError'} ['ckpt']", "nothing half written stays"
    assert head == f"{RARE[call][0]} lost rank 1 (dp=1)."
    assert row == "  rank 1 (dp=1) is gone, or does not answer"
    assert noticed.startswith("  rank 0 (dp=0) noticed it") and mend.startswith("Check the logs of rank 1")


def served_by_rank(folder, port):
    """A step after which rank 0 dies, and with it the store."""
    step, state, batch = step_of(fs.pipeline.plan_schedule("1f1b", 3, 4), 20, pp=3)
    state, _ = step(state, batch)
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=10))
    dist.barrier()
    if rank == 0:
        leave("dies")
    with patch.object(lost_ranks, "default_store", lambda: dist.PrefixStore("a", store)):
        try:
            step(state, batch)
        except RankError as error:
            Path(folder, str(rank)).write_text(str(error))
            os._exit(1)


@full
def test_the_rank_that_has_the_store_is_named(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with patch.object(ranks, "_GRACE", 20.0), pytest.raises(RankError):
        run_ranks(served_by_rank, 3, str(tmp_path), port)
    for path in tmp_path.iterdir():
        assert path.read_text().startswith("train step lost rank 0 (pp=0).\n")
    assert len(list(tmp_path.iterdir())) == 2


def left_to_the_collector():
    """How many objects a call leaves that only the garbage collector frees."""
    params = {"w": torch.ones(4, 2)}
    params = fs.shard(params, fs.plan_layout(params, fs.make_mesh(dp=2, device="cpu"), strategy=fs.zero(3)))
    for _ in range(2):  # the first call fills caches
        gc.collect()
        gc.disable()
        fs.value_and_grad(lambda p: fs.gather_unit(p)["w"].square().sum())(params)
        found = gc.collect()
        gc.enable()
    return found


def test_a_call_leaves_nothing_to_the_garbage_collector():
    """Frames of a call hold its graph, and with it all that backward keeps."""
    assert run_ranks(left_to_the_collector, 2) == [0, 0]
