"""`Precision`: dtypes and formats of parameters, compute, communication, gradients and moments; dynamic loss scaling.

Guarantee: ordered sums over ranks are in float32 at least, whatever the wire format; weights are quantized from main
parameters, never from rounded copies.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor

from fsharding.base.dtypes import FLOATS, wide
from fsharding.base.errors import ConfigError, LayoutError, did_you_mean, listed, message
from fsharding.base.public import public, refuse
from fsharding.formats import blocks
from fsharding.formats.blocks import Blocks, Rounding

__all__ = [
    "BF16", "FP16", "FP32", "FP8", "FP8_BLOCK", "KEEP", "MXFP8", "NVFP4", "LossScale", "PatternLeaf",
    "Precision", "ScaleState", "check_precision", "scaled_loss",
]  # fmt: skip


# What each role of a `Precision` accepts, for errors.
_TAKES = {
    "params": "a dtype: optimizers don't update quantized values",
    "compute": "a dtype or a format",
    "reduce": "a dtype or a format",
    "grads": "a dtype: sums are not quantized",
    "moments": "a dtype, or an 8-bit format without a scale per matrix",
    "gather": "a format: weights without one are sent in the dtype of compute",
    "activations": "a dtype",
}


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740).

    The scale is halved when a step overflows, and doubled after `interval` finite steps in a row.

    Attributes:
        initial: Initial scale.
        interval: Number of consecutive finite steps before the scale is doubled.
        least: Lower bound of the scale. A step that overflows there raises an error, as without scaling.

    Raises:
        ConfigError: A value that isn't above 0, or `initial` below `least`.

    Example:
        >>> scale = fs.formats.LossScale(initial=2.0**12)
        >>> fs.Precision(compute=torch.float16, loss_scale=scale).init_scale().scale
        tensor(4096.)
    """

    initial: float = 2.0**16
    interval: int = 2000
    least: float = 1.0

    @public
    def __post_init__(self) -> None:
        if not (self.initial >= self.least > 0 and self.interval > 0):
            mend = "Pass values above 0, with initial >= least."
            raise ConfigError(message(f"got {self}.", mend=mend))


class ScaleState(NamedTuple):
    """The loss scale (float32, 0-d), and the number of finite steps since it last changed (int64, 0-d)."""

    scale: Tensor
    good_steps: Tensor


Sums: TypeAlias = Literal["auto", "ordered", "native"]

# The default of `Precision.keep`; Hugging Face modules call a router `mlp.gate`.
KEEP = ("*embed*", "*head", "*router*", "*.mlp.gate.weight", "*shared_expert_gate*", "*norm*", "*bias*")

_ROWS = re.compile(r"(.*)\[(-?\d*)(:?)(-?\d*)\]")


@dataclass(frozen=True)
class Precision:
    """The dtype or format of parameters, compute, communication, gradients and moments.

    A role that is None follows from the others; `Precision()` uses each leaf's own dtype. "Weights" below are
    trainable leaves of two or more dims that `keep` doesn't match.

    A format in `reduce` quantizes each rank's gradient once, when it is sent: per microbatch if gradients are sharded,
    else per step. Sums over some ranks are sent in the dtype of the sum, as are gradients of a pipeline that reduces
    per step. The error of a sum over k ranks is at most that of k roundings: for MXFP8 1/8 of the block's amax each,
    for a float32 scale with nearest rounding 1/28. A gradient that isn't finite makes its block NaN. Backends can't add
    quantized values, so these leaves have ordered sums.

    Attributes:
        params: Dtype of main parameters (master weights), which the optimizer updates; default: the leaf's.
        compute: Dtype in which the loss function sees parameters, and in which they are all-gathered; default: the main
            parameter's. With a format, weights are `fs.formats.Quantized`, for `fs.ops.scaled_matmul` and linears.
        reduce: Wire dtype of gradients; default: the dtype in which backward returns them. Or a format, for weights.
        grads: Dtype of accumulated gradients; default: the main parameter's, float32 at least. Sums over ranks are in
            float32 at least, and rounded once to a narrower dtype.
        moments: Dtype of optimizer moments, unless the optimizer sets one; default: as for `grads`. Or an 8-bit format
            such as `fs.formats.MXFP8`, for leaves of 2 or more dims and 4096 or more elements. Updates are computed in
            float32 at least.
        loss_scale: Dynamic loss scaling; default: none.
        sums: Order of gradient sums over ranks. "ordered" is one fixed tree on every backend and layout, so results are
            bitwise equal; "native" is the backend's reduce-scatter or all-reduce, in the dtype of `reduce` or `grads`;
            "auto" is ordered on CPU and native elsewhere.
        gather: Format in which weights are all-gathered; default: `compute`. The loss function sees the rounded values
            in the dtype of `compute` under every strategy, even if nothing is sent.
        keep: Leaves without a format: shell patterns for one part of a dotted path or for all of it. "blocks[-2:]" is
            the last two layers of the stack `blocks`, "*[-1]" the last layer of every stack; brackets at the end are
            never a character class. Patterns that aren't in the default must match a leaf.
        rounding: Rounding of moments below float32 and of bfloat16 main parameters after an update: "nearest" or
            "stochastic", with bits from the state's key, its step, the leaf's path and the element's index. Default:
            stochastic for moments, whose changes are mostly below half of their last bit; nearest for parameters.
        activations: If `compute` is a format, the dtype of leaves without one and of dequantized weights; default:
            bfloat16.
        strict: Whether to refuse matmuls in the format of `compute` on devices without a kernel for it (see
            `fs.ops.scaled_kernel`), rather than dequantize the weight.
        columnwise: Weights that backward gathers again in blocks along their other dim, which the gradient of x in
            `fs.ops.scaled_matmul(x, w, 1)` contracts: patterns as in `keep`, such as ("wq", "wk", "wv", "gate", "up").
            It needs a format of `compute` with blocks along one dim, a strategy without copies of the weights (zero(3)
            or HSDP), and no pipeline.
        rounded: Whether weights are rounded already, as in the copies that some strategies keep; set by the layout.

    Raises:
        ConfigError: A role with a dtype or format that it doesn't accept, or two roles that contradict each other.

    Example:
        >>> precision = fs.Precision(params=torch.bfloat16, moments=torch.bfloat16)
        >>> precision.compute_dtype(torch.bfloat16)
        torch.bfloat16
    """

    params: torch.dtype | None = None
    compute: torch.dtype | Blocks | None = None
    reduce: torch.dtype | Blocks | None = None
    grads: torch.dtype | None = None
    moments: torch.dtype | Blocks | None = None
    loss_scale: LossScale | None = None
    sums: Sums = "auto"
    gather: torch.dtype | Blocks | None = None
    keep: tuple[str, ...] = KEEP
    rounding: Rounding | None = None
    activations: torch.dtype | None = None
    strict: bool = False
    columnwise: tuple[str, ...] = ()
    rounded: bool = False

    @public
    def __post_init__(self) -> None:
        if self.sums not in get_args(Sums):
            mend = f"Use one of {', '.join(get_args(Sums))}."
            raise ConfigError(message(f"got sums={self.sums!r}.", mend=mend))
        # Normalized, so that precisions that mean the same are equal and share cached plans.
        if isinstance(self.gather, torch.dtype) and self.gather == self.compute:
            object.__setattr__(self, "gather", None)
        roles = {role: getattr(self, role) for role in _TAKES}
        wrong = [
            f"{role}={x}, which takes {_TAKES[role]}"
            for role, x in roles.items()
            if x is not None
            and not (isinstance(x, torch.dtype) and x in FLOATS and role != "gather")
            and not (isinstance(x, Blocks) and role in ("compute", "gather", "reduce"))
            and not (isinstance(x, Blocks) and role == "moments" and x.for_moments)
        ]
        if wrong:
            mend = f"Dtypes are {', '.join(map(str, FLOATS))}. A format is an fs.formats.Blocks, such as"
            mend += " fs.formats.MXFP8: 8 bits without scales lose small numbers."
            raise ConfigError(message("got dtypes or formats that its roles do not accept.", wrong, mend))
        if self.rounding not in (None, *get_args(Rounding)):
            mend = f"Use one of {', '.join(get_args(Rounding))}."
            raise ConfigError(message(f"got rounding={self.rounding!r}.", mend=mend))
        if self.rounding == "stochastic" and self.params != torch.bfloat16:
            mend = "Write params=torch.bfloat16, the only dtype of main parameters that is rounded so, or leave it out."
            raise ConfigError(message(f'got rounding="stochastic" with params={self.params}.', mend=mend))
        for role, example in (("keep", '("embed", "head", "*norm*", "blocks[-1]")'), ("columnwise", '("wq", "up")')):
            given: Any = getattr(self, role)
            if not isinstance(given, tuple) or not all(isinstance(x, str) for x in cast("tuple[Any, ...]", given)):
                mend = f"Pass a tuple of patterns for parts of paths, such as {role}={example}."
                raise ConfigError(message(f"got {role}={given!r}.", mend=mend))
        self._check_compute()

    def __repr__(self) -> str:
        """Show the arguments that differ from the defaults."""
        values = {field: getattr(self, field.name) for field in fields(self)}
        given = [f"{field.name}={value!r}" for field, value in values.items() if value != field.default]
        return f"Precision({', '.join(given)})"

    def _check_compute(self) -> None:
        """Make the format of compute that of gathers as well; refuse arguments that need a format of compute."""
        if isinstance(self.compute, Blocks):
            if self.gather not in (None, self.compute):
                rule = f"got compute={self.compute} and gather={self.gather}, but weights are rounded once."
                raise ConfigError(message(rule, mend="Leave gather= out."))
            object.__setattr__(self, "gather", self.compute)
        elif self.activations is not None or self.strict:
            given = f"activations={self.activations}" if self.activations is not None else "strict=True"
            mend = "Pass the dtype as compute=, or add a format: compute=fs.formats.MXFP8."
            raise ConfigError(message(f"got {given} and no format to compute in.", mend=mend))
        if self.columnwise and not (isinstance(self.compute, Blocks) and self.compute.one_way):
            rule = f"got columnwise={self.columnwise!r} with compute={self.compute}."
            mend = "Leave it out: it is for a format of compute whose blocks extend along one dim, such as"
            raise ConfigError(message(rule, mend=f"{mend} compute=fs.formats.MXFP8."))

    def format_of(self, path: str, ndim: int) -> Blocks | None:
        """Return the format in which a leaf is all-gathered, or None; `ndim` is without the dim of stacked layers."""
        return self._format(self.gather, path, ndim)

    def reduce_format(self, path: str, ndim: int) -> Blocks | None:
        """Return the format in which a leaf's gradient is sent, or None; `ndim` as in `format_of`."""
        return self._format(self.reduce, path, ndim)

    def _format(self, role: torch.dtype | Blocks | None, path: str, ndim: int) -> Blocks | None:
        return role if isinstance(role, Blocks) and ndim >= 2 and not _matches(path, self.keep) else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Wire dtype of gradients without a format; None keeps the dtype of backward."""
        return None if isinstance(self.reduce, Blocks) else self.reduce

    def takes_columns(self, path: str, ndim: int) -> bool:
        """Return whether backward gathers a leaf, which has a format, in blocks along its other dim."""
        return ndim == 2 and _matches(path, self.columnwise)

    def kept_rows(self, path: str, count: int) -> tuple[int, ...]:
        """Return the layers of a stack of `count` that have no format, by patterns such as "blocks[-1]"."""
        return tuple(sorted({row for pattern in self.keep for row in _rows(path, pattern, count)}))

    def check_leaves(self, leaves: tuple[PatternLeaf, ...]) -> None:
        """Raise a `LayoutError` that lists the patterns that match none of the leaves of a model."""
        rows = _idle_patterns(self, leaves)
        if rows:
            paths = listed((leaf.path for leaf in leaves), none="none")
            mend = f"Leaves are {paths}. A pattern is a part of a path, or all of it; 'blocks[-1]' is a layer."
            raise LayoutError(message("got a precision with patterns that match no leaf.", rows, mend))

    def check_state(self, of_state: Precision) -> None:
        """Raise a `ConfigError` if a step would round weights differently than the layout of its state does."""
        ours = (self.gather, self.keep)
        theirs = (of_state.gather, of_state.keep)
        if ours != theirs and (ours[0] or theirs[0]) is not None:
            rule = f"rounds weights to {ours[0]} except {list(ours[1])}, the layout of the state to {theirs[0]} except"
            mend = "Leave precision= out, or move the state: fs.reshard(state, layout.with_precision(precision))."
            raise ConfigError(message(f"{rule} {list(theirs[1])}.", mend=mend))

    def check_stages(self) -> None:
        """Raise a `ConfigError` for what pipeline stages do not support."""
        # Stages round each weight once, before the schedule, and multiply dequantized copies.
        if self.strict:
            text = "cannot be strict with a pipeline: its stages multiply weights that are dequantized."
            raise ConfigError(message(text, mend="Leave strict out, or keep pp at 1."))
        if self.columnwise:
            text = "cannot gather weights in a second orientation with a pipeline: its stages round them once."
            raise ConfigError(message(text, mend="Leave columnwise out, or keep pp at 1."))

    @property
    def has_formats(self) -> bool:
        """Whether weights or their gradients are sent in a format."""
        return isinstance(self.gather, Blocks) or isinstance(self.reduce, Blocks)

    @property
    def stochastic_weights(self) -> bool:
        """Whether weights are rounded stochastically."""
        return isinstance(self.gather, Blocks) and self.gather.stochastic

    @property
    def stochastic_terms(self) -> bool:
        """Whether gradients are rounded stochastically before they are sent."""
        return isinstance(self.reduce, Blocks) and self.reduce.stochastic

    def main_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """Return the dtype of a leaf's main parameter."""
        return self.params if self.params and leaf.is_floating_point else leaf

    def compute_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss function sees or dequantizes a leaf."""
        dtype = self.activation_dtype
        return dtype if dtype and leaf.is_floating_point else self.main_dtype(leaf)

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """Dtype in which a loss function computes; None for the main parameters'."""
        return (self.activations or torch.bfloat16) if isinstance(self.compute, Blocks) else self.compute

    def of_rounded(self) -> Precision:
        """Return this precision without formats of weights, for a call that gets tensors which are rounded already."""
        return replace(
            self, compute=self.activation_dtype, gather=None, activations=None, strict=False, columnwise=(),
            rounded=False,
        )  # fmt: skip

    @property
    def computes_quantized(self) -> bool:
        """Whether the loss function sees weights as `fs.formats.Quantized`."""
        return isinstance(self.compute, Blocks)

    def grad_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """Return the dtype in which a leaf's gradients are summed and stored."""
        return self.grads or wide(self.main_dtype(leaf))

    def moment_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """Return the dtype of a leaf's moments, also of those that are too small for the format of moments."""
        return self.moments if isinstance(self.moments, torch.dtype) else wide(leaf)

    @property
    def moment_format(self) -> Blocks | None:
        """Format of the optimizer's moments; None if they have a dtype."""
        return self.moments if isinstance(self.moments, Blocks) else None

    def sums_natively(self, device_type: str | None) -> bool:
        """Return whether the backend sums gradients on a device; None counts as the CPU."""
        return self.sums == "native" or (self.sums == "auto" and device_type not in ("cpu", None))

    def init_scale(self) -> ScaleState | None:
        """Return the initial state of loss scaling; None without it."""
        if self.loss_scale is None:
            return None
        return ScaleState(torch.tensor(self.loss_scale.initial), torch.zeros((), dtype=torch.int64))

    def next_scale(self, state: ScaleState, *, finite: bool | Tensor) -> ScaleState:
        """Return the scale after a step: halved if it overflowed, doubled after `interval` finite ones."""
        # Without branches on `finite`: a tensor of a device is never read by the host.
        assert self.loss_scale is not None
        was_finite = finite if isinstance(finite, Tensor) else torch.tensor(finite, device=state.scale.device)
        scale, good_steps = (x.to(was_finite.device, non_blocking=True) for x in state)
        good = (good_steps + 1) * was_finite
        doubled = good >= self.loss_scale.interval
        larger = torch.where(doubled, scale * 2.0, scale)
        smaller = (scale * 0.5).clamp(min=self.loss_scale.least)
        return ScaleState(torch.where(was_finite, larger, smaller), good * doubled.logical_not())


class PatternLeaf(NamedTuple):
    """A leaf that patterns are matched with."""

    path: str
    shape: tuple[int, ...]  # the global shape
    stacked: bool  # whether dim 0 counts the layers of a stack


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a path or one of its parts; patterns of layers match neither."""
    names = [pattern for pattern in patterns if _ROWS.fullmatch(pattern) is None]
    return any(fnmatch.fnmatchcase(part, pattern) for part in (path, *path.split(".")) for pattern in names)


def _rows(path: str, pattern: str, count: int) -> range:
    """Return the layers of a stack of `count` that a pattern such as "blocks[-2:]" names, if any."""
    taken = _ROWS.fullmatch(pattern)
    if taken is None or not _names_stack(path, taken[1]):
        return range(0)
    first = int(taken[2]) if taken[2] else None
    if taken[3]:
        return range(count)[slice(first, int(taken[4]) if taken[4] else None)]
    if first is None or not -count <= first < count:
        return range(0)
    return range(count)[first % count : first % count + 1]


def _names_stack(path: str, name: str) -> bool:
    """Return whether a name matches a part of a path, or a prefix of two or more parts."""
    parts = path.split(".")
    beginnings = (".".join(parts[:end]) for end in range(2, len(parts)))
    return any(fnmatch.fnmatchcase(part, name) for part in (*parts, *beginnings))


@functools.lru_cache(64)
def _idle_patterns(precision: Precision, leaves: tuple[PatternLeaf, ...]) -> tuple[str, ...]:
    """Return a row for each pattern that matches no leaf; those in `KEEP` are for every model and may match none."""
    parts = dict.fromkeys(part for leaf in leaves for part in (leaf.path, *leaf.path.split(".")))
    rows: list[str] = []
    for pattern in precision.keep:
        taken = _ROWS.fullmatch(pattern)
        if taken is None:
            if pattern not in KEEP and not any(_matches(leaf.path, (pattern,)) for leaf in leaves):
                rows.append(f"keep: {pattern!r} matches no leaf.{did_you_mean(pattern, parts)}")
            continue
        named = [leaf for leaf in leaves if _names_stack(leaf.path, taken[1])]
        stacks = [leaf for leaf in named if leaf.stacked]
        if not named:
            rows.append(f"keep: {pattern!r} matches no leaf.{did_you_mean(taken[1], parts)}")
        elif not stacks:
            rows.append(f"keep: {pattern!r} selects layers, but dim 0 of {named[0].path} isn't named 'layers'.")
        elif not any(_rows(leaf.path, pattern, leaf.shape[0]) for leaf in stacks):
            rows.append(f"keep: {pattern!r} is out of range: {stacks[0].path} has {stacks[0].shape[0]} layers.")
    for pattern in precision.columnwise:
        ndims = [(leaf.path, len(leaf.shape) - leaf.stacked) for leaf in leaves if _matches(leaf.path, (pattern,))]
        if not any(ndim == 2 and precision.format_of(path, ndim) is not None for path, ndim in ndims):
            why = "no matrix that has a format" if ndims else f"no leaf.{did_you_mean(pattern, parts)}"
            rows.append(f"columnwise: {pattern!r} matches {why}")
    return tuple(rows)


def check_precision(precision: Any) -> None:
    """Refuse a value that isn't a `Precision`, such as the name of a dtype."""
    if not isinstance(precision, Precision):
        raise refuse("a Precision", precision, "Give fs.FP32, fs.BF16, fs.FP16 or fs.Precision(...).")


def scaled_loss(loss: Tensor, scale: Tensor | float | None) -> Tensor:
    """Multiply a loss by its scale; the product is rounded once, to the dtype of the loss."""
    if scale is None or not loss.is_floating_point():
        return loss
    return (loss.to(wide(loss.dtype)) * scale).to(loss.dtype)


FP32 = Precision()
BF16 = Precision(params=torch.float32, compute=torch.bfloat16)
FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale())
FP8 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.TENSORWISE)
"""`BF16`, with weights all-gathered as e4m3 with a scale per matrix."""
FP8_BLOCK = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.E4M3_128x128)
"""`BF16`, with weights all-gathered as e4m3 with a scale per 128 x 128 block (DeepSeek-V3, arXiv:2412.19437)."""
MXFP8 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.MXFP8, reduce=blocks.MXFP8)
"""`BF16`, with weights all-gathered, and their gradients reduced, as MXFP8 (OCP MX 1.0, 2023)."""
NVFP4 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.NVFP4, keep=(*KEEP, "*[-1]"))
"""`BF16`, with weights all-gathered as NVFP4 (NVIDIA), except in the last layer of each stack."""
