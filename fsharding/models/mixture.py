"""The feed-forward part of a block that is a mixture of experts, as the decoder takes its parts.

In: normalized activations [B, T, D] and the leaves of a block, under `experts`. Out: what the part adds to the stream,
and what its router adds to the loss. `ep` cuts experts, `tp` their hidden dim.
Law: that of `models.moe`, which computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fsharding.models.block_parts import Cuts, Draws, How
from fsharding.models.moe import Experts, expert_draws, expert_names, mixture, uncut
from fsharding.random import Draw
from fsharding.tree import Tree

__all__ = ["Mixture"]


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts as a part of a block.

    Attributes:
        experts: sizes, and how tokens find their experts.
    """

    experts: Experts

    def init(self, dim: int, draws: Draws) -> dict[str, Tree]:
        """First values of the leaves; see `Part`."""

        def weight(layers: int, *shape: int, std: float = 0.02) -> Draw:
            return draws.normal(*shape, std=std)

        (layers,) = draws.rows
        return {"experts": expert_draws(self.experts, layers, dim, weight, draws.narrow)}

    def names(self) -> dict[str, Tree]:
        """Dim names of the leaves; see `Part`."""
        return {"experts": expert_names(self.experts)}

    def apply(self, params: Tree, x_BTD: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
        """The mixture of one block; see `Part`."""
        return mixture(self.experts, params["experts"], x_BTD, sequence_dim=how.sequence)

    def objections(self, cuts: Cuts) -> list[str]:
        """Why the mesh cannot cut the experts; see `Part`."""
        return uncut(self.experts, cuts.mesh, cuts.rules)
