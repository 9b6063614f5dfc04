"""Experts on one rank, against each token through each of its experts: values, every derivative, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fsharding import ops
from fsharding.base.errors import MeshError, SpecError, TransformError
from fsharding.ops.grouped_matmul import _takes_kernel, even_shares
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import refusal

COUNTS = [(3, 0, 4), (7, 0, 0), (0, 0, 7), (2, 3, 2)]


def values(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------------------------- products of groups
def one_by_one(x, w, counts):
    groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.einsum("md,mdf->mf", x, w[groups])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dims", [(4, 8), (3, 5)], ids=["aligned", "not_aligned"])
@pytest.mark.parametrize("by_column", [False, True])
def test_products_of_groups(counts, dims, by_column):
    d, f = dims
    x = values(7, d, dtype=torch.float32).requires_grad_()
    w = (
        values(3, f, d, seed=1, dtype=torch.float32).mT if by_column else values(3, d, f, seed=1, dtype=torch.float32)
    ).requires_grad_()
    assert _takes_kernel(x, w) == (dims == (4, 8)), "both ways are tested"
    y, want = ops.grouped_matmul(x, w, torch.tensor(counts)), one_by_one(x, w, counts)
    ahead = values(7, f, seed=2, dtype=torch.float32)
    found = torch.autograd.grad(y, [x, w], ahead)
    assert_trees_close([y, *found], [want, *torch.autograd.grad(want, [x, w], ahead)], rtol=1e-5, atol=1e-6)
    assert found[1].stride() == w.stride()


def test_every_derivative_of_products_of_groups():
    x, w, counts = values(7, 2).requires_grad_(), values(3, 2, 3, seed=1).requires_grad_(), torch.tensor([3, 0, 4])

    def product(x, w):
        return ops.grouped_matmul(x, w, counts)

    assert torch.autograd.gradcheck(product, (x, w), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (x, w))
    many = torch.stack([x.detach(), 2 * x.detach()])
    assert_bitwise_equal(torch.vmap(product, (0, None))(many, w.detach())[0], product(x.detach(), w.detach()))
    assert_trees_close(torch.func.jacrev(product, 1)(x, w), torch.func.jacfwd(product, 1)(x, w), rtol=1e-12)


def test_no_rows_and_no_groups():
    assert ops.grouped_matmul(torch.zeros(0, 4), torch.zeros(2, 4, 8), torch.tensor([0, 0])).shape == (0, 8)
    x, w = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 4, 8, requires_grad=True)
    y = ops.grouped_matmul(x, w, torch.zeros(0, dtype=torch.int64))
    assert [g.shape for g in torch.autograd.grad(y.sum(), [x, w])] == [(0, 4), (0, 4, 8)]


def test_products_that_do_not_fit():
    x, w = torch.zeros(7, 2), torch.zeros(3, 2, 4)
    rule = "fs.ops.grouped_matmul needs x [M, D], w [X, D, F] of one dtype, and X counts from 0 that sum to M.\n"
    assert refusal(lambda: ops.grouped_matmul(x, w, torch.tensor([1, 2, 3])), kind=SpecError) == (
        f"{rule}  x is torch.float32[7, 2], w is torch.float32[3, 2, 4]\n  counts are [1, 2, 3]\n"
        "Sort the rows by group, and count them with torch.bincount."
    )
    for other in (w.double(), w[:2], w.mT):
        assert refusal(
            lambda other=other: ops.grouped_matmul(x, other, torch.tensor([1, 2, 4])), kind=SpecError
        ).startswith(rule)
    text = refusal(
        lambda: torch.vmap(lambda c: ops.grouped_matmul(x, w, c))(torch.tensor([[7, 0, 0]])), kind=TransformError
    )
    assert (
        text
        == "fs.ops.grouped_matmul cannot run under a vmap over its counts.\nKeep the counts out of the vmap, or loop over the batch."
    )


# ------------------------------------------------------------------------------------------------------------ experts
def dense(x, router, gate, up, down, top_k):
    """Each token through each of its experts."""
    routing, rows = ops.route(x @ router.T, top_k=top_k), []
    for n in range(x.shape[0]):
        terms = [
            routing.weights[n, j] * ((F.silu(gate[e] @ x[n]) * (up[e] @ x[n])) @ down[e])
            for j, e in enumerate(routing.experts[n].tolist())
        ]
        rows.append(sum(terms[1:], terms[0]))
    return torch.stack(rows)


def sorted_by_expert(x, router, gate, up, down, top_k):
    return ops.experts_swiglu(x, gate, up, down, ops.route(x @ router.T, top_k=top_k))


def inputs(dtype=torch.float64):
    shapes = [(5, 3), (4, 3), (4, 2, 3), (4, 2, 3), (4, 2, 3)]
    return [values(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_experts_are_what_each_token_gets_from_each_of_its_experts(top_k):
    args = [x.requires_grad_() for x in inputs()]
    found, want = (fn(*args, top_k) for fn in (sorted_by_expert, dense))
    ahead = values(5, 3, seed=9)
    grads = [torch.autograd.grad(out, args, ahead) for out in (found, want)]
    assert_trees_close([found, *grads[0]], [want, *grads[1]], rtol=1e-11, atol=1e-12)


def test_experts_under_every_transform():
    args, ahead = inputs(), values(5, 3, seed=9)
    for x in args:
        x.requires_grad_()

    def whole(*args):
        return sorted_by_expert(*args, 2)

    assert torch.autograd.gradcheck(whole, args, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(whole, args, fast_mode=True)
    want = torch.autograd.grad(whole(*args), args, ahead)
    plain = [x.detach() for x in args]
    assert_trees_close(torch.func.vjp(whole, *plain)[1](ahead), want, rtol=1e-12)
    rows = torch.func.jacrev(whole, 2)(*plain)
    assert_trees_close((rows * ahead[:, :, None, None, None]).sum((0, 1)), want[2], rtol=1e-11)
    text = refusal(lambda: torch.vmap(lambda x: whole(x, *plain[1:]))(plain[0][None]), kind=TransformError)
    assert (
        text
        == "fs.ops.dispatch cannot run under a vmap over tokens.\nFlatten the batch into the tokens before routing."
    )


def test_rows_come_sorted_by_expert():
    routing = ops.Routing(torch.tensor([[2, 0], [0, 1], [2, 3]]), torch.ones(3, 2), torch.zeros(3, 5))
    rows, counts, plan = ops.dispatch(torch.tensor([[0.0], [1.0], [2.0]]), routing, 5)
    assert rows.flatten().tolist() == [0.0, 1.0, 1.0, 0.0, 2.0, 2.0] and counts.tolist() == [2, 1, 2, 1, 0]
    assert plan.send == plan.receive == (6,) and plan.mesh is None
    assert ops.combine(rows, plan).flatten().tolist() == [0.0, 2.0, 4.0]
    none = ops.dispatch(
        torch.zeros(0, 3), ops.Routing(torch.zeros(0, 2, dtype=torch.int64), torch.ones(0, 2), torch.zeros(0, 5)), 5
    )
    assert none.rows.shape == (0, 3) and not none.counts.any() and ops.combine(none.rows, none.plan).shape == (0, 3)


def test_a_capacity_gives_what_all_rows_give():
    args, ahead = [x.requires_grad_() for x in inputs()], values(5, 3, seed=9)

    def roomy(x, router, gate, up, down):
        return ops.experts_swiglu(x, gate, up, down, ops.route(x @ router.T, top_k=2), capacity=2.0)

    found, want = roomy(*args), sorted_by_expert(*args, 2)
    grads = [torch.autograd.grad(out, args, ahead) for out in (found, want)]
    assert_trees_close([found, *grads[0]], [want, *grads[1]], rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(roomy, args, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(roomy, args, fast_mode=True)


@pytest.mark.parametrize("chosen", [[0, 0, 0, 1], [0, 1, 0, 5], [0, -1, 0, 1]], ids=str)
def test_too_many_tokens_for_one_expert_are_nan_and_never_less(chosen):
    """Two tokens fit: a third one, and experts that do not exist, are refused; their weights change nothing else."""
    x, experts = torch.ones(4, 3), torch.tensor(chosen).unsqueeze(1)
    routing = ops.Routing(experts, torch.ones(4, 1), torch.zeros(4, 2))
    rows, counts, plan = ops.dispatch(x, routing, 2, capacity=1.0)
    assert rows.shape == (4, 3) and counts.tolist() == [2, 2]
    assert ops.combine(rows, plan).isnan().all()
    fits = routing._replace(experts=torch.tensor([[0], [1], [1], [0]]))
    rows, _, plan = ops.dispatch(x, fits, 2, capacity=1.0)
    assert torch.equal(ops.combine(rows, plan), x)


def test_what_experts_refuse():
    x, routing = torch.zeros(3, 2), ops.route(torch.zeros(3, 4), top_k=1)
    assert refusal(lambda: ops.dispatch(x[:2], routing, 4), kind=SpecError) == (
        "fs.ops.dispatch needs x [N, D] and experts [N, k] of the same tokens.\n  x is [2, 2], experts are [3, 1]\n"
        "Pass the x_ND whose logits ops.route got, with batch and positions flattened."
    )
    far = routing._replace(experts=routing.experts + 4)
    assert refusal(lambda: ops.dispatch(x, far, 4), kind=SpecError) == (
        "fs.ops.dispatch has 4 experts, from 0 on.\n  a token goes to expert 4\n"
        "Pass experts=, the number of all experts that ops.route chose from."
    )
    assert refusal(lambda: ops.dispatch(x, routing, 4, axis="epp"), kind=MeshError).startswith(
        "fs.ops.dispatch got an unknown axis 'epp'."
    )
    assert refusal(lambda: ops.combine(x[:2], ops.dispatch(x, routing, 4).plan), kind=SpecError) == (
        "fs.ops.combine needs results [M, D] for the 3 rows of the dispatch.\n  y is [2, 2]\n"
        "Pass one result for each row of dispatch, padding included."
    )
    for capacity in (0.5, 0, float("nan")):
        text = refusal(lambda capacity=capacity: ops.dispatch(x, routing, 4, capacity=capacity), kind=SpecError)
        assert text.startswith(f"fs.ops.dispatch got capacity={capacity}: some tokens would have no expert.")
    w = torch.zeros(3, 6, 2)
    assert refusal(lambda: ops.experts_swiglu(x, w, w, w, routing), kind=SpecError) == (
        "fs.ops.experts_swiglu needs weights of the 4 experts of this rank, of 4 in all.\n"
        "  gate is [3, 6, 2]\n  up is [3, 6, 2]\n  down is [3, 6, 2]\n"
        'Name their dim "expert" in plan_layout(names=...), with the rule expert="ep".'
    )


@pytest.mark.parametrize("counts", [(-8, 15), (80_007, -80_000)], ids=str)
def test_counts_below_0_never_reach_a_kernel(counts):
    with pytest.raises(SpecError) as caught:
        ops.grouped_matmul(torch.ones(7, 8), torch.ones(2, 8, 8), torch.tensor(counts))
    assert "X counts from 0 that sum to M." in str(caught.value) and f"counts are {list(counts)}" in str(caught.value)


# ------------------------------------------------------------------------------------------------------ without values
def test_shares_are_even_and_sum_to_all():
    assert even_shares(14, 4) == [4, 4, 3, 3] and even_shares(2, 4) == [1, 1, 0, 0] and even_shares(0, 2) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_values_each_expert_has_as_many_tokens(dtype):
    """Counts, products, losses and gradients have the shapes of any values."""
    with FakeTensorMode():
        x, w = torch.ones(7, 16, dtype=dtype, requires_grad=True), torch.ones(4, 8, 16, dtype=dtype, requires_grad=True)
        routing = ops.route(torch.zeros(7, 4, requires_grad=True), top_k=2)
        rows, counts, plan = ops.dispatch(x, routing, 4)
        assert (plan.send, plan.receive) == ((14,), (14,))
        assert (rows.shape, counts.shape, counts.dtype) == ((14, 16), (4,), torch.int64)
        counted = torch.ones(7, dtype=torch.bool)
        assert ops.expert_counts(routing, counted_N=counted).shape == (4,)
        total, number = ops.balance_loss(routing, counted_N=counted)
        y = ops.experts_swiglu(x, w, w, w, routing)
        grads = torch.autograd.grad(y.sum() + (total / number).to(dtype), [x, w])
        assert [g.shape for g in (y, *grads)] == [(7, 16), (7, 16), (4, 8, 16)]


def kept_by_hand(x, router, gate, up, down, room):
    """Experts that keep the `room` tokens with the highest probability each, one expert after the other."""
    probabilities = torch.softmax(x @ router.T, -1)
    chosen = probabilities.topk(2, -1).indices
    y = torch.zeros_like(x)
    for e in range(router.shape[0]):
        mine = (chosen == e).any(-1).nonzero().flatten()
        mine = mine[probabilities[mine, e].argsort(descending=True, stable=True)[:room]]
        weight = probabilities[mine, e] / probabilities[mine].topk(2, -1).values.sum(-1)
        hidden = torch.nn.functional.silu(x[mine] @ gate[e].T) * (x[mine] @ up[e].T)
        y = y.index_add(0, mine, weight[:, None] * (hidden @ down[e]))
    return y


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.5, 2.0])
def test_a_full_expert_drops_its_least_probable_tokens(capacity):
    args, ahead = [x.requires_grad_() for x in inputs()], values(5, 3, seed=9)
    room = math.ceil(capacity * 5 * 2 / args[1].shape[0])

    def dropping(x, router, gate, up, down):
        routing = ops.route(x @ router.T, top_k=2)
        return ops.experts_swiglu(x, gate, up, down, routing, capacity=capacity, drop=True)

    found, want = dropping(*args), kept_by_hand(*args, room)
    grads = [torch.autograd.grad(out, args, ahead) for out in (found, want)]
    assert_trees_close([found, *grads[0]], [want, *grads[1]], rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(dropping, args, check_forward_ad=True, fast_mode=True)


def test_of_equal_probabilities_the_later_tokens_are_dropped():
    routing = ops.Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), torch.full((4, 2), 0.5))
    x = torch.arange(1.0, 5.0)[:, None]
    rows, _, plan = ops.dispatch(x, routing, 2, capacity=1.0, drop=True)
    assert rows.flatten().tolist() == [1.0, 2.0, 0.0, 0.0]
    assert ops.combine(rows, plan).flatten().tolist() == [1.0, 2.0, 0.0, 0.0]
    text = refusal(lambda: ops.dispatch(x, routing, 2, drop=True), kind=SpecError)
    assert text.startswith("fs.ops.dispatch got drop=True without a capacity.")
