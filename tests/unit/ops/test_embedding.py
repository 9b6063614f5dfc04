"""Gradients of embeddings below float32: as many rows as tokens are added, whatever the dtype of the table."""

import pytest
import torch
from torch import nn

import fsharding as fs

COUNT = 1000  # a sum of ones in bfloat16 stops at 256, and in float16 at 2048
IDS = torch.zeros(3 * COUNT, dtype=torch.long).reshape(3, COUNT)


def of_rows(grad):
    return grad[:, 0].tolist(), grad.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_has_all_its_rows(dtype):
    table = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    ids = IDS.clone()
    ids[:, 0] = 2

    def total(table):
        found = fs.ops.embedding(ids, table)
        assert found.dtype == dtype
        return found.float().sum()

    total(table).backward()
    want = torch.tensor([3.0 * (COUNT - 1), 0.0, 3.0]).to(dtype).tolist(), dtype
    assert of_rows(table.grad) == want
    assert of_rows(torch.func.grad(total)(table.detach())) == want
    each = torch.func.vmap(torch.func.grad(total))(table.detach().expand(2, 3, 4))
    assert of_rows(each[1]) == want
    assert of_rows(torch.func.jvp(total, (table.detach(),), (torch.ones_like(table),))[1].view(1, 1).to(dtype)) == (
        torch.tensor([12.0 * COUNT]).to(dtype).tolist(),
        dtype,
    )


class Halved(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Embedding(3, 4)
        self.own = Halved(3, 4, padding_idx=1)

    def forward(self, x):
        return self.plain(x) + self.own(x)


@pytest.mark.parametrize("units", [("plain", "own"), ()], ids=["units", "root"])
def test_embeddings_of_modules_have_them_too(units):
    net = fs.functionalize(Net(), units)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1), precision=fs.BF16)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    ids = IDS.clone()
    ids[1] = 1

    def loss_fn(params, x):
        found = net(params, x)
        assert found.dtype == torch.bfloat16
        return found.float().sum(), 1.0

    _, grads = fs.value_and_grad(loss_fn, precision=fs.BF16)(state.params, ids)
    rows = {path: fs.unshard(x).float()[:, 0].tolist() for path, x in fs.tree.named_leaves(grads).items()}
    # A row of padding has no gradient.
    assert rows == {"plain.weight": [2000.0, 1000.0, 0.0], "own.weight": [1000.0, 0.0, 0.0]}
