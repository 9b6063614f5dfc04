"""Measures the peak memory of a gradient by torch.autograd, with remat, by torch.func.grad, and by torch.func.vjp.

Run it with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=0, and one of autograd, remat, func, vjp as argument.
"""

import resource
import sys

import torch
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
mode = sys.argv[1] if len(sys.argv) > 1 else "autograd"
weights = [torch.randn(512, 512) / 512**0.5 for _ in range(20)]
x = torch.randn(4096, 512)


def layer(y, w):
    return gelu(y @ w)


def loss(weights):
    y = x
    for w in weights:
        y = checkpoint(layer, y, w, use_reentrant=False) if mode == "remat" else layer(y, w)
    return y.square().sum()


before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if mode == "func":
    torch.func.grad(loss)(weights)
elif mode == "vjp":
    pull = torch.func.vjp(loss, weights)[1]
    with torch.no_grad():
        pull(torch.ones(()), retain_graph=False, create_graph=False)
else:
    weights = [w.requires_grad_() for w in weights]
    torch.autograd.grad(loss(weights), weights)
print(mode, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "MB")
