"""Rules: an optimizer from a few lines is what a plain loop computes, in chunks, on any layout and with any moments."""

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ArgumentError, ConfigError
from tests.helpers import refusal

RATE, DECAY = 0.1, 0.05


def averages(grads, mu, nu, count):
    """The average gradient over the root of the average square; the first step is a step of signs."""
    for g, m, n in zip(grads, mu, nu, strict=True):
        m.copy_(torch.where(count > 0, m.lerp(g, 0.25), g))
        n.copy_(torch.where(count > 0, n.lerp(g * g, 0.25), g * g))
    return [m / (n.sqrt() + 1e-8) for m, n in zip(mu, nu, strict=True)]


def optimizer(**options):
    return fs.optim.elementwise(averages, RATE, ("mu", "nu"), roots=("nu",), weight_decay=DECAY, **options)


def drawn(steps=4):
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(96, 64, generator=generator), "b": torch.randn(5, generator=generator)}
    return params, [fs.tree.map(lambda x: torch.randn(x.shape, generator=generator), params) for _ in range(steps)]


def by_hand(params, grads):
    moments = {name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in params.items()}
    params = {name: x.clone() for name, x in params.items()}
    for number, of_step in enumerate(grads):
        for name, g in of_step.items():
            m, n = moments[name]
            m.lerp_(g, 0.25) if number else m.copy_(g)
            n.lerp_(g * g, 0.25) if number else n.copy_(g * g)
            delta = m / (n.sqrt() + 1e-8) * -RATE
            params[name] = params[name] + (delta + params[name] * (-RATE * DECAY))
    return params


def run(opt, params, grads, **context):
    state = opt.init(params)
    for of_step in grads:
        updates, state = opt.update(of_step, state, params, fs.optim.UpdateContext(**context))
        params = fs.optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_of_a_rule_is_a_plain_loop(donate):
    params, grads = drawn()
    found, state = run(optimizer(), params, grads, donate=donate)
    torch.testing.assert_close(found, by_hand(params, grads), rtol=1e-6, atol=1e-7)
    assert int(state.count) == len(grads) and [*state.moments] == ["mu", "nu"]


def test_nothing_that_was_given_is_changed():
    params, grads = drawn(2)
    before, opt = fs.tree.map(torch.clone, (params, grads)), optimizer()
    state = opt.init(params)
    opt.update(grads[0], state, params)
    fs.testing.assert_bitwise_equal((params, grads), before)
    assert not any(x.any() for x in fs.tree.leaves(state.moments))


@pytest.mark.parametrize("moments", [torch.bfloat16, fs.formats.MXFP8], ids=["bfloat16", "8 bits"])
def test_moments_that_are_kept_in_less_stay_near(moments):
    params, grads = drawn()
    found, state = run(optimizer(moments=moments), params, grads)
    error = (found["w"] - by_hand(params, grads)["w"]).abs().max()
    assert 0 < error < 0.1
    if moments is fs.formats.MXFP8:
        assert state.moments["nu"]["w"].root and not state.moments["mu"]["w"].root


def test_chunks_are_the_whole(monkeypatch):
    params, grads = drawn(2)
    found, _ = run(optimizer(moments=fs.formats.MXFP8), params, grads)
    monkeypatch.setattr("fsharding.optim.chunks._CHUNK", 512)
    again, _ = run(optimizer(moments=fs.formats.MXFP8), params, grads)
    fs.testing.assert_bitwise_equal(again, found)


def test_a_rule_without_moments():
    opt = fs.optim.elementwise(lambda grads, count: [g.sign() for g in grads], RATE, ())
    updates, state = opt.update({"w": torch.tensor([2.0, -3.0])}, opt.init({"w": torch.zeros(2)}))
    assert updates["w"].tolist() == pytest.approx([-RATE, RATE]) and state.moments == {}


def test_what_is_no_rule_is_refused():
    assert "a rule (grads, *moments, count)" in refusal(
        fs.optim.elementwise, lambda grads: grads, 0.1, kind=ArgumentError
    )
    text = refusal(fs.optim.elementwise, averages, 0.1, ("mu", "mu"), kind=ConfigError)
    assert text.startswith("fs.optim.elementwise got names=('mu', 'mu').")
    assert "learning_rate" in refusal(fs.optim.elementwise, averages, -0.1, ("mu", "nu"), kind=ConfigError)
    opt = optimizer()
    text = refusal(opt.update, {"w": torch.ones(2)}, opt.init({"w": torch.ones(2)}))
    assert text.startswith("fs.optim.elementwise needs the parameters for weight_decay=0.05.")
