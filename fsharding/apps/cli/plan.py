"""The verb `plan`: what a preset takes on a mesh of any size, which need not exist.

In: a preset, sizes of axes, a strategy. Out: parameters, and the bytes at rest of the fullest rank of each pipeline
stage; on standard output as text, or with `--json` as one JSON object. Guarantee: bytes equal `layout.memory()`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsharding.apps.cli.config import PRECISIONS
from fsharding.apps.cli.offload import offloaded
from fsharding.apps.cli.options import PlanConfig
from fsharding.apps.cli.usage import check_values
from fsharding.base.calls import call_as, named
from fsharding.base.errors import ConfigError, MeshError, message, report
from fsharding.mesh.abstract_mesh import AbstractMesh, make_shape, parse_axes
from fsharding.models.presets import recipe
from fsharding.pipeline.schedule import plan_schedule
from fsharding.pipeline.stages import layers_by_coordinate, stages_of
from fsharding.sharding.layout import Layout, plan_layout

__all__ = ["preview"]


@named("fsharding plan")
def preview(config: PlanConfig) -> None:
    """Plans and prints.

    Raises:
        ConfigError: an unknown name, microbatches below 1, or a mesh that cannot cut the model.
        MeshError: an unknown axis, or one of size below 1.
        ScheduleError: the schedule cannot have so many ranks, or microbatches, or more stages than layers.
    """
    result = _planned(config)
    print(json.dumps(result) if config.json else _text(result), flush=True)


def _planned(config: PlanConfig) -> dict[str, Any]:
    check_values("fsharding plan", config)
    if config.microbatches is not None and config.microbatches < 1:
        raise ConfigError(message(f"got --microbatches {config.microbatches}: at least 1."))
    mesh = _mesh(config.mesh)
    model = recipe(config.preset).model()
    ranks = mesh.axis_size("pp")
    stages = None
    if ranks > 1:
        stages = stages_of(model, plan_schedule(config.schedule, ranks, config.microbatches or 2 * ranks))
    strategy = offloaded("fsharding plan", config.strategy, config.offload)
    precision = PRECISIONS[config.dtype]
    layout = plan_layout(model, mesh, strategy=strategy, precision=precision, stages=stages)
    return {
        "preset": config.preset,
        "parameters": sum(math.prod(leaf.shape) for leaf in layout.leaves),
        "leaves": len(layout.leaves),
        "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
        "ranks": math.prod(mesh.sizes),
        "strategy": str(strategy) if config.offload else config.strategy,
        "dtype": config.dtype,
        "stages": _stages(model, layout, ranks),
    }


def _mesh(text: str) -> AbstractMesh:
    """The mesh of an option, whose axes say how many ranks there are."""
    axes = parse_axes(text)
    if free := [axis for axis, size in axes.items() if size == -1]:
        mend = "Say the size of each axis: no number of ranks is given of which one could take the rest."
        got = ", ".join(f"{axis}=-1" for axis in free)
        raise MeshError(report(f"fsharding plan --mesh {text} got {got}.", mend=mend))
    return call_as(f"fsharding plan --mesh {text}", make_shape, axes, world=math.prod(axes.values()))


def _stages(model: Any, layout: Layout, ranks: int) -> list[dict[str, Any]]:
    """Layers and bytes of the first rank along `pp`, which has the most."""
    layers = layers_by_coordinate(model, layout, ranks)
    rows: list[dict[str, Any]] = []
    for pp in range(ranks):
        memory = layout.memory(coord={"pp": pp})
        rows.append(
            {
                "pp": pp,
                "layers": layers[pp],
                "bytes": {**memory._asdict(), "total": memory.total, "device": memory.device},
                "copied": _copied(layout, {"pp": pp}),
            }
        )
    return rows


def _copied(layout: Layout, coord: dict[str, int]) -> dict[str, int]:
    """Bytes that a step of one microbatch copies from and to the host, and the disk.

    An update brings parameters that are their own main copies, main parameters, moments and gradients to where it is
    computed, and takes all but gradients back. Units are gathered for forward and for backward; parameters are made of
    main ones that are apart. Gradients are written once, and read once more for their norm.
    """
    total = Counter[str]()
    for compute in ("device", "host"):
        kept = layout.bytes_by_kind(coord=coord, compute=compute)
        times = {"params": 3 if layout.has_main else 4, "main": 3, "opt_state": 2, "grads": 3}
        total["disk"] += sum(times[role] * kept[role]["disk"] for role in times)
        if compute == "host":
            times |= {"main": 1, "opt_state": 0, "grads": 2}
            total["host"] += kept["grads"]["device"] + kept["grads"]["disk"]
        total["host"] += sum(times[role] * kept[role]["host"] for role in times)
    return {kind: total[kind] for kind in ("host", "disk")}


def _text(result: dict[str, Any]) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    head = [
        f"{result['preset']}: {result['parameters']:,} parameters in {result['leaves']} leaves",
        f"{result['ranks']:,} ranks ({mesh}), {result['strategy']}, {result['dtype']}; GB a rank, at most:",
    ]
    columns = ["params", "main", "grads", "opt_state", "total"]
    kinds = [kind for kind in ("host", "disk") if any(row["bytes"][kind] for row in result["stages"])]
    columns += ["device", *kinds] if kinds else []
    table = [["pp", "layers", *columns]]
    for row in result["stages"]:
        layers = " + ".join(str(n) for n in row["layers"])
        table.append([str(row["pp"]), layers, *(f"{row['bytes'][name] / 1e9:.3f}" for name in columns)])
    most = {kind: max(row["copied"][kind] for row in result["stages"]) for kind in kinds}
    tail = [f"copied in a step of one microbatch: {', '.join(f'{kind} {n / 1e9:.3f}' for kind, n in most.items())}"]
    return "\n".join([*head, *_aligned(table), *(tail if kinds else [])])


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
