"""Modules of Transformer Engine on ranks, through a stand-in: one fp8 state for all of them, in every strategy."""

import sys

import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import checkpoint
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests import te_standin

OPT = fs.adamw(1e-2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [te_standin.TransformerLayer(16, 24, 2, hidden_dropout=0, attention_dropout=0)]
        )
        self.out = te_standin.LayerNormLinear(16, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def batch(mesh, number):
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(number))
    index, count = data_rank_and_size(mesh)
    return x.chunk(count)[index]


def trained(net, state, steps):
    """Losses of some steps, and the state after them."""

    def loss(params, x):
        return (net(params, x) - 1).square().sum(), x.numel()

    grad, found = fs.te.value_and_grad(loss, grads=state.layout.main), []
    for number in steps:
        (value, _), grads, fp8 = grad(state.params, batch(state.layout.mesh, number))
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, [x.tolist() for x in fs.tree.leaves(fp8)])
        assert all(other == told[0] for other in told), "every rank has the state of all"
        state = fs.update(state, grads, OPT)
        state = state.replace(params=net.with_state(state.params, fp8))
        found.append(float(value))
    return found, state


def everywhere(path):
    """Two steps under zero(1), a checkpoint, two more; and these two under other strategies from the checkpoint."""
    packages = te_standin.packages()
    torch.manual_seed(0)
    sys.modules.update(packages)
    try:
        net = fs.te.functionalize(Net(), te_standin.DelayedScaling(), units=("layers.*", "out"))
    finally:
        for name in packages:  # the ranks go on with other tests
            del sys.modules[name]
    mesh = fs.make_mesh(dp=2, device="cpu")
    layouts = {level: fs.plan_layout(net, mesh, strategy=fs.zero(level)) for level in (1, 3)}
    first, state = trained(net, fs.init_state(net, OPT, fs.random.key(0), layouts[1]), range(2))
    checkpoint.save(path, state)
    straight, last = trained(net, state, range(2, 4))
    starts = [checkpoint.load(path, layout) for layout in layouts.values()]
    for start in (*starts, fs.reshard(state, layouts[3])):
        again, end = trained(net, start, range(2, 4))
        assert again == straight, start.layout
        assert_bitwise_equal(fs.unshard(end.params), fs.unshard(last.params))
    return first, straight, [x.tolist() for x in fs.tree.leaves(fs.unshard(last.params)[fs.te.STATE])]


def test_one_state_for_all_ranks_in_every_strategy(tmp_path):
    found = run_ranks(everywhere, 2, tmp_path / "2")
    assert found[0] == found[1]
    first, straight, state = found[0]
    assert first[0] > first[1] > straight[1] and any(x not in (0, 0x3F800000) for leaf in state for x in _flat(leaf))


def _flat(x):
    return [y for part in x for y in _flat(part)] if isinstance(x, list) else [x]
