"""How a sequence is cut, what a ring computes in which step, and attention on one rank. No process group."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import BatchError, MeshError, SpecError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import axis_size
from fsharding.ops.context_parallel import zigzag, zigzag_order
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import refusal

TWO, FOUR = AbstractMesh(("cp",), (2,)), AbstractMesh(("dp", "cp"), (2, 4))
SIZES = [1, 2, 3, 4, 7, 8]


# -------------------------------------------------------------------------------------------------------------- the cut
@pytest.mark.parametrize("size", SIZES)
def test_every_chunk_has_one_rank_and_every_rank_the_same_work(size):
    assert sorted(itertools.chain(*zigzag(size))) == list(range(2 * size))
    assert {sum(chunks) for chunks in zigzag(size)} == {2 * size - 1}
    rows = zigzag_order(6 * size, size).view(size, -1)
    assert sorted(rows.flatten().tolist()) == list(range(6 * size))
    assert all(row.tolist() == sorted(row.tolist()) for row in rows)


def seen(size, index, causal):
    """(query chunk, key chunk) of every pair that a rank computes, with the cost of it, step by step."""
    steps = []
    for step in ops.plan_ring(size, index, causal):
        mine, theirs = zigzag(size)[index], zigzag(size)[step.source]
        pairs = [(a, b) for a in mine[slice(*step.queries)] for b in theirs[slice(*step.keys)]]
        if step.diagonal:
            pairs = [(a, b) for a, b in pairs if a >= b]
        steps.append(pairs)
    return steps


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_computes_what_is_seen_once_and_every_step_costs_every_rank_the_same(size):
    chunks = range(2 * size)
    for causal in (True, False):
        found = [seen(size, index, causal) for index in range(size)]
        want = [(a, b) for a in chunks for b in chunks if a >= b or not causal]
        assert sorted(pair for steps in found for pairs in steps for pair in pairs) == want
        cost = [[sum(1.0 if a != b or not causal else 0.5 for a, b in pairs) for pairs in steps] for steps in found]
        assert all(costs == [2.0 if causal else 4.0] * size for costs in cost)


def test_a_ring_has_a_plan_to_read():
    assert [str(step) for step in ops.plan_ring(2, 0, True)] == [
        "RingStep(source=0, queries=(0, 2), keys=(0, 2), diagonal=True)",
        "RingStep(source=1, queries=(1, 2), keys=(0, 2), diagonal=False)",
    ]
    assert [step.keys for step in ops.plan_ring(2, 1, True)] == [(0, 2), (0, 1)]


def test_a_rank_has_an_early_and_a_late_chunk():
    assert ops.positions(12, mesh=TWO).tolist() == [0, 1, 2, 9, 10, 11]
    assert ops.positions(12, mesh=TWO, axis="tp").tolist() == ops.positions(12).tolist() == list(range(12))
    with fs.set_mesh(FOUR):
        assert ops.positions(16).tolist() == [0, 1, 14, 15]
    assert ops.positions(0, mesh=TWO).dtype == torch.int64 and ops.positions(0, mesh=TWO).shape == (0,)


def test_all_leaves_of_a_batch_are_cut_alike():
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "documents": [tokens + 100]}
    assert ops.cut_sequence(batch) is batch
    cut = ops.cut_sequence(batch, mesh=TWO)
    at = ops.positions(12, mesh=TWO)
    assert_bitwise_equal(cut, {"tokens": tokens[:, at], "documents": [tokens[:, at] + 100]})
    assert cut["tokens"].is_contiguous()
    assert_bitwise_equal(ops.cut_sequence(tokens.t(), dim=-2, mesh=TWO), tokens.t()[at])
    assert ops.cut_sequence(tokens[:, :0], mesh=FOUR).shape == (2, 0)


def test_axes_that_are_not_there_have_size_one():
    assert (axis_size("cp"), axis_size("cp", FOUR), axis_size("tp", FOUR)) == (1, 4, 1)
    with fs.set_mesh(TWO):
        assert (axis_size("cp"), axis_size("cp", FOUR)) == (2, 4)


# ------------------------------------------------------------------------------------------------------------- positions
def test_pairs_turn_by_their_positions():
    x = torch.randn(2, 3, 10, 8)
    angles = torch.arange(10)[:, None] * 500.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    whole = ops.rotary(x, torch.arange(10), base=500.0)
    assert_trees_close(whole, torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5)
    at = ops.positions(8, mesh=TWO)
    assert_bitwise_equal(ops.rotary(x[:, :, at], at, base=500.0), whole[:, :, at])
    rows = torch.stack([torch.arange(10), torch.arange(10) % 4])
    both = ops.rotary(x, rows)
    for row in range(2):
        assert_bitwise_equal(both[row], ops.rotary(x, rows[row])[row])
    assert ops.rotary(x.bfloat16(), rows).dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------------------------- one rank
@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_on_one_rank_it_is_the_function_of_torch(kind):
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [5, 5, 3, 3, 3, 5, 5]])
    many = [x.repeat_interleave(2, 1) for x in (k, v)]
    want = F.scaled_dot_product_attention(q, *many, is_causal=True, scale=0.3)
    assert_bitwise_equal(ops.attention(q, k, v, kind=kind, scale=0.3), want)
    with fs.set_mesh(AbstractMesh(("dp",), (2,))):
        assert_bitwise_equal(ops.attention(q, k, v, kind=kind, causal=False), F.scaled_dot_product_attention(q, *many))
    same = documents[:, None, :, None] == documents[:, None, None, :]
    for causal, mask in ((False, same), (True, same.tril())):
        want = F.scaled_dot_product_attention(q, *many, attn_mask=mask)
        assert_bitwise_equal(ops.attention(q, k, v, kind=kind, causal=causal, documents=documents), want)


def test_transforms_on_one_rank():
    q = torch.randn(2, 2, 6, 4)
    f = lambda q: ops.attention(q, q.sin(), q.cos())  # noqa: E731
    hessian_product = torch.func.jvp(torch.func.grad(lambda q: f(q).square().sum()), (q,), (q,))[1]
    leaf = q.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (grad,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
        want = torch.autograd.grad((grad * q).sum(), leaf)[0]
    assert_trees_close(hessian_product, want, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------------- bad input


def test_lengths_that_cannot_be_cut():
    assert refusal(ops.positions, 18, mesh=FOUR, kind=BatchError) == (
        "fs.ops.positions cannot shard a sequence of 18 over cp: 4.\n"
        "Each rank takes an early and a late chunk: make the length a multiple of 8, such as 16 or 24."
    )
    assert refusal(ops.positions, 2, mesh=TWO, kind=BatchError).endswith("a multiple of 4, such as 4.")
    batch = {"tokens": torch.zeros(2, 6), "targets": torch.zeros(2, 8), "weight": torch.zeros(2), "name": "a"}
    assert refusal(ops.cut_sequence, batch, mesh=TWO, kind=BatchError) == (
        "fs.ops.cut_sequence cannot shard 3 of 4 leaves over cp: 2.\n"
        "  name is str: no dim 1 to shard\n"
        "  tokens is float32[2, 6]: dim 1 has 6 tokens\n"
        "  weight is float32[2]: no dim 1 to shard\n"
        "Each rank takes an early and a late chunk: make the length a multiple of 4, such as 4 or 8. "
        "Pass the dim of tokens as dim=, and mark an entry without tokens: fs.Shared(x)."
    )
    assert refusal(ops.positions, 8, axis="cpp", kind=MeshError) == (
        "fs.ops.positions got an unknown axis 'cpp'. Axes are pp, replica, dp, ep, cp, tp. Did you mean 'cp'?"
    )


@pytest.mark.parametrize("cut_first", [ops.cut_sequence, fs.local_batch])
def test_a_second_cut_is_refused(cut_first: Callable[..., Any]):
    batch = cut_first({"tokens": torch.arange(16).view(2, 8), "targets": torch.arange(16).view(2, 8)}, mesh=TWO)
    assert refusal(ops.cut_sequence, batch, mesh=TWO, kind=BatchError) == (
        "fs.ops.cut_sequence cannot shard 2 of 2 leaves over cp: 2.\n"
        "  targets is int64[2, 4]: it has only this rank's tokens already\n"
        "  tokens is int64[2, 4]: it has only this rank's tokens already\n"
        "Shard a batch once: with fs.local_batch alone, or your own rows with fs.ops.cut_sequence."
    )
    made_of_it = {name: x + 0 for name, x in batch.items()}
    assert ops.cut_sequence(made_of_it, mesh=TWO)["tokens"].shape == (2, 2)  # Only the results themselves are known.


def test_positions_that_do_not_fit():
    assert refusal(ops.rotary, torch.zeros(2, 3, 5, 8), torch.arange(6), kind=SpecError) == (
        "fs.ops.rotary got shapes that do not match.\n"
        "  x is float32[2, 3, 5, 8]\n"
        "  positions are int64[6]\n"
        "Pass x as [B, H, T, E] with an even E, and positions as [T] or [B, T]."
    )
    assert "float32[2, 3, 5, 7]" in refusal(ops.rotary, torch.zeros(2, 3, 5, 7), torch.arange(5), kind=SpecError)
    assert "float32[5, 8]" in refusal(ops.rotary, torch.zeros(5, 8), torch.arange(5), kind=SpecError)


def test_tensors_that_do_not_fit():
    q, k = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8)
    documents = torch.zeros(2, 5, dtype=torch.int64)
    assert refusal(ops.attention, q, k, k, documents=documents, kind=SpecError) == (
        "fs.ops.attention got tensors that do not match.\n"
        "  q is float32[2, 4, 6, 8]\n"
        "  k is float32[2, 2, 6, 8]\n"
        "  v is float32[2, 2, 6, 8]\n"
        "  documents is int64[2, 5]\n"
        "Pass q as [B, H, T, E], k and v as [B, K, T, E], all of one dtype, and documents as [B, T]."
    )
    for bad in ((q[0], k[0], k[0]), (q, k, k[:, :1]), (q, k.double(), k), (q[:1], k, k), (q[..., :4], k, k)):
        assert "Pass q as [B, H, T, E]" in refusal(ops.attention, *bad, kind=SpecError)
    assert refusal(ops.attention, q, q[:, :3], q[:, :3], kind=SpecError).endswith(
        "\nMake the number of query heads, 4, a multiple of the number of key heads, 3."
    )
    odd = [x[:, :, :5] for x in (q, k, k)]
    assert refusal(ops.attention, *odd, mesh=TWO, kind=SpecError).endswith(
        "\n5 tokens don't split into two equal chunks: shard the sequence with ops.cut_sequence."
    )
    assert refusal(lambda: ops.attention(q[:, :2], k, k, kind="ulysses", mesh=FOUR), kind=SpecError).endswith(
        "\nulysses cannot shard 2 query heads over cp: 4. Use kind='ring' or 'gather'."
    )
    assert refusal(lambda: ops.attention(q, k, k, kind="rign"), kind=SpecError) == (
        "fs.ops.attention got an unknown kind 'rign'.\nPass one of ring, gather, ulysses."
    )
    assert refusal(ops.attention, q, k, k, axis="context", kind=MeshError).startswith(
        "fs.ops.attention got an unknown axis 'context'."
    )


# ------------------------------------------------------------------------------------------------------------- compiled
def kernels_of(fn, *args):
    """The operators of aten in the forward graph that torch.compile makes of a function."""
    found = []

    def keep(graph, _):
        found.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph)

    torch._dynamo.reset()
    torch.compile(fn, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(*args)
    return found[0]


def test_compiled_attention_takes_the_fused_kernel_and_the_differentiable_one_under_transforms():
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    attend = functools.partial(ops.attention, causal=True)
    assert any("scaled_dot_product_flash_attention" in name for name in kernels_of(attend, q, q, q))

    def forward(q):
        return torch.func.jvp(lambda q: attend(q, q, q), (q,), (torch.ones_like(q),))

    assert not any("scaled_dot_product" in name for name in kernels_of(forward, q.detach()))


def test_compiled_attention_to_documents_is_that_of_an_eager_call():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 1100, 8, generator=generator) for heads in (4, 2, 2))
    documents = torch.arange(1100)[None] // 100
    attend = functools.partial(ops.attention, causal=True, documents=documents)
    torch._dynamo.reset()
    assert_trees_close(torch.compile(attend, backend="aot_eager")(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-5)
