"""Every optimizer at every strategy, on ranks against one process: shards of any shape, moves, files, and a decoder.

Gradients are given, so nothing is reduced, and what an element-wise optimizer does is the same in every bit.
"""

import functools
import importlib
import math
from typing import Any

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint, optim
from fsharding.base.errors import LayoutError
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import full, mesh_of, normal_tree, whole

SHAPES = {
    "w": (7, 15),
    "tall": (15, 3),
    "row": (1, 9),
    "b": (7,),
    "s": (),
    "blocks": {"w": (3, 6, 10), "tall": (3, 5, 2), "norm": (3, 10)},
    "frozen": (4,),
}
NAMES = {
    "w": ("rows", "cols"),
    "tall": ("cols", "rows"),
    "row": ("cols", "rows"),
    "b": ("rows",),
    "s": (),
    "blocks": {"w": ("layers", "rows", "cols"), "tall": ("layers", "cols", "rows"), "norm": ("layers", "cols")},
    "frozen": (None,),
}
RULES = fs.AxisRules(layers="pp", rows="tp", cols=("dp",))
STEPS = 5
ZEROS = [fs.zero(level) for level in range(4)]


class Heavy(torch.optim.Optimizer):
    """Somebody's own."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
            p.data.add_(state["m"] / state["count"], alpha=-self.param_groups[0]["lr"])


def clipped_signs(rate):
    """A pair of functions as optax has them, that knows nothing of this library but its trees."""

    def init(params):
        return {"m": fs.tree.map(torch.zeros_like, params), "count": torch.zeros(())}

    def update(updates, state, params=None):
        m = fs.tree.map(lambda m, g: 0.5 * m + g.clamp(-1, 1), state["m"], updates)
        count = state["count"] + 1
        params = fs.tree.prune(params, updates)
        moves = fs.tree.map(lambda m, p: -rate / count.item() * (m.sign() + 0.1 * p), m, params)
        return moves, {"m": m, "count": count}

    return fs.optim.GradientTransformation(init, update)


def groups(path, leaf):
    return "fast" if path.startswith("blocks") else "slow"


def matrices(path, leaf):
    return "matrix" if leaf.ndim >= 2 else "other"  # of one layer


OPTIMIZERS = {
    "sgd": lambda: fs.sgd(0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "lion": lambda: optim.lion(0.01, weight_decay=0.1),
    "narrow": lambda: fs.adamw(0.1, weight_decay=0.1, moments=torch.bfloat16),
    "nadam": lambda: optim.from_torch(torch.optim.NAdam, lr=lambda count: 0.1 / (1 + count), weight_decay=0.1),
    "rprop": lambda: optim.from_torch(torch.optim.Rprop),
    "own": lambda: optim.from_torch(Heavy, lr=0.2),
    "user": lambda: clipped_signs(0.1),
    "ema": lambda: fs.optim.chain(fs.adamw(0.1, weight_decay=0.1), optim.ema(0.9)),
    "lookahead": lambda: optim.lookahead(fs.adamw(0.1), every=2),
    "noise": lambda: fs.optim.chain(optim.add_noise(optim.annealed(0.3), fs.random.key(3)), fs.sgd(0.1)),
    "groups": lambda: fs.optim.multi_transform(
        {"fast": fs.adamw(0.1), "slow": optim.lion(0.01, weight_decay=0.5)}, groups
    ),
    "muon": lambda: fs.optim.multi_transform(
        {"matrix": optim.muon(0.02, dtype=torch.float32), "other": fs.adamw(0.1)}, matrices
    ),
    "adafactor": lambda: optim.adafactor(0.5, weight_decay=0.1),
}
SUMS = ("adafactor",)
"""Those that add over ranks."""


def planned(strategy, **axes):
    mesh = mesh_of(axes or {"dp": -1})
    return fs.plan_layout(normal_tree(SHAPES, 0), mesh, RULES, strategy, names=NAMES, frozen="frozen")


def first(opt, layout):
    return fs.init_state(lambda key: normal_tree(SHAPES, 0), opt, fs.random.key(0), layout)


def stepped(state, opt, steps, *, donate=False):
    """What `make_train_step` does once it has gradients."""
    for step in steps:
        layout = state.layout
        given = {**normal_tree(SHAPES, step), "frozen": None}
        grads = fs.shard(given, layout.main)
        if donate:
            state = state.donate()
        main = state.main if state.main is not None else fs.main_params(state.params, layout)
        context = optim.UpdateContext(donate=donate)
        updates, inner = opt.with_context().update(grads, state.opt_state, main, context)
        main = fs.optim.apply_updates(main, updates, donate=donate)
        params = fs.params_from_main(main, state.params, layout)
        state = state.replace(
            step=state.step + 1, params=params, main=main if state.main is not None else None, opt_state=inner
        )
    return state


def run_all(levels, names):
    """Parameters and state after all steps, by optimizer and strategy; the bytes that were planned and those there are."""
    found: dict[Any, Any] = {}
    for name in names:
        for level in levels:
            opt, layout = OPTIMIZERS[name](), planned(fs.zero(level))
            state = stepped(first(opt, layout), opt, range(1, STEPS + 1), donate=level % 2 == 1)
            sizes = fs.debug.state_bytes(state.opt_state), layout.memory(opt).opt_state
            found[name, level] = whole(state.params), whole(state.opt_state), sizes
    return found


@functools.cache
def alone(name):
    """One process, no process group."""
    opt, layout = OPTIMIZERS[name](), planned(fs.zero(0))
    state = stepped(first(opt, layout), opt, range(1, STEPS + 1))
    return whole(state.params), whole(state.opt_state)


# Where gradients are given, zero(2) does what zero(1) does.
LEVELS = [pytest.param((0, 1, 3), id="zero013"), pytest.param((2, 3), id="zero23", marks=full)]


@functools.cache
def on_two(levels):
    return run_ranks(run_all, 2, levels, tuple(OPTIMIZERS))


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_strategies_are_those_of_one_process(name, levels):
    params, state = alone(name)
    for level in levels:
        for there in on_two(levels):
            found = there[name, level]
            exact = name not in SUMS
            check = (
                assert_bitwise_equal if exact and name != "muon" else functools.partial(assert_trees_close, atol=1e-5)
            )
            check(found[0], params, what=f"parameters under zero({level})")
            check(found[1], state, what=f"state under zero({level})")
            if exact:
                assert_bitwise_equal(found[:2], on_two(levels)[0][name, 3][:2])


def plain_muon(w, grads, lr=0.02, momentum=0.95, decay=0.1, coefficients=(3.4445, -4.775, 2.0315)):
    """One matrix in float32, as it stands in the paper: nothing of the library."""
    a, b, c = coefficients
    m = torch.zeros_like(w)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = momentum * m + (1 - momentum) * g
        x = x.T if (tall := x.shape[0] > x.shape[1]) else x
        x = x / x.norm()
        for _ in range(5):
            s = x @ x.T
            x = a * x + (b * s + c * s @ s) @ x
        x = x.T if tall else x
        w = w - lr * decay * w - lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x
    return w


@pytest.mark.parametrize("levels", LEVELS)
def test_muon_is_a_plain_one_of_each_matrix(levels):
    given = [fs.tree.named_leaves(normal_tree(SHAPES, step)) for step in range(STEPS + 1)]
    layers = {p: x[0] if p.startswith("blocks") else x for p, x in given[0].items()}
    labels = {p: matrices(p, x) for p, x in layers.items() if not p.startswith("frozen")}
    found = {level: on_two(levels)[0]["muon", level][0] for level in levels}
    for path in (p for p, label in labels.items() if label == "matrix"):
        w, *grads = (leaves[path].flatten(0, -3) if leaves[path].ndim > 2 else leaves[path][None] for leaves in given)
        want = torch.stack([plain_muon(one, [g[i] for g in grads]) for i, one in enumerate(w)])
        for level in levels:
            assert_trees_close(
                found[level][path].view_as(want), want, rtol=1e-5, atol=1e-5, what=f"{path}, zero({level})"
            )
    assert sum(label == "matrix" for label in labels.values()) >= 3


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_are_those_that_were_planned(name, levels):
    for there in on_two(levels):
        for level in levels:
            held, planned_bytes = there[name, level][2]
            assert held == planned_bytes, f"zero({level})"


# ---------------------------------------------------------------------------------------------------- moves and files
MOVES = [({"dp": 2}, 3), ({"tp": 2}, 1), ({"pp": 2}, 3), ({"dp": 2}, 1), ({"dp": 1}, 0)]


def move_all(names, folder):
    """Parameters after a run whose state moves after every step; and each state, saved after three steps."""
    found = {}
    for name in names:
        opt = OPTIMIZERS[name]()
        state = first(opt, planned(fs.zero(3)))
        state = stepped(state, opt, range(1, 4))
        checkpoint.save(folder / name, state)
        saved = whole(state.opt_state)
        state = first(opt, planned(fs.zero(3)))
        for step, (axes, level) in enumerate(MOVES, 1):
            layout = planned(fs.zero(level), **({**axes, "dp": -1} if "dp" not in axes else {"dp": -1}))
            state = stepped(fs.reshard(state, layout), opt, [step])
        found[name] = whole(state.params), saved
    return found


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    return folder, run_ranks(move_all, 2, tuple(OPTIMIZERS), folder)[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=full) if name == "sgd" else name for name in OPTIMIZERS])
def test_a_state_moves_between_layouts_in_mid_run(name, moved):
    params, _ = alone(name)
    check = functools.partial(assert_trees_close, atol=1e-5) if name in (*SUMS, "muon") else assert_bitwise_equal
    check(moved[1][name][0], params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_of_two_ranks_is_loaded_by_one(name, moved):
    folder, found = moved
    opt = OPTIMIZERS[name]()
    # From the manifest alone; somebody's own state is known by its optimizer only.
    state = checkpoint.load(folder / name, planned(fs.zero(2)), opt=None if name != "user" else opt)
    assert_bitwise_equal(whole(state.opt_state), found[name][1])
    check = functools.partial(assert_trees_close, atol=1e-5) if name in (*SUMS, "muon") else assert_bitwise_equal
    check(whole(stepped(state, opt, (4, 5)).params), alone(name)[0])


# ------------------------------------------------------------------------------------------------------------ a decoder
CONFIG = fs.models.DecoderConfig(vocab_size=32, dim=24, layers=3, heads=2, kv_heads=1, intermediate_size=40)
TRAINED = {
    "muon": lambda: fs.optim.multi_transform(
        {"matrix": optim.muon(0.02, dtype=torch.float32), "other": fs.adamw(3e-3, eps=1e-3)}, optim.label_matrices()
    ),
    "adafactor": lambda: optim.adafactor(0.05),
    "from_torch": lambda: optim.from_torch(torch.optim.RMSprop, lr=3e-3, eps=1e-3, momentum=0.5),
}


def batches(mesh, steps=3):
    generator = torch.Generator().manual_seed(1)
    index, count = data_rank_and_size(mesh)
    for _ in range(steps):
        tokens = torch.randint(0, CONFIG.vocab_size, (8, 9), generator=generator)
        yield {"tokens": tokens[:, :-1].chunk(count)[index], "targets": tokens[:, 1:].chunk(count)[index]}


def train(name, levels, config=CONFIG, **axes):
    """Losses and parameters of a decoder under some strategies, or in a pipeline with its embedding on one stage."""
    model, mesh, found = fs.models.decoder(config), mesh_of(axes or {"dp": -1}), []
    for level in levels:
        ranks = axes.get("pp", 1)
        stages = fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", ranks, 2)) if ranks > 1 else None
        layout = fs.plan_layout(model, mesh, strategy=fs.zero(level), stages=stages)
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), TRAINED[name]())
        state = fs.init_state(model, opt, fs.random.key(0), layout)
        step = fs.make_train_step(model, opt, donate=True, microbatches=ranks)
        losses = []
        for batch in batches(mesh):
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
        if axes:
            state = fs.reshard(state, fs.plan_layout(model, mesh_of({"dp": -1}), strategy=fs.zero(3)))
        found.append((losses, whole(state.params), whole(state.opt_state)))
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_a_decoder_learns_the_same_under_every_strategy(name):
    losses, params, _ = train(name, [0])[0]
    runs = run_ranks(train, 2, name, range(4))[0]
    for run in runs:
        assert_trees_close(run[0], losses, rtol=1e-5)
        assert_trees_close(run[1], params, rtol=0, atol=2e-4)
        if name != "adafactor":
            assert_bitwise_equal(run, runs[3])
        assert_trees_close(run, runs[3], rtol=1e-5, atol=1e-5)


ROUTED = fs.models.DecoderConfig(**{**vars(CONFIG), "experts": fs.models.Experts(4, 2, 16)})
PLACES = [
    ("pp", CONFIG),
    pytest.param("tp", CONFIG, marks=full),
    pytest.param("ep", ROUTED, marks=full),
]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("axis", "config"), PLACES, ids=["pp", "tp", "ep"])
def test_a_state_leaves_other_axes(name, axis, config):
    reference = train(name, [0], config)[0]
    losses, params, state = run_ranks(train, 2, name, [1], config, **{axis: 2})[0][0]
    assert_trees_close(losses, reference[0], rtol=1e-5)
    assert_trees_close(params, reference[1], rtol=0, atol=2e-4)
    assert_trees_close(state, reference[2], rtol=1e-3, atol=1e-4 if name == "from_torch" else 1e-6)


# ------------------------------------------------------------------------------------------------------ whole matrices
def muon_traffic():
    mesh, shape = mesh_of({"dp": -1}), (4, 6, 10)
    x = fs.shard(torch.ones(shape), fs.NamedSharding(mesh, fs.P(None, None, "dp")))
    opt = optim.muon(0.1)
    state = opt.init(x)
    opt.update(x, state, x)
    with fs.debug.count_bytes() as traffic:
        opt.update(x, state, x)
    return traffic.bytes


def test_muon_sends_what_others_iterate_on_and_gets_it_back():
    # Of a rank's half of 240 elements half goes to the other one, in bfloat16; as much comes back.
    assert run_ranks(muon_traffic, 2) == [240, 240]


def test_matrices_of_a_stack_are_spread_over_all_free_axes():
    spread = importlib.import_module("fsharding.optim.muon")._by_matrix
    mesh = fs.AbstractMesh(("pp", "dp", "ep", "tp"), (2, 2, 2, 2))
    cases = {
        (("pp", "tp", "dp"), (8, 6, 10)): fs.P(("pp", "dp", "ep", "tp")),
        (("pp", "ep", "tp", "dp"), (2, 64, 6, 10)): fs.P("pp", ("ep", "dp", "tp")),
        (("tp", "dp"), (6, 10)): fs.P(),
    }
    for (cuts, shape), goal in cases.items():
        assert spread(fs.NamedSharding(mesh, fs.P(*cuts)), shape).spec == goal


# ----------------------------------------------------------------------------------------------------------------- norm
def norm_of(axes, specs):
    """Of leaves that some ranks all have, large enough to share the work, and small ones."""
    mesh, noise = mesh_of(axes), torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=noise) for shape in [(600, 501), (7, 6)] for _ in specs]
    cuts = [fs.NamedSharding(mesh, fs.P(*spec)) for spec in specs] * 2
    with fs.debug.count_bytes() as sent:
        found = fs.global_norm(fs.shard(values, cuts))
    exact = torch.cat([x.double().reshape(-1) for x in values]).norm().float()
    return found.item(), exact.item(), {axes: calls for axes, (calls, _) in sent.by_axes.items()}


@pytest.mark.parametrize(
    ("axes", "specs", "calls"),
    [
        ({"dp": 3}, [(), (None, "dp")], {("dp",): 1}),
        ({"dp": 2, "tp": 2}, [(), ("tp",), ("tp", "dp")], {("dp",): 1, ("dp", "tp"): 1, ("tp",): 1}),
        ({"replica": 2, "dp": 2}, [(), ("dp",)], {("replica", "dp"): 1, ("dp",): 1}),
        ({"tp": 2}, [()], {}),
    ],
)
def test_ranks_share_the_norm_of_what_they_all_have(axes, specs, calls):
    ranks = math.prod(axes.values())
    for found, exact, seen in run_ranks(norm_of, ranks, axes, specs):
        assert (found, seen) == (exact, calls)


# ---------------------------------------------------------------------------------------------- dims made of parts
PARTS = {
    "rows": (7, 15),
    "cols": (5, 6),
    "few": (3, 4),
    "b": (8,),
    "s": (),
    "blocks": {"qkv": (4, 8, 10), "both": (4, 6, 9), "norm": (4, 6), "plain": (4, 3, 5)},
}
PART_NAMES = {
    "rows": (fs.Fused("rows", (1, 3, 3)), "cols"),
    "cols": ("cols", fs.Fused("rows", (4, 2))),
    "few": (fs.Fused("rows", (1, 1, 1)), None),  # all of it on the first rank
    "b": (fs.Fused("rows", (5, 3)),),
    "s": (),
    "blocks": {
        "qkv": ("layers", fs.Fused("rows", (4, 2, 2)), "cols"),
        "both": ("layers", "cols", fs.Fused("rows", (3, 6))),
        "norm": ("layers", fs.Fused("rows", (4, 2))),
        "plain": ("layers", "rows", "cols"),
    },
}


def of_parts(seed):
    generator = torch.Generator().manual_seed(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return fs.tree.map(lambda shape: torch.randn(shape, generator=generator), PARTS, is_leaf=is_shape)


def on_parts(name, levels, stages=None, **axes):
    """Parameters and state after all steps, on one layout for all, and the bytes that were planned and those there are."""
    found = []
    for level in levels:
        opt, mesh = OPTIMIZERS[name](), mesh_of(axes)
        layout = fs.plan_layout(of_parts(0), mesh, RULES, fs.zero(level), names=PART_NAMES, stages=stages)
        state = fs.init_state(lambda key: of_parts(0), opt, fs.random.key(0), layout)
        sizes = fs.debug.state_bytes(state.opt_state), layout.memory(opt).opt_state
        for step in range(1, STEPS + 1):
            grads = fs.shard(of_parts(step), layout.main)
            context = optim.UpdateContext(shardings=layout.main, donate=level % 2 == 1)
            main = state.main if state.main is not None else fs.main_params(state.params, layout)
            main, inner = optim.apply_gradients(opt, grads, state.opt_state, main, context)
            params, kept = fs.params_from_main(main, state.params, layout), main if state.main is not None else None
            state = state.replace(params=params, main=kept, opt_state=inner)
        one = fs.reshard(state, fs.plan_layout(of_parts(0), mesh_of({"dp": -1}), RULES, fs.zero(0), names=PART_NAMES))
        found.append((whole(one.params), whole(one.opt_state), sizes))
    return found


MESHES = [
    pytest.param({"tp": 2}, None, id="tp"),
    pytest.param({"dp": 2, "tp": 2}, None, id="dp_tp", marks=full),
    pytest.param({"pp": 2, "tp": 2}, {"blocks": [[0, 2], [1, 3]], "rows": 0, "few": 1}, id="pp_tp"),
]


@functools.cache
def on_mesh(axes, stages):
    axes, stages = (
        dict(axes),
        {path: owners if isinstance(owners, int) else [*map(list, owners)] for path, owners in stages},
    )
    return run_ranks(on_all_parts, math.prod(axes.values()), stages or None, axes)


def on_all_parts(stages, axes):
    return {name: on_parts(name, [1, 3] if "dp" in axes else [1], stages, **axes) for name in OPTIMIZERS}


@pytest.mark.parametrize(("axes", "stages"), MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dims_made_of_parts_are_updated_as_by_one_process(name, axes, stages):
    params, state, _ = on_parts(name, [0], dp=1)[0]
    # Sums over ranks, and products of other batches of matrices, round differently; all else does not.
    exact = name not in (*SUMS, "muon")
    check = assert_bitwise_equal if exact else functools.partial(assert_trees_close, rtol=1e-5, atol=1e-5)
    frozen = tuple((p, o if isinstance(o, int) else tuple(map(tuple, o))) for p, o in (stages or {}).items())
    for there in on_mesh(tuple(axes.items()), frozen):
        for found in there[name]:
            check(found[0], params)
            check(found[1], state)
            if (name, "pp" in axes) != (
                "adafactor",
                True,
            ):  # whose statistics of a leaf of another stage have no columns
                assert found[2][0] == found[2][1]


def step_on_parts(name, **axes):
    """Through the step itself, which says where leaves are."""
    opt, whole_names = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), OPTIMIZERS[name]()), {"w": PART_NAMES["rows"]}
    layout = fs.plan_layout({"w": of_parts(0)["rows"]}, mesh_of(axes), RULES, fs.zero(1), names=whole_names)
    state = fs.init_state(lambda key: {"w": of_parts(0)["rows"]}, opt, fs.random.key(0), layout)

    def loss_fn(params, batch):
        w = fs.gather_unit(params)["w"]
        return fs.ops.psum(w.square().sum(), "tp"), batch.sum()

    step = fs.make_train_step(loss_fn, opt)
    for _ in range(3):
        state, _ = step(state, torch.ones(4))
    one = fs.plan_layout({"w": of_parts(0)["rows"]}, mesh_of({"dp": -1}), RULES, fs.zero(0), names=whole_names)
    return whole(fs.reshard(state, one).params)


@pytest.mark.parametrize("name", ["adafactor", "noise"])
def test_a_step_says_where_dims_made_of_parts_are(name):
    want = step_on_parts(name, dp=1)
    for found in run_ranks(step_on_parts, 2, name, tp=2):
        assert_trees_close(found, want, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- errors
def hidden_leaves():
    mesh = mesh_of({"tp": 2})
    shapes = {"qkv": torch.ones(4, 8), "w": torch.ones(4, 8)}
    names = {"qkv": (None, fs.Fused("rows", (4, 2, 2))), "w": (None, "rows")}
    rules = fs.AxisRules(rows="tp")
    layout = fs.plan_layout(shapes, mesh, rules, names=names)
    params, texts = fs.shard(shapes, layout), []
    noise = optim.add_noise(0.1, fs.random.key(0))
    state = noise.init(params)
    other = fs.plan_layout(shapes, mesh, rules, names={**names, "qkv": (None, fs.Fused("rows", (1, 7)))})
    for call in (
        lambda: optim.adafactor().init(params),
        lambda: optim.muon(0.1).init(params),
        lambda: noise.update(params, state),
        lambda: noise.update(params, state, params, optim.UpdateContext(shardings=other.main)),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_what_a_dtensor_does_not_tell_is_refused():
    mend = (
        "Pass their shardings, as the train step does: fs.optim.InitContext(shardings=layout.main) to opt.init,"
        " fs.optim.UpdateContext(shardings=layout.main) to opt.update."
    )
    *texts, other = run_ranks(hidden_leaves, 2)[0]
    names = ("fs.optim.adafactor", "fs.optim.muon", "fs.optim.add_noise")
    for name, text in zip(names, texts, strict=True):
        assert text == f"{name} cannot tell which ranks own leaves with assignments.\n  qkv is assigned over tp\n{mend}"
    assert other == (
        "fs.optim.add_noise cannot tell which ranks own leaves with assignments.\n"
        f"  qkv: P() assigned over tp of [4, 8] does not match this rank's shard: [4, 5], but it has [4, 4]\n{mend}"
    )
