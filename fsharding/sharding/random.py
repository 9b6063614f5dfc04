"""Random arrays as pure functions of a key: each rank computes only its slice of a global array.

Guarantee: every layout gives bitwise equal values, and a rank never stores more than its slice and one block.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fsharding.base import _compat, _functorch
from fsharding.base.errors import ArgumentError, LayoutError, RandomKeyError, message, report
from fsharding.base.public import missing_name, public
from fsharding.base.scoped import scoped
from fsharding.formats.philox import uniform_as_numpy
from fsharding.mesh.device_mesh import Mesh, current_mesh, data_rank_and_size
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.leaf_plan import kind_text, type_text

__all__ = [
    "BLOCK", "LazyTensor", "bernoulli", "dropout", "fold_in", "for_rank", "full", "key", "normal", "ones",
    "split", "uniform", "zeros",
]  # fmt: skip

BLOCK = 1 << 18  # elements drawn at once on the host; part of the definition of every array, so never change it

_BLOCKS_AT_ONCE = 64  # blocks drawn at once on a device: intermediate words take 128 MB there

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@public
def key(seed: int) -> Tensor:
    """Make a key from a seed. Different seeds give different keys.

    Args:
        seed: Integer in [0, 2**64), Python or NumPy; others raise a `RandomKeyError`.

    Returns:
        int64[2]: the high and low 32 bits of the seed.

    Example:
        >>> fs.random.key(42)
        tensor([ 0, 42])
    """
    seed = _integer("seed", seed, 64)
    with _compat.with_values():  # keys are real host tensors even under FakeTensorMode
        return torch.tensor([(seed >> 32) & _WORD, seed & _WORD], dtype=torch.int64)


@public
def split(key: Tensor, n: int = 2) -> Tensor:
    """Split a key into independent keys. Don't use the old key again.

    Args:
        key: Random key, int64[2].
        n: Number of keys, in [0, 2**32); others raise a `RandomKeyError`.

    Returns:
        int64[n, 2], a key per row.

    Example:
        >>> w_key, b_key = fs.random.split(fs.random.key(0))
        >>> torch.equal(fs.random.normal(w_key, (4,)).tensor(), fs.random.normal(b_key, (4,)).tensor())
        False
    """
    n = _integer("n", n, 32)
    with _where_computed(_checked(key)):
        counts = torch.arange(n, dtype=torch.int64, device=key.device)
        return torch.stack(_rounds(key.unbind(-1), (torch.zeros_like(counts), counts)), -1)


@public
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Derive a key from a key and a number, such as a step or a layer.

    Different numbers give different keys, which also differ from those of `split`.

    Args:
        key: Random key, int64[2].
        data: Integer in [0, 2**63), or a 0-d integer tensor; others raise a `RandomKeyError`. A tensor on a device or
            inside a transform isn't read, so its range isn't checked; its low 63 bits count.

    Returns:
        int64[2].

    Example:
        >>> key = fs.random.key(0)
        >>> masks = [fs.random.bernoulli(fs.random.fold_in(key, step), (64,), 0.9).tensor() for step in (5, 5, 6)]
        >>> torch.equal(masks[0], masks[1]), torch.equal(masks[0], masks[2])
        (True, False)
    """
    if isinstance(data, Tensor) and not _is_readable(data):
        if data.dtype.is_floating_point or data.dtype.is_complex or data.dtype == torch.bool or data.ndim:
            raise _no_integer("data", type_text(tuple(data.shape), data.dtype), 63)
        return fold_in_count(_checked(key), data)
    number = _integer("data", data, 63)
    # The first word is at least 1; `split` has 0, so their keys are different.
    count = (1 + (number >> 32), number & _WORD)
    with _where_computed(_checked(key)):
        if _is_readable(key):
            # In Python integers: a model derives hundreds of keys, each of which takes a hundred tensor operations.
            high, low = key.tolist()
            return torch.tensor(_rounds((high, low), count), dtype=torch.int64)
        return torch.stack(_rounds(key.unbind(-1), count), -1)


def fold_in_count(key: Tensor, count: Tensor) -> Tensor:
    """Derive a key like `fold_in` from a number on a device, without reading it on the host."""
    number = count.to(torch.int64)
    if _is_readable(key):
        with _compat.with_values():
            words: Sequence[Any] = key.numpy().tolist()
    else:
        words = key.to(number.device, non_blocking=True).unbind(-1)
    return torch.stack(_rounds(words, (1 + ((number >> 32) & 0x7FFFFFFF), number & _WORD)), -1)


def _integer(name: str, x: Any, bits: int) -> int:
    """Return an integer in [0, 2**bits); raise for others, whose low bits would give the key of a different number."""
    is_bool = isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool
    try:
        number = -1 if is_bool else operator.index(x)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 1 << bits:
        raise _no_integer(name, repr(x), bits)
    return number


def _no_integer(name: str, got: str, bits: int) -> RandomKeyError:
    return RandomKeyError(message(f"got {name}={got}.", mend=f"Pass an integer from 0 to 2**{bits} - 1."))


def _where_computed(key: Tensor) -> AbstractContextManager[Any]:
    """Compute real tensors under FakeTensorMode, unless the key itself is fake."""
    return nullcontext() if _compat.is_fake(key) else _compat.with_values()


def _checked(key: Tensor) -> Tensor:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (2,):
        what = kind_text(key) if isinstance(key, Tensor) else f"{type(key).__name__} {key}"
        text = f"needs a key int64[2], got {what}."
        raise RandomKeyError(message(text, mend="Make keys with random.key, random.split or random.fold_in."))
    return key


def _is_readable(key: Tensor) -> bool:
    """Return whether the host can read a key without a sync: not on a device, in a transform or in a graph."""
    return type(key) is Tensor and key.is_cpu and not (_functorch.in_functorch() or torch.compiler.is_compiling())


def _rounds(key: Sequence[Any], count: Sequence[Any]) -> tuple[Any, Any]:
    """Compute Threefry-2x32-20 (Salmon et al., SC 2011) on 32-bit words, which are tensors or integers."""
    (k0, k1), (x0, x1) = key, count
    schedule = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0 = (x0 + k0) & _WORD
    x1 = (x1 + k1) & _WORD
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = (((x1 << turn) | (x1 >> (32 - turn))) & _WORD) ^ x0
        x0 = (x0 + schedule[(group + 1) % 3]) & _WORD
        x1 = (x1 + schedule[(group + 2) % 3] + group + 1) & _WORD
    return x0, x1


_VALUES = "Use fs.init_state(init, opt, key, layout).params for parameters, draw.tensor() for one LazyTensor."
_OF_TENSORS = ("T", "mT", "mean", "norm", "numpy", "reshape", "std", "sum", "to", "view", "requires_grad_", "normal_")
_DRAWN = "Pass scale and offset to the function that draws, such as fs.random.normal(key, shape, std=0.02, mean=1.0)."


def _refusal(use: str, mend: str) -> ArgumentError:
    return ArgumentError(report(f"fs.random returns lazy tensors, which have no values yet, and one {use}.", mend=mend))


def _refuses(use: str) -> Any:
    """Make a method that raises, since a `LazyTensor` isn't a tensor."""

    def refuse(draw: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        of_values = "tensor" in use or "NumPy" in use or any(isinstance(x, Tensor) for x in args)
        raise _refusal(use, _VALUES if of_values else _DRAWN)

    return refuse


@dataclass(frozen=True)
class LazyTensor:
    """A random array without values yet: each rank computes the slices that it stores.

    Attributes:
        shape: Global shape.
        dtype: Dtype of the elements.
        kind: Distribution: "normal", "uniform", "bernoulli" or "full".
        low: Lower end of "uniform", probability of "bernoulli", value of "full", or mean of "normal".
        scale: Width of "uniform", or standard deviation of "normal".
        words: Two words of the key: integers, or 0-d device tensors that the host doesn't read.

    Example:
        >>> draw = fs.random.normal(fs.random.key(0), (1000, 8))
        >>> rows = draw.slice(((500, 502), (0, 8)))  # no rank holds more than its slice and one block
        >>> torch.equal(rows, draw.tensor()[500:502])
        True
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    low: float
    scale: float
    words: tuple[int, int] | tuple[Tensor, Tensor] = (0, 0)

    def __getattr__(self, name: str) -> Any:
        raise missing_name("LazyTensor", name, self.__dataclass_fields__, dict.fromkeys(_OF_TENSORS, _VALUES))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every torch function."""
        raise _refusal(f"is passed to torch's {func.__name__}", _VALUES)

    # Slices are computed from these fields only, so arithmetic on a `LazyTensor` would have to be recorded.
    __mul__ = __rmul__ = __truediv__ = _refuses("is multiplied or divided")
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuses("is added or subtracted")
    __matmul__ = __rmatmul__ = __pow__ = __getitem__ = __iter__ = _refuses("is used as a tensor")
    __array__ = _refuses("is converted to NumPy")

    def tensor(self, *, device: torch.device | str = "cpu") -> Tensor:
        """Compute the full array on a device."""
        return self.slice(boxes.full(self.shape), device=device)

    @public
    def slice(self, box: Box, *, device: torch.device | str = "cpu") -> Tensor:
        """Compute the values in a box of the global array.

        Args:
            box: Half-open index range per dim; one outside of the array raises a `LayoutError`.
            device: Device of the result. Values are drawn on the CPU, so they are equal on all devices; with a key on a
                device, all but normal ones are drawn there, bitwise equal.

        Returns:
            A tensor in the shape of the box.
        """
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(box, self.shape, strict=False))
        if len(box) != len(self.shape) or not inside:
            text = f"cannot draw {list(box)} of an array of shape {list(self.shape)}."
            raise LayoutError(message(text, mend="Pass a range inside of the array for each dim."))
        if self.kind == "full":
            return torch.full(boxes.shape_of(box), self.low, dtype=self.dtype, device=device)
        if isinstance(self.words[0], Tensor) and self.kind != "normal":
            return self._on_device()[tuple(slice(*ends) for ends in box)].to(device)
        words = [word.cpu() if isinstance(word, Tensor) else word for word in self.words]
        if _compat.makes_fakes():
            return torch.empty(boxes.shape_of(box), dtype=self.dtype, device=device)
        out = torch.empty(boxes.shape_of(box), dtype=self.dtype)
        for index, block in _blocks(self.shape):
            part = boxes.intersect(block, box)
            if part is not None:
                values = self._block(words, index, boxes.volume(block)).view(boxes.shape_of(block))
                out[boxes.relative(part, box)] = values[boxes.relative(part, block)].to(self.dtype)
        return out.to(device)

    def _on_device(self) -> Tensor:
        """Draw the full array on the device of the key, blocks of equal size at once."""
        words = cast("tuple[Tensor, Tensor]", self.words)
        runs: list[Tensor] = []
        for count, run in itertools.groupby(_blocks(self.shape), lambda block: boxes.volume(block[1])):
            indices = [index for index, _ in run]
            for at in range(0, len(indices), _BLOCKS_AT_ONCE):
                some = indices[at : at + _BLOCKS_AT_ONCE]
                runs.append(uniform_as_numpy(words, some[0], len(some), count).reshape(-1))
        return self._scaled(torch.cat(runs)).view(self.shape).to(self.dtype)

    def _scaled(self, values: Tensor) -> Tensor:
        """Map uniform values in [0, 1) to the distribution."""
        return values < self.low if self.kind == "bernoulli" else values.mul_(self.scale).add_(self.low)

    def _block(self, words: Sequence[Tensor | int], index: int, count: int) -> Tensor:
        key = np.array([int(word) for word in words], dtype=np.uint64)
        bits = np.random.Philox(key=key, counter=np.array([0, 0, index, 0], np.uint64))
        generator = np.random.Generator(bits)
        if self.kind == "normal":
            return torch.from_numpy(generator.standard_normal(count, dtype=np.float32)).mul_(self.scale).add_(self.low)
        return self._scaled(torch.from_numpy(generator.random(count, dtype=np.float32)))


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Yield contiguous boxes of at most BLOCK elements; they depend only on the shape, and so do the values."""
    inner = len(shape)
    while inner > 0 and math.prod(shape[inner - 1 :]) <= BLOCK:
        inner -= 1
    if inner == 0:
        yield 0, boxes.full(shape)
        return
    rows = max(1, BLOCK // max(1, math.prod(shape[inner:])))
    index = 0
    for outer in np.ndindex(*shape[: inner - 1]):
        for start in range(0, shape[inner - 1], rows):
            stop = min(start + rows, shape[inner - 1])
            head = tuple((int(i), int(i) + 1) for i in outer)
            yield index, (*head, (start, stop), *boxes.full(shape[inner:]))
            index += 1


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
        mend = "Pass an integer from 0 for each dim."
        raise LayoutError(report(f"fs.random cannot draw an array of shape {tuple(shape)}.", mend=mend))
    return tuple(shape)


def _draw(key: Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str, low: float, scale: float) -> LazyTensor:
    words = _words_of(_checked(key))
    return LazyTensor(_sizes(shape), dtype, kind, low, scale, words)


def _words_of(key: Tensor) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Return the words of a key: integers if the host can read it, which are reported to the observer."""
    if not key.is_cpu or _compat.is_fake(key):
        with _where_computed(key):
            high_word, low_word = key.unbind(-1)
        return high_word, low_word
    with _compat.with_values():
        high, low = key.tolist()
    if (observe := _observer.get()) is not None:
        observe((high, low))
    return high, low


_observer: ContextVar[Callable[[tuple[int, int]], None] | None] = ContextVar("fsharding_draws", default=None)


def observing_draws(observe: Callable[[tuple[int, int]], None]) -> AbstractContextManager[None]:
    """Call `observe` with the key of each array that is drawn in the block."""
    return scoped(_observer, observe)


@public
def normal(
    key: Tensor, shape: Sequence[int], *, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.float32
) -> LazyTensor:
    """Draw a lazy tensor of normal values.

    Args:
        key: Random key, int64[2].
        shape: Global shape.
        std, mean: Standard deviation and mean.
        dtype: Dtype of the array; values are drawn in float32 and rounded.

    Returns:
        A `LazyTensor`.

    Example:
        >>> draw = fs.random.normal(fs.random.key(0), (256, 256), std=0.02, dtype=torch.bfloat16)
        >>> draw.shape, draw.dtype, round(float(draw.tensor().float().std()), 3)
        ((256, 256), torch.bfloat16, 0.02)
    """
    return _draw(key, shape, dtype, "normal", mean, std)


@public
def uniform(
    key: Tensor, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> LazyTensor:
    """Draw a lazy tensor of values uniform in [low, high).

    Args:
        key: Random key, int64[2].
        shape: Global shape.
        low, high: Ends of the range.
        dtype: Dtype of the array; values are drawn in float32 and rounded, possibly to `high`.

    Returns:
        A `LazyTensor`.

    Example:
        >>> x = fs.random.uniform(fs.random.key(0), (1000,), low=-1.0, high=1.0).tensor()
        >>> bool(x.min() >= -1.0), bool(x.max() < 1.0)
        (True, True)
    """
    return _draw(key, shape, dtype, "uniform", low, high - low)


@public
def bernoulli(key: Tensor, shape: Sequence[int], p: float) -> LazyTensor:
    """Draw a lazy bool array, such as a mask.

    Args:
        key: Random key, int64[2].
        shape: Global shape.
        p: Probability of True, in [0, 1]; others raise an `ArgumentError`.

    Returns:
        A `LazyTensor` of dtype bool.

    Example:
        >>> mask = fs.random.bernoulli(fs.random.key(0), (1000,), 0.9).tensor()
        >>> mask.dtype, 850 < int(mask.sum()) < 950
        (torch.bool, True)
    """
    swapped = isinstance(shape, float) and isinstance(p, Sequence)
    _check_probability(p, " Swap the two: (key, shape, p)." if swapped else "")
    return _draw(key, shape, torch.bool, "bernoulli", float(p), 0.0)


@public
def dropout(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    """Zero elements with probability `p` and divide the others by `1 - p` (Srivastava et al. 2014).

    The mask is a function of the key and the shape of `x`, so ranks with equal keys have equal masks. Derive a key per
    data rank with `for_rank`, and per call with `split` or `fold_in`.

    Args:
        x: Floating-point tensor of any shape.
        p: Probability of a zero, in [0, 1); others raise an `ArgumentError`.
        key: Random key, int64[2]; None returns `x`. A train step passes a new key per step to a loss function with a
            parameter `key`; `fs.evaluate` passes None.

    Returns:
        A tensor in the shape and dtype of `x`.

    Example:
        >>> x = fs.random.dropout(torch.ones(1000), 0.25, fs.random.key(0))
        >>> sorted(set(x.tolist())) == [0.0, float(torch.tensor(1.0) / 0.75)], round(float(x.mean()), 1)
        (True, 1.0)
        >>> fs.random.dropout(torch.ones(3), 0.25, None)
        tensor([1., 1., 1.])
    """
    _check_probability(p, below_one=True)
    if key is None or p == 0:
        return x
    kept = bernoulli(key, x.shape, 1 - p).tensor(device=x.device)
    return torch.where(kept, x / (1 - p), torch.zeros((), dtype=x.dtype, device=x.device))


@public
def for_rank(key: Tensor, mesh: Mesh | None = None) -> Tensor:
    """Derive a key for this rank; ranks that process the same tokens, along `tp` and `pp`, get the same key.

    Args:
        key: Random key, int64[2], equal on all ranks.
        mesh: Mesh of the ranks; default: the current one, which inside of a loss function is the parameters' mesh.

    Returns:
        int64[2].

    Example:
        >>> fs.random.for_rank(fs.random.key(0), fs.make_mesh(dp=-1, device="cpu")).shape
        torch.Size([2])
    """
    index, _ = data_rank_and_size(current_mesh() if mesh is None else mesh, cp=True)
    return fold_in(key, index)


def _check_probability(p: Any, hint: str = "", *, below_one: bool = False) -> None:
    most = "below 1" if below_one else "to 1"
    is_number = isinstance(p, int | float) and not isinstance(p, bool)
    if not is_number or not 0 <= p <= 1 or (below_one and p == 1):
        mend = f"Pass a probability from 0 {most}.{hint}"
        raise ArgumentError(message(f"got p={p!r}.", mend=mend))


@public
def full(shape: Sequence[int], value: float, *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """Make a lazy tensor of one value.

    Args:
        shape: Global shape.
        value: Value of the elements.
        dtype: Dtype of the array.

    Returns:
        A `LazyTensor`.

    Example:
        >>> fs.random.full((2, 2), 0.5).tensor()
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return LazyTensor(_sizes(shape), dtype, "full", value, 0.0)


@public
def zeros(shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """Make a lazy tensor of zeros.

    Args:
        shape, dtype: Global shape and dtype.

    Returns:
        A `LazyTensor`.

    Example:
        >>> fs.random.zeros((3,), dtype=torch.bfloat16).tensor()
        tensor([0., 0., 0.], dtype=torch.bfloat16)
    """
    return full(shape, 0.0, dtype=dtype)


@public
def ones(shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """Make a lazy tensor of ones.

    Args:
        shape, dtype: Global shape and dtype.

    Returns:
        A `LazyTensor`.

    Example:
        >>> params = {"scale": fs.random.ones((1 << 20,))}  # takes no memory yet
        >>> params["scale"].slice(((0, 3),))
        tensor([1., 1., 1.])
    """
    return full(shape, 1.0, dtype=dtype)
