"""The meter of host reads: what it counts, and what it does not."""

import pytest
import torch

from fsharding.testing import counting_host_reads

X = torch.tensor([3.0, 0.0, 1.0])
READS = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X.sum()),
    "int": lambda: int(X[0]),
    "if": lambda: 1 if X[0] > 0 else 2,
    "format": lambda: f"{X[0]:.1f}",
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 0],
    "equal": lambda: torch.equal(X, X),
    "index": lambda: [1, 2, 3, 4][torch.tensor(2)],
    "backward": lambda: _Reading.apply(X.clone().requires_grad_()).sum().backward(),
}


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * float(grads[0].sum())


@pytest.mark.parametrize("name", READS)
def test_reads_are_counted_with_their_line(name):
    with torch.autograd.set_multithreading_enabled(False), counting_host_reads() as seen:
        READS[name]()
    assert seen.count >= 1 and all("test_host_reads.py:" in line for line in seen.reads), seen


def test_arithmetic_shapes_and_memory_of_the_host_are_not():
    with counting_host_reads() as seen:
        y = torch.where(X > 1, X / X.sum(), 0.0).clamp(max=X.numel())
        torch.empty(3).copy_(y, non_blocking=True)
        y.numpy().tolist()
        X.shape[0] * X.dim()
    assert seen.reads == []
    float(X.sum())
    assert seen.count == 0, "the block has ended"


def test_a_copy_from_a_device_counts_unless_it_is_told_not_to_wait():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), counting_host_reads() as seen:
        x = torch.ones(4, device="cuda")
        x.to("cpu", non_blocking=True)
        assert seen.count == 0
        x.to("cpu")
        torch.empty(4).copy_(x)
    assert seen.count == 2
