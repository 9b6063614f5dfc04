"""A mixture of experts as a pure function: against a loop over tokens, its balance in steps, and what is refused."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import ConfigError
from fsharding.models import DecoderConfig, Experts, decoder
from fsharding.models.block_parts import BlockSettings, Init
from fsharding.models.moe import Mixture
from fsharding.optim.router_bias import against_load, split_loads
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests import helpers

DIM = 8
DEEP = Experts(
    6, 2, 5, shared=2, score="sigmoid", scale=2.5, groups=3, kept_groups=2, balance=0.5, z=0.25, bias_rate=0.01
)


def layer_of(c, seed=0):
    """The leaves of one layer, large enough that everything matters."""
    draws = Mixture(c).init(DIM, Init(fs.random.key(seed), (1,)))["experts"]
    assert fs.tree.paths(draws) == fs.tree.paths(expert_names(c), is_leaf=lambda x: isinstance(x, tuple))
    return fs.tree.map(lambda d: d.tensor()[0] * 25, draws)


def expert_names(c):
    return Mixture(c).names()["experts"]


def mixture(c, params, x):
    return Mixture(c).apply({"experts": params}, x, BlockSettings(1e-5, None, "ring"))


def activations(seed=1):
    return torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(seed))


def swiglu(p, x, pick=slice(None)):
    return (F.silu(p["gate"][pick] @ x) * (p["up"][pick] @ x)) @ p["down"][pick]


@pytest.mark.parametrize("c", [DEEP, Experts(4, 3, 5, normalize=False), Experts(3, 1, 4, bias_rate=0.0)], ids=str)
def test_a_mixture_is_a_sum_over_the_experts_of_each_token(c):
    params, x = layer_of(c), activations()
    if "bias" in params:
        params["bias"] = torch.linspace(-0.2, 0.2, c.count)
    y, extra = mixture(c, params, x)
    logits = (x @ params["router"].T).flatten(0, 1)
    routing = ops.route(
        logits, top_k=c.active, score=c.score, bias=params.get("bias"), normalize=c.normalize, scale=c.scale,
        groups=c.groups, kept_groups=c.kept_groups,
    )  # fmt: skip
    for token, found, experts, weights in zip(x.flatten(0, 1), y.flatten(0, 1), *routing[:2], strict=True):
        want = sum(w * swiglu(params, token, e) for e, w in zip(experts, weights, strict=True))
        want = want + swiglu(params["shared"], token) if c.shared else want
        assert_trees_close(found, want, rtol=1e-5, atol=1e-6)
    want = c.balance * ops.balance_loss(routing)[0] + c.z * ops.z_loss(logits)[0]
    assert_trees_close(extra, want, rtol=1e-6)


def test_the_load_comes_as_the_gradient_of_the_bias():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 0.0, 1.0], [2.0, 1.0, 0.0], [0.0, 1.0, 2.0]], requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)

    def total(logits, bias, tell=ops.record_load):
        return tell(ops.route(logits, top_k=1, normalize=False), bias).weights.square().sum()

    x, load = torch.autograd.grad(total(logits, bias), [logits, bias])
    assert (load * 2**10).tolist() == [3 * 3 - 4, 0 - 4, 3 - 4]
    assert_bitwise_equal(x, torch.autograd.grad(total(logits, bias, lambda r, _: r), logits)[0])
    values = logits.detach(), bias.detach()
    assert_bitwise_equal(torch.func.grad(total, argnums=1)(*values), load)
    assert torch.func.jvp(total, values, (values[0], values[1]))[1] == (x * values[0]).sum()


RATE = 0.0625


def routed_model():
    """One layer of experts on activations that no step changes, so that counts can be told beforehand."""
    c = Experts(4, 2, 5, score="sigmoid", bias_rate=RATE)

    def init(key):
        draws = fs.random.normal(key, (1, 4, DIM))
        experts = {name: fs.random.normal(fs.random.fold_in(key, 1), (1, 4, 5, DIM)) for name in ("gate", "up", "down")}
        blocks = {"router": draws, "bias": fs.random.zeros((1, 4)), **experts}
        return {"embed": {"scale": fs.random.ones((1,))}, "blocks": blocks, "head": {"w": fs.random.ones((DIM,))}}

    names = {
        "embed": {"scale": (None,)},
        "blocks": expert_names(c),
        "head": {"w": ("embed",)},
    }
    return fs.models.Model(
        init,
        embed=lambda params, batch: batch["x"] * params["scale"],
        block=lambda params, x: x + mixture(c, params, x)[0],
        head=lambda params, x, batch: (1e-6 * (x @ params["w"]).square().sum(), x.shape[0] * x.shape[1]),
        names=names,
        balanced=(("blocks.bias", RATE),),
    )


def test_a_step_moves_biases_against_their_load_and_nothing_else_by_it():
    model, mesh = routed_model(), fs.make_mesh(device="cpu")
    frozen = ("embed", "blocks.router")
    layout = fs.plan_layout(model, mesh, frozen=frozen)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.1), fs.adamw(1e-3, weight_decay=0.5))
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step, plain = fs.make_train_step(model, opt, microbatches=2), fs.make_train_step(fs.model_loss(model), opt)
    batch, router = {"x": activations()}, state.params["blocks"]["router"].to_local()[0]
    for _ in range(3):
        bias = state.params["blocks"]["bias"].to_local()
        counts = ops.expert_counts(
            ops.route(batch["x"].flatten(0, 1) @ router.T, top_k=2, score="sigmoid", bias=bias[0])
        )
        state, _ = step(state, batch)
        assert_bitwise_equal(state.params["blocks"]["bias"].to_local()[0], ops.next_bias(bias[0], counts, RATE))
        assert not state.opt_state.states[1].mu["blocks"]["bias"].to_local().any()
    grads = fs.value_and_grad(fs.model_loss(model), grads=layout.main)(state.params, batch)[1]
    kept, loads = split_loads(grads, ["blocks.bias"])
    assert list(loads) == ["blocks.bias"] and fs.global_norm(grads) > fs.global_norm(kept)
    assert step(state, batch)[1].grad_norm == pytest.approx(fs.global_norm(kept).item(), rel=1e-5)
    assert plain(state, batch)[1].grad_norm == pytest.approx(fs.global_norm(grads).item(), rel=1e-5)


def test_a_step_that_is_refused_moves_no_bias():
    model, mesh = routed_model(), fs.make_mesh(device="cpu")
    layout = fs.plan_layout(model, mesh, precision=fs.FP16)
    state = fs.init_state(model, fs.sgd(0.1), fs.random.key(0), layout)
    step = fs.make_train_step(model, fs.sgd(0.1))
    batch = {"x": activations().half()}
    skipped, metrics = step(state, {"x": batch["x"] * torch.inf})
    assert metrics.skipped and not skipped.params["blocks"]["bias"].to_local().any()
    for _ in range(12):
        state, metrics = step(state, batch)
    assert not metrics.skipped and state.params["blocks"]["bias"].to_local().any()


def test_trees_without_loads_are_handed_on():
    grads = {"a": torch.ones(2), "b": None}
    assert split_loads(grads, ()) == (grads, {}) and split_loads(grads, ("c",)) == (grads, {})
    opt = fs.sgd(0.1).with_context()
    assert_trees_close(
        against_load(opt, {}, {}).update(grads, opt.init(grads))[0], {"a": torch.full((2,), -0.1), "b": None}
    )


def test_leaves_of_the_decoder():
    model = decoder(DecoderConfig(vocab_size=16, dim=DIM, layers=3, heads=2, kv_heads=2, experts=DEEP))
    shapes = {path: x.shape for path, x in fs.tree.named_leaves(model.init(fs.random.key(0))["blocks"]).items()}
    assert shapes["experts.gate"] == (3, 6, 5, DIM) and shapes["experts.shared.down"] == (3, 10, DIM)
    assert "gate" not in shapes and model.balanced == (("blocks.experts.bias", 0.01),)
    layout = fs.plan_layout(model, fs.AbstractMesh(("dp", "ep"), (4, 3)))
    where = {leaf.path: str(leaf.params) for leaf in layout.leaves}
    assert where["blocks.experts.up"] == "P(None, 'ep', None, 'dp') owned over ep"
    assert where["blocks.experts.router"] == "P(None, None, ('dp', 'ep'))"


refusal = functools.partial(helpers.refusal, kind=ConfigError)


def test_refusals():
    assert refusal(lambda: Experts(4, 5, 0, shared=-1, bias_rate=-0.1)) == (
        "fs.models.Experts has numbers that do not fit.\n"
        "  intermediate_size=0: at least 1\n  shared=-1: at least 0\n  bias_rate=-0.1: at least 0\n"
        "  top_k=5: a token chooses among 4 experts\n"
        "Write, for example, fs.models.Experts(count=8, active=2, intermediate_size=32)."
    )
    model = decoder(DecoderConfig(experts=Experts(6, 2, 9)))
    mesh = fs.AbstractMesh(("ep", "tp"), (4, 2))
    assert refusal(lambda: fs.plan_layout(model, mesh)) == (
        "fs.models.decoder does not fit the mesh {ep: 4, tp: 2}.\n"
        "  6 experts: not a multiple of ep=4\n"
        "  intermediate_size 9 of an expert: not a multiple of tp=2\n"
        "Use a different mesh, model or kind of attention, or rules that replicate these dims."
    )
    rules = fs.DEFAULT_RULES.replace(expert=("dp", "ep"), mlp=None)
    mesh = fs.AbstractMesh(("dp", "ep"), (2, 2))
    assert "  rule expert=dp, ep: only ep can shard experts\n" in refusal(lambda: fs.plan_layout(model, mesh, rules))
