"""The dense feed-forward part of a block: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fsharding import ops
from fsharding.base.tree import Tree
from fsharding.models.block_parts import BlockSettings, Init, MeshRules, columns, rows
from fsharding.sharding.partition_spec import DimName, Fused
from fsharding.sharding.random import LazyTensor

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense:
    """Sizes of a dense SwiGLU feed-forward part.

    Attributes:
        intermediate_size: F, the hidden dim.
        fused: Whether gate and up are one leaf, `gate_up`, and one matmul.

    Example:
        >>> config = fs.models.DecoderConfig(intermediate_size=384)
        >>> attention, feed = config.parts()
        >>> feed
        Dense(intermediate_size=384, fused=False)
    """

    intermediate_size: int
    fused: bool = False

    def init(self, dim: int, values: Init) -> dict[str, LazyTensor]:
        """Create the initial values of a stack of blocks of width `dim`."""
        size = self.intermediate_size
        sizes = {"gate_up": 2 * size} if self.fused else {"gate": size, "up": size}
        wide = {name: values.normal(rows, dim) for name, rows in sizes.items()}
        return {**wide, "down": values.into_stream(size, dim)}

    def names(self) -> dict[str, tuple[DimName, ...]]:
        """Return the dim names of the leaves, "layers" first."""
        if self.fused:
            gate_up = ("layers", Fused("mlp", (self.intermediate_size, self.intermediate_size)), "embed")
            return {"gate_up": gate_up, "down": ("layers", "mlp", "embed")}
        return dict.fromkeys(("gate", "up", "down"), ("layers", "mlp", "embed"))

    def apply(self, params: Tree, x_BTD: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor | None]:
        """Compute `down(silu(gate(x)) * up(x))`."""
        size = self.intermediate_size
        full = params["down"].shape[0] == size
        weights = [params[name] for name in ("gate_up", "gate", "up") if name in params]
        result = columns(x_BTD, weights, full=full, settings=settings)
        gate_BTF, up_BTF = ops.split_fused(result[0], (size, size)) if self.fused else result
        return rows(F.silu(gate_BTF) * up_BTF, params["down"], full=full, settings=settings), None

    def objections(self, over: MeshRules) -> list[str]:
        """Explain why the mesh can't shard the hidden dim."""
        too_small = over.tp > 1 and self.intermediate_size < 2
        return [f"mlp of size {self.intermediate_size}: less than 2"] if too_small else []
