"""Law: names of parameters change nothing, also if they are the names of fields of an optimizer's or the run's state."""

import itertools
from datetime import timedelta

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.interop.module.structure import nested
from fsharding.testing import run_ranks
from tests.helpers import examples, slow

ROWS, COLUMNS = ("cut", None), (None, "cut")
RULES = fs.AxisRules(cut=("dp",))


def momentum(grads, mu, nu, count):
    """A rule of a user with two moments, one of which grows with the number of updates."""
    for g, m, n in zip(grads, mu, nu, strict=True):
        m.lerp_(g, 0.1)
        n.add_(count * g.square())
    return [m / (1 + n) for m, n in zip(mu, nu, strict=True)]


OPTIMIZERS = {
    "adamw": lambda: fs.adamw(0.1, weight_decay=0.1),
    "sgd": lambda: fs.sgd(0.1, momentum=0.9),
    "lion": lambda: fs.optim.lion(0.1),
    "adafactor": lambda: fs.optim.adafactor(0.1),
    "muon": lambda: fs.optim.muon(0.1),
    "ema": lambda: fs.optim.chain(fs.adamw(0.1), fs.optim.ema(0.9)),
    "from_torch": lambda: fs.optim.from_torch(torch.optim.AdamW, lr=0.1),
    "elementwise": lambda: fs.optim.elementwise(momentum, 0.1, names=("mu", "nu")),
    "groups": lambda: fs.optim.multi_transform(
        {"mu": fs.adamw(0.1), "w": fs.sgd(0.1, momentum=0.9)}, lambda path, x: "mu" if x.shape[-1] == 6 else "w"
    ),
}
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", fs.zero(3).with_memory(moments="host"))


def loss_fn(params, batch):
    # Each gradient follows from its own leaf, whatever its place in the tree.
    return sum((x**3).sum() for x in fs.tree.leaves(fs.gather_unit(params))) * batch["x"].sum(), len(batch["x"])


def trained(names, opt, strategy, folder):
    """Train, save, load, reshard and train; return the leaves of params and optimizer state by their place."""
    mesh = fs.make_mesh(device="cpu", dp=-1, timeout=timedelta(seconds=20))
    values = [torch.randn(4, 6 + 2 * (i % 2), generator=torch.Generator().manual_seed(i)) for i in range(len(names))]
    params = nested(dict(zip(names, values, strict=True)))
    dims = nested(
        dict(zip(names, [dims for dims, _ in zip(itertools.cycle((ROWS, COLUMNS)), names, strict=False)], strict=True))
    )
    layout, other = (fs.plan_layout(params, mesh, RULES, s, names=dims) for s in (strategy, "zero1"))
    # A rule of the user's is no optimizer of ours, which a checkpoint could name.
    known, opt = opt != "elementwise", OPTIMIZERS[opt]()
    step = fs.make_train_step(loss_fn, opt)
    batch = fs.local_batch({"x": torch.ones(2)}, mesh)
    state = step(fs.init_state(lambda key: params, opt, fs.random.key(0), layout), batch)[0]
    fs.checkpoint.save(folder, state)
    state = step(fs.checkpoint.load(folder, other, opt=None if known else opt), batch)[0]
    state = step(fs.reshard(state, layout), batch)[0]
    fs.checkpoint.save(f"{folder}-opt", state)
    state = step(fs.checkpoint.load(f"{folder}-opt", layout, opt=opt), batch)[0]
    planned = {entry.path: entry for entry in layout.entries(opt)}
    held = fs.tree.named_leaves({"opt_state": state.opt_state})
    assert held.keys() == {path for path, entry in planned.items() if entry.field == "opt_state"}
    assert all((planned[path].of is not None) == (x.ndim > 0) for path, x in held.items())
    found = fs.tree.named_leaves(fs.unshard(state.params))
    return [found[name] for name in names]


def both(names, opt, strategy, folder):
    neutral = [f"a{i}" if i % 2 else f"b.a{i}" for i in range(len(names))]
    plain = trained(neutral, opt, strategy, f"{folder}/plain")
    for x, y in zip(plain, trained(names, opt, strategy, f"{folder}/named"), strict=True):
        assert torch.equal(x, y)
    return len(plain)


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=[slow] * (s in ("zero0", "zero1", "zero2"))) for s in STRATEGIES], ids=str
)
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_a_parameter_may_be_called_as_a_moment(opt, strategy, tmp_path):
    assert run_ranks(both, 2, ("w", "mu.w"), opt, strategy, str(tmp_path)) == [2, 2]


FIELDS = (
    "mu",
    "nu",
    "row",
    "col",
    "full",
    "count",
    "params",
    "main",
    "opt_state",
    "average",
    "moments",
    "slots",
    "states",
)


@slow
@pytest.mark.parametrize("opt", OPTIMIZERS)
def test_every_field_is_a_name(opt, tmp_path):
    names = (*FIELDS, *(f"w.{field}" for field in FIELDS))
    assert run_ranks(both, 2, names, opt, "zero3", str(tmp_path)) == [len(names)] * 2


@st.composite
def paths(draw):
    """Paths of parameters, of which none is the beginning of another."""
    part = st.sampled_from([*FIELDS, "w", "0", "codes", "step", "key", "groups"])
    path = st.lists(part, min_size=1, max_size=3).map(".".join)
    names = draw(st.lists(path, min_size=1, max_size=4, unique=True))
    return tuple(a for a in names if not any(a != b and f"{a}.".startswith(f"{b}.") for b in names))


@examples(6, 200)
@given(names=paths(), opt=st.sampled_from([*OPTIMIZERS]), strategy=st.sampled_from(STRATEGIES))
def test_names_change_nothing(names, opt, strategy, tmp_path_factory):
    assume(len(names) > 1 or opt != "groups")
    assert run_ranks(both, 2, names, opt, strategy, str(tmp_path_factory.mktemp("names"))) == [len(names)] * 2
