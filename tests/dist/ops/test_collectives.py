"""Collectives and the two transforms as linear maps: transposes, every transform of torch.func, against dense math.

The dense reference holds the inputs of all ranks at once, `[ranks, ...]`, and never speaks to anybody.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import MeshError, SpecError, TransformError
from fsharding.mesh.abstract_mesh import AbstractMesh
from fsharding.mesh.device_mesh import abstract
from fsharding.sharding.boxes import chunk
from fsharding.sharding.named_sharding import local_of, to_local
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import crossed, full, mesh_of

SHAPE = AbstractMesh(("dp", "cp"), (2, 2))
AXES = ["dp", "cp", ("dp", "cp"), ("cp", "dp")]
RANKS = 4


def name_of(value):
    return "x".join(value) if isinstance(value, tuple) and value and isinstance(value[0], str) else str(value)


# --------------------------------------------------------------------------------------------------- the dense reference
def families(axes):
    """Ranks that act together, in the order of the axes."""
    axes = (axes,) if isinstance(axes, str) else axes
    found = {}
    for coord in SHAPE.coordinates():
        others = tuple((name, c) for name, c in coord.items() if name not in axes)
        found.setdefault(others, []).append((tuple(coord[axis] for axis in axes), SHAPE.rank_at(coord)))
    return [[rank for _, rank in sorted(members)] for members in found.values()]


def dense(op, xs, how):
    """What each rank gets: list of tensors, from the list of what each rank has."""
    result: list[Any] = [None] * RANKS
    for ranks in families(how["axes"]):
        n = len(ranks)
        for place, rank in enumerate(ranks):
            mine = [xs[r] for r in ranks]
            if op == "all_gather":
                result[rank] = torch.cat(mine, how["dim"])
            elif op == "reduce_scatter":
                start, stop = chunk(xs[rank].shape[how["dim"]], n, place)
                result[rank] = sum(mine[1:], mine[0]).narrow(how["dim"], start, stop - start)
            elif op == "psum":
                result[rank] = sum(mine[1:], mine[0])
            elif op == "pvary":
                result[rank] = xs[rank]
            elif op == "all_to_all":
                result[rank] = torch.cat([x.chunk(n, how["split_dim"])[place] for x in mine], how["concat_dim"])
            else:
                source = {b: a for a, b in how["pairs"]}.get(place)
                result[rank] = mine[source] if source is not None else torch.zeros_like(xs[rank])
    return result


def apply(op, x, how, mesh):
    axes = how["axes"]
    if op == "all_gather":
        return ops.all_gather(x, axes, dim=how["dim"], size=how.get("size"), mesh=mesh)
    if op == "reduce_scatter":
        return ops.reduce_scatter(x, axes, dim=how["dim"], mesh=mesh)
    if op == "all_to_all":
        return ops.all_to_all(x, axes, split_dim=how["split_dim"], concat_dim=how["concat_dim"], mesh=mesh)
    if op == "ppermute":
        return ops.ppermute(x, axes, how["pairs"], mesh=mesh)
    return getattr(ops, op)(x, axes, mesh=mesh)


def dual(op, how):
    if op == "all_gather":
        return "reduce_scatter", how
    if op == "reduce_scatter":
        return "all_gather", how
    if op == "all_to_all":
        return op, {**how, "split_dim": how["concat_dim"], "concat_dim": how["split_dim"]}
    if op == "ppermute":
        return op, {**how, "pairs": [(b, a) for a, b in how["pairs"]]}
    return {"psum": "pvary", "pvary": "psum"}[op], how


def size_of(axes):
    return len(families(axes)[0])


def cases():
    """(op, how, input shape by rank): axes alone and together, dims, sizes that do not divide, pieces that are empty."""
    for axes in AXES:
        n = size_of(axes)
        for dim, size in itertools.product((0, 1, -1), (n, 2 * n, 5, 2, 1)):
            shape = [3, 3, 3]
            shape[dim] = size
            how = {"axes": axes, "dim": dim, "size": size}
            pieces = {}
            for ranks in families(axes):
                for place, rank in enumerate(ranks):
                    start, stop = chunk(size, n, place)
                    pieces[rank] = [*shape]
                    pieces[rank][dim] = stop - start
            yield "all_gather", how, [pieces[rank] for rank in range(RANKS)]
            yield "reduce_scatter", how, [shape] * RANKS
        for op in ("psum", "pvary"):
            yield op, {"axes": axes}, [[3, 2]] * RANKS
            yield op, {"axes": axes}, [[]] * RANKS
        for split_dim, concat_dim in ((0, 1), (1, 0), (0, 0), (-1, 0), (2, 1)):
            yield (
                "all_to_all",
                {"axes": axes, "split_dim": split_dim, "concat_dim": concat_dim},
                [[n, 2 * n, n]] * RANKS,
            )
        if isinstance(axes, str):
            for pairs in ([(0, 1)], [(0, 1), (1, 0)], [(1, 1)], []):
                yield "ppermute", {"axes": axes, "pairs": pairs}, [[2, 3]] * RANKS


CASES = list(cases())


def values(shapes, dtype=torch.float32, seed=0):
    """What each rank has; every rank knows all of it, for the reference."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def shared(xs, how):
    """The same value on all ranks that act together: what `vary` takes and what loss functions of a `psum` are."""
    result = list(xs)
    for ranks in families(how["axes"]):
        for rank in ranks:
            result[rank] = xs[ranks[0]]
    return result


# ------------------------------------------------------------------------------------------------------- on the ranks
def square():
    return mesh_of({"dp": 2, "cp": 2})


def run_all(dtype):
    """For every case: what comes out, and the inner products on both sides of the transpose."""
    mesh, rank, found = square(), dist.get_rank(), []
    for op, how, shapes in CASES:
        xs = values(shapes, dtype)
        xs = shared(xs, how) if op == "pvary" else xs
        out = apply(op, xs[rank], how, mesh)
        y = (
            values([list(out.shape)] * RANKS, dtype, seed=7)[rank]
            if op not in ("all_gather", "reduce_scatter")
            else None
        )
        if y is None:
            y = values([list(t.shape) for t in dense(op, xs, how)], dtype, seed=7)[rank]
        if op == "psum":
            y = shared(values([list(out.shape)] * RANKS, dtype, seed=7), how)[rank]
        back = apply(*(lambda o, h: (o, y, h))(*dual(op, how)), mesh)
        # A value that is one for all ranks of a family counts once for them, not once for each.
        outer, inner = (size_of(how["axes"]) if op == name else 1 for name in ("psum", "pvary"))
        found.append(
            (
                out,
                float((out.double() * y.double()).sum()) / outer,
                float((xs[rank].double() * back.double()).sum()) / inner,
            )
        )
    return found


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-6), pytest.param(torch.float64, 1e-13, marks=full)],
    ids=["float32", "float64"],
)
def test_every_collective_is_what_dense_math_says_and_has_its_transpose(dtype, rtol):
    results = run_ranks(run_all, RANKS, dtype)
    for (op, how, shapes), *seen in zip(CASES, *results, strict=True):
        xs = values(shapes, dtype)
        xs = shared(xs, how) if op == "pvary" else xs
        for (out, _, _), want in zip(seen, dense(op, xs, how), strict=True):
            assert out.dtype == dtype
            assert_trees_close(out, want, rtol=rtol, atol=rtol, what=f"{op} {how}")
        left, right = (sum(row[i] for row in seen) for i in (1, 2))
        scale = sum(abs(row[1]) for row in seen) + 1
        assert abs(left - right) <= rtol * scale, (op, how, left, right)


def smooth(op, how, x, mesh, weights):
    """A nonlinear function through a collective: what each rank adds to the loss."""
    out = apply(op, torch.sin(x) + x * x, how, mesh)
    return (torch.tanh(out) * weights).sum()


def dense_smooth(op, how, xs, weights):
    outs = dense(op, [torch.sin(x) + x * x for x in xs], how)
    return [(torch.tanh(out) * w).sum() for out, w in zip(outs, weights, strict=True)]


def problem(op, how, shapes, dtype=torch.float64):
    """Inputs, weights and tangents of all ranks. Where a loss is of a sum, it is the same loss on all its ranks."""
    xs, ts = values(shapes, dtype), values(shapes, dtype, seed=2)
    if op == "pvary":
        xs, ts = shared(xs, how), shared(ts, how)
    weights = values([list(x.shape) for x in dense(op, xs, how)], dtype, seed=3)
    return xs, shared(weights, how) if op == "psum" else weights, ts


SMALL = [case for case in CASES if len(case[2][0]) < 3 or case[0] == "all_to_all" or case[1].get("size") in (4, 5, 1)]


FEW = list({(case[0], isinstance(case[1]["axes"], str)): case for case in SMALL}.values())


def transform_all(cases):
    """Gradients and tangents of `smooth` by autograd and by every transform of torch.func."""
    mesh, rank, found = square(), dist.get_rank(), []
    for op, how, shapes in cases:
        xs, weights, ts = problem(op, how, shapes)
        x, w, t = xs[rank], weights[rank], ts[rank]
        f = functools.partial(smooth, op, how, mesh=mesh, weights=w)
        leaf = x.clone().requires_grad_()
        row = {
            "autograd": torch.autograd.grad(f(leaf), leaf)[0],
            "grad": torch.func.grad(f)(x),
            "vjp": torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
            "jvp": torch.func.jvp(f, (x,), (t,))[1],
            "jacrev": torch.func.jacrev(f)(x),
        }
        if op not in ("psum", "pvary"):
            # Sums of losses are not one loss of all ranks, but their forward derivative is still one number a rank.
            row["hvp"] = torch.func.jvp(torch.func.grad(f), (x,), (t,))[1]
        many = torch.stack([x, 2 * x, -x])
        row["vmap"] = torch.func.vmap(f)(many)
        row["vmap of grad"] = torch.func.vmap(torch.func.grad(f))(many)
        if x.ndim:
            row["vmap along 1"] = torch.func.vmap(f, in_dims=1)(many.movedim(0, 1))
        row["loop"] = torch.stack([f(item) for item in many])
        row["loop of grad"] = torch.stack([torch.func.grad(f)(item) for item in many])
        found.append(row)
    return found


def dense_derivatives(op, how, shapes):
    """Per rank: gradient, tangent and Hessian times tangent of the sum of all ranks' losses."""
    xs, weights, ts = problem(op, how, shapes)
    xs = [x.requires_grad_() for x in xs] if op != "pvary" else xs
    if op == "pvary":
        # One value for each family: its gradient sums over the members.
        heads = {ranks[0]: xs[ranks[0]].clone().requires_grad_() for ranks in families(how["axes"])}
        owner = {rank: ranks[0] for ranks in families(how["axes"]) for rank in ranks}
        losses = dense_smooth(op, how, [heads[owner[r]] for r in range(RANKS)], weights)
        grads = dict(zip(heads, torch.autograd.grad(sum(losses), list(heads.values())), strict=True))
        return [grads[owner[r]] for r in range(RANKS)], None
    losses = dense_smooth(op, how, xs, weights)
    if op == "psum":
        # The same loss on all ranks of a family counts once.
        total = sum(losses[ranks[0]] for ranks in families(how["axes"]))
        return list(torch.autograd.grad(total, xs, materialize_grads=True)), None
    grads = torch.autograd.grad(sum(losses) + 0 * xs[0].sum(), xs, create_graph=True, materialize_grads=True)
    dot = sum((g * t).sum() for g, t in zip(grads, ts, strict=True)) + 0 * xs[0].sum()
    return [g.detach() for g in grads], list(torch.autograd.grad(dot, xs, materialize_grads=True))


@pytest.mark.parametrize("cases", [FEW, pytest.param(SMALL, marks=full)], ids=["few", "all"])
def test_every_transform_gives_the_dense_derivative(cases):
    results = run_ranks(transform_all, RANKS, cases)
    for (op, how, shapes), *rows in zip(cases, *results, strict=True):
        grads, hvps = dense_derivatives(op, how, shapes)
        xs, weights, ts = problem(op, how, shapes)
        tangents = torch.func.jvp(
            lambda *xs, o=op, h=how, w=weights: tuple(dense_smooth(o, h, xs, w)), tuple(xs), tuple(ts)
        )[1]
        for rank, row in enumerate(rows):
            what = f"{op} {how} on rank {rank}: "
            for name in ("autograd", "grad", "vjp", "jacrev"):
                assert_trees_close(row[name], grads[rank], rtol=1e-9, atol=1e-12, what=what + name)
            assert_trees_close(row["jvp"], tangents[rank], rtol=1e-9, atol=1e-12, what=what + "jvp")
            if hvps is not None:
                assert_trees_close(row["hvp"], hvps[rank], rtol=1e-9, atol=1e-12, what=what + "hvp")
            for name, loop in (("vmap", "loop"), ("vmap of grad", "loop of grad"), ("vmap along 1", "loop")):
                if name in row:
                    assert_trees_close(row[name], row[loop], rtol=1e-9, atol=1e-12, what=what + name)


def jacobians():
    """The Jacobian of a rank's outputs, by reverse and by forward mode: SPMD, so rows of all ranks at once."""
    mesh, rank = square(), dist.get_rank()
    x = values([[2, 3]] * RANKS, torch.float64)[rank]
    f = functools.partial(ops.all_gather, axis=("cp", "dp"), dim=1, mesh=mesh)
    return torch.func.jacrev(lambda x: f(x.sin()))(x), torch.func.jacfwd(lambda x: f(x.sin()))(x)


def test_jacobians_through_a_gather():
    xs = values([[2, 3]] * RANKS, torch.float64)
    how = {"axes": ("cp", "dp"), "dim": 1}
    full = torch.autograd.functional.jacobian(
        lambda *xs: tuple(dense("all_gather", [x.sin() for x in xs], how)), tuple(xs)
    )
    for rank, (reverse, forward) in enumerate(run_ranks(jacobians, RANKS)):
        # Reverse: the k-th cotangent is set on every rank, so what comes back is the sum over ranks' k-th outputs.
        assert_trees_close(reverse, sum(full[r][rank] for r in range(RANKS)), rtol=1e-9, atol=1e-12)
        # Forward: the k-th tangent is set on every rank, so it is the sum over ranks' k-th inputs.
        assert_trees_close(forward, sum(full[rank][r] for r in range(RANKS)), rtol=1e-9, atol=1e-12)


def identities():
    """Pairs of collectives that undo each other, bit by bit."""
    mesh, rank = square(), dist.get_rank()
    for axes in AXES:
        n = size_of(axes)
        x = values([[n, 2 * n, 3]] * RANKS)[rank]
        there = ops.all_to_all(x, axes, split_dim=1, concat_dim=0, mesh=mesh)
        assert_bitwise_equal(ops.all_to_all(there, axes, split_dim=0, concat_dim=1, mesh=mesh), x)
        joined = ops.all_gather(x, axes, dim=1, mesh=mesh)
        mine = ops.reduce_scatter(joined, axes, dim=1, mesh=mesh) / n
        assert_bitwise_equal(mine, x)
        assert_bitwise_equal(ops.pvary(x, axes, mesh=mesh), x)
        # One balanced tree: axis by axis it is the minor axis first.
        both = ops.psum(ops.psum(x, "cp", mesh=mesh), "dp", mesh=mesh)
        assert_bitwise_equal(ops.psum(x, ("dp", "cp"), mesh=mesh), both)
        assert_bitwise_equal(ops.psum(x, ("cp", "dp"), mesh=mesh), both)
    with fs.set_mesh(mesh):
        assert_bitwise_equal(ops.psum(x, "dp"), ops.psum(x, "dp", mesh=mesh))
        # An axis that the mesh lacks has size 1.
        assert_bitwise_equal(ops.psum(x, "tp"), x)
        assert_bitwise_equal(ops.all_gather(x, ("tp", "ep"), dim=0), x)
    large = torch.arange(100_003, dtype=torch.float32) * (rank + 1)
    assert_bitwise_equal(ops.psum(large, ("dp", "cp"), mesh=mesh), torch.arange(100_003, dtype=torch.float32) * 10)


def test_collectives_that_undo_each_other():
    run_ranks(identities, RANKS)


def sums_in_float32():
    """Terms in bfloat16 whose sum in bfloat16 would lose the small ones."""
    x = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)[dist.get_rank()].expand(8).contiguous()
    mesh = square()
    return ops.psum(x, ("dp", "cp"), mesh=mesh), ops.reduce_scatter(x, ("dp", "cp"), dim=0, mesh=mesh)


def test_narrow_terms_are_summed_wide():
    for total, piece in run_ranks(sums_in_float32, RANKS):
        want = torch.tensor(259.0).to(torch.bfloat16)
        assert total.dtype == piece.dtype == torch.bfloat16
        assert_bitwise_equal(total, want.expand(8).contiguous())
        assert_bitwise_equal(piece, want.expand(2).contiguous())


def refusals():
    mesh = square()
    texts = []
    for call in (
        lambda: ops.all_to_all(torch.zeros(3, 4), "dp", split_dim=0, concat_dim=1, mesh=mesh),
        lambda: ops.ppermute(torch.zeros(3), "cp", [(0, 2)], mesh=mesh),
        lambda: ops.ppermute(torch.zeros(3), "cp", [(0, 1), (1, 1)], mesh=mesh),
    ):
        with pytest.raises(SpecError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_refused_collectives_say_why():
    for texts in run_ranks(refusals, RANKS):
        assert texts == [
            "fs.ops.all_to_all cannot split dim 0 of size 3 over dp of size 2.\nPad the dim to a multiple of the axis.",
            "fs.ops.ppermute got the pairs [(0, 2)] on axis cp of size 2.\n"
            "Each coordinate may send once and receive once.",
            "fs.ops.ppermute got the pairs [(0, 1), (1, 1)] on axis cp of size 2.\n"
            "Each coordinate may send once and receive once.",
        ]


def bad_axes():
    mesh, x = square(), torch.ones(2, 2)
    texts = []
    for call in (
        lambda: ops.psum(x, "dpp", mesh=mesh),
        lambda: ops.pvary(x, ("dp", "model"), mesh=mesh),
        lambda: ops.all_gather(x, "cpp", dim=0, mesh=mesh),
        lambda: ops.reduce_scatter(x, "dqp", dim=0, mesh=mesh),
    ):
        with pytest.raises(MeshError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_an_axis_that_does_not_exist_is_refused():
    known = "Axes are pp, replica, dp, ep, cp, tp."
    for texts in run_ranks(bad_axes, RANKS):
        assert texts == [
            f"fs.ops.psum got an unknown axis 'dpp'. {known} Did you mean 'dp'?",
            f"fs.ops.pvary got an unknown axis 'model'. {known}",
            f"fs.ops.all_gather got an unknown axis 'cpp'. {known} Did you mean 'cp'?",
            f"fs.ops.reduce_scatter got an unknown axis 'dqp'. {known} Did you mean 'dp'?",
        ]


def bad_dims():
    mesh, texts = square(), []
    for x, dim in ((torch.zeros(()), 0), (torch.zeros(3, 3), 2), (torch.zeros(3, 3), -3)):
        for call in (
            lambda x=x, dim=dim: ops.all_gather(x, "dp", dim=dim, mesh=mesh),
            lambda x=x, dim=dim: ops.reduce_scatter(x, "dp", dim=dim, mesh=mesh),
            lambda x=x, dim=dim: ops.all_to_all(x, "dp", split_dim=dim, concat_dim=dim, mesh=mesh),
        ):
            try:
                call()
            except Exception as error:
                texts.append(type(error).__name__)
            else:
                texts.append("nothing")
    return texts


def test_a_dim_that_a_tensor_lacks_is_refused():
    for texts in run_ranks(bad_dims, RANKS):
        assert texts == ["SpecError"] * 9


# ------------------------------------------------------------------------------------------------------- gather_unit
UNIT = {"w": (5, 3), "b": (3,), "s": (), "tiny": (1, 2), "d": (2, 2)}
GRIDS = [{"dp": 4}, {"dp": 2, "cp": 2}, {"replica": 2, "dp": 2}]
STRATEGIES = [fs.zero(0), fs.zero(3), fs.hybrid(), fs.hybrid(params=True)]
STRATEGY_NAMES = ["zero0", "zero3_0", "zero3_1", "hybrid(zero3, params=True)"]


def whole_unit(seed=0):
    """Parameters as they are when nothing is cut; one leaf is float64."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"d": torch.float64}
    return {
        name: torch.randn(shape, generator=generator).to(dtypes.get(name, torch.float32))
        for name, shape in UNIT.items()
    }


def sharded_unit(strategy, axes, seed=0):
    """The same at rest."""
    layout = fs.plan_layout(whole_unit(), mesh_of(axes), strategy=strategy)
    values = whole_unit(seed)
    state = fs.init_state(lambda key: values, fs.sgd(0.1), fs.random.key(0), layout)
    return state.params


def in_flight(params):
    return fs.tree.map(to_local, params)


def row_of_rank(rank):
    return torch.linspace(-1, 1, 5 * RANKS).view(RANKS, 5)[rank]


def head(unit, x):
    """Any function of a whole unit: what one rank adds to the loss."""
    h = torch.tanh(x @ unit["w"] + unit["b"]) * unit["s"].exp()
    return h.square().sum() + (unit["tiny"].sin().sum() + (unit["d"] @ unit["d"]).sum().float()) * x.sum()


def local_part(full, like):
    """This rank's part of whole tensors."""
    parts = {}
    for name, leaf in like.items():
        box = leaf.sharding.box(leaf.shape)
        parts[name] = full[name][tuple(slice(a, b) for a, b in box)]
    return parts


def plain(nodes):
    """The local tensors of a tree of nodes."""
    return {name: node.value if isinstance(node, fs.Local) else local_of(node) for name, node in nodes.items()}


def with_values(nodes, values):
    return {name: fs.Local(values[name], node.sharding, node.shape) for name, node in nodes.items()}


def total(unit):
    """The loss of all ranks together."""
    return sum(head(unit, row_of_rank(rank)) for rank in range(RANKS))


def close(found, want, what):
    assert_trees_close(found, want, rtol=1e-5, atol=1e-5, what=what)


def through_gather_unit(strategy, axes):
    """Every transform through `gather_unit`, against the function of the whole unit."""
    params = sharded_unit(strategy, axes)
    nodes, rank = in_flight(params), dist.get_rank()
    x = row_of_rank(rank)

    def f(nodes):
        return head(fs.gather_unit(nodes), x)

    full, tangent = whole_unit(), whole_unit(1)
    tangents = with_values(nodes, local_part(tangent, nodes))
    assert_bitwise_equal(fs.gather_unit(nodes), full, "the gathered unit")
    assert_bitwise_equal(fs.gather_unit(params), full, "the unit gathered at rest")
    grads = local_part(torch.func.grad(total)(full), nodes)

    close(plain(torch.func.grad(f)(nodes)), grads, "grad")
    value, pull = torch.func.vjp(f, nodes)
    close(value, head(full, x), "value")
    close(plain(pull(torch.ones(()))[0]), grads, "vjp")
    close(
        torch.func.jvp(f, (nodes,), (tangents,))[1], torch.func.jvp(lambda u: head(u, x), (full,), (tangent,))[1], "jvp"
    )
    _, hvp = torch.func.jvp(torch.func.grad(total), (full,), (tangent,))
    close(plain(torch.func.jvp(torch.func.grad(f), (nodes,), (tangents,))[1]), local_part(hvp, nodes), "hvp")

    many = with_values(nodes, {name: torch.stack([value, 2 * value]) for name, value in plain(nodes).items()})
    doubled = fs.tree.map(lambda t: 2 * t, full)
    close(torch.func.vmap(f)(many), torch.stack([head(full, x), head(doubled, x)]), "vmap")
    rows = torch.func.vmap(torch.func.grad(f))(many)
    both = [torch.func.grad(total)(unit) for unit in (full, doubled)]
    stacked = {name: torch.stack([local_part(g, nodes)[name] for g in both]) for name in full}
    close(plain(rows), stacked, "vmap of grad")

    jacobian = torch.func.jacrev(lambda nodes: torch.stack([f(nodes), 2 * f(nodes)]))(nodes)
    close(plain(jacobian), {n: torch.stack([g, 2 * g]) for n, g in grads.items()}, "jacrev")

    leaves = with_values(nodes, {name: value.clone().requires_grad_() for name, value in plain(nodes).items()})
    first = torch.autograd.grad(f(leaves), list(plain(leaves).values()), create_graph=True)
    close(dict(zip(nodes, first, strict=True)), grads, "autograd")
    dot = sum((g * t).sum().double() for g, t in zip(first, plain(tangents).values(), strict=True))
    # The inner product of a cut leaf is a sum over ranks; that of a leaf which all ranks hold is one number on all.
    second = torch.autograd.grad(dot, list(plain(leaves).values()))
    close(dict(zip(nodes, second, strict=True)), local_part(hvp, nodes), "double backward")


@pytest.mark.parametrize(
    ("axes", "strategy"),
    crossed(
        {"x".join(axes): (axes,) for axes in GRIDS},
        {name: (strategy,) for name, strategy in zip(STRATEGY_NAMES, STRATEGIES, strict=True)},
        kept=["dp-zero3_0", "dpxcp-zero3_1", "replicaxdp-hybrid(zero3, params=True)"],
    ),
)
def test_every_transform_goes_through_gather_unit(axes, strategy):
    run_ranks(through_gather_unit, RANKS, strategy, axes)


def penalty(axes):
    """Double backward through `gather_unit` where every leaf is cut: the gradient of the squared gradient norm."""
    generator = torch.Generator().manual_seed(0)
    full = {"w": torch.randn(6, 3, generator=generator), "v": torch.randn(5, 2, generator=generator)}
    layout = fs.plan_layout(full, mesh_of(axes))
    nodes = in_flight(fs.init_state(lambda key: full, fs.sgd(0.1), fs.random.key(0), layout).params)
    x = torch.linspace(-1, 1, 6 * RANKS).view(RANKS, 6)

    def loss(unit, x):
        return (torch.tanh(x @ unit["w"]).sum() * unit["v"].sin()).square().sum()

    leaves = with_values(nodes, {name: value.clone().requires_grad_() for name, value in plain(nodes).items()})
    first = torch.autograd.grad(
        loss(fs.gather_unit(leaves), x[dist.get_rank()]), list(plain(leaves).values()), create_graph=True
    )
    norm = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(norm, list(plain(leaves).values()))
    functional = torch.func.grad(
        lambda n: sum(
            g.square().sum()
            for g in plain(torch.func.grad(lambda m: loss(fs.gather_unit(m), x[dist.get_rank()]))(n)).values()
        )
    )(nodes)

    def dense_norm(unit):
        grads = torch.func.grad(lambda u: sum(loss(u, row) for row in x))(unit)
        return sum(g.square().sum() for g in grads.values())

    want = local_part(torch.func.grad(dense_norm)(full), nodes)
    close(dict(zip(nodes, second, strict=True)), want, "double backward")
    close(plain(functional), want, "grad of grad")


@pytest.mark.parametrize("axes", GRIDS[:2], ids=lambda axes: "x".join(axes))
def test_double_backward_through_gather_unit(axes):
    run_ranks(penalty, RANKS, axes)


def transposes(strategy, axes):
    """Inner products on both sides, and the gradient by hand against `value_and_grad`."""
    params = sharded_unit(strategy, axes)
    rank, nodes = dist.get_rank(), in_flight(params)
    generator = torch.Generator().manual_seed(rank)
    y = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in UNIT.items()}
    full = fs.gather_unit(params)
    back = fs.scatter_grads(y, like=params)
    assert all(isinstance(x, DTensor) for x in back.values())
    assert {name: str(x.placements) for name, x in back.items()} == {
        name: str(x.placements) for name, x in params.items()
    }
    assert_bitwise_equal(plain(fs.scatter_grads(y, like=nodes)), plain(back), "nodes and DTensors")
    left = {name: float((full[name].double() * y[name].double()).sum()) for name in UNIT}
    right = {}
    for name, node in nodes.items():
        held = 1
        for axis, size in zip(abstract(node.sharding.mesh).names, abstract(node.sharding.mesh).sizes, strict=True):
            held *= 1 if axis in node.sharding.spec.all_axes else size
        right[name] = float((node.value.double() * local_of(back[name]).double()).sum()) / held
    x = row_of_rank(rank)
    by_hand = fs.scatter_grads(torch.func.grad(lambda unit: head(unit, x))(full), like=params)
    _, grads = fs.value_and_grad(lambda p: head(fs.gather_unit(p), x), mean=False)(params)
    close(plain(by_hand), plain(grads), "scatter_grads and value_and_grad")
    some = fs.scatter_grads({**y, "w": None}, like=params)
    assert some["w"] is None
    assert_bitwise_equal(local_of(some["b"]), local_of(back["b"]))
    with pytest.raises(TransformError) as caught:
        torch.func.grad(lambda w: local_of(fs.scatter_grads({**y, "w": w}, like=params)["w"]).sum())(full["w"])
    assert str(caught.value) == (
        "fs.scatter_grads cannot run under a torch.func transform.\n"
        "Call it on the result of the transform. Inside, differentiate through fs.gather_unit."
    )
    return left, right


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
@pytest.mark.parametrize("axes", GRIDS, ids=lambda axes: "x".join(axes))
def test_scatter_grads_is_the_transpose_of_gather_unit(axes, strategy):
    results = run_ranks(transposes, RANKS, strategy, axes)
    for name in UNIT:
        left, right = (sum(result[i][name] for result in results) for i in (0, 1))
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9), name


# -------------------------------------------------------------------------------------------------------- scan_units
LAYERS = {"w": (3, 4, 4), "b": (3, 4)}
NAMES = {"w": ("layers", None, None), "b": ("layers", None)}


def stack():
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator) for name, shape in LAYERS.items()}


def block(unit, x):
    return torch.tanh(x @ unit["w"] + unit["b"]) + x


def masked_block(unit, x, inputs):
    """Per-layer inputs of two kinds: a bool mask and an int64 key."""
    keep = torch.where(inputs["mask"], x, torch.zeros_like(x))
    return block(unit, keep) * (1 + inputs["key"].sum() % 3), x.square().mean()


def scanned(policy, strategy, axes):
    """torch.func through `scan_units` under a policy, against the plain loop over whole layers."""
    layout = fs.plan_layout(stack(), mesh_of(axes), strategy=strategy, names=NAMES)
    params = fs.init_state(lambda key: stack(), fs.sgd(0.1), fs.random.key(0), layout).params
    nodes, full, rank = in_flight(params), stack(), dist.get_rank()
    tangent = {name: torch.randn(shape, generator=torch.Generator().manual_seed(9)) for name, shape in LAYERS.items()}
    tangents = with_values(nodes, local_part(tangent, nodes))
    x = torch.linspace(-1, 1, 4 * RANKS).view(RANKS, 4)

    def f(nodes):
        return fs.scan_units(block, nodes, x[rank : rank + 1], policy=policy).square().sum()

    def loop(unit, x):
        for layer in range(3):
            x = block({name: leaf[layer] for name, leaf in unit.items()}, x)
        return x.square().sum()

    def everyone(unit):
        return sum(loop(unit, row) for row in x)

    grads = local_part(torch.func.grad(everyone)(full), nodes)
    close(plain(torch.func.grad(f)(nodes)), grads, "grad")
    close(plain(torch.func.vjp(f, nodes)[1](torch.ones(()))[0]), grads, "vjp")
    close(
        torch.func.jvp(f, (nodes,), (tangents,))[1],
        torch.func.jvp(lambda u: loop(u, x[rank]), (full,), (tangent,))[1],
        "jvp",
    )
    inside = fs.value_and_grad(f, mean=False)(params)[1]
    close(plain(inside), grads, "value_and_grad")
    many = with_values(nodes, {name: torch.stack([value, -value]) for name, value in plain(nodes).items()})
    negative = fs.tree.map(torch.neg, full)
    close(torch.func.vmap(f)(many), torch.stack([loop(full, x[rank]), loop(negative, x[rank])]), "vmap")


@pytest.mark.parametrize(
    "policy",
    crossed(fs.policies.POLICIES.values(), kept=["save_except_gathered", "nothing_saveable"], name=lambda p: p.name),
)
def test_torch_func_through_scan_units(policy):
    for strategy, axes in (
        (fs.zero(3), {"dp": 4}),
        (fs.zero(0), {"dp": 2, "cp": 2}),
        (fs.hybrid(), {"replica": 2, "dp": 2}),
    ):
        run_ranks(scanned, RANKS, policy, strategy, axes)


def scanned_inputs(policy):
    """Per-layer inputs that have no gradient, and per-layer results."""
    layout = fs.plan_layout(stack(), mesh_of({"dp": 2}), names=NAMES)
    params = fs.init_state(lambda key: stack(), fs.sgd(0.1), fs.random.key(0), layout).params
    nodes, full = in_flight(params), stack()
    x = torch.linspace(-1, 1, 4).view(1, 4)
    xs = {"mask": torch.tensor([[True, True, False, True]] * 3), "key": fs.random.split(fs.random.key(0), 3)}

    def f(nodes):
        carry, aux = fs.scan_units(masked_block, nodes, x, xs=xs, has_aux=True, policy=policy)
        assert aux.shape == (3,)
        return carry.square().sum() + aux.sum()

    def loop(unit):
        carry, aux = x, 0.0
        for layer in range(3):
            unit_of, inputs = ({name: leaf[layer] for name, leaf in tree.items()} for tree in (unit, xs))
            carry, extra = masked_block(unit_of, carry, inputs)
            aux = aux + extra
        return carry.square().sum() + aux

    want = local_part(torch.func.grad(lambda unit: 2 * loop(unit))(full), nodes)
    inside = fs.value_and_grad(f, mean=False)(params)[1]
    close(plain(inside), want, "value_and_grad")
    close(plain(torch.func.grad(f)(nodes)), want, "grad")


@pytest.mark.parametrize("policy", fs.policies.POLICIES.values(), ids=lambda policy: policy.name)
def test_per_layer_keys_and_masks_under_every_policy(policy):
    run_ranks(scanned_inputs, 2, policy)
