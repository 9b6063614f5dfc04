"""Choose the transport of a group of ranks.

Guarantee: all transports, which derive from `Native`, give the same bits and count the same bytes.
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
    """The transport of a group, and the reason for it."""

    kind: type[Native]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.name} ({self.reason})"


def transport_for(group: Group, device: torch.device) -> Native:
    """Return the transport of a group for tensors on a device. Collective over the group the first time."""
    known = group.transports.get(device.type)
    if known is None:
        known = group.transports[device.type] = choice_for(group, device)
    return known.kind(group, device)


def send_recv(
    sends: Sequence[Message], receives: Sequence[Message], group: Group, device: torch.device
) -> Handle[None]:
    """Start point-to-point messages between ranks of a group; see `Native.send_recv`."""
    # Not `transport_for`, whose first call is collective: in a pipeline, two ranks exchange messages while the others
    # do something else. All transports send messages like `Native`.
    return Native(group, device).send_recv(sends, receives)


def choice_for(group: Group, device: torch.device) -> Choice:
    """Choose a transport for a group, or raise if it can't use the requested one. Collective the first time."""
    if group.process_group is None:
        return Choice(Native, "a rank alone sends nothing")
    backend = backend_of(group.process_group, device.type)
    asked = group.transport
    reason = f'transport="{asked}"'
    if asked == "native":
        return Choice(Native, reason)
    if device.type != "cpu" or backend != "gloo":
        if asked != "auto":
            raise _refusal(asked, f"it supports gloo and tensors on the CPU, not {backend} and {device.type}")
        return Choice(Native, f"the backend is {backend}")
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
    return MeshError(message(rule, [reason], 'Pass transport="auto", or a different one, to fs.make_mesh.'))


def start_sum(x: Tensor, group: Group, dtype: torch.dtype) -> Handle[Tensor]:
    """Start to sum a tensor over a group in `dtype`; all members get the sum. Terms are sent in the dtype of `x`."""
    terms = plain_terms(((tuple(x.shape), 0),), (group.size,), x.dtype, scatter=False)
    reduction = transport_for(group, x.device).reduction(terms, dtype)
    reduction.add([0], [x])
    return reduction.start().then(lambda sums: sums[0])
