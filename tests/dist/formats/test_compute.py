"""Loss functions that see weights as codes and scales: the numbers are those of dequantized weights, on every mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsharding as fs
from fsharding import formats, policies
from fsharding.base.errors import ConfigError
from fsharding.formats.precision import KEEP, Precision
from fsharding.testing import run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.helpers import cpu_multiplies_codes, full, mesh_of, refusal

SIZES = {"vocab_size": 40, "dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 72}
MODELS = {
    "dense": fs.models.DecoderConfig(**SIZES),
    "experts": fs.models.DecoderConfig(
        **SIZES, experts=fs.models.Experts(count=4, active=2, intermediate_size=24, shared=1)
    ),
    "latent": fs.models.DecoderConfig(
        **SIZES, attention=fs.models.MLA(heads=4, q_rank=16, kv_rank=16, plain_dim=8, rotary_dim=4, value_dim=8)
    ),
}
ZERO3 = fs.zero(3)


def in_format(format, *, computes, **more):
    """A precision whose weights have a format; `computes` says whether the loss function sees codes."""
    if computes:
        return Precision(params=torch.float32, compute=format, **more)
    return Precision(params=torch.float32, compute=torch.bfloat16, gather=format, **more)


def trained(cases, steps=2):
    """Losses, norms and an evaluation by case: model, axes, strategy, precision, policy."""
    result = []
    for name, axes, strategy, precision, policy in cases:
        mesh, model, opt = mesh_of(axes), fs.models.decoder(MODELS[name]), fs.adamw(1e-2)
        stages = {"blocks": [[0], [1]]} if "pp" in axes else None
        layout = fs.plan_layout(model, mesh, strategy=strategy, precision=precision, stages=stages)
        state, numbers = fs.init_state(model, opt, fs.random.key(0), layout), []
        pieces = 2 if "pp" in axes else 1
        step = fs.make_train_step(model, opt, policy=policy, microbatches=pieces)
        for seed in range(steps):
            tokens = torch.randint(40, (4, 17), generator=torch.Generator().manual_seed(seed))
            batch = fs.local_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
            state, metrics = step(state, batch)
            numbers += [float(metrics.loss), float(metrics.grad_norm)]
        result.append((*numbers, float(fs.evaluate(model, microbatches=pieces)(state, batch).mean)))
    return result


def same_on_ranks(cases):
    found = run_ranks(trained, 2, cases, timeout=60)
    for numbers in found:
        assert all(x == numbers[0] for x in numbers), [(case, x) for case, x in zip(cases, numbers, strict=True)]


KEPT = policies.save_except_gathered
STOCHASTIC = formats.MXFP8.with_rounding("stochastic")


DP, TP = {"dp": 2}, {"tp": 2}
FORMATS = [
    (formats.MXFP8, TP), (formats.NVFP4, DP), (formats.E4M3_128x128, TP),
    *(pytest.param(format, axes, marks=full) for format in (formats.TENSORWISE, formats.ROWWISE, STOCHASTIC) for axes in (DP, TP)),
    pytest.param(formats.MXFP8, DP, marks=full), pytest.param(formats.NVFP4, TP, marks=full),
    pytest.param(formats.MXFP4, TP, marks=full),
]  # fmt: skip


@pytest.mark.parametrize(("format", "axes"), FORMATS, ids=str)
def test_losses_do_not_depend_on_strategy_or_on_who_dequantizes(format, axes):
    codes, numbers = in_format(format, computes=True), in_format(format, computes=False)
    same_on_ranks(
        [
            ("dense", axes, ZERO3, numbers, KEPT), ("dense", axes, ZERO3, codes, KEPT),
            ("dense", axes, fs.zero(1), codes, KEPT), ("dense", axes, fs.zero(0), codes, KEPT),
        ]
    )  # fmt: skip


def test_policies_keep_codes_and_change_no_bit():
    codes = in_format(formats.NVFP4, computes=True, keep=(*KEEP, "blocks[-1]"))
    numbers = in_format(formats.NVFP4, computes=False, keep=(*KEEP, "blocks[-1]"))
    every = (policies.nothing_saveable, policies.dots_saveable, policies.everything_saveable)
    axes = {"dp": 2}
    same_on_ranks([("dense", axes, ZERO3, numbers, KEPT), *(("dense", axes, ZERO3, codes, policy) for policy in every)])


@pytest.mark.parametrize("model", ["experts", pytest.param("latent", marks=full)])
@pytest.mark.parametrize("axes", [pytest.param(DP, marks=full), TP], ids=str)
def test_experts_and_latent_attention_dequantize(model, axes):
    every = Precision(params=torch.float32, compute=formats.MXFP8, keep=("*norm*",))
    numbers = Precision(params=torch.float32, compute=torch.bfloat16, gather=formats.MXFP8, keep=("*norm*",))
    cases = [
        (model, axes, ZERO3, numbers, KEPT),
        (model, axes, ZERO3, every, KEPT),
        (model, axes, fs.zero(1), every, KEPT),
    ]
    same_on_ranks(cases)


def test_a_pipeline_multiplies_dequantized_weights():
    axes = {"pp": 2}
    codes, numbers = in_format(formats.MXFP8, computes=True), in_format(formats.MXFP8, computes=False)
    same_on_ranks([("dense", axes, ZERO3, numbers, KEPT), ("dense", axes, ZERO3, codes, KEPT)])
    strict = Precision(params=torch.float32, compute=formats.ROWWISE, strict=True)
    text = run_ranks(refused_step, 2, strict)[0]
    assert text == (
        "train step cannot be strict with a pipeline: its stages multiply weights that are dequantized.\n"
        "Leave strict out, or keep pp at 1."
    )


def refused_step(precision):
    return refusal(trained, [("dense", {"pp": 2}, ZERO3, precision, KEPT)], kind=ConfigError)


# --------------------------------------------------------------------------------------------------------- what is alive
WIDTH, LAYERS = 128, 5


def a_block(unit, x):
    hidden = fs.ops.scaled_matmul(F.silu(fs.ops.scaled_matmul(x, unit["up"], 1)), unit["down"], 0)
    return x + hidden + F.linear(x, fs.formats.dequantize(unit["other"]))


def peaks(format, policy):
    """Gradients and bytes alive for codes, then for numbers."""
    mesh, found = mesh_of({"dp": 2}), []
    values = {
        name: fs.random.normal(fs.random.key(i), (LAYERS, WIDTH, WIDTH), std=0.1).tensor()
        for i, name in enumerate(NAMES)
    }
    layout = fs.plan_layout(values, mesh, strategy=ZERO3, names=dict.fromkeys(NAMES, ("layers", None, None)))
    params = fs.shard(values, layout)
    for computes in (True, False):
        with fs.debug.record_collectives() as counts:
            (loss), grads = fs.value_and_grad(
                lambda p, x: fs.scan_units(a_block, p, x, policy=policy).float().square().sum(),
                precision=in_format(format, computes=computes),
            )(params, torch.ones(4, WIDTH, dtype=torch.bfloat16))
        found.append(
            (float(loss), [g.full_tensor() for g in fs.tree.leaves(grads)], counts[0].peak_bytes, counts[0].gathers)
        )
    return found


NAMES = ("up", "down", "other")


def large_grads(format):
    """Gradients that products write where they are sent from, for codes and for numbers."""
    with large_from(1):
        codes, numbers = peaks(format, KEPT)
    return all(map(torch.equal, codes[1], numbers[1]))


def test_products_write_the_gradient_of_a_weight_in_codes_where_it_goes():
    assert run_ranks(large_grads, 2, formats.MXFP8) == [True, True]


@pytest.mark.parametrize("format", [formats.MXFP8, formats.NVFP4], ids=str)
def test_a_unit_alive_is_codes_and_scales_and_backward_gathers_them_again(format):
    for codes, numbers in run_ranks(peaks, 2, format, KEPT):
        assert codes[0] == numbers[0] and codes[3] == numbers[3] and len(codes[3]) == 2 * LAYERS - 1
        assert all(map(torch.equal, codes[1], numbers[1]))
        unit = len(NAMES) * format.bytes((WIDTH, WIDTH))
        known = 2 * len(NAMES) * 4 * format.has_outer  # that of a matrix does not travel: every rank has found it
        assert codes[2] == 2 * unit - known, "two units are alive at once, and nothing of them is wider"
        assert numbers[2] > 2 * len(NAMES) * WIDTH * WIDTH


# ------------------------------------------------------------------------------------------------------------- the rest
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(3))
        self.out = nn.Linear(64, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def of_a_module(mesh_axes):
    torch.manual_seed(0)
    net, x, found = fs.functionalize(Net(), ("layers.*", "out")), torch.randn(4, 64).bfloat16(), []
    for computes in (True, False):
        layout = fs.plan_layout(
            net, mesh_of(mesh_axes), strategy=ZERO3, precision=in_format(formats.MXFP8, computes=computes)
        )
        state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
        _, metrics = fs.make_train_step(lambda p, b: (net(p, b).float().square().sum(), 4), fs.sgd(0.1))(state, x)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return found


def test_modules_get_tensors():
    for codes, numbers in run_ranks(of_a_module, 2, {"dp": 2}):
        assert codes == numbers


def strictly(axes):
    """Products by the kernel that the CPU has, beside dequantized ones."""
    found = []
    for strict in (True, False):
        case = ("dense", axes, ZERO3, in_format(formats.TENSORWISE, computes=True, strict=strict), KEPT)
        found += trained([case])
    return found


@cpu_multiplies_codes
def test_kernels_of_the_cpu_train_as_dequantized_products_do():
    for kernel, reference in run_ranks(strictly, 2, {"dp": 2}, timeout=60):
        assert kernel != reference, "activations are rounded"
        assert kernel == pytest.approx(reference, rel=2e-2)
