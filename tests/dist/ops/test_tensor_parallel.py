"""Tensor parallelism on real ranks: every op against the whole weights on one process, and torch's own answer beside it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import DataError, SpecError
from fsharding.mesh.device_mesh import coordinate
from fsharding.sharding.boxes import chunk
from fsharding.testing import assert_adjoint, assert_trees_close, rank_values, run_ranks

MESHES = [{"tp": 2}, {"tp": 4}]


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_here(x, mesh, dim=0):
    size, index = fs.AbstractMesh(("tp",), (mesh.size(),)).axis_size("tp"), coordinate(mesh)["tp"]
    start, stop = chunk(x.shape[dim], size, index)
    return x.narrow(dim, start, stop - start).clone()


def problem(vocab, hidden=10):
    x, up, down = values(2, 8, 6), values(hidden, 6, seed=1), values(hidden, 6, seed=2)
    table, scale = values(vocab, 6, seed=3), values(6, seed=4)
    tokens = torch.randint(vocab, (2, 8), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(1, 1).clone()
    targets[0, 2:4] = -100
    return x, up, down, table, scale, tokens, targets


def network(x, up, down, table, scale, tokens, targets, *, vocab, cut):
    """Embedding, norm, two linear maps, norm, tied head, loss: everything that a block does."""
    h = ops.embedding(tokens, table, vocab=vocab, sequence_dim=cut) + x
    (y,) = ops.column_linear(ops.rms_norm(h, scale, over="tp" if cut else ()), up, sequence_dim=cut)
    h = h + ops.row_linear(torch.tanh(y), down, sequence_dim=cut)
    (logits,) = ops.column_linear(ops.rms_norm(h, scale, over="tp" if cut else ()), table, sequence_dim=cut)
    return ops.cross_entropy(logits, targets, vocab=vocab).sum()


def on_a_rank(axes, vocab, sequence):
    mesh, cut = fs.make_mesh(device="cpu", **axes), 1 if sequence else None
    x, up, down, table, scale, tokens, targets = problem(vocab)
    x = rows_here(x, mesh, 1) if sequence else x
    leaves = [
        y.requires_grad_() for y in (x, rows_here(up, mesh), rows_here(down, mesh), rows_here(table, mesh), scale)
    ]
    with fs.set_mesh(mesh):
        loss = network(*leaves, tokens, targets, vocab=vocab, cut=cut)
        grads = torch.autograd.grad(loss, leaves)
        other = torch.func.grad(partial(network, vocab=vocab, cut=cut), argnums=(1, 3))(*leaves, tokens, targets)
    assert_trees_close(list(other), [grads[1], grads[3]], what="torch.func.grad")
    return loss.detach(), [g.detach() for g in grads]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("axes", "vocab"), [({"tp": 4}, 13), ({"tp": 4}, 5)])
def test_a_network_over_tp_is_that_of_one_process(axes, vocab, sequence):
    """A vocabulary of 5 over 4 ranks leaves one of them without a row."""
    ranks = axes["tp"]
    x, up, down, table, scale, tokens, targets = problem(vocab)
    leaves = [y.requires_grad_() for y in (x, up, down, table, scale)]
    want = network(*leaves, tokens, targets, vocab=vocab, cut=None)
    grads = torch.autograd.grad(want, leaves)
    for rank, (loss, found) in enumerate(run_ranks(on_a_rank, ranks, axes, vocab, sequence)):
        for i, (g, whole) in enumerate(zip(found, grads, strict=True)):
            dim = {0: 1 if sequence else None, 4: None}.get(i, 0)
            part = whole if dim is None else whole.narrow(dim, *_span(whole.shape[dim], ranks, rank))
            assert_trees_close(g, part, rtol=1e-5, atol=1e-5, what=f"gradient {i} on rank {rank}")
        assert_trees_close(loss, want.detach(), rtol=1e-5, what="loss")


def _span(size, ranks, rank):
    start, stop = chunk(size, ranks, rank)
    return start, stop - start


def adjoint(axes):
    mesh = fs.make_mesh(device="cpu", **axes)
    shared, cut = rank_values((4, 8), mesh, same=("tp",)), rank_values((4, 2), mesh)
    size = axes["tp"]
    assert_adjoint(
        partial(ops.copy_to_tp, mesh=mesh),
        partial(ops.reduce_from_tp, mesh=mesh),
        shared,
        mesh=mesh,
        same_in=("tp",),
        what="shared",
    )
    assert_adjoint(
        partial(ops.copy_to_tp, sequence_dim=1, mesh=mesh),
        partial(ops.reduce_from_tp, sequence_dim=1, mesh=mesh),
        cut,
        mesh=mesh,
        what="cut",
    )
    with pytest.raises(SpecError) as refusal:
        ops.reduce_from_tp(torch.ones(2, 3), sequence_dim=1, mesh=mesh)
    return str(refusal.value), size


@pytest.mark.parametrize("axes", MESHES)
def test_entering_and_leaving_a_region_are_transposes(axes):
    text, size = run_ranks(adjoint, axes["tp"], axes)[0]
    assert text == (
        f"fs.ops.reduce_from_tp cannot shard dim 1 of size 3 over tp of size {size}.\n"
        f"Make the number of tokens of each rank a multiple of {size}."
    )


# -------------------------------------------------------------------------------------------------- torch's own answer
class Plain(torch.nn.Module):
    def __init__(self, table, up, down):
        super().__init__()
        self.up = torch.nn.Linear(*reversed(up.shape), bias=False)
        self.down = torch.nn.Linear(*down.shape, bias=False)
        self.head = torch.nn.Linear(*reversed(table.shape), bias=False)
        for layer, w in ((self.up, up), (self.down, down.T), (self.head, table)):
            layer.weight = torch.nn.Parameter(w.clone())

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(x))))


def beside_torch(axes):
    mesh = fs.make_mesh(device="cpu", **axes)
    x, up, down, table, _, _, targets = problem(12, 12)
    net = Plain(table, up, down)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
    parallelize_module(net, mesh["tp"], plan)
    with loss_parallel():
        logits = net(x)
        flat = distribute_tensor(targets.flatten(), mesh["tp"], [Replicate()])
        theirs = F.cross_entropy(logits.flatten(0, 1), flat, reduction="sum", ignore_index=-100)
        theirs.backward()
    weights = [rows_here(w, mesh).requires_grad_() for w in (up, down, table)]
    with fs.set_mesh(mesh):
        (y,) = ops.column_linear(x, weights[0])
        h = x + ops.row_linear(torch.tanh(y), weights[1])
        ours = ops.cross_entropy(*ops.column_linear(h, weights[2]), targets, vocab=12).sum()
        grads = torch.autograd.grad(ours, weights)
    total = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
    assert net.down.weight.placements == (Shard(1),)
    found = [net.up.weight.grad.to_local(), net.down.weight.grad.to_local().T, net.head.weight.grad.to_local()]
    assert_trees_close(ours.detach(), total.detach(), rtol=1e-5, what="loss")
    assert_trees_close(list(grads), found, rtol=1e-5, atol=1e-6, what="gradients")


@pytest.mark.parametrize("axes", MESHES)
def test_torchs_own_parallel_layers_agree(axes):
    run_ranks(beside_torch, axes["tp"], axes)


def said_of(tokens, targets):
    mesh, texts = fs.make_mesh(device="cpu", tp=2), []
    rows = torch.ones(3, 4)
    for call in (
        lambda: ops.embedding(tokens, rows, vocab=6, mesh=mesh),
        lambda: ops.cross_entropy(rows[0].expand(*targets.shape, 4)[..., :3], targets, vocab=6, mesh=mesh),
    ):
        with pytest.raises(DataError) as refusal:
            call()
        texts.append(str(refusal.value))
    return texts


def test_ids_outside_the_vocabulary_are_refused_by_every_rank():
    assert run_ranks(said_of, 2, torch.tensor([[0, 6]]), torch.tensor([[-100, -2]])) == 2 * [[
        "fs.ops.embedding got tokens outside the vocabulary.\n  1 of 2, the first is 6\nIds are 0 to 5. "
        "Use a vocab_size of at least 7, or the tokenizer of this model.",
        "fs.ops.cross_entropy got targets outside the vocabulary.\n  1 of 2, the first is -2\nIds are 0 to 5, or -100 to ignore.",
    ]]  # fmt: skip
