"""A mixture of experts instead of a block's MLP: router, routed and shared experts, and load balancing."""

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
from fsharding.models.block_parts import BlockSettings, Init, MeshRules
from fsharding.ops.router import misfits

__all__ = ["Experts", "Mixture"]


@dataclass(frozen=True)
class Experts:
    """Sizes and routing of a mixture of experts; `ops.route` describes the router.

    Attributes:
        count: X, the number of routed experts per layer.
        active: Number of routed experts per token.
        intermediate_size: F, the hidden dim of one expert.
        shared: Number of experts that every token uses, computed as one MLP of size `shared * intermediate_size`.
        score: "softmax" over all experts, or "sigmoid" of each logit.
        normalize: Whether the weights of a token sum to 1, before `scale`.
        scale: Factor of the weights.
        groups: Number of equal groups that experts are in.
        kept_groups: Number of groups that a token may use.
        balance: Factor of `ops.balance_loss` per token. It is computed over one microbatch of all ranks, so the loss
            depends on the number of microbatches if, and only if, this is positive.
        z: Factor of `ops.z_loss` per token.
        bias_rate: Step size of the bias of each expert's score, against its load (Wang et al. 2024,
            arXiv:2408.15664). None is a router without biases; 0.0 keeps them constant.
        capacity: Most tokens per expert and rank, as a multiple of an equal share; see `ops.dispatch`. A step then has
            static shapes and can be captured, and fails if an expert gets more, unless `drop`. None has no limit, but
            the host reads the counts. Generation has no limit.
        drop: Whether each expert drops a rank's tokens above its capacity, those with the lowest scores;
            `metrics.dropped` counts them. Results depend on the number of data ranks if, and only if, this is set.

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
            wrong.append(f"drop=True with capacity={self.capacity}: needs a capacity above 0, such as 1.25")
        wrong += misfits(self.count, self.active, self.score, self.groups, self.kept_groups)
        if wrong:
            mend = "Write, for example, fs.models.Experts(count=8, active=2, intermediate_size=32)."
            raise ConfigError(message("has numbers that do not fit.", wrong, mend))


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts as a part of a block."""

    experts: Experts

    def init(self, dim: int, values: Init) -> dict[str, Tree]:
        """Create the initial values of a stack of blocks of width `dim`."""
        c = self.experts

        def mlp(*sizes: int) -> dict[str, Tree]:
            return {"gate": values.normal(*sizes), "up": values.normal(*sizes), "down": values.into_stream(*sizes)}

        leaves: dict[str, Tree] = {"router": values.normal(c.count, dim), **mlp(c.count, c.intermediate_size, dim)}
        if c.bias_rate is not None:
            leaves["bias"] = values.zeros(c.count)
        if c.shared:
            leaves["shared"] = mlp(c.shared * c.intermediate_size, dim)
        return {"experts": leaves}

    def names(self) -> dict[str, Tree]:
        """Return the dim names of the leaves, "layers" first."""
        mlp = ("gate", "up", "down")
        names: dict[str, Tree] = {"router": ("layers", None, "embed")}
        names |= dict.fromkeys(mlp, ("layers", "expert", "mlp", "embed"))
        if self.experts.bias_rate is not None:
            names["bias"] = ("layers", None)
        if self.experts.shared:
            names["shared"] = dict.fromkeys(mlp, ("layers", "mlp", "embed"))
        return {"experts": names}

    def apply(self, params: Tree, x_BTD: Tensor, settings: BlockSettings) -> tuple[Tensor, Tensor | None]:
        """Compute the mixture and its router loss. Collective along `ep` and `tp` if they shard experts or F."""
        # Logits are computed in float32 or wider, before the tensor-parallel region; everything after is inside it.
        c, params, sequence_dim = self.experts, params["experts"], settings.sequence
        sharded = params["gate"].shape[1] != c.intermediate_size and axis_size("tp") > 1
        router_XD = dequantize(params["router"])
        router_XD = router_XD if sequence_dim is None else ops.copy_to_tp(router_XD)
        high = wide(x_BTD.dtype)
        logits_BTX = F.linear(x_BTD.to(high), router_XD.to(high))
        if sharded:
            x_BTD, logits_BTX = (ops.copy_to_tp(y, sequence_dim=sequence_dim) for y in (x_BTD, logits_BTX))
        x_ND, logits_NX = (rearrange(y, "b t d -> (b t) d") for y in (x_BTD, logits_BTX))
        # The bias only selects experts, so it has no gradient; `record_load` makes the load of this call its gradient.
        bias_X = params.get("bias")
        routing = ops.route(
            logits_NX, top_k=c.active, score=c.score, bias=bias_X, normalize=c.normalize, scale=c.scale,
            groups=c.groups, kept_groups=c.kept_groups,
        )  # fmt: skip
        extra = _extra_loss(c, routing, logits_NX, sharded=sharded)
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
        return ops.reduce_from_tp(y_BTD, sequence_dim=sequence_dim) if sharded else y_BTD, extra

    def objections(self, over: MeshRules) -> list[str]:
        """Explain why the mesh can't shard the experts."""
        c, sizes = self.experts, over.mesh
        along = [axis for axis in over.rules.get("expert", ()) if sizes.axis_size(axis) > 1]
        wrong: list[str] = []
        if {*along} - {"ep"}:
            wrong.append(f"rule expert={', '.join(along)}: only ep can shard experts")
        elif along and c.count % sizes.axis_size("ep"):
            wrong.append(f"{c.count} experts: not a multiple of ep={sizes.axis_size('ep')}")
        if "tp" in over.rules.get("mlp", ()) and c.intermediate_size % over.tp:
            wrong.append(f"intermediate_size {c.intermediate_size} of an expert: not a multiple of tp={over.tp}")
        return wrong


def _extra_loss(c: Experts, routing: ops.Routing, logits_NX: Tensor, *, sharded: bool) -> Tensor:
    """Compute the auxiliary losses; in a tensor-parallel region each rank contributes an equal share."""
    # Factors are tensors: under forward-over-reverse, torch promotes a 0-d float32 times a Python number to float64.
    extra = logits_NX.new_zeros(())
    if c.balance:
        extra = extra + logits_NX.new_full((), c.balance) * ops.balance_loss(routing)[0]
    if c.z:
        extra = extra + logits_NX.new_full((), c.z) * ops.z_loss(logits_NX)[0]
    return ops.reduce_from_tp(extra / axis_size("tp")) if sharded and extra.requires_grad else extra
