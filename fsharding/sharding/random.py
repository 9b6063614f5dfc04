"""Random numbers as pure functions of a key; any slice of a global draw is computed where it is needed.

Guarantee: every layout gives bitwise the same values, and no rank holds more than its slice and one block.
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

BLOCK = 1 << 18
"""Largest number of elements that are drawn at once on the host."""

_BLOCKS_AT_ONCE = 64  # blocks that are drawn at once on a device: what is in between takes 128 MB there

_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@public
def key(seed: int) -> Tensor:
    """Make a key from a seed: int64[2], the high and the low 32 bits.

    Args:
        seed: an integer with 0 <= seed < 2**64; NumPy integers are accepted.

    Raises:
        RandomKeyError: the seed isn't an integer, or is out of range. Two seeds never make one key.

    Example:
        >>> fs.random.key(42)
        tensor([ 0, 42])
    """
    seed = _integer("seed", seed, 64)
    with _compat.with_values():  # a key is a value of the host, also where tensors are fake
        return torch.tensor([(seed >> 32) & _WORD, seed & _WORD], dtype=torch.int64)


@public
def split(key: Tensor, n: int = 2) -> Tensor:
    """`n` independent keys: int64[n, 2]. Use each of them, and the old key no more.

    Raises:
        RandomKeyError: `key` isn't a key, or `n` isn't an integer with 0 <= n < 2**32.

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
    """Make a key from a key and a number, such as a step or a layer: int64[2].

    Args:
        key: int64[2], a random key.
        data: an integer with 0 <= data < 2**63, or a 0-d tensor of an integer dtype. The value of a tensor on a device
            or inside a transform is not read, so its range is not checked; its 63 low bits count.

    Raises:
        RandomKeyError: `key` isn't a key; or `data` isn't an integer, or is out of range. Two numbers in the range
            never give one key, nor a key that `split` gives.

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
    # The first word is at least 1, and 0 in `split`, whose keys are others.
    count = (1 + (number >> 32), number & _WORD)
    with _where_computed(_checked(key)):
        if _is_readable(key):
            # A model derives hundreds of keys, and a hundred operations on tensors of two elements take a while.
            high, low = key.tolist()
            return torch.tensor(_rounds((high, low), count), dtype=torch.int64)
        return torch.stack(_rounds(key.unbind(-1), count), -1)


def fold_in_count(key: Tensor, count: Tensor) -> Tensor:
    """As `fold_in` of a number that is on a device: int64[2] there, and the host does not read it."""
    number = count.to(torch.int64)
    if _is_readable(key):
        with _compat.with_values():
            words: Sequence[Any] = key.numpy().tolist()
    else:
        words = key.to(number.device, non_blocking=True).unbind(-1)
    return torch.stack(_rounds(words, (1 + ((number >> 32) & 0x7FFFFFFF), number & _WORD)), -1)


def _integer(name: str, x: Any, bits: int) -> int:
    """An integer from 0 to 2**bits - 1. Others are refused: masked, they would give the key of another number."""
    is_bool = isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool
    try:
        number = -1 if is_bool else operator.index(x)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 1 << bits:
        raise _no_integer(name, repr(x), bits)
    return number


def _no_integer(name: str, got: str, bits: int) -> RandomKeyError:
    return RandomKeyError(message(f"got {name}={got}.", mend=f"Give an integer from 0 to 2**{bits} - 1."))


def _where_computed(key: Tensor) -> AbstractContextManager[Any]:
    """Keys are values of the host, also where tensors are fake, unless the key itself is."""
    return nullcontext() if _compat.is_fake(key) else _compat.with_values()


def _checked(key: Tensor) -> Tensor:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (2,):
        what = kind_text(key) if isinstance(key, Tensor) else f"{type(key).__name__} {key}"
        text = f"needs a key int64[2], got {what}."
        raise RandomKeyError(message(text, mend="Make keys with random.key, random.split or random.fold_in."))
    return key


def _is_readable(key: Tensor) -> bool:
    """Whether a key has its numbers on the host: it is no value of a transform, of a graph or of a device."""
    return type(key) is Tensor and key.is_cpu and not (_functorch.in_functorch() or torch.compiler.is_compiling())


def _rounds(key: Sequence[Any], count: Sequence[Any]) -> tuple[Any, Any]:
    """The 20 rounds of Threefry-2x32 on words of 32 bits each: tensors of them, or numbers."""
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


_VALUES = (
    "Parameters with values are those of a state, fs.init_state(init, opt, key, layout).params; draw.tensor() gives all"
    " values of one draw."
)
_OF_TENSORS = ("T", "mT", "mean", "norm", "numpy", "reshape", "std", "sum", "to", "view", "requires_grad_", "normal_")
_DRAWN = "Say so to the function that draws, such as fs.random.normal(key, shape, std=0.02, mean=1.0)."


def _refusal(use: str, mend: str) -> ArgumentError:
    return ArgumentError(report(f"fs.random gives draws, which are lazy, and one of them {use}.", mend=mend))


def _refuses(use: str) -> Any:
    """A method that refuses: a draw is no tensor."""

    def refuse(draw: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        of_values = "tensor" in use or "NumPy" in use or any(isinstance(x, Tensor) for x in args)
        raise _refusal(use, _VALUES if of_values else _DRAWN)

    return refuse


@dataclass(frozen=True)
class LazyTensor:
    """A lazy random array: shape and dtype are known, values are computed for whatever box is asked.

    Attributes:
        shape: global shape.
        dtype: element type.
        kind: "normal", "uniform", "bernoulli" or "full".
        low: lower end of "uniform", probability of "bernoulli", value of "full", mean of "normal".
        scale: width of "uniform", standard deviation of "normal".
        words: the key: two numbers, or two 0-d tensors of a device that the host does not read.

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
        """No function of torch takes a draw, which has no values yet."""
        raise _refusal(f"goes into torch's {func.__name__}", _VALUES)

    # A draw says all that its slices are computed from; what came after it would be computed on every rank apart.
    __mul__ = __rmul__ = __truediv__ = _refuses("is multiplied or divided")
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuses("is added or subtracted")
    __matmul__ = __rmatmul__ = __pow__ = __getitem__ = __iter__ = _refuses("is used as a tensor")
    __array__ = _refuses("goes into NumPy")

    def tensor(self, *, device: torch.device | str = "cpu") -> Tensor:
        """The whole array."""
        return self.slice(boxes.full(self.shape), device=device)

    @public
    def slice(self, box: Box, *, device: torch.device | str = "cpu") -> Tensor:
        """The values inside a box of the global array.

        Args:
            box: half-open range for each dim.
            device: where the result lives. Values are drawn on the CPU, so that they are the same everywhere; under a
                key of a device, uniform ones are drawn there, bit for bit.

        Returns:
            A tensor of the box's shape.

        Raises:
            LayoutError: the box is not inside the array.
        """
        inside = all(0 <= start <= stop <= size for (start, stop), size in zip(box, self.shape, strict=False))
        if len(box) != len(self.shape) or not inside:
            text = f"cannot draw {list(box)} of an array of shape {list(self.shape)}."
            raise LayoutError(message(text, mend="Give a range inside the array for each dim."))
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
        """The whole array, of equal blocks at once, on the device of the key."""
        words = cast("tuple[Tensor, Tensor]", self.words)
        runs: list[Tensor] = []
        for count, run in itertools.groupby(_blocks(self.shape), lambda block: boxes.volume(block[1])):
            indices = [index for index, _ in run]
            for at in range(0, len(indices), _BLOCKS_AT_ONCE):
                some = indices[at : at + _BLOCKS_AT_ONCE]
                runs.append(uniform_as_numpy(words, some[0], len(some), count).reshape(-1))
        return self._scaled(torch.cat(runs)).view(self.shape).to(self.dtype)

    def _scaled(self, values: Tensor) -> Tensor:
        """Uniform values in [0, 1) as the kind has them."""
        return values < self.low if self.kind == "bernoulli" else values.mul_(self.scale).add_(self.low)

    def _block(self, words: Sequence[Tensor | int], index: int, count: int) -> Tensor:
        key = np.array([int(word) for word in words], dtype=np.uint64)
        bits = np.random.Philox(key=key, counter=np.array([0, 0, index, 0], np.uint64))
        generator = np.random.Generator(bits)
        if self.kind == "normal":
            return torch.from_numpy(generator.standard_normal(count, dtype=np.float32)).mul_(self.scale).add_(self.low)
        return self._scaled(torch.from_numpy(generator.random(count, dtype=np.float32)))


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
    """Cuts an array into boxes of at most BLOCK elements, contiguous in memory; depends on the shape alone."""
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
        mend = "Give whole numbers from 0, one for each dim."
        raise LayoutError(report(f"fs.random cannot draw an array of shape {tuple(shape)}.", mend=mend))
    return tuple(shape)


def _draw(key: Tensor, shape: Sequence[int], dtype: torch.dtype, kind: str, low: float, scale: float) -> LazyTensor:
    words = _words_of(_checked(key))
    return LazyTensor(_sizes(shape), dtype, kind, low, scale, words)


def _words_of(key: Tensor) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """The words of a key that is drawn with: numbers where the host has them, which an observer is shown."""
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
    """Call `observe` with the key of each draw that is made inside the block."""
    return scoped(_observer, observe)


@public
def normal(
    key: Tensor, shape: Sequence[int], *, std: float = 1.0, mean: float = 0.0, dtype: torch.dtype = torch.float32
) -> LazyTensor:
    """A lazy array of normal values.

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
    """A lazy array of values that are uniform in [low, high).

    Example:
        >>> x = fs.random.uniform(fs.random.key(0), (1000,), low=-1.0, high=1.0).tensor()
        >>> bool(x.min() >= -1.0), bool(x.max() < 1.0)
        (True, True)
    """
    return _draw(key, shape, dtype, "uniform", low, high - low)


@public
def bernoulli(key: Tensor, shape: Sequence[int], p: float) -> LazyTensor:
    """A lazy bool array that is true with probability `p`, such as a mask.

    Raises:
        ArgumentError: `p` is no probability, or `shape` and `p` are swapped.

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
    """Zeroes each element with probability `p`, and divides the others by `1 - p`, so that the mean stays.

    The mask follows from the key and the shape of `x` alone: equal on every rank that has this key. Give each data rank
    a key of its own with `for_rank`, and each call one of its own with `split` or `fold_in`.

    Args:
        x: any shape, floating point.
        p: probability of a zero, in [0, 1).
        key: int64[2]; None leaves `x` as it is. A train step gives a loss function with a parameter `key` one of its
            own, and `fs.evaluate` gives None.

    Raises:
        ArgumentError: `p` is no probability below 1.
        RandomKeyError: no key.

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
    """A key of this rank's own, int64[2]: equal on two ranks exactly if they see the same tokens.

    Ranks along `tp` and `pp` see the same tokens, so they draw alike.

    Args:
        key: the same on all ranks.
        mesh: by default the current one, which inside a loss function is the parameters' mesh.

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
        mend = f"Give a probability from 0 {most}.{hint}"
        raise ArgumentError(message(f"got p={p!r}.", mend=mend))


@public
def full(shape: Sequence[int], value: float, *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """A lazy array of one value.

    Example:
        >>> fs.random.full((2, 2), 0.5).tensor()
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return LazyTensor(_sizes(shape), dtype, "full", value, 0.0)


@public
def zeros(shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """A lazy array of zeros.

    Example:
        >>> fs.random.zeros((3,), dtype=torch.bfloat16).tensor()
        tensor([0., 0., 0.], dtype=torch.bfloat16)
    """
    return full(shape, 0.0, dtype=dtype)


@public
def ones(shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """A lazy array of ones.

    Example:
        >>> params = {"scale": fs.random.ones((1 << 20,))}  # takes no memory yet
        >>> params["scale"].slice(((0, 3),))
        tensor([1., 1., 1.])
    """
    return full(shape, 1.0, dtype=dtype)
