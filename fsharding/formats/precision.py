"""Precision as a value: the dtypes of parameters, compute, wire, gradients and moments, and dynamic loss scaling.

Guarantee: ordered sums over ranks are taken in float32 at least, whatever travels; codes of low precision are always
made of main parameters, never of what was rounded before.
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


_TAKES = {
    "params": "a dtype: optimizers update numbers, not codes",
    "compute": "a dtype or a format",
    "reduce": "a dtype or a format",
    "grads": "a dtype: sums are not rounded to codes",
    "moments": "a dtype, or a format of 8 bits without a scale of whole matrices",
    "gather": "a format: weights without one travel in the dtype of compute",
    "activations": "a dtype",
}
"""By role of a `Precision`."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): halve on overflow, double after a row of good steps.

    Attributes:
        initial: the first scale.
        interval: good steps in a row before the scale is doubled.
        least: the scale does not fall below it: a step that is not finite there is refused, as without scaling.

    Raises:
        ConfigError: a number is not above 0, or the first scale is below the least.

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
            mend = "Numbers are above 0, and initial is at least as large as least."
            raise ConfigError(message(f"got {self}.", mend=mend))


class ScaleState(NamedTuple):
    """The loss scale (float32, 0-d) and how many good steps there have been since it last changed (int64, 0-d)."""

    scale: Tensor
    good_steps: Tensor


Sums: TypeAlias = Literal["auto", "ordered", "native"]
"""How gradients are summed over ranks; see `Precision`."""

KEEP = ("*embed*", "*head", "*router*", "*.mlp.gate.weight", "*shared_expert_gate*", "*norm*", "*bias*")
"""Parts of the paths of leaves that stay in the dtype of compute, where nothing else is said; modules of Hugging Face
call a router `mlp.gate`."""

_ROWS = re.compile(r"(.*)\[(-?\d*)(:?)(-?\d*)\]")


@dataclass(frozen=True)
class Precision:
    """The dtype of each role; None means the dtype of the leaf, and follows from the roles above it.

    Attributes:
        params: main parameters, which the optimizer updates.
        compute: what the loss function sees, and the wire dtype of a gather; by default the main parameter's. Or
            a format: the loss function sees weights of blocks as `fs.formats.Quantized`, which products of `ops`
            take, and `activations` is the dtype of all else.
        gather: the format in which weights travel; None, or the dtype of compute itself, for that dtype. Weights are
            rounded to it, and the loss function sees these numbers in the dtype of compute, under every strategy: also
            where nothing travels.
            Where compute is a format, it is that one.
        keep: which leaves have no format: patterns as in a shell, each for one part of a dotted path, such as "*norm*",
            or for all of it. "blocks[-2:]" is the last two layers of a stack called `blocks`, and "*[-1]" the last
            layer of every stack; a name that ends so never means a class of characters. Leaves with fewer than two
            dims, and frozen ones, never have one. A pattern that is not in `KEEP` must match a leaf.
        reduce: wire dtype of the gradients; by default that in which they come out of backward. Or a format, for leaves
            that `keep` leaves to it: what a rank has to add is rounded, travels as codes and scales, and is widened
            again before it is summed in order. See below.
        grads: accumulated gradients; by default the main parameter's, and float32 at least. Sums over ranks are
            in float32 at least also where a narrower one is asked for here, and are rounded once.
        sums: of gradients over ranks: "ordered", in one tree whatever the backend and the layout, so that all laws
            about bits hold; "native", by the backend's own reduce-scatter and all-reduce, in the dtype of `reduce`, or
            else in the dtype of the sums; "auto" is ordered on the CPU and native elsewhere.
        moments: optimizer moments, where the optimizer has no dtype of its own; by default as for gradients. Updates
            are computed in float32 at least. Or a format of 8 bits, such as fs.formats.MXFP8: moments of leaves of two
            dims and more and of 4096 elements and more are codes and scales between updates.
        rounding: of moments below float32 and of bfloat16 main parameters after an update, which is computed in
            float32: "nearest"; or "stochastic", up or down with the probability that makes the mean exact, by bits
            that follow from the key of the state, its step, the path of the leaf, and the index of the element in the
            whole leaf. By default moments are rounded by key, since most of their changes are below half of their last
            bit, and main parameters to the nearest.
        loss_scale: dynamic loss scaling, or None.
        activations: where compute is a format, the dtype in which the loss function computes: of leaves without a
            format, and of those that are dequantized; by default bfloat16.
        strict: products with weights in the format of compute are refused where the device has no kernel for it, see
            `fs.ops.scaled_kernel`; else they are then dequantized and multiplied.
        columnwise: where blocks of compute lie along one dim, the leaves that backward gathers a second time in blocks
            along their other dim, as the gradient of x in `x @ w.T` sums: patterns as in `keep`, such as
            ("wq", "wk", "wv", "gate", "up"). `fs.ops.scaled_matmul(x, w, 1)` multiplies by these numbers there; all
            other uses have those of forward. Weights are rounded to both from main parameters, so it takes a strategy
            that keeps no copies of them, zero(3) or HSDP, and no pipeline.
        rounded: weights have been rounded already; `Layout.in_flight` says so of copies at rest.

    With a format in `reduce` a sum over k ranks is off by at most the sum of the k errors of its terms. The error of a
    term is half the distance between the two numbers of the format next to it, times the scale of its block; the whole
    distance if rounding is stochastic; or, of an element above the largest number of the format, which scales in 8 bits
    leave, what it is above that. For MXFP8 it is at most 1/8 of the largest magnitude in the block, with a float32
    scale and nearest rounding 1/28. Terms are rounded once, before they are sent between ranks: with each microbatch
    where gradients are cut, else at the end of the step; what has been summed over some ranks travels on in the dtype
    of the sum, and so do gradients of a pipeline that reduces once a step. A term that is not finite makes its block
    NaN, so that a step refuses it. A backend cannot add codes: these leaves have ordered sums, whatever `sums` says.

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
            raise ConfigError(message("got what its roles do not take.", wrong, mend))
        if self.rounding not in (None, *get_args(Rounding)):
            mend = f"Use one of {', '.join(get_args(Rounding))}."
            raise ConfigError(message(f"got rounding={self.rounding!r}.", mend=mend))
        if self.rounding == "stochastic" and self.params != torch.bfloat16:
            mend = "Write params=torch.bfloat16; wider main parameters lose nothing, and others have no such rounding."
            raise ConfigError(message(f'got rounding="stochastic" with params={self.params}.', mend=mend))
        for role, example in (("keep", '("embed", "head", "*norm*", "blocks[-1]")'), ("columnwise", '("wq", "up")')):
            given: Any = getattr(self, role)
            if not isinstance(given, tuple) or not all(isinstance(x, str) for x in cast("tuple[Any, ...]", given)):
                mend = f"Give patterns of parts of paths, such as {role}={example}."
                raise ConfigError(message(f"got {role}={given!r}.", mend=mend))
        self._check_compute()

    def __repr__(self) -> str:
        """The arguments that are not the default ones."""
        values = {field: getattr(self, field.name) for field in fields(self)}
        given = [f"{field.name}={value!r}" for field, value in values.items() if value != field.default]
        return f"Precision({', '.join(given)})"

    def _check_compute(self) -> None:
        """A format of compute is also the format of gathers, and goes with a dtype of activations."""
        if isinstance(self.compute, Blocks):
            if self.gather not in (None, self.compute):
                rule = f"computes in {self.compute} and gathers in {self.gather}: weights are rounded once."
                raise ConfigError(message(rule, mend="Leave gather= out."))
            object.__setattr__(self, "gather", self.compute)
        elif self.activations is not None or self.strict:
            given = f"activations={self.activations}" if self.activations is not None else "strict=True"
            mend = "Give the dtype as compute=, or a format with it: compute=fs.formats.MXFP8."
            raise ConfigError(message(f"got {given} and no format to compute in.", mend=mend))
        if self.columnwise and not (isinstance(self.compute, Blocks) and self.compute.one_way):
            rule = f"got columnwise={self.columnwise!r} with compute={self.compute}."
            mend = "Leave it out: it is for a format of compute whose blocks lie along one dim, such as"
            raise ConfigError(message(rule, mend=f"{mend} compute=fs.formats.MXFP8; others serve both."))

    def format_of(self, path: str, ndim: int) -> Blocks | None:
        """The format in which a leaf travels; None for one that travels in the dtype of compute.

        Args:
            path: dotted, of the leaf.
            ndim: dims of it in one unit: of a stacked leaf, without the layers' dim.
        """
        if not isinstance(self.gather, Blocks) or ndim < 2 or self._keeps(path):
            return None
        return self.gather

    def reduce_format(self, path: str, ndim: int) -> Blocks | None:
        """The format in which terms of a leaf's gradient travel; arguments as in `format_of`."""
        if not isinstance(self.reduce, Blocks) or ndim < 2 or self._keeps(path):
            return None
        return self.reduce

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The wire dtype of gradients without a format; None for that in which they come out of backward."""
        return None if isinstance(self.reduce, Blocks) else self.reduce

    def takes_columns(self, path: str, ndim: int) -> bool:
        """Whether backward gathers a leaf that has a format in blocks along its other dim; arguments as there."""
        return ndim == 2 and _matches(path, self.columnwise)

    def _keeps(self, path: str) -> bool:
        """Whether all of a leaf has no format."""
        return _matches(path, self.keep)

    def kept_rows(self, path: str, count: int) -> tuple[int, ...]:
        """The layers of a stack that have no format although others have one.

        Args:
            path: dotted, of a stacked leaf.
            count: layers in all.
        """
        return tuple(sorted({row for pattern in self.keep for row in _rows(path, pattern, count)}))

    def check_leaves(self, leaves: tuple[PatternLeaf, ...]) -> None:
        """Refuse patterns that match no leaf. Free when it is called again with the same leaves.

        Args:
            leaves: all of a model.

        Raises:
            LayoutError: patterns of `keep` or `columnwise` match nothing; all are listed.
        """
        rows = _idle_patterns(self, leaves)
        if rows:
            paths = listed((leaf.path for leaf in leaves), none="none")
            mend = f"Leaves are {paths}. A pattern is a part of a path, or all of it; 'blocks[-1]' is a layer."
            raise LayoutError(message("got a precision with patterns that match no leaf.", rows, mend))

    def check_state(self, of_state: Precision) -> None:
        """Refuses a step that would round weights otherwise than its states do.

        Args:
            of_state: the precision of their layout.

        Raises:
            ConfigError: it would.
        """
        ours = (self.gather, self.keep)
        theirs = (of_state.gather, of_state.keep)
        if ours != theirs and (ours[0] or theirs[0]) is not None:
            rule = f"rounds weights to {ours[0]} except {list(ours[1])}, the layout of the state to {theirs[0]} except"
            mend = "Leave precision= out, or move the state: fs.reshard(state, layout.with_precision(precision))."
            raise ConfigError(message(f"{rule} {list(theirs[1])}.", mend=mend))

    def check_stages(self) -> None:
        """Refuses what pipeline stages do not do.

        Raises:
            ConfigError: `strict` or `columnwise`.
        """
        if self.strict:
            text = "cannot be strict with a pipeline: its stages multiply weights that are dequantized."
            raise ConfigError(message(text, mend="Leave strict out, or keep pp at 1."))
        if self.columnwise:
            text = "cannot gather weights in a second orientation with a pipeline: its stages round them once."
            raise ConfigError(message(text, mend="Leave columnwise out, or keep pp at 1."))

    @property
    def has_formats(self) -> bool:
        """Whether weights, or terms of gradients, are sent in a format."""
        return isinstance(self.gather, Blocks) or isinstance(self.reduce, Blocks)

    @property
    def stochastic_weights(self) -> bool:
        """Whether weights are rounded by a key."""
        return isinstance(self.gather, Blocks) and self.gather.stochastic

    @property
    def stochastic_terms(self) -> bool:
        """Whether terms of gradients are rounded by a key."""
        return isinstance(self.reduce, Blocks) and self.reduce.stochastic

    def main_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of the main parameter of a leaf."""
        return self.params if self.params and leaf.is_floating_point else leaf

    def compute_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype in which the loss function sees a leaf, or dequantizes it."""
        dtype = self.activation_dtype
        return dtype if dtype and leaf.is_floating_point else self.main_dtype(leaf)

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """The dtype in which a loss function computes; None for the dtype of main parameters."""
        return (self.activations or torch.bfloat16) if isinstance(self.compute, Blocks) else self.compute

    def of_rounded(self) -> Precision:
        """The precision of a call that gets plain tensors that have been rounded: without formats of weights."""
        return replace(
            self, compute=self.activation_dtype, gather=None, activations=None, strict=False, columnwise=(),
            rounded=False,
        )  # fmt: skip

    @property
    def computes_quantized(self) -> bool:
        """Whether the loss function sees weights of blocks as `fs.formats.Quantized`."""
        return isinstance(self.compute, Blocks)

    def grad_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a leaf are summed and kept."""
        return self.grads or wide(self.main_dtype(leaf))

    def moment_dtype(self, leaf: torch.dtype) -> torch.dtype:
        """The dtype of the optimizer's moments of a leaf; where moments have a format, of those that are too small."""
        return self.moments if isinstance(self.moments, torch.dtype) else wide(leaf)

    @property
    def moment_format(self) -> Blocks | None:
        """The format of the optimizer's moments; None where they have a dtype."""
        return self.moments if isinstance(self.moments, Blocks) else None

    def sums_natively(self, device_type: str | None) -> bool:
        """Whether the backend sums gradients on a device by its own collectives.

        Args:
            device_type: None where there is no device, which counts as a CPU.
        """
        return self.sums == "native" or (self.sums == "auto" and device_type not in ("cpu", None))

    def init_scale(self) -> ScaleState | None:
        """The first loss scale state, or None without loss scaling."""
        if self.loss_scale is None:
            return None
        return ScaleState(torch.tensor(self.loss_scale.initial), torch.zeros((), dtype=torch.int64))

    def next_scale(self, state: ScaleState, *, finite: bool | Tensor) -> ScaleState:
        """The scale after a step: halved when the step overflowed, doubled after `interval` good ones.

        Args:
            state: before the step.
            finite: whether it did not overflow; a bool of no dims is not read by the host.
        """
        assert self.loss_scale is not None
        was_finite = finite if isinstance(finite, Tensor) else torch.tensor(finite, device=state.scale.device)
        scale, good_steps = (x.to(was_finite.device, non_blocking=True) for x in state)
        good = (good_steps + 1) * was_finite
        doubled = good >= self.loss_scale.interval
        larger = torch.where(doubled, scale * 2.0, scale)
        smaller = (scale * 0.5).clamp(min=self.loss_scale.least)
        return ScaleState(torch.where(was_finite, larger, smaller), good * doubled.logical_not())


class PatternLeaf(NamedTuple):
    """A leaf as patterns see it."""

    path: str
    shape: tuple[int, ...]  # of the full leaf
    stacked: bool  # whether dim 0 is the layers of a stack


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is of a path, or of a part of it; patterns of rows are of neither."""
    names = [pattern for pattern in patterns if _ROWS.fullmatch(pattern) is None]
    return any(fnmatch.fnmatchcase(part, pattern) for part in (path, *path.split(".")) for pattern in names)


def _rows(path: str, pattern: str, count: int) -> range:
    """The layers of a stack of `count` that a pattern such as "blocks[-2:]" names; empty for other patterns."""
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
    """Whether a name is a part of a path, or its beginning."""
    parts = path.split(".")
    beginnings = (".".join(parts[:end]) for end in range(2, len(parts)))
    return any(fnmatch.fnmatchcase(part, name) for part in (*parts, *beginnings))


@functools.lru_cache(64)
def _idle_patterns(precision: Precision, leaves: tuple[PatternLeaf, ...]) -> tuple[str, ...]:
    """Patterns that match no leaf, and why; `KEEP` holds patterns for every model, so it may match nothing."""
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
            rows.append(f"keep: {pattern!r} means layers, and dim 0 of {named[0].path} isn't named 'layers'.")
        elif not any(_rows(leaf.path, pattern, leaf.shape[0]) for leaf in stacks):
            rows.append(f"keep: {pattern!r} is outside of {stacks[0].path}, which has {stacks[0].shape[0]} layers.")
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
    """A loss times its scale, in the dtype of the loss; the product is rounded once."""
    if scale is None or not loss.is_floating_point():
        return loss
    return (loss.to(wide(loss.dtype)) * scale).to(loss.dtype)


FP32 = Precision()
BF16 = Precision(params=torch.float32, compute=torch.bfloat16)
FP16 = Precision(params=torch.float32, compute=torch.float16, loss_scale=LossScale())
FP8 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.TENSORWISE)
"""As `BF16`; weights of blocks travel as e4m3 with a scale for each matrix."""
FP8_BLOCK = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.E4M3_128x128)
"""The same with a scale for each 128 x 128 elements (DeepSeek-V3)."""
MXFP8 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.MXFP8, reduce=blocks.MXFP8)
"""As `BF16`; weights of blocks and terms of their gradients travel as MXFP8."""
NVFP4 = Precision(params=torch.float32, compute=torch.bfloat16, gather=blocks.NVFP4, keep=(*KEEP, "*[-1]"))
"""As `BF16`; weights of all blocks but the last one of each stack travel as NVFP4."""
