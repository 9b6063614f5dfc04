"""Routing by example: what is chosen and with which weight, against the formulas of the papers, and what is refused."""

import torch

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import ConfigError, SpecError, TransformError
from fsharding.testing import assert_trees_close
from tests.helpers import refusal

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])


def test_a_softmax_over_the_chosen_is_the_normalized_softmax():
    found = ops.route(LOGITS, top_k=2)
    assert found.experts.tolist() == [[0, 1], [2, 3], [0, 1]], "of equals the first"
    assert_trees_close(found.weights, torch.softmax(LOGITS.gather(1, found.experts), -1), rtol=1e-6)
    assert_trees_close(found.scores, torch.softmax(LOGITS, -1), rtol=1e-6)
    alone = ops.route(LOGITS, top_k=1, normalize=False, scale=2.0)
    assert_trees_close(alone.weights[:, 0], 2 * torch.softmax(LOGITS, -1).amax(-1), rtol=1e-6)
    assert ops.route(LOGITS.bfloat16(), top_k=1).weights.dtype == torch.float32


def test_a_bias_chooses_and_does_not_weigh():
    logits = LOGITS.clone().requires_grad_()
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0], requires_grad=True)
    found = ops.route(logits, top_k=2, score="sigmoid", bias=bias, scale=2.5)
    assert found.experts.tolist() == [[3, 1], [3, 2], [3, 1]]
    chosen = torch.sigmoid(LOGITS).gather(1, found.experts)
    assert_trees_close(found.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True), rtol=1e-6)
    grads = torch.autograd.grad(found.weights.square().sum(), [logits, bias], allow_unused=True)
    assert grads[1] is None and not grads[0][0, 0] and grads[0][0, 1]


def test_groups_keep_those_with_the_two_best():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.7, 0.2]])
    assert ops.route(scores.logit(), top_k=3, score="sigmoid").experts.tolist() == [[0, 4, 2]]
    limited = ops.route(scores.logit(), top_k=3, score="sigmoid", groups=3, kept_groups=2)
    assert limited.experts.tolist() == [[0, 2, 3]], "groups have 1.0, 1.1, 0.9"
    assert ops.route(scores.logit(), top_k=2, score="sigmoid", groups=3, kept_groups=1).experts.tolist() == [[2, 3]]


def test_losses_are_sums_over_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    routing = ops.route(logits, top_k=2)
    total, weight = ops.balance_loss(routing)
    parts = torch.stack([(routing.experts == e).double().sum() for e in range(4)]) / 24
    assert weight == 12 and abs(total / weight - 4 * (parts * routing.scores.mean(0)).sum()) < 1e-12
    even = ops.route(torch.zeros(4, 2), top_k=2)
    assert ops.balance_loss(even)[0] == 4.0 and ops.expert_counts(even).tolist() == [4, 4]
    total, weight = ops.z_loss(logits)
    assert weight == 12 and abs(total - logits.exp().sum(-1).log().square().sum()) < 1e-12
    counted = torch.arange(12) < 5
    for whole, some in (
        (ops.balance_loss(ops.route(logits[:5], top_k=2)), ops.balance_loss(routing, counted_N=counted)),
        (ops.z_loss(logits[:5]), ops.z_loss(logits, counted_N=counted)),
    ):
        assert_trees_close([float(x) for x in some], [float(x) for x in whole], rtol=1e-12)
    assert ops.expert_counts(routing, counted_N=counted).sum() == 10


def test_a_bias_goes_up_for_those_who_have_little():
    moved = ops.next_bias(torch.tensor([0.1, 0.0, -0.5]), torch.tensor([9, 3, 0]), 0.01)
    assert_trees_close(moved, torch.tensor([0.09, 0.01, -0.49]), rtol=1e-6)
    assert ops.next_bias(torch.zeros(2), torch.tensor([4, 4]), 0.01).tolist() == [0.0, 0.0]


def test_losses_under_torch_func():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(logits):
        return ops.balance_loss(ops.route(logits, top_k=2))[0] + ops.z_loss(logits)[0]

    want = torch.autograd.grad(loss(leaf := logits.clone().requires_grad_()), leaf)[0]
    assert_trees_close(torch.func.grad(loss)(logits), want, rtol=1e-12)
    assert refusal(lambda: torch.vmap(loss)(logits[None]), kind=TransformError) == (
        "fs.ops.expert_counts cannot run under a vmap over tokens.\nLoop over the batch, or flatten it into the tokens."
    )


def test_refusals():
    assert refusal(lambda: fs.ops.route(LOGITS, top_k=5, score="argmax"), kind=ConfigError) == (
        "fs.ops.route cannot choose among 4 experts.\n"
        "  score='argmax': scores are 'softmax' and 'sigmoid'\n"
        "  top_k=5: a token chooses among 4 experts\n"
        "Change these arguments, or the number of experts in the router's logits."
    )
    assert refusal(lambda: ops.route(LOGITS, top_k=1, groups=3), kind=ConfigError) == (
        "fs.ops.route cannot choose among 4 experts.\n  groups=3, kept_groups=1: 4 experts are split into equal groups\n"
        "Change these arguments, or the number of experts in the router's logits."
    )
    assert refusal(lambda: ops.route(LOGITS[None], top_k=1, bias=torch.zeros(4)), kind=SpecError) == (
        "fs.ops.route needs logits [N, X] and a bias [X].\n  logits are [1, 3, 4]\n  bias is [4]\n"
        "Flatten batch and positions to tokens first."
    )
