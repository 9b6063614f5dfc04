#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. An in-place all_reduce inside a function is ignored by autograd in eager mode (torch
# warns) and by torch.func.grad (no warning). torch.compile replaces it by a functional collective, whose backward
# adds the gradients of all ranks: one function has two gradients.
# Expected: the same gradient from all three.
# Seen:
#   eager [1.0, 1.0]
#   torch.func.grad [1.0, 1.0]
#   compiled [2.0, 2.0]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def loss(x):
    y = x * 1.0
    dist.all_reduce(y)
    return y.sum()


def grad(f):
    x = torch.ones(2, requires_grad=True)
    return torch.autograd.grad(f(x), x)[0].tolist()


found = {
    "eager": grad(loss),
    "torch.func.grad": torch.func.grad(loss)(torch.ones(2)).tolist(),
    "compiled": grad(torch.compile(loss, backend="eager")),
}
if dist.get_rank() == 0:
    for name, value in found.items():
        print(name, value)
dist.destroy_process_group()
PY
compare
