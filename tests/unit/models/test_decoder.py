"""The decoder as pure functions: shapes, names, causality, an independent plain version, refused sizes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import ConfigError, SpecError
from fsharding.models import GQA, DecoderConfig, Stack, decoder
from fsharding.testing import assert_bitwise_equal, assert_trees_close

CONFIG = DecoderConfig(vocab_size=17, dim=24, layers=2, heads=4, kv_heads=2, intermediate_size=20)


def params_of(config, std=8.0):
    """Weights large enough that everything matters."""
    draws = decoder(config).init(fs.random.key(1))
    return fs.tree.map(lambda d: d.tensor() * (std if d.kind == "normal" else 1), draws)


def tokens(batch=2, positions=7):
    return torch.randint(0, CONFIG.vocab_size, (batch, positions), generator=torch.Generator().manual_seed(0))


def logits_loss(config, params, batch):
    model = decoder(config)
    x = model.embed(params["embed"], batch)
    for layer in range(config.layers):
        x = model.block({name: leaf[layer] for name, leaf in params["blocks"].items()}, x)
    head = {**params["head"], **{name: fs.tree.at(params, path) for name, path in model.tied}}
    return model.head(head, x, batch)


def by_the_book(config, params, batch):
    """Complex rotations, attention as a softmax of scores, one head at a time."""
    c, size = config, config.head_dim
    x = params["embed"]["table"][batch["tokens"]].double()
    positions = torch.arange(x.shape[1]).double()
    turns = torch.exp(1j * positions[:, None] * c.rope_base ** (-torch.arange(0, size, 2).double() / size))

    def norm(scale, x):
        return x / (x.square().mean(-1, keepdim=True) + c.eps).sqrt() * scale.double()

    def rotate(y):
        z = torch.complex(y[..., : size // 2], y[..., size // 2 :]) * turns
        return torch.cat((z.real, z.imag), -1)

    for layer in range(c.layers):
        p = {name: leaf[layer].double() for name, leaf in params["blocks"].items()}
        h = norm(p["norm1"], x)
        out = torch.zeros_like(x)
        for head in range(c.heads):
            group = head // (c.heads // c.kv_heads)
            mine, theirs = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            q, k, v = h @ p["wq"][mine].T, h @ p["wk"][theirs].T, h @ p["wv"][theirs].T
            scores = rotate(q) @ rotate(k).mT / size**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out += scores.softmax(-1) @ v @ p["wo"][mine]
        x = x + out
        h = norm(p["norm2"], x)
        x = x + (F.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"]
    table = params["embed"]["table"] if c.tied else params["head"]["unembed"]
    logits = norm(params["head"]["norm"], x) @ table.double().T
    picked = logits.log_softmax(-1).gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
    return -(picked * (batch["targets"] >= 0)).sum()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_loss_is_that_of_the_book(tied):
    config = DecoderConfig(**{**vars(CONFIG), "tied": tied})
    batch = {"tokens": tokens(), "targets": tokens().roll(1, 0)}
    batch["targets"][0, :3] = -100
    params = params_of(config)
    total, count = logits_loss(config, params, batch)
    assert int(count) == 14 - 3 and total.dtype == torch.float32
    assert_trees_close(total, by_the_book(config, params, batch), rtol=1e-5)
    uniform, count = logits_loss(config, fs.tree.map(torch.zeros_like, params), batch)
    assert_trees_close(uniform, count * torch.log(torch.tensor(float(CONFIG.vocab_size))), rtol=1e-6)


def test_no_position_sees_a_later_one():
    params, model = params_of(CONFIG), decoder(CONFIG)

    def hidden(ids):
        x = model.embed(params["embed"], {"tokens": ids})
        for layer in range(CONFIG.layers):
            x = model.block({name: leaf[layer] for name, leaf in params["blocks"].items()}, x)
        return x.x

    ids = tokens()
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % CONFIG.vocab_size
    a, b = hidden(ids), hidden(changed)
    assert_trees_close(a[:, :4], b[:, :4], rtol=1e-5, atol=1e-6)
    assert (a[:, 4:] - b[:, 4:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_names_fit_the_shapes(tied):
    config = DecoderConfig(**{**vars(CONFIG), "tied": tied})
    model = decoder(config)
    draws = model.init(fs.random.key(0))
    fs.tree.map(
        lambda draw, names: None if len(draw.shape) == len(names) else pytest.fail(str(names)), draws, model.names
    )
    assert draws["blocks"]["wk"].shape == (2, 12, 24) and draws["blocks"]["down"].shape == (2, 20, 24)
    assert ("unembed" in draws["head"]) == (not tied) == (not model.tied)
    assert all(leaf.shape[0] == 2 for leaf in draws["blocks"].values())


def test_fused_leaves_are_the_others_joined():
    config = replace(CONFIG, bias=True)
    params = params_of(config)
    params["blocks"] |= {f"{x}_bias": torch.randn_like(params["blocks"][f"{x}_bias"]) for x in "qkv"}
    blocks = dict(params["blocks"])
    joined = {"wqkv": ("wq", "wk", "wv"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
    fused = {leaf: torch.cat([blocks.pop(part) for part in parts], 1) for leaf, parts in joined.items()} | blocks
    other = replace(config, fused=True)
    names = decoder(other).names["blocks"]
    assert {**names} == {**dict.fromkeys(fused), **names}, "the same leaves"
    assert names["wqkv"] == ("layers", fs.Fused("heads", (24, 12, 12)), "embed")
    assert names["gate_up"][1] == fs.Fused("mlp", (20, 20)) and names["qkv_bias"][1] == names["wqkv"][1]
    shapes = decoder(other).init(fs.random.key(0))["blocks"]
    assert {path: draw.shape for path, draw in shapes.items()} == {path: x.shape for path, x in fused.items()}
    batch = {"tokens": tokens(), "targets": tokens().roll(1, 0)}
    want = logits_loss(config, params, batch)
    assert_trees_close(logits_loss(other, {**params, "blocks": fused}, batch), want, rtol=1e-6)
    with pytest.raises(ConfigError, match="2 kv_heads, in one leaf with the queries: not a multiple of tp=4"):
        fs.plan_layout(decoder(other), fs.AbstractMesh(("tp",), (4,)))


def test_parts_of_another_leaf_are_refused():
    q, k = ops.split_fused(torch.arange(6).view(1, 6), (4, 2))
    assert q.tolist() == [[0, 1, 2, 3]] and k.tolist() == [[4, 5]]
    with fs.set_mesh(fs.AbstractMesh(("tp",), (2,))), pytest.raises(SpecError) as caught:
        ops.split_fused(torch.zeros(5, 3), (4, 3), dim=0)
    assert str(caught.value) == (
        "fs.ops.split_fused cannot split dim 0 of size 5 into parts of (4, 3): this rank has (2, 2).\n"
        "Pass the sizes of the leaf's Fused name."
    )


def test_init_is_narrow_where_blocks_write_to_the_stream():
    draws = decoder(DecoderConfig(layers=8, dim=128, intermediate_size=256)).init(fs.random.key(0))
    assert draws["blocks"]["wq"].scale == draws["embed"]["table"].scale == 0.02
    assert draws["blocks"]["wo"].scale == draws["blocks"]["down"].scale == 0.02 / 4
    assert_bitwise_equal(draws["head"]["norm"].tensor(), torch.ones(128))
    keys = [d.words for d in fs.tree.leaves(draws) if d.kind == "normal"]
    assert len(set(keys)) == len(keys)
    assert abs(draws["blocks"]["gate"].tensor().std() - 0.02) < 1e-4


def test_blocks_keep_the_dtype_of_the_stream():
    params = fs.tree.map(lambda x: x.bfloat16(), params_of(CONFIG, 1.0))
    x = decoder(CONFIG).embed(params["embed"], {"tokens": tokens()})
    out = decoder(CONFIG).block({name: leaf[0] for name, leaf in params["blocks"].items()}, x)
    assert x.x.dtype == out.x.dtype == torch.bfloat16
    alone = decoder(CONFIG).block({name: leaf[0] for name, leaf in params["blocks"].items()}, x.x)
    assert_bitwise_equal(alone.x, out.x)


def test_sizes_that_do_not_fit():
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(dim=30, heads=4, kv_heads=3)
    assert str(caught.value) == (
        "fs.models.DecoderConfig has sizes that do not fit.\n"
        "  dim 30 over 4 heads is not an even head dim\n"
        "  4 heads are not a multiple of 3 kv_heads\n"
        "Write, for example, fs.models.DecoderConfig(dim=64, heads=8, kv_heads=2)."
    )
    assert DecoderConfig(dim=64, heads=8).head_dim == 8
    with pytest.raises(ConfigError) as caught:
        DecoderConfig(
            vocab_size=0, dim=30, layers=-3, heads=4, kv_heads=0, intermediate_size=0, stacks=(Stack("a", 0),)
        )
    assert str(caught.value).splitlines()[1:-1] == [
        "  vocab_size=0: at least 1",
        "  layers=-3: at least 1",
        "  kv_heads=0: at least 1",
        "  intermediate_size=0: at least 1",
        "  dim 30 over 4 heads is not an even head dim",
        "  stack 'a': layers=0: at least 1",
        "  the stacks have 0 layers, not -3",
    ]
    with pytest.raises(ConfigError, match="heads=0: at least 1"):
        DecoderConfig(heads=0)
    with pytest.raises(ConfigError, match="kv_heads=-1: at least 1"):
        GQA(4, -1, 8)
    with pytest.raises(ConfigError, match="dim 12 over 4 heads is not an even head dim"):
        DecoderConfig(dim=12, heads=4)
