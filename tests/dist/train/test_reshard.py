"""Reshards on real ranks: a run that swaps strategies and meshes, ranks that come and go, memory, bytes, and refusals."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.base.errors import DonatedError, FshardingError, LayoutError
from fsharding.comm import reshard_plan
from fsharding.sharding.named_sharding import Assigned, local_of
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import crossed, mesh_of, refusal, token_batch

CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=1, intermediate_size=20)
MODEL = fs.models.decoder(CONFIG)
OPT = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(1e-2, weight_decay=0.1))


def train(state, steps, layouts=(), donate=False):
    """Losses and norms of some steps, with a swap before each for which there is a layout."""
    step, seen = fs.make_train_step(MODEL, OPT, donate=donate), []
    for number in range(steps):
        if number < len(layouts):
            state = fs.reshard(state, layouts[number], donate=donate)
        state, metrics = step(state, token_batch(int(state.step), mesh=state.layout.mesh))
        seen.append((metrics.loss.item(), metrics.grad_norm.item()))
    return seen, state


def swap_strategies(axes, precision, donate):
    layout = fs.plan_layout(MODEL, mesh_of(axes), strategy=fs.zero(1), precision=precision)
    order = [fs.zero(1), fs.zero(3), fs.zero(2), fs.hybrid(opt_state=True), fs.zero(0), fs.zero(3)]
    first = fs.init_state(MODEL, OPT, fs.random.key(0), layout)
    stayed, one = train(first, 6)
    swapped, other = train(
        fs.init_state(MODEL, OPT, fs.random.key(0), layout), 6, [layout.with_strategy(s) for s in order], donate
    )
    assert_bitwise_equal(fs.reshard(other, layout), one)
    return stayed == swapped


@pytest.mark.parametrize(
    ("axes", "precision"),
    crossed(
        [{"dp": 2}, {"replica": 2, "dp": 2}],
        {"fp32": (fs.FP32,), "bf16": (fs.BF16,)},
        kept=["{'replica': 2, 'dp': 2}-fp32"],
    ),
)
def test_a_run_that_swaps_has_the_losses_of_one_that_does_not(axes, precision):
    ranks = 2 * len(axes)
    assert all(run_ranks(swap_strategies, ranks, axes, precision, ranks == 4))


def shrink_and_grow():
    """Three steps on 4 ranks, three on ranks 1 and 3, three on 4 again, against nine on 2."""
    few, many = mesh_of({"dp": 2}, ranks=(1, 3)), mesh_of({"dp": 4})
    wide = fs.plan_layout(MODEL, many)
    narrow = wide.with_mesh(few).with_strategy(fs.zero(1))
    step = fs.make_train_step(MODEL, OPT, donate=True)
    state, seen = fs.init_state(MODEL, OPT, fs.random.key(0), wide), []
    for number in range(9):
        if number in (3, 6):
            state = fs.reshard(state, narrow if number == 3 else wide, donate=True)
        if fs.is_member(state.layout.mesh):
            state, metrics = step(state, token_batch(number, mesh=state.layout.mesh))
            seen.append(metrics.loss.item())
    return seen, int(state.step), fs.debug.state_bytes(state)


def test_a_run_shrinks_to_fewer_ranks_and_grows_again():
    result = run_ranks(shrink_and_grow, 4)
    assert {step for _, step, _ in result} == {9} and len({size for *_, size in result}) == 1
    assert [len(seen) for seen, *_ in result] == [6, 9, 6, 9]
    assert result[1][0] == result[3][0] and result[0][0][3:] == result[1][0][6:]
    alone = fs.plan_layout(MODEL, fs.make_mesh(dp=1, device="cpu"))
    want, _ = train(fs.init_state(MODEL, OPT, fs.random.key(0), alone), 9)
    torch.testing.assert_close(torch.tensor(result[1][0]), torch.tensor([x for x, _ in want]), rtol=1e-5, atol=0)


def save_on_a_part(path):
    """Ranks outside a mesh have an old step; the checkpoint has that of the mesh."""
    wide, narrow = (fs.plan_layout(MODEL, m) for m in (mesh_of({"dp": 4}), mesh_of({"dp": 2}, ranks=(2, 3))))
    state = fs.reshard(fs.init_state(MODEL, OPT, fs.random.key(0), wide), narrow)
    if fs.is_member(narrow.mesh):
        _, state = train(state, 2)
    fs.checkpoint.save(path, state)
    again = fs.checkpoint.load(path, wide, opt=OPT)
    assert_bitwise_equal(again, fs.reshard(state, wide))
    assert_bitwise_equal(
        fs.checkpoint.load(path, narrow, opt=OPT),
        state.replace(step=again.step, key=again.key, opt_state=fs.reshard(again, narrow).opt_state),
    )
    with fs.checkpoint.Checkpointer(path.with_name("many"), every=2) as saver:
        saver.save(state)
        assert saver.latest().name == "2"
        assert saver.after_step(state) and not saver.after_step(state.replace(step=state.step + 1))
    return fs.checkpoint.metadata(path).step


def test_a_state_on_some_of_the_ranks_is_saved(tmp_path):
    assert run_ranks(save_on_a_part, 4, tmp_path / "a") == [2] * 4


# --------------------------------------------------------------------------------------------------- bytes and memory
def count_bytes(budget):
    """What torch is asked to send, beside the plan and the library's own count."""
    a, b = (fs.plan_layout(MODEL, mesh_of(axes)) for axes in ({"dp": 4}, {"tp": 2, "dp": 2}))
    state = fs.init_state(MODEL, OPT, fs.random.key(0), a)
    seen, isend = [], dist.isend

    def spy(tensor, *args):
        seen.append(tensor.nbytes)
        return isend(tensor, *args)

    dist.isend = spy
    try:
        with fs.debug.count_bytes() as traffic:
            fs.reshard(state, b, budget=budget)
    finally:
        dist.isend = isend
    told = fs.debug.explain_reshard(state, b, budget=budget)
    return sum(seen), traffic.bytes, told.sent, told.total


@pytest.mark.parametrize("budget", [1 << 12, reshard_plan.BUDGET])
def test_the_bytes_of_the_plan_are_sent(budget):
    result = run_ranks(count_bytes, 4, budget)
    assert all(torchs == counted == planned > 0 for torchs, counted, planned, _ in result)
    assert {total for *_, total in result} == {sum(planned for _, _, planned, _ in result)}


# ----------------------------------------------------------------------------------------------------------- refusals
def refuse(case):
    mesh = mesh_of({"dp": 2})
    layout = fs.plan_layout(MODEL, mesh)
    state = fs.init_state(MODEL, OPT, fs.random.key(0), layout)
    try:
        if case == "ranks differ":
            fs.reshard(state, layout.with_strategy(fs.zero(dist.get_rank())))
        elif case == "partial":
            leaf = fs.NamedSharding(mesh, fs.P(), ("dp",)).to_dtensor(torch.ones(4), (4,))
            fs.reshard({"a": leaf}, fs.NamedSharding(mesh, fs.P("dp")))
        elif case == "assigned":
            owned = fs.NamedSharding(mesh, assigned=(Assigned.indices("dp", 0, ((0, 3), (1, 2))),))
            leaf = owned.to_dtensor(torch.ones(2), (4,))
            fs.reshard({"a": leaf}, fs.NamedSharding(mesh))
        elif case == "donated":
            fs.reshard(state, layout, donate=True)
            state.step  # noqa: B018
        else:
            fs.reshard(state, case)
    except FshardingError as error:
        return type(error), str(error)
    return None


def test_ranks_that_ask_for_different_things():
    (kind, text), (other, _) = run_ranks(refuse, 2, "ranks differ")
    assert kind is other is LayoutError
    assert text == (
        "fs.reshard got different arguments on different ranks: rank 0 and ranks [1] differ.\n"
        "Give every rank the same tree, layout and budget."
    )


def test_an_open_sum_is_not_moved():
    assert run_ranks(refuse, 2, "partial")[1] == (
        LayoutError,
        "fs.reshard cannot move these leaves.\n  a: from P() unreduced over dp to P('dp'): take the sum first\n"
        "Make reduced gradients: fs.value_and_grad(loss_fn, grads=layout.main).",
    )


def test_a_donated_state_is_gone():
    assert [kind for kind, _ in run_ranks(refuse, 2, "donated")] == [DonatedError] * 2


def test_another_model_is_refused():
    other = fs.plan_layout(fs.models.decoder(replace(CONFIG, layers=3)), fs.AbstractMesh(("dp",), (2,)))
    kind, text = run_ranks(refuse, 2, other)[0]
    assert kind is LayoutError and text.startswith("fs.reshard cannot move a state to the layout of a different one.\n")
    assert "params.blocks.wq: float32[2, 16, 16] in the state, float32[3, 16, 16] in the layout" in text
    same = fs.plan_layout(MODEL, fs.AbstractMesh(("dp",), (2,)))
    assert run_ranks(refuse, 2, same)[0][1] == (
        "fs.reshard cannot move anything from or to the abstract mesh {dp: 2}.\nPlan the layout on a mesh of fs.make_mesh."
    )


# -------------------------------------------------------------------------------------------------- whole and in pieces
def cut_and_join():
    mesh = mesh_of({"pp": 2, "tp": 2})
    names = {"w": ("layers", "embed", fs.Fused("heads", (4, 2, 2))), "b": (None,), "s": ()}
    whole = {"w": torch.arange(192.0).view(4, 6, 8), "b": torch.arange(3), "s": torch.tensor(True)}
    layout = fs.plan_layout(whole, mesh, names=names, stages={"w": [[0, 3], [2, 1]], "b": 1})
    cut = fs.shard(whole, layout)
    joined = fs.unshard(cut, source=layout)
    flight = fs.reshard(
        fs.tree.map(lambda x, s, w: fs.Local(local_of(x), s, tuple(w.shape)), cut, layout.params, whole),
        fs.NamedSharding(mesh),
    )
    assert_bitwise_equal({k: x.value for k, x in flight.items()}, whole)
    assert_bitwise_equal(joined, whole)
    donated = fs.reshard(cut, layout, source=layout, donate=True)
    assert all(local_of(x).numel() == 0 for x in cut.values())
    assert_bitwise_equal(fs.unshard(donated, source=layout), whole)
    return tuple(local_of(donated["w"]).shape)


def leaves_with_owners():
    mesh = mesh_of({"pp": 2, "tp": 2})
    names = {
        "both": ("layers", "embed", fs.Fused("heads", (4, 2, 2))),
        "fused": (fs.Fused("heads", (4, 2, 2)), None),
        "owned": (None, fs.Fused("heads", (2, 2))),
        "scalar": (),
        "plain": ("heads",),
    }
    whole = {
        "both": torch.arange(192.0).view(4, 6, 8),
        "fused": torch.arange(24.0).view(8, 3),
        "owned": torch.arange(12).view(3, 4),
        "scalar": torch.tensor(True),
        "plain": torch.arange(5.0),
    }
    layout = fs.plan_layout(whole, mesh, names=names, stages={"both": [[0, 3], [2, 1]], "owned": 1, "scalar": 0})
    cut = fs.shard(whole, layout)
    for name, leaf in cut.items():
        assert_bitwise_equal(fs.unshard(leaf), whole[name])
        assert_bitwise_equal(fs.unshard(leaf.clone()), whole[name])
    moved = fs.reshard(cut, fs.NamedSharding(mesh))
    assert_bitwise_equal({name: leaf.full_tensor() for name, leaf in moved.items()}, whole)
    return [refusal(leaf.full_tensor) for leaf in (cut["both"], cut["fused"] * 2, cut["owned"], cut["scalar"])]


def test_a_leaf_with_owners_is_unsharded_alone_and_refuses_full_tensor():
    for texts in run_ranks(leaves_with_owners, 4):
        assert texts[1] == (
            "DTensor.full_tensor would return one rank's part of a leaf.\n"
            "  float32[4, 3] is one part of a leaf with explicit owners over tp\n"
            "Use fs.unshard(leaf), which gathers all parts, also of a tree of leaves; x.to_local() is this rank's part."
        )
        assert [text.split(" over ")[1].split("\n")[0] for text in texts] == ["pp, tp", "tp", "pp, tp", "pp"]


def test_shard_and_unshard_are_inverse():
    assert run_ranks(cut_and_join, 4) == [(2, 6, 4)] * 4
