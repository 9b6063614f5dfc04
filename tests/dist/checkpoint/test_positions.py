"""Positions of data on real ranks: the same global batches on any mesh, uninterrupted or not."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base.errors import CheckpointError
from fsharding.checkpoint import manifest
from fsharding.testing import run_ranks
from tests.helpers import refusal

DOCUMENTS = [[7 + i % 40] * (1 + i * 5 % 17) for i in range(60)]
STEPS, CUT = 6, 4


class PerRank:
    """A loader whose position is another one on each data rank."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loss_fn(params, batch):
    x = fs.gather_unit(params)["w"][batch["tokens"]] - batch["targets"]
    return x.square().sum(), x.numel()


def trained(folder, axes):
    """The global batches that the ranks of a run saw up to STEPS, in a run that goes on if it can, and saves at CUT."""
    mesh = fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **axes)
    layout, opt = fs.plan_layout({"w": torch.zeros(64)}, mesh, tp="replicate"), fs.sgd(1e-4)
    state = fs.state_from_params(fs.shard({"w": torch.ones(64)}, layout), opt, fs.random.key(0), layout)
    step = fs.make_train_step(loss_fn, opt)
    data = fs.data.packed(DOCUMENTS, batch_size=4, seq_len=8, eos=0, seed=2, vocab_size=64)
    saver = fs.checkpoint.Checkpointer(folder, every=CUT, background=False, data=data)
    if saver.latest() is not None:
        state = saver.load(layout, opt=opt)
    index, count = fs.data_rank_and_size(mesh)
    own = folder.with_name("own")
    loader = PerRank(index)
    seen = []
    while state.step < STEPS:
        local = fs.local_batch(next(data), mesh)
        assert len(local["tokens"]) == 4 // count
        parts = [
            torch.empty_like(local["tokens"]) for _ in range(dist.get_world_size() if dist.is_initialized() else 1)
        ]
        if dist.is_initialized():
            dist.all_gather(parts, local["tokens"].contiguous())
        else:
            parts = [local["tokens"]]
        seen.append(torch.cat(parts[:: len(parts) // count]).tolist())
        state, _ = step(state, local)
        saver.after_step(state)
    if not own.exists() and count == 2:
        fs.checkpoint.save(own, state, data=loader)
        loader.at = None
        fs.checkpoint.load(own, layout, data=loader)
        assert loader.at == index
    elif own.exists():
        text = refusal(fs.checkpoint.load, own, layout, data=loader, kind=CheckpointError)
        assert f"got positions of 2 data ranks in {own}, and the mesh has 1." in text
        assert "The position of fs.data.packed loads on any mesh." in text and loader.at == index
    return seen


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"])
def test_a_run_goes_on_on_another_mesh_with_the_batches_that_it_would_have_seen(tmp_path, axes):
    (tmp_path / "whole").mkdir()
    want = trained(tmp_path / "whole", {"dp": 1})
    data = fs.data.packed(DOCUMENTS, batch_size=4, seq_len=8, eos=0, seed=2)
    assert want == [next(data)["tokens"].tolist() for _ in range(STEPS)]
    first, second = run_ranks(trained, 2, tmp_path / "ranks", axes)
    assert first == second == want
    assert trained(tmp_path / "ranks", {"dp": 1}) == want[CUT:]


def save_with_notes_of_one_rank(folder):
    layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=2, device="cpu", timeout=timedelta(seconds=20)))
    state = fs.state_from_params(fs.shard({"w": torch.ones(4)}, layout), fs.sgd(0.1), fs.random.key(0), layout)
    extra = [0] * 600 if dist.get_rank() == 1 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "limits", lambda others: (64 << 20, 1000))
        return refusal(fs.checkpoint.save, folder, state, extra=extra, data=PerRank([1] * 600), kind=CheckpointError)


def test_a_manifest_that_is_too_large_on_one_rank_alone_is_refused_on_all(tmp_path):
    texts = run_ranks(save_with_notes_of_one_rank, 2, tmp_path / "a")
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "fs.checkpoint.save failed on 1 of 2 ranks.\n  rank 1: fs.checkpoint.save cannot write a"
    )
    assert "at most 1,000 are read" in texts[0] and not (tmp_path / "a").exists()
