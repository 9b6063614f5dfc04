"""What a step of a decoder sends, by closed formulas: calls and bytes of one rank, by axes of the mesh.

In: sizes of the decoder, a layout, the batch, a schedule. Out: a `Traffic`, computed without tensors or processes.
Law: it is what `counting_bytes` counts, to the byte, for every mesh, strategy, schedule and policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsharding import policies
from fsharding.counts import Sent, Traffic
from fsharding.errors import ConfigError, message
from fsharding.layout import Layout
from fsharding.mesh import coordinate
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.ops.attention import Kind
from fsharding.policies import Policy
from fsharding.schedule import Schedule
from fsharding.traffic import Sender, Stage, parameters, sum_over, update

__all__ = ["expected_traffic"]


def expected_traffic(
    config: DecoderConfig,
    layout: Layout,
    *,
    rows: int,
    length: int,
    microbatches: int = 1,
    sequence: bool = False,
    attention: Kind = "ring",
    schedule: Schedule | None = None,
    policy: Policy = policies.save_except_gathered,
    coord: dict[str, int] | None = None,
) -> Traffic:
    """What one rank sends in one step of `models.decoder` that neither overflows nor fails.

    Activations x of a microbatch are [rows, T, dim], where T is length over `cp`. In each block:

    | axis | forward | backward |
    |---|---|---|
    | tp | 2 sums of x | 2 sums of x |
    | tp, with `sequence` | 2 gathers and 2 scatters of x | the same, and 2 sums of dim for the norms |
    | cp, ring | k-1 rounds of keys and values | k-1 of these, and k of their gradients in float32 |
    | cp, gather | 1 gather of keys and values | 1 scatter |
    | cp, ulysses | 1 exchange of q, k and v, 1 of the result | the same |

    Over `tp` the embedding adds a sum of x forward (a scatter, and a gather backward, with `sequence`); the head a sum
    of x backward (a gather forward, a scatter backward, and the norm), and for the loss a gather and two sums of one
    float32 a token. Key heads that are fewer than `tp`, but cut over it, are gathered and their gradients scattered.
    What a policy computes again is sent again, but for the last sum of each block. I and W are a backward each, but
    under `dots_saveable` one together.

    Over the data axes a unit is gathered forward, and backward unless it is the last one or the embedding; gradients
    take the steps of `ops.transition`, for each microbatch from unreduced to `layout.grads` and once a step to
    `layout.main`; what `layout.params` has more of is gathered at the end. A schedule that gathers once a step does so
    for each stage, one that scatters once reduces each stage's sums at its SCATTER. Over `pp` a stage sends x to the
    next one, and its gradient to the one before, for each microbatch. Two float64 for the loss and one a leaf for the
    norm come on top.

    Args:
        config: sizes of the decoder.
        layout: of the state; on any mesh, also an abstract one.
        rows: sequences of this rank's batch, all microbatches together.
        length: tokens of a whole sequence.
        microbatches: as in `make_train_step`.
        sequence: as in `models.decoder`.
        attention: as in `models.decoder`.
        schedule: on a mesh with `pp`.
        policy: as in `make_train_step`.
        coord: the rank's coordinate; by default this process's.

    Raises:
        ConfigError: a decoder with experts, unlike stacks, another attention, biases, norms of heads, fused leaves or a
            head size of its own.
    """
    odd = ("stacks", "experts", "attention", "bias", "qk_norm", "fused", "head_size")
    if any(getattr(config, name) for name in odd):
        mend = f"Leave out {', '.join(odd[:-1])} and {odd[-1]}."
        raise ConfigError(message("fs.expected_traffic", "knows plain dense decoders only.", mend=mend))
    where = coordinate(layout.mesh) if coord is None else coord
    sender = Sender(decoder(config), layout, where, microbatches, schedule, Traffic())
    tokens = rows // microbatches * length // sender.size("cp")
    step = _Step(config, sender, tokens, sequence, attention, policy)
    tied = ("embed.table",) if config.tied else ()
    for stage in sender.stages(config.layers):
        stage = stage._replace(walks=microbatches) if policy.activations == "dots" else stage
        _activations(step, stage)
        parameters(sender, stage, tied=tied, kept=policy.gathered)
    _messages(step)
    update(sender)
    return sender.traffic


@dataclass(frozen=True)
class _Step:
    """One step on one rank; see `expected_traffic`. `tokens` are those of a microbatch on this rank of `cp`."""

    config: DecoderConfig
    sender: Sender
    tokens: int
    sequence: bool
    attention: Kind
    policy: Policy

    @property
    def width(self) -> int:
        """Bytes of an element of an activation."""
        return self.sender.layout.precision.compute_dtype(torch.float32).itemsize

    def is_cut(self, path: str) -> bool:
        """Whether `tp` cuts a leaf."""
        leaf = next(leaf for leaf in self.sender.layout.leaves if leaf.path == path)
        return "tp" in leaf.params.simplified().spec.all_axes


class _Calls(NamedTuple):
    """What a layer sends forward, backward along the activations, and backward to its weights alone."""

    forward: list[tuple[str, Sent]]
    backward: list[tuple[str, Sent]]
    weights: list[tuple[str, Sent]]


def _activations(step: _Step, stage: Stage) -> None:
    """Everything over `tp` and `cp`."""
    mlp, attention = _mlp(step), _attention(step)
    layers = [(mlp, stage.layers), (attention, stage.layers), (_embed(step), stage.first), (_head(step), stage.last)]
    for calls, count in layers:
        once, each = [*calls.forward, *calls.weights], calls.backward
        for found, times in ((once, step.sender.microbatches), (each, stage.walks)):
            for axis, sent in found:
                step.sender.send((axis,), sent, times * count)
    if step.policy.activations != "all":
        # Computing again ends with the last tensor that backward needs, which comes before the last sum.
        for axis, sent in [*attention.forward, *mlp.forward[:-1]]:
            step.sender.send((axis,), sent, stage.walks * stage.layers)


def _messages(step: _Step) -> None:
    """Activations to the stage after, their gradients to the stage before, where these are on other ranks."""
    if step.sender.schedule is None:
        return
    schedule, last = step.sender.schedule, step.sender.schedule.stages - 1
    cut = step.sender.size("tp") if step.sequence else 1
    x = Sent(1, step.tokens // cut * step.config.dim * step.width)
    for stage in schedule.stages_on(step.sender.where["pp"]):
        neighbours = [stage] * (stage < last) + [stage - 1] * (stage > 0)
        step.sender.send(("pp",), x, step.sender.microbatches * sum(not schedule.is_local(s) for s in neighbours))


def _region(step: _Step, *, enter: bool = True, leave: bool = True) -> _Calls:
    """A region of tensor parallelism: from activations that all ranks share to such ones again."""
    k, x = step.sender.size("tp"), step.tokens * step.config.dim
    if step.sequence:
        part = [("tp", Sent(1, (k - 1) * x // k * step.width))] * (enter + leave)
        return _Calls(part, part, [])
    term = [("tp", sum_over(x, k, step.width))]
    return _Calls(term * leave, term * enter, [])


def _norms(step: _Step, count: int) -> list[tuple[str, Sent]]:
    k = step.sender.size("tp")
    return [("tp", sum_over(step.config.dim, k, step.width))] * count if step.sequence and k > 1 else []


def _embed(step: _Step) -> _Calls:
    return _region(step, enter=False) if step.is_cut("embed.table") else _Calls([], [], [])


def _head(step: _Step) -> _Calls:
    if not step.is_cut("embed.table" if step.config.tied else "head.unembed"):
        return _Calls([], [], [])
    calls, k = _region(step, leave=False), step.sender.size("tp")
    loss = [("tp", Sent(1, (k - 1) * step.tokens * 4)), *[("tp", sum_over(step.tokens, k, 4))] * 2]
    return _Calls([*calls.forward, *loss], calls.backward, _norms(step, 1))


def _mlp(step: _Step) -> _Calls:
    calls = _region(step) if step.is_cut("blocks.gate") else _Calls([], [], [])
    return calls._replace(weights=_norms(step, 1))


def _attention(step: _Step) -> _Calls:
    cut = step.is_cut("blocks.wq")
    calls = _region(step) if cut else _Calls([], [], [])
    keys, weights = _keys(step, cut)
    forward, backward = _over_cp(step, step.config.heads // (step.sender.size("tp") if cut else 1), keys)
    gathers, sums = weights
    return _Calls(
        [*gathers, *calls.forward, *forward], [*calls.backward, *backward], [*gathers, *sums, *_norms(step, 1)]
    )


def _keys(step: _Step, cut: bool) -> tuple[int, tuple[list[tuple[str, Sent]], list[tuple[str, Sent]]]]:
    """The key heads of a rank; gathers of weights where its own rows are not those, and sums where all are there."""
    c, k = step.config, step.sender.size("tp")
    if not cut:
        return c.kv_heads, ([], [])
    if c.kv_heads % k == 0 and step.is_cut("blocks.wk"):
        return c.kv_heads // k, ([], [])
    each, group, rows = c.heads // k, c.heads // c.kv_heads, c.kv_heads * c.head_dim
    needed = max(each // group, 1)
    if step.is_cut("blocks.wk"):
        return needed, ([("tp", Sent(1, (k - 1) * -(-rows // k) * c.dim * step.width))] * 2, [])
    return needed, ([], [("tp", sum_over(rows * c.dim, k, step.width))] * 2)


def _over_cp(step: _Step, heads: int, keys: int) -> tuple[list[tuple[str, Sent]], list[tuple[str, Sent]]]:
    """Attention over a cut sequence, forward and backward; of a rank's query heads and key heads."""
    k, each = step.sender.size("cp"), step.tokens * step.config.head_dim
    if k == 1:
        return [], []
    block = 2 * keys * each * step.width
    if step.attention == "ring":
        turn, sums = Sent(k - 1, (k - 1) * block), Sent(k, k * 2 * keys * each * 4)
        return [("cp", turn)], [("cp", turn), ("cp", sums)]
    if step.attention == "gather":
        both = [("cp", Sent(1, (k - 1) * block))]
        return both, both
    keys *= k // math.gcd(keys, k)
    exchanges = [("cp", Sent(1, (k - 1) * n * each * step.width // k)) for n in (heads + 2 * keys, heads)]
    return exchanges, exchanges
