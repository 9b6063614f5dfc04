#!/usr/bin/env bash
# torch 2.13.0, gloo, 2 ranks. gloo refuses float8 tensors in collectives that only copy bytes.
# Expected: an all-gather and a broadcast work for every dtype, as they do for bfloat16.
# Seen:
#   bfloat16 all_gather: works
#   bfloat16 broadcast: works
#   float8_e4m3fn all_gather: RuntimeError: Invalid scalar type
#   float8_e4m3fn broadcast: RuntimeError: Invalid scalar type
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 2 <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    x = torch.ones(2).to(dtype)
    calls = {
        "all_gather": lambda x=x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
        "broadcast": lambda x=x: dist.broadcast(x, 0),
    }
    for name, call in calls.items():
        try:
            call()
            seen = "works"
        except RuntimeError as error:
            seen = f"RuntimeError: {error}"
        if dist.get_rank() == 0:
            print(f"{str(dtype).removeprefix('torch.')} {name}: {seen}")
dist.destroy_process_group()
PY
compare
