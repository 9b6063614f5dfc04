"""The verbs of the command line that work on checkpoints: inspect, reshard, export. One process, no devices.

In: a configuration. Out: an exit status, and on standard output a text, or with `--json` one JSON object.
Guarantee: a verb says what the function of `fs.checkpoint` behind it returns, and nothing is left behind by one that
failed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fsharding.apps.cli.options import ExportConfig, InspectConfig, ReshardConfig
from fsharding.base.calls import call_as, named
from fsharding.base.errors import ConfigError, message, printable
from fsharding.base.untrusted import read_json
from fsharding.checkpoint.directory import Seen, survey
from fsharding.checkpoint.inspecting import inspect
from fsharding.checkpoint.manifest import MANIFEST
from fsharding.checkpoint.offline_reshard import reshard_checkpoint
from fsharding.foreign.exporting import export
from fsharding.foreign.name_map import Name, Rows, Transposed
from fsharding.mesh.abstract_mesh import parse_axes
from fsharding.sharding.strategy import Strategy

__all__ = ["run_tool"]


def run_tool(config: InspectConfig | ReshardConfig | ExportConfig) -> int:
    """Runs a verb and prints what it found or made.

    Returns:
        The exit status: 1 for a checkpoint that is damaged, else 0.

    Raises:
        ConfigError: a mesh, strategy or table of names that cannot be read.
        CheckpointError: from the function behind the verb.
    """
    match config:
        case InspectConfig():
            if seen := _checkpoints_of(config.path):
                rows = [_row(one) for one in seen]
                _show(_listed(config.path, rows), {"path": str(config.path), "checkpoints": rows}, as_json=config.json)
                return 0
            result = inspect(config.path)
            _show(result, result.to_json(), as_json=config.json)
            return 1 if result.damaged else 0
        case ReshardConfig():
            axes = call_as("fsharding reshard", parse_axes, config.mesh)
            strategy = None if config.strategy is None else Strategy.parse(config.strategy)
            made = reshard_checkpoint(config.source, config.target, axes, strategy)
            files = {name: file.bytes for name, file in made.files.items()}
            text = f"{config.target}: step {made.step}, {len(made.tree)} leaves, {len(files)} files"
            answer = {"path": str(config.target), "step": made.step, "layout": made.layout, "files": files}
            _show(text, answer, as_json=config.json)
        case ExportConfig():
            done = export(
                config.source,
                config.target,
                config.format,
                _names(config.names),
                what=config.what,
                max_file_bytes=config.max_file_bytes,
            )
            _show(done, {**dataclasses.asdict(done), "path": str(done.path)}, as_json=config.json)
    return 0


def _checkpoints_of(path: Path) -> list[Seen]:
    """List the checkpoints of a run, newest first; empty for a path that is a checkpoint, or no run."""
    try:
        return [] if os.path.lexists(path / MANIFEST) else survey(path) or survey(path / "ckpt")
    except OSError:
        return []  # inspect says what is wrong with such a path


def _row(seen: Seen) -> dict[str, Any]:
    files = [
        entry.stat(follow_symlinks=False) for entry in os.scandir(seen.path) if entry.is_file(follow_symlinks=False)
    ]
    saved = max((status.st_mtime for status in files), default=seen.path.stat().st_mtime)
    return {
        "path": str(seen.path),
        "step": seen.number,
        "saved": datetime.fromtimestamp(saved).isoformat(" ", "seconds"),
        "bytes": sum(status.st_size for status in files),
        "problem": seen.problem,
    }


def _listed(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """A table of a run's checkpoints; files are looked at, their checksums are not."""
    table = [("step", "saved", "bytes", "state", "path")]
    table += [
        (str(r["step"]), r["saved"], f"{r['bytes']:,}", printable(r["problem"]) or "complete", printable(r["path"]))
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([f"{printable(str(path))}: {len(rows)} checkpoint{'' if len(rows) == 1 else 's'}", *lines])


def _show(text: object, data: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(data) if as_json else text, flush=True)


_LARGEST_NAMES = 1 << 26
"""Bytes of a table of names: half a million of them."""


@named("fsharding export")
def _names(file: Path | None) -> dict[str, Name] | None:
    """The table of names in a JSON file."""
    if file is None:
        return None
    try:
        table = read_json(os.path.realpath(file), most=_LARGEST_NAMES)
        return {ours: _name(theirs) for ours, theirs in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        mend = 'Write {"our.path": "their.name"}, or {"our.path": {"transposed": "their.name"}},'
        mend += ' or {"our.path": {"name": "their.{i}.name", "rows": [1, 2]}}.'
        raise ConfigError(message(f"cannot read --names {file}: {error}.", mend=mend)) from error


def _name(value: Any) -> Name:
    match value:
        case str():
            return value
        case {"transposed": str(name)} if len(value) == 1:
            return Transposed(name)
        case {"name": name, "rows": [*keys]} if len(value) == 2 and all(isinstance(key, int | str) for key in keys):
            return _in_rows(_name(name), tuple(keys))
        case _:
            raise ValueError(f"{value!r} is no name")


def _in_rows(name: Name, keys: tuple[int | str, ...]) -> Name:
    if isinstance(name, Rows):
        raise ValueError(f"{name!r} has rows already")
    return Rows(name, keys)
