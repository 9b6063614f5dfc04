"""Explain why a loss function failed: a leaf used before it was gathered, a batch of NumPy arrays, and so on.

This runs only after a failure. A new error also has the class of the original, so code that catches `KeyError` or
`RuntimeError` still works.
"""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CellType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import errors, tree
from fsharding.base.calls import LIBRARY
from fsharding.base.errors import FshardingError, NotGatheredError, TransformError, did_you_mean, listed, message
from fsharding.base.public import YIELDS, kind_of, yields_batches
from fsharding.base.tree import Tree
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.named_sharding import Local, of_sums, typeof
from fsharding.transforms.gather_context import GatherContext

__all__ = ["content_of", "explained", "line_of_user", "names_of"]

_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?)\b", re.IGNORECASE)
_KINDS = re.compile(r"dtype|scalar type|not implemented for '|LongTensor|same device|expected device|on meta")
_OUTSIDE = re.compile(r"index out of range in self|index -?\d+ is out of bounds for dimension 0")
_UNITS = re.compile(r"invalid data type 'str'|not (dict|tuple)$|'(dict|tuple)'")  # parameters and carry are swapped
_FLOAT_IDS = re.compile(r"'indices'|used as indices must be")
# The error of an operation that a compiler ran on tensors without values.
_TRACED = re.compile(r"got (?:Runtime|Value|Index)Error\([\"'](.+?)[\"']\)")
_FREEZE = 'Freeze leaves in the layout: fs.plan_layout(..., frozen=["head"]).'
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}{os.sep}", LIBRARY, os.path.dirname(os.__file__))

_TEXTS = (
    (
        "torch.compiler.disable",
        "is compiled as one graph, which gathers cannot be part of",
        "Leave out fullgraph=True, or pass it to a block: fs.scan_units(torch.compile(block, fullgraph=True), ...).",
    ),
    (
        "saved tensor hooks",
        "calls torch.func.grad, vjp, jacrev or hessian, which refuse saved-tensor hooks",
        "Compute the outer derivative with torch.func too, fs.shard_map(torch.func.grad(f)), or the inner one with"
        " torch.autograd.grad(..., create_graph=True).",
    ),
    (
        "change requires_grad flags",
        "changes requires_grad of a gathered weight",
        f"{_FREEZE} For a single use, write w.detach().",
    ),
    (
        r"is a view and.*modified inplace",
        "writes gathered weights in place",
        "Don't modify gathered weights: write w = w * 2 instead of w.mul_(2), and w = w + x instead of w += x.",
    ),
    (
        r"mixed torch\.Tensor and DTensor",
        "uses parameters at rest, DTensors, with plain tensors",
        "Use the loss function's first argument, through fs.gather_unit, instead of state.params.",
    ),
)
"""Pattern in a RuntimeError of torch, what the loss function does, and what to write instead."""


class _Failure(NamedTuple):
    """A loss function that raised, and its arguments."""

    error: Exception
    fn: Callable[..., Any]
    text: str  # first line of the error
    line: list[str]  # the user's line that failed, if known
    params: Tree
    given: dict[str, Any]  # arguments after the parameters, by name
    leaves: list[tuple[str, Any]]  # paths and leaves of these arguments
    context: GatherContext


def explained(
    error: Exception, fn: Callable[..., Any], params: Tree, args: Sequence[Any], context: GatherContext
) -> FshardingError | None:
    """Explain an error of a loss function, if the cause is known. An error of this library only gets more text."""
    if isinstance(error, NotGatheredError):
        _name(error, params, context)
        return None
    if all(hasattr(params, name) for name in ("params", "opt_state", "layout")):
        mend = "Pass the parameters only: (state.params, batch)."
        return errors.ArgumentError(message(f"takes a tree of parameters, got {kind_of(params)}.", mend=mend))
    if isinstance(error, FshardingError | torch.OutOfMemoryError):
        return None
    given = dict(zip(names_of(fn, len(args) + 1)[1:], args, strict=False))
    named = ((name, path, x) for name, batch in given.items() for path, x in tree.named_leaves(batch).items())
    leaves = [(f"{name}.{path}" if path else name, x) for name, path, x in named]
    text = str(error).strip().partition("\n")[0]
    failure = _Failure(error, fn, text, line_of_user(error), params, given, leaves, context)
    if type(error).__module__ == "torch._dynamo.exc":
        return _of_texts(failure) or _of_shapes(failure)
    if wrong := _of_arguments(error, fn, params, args):
        return wrong
    # The order matters: the first match explains the error, and the last ones only look at its class.
    causes = (_of_texts, _of_nodes, _of_order, _of_missing, _of_arrays, _of_ids, _of_kinds, _of_shapes)
    return next((why for cause in causes if (why := cause(failure)) is not None), None)


def _name(error: NotGatheredError, params: Tree, context: GatherContext) -> None:
    """Complete the text of a `NotGatheredError`: the leaf's path, and the call that gathers its unit."""
    leaf = error.leaf
    error.leaf = None
    index = context.index_of(leaf.value) if isinstance(leaf, Local) else None
    if not isinstance(leaf, Local) or index is None:
        return
    path = f"params.{context.paths[index.leaf]}".removesuffix(".")
    accessor = optree.tree_accessors(params, is_leaf=_is_local, namespace=tree.NAMESPACE)[index.leaf]
    row = f"{path} is {typeof(leaf)}, of which this rank holds {list(leaf.value.shape)}"
    if index.row is not None:
        mend = 'Let fs.scan_units(block, params["blocks"], x) gather each block, or call fs.gather_unit on it first.'
    elif len(accessor):
        unit = _code(accessor[:-1], "params")
        last = _code(accessor[-1:], "unit")
        mend = f"Gather its unit first, unit = fs.gather_unit({unit}), and use {last}."
    else:
        mend = "Gather it first: w = fs.gather_unit(params)."
    if error.use == "is indexed" and index.row is None:
        stack = _code(accessor[:-1], "params")
        mend += f" For a block of a stack, write fs.gather_unit(fs.select_unit({stack}, i)), or use fs.scan_units."
    if "requires_grad" in error.use:
        mend = _FREEZE
    if "to_local" in error.use:
        mend += " This rank's shard is .value."
    mend += of_sums(error.use)
    rule = f"has a loss function in which a leaf {error.use} before it is gathered."
    error.args = (message(rule, [row, *line_of_user(error)], mend),)


def _of_arguments(error: Exception, fn: Callable[..., Any], params: Tree, args: Sequence[Any]) -> FshardingError | None:
    """Explain swapped or missing arguments."""
    leaves = tree.leaves(params, is_leaf=_is_local)
    if not any(isinstance(x, Local) for x in leaves) and any(isinstance(x, DTensor) for x in tree.leaves(list(args))):
        rule = "got sharded leaves only after its first argument."
        return errors.ArgumentError(message(rule, mend="Pass the parameters first: (params, batch)."))
    if isinstance(error, TypeError):
        try:
            inspect.signature(fn).bind(params, *args)
        except (TypeError, ValueError) as why:
            name = getattr(fn, "__name__", type(fn).__name__)
            more = f"{len(args)} more {'argument' if len(args) == 1 else 'arguments'}"
            rule = f"cannot call {name} with params and {more}: {why}."
            mend = "Pass the loss function's other arguments after params, such as (params, batch)."
            return errors.ArgumentError(message(rule, mend=mend))
    return None


def _of_texts(failure: _Failure) -> FshardingError | None:
    """Explain a RuntimeError of torch by its text, see `_TEXTS`."""
    text = str(failure.error)
    known = _TEXTS if isinstance(failure.error, RuntimeError) else ()
    for pattern, what, mend in known:
        if re.search(pattern, text, re.DOTALL):
            return TransformError(message(f"has a loss function that {what}.", failure.line, mend))
    return None


def _of_nodes(failure: _Failure) -> FshardingError | None:
    """Explain a node that was inspected, such as by `isinstance`, and never used."""
    error = failure.error
    if not isinstance(error, TypeError | RuntimeError) or not re.search(r"\bLocal\b", str(error)):
        return None
    rule = "has a loss function that uses leaves of its parameters before they are gathered."
    mend = 'Gather their unit first, such as unit = fs.gather_unit(params["head"]), and use its leaves.'
    return TransformError(message(rule, [str(error).strip(), *failure.line], mend))


def _of_order(failure: _Failure) -> FshardingError | None:
    """Explain a block of `fs.scan_units` with the arguments or results of a lax.scan body."""
    error = failure.error
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    calls = {code.co_name for code in codes if code.co_filename.startswith(LIBRARY)}
    if not isinstance(error, TypeError) or not _UNITS.search(str(error)) or "scan_units" not in calls:
        return None
    mend = (
        "fs.scan_units calls block(params, carry), parameters first; lax.scan calls (carry, x). Return the carry, or"
        " (carry, aux) with has_aux=True."
    )
    rows = [*failure.line, str(error)]
    return errors.ArgumentError(message("has a loss function with a block that failed.", rows, mend))


def _of_missing(failure: _Failure) -> FshardingError | None:
    """Explain a key that no argument has."""
    if not isinstance(failure.error, KeyError) or len(failure.error.args) != 1:
        return None
    key = failure.error.args[0]
    given = {names_of(failure.fn, 1)[0]: failure.params, **failure.given}
    paths = {name: tree.paths(x, is_leaf=_is_local) for name, x in given.items()}
    parts = {part for named in paths.values() for path in named for part in path.split(".")}
    if str(key) in parts:
        return None  # an argument has it, so the lookup was in a dict of the function's own
    rows = [f"{name} has {listed(named)}" if named else f"{name} is {given[name]!r}" for name, named in paths.items()]
    mend = f"Add {key!r} to the batch or the parameters, or use one of these keys.{did_you_mean(str(key), parts)}"
    rule = f"has a loss function that reads {key!r}, which none of its arguments has."
    return errors.MissingKeyError(message(rule, [*rows, *failure.line], mend))


def _of_arrays(failure: _Failure) -> FshardingError | None:
    """Explain arrays, lists or None where the loss function expects tensors."""
    if not isinstance(failure.error, TypeError | AttributeError):
        return None
    text = str(failure.error)
    given = failure.given
    if yielding := [f"{name} is {kind_of(x)}" for name, x in given.items() if yields_batches(x)]:
        rule = "takes one batch, got an object that yields batches."
        return errors.BatchError(message(rule, yielding, YIELDS))
    lists = (list, tuple) if "indices must be" in text else ()
    rows = [f"{name} is None" for name, x in given.items() if x is None]
    rows += [f"{name} is {kind_of(x)}" for name, x in given.items() if isinstance(x, lists)]
    arrays = [(path, x) for path, x in failure.leaves if hasattr(x, "__array__") and not isinstance(x, Tensor)]
    rows += [f"{path} is {kind_of(x)}" for path, x in arrays]
    if not rows:
        return None
    mend = "Pass a batch with the structure that the loss function reads, such as a dict of tensors."
    mend = "Convert arrays to tensors: fs.tree.map(torch.as_tensor, batch)." if arrays else mend
    return errors.BatchError(message(f"has a loss function that failed: {text}.", rows, mend))


def _of_ids(failure: _Failure) -> FshardingError | None:
    """Explain ids that aren't integers, or outside of a table, by the leaves of the batch that may be ids."""
    is_float = _FLOAT_IDS.search(failure.text) is not None
    if not isinstance(failure.error, IndexError | RuntimeError) or not (is_float or _OUTSIDE.search(failure.text)):
        return None
    rows: list[str] = []
    for path, x in failure.leaves:
        if isinstance(x, Tensor) and x.is_floating_point() == is_float and not x.is_meta and x.numel():
            values = "write .long() for ids" if is_float else f"values from {int(x.min())} to {int(x.max())}"
            rows.append(f"{path} is {kind_text(x)}: {values}")
    if not rows:
        return None
    rows = [*failure.line, *rows]
    if is_float:
        rule = "has a loss function that got ids that aren't integers."
        return errors.DtypeError(message(rule, rows, "Pass ids as int64, such as batch.long()."))
    rule = "has a loss function that reads a row outside of its table."
    mend = "Ids of V rows are 0 to V - 1: use a table with more rows, or the tokenizer of this model."
    return errors.DataError(message(rule, [*rows, *failure.context.gathered_leaves()], mend))


def _of_kinds(failure: _Failure) -> FshardingError | None:
    """Explain an error about dtypes or devices by the leaves of the batch that differ from the parameters."""
    if not isinstance(failure.error, RuntimeError) or not _KINDS.search(str(failure.error)):
        return None
    weights = [x.value for x in tree.leaves(failure.params, is_leaf=_is_local) if isinstance(x, Local)]
    devices = {x.device for x in weights}
    dtypes = {x.dtype for x in weights if x.is_floating_point()}
    odd = ((path, x, _odd_kind(x, devices, dtypes)) for path, x in failure.leaves if isinstance(x, Tensor))
    rows = [f"{path} is {kind_of(x).removeprefix('a tensor ')}: {why}" for path, x, why in odd if why]
    if not rows:
        return None
    rule = f"has a loss function that failed: {failure.text.rstrip('.!')}."
    mend = "Convert these leaves of the batch; fs.local_batch(batch) moves all leaves to the mesh's device."
    return errors.DtypeError(message(rule, [*failure.line, *rows], mend))


def _odd_kind(x: Tensor, devices: set[torch.device], dtypes: set[torch.dtype]) -> str:
    """Return what to change in a leaf that differs from the parameters in dtype or device; "" if it doesn't."""
    if x.is_meta:
        return "it has no values; create it on a device"
    if devices and x.device not in devices:
        return f"the parameters are on {next(iter(devices))}"
    if x.dtype == torch.float64 and torch.float64 not in dtypes:
        return "write .float()"
    if not x.is_floating_point() and not x.is_complex() and x.dtype not in (torch.int64, torch.bool):
        return "write .long() for ids and classes"
    return ""


def _of_shapes(failure: _Failure) -> FshardingError | None:
    """Explain shapes that don't match by those of the batch and of the gathered weights, the last ones first."""
    error = failure.error
    traced = _TRACED.search(str(error)) if type(error).__name__ == "TorchRuntimeError" else None
    if not traced and (type(error) not in (RuntimeError, ValueError, IndexError) or not _SHAPES.search(str(error))):
        return None
    if "gloo/" in str(error) or hasattr(error, "_fsharding_peers"):
        return None
    mend = "Match the shapes of the batch to the weights, or the weights to the batch."
    if row := failure.context.row_of_stack():
        mend += (
            f" Dim 0 of leaves in fs.scan_units is layers, so {row} is one layer; for a unit without layers, call"
            " block(fs.gather_unit(unit), x)."
        )
    rows = [*failure.line, *(f"{path} is {kind_text(x)}" for path, x in failure.leaves)]
    rule = f"has a loss function that failed: {traced[1].rstrip('.') if traced else failure.text}."
    return errors.ShapeError(message(rule, [*rows, *failure.context.gathered_leaves()], mend))


def _is_local(x: Any) -> bool:
    return isinstance(x, Local)


# ---------------------------------------------------------------------------------------------------------------- words
def names_of(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a function's first arguments."""
    try:
        given = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        given = ()
    result = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [result[i] if i < len(result) else f"argument {i}" for i in range(count)]


def content_of(cell: CellType) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _code(accessor: optree.PyTreeAccessor, root: str) -> str:
    """Return the code that reads a part of a tree."""
    text = accessor.codify(root)
    return text if '"' in text else text.replace("'", '"')


def line_of_user(error: Exception | None = None) -> list[str]:
    """Return the innermost line outside of torch, Python and this library, of an error or the caller, as rows."""
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return [f"{Path(x.filename).name}:{x.lineno}: {x.line}" for x in own[-1:] if x.line]
