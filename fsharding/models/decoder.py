"""A decoder-only language model of pre-norm blocks (Llama, Touvron et al. 2023, arXiv:2302.13971)."""

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
from fsharding.models.block_parts import BlockSettings, Init, MeshRules, Stream, columns, norm
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

# The parts of a block. All have `init`, `names` and `objections`; `apply` maps the normalized stream to the part's
# contribution to the residual stream, and in feed-forward parts also to an auxiliary loss. Attention has a `cache` for
# generation, and `prepared` gathers over `tp`, once, the rows that `apply` otherwise gathers in every call.
AttentionPart: TypeAlias = GQA | MLA
FeedPart: TypeAlias = Dense | Mixture


@dataclass(frozen=True)
class Stack:
    """A sequence of blocks of one kind; their parameters are at `blocks.NAME`.

    Attributes:
        name: Identifier, unique in the config.
        layers: Number of blocks.
        attention: Attention of these blocks. Default: the config's.
        intermediate_size: Hidden dim of a dense feed-forward part, also in a config with experts.
        experts: Mixture of experts instead of the config's feed-forward part.

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
    """Sizes and options of a decoder.

    Attributes:
        vocab_size: V, the number of token ids.
        dim: D, the width of the residual stream.
        layers: Number of blocks, over all stacks.
        heads, kv_heads, bias, rope_base, rope_scaling, qk_norm: Grouped-query attention; see `GQA`.
        intermediate_size: F, the hidden dim of the dense feed-forward part (not the model width).
        tied: Whether the head uses the embedding table.
        eps: Epsilon of every RMSNorm.
        head_size: Head dim. Default: `dim / heads`.
        fused: Whether queries, keys and values are one leaf, `wqkv`, and one matmul, and gate and up are `gate_up`.
            `tp` shards each part separately.
        attention: Attention instead of the one that the fields above describe.
        experts: Mixture of experts instead of the dense feed-forward part.
        stacks: Stacks of different blocks, in order. Default: one stack of equal blocks, at `blocks`.
        published: Contents of the files that `fs.hf.config_of` read, by file name, from which `fs.hf.save` copies
            entries such as token ids. Ignored by `==`.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=256, dim=64, heads=8, kv_heads=2, intermediate_size=192)
        >>> config.head_dim
        8
        >>> fs.models.DecoderConfig(heads=4, kv_heads=3)
        Traceback (most recent call last):
            ...
        fsharding.base.errors.ConfigError: fs.models.DecoderConfig has sizes that do not fit.
          4 heads are not a multiple of 3 kv_heads
        Write, for example, fs.models.DecoderConfig(dim=64, heads=8, kv_heads=2).
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
        wrong += [f"stack {name!r}: its name isn't an identifier" for name in names if not name.isidentifier()]
        if self.stacks and (total := sum(stack.layers for stack in self.stacks)) != self.layers:
            wrong.append(f"the stacks have {total} layers, not {self.layers}")
        if wrong:
            mend = "Write, for example, fs.models.DecoderConfig(dim=64, heads=8, kv_heads=2)."
            raise ConfigError(message("has sizes that do not fit.", wrong, mend))

    @property
    def head_dim(self) -> int:
        """Head dim of grouped-query attention."""
        return self.dim // self.heads if self.head_size is None else self.head_size

    def parts(self, stack: Stack | None = None) -> tuple[AttentionPart, FeedPart]:
        """Return the attention and feed-forward part of a stack's blocks; None is the only stack of a config."""
        own = Stack("blocks", self.layers) if stack is None else stack
        attention = own.attention or self.attention
        if attention is None:
            numbers = self.heads, self.kv_heads, self.head_dim, self.bias, self.rope_base, self.rope_scaling
            attention = GQA(*numbers, qk_norm=self.qk_norm, fused=self.fused)
        # A stack's own dense part takes precedence over the config's experts.
        experts = own.experts if own.experts or own.intermediate_size else self.experts
        hidden = own.intermediate_size or self.intermediate_size
        return attention, Dense(hidden, self.fused) if experts is None else Mixture(experts)

    def kinds(self) -> list[tuple[AttentionPart, FeedPart]]:
        """Return the attention and feed-forward part of each stack, in order."""
        return [self.parts(stack) for stack in self.stacks or (None,)]


@public
def decoder(config: DecoderConfig, *, sequence: bool = False, attention: Kind = "ring") -> Model:
    """Build a decoder: a `Model` with a next-token cross-entropy loss, for any mesh.

    A batch has `tokens` and `targets`, int64[B, T]; targets of -100 are ignored. For packed rows, add `documents`,
    int[B, T]: a token then attends only to its own document, and positions restart with each document unless the batch
    also has `positions`, int64[B, T]. Blocks and head accept a `Stream` or plain activations [B, T, D].

    Args:
        config: Sizes and options of the decoder.
        sequence: Whether to shard activations along the sequence over `tp` outside of attention, MLP and head
            (Korthikanti et al. 2022, arXiv:2205.05198). Needs rules that shard heads, mlp and vocab over `tp`.
        attention: Context-parallel algorithm on a mesh with `cp`; see `ops.attention`. Each rank then passes the
            tokens, targets and documents of its part of the sequence, as `ops.cut_sequence` returns them.

    Returns:
        A `Model` with units `embed`, `blocks` and `head`.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> layout = fs.plan_layout(model, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> state = fs.init_state(model, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = fs.local_batch({"tokens": tokens, "targets": tokens}, layout.mesh)
        >>> state, metrics = fs.make_train_step(model, fs.adamw(1e-3))(state, batch)
        >>> int(state.step), float(metrics.count)
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
    """Return `make(stack)` for each stack, by name; without stacks, `make(None)` alone."""
    return {stack.name: make(stack) for stack in c.stacks} if c.stacks else make(None)


def _logits(c: DecoderConfig, params: Tree, x_BTD: Tensor, settings: BlockSettings) -> Tensor:
    """Compute the logits, [B, T, V]; if `tp` shards the vocabulary, this rank's part of V."""
    full = params["unembed"].shape[0] == c.vocab_size
    x_BTD = norm(params["norm"], x_BTD, settings)
    return columns(x_BTD, [params["unembed"]], full=full, settings=settings)[0]


def _decode(c: DecoderConfig, kind: Kind) -> Decode:
    """Build the functions that decode token by token."""
    # One token can't be sharded along the sequence, and nothing is trained: experts have no losses and no capacity.
    settings = BlockSettings(c.eps, None, kind)

    def embed(params: Tree, batch: Tree) -> Stream:
        x_BTD = ops.embedding(batch["tokens"], params["table"], vocab=c.vocab_size)
        return Stream(x_BTD, batch["positions"])

    def logits(params: Tree, x: Stream, last_B: Tensor) -> Tensor:
        logits_BV = _logits(c, params, at_each(x.x, last_B), settings)[:, 0]
        full = logits_BV.shape[1] == c.vocab_size
        return logits_BV if full else ops.all_gather(logits_BV, "tp", dim=1, size=c.vocab_size)

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
        # Not `_replace`, which returns an empty tuple when torch 2.11 compiles it.
        return Stream(x_BTD + y_BTD, stream.positions, stream.documents, extra, stream.cache)

    return block


def _balanced(c: DecoderConfig) -> tuple[tuple[str, float], ...]:
    """Return the paths and rates of the router biases that a step moves."""
    paths = [f"blocks.{stack.name}" for stack in c.stacks] or ["blocks"]
    feeds = {path: feed for path, (_, feed) in zip(paths, c.kinds(), strict=True)}
    rates = {path: feed.experts.bias_rate for path, feed in feeds.items() if isinstance(feed, Mixture)}
    return tuple((f"{path}.experts.bias", rate) for path, rate in rates.items() if rate is not None)


def _check(c: DecoderConfig, sequence: bool, kind: Kind, mesh: Mesh, rules: AxisRules) -> None:
    """Raise if `tp`, `cp` or `ep` of a mesh can't shard this decoder as the rules and options require."""
    over = MeshRules(abstract(mesh), rules, kind)
    wrong = [why for parts in c.kinds() for part in parts for why in part.objections(over)]
    wrong += [f"vocab of size {c.vocab_size}: less than 2"] if over.tp > 1 and c.vocab_size < 2 else []
    if over.tp > 1 and sequence and (full := [n for n in ("heads", "mlp", "vocab") if not over.shards(n)]):
        wrong.append(f"sequence=True: tp does not shard {', '.join(full)}")
    if wrong:
        mend = "Use a different mesh, model or kind of attention, or rules that replicate these dims."
        text = f"fs.models.decoder does not fit the mesh {over.mesh}."
        raise ConfigError(report(text, list(dict.fromkeys(wrong)), mend))


def _init(c: DecoderConfig, key: Tensor) -> Tree:
    """Create normal weights of std 0.02."""
    # Weights that write to the residual stream are divided by sqrt(2 layers), as in GPT-2 (Radford et al. 2019). The
    # number of keys depends on the stacks: changing how they are split changes the initial values.
    ends, *keys = random.split(key, 1 + max(1, len(c.stacks))).unbind(0)
    narrow = 0.02 / (2 * c.layers) ** 0.5
    values = Init(ends)
    left = iter(keys)

    def blocks(stack: Stack | None) -> Tree:
        values = Init(next(left), (c.layers if stack is None else stack.layers,), narrow)
        norms = {name: values.ones(c.dim) for name in ("norm1", "norm2")}
        attention, feed = c.parts(stack)
        return {**norms, **attention.init(c.dim, values), **feed.init(c.dim, values)}

    embed = {"table": values.normal(c.vocab_size, c.dim)}
    head = {"norm": values.ones(c.dim)}
    if not c.tied:
        head["unembed"] = values.normal(c.vocab_size, c.dim)
    return {"embed": embed, "blocks": _by_stack(c, blocks), "head": head}


def _names(c: DecoderConfig) -> Tree:
    def blocks(stack: Stack | None) -> Tree:
        attention, feed = c.parts(stack)
        return dict.fromkeys(("norm1", "norm2"), ("layers", "embed")) | attention.names() | feed.names()

    head: dict[str, Any] = {"norm": ("embed",)}
    if not c.tied:
        head["unembed"] = ("vocab", "embed")
    return {"embed": {"table": ("vocab", "embed")}, "blocks": _by_stack(c, blocks), "head": head}
