"""Checkpoints on real ranks: what is written, and failures of one rank."""

import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import RankError
from fsharding.checkpoint.chunks import from_metadata
from fsharding.checkpoint.reader import open_source
from fsharding.checkpoint.state_leaves import StateLeaf, shares
from fsharding.checkpoint.writer import Writer, write_metadata
from fsharding.mesh import device_mesh
from fsharding.mesh.consistency import checksum
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import Assigned
from fsharding.testing import run_ranks
from tests.checkpoints import reseal
from tests.checkpoints_on_ranks import (
    answer,
    compare,
    load_into,
    planned,
    save_some,
    some_state,
    whole,
)


def stored(path):
    return from_metadata(path, (path / ".metadata").read_bytes(), ck.metadata(path))[0]


def test_every_element_is_written_once(tmp_path):
    run_ranks(save_some, 4, "zero0", tmp_path / "a")
    manifest = ck.metadata(tmp_path / "a")
    for path, leaf in stored(tmp_path / "a").items():
        assert len(leaf.chunks) == 1, path
    assert sorted(manifest.files) == [".metadata", *(f"__{r}_0.distcp" for r in range(4))]
    assert all(file.bytes > 0 for file in manifest.files.values())
    run_ranks(save_some, 4, "hfsdp_bf16", tmp_path / "a")
    cut = stored(tmp_path / "a")["opt_state.states.1.groups.decayed.mu.table"]
    assert len(cut.chunks) == 4
    assert sum(boxes.volume(chunk.box) for chunk in cut.chunks) == 7 * 13


def layers_of(rank, path):
    """Rows 0 and 3 live on the first stage, 1 and 2 on the second: two boxes on one rank."""
    mesh = fs.make_mesh(pp=2, device="cpu")
    sharding = fs.NamedSharding(mesh, assigned=(Assigned.indices("pp", 0, ((0, 3), (1, 2))),))
    leaf = torch.arange(8.0).reshape(4, 2)
    mine = leaf[[(0, 3), (1, 2)][device_mesh.coordinate(mesh)["pp"]], :]
    mine = StateLeaf((4, 2), sharding, mine)
    writers = shares({"x": mine}, (0, 1))["x"]
    with Writer(path, dist.get_rank()) as writer:
        for box, part in mine.kept().items():
            assert writers[box] == dist.get_rank()
            writer.add("x", (4, 2), box, part)
        written = [None, None]
        dist.all_gather_object(written, writer.close())
    if dist.get_rank() == 0:
        write_metadata(path, written)
    dist.barrier()
    again, plain = torch.zeros(2, 2), torch.zeros(4, 2)
    for shards in (StateLeaf((4, 2), sharding, again), StateLeaf((4, 2), None, plain)):
        for box, part in shards.kept().items():
            open_source(path, None).read("x", box, part)
    return torch.equal(again, mine.local), torch.equal(plain, leaf)


def test_assigned_leaves(tmp_path):
    assert run_ranks(layers_of, 2, None, tmp_path) == [(True, True)] * 2


# ----------------------------------------------------------------------------------------------------- one rank fails
def save_with_a_full_disk(path, rank):
    """No file of the chosen rank may be larger than 2000 bytes, which the kernel sees to."""
    state = some_state(planned("zero3"))
    ck.save(path / "1", state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        texts = [answer(ck.save, path / name, state.replace(step=torch.tensor(50))) for name in ("1", "2")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    steps = [int(ck.load(path / "1", planned("zero3")).step)]
    dist.barrier()
    ck.save(path / "1", state.replace(step=torch.tensor(60)))
    return texts, [*steps, int(ck.load(path / "1", planned("zero3")).step)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank(tmp_path, rank):
    for texts, steps in run_ranks(save_with_a_full_disk, 2, tmp_path, rank):
        for text in texts:
            assert text.startswith("fs.checkpoint.save failed on 1 of 2 ranks.\n" + f"  rank {rank}: ")
        assert steps == [41, 60]
    assert os.listdir(tmp_path) == ["1"]


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def save_with_a_fault(path, where, rank):
    state = some_state(planned("zero2"))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(where, refuse)
        return answer(ck.save, path / "a", state)


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("fsharding.checkpoint.directory._locked", 0),
        ("os.fsync", 1),
        ("fsharding.checkpoint.state_leaves.shares", 1),
        ("fsharding.checkpoint.writer.Writer.add", 1),
        ("fsharding.checkpoint.writer._HashedStream._hash", 1),
        ("fsharding.checkpoint.saving.write_metadata", 0),
        ("fsharding.checkpoint.saving.commit", 0),
    ],
)
def test_a_fault_in_any_phase_raises_on_all_ranks(tmp_path, where, rank):
    # Planning touches no file.
    named = "" if where.endswith("shares") else f": '{tmp_path / 'a'}'"
    fault = f"PermissionError: [Errno 13] Permission denied{named}"
    want = f"fs.checkpoint.save failed on 1 of 2 ranks.\n  rank {rank}: {fault}"
    assert run_ranks(save_with_a_fault, 2, tmp_path, where, rank) == [want] * 2
    assert os.listdir(tmp_path) == []


def save_what_differs(path):
    state = some_state(planned("zero3"))
    rank = dist.get_rank()
    texts = [answer(ck.save, path / "a", state.replace(key=torch.tensor([rank, 0])))]
    texts.append(answer(ck.save, path / f"{rank}", state))
    texts.append(answer(ck.save, path / "a", state.replace(opt_state={"x": torch.zeros(1 + rank // 2)})))
    return texts


def test_what_differs_between_ranks_is_not_saved(tmp_path):
    head = "fs.checkpoint.save got different values on different ranks.\n"
    mend = "\nGive all ranks the same; what differs between them belongs into a sharded leaf, or files of your own."
    key = "  leaf key: " + ", ".join(f"rank {r} has {checksum(torch.tensor([r, 0]))}" for r in (3, 2, 1, 0))
    path = "  path: " + ", ".join(f"rank {r} has {tmp_path / str(r)}" for r in (3, 2, 1, 0))
    for texts in run_ranks(save_what_differs, 4, tmp_path):
        assert texts[:2] == [head + key + mend, head + path + mend]
        assert re.search(r"\n  tree of leaves: ranks 2, 3 have \w+, ranks 0, 1 have \w+\n", texts[2])
        assert "rank 1 has" not in texts[2]
    assert os.listdir(tmp_path) == []


def save_false_claims(path):
    """16 rows as 9 + 7, which torch writes without row 8; and a sum that nobody has taken."""
    state = some_state(planned("zero3"))
    mesh, rank = state.layout.mesh, dist.get_rank()
    rows = torch.zeros(9 - 2 * rank, 2)
    uneven = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((16, 2)), stride=(2, 1))
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
    return answer(ck.save, path / "a", state.replace(opt_state={"uneven": uneven, "partial": partial}))


def test_a_dtensor_that_claims_what_it_has_not(tmp_path):
    want = ["fs.checkpoint.save failed on 2 of 2 ranks."]
    for rank, held in enumerate((9, 7)):
        want += [
            f"  rank {rank}: fs.checkpoint.save cannot save 2 leaves.",
            "      opt_state.partial is P() unreduced over dp: reduce it",
            f"      opt_state.uneven claims P('dp') of [16, 2], that is [8, 2] here, but holds [{held}, 2]",
        ]
    assert run_ranks(save_false_claims, 2, tmp_path) == ["\n".join(want)] * 2
    assert os.listdir(tmp_path) == []


def load_damaged(path):
    return answer(ck.load, path, planned("zero3"))


def test_damage_is_told_on_all_ranks(tmp_path):
    run_ranks(save_some, 4, "zero3", tmp_path / "a")
    for rank in (1, 3):
        file = tmp_path / "a" / f"__{rank}_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    for n in (2, 4):
        texts = run_ranks(load_damaged, n, tmp_path / "a")
        assert len(set(texts)) == 1
        assert texts[0].startswith(
            f"fs.checkpoint.load refuses {tmp_path / 'a'}: 2 of its 5 files are damaged.\n  __1_0.distcp has"
        )
        assert "\n  __3_0.distcp has the sha256" in texts[0]
    (tmp_path / "a" / "__3_0.distcp").unlink()
    assert "__3_0.distcp is missing" in run_ranks(load_damaged, 2, tmp_path / "a")[0]
    texts = run_ranks(load_damaged, 2, tmp_path / "absent")
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"fs.checkpoint.load finds no checkpoint at {tmp_path / 'absent'}: there is no such")


def load_with_a_fault(path):
    texts = []
    for where, name in (("directory.read_manifest", "a"), ("reader.Source.read", "a"), ("reader.parse_record", "old")):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(f"fsharding.checkpoint.{where}", refuse)
            texts.append(answer(ck.load, path / name, planned("zero3")))
    return texts


def test_a_rank_that_cannot_read(tmp_path):
    run_ranks(save_some, 2, "zero3", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    reseal(tmp_path / "old", chunks=None)
    head = "fs.checkpoint.load failed on 1 of 2 ranks.\n  rank 1: "
    for texts in run_ranks(load_with_a_fault, 2, tmp_path):
        assert texts == [head + "PermissionError: [Errno 13] Permission denied"] * 3


def save_and_die(path, where):
    state = some_state(planned("zero3"))
    ck.save(path / "1", state)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        pytest.MonkeyPatch().setattr(where, die)
    ck.save(path / "2", state.replace(step=torch.tensor(50)))


@pytest.mark.parametrize("where", ["writer.Writer.add", "writer.Writer.close"])
def test_a_rank_that_dies(tmp_path, where):
    with pytest.raises(RankError, match="rank 1 died of SIGKILL"):
        run_ranks(save_and_die, 2, tmp_path, f"fsharding.checkpoint.{where}", timeout=30.0)
    assert sorted(os.listdir(tmp_path)) == ["1"], "rank 0 clears away what is not whole"
    assert ck.latest(tmp_path) == tmp_path / "1"
    loaded = run_ranks(load_into, 2, ["zero3"], tmp_path / "1", given=False)
    saved = whole(run_ranks(save_some, 2, "zero3", tmp_path / "2"))
    compare(saved, whole([held["zero3"][0] for held in loaded]), "zero3", 2, "zero3")
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
    assert isinstance(ck.latest(tmp_path), Path)
