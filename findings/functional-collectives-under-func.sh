#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. A functional all-reduce raises under torch.func.grad, and under torch.func.jvp it drops
# the tangent without an error.
# Expected: a gradient, and the tangent 4: a sum over two ranks of two elements is linear, so its tangent is its value.
# Seen:
#   func.grad RuntimeError: In order to use an autograd.Function with functorch transforms
#   func.jvp value 4.0 tangent 0.0
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

dist.init_process_group("gloo")
x = torch.ones(2)


def total(x):
    return collectives.all_reduce(x * 1.0, "sum", dist.group.WORLD).sum()


try:
    grad = torch.func.grad(total)(x)
except RuntimeError as error:
    grad = f"RuntimeError: {str(error).partition(' (vmap')[0]}"
value, tangent = torch.func.jvp(total, (x,), (torch.ones(2),))
if dist.get_rank() == 0:
    print("func.grad", grad)
    print(f"func.jvp value {value} tangent {tangent}")
dist.destroy_process_group()
PY
compare
