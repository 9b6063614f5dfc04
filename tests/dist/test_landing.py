"""Large gradients are taken as soon as they are complete, and what has come is not waited for later.

That what is trained does not depend on it is a law of tests/property/test_training_cases.py, which draws the size.
"""

import weakref

import pytest
import torch

import fsharding as fs
from fsharding.landing import Landing
from fsharding.ops.unit import early_from
from fsharding.testing import assert_bitwise_equal, run_ranks

WIDTH, LAYERS = 16, 4


def loss(params, x):
    def block(p, x):
        for w in p.values():
            x = torch.tanh(x @ w) + x @ p["0"] * 0.1  # the first one is used in every layer
        return x

    return fs.scan_units(block, params["blocks"], x).square().sum()


def gradients(level, size, cut):
    """Gradients, and what happened in which order: with each one that is put, how many of those before it still live."""
    mesh, alive, events = fs.make_mesh(dp=2), [], []
    home = fs.NamedSharding(mesh, fs.P(None, "dp") if level == 3 else fs.P())
    noise = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, WIDTH, WIDTH, generator=noise) / WIDTH for _ in range(LAYERS)]
    rank = mesh.get_local_rank("dp")
    mine = [x.chunk(2, 1)[rank].contiguous() if level == 3 else x for x in leaves]
    params = {"blocks": {str(i): home.to_dtensor(x, (2, WIDTH, WIDTH)) for i, x in enumerate(mine)}}
    real_put, real_reduce = Landing.put, Landing.reduce

    def put(self, unit, plan, early, grad):
        alive.append(weakref.ref(grad))
        events.append((early.leaf, sum(x() is not None for x in alive)))
        real_put(self, unit, plan, early, grad)

    def reduce(self, unit, plan, places, grads):
        events.append("reduce")
        real_reduce(self, unit, plan, places, grads)

    with pytest.MonkeyPatch.context() as patch, early_from(size):
        patch.setattr(Landing, "put", put)
        patch.setattr(Landing, "reduce", reduce)
        target = fs.NamedSharding(mesh, fs.P(None, "dp") if cut else fs.P())
        where = fs.tree.map(lambda x: target, params)
        _, found = fs.value_and_grad(loss, grads=where)(params, torch.ones(1, WIDTH) * (1 + rank))
    return [x.full_tensor() for x in fs.tree.leaves(found)], events


@pytest.mark.parametrize(("level", "cut"), [(0, False), (1, True), (3, True)], ids=str)
def test_large_gradients_go_one_by_one(level, cut):
    early, late = (run_ranks(gradients, 2, level, size, cut) for size in (1, 1 << 30))
    for (found, events), (want, none) in zip(early, late, strict=True):
        assert_bitwise_equal(found, want)
        assert none == ["reduce", "reduce"]
        # Of both units: the last layer's first, one alive at a time, and that of the first when all have used it.
        assert events == [*((leaf, 1) for leaf in (3, 2, 1, 0)), "reduce"] * 2
