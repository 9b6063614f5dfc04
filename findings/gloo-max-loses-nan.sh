#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. all_reduce with MAX or MIN keeps a NaN of one rank and loses a NaN of the other, so a
# maximum over ranks (a loss, a gradient's amax) can look finite. SUM keeps it.
# Expected: NaN, as from torch.maximum and torch.minimum.
# Seen:
#   torch.maximum nan torch.minimum nan
#   MAX: NaN on rank 0 gives nan, on rank 1 gives 1.0
#   MIN: NaN on rank 0 gives nan, on rank 1 gives 1.0
#   SUM: NaN on rank 0 gives nan, on rank 1 gives nan
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, nan, one = dist.get_rank(), torch.tensor(float("nan")), torch.tensor(1.0)
if rank == 0:
    print(f"torch.maximum {torch.maximum(one, nan)} torch.minimum {torch.minimum(one, nan)}")
for name in ("MAX", "MIN", "SUM"):
    found = []
    for where in range(2):
        x = (nan if rank == where else one).clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        found.append(x.item())
    if rank == 0:
        print(f"{name}: NaN on rank 0 gives {found[0]}, on rank 1 gives {found[1]}")
dist.destroy_process_group()
PY
compare
