"""Traffic of a decoder's step, by closed formulas: calls and bytes of one rank, by axes of the mesh.

In: sizes of the decoder, a layout, the batch, a schedule. Out: a `Traffic`, computed without tensors or processes.
Law: it is what `counting_bytes` counts, to the byte, for every mesh, strategy, schedule and policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from fsharding.calls import named
from fsharding.comm.counters import Sent, Traffic
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.device_mesh import coordinate
from fsharding.models.block_parts import AttentionPart
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.models.grouped_query import Grouped
from fsharding.models.latent_attention import Latent
from fsharding.models.moe import Experts, Mixture
from fsharding.ops.attention import Kind
from fsharding.pipeline.schedule import Schedule
from fsharding.sharding.layout import Layout
from fsharding.train.traffic import Backward, Sender, Stage, parameters, round_at_rest, sum_over, update
from fsharding.transforms import policies
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["expected_traffic"]


@named("fs.expected_traffic")
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
    """Counts the messages of one rank in a step of `models.decoder` that succeeds, of rows without documents.

    Activations x of a microbatch are [rows, T, dim], where T is length over `cp`. In each block:

    | axis | forward | backward |
    |---|---|---|
    | tp | 2 sums of x | 2 sums of x |
    | tp, with `sequence` | 2 gathers and 2 scatters of x | the same, and 2 sums of dim for the norms |
    | cp, ring | k-1 rounds of keys and values | k-1 of these, and k of their gradients in float32 |
    | cp, gather | 1 gather of keys and values | 1 scatter |
    | cp, ulysses | 1 exchange of q, k and v, 1 of the result | the same |
    | ep | 1 exchange of counts, 1 of tokens, 1 of results | 2 exchanges of rows |

    Tokens are exchanged as if they chose the experts of all ranks equally often; of others only bytes over `ep`
    differ. Experts over `tp` also let the logits of their router into the region, which latent attention lets its
    narrow vectors into; its values travel over `cp` as wide as its keys. Sums of the router's losses, and of its counts
    over the data axes for the balance loss, come on top; over `pp` these losses go along with x.

    Over `tp` the embedding adds a sum of x forward (a scatter, and a gather backward, with `sequence`); the head a sum
    of x backward (a gather forward, a scatter backward, and the norm), and for the loss a gather and two sums of one
    float32 a token. Key heads that are fewer than `tp`, but cut over it, are gathered and their gradients scattered;
    gradients of other leaves that all ranks of `tp` have are summed, each by itself.
    What a policy computes again is sent again, but for the last sum of each block. Of a backward in two halves I is all
    but the reductions of gradients, which come with W.

    Over the data axes a unit is gathered forward, and backward unless it is the last one or the embedding; weights that
    `Precision.columnwise` names come backward in blocks along their other dim, and as they were only where that is
    needed. Gradients take the steps of `comm.steps`, for each microbatch from unreduced to `layout.grads` and once a
    step to `layout.main`; what `layout.params` has more of is gathered at the end. A schedule that gathers once a step
    does so for each stage, one that scatters once reduces each stage's sums at its SCATTER. Over `pp` a stage sends x
    to the next one, and its gradient to the one before, for each microbatch. Two float64 for the loss, the stop bit and
    one a leaf for the norm come on top.

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
        ConfigError: a policy that is none.

    Example:
        >>> config = fs.models.DecoderConfig(vocab=16, dim=8, layers=2, heads=2, kv_heads=1, hidden=12)
        >>> layout = fs.plan_layout(fs.models.decoder(config), fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3))
        >>> fs.expected_traffic(config, layout, rows=2, length=4).by_axes.keys()
        dict_keys([('dp',)])
    """
    check_policy(policy)
    where = coordinate(layout.mesh) if coord is None else coord
    sender = Sender(decoder(config), layout, where, microbatches, schedule, Traffic())
    tokens = rows // microbatches * length // sender.size("cp")
    step = _Step(config, sender, tokens, sequence, attention, policy)
    tied = ("embed.table",) if config.tied else ()
    for stage in sender.stages:
        stage = stage._replace(walks=microbatches) if policy.activations == "dots" else stage
        _activations(step, stage)
        parameters(sender, stage, _backward(step), tied=tied)
    _messages(step)
    update(sender)
    round_at_rest(sender)
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

    @property
    def high(self) -> int:
        """Bytes of an element of what is computed in float32 at least."""
        return max(self.width, 4)

    def is_cut(self, path: str, axis: str = "tp") -> bool:
        """Whether an axis cuts a leaf."""
        leaf = next(leaf for leaf in self.sender.layout.leaves if leaf.path == path)
        return axis in leaf.params.simplified().spec.all_axes


_Sends: TypeAlias = tuple[tuple[tuple[str, ...], Sent], ...]


class _Calls(NamedTuple):
    """The messages of a part of a unit, each over some axes.

    Attributes:
        forward: until the last tensor that backward needs, so also when it is computed again.
        last: after that.
        backward: along the activations.
        weights: backward, to its weights alone.
    """

    forward: _Sends = ()
    last: _Sends = ()
    backward: _Sends = ()
    weights: _Sends = ()


_MULTIPLIED = ("wq", "wk", "wv", "wqkv", "q_down", "q_up", "kv_down", "kv_up", "gate", "up", "gate_up")
"""Names of weights of blocks that are used for `x @ w.T`, as that of the head is."""


def _backward(step: _Step) -> Backward:
    """What backward does with weights: of which of them it has products alone."""
    kinds = dict(zip(step.sender.stacks, step.config.kinds(), strict=True))

    def by_columns(path: str) -> bool:
        stack, _, name = path.rpartition(".")
        attention = kinds[stack][0] if stack in kinds else None
        if name in ("wk", "wv") and isinstance(attention, Grouped):
            k = step.sender.size("tp") if step.is_cut(f"{stack}.wo") else 1
            return _has_its_keys(step, stack, attention, k)
        if name in ("q_down", "kv_down") and step.sequence:
            return False
        return path == "head.weight" or name in _MULTIPLIED

    return Backward(step.policy.gathered, step.policy.activations != "all", by_columns)


def _activations(step: _Step, stage: Stage) -> None:
    """All that is not parameters, gradients or messages."""
    result = [(_embed(step), int(stage.first)), (_head(step), int(stage.last))]
    for path, kind, layers in zip(step.sender.stacks, step.config.kinds(), stage.layers, strict=True):
        attention, feed = kind
        first = _attention(step, path, attention)
        then = _mixture(step, path, feed.experts) if isinstance(feed, Mixture) else _dense(step, path)
        result += [(first, layers), (then, layers)]
        if step.policy.activations != "all":
            for axes, sent in [*first.forward, *first.last, *then.forward]:
                step.sender.send(axes, sent, stage.walks * layers)
    for calls, count in result:
        for axes, sent in [*calls.forward, *calls.last, *calls.weights]:
            step.sender.send(axes, sent, step.sender.microbatches * count)
        for axes, sent in calls.backward:
            step.sender.send(axes, sent, stage.walks * count)


def _messages(step: _Step) -> None:
    """Activations to the stage after, their gradients to the stage before, where these are on other ranks."""
    if step.sender.schedule is None:
        return
    schedule = step.sender.schedule
    last = step.sender.schedule.stages - 1
    x = step.tokens // (step.sender.size("tp") if step.sequence else 1) * step.config.dim * step.width
    mixed = [isinstance(feed, Mixture) for _, feed in step.config.kinds()]
    for stage in schedule.stages_on(step.sender.where["pp"]):
        for border in [stage] * (stage < last) + [stage - 1] * (stage > 0):
            layers = map(sum, zip(*step.sender.layers[: border + 1], strict=True))
            # The loss terms of the routers before it travel with it.
            extra = step.high if any(m and n for m, n in zip(mixed, layers, strict=True)) else 0
            step.sender.send(("pp",), Sent(1, x + extra), 0 if schedule.is_local(border) else step.sender.microbatches)


# ------------------------------------------------------------------------------------------------------ what parts send
def _tp(*sent: Sent) -> _Sends:
    return tuple((("tp",), each) for each in sent)


def _enter(step: _Step, width: int, b: int) -> _Calls:
    """Into a region of tensor parallelism, from activations [tokens, width] of which an element has b bytes."""
    k = step.sender.size("tp")
    n = step.tokens * width
    if step.sequence:
        part = _tp(Sent(1, (k - 1) * n // k * b))
        return _Calls(forward=part, backward=part)
    return _Calls(backward=_tp(sum_over(n, k, b)))


def _leave(step: _Step) -> _Calls:
    """Out of the region: the transpose of entering it."""
    there = _enter(step, step.config.dim, step.width)
    return _Calls(forward=there.backward, backward=there.forward)


def _region(step: _Step, inside: _Calls, *into: _Calls) -> _Calls:
    """Calls of a region of tensor parallelism: activations that enter, messages inside, activations that leave."""
    leave = _leave(step)
    return _Calls(
        (*(sent for calls in into for sent in calls.forward), *inside.forward),
        leave.forward,
        (*leave.backward, *inside.backward, *(sent for calls in into for sent in calls.backward)),
        inside.weights,
    )


def _sums(step: _Step, *sizes: int) -> _Sends:
    """Of gradients of what all ranks of `tp` have, and each uses for itself."""
    return _tp(*(sum_over(n, step.sender.size("tp"), step.width) for n in sizes))


def _norms(step: _Step, *sizes: int) -> _Sends:
    return _sums(step, *sizes) if step.sequence else ()


def _embed(step: _Step) -> _Calls:
    return _leave(step) if step.is_cut("embed.table") else _Calls()


def _head(step: _Step) -> _Calls:
    if not step.is_cut("embed.table" if step.config.tied else "head.unembed"):
        return _Calls()
    calls = _enter(step, step.config.dim, step.width)
    k = step.sender.size("tp")
    loss = _tp(Sent(1, (k - 1) * step.tokens * 4), *[sum_over(step.tokens, k, 4)] * 2)
    return calls._replace(last=loss, weights=_norms(step, step.config.dim))


def _dense(step: _Step, path: str) -> _Calls:
    inside = _Calls(weights=_norms(step, step.config.dim))
    cut = step.is_cut(f"{path}.down")
    return _region(step, inside, _enter(step, step.config.dim, step.width)) if cut else inside


def _mixture(step: _Step, path: str, c: Experts) -> _Calls:
    """Experts that each have an equal share of the tokens."""
    sender = step.sender
    norms = _norms(step, step.config.dim, c.count * step.config.dim)
    cut = step.is_cut(f"{path}.experts.gate")
    sums = ()
    if cut and (c.balance or c.z):
        sums = _tp(sum_over(1, sender.size("tp"), step.high))
    if c.balance:
        axes = tuple(axis for axis in DATA_AXES if sender.size(axis) > 1)
        sums = (*sums, (axes, sum_over(c.count, sender.size(*axes), 8, 8)))
    inside = _Calls(forward=sums, weights=norms)
    if (k := sender.size("ep")) > 1 and step.is_cut(f"{path}.experts.gate", "ep"):
        counts: _Sends = ((("ep",), Sent(1, (k - 1) * (c.count // k) * 8)),)
        elements = step.tokens * c.active * (k - 1) // k * step.config.dim
        rows: _Sends = ((("ep",), Sent(1, elements * step.width)),) * 2
        inside = inside._replace(forward=(*sums, *counts, *rows), backward=rows)
    if not cut:
        return inside
    return _region(step, inside, _enter(step, step.config.dim, step.width), _enter(step, c.count, step.high))


def _attention(step: _Step, path: str, c: AttentionPart) -> _Calls:
    if isinstance(c, Latent):
        return _latent(step, path, c)
    assert isinstance(c, Grouped)
    return _grouped(step, path, c)


def _grouped(step: _Step, path: str, c: Grouped) -> _Calls:
    cut = step.is_cut(f"{path}.wo")
    norms = _norms(step, step.config.dim)
    k = step.sender.size("tp") if cut else 1
    needed, gathers, sums = _key_heads(step, path, c, k)
    over_cp = _over_cp(step, c.heads // k, needed, c.head_dim)
    if not cut:
        return over_cp._replace(weights=norms)
    scales = _sums(step, c.head_dim, c.head_dim) if c.qk_norm else ()
    forward = (*gathers, *over_cp.forward)
    weights = (*gathers, *sums, *scales, *norms)
    inside = over_cp._replace(forward=forward, weights=weights)
    return _region(step, inside, _enter(step, step.config.dim, step.width))


def _key_heads(step: _Step, path: str, c: Grouped, k: int) -> tuple[int, _Sends, _Sends]:
    """The key heads of a rank; gathers of rows where its own are not those, and sums where all are there."""
    if _has_its_keys(step, path, c, k):
        return c.kv_heads // k, (), ()
    needed = max(c.heads // k // (c.heads // c.kv_heads), 1)
    rows = c.kv_heads * c.head_dim
    widths = [step.config.dim, step.config.dim, *[1, 1] * c.bias]
    if step.is_cut(f"{path}.wk"):
        return needed, _tp(*(Sent(1, (k - 1) * -(-rows // k) * n * step.width) for n in widths)), ()
    return needed, (), _sums(step, *(rows * n for n in widths))


def _has_its_keys(step: _Step, path: str, c: Grouped, k: int) -> bool:
    """Whether the rows of keys and values that a rank has are those of its query heads, which k ranks share."""
    return c.fused or k == 1 or (c.kv_heads % k == 0 and step.is_cut(f"{path}.wk"))


def _latent(step: _Step, path: str, c: Latent) -> _Calls:
    """Latent attention: its narrow vectors enter the region."""
    cut = step.is_cut(f"{path}.wo")
    dim = step.config.dim
    heads = c.heads // (step.sender.size("tp") if cut else 1)
    narrow = c.kv_rank + c.rotary_dim
    weights = _norms(step, dim, c.q_rank, c.kv_rank, c.q_rank * dim, narrow * dim)
    # Values that are narrower than keys, or wider, travel with zeros up to the same size.
    inside = _over_cp(step, heads, heads, max(c.head_dim, c.value_dim))._replace(weights=weights)
    return _region(step, inside, _enter(step, c.q_rank + narrow, step.width)) if cut else inside


def _over_cp(step: _Step, heads: int, keys: int, head_dim: int) -> _Calls:
    """Attention over a cut sequence; of a rank's query heads and key heads."""
    k = step.sender.size("cp")
    each = step.tokens * head_dim
    if k == 1:
        return _Calls()
    block = 2 * keys * each * step.width
    if step.attention == "ring":
        turn = ("cp",), Sent(k - 1, (k - 1) * block)
        return _Calls(forward=(turn,), backward=(turn, (("cp",), Sent(k, k * 2 * keys * each * 4))))
    if step.attention == "gather":
        both: _Sends = ((("cp",), Sent(1, (k - 1) * block)),)
        return _Calls(forward=both, backward=both)
    keys *= k // math.gcd(keys, k)
    exchanges = tuple((("cp",), Sent(1, (k - 1) * n * each * step.width // k)) for n in (heads + 2 * keys, heads))
    return _Calls(forward=exchanges, backward=exchanges)
