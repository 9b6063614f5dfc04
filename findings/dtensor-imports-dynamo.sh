#!/usr/bin/env bash
# torch 2.13.0, gloo, 1 rank. The first DTensor imports torch._dynamo, the front end of torch.compile, though nothing is
# compiled.
# Expected: False in both lines.
# Seen:
#   torch._dynamo imported with a mesh: False
#   torch._dynamo imported with the first DTensor: True
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 1 <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
print("torch._dynamo imported with a mesh:", "torch._dynamo" in sys.modules)
DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
print("torch._dynamo imported with the first DTensor:", "torch._dynamo" in sys.modules)
dist.destroy_process_group()
PY
compare
