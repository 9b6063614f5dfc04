"""None in `grads=`, for one call: the leaf and its moments stay, all others are what torch gives."""

import pytest
import torch

import fsharding as fs
from fsharding.sharding.named_sharding import local_of

MESH = fs.make_mesh(dp=-1, device="cpu")
VALUES = {"body": {"w": torch.arange(12.0).view(3, 4) / 12}, "head": torch.linspace(-1, 1, 5)}
HELD = [False, True, False, True, True, False]


def loss_fn(params, batch):
    w = fs.gather_unit(params)
    return (batch["x"] * (w["body"]["w"].square().sum() + w["head"].square().sum())).sum(), 1


def steps(opt, by_hand=False):
    """The parameters after steps in some of which the head is frozen, and the states in between."""
    state, _ = fs.setup(VALUES, loss_fn, opt, fs.random.key(0), mesh=MESH)
    states = [state]
    for held in HELD:
        shardings = {**state.layout.main, "head": None if held else state.layout.main["head"]}
        _, grads = fs.value_and_grad(loss_fn, grads=shardings)(state.params, {"x": torch.ones(1)})
        if by_hand:
            updates, opt_state = opt.update(grads, state.opt_state, state.params)
            params = fs.optim.apply_updates(state.params, updates)
            state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        else:
            state = fs.update(state, grads, opt)
        states.append(state)
    return states


@pytest.mark.parametrize("by_hand", [False, True], ids=["fs.update", "opt.update"])
def test_a_gradient_that_is_none_skips_a_leaf_as_torch_does(by_hand):
    body, head = (torch.nn.Parameter(x.clone()) for x in (VALUES["body"]["w"], VALUES["head"]))
    theirs = torch.optim.SGD([body, head], lr=0.1, momentum=0.9)
    for state, held in zip(steps(fs.sgd(0.1, momentum=0.9), by_hand)[1:], HELD, strict=True):
        theirs.zero_grad()
        (body.square().sum() + head.square().sum()).backward()
        head.grad = None if held else head.grad
        theirs.step()
        ours = fs.unshard(state.params)
        torch.testing.assert_close(ours["body"]["w"], body.detach())
        torch.testing.assert_close(ours["head"], head.detach())


OPTIMIZERS = {
    "adamw": fs.adamw(0.1, weight_decay=0.1),
    "lion": fs.optim.lion(0.1),
    "adafactor": fs.optim.adafactor(0.1),
    "clipped": fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(0.1)),
    "groups": fs.optim.multi_transform(
        {"a": fs.adamw(0.1), "b": fs.sgd(0.1, momentum=0.9)}, {"body": {"w": "a"}, "head": "b"}
    ),
}


@pytest.mark.parametrize("opt", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_held_leaf_and_its_moments_stay_under_every_optimizer(opt):
    states = steps(opt)
    for before, after, held in zip(states, states[1:], HELD, strict=False):
        old, new = (fs.tree.named_leaves(fs.tree.map(local_of, x)) for x in (before, after))
        assert old.keys() == new.keys()
        of_head = [path for path in old if path.endswith("head")]
        assert held == all(torch.equal(old[path], new[path]) for path in of_head)
        assert not torch.equal(old["params.body.w"], new["params.body.w"])
