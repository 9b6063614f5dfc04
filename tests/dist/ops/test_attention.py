"""Attention over a cut sequence against `scaled_dot_product_attention` on the whole tensors, on real ranks.

Every rank makes the whole tensors, computes the reference in float64, and compares the part that it holds.
"""

import functools
import importlib
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fsharding as fs
from fsharding import ops
from fsharding.base import _compat
from fsharding.base.errors import TransformError
from fsharding.comm.handles import Works
from fsharding.comm.native import Native
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import coordinate
from fsharding.testing import assert_bitwise_equal, assert_trees_close, device_mesh, run_ranks
from tests.helpers import Largest, examples

MODULE = importlib.import_module("fsharding.ops.attention")  # the package has a function of this name
KINDS = ["ring", "gather", "ulysses"]
SECONDS = 60.0


@functools.cache
def mesh_of(**sizes):
    return device_mesh(AbstractMesh(tuple(sizes), tuple(sizes.values())))


@dataclass(frozen=True)
class Case:
    """A problem: sizes of the whole tensors, and what is hidden. `ends` are those of the documents of each row."""

    cp: int
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    tokens: int = 16
    width: int = 8
    causal: bool = True
    documents: tuple[tuple[int, ...], ...] | None = None
    tile: int = 1024
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def values(self):
        """q, k, v and the weight of each result, whole, the same on every rank; laid out as linear layers leave them."""
        draw = torch.Generator().manual_seed(self.seed)

        def make(heads):
            x = torch.randn(self.batch, self.tokens, heads, self.width, generator=draw, dtype=torch.float64)
            return x.to(self.dtype).transpose(1, 2)

        return [make(h) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]

    def document_of_each(self):
        return None if self.documents is None else torch.tensor(self.documents)

    def reference(self):
        """Result and gradients of q, k and v in float64."""
        q, k, v, w = [x.double().requires_grad_() for x in self.values()]
        mask = torch.ones(self.tokens, self.tokens, dtype=torch.bool)
        mask = mask.tril() if self.causal else mask
        if self.documents is not None:
            of = self.document_of_each()
            mask = mask & (of[:, None, :, None] == of[:, None, None, :])
        k_all, v_all = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask, scale=self.scale)
        return out.detach(), *torch.autograd.grad((out * w).sum(), (q, k, v))


def part(tensors, mesh):
    return ops.cut_sequence(list(tensors), dim=2, mesh=mesh)


def run(case, kind, mesh, call=None):
    """This rank's part of the result and the gradients."""
    q, k, v, w = part(case.values(), mesh)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    of = case.document_of_each()
    of = None if of is None else ops.cut_sequence(of, mesh=mesh)
    with mock.patch.object(MODULE, "_TILE", case.tile):
        f = functools.partial(
            ops.attention, causal=case.causal, documents=of, kind=kind, scale=case.scale, mesh=mesh
        )  # fmt: skip
        out = f(q, k, v) if call is None else call(f, q, k, v)
        return [out.detach(), *torch.autograd.grad((out * w).sum(), (q, k, v))]


# ---------------------------------------------------------------------------------------------------------------- the law
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def is_attention(case):
    mesh = mesh_of(cp=case.cp)
    want = part(case.reference(), mesh)
    for kind in KINDS:
        if kind == "ulysses" and case.heads % case.cp:
            continue
        found = run(case, kind, mesh)
        assert all(x.dtype == case.dtype for x in found)
        near = TOLERANCE[case.dtype]
        assert_trees_close(found, want, rtol=near, atol=near, what=f"{kind}: out, dq, dk, dv")
        assert_bitwise_equal(run(case, kind, mesh), found, f"{kind} again")


@st.composite
def cases(draw):
    cp = draw(st.sampled_from([2, 4]))
    kv_heads = draw(st.integers(1, 4))
    tokens = 2 * cp * draw(st.integers(1, 9))
    batch = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    documents = None
    if draw(st.booleans()):
        packed = st.lists(st.integers(0, tokens), max_size=4).map(
            lambda ends: tuple(sum(i >= end for end in ends) for i in range(tokens))
        )
        mixed = st.tuples(*[st.integers(0, 2)] * tokens)
        documents = tuple(draw(st.tuples(*[st.one_of(packed, packed, mixed)] * batch)))
    return Case(
        cp=cp,
        batch=batch,
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        tokens=tokens,
        width=draw(st.sampled_from([1, 2, 8, 16, 40])),
        causal=draw(st.booleans()),
        documents=documents,
        tile=draw(st.sampled_from([1024, 3, 8])),
        # A log-sum-exp of scores in the tens has few digits after the point in float32.
        scale=draw(st.sampled_from([None, 0.2] if dtype == torch.float32 else [None, 1.5])),
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
    )


@examples(20, 100)
@given(cases())
def test_all_kinds_are_attention_over_the_whole_sequence(case):
    run_ranks(is_attention, case.cp, case, timeout=SECONDS)


PACKED = ((0,) * 10 + (1,) * 14 + (2,) * 8, (0,) * 31 + (7,))


def test_narrow_dtypes_are_merged_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        for documents in (None, PACKED):
            case = Case(4, tokens=32, documents=documents, dtype=dtype)
            run_ranks(is_attention, 4, case, timeout=SECONDS)


# --------------------------------------------------------------------------------------------------- beside other axes
def beside_data_parallel():
    """Each dp rank has rows of its own; under autograd's checkpoint, and with the mesh of `set_mesh`."""
    mesh = mesh_of(dp=2, cp=2)
    case = Case(2, seed=coordinate(mesh)["dp"], tokens=24, documents=((0,) * 11 + (1,) * 13,) * 2)
    want = part(case.reference(), mesh)
    for kind in KINDS:
        with fs.set_mesh(mesh):
            again = run(case, kind, None, lambda f, *qkv: checkpoint(f, *qkv, use_reentrant=False))
        assert_trees_close(again, want, rtol=1e-5, atol=1e-5, what=kind)
        assert_bitwise_equal(again, run(case, kind, mesh), kind)
        empty = run(Case(2, tokens=0), kind, mesh)
        assert [x.shape[2] for x in empty] == [0] * 4


def test_beside_data_parallel_ranks_with_remat_and_without_tokens():
    run_ranks(beside_data_parallel, 4, timeout=SECONDS)


# ------------------------------------------------------------------------------------------------------------ transforms
def transforms(documents):
    mesh = mesh_of(cp=2)
    case = Case(2, tokens=32, dtype=torch.float64, documents=documents)
    q, k, v, w = part(case.values(), mesh)
    of = None if documents is None else ops.cut_sequence(case.document_of_each(), mesh=mesh)
    want = part(case.reference(), mesh)
    whole = [x.double() for x in case.values()]
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (case.document_of_each()[:, None, :, None] == case.document_of_each()[:, None, None, :])

    def dense(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    tangent = part([torch.func.jvp(dense, tuple(whole[:3]), tuple(x.sin() for x in whole[:3]))[1]], mesh)[0]
    for kind in KINDS:
        f = functools.partial(ops.attention, documents=of, kind=kind, mesh=mesh)
        grads = torch.func.grad(lambda q, k, v, f=f: (f(q, k, v) * w).sum(), argnums=(0, 1, 2))(q, k, v)
        assert_trees_close(grads, tuple(want[1:]), rtol=1e-9, atol=1e-9, what=f"{kind}: grad")
        found = torch.func.jvp(f, (q, k, v), (q.sin(), k.sin(), v.sin()))[1]
        assert_trees_close(found, tangent, rtol=1e-9, atol=1e-9, what=f"{kind}: jvp")
        many = torch.func.vmap(f, in_dims=(0, None, None))(torch.stack((q, 2 * q)), k, v)
        assert_trees_close(many, torch.stack((f(q, k, v), f(2 * q, k, v))), rtol=1e-9, atol=1e-9, what=f"{kind}: vmap")
        curved = lambda q, f=f: (f(q, k, v).square() * w).sum()  # noqa: E731
        twice = torch.func.jvp(torch.func.grad(curved), (q,), (q,))[1]
        step = 1e-5 * q
        slope = (torch.func.grad(curved)(q + step) - torch.func.grad(curved)(q - step)) / 2e-5
        assert_trees_close(twice, slope, rtol=1e-6, atol=1e-6, what=f"{kind}: jvp of grad")


def test_every_kind_under_every_transform():
    for documents in (None, PACKED):
        run_ranks(transforms, 2, documents, timeout=SECONDS)


def twice(kind):
    """Second derivatives that autograd is asked for, of a sum: its own gradient is a constant."""
    q, k, v, _ = part(Case(2).values(), mesh_of(cp=2))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(ops.attention(q, k, v, kind=kind, mesh=mesh_of(cp=2)).sum(), q, create_graph=True)
    try:
        torch.autograd.grad(grad.square().sum(), q)
    except (TransformError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_second_derivatives_are_never_silently_zero():
    for text in run_ranks(twice, 2, "ring", timeout=SECONDS):
        assert text == (
            "TransformError: fs.ops.attention is computed block by block here, which autograd can differentiate once only.\n"
            "Take second derivatives with torch.func."
        )
    for kind in ("gather", "ulysses"):
        assert all("is not implemented" in text for text in run_ranks(twice, 2, kind, timeout=SECONDS))


# ---------------------------------------------------------------------------------------------------------------- memory
def memory_of_a_ring(case):
    """Bytes that autograd keeps; the largest tensor of forward and backward; bytes sent by each of them."""
    mesh = mesh_of(cp=case.cp)
    q, k, v, w = (x.requires_grad_() for x in part(case.values(), mesh))
    of = None if case.documents is None else ops.cut_sequence(case.document_of_each(), mesh=mesh)
    kept = {}

    def keep(x):
        kept[_compat.storage_id(x)] = x
        return x

    with mock.patch.object(MODULE, "_TILE", case.tile), Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), fs.debug.count_bytes() as forward:
            out = ops.attention(q, k, v, documents=of, mesh=mesh)
        with fs.debug.count_bytes() as backward:
            torch.autograd.grad(out, (q, k, v), w)
    return sum(x.untyped_storage().nbytes() for x in kept.values()), largest.elements, forward.bytes, backward.bytes


def test_memory_and_bytes_of_a_ring_are_what_the_docs_say():
    for cp in (2, 4):
        for documents in (None, ((0,) * 100 + (1,) * 156,) * 2):
            case = Case(cp, tokens=256, width=4, documents=documents, tile=16)
            local = case.tokens // cp
            rows = case.batch * local
            keys = 4 * 2 * rows * case.kv_heads * case.width
            words = 0 if documents is None else 8 * rows
            kept = keys + 4 * 2 * rows * case.heads * case.width + 4 * rows * case.heads + words
            # Nothing is larger than the queries, neither scores nor a mask.
            largest = rows * case.heads * case.width
            assert largest < case.batch * local * local
            sent = (cp - 1) * (keys + words)
            for found in run_ranks(memory_of_a_ring, cp, case, timeout=SECONDS):
                assert found == (kept, largest, sent, sent + cp * keys)


def order_of_events():
    """What forward does, in order, and which blocks of keys are alive at once."""
    mesh, events = mesh_of(cp=4), []
    q, k, v, _ = part(Case(4).values(), mesh)
    start, wait, compute = Native.send_recv, Works.wait, _compat.attend_block

    def logged(name, fn):
        def call(*args, **kwargs):
            events.append(name)
            return fn(*args, **kwargs)

        return call

    with (
        mock.patch.object(Native, "send_recv", logged("start", start)),
        mock.patch.object(Works, "wait", lambda self, timeout=None: self.works and logged("wait", wait)(self)),
        mock.patch.object(_compat, "attend_block", logged("compute", compute)),
    ):
        ops.attention(q, k, v, mesh=mesh)
    return events


def test_the_next_block_is_on_its_way_while_this_one_is_computed():
    for events in run_ranks(order_of_events, 4, timeout=SECONDS):
        assert events == ["start", "compute", "wait"] * 3 + ["compute"]
