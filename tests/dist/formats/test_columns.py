"""Weights that backward gathers in blocks along their other dim: the numbers, the bytes, and what is alive."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fsharding as fs
from fsharding import formats, policies
from fsharding.base.errors import ConfigError
from fsharding.formats.precision import Precision
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import assert_bitwise_equal, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.decoders import DecoderCase
from tests.helpers import cpu_multiplies_codes, examples, full, mesh_of, refusal

COLUMNS = ("w[qkv]*", "[gu]*[ep]")
"""The first product of attention and of the MLP, fused or not."""
FORMATS = {
    "mx": formats.MXFP8, "row": formats.ROWWISE, "nvfp4": formats.NVFP4, "1x128": formats.E4M3_1x128,
    "mx stochastic": formats.MXFP8.with_rounding("stochastic"),
}  # fmt: skip


def in_columns(format, columnwise=COLUMNS, **more):
    return Precision(params=torch.float32, compute=format, columnwise=columnwise, **more)


# ------------------------------------------------------------------------------------------------------------- the law
class ByHand(torch.autograd.Function):
    """`x @ w.T` with w as forward rounds it; the gradient of x has it as it is rounded along its other dim."""

    @staticmethod
    def forward(ctx, x, w, format):
        ctx.save_for_backward(x, w)
        ctx.format = format
        return x @ rounded(w, format).T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ rounded(w, ctx.format.across(tuple(w.shape))), (grad.T @ x).float(), None


def rounded(w, format):
    return fs.formats.dequantize(fs.formats.quantize(w, format, dtype=torch.bfloat16))


def loss_of(product):
    """Two blocks of a unit each; the second weight of a block is used as it was, too."""

    def block(unit, x):
        y = product(x, unit["up"])
        return product(torch.tanh(y), unit["down"]) + product(x[:, :1] * 2, unit["few"])

    def loss(params, x):
        for unit in params["blocks"]:
            x = block(unit, x)
        return x.float().square().sum()

    return loss


def by_ranks(axes, shapes, format, elements):
    """Whether values and gradients are those by hand, bit for bit, with a unit gathered at a time."""
    mesh, generator = mesh_of(axes), torch.Generator().manual_seed(0)
    whole = {"blocks": [{k: torch.randn(s, generator=generator) for k, s in shapes.items()} for _ in range(2)]}
    x = torch.randn((4, shapes["up"][1]), generator=generator).bfloat16()
    layout = fs.plan_layout(whole, mesh, strategy=fs.zero(3))
    params, tangible = fs.shard(whole, layout), x.clone().requires_grad_()

    def ours(params, x):
        units = [fs.gather_unit(unit) for unit in params["blocks"]]
        return loss_of(lambda x, w: fs.ops.scaled_matmul(x, w, 1))({"blocks": units}, x)

    with large_from(elements):
        call = fs.value_and_grad(ours, precision=in_columns(format, ("up", "few")))
        value, grads = call(params, tangible.detach())
    twin = fs.tree.map(lambda w: w.clone().requires_grad_(), whole)

    def by_hand(x, w):
        taken = any(w is unit["down"] for unit in twin["blocks"])
        return plain(x, w, format) if taken else ByHand.apply(x, w, format)

    want = loss_of(by_hand)(twin, tangible.detach())
    want.backward()
    pairs = zip(
        fs.tree.leaves(grads), fs.tree.leaves(twin), strict=True
    )  # all ranks have these rows: their mean is one's
    return float(value), float(want.detach()), [torch.equal(g.full_tensor(), w.grad) for g, w in pairs]


def plain(x, w, format):
    return x @ StraightThrough.apply(w, format).T


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, format):
        return rounded(w, format)

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


SIZES = st.sampled_from([2, 3, 8, 31, 32, 33, 64, 100])


@settings(examples(50, 100), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking asks ranks for minutes
@given(
    st.sampled_from([2, 4]),
    SIZES,
    SIZES,
    st.sampled_from(["mx", "row", "nvfp4", "1x128"]),
    st.sampled_from([1, 1 << 16]),
)
def test_backward_multiplies_by_weights_that_were_rounded_along_its_sums(ranks, width, hidden, format, elements):
    shapes = {"up": (hidden, width), "down": (width, hidden), "few": (width, 1)}
    for value, want, grads in run_ranks(by_ranks, ranks, {"dp": ranks}, shapes, FORMATS[format], elements):
        assert value == want and all(grads)


# ------------------------------------------------------------------------------------------------------------ decoders
CONFIG = fs.models.DecoderConfig(vocab_size=40, dim=48, layers=3, heads=4, kv_heads=2, intermediate_size=72)
LATENT = fs.models.MLA(heads=4, q_rank=16, kv_rank=16, plain_dim=8, rotary_dim=4, value_dim=8)
CONFIGS = {
    "dense": CONFIG,
    "fused": replace(CONFIG, fused=True),
    "one key head": replace(CONFIG, kv_heads=1),
    "experts": replace(CONFIG, experts=fs.models.Experts(count=4, active=4, intermediate_size=24, shared=1)),
    "latent": replace(CONFIG, attention=LATENT),
}
EVERYTHING = ("*",)
OF_LATENT = ("[gu]*[ep]", "*_up", "*_down")
CASES = {
    "dense dp": ("dense", {"dp": 2}, {}),
    "one key head tp": ("one key head", {"dp": 2, "tp": 2}, {"sequence": True}),
    "experts ep": ("experts", {"ep": 2}, {"columnwise": EVERYTHING}),
    "hsdp": ("dense", {"replica": 2, "dp": 2}, {"strategy": fs.hybrid(), "microbatches": 3}),
    "fused tp": ("fused", {"tp": 2}, {}),
    "latent tp": ("latent", {"tp": 2}, {"sequence": True, "columnwise": OF_LATENT}),
    "latent dp": ("latent", {"dp": 3}, {"columnwise": OF_LATENT}),
    "cp": ("dense", {"dp": 2, "cp": 2}, {"columnwise": EVERYTHING}),
    "some layers": ("dense", {"dp": 2}, {"keep": ("*norm*", "embed", "blocks[1]")}),
}
FEW = ["dense dp", "one key head tp", "experts ep", "hsdp", "some layers"]


def case_of(name, format):
    model, axes, more = CASES[name]
    own = {key: more[key] for key in ("columnwise", "keep") if key in more}
    rest = {key: value for key, value in more.items() if key not in own}
    mesh = AbstractMesh(tuple(axes), tuple(axes.values()))
    case = DecoderCase(
        CONFIGS[model], mesh, fs.zero(3), rows=12, length=8, steps=2, precision=in_columns(format, **own)
    )
    return replace(case, **rest)


def under_every_policy(case):
    """Losses and norms by policy; `train` compares what each step sends with `expected_traffic`."""
    return {name: replace(case, policy=name).train(foresee=True) for name in policies.POLICIES}


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=full) for name in CASES])
@pytest.mark.parametrize("format", ["mx", pytest.param("row", marks=full), pytest.param("nvfp4", marks=full)])
def test_no_policy_changes_a_bit_and_steps_send_what_is_expected(name, format):
    case = case_of(name, FORMATS[format])
    seen = run_ranks(under_every_policy, case.ranks, case, timeout=120)
    first = seen[0]["save_except_gathered"]
    for found in seen:
        for policy, numbers in found.items():
            assert_bitwise_equal(numbers, first, policy)


def losses(precision, strategy, axes):
    mesh = AbstractMesh(tuple(axes), tuple(axes.values()))
    return DecoderCase(CONFIG, mesh, strategy, rows=12, length=8, steps=3, precision=precision).train()


def two_ways(format, axes):
    """With one orientation and with two; and how many bytes both send."""
    return [losses(in_columns(format, columns), fs.zero(3), axes) for columns in ((), COLUMNS)]


@pytest.mark.parametrize("format", ["mx", "mx stochastic"])
def test_losses_stay_near_those_of_one_orientation(format):
    for one, two in run_ranks(two_ways, 2, FORMATS[format], {"dp": 2}):
        assert not torch.equal(one, two), "gradients of activations have other numbers"
        torch.testing.assert_close(one, two, rtol=3e-2, atol=0)


def test_the_second_orientation_sends_as_many_bytes_as_the_first():
    layouts = [
        fs.plan_layout(
            fs.models.decoder(replace(CONFIG, dim=64, intermediate_size=128)), AbstractMesh(("dp",), (2,)), strategy=fs.zero(3),
            precision=in_columns(formats.MXFP8, columns),
        )
        for columns in ((), COLUMNS)
    ]  # fmt: skip
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    batch, model = (
        {"tokens": tokens, "targets": tokens},
        fs.models.decoder(replace(CONFIG, dim=64, intermediate_size=128)),
    )
    one, two = (fs.debug.expected_traffic(model, fs.adamw(1e-3), layout, batch, coord={"dp": 0}) for layout in layouts)
    assert two.by_axes["dp",].bytes == one.by_axes["dp",].bytes


# ------------------------------------------------------------------------------------------------------- what is alive
WIDTH, LAYERS = 128, 5


def alive(columnwise, policy):
    """Gathers of a call, its largest bytes, and what is left after it."""
    mesh, names = mesh_of({"dp": 2}), ("up", "gate")
    values = {name: torch.randn(LAYERS, WIDTH, WIDTH) for name in names}
    layout = fs.plan_layout(values, mesh, strategy=fs.zero(3), names=dict.fromkeys(names, ("layers", None, None)))
    params = fs.shard(values, layout)

    def block(unit, x):
        return x + torch.tanh(fs.ops.scaled_matmul(x, unit["up"], 1)) * fs.ops.scaled_matmul(x, unit["gate"], 1)

    def loss(params, x):
        return fs.scan_units(block, params, x, policy=policy).float().square().sum()

    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    with fs.debug.record_collectives() as counts:
        fs.value_and_grad(loss, precision=in_columns(formats.MXFP8, columnwise))(params, x)
    return counts[0].gathers, counts[0].peak_bytes


def test_products_alone_gather_a_unit_once_in_each_orientation():
    for gathers, peak in run_ranks(alive, 2, ("up", "gate"), policies.save_except_gathered):
        # The input of the first unit has no gradient, and the last unit has been gathered as forward needs it.
        rows = [int(name[name.index("[") + 1 : -1]) for name in gathers]
        assert rows == [*range(LAYERS), *range(LAYERS - 1, 0, -1)]
        assert peak <= 3 * 2 * formats.MXFP8.bytes((WIDTH, WIDTH)), (
            "the last unit in both orientations, and the one before"
        )


# ----------------------------------------------------------------------------------------------------------- refusals
def refused(call):
    return [refusal(losses, in_columns(formats.MXFP8), strategy, axes, kind=ConfigError) for strategy, axes in call]


def test_copies_at_rest_and_pipelines_have_one_orientation():
    calls = [(fs.zero(1), {"dp": 2}), (fs.hybrid(opt_state=True), {"replica": 2}), (fs.zero(3), {"pp": 2})]
    for texts in run_ranks(refused, 2, calls):
        assert texts[0] == (
            "Precision.columnwise cannot use the copies of weights that zero1 keeps: they are rounded in one orientation.\n"
            "Use fs.zero(3) or fs.hybrid(), which round main parameters; or leave columnwise out."
        )
        assert texts[1].startswith("Precision.columnwise cannot use the copies of weights")
        assert texts[2] == (
            "train step cannot gather weights in a second orientation with a pipeline: its stages round them once.\n"
            "Leave columnwise out, or keep pp at 1."
        )


def strictly():
    """By the kernel of the CPU, in both directions, beside dequantized products."""
    return [losses(in_columns(formats.ROWWISE, strict=strict), fs.zero(3), {"dp": 2}) for strict in (True, False)]


@cpu_multiplies_codes
def test_the_kernel_of_the_cpu_multiplies_in_both_directions():
    for kernel, reference in run_ranks(strictly, 2):
        assert not torch.equal(kernel, reference), "activations and gradients are rounded"
        torch.testing.assert_close(kernel, reference, rtol=5e-2, atol=0)
