"""Peak memory of torch.func.grad with remat, against `value_and_grad` with remat, whose graph torch frees as it goes."""

import math

import torch

import fsharding as fs
from bench.rounds import allocated
from fsharding.testing import run_ranks

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=128, layers=6, heads=4, kv_heads=2, intermediate_size=384)
SMALL = fs.models.DecoderConfig(vocab_size=32, dim=64, layers=6, heads=2, kv_heads=1, intermediate_size=192)


def loss_of(model, batch, policy):
    def loss(params):
        x = model.embed(fs.gather_unit(params["embed"]), batch)
        x = fs.scan_units(model.block, params["blocks"], x, policy=policy)
        return model.head(fs.gather_unit(params["head"]), x, batch)[0]

    return loss


def peaks(config, rows, length, count=3, runs=1):
    """Bytes at the peak: of the first `count` of `value_and_grad`, func.grad, func.vjp; the least of some runs.

    The profiler does not hear of what a thread of gloo frees, which is sometimes the last to hold a buffer.
    """
    model, mesh = fs.models.decoder(config), fs.make_mesh(dp=-1)
    params = fs.shard(fs.tree.map(lambda d: d.tensor(), model.init(fs.random.key(0))), fs.plan_layout(model, mesh))
    tokens = torch.arange(rows * (length + 1)).view(rows, -1) % config.vocab_size
    loss = loss_of(model, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, fs.policies.nothing_saveable)
    ways = (
        fs.value_and_grad(loss, mean=False),
        fs.shard_map(torch.func.grad(loss)),
        fs.shard_map(lambda p: torch.func.vjp(loss, p)[1](torch.ones(()))),
    )
    found = []
    for way in ways[:count]:
        way(params)  # what a first call makes once is no part of it
        found.append(min(allocated(lambda way=way: way(params))[1] for _ in range(runs)))
    return found


def bytes_of_block(config):
    blocks = fs.models.decoder(config).init(fs.random.key(0))["blocks"]
    return 4 * sum(math.prod(draw.shape) for draw in blocks.values()) // config.layers


def test_the_graph_of_a_unit_lives_for_one_unit():
    """In bytes of a unit beside `value_and_grad`, which frees more of it while backward runs."""
    autograd, grad, vjp = peaks(CONFIG, 4, 64)
    unit = bytes_of_block(CONFIG)
    assert grad <= autograd + 1.1 * unit
    assert vjp <= autograd + 1.75 * unit


def test_gathered_weights_live_for_one_unit():
    """Hardly any tokens, so nearly all of it is weights. `value_and_grad` sums the gradients of a unit where they end."""
    for autograd, grad in run_ranks(peaks, 2, SMALL, 2, 2, count=2, runs=5):
        assert grad <= 1.1 * autograd + bytes_of_block(SMALL) // 2
