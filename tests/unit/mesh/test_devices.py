"""Which accelerator a process takes, of those that it sees, and what a mesh refuses; no accelerator is needed for that."""

from __future__ import annotations

import pytest
import torch

import fsharding as fs
from fsharding.base import devices
from fsharding.base.errors import ArgumentError, MeshError
from fsharding.mesh.device_mesh import _own_index
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
        (4, {}, 2),  # the program has chosen the device with index 2
    ],
)
def test_a_process_takes_its_own(visible, environment, index, monkeypatch):
    shown(monkeypatch, visible, environment)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert _own_index("cuda", 2) == index


def test_more_processes_than_devices(monkeypatch):
    shown(monkeypatch, 2, {"LOCAL_RANK": "2"})
    with pytest.raises(MeshError, match="finds 2 devices, but LOCAL_RANK=2"):
        _own_index("cuda", 4)


@pytest.mark.skipif(devices.accelerator() != "cpu", reason="an accelerator is here")
def test_an_accelerator_that_is_not_here():
    none = 'fs.make_mesh finds no accelerator for device="xpu"; this machine has none.\n'
    mend = 'Use the CPU, fs.make_mesh(device="cpu"), or check the driver and CUDA_VISIBLE_DEVICES.'
    assert refusal(lambda: fs.make_mesh(device="xpu")) == none + mend
    with fake_ranks(1, dp=2):
        text = refusal(lambda: fs.make_mesh(device="xpu", dp=2))
    assert text == f'{none}{mend} On the CPU, Precision(sums="native") sends what an accelerator would send.'


@pytest.mark.parametrize("device", ["gpu", "cuda:0", "meta", 3])
def test_what_is_no_type_of_device(device):
    with pytest.raises(ArgumentError, match="takes device= as a device type of torch"):
        fs.make_mesh(device=device)


def test_what_an_accelerator_lacks_is_listed(monkeypatch):
    shown(monkeypatch, 1, {})
    monkeypatch.setattr(devices, "missing_parts", lambda device, ranks: ["events: not implemented"])
    with pytest.raises(MeshError, match=r'cannot use device="xpu", which lacks what a mesh needs\.\n  events: not'):
        _own_index("xpu", 1)
    monkeypatch.undo()
    assert devices.missing_parts("mtia", 2)[-1].startswith("a collective backend: none is registered")


def shown(monkeypatch, visible, environment):
    monkeypatch.setattr(devices, "is_here", lambda device: True)
    monkeypatch.setattr(devices, "missing_parts", lambda device, ranks: [])
    monkeypatch.setattr(devices, "device_count", lambda: visible)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
