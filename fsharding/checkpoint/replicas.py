"""`check_replicas`: compare the replicas of leaves between ranks, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from fsharding.base import tree
from fsharding.base.errors import ReplicaError, message
from fsharding.base.public import public, refuse
from fsharding.checkpoint.collective_call import together
from fsharding.checkpoint.state_leaves import StateLeaf, holders_of, leaves_beside
from fsharding.mesh.consistency import checksum, digest
from fsharding.mesh.device_mesh import abstract, own_rank
from fsharding.mesh.meeting import called_by_all
from fsharding.sharding.boxes import Box
from fsharding.sharding.named_sharding import local_of
from fsharding.train.state import TrainState, constants_of
from fsharding.train.state_check import check_state

__all__ = ["MEND", "Holders", "SharedBox", "check_replicas", "differences", "shared_boxes"]

MEND = "Go on from the last checkpoint; if it happens again on one rank, look at the memory of that machine."

Holders: TypeAlias = tuple[int, ...]
SharedBox: TypeAlias = tuple[str, Box, Tensor]  # path of a leaf, a box of it, and this rank's tensor of the box


@public
@called_by_all
def check_replicas(state: TrainState, model: Any = None) -> None:
    """Compare the replicas of a state between ranks, bit by bit. Collective.

    Replicas exist under zero(0), on a mesh with a `replica` axis, and of counts, steps and keys. Training keeps them
    equal; a flipped bit, a manual change on one rank, or unequal initial values make them diverge, which the loss may
    not show. Each rank reads its replicas once and sends their checksums. `fs.checkpoint.save` does the same check.

    Args:
        state: State to check.
        model: Functionalized module or `Model` whose constants, such as buffers, are checked too.

    Raises:
        ReplicaError: on every rank, replicas that differ, with the ranks that differ from the majority.
        LayoutError: a state that doesn't match its layout.
        RankError: a rank is lost, or doesn't make the call.

    Example:
        >>> draws = {"w": fs.random.zeros((4,))}
        >>> layout = fs.plan_layout(draws, fs.make_mesh(dp=-1, device="cpu"))
        >>> state = fs.init_state(lambda key: draws, fs.sgd(0.1), fs.random.key(0), layout)
        >>> fs.debug.check_replicas(state)
    """
    if not isinstance(state, TrainState):
        raise refuse("a TrainState", state, "Pass the full state: fs.debug.check_replicas(state).")

    def look() -> tuple[dict[Holders, list[SharedBox]], dict[Holders, int]]:
        check_state(state)
        constants = {f"buffers.{name}": StateLeaf(tuple(x.shape), None, x) for name, x in constants_of(model).items()}
        return shared_boxes(_everything(state) | constants, abstract(state.layout.mesh).members)

    if rows := differences(*together(look)):
        raise ReplicaError(message(f"finds {len(rows)} parts that differ between ranks.", rows, MEND))


def _everything(state: TrainState) -> dict[str, StateLeaf]:
    """Collect this rank's part of every leaf of a state by path, main parameters and their compute-dtype copies."""
    held = tree.named_leaves({"params": state.params, "main": state.main})
    places = {entry.path: (entry.shape, entry.sharding) for entry in state.layout.entries()}
    params = {path: StateLeaf(*place, local_of(held[path]).detach()) for path, place in places.items()}
    return params | leaves_beside(state)


def shared_boxes(
    leaves: Mapping[str, StateLeaf], ranks: Sequence[int]
) -> tuple[dict[Holders, list[SharedBox]], dict[Holders, int]]:
    """Return the boxes by the several ranks that hold them, in order of path and box, and a checksum of each list."""
    result: dict[Holders, list[SharedBox]] = {}
    # A rank outside the mesh has outdated plain leaves, from before the mesh changed.
    for path, x in sorted(leaves.items()) if own_rank() in ranks else ():
        holders = holders_of(x, tuple(ranks))
        for box, tensor in sorted(x.kept().items(), key=lambda part: part[0]):
            if len(holders[box]) > 1 and tensor.numel():
                result.setdefault(holders[box], []).append((path, box, tensor))
    return result, {holders: digest([checksum(x) for _, _, x in boxes]) for holders, boxes in result.items()}


def differences(
    shared: Mapping[Holders, Sequence[SharedBox]], sums_of_ranks: Sequence[Mapping[Holders, int]]
) -> list[str]:
    """List the boxes whose replicas differ, one row each. Collective if there are any."""
    disputed = {
        holders
        for own in sums_of_ranks
        for holders in own
        if len({other.get(holders) for other in sums_of_ranks} - {None}) > 1
    }
    # All ranks see the same checksums, so they agree on whether to compare box by box.
    if not disputed:
        return []

    def each() -> tuple[None, dict[tuple[str, Box], int]]:
        boxes = (box for holders in sorted(disputed) for box in shared.get(holders, ()))
        return None, {(path, box): checksum(x) for path, box, x in boxes}

    values: dict[tuple[str, Box], dict[int, list[int]]] = {}
    for rank, sums in enumerate(together(each)[1]):
        for part, value in sums.items():
            values.setdefault(part, {}).setdefault(value, []).append(rank)
    return [f"{_part(*part)}: {_who(by_value)}" for part, by_value in sorted(values.items()) if len(by_value) > 1]


def _part(path: str, box: Box) -> str:
    return f"{path}[{', '.join(f'{start}:{stop}' for start, stop in box)}]" if box else path


def _who(by_value: Mapping[int, Sequence[int]]) -> str:
    largest, *others = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    texts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in (largest, *others)]
    if len(others[0]) < len(largest):
        return f"{', '.join(texts[1:])} differ{'s' * (len(others) == len(others[0]) == 1)} from {texts[0]}"
    return f"{' and '.join(texts)} differ"
