"""torch's own answers where it has them, on the same weights: tensor parallel modules, the loss, pipeline schedules."""

import functools
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import fsharding as fs
from fsharding import ops
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import full

B, T, D, HIDDEN, VOCAB = 2, 6, 16, 24, 30


# ------------------------------------------------------------------------------------------------------ tensor parallel
def mlp():
    torch.manual_seed(0)
    linear = functools.partial(nn.Linear, bias=False)
    return nn.ModuleDict(
        {"table": nn.Embedding(VOCAB, D), "up": linear(D, HIDDEN), "down": linear(HIDDEN, D), "head": linear(D, VOCAB)}
    )


def tokens():
    return torch.randint(VOCAB, (2, B, T), generator=torch.Generator().manual_seed(1)).unbind(0)


def in_dtensors():
    """The loss and this rank's part of each gradient from modules that torch cuts."""
    inputs, targets = tokens()
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(mlp(), init_device_mesh("cpu", (2,)), plan)
    x = model["table"](inputs)
    x = x + model["down"](F.silu(model["up"](x)))
    with loss_parallel():
        loss = F.cross_entropy(model["head"](x).flatten(0, 1), targets.flatten())
        loss.backward()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return loss.detach(), {
        name: w.grad.redistribute(placements=w.placements).to_local() for name, w in model.named_parameters()
    }


def in_regions():
    """The same from `fs.ops`."""
    inputs, targets = tokens()
    mesh = fs.make_mesh(device="cpu", tp=2, timeout=timedelta(seconds=20))
    dims = {"table.weight": 0, "up.weight": 0, "down.weight": 1, "head.weight": 0}
    rank = torch.distributed.get_rank()
    mine = {
        name: w.detach().chunk(2, dims[name])[rank].clone().requires_grad_() for name, w in mlp().named_parameters()
    }
    with fs.set_mesh(mesh):
        x = ops.embedding(inputs, mine["table.weight"], vocab=VOCAB)
        (hidden,) = ops.column_linear(x, mine["up.weight"])
        x = x + ops.row_linear(F.silu(hidden), mine["down.weight"].T)
        (logits,) = ops.column_linear(x, mine["head.weight"])
        loss = ops.cross_entropy(logits, targets, vocab=VOCAB).mean()
        grads = torch.autograd.grad(loss, [*mine.values()])
    return loss.detach(), dict(zip(mine, grads, strict=True))


def test_tensor_parallel_modules_and_loss_are_those_of_torch():
    for theirs, ours in zip(run_ranks(in_dtensors, 2), run_ranks(in_regions, 2), strict=True):
        assert_trees_close(ours, theirs, rtol=1e-5, atol=1e-8)


# ------------------------------------------------------------------------------------------------------------ pipelines
CONFIG = fs.models.DecoderConfig(vocab_size=VOCAB, dim=D, layers=8, heads=4, kv_heads=2, intermediate_size=HIDDEN)
MODEL = fs.models.decoder(CONFIG)
THEIRS = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


class Part(nn.Module):
    """The layers of a stage as a module, whose last one gives logits."""

    def __init__(self, params, layers, first, last):
        super().__init__()
        own = {f"{name}.{i}": w[i] for name, w in params["blocks"].items() for i in layers}
        own |= {"table": params["embed"]["table"]} if first else {}
        own |= {name: params["head"][name] for name in ("norm", "unembed")} if last else {}
        self.layers, self.first, self.last = layers, first, last
        self.own = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(w.clone()) for name, w in own.items()})

    def forward(self, x):
        if self.first:
            x = MODEL.embed({"table": self.own["table"]}, {"tokens": x}).x
        for i in self.layers:
            x = MODEL.block({name: self.own[f"{name}_{i}"] for name in MODEL.names["blocks"]}, x).x
        return F.linear(ops.rms_norm(x, self.own["norm"]), self.own["unembed"]) if self.last else x


def batch(ranks):
    """Two rows for each microbatch; there are twice as many of these as stages in a row."""
    inputs, targets = torch.randint(VOCAB, (2, 4 * ranks, T), generator=torch.Generator().manual_seed(1)).unbind(0)
    return inputs, targets.contiguous()


def piped(name, ranks):
    """The loss and the gradients on this rank from our schedule, by name of leaf and layer."""
    mesh = fs.make_mesh(device="cpu", pp=ranks, timeout=timedelta(seconds=20))
    schedule = fs.pipeline.plan_schedule(name, ranks, 2 * ranks)
    layout = fs.plan_layout(MODEL, mesh, strategy=fs.zero(0), stages=fs.pipeline.stages_of(MODEL, schedule))
    state = fs.init_state(MODEL, fs.sgd(0.1), fs.random.key(0), layout)
    pieces = [
        dict(zip(("tokens", "targets"), piece, strict=True))
        for piece in zip(*(x.chunk(2 * ranks) for x in batch(ranks)), strict=True)
    ]
    grads, total, weight = fs.pipeline.pipeline_grads(MODEL, schedule, layout, state.params, pieces, precision=fs.FP32)
    rank, found = torch.distributed.get_rank(), {}
    layers = fs.pipeline.stages_for(schedule, CONFIG.layers)[rank]
    for block, grad in grads["blocks"].items():
        found |= {f"{block}_{layer}": g for layer, g in zip(layers, local_of(grad), strict=True)}
    ends = {"table": grads["embed"]["table"], **grads["head"]}
    found |= {end: local_of(g) for end, g in ends.items() if local_of(g).numel()}
    return total / weight, {path: g / weight for path, g in found.items()}


def piped_by_torch(name, ranks):
    """The same from torch's stages and schedule."""
    ours, rank = fs.pipeline.plan_schedule(name, ranks, 2 * ranks), torch.distributed.get_rank()
    whole = fs.init_state(
        MODEL,
        fs.sgd(0.1),
        fs.random.key(0),
        fs.plan_layout(MODEL, fs.make_mesh(device="cpu", dp=ranks), strategy=fs.zero(0)),
    )
    params, layers = fs.tree.map(local_of, whole.params), fs.pipeline.layers_of(ours, CONFIG.layers)
    parts = {s: Part(params, layers[s], s == 0, s == ours.stages - 1) for s in ours.stages_on(rank)}
    stages = [PipelineStage(part, s, ours.stages, torch.device("cpu")) for s, part in parts.items()]
    inputs, targets = batch(ranks)

    def loss_fn(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / inputs.numel()

    one = len(stages) == 1
    schedule = THEIRS[name](stages[0] if one else stages, 2 * ranks, loss_fn=loss_fn, scale_grads=False)
    losses = []
    given = (inputs,) if 0 in parts else ()
    schedule.step(*given, target=targets if ours.stages - 1 in parts else None, losses=losses)
    grads = {path: w.grad for part in parts.values() for path, w in part.own.items()}
    return torch.stack(losses).sum().detach() if losses else None, grads


ZBV = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own zbv loses its connections before torch 2.13")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("1f1b", 2), pytest.param("zbv", 2, marks=ZBV), *(pytest.param(n, r, marks=full) for r in (2, 4) for n in THEIRS)],
)
def test_pipelines_are_those_of_torch(name, ranks):
    both = run_ranks(piped, ranks, name, ranks), run_ranks(piped_by_torch, ranks, name, ranks)
    for (loss, ours), (their_loss, theirs) in zip(*both, strict=True):
        # Some elements are almost nothing, the sum of terms a thousand times as large.
        assert_trees_close(ours, theirs, rtol=1e-5, atol=3e-8)
        if their_loss is not None:
            torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
