"""Replicas that differ: what several ranks hold is compared bit by bit, at saves and when asked, and named."""

import os
import re

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import CheckpointError, ConfigError, RankError, ReplicaError
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import run_ranks

MESHES = {
    "zero0": ({"dp": -1}, fs.zero(0), fs.FP32),
    "zero2": ({"dp": -1}, fs.zero(2), fs.BF16),
    "hsdp": ({"replica": 2, "dp": -1}, fs.hybrid(), fs.FP32),
}


def init(key):
    return {"blocks": {"w": fs.random.normal(key, (2, 8, 5))}, "b": fs.random.zeros((3,))}


def loss_fn(params, batch):
    w = fs.gather_unit(params["blocks"])["w"]
    return (torch.tanh(batch["x"] @ w[0].T) @ w[1]).square().sum() + fs.gather_unit(params["b"]).sum(), 1


def state_of(name, precision=None, seed=0):
    axes, strategy, own = MESHES[name]
    layout = fs.plan_layout(
        init(fs.random.key(0)), fs.make_mesh(device="cpu", **axes), strategy=strategy, precision=precision or own
    )
    return fs.init_state(init, fs.adamw(1e-2), fs.random.key(seed), layout)


def flip(x, at, bit):
    local_of(x).view(-1).view(torch.int32)[at] ^= 1 << bit


def refusal_or_none(call, *args):
    try:
        call(*args)
    except (CheckpointError, ReplicaError, ConfigError) as error:
        return type(error).__name__, str(error)
    return None


def flip_one(path, name, leaf, victim):
    state = state_of(name)
    fs.debug.check_replicas(state)
    fs.checkpoint.save(path / "a", state)
    if torch.distributed.get_rank() == victim:
        flip(fs.tree.at(getattr(state, leaf.partition(".")[0]), leaf.partition(".")[2]), 2, 0)
    return (
        refusal_or_none(fs.debug.check_replicas, state),
        refusal_or_none(fs.checkpoint.save, path / "a", state),
        int(fs.checkpoint.metadata(path / "a").step),
    )


@pytest.mark.parametrize(("name", "leaf", "ranks"), [
    ("zero0", "params.blocks.w", 2), ("zero0", "opt_state.nu.b", 4), ("hsdp", "params.blocks.w", 4), ("hsdp", "opt_state.mu.blocks.w", 4),
])  # fmt: skip
def test_a_flipped_bit_on_one_rank_is_named(tmp_path, name, leaf, ranks):
    found = run_ranks(flip_one, ranks, tmp_path, name, leaf, 1)
    assert all(each == found[0] for each in found)
    (kind, text), (saving, refused), step = found[0]
    assert (kind, saving, step) == ("ReplicaError", "CheckpointError", 0)
    assert text.startswith("fs.debug.check_replicas finds 1 parts that differ between ranks.")
    assert refused.startswith("fs.checkpoint.save got 1 parts of leaves that differ between ranks that hold the same.")
    who = {
        "zero0": {2: "ranks? 0 and rank 1 differ", 4: "rank 1 differs from ranks 0, 2, 3"}[ranks],
        "hsdp": "rank 1 and rank 3 differ",
    }[name]
    for said in (text, refused):
        assert re.search(rf"\n  {re.escape(leaf)}\[[\d:, ]+\]: {who}\n", said), said
    assert os.listdir(tmp_path) == ["a"]


def flip_params_beside_main(path):
    """A parameter that only computes is in no checkpoint, so a save does not see it."""
    state = state_of("zero2")
    if torch.distributed.get_rank() == 0:
        local_of(state.params["b"]).view(torch.int16)[1] ^= 1
    return refusal_or_none(fs.debug.check_replicas, state), refusal_or_none(fs.checkpoint.save, path / "a", state)


def test_parameters_beside_main_ones_are_compared_when_asked(tmp_path):
    for (kind, text), saved in run_ranks(flip_params_beside_main, 2, tmp_path):
        assert kind == "ReplicaError" and "\n  params.b[0:3]: rank 0 and rank 1 differ\n" in text
        assert saved is None


def odd_values():
    """NaNs of one kind are equal; zeros of two signs are not."""
    state = state_of("zero0")
    local_of(state.params["b"])[0] = float("nan")
    same = refusal_or_none(fs.debug.check_replicas, state)
    local_of(state.params["b"])[1] = -0.0 if torch.distributed.get_rank() else 0.0
    return same, refusal_or_none(fs.debug.check_replicas, state)[1]


def test_bits_count_not_values():
    for same, text in run_ranks(odd_values, 2):
        assert same is None and "params.b[0:3]" in text


def sharded_alone(path):
    state = state_of("zero0")
    cut = fs.reshard(state, state.layout.with_strategy(fs.zero(3)))
    flip(cut.params["blocks"]["w"], 0, 3)
    return refusal_or_none(fs.debug.check_replicas, cut), refusal_or_none(fs.checkpoint.save, path / "a", cut)


def test_what_one_rank_holds_alone_is_its_own(tmp_path):
    assert run_ranks(sharded_alone, 2, tmp_path) == [(None, None)] * 2


def steps_of_ranks_that_differ(what):
    rank = torch.distributed.get_rank()
    state = state_of("zero0", fs.Precision(params=torch.bfloat16) if rank and what == "dtype" else None)
    state = state.replace(key=fs.random.key(rank)) if what == "key" else state
    step = fs.make_train_step(loss_fn, fs.adamw(1e-2))
    return refusal_or_none(step, state, {"x": torch.ones(2, 5)}), refusal_or_none(fs.debug.check_replicas, state)


@pytest.mark.parametrize(
    ("what", "named", "asked"), [("key", "key", "key[0:2]"), ("dtype", "bfloat16", "params.b[0:3]")]
)
def test_the_first_step_sees_ranks_that_differ(what, named, asked):
    for (kind, text), (other, said) in run_ranks(steps_of_ranks_that_differ, 2, what):
        assert kind == "ConfigError" and named in text, text
        assert other == "ReplicaError" and f"\n  {asked}: rank 0 and rank 1 differ\n" in said


def first_values_of_ranks_that_differ():
    return refusal_or_none(state_of, "zero0", None, torch.distributed.get_rank())


def test_first_values_that_differ_are_refused():
    for kind, text in run_ranks(first_values_of_ranks_that_differ, 2):
        assert kind == "ConfigError" and "key" in text, text


def sums_of_other_sizes(what):
    mesh, rank = fs.make_mesh(dp=2, device="cpu"), torch.distributed.get_rank()
    x = torch.ones(4, dtype=torch.bfloat16 if rank else torch.float32) if what == "dtype" else torch.ones(3 + rank)
    with pytest.raises(RankError) as found:
        fs.ops.psum(x, "dp", mesh=mesh)
    return str(found.value)


@pytest.mark.skipif(
    os.environ.get("FSHARDING_SHARED_MEMORY") == "0", reason="gloo ends a process that is sent too much"
)
@pytest.mark.parametrize(("what", "sizes"), [("dtype", (16, 8)), ("shape", (12, 16))])
def test_ranks_that_send_other_sizes_are_told_so(what, sizes):
    """Not that one of them is gone: both live, and are in one call."""
    for rank, text in enumerate(run_ranks(sums_of_other_sizes, 2, what)):
        first, *rows, mend = text.split("\n")
        who, other = f"rank {rank} (dp={rank})", f"rank {1 - rank} (dp={1 - rank})"
        assert first == f"fs.ops.psum got tensors of different sizes on {who} than on {other}."
        assert rows == [f"  {who}: {sizes[1 - rank]} bytes came, where {sizes[rank]} are sent"]
        assert mend.startswith("Pass the same shapes and dtypes on all ranks")
