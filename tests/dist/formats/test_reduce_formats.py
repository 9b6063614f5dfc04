"""Gradients whose terms travel as codes: strategies, transports and memory agree in every bit; errors have a bound."""

import math
from dataclasses import replace

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import ConfigError, NonFiniteError
from fsharding.comm.reduce import sum_rows
from fsharding.formats import codec
from fsharding.formats.precision import KEEP
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.decoders import DecoderCase
from tests.helpers import TRANSPORTS, full, whole
from tests.training import DP, OUTER, ZEROS, train

STOCHASTIC = formats.MXFP4.with_rounding("stochastic")
FORMATS = {
    "mxfp8": formats.MXFP8, "nvfp4": formats.NVFP4, "tensor": formats.TENSORWISE, "row": formats.ROWWISE,
    "128x128": formats.E4M3_128x128, "stochastic": STOCHASTIC,
}  # fmt: skip
ROUGH = fs.models.DecoderConfig(vocab_size=32, dim=36, layers=2, heads=2, kv_heads=1, intermediate_size=50, bias=True)
LARGE = fs.models.DecoderConfig(vocab_size=32, dim=96, layers=1, heads=2, kv_heads=1, intermediate_size=160)


def reducing(format, **roles):
    return fs.Precision(params=torch.float32, compute=torch.bfloat16, reduce=format, **roles)


def trained(runs):
    """Several trainings on the same ranks: (strategy, axes, options of `train`) of each."""
    return [train(strategy, axes, **options) for strategy, axes, options in runs]


def on_ranks(ranks, runs):
    """What rank 0 saw; the others must have seen the same bits."""
    first, *others = run_ranks(trained, ranks, runs)
    for other in others:
        assert_bitwise_equal(other, first, "the ranks' results")
    return first


@pytest.mark.parametrize(
    ("ranks", "axes", "config", "names"),
    [
        pytest.param(3, DP, ROUGH, ("nvfp4", "tensor", "stochastic"), id="3-rough"),
        pytest.param(3, DP, LARGE, ("mxfp8", "stochastic"), id="3-large"),
        pytest.param(3, DP, LARGE, FORMATS, marks=full, id="3-large-all"),
        pytest.param(4, {"dp": 2, "cp": 2}, ROUGH, FORMATS, marks=full, id="4-rough"),
        pytest.param(2, DP, LARGE, FORMATS, marks=full, id="2-large"),
    ],
)
def test_strategies_agree_bitwise(ranks, axes, config, names):
    """Sums of few elements, which all ranks add, and of many, of which each rank adds a part."""
    plain = on_ranks(ranks, [(fs.zero(3), axes, {"precision": fs.BF16, "config": config, "steps": 1})])[0]
    for name in names:
        how = {"precision": reducing(FORMATS[name]), "config": config, "steps": 1}
        first, *others = on_ranks(ranks, [(strategy, axes, how) for strategy in ZEROS])
        for strategy, run in zip(ZEROS[1:], others, strict=True):
            assert_bitwise_equal(run, first, f"{name}, {strategy}")
        assert first.norms != plain.norms
        torch.testing.assert_close(first.losses, plain.losses, rtol=2e-2, atol=0)


def test_hybrids_agree_bitwise():
    for format in (formats.MXFP8, STOCHASTIC):
        how = {"precision": reducing(format), "config": ROUGH, "steps": 1}
        places = [
            (fs.zero(3), DP),
            (fs.hybrid(), OUTER),
            (fs.hybrid(opt_state=True), OUTER),
            (fs.hybrid(fs.zero(0)), OUTER),
        ]
        first, *others = on_ranks(4, [(strategy, axes, how) for strategy, axes in places])
        for run in others:
            assert_bitwise_equal(run, first)


def test_where_gradients_are_reduced_with_each_microbatch_strategies_agree_bitwise():
    how = {"precision": reducing(STOCHASTIC, gather=formats.MXFP8), "config": ROUGH, "steps": 2, "microbatches": 2}
    zero0, zero1, zero2, zero3 = on_ranks(2, [(strategy, DP, how) for strategy in ZEROS])
    assert_bitwise_equal(zero2, zero3)
    assert_bitwise_equal(zero0, zero1)
    torch.testing.assert_close(zero0.losses, zero3.losses, rtol=2e-2, atol=0)


def trained_in_pieces(size, runs):
    with large_from(size):
        return trained(runs)


def test_transports_and_early_gradients_agree_bitwise():
    how = {"precision": reducing(STOCHASTIC), "config": LARGE, "steps": 2}
    runs = [(strategy, DP, {**how, "transport": name}) for name in TRANSPORTS for strategy in (fs.zero(0), fs.zero(3))]
    # A format means ordered sums.
    runs += [(fs.zero(3), DP, {**how, "precision": replace(reducing(STOCHASTIC), sums="native", keep=())})]
    runs += [(fs.zero(3), DP, {**how, "precision": replace(reducing(STOCHASTIC), sums="ordered", keep=())})]
    early, late = (run_ranks(trained_in_pieces, 2, size, runs)[0] for size in (1, 1 << 30))
    assert_bitwise_equal(early, late)
    for run in early[1:-2]:
        assert_bitwise_equal(run, early[0])
    torch.testing.assert_close(early[-1].losses, early[-2].losses, rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------------------------- what is summed
SHAPES = {"w": (2, 9, 70), "v": (64, 48), "bias": (5,), "norm": (3, 32)}


def term(name, rank, number):
    """The gradient that a rank has of a leaf in a microbatch: of unlike sizes, and with zeros."""
    noise = torch.Generator().manual_seed(100 * rank + number)
    x = torch.randn(SHAPES[name], generator=noise)
    return x * 2.0 ** torch.randint(-12, 12, (), generator=noise) * (x.abs() > 0.1)


def loss(params, rank, number):
    unit = fs.gather_unit(params)
    return sum((x * term(name, rank, number)).sum() for name, x in unit.items())


def gradients(format, level, microbatches, seed):
    mesh = fs.make_mesh(dp=-1)
    rank, _ = data_rank_and_size(mesh)
    how = fs.Precision(reduce=format)
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    layout = fs.plan_layout(values, mesh, strategy=fs.zero(level), precision=how)
    params, held = fs.shard(values, layout), None
    for number in range(microbatches):
        last = number + 1 == microbatches
        run = fs.value_and_grad(
            loss, grads=layout.main if last else layout.grads, precision=how, mean=False,
            key=fs.random.fold_in(fs.random.key(seed), number),
        )  # fmt: skip
        _, held = run(params, rank, number, accumulate=held)
    return whole(held)


def gradients_of_all(settings):
    return [gradients(*one) for one in settings]


def steps_off(x, format):
    """How far a term may be from what is sent of it: by element."""
    block = format.sizes(tuple(x.shape))
    amax = codec.amaxes(x, block)
    outer = amax.flatten(-2).amax(-1) if format.has_outer else None
    factors = codec.factors(codec.scales_of(amax, format, outer), format)
    for dim, along in ((-2, block[0]), (-1, block[1])):
        factors = factors.index_select(dim, torch.arange(x.shape[dim]) // along)
    element, size = format.element, (x.double() / factors.double()).abs()
    exponent = size.clamp(min=2.0**element.least).log2().floor()
    step = torch.exp2(exponent - element.mantissa) * (1.0 if format.stochastic else 0.5)
    return factors.double() * torch.maximum(step, size - element.largest)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_sums_are_those_of_rounded_terms_and_their_errors_have_a_bound(microbatches):
    ranks = 3
    settings = [(format, level, microbatches, 0) for format in FORMATS.values() for level in (0, 1, 3)]
    found = run_ranks(gradients_of_all, ranks, settings)
    for settled in zip(settings, *found, strict=True):
        (format, level, *_), mine = settled[0], settled[1]
        at_end = microbatches > 1 and level < 2
        for name in SHAPES:
            terms = [[term(name, rank, number) for number in range(microbatches)] for rank in range(ranks)]
            exact = sum(x.double() for row in terms for x in row)
            slack = 1e-6 * sum(x.double().abs() for row in terms for x in row)
            coded = name in ("w", "v")
            sent = [[sum(row)] if at_end else row for row in terms]
            bound = sum(steps_off(x, format) for row in sent for x in row) if coded else torch.zeros_like(exact)
            assert ((mine[name].double() - exact).abs() <= bound + slack).all(), (format, level, name)
            if not coded:
                rows = [
                    sum_rows([row[i].reshape(-1) for row in sent], range(ranks), torch.float32)
                    for i in range(len(sent[0]))
                ]
                assert_bitwise_equal(mine[name], sum(rows).view(SHAPES[name]))


def test_stochastic_terms_have_the_right_mean():
    """Every rank, every microbatch and every key rounds by numbers of its own."""
    # Powers of two as scales would leave numbers above the largest one, whose mean is too small.
    format = formats.Blocks(formats.E2M1, (1, 32), rounding="stochastic")
    draws = run_ranks(gradients_of_all, 2, [(format, 3, 2, seed) for seed in range(48)])[0]
    exact = {name: sum(term(name, rank, number) for rank in range(2) for number in range(2)) for name in ("w", "v")}
    for name, want in exact.items():
        errors = torch.stack([x[name] - want for x in draws])
        one, mean = errors.square().mean().sqrt(), errors.mean(0).square().mean().sqrt()
        assert mean < 1.2 * one / math.sqrt(len(draws)), "errors of 48 keys are independent"


def rounds_without_a_key():
    layout = fs.plan_layout({"w": torch.zeros(8, 8)}, fs.make_mesh(dp=2), precision=fs.Precision(reduce=STOCHASTIC))
    params = fs.shard({"w": torch.zeros(8, 8)}, layout)
    with pytest.raises(ConfigError) as caught:
        fs.value_and_grad(lambda p: fs.gather_unit(p)["w"].sum(), precision=layout.precision)(params)
    return str(caught.value)


def test_stochastic_terms_need_a_key():
    (text,) = {*run_ranks(rounds_without_a_key, 2)}
    assert text == (
        "fs.value_and_grad needs a key to round partial gradients of w stochastically.\n"
        "Pass a key, int64[2], a different one in each step: fs.value_and_grad(..., key=fs.random.key(0))."
    )


# ---------------------------------------------------------------------------------------------------------- not finite
def refused(format, level, value):
    """A step in which one element of one rank's gradient is not finite; the text of the refusal."""
    mesh = fs.make_mesh(dp=2)
    rank, _ = data_rank_and_size(mesh)
    draws = {name: fs.random.full(shape, 1.0) for name, shape in SHAPES.items()}
    how = fs.Precision(reduce=format)
    layout = fs.plan_layout(draws, mesh, strategy=fs.zero(level), precision=how)

    def loss_fn(params, batch):
        unit = fs.gather_unit(params)
        factor = torch.ones(SHAPES["v"])
        # Past where a cast to 8 bits would have become the largest number.
        factor[40, 33] = value if rank == 1 else 1.0
        return sum((x if name != "v" else Scaled.apply(x, factor)).sum() for name, x in unit.items())

    state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
    with pytest.raises(NonFiniteError) as caught:
        fs.make_train_step(loss_fn, fs.sgd(0.1))(state, {"x": torch.zeros(2)})
    return str(caught.value).splitlines()


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("format", ["mxfp8", "stochastic", "nvfp4"])
def test_what_is_not_finite_is_refused_by_name(format):
    for level, value in ((0, math.inf), (3, math.nan), (3, -math.inf)):
        for lines in run_ranks(refused, 2, FORMATS[format], level, value):
            assert lines[0] == "train step refused: loss or gradients are not finite."
            assert lines[2:-1] == ["  params.v: its gradient is not finite"]


# --------------------------------------------------------------------------------------------------------------- bytes
KEPT = (*KEEP, "blocks[-1]")
SENT = [
    ("dp", (2,), LARGE, fs.zero(3), 2, {"reduce": formats.MXFP8, "gather": formats.MXFP8}),
    (
        "dp",
        (2,),
        ROUGH,
        fs.zero(3),
        1,
        {"reduce": STOCHASTIC, "gather": formats.NVFP4.with_rounding("stochastic"), "keep": KEPT},
    ),
    ("dp", (2,), ROUGH, fs.zero(1), 2, {"reduce": formats.NVFP4, "gather": formats.TENSORWISE, "keep": KEPT}),
    ("dp", (2,), ROUGH, fs.zero(2), 2, {"reduce": formats.MXFP4, "gather": formats.MXFP8, "sums": "native"}),
    ("dp", (3,), LARGE, fs.zero(0), 2, {"reduce": formats.MXFP8, "gather": formats.E4M3_128x128}),
    ("dp", (3,), LARGE, fs.zero(3), 1, {"reduce": formats.E4M3_1x128, "gather": formats.NVFP4}),
    ("replica dp", (2, 2), LARGE, fs.hybrid(), 2, {"reduce": formats.MXFP8, "gather": formats.MXFP8}),
    (
        "replica dp",
        (2, 2),
        ROUGH,
        fs.hybrid(opt_state=True),
        2,
        {"reduce": formats.TENSORWISE, "gather": formats.NVFP4},
    ),
    ("dp tp", (2, 2), LARGE, fs.zero(3), 2, {"reduce": formats.MXFP8, "gather": formats.NVFP4}),
    ("dp tp", (2, 2), LARGE, fs.zero(0), 1, {"reduce": formats.NVFP4, "gather": formats.MXFP8}),
    ("pp dp", (2, 2), ROUGH, fs.zero(3), 2, {"reduce": STOCHASTIC, "gather": formats.ROWWISE, "keep": KEPT}),
]


def case(names, sizes, config, strategy, microbatches, roles):
    mesh = fs.AbstractMesh(tuple(names.split()), sizes)
    how = fs.Precision(params=torch.float32, compute=torch.bfloat16, **roles)
    return DecoderCase(
        config,
        mesh,
        strategy,
        rows=24,
        length=4,
        steps=1,
        microbatches=microbatches,
        precision=how,
        gather="microbatch",
    )


def trains(cases):
    return [case.train(foresee=True) for case in cases]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_step_sends_what_is_expected(ranks):
    """`train` compares at every step."""
    cases = [one for one in (case(*row) for row in SENT) if one.ranks == ranks]
    first, *others = run_ranks(trains, ranks, cases)
    for other in others:
        assert_bitwise_equal(other, first, "the ranks' losses and norms")
