"""Transports: how tensors are sent inside one group of ranks, and which transport a group uses.

In: a group, a device. Out: a `Transport`: `native`, the backend's own collectives, or for gloo a registered one such as
`pairwise` or `shared_memory`. `transport_for` chooses once per group and device.
Guarantee: all transports give the same bits and count the same bytes. `native=` sums, which differ, are no transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fsharding.base.calls import named
from fsharding.base.errors import MeshError, message
from fsharding.base.registry import find, names_of
from fsharding.comm.bucket import Bucket
from fsharding.comm.handles import Exchange, Handle, Memory, Reduction
from fsharding.comm.native import Message, Native
from fsharding.comm.reduce import Noise, SumLayout, plain_terms
from fsharding.mesh.backends import backend_of
from fsharding.mesh.device_mesh import Group

__all__ = ["Choice", "Transport", "choice_for", "send_recv", "start_sum", "transport_for"]


class Transport(Protocol):
    """How tensors travel inside one group. All its members make the same calls in the same order.

    Attributes:
        name: "native", "pairwise" or "shared_memory".
        group: the members.
    """

    name: str
    group: Group

    def all_gather(
        self, bucket: Bucket, shards: Sequence[Tensor], dtype: torch.dtype, memory: Memory | None = None
    ) -> Handle[Tensor]:
        """Starts to gather whole leaves, and casts this rank's shards on the way.

        Args:
            bucket: the leaves, the same on every member.
            shards: this rank's, one for each leaf.
            memory: for the result, which other members may read, so it must not be written.

        Returns:
            The handle of a flat buffer, as the bucket lays it out.
        """
        ...

    def all_gather_into(
        self, bucket: Bucket, shards: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Handle[Sequence[Tensor]]:
        """Starts to gather whole leaves into contiguous tensors of this rank's own; shards may be pieces of these."""
        ...

    def reduction(
        self,
        terms: SumLayout,
        sum_dtype: torch.dtype,
        *,
        large: bool = False,
        memory: Memory | None = None,
        noise: Noise | None = None,
    ) -> Reduction:
        """A sum over the members; nothing is sent.

        Args:
            terms: how they are sent, and added.
            large: leaves are added one by one, as soon as they are there.
        """
        ...

    def has_slots(self, size: int, *, scatter: bool) -> bool:
        """Whether a `large` reduction of so many elements has slots, which a kernel may write."""
        ...

    def gather_rows(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An all-gather of one row [width] from each member."""
        ...

    def all_to_all(self, width: int, dtype: torch.dtype, memory: Memory | None = None) -> Exchange:
        """An exchange of one row [width] between each two members."""
        ...

    def all_to_all_v(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle[Tensor]:
        """Starts an uneven all-to-all of rows.

        Args:
            x: contiguous [sum of send, ...]; the next `send[i]` rows go to member i.
            send: rows for each member, this one included.
            receive: rows from each member: as many as it sends to this one.

        Returns:
            The handle of [sum of receive, ...]; the next `receive[i]` rows are from member i.
        """
        ...

    def send_recv(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle[None]:
        """Start point-to-point messages of any sizes between ranks of the group.

        Args:
            sends: this rank's messages, in the order in which each peer lists its receives.
        """
        ...


class Choice(NamedTuple):
    """A transport of a group, and why it is used."""

    kind: type[Native]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.name} ({self.reason})"


def transport_for(group: Group, device: torch.device) -> Transport:
    """The transport of a group for tensors on a device. Collective over the group the first time."""
    known = group.transports.get(device.type)
    if known is None:
        known = group.transports[device.type] = choice_for(group, device)
    return known.kind(group, device)


def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], group: Group, device: torch.device
) -> Handle[None]:
    """Start point-to-point messages between ranks of a group; see `Transport.send_recv`.

    All transports send messages in the same way, so none is chosen, and nothing is collective: a rank may send to
    another one while the rest of the group does something else, as in a pipeline.
    """
    return Native(group, device).send_recv(sends, receives)


def choice_for(group: Group, device: torch.device) -> Choice:
    """Chooses a transport for a group. Collective over it the first time.

    Args:
        group: with the `transport=` of `make_mesh`, or "auto".

    Raises:
        MeshError: on every member: the transport that was asked for cannot serve this group.
    """
    if group.process_group is None:
        return Choice(Native, "a rank alone sends nothing")
    backend = backend_of(group.process_group, device.type)
    asked = group.transport
    why = f'transport="{asked}"'
    if asked == "native":
        return Choice(Native, why)
    if device.type != "cpu" or backend != "gloo":
        if asked != "auto":
            raise _refusal(asked, f"it is for gloo and tensors on the CPU, not for {backend} and {device.type}")
        return Choice(Native, f"the backend is {backend}")
    reason = why
    for name in names_of("transport") if asked == "auto" else (asked,):
        kind: type[Native] = find("transport", name)
        offer = kind.offer(group, asked=asked == name)
        if offer.yes:
            return Choice(kind, offer.reason or reason)
        if asked == name:
            raise _refusal(asked, offer.reason)
        reason = offer.reason
    return Choice(Native, reason)


@named("fs.make_mesh")
def _refusal(asked: str, reason: str) -> MeshError:
    rule = f'cannot use transport="{asked}".'
    return MeshError(message(rule, [reason], 'Leave transport="auto", or ask for another one.'))


def start_sum(x: Tensor, group: Group, dtype: torch.dtype) -> Handle[Tensor]:
    """Starts the sum of a tensor over a group, which all members get, in its shape.

    Args:
        x: the term of this rank, which is sent as it is.
    """
    terms = plain_terms(((tuple(x.shape), 0),), (group.size,), x.dtype, scatter=False)
    reduction = transport_for(group, x.device).reduction(terms, dtype)
    reduction.add([0], [x])
    return reduction.start().then(lambda sums: sums[0])
