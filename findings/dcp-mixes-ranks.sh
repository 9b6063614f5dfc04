#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. A state that differs between ranks is saved without a warning, and the checkpoint mixes
# them: the tensor is rank 0's, the number is rank 1's.
# Expected: an error, or all values from one rank.
# Seen:
#   saved by rank 0: tensor 1.0, number 1
#   saved by rank 1: tensor 2.0, number 2
#   loaded by both: tensor 1.0, number 2
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
number = dist.get_rank() + 1
dcp.save({"tensor": torch.tensor([float(number)]), "number": number}, checkpoint_id="checkpoint")
loaded = {"tensor": torch.zeros(1), "number": 0}
dcp.load(loaded, checkpoint_id="checkpoint")
both = [None] * 2
dist.all_gather_object(both, (loaded["tensor"].item(), loaded["number"]))
if dist.get_rank() == 0:
    for rank in (0, 1):
        print(f"saved by rank {rank}: tensor {rank + 1.0}, number {rank + 1}")
    print("loaded by both: tensor {}, number {}".format(*both[0]) if both[0] == both[1] else both)
dist.destroy_process_group()
PY
compare
