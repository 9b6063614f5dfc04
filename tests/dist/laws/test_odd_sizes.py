"""Law: sizes that no axis divides train as in one process, and every rank plans the same collectives.

Plans follow from global shapes. It changes nothing that is sent whether a rank's rows are a multiple of 64 bytes, or
whether it has fewer elements than others, or none. Ranks compare the outlines of all plans while they train.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import examples, mesh_of
from tests.training import name_of

STRATEGIES = [*map(fs.zero, range(4)), fs.hybrid(), fs.hybrid(opt_state=True)]
AXES = ("dp", "cp", "tp")
MESHES = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in itertools.product((1, 2, 3), repeat=3)
    if 1 < sizes[0] * sizes[1] * sizes[2] <= 4
]
ROWS, POSITIONS, STEPS = 12, 12, 3


def train(axes, strategy, model, options):
    """Losses, norms and parameters of a few steps of a decoder."""
    mesh, sizes = mesh_of(axes), dict(model)
    config = fs.models.DecoderConfig(layers=2, **sizes)
    state, step = fs.setup(
        fs.models.decoder(config), None, fs.sgd(0.1), fs.random.key(0), strategy, mesh=mesh, **dict(options)
    )
    generator = torch.Generator().manual_seed(1)
    numbers = []
    with fs.debug.compare_units(mesh):
        for _ in range(STEPS):
            tokens = torch.randint(0, config.vocab_size, (ROWS, POSITIONS + 1), generator=generator)
            batch = fs.local_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, mesh)
            state, metrics = step(state, batch)
            numbers += [float(metrics.loss), float(metrics.grad_norm)]
        params = fs.unshard(state.main if state.main is not None else state.params)
    return numbers, fs.tree.named_leaves(params)


@functools.cache
def alone(model):
    return train({"dp": 1}, fs.zero(0), model, ())


def trains_as_one_process(axes, strategy, options=(), **sizes):
    model = tuple({"vocab_size": 16, "dim": 16, "heads": 2, "kv_heads": 2, "intermediate_size": 24, **sizes}.items())
    ranks = run_ranks(train, functools.reduce(int.__mul__, axes.values()), axes, strategy, model, options)
    for seen in ranks:
        assert_trees_close(seen, alone(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=name_of)
@pytest.mark.parametrize(
    ("tp", "dim", "intermediate_size"), [(2, 36, 31), (2, 40, 15), (3, 36, 47)], ids=["36x31", "40x15", "36x47"]
)
def test_rows_of_one_rank_are_not_aligned(strategy, tp, dim, intermediate_size):
    heads = 2 * tp
    trains_as_one_process(
        {"dp": 1, "cp": 1, "tp": tp}, strategy, dim=dim, head_size=8, intermediate_size=intermediate_size,
        heads=heads, kv_heads=heads,
    )  # fmt: skip


def test_slices_of_fused_leaves_differ_in_size():
    """On tp, queries, keys and values are one leaf, of which each rank has a share of each part."""
    trains_as_one_process({"dp": 1, "cp": 1, "tp": 2}, fs.zero(0), dim=1, head_size=2, intermediate_size=15, fused=True)


@st.composite
def cases(draw):
    axes = draw(st.sampled_from(MESHES))
    strategy = draw(st.sampled_from(STRATEGIES))
    if strategy in STRATEGIES[4:] and axes["dp"] > 1:
        axes = {"replica": axes["dp"], **axes, "dp": 1}
    options = {"microbatches": draw(st.sampled_from((1, 2))), "prefetch_depth": draw(st.integers(0, 2))}
    if draw(st.booleans()):
        options["policy"] = draw(st.sampled_from((fs.policies.nothing_saveable, fs.policies.everything_saveable)))
    sizes = {
        "vocab_size": draw(st.integers(3, 19)), "dim": draw(st.integers(1, 23)),
        "intermediate_size": draw(st.integers(3, 70)), "heads": axes["tp"] * draw(st.integers(1, 2)),
        "head_size": 2 * draw(st.integers(1, 5)), "qk_norm": draw(st.booleans()), "tied": draw(st.booleans()),
        "fused": draw(st.booleans()),
    }  # fmt: skip
    sizes["kv_heads"] = sizes["heads"]
    return axes, strategy, tuple(options.items()), sizes


@given(case=cases())
@examples(12, 500)
def test_any_sizes_train_as_in_one_process(case):
    axes, strategy, options, sizes = case
    trains_as_one_process(axes, strategy, options, **sizes)
