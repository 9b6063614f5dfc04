"""The structure of an optimizer state as plain data: dicts, tuples, lists and NamedTuples by name.

In: a tree. Out: JSON that describes it, and from that the tree again with other leaves.
Only the NamedTuples of the list below are ever rebuilt, so a checkpoint cannot name a class that it would like to have.
Law: `rebuild(describe(t), ...)` has the structure of `t`, or says which class it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsharding import tree
from fsharding.errors import CheckpointError, listed, message
from fsharding.optim import (
    AdafactorState,
    AdamState,
    ChainState,
    EmaState,
    EmptyState,
    LionState,
    LookaheadState,
    MaskedState,
    MuonState,
    NoiseState,
    SgdState,
    TorchState,
)
from fsharding.precision import ScaleState
from fsharding.tree import Tree

__all__ = ["KNOWN", "LEAF", "describe", "rebuild"]

KNOWN: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(AdamState, SgdState, LionState, AdafactorState, MuonState, TorchState, EmaState, LookaheadState, NoiseState),
        *(ChainState, EmptyState, MaskedState, ScaleState),
    )
}
"""NamedTuples that are rebuilt, by name."""

LEAF = "leaf"


def describe(node: Tree) -> Any:
    """A tree as plain data.

    Returns:
        "leaf", None, or `{"dict": {...}}`, `{"tuple": [...]}`, `{"list": [...]}`,
        `{"namedtuple": name, "fields": {...}}`; `{"other": name}` for any other node, which only `opt=` can rebuild.
    """
    if node is None:
        return None
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: describe(value) for key, value in node.items()}}
    if type(node) in (tuple, list):
        return {type(node).__name__: [describe(value) for value in node]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields: tuple[str, ...] = node._fields  # pyright: ignore[reportAttributeAccessIssue]
        return {"namedtuple": _name(type(node)), "fields": {name: describe(getattr(node, name)) for name in fields}}
    flat = tree.leaves(node)
    return LEAF if len(flat) == 1 and flat[0] is node else {"other": _name(type(node))}


def _name(kind: type) -> str:
    """The short name of a class that we know; the full one of any other, even if it is called the same."""
    return kind.__name__ if KNOWN.get(kind.__name__) is kind else f"{kind.__module__}.{kind.__qualname__}"


def rebuild(
    plain: Any,
    leaf: Callable[[str], Any],
    path: str = "opt_state",
    *,
    owner: str = "the optimizer state",
    function: str = "fs.checkpoint.load",
) -> Tree:
    """A tree from plain data.

    Args:
        plain: what `describe` gave.
        leaf: makes the leaf at a path.
        path: of the root.
        owner: what the tree is, for the error.
        function: the public function, for the error.

    Raises:
        CheckpointError: a class that is not in `KNOWN`, or data that describes nothing.
    """

    def build(plain: Any, path: str) -> Tree:
        if plain is None:
            return None
        if plain == LEAF:
            return leaf(path)
        match plain:
            case {"dict": dict(items)} if len(plain) == 1:
                return {key: build(value, f"{path}.{key}") for key, value in items.items()}
            case {"tuple": list(items)} if len(plain) == 1:
                return tuple(build(value, f"{path}.{i}") for i, value in enumerate(items))
            case {"list": list(items)} if len(plain) == 1:
                return [build(value, f"{path}.{i}") for i, value in enumerate(items)]
            case {"namedtuple": str(name), "fields": dict(fields)} if len(plain) == 2:
                kind = KNOWN.get(name)
                if kind is not None and tuple(fields) == kind._fields:
                    return kind(**{key: build(value, f"{path}.{key}") for key, value in fields.items()})
                what = f"{name}({listed(fields, none='')})"
            case _:
                what = str(plain.get("other", plain)) if isinstance(plain, dict) else repr(plain)
        rows = [f"{path} is a {what}; known are {', '.join(KNOWN)}"]
        mend = "Pass the optimizer that made it: opt=..." if function == "fs.checkpoint.load" else ""
        raise CheckpointError(message(function, f"cannot rebuild {owner} from the manifest alone.", rows, mend))

    return build(plain, path)
