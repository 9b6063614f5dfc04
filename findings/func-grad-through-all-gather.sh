#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. dist.all_gather writes into tensors that autograd does not know. Without transforms the
# backward raises; torch.func.grad returns zeros without an error.
# Expected: an error in both, or a gradient that is not 0.
# Seen:
#   torch.autograd.grad RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
#   torch.func.grad [0.0, 0.0]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def loss(x):
    rows = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(rows, x * 1.0)
    return torch.stack(rows).square().sum()


x = torch.ones(2, requires_grad=True)
try:
    plain = torch.autograd.grad(loss(x), x)[0].tolist()
except RuntimeError as error:
    plain = f"RuntimeError: {error}"
inside = torch.func.grad(loss)(torch.ones(2)).tolist()
if dist.get_rank() == 0:
    print("torch.autograd.grad", plain)
    print("torch.func.grad", inside)
dist.destroy_process_group()
PY
compare
