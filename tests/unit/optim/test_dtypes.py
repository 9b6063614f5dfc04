"""Every dtype in which an optimizer may keep its state, by training: what torch makes of a state that is rounded so."""

from typing import Any

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint, optim
from fsharding.base.dtypes import wide
from fsharding.base.errors import ConfigError
from fsharding.formats.precision import Precision
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import normal_tree

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SHAPES = {"blocks": {"w": (3, 16, 24), "odd": (2, 7, 9)}, "many": (70, 1100), "v": (5, 13)}
STEPS, RATE = 6, 0.02


def loss_of(leaves, batch):
    """Depends on every element, differently at every step."""
    terms = [((x - target.to(x.dtype)) * x.sin()).sum() for x, target in zip(leaves, batch, strict=True)]
    return torch.stack([term.float() for term in terms]).sum()


def loss_fn(params, batch):
    return loss_of(fs.tree.leaves(fs.gather_unit(params)), fs.tree.leaves(batch)), 1.0


def train(opt, how=None, steps=STEPS, *, donate=False, keep=None):
    """The parameters after some steps, and the state; `keep` is called in the middle and may give another state."""
    layout = fs.plan_layout(
        normal_tree(SHAPES, 0), fs.make_mesh(device="cpu"), strategy=fs.zero(0), precision=how or Precision()
    )
    state = fs.init_state(lambda key: normal_tree(SHAPES, 0), opt, fs.random.key(0), layout)
    step = fs.make_train_step(loss_fn, opt, donate=donate)
    for i in range(steps):
        state, _ = step(state, normal_tree(SHAPES, i + 1))
        if keep is not None and i == steps // 2:
            state = keep(state)
    assert fs.debug.state_bytes(state.opt_state) == layout.memory(opt).opt_state
    return fs.tree.map(lambda x: x.to_local(), state.params), state


def plain(make, dtype):
    """torch's optimizer over float32 parameters, whose state is rounded to a dtype after each step."""
    named = fs.tree.named_leaves(normal_tree(SHAPES, 0))
    leaves = [x.clone().requires_grad_() for x in named.values()]
    units = {path: i for i, path in enumerate(named)}
    opt = make(leaves)
    for i in range(STEPS):
        grads = torch.autograd.grad(loss_of(leaves, fs.tree.leaves(normal_tree(SHAPES, i + 1))), leaves)
        for x, grad in zip(leaves, grads, strict=True):
            x.grad = grad
        opt.step()
        for state in opt.state.values():
            for x in state.values():
                if isinstance(x, torch.Tensor) and x.ndim:
                    x.copy_(x.to(dtype))
    return {path: leaves[i].detach() for path, i in units.items()}


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            moved = (0.9 * m + 0.1 * p.grad).sign()
            p.sub_(RATE * (moved + 0.1 * p))
            m.mul_(0.99).add_(0.01 * p.grad)


class Factored(torch.optim.Optimizer):
    """torch's Adafactor on each matrix of a stack."""

    def __init__(self, params, kind, **settings):
        super().__init__(params, {})
        self.kind, self.settings, self.parts = kind, settings, {}

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p not in self.parts:
                pieces = [x.detach().clone().requires_grad_() for x in (p.unbind(0) if p.ndim > 2 else [p])]
                self.parts[p] = pieces, self.kind(pieces, **self.settings)
            pieces, inner = self.parts[p]
            for x, grad in zip(pieces, p.grad.unbind(0) if p.ndim > 2 else [p.grad], strict=True):
                x.grad = grad
            inner.step()
            whole = torch.stack([x.detach() for x in pieces]) if p.ndim > 2 else pieces[0].detach()
            with torch.no_grad():
                p.copy_(whole)
            tensors = [x for state in inner.state.values() for x in state.values() if x.ndim]
            self.state[p] = dict(enumerate(tensors))


CASES: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda **how: fs.adamw(RATE, weight_decay=0.1, **how),
        lambda params: torch.optim.AdamW(params, RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ),
    "sgd": (
        lambda **how: fs.sgd(RATE, momentum=0.9, nesterov=True, weight_decay=0.1, **how),
        lambda params: torch.optim.SGD(params, RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "lion": (lambda **how: optim.lion(RATE, weight_decay=0.1, **how), Lion),
    "muon": (
        lambda **how: optim.muon(RATE, weight_decay=0.1, dtype=F32, **how),
        lambda params: Factored(params, torch.optim.Muon, lr=RATE, weight_decay=0.1),
    ),
    "adafactor": (
        lambda **how: optim.adafactor(0.5, weight_decay=0.1, **how),
        lambda params: Factored(params, torch.optim.Adafactor, lr=0.5, weight_decay=0.1),
    ),
    "from_torch": (
        lambda **how: optim.from_torch(torch.optim.RMSprop, lr=RATE, momentum=0.9, centered=True, **how),
        lambda params: torch.optim.RMSprop(params, lr=RATE, momentum=0.9, centered=True),
    ),
    "chain": (
        lambda **how: fs.optim.chain(
            fs.optim.clip_by_global_norm(1e9),
            fs.optim.multi_transform({"all": fs.adamw(RATE, **how)}, lambda p, x: "all"),
        ),
        lambda params: torch.optim.AdamW(params, RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ),
    "lookahead": (
        lambda **how: optim.lookahead(fs.adamw(RATE, **how), every=100),
        lambda params: torch.optim.AdamW(params, RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ),
}
NARROW = [BF16, F16, F32]
NEAR = {"muon": 2e-3, "adafactor": 1e-5}
"""How far a kernel of torch and ours are apart; Muon iterates in bfloat16 there."""


def check_like(found, want, near, far=0.02):
    """All within `far`, and all but a few within `near`: where two sums of one value lie on both sides of a rounding."""
    assert_trees_close(found, want, rtol=far, atol=far)
    beyond = sum(int((~torch.isclose(found[path], want[path], rtol=near, atol=near)).sum()) for path in want)
    assert beyond <= 20, f"{beyond} elements"


def apart(found, want):
    """How far two trees are from each other, on average."""
    pairs = [(found[path] - want[path]).abs().mean() for path in want]
    return float(torch.stack(pairs).mean())


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in CASES for d in NARROW if n != "from_torch" or d == F32], ids=str
)
def test_training_is_that_of_torch_with_a_state_in_this_dtype(name, dtype):
    """torch's copies are rounded to nearest, so ours are here, too."""
    ours, theirs = CASES[name]
    want, near, nearest = plain(theirs, dtype), NEAR.get(name, 2e-6), Precision(rounding="nearest")
    found = fs.tree.named_leaves(train(ours(moments=dtype), nearest)[0])
    check_like(found, want, near)
    by_layout = train(ours(), Precision(moments=dtype, rounding="nearest"), donate=True)[0]
    assert_bitwise_equal(by_layout, train(ours(moments=dtype), nearest, donate=True)[0])
    check_like(fs.tree.named_leaves(by_layout), want, near)
    if dtype != F32 and name != "muon":
        # The other arithmetic is not the same to this precision, so the dtype is what is trained with.
        assert apart(found, plain(theirs, F32)) > 50 * apart(found, want)


@pytest.mark.parametrize("name", CASES)
def test_a_dtype_of_its_own_wins_over_that_of_the_layout(name):
    ours, _ = CASES[name]
    params, state = train(ours(moments=F32), Precision(moments=BF16))
    assert_bitwise_equal(params, train(ours(), Precision())[0])
    assert {x.dtype for x in fs.tree.leaves(state.opt_state) if x.ndim} == {F32}


@pytest.mark.parametrize("name", CASES)
def test_a_wide_state_is_computed_with_in_its_dtype(name):
    ours, _ = CASES[name]
    wide_one, narrow = train(ours(moments=F64)), train(ours())
    near = {"muon": 1e-5, "lion": 1e-5}.get(name, 2e-6)
    assert {x.dtype for x in fs.tree.leaves(wide_one[1].opt_state) if x.ndim} <= {F64, F32}
    check_like(*(fs.tree.named_leaves(run[0]) for run in (wide_one, narrow)), near)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weights_are_not_rounded_to_the_dtype_of_moments(name):
    """Eight thousand neighbors in float32 that are one number in bfloat16 stay eight thousand."""
    opt = CASES[name][0](moments=BF16)
    weights = {"w": 1 + torch.arange(8192) * 2.0**-23}
    state = opt.init(weights)
    for _ in range(3):
        weights, state = optim.apply_gradients(opt, {"w": torch.full((8192,), 1e-3)}, state, weights)
    assert weights["w"].unique().numel() > 4000


def test_the_memory_of_a_layout_is_that_of_adam_in_its_dtype():
    layout = fs.plan_layout(normal_tree(SHAPES, 0), fs.make_mesh(device="cpu"), precision=Precision(moments=BF16))
    state = fs.init_state(lambda key: normal_tree(SHAPES, 0), fs.adamw(0.1), fs.random.key(0), layout)
    moments = fs.debug.state_bytes((state.opt_state.mu, state.opt_state.nu))
    assert layout.memory().opt_state == moments == 4 * sum(x.numel() for x in fs.tree.leaves(state.params))


@pytest.mark.parametrize("name", [n for n in CASES if n != "from_torch"])
def test_a_state_in_this_dtype_is_resumed_and_moved(name, tmp_path):
    opt, how = CASES[name][0](), Precision(moments=BF16)
    want = train(opt, how)[0]

    def saved(state):
        checkpoint.save(tmp_path / "here", state)
        return checkpoint.load(tmp_path / "here", state.layout, opt=opt)

    assert_bitwise_equal(train(opt, how, keep=saved)[0], want)
    assert_bitwise_equal(train(opt, how, keep=lambda state: fs.reshard(state, state.layout))[0], want)


def test_dtypes_that_kernels_lack_are_refused():
    makes = {
        "fs.adamw": lambda **how: fs.adamw(0.1, **how),
        "fs.sgd": lambda **how: fs.sgd(0.1, **how),
        "fs.optim.lion": lambda **how: optim.lion(0.1, **how),
        "fs.optim.muon": lambda **how: optim.muon(0.1, **how),
        "fs.optim.adafactor": lambda **how: optim.adafactor(0.1, **how),
        "fs.optim.from_torch": lambda **how: optim.from_torch(torch.optim.Adam, **how),
    }
    for function, make in makes.items():
        with pytest.raises(ConfigError) as caught:
            make(moments=torch.int8)
        assert str(caught.value) == (
            f"{function} got moments=torch.int8.\nUse one of torch.float16, torch.bfloat16, torch.float32, torch.float64,"
            " or None for the layout's dtype."
        )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("moments", [None, BF16, F64], ids=str)
@pytest.mark.parametrize("params", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("grads", [BF16, F32], ids=str)
def test_adam_of_any_dtypes_is_that_of_the_widest_rounded_once(params, grads, moments, donate):
    """With and without gaps, in pieces of more and of less than a chunk; parameters are not rounded to other dtypes."""
    shapes = {"long": (300, 701), "row": (9,), "s": (), "none": (0, 3), "even": (4, 64)}
    generator = torch.Generator().manual_seed(0)
    opt = fs.adamw(0.1, weight_decay=0.1, moments=moments)
    main = {name: torch.randn(shape, generator=generator).to(params) for name, shape in shapes.items()}
    given = [{name: torch.randn(shape, generator=generator).to(grads) for name, shape in shapes.items()} for _ in "abc"]
    kept = moments or wide(params)
    computed = torch.promote_types(wide(kept), params)
    want, (mu, nu) = main, ({name: torch.zeros_like(x, dtype=kept) for name, x in main.items()} for _ in "mn")
    state, found = opt.init(main), fs.tree.map(torch.clone, main)
    one = fs.adamw(0.1, weight_decay=0.1, moments=computed)
    for i, grad in enumerate(given):
        donated = fs.tree.map(torch.clone, grad)
        context = optim.UpdateContext(donate=donate, rounding="nearest")
        found, state = optim.apply_gradients(opt, donated, state, found, context, scale=0.5)
        exact = optim.AdamState(torch.tensor(i), *({n: x.to(computed) for n, x in m.items()} for m in (mu, nu)))
        widened = ({n: x.to(computed) for n, x in t.items()} for t in (grad, want))
        grad_w, want_w = widened
        want_w, exact = optim.apply_gradients(one, grad_w, exact, want_w, scale=0.5)
        want = {n: x.to(params) for n, x in want_w.items()}
        mu, nu = ({n: x.to(kept) for n, x in m.items()} for m in (exact.mu, exact.nu))
    assert_bitwise_equal((found, state.mu, state.nu), (want, mu, nu))


def test_a_transformation_of_ones_own_may_take_the_dtype():
    seen = []

    def knowing(params, context=optim.InitContext()):  # noqa: B008
        seen.append(context.moments)
        return optim.EmptyState()

    def plain_one(params):
        seen.append("nothing")
        return optim.EmptyState()

    def same(updates, state, params=None, context=None):
        return updates, state

    opt = fs.optim.chain(optim.ContextTransformation(knowing, same), fs.optim.GradientTransformation(plain_one, same))
    layout = fs.plan_layout(normal_tree(SHAPES, 0), fs.make_mesh(device="cpu"), precision=Precision(moments=F16))
    fs.init_state(lambda key: normal_tree(SHAPES, 0), opt, fs.random.key(0), layout)
    assert seen == [F16, "nothing"]
    opt.init(normal_tree(SHAPES, 0))
    assert seen[2:] == [None, "nothing"]
