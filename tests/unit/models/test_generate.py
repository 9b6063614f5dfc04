"""Generation on one process: logits through a cache, tokens, draws, ends, functions without a cache, refused calls."""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.base.errors import (
    ArgumentError,
    ConfigError,
    DataError,
    NonFiniteError,
    RandomKeyError,
    TransformError,
    TreeError,
)
from fsharding.models import GQA, MLA, DecoderConfig, Stack, decoder
from fsharding.models.generate import generate
from fsharding.models.stacks import stacks_of
from tests.helpers import refusal, slow

FAMILIES = ["tiny", "tiny-moe", "tiny_llama3", "tiny_qwen2_5", "tiny_mixtral", "tiny_deepseek_v3"]
LATENT = MLA(4, q_rank=10, kv_rank=6, plain_dim=6, rotary_dim=4, value_dim=5)
CONFIGS = {
    **{name: fs.models.presets.recipe(name).config for name in FAMILIES},
    "fused, tied": DecoderConfig(50, 24, 2, 4, 2, 20, tied=True, fused=True, bias=True, qk_norm=True),
    "stacks": DecoderConfig(
        50, 24, 4,
        stacks=(Stack("zero", 1, LATENT), Stack("a", 2, GQA(4, 4, 6), intermediate_size=8), Stack("m", 1, GQA(3, 1, 8))),
    ),
}  # fmt: skip
SMALL = CONFIGS["fused, tied"]
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3]]


def params_of(config, dtype=torch.float64):
    """Weights large enough that everything matters."""
    draws = decoder(config).init(fs.random.key(1))
    return fs.tree.map(lambda draw: draw.tensor().to(dtype) * (4 if draw.kind == "normal" else 1), draws)


def logits_of(config):
    """A function of parameters and tokens: all logits of the model whose loss is trained, without a cache."""
    model = decoder(config)

    def head(params, x, batch):
        return F.linear(fs.ops.rms_norm(x.x, params["norm"], eps=config.eps), params["unembed"])

    loss = fs.model_loss(model._replace(head=head))
    return lambda params, tokens: loss(params, {"tokens": tokens})


def greedy(config, params, prompt, count):
    """The loop that one writes without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(config)(params, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_through_the_cache_are_those_of_all_tokens(name):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    tokens = torch.randint(config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    want, model = logits_of(config)(params, tokens).detach(), decoder(config)
    decode, found = model.decode, []
    runs = dict(stacks_of(decode))
    caches = {"blocks": decode.cache} if callable(decode.cache) else {f"blocks.{k}": v for k, v in decode.cache.items()}
    units = [(path, unit) for path in runs for unit in fs.unstack_units(fs.tree.at(params, path))]
    kept = [caches[path](unit, 2, 12) for path, unit in units]
    head = {**params["head"], **{name: fs.tree.at(params, path) for name, path in model.tied}}
    for first, last in ((0, 5), *((n, n + 1) for n in range(5, 10)), (10, 12)):
        positions = torch.arange(first, last).expand(2, -1)
        x = decode.embed(params["embed"], {"tokens": tokens[:, first:last], "positions": positions})
        for (path, unit), slots in zip(units, kept, strict=True):
            x = runs[path](unit, x, fs.tree.map(lambda leaf: leaf[:, :last], slots))  # noqa: B023
        found += [decode.logits(head, x, torch.full((2,), i)) for i in range(last - first)]
    torch.testing.assert_close(torch.stack(found, 1), want, rtol=1e-9, atol=1e-9)
    assert want.std() > 0.1


@slow
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_a_loop_without_a_cache(name):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    want = [greedy(config, params, prompt, 8) for prompt in PROMPTS]
    assert generate(config, params, PROMPTS, 8).tolist() == want
    assert generate(logits_of(config), params, PROMPTS, 8).tolist() == want
    assert len({*chain(*want)}) > 2


def test_a_row_depends_on_no_other_and_more_tokens_begin_with_the_same():
    params, key = params_of(SMALL), fs.random.key(5)
    drawn = generate(SMALL, params, PROMPTS, 20, key=key)
    assert torch.equal(generate(SMALL, params, PROMPTS, 7, key=key), drawn[:, :7])
    assert torch.equal(generate(SMALL, params, [[7, 7, 7, 7, 7, 7, 7], *PROMPTS[1:]], 20, key=key)[1:], drawn[1:])
    assert torch.equal(generate(decoder(SMALL), params, [torch.tensor(p) for p in PROMPTS], 20, key=key), drawn)
    assert not torch.equal(generate(SMALL, params, PROMPTS, 20, key=fs.random.key(6)), drawn)
    assert torch.equal(
        generate(SMALL, params, PROMPTS, 20, key=key, temperature=0), generate(SMALL, params, PROMPTS, 20)
    )
    assert torch.equal(generate(SMALL, params, PROMPTS, 20, key=key, top_k=1), generate(SMALL, params, PROMPTS, 20))
    tensor = torch.tensor([[3, 1], [4, 1]])
    assert torch.equal(generate(SMALL, params, tensor, 3), generate(SMALL, params, tensor.tolist(), 3))
    assert all(torch.equal(a, b) for a, b in zip(fs.tree.leaves(params), fs.tree.leaves(params_of(SMALL)), strict=True))


LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.0, 2.5, 0.0])
DRAWS = {
    "plain": ({}, LOGITS.softmax(0)),
    "temperature": ({"temperature": 0.5}, (2 * LOGITS).softmax(0)),
    "top_k": ({"top_k": 2}, LOGITS.where(LOGITS > 2.2, -math.inf).softmax(0)),
    "top_p": ({"top_p": 0.7}, LOGITS.where(LOGITS > 2.2, -math.inf).softmax(0)),
    "both": ({"top_k": 3, "top_p": 0.9}, LOGITS.where(LOGITS > 1.5, -math.inf).softmax(0)),
    "all": ({"top_k": 99, "top_p": 1.0}, LOGITS.softmax(0)),
    "hot": ({"temperature": 3.0, "top_p": 1e-6}, F.one_hot(torch.tensor(1), 6).float()),
}


@pytest.mark.parametrize(("options", "want"), DRAWS.values(), ids=DRAWS)
def test_tokens_are_drawn_from_the_distribution_that_is_asked_for(options, want):
    rows, count = 20, 100
    constant = lambda params, tokens: LOGITS.expand(*tokens.shape, -1)  # noqa: E731
    drawn = generate(constant, {}, [[0]] * rows, count, key=fs.random.key(0), **options)
    share = torch.bincount(drawn.flatten(), minlength=6) / (rows * count)
    assert (share[want == 0] == 0).all()
    # Five standard deviations of a share.
    assert ((share - want).abs() <= 5 * (want * (1 - want) / (rows * count)).sqrt() + 1e-9).all(), share


def test_rows_end_with_eos_and_the_loop_when_all_have_ended():
    def after(params, tokens):  # the token after t is t + 1
        return F.one_hot((tokens + 1) % 10, 10).float()

    seen = []
    result = generate(after, {}, [[4], [2, 3], [6]], 9, eos=7, stream=lambda new: seen.append(new.tolist()))
    assert result.tolist() == [[5, 6, 7, 7, 7, 7, 7, 7, 7], [4, 5, 6, 7, 7, 7, 7, 7, 7], [7] * 9]
    assert seen == [[5, 4, 7], [6, 5, 7], [7, 6, 7], [7, 7, 7]]
    result = generate(after, {}, [[4], [2, 3]], 6, eos=[9, 6])
    assert result.tolist() == [[5, 6, 9, 9, 9, 9], [4, 5, 6, 9, 9, 9]]


def test_a_function_sees_the_last_tokens_that_it_can_take():
    widths = []

    def count(params, tokens):  # the next token is how many the row has, in a vocabulary of 9
        widths.append(tokens.shape[1])
        return F.one_hot(torch.arange(1, tokens.shape[1] + 1).expand_as(tokens), 9).float()

    result = generate(count, {}, [[0, 0, 0, 0, 0, 0], [0, 0]], 4, context=5)
    assert result.tolist() == [[5, 5, 5, 5], [2, 3, 4, 5]] and widths == [5] * 4

    def first(params, tokens):  # the next token is the first that is seen
        return F.one_hot(tokens[:, :1].expand_as(tokens), 9).float()

    assert generate(first, {}, [[1, 2, 3], [4]], 4, context=2).tolist() == [[2, 3, 2, 3], [4, 4, 4, 4]]


class Answer:
    """As models of Hugging Face answer."""

    def __init__(self, logits):
        self.logits = logits


def test_modules_generate_as_pure_functions():
    module = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11))
    net = fs.functionalize(module, units=["0", "1"])
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), fs.plan_layout(net, fs.make_mesh(device="cpu")))
    token, want = torch.tensor([[4]]), []
    for _ in range(6):
        token = module(token).argmax(-1)
        want.append(int(token))
    assert generate(net, state.params, [[1, 2, 4]], 6).tolist() == [want]
    wrapped = lambda params, tokens: Answer(net(params, tokens))  # noqa: E731
    assert generate(wrapped, state, [[1, 2, 4]], 6).tolist() == [want]


def test_compute_in_the_precision_of_the_state():
    config, dtypes = CONFIGS["tiny"], []
    state, _ = fs.setup(decoder(config), None, fs.sgd(0.1), fs.random.key(0), precision=fs.BF16)

    def logits(params, tokens):
        dtypes.append(params["head"]["unembed"].dtype)
        return logits_of(config)(params, tokens)

    assert torch.equal(generate(logits, state, [[3, 1]], 2), generate(config, state, [[3, 1]], 2))
    generate(logits, state, [[3, 1]], 1, precision=fs.FP32)
    generate(logits, state.params, [[3, 1]], 1)
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]


def of_losses():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 4))
    parts = fs.hf.families.Parts(lambda *_: None, lambda *_: None, lambda *_: None)
    module = torch.nn.Module()
    module.embed, module.layers, module.head = net[0], torch.nn.ModuleList([net[1]]), net[2]
    return fs.model_from_module(module, ("embed", "layers.*", "head"), parts)


def shortened(params, tokens):
    return torch.zeros(len(tokens), 5)


KEYED = {"key": fs.random.key(0)}
WRONG = {
    "text": (ArgumentError, SMALL, "to be", {}, "got text"),
    "texts": (ArgumentError, SMALL, ["to be"], {}, "[*text.encode()]"),
    "one prompt": (ArgumentError, SMALL, [3, 1], {}, "For a single prompt, pass [prompt]"),
    "a flat tensor": (ArgumentError, SMALL, torch.tensor([3, 1]), {}, "For a single prompt, pass [prompt]"),
    "a number": (ArgumentError, SMALL, 3, {}, "takes prompts of token ids, got 3"),
    "no prompts": (DataError, SMALL, [], {}, "no prompts"),
    "an empty prompt": (DataError, SMALL, [[1], []], {}, "prompt 1 has [0]"),
    "floating point": (DataError, SMALL, torch.ones(1, 2), {}, "prompts that are integers"),
    "outside": (DataError, SMALL, [[1, 50]], {}, "Ids are 0 to 49"),
    "count": (ConfigError, SMALL, [[1]], {"max_new_tokens": 0}, "max_new_tokens=0: an int, at least 1"),
    "top_k": (ConfigError, SMALL, [[1]], {"top_k": 0, **KEYED}, "top_k=0"),
    "top_p": (ConfigError, SMALL, [[1]], {"top_p": 1.5, **KEYED}, "top_p=1.5: above 0, at most 1"),
    "temperature": (ConfigError, SMALL, [[1]], {"temperature": -1.0, **KEYED}, "temperature=-1.0: at least 0"),
    "eos": (ConfigError, SMALL, [[1]], {"eos": -1}, "eos=-1: a token"),
    "no key": (ConfigError, SMALL, [[1]], {"temperature": 0.5, "top_k": 3}, "got temperature=0.5, top_k=3 but no key"),
    "a seed": (RandomKeyError, SMALL, [[1]], {"key": 3}, "needs a key int64[2]"),
    "context": (ConfigError, SMALL, [[1]], {"context": 8}, "Remove context="),
    "another model": (TreeError, CONFIGS["tiny"], [[1]], {}, "blocks.wq"),
    "other sizes": (TreeError, replace(SMALL, vocab_size=51), [[1]], {}, "embed.table is [50, 24], and [51, 24]"),
    "a module": (ArgumentError, torch.nn.Linear(2, 2), [[1]], {}, "fs.functionalize(module)"),
    "losses": (ConfigError, of_losses(), [[1]], {}, "it computes losses, not logits"),
    "another function": (ArgumentError, lambda params: None, [[1]], {}, "a function (params, tokens) -> logits"),
    "no logits": (TransformError, shortened, [[1]], {}, "shortened returned a tensor float32[1, 5] for tokens [1, 1]"),
    "precision": (ArgumentError, SMALL, [[1]], {"precision": torch.float32}, "Give fs.FP32"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "model", "prompts", "options", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_with_what_to_type(kind, model, prompts, options, text):
    said = refusal(generate, model, params_of(SMALL), prompts, **{"max_new_tokens": 2, **options}, kind=kind)
    assert text in said and (said.startswith(("fs.models.generate ", "fs.random.")))


def test_parameters_that_are_not_finite_are_said():
    params = fs.tree.map(lambda x: x * math.nan, params_of(SMALL))
    assert "logits that are NaN" in refusal(generate, SMALL, params, [[1]], 2, kind=NonFiniteError)
