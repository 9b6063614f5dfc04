"""Means and accumulated gradients are exact: of whole numbers every sum is right to the last bit."""

from typing import Any

import pytest
import torch

import fsharding as fs
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import crossed, mesh_of, whole
from tests.training import DP, HYBRIDS, OUTER, ZEROS, name_of


def counted(strategies, axes, microbatches):
    return [count_with(strategy, mesh_of(axes), microbatches) for strategy in strategies]


def count_with(strategy, mesh, microbatches):
    """Gradients, loss and update from small integers and powers of two, where float32 is exact."""
    index, count = data_rank_and_size(mesh)
    draws = {"w": fs.random.full((5, 3), 2.0), "b": fs.random.full((), 1.0)}
    layout = fs.plan_layout(draws, mesh, strategy=strategy)

    def loss_fn(params, batch):
        unit = fs.gather_unit(params)
        per_row = unit["w"].sum() * batch["x"] + unit["b"] * batch["x"]
        return per_row.sum(), batch["weight"].sum()

    # Row m of rank r has the value (r + 1) * 2^m; all weights together are a power of two.
    rows = torch.arange(microbatches)
    weights = torch.ones(microbatches)
    weights[-1] += 2 ** (microbatches - 1).bit_length() - microbatches
    batch = {"x": (index + 1) * 2.0**rows, "weight": weights}
    opt = fs.sgd(0.5)
    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)
    after, metrics = fs.make_train_step(loss_fn, opt, microbatches=microbatches)(state, batch)
    held: Any = None
    for m in rows.tolist():
        goal = layout.main if m + 1 == microbatches else layout.grads
        run = fs.value_and_grad(loss_fn, grads=goal, mean=False)
        before, piece = held, {name: x[m : m + 1] for name, x in batch.items()}
        copies = [local_of(x).clone() for x in fs.tree.leaves(before)]
        _, held = run(state.params, piece, accumulate=before)
        assert_bitwise_equal([local_of(x) for x in fs.tree.leaves(before)], copies)
    return count, metrics.loss.item(), metrics.count.item(), whole(after.params), whole(held)


SUMMED = [(1, DP), (2, DP), (4, DP), (2, {"replica": 2}), (4, OUTER), (4, {"dp": 2, "cp": 2})]


@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches"),
    crossed(
        {f"{ranks}-{name_of(axes)}": (ranks, axes) for ranks, axes in SUMMED}, (1, 3),
        kept=["1-dp-3", "2-dp-3", "2-replica-3", "4-replicaxdp-3", "4-dpxcp-3"],
    ),
)  # fmt: skip
def test_means_and_accumulation_are_exact(ranks, axes, microbatches):
    strategies = [
        *ZEROS,
        *HYBRIDS,
        fs.hybrid(fs.zero(1)),
        fs.hybrid(fs.zero(1), grads=True),
        fs.hybrid(fs.zero(2), params=True),
    ]
    for results in run_ranks(counted, ranks, strategies, axes, microbatches):
        for strategy, (count, loss, weight, params, held) in zip(strategies, results, strict=True):
            # Over cp the two ranks of a pair read the same rows here, so everything counts twice.
            twice = ranks // count
            total = twice * count * (count + 1) / 2 * (2**microbatches - 1)
            weights = ranks * 2 ** (microbatches - 1).bit_length()
            assert weight == weights
            assert loss == (30 + 1) * total / weights, strategy
            assert_bitwise_equal(held, {"w": torch.full((5, 3), total), "b": torch.tensor(total)}, str(strategy))
            step = 0.5 * total / weights
            assert_bitwise_equal(
                params, {"w": torch.full((5, 3), 2 - step), "b": torch.tensor(1 - step)}, str(strategy)
            )
