"""Moments as codes and scales, and bfloat16 main parameters that are rounded by key: the same bits in every layout."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import NonFiniteError
from fsharding.formats.precision import Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.sharding.partition_spec import Fused
from fsharding.testing import assert_bitwise_equal, counting_host_reads, run_ranks
from tests.helpers import bits, full, mesh_of
from tests.training import ZEROS, batches

SHAPES = {
    "blocks": {"up": (3, 40, 72), "down": (3, 72, 40), "norm": (3, 40)},
    "experts": (4, 40, 48),
    "head": (96, 52),
    "qkv": (48, 96),
    "vector": (5000,),
}
NAMES = {
    "blocks": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "norm": ("layers", None)},
    "experts": ("expert", "embed", "mlp"),
    "head": ("vocab", "embed"),
    "qkv": ("embed", Fused("mlp", (48, 24, 24))),
    "vector": (None,),
}
NARROW = Precision(params=torch.bfloat16, grads=torch.float32, moments=formats.MXFP8, rounding="stochastic")
FORMATS = {
    "mx": formats.MXFP8,
    "squares": formats.E4M3_128x128,
    "rows": formats.ROWWISE,
    "stochastic": formats.MXFP8_E5M2.with_rounding("stochastic"),
}
OPTIMIZERS = {
    "adamw": lambda: fs.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: fs.optim.lion(1e-3, weight_decay=0.1),
    "momentum": lambda: fs.sgd(1e-2, momentum=0.9, nesterov=True),
    "groups": lambda: fs.optim.multi_transform(
        {"decayed": fs.adamw(1e-2, weight_decay=0.1), "other": fs.adamw(1e-2)},
        lambda path, _: "other" if "norm" in path else "decayed",
    ),
}
STAGES = {"blocks": [[0, 2], [1]], "head": 1}


def values(seed, scale=1.0):
    leaves, spec = fs.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    generator = torch.Generator().manual_seed(seed)
    return fs.tree.unflatten(spec, [torch.randn(shape, generator=generator) * scale for shape in leaves])


def planned(axes, strategy, precision):
    model = values(0)
    stages = STAGES if "pp" in axes else None
    return fs.plan_layout(model, mesh_of(axes), strategy=strategy, precision=precision, names=NAMES, stages=stages)


def updated(axes, strategy, precision, name, updates):
    """The state after some updates by gradients that are the same on every mesh."""
    layout, opt = planned(axes, strategy, precision), OPTIMIZERS[name]()
    state = fs.init_state(lambda key: values(0, 0.1), opt, fs.random.key(7), layout)
    for i in range(updates):
        state = fs.update(state, fs.shard(values(i + 1, 10.0**-i), layout.main), opt)
    memory = layout.memory(opt)
    assert memory.opt_state == fs.debug.state_bytes(state.opt_state), "the plan's bytes are those of the state"
    assert memory.state == fs.debug.state_bytes((state.params, state.main, state.opt_state))
    return state


def whole_state(state):
    whole = fs.unshard(state)
    return {"params": whole.main or whole.params, "opt_state": whole.opt_state}


def states_on(axes, cases, strategies, updates):
    """For each case the whole state, after all strategies have given the same; and each went there and back."""
    result = []
    for name, precision in cases:
        states = [updated(axes, strategy, precision, name, updates) for strategy in strategies]
        first = whole_state(states[0])
        for state, other in zip(states, (*states[1:], states[0]), strict=True):
            assert_bitwise_equal(whole_state(state), first, f"{state.layout.strategy} of {name}")
            there = fs.reshard(state, other.layout)
            assert_bitwise_equal(bits(there.opt_state), bits(other.opt_state), "moved as made")
            assert_bitwise_equal(bits(fs.reshard(there, state.layout)), bits(state), "there and back")
        result.append(first)
    return result


FEW = [
    ("groups", NARROW),
    ("adamw", Precision(moments=FORMATS["rows"])),
    ("lion", Precision(params=torch.bfloat16, rounding="stochastic", moments=FORMATS["squares"])),
]
EVERY = [(name, replace(NARROW, moments=format)) for name, format in itertools.product(OPTIMIZERS, FORMATS.values())]
MESHES = [{"dp": 2, "tp": 2}, {"pp": 2, "ep": 2}]
MORE = [*MESHES, {"dp": 4}, {"tp": 4}, {"pp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"replica": 2, "dp": 2}]


@pytest.mark.parametrize(
    ("meshes", "cases", "strategies", "updates"),
    [(MESHES, FEW, [ZEROS[1], ZEROS[3]], 2), pytest.param(MORE, [*FEW, *EVERY], ZEROS, 3, marks=full)],
    ids=["few", "every"],
)
def test_states_are_the_same_on_every_mesh(meshes, cases, strategies, updates):
    alone = states_on({"dp": 1}, cases, strategies[:1], updates)
    for axes in meshes:
        for rank, seen in enumerate(run_ranks(states_on, 4, axes, cases, strategies, updates, timeout=1200)):
            for case, one, other in zip(cases, alone, seen, strict=True):
                assert_bitwise_equal(other, one, f"{case} on {axes}, rank {rank}")


CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=2, heads=2, kv_heads=1, intermediate_size=96)
MODEL = fs.models.decoder(CONFIG)


def started(axes, strategy, precision=NARROW, **how):
    layout = fs.plan_layout(MODEL, mesh_of(axes), strategy=strategy, precision=precision)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(1e-2, weight_decay=0.1))
    return fs.init_state(MODEL, opt, fs.random.key(0), layout), opt, fs.make_train_step(MODEL, opt, **how)


def losses(strategies):
    """Losses, norms and moments of a few steps, the same under every strategy, donated or not."""
    seen = []
    for i, strategy in enumerate(strategies):
        state, _, step = started({"dp": -1}, strategy, donate=bool(i % 2))
        rows = []
        for batch in batches(3, state.layout.mesh, CONFIG.vocab_size):
            state, metrics = step(state, batch)
            rows.append((metrics.loss, metrics.grad_norm))
        seen.append((rows, whole_state(state)))
        assert_bitwise_equal(seen[i], seen[0], f"{strategy}")
    return seen[0][0]


@pytest.mark.parametrize(
    ("ranks", "strategies"), [(3, ZEROS[::3]), *(pytest.param(ranks, ZEROS, marks=full) for ranks in (2, 3, 4))]
)
def test_losses_are_the_same_under_every_strategy(ranks, strategies):
    first, *others = run_ranks(losses, ranks, strategies)
    for other in others:
        assert_bitwise_equal(other, first)


def resumed(folder):
    """A run that is saved in the middle, and goes on from there in another layout, and from a state that was moved."""
    state, opt, step = started({"dp": -1}, fs.zero(3))
    other = state.layout.with_strategy(fs.zero(1))
    first, *rest = batches(3, state.layout.mesh, CONFIG.vocab_size)
    state, _ = step(state, first)
    fs.checkpoint.save(folder, state)
    moved = fs.reshard(state, other)
    loaded = [fs.checkpoint.load(folder, other, opt=opt), fs.checkpoint.load(folder, other)]
    for read in loaded:
        assert_bitwise_equal(bits(read), bits(moved), "read as moved")
    assert fs.tree.flatten(loaded[0].opt_state)[1] == fs.tree.flatten(loaded[1].opt_state)[1]
    ends = []
    for run in (state, moved, *loaded):
        for batch in rest:
            run, metrics = step(run, batch)
        ends.append((metrics.loss, whole_state(run)))
        assert_bitwise_equal(ends[-1], ends[0])


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    run_ranks(resumed, 2, tmp_path / "1")
    manifest = fs.checkpoint.metadata(tmp_path / "1")
    layout = fs.checkpoint.layout_of(manifest, fs.AbstractMesh(("dp",), (4,)))
    assert layout.precision == NARROW
    fs.checkpoint.reshard_checkpoint(tmp_path / "1", tmp_path / "four", {"dp": 4}, fs.zero(3))
    wq = "opt_state.states.1.nu.blocks.wq"
    assert manifest.tree[f"{wq}.codes"].shape == (2, 64, 64)
    assert manifest.tree[f"{wq}.scales_1x32"].shape == (2, 64, 2)
    alone = [fs.checkpoint.load(tmp_path / name, planned_alone()) for name in ("1", "four")]
    assert_bitwise_equal(bits(alone[0]), bits(alone[1]))


def planned_alone():
    return fs.plan_layout(MODEL, fs.make_mesh(device="cpu"), strategy=fs.zero(0), precision=NARROW)


def refused(donate):
    """A step with a NaN in the weights of one rank, at whose verdict nobody looks."""
    state, _, step = started({"dp": -1}, fs.zero(3), donate=donate, check="async")
    first, second = batches(2, state.layout.mesh, CONFIG.vocab_size)
    state, _ = step(state, first)
    wrong = state.replace(params=fs.tree.map(torch.clone, state.params))
    if torch.distributed.get_rank() == 1:
        local_of(wrong.params["head"]["norm"]).view(-1)[:1] = torch.nan
    before = bits(wrong)
    with counting_host_reads() as seen:
        same, metrics = step(wrong, second)
    assert seen.reads == [], "codes are made without a look at them"
    assert bool(metrics.skipped)
    assert_bitwise_equal(bits(same), before, "after a refused step")
    with pytest.raises(NonFiniteError):
        print(metrics.loss)


@pytest.mark.parametrize("donate", [True, pytest.param(False, marks=full)])
def test_a_refused_step_leaves_every_code_and_reads_nothing(donate):
    run_ranks(refused, 2, donate)


BIG = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=512, dim=256, layers=2, heads=4, kv_heads=2, intermediate_size=704, tied=True)
)


def held():
    layout = fs.plan_layout(BIG, mesh_of({"dp": -1}), strategy=fs.zero(3), precision=NARROW)
    opt = fs.adamw(1e-3)
    state = fs.init_state(BIG, opt, fs.random.key(0), layout)
    measured = fs.debug.state_bytes((state.params, state.main, state.opt_state))
    assert measured == layout.memory(opt).state == layout.memory().state + 8, "and a count"
    return measured, sum(x.numel() for x in fs.tree.leaves(state.params))


def test_bytes_of_a_parameter():
    runs = run_ranks(held, 2)
    assert sum(x for x, _ in runs) / runs[0][1] < 4.08, "norms are in float32"
    model, mesh = fs.models.presets.llama3_8b().model(), fs.AbstractMesh(("dp",), (64,))
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), precision=NARROW)
    parameters = sum(math.prod(leaf.shape) for leaf in layout.leaves)
    assert round(64 * layout.memory(fs.adamw(1e-3)).state / parameters, 2) == 4.06
