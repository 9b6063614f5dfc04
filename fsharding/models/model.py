"""A model: pure functions over trees of unsharded plain tensors, and the names of their dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import tree
from fsharding.base.public import missing_name
from fsharding.base.tree import Tree

__all__ = ["Decode", "Model", "unlike_shapes"]


class Decode(NamedTuple):
    """The functions with which a model generates tokens, with a cache of earlier ones."""

    # Parameters are gathered over the data axes, and no function communicates along them. `block`, `prepare` and
    # `cache` are one function each, or one per stack, by name.

    embed: Callable[[Tree, Tree], Any]  # `embed(params, batch) -> x`, of `tokens` and `positions` (both int64[B, T])
    block: Callable[[Tree, Any, Tree], Any] | Mapping[str, Callable[[Tree, Any, Tree], Any]]
    """`block(params, x, cache) -> x`; writes the new tokens to the cache in place."""
    prepare: Callable[[Tree], Tree] | Mapping[str, Callable[[Tree], Tree]]
    """`prepare(params) -> params` of a block; gathers once what otherwise each `block` call would gather."""
    cache: Callable[[Tree, int, int], Tree] | Mapping[str, Callable[[Tree, int, int], Tree]]
    """`cache(params, rows, length) -> cache` of a block, a tree of tensors [B, length, ...]."""
    logits: Callable[[Tree, Any, Tensor], Tensor]  # `logits(params, x, last) -> [B, V]`, at position last[b] of row b
    vocab: int  # V


class Model(NamedTuple):
    """A model of units: an embedding, one or more stacks of blocks, and a head.

    Attributes:
        init: `init(key) -> {"embed": ..., "blocks": ..., "head": ...}`, a tree of `LazyTensor`s. Dim 0 of each leaf in
            `blocks` counts layers.
        embed: `embed(params, batch) -> x`, where x is any tree of tensors.
        block: `block(params, x) -> x`; or, for stacks of different blocks, one function per stack, by name and in
            order. `blocks` then has a subtree per name.
        head: `head(params, x, batch) -> (loss summed over tokens, number of tokens)`.
        names: Tree like `init`'s, with a tuple of dim names per leaf.
        tied: Shared leaves: (name in the head, path of the leaf), such as `("unembed", "embed.table")`.
        axes: Model axes that the functions support; steps refuse meshes with others.
        check: `check(mesh, rules)`, which raises if the mesh can't shard the model as the rules require.
        balanced: (path, rate) of router biases whose gradient is a load (`ops.record_load`). A step moves them by the
            rate, against the sign of the gradient; optimizer, gradient norm and clipping skip them.
        decode: Functions with which `generate` predicts one token at a time, or None.
        config: Source of the model, such as a `DecoderConfig`; `fs.hf` compares it with a `config.json`.
        constants: `constants() -> tensors by name`: inputs that aren't parameters, such as buffers of a module.
            `init_state` compares them between ranks.
        drops: Whether experts drop tokens above their capacity; `metrics.dropped` counts them.

    Example:
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> model = fs.models.decoder(config)
        >>> sorted(model.init(fs.random.key(0)))
        ['blocks', 'embed', 'head']
    """

    init: Callable[[Tensor], Tree]
    embed: Callable[[Tree, Tree], Any]
    block: Callable[[Tree, Any], Any] | Mapping[str, Callable[[Tree, Any], Any]]
    head: Callable[[Tree, Any, Tree], tuple[Tensor, Tensor]]
    names: Tree
    tied: tuple[tuple[str, str], ...] = ()
    axes: tuple[str, ...] = ()
    check: Callable[[Any, Any], None] | None = None
    balanced: tuple[tuple[str, float], ...] = ()
    decode: Decode | None = None
    config: Any = None
    constants: Callable[[], Mapping[str, Tensor]] | None = None
    drops: bool = False

    def __getattr__(self, name: str) -> Any:
        raise missing_name("Model", name, self._fields, _ELSEWHERE)


_APART = "Use state.params, where state = fs.init_state(model, opt, fs.random.key(0), layout)."
_DEVICE = 'Set the device of the mesh: fs.plan_layout(model, fs.make_mesh(device="cuda")).'
_MODE = "Pass what differs between training and evaluation, such as a key for dropout, in the batch."
_LOSS = "Use its loss function, fs.model_loss(model), which takes (params, batch)."
_ELSEWHERE = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "load_state_dict", "params"), _APART),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("forward", "apply", "loss"), _LOSS),
}
"""What to type instead of the methods that torch and flax modules have."""


def unlike_shapes(wanted: Tree, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compare full shapes by path with the lazy leaves of a model: one row for each leaf of both that differs."""
    named = {path: (*x.shape,) for path, x in tree.named_leaves(wanted).items() if path in shapes}
    unlike = {path: shape for path, shape in named.items() if shape != shapes[path]}
    return [f"{path} is {list(shapes[path])}, and {list(shape)} in the model" for path, shape in unlike.items()]
