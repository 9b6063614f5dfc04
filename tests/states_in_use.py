"""What a state is read by beside a step, for states whose leaves are on the host or on disk.

In: a run of a decoder, a device. Out: numbers and tensors on the CPU.
"""

from dataclasses import replace

import torch

import fsharding as fs
from fsharding.testing import device_mesh
from tests.decoders import DecoderCase

CONFIG = fs.models.DecoderConfig(vocab_size=20, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=24)
CASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=8, strategy=fs.zero(3))
"""Small, since the backend of the simulated device lacks gathers in place of large leaves."""


def used_otherwise(memory, device="cpu"):
    """What a state is used by beside a step: an update, evaluation, norms, leaves that no unit gathers, text."""
    case = replace(CASE, strategy=CASE.strategy.with_memory(**memory))
    mesh = device_mesh(case.mesh, device)
    # With a constant rate: one that changes is a tensor, which the fused kernel rounds on a device alone.
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, eps=1e-3, weight_decay=0.1))
    state, _ = case.start(mesh, opt)
    batch = {name: x.to(device) for name, x in case.batch(0, mesh).items()}
    loss = fs.model_loss(case.model)

    def decayed(params, batch):
        total, weight = loss(params, batch)
        return total + 0.1 * fs.tree.vdot(params, params), weight

    (value, _), grads = fs.value_and_grad(decayed, grads=state.layout.reduced)(state.params, batch)
    state = fs.update(state, grads, opt)
    whole = fs.gather_unit(state.params["head"])
    text = fs.models.generate(case.model, state, [[1, 2, 3]], 4)
    numbers = [*fs.evaluate(case.model)(state, batch), value, fs.global_norm(state.params), fs.global_norm(grads)]
    found = [*numbers, *fs.tree.leaves(whole), *fs.tree.leaves(fs.unshard(grads)), torch.as_tensor(text[0])]
    return [x.cpu() for x in found]
