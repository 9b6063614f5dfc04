"""Buffers of modules on real ranks: those that stay are compared, those that a forward writes are trained with."""

import hashlib

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.errors import ConfigError, RankError, ReplicaError
from fsharding.testing import run_ranks
from tests.helpers import mesh_of, refusal

BATCH = {"x": torch.linspace(-1, 1, 12).view(3, 4)}


class Table(nn.Module):
    """A buffer that is saved, one that is not, and a plain attribute."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        torch.manual_seed(seed)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("mask", torch.randn(2, 2), persistent=False)
        self.shift = torch.randn(3)

    def forward(self, x):
        return self.linear(x) * self.table


def told(x):
    """What an error says of a tensor: its type, and 63 bits of the sha256 of its bytes."""
    number = int.from_bytes(hashlib.sha256(x.numpy().tobytes()).digest()[:8], "big") >> 1
    return f"float32{list(x.shape)} of checksum {number:016x}"


def loss_of(net):
    return lambda params, batch: net(params, batch["x"]).square().sum()


def refusals():
    """What each way to train a module with other buffers on each rank ends with."""
    rank, mesh, opt, key = torch.distributed.get_rank(), mesh_of({"dp": 2}), fs.sgd(0.1), fs.random.key(0)
    net = fs.functionalize(Table(rank), ())
    layout = fs.plan_layout(net, mesh)
    result = {"init_state": refusal(fs.init_state, net, opt, key, layout, kind=ConfigError)}
    result["setup"] = refusal(fs.setup, net, loss_of(net), opt, key, mesh=mesh, kind=ConfigError)
    # The parameters alone are the same on both ranks.
    state = fs.init_state(net.init, opt, key, layout)
    result["step"] = refusal(fs.make_train_step(loss_of(net), opt), state, BATCH, kind=RankError)
    result["evaluate"] = refusal(fs.evaluate(loss_of(net)), state, BATCH, kind=RankError)
    fs.check_replicas(state)
    result["check_replicas"] = refusal(fs.check_replicas, state, net, kind=ReplicaError)
    return result


def test_buffers_that_differ_between_ranks_are_refused_by_name():
    tables = [Table(rank) for rank in range(2)]
    for found in run_ranks(refusals, 2, timeout=60.0):
        for way in ("init_state", "setup"):
            _, *rows, _ = found[way].split("\n")
            assert rows == [
                f"  buffers.{name}: rank 1 has {told(getattr(tables[1], name))},"
                f" rank 0 has {told(getattr(tables[0], name))}"
                for name in ("table", "mask", "shift")
            ]
        for way in ("step", "evaluate"):
            _, *rows, mend = found[way].split("\n")
            for rank, row in zip((1, 0), rows, strict=True):
                checksums = [told(getattr(tables[rank], name)).split()[-1] for name in ("table", "mask", "shift")]
                assert row.startswith(f"  rank {rank} (dp={rank}): computes with table of checksum {checksums[0]}"), way
                assert f"shift of checksum {checksums[2]}" in row
            assert mend.startswith("Build the module from one seed")
        rows = found["check_replicas"].split("\n")[1:-1]
        assert [row.split("[")[0] for row in rows] == [f"  buffers.{name}" for name in ("mask", "shift", "table")]


class Staged(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)
        self.register_buffer("table", torch.full((4,), float(seed)))


PARTS = fs.hf.families.Parts(
    embed=lambda net, batch: net.embed(batch["x"]) * net.table,
    block=lambda net, layer, x: layer(x),
    head=lambda net, x, batch: (net.head(x).square().sum(), batch["x"].numel()),
)


def refusals_of_model():
    model = fs.model_from(Staged(torch.distributed.get_rank()), ("embed", "layers.*", "head"), PARTS)
    layout, opt, key = fs.plan_layout(model, mesh_of({"dp": 2})), fs.sgd(0.1), fs.random.key(0)
    first = refusal(fs.init_state, model, opt, key, layout, kind=ConfigError)
    state, batch = fs.init_state(model.init, opt, key, layout), {"x": torch.arange(3)}
    return first, refusal(fs.make_train_step(model, opt), state, batch, kind=RankError)


def test_a_model_made_of_a_module_with_other_buffers_is_refused():
    for first, later in run_ranks(refusals_of_model, 2, timeout=60.0):
        assert "buffers.table: rank 1 has float32[4] of checksum" in first
        assert "rank 1 (dp=1): computes with table of checksum" in later


def trained(seed):
    mesh, net = mesh_of({"dp": 2}), fs.functionalize(Table(seed), ())
    state, step = fs.setup(net, loss_of(net), fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    fs.check_replicas(state, net)
    return float(metrics.loss)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_buffers_are_let_through(seed):
    module = Table(seed)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        loss = module(BATCH["x"]).square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    for found in run_ranks(trained, 2, seed, timeout=60.0):
        assert found == pytest.approx(loss.item(), rel=1e-5)
