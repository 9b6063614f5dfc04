"""`save`: the state of all ranks becomes one directory, or nothing does.

In: a `TrainState` in any layout. Out: a directory that holds every leaf once, and a manifest with checksums.
Every phase ends with all ranks telling each other how it went, so a failure on one raises on all and nobody waits.
Law: `load(save(x, A), B) == reshard(x, B)`, bitwise; the directory exists under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

from fsharding.checkpoint import dcp, store
from fsharding.checkpoint.agree import rank, together
from fsharding.checkpoint.leaves import Shards, content, digest, objections, placement, staged
from fsharding.checkpoint.manifest import Manifest, SavedFile, describe_layout, text_of
from fsharding.checkpoint.store import StrPath
from fsharding.checkpoint.structure import describe
from fsharding.errors import CheckpointError, message
from fsharding.sharding import local_of
from fsharding.state import TrainState

__all__ = ["save"]

_FUNCTION = "fs.checkpoint.save"


def save(path: StrPath, state: TrainState, *, extra: Any = None) -> None:
    """Writes a checkpoint. Collective over all ranks, which have to see one file system, or of one process.

    Main parameters, optimizer state, step, key and loss scale are written by torch DCP, each element once, so that
    `torch.distributed.checkpoint.load` reads the leaves as well, by the paths in the manifest. A checkpoint that is at
    `path` is replaced: until the new one is in its place, the old one is found by `load` and `latest`.

    Args:
        path: the directory to be; its parents are made.
        state: the state.
        extra: anything that JSON has, such as the configuration or the position in the data; that of rank 0 is kept,
            and comes back as JSON gives it (tuples as lists).

    Raises:
        CheckpointError: on every rank: a leaf that cannot be saved, one that should be the same on all ranks and is
            not, a rank that cannot write, something at `path` that is no checkpoint. What was at `path` is still there,
            unless all that failed was the sync of the parent directory, after the new one had taken its place.
        DonatedError: the state was donated.
    """
    named = content(state)
    target = Path(os.path.realpath(path))
    checked = together(_FUNCTION, lambda: _check(target, named, state, extra))
    _same_everywhere(checked)
    leaves = {path: _shards(path, x, state) for path, x in named.items()}
    together(_FUNCTION, lambda: store.prepare(target) if rank() == 0 else None)
    try:
        _write(target, leaves, state, extra)
    except CheckpointError:
        if rank() == 0:
            store.discard(target)
        raise


def _shards(path: str, x: Any, state: TrainState) -> Shards:
    sharding, shape = placement(path, x, state.layout)
    return staged(shape, sharding, local_of(x).detach())


def _check(target: Path, named: dict[str, Any], state: TrainState, extra: Any) -> dict[str, str]:
    """What has to be the same on all ranks."""
    if rows := objections(named, state.layout):
        rule = f"cannot save {len(rows)} leaves."
        raise CheckpointError(message(_FUNCTION, rule, rows))
    leaves = {path: _shards(path, x, state) for path, x in named.items()}
    text_of(_manifest(state, leaves, {}, extra))
    kinds = "\n".join(f"{path} {x.saved}" for path, x in sorted(leaves.items()))
    plain = {f"leaf {path}": digest(x.local) for path, x in leaves.items() if x.sharding is None}
    return {"path": str(target), "tree of leaves": hashlib.sha256(kinds.encode()).hexdigest(), **plain}


def _same_everywhere(checked: list[dict[str, str]]) -> None:
    first = checked[0]
    rows = [
        f"the {what} of rank {r} is not that of rank 0"
        for r, theirs in enumerate(checked)
        for what in {**first, **theirs}
        if theirs.get(what) != first.get(what)
    ]
    if rows:
        mend = "Give all ranks the same; what differs between them belongs into a sharded leaf, or files of your own."
        raise CheckpointError(message(_FUNCTION, "got different values on different ranks.", rows, mend))


def _write(target: Path, leaves: dict[str, Shards], state: TrainState, extra: Any) -> None:
    """Everything between an empty directory and the complete checkpoint in its place."""
    partial = store.partial_of(target)
    dcp.write(partial, leaves)

    def mine() -> dict[str, SavedFile]:
        names = [file.name for file in partial.glob(f"__{rank()}_*.distcp")]
        return store.digest_files(partial, [*names, *([dcp.METADATA] if rank() == 0 else [])])

    files = {name: file for part in together(_FUNCTION, mine) for name, file in sorted(part.items())}

    def finish() -> None:
        if rank() == 0:
            store.commit(partial, target, text_of(_manifest(state, leaves, files, extra)), files)

    together(_FUNCTION, finish)


def _manifest(state: TrainState, leaves: dict[str, Shards], files: dict[str, SavedFile], extra: Any) -> Manifest:
    return Manifest(
        step=int(state.step),
        layout=describe_layout(state.layout),
        tree={path: leaves[path].saved for path in sorted(leaves)},
        structure=describe(state.opt_state),
        files=files,
        extra=extra,
        torch=str(torch.__version__),
        fsharding=_own_version(),
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("fsharding")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
