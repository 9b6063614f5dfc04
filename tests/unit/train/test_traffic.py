"""What a step sends, by closed formulas, against sums written out by hand. Real ranks are in tests/dist/models/test_mesh_laws.py."""

import torch

import fsharding as fs
from fsharding import formats
from fsharding.comm.counters import Sent

L, D, H, E, F, V = 3, 32, 8, 4, 40, 64
CONFIG = fs.models.DecoderConfig(vocab=V, dim=D, layers=L, heads=H, kv_heads=4, hidden=F)
B, T = 2, 8
X, TOKEN = B * T * D * 4, B * T * 4
MATRICES = (2 * H * E + 2 * 4 * E) * D + 3 * F * D  # of a block
P = L * (MATRICES + 2 * D) + 2 * V * D + D


def sent(strategy=None, *, rows=B, schedule=None, coord=None, attention="ring", sequence=False, **axes):
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    model = fs.models.decoder(CONFIG, sequence=sequence, attention=attention)
    stages = fs.pipeline.stages_of(model, schedule) if schedule else None
    layout = fs.plan_layout(model, mesh, strategy=strategy or fs.zero(0), stages=stages)
    traffic = fs.expected_traffic(
        CONFIG, layout, rows=rows, length=T, microbatches=schedule.microbatches if schedule else 1,
        sequence=sequence, attention=attention, schedule=schedule, coord=coord,
    )  # fmt: skip
    return traffic.by_axes


def test_tensor_parallel():
    # Two regions a block, the embedding and the head; three numbers a token; one of 9 leaves, cut by tp, for the norm,
    # and with them the stop bit.
    assert sent(tp=2) == {("tp",): Sent(4 * L + 2 + 3 + 1, (4 * L + 2) * X + 3 * TOKEN + 10 * 8)}
    # Each sum is a gather and a scatter of half of x on each rank; norms have a sum of their own.
    norms = 2 * L + 1
    assert sent(tp=2, sequence=True) == {
        ("tp",): Sent(8 * L + 4 + norms + 3 + 1, (8 * L + 4) * X // 2 + norms * D * 4 + 3 * TOKEN + 10 * 8)
    }


def test_context_parallel():
    # k: keys and values of a rank, q: its queries; besides, the gradients and two numbers of the loss and the stop bit.
    k, q = 2 * 4 * B * (T // 2) * E * 4, H * B * (T // 2) * E * 4
    loss = Sent(1, 3 * 8)
    rest = {name: sent(cp=2, attention=name)[("cp",)] for name in ("ring", "gather", "ulysses")}
    units = [V * D, *[MATRICES + 2 * D] * L, V * D + D]
    assert rest["ring"] == Sent(L * (1 + 1 + 2) + len(units) + 1, L * (2 * k + 2 * k) + P * 4 + loss.bytes)
    assert rest["gather"] == Sent(L * 2 + len(units) + 1, L * 2 * k + P * 4 + loss.bytes)
    assert rest["ulysses"] == Sent(L * 4 + len(units) + 1, L * 2 * (k + 2 * q) // 2 + P * 4 + loss.bytes)


def test_data_parallel():
    units = L + 2
    assert sent(fs.zero(0), dp=2) == {("dp",): Sent(units + 1, P * 4 + 24)}
    norm = (12 * 8, 1)
    assert sent(fs.zero(1), dp=2) == {("dp",): Sent(units + 1 + norm[1] + 1, P * 4 // 2 * 2 + norm[0] + 24)}
    again = L * (MATRICES + 2 * D)
    assert sent(fs.zero(3), dp=2) == {
        ("dp",): Sent(2 * units + L + norm[1] + 1, (2 * P + again) * 4 // 2 + norm[0] + 24)
    }


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
    four = fs.models.DecoderConfig(vocab=V, dim=D, layers=4, heads=H, kv_heads=4, hidden=F)
    for (_, planned), count in zip(folded.items(), (2, 3), strict=True):
        layout = fs.plan_layout(
            fs.models.decoder(four), fs.AbstractMesh(("pp",), (2,)), strategy=fs.zero(0),
            stages=fs.pipeline.stages_of(fs.models.decoder(four), planned),
        )  # fmt: skip
        found = fs.expected_traffic(
            four, layout, rows=rows, length=T, microbatches=4, schedule=planned, coord={"pp": 1}
        ).by_axes[("pp",)]
        assert found == Sent(4 * count + 2, 4 * count * X + 12 * 8 + 24)


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


def test_codes_take_half_the_bytes_of_bfloat16():
    """Of leaves that have a format and whose sizes are multiples of 32 times the ranks, each byte of MX counted."""
    sizes, k = fs.models.DecoderConfig(vocab=64, dim=256, layers=4, heads=8, kv_heads=8, hidden=512), 4
    mesh, counted = fs.AbstractMesh(("dp",), (k,)), {}
    for name, roles in {"bf16": {}, "gather": {"gather": MX}, "both": {"gather": MX, "reduce": MX}}.items():
        how = fs.Precision(params=torch.float32, compute=torch.bfloat16, **roles)
        for level in range(4):
            layout = fs.plan_layout(fs.models.decoder(sizes), mesh, strategy=fs.zero(level), precision=how)
            counted[name, level] = fs.expected_traffic(sizes, layout, rows=1, length=4, coord={"dp": 1}).bytes
    parameters = 4 * (4 * 256 * 256 + 3 * 256 * 512)
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
    norms = 4 * 2 * 256 * ((k - 1) * 2 - (k - 1) * (2 + 4) / k)
    assert counted["bf16", 0] - counted["both", 0] == (2 - 1.03125) * of_each - norms


MX = formats.MXFP8
