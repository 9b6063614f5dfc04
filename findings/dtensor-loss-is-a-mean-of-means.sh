#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. The mean reduction of a loss over DTensors whose rows do not divide by the ranks is the
# mean of the ranks' means, without a warning: rows of a rank with fewer rows weigh more. The same loss written with
# .mean() is right.
# Expected: 6 from the first three, (0 + 1 + 4 + 9 + 16) / 5, and twice 1.6.
# Seen:
#   mse_loss of tensors 6.0
#   mse_loss of DTensors 7.0833 (Partial(avg),)
#   (x - y).square().mean() of DTensors 6.0
#   smooth_l1_loss of tensors 1.6, of DTensors 1.8333
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

dist.init_process_group("gloo")
x, y = torch.arange(5.0), torch.zeros(5)
mesh = init_device_mesh("cpu", (2,))
dx, dy = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
loss = F.mse_loss(dx, dy)
smooth = F.smooth_l1_loss(dx, dy)
found = [t.full_tensor().item() for t in (loss, (dx - dy).square().mean(), smooth)]
if dist.get_rank() == 0:
    print("mse_loss of tensors", F.mse_loss(x, y).item())
    print("mse_loss of DTensors", round(found[0], 4), loss.placements)
    print("(x - y).square().mean() of DTensors", found[1])
    print(f"smooth_l1_loss of tensors {F.smooth_l1_loss(x, y):.1f}, of DTensors {found[2]:.4f}")
dist.destroy_process_group()
PY
compare
