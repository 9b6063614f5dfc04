"""States that are not what their layout says, and leaves that cannot say where they are: refused, never computed with."""

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import FshardingError
from fsharding.testing import assert_bitwise_equal, run_ranks

OPTIMIZERS = {
    "adamw": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, weight_decay=0.1)),
    "sgd": lambda: fs.sgd(1e-2, momentum=0.9),
    "lion": lambda: fs.optim.lion(1e-2),
    "muon": lambda: fs.optim.muon(1e-2),
    "from_torch": lambda: fs.optim.from_torch(torch.optim.NAdam, lr=1e-2),
}
SIZES = fs.models.DecoderConfig(vocab_size=96, dim=64, layers=4, heads=4, kv_heads=2, intermediate_size=80)


def init(key):
    first, last = fs.random.split(key, 2)
    return {"first": fs.random.normal(first, (16, 8)), "last": fs.random.normal(last, (3, 16))}


def loss_fn(params, batch):
    first = fs.gather_unit(params["first"])
    hidden = torch.tanh(batch.to(first.dtype) @ first.T)
    return (hidden @ fs.gather_unit(params["last"]).T).square().sum(), len(batch)


def typed_refusal(call):
    with pytest.raises(FshardingError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def surgeries(state):
    """States with leaves that the layout does not say, by name; those that leave the state as it is are left out."""
    layout = state.layout
    other = fs.NamedSharding(layout.mesh, fs.P(None, "dp"))
    whole = fs.unshard(state)
    yield "whole params", lambda: state.replace(params=whole.params, main=state.main)
    yield "params cut elsewhere", lambda: state.replace(params=fs.reshard(state.params, other), main=state.main)
    halved = fs.tree.map(lambda x: x.to(torch.float16), state.params)
    yield "params in another dtype", lambda: state.replace(params=halved, main=state.main)
    yield "whole moments", lambda: state.replace(opt_state=whole.opt_state)
    yield "moments cut elsewhere", lambda: state.replace(opt_state=fs.reshard(state.opt_state, other))
    if state.main is not None:
        yield "whole main", lambda: state.replace(main=whole.main)
        yield "no main", lambda: state.replace(main=None)
        yield "params alone", lambda: state.replace(params=state.params)
    else:
        yield "main too many", lambda: state.replace(main=state.params)


def operate(name, strategy, precision, folder):
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=strategy, precision=precision)
    opt = OPTIMIZERS[name]()
    state, found = fs.init_state(init, opt, fs.random.key(0), layout), {}
    for donate in (False, True):
        step = fs.make_train_step(loss_fn, opt, donate=donate)
        for kind, make in surgeries(state):
            found[kind, donate] = typed_refusal(lambda make=make, step=step: step(make(), torch.ones(2, 8)))
    for kind, make in surgeries(state):
        found[kind, "reshard"] = typed_refusal(lambda make=make: fs.reshard(make(), layout.with_strategy(fs.zero(0))))
        found[kind, "save"] = typed_refusal(lambda make=make: fs.checkpoint.save(f"{folder}/x", make()))
    state, metrics = fs.make_train_step(loss_fn, opt)(state, torch.ones(2, 8))
    return found, metrics.loss.item()


NO_NUMBERS = [
    0.5, "x", None, torch.tensor(float("inf")), torch.tensor(1j), torch.tensor([1, 2]),
    torch.zeros((), dtype=torch.int64, device="meta"),
]  # fmt: skip


def with_steps_that_are_no_numbers():
    opt = fs.sgd(0.1)
    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1))
    state, step = fs.init_state(init, opt, fs.random.key(0), layout), fs.make_train_step(loss_fn, opt)
    wrong = [state.replace(step=number) for number in NO_NUMBERS]
    return [typed_refusal(lambda odd=odd: step(odd, torch.ones(2, 8))) for odd in wrong]


def test_a_step_that_is_no_number_is_refused_on_ranks_that_name_their_step():
    for texts in run_ranks(with_steps_that_are_no_numbers, 2):
        for text in texts:
            assert text.startswith("LayoutError: train step got a state without a step number or a key.\n  step is "), (
                text
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_not_in_its_layout_is_refused(name, tmp_path):
    for strategy, precision in ((fs.zero(3), fs.FP32), (fs.zero(1), fs.BF16)):
        for found, loss in run_ranks(operate, 2, name, strategy, precision, str(tmp_path)):
            for (kind, where), text in found.items():
                at_once = where != "save" or kind == "params alone"
                assert text.startswith("LayoutError: " if at_once else "CheckpointError: "), (kind, where, text)
            assert loss > 0


def test_the_refusal_names_leaf_type_and_edit(tmp_path):
    found, _ = run_ranks(operate, 2, "adamw", fs.zero(3), fs.FP32, str(tmp_path))[0]
    assert found["whole params", True] == (
        "LayoutError: train step got a state that doesn't match its layout.\n"
        "  params.first is a plain tensor float32[16, 8]; the layout has float32[16@dp, 8]\n"
        "  params.last is a plain tensor float32[3, 16]; the layout has float32[3@dp, 16]\n"
        "Bring them there: state.replace(params=fs.shard(params, state.layout)) for full tensors, fs.reshard for DTensors."
    )
    assert (
        "  params.first is float32[16, 8@dp]; the layout has float32[16@dp, 8]\n"
        in found["params cut elsewhere", False]
    )
    assert (
        "  params.first is float16[16@dp, 8]; the layout has float32[16@dp, 8]\n"
        in found["params in another dtype", False]
    )
    assert (
        "opt_state.states.1.mu.first is a plain tensor float32[16, 8]; the layout has float32[16@dp, 8]\n"
        in found["whole moments", False]
    )
    found, _ = run_ranks(operate, 2, "adamw", fs.zero(1), fs.BF16, str(tmp_path))[0]
    assert found["params alone", False] == (
        "LayoutError: fs.TrainState.replace got params without main.\n"
        "Give both, main=fs.shard(full, state.layout.main); or make a new state, with fs.state_from_params."
    )  # fmt: skip


def mended():
    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=-1))
    state = fs.init_state(init, fs.adamw(1e-2), fs.random.key(0), layout)
    step = fs.make_train_step(loss_fn, fs.adamw(1e-2))
    again = state.replace(params=fs.shard(fs.unshard(state.params), state.layout))
    (one, _), (two, _) = step(state, torch.ones(2, 8)), step(again, torch.ones(2, 8))
    assert_bitwise_equal(one, two)
    texts = [
        typed_refusal(lambda: fs.params_from_main(fs.unshard(state.params), state.params, layout)),
        typed_refusal(lambda: fs.main_params(fs.unshard(state.params), layout)),
        typed_refusal(
            lambda: fs.value_and_grad(loss_fn, grads=layout.main)(fs.unshard(state.params), torch.ones(2, 8))
        ),
        typed_refusal(lambda: fs.shard(state.params, layout)),
        typed_refusal(lambda: fs.state_from_params(fs.unshard(state.params), fs.sgd(0.1), fs.random.key(0), layout)),
    ]
    return texts


def test_the_edit_mends_it_and_pieces_by_hand_refuse_the_same():
    for spread, main, grads, cut, made in run_ranks(mended, 2):
        assert spread.startswith(
            "LayoutError: fs.params_from_main got leaves that don't match the layout.\n  first is a plain"
        )
        assert main.startswith("LayoutError: fs.main_params got leaves") and main.endswith("fs.reshard for DTensors.")
        assert grads == (
            "TransformError: fs.value_and_grad got a plain tensor float32[16, 8], but grads= has a sharding for it, P('dp').\n"
            "Shard full parameters first: fs.shard(params, layout)."
        )
        assert cut == (
            "LayoutError: fs.shard takes full tensors, and these leaves are sharded.\n  first is float32[16@dp, 8] already\n"
            "  last is float32[3@dp, 16] already\nUse fs.reshard."
        )
        assert made.startswith("LayoutError: fs.state_from_params got leaves")


# ------------------------------------------------------------------------------------- leaves that cannot say where they are
def staged_layout():
    model = fs.models.decoder(SIZES)
    return model, fs.plan_layout(
        model, fs.make_mesh(pp=2), stages=fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", 2, 4))
    )


def fused_layout():
    def model(key):
        return {"qkv": fs.random.normal(key, (64, 96)), "plain": fs.random.normal(key, (8, 6))}

    names = {"qkv": (None, fs.Fused("heads", (64, 16, 16))), "plain": ("heads", None)}
    return model, fs.plan_layout(model(fs.random.key(0)), fs.make_mesh(tp=2), names=names)


def unsharded(make):
    model, layout = make()
    opt = fs.adamw(1e-3)
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    draws = (model.init if hasattr(model, "init") else model)(fs.random.split(fs.random.key(0))[0])
    want = fs.tree.map(lambda draw: draw.tensor(), draws)
    texts = [
        typed_refusal(lambda: fs.global_norm(state.params)),
        typed_refusal(lambda: fs.tree.vdot(state.params, state.params)),
        typed_refusal(lambda: fs.value_and_grad(lambda p: p)(state.params)),
        typed_refusal(lambda: fs.shard_map(lambda p: p)(state.params)),
    ]
    assert_bitwise_equal(fs.unshard(state.params, source=layout), want)
    assert_bitwise_equal(fs.unshard(state.params), want)
    assert_bitwise_equal(fs.unshard(state.opt_state.nu), fs.tree.map(torch.zeros_like, want))
    assert_bitwise_equal(fs.unshard(fs.reshard(state.params, fs.NamedSharding(layout.mesh, fs.P()))), want)
    whole = fs.unshard(state)
    assert_bitwise_equal(whole.params, want)
    assert_bitwise_equal(whole.opt_state.nu, fs.tree.map(torch.zeros_like, want))
    texts.append(typed_refusal(lambda: fs.reshard(whole, layout)))
    return texts


@pytest.mark.parametrize("make", [staged_layout, fused_layout])
def test_a_slice_is_not_taken_for_the_leaf(make):
    for texts in run_ranks(unsharded, 2, make):
        assert all("which ranks own" in texts[i] for i in (0, 1, 3)) and "with an explicit assignment" in texts[2]
        assert texts[4].startswith("LayoutError: fs.reshard got a state that doesn't match its layout")
