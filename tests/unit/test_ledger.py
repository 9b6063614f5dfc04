"""The ledger of a loss on one process: what is alive after it."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fsharding as fs


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
