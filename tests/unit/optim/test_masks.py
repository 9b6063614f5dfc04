"""Labels of groups see the leaf of one layer, so a rule about dims treats a stack as torch treats its layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fsharding as fs
from fsharding import optim
from fsharding.testing import assert_trees_close

RATE, DECAY, STEPS = 1e-2, 0.5, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(5, 6), nn.ModuleList([Block(), Block()])
        self.norm, self.gain = nn.LayerNorm(6), nn.Parameter(torch.ones(()))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.gain


def loss_of(y):
    return (y - torch.linspace(-1, 1, y.numel()).view_as(y)).square().sum()


def trained_by_torch(net, ids):
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95))
    for _ in range(STEPS):
        opt.zero_grad()
        (loss_of(net(ids)) / ids.numel()).backward()
        opt.step()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("how", ["train step", "fs.update"])
def test_no_decay_is_torchs_usual_rule(how):
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(5, (3, 7))
    pure = fs.functionalize(net, ("table", "layers.*"))
    groups = {"decay": fs.adamw(RATE, weight_decay=DECAY), "no_decay": fs.adamw(RATE)}
    opt = fs.optim.multi_transform(groups, optim.no_decay)
    layout = fs.plan_layout(pure, fs.make_mesh(dp=1, device="cpu"), strategy=fs.zero(3))
    state = fs.init_state(pure, opt, fs.random.key(0), layout)

    def loss_fn(params, ids):
        return loss_of(pure(params, ids)), ids.numel()

    step = fs.make_train_step(loss_fn, opt)
    for _ in range(STEPS):
        if how == "train step":
            state, _ = step(state, ids)
        else:
            _, grads = fs.value_and_grad(loss_fn, grads=layout.main)(state.params, ids)
            state = fs.update(state, grads, opt)
    found = {name: fs.unshard(x) for name, x in pure.state_dict(state.params).items()}
    want = trained_by_torch(net, ids)
    assert found.keys() == want.keys()
    assert_trees_close(found, want, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans())
def test_a_label_is_that_of_each_layer(ndims, named):
    """With and without a layout, for leaves of any number of dims; blocks in a list are leaves of their own."""
    shapes = {f"x{i}": torch.Size((2,) * n) for i, n in enumerate(ndims)}
    stack = {name: torch.zeros(3, *shape) for name, shape in shapes.items()}
    seen: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def label(path, leaf):
        seen[path] = leaf.shape, leaf.dtype
        return "all"

    opt = fs.optim.multi_transform({"all": fs.sgd(0.1)}, label)
    if named:
        names = {"tower": {name: ("layers", *(None,) * len(shape)) for name, shape in shapes.items()}}
        layout = fs.plan_layout({"tower": stack}, fs.make_mesh(dp=1, device="cpu"), names=names)
        fs.init_state(lambda key: {"tower": stack}, opt, fs.random.key(0), layout)
        assert seen == {f"tower.{name}": (shape, torch.float32) for name, shape in shapes.items()}
    else:
        layers = [fs.tree.map(lambda x: x[0].clone(), stack)]
        opt.update(tree := {"blocks": stack, "rest": {"blocks": layers}}, opt.init(tree))
        assert seen == {
            f"{where}.{name}": (shape, torch.float32) for where in ("blocks", "rest.blocks.0") for name, shape in shapes.items()
        }  # fmt: skip
        seen.clear()
        opt.init({"blocks": layers})
        assert seen == {f"blocks.0.{name}": (shape, torch.float32) for name, shape in shapes.items()}


def test_labels_of_matrices_are_the_same_for_a_layer_and_for_the_whole_stack():
    params = {"blocks": {"w": torch.ones(2, 4, 4), "norm": torch.ones(2, 4)}, "embed": torch.ones(3, 4)}
    state = fs.optim.multi_transform({"matrix": optim.muon(0.1), "other": fs.adamw(0.1)}, optim.label_matrices()).init(
        params
    )
    assert list(fs.tree.named_leaves(state.groups["matrix"].mu)) == ["blocks.w"]
    assert list(fs.tree.named_leaves(state.groups["other"].mu)) == ["blocks.norm", "embed"]
