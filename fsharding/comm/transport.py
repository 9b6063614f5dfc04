"""Which transport a group of ranks uses: see `Native`, from which all of them derive.

Guarantee: all transports give the same bits and count the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base.errors import MeshError, message
from fsharding.base.registry import find, names_of
from fsharding.comm.handles import Handle
from fsharding.comm.native import Message, Native
from fsharding.comm.reduce import plain_terms
from fsharding.mesh.backends import backend_of
from fsharding.mesh.device_mesh import Group

__all__ = ["Choice", "choice_for", "send_recv", "start_sum", "transport_for"]


class Choice(NamedTuple):
    """A transport of a group, and why it is used."""

    kind: type[Native]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.name} ({self.reason})"


def transport_for(group: Group, device: torch.device) -> Native:
    """The transport of a group for tensors on a device. Collective over the group the first time."""
    known = group.transports.get(device.type)
    if known is None:
        known = group.transports[device.type] = choice_for(group, device)
    return known.kind(group, device)


def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], group: Group, device: torch.device
) -> Handle[None]:
    """Start point-to-point messages between ranks of a group; see `Native.send_recv`."""
    # All transports send messages in the same way, so none is chosen, and nothing is collective: a rank may send to
    # another one while the rest of the group does something else, as in a pipeline.
    return Native(group, device).send_recv(sends, receives)


def choice_for(group: Group, device: torch.device) -> Choice:
    """Choose a transport for a group, or refuse the one that was asked for. Collective over it the first time."""
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


def _refusal(asked: str, reason: str) -> MeshError:
    rule = f'cannot use transport="{asked}".'
    return MeshError(message(rule, [reason], 'Leave transport="auto", or ask for another one.'))


def start_sum(x: Tensor, group: Group, dtype: torch.dtype) -> Handle[Tensor]:
    """Start the sum of a tensor over a group, which all members get; the term is sent as it is."""
    terms = plain_terms(((tuple(x.shape), 0),), (group.size,), x.dtype, scatter=False)
    reduction = transport_for(group, x.device).reduction(terms, dtype)
    reduction.add([0], [x])
    return reduction.start().then(lambda sums: sums[0])
