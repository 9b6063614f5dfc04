"""Strategies: four levels, their names, and what hybrids cut."""

import functools
import itertools

import pytest

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.sharding.strategy import STRATEGIES, Strategy
from tests import helpers

KINDS = ("params", "grads", "opt_state")
NAMES = "Strategies are zero0, zero1, zero2, zero3, hfsdp, no_shard, optim, optim_grads, optim_grads_params, hsdp."


refusal = functools.partial(helpers.refusal, kind=ConfigError)


def test_levels_cut_one_thing_more_each():
    levels = [fs.zero(level) for level in range(4)]
    assert levels == [fs.zero(0), fs.zero(1), fs.zero(2), fs.zero(3)]
    assert [sum(s.cut(kind, "dp") for kind in KINDS) for s in levels] == [0, 1, 2, 3]
    assert not any(s.cut(kind, "replica") for s in levels for kind in KINDS)
    assert fs.zero(1).opt_state and fs.zero(2).grads and fs.zero(3).params
    assert hash(fs.zero(3)) == hash(fs.zero(3))


@pytest.mark.parametrize("parts", list(itertools.product((False, True), repeat=3)))
def test_hybrids_cut_over_replica_what_they_are_told(parts):
    how = dict(zip(KINDS, parts, strict=True))
    strategy = fs.hybrid(fs.zero(2), **how)
    for kind in KINDS:
        assert strategy.cut(kind, "replica") == how[kind]
        for axis in ("dp", "ep", "cp"):
            assert strategy.cut(kind, axis) == fs.zero(2).cut(kind, axis)


def test_names_of_hybrids():
    assert fs.hybrid() == fs.hybrid() == fs.hybrid(fs.zero(3)) == fs.Strategy.parse("hsdp")
    assert fs.hybrid(opt_state=True) == fs.hybrid(opt_state=True) == fs.Strategy.parse("hfsdp")


def test_every_name_is_a_strategy_and_prints_as_one():
    assert list(STRATEGIES) == [
        "zero0", "zero1", "zero2", "zero3", "hfsdp", "no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp",
    ]  # fmt: skip
    for name, strategy in STRATEGIES.items():
        assert fs.Strategy.parse(name) is strategy
        assert fs.Strategy.parse(str(strategy)) == strategy
    assert str(fs.hybrid(fs.zero(1), params=True, grads=True)) == "hybrid(zero1, params=True, grads=True)"
    assert str(Strategy(params=True, grads=False, opt_state=False)) != str(fs.zero(3))


def test_unknown_strategies():
    assert refusal(lambda: fs.Strategy.parse("zero_3")) == (
        f"fs.Strategy.parse got an unknown strategy, 'zero_3'.\n{NAMES} Here that is 'zero3'."
    )
    assert refusal(lambda: fs.Strategy.parse("zero5")) == (
        f"fs.Strategy.parse got an unknown strategy, 'zero5'.\n{NAMES} Did you mean 'zero3'?"
    )
    assert refusal(lambda: fs.Strategy.parse("mine")) == f"fs.Strategy.parse got an unknown strategy, 'mine'.\n{NAMES}"
    for level in (4, -1, "3", 1.5):
        assert refusal(lambda level=level: fs.zero(level)) == (
            f"fs.zero got an unknown level, {level!r}.\n"
            "Levels are 0 (nothing is sharded), 1 (optimizer state), 2 (gradients too) and 3 (parameters too)."
        )


def test_memory_of_roles():
    host = fs.zero(3).with_memory(moments="host")
    assert str(host) == "zero3 with moments on the host" and host != fs.zero(3)
    assert host.with_memory(moments="device") == fs.zero(3) == fs.zero(3).with_memory()
    assert fs.hybrid(host).memory_of("moments", "w") == "host" and fs.hybrid(fs.zero(3)) == fs.hybrid()
    with pytest.raises(ConfigError, match=r"roles are params, main, moments, grads, compute\. Did you mean 'moments'"):
        fs.zero(3).with_memory(moment="host")
    with pytest.raises(ConfigError, match="moments of b='tape': kinds are device, host, disk"):
        fs.zero(3).with_memory(moments={"a": "host", "b": "tape"})


def test_memory_of_leaves():
    some = fs.zero(3).with_memory(moments={"": "disk", "blocks": "host", "blocks.w": "device"}, params="host")
    kinds = {path: some.memory_of("moments", path) for path in ("embed", "blocks.wq", "blocks.w.a", "blocks")}
    assert kinds == {"embed": "disk", "blocks.wq": "host", "blocks.w.a": "device", "blocks": "host"}
    assert (some.memory_of("main", "x"), some.memory_of("grads", "x")) == ("host", "device"), "main follows params"
    apart = some.with_memory(main="device")
    assert (apart.memory_of("main", "x"), apart.memory_of("params", "x")) == ("device", "host")
    assert (
        str(some.with_memory(moments={"blocks": "disk"})) == "zero3 with moments of blocks on disk, params on the host"
    )
    shapes = {"blocks": fs.random.zeros((64, 8)), "scale": fs.random.zeros(())}
    there = fs.zero(3).with_memory(params="host")
    layout = fs.plan_layout(shapes, fs.AbstractMesh(("dp",), (4,)), strategy=there)
    assert [leaf.params.memory for leaf in layout.leaves] == ["host", "device"], "a number stays"
    assert layout.with_strategy(there.with_memory(main="device")).has_main and not layout.has_main
    with pytest.raises(ConfigError, match=r"moments of block on the host: matches no leaf. Did you mean 'blocks'"):
        fs.plan_layout(shapes, layout.mesh, strategy=fs.zero(3).with_memory(moments={"block": "host"}))


def test_updates_on_the_host():
    updated = fs.zero(3).with_memory(compute={"a": "host"})
    assert [updated.memory_of(role, "a") for role in ("params", "main", "moments", "grads")] == [
        "device", "host", "host", "device",
    ]  # fmt: skip
    assert updated.memory_of("main", "b") == updated.memory_of("moments", "b") == "device"
    assert str(updated) == "zero3 with compute of a on the host"
    on_disk = fs.zero(3).with_memory(compute="host", moments="disk")
    assert on_disk.memory_of("main", "a") == "disk", "main is with the moments"
    assert on_disk.with_memory(compute="device", moments="device") == fs.zero(3)
    shapes = dict.fromkeys("ab", fs.random.zeros((4,)))
    layout = fs.plan_layout(shapes, fs.AbstractMesh(("dp",), (2,)), strategy=updated)
    assert layout.updated_on_host == {"a"} and layout.has_main
    strategy = fs.zero(3).with_memory(compute="host", moments={"a": "device"}, main={"a": "host", "b": "device"})
    with pytest.raises(ConfigError, match="moments of a\n  main of b"):
        fs.plan_layout(shapes, layout.mesh, strategy=strategy)


def test_bytes_of_each_kind_of_memory():
    shapes = {"w": fs.random.zeros((64, 8)), "b": fs.random.zeros((8,))}
    here = fs.plan_layout(shapes, fs.AbstractMesh(("dp",), (4,)), strategy=fs.zero(1))
    away = here.with_strategy(here.strategy.with_memory(moments="host"))
    for opt in (None, fs.adamw(1e-3), fs.sgd(0.1, momentum=0.9)):
        planned, before = away.memory(opt), here.memory(opt)
        assert planned._replace(away={}) == before and before.host == 0 < planned.host <= before.opt_state
        assert planned.device == before.total - planned.host and f"host {planned.host:,}" in str(planned)
    assert [leaf.moments.memory for leaf in away.leaves] == ["host", "host"]
    assert str(away.leaves[0].moments).endswith("on the host") and away.main == here.main
