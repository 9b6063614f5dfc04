"""Where the sums of a backend are: in the send buffer only while that lives for its caller."""

import pytest
import torch

from fsharding.base import _compat
from fsharding.comm import native
from fsharding.comm.handles import Memory
from fsharding.mesh.device_mesh import axis_group
from tests.helpers import fake_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("memory", "backends", "shares"), [
    (Memory(CPU), {"fake"}, True), (Memory(CPU), {"nccl"}, False), (None, {"fake"}, False),
])  # fmt: skip
def test_a_sum_that_is_kept_or_of_an_unknown_backend_has_memory_of_its_own(monkeypatch, memory, backends, shares):
    monkeypatch.setattr(native, "IN_PLACE", backends)
    with fake_ranks(1, dp=2) as mesh:
        exchange = native.Native(axis_group(mesh, ("dp",)), CPU).add_rows(8, torch.float32, memory, scatter=True)
        total = exchange.start().wait()
    assert total.shape == (1, 8)
    assert (_compat.storage_id(total) == _compat.storage_id(exchange.own)) is shares
