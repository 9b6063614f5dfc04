"""Counts elements that the fused AdamW rounds otherwise in a part of a tensor; times norms, copies and fresh memory."""

import random
import statistics
import time

import torch

from fsharding.optim.adam import _fused
from fsharding.optim.clip import _square_sum

torch.set_num_threads(1)
random.seed(0)
generator = torch.Generator().manual_seed(0)


def ms(call, rounds=9):
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return f"{statistics.median(times):.1f} ms"


def plain(parts):
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    steps = [torch.tensor(3.0) for _ in parts]
    columns = [list(column) for column in zip(*parts, strict=True)]
    torch._fused_adamw_(*columns, [], steps, **rates, weight_decay=0.0, amsgrad=False, maximize=False)


def padded(parts):
    columns = [list(column) for column in zip(*parts, strict=True)]
    _fused(tuple(columns), columns[2], 3, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0})


differ, total = {plain: 0, padded: 0}, 0
for _ in range(300):
    n = random.randint(2, 9000)
    cut, total = random.randint(1, n - 1), total + n
    noise = [torch.randn(n, generator=generator) for _ in range(2)]
    leaf = [torch.zeros(n), noise[0], noise[1] * 0.1, torch.rand(n, generator=generator) * 0.01]
    for step in differ:
        whole, left, right = [x.clone() for x in leaf], [x[:cut].clone() for x in leaf], [x[cut:].clone() for x in leaf]
        step([whole])
        step([left, right])
        differ[step] += int((torch.cat((left[0], right[0])) != whole[0]).sum())
print({step.__name__: f"{count} of {total}" for step, count in differ.items()})

x = torch.randn(17_000_000)
print("norm, chunks", ms(lambda: _square_sum(x).sqrt()))
print("norm, vector_norm float64", ms(lambda: torch.linalg.vector_norm(x, dtype=torch.float64)))
print("norm, double", ms(lambda: x.double().norm()))
print("norm, float32", ms(lambda: torch.linalg.vector_norm(x)))

big, warm = x[: 1 << 24], torch.ones(1 << 24)
print("fresh clone of 64 MB", ms(lambda: big.clone()))
print("copy into a warm buffer", ms(lambda: warm.copy_(big)))

addresses = []
for _ in range(20):
    buffer = torch.empty(1000, 1000)
    addresses.append(buffer.data_ptr())
    del buffer
print(len(set(addresses)), "addresses of 20 buffers")
