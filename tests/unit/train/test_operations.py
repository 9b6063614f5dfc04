"""The operations of a call: kernels, and not the memory that a pool finds for them."""

import torch

from fsharding.base.errors import TransformError
from fsharding.comm.buffer_pool import Pool
from fsharding.train.operations import check_operations
from tests.helpers import refusal

CPU = torch.device("cpu")


def test_calls_may_take_other_buffers_of_a_pool():
    """As long as gloo's thread has not let go of a tensor, the next call finds its buffer in use and makes another."""
    pool, held = Pool(), []

    def call():
        x = pool.take(6 + len(held), torch.float32, CPU)[:6].view(2, 3)
        held.append(x)
        x.fill_(1.0)
        torch.empty_like(x).copy_(x)

    call()
    assert [row.text.split("(")[0] for row in check_operations(call)] == [
        "aten.fill_.Scalar",
        "aten.copy_.default",
    ]
    assert len({x.data_ptr() for x in held}) == len(held) == 3


def test_a_kernel_on_another_number_is_another_operation():
    numbers = iter((2.0, 3.0))
    text = refusal(check_operations, lambda: torch.ones(3).mul_(next(numbers)), kind=TransformError).splitlines()
    assert [row.strip().split(" at ")[0] for row in text[1:3]] == [
        "operation 1 of a call: aten.mul_.Tensor(float32[3] on cpu, 2.0)",
        "operation 1 of the next: aten.mul_.Tensor(float32[3] on cpu, 3.0)",
    ]
