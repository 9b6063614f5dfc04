"""Runs of small decoders as data: a model, a mesh of any axes, and every choice that must not change a loss.

In: plain values, drawn by `decoder_cases` or written by hand. Out: losses and gradient norms, step by step.
A case pickles, so it can be sent to ranks, and prints as the call that makes it.
Guarantee: `case.train()` on its ranks is `case.alone().train()` on one process, up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from fsharding import optim
from fsharding.base.errors import ScheduleError
from fsharding.comm.counters import Traffic, count_bytes
from fsharding.formats.precision import FP32, Precision
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.mesh.device_mesh import Mesh, data_rank_and_size, own_rank
from fsharding.models.decoder import DecoderConfig, Stack, decoder
from fsharding.models.latent_attention import MLA
from fsharding.models.model import Model
from fsharding.models.moe import Experts
from fsharding.ops.attention import Kind
from fsharding.ops.context_parallel import cut_sequence
from fsharding.optim.base import GradientTransformation
from fsharding.pipeline.schedule import SCHEDULES, Schedule, plan_schedule
from fsharding.pipeline.stages import stages_of
from fsharding.sharding import random
from fsharding.sharding.layout import Layout, plan_layout
from fsharding.sharding.partition_spec import DEFAULT_RULES
from fsharding.sharding.strategy import NO_SHARD, Strategy
from fsharding.testing import device_mesh, strategies
from fsharding.train.foresight import expected_traffic
from fsharding.train.state import TrainState, init_state
from fsharding.train.step import TrainStep, make_train_step
from fsharding.transforms import policies
from fsharding.transforms.policies import POLICIES

__all__ = ["DecoderCase", "decoder_cases"]

_SMALL = DecoderConfig()
_ONE = AbstractMesh(("dp",), (1,))
_RATE = 3e-3
_CLIP = 0.5
_IGNORED = 0.2
_EPS = 1e-3
"""With the usual 1e-8 a gradient of almost nothing moves its weight as much as any other, and rounding with it."""


@dataclass(frozen=True)
class DecoderCase:
    """A run of a decoder with AdamW, warm-up, clipping and masked targets.

    Attributes:
        config: sizes of the decoder.
        mesh: without devices, in any order of ranks.
        strategy: what is cut over the data axes.
        rows: sequences of the global batch.
        length: tokens of each.
        steps: how many.
        microbatches: pieces of each rank's part.
        sequence: as in `models.decoder`.
        attention: as in `models.decoder`.
        whole: dim names that the rules leave whole.
        schedule: of the pipeline, where the mesh has one.
        counts: layers of each stage; by default as even as possible.
        gather: parameters come once a step, or for each microbatch.
        scatter: gradients are reduced once a step, or for each microbatch; by default as `gather`.
        ahead: by how many computes receives and gathers are posted earlier.
        policy: a name of `policies.POLICIES`.
        donate: whether a step may overwrite its state.
        precision: dtypes at rest and of compute.

    Example:
        >>> from tests.decoders import DecoderCase
        >>> config = fs.models.DecoderConfig(vocab_size=7, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
        >>> case = DecoderCase(config, fs.AbstractMesh(("dp",), (2,)), fs.zero(3), rows=4, length=3, steps=2)
        >>> case.ranks, case.alone().train().shape
        (2, torch.Size([2, 2]))
    """

    config: DecoderConfig = _SMALL
    mesh: AbstractMesh = _ONE
    strategy: Strategy = NO_SHARD
    rows: int = 1
    length: int = 1
    steps: int = 1
    microbatches: int = 1
    sequence: bool = False
    attention: Kind = "ring"
    whole: tuple[str, ...] = ()
    schedule: str = "1f1b"
    counts: tuple[int, ...] | None = None
    gather: Literal["step", "microbatch"] = "step"
    scatter: Literal["step", "microbatch"] | None = None
    ahead: int = 1
    policy: str = "save_except_gathered"
    donate: bool = False
    precision: Precision = FP32

    @property
    def ranks(self) -> int:
        """How many ranks it takes to run it."""
        return self.mesh.size

    def alone(self) -> DecoderCase:
        """The same run on one process, without any choice that has to do with ranks."""
        return replace(
            self,
            mesh=_ONE,
            strategy=NO_SHARD,
            microbatches=1,
            sequence=False,
            counts=None,
            policy="save_except_gathered",
        )

    @property
    def model(self) -> Model:
        """The model."""
        return decoder(self.config, sequence=self.sequence, attention=self.attention)

    def planned(self) -> Schedule | None:
        """The schedule; None on a mesh without `pp`."""
        ranks = self.mesh.axis_size("pp")
        if ranks == 1:
            return None
        return plan_schedule(
            self.schedule, ranks, self.microbatches, gather=self.gather, scatter=self.scatter, ahead=self.ahead
        )

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """The layout of the state.

        Args:
            mesh: by default the abstract one; on a rank, `device_mesh(case.mesh)`.
        """
        rules = DEFAULT_RULES.replace(**dict.fromkeys(self.whole))
        schedule = self.planned()
        stages = None if schedule is None else stages_of(self.model, schedule, counts=self.counts)
        where = self.mesh if mesh is None else mesh
        return plan_layout(
            self.model, where, rules, self.strategy, precision=self.precision, stages=stages, tp="replicate"
        )

    def batch(self, step: int, mesh: Mesh) -> dict[str, Tensor]:
        """The tokens and targets of this rank at a step; some targets do not count, other ones on each row."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.config.vocab_size, (self.rows, self.length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        ignored = torch.rand(targets.shape, generator=generator) < _IGNORED
        ignored[0, 0] = False
        targets[ignored] = -100
        index, count = data_rank_and_size(mesh)
        own = {"tokens": tokens[:, :-1].chunk(count)[index], "targets": targets.chunk(count)[index]}
        return cut_sequence(own, mesh=mesh)

    @property
    def optimizer(self) -> GradientTransformation:
        """AdamW with warm-up and clipping."""
        rate = optim.schedules.warmup_cosine(_RATE, 1, 10)
        return optim.chain(optim.clip_by_global_norm(_CLIP), optim.adamw(rate, eps=_EPS, weight_decay=0.1))

    @property
    def options(self) -> dict[str, Any]:
        """What `make_train_step` is given beside the model and the optimizer."""
        policy = policies.POLICIES[self.policy]
        return {
            "microbatches": self.microbatches,
            "schedule": self.planned() or self.schedule,
            "policy": policy,
            "donate": self.donate,
        }

    def traffic(self, layout: Layout, coord: dict[str, int] | None = None) -> Traffic:
        """Predict the messages of a rank in a step: see `expected_traffic`."""
        parts = math.prod(map(self.mesh.axis_size, ("replica", "dp", "ep")))
        tokens = torch.empty(
            self.rows // parts, self.length // self.mesh.axis_size("cp"), dtype=torch.int64, device="meta"
        )
        batch = {"tokens": tokens, "targets": tokens}
        return expected_traffic(self.model, self.optimizer, layout, batch, coord=coord, **self.options)

    def start(
        self, mesh: Mesh, opt: GradientTransformation | None = None, **options: Any
    ) -> tuple[TrainState, TrainStep]:
        """A state, and the step that it is trained with. Collective over all ranks.

        Args:
            mesh: of devices.
            opt: by default `optimizer`.
            options: of the step, beside `options`.
        """
        model, opt = self.model, opt or self.optimizer
        step = make_train_step(model, opt, **{**self.options, **options})
        return init_state(model, opt, random.key(0), self.layout(mesh)), step

    def train(self, *, foresee: bool = False) -> Tensor:
        """Runs it. Collective over all ranks.

        Args:
            foresee: one rank, another one for each case, checks that each step sends what `expected_traffic` predicts.

        Returns:
            float32[steps, 2]: loss and gradient norm of each step.
        """
        mesh = device_mesh(self.mesh)
        state, step = self.start(mesh)
        result = list[Tensor]()
        checks = foresee and zlib.crc32(repr(self).encode()) % self.ranks == own_rank()
        expected = self.traffic(state.layout) if checks else None
        for number in range(self.steps):
            with count_bytes() as traffic:
                state, metrics = step(state, self.batch(number, mesh))
            assert expected is None or self._seen(traffic) == self._seen(expected), (traffic, expected)
            result.append(torch.stack((metrics.loss, metrics.grad_norm)))
        return torch.stack(result)

    def _seen(self, traffic: Traffic) -> dict[tuple[str, ...], tuple[int, int | None]]:
        """Calls and bytes by axes, without the bytes over `ep` where these depend on the choices of routers."""
        experts = self.config.experts
        open_ = [("ep",)] if experts is not None and experts.active < experts.count else []
        return {axes: (s.calls, None if axes in open_ else s.bytes) for axes, s in traffic.by_axes.items()}


@functools.cache
def _fitting_schedules(name: str, ranks: int) -> tuple[Schedule, ...]:
    """Schedules of a kind for a size of `pp`, each with a number of microbatches that it can have; the least first."""
    result: list[Schedule] = []
    for count in sorted({1, 2, ranks, 2 * ranks, 2 * ranks + 1}):
        with contextlib.suppress(ScheduleError):
            result.append(plan_schedule(name, ranks, count))
    return tuple(result)


@functools.cache
def _expert_sizes(ep: int, tp: int) -> tuple[Experts | None, ...]:
    """Mixtures of experts that axes of these sizes can cut, and None, for a dense decoder; the simplest first.

    None has a balance loss, which depends on how a batch is cut into microbatches.
    """
    one, every = Experts(ep, 1, tp), Experts(ep, ep, tp)
    some = Experts(2 * ep, 1, 3 * tp, normalize=False, z=1e-2)
    biased = Experts(
        4 * ep, 2, 2 * tp, shared=1, score="sigmoid", scale=2.5, groups=2, kept_groups=1, z=1e-2, bias_rate=1e-2
    )
    return (None, one, every, some, biased) if ep > 1 else (*[None] * 4, some, biased)


@functools.cache
def _decoder_kinds(layers: int, heads: int, tp: int) -> tuple[DecoderConfig, ...]:
    """Decoders with so many layers and heads, which `tp` can cut, the simplest first; other sizes may be replaced."""
    plain = DecoderConfig(layers=layers, heads=heads, kv_heads=heads, dim=2 * heads)
    groups = [group for group in range(1, heads + 1) if heads % group == 0]
    each = heads // tp
    fitting = [replace(plain, kv_heads=heads // n) for n in groups if each % n == 0 or n % each == 0]
    biased = [replace(c, bias=True, qk_norm=True, head_size=6) for c in fitting]
    fused = [replace(c, bias=True, fused=True) for c in fitting if c.kv_heads % tp == 0]
    latent = MLA(heads, q_rank=3, kv_rank=2, plain_dim=2, rotary_dim=2, value_dim=3)
    unlike = (Stack("first", 1, latent), Stack("second", layers - 1, intermediate_size=4))
    others = [replace(plain, attention=latent)] + ([replace(plain, stacks=unlike)] if layers > 1 else [])
    return (*fitting, *fitting, *biased, *fused, *others)


# ---------------------------------------------------------------------------------------------------- cases that are drawn
_SHARDINGS = strategies.strategies()
# Hypothesis looks at each new strategy object, which takes longer than to draw from it: those of cases are kept.
_pick = functools.cache(st.sampled_from)
_upto = functools.cache(functools.partial(st.integers, 0))
_flag = st.booleans()
_SEVERAL = ((), (2,), (3,), (4,), *((2, 2),) * 3, (6,), (3, 2), (2, 3), (8,), (4, 2), (2, 4), *((2, 2, 2),) * 3)


@st.composite
def decoder_cases(draw, max_ranks: int = 8, steps: int = 3) -> DecoderCase:
    """Runs of small decoders on any mesh, with every choice that must not change a loss; shrinks to one rank.

    Args:
        draw: given by Hypothesis.
        max_ranks: most ranks.
        steps: how many.
    """
    sizes = draw(_pick(tuple(sizes for sizes in _SEVERAL if math.prod(sizes) <= max_ranks)))
    mesh = (
        AbstractMesh(tuple(draw(st.permutations(AXES))[: len(sizes)]), sizes) if sizes else AbstractMesh(("dp",), (1,))
    )
    stages, ep, cp, tp = map(mesh.axis_size, ("pp", "ep", "cp", "tp"))
    data = math.prod(map(mesh.axis_size, ("replica", "dp", "ep")))
    schedule = draw(_pick(_fitting_schedules(draw(_pick(SCHEDULES)) if stages > 1 else "1f1b", stages)))
    layers = schedule.stages + draw(_upto(2))
    sequence = draw(_flag)
    attention = draw(_pick(("ring", "gather", "ulysses")))
    heads = tp * (cp if attention == "ulysses" else 1) * (draw(_upto(1)) + 1)
    config = replace(
        draw(_pick(_decoder_kinds(layers, heads, tp))),
        vocab_size=draw(_pick((2, 7, 50))),
        dim=heads * draw(_pick((4, 6, 8))),  # of 2, a norm that meets a vector near 0 blows rounding up
        intermediate_size=draw(_pick((2, 5, 12))),
        tied=draw(_flag),
        experts=draw(_pick(_expert_sizes(ep, tp))),
    )
    whole = (("kv_heads",),) if sequence else (("kv_heads",), ("mlp",), ("vocab",), ("heads", "kv_heads"))
    return DecoderCase(
        config,
        mesh,
        draw(_SHARDINGS),
        rows=data * schedule.microbatches * (draw(_upto(1)) + 1),
        length=(2 * cp if cp > 1 else 1) * (tp if sequence else 1) * (draw(_upto(2)) + 1),
        steps=steps,
        microbatches=schedule.microbatches,
        sequence=sequence,
        attention=attention,
        whole=draw(_pick(((), *whole))),
        schedule=schedule.name,
        counts=_uneven(draw, layers, schedule.stages) if draw(_flag) else None,
        gather=draw(_pick(("step", "microbatch"))),
        scatter=draw(_pick((None, "step", "microbatch"))),
        ahead=draw(_pick((1, 0, 2))),
        policy=draw(_pick(tuple(POLICIES))),
        donate=draw(_flag),
    )


def _uneven(draw, layers: int, stages: int) -> tuple[int, ...]:
    """Any number of layers for each stage, also none."""
    ends = sorted(draw(_upto(layers)) for _ in range(stages - 1))
    return tuple(b - a for a, b in itertools.pairwise((0, *ends, layers)))
