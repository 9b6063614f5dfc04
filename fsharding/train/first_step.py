"""What ranks compare in the first step of a layout, before the state changes: settings, rows, units, loss and norm."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.errors import BatchError, RankError, message
from fsharding.base.shared import rows_of
from fsharding.base.tree import Tree
from fsharding.comm.step_agreement import SAME_ROWS, StepAgreement, compare_facts, comparison_of, numbers_of_all
from fsharding.mesh.consistency import facts_of, refuse_differences
from fsharding.mesh.device_mesh import Mesh, abstract, everyone
from fsharding.mesh.failures import is_fake_world
from fsharding.mesh.unit_order import UnlikeRanks
from fsharding.sharding.leaf_plan import kind_text
from fsharding.sharding.named_sharding import hides_owners
from fsharding.train.first_values import holders
from fsharding.train.microbatches import uneven, unsplit
from fsharding.train.row_hashes import hash_of_all, hash_rows
from fsharding.train.state import TrainState, refuse_unlike_replicas

__all__ = ["FirstStep", "agree_on_setup", "words_of_rows"]

_CLOSE = 1e-5
_CLOSE_NORM = 1e-4
"""Relative tolerances for losses and norms of ranks that compute the same with different kernels."""


def agree_on_setup(state: TrainState, settings: dict[str, str], batch: Tree, microbatches: int) -> None:
    """Refuse ranks whose steps or states differ, and batches that can't be split. Collective."""
    # Layouts are compared by the inputs of `plan_layout`, which determine everything else. Values are compared only if
    # some rank made its state by `replace`; all other states are equal by construction.
    layout = state.layout
    leaves = {
        f"params.{leaf.path}": f"{leaf.init} {leaf.shape} {leaf.names}" + ("" if leaf.trainable else " frozen")
        for leaf in layout.leaves
    }
    inputs = {"strategy": str(layout.strategy), "rules": str(layout.rules), "stages": str(layout.stages)}
    facts = {"mesh": repr(abstract(layout.mesh)), **inputs, **facts_of("layout.precision", layout.precision)}
    if abstract(layout.mesh).axis_size("pp") == 1:
        settings = {name: text for name, text in settings.items() if name != "schedule"}
    facts |= {**settings, **leaves, "batch": "\n".join(uneven(batch, microbatches))}
    facts |= {f"state.{path}": _kind_of(x) for path, x in tree.named_leaves(state).items()}
    if not _compat.is_fake(state.step):
        facts |= {"state.key": str(state.key.tolist()), "state.step": str(int(state.step))}
    by_rank = compare_facts(facts, layout.mesh)
    # Batches may differ, so their rows aren't compared; they are sent, so that all ranks raise together.
    odd = {rank: of_rank.pop("batch") for rank, of_rank in by_rank.items()}
    refuse_differences(by_rank)
    if any(odd.values()):
        rows = [f"rank {rank}: {row}" for rank, text in odd.items() for row in filter(None, text.split("\n"))]
        raise unsplit(rows, "the batches of all ranks", f"{microbatches} microbatches")
    refuse_unlike_replicas(state)


def _kind_of(x: Any) -> str:
    """Return dtype and shape of a leaf; only the dtype if it has an assignment, since its shape is the stage's."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return str(x.dtype) if isinstance(x, DTensor) and hides_owners(x) else kind_text(x)


class FirstStep:
    """Compare rows, and each unit before its collective; later steps compare hashes only. Collective."""

    def __init__(self, agreement: StepAgreement, mesh: Mesh, batch: Tree) -> None:
        self._mesh = mesh
        self._all = everyone(mesh)
        self._compares = self._all.size > 1 and agreement.order is not None and not is_fake_world()
        if not self._compares or _compat.makes_fakes():
            return
        assert agreement.order is not None
        self._compare_rows(batch)
        agreement.order.comparison = comparison_of(mesh)

    def _compare_rows(self, batch: Tree) -> None:
        """Refuse different rows along `SAME_ROWS`, and equal ones along cp."""
        shape = abstract(self._mesh)
        shared, split = any(shape.axis_size(axis) > 1 for axis in SAME_ROWS), shape.axis_size("cp") > 1
        own = _number_of(batch) if shared or split else 0
        if shared and any(len(numbers) > 1 for numbers in self._along(SAME_ROWS, own)):
            raise UnlikeRanks(self._all.ranks)
        if split:
            # A batch that is constant along the sequence proves nothing: each rank sends its index instead of a hash.
            rows = rows_of(batch)
            varied = any(_varies(x) for x in tree.leaves(rows))
            numbers = self._along(("cp",), _number_of(rows) if varied else self._all.index)
            if any(len(parts) == 1 for parts in numbers):
                raise _full_sequences(rows, shape.axis_size("cp"))

    def _along(self, axes: Sequence[str], own: int) -> list[set[int]]:
        """Gather a number of all ranks; return the distinct ones of each set of ranks that differ only along `axes`."""
        shape, numbers = abstract(self._mesh), numbers_of_all(self._mesh, own)
        rest = [name for name in shape.names if name not in axes]
        return [{numbers[rank] for rank in ranks} for ranks in holders(shape, rest)]

    def refuse_ignored_axes(self, loss: Tensor, norm: Tensor) -> None:
        """Refuse losses or gradient norms that differ between ranks: the loss function ignores an axis."""
        axes = [axis for axis in SAME_ROWS if abstract(self._mesh).axis_size(axis) > 1]
        if not self._compares or not axes or _compat.is_fake(loss):
            return
        # Both as one int64, which is gathered exactly.
        own = struct.unpack("<q", struct.pack("<ff", float(loss), float(norm)))[0]
        numbers = numbers_of_all(self._mesh, own)
        pairs = {rank: struct.unpack("<ff", struct.pack("<q", number)) for rank, number in numbers.items()}
        if not all(map(math.isfinite, (x for pair in pairs.values() for x in pair))):
            return
        loss_0, norm_0 = next(iter(pairs.values()))
        if all(
            math.isclose(a, loss_0, rel_tol=_CLOSE) and math.isclose(b, norm_0, rel_tol=_CLOSE_NORM)
            for a, b in pairs.values()
        ):
            return
        shape, rows = abstract(self._mesh), list[str]()
        for rank, (a, b) in pairs.items():
            place = shape.coordinate(shape.members.index(rank))
            where = ", ".join(f"{axis}={place[axis]}" for axis in axes)
            rows.append(f"rank {rank} ({where}): loss {a:.7g}, gradient norm {b:.7g}")
        over = " and ".join(axes)
        rule = f"computes different losses or gradients along {over}: the loss function ignores the axis."
        raise RankError(message(rule, rows, "\n".join(_MENDS[axis] for axis in axes)), ranks=self._all.ranks)


_MENDS = {
    "tp": "On tp, compute with ops.column_linear, ops.row_linear, ops.embedding and ops.cross_entropy, or end in"
    ' fs.ops.psum(x, "tp"); or give the leaves no names that rules shard over tp, and keep tp at 1.',
    "pp": "On pp, give the step a Model, which it splits into stages; or keep pp at 1.",
}


def _number_of(batch: Tree) -> int:
    """Hash a batch, and read the number."""
    hashed = hash_of_all(hash_rows(batch))
    return 0 if hashed is None else int(hashed)


def _varies(x: object) -> bool:
    """Return whether the values of a leaf differ along dim 1, its sequence."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] < 2 or x.numel() < 8:
        return False
    return bool((x != x[:, :1]).any())


def _full_sequences(batch: Tree, size: int) -> BatchError:
    """Make the error for ranks along cp that all have the full sequences."""
    rows = [f"{path} is {kind_text(x)} and the same on all ranks" for path, x in tree.named_leaves(batch).items()]
    rule = f"needs a part of the sequence on each of the {size} ranks along cp; they have full ones."
    mend = "Split global batches with fs.local_batch(batch, mesh), or rows with fs.ops.cut_sequence(batch, mesh=mesh)."
    return BatchError(message(rule, rows, mend))


def words_of_rows(batch: Tree, hashes: Mapping[str, Tensor]) -> dict[str, Callable[[], str]]:
    """Return functions that describe each leaf of a batch for an error: type, and hash of the values."""
    # Functions, because reading a hash waits for the device; only an error does.
    kinds = {path: kind_text(x) for path, x in tree.named_leaves(batch).items() if path in hashes}

    def words(path: str) -> str:
        return f"{kinds[path]} with hash {int(hashes[path]) & ((1 << 64) - 1):016x}"

    return {f"batch.{path}" if path else "batch": (lambda path=path: words(path)) for path in kinds}
