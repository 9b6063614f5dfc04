#!/usr/bin/env bash
# torch 2.13.0, gloo, 4 ranks. FSDP2 over tensor parallel on one dim: a weight with 5 rows on a 2 x 2 mesh is sharded
# and its full value can be read. Loading this full value raises an AssertionError without a text; 4 rows load.
# Expected: what can be read can be loaded.
# Seen:
#   4 rows: shards [[0.0], [2.0], [1.0], [3.0]], full [0.0, 1.0, 2.0, 3.0], loaded
#   5 rows: shards [[0.0, 1.0], [3.0], [2.0], [4.0]], full [0.0, 1.0, 2.0, 3.0, 4.0], AssertionError('')
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run 4 <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for rows in (4, 5):
    layer = torch.nn.Linear(1, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(rows).view(rows, 1))
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    shards = [None] * 4
    dist.all_gather_object(shards, layer.weight.to_local().flatten().tolist())
    full = layer.weight.full_tensor()
    try:
        set_model_state_dict(layer, {"weight": full}, options=StateDictOptions(full_state_dict=True))
        loaded = "loaded"
    except AssertionError as error:
        loaded = f"AssertionError({str(error)!r})"
    if dist.get_rank() == 0:
        print(f"{rows} rows: shards {shards}, full {full.flatten().tolist()}, {loaded}")
dist.destroy_process_group()
PY
compare
