"""Small programs under transforms with any cuts, against the same on one process: every pair, and random ones.

Transforms are of depth two: one of a number that another one's result is made into.

A program is data: a list of layers, how each leaf is cut, a transform. Programs are made here, in batches, and sent to
ranks that wait; each rank computes the whole of it as well, and compares what it holds.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.func import grad, grad_and_value, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as torch_pytree

import fsharding as fs
from fsharding import ops
from fsharding.mesh.abstract_mesh import DATA_AXES, AbstractMesh
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_trees_close, device_mesh, local_part, run_ranks
from tests.helpers import FULL

pytestmark = pytest.mark.timeout(900)

BATCH = 10
EXAMPLES = 13  # with the pairs of the sweep, 200 programs
ROWS, TOKENS = 4, 3
MESHES = [{"dp": 2}, {"replica": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2}]
if FULL:
    MESHES += [{"dp": 4}, {"dp": 2, "cp": 2}, {"replica": 2, "dp": 2}, {"dp": 2, "tp": 2}]
LAYERS = ["matmul", "norm", "softmax", "attention", "scan", "region"]


@dataclass(frozen=True)
class Program:
    """Layers by name, in order; width; cuts: for each leaf the dim that the data axes cut, or -1; and a transform.

    Over tp the leaves of a region are cut along their first dim, and all others are whole.
    """

    axes: tuple[tuple[str, int], ...]
    layers: tuple[str, ...]
    width: int
    depth: int
    cuts: tuple[int, ...]
    policy: str
    closes_over: bool
    transform: str


# ------------------------------------------------------------------------------------------------------------ programs
def shapes(program):
    d, depth = program.width, program.depth
    kinds = {
        "matmul": {"w": (d, d)},
        "norm": {"scale": (d,)},
        "softmax": {"bias": (d,), "s": ()},
        "attention": {"q": (2, d, 2), "k": (1, d, 2), "v": (1, d, 2), "o": (2, 2, d)},
        "scan": {"w": (depth, d, d), "b": (depth, d)},
        "region": {"up": (3, d), "down": (3, d)},
    }
    return {f"{i}": kinds[name] for i, name in enumerate(program.layers)}


def is_shape(x):
    return type(x) is tuple


def cut_of(shape, dim, axes, stacked):
    """Along which dim a leaf is cut; never along the layers of a stack."""
    first = 1 if stacked else 0
    if dim < 0 or len(shape) <= first:
        return fs.P()
    return fs.P(*(None,) * (first + dim % (len(shape) - first)), axes)


def attend(p, x_BTD):
    q, k, v = (torch.einsum("btd,hde->bhte", x_BTD, p[name]) for name in "qkv")
    return x_BTD + torch.einsum("bhte,hed->btd", ops.attention(q, k, v, axis="pp"), p["o"])  # rows are cut, not tokens


def apply(program, params, x_BTD):
    """The program; a scan may close over something that is differentiated as well."""
    for i, name in enumerate(program.layers):
        p = params[f"{i}"]
        if name == "scan":
            factor = x_BTD.mean((1, 2), keepdim=True) if program.closes_over else 1.0

            def block(u, y, factor=factor):
                return torch.tanh(y @ u["w"] + u["b"]) * factor + y

            x_BTD = fs.scan_units(block, p, x_BTD, policy=fs.policies.POLICIES[program.policy])
            continue
        p = fs.gather_unit(p)
        if name == "matmul":
            x_BTD = torch.tanh(x_BTD @ p["w"])
        elif name == "norm":
            x_BTD = ops.rms_norm(x_BTD, p["scale"])
        elif name == "region":
            x_BTD = x_BTD + ops.row_linear(torch.tanh(ops.column_linear(x_BTD, p["up"])[0]), p["down"])
        elif name == "softmax":
            x_BTD = F.softmax(x_BTD * p["s"] + p["bias"], -1)
        else:
            x_BTD = attend(p, x_BTD)
    return x_BTD


def loss(program, params, x_BTD):
    y = apply(program, params, x_BTD)
    return ops.psum((y * torch.arange(1.0, 1 + y.shape[-1], dtype=y.dtype)).sin().sum(), DATA_AXES)


def stacked(p, v):
    return torch_pytree.tree_map(lambda a, b: torch.stack([a, b]), p, v)


TRANSFORMS = {
    "grad": lambda f, p, v: grad(f)(p),
    "vjp": lambda f, p, v: vjp(f, p)[1](torch.ones((), dtype=torch.float64))[0],
    "jvp": lambda f, p, v: jvp(f, (p,), (v,)),
    "vmap": lambda f, p, v: vmap(f)(stacked(p, v)),
    "vmap(grad)": lambda f, p, v: vmap(grad(f))(stacked(p, v)),
    "jacrev": lambda f, p, v: jacrev(lambda p: torch.stack([f(p), f(p).sin()]))(p),
    "jvp(grad)": lambda f, p, v: jvp(grad(f), (p,), (v,))[1],
    "grad(dot(grad))": lambda f, p, v: grad(lambda p: fs.tree.vdot(grad(f)(p), v))(p),
    "grad(jvp)": lambda f, p, v: grad(lambda p: jvp(f, (p,), (v,))[1])(p),
    "vmap(jvp(grad))": lambda f, p, v: vmap(lambda t: jvp(grad(f), (p,), (t,))[1])(stacked(v, p)),
    "linearize": lambda f, p, v: linearized(f, p, v),
    "linearize(grad)": lambda f, p, v: linearized(grad(f), p, v),
    "jacfwd": lambda f, p, v: fs.jacfwd(lambda q: f({**p, "0": q}), chunk_size=7)(p["0"]),
    "hessian": lambda f, p, v: fs.hessian(lambda q: f({**p, "0": q}))(p["0"]),
}


def linearized(f, p, v):
    out, push = linearize(f, p)
    return out, push(v)


ONE = {
    "grad": grad,
    "grad_and_value": grad_and_value,
    **dict.fromkeys(("vjp", "jvp", "vmap", "jacrev", "linearize", "jacfwd", "hessian")),
}
FORWARD = {"jvp", "jacfwd", "hessian"}


def pair(outer, inner):
    """One transform of a number that is made of all that another one gives."""

    def one(name, f, v):
        return ONE[name](f) if ONE[name] else lambda p: TRANSFORMS[name](f, p, v)

    def run(f, p, v):
        def number(q):
            out = one(inner, f, v)(q)
            return fs.tree.vdot(out, out)

        return one(outer, number, v)(p)

    return run


def is_possible(outer, inner):
    """torch has no linearize inside another transform, and no forward mode inside linearize."""
    return inner != "linearize" and not (outer == "linearize" and inner in FORWARD)


PAIRS = {f"{a} of {b}": pair(a, b) for a, b in itertools.product(ONE, ONE) if is_possible(a, b)}


@st.composite
def programs(draw):
    transform = draw(st.sampled_from([*TRANSFORMS, *PAIRS]))
    columns = sum(transform.count(name) for name in ("jacfwd", "hessian"))  # products for each element
    layers = tuple(draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=3)))
    return Program(
        axes=tuple(draw(st.sampled_from(MESHES)).items()),
        layers=layers,
        width=draw(st.integers(1, (5, 3, 2)[columns])),
        depth=draw(st.integers(1, 2)),
        cuts=tuple(draw(st.lists(st.integers(-1, 2), min_size=4, max_size=4))),
        policy=draw(st.sampled_from(list(fs.policies.POLICIES))),
        closes_over=draw(st.booleans()),
        transform=transform,
    )


def sweep():
    """Every transform through every layer, over all meshes, policies and cuts in turn."""
    policies, cuts = (
        itertools.cycle(fs.policies.POLICIES),
        itertools.cycle([(0, 1, -1, 2), (1, 0, 2, -1), (-1, 2, 1, 0)]),
    )
    for i, (transform, name) in enumerate(itertools.product(TRANSFORMS, LAYERS)):
        axes = tuple(MESHES[(i + i // len(LAYERS)) % len(MESHES)].items())
        yield Program(axes, ("matmul", name), 3, 2, next(cuts), next(policies), i % 2 == 0, transform)


# -------------------------------------------------------------------------------------------------------- on the ranks
def values(program, seed):
    generator = torch.Generator().manual_seed(seed)

    def make(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return fs.tree.map(make, shapes(program), is_leaf=is_shape), make((ROWS, TOKENS, program.width))


def sharded(program, whole, mesh):
    axes = tuple(name for name, _ in program.axes if name != "tp")
    counter = iter(range(1000))

    def put(path, x):
        layer = program.layers[int(path.split(".")[0])]
        cut = program.cuts[next(counter) % len(program.cuts)]
        spec = cut_of(x.shape, cut, axes, layer == "scan") if axes else fs.P()
        if layer == "region" and "tp" in dict(program.axes):
            spec = fs.P("tp", axes if cut >= 0 else None)
        sharding = fs.NamedSharding(mesh, spec)
        return sharding.to_dtensor(local_part(x, sharding), x.shape)

    return fs.tree.map_with_path(put, whole)


def check(program):
    run = {**TRANSFORMS, **PAIRS}[program.transform]
    (p, x), (v, _) = values(program, 1), values(program, 2)
    with fs.set_mesh(AbstractMesh(("dp",), (1,))):
        want = run(lambda p: loss(program, p, x), p, v)
    mesh = device_mesh(AbstractMesh(tuple(a for a, _ in program.axes), tuple(n for _, n in program.axes)))
    tp = dict(program.axes).get("tp", 1)
    mine = x.chunk(mesh.size() // tp)[mesh.get_rank() // tp]
    found = fs.shard_map(lambda p, v: run(lambda p: loss(program, p, mine), p, v))(
        *(sharded(program, whole, mesh) for whole in (p, v))
    )
    assert fs.tree.paths(found) == fs.tree.paths(want)
    scale = max([1.0, *(float(t.abs().max()) for t in fs.tree.leaves(want) if t.numel())])
    for a, b in zip(fs.tree.leaves(found), fs.tree.leaves(want), strict=True):
        target = local_part(b, fs.typeof(a).sharding) if isinstance(a, DTensor) else b
        assert_trees_close(local_of(a), target, rtol=1e-8, atol=1e-9 * scale, what=str(program))


def check_all(batch):
    for program in batch:
        check(program)


def ranks_of(program):
    return torch.Size(n for _, n in program.axes).numel()


def test_any_program_under_any_transform_with_any_cuts():
    seen = set()

    def run(batch):
        new = [p for p in dict.fromkeys(batch) if p not in seen]
        seen.update(new)
        for ranks in {ranks_of(p) for p in new}:
            run_ranks(check_all, ranks, [p for p in new if ranks_of(p) == ranks], timeout=180)

    pairs = list(sweep())
    batches = -(-len(pairs) // BATCH)
    for first in range(batches):
        run(pairs[first::batches])

    @settings(max_examples=400 if FULL else EXAMPLES)
    @given(st.lists(programs(), min_size=BATCH, max_size=BATCH, unique=True))
    def law(batch):
        run(batch)

    law()
    assert len(seen) >= (2000 if FULL else 200)
    assert {(p.transform, name) for p in seen for name in p.layers} >= {*itertools.product(TRANSFORMS, LAYERS)}
    assert len({p.transform for p in seen} & {*PAIRS}) >= (len(PAIRS) if FULL else 30)
    assert {p.axes for p in seen} == {tuple(axes.items()) for axes in MESHES}
