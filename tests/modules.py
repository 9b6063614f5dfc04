"""Modules of torch that tests of interop share: a small net with all that functionalize has to see, and shared blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fsharding.interop.module.hf_tables import Parts

VOCAB = 13
UNITS = ("embed", "layers.*", ("norm", "head"))


class Module(nn.Module):
    """One linear layer from 4 to 3."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


class Block(nn.Module):
    """A bias, a buffer, a dropout, an input by keyword, and an output that is no tensor."""

    def __init__(self, width, p=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width, bias=False)
        self.drop = nn.Dropout(p)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, *, shift=0.0):
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + self.scale * self.drop(y) + shift, {"shift": shift}


class Net(nn.Module):
    """Tied embedding and head, a parameter in no unit, blocks of odd widths."""

    def __init__(self, width=7, p=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width, p) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x, shift=0.1)
        return {"logits": self.head(self.norm(x)) * self.heat, "depth": len(self.layers)}


class Shared(nn.Module):
    """One block that is called three times, and two lists of unlike blocks that share a bias."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(5, 5)] * 3)
        self.wide = nn.ModuleList(nn.Linear(5, 6) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(6, 5) for _ in range(2))
        for layer in self.back:
            layer.bias = self.back[0].bias

    def forward(self, x):
        for step in self.steps:
            x = torch.tanh(step(x))
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + back(torch.relu(wide(x)))
        return x


def net_parts():
    """The parts of a `Net` without `heat`, for `fs.model_from_module`."""

    def loss(module, x, batch):
        logits = module.head(module.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), logits[
            ..., 0
        ].numel()

    return Parts(
        lambda module, batch: module.embed(batch["tokens"]), lambda module, layer, x: layer(x, shift=0.1)[0], loss
    )
