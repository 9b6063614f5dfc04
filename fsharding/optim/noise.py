"""Gradient noise (Neelakantan et al. 2015), drawn for whole leaves under keys; each rank draws its own part alone.

In: gradients in any sharding. Out: gradients with noise, in their sharding.
Guarantee: the noise follows from key, number of updates and place of the leaf in the tree, so it is the same in every
layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsharding.base import tree
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.optim.base import ContextTransformation, InitContext, UpdateContext, check_state, like_leaf
from fsharding.optim.schedules import Schedule
from fsharding.optim.stacked import assigned_shardings, whole_shape
from fsharding.optim.validation import FROM_0, check_settings
from fsharding.sharding import boxes, random
from fsharding.sharding.named_sharding import NamedSharding, local_of

__all__ = ["NoiseState", "add_noise", "annealed"]


class NoiseState(NamedTuple):
    """Number of updates (int64, 0-d) and the key of all draws (int64[2]), both on the CPU.

    Example:
        >>> state = fs.optim.add_noise(0.1, fs.random.key(7)).init({"w": torch.ones(2)})
        >>> int(state.count), torch.equal(state.key, fs.random.key(7))
        (0, True)
    """

    count: Tensor
    key: Tensor


def annealed(eta: float, gamma: float = 0.55) -> Schedule:
    """Standard deviations `sqrt(eta / (1 + count)^gamma)`, as in the paper.

    Example:
        >>> std = fs.optim.annealed(0.01)
        >>> round(std(0), 4), round(std(100), 4)
        (0.1, 0.0281)
    """
    return lambda count: (eta / (1 + count) ** gamma) ** 0.5


@public("fs.optim.add_noise")
def add_noise(std: float | Schedule, key: Tensor) -> ContextTransformation:
    """Adds normal noise to gradients; put it before the optimizer, and before clipping if that should see it.

    Args:
        std: standard deviation: a number, or a function of the number of updates so far, such as `annealed(0.3)`.
        key: int64[2], a random key; the noise of each update is folded from it.

    Raises:
        ConfigError: a deviation below 0.
        LayoutError: from the update: leaves with explicit assignments without `shardings` in the context; all of them
            are listed.

    Example:
        >>> opt = fs.optim.chain(fs.optim.add_noise(0.1, fs.random.key(0)), fs.sgd(1.0))
        >>> grads = {"w": torch.zeros(2)}
        >>> (first, state), (same, _) = (opt.update(grads, opt.init(grads)) for _ in range(2))
        >>> then, _ = opt.update(grads, state)
        >>> torch.equal(first["w"], same["w"]), torch.equal(first["w"], then["w"])
        (True, False)
    """
    check_settings((FROM_0, {"std": std}))

    @public("fs.optim.add_noise(...).init")
    def init(params: Tree, context: InitContext = InitContext()) -> NoiseState:
        return NoiseState(torch.zeros((), dtype=torch.int64), key.clone())

    @public("fs.optim.add_noise(...).update")
    def update(
        updates: Tree, state: NoiseState, params: Tree = None, context: UpdateContext = UpdateContext()
    ) -> tuple[Tree, NoiseState]:
        check_state(NoiseState, updates, state)
        shardings = assigned_shardings(updates, context.shardings)
        count = int(state.count)
        scale = std(count) if callable(std) else std
        step_key = random.fold_in(state.key, count)
        flat, spec = tree.flatten(updates)
        noisy = [
            _noisy(x, sharding, random.fold_in(step_key, i), scale)
            for i, (x, sharding) in enumerate(zip(flat, shardings, strict=True))
        ]
        return tree.unflatten(spec, noisy), NoiseState(state.count + 1, state.key)

    return ContextTransformation(init, update)


def _noisy(x: Tensor, sharding: NamedSharding | None, key: Tensor, std: float) -> Tensor:
    shape = whole_shape(x, sharding)
    draw = random.normal(key, shape, std=std, dtype=x.dtype)
    if sharding is None:
        return x + draw.tensor(device=x.device)
    local = local_of(x)
    grid = sharding.grid(shape)
    noisy = local.clone() if grid is None else torch.empty_like(local)
    for box, place in boxes.grid_boxes(grid) if grid is not None else ():
        noisy[place] = local[place] + draw.slice(box, device=local.device)
    return like_leaf(x, noisy)
