"""Law: whatever a strategy keeps on the host or on disk, losses, states and checkpoints have the same bits.

On a CPU the host is the device, and disk is real; `tests/dist/device` has both.
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.registry import names_of
from fsharding.comm import tier
from fsharding.contrib.disk import OnDisk
from fsharding.optim import windows
from fsharding.sharding.memory_kinds import ROLES
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, device_mesh, run_ranks
from tests.decoders import DecoderCase, decoder_cases
from tests.helpers import crossed, examples
from tests.states_in_use import used_otherwise

CONFIG = fs.models.DecoderConfig(vocab_size=20, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=24)
BASE = DecoderCase(CONFIG, fs.AbstractMesh(("dp",), (2,)), rows=8, length=8, steps=3, microbatches=2)
OPTIMIZERS = {
    "adamw": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(3e-3, eps=1e-3, weight_decay=0.1)),
    "mxfp8": lambda: fs.adamw(3e-3, eps=1e-3, moments=fs.formats.MXFP8),
    "adafactor": lambda: fs.optim.adafactor(1e-3),
    "muon": lambda: fs.optim.multi_transform(
        {"matrix": fs.optim.muon(1e-3, dtype=torch.float32), "other": fs.adamw(3e-3, eps=1e-3)},
        fs.optim.label_matrices(),
    ),
}
PRECISIONS = {
    "fp32": fs.FP32,
    "bf16": fs.BF16,
    "stochastic": replace(fs.BF16, params=torch.bfloat16, rounding="stochastic"),
    "mxfp8": fs.MXFP8,
}
ALL = dict.fromkeys(ROLES, "disk")


def run(case, optimizer):
    """Losses and norms of all steps, and the state."""
    mesh = device_mesh(case.mesh)
    state, step = case.start(mesh, OPTIMIZERS[optimizer]())
    numbers = []
    for number in range(case.steps):
        state, metrics = step(state, case.batch(number, mesh))
        numbers.append(torch.stack((metrics.loss, metrics.grad_norm, metrics.count)))
    return numbers, state


def has_same_bits(case, memory, optimizer, folder):
    """Run with and without other memory; the one's checkpoint and state become the other's."""
    with patch.object(windows, "WINDOW_BYTES", 1 << 12), patch.object(tier, "_TOGETHER", 1 << 7):
        numbers, state = run(case, optimizer)
        strategy = case.strategy.with_memory(**memory)
        others, away = run(replace(case, strategy=strategy), optimizer)
    assert_bitwise_equal(numbers, others)
    for field, kinds in (("params", away.layout.params), ("main", away.layout.main)):
        for x, kind in zip(fs.tree.leaves(getattr(away, field)), fs.tree.leaves(kinds), strict=False):
            assert isinstance(local_of(x), OnDisk) == (kind.memory == "disk")
    fs.checkpoint.save(Path(folder), away)
    loaded = fs.checkpoint.load(Path(folder), state.layout, opt=OPTIMIZERS[optimizer]())
    dist.barrier()
    for same in (loaded, fs.reshard(away, state.layout)):
        assert_bitwise_equal(values(same), values(state))
    back = fs.reshard(loaded, away.layout, donate=True)
    assert_bitwise_equal(values(back), values(away))


def values(state):
    return [state.params, state.main, state.opt_state, state.step, state.key]


@pytest.mark.parametrize(
    ("level", "precision", "role"),
    crossed(
        range(4), [*PRECISIONS], (*ROLES, "all"),
        kept=["0-fp32-all", "1-bf16-main", "1-fp32-params", "2-fp32-grads", "3-bf16-all", "3-stochastic-moments", "3-mxfp8-main"],
    ),
)  # fmt: skip
def test_roles_on_disk(level, precision, role, tmp_path):
    case = replace(BASE, strategy=fs.zero(level), precision=PRECISIONS[precision], donate=level % 2 == 0)
    memory = ALL if role == "all" else {role: "disk"}
    run_ranks(has_same_bits, 2, case, memory, "adamw", tmp_path / "saved")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_disk(optimizer, tmp_path):
    memory = {"moments": {"": "disk", "blocks.wq": "device"}, "main": {"embed": "disk"}}
    run_ranks(has_same_bits, 2, replace(BASE, strategy=fs.zero(3)), memory, optimizer, tmp_path / "saved")


KINDS = names_of("tier")
PATHS = ("", "blocks", "embed", "head")
KIND = st.sampled_from(KINDS)
MEMORY = st.dictionaries(
    st.sampled_from(ROLES), st.one_of(KIND, st.dictionaries(st.sampled_from(PATHS), KIND, max_size=3))
)
AWAY = st.sampled_from(KINDS[1:])
UPDATED = st.fixed_dictionaries(
    {"compute": st.one_of(st.just("host"), st.dictionaries(st.sampled_from(PATHS), st.sampled_from(KINDS[:2])))},
    optional={"params": KIND, "grads": KIND, "moments": AWAY, "main": AWAY},
)


@pytest.mark.timeout(1800)
@examples(20, 200)
@given(
    decoder_cases(max_ranks=4, steps=2),
    MEMORY | UPDATED,
    st.sampled_from(("fp32", "bf16")),
    st.sampled_from(("adamw", "mxfp8")),
)
def test_any_memory_of_any_run(tmp_path_factory, case, memory, precision, optimizer):
    case = replace(case, precision=PRECISIONS[precision])
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    run_ranks(has_same_bits, case.ranks, case, memory, optimizer, folder)


def test_leaves_on_disk_are_read_by_everything():
    kept = run_ranks(used_otherwise, 2, {})
    assert_bitwise_equal(run_ranks(used_otherwise, 2, ALL), kept)


def updated_unevenly(memory, limit):
    """Rank 0 has other numbers of columns or rows than rank 1, and blocks of moments are on both."""
    mesh = device_mesh(fs.AbstractMesh(("dp",), (2,)))
    params = {f"w{i}": fs.random.normal(fs.random.key(i), (4, 1335)).tensor() for i in range(4)}
    rules, names = fs.AxisRules(rows=None, cols="dp"), dict.fromkeys(params, ("rows", "cols"))
    params["by_rows"], names["by_rows"] = fs.random.normal(fs.random.key(9), (33, 4)).tensor(), ("cols", "rows")
    strategy = fs.zero(3).with_memory(**memory)
    layout = fs.plan_layout(params, mesh, rules, strategy, names=names)
    opt = OPTIMIZERS["mxfp8"]()

    def loss(p, x):
        p = fs.gather_unit(p)
        return sum((x @ p[f"w{i}"]).square().mean() for i in range(4)) + (x @ p["by_rows"].T).square().mean()

    with patch.object(windows, "WINDOW_BYTES", limit), patch.object(tier, "_TOGETHER", 8):
        state = fs.init_state(lambda key: params, opt, fs.random.key(0), layout)
        step = fs.make_train_step(loss, opt)
        for _ in range(2):
            state, _ = step(state, torch.ones(2, 4))
    return fs.unshard(state.params)


def test_ranks_have_the_same_windows():
    kept = run_ranks(updated_unevenly, 2, {}, 1 << 20)
    for limit in (1, 11350):
        assert_bitwise_equal(run_ranks(updated_unevenly, 2, {"moments": "disk"}, limit), kept)
