"""Generation on real ranks: one process's tokens on every mesh, and parameters that are gathered once a call."""

import dataclasses
import functools
import math
from itertools import chain

import pytest

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import run_ranks
from tests.helpers import full, mesh_of, refusal, token_batch

CONFIGS = {
    "grouped": fs.models.DecoderConfig(vocab_size=50, dim=32, layers=3, heads=8, kv_heads=2, intermediate_size=36),
    "fused": fs.models.DecoderConfig(
        vocab_size=51, dim=32, layers=2, heads=8, kv_heads=4, intermediate_size=36, tied=True, fused=True
    ),
    "experts": fs.models.presets.recipe("tiny-moe").config,
    "latent": fs.models.presets.tiny_deepseek_v3().config,
}
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3]]
COUNT = 12


def state_of(name, axes, strategy="zero3", **options):
    """A state whose weights are large enough that tokens differ."""
    model, mesh = fs.models.decoder(CONFIGS[name], **options), mesh_of(axes)
    layout = fs.plan_layout(model, mesh, strategy=fs.Strategy.parse(strategy))

    def init(key):
        return fs.tree.map(lambda draw: dataclasses.replace(draw, scale=5 * draw.scale), model.init(key))

    return model, fs.init_state(init, fs.sgd(0.1), fs.random.key(0), layout)


def generated(name, axes, strategy, **options):
    """Greedy tokens, drawn ones, and drawn ones that end."""
    model, state = state_of(name, axes, strategy, **options)
    draws = {"key": fs.random.key(1), "top_k": 20, "top_p": 0.95}
    return [
        fs.models.generate(model, state, PROMPTS, COUNT).tolist(),
        fs.models.generate(model, state.params, PROMPTS, COUNT, **draws).tolist(),
        fs.models.generate(model, state, PROMPTS, COUNT, eos=[*range(0, 50, 2)], **draws).tolist(),
    ]


@functools.cache
def alone(name):
    tokens = generated(name, {"dp": 1}, "zero0")
    assert len({*chain(*tokens[0])}) > 2 and len({*chain(*tokens[1])}) > 5
    return tokens


CASES = {
    **{f"zero{level}": ("grouped", {"dp": 2}, f"zero{level}", {}) for level in range(4)},
    "tp": ("grouped", {"tp": 2}, "zero3", {}),
    "sequence": ("grouped", {"tp": 2}, "zero3", {"sequence": True}),
    "cp": ("grouped", {"cp": 2}, "zero3", {}),
    "fused": ("fused", {"tp": 2}, "zero3", {}),
    "latent": ("latent", {"tp": 2}, "zero3", {}),
    "experts": ("experts", {"dp": 2}, "zero3", {}),
    "experts over ep": ("experts", {"ep": 2}, "zero3", {}),
    "experts over tp": ("experts", {"tp": 2}, "zero1", {}),
    "hsdp": ("grouped", {"replica": 2, "dp": 2}, "hsdp", {}),
    "tp, fewer key heads": ("grouped", {"tp": 4}, "zero3", {}),
    "dp and tp": ("latent", {"dp": 2, "tp": 2}, "zero3", {}),
    "ep and tp": ("experts", {"ep": 2, "tp": 2}, "zero3", {}),
    "cp and tp": ("grouped", {"cp": 2, "tp": 2}, "zero3", {}),
}
MANY = {"hsdp", "cp and tp", "ep and tp"}


@pytest.mark.parametrize("case", [pytest.param(x, id=i, marks=full if i in MANY else []) for i, x in CASES.items()])
def test_tokens_are_those_of_one_process(case):
    name, axes, strategy, options = case
    for tokens in run_ranks(generated, math.prod(axes.values()), name, axes, strategy, **options):
        assert tokens == alone(name)


def traffic(name, axes, strategy):
    """What a rank sends in a call for 1 token, for COUNT tokens, and in an evaluation; and the gathers of the last."""
    model, state = state_of(name, axes, strategy)
    batch = fs.local_batch(token_batch(0, vocab=50), state.layout.mesh)
    fs.evaluate(model)(state, batch)
    sent = []
    for call in (
        lambda: fs.models.generate(model, state, PROMPTS, 1),
        lambda: fs.models.generate(model, state, PROMPTS, COUNT),
        lambda: fs.evaluate(model)(state, batch),
    ):
        with fs.debug.count_bytes() as counted, fs.debug.record_collectives() as counts:
            call()
        sent.append({"over dp": counted.by_axes.get(("dp",), (0, 0))[0], "in all": counted.calls})
    return sent, len(counts[0].gathers)


@pytest.mark.parametrize(("name", "axes"), [("grouped", {"dp": 2}), ("experts", {"dp": 2})])
def test_parameters_are_gathered_once_however_many_tokens(name, axes):
    for (one, many, evaluation), gathers in run_ranks(traffic, 2, name, axes, "zero3"):
        assert gathers == 2 + CONFIGS[name].layers
        # An evaluation sums its loss besides.
        assert one == many == {"over dp": gathers, "in all": gathers}
        assert evaluation["over dp"] > gathers
    for (one, many, _), gathers in run_ranks(traffic, 2, name, axes, "zero1"):
        assert one == many == {"over dp": 0, "in all": 0} and gathers == 0


@pytest.mark.parametrize(("ranks", "before"), [(2, 0), (4, 2)], ids=["tp", "tp, fewer key heads"])
def test_over_tp_each_token_sends_activations_and_no_parameters(ranks, before):
    layers = CONFIGS["grouped"].layers
    for (one, many, _), gathers in run_ranks(traffic, ranks, "grouped", {"tp": ranks}, "zero3"):
        # Two sums a block, that of the embedding, and the gather of the logits; key heads of two ranks come once.
        assert gathers == 0 and one["in all"] == before * layers + (2 * layers + 2)
        assert many["in all"] == before * layers + COUNT * (2 * layers + 2)


def own_prompts(name, axes):
    """Prompts of a rank's own, and a key."""
    model, state = state_of(name, axes)
    index, _ = data_rank_and_size(state.layout.mesh)
    rows, ends = PROMPTS[index : index + 1 + index], [[], [*range(0, 256, 2)]][index]
    key = fs.random.for_rank(fs.random.key(2), state.layout.mesh)
    tokens = fs.models.generate(model, state, rows, COUNT, key=key, eos=ends)
    whole = fs.tree.map(lambda x: x.full_tensor(), state.params)
    return tokens.tolist(), fs.models.generate(model, whole, rows, COUNT, key=key, eos=ends).tolist()


@pytest.mark.parametrize(("name", "axes"), [("grouped", {"dp": 2}), ("grouped", {"cp": 2})])
def test_ranks_have_prompts_and_ends_of_their_own(name, axes):
    results = run_ranks(own_prompts, 2, name, axes)
    assert all(tokens == want for tokens, want in results)


def unlike_calls(axes):
    model, state = state_of("grouped", axes)
    index = state.layout.mesh.get_local_rank()
    other = [[1, 2 + index]], [[1, 2]]
    said = refusal(fs.models.generate, model, state, other[0], 3, kind=ConfigError)
    return said, refusal(fs.models.generate, model, state, other[1], 3 + index, kind=ConfigError)


def test_ranks_of_tp_that_are_called_unlike_are_told():
    for prompts, counts in run_ranks(unlike_calls, 2, {"tp": 2}):
        assert "prompts" in prompts and "[[1, 2]]" in prompts and "[[1, 3]]" in prompts
        assert "max_new_tokens" in counts and counts.startswith("fs.models.generate")


def in_stages():
    model = fs.models.decoder(CONFIGS["grouped"])
    mesh, opt, options = mesh_of({"pp": 2}), fs.sgd(0.1), {"microbatches": 2}
    state, _ = fs.setup(model, None, opt, fs.random.key(0), "zero3", mesh=mesh, **options)
    said = refusal(fs.models.generate, model, state, PROMPTS, 3, kind=ConfigError)
    moved = fs.reshard(state, fs.plan_layout(model, mesh_of({"dp": 2})))
    return said, fs.models.generate(model, moved, PROMPTS, 3).shape


def test_stages_are_refused_with_the_call_that_moves_them():
    for said, shape in run_ranks(in_stages, 2):
        assert "pp=2" in said and "fs.reshard(state, fs.plan_layout(model, fs.make_mesh(dp=-1)))" in said
        assert shape == (3, 3)


def of_a_function(axes):
    """A function with gathers of its own, which meet whole tensors, under a scan; and its calls over dp."""
    model, state = state_of("grouped", axes)

    def apply(params, tokens):
        x = model.embed(fs.gather_unit(params["embed"]), {"tokens": tokens})
        x = fs.scan_units(model.block, params["blocks"], x, next_unit=params["head"])
        head = fs.gather_unit(params["head"])
        logits = fs.ops.column_linear(fs.ops.rms_norm(x.x, head["norm"]), head["unembed"])[0]
        whole = logits.shape[-1] == CONFIGS["grouped"].vocab_size
        return logits if whole else fs.ops.all_gather(logits, "tp", dim=2, size=CONFIGS["grouped"].vocab_size)

    with fs.debug.count_bytes() as sent:
        tokens = fs.models.generate(apply, state, PROMPTS, COUNT).tolist()
    return tokens, sent.by_axes.get(("dp",), (0, 0))[0]


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_a_function_that_gathers_generates_on_every_mesh(axis):
    for tokens, calls in run_ranks(of_a_function, 2, {axis: 2}):
        assert tokens == alone("grouped")[0]
        assert calls == (3 if axis == "dp" else 0)
