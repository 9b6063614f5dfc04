#!/usr/bin/env bash
# torch 2.13.0. A Function whose backward is marked once_differentiable says that it has no second derivative. The mark
# raises in tensor.backward() alone, and there only if the incoming gradient depends on the input. Everywhere else the
# second derivative of the Function counts as 0, without an error.
# Expected: an error in each line, or the second derivatives at 2: 14 for x**3 + x**2, 482 for (x**3)**2 + x**2.
# Seen:
#   cube(x) + x**2, tensor.backward: 2.0
#   cube(x) + x**2, torch.autograd.grad: 2.0
#   cube(x) + x**2, torch.autograd.functional.hessian: 2.0
#   cube(x) + x**2, torch.func.grad twice: 2.0
#   cube(x)**2 + x**2, tensor.backward: RuntimeError: trying to differentiate twice a function that was marked with @once_differentiable
#   cube(x)**2 + x**2, torch.autograd.grad: 2.0
#   cube(x)**2 + x**2, torch.autograd.functional.hessian: 2.0
#   cube(x)**2 + x**2, torch.func.grad twice: 2.0
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch
from torch.autograd.function import once_differentiable


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


def first_derivative(f, x):
    return torch.autograd.grad(f(x), x, create_graph=True)[0]


def by_backward(f, x):
    first_derivative(f, x).backward()
    return x.grad


calls = {
    "tensor.backward": by_backward,
    "torch.autograd.grad": lambda f, x: torch.autograd.grad(first_derivative(f, x), x)[0],
    "torch.autograd.functional.hessian": torch.autograd.functional.hessian,
    "torch.func.grad twice": lambda f, x: torch.func.grad(torch.func.grad(f))(x),
}
functions = {"cube(x) + x**2": lambda x: Cube.apply(x) + x**2, "cube(x)**2 + x**2": lambda x: Cube.apply(x) ** 2 + x**2}
for text, f in functions.items():
    for name, call in calls.items():
        try:
            print(f"{text}, {name}: {call(f, torch.tensor(2.0, requires_grad=True)).item()}")
        except RuntimeError as error:
            print(f"{text}, {name}: RuntimeError: {error}")
PY
compare
