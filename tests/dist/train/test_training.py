"""Training on ranks against one process: a layout moves bytes and never a number.

The reference is the same library without a process group, and for some cases plain torch with its own optimizers.
"""

import functools
import gc
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef

import fsharding as fs
from fsharding.comm.buffer_pool import Pool
from fsharding.errors import DonatedError, NonFiniteError
from fsharding.mesh.device_mesh import data_position
from fsharding.precision import LossScale, Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.transforms.gather_context import current_context
from fsharding.transforms.unit_plan import large_from
from tests.helpers import TRANSPORTS, bits, crossed, full, mesh_of, point_to_point, whole

CONFIG = fs.models.DecoderConfig(vocab=32, dim=32, layers=2, heads=2, kv_heads=1, hidden=48)
MODEL = fs.models.decoder(CONFIG)
ROWS, POSITIONS = 12, 8
DP, OUTER, ALONE = {"dp": -1}, {"replica": 2, "dp": -1}, {"dp": 1}
ZEROS = [fs.zero(level) for level in range(4)]
HYBRIDS = [
    fs.hybrid(params=a, grads=b, opt_state=c) for a, b, c in itertools.product((False, True), repeat=3)
]  # fmt: skip

PLACES = {name: (zero, DP) for name, zero in zip(("zero0", "zero1", "zero2", "zero3"), ZEROS, strict=True)}
PLACES |= {"hsdp": (fs.HSDP, OUTER), "hfsdp": (fs.HFSDP, OUTER)}


def placed(strategy):
    """The mesh that a strategy is tested on: with a `replica` axis if it speaks of one."""
    return OUTER if strategy in HYBRIDS and strategy != fs.zero(3) else DP


def name_of(value):
    if isinstance(value, dict):
        return "x".join(value)
    if value in PRECISIONS:
        return "bf16" if value == fs.BF16 else "fp32"
    return value.__name__ if callable(value) else str(value)


PRECISIONS = [fs.FP32, fs.BF16]


# ------------------------------------------------------------------------------------------------------- on the ranks
def batches(steps, mesh, vocab=CONFIG.vocab):
    """This rank's part of batches that can be learnt; ranks have different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(1)
    index, count = data_position(mesh)
    for _ in range(steps):
        tokens = torch.randint(0, vocab, (ROWS, 1), generator=generator)
        for _ in range(POSITIONS):
            tokens = torch.cat((tokens, (5 * tokens[:, -1:] + 3) % vocab), 1)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        yield {"tokens": tokens[:, :-1].chunk(count)[index], "targets": targets.chunk(count)[index]}


def optimizer(name, clip=0.5):
    rates = fs.optim.schedules.warmup_cosine(1e-2, 2, 20)
    inner = {
        "adamw": lambda: fs.adamw(rates, weight_decay=0.1),
        "sgd": lambda: fs.sgd(0.2),
        "momentum": lambda: fs.sgd(0.05, momentum=0.9, weight_decay=0.01),
    }[name]()
    return fs.optim.chain(fs.optim.clip_by_global_norm(clip), inner)


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]
    params: dict[str, torch.Tensor]


def train(
    strategy, axes, *, opt="adamw", microbatches=1, steps=5, precision=fs.FP32, donate=False, clip=0.5,
    policy=fs.policies.save_except_gathered, transport="auto", config=CONFIG,
):  # fmt: skip
    mesh, model = mesh_of(axes, transport=transport), fs.models.decoder(config)
    layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
    optim = optimizer(opt, clip)
    state = fs.init_state(model, optim, fs.random.key(0), layout)
    step = fs.make_train_step(model, optim, microbatches=microbatches, donate=donate, policy=policy)
    run = Run([], [], {})
    for batch in batches(steps, mesh):
        state, metrics = step(state, batch)
        run.losses.append(metrics.loss.item())
        run.norms.append(metrics.grad_norm.item())
    assert int(state.step) == steps
    return run._replace(params=whole(state.main if state.main is not None else state.params))


def on_ranks(ranks, strategy, axes=None, **how):
    """What rank 0 saw; the others must have seen the same bits."""
    axes = placed(strategy) if axes is None else axes
    return _on_ranks(ranks, strategy, tuple(axes.items()), tuple(sorted(how.items())))


@functools.cache
def _on_ranks(ranks, strategy, axes, how):
    runs = run_ranks(train, ranks, strategy, dict(axes), **dict(how))
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    return runs[0]


@functools.cache
def alone(**how):
    """One process, no process group."""
    assert not torch.distributed.is_initialized()
    return train(fs.zero(0), ALONE, **how)


# ---------------------------------------------------------------------------------------------- against one process
def as_one_process(ranks, strategy, axes, **how):
    reference = alone(**how)
    assert reference.losses[-1] < reference.losses[0]
    for count in ranks:
        run = on_ranks(count, strategy, axes, **how)
        assert_trees_close(run.losses, reference.losses, rtol=1.3e-6, atol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "opt"),
    crossed(ZEROS, (1, 3), ("sgd", "adamw"), kept=["zero0-3-adamw", "zero3-3-adamw", "zero3-1-sgd"], name=name_of),
)
def test_losses_are_those_of_one_process(strategy, microbatches, opt):
    as_one_process((2, 4), strategy, DP, opt=opt, microbatches=microbatches)


@pytest.mark.parametrize(
    ("strategy", "ranks", "microbatches", "opt"),
    crossed(
        (fs.HSDP, fs.HFSDP), (2, 4), (1, 3), ("sgd", "adamw"),
        kept=["hfsdp-4-3-adamw", "hfsdp-2-3-adamw"], name=name_of,
    ),
)  # fmt: skip
def test_losses_of_hybrids_are_those_of_one_process(strategy, ranks, microbatches, opt):
    as_one_process((ranks,), strategy, OUTER, opt=opt, microbatches=microbatches)


@pytest.mark.parametrize(("strategy", "axes"), crossed(PLACES, kept=["zero3"]))
def test_twenty_steps_are_those_of_one_process(strategy, axes):
    reference, run = alone(steps=20), on_ranks(4, strategy, axes, steps=20)
    assert_trees_close(run.losses, reference.losses, rtol=1e-5)
    assert reference.losses[-1] < 0.5 * reference.losses[0]


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_do_not_change_the_mean_over_unequal_weights(microbatches):
    one = alone()
    many = on_ranks(1, fs.zero(3), microbatches=microbatches)
    assert_trees_close(many, one, rtol=1e-5, atol=1e-5)


def plain_torch(opt, steps):
    """The same model and batches with torch.autograd and torch.optim alone."""
    draws = MODEL.init(fs.random.split(fs.random.key(0))[0])
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), draws)
    leaves = fs.tree.leaves(params)
    if opt == "adamw":
        adam = torch.optim.AdamW(leaves, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        torchs, rates = adam, fs.optim.schedules.warmup_cosine(1e-2, 2, 20)
    else:
        torchs, rates = (
            torch.optim.SGD(leaves, lr=1.0, momentum=0.9, weight_decay=0.01),
            fs.optim.schedules.constant(0.05),
        )
    run = Run([], [], {})
    for count, batch in enumerate(batches(steps, mesh_of(ALONE))):
        x = MODEL.embed(params["embed"], batch)
        for layer in range(CONFIG.layers):
            x = MODEL.block({name: leaf[layer] for name, leaf in params["blocks"].items()}, x)
        total, tokens = MODEL.head(params["head"], x, batch)
        loss = total / tokens
        torchs.zero_grad()
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(torch.nn.utils.clip_grad_norm_(leaves, 0.5).item())
        for group in torchs.param_groups:
            group["lr"] = rates(count)
        torchs.step()
    return run._replace(params={path: x.detach() for path, x in fs.tree.named_leaves(params).items()})


@pytest.mark.parametrize("opt", ["adamw", pytest.param("momentum", marks=full)])
def test_plain_torch_agrees(opt):
    reference = plain_torch(opt, 6)
    assert max(reference.norms) > 0.5, "the clip must clip"
    for strategy in (fs.zero(1), fs.zero(3), fs.HFSDP):
        run = on_ranks(4, strategy, opt=opt, steps=6, microbatches=3)
        assert_trees_close(run.losses, reference.losses, rtol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5)
        assert_trees_close(run.params, reference.params, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- bit by bit
@pytest.mark.parametrize(("ranks", "precision"), crossed((2, 4), PRECISIONS, kept=["4-fp32"], name=name_of))
def test_strategies_agree_bitwise(ranks, precision):
    steps = (20 if ranks == 4 else 10) if precision == fs.FP32 else 8
    runs = [on_ranks(ranks, strategy, steps=steps, precision=precision, axes=DP) for strategy in ZEROS]
    assert max(runs[0].norms) > 0.5, "the clip must clip"
    for strategy, run in zip(ZEROS, runs, strict=True):
        assert_bitwise_equal(run, runs[3], f"{strategy} and zero3")


def test_strategies_agree_bitwise_where_rows_are_long():
    """Then gradients are summed where they end, or copied there in the second microbatch."""
    how = {"config": fs.models.DecoderConfig(**{**vars(CONFIG), "dim": 128, "hidden": 192}), "steps": 3}
    for microbatches in (1, 2):
        runs = [on_ranks(2, strategy, DP, microbatches=microbatches, **how) for strategy in ZEROS]
        for run in runs:
            assert_trees_close(run.losses, alone(microbatches=microbatches, **how).losses, rtol=1e-5)
        for run in runs[1:] if microbatches == 1 else ():
            assert_bitwise_equal(run, runs[0])


@pytest.mark.parametrize(
    "strategy",
    [s if s == fs.HFSDP else pytest.param(s, marks=full) for s in HYBRIDS],
    ids=name_of,
)
def test_hybrids_agree_bitwise_with_zero3(strategy):
    run = on_ranks(4, strategy, steps=20, axes=OUTER)
    assert_bitwise_equal(run, on_ranks(4, fs.zero(3), steps=20, axes=DP), f"{strategy} and zero3")


@pytest.mark.parametrize(
    "strategy",
    crossed(
        [fs.hybrid(fs.zero(i), opt_state=o) for i in range(3) for o in (0, 1)],
        kept=["hybrid(zero0, opt_state=True)", "zero1"],
    ),
)
def test_hybrids_of_other_levels_agree_bitwise_with_zero3(strategy):
    run = on_ranks(4, strategy, steps=5, axes=OUTER)
    assert_bitwise_equal(run, on_ranks(4, fs.zero(3), steps=5, axes=DP), f"{strategy} and zero3")


@pytest.mark.parametrize(
    "config",
    [CONFIG, pytest.param(fs.models.DecoderConfig(**{**vars(CONFIG), "tied": True}), marks=full)],
    ids=["untied", "tied"],
)
def test_policies_agree_bitwise(config):
    runs = {
        policy.name: on_ranks(2, fs.zero(3), policy=policy, config=config, microbatches=2, axes=DP)
        for policy in fs.policies.POLICIES.values()
    }
    for name, run in runs.items():
        assert_bitwise_equal(run, runs["everything_saveable"], f"{name} and everything_saveable")


def grads_under(policy, axes, strategy):
    mesh = mesh_of(axes)
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    run = fs.value_and_grad(fs.model_loss(MODEL, policy=policy))
    (loss, weight), grads = run(state.params, next(batches(1, mesh)))
    return loss, weight, whole(grads)


@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(3)], ids=name_of)
def test_gradients_do_not_depend_on_the_policy(strategy):
    for ranks in (1, 2):
        found = {p.name: run_ranks(grads_under, ranks, p, DP, strategy)[0] for p in fs.policies.POLICIES.values()}
        for name, result in found.items():
            assert_bitwise_equal(result, found["everything_saveable"], f"{name} and everything_saveable")


@pytest.mark.parametrize("strategy", crossed([fs.zero(1), fs.zero(3), fs.HFSDP], kept=["hfsdp"]))
def test_all_transports_agree_bitwise(strategy):
    native, *others = (on_ranks(4, strategy, transport=transport, axes=OUTER) for transport in TRANSPORTS)
    for other in others:
        assert_bitwise_equal(native, other)


@pytest.mark.parametrize("strategy", crossed([fs.zero(0), fs.zero(3), fs.HFSDP], kept=["zero3"]))
def test_two_runs_of_one_program_agree_bitwise(strategy):
    again = run_ranks(train, 4, strategy, placed(strategy), opt="adamw", microbatches=3)[0]
    assert_bitwise_equal(again, on_ranks(4, strategy, opt="adamw", microbatches=3))


# ---------------------------------------------------------------------------------------------------------- exact sums
def counted(strategies, axes, microbatches):
    return [count_with(strategy, mesh_of(axes), microbatches) for strategy in strategies]


def count_with(strategy, mesh, microbatches):
    """Gradients, loss and update from small integers and powers of two, where float32 is exact."""
    index, count = data_position(mesh)
    draws = {"w": fs.random.full((5, 3), 2.0), "b": fs.random.full((), 1.0)}
    layout = fs.plan_layout(draws, mesh, strategy=strategy)

    def loss_fn(params, batch):
        unit = fs.gather_unit(params)
        per_row = unit["w"].sum() * batch["x"] + unit["b"] * batch["x"]
        return per_row.sum(), batch["weight"].sum()

    # Row m of rank r has the value (r + 1) * 2^m; all weights together are a power of two.
    rows = torch.arange(microbatches)
    weights = torch.ones(microbatches)
    weights[-1] += 2 ** (microbatches - 1).bit_length() - microbatches
    batch = {"x": (index + 1) * 2.0**rows, "weight": weights}
    opt = fs.sgd(0.5)
    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), layout)
    after, metrics = fs.make_train_step(loss_fn, opt, microbatches=microbatches)(state, batch)
    held: Any = None
    for m in rows.tolist():
        goal = layout.main if m + 1 == microbatches else layout.grads
        run = fs.value_and_grad(loss_fn, grads=goal, mean=False)
        before, piece = held, {name: x[m : m + 1] for name, x in batch.items()}
        copies = [local_of(x).clone() for x in fs.tree.leaves(before)]
        _, held = run(state.params, piece, accumulate=before)
        assert_bitwise_equal([local_of(x) for x in fs.tree.leaves(before)], copies)
    return count, metrics.loss.item(), metrics.weight.item(), whole(after.params), whole(held)


SUMMED = [(1, DP), (2, DP), (4, DP), (2, {"replica": 2}), (4, OUTER), (4, {"dp": 2, "cp": 2})]


@pytest.mark.parametrize(
    ("ranks", "axes", "microbatches"),
    crossed(
        {f"{ranks}-{name_of(axes)}": (ranks, axes) for ranks, axes in SUMMED}, (1, 3),
        kept=["1-dp-3", "2-dp-3", "2-replica-3", "4-replicaxdp-3", "4-dpxcp-3"],
    ),
)  # fmt: skip
def test_means_and_accumulation_are_exact(ranks, axes, microbatches):
    strategies = [
        *ZEROS,
        *HYBRIDS,
        fs.hybrid(fs.zero(1)),
        fs.hybrid(fs.zero(1), grads=True),
        fs.hybrid(fs.zero(2), params=True),
    ]
    for results in run_ranks(counted, ranks, strategies, axes, microbatches):
        for strategy, (count, loss, weight, params, held) in zip(strategies, results, strict=True):
            # Over cp the two ranks of a pair read the same rows here, so everything counts twice.
            twice = ranks // count
            total = twice * count * (count + 1) / 2 * (2**microbatches - 1)
            weights = ranks * 2 ** (microbatches - 1).bit_length()
            assert weight == weights
            assert loss == (30 + 1) * total / weights, strategy
            assert_bitwise_equal(held, {"w": torch.full((5, 3), total), "b": torch.tensor(total)}, str(strategy))
            step = 0.5 * total / weights
            assert_bitwise_equal(
                params, {"w": torch.full((5, 3), 2 - step), "b": torch.tensor(1 - step)}, str(strategy)
            )


# ----------------------------------------------------------------------------------------------------------- precision
def test_bf16_compute_is_close_to_fp32():
    for opt in ("sgd", "adamw"):
        reference = alone(opt=opt, steps=4)
        for strategy in ZEROS:
            run = on_ranks(2, strategy, opt=opt, steps=4, precision=fs.BF16)
            assert_trees_close(run.losses, reference.losses, rtol=0, atol=3e-3)


def test_a_reduce_dtype_narrows_the_wire_only():
    precision = Precision(reduce=torch.bfloat16)
    runs = [on_ranks(2, strategy, precision=precision) for strategy in ZEROS]
    for run in runs:
        assert_bitwise_equal(run, runs[0])
    assert_trees_close(runs[0].losses, alone().losses, rtol=0, atol=3e-3)
    assert runs[0].losses != on_ranks(2, fs.zero(0)).losses


def scaled(strategy, axes, donate):
    """Every transition of a run with a loss scale that is too large at first, and what went wrong with it."""
    mesh = mesh_of(axes)
    precision = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**22, interval=2))
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, opt, donate=donate)
    seen = []
    for batch in batches(14, mesh):
        before = fs.tree.map(lambda x: local_of(x).clone(), state)
        old_step = int(state.step)
        if strategy.params:
            # Its parameters are the float32 main copies, so the same numbers come without scaling and rounding.
            (loss, _), grads = fs.value_and_grad(fs.model_loss(MODEL))(state.params, batch)
            unscaled = loss.item(), fs.global_norm(grads).item()
        state, metrics = step(state, batch)
        after = fs.tree.map(lambda x: local_of(x).clone(), state)
        if metrics.skipped:
            assert_bitwise_equal(after.replace(loss_scale=None), before.replace(loss_scale=None), "a skipped step")
            assert after.loss_scale.scale == before.loss_scale.scale / 2
            assert after.loss_scale.good_steps == 0
        else:
            grown = before.loss_scale.good_steps == 1
            assert after.loss_scale.scale == before.loss_scale.scale * (2 if grown else 1)
            assert after.loss_scale.good_steps == (0 if grown else 1)
            assert metrics.loss.isfinite() and metrics.grad_norm.isfinite()
            if strategy.params:
                assert (metrics.loss.item(), metrics.grad_norm.item()) == pytest.approx(unscaled, rel=2e-2)
        assert int(state.step) == old_step + (not metrics.skipped)
        seen.append((metrics.skipped, float(after.loss_scale.scale), metrics.loss.item()))
    return seen


@pytest.mark.parametrize("donate", [pytest.param(False, marks=full), True])
def test_fp16_skips_overflows_and_grows_again(donate):
    runs = [run_ranks(scaled, 2, strategy, DP, donate) for strategy in ZEROS]
    for run in runs:
        assert run[0] == run[1] == runs[0][0]
    skipped = [row[0] for row in runs[0][0]]
    assert skipped[0] and not all(skipped)
    assert any(skipped[skipped.index(False) :]), "after growth it overflows again"
    good = [loss for skip, _, loss in runs[0][0] if not skip]
    assert good[-1] < good[0]


def donate_after_skip(axes):
    mesh = mesh_of(axes)
    precision = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale(2.0**40))
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, precision=precision))
    before = fs.tree.map(lambda x: local_of(x).clone(), state)
    batch = next(batches(1, mesh))
    skipped, metrics = fs.make_train_step(MODEL, opt)(state, batch)
    assert metrics.skipped
    small = skipped.replace(loss_scale=skipped.loss_scale._replace(scale=torch.tensor(8.0)))
    _, metrics = fs.make_train_step(MODEL, opt, donate=True)(small, batch)
    assert not metrics.skipped
    assert_bitwise_equal(fs.tree.map(local_of, state), before, "the state before the skipped step")


def test_donating_the_state_after_a_skipped_step_leaves_the_one_before_alone():
    run_ranks(donate_after_skip, 2, DP)


# ---------------------------------------------------------------------------------------------------------------- init
def initial(strategy, axes, precision):
    mesh = mesh_of(axes)
    opt = optimizer("adamw")
    state = fs.init_state(
        MODEL, opt, fs.random.key(7), fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    )
    return whole(state.main if state.main is not None else state.params), whole(state.params), state.key


@full
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_init_is_the_same_in_every_layout(ranks, precision):
    init_key, run_key = fs.random.split(fs.random.key(7)).unbind(0)
    draws = {path: draw.tensor() for path, draw in fs.tree.named_leaves(MODEL.init(init_key)).items()}
    strategies = [*ZEROS, *(HYBRIDS if ranks == 4 else [])]
    for strategy in strategies:
        axes = OUTER if strategy in HYBRIDS and ranks == 4 else DP
        for main, params, key in run_ranks(initial, ranks, strategy, axes, precision):
            assert_bitwise_equal(main, draws, str(strategy))
            held = {path: x.to(params[path].dtype) for path, x in draws.items()}
            assert_bitwise_equal(params, held, str(strategy))
            assert_bitwise_equal(key, run_key)


# ---------------------------------------------------------------------------------------------------- unlike parameters
class Toy(NamedTuple):
    """Shapes and a loss; `shapes` maps to (shape) or (shape, dtype)."""

    shapes: Any
    loss: Any
    inputs: int
    outputs: int
    frozen: tuple[str, ...] = ()
    names: Any = None
    rtol: float = 1e-4


def toy_draws(toy):
    """One draw for each leaf, all with keys of their own."""
    leaf = lambda x: isinstance(x, tuple) and (not x or isinstance(x[0], int | tuple))  # noqa: E731
    flat, spec = fs.tree.flatten(toy.shapes, is_leaf=leaf)
    keys = fs.random.split(fs.random.key(3), len(flat)).unbind(0)
    draws = []
    for key, item in zip(keys, flat, strict=True):
        shape, dtype = item if item and isinstance(item[0], tuple) else (item, torch.float32)
        draws.append(fs.random.normal(key, shape, std=0.5, mean=0.1, dtype=dtype))
    return fs.tree.unflatten(spec, draws)


def squares(out, batch):
    return (out.float() - batch["y"]).square().sum(), torch.tensor(float(out.shape[0]))


def layer(unit, x):
    return torch.tanh(x @ unit["w"].to(x.dtype).T + unit["b"].to(x.dtype))


def listed(params, batch):
    return squares(fs.scan_units(layer, params, batch["x"]), batch)


def listed_with_remat(params, batch):
    return squares(fs.scan_units(layer, params, batch["x"], policy=fs.policies.nothing_saveable), batch)


def with_scalars(params, batch):
    x = fs.scan_units(layer, params["layers"], batch["x"])
    unit = fs.gather_unit({"scale": params["scale"], "shift": params["shift"], "v": params["v"]})
    return squares((x * unit["scale"] + unit["shift"].tanh()) * unit["v"], batch)


def tied_last(params, batch):
    """`t` is in two units, in both after a leaf of their own."""
    first = fs.gather_unit({"a": params["a"], "t": params["t"]})
    x = torch.tanh(torch.tanh(batch["x"] @ first["a"]) @ first["t"])
    second = fs.gather_unit({"b": params["b"], "t": params["t"]})
    return squares(torch.tanh(x @ second["t"].T) @ second["b"], batch)


def tied_first(params, batch):
    """`t` is in two units, in both before a leaf of their own."""
    first = fs.gather_unit([params["t"], params["a"]])
    x = torch.tanh(torch.tanh(batch["x"] @ first[1]) @ first[0])
    second = fs.gather_unit([params["t"], params["b"]])
    return squares(torch.tanh(x @ second[0].T) @ second[1], batch)


def tied_alone(params, batch):
    """`t` is in two units, in one of them alone, and twice inside the other."""
    first = fs.gather_unit({"t": params["t"], "again": params["t"], "a": params["a"]})
    x = torch.tanh(torch.tanh(batch["x"] @ first["a"]) @ (first["t"] + first["again"]))
    second, third = fs.gather_unit(params["t"]), fs.gather_unit(params["b"])
    return squares(torch.tanh(x @ second.T) @ third, batch)


def repeated(params, batch):
    """One unit is used three times, as in a universal transformer."""
    x = fs.scan_units(layer, [params["in"], params["mid"], params["mid"], params["mid"], params["out"]], batch["x"])
    return squares(x, batch)


def stacked(params, batch):
    x = fs.scan_units(layer, params["blocks"], batch["x"], prefetch=params["out"])
    return squares(layer(fs.gather_unit(params["out"]), x), batch)


def stack_and_row(params, batch):
    """A stack is used whole, and one of its rows as a unit of its own."""
    row = fs.gather_unit(fs.select_unit(params["blocks"], 1))
    every = fs.gather_unit(params["blocks"])
    x = layer(row, layer({"w": every["w"].mean(0), "b": every["b"].sum(0)}, batch["x"]))
    return squares(layer(fs.gather_unit(params["out"]), x), batch)


def held_open(params, batch):
    """A unit is gathered first and used inside every other one."""
    shared, x = fs.gather_unit(params["shared"]), batch["x"]
    for unit in params["units"]:
        w = fs.gather_unit(unit)["w"]
        x = torch.tanh(torch.tanh(torch.tanh(x @ w) @ shared["w"]) @ w.T)
    return squares(x, batch)


def dead_branch(params, batch):
    """Units whose result never reaches the loss stand between those that do."""
    x = layer(fs.gather_unit(params[0]), batch["x"])
    unused = layer(fs.gather_unit(params[1]), x)
    x = layer(fs.gather_unit(params[2]), x)
    unused = layer(fs.gather_unit(params[3]), unused)
    return squares(layer(fs.gather_unit(params[4]), x + 0 * unused.detach().mean()), batch)


def unused(params, batch):
    """A leaf of a unit that is used, and a unit that is never gathered, have no part in the loss."""
    first = fs.gather_unit(params["first"])
    second = fs.gather_unit(params["second"])
    return squares(torch.tanh(batch["x"] @ first["w"].T) @ second["w"].T, batch)


def layers_of(*widths):
    return [{"w": (b, a), "b": (b,)} for a, b in itertools.pairwise(widths)]


def half(*shape):
    return shape, torch.bfloat16


def double(*shape):
    return shape, torch.float64


LAYERS = {"w": ("layers", None, None), "b": ("layers", None)}
SQUARE = {"blocks": {"w": (3, 6, 6), "b": (3, 6)}, "out": layers_of(6, 3)[0]}
SQUARE_NAMES = {"blocks": LAYERS, "out": {"w": (None, None), "b": (None,)}}
TIED_SHAPES = {"a": (6, 5), "b": (5, 3), "t": (5, 7)}
TOYS = {
    "16-15-8": Toy(layers_of(16, 15, 8), listed, 16, 8),
    "7-15-3": Toy(layers_of(7, 15, 3), listed, 7, 3),
    "16-17-8": Toy(layers_of(16, 17, 8), listed_with_remat, 16, 8),
    "smaller than the ranks": Toy(layers_of(3, 2, 1, 3), listed, 3, 3),
    "scalars": Toy({"layers": layers_of(5, 3), "scale": (), "shift": (), "v": (1,)}, with_scalars, 5, 3),
    "nothing in it": Toy([*layers_of(5, 3), {"w": (3, 3), "b": (3,), "none": (0, 4), "neither": (4, 0)}], listed, 5, 3),
    "tied, last in its units": Toy(TIED_SHAPES, tied_last, 6, 3),
    "tied, first in its units": Toy(TIED_SHAPES, tied_first, 6, 3),
    "tied, alone in its unit": Toy(TIED_SHAPES, tied_alone, 6, 3),
    "one unit three times": Toy(dict(zip(("in", "mid", "out"), layers_of(6, 5, 5, 3), strict=True)), repeated, 6, 3),
    "frozen unit": Toy(layers_of(6, 5, 4, 3), listed, 6, 3, ("1",)),
    "frozen leaf": Toy(layers_of(6, 5, 4, 3), listed, 6, 3, ("0.w", "2.b")),
    "frozen stack": Toy(SQUARE, stacked, 6, 3, ("blocks",), SQUARE_NAMES),
    "all but one frozen": Toy(layers_of(6, 5, 3), listed, 6, 3, ("0", "1.w")),
    "stack": Toy(SQUARE, stacked, 6, 3, (), SQUARE_NAMES),
    "stack and row": Toy(SQUARE, stack_and_row, 6, 3, (), SQUARE_NAMES),
    "held open": Toy({"shared": {"w": (5, 5)}, "units": [{"w": (6, 5)}, {"w": (6, 5)}, {"w": (6, 5)}]}, held_open, 6, 6),
    "dead branch": Toy(layers_of(6, 6, 6, 6, 6, 6), dead_branch, 6, 6),
    "unused": Toy({"first": {"w": (5, 6), "b": (5,)}, "second": {"w": (3, 5)}, "third": {"w": (3, 3)}}, unused, 6, 3),
    "dtypes": Toy(
        [{"w": (5, 6), "b": double(5)}, {"w": half(4, 5), "b": (4,)}, {"w": double(3, 4), "b": half(3)}], listed, 6, 3,
        rtol=3e-2,
    ),
}  # fmt: skip


def toy_batches(toy, mesh, steps):
    generator = torch.Generator().manual_seed(5)
    index, count = data_position(mesh)
    for _ in range(steps):
        x = torch.randn(ROWS, toy.inputs, generator=generator)
        y = torch.randn(ROWS, toy.outputs, generator=generator)
        yield {"x": x.chunk(count)[index], "y": y.chunk(count)[index]}


def train_toy(name, strategies, axes, microbatches, steps=2):
    toy, mesh = TOYS[name], mesh_of(axes)
    results = {}
    for strategy in strategies:
        draws = toy_draws(toy)
        layout = fs.plan_layout(draws, mesh, strategy=strategy, names=toy.names, frozen=toy.frozen)
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(0.03, weight_decay=0.1))
        state = fs.init_state(lambda key, draws=draws: draws, opt, fs.random.key(0), layout)
        step = fs.make_train_step(toy.loss, opt, microbatches=microbatches, donate=True)
        assert layout.memory(opt).state == fs.state_bytes((state.params, state.main, state.opt_state))
        losses = []
        for batch in toy_batches(toy, mesh, steps):
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
        results[str(strategy)] = losses, whole(state.params)
    return results


def toy_in_plain_torch(name, steps=2):
    toy = TOYS[name]
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), toy_draws(toy))
    named = fs.tree.named_leaves(params)
    trained = [x for path, x in named.items() if not any(f"{path}.".startswith(f"{entry}.") for entry in toy.frozen)]
    opt = torch.optim.AdamW(trained, lr=0.03, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in toy_batches(toy, mesh_of(ALONE), steps):
        total, weight = toy.loss(params, batch)
        opt.zero_grad()
        (total / weight).backward()
        for x in trained:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        opt.step()
        losses.append((total / weight).item())
    return losses, {path: x.detach() for path, x in named.items()}


@functools.cache
def toys_on_ranks(name, ranks, outer, microbatches):
    # Over microbatches zero0 goes the way of zero1, and zero3 that of zero2.
    inner = ZEROS if microbatches == 1 else ZEROS[1:3]
    strategies, axes = ([fs.HSDP, fs.HFSDP], OUTER) if outer else (inner, DP)
    results = run_ranks(train_toy, ranks, name, strategies, axes, microbatches)
    for other in results[1:]:
        assert_bitwise_equal(other, results[0], "the ranks' results")
    return results[0]


@pytest.mark.parametrize(
    ("name", "microbatches"),
    crossed(
        TOYS.keys(), (1, 3),
        kept=[
            "16-15-8-3", "7-15-3-3", "scalars-3", "tied, last in its units-3", "frozen stack-3", "unused-3", "dtypes-3",
        ],
    ),
)  # fmt: skip
def test_unlike_parameters_train_as_in_plain_torch(name, microbatches):
    rtol = TOYS[name].rtol
    losses, params = toy_in_plain_torch(name)
    for ranks, outer in ((2, False), (4, False), (4, True))[microbatches > 1 :]:
        for strategy, (found, final) in toys_on_ranks(name, ranks, outer, microbatches).items():
            what = f"{strategy} on {ranks} ranks"
            assert_trees_close(found, losses, rtol=rtol, atol=1e-6, what=f"losses of {what}")
            assert_trees_close(final, params, rtol=rtol, atol=max(rtol, 1e-3), what=f"parameters of {what}")


@pytest.mark.parametrize(
    "name",
    crossed(
        TOYS.keys(),
        kept=["7-15-3", "nothing in it", "one unit three times", "all but one frozen", "dead branch"],
    ),
)
def test_unlike_parameters_agree_bitwise_among_strategies(name):
    results = toys_on_ranks(name, 4, False, 1) | toys_on_ranks(name, 4, True, 1)
    for strategy, result in results.items():
        assert_bitwise_equal(result, results["zero3"], f"{strategy} and zero3")


def scalars_in_bf16(strategy, axes):
    toy, mesh = TOYS["scalars"], mesh_of(axes)
    opt = fs.adamw(0.03)
    layout = fs.plan_layout(toy_draws(toy), mesh, strategy=strategy, precision=fs.BF16)
    state = fs.init_state(lambda key: toy_draws(toy), opt, fs.random.key(0), layout)
    step = fs.make_train_step(toy.loss, opt)
    seen = []
    dtypes = set()

    def loss_fn(params, batch):
        dtypes.update(str(x.dtype) for x in fs.tree.leaves(fs.gather_unit(params)))
        return fs.gather_unit(params)["v"].sum(), 1.0

    fs.value_and_grad(loss_fn, precision=fs.BF16)(state.params, None)
    for batch in toy_batches(toy, mesh, 4):
        state, metrics = step(state, batch)
        seen.append(metrics.loss.item())
    return seen, dtypes


def test_scalars_are_seen_in_the_compute_dtype_by_every_strategy():
    for results in zip(*(run_ranks(scalars_in_bf16, 2, strategy, DP) for strategy in ZEROS), strict=True):
        for losses, dtypes in results:
            assert dtypes == {"torch.bfloat16"}
            assert losses == results[0][0]


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=full)])
def test_tied_embeddings_train_as_one_process(microbatches):
    config = fs.models.DecoderConfig(**{**vars(CONFIG), "tied": True})
    reference = alone(config=config, microbatches=microbatches)
    runs = [on_ranks(4, *place, config=config, microbatches=microbatches) for place in PLACES.values()]
    for run in runs:
        assert_trees_close(run.losses, reference.losses, rtol=1.3e-6, atol=1e-5)
        assert_trees_close(run.norms, reference.norms, rtol=1e-5)
        if microbatches == 1:
            assert_bitwise_equal(run, runs[3])


def scan_a_cut_stack(axes):
    draws = {"w": fs.random.normal(fs.random.key(0), (4, 6, 6))}
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(draws, mesh_of(axes)))
    x = torch.linspace(-1, 1, 12).view(2, 6)

    def loss_fn(params):
        return fs.scan_units(lambda unit, x: torch.tanh(x @ unit["w"]), params, x).sum()

    def right():
        result = x
        for w in draws["w"].tensor():
            result = torch.tanh(result @ w)
        return result.sum()

    try:
        loss, _ = fs.value_and_grad(loss_fn)(state.params)
    except fs.errors.FshardingError:
        return True
    return bool(torch.isclose(loss, right()))


def test_a_stack_whose_layers_are_cut_is_refused_or_right():
    # Planned without names, dim 0 of the stack is cut over dp, and a rank holds some of the layers only.
    assert run_ranks(scan_a_cut_stack, 2, DP) == [True, True]


class Strided(NamedTuple):
    """Weights as a checkpoint of `x @ w` would have them: transposed in memory."""

    @staticmethod
    def params(key):
        w = fs.random.normal(key, (7, 5)).tensor()
        return {"w": w.t(), "v": fs.random.normal(fs.random.fold_in(key, 1), (4, 6, 5)).tensor().permute(2, 1, 0)}

    @staticmethod
    def loss(params, batch):
        unit = fs.gather_unit(params)
        return (torch.einsum("bi,io->bo", batch, unit["w"]).square().sum() + unit["v"].sin().sum() * batch.sum()), 1.0


def train_strided(strategy, axes, opt):
    mesh = mesh_of(axes)
    optim = fs.adamw(0.1) if opt == "adamw" else fs.sgd(0.01, momentum=0.9)
    layout = fs.plan_layout(Strided.params(fs.random.key(0)), mesh, strategy=strategy)
    state = fs.init_state(Strided.params, optim, fs.random.key(0), layout)
    index, count = data_position(mesh)
    x = torch.linspace(-1, 2, 40).view(8, 5)
    for _ in range(3):
        state, _ = fs.make_train_step(Strided.loss, optim)(state, x.chunk(count)[index])
    return whole(state.params)


@pytest.mark.parametrize("opt", ["adamw", "momentum"])
def test_strides_of_the_initial_values_do_not_matter(opt):
    params = Strided.params(fs.random.split(fs.random.key(0))[0])
    params = {name: x.clone().requires_grad_() for name, x in params.items()}
    if opt == "adamw":
        torchs = torch.optim.AdamW(params.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    else:
        torchs = torch.optim.SGD(params.values(), lr=0.01, momentum=0.9)
    for _ in range(3):
        torchs.zero_grad()
        loss, _ = Strided.loss(params, torch.linspace(-1, 2, 40).view(8, 5))
        (loss / 2).backward()
        torchs.step()
    for strategy in ZEROS:
        found = run_ranks(train_strided, 2, strategy, DP, opt)[0]
        assert_trees_close(found, {n: x.detach() for n, x in params.items()}, rtol=1e-4, atol=1e-4, what=str(strategy))


# --------------------------------------------------------------------------------------------------------------- bytes
def measured(name, strategies, axes, precision, opt):
    return [measure(name, strategy, mesh_of(axes), precision, opt) for strategy in strategies]


def measure(name, strategy, mesh, precision, opt):
    """Bytes that the layout foretells, and those that are there before and after a step."""
    optim = {"adamw": lambda: fs.adamw(0.1), "sgd": lambda: fs.sgd(0.1), "momentum": lambda: fs.sgd(0.1, momentum=0.9)}[
        opt
    ]()
    if name == "decoder":
        model, loss, batch = MODEL, fs.model_loss(MODEL), next(batches(1, mesh))
        layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision)
        state = fs.init_state(model, optim, fs.random.key(0), layout)
    else:
        toy = TOYS[name]
        loss, batch = toy.loss, next(toy_batches(toy, mesh, 1))
        draws = toy_draws(toy)
        layout = fs.plan_layout(draws, mesh, strategy=strategy, precision=precision, names=toy.names, frozen=toy.frozen)
        state = fs.init_state(lambda key: draws, optim, fs.random.key(0), layout)
    _, grads = fs.value_and_grad(loss, grads=layout.grads, precision=precision, mean=False)(state.params, batch)
    first = (state.params, state.main, grads, state.opt_state)
    after, _ = fs.make_train_step(loss, optim)(state, batch)
    stepped = (after.params, after.main, grads, after.opt_state)
    return tuple(layout.memory(optim)), *(tuple(fs.state_bytes(part) for part in parts) for parts in (first, stepped))


SIZED = ["decoder", "16-17-8", "smaller than the ranks", "scalars", "frozen leaf", "dtypes"]


@pytest.mark.parametrize(
    ("name", "precision"),
    crossed(SIZED, PRECISIONS, kept=["smaller than the ranks-bf16", "frozen leaf-bf16", "dtypes-fp32"], name=name_of),
)
def test_bytes_are_those_that_the_layout_says(name, precision):
    strategies = [*ZEROS, fs.HFSDP, fs.hybrid(params=True), fs.hybrid(fs.zero(1), grads=True)]
    strategies += HYBRIDS if name == "decoder" else []
    for opt in ("adamw", "sgd", "momentum") if name == "decoder" and precision == fs.FP32 else ("adamw",):
        for results in run_ranks(measured, 4, name, strategies, OUTER, precision, opt):
            for strategy, (said, first, stepped) in zip(strategies, results, strict=True):
                assert said == first == stepped, (strategy, opt)


TABLE = {
    ("bf16", 0): lambda d: 18, ("bf16", 1): lambda d: 6 + 12 // d, ("bf16", 2): lambda d: 2 + 16 // d, ("bf16", 3): lambda d: 16 // d,
    ("fp32", 0): lambda d: 16, ("fp32", 1): lambda d: 8 + 8 // d, ("fp32", 2): lambda d: 4 + 12 // d, ("fp32", 3): lambda d: 16 // d,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_a_parameter_are_those_of_the_table(ranks):
    count = sum(draw.tensor().numel() for draw in fs.tree.leaves(MODEL.init(fs.random.key(0))))
    for (name, level), bytes_a_parameter in TABLE.items():
        precision = fs.BF16 if name == "bf16" else fs.FP32
        for [(said, first, _)] in run_ranks(measured, ranks, "decoder", [fs.zero(level)], DP, precision, "adamw"):
            counter = 8  # Adam's count of updates, an int64
            assert sum(first) == sum(said) == count * bytes_a_parameter(ranks) + counter


# ------------------------------------------------------------------------------------------------- buffers and counts
def peaks(strategy, axes, policy, microbatches, frozen=()):
    mesh = mesh_of(axes, transport="pairwise")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy, frozen=frozen))
    step = fs.make_train_step(MODEL, opt, policy=policy, microbatches=microbatches)
    with point_to_point(), fs.recording() as seen:
        for batch in batches(2, mesh):
            state, _ = step(state, batch)
    return [(counts.peak_units, len(counts.gathers), len(counts.reductions)) for counts in seen]


UNITS = CONFIG.layers + 2


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_counts_and_peaks_of_a_call(policy):
    for ranks, axes in ((2, DP), (4, OUTER)):
        for rows in run_ranks(peaks, ranks, fs.zero(3), axes, policy, 3):
            assert len(rows) == 2 * 3
            for peak, gathers, reductions in rows:
                # The head is still there when backward begins, and the backward of an embedding needs no weight.
                kept = policy == fs.policies.everything_saveable
                assert gathers == (UNITS if kept else 2 * UNITS - 2)
                assert reductions == UNITS
                assert peak == CONFIG.layers + 1 if kept else peak == 2


@pytest.mark.parametrize(
    ("frozen", "gathers", "reductions"),
    [
        (("blocks",), 2 * UNITS - 2, 2),  # gradients of activations still need the weights
        (("head",), 2 * UNITS - 2, UNITS - 1),
        (("embed", "blocks"), UNITS, 1),  # nothing below the head is asked for
    ],
    ids=name_of,
)
@pytest.mark.parametrize("policy", [p for p in fs.policies.POLICIES.values() if not p.gathered], ids=lambda p: p.name)
def test_frozen_units_are_let_go_too(policy, frozen, gathers, reductions):
    for rows in run_ranks(peaks, 2, fs.zero(3), DP, policy, 1, frozen):
        assert rows == [(2, gathers, reductions)] * 2


DEPTH = 5


def started_gathers(policy):
    """What was gathered, or was on its way, when each block began, and half-way through its backward."""
    draws = {name: fs.random.normal(fs.random.key(i), (DEPTH, 6, 6)) for i, name in enumerate(("a", "b"))}
    layout = fs.plan_layout(
        {"blocks": draws}, mesh_of(DP), names={"blocks": dict.fromkeys(draws, ("layers", None, None))}
    )
    state = fs.init_state(lambda key: {"blocks": draws}, fs.sgd(0.1), fs.random.key(0), layout)
    forward: list[list[str]] = []
    backward: dict[int, list[str]] = {}

    def block(unit, x):
        context, number = current_context(), len(forward)
        assert context is not None
        forward.append([*context.counts.gathers])
        y = torch.tanh(x @ unit["a"])
        y.register_hook(lambda grad: backward.update({number: [*context.counts.gathers]}))
        return x + y @ unit["b"]

    def loss_fn(params):
        return fs.scan_units(block, params["blocks"], torch.ones(2, 6), policy=policy).sum()

    fs.value_and_grad(loss_fn)(state.params)
    return forward, backward


def test_the_next_gather_is_on_its_way_before_a_unit_computes_in_both_directions():
    names = [f"blocks[{i}]" for i in range(DEPTH)]
    for forward, backward in run_ranks(started_gathers, 2, fs.policies.save_except_gathered):
        assert forward == [names[: i + 2] for i in range(DEPTH)]
        # The last one is still there; while one computes, the one before it comes.
        assert backward == {i: names + names[max(i - 1, 0) : DEPTH - 1][::-1] for i in range(DEPTH)}


@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(1)], ids=name_of)
def test_levels_without_cut_parameters_gather_nothing_and_reduce_once_a_step(strategy):
    for rows in run_ranks(peaks, 2, strategy, DP, fs.policies.save_except_gathered, 3):
        assert [row[1] for row in rows] == [0] * 6
        assert [row[2] for row in rows] == [0, 0, UNITS] * 2


def test_zero2_gathers_nothing_and_reduces_every_microbatch():
    for rows in run_ranks(peaks, 2, fs.zero(2), DP, fs.policies.save_except_gathered, 3):
        assert [(row[1], row[2]) for row in rows] == [(0, UNITS)] * 6


class Watch:
    """Stands in for the pool: fresh storages only, so that what lives is what the library itself holds."""

    def __init__(self):
        self.refs: list[tuple[int, Any]] = []
        self.owners: dict[int, Any] = {}
        self.peak = 0

    def alive(self):
        return {owner for owner, ref in self.refs if not ref.expired()}

    def take(self, pool, size, dtype, device, owner=None):
        result = torch.empty(size, dtype=dtype, device=device)
        if owner is not None:
            # The number stands for the owner, whom the watch must not keep alive.
            number = owner.__dict__.setdefault("watched_as", len(self.owners))
            self.owners[number] = None
            self.refs.append((number, StorageWeakRef(result.untyped_storage())))
            self.peak = max(self.peak, len(self.alive()))
        return result


def storages(strategy, axes, policy, microbatches, patched):
    mesh = mesh_of(axes, transport="pairwise")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    step = fs.make_train_step(MODEL, opt, policy=policy, microbatches=microbatches)
    batch = next(batches(1, mesh))
    step(state, batch)
    watch, plain = Watch(), Pool.take

    def take(pool, size, dtype, device, owner=None):
        if patched:
            return watch.take(pool, size, dtype, device, owner)
        result = plain(pool, size, dtype, device, owner)
        watch.refs.append((0, StorageWeakRef(result.untyped_storage())))
        return result

    gc.collect()
    gc.disable()
    Pool.take = take
    try:
        with point_to_point():
            step(state, batch)
        left = len(watch.alive())
    finally:
        Pool.take = plain
        gc.enable()
    return watch.peak, len(watch.refs), left


@pytest.mark.parametrize(
    "policy",
    crossed(fs.policies.POLICIES.values(), kept=["save_except_gathered", "nothing_saveable"], name=lambda p: p.name),
)
def test_at_most_two_units_are_alive_and_none_after_the_step(policy):
    kept = policy == fs.policies.everything_saveable
    for ranks, axes, strategy in ((2, DP, fs.zero(3)), (4, OUTER, fs.HFSDP)):
        for peak, taken, left in run_ranks(storages, ranks, strategy, axes, policy, 3, True):
            assert taken > 2 * UNITS
            assert left == 0
            assert peak == CONFIG.layers + 1 if kept else peak == 2
        for _, taken, left in run_ranks(storages, ranks, strategy, axes, policy, 3, False):
            assert taken > 2 * UNITS
            assert left == 0, "the pool itself must go with the step"


def garbage(strategy, precision):
    """Tensors of a step that only Python's search for circles finds, and the most units that were alive in it."""
    mesh, opt = mesh_of(DP), optimizer("adamw")
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step, (batch,) = fs.make_train_step(MODEL, opt, microbatches=2), batches(1, mesh)
    with large_from(1):
        state, _ = step(state, batch)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with fs.recording() as seen:
                step(state, batch)
            gc.collect()
            return sum(isinstance(x, torch.Tensor) for x in gc.garbage), max(counts.peak_units for counts in seen)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_step_leaves_nothing_for_the_garbage_collector(level, precision):
    for left, units in run_ranks(garbage, 2, fs.zero(level), precision):
        assert left == 0
        assert units == (2 if level == 3 else 0), "also where ranks share memory"


def communicated(strategy, axes, policy):
    mesh = mesh_of(axes, transport="native")
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy))
    step = fs.make_train_step(MODEL, opt, policy=policy)
    counts = []
    for batch in batches(3, mesh):
        mode = CommDebugMode()
        with mode, fs.recording() as seen:
            state, _ = step(state, batch)
        found = {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()}
        counts.append((len(seen[0].gathers), len(seen[0].reductions), found))
    return counts


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_torch_counts_the_same_collectives(policy):
    for counts in run_ranks(communicated, 2, fs.zero(3), DP, policy):
        for number, (gathers, reductions, found) in enumerate(counts):
            kept = policy == fs.policies.everything_saveable
            assert (gathers, reductions) == (UNITS if kept else 2 * UNITS - 2, UNITS)
            # Two all-gathers more than the counts say: the terms of (loss, weight), and those of the squared norm,
            # which every rank adds up itself; in the first step also a hash of what all ranks must have in common.
            # Reductions are all-to-alls, summed where they arrive; nothing else is sent.
            more = 3 if number == 0 else 2
            assert sum(n for op, n in found.items() if "gather" in op) == gathers + more
            assert sum(n for op, n in found.items() if "all_to_all" in op or "alltoall" in op) == reductions
            assert sum(found.values()) == gathers + more + reductions


# -------------------------------------------------------------------------------------------------- purity and refusal
def pure(strategy, axes, precision, opt, microbatches):
    mesh = mesh_of(axes)
    optim = optimizer(opt)
    state = fs.init_state(
        MODEL, optim, fs.random.key(0), fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    )
    step = fs.make_train_step(MODEL, optim, microbatches=microbatches)
    for batch in batches(2, mesh):
        before, given = bits(state), bits(batch)
        after, _ = step(state, batch)
        assert_bitwise_equal(bits(state), before, "the state that went in")
        assert_bitwise_equal(batch, given, "the batch")
        again, _ = step(state, batch)
        assert_bitwise_equal(bits(after), bits(again), "two steps from one state")
        assert int(after.step) == int(state.step) + 1
        old, new = (fs.tree.leaves(bits(s.params if s.main is None else s.main)) for s in (state, after))
        assert not any(torch.equal(a, b) for a, b in zip(old, new, strict=True))
        state = after


@pytest.mark.parametrize(
    ("strategy", "precision"),
    crossed([*ZEROS, fs.HFSDP], PRECISIONS, kept=["zero0-bf16", "zero3-fp32", "hfsdp-bf16"], name=name_of),
)
def test_a_step_changes_nothing_that_went_in(strategy, precision):
    opt, microbatches = ("adamw", 1) if precision == fs.FP32 else ("momentum", 3)
    run_ranks(pure, 4, strategy, placed(strategy), precision, opt, microbatches)


def donated(axes):
    mesh = mesh_of(axes)
    opt = optimizer("adamw")
    state = fs.init_state(MODEL, opt, fs.random.key(0), fs.plan_layout(MODEL, mesh))
    after, _ = fs.make_train_step(MODEL, opt, donate=True)(state, next(batches(1, mesh)))
    texts = {}
    for field in ("step", "params", "main", "opt_state", "loss_scale", "key", "layout"):
        with pytest.raises(DonatedError) as caught:
            getattr(state, field)
        texts[field] = str(caught.value)
    for use in (fs.tree.leaves, fs.state_bytes, lambda s: fs.make_train_step(MODEL, opt)(s, next(batches(1, mesh)))):
        with pytest.raises(DonatedError):
            use(state)
    assert int(after.step) == 1
    return texts


def test_a_donated_state_says_so():
    for texts in run_ranks(donated, 2, DP):
        for field, text in texts.items():
            assert text == (
                f"TrainState got a state that was donated: its {field} is gone.\n"
                "Use the state that the step returned, or make the step with donate=False."
            )


@pytest.mark.parametrize(
    ("strategy", "axes", "how"),
    crossed(
        PLACES,
        {
            "optxmicrobatches": ({"opt": "adamw", "microbatches": 3},),
            "optxprecision": ({"opt": "momentum", "precision": fs.BF16},),
        },
        kept=["zero0-optxprecision", "hfsdp-optxprecision"],
    ),
)
def test_donation_changes_no_bit(strategy, axes, how):
    assert_bitwise_equal(on_ranks(4, strategy, axes, **how), on_ranks(4, strategy, axes, donate=True, **how))


def refused(strategy, axes, where):
    """A step with one NaN or infinity, then a good one; returns the text of the refusal."""
    mesh = mesh_of(axes)
    opt = fs.sgd(0.1)
    index, count = data_position(mesh)
    draws = {"w": fs.random.full((4, 4), 0.5), "b": fs.random.zeros((4,))}

    def loss_fn(params, batch):
        return layer(fs.gather_unit(params), batch).square().sum() + batch.sum(), 4.0

    state = fs.init_state(lambda key: draws, opt, fs.random.key(0), fs.plan_layout(draws, mesh, strategy=strategy))
    good, bad = torch.ones(4, 4), torch.ones(4, 4)
    wrong = state
    if where == "batch" and index == count - 1:
        bad[1, 2] = torch.nan
    if where == "infinite loss" and index == 0:
        bad[0, 0] = torch.inf
    if where == "weights":
        wrong = state.replace(params=fs.tree.map(lambda x: x.clone(), state.params))
        local = local_of(wrong.params["w"])
        if index == 0 and local.numel():
            local.view(-1)[0] = torch.nan
    before = bits(wrong)
    step = fs.make_train_step(loss_fn, opt, donate=True)
    with pytest.raises(NonFiniteError) as caught:
        step(wrong, bad)
    assert_bitwise_equal(bits(wrong), before, "the state before the refused step")
    after, metrics = step(state, good)
    assert metrics.loss.isfinite() and int(after.step) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "where"),
    crossed(
        [*ZEROS, fs.HFSDP], ["batch", "weights"],
        kept=["zero0-batch", "zero1-weights", "zero2-batch", "zero3-batch", "zero3-weights", "hfsdp-weights"],
    ),
)  # fmt: skip
def test_nan_on_one_rank_is_refused_on_all(strategy, where):
    texts = run_ranks(refused, 4, strategy, placed(strategy), where)
    assert set(texts) == {
        "train step refused: loss or gradients are not finite.\n"
        "  step 0: loss nan, gradient norm nan\n"
        "  params.b: its gradient is not finite\n"
        "  params.w: its gradient is not finite\n"
        "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    }


@pytest.mark.parametrize("strategy", crossed([*ZEROS, fs.HFSDP], kept=["zero3", "hfsdp"]))
def test_an_infinite_loss_of_one_rank_is_refused_on_all(strategy):
    texts = run_ranks(refused, 4, strategy, placed(strategy), "infinite loss")
    assert set(texts) == {
        "train step refused: loss or gradients are not finite.\n"
        "  step 0: loss inf, gradient norm nan\n"
        "  params.w: its gradient is not finite\n"
        "The state is as before. Lower the learning rate, clip gradients, or look at this batch."
    }


def test_infinite_gradients_of_a_finite_loss_are_refused():
    def loss_fn(params, batch):
        return fs.gather_unit(params)["w"].sqrt().sum(), 1.0

    draws = {"w": fs.random.zeros((4,))}
    layout = fs.plan_layout(draws, mesh_of(ALONE))
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    with pytest.raises(NonFiniteError, match=r"loss 0\.0, gradient norm inf"):
        fs.make_train_step(loss_fn, fs.sgd(0.1))(state, torch.zeros(1))


# ----------------------------------------------------------------------------------------------------- by hand, public
def research_loss(params, batch):
    x = MODEL.embed(fs.gather_unit(params["embed"]), batch)
    x = fs.scan_units(MODEL.block, params["blocks"], x, policy=fs.policies.save_except_gathered)
    return MODEL.head(fs.gather_unit(params["head"]), x, batch)


def by_hand(strategy, axes, opt, frozen=()):
    """The step with nothing hidden, and `make_train_step` beside it: largest difference of losses and parameters."""
    mesh = mesh_of(axes)
    optim = optimizer(opt)
    layout = fs.plan_layout(MODEL, mesh, strategy=strategy, frozen=frozen)
    state = fs.init_state(MODEL, optim, fs.random.key(0), layout)
    step = fs.make_train_step(MODEL, optim)
    params, opt_state = state.params, state.opt_state
    losses = []
    goal = layout.main if frozen else None
    for batch in batches(4, mesh):
        (loss, weight), grads = fs.value_and_grad(research_loss, grads=goal)(params, batch)
        updates, opt_state = optim.update(grads, opt_state, params)
        params = fs.optim.apply_updates(params, updates)
        state, metrics = step(state, batch)
        losses.append((loss.item(), metrics.loss.item(), weight.item(), metrics.weight.item()))
    assert fs.tree.map(lambda x: str(x.placements), params) == fs.tree.map(lambda x: str(x.placements), state.params)
    return losses, whole(params), whole(state.params), whole(opt_state.states[1].mu) if opt == "adamw" else None


@pytest.mark.parametrize("opt", ["adamw", pytest.param("sgd", marks=full), pytest.param("momentum", marks=full)])
@pytest.mark.parametrize("strategy", ZEROS, ids=name_of)
def test_the_step_by_hand_is_the_step(strategy, opt):
    for losses, params, reference, _ in run_ranks(by_hand, 2, strategy, DP, opt):
        for mine, theirs, weight, weights in losses:
            assert mine == pytest.approx(theirs, rel=1e-6) and weight == weights
        assert_trees_close(params, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "opt"),
    crossed([fs.zero(1), fs.zero(3)], ["adamw", "sgd", "momentum"], kept=["zero1-sgd", "zero3-momentum"]),
)
def test_the_step_by_hand_with_frozen_leaves_is_the_step(strategy, opt):
    for losses, params, reference, _ in run_ranks(by_hand, 2, strategy, DP, opt, ("embed", "blocks.wq")):
        assert all(mine == pytest.approx(theirs, rel=1e-6) for mine, theirs, *_ in losses)
        assert_trees_close(params, reference, rtol=1e-6, atol=1e-6)


def through_transformed_shards(params, batch):
    """What is gathered are not the state's own shards but functions of them, as in weight decay through the loss."""
    shards = fs.tree.map(torch.tanh, params)
    return squares(layer(fs.gather_unit(shards), batch["x"]), batch)


def through_its_own_gradient(params, batch):
    """A gradient penalty: the loss differentiates itself with respect to its input."""
    x = batch["x"].clone().requires_grad_()
    out = layer(fs.gather_unit(params["second"]), layer(fs.gather_unit(params["first"]), x))
    (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    total, weight = squares(out, batch)
    return total + slope.square().sum(), weight


BY_HAND = {
    "transformed": Toy({"w": (3, 5), "b": (3,)}, through_transformed_shards, 5, 3),
    "penalty": Toy({"first": layers_of(6, 5)[0], "second": layers_of(5, 3)[0]}, through_its_own_gradient, 6, 3),
}


def summed_gradients(name, strategies, axes, microbatches):
    toy, mesh = BY_HAND[name], mesh_of(axes)
    draws, results = toy_draws(toy), []
    for strategy in strategies:
        layout = fs.plan_layout(draws, mesh, strategy=strategy)
        state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
        batch = next(toy_batches(toy, mesh, 1))
        held: Any = None
        for i in range(microbatches):
            goal = layout.main if i + 1 == microbatches else layout.grads
            piece = {key: x.chunk(microbatches)[i] for key, x in batch.items()}
            _, held = fs.value_and_grad(toy.loss, grads=goal, mean=False)(state.params, piece, accumulate=held)
        results.append(whole(held))
    return results


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_that_do_unusual_things_with_their_parameters(name):
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), toy_draws(BY_HAND[name]))
    total, _ = BY_HAND[name].loss(params, next(toy_batches(BY_HAND[name], mesh_of(ALONE), 1)))
    paths, leaves = fs.tree.paths(params), fs.tree.leaves(params)
    reference = dict(zip(paths, torch.autograd.grad(total, leaves), strict=True))
    strategies = [*ZEROS, fs.HSDP, fs.HFSDP, fs.hybrid(params=True)]
    for microbatches in (1, 3):
        results = run_ranks(summed_gradients, 4, name, strategies, OUTER, microbatches, timeout=30)
        for strategy, found in zip(strategies, results[0], strict=True):
            assert_trees_close(found, reference, rtol=1e-4, atol=1e-4, what=f"{strategy}, {microbatches} microbatches")


def test_loss_functions_may_return_a_mean_and_aux():
    mesh = mesh_of(ALONE)
    draws = {"w": fs.random.normal(fs.random.key(0), (3, 3))}
    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(draws, mesh))

    def loss_fn(params, x):
        out = x @ fs.gather_unit(params)["w"]
        return out.square().mean(), {"out": out.detach()}

    x = torch.eye(3)
    (loss, aux), grads = fs.value_and_grad(loss_fn, has_aux=True)(state.params, x)
    w = draws["w"].tensor().requires_grad_()
    reference = w.square().mean()
    assert_trees_close(loss, reference.detach(), rtol=1e-6)
    assert_trees_close(grads["w"].full_tensor(), torch.autograd.grad(reference, w)[0], rtol=1e-6)
    assert_bitwise_equal(aux["out"], w.detach())


def test_masked_targets_do_not_count():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, -100, 2, -100])
    params = {"norm": torch.ones(32), "unembed": torch.randn(5, 32, generator=torch.Generator().manual_seed(1))}
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(2))
    total, count = MODEL.head(params, x, {"targets": targets[None]})
    logits = F.rms_norm(x, (32,), eps=1e-5) @ params["unembed"].T
    assert int(count) == 2
    assert_trees_close(total, -(logits.log_softmax(-1)[0, 0, 1] + logits.log_softmax(-1)[0, 2, 2]), rtol=1e-5)
