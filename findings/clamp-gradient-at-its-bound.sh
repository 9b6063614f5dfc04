#!/usr/bin/env bash
# torch 2.13.0 and 2.15.0. The gradient of clamp at its bound changed: from 1 to 0 for bounds that are numbers, and
# from 1 to 0.5 for bounds that are tensors. hardtanh, the same function, has 0 in both. (On Linux, torch 2.15.0 may be
# a build with CUDA of several GB; it runs on the CPU.)
# Expected: one gradient in both versions, and for both kinds of bounds.
# Seen:
#   2.13.0 clamp(x, 0, 1) at 0 and 1: [1.0, 1.0]
#   2.13.0 clamp(x, tensor(0), tensor(1)) at 0 and 1: [1.0, 1.0]
#   2.13.0 hardtanh(x, 0, 1) at 0 and 1: [0.0, 0.0]
#   2.15.0 clamp(x, 0, 1) at 0 and 1: [0.0, 0.0]
#   2.15.0 clamp(x, tensor(0), tensor(1)) at 0 and 1: [0.5, 0.5]
#   2.15.0 hardtanh(x, 0, 1) at 0 and 1: [0.0, 0.0]
set -euo pipefail
source "$(dirname "$0")/env.sh"
for version in 2.13.0 2.15.0; do
  packages torch==$version numpy==2.4.6
  run <<'PY'
import torch

for name, f in {
    "clamp(x, 0, 1)": lambda x: x.clamp(0, 1),
    "clamp(x, tensor(0), tensor(1))": lambda x: x.clamp(torch.tensor(0.0), torch.tensor(1.0)),
    "hardtanh(x, 0, 1)": lambda x: torch.nn.functional.hardtanh(x, 0.0, 1.0),
}.items():
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    (grad,) = torch.autograd.grad(f(x).sum(), x)
    print(f"{torch.__version__.partition('+')[0]} {name} at 0 and 1: {grad.tolist()}")
PY
done
compare
