#!/usr/bin/env bash
# torch 2.13.0. torch.func.grad runs the backward with grad mode on, so the graph of the backward is built and its
# tensors are held, even if nothing differentiates the result and the call is under no_grad.
# Expected: grad mode off, as in torch.autograd.grad without create_graph.
# Seen:
#   torch.autograd.grad: grad mode in the backward is False
#   torch.func.grad: grad mode in the backward is True
#   torch.func.grad under no_grad: grad mode in the backward is True
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        print(f"grad mode in the backward is {torch.is_grad_enabled()}")
        return 2 * g * ctx.saved_tensors[0]


x = torch.tensor(3.0)
print("torch.autograd.grad: ", end="")
leaf = x.clone().requires_grad_()
torch.autograd.grad(Square.apply(leaf), leaf)
print("torch.func.grad: ", end="")
torch.func.grad(Square.apply)(x)
print("torch.func.grad under no_grad: ", end="")
with torch.no_grad():
    torch.func.grad(Square.apply)(x)
PY
compare
