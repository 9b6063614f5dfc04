"""Buffers of modules on real ranks: those that stay are compared, those that a forward writes are trained with."""

import hashlib

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ConfigError, NonFiniteError, RankError, ReplicaError, TransformError
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.train.capture import captured
from tests.helpers import bits as all_bits
from tests.helpers import full, mesh_of, refusal
from tests.tape import Tape

BATCH = {"x": torch.linspace(-1, 1, 12).view(3, 4)}


class Table(nn.Module):
    """A buffer that is saved, one that is not, and a plain attribute."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        torch.manual_seed(seed)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("mask", torch.randn(2, 2), persistent=False)
        self.shift = torch.randn(3)

    def forward(self, x):
        return self.linear(x) * self.table


def told(x):
    """What an error says of a tensor: its type, and 63 bits of the sha256 of its bytes."""
    number = int.from_bytes(hashlib.sha256(x.numpy().tobytes()).digest()[:8], "big") >> 1
    return f"float32{list(x.shape)} of checksum {number:016x}"


def loss_of(net):
    return lambda params, batch: net(params, batch["x"]).square().sum()


def refusals():
    """What each way to train a module with other buffers on each rank ends with."""
    rank, mesh, opt, key = torch.distributed.get_rank(), mesh_of({"dp": 2}), fs.sgd(0.1), fs.random.key(0)
    net = fs.functionalize(Table(rank), ())
    layout = fs.plan_layout(net, mesh)
    result = {"init_state": refusal(fs.init_state, net, opt, key, layout, kind=ConfigError)}
    result["setup"] = refusal(fs.setup, net, loss_of(net), opt, key, mesh=mesh, kind=ConfigError)
    # The parameters alone are the same on both ranks.
    state = fs.init_state(net.init, opt, key, layout)
    result["step"] = refusal(fs.make_train_step(loss_of(net), opt), state, BATCH, kind=RankError)
    result["evaluate"] = refusal(fs.evaluate(loss_of(net)), state, BATCH, kind=RankError)
    fs.debug.check_replicas(state)
    result["check_replicas"] = refusal(fs.debug.check_replicas, state, net, kind=ReplicaError)
    return result


def test_buffers_that_differ_between_ranks_are_refused_by_name():
    tables = [Table(rank) for rank in range(2)]
    for found in run_ranks(refusals, 2, timeout=60.0):
        for way in ("init_state", "setup"):
            _, *rows, _ = found[way].split("\n")
            assert rows == [
                f"  buffers.{name}: rank 1 has {told(getattr(tables[1], name))},"
                f" rank 0 has {told(getattr(tables[0], name))}"
                for name in ("table", "mask", "shift")
            ]
        for way in ("step", "evaluate"):
            _, *rows, mend = found[way].split("\n")
            for rank, row in zip((1, 0), rows, strict=True):
                checksums = [told(getattr(tables[rank], name)).split()[-1] for name in ("table", "mask", "shift")]
                assert row.startswith(f"  rank {rank} (dp={rank}): computes with table of checksum {checksums[0]}"), way
                assert f"shift of checksum {checksums[2]}" in row
            assert mend.startswith("Build the module from one seed")
        rows = found["check_replicas"].split("\n")[1:-1]
        assert [row.split("[")[0] for row in rows] == [f"  buffers.{name}" for name in ("mask", "shift", "table")]


class Staged(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)
        self.register_buffer("table", torch.full((4,), float(seed)))


PARTS = fs.hf.families.Parts(
    embed=lambda net, batch: net.embed(batch["x"]) * net.table,
    block=lambda net, layer, x: layer(x),
    head=lambda net, x, batch: (net.head(x).square().sum(), batch["x"].numel()),
)


def refusals_of_model():
    model = fs.model_from_module(Staged(torch.distributed.get_rank()), ("embed", "layers.*", "head"), PARTS)
    layout, opt, key = fs.plan_layout(model, mesh_of({"dp": 2})), fs.sgd(0.1), fs.random.key(0)
    first = refusal(fs.init_state, model, opt, key, layout, kind=ConfigError)
    state, batch = fs.init_state(model.init, opt, key, layout), {"x": torch.arange(3)}
    return first, refusal(fs.make_train_step(model, opt), state, batch, kind=RankError)


def test_a_model_made_of_a_module_with_other_buffers_is_refused():
    for first, later in run_ranks(refusals_of_model, 2, timeout=60.0):
        assert "buffers.table: rank 1 has float32[4] of checksum" in first
        assert "rank 1 (dp=1): computes with table of checksum" in later


def trained(seed):
    mesh, net = mesh_of({"dp": 2}), fs.functionalize(Table(seed), ())
    state, step = fs.setup(net, loss_of(net), fs.sgd(0.1), fs.random.key(0), mesh=mesh)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    fs.debug.check_replicas(state, net)
    return float(metrics.loss)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_buffers_are_let_through(seed):
    module = Table(seed)
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        loss = module(BATCH["x"]).square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    for found in run_ranks(trained, 2, seed, timeout=60.0):
        assert found == pytest.approx(loss.item(), rel=1e-5)


# ------------------------------------------------------------------------------------------- buffers that are written
class Block(nn.Module):
    """A norm, and a linear whose spectral norm the forward estimates; a custom count that the forward replaces."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.linear = kind(6), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        return x + torch.tanh(self.linear(self.norm(x)))


class Deep(nn.Module):
    """Blocks in a stack, a norm in a unit of its own, and one in no unit."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.mid, self.last, self.head = kind(6), kind(6, momentum=None), nn.Linear(6, 3)

    def forward(self, x):
        x = self.up(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(torch.relu(self.mid(x))))


UNITS, STEPS = ("up", "layers.*", "mid", "head"), 3
ROWS = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1)) * 2 + 5
FRUGAL = fs.policies.nothing_saveable


def made(kind, **options):
    return fs.functionalize(Deep(kind), UNITS, buffers="layers.*.calls", **options)


def trained_loss(net):
    def loss(params, batch, buffers):
        y, buffers = net(params, batch["x"], buffers=buffers)
        return (y.square().sum(), y.numel()), buffers

    return loss


def steps_of_torch(kind, rows, microbatches=1):
    """Losses, and the module that plain torch has trained on some rows of each batch."""
    module, losses = Deep(kind), []
    opt = torch.optim.SGD(module.parameters(), lr=0.05)
    for x in ROWS:
        loss = sum(module(part).square().mean() for part in x[rows].chunk(microbatches)) / microbatches
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, module


def batch_of(x, mesh):
    index, count = fs.data_rank_and_size(mesh)
    return {"x": x.chunk(count)[index]}


def run_steps(net, mesh, strategy="zero3", state=None, rows=ROWS, **options):
    """The losses of a run, and the state at its end."""
    layout = fs.plan_layout(net, mesh, strategy=fs.Strategy.parse(strategy), tp="replicate")
    opt, losses = fs.sgd(0.05), []
    state = fs.init_state(net, opt, fs.random.key(0), layout) if state is None else state
    step = fs.make_train_step(trained_loss(net), opt, **options)
    for x in rows:
        state, metrics = step(state, batch_of(x, mesh))
        losses.append(metrics.loss.item())
    return losses, state


def bits(state):
    return fs.unshard(state.params), dict(state.buffers)


def close_to_module(state, module, what):
    """Parameters and buffers of a state against a module of torch."""
    net = made(nn.SyncBatchNorm)
    found = net.state_dict(fs.unshard(state.params), state.buffers)
    want = module.state_dict()
    assert {*found} == {*want}
    assert_trees_close(found, dict(want), rtol=1e-4, atol=1e-5, what=what)


def every_strategy(kind, options):
    mesh, result = mesh_of({"dp": 2}), {}
    for strategy in ("zero0", "zero1", "zero2", "zero3"):
        for policy in (fs.policies.save_except_gathered, FRUGAL):
            losses, state = run_steps(made(kind, policy=policy), mesh, strategy, **options)
            fs.debug.check_replicas(state)
            result[f"{strategy}, {policy.name}"] = losses, *bits(state)
    return result


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.BatchNorm1d, {}),
        (nn.SyncBatchNorm, {"microbatches": 2}),
        pytest.param(nn.BatchNorm1d, {"microbatches": 2, "check": "async"}, marks=full),
        pytest.param(nn.SyncBatchNorm, {"check": "async", "donate": True}, marks=full),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_strategy_and_policy_gives_the_same_bits_on_every_rank(kind, options):
    first, second = run_ranks(every_strategy, 2, kind, options, timeout=120.0)
    for name in first:
        # zero2 and zero3 sum microbatches over ranks one by one, the others all at once.
        like = "zero2" if "microbatches" in options and name.startswith(("zero2", "zero3")) else "zero0"
        assert_bitwise_equal(first[name], first[f"{like}, save_except_gathered"], name)
    assert_bitwise_equal(first, second)


def synchronized(microbatches):
    mesh = mesh_of({"dp": 2})
    losses, state = run_steps(made(nn.SyncBatchNorm), mesh, microbatches=microbatches)
    evaluated = fs.evaluate(trained_loss(made(nn.SyncBatchNorm)))(state, batch_of(ROWS[0], mesh))
    close_to_module(state, steps_in_order(microbatches)[1], f"{microbatches} microbatches")
    return losses, float(evaluated.mean)


def steps_in_order(microbatches):
    """Plain torch, where microbatch i is the joint one of both ranks."""
    order = torch.cat(
        [torch.arange(8).chunk(2)[rank].chunk(microbatches)[i] for i in range(microbatches) for rank in (0, 1)]
    )
    return steps_of_torch(nn.BatchNorm1d, order, microbatches)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_synchronized_statistics_are_those_of_one_process_on_the_full_batch(microbatches):
    losses, module = steps_in_order(microbatches)
    want = module.eval()(ROWS[0]).square().mean().item()
    for found, evaluated in run_ranks(synchronized, 2, microbatches, timeout=60.0):
        assert_trees_close(found, losses, rtol=1e-4, what="losses")
        assert evaluated == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_process_trains_as_plain_torch(kind, microbatches):
    losses, module = steps_of_torch(nn.BatchNorm1d, torch.arange(8), microbatches)
    found, state = run_steps(made(kind), mesh_of({"dp": 1}), microbatches=microbatches)
    assert_trees_close(found, losses, rtol=1e-4, what="losses")
    close_to_module(state, module, "state")


def like_ddp():
    """DDP and we, on two ranks: its rank 0 has the buffers that a checkpoint of it would have."""
    mesh, module = mesh_of({"dp": 2}), Deep(nn.BatchNorm1d)
    ddp, losses = nn.parallel.DistributedDataParallel(module), []
    opt = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for x in ROWS:
        loss = ddp(batch_of(x, mesh)["x"]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    found, state = run_steps(made(nn.BatchNorm1d), mesh)
    return losses, found, dict(module.named_buffers()), dict(state.buffers)


def test_statistics_of_each_rank_end_as_those_of_torchs_ddp():
    results = run_ranks(like_ddp, 2, timeout=60.0)
    want = [sum(losses) / 2 for losses in zip(*(losses for losses, _, _, _ in results), strict=True)]
    buffers = results[0][2]
    for _, found, _, ours in results:
        assert_trees_close(found, want, rtol=1e-4, what="losses")
        assert_trees_close(ours, buffers, rtol=1e-4, atol=1e-5, what="buffers")


def saved_and_moved(folder):
    net, mesh = made(nn.SyncBatchNorm), mesh_of({"dp": 2})
    losses, whole = run_steps(net, mesh)
    _, state = run_steps(net, mesh, rows=ROWS[:2])
    fs.checkpoint.save(f"{folder}/2", state)
    with fs.checkpoint.Checkpointer(f"{folder}/many", every=1) as checkpointer:
        checkpointer.save(state)
    layout = fs.plan_layout(net, mesh, strategy=fs.zero(1))
    starts = {
        "loaded": fs.checkpoint.load(f"{folder}/2", layout),
        "loaded, opt": fs.checkpoint.load(f"{folder}/2", layout, opt=fs.sgd(0.05)),
        "kept": checkpointer.load(layout),
        "moved": fs.reshard(state, layout),
        "donated": fs.reshard(fs.reshard(state, layout), state.layout, donate=True),
    }
    for name, start in starts.items():
        assert_bitwise_equal(dict(start.buffers), dict(state.buffers), name)
        again, end = run_steps(net, mesh, state=start, rows=ROWS[2:])
        assert again == losses[2:], name
        assert_bitwise_equal(bits(end), bits(whole), name)
    return bits(state)


def test_checkpoints_and_reshard_carry_buffers(tmp_path):
    (params, buffers), _ = run_ranks(saved_and_moved, 2, str(tmp_path), timeout=60.0)
    net = made(nn.SyncBatchNorm)
    layout = fs.plan_layout(net, mesh_of({"dp": 1}))
    state = fs.checkpoint.load(tmp_path / "2", layout)
    assert_bitwise_equal(bits(state), (params, buffers), "on one process")
    named = fs.checkpoint.load_leaves(tmp_path / "2", "buffers")
    assert_bitwise_equal({path.removeprefix("buffers."): x for path, x in named.items()}, buffers)
    fs.checkpoint.reshard_checkpoint(tmp_path / "2", tmp_path / "offline", {"dp": 4}, fs.zero(3))
    assert_bitwise_equal(bits(fs.checkpoint.load(tmp_path / "offline", layout)), (params, buffers), "offline")
    # Weights for other programs, and for torch itself.
    exported = fs.foreign.export(tmp_path / "2", tmp_path / "model.pt", "torch", net.sources)
    plain = torch.load(exported.path, weights_only=True)
    assert_bitwise_equal(plain, net.state_dict(params, buffers), "exported")
    Deep(nn.BatchNorm1d).load_state_dict(plain)


def losses_of(rank_seed):
    torch.manual_seed(torch.distributed.get_rank() if rank_seed else 0)
    module = nn.Sequential(nn.Linear(4, 6), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    net, mesh = fs.functionalize(module, ()), mesh_of({"dp": 2})
    layout, opt, key = fs.plan_layout(net, mesh), fs.sgd(0.1), fs.random.key(0)
    params = fs.init_state(net.init, opt, key, layout).params
    first = refusal(fs.init_state, net, opt, key, layout, kind=ConfigError)
    return first, refusal(fs.state_from_params, params, opt, key, layout, buffers=net.init_buffers(), kind=ConfigError)


def test_written_buffers_that_begin_differently_are_refused():
    for texts in run_ranks(losses_of, 2, True, timeout=60.0):
        for function, text in zip(("fs.init_state", "fs.state_from_params"), texts, strict=True):
            assert text.startswith(f"{function} got different first values on different ranks.")
            assert "buffers.1.parametrizations.weight.0._u: rank 1 has float32[3] of checksum" in text


def by_hand():
    """A step that is written out: its new buffers are sent from rank 0 to all."""
    net, mesh = made(nn.BatchNorm1d), mesh_of({"dp": 2})
    opt, loss_fn = fs.sgd(0.05), trained_loss(net)
    state = fs.init_state(net, opt, fs.random.key(0), fs.plan_layout(net, mesh))
    for x in ROWS:
        grad_fn = fs.value_and_grad(loss_fn, has_aux=True, grads=state.layout.main)
        (_, buffers), grads = grad_fn(state.params, batch_of(x, mesh), state.buffers)
        state = fs.update(state, grads, opt).replace(buffers=fs.sync_buffers(buffers, mesh))
    fs.debug.check_replicas(state)
    _, want = run_steps(net, mesh)
    assert_bitwise_equal(dict(state.buffers), dict(want.buffers))
    assert_trees_close(fs.unshard(state.params), fs.unshard(want.params), rtol=1e-5, atol=1e-6, what="by hand")


def test_steps_by_hand_send_the_buffers_of_rank_0():
    run_ranks(by_hand, 2, timeout=60.0)


def captured_steps(axes, how):
    """Compare a captured step with the step itself: the bits of the state after each call."""
    mesh, net = mesh_of(axes, transport="native"), fs.functionalize(Normed(), ("up", "norm", "down"), buffers="calls")
    layout, opt = fs.plan_layout(net, mesh), fs.sgd(0.05)
    rows, runs = [batch_of(x, mesh) for x in (*ROWS, ROWS[0] * torch.inf)], []
    for capture in (False, True):
        state = fs.init_state(net, opt, fs.random.key(0), layout)
        step, seen = fs.make_train_step(trained_loss(net), opt, check="async", **how), []
        step = captured(step, state, rows[0], Tape()) if capture else step
        for x in rows:
            state, metrics = step(state, x)
            seen.append((bool(metrics.skipped), all_bits(state)))
        assert [skipped for skipped, _ in seen] == [False] * STEPS + [True]
        refusal(lambda last=metrics: last.loss, kind=NonFiniteError)
        assert_bitwise_equal(seen[-1][1], seen[-2][1], "a refused step keeps the buffers")
        assert int(state.buffers["calls"]) == STEPS * how.get("microbatches", 1)
        runs.append(seen)
    assert_bitwise_equal(*runs)


class Normed(nn.Module):
    """Two norms, one of them in a unit, a spectral norm, and a count that the forward replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.down = nn.Sequential(nn.SyncBatchNorm(6), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.down(torch.relu(self.norm(self.up(x))))


@pytest.mark.parametrize("how", [{}, {"microbatches": 2, "donate": True}], ids=str)
def test_steps_that_write_buffers_are_captured(how):
    captured_steps({"dp": 1}, how)
    run_ranks(captured_steps, 2, {"dp": 2}, how, timeout=60.0)


def test_modules_that_draw_are_not_captured():
    net = fs.functionalize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), ())

    def loss(params, batch, key):
        return net(params, batch["x"], random_key=key).square().sum()

    state, step = fs.setup(net, loss, fs.sgd(0.1), fs.random.key(0), mesh=mesh_of({"dp": 1}), check="async")
    text = refusal(fs.testing.assert_capturable, step, state, BATCH, kind=TransformError)
    assert text.startswith("fs.testing.assert_capturable cannot capture a step in which the host reads the device.")
    assert "Drop with fs.random.dropout: a module with random_key= is seeded by the host." in text


def test_sync_buffers_keeps_every_bit_of_every_dtype():
    run_ranks(synced, 2, timeout=30.0)


def synced():
    rank, mesh = torch.distributed.get_rank(), mesh_of({"dp": 2})
    values = {
        "nan": torch.tensor([float("nan"), -0.0, 1e-45]), "half": torch.arange(3).bfloat16(), "flag": torch.tensor(True),
        "count": torch.tensor(-(2**62)), "wide": torch.rand(5, dtype=torch.float64), "none": torch.zeros(0),
        "byte": torch.tensor([[1], [255]], dtype=torch.uint8),
    }  # fmt: skip
    given = values if rank == 0 else {name: torch.zeros_like(x) for name, x in values.items()}
    torch.manual_seed(0)
    values["wide"].copy_(torch.rand(5, dtype=torch.float64))
    assert_bitwise_equal(fs.sync_buffers(given, mesh), values)


MESHES = {"dp": {"dp": 4}, "hsdp": {"replica": 2, "dp": 2}, "ep": {"dp": 2, "ep": 2}, "tp": {"dp": 2, "tp": 2}}


def on_meshes():
    result = {}
    for name, axes in MESHES.items():
        mesh, strategy = mesh_of(axes), "hsdp" if name == "hsdp" else "zero3"
        losses, state = run_steps(made(nn.SyncBatchNorm), mesh, strategy)
        fs.debug.check_replicas(state)
        close_to_module(state, steps_of_torch(nn.BatchNorm1d, torch.arange(8))[1], name)
        result[name] = losses
    return result


def test_statistics_are_summed_over_every_data_axis():
    want, _ = steps_of_torch(nn.BatchNorm1d, torch.arange(8))
    for found in run_ranks(on_meshes, 4, timeout=60.0):
        for name in MESHES:
            assert_trees_close(found[name], want, rtol=1e-4, what=name)
