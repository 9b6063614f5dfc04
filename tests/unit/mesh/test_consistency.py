"""Values as facts: what is told of them, and what is not."""

import dataclasses
import functools

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.mesh.consistency import _differences, digest, facts_of, refuse_differences


def settings(**changes):
    opt = fs.optim.chain(
        fs.optim.clip_by_global_norm(1.0), fs.adamw(fs.optim.schedules.warmup_cosine(3e-4, 10, 100), **changes)
    )
    return facts_of("optimizer", opt)


def test_an_optimizer_is_told_by_what_it_closes_over():
    facts = settings(weight_decay=0.1)
    assert facts["optimizer"] == "ContextTransformation"
    assert facts["optimizer.update"] == "chain.update"
    assert facts["optimizer.update.members.0.update.factor.max_norm"] == "1.0"
    assert facts["optimizer.update.members.1.update.advance.rate.peak"] == "0.0003"
    differing = {name for name, text in settings(weight_decay=0.2).items() if facts[name] != text}
    assert {name.rpartition(".")[2] for name in differing} == {"weight_decay"}
    assert settings(weight_decay=0.1) == facts and digest(facts) == digest(dict(reversed(facts.items())))
    assert facts_of("o", fs.sgd(0.1)) != facts_of("o", fs.sgd(0.2)) != facts_of("o", fs.adamw(0.2))


def test_a_model_is_told_by_its_config():
    def told(**changes):
        return facts_of("model", fs.models.decoder(fs.models.DecoderConfig(**changes), attention="ring"))

    assert told() == told() and told()["model.embed.config.dim"] == "128"
    assert {name.rpartition(".")[2] for name, text in told(dim=64).items() if told()[name] != text} == {
        "dim",
        "head_dim",
    }


def test_what_may_differ_between_ranks_is_told_by_its_type():
    @dataclasses.dataclass
    class Node:
        device: torch.device
        x: torch.Tensor
        again: object = None

    node = Node(torch.device("cpu"), torch.zeros(2))
    node.again = node
    assert facts_of("n", node) == {
        "n": "Node",
        "n.device": "device",
        "n.x": "Tensor",
        "n.again": "Node",
    }
    assert facts_of("f", functools.partial(max, 3, key=None)) == {
        "f": "partial", "f.func": "max", "f.0": "3", "f.key": "None",
    }  # fmt: skip


def test_differences_name_the_odd_ranks_first_and_a_value_once():
    same = {"a": "1", "model.embed.config.dim": "2", "model.config.dim": "2"}
    other = {**same, "model.embed.config.dim": "3", "model.config.dim": "3"}
    assert _differences({0: same, 1: same, 2: other, 3: {**same, "b": "x"}}) == [
        "model.embed.config.dim: rank 2 has 3, ranks 0, 1, 3 have 2",
        "b: rank 3 has x, ranks 0, 1, 2 have nothing",
    ]
    many = {str(i): "x" for i in range(20)}
    with pytest.raises(ConfigError) as error:
        refuse_differences({0: many, 1: dict.fromkeys(many, "y")})
    assert str(error.value).split("\n")[-2:] == [
        "  and 10 more",
        "Start every rank with the same program and arguments.",
    ]
