"""Every transform of torch.func over sharded parameters, against the same on one process with nothing cut.

The model is a decoder, so the transforms go through the unit functions, remat and most of `ops` at once.
"""

import functools
import re

import pytest
import torch
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import SpecError, TransformError
from fsharding.mesh.abstract_mesh import DATA_AXES, AbstractMesh
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.models.moe import Experts
from fsharding.testing import assert_bitwise_equal, assert_trees_close, device_mesh, local_part, run_ranks
from tests.helpers import full

pytestmark = pytest.mark.timeout(300)

CONFIG = fs.models.DecoderConfig(vocab_size=16, dim=16, layers=2, heads=4, kv_heads=2, intermediate_size=32)
MIXED = fs.models.DecoderConfig(
    vocab_size=16, dim=16, layers=2, heads=4, kv_heads=2,
    experts=Experts(count=4, active=2, intermediate_size=16, balance=0.1, z=0.1, bias_rate=1e-3),
)  # fmt: skip
ROWS, LENGTH = 4, 8
ALONE = AbstractMesh(("dp",), (1,))


def is_local(x):
    return isinstance(x, fs.Local)


def whole(model, seed):
    """Values of all leaves, large enough that second derivatives are no rounding."""
    draws = model.init(fs.random.key(0))
    key, count = fs.random.key(seed), len(fs.tree.leaves(draws))
    leaves, spec = fs.tree.flatten(draws)
    keys = fs.random.split(key, count).unbind(0)
    values = [fs.random.normal(k, leaf.shape, std=0.3).tensor() for k, leaf in zip(keys, leaves, strict=True)]
    return fs.tree.unflatten(spec, [1 + v if v.ndim < 2 else v for v in values])


def batch_of(mesh):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    index, count = data_rank_and_size(mesh)
    batch = {"tokens": rows[:, :-1].chunk(count)[index], "targets": rows[:, 1:].chunk(count)[index]}
    return ops.cut_sequence(batch, mesh=mesh)


def loss_of(model, params, batch, policy):
    """The sum of this rank's losses, a few units of the model at a time."""
    x = model.embed(fs.gather_unit(params["embed"]), batch)
    x = fs.scan_units(model.block, params["blocks"], x, policy=policy)
    return model.head(fs.gather_unit(params["head"]), x, batch)[0]


def mean_loss(model, params, batch, policy):
    """The mean over all ranks' tokens: the same on all ranks."""
    return ops.psum(loss_of(model, params, batch, policy), DATA_AXES) / (ROWS * LENGTH)


def stacked(p, v):
    """Three settings of the parameters, along a new first dim."""
    return torch_pytree.tree_map(lambda a, b: torch.stack([a, b, a - b]), p, v)


def in_blocks(f, p):
    """As a function of a leaf that is scanned over."""
    return lambda norm: f({**p, "blocks": {**p["blocks"], "norm1": norm}})


TRANSFORMS = {
    "value": lambda f, p, v: f(p),
    "grad": lambda f, p, v: grad(f)(p),
    "vjp": lambda f, p, v: vjp(f, p)[1](torch.ones(()))[0],
    "jvp": lambda f, p, v: jvp(f, (p,), (v,)),
    "jacrev": lambda f, p, v: jacrev(lambda p: torch.stack([f(p), f(p).square()]))(p),
    "hvp, forward over reverse": lambda f, p, v: jvp(grad(f), (p,), (v,))[1],
    "hvp, reverse over reverse": lambda f, p, v: grad(lambda p: fs.tree.vdot(grad(f)(p), v))(p),
    "hvp, reverse over forward": lambda f, p, v: grad(lambda p: jvp(f, (p,), (v,))[1])(p),
    "norm of the gradient": lambda f, p, v: grad(lambda p: fs.tree.vdot(*[grad(f)(p)] * 2).sqrt())(p),
    "hessian of a leaf": lambda f, p, v: fs.hessian(lambda n: f({**p, "head": {**p["head"], "norm": n}}))(
        p["head"]["norm"]
    ),
    "jacfwd of a leaf": lambda f, p, v: fs.jacfwd(lambda n: f({**p, "head": {**p["head"], "norm": n}}))(
        p["head"]["norm"]
    ),
    "hessian of a leaf of the blocks": lambda f, p, v: fs.hessian(in_blocks(f, p))(p["blocks"]["norm1"]),
    "jacfwd of a leaf of the blocks": lambda f, p, v: fs.jacfwd(in_blocks(f, p))(p["blocks"]["norm1"]),
    "vmap": lambda f, p, v: vmap(f)(stacked(p, v)),
    "vmap of grad": lambda f, p, v: vmap(grad(f))(stacked(p, v)),
    "vmap of hvp": lambda f, p, v: vmap(lambda t: jvp(grad(f), (p,), (t,))[1])(stacked(v, p)),
}
ALL = tuple(TRANSFORMS)
SOME = ("value", "grad", "jvp", "hvp, forward over reverse", "hvp, reverse over reverse", "vmap of grad")
FEW = ("grad", "hvp, forward over reverse")
WITHOUT_VMAP = tuple(name for name in SOME if "vmap" not in name)


def transformed(names, f, p, v):
    return {name: TRANSFORMS[name](f, p, v) for name in names}


@functools.cache
def reference(config, names):
    """On one process, of whole plain tensors."""
    model = fs.models.decoder(config, attention="gather")
    p, v = whole(model, 1), whole(model, 2)
    with fs.set_mesh(ALONE):
        batch = batch_of(ALONE)
        return transformed(names, lambda p: mean_loss(model, p, batch, fs.policies.everything_saveable), p, v)


def part_of(x, want):
    """This rank's part of what one process has; dims that a transform put first are whole."""
    sharding, lead = x.sharding, x.value.ndim - len(x.shape)
    if lead:
        sharding = fs.NamedSharding(sharding.mesh, fs.P(*(None,) * lead, *sharding.spec))
    return local_part(want, sharding)


def compare(config, axes, strategy, policy, kind, sequence, names):
    mesh = device_mesh(AbstractMesh(tuple(axes), tuple(axes.values())))
    model = fs.models.decoder(config, attention=kind, sequence=sequence)
    layout = fs.plan_layout(model, mesh, fs.DEFAULT_RULES, strategy)
    p, v = (fs.shard(whole(model, seed), layout) for seed in (1, 2))
    batch = batch_of(mesh)
    found = {}

    def keep(p, v):
        found.update(transformed(names, lambda p: mean_loss(model, p, batch, policy), p, v))
        return found

    at_rest = fs.shard_map(keep)(p, v)
    for name, want in reference(config, names).items():
        flat = fs.tree.named_leaves(found[name], is_leaf=is_local)
        wants = fs.tree.named_leaves(want)
        assert flat.keys() == wants.keys(), name
        assert [*fs.tree.named_leaves(at_rest[name])] == [*wants]
        # A load is told by every backward pass, and remat has one more: in a second derivative it has no meaning.
        loads = {path for path in flat if path.endswith("experts.bias") and name == "hvp, reverse over reverse"}
        for path, x in ((path, x) for path, x in flat.items() if path not in loads):
            target = part_of(x, wants[path]) if is_local(x) else wants[path]
            value, scale = x.value if is_local(x) else x, float(wants[path].abs().max())
            assert_trees_close(value, target, rtol=1e-5, atol=1e-5 * scale, what=f"{name} {path}")


P = fs.policies
CASES = [
    ({"dp": 2}, fs.zero(0), P.save_except_gathered, SOME),
    ({"dp": 2}, fs.zero(1), P.everything_saveable, FEW),
    ({"dp": 2}, fs.zero(2), P.nothing_saveable, FEW),
    ({"dp": 2}, fs.zero(3), P.save_except_gathered, ALL),
    ({"dp": 2}, fs.zero(3), P.nothing_saveable, SOME),
    ({"replica": 2}, fs.hybrid(), P.dots_saveable, FEW),
    ({"replica": 2}, fs.hybrid(params=True, grads=True, opt_state=True), P.save_except_gathered, FEW),
    pytest.param({"dp": 4}, fs.zero(3), P.nothing_saveable, ALL, marks=full),
    pytest.param({"replica": 2, "dp": 2}, fs.hybrid(), P.save_except_gathered, ALL, marks=full),
    pytest.param({"replica": 2, "dp": 2}, fs.hybrid(opt_state=True), P.nothing_saveable, ALL, marks=full),
    pytest.param({"dp": 2, "ep": 2}, fs.zero(1), P.nothing_saveable, ALL, marks=full),
    *(pytest.param({"dp": 2}, fs.zero(i), P.nothing_saveable, ALL, marks=full) for i in range(4)),
    pytest.param({"replica": 2}, fs.hybrid(), P.nothing_saveable, ALL, marks=full),
    pytest.param({"dp": 4}, fs.zero(0), P.dots_saveable, ALL, marks=full),
    pytest.param({"dp": 4}, fs.zero(2), P.save_except_gathered, ALL, marks=full),
    pytest.param(
        {"replica": 2, "dp": 2}, fs.hybrid(params=True, grads=True, opt_state=True), P.nothing_saveable, ALL, marks=full
    ),
]


def ranks_of(axes):
    return torch.Size(axes.values()).numel()


@pytest.mark.parametrize(("axes", "strategy", "policy", "names"), CASES)
def test_every_transform_through_every_strategy(axes, strategy, policy, names):
    run_ranks(compare, ranks_of(axes), CONFIG, axes, strategy, policy, "gather", False, names)


AXES_CASES = [
    ({"tp": 2}, "gather", False, P.nothing_saveable, SOME),
    ({"tp": 2}, "gather", True, P.save_except_gathered, FEW),
    ({"cp": 2}, "ring", False, P.save_except_gathered, FEW),
    ({"cp": 2}, "ulysses", False, P.nothing_saveable, FEW),
    pytest.param({"tp": 2}, "gather", True, P.nothing_saveable, ALL, marks=full),
    pytest.param({"cp": 2}, "ring", False, P.nothing_saveable, ALL, marks=full),
    pytest.param({"dp": 2, "tp": 2}, "gather", True, P.nothing_saveable, ALL, marks=full),
    pytest.param({"cp": 2, "tp": 2}, "ring", False, P.nothing_saveable, ALL, marks=full),
]


@pytest.mark.parametrize(("axes", "kind", "sequence", "policy", "names"), AXES_CASES)
def test_every_transform_over_the_axes_of_a_model(axes, kind, sequence, policy, names):
    run_ranks(compare, ranks_of(axes), CONFIG, axes, fs.zero(3), policy, kind, sequence, names)


EXPERTS_CASES = [
    ({"ep": 2}, P.nothing_saveable, FEW),
    pytest.param({"ep": 2}, P.save_except_gathered, WITHOUT_VMAP, marks=full),
    pytest.param({"dp": 2}, P.nothing_saveable, WITHOUT_VMAP, marks=full),
    pytest.param({"ep": 2, "tp": 2}, P.nothing_saveable, WITHOUT_VMAP, marks=full),
]


@pytest.mark.parametrize(("axes", "policy", "names"), EXPERTS_CASES)
def test_every_transform_through_experts(axes, policy, names):
    run_ranks(compare, ranks_of(axes), MIXED, axes, fs.zero(3), policy, "gather", False, names)


# ------------------------------------------------------------------------------------------- exact without reductions
def exact():
    """Every rank has all rows and no sum is taken over ranks: what is gathered is what one process has."""
    mesh = device_mesh(AbstractMesh(("dp",), (2,)))
    model, names = fs.models.decoder(CONFIG, attention="gather"), ("value", "jvp", "vmap", "jacfwd of a leaf")
    whole_p, whole_v = whole(model, 1), whole(model, 2)
    batch = batch_of(ALONE)
    for policy in (P.save_except_gathered, P.nothing_saveable):
        run = functools.partial(transformed, names, lambda p, policy=policy: loss_of(model, p, batch, policy))
        want = run(whole_p, whole_v)
        for level in (0, 3):
            layout = fs.plan_layout(model, mesh, fs.DEFAULT_RULES, fs.zero(level))
            p, v = (fs.shard(x, layout) for x in (whole_p, whole_v))
            assert_bitwise_equal(fs.shard_map(run)(p, v), want, f"zero({level}) {policy.name}")


def test_what_only_gathers_is_exact():
    run_ranks(exact, 2)


# ------------------------------------------------------------------------------------------------ vmap over stacks
def members(strategy, policy):
    """An ensemble: leaves [members, ...], cut along another dim, under a vmap that takes the first dim away."""
    mesh = device_mesh(AbstractMesh(("dp",), (2,)))
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": {"w": (3, 5, 4)}, "blocks": {"w": (3, 2, 5, 5), "b": (3, 2, 5)}}
    values = fs.tree.map(lambda s: torch.randn(s, generator=generator), shapes, is_leaf=lambda x: isinstance(x, tuple))
    names = {
        "first": {"w": ("layers", "mlp", None)},
        "blocks": {"w": ("layers", "layers", "mlp", None), "b": ("layers", "layers", "mlp")},
    }
    layout = fs.plan_layout(values, mesh, fs.AxisRules(layers=None, mlp="dp"), strategy, names=names)
    params, x = fs.shard(values, layout), torch.randn(2, 6, 4, generator=generator)

    def loss(params, x):
        x = torch.tanh(x @ fs.gather_unit(params["first"])["w"].T)
        x = fs.scan_units(lambda p, x: torch.tanh(x @ p["w"].T + p["b"]), params["blocks"], x, policy=policy)
        return x.square().sum()

    each = vmap(grad(loss), in_dims=(0, None))
    want = each(values, x.flatten(0, 1))
    mine = x[mesh.get_local_rank("dp")]
    found = fs.shard_map(each)(params, mine)
    assert [str(fs.typeof(a)) for a in fs.tree.leaves(found)] == [str(fs.typeof(a)) for a in fs.tree.leaves(params)]
    close = functools.partial(assert_trees_close, rtol=1e-5, atol=1e-5)
    close(fs.unshard(found), want)
    inside, _ = fs.value_and_grad(lambda p: vmap(loss, in_dims=(0, None))(p, mine).sum())(params)
    (total, _), grads = fs.value_and_grad(lambda p: (vmap(loss, in_dims=(0, None))(p, mine).sum(), 1), mean=False)(
        params
    )
    close(inside, total / 2)
    close(fs.unshard(grads), want)


@pytest.mark.parametrize("policy", [P.save_except_gathered, P.nothing_saveable], ids=lambda p: p.name)
def test_an_ensemble_under_vmap(policy):
    for strategy in (fs.zero(1), fs.zero(3)):
        run_ranks(members, 2, strategy, policy)


def remembered():
    """Gradients of gradients inside `value_and_grad`, by autograd; and a pullback that leaves the mesh behind."""
    mesh = device_mesh(AbstractMesh(("dp",), (2,)))
    w = torch.linspace(-1, 1, 6).view(3, 2)
    params = fs.shard({"w": w}, {"w": fs.NamedSharding(mesh, fs.P("dp"))})
    x = torch.linspace(0, 1, 4).view(2, 2)[mesh.get_local_rank("dp")]

    def inner(w, x):
        return (torch.tanh(w @ x) ** 2).sum()

    def adapted(w, x):
        (g,) = torch.autograd.grad(inner(w, x), [w], create_graph=True)
        return inner(w - 0.1 * g, x)

    found = fs.value_and_grad(lambda p: (adapted(fs.gather_unit(p)["w"], x), 1), mean=False)(params)[1]
    want = grad(lambda w: sum(inner(w - 0.1 * grad(inner)(w, row), row) for row in torch.linspace(0, 1, 4).view(2, 2)))
    assert_trees_close(fs.unshard(found)["w"], want(w), rtol=1e-5, atol=1e-6)

    def f(p):
        return fs.remat(lambda u: ops.psum(inner(fs.gather_unit(u)["w"], x), "dp"))(p)

    pull = []
    fs.shard_map(lambda p: pull.append(vjp(f, p)[1]))(params)
    by_hand = fs.shard_map(lambda p: grad(f)(p))(params)
    assert_bitwise_equal(pull[0](torch.ones(()))[0]["w"].value, by_hand["w"].to_local())


def test_derivatives_that_leave_their_context():
    run_ranks(remembered, 2)


# ------------------------------------------------------------------------------------------------------------ refusals
def refusals():
    mesh = device_mesh(AbstractMesh(("dp",), (2,)))
    params = fs.shard({"w": torch.ones(4, 2)}, {"w": fs.NamedSharding(mesh, fs.P("dp"))})

    def f(p):
        return ops.psum(fs.gather_unit(p)["w"].square().sum(), "dp")

    texts = []
    for call in (
        lambda: grad(f)(params),
        lambda: grad(fs.shard_map(f))(params),
        lambda: fs.shard_map(torch.func.hessian(f))(params),
        lambda: fs.shard_map(torch.func.jacfwd(f))(params),
        lambda: fs.shard_map(lambda p: torch.func.jacfwd(lambda w: f({**p, "w": w}))(p["w"]))(params),
        lambda: fs.shard_map(grad(lambda p: torch.func.linearize(f, p)[0]))(params),
        lambda: fs.value_and_grad(lambda p: torch.func.linearize(lambda s: f(p) * s, torch.ones(()))[0])(params),
        lambda: torch.func.functionalize(lambda x: ops.psum(x, "dp", mesh=mesh))(torch.ones(2)),
        lambda: fs.shard_map(jacrev(grad(f)))(params),
        lambda: fs.shard_map(vmap(f))(params),
        lambda: fs.shard_map(lambda p: fs.value_and_grad(f)(p))(params),
        lambda: jvp(lambda s: fs.value_and_grad(lambda p: f(p) * s)(params)[0], (torch.ones(()),), (torch.ones(()),)),
        lambda: fs.value_and_grad(lambda p: grad(lambda w: w.sum())(fs.gather_unit(p)["w"]).sum())(params),
        lambda: fs.shard_map(lambda p: fs.Local(p["w"].value[0], p["w"].sharding, p["w"].shape))(params),
        lambda: fs.shard_map(fs.hessian(lambda n: n["n"].float()))({"n": torch.tensor(1)}),
    ):
        try:
            call()
        except TransformError as error:
            texts.append(re.sub(r"(test_transforms\.py):\d+", r"\1", str(error)))
        else:
            texts.append("nothing")
    return texts


LEAF = "float32[4@dp, 2]"


def test_what_has_no_meaning_is_refused():
    both = "Use fs.jacfwd and fs.hessian, which differentiate with respect to the full leaves."
    moved = (
        "torch.func.jacfwd and hessian cannot differentiate with respect to sharded leaves: they would perturb every shard "
        f"at once.\n  {LEAF}\n{both}"
    )
    for texts in run_ranks(refusals, 2):
        assert texts == [
            f"fs.gather_unit got DTensors out of a torch.func transform.\n  w is {LEAF}\n"
            "Transform the function of local nodes: fs.shard_map(torch.func.grad(f))(params).",
            "fs.shard_map cannot run under a torch.func transform.\n"
            "Transform the function inside: fs.shard_map(torch.func.grad(f)).",
            moved,
            moved,
            moved,
            "torch.func.linearize cannot run inside a different transform: there, torch treats its linear map as a constant.\n"
            "Use torch.func.jvp, or make torch.func.linearize the outermost transform.",
            "torch.func.linearize cannot run inside fs.value_and_grad: torch treats its linear map as a constant there.\n"
            "Use torch.func.jvp, or torch.func.linearize inside fs.shard_map.",
            "torch.func.functionalize cannot transform functions with custom derivatives, such as fs.gather_unit and "
            "fs.ops.\nApply it to functions of gathered tensors: "
            "torch.func.functionalize(f)(fs.gather_unit(params)).",
            "torch.func cannot give the Jacobian of nodes with respect to nodes: it knows what one rank holds of them.\n"
            f"  {LEAF} with respect to {LEAF}\nUse fs.jacfwd, or fs.hessian in the place of both.",
            f"fs.gather_unit got nodes whose values do not match their shardings.\n  w is {LEAF}, [2, 2] here, but holds [2]\n"
            'Map nodes with in_dims=0, over a dim that isn\'t sharded: name it "layers" in plan_layout(names=...).',
            f"fs.value_and_grad needs parameters at rest (DTensors), got local nodes.\n  w is {LEAF}\n"
            "Call it outside of fs.shard_map; inside, use torch.func.grad_and_value.",
            "fs.value_and_grad cannot run under a torch.func transform.\n"
            "Use torch.func.grad_and_value on a function of local nodes, inside fs.shard_map.",
            "fs.value_and_grad has a loss function that calls torch.func.grad, vjp, jacrev or hessian, which refuse "
            "saved-tensor hooks.\n  test_transforms.py: lambda: fs.value_and_grad(lambda p: grad(lambda w: w.sum())(fs.gather_unit(p)"
            '["w"]).sum())(params),\n'
            "Compute the outer derivative with torch.func too, fs.shard_map(torch.func.grad(f)), or the inner one with "
            "torch.autograd.grad(..., create_graph=True).",
            f"fs.shard_map got nodes whose values do not match their shardings.\n   is {LEAF}, which is [2, 2] here, but holds [2]\n"
            "Return the plain tensor, node.value, if it isn't a shard of such a leaf.",
            "fs.jacfwd needs floating point tensors or local nodes as leaves.\n  n is int64[]\n"
            "Call it inside fs.shard_map, on a tree of the leaves to differentiate with respect to.",
        ]


def unnamed_stacks(strategy):
    """Trains over a stack whose dim 0 has no name; the text of the refusal."""
    stack = {"b": torch.zeros(4, 4), "w": torch.eye(4).repeat(4, 1, 1)}
    layout = fs.plan_layout(stack, fs.make_mesh(dp=2, device="cpu"), strategy=strategy)
    state = fs.init_state(lambda key: stack, fs.sgd(0.1), fs.random.key(0), layout)
    step = fs.make_train_step(
        lambda p, x: fs.scan_units(lambda u, x: torch.tanh(x @ u["w"] + u["b"]), p, x).sum(), fs.sgd(0.1)
    )
    try:
        return float(step(state, torch.ones(2, 4))[1].loss)
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize(
    ("level", "leaves"),
    [
        (1, ("float32[4, 4], and its gradient float32[4@dp, 4]", "float32[4, 4, 4], and its gradient float32[4@dp, 4, 4]")),
        (2, ("float32[4, 4], and its gradient float32[4@dp, 4]", "float32[4, 4, 4], and its gradient float32[4@dp, 4, 4]")),
        (3, ("float32[4@dp, 4]", "float32[4@dp, 4, 4]")),
    ],
)  # fmt: skip
def test_stacks_without_names_say_what_to_type(level, leaves):
    text = (
        "fs.scan_units needs all layers of a stack on every rank.\n"
        f"  b is {leaves[0]}\n  w is {leaves[1]}\n"
        'Name dim 0 of stacked leaves "layers" in plan_layout(names=...), and keep pp=1.'
    )
    assert run_ranks(unnamed_stacks, 2, fs.zero(level)) == [text, text]


def test_stacks_without_names_train_where_gradients_are_whole():
    x = torch.ones(2, 4)
    for _ in range(4):
        x = torch.tanh(x)
    assert_trees_close(
        torch.tensor(run_ranks(unnamed_stacks, 2, fs.zero(0))), x.sum().repeat(2), rtol=1e-6, atol=0, what="losses"
    )
