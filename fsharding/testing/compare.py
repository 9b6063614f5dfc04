"""Compare trees of tensors, and list every leaf that differs, with both values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fsharding.base import tree
from fsharding.base.errors import message
from fsharding.base.public import public
from fsharding.comm.leaf_memory import in_memory

__all__ = ["assert_bitwise_equal", "assert_trees_close", "compare"]


@public
def assert_bitwise_equal(a: tree.Tree, b: tree.Tree, what: str = "") -> None:
    """Assert that two trees have the same paths, and that leaves have equal dtypes, shapes and bits.

    NaNs are equal if their payloads are, and -0.0 differs from 0.0. DTensors must have equal meshes and placements, and
    their local tensors are compared. Leaves other than tensors, arrays and floats must have one type and be `==`.

    Args:
        a: Tree of tensors and plain values.
        b: Tree to compare with.
        what: Name of the trees in the message.

    Raises:
        AssertionError: The trees differ. The message has each such path, the number of elements, and the first.

    Example:
        >>> from fsharding.testing import assert_bitwise_equal
        >>> assert_bitwise_equal({"w": torch.tensor([1.0, torch.nan])}, {"w": torch.tensor([1.0, torch.nan])})
        >>> assert_bitwise_equal({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])})
        Traceback (most recent call last):
            ...
        AssertionError: fs.testing.assert_bitwise_equal found that 1 of 1 leaves differ.
          w differs in 1 of 1 elements, first at [0]: 0.0 against -0.0 (bits 0x00000000 and 0x80000000)
    """
    compare(a, b, what)


@public
def assert_trees_close(a: tree.Tree, b: tree.Tree, rtol: float = 1e-5, atol: float = 0.0, what: str = "") -> None:
    """Assert that two trees have the same paths and shapes, and that |a - b| <= atol + rtol * |b| in float64.

    Dtypes may differ. Equal infinities are close, and NaN is close to nothing. DTensors and plain values are compared
    as in `assert_bitwise_equal`.

    Args:
        a: Computed tree.
        b: Expected tree.
        rtol: Relative tolerance.
        atol: Absolute tolerance, 0 by default (1e-8 in `torch.allclose`).
        what: Name of the trees in the message.

    Raises:
        AssertionError: The trees aren't close. The message has each such path, the number of elements, and the worst.

    Example:
        >>> from fsharding.testing import assert_trees_close
        >>> assert_trees_close({"w": torch.tensor([1.000001])}, {"w": torch.tensor([1.0])})
        >>> assert_trees_close({"w": torch.tensor([1.5])}, {"w": torch.tensor([1.0])}, rtol=0.1)
        Traceback (most recent call last):
            ...
        AssertionError: fs.testing.assert_trees_close found that 1 of 1 leaves differ.
          w differs in 1 of 1 elements beyond rtol 0.1, atol 0, worst at [0]: 1.5 against 1.0, off by 0.5
    """
    compare(a, b, what, (rtol, atol))


def compare(a: tree.Tree, b: tree.Tree, what: str = "", tolerance: tuple[float, float] | None = None) -> None:
    """Compare two trees bitwise, or within a tolerance (rtol, atol)."""
    first = tree.named_leaves(a)
    second = tree.named_leaves(b)
    rows = [f"{path or 'the leaf'} is only in the first" for path in first if path not in second]
    rows += [f"{path or 'the leaf'} is only in the second" for path in second if path not in first]
    for path in first:
        if path in second and (text := _leaf_differs(first[path], second[path], tolerance)):
            rows.append(f"{path or 'the leaf'} {text}")
    if rows:
        of = f" of {what}" if what else ""
        rule = f"found that {len(rows)} of {len(first.keys() | second.keys())} leaves{of} differ."
        raise AssertionError(message(rule, rows))


def _leaf_differs(a: Any, b: Any, tolerance: tuple[float, float] | None) -> str:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        if a.device_mesh != b.device_mesh or a.placements != b.placements or a.shape != b.shape:
            return f"is {_kind(a)} against {_kind(b)}"
        a = in_memory(a.to_local())
        b = in_memory(b.to_local())
    x = _tensor(a)
    y = _tensor(b)
    if x is None or y is None or type(a) is not type(b):
        return "" if type(a) is type(b) and a == b else f"is {_kind(a)} against {_kind(b)}"
    if x.shape != y.shape:
        return f"is {_kind(a)} against {_kind(b)}"
    return _bits_differ(x, y) if tolerance is None else _values_differ(x, y, *tolerance)


def _tensor(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(leaf, np.ndarray):
        return torch.as_tensor(leaf)
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else None


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"{type(leaf).__name__} {leaf!r}"
    text = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return f"{text} with {leaf.placements} on {leaf.device_mesh}" if isinstance(leaf, DTensor) else text


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype != b.dtype:
        return f"is {_kind(a)} against {_kind(b)}"
    raw = [t.contiguous().reshape(-1).view(torch.uint8).reshape(t.numel(), t.element_size()) for t in (a, b)]
    bad = (raw[0] != raw[1]).any(1)
    if not bad.any():
        return ""
    at = int(bad.nonzero()[0])
    bits = " and ".join("0x" + bytes(reversed(r[at].tolist())).hex() for r in raw)
    return f"differs in {int(bad.sum())} of {bad.numel()} elements, first {_at(a, b, at)} (bits {bits})"


def _values_differ(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> str:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x = a.to(wide).reshape(-1)
    y = b.to(wide).reshape(-1)
    off = torch.where(x == y, 0.0, (x - y).abs())
    excess = (off - (atol + rtol * y.abs())).nan_to_num(nan=torch.inf)
    bad = (excess > 0) & (x != y)
    if not bad.any():
        return ""
    at = int(torch.where(bad, excess, -1.0).argmax())
    worst = f"worst {_at(a, b, at)}, off by {float(off[at]):.3g}"
    return f"differs in {int(bad.sum())} of {bad.numel()} elements beyond rtol {rtol:g}, atol {atol:g}, {worst}"


def _at(a: torch.Tensor, b: torch.Tensor, flat: int) -> str:
    index = [int(i) for i in np.unravel_index(flat, tuple(a.shape))]
    return f"at {index}: {a.reshape(-1)[flat].item()} against {b.reshape(-1)[flat].item()}"
