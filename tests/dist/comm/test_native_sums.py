"""Gradients that the backend sums by itself: the training of ordered sums but for rounding, in fewer calls."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base import _compat
from fsharding.base.errors import ConfigError
from fsharding.checkpoint.serialized_layout import layout_of
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import full, mesh_of, refusal, whole
from tests.training import MODEL, PLACES, POSITIONS, ROWS, batches

LEVELS = [pytest.param(name, marks=full if name in ("zero1", "hfsdp") else ()) for name in PLACES]


def trained(name, ranks, precision, sums):
    """Losses, parameters, calls of the backend, and bytes that were sent beside those that are expected."""
    (strategy, axes), microbatches = PLACES[name], 1 if ranks == 4 else 2
    mesh = mesh_of(axes)
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=replace(precision, sums=sums))
    state = fs.init_state(MODEL, fs.adamw(1e-2), fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, fs.adamw(1e-2), microbatches=microbatches)
    calls, losses = dict.fromkeys(("reduce_scatter", "all_reduce", "all_to_all"), 0), []

    def counted(name, call):
        def run(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        return run

    with (
        patch.object(_compat, "reduce_scatter_single", counted("reduce_scatter", _compat.reduce_scatter_single)),
        patch.object(dist, "all_reduce", counted("all_reduce", dist.all_reduce)),
        patch.object(dist, "all_to_all_single", counted("all_to_all", dist.all_to_all_single)),
    ):
        for batch in batches(3, mesh):
            with fs.debug.count_bytes() as sent:
                state, metrics = step(state, batch)
            losses.append(metrics.loss)
    tokens = torch.zeros(ROWS // ranks, POSITIONS, dtype=torch.int64)
    example = {"tokens": tokens, "targets": tokens}
    expected = fs.debug.expected_traffic(MODEL, fs.adamw(1e-2), layout, example, microbatches=microbatches)
    return losses, whole(state.params), calls, (sent.by_axes, expected.by_axes)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize(
    ("ranks", "precision"),
    [
        pytest.param(2, fs.FP32, id="2-fp32"),
        pytest.param(3, fs.BF16, id="3-bf16"),
        *(
            pytest.param(ranks, precision, id=f"{ranks}-{name}", marks=full)
            for ranks, precision, name in ((2, fs.BF16, "bf16"), (3, fs.FP32, "fp32"), (4, fs.FP32, "fp32"))
        ),
    ],
)
def test_native_sums_train_as_ordered_ones(name, ranks, precision):
    if "replica" in PLACES[name][1] and ranks % 2:
        ranks = 2
    settings = name, ranks, precision
    ordered = run_ranks(trained, ranks, *settings, "ordered")[0]
    native, again = (run_ranks(trained, ranks, *settings, "native")[0] for _ in range(2))
    assert_trees_close(native[0], ordered[0], rtol=1e-5 if precision == fs.FP32 else 1e-2)
    assert_trees_close(native[1], ordered[1], rtol=1e-2, atol=1e-2)
    assert [float(x) for x in again[0]] == [float(x) for x in native[0]], "gloo sums in one order"
    assert native[2]["all_to_all"] == 0 < native[2]["all_reduce"] + native[2]["reduce_scatter"]
    assert (native[2]["all_reduce"] > 0) == (name in ("zero0", "hsdp"))
    assert ordered[2]["all_reduce"] == ordered[2]["reduce_scatter"] == 0
    for sent, expected in (native[3], ordered[3]):
        assert sent == expected


def sum_of_two(strategy, axes, microbatches, **how):
    """The gradient of a weight of which rank 0 has 1 to add and rank 1 has 2**-9, in each microbatch."""
    mesh = mesh_of(axes)
    layout = fs.plan_layout({"w": torch.zeros(4, 2)}, mesh, strategy=strategy, precision=replace(fs.BF16, **how))
    state = fs.init_state(lambda key: {"w": torch.zeros(4, 2)}, fs.sgd(1.0), fs.random.key(0), layout)
    term = 1.0 if dist.get_rank() == 0 else 2.0**-9

    def loss_fn(params, batch):
        return (fs.gather_unit(params)["w"] * batch[0]).sum(), 1

    step = fs.make_train_step(loss_fn, fs.sgd(1.0), microbatches=microbatches)
    after, _ = step(state, torch.full((microbatches,), term))
    main = after.main if after.main is not None else fs.main_params(after.params, layout)
    return float(-2 * fs.unshard(main)["w"][0, 0])


def sums_of_two():
    result = {}
    for name, (strategy, axes) in PLACES.items():
        for microbatches in (1, 2):
            result |= {
                (name, microbatches, "native", "bfloat16"): sum_of_two(strategy, axes, microbatches, reduce=torch.bfloat16, sums="native"),
                (name, microbatches, "native", None): sum_of_two(strategy, axes, microbatches, sums="native"),
                (name, microbatches, "ordered", "bfloat16"): sum_of_two(strategy, axes, microbatches, reduce=torch.bfloat16, sums="ordered"),
            }  # fmt: skip
    return result


def test_native_sums_are_in_the_dtype_of_reduce():
    """bfloat16 has 8 bits: there 1 + 2**-9 is 1. Ordered sums widen the terms first."""
    narrow = float(torch.tensor(1.0).bfloat16() + torch.tensor(2.0**-9).bfloat16())
    exact = 1 + 2**-9
    assert narrow == 1
    for found in run_ranks(sums_of_two, 2):
        assert found == {key: narrow if key[2:] == ("native", "bfloat16") else exact for key in found}


def test_who_sums_is_a_value():
    assert not fs.Precision().sums_natively("cpu") and fs.Precision().sums_natively("cuda")
    assert fs.Precision(sums="native").sums_natively("cpu") and not fs.Precision(sums="ordered").sums_natively("cuda")
    assert refusal(lambda: fs.Precision(sums="fast"), kind=ConfigError) == (
        "fs.Precision got sums='fast'.\nUse one of auto, ordered, native."
    )
    mesh = fs.make_mesh(device="cpu")
    layout = fs.plan_layout(MODEL, mesh, precision=fs.Precision(sums="native"))
    assert str(layout).splitlines()[0].endswith(", native sums")
    assert "native sums" not in str(fs.plan_layout(MODEL, mesh))


@pytest.mark.parametrize("sums", ["auto", "native", "ordered"])
def test_a_checkpoint_says_who_sums(sums, tmp_path):
    layout = fs.plan_layout(MODEL, fs.make_mesh(device="cpu"), precision=fs.Precision(sums=sums))
    fs.checkpoint.save(tmp_path / "a", fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), layout))
    manifest = fs.checkpoint.metadata(tmp_path / "a")
    assert layout_of(manifest, layout.mesh).precision == layout.precision
    assert ("sums" in manifest.layout["precision"]) == (sums != "auto"), "other checkpoints are as they were"
