"""Experts on ranks: what one process with all experts gives, forward, backward and over steps of training.

The reference of the layers goes through each token and each of its experts; that of a run is the same run on one process.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding import ops
from fsharding.base.errors import LayoutError, SpecError
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import axis_group, coordinate, data_rank_and_size
from fsharding.ops.moe import owned_experts
from fsharding.sharding.boxes import chunk
from fsharding.testing import assert_adjoint, assert_bitwise_equal, assert_trees_close, rank_values, run_ranks
from tests.helpers import crossed, full, mesh_of

LAYERS, EXPERTS, TOP_K, DIM, HIDDEN, ROWS = 2, 6, 2, 8, 12, 16
OPT = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, eps=1e-4, weight_decay=0.1))
RULES = fs.DEFAULT_RULES


def values(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# ------------------------------------------------------------------------------------- one layer, against dense math
def whole_layer():
    """Router, gate, up, down of all experts."""
    shapes = [(EXPERTS, DIM), *[(EXPERTS, HIDDEN, DIM)] * 3]
    return [values(*shape, seed=i) / 2 for i, shape in enumerate(shapes)]


def tokens_of(place, case):
    """The tokens of one place along ep: other numbers on each, none on some; or all for one expert."""
    count = {"uneven": (5, 0, 9, 2)[place], "capacity": 6, "one expert": 4, "none": 0}[case]
    return values(count, DIM, seed=100 + place)


def router_bias(case):
    bias = torch.zeros(EXPERTS)
    bias[3] = 100.0 if case == "one expert" else 0.0
    return bias


def layer_on_a_rank(axes, case):
    """What this rank's tokens become, and gradients of its tokens, of the router, and of its part of the experts."""
    mesh = mesh_of(axes)
    where = coordinate(mesh)
    start, stop = chunk(EXPERTS, axes.get("ep", 1), where.get("ep", 0))
    low, high = chunk(HIDDEN, axes.get("tp", 1), where.get("tp", 0))
    router, *experts = whole_layer()
    mine = [w[start:stop, low:high].clone() for w in experts]
    args = [x.requires_grad_() for x in (tokens_of(where.get("ep", 0), case), router, *mine)]
    x, router, gate, up, down = args
    with fs.set_mesh(mesh):
        routing = ops.route(x @ router.T, top_k=TOP_K, score="sigmoid", bias=router_bias(case))
        capacity = EXPERTS / TOP_K if case == "capacity" else None
        y = ops.experts_swiglu(x, gate, up, down, routing, capacity=capacity)
        found = torch.autograd.grad(y, args, values(*y.shape, seed=200 + where.get("ep", 0)))
    return y, *found


def dense_layer(places, case):
    """The same for all places at once: (y and gradient of tokens by place, gradients of all weights)."""
    weights = [w.requires_grad_() for w in whole_layer()]
    router, gate, up, down = weights
    xs = [tokens_of(place, case).requires_grad_() for place in range(places)]
    total, ys = torch.zeros(()), []
    for place, x in enumerate(xs):
        routing = ops.route(x @ router.T, top_k=TOP_K, score="sigmoid", bias=router_bias(case))
        each = torch.einsum(
            "xnf,xfd->nxd", F.silu(torch.einsum("nd,xfd->xnf", x, gate)) * torch.einsum("nd,xfd->xnf", x, up), down
        )
        picked = each.gather(1, routing.experts[..., None].expand(-1, -1, DIM))
        ys.append((picked * routing.weights[..., None]).sum(1))
        total = total + (ys[-1] * values(*ys[-1].shape, seed=200 + place)).sum()
    grads = torch.autograd.grad(total, [*xs, *weights])
    return ys, grads[:places], grads[places:]


@pytest.mark.parametrize("case", ["uneven", "capacity", "one expert", "none"])
@pytest.mark.parametrize("axes", [{"ep": 2}, {"tp": 2}, {"ep": 4}, {"ep": 2, "tp": 2}], ids=str)
def test_a_layer_on_ranks_is_the_layer_of_one_process(axes, case):
    places, cuts = axes.get("ep", 1), axes.get("tp", 1)
    results = run_ranks(layer_on_a_rank, places * cuts, axes, case)
    ys, x_grads, (router_grad, *grads) = dense_layer(places, case)
    close = functools.partial(assert_trees_close, rtol=1e-5, atol=1e-5)
    for rank, (y, x_grad, _, *mine) in enumerate(results):
        place, cut = divmod(rank, cuts)
        (start, stop), (low, high) = chunk(EXPERTS, places, place), chunk(HIDDEN, cuts, cut)
        close([y, x_grad], [ys[place], x_grads[place]], what=f"tokens of rank {rank}")
        close(mine, [g[start:stop, low:high] for g in grads], what=f"experts of rank {rank}")
    # Each place has its own tokens; ranks along tp have the same, and the same gradient.
    close(sum(results[place * cuts][2] for place in range(places)), router_grad, what="the router")


# --------------------------------------------------------------------------------------------------------- transposes
def transposes():
    """An uneven all-to-all, and dispatch with combine, on rank orders of every kind; over one axis and over two."""
    for axes, order, along in (
        ({"ep": 4}, AXES, "ep"),
        ({"dp": 2, "ep": 2}, ("pp", "replica", "ep", "dp", "cp", "tp"), ("dp", "ep")),
        ({"dp": 2, "ep": 2}, AXES, ("ep", "dp")),
    ):
        mesh = mesh_of(axes, order=order)
        group = group_of(mesh, along)
        # Row i of the table is what member i sends to each.
        table = torch.tensor([[0, 3, 1, 0], [2, 0, 0, 5], [0, 0, 0, 0], [1, 4, 2, 1]])
        send, receive = table[group.index].tolist(), table[:, group.index].tolist()
        there = functools.partial(ops.all_to_all_rows, axis=along, send=send, receive=receive, mesh=mesh)
        back = functools.partial(ops.all_to_all_rows, axis=along, send=receive, receive=send, mesh=mesh)
        x = rank_values((sum(send), 3), mesh, seed=1)
        assert_adjoint(there, back, x, mesh=mesh, what="all_to_all_rows")
        assert_bitwise_equal(back(there(x)), x)
        came = there(torch.full((sum(send),), float(group.index))).tolist()
        assert came == [float(member) for member, count in enumerate(receive) for _ in range(count)]
        linear = torch.func.jvp(there, (x,), (2 * x,))
        assert_bitwise_equal(linear[1], there(2 * x))
        doubled = torch.vmap(there, in_dims=1, out_dims=1)(x)
        assert_bitwise_equal(doubled, there(x))

        count = (3, 0, 6, 1)[group.index]
        experts = torch.randint(0, 5, (count, 2), generator=torch.Generator().manual_seed(group.index))
        routing = ops.Routing(experts, torch.ones(count, 2), torch.zeros(count, 5))
        send_out = functools.partial(ops.dispatch, routing=routing, experts=5, axis=along, mesh=mesh)
        tokens = rank_values((count, 3), mesh, seed=2)
        rows, counts, plan = send_out(tokens)
        assert rows.shape[0] == counts.sum() and counts.numel() == len(
            range(*owned_experts(5, group_sizes(along, axes))[group.index])
        )
        assert_adjoint(lambda x: send_out(x).rows, lambda y: ops.combine(y, plan), tokens, mesh=mesh, what="dispatch")  # noqa: B023

        same = torch.randint(0, 5, (4, 2), generator=torch.Generator().manual_seed(group.index))
        routing = ops.Routing(same, torch.ones(4, 2), torch.zeros(4, 5))
        roomy = functools.partial(ops.dispatch, routing=routing, experts=5, axis=along, mesh=mesh, capacity=5.0)
        tokens = rank_values((4, 3), mesh, seed=3)
        plan = roomy(tokens).plan
        assert plan.capacity == 4
        if not plan.weights.isnan().any():
            assert_adjoint(lambda x: roomy(x).rows, lambda y: ops.combine(y, plan), tokens, mesh=mesh, what="slots")  # noqa: B023
    with pytest.raises(SpecError) as caught:
        ops.all_to_all_rows(torch.zeros(3, 2), "ep", send=[1, 1], receive=[1, 1, 1, 1], mesh=mesh_of({"ep": 4}))
    return str(caught.value)


def group_of(mesh, along):
    return axis_group(mesh, (along,) if isinstance(along, str) else along)


def group_sizes(along, axes):
    return tuple(axes[axis] for axis in ((along,) if isinstance(along, str) else along))


def test_rows_go_out_and_come_back():
    assert (
        run_ranks(transposes, 4)
        == [
            "fs.ops.all_to_all_rows cannot send [1, 1] and receive [1, 1, 1, 1] rows over ep of size 4.\n"
            "  x has shape (3, 2)\nPass one number for each rank; those in send sum to the size of dim 0."
        ]
        * 4
    )


# ----------------------------------------------------------------------------------------------------------- training
def draws(key):
    keys = iter(fs.random.split(key, 8).unbind(0))

    def weight(*shape):
        return fs.random.normal(next(keys), shape, std=0.4)

    expert = (LAYERS, EXPERTS, HIDDEN, DIM)
    blocks = {
        "router": weight(LAYERS, EXPERTS, DIM),
        "gate": weight(*expert),
        "up": weight(*expert),
        "down": weight(*expert),
    }
    return {"embed": weight(DIM, DIM), "blocks": blocks, "head": weight(DIM, DIM)}


EXPERT_NAMES = ("layers", "expert", "mlp", "embed")
NAMES = {
    "embed": (None, "embed"),
    "blocks": {"router": ("layers", None, "embed"), "gate": EXPERT_NAMES, "up": EXPERT_NAMES, "down": EXPERT_NAMES},
    "head": (None, "embed"),
}


def block(params, x):
    logits = x @ params["router"].T
    routing = ops.route(logits, top_k=TOP_K)
    y = ops.experts_swiglu(x, params["gate"], params["up"], params["down"], routing)
    return x + y, (ops.balance_loss(routing)[0], ops.z_loss(logits)[0])


def loss_of(policy, aux):
    """A sum over rows: squared errors, and the losses of the routers."""

    def loss(params, batch):
        embed = fs.gather_unit(params["embed"])
        x = batch["x"].to(embed.dtype) @ embed
        x, (balance, z) = fs.scan_units(block, params["blocks"], x, has_aux=True, policy=policy)
        errors = (torch.tanh(x @ fs.gather_unit(params["head"])).float() - batch["y"]).square().sum()
        return errors + aux * (balance.sum() + 0.1 * z.sum()), batch["x"].shape[0]

    return loss


def batches(mesh, steps):
    index, count = data_rank_and_size(mesh)
    for step in range(steps):
        x, y = values(ROWS, DIM, seed=step), values(ROWS, DIM, seed=50 + step).clamp(-1, 1)
        yield {"x": x.chunk(count)[index], "y": y.chunk(count)[index]}


def train(axes, strategies, *, policy="save_except_gathered", aux=0.05, microbatches=1, precision=fs.FP32, steps=3):
    """For each strategy: losses, norms, and whole parameters that torch has put together."""
    mesh, found = mesh_of(axes), []
    for strategy in strategies:
        layout = fs.plan_layout(draws(fs.random.key(0)), mesh, RULES, strategy, names=NAMES, precision=precision)
        state = fs.init_state(draws, OPT, fs.random.key(3), layout)
        assert fs.debug.state_bytes((state.params, state.main, state.opt_state)) == layout.memory(OPT).state
        step = fs.make_train_step(loss_of(fs.policies.POLICIES[policy], aux), OPT, microbatches=microbatches)
        seen = []
        for batch in batches(mesh, steps):
            state, metrics = step(state, batch)
            seen.append((metrics.loss.item(), metrics.grad_norm.item()))
        params = {path: x.full_tensor() for path, x in fs.tree.named_leaves(state.params).items()}
        found.append((seen, params))
    return found


@functools.cache
def alone(**how):
    return train({"dp": 1}, [fs.zero(0)], **how)[0]


ZEROS = [fs.zero(0), fs.zero(1), fs.zero(3)]


@pytest.mark.parametrize(
    "axes",
    crossed(
        [{"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}],
        kept=["{'dp': 2, 'ep': 2}", "{'ep': 2, 'tp': 2}"],
    ),
)
def test_experts_train_as_on_one_process(axes):
    results = run_ranks(train, functools.reduce(int.__mul__, axes.values()), axes, ZEROS)
    for other in results[1:]:
        assert_bitwise_equal(other, results[0], "the ranks' results")
    for found in results[0]:
        assert_bitwise_equal(found, results[0][0], "the strategies' results")
    seen, params = alone()
    assert_trees_close(results[0][0][0], seen, rtol=1e-5, what="losses and norms")
    assert_trees_close(results[0][0][1], params, rtol=1e-3, atol=1e-5, what="parameters")


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "nothing_saveable"},
        pytest.param({"aux": 0.0, "microbatches": 2}, marks=full),
        pytest.param({"policy": "dots_saveable"}, marks=full),
        pytest.param({"policy": "everything_saveable", "steps": 6}, marks=full),
    ],
    ids=str,
)
def test_experts_train_with_remat_and_in_microbatches(how):
    results = run_ranks(train, 4, {"dp": 2, "ep": 2}, [fs.zero(2), fs.zero(3)], **how)
    for found in results[0]:
        want = alone(aux=how.get("aux", 0.05), steps=how.get("steps", 3))[0]
        # Microbatches add in another order, and AdamW's first steps turn that into more than a rounding of the norm.
        assert_trees_close(found[0], want, rtol=2e-5 if "microbatches" in how else 1e-5, what="losses and norms")


def in_bfloat16():
    """Losses of zero(1) and zero(3) agree in every bit with bfloat16 compute too, and a replica is just another copy."""
    runs = train({"dp": 2, "ep": 2}, [fs.zero(1), fs.zero(3)], precision=fs.BF16, steps=2)
    outer = train({"replica": 2, "ep": 2}, [fs.hybrid(), fs.hybrid(opt_state=True)], precision=fs.BF16, steps=2)
    return [seen for seen, _ in (*runs, *outer)]


def test_experts_in_bfloat16_and_over_replicas():
    for found in run_ranks(in_bfloat16, 4):
        assert found == [found[0]] * 4


# --------------------------------------------------------------------------------------------------- what is not sent
def what_moves():
    """Experts alone on their axis: nothing of them is gathered, and no gradient of theirs is summed."""
    mesh = mesh_of({"ep": 2})
    shapes = {"gate": torch.zeros(EXPERTS, HIDDEN, DIM), "dense": torch.zeros(DIM, DIM)}
    layout = fs.plan_layout(shapes, mesh, names={"gate": EXPERT_NAMES[1:], "dense": (None, "embed")})
    place = data_rank_and_size(mesh)[0]
    params = fs.shard({"gate": values(EXPERTS, HIDDEN, DIM, seed=1), "dense": values(DIM, DIM, seed=2)}, layout)

    def loss(params, batch):
        gate = fs.gather_unit({"gate": params["gate"]})["gate"]
        dense = fs.gather_unit({"dense": params["dense"]})["dense"]
        assert gate.shape == (EXPERTS // 2, HIDDEN, DIM) and dense.shape == (DIM, DIM)
        return (gate.square().sum() + dense.square().sum()) * (place + 1.0) / 2, 1

    with fs.debug.record_collectives() as seen:
        (total, _), grads = fs.value_and_grad(loss, mean=False)(params, None)
    assert_bitwise_equal(grads["gate"].to_local(), params["gate"].to_local() * (place + 1))
    assert_trees_close(grads["dense"].full_tensor(), 3 * params["dense"].full_tensor(), rtol=1e-6)
    halves = [fs.typeof(x) for x in fs.tree.leaves((params, grads))]
    again = fs.tree.map(torch.clone, params)
    assert fs.typeof(again["gate"]) == fs.typeof(params["gate"]) == halves[1]
    with pytest.raises(LayoutError, match="moves leaves without partial sums, along data axes"):
        fs.redistribute({"gate": params["gate"]}, {"gate": fs.NamedSharding(mesh)})
    whole = fs.unshard(params)
    assert_bitwise_equal(whole["gate"], values(EXPERTS, HIDDEN, DIM, seed=1))
    return seen[0].gathers, seen[0].reductions, [str(t) for t in halves], fs.global_norm(params).item(), total.item()


def test_experts_are_neither_gathered_nor_summed_over_their_axis():
    gate, dense = values(EXPERTS, HIDDEN, DIM, seed=1), values(DIM, DIM, seed=2)
    norm = (gate.double().square().sum() + dense.double().square().sum()).sqrt().item()
    for gathers, reductions, types, found, _ in run_ranks(what_moves, 2):
        assert gathers == ["dense"] and reductions == ["dense"]
        assert types == ["float32[8, 8@ep]", "float32[6@ep, 12, 8] owned over ep"] * 2
        assert found == pytest.approx(norm, rel=1e-6)


# ------------------------------------------------------------------------------------------ resharding in mid-training
def swap_meshes():
    """Two steps on ep=4, two on dp=2, ep=2, against four that stay."""
    loss = loss_of(fs.policies.save_except_gathered, 0.05)
    step, runs = fs.make_train_step(loss, OPT), []
    first = fs.plan_layout(draws(fs.random.key(0)), mesh_of({"ep": 4}), RULES, names=NAMES)
    other = first.with_mesh(mesh_of({"dp": 2, "ep": 2})).with_strategy(fs.zero(1))
    for swap in (False, True):
        state, seen = fs.init_state(draws, OPT, fs.random.key(3), first), []
        for number in range(4):
            state = fs.reshard(state, other) if swap and number == 2 else state
            state, metrics = step(state, list(batches(state.layout.mesh, 4))[number])
            seen.append(metrics.loss.item())
        runs.append(seen)
    return runs


def test_experts_move_to_another_mesh_in_mid_training():
    for stayed, swapped in run_ranks(swap_meshes, 4):
        assert swapped[:2] == stayed[:2]
        assert_trees_close(swapped, stayed, rtol=1e-6)
