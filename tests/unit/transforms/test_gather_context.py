"""The runtime of one call on one process: which memory is alive after it."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.sharding.named_sharding import local_of
from fsharding.transforms.run_options import GradsTo, RunOptions
from fsharding.transforms.value_and_grad import loss_and_grads
from tests.helpers import slow


@slow
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_what_backward_did_not_visit(fails):
    """A node that keeps its own result, as exp does, would keep itself alive."""
    layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(device="cpu"))
    state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
    kept = []

    def loss_fn(params):
        w = fs.gather_unit(params)["w"] * 2
        kept.append(StorageWeakRef(w.exp().exp().untyped_storage()))
        if fails:
            raise FloatingPointError
        return w.sum()

    if fails:
        with pytest.raises(FloatingPointError):
            fs.value_and_grad(loss_fn)(state.params)
    else:
        fs.value_and_grad(loss_fn)(state.params)
    gc.collect()
    assert kept[0].expired()


def test_memory_of_gradients_is_used_again_but_not_while_somebody_holds_them():
    layout = fs.plan_layout({"w": torch.zeros(600, 600), "unused": torch.zeros(600, 600)}, fs.make_mesh(device="cpu"))
    params = fs.shard({"w": torch.ones(600, 600), "unused": torch.ones(600, 600)}, layout)
    pool = Pool()

    def grad(params, x):
        def loss(params):
            return (fs.gather_unit(params)["w"] * x).sum()

        return loss_and_grads(loss, params, (), GradsTo(pool=pool), RunOptions(), has_aux=False).grads

    def check(found, x):
        assert (local_of(found["w"]) == x).all() and not local_of(found["unused"]).any()

    first = grad(params, 1.0)
    second = grad(params, 2.0)
    check(first, 1.0)
    check(second, 2.0)
    places = {local_of(g).data_ptr() for g in second.values()}
    del second
    third = grad(params, 3.0)
    assert {local_of(g).data_ptr() for g in third.values()} == places
    check(first, 1.0)
    check(third, 3.0)
