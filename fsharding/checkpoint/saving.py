"""`save` and `save_async`: write the state of all ranks to one directory, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsharding.base.calls import call_as, public_name
from fsharding.base.errors import CheckpointError, message
from fsharding.base.public import check_path, public, refuse
from fsharding.base.version import own_version
from fsharding.checkpoint.background import SAVE_TIMEOUT, PendingSave, own_group, settle, start
from fsharding.checkpoint.chunks import described
from fsharding.checkpoint.collective_call import merged, on_all, together, write_together
from fsharding.checkpoint.directory import StrPath, commit, not_shared, partial_checkpoint, partial_of, real_path
from fsharding.checkpoint.manifest import METADATA, Manifest, check_readable, text_of
from fsharding.checkpoint.positions import Stateful, check_stateful, joined, own_position
from fsharding.checkpoint.replicas import MEND, Holders, SharedBox, differences, shared_boxes
from fsharding.checkpoint.serialized_layout import describe, describe_layout
from fsharding.checkpoint.state_leaves import StateLeaf, content, objections, own_boxes
from fsharding.checkpoint.writer import Writer, Written, write_metadata
from fsharding.comm.tier import tier_of
from fsharding.mesh import consistency
from fsharding.mesh.device_mesh import abstract, is_member, own_rank, world_size
from fsharding.mesh.failures import naming_lost
from fsharding.mesh.meeting import called_by_all
from fsharding.sharding.boxes import Box
from fsharding.train.state import TrainState
from fsharding.train.state_check import check_state

__all__ = ["Job", "finish", "in_background", "plan_save", "save", "save_async"]

_LARGEST_EXTRA = 16 << 20


@public
@called_by_all
def save(
    path: StrPath,
    state: TrainState,
    *,
    extra: Any = None,
    data: Stateful | None = None,
    timeout: timedelta = SAVE_TIMEOUT,
) -> None:
    """Save a state to a checkpoint directory. Collective over all ranks, which must share the file system.

    The format is torch DCP's plus a manifest, so `torch.distributed.checkpoint.load` also reads the leaves, by the
    paths in the manifest. Each element is written once. An existing checkpoint at `path` is replaced atomically.

    Args:
        path: Checkpoint directory; missing parents are created.
        state: State to save: main parameters, optimizer state, buffers, step, key and loss scale. Not modified.
        extra: JSON value of at most 16 MiB to store, such as a configuration; rank 0's is stored, tuples as lists.
        data: Data whose position is saved: an object with `state_dict` and `load_state_dict`, such as `fs.data.packed`
            or a `StatefulDataLoader`. Pass it to `load` too.
        timeout: Time limit for the slowest rank's write; the mesh's timeout doesn't apply. A rank that writes for 60 s
            logs a warning.

    Raises:
        ArgumentError: a timeout that isn't a timedelta.
        CheckpointError: on every rank, a leaf that can't be saved, replicas that differ between ranks, a write error, a
            concurrent save to the path, an existing `path` that isn't a checkpoint, or an earlier background save that
            failed. The old checkpoint at `path` is kept, unless only the final sync of the parent directory failed.
        DonatedError: a donated state.
        RankError: a rank is lost, or doesn't make the call. No partial checkpoint remains.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.checkpoint.save("run/0", state, extra={"epoch": 2})
        >>> restored = fs.checkpoint.load("run/0", layout)
        >>> fs.unshard(restored.params["w"])
        tensor([1., 1., 1., 1.])
    """
    settle()
    plan_save(path, state, extra, data=data, timeout=timeout).run()


@public
@called_by_all
def save_async(
    path: StrPath,
    state: TrainState,
    *,
    extra: Any = None,
    data: Stateful | None = None,
    timeout: timedelta = SAVE_TIMEOUT,
) -> PendingSave:
    """Save a checkpoint in the background; return once this rank's shards are copied to the CPU. Collective.

    The state may then be donated or changed. A thread writes the files and uses a separate process group; wait for it
    before process groups are destroyed.

    Args:
        path: Checkpoint directory, as in `save`.
        state: State to save, as in `save`.
        extra: JSON value to store, as in `save`.
        data: Data whose current position is saved, as in `save`.
        timeout: Time limit for the slowest rank's write, as in `save`.

    Returns:
        A `PendingSave`: `.wait()` blocks until the checkpoint is complete and raises the errors of `save`. Otherwise
        the next save raises them, or the process ends with status 1.

    Raises:
        ArgumentError: a timeout that isn't a timedelta.
        CheckpointError: leaves that can't be saved, or an earlier background save that failed.
        DonatedError: a donated state.

    Example:
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: {"w": torch.ones(4)}, fs.sgd(0.1), fs.random.key(0), layout)
        >>> pending = fs.checkpoint.save_async("run/0", state)
        >>> pending.wait()
        >>> fs.checkpoint.latest("run").name
        '0'
    """
    settle()
    return in_background(plan_save(path, state, extra, data=data, timeout=timeout))


def in_background(job: Job) -> PendingSave:
    """Run a job on a thread, from a copy of this rank's shards."""
    copied = job.copied()

    def run() -> None:
        with naming_lost(public_name(), range(world_size())):
            copied.run()

    return start(functools.partial(call_as, public_name(), run))


# ------------------------------------------------------------------------------------------------------------ the plan
class Write(NamedTuple):
    """A box that this rank writes."""

    path: str
    shape: tuple[int, ...]  # of the full leaf
    box: Box
    values: Tensor


@dataclass(frozen=True)
class Job:
    """The remaining work of a save, once all ranks have agreed that the state can be saved."""

    target: Path  # the checkpoint's directory
    writes: tuple[Write, ...]
    manifest: Manifest  # without files and chunks
    group: dist.ProcessGroup | None = None  # only for saves, so that its collectives can't mix with others
    after: Callable[[], None] | None = None  # called by rank 0 once the checkpoint is complete

    def copied(self) -> Job:
        """Return the same job with copies of its tensors on the CPU, except tensors that are never written."""
        writes = tuple(write._replace(values=_unchanging(write.values)) for write in self.writes)
        return dataclasses.replace(self, writes=writes)

    def run(self) -> None:
        """Do everything that touches the disk. Collective."""
        write_together(self.target, lambda: partial_checkpoint(self.target), self._write, self._finish, self.group)

    def _write(self) -> Written | None:
        """Write this rank's file; None if it has nothing to write."""
        if not self.writes:
            return None
        folder = partial_of(self.target)
        try:
            writer = Writer(folder, own_rank())
        except FileNotFoundError as error:
            # Rank 0 has created the directory, and the ranks have synchronized since.
            raise not_shared(self.target, [f"{folder}: not there on {socket.gethostname()}"]) from error
        with writer:
            for write in self.writes:
                writer.add(*write)
            return writer.close()

    def _finish(self, written: Sequence[Written | None]) -> None:
        finish(self.target, self.manifest, [part for part in written if part is not None])
        if self.after is not None:
            self.after()


def finish(target: Path, manifest: Manifest, written: Sequence[Written]) -> Manifest:
    """Complete a checkpoint whose files are written: add metadata and manifest, and rename it to the target."""
    files = {METADATA: write_metadata(partial_of(target), written), **{part.name: part.file for part in written}}
    chunks = described(chunk for part in written for chunk in part.chunks)
    whole = dataclasses.replace(manifest, files=files, chunks=chunks)
    commit(target, text_of(whole), files)
    return whole


class _Answer(NamedTuple):
    """What a rank sends to all others before a save."""

    facts: dict[str, str]  # must be equal on all ranks
    sums: dict[Holders, int]  # checksums of the replicas
    position: tuple[int, Any] | None  # of its data


def plan_save(
    path: StrPath,
    state: TrainState,
    extra: Any = None,
    after: Callable[[], None] | None = None,
    data: Stateful | None = None,
    timeout: timedelta = SAVE_TIMEOUT,
) -> Job:
    """Check on all ranks that a state can be saved, and return the remaining work. Collective."""
    group = own_group(timeout)
    check_path("a path, then a TrainState", path, "fs.checkpoint.save(path, state)")
    if not isinstance(state, TrainState):
        mend = "Pass the full state: fs.checkpoint.save(path, state)."
        raise refuse("a path, then a TrainState", state, mend)
    leaves = content(state)
    target = real_path(path)
    # One collective sends everything that ranks must agree on: facts, checksums of replicas, and positions of data.
    (job, shared), answers = together(lambda: _check(target, leaves, state, extra, data), group)
    # All ranks have the same answers, so an error is raised on all of them. Ranks outside the mesh send fewer facts.
    facts = merged([answer.facts for answer in answers])
    if rows := differences(shared, [answer.sums for answer in answers]):
        rule = f"got {len(rows)} parts of leaves that differ between ranks that hold the same."
        raise CheckpointError(message(rule, rows, MEND))
    manifest = dataclasses.replace(job.manifest, step=int(facts["step"]))
    if data is not None:
        manifest = dataclasses.replace(manifest, data=joined([answer.position for answer in answers]))
        on_all(lambda: _check_sizes(manifest, leaves), group)  # on all: `extra`, and so the size, may differ
    return dataclasses.replace(job, manifest=manifest, group=group, after=after)


def _check(
    target: Path, leaves: dict[str, StateLeaf], state: TrainState, extra: Any, data: Stateful | None
) -> tuple[tuple[Job, dict[Holders, list[SharedBox]]], _Answer]:
    """Check that this rank can save a state; return its job, its replicas, and what it sends to the others."""
    if data is not None:
        check_stateful(data)
    if rows := [*objections(leaves)]:
        raise CheckpointError(message(f"cannot save {len(rows)} leaves.", rows))
    check_state(state)
    manifest = Manifest(
        step=int(state.step),
        layout=describe_layout(state.layout),
        tree={path: leaves[path].saved for path in sorted(leaves)},
        structure=describe(state.opt_state),
        files={},
        extra=extra,
        torch=str(torch.__version__),
        fsharding=own_version(),
    )
    _check_sizes(manifest, leaves)
    kinds = {path: str(x.saved) for path, x in leaves.items()}
    facts = {"path": str(target), "tree of leaves": f"{consistency.digest(kinds):x}"}
    facts["data"] = "none" if data is None else "a position"
    if is_member(state.layout.mesh):
        # A rank outside the mesh has outdated plain leaves, from before the mesh changed.
        plain = {path: x.local for path, x in leaves.items() if x.sharding is None}
        facts |= {f"leaf {path}": str(consistency.checksum(x)) for path, x in plain.items()}
        facts["step"] = str(int(state.step))
    position = None if data is None else own_position(data, state.layout)
    members = abstract(state.layout.mesh).members
    own = own_boxes(leaves, members)
    writes = tuple(Write(path, leaves[path].shape, box, x) for path in sorted(own) for box, x in own[path].items())
    shared, sums = shared_boxes({path: x for path, x in leaves.items() if x.sharding is not None}, members)
    return (Job(target, writes, manifest), shared), _Answer(facts, sums, position)


def _check_sizes(manifest: Manifest, leaves: Mapping[str, StateLeaf]) -> None:
    mend = "Give data whose state_dict says where it is, not what it has read."
    _check_size("the position of `data`", manifest.data, mend)
    _check_size("`extra`", manifest.extra, "Write what is large to a file of your own, and its name into `extra`.")
    # A manifest may be larger if the files are; they have at least the bytes of the leaves.
    check_readable(text_of(manifest), sum(math.prod(x.shape) * x.local.dtype.itemsize for x in leaves.values()))


def _unchanging(x: Tensor) -> Tensor:
    return x.detach() if tier_of(x, x.device.type).can_fail else x.detach().to("cpu", copy=True)


def _check_size(what: str, value: Any, mend: str) -> None:
    """Refuse values that would slow down every load; values that aren't JSON are refused later."""
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return
    if size > _LARGEST_EXTRA:
        rule = f"cannot write {what}: it has {size:,} bytes as JSON; at most {_LARGEST_EXTRA:,} are written."
        raise CheckpointError(message(rule, mend=mend))
