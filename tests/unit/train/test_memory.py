"""What memory a step is foreseen to need, by purpose; beside a device that runs it in tests/dist/device/test_memory.py."""

import pickle
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.transforms.gather_unit import UnitsAhead
from fsharding.transforms.unit_plan import large_from

DIM, RANKS = 64, 8


def peak(widths, **options):
    """The peak of units of two matrices [width, DIM] and [DIM, width] with one row of activations; and their sizes."""
    precision = replace(fs.FP32, sums="native")  # as on an accelerator

    def init(key):
        return [{"up": fs.random.normal(key, (DIM, n)), "down": fs.random.normal(key, (n, DIM))} for n in widths]

    def loss(units, x):
        for i, unit in enumerate(units):
            w = fs.gather_unit(unit, next_unit=UnitsAhead(units[i + 1 :]))
            x = torch.tanh(x @ w["up"]) @ w["down"]
        return x.square().mean()

    layout = fs.plan_layout(
        init(fs.random.key(0)), fs.AbstractMesh(("dp",), (RANKS,)), strategy=fs.zero(3), precision=precision
    )
    batch = torch.empty(1, DIM, device="meta")
    found = fs.debug.expected_memory(loss, fs.sgd(0.1), layout, batch, donate=True, **options)
    return found, [2 * DIM * n * 4 for n in widths]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("widths", [[512] * 6, [512, 64, 256, 512, 128, 320]], ids=["equal", "unequal"])
def test_a_step_needs_its_state_three_units_and_those_that_are_ahead_by_more_than_one(widths, depth):
    """Weights in use, gradients, and the terms of the last reduction, whose memory the weights ahead take."""
    with large_from(64):
        found, units = peak(widths, prefetch_depth=depth)
    state_and_grads = 2 * sum(units) // RANKS
    numbers = 1 << 14  # of activations: a row for each unit
    assert found - state_and_grads <= max(3, depth + 2) * max(units) + numbers


def test_the_peak_is_listed_by_purpose():
    found, units = peak([512] * 3)
    assert found == sum(found.at_peak.values()) and [*found.at_peak.values()] == sorted(found.at_peak.values())[::-1]
    params = {name: n for (category, name), n in found.at_peak.items() if category == "params"}
    assert params == {f"{i}.{name}": units[0] // 2 // RANKS for i in range(3) for name in ("up", "down")}
    assert {category for category, _ in found.at_peak} <= {
        "params", "opt_state", "key", "batch", "gathered weights", "gradients", "activations", "update"
    }  # fmt: skip
    assert pickle.loads(pickle.dumps(found)).at_peak == found.at_peak
