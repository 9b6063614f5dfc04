#!/usr/bin/env bash
# torch 2.13.0, safetensors 0.8.0, one process. HuggingFaceStorageWriter(enable_consolidation=True) writes shards, then
# one file of all tensors. A 0-d tensor is right in the shard and 0 in that file; one of shape (1,) is right in both.
# Expected: equal values in both files.
# Seen:
#   shard: scalar 7.0, vector [7.0]
#   consolidated: scalar 0.0, vector [7.0]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
run <<'PY'
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

state = {"scalar": torch.tensor(7.0), "vector": torch.tensor([7.0])}
writer = dcp.HuggingFaceStorageWriter("out", save_distributed=True, enable_consolidation=True)
dcp.save(state, storage_writer=writer)
for name, folder in {"shard": "out/sharded", "consolidated": "out"}.items():
    (path,) = Path(folder).glob("*.safetensors")
    found = load_file(path)
    print(f"{name}: scalar {found['scalar'].tolist()}, vector {found['vector'].tolist()}")
PY
compare
