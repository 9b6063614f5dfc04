"""Weights in low precision on ranks: rounded and gathered is gathered and rounded; no strategy changes a bit."""

import dataclasses
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import ConfigError, LayoutError, NonFiniteError
from fsharding.comm.codes import Quantizing
from fsharding.comm.handles import Memory
from fsharding.comm.move import plan_move
from fsharding.formats import Blocks, codec
from fsharding.formats.precision import KEEP, MXFP8, Precision
from fsharding.mesh.abstract_mesh import AXES
from fsharding.sharding.named_sharding import NamedSharding
from fsharding.testing import run_ranks
from fsharding.transforms.unit_plan import whole
from tests.helpers import examples, full, mesh_of, refusal

MODEL = fs.models.decoder(
    fs.models.DecoderConfig(vocab_size=64, dim=48, layers=3, heads=4, kv_heads=2, intermediate_size=80)
)
MODELS = {"dense": fs.models.DecoderConfig(vocab_size=50, dim=48, layers=4, heads=4, kv_heads=4, intermediate_size=72)}
MODELS["experts"] = dataclasses.replace(MODELS["dense"], experts=fs.models.Experts(4, 2, 20))
SMALL = Blocks(formats.E4M3, (32, 32))
FORMATS = {
    "tensor": formats.TENSORWISE, "row": formats.ROWWISE, "blocks": SMALL, "mx": formats.MXFP8, "nvfp4": formats.NVFP4,
    "mxfp4": formats.MXFP4, "1x128": formats.E4M3_1x128, "e5m2": formats.MXFP8_E5M2,
    "mx across": formats.MXFP8.across((32, 32)), "nvfp4 across": formats.NVFP4.across((16, 16)),
}  # fmt: skip
STOCHASTIC = {f"{name} stochastic": FORMATS[name].with_rounding("stochastic") for name in ("mx", "nvfp4", "tensor")}


# -------------------------------------------------------------------------------------------------------- the first law
def both_ways(cases):
    """For each case: codes and numbers of the gathered whole, from rounded shards, and from the whole leaf."""
    return [
        both(NamedSharding(mesh_of(axes), fs.P(*spec)).simplified(), shape, format, seed)
        for axes, spec, shape, format, seed in cases
    ]


def both(sharding, shape, format, seed):
    """`both_ways` of one leaf."""
    device = torch.device("cpu")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    box, gathered, key = sharding.box(shape), whole(sharding), torch.tensor([seed, 5])
    shard = x[tuple(slice(a, b) for a, b in box)]

    def noise(_):
        return formats.uniform_at(key, 1, tuple(shape), [(r,) for r in box], device)

    def moved(stays):
        move = plan_move(
            [sharding], [gathered], [tuple(shape)], Quantizing(torch.float32, format, stays), torch.float32
        )
        return move.start([shard], Memory(device), noise=noise).wait().leaves[0]

    coded, got = moved(stays=True), moved(stays=False)
    values = codec.unpack(coded.values, coded.columns) if format.element.bits == 4 else coded.values
    scales = codec.scales_of(
        codec.amaxes(x, format.sizes(tuple(shape))), format, x.abs().amax((-2, -1)) if format.has_outer else None
    )
    drawn = formats.uniform_at(key, 1, tuple(shape), [((0, n),) for n in shape], device) if format.stochastic else None
    every = codec.encode(x, scales, format, noise=drawn)
    here = tuple(slice(a, b) for a, b in gathered.box(shape))
    return torch.equal(values, every[here]), torch.equal(got, codec.decode(every, scales, format)[here])


@st.composite
def a_cut(draw, ranks):
    axes = draw(
        st.sampled_from([{"dp": ranks}, {"dp": ranks // 2, "tp": 2}, {"tp": ranks}, {"dp": 2, "cp": ranks // 2}])
    )
    axes = {axis: size for axis, size in axes.items() if size > 1} or {"dp": ranks}
    ndim = draw(st.sampled_from([2, 2, 3]))
    shape = tuple(draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31, 32, 33, 48, 64, 100])) for _ in range(ndim))
    data = tuple(a for a in AXES if a in axes and a != "tp")
    spec = [()] * ndim
    if data:
        spec[draw(st.integers(0, ndim - 1))] = data
    if "tp" in axes:
        dim = draw(st.integers(max(0, ndim - 2), ndim - 1))
        spec[dim] = ("tp", *spec[dim])
    format = draw(st.sampled_from([*FORMATS.values(), *STOCHASTIC.values()]))
    return axes, tuple(spec), shape, format, draw(st.integers(0, 99))


@settings(examples(50, 100), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking asks ranks for minutes
@given(st.data())
def test_rounded_shards_gathered_are_the_gathered_whole_rounded(data):
    ranks = data.draw(st.sampled_from([2, 4]))
    cases = data.draw(st.lists(a_cut(ranks), min_size=10, max_size=10))
    for seen in run_ranks(both_ways, ranks, cases):
        for case, same in zip(cases, seen, strict=True):
            assert same == (True, True), case


def leaves_both_ways(axes, strategy):
    """`both` of every leaf of two decoders in their layouts, each in all formats."""
    result = {}
    for name, config in MODELS.items():
        layout = fs.plan_layout(fs.models.decoder(config), mesh_of(axes), strategy=strategy)
        for leaf in layout.leaves:
            sharding, shape = leaf.main.slice_of_mesh(), leaf.main.shape_at_rest(leaf.shape)
            if leaf.names[0] == "layers":
                sharding, shape = sharding.drop(0), shape[1:]
            if len(shape) > 1:
                for kind, format in {**FORMATS, **STOCHASTIC}.items():
                    result[name, leaf.path, kind] = both(sharding.simplified(), shape, format, len(result))
    return result


MESHES = ["dp=3", "tp=2,dp=2", "ep=2,dp=2"]
MORE_MESHES = ["dp=2", "dp=8", *(f"{axis}={size}" for axis in ("tp", "cp", "ep", "pp") for size in (2, 4))]
MORE_MESHES += ["dp=2,cp=2", "pp=2,dp=2", "pp=2,tp=2", "pp=2,cp=2", "dp=2,cp=2,tp=2", "pp=2,dp=2,tp=2"]
MORE_MESHES += ["pp=2,dp=2,ep=2", "pp=2,cp=2,tp=2", "replica=2,dp=2,tp=2"]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=full) for mesh in MORE_MESHES)])
def test_every_leaf_on_every_mesh_is_rounded_as_the_whole(mesh):
    axes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
    for strategy in (fs.zero(3), fs.hybrid(opt_state=True)):
        for seen in run_ranks(leaves_both_ways, math.prod(axes.values()), axes, strategy):
            assert {case for case, same in seen.items() if same != (True, True)} == set()


# ------------------------------------------------------------------------------------------------------------ training
def trained(cases, steps=3):
    """Losses, norms and evaluations, in bits, by case: axes, strategy, precision and what else plan_layout takes."""
    result = []
    for axes, strategy, precision, more in cases:
        mesh = mesh_of(axes)
        layout = fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision, **more)
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(3e-3))
        state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
        step = fs.make_train_step(MODEL, opt, donate=True, microbatches=2 if "pp" in axes else 1)
        generator, numbers = torch.Generator().manual_seed(0), []
        for _ in range(steps):
            tokens = torch.randint(64, (8, 17), generator=generator)
            batch = fs.local_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
            state, metrics = step(state, batch)
            numbers += [float(metrics.loss), float(metrics.grad_norm)]
        result.append((*numbers, float(fs.evaluate(MODEL, microbatches=2 if "pp" in axes else 1)(state, batch).mean)))
    return result


def with_format(format, **more):
    return Precision(params=torch.float32, compute=torch.bfloat16, gather=format, **more)


LEVELS = [fs.zero(level) for level in range(4)]


SOME = ("tensor", "blocks", "mx", "nvfp4 stochastic")
EVERY = tuple(name for name in (*FORMATS, *STOCHASTIC) if name != "1x128")  # rows are no longer than that here
CASES = [({"dp": 2}, SOME), *(pytest.param(axes, EVERY, marks=full) for axes in ({"dp": 2}, {"tp": 2, "dp": 2}))]


@pytest.mark.parametrize(("axes", "names"), CASES, ids=["some", "every", "every-tp"])
def test_no_strategy_changes_a_bit(axes, names):
    precisions = [with_format({**FORMATS, **STOCHASTIC}[name], keep=(*KEEP, "blocks[-1]")) for name in names]
    precisions += [Precision(gather=formats.MXFP8), Precision(gather=STOCHASTIC["nvfp4 stochastic"])]
    cases = [(axes, level, precision, {}) for precision in precisions for level in LEVELS]
    ranks = math.prod(axes.values())
    for result in run_ranks(trained, ranks, cases, 2, timeout=600):
        by_precision = [result[i : i + 4] for i in range(0, len(result), 4)]
        for precision, numbers in zip(precisions, by_precision, strict=True):
            assert len({*numbers}) == 1, precision
            assert all(map(math.isfinite, numbers[0]))
        assert len({numbers[0] for numbers in by_precision}) == len(precisions), "each format has numbers of its own"


def test_hsdp_hfsdp_and_pipelines_see_the_same_weights():
    mx = with_format(STOCHASTIC["mx stochastic"], keep=(*KEEP, "blocks[-1]"))
    outer = {"replica": 2, "dp": 2}
    cases = [(outer, strategy, mx, {}) for strategy in (fs.hybrid(), fs.hybrid(opt_state=True))]
    (hsdp, hfsdp), *_ = run_ranks(trained, 4, cases)
    assert hsdp == hfsdp
    one = run_ranks(trained, 1, [({"dp": 1}, fs.zero(3), mx, {})])[0][0]
    assert hsdp == pytest.approx(one, rel=3e-3)
    planned = fs.pipeline.plan_schedule("1f1b", 2, 2)
    stages = fs.pipeline.stages_of(MODEL, planned)
    cases = [({"pp": 2}, fs.zero(level), mx, {"stages": stages}) for level in (0, 1, 3)]
    ((*pipelines,), _) = run_ranks(trained, 2, cases)
    assert len({*pipelines}) == 1
    assert pipelines[0] == pytest.approx(one, rel=3e-3)


# ------------------------------------------------------------------------------------------------------ the whole state
def swapped(first, *later):
    """Losses of a run whose precision and strategy change after every second step."""
    mesh, opt = mesh_of({"dp": 2}), fs.adamw(3e-3)
    layout = fs.plan_layout(MODEL, mesh, strategy=first[1], precision=first[0])
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    step, generator, losses = fs.make_train_step(MODEL, opt), torch.Generator().manual_seed(0), []
    for precision, strategy in ((None, None), *later):
        if precision is not None:
            state = fs.reshard(state, state.layout.with_precision(precision).with_strategy(strategy))
        for _ in range(2):
            tokens = torch.randint(64, (4, 17), generator=generator)
            batch = fs.local_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
    return losses, [x.full_tensor() for x in fs.tree.leaves(state.main or state.params)]


def test_swaps_of_format_and_strategy_in_mid_run_change_no_bit_but_those_of_the_format():
    mx, nv = with_format(formats.MXFP8), with_format(STOCHASTIC["nvfp4 stochastic"])
    plain = [(fs.BF16, fs.zero(3)), (mx, fs.zero(3)), (nv, fs.zero(3)), (fs.BF16, fs.zero(3))]
    moved = [(fs.BF16, fs.zero(1)), (mx, fs.zero(0)), (nv, fs.zero(2)), (fs.BF16, fs.zero(3))]
    back = [(mx, fs.zero(1)), (mx, fs.zero(3)), (mx, fs.zero(0))]
    for runs in zip(run_ranks(swapped, 2, *plain), run_ranks(swapped, 2, *moved), strict=True):
        (losses, leaves), (others, their_leaves) = runs
        assert losses == others
        assert all(torch.equal(a, b) for a, b in zip(leaves, their_leaves, strict=True))
    never = run_ranks(swapped, 2, *[(mx, fs.zero(3))] * 3)[0]
    assert run_ranks(swapped, 2, *back)[0][0] == never[0]


def poisoned():
    """What a step says of a weight that is infinite, under strategies that round it before or after it travels."""
    texts = []
    for level in (0, 3):
        mesh, opt = mesh_of({"dp": 2}), fs.sgd(0.1)
        layout = fs.plan_layout(MODEL, mesh, strategy=fs.zero(level), precision=with_format(formats.MXFP8))
        state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
        kept = state.main or state.params
        bad = fs.tree.map_with_path(lambda p, x: x * math.inf if p == "blocks.wq" else x, kept)
        params = fs.params_from_main(bad, state.params, layout) if state.main is not None else bad
        state = state.replace(params=params, main=bad if state.main is not None else None)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        with pytest.raises(NonFiniteError) as error:
            fs.make_train_step(MODEL, opt)(state, {"tokens": tokens, "targets": tokens})
        texts.append(str(error.value))
    return texts


def test_no_cast_hides_what_is_not_finite():
    for texts in run_ranks(poisoned, 2):
        for text in texts:
            assert "params.blocks.wq: it is not finite itself" in text


# ---------------------------------------------------------------------------------------------------------- refusals
def test_cuts_on_borders_of_blocks():
    sizes = fs.models.DecoderConfig(vocab_size=64, dim=96, layers=2, heads=4, kv_heads=4, intermediate_size=128)
    mesh, model = fs.AbstractMesh(("dp",), (2,)), fs.models.decoder(sizes)
    layout = fs.plan_layout(model, mesh, precision=MXFP8, align=True)
    specs = {leaf.path: leaf.params.spec for leaf in layout.leaves}
    assert specs["blocks.wq"] == fs.P(None, "dp") and specs["blocks.down"] == fs.P(None, "dp")
    assert fs.plan_layout(model, mesh, precision=MXFP8).params["blocks"]["wq"].spec == fs.P(None, None, "dp")
    precision = with_format(formats.TENSORWISE, keep=(*KEEP, "w[kovd]", "*gate*", "*up*", "*down*"))
    text = refusal(fs.plan_layout, model, mesh, precision=precision, align=True, kind=LayoutError)
    assert text == (
        "fs.plan_layout cannot shard these dims at block boundaries of float8_e4m3fn[tensor, float32].\n"
        "  blocks.wq is float32[2, 96, 96], dim 2: 96 over dp gives 2 shards of 48, blocks have 96\n"
        "Make the sizes multiples of shards and blocks, keep such leaves in the dtype of compute, as in"
        ' fs.Precision(keep=(..., "wq")), use smaller blocks, or leave align out: ranks that share a block then'
        " all-reduce its largest magnitude."
    )


def test_a_step_rounds_as_its_state_does():
    layout = fs.plan_layout(MODEL, fs.make_mesh(device="cpu"), precision=MXFP8)
    opt = fs.sgd(0.1)
    state = fs.init_state(MODEL, opt, fs.random.key(0), layout)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    step = fs.make_train_step(MODEL, opt, precision=fs.BF16)
    text = refusal(step, state, {"tokens": tokens, "targets": tokens}, kind=ConfigError)
    assert "Leave precision= out, or move the state: fs.reshard(state, layout.with_precision(precision))." in text


def test_stochastic_rounding_wants_a_key():
    layout = fs.plan_layout(MODEL, fs.make_mesh(device="cpu"))
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), layout)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch, precision = {"tokens": tokens, "targets": tokens}, with_format(STOCHASTIC["mx stochastic"])
    run = fs.value_and_grad(fs.model_loss(MODEL), precision=precision)
    text = refusal(run, state.params, batch, kind=ConfigError)
    assert text == (
        "fs.gather_unit needs a key to round blocks.down stochastically.\n"
        "Pass a key, int64[2], a different one in each step: fs.value_and_grad(..., key=fs.random.key(0))."
    )
    key = fs.random.key(1)
    (_, count), _ = fs.value_and_grad(fs.model_loss(MODEL), precision=precision, key=key)(state.params, batch)
    assert int(count) == 16
