"""The rows of Troubleshooting and contributing/errors.md that take several ranks: what each rank says is there."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsharding as fs
from fsharding.testing import RankPool
from tests.pages import code_spans, errors_of, said

ROWS = errors_of(section="Several ranks")


def init(key):
    return {"w": fs.random.normal(key, (4, 4))}


def loss_fn(params, batch):
    x = F.linear(batch, fs.gather_unit(params)["w"])
    return x.square().sum(), len(x)


def started(mesh, draw=init):
    opt = fs.sgd(0.1)
    return fs.init_state(draw, opt, fs.random.key(0), fs.plan_layout(init(fs.random.key(0)), mesh, tp="replicate")), opt


def other_meshes(mesh):
    fs.make_mesh(device="cpu", timeout=timedelta(seconds=20), **{("dp", "tp")[dist.get_rank()]: 2})


def other_microbatches(mesh):
    state, opt = started(mesh)
    fs.make_train_step(loss_fn, opt, microbatches=1 + dist.get_rank())(state, torch.ones(4, 4))


def other_draws(mesh):
    generator = torch.Generator().manual_seed(dist.get_rank())
    state, opt = started(mesh, lambda key: {"w": torch.randn(4, 4, generator=generator)})
    fs.make_train_step(loss_fn, opt)(state, torch.ones(4, 4))


def other_module(mesh):
    torch.manual_seed(dist.get_rank())
    net = fs.functionalize(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4)}), ())
    fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, mesh))


def other_tensors(mesh):
    fs.shard({"w": torch.full((4, 4), float(dist.get_rank()))}, fs.NamedSharding(mesh, fs.P("dp")))


def other_leaves(mesh):
    state, opt = started(mesh)
    here = fs.NamedSharding(mesh, fs.P())
    leaf = here.to_dtensor(torch.full((4, 4), float(dist.get_rank())), (4, 4))
    fs.make_train_step(loss_fn, opt)(state.replace(params={"w": leaf}), torch.ones(4, 4))


def other_steps(mesh):
    state, opt = started(mesh)
    step = fs.make_train_step(loss_fn, opt)
    state, _ = step(state, torch.ones(4, 4))
    step(state.replace(step=state.step + 4 * dist.get_rank()), torch.ones(4, 4))


def other_shapes(mesh):
    state, opt = started(mesh)
    fs.make_train_step(loss_fn, opt)(state, torch.ones(4, 4 + dist.get_rank()))


def full_tensor_of_a_part(mesh):
    names = {"qkv": (fs.Fused("heads", (4, 2, 2)), None)}
    tp = fs.make_mesh(tp=2, device="cpu", timeout=timedelta(seconds=20))
    layout = fs.plan_layout({"qkv": torch.zeros(8, 4)}, tp, names=names)
    fs.shard({"qkv": torch.ones(8, 4)}, layout)["qkv"].full_tensor()


def other_order(mesh):
    names = ("a", "b") if dist.get_rank() == 0 else ("b", "a")

    def loss(params, batch):
        for name in names:
            batch = torch.tanh(F.linear(batch, fs.gather_unit(params[name])))
        return batch.square().sum(), len(batch)

    state, step = fs.setup({name: torch.eye(4) for name in "ab"}, loss, fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    step(state, torch.ones(4, 4))


def other_rows(mesh):
    state, opt = started(fs.make_mesh(device="cpu", tp=2))
    fs.make_train_step(loss_fn, opt)(state, torch.full((4, 4), float(dist.get_rank())))


def whole_sequences(mesh):
    state, opt = started(fs.make_mesh(device="cpu", cp=2))
    fs.make_train_step(loss_fn, opt)(state, torch.arange(16.0).view(4, 4))


def ignores_tp(mesh):
    def loss(params, batch):
        return F.linear(batch, fs.gather_unit(params)["w"]).square().sum(), len(batch)

    on_tp, names = fs.make_mesh(device="cpu", tp=2), {"w": ("mlp", None)}
    first = {"w": torch.arange(16.0).view(4, 4)}
    state, step = fs.setup(first, loss, fs.sgd(0.1), fs.random.key(0), mesh=on_tp, names=names)
    step(state, torch.ones(4, 4))


def saved_by_one(mesh):
    state, opt = started(mesh)
    step = fs.make_train_step(loss_fn, opt)
    state, _ = step(state, torch.ones(4, 4))
    if dist.get_rank() == 0:
        fs.checkpoint.save("never written", state)
    else:
        step(state, torch.ones(4, 4))


MISTAKES = {
    "different meshes": other_meshes,
    "different settings": other_microbatches,
    "parameters of `torch.randn`": other_draws,
    "a module, adapter or buffers that differ by rank": other_module,
    "different tensors given to `fs.shard`": other_tensors,
    "different leaves in `state.replace` or `fs.state_from_params`": other_leaves,
    "`state.step` or `state.key` replaced on one rank": other_steps,
    "`leaf.full_tensor()` of a leaf fused over `tp`, or owned by a stage": full_tensor_of_a_part,
    "units in a different order": other_order,
    "different rows along `tp`": other_rows,
    "full sequences along `cp`": whole_sequences,
    "a plain loss over leaves sharded by `tp`": ignores_tp,
    "a batch that fails on one rank": other_shapes,
    "`if rank == 0: fs.checkpoint.save(...)`": saved_by_one,
}
BREAKING = list(MISTAKES)[-2:]
"""After these no group can be used any more."""


def told(mistake, seconds):
    return said(MISTAKES[mistake], fs.make_mesh(dp=2, device="cpu", timeout=timedelta(seconds=seconds)))


@pytest.fixture(scope="module")
def texts():
    """The messages of two ranks, by mistake."""
    result = {}
    for last in BREAKING:
        with RankPool(2) as pool:
            for mistake in MISTAKES:
                if mistake == last or (mistake not in BREAKING and mistake not in result):
                    result[mistake] = pool.run(told, mistake, 2 if mistake == last else 20)
    return result


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_page_says_what_ranks_say(mistake, texts):
    words, edit = ROWS[mistake]
    messages = texts[mistake] if mistake != BREAKING[0] else texts[mistake][:1]  # rank 1 has its own error
    for message in messages:
        assert not [part for part in code_spans(words) + code_spans(edit) if part not in message], message


def test_every_row_is_tested():
    assert {*ROWS} == {*MISTAKES}
