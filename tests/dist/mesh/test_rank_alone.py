"""A collective that not all ranks call: every rank that waits is told which ranks are where."""

import logging
import os
import pickle
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import RankError
from fsharding.mesh import failures, lost_ranks, meeting
from fsharding.mesh.backends import default_store
from fsharding.testing import RankPool
from tests.helpers import full

CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=36)
SECONDS = 2


class Run:
    """A run, and what its ranks may call."""

    def __init__(self, folder, **axes):
        self.folder, self.axes = Path(folder), axes
        self.model, self.opt = fs.models.decoder(CONFIG), fs.adamw(1e-3)
        self.mesh = self.make_mesh()
        self.layout = fs.plan_layout(self.model, self.mesh, strategy=fs.zero(3))
        self.state = fs.init_state(self.model, self.opt, fs.random.key(0), self.layout)
        self.one_step = fs.make_train_step(self.model, self.opt)
        tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(0))
        self.batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        self.loss = fs.model_loss(self.model)

    def make_mesh(self):
        return fs.make_mesh(device="cpu", timeout=timedelta(seconds=SECONDS), **self.axes)

    def step(self):
        self.state, _ = self.one_step(self.state, self.batch)

    def save(self):
        fs.checkpoint.save(self.folder / "ckpt", self.state)

    def save_async(self):
        fs.checkpoint.save_async(self.folder / "ckpt", self.state)

    def checkpointer(self):
        fs.checkpoint.Checkpointer(self.folder / "many").after_step(self.state)

    def load(self):
        fs.checkpoint.load(self.folder / "ckpt", self.layout, opt=self.opt)

    def load_weights(self):
        fs.foreign.load_weights(self.folder / "ckpt", self.layout)

    def hf_save(self):
        fs.hf.save(self.folder / "hf", self.state, CONFIG)

    def hf_load(self):
        fs.hf.load(self.folder / "hf", self.layout)

    def unshard(self):
        fs.unshard(self.state.params)

    def reshard(self):
        fs.reshard(self.state, self.layout.with_strategy(fs.zero(0)))

    def value_and_grad(self):
        fs.value_and_grad(self.loss)(self.state.params, self.batch)

    def forward(self):
        with torch.no_grad(), fs.set_mesh(self.mesh):
            self.loss(self.state.params, self.batch)

    def gather_unit(self):
        fs.gather_unit(self.state.params["head"])

    def scatter_grads(self):
        head = self.state.params["head"]
        fs.scatter_grads(fs.tree.map(lambda x: torch.zeros(x.shape), head), like=head)

    def global_norm(self):
        fs.global_norm(self.state.params)

    def vdot(self):
        fs.shard_map(lambda p: fs.tree.vdot(p, p))(self.state.params)

    def redistribute(self):
        fs.redistribute(self.state.params, self.layout.with_strategy(fs.zero(0)).params)

    def psum(self):
        ops.psum(torch.ones(3), "dp", mesh=self.mesh)

    def backward_of_psum(self):
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(ops.pvary(x, "dp", mesh=self.mesh).sum(), x)

    def full_tensor(self):
        time.sleep(0.5)
        try:
            fs.tree.leaves(self.state.params["blocks"])[0].full_tensor()
        except RankError:  # the other one is told as well
            self.nothing()
            raise

    def slow_loss(self):
        def loss(params, batch):
            if dist.get_rank() == 1:
                self.nothing()
                raise KeyError("nobody waits for it any more")
            return self.loss(params, batch)

        fs.make_train_step(loss, self.opt)(self.state, self.batch)

    def nothing(self):
        while not (self.folder / "told").exists():
            time.sleep(0.02)


def calls(folder, axes, begin, each):
    """Every rank makes its own call; what came of it, and whether a collective waited until its timeout."""
    run = Run(folder, **axes)
    for name in begin:
        getattr(run, name)()
    dist.barrier()
    try:
        getattr(run, each[dist.get_rank()])()
    except RankError as error:
        return error.ranks, str(error), bool(re.search("timeout|timed out", str(error.__cause__), re.IGNORECASE))
    except KeyError:
        pass  # what one of the calls ends with, for the other ranks to be told of
    finally:
        if each[dist.get_rank()] != "nothing":
            Path(folder, "told").touch()
    return (), "", False


def told(folder, *each, begin=(), waits=True, **axes):
    """What each rank got: the ranks of its error, and its text with every place in this file as HERE.

    Args:
        waits: collectives may wait until their timeout before that.
    """
    with RankPool(len(each)) as pool:  # no group can be used after a failure
        found = pool.run(calls, str(folder), axes or {"dp": len(each)}, begin, each)
    assert waits or not any(waited for _, _, waited in found), found
    return [(ranks, re.sub(r"tests/dist/mesh/test_rank_alone\.py:\d+", "HERE", text)) for ranks, text, _ in found]


NAMES = {
    "save": "fs.checkpoint.save",
    "save_async": "fs.checkpoint.save_async",
    "checkpointer": "fs.checkpoint.Checkpointer.save",
    "load": "fs.checkpoint.load",
    "load_weights": "fs.foreign.load_weights",
    "hf_save": "fs.hf.save",
    "hf_load": "fs.hf.load",
    "unshard": "fs.unshard",
    "reshard": "fs.reshard",
    "value_and_grad": "fs.value_and_grad",
    "forward": "fs.gather_unit",
    "gather_unit": "fs.gather_unit",
    "scatter_grads": "fs.scatter_grads",
    "global_norm": "fs.global_norm",
    "vdot": "fs.tree.vdot",
    "redistribute": "fs.redistribute",
    "psum": "fs.ops.psum",
    "backward_of_psum": "a backward pass",
    "make_mesh": "fs.make_mesh",
    "step": "train step",
}


DEFAULT = {"save", "reshard", "value_and_grad", "forward", "psum"}


@pytest.mark.parametrize("call", [call if call in DEFAULT else pytest.param(call, marks=full) for call in NAMES])
def test_a_call_of_one_rank_alone(tmp_path, call):
    (ranks, text), other = told(tmp_path, call, "nothing")
    assert other == ((), "")
    name = NAMES[call]
    numbered = f"{name} 0" if call == "step" else name
    assert (ranks, text) == ((1,), (
        f"{name} is called on rank 0 (dp=0) alone.\n"
        f"  rank 0 (dp=0): {numbered} at HERE\n"
        "  rank 1 (dp=1): in no collective, at HERE\n"
        f"Every rank has to call {name}: move it out of the `if rank == 0:`. If the others are only slow, pass make_mesh a"
        " longer timeout=."
    ))  # fmt: skip


def test_one_rank_saves_while_the_other_steps(tmp_path):
    rows = (
        "  rank 0 (dp=0): fs.checkpoint.save at HERE\n"
        "  rank 1 (dp=1): train step 1 at HERE\n"
        "Every rank has to call fs.checkpoint.save: move it out of the `if rank == 0:`."
    )
    assert told(tmp_path, "save", "step", begin=["step"]) == [
        ((1,), f"fs.checkpoint.save is called on rank 0 (dp=0) alone.\n{rows}"),
        ((0,), f"train step waits for rank 0 (dp=0), which is in a different call.\n{rows}"),
    ]


def test_two_rare_calls_are_told_apart_at_once(tmp_path):
    rows = (
        "  rank 0 (dp=0): fs.reshard at HERE\n"
        "  rank 1 (dp=1): fs.checkpoint.save at HERE\n"
        "Every rank has to call fs.reshard: move it out of the `if rank == 0:`."
    )
    found = told(tmp_path, "reshard", "save", waits=False)
    assert [text.partition("\n")[2] for _, text in found] == [rows, rows]
    assert not (tmp_path / "ckpt").exists()


def test_two_calls_that_send_unlike_things_are_told_apart_at_once(tmp_path):
    found = told(tmp_path, "global_norm", "step", begin=["step"], waits=False)
    assert [ranks for ranks, _ in found] == [(1,), (0,)]
    assert all("rank 0 (dp=0): fs.global_norm at HERE\n  rank 1 (dp=1): train step 1 at" in text for _, text in found)


@full
def test_a_collective_of_torch_that_one_rank_is_in(tmp_path):
    _, (ranks, text) = told(tmp_path, "full_tensor", "step", begin=["step"])
    assert ranks == (0,)
    assert (
        "\n  rank 0 (dp=0): DTensor.full_tensor at HERE\n  rank 1 (dp=1): train step 1 at HERE\nEvery rank has" in text
    )


@full
def test_a_rank_that_is_busy_inside_the_call_is_named_with_its_line(tmp_path):
    (ranks, text), _ = told(tmp_path, "slow_loss", "slow_loss", begin=["step"])
    head, row, _, mend = text.split("\n")
    assert (ranks, head) == ((1,), "train step lost rank 1 (dp=1).")
    assert row.startswith("  rank 1 (dp=1) is busy in train step 1 at HERE: test_rank_alone.py:")
    assert mend.startswith("If it is only slow, pass make_mesh a longer timeout=. Check the logs of rank 1")


@full
def test_a_rank_that_saves_alone_is_named_by_those_that_do_not_talk_with_it(tmp_path):
    found = told(tmp_path, "save", "step", "step", "step", begin=["step"], dp=2, tp=2)
    assert {ranks for ranks, _ in found[1:]} == {(0,)}
    for rank, (_, text) in enumerate(found[1:], 1):
        assert text.startswith("train step waits for rank 0 (dp=0, tp=0), which is in a different call.\n"), text
        assert "\n  rank 0 (dp=0, tp=0): fs.checkpoint.save at HERE\n" in text, text
        assert f"rank {rank} (dp=" in text or f"ranks {rank} (dp=" in text or f", {rank} (dp=" in text, text


def woken(folder, call):
    """Rank 1 is stopped for longer than the timeout; rank 0 gives it up, and lets it go on."""
    run = Run(folder, dp=2)
    run.step()
    if call == "load":
        run.save()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        getattr(run, call)()
    except RankError as error:
        return error.ranks, str(error)
    finally:
        if dist.get_rank() == 0:
            os.kill(pids[1], signal.SIGCONT)


@full
@pytest.mark.parametrize("call", ["step", "save", "load", "make_mesh"])
def test_a_rank_that_was_given_up_does_not_blame_itself(tmp_path, call):
    with RankPool(2) as pool:
        (gone, first), (itself, text) = pool.run(woken, str(tmp_path), call)
    assert gone == itself == (1,)
    assert "\n  rank 1 (dp=1) is gone, or does not answer\n" in first
    head = f"{NAMES[call]} timed out on the other ranks, which waited for rank 1 (dp=1), this one.\n"
    assert text.startswith(head)


def stood(folder):
    """Rank 0 waits in a step for rank 1, which is elsewhere; what rank 0 is told of both."""
    run = Run(folder, dp=2)
    run.step()
    try:
        if dist.get_rank() == 1:
            run.nothing()
        run.step()
    except RankError as error:
        if dist.get_rank() == 0:
            failures.write_stacks(error, Path(folder, "out"))
            return error.stacks, str(error), pickle.loads(pickle.dumps(error)).stacks == error.stacks
    finally:
        Path(folder, "told").touch()


def test_a_timeout_tells_the_work_the_collective_and_the_stack_of_every_rank(tmp_path):
    with RankPool(2) as pool:
        (stacks, text, kept), _ = pool.run(stood, str(tmp_path))
    here = r"tests/dist/mesh/test_rank_alone\.py:\d+"
    waiting, elsewhere = (re.sub(here, "HERE", stacks[rank]).split("\n") for rank in range(2))
    assert waiting[:2] == ["rank 0 (dp=0)", "call: train step 1 at HERE"]
    assert waiting[2].startswith("doing: forward, gather of a unit")
    assert waiting[3].startswith("waits for: comm.") and waiting[3].endswith(" of rank 1")
    assert waiting[4:7] == ["stack, the user's lines first:", "  HERE in Run.step", "  HERE in stood"]
    assert elsewhere[:4] == [
        "rank 1 (dp=1)", "call: in no collective, at HERE", "stack, the user's lines first:", "  HERE in Run.nothing",
    ]  # fmt: skip
    assert all(stack.count("\n  ") <= 10 for stack in stacks.values()) and kept
    *_, last = text.split("\n")
    file = tmp_path / "out" / "stacks-0.txt"
    assert last == f"Where ranks 0, 1 stand: {file}" and len(text.split("\n")) < 14
    assert all(stack in file.read_text() for stack in stacks.values())


def reminded(folder):
    """What rank 0 logs while rank 1 comes late to a save, and what is left in the store."""
    run, said = Run(folder, dp=2), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fsharding").addHandler(handler)
    with patch.object(meeting, "_REMIND_S", 0.3):
        if dist.get_rank() == 1:
            time.sleep(1.2)
        run.save()
    return said, default_store().check([lost_ranks.QUESTION])


def test_a_rank_that_waits_long_says_for_whom(tmp_path):
    with RankPool(2) as pool:
        (said, asked), other = pool.run(reminded, str(tmp_path))
    head, *rows, mend = re.sub(r"tests/dist/mesh/test_rank_alone\.py:\d+", "HERE", said[0]).split("\n")
    assert head == "fs.checkpoint.save has waited for the other ranks for 0.3 s on rank 0."
    assert rows == ["  rank 0 (dp=0): fs.checkpoint.save at HERE", "  rank 1 (dp=1): in no collective, at HERE"]
    assert mend == "Call it on all ranks." and len(said) == 1
    assert other == ([], False) and not asked


def nothing_left(folder):
    """What is in the store after calls that all ranks make."""
    run = Run(folder, dp=2)
    for call in ("step", "save", "load", "reshard", "step"):
        getattr(run, call)()
    time.sleep(0.5)
    names = [key.format(rank) for key in (lost_ranks.KEY, lost_ranks.PLACE_KEY) for rank in range(2)]
    return [name for name in (*names, lost_ranks.QUESTION) if default_store().check([name])]


def test_where_nothing_fails_nothing_is_written(tmp_path):
    with RankPool(2) as pool:
        assert pool.run(nothing_left, str(tmp_path)) == [[], []]


def differ(folder, how):
    """Rank 1 has a state that is not that of rank 0."""
    run = Run(folder, dp=2)
    if dist.get_rank() == 1 and how == "key":
        run.state = run.state.replace(key=fs.random.key(7))
    if dist.get_rank() == 1 and how == "dtype":
        run.state = run.state.replace(params=fs.tree.map(lambda x: x.double(), run.state.params))
    try:
        run.step()
    except fs.errors.FshardingError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("how", ["key", "dtype"])
def test_states_that_differ_are_told_in_the_first_step(tmp_path, how):
    with RankPool(2) as pool:
        (kind, text), other = pool.run(differ, str(tmp_path), how)
    assert (kind, text) == other
    assert kind == "ConfigError" and text.startswith("train step is set up differently on different ranks.\n  ")
    assert ("state.key: rank 1 has [" if how == "key" else "rank 1 has float64[2, 36, 32], rank") in text
