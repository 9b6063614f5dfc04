"""Attention over a sequence that is sharded along a mesh axis, in the zig-zag order of `ops.context_parallel`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsharding.base import _compat, _functorch
from fsharding.base.dtypes import wide
from fsharding.base.errors import SpecError, message
from fsharding.base.public import public
from fsharding.comm.handles import Handle, done
from fsharding.comm.native import Message
from fsharding.comm.transport import send_recv
from fsharding.mesh.device_mesh import Group, Mesh, axis_group, axis_size, current_mesh
from fsharding.ops.collectives import all_gather, all_to_all
from fsharding.ops.context_parallel import zigzag, zigzag_order
from fsharding.ops.once import differentiable_once
from fsharding.sharding.leaf_plan import kind_text

__all__ = ["Kind", "RingStep", "attention", "plan_ring"]

Kind = Literal["ring", "gather", "ulysses"]
_KINDS = ("ring", "gather", "ulysses")

_TILE = 1024
"""Most queries and keys of a tile. With documents a block is computed in tiles, and hidden tiles are left out."""


@dataclass(frozen=True)
class _Settings:
    """The static arguments of a call to `attention`; the members of `group` share the sequence."""

    causal: bool
    scale: float | None
    axis: str
    mesh: Mesh | None
    group: Group


_ALONE = Group((0,), 0, None)


@public
def attention(
    q_BHTE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    axis: str = "cp",
    kind: Kind = "ring",
    scale: float | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """Compute `softmax(scale q k') v` over a sequence whose tokens are sharded over an axis of n ranks: [B, H, T, E].

    With n = 1 it is `scaled_dot_product_attention`; long packed rows are computed in tiles, without masked ones.
    Unlike torch, it is causal by default and takes fewer key heads than query heads (GQA). Otherwise `kind` selects:

    - "ring" (Liu et al. 2023, arXiv:2310.01889): keys and values are sent around during compute, and in backward again,
      with their float32 gradients. It takes memory for two more blocks (in backward, three of gradients). Masked blocks
      are skipped. Differentiable once by autograd; under a `torch.func` transform it runs as "gather".
    - "gather": all-gathers keys and values, with a mask [T, n T]. Valid under every transform.
    - "ulysses" (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls exchange heads for tokens and back, so a rank
      computes H / n heads of the full sequence.

    Args:
        q_BHTE: Floating point [B, H, T, E]; T is this rank's tokens, in the order of `ops.cut_sequence`.
        k_BKTE: [B, K, T, E]; query head h uses key head h // (H / K), so H is a multiple of K.
        v_BKTE: [B, K, T, E], or with a different head dim; the narrower ones are then padded with zeros.
        causal: Whether a token attends only to itself and earlier tokens, by global position.
        documents: Integer [B, T], the document of each token; attention stays inside a document.
        axis: Mesh axis that shards the sequence. Without a mesh, or on a mesh without it, it has one rank.
        kind: "ring", "gather", or "ulysses", which needs H to be a multiple of n, and repeats key heads if K isn't.
        scale: Factor of the scores; by default 1 / sqrt(E).
        mesh: Device mesh; by default the one of `fs.set_mesh`.

    Returns:
        [B, H, T, E] in the dtype of q; E is the head dim of v.

    Raises:
        SpecError: Shapes, dtypes or heads do not match each other or the axis; or `kind` is unknown.
        MeshError: The axis is unknown.

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 8)  # all scores are equal, so a token gets the mean of what it sees
        >>> v = torch.arange(4.0).view(1, 1, 4, 1)
        >>> fs.ops.attention(q, k, v).flatten()
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
        >>> fs.ops.attention(q, k, v, documents=torch.tensor([[0, 0, 1, 1]])).flatten()
        tensor([0.0000, 0.5000, 2.0000, 2.5000])
    """
    size = axis_size(axis, mesh)
    _check(q_BHTE, k_BKTE, v_BKTE, documents, kind, axis, size)
    wide_E = q_BHTE.shape[-1]
    value_E = v_BKTE.shape[-1]
    if wide_E != value_E:
        # The fast kernels, and messages that hold keys and values in one, need one head dim; zeros change no score.
        q, k, v = (F.pad(x, (0, max(wide_E, value_E) - x.shape[-1])) for x in (q_BHTE, k_BKTE, v_BKTE))
        scale = wide_E**-0.5 if scale is None else scale
        again = functools.partial(attention, causal=causal, documents=documents, axis=axis, kind=kind, mesh=mesh)
        return again(q, k, v, scale=scale)[..., :value_E]
    if size == 1 and (documents is None or q_BHTE.shape[2] <= _TILE or not _can_run_in_blocks(q_BHTE)):
        return _full(q_BHTE, k_BKTE, v_BKTE, _same_document(documents, documents), causal, scale)
    if size == 1:
        return _blockwise(q_BHTE, k_BKTE, v_BKTE, documents, _Settings(causal, scale, axis, mesh, _ALONE))
    mesh = mesh if mesh is not None else current_mesh()
    settings = _Settings(causal, scale, axis, mesh, axis_group(mesh, (axis,)))
    if kind == "ulysses":
        return _by_heads(q_BHTE, k_BKTE, v_BKTE, documents, settings)
    if kind == "gather" or not _can_run_in_blocks(q_BHTE):
        return _gathered(q_BHTE, k_BKTE, v_BKTE, documents, settings)
    return _blockwise(q_BHTE, k_BKTE, v_BKTE, documents, settings)


def _can_run_in_blocks(q: Tensor) -> bool:
    """Return whether `_blockwise` can run: torch.func needs a formula, and torch.compile cannot trace messages."""
    return q.numel() > 0 and not _functorch.in_functorch() and not torch.compiler.is_compiling()


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, kind: str, axis: str, size: int) -> None:
    if kind not in _KINDS:
        raise SpecError(message(f"got an unknown kind {kind!r}.", mend=f"Pass one of {', '.join(_KINDS)}."))
    fits = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    fits = fits and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    fits = fits and q.dtype == k.dtype == v.dtype
    fits = fits and (documents is None or (tuple(documents.shape) == (q.shape[0], q.shape[2])))
    mend = ""
    if not fits:
        mend = "Pass q as [B, H, T, E], k and v as [B, K, T, E], all of one dtype, and documents as [B, T]."
    elif q.shape[1] % k.shape[1]:
        mend = f"Make the number of query heads, {q.shape[1]}, a multiple of the number of key heads, {k.shape[1]}."
    elif size > 1 and q.shape[2] % 2:
        mend = f"{q.shape[2]} tokens don't split into two equal chunks: shard the sequence with ops.cut_sequence."
    elif size > 1 and kind == "ulysses" and q.shape[1] % size:
        mend = f"ulysses cannot shard {q.shape[1]} query heads over {axis}: {size}. Use kind='ring' or 'gather'."
    if mend:
        named = {"q": q, "k": k, "v": v} | ({} if documents is None else {"documents": documents})
        rows = [f"{name} is {kind_text(x)}" for name, x in named.items()]
        raise SpecError(message("got tensors that do not match.", rows, mend))


# ------------------------------------------------------------------------------------------ all keys and values at once
def _full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Compute attention by torch's function; with `causal`, queries and keys are the same tokens in ascending order."""
    if mask is not None and causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        causal = False
    # The fast kernels have no forward derivative and no second derivative.
    with sdpa_kernel(SDPBackend.MATH) if _functorch.in_functorch() else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)


def _same_document(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Return which keys are in the document of a query: bool[B, 1, T, S]."""
    if mine is None or theirs is None:
        return None
    return mine[:, None, :, None] == theirs[:, None, None, :]


def _gathered(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, settings: _Settings) -> Tensor:
    """Attend from this rank's queries to all keys, which stay in the order of the ranks."""
    k, v = all_gather(torch.stack((k, v)), settings.axis, dim=3, mesh=settings.mesh).unbind(0)
    theirs = all_gather(documents, settings.axis, dim=1, mesh=settings.mesh) if documents is not None else None
    mask = _same_document(documents, theirs)
    if settings.causal:
        order = zigzag_order(k.shape[2], settings.group.size, q.device)
        before = order.view(settings.group.size, -1)[settings.group.index][:, None] >= order
        mask = before if mask is None else mask & before
    return _full(q, k, v, mask, False, settings.scale)


# ----------------------------------------------------------------------------------------------------- heads for tokens
def _by_heads(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, settings: _Settings) -> Tensor:
    """Attend with some heads over the full sequence, between two exchanges; q, k and v are sent together."""
    size = settings.group.size
    exchange = functools.partial(all_to_all, axis=settings.axis, mesh=settings.mesh)
    # Each rank needs the key heads of its query heads: the fewest copies whose number is a multiple of the axis.
    copies = size // math.gcd(k.shape[1], size)
    k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
    by_rank = [x.unflatten(1, (size, -1)) for x in (q, k, v)]
    heads = [x.shape[2] for x in by_rank]
    joined = exchange(torch.cat(by_rank, 2).flatten(1, 2), split_dim=1, concat_dim=2)
    # Causal attention below takes tokens in ascending order; they are in the order of ranks here.
    order = zigzag_order(joined.shape[2], size, q.device)
    ascending = order.argsort()
    q, k, v = joined.index_select(2, ascending).split(heads, 1)
    if documents is not None:
        documents = all_gather(documents, settings.axis, dim=1, mesh=settings.mesh).index_select(1, ascending)
    if documents is None or not _can_run_in_blocks(q):
        out = _full(q, k, v, _same_document(documents, documents), settings.causal, settings.scale)
    else:
        out = _blockwise(q, k, v, documents, replace(settings, group=_ALONE))
    return exchange(out.index_select(2, order), split_dim=2, concat_dim=1)


# ----------------------------------------------------------------------------------------------------------------- ring
class RingStep(NamedTuple):
    """The queries and keys that a rank combines in one step of the ring."""

    source: int  # the member whose keys and values it holds
    queries: tuple[int, int]  # range of its two chunks that attend to any of these keys
    keys: tuple[int, int]  # range of the source's two chunks that they attend to
    diagonal: bool  # the same tokens: each attends to itself and earlier ones


@functools.lru_cache(maxsize=1024)
def plan_ring(size: int, index: int, causal: bool) -> tuple[RingStep, ...]:
    """Plan the steps of one member of a ring: its own keys first, then the keys of the member before it, and so on.

    With zig-zag chunks, every causal step costs every member the same: half a block.

    Args:
        size: Number of members.
        index: Member whose steps are planned, from 0.
        causal: Whether tokens attend only to themselves and earlier tokens.

    Returns:
        One `RingStep` for each member, in order.

    Example:
        >>> for step in fs.ops.plan_ring(2, 0, causal=True):
        ...     print(step)
        RingStep(source=0, queries=(0, 2), keys=(0, 2), diagonal=True)
        RingStep(source=1, queries=(1, 2), keys=(0, 2), diagonal=False)
    """
    steps: list[RingStep] = []
    for number in range(size):
        source = (index - number) % size
        queries = (0, 2)
        keys = (0, 2)
        if causal and source != index:
            mine = zigzag(size)[index]
            theirs = zigzag(size)[source]
            queries = (0 if mine[0] > theirs[0] else 1, 2)
            keys = (0, 2 if mine[1] > theirs[1] else 1)
        steps.append(RingStep(source, queries, keys, causal and source == index))
    return tuple(steps)


_Index: TypeAlias = tuple[slice, ...]
_Tiles: TypeAlias = Iterator[tuple[_Index, _Index, _compat.KeyBlock]]
"""Slices of the queries and of the keys of a tile; and its keys and values, with an additive mask or the diagonal."""


def _tiles(step: RingStep, q: Tensor, mine: Tensor | None, held: Sequence[Tensor], scale: float | None) -> _Tiles:
    """Return the tiles of a step in which any score is visible; one tile without documents."""
    k, v, *theirs = held
    half = q.shape[2] // 2
    every = slice(None)
    # A single member has the full sequence, whose length may be odd.
    queries, keys = (range(a * half, q.shape[2] if b == 2 else b * half) for a, b in (step.queries, step.keys))
    if mine is None:
        at, of = ((every, every, slice(r.start, r.stop)) for r in (queries, keys))
        yield at, of, _compat.KeyBlock(k[of], v[of], None, step.diagonal, scale)
        return
    for i in range(queries.start, queries.stop, _TILE):
        for j in range(keys.start, keys.stop, _TILE):
            at = (every, every, slice(i, min(i + _TILE, queries.stop)))
            of = (every, every, slice(j, min(j + _TILE, keys.stop)))
            seen = mine[:, None, at[2], None] == theirs[0][:, None, None, of[2]]
            if step.diagonal:
                seen &= torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril(i - j)
            if seen.any():
                # Half of the lowest number, not -inf: a row that a tile hides entirely would be NaN.
                mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
                mask.masked_fill_(~seen, torch.finfo(q.dtype).min / 2)
                yield at, of, _compat.KeyBlock(k[of], v[of], mask, False, scale)


def _ring_steps(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, settings: _Settings) -> Iterator[_Tiles]:
    """Return the tiles of each step, while keys and values are sent to the next member."""
    held = [x.contiguous() for x in (k, v, documents) if x is not None]
    steps = plan_ring(settings.group.size, settings.group.index, settings.causal)
    for step in steps:
        come, pending = (held, done(lambda: None)) if step is steps[-1] else _pass_on(held, settings.group)
        yield _tiles(step, q, documents, held, settings.scale)
        pending.wait()  # `held` is still being sent; it may be freed only now
        held = come


def _pass_on(xs: Sequence[Tensor], group: Group, tag: int = 0) -> tuple[list[Tensor], Handle[None]]:
    """Start to send tensors to the next member, and to receive the same from the member before."""
    if group.size == 1:
        return list(xs), done(lambda: None)
    received = [torch.empty_like(x) for x in xs]
    after = group.ranks[(group.index + 1) % group.size]
    before = group.ranks[group.index - 1]
    sends = [Message(after, tag + i, x) for i, x in enumerate(xs)]
    receives = [Message(before, tag + i, x) for i, x in enumerate(received)]
    return received, send_recv(sends, receives, group, xs[0].device)


def _blockwise(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, settings: _Settings) -> Tensor:
    return cast(tuple[Tensor, Tensor], _Ring.apply(q, k, v, documents, settings))[0]


class _Ring(Function):
    """Attention block by block, with blocks sent around a group; with one member, over its own block in tiles."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        out = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
        for tiles in _ring_steps(q, k, v, documents, settings):
            for at, _, block in tiles:
                _merge(out[at], lse[at], *_compat.attend_block(q[at], block))
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.settings = inputs[4]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:4], *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint recomputes at each access
        with torch.no_grad():
            grads = _ring_backward(grad, saved, ctx.settings)
        rule = "fs.ops.attention is computed block by block here, which autograd can differentiate once only."
        return *differentiable_once(rule, grads, (grad, *saved[:3])), None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys, in place: each part's weight is its sum of exponentials, with logarithm `lse`."""
    # Queries without any visible key so far have lse -inf: their first part then gets weight 1.
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(part * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _ring_backward(grad: Tensor, saved: Sequence[Tensor], settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v. Those of keys and values follow their block one step behind, and return last."""
    q, k, v, documents, out, lse = saved
    grad = grad.contiguous()
    q = q.contiguous()
    dq, *sums = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v))
    sums_pending = done(lambda: None)
    for tiles in _ring_steps(q, k, v, documents, settings):
        terms = [torch.zeros_like(x) for x in sums]
        for at, of, block in tiles:
            parts = _compat.attend_block_backward(grad[at], q[at], block, out[at], lse[at])
            _compat.foreach_add_([dq[at], *(x[of] for x in terms)], parts)
        sums_pending.wait()
        _compat.foreach_add_(sums, terms)
        # Keys, values and documents are in flight at the same time, with tags 0 to 2.
        sums, sums_pending = _pass_on(sums, settings.group, tag=3)
    sums_pending.wait()
    return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype)
