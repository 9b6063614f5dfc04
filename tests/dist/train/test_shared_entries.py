"""Entries that are `fs.Shared`: the loss of plain torch, whole batch at once, on every axis and for microbatches."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.nn import functional

import fsharding as fs
from fsharding.base.errors import BatchError
from fsharding.testing import run_ranks
from tests.helpers import refusal

VOCAB, DIM, LAYERS = 7, 4, 2
TOKENS = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2])
BORDERS = torch.tensor([0, 3, 5, 8, 10, 12])
ROWS = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))
CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0, 1.5, 0.25])
TIMEOUT = timedelta(seconds=20)


def weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {"embed": {"w": draw(VOCAB, DIM)}, "blocks": {"w": draw(LAYERS, DIM, DIM)}, "head": {"w": draw(DIM, VOCAB)}}


def document_loss(params, batch):
    """Means of the tokens of each document, summed over documents. Each token knows its document by its position."""
    table = fs.gather_unit(params)["w"]
    lengths = batch["borders"].diff()
    document = torch.searchsorted(batch["borders"], batch["position"], right=True) - 1
    each = table[batch["tokens"]].square() / lengths[document]
    return fs.Loss(each.sum(), (1 / lengths[document].double()).sum())


def documents():
    return {"tokens": TOKENS, "position": torch.arange(len(TOKENS)), "borders": fs.Shared(BORDERS)}


def document_losses(axes, microbatches):
    mesh = fs.make_mesh(device="cpu", timeout=TIMEOUT, **axes)
    table = {"w": weights()["embed"]["w"][:, 0].contiguous()}
    settings: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "tp": "replicate"}
    state, step = fs.setup(table, document_loss, fs.sgd(0.1), fs.random.key(0), **settings)
    batch = fs.local_batch(documents(), mesh)
    by_hand = fs.value_and_grad(document_loss)(state.params, batch)[0]
    seen = fs.evaluate(document_loss, microbatches=microbatches)(state, batch)
    metrics = step(state, batch)[1]
    return [(float(x), float(n)) for x, n in (by_hand, (seen.mean, seen.count), (metrics.loss, metrics.count))]


def test_borders_of_documents_reach_every_rank_and_microbatch():
    values = weights()["embed"]["w"][:, 0][TOKENS].square()
    lengths = BORDERS.diff().tolist()
    want = sum(float(part.mean()) for part in values.split(lengths)) / len(lengths)
    cases = [document_losses({"dp": -1}, n) for n in (1, 2, 3)] + run_ranks(document_losses, 2, {"dp": 2}, 3)
    for losses in cases:
        for loss, documents in losses:
            assert loss == pytest.approx(want, rel=1e-6) and documents == pytest.approx(len(lengths))


def model() -> Any:
    """A model whose loss weights classes, as the `weight` of torch's cross entropy."""

    def head(params, x, batch):
        logits, targets = x @ params["w"], batch["targets"]
        each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), batch["classes"], reduction="sum")
        return each, batch["classes"][targets].sum()

    def init(key):
        return weights()

    return fs.models.Model(
        init=init,
        embed=lambda params, batch: params["w"][batch["tokens"]],
        block=lambda params, x: x + torch.tanh(x @ params["w"]),
        head=head,
        names={"embed": {"w": None}, "blocks": {"w": ("layers", None, None)}, "head": {"w": None}},
        axes=("cp", "tp"),
    )


def weighted_losses(axes, microbatches):
    mesh = fs.make_mesh(device="cpu", timeout=TIMEOUT, **axes)
    settings: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "tp": "replicate"}
    state, step = fs.setup(model(), None, fs.sgd(0.1), fs.random.key(0), "zero1", **settings)
    batch = {"tokens": ROWS[:, :-1], "targets": ROWS[:, 1:], "classes": fs.Shared(CLASS_WEIGHTS)}
    batch = fs.local_batch(batch, mesh)
    seen = fs.evaluate(model(), microbatches=microbatches)(state, batch).mean
    return float(seen), float(step(state, batch)[1].loss)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_weights_of_classes_reach_every_stage_and_part_of_a_sequence(axes):
    values = weights()
    x = values["embed"]["w"][ROWS[:, :-1]]
    for w in values["blocks"]["w"]:
        x = x + torch.tanh(x @ w)
    logits = (x @ values["head"]["w"]).flatten(0, 1)
    want = float(functional.cross_entropy(logits, ROWS[:, 1:].flatten(), CLASS_WEIGHTS))
    for losses in run_ranks(weighted_losses, 2, axes, 2):
        assert losses == pytest.approx((want, want), rel=1e-5)


def test_an_unmarked_entry_with_another_dim_0_is_refused_by_path():
    mesh = fs.make_mesh(dp=-1, device="cpu")
    batch = {**documents(), "borders": BORDERS}
    settings: dict[str, Any] = {"mesh": mesh, "microbatches": 2}
    state, step = fs.setup({"w": torch.ones(VOCAB)}, document_loss, fs.sgd(0.1), fs.random.key(0), **settings)
    before = fs.tree.map(torch.clone, state)
    calls = {
        "fs.local_batch": lambda: fs.local_batch(batch, fs.AbstractMesh(("dp",), (2,))),
        "train step": lambda: step(state, batch),
        "fs.evaluate": lambda: fs.evaluate(document_loss, microbatches=2)(state, batch),
    }
    for name, call in calls.items():
        text = refusal(call, kind=BatchError)
        assert text.startswith(f"{name} cannot split") and "borders is int64[6]: dim 0 of position is 12" in text
        assert text.endswith("Mark an entry that every rank and microbatch gets in full: fs.Shared(x).")
    fs.testing.assert_bitwise_equal(before, state)
