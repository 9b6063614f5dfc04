"""Every name of `torch.func.__all__`, alone and around `grad`, over sharded parameters: right, or refused by name.

Expected values come from plain torch: the same transform of the sum of what all ranks' rows give, on whole tensors.
"""

import functools

import pytest
import torch
from torch import func, nn
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.testing import assert_trees_close, device_mesh, local_part, run_ranks

pytestmark = pytest.mark.timeout(300)

RANKS, ROWS, WIDTH = 2, 6, 3


def values(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def stacked(a, b):
    return torch_pytree.tree_map(lambda x, y: torch.stack([x, y]), a, b)


def dot(a, b):
    """The inner product of trees of nodes; of plain tensors without a word of ours."""
    leaves = zip(fs.tree.leaves(a), fs.tree.leaves(b), strict=True)
    plain = all(isinstance(x, torch.Tensor) for x in fs.tree.leaves(a))
    return sum((x * y).sum() for x, y in leaves) if plain else fs.tree.vdot(a, b)


# ---------------------------------------------------------------------------------------- what computes on whole tensors
MLP = {"up": (WIDTH, 4), "down": (4, 1)}
LINEAR = {"weight": (1, WIDTH), "bias": (1,)}
TWO = [nn.Linear(WIDTH, 1) for _ in range(2)]
NORMED = func.replace_all_batch_norm_modules_(nn.Sequential(nn.Linear(WIDTH, 1), nn.BatchNorm1d(1)))
STACKED = {name: tuple(x.shape) for name, x in func.stack_module_state(TWO)[0].items()}


def mlp(u, x):
    return (torch.tanh(x @ u["up"]) @ u["down"]).square().sum()


def rearranged(u, x):
    turned = func.rearrange(u["up"], "width hidden -> hidden width")
    return (torch.tanh(x @ turned.T) @ u["down"]).square().sum()


def called(u, x):
    return func.functional_call(nn.Linear(WIDTH, 1), u, (x,)).sin().sum()


def ensemble(u, x):
    both = func.vmap(functools.partial(func.functional_call, TWO[0]), (0, None))(u, x)
    return both.sin().sum()


def normed(u, x):
    return func.functional_call(NORMED, u, (x,)).sin().sum()


def unwrapped(u, x):
    """What has no wrapper is a constant."""
    return mlp({"up": u["up"] * func.debug_unwrap(u["up"]), "down": u["down"]}, x)


# ------------------------------------------------------------------------------------------------------- the transforms
def right_pull(f, p, v):
    """The pullback of a gradient, of a tangent."""
    return func.vjp(func.grad(f), p)[1](v)[0]


def linearized(f, p, v):
    out, push = func.linearize(f, p)
    first, again = push(v), push(torch_pytree.tree_map(lambda x: 2 * x, v))
    return out, first, again


# By name: the function on gathered tensors, its leaves, the transform of it alone, and around `grad`.
def value(f, p, v):
    return f(p)


def gradient(f, p, v):
    return func.grad(f)(p)


def directional(f, v):
    """A function to a number that takes a gradient inside."""
    return lambda p: dot(func.grad(f)(p), v)


TRANSFORMS = {
    "grad": (mlp, MLP, gradient, lambda f, p, v: func.grad(directional(f, v))(p)),
    "grad_and_value": (
        mlp, MLP, lambda f, p, v: func.grad_and_value(f)(p), lambda f, p, v: func.grad_and_value(directional(f, v))(p)
    ),
    "vmap": (
        mlp, MLP, lambda f, p, v: func.vmap(f)(stacked(p, v)), lambda f, p, v: func.vmap(func.grad(f))(stacked(p, v))
    ),
    "jvp": (
        mlp, MLP, lambda f, p, v: func.jvp(f, (p,), (v,)), lambda f, p, v: func.jvp(func.grad(f), (p,), (v,))
    ),
    "linearize": (mlp, MLP, linearized, lambda f, p, v: linearized(func.grad(f), p, v)),
    "vjp": (mlp, MLP, lambda f, p, v: func.vjp(f, p)[1](torch.ones((), dtype=torch.float64)), right_pull),
    "jacrev": (
        mlp, MLP, lambda f, p, v: func.jacrev(lambda q: torch.stack([f(q), f(q).sin()]))(p),
        lambda f, p, v: func.jacrev(lambda q: directional(f, v)(q).expand(2))(p),
    ),
    "jacfwd": (mlp, MLP, lambda f, p, v: func.jacfwd(f)(p), lambda f, p, v: func.jacfwd(directional(f, v))(p)),
    "hessian": (
        mlp, MLP, lambda f, p, v: func.hessian(lambda q: f({**p, "down": q}))(p["down"]),
        lambda f, p, v: func.hessian(lambda q: directional(f, v)({**p, "down": q}))(p["down"]),
    ),
    "functionalize": (
        mlp, MLP, lambda f, p, v: func.functionalize(f)(p), lambda f, p, v: func.functionalize(func.grad(f))(p)
    ),
    "rearrange": (rearranged, MLP, value, gradient),
    "functional_call": (called, LINEAR, value, gradient),
    "stack_module_state": (ensemble, STACKED, value, gradient),
    "replace_all_batch_norm_modules_": (
        normed, {name: tuple(x.shape) for name, x in NORMED.named_parameters()}, value, gradient
    ),
    "debug_unwrap": (unwrapped, MLP, value, gradient),
}  # fmt: skip


def outcome(name, around, spec, mesh):
    """Compares what this rank gets; the text of a refusal where there is one."""
    compute, shapes, *runs = TRANSFORMS[name]
    run = runs[around]
    p, v = values(shapes, 1), values(shapes, 2)
    x = values({"x": (ROWS, WIDTH)}, 3)["x"]

    def loss(p):
        return ops.psum(compute(fs.gather_unit(p), x.chunk(RANKS)[mesh.get_local_rank("dp")]), "dp")

    layout = {key: fs.NamedSharding(mesh, spec) for key in shapes}
    given = [fs.shard(t, layout) for t in (p, v)]
    try:
        found = fs.shard_map(lambda p, v: run(loss, p, v))(*given)
    except fs.errors.TransformError as error:
        return str(error)
    want = run(lambda p: sum(compute(p, rows) for rows in x.chunk(RANKS)), p, v)
    assert fs.tree.paths(found) == fs.tree.paths(want)
    for a, b in zip(fs.tree.leaves(found), fs.tree.leaves(want), strict=True):
        sharding = fs.typeof(a).sharding
        mine, target = (a, b) if sharding is None else (a.to_local(), local_part(b, sharding))
        assert_trees_close(mine, target, rtol=1e-9, atol=1e-9, what=f"{name} {around} {spec}")
    return "right"


def outcomes(specs):
    mesh = device_mesh(AbstractMesh(("dp",), (RANKS,)))
    every = [(name, around, spec) for name in TRANSFORMS for around in (False, True) for spec in specs]
    return {(name, around, str(spec)): outcome(name, around, spec, mesh) for name, around, spec in every}


FUNCTIONALIZE = (
    "torch.func.functionalize cannot transform functions with custom derivatives, such as fs.gather_unit and fs.ops.\n"
    "Apply it to functions of gathered tensors: torch.func.functionalize(f)(fs.gather_unit(params))."
)
JACFWD = (
    "torch.func.jacfwd and hessian cannot differentiate with respect to sharded leaves: they would perturb every shard at "
    "once.\n  float64[{}]\nUse fs.jacfwd and fs.hessian, which differentiate with respect to the full leaves."
)


HESSIAN = (
    "torch.func cannot give the Jacobian of nodes with respect to nodes: it knows what one rank holds of them.\n"
    "  float64[4, 1] with respect to float64[4, 1]\nUse fs.jacfwd, or fs.hessian in the place of both."
)
REFUSED = {
    ("functionalize", "P()"): FUNCTIONALIZE,
    ("functionalize", "P('dp')"): FUNCTIONALIZE,
    ("jacfwd", "P('dp')"): JACFWD.format("3@dp, 4"),
    ("hessian", "P()"): HESSIAN,
    ("hessian", "P('dp')"): JACFWD.format("4@dp, 1"),
}
if not hasattr(func, "rearrange"):  # new in torch 2.13
    del TRANSFORMS["rearrange"]


def test_every_name_of_torch_func_is_right_or_refused():
    assert {*TRANSFORMS} == {*func.__all__}
    for found in run_ranks(outcomes, RANKS, [fs.P(), fs.P("dp")]):
        assert found == {key: REFUSED.get((key[0], key[2]), "right") for key in found}
        assert len(found) == 4 * len(TRANSFORMS)
