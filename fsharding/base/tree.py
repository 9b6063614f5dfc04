"""Pytrees: optree in our own namespace, with leaves named by dotted paths such as `params.blocks.wq`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import optree

from fsharding.base.errors import TreeError, listed, message, report

__all__ = [
    "NAMESPACE", "Tree", "at", "children", "define_vdot", "flatten", "flatten_up_to", "leaves", "map",
    "map_with_path", "match", "named_leaves", "paths", "prune", "register_node", "unflatten", "vdot",
]  # fmt: skip

NAMESPACE = "fsharding"

Tree: TypeAlias = Any
"""Any nesting of dicts, tuples, lists, NamedTuples and registered nodes."""

IsLeaf: TypeAlias = Callable[[Any], bool] | None
_map = map
_Vdot = TypeVar("_Vdot", bound=Callable[..., Any])
_TWO_TREES = ("the first tree", "the second tree")


def flatten(tree: Tree, *, is_leaf: IsLeaf = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Split a tree into its leaves and its structure.

    Args:
        tree, is_leaf: Any tree, and a predicate of nodes to treat as leaves. None is an empty subtree, not a leaf.

    Returns:
        The leaves, and the structure for `unflatten`. Dict keys are sorted.

    Example:
        >>> flat, spec = fs.tree.flatten({"b": 1, "a": (2, None)})
        >>> flat, spec
        ([2, 1], PyTreeSpec({'a': (*, None), 'b': *}))
    """
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def unflatten(spec: optree.PyTreeSpec, flat: Sequence[Any]) -> Tree:
    """Build a tree from a structure and leaves.

    Args:
        spec: Structure from `flatten`.
        flat: One value per leaf.

    Returns:
        The tree.

    Example:
        >>> flat, spec = fs.tree.flatten({"w": 1, "b": 2})
        >>> fs.tree.unflatten(spec, [10 * x for x in flat])
        {'w': 10, 'b': 20}
    """
    return optree.tree_unflatten(spec, flat)


def leaves(tree: Tree, *, is_leaf: IsLeaf = None) -> list[Any]:
    """List the leaves of a tree.

    Args:
        tree, is_leaf: Any tree, and a predicate of nodes to treat as leaves. None is an empty subtree, not a leaf.

    Returns:
        The leaves, in the order of `flatten`.

    Example:
        >>> fs.tree.leaves({"b": 1, "a": [2, None, 3]})
        [2, 3, 1]
    """
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


@functools.lru_cache(maxsize=1 << 14)  # each chunk of an optimizer update has a different structure
def _cached_paths(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    def name(entry: Any) -> str:
        return str(getattr(entry, "field", entry.entry))

    return tuple(".".join(_map(name, accessor)) for accessor in spec.accessors())


def _paths_of(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    """Return the path of every leaf."""
    # Caching the spec of a registered node would keep its static data, such as a mesh, alive: only cache its children.
    if spec.type not in _registered:
        return _cached_paths(spec)
    pairs = zip(spec.entries(), spec.children(), strict=True)
    return tuple(f"{name}.{rest}" if rest else str(name) for name, child in pairs for rest in _paths_of(child))


_registered: set[type[Any]] = set()


def paths(tree: Tree, *, is_leaf: IsLeaf = None) -> tuple[str, ...]:
    """List the dotted path of each leaf: dict keys, field names and positions joined by dots.

    Args:
        tree, is_leaf: Any tree, and a predicate of nodes to treat as leaves.

    Returns:
        The paths, in the order of `leaves`.

    Example:
        >>> fs.tree.paths({"blocks": [{"w": 1}, {"w": 2}], "head": 3})
        ('blocks.0.w', 'blocks.1.w', 'head')
    """
    return _paths_of(optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE))


def named_leaves(tree: Tree, *, is_leaf: IsLeaf = None) -> dict[str, Any]:
    """Map paths to leaves, as checkpoints store a state.

    Args:
        tree, is_leaf: Any tree, and a predicate of nodes to treat as leaves.

    Returns:
        The leaves by path, in the order of `leaves`.

    Raises:
        TreeError: Several leaves have the same path, as in `{"a.b": 1, "a": {"b": 2}}`.

    Example:
        >>> fs.tree.named_leaves({"blocks": [{"w": 1}, {"w": 2}], "head": 3})
        {'blocks.0.w': 1, 'blocks.1.w': 2, 'head': 3}
    """
    flat, spec = flatten(tree, is_leaf=is_leaf)
    names = _paths_of(spec)
    result = dict(zip(names, flat, strict=True))
    if len(result) < len(flat):
        rows = [f"{path!r} is the path of {n} leaves" for path, n in Counter(names).items() if n > 1]
        mend = "Rename a key: a path is the keys of a leaf, joined by dots."
        raise TreeError(report("fs.tree.named_leaves got leaves whose paths collide.", rows, mend))
    return result


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf = None) -> Tree:
    """Apply a function to corresponding leaves of trees.

    Args:
        fn: Function of one leaf per tree.
        tree: Tree that determines the structure.
        *rest: Trees with the same structure, or with subtrees instead of leaves, which `fn` then receives.
        is_leaf: Predicate of nodes of `tree` to treat as leaves.

    Returns:
        A tree of the results, structured like `tree`.

    Raises:
        TreeError: A tree of `rest` lacks a part of `tree`, or `fn` isn't a function.

    Example:
        >>> params, grads = {"w": 1.0, "b": 2.0}, {"w": 10.0, "b": 10.0}
        >>> fs.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        {'w': 0.0, 'b': 1.0}
    """
    _check_function("fs.tree.map", fn)
    flat, spec = flatten(tree, is_leaf=is_leaf)
    others = [flatten_up_to(spec, other) for other in rest]
    return unflatten(spec, [fn(*group) for group in zip(flat, *others, strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf = None) -> Tree:
    """Apply a function to paths and corresponding leaves of trees; otherwise like `map`.

    Args:
        fn: Function of a dotted path, then one leaf per tree.
        tree, *rest, is_leaf: Arguments of `map`.

    Returns:
        A tree of the results, structured like `tree`.

    Example:
        >>> fs.tree.map_with_path(lambda path, x: 0 if path.endswith("bias") else x, {"w": 1, "bias": 2})
        {'w': 1, 'bias': 0}
    """
    _check_function("fs.tree.map_with_path", fn)
    flat, spec = flatten(tree, is_leaf=is_leaf)
    others = [flatten_up_to(spec, other) for other in rest]
    return unflatten(spec, [fn(*group) for group in zip(_paths_of(spec), flat, *others, strict=True)])


def flatten_up_to(spec: optree.PyTreeSpec, tree: Tree, labels: tuple[str, str] = _TWO_TREES) -> list[Any]:
    """List the subtree of a tree at each leaf of a structure.

    Args:
        spec: Structure from `flatten`.
        tree: Tree with that structure at its top.
        labels: Names of the structure and the tree for errors, such as `("params", "grads")`.

    Returns:
        One subtree per leaf of `spec`.

    Raises:
        TreeError: The tree lacks a part of the structure.

    Example:
        >>> _, spec = fs.tree.flatten({"w": 0, "b": 0})
        >>> fs.tree.flatten_up_to(spec, {"w": {"mu": 1, "nu": 2}, "b": 3})
        [3, {'mu': 1, 'nu': 2}]
    """
    try:
        return spec.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise _mismatch(spec, optree.tree_structure(tree, namespace=NAMESPACE), labels) from error


def _mismatch(spec: optree.PyTreeSpec, other: optree.PyTreeSpec, labels: tuple[str, str]) -> TreeError:
    """Make the error of two structures, with every path that only one of them has."""
    ours = set(_paths_of(spec))
    theirs = set(_paths_of(other))
    rows = [f"{path}: only in {labels[0]}" for path in sorted(ours - theirs)]
    rows += [f"{path}: only in {labels[1]}" for path in sorted(theirs - ours)]
    what, both = ("two trees", "both trees") if labels == _TWO_TREES else (" and ".join(labels), "both")
    rows = rows or [f"{labels[0]}: {spec}", f"{labels[1]}: {other}"]
    return TreeError(message(f"got {what} that do not match.", rows, f"Give {both} the same keys."))


def _check_function(name: str, fn: Any) -> None:
    if not callable(fn):
        text = f"{name} takes a function, then trees, got {type(fn).__name__}."
        raise TreeError(report(text, mend=f"Call it as {name}(fn, tree)."))


def match(first: Tree, second: Tree, labels: tuple[str, str] = _TWO_TREES) -> None:
    """Check that two trees have the same paths.

    Args:
        first, second: Any trees.
        labels: Their names in errors.

    Raises:
        TreeError: They differ; the error lists every path that only one of them has.

    Example:
        >>> fs.tree.match({"w": 1, "b": 2}, {"w": 1}, labels=("params", "grads"))
        Traceback (most recent call last):
            ...
        fsharding.base.errors.TreeError: fsharding got params and grads that do not match.
          b: only in params
        Give both the same keys.
    """
    spec, other = (optree.tree_structure(t, namespace=NAMESPACE) for t in (first, second))
    if spec != other and _paths_of(spec) != _paths_of(other):
        raise _mismatch(spec, other, labels)


def prune(tree: Tree, like: Tree, labels: tuple[str, str] = ("tree", "like")) -> Tree:
    """Replace leaves by None where a second tree has None, such as parameters without gradients.

    Args:
        tree: Any tree.
        like: Tree of the same structure, with None instead of some leaves.
        labels: Names of the two trees for errors.

    Returns:
        The pruned tree.

    Raises:
        TreeError: `like` lacks a part of the tree.

    Example:
        >>> params, grads = {"w": 1.0, "frozen": 2.0}, {"w": 0.1, "frozen": None}
        >>> fs.tree.prune(params, grads)
        {'w': 1.0, 'frozen': None}
    """
    flat, spec = flatten(tree)
    kept = flatten_up_to(spec, like, labels)
    return unflatten(spec, [leaf if other is not None else None for leaf, other in zip(flat, kept, strict=True)])


def register_node(
    cls: type[Any],
    flatten_node: Callable[[Any], Any],
    unflatten_node: Callable[[Any, Any], Any],
    *,
    fields: bool = False,
) -> None:
    """Make a class a tree node.

    Args:
        cls: Class of the nodes.
        flatten_node: Function of a node that returns its children, static data, and the names of the children.
        unflatten_node: Function of static data and children that returns a node.
        fields: Whether the names are attributes of the node.

    Example:
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> def flatten(pair):
        ...     return (pair.left, pair.right), None, ("left", "right")
        >>> fs.tree.register_node(Pair, flatten, lambda _, children: Pair(*children), fields=True)
        >>> fs.tree.named_leaves({"pair": Pair(1, 2)})
        {'pair.left': 1, 'pair.right': 2}
    """
    register: Any = optree.register_pytree_node
    entry = optree.GetAttrEntry if fields else optree.AutoEntry
    register(cls, flatten_node, unflatten_node, path_entry_type=entry, namespace=NAMESPACE)
    _registered.add(cls)


def children(node: Tree) -> dict[str, Any] | None:
    """Return the children of a node by their names in paths.

    Args:
        node: Any tree.

    Returns:
        The children, or None for a leaf.

    Example:
        >>> fs.tree.children({"b": [1, 2], "a": 3}), fs.tree.children(3)
        ({'a': 3, 'b': [1, 2]}, None)
    """
    try:
        parts, _, entries, _ = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
    except ValueError:
        return None
    return dict(zip(_map(str, getattr(node, "_fields", entries)), parts, strict=True))


def at(tree: Tree, path: str) -> Any:
    """Return the subtree at a dotted path.

    Args:
        tree: Any tree.
        path: Keys, field names and positions joined by dots; "" is the tree itself.

    Returns:
        The subtree.

    Raises:
        TreeError: The tree doesn't have this path.

    Example:
        >>> params = {"blocks": [{"w": 1}, {"w": 2}], "head": 3}
        >>> fs.tree.at(params, "blocks.1")
        {'w': 2}
    """
    if not isinstance(path, str):
        mend = 'Pass keys, fields and positions joined by dots: "blocks.wq".'
        raise TreeError(report(f"fs.tree.at takes a tree, then a path, got {type(path).__name__}.", mend=mend))
    found = _children_at(tree, path) if path else [tree]
    if not found:
        mend = f"The paths are {listed(paths(tree))}."
        raise TreeError(report(f"fs.tree.at finds no {path!r}.", mend=mend))
    return found[0]


def _children_at(node: Tree, path: str) -> list[Any]:
    """Find the subtree whose keys join to a path, where keys may contain dots; [] without one."""
    for key, child in (children(node) or {}).items():
        if path == key:
            return [child]
        if path.startswith(f"{key}.") and (found := _children_at(child, path.removeprefix(f"{key}."))):
            return found
    return []


def vdot(a: Tree, b: Tree, *, shardings: Tree = None) -> Any:
    """Compute the inner product of two sharded trees over their full leaves. Collective.

    It works on DTensors, inside loss functions and inside `fs.shard_map`, and under every kind of differentiation. For
    example, `n * decay * fs.tree.vdot(params, params)`, added to the summed loss of n tokens, is an L2 penalty that is
    equal under all strategies; the gradient of `vdot(g, v)`, for a gradient g, is a Hessian-vector product.

    Args:
        a, b: Trees of DTensors, `Local`s and plain tensors in the same shardings; plain tensors are equal on all ranks.
        shardings: Shardings of DTensors on pipeline stages or with `Fused` dims, such as `layout.main`.

    Returns:
        A 0-d tensor, equal on all ranks: float64 if a leaf of `a` is, else float32.

    Raises:
        LayoutError: A leaf has different shardings in `a` and `b`, is unreduced, or is on a slice of the mesh that
            `shardings` doesn't name; all such leaves are listed.
        TransformError: It is called in the loss function of a pipeline, where ranks have only the leaves of a stage.
        TreeError: The trees don't match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.arange(4.0)}, layout)
        >>> fs.tree.vdot(params, params)
        tensor(14.)
    """
    return _vdot[0](a, b, shardings=shardings)


_vdot: list[Callable[..., Any]] = []


def define_vdot(fn: _Vdot) -> _Vdot:
    """Set the implementation of `vdot`, which needs collectives and so can't be imported here.

    Args:
        fn: Function with the signature of `vdot`.

    Returns:
        The function, so this is also a decorator.

    Example:
        >>> from fsharding.transforms.norms import vdot
        >>> fs.tree.define_vdot(vdot) is vdot
        True
    """
    _vdot[:] = [fn]
    return fn
