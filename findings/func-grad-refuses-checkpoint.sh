#!/usr/bin/env bash
# torch 2.13.0. torch.utils.checkpoint cannot be used inside torch.func.grad in either of its forms.
# Expected: the gradient of sin at 0, which is 1, in both.
# Seen:
#   use_reentrant=False RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.
#   use_reentrant=True RuntimeError: In order to use an autograd.Function with functorch transforms
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch
from torch.utils.checkpoint import checkpoint

for reentrant in (False, True):
    try:
        print(torch.func.grad(lambda x: checkpoint(torch.sin, x, use_reentrant=reentrant))(torch.tensor(0.0)))
    except RuntimeError as error:
        text = str(error).partition(" Please")[0].partition(" (vmap")[0]
        print(f"use_reentrant={reentrant} RuntimeError: {text}")
PY
compare
