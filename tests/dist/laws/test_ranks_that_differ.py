"""Law: ranks that differ compute what one process does, or all raise one error, in the first step and in later ones."""

from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.errors import BatchError, ConfigError, RankError
from fsharding.testing import RankPool, run_ranks
from tests.helpers import mesh_of, refusal
from tests.training import CONFIG, MODEL

NAMES = ("a", "b", "c", "d")
WIDTH, ROWS, STEPS = 4, 4, 3
INPUT = torch.linspace(-1, 1, 2 * ROWS * WIDTH).view(2 * ROWS, WIDTH)


class Case(NamedTuple):
    """A run of two ranks in which rank 1 differs from a step on.

    Attributes:
        what: that differs: "nothing", the "order" of units, a unit that is "dropped", "rows", the "key", the number of
            the "step", a "rate" or what a "schedule" returns.
        axis: of the mesh, along which the ranks are.
        strategy: its name.
        when: the step.
        swap: for "order" and "dropped", which units.
        check: when the host looks.
        microbatches: of the step.
    """

    what: str
    axis: str = "dp"
    strategy: str = "zero3"
    when: int = 0
    swap: tuple[int, int] = (1, 2)
    check: str = "sync"
    microbatches: int = 1


def first_values():
    return {name: torch.eye(WIDTH) * (i + 1) / 2 + 0.1 for i, name in enumerate(NAMES)}


def forward(take, names, x):
    for name in names:
        x = torch.tanh(x @ take(name))
    return x.square().sum(), x.numel()


def order_of(case, odd, step):
    """The units that a rank uses in a step, in order."""
    names = [*NAMES]
    if odd and step >= case.when and case.what in ("order", "dropped"):
        i, j = case.swap
        names[i], names[j] = names[j], names[i]
        names = names[:-1] if case.what == "dropped" else names
    return names


def run(case):
    """The losses of a run, or the error and the step in which it came."""
    mesh, odd, step_now = mesh_of({case.axis: 2}), torch.distributed.get_rank() == 1, [0]

    def loss_fn(params, batch):
        names = order_of(case, odd, step_now[0])
        return forward(lambda name: fs.gather_unit(params[name]), names, batch["x"])

    rate = 0.2 if odd and case.what == "rate" else 0.1
    if case.what == "schedule":
        when = case.when
        rate = lambda count: 0.2 if torch.distributed.get_rank() == 1 and count >= when else 0.1  # noqa: E731
    key = fs.random.key(1 if odd and case.what == "key" and case.when == 0 else 0)
    losses: list[float] = []
    try:
        state, step = fs.setup(
            first_values(), loss_fn, fs.sgd(rate), key, case.strategy, mesh=mesh, check=case.check,
            microbatches=case.microbatches, tp="replicate",
        )  # fmt: skip
        for number in range(STEPS):
            step_now[0] = number
            if odd and case.what == "key" and number == case.when:
                state = state.replace(key=fs.random.key(7))
            if odd and case.what == "step" and number == case.when:
                state = state.replace(step=state.step + 4)
            x = fs.local_batch({"x": INPUT}, mesh)["x"]
            if odd and case.what == "rows" and number >= case.when:
                x = x.flip(0)
            state, metrics = step(state, {"x": x})
            losses.append(float(metrics.loss))
    except (RankError, ConfigError) as error:
        return type(error).__name__, len(losses), str(error)
    return losses


def alone():
    """The same in plain torch, in one process."""
    params = {name: x.requires_grad_() for name, x in first_values().items()}
    losses: list[float] = []
    for _ in range(STEPS):
        total, count = forward(params.__getitem__, NAMES, INPUT)
        grads = torch.autograd.grad(total / count, list(params.values()))
        losses.append(float(total.detach() / count))
        with torch.no_grad():
            for x, grad in zip(params.values(), grads, strict=True):
                x -= 0.1 * grad
    return losses


def refused(case) -> tuple[str, int, str]:
    (kind, step, text), other = run_ranks(run, 2, case)
    assert other == (kind, step, text), "all ranks say the same"
    return kind, step, text


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
def test_units_in_another_order_are_named_with_both_sites(strategy, when):
    kind, step, text = refused(Case("order", strategy=strategy, when=when))
    assert (kind, step) == ("RankError", when)
    head, one, other, mend = text.split("\n")
    assert head == "train step does different things on rank 1 (dp=1) than on rank 0 (dp=0)."
    assert one.startswith("  rank 1 (dp=1): gathers c at ") and "test_ranks_that_differ.py:" in one
    assert other.startswith("  rank 0 (dp=0): gathers b at ") and "test_ranks_that_differ.py:" in other
    assert mend.startswith("Gather the same units in the same order on every rank")


def test_a_unit_that_one_rank_drops_is_named():
    kind, step, text = refused(Case("dropped", swap=(0, 0)))
    assert (kind, step) == ("RankError", 0)
    assert "\n  rank 0 (dp=0): gathers d at " in text and "\n  rank 1 (dp=1): ends its forward, entry 5 " in text


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_rows_that_should_be_the_same_are_compared(axis, when):
    kind, step, text = refused(Case("rows", axis=axis, when=when))
    assert (kind, step) == ("RankError", when)
    head, one, other, mend = text.split("\n")
    assert head == f"train step gets different rows on ranks 0 ({axis}=0), 1 ({axis}=1), which have to read the same."
    assert one.startswith(f"  batch.x: rank 1 ({axis}=1) has float32[8, 4] with hash ")
    assert other.startswith(f"  batch.x: rank 0 ({axis}=0) has float32[8, 4] with hash ")
    assert mend.startswith("Read the same rows on ranks along tp and pp: use fs.local_batch(batch, mesh)")


def test_with_next_the_error_comes_a_call_later_and_the_state_stays():
    kind, step, text = refused(Case("order", when=1, check="async"))
    assert (kind, "gathers c" in text, "gathers b" in text) == ("RankError", True, True) and step in (1, 2)


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_other_rates_are_told_by_the_step_after(strategy):
    kind, step, text = refused(Case("schedule", strategy=strategy, when=1))
    assert (kind, step) == ("RankError", 2)
    assert text == (
        "train step does different things on rank 1 (dp=1) than on rank 0 (dp=0).\n"
        "  rank 1 (dp=1): was last updated with rates 0.2, entry 2 of the call\n"
        "  rank 0 (dp=0): was last updated with rates 0.1, entry 2 of the call\n"
        "Compute rates from the count alone, or from numbers that all ranks share, such as metrics.loss. Resume from"
        " a checkpoint before that update."
    )


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_number_of_the_step_that_differs_is_refused_since_keys_follow_from_it(axis):
    kind, step, text = refused(Case("step", axis=axis, when=1))
    key = fs.random.split(fs.random.key(0))[1].tolist()
    assert (kind, step) == ("RankError", 1)
    assert text == (
        f"train step does different things on rank 1 ({axis}=1) than on rank 0 ({axis}=0).\n"
        f"  rank 1 ({axis}=1): uses the key {key} of step 5, entry 1 of the call\n"
        f"  rank 0 ({axis}=0): uses the key {key} of step 1, entry 1 of the call\n"
        "Use the same state.key and state.step on every rank: a step derives its keys from both."
    )


class Hang(NamedTuple):
    """What each rank says of a later step in which rank 1 gathers one unit less."""

    kind: str
    text: str


def hangs():
    mesh, odd, number = (
        fs.make_mesh(device="cpu", dp=2, timeout=timedelta(seconds=2)),
        torch.distributed.get_rank(),
        [0],
    )

    def loss_fn(params, batch):
        names = NAMES[:-1] if odd and number[0] else NAMES
        return forward(lambda name: fs.gather_unit(params[name]), names, batch["x"])

    state, step = fs.setup(first_values(), loss_fn, fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    batch = fs.local_batch({"x": INPUT}, mesh)
    state, _ = step(state, batch)
    number[0] = 1
    try:
        step(state, batch)
    except RankError as error:
        return Hang(type(error).__name__, str(error))
    return None


def test_a_later_step_that_hangs_names_the_units():
    with RankPool(2) as pool:  # of its own: its groups cannot be used any more
        for hang in pool.run(hangs):
            assert hang is not None and hang.kind == "RankError"
            assert "train step does different things on rank 1 (dp=1) than on rank 0 (dp=0).\n" in hang.text
            assert "rank 0 (dp=0): gathers d at" in hang.text and "rank 1 (dp=1): ends its forward" in hang.text


CASES = st.builds(
    Case,
    what=st.sampled_from(["order", "rows", "nothing", "key", "step", "rate", "schedule"]),
    axis=st.sampled_from(["dp", "tp", "replica"]),
    strategy=st.sampled_from(["zero0", "zero1", "zero2", "zero3"]),
    when=st.integers(0, STEPS - 1),
    swap=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    check=st.sampled_from(["sync", "async"]),
    microbatches=st.sampled_from([1, 2]),
)


@given(case=CASES)
def test_ranks_that_differ_compute_what_one_process_does_or_all_raise(case):
    results = run_ranks(run, 2, case)
    differs = {
        "order": case.swap[0] != case.swap[1],
        "rows": case.axis == "tp",  # other ranks may have their rows in any order
        "key": True,
        "step": True,
        "rate": True,
        "schedule": case.when < STEPS - 1,  # an update is compared by the step after it
    }.get(case.what, False)
    assert results[0] == results[1]
    if differs:
        kind, step, _ = results[0]
        # With "async" the host looks at the end of a step, or in the next one.
        first = {"rate": 0, "schedule": case.when + 1}.get(case.what, case.when)
        assert kind in ("RankError", "ConfigError") and first <= step <= first + (case.check == "async")
    else:
        assert results[0] == pytest.approx(alone(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------------- cp
def on_cp(cut):
    mesh = mesh_of({"cp": 2})
    state, step = fs.setup(MODEL, None, fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if not cut:
        return refusal(step, state, batch, kind=BatchError)
    _, metrics = step(state, fs.local_batch(batch, mesh))
    return int(metrics.count), float(metrics.loss)


def test_cp_ranks_with_whole_sequences_are_refused_and_local_batch_cuts_them():
    for text in run_ranks(on_cp, 2, False):
        assert text.split("\n") == [
            "train step needs a part of the sequence on each of the 2 ranks along cp; they have full ones.",
            "  targets is int64[4, 16] and the same on all ranks",
            "  tokens is int64[4, 16] and the same on all ranks",
            "Split global batches with fs.local_batch(batch, mesh), or rows with fs.ops.cut_sequence(batch, mesh=mesh).",
        ]
    state, step = fs.setup(MODEL, None, fs.sgd(0.1), fs.random.key(0), mesh=fs.make_mesh(device="cpu"))
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 17), generator=torch.Generator().manual_seed(0))
    _, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    for weight, loss in run_ranks(on_cp, 2, True):
        assert weight == 64 and loss == pytest.approx(float(metrics.loss), rel=1e-5)


def pieces_of_local_batch(axes):
    mesh = mesh_of(axes)
    rows = torch.arange(4 * 8).view(4, 8)
    texts = [refusal(fs.local_batch, {"x": x}, mesh, kind=BatchError) for x in (torch.zeros(4), torch.zeros(4, 6))]
    return fs.local_batch({"x": rows}, mesh)["x"], texts


def test_local_batch_on_cp():
    parts = run_ranks(pieces_of_local_batch, 4, {"dp": 2, "cp": 2})
    whole = torch.arange(4 * 8).view(4, 8)
    for rank, (part, texts) in enumerate(parts):
        columns = [[0, 1, 6, 7], [2, 3, 4, 5]][rank % 2]
        assert torch.equal(part, whole.chunk(2)[rank // 2][:, columns])
        assert texts[0].startswith("fs.local_batch cannot shard 1 of 1 leaves over cp: 2.\n  x is float32[2]: no dim 1")
        assert "\n  x is float32[2, 6]: dim 1 has 6 tokens\n" in texts[1]


# ------------------------------------------------------------------------------------------------------- ignored axes
def ignoring(axis, named, sums):
    """A plain loss over leaves that `tp` cuts, or over whole ones."""
    mesh = mesh_of({axis: 2})
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")} if named else None
    init = {"up": torch.linspace(-1, 1, 24).view(4, 6), "down": torch.linspace(-1, 2, 24).view(6, 4)}

    def loss_fn(params, batch):
        w = fs.gather_unit(params)
        y = torch.tanh(batch["x"] @ w["up"]) @ w["down"]
        y = fs.ops.psum(y, axis) if sums else y
        return y.square().sum(), y.numel()

    def run_one():
        tp = "shard" if named else "replicate"
        state, step = fs.setup(init, loss_fn, fs.sgd(0.1), fs.random.key(0), mesh=mesh, names=names, tp=tp)
        return float(step(state, {"x": INPUT})[1].loss)

    try:
        return run_one()
    except RankError as error:
        return str(error)


def test_a_loss_function_that_ignores_tp_is_told_what_to_use():
    plain = torch.tanh(INPUT @ torch.linspace(-1, 1, 24).view(4, 6)) @ torch.linspace(-1, 2, 24).view(6, 4)
    right = float(plain.square().mean())
    texts = run_ranks(ignoring, 2, "tp", True, False)
    assert texts[0] == texts[1]
    head, *rows, mend = texts[0].split("\n")
    assert head == "train step computes different losses or gradients along tp: the loss function ignores the axis."
    assert [row.partition(": loss")[0] for row in rows] == ["  rank 0 (tp=0)", "  rank 1 (tp=1)"]
    assert "ops.column_linear" in mend and 'fs.ops.psum(x, "tp")' in mend
    assert run_ranks(ignoring, 2, "tp", True, True) == [pytest.approx(right, rel=1e-5)] * 2
    # Leaves without names are whole on every rank, which computes the right loss.
    assert run_ranks(ignoring, 2, "tp", False, False) == [pytest.approx(right, rel=1e-5)] * 2


# ------------------------------------------------------------------------------------------------------------ by hand
def by_hand(what):
    mesh, odd = mesh_of({"dp": 2}), torch.distributed.get_rank() == 1
    layout = fs.plan_layout(first_values(), mesh)
    params: Any = fs.shard(first_values(), layout)
    names = ["a", "c", "b", "d"] if odd else NAMES

    def loss_fn(params, x):
        return forward(lambda name: fs.gather_unit(params[name]), names, x)

    call = fs.evaluate(loss_fn) if what == "fs.evaluate" else fs.value_and_grad(loss_fn)
    return refusal(call, params, INPUT[:4], kind=RankError)


@pytest.mark.parametrize("what", ["fs.value_and_grad", "fs.evaluate"])
def test_gradients_and_losses_by_hand_compare_units_on_the_host(what):
    for text in run_ranks(by_hand, 2, what):
        assert text.startswith(f"{what} does different things on rank 1 (dp=1) than on rank 0 (dp=0).\n")
        assert "gathers c at" in text and "gathers b at" in text


def in_shard_map():
    mesh, odd = mesh_of({"dp": 2}), torch.distributed.get_rank() == 1
    params: Any = fs.shard(first_values(), fs.plan_layout(first_values(), mesh))
    names = ["a", "c", "b", "d"] if odd else NAMES

    def loss(params):
        return forward(lambda name: fs.gather_unit(params[name]), names, INPUT[:4])[0]

    def run_one():
        with fs.debug.compare_units(mesh):
            fs.shard_map(torch.func.grad(loss))(params)

    return refusal(run_one, kind=RankError)


def test_units_in_shard_map_are_compared_on_request():
    for text in run_ranks(in_shard_map, 2):
        assert text.startswith("fs.debug.compare_units does different things on rank 1 (dp=1) than on rank 0 (dp=0).\n")
        assert "gathers 0.0.c[4, 4] at" in text and "gathers 0.0.b[4, 4] at" in text
