"""Decoders that train for ten steps on any mesh, and the comparison with the same run on one process.

In: a model's config, a mesh's axes, a strategy, options of the step and of the model.
Out: float32[STEPS, 2], the loss and the gradient norm of each step.
Guarantee: no mesh and no strategy changes them by more than rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import AXES, AbstractMesh
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.models import Experts
from fsharding.pipeline.schedule import SCHEDULES
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.decoders import DecoderCase
from tests.helpers import mesh_of

CONFIG = fs.models.DecoderConfig(vocab_size=50, dim=32, layers=2, heads=8, kv_heads=2, intermediate_size=36)
DEEP = fs.models.DecoderConfig(vocab_size=50, dim=16, layers=8, heads=4, kv_heads=2, intermediate_size=20)
# Biases move by as much as scores differ, so that they change who gets which token at every step.
EXPERTS = Experts(4, 2, 12, shared=1, score="sigmoid", scale=2.5, groups=2, kept_groups=2, z=1e-2, bias_rate=1e-2)
MODELS: dict[str, fs.models.DecoderConfig] = {"dense": DEEP, "experts": replace(DEEP, experts=EXPERTS)}

TWO, FOUR, ALONG = {"microbatches": 2}, {"microbatches": 4}, {"sequence": True}
KINDS = ("ring", "gather", "ulysses")
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2": ({"tp": 2}, {}),
    "tp4": ({"tp": 4}, {}),
    "tp2 along the sequence": ({"tp": 2}, ALONG),
    **{f"cp{n} {kind}": ({"cp": n}, {"attention": kind}) for n in (2, 4) for kind in KINDS},
    "ep2": ({"ep": 2}, {}),
    "ep4": ({"ep": 4}, {}),
    **{f"pp2 {name}": ({"pp": 2}, {"microbatches": 4, "schedule": name}) for name in SCHEDULES},
    **{f"pp4 {name}": ({"pp": 4}, {"microbatches": 8, "schedule": name}) for name in SCHEDULES},
    "dp2 tp2": ({"dp": 2, "tp": 2}, ALONG),
    "dp2 cp2": ({"dp": 2, "cp": 2}, {}),
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "dp2 pp2": ({"dp": 2, "pp": 2}, TWO),
    "tp2 pp2": ({"tp": 2, "pp": 2}, {**TWO, **ALONG, "schedule": "interleaved"}),
    "cp2 pp2": ({"cp": 2, "pp": 2}, {**FOUR, "schedule": "dualpipev"}),
    "tp2 cp2 dp2": ({"tp": 2, "cp": 2, "dp": 2}, ALONG),
    "pp2 dp2 tp2": ({"pp": 2, "dp": 2, "tp": 2}, {**TWO, **ALONG, "schedule": "zbv"}),
    "pp2 ep2 dp2": ({"pp": 2, "ep": 2, "dp": 2}, TWO),
    "pp2 tp2 cp2": ({"pp": 2, "tp": 2, "cp": 2}, TWO),
    "replica2 dp2 tp2": ({"replica": 2, "dp": 2, "tp": 2}, {}),
}
"""Every axis alone and with others: sizes by axis, and options of the step and of the model."""

ROWS, POSITIONS, STEPS = 8, 8, 10
# With the usual 1e-8 a gradient of almost nothing moves its weight as much as any, so that even one process gives other
# norms from the third digit on when it cuts its batch in two: rounding alone.
RATE, EPS = 3e-3, 1e-3


def batches(mesh: DeviceMesh, vocab: int, packed: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's part of STEPS batches, in which some targets do not count; `packed` adds documents."""
    index, count = data_rank_and_size(mesh)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(vocab, (ROWS, POSITIONS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        batch = {"tokens": tokens[:, :-1], "targets": targets}
        if packed:
            batch["documents"] = (torch.rand(targets.shape, generator=generator) < 0.3).cumsum(1)
        yield ops.cut_sequence({name: x.chunk(count)[index] for name, x in batch.items()}, mesh=mesh)


def optimizer() -> fs.optim.GradientTransformation:
    """AdamW with a warm-up, after a clip that clips."""
    rates = fs.optim.schedules.warmup_cosine(RATE, 2, 20)
    return fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(rates, eps=EPS, weight_decay=0.1))


def train(
    axes: Mapping[str, int],
    strategy: fs.Strategy,
    *,
    order: Sequence[str] = AXES,
    rules: fs.AxisRules = fs.DEFAULT_RULES,
    config: fs.models.DecoderConfig = CONFIG,
    microbatches: int = 1,
    schedule: Any = "1f1b",
    gather: str = "step",
    policy: Any = fs.policies.save_except_gathered,
    changed: Callable[[Any], Any] | None = None,
    packed: bool = False,
    **model_options: Any,
) -> torch.Tensor:
    """Losses and gradient norms on this rank; `changed` makes another model of the decoder."""
    mesh, model = mesh_of(axes, order=order), fs.models.decoder(config, **model_options)
    model = model if changed is None else changed(model)
    stages, ranks = None, axes.get("pp", 1)
    if ranks > 1:
        schedule = fs.pipeline.plan_schedule(schedule, ranks, microbatches, gather=gather)
        stages = fs.pipeline.stages_of(model, schedule)
    layout = fs.plan_layout(model, mesh, rules, strategy, stages=stages, tp="replicate")  # rules may leave dims whole
    opt = optimizer()
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    step, rows = fs.make_train_step(model, opt, microbatches=microbatches, schedule=schedule, policy=policy), []
    for batch in batches(mesh, config.vocab_size, packed):
        state, metrics = step(state, batch)
        rows.append((metrics.loss, metrics.grad_norm))
    return torch.tensor(rows)


def on_ranks(axes: Mapping[str, int], strategy: fs.Strategy, **options: Any) -> torch.Tensor:
    """The run on as many ranks as the axes have: rank 0's rows, after a check that all ranks have the same bits."""
    runs = run_ranks(train, math.prod(axes.values()), axes, strategy, **options)
    for other in runs[1:]:
        assert_bitwise_equal(runs[0], other, "the ranks' results")
    return runs[0]


@functools.cache
def alone(config: fs.models.DecoderConfig = CONFIG, **options: Any) -> torch.Tensor:
    """The run on one process, without a process group."""
    return train({"dp": 1}, fs.zero(0), config=config, **options)


def close(run: torch.Tensor, config: fs.models.DecoderConfig = CONFIG, **options: Any) -> None:
    """A run has the losses and norms of one process."""
    torch.testing.assert_close(run, alone(config, **options), rtol=1e-5, atol=0)


# -------------------------------------------------------------------------------------------------------- axes together
FIVE = ("pp", "dp", "cp", "ep", "tp")
PAIRS, TRIPLES, FOURS = list(itertools.combinations(AXES, 2)), *(list(itertools.combinations(FIVE, n)) for n in (3, 4))

# As long and as deep on all meshes, so that there is one reference for each model.
RUN = DecoderCase(replace(DEEP, layers=4), rows=16, length=8, steps=3)
RUNS = {"dense": RUN, "experts": replace(RUN, config=replace(RUN.config, experts=EXPERTS))}
TURNS = ("1f1b", "zbv", "interleaved", "dualpipev")


def case_of(axes, model=""):
    """A run on a mesh of axes of size two: schedules, kinds of attention and, without `ep`, models take turns."""
    turn = sum(1 << AXES.index(axis) for axis in axes)
    model = model or ("experts" if "ep" in axes or turn % 3 == 0 else "dense")
    case = replace(RUNS[model], mesh=AbstractMesh(axes, (2,) * len(axes)), sequence="tp" in axes)
    if "cp" in axes:
        case = replace(case, attention=KINDS[turn % 3])
    if "pp" in axes:
        name = TURNS[turn % len(TURNS)]
        case = replace(case, microbatches=4, schedule=name, gather="microbatch" if name == "interleaved" else "step")
    return case
