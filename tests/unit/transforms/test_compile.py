"""`torch.compile` of blocks and of whole loss functions: the same bits as without, so many graphs, no warning.

`aot_eager` traces forward and backward as inductor does and writes no code, so that all bits can be compared.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fsharding as fs
from fsharding import policies
from fsharding.base.errors import MissingKeyError, NotGatheredError, ShapeError, TransformError
from tests.helpers import full, refusal, slow

OPT = fs.adamw(1e-2)
NAMES = {
    "embed": {"w": (None, None)},
    "blocks": {"w": ("layers", None, None), "b": ("layers", None)},
    "head": {"w": (None, None)},
}
POLICIES = [
    policies.nothing_saveable,
    policies.dots_saveable,
    policies.save_except_gathered,
    policies.everything_saveable,
]
CHANGING = (8, 6, 5, 7, 4)


def init(key):
    embed, blocks, head = fs.random.split(key, 3)
    return {
        "embed": {"w": fs.random.normal(embed, (16, 8))},
        "blocks": {"w": fs.random.normal(blocks, (3, 8, 8)), "b": fs.random.zeros((3, 8))},
        "head": {"w": fs.random.normal(head, (16, 8))},
    }


def block(unit, x):
    return x + torch.tanh(F.linear(x, unit["w"], unit["b"]))


def loss_of(block, policy=policies.save_except_gathered):
    def loss_fn(params, batch):
        x = F.embedding(batch["x"], fs.gather_unit(params["embed"])["w"])
        x = fs.scan_units(block, params["blocks"], x, policy=policy)
        out = F.linear(x, fs.gather_unit(params["head"])["w"])
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()

    return loss_fn


def tokens(positions, seed=0):
    x = torch.randint(16, (4, positions), generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x}


def start(level=3, precision=fs.FP32):
    mesh = fs.make_mesh(device="cpu")
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=f"zero{level}", names=NAMES, precision=precision)
    return fs.init_state(init, OPT, fs.random.key(0), layout)


def losses(loss_fn, lengths=(8, 8, 8), **how):
    state, step, found = start(**how), fs.make_train_step(loss_fn, OPT), []
    for seed, length in enumerate(lengths):
        state, metrics = step(state, tokens(length, seed))
        found.append(float(metrics.loss))
    return found


@pytest.fixture
def graphs():
    """A backend that counts its graphs; of breaks the compiler keeps count itself."""
    torch.compiler.reset()
    counters.clear()
    return CompileCounterWithBackend("aot_eager")


def breaks():
    return sum(counters["graph_break"].values())


# --------------------------------------------------------------------------------------------------------------- blocks
@slow
@pytest.mark.parametrize("level", range(4))
def test_a_compiled_block_is_one_graph_with_the_bits_of_an_eager_one(graphs, level):
    compiled = torch.compile(block, backend=graphs, fullgraph=True)
    assert losses(loss_of(compiled), level=level) == losses(loss_of(block), level=level)
    assert (graphs.frame_count, breaks()) == (1, 0)


@slow
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_compiled_block_under_every_policy(graphs, policy):
    compiled = torch.compile(block, backend=graphs, fullgraph=True)
    assert losses(loss_of(compiled, policy)) == losses(loss_of(block, policy))
    assert (graphs.frame_count, breaks()) == (1, 0)


def test_a_compiled_block_in_bfloat16(graphs):
    compiled = torch.compile(block, backend=graphs)
    assert losses(loss_of(compiled), precision=fs.BF16) == losses(loss_of(block), precision=fs.BF16)
    assert graphs.frame_count == 1


def test_a_second_length_compiles_once_more_for_all_lengths(graphs):
    compiled = torch.compile(block, backend=graphs)
    assert losses(loss_of(compiled), CHANGING) == losses(loss_of(block), CHANGING)
    assert (graphs.frame_count, breaks()) == (2, 0)


def test_a_compiled_block_that_is_computed_again_in_backward(graphs):
    again = fs.remat(torch.compile(block, backend=graphs, fullgraph=True))
    assert losses(loss_of(again)) == losses(loss_of(block))
    assert graphs.frame_count == 1


@full
def test_inductor():
    torch.compiler.reset()
    torch.testing.assert_close(losses(loss_of(torch.compile(block))), losses(loss_of(block)), rtol=1e-5, atol=1e-5)
    whole = torch.compile(loss_of(block))
    torch.testing.assert_close(losses(whole), losses(loss_of(block)), rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------- whole loss functions
@slow
@pytest.mark.parametrize("level", [0, 3])
def test_a_compiled_loss_function_has_graphs_between_its_gathers(graphs, level):
    compiled = torch.compile(loss_of(block), backend=graphs)
    assert losses(compiled, level=level) == losses(loss_of(block), level=level)
    # After the first gather, and after the last; nothing is computed between the scan and the last gather.
    assert (graphs.frame_count, breaks()) == (2, 3)


@slow
def test_a_compiled_loss_function_of_a_compiled_block(graphs):
    inner = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of(torch.compile(block, backend=inner, fullgraph=True)), backend=graphs)
    assert losses(compiled) == losses(loss_of(block))
    assert (graphs.frame_count, inner.frame_count) == (2, 1)


@slow
def test_a_compiled_loss_function_of_changing_lengths(graphs):
    compiled = torch.compile(loss_of(block), backend=graphs)
    assert losses(compiled, CHANGING) == losses(loss_of(block), CHANGING)
    assert graphs.frame_count == 4


def test_a_compiled_loss_function_in_value_and_grad(graphs):
    state = start()
    found, grads = fs.value_and_grad(torch.compile(loss_of(block), backend=graphs))(state.params, tokens(8))
    want, expected = fs.value_and_grad(loss_of(block))(state.params, tokens(8))
    assert [float(x) for x in found] == [float(x) for x in want]
    for grad, other in zip(fs.tree.leaves(grads), fs.tree.leaves(expected), strict=True):
        assert torch.equal(grad.to_local(), other.to_local())


@slow
def test_a_compiled_loss_function_with_remat_and_whole_trees(graphs):
    def loss_fn(params, batch):
        embed, head = fs.gather_unit(params["embed"]), fs.gather_unit(params["head"])
        x = fs.remat(lambda x: torch.tanh(F.linear(x, head["w"])))(F.embedding(batch["x"], embed["w"]))
        return x.square().sum() + 0.1 * fs.tree.vdot(params, params), 4

    assert losses(torch.compile(loss_fn, backend=graphs)) == losses(loss_fn)
    assert graphs.frame_count > 0


def test_a_compiled_function_in_shard_map(graphs):
    def norm(params):
        return fs.gather_unit(params["head"])["w"].square().sum()

    params = start().params
    compiled = fs.shard_map(torch.compile(norm, backend=graphs))
    assert torch.equal(compiled(params), fs.shard_map(norm)(params))
    assert graphs.frame_count == 1


@slow
def test_a_compiled_loss_of_a_model(graphs):
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)
    )
    state = fs.init_state(model, OPT, fs.random.key(0), fs.plan_layout(model, fs.make_mesh(device="cpu")))
    batch = {"tokens": tokens(8)["x"], "targets": tokens(8)["y"]}
    found, _ = fs.value_and_grad(torch.compile(fs.model_loss(model), backend=graphs))(state.params, batch)
    want, _ = fs.value_and_grad(fs.model_loss(model))(state.params, batch)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_compiled_function_reads_meshes(graphs):
    """torch knows what attributes a mesh has, and raises where compiled code asks for another."""
    mesh, table = fs.make_mesh(device="cpu"), torch.randn(16, 8)

    def on_mesh(ids, mesh=None):
        scale = 1 if mesh is None else sum(fs.data_rank_and_size(mesh))
        return scale * fs.ops.embedding(ids, table, mesh=mesh) + fs.ops.psum(table[:4], ("dp", "tp"), mesh=mesh)

    ids = torch.arange(4)
    for argument in (mesh, None):
        with fs.set_mesh(mesh):
            found = torch.compile(on_mesh, backend=graphs)(ids, argument)
        assert torch.equal(found, table[:4] * 2)
    assert graphs.frame_count > 0


# ----------------------------------------------------------------------------------------------------- it is refused by name
STEP = (
    "train step cannot run inside of torch.compile.\n"
    "Compile the blocks, fs.make_train_step(model._replace(block=torch.compile(model.block)), opt), or a loss function,"
    " fs.make_train_step(torch.compile(loss_fn), opt)."
)


def test_a_compiled_step_is_refused(graphs):
    state, step = start(), fs.make_train_step(loss_of(block), OPT)

    def train(state, batch):
        state, metrics = step(state, batch)
        return state, metrics.loss * 2

    for compiled in (torch.compile(step, backend=graphs), torch.compile(train, backend=graphs)):
        assert refusal(compiled, state, tokens(8), kind=TransformError) == STEP
    assert float(step(state, tokens(8))[1].loss) > 0


def test_other_compiled_transforms_are_refused(graphs):
    params = start().params
    gradient = torch.compile(fs.value_and_grad(loss_of(block)), backend=graphs)
    assert refusal(gradient, params, tokens(8), kind=TransformError) == (
        "fs.value_and_grad cannot run inside of torch.compile.\n"
        "Compile the loss function, fs.value_and_grad(torch.compile(loss_fn)), or its blocks."
    )
    mapped = fs.shard_map(lambda p: fs.gather_unit(p["head"])["w"].sum())
    assert refusal(torch.compile(mapped, backend=graphs), params, kind=TransformError) == (
        "fs.shard_map cannot run inside of torch.compile.\n"
        "Compile the function inside: fs.shard_map(torch.compile(fn))."
    )


def test_other_compiled_calls_are_refused(graphs):
    state, batch = start(), tokens(8)
    grads = fs.value_and_grad(loss_of(block), grads=state.layout.main)(state.params, batch)[1]
    calls = {
        "fs.evaluate": lambda: torch.compile(fs.evaluate(loss_of(block)), backend=graphs)(state, batch),
        "fs.update": lambda: torch.compile(fs.update, backend=graphs)(state, grads, OPT),
        "fs.models.generate": lambda: torch.compile(fs.models.generate, backend=graphs)(
            lambda params, tokens: torch.zeros(*tokens.shape, 8), {"w": torch.ones(1)}, [[1]], 2
        ),
    }
    mends = {
        "fs.evaluate": "Compile the loss function, fs.evaluate(torch.compile(loss_fn)), or its blocks.",
        "fs.update": "Call it without torch.compile: its kernels are fused already.",
        "fs.models.generate": "Compile what it calls: fs.models.generate(torch.compile(apply), ...).",
    }
    for name, call in calls.items():
        said = refusal(call, kind=TransformError)
        assert said == f"{name} cannot run inside of torch.compile.\n{mends[name]}"
    assert torch.equal(
        fs.evaluate(torch.compile(loss_of(block), backend=graphs))(state, batch).sum,
        fs.evaluate(loss_of(block))(state, batch).sum,
    )


def test_a_loss_function_as_one_graph_is_refused(graphs):
    compiled = torch.compile(loss_of(block), backend=graphs, fullgraph=True)
    assert refusal(fs.value_and_grad(compiled), start().params, tokens(8), kind=TransformError) == (
        "fs.value_and_grad has a loss function that is compiled as one graph, which gathers cannot be part of.\n"
        "Leave out fullgraph=True, or pass it to a block: fs.scan_units(torch.compile(block, fullgraph=True), ...)."
    )


def test_mistakes_in_a_compiled_loss_function_are_told_as_in_an_eager_one(graphs):
    params = start().params

    def told(fn, kind):
        text = refusal(fs.value_and_grad(torch.compile(fn, backend=graphs)), params, tokens(8), kind=kind)
        return [line for line in text.split("\n") if "test_compile.py:" not in line]

    assert told(lambda p, b: F.linear(torch.ones(2, 8), p["head"]["w"]).sum(), NotGatheredError)[-1] == (
        'Gather its unit first, unit = fs.gather_unit(params["head"]), and use unit["w"].'
    )
    assert told(lambda p, b: fs.gather_unit(p["heads"])["w"].sum(), MissingKeyError)[-1].endswith(
        "Did you mean 'head'?"
    )
    first, *_, last = told(lambda p, b: F.linear(torch.ones(2, 7), fs.gather_unit(p["head"])["w"]).sum(), ShapeError)
    assert first.startswith("fs.value_and_grad has a loss function that failed: ") and "[2, 7] X [8, 16]" in first
    assert last == "Match the shapes of the batch to the weights, or the weights to the batch."
