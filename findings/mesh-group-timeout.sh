#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. Process groups of a DeviceMesh, and of new_group, wait 30 minutes, whatever timeout
# init_process_group was given. A mesh dim that spans all ranks reuses the default group and keeps its timeout.
# Expected: the timeout of the default group everywhere.
# Seen:
#   default group 0:00:20
#   mesh dim of 1 rank 0:30:00
#   mesh dim of 2 ranks 0:00:20
#   new_group 0:30:00
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
groups = {
    "default group": dist.group.WORLD,
    "mesh dim of 1 rank": mesh.get_group("a"),
    "mesh dim of 2 ranks": mesh.get_group("b"),
    "new_group": dist.new_group([0, 1]),
}
if dist.get_rank() == 0:
    for name, group in groups.items():
        print(name, group._get_backend(torch.device("cpu")).options._timeout)
dist.destroy_process_group()
PY
compare
