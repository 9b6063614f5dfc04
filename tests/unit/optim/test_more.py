"""Lion, Adafactor, Muon, averages, noise and torch's own optimizers, on plain tensors: against torch and the papers."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import optim
from fsharding.base.errors import ConfigError, LayoutError, TreeError
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import fake_ranks, normal_tree

SHAPES = {"w": (15, 7), "tall": (7, 15), "b": (7,), "s": (), "blocks": {"w": (3, 6, 10), "norm": (3, 10)}}
MATRICES = {"w": (15, 7), "tall": (7, 15), "blocks": {"w": (3, 6, 10), "x": (2, 2, 10, 6)}}


def values(seed, shapes=SHAPES):
    return normal_tree(shapes, seed)


def ours(opt, steps=5, shapes=SHAPES):
    params = values(0, shapes)
    state = opt.init(params)
    for step in range(1, steps + 1):
        updates, state = opt.update(values(step, shapes), state, params)
        params = fs.optim.apply_updates(params, updates)
    return params


def units(tree):
    """The leaves, and the units of stacks as leaves of their own, as torch knows them."""
    named = fs.tree.named_leaves(tree)
    return {f"{path}.{i}": x for path, leaf in named.items() for i, x in enumerate(rows(path, leaf))}


def rows(path, leaf):
    stacked = path.startswith("blocks")
    matrices = leaf.reshape(-1, *leaf.shape[-2:]) if leaf.ndim > 3 else leaf
    return matrices.unbind(0) if stacked else [leaf]


def theirs(make, steps=5, shapes=SHAPES):
    params = {path: x.clone().requires_grad_() for path, x in units(values(0, shapes)).items()}
    opt = make([*params.values()])
    for step in range(1, steps + 1):
        for path, grad in units(values(step, shapes)).items():
            params[path].grad = grad.clone()
        opt.step()
    return {path: x.detach() for path, x in params.items()}


# ----------------------------------------------------------------------------------------- against torch and the papers
ADAFACTORS: list[dict[str, Any]] = [
    {},
    {"lr": 0.5, "weight_decay": 0.1},
    {"eps": (1e-3, 0.1), "d": 1.2, "beta2_decay": -0.5},
]


@pytest.mark.parametrize("how", ADAFACTORS, ids=str)
def test_adafactor_is_that_of_torch(how):
    names = {"lr": "learning_rate", "d": "clip"}
    opt = optim.adafactor(**{names.get(k, k): v for k, v in how.items()})
    assert_trees_close(units(ours(opt)), theirs(lambda p: torch.optim.Adafactor(p, **how)), rtol=1e-5, atol=1e-6)


MUONS: list[dict[str, Any]] = [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust": "match_rms_adamw", "steps": 3}]


@pytest.mark.parametrize("how", MUONS, ids=str)
def test_muon_is_that_of_torch(how):
    names = {"adjust": "adjust_lr_fn", "steps": "ns_steps"}
    kwargs = {names.get(k, k): v for k, v in how.items()}
    reference = theirs(lambda p: torch.optim.Muon(p, lr=0.02, **kwargs), shapes=MATRICES)
    # Five steps of at most 0.02; where another kernel rounds a bfloat16 the other way, that is a 256th of one.
    assert_trees_close(units(ours(optim.muon(0.02, **how), shapes=MATRICES)), reference, rtol=0, atol=2e-4)


def test_what_muon_adds_is_nearly_orthogonal():
    grads = values(1, {"w": (4, 9), "tall": (9, 4)})
    opt = optim.muon(1.0, weight_decay=0.0, dtype=torch.float32)
    updates, _ = opt.update(grads, opt.init(grads), grads)
    for name, x in updates.items():
        values_of = torch.linalg.svdvals(x) / (1.5 if name == "tall" else 1.0)
        assert values_of.min() > 0.6 and values_of.max() < 1.3, name


def plain_lion(params, grads, momentum, lr, decay, b1=0.9, b2=0.99):
    """One step as the paper's algorithm 2 has it."""
    direction = torch.sign(b1 * momentum + (1 - b1) * grads)
    return params - lr * (direction + decay * params), b2 * momentum + (1 - b2) * grads


def test_lion_is_that_of_the_paper():
    expected = {}
    for path, x in fs.tree.named_leaves(values(0)).items():
        momentum = torch.zeros_like(x)
        for step in range(1, 6):
            x, momentum = plain_lion(x, fs.tree.at(values(step), path), momentum, 0.1 / step, 0.2)
        expected[path] = x
    found = ours(optim.lion(lambda count: 0.1 / (count + 1), weight_decay=0.2))
    assert_trees_close(fs.tree.named_leaves(found), expected, rtol=1e-6, atol=1e-6)


ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "maximize": True}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("kind", "how"), ELEMENTWISE, ids=lambda x: getattr(x, "__name__", None))
def test_from_torch_is_that_of_torch(kind, how):
    params, reference = ours(optim.from_torch(kind, **how), steps=8), theirs(lambda p: kind(p, **how), steps=8)
    assert_trees_close(units(params), reference, rtol=1e-6, atol=1e-6)


def test_from_torch_follows_a_rate():
    opt = optim.from_torch(torch.optim.SGD, lr=lambda count: 10.0**-count)
    params = {"w": torch.zeros(1)}
    state, seen = opt.init(params), []
    for _ in range(3):
        updates, state = opt.update({"w": torch.ones(1)}, state, params)
        seen.append(float(updates["w"]))
    assert seen == pytest.approx([-1.0, -0.1, -0.01]) and int(state.count) == 3


class Counting(torch.optim.Optimizer):
    """Somebody's own, with a plain number in its state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                p.data.add_(p.grad, alpha=-group["lr"] / state["seen"])


def test_from_torch_takes_ones_own():
    opt = optim.from_torch(Counting, lr=0.2)
    assert_trees_close(units(ours(opt)), theirs(lambda p: Counting(p, 0.2)), rtol=1e-6, atol=1e-6)
    params = values(0)
    state = opt.update(values(1), opt.init(params), params)[1]
    assert not state.slots and state.scalars["seen"]["blocks"]["w"].tolist() == 1


def test_the_state_of_from_torch_is_a_tree():
    params = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "none": None}
    state = optim.from_torch(torch.optim.NAdam).init(params)
    assert fs.tree.paths(state) == (
        "count", "slots.exp_avg.w", "slots.exp_avg_sq.w", "scalars.mu_product.w", "scalars.step.w",
    )  # fmt: skip
    assert state.slots["exp_avg"]["w"].shape == (2, 3) and state.scalars["step"]["w"].shape == ()
    assert optim.from_torch(torch.optim.SGD, lr=0.1).init(params).slots == {}


class Trusting(Counting):
    """Scales the step of a parameter by its norm, as LAMB and LARS do."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1 * float(p.data.norm()))


class Restless(Counting):
    """Keeps what it has learnt in its groups, as D-adaptation does."""

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] *= 0.5


class Searching(Counting):
    def step(self, closure):
        closure()


MEND = "Write it as a pair (init, update) of functions on trees; fs.optim.sum_dims sums over ranks."
REFUSED = [
    (torch.optim.Adafactor, "does not treat each element by itself",
     "Use fs.optim.adafactor, which sums the statistics of full matrices over ranks."),
    (torch.optim.Muon, "does not treat each element by itself", "Use fs.optim.muon, which gathers full matrices."),
    (torch.optim.LBFGS, "needs a closure",
     "Use an optimizer that updates from one gradient, or write the line search around fs.value_and_grad."),
    (torch.optim.SparseAdam, "needs sparse gradients",
     "Use torch.optim.Adam: gradients of sharded parameters are dense."),
    (Searching, "needs a closure", MEND),
    (Trusting, "does not treat each element by itself: a parameter in parts moves elsewhere", MEND),
    (Restless, "keeps state in its groups, which is no parameter's", MEND),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "why", "mend"), REFUSED, ids=lambda x: getattr(x, "__name__", None))
def test_from_torch_refuses_what_couples_elements(kind, why, mend):
    with pytest.raises(ConfigError) as caught:
        optim.from_torch(kind)
    assert str(caught.value) == f"fs.optim.from_torch cannot take {kind.__name__}: it {why}.\n{mend}"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optim.from_torch("Adam"), "needs a class of optimizers; got 'Adam'."),
        (lambda: optim.from_torch(torch.nn.Linear), "needs a class of optimizers; got the class Linear."),
        (
            lambda: optim.from_torch(torch.optim.Adam([torch.ones(1)])),
            "needs a class of optimizers; got a torch optimizer, Adam.",
        ),
    ],
)
def test_from_torch_wants_a_class(make, text):
    with pytest.raises(ConfigError) as caught:
        make()
    mend = "Pass the class and its settings: fs.optim.from_torch(torch.optim.NAdam, lr=1e-3)."
    assert str(caught.value) == f"fs.optim.from_torch {text}\n{mend}"


def test_from_torch_refuses_settings_for_graphs():
    with pytest.raises(ConfigError) as caught:
        optim.from_torch(torch.optim.Adam, differentiable=True, capturable=True)
    assert str(caught.value) == (
        "fs.optim.from_torch cannot take settings of Adam.\n"
        "  differentiable=True: updates have no graph: write the rule as a pair (init, update) and differentiate that\n"
        "  capturable=True: each update builds a new optimizer, which no CUDA graph can repeat\n"
        "Leave them out."
    )


# ---------------------------------------------------------------------------------------------------------------- purity
MAKES = {
    "lion": lambda: optim.lion(0.1, weight_decay=0.1),
    "adafactor": lambda: optim.adafactor(weight_decay=0.1),
    "muon": lambda: optim.multi_transform({"matrix": optim.muon(0.02), "other": fs.adamw(0.1)}, optim.label_matrices()),
    "from_torch": lambda: optim.from_torch(torch.optim.RMSprop, momentum=0.9, weight_decay=0.1),
    "ema": lambda: fs.optim.chain(fs.sgd(0.1), optim.ema(0.9)),
    "lookahead": lambda: optim.lookahead(fs.adamw(0.1), every=2),
    "noise": lambda: optim.add_noise(optim.annealed(0.3), fs.random.key(0)),
}


@pytest.mark.parametrize("name", MAKES)
def test_an_update_changes_nothing_that_went_in(name):
    opt, params, grads = MAKES[name](), values(0), values(1)
    _, state = opt.update(values(2), opt.init(params), params)
    before = fs.tree.map(torch.clone, (params, grads, state))
    updates, after = opt.update(grads, state, params)
    fs.optim.apply_updates(params, updates)
    assert_bitwise_equal((params, grads, state), before)
    again = opt.update(*fs.tree.map(torch.clone, (grads, state, params)), optim.UpdateContext(donate=True))
    assert_bitwise_equal(again, (updates, after))


@pytest.mark.parametrize("name", MAKES)
def test_frozen_leaves_stay_frozen(name):
    opt, params = MAKES[name](), {"blocks": {"w": torch.ones(2, 3, 4), "frozen": None}}
    whole = {"blocks": {"w": torch.ones(2, 3, 4), "frozen": torch.ones(2)}}
    state = opt.init(params)
    for _ in range(2):
        updates, state = opt.update(params, state, whole)
        assert updates["blocks"]["frozen"] is None
    assert fs.optim.apply_updates(whole, updates)["blocks"]["frozen"] is whole["blocks"]["frozen"]


# ------------------------------------------------------------------------------------------- where an element stands
@given(
    st.integers(1, 150),
    st.lists(st.integers(0, 150), max_size=3),
    st.sampled_from(["lion", "from_torch", "ema", "lookahead"]),
    st.integers(0, 9),
)
def test_an_element_does_not_know_where_it_stands(size, cuts, name, seed):
    generator = torch.Generator().manual_seed(seed)
    param, *grads = (torch.randn(size, generator=generator) for _ in range(4))
    opt = MAKES[name]()
    points = sorted({0, size, *(cut for cut in cuts if cut < size)})

    def run(pieces):
        params = [param[a:b].clone() for a, b in pieces]
        state = opt.init(params)
        for grad in grads:
            updates, state = opt.update([grad[a:b] for a, b in pieces], state, params)
            params = fs.optim.apply_updates(params, updates)
        return torch.cat(params)

    assert_bitwise_equal(run(list(itertools.pairwise(points))), run([(0, size)]))


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["muon", "adafactor"]))
def test_a_unit_of_a_stack_is_as_the_unit_alone(layers, rows, columns, name):
    make = {"muon": lambda: optim.muon(0.1, dtype=torch.float32), "adafactor": MAKES["adafactor"]}[name]
    stack = {"blocks": {"w": (layers, rows, columns)}}
    whole = ours(make(), 3, stack)["blocks"]["w"]
    generator = [values(step, stack)["blocks"]["w"] for step in range(4)]
    for layer in range(layers):
        opt, params = make(), {"w": generator[0][layer]}
        state = opt.init(params)
        for grads in generator[1:]:
            updates, state = opt.update({"w": grads[layer]}, state, params)
            params = fs.optim.apply_updates(params, updates)
        assert_trees_close(params["w"], whole[layer], rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- averages
def test_ema_follows_the_parameters():
    opt, params = fs.optim.chain(fs.sgd(0.1, momentum=0.9), optim.ema(0.8)), values(0)
    state, average = opt.init(params), params
    for step in range(1, 5):
        updates, state = opt.update(values(step), state, params)
        params = fs.optim.apply_updates(params, updates)
        average = fs.tree.map(lambda a, p: 0.8 * a + 0.2 * p, average, params)
    assert_trees_close(optim.ema_of(state), average, rtol=1e-6, atol=1e-6)
    assert_bitwise_equal(params, ours(fs.sgd(0.1, momentum=0.9), 4))


@pytest.mark.parametrize("count", [0, 2])
def test_one_average_is_asked_for(count):
    state = fs.optim.chain(fs.sgd(0.1), *[optim.ema()] * count).init(values(0))
    with pytest.raises(TreeError) as caught:
        optim.ema_of(state)
    assert str(caught.value) == (
        f"fs.optim.ema_of finds {count} averages in the optimizer state.\n"
        "Put one fs.optim.ema at the end of the chain, or take state.average out of the state yourself."
    )


def test_lookahead_is_that_of_the_paper():
    slow = params = values(0)
    inner = fs.adamw(0.1)
    state = inner.init(params)
    for step in range(1, 8):
        updates, state = inner.update(values(step), state, params)
        params = fs.optim.apply_updates(params, updates)
        if step % 3 == 0:
            params = slow = fs.tree.map(lambda s, p: s + 0.25 * (p - s), slow, params)
    found = ours(optim.lookahead(fs.adamw(0.1), every=3, share=0.25), 7)
    assert_trees_close(found, params, rtol=1e-5, atol=1e-6)


def test_noise_has_the_deviation_that_was_asked_for():
    opt, grads = optim.add_noise(optim.annealed(0.3), fs.random.key(1)), {"w": torch.zeros(200, 200)}
    state, seen = opt.init(grads), []
    for _ in range(2):
        updates, state = opt.update(grads, state)
        seen.append(updates["w"])
    assert seen[0].std().item() == pytest.approx(math.sqrt(0.3), rel=0.02)
    assert seen[1].std().item() == pytest.approx(math.sqrt(0.3 / 2**0.55), rel=0.02)
    assert torch.corrcoef(torch.stack([x.flatten() for x in seen]))[0, 1].abs() < 0.02


# ---------------------------------------------------------------------------------------------------------------- errors
def test_muon_takes_matrices_only():
    with pytest.raises(LayoutError) as caught:
        optim.muon(0.1).init(values(0, {"w": (2, 3), "b": (7,), "s": ()}))
    assert str(caught.value) == (
        "fs.optim.muon takes matrices and stacks of them only.\n  b is [7]\n  s is []\n"
        'fs.optim.multi_transform({"matrix": fs.optim.muon(...), "other": fs.adamw(...)}, fs.optim.label_matrices()) separates them.'
    )
    with pytest.raises(ConfigError, match=r"^fs\.optim\.muon got an unknown adjust='none'\."):
        optim.muon(0.1, adjust="none")


@pytest.mark.parametrize("name", ["adafactor", "from_torch", "ema", "lookahead"])
def test_parameters_are_asked_for(name):
    makes = {**MAKES, "ema": optim.ema}
    opt, grads = makes[name](), values(1)
    with pytest.raises(TreeError) as caught:
        opt.update(grads, opt.init(grads))
    text = f"fs.optim.{name} needs the parameters to update them.\nCall opt.update(gradients, state, params)."
    assert str(caught.value) == text


def test_labels_of_matrices():
    tree = {"embed": torch.ones(4, 2), "blocks": {"w": torch.ones(2, 3, 4), "norm": torch.ones(2, 4)}}
    assert fs.tree.map_with_path(optim.label_matrices(), tree) == {
        "embed": "other", "blocks": {"w": "matrix", "norm": "other"},
    }  # fmt: skip
    assert optim.label_matrices(("encoder",))("encoder.w", torch.ones(2, 3, 4)) == "matrix"


def test_statistics_of_adafactor_stay_where_they_are():
    """Parameters in another sharding than gradients and statistics: one of two ranks."""
    draws = {"w": fs.random.zeros((8, 6)), "b": fs.random.zeros((8,))}
    with fake_ranks(0, dp=2) as mesh:
        layout = fs.plan_layout(draws, mesh, strategy=fs.zero(1))
        opt = optim.adafactor(0.1)
        state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)
        grads = fs.shard({"w": torch.ones(8, 6), "b": torch.ones(8)}, layout.main)
        _, after = opt.update(grads, state.opt_state, state.params)
        for before, now in zip(fs.tree.leaves(state.opt_state), fs.tree.leaves(after), strict=True):
            assert fs.typeof(before) == fs.typeof(now)
