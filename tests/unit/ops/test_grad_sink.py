"""`ops.scaled_matmul` and `ops.embedding` are torch's own, and write the gradient of a weight where the weight's node says."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsharding import ops
from fsharding.testing import assert_bitwise_equal


def put(homes, dtype, write):
    if not homes or homes[-1].dtype != dtype:
        return False
    write(homes.pop())
    return True


class Homed(torch.autograd.Function):
    """A weight whose gradients have homes, while there are any."""

    @staticmethod
    def forward(ctx, weight, homes):
        ctx.set_materialize_grads(False)
        ctx.put_term = functools.partial(put, homes)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


def homed(weight, *homes) -> Any:
    return Homed.apply(weight, list(homes))


def torchs(x, weight, dim):
    return F.linear(x, weight) if dim else x @ weight


def case(dim, *before):
    noise = torch.Generator().manual_seed(dim)
    weight = torch.randn(48, 80, generator=noise).requires_grad_()
    x = torch.randn(*before, weight.shape[dim], generator=noise).requires_grad_()
    return x, weight, torch.randn(*before, weight.shape[1 - dim], generator=noise)


def both_grads(result, x, weight, towards):
    return torch.autograd.grad(result, [x, weight], towards)


@pytest.mark.parametrize("before", [(), (7,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_is_written_to_its_home(dim, before):
    x, weight, towards = case(dim, *before)
    want = torchs(x, weight, dim)
    plain = ops.scaled_matmul(x, weight, dim)
    home = torch.full_like(weight, torch.nan)
    given = ops.scaled_matmul(x, homed(weight, home), dim)
    assert_bitwise_equal([plain, given], [want, want])
    toward_x, toward_weight = both_grads(want, x, weight, towards)
    assert_bitwise_equal(both_grads(plain, x, weight, towards), (toward_x, toward_weight))
    (found,) = torch.autograd.grad(given, x, towards, retain_graph=True)
    assert_bitwise_equal(found, toward_x)
    assert home.isnan().all(), "nobody asked for it"
    if before:
        found, nothing = torch.autograd.grad(given, [x, weight], towards, allow_unused=True)
        assert_bitwise_equal((found, home), (toward_x, toward_weight))
        assert nothing is None


@pytest.mark.parametrize("dim", [0, 1])
def test_without_a_home_it_is_returned(dim):
    x, weight, towards = case(dim, 5)
    want = both_grads(torchs(x, weight, dim), x, weight, towards)
    for homes in ((), (torch.empty_like(weight, dtype=torch.float64),)):
        assert_bitwise_equal(both_grads(ops.scaled_matmul(x, homed(weight, *homes), dim), x, weight, towards), want)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_differentiated_again_is_returned(dim):
    x, weight, towards = case(dim, 5)
    home = torch.full_like(weight, torch.nan)

    def norms(result):
        first = torch.autograd.grad(result, [x, weight], towards, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, weight])

    assert_bitwise_equal(norms(ops.scaled_matmul(x, homed(weight, home), dim)), norms(torchs(x, weight, dim)))
    assert home.isnan().all()


def test_inputs_that_need_no_gradient_are_not_asked_for_one():
    x, weight, towards = case(1, 5)
    home = torch.empty_like(weight)
    ops.scaled_matmul(x.detach(), homed(weight, home), 1).backward(towards)
    want = both_grads(torchs(x, weight, 1), x, weight, towards)[1]
    assert weight.grad is None
    assert_bitwise_equal(home, want)


@pytest.mark.parametrize("dim", [0, 1])
def test_autocast_and_compile_see_torchs_own(dim):
    x, weight, towards = case(dim, 5)
    home = torch.full_like(weight, torch.nan)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = ops.scaled_matmul(x, homed(weight, home), dim), torchs(x, weight, dim)
    assert found.dtype == torch.bfloat16
    assert_bitwise_equal(
        [found, *both_grads(found, x, weight, towards.bfloat16())],
        [want, *both_grads(want, x, weight, towards.bfloat16())],
    )
    compiled = torch.compile(ops.scaled_matmul, backend="eager", fullgraph=True)
    want = both_grads(torchs(x, weight, dim), x, weight, towards)
    assert_bitwise_equal(both_grads(compiled(x, homed(weight, home), dim), x, weight, towards), want)
    assert home.isnan().all()


TOKENS = [(), (0,), (7,), (3, 50)]
"""Shapes, of which the last has each token many times."""


def lookups(tokens, dtype=torch.float32):
    noise = torch.Generator().manual_seed(1)
    table = torch.randn(11, 24, generator=noise).to(dtype).requires_grad_()
    ids = torch.randint(0, 11, tokens, generator=noise)
    return ids, table, torch.randn(*tokens, 24, generator=noise).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_the_gradient_of_a_table_is_written_to_its_home(tokens, dtype):
    ids, table, towards = lookups(tokens, dtype)
    want = F.embedding(ids, table)
    (toward_table,) = torch.autograd.grad(want, table, towards)
    home = torch.full_like(table, torch.nan)
    found = ops.embedding(ids, homed(table, home))
    assert_bitwise_equal(found, want)
    assert torch.autograd.grad(found, table, towards, allow_unused=True) == (None,)
    assert_bitwise_equal(home, toward_table)
    (returned,) = torch.autograd.grad(ops.embedding(ids, homed(table)), table, towards)
    assert_bitwise_equal(returned, toward_table)


def test_a_table_that_is_differentiated_again_has_its_gradient_returned():
    ids, table, towards = lookups((3, 50))
    towards.requires_grad_()
    home = torch.full_like(table, torch.nan)

    def norm(result):
        (first,) = torch.autograd.grad(result, table, towards, create_graph=True)
        return torch.autograd.grad(first.square().sum(), towards)

    assert_bitwise_equal(norm(ops.embedding(ids, homed(table, home))), norm(F.embedding(ids, table)))
    assert home.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_are_summed_in_float32(dtype):
    ids, table, towards = lookups((3, 50), dtype)
    home = torch.full_like(table, torch.nan)
    (want,) = torch.autograd.grad(F.embedding(ids, (wide := table.float())), wide, towards.float())
    found = torch.autograd.grad(ops.embedding(ids, homed(table, home)), table, towards)
    assert_bitwise_equal(found, (want.to(dtype),))
    assert home.isnan().all()
