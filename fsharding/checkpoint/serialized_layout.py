"""Convert layouts and optimizer states to JSON values for a manifest, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from fsharding import optim
from fsharding.base import tree
from fsharding.base.calls import public_name
from fsharding.base.errors import CheckpointError, FshardingError, listed, message
from fsharding.base.public import public
from fsharding.base.registry import find, names_of
from fsharding.base.tree import Tree
from fsharding.checkpoint.manifest import Manifest, dtype_name, is_shape
from fsharding.formats import Blocks
from fsharding.formats.precision import LossScale, Precision, ScaleState
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.sharding import entries
from fsharding.sharding.block_scales import CODES, scales_name
from fsharding.sharding.entries import Outline
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.partition_spec import AxisRules, DimName, Fused
from fsharding.sharding.strategy import Strategy

__all__ = [
    "KNOWN", "LEAF", "describe", "describe_layout", "known_names", "layout_of", "names_from_plain",
    "outline_of", "plain_names", "rebuild",
]  # fmt: skip

_ROLES = ("params", "compute", "reduce", "grads", "moments")
_MAY_LACK = ("sums", "gather", "keep", "rounding", "activations", "strict", "columnwise")  # omitted if default


def plain_names(names: Sequence[DimName] | None) -> list[Any] | None:
    """Convert the dim names of a leaf to JSON values."""
    if names is None:
        return None
    return [{"fused": n.name, "sizes": list(n.sizes)} if isinstance(n, Fused) else n for n in names]


def names_from_plain(plain: Any) -> tuple[DimName, ...] | None:
    """Read the dim names of a leaf from JSON values."""
    if plain is None:
        return None
    if not isinstance(plain, list):
        raise ValueError(f"not dim names: {plain!r}")
    return tuple(_name_from_plain(name) for name in plain)


def _name_from_plain(plain: Any) -> DimName:
    match plain:
        case None | str():
            return plain
        case {"fused": str(name), "sizes": list(sizes)} if len(plain) == 2:
            return Fused(name, tuple(int(size) for size in sizes))
        case _:
            raise ValueError(f"not a dim name: {plain!r}")


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Convert a layout to JSON values."""
    shape = abstract(layout.mesh)
    precision, default = layout.precision, Precision()
    return {
        "mesh": dict(zip(shape.names, shape.sizes, strict=True)),
        "ranks": shape.size,
        "strategy": str(dataclasses.replace(layout.strategy, memory=())),  # each run chooses its kinds of memory
        "cuts": {name: x for name, x in dataclasses.asdict(layout.strategy).items() if name != "memory"},
        "precision": {
            **{role: _plain_role(getattr(precision, role)) for role in _ROLES},
            "loss_scale": None if precision.loss_scale is None else dataclasses.asdict(precision.loss_scale),
            **{name: _plain_role(x) for name in _MAY_LACK if (x := getattr(precision, name)) != getattr(default, name)},
        },
        "rules": {name: list(axes) for name, axes in layout.rules.items()},
        "frozen": [leaf.path for leaf in layout.leaves if not leaf.trainable],
        "stages": {path: list(owners) for path, owners in layout.stages},
        **({"align": True} if layout.align else {}),
        "params": {
            leaf.path: {"shape": list(leaf.shape), "init": dtype_name(leaf.init), "names": plain_names(leaf.names)}
            for leaf in layout.leaves
        },
        "structure": describe(tree.unflatten(layout.structure, layout.leaves)),
    }


@public
def layout_of(
    manifest: Manifest, mesh: Mesh, strategy: Strategy | None = None, stages: Mapping[str, Any] | None = None
) -> Layout:
    """Plan the layout of a checkpoint's model on a mesh.

    Args:
        manifest: Result of `metadata`.
        mesh: Mesh of any size, with devices or abstract.
        strategy: Sharding over the data axes. Default: the saved one.
        stages: Pipeline stages, as in `plan_layout`. Default: the saved ones if `pp` has the same size, else none.

    Returns:
        A layout for `load`, with the saved precision, rules and frozen leaves.

    Raises:
        CheckpointError: parameters in a node of an unknown class.
        LayoutError: as in `plan_layout`.
        SpecError: as in `plan_layout`.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> manifest = fs.checkpoint.metadata("run/5")
        >>> print(fs.checkpoint.layout_of(manifest, fs.AbstractMesh(("dp",), (2,)), fs.zero(3)).params["w"])
        P('dp')
    """
    plain, shape = manifest.layout, abstract(mesh)
    same_size = shape.axis_size("pp") == plain.get("mesh", {}).get("pp", 1)
    # On a different mesh a shard might split a block of a format; that must not prevent loading.
    same_mesh = dict(zip(shape.names, shape.sizes, strict=True)) == plain.get("mesh") and strategy is None
    try:
        params: dict[str, Any] = plain["params"]
        if bad := [path for path, leaf in params.items() if not is_shape(leaf["shape"])]:
            raise ValueError(f"not a shape: {listed(bad)}")
        dtypes = {path: getattr(torch, leaf["init"]) for path, leaf in params.items()}

        paths = rebuild(plain["structure"], lambda path: path[len("params.") :], "params", owner="the parameters")
        return plan_layout(
            tree.map(lambda path: torch.empty(params[path]["shape"], dtype=dtypes[path], device="meta"), paths),
            mesh,
            AxisRules(**{name: tuple(axes) for name, axes in plain["rules"].items()}),
            Strategy(**plain["cuts"]) if strategy is None else strategy,
            precision=_precision(plain["precision"]),
            names=tree.map(lambda path: names_from_plain(params[path]["names"]) or (), paths),
            frozen=[path for path in plain["frozen"] if dtypes[path].is_floating_point],
            stages=plain["stages"] if stages is None and same_size else stages,
            align=plain.get("align") is True and same_mesh,
            tp="replicate",  # load on any mesh, even if tp shards nothing
        )
    except FshardingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        row = f"{type(error).__name__}: {error}"
        raise CheckpointError(message("finds no layout in the manifest.", [row])) from error


def _precision(plain: dict[str, Any]) -> Precision:
    result = {name: _role(plain[name]) for name in (*_ROLES, *(name for name in _MAY_LACK if name in plain))}
    scale = plain["loss_scale"]
    return Precision(**result, loss_scale=None if scale is None else LossScale(**scale))


def _plain_role(x: Any) -> Any:
    """Convert a dtype, a format or another entry of a precision to a JSON value."""
    if isinstance(x, torch.dtype):
        return dtype_name(x)
    if not isinstance(x, Blocks):
        return list(x) if isinstance(x, tuple) else x
    block = x.block if isinstance(x.block, str) else list(x.block)
    return {"dtype": dtype_name(x.dtype), "block": block, "scale": x.scale, "rounding": x.rounding}


def _role(plain: Any) -> Any:
    """Read an entry of a precision from a JSON value."""
    if isinstance(plain, list):
        return tuple(plain)
    if isinstance(plain, dict):
        return Blocks(getattr(torch, plain["dtype"]), _role(plain["block"]), plain["scale"], _role(plain["rounding"]))
    if plain == "keyed":
        return "stochastic"  # its name in older checkpoints
    dtype = getattr(torch, plain, None) if isinstance(plain, str) else None
    return dtype if isinstance(dtype, torch.dtype) else plain


def _moments_in(plain: dict[str, Any]) -> Blocks | None:
    """Read a format of moments from a JSON value; None for anything else."""
    try:
        format = _role(plain)
    except (KeyError, TypeError, ValueError, AttributeError, FshardingError):
        return None
    return format if isinstance(format, Blocks) and format.for_moments else None


# ------------------------------------------------------------------------------------------------------------- trees
# NamedTuples of the library that are rebuilt, by name; states of registered optimizers are rebuilt too.
KNOWN: dict[str, Any] = {kind.__name__: kind for kind in (
    optim.AdamState, optim.SgdState, optim.LionState, optim.MuonState, optim.ChainState, optim.EmptyState,
    optim.MultiTransformState, ScaleState,
)}  # fmt: skip

_RENAMED = {"MaskedState": "MultiTransformState"}  # names in older checkpoints, and those of the classes now

LEAF = "leaf"
_DEEPEST = 100  # keys of a path


def describe(node: Tree) -> Any:
    """Convert a tree to JSON values."""
    # "leaf", None, {"dict": {...}}, {"tuple": [...]}, {"list": [...]}, {"namedtuple": name, "fields": {...}}, and
    # {"coded": format, "root": ...} for a moment in low precision; only `opt=` can rebuild {"other": name}.
    if node is None:
        return None
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: describe(value) for key, value in node.items()}}
    if type(node) in (tuple, list):
        return {type(node).__name__: [describe(value) for value in node]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        fields: tuple[str, ...] = node._fields  # pyright: ignore[reportAttributeAccessIssue]
        return {"namedtuple": _name(type(node)), "fields": {name: describe(getattr(node, name)) for name in fields}}
    if isinstance(node, optim.CodedMoment):
        return {"coded": _plain_role(node.format), "root": node.root}
    flat = tree.leaves(node)
    return LEAF if len(flat) == 1 and flat[0] is node else {"other": _name(type(node))}


def known_names() -> list[str]:
    """List the NamedTuples that can be rebuilt: `KNOWN`, and states of registered optimizers."""
    return [*KNOWN, *(name for name in names_of("optimizer") if name.endswith("State"))]


def _known(name: str) -> Any:
    """Return the NamedTuple for a name, or None; import its module only if it is registered."""
    return KNOWN.get(name) or (find("optimizer", name) if name in known_names() else None)


def _name(kind: type) -> str:
    """Return the short name of a known class; the full one of others, which may have the same short name."""
    return kind.__name__ if _known(kind.__name__) is kind else f"{kind.__module__}.{kind.__qualname__}"


def outline_of(plain: Any, path: str, known: Collection[str]) -> Outline:
    """Build the outline of a tree from JSON values."""

    def node(kind: str, items: Mapping[str, Any], means: Any = ()) -> Outline:
        children = {key: outline_of(x, f"{path}.{key}", known) for key, x in items.items()}
        return Outline(kind, path, children, means=dict(means))

    match plain:
        case None:
            return Outline(entries.NONE, path, {})
        case {"dict": dict(items)}:
            return node("dict", items)
        case {"tuple": list(items)} | {"list": list(items)}:
            return node(next(iter(plain)), {str(i): x for i, x in enumerate(items)})
        case {"namedtuple": str(name), "fields": dict(fields)}:
            return node(name.rpartition(".")[2], fields, getattr(_known(name), "MEANS_OVER", ()))
        case {"coded": dict(format)} if (kept := _moments_in(format)) is not None:
            return Outline(entries.CODED, path, {}, kept)
        case {"other": _}:
            below: dict[str, list[str]] = {}
            for leaf in known:
                if leaf.startswith(f"{path}."):
                    below.setdefault(leaf[len(path) + 1 :].partition(".")[0], []).append(leaf)
            inner: dict[str, Outline] = {}
            for key, leaves in below.items():
                at = f"{path}.{key}"
                is_leaf = leaves == [at] or path.count(".") > _DEEPEST  # a hostile path may have any number of keys
                inner[key] = outline_of(LEAF if is_leaf else plain, at, leaves)
            return Outline(entries.UNKNOWN, path, inner)
        case _:
            return Outline(entries.LEAF, path, {})


def rebuild(
    plain: Any, leaf: Callable[[str], Any], path: str = "opt_state", *, owner: str = "the optimizer state"
) -> Tree:
    """Rebuild a tree from JSON values, with `leaf(path)` as leaves; `owner` names the tree in errors."""

    def build(plain: Any, path: str) -> Tree:
        if plain is None:
            return None
        if plain == LEAF:
            return leaf(path)
        match plain:
            case {"dict": dict(items)} if len(plain) == 1:
                return {key: build(value, f"{path}.{key}") for key, value in items.items()}
            case {"tuple": list(items)} | {"list": list(items)} if len(plain) == 1:
                values = [build(value, f"{path}.{i}") for i, value in enumerate(items)]
                return tuple(values) if "tuple" in plain else values
            case {"coded": dict(format), "root": bool(root)} if len(plain) == 2 and (kept := _moments_in(format)):
                codes, scales = (leaf(f"{path}.{name}") for name in (CODES, scales_name(kept)))
                return optim.CodedMoment(codes, scales, kept, root)
            case {"namedtuple": str(name), "fields": dict(fields)} if len(plain) == 2:
                kind = _known(_RENAMED.get(name, name))
                if kind is not None and tuple(fields) == kind._fields:
                    return kind(**{key: build(value, f"{path}.{key}") for key, value in fields.items()})
                what = f"{name}({listed(fields, none='')})"
            case _:
                what = str(plain.get("other", plain)) if isinstance(plain, dict) else repr(plain)
        rows = [f"{path} is a {what}; known are {', '.join(known_names())}"]
        mend = "Pass the optimizer that made it: opt=..." if public_name() == "fs.checkpoint.load" else ""
        raise CheckpointError(message(f"cannot rebuild {owner} from the manifest alone.", rows, mend))

    return build(plain, path)
