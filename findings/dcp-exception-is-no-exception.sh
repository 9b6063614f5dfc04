#!/usr/bin/env bash
# torch 2.13.0, one process. DCP raises CheckpointException, which derives from BaseException: `except Exception`, as
# a program would write to resume from an older checkpoint, does not catch it.
# Expected: caught by `except Exception`.
# Seen:
#   shape (3,) saved, (4,) asked for: CheckpointException passes `except Exception`
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch
import torch.distributed.checkpoint as dcp

dcp.save({"x": torch.zeros(3)}, checkpoint_id="checkpoint")
try:
    try:
        dcp.load({"x": torch.zeros(4)}, checkpoint_id="checkpoint")
        seen = "loads"
    except Exception as error:
        seen = f"{type(error).__name__} is caught by `except Exception`"
except BaseException as error:
    seen = f"{type(error).__name__} passes `except Exception`"
print("shape (3,) saved, (4,) asked for:", seen)
PY
compare
