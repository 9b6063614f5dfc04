"""`scan`, stacks of units, and `remat` on plain tensors and one process."""

import functools
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError, FshardingError, TransformError, TreeError
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests import helpers

refusal = functools.partial(helpers.refusal, kind=TreeError)


def units(n=3):
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(4, 4, generator=generator), "b": torch.randn(4, generator=generator)} for _ in range(n)]


def block(unit, x):
    return torch.tanh(x @ unit["w"] + unit["b"])


# ---------------------------------------------------------------------------------------------------------------- scan
def test_scan_is_a_loop():
    carry, ys = fs.scan(
        lambda c, x: (c + x["a"], {"was": c, "b": x["b"]}),
        torch.tensor(0),
        {"a": torch.arange(4), "b": torch.ones(4, 2)},
    )
    assert int(carry) == 6
    assert_bitwise_equal(ys, {"was": torch.tensor([0, 0, 1, 3]), "b": torch.ones(4, 2)})
    carry, ys = fs.scan(lambda c, x: (2 * c, None), 1, None, length=5)
    assert carry == 32 and ys is None
    assert fs.scan(lambda c, x: (c, c), 7, torch.zeros(0, 3)) == (7, None)


def test_scan_needs_one_length():
    assert refusal(lambda: fs.scan(lambda c, x: (c, x), 0, {"a": torch.zeros(2), "b": torch.zeros(3)})) == (
        "fs.scan needs leaves of length 2.\n  b: 3\nPass leaves [length, ...], one row for each iteration or layer."
    )
    assert refusal(lambda: fs.scan(lambda c, x: (c, x), 0, torch.zeros(2), length=4)).startswith(
        "fs.scan needs leaves of length 4."
    )
    assert refusal(lambda: fs.scan(lambda c, x: (c, x), 0, None)) == (
        "fs.scan got neither xs nor length.\nPass length= to scan without xs."
    )
    assert "0-d" in refusal(lambda: fs.scan(lambda c, x: (c, x), 0, {"a": torch.zeros(())}))


# -------------------------------------------------------------------------------------------------------------- stacks
def test_stacking_and_unstacking_undo_each_other():
    stack = fs.stack_units(units())
    assert stack["w"].shape == (3, 4, 4) and stack["b"].shape == (3, 4)
    assert_bitwise_equal(fs.unstack_units(stack), units())
    assert fs.unstack_units(stack)[1]["w"].data_ptr() == stack["w"][1].data_ptr(), "rows are views"
    assert_bitwise_equal(fs.select_unit(stack, 2), units()[2])


def test_units_that_differ_are_not_stacked():
    a, b = (
        {"w": torch.zeros(2, 3), "b": torch.zeros(2)},
        {"w": torch.zeros(2, 4), "b": torch.zeros(2, dtype=torch.float64)},
    )
    assert refusal(lambda: fs.stack_units([a, a, b])) == (
        "fs.stack_units needs units with equal shapes and dtypes.\n"
        "  b: float32[2] in unit 0, float64[2] in unit 2\n"
        "  w: float32[2, 3] in unit 0, float32[2, 4] in unit 2\n"
        "Pass units that differ to fs.scan_units as a list."
    )
    assert refusal(lambda: fs.stack_units([a, {"w": torch.zeros(2, 3)}])) == (
        "fs.stack_units got unit 0 and unit 1 that do not match.\n  b: only in unit 0\nGive both the same keys."
    )
    with pytest.raises(TreeError):
        fs.stack_units([])


def test_leaves_of_different_lengths_are_no_stack():
    assert refusal(lambda: fs.unstack_units({"w": torch.zeros(2, 3), "b": torch.zeros(3), "s": torch.zeros(())})) == (
        "fs.unstack_units needs leaves [layers, ...] of one length.\n"
        "  b: 3\n"
        "  s: 0-d\n"
        "  w: 2\n"
        "Pass units that differ as a list, and keep shared leaves out of the stack. A single unit needs no scan: "
        "x = block(fs.gather_unit(unit), x)."
    )


# ---------------------------------------------------------------------------------------------------------- scan_units
@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_scan_units_is_a_loop_over_units(policy):
    x = torch.linspace(-1, 1, 8).view(2, 4)
    want = x
    for unit in units():
        want = block(unit, want)
    for values in (units(), tuple(units()), fs.stack_units(units())):
        assert_bitwise_equal(fs.scan_units(block, values, x, policy=policy), want)
    wide = [{"w": torch.ones(4, 6), "b": torch.zeros(6)}, {"w": torch.ones(6, 2), "b": torch.zeros(2)}]
    assert fs.scan_units(block, wide, x, policy=policy).shape == (2, 2)


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_scan_units_takes_any_carry_inputs_and_auxes(policy):
    def body(unit, carry, x):
        hidden, count = carry
        hidden = block(unit, hidden) * x["scale"]
        return (hidden, count + 1), {"norm": hidden.square().sum(), "layer": x["layer"]}

    start = torch.linspace(-1, 1, 4)
    xs = {"scale": torch.tensor([1.0, 2.0, 0.5]), "layer": torch.arange(3)}
    (hidden, count), aux = fs.scan_units(
        body, fs.stack_units(units()), (start, torch.tensor(0)), xs=xs, has_aux=True, policy=policy
    )
    carry, norms = (start, torch.tensor(0)), []
    for i, unit in enumerate(units()):
        carry, extra = body(unit, carry, {name: x[i] for name, x in xs.items()})
        norms.append(extra["norm"])
    assert_bitwise_equal((hidden, count), carry)
    assert_bitwise_equal(aux, {"norm": torch.stack(norms), "layer": torch.arange(3)})


def test_inputs_of_another_length():
    text = refusal(lambda: fs.scan_units(lambda p, c, x: c, fs.stack_units(units()), 0, xs={"k": torch.zeros(2)}))
    assert text == (
        "fs.scan_units needs leaves of length 3.\n  k: 2\nPass leaves [length, ...], one row for each iteration or layer."
    )


def test_no_units_leave_the_carry_as_it_is():
    assert fs.scan_units(block, [], 5) == 5


# --------------------------------------------------------------------------------------------------------------- remat
@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_remat_gives_the_same_derivatives(policy):
    unit, x, calls = units(1)[0], torch.linspace(-1, 1, 8).view(2, 4), []

    def body(unit, x):
        calls.append(1)
        return block(unit, block(unit, x)), x.sum()

    def loss(fn, unit, x):
        out, extra = fn(unit, x)
        return out.square().sum() + extra

    remat = fs.remat(body, policy=policy)
    leaf = {name: value.clone().requires_grad_() for name, value in unit.items()}
    found = torch.autograd.grad(loss(remat, leaf, x), list(leaf.values()))
    again = len(calls)
    want = torch.autograd.grad(loss(body, leaf, x), list(leaf.values()))
    assert_bitwise_equal(found, want)
    assert again == (1 if policy.activations == "all" else 2)
    functional = torch.func.grad(lambda u: loss(remat, u, x))(unit)
    assert_trees_close(functional, dict(zip(unit, want, strict=True)), rtol=1e-6)
    tangent = {name: torch.ones_like(value) for name, value in unit.items()}
    pair = [torch.func.jvp(lambda u, f=f: loss(f, u, x), (unit,), (tangent,))[1] for f in (remat, body)]
    assert_trees_close(*pair, rtol=1e-6)
    many = torch.stack([x, 2 * x])
    pair = [torch.func.vmap(lambda v, f=f: loss(f, unit, v))(many) for f in (remat, body)]
    assert_trees_close(*pair, rtol=1e-6)
    pair = [torch.func.jacrev(lambda u, f=f: f(u, x)[0])(unit) for f in (remat, body)]
    assert_trees_close(*pair, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ value_and_grad
def loss_refusal(result):
    return refusal(lambda: fs.value_and_grad(lambda p: result)({"w": torch.zeros(3)}), kind=TransformError)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (torch.zeros(3), "torch.float32[3]"), (torch.zeros((), dtype=torch.int64), "torch.int64[]"), (1.0, "float"), (None, "NoneType"),
        ((torch.zeros(2, 1), 3), "(torch.float32[2, 1], int)"),
    ],
)  # fmt: skip
def test_losses_that_are_none(result, kind):
    assert loss_refusal(result) == (
        f"fs.value_and_grad needs a loss that is a 0-d floating point tensor, or (sum, count); got {kind}.\n"
        "Sum the losses of the batch and return (losses.sum(), number of tokens), or pass has_aux=True."
    )


@pytest.mark.parametrize(
    "result",
    [(torch.zeros(()), 1, 2), (torch.zeros(()), {"aux": 1}), (torch.zeros(()), torch.zeros(2))],
    ids=["three", "aux", "weights"],
)
def test_pairs_that_are_no_loss_and_weight(result):
    assert loss_refusal(result).startswith(
        "fs.value_and_grad needs a loss that is a 0-d floating point tensor, or (sum, count)"
    )


def test_plain_tensors_have_gradients_too():
    params = {"w": torch.arange(3.0), "n": torch.tensor(2), "frozen": torch.ones(3)}
    goal = {"w": True, "n": None, "frozen": None}
    (loss, weight), grads = fs.value_and_grad(lambda p, x: ((p["w"] * p["frozen"] * x).sum(), 4), grads=goal)(
        params, 3.0
    )
    assert (float(loss), float(weight)) == (9 / 4, 4.0)
    assert_bitwise_equal(grads, {"w": torch.full((3,), 0.75), "n": None, "frozen": None})
    with pytest.warns(UserWarning, match="does not depend on its parameters"):
        loss, grads = fs.value_and_grad(lambda p: torch.tensor(1.0))(params)
    assert float(loss) == 1 and grads["w"].tolist() == [0, 0, 0], "a loss that depends on nothing"
    assert not params["w"].requires_grad


@pytest.mark.parametrize("is_placed", [False, True], ids=["plain", "DTensors"])
def test_sums_are_added_to_in_place_only_if_donated(is_placed):
    params, x = {"w": torch.arange(3.0), "b": torch.ones(2)}, torch.tensor([1.0, 2.0, 4.0])
    if is_placed:
        params = fs.shard(params, fs.NamedSharding(fs.make_mesh(dp=1, device="cpu")))
    run = fs.value_and_grad(lambda p, x: ((fs.gather_unit(p)["w"] * x).sum(), 1), mean=False)
    first = run(params, x)[1]
    second = run(params, 2 * x, accumulate=first)[1]
    assert_bitwise_equal([local_of(g) for g in (first["w"], second["w"])], [x, 3 * x])
    assert not local_of(second["b"]).any()
    third = run(params, x, accumulate=second, donate=True)[1]
    assert_bitwise_equal([local_of(g) for g in (second["w"], third["w"])], [4 * x, 4 * x])
    assert local_of(third["w"]).data_ptr() == local_of(second["w"]).data_ptr() != local_of(first["w"]).data_ptr()


def test_gradients_for_another_tree():
    text = refusal(lambda: fs.value_and_grad(lambda p: p["w"].sum(), grads={"v": None})({"w": torch.zeros(2)}))
    assert text == (
        "fs.value_and_grad got params and grads that do not match.\n  w: only in params\nGive both the same keys."
    )


def test_batches_that_microbatches_do_not_divide():
    draws = {"w": fs.random.ones((2,))}
    state = fs.init_state(
        lambda key: draws, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(draws, fs.make_mesh(device="cpu"))
    )
    step = fs.make_train_step(lambda p, b: fs.gather_unit(p)["w"].sum(), fs.sgd(0.1), microbatches=3)
    batch = {"x": torch.zeros(4, 2), "y": torch.zeros(6), "s": torch.tensor(1)}
    with pytest.raises(fs.errors.BatchError) as caught:
        step(state, batch)
    assert str(caught.value) == (
        "train step cannot split this rank's batch into 3 microbatches.\n"
        "  s is int64[], so it holds no rows\n"
        "  y is float32[6]: dim 0 of x is 4, so it holds no rows\n"
        "Mark an entry that every rank and microbatch gets in full: fs.Shared(x)."
    )


def test_arguments_of_a_step_that_can_never_be_right():
    def of(**how):
        return refusal(lambda: fs.make_train_step(lambda p, b: None, fs.sgd(0.1), **how), kind=ConfigError)

    for count in (0, -1, 1.5):
        assert of(microbatches=count) == f"fs.make_train_step got microbatches={count}.\nGive a number from 1."
    assert of(policy="nothing_saveable") == (
        "fs.make_train_step got policy='nothing_saveable'.\n"
        "Use one of fs.policies.save_except_gathered, fs.policies.nothing_saveable, fs.policies.dots_saveable, "
        "fs.policies.everything_saveable, fs.policies.offload, fs.policies.offload_inputs."
    )
    assert of(policy=fs.policies.nothing_saveable) == (
        "fs.make_train_step got policy='nothing_saveable' for a loss function, which has no blocks of its own.\n"
        "Pass it to fs.scan_units, fs.gather_unit or fs.functionalize, where the loss gathers its units."
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fs.gather_unit", lambda: fs.gather_unit({}, policy="dots_saveable")),
        ("fs.scan_units", lambda: fs.scan_units(lambda p, x: x, [], 0, policy="dots_saveable")),
        ("fs.remat", lambda: fs.remat(lambda x: x, policy="dots_saveable")),
        ("fs.functionalize", lambda: fs.functionalize(torch.nn.Linear(2, 2), "", policy="dots_saveable")),
    ],
)
def test_a_name_is_no_policy(name, call):
    assert refusal(call, kind=ConfigError).startswith(f"{name} got policy='dots_saveable'.\nUse one of fs.policies.")


SMALL = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=1, heads=2, kv_heads=1, intermediate_size=8)


def test_a_state_of_another_optimizer_or_model_is_refused():
    model, opt = fs.models.decoder(SMALL), fs.adamw(1e-3)
    state = fs.init_state(model, opt, fs.random.key(0), fs.plan_layout(model, fs.make_mesh(device="cpu")))
    tokens = torch.zeros(2, 4, dtype=torch.int64)

    def step(model, opt):
        return refusal(
            lambda: fs.make_train_step(model, opt)(state, {"tokens": tokens, "targets": tokens}), kind=FshardingError
        )

    text = step(model, fs.sgd(0.1, momentum=0.9))
    assert text.startswith("train step got its optimizer and state.opt_state that do not match.\n")
    assert "  trace.embed.table: only in its optimizer\n" in text and "\n  and 26 more\n" in text
    text = step(model, fs.optim.chain(opt))
    assert "  states.0.count: only in its optimizer\n" in text
    assert step(fs.models.decoder(replace(SMALL, tied=True)), opt) == (
        "train step got the state and its model that do not match.\n"
        "  head.unembed: only in the state\n"
        "Give both the same keys."
    )
    text = step(fs.models.decoder(replace(SMALL, vocab_size=24)), opt)
    assert "  embed.table: float32[24, 8] given, float32[16, 8] in the layout\n" in text
