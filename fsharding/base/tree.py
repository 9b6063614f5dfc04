"""Pytrees: optree under our own namespace, with leaves named by dotted paths such as `params.blocks.wq`.

Guarantee: `paths(t)` names every leaf exactly once, in the order of `leaves(t)`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

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
    """Splits a tree into its leaves and its structure.

    Example:
        >>> flat, spec = fs.tree.flatten({"b": 1, "a": (2, None)})
        >>> flat
        [2, 1]
        >>> fs.tree.unflatten(spec, ["two", "one"])
        {'b': 'one', 'a': ('two', None)}
    """
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def unflatten(spec: optree.PyTreeSpec, flat: Sequence[Any]) -> Tree:
    """Builds a tree of a given structure from its leaves.

    Example:
        >>> flat, spec = fs.tree.flatten({"w": 1, "b": 2})
        >>> fs.tree.unflatten(spec, [10 * x for x in flat])
        {'w': 10, 'b': 20}
    """
    return optree.tree_unflatten(spec, flat)


def leaves(tree: Tree, *, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in order; `None` is no leaf.

    Example:
        >>> fs.tree.leaves({"b": 1, "a": [2, None, 3]})
        [2, 3, 1]
    """
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


@functools.lru_cache(maxsize=1 << 14)  # each window of an update has a structure of its own
def _cached_paths(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    def name(entry: Any) -> str:
        return str(getattr(entry, "field", entry.entry))

    return tuple(".".join(_map(name, accessor)) for accessor in spec.accessors())


def _paths_of(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    """Paths of a registered node are built from its children's: a cache would keep its static data, such as a mesh."""
    if spec.type not in _registered:
        return _cached_paths(spec)
    pairs = zip(spec.entries(), spec.children(), strict=True)
    return tuple(f"{name}.{rest}" if rest else str(name) for name, child in pairs for rest in _paths_of(child))


_registered: set[type[Any]] = set()


def paths(tree: Tree, *, is_leaf: IsLeaf = None) -> tuple[str, ...]:
    """The dotted path of each leaf: dict keys, field names and positions joined by dots.

    Example:
        >>> fs.tree.paths({"blocks": [{"w": 1}, {"w": 2}], "head": 3})
        ('blocks.0.w', 'blocks.1.w', 'head')
    """
    return _paths_of(optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE))


def named_leaves(tree: Tree, *, is_leaf: IsLeaf = None) -> dict[str, Any]:
    """The leaves of a tree by path: the form in which checkpoints hold a state.

    Raises:
        TreeError: several leaves have one path, as in `{"a.b": 1, "a": {"b": 2}}`.

    Example:
        >>> fs.tree.named_leaves({"blocks": [{"w": 1}, {"w": 2}], "head": 3})
        {'blocks.0.w': 1, 'blocks.1.w': 2, 'head': 3}
    """
    flat, spec = flatten(tree, is_leaf=is_leaf)
    result = dict(zip(_paths_of(spec), flat, strict=True))
    if len(result) < len(flat):
        names = _paths_of(spec)
        rows = [f"{path!r} is the path of {n} leaves" for path, n in Counter(names).items() if n > 1]
        mend = "Rename keys: the keys of a leaf, joined by dots, are its path."
        raise TreeError(report("fs.tree.named_leaves got leaves whose paths collide.", rows, mend))
    return result


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf = None) -> Tree:
    """Applies `fn` to the leaves of `tree` and to what stands at the same place in each of `rest`.

    Raises:
        TreeError: one of `rest` lacks a part of `tree`; the text names both.

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
    """As `map`; `fn` gets the dotted path of the leaf first.

    Example:
        >>> fs.tree.map_with_path(lambda path, x: 0 if path.endswith("bias") else x, {"w": 1, "bias": 2})
        {'w': 1, 'bias': 0}
    """
    _check_function("fs.tree.map_with_path", fn)
    flat, spec = flatten(tree, is_leaf=is_leaf)
    others = [flatten_up_to(spec, other) for other in rest]
    return unflatten(spec, [fn(*group) for group in zip(_paths_of(spec), flat, *others, strict=True)])


def flatten_up_to(spec: optree.PyTreeSpec, tree: Tree, labels: tuple[str, str] = _TWO_TREES) -> list[Any]:
    """The subtree of `tree` at each leaf of `spec`.

    Args:
        spec: the structure.
        tree: begins with it.
        labels: what the structure and the tree are, such as `("params", "grads")`, for the error.

    Raises:
        TreeError: `tree` does not begin with the structure `spec`.

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
    """The error for two structures that differ; every path that only one of them has is listed."""
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
    """Checks that two trees have the same paths.

    Args:
        first: a tree.
        second: another.
        labels: what the two are, for the error.

    Raises:
        TreeError: they differ; every path that only one of them has is listed.

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
    """A tree with None wherever `like` has None: parameters without those that have no gradient.

    Args:
        tree: any.
        like: the same tree, with None here and there.
        labels: what the two are, for the error.

    Raises:
        TreeError: `like` does not begin with the structure of the tree.

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
    """Makes a class a node of our trees.

    Args:
        cls: the class of the new node.
        flatten_node: from a node to (children, static data, names of the children).
        unflatten_node: from (static data, children) to a node.
        fields: the names are attributes.

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
    """Return the children of a node by the names that paths give them; None for a leaf.

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
    """The subtree at a dotted path.

    Raises:
        TreeError: there is no such path.

    Example:
        >>> params = {"blocks": [{"w": 1}, {"w": 2}], "head": 3}
        >>> fs.tree.at(params, "blocks.1")
        {'w': 2}
    """
    if not isinstance(path, str):
        mend = 'Give keys, fields and positions joined by dots: "blocks.wq".'
        raise TreeError(report(f"fs.tree.at takes a tree, then a path, got {type(path).__name__}.", mend=mend))
    node = tree
    for part in path.split(".") if path else ():
        try:
            if isinstance(node, Mapping):
                known = cast(Mapping[Any, Any], node)
                node = known[part] if part in known or not part.isdigit() else known[int(part)]
            else:
                node = node[int(part)] if part.isdigit() else getattr(node, part)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            if found := _children_at(tree, path):
                return found[0]
            mend = f"The paths are {listed(paths(tree))}."
            raise TreeError(report(f"fs.tree.at finds no {path!r}.", mend=mend)) from error
    return node


def _children_at(node: Tree, path: str) -> list[Any]:
    """The subtree whose keys, in the words of `paths`, are a path; [] if there is none. A key may hold dots."""
    for key, child in (children(node) or {}).items():
        if path == key:
            return [child]
        if path.startswith(f"{key}.") and (found := _children_at(child, path[len(f"{key}.") :])):
            return found
    return []


def vdot(a: Tree, b: Tree, *, shardings: Tree = None) -> Any:
    """The inner product of two sharded trees: each element of the whole leaves counts once. Collective.

    It can be used at rest, inside a loss function and inside `fs.shard_map`, and be differentiated in every way there:
    `n * decay * fs.tree.vdot(params, params)`, added to the summed loss of n tokens, is an L2 penalty that is the same
    under every strategy, and `vdot(g, v)` of a gradient g has the Hessian times v as its gradient.

    Args:
        a: tree of DTensors, `Local` nodes and plain tensors; the latter are the same on all ranks.
        b: the same tree, in the same shardings.
        shardings: where DTensors of pipeline stages and of `Fused` dims are, such as `layout.main`.

    Returns:
        A 0-d tensor, the same on every rank: float64 if a leaf of `a` is, else float32.

    Raises:
        LayoutError: a leaf is in another sharding in `b`, is unreduced, or lies on a slice of the mesh that the
            shardings do not name; all such leaves are listed.
        TransformError: inside a loss function of a pipeline, where a rank sees the leaves of its stage alone.
        TreeError: the trees do not match.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> params = fs.shard({"w": torch.arange(4.0)}, layout)
        >>> fs.tree.vdot(params, params)
        tensor(14.)
    """
    return _vdot[0](a, b, shardings=shardings)


_vdot: list[Callable[..., Any]] = []


def define_vdot(fn: _Vdot) -> _Vdot:
    """Makes a function the one behind `vdot`: products of sharded leaves need collectives, which need trees.

    Example:
        >>> from fsharding.transforms.norms import vdot
        >>> fs.tree.define_vdot(vdot) is vdot  # as a decorator, too
        True
    """
    _vdot[:] = [fn]
    return fn
