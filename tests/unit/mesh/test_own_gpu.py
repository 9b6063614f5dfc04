"""Which GPU a process takes, of those that it sees; nobody needs one for that."""

from __future__ import annotations

import pytest
import torch

from fsharding.base import _compat
from fsharding.base.calls import call_as
from fsharding.base.errors import MeshError
from fsharding.mesh.device_mesh import _own_gpu
from tests.helpers import fake_ranks, refusal


@pytest.mark.parametrize(
    ("visible", "environment", "index"),
    [
        (1, {}, 0),
        (1, {"LOCAL_RANK": "3"}, 0),  # Slurm and Kubernetes show each process its own
        (1, {"SLURM_LOCALID": "3"}, 0),
        (4, {"LOCAL_RANK": "3"}, 3),
        (4, {"SLURM_LOCALID": "2"}, 2),
        (4, {"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),  # torchrun in a job of one task a machine
        (4, {}, 2),  # the program has called torch.cuda.set_device(2)
    ],
)
def test_a_process_takes_its_own(visible, environment, index, monkeypatch):
    shown(monkeypatch, visible, environment)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert _own_gpu() == index


@pytest.mark.parametrize(
    ("visible", "environment", "rule"),
    [
        (0, {}, 'finds no GPU for device="cuda"'),
        (2, {"LOCAL_RANK": "2"}, "finds 2 GPUs, none of which is left for LOCAL_RANK=2"),
    ],
)
def test_a_process_without_one_says_so(visible, environment, rule, monkeypatch):
    shown(monkeypatch, visible, environment)
    with pytest.raises(MeshError, match=rule):
        _own_gpu()


def test_fake_ranks_need_none(monkeypatch):
    """Without a GPU, and where torch cannot be told to have fake tensors of "cuda"."""
    shown(monkeypatch, 0, {})
    answers = iter([True, False])
    monkeypatch.setattr(_compat, "fake_cuda", lambda: next(answers))
    with fake_ranks(1, dp=2):
        assert _own_gpu() is None
        text = refusal(lambda: call_as("fs.make_mesh", _own_gpu))
    assert text == (
        f'fs.make_mesh cannot have fake tensors of device="cuda" in torch {torch.__version__} without a GPU.\n'
        'Make the mesh on the CPU: fs.make_mesh(device="cpu"); Precision(sums="native") sends what CUDA sends.'
    )


def shown(monkeypatch, visible, environment):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
