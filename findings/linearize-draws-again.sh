#!/usr/bin/env bash
# torch 2.13.0. torch.func.linearize of a function with dropout returns a linear map that draws a new mask at each
# call, so it is no fixed map and belongs to no value that was computed. torch.func.vjp keeps the mask.
# Expected: two calls agree with each other and with the value, as with vjp.
# Seen:
#   linearize: equal calls False, the value's mask False
#   vjp: equal calls True, the value's mask True
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch

torch.manual_seed(0)
x = torch.ones(64)
for name in ("linearize", "vjp"):
    value, linear = getattr(torch.func, name)(torch.nn.functional.dropout, x)
    calls = [linear(torch.ones(64)) for _ in range(2)]
    first, second = (c if name == "linearize" else c[0] for c in calls)
    print(f"{name}: equal calls {torch.equal(first, second)}, the value's mask {torch.equal(first, value)}")
PY
compare
