"""Rates, factors and masks that the host does not read: the bits of the numbers that it would have computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fsharding as fs
from fsharding.base import _compat
from fsharding.formats.precision import scaled_loss
from fsharding.optim import schedules
from fsharding.optim.base import multiply, next_count, where_finite
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, counting_host_reads

RATES = {
    "constant": lambda n: schedules.constant(3e-4),
    "linear": lambda n: schedules.linear(3e-4, 1e-5, n),
    "warmup_cosine": lambda n: schedules.warmup_cosine(3e-4, n // 10, n, end=3e-5),
    "no warmup": lambda n: schedules.warmup_cosine(1e-2, 0, n),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_of_a_tensor_rounds_to_that_of_a_number(name):
    for steps in (10, 1000, 30011):
        rate, counts = RATES[name](steps), range(0, steps + 10, max(steps // 500, 1))
        with counting_host_reads() as seen:
            computed = [schedules.rate_at(rate, torch.tensor(count)) for count in counts]
        wanted = torch.tensor([rate(count) for count in counts])
        assert seen.reads == []
        assert_bitwise_equal(torch.stack([torch.as_tensor(x).float() for x in computed]), wanted)


def test_a_schedule_of_ones_own_reads_the_count_unless_it_is_marked():
    plain = lambda count: 0.1 if count < 2 else 0.01  # noqa: E731
    marked = schedules.tensor_schedule(lambda count: 0.1 / (1 + count))
    count = torch.tensor(3)
    with counting_host_reads() as seen:
        assert schedules.rate_at(plain, count) == 0.01
    assert seen.count == 1
    with counting_host_reads() as seen:
        rate = schedules.rate_at(marked, count)
    assert seen.count == 0 and rate.dtype == torch.float64 and float(rate) == marked(3) == 0.025


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(st.floats(1e-6, 1e6).filter(lambda factor: factor != 1.0), st.integers(0, 2**31))
def test_a_factor_as_a_tensor_gives_the_bits_of_a_number(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (1,), (7,), (3, 5), (0,)]
    for dtypes in [DTYPES, *([dtype] for dtype in DTYPES)]:
        xs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(t) for shape in shapes for t in dtypes]
        wanted, tensor = _compat.foreach_mul(xs, factor), torch.tensor(factor, dtype=torch.float64)
        with counting_host_reads() as seen:
            products = _compat.foreach_mul(xs, tensor)
            in_place = [x.clone() for x in xs]
            _compat.foreach_mul_(in_place, tensor)
            tree = multiply({"a": xs}, tensor)
        assert seen.reads == []
        assert_bitwise_equal(products, wanted)
        assert_bitwise_equal(in_place, wanted)
        assert_bitwise_equal(tree, multiply({"a": xs}, factor))


@given(st.floats(1e-3, 1e3), st.floats(0, 1e-1), st.booleans())
def test_the_fused_kernel_takes_rate_and_scale_as_tensors(scale, rate, finite):
    columns = [[torch.randn(130), torch.randn(3, 7)] for _ in range(3)]
    columns.append([x.square() for x in columns[2]])
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def run(**how):
        copies = [[x.clone() for x in column] for column in columns]
        _compat.fused_adamw_(*copies, [torch.tensor(3.0)] * 2, **settings, **how)
        return copies

    of_numbers = run(lr=rate, scale=scale)
    of_tensors = [torch.tensor(x, dtype=torch.float64) for x in (rate, scale)]
    with counting_host_reads() as seen:
        result = run(lr=of_tensors[0], scale=of_tensors[1], finite=torch.tensor(finite))
    assert seen.reads == []
    parameters, _, mu, nu = result
    wanted = of_numbers if finite else columns
    assert_bitwise_equal([parameters, mu, nu], [wanted[0], wanted[2], wanted[3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_loss_and_its_gradient_have_the_bits_of_a_number(dtype):
    for scale in map(torch.tensor, (2.0**16, 8.0, 1.0, 3.7)):
        results = []
        for factor in (float(scale), scale):
            x = torch.tensor(0.3, dtype=dtype, requires_grad=True)
            loss = scaled_loss(x * x, factor) if isinstance(factor, torch.Tensor) else x * x * factor
            results.append((loss.detach(), *torch.autograd.grad(loss, x)))
        assert_bitwise_equal(*results)
    assert scaled_loss(x, None) is x


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(
    "opt",
    [
        fs.adamw(schedules.linear(1e-2, 0.0, 5), weight_decay=0.1),
        fs.optim.chain(fs.optim.clip_by_global_norm(0.5), fs.adamw(1e-2)),
        fs.optim.chain(fs.optim.add_noise(0.1, fs.random.key(0)), fs.adamw(1e-2)),
        fs.optim.multi_transform({"a": fs.adamw(1e-2), "b": fs.sgd(0.1, momentum=0.9)}, {"w": "a", "b": "b"}),
        fs.optim.multi_transform({"a": fs.adamw(1e-2), "b": fs.adamw(1e-3)}, {"w": "a", "b": "b"}),
        fs.optim.lookahead(fs.optim.lion(1e-2), every=1),
        fs.optim.adafactor(),
        fs.optim.GradientTransformation(lambda p: {"n": torch.zeros(())}, lambda g, s, p: (g, {"n": s["n"] + 1})),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_masked_update_is_the_update_or_nothing(opt, finite, donate):
    def made():
        generator = torch.Generator().manual_seed(0)
        params = {name: torch.randn(shape, generator=generator) for name, shape in (("w", (6, 4)), ("b", (5,)))}
        grads = {name: torch.randn(x.shape, generator=generator) for name, x in params.items()}
        return params, grads, opt.init(params)

    params, grads, state = made()
    norm = fs.global_norm(grads)
    wanted = (
        fs.optim.apply_gradients(opt, grads, state, params, fs.optim.UpdateContext(norm=norm))
        if finite
        else (params, state)
    )
    params, grads, state = made()
    before = made()
    if not finite:
        grads["w"][0, 0], norm = torch.nan, torch.tensor(torch.nan)
    flag = torch.tensor(finite)
    result = fs.optim.apply_gradients(
        opt, grads, state, params, fs.optim.UpdateContext(norm=norm, finite=flag, donate=donate)
    )
    assert_bitwise_equal(result, wanted)
    if not donate:
        assert_bitwise_equal((params, state), (before[0], before[2]))
        if not finite:
            shared = {x.data_ptr() for x in fs.tree.leaves((params, state))}
            assert not shared & {x.data_ptr() for x in fs.tree.leaves(result[0])}, "the result has memory of its own"


def test_counts_and_masks():
    count = torch.tensor(4)
    assert [int(next_count(count, x)) for x in (None, torch.tensor(True), torch.tensor(False))] == [5, 5, 4]
    assert next_count(count, torch.tensor(True)).dtype == torch.int64
    new, old = {"a": torch.ones(2), "n": 3}, {"a": torch.zeros(2), "n": 3}
    assert where_finite(None, new, old) is new
    assert where_finite(torch.tensor(False), new, old)["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("donate", [False, True])
def test_lookahead_runs_without_values(donate):
    def loss(params, batch):
        return fs.gather_unit(params)["w"].square().sum() + batch.sum()

    opt, mesh = fs.optim.lookahead(fs.sgd(0.1), every=3), fs.make_mesh(dp=-1, device="cpu")
    with FakeTensorMode():
        init = lambda key: {"w": fs.random.normal(key, (4, 2))}  # noqa: E731
        state, step = fs.setup(init, loss, opt, fs.random.key(0), mesh=mesh, donate=donate, check="async")
        with counting_host_reads() as seen:
            for _ in range(3):
                state, _ = step(state, torch.zeros(2))
    assert seen.reads == []
    assert fs.debug.state_bytes(state.opt_state) == state.layout.memory(opt).opt_state
    assert all(_compat.is_fake(local_of(x)) for x in fs.tree.leaves(state.opt_state.slow))
