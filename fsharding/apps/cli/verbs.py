"""The function behind each subcommand; starts ranks unless a launcher did."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import fsharding as fs
from fsharding.apps.cli import options as declared
from fsharding.apps.cli.config import PRECISIONS, check, offloaded
from fsharding.apps.cli.config_file import config_text
from fsharding.apps.cli.doctor import run_doctor
from fsharding.apps.cli.generate import check_generate, generate
from fsharding.apps.cli.starting import hold, tell
from fsharding.apps.cli.train import train
from fsharding.base.calls import call_as
from fsharding.base.errors import ConfigError, MeshError, RankError, message, printable, report
from fsharding.base.untrusted import read_json
from fsharding.checkpoint.directory import Seen, survey
from fsharding.checkpoint.manifest import MANIFEST
from fsharding.mesh.abstract_mesh import make_shape, parse_axes
from fsharding.mesh.launch import launch_ranks
from fsharding.mesh.rendezvous import under_launcher
from fsharding.pipeline.stages import layers_by_coordinate

__all__ = [
    "run_doctor", "run_export", "run_generate", "run_inspect", "run_plan", "run_reshard", "run_train",
]  # fmt: skip


def run_train(config: declared.TrainConfig) -> int:
    """Train here, on the ranks of a launcher, or on new ones; return the exit status."""
    if config.print_config:
        print(config_text(config), end="", flush=True)
        return 0
    ranks = _ranks(config.ranks)
    check(config, ranks)
    hold()  # `preemption.watch` or the launcher unblocks signals
    try:
        if under_launcher() or ranks == 1:
            return train(config)
        if config.deadline:
            # Resolved once: a duration counts from here, and ranks agree.
            config = dataclasses.replace(config, deadline=fs.preemption.parse_deadline(config.deadline).isoformat())
        tell(config, f"starting {ranks} ranks")
        return max(launch_ranks(call_as, ranks, "fsharding train", train, config, grace=config.grace))
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_what_is_left(config)) from error
    except RankError as error:
        raise RankError(f"{error}\n{_what_is_left(config)}", error.ranks, error.stacks) from error


def _what_is_left(config: declared.TrainConfig) -> str:
    """Describe the newest checkpoint of a run that ended without saving."""
    newest = fs.checkpoint.latest(config.checkpoints)
    if newest is None:
        return f"There is no complete checkpoint in {config.checkpoints}."
    return f"The newest complete checkpoint is {newest}; the same command with --resume auto continues from it."


def run_generate(config: declared.GenerateConfig) -> int:
    """Generate here, on the ranks of a launcher, or on new ones; return the exit status."""
    ranks = _ranks(config.ranks)
    check_generate(config, ranks)
    if under_launcher() or ranks == 1:
        return generate(config)
    return max(launch_ranks(call_as, ranks, "fsharding generate", generate, config))


def _ranks(asked: int | None) -> int:
    """Return the number of ranks: the launcher's, or `--ranks`."""
    ranks = 1 if asked is None else asked
    if under_launcher():
        world = os.environ["WORLD_SIZE"]
        if not world.isdecimal():
            mend = "Unset RANK and WORLD_SIZE, or start with torchrun."
            raise ConfigError(message(f"got WORLD_SIZE={world!r} from a launcher.", mend=mend))
        ranks = int(world)
        if asked not in (None, ranks):
            text = f"got --ranks {asked}, but a launcher started {ranks} ranks."
            raise ConfigError(message(text, mend="Omit --ranks under torchrun."))
    if ranks < 1:
        raise ConfigError(message(f"got --ranks {ranks}.", mend="Start at least one rank."))
    return ranks


def _print(text: object, data: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(data) if as_json else text, flush=True)


# ----------------------------------------------------------------------------------------- inspect, reshard and export
def run_inspect(config: declared.InspectConfig) -> int:
    """Show a checkpoint, or the checkpoints of a run; return 1 if the checkpoint is damaged, else 0."""
    seen: list[Seen] = []
    if not os.path.lexists(config.path / MANIFEST):
        with suppress(OSError):  # `inspect` reports it
            seen = survey(config.path) or survey(config.path / "ckpt")
    if not seen:
        result = fs.checkpoint.inspect(config.path)
        _print(result, result.to_json(), as_json=config.json)
        return 1 if result.damaged else 0
    rows = [_row(one) for one in seen]
    table = [["step", "saved", "bytes", "state", "path"]]
    for row in rows:
        state = printable(row["problem"]) or "complete"
        table.append([str(row["step"]), row["saved"], f"{row['bytes']:,}", state, printable(row["path"])])
    head = f"{printable(str(config.path))}: {len(rows)} checkpoint{'' if len(rows) == 1 else 's'}"
    text = "\n".join([head, *_aligned(table, str.ljust)])
    _print(text, {"path": str(config.path), "checkpoints": rows}, as_json=config.json)
    return 0


def _row(seen: Seen) -> dict[str, Any]:
    """Describe a checkpoint of a run, without verifying checksums."""
    files = [file.stat(follow_symlinks=False) for file in os.scandir(seen.path) if file.is_file(follow_symlinks=False)]
    saved = max((status.st_mtime for status in files), default=seen.path.stat().st_mtime)
    return {
        "path": str(seen.path),
        "step": seen.number,
        "saved": datetime.fromtimestamp(saved).isoformat(" ", "seconds"),
        "bytes": sum(status.st_size for status in files),
        "problem": seen.problem,
    }


def _aligned(table: Sequence[Sequence[str]], adjust: Any) -> list[str]:
    """Return the lines of a table, whose cells `adjust` pads to the width of their column."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(adjust, row, widths)).rstrip() for row in table]


def run_reshard(config: declared.ReshardConfig) -> None:
    """Write a checkpoint in another layout."""
    axes = parse_axes(config.mesh)
    strategy = None if config.strategy is None else fs.Strategy.parse(config.strategy)
    made = fs.checkpoint.reshard_checkpoint(config.source, config.target, axes, strategy)
    files = {name: file.bytes for name, file in made.files.items()}
    text = f"{config.target}: step {made.step}, {len(made.tree)} leaves, {len(files)} files"
    answer = {"path": str(config.target), "step": made.step, "layout": made.layout, "files": files}
    _print(text, answer, as_json=config.json)


def run_export(config: declared.ExportConfig) -> None:
    """Write a checkpoint for another program."""
    names = _names(config.names)
    options: dict[str, Any] = {"what": config.what, "max_file_bytes": config.max_file_bytes}
    done = fs.foreign.export(config.source, config.target, config.format, names, **options)
    _print(done, {**dataclasses.asdict(done), "path": str(done.path)}, as_json=config.json)


def _names(file: Path | None) -> fs.foreign.Names:
    """Read a table of names from a JSON file."""
    if file is None:
        return None
    try:
        table = read_json(os.path.realpath(file), most=1 << 26)  # half a million names
        return {ours: _name(theirs) for ours, theirs in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        mend = 'Write {"our.path": "their.name"}, or {"our.path": {"transposed": "their.name"}},'
        mend += ' or {"our.path": {"name": "their.{i}.name", "rows": [1, 2]}}.'
        raise ConfigError(message(f"cannot read --names {file}: {error}.", mend=mend)) from error


def _name(value: Any) -> Any:
    match value:
        case str():
            return value
        case {"transposed": str(name)} if len(value) == 1:
            return fs.foreign.Transposed(name)
        case {"name": name, "rows": [*keys]} if len(value) == 2 and all(isinstance(key, int | str) for key in keys):
            inner = _name(name)
            if isinstance(inner, fs.foreign.Rows):
                raise ValueError(f"{inner!r} already has rows")
            return fs.foreign.Rows(inner, tuple(keys))
        case _:
            raise ValueError(f"{value!r} isn't a name")


# ---------------------------------------------------------------------------------------------------------------- plan
def run_plan(config: declared.PlanConfig) -> None:
    """Print the memory of a preset on a mesh that need not exist; bytes equal `layout.memory()`."""
    axes = parse_axes(config.mesh)
    if free := [axis for axis, size in axes.items() if size == -1]:
        mend = "Write the size of each axis: the number of ranks isn't known here."
        got = ", ".join(f"{axis}=-1" for axis in free)
        raise MeshError(report(f"fsharding plan --mesh {config.mesh} got {got}.", mend=mend))
    mesh = call_as(f"fsharding plan --mesh {config.mesh}", make_shape, axes, world=math.prod(axes.values()))
    model = fs.models.presets.recipe(config.preset).model()
    ranks = mesh.axis_size("pp")
    stages = None
    if ranks > 1:
        schedule = fs.pipeline.plan_schedule(config.schedule, ranks, config.microbatches or 2 * ranks)
        stages = fs.pipeline.stages_of(model, schedule)
    strategy, _ = offloaded("fsharding plan", config.strategy, config.offload)
    layout = fs.plan_layout(model, mesh, strategy=strategy, precision=PRECISIONS[config.dtype], stages=stages)
    result: dict[str, Any] = {
        "preset": config.preset,
        "parameters": sum(math.prod(leaf.shape) for leaf in layout.leaves),
        "leaves": len(layout.leaves),
        "mesh": dict(zip(mesh.names, mesh.sizes, strict=True)),
        "ranks": math.prod(mesh.sizes),
        "strategy": str(strategy) if config.offload else config.strategy,
        "dtype": config.dtype,
        "stages": [],
    }
    layers = layers_by_coordinate(model, layout, ranks)
    for pp in range(ranks):
        memory = layout.memory(coord={"pp": pp})  # the first rank stores the most
        kept = {role: nbytes for role, nbytes in memory._asdict().items() if role != "away"}
        kept |= {name: getattr(memory, name) for name in ("host", "disk", "total", "device")}
        result["stages"].append({"pp": pp, "layers": layers[pp], "bytes": kept, "copied": _copied(layout, {"pp": pp})})
    _print(_planned(result), result, as_json=config.json)


def _copied(layout: fs.Layout, coord: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a step with one microbatch copies from and to host and disk."""
    # An update reads parameters that are their own main copies, main parameters, moments and gradients, and writes all
    # but gradients. Units are gathered for forward and for backward; parameters are made of main ones that are apart.
    # Gradients are written once, and read once more for their norm.
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


def _planned(result: dict[str, Any]) -> str:
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
    return "\n".join([*head, *_aligned(table, str.rjust), *(tail if kinds else [])])
