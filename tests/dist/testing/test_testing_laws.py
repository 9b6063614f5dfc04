"""The public checks catch what they should, on every rank, and a case that fails is named by its pool."""

import functools
import os

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import (
    Home,
    Leaf,
    RankFailure,
    ReshardCase,
    assert_adjoint,
    assert_matches_reference,
    device_mesh,
    local_part,
    rank_values,
    run_ranks,
)

MESH = AbstractMesh(("tp", "dp"), (2, 2))


def message_of(check, *args, **kwargs):
    """The text of the complaint; empty where there is none."""
    try:
        check(*args, **kwargs)
    except AssertionError as error:
        return str(error)
    return ""


def adjoint_checks():
    mesh = device_mesh(MESH)
    gather = functools.partial(ops.all_gather, axis="dp", dim=0, mesh=mesh)
    scatter = functools.partial(ops.reduce_scatter, axis="dp", dim=0, mesh=mesh)
    psum, vary = (functools.partial(op, axis="dp", mesh=mesh) for op in (ops.psum, ops.pvary))
    x = rank_values((2, 3), mesh)
    same = rank_values((2, 3), mesh, same=("dp",))
    return {
        "right": message_of(assert_adjoint, gather, scatter, x, mesh=mesh),
        "half": message_of(assert_adjoint, gather, lambda y: scatter(y) * 1.000001, x, mesh=mesh, what="the halves"),
        "shapes": message_of(assert_adjoint, gather, lambda y: y, x, mesh=mesh, what="gather and nothing"),
        "narrow": message_of(assert_adjoint, gather, scatter, x.bfloat16(), mesh=mesh),
        "trees": message_of(
            assert_adjoint,
            lambda t: {"a": gather(t[0]), "b": psum(t[1]) - psum(t[1])},
            lambda t: [scatter(t["a"]), torch.zeros_like(x)],
            [x, x],
            mesh=mesh,
        ),
        "shared": message_of(assert_adjoint, vary, psum, same, mesh=mesh, same_in=("dp",)),
        "not shared": message_of(assert_adjoint, vary, psum, x, mesh=mesh, same_in=("dp",), what="vary and psum"),
        "one rank": message_of(assert_adjoint, gather, lambda y: scatter(y) + (dist.get_rank() == 3), x, mesh=mesh, what="it"),
    }  # fmt: skip


def test_transposes_are_told_from_others():
    results = run_ranks(adjoint_checks, 4)
    for name in ("right", "narrow", "trees", "shared"):
        assert [found[name] for found in results] == [""] * 4, name
    for found in results:
        first, left, right = found["half"].split("\n")
        assert first == "fs.testing.assert_adjoint found that the halves aren't transposes on mesh {tp: 2, dp: 2}."
        assert left.startswith("  sum of <op x, y> is ") and right.startswith("  sum of <x, dual y> is ")
        assert found["half"] == results[0]["half"]
        assert found["shapes"] == (
            "fs.testing.assert_adjoint found that gather and nothing aren't transposes: shapes differ on 4 ranks.\n"
            "  x has [(2, 3)] here, dual(op(x)) has [(4, 3)]"
        )
        assert found["not shared"].startswith("fs.testing.assert_adjoint found that vary and psum aren't transposes")
        assert found["one rank"].startswith("fs.testing.assert_adjoint found that it aren't transposes")


def reference_checks():
    mesh = device_mesh(MESH)
    cut, whole = fs.NamedSharding(mesh, fs.P(("dp", "tp"))), torch.arange(7.0)
    other = fs.NamedSharding(mesh, fs.P(None, "tp"))
    tree, where = {"w": whole, "v": torch.ones(2, 3)}, {"w": cut, "v": other}

    def double(t):
        return {"w": t["w"] * 2, "v": t["v"] + 1}

    def wrong(t):
        return {"w": t["w"] * (3 if dist.get_rank() == 1 else 2), "v": t["v"] + 1}

    check = functools.partial(assert_matches_reference, rtol=0, atol=0)
    return {
        "bits": message_of(check, double, double, tree, shardings=[where]),
        "plain": message_of(check, lambda t, s: t["v"].full_tensor() * s, lambda t, s: t["v"] * s, tree, torch.ones(()), shardings=[where, None]),
        "close": message_of(assert_matches_reference, double, lambda t: double(fs.tree.map(lambda x: x * (1 + 1e-7), t)), tree, shardings=[where]),
        "wrong": message_of(check, wrong, double, tree, shardings=[where], what="the results"),
        "part": torch.equal(local_part(whole, cut), cut.to_dtensor(local_part(whole, cut), (7,)).to_local()),
    }  # fmt: skip


def test_each_rank_compares_what_it_holds():
    results = run_ranks(reference_checks, 4)
    for rank, found in enumerate(results):
        assert found["bits"] == found["plain"] == found["close"] == "" and found["part"]
        assert bool(found["wrong"]) == (rank == 1)
    assert results[1]["wrong"].startswith(
        "fs.testing.assert_matches_reference found that 1 of 2 leaves of the results differ.\n  w "
    )


def pid():
    return os.getpid()


def fail(case):
    if dist.get_rank() == 1:
        raise ValueError(f"no home for {case.leaves}")


def hang(case):
    while dist.get_rank() == 1:
        pass


def test_a_failing_case_is_named_and_kills_only_its_pool():
    case = ReshardCase({"w": Leaf((3,), torch.int64)}, target=Home(AbstractMesh(("tp",), (2,)), fs.zero(1)))
    others = run_ranks(pid, 3)
    for fn, what in ((fail, "raised ValueError: no home for {'w': Leaf(shape=(3,)"), (hang, "had not answered")):
        with pytest.raises(RankFailure) as caught:
            run_ranks(fn, case.ranks, case, timeout=2.0, seed=5)
        text = str(caught.value)
        assert f"\n  rank 1 {what}" in text
        assert f"\nTo repeat it: run_ranks({fn.__name__}, 2, {case!r}, seed=5)\n" in text
        assert "Home(mesh=AbstractMesh(names=('tp',), sizes=(2,), ranks=()), strategy=" in text
        assert run_ranks(pid, 3) == others
        assert len(run_ranks(pid, 2)) == 2
