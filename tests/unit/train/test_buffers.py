"""Buffers of a state: what a loss function that takes them may return, and what a state may hold."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ArgumentError, CheckpointError, LayoutError, TransformError
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import mesh_of, refusal

KEY, ALONE = fs.random.key(0), {"dp": 1}
X = torch.linspace(-1, 2, 12).view(3, 4)
FIRST = {"mean": torch.zeros(4), "count": torch.zeros((), dtype=torch.int64)}


def init(key):
    return {"w": fs.random.normal(key, (4, 2))}


def centered(params, batch, buffers):
    """A running mean by hand, in functions of tensors alone."""
    mean = 0.5 * buffers["mean"] + 0.5 * batch.mean(0)
    y = (batch - mean) @ fs.gather_unit(params)["w"]
    return (y.square().sum(), y.numel()), {"mean": mean, "count": buffers["count"] + 1}


def start(loss_fn, buffers=FIRST, **options):
    return fs.setup(init, loss_fn, fs.sgd(0.1), KEY, mesh=mesh_of(ALONE), buffers=buffers, **options)


def test_a_loss_function_of_ones_own_hands_buffers_on():
    state, step = start(centered, microbatches=3)
    assert_bitwise_equal(dict(state.buffers), FIRST)
    after, _ = step(state, X)
    mean = torch.zeros(4)
    for row in X:
        mean = 0.5 * mean + 0.5 * row
    assert torch.equal(after.buffers["mean"], mean) and int(after.buffers["count"]) == 3
    assert_bitwise_equal(dict(state.buffers), FIRST, "the state before")
    found = fs.evaluate(centered)(after, X)
    w = fs.unshard(after.params["w"])
    assert_trees_close(found.mean, ((X - (mean + X.mean(0)) / 2) @ w).square().mean(), rtol=1e-5)
    assert "buffers 24" in repr(after) and "buffers" not in repr(start(lambda p, b: centered(p, b, FIRST)[0], None)[0])


def test_buffers_that_a_loss_function_writes_in_place_are_copies():
    def loss(params, batch, buffers, key):
        buffers["mean"].add_(batch.mean(0))
        return fs.gather_unit(params)["w"].square().sum(), buffers, {"key": key}

    state, step = start(loss, has_aux=True)
    after, metrics = step(state, X)
    assert_bitwise_equal(dict(state.buffers), FIRST)
    assert torch.equal(after.buffers["mean"], X.mean(0)) and metrics.aux[0]["key"].dtype == torch.int64


def returning(*results):
    def loss(params, batch, buffers):
        total = fs.gather_unit(params)["w"].sum()
        return tuple(total if x is None else x(buffers) if callable(x) else x for x in results)

    return loss


MISTAKES = {
    "a sum and a weight": (
        returning(None, 3.0),
        "train step needs (loss, buffers), with buffers as a dict; got 3.0.",
    ),
    "three": (returning(None, {}, {}), "train step needs (loss, buffers); got (torch.float32[], dict, dict)."),
    "a missing one": (returning(None, lambda b: {"mean": b["mean"]}), "buffers.count is missing"),
    "a new one": (returning(None, lambda b: {**b, "more": X}), "buffers.more is new"),
    "another shape": (
        returning(None, lambda b: {**b, "mean": torch.zeros(2)}),
        "buffers.mean is a tensor float32[2]; before it was float32[4] on cpu",
    ),
    "no tensor": (
        returning(None, lambda b: {**b, "count": 1}),
        "buffers.count is 1; before it was int64[] on cpu",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_other_results_than_loss_and_buffers_are_refused(case):
    loss, text = MISTAKES[case]
    state, step = start(loss)
    assert text in refusal(step, state, X, kind=TransformError)


def test_errors_of_a_loss_function_that_takes_buffers_stay_its_own():
    def loss(params, batch, buffers, key):
        raise TypeError("my own")

    state, step = start(loss)
    with pytest.raises(TypeError, match="my own"):
        step(state, X)


def test_what_is_no_buffer_is_refused():
    assert "'mean' is 1.0" in refusal(start, centered, {"mean": 1.0}, kind=ArgumentError)
    assert "buffers= as tensors by name" in refusal(start, centered, [X], kind=ArgumentError)
    state, step = start(centered)
    wrong = state.replace(buffers={"mean": 1.0, "count": FIRST["count"]})
    assert "buffers.mean is a float" in refusal(step, wrong, X, kind=LayoutError)
    assert "Pass the state" in refusal(fs.evaluate(centered), state.params, X, kind=ArgumentError)


def test_a_step_that_is_skipped_leaves_buffers_as_they_were():
    def loss(params, batch, buffers):
        w = fs.gather_unit(params)["w"]
        after = {"mean": buffers["mean"] + batch.mean(0), "count": buffers["count"] + 1}
        return (batch.to(w.dtype) @ w).square().sum(), after

    state, step = start(loss, precision=fs.FP16)
    skipped, metrics = step(state, X * 3e4)
    assert metrics.skipped
    assert_bitwise_equal(dict(skipped.buffers), FIRST)
    state, step = start(loss, precision=fs.FP16, check="async")
    skipped, metrics = step(state, X * 3e4)
    assert metrics.skipped
    assert_bitwise_equal(dict(skipped.buffers), FIRST)


def test_a_state_without_buffers_has_the_leaves_that_it_had(tmp_path):
    state, step = fs.setup(init, lambda p, b: fs.gather_unit(p)["w"].sum(), fs.adamw(0.1), KEY, mesh=mesh_of(ALONE))
    state, _ = step(state, X)
    fs.checkpoint.save(tmp_path / "1", state)
    paths = ["key", "opt_state.count", "opt_state.mu.w", "opt_state.nu.w", "params.w", "step"]
    assert sorted(fs.checkpoint.metadata(tmp_path / "1").tree) == paths
    assert sorted(fs.tree.paths(state)) == paths
    assert not fs.checkpoint.load(tmp_path / "1", state.layout).buffers


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16])
def test_the_memory_of_a_layout_has_the_buffers_of_a_state(precision):
    net = fs.functionalize(module(), ("0", "1", "3"))
    layout, opt = fs.plan_layout(net, mesh_of(ALONE), precision=precision), fs.adamw(1e-3)
    state, counts = fs.init_state(net, opt, KEY, layout), 8 + 16  # step and key
    memory = layout.memory(opt)
    assert memory.buffers == fs.debug.state_bytes(state.buffers) == 2 * 6 * 4 + 8
    assert memory.state == fs.debug.state_bytes(state) - counts
    wide = layout.with_mesh(fs.AbstractMesh(("dp",), (64,)))
    assert wide.memory(opt).buffers == memory.buffers
    assert fs.plan_layout(fs.functionalize(module().eval(), ("0", "1", "3")), wide.mesh).memory(opt).buffers == 0


def test_a_module_is_evaluated_with_its_running_statistics_and_saved_with_them(tmp_path):
    plain = module()
    net = fs.functionalize(plain, ("0", "1", "3"))

    def loss(params, batch, buffers, key):
        y, buffers = net(params, batch, buffers=buffers, random_key=key)
        return (y.square().sum(), y.numel()), buffers

    state, step = fs.setup(net, loss, fs.sgd(0.1), KEY, mesh=mesh_of(ALONE))
    for _ in range(2):
        state, _ = step(state, X)
    trained = module()
    trained.load_state_dict(net.state_dict(fs.unshard(state.params), state.buffers))
    assert int(trained[1].num_batches_tracked) == 2 and not torch.equal(trained[1].running_mean, torch.zeros(6))
    want = trained.eval()(X)
    assert_trees_close(fs.evaluate(loss)(state, X).mean, want.square().mean().detach(), rtol=1e-6)
    fixed = fs.functionalize(copy.deepcopy(plain).eval(), ("0", "1", "3"))
    y, same = fixed(fs.unshard(state.params), X, buffers=state.buffers)
    assert_bitwise_equal(y.detach(), want.detach())
    assert_bitwise_equal(same, dict(state.buffers))
    fs.hf.save(tmp_path / "hf", state, {"model_type": "mine"}, names=net.sources)
    files = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert_bitwise_equal(files, dict(trained.state_dict()))
    text = refusal(
        fs.hf.save, tmp_path / "no", state.params, {"model_type": "mine"}, names=net.sources, kind=CheckpointError
    )
    assert "1.running_mean is written by the forward, and not given: pass the full state" in text
    # A checkpoint of before, without buffers.
    fs.checkpoint.save(tmp_path / "old", state.replace(buffers={}))
    old = fs.checkpoint.load(tmp_path / "old", state.layout)
    assert "1.running_mean is written by the forward, and not given" in refusal(step, old, X, kind=TransformError)
    text = refusal(fs.foreign.export, tmp_path / "old", tmp_path / "w.pt", "torch", net.sources, kind=CheckpointError)
    assert "1.running_mean is written by the forward, and not given in the checkpoint" in text


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm], ids=lambda kind: kind.__name__)
def test_statistics_stay_in_float32_where_a_precision_computes_in_less(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), kind(6), nn.Linear(6, 2))
    net = fs.functionalize(plain, ("0", "1", "2"))

    def loss(params, batch, buffers):
        y, buffers = net(params, batch, buffers=buffers)
        return (y.float().square().sum(), y.numel()), buffers

    state, step = fs.setup(net, loss, fs.sgd(0.1), KEY, mesh=mesh_of(ALONE), precision=fs.BF16)
    state, metrics = step(state, X)
    statistics = nn.BatchNorm1d(6)
    y = plain[2](statistics(plain[0](X)))
    assert_trees_close(metrics.loss, y.square().mean().detach(), rtol=3e-2)
    assert_trees_close(state.buffers["1.running_var"], statistics.running_var, rtol=3e-2)
    assert state.buffers["1.running_mean"].dtype == torch.float32
    assert torch.isfinite(fs.evaluate(loss)(state, X).mean)
