"""`reshard_checkpoint`: rewrite a checkpoint as a run on a different mesh would save it, in a single process.

Guarantee: loading the result equals loading the source, bitwise, in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fsharding.base.errors import CheckpointError, MeshError, message
from fsharding.base.public import public
from fsharding.base.version import own_version
from fsharding.checkpoint import directory
from fsharding.checkpoint.byte_ranges import pieces
from fsharding.checkpoint.directory import StrPath, partial_checkpoint, wording_failures
from fsharding.checkpoint.manifest import Manifest
from fsharding.checkpoint.reader import Source, open_source
from fsharding.checkpoint.saving import finish
from fsharding.checkpoint.serialized_layout import describe_layout, layout_of
from fsharding.checkpoint.state_leaves import StateLeaf, saved_shardings, shares
from fsharding.checkpoint.writer import Writer, Written
from fsharding.mesh.abstract_mesh import make_shape
from fsharding.sharding import boxes
from fsharding.sharding.boxes import Box
from fsharding.sharding.strategy import Strategy

__all__ = ["reshard_checkpoint"]


@public
def reshard_checkpoint(
    source: StrPath, target: StrPath, axes: Mapping[str, int], strategy: Strategy | None = None
) -> Manifest:
    """Rewrite a checkpoint in a different layout, in a single process without the ranks or devices of the new mesh.

    `load` reads any checkpoint into any layout; use this if each of many ranks should read one file.

    Args:
        source: Checkpoint directory; the checksums of everything that is read are compared.
        target: New checkpoint directory; an existing checkpoint other than the source is replaced.
        axes: Sizes of the axes of the new mesh; their product is the number of ranks.
        strategy: Sharding over the data axes. Default: the saved one.

    Returns:
        The manifest of the new checkpoint.

    Raises:
        CheckpointError: a missing or damaged checkpoint, a target that exists and isn't a checkpoint, or a write error.
        MeshError: an unknown axis, or a size below 1.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/5", state)
        >>> manifest = fs.checkpoint.reshard_checkpoint("run/5", "run/two", {"dp": 2}, fs.zero(3))
        >>> manifest.layout["ranks"], manifest.tree["params.w"].spec
        (2, "P('dp')")
    """
    if any(size == -1 for size in axes.values()):
        mend = "Pass every size: their product is the number of ranks."
        raise MeshError(message("got an axis of size -1.", mend=mend))
    mesh = make_shape(dict(axes), world=max(1, math.prod(axes.values())))
    where = directory.real_path(target)
    folder, manifest = directory.found(source)
    if folder == where:
        rule = f"cannot write {where} over itself."
        raise CheckpointError(message(rule, mend="Pass a different directory."))
    with wording_failures():
        leaves = open_source(folder, manifest)
    # Only the places of boxes change: structure, step, `extra` and positions of data are copied from the manifest.
    layout = layout_of(manifest, mesh, strategy)
    homes = saved_shardings(manifest, layout)
    wanted = {
        path: StateLeaf(leaf.shape, homes[path], torch.empty(0, dtype=getattr(torch, leaf.dtype)))
        for path, leaf in sorted(manifest.tree.items())
    }
    changed = replace(
        manifest,
        layout=describe_layout(layout),
        tree={path: leaf.saved for path, leaf in wanted.items()},
        torch=str(torch.__version__),
        fsharding=own_version(),
    )
    with wording_failures(), partial_checkpoint(where) as folder:
        return finish(where, changed, [*_write(folder, leaves, shares(wanted, range(mesh.size)))])


def _write(folder: Path, leaves: Source, writers: Mapping[str, Mapping[Box, int]]) -> Iterator[Written]:
    """Write the file of each rank in turn, except for ranks without boxes."""
    by_rank: dict[int, list[tuple[str, Box]]] = {}
    for path, ranks in writers.items():
        for box in sorted(ranks):
            by_rank.setdefault(ranks[box], []).append((path, box))
    for rank, mine in sorted(by_rank.items()):
        with Writer(folder, rank) as writer:
            for path, box in mine:
                leaf = leaves.leaves[path]
                for piece in pieces(box, leaf.dtype.itemsize) if boxes.volume(box) else [box]:
                    x = torch.empty(boxes.shape_of(piece), dtype=leaf.dtype)
                    leaves.read(path, piece, x)
                    writer.add(path, leaf.shape, piece, x)
                    writer.settle()
                    del x  # before the next piece is allocated
            yield writer.close()
