"""A model: pure functions over trees of full plain tensors, and the names of their dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fsharding.base import tree
from fsharding.base.public import missing_name
from fsharding.base.tree import Tree
from fsharding.sharding import random

__all__ = ["Decode", "Model", "unlike_shapes"]


class Decode(NamedTuple):
    """The parts of a model that computes logits of new tokens and keeps, in a cache, what those after them need."""

    # Parameters are whole over the data axes, and no part communicates along them.

    embed: Callable[[Tree, Tree], Any]  # `embed(params, batch) -> x` of `tokens` and `positions` (both int64[B, T])
    # `block(params, x, cache) -> x`, which also writes to its cache; of several stacks one for each, by name
    block: Callable[[Tree, Any, Tree], Any] | Mapping[str, Callable[[Tree, Any, Tree], Any]]
    # `prepare(params of a block) -> params`, which gathers once what each call else would; named as blocks
    prepare: Callable[[Tree], Tree] | Mapping[str, Callable[[Tree], Tree]]
    # `cache(params of a block, rows, length) -> cache`, a tree of tensors [B, length, ...]; by name as blocks
    cache: Callable[[Tree, int, int], Tree] | Mapping[str, Callable[[Tree, int, int], Tree]]
    # `logits(params, x, last) -> [B, V]`, of the token of each row that `last` counts (int64[B])
    logits: Callable[[Tree, Any, Tensor], Tensor]
    vocab: int  # V


class Model(NamedTuple):
    """A model in units: embed, a stack of blocks or several, head.

    Attributes:
        init: `init(key) -> {"embed": ..., "blocks": ..., "head": ...}`, a tree of lazy draws; blocks are stacked.
        embed: `embed(params, batch) -> x`; x is any tree of tensors.
        block: `block(params, x) -> x`. Of several stacks of unlike blocks one for each, by name and in order; then
            `blocks` of `init` has a stack under each name.
        head: `head(params, x, batch) -> (sum of losses, number of tokens)`.
        names: the tree of `init` with a tuple of dim names for each leaf.
        tied: (name in the head unit, path of the leaf that it shares), such as `("unembed", "embed.table")`.
        axes: the model axes that its functions compute over; on a mesh with others a step refuses it.
        check: `check(mesh, rules)` raises where the axes cannot cut the model in the way that the rules ask.
        balanced: (path, rate) of biases whose gradient is a load (`ops.record_load`): a step moves them by the rate
            against its sign, apart from optimizer, norm and clipping.
        decode: how `generate` computes one token after the other; None for a model that cannot.
        config: what it was made of, such as a `DecoderConfig`; `fs.hf` compares it with a `config.json`.
        constants: `constants() -> tensors by name` that its functions compute with and that are no parameters, such as
            the buffers of a module; `init_state` compares them between ranks.
        drops: whether its experts drop tokens that do not fit; a step then counts them in its metrics.

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


_APART = "A model holds none: they are state.params, of state = fs.init_state(model, opt, fs.random.key(0), layout)."
_DEVICE = 'The mesh says where: fs.plan_layout(model, fs.make_mesh(device="cuda")).'
_MODE = "A model has no modes: pass what differs, such as a key for dropout, in the batch."
_LOSS = "Its loss function is fs.model_loss(model), which takes (params, batch)."
_ELSEWHERE = {
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "load_state_dict", "params"), _APART),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
    **dict.fromkeys(("train", "eval"), _MODE),
    **dict.fromkeys(("forward", "apply", "loss"), _LOSS),
}
"""What a model does not have, by the names that modules of torch and flax give it."""


def unlike_shapes(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compare full shapes by path with a model's: one row for each leaf of both whose shape differs."""
    wanted = {path: (*x.shape,) for path, x in tree.named_leaves(model.init(random.key(0))).items() if path in shapes}
    unlike = {path: shape for path, shape in wanted.items() if shape != shapes[path]}
    return [f"{path} is {list(shapes[path])}, and {list(shape)} in the model" for path, shape in unlike.items()]
