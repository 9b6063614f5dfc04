"""A small network of units, one of whose leaves is used as it lies, and one of whose gathers nobody needs, if asked for."""

from __future__ import annotations

import torch

import fsharding as fs

LAYERS, SIZE = 5, 8
NAMES = {"embed": {"w": (None, None)}, "blocks": {"w": ("layers", None, None), "b": ("layers", None)}, "head": {"w": (None, None)}}  # fmt: skip


def init(key):
    first, second, third = fs.random.split(key, 3)
    blocks = {"w": fs.random.normal(second, (LAYERS, SIZE, SIZE)), "b": fs.random.zeros((LAYERS, SIZE))}
    ends = [{"w": fs.random.normal(key, (SIZE, SIZE))} for key in (first, third)]
    return {"embed": ends[0], "blocks": blocks, "head": ends[1]}


def first(w, x):
    return x.to(w.dtype) @ w


def loss_of(policy, *, direct=False, in_vain=False):
    """A loss of units; perhaps with a term of leaves that are used as they lie, and with a gather that nobody needs."""

    def loss(params, batch):
        blocks, head = params["blocks"], params["head"]
        # First, so that backward comes to it last.
        term = 0.1 * fs.tree.vdot(params["embed"], params["embed"]) if direct else None
        x = first(fs.gather_unit(params["embed"], next_unit=fs.select_unit(blocks, 0))["w"], batch["x"])
        x = fs.scan_units(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), blocks, x, policy=policy, next_unit=head)
        after = fs.select_unit(blocks, 0) if in_vain else None
        total = (x @ fs.gather_unit(head, next_unit=after)["w"]).square().mean()
        return total if term is None else total + term.to(total.dtype)

    return loss
