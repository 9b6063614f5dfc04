"""One process trains on a GPU: strategies, float16, compiled blocks, checkpoints, gradients beside the CPU's, memory.

Without a GPU every test here is skipped, and says so; tests/unit/train/test_step.py has those that mean something on a CPU.
Several ranks on one GPU are measured by `bench/gpu.sh`.
"""

import pytest
import torch

import fsharding as fs
from bench.rounds import allocated
from fsharding import checkpoint, optim, random
from fsharding.formats.precision import Precision
from fsharding.models.decoder import DecoderConfig, decoder
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import full

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")

DEVICE = "cuda"
SIZES = DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, intermediate_size=128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def batch(seed=0):
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def start(strategy, *, precision=None, model=None):
    model = model or decoder(SIZES)
    mesh = fs.make_mesh(dp=1, device=DEVICE)
    how = precision or Precision()
    layout = fs.plan_layout(model.init(random.key(1)), mesh, strategy=strategy, names=model.names, precision=how)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1))
    state = fs.init_state(model.init, opt, random.key(0), layout)
    return state, fs.make_train_step(model, opt, donate=True)


def losses(state, step, steps=4):
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        found.append(metrics.loss.cpu())
    return torch.stack(found), state


def test_strategies_have_the_same_losses_and_their_states_are_on_the_gpu():
    found = [losses(*start(fs.zero(level))) for level in range(4)]
    assert all(torch.equal(found[0][0], other) for other, _ in found[1:])
    assert found[0][0][-1] < found[0][0][0]
    for _, state in found:
        assert {local_of(x).device.type for x in fs.tree.leaves(state.params)} == {DEVICE}


def first(model, dtype):
    """The loss and the gradients of the first step, in float64."""
    state, _ = start(fs.zero(3), precision=Precision(compute=dtype), model=model)
    grad_fn = fs.value_and_grad(fs.model_loss(model), precision=state.layout.precision)
    (loss, _), grads = grad_fn(state.params, batch())
    return [x.double() for x in (loss, *map(local_of, fs.tree.leaves(grads)))]


@full
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DTYPES)
def test_eager_and_compiled_blocks_are_as_near_to_float64_as_their_dtype(name, compiled):
    model = decoder(SIZES)
    exact = first(model, torch.float64)
    found = first(model._replace(block=torch.compile(model.block)) if compiled else model, DTYPES[name])
    tolerance = 1e-5 if name == "fp32" else 3e-2
    assert all((x - y).norm() <= tolerance * y.norm() for x, y in zip(found, exact, strict=True))


def test_float16_trains_with_scaled_losses():
    found, state = losses(*start(fs.zero(3), precision=fs.FP16), steps=6)
    assert torch.isfinite(found).all() and found[-1] < found[0]
    assert float(state.loss_scale.scale) > 0


def test_a_checkpoint_comes_back_to_the_gpu(tmp_path):
    state, step = start(fs.zero(3))
    _, state = losses(state, step)
    checkpoint.save(tmp_path / "step", state)
    fresh, _ = start(fs.zero(1))
    loaded = checkpoint.load(tmp_path / "step", fresh.layout)
    assert {local_of(x).device.type for x in fs.tree.leaves(loaded.params)} == {DEVICE}
    assert_bitwise_equal(fs.tree.map(local_of, loaded.params), fs.tree.map(local_of, state.params))


def test_gradients_are_those_of_the_cpu():
    model, here = decoder(SIZES), {}
    for device in ("cpu", DEVICE):
        mesh = fs.make_mesh(dp=1, device=device)
        layout = fs.plan_layout(model.init(random.key(1)), mesh, strategy=fs.zero(3), names=model.names)
        state = fs.init_state(model.init, optim.sgd(0.1), random.key(0), layout)
        data = {name: x.to(device) for name, x in batch().items()}
        (loss, _), grads = fs.value_and_grad(fs.model_loss(model))(state.params, data)
        here[device] = loss.cpu(), fs.tree.map(lambda x: local_of(x).cpu(), grads)
    assert_trees_close(here["cpu"], here[DEVICE], rtol=1e-4, atol=1e-5)


def test_a_step_leaves_nothing_behind():
    state, step = start(fs.zero(3))
    _, state = losses(state, step)
    held = [state]
    kept, peak = allocated(lambda: held.append(losses(held.pop(), step, steps=2)[1]))
    assert kept < 1 << 16
    assert 0 < peak < 64 << 20


def test_the_norm_of_many_leaves_is_that_of_the_cpu():
    source = torch.Generator().manual_seed(0)
    draws = [torch.randn(n, generator=source) * 10.0**n for n in (0, 1, 5, 3)] + [
        torch.randn(700_001, generator=source)
    ]
    leaves = {str(i): x.to(dtype) for i, x in enumerate(draws) for dtype in [DTYPES["bf16" if i % 2 else "fp32"]]}
    want = fs.global_norm(leaves)
    found = fs.global_norm(fs.tree.map(lambda x: x.to(DEVICE), leaves))
    assert torch.equal(found.cpu(), want)
    leaves["1"][0] = torch.inf
    assert torch.isinf(fs.global_norm(fs.tree.map(lambda x: x.to(DEVICE), leaves)))
