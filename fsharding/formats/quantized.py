"""`Quantized`: a tensor stored as quantized values and scales; its gradients are straight-through and not rounded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, overrides
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.utils import _pytree as torch_pytree

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import ArgumentError, ConfigError, NotDequantizedError, message, report
from fsharding.base.public import public
from fsharding.base.scoped import scoped
from fsharding.formats import codec
from fsharding.formats.blocks import Blocks
from fsharding.formats.codec import Scales
from fsharding.formats.philox import uniform_at

__all__ = ["Columnwise", "Quantized", "Weight", "dequantize", "noting_numbers", "numbers_of", "quantize"]

# Receives a dequantized tensor, the function that recomputes it, and that function's quantized values and scales.
Note: TypeAlias = Callable[[Tensor, Callable[..., Tensor], Sequence[Tensor]], None]


# Announces in forward that backward will use a weight in blocks along its other dim, rounded from the same main
# parameters. The function that it returns gathers them in backward: collective over the axes that shard the weight.
Columnwise: TypeAlias = Callable[[], Callable[[], "Quantized"]]

_note: ContextVar[Note | None] = ContextVar("fsharding_note_numbers", default=None)


def noting_numbers(note: Note) -> AbstractContextManager[None]:
    """Call `note` for each tensor dequantized in the block, so that autograd can save the quantized values instead."""
    return scoped(_note, note)


def _refuses(use: str) -> Any:
    """Make a method that raises what to write instead."""

    def refuse(self: Quantized, *_: Any, **__: Any) -> Any:
        raise _not_dequantized(self, use)

    return refuse


def _not_dequantized(node: Quantized, use: str) -> NotDequantizedError:
    mend = (
        "Write fs.formats.dequantize(w) for its values, or fs.ops.scaled_matmul(x, w, 1) for x @ w.T, and 0 for x @ w."
    )
    return NotDequantizedError(
        report(f"fs.formats.dequantize was not called for a tensor that {use}.", [repr(node)], mend)
    )


@dataclass(frozen=True, eq=False)
class Quantized:
    """A tensor stored as quantized values and scales: a pytree node with plain tensors as children.

    `fs.formats.dequantize`, `fs.ops.scaled_matmul`, `column_linear` and `row_linear` accept it. It isn't a tensor:
    other torch functions raise an error that shows what to write.

    Attributes:
        values: Quantized values, uint8 in the shape of the tensor; 4-bit values share a byte in pairs along the last
            dim. None if the tensor is stored unquantized in `carrier`, already rounded to the format.
        scales: Scales of the blocks, float32 or uint8 depending on the format; None without `values`.
        format: Format of values and scales.
        dtype: Dtype of the dequantized tensor.
        block: Rows and columns of a block; one row for a 1-D tensor.
        columns: Size of the last dim.
        outer: Scales of the matrices, float32, for formats that have them.
        carrier: Stand-in for the dequantized tensor in autograd, same shape and dtype: without memory if there are
            `values`, and None if nothing is differentiated.
        start: Row and column at which a slice of a larger tensor begins, relative to the first block that it touches.
        strict: Whether matmuls raise an error on devices without a kernel for the format.
        columnwise: Access to the weight in blocks along its other dim in backward; see `Precision.columnwise`.

    Example:
        >>> w = fs.formats.quantize(torch.eye(64), fs.formats.MXFP8, dtype=torch.bfloat16)
        >>> w
        Quantized(bfloat16[64, 64] as float8_e4m3fn[1x32, e8m0])
        >>> w.values.shape, w.scales.shape, w.nbytes
        (torch.Size([64, 64]), torch.Size([64, 2]), 4224)
        >>> fs.ops.scaled_matmul(torch.ones(1, 64, dtype=torch.bfloat16), w, 1).sum()
        tensor(64., dtype=torch.bfloat16)
    """

    values: Tensor | None
    scales: Tensor | None
    format: Blocks
    dtype: torch.dtype
    block: tuple[int, int]
    columns: int
    outer: Tensor | None = None
    carrier: Tensor | None = None
    start: tuple[int, int] = (0, 0)
    strict: bool = False
    columnwise: Columnwise | None = None

    @classmethod
    def of_numbers(cls, x: Tensor, format: Blocks, *, strict: bool = False) -> Quantized:
        """Wrap a tensor of at least one dim whose elements are already rounded to `format`, without quantizing it."""
        return cls(None, None, format, x.dtype, _block(format, tuple(x.shape)), x.shape[-1], carrier=x, strict=strict)

    def carried_by(self, node: Tensor, columnwise: Columnwise | None = None) -> Quantized:
        """Return the same tensor with `node`, a stand-in in autograd's graph, as its carrier."""
        return replace(self, carrier=node if node.requires_grad else None, columnwise=columnwise)

    def stand_in(self) -> Tensor:
        """Make a tensor in the dequantized shape and dtype, with the memory of one element, to use as a carrier."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)

    @property
    def shape(self) -> torch.Size:
        """Shape of the dequantized tensor."""
        if self.values is None:
            assert self.carrier is not None
            return self.carrier.shape
        return torch.Size((*self.values.shape[:-1], self.columns))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self._held().device

    @property
    def requires_grad(self) -> bool:
        """Whether the carrier requires a gradient."""
        return self.carrier is not None and self.carrier.requires_grad

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales, or of the carrier without them."""
        return sum(x.nbytes for x in (self.values, self.scales, self.outer) if x is not None) or self._held().nbytes

    def _held(self) -> Tensor:
        held = self.carrier if self.values is None else self.values
        assert held is not None
        return held

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Quantized({dtype}[{', '.join(map(str, self.shape))}] as {self.format})"

    def __getattr__(self, name: str) -> Any:
        # Python looks up underscored names itself, and fields while an instance is copied or unpickled.
        if name.startswith("_") or name in self.__dataclass_fields__:
            raise AttributeError(name)
        raise _not_dequantized(self, f"is accessed as .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every torch function."""
        given = torch_pytree.tree_leaves([args, kwargs or {}], is_leaf=lambda x: isinstance(x, Quantized))
        node = next(x for x in given if isinstance(x, Quantized))
        raise _not_dequantized(node, f"is passed to {overrides.resolve_name(func) or func.__name__}")

    # `==` stays: it compares identity, by which nodes are kept in dicts.
    __add__ = __radd__ = __sub__ = __rsub__ = _refuses("is an operand of + or -")
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuses("is an operand of * or /")
    __matmul__ = __rmatmul__ = _refuses("is an operand of @")
    __pow__ = __rpow__ = __neg__ = __abs__ = _refuses("is an operand of ** or -")
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuses("is an operand of // or %")
    __lt__ = __le__ = __gt__ = __ge__ = _refuses("is compared")
    __float__ = __int__ = __bool__ = __len__ = _refuses("is used as a number")
    __iter__ = __getitem__ = __setitem__ = _refuses("is indexed")
    __array__ = _refuses("is converted to NumPy")


_CHILDREN = ("values", "scales", "outer", "carrier")


class _Held(NamedTuple):
    """The static fields of a `Quantized`, compared by value in tree structures."""

    format: Blocks
    dtype: torch.dtype
    block: tuple[int, int]
    columns: int
    start: tuple[int, int]
    strict: bool
    columnwise: Columnwise | None


_Aux: TypeAlias = tuple[_Held, tuple[str, ...]]


def _held(node: Quantized) -> _Held:
    return _Held(node.format, node.dtype, node.block, node.columns, node.start, node.strict, node.columnwise)


def _flatten(node: Quantized) -> tuple[list[Tensor], _Aux, tuple[str, ...]]:
    names = tuple(name for name in _CHILDREN if getattr(node, name) is not None)
    return [getattr(node, name) for name in names], (_held(node), names), names


def _unflatten(children: Iterable[Any], aux: _Aux) -> Quantized:
    held, names = aux
    given = dict(zip(names, children, strict=True))
    values = given.get("values")
    if isinstance(values, Tensor) and values.dtype != torch.uint8:
        rule = f"fs.formats.Quantized cannot have values in {values.dtype}: a tree function has changed them."
        mend = "Dequantize first, fs.formats.dequantize(w), and quantize the result."
        raise ArgumentError(report(rule, mend=mend))
    return Quantized(
        values, given.get("scales"), held.format, held.dtype, held.block, held.columns, given.get("outer"),
        given.get("carrier"), held.start, held.strict, held.columnwise,
    )  # fmt: skip


tree.register_node(Quantized, _flatten, lambda aux, children: _unflatten(children, aux), fields=True)
torch_pytree.register_pytree_node(Quantized, lambda node: _flatten(node)[:2], _unflatten)


# ----------------------------------------------------------------------------------------------------------- in and out
@public
@_compat.outside_of_graphs
def quantize(
    x: Tensor,
    format: Blocks,
    *,
    key: Tensor | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> Quantized:
    """Quantize a tensor to a low-precision format.

    The gradient is straight-through: the gradient of the dequantized tensor becomes that of `x`, in the dtype of `x`.
    A cast such as `x.to(torch.float8_e4m3fn)` rounds the gradient as well, without a scale.

    Args:
        x: Plain floating-point tensor of at least one dim.
        format: Format of values and scales, such as `fs.formats.MXFP8`.
        key: Random key, int64[2]; required for stochastic rounding.
        dtype: Dtype in which the result is dequantized; default: that of `x`.
        strict: Whether matmuls of the result raise an error on devices without a kernel for the format.

    Returns:
        A `Quantized`. A block that contains inf or NaN dequantizes to NaN.

    Raises:
        ArgumentError: `x` isn't a plain floating-point tensor, or `format` isn't a `Blocks`.
        ConfigError: Stochastic rounding without a key, or a key without it.

    Example:
        >>> x = torch.tensor([1.0, 0.3, -0.1, 2.0])
        >>> fs.formats.dequantize(fs.formats.quantize(x, fs.formats.MXFP8))
        tensor([ 1.0000,  0.3125, -0.1016,  2.0000])
        >>> torch.func.grad(lambda x: (fs.formats.dequantize(fs.formats.quantize(x, fs.formats.MXFP8)) * 700).sum())(x)
        tensor([700., 700., 700., 700.])
    """
    _check(x, format, key)
    shape = tuple(x.shape)
    noise = None if key is None else cast(Tensor, _Noise.apply(key, shape, x.device))
    block = _block(format, shape)
    # The gradient doesn't flow through `_Encode` but through the carrier, so it is never rounded.
    matrix = x.detach()
    if x.ndim == 1:
        matrix = matrix.unsqueeze(0)
        noise = None if noise is None else noise.unsqueeze(0)
    parts = list(cast("tuple[Tensor, ...]", _Encode.apply(matrix, noise, format, block)))
    if x.ndim == 1:
        parts[:2] = [part.squeeze(-2) for part in parts[:2]]
    wide = dtype or x.dtype
    carrier = cast(Tensor, _Carrier.apply(x, wide, _has_tangent(x))) if _is_differentiated(x) else None
    return Quantized(parts[0], parts[1], format, wide, block, shape[-1], *parts[2:], carrier=carrier, strict=strict)


Weight: TypeAlias = Tensor | Quantized  # an unsharded leaf, as a loss function gets it


@public
@_compat.outside_of_graphs
def dequantize(q: Quantized | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize a tensor; differentiable.

    Args:
        q: Quantized tensor. A plain tensor is only cast, so one function serves weights with and without a format.
        dtype: Dtype of the result; default: `q.dtype`.

    Returns:
        A tensor in the shape of `q`, computed in float32 and rounded once.

    Raises:
        ArgumentError: `q` is neither a `Quantized` nor a tensor.

    Example:
        >>> w = fs.formats.quantize(torch.tensor([[3.0, 0.7]]), fs.formats.MXFP4, dtype=torch.bfloat16)
        >>> fs.formats.dequantize(w), fs.formats.dequantize(torch.ones(1))
        (tensor([[3.0000, 0.7500]], dtype=torch.bfloat16), tensor([1.]))
    """
    if isinstance(q, Tensor):
        return q if dtype is None else q.to(dtype)
    if not isinstance(q, Quantized):
        mend = "Pass the result of fs.formats.quantize, or a tensor."
        raise ArgumentError(message(f"takes a Quantized, got {type(q).__name__}.", mend=mend))
    if q.values is None:
        assert q.carrier is not None
        return q.carrier if dtype is None else q.carrier.to(dtype)
    carrier = q.carrier
    if dtype is not None and dtype != q.dtype:
        q = replace(q, dtype=dtype)
        carrier = None if carrier is None else carrier.to(dtype)
    result = cast(Tensor, _Decode.apply(carrier, q.values, q.scales, q.outer, _held(q)))
    if (note := _note.get()) is not None and not _functorch.in_functorch():
        assert q.scales is not None
        parts = [x for x in (q.values, q.scales, q.outer) if x is not None]
        note(result, functools.partial(_numbers, _held(q)), parts)
    return result


def numbers_of(q: Quantized) -> Tensor:
    """Dequantize without gradients, for a caller that saves neither the result nor the values for backward."""
    assert q.values is not None and q.scales is not None
    return _numbers(_held(q), q.values, q.scales, q.outer)


def _check(x: Any, format: Any, key: Any) -> None:
    mend = "Call it as fs.formats.quantize(x, fs.formats.MXFP8)."
    if not isinstance(format, Blocks):
        raise ArgumentError(message(f"takes a format, got {type(format).__name__}.", mend=mend))
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim or hasattr(x, "device_mesh"):
        kind = type(x).__name__
        what = f"{kind} {str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else kind
        rule = f"takes a plain floating point tensor of at least one dim, got {what}."
        raise ArgumentError(message(rule, mend=mend))
    if format.stochastic and key is None:
        rule = f"needs a key to round to {format}."
        raise ConfigError(message(rule, mend="Pass a key, such as key=fs.random.key(0)."))
    if key is not None and not format.stochastic:
        mend = 'Leave the key out, or pass format.with_rounding("stochastic").'
        raise ConfigError(message(f"rounds to {format} without a key, but got one.", mend=mend))


def _block(format: Blocks, shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = format.sizes(shape)
    return (rows if len(shape) > 1 else 1, columns)


def _is_differentiated(x: Tensor) -> bool:
    return _functorch.in_functorch() or (torch.is_grad_enabled() and x.requires_grad) or _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    return _functorch.in_jvp() or forward_ad.unpack_dual(x).tangent is not None


# ----------------------------------------------------------------------------------------------------------- functions
def _batched(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Move the vmapped dim of an argument to the front, or expand one that isn't mapped."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


class _Noise(Function):
    """Draw `uniform_at` for a full tensor; under vmap over keys, one draw per key."""

    @staticmethod
    def forward(key: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return uniform_at(key, 0, shape, [((0, size),) for size in shape], device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], key: Tensor, shape: Any, device: Any) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return torch.stack([cast(Tensor, _Noise.apply(k, shape, device)) for k in key.unbind(in_dims[0])]), 0


class _Encode(Function):
    """Quantize [..., rows, columns] to values, scales and, if the format has them, outer scales; no gradient."""

    @staticmethod
    def forward(x: Tensor, noise: Tensor | None, format: Blocks, block: tuple[int, int]) -> tuple[Tensor, ...]:
        codes, scales = codec.coded(x, format, block=block, noise=noise)
        codes = codec.pack(codes) if format.element.bits == 4 else codes
        return (codes, *(part for part in scales if part is not None))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.outputs = len(output)
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return (None,) * ctx.outputs

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, noise: Tensor | None, format: Blocks, block: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = cast(
            "tuple[Tensor, ...]",
            _Encode.apply(
                _batched(x, in_dims[0], info.batch_size), _batched(noise, in_dims[1], info.batch_size), format, block
            ),
        )
        return out, (0,) * len(out)


class _Carrier(Function):
    """Make a tensor whose gradient is that of x. Forward mode needs real memory: a tangent has its primal's strides."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, has_tangent: bool) -> Tensor:
        return torch.zeros_like(x, dtype=dtype) if has_tangent else x.new_zeros((), dtype=dtype).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.dtypes = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtypes[0]), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].to(ctx.dtypes[1], copy=True)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dtype: torch.dtype, has_tangent: bool
    ) -> tuple[Any, int]:
        return _Carrier.apply(_batched(x, in_dims[0], info.batch_size), dtype, has_tangent), 0


class _Decode(Function):
    """Dequantize; the gradient goes to the carrier."""

    @staticmethod
    def forward(carrier: Tensor | None, values: Tensor, scales: Tensor, outer: Tensor | None, held: _Held) -> Tensor:
        return _numbers(held, values, scales, outer)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        # Matmuls of `ops` look up this attribute to write the weight gradient where the carrier's goes.
        if (put_term := getattr(getattr(inputs[0], "grad_fn", None), "put_term", None)) is not None:
            ctx.put_term = put_term

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], carrier: Any, values: Any, scales: Any, outer: Any, held: _Held
    ) -> tuple[Any, int]:
        parts = zip((carrier, values, scales, outer), in_dims, strict=False)
        return _Decode.apply(*(_batched(x, dim, info.batch_size) for x, dim in parts), held), 0


def _numbers(held: _Held, values: Tensor, scales: Tensor, outer: Tensor | None = None) -> Tensor:
    """Dequantize values, packed if they have 4 bits."""
    single = codec.unpack(values, held.columns) if held.format.element.bits == 4 else values
    return codec.decode(single, Scales(scales, outer), held.format, held.dtype, block=held.block, start=held.start)
