#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks, a mesh of rank 0. On a rank outside the mesh, DTensor.from_local takes shape=() for "no
# shape given" and infers (0,), the shape of the empty local tensor. Ranks then disagree on the shape of one tensor.
# Expected: the global shape that was passed, on both ranks, as for shape=(2, 3).
# Seen:
#   shape=(2, 3): rank 0 (2, 3), rank 1 (2, 3)
#   shape=(): rank 0 (), rank 1 (0,)
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

dist.init_process_group("gloo")
mesh = DeviceMesh("cpu", [0])
for whole in (torch.ones(2, 3), torch.tensor(1.0)):
    mine = whole if dist.get_rank() == 0 else torch.empty(0)
    x = DTensor.from_local(mine, mesh, [Replicate()], run_check=False, shape=whole.shape, stride=whole.stride())
    shapes = [None] * 2
    dist.all_gather_object(shapes, tuple(x.shape))
    if dist.get_rank() == 0:
        print(f"shape={tuple(whole.shape)}: rank 0 {shapes[0]}, rank 1 {shapes[1]}")
dist.destroy_process_group()
PY
compare
