"""A decoder-only language model of pre-norm blocks as in Llama (Touvron et al. 2023), in one stack or several."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from fsharding import ops
from fsharding.base.errors import ConfigError, message, report
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.mesh.device_mesh import Mesh, abstract
from fsharding.models.block_parts import BlockSettings, Cuts, Draws, Stream, columns, norm
from fsharding.models.cache import at_each
from fsharding.models.grouped_query import GQA
from fsharding.models.latent_attention import MLA
from fsharding.models.mlp import Dense
from fsharding.models.model import Decode, Model
from fsharding.models.moe import Experts, Mixture
from fsharding.ops.attention import Kind
from fsharding.ops.rotary import Scaling
from fsharding.sharding import random
from fsharding.sharding.partition_spec import AxisRules

__all__ = ["DecoderConfig", "Stack", "decoder"]

# The parts of a block. All have `init`, `names` and `objections`, and `apply` gives a term of the residual stream from
# the normalized stream; a feed-forward part gives a term of the loss, too. Attention has a `cache` for generation, and
# `prepared` leaves, for which `apply` gathers nothing over `tp`.
AttentionPart: TypeAlias = GQA | MLA
FeedPart: TypeAlias = Dense | Mixture


@dataclass(frozen=True)
class Stack:
    """Equal blocks, one after the other; their parameters are at `blocks.NAME`.

    Attributes:
        name: of the stack.
        layers: number of blocks.
        attention: by default the config's.
        intermediate_size: of a dense feed-forward part, instead of the config's.
        experts: in the place of a dense part, where the config has others.

    Example:
        >>> stacks = fs.models.Stack("dense", 1), fs.models.Stack("routed", 3, experts=fs.models.Experts(8, 2, 32))
        >>> config = fs.models.DecoderConfig(dim=8, layers=4, heads=2, kv_heads=1, intermediate_size=12, stacks=stacks)
        >>> sorted(fs.models.decoder(config).block)
        ['dense', 'routed']
    """

    name: str
    layers: int
    attention: GQA | MLA | None = None
    intermediate_size: int | None = None
    experts: Experts | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
        vocab_size: V, number of tokens.
        dim: D.
        layers: number of blocks, of all stacks.
        heads: query heads of grouped-query attention.
        kv_heads: key heads; divides `heads`.
        intermediate_size: F, hidden dim of the dense feed-forward part.
        tied: the head uses the embedding table.
        rope_base: base of the rotary frequencies.
        eps: of RMSNorm.
        head_size: of a head; by default `dim / heads`.
        bias: queries, keys and values have a bias.
        rope_scaling: of the rotary frequencies, for a longer context.
        qk_norm: each query and key head has an RMSNorm before it turns.
        fused: queries, keys and values are one leaf `wqkv` and one product, and so are gate and up as `gate_up`. `tp`
            cuts each part by itself.
        attention: another attention than the grouped-query one of the numbers above.
        experts: in the place of the dense feed-forward part.
        stacks: of unlike blocks, in order; by default all blocks are one stack, at `blocks`.
        published: entries of the files that `fs.hf.config_of` read it from, by file name, such as `config.json`;
            `fs.hf.save` writes token ids and other entries again that compute nothing. Not compared.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=256, dim=64, heads=8, kv_heads=2, intermediate_size=192)
        >>> config.head_dim
        8
        >>> fs.models.DecoderConfig(heads=4, kv_heads=3)
        Traceback (most recent call last):
            ...
        fsharding.base.errors.ConfigError: fs.models.DecoderConfig has sizes that do not fit.
          4 heads are not a multiple of 3 kv_heads
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 384
    tied: bool = False
    rope_base: float = 10_000.0
    eps: float = 1e-5
    head_size: int | None = None
    bias: bool = False
    rope_scaling: Scaling | None = None
    qk_norm: bool = False
    fused: bool = False
    attention: GQA | MLA | None = None
    experts: Experts | None = None
    stacks: tuple[Stack, ...] = ()
    published: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @public
    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "layers", "heads", "kv_heads", "intermediate_size", "head_size")
        given = {name: getattr(self, name) for name in sizes}
        wrong = [f"{name}={size}: at least 1" for name, size in given.items() if size is not None and size < 1]
        wrong += [] if 0 <= self.eps < 1 else [f"eps={self.eps}: from 0 to 1"]
        wrong += [] if 1 <= self.rope_base < math.inf else [f"rope_base={self.rope_base}: at least 1, and finite"]
        if self.attention is None and self.heads >= 1:
            if self.head_size is None and (self.dim % self.heads or self.head_dim % 2):
                wrong.append(f"dim {self.dim} over {self.heads} heads is not an even head dim")
            elif self.head_dim % 2:
                wrong.append(f"head_size {self.head_size} is not even")
            if self.kv_heads >= 1 and self.heads % self.kv_heads:
                wrong.append(f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads")
        for stack in self.stacks:
            own = {"layers": stack.layers, "intermediate_size": stack.intermediate_size}
            wrong += [f"stack {stack.name!r}: {k}={v}: at least 1" for k, v in own.items() if v is not None and v < 1]
        names = [stack.name for stack in self.stacks]
        wrong += [f"two stacks have the name {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
        both = [stack.name for stack in self.stacks if stack.intermediate_size is not None and stack.experts]
        wrong += [f"stack {name!r} has both intermediate_size and experts" for name in both]
        wrong += [f"{name!r} is no name of a stack: it is part of a path" for name in names if not name.isidentifier()]
        if self.stacks and (total := sum(stack.layers for stack in self.stacks)) != self.layers:
            wrong.append(f"the stacks have {total} layers, not {self.layers}")
        if wrong:
            raise ConfigError(message("has sizes that do not fit.", wrong))

    @property
    def head_dim(self) -> int:
        """The size of a head of grouped-query attention."""
        return self.dim // self.heads if self.head_size is None else self.head_size

    def parts(self, stack: Stack | None = None) -> tuple[AttentionPart, FeedPart]:
        """Attention and feed-forward part of the blocks of a stack, or of the only one."""
        attention = stack.attention if stack is not None and stack.attention is not None else self.attention
        if attention is None:
            numbers = self.heads, self.kv_heads, self.head_dim, self.bias, self.rope_base, self.rope_scaling
            attention = GQA(*numbers, qk_norm=self.qk_norm, fused=self.fused)
        experts = self.experts
        hidden = self.intermediate_size
        if stack is not None and (stack.intermediate_size is not None or stack.experts is not None):
            experts = stack.experts
            hidden = stack.intermediate_size or hidden
        return attention, Dense(hidden, self.fused) if experts is None else Mixture(experts)

    def kinds(self) -> list[tuple[AttentionPart, FeedPart]]:
        """Attention and feed-forward part of each stack, in order."""
        return [self.parts(stack) for stack in self.stacks] if self.stacks else [self.parts()]


@public
def decoder(config: DecoderConfig, *, sequence: bool = False, attention: Kind = "ring") -> Model:
    """The model of a config.

    A batch has `tokens` and `targets`. Where rows are packed with several documents it also has `documents`, int[B, T]:
    a token then sees its own document only, and positions begin anew with each, unless the batch has `positions` of its
    own, int64[B, T]. A `Stream` goes from unit to unit; blocks and head take activations [B, T, D] alone, too.

    Args:
        config: sizes and options of the decoder.
        sequence: cut activations along the sequence over `tp` outside of attention, MLP and head (Korthikanti et al.
            2022). It needs rules that put `tp` on heads, mlp and vocab.
        attention: how queries meet the keys of other ranks on a mesh with `cp`; see `ops.attention`. There each rank
            gets the tokens, targets and documents of its part of the sequence, which `ops.cut_sequence` cuts out.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> layout = fs.plan_layout(model, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> state = fs.init_state(model, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = fs.local_batch({"tokens": tokens, "targets": tokens}, layout.mesh)
        >>> state, metrics = fs.make_train_step(model, fs.adamw(1e-3))(state, batch)
        >>> int(state.step), float(metrics.weight)
        (1, 8.0)
    """
    settings = BlockSettings(config.eps, 1 if sequence else None, attention)

    def embed(params: Tree, batch: Tree) -> Stream:
        documents = batch.get("documents")
        positions = batch.get("positions")
        if documents is not None and positions is None:
            positions = ops.document_positions(documents)
        x_BTD = ops.embedding(batch["tokens"], params["table"], vocab=config.vocab_size, sequence_dim=settings.sequence)
        return Stream(x_BTD, positions, documents)

    def head(params: Tree, x: Stream | Tensor, batch: Tree) -> tuple[Tensor, Tensor]:
        stream = x if isinstance(x, Stream) else Stream(x)
        targets = batch["targets"]
        total = ops.cross_entropy(_logits(config, params, stream.x, settings), targets, vocab=config.vocab_size).sum()
        return total if stream.extra is None else total + stream.extra, (targets != -100).sum()

    return Model(
        init=functools.partial(_init, config),
        embed=embed,
        block=_by_stack(config, lambda stack: _block(*config.parts(stack), settings)),
        head=head,
        names=_names(config),
        tied=(("unembed", "embed.table"),) if config.tied else (),
        axes=("cp", "tp"),
        check=functools.partial(_check, config, sequence, attention),
        balanced=_balanced(config),
        drops=any(isinstance(feed, Mixture) and feed.experts.drop for _, feed in config.kinds()),
        decode=_decode(config, attention),
        config=config,
    )


def _by_stack(c: DecoderConfig, make: Callable[[Stack | None], Any]) -> Any:
    """What is made of each stack, by name and in order; of the only one, that alone."""
    return {stack.name: make(stack) for stack in c.stacks} if c.stacks else make(None)


def _logits(c: DecoderConfig, params: Tree, x_BTD: Tensor, settings: BlockSettings) -> Tensor:
    """Logits of the vocabulary, or of this rank's part of it where `tp` cuts that: [B, T, V of this rank]."""
    whole = params["unembed"].shape[0] == c.vocab_size
    x_BTD = norm(params["norm"], x_BTD, settings)
    return columns(x_BTD, [params["unembed"]], whole=whole, settings=settings)[0]


def _decode(c: DecoderConfig, kind: Kind) -> Decode:
    """The decoder token by token: one token cannot be cut along the sequence, and no router adds to a loss."""
    settings = BlockSettings(c.eps, None, kind)

    def embed(params: Tree, batch: Tree) -> Stream:
        x_BTD = ops.embedding(batch["tokens"], params["table"], vocab=c.vocab_size)
        return Stream(x_BTD, batch["positions"])

    def logits(params: Tree, x: Stream, last_B: Tensor) -> Tensor:
        logits_BV = _logits(c, params, at_each(x.x, last_B), settings)[:, 0]
        whole = logits_BV.shape[1] == c.vocab_size
        return logits_BV if whole else ops.all_gather(logits_BV, "tp", dim=1, size=c.vocab_size)

    def block(stack: Stack | None) -> Callable[[Tree, Stream, Tree], Stream]:
        attention, feed = c.parts(stack)
        if isinstance(feed, Mixture):
            feed = Mixture(replace(feed.experts, balance=0.0, z=0.0, capacity=None, drop=False))
        run = _block(attention, feed, settings)
        return lambda params, x, cache: run(params, x._replace(cache=cache))

    prepare = _by_stack(c, lambda stack: c.parts(stack)[0].prepared)
    cache = _by_stack(c, lambda stack: c.parts(stack)[0].cache)
    return Decode(embed, _by_stack(c, block), prepare, cache, logits, c.vocab_size)


def _block(
    attention: AttentionPart, feed: FeedPart, settings: BlockSettings
) -> Callable[[Tree, Stream | Tensor], Stream]:
    def block(params: Tree, x: Stream | Tensor) -> Stream:
        stream = x if isinstance(x, Stream) else Stream(x)
        x_BTD = stream.x
        x_BTD = x_BTD + attention.apply(params, norm(params["norm1"], x_BTD, settings), stream, settings)
        y_BTD, extra = feed.apply(params, norm(params["norm2"], x_BTD, settings), settings)
        if stream.extra is not None:
            extra = stream.extra if extra is None else stream.extra + extra
        # Not `_replace`: compiled by torch 2.11, that returns an empty tuple.
        return Stream(x_BTD + y_BTD, stream.positions, stream.documents, extra, stream.cache)

    return block


def _balanced(c: DecoderConfig) -> tuple[tuple[str, float], ...]:
    """The biases of routers that a step moves, with their rates."""
    paths = [f"blocks.{stack.name}" for stack in c.stacks] or ["blocks"]
    feeds = {path: feed for path, (_, feed) in zip(paths, c.kinds(), strict=True)}
    rates = {path: feed.experts.bias_rate for path, feed in feeds.items() if isinstance(feed, Mixture)}
    return tuple((f"{path}.experts.bias", rate) for path, rate in rates.items() if rate is not None)


def _check(c: DecoderConfig, sequence: bool, kind: Kind, mesh: Mesh, rules: AxisRules) -> None:
    """Refuses a mesh whose `tp` and `cp` cannot cut this decoder as the rules and options ask."""
    cuts = Cuts(abstract(mesh), rules, kind)
    wrong = [why for parts in c.kinds() for part in parts for why in part.objections(cuts)]
    wrong += [f"vocab of size {c.vocab_size}: less than 2"] if cuts.tp > 1 and c.vocab_size < 2 else []
    if cuts.tp > 1 and sequence and (whole := [n for n in ("heads", "mlp", "vocab") if not cuts.has(n)]):
        wrong.append(f"sequence=True: tp does not cut {', '.join(whole)}")
    if wrong:
        mend = "Choose another mesh, another model or kind of attention, or rules that leave these dims whole."
        text = f"fs.models.decoder cannot be cut over the mesh {cuts.mesh}."
        raise ConfigError(report(text, list(dict.fromkeys(wrong)), mend))


def _init(c: DecoderConfig, key: Tensor) -> Tree:
    """Normal weights of std 0.02; those that write to the residual stream over sqrt(2 layers) (Radford et al. 2019)."""
    ends, *keys = random.split(key, 1 + max(1, len(c.stacks))).unbind(0)
    narrow = 0.02 / (2 * c.layers) ** 0.5
    draws = Draws(ends)
    left = iter(keys)

    def blocks(stack: Stack | None) -> Tree:
        draws = Draws(next(left), (c.layers if stack is None else stack.layers,), narrow)
        norms = {name: draws.ones(c.dim) for name in ("norm1", "norm2")}
        attention, feed = c.parts(stack)
        return {**norms, **attention.init(c.dim, draws), **feed.init(c.dim, draws)}

    embed = {"table": draws.normal(c.vocab_size, c.dim)}
    head = {"norm": draws.ones(c.dim)}
    if not c.tied:
        head["unembed"] = draws.normal(c.vocab_size, c.dim)
    return {"embed": embed, "blocks": _by_stack(c, blocks), "head": head}


def _names(c: DecoderConfig) -> Tree:
    def blocks(stack: Stack | None) -> Tree:
        attention, feed = c.parts(stack)
        return dict.fromkeys(("norm1", "norm2"), ("layers", "embed")) | attention.names() | feed.names()

    head: dict[str, Any] = {"norm": ("embed",)}
    if not c.tied:
        head["unembed"] = ("vocab", "embed")
    return {"embed": {"table": ("vocab", "embed")}, "blocks": _by_stack(c, blocks), "head": head}
