"""What a state is read by beside a step, for states whose leaves are on the host or on disk.

In: a run of a decoder, a device. Out: numbers and tensors on the CPU.
"""

import torch

import fsharding as fs
from fsharding.testing import device_mesh


def used_otherwise(case, device="cpu"):
    """What a state is read by beside a step: evaluation, norms, leaves that no unit gathers, text."""
    mesh = device_mesh(case.mesh, device)
    state, _ = case.start(mesh)
    batch = {name: x.to(device) for name, x in case.batch(0, mesh).items()}
    loss = fs.model_loss(case.model)

    def decayed(params, batch):
        total, weight = loss(params, batch)
        return total + 0.1 * fs.tree.vdot(params, params), weight

    (value, _), grads = fs.value_and_grad(decayed, grads=state.layout.reduced)(state.params, batch)
    whole = fs.gather_unit(state.params["head"])
    text = fs.models.generate(case.model, state, [[1, 2, 3]], 4)
    numbers = [*fs.evaluate(case.model)(state, batch), value, fs.global_norm(state.params), fs.global_norm(grads)]
    found = [*numbers, *fs.tree.leaves(whole), *fs.tree.leaves(fs.unshard(grads)), torch.as_tensor(text[0])]
    return [x.cpu() for x in found]
