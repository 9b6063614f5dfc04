"""A mixture of experts instead of the MLP of a block: router, routed and shared experts, and their balance."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fsharding import ops
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import public
from fsharding.base.tree import Tree
from fsharding.formats.quantized import dequantize
from fsharding.mesh.device_mesh import axis_size
from fsharding.models.block_parts import BlockSettings, Cuts, Draws
from fsharding.ops.router import misfits

__all__ = ["Experts", "Mixture"]


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts, and how its tokens find them; see `ops.route`.

    Attributes:
        count: X, experts a layer.
        active: experts of each token.
        intermediate_size: F, of one expert.
        shared: experts that see every token, as one MLP of size `shared * intermediate_size`.
        score: "softmax" over experts, or "sigmoid" of each.
        normalize: weights of a token sum to 1, before `scale`.
        scale: factor of the weights.
        groups: experts are in so many groups, of which a token sees some.
        kept_groups: how many.
        balance: factor of `ops.balance_loss` in the loss of a token. Shares of the experts are those of one microbatch,
            of all ranks: with it, and only with it, losses depend on how a batch is cut into microbatches.
        z: factor of `ops.z_loss`.
        bias_rate: by how much a step moves the bias of each expert's score against its load (Wang et al. 2024); None
            for a router without biases, 0.0 for biases that stay.
        capacity: how many tokens of a rank an expert takes, as a multiple of an equal share; see `ops.dispatch`. A step
            then reads nothing of the device and can be captured, and is refused if an expert has more, unless it may
            drop them. None takes all tokens, whose numbers the host reads. Generation takes all tokens anyway.
        drop: with a capacity, each expert leaves out the tokens of each rank for which its score is lowest, and
            `metrics.dropped` counts them. With it, and only with it, results depend on the number of data ranks.

    Example:
        >>> experts = fs.models.Experts(count=8, active=2, intermediate_size=32, shared=1, balance=1e-2)
        >>> config = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, experts=experts)
        >>> params = fs.models.decoder(config).init(fs.random.key(0))
        >>> params["blocks"]["experts"]["gate"].shape
        (2, 8, 32, 8)
    """

    count: int
    active: int
    intermediate_size: int
    shared: int = 0
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    balance: float = 0.0
    z: float = 0.0
    bias_rate: float | None = None
    capacity: float | None = None
    drop: bool = False

    @public
    def __post_init__(self) -> None:
        least = {"count": 1, "intermediate_size": 1, "shared": 0, "balance": 0, "z": 0, "bias_rate": 0}
        least["capacity"] = 0 if self.drop else 1
        given = {name: getattr(self, name) for name in least}
        wrong = [f"{k}={v}: at least {least[k]}" for k, v in given.items() if v is not None and not v >= least[k]]
        if self.drop and not self.capacity:
            wrong.append(f"drop=True with capacity={self.capacity}: give a capacity above 0, such as 1.25")
        wrong += misfits(self.count, self.active, self.score, self.groups, self.kept_groups)
        if wrong:
            raise ConfigError(message("has numbers that do not fit.", wrong))


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts as a part of a block."""

    experts: Experts

    def init(self, dim: int, draws: Draws) -> dict[str, Tree]:
        """First values of the leaves of a stack of blocks of width `dim`."""
        c = self.experts

        def mlp(*sizes: int) -> dict[str, Tree]:
            return {"gate": draws.normal(*sizes), "up": draws.normal(*sizes), "down": draws.into_stream(*sizes)}

        leaves: dict[str, Tree] = {"router": draws.normal(c.count, dim), **mlp(c.count, c.intermediate_size, dim)}
        if c.bias_rate is not None:
            leaves["bias"] = draws.zeros(c.count)
        if c.shared:
            leaves["shared"] = mlp(c.shared * c.intermediate_size, dim)
        return {"experts": leaves}

    def names(self) -> dict[str, Tree]:
        """Dim names of the leaves, "layers" first."""
        mlp = ("gate", "up", "down")
        names: dict[str, Tree] = {"router": ("layers", None, "embed")}
        names |= dict.fromkeys(mlp, ("layers", "expert", "mlp", "embed"))
        if self.experts.bias_rate is not None:
            names["bias"] = ("layers", None)
        if self.experts.shared:
            names["shared"] = dict.fromkeys(mlp, ("layers", "mlp", "embed"))
        return {"experts": names}

    def apply(self, params: Tree, x_BTD: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor | None]:
        """The mixture of one block. Collective along `ep` and `tp` if they shard experts or F."""
        # Logits are computed in float32 at least, outside of the region over `tp`; all of the rest is inside.
        c, params, sequence_dim = self.experts, params["experts"], settings.sequence
        cut = params["gate"].shape[1] != c.intermediate_size and axis_size("tp") > 1
        router_XD = dequantize(params["router"])
        router_XD = router_XD if sequence_dim is None else ops.copy_to_tp(router_XD)
        high = wide(x_BTD.dtype)
        logits_BTX = F.linear(x_BTD.to(high), router_XD.to(high))
        if cut:
            x_BTD, logits_BTX = (ops.copy_to_tp(y, sequence_dim=sequence_dim) for y in (x_BTD, logits_BTX))
        x_ND, logits_NX = (rearrange(y, "b t d -> (b t) d") for y in (x_BTD, logits_BTX))
        # The bias chooses experts and gets no gradient by it; `record_load` gives it the load of this call instead.
        bias_X = params.get("bias")
        routing = ops.route(
            logits_NX, top_k=c.active, score=c.score, bias=bias_X, normalize=c.normalize, scale=c.scale,
            groups=c.groups, kept_groups=c.kept_groups,
        )  # fmt: skip
        extra = _extra_loss(c, routing, logits_NX, cut=cut)
        if bias_X is not None:
            routing = ops.record_load(routing, bias_X)
        axis = "ep" if params["gate"].shape[0] != c.count else ()
        gate, up, down = (params[name] for name in ("gate", "up", "down"))
        y_ND = ops.experts_swiglu(x_ND, gate, up, down, routing, axis=axis, tp=None, capacity=c.capacity, drop=c.drop)
        if c.shared:
            shared = params["shared"]
            hidden_NF = F.silu(ops.scaled_matmul(x_ND, shared["gate"], 1)) * ops.scaled_matmul(x_ND, shared["up"], 1)
            y_ND = y_ND + ops.scaled_matmul(hidden_NF, shared["down"], 0)
        y_BTD = y_ND.view_as(x_BTD)
        return ops.reduce_from_tp(y_BTD, sequence_dim=sequence_dim) if cut else y_BTD, extra

    def objections(self, cuts: Cuts) -> list[str]:
        """Why the mesh cannot cut the experts."""
        c, sizes = self.experts, cuts.mesh
        along = [axis for axis in cuts.rules.get("expert", ()) if sizes.axis_size(axis) > 1]
        wrong: list[str] = []
        if {*along} - {"ep"}:
            wrong.append(f"rule expert={', '.join(along)}: tokens go to their experts along ep alone")
        elif along and c.count % sizes.axis_size("ep"):
            wrong.append(f"{c.count} experts: no multiple of ep={sizes.axis_size('ep')}")
        if "tp" in cuts.rules.get("mlp", ()) and c.intermediate_size % cuts.tp:
            wrong.append(f"{c.intermediate_size} intermediate_size of an expert: no multiple of tp={cuts.tp}")
        return wrong


def _extra_loss(c: Experts, routing: ops.Routing, logits_NX: Tensor, *, cut: bool) -> Tensor:
    """The router's term of the loss; inside a region each rank has an equal part of it."""
    # Tensors, not numbers: under forward over reverse torch takes a 0-d float32 times a number for a float64.
    extra = logits_NX.new_zeros(())
    if c.balance:
        extra = extra + logits_NX.new_full((), c.balance) * ops.balance_loss(routing)[0]
    if c.z:
        extra = extra + logits_NX.new_full((), c.z) * ops.z_loss(logits_NX)[0]
    return ops.reduce_from_tp(extra / axis_size("tp")) if cut and extra.requires_grad else extra
