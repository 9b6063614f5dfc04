"""Law: any strategy, mesh, microbatches, shapes and optimizer train as one plain torch process does, and all strategies alike.

The cases are data: they are drawn here and sent to ranks that wait.
"""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note
from hypothesis import strategies as st

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.helpers import TRANSPORTS, examples, mesh_of, point_to_point

STEPS = 3
GRIDS = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"cp": 2}, {"ep": 2}, {"replica": 2}],
    4: [
        {"dp": 4}, {"cp": 4}, {"replica": 4}, {"replica": 2, "dp": 2}, {"replica": 2, "cp": 2}, {"dp": 2, "cp": 2},
        {"dp": 2, "ep": 2}, {"ep": 2, "cp": 2},
    ],
}  # fmt: skip


class Case(NamedTuple):
    ranks: int
    axes: dict[str, int]
    strategy: fs.Strategy
    microbatches: int
    rows: int
    widths: tuple[int, ...]
    stacked: int
    scalar: bool
    frozen: tuple[str, ...]
    optimizer: str
    clip: float
    policy: str
    donate: bool
    transport: str
    early: int  # elements of a gradient from which on it is taken before its unit is left


@st.composite
def cases(draw, ranks):
    widths = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    inner = draw(st.sampled_from([fs.zero(level) for level in range(4)]))
    frozen = [f"layers.{i}{part}" for i in range(len(widths) - 1) for part in ("", ".w", ".b")] + ["stack", "scale"]
    stacked, scalar = draw(st.integers(0, 3)), draw(st.booleans())
    known = [path for path in frozen if (path != "stack" or stacked) and (path != "scale" or scalar)]
    return Case(
        ranks=ranks,
        axes=draw(st.sampled_from(GRIDS[ranks])),
        strategy=fs.hybrid(inner, params=draw(st.booleans()), grads=draw(st.booleans()), opt_state=draw(st.booleans())),
        microbatches=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 2)),
        widths=widths,
        stacked=stacked,
        scalar=scalar,
        frozen=tuple(draw(st.lists(st.sampled_from(known), max_size=1))),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "nesterov", "adamw"])),
        clip=draw(st.sampled_from([0.01, 0.5, 1e9])),
        policy=draw(st.sampled_from(sorted(fs.policies.POLICIES))),
        donate=draw(st.booleans()),
        transport=draw(st.sampled_from(["auto", *TRANSPORTS])),
        early=draw(st.sampled_from([1, 20, 1 << 16])),
    )


# ---------------------------------------------------------------------------------------------------- what is trained
def draws_of(case, key):
    layers = [
        {"w": fs.random.normal(fs.random.fold_in(key, i), (b, a), std=0.7), "b": fs.random.full((b,), 0.1)}
        for i, (a, b) in enumerate(itertools.pairwise(case.widths))
    ]
    params: dict[str, Any] = {"layers": layers}
    if case.stacked:
        n = case.widths[-1]
        params["stack"] = {
            "w": fs.random.normal(fs.random.fold_in(key, 100), (case.stacked, n, n), std=0.5),
            "b": fs.random.zeros((case.stacked, n)),
        }
    if case.scalar:
        params["scale"] = fs.random.full((), 1.5)
    return params


def names_of(case):
    names: dict[str, Any] = {"layers": [{"w": (None, None), "b": (None,)} for _ in case.widths[1:]]}
    if case.stacked:
        names["stack"] = {"w": ("layers", None, None), "b": ("layers", None)}
    if case.scalar:
        names["scale"] = ()
    return names


def layer(unit, x):
    return torch.tanh(x @ unit["w"].T + unit["b"]) + 0.1 * x.mean(-1, keepdim=True)


def loss_of(case):
    policy = fs.policies.POLICIES[case.policy]

    def loss(params, batch):
        x = fs.scan_units(layer, params["layers"], batch["x"], policy=policy)
        if case.stacked:
            x = fs.scan_units(layer, params["stack"], x, policy=policy)
        x = x * fs.gather_unit(params["scale"]) if case.scalar else x
        per_row = (x - 0.3).square().sum(-1)
        return (per_row * batch["weight"]).sum(), batch["weight"].sum()

    return loss


def batches(case):
    """Global batches; rows of a rank follow each other, and rows have different weights."""
    generator = torch.Generator().manual_seed(2)
    rows = case.ranks * case.microbatches * case.rows
    for _ in range(STEPS):
        x = torch.randn(rows, case.widths[0], generator=generator)
        yield {"x": x, "weight": torch.randint(1, 4, (rows,), generator=generator).float()}


def optimizer(case):
    inner = {
        "sgd": lambda: fs.sgd(0.1),
        "momentum": lambda: fs.sgd(0.05, momentum=0.9, weight_decay=0.1),
        "nesterov": lambda: fs.sgd(0.05, momentum=0.9, nesterov=True),
        # A large eps: else the first steps follow the signs of gradients that are zero but for rounding.
        "adamw": lambda: fs.adamw(0.05, eps=1e-2, weight_decay=0.1),
    }[case.optimizer]()
    return fs.optim.chain(fs.optim.clip_by_global_norm(case.clip), inner)


def train(case, strategies):
    """Losses, norms and final parameters of each strategy on this rank, which sees its own rows."""
    mesh, rank, results = mesh_of(case.axes, transport=case.transport), dist.get_rank(), []
    for strategy in strategies:
        draws, opt = draws_of(case, fs.random.key(5)), optimizer(case)
        layout = fs.plan_layout(draws, mesh, strategy=strategy, names=names_of(case), frozen=case.frozen)
        state = fs.init_state(lambda key, draws=draws: draws, opt, fs.random.key(0), layout)
        step = fs.make_train_step(loss_of(case), opt, microbatches=case.microbatches, donate=case.donate)
        losses, norms = [], []
        with fs.debug.record_collectives() as seen, point_to_point(), large_from(case.early):
            for batch in batches(case):
                state, metrics = step(state, {name: x.chunk(case.ranks)[rank] for name, x in batch.items()})
                losses.append(metrics.loss.item())
                norms.append(metrics.grad_norm.item())
        assert layout.memory(opt).state == fs.debug.state_bytes((state.params, state.main, state.opt_state))
        if case.policy != "everything_saveable" and case.transport == "pairwise":
            assert all(counts.peak_units <= 2 for counts in seen)
        params = {path: x.full_tensor() for path, x in fs.tree.named_leaves(state.params).items()}
        results.append((losses, norms, params))
    return results


def in_plain_torch(case):
    params = fs.tree.map(lambda draw: draw.tensor(), draws_of(case, fs.random.key(5)))
    named = fs.tree.named_leaves(params)
    for path, x in named.items():
        x.requires_grad_(not any(f"{path}.".startswith(f"{entry}.") for entry in case.frozen))
    trained = [x for x in named.values() if x.requires_grad]
    opt: Any = {
        "sgd": lambda: torch.optim.SGD(trained, lr=0.1),
        "momentum": lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1),
        "nesterov": lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(trained, lr=0.05, betas=(0.9, 0.95), eps=1e-2, weight_decay=0.1),
    }[case.optimizer]()
    losses, norms = [], []
    for batch in batches(case):
        total, weight = loss_of(case)(params, batch)
        opt.zero_grad()
        (total / weight).backward()
        losses.append((total / weight).item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, case.clip).item())
        opt.step()
    return losses, norms, {path: x.detach() for path, x in named.items()}


# Rows of a stack that do not begin where a fresh tensor would: kernels may take another path there.
UNALIGNED = Case(
    ranks=2, axes={"dp": 2}, strategy=fs.zero(0), microbatches=1, rows=1, widths=(1, 5), stacked=2, scalar=False, frozen=(),
    optimizer="sgd", clip=0.01, policy="save_except_gathered", donate=False, transport="auto", early=1,
)  # fmt: skip


@pytest.mark.parametrize("ranks", GRIDS)
@examples(18, 50)
@given(st.data())
def test_any_case_trains_as_plain_torch_does(ranks, data):
    case = data.draw(cases(ranks))
    note(repr(case))
    trains_as_plain_torch_does(case)


@pytest.mark.parametrize(
    "case", [UNALIGNED, UNALIGNED._replace(strategy=fs.zero(1), policy="nothing_saveable", transport="native")]
)
def test_rows_of_a_stack_that_are_not_aligned(case):
    trains_as_plain_torch_does(case)


def trains_as_plain_torch_does(case):
    if len(case.widths) == 2 and case.frozen == ("layers.0",) and not case.stacked and not case.scalar:
        return  # nothing would be trained
    losses, norms, params = in_plain_torch(case)
    ranks = run_ranks(train, case.ranks, case, [case.strategy, fs.zero(3)])
    for found in ranks:
        assert_bitwise_equal(found, ranks[0], "the ranks' results")
    mine, zero3 = ranks[0]
    assert_trees_close(mine[0], losses, rtol=1e-4, atol=1e-5, what="losses")
    assert_trees_close(mine[1], norms, rtol=1e-4, atol=1e-5, what="gradient norms")
    assert_trees_close(mine[2], params, rtol=1e-3, atol=1e-4, what="parameters")
    if case.microbatches == 1:
        assert_bitwise_equal(mine, zero3, f"{case.strategy} and zero3")
