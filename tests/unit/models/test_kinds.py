"""Kinds of attention, positions and stacks of the decoder, each against a plain version in float64 written here."""

import math
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import ConfigError, SpecError
from fsharding.models import GQA, MLA, DecoderConfig, Stack, decoder
from fsharding.models.stacks import stacks_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import token_batch

LLAMA = ops.LlamaScaling(factor=8.0, length=16)
YARN = ops.YarnScaling(factor=40.0, length=16, fast=2.0)
LATENT = MLA(4, q_rank=10, kv_rank=6, plain_dim=6, rotary_dim=4, value_dim=5, rope_scaling=YARN)
SIZES = {"vocab_size": 17, "dim": 24, "heads": 4, "kv_heads": 2, "intermediate_size": 20}
KINDS = {
    "bias": DecoderConfig(**SIZES, layers=2, bias=True),
    "wide heads": DecoderConfig(**SIZES, layers=2, head_size=10),
    "scaled": DecoderConfig(**SIZES, layers=2, rope_base=50.0, rope_scaling=LLAMA),
    "head norms": DecoderConfig(**SIZES, layers=2, qk_norm=True),
    "grouped yarn": DecoderConfig(**SIZES, layers=2, rope_scaling=YARN),
    "latent": DecoderConfig(**SIZES, layers=2, attention=LATENT),
    "stacks": DecoderConfig(
        **SIZES, layers=4, tied=True,
        stacks=(Stack("zero", 1, LATENT), Stack("a", 2, intermediate_size=8), Stack("m", 1, GQA(3, 1, 8, bias=True))),
    ),
}  # fmt: skip


def params_of(config):
    """Weights large enough that everything matters, biases too."""
    generator = torch.Generator().manual_seed(3)

    def value(path, draw):
        if "bias" in path or draw.kind == "normal":
            return torch.randn(draw.shape, generator=generator) * (0.3 if "bias" in path else 0.16)
        return draw.tensor() * (1 + 0.1 * torch.randn(draw.shape, generator=generator))

    return fs.tree.map_with_path(value, decoder(config).init(fs.random.key(1)))


def loss_of(config, params, batch):
    total, weight = fs.model_loss(decoder(config))(params, batch)
    return total / weight


# ------------------------------------------------------------------------------------------------------- the plain version
def plain_frequency(pair, size, base, scaling):
    """One frequency, as the sources say it, with branches."""
    frequency = base ** (-2 * pair / size)
    if scaling is None:
        return frequency
    if isinstance(scaling, ops.LlamaScaling):
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.length / scaling.fast:
            return frequency
        if wavelength > scaling.length / scaling.slow:
            return frequency / scaling.factor
        smooth = (scaling.length / wavelength - scaling.slow) / (scaling.fast - scaling.slow)
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    def number_of(turns):
        return size * math.log(scaling.length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(number_of(scaling.fast)), 0), min(math.ceil(number_of(scaling.slow)), size - 1)
    kept = 1 - min(max((pair - low) / (high - low), 0), 1)
    return frequency / scaling.factor * (1 - kept) + frequency * kept


def plain_turn(y_TE, positions_T, base, scaling):
    size = y_TE.shape[-1]
    frequencies = torch.tensor([plain_frequency(i, size, base, scaling) for i in range(size // 2)]).double()
    turns = torch.exp(1j * positions_T.double()[:, None] * frequencies)
    z = torch.complex(y_TE[..., : size // 2], y_TE[..., size // 2 :]) * turns
    return torch.cat((z.real, z.imag), -1)


def plain_attend(q_TE, k_TE, v_TE, scale):
    scores = q_TE @ k_TE.mT * scale
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v_TE


def plain_norm(scale, x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def plain_grouped(a, p, x_TD, at_T, eps):
    out, size = 0, a.head_dim
    factor = (0.1 * math.log(40) + 1) ** 2 if isinstance(a.rope_scaling, ops.YarnScaling) else 1
    for head in range(a.heads):
        rows = {"q": head, "k": head * a.kv_heads // a.heads, "v": head * a.kv_heads // a.heads}
        at = {name: slice(i * size, (i + 1) * size) for name, i in rows.items()}
        q, k, v = (x_TD @ p[f"w{n}"][at[n]].T + (p[f"{n}_bias"][at[n]] if a.bias else 0) for n in "qkv")
        if a.qk_norm:
            q, k = plain_norm(p["q_norm"], q, eps), plain_norm(p["k_norm"], k, eps)
        q, k = (plain_turn(y, at_T, a.rope_base, a.rope_scaling) for y in (q, k))
        out = out + plain_attend(q, k, v, factor / size**0.5) @ p["wo"][at["q"]]
    return out


def plain_latent(a, p, x_TD, at_T, eps):
    q_narrow = plain_norm(p["q_norm"], x_TD @ p["q_down"].T, eps)
    narrow, turning = (x_TD @ p["kv_down"].T).split((a.kv_rank, a.rotary_dim), -1)
    narrow, turning = plain_norm(p["kv_norm"], narrow, eps), plain_turn(turning, at_T, a.rope_base, a.rope_scaling)
    queries = (q_narrow @ p["q_up"].T).unflatten(-1, (a.heads, -1))
    pairs = (narrow @ p["kv_up"].T).unflatten(-1, (a.heads, -1))
    factor = (0.1 * math.log(40) + 1) ** 2 if a.rope_scaling else 1
    outs = []
    for head in range(a.heads):
        q, kv = queries[:, head], pairs[:, head]
        turned = plain_turn(q[:, a.plain_dim :], at_T, a.rope_base, a.rope_scaling)
        q = torch.cat((q[:, : a.plain_dim], turned), -1)
        k, v = torch.cat((kv[:, : a.plain_dim], turning), -1), kv[:, a.plain_dim :]
        outs.append(plain_attend(q, k, v, factor / (a.plain_dim + a.rotary_dim) ** 0.5))
    return torch.cat(outs, -1) @ p["wo"]


def plain_row(config, params, tokens_T, targets_T):
    """The sum of losses of one row of one document."""
    params = fs.tree.map(lambda x: x.double(), params)
    x_TD, at_T = params["embed"]["table"][tokens_T], torch.arange(tokens_T.numel())
    stacks = [(s, params["blocks"][s.name]) for s in config.stacks] or [(None, params["blocks"])]
    for stack, leaves in stacks:
        attention, _ = config.parts(stack)
        for layer in range(stack.layers if stack else config.layers):
            p = {name: leaf[layer] for name, leaf in leaves.items()}
            h = plain_norm(p["norm1"], x_TD, config.eps)
            if isinstance(attention, MLA):
                x_TD = x_TD + plain_latent(attention, p, h, at_T, config.eps)
            else:
                x_TD = x_TD + plain_grouped(attention, p, h, at_T, config.eps)
            h = plain_norm(p["norm2"], x_TD, config.eps)
            x_TD = x_TD + (F.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"]
    table = params["embed"]["table"] if config.tied else params["head"]["unembed"]
    logits = plain_norm(params["head"]["norm"], x_TD, config.eps) @ table.T
    return F.cross_entropy(logits, targets_T, reduction="sum")


# ---------------------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradients_are_those_of_the_plain_version(kind):
    config, batch = KINDS[kind], token_batch(0, vocab=17, rows=2, positions=9)
    params = fs.tree.map(lambda x: x.requires_grad_(), params_of(config))
    rows = [plain_row(config, params, t, y) for t, y in zip(batch["tokens"], batch["targets"], strict=True)]
    wanted = sum(rows) / batch["targets"].numel()
    found = loss_of(config, params, batch)
    assert_trees_close(found, wanted.float(), rtol=1e-5)
    leaves = fs.tree.leaves(params)
    pairs = (torch.autograd.grad(loss, leaves) for loss in (found, wanted))
    for path, mine, theirs in zip(fs.tree.paths(params), *pairs, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-3, atol=2e-5, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("kind", ["bias", "scaled", "stacks"])
def test_packed_documents_have_the_losses_of_each_alone(kind):
    config, batch = KINDS[kind], token_batch(0, vocab=17, rows=2, positions=9)
    params = params_of(config)
    batch["documents"] = torch.tensor([[3, 3, 3, 3, 0, 0, 7, 7, 7], [0] * 8 + [1]])
    alone = [
        plain_row(config, params, batch["tokens"][row, start:stop], batch["targets"][row, start:stop])
        for row, start, stop in ((0, 0, 4), (0, 4, 6), (0, 6, 9), (1, 0, 8), (1, 8, 9))
    ]
    assert_trees_close(loss_of(config, params, batch), (sum(alone) / 18).float(), rtol=1e-5)
    given = {**batch, "positions": ops.document_positions(batch["documents"])}
    assert_bitwise_equal(loss_of(config, params, given), loss_of(config, params, batch))
    with mock.patch.object(sys.modules["fsharding.ops.attention"], "_TILE", 4):
        assert_trees_close(loss_of(config, params, batch), loss_of(config, params, given), rtol=1e-6)
    shifted = {**batch, "positions": given["positions"] + 5}
    assert_trees_close(loss_of(config, params, shifted), loss_of(config, params, batch), rtol=1e-4)


def test_positions_begin_anew_with_each_document():
    documents = torch.tensor([[4, 4, 1, 1, 1, 4], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    wanted = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    assert_bitwise_equal(ops.document_positions(documents), wanted)
    assert ops.document_positions(documents[:, :0]).shape == (2, 0)
    with pytest.raises(SpecError, match=r"ops\.document_positions needs documents \[B, T\]\.\n  int32\[6\]"):
        ops.document_positions(documents[0])


def test_scaled_frequencies():
    plain = ops.rotary_frequencies(128, base=500_000.0)
    found = ops.rotary_frequencies(128, base=500_000.0, scaling=ops.LlamaScaling())
    assert_bitwise_equal(found[:29], plain[:29])  # more than 4 turns in 8192 tokens
    assert_trees_close(found[-20:], plain[-20:] / 8, rtol=1e-6)
    assert (found.diff() < 0).all()
    long = ops.rotary_frequencies(64, scaling=ops.YarnScaling())
    assert_bitwise_equal(long[:11], ops.rotary_frequencies(64)[:11])
    assert_trees_close(long[-8:], ops.rotary_frequencies(64)[-8:] / 40, rtol=1e-6)
    assert ops.YarnScaling(1.0).score_factor == ops.LlamaScaling().score_factor == 1.0


def test_attention_of_values_with_another_head_dim():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 6, 8, generator=generator), torch.randn(2, 2, 6, 8, generator=generator)
    for size in (4, 12):
        v = torch.randn(2, 2, 6, size, generator=generator)
        wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        assert_trees_close(ops.attention(q, k, v), wanted.float(), rtol=1e-4, atol=1e-6)


def test_stacks_keep_their_order_and_names():
    model = decoder(KINDS["stacks"])
    assert [path for path, _ in stacks_of(model)] == ["blocks.zero", "blocks.a", "blocks.m"]
    draws = model.init(fs.random.key(0))
    assert draws["blocks"]["a"]["gate"].shape == (2, 8, 24) and draws["blocks"]["m"]["wq"].shape == (1, 24, 24)
    fs.tree.map(lambda d, n: None if len(d.shape) == len(n) else pytest.fail(str(n)), draws, model.names)
    words = [d.words for d in fs.tree.leaves(draws) if d.kind == "normal"]
    assert len({*words}) == len(words)


def test_sizes_that_do_not_fit():
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(layers=4, stacks=(Stack("a.b", 1), Stack("c", 1), Stack("c", 1)))
    assert str(caught.value) == (
        "fs.models.DecoderConfig has sizes that do not fit.\n"
        "  two stacks have the name 'c'\n"
        "  stack 'a.b': its name isn't an identifier\n"
        "  the stacks have 3 layers, not 4\n"
        "Write, for example, fs.models.DecoderConfig(dim=64, heads=8, kv_heads=2)."
    )
    with pytest.raises(ConfigError, match="head_size 5 is not even"):
        DecoderConfig(head_size=5)
    with pytest.raises(ConfigError, match=r"models\.MLA has sizes that do not fit\.\n  rotary_dim 3 is not even"):
        MLA(4, 8, 8, 8, 3, 8)
    with pytest.raises(ConfigError, match=r"^fs\.ops\.LlamaScaling got numbers out of range\.\n  slow 4\.0, fast 4\.0"):
        ops.LlamaScaling(slow=4.0)
    mesh = fs.AbstractMesh(("cp", "tp"), (4, 2))
    model = decoder(KINDS["stacks"], attention="ulysses")
    with pytest.raises(ConfigError) as caught:
        fs.plan_layout(model, mesh)
    assert str(caught.value).splitlines()[1:-1] == [
        "  2 heads per rank: not a multiple of cp=4, as attention='ulysses' needs",
        "  1 heads per rank: not a multiple of cp=4, as attention='ulysses' needs",
        "  3 heads: not a multiple of tp=2",
    ]
