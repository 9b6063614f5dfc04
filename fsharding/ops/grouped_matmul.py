"""Products of groups of rows, each group with its own matrix: the compute of experts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from fsharding.base import _compat, _functorch, devices
from fsharding.base.errors import SpecError, TransformError, message
from fsharding.base.public import public
from fsharding.formats.quantized import Weight, dequantize

__all__ = ["even_shares", "grouped_matmul"]


def even_shares(rows: int, groups: int) -> list[int]:
    """Return row counts of groups, as even as possible; they stand in for counts that a fake tensor lacks."""
    return [(rows + groups - 1 - group) // groups for group in range(groups)]


@dataclass(frozen=True, eq=False)
class _Groups:
    """Where groups of rows begin and end."""

    counts: Tensor  # rows of each group, int64[X]
    outer: bool = False  # the map is `outer` below, not `rows`

    def bounds(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each group; even shares of all rows if the counts have no values."""
        counts = even_shares(rows, self.counts.numel()) if _compat.is_fake(self.counts) else self.counts.tolist()
        yield from itertools.pairwise(itertools.accumulate(counts, initial=0))

    def offsets(self, device: torch.device) -> Tensor:
        return self.counts.to(device).cumsum(0).to(torch.int32)

    def rows(self, x_MK: Tensor, w_XKN: Tensor) -> Tensor:
        """Multiply each row with the matrix of its group: `[M, N]`."""
        if _takes_kernel(x_MK, w_XKN):
            return F.grouped_mm(x_MK, w_XKN, offs=self.offsets(x_MK.device))
        out_MN = x_MK.new_empty(x_MK.shape[0], w_XKN.shape[-1])
        for w_KN, (start, stop) in zip(w_XKN, self.bounds(x_MK.shape[0]), strict=True):
            torch.mm(x_MK[start:stop], w_KN, out=out_MN[start:stop])
        return out_MN

    def sums(self, x_MK: Tensor, y_MN: Tensor) -> Tensor:
        """Sum the outer products of the rows of each group: `[X, K, N]`."""
        if _takes_kernel(x_MK.mT, y_MN):
            return F.grouped_mm(x_MK.mT, y_MN, offs=self.offsets(x_MK.device))
        out_XKN = x_MK.new_empty(self.counts.numel(), x_MK.shape[-1], y_MN.shape[-1])
        for out_KN, (start, stop) in zip(out_XKN, self.bounds(x_MK.shape[0]), strict=True):
            torch.mm(x_MK[start:stop].mT, y_MN[start:stop], out=out_KN)
        return out_XKN


def _takes_kernel(a: Tensor, b: Tensor) -> bool:
    """Return whether `grouped_mm` has a kernel for two tensors: their device, dtype, alignment and strides."""
    if a.device.type != "cpu" and b.ndim == 2:
        return False  # there groups along the summed dim must be aligned, and groups of tokens are not
    if _compat.is_fake(a) and a.dtype != torch.bfloat16:
        return False  # a fake tensor's kernel takes bfloat16 only, even if the real one takes more
    return a.numel() > 0 and b.numel() > 0 and _has_kernel(a.device.type, a.dtype) and _dense(a) and _dense(b)


def _dense(x: Tensor) -> bool:
    """Return whether rows, or columns, are dense and begin at multiples of 16 bytes."""
    *outer, inner, longer = (*x.stride()[:-2], *sorted(x.stride()[-2:]))
    start = 0 if _compat.is_fake(x) else x.data_ptr()
    return inner == 1 and all(n % 16 == 0 for n in (start, *(s * x.itemsize for s in (*outer, longer))))


@functools.cache
def _has_kernel(device: str, dtype: torch.dtype) -> bool:
    if device != "cpu" and not devices.is_here(device):  # of a fake tensor
        return dtype == torch.bfloat16
    # A selective checkpoint would mistake this product for the first one of the function that it recomputes.
    with _compat.outside_of_modes():
        a = torch.ones(8, 8, dtype=dtype, device=device)
        b = torch.ones(1, 8, 8, dtype=dtype, device=device)
        try:
            return bool((F.grouped_mm(a, b, offs=torch.tensor([8], dtype=torch.int32, device=device)) == 8).all())
        except RuntimeError:
            return False


class _Grouped(Function):
    """Both maps of `_Groups`: each is bilinear, and the derivative of each consists of the two."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, groups: _Groups) -> Tensor:
        return groups.sums(a, b) if groups.outer else groups.rows(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, _Groups], output: Tensor) -> None:
        a, b, ctx.groups = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (a, b), (grad,) = ctx.saved_tensors, grads
        rows, sums = (replace(ctx.groups, outer=outer) for outer in (False, True))
        wants_a, wants_b, _ = ctx.needs_input_grad
        if ctx.groups.outer:
            return _grouped(b, grad.mT, rows) if wants_a else None, _grouped(a, grad, rows) if wants_b else None, None
        grad_b = None
        if wants_b:
            # In the memory order of b: if it is column by column, the caller's own tensor is its transpose.
            by_column = b.stride(-2) == 1 and b.stride(-1) != 1
            grad_b = _grouped(grad, a, sums).mT if by_column else _grouped(a, grad, sums)
        return _grouped(grad, b.mT, rows) if wants_a else None, grad_b, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (a, b), (da, db) = ctx.saved_tensors, tangents[:2]
        terms = [_grouped(x, y, ctx.groups) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor, groups: _Groups) -> tuple[Tensor, int]:
        def at(x: Tensor, dim: int | None, i: int) -> Tensor:
            return x if dim is None else x.select(dim, i)

        rows = [_grouped(at(a, in_dims[0], i), at(b, in_dims[1], i), groups) for i in range(info.batch_size)]
        return torch.stack(rows), 0


def _grouped(a: Tensor, b: Tensor, groups: _Groups) -> Tensor:
    return cast(Tensor, _functorch.apply(_Grouped, a, b, groups))


@public
def grouped_matmul(x_MD: Tensor, w_XDF: Weight, counts_X: Tensor) -> Tensor:
    """Multiply the first `counts_X[0]` rows with the first matrix, the next `counts_X[1]` with the second, and so on.

    Args:
        x_MD: Floating point [M, D], rows sorted by group.
        w_XDF: One matrix for each group, [X, D, F]; a transposed view is as good. A `Quantized` is dequantized.
        counts_X: Integer [X], the rows of each group; 0 is allowed, and they sum to M.

    Returns:
        `[M, F]` in the dtype of `x_MD`.

    Raises:
        SpecError: Shapes, dtypes or counts do not match.
        TransformError: `counts_X` differs within a `vmap`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> w = torch.tensor([[[10.0]], [[100.0]]])
        >>> fs.ops.grouped_matmul(x, w, torch.tensor([1, 2])).flatten()
        tensor([ 10., 200., 300.])
    """
    w_XDF = dequantize(w_XDF)
    counts = _functorch.unwrapped(counts_X)
    if counts is None:
        mend = "Keep the counts out of the vmap, or loop over the batch."
        raise TransformError(message("cannot run under a vmap over its counts.", mend=mend))
    fits = x_MD.ndim == 2 and w_XDF.ndim == 3 and counts.shape == w_XDF.shape[:1] and x_MD.shape[1] == w_XDF.shape[1]
    # The kernel trusts the counts. They are checked on the CPU only: the host would wait for any other device.
    known = counts.tolist() if counts.device.type == "cpu" and not _compat.is_fake(counts) else None
    covered = known is None or (sum(known) == x_MD.shape[0] and min(known, default=0) >= 0)
    if not fits or x_MD.dtype != w_XDF.dtype or not covered:
        rows = [
            f"x is {x_MD.dtype}{list(x_MD.shape)}, w is {w_XDF.dtype}{list(w_XDF.shape)}",
            f"counts are {counts.tolist() if not _compat.is_fake(counts) else 'fake'}",
        ]
        text = "needs x [M, D], w [X, D, F] of one dtype, and X counts from 0 that sum to M."
        raise SpecError(message(text, rows, "Sort the rows by group, and count them with torch.bincount."))
    return _grouped(x_MD, w_XDF, _Groups(counts))
