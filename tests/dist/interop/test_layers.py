"""Layers that have a role over `tp`, under every option of their constructors: honored, or refused by name."""

import inspect

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.interop.module.layers import REPLACED
from fsharding.testing import assert_trees_close, run_ranks

SIZES = st.sampled_from((3, 2, 4, 5, 1))
DTYPES = st.sampled_from((torch.float64, torch.float32, None))
OPTIONS = {
    nn.Linear: {
        "in_features": SIZES, "out_features": SIZES, "bias": st.booleans(),
        "device": st.sampled_from(("cpu", "meta", None)), "dtype": DTYPES,
    },
    nn.Embedding: {
        "num_embeddings": SIZES, "embedding_dim": SIZES, "padding_idx": st.sampled_from((0, -1, None)),
        "max_norm": st.sampled_from((None, 0.0, 0.5)), "norm_type": st.sampled_from((2.0, 1.0)),
        "scale_grad_by_freq": st.booleans(),
        "sparse": st.booleans(), "_weight": st.sampled_from((None, "given")),
        "_freeze": st.booleans(), "device": st.sampled_from(("cpu", "meta", None)), "dtype": DTYPES,
    },
    nn.LayerNorm: {
        "normalized_shape": SIZES, "eps": st.sampled_from((1e-5, 0.5)), "elementwise_affine": st.booleans(),
        "bias": st.booleans(), "device": st.sampled_from(("cpu", "meta", None)), "dtype": DTYPES,
    },
    nn.RMSNorm: {
        "normalized_shape": SIZES, "eps": st.sampled_from((None, 0.5)), "elementwise_affine": st.booleans(),
        "device": st.sampled_from(("cpu", "meta", None)), "dtype": DTYPES,
    },
}  # fmt: skip
"""For each layer that has a role in the tables, or takes one, what its constructor takes."""
REFUSED = ("max_norm", "scale_grad_by_freq", "sparse")
"""Of `nn.Embedding`; every other option is honored."""


def test_every_option_of_every_layer_with_a_role_is_tried():
    assert {*REPLACED.values()} <= {*OPTIONS}
    for kind, options in OPTIONS.items():
        assert {*inspect.signature(kind).parameters} == {*options}, kind


ROLES = {"table": "vocab", "up": "column", "norm": "inside", "down": "row", "head": "logits"}
NAMES = {
    "table.weight": ("vocab", None), "up.weight": ("mlp", None), "up.bias": ("mlp",), "norm.*": None,
    "down.weight": (None, "mlp"), "down.bias": None, "head.weight": ("vocab", None), "head.bias": ("vocab",),
}  # fmt: skip


class Layers(nn.Module):
    """A layer of every role, as the options say."""

    def __init__(self, options, kind):
        super().__init__()
        for path, layer in zip(ROLES, (nn.Embedding, nn.Linear, kind, nn.Linear, nn.Linear), strict=True):
            given = dict(options[path])
            if given.get("_weight") == "given":
                shape = given["num_embeddings"], given["embedding_dim"]
                given["_weight"] = torch.randn(shape, dtype=given["dtype"], generator=torch.Generator().manual_seed(0))
            setattr(self, path, layer(**given))

    def forward(self, tokens):
        x = self.up(self.table(tokens))
        x = self.norm(x.unflatten(-1, (-1, self.norm.normalized_shape[0]))).flatten(-2)
        return self.head(self.down(torch.tanh(x)))


@st.composite
def options_of_layers(draw):
    kind = draw(st.sampled_from((nn.LayerNorm, nn.RMSNorm)))
    kinds = dict(zip(ROLES, (nn.Embedding, nn.Linear, kind, nn.Linear, nn.Linear), strict=True))
    options = {path: {name: draw(x) for name, x in OPTIONS[one].items()} for path, one in kinds.items()}
    if draw(st.integers(0, 7)):
        options["table"] |= {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}
    dtype = draw(DTYPES)
    for path in options:
        options[path]["dtype"] = dtype
    # Sizes follow each other; a norm inside has whole heads, two of them on each rank or one.
    width, heads = options["norm"]["normalized_shape"], draw(st.sampled_from((2, 4)))
    options["up"] |= {"in_features": options["table"]["embedding_dim"], "out_features": width * heads}
    options["down"]["in_features"] = width * heads
    options["head"]["in_features"] = options["down"]["out_features"]
    return kind, options


def compared(kind, options, tokens):
    """Losses and gradients of the layers over tp, and of the same layers on one process."""
    torch.manual_seed(0)
    module = Layers(options, kind)
    names = {
        pattern: dims for pattern, dims in NAMES.items() if any(fits(pattern, n) for n, _ in module.named_parameters())
    }
    net = fs.functionalize(module, ("table", "up"), names=names, roles=ROLES)
    layout = fs.plan_layout(net, fs.make_mesh(tp=2))
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    value, grads = fs.value_and_grad(lambda params: loss_of(net(params, tokens)))(state.params)
    plain = Layers(options, kind).to_empty(device="cpu")
    plain.load_state_dict(net.state_dict(fs.unshard(state.params)))
    want = loss_of(plain(tokens))
    want.backward()
    grads = fs.tree.map(lambda g: None if g is None else g.full_tensor(), grads, is_leaf=lambda g: g is None)
    found = {name: fs.tree.at(grads, name) for name, p in plain.named_parameters() if p.requires_grad}
    return (value, found), (want.detach(), {name: p.grad for name, p in plain.named_parameters() if p.requires_grad})


def fits(pattern, name):
    return pattern == name or (pattern.endswith("*") and name.startswith(pattern[:-1]))


def loss_of(logits):
    return F.mse_loss(logits, torch.ones_like(logits), reduction="sum")


def attempt(kind, options, tokens):
    try:
        return compared(kind, options, tokens)
    except ConfigError as error:
        return str(error)


@given(options_of_layers(), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_layers_compute_over_tp_as_their_options_say_or_are_refused(case, tokens):
    kind, options = case
    rows = options["table"]["num_embeddings"]
    tokens = torch.tensor(tokens) % rows
    for found in run_ranks(attempt, 2, kind, options, tokens, timeout=60.0):
        odd = [name for name in REFUSED if options["table"][name] is not None and options["table"][name] is not False]
        if odd:
            assert all(f"table is Embedding, {name}=" in found for name in odd), found
        elif 1 in (rows, options["head"]["out_features"]):
            assert "one rank would have all of it" in found, found
        else:
            ours, want = found
            assert_trees_close(ours, want, rtol=1e-4, atol=1e-5)
