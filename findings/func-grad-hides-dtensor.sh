#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. Inside torch.func.grad a DTensor argument is seen as a plain Tensor: code that asks for
# its placements takes another path than outside. The gradient that comes out is a DTensor again.
# Expected: True, True in both lines.
# Seen:
#   outside: isinstance DTensor True, has placements True
#   inside func.grad: isinstance DTensor False, has placements False
#   gradient: DTensor
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")


def say(*words):
    if dist.get_rank() == 0:
        print(*words)


def total(x, where):
    say(f"{where}: isinstance DTensor {isinstance(x, DTensor)}, has placements {hasattr(x, 'placements')}")
    return x.sum()


x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
total(x, "outside")
grad = torch.func.grad(total)(x, "inside func.grad")
say("gradient:", type(grad).__name__)
dist.destroy_process_group()
PY
compare
