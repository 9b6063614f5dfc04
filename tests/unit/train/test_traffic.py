"""What a step is foreseen to send, against sums written out by hand. Real ranks are in tests/dist/models/test_every_mesh.py."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import fsharding as fs
from fsharding import formats
from fsharding.base.errors import ArgumentError, BatchError, LayoutError, MeshError
from fsharding.comm.counters import Sent
from fsharding.mesh import failures, groups, meeting
from fsharding.testing import run_ranks
from tests import helpers
from tests.helpers import slow

L, D, H, E, F, V = 3, 32, 8, 4, 40, 64
CONFIG = fs.models.DecoderConfig(vocab_size=V, dim=D, layers=L, heads=H, kv_heads=4, intermediate_size=F)
B, T = 2, 8
X, TOKEN = B * T * D * 4, B * T * 4
MATRICES = (2 * H * E + 2 * 4 * E) * D + 3 * F * D  # of a block
P = L * (MATRICES + 2 * D) + 2 * V * D + D


def sent(strategy=None, *, rows=B, schedule=None, coord=None, attention="ring", sequence=False, **axes):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    model = fs.models.decoder(CONFIG, sequence=sequence, attention=attention)
    stages = fs.pipeline.stages_of(model, schedule) if schedule else None
    layout = fs.plan_layout(model, mesh, strategy=strategy or fs.zero(0), stages=stages)
    return foreseen(model, layout, rows, T // axes.get("cp", 1), schedule, coord)


def foreseen(model, layout, rows, length, schedule=None, coord=None):
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    planned = {"microbatches": schedule.microbatches, "schedule": schedule} if schedule else {}
    batch = {"tokens": tokens, "targets": tokens}
    return fs.debug.expected_traffic(model, fs.adamw(1e-3), layout, batch, coord=coord, **planned).by_axes


def test_tensor_parallel():
    # Two regions a block, the embedding and the head; three numbers a token; one of 9 leaves, cut by tp, for the norm,
    # and with them the stop bit.
    assert sent(tp=2) == {("tp",): Sent(4 * L + 2 + 3 + 1, (4 * L + 2) * X + 3 * TOKEN + 10 * 8)}
    # Each sum is a gather and a scatter of half of x on each rank; norms have a sum of their own.
    norms = 2 * L + 1
    assert sent(tp=2, sequence=True) == {
        ("tp",): Sent(8 * L + 4 + norms + 3 + 1, (8 * L + 4) * X // 2 + norms * D * 4 + 3 * TOKEN + 10 * 8)
    }


@slow
def test_context_parallel():
    # k: keys and values of a rank, q: its queries; besides, the gradients and two numbers of the loss and the stop bit.
    k, q = 2 * 4 * B * (T // 2) * E * 4, H * B * (T // 2) * E * 4
    loss = Sent(1, 3 * 8)
    rest = {name: sent(cp=2, attention=name)[("cp",)] for name in ("ring", "gather", "ulysses")}
    units = [V * D, *[MATRICES + 2 * D] * L, V * D + D]
    assert rest["ring"] == Sent(L * (1 + 1 + 2) + len(units) + 1, L * (2 * k + 2 * k) + P * 4 + loss.bytes)
    assert rest["gather"] == Sent(L * 2 + len(units) + 1, L * 2 * k + P * 4 + loss.bytes)
    assert rest["ulysses"] == Sent(L * 4 + len(units) + 1, L * 2 * (k + 2 * q) // 2 + P * 4 + loss.bytes)


@slow
def test_data_parallel():
    units = L + 2
    assert sent(fs.zero(0), dp=2) == {("dp",): Sent(units + 1, P * 4 + 24)}
    norm = (12 * 8, 1)
    assert sent(fs.zero(1), dp=2) == {("dp",): Sent(units + 1 + norm[1] + 1, P * 4 // 2 * 2 + norm[0] + 24)}
    again = L * (MATRICES + 2 * D)
    assert sent(fs.zero(3), dp=2) == {
        ("dp",): Sent(2 * units + L + norm[1] + 1, (2 * P + again) * 4 // 2 + norm[0] + 24)
    }


@slow
def test_pipelines():
    schedule = fs.pipeline.plan_schedule("1f1b", 3, 4)
    rows = 4 * B
    middle, end = (sent(rows=rows, schedule=schedule, coord={"pp": c}, pp=3)[("pp",)] for c in (1, 2))
    besides = Sent(2, 2 * 12 * 8 + 2 * 24)  # the norm of all leaves; loss, weight and the stop bit
    assert middle == Sent(8 + besides.calls, 8 * X + besides.bytes) and end == Sent(
        4 + besides.calls, 4 * X + besides.bytes
    )
    # As a V, rank 1 has stages 1 and 2, which hand over without a message: two for each microbatch, of four.
    folded = {name: fs.pipeline.plan_schedule(name, 2, 4) for name in ("zbv", "interleaved")}
    four = fs.models.DecoderConfig(vocab_size=V, dim=D, layers=4, heads=H, kv_heads=4, intermediate_size=F)
    for (_, planned), count in zip(folded.items(), (2, 3), strict=True):
        layout = fs.plan_layout(
            fs.models.decoder(four), fs.AbstractMesh(("pp",), (2,)), strategy=fs.zero(0),
            stages=fs.pipeline.stages_of(fs.models.decoder(four), planned),
        )  # fmt: skip
        found = foreseen(fs.models.decoder(four), layout, rows, T, planned, {"pp": 1})["pp",]
        assert found == Sent(4 * count + 2, 4 * count * X + 12 * 8 + 24)


@slow
def test_large_sums_are_an_exchange_and_a_gather():
    rows = 80
    x, tokens = rows * T * D, rows * T * 4
    assert x > 16384
    assert sent(rows=rows, tp=4) == {
        ("tp",): Sent(2 * (4 * L + 2) + 3 + 1, (4 * L + 2) * 3 * x // 4 * 8 + 3 * 3 * tokens + 3 * 10 * 8)
    }


def test_sums_of_two_ranks_are_one_call():
    rows = 80
    x, tokens = rows * T * D, rows * T * 4
    assert sent(rows=rows, tp=2) == {("tp",): Sent(4 * L + 2 + 3 + 1, (4 * L + 2) * x * 4 + 3 * tokens + 10 * 8)}


@slow
def test_codes_take_half_the_bytes_of_bfloat16():
    """Of leaves that have a format and whose sizes are multiples of 32 times the ranks, each byte of MX counted."""
    sizes, k = fs.models.DecoderConfig(vocab_size=64, dim=256, layers=1, heads=8, kv_heads=8, intermediate_size=512), 4
    mesh, counted = fs.AbstractMesh(("dp",), (k,)), {}
    for name, roles in {"bf16": {}, "gather": {"gather": MX}, "both": {"gather": MX, "reduce": MX}}.items():
        how = fs.Precision(params=torch.float32, compute=torch.bfloat16, **roles)
        for level in {"bf16": range(4), "gather": (1, 2, 3), "both": (0, 3)}[name]:
            layout = fs.plan_layout(fs.models.decoder(sizes), mesh, strategy=fs.zero(level), precision=how)
            counted[name, level] = foreseen(fs.models.decoder(sizes), layout, 1, 4, coord={"dp": 1})["dp",].bytes
    parameters = 4 * 256 * 256 + 3 * 256 * 512
    # Two gathers and a reduction, of which each rank sends what others have or get: 6 bytes a parameter.
    of_each = parameters * (k - 1) // k
    rest = counted["bf16", 3] - 6 * of_each
    assert (counted["gather", 3] - rest - 2 * of_each) / (4 * of_each) == 1.03125 / 2 <= 0.516
    # Copies take one gather after the update.
    for level in (1, 2):
        assert counted["bf16", level] - counted["gather", level] == (2 - 1.03125) * of_each
    assert (counted["both", 3] - rest) / (6 * of_each) == 1.03125 / 2 <= 0.52
    assert 3.09 <= (counted["both", 3] - rest) / of_each <= 3.1
    # Of a sum that all ranks get terms are codes, and sums float32. Norms travel by themselves then, all to all ranks.
    norms = 2 * 256 * ((k - 1) * 2 - (k - 1) * (2 + 4) / k)
    assert counted["bf16", 0] - counted["both", 0] == (2 - 1.03125) * of_each - norms


MX = formats.MXFP8


# ------------------------------------------------------------------------------------------------ any loss function
def loss_fn(params, batch):
    w = fs.gather_unit(params)
    return fs.Loss((batch["x"] @ w["w"] + w["b"]).square().sum(), len(batch["x"]))


SIZES = {"w": fs.random.zeros((8, 4)), "b": fs.random.zeros((4,))}


def of_loss(strategy, coord=None, precision=fs.FP32, **axes):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    layout = fs.plan_layout(SIZES, mesh, strategy=strategy, precision=precision, tp="replicate")
    batch = {"x": torch.ones(3, 8)}
    return fs.debug.expected_traffic(loss_fn, fs.adamw(1e-3), layout, batch, coord=coord).by_axes


def test_one_unit_under_zero3_on_two_ranks():
    # Each rank has 4 of 8 rows of w and 2 of 4 numbers of b: 4 * 4 + 2 = 18 float32, 72 bytes. It sends them once to
    # gather the unit, and as many bytes of gradients to the other rank. Two calls of float64: loss, weight and the stop
    # bit; and the norms of two leaves.
    assert of_loss(fs.zero(3), dp=2) == {("dp",): Sent(4, 72 + 72 + 3 * 8 + 2 * 8)}
    assert of_loss(fs.zero(3), {"dp": 1}, dp=2) == of_loss(fs.zero(3), dp=2)


@slow
@pytest.mark.parametrize("rank", [0, 7, 4_095])
def test_any_number_of_ranks(rank):
    # Few numbers are added by all ranks: each sends all 36 float32 of its gradients, and 3 float64 as above.
    others = 4_095
    assert of_loss(fs.zero(0), {"dp": rank}, dp=4_096) == {("dp",): Sent(2, others * (36 * 4 + 3 * 8))}
    # A row of w and a number of b, also from ranks that have none: after the update or before, and of gradients.
    each = others * (5 * 4 + 5 * 4 + 3 * 8 + 2 * 8)
    for level in (1, 3):
        assert of_loss(fs.zero(level), {"dp": rank}, dp=4_096) == {("dp",): Sent(4, each)}


def test_leaves_that_tp_does_not_cut():
    # Over dp as without tp: 72 bytes of gradients, and of parameters after the update. Over tp the stop bit.
    assert of_loss(fs.zero(1), dp=2, tp=2) == {("dp",): Sent(4, 72 + 72 + 3 * 8 + 2 * 8), ("tp",): Sent(1, 8)}


def state_of_torch():
    world = {name: id(getattr(c10d, name)) for name in ("_world", "_pg_map", "_pg_names", "_tags_to_pg")}
    return (
        world, c10d._group_count, dist.is_initialized(), sys.excepthook,
        groups._groups, meeting._meeting, failures._latest_mesh, meeting._timeout, torch.is_grad_enabled(),
    )  # fmt: skip


def test_it_leaves_no_state_behind():
    before, random_state = state_of_torch(), torch.get_rng_state()
    of_loss(fs.zero(3), dp=2)
    layout = fs.plan_layout(SIZES, fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3))
    with pytest.raises(RuntimeError, match="reduction dim"):
        fs.debug.expected_traffic(loss_fn, fs.adamw(1e-3), layout, {"x": torch.ones(3, 9)})
    assert state_of_torch() == before and torch.equal(torch.get_rng_state(), random_state)


def in_a_run():
    mesh = fs.make_mesh(dp=2, device="cpu")
    state, step = fs.setup(lambda _: SIZES, loss_fn, fs.adamw(1e-3), fs.random.key(0), mesh=mesh, strategy="zero3")
    batch, before, losses = {"x": torch.ones(3, 8)}, state_of_torch(), []
    for _ in range(2):
        foreseen = fs.debug.expected_traffic(loss_fn, fs.adamw(1e-3), state.layout, batch)
        with fs.debug.count_bytes() as sent:
            state, metrics = step(state, batch)
        assert sent.by_axes == foreseen.by_axes
        losses.append(metrics.loss)
    assert state_of_torch()[:3] == before[:3]
    total = fs.ops.psum(torch.ones(1), "dp", mesh=fs.make_mesh(dp=2, device="cpu"))  # groups are found again
    return float(total), fs.unshard(state.params["w"]).shape, state.params["w"].full_tensor().shape


@slow
def test_inside_a_run():
    assert run_ranks(in_a_run, 2) == [(2.0, (8, 4), (8, 4))] * 2


def test_bad_arguments():
    layout = fs.plan_layout(SIZES, fs.AbstractMesh(("dp",), (2,)))
    batch, opt = {"x": torch.ones(3, 8)}, fs.adamw(1e-3)
    with pytest.raises(MeshError, match="dp=2, and dp has size 2"):
        fs.debug.expected_traffic(loss_fn, opt, layout, batch, coord={"dp": 2})
    with pytest.raises(MeshError, match="tp=1"):
        fs.debug.expected_traffic(loss_fn, opt, layout, batch, coord={"tp": 1})
    for wrong in ({"x": 3}, {}):
        with pytest.raises(BatchError, match="tree of tensors"):
            fs.debug.expected_traffic(loss_fn, opt, layout, wrong)
    with pytest.raises(ArgumentError, match="layout"):
        fs.debug.expected_traffic(loss_fn, opt, batch, layout)
    with pytest.raises(ArgumentError):
        fs.debug.expected_traffic(torch.nn.Linear(2, 2), opt, layout, batch)


# -------------------------------------------------------------------------------------------------- kinds of memory
@pytest.mark.parametrize("memory", [{"moments": "host"}, {"moments": "disk"}, {"params": {"w": "host"}}])
def test_memory_of_the_host_is_not_counted_as_the_devices(memory):
    """On the simulated device the two are told apart: tests/dist/device/test_memory.py."""
    opt, batch = fs.adamw(1e-3), {"x": torch.ones(3, 8)}
    model = {"w": fs.random.zeros((8, 4)), "b": fs.random.zeros((4,))}
    plain = fs.plan_layout(model, fs.AbstractMesh(("dp",), (2,)), strategy=fs.zero(3))
    assert fs.debug.expected_memory(loss_fn, opt, plain, batch) > 0
    layout = plain.with_strategy(fs.zero(3).with_memory(**memory))
    text = helpers.refusal(fs.debug.expected_memory, loss_fn, opt, layout, batch, kind=LayoutError)
    assert text.startswith("fs.debug.expected_memory needs an accelerator") and "layout.memory(opt)" in text
    assert f"  {layout.strategy.memory[-1]}\n" in text
