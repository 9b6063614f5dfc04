#!/usr/bin/env bash
# torch 2.13.0, one process. DCP loads a float32 tensor into a tensor of another dtype without a warning, an integer
# one included: the fraction is lost. A different shape is refused.
# Expected: a different dtype is refused, too.
# Seen:
#   saved float32 [1.7, -0.3]
#   loaded torch.int64 [1, 0]
#   loaded torch.bool [True, True]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch
import torch.distributed.checkpoint as dcp

dcp.save({"x": torch.tensor([1.7, -0.3])}, checkpoint_id="checkpoint")
print("saved float32 [1.7, -0.3]")
for dtype in (torch.int64, torch.bool):
    target = {"x": torch.zeros(2, dtype=dtype)}
    dcp.load(target, checkpoint_id="checkpoint")
    print("loaded", target["x"].dtype, target["x"].tolist())
PY
compare
