"""Moments in low precision on one process: what a state holds, what an update makes of it, what is refused."""

import pytest
import torch

import fsharding as fs
from fsharding import formats, optim
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.checkpoint.serialized_layout import describe, rebuild
from fsharding.formats import codec
from fsharding.formats.precision import Precision
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import decoded, normal_tree, refusal

SHAPES = {"blocks": {"w": (3, 48, 40)}, "odd": (70, 61), "bias": (5000,), "small": (8, 16)}
MX = formats.MXFP8


def moments_of(moments):
    return [*map(decoded, optim_leaves(moments))]


def optim_leaves(moments):
    return fs.tree.leaves(moments, is_leaf=lambda x: isinstance(x, optim.CodedMoment))


def test_large_leaves_of_two_dims_are_codes_and_scales():
    state = fs.adamw(1e-3, moments=MX).init(normal_tree(SHAPES, 0))
    named = {path: (str(x.dtype)[6:], tuple(x.shape)) for path, x in fs.tree.named_leaves(state.nu).items()}
    assert named == {
        "bias": ("float32", (5000,)),
        "blocks.w.codes": ("uint8", (3, 48, 40)),
        "blocks.w.scales_1x32": ("uint8", (3, 48, 2)),
        "odd.codes": ("uint8", (70, 61)),
        "odd.scales_1x32": ("uint8", (70, 2)),
        "small": ("float32", (8, 16)),
    }
    assert (state.mu["odd"].root, state.nu["odd"].root) == (False, True)
    assert fs.tree.at(state, "nu.odd.scales_1x32") is state.nu["odd"].scales


OPTIMIZERS = {
    "adamw": (fs.adamw, {"weight_decay": 0.1}),
    "lion": (optim.lion, {"weight_decay": 0.1}),
    "sgd": (fs.sgd, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (fs.sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("format", [MX, formats.E4M3_128x128.with_rounding("stochastic")], ids=str)
def test_updates_are_those_of_moments_in_float32_but_for_the_rounding(name, format):
    make, settings = OPTIMIZERS[name]
    params = normal_tree(SHAPES, 0)
    coded, plain = make(0.01, moments=format, **settings), make(0.01, **settings)
    states = [coded.init(params), plain.init(params)]
    for i in range(3):
        grads = normal_tree(SHAPES, i + 1)
        kept = fs.tree.map(torch.clone, (states[0], grads))
        (one, states[0]), (other, states[1]), (again, _) = (
            opt.update(grads, state, params)
            for opt, state in ((coded, states[0]), (plain, states[1]), (coded, kept[0]))
        )
        assert_bitwise_equal(again, one, "the same state gives the same update")
        assert_bitwise_equal(grads, kept[1], "nothing is overwritten")
        if i == 0:
            assert_bitwise_equal(one, other, "the first update rounds nothing")
            continue
        for path, x in fs.tree.named_leaves(other).items():
            error = (fs.tree.at(one, path) - x).norm() / x.norm()
            assert error < (0.25 if name == "lion" else 0.05), (path, error)
            if path in ("bias", "small"):
                assert_bitwise_equal(fs.tree.at(one, path), x)


def test_apply_is_update_and_add():
    params, grads = normal_tree(SHAPES, 0), normal_tree(SHAPES, 1)
    opt = fs.adamw(0.01, weight_decay=0.1, moments=MX)
    state = opt.init(params)
    applied, after = optim.apply_gradients(opt, grads, state, params)
    updates, other = opt.update(grads, state, params)
    assert_bitwise_equal(after, other)
    for x, y in zip(fs.tree.leaves(applied), fs.tree.leaves(optim.apply_updates(params, updates)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
    donated = optim.apply_gradients(
        opt, grads, *fs.tree.map(torch.clone, (state, params)), optim.UpdateContext(donate=True)
    )
    assert_bitwise_equal(donated, (applied, after))


def test_a_muon_keeps_its_momentum_so_too():
    params = {"w": normal_tree(SHAPES, 0)["odd"]}
    opts = [optim.muon(0.01, moments=moments) for moments in (MX, None)]
    states = [opt.init(params) for opt in opts]
    for i in range(2):
        grads = {"w": normal_tree(SHAPES, i + 1)["odd"]}
        results = [opt.update(grads, state, params) for opt, state in zip(opts, states, strict=True)]
        states = [state for _, state in results]
    one, other = (updates["w"] for updates, _ in results)
    assert isinstance(states[0].mu["w"], optim.CodedMoment)
    assert (one - other).norm() / other.norm() < 0.1


def test_a_second_moment_decays_when_gradients_end():
    """To the nearest, a root that falls by 2.5 % would stay where it is for ever."""
    params = {"w": torch.zeros(64, 64)}
    opt = fs.adamw(0.0, b2=0.95, moments=MX)
    _, state = opt.update({"w": torch.ones(64, 64)}, opt.init(params))
    (before,) = moments_of(state.nu)
    for _ in range(20):
        _, state = opt.update({"w": torch.zeros(64, 64)}, state)
    (after,) = moments_of(state.nu)
    assert abs(float(after.sqrt().mean() / before.sqrt().mean()) / 0.95**10 - 1) < 0.05


def test_a_second_moment_above_zero_stays_so_beside_a_large_one():
    params = {"w": torch.zeros(64, 64)}
    grads = {"w": torch.full((64, 64), 1e-7)}
    grads["w"][:, ::32], grads["w"][:, 1::32] = 1e3, 0.0
    opt = fs.adamw(1.0, moments=MX)
    state = opt.init(params)
    for _ in range(3):
        updates, state = opt.update(grads, state)
    (nu,) = moments_of(state.nu)
    assert torch.equal(nu > 0, grads["w"] > 0)
    assert float(updates["w"].abs().max()) < 1.2, "an update is not divided by zero"


def test_what_cannot_be_kept_is_refused():
    assert refusal(fs.adamw, 1e-3, moments=formats.NVFP4, kind=ConfigError) == (
        "fs.adamw cannot keep moments as float4_e2m1fn_x2[1x16, e4m3].\n"
        "Use an 8-bit format without a scale for full matrices, such as fs.formats.MXFP8."
    )
    assert "  moments=float4_e2m1fn_x2[1x32, e8m0], which takes a dtype, or an 8-bit format" in refusal(
        Precision, moments=formats.MXFP4
    )
    context, params = optim.InitContext(moments=MX), {"w": torch.ones(64, 64)}
    assert refusal(optim.adafactor().init, params, context, kind=ConfigError) == (
        "fs.optim.adafactor cannot keep moments as float8_e4m3fn[1x32, e8m0]: it has means of moments, and no moments."
        "\nPass moments=torch.float32 to it, or a dtype as the moments of the layout's precision."
    )
    text = refusal(optim.from_torch(torch.optim.Adam, lr=1e-3).init, params, context, kind=ConfigError)
    assert text.startswith("fs.optim.from_torch cannot keep moments as float8_e4m3fn[1x32, e8m0]: torch's optimizer")
    assert refusal(Precision, rounding="stochastic") == (
        'fs.Precision got rounding="stochastic" with params=None.\n'
        "Write params=torch.bfloat16, the only dtype of main parameters that is rounded so, or leave it out."
    )
    assert refusal(Precision, rounding="up") == "fs.Precision got rounding='up'.\nUse one of nearest, stochastic."


def test_a_state_is_rebuilt_from_its_description():
    state = fs.adamw(1e-3, moments=formats.ROWWISE.with_rounding("stochastic")).init(normal_tree(SHAPES, 0))
    named, plain = fs.tree.named_leaves({"opt_state": state}), describe(state)
    again = rebuild(plain, lambda path: named[path])
    assert fs.tree.flatten(again)[1] == fs.tree.flatten(state)[1]
    plain["fields"]["mu"]["dict"]["odd"]["coded"]["dtype"] = "float8_e4m3"
    text = refusal(rebuild, plain, lambda path: named[path], kind=CheckpointError)
    assert "opt_state.mu.odd is a " in text


# ------------------------------------------------------------------------------------------ bfloat16 parameters, by key
@pytest.mark.parametrize(("dtype", "last_bit"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)], ids=str)
def test_the_mean_of_rounding_by_key_is_exact(dtype, last_bit):
    def rounded(x, noise):
        return codec.round_stochastic(x, dtype, noise)

    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    x[::2] *= 1e-6  # in float16 below its normal numbers
    generator, draws = torch.Generator().manual_seed(1), 64
    mean = torch.stack([rounded(x, torch.rand(x.shape, generator=generator)).float() for _ in range(draws)]).mean(0)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        nearest = (x[half].to(dtype).float() - x[half]).abs().mean()
        assert (mean - x)[half].abs().mean() < nearest / 4
    exact = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.finfo(dtype).smallest_normal * last_bit])
    assert_bitwise_equal(rounded(exact, torch.full((7,), 0.999)), exact.to(dtype))
    assert rounded(torch.tensor([torch.nan]), torch.zeros(1)).isnan().all()
    up, down = (rounded(torch.tensor([1.0 + last_bit / 4]), torch.tensor([u])) for u in (0.99, 0.01))
    assert (float(up), float(down)) == (1.0 + last_bit, 1.0)
    least = torch.finfo(dtype).smallest_normal * last_bit
    up, down = (rounded(torch.tensor([-1.25 * least]), torch.tensor([u])) for u in (0.01, 0.99))
    assert {float(up), float(down)} == {-least, -2 * least}


SMALL = 2.0**-10  # a quarter of what moves a bfloat16 of 1 to its neighbor


BELOW_HALF_A_STEP = {
    "sgd": (lambda: fs.sgd(SMALL), 1.0),
    "momentum": (lambda: fs.sgd(SMALL / 8, momentum=0.875), 1 - 0.875 * (1 - 0.875**16) / (16 * 0.125)),
    "adamw": (lambda: fs.adamw(SMALL, eps=0.0), 1.0),
    "lion": (lambda: optim.lion(SMALL), 1.0),
    "adafactor": (lambda: optim.adafactor(SMALL), 1.0),
    "chain": (lambda: optim.chain(optim.clip_by_global_norm(1e9), fs.sgd(SMALL), optim.ema(0.5)), 1.0),
    "labels": (lambda: optim.multi_transform({"a": fs.sgd(SMALL)}, {"w": "a"}), 1.0),
    "lookahead": (lambda: optim.lookahead(fs.sgd(SMALL), every=2, share=0.5), 0.5),
    "lookahead of adamw": (lambda: optim.lookahead(fs.adamw(SMALL, eps=0.0), every=4, share=0.25), 0.25),
    "torch's sgd": (lambda: optim.from_torch(torch.optim.SGD, lr=SMALL), 1.0),
    "torch's adam": (lambda: optim.from_torch(torch.optim.Adam, lr=SMALL, eps=0.0), 1.0),
    "torch's rprop": (lambda: optim.from_torch(torch.optim.Rprop, lr=SMALL, etas=(0.5, 1.0 + 1e-9)), 1.0),
    "pair": (
        lambda: optim.GradientTransformation(
            lambda params: None, lambda g, state, params=None: (fs.tree.map(lambda x: -SMALL * x, g), state)
        ),
        1.0,
    ),
}


@pytest.mark.parametrize(("make", "moves"), BELOW_HALF_A_STEP.values(), ids=BELOW_HALF_A_STEP)
def test_an_update_below_half_a_step_is_not_lost(make, moves):
    """Gradients of -1 add `moves * SMALL` a step to weights of 1."""
    opt = make()
    grads = {"w": torch.full((64, 64), -1.0)}
    ends = []
    for rounding in ("nearest", "stochastic"):
        params = {"w": torch.ones(64, 64, dtype=torch.bfloat16)}
        state = opt.start(params)
        for step in range(16):
            params, state = optim.apply_gradients(
                opt,
                grads,
                state,
                params,
                optim.UpdateContext(key=fs.random.key(3), step=torch.tensor(step), rounding=rounding),
            )
        assert params["w"].dtype == torch.bfloat16
        ends.append(float(params["w"].float().mean()))
    assert ends[0] == 1.0 and abs(ends[1] - (1.0 + 16 * moves * SMALL)) < 1e-3


def test_averages_of_bfloat16_parameters_move():
    """An average of weights of 2 that began at 1 is 2 - decay^n after n updates."""
    opt = optim.ema(0.999)
    state = opt.init({"w": torch.ones(8, dtype=torch.bfloat16)})
    params, none = {"w": torch.full((8,), 2.0, dtype=torch.bfloat16)}, {"w": torch.zeros(8)}
    for _ in range(100):
        _, state = opt.update(none, state, params)
    assert_trees_close(optim.ema_of(state), {"w": torch.full((8,), 2 - 0.999**100)}, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_an_optimizer_of_torch_computes_in_float32(kind):
    """An update of bfloat16 parameters is what torch gives for their values in float32, rounded once."""
    values = normal_tree(SHAPES, 0)
    narrow = fs.tree.map(lambda x: x.bfloat16(), values)
    opt, leaves = optim.from_torch(kind, lr=0.02), [x.float().requires_grad_() for x in fs.tree.leaves(narrow)]
    for x, grad in zip(leaves, fs.tree.leaves(normal_tree(SHAPES, 1)), strict=True):
        x.grad = grad
    kind(leaves, lr=0.02).step()
    found, _ = optim.apply_gradients(opt, normal_tree(SHAPES, 1), opt.init(narrow), narrow)
    want = [x.detach().bfloat16() for x in leaves]
    assert_trees_close([x.float() for x in fs.tree.leaves(found)], [x.float() for x in want], rtol=2**-8, atol=0)
    assert sum((a != b).sum() for a, b in zip(fs.tree.leaves(found), want, strict=True)) <= 3  # p + (new - p) is no new
