"""Values as facts: what is told of them, and what is not."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.mesh.consistency import differences, digest, facts_of, refuse_differences


def settings(**changes):
    opt = fs.optim.chain(
        fs.optim.clip_by_global_norm(1.0), fs.adamw(fs.optim.schedules.warmup_cosine(3e-4, 10, 100), **changes)
    )
    return facts_of("optimizer", opt)


def test_an_optimizer_is_told_by_what_it_closes_over():
    facts = settings(weight_decay=0.1)
    assert facts["optimizer"] == "ContextTransformation"
    assert facts["optimizer.update.change"] == "chain.change"
    assert facts["optimizer.update.change.members.0.update.change.factor.max_norm"] == "1.0"
    assert facts["optimizer.update.change.members.1.update.change.rate.peak"] == "0.0003"
    differing = {name for name, text in settings(weight_decay=0.2).items() if facts[name] != text}
    assert {name.rpartition(".")[2] for name in differing} == {"weight_decay"}
    assert settings(weight_decay=0.1) == facts and digest(facts) == digest(dict(reversed(facts.items())))
    assert facts_of("o", fs.sgd(0.1)) != facts_of("o", fs.sgd(0.2)) != facts_of("o", fs.adamw(0.2))


def test_a_model_is_told_by_its_config():
    def told(**changes):
        return facts_of("model", fs.models.decoder(fs.models.DecoderConfig(**changes), attention="ring"))

    assert told() == told() and told()["model.head.config.dim"] == "128"
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


@dataclasses.dataclass
class Options:
    rate: float = 0.1
    out: str = "here"
    at: dict[str, float] = dataclasses.field(default_factory=dict)

    def total(self) -> float:
        return self.rate


def closures(options: Options, entries: dict[str, object], use=len):
    """Functions, and the facts of what each computes with."""

    def attribute(x):
        return x * options.rate

    def key(x):
        return x * entries["rate"]

    def inner(x):
        return [(lambda y: y * options.rate)(x) for _ in range(2)] + [entries["rate"] for _ in range(2)]

    def item_of_attribute(x):
        return x * options.at["rate"]

    def method(x):
        return x * options.total()

    def handed_on(x):
        return use(entries) + x * options.rate

    def written(x):
        options.out = "there"
        return x * options.rate

    def sliced(x):
        return entries.get("rate") if x else entries["rate" + str(x)]

    rate, out = {"f.options.rate": "0.1"}, {"f.options.out": repr(options.out)}
    whole = {"f.options": "Options", **rate, **out, "f.options.at": "dict of 1", "f.options.at.rate": "3"}
    mapping = {"f.entries": "dict of 2", "f.entries.rate": "2", "f.entries.out": repr(entries["out"])}
    return {
        attribute: rate,
        key: {"f.entries.rate": "2"},
        inner: {**rate, "f.entries.rate": "2"},
        item_of_attribute: {"f.options.at.rate": "3"},
        method: whole,
        handed_on: {**mapping, **rate, "f.use": "len"},
        written: whole,
        sliced: mapping,
    }


def test_closures_are_told_by_the_entries_that_they_read():
    expected = closures(Options(at={"rate": 3}), {"rate": 2, "out": "here"})
    assert {f.__name__: facts_of("f", f) for f in expected} == {
        f.__name__: {"f": f"closures.{f.__name__}", **facts} for f, facts in expected.items()
    }


class Pair(NamedTuple):
    first: Options
    rest: list[Options]


def by_argument(options, entries, *, pair, **others):
    return options.rate * entries["rate"] + pair.rest[0].rate + others["more"].rate


def all_of_one(options, entries):
    options = options or entries
    return [options.rate for _ in entries]


def test_defaults_partials_and_sequences_are_told_by_the_entries_that_are_read():
    options = Options()

    def default(x, options=options, *, other=options):
        return x * options.rate * other.at["rate"]

    def in_sequences(x):
        return x * several[0].rate * pair.rest[1].rate * pair[0].rate

    options.at["rate"] = 3
    several, pair = [options, options], Pair(options, [options, options])
    assert facts_of("f", default) == {
        "f": default.__qualname__.replace("<locals>.", ""),
        "f.options.rate": "0.1",
        "f.other.at.rate": "3",
    }
    assert facts_of("f", in_sequences) == {
        "f": in_sequences.__qualname__.replace("<locals>.", ""), "f.several.0.rate": "0.1", "f.pair.rest.1.rate": "0.1",
        "f.pair.0.rate": "0.1",
    }  # fmt: skip
    entries = {"rate": 2, "out": "here"}
    assert facts_of("f", functools.partial(by_argument, options, entries, pair=pair, more=options)) == {
        "f": "partial", "f.func": "by_argument", "f.options.rate": "0.1", "f.entries.rate": "2", "f.pair.rest.0.rate": "0.1",
        "f.others.more.rate": "0.1",
    }  # fmt: skip
    whole = facts_of("f", functools.partial(all_of_one, options, entries))
    assert whole.keys() >= {"f.options.out", "f.options.at.rate", "f.entries.out"}


def test_differences_name_the_odd_ranks_first_and_a_value_once():
    same = {"a": "1", "model.embed.config.dim": "2", "model.config.dim": "2"}
    other = {**same, "model.embed.config.dim": "3", "model.config.dim": "3"}
    assert differences({0: same, 1: same, 2: other, 3: {**same, "b": "x"}}) == [
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
