"""Every role of a precision on two ranks: training is what plain torch makes of the same arithmetic, and of no other."""

import functools
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsharding as fs
from fsharding.base.dtypes import wide
from fsharding.formats.precision import Precision
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import full

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHAPES = {"w": (12, 8), "v": (3, 12)}
RANKS, PIECES, STEPS = 2, 2, 4
ROLES = {
    "none": Precision(),
    "params": Precision(params=BF16),
    "wide_params": Precision(params=F64, compute=F32),
    "compute": Precision(compute=BF16, params=F32),
    "half": Precision(compute=F16, params=F32),
    "reduce": Precision(reduce=BF16),
    "grads": Precision(grads=BF16),
    "wide_grads": Precision(grads=F64),
    "moments": Precision(moments=BF16, rounding="nearest"),  # as torch rounds
    "wide_moments": Precision(moments=F64),
    "all": Precision(params=F32, compute=F16, reduce=BF16, grads=F16, moments=BF16, rounding="nearest"),
}


def drawn(seed, shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def batch_of(step):
    """For each rank and microbatch, rows of inputs and targets."""
    whole = drawn(100 + step, {"x": (RANKS, PIECES * 3, 8), "y": (RANKS, PIECES * 3, 3)})
    return [{name: x[rank] for name, x in whole.items()} for rank in range(RANKS)]


def loss_of(w, v, batch):
    x, y = (batch[name].to(w.dtype) for name in "xy")
    return (torch.tanh(x @ w.T) @ v.T - y).square().sum()


def loss_fn(params, batch):
    whole = fs.gather_unit(params)
    return loss_of(whole["w"], whole["v"], batch), float(len(batch["x"]))


def optimizer():
    return fs.sgd(0.05, momentum=0.9, weight_decay=0.01)


def train(level):
    mesh, found = fs.make_mesh(device="cpu", dp=-1, timeout=timedelta(seconds=20)), {}
    rank, _ = data_rank_and_size(mesh)
    for name, how in ROLES.items():
        layout = fs.plan_layout(drawn(0, SHAPES), mesh, strategy=fs.zero(level), precision=how)
        opt = optimizer()
        state = fs.init_state(lambda key: drawn(0, SHAPES), opt, fs.random.key(0), layout)
        assert fs.debug.state_bytes(state.opt_state) == layout.memory(opt).opt_state
        step = fs.make_train_step(loss_fn, opt, microbatches=PIECES, donate=level % 2 == 1)
        for i in range(STEPS):
            state, _ = step(state, batch_of(i)[rank])
        main = state.main if state.main is not None else fs.main_params(state.params, layout)
        found[name] = {path: x.full_tensor() for path, x in main.items()}
        assert fs.debug.state_bytes(state.opt_state) == layout.memory(opt).opt_state
    return found


def plain(how, *, each):
    """The same in plain torch.

    Args:
        how: the dtypes.
        each: sums over ranks are taken for each microbatch, as where gradients are cut, and not once for all of them.
    """
    main = {name: x.to(how.params or F32) for name, x in drawn(0, SHAPES).items()}
    held = how.grads or wide(how.params or F32)
    trace = {name: torch.zeros(x.shape, dtype=how.moments or wide(x.dtype)) for name, x in main.items()}

    def wired(x):
        return x if how.reduce is None else x.to(how.reduce)

    for i in range(STEPS):
        terms: list = [[] for _ in range(RANKS)]
        for rank, batch in enumerate(batch_of(i)):
            for piece in range(PIECES):
                leaves = {name: x.detach().to(how.compute or x.dtype).requires_grad_() for name, x in main.items()}
                loss = loss_of(**leaves, batch={name: x.chunk(PIECES)[piece] for name, x in batch.items()})
                terms[rank].append(torch.autograd.grad(loss, [*leaves.values()]))
        for k, name in enumerate(main):
            if each:
                sums = [sum(wired(terms[r][p][k]).to(wide(held)) for r in range(RANKS)) for p in range(PIECES)]
                total = functools.reduce(lambda a, b: a + b.to(held), sums[1:], sums[0].to(held))
            else:
                of_rank = [
                    functools.reduce(lambda a, b: a + b, (terms[r][p][k].to(held) for p in range(PIECES)))
                    for r in range(RANKS)
                ]
                total = sum(wired(x).to(wide(held)) for x in of_rank).to(held)
            mean = total.to(wide(total.dtype)) * (1.0 / (RANKS * PIECES * 3))
            computed = wide(trace[name].dtype)
            now = trace[name].to(computed) * 0.9 + (mean + main[name].to(mean.dtype) * 0.01)
            trace[name] = now.to(trace[name].dtype)
            main[name] = (main[name] + (-0.05 * now).to(torch.promote_types(now.dtype, main[name].dtype))).to(
                main[name].dtype
            )
    return main


@functools.cache
def on_two(level):
    return run_ranks(train, RANKS, level)


LEVELS = [0, 3, *(pytest.param(level, marks=full) for level in (1, 2))]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("role", ROLES)
def test_training_is_what_plain_torch_makes_of_the_same_dtypes(role, level):
    how = ROLES[role]
    want = plain(how, each=level >= 2)
    for there in on_two(level):
        assert_trees_close(there[role], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "role", [role for role in ROLES if role not in ("none", "wide_grads", "wide_moments", "wide_params")]
)
def test_each_role_can_be_told_from_training(role):
    """What the test above compares with differs from role to role, so it would see one that is not heeded."""
    how = ROLES[role]
    for each in (False, True):
        found, others = plain(how, each=each), [plain(Precision(), each=each)]
        if role == "all":
            roles = ("compute", "reduce", "grads", "moments")
            others += [plain(replace(how, **{name: F32}), each=each) for name in roles]
        for other in others:
            assert max(float((found[name] - other[name]).abs().max()) for name in SHAPES) > 1e-4


# ----------------------------------------------------------------------------------------------------- beside FSDP2's policies
def mean_gradient_of_fsdp2(policy, own):
    model = torch.nn.Linear(1, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model(torch.tensor([[own]])).sum().backward()
    return float(model.weight.grad.full_tensor()[0])


def mean_gradient(precision, own):
    def loss_fn(params, batch):
        weight = fs.gather_unit(params)["w"]
        return (weight * batch["x"].to(weight.dtype)).sum(), 1.0

    params = {"w": torch.ones(2, 1)}
    layout = fs.plan_layout(params, fs.make_mesh(dp=-1, device="cpu"), precision=precision, names={"w": (None, None)})
    state = fs.init_state(lambda key: params, fs.sgd(1.0), fs.random.key(0), layout)
    _, grads = fs.value_and_grad(loss_fn, grads=state.layout.main)(state.params, {"x": torch.tensor([[own]])})
    return float(fs.unshard(grads["w"])[0])


def gradients_beside_fsdp2():
    own = (1.0, 2.0**-8)[dist.get_rank()]  # the sum needs 9 bits, of which bfloat16 has 8
    return {
        "fsdp2, float32": mean_gradient_of_fsdp2(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32), own),
        "fsdp2": mean_gradient_of_fsdp2(MixedPrecisionPolicy(param_dtype=BF16), own),
        "BF16": mean_gradient(fs.BF16, own),
    }


def test_what_becomes_of_the_policies_of_fsdp2():
    """As `from-torch.md` says: the default `reduce_dtype` became that of the parameters at rest in torch 2.15."""
    exact = (1 + 2.0**-8) / 2
    default = exact if torch.__version__ >= (2, 15) else 0.5
    for found in run_ranks(gradients_beside_fsdp2, 2):
        assert found == {"fsdp2, float32": exact, "fsdp2": default, "BF16": exact}
