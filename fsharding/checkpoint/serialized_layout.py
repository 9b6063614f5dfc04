"""Layouts as plain data, in a manifest, and back: a checkpoint alone says enough to plan its model on another mesh.

In: a `Layout`. Out: JSON for people and programs; `layout_of` makes a layout of it again, without the model's code.
Law: `layout_of(manifest, mesh, strategy)` is what `plan_layout` gave, on that mesh and with that strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsharding import tree
from fsharding.checkpoint.manifest import Manifest, dtype_name, is_shape
from fsharding.checkpoint.structure import describe, rebuild
from fsharding.errors import CheckpointError, FshardingError, listed, message
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.precision import LossScale, Precision
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.partition_spec import AxisRules, DimName, Fused
from fsharding.sharding.strategy import Strategy

__all__ = ["describe_layout", "layout_in", "layout_of", "names_from_plain", "plain_names"]

_ROLES = ("params", "compute", "reduce", "grads", "moments")


def plain_names(names: Sequence[DimName] | None) -> list[Any] | None:
    """The dim names of a leaf as JSON has them."""
    if names is None:
        return None
    return [{"fused": n.name, "sizes": list(n.sizes)} if isinstance(n, Fused) else n for n in names]


def names_from_plain(plain: Any) -> tuple[DimName, ...] | None:
    """The dim names of a leaf, from JSON.

    Raises:
        ValueError: something else.
    """
    if plain is None:
        return None
    if not isinstance(plain, list):
        raise ValueError(f"no dim names: {plain!r}")
    return tuple(_name_from_plain(name) for name in plain)


def _name_from_plain(plain: Any) -> DimName:
    match plain:
        case None | str():
            return plain
        case {"fused": str(name), "sizes": list(sizes)} if len(plain) == 2:
            return Fused(name, tuple(int(size) for size in sizes))
        case _:
            raise ValueError(f"no dim name: {plain!r}")


def describe_layout(layout: Layout) -> dict[str, Any]:
    """A layout as plain data."""
    shape, how = abstract(layout.mesh), layout.precision
    return {
        "mesh": dict(zip(shape.names, shape.sizes, strict=True)),
        "ranks": shape.size,
        "strategy": str(layout.strategy),
        "cuts": dataclasses.asdict(layout.strategy),
        "precision": {
            **{role: dtype_name(getattr(how, role)) for role in _ROLES},
            "loss_scale": None if how.loss_scale is None else dataclasses.asdict(how.loss_scale),
        },
        "rules": {name: list(axes) for name, axes in layout.rules.items()},
        "frozen": [leaf.path for leaf in layout.leaves if not leaf.trainable],
        "stages": {path: list(owners) for path, owners in layout.stages},
        "params": {
            leaf.path: {"shape": list(leaf.shape), "init": dtype_name(leaf.init), "names": plain_names(leaf.names)}
            for leaf in layout.leaves
        },
        "structure": describe(tree.unflatten(layout.structure, layout.leaves)),
    }


def layout_of(
    manifest: Manifest, mesh: Mesh, strategy: Strategy | None = None, stages: Mapping[str, Any] | None = None
) -> Layout:
    """Plans the model of a checkpoint on a mesh.

    Args:
        manifest: what `metadata` gives.
        mesh: with devices, or abstract; of any number of ranks.
        strategy: what is cut over the data axes; by default as it was.
        stages: as in `plan_layout`; by default as they were where `pp` has the size that it had, else none.

    Raises:
        CheckpointError: the parameters are in a node whose class the checkpoint cannot name.
        LayoutError: as `plan_layout`.
        SpecError: as `plan_layout`.
    """
    return layout_in(manifest, mesh, strategy, stages, function="fs.checkpoint.layout_of")


def layout_in(
    manifest: Manifest,
    mesh: Mesh,
    strategy: Strategy | None = None,
    stages: Mapping[str, Any] | None = None,
    *,
    function: str,
) -> Layout:
    """`layout_of` for another public function, whose name the errors carry."""
    plain = manifest.layout
    same_size = abstract(mesh).axis_size("pp") == plain.get("mesh", {}).get("pp", 1)
    try:
        params: dict[str, Any] = plain["params"]
        names = {path: names_from_plain(leaf["names"]) for path, leaf in params.items()}
        if none := [path for path, leaf in params.items() if not is_shape(leaf["shape"])]:
            raise ValueError(f"no shape: {listed(none)}")
        model = rebuild(plain["structure"], lambda path: path, "params", owner="the parameters", function=function)
        flat = [path.removeprefix("params").removeprefix(".") for path in tree.leaves(model)]
        shapes = [
            torch.empty(tuple(params[path]["shape"]), dtype=getattr(torch, params[path]["init"]), device="meta")
            for path in flat
        ]
        return plan_layout(
            tree.unflatten(tree.flatten(model)[1], shapes),
            mesh,
            AxisRules(**{name: tuple(axes) for name, axes in plain["rules"].items()}),
            Strategy(**plain["cuts"]) if strategy is None else strategy,
            precision=_precision(plain["precision"]),
            names=tree.unflatten(tree.flatten(model)[1], [names[path] or () for path in flat]),
            frozen=[path for path in plain["frozen"] if shapes[flat.index(path)].dtype.is_floating_point],
            stages=plain["stages"] if stages is None and same_size else stages,
        )
    except FshardingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        row = f"{type(error).__name__}: {error}"
        raise CheckpointError(message(function, "finds no layout in the manifest.", [row])) from error


def _precision(plain: dict[str, Any]) -> Precision:
    dtypes = {role: None if plain[role] is None else getattr(torch, plain[role]) for role in _ROLES}
    return Precision(**dtypes, loss_scale=None if plain["loss_scale"] is None else LossScale(**plain["loss_scale"]))
