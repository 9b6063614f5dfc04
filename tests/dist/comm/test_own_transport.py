"""A transport that the library lacks: registered by name, chosen by `make_mesh`, and used for what a loss gathers."""

import torch

import fsharding as fs
from fsharding.base.registry import names_of, register
from fsharding.comm.native import Native, Offer
from fsharding.testing import run_ranks

BUCKETS = []


class Counting(Native):
    """The collectives of the backend, counted."""

    name = "counting"

    @classmethod
    def offer(cls, group, *, asked):
        return Offer(asked, "it was asked for" if asked else "nobody asked for it")

    def all_gather(self, bucket, shards, dtype, memory=None):
        BUCKETS.append(len(shards))
        return super().all_gather(bucket, shards, dtype, memory)


def train(transport):
    BUCKETS.clear()
    register("transport", "counting", f"{__name__}:Counting")
    mesh = fs.make_mesh(dp=2, device="cpu", transport=transport)
    whole = {"w": torch.arange(8.0).view(4, 2), "b": torch.ones(4)}
    params = fs.shard(whole, fs.plan_layout(whole, mesh, strategy=fs.zero(3)))

    def loss(params):
        unit = fs.gather_unit(params)
        return (unit["w"].sum(1) * unit["b"]).sum()

    value, grads = fs.value_and_grad(loss)(params)
    return float(value), fs.unshard(grads), str(mesh), list(BUCKETS)


def test_a_registered_transport_carries_what_is_gathered():
    for value, grads, mesh, buckets in run_ranks(train, 2, "counting"):
        assert value == 28.0 and grads["b"].tolist() == [1.0, 5.0, 9.0, 13.0]
        assert "dp by counting (it was asked for)" in mesh
        assert sum(buckets) == 2


def test_nothing_chooses_it_unasked():
    for _, _, mesh, buckets in run_ranks(train, 2, "auto"):
        assert "counting" not in mesh and not buckets
    assert "counting" not in names_of("transport")
