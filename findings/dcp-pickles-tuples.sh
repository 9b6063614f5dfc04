#!/usr/bin/env bash
# torch 2.13.0, one process. DCP flattens dicts and lists of tensors, and each tensor can be resharded. A tuple or a
# NamedTuple of tensors is pickled as one blob of bytes, which no other layout can load.
# Expected: a TensorStorageMetadata for each.
# Seen:
#   dict.a TensorStorageMetadata
#   list.0 TensorStorageMetadata
#   named BytesStorageMetadata
#   tuple BytesStorageMetadata
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp


class Named(NamedTuple):
    a: torch.Tensor


x = torch.ones(2)
dcp.save({"dict": {"a": x}, "list": [x], "tuple": (x,), "named": Named(x)}, checkpoint_id="checkpoint")
for key, entry in sorted(dcp.FileSystemReader("checkpoint").read_metadata().state_dict_metadata.items()):
    print(key, type(entry).__name__)
PY
compare
