"""Optimizers on plain tensors and on one process: against torch.optim, and what does not depend on where it stands."""

import collections
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import optim
from fsharding.base import _compat
from fsharding.base.errors import ArgumentError, ConfigError, LayoutError, TreeError
from fsharding.optim import AdamState, ChainState, EmptyState, MultiTransformState, UpdateContext
from fsharding.testing import assert_bitwise_equal, assert_trees_close

SHAPES = {"w": (5, 7), "b": (7,), "s": (), "long": (200,), "none": (0, 3)}


def values(seed, shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ours(opt, steps=5):
    params, states = values(0), None
    states = opt.init(params)
    for step in range(1, steps + 1):
        updates, states = opt.update(values(step), states, params)
        params = fs.optim.apply_updates(params, updates)
    return params


def theirs(make, steps=5, clip=None):
    params = {name: x.requires_grad_() for name, x in values(0).items()}
    opt = make(list(params.values()))
    for step in range(1, steps + 1):
        for name, grad in values(step).items():
            params[name].grad = grad.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(params.values(), clip)
        opt.step()
    return {name: x.detach() for name, x in params.items()}


SGDS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("how", SGDS, ids=str)
def test_sgd_is_that_of_torch(how):
    assert_trees_close(
        ours(fs.sgd(0.1, **how)), theirs(lambda p: torch.optim.SGD(p, lr=0.1, **how)), rtol=1e-6, atol=1e-6
    )


def test_nesterov_needs_momentum_without_dampening():
    with pytest.raises(ConfigError) as caught:
        fs.sgd(0.1, nesterov=True, momentum=0.9, dampening=0.1)
    assert str(caught.value) == (
        "fs.sgd got nesterov=True with momentum=0.9 and dampening=0.1.\nPass nesterov=True with a momentum above 0 and dampening=0."
    )


@pytest.mark.parametrize("how", [{}, {"b1": 0.8, "b2": 0.99}, {"weight_decay": 0.1}, {"eps": 1e-3}], ids=str)
def test_adamw_is_that_of_torch(how):
    betas = (how.get("b1", 0.9), how.get("b2", 0.95))
    reference = theirs(
        lambda p: torch.optim.AdamW(
            p, 0.1, betas=betas, eps=how.get("eps", 1e-8), weight_decay=how.get("weight_decay", 0.0)
        )
    )
    assert_trees_close(ours(fs.adamw(0.1, **how)), reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", [0.1, 3.0, 1e6])
def test_clipping_is_that_of_torch(clip):
    chained = fs.optim.chain(fs.optim.clip_by_global_norm(clip), fs.sgd(0.1))
    assert_trees_close(ours(chained), theirs(lambda p: torch.optim.SGD(p, lr=0.1), clip=clip), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_the_global_norm_is_that_of_torch(scale):
    grads = values(3, scale=scale)
    for x in grads.values():
        x.grad = x.clone()
    norm = fs.global_norm(grads)
    assert norm.dtype == torch.float32 and norm.ndim == 0
    reference = math.sqrt(math.fsum(float(x) ** 2 for grad in grads.values() for x in grad.reshape(-1)))
    assert float(norm) == pytest.approx(reference, rel=1e-7)
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(grads.values(), 1e30)), rel=1e-5)
    assert float(fs.global_norm({})) == 0.0
    assert float(fs.global_norm({"w": torch.tensor([3.0, 4.0]).t(), "n": None})) == 5.0


def test_the_norm_of_unreduced_gradients_is_refused():
    mesh = fs.make_mesh(device="cpu")
    grads = {
        name: fs.NamedSharding(mesh, fs.P(), partial).to_dtensor(torch.ones(3), (3,))
        for name, partial in (("a", ("dp",)), ("b", ()), ("c", ("dp",)))
    }
    with pytest.raises(LayoutError) as caught:
        fs.global_norm(grads)
    assert str(caught.value) == (
        "fs.global_norm needs reduced gradients.\n"
        "  a: P() unreduced over dp\n"
        "  c: P() unreduced over dp\n"
        "Reduce them first: fs.value_and_grad(loss_fn, grads=layout.main)."
    )


# ------------------------------------------------------------------------------------------- Adam, element by element
@given(
    st.integers(1, 300) | st.integers(4000, 4400),
    st.lists(st.integers(0, 300) | st.integers(4000, 4400), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 9),
)
def test_an_element_of_adam_does_not_know_where_it_stands(size, cuts, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    param, *grads = (torch.randn(size, generator=generator).to(dtype) for _ in range(4))
    opt = fs.adamw(0.1, weight_decay=0.1)
    points = sorted({0, size, *(cut for cut in cuts if cut < size)})

    def run(pieces):
        params = [param[a:b].clone() for a, b in pieces]
        state = opt.init(params)
        for grad in grads:
            updates, state = opt.update([grad[a:b] for a, b in pieces], state, params)
            params = fs.optim.apply_updates(params, updates)
        return [torch.cat(x) for x in (params, state.mu, state.nu)]

    whole, cut = run([(0, size)]), run(list(itertools.pairwise(points)))
    assert_bitwise_equal(cut, whole)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_donated_step_of_adam_is_done_in_place_and_is_the_same(sharded):
    """Leaves of whole vectors, of less than one, large ones with a rest, none, and of two dtypes."""
    shapes = {"even": (8, 64), "s": (), "odd": (7, 9), "long": (4097, 3), "none": (0, 3), "wide": (65,)}
    params, grads = values(0, shapes), values(1, shapes)
    for tree in (params, grads):
        tree["wide"] = tree["wide"].double()
    if sharded:
        layout = fs.plan_layout(params, fs.make_mesh(device="cpu"))
        params, grads = (fs.shard(tree, layout) for tree in (params, grads))
    opt = fs.adamw(0.1, weight_decay=0.1)

    def run(params, grads, donate):
        state, homes = opt.init(params), params
        for _ in range(3):
            gradients = fs.tree.map(torch.clone, grads)
            params, state = optim.apply_gradients(
                opt, gradients, state, params, optim.UpdateContext(donate=donate), scale=0.5
            )
        return (params, state), all(params[name] is homes[name] for name in shapes)

    pure, moved = run(params, grads, False)
    donated, there = run(fs.tree.map(torch.clone, params), grads, True)
    assert_bitwise_equal(donated, pure)
    assert there and not moved


SLICES = {
    "blocks": ((5, 8, 64), (slice(None), slice(2, 6))),
    "columns": ((300, 700), (slice(None), slice(100, 451))),
    "far": ((3, 2, 70000), (slice(None), 1)),
    "few": ((7, 9), (slice(None), slice(1, 4))),
    "one": ((6, 4), (slice(None), 3)),
    "none": ((4, 3), (slice(None), slice(2, 2))),
}


def test_a_donated_step_of_adam_on_slices_changes_them_and_nothing_else():
    """Gaps within blocks and within rows, in pieces of less and of more than a chunk of whole vectors."""
    shapes, cuts = ({name: case[i] for name, case in SLICES.items()} for i in range(2))
    wide, opt = values(0, shapes), fs.adamw(0.1, weight_decay=0.1)
    slices = {name: x[cuts[name]] for name, x in wide.items()}
    grads = {name: x.sin().contiguous() for name, x in slices.items()}
    before = fs.tree.map(torch.clone, wide)

    def run(params, donate):
        state = opt.init(params)
        for _ in range(3):
            gradients = fs.tree.map(torch.clone, grads)
            params, state = optim.apply_gradients(
                opt, gradients, state, params, optim.UpdateContext(donate=donate), scale=0.5
            )
        return params, state

    pure = run(fs.tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), slices), False)
    donated = run(slices, True)
    assert_bitwise_equal(fs.tree.map(lambda x: x.contiguous(), donated), pure)
    for name, cut in cuts.items():
        before[name][cut] = pure[0][name]
    assert_bitwise_equal(wide, before)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize(
    "make",
    [lambda: fs.adamw(0.1, weight_decay=0.1), lambda: fs.sgd(0.1, momentum=0.9, weight_decay=0.1)],
    ids=["adamw", "sgd"],
)
def test_strides_do_not_matter(make, donate):
    def run(strided):
        lay = (lambda x: x.mT.contiguous().mT) if strided else (lambda x: x.contiguous())
        params = {"w": lay(torch.linspace(-1, 1, 35).view(5, 7)), "v": lay(torch.linspace(2, 3, 90 * 3).view(3, 90))}
        opt = make()
        state = opt.init(params)
        for step in range(1, 4):
            grads = {name: lay((x * step).sin().contiguous()) for name, x in params.items()}
            updates, state = opt.update(grads, state, params, UpdateContext(donate=donate))
            params = fs.optim.apply_updates(params, updates, donate=donate)
        return {name: x.contiguous() for name, x in params.items()}

    assert_bitwise_equal(run(True), run(False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fs.adamw(0.1),
        lambda: fs.sgd(0.1, momentum=0.9, weight_decay=0.1),
        lambda: fs.optim.clip_by_global_norm(0.1),
    ],
)
def test_an_update_changes_nothing_that_went_in(make):
    opt, params, grads = make(), values(0), values(1)
    _, state = opt.update(values(2), opt.init(params), params)
    before = fs.tree.map(torch.clone, (params, grads, state))
    updates, after = opt.update(grads, state, params)
    fs.optim.apply_updates(params, updates)
    assert_bitwise_equal((params, grads, state), before)
    donated, state_of = opt.update(*fs.tree.map(torch.clone, (grads, state, params)), UpdateContext(donate=True))
    assert_bitwise_equal((donated, state_of), (updates, after))


# ----------------------------------------------------------------------------------------------------------- composing
def test_multi_transform_gives_each_group_its_own():
    labels = {"w": "decay", "b": "plain", "s": "plain", "long": "decay", "none": "plain"}
    groups = {"decay": fs.adamw(0.1, weight_decay=0.5), "plain": fs.sgd(0.2, momentum=0.9)}
    for how in (labels, lambda path, leaf: labels[path]):
        params = ours(fs.optim.multi_transform(groups, how))
        assert_trees_close(
            {n: params[n] for n in ("w", "long")}, {n: ours(groups["decay"])[n] for n in ("w", "long")}, rtol=0
        )
        assert_trees_close({n: params[n] for n in "bs"}, {n: ours(groups["plain"])[n] for n in "bs"}, rtol=0)


def test_multi_transform_as_torch_groups():
    labels = {name: "decay" if len(shape) > 1 else "plain" for name, shape in SHAPES.items()}
    opt = fs.optim.multi_transform({"decay": fs.adamw(0.1, weight_decay=0.5), "plain": fs.adamw(0.1)}, labels)

    def make(params):
        many = [p for p in params if p.ndim > 1]
        few = [p for p in params if p.ndim <= 1]
        groups = [{"params": many, "weight_decay": 0.5}, {"params": few, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))

    assert_trees_close(ours(opt), theirs(make), rtol=1e-6, atol=1e-6)


def test_multi_transform_skips_frozen_leaves():
    params, grads = {"w": torch.ones(2), "frozen": None}, {"w": torch.ones(2), "frozen": None}
    for labels in ({"w": "a", "frozen": "b"}, lambda path, leaf: "a"):
        opt = fs.optim.multi_transform({"a": fs.sgd(0.5), "b": fs.sgd(0.1)}, labels)
        updates, _ = opt.update(grads, opt.init(params), params)
        assert updates["frozen"] is None
        assert_bitwise_equal(updates["w"], torch.full((2,), -0.5))


def test_labels_without_a_transformation():
    opt = fs.optim.multi_transform(
        {"decay": fs.sgd(0.1), "rest": fs.sgd(0.1)}, {"a": "decay", "b": {"c": "norms", "d": "nrms"}}
    )
    with pytest.raises(TreeError) as caught:
        opt.init({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": torch.ones(1)}})
    assert str(caught.value) == (
        "fs.optim.multi_transform has labels without a transformation.\n  b.c: 'norms'\n  b.d: 'nrms'\nUse one of the groups as a label: 'decay', 'rest'."
    )


def plain_spy(seen, name):
    """A pair of a user's own, as in optax; one of the arguments has no name that we know, and any keyword is taken."""

    def update(updates, state, *rest, **kwargs):
        seen.append((name, len(rest), kwargs))
        return updates, state

    return fs.optim.GradientTransformation(lambda params, **_: EmptyState(), update)


def context_spy(seen, name):
    def init(params, context=None):
        return EmptyState()

    def update(updates, state, params=None, context=None):
        seen.append((name, context.donate, None if context.norm is None else float(context.norm), context.shardings))
        return updates, state

    return optim.ContextTransformation(init, update)


def test_a_chain_hands_the_context_to_members_whose_type_takes_one():
    seen: list[Any] = []
    inner = fs.optim.chain(plain_spy(seen, "d"), context_spy(seen, "e"))
    groups = optim.multi_transform({"w": context_spy(seen, "f"), "v": plain_spy(seen, "g")}, lambda path, leaf: path)
    opt = fs.optim.chain(context_spy(seen, "a"), plain_spy(seen, "b"), context_spy(seen, "c"), inner, groups)
    params, where = {"w": torch.ones(2), "v": torch.ones(3)}, {"w": "here", "v": "there"}
    context = UpdateContext(donate=True, norm=torch.tensor(3.0), shardings=where)
    opt.update(params, opt.init(params), params, context)
    # The norm is that of the gradients, so only the first member may use it.
    assert seen == [
        ("a", True, 3.0, where), ("b", 1, {}), ("c", True, None, where), ("d", 1, {}), ("e", True, None, where),
        ("f", True, None, {"w": "here", "v": None}), ("g", 1, {}),
    ]  # fmt: skip


def test_members_of_a_chain_that_applies_see_the_context_too():
    seen: list[Any] = []
    params, norm = {"w": torch.ones(2)}, torch.tensor(3.0)
    opt = fs.optim.chain(context_spy(seen, "a"), optim.multi_transform({"w": fs.adamw(0.1)}, lambda path, leaf: path))
    optim.apply_gradients(
        opt, params, opt.init(params), params, optim.UpdateContext(donate=False, norm=norm, shardings={"w": "here"})
    )
    assert seen == [("a", False, 3.0, {"w": "here"})]


def test_a_plain_pair_is_called_with_three_arguments_everywhere():
    """Also by the step, by combinators and where a state is made; a signature that takes anything gets nothing more."""
    seen: list[Any] = []
    layout = fs.plan_layout({"w": torch.ones(4)}, fs.make_mesh(device="cpu"))
    for opt in (plain_spy(seen, "a"), optim.lookahead(plain_spy(seen, "a")), plain_spy(seen, "a").with_context()):
        assert layout.memory(opt).opt_state >= 0
        state = fs.init_state(lambda key: {"w": torch.ones(4)}, opt, fs.random.key(0), layout)
        step = fs.make_train_step(lambda params, batch: (fs.gather_unit(params)["w"].sum(), 4), opt)
        step(state, torch.ones(1))
        assert seen.pop() == ("a", 1, {}) and not seen


def test_a_context_of_another_kind_is_named():
    opt, params = fs.adamw(0.1), {"w": torch.ones(2)}
    call: Any = opt.update
    with pytest.raises(ArgumentError) as caught:
        call(params, opt.init(params), params, True)
    assert str(caught.value) == (
        "fs.adamw(...).update got arguments of the wrong type.\n"
        "  context is True, not UpdateContext\n"
        "Call it as fs.adamw(...).update(updates, state)."
    )
    with pytest.raises(ArgumentError, match="got an unexpected keyword argument 'donate'"):
        call(params, opt.init(params), params, donate=True)


def test_states_are_named_tuples():
    params = values(0)
    opt = fs.optim.chain(
        fs.optim.clip_by_global_norm(1.0),
        fs.adamw(0.1),
        fs.optim.multi_transform({"a": fs.sgd(0.1)}, lambda path, leaf: "a"),
    )
    state = opt.init(params)
    assert isinstance(state, ChainState) and isinstance(state.states[0], EmptyState)
    assert isinstance(state.states[1], AdamState) and isinstance(state.states[2], MultiTransformState)
    assert state.states[1].count.dtype == torch.int64 and state.states[2].groups["a"].trace is None
    assert state.states[1].mu["w"].dtype == torch.float32
    halves = {name: x.bfloat16() for name, x in params.items()}
    assert fs.adamw(0.1).init(halves).nu["w"].dtype == torch.float32
    assert fs.adamw(0.1, moments=torch.bfloat16).init(params).mu["w"].dtype == torch.bfloat16


def test_updates_of_none_leave_a_parameter_alone():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    after = fs.optim.apply_updates(params, {"a": torch.ones(2), "b": None})
    assert after["b"] is params["b"] and after["a"].tolist() == [2, 2] and params["a"].tolist() == [1, 1]
    halves = fs.optim.apply_updates({"a": torch.ones(2, dtype=torch.bfloat16)}, {"a": torch.full((2,), 2.0**-9)})
    assert halves["a"].dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------- schedules
def test_schedules():
    assert [fs.optim.schedules.constant(0.3)(i) for i in (0, 9)] == [0.3, 0.3]
    assert [fs.optim.schedules.linear(1.0, 0.0, 4)(i) for i in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    rate = fs.optim.schedules.warmup_cosine(1.0, 4, 12, end=0.1)
    assert [rate(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0 and rate(8) == pytest.approx(0.55) and rate(12) == pytest.approx(0.1) == rate(99)
    assert fs.optim.schedules.warmup_cosine(1.0, 0, 10)(0) == 1.0
    assert (
        fs.optim.schedules.warmup_cosine(1.0, 5, 5)(4) == 1.0 and fs.optim.schedules.warmup_cosine(1.0, 5, 5)(6) == 0.0
    )


@given(st.floats(1e-6, 1.0), st.integers(0, 50), st.integers(1, 100), st.floats(0.0, 1e-6))
def test_a_warmed_up_cosine_rises_and_then_falls(peak, warmup, more, end):
    rate = fs.optim.schedules.warmup_cosine(peak, warmup, warmup + more, end=end)
    rates = [rate(i) for i in range(warmup + more + 5)]
    assert rates[:warmup] == sorted(rates[:warmup]) and max(rates) == pytest.approx(peak)
    after = rates[warmup:]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(after)) and after[-1] == pytest.approx(end)


def test_what_no_update_can_use_is_refused():
    key = fs.random.key(0)
    inf, nan = float("inf"), float("nan")
    for make, text in [
        (lambda: fs.adamw(-1e-3, b1=1.0, eps=nan, weight_decay=inf),
         "fs.adamw cannot use these settings.\n  learning_rate: -0.001, needs a finite number from 0\n"
         "  eps: nan, needs a finite number from 0\n  weight_decay: inf, needs a finite number from 0\n"
         "  b1: 1.0, needs a number from 0, below 1\nPass numbers in these ranges."),
        (lambda: fs.adamw("3e-4"), "learning_rate: '3e-4', needs a finite number from 0"),
        (lambda: fs.sgd(0.1, momentum=-0.9), "momentum: -0.9, needs a finite number from 0"),
        (lambda: fs.optim.lion(1e-3, b2=1.5), "b2: 1.5, needs a number from 0 to 1"),
        (lambda: fs.optim.muon(1e-3, steps=0), "steps: 0, needs an integer from 1"),
        (lambda: fs.optim.adafactor(clip=0.0), "clip: 0.0, needs a number above 0"),
        (lambda: fs.optim.adafactor(eps=(None, -1.0)), "eps[1]: -1.0, needs a finite number from 0"),
        (lambda: fs.optim.ema(1.1), "decay: 1.1, needs a number from 0 to 1"),
        (lambda: fs.optim.lookahead(fs.sgd(0.1), every=0, share=2.0), "every: 0, needs an integer from 1"),
        (lambda: fs.optim.lookahead(fs.sgd(0.1), every=inf), "every: inf, needs an integer from 1"),
        (lambda: fs.optim.add_noise(-0.1, key), "std: -0.1, needs a finite number from 0"),
        (lambda: fs.optim.schedules.warmup_cosine(1.0, 10, 5), "fs.optim.schedules.warmup_cosine got warmup_steps=10 and total_steps=5.\nPass warmup_steps from 0"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            make()
        assert text in str(caught.value)
    fs.optim.adafactor(clip=inf)
    fs.adamw(lambda count: 1 / 0)  # a function is not called


def test_rates_follow_the_number_of_updates():
    opt = fs.sgd(lambda count: 10.0**-count)
    params = {"w": torch.zeros(1)}
    state, seen = opt.init(params), []
    for _ in range(3):
        updates, state = opt.update({"w": torch.ones(1)}, state, params)
        seen.append(float(updates["w"]))
    assert seen == pytest.approx([-1.0, -0.1, -0.01]) and int(state.count) == 3


def identity():
    """A pair of a user's own."""
    return fs.optim.GradientTransformation(
        lambda params: EmptyState(), lambda updates, state, params=None: (updates, state)
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "opt",
    [
        fs.adamw(0.1),
        fs.sgd(0.1, momentum=0.9),
        fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(0.1, weight_decay=0.1)),
        fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.optim.clip_by_global_norm(0.1), fs.adamw(0.1)),
        fs.optim.chain(fs.sgd(1.0), fs.optim.clip_by_global_norm(0.5), fs.adamw(0.1)),
        fs.optim.chain(identity(), fs.adamw(0.1)),
        fs.optim.chain(
            fs.optim.clip_by_global_norm(0.5),
            fs.optim.multi_transform({"a": fs.adamw(0.1), "b": fs.adamw(0.2)}, lambda p, _: p),
        ),
        fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.sgd(0.1)),
    ],
    ids=["adamw", "sgd", "clip", "clips", "late", "pair", "groups", "plain"],
)
def test_a_scale_that_is_handed_on_is_one_that_was_multiplied(opt, donate):
    def case():
        random = torch.Generator().manual_seed(0)
        return [{name: torch.randn(n, generator=random) for name, n in (("a", 5), ("b", 200))} for _ in range(2)]

    (params, grads), (wanted, divided) = case(), case()
    divided = {name: g * 0.125 for name, g in divided.items()}
    norm = fs.global_norm(divided)
    before = fs.tree.map(torch.clone, (params, grads))
    found = fs.optim.apply_gradients(
        opt, grads, opt.init(params), params, fs.optim.UpdateContext(donate=donate, norm=norm), scale=0.125
    )
    assert donate or all(
        torch.equal(x, y) for x, y in zip(*map(fs.tree.leaves, (before, (params, grads))), strict=True)
    )
    updates, state = opt.update(divided, opt.init(wanted), wanted)
    assert_trees_close(found, (fs.optim.apply_updates(wanted, updates), state), rtol=1e-6, atol=1e-7)


UNLIKE = {
    "fs.adamw": lambda: fs.adamw(0.1, weight_decay=0.1),
    "fs.sgd": lambda: fs.sgd(0.1, momentum=0.9),
    "fs.optim.lion": lambda: fs.optim.lion(0.1),
    "fs.optim.muon": lambda: fs.optim.muon(0.1),
    "fs.optim.adafactor": lambda: fs.optim.adafactor(0.1),
    "fs.optim.from_torch": lambda: fs.optim.from_torch(torch.optim.Adam, lr=0.1),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_shapes_that_differ_are_not_broadcast(name):
    opt, params = UNLIKE[name](), {"v": torch.ones(2, 3), "w": torch.ones(4, 2)}
    state = opt.init(params)
    for shape in ((2, 2), (1, 2), (4, 1)):
        with pytest.raises(TreeError) as caught:
            opt.update({"v": torch.ones(2, 3), "w": torch.ones(shape)}, state, params)
        head, *rows, _ = str(caught.value).split("\n")
        assert head.startswith(f"{name} got ") and head.endswith(" of different shapes.")
        assert len(rows) == 1 and rows[0].startswith("  w: ") and str(list(shape)) in rows[0] and "[4, 2]" in rows[0]
    with pytest.raises(TreeError) as caught:
        opt.update({"v": torch.ones(2, 3), "x": torch.ones(4, 2)}, state, params)
    assert "first tree" not in str(caught.value) and str(caught.value).startswith(f"{name} got ")


def test_updates_of_another_shape_are_refused():
    with pytest.raises(TreeError) as caught:
        fs.optim.apply_updates({"v": torch.ones(2), "w": torch.ones(3)}, {"v": torch.ones(2), "w": torch.ones(1)})
    assert str(caught.value) == (
        "fs.optim.apply_updates got parameters and updates of different shapes.\n"
        "  w: parameters [3], updates [1]\n"
        "Pass parameters and updates of one model."
    )
    opt, params = fs.adamw(0.1), {"w": torch.ones(4)}
    with pytest.raises(TreeError) as caught:
        fs.optim.apply_gradients(opt, params, opt.init(params), {"w": torch.ones(2)})
    assert str(caught.value).startswith("fs.adamw got parameters and moments of different shapes.\n  w: parameters [2]")


def test_settings_that_can_never_be_right():
    for norm in (-1.0, 0.0, math.nan):
        with pytest.raises(ConfigError) as caught:
            fs.optim.clip_by_global_norm(norm)
        assert str(caught.value) == (
            f"fs.optim.clip_by_global_norm got max_norm={norm}.\nPass a norm above 0; math.inf leaves gradients unchanged."
        )
    grads = {"w": torch.ones(3)}
    assert_bitwise_equal(fs.optim.clip_by_global_norm(math.inf).update(grads, EmptyState())[0], grads)
    with pytest.raises(ConfigError) as caught:
        fs.optim.schedules.linear(1.0, 0.0, 0)
    assert (
        str(caught.value)
        == "fs.optim.schedules.linear got steps=0.\nPass 1 or more, or use fs.optim.schedules.constant."
    )


# ----------------------------------------------------------------------------------------- what is in another's place
DECAYING = {
    "fs.adamw": (lambda: fs.adamw(0.1, weight_decay=0.1), 0.1),
    "fs.sgd": (lambda: fs.sgd(0.1, weight_decay=0.2), 0.2),
    "fs.optim.lion": (lambda: optim.lion(0.1, weight_decay=0.3), 0.3),
    "fs.optim.muon": (lambda: optim.muon(0.1, weight_decay=0.4), 0.4),
}
INSIDE = {
    "alone": lambda opt: opt,
    "chain": lambda opt: fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt),
    "first": lambda opt: fs.optim.chain(opt, optim.ema(0.9)),
    "groups": lambda opt: fs.optim.multi_transform(
        {"a": fs.sgd(0.1), "b": opt}, lambda path, leaf: "b" if path == "w" else "a"
    ),
    "lookahead": lambda opt: fs.optim.chain(fs.optim.chain(opt)),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("function", DECAYING)
def test_decay_without_parameters_is_refused_before_anything_changes(function, inside):
    make, decay = DECAYING[function]
    opt, grads = INSIDE[inside](make()), {"w": torch.ones(2, 3), "v": torch.ones(3, 2)}
    state = opt.init(grads)
    before = fs.tree.map(torch.clone, (grads, state))
    with pytest.raises(TreeError) as caught:
        opt.update(grads, state, None, UpdateContext(donate=True))
    text = f"{function} needs the parameters for weight_decay={decay}.\nCall opt.update(gradients, state, params)."
    assert str(caught.value) == text
    if inside not in ("groups", "chain"):  # there others have had their turn, and were told to overwrite
        assert_bitwise_equal((grads, state), before)
    with pytest.raises(TreeError):
        fs.optim.apply_gradients(opt, grads, state, None)
    updates, _ = opt.update(grads, state, grads)
    assert fs.tree.paths(updates) == fs.tree.paths(grads)


@pytest.mark.parametrize("make", [fs.adamw, fs.sgd, optim.lion, optim.muon], ids=lambda f: f.__name__)
def test_nothing_needs_parameters_that_do_not_decay(make):
    grads, how = {"w": torch.ones(2, 3)}, {"weight_decay": 0.0}
    opt = make(0.1, **how)
    assert opt.update(grads, opt.init(grads))[0]["w"].shape == (2, 3)


STATES = {
    "fs.adamw": (lambda: fs.adamw(0.1), "AdamState"),
    "fs.sgd": (lambda: fs.sgd(0.1, momentum=0.9), "SgdState"),
    "fs.optim.lion": (lambda: optim.lion(0.1), "LionState"),
    "fs.optim.muon": (lambda: optim.muon(0.1), "MuonState"),
    "fs.optim.adafactor": (lambda: optim.adafactor(0.1), "AdafactorState"),
    "fs.optim.from_torch": (lambda: optim.from_torch(torch.optim.Adam), "TorchState"),
    "fs.optim.ema": (lambda: optim.ema(0.9), "EmaState"),
    "fs.optim.lookahead": (lambda: optim.lookahead(fs.sgd(0.1)), "LookaheadState"),
    "fs.optim.add_noise": (lambda: optim.add_noise(0.1, fs.random.key(0)), "NoiseState"),
    "fs.optim.chain": (lambda: fs.optim.chain(fs.adamw(0.1)), "ChainState"),
    "fs.optim.multi_transform": (
        lambda: fs.optim.multi_transform({"a": fs.adamw(0.1)}, lambda path, leaf: "a"),
        "MultiTransformState",
    ),
}
ORDER = "Call opt.update(gradients, state, params), in this order."


@pytest.mark.parametrize("function", STATES)
def test_a_state_in_another_place_is_told_from_gradients(function):
    make, kind = STATES[function]
    opt, params = make(), {"w": torch.ones(2, 3)}
    state = opt.init(params)
    for calls in (opt.update, opt.apply):
        if calls is None:
            continue
        with pytest.raises(TreeError) as caught:
            calls(state, params, params)
        assert str(caught.value) == (
            f"{function} got dict instead of its state, {kind}, and {kind} instead of gradients.\n{ORDER}"
        )
        with pytest.raises(TreeError) as caught:
            calls(params, EmptyState(), params)
        assert str(caught.value) == (
            f"{function} got EmptyState instead of its state, {kind}.\n"
            f"Pass the state that opt.init(params), or the last update, returned. {ORDER}"
        )


@pytest.mark.parametrize(
    "function",
    [name for name in STATES if name not in ("fs.optim.chain", "fs.optim.multi_transform", "fs.optim.add_noise")],
)
def test_values_are_told_from_gradients(function):
    opt, params = STATES[function][0](), {"w": torch.ones(2, 3)}
    state, (value, grads) = opt.init(params), fs.value_and_grad(lambda p: (p["w"].sum(), 1.0))(params)
    mend = f"The loss comes first: value, grads = fs.value_and_grad(loss_fn)(params, batch). {ORDER}"
    for wrong, kind in (
        ((value, grads), "a tuple of 2"),
        ((value, 1.0), "a tuple of 2"),
        (torch.ones(()), "a tensor []"),
    ):
        with pytest.raises(TreeError) as caught:
            opt.update(wrong, state, params)
        assert str(caught.value) == f"{function} got {kind} instead of gradients, and dict for the rest.\n{mend}"


def test_states_of_other_chains_and_groups_are_refused():
    params = {"w": torch.ones(2)}
    two, three = fs.optim.chain(fs.sgd(0.1), fs.sgd(0.1)), fs.optim.chain(fs.sgd(0.1), fs.sgd(0.1), fs.sgd(0.1))
    with pytest.raises(TreeError) as caught:
        two.update(params, three.init(params), params)
    assert str(caught.value) == (
        "fs.optim.chain got a state of 3 transformations, but has 2.\nPass the state that this chain's init or update returned."
    )
    one, other = (fs.optim.multi_transform({name: fs.sgd(0.1)}, lambda path, leaf, name=name: name) for name in "ab")
    with pytest.raises(TreeError) as caught:
        one.update(params, other.init(params), params)
    assert str(caught.value) == (
        "fs.optim.multi_transform got a state of the groups b, but has a.\nPass the state that this optimizer's init or update returned."
    )


def somebody_elses():
    kind = collections.namedtuple("GradientTransformationExtraArgs", "init update")
    return kind(lambda params: (), lambda updates, state, params=None: (updates, state))


PAIR = "Pass an optimizer such as fs.adamw(1e-3) or fs.optim.chain(...)."
HOLDS = "its state is part of the TrainState."
NO_OPTIMIZERS = [
    (lambda: torch.optim.Adam([torch.ones(1)]), "a torch optimizer, Adam", f"Use fs.adamw(1e-3): {HOLDS}"),
    (lambda: torch.optim.NAdam, "the class NAdam", f"Use fs.optim.from_torch(torch.optim.NAdam): {HOLDS}"),
    (
        lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1),
        "a StepLR",
        "Pass a schedule as the learning rate: fs.adamw(fs.optim.schedules.warmup_cosine(3e-4, 9, 99)).",
    ),
    (lambda: torch.nn.Linear(1, 1), "an nn.Module, Linear", PAIR),
    (
        somebody_elses,
        "a GradientTransformationExtraArgs",
        "Wrap its functions: fs.optim.GradientTransformation(opt.init, opt.update).",
    ),
    (lambda: fs.adamw, "the function adamw", "Call it: fs.adamw(...)."),
    (lambda: 3e-4, "0.0003", PAIR),
    (lambda: None, "None", PAIR),
]


@pytest.mark.parametrize(("make", "what", "mend"), NO_OPTIMIZERS, ids=[case[1] for case in NO_OPTIMIZERS])
def test_something_else_than_an_optimizer_is_told_what_to_be(make, what, mend):
    layout = fs.plan_layout({"w": torch.ones(2)}, fs.make_mesh(device="cpu"))
    draws, key = (lambda key: {"w": torch.ones(2)}), fs.random.key(0)
    params = fs.shard({"w": torch.ones(2)}, layout)
    calls = {
        "fs.optim.chain": lambda opt: fs.optim.chain(fs.sgd(0.1), opt),
        "fs.optim.multi_transform": lambda opt: fs.optim.multi_transform({"a": opt}, {"w": "a"}),
        "fs.optim.lookahead": optim.lookahead,
        "fs.optim.apply_gradients": lambda opt: optim.apply_gradients(opt, params, None, params),
        "fs.init_state": lambda opt: fs.init_state(draws, opt, key, layout),
        "fs.state_from_params": lambda opt: fs.state_from_params(params, opt, key, layout),
    }
    opt = make()
    for function, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call(opt)
        assert (
            str(caught.value) == f"{function} takes an optax-style optimizer, a pair of functions, got {what}.\n{mend}"
        )


@pytest.mark.parametrize("donate", [False, True])
def test_parts_of_leaves_that_differ_never_reach_a_kernel(donate):
    """DTensors that do not hold what they say: the kernel of AdamW would read and write past the end of the short one."""
    layout = fs.plan_layout({"w": torch.ones(64, 3), "v": torch.ones(128)}, fs.make_mesh(device="cpu"))
    opt, whole = fs.adamw(0.1), {"w": torch.ones(64, 3), "v": torch.ones(128)}
    params, grads = fs.shard(whole, layout), fs.shard(whole, layout)
    state = opt.init(params)
    grads["v"] = _compat.like_dtensor(grads["v"], torch.ones(64))
    before = fs.tree.map(torch.clone, (params, state))
    for call in (opt.apply, opt.update):
        with pytest.raises(LayoutError) as caught:
            call(grads, state, params, UpdateContext(donate=donate))
        head, row, mend = str(caught.value).split("\n")
        assert head == "fs.adamw got different shards of the same leaves on this rank."
        assert row == "  v: parameters [128], gradients [64], mu [128], nu [128]"
        assert (
            mend
            == "Bring all of them to layout.main with fs.shard or fs.reshard; check DTensors that you made yourself."
        )
    assert_bitwise_equal((params, state), before)
